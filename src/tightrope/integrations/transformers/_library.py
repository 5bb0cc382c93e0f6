"""``patch()``: rebind rotary functions in every modeling file, already imported or not."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import torch

from ...forms import unwrapped
from .. import _exact, _find, _graft
from .._classes import base_of
from .._find import Found
from .._inline import could_rotate
from .._recognise import Recognition, recognise_member, to_the_bit
from .._run import replacement
from .._summary import LOOKED_FOR, Entry, Report, entry_of

_NO_FILE = "no modeling file of transformers is imported yet"
_LATER = "modeling files of transformers that are imported later are patched then, and listed here"
_MODELING = re.compile(r"^transformers\.models\.\w+(\.\w+)*\.modeling_\w+$")


@dataclass
class _State:
    """The active patch and how to undo it.

    Attributes:
        report: the report of the patch; None while nothing is patched.
        angles, rounding: the arguments of :func:`patch`.
        undo: (holder, name, old value, new value) of each change.
        results: id of a function -> (the function, to keep the id valid; its recognition).
        files: the number of files that were patched.
    """

    report: Report | None = None
    angles: str = "model"
    rounding: str = "model"
    undo: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    results: dict[int, tuple[Any, Recognition]] = field(default_factory=dict)
    files: int = 0


_state = _State()


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that patches modeling files right after they run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual import spec, with a loader that patches the module afterwards."""
        if not _MODELING.match(name) or _state.report is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _patch_module(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def patch(angles: str, rounding: str) -> Report:
    """Patch every modeling file that is imported, and every one that will be."""
    if _state.report is not None:
        if (_state.angles, _state.rounding) == (angles, rounding):
            return _state.report
        unpatch()
    _state.report = Report(notes=[_LATER], if_empty=_NO_FILE)
    _state.angles, _state.rounding, _state.files = angles, rounding, 0
    _exact.library.serves = angles == "exact"
    sys.meta_path.insert(0, _finder)
    for name, module in sorted(sys.modules.items()):
        if _MODELING.match(name) and isinstance(module, ModuleType):
            _patch_module(module)
    return _state.report


def unpatch() -> None:
    """Undo every change, except where other code has replaced the value since."""
    while _state.undo:
        holder, name, old, new = _state.undo.pop()
        if vars(holder).get(name) is new:
            setattr(holder, name, old)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _state.report = None
    _exact.library.serves = False
    _state.results.clear()


def _patch_module(module: ModuleType) -> None:
    if _state.report is None:
        return
    _state.files += 1
    _state.report.if_empty = (
        f"no rotary function found in {_state.files} modeling file{'s' * (_state.files > 1)} of transformers: no "
        f"function or method there {LOOKED_FOR}"
    )
    swaps: list[tuple[Any, Found, Recognition]] = []
    elsewhere = False
    for name, value in sorted(vars(module).items()):
        if _find.looks_rotary(name, value):
            plain = unwrapped(value)
            home = module.__name__ if isinstance(value, torch.nn.Module) else plain.__module__
            where = Found(home, name, value)
            swaps.append((module, where, _recognised(value)))
        elif getattr(value, "__module__", None) != module.__name__:
            continue
        elif isinstance(value, FunctionType):
            elsewhere |= _note_rotation(module, name, value)
        elif isinstance(value, type):
            for method, member in vars(value).items():
                if not _find.is_rotary_method(method, member):
                    elsewhere |= _note_rotation(module, f"{value.__qualname__}.{method}", member)
                else:
                    static = isinstance(member, staticmethod)
                    function = unwrapped(member)
                    found = Found(
                        module.__name__, f"{value.__qualname__}.{method}", member, not static
                    )
                    swaps.append((value, found, _recognised(function, not static)))
    exact = _state.angles == "exact"
    known = bool(swaps) and not elsewhere and all(recognition for _, _, recognition in swaps)
    wide = exact and known
    for holder, found, recognition in swaps:
        if recognition.candidate is not None:
            new = replacement(found.value, [recognition.candidate], wide, _state.rounding)
            member = staticmethod(new) if isinstance(found.value, staticmethod) else new
            _set(holder, found.name.rsplit(".", 1)[-1], member)
        if found.module == module.__name__:
            _note(entry_of(found.module, found.name, recognition, _state.rounding))
    if exact:
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, torch.nn.Module)
            and _exact.makes_angles(value)
        ]
        for cls in classes:
            if cls.__module__ == module.__name__:
                _set(cls, "__init__", _initialiser(cls, wide, _note))
        if not classes and any(found.module == module.__name__ for _, found, _ in swaps):
            _note(
                Entry(module.__name__, "angles", None, False, f"no class here {_exact.NO_ANGLES}")
            )


def _note_rotation(module: ModuleType, name: str, member: Any) -> bool:
    """Note a function or method that may rotate in its body, where nothing is replaced for all models."""
    function = unwrapped(member)
    found = isinstance(function, FunctionType) and could_rotate(function)
    if found:
        reason = f"{_find.BODY} for all models; patch(model) may replace it"
        _note(Entry(module.__name__, name, None, False, reason))
    return found


def _recognised(function: Any, method: bool = False) -> Recognition:
    if id(function) not in _state.results:
        tried = recognise_member(function, method)
        if _state.rounding == "model":
            tried = to_the_bit(tried)
        _state.results[id(function)] = function, tried
    return _state.results[id(function)][1]


def _note(entry: Entry) -> None:
    if _state.report is not None and entry not in _state.report.entries:
        _state.report.entries.append(entry)


def _set(holder: Any, name: str, new: Any) -> None:
    _state.undo.append((holder, name, vars(holder).get(name), new))
    setattr(holder, name, new)


def _initialiser(cls: type, wide: bool, note: Callable[[Entry], None]) -> Callable[..., None]:
    """An ``__init__`` that also gives the new object exact angles, if they are recognised."""
    old = cls.__init__  # type: ignore[misc]

    @functools.wraps(old)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _exact.forget(self)
        old(self, *args, **kwargs)
        if _exact.is_probing() or base_of(type(self)) is not cls:
            return
        made, reason = _exact.read(self)
        made = made and replace(made, wide=wide)
        note(_exact.entry(self, made, reason))
        if made is not None:
            _graft.apply(self, _graft.grafted(cls, _graft.Recipe(angles=True)))
            _exact.keep(self, made, by_library=True)

    return __init__
