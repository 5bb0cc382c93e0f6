"""Subclasses for the modules of one model, whose methods call replaced rotary functions.

Rotary functions are globals of a Python module that all models of a family share, and a method looks
them up by name. To change one model only, each class whose methods reach such a function gets a subclass
with copies of these methods. The code of a copy names another global: the replacement, stored next to the
original under a name of its own. All other globals are still shared with the original code.

If other code replaces a rotary function later, the copies call the new one. If it replaces a method of
which there is a copy, the copy raises an error, as it can no longer know what the method does.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from .._errors import sentence
from ..forms import signature, unwrapped
from ._candidate import Candidate
from ._classes import MARK, Graft
from ._code import codes, content_of
from ._find import (
    INNER,
    PREFIX,
    Constants,
    Found,
    imported,
    inner_functions,
    is_near,
    layers,
    methods,
    neighbours,
)
from ._recognise import recognise_member, to_the_bit
from ._replace import replacement
from ._tables import KEPT, members_of


class Swap(NamedTuple):
    """One function to replace, as plain data, so that patched models can be pickled.

    Attributes:
        module, name: the Python module and the name in it: "Class.method" for a method,
            "Class.method.<locals>.function" for a function in its body.
        constants: the keyword arguments with which it is recognised, one entry per combination.
    """

    module: str
    name: str
    constants: tuple[Constants, ...] = ((),)

    def found(self) -> tuple[Any, type | None]:
        """The unpatched object with this name, and the class if it is a method that takes self."""
        value: Any = sys.modules.get(self.module) or importlib.import_module(self.module)
        outer, inner, name = self.name.partition(INNER)
        *owners, last = outer.split(".")
        for owner in owners:
            value = getattr(value, owner)
        found = vars(value)[last]
        if not inner:
            takes_self = isinstance(value, type) and not isinstance(found, staticmethod)
            return found, value if takes_self else None
        outermost: Any = unwrapped(found)
        every = (f for layer in layers(outermost) for f in inner_functions(layer))
        return next(f for f in every if f.__name__ == name), None

    def original(self) -> Any:
        """The unpatched object with this name."""
        return self.found()[0]


def can_be_found(found: Found) -> bool:
    """Return whether the module and the name of a function lead back to it, as a swap needs."""
    try:
        return Swap(found.module, found.name).original() is found.value
    except (AttributeError, ImportError, KeyError, StopIteration):
        return False


class Recipe(NamedTuple):
    """The replacements in a class as plain data, so that patched models can be pickled.

    Attributes:
        swaps: the functions and methods to replace.
        rounding, narrow: see :func:`._replace.replacement`.
        tables: whether forward returns the cosines and sines that :mod:`._tables` makes.
    """

    swaps: tuple[Swap, ...] = ()
    rounding: str = "model"
    narrow: bool = False
    tables: bool = False


_Read = list[tuple[Mapping[str, Any], str, Any]]
# Two caches: classes hold replacements, so code that empties the first must empty both.
# A replacement holds its original, so that no other object gets the same id.
_replacements: dict[tuple[Swap, str, bool, int], Any] = {}
# The class, and the globals and members from which it was made: (namespace, name, value).
_classes: dict[tuple[type, Recipe], tuple[type, _Read]] = {}


def replacement_of(swap: Swap, recipe: Recipe, known: Sequence[Candidate] = ()) -> Any:
    """The replacement function of a swap, cached so that models share compiled code.

    Args:
        known: what the function was recognised as just now, for each entry of the constants; else it is
            recognised here.

    Raises:
        LookupError: the function is not recognised.
    """
    original, owner = swap.found()
    # A notebook may define the function again, and a tool may replace it for a while.
    key = swap, recipe.rounding, recipe.narrow, id(original)
    made = _replacements.get(key)
    if made is not None and known and made._tightrope_candidates != tuple(known):
        # What the function reads from elsewhere has changed since.
        made = None
        _classes.clear()
    if made is None:
        if not known:
            found = [recognise_member(original, owner, each) for each in swap.constants]
            if recipe.rounding == "model":
                found = [to_the_bit(each) for each in found]
            known = [each.candidate for each in found if each.candidate is not None]
            if len(known) < len(found):
                raise LookupError(f"{swap.module}.{swap.name}")
        made = _replacements[key] = replacement(original, known, recipe.narrow, recipe.rounding)
    return made


def grafted(base: type, recipe: Recipe) -> type:
    """The subclass for modules of a patched model; the base itself if nothing in it changes."""
    key = base, recipe
    known = _classes.get(key)
    if known is None or not _is_as_read(known[1]):
        known = _classes[key] = _make(base, recipe)
    return known[0]


def apply(module: torch.nn.Module, cls: type) -> None:
    """Change the class of a module, and the bound methods that its attributes hold.

    Hooks such as accelerate's keep the old ``forward`` in an attribute of the module and call it from there.
    """
    old = type(module)
    if old is cls:
        return
    names = [name for _owner, name, _attribute, _function in methods(old)]
    for key, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            same = (name for name in names if getattr(old, name) is value.__func__)
            if (name := next(same, None)) is not None:
                vars(module)[key] = MethodType(getattr(cls, name), module)
    module.__class__ = cls


def hidden(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes that hide a method and are not known to call it."""
    cls = type(module)
    held = [v for v in vars(module).values() if isinstance(v, MethodType)]
    kept = {v.__func__ for v in held if v.__self__ is module}
    for _owner, name, _attribute, _function in methods(cls):
        if name in vars(module) and getattr(cls, name) not in kept:
            yield name, vars(module)[name]


