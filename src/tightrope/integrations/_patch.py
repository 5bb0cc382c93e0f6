"""``patch`` and ``unpatch``: replace the rotary functions of a model in one call, and restore them."""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from .. import stacks
from .._errors import OPERATION, bad_type, bad_value, describe, outside, public, sentence
from . import _find, _graft, _tables
from ._candidate import Candidate
from ._classes import MARK, base_of, core_of, derived, graft_of
from ._code import every_name
from ._find import Constants, Found
from ._probe import READS
from ._recognise import Recognition, recognise_member, to_the_bit
from ._report import Entry, Report, entry_of

ANGLES, ROUNDINGS, STACKS = ("model", "exact"), ("model", "once"), ("vllm", "vllm-native", "sglang")
_LOST = "it is not what its module has under its name, so a pickled model could not find it"
_UNREACHED = "which patch does not see call it; call patch before you replace it"
_ALL_MODELS = (
    f"; to {OPERATION} all models of transformers, call "
    f"tightrope.integrations.transformers.{OPERATION}()"
)

# The default of `model`: a call without a model raises our error, which names the call for all models.
_NEEDED: Any = None

# The attribute in which a module stores its processors: name -> (the copy in use, the original, the
# attributes that both had).
PROCESSORS = "_tightrope_processors"

_Results = list[tuple[Found, Constants, Recognition]]


@public("patch")
def patch(
    model: torch.nn.Module = _NEEDED,
    *,
    angles: str = "model",
    rounding: str = "model",
    stack: str | None = None,
) -> Report:
    """Replace the rotary functions of a model with the fused operator.

    Every rotary function that the methods of the model's modules call is tested numerically (see
    :func:`recognise`) and replaced if it is recognised: functions, methods, functions inside a
    method's body, and those of processors, which are plain objects that modules call. Other functions
    are left unchanged and listed in the report. A replacement runs the operator, or the original
    function in the calls that the report names. Other models are not affected.

    A module whose ``forward`` was replaced by a wrapper is patched if the module keeps the old ``forward``
    in an attribute, as hooks of accelerate do. Other such modules are left and listed. ``unpatch(model)``
    undoes the patch, and so does the end of a block ``with patch(model):``.

    Args:
        model: any Module, of any library, on any device including meta. It is required; for all models of
            transformers that are built later, call :func:`tightrope.integrations.transformers.patch` without one.
        angles: "model" keeps the cosines and sines that the model makes. "exact" uses this library's,
            which are exact at any position and computed in float32 (float64 for a float64 model);
            only for modules that make them as those of transformers do.
        rounding: "model" keeps the bits of results and gradients: each function's own roundings are
            found by comparing bits on the CPU, and calls whose bits were not found to be equal run the
            original. "once" rounds results only when they are stored, which is more exact. With exact
            angles, which change bits anyway, results always round once.
        stack: "vllm", "vllm-native" or "sglang": rotate as that server does, with its frequencies, tables
            and roundings, forward and backward; see :mod:`tightrope.stacks`. For modules that make
            cosines and sines as those of transformers do, from a configuration.

    Returns:
        A report with one entry per function (and combination of constants with which the model calls
        it), with the calls in which the original still runs, and, with exact angles or a stack, one entry
        per class that makes cosines and sines.

    Raises:
        TypeError: model is not a Module.
        ValueError: an unknown value of angles, rounding or stack; exact angles or a stack for a model of
            which a rotary function, or with a stack a module that makes tables, is not replaced; or a model
            that was patched with an option, such as ``stack="vllm"``, and would lose it, as neither that
            option nor another in its place is given. Nothing is changed then.

    >>> from transformers import GPTNeoXConfig, GPTNeoXModel
    >>> model = GPTNeoXModel(GPTNeoXConfig(hidden_size=128, num_hidden_layers=1, vocab_size=9))
    >>> with patch(model) as report:
    ...     print([entry.name for entry in report.replaced])
    ['apply_rotary_pos_emb']
    """
    check(model, angles, rounding, stack)
    exchanged = angles == "exact" or stack is not None
    if not exchanged:
        _check_no_option_is_lost(model, rounding)
    if exchanged:
        rounding = "once" if stack is None else stacks.get(stack).rounding[0]
    found = _found(model.modules(), rounding)
    left = _left(model, _recipe(found, rounding), exchanged)
    if left:
        found = _found((module for module in model.modules() if module not in left), rounding)
    made: dict[torch.nn.Module, tuple[_tables.Made | None, str]] = {}
    if exchanged:
        makers = [m for m in model.modules() if _tables.makes_angles(base_of(type(m)))]
        made = {module: _tables.read(module, stack) for module in makers if module not in left}
        _check_consumers(model, found, made, stack)
    _warn_of_record(model, found)
    _undo(model)
    narrow = any(each is not None for each, _ in made.values())
    recipe = _recipe(found, rounding, narrow)
    report = Report([entry_of(f.module, f.name, r, rounding, named) for f, named, r in found])
    report._undo = functools.partial(_undo_if_alive, weakref.ref(model))
    latest[model] = report
    try:
        _apply(model, recipe, report, left, made if exchanged else None)
    except BaseException:  # code of the model may raise while its classes or processors change
        _undo(model)
        raise
    return report


