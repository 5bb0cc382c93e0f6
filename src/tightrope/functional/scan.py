"""Attention without softmax as a gated recurrence over rotated queries and keys.

With the memory S, the decays a, which are logarithms, and the outputs o,

    S_t = diag(exp(a_t)) S_{t−1} + k_t v_tᵀ        o_t = S_tᵀ q_t        a <= 0

so that o_t = Σ_{i<=t} (q_tᵀ diag(exp(a_{i+1} + … + a_t)) k_i) v_i.

A block of tokens is computed at once from the state before it. Every exponent is the sum of the decays
between two tokens, not the difference of two running sums. So no exponential overflows, and a strong
decay does not reduce the precision of weak decays next to it. A decay of −∞ erases the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from .._errors import (
    OPERATION,
    as_real,
    bad_type,
    bad_value,
    check_place,
    check_tensor,
    check_type,
    describe,
    integer,
    public,
)
from .._tracing import broadcasts, is_readable
from ..ops.build import Request, build, stages_of
from ..ops.checks import Operands, layout_named, prepare
from ..ops.layouts import Layout
from ..ops.route import mode
from ..ops.run import run
from ..positions import Positions, PositionsLike
from ..spec import PreparedRotation, Rope, RopeSpec
from ._rotate import GateLike

_QK = ("q", "k")

# Tokens per block for decays per channel, which take (block, block, channels) weights per block.
BLOCK = 16

FORMS = ("chunked", "step")


class PolarState(NamedTuple):
    """The state that a scan passes from one call to the next.

    Attributes:
        memory: S, float32 or float64 ``(rows, kv_heads, channels, values)``.
        tokens: number of tokens seen, which is the default position of the next one.
    """

    memory: torch.Tensor
    tokens: int


@public("polar_scan")
def polar_scan(  # noqa: PLR0913  (one argument for each option)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: Rope,
    log_decay: torch.Tensor | float | None = None,
    positions: PositionsLike = None,
    *,
    gate: GateLike = None,
    state: PolarState | None = None,
    form: str = "chunked",
    chunk: int = 128,
    layout: str = "bhsd",
) -> tuple[torch.Tensor, PolarState]:
    """Causal attention without softmax, as a gated recurrence in linear time and memory.

    With R the rotation, P the gates and G the running sum of ``log_decay``::

        o_t = Σ_{i<=t} score(t, i) · v_i
        score(t, i) = (P_t R_t q_t)ᵀ diag(exp(G_t − G_i)) (P_i R_i k_i)

    Scores are not scaled: scale q. A decay or gate with the same value for both channels of a pair
    commutes with the rotation; if it is also the same for all tokens, scores depend only on the distance.

    Args:
        q, k: see :func:`rotate_qk`; the number of heads of q is a multiple of that of k. No
            DTensors: scan rows and heads of each process by torch's ``local_map``.
        v: like k, with any number of channels per head.
        rope, positions: see :func:`rotate`. If ``rope`` is a :class:`RopeSpec`, positions continue from
            ``state`` by default; a prepared rotation has its own. Its phases have a state of their own,
            ``phases.state``.
        log_decay: logarithms <= 0 of the factor on the memory at each token: None, a number, or a
            floating tensor ``()``, ``(kv_heads|1, channels|1)`` or ``(batch|1, kv_heads|1, tokens|1,
            channels|1)``, in this order for every layout. −∞ erases everything before the token.
        gate: a gate of :mod:`tightrope.gates` for q and k, or a pair, one for each.
        state: the state returned by the call on the preceding tokens; None to start a sequence.
        form: "chunked" for training; "step", token by token, for decoding.
        chunk: number of tokens between two states that the chunked form saves for the backward pass.
            It changes memory and time, and the result only by rounding.
        layout: "bhsd", "bshd" or "sbhd".

    Returns:
        The outputs, shaped like q with the channels of v, in the dtype of q; and the state after the
        last token, float32 (float64 for float64). Differentiable with respect to q, k, v, log_decay,
        the tensors of gates, the angles of phases and the state. ``torch.autocast`` does not change
        these results, nor the gradients if ``backward`` is called outside it: inputs may have 16 bits,
        the memory never does.

    Raises:
        TypeError, ValueError: invalid arguments; the message names the argument.

    Source: chunks of a gated recurrence: Yang et al., Gated Linear Attention (arXiv 2312.06635),
    section 4; rotated: Sun et al., Retentive Network (arXiv 2307.08621), section 2.1.

    >>> from tightrope import RopeSpec
    >>> q, k, v = torch.randn(3, 1, 8, 16, 64).unbind()
    >>> spec, decay = RopeSpec(64, interleaved=True), torch.full((8, 1), -0.1)
    >>> o, state = polar_scan(q, k, v, spec, decay)
    >>> one, state = polar_scan(q[:, :, :1], k[:, :, :1], v[:, :, :1], spec, decay, state=state)
    >>> one.shape, state.tokens
    (torch.Size([1, 8, 1, 64]), 17)
    """
    if form not in FORMS:
        raise bad_value(f"form must be one of {', '.join(FORMS)} but got {form!r}")
    chunk = integer("chunk", chunk)
    if chunk < 1:
        raise bad_value(f"chunk must be positive but got {chunk}")
    order = layout_named(layout)
    if order.dims != 4:
        raise bad_value(f"layout must be one of bhsd, bshd, sbhd but got {layout!r}")
    check_type("k", k)
    check_state(state)
    if state is not None and isinstance(rope, RopeSpec):
        if rope.by_length:
            raise bad_value(
                "rope must be spec.at(positions, seq_len=…) with a state, of the same length in all calls, if the "
                "frequencies depend on the length",
                rope=rope,
            )
        positions = state.tokens if positions is None else positions
    if isinstance(rope, PreparedRotation) and rope.stack is not None:
        raise bad_value(f"rope must have exact angles but was made for stack {rope.stack.name!r}")
    where = rope.where if isinstance(rope, PreparedRotation) else positions
    if state is not None and state.tokens and isinstance(rope, PreparedRotation):
        begins = rope.where.ids is None and rope.where.offset == 0
        if begins:
            raise bad_value(
                f"rope must be at the positions that follow the {state.tokens} tokens of state but begins at 0; state "
                "them: spec.at(state.tokens, …)"
            )
    if isinstance(where, Positions) and where.packed:
        raise bad_value(
            "positions must be of one sequence in each row, as its memory goes on from token to token, but are of several; "
            "scan the sequences one by one"
        )
    request = Request(_QK, "new", q, k, rope, positions, layout, stages=stages_of(None, gate))
    if isinstance(q, torch.Tensor) and q.dtype in (torch.bfloat16, torch.float16):
        # Rounding rotated queries and keys to 16 bits would spoil sums with cancellation.
        exact = prepare(Operands(_QK, (q, k), order), rope, positions)
        request = request._replace(q=q.float(), k=k.float(), rope=exact, positions=None)
    turned_q, turned_k = (order.to_bhsd(x) for x in run(build(request)))
    v = _checked_values(order.to_bhsd(q), order.to_bhsd(k), v, order)
    out, state = scanned(turned_q, turned_k, v, log_decay, state, form, chunk)
    return order.from_bhsd(out), state


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan a block of tokens at once: each token against all tokens up to it.

    Args:
        q: ``(rows, kv_heads, group, tokens, channels)``.
        k: ``(rows, kv_heads, tokens, channels)``.
        v: ``(rows, kv_heads, tokens, values)``.
        decay: decays <= 0, ``(rows|1, kv_heads|1, tokens, channels|1)``.
        state: S before the first token, ``(rows, kv_heads, channels, values)``.

    Returns:
        ``(rows, kv_heads, group, tokens, values)``, and the state after the last token.
    """
    tokens = k.shape[2]
    since = decay.cumsum(2)
    out = (q * since.exp()[:, :, None]) @ state[:, :, None]
    # between[t, i] = a_{i+1} + … + a_t; its weight is 0 where i > t.
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
    # By the end, a token's contribution has decayed by the sum of the decays after it.
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
    """Scan block by block, in time and memory linear in the number of tokens.

    Args: see :func:`_block`; ``chunk`` is the number of tokens between two states saved for the
    backward pass, which recomputes the steps between them.
    """
    recompute = (
        torch.is_grad_enabled()
        and any(x.requires_grad for x in (q, k, v, decay, state))
        # torch.func transforms do not support checkpointing, and a compiler chooses what to recompute.
        and mode() in ("eager", "forward")
    )
    outs = []
    # Split rather than slice: the backward pass then assembles the gradient once.
    for part in _parts(chunk, q, k, v, decay):
        if recompute:
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
    for part in _parts(block, q, k, v, decay):
        out, state = _block(*part, state)
        outs.append(out)
    return torch.cat(outs, 3), state


