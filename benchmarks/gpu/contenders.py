"""Who is measured beside us. Each may be absent, and says why.

Packages are looked for where they are installed and, before that, in `benchmarks/gpu/peers/`, which git
ignores: a checkout of each, named as its package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .cases import Case
from .inputs import Inputs, ids_of, ours

PEERS = Path(__file__).parent / "peers"

Call = Callable[[Inputs], Any]


class AbsentError(Exception):
    """Why somebody cannot take part in a case."""


def _plain(case: Case, works: tuple[str, ...] = ("out", "training")) -> None:
    if case.act != "none" or case.gate:
        raise AbsentError("it has no f and no P")
    if case.work not in works:
        raise AbsentError(f"it has no way to do: {case.work}")


def _package(name: str) -> Any:
    if PEERS.is_dir():
        for folder in (PEERS, *PEERS.iterdir()):
            if str(folder) not in sys.path and folder.is_dir():
                sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise AbsentError(f"{name}: {error}") from error


def tables(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (rows, tokens, pairs) by the usual formula in float32."""
    if case.positions == "M-RoPE":
        raise AbsentError("it takes positions of one axis")
    k = torch.arange(0, case.head_dim, 2, device=device, dtype=torch.float32)
    angles = ids_of(case, device)[..., None].float() * 10000.0 ** (-k / case.head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def trained(case: Case, rotate: Callable[..., Any]) -> Call:
    """What a case wants of a function of q and k.

    Args:
        rotate: of q and k, or of q alone, to what they become.
    """
    if case.work != "training":
        return lambda x: rotate(*x.xs)

    def call(x: Inputs) -> Any:
        leaves = [y.detach().requires_grad_() for y in x.xs]
        ys = rotate(*leaves)
        ys = ys if isinstance(ys, tuple) else (ys,)
        return torch.autograd.grad(ys, leaves, x.grads)

    return call


def copy(case: Case, _: torch.device) -> Call:
    """Memory moved as fast as it goes: clones of q and k, or each of them and its gradient."""
    if case.work == "in place":
        return lambda x: [y.neg_() for y in x.xs]
    if case.work == "frequencies":
        return lambda x: [y.sum() for y in (*x.xs, *x.grads)]
    return lambda x: [
        torch.clone(y) for y in (*x.xs, *(x.grads if case.work == "training" else ()))
    ]


def tightrope(case: Case, device: torch.device) -> Call:
    """What is measured here."""
    return ours(case, device)


def definition(case: Case, device: torch.device) -> Call:
    """The definition in plain torch."""
    return ours(case, device, "reference")


def definition_compiled(case: Case, device: torch.device) -> Call:
    """The definition as torch.compile fuses it."""
    if case.work in ("training", "frequencies"):
        raise AbsentError("its backward is compiled only inside of a model")
    if case.work == "in place":
        raise AbsentError("in place it is the kernel that is compiled, not the definition")
    return torch.compile(ours(case, device, "reference"))


def _half(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    u, v = q.chunk(2, -1)
    return q * cos + torch.cat((-v, u), -1) * sin


def _usual(case: Case, device: torch.device) -> Callable[..., Any]:
    _plain(case)
    if case.interleaved:
        raise AbsentError("it rotates halves")
    c, s = tables(case, device, getattr(torch, case.dtype))
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (c, s))
    return lambda *xs: tuple(_half(x, cos, sin) for x in xs)


def eager(case: Case, device: torch.device) -> Call:
    """The usual formula in eager torch."""
    return trained(case, _usual(case, device))


def compiled(case: Case, device: torch.device) -> Call:
    """The usual formula under torch.compile."""
    return trained(case, torch.compile(_usual(case, device)))


def transformers(case: Case, device: torch.device) -> Call:
    """transformers' function for Llama."""
    _plain(case)
    if case.interleaved or not case.k_heads:
        raise AbsentError("it rotates halves, of q and k")
    apply = _package("transformers.models.llama.modeling_llama").apply_rotary_pos_emb
    cos, sin = (torch.cat((t, t), -1) for t in tables(case, device, getattr(torch, case.dtype)))
    return trained(case, lambda q, k: tuple(apply(q, k, cos, sin)))


def liger(case: Case, device: torch.device) -> Call:
    """Liger's kernel, which writes into what it is given."""
    _plain(case, ("in place", "training"))
    if case.interleaved or not case.k_heads:
        raise AbsentError("it rotates halves, of q and k")
    apply = _package("liger_kernel.transformers.rope").liger_rotary_pos_emb
    cos, sin = (torch.cat((t, t), -1) for t in tables(case, device, getattr(torch, case.dtype)))
    return trained(case, lambda q, k: tuple(apply(q, k, cos, sin)))


def flash_attention(case: Case, device: torch.device) -> Call:
    """flash-attention's Triton kernel."""
    _plain(case, ("out", "training"))
    if case.positions != "0..n-1":
        raise AbsentError("its tables are by token")
    apply = _package("flash_attn.layers.rotary").apply_rotary_emb
    c, s = (t[0] for t in tables(case, device, getattr(torch, case.dtype)))

    def rotate(*xs: torch.Tensor) -> Any:
        return tuple(
            apply(x.transpose(1, 2), c, s, interleaved=case.interleaved).transpose(1, 2) for x in xs
        )

    return trained(case, rotate)


def fla(case: Case, device: torch.device) -> Call:
    """flash-linear-attention's Triton kernel."""
    _plain(case, ("out", "training"))
    if case.positions != "0..n-1":
        raise AbsentError("its tables are by token")
    apply = _package("fla.modules.rotary").rotary_embedding
    c, s = (t[0] for t in tables(case, device, getattr(torch, case.dtype)))

    def rotate(*xs: torch.Tensor) -> Any:
        return tuple(
            apply(x.transpose(1, 2), c, s, interleaved=case.interleaved).transpose(1, 2) for x in xs
        )

    return trained(case, rotate)


def xopes(case: Case, device: torch.device) -> Call:
    """xopes' Triton kernel, of q alone and with its activations."""
    if case.gate or case.act not in ("none", "silu", "softmax") or case.interleaved:
        raise AbsentError("it has halves, and no such f or P")
    if case.work not in ("out", "training") or case.positions != "0..n-1":
        raise AbsentError("it has no way to do this")
    module = _package("xopes.ops.lrpe.rotate._1d.lrpe_rotate_1d_sp_triton")
    k = torch.arange(0, case.head_dim, 2, device=device, dtype=torch.float32)
    theta = (10000.0 ** (-k / case.head_dim))[None]
    dim = -1 if case.act == "softmax" else None

    def rotate(*xs: torch.Tensor) -> Any:
        turned = (
            module.lrpe_rotate_1d_sp_triton(x.transpose(1, 2), theta, 0, case.act, dim) for x in xs
        )
        return tuple(y.transpose(1, 2) for y in turned)

    return trained(case, rotate)


#: By name, in the order of the report; the first two are what the others are compared with.
CONTENDERS: dict[str, Callable[[Case, torch.device], Call]] = {
    "tightrope": tightrope,
    "copy": copy,
    "eager": eager,
    "torch.compile": compiled,
    "definition": definition,
    "definition, torch.compile": definition_compiled,
    "transformers": transformers,
    "Liger": liger,
    "flash-attention": flash_attention,
    "FLA": fla,
    "xopes": xopes,
}