def _apply(
    model: torch.nn.Module,
    recipe: _graft.Recipe,
    report: Report,
    left: dict[torch.nn.Module, Entry],
    exchanged: dict[torch.nn.Module, tuple[_tables.Made | None, str]] | None,
) -> None:
    """Give the modules of a model their patched classes, and fill in the report.

    Args:
        exchanged: what takes the place of the tables that modules make; None if all keep their own.
    """
    made = exchanged or {}
    lines: list[Entry] = []
    copies: dict[int, Any] = {}
    made_classes: dict[tuple[type, type], type] = {}
    for name in _tables.nans(model):
        report.notes.append(f"note: {name} holds NaN, and so will what it rotates")
    for module in model.modules():
        if module in left:
            continue
        mine, reason = made.get(module, (None, ""))
        if module in made:
            lines.append(_tables.entry(module, mine, reason))
            if mine is not None and (note := _tables.note(module)) and note not in report.notes:
                report.notes.append(note)
        cls, own = type(module), recipe._replace(tables=mine is not None)
        _graft.apply(module, derived(cls, _graft.grafted(core_of(cls), own), made_classes))
        _replace_processors(module, recipe, copies)
        if mine is not None:
            vars(module)[_tables.KEPT] = mine
    if exchanged is not None and not lines and not any(_tables.makes_angles(type(m)) for m in left):
        cls, reason = type(model), f"none of its modules {_tables.NO_ANGLES}"
        lines.append(Entry(cls.__module__, cls.__qualname__, None, False, reason))
    report.entries.extend(dict.fromkeys([*lines, *left.values()]))
    for swap in recipe.swaps:
        counts = _graft.replacement_of(swap, recipe)._tightrope_counts
        report._counts[swap.module, swap.name] = counts, tuple(counts)


@public("unpatch")
def unpatch(model: torch.nn.Module = _NEEDED) -> None:
    """Undo :func:`patch`: the model computes what it did before, bit for bit.

    Args:
        model: a patched model; required.

    Raises:
        TypeError: model is not a Module.
    """
    check(model)
    _undo(model)


#: The report of the last patch of a model, unless it was undone, alone or with a model that contains it.
latest: weakref.WeakKeyDictionary[torch.nn.Module, Report] = weakref.WeakKeyDictionary()


def _undo_if_alive(model: weakref.ref[torch.nn.Module]) -> None:
    if (alive := model()) is not None:
        unpatch(alive)


def _undo(model: torch.nn.Module) -> None:
    for module in model.modules():
        cls = core_of(type(module))
        if hasattr(cls, MARK) and graft_of(cls) is None:
            raise bad_value(
                f"model must have the classes that patch gave it but {cls.__qualname__} is derived from a "
                "class that patch made; unpatch the model before you derive from its classes"
            )
    made: dict[tuple[type, type], type] = {}
    for module in model.modules():
        latest.pop(module, None)
        core = core_of(type(module))
        for name, _value in _graft.hidden(module) if graft_of(core) is not None else ():
            if name in vars(core):
                warnings.warn(
                    f"{core.__qualname__}.{name} was wrapped after patch(model), and the wrapper may still call the "
                    "patched method; remove the wrapper before unpatch(model)",
                    stacklevel=outside(),
                )
        _graft.apply(module, derived(type(module), base_of(type(module)), made))
        vars(module).pop(_tables.KEPT, None)
        for name, (mine, original, before) in vars(module).pop(PROCESSORS, {}).items():
            if vars(module).get(name) is not mine:
                continue
            now = _state(mine)
            if now.keys() == before.keys() and all(now[key] is before[key] for key in now):
                vars(module)[name] = original
            else:  # other models may share the original
                mine.__class__ = base_of(type(mine))


def check(
    model: object, angles: str = "model", rounding: str = "model", stack: str | None = None
) -> None:
    """Raise an error for invalid arguments of :func:`patch`."""
    if not isinstance(model, torch.nn.Module):
        hint = "" if model is not None else _ALL_MODELS
        held = getattr(model, "__dict__", None) or {}
        if names := [name for name in held if isinstance(held[name], torch.nn.Module)]:
            first = "transformer" if "transformer" in names else names[0]
            hint = f", whose modules are {', '.join(names)}; call {OPERATION}(pipeline.{first})"
            model = type(model).__name__
            raise bad_type(f"model must be a torch.nn.Module but got a {model}{hint}")
        raise bad_type(f"model must be a torch.nn.Module but got {describe(model)}{hint}")
    if angles not in ANGLES:
        raise bad_value(f"angles must be one of {', '.join(ANGLES)} but got {angles!r}")
    if rounding not in ROUNDINGS:
        raise bad_value(f"rounding must be one of {', '.join(ROUNDINGS)} but got {rounding!r}")
    if stack is not None and stack not in STACKS:
        raise bad_value(f"stack must be one of {', '.join(STACKS)} but got {stack!r}")
    if stack is not None and (angles, rounding) != ("model", "model"):
        raise bad_value(
            f"angles and rounding must not be given with stack={stack!r}, which decides both"
        )


