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


def is_readable(values: torch.Tensor) -> bool:
    """Whether a look at values costs no synchronisation and breaks no graph."""
    return values.device.type == "cpu" and not is_tracing()
