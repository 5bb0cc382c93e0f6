"""``patch`` and ``unpatch``: rotary functions of a model's files, replaced under their names, for the whole process."""

from __future__ import annotations

import functools
import gc
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from .. import stacks
from .._errors import OPERATION, bad_type, bad_value, describe, outside, public, sentence
from ..config import records_of
from . import _find, _tables
from ._find import Member
from ._report import Entry, Report
from ._turn import Kind, Served, replacement
from ._verify import find

ANGLES, ROUNDINGS, STACKS = ("model", "exact"), ("model", "once"), ("vllm", "vllm-native", "sglang")


@dataclass(frozen=True)
class Options:
    """The options of a patch that decide bits."""

    angles: str = "model"
    rounding: str = "model"
    stack: str | None = None
    all_models: bool = False

    @property
    def exchange(self) -> bool:
        """True if the tables of modules are exchanged."""
        return self.angles == "exact" or self.stack is not None

    @property
    def where(self) -> Any:
        """Where results round; None for the bits of each function."""
        if self.stack is not None:
            return stacks.get(self.stack).rounding
        return ("once", "once") if self.exchange or self.rounding != "model" else None

    def __str__(self) -> str:
        given = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return ", ".join(f"{e.name}={getattr(self, e.name)!r}" for e in given) or "no option"


class Patch(_tables.Kept):
    """A patch of a model. It lives as long as the model, or a deep copy of it, holds it."""

    def __init__(self, model: str, options: Options) -> None:
        self.model, self.options = model, options


@dataclass
class _Slot:
    """A member and what takes its place.

    Attributes:
        made: what is put there.
        entry: that of the report; None if there is none.
        served: the calls of a function; None for members of classes that make tables.
        counts: see :class:`Calls`; empty for a check.
        patches: the patches that use it.
    """

    member: Member
    made: Any
    options: Options
    entry: Entry | None = None
    served: Served | None = None
    counts: list[int] = field(default_factory=list)
    patches: weakref.WeakSet[Patch] = field(default_factory=weakref.WeakSet)

    def undo(self) -> None:
        """Restore what was there, unless other code has put something there since."""
        if self.served is not None:
            self.served.active = False  # others may have kept the replacement
        if self.member.now() is self.made:
            self.member.put(self.member.value)


_lock = threading.RLock()
# The number of `patch` and `unpatch` that run, of which one may call another.
_running = 0
# By owner and name.
_slots: dict[tuple[Any, str], _Slot] = {}
# The kinds of functions, by roles and type of device, as long as something is patched.
_kinds: dict[tuple[Any, str, str], Kind | None] = {}
_reports: weakref.WeakKeyDictionary[torch.nn.Module, Report] = weakref.WeakKeyDictionary()


