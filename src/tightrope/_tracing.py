"""Whether the numbers in a tensor may be looked at."""

from __future__ import annotations

import torch


def is_tracing() -> bool:
    """Whether something looks on that wants symbols, fakes or wrapped tensors in place of values."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def broadcasts(own: int, size: int) -> bool:
    """Whether a dimension is 1 or ``size``.

    Dynamo takes the size of a parameter for another than the symbol of an equal one if asked whether
    it is ``in (1, size)``.

    >>> broadcasts(1, 8), broadcasts(8, 8), broadcasts(4, 8)
    (True, True, False)
    """
    return own == 1 or own == size


def is_readable(values: torch.Tensor) -> bool:
    """Whether a look at values costs no synchronisation and breaks no graph."""
    return values.device.type == "cpu" and not is_tracing()


def may_keep(device: torch.device) -> bool:
    """Whether a tensor that is made now may be kept: none that a trace or the pool of a graph owns."""
    if is_tracing():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
