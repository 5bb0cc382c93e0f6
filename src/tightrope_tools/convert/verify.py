"""Check on random activations that a conversion leaves attention scores unchanged.

In each layer of the original and of the copy, random activations pass through the projections in float64; biases, scales
and the weights of norms are added. The original's queries and keys are rotated with the old pairing, the copy's with the
new one. The scores may differ only because float64 sums have another order. As a control, the copy's scores
are also computed with the old pairing; that difference is reported as `unswitched`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tightrope.functional import rotate
from tightrope.spec import RopeSpec

from .files import Entry, fail
from .plan import Change

_TOKENS = 12
_STRIDE = 997
# Bound on the relative difference of two float64 sums of the same products, up to 2^16 of them.
BOUND = 1e-10


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Attributes:
        layers: the number of layers compared.
        difference: the largest difference of scores, relative to the largest score of the layer.
        unswitched: the control: the same difference with the copy rotated by the old pairing, in
            the layer where it is smallest. It should be much larger than ``difference``.
    """

    layers: int
    difference: float
    unswitched: float


def verify(changes: Iterable[Change], copies: Mapping[str, Entry], interleaved: bool) -> Verified:
    """Compare attention scores before and after a conversion.

    Args:
        changes: the tensors whose rows moved.
        copies: the tensors of the converted copy, by name.
        interleaved: whether the copies pair neighbours.

    Raises:
        ValueError: scores differ, or no layer has weights for both queries and keys.
    """
    layers: dict[tuple[str, bool], list[Change]] = {}
    for change in changes:
        layers.setdefault((change.place, change.is_index), []).append(change)
    worst: dict[str, float] = {}
    weakest = float("inf")
    for (place, _), parts in layers.items():
        weights = [one for one in parts if one.is_weight]
        if not (any(one.queries for one in weights) and any(one.keys for one in weights)):
            continue
        copied = [replace(one, entry=copies[one.entry.name]) for one in parts]
        old = _scores(parts, not interleaved)
        size = old.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        new, wrong = (
            float((old - _scores(copied, pairing)).abs().max() / size)
            for pairing in (interleaved, not interleaved)
        )
        if not new <= BOUND:
            fail(
                f"scores must stay the same but those of {place} differ by {new:.2g} of the largest score, or are NaN"
            )
        worst[place] = max(new, worst.get(place, 0.0))
        weakest = min(weakest, wrong)
    if not worst:
        fail("to compare scores a layer must have weights for queries and keys but none has both")
    return Verified(len(worst), max(worst.values()), weakest)


def _scores(parts: list[Change], interleaved: bool) -> torch.Tensor:
    """Rotate queries and keys at distant positions; return their scores, ``(heads, tokens, tokens)``."""
    spec = RopeSpec(parts[0].width, interleaved=interleaved)
    positions = torch.arange(_TOKENS) * _STRIDE
    q, k = (rotate(_vectors(parts, side)[None], spec, positions)[0] for side in ("queries", "keys"))
    repeats = max(q.shape[0] // k.shape[0], 1)
    return q @ k.repeat_interleave(repeats, 0)[: q.shape[0]].transpose(-1, -2)


def _vectors(parts: list[Change], side: str) -> torch.Tensor:
    """Return the rotated channels of queries or keys, ``(heads, tokens, width)``.

    Biases, scales and norms are added: whatever is computed channel by channel shows a channel in a wrong place.
    """
    own = [one for one in parts if getattr(one, side)]
    heads = [
        torch.stack(
            torch.broadcast_tensors(*(_rows(one, side) for one in own if one.module == module))
        ).sum(0)
        for module in dict.fromkeys(one.module for one in own if one.is_weight)
    ]
    norms = sum(_rows(one, side) for one in own if one.is_norm)
    return (torch.cat(heads) + norms).transpose(1, 2).contiguous()


def _rows(one: Change, side: str) -> torch.Tensor:
    """Return the rotated rows of each head, ``(heads, width, 1)``; of a matrix, of its product with random tokens."""
    rows = one.heads(side)
    if rows.shape[-1] == 1:
        return rows
    generator = torch.Generator().manual_seed(one.layer)
    return rows @ torch.randn((rows.shape[-1], _TOKENS), generator=generator, dtype=torch.float64)
