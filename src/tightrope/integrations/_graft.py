"""Subclasses for the modules of one model, whose methods call replaced rotary functions.

Rotary functions are globals of a Python module that all models of a family share, and a method looks
them up by name. To change one model only, each class whose methods reach such a function gets a subclass
with copies of these methods. The code of a copy names another global: the replacement, stored next to the
original under a name of its own. All other globals are still shared with the original code.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from ..forms import signature, unwrapped
from . import _bound
from ._candidate import Candidate
from ._classes import MARK, Graft
from ._exact import members_of
from ._find import (
    INNER,
    PREFIX,
    Found,
    codes,
    imported,
    inner_functions,
    is_near,
    layers,
    methods,
    neighbours,
    original_of,
)
from ._inline import INLINE, function_of, inlined
from ._recognise import recognise_member
from ._run import replacement


@dataclass(frozen=True)
class Swap:
    """One replacement as plain data, so that patched models can be pickled.

    Attributes:
        module, name: the Python module and the name in it: "Class.method" for a method,
            "Class.method.<locals>.function" for a function in its body,
            "Class.method.<inline>.text" for an expression in its body.
        candidates, narrow, rounding: see :func:`._run.replacement`.
    """

    module: str
    name: str
    candidates: tuple[Candidate, ...]
    narrow: bool = False
    rounding: str = "model"

    def original(self) -> Any:
        """The unpatched object with this name."""
        value: Any = sys.modules.get(self.module) or importlib.import_module(self.module)
        _, inline, text = self.name.partition(INLINE)
        if inline:
            return function_of(vars(value), text)
        outer, inner, name = self.name.partition(INNER)
        *owners, last = outer.split(".")
        for owner in owners:
            value = getattr(value, owner)
        found = original_of(vars(value)[last])
        if not inner:
            return found
        outermost: Any = unwrapped(found)
        every = (f for layer in layers(outermost) for f in inner_functions(layer))
        return next(f for f in every if f.__name__ == name)


def can_be_found(found: Found) -> bool:
    """Return whether the module and the name of a function lead back to it, as a swap needs."""
    try:
        return Swap(found.module, found.name, ()).original() is found.value
    except (AttributeError, ImportError, KeyError, StopIteration):
        return False


@dataclass(frozen=True)
class Recipe:
    """The replacements in a class as plain data, so that patched models can be pickled.

    Attributes:
        swaps: the functions and methods to replace.
        angles: whether forward returns the exact cosines and sines that an object stores.
    """

    swaps: tuple[Swap, ...] = ()
    angles: bool = False


_replacements: dict[Swap, Any] = {}
# The class, and the globals and members from which it was made: (namespace, name, value).
_classes: dict[tuple[type, Recipe], tuple[type, list[tuple[Mapping[str, Any], str, Any]]]] = {}


def replacement_of(swap: Swap) -> Any:
    """The replacement function of a swap, cached so that models share compiled code."""
    original, known = swap.original(), _replacements.get(swap)
    # A notebook may define the function again.
    if known is None or known._tightrope_original is not original:
        known = replacement(original, swap.candidates, swap.narrow, swap.rounding)
        _replacements[swap] = known
    return known


def grafted(base: type, recipe: Recipe) -> type:
    """The subclass for modules of a patched model; the base itself if nothing in it changes."""
    key = base, recipe
    known = _classes.get(key)
    if known is None or any(names.get(name) is not value for names, name, value in known[1]):
        known = _classes[key] = _make(base, recipe)
    return known[0]


def calling(function: FunctionType, swaps: Iterable[Swap]) -> FunctionType | None:
    """A copy of a function that calls the replacements; None if it reaches none of them."""
    return _Copier(swaps).copy(function)


def apply(module: torch.nn.Module, cls: type) -> None:
    """Change the class of a module and the bound methods that its attributes hold, also in wrappers."""
    old = type(module)
    if old is cls:
        return
    _bound.rebind(module, old, cls)
    module.__class__ = cls


def _make(base: type, recipe: Recipe) -> tuple[type, list[tuple[Mapping[str, Any], str, Any]]]:
    originals = {id(swap.original()): swap for swap in recipe.swaps}
    copier = _Copier(recipe.swaps)
    members: dict[str, Any] = {}
    for owner, name, attribute, function in methods(base):
        value = original_of(attribute)
        swap = originals.get(id(value))
        copier.read.append((vars(owner), name, attribute))
        if swap is not None:
            new = replacement_of(swap)
            members[name] = staticmethod(new) if isinstance(value, staticmethod) else new
            continue
        copied = copier.copy(function)
        if copied is not None:
            kind = type(value) if isinstance(value, (staticmethod, classmethod)) else None
            members[name] = copied if kind is None else kind(copied)
    if recipe.angles:
        members |= members_of(base)
    if not members:
        return base, copier.read
    members |= {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce_ex,
        MARK: Graft(base, recipe),
    }
    return _derived(base, members), copier.read


class _Silent:
    """Comes before a base whose ``__init_subclass__`` shall not run."""

    def __init_subclass__(cls, **keywords: Any) -> None: ...


class _SilentSlots:
    """Like _Silent, for objects without ``__dict__``."""

    __slots__ = ()
    __init_subclass__ = _Silent.__init_subclass__


def _derived(base: type, members: dict[str, Any]) -> type:
    """A subclass whose base does not learn of it: ``__init_subclass__`` may register it under its name."""
    make, silent = type(base), _Silent if base.__dictoffset__ else _SilentSlots
    members |= {} if base.__dictoffset__ else {"__slots__": ()}
    if isinstance(base.__init_subclass__, MethodType):
        with contextlib.suppress(TypeError):  # their objects may differ in layout
            made: type = make(base.__name__, (silent, base), members)
            made.__bases__ = (base,)
            return made
    return make(base.__name__, (base,), members)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Pickle as an object of the base class; loading makes the subclass again."""
    cls: Any = next(each for each in type(self).__mro__ if MARK in vars(each))
    graft: Graft = vars(cls)[MARK]
    made = super(cls, self).__reduce_ex__(protocol)
    if cls is not type(self) or isinstance(made, str) or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return made
    return (_remake, (graft.base, graft.recipe, *made[1][1:]), *made[2:])


