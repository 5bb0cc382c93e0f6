"""Attention without softmax as a gated recurrence, on queries and keys that are rotated already.

    S_t = diag(exp(a_t)) S_{t−1} + k_t v_tᵀ        o_t = S_tᵀ q_t        a <= 0

so that o_t = Σ_{i<=t} (q_tᵀ diag(exp(a_{i+1} + … + a_t)) k_i) v_i.

A block of tokens is computed at once from the state before it. Every exponential is of a sum of
decays, each sum added up on its own and never as a difference of two: none overflows, and a strong
decay does not take the digits of the weak ones around it. −∞ forgets everything before a token.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

# Tokens whose decays differ by channel are weighed pair by pair, in (block, block, channels) numbers.
BLOCK = 16


def quadratic(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: each token against all before it.

    Args:
        q: ``(rows, kv_heads, group, tokens, channels)``.
        k: ``(rows, kv_heads, tokens, channels)``.
        v: ``(rows, kv_heads, tokens, values)``.
        decay: logarithms, ``(rows|1, kv_heads|1, tokens, channels|1)``.
        state: S before the first token, ``(rows, kv_heads, channels, values)``.

    Returns:
        ``(rows, kv_heads, group, tokens, values)``, and the state after the last token.
    """
    tokens = k.shape[2]
    since = decay.cumsum(2)
    out = (q * since.exp()[:, :, None]) @ state[:, :, None]
    # between[t, i] = a_{i+1} + … + a_t, and −∞ where i > t.
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril(-1)[..., None]
    between = torch.where(later, decay[:, :, :, None], 0.0).cumsum(2)
    never = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).triu(1)[..., None]
    weight = between.masked_fill(never, -torch.inf).exp()
    if decay.shape[-1] == 1:
        scores = (q @ k[:, :, None].mT) * weight[:, :, None, ..., 0]
    else:
        weighed = weight * k[:, :, None]
        scores = (q.transpose(2, 3) @ weighed.mT).transpose(2, 3)
    out = out + scores @ v[:, :, None]
    # What each token has lost by the end: the decays after it.
    rest = decay[:, :, 1:].flip(2).cumsum(2).flip(2)
    rest = torch.nn.functional.pad(rest, (0, 0, 0, 1)).exp()
    return out, since[:, :, -1:].mT.exp() * state + (k * rest).mT @ v


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks one after the other, in time and memory that grow with the number of tokens.

    Args: as of :func:`quadratic`, and how many tokens there are between two states that are kept for
    the backward pass, which computes what lies between them again.
    """
    again = (
        torch.is_grad_enabled()
        and any(x.requires_grad for x in (q, k, v, decay, state))
        # Transforms cannot save by recomputing.
        and torch._C._functorch.peek_interpreter_stack() is None
    )
    outs = []
    # Split rather than sliced: the gradient of all parts is then put together once.
    for part in zip(*(x.split(chunk, dim=-2) for x in (q, k, v, decay))):
        if again:
            out, state = checkpoint(
                _blocks, *part, state, use_reentrant=False, preserve_rng_state=False
            )
        else:
            out, state = _blocks(*part, state)
        outs.append(out)
    return torch.cat(outs, 3), state


def _blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    block = k.shape[2] if decay.shape[-1] == 1 else BLOCK
    outs = []
    for part in zip(*(x.split(block, dim=-2) for x in (q, k, v, decay))):
        out, state = quadratic(*part, state)
        outs.append(out)
    return torch.cat(outs, 3), state


def stepped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it stands, token by token: for decoding.

    Args: as of :func:`quadratic`.
    """
    outs = []
    for q_t, k_t, v_t, a_t in zip(*(x.unbind(-2) for x in (q, k, v, decay))):
        state = a_t.exp()[..., None] * state + k_t[..., None] * v_t[..., None, :]
        outs.append(q_t @ state)
    return torch.stack(outs, 3), state
