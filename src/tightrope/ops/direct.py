"""Call an operator, without the dispatcher where its kernel is a function in Python and nothing watches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import ON_GPUS
from .schema import NEW, Operator, Packed


def launch(
    operator: Operator, q: torch.Tensor, k: torch.Tensor | None, packed: Packed
) -> Sequence[torch.Tensor]:
    """Call NEW or IN_PLACE below autograd: its gradient formula in Python would only cost time here.

    On a GPU the dispatcher takes as long as the launch of a kernel. It is left out if it would only call
    the kernel: for tensors of no subclass, without the bit of a negative view, while no mode or profiler watches.
    """
    if q.is_cuda and ON_GPUS and _is_plain(q, k, packed):
        return ON_GPUS["rotate" if operator is NEW else "rotate_"](q, k, *packed)  # type: ignore[no-any-return]
    with torch._C._AutoDispatchBelowAutograd():
        return operator.for_(packed)(q, k, *packed)  # type: ignore[no-any-return]


def _is_plain(q: torch.Tensor, k: torch.Tensor | None, packed: Packed) -> bool:
    if len(packed) != 6:  # with extra tensors
        return False
    plain, (primary, secondary, positions, *_) = torch.Tensor, packed
    # Written out because a loop takes several times as long. Compilers and transforms take other routes.
    return (
        type(q) is plain is type(primary)
        and (k is None or (type(k) is plain and not k.is_neg()))
        and (secondary is None or type(secondary) is plain)
        and (positions is None or type(positions) is plain)
        and not q.is_neg()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
    )