def _remake(base: type, recipe: Recipe, *arguments: Any) -> Any:
    changed = [swap for swap in recipe.swaps if not _is_as_pickled(swap)]
    if changed:
        names = ", ".join(f"{swap.module}.{swap.name}" for swap in changed)
        warnings.warn(
            f"this {base.__qualname__} is loaded or copied without its patch, because {names} is not the code "
            "that the patch replaced; call tightrope.integrations.patch(model)",
            stacklevel=2,
        )
    cls = base if changed else grafted(base, recipe)
    return cls.__new__(cls, *arguments)


def _is_as_pickled(swap: Swap) -> bool:
    """Return whether the original is here and is still recognised as what its replacement computes."""
    try:
        original = swap.original()
    except (AttributeError, ImportError, KeyError, StopIteration):
        return False
    known = _replacements.get(swap)
    if known is not None and known._tightrope_original is original:
        return True
    found = [
        recognise_member(original, candidate.call.method, candidate.constants)
        for candidate in swap.candidates
    ]
    return tuple(each.candidate for each in found) == swap.candidates


class _Copier:
    """Copy functions so that they call replacements; each function is copied once."""

    def __init__(self, swaps: Iterable[Swap]) -> None:
        self._replacements: dict[int, Any] = {}
        # (module, name of the function) -> the texts and the replacements of expressions in its body.
        self._inline: dict[tuple[str, str], dict[str, Any]] = {}
        for swap in swaps:
            new = self._replacements[id(swap.original())] = replacement_of(swap)
            outer, inline, text = swap.name.partition(INLINE)
            if inline:
                self._inline.setdefault((swap.module, outer), {})[text] = new
        self._copies: dict[int, FunctionType | None] = {}
        # The globals that copies found other copies and replacements under.
        self.read: list[tuple[Mapping[str, Any], str, Any]] = []

    def copy(self, function: FunctionType) -> FunctionType | None:
        """A copy that calls the replacements, or None if it reaches none."""
        if id(function) not in self._copies:
            self._copies[id(function)] = (
                None  # ends the recursion of functions that call each other
            )
            self._copies[id(function)] = self._copy(function)
        return self._copies[id(function)]

    def _copy(self, function: FunctionType) -> FunctionType | None:
        names: dict[str, str] = {}
        for name, value in neighbours(function):
            new = self._replacements.get(id(value))
            if new is None and is_near(value, function):
                new = self.copy(value)
            if new is not None:
                names[name] = _alias(function.__globals__, name, new)
                self.read.append((function.__globals__, name, function.__globals__[name]))
        imports: dict[str, str] = {}
        for name, module, value in imported(function):
            new = self._replacements.get(id(value))
            if new is None and is_near(value, function):
                new = self.copy(value)
            if new is not None:
                imports[name] = _alias(vars(module), name, new)
        stubs: dict[int, CodeType] = {}
        for each in inner_functions(function):
            new = self._replacements.get(id(each))
            if new is not None:
                alias = _alias(function.__globals__, each.__name__, new)
                stubs[id(each.__code__)] = _stub(each, alias)
        cells = list(function.__closure__ or ())
        inner = {}
        for i, cell in enumerate(cells):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, FunctionType):
                new = self.copy(value)
                if new is not None:
                    inner[id(value)] = new
                    cells[i] = CellType(new)
        code = self._inlined(function)
        if code is None and not names and not imports and not stubs and not inner:
            return None
        try:
            code = _renamed(code or function.__code__, names, imports, stubs)
        except NameError:  # an attribute has the name of a replaced function
            return None
        copied = FunctionType(
            code,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(cells) if function.__closure__ is not None else None,
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__qualname__ = function.__qualname__
        copied.__module__ = function.__module__
        copied.__doc__ = function.__doc__
        copied.__annotations__ = function.__annotations__
        copied.__dict__.update(function.__dict__)
        wrapped = function.__dict__.get("__wrapped__")
        if id(wrapped) in inner:
            copied.__dict__["__wrapped__"] = inner[id(wrapped)]
        return copied

    def _inlined(self, function: FunctionType) -> CodeType | None:
        """The code of a function with calls in place of replaced expressions; None if it has none."""
        mine = self._inline.get((function.__module__, function.__qualname__), {})

        def accepts(text: str) -> str | None:
            names = function.__globals__
            return _alias(names, "inline", mine[text]) if text in mine else None

        return inlined(function, accepts) if mine else None


def _alias(names: dict[str, Any], name: str, value: Any) -> str:
    """Store a value in a module's globals under an unused name and return the name."""
    number = 0
    while True:
        alias = f"{PREFIX}{name}_{number}"
        if names.setdefault(alias, value) is value:
            return alias
        number += 1


def _stub(function: FunctionType, alias: str) -> CodeType:
    """The code of a function with the same parameters that calls the global ``alias``."""
    seen = signature(function)
    parameters = [] if seen is None else list(seen.parameters.values())
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    text = str(inspect.Signature(bare))
    given = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in bare]
    source = f"def {function.__name__}{text}: return {alias}({', '.join(given)})"
    made = compile(source, "<tightrope>", "exec")
    return next(code for code in codes(made) if code is not made)