@public("patch")
def patch(
    model: torch.nn.Module | None = None,
    *,
    angles: str = "model",
    rounding: str = "model",
    stack: str | None = None,
    functions: Mapping[Callable[..., Any], str] | None = None,
    all_models: bool = False,
) -> Report:
    """Replace the rotary functions in the files of a model's classes with the fused operator.

    Every function whose name has "rot" or "rope", and that the code of the model's classes names, is tried with random
    tensors. If it computes what a row of this library's tables computes, values, bits and gradients, a replacement takes
    its place in its module or class. **So it serves every model of that file in this process**, until each patched one is
    unpatched. The replacement runs the operator, or the original function in calls of a kind that was not compared.
    Other functions are left and listed in the report.

    Without options no bit of a result or gradient changes, also for other models of these files. With options that
    change bits, running a model of these files that is not patched raises an error, unless ``all_models`` is given.
    Threads that build or run models while others patch them may see either function.

    Args:
        model: any Module, of any library, on any device including meta. Without one, every model of transformers that
            is built after this call is patched: also those that a trainer or a server builds. Models that exist already
            are not.
        angles: "model" keeps the cosines and sines that the model makes. "exact" uses this library's, which are exact at
            any position; only for modules whose forward takes (x, position_ids), as those of transformers do. Under
            LongRoPE and dynamic NTK the longest row decides for its batch, as in transformers.
        rounding: "model" keeps the bits of results and gradients. "once" rounds results only when they are stored, which
            is more exact. With exact angles, results always round once.
        stack: "vllm", "vllm-native" or "sglang": rotate as that server does, with its frequencies, tables and roundings,
            forward and backward; see :mod:`tightrope.stacks`. For modules as with ``angles="exact"``.
        functions: rotary functions that are not found by their names, each with the roles of its parameters in order,
            separated by spaces: "x" rotates, "cos", "sin" and "table" hold cosines and sines, and "-" keeps its default.
            They are verified in the same way.
        all_models: let options that change bits serve models of the same files that are not patched, too.

    Returns:
        A report with an entry per function and, with exact angles or a stack, per class that makes cosines and sines.
        Its notes say what does not fit together, such as weights and a configuration. Without a model it grows as models
        are built; one that cannot be patched as required has an entry with the reason.

    Raises:
        TypeError: model is not a Module.
        ValueError: an unknown value of an option; a model that is patched with other options, or that shares a function
            with such a model; a function of ``functions`` that is not of the stated kind; exact angles or a stack for a
            model of which a rotary function is left, or whose tables cannot be exchanged; or ``rounding="once"`` without
            ``all_models`` for a model that makes no tables as those of transformers do. Nothing is changed then.

    >>> from transformers import GPTNeoXConfig, GPTNeoXModel
    >>> model = GPTNeoXModel(GPTNeoXConfig(hidden_size=128, num_hidden_layers=1, vocab_size=9))
    >>> with patch(model) as report:
    ...     print([entry.name for entry in report.replaced])
    ['apply_rotary_pos_emb']
    """
    options = _checked(model, Options(angles, rounding, stack, all_models))
    with _alone():
        if model is None:
            if functions is not None:
                raise bad_value("functions must be given with a model")
            return _later(options)
        return _patched(model, options, functions or {})


@public("unpatch")
def unpatch(model: torch.nn.Module | None = None) -> None:
    """Undo :func:`patch`: the model computes what it did before, bit for bit.

    Functions that another patched model uses stay replaced. A deep copy of a patched model counts as patched.

    Args:
        model: a patched model; without one, ``patch()`` is undone, for the models that were built meanwhile too, but not
            the patches of single models.

    Raises:
        TypeError: model is not a Module.
    """
    with _alone():
        if model is None:
            _end_later()
            return
        _checked(model, Options())
        _undone(model)


def _checked(model: Any, options: Options) -> Options:
    """Raise an error for invalid arguments."""
    if model is not None and not isinstance(model, torch.nn.Module):
        held = getattr(model, "__dict__", None) or {}
        names, got = [n for n in held if isinstance(held[n], torch.nn.Module)], describe(model)
        if names:
            first = "transformer" if "transformer" in names else names[0]
            hint = f"whose modules are {', '.join(names)}; call {OPERATION}(pipeline.{first})"
            got = f"a {type(model).__name__}, {hint}"
        raise bad_type(f"model must be a torch.nn.Module but got {got}")
    allowed = {"angles": ANGLES, "rounding": ROUNDINGS, "stack": (*STACKS, None)}
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            words = ", ".join(str(v) for v in values if v is not None)
            raise bad_value(f"{name} must be one of {words} but got {getattr(options, name)!r}")
    if options.stack is not None and (options.angles, options.rounding) != ("model", "model"):
        raise bad_value(
            f"angles and rounding must not be given with stack={options.stack!r}, which decides both"
        )
    return options


# --- one model ------------------------------------------------------------------------------------