def _parts(
    size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    return zip(q.split(size, -2), k.split(size, -2), v.split(size, -2), decay.split(size, -2))


def stepped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan token by token, by the recurrence itself, for decoding.

    Args: see :func:`_block`.
    """
    outs = []
    for q_t, k_t, v_t, a_t in zip(*(x.unbind(-2) for x in (q, k, v, decay))):
        state = a_t.exp()[..., None] * state + k_t[..., None] * v_t[..., None, :]
        outs.append(q_t @ state)
    return torch.stack(outs, 3), state


def decays(given: torch.Tensor | float | None, k: torch.Tensor) -> torch.Tensor:
    """Check decays and expand them over the tokens, for the functions above.

    Args:
        given: None for no decay; a number; or a tensor ``()``, ``(kv_heads|1, channels|1)`` or
            ``(rows|1, kv_heads|1, tokens|1, channels|1)``.
        k: ``(rows, kv_heads, tokens, channels)``, in the precision of the computation.
    """
    tokens = k.shape[2]
    if given is None:
        return k.new_zeros(1, 1, tokens, 1)
    if isinstance(given, torch.Tensor):
        check_tensor("log_decay", given, "a floating tensor")
        shape = {0: (1, 1, 1, 1), 2: (1, *given.shape[:1], 1, *given.shape[1:]), 4: given.shape}
        view = given.reshape(shape[given.dim()]) if given.dim() in shape else None
        if view is None or not all(map(broadcasts, view.shape, k.shape)):
            raise bad_value(
                f"log_decay must have shape (), ({k.shape[1]}|1, {k.shape[3]}|1) or "
                f"({k.shape[0]}|1, {k.shape[1]}|1, {tokens}|1, {k.shape[3]}|1), for the rows, "
                "heads, tokens and channels of k",
                log_decay=given,
            )
        if is_readable(given) and bool((given > 0).any()):
            raise bad_value(
                f"log_decay must be at most 0 but reaches {given.max().item()}", log_decay=given
            )
        check_place("log_decay", given, "k is", k.device)
        made = view.to(k)
    else:
        decay = as_real(given)
        if decay is None:
            raise bad_type(f"log_decay must be None, a number or a tensor but got {given!r}")
        if not decay <= 0:
            raise bad_value(f"log_decay must be at most 0 but got {given}")
        made = k.new_full((1, 1, 1, 1), decay)
    return made.expand(-1, -1, tokens, -1)


def _checked_values(q: torch.Tensor, k: torch.Tensor, v: object, order: Layout) -> torch.Tensor:
    """Check v, in its layout, against q and k; return it as ``(rows, heads, tokens, channels)``, as they are."""
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        raise bad_value(
            f"the number of heads of q must be a multiple of that of k, {k.shape[1]}, but got "
            f"{q.shape[1]}"
        )
    if not isinstance(v, torch.Tensor) or v.dtype != k.dtype or v.device != k.device:
        found = ""
        if isinstance(v, torch.Tensor) and v.device != k.device:
            found = f" but is on {v.device}"
        raise bad_type(f"v must be a tensor of {k.dtype} on {k.device}{found}", v=v)
    check_tensor("v", v)
    view = order.to_bhsd(v) if v.dim() == 4 else v
    if v.dim() != 4 or view.shape[:3] != k.shape[:3]:
        raise bad_value(
            f"v must have the {k.shape[0]} rows, {k.shape[1]} heads and {k.shape[2]} tokens of k",
            v=v,
        )
    return view


def scanned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | float | None,
    state: PolarState | None,
    form: str,
    chunk: int,
) -> tuple[torch.Tensor, PolarState]:
    """Scan tensors ``(rows, heads, tokens, channels)`` of any floating dtype.

    16-bit tensors are computed in float32, and the result is rounded once, to the dtype of v.
    """
    inside = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads, tokens, channels = q.shape
    kv_heads, values = k.shape[1], v.shape[3]
    dtype, seen = v.dtype, 0
    q, k, v = (x.to(inside) for x in (q, k, v))
    each = decays(decay, k)
    if state is None:
        memory = k.new_zeros(rows, kv_heads, channels, values)
    else:
        memory, seen = state
        shape = rows, kv_heads, channels, values
        check_place("state", memory, "k is", k.device)
        if memory.shape != shape or memory.dtype != k.dtype:
            raise bad_value(
                f"state must have a memory {str(k.dtype).removeprefix('torch.')}{list(shape)} for this "
                "q, k and v",
                memory=memory,
            )
    groups = q.unflatten(1, (kv_heads, heads // max(kv_heads, 1)))
    with _without_autocast(q.device):
        if tokens == 0:
            # An empty result still needs gradients.
            out = groups @ memory[:, :, None]
            memory = each.sum(2)[..., None].exp() * memory + k.mT @ v
        elif form == "chunked":
            out, memory = chunked(groups, k, v, each, memory, chunk)
        else:
            out, memory = stepped(groups, k, v, each, memory)
    return out.flatten(1, 2).to(dtype), PolarState(memory, seen + tokens)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast for products with the memory.

    Such a product is a sum over all tokens so far. In 16 bits each block would round the sum of all
    blocks before it; autocast computes ``sum`` and ``cumsum`` in float32 for the same reason.
    """
    kind = device.type
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


# Evaluated once, at import: torch 2.10 cannot compile this query.
_AUTOCAST = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")
    if torch.amp.is_autocast_available(kind)
)


def check_state(state: object) -> None:
    """Raise a TypeError unless the argument is None or a state."""
    if state is None:
        return
    if (
        not isinstance(state, PolarState)
        or not isinstance(state.memory, torch.Tensor)
        or not isinstance(state.tokens, (int, torch.SymInt))
    ):
        raise bad_type(
            f"state must be None or a state returned by {OPERATION} but got {describe(state)}"
        )
    check_tensor("the memory of state", state.memory)