# --- the subclass ---------------------------------------------------------------------------------


def _make(base: type, recipe: Recipe) -> tuple[type, _Read]:
    copier = _Copier(recipe, base)
    members: dict[str, Any] = {}
    for owner, name, attribute, function in methods(base):
        new = copier.replacements.get(id(attribute))
        if new is not None:
            copier.reads(owner, name, attribute)
            site = copier.site(owner, name, attribute, new, new._tightrope_calls)
            members[name] = staticmethod(site) if isinstance(attribute, staticmethod) else site
            continue
        copied = copier.copy(function)
        if copied is not None:
            copier.reads(owner, name, attribute)
            kind = type(attribute) if isinstance(attribute, (staticmethod, classmethod)) else None
            members[name] = copied if kind is None else kind(copied)
    if recipe.tables:
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


def _is_as_read(read: _Read) -> bool:
    for names, name, value in read:
        if names.get(name) is not value:
            return False
    return True


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


# --- pickles --------------------------------------------------------------------------------------


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Pickle as an object of the base class; loading makes the subclass again."""
    cls: Any = next(each for each in type(self).__mro__ if MARK in vars(each))
    graft: Graft = vars(cls)[MARK]
    made = super(cls, self).__reduce_ex__(protocol)
    if cls is not type(self) or isinstance(made, str) or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return made
    (swaps, *options), state = graft.recipe, made[2]
    if isinstance(state, dict) and KEPT in state:
        state = {**state, KEPT: state[KEPT].to_plain()}
    functions = tuple(map(tuple, swaps))
    return (new_patched, (graft.base, functions, *options, *made[1][1:]), state, *made[3:])


def new_patched(
    base: type,
    functions: tuple[tuple[Any, ...], ...],
    rounding: str,
    narrow: bool,
    tables: bool,
    *arguments: Any,
) -> Any:
    """Make an object of the patched subclass of a class, without data. Pickles of patched models call it.

    The functions are recognised again. If one is not there or not recognised, the object is one of the base
    class, and a warning names the function.

    Args:
        base: the class of the module.
        functions: (module, name, constants) of each function to replace.
        rounding, narrow, tables: how it is replaced.
        arguments: those of ``base.__new__``.

    >>> import torch
    >>> new_patched(torch.nn.Identity, (), "model", False, False).__class__
    <class 'torch.nn.modules.linear.Identity'>
    """
    recipe = Recipe(tuple(Swap(*each) for each in functions), rounding, narrow, tables)
    lost = []
    for swap in recipe.swaps:
        try:
            replacement_of(swap, recipe)
        except (AttributeError, ImportError, KeyError, LookupError, StopIteration):
            lost.append(f"{swap.module}.{swap.name}")
    if lost:
        warnings.warn(
            f"this {base.__qualname__} is loaded or copied without its patch, because {', '.join(lost)} is not the "
            "code that the patch replaced; call tightrope.integrations.patch(model)",
            stacklevel=2,
        )
    cls: Any = base if lost else grafted(base, recipe)
    return cls.__new__(cls, *arguments)


# Pickles name the public module.
new_patched.__module__ = __package__


# --- copies of methods ----------------------------------------------------------------------------


class _Copier:
    """Copy functions so that they call replacements; each function is copied once.

    Attributes:
        replacements: id of an original -> its replacement.
        read: (namespace, name, value) of what the copies replace and stand for.
    """

    def __init__(self, recipe: Recipe, base: type) -> None:
        self.replacements = {id(s.original()): replacement_of(s, recipe) for s in recipe.swaps}
        self.read: _Read = []
        self._base = base
        self._copies: dict[int, FunctionType | None] = {}

    def reads(self, owner: type, name: str, attribute: Any) -> None:
        """Note a method of the class, which no subclass between the two defines again."""
        between = self._base.__mro__[: self._base.__mro__.index(owner)]
        self.read += [(vars(cls), name, None) for cls in between]
        self.read.append((vars(owner), name, attribute))

    def site(
        self,
        holder: Any,
        name: str,
        original: Any,
        new: Callable[..., Any],
        calls: tuple[str, ...] = (),
    ) -> Any:
        """The function to call in place of another: its replacement, or the one that other code has put there since.

        Args:
            calls: the methods that a method calls; if its object has others, the original runs.
        """
        read, base, names = self.read, self._base, vars(holder)
        for each in calls:
            owner = next(cls for cls in base.__mro__ if each in vars(cls))
            read.append((vars(owner), each, vars(owner)[each]))

        def unchanged() -> bool:
            return _is_as_read(read)

        # Dynamo runs it while tracing and treats the result as a constant.
        unchanged._dynamo_marked_constant = True  # type: ignore[attr-defined]

        @functools.wraps(new)
        def call(*args: Any, **kwargs: Any) -> Any:
            if calls and not vars(args[0]).keys().isdisjoint(calls):
                return original(*args, **kwargs)
            if unchanged():
                return new(*args, **kwargs)
            now = names.get(name)
            if now is not original:
                return (now.__func__ if isinstance(now, staticmethod) else now)(*args, **kwargs)
            changed = next(each for space, each, value in read if space.get(each) is not value)
            raise RuntimeError(
                sentence(
                    "patch",
                    f"{changed} was replaced after patch(model), and what patch made of {base.__qualname__} calls the "
                    "old one; call patch(model) again",
                )
            )

        return call

    def copy(self, function: FunctionType) -> FunctionType | None:
        """A copy that calls the replacements, or None if it reaches none."""
        if id(function) not in self._copies:
            self._copies[id(function)] = (
                None  # ends the recursion of functions that call each other
            )
            self._copies[id(function)] = self._copy(function)
        return self._copies[id(function)]

    def _new(self, holder: Any, name: str, value: Any, function: FunctionType) -> Any:
        """The function that a copy of a function calls in place of a value; None for the value itself."""
        new = self.replacements.get(id(value))
        if new is not None:
            current = vars(holder)[name]
            self.read.append((vars(holder), name, current))
            return self.site(holder, name, current, new)
        if is_near(value, function) and (copied := self.copy(value)) is not None:
            self.read.append((vars(holder), name, vars(holder)[name]))
            return copied
        return None

    def _copy(self, function: FunctionType) -> FunctionType | None:
        home: Any = sys.modules.get(function.__module__)
        if home is None or vars(home) is not function.__globals__:
            home = _Namespace(function.__globals__)
        names: dict[str, str] = {}
        for name, value in neighbours(function):
            if (new := self._new(home, name, value, function)) is not None:
                names[name] = _alias(function.__globals__, name, new)
        imports: dict[str, str] = {}
        for name, module, value in imported(function):
            if (new := self._new(module, name, value, function)) is not None:
                imports[name] = _alias(vars(module), name, new)
        stubs: dict[int, CodeType] = {}
        for each in inner_functions(function):
            if (new := self.replacements.get(id(each))) is not None:
                alias = _alias(function.__globals__, each.__name__, new)
                stubs[id(each.__code__)] = _stub(each, alias)
        cells, inner = self._cells(function)
        if not names and not imports and not stubs and not inner:
            return None
        try:
            code = _renamed(function.__code__, names, imports, stubs)
        except NameError:  # an attribute has the name of a replaced function
            return None
        closure = cells if function.__closure__ is not None else None
        copied = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, closure
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(copied, function)
        wrapped = function.__dict__.get("__wrapped__")
        copied.__dict__.pop("__wrapped__")
        if wrapped is not None:
            copied.__dict__["__wrapped__"] = inner.get(id(wrapped), wrapped)
        return copied

    def _cells(
        self, function: FunctionType
    ) -> tuple[tuple[CellType, ...], dict[int, FunctionType]]:
        """The closure of a copy, in which copies stand for the functions of decorators, and these copies."""
        cells, inner = list(function.__closure__ or ()), {}
        for i, cell in enumerate(cells):
            value = content_of(cell)
            if isinstance(value, FunctionType) and (new := self.copy(value)) is not None:
                inner[id(value)] = new
                cells[i] = CellType(new)
        return tuple(cells), inner


class _Namespace:
    """The globals of a function that are those of no imported module."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


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