def _check_no_option_is_lost(model: torch.nn.Module, rounding: str) -> None:
    """Refuse to patch with the model's own angles what was patched with an option: its bits would change in silence."""
    kept = [vars(module).get(_tables.KEPT) for module in model.modules()]
    options = [
        "angles='exact'" if made.stack is None else f"stack={made.stack!r}"
        for made in kept
        if made is not None
    ]
    grafts = [graft_of(core_of(type(module))) for module in model.modules()]
    if rounding == "model":
        once = [graft for graft in grafts if graft and graft.recipe.rounding == "once"]
        options += ["rounding='once'"] * len(once)
    if options:
        raise bad_value(
            f"model must be patched with the same option again, or unpatched before, but was patched with "
            f"{options[0]}; call patch(model, {options[0]}), or unpatch(model) first"
        )


def _warn_of_record(model: torch.nn.Module, found: _Results) -> None:
    """Warn if the record of a conversion states that the weights have another pairing than the model's code."""
    from ..config import records_of
    from ..config.files import Record

    records: list[Record] = []
    with suppress(OSError, ValueError):  # a name that is no path, or a record that is none
        found_of = records_of(getattr(model, "config", None))
        records = [record for each in found_of.values() for record in each]
    codes = {
        result.candidate.rotation.pairs for *_, result in found if result.candidate is not None
    }
    other = [one for one in records if ("interleaved" if one.interleaved else "half") not in codes]
    if not other or not codes:
        return
    kinds = {"half": "halves", "interleaved": "adjacent channels"}
    text = (
        f"the model's code pairs {kinds[min(codes)]}, but {other[0].where} beside its weights states that "
        f"{min(other[0].tensors)} and others have the other pairing; patch keeps what the code does, so outputs are wrong: "
        "convert the weights back, or load them into code of their pairing"
    )
    warnings.warn(sentence("patch", text), stacklevel=outside())


def _check_consumers(
    model: torch.nn.Module,
    found: _Results,
    made: dict[torch.nn.Module, tuple[_tables.Made | None, str]],
    stack: str | None,
) -> None:
    """Refuse to exchange tables that code reads which is not replaced: it may rely on their values or dtype."""
    option = "angles='exact'" if stack is None else f"stack={stack!r}"
    if not any(each is not None for each, _ in made.values()):
        reasons = [reason for _, reason in made.values()] or ["no module of it makes them"]
        if stack is not None:
            raise bad_value(
                f"model must make cosines and sines that {option} can exchange, but does not ({reasons[0]})"
            )
        return
    lost = [f"{each.name} ({result.reason})" for each, _, result in found if not result]
    if stack is not None:
        lost += [
            f"{base_of(type(module)).__name__} ({reason})"
            for module, (each, reason) in made.items()
            if each is None and _tables.is_usual(base_of(type(module)))
        ]
    makers = {base_of(type(module)) for module, (each, _) in made.items() if each is not None}
    homes = {cls.__module__.partition(".")[0] for cls in makers}
    names = {
        name
        for module in model.modules()
        for name, child in module.named_children()
        if base_of(type(child)) in makers
    }
    for cls in dict.fromkeys(_classes(model.modules())):
        if cls.__module__.partition(".")[0] not in homes:
            lost += [
                f"{cls.__qualname__}.{name} (which reads {', '.join(sorted(read))})"
                for _owner, name, _value, function in _find.methods(cls)
                if name != "__init__" and (read := names & every_name(function.__code__))
            ]
    if lost:
        raise bad_value(
            f"model must have no code that may read its cosines and sines and is not replaced, with {option}, but "
            f"has {', '.join(lost)}; call patch(model), which keeps the model's own{_part(model, made, option)}"
        )


def _part(
    model: torch.nn.Module,
    made: dict[torch.nn.Module, tuple[_tables.Made | None, str]],
    option: str,
) -> str:
    """Name the largest part of a model whose tables can all be exchanged, such as the text part; "" if none can."""
    for name, part in sorted(model.named_modules(), key=lambda each: each[0].count(".")):
        inside = [made[module][0] for module in part.modules() if module in made]
        if name and inside and None not in inside:
            return f", or patch(model.{name}, {option}) for that part alone"
    return ""