def _patched(model: torch.nn.Module, options: Options, functions: Mapping[Any, str]) -> Report:
    held = vars(model).get(_tables.MARK)
    if held and model in _reports and not functions:
        if held.options != options:
            raise bad_value(
                f"model must be unpatched before it is patched with other options, but it is patched with {held.options}; call "
                "unpatch(model) first"
            )
        return _reports[model]
    _forget()
    mine = Patch(type(model).__name__, options)
    slots, left = _functions(model, options, functions)
    served = [slot.served for slot in slots if slot.served is not None]
    makers = [module for module in model.modules() if _tables.is_maker(module)]
    made, kept = _exchanged(model, makers, mine, left) if options.exchange else ({}, [])
    checked = _checks(slots, mine) if options.where and not options.all_models else []
    slots += [*_forwards(makers, made, options), *checked]
    for slot in slots:
        if slot.options != options:
            other = next((each.model for each in slot.patches), "a model")
            raise bad_value(
                f"model must be patched with the options of other models of its files, but {slot.member.name} serves "
                f"{other} after patch(…, {slot.options}); unpatch that model first"
            )
    replaced = {slot.member.place() for slot in slots}
    bodies = [place for m in _find.bodies_of(model) if (place := m.place()) not in replaced]
    left += [Entry(*place, None, False, "seems to rotate in its body") for place in bodies]
    device = next((t.device.type for t in model.parameters()), "cpu")
    for each in served if device not in ("cpu", "meta") else ():
        each.kind_on(device)
    _warn_of_record(model, [each.first for each in served])
    for slot in slots:
        if slot.member[:2] not in _slots:
            _slots[slot.member[:2]] = slot
            slot.member.put(slot.made)
        slot.patches.add(mine)
    vars(model)[_tables.MARK] = mine
    weakref.finalize(mine, _forget_gone).atexit = False
    classes = tuple(slot.member.owner for slot in checked)
    for module in model.modules():
        if isinstance(module, classes):
            vars(module)[_tables.MARK] = mine
        if module in made:
            vars(module)[_tables.KEPT] = made[module]
            for name in _tables.kept_forwards(module):
                vars(module)[name] = type(module).forward.__get__(module)
    entries = [slot.entry for slot in slots if slot.entry is not None]
    report = Report([*dict.fromkeys([*entries, *left, *kept])], _notes(model, makers, options))
    counted = {slot.member.place(): slot.counts for slot in slots if slot.counts}
    report._counts = {place: (counts, tuple(counts[:4])) for place, counts in counted.items()}
    report._undo = functools.partial(_undo_if_alive, weakref.ref(model))
    _reports[model] = report
    return report


def _functions(
    model: torch.nn.Module, options: Options, functions: Mapping[Any, str]
) -> tuple[list[_Slot], list[Entry]]:
    """The slots of a model's rotary functions, and entries for those that are left."""
    members = {member[:2]: (member, "") for member in _find.members_of(model)}
    for function, given in functions.items():
        member = _find.member_of(function)
        if member is None:
            raise bad_value(
                f"functions must be found under their own names but got {describe(function)}"
            )
        members[member[:2]] = member, given
    slots, doubtful = [], []
    for key, (member, given) in members.items():
        if key in _slots:
            slots.append(_slots[key])
            continue
        kind = _kind_of(member, given)
        if kind is not None and (kind.same_bits or options.where):
            slots.append(_slot(member, kind, given, options))
        elif given:
            words = f"{member.name} with {given!r} is of none"
            raise bad_value(f"functions must be of a known kind, but {words}")
        else:
            doubtful.append((member, kind))
    names = {slot.member.name for slot in slots}
    left = []
    for member, kind in doubtful:
        if not member.rotates() or (kind is None and names & _find.names_in(member.function())):
            continue  # it does not rotate, or calls a function that is replaced
        reason = f"computes {kind}, but rounds in another way" if kind else "is of no known kind"
        left.append(Entry(*member.place(), None, False, reason))
    return slots, left


def _kind_of(member: Member, given: str, device: str = "cpu") -> Kind | None:
    key = member.key(), given, device
    if key not in _kinds:
        _kinds[key] = find(member.function(), device, member.takes_self(), given)
    return _kinds[key]


def _slot(member: Member, kind: Kind, given: str, options: Options) -> _Slot:
    served = Served(member.function(), kind, lambda device: _kind_of(member, given, device))
    made = member.like(replacement(served, options.where))
    same = kind.same_bits and options.where is None and not kind.is_complex
    entry = Entry(*member.place(), str(kind), True, "", same, served.compared)
    return _Slot(member, made, options, entry, served, served.counts)


def _of_class(cls: type, name: str, made: Any, *more: Any) -> _Slot:
    """The slot of a method of a class that something is put before."""
    known = _slots.get((cls, name))
    return known or _Slot(Member(cls, name, vars(cls).get(name)), made, *more)


