"""Rotary functions with the interfaces of public ones, written anew from their formulas, each with faults to plant.

Nothing here uses the library under test. A factory makes each function; its argument names a fault.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.planted_faults import Fn, turn


def differentiable(rotated: Fn, fault: str = "", writes: bool = False) -> Fn:
    """Return a function of x and tables with a backward pass of its own: by the opposite sines, unless a fault is planted.

    Args:
        rotated: makes the result of x, tables and the sign of the sines.
        writes: whether it overwrites x.
    """

    class Rope(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tables)
            if writes:
                ctx.mark_dirty(x)
            return rotated(x, *tables, 1.0)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            tables, sign = ctx.saved_tensors, 1.0 if fault == "gradient" else -1.0
            y = grads[0] if fault == "no backward" else rotated(grads[0], *tables, sign)
            return y, *[None] * len(tables)

    return Rope.apply  # type: ignore[no-any-return]


# --- flash-attention ------------------------------------------------------------------------------


def flash(fault: str = "", default: bool = False) -> Fn:
    """`apply_rotary_emb`: x ``(rows, tokens, heads, channels)``, or ``(tokens, heads, channels)`` of packed rows.

    Tables are ``(positions, pairs)``, and the channels after those of the tables stay.
    """

    def apply_rotary_emb(
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool = default,
        inplace: bool = False,
        seqlen_offsets: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        width = 2 * cos.shape[-1]
        if fault == "width":
            width -= 2
            cos, sin = cos[:, :-1], sin[:, :-1]
        if cu_seqlens is None:
            count = torch.arange(x.shape[1])
            first = torch.as_tensor(0 if fault == "offset" else seqlen_offsets).reshape(-1, 1)
            where = (first + count).expand(len(x), -1)
        else:
            starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
            where = torch.arange(len(x)) - (0 if fault == "restarts" else starts)
        c, s = (t[where][..., None, :].to(x.dtype) for t in (cos, sin))
        own = interleaved != (fault == "pairing")
        y = turn(x[..., :width], c, s, interleaved=own)
        if inplace:
            x[..., :width].copy_(y)
            return x
        return torch.cat((y, x[..., width:]), -1)

    return apply_rotary_emb


# --- Liger ----------------------------------------------------------------------------------------


def liger(fault: str = "") -> Fn:
    """`liger_rotary_pos_emb`: q and k ``(rows, heads, tokens, channels)``, and a backward pass of its own."""

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
        if fault == "rows":
            cos, sin = cos[:1], sin[:1]
        half = cos.shape[-1] // 2
        return turn(x, cos[:, None, :, :half], sign * sin[:, None, :, :half])

    rope = differentiable(rotated, fault)

    def liger_rotary_pos_emb(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> Any:
        return rope(q, cos, sin), k.clone() if fault == "k" else rope(k, cos, sin)

    return liger_rotary_pos_emb


# --- torchtune ------------------------------------------------------------------------------------


class RotaryPositionalEmbeddings(nn.Module):
    """The module: x ``(rows, tokens, heads, channels)``, interleaved, by a table of its own."""

    def __init__(
        self, dim: int = 64, max_seq_len: int = 8192, base: float = 10_000, fault: str = ""
    ) -> None:
        super().__init__()
        self.fault = fault
        theta = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(max_seq_len).float(), theta)
        cache = torch.stack((angles.cos(), angles.sin()), -1)
        if fault == "sine in 16 bits":
            cache[..., 1] = cache[..., 1].bfloat16().float()
        if fault == "sign":
            cache[..., 1].neg_()
        if fault == "last pair":
            cache[:, -1] = torch.tensor([1.0, 0.0])
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        count = torch.arange(x.shape[1], device=x.device)[None]
        where = count if input_pos is None else input_pos
        if self.fault == "first position" and input_pos is not None:
            where = input_pos[:, :1] + count
        cos, sin = self.cache[where][:, :, None].unbind(-1)  # type: ignore[index]
        y = turn(x.float(), cos, sin, interleaved=True)
        return y if self.fault == "dtype" else y.type_as(x)


# --- Megatron -------------------------------------------------------------------------------------


def megatron(fault: str = "", interleaved: bool = False) -> Fn:
    """The unfused function: t ``(tokens, rows, heads, channels)``, angles ``(tokens, 1, 1, channels)``."""

    def apply_rotary_pos_emb(
        t: torch.Tensor, freqs: torch.Tensor, mscale: float = 1.0
    ) -> torch.Tensor:
        width = freqs.shape[-1]
        pick = slice(None, None, 2) if interleaved else slice(width // 2)
        cos, sin = ((mscale * each[..., pick]).to(t.dtype) for each in (freqs.cos(), freqs.sin()))
        if fault == "swapped":
            cos, sin = sin, cos
        own = interleaved != (fault == "pairing")
        y = turn(t[..., :width], cos, sin, interleaved=own)
        return torch.cat((y, 2 * t[..., width:] if fault == "rest" else t[..., width:]), -1)

    return apply_rotary_pos_emb


def megatron_packed(fault: str = "") -> Fn:
    """The unfused function of packed rows t ``(tokens, heads, channels)``."""
    plain = megatron()

    def apply_rotary_pos_emb_thd(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor
    ) -> torch.Tensor:
        if fault == "restarts":
            return plain(t[:, None], freqs[: len(t)])[:, 0]  # type: ignore[no-any-return]
        rows = t.split(cu_seqlens.diff().tolist())
        return torch.cat([plain(row[:, None], freqs[: len(row)])[:, 0] for row in rows])

    return apply_rotary_pos_emb_thd


def megatron_fused(fault: str = "") -> Fn:
    """The fused function, with a backward pass of its own."""

    def rotated(t: torch.Tensor, freqs: torch.Tensor, sign: float) -> torch.Tensor:
        width = freqs.shape[-1]
        angle = freqs[..., : width // 2].float()
        y = turn(t[..., :width].float(), angle.cos(), sign * angle.sin()).to(t.dtype)
        return torch.cat((y, t[..., width:]), -1)

    rope = differentiable(rotated, fault)

    def fused_apply_rotary_pos_emb(
        t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False
    ) -> torch.Tensor:
        return rope(t, freqs)  # type: ignore[no-any-return]

    return fused_apply_rotary_pos_emb


# --- a kernel of the hub --------------------------------------------------------------------------


def hub(fault: str = "") -> Fn:
    """`apply_rotary`, which writes what it makes of two halves to two outputs."""

    def apply_rotary(
        x1: torch.Tensor,
        x2: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out1: torch.Tensor,
        out2: torch.Tensor,
        conj: bool,
    ) -> None:
        sin = -sin if conj != (fault == "conj") else sin
        u, v, c, s = (t.float() for t in (x1, x2, cos, sin))
        first, second = u * c - v * s, v * c + u * s
        out1.copy_(first)
        if fault == "in place":  # reads what it has just written, if the output is x
            second = v * c + x1.float() * s
        out2.copy_(second)

    return apply_rotary


def by_kernel(kernel: Fn, in_place: bool = False, fault: str = "") -> Fn:
    """The call of such a kernel, as a function of x ``(rows, heads, tokens, channels)`` and half tables."""

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
        y, half = x if in_place else x.clone(), cos.shape[-1]
        parts = [t[..., n * half : (n + 1) * half] for t in (x, y) for n in (0, 1)]
        kernel(*parts[:2], cos[:, None], sin[:, None], *parts[2:], sign < 0)
        return y

    turned = differentiable(run, fault, in_place)

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return turned(x, cos, sin)  # type: ignore[no-any-return]

    return rope
