"""Errors about bad input, all in one form.

The form is ``[operation] rule but got value (x: float32[2, 8, 64]).``: the operation in brackets, one
sentence, and the tensors concerned.

A check raises the rule alone: ``raise bad_value("x must be dense", x=x)``. It does not know which
public function the user called. The decorator :func:`public` on that function adds the operation.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
import sys
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

# Maximum length of a repr in an error, in characters. A longer repr, or one with several lines, is
# replaced by the name of the type.
_LONGEST = 200

# Placeholders in a rule: the name of the operation, and that name without a final underscore.
OPERATION, OUT_OF_PLACE = "{operation}", "{out of place}"

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Refusal(Exception):
    """An error about bad input, before :func:`public` adds the name of the operation.

    Attributes:
        ways: ways to mend the input, from which advice is made: when each is right, and what then holds.
    """

    kind: ClassVar[type[Exception]]  # that the user gets
    ways: tuple[tuple[str, Any], ...] = ()


class _BadValue(Refusal, ValueError):
    kind = ValueError


class _BadType(Refusal, TypeError):
    kind = TypeError


class _BadIndex(Refusal, IndexError):
    kind = IndexError


class _Unsupported(Refusal, NotImplementedError):
    kind = NotImplementedError


def bad_value(rule: str, **about: object) -> Refusal:
    """Return a ValueError to raise inside a function decorated with :func:`public`.

    Args:
        rule: the sentence, such as "x must be even but got 3", without a full stop.
        about: values to describe in parentheses, under the names that the user knows.
    """
    return _BadValue(_rule_with_facts(rule, about))


def bad_type(rule: str, **about: object) -> Refusal:
    """Return a TypeError to raise inside a public function; arguments as in :func:`bad_value`."""
    return _BadType(_rule_with_facts(rule, about))


def bad_index(rule: str, **about: object) -> Refusal:
    """Return an IndexError to raise inside a public function; arguments as in :func:`bad_value`."""
    return _BadIndex(_rule_with_facts(rule, about))


def unsupported(rule: str, **about: object) -> Refusal:
    """Return a NotImplementedError to raise inside a public function; see :func:`bad_value`."""
    return _Unsupported(_rule_with_facts(rule, about))


def public(
    operation: str | None = None,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorate a public function: put its name in front of every error about bad input.

    Arguments that the function does not take, or lacks, are such an error too. If one decorated function
    calls another, an error raised in the inner one has the inner name.

    Args:
        operation: the name to show, usually that of the function; by default the name of the class
            of ``self``.

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
                # Not str(): torch's Dynamo turns that into a repr.
                text, kind = refusal.args[0], type(refusal).kind
                raise kind(_named(operation or class_of(args[0]), text)) from None
            except TypeError:
                text = _misfit(inspect.signature(function), args, kwargs)
                if not text:
                    raise
                raise TypeError(_named(operation or class_of(args[0]), text)) from None

        return edge

    return decorate


# Names of arguments in other programs -> ours.
_OURS = {
    "rope_theta": "base",
    "theta": "base",
    "dim": "head_dim",
    "d": "head_dim",
    "position_ids": "positions",
    "spec": "rope",
    "from_spec": "old",
    "to_spec": "new",
    "scale": "cache_scale",
    "values": "v",
}
# What a rotation states, rather than a call; and what another function does.
_STATED = ("stack", "seq_len", "inv_freq", "phases", "rounding")
_ELSEWHERE = {
    "slots": "write_kv writes to the slots of a cache, and rerotate_ rotates them",
    "values": "write_kv writes values beside keys",
    "scale": "write_kv writes float8, with cache_scale=",
    "from_seq_len": "old may be spec.at(positions, seq_len=…)",
    "to_seq_len": "new may be spec.at(positions, seq_len=…)",
    "backend": "call it in a block of tightrope.backends.use(name)",
}


def _misfit(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """State why arguments do not fit a signature; empty if they do."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return ""
    stated = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    own = [one for one in stated if one.name not in ("self", "cls")]
    bare = [one.name for one in own if one.kind is not one.KEYWORD_ONLY]
    named = [one.name for one in own if one.kind is not one.POSITIONAL_ONLY]
    count = len(args) - (len(stated) - len(own))
    unknown = [name for name in kwargs if name not in named]
    if unknown:
        like = [_OURS.get(unknown[0], ""), *difflib.get_close_matches(unknown[0], named)]
        hint = next((f"; {name} may be meant" for name in like if name in named), "")
        if "rope" in named and unknown[0] in _STATED:
            hint = f"; pass spec.at(positions, {unknown[0]}=…) as rope"
        elif {"rope", "old", "cos"}.intersection(named) and unknown[0] in _ELSEWHERE:
            if not hint or unknown[0] not in _OURS:
                hint = f"; {_ELSEWHERE[unknown[0]]}"
        return f"arguments must be of {', '.join(named)} but got {', '.join(unknown)}{hint}."
    if count > len(bare):
        rest = ", ".join(f"{name}=" for name in named if name not in bare)
        some = f"only {', '.join(bare)} may" if bare else "no argument may"
        advice = f"; name the others: {rest}" * bool(rest)
        return f"{some} be given without a name but got {count} values{advice}."
    twice = [name for name in bare[:count] if name in kwargs]
    if twice:
        return f"{twice[0]} must be given once but got two values."
    lacking = [one.name for one in own if one.default is one.empty and one.name not in kwargs]
    return f"{', '.join(name for name in lacking if name not in bare[:count])} must be given."