def _renamed(
    code: CodeType, names: dict[str, str], imports: dict[str, str], stubs: dict[int, CodeType]
) -> CodeType:
    """A copy of a code object with some globals and imports renamed, and inner functions replaced.

    Args:
        names: the new names of globals.
        imports: the new names in ``from module import name``.
        stubs: id of the code of an inner function -> its new code.
    """
    if id(code) in stubs:
        return stubs[id(code)]
    steps = list(dis.get_instructions(code))
    mine = _read_names(steps, names, ("LOAD_GLOBAL", "LOAD_NAME"))
    mine |= _read_names(steps, imports, ("IMPORT_FROM",))
    return code.replace(
        co_names=tuple(mine.get(name, name) for name in code.co_names),
        co_consts=tuple(
            _renamed(c, names, imports, stubs) if isinstance(c, CodeType) else c
            for c in code.co_consts
        ),
    )


def _read_names(
    steps: list[dis.Instruction], names: dict[str, str], by: tuple[str, ...]
) -> dict[str, str]:
    """The names that these instructions read, with their new names."""
    mine = {str(s.argval): names[s.argval] for s in steps if s.opname in by and s.argval in names}
    for step in steps:
        if step.opname not in by and step.opcode in dis.hasname and step.argval in mine:
            raise NameError(f"{step.argval} is read by {by[0]} and by {step.opname}")
    return mine
