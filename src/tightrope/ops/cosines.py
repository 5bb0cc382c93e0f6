"""The operator for other libraries' cosines and sines: definition, fake kernel and vmap rule."""

from __future__ import annotations

from typing import Any

import torch

from .. import stacks
from . import schema
from .autograd import refuse_gradient
from .fake import check_devices


def cos_sin(at: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement ``cos_sin``; see :mod:`tightrope.ops.schema`."""
    if not at.is_contiguous():
        raise RuntimeError("tightrope::cos_sin: positions must be contiguous")
    cos, sin = stacks.cos_sin(at, *others)
    return cos.contiguous(), sin.contiguous()


def _fake(
    at: torch.Tensor,
    inv_freq: torch.Tensor,
    divisor: torch.Tensor | None,
    multiplier: torch.Tensor | None,
    factor: torch.Tensor | None,
    polar: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices("cos_sin", at, inv_freq)
    made = at.new_empty((*at.shape[:-1], inv_freq.shape[0]))
    return made, torch.empty_like(made)


def _by_rows(
    info: Any, dims: tuple[int | None, ...], at: torch.Tensor, *others: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int, int]]:
    if dims[0] is None or any(dim is not None for dim in dims[1:]):
        raise RuntimeError("tightrope::cos_sin: only positions may be batched")
    return schema.cos_sin(at.movedim(dims[0], 0).contiguous(), *others), (0, 0)


def register() -> None:
    """Register everything but the kernels; called once, at import."""
    torch.library.register_fake(schema.cos_sin, _fake)
    torch.library.register_vmap(schema.cos_sin, _by_rows)
    refuse_gradient(schema.cos_sin, "tightrope.functional.rotate with a spec")