def class_of(owner: object) -> str:
    """Return the name of an object's class, or of the class itself if given one."""
    return (owner if isinstance(owner, type) else type(owner)).__name__


def sentence(operation: str, rule: str, **about: object) -> str:
    """Return the complete message, for warnings and other texts that are not raised.

    Args:
        operation: name of the public function.
        rule, about: as in :func:`bad_value`.
    """
    return _named(operation, _rule_with_facts(rule, about))


def outside() -> int:
    """Return the stack level of the first caller outside this package, for ``warnings.warn``.

    The tools are no such caller: they read a user's file as the library does.
    Modules and checkpoints are called by torch, which does not count as a caller. Code without a
    module name, as ``exec`` and ``timeit`` run it, does.
    """
    frame, level = sys._getframe(1), 1
    package = __name__.partition(".")[0]
    packages = package, f"{package}_tools", "torch"
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in packages:
            break
        frame, level = frame.f_back, level + 1
    return level


def _rule_with_facts(rule: str, about: dict[str, object]) -> str:
    facts = ", ".join([f"{name}: {describe(value)}" for name, value in about.items()])
    return f"{rule} ({facts})." if facts else f"{rule}."


def _named(operation: str, text: str) -> str:
    text = text.replace(OPERATION, operation).replace(OUT_OF_PLACE, operation.removesuffix("_"))
    if not text.isprintable():  # names from a file may hold line breaks, or codes for a terminal
        text = "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])
    return f"[{operation}] {text}"


def describe(value: object) -> str:
    """Describe a value for a message: a tensor as ``float32[2, 8, 64]``; any other value by its ``repr``,
    or by its type if the ``repr`` is long or has several lines."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    text = repr(value)
    return f"a {type(value).__name__}" if len(text) > _LONGEST or "\n" in text else text


def as_passed(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the dimensions of size 1 that the library put before those of the caller's."""
    while x.dim() > 1 and x.shape[0] == 1:
        x = x[0]
    return x


def integer(
    name: str, value: object, hint: str = "", *, kind: str = "an int", tensors: bool = False
) -> int:
    """Convert a value with :func:`as_integer`, or raise a TypeError.

    Args:
        name: name of the value in the error.
        value, tensors: as in :func:`as_integer`.
        hint: advice for the end of the error.
        kind: the expected kind of value, for the error.

    >>> integer("size", 3)
    3
    """
    number = as_integer(value, tensors)
    if number is None:
        raise bad_type(f"{name} must be {kind} but got {describe(value)}{hint}")
    return number


def plain_integer(name: str, value: object) -> int:
    """Convert a value with :func:`integer` to an int that is no symbol; tensors of one integer included.

    >>> plain_integer("size", torch.tensor(3))
    3
    """
    return operator.index(integer(name, value, tensors=True))


def one_or(size: int, noun: str) -> str:
    """State that a dimension must be 1 or ``size``.

    >>> one_or(8, "head"), one_or(1, "head")
    ('1 or 8 heads', '1 head')
    """
    return f"1 {noun}" if size == 1 else f"1 or {size} {noun}s"