def _replace_processors(
    module: torch.nn.Module, recipe: _graft.Recipe, copies: dict[int, Any]
) -> None:
    """Give a module copies of its processors that call the replacements.

    Processors can be shared, also between models, so the originals stay as they are.
    """
    for name, original in list(_find.processors(module)):
        cls = _graft.grafted(type(original), recipe)
        if cls is type(original):
            continue
        if id(original) not in copies:
            copies[id(original)] = copy.copy(original)
            copies[id(original)].__class__ = cls
        mine = copies[id(original)]
        vars(module).setdefault(PROCESSORS, {})[name] = mine, original, _state(mine)
        vars(module)[name] = mine


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those in slots."""
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def _left(
    model: torch.nn.Module, recipe: _graft.Recipe, exchanged: bool
) -> dict[torch.nn.Module, Entry]:
    """The modules that would be changed but whose method was replaced by a function that may not call it."""
    left = {}
    for module in model.modules():
        hidden = dict(_graft.hidden(module))
        if not hidden:
            continue
        cls = base_of(type(module))
        grafted = _graft.grafted(cls, recipe)
        members = set(vars(grafted)) if grafted is not cls else set()
        used = [base_of(type(value)) for _name, value in _find.processors(module)]
        if (
            members
            or (exchanged and _tables.makes_angles(cls))
            or any(_graft.grafted(each, recipe) is not each for each in used)
        ):
            members.add("forward")
        for name, value in hidden.items():
            if name in members:
                wrapper = getattr(getattr(value, "func", value), "__qualname__", None)
                by = wrapper or type(value).__qualname__
                reason = f"its {name} was replaced by {by}, {_UNREACHED}"
                left[module] = Entry(cls.__module__, cls.__qualname__, None, False, reason)
    return left


def _recipe(found: _Results, rounding: str, narrow: bool = False) -> _graft.Recipe:
    """The recipe that replaces the functions that are recognised; it makes their replacements."""
    known: dict[tuple[str, str], dict[Constants, Candidate]] = {}
    for each, constants, result in found:
        if result.candidate is not None:
            known.setdefault((each.module, each.name), {})[constants] = result.candidate
    swaps = {
        _graft.Swap(*key, tuple(several)): [*several.values()] for key, several in known.items()
    }
    recipe = _graft.Recipe(tuple(swaps), rounding, narrow)
    for swap, candidates in swaps.items():
        _graft.replacement_of(swap, recipe, candidates)
    return recipe


def _classes(modules: Iterable[torch.nn.Module]) -> Iterator[type]:
    """Yield the original classes of modules and of their processors."""
    for module in modules:
        yield base_of(type(module))
        for _name, value in _find.processors(module):
            yield base_of(type(value))


def _differ(found: Found, calls: tuple[str, ...], modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether an object has other methods of these names than the class that defines a method."""
    owner: Any = found.owner
    if not calls:
        return False
    classes = [cls for cls in _classes(modules) if issubclass(cls, owner)]
    get = inspect.getattr_static
    return any(get(cls, name) is not get(owner, name) for cls in classes for name in calls) or any(
        name in vars(module) for module in modules if isinstance(module, owner) for name in calls
    )


def _found(modules: Iterable[torch.nn.Module], rounding: str) -> _Results:
    """The rotary functions of modules, each with each combination of constants, and their recognition."""
    known: dict[tuple[str, str, Constants], tuple[Found, Constants, Recognition]] = {}
    results: dict[tuple[str, str, Constants], tuple[Found, Constants, Recognition]] = {}
    modules = list(modules)

    def note(found: Found) -> None:
        key = found.module, found.name, ((found.unseen, None),)
        results[key] = found, (), Recognition(None, found.unseen)

    def accepts(found: Found) -> bool:
        recognised = []
        for constants in found.constants:
            key = found.module, found.name, constants
            if key not in known:
                recognition = recognise_member(found.value, found.owner, constants)
                if recognition.candidate and _differ(found, recognition.candidate.calls, modules):
                    recognition = Recognition(None, READS)
                if recognition and not _graft.can_be_found(found):
                    recognition = Recognition(None, _LOST)
                known[key] = found, constants, recognition
            recognised.append(known[key][2].candidate is not None)
        return all(recognised)

    for cls in dict.fromkeys(_classes(modules)):
        for found in _find.rotary(cls, accepts):
            if found.unseen:
                note(found)
                continue
            accepts(found)
            keys = [(found.module, found.name, constants) for constants in found.constants]
            results.update((key, known[key]) for key in keys)
    for module in modules:
        for found in _find.attributes(module):
            note(found)
    every = [each for each in results.values() if each[0].likely or each[2]]
    if rounding == "model":
        every = [(each, constants, to_the_bit(result)) for each, constants, result in every]
    return every
