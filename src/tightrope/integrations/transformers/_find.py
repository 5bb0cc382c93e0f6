"""Rotary functions that the methods of a class can reach."""

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

#: Of names beside the originals that grafted methods read.
PREFIX = "_tightrope_"

_NAME = re.compile(r"apply.*(rot|rope)")


@dataclass(frozen=True)
class Found:
    """A function by where it is defined, and how a live object has it.

    Attributes:
        module, name: where; the name has a dot where a class defines it.
        value: what stands there: a function, a static method, a module that wraps a function.
        method: whether it takes self.
    """

    module: str
    name: str
    value: Any
    method: bool = False


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it: comprehensions, lambdas, inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """The globals that a code object and those inside it read."""
    return frozenset(
        str(step.argval)
        for each in codes(code)
        for step in dis.get_instructions(each)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def layers(function: FunctionType) -> Iterator[FunctionType]:
    """A function and those that its decorators keep in their closures."""
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
    """(class that defines it, name, what stands there, its function) of each method, nearest first."""
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
    """Whether a global is a function worth trying; those that patched models call are ours."""
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
    """Whether a member of a class is a method worth trying."""
    return bool(_NAME.search(name)) and isinstance(unwrapped(value), FunctionType)


def original_of(value: Any) -> Any:
    """What stood at a global before the library as a whole was patched."""
    inner = value.__func__ if isinstance(value, staticmethod) else value
    return getattr(inner, "_tightrope_original", value)


def neighbours(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """(name, value) of the globals that a function reads."""
    for name in sorted(global_names(function.__code__)):
        if name in function.__globals__:
            yield name, original_of(function.__globals__[name])


def is_near(value: Any, function: FunctionType) -> bool:
    """Whether a helper belongs to the same code base, so that it may be rewritten with its caller."""
    return isinstance(value, FunctionType) and (
        value.__module__ == function.__module__
        or (value.__module__ or "").startswith("transformers.models.")
    )


def rotary(cls: type, accepts: Callable[[Found], bool]) -> Iterator[Found]:
    """The rotary functions that methods of a class reach.

    Args:
        cls: a class of modules.
        accepts: whether one is recognised; what others call is looked at too.
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
                    if isinstance(value, torch.nn.Module):  # the function of a kernels slot
                        found = Found(layer.__module__, name, value)
                    else:
                        found = Found(plain.__module__, plain.__name__, value)
                    yield found
                    if not accepts(found) and isinstance(plain, FunctionType):
                        pending.append(plain)
                elif is_near(value, layer):
                    pending.append(value)
