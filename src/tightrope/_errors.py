"""The one place where error sentences get their form.

Every error that a user of the library can cause reads
``[operation] rule but got value (x: float32[2, 8, 64]).``: the operation in brackets, one sentence,
and the tensors it is about.

What finds the fault raises the rule: ``raise bad_value("x must be dense", x=x)``. It does not know what
the user called. :func:`public`, which decorates that, puts the operation in front.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

# What would not fit in a sentence is only named.
_LONGEST = 200

# In a rule: what the user called, and the same without the underscore of what works in place.
OPERATION, OUT_OF_PLACE = "{operation}", "{out of place}"

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Refusal(Exception):
    """Bad input, before the public edge names the operation."""


class _BadValue(Refusal, ValueError):
    pass


class _BadType(Refusal, TypeError):
    pass


class _BadIndex(Refusal, IndexError):
    pass


class _Unsupported(Refusal, NotImplementedError):
    pass


_KINDS: dict[type[Refusal], type[Exception]] = {
    _BadValue: ValueError,
    _BadType: TypeError,
    _BadIndex: IndexError,
    _Unsupported: NotImplementedError,
}


def bad_value(rule: str, **about: object) -> Refusal:
    """A ValueError to raise below the public edge.

    Args:
        rule: the rule and what was found instead, without a full stop.
        about: values to describe in parentheses, by the names the user knows them by.
    """
    return _BadValue(_told(rule, about))


def bad_type(rule: str, **about: object) -> Refusal:
    """A TypeError to raise below the public edge; arguments as of :func:`bad_value`."""
    return _BadType(_told(rule, about))


def bad_index(rule: str, **about: object) -> Refusal:
    """An IndexError to raise below the public edge; arguments as of :func:`bad_value`."""
    return _BadIndex(_told(rule, about))


def unsupported(rule: str, **about: object) -> Refusal:
    """A NotImplementedError to raise below the public edge; arguments as of :func:`bad_value`."""
    return _Unsupported(_told(rule, about))


def public(
    operation: str | None = None,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorate what a user calls: it names the operation in every refusal from below.

    Where one such function calls another, the inner one has named it already.

    Args:
        operation: what the user calls it, without its module; by default the class of ``self``.

    >>> @public("halve")
    ... def halve(x):
    ...     if x % 2:
    ...         raise bad_value(f"x must be even but got {x}")
    ...     return x // 2
    >>> halve(3)
    Traceback (most recent call last):
    ValueError: [halve] x must be even but got 3.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def edge(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except Refusal as refusal:
                # Not str(): torch's Dynamo makes a repr of it.
                text, kind = refusal.args[0], _KINDS[type(refusal)]
                raise kind(_named(operation or class_of(args[0]), text)) from None

        return edge

    return decorate


def class_of(owner: object) -> str:
    """The name of the class of an object, or of the class that it is."""
    return (owner if isinstance(owner, type) else type(owner)).__name__


def sentence(operation: str, rule: str, **about: object) -> str:
    """The whole sentence, for what is not raised, such as a warning.

    Args:
        operation: what the user called.
        rule, about: as of :func:`bad_value`.
    """
    return _named(operation, _told(rule, about))


def _told(rule: str, about: dict[str, object]) -> str:
    facts = ", ".join([f"{name}: {describe(value)}" for name, value in about.items()])
    return f"{rule} ({facts})." if facts else f"{rule}."


def _named(operation: str, text: str) -> str:
    text = text.replace(OPERATION, operation).replace(OUT_OF_PLACE, operation.removesuffix("_"))
    return f"[{operation}] {text}"


def describe(value: object) -> str:
    """``float32[2, 8, 64]`` for a tensor, ``repr`` for anything else that fits in a sentence."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    text = repr(value)
    return f"a {type(value).__name__}" if len(text) > _LONGEST or "\n" in text else text


def integer(
    name: str, value: object, hint: str = "", *, kind: str = "an int", tensors: bool = False
) -> int:
    """What the user means by an integer, as of :func:`as_integer`; a TypeError for anything else.

    Args:
        name: named in the error.
        value, tensors: as of :func:`as_integer`.
        hint: what else may have been meant, for the end of the error.
        kind: what it must be, for the error.

    >>> integer("size", 3)
    3
    """
    number = as_integer(value, tensors)
    if number is None:
        raise bad_type(f"{name} must be {kind} but got {describe(value)}{hint}")
    return number


def as_real(value: object) -> float | None:
    """A real number as a float, infinite where it is too large for one; None for anything else.

    >>> as_real(3), as_real(-(10**400)), as_real(True), as_real("3")
    (3.0, -inf, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def as_integer(value: object, tensors: bool = False) -> int | None:
    """An integer of Python or numpy as one of Python; None for anything else, a bool too.

    A symbol of a compiler stays one.

    Args:
        value: what the user gave.
        tensors: whether a tensor of one integer counts.
    """
    if isinstance(value, (int, torch.SymInt)):
        return None if isinstance(value, bool) else value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor) and (not tensors or value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # a tensor may have no numbers
        return None


def check_dense(name: str, x: torch.Tensor, nested: str = "") -> None:
    """Refuse a tensor of another layout than strides.

    Args:
        name: named in the error.
        x: the tensor.
        nested: what to do with a nested one, with ``{name}`` for its name.
    """
    if x.is_nested or x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        if x.is_nested:
            kind = "nested" + nested.format(name=name)
        raise bad_type(f"{name} must be a dense tensor but got one that is {kind}")


def check_local(name: str, x: torch.Tensor) -> None:
    """Refuse a shard of a distributed tensor, of which kernels would read memory that it has not."""
    if type(x).__name__ == "DTensor":
        rule = "must be a local tensor but got a DTensor; give its to_local() or full_tensor()"
        raise bad_type(f"{name} {rule}")
