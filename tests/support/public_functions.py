"""Rotary functions with the interfaces of public ones, written anew from their formulas, each with faults to plant.

Nothing here uses the library under test. A factory makes each function; its argument names a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Fn = Callable[..., Any]
Pair = tuple[torch.Tensor, torch.Tensor]


def turned(u: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Turn pairs (u, v) in the dtype of x, as eager code does."""
    return u * cos - v * sin, v * cos + u * sin


def joined(u: torch.Tensor, v: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.stack((u, v), -1).flatten(-2) if interleaved else torch.cat((u, v), -1)


def split(x: torch.Tensor, interleaved: bool) -> Pair:
    u, v = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return u, v


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
        y = joined(*turned(*split(x[..., :width], own), c, s), own)
        if inplace:
            x[..., :width].copy_(y)
            return x
        return torch.cat((y, x[..., width:]), -1)

    return apply_rotary_emb


# --- Liger ----------------------------------------------------------------------------------------


def liger(fault: str = "") -> Fn:
    """`liger_rotary_pos_emb`: q and k ``(rows, heads, tokens, channels)``, and a backward pass of its own."""

    class Rope(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> Any:
            ctx.save_for_backward(cos, sin)
            return rotated(q, cos, sin), k.clone() if fault == "k" else rotated(k, cos, sin)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            cos, sin = ctx.saved_tensors
            sin = sin if fault == "gradient" else -sin
            return rotated(grads[0], cos, sin), rotated(grads[1], cos, sin), None, None

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if fault == "rows":
            cos, sin = cos[:1], sin[:1]
        half = cos.shape[-1] // 2
        c, s = (t[:, None, :, :half] for t in (cos, sin))
        return joined(*turned(*split(x, False), c, s), False)

    def liger_rotary_pos_emb(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> Any:
        return Rope.apply(q, k, cos, sin)

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
        y = joined(*turned(*split(x.float(), True), cos, sin), True)
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
        y = joined(*turned(*split(t[..., :width], own), cos, sin), own)
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

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(freqs)
            return rotated(t, freqs, 1.0)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            (freqs,) = ctx.saved_tensors
            if fault == "no backward":
                return grads[0], None
            return rotated(grads[0], freqs, 1.0 if fault == "gradient" else -1.0), None

    def rotated(t: torch.Tensor, freqs: torch.Tensor, sign: float) -> torch.Tensor:
        width = freqs.shape[-1]
        angle = freqs[..., : width // 2].float()
        if fault == "angles in the dtype of x":
            angle = angle.to(t.dtype).float()
        u, v = split(t[..., :width].float(), False)
        y = joined(*turned(u, v, angle.cos(), sign * angle.sin()), False).to(t.dtype)
        return torch.cat((y, t[..., width:]), -1)

    def fused_apply_rotary_pos_emb(
        t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False
    ) -> torch.Tensor:
        return Fused.apply(t, freqs)  # type: ignore[no-any-return]

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
        first, second = turned(u, v, c, s)
        out1.copy_(first)
        if fault == "in place":  # reads what it has just written, if the output is x
            second = turned(x1.float(), v, c, s)[1]
        out2.copy_(second)

    return apply_rotary


def by_kernel(kernel: Fn, in_place: bool = False, fault: str = "") -> Fn:
    """The call of such a kernel, as a function of x ``(rows, heads, tokens, channels)`` and half tables."""

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, conj: bool) -> torch.Tensor:
        y, half = x if in_place else x.clone(), cos.shape[-1]
        parts = [t[..., n * half : (n + 1) * half] for t in (x, y) for n in (0, 1)]
        kernel(*parts[:2], cos[:, None], sin[:, None], *parts[2:], conj)
        return y

    class Rope(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> torch.Tensor:
            ctx.save_for_backward(cos, sin)
            if in_place:
                ctx.mark_dirty(x)
            return run(x, cos, sin, False)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return run(grads[0], *ctx.saved_tensors, fault != "backward"), None, None

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return Rope.apply(x, cos, sin)  # type: ignore[no-any-return]

    return rope
