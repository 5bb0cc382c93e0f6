"""Bound methods of a module that wrappers of its methods hold, such as the old ``forward`` in a closure.

Python calls an attribute of the object before the method of its class, so a wrapper in ``module.forward``
hides the method. A bound method names the function of the class that the module had when it was read.
If the module gets another class, the bound methods in its wrappers must change too. They are replaced where
they are stored. They belong to one module, so this affects no other model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from ._find import codes, global_names, methods

_WRAPPERS = MethodType, FunctionType, functools.partial


def rebind(module: torch.nn.Module, old: type, new: type) -> None:
    """Replace the bound methods of one class by those of another, also in wrappers.

    Args:
        module: the module whose attributes hold them.
        old, new: the classes; one of them is derived from the other.
    """
    walk = _Walk(module, old, new)
    for name, value in list(vars(module).items()):
        if name == "forward" or isinstance(value, _WRAPPERS):
            vars(module)[name] = walk.value(value)


def hidden(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes that hide a method and are not known to call it."""
    cls = type(module)
    for _owner, name, _attribute, _function in methods(cls):
        if name in vars(module):
            walk = _Walk(module, cls, cls)
            walk.value(vars(module)[name])
            if id(getattr(cls, name)) not in walk.found:
                yield name, vars(module)[name]


def name_of(value: Any) -> str:
    """The name of a wrapper, for a report."""
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__qualname__", None)
    return str(name or type(value).__qualname__)


class _Walk:
    """Follow what a wrapper can call and replace bound methods on the way.

    It looks into closures, default values, partial functions, globals that hold a bound method of the
    module, and attributes that the wrapper's code names.

    Attributes:
        found: ids of the functions of the old class whose bound methods were found.
    """

    def __init__(self, module: torch.nn.Module, old: type, new: type) -> None:
        self.module = module
        self.found: set[int] = set()
        # id of a function of the old class -> the function of the new class.
        self._new: dict[int, Any] = {}
        for _owner, name, _attribute, _function in methods(old):
            function = getattr(old, name)
            if isinstance(function, FunctionType):
                self._new[id(function)] = getattr(new, name)
        self._seen: set[tuple[int, ...]] = set()

    def value(self, value: Any, objects: tuple[Any, ...] = ()) -> Any:
        """Follow a value and return what to store in its place, usually the value itself.

        Args:
            value: any object.
            objects: what a partial function passes to it.
        """
        if isinstance(value, MethodType):
            owner, function = value.__self__, value.__func__
            if owner is self.module and id(function) in self._new:
                self.found.add(id(function))
                new = self._new[id(function)]
                return value if new is function else MethodType(new, owner)
            self._function(function, (owner, *objects))
        elif isinstance(value, functools.partial):
            self._partial(value)
        elif isinstance(value, FunctionType):
            self._function(value, objects)
        elif callable(value) and not isinstance(value, (torch.nn.Module, type)):
            self._function(type(value).__call__, (value, *objects))
        return value

    def _partial(self, value: functools.partial[Any]) -> None:
        args, keywords = self._several(value.args), self._several(value.keywords.values())
        function = self.value(value.func, (*args, *keywords))
        if not _same(
            (function, *args, *keywords), (value.func, *value.args, *value.keywords.values())
        ):
            # A partial function has no other way to change it where it is.
            state = function, args, dict(zip(value.keywords, keywords)), vars(value)
            value.__setstate__(state)  # type: ignore[attr-defined]

    def _several(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self.value(v) if isinstance(v, _WRAPPERS) else v for v in values)

    def _function(self, function: Any, objects: tuple[Any, ...]) -> None:
        key = (id(function), *map(id, objects))
        if not isinstance(function, FunctionType) or key in self._seen:
            return
        self._seen.add(key)
        held = [self.module, *objects]
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            held.append(content)
            if (new := self.value(content)) is not content:
                cell.cell_contents = new
        defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        held += [*defaults, *named.values()]
        if not _same(new := self._several(defaults), defaults):
            function.__defaults__ = new
        named.update(zip(named, self._several(named.values())))
        for name in global_names(function.__code__) & function.__globals__.keys():
            content = function.__globals__[name]
            if isinstance(content, MethodType) and content.__self__ is self.module:
                function.__globals__[name] = self.value(content)
        names = _names(function.__code__)
        for each in held:
            self._attributes(each, names, key)

    def _attributes(self, owner: Any, names: frozenset[str], reader: tuple[int, ...]) -> None:
        """Follow the attributes of an object that a function reads by these names."""
        values = getattr(owner, "__dict__", None)
        key = (*reader, id(owner), 0)
        if (
            not isinstance(values, dict)
            or isinstance(owner, (FunctionType, type))
            or key in self._seen
        ):
            return
        self._seen.add(key)
        for name in names & values.keys():
            if isinstance(values[name], _WRAPPERS):
                values[name] = self.value(values[name])
            else:
                self._attributes(values[name], names, reader)


def _same(xs: tuple[Any, ...], ys: tuple[Any, ...]) -> bool:
    return all(x is y for x, y in zip(xs, ys))


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """The names and texts in a code object and those nested in it; attributes are among them."""
    texts = {each for c in codes(code) for each in c.co_consts if isinstance(each, str)}
    return frozenset(texts.union(*(c.co_names for c in codes(code))))