def as_real(value: object) -> float | None:
    """Convert a real number to a float, infinite if it is too large; None for anything else.

    >>> as_real(3), as_real(-(10**400)), as_real(True), as_real("3")
    (3.0, -inf, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def real(name: str, value: object, hint: str = "") -> float:
    """Convert a value with :func:`as_real`, or raise a TypeError that ends with ``hint``.

    >>> real("base", 10)
    10.0
    """
    number = as_real(value)
    if number is None:
        raise bad_type(f"{name} must be a number but got {describe(value)}{hint}")
    return number


def positive(name: str, value: object, zero: bool = False, hint: str = "") -> float:
    """Check that a number is finite and positive (or 0, if ``zero``), and return it as a float.

    >>> positive("factor", 2)
    2.0
    """
    number = real(name, value, hint)
    if not (0.0 < number < math.inf or (zero and number == 0.0)):
        rule = "at least 0" if zero else "positive"
        raise bad_value(f"{name} must be {rule} and finite but got {value}")
    return number


def check_flag(name: str, value: object) -> None:
    """Refuse anything but a bool; the string "false", for example, would count as true."""
    if not isinstance(value, bool):
        raise bad_type(f"{name} must be a bool but got {describe(value)}")


def as_integer(value: object, tensors: bool = False) -> int | None:
    """Convert a Python or numpy integer to an int; None for anything else, bools included.

    A compiler's symbolic integer is returned unchanged.

    Args:
        value: any object.
        tensors: whether to accept a tensor that holds one integer.
    """
    if isinstance(value, (int, torch.SymInt)):
        return None if isinstance(value, bool) else value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor) and (not tensors or value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # a meta tensor has no data
        return None


def check_dense(name: str, x: torch.Tensor, nested: str = "") -> None:
    """Raise a TypeError for a tensor that is sparse or nested.

    Args:
        name: name of the tensor in the error.
        x: the tensor.
        nested: advice for a nested tensor.
    """
    if x.is_nested or x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        if x.is_nested:
            kind = "nested" + nested
        raise bad_type(f"{name} must be a dense tensor but got one that is {kind}")


_FLOATING = frozenset(
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and each.is_floating_point
)
#: Dtypes, by the words that name them in errors.
KINDS = {
    "a floating tensor": _FLOATING,
    "float32, float64, bfloat16 or float16": frozenset(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ),
    "int32, int64, float32 or float64": frozenset(
        (torch.int32, torch.int64, torch.float32, torch.float64)
    ),
    "int32 or int64": frozenset((torch.int32, torch.int64)),
    "int64": frozenset((torch.int64,)),
}


def check_type(name: str, x: object, hint: str = "") -> None:
    """Refuse anything but a tensor."""
    if not isinstance(x, torch.Tensor):
        raise bad_type(f"{name} must be a tensor but got {describe(x)}{hint}")


def check_tensor(
    name: str, x: Any, kind: str = "", *, sharded: bool = False, hint: str = ""
) -> None:
    """Refuse anything but a dense tensor of some dtypes; a DTensor too, unless ``sharded``.

    Args:
        name: name of the tensor in the error.
        x: the tensor, or what the caller gave in place of one.
        kind: a key of :data:`KINDS`; "" for any dtype.
        hint: advice for a value of another type or dtype.
    """
    check_type(name, x, hint)
    check_dense(name, x)
    if not sharded:
        check_local(name, x)
    if kind and x.dtype not in KINDS[kind]:
        found = str(x.dtype).removeprefix("torch.")
        raise bad_type(f"{name} must be {kind} but got {found}{hint}", **{name: x})


def check_place(name: str, x: torch.Tensor, other: str, device: torch.device) -> None:
    """Refuse a tensor that is not on a device; ``other`` names what is there, with a verb, such as "x is"."""
    if x.device != device:
        raise bad_value(f"{name} is on {x.device} but {other} on {device}")


def is_dtensor(x: object) -> bool:
    """Return True for a DTensor, without importing its module, which is large."""
    return type(x).__name__ == "DTensor"


def check_local(name: str, x: object) -> None:
    """Raise a TypeError for a DTensor: kernels would read beyond the memory of its local shard."""
    if is_dtensor(x):
        rule = "must be a local tensor but got a DTensor; pass its to_local() or full_tensor()"
        raise bad_type(f"{name} {rule}")