def replaced(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function that has the operator serve the calls of another, with its bits; None if that is of no known kind."""
    kind = find(function)
    if kind is None or not kind.same_bits:
        return None
    return replacement(Served(function, kind, lambda device: find(function, device)))


def _forwards(
    makers: list[torch.nn.Module], made: Mapping[Any, Any], options: Options
) -> list[_Slot]:
    """The slots of the forward of classes of modules whose tables are exchanged, or whose ids are looked at."""
    by = f"cosines and sines of {options.stack}" if options.stack else "exact cosines and sines"
    slots = []
    for cls in dict.fromkeys(type(m) for m in makers if m in made or _has_axes(m)):
        entry = Entry(cls.__module__, cls.__qualname__, by, True) if options.exchange else None
        counts = [0, 0, 0, 0, 0]
        forward = _tables.forward_of(cls, options.exchange, counts)
        slots.append(_of_class(cls, "forward", forward, options, entry, None, counts))
    return slots


def _has_axes(module: Any) -> bool:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None)
    return isinstance(rope, dict) and "mrope_section" in rope


def _checks(slots: list[_Slot], mine: Patch) -> list[_Slot]:
    """The slots of checks on the classes that call what is replaced, in models that are not patched too."""
    options, classes = mine.options, dict[type, None]()
    for slot in slots:
        callers = _find.callers_of(slot.member)
        classes |= dict.fromkeys(callers)
        if not callers or not all(issubclass(cls, torch.nn.Module) for cls in callers):
            raise bad_value(
                f"model must call {slot.member.name} in modules of its own file with {options}, so that a check "
                f"can find other models of the file; call patch(model, {options}, all_models=True), which serves "
                "every model of it"
            )
    checks = {cls: _tables.check_of(cls, options, mine.model, _is_checked) for cls in classes}
    return [_of_class(cls, "_call_impl", check, options) for cls, check in checks.items()]


def _is_checked(cls: type) -> bool:
    """Return whether a patched model exists because of which modules of a class are checked."""
    with _alone():
        _forget()
    return (cls, "_call_impl") in _slots


def _exchanged(
    model: torch.nn.Module, makers: list[torch.nn.Module], mine: Patch, left: list[Entry]
) -> tuple[dict[torch.nn.Module, _tables.Made], list[Entry]]:
    """The tables for each module that makes some, and an entry for each that keeps its own."""
    found, kept, options = {}, {}, mine.options
    for module in makers:
        try:
            found[module] = _tables.read(module, mine, options.stack)
        except _tables.Unlike as unlike:
            kept[type(module)] = _left(module, f"keeps its own cosines and sines: {unlike}")
    if not makers:
        words = "none of its modules takes (x, position_ids), so its angles stay as they are"
        kept[type(model)] = _left(model, words)
    reasons = [*left] * bool(found) + [*kept.values()] * (options.stack is not None)
    if reasons:
        words = "; ".join(f"{entry.name} {entry.reason}" for entry in reasons)
        raise bad_value(
            f"model must have only functions and tables that can be exchanged, with {options}, but {words}; call "
            f"patch(model), which keeps the model's own{_part(model, found, options)}"
        )
    return found, [*kept.values()]


def _left(module: torch.nn.Module, reason: str) -> Entry:
    """The entry of a class that stays as it is."""
    return Entry(type(module).__module__, type(module).__qualname__, None, False, reason)


def _part(model: torch.nn.Module, found: Mapping[torch.nn.Module, Any], options: Options) -> str:
    """Name the largest part of a model whose tables can all be exchanged, such as the text part; "" if none can."""
    for name, part in sorted(model.named_modules(), key=lambda each: each[0].count(".")):
        inside = [module for module in part.modules() if _tables.is_maker(module)]
        if name and inside and all(module in found for module in inside):
            homes = {type(module).__module__ for module in inside}
            alone = all(m in inside for m in found if type(m).__module__ in homes)
            every = "" if alone else ", all_models=True"
            return f", or patch(model.{name}, {options}{every}) for that part alone"
    return ""


def _notes(model: torch.nn.Module, makers: list[torch.nn.Module], options: Options) -> list[str]:
    notes = [f"note: {name} holds NaN, and so will what it rotates" for name in _tables.nans(model)]
    doubts = [_tables.by_configuration(each)[1] for each in makers if hasattr(each, "config")]
    notes += [f"note: {doubt}" for doubt in doubts if doubt]
    changing = {type(m).__name__ for m in makers if "dynamic" in str(getattr(m, "rope_type", ""))}
    if options.exchange and changing:
        notes.append(
            f"note: {', '.join(sorted(changing))} follows dynamic NTK, whose frequencies change with the length of the "
            "longest row: keys in a cache keep those of their time, as in transformers"
        )
    return [*dict.fromkeys(notes)]


def _warn_of_record(model: torch.nn.Module, kinds: list[Kind]) -> None:
    """Warn if the record of a conversion states that the weights have another pairing than the model's code."""
    held: Any = {}
    with suppress(OSError, ValueError):  # a name that is no path, or a record that is none
        held = records_of(getattr(model, "config", None))
    codes = {place.turn.interleaved for kind in kinds for place in kind.places.values()}
    other = [each for found in held.values() for each in found if each.interleaved not in codes]
    if not other or not codes:
        return
    text = (
        f"the model's code pairs {'adjacent channels' if True in codes else 'halves'}, but {other[0].where} beside its "
        f"weights states that {min(other[0].tensors)} and others have the other pairing; patch keeps what the code does, "
        "so outputs are wrong: convert the weights back, or load them into code of their pairing"
    )
    warnings.warn(sentence("patch", text), stacklevel=outside())


def _undone(model: torch.nn.Module) -> None:
    gone = weakref.WeakSet[Patch]()
    for module in model.modules():
        vars(module).pop(_tables.KEPT, None)
        _reports.pop(module, None)
        if vars(module).get(_tables.MARK):  # False in a model that was pickled
            gone.add(vars(module).pop(_tables.MARK))
    _forget()
    if gone:  # a copy that waits for the garbage collector may hold the patch
        gc.collect()
        _forget()


def _forget() -> None:
    """Restore what no patched model uses any more."""
    for key, slot in list(_slots.items()):
        if not list(slot.patches):  # the length may still count one that is gone
            del _slots[key]
            slot.undo()
    if not _slots:
        _kinds.clear()  # what functions read may change


def _forget_gone() -> None:
    """Restore what only a model used that is gone, unless code patches now; then its next call does."""
    if _running == 0 and _lock.acquire(blocking=False):
        try:
            _forget()
        finally:
            _lock.release()


@contextmanager
def _alone() -> Iterator[None]:
    """A block that no other thread enters, and in which nothing is restored because a model is gone."""
    global _running
    with _lock:
        _running += 1
        try:
            yield
        finally:
            _running -= 1


def _undo_if_alive(model: weakref.ref[torch.nn.Module]) -> None:
    if (alive := model()) is not None:
        unpatch(alive)


# --- all models of transformers that are built later ----------------------------------------------


_LATER = "models of transformers that are built from now on are patched, and listed here"
_NONE_YET = "no model of transformers was built since patch()"


class _Later:
    """The active patch of models that are built later."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.report = Report(notes=[_LATER], if_empty=_NONE_YET, _undo=unpatch)
        base: Any = importlib.import_module("transformers").PreTrainedModel
        original = base.post_init

        @functools.wraps(original)
        def post_init(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(model, *args, **kwargs)
            # Another library may have wrapped this function.
            if _active is self:
                self.add(model)
            return result

        self.slot = _Slot(Member(base, "post_init", original), post_init, options)
        base.post_init = post_init

    def add(self, model: torch.nn.Module) -> None:
        """Patch a model that was built now."""
        if vars(model).get(_tables.MARK):
            return
        try:
            made = patch(model, **asdict(self.options))
            self.models.add(model)
        except Exception as error:  # noqa: BLE001  # such as one without rotations; it is built nevertheless
            made = Report([_left(model, str(error))])
        self.report.add(made)


_active: _Later | None = None


def _later(options: Options) -> Report:
    global _active
    if _active is None or _active.options != options:
        _end_later()
        _active = _Later(options)
    return _active.report


def _end_later() -> None:
    global _active
    if _active is not None:
        ended, _active = _active, None
        ended.slot.undo()
        for model in list(ended.models):
            _undone(model)
        _forget()
