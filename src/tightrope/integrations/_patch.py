"""``patch`` and ``unpatch``: replace the rotary functions of a model in one call, and restore them."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from .._errors import OPERATION, bad_type, bad_value, public
from ..forms import unwrapped
from . import _bound, _exact, _find, _graft
from ._candidate import Candidate
from ._classes import MARK, base_of, core_of, derived, graft_of
from ._find import PREFIX, Found
from ._inline import INLINE, Accepts, could_rotate
from ._readers import Readers, innermost, members_of
from ._recognise import Recognition, recognise_member, to_the_bit
from ._run import ROUNDINGS
from ._summary import Entry, Report, entry_of

ANGLES = ("model", "exact")
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


@public("patch")
def patch(
    model: torch.nn.Module = _NEEDED, *, angles: str = "model", rounding: str = "model"
) -> Report:
    """Replace the rotary functions of a model with the fused operator.

    Every rotary function that the methods of the model's modules call is tested numerically (see
    :func:`recognise`) and replaced if it is recognised: functions, methods, functions inside a
    method's body, and those of processors, which are plain objects that modules call. Other functions
    are left unchanged and listed in the report. A replacement runs the operator, or the original
    function in the calls that the report names. Other models are not affected.

    A module whose ``forward`` was replaced by a wrapper is patched if the wrapper can be seen to call the
    old one: a closure, a partial function, an object or an attribute holds it. Other such modules are
    left and listed. ``unpatch(model)`` undoes the patch; to see its report again, call ``patch`` again.

    Args:
        model: any Module, of any library, on any device including meta. It is required; for all models of
            transformers at once, call :func:`tightrope.integrations.transformers.patch` without one.
        angles: "model" keeps the cosines and sines that the model makes. "exact" uses this library's,
            which are exact at any position and computed in float32 (float64 for a float64 model);
            only for modules that make them as those of transformers do, and only where no code that
            reads them is seen that is not replaced.
        rounding: "model" keeps the bits of results and gradients: each function's own roundings are
            found by comparing bits on the CPU, and calls whose bits were not found to be equal run the
            original. "once" rounds results only when they are stored, which is more exact. With exact
            angles, which change bits anyway, results always round once.

    Returns:
        A report with one entry per function (and combination of constants with which the model calls
        it), with the calls in which the original still runs, and, with exact angles, one entry per class
        that makes cosines and sines.

    Raises:
        TypeError: model is not a Module.
        ValueError: an unknown value of angles or rounding, or angles="exact" for a model in which other
            code reads the cosines and sines; nothing is changed then.

    >>> from transformers import GPTNeoXConfig, GPTNeoXModel
    >>> model = GPTNeoXModel(GPTNeoXConfig(hidden_size=128, num_hidden_layers=1, vocab_size=9))
    >>> [entry.name for entry in patch(model).replaced]
    ['apply_rotary_pos_emb']
    >>> unpatch(model)
    """
    check(model, angles, rounding)
    if angles == "exact":
        rounding = "once"
    found = _found(model.modules(), rounding)
    left = _left(model, _swaps(found, rounding), angles)
    if left:
        found = _found((module for module in model.modules() if module not in left), rounding)
    exact = {
        module: _exact.read(module)
        for module in model.modules()
        if angles == "exact" and module not in left and _exact.makes_angles(base_of(type(module)))
    }
    makers = {base_of(type(module)) for module, (made, _) in exact.items() if made is not None}
    # Return float32 tables only if every function that reads them is replaced: a function that is
    # left, or was not found, may rely on the dtype.
    wide = (
        bool(makers)
        and _are_known(_readers_of(model, makers, found), makers)
        and not left
        and all(result for *_, result in found)
    )
    _undo(model)
    swaps = _swaps(found, rounding, wide)
    replaced = {(each.module, each.name) for each, _, result in found if result}
    report = Report(
        [
            entry_of(each.module, each.name, result, rounding, constants)
            for each, constants, result in found
            if result or not _only_inline(each, replaced)
        ]
    )
    lines: list[Entry] = []
    copies: dict[int, Any] = {}
    made_classes: dict[tuple[type, type], type] = {}
    for module in model.modules():
        if module in left:
            continue
        made, reason = exact.get(module, (None, ""))
        if module in exact:
            made = made and replace(made, wide=wide)
            lines.append(_exact.entry(module, made, reason))
            if made is not None and (note := _exact.note(module)) and note not in report.notes:
                report.notes.append(note)
        recipe = _graft.Recipe(swaps, angles=made is not None)
        cls = type(module)
        _graft.apply(module, derived(cls, _graft.grafted(core_of(cls), recipe), made_classes))
        _replace_processors(module, _graft.Recipe(swaps), copies)
        if made is not None:
            _exact.keep(module, made, by_library=False)
    if angles == "exact" and not lines and not any(_exact.makes_angles(type(m)) for m in left):
        cls, reason = type(model), f"none of its modules {_exact.NO_ANGLES}"
        lines.append(Entry(cls.__module__, cls.__qualname__, None, False, reason))
    report.entries.extend(dict.fromkeys([*lines, *left.values()]))
    return report


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
        _graft.apply(module, derived(type(module), base_of(type(module)), made))
        _exact.forget(module)
        for name, (mine, original, before) in vars(module).pop(PROCESSORS, {}).items():
            if vars(module).get(name) is not mine:
                continue
            now = _state(mine)
            if now.keys() == before.keys() and all(now[key] is before[key] for key in now):
                vars(module)[name] = original
            else:  # other models may share the original
                mine.__class__ = base_of(type(mine))


def _readers_of(
    model: torch.nn.Module,
    makers: set[type],
    found: list[tuple[Found, _find.Constants, Recognition]],
) -> Readers:
    """The code that reads the tables of modules of some classes."""
    left = {(each.module, each.name) for each, _, result in found if not result}
    done = [each for each, *_ in found if (each.module, each.name) not in left]
    names = {(each.module, each.name) for each in done}
    replaced = names | {innermost(each.value) for each in done}

    def accepts(function: FunctionType) -> Accepts:
        start = function.__module__, f"{function.__qualname__}{INLINE}"
        return lambda text: PREFIX if (start[0], start[1] + text) in names else None

    return Readers(_classes(model.modules()), members_of(model), makers, replaced, accepts)


def _are_known(readers: Readers, makers: set[type]) -> bool:
    """Return whether all code that reads tables is known to be replaced; raise an error if some is not."""
    if not readers.found:
        return makers <= readers.seen and not readers.unread
    names = ", ".join(sorted(cls.__name__ for cls in makers))
    code = ", ".join(f"{name} ({text})" for name, text in sorted(readers.found.items()))
    raise bad_value(
        "angles must be 'model' but got 'exact' for a model in which code that is not replaced reads the cosines "
        f"and sines of {names}: {code}; call patch(model), which keeps the model's own"
    )


def check(model: object, angles: str = "model", rounding: str = "model") -> None:
    """Raise an error for invalid arguments of :func:`patch`."""
    if not isinstance(model, torch.nn.Module):
        hint = "" if model is not None else _ALL_MODELS
        raise bad_type(f"model must be a torch.nn.Module but got {model!r}{hint}")
    if angles not in ANGLES:
        raise bad_value(f"angles must be one of {', '.join(ANGLES)} but got {angles!r}")
    if rounding not in ROUNDINGS:
        raise bad_value(f"rounding must be one of {', '.join(ROUNDINGS)} but got {rounding!r}")


def _only_inline(found: Found, replaced: set[tuple[str, str]]) -> bool:
    """Return whether all rotations of a function are replaced expressions, which have entries of their own."""
    plain = unwrapped(found.value)
    if not isinstance(plain, FunctionType):
        return False
    start = f"{plain.__qualname__}{INLINE}"
    return any(name.startswith(start) for _, name in replaced) and not could_rotate(
        plain,
        lambda text: "_" if (plain.__module__, start + text) in replaced else None,
        tables=True,
    )


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
    model: torch.nn.Module, swaps: tuple[_graft.Swap, ...], angles: str
) -> dict[torch.nn.Module, Entry]:
    """The modules that would be changed but whose method was replaced by a function that may not call it."""
    recipe = _graft.Recipe(swaps)
    left = {}
    for module in model.modules():
        hidden = dict(_bound.hidden(module))
        if not hidden:
            continue
        cls = base_of(type(module))
        grafted = _graft.grafted(cls, recipe)
        members = set(vars(grafted)) if grafted is not cls else set()
        used = [base_of(type(value)) for _name, value in _find.processors(module)]
        if (
            members
            or (angles == "exact" and _exact.makes_angles(cls))
            or any(_graft.grafted(each, recipe) is not each for each in used)
        ):
            members.add("forward")
        for name, value in hidden.items():
            if name in members:
                reason = f"its {name} was replaced by {_bound.name_of(value)}, {_UNREACHED}"
                left[module] = Entry(cls.__module__, cls.__qualname__, None, False, reason)
    return left


def _swaps(
    found: list[tuple[Found, _find.Constants, Recognition]], rounding: str, wide: bool = False
) -> tuple[_graft.Swap, ...]:
    """The replacements of the functions that are recognised."""
    candidates: dict[tuple[str, str], tuple[Candidate, ...]] = {}
    for each, _, result in found:
        if result.candidate is not None:
            key = each.module, each.name
            candidates[key] = (*candidates.get(key, ()), result.candidate)
    return tuple(_graft.Swap(*key, several, wide, rounding) for key, several in candidates.items())


def _classes(modules: Iterable[torch.nn.Module]) -> Iterator[type]:
    """Yield the original classes of modules and of their processors."""
    for module in modules:
        yield base_of(type(module))
        for _name, value in _find.processors(module):
            yield base_of(type(value))


def _found(
    modules: Iterable[torch.nn.Module], rounding: str
) -> list[tuple[Found, _find.Constants, Recognition]]:
    """The rotary functions of modules, each with each combination of constants, and their recognition."""
    results: dict[tuple[str, str, _find.Constants], tuple[Found, _find.Constants, Recognition]] = {}
    # Equal expressions in several functions of a module are one function with several names.
    inline: dict[int, Recognition] = {}
    modules = list(modules)

    def note(found: Found) -> None:
        key = found.module, found.name, ((found.unseen, None),)
        results[key] = found, (), Recognition(None, found.unseen)

    for cls in dict.fromkeys(_classes(modules)):

        def accepts(found: Found) -> bool:
            recognised = []
            for constants in found.constants:
                key = found.module, found.name, constants
                if key not in results:
                    if id(found.value) in inline:
                        recognition = inline[id(found.value)]
                    else:
                        recognition = recognise_member(found.value, found.method, constants)
                        if INLINE in found.name:
                            inline[id(found.value)] = recognition
                    if recognition and not _graft.can_be_found(found):
                        recognition = Recognition(None, _LOST)
                    results[key] = found, constants, recognition
                recognised.append(results[key][2].candidate is not None)
            return all(recognised)

        for found in _find.rotary(cls, accepts):
            (note if found.unseen else accepts)(found)
    for module in modules:
        for found in _find.attributes(module):
            note(found)
    every = [each for each in results.values() if each[0].likely or each[2]]
    if rounding == "model":
        every = [(each, constants, to_the_bit(result)) for each, constants, result in every]
    return every
