"""Who is measured beside us. Each may be absent, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import peers
from .cases import Case
from .expected import angles, joined, pairs_of
from .inputs import (
    Call,
    Inputs,
    between,
    ids_of,
    our_call,
    ours,
    packed_length,
    row_starts,
    tensors,
    trained,
)
from .voice import AbsentError


def _refuse(condition: bool, reason: str) -> None:
    if condition:
        raise AbsentError(reason)


def _plain(case: Case, *works: str) -> None:
    _refuse(case.act != "none" or bool(case.gate), "it has no f and no P")
    _refuse(case.work not in works, f"it has no way to do: {case.work}")
    _refuse(case.neighbours, "a kernel of its own has no neighbours to be fused with")


def _all(case: Case) -> None:
    _refuse(case.against == "few", "left out, for the sake of time")


def tables(
    case: Case, device: torch.device, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (rows, tokens, pairs) as the dtype of a case has them."""
    dtype = getattr(torch, case.dtype)
    angle = angles(case, ids_of(case, device) if ids is None else ids)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def full_tables(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for every channel: halves duplicated, or neighbours."""
    cos, sin = tables(case, device)
    return joined(cos, cos, case.interleaved), joined(sin, sin, case.interleaved)


def _called(case: Case, rotate: Callable[..., Any]) -> Call:
    """What a case wants of an out-of-place function of q and k."""
    return trained(rotate) if case.work == "training" else lambda x: rotate(*x.xs)


# --- floors -----------------------------------------------------------------------------------------


def copy(case: Case, _: torch.device) -> Call:
    """As many bytes as the work reads and writes, as fast as they go; see `Case.copied`.

    Copies of q and k, and of their gradients where there is a backward pass; both negated in place; or,
    of a gradient by frequencies, which only reads, sums.
    """
    if case.work == "in place":
        return lambda x: [y.neg_() for y in x.xs]
    if case.work == "frequencies":
        return lambda x: [y.sum() for y in (*x.xs, *x.grads)]
    if case.work == "backward":
        return lambda x: [y.clone() for y in x.grads]
    return lambda x: [y.clone() for y in (*x.xs, *x.grads)]


# --- ours ---------------------------------------------------------------------------------------------


def tightrope(case: Case, device: torch.device) -> Call:
    """What is measured here."""
    return our_call(case, device)


def definition(case: Case, device: torch.device) -> Call:
    """The definition in plain torch."""
    _all(case)
    _refuse(case.neighbours, "it is measured compiled")
    return our_call(case, device, "reference")


def definition_compiled(case: Case, device: torch.device) -> Call:
    """The definition as torch.compile fuses it."""
    _refuse(case.work not in ("out", "training"), f"it is not compiled for: {case.work}")
    rotate = ours(case, device, "reference")
    rotate = between(rotate) if case.neighbours else rotate
    return _called(case, torch.compile(rotate, dynamic=False))


# --- the usual formula ----------------------------------------------------------------------------------


def _usual(case: Case, device: torch.device) -> Callable[..., Any]:
    """f and the rotation as models write them."""
    _refuse(case.work not in ("out", "in place", "training"), f"it has no way to do: {case.work}")
    _refuse(bool(case.gate), "it has no P")
    cos, sin = (t[:, None] for t in full_tables(case, device))

    def f(x: torch.Tensor) -> torch.Tensor:
        if case.act == "silu":
            return torch.nn.functional.silu(x)
        if case.act == "softmax":
            return x.softmax(-1)
        if case.act == "rms_norm":
            wide = x.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x

    def one(x: torch.Tensor) -> torch.Tensor:
        x = f(x)
        u, v = pairs_of(x, case.interleaved)
        return x * cos + joined(-v, u, case.interleaved) * sin

    def rotate(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if case.work == "in place":
            return tuple(x.copy_(one(x)) for x in xs)
        return tuple(one(x) for x in xs)

    return between(rotate) if case.neighbours else rotate


def eager(case: Case, device: torch.device) -> Call:
    """The usual formula in eager torch."""
    _all(case)
    return _called(case, _usual(case, device))


def compiled(case: Case, device: torch.device) -> Call:
    """The usual formula under torch.compile."""
    return _called(case, torch.compile(_usual(case, device), dynamic=False))


def transformers(case: Case, device: torch.device) -> Call:
    """transformers' function for Llama."""
    _all(case)
    _plain(case, "out", "training")
    _refuse(case.interleaved or not case.k_heads, "it rotates halves, of q and k")
    apply = peers.function("transformers")
    cos, sin = full_tables(case, device)
    return _called(case, lambda q, k: apply(q, k, cos, sin))


# --- kernels of others ------------------------------------------------------------------------------------


def liger(case: Case, device: torch.device) -> Call:
    """Liger's kernel, which writes into what it is given: q and k, and in training their gradients."""
    _all(case)
    _plain(case, "in place", "training")
    _refuse(case.interleaved or not case.k_heads, "it rotates halves, of q and k")
    _refuse(case.positions == "M-RoPE", "it takes positions of one axis")
    function = peers.function("Liger")
    cos, sin = full_tables(case, device)
    return _called(case, lambda q, k: function.apply(q, k, cos, sin))


def _by_token(
    case: Case, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Tables by token and what says where sequences begin, as flash-attention and FLA take them."""
    _refuse(case.positions == "M-RoPE", "it takes positions of one axis")
    starts = row_starts(case)
    reach = case.tokens + (starts[-1] if starts else 0)
    cos, sin = (t[0] for t in tables(case, device, torch.arange(reach, device=device)[None]))
    named: dict[str, Any] = {"interleaved": case.interleaved, "inplace": case.work == "in place"}
    if starts:
        named["seqlen_offsets"] = torch.tensor(starts, device=device)
    if case.positions == "packed":
        length = packed_length(case)
        ends = [min(start, case.tokens) for start in range(0, case.tokens + length, length)]
        named["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    return cos, sin, named


def flash_attention(case: Case, device: torch.device) -> Call:
    """flash-attention's kernel, of q and of k."""
    _all(case)
    _plain(case, "out", "in place", "training")
    cos, sin, named = _by_token(case, device)
    apply = peers.function("flash-attention")
    packed = "cu_seqlens" in named
    named |= {"max_seqlen": packed_length(case)} if packed else {}

    def one(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        # With sequences packed it has no dimension of rows.
        y = apply(x[0], cos, sin, **named)[None] if packed else apply(x, cos, sin, **named)
        return y.transpose(1, 2)

    return _called(case, lambda *xs: tuple(one(x) for x in xs))


def fla(case: Case, device: torch.device) -> Call:
    """flash-linear-attention's kernel, of q and of k."""
    _all(case)
    _plain(case, "out", "in place", "training")
    cos, sin, named = _by_token(case, device)
    apply = peers.function("FLA")
    return _called(
        case,
        lambda *xs: tuple(apply(x.transpose(1, 2), cos, sin, **named).transpose(1, 2) for x in xs),
    )


def xopes(case: Case, device: torch.device) -> Call:
    """xopes' kernel, of q and of k, with its activations; it tunes itself for a length."""
    _refuse(case.act not in ("none", "silu", "softmax") or bool(case.gate), "it has no such f or P")
    _refuse(case.interleaved or case.neighbours, "it rotates halves, and is a kernel of its own")
    _refuse(case.work not in ("out", "training"), f"it has no way to do: {case.work}")
    _refuse(case.positions != "0..n-1", "it takes an offset at most")
    tunes = case.work == "training" or (case.act == "none" and case.k_heads > 0)
    _refuse(tunes, "left out: it compiles dozens of kernels for each length and number of heads")
    apply = peers.function("xopes")
    k = torch.arange(0, case.head_dim, 2, device=device, dtype=torch.float64)
    theta = (10000.0 ** (-k / case.head_dim)).float()[None]
    dim = -1 if case.act == "softmax" else None

    def one(x: torch.Tensor) -> torch.Tensor:
        return apply(x.transpose(1, 2), theta, 0, case.act, dim).transpose(1, 2)

    return _called(case, lambda *xs: tuple(one(x) for x in xs))


#: By name, in the order of `cases.CONTENDERS`.
CONTENDERS: dict[str, Callable[[Case, torch.device], Call]] = {
    "tightrope": tightrope,
    "copy": copy,
    "torch.compile": compiled,
    "definition, torch.compile": definition_compiled,
    "flash-attention": flash_attention,
    "Liger": liger,
    "eager": eager,
    "transformers": transformers,
    "FLA": fla,
    "definition": definition,
    "xopes": xopes,
}


def results(found: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """What a call gave: its results, or what it was given, if it returns nothing."""
    given = tensors(found)
    return given or inputs.xs
