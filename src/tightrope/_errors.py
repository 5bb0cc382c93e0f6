"""The one place where error sentences get their form.

Every error that a user of the library can cause reads
``[operation] rule but got value (x: float32[2, 8, 64]).``: the operation in brackets, one sentence,
and the tensors it is about.
"""

from __future__ import annotations

import operator

import torch

# What would not fit in a sentence is only named.
_LONGEST = 200


def describe(value: object) -> str:
    """``float32[2, 8, 64]`` for a tensor, ``repr`` for anything else that fits in a sentence."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    text = repr(value)
    return f"a {type(value).__name__}" if len(text) > _LONGEST or "\n" in text else text


def integer(operation: str, name: str, value: object, hint: str = "") -> int:
    """What is an integer, of Python or numpy, as one of Python; a symbol of a compiler stays one.

    Args:
        operation, name: named in the error.
        value: what the user gave.
        hint: what else may have been meant, for the end of the error.

    >>> integer("demo", "size", 3)
    3
    """
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    if not isinstance(value, (bool, torch.Tensor)):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(sentence(operation, f"{name} must be an int but got {describe(value)}{hint}"))


def check_dense(operation: str, name: str, x: torch.Tensor, nested: str = "") -> None:
    """Refuse a tensor of another layout than strides.

    Args:
        operation, name: named in the error.
        x: the tensor.
        nested: what to do with a nested one, with ``{name}`` for its name.
    """
    if x.is_nested or x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        if x.is_nested:
            kind = "nested" + nested.format(name=name)
        raise TypeError(
            sentence(operation, f"{name} must be a dense tensor but got one that is {kind}")
        )


def check_local(operation: str, name: str, x: torch.Tensor) -> None:
    """Refuse a shard of a distributed tensor, of which kernels would read memory that it has not."""
    if type(x).__name__ == "DTensor":
        raise TypeError(
            sentence(
                operation,
                f"{name} must be a local tensor but got a DTensor; give its to_local() or full_tensor()",
            )
        )


def sentence(operation: str, message: str, **about: object) -> str:
    """Build the text of an error.

    Args:
        operation: what the user called, without its module.
        message: the rule and what was found instead, without a full stop.
        about: values to describe in parentheses, by the names the user knows them by.
    """
    facts = ", ".join(f"{name}: {describe(value)}" for name, value in about.items())
    return f"[{operation}] {message} ({facts})." if facts else f"[{operation}] {message}."
