"""Find the rotary functions that the methods of a class call, directly or through helpers."""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch

from ...forms import signature, unwrapped

#: Prefix of the names under which replacements are stored, next to the originals.
PREFIX = "_tightrope_"

_NAME = re.compile(r"apply.*(rot|rope)")


@dataclass(frozen=True)
class Found:
    """A rotary function and where it is defined.

    Attributes:
        module, name: the Python module and the name in it; "Class.method" for a method.
        value: the object with that name: a function, a static method, or a module that wraps a
            function.
        method: whether it takes self.
    """

    module: str
    name: str
    value: Any
    method: bool = False


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those nested in it: comprehensions, lambdas, inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """The globals that a code object and those nested in it read."""
    return frozenset(
        str(step.argval)
        for each in codes(code)
        for step in dis.get_instructions(each)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def layers(function: FunctionType) -> Iterator[FunctionType]:
    """Yield a function and the functions that its decorators hold in closures."""
    seen: set[int] = set()
    pending = [function]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for cell in each.__closure__ or ():
            try:
                inner = cell.cell_contents
            except ValueError:
                continue
            if isinstance(inner, FunctionType):
                pending.append(inner)


def methods(cls: type) -> Iterator[tuple[type, str, Any, FunctionType]]:
    """Yield (defining class, name, attribute, plain function) of each method, in MRO order.

    Methods of classes of torch, Python's builtins and this library are left out.
    """
    seen: set[str] = set()
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "builtins", "tightrope"):
            continue
        for name, value in vars(owner).items():
            function = unwrapped(value)
            if name not in seen and isinstance(function, FunctionType):
                seen.add(name)
                yield owner, name, value, function


def looks_rotary(name: str, value: Any) -> bool:
    """Return True if the name or the parameters of a global suggest a rotary function."""
    if (
        name.startswith(PREFIX)
        or isinstance(value, type)
        or not isinstance(unwrapped(value), FunctionType)
    ):
        return False
    if _NAME.search(name):
        return True
    seen = signature(value)
    names = [] if seen is None else list(seen.parameters)
    tables = {n for n in names if "cos" in n or "sin" in n}
    return any("cos" in n for n in tables) and len(tables) > 1 and len(names) > len(tables)


def is_rotary_method(name: str, value: Any) -> bool:
    """Return True if the name of a member of a class suggests a rotary method."""
    return bool(_NAME.search(name)) and isinstance(unwrapped(value), FunctionType)


def original_of(value: Any) -> Any:
    """The value of a global before ``patch(None)`` replaced it."""
    inner = value.__func__ if isinstance(value, staticmethod) else value
    return getattr(inner, "_tightrope_original", value)


def neighbours(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the globals that a function reads."""
    for name in sorted(global_names(function.__code__)):
        if name in function.__globals__:
            yield name, original_of(function.__globals__[name])


def is_near(value: Any, function: FunctionType) -> bool:
    """Return True if a helper is model code, so that it may be copied together with its caller."""
    return isinstance(value, FunctionType) and (
        value.__module__ == function.__module__
        or (value.__module__ or "").startswith("transformers.models.")
    )


def rotary(cls: type, accepts: Callable[[Found], bool]) -> Iterator[Found]:
    """Yield the rotary functions that the methods of a module class reach.

    Args:
        cls: a subclass of Module.
        accepts: returns True if a function is recognised. If not, the functions it calls are
            searched too.
    """
    seen: set[int] = set()
    pending: list[FunctionType] = []
    for owner, name, value, function in methods(cls):
        value = original_of(value)
        if is_rotary_method(name, value):
            found = Found(
                owner.__module__,
                f"{owner.__qualname__}.{name}",
                value,
                not isinstance(value, staticmethod),
            )
            yield found
            if accepts(found):
                continue
        pending.append(function)
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for layer in layers(function):
            seen.add(id(layer))
            for name, value in neighbours(layer):
                if id(value) in seen:
                    continue
                if looks_rotary(name, value):
                    seen.add(id(value))
                    plain = unwrapped(value)
                    if isinstance(value, torch.nn.Module):  # a function wrapped by kernels
                        found = Found(layer.__module__, name, value)
                    else:
                        found = Found(plain.__module__, plain.__name__, value)
                    yield found
                    if not accepts(found) and isinstance(plain, FunctionType):
                        pending.append(plain)
                elif is_near(value, layer):
                    pending.append(value)
