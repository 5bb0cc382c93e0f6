"""Check on random activations that a conversion leaves attention scores unchanged.

In each layer of the original and of the copy, random activations pass through the projections in float64,
with biases and norms. The original's queries and keys are rotated with the old pairing, the copy's with the
new one. The scores may differ only because float64 sums have another order. As a control, the copy's scores
are also computed with the old pairing; that difference is reported as `unswitched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tightrope.functional import rotate
from tightrope.spec import RopeSpec

from .files import Entry, fail
from .model import Model
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


def verify(
    changes: Iterable[Change],
    copies: Mapping[str, Entry],
    model: Model,
    interleaved: bool,
    report: Callable[[float, str], None],
) -> Verified:
    """Compare attention scores before and after a conversion.

    Args:
        changes: the tensors whose rows moved.
        copies: the tensors of the converted copy, by name.
        interleaved: whether the copies pair neighbours.
        report: called with the fraction done, from 0.8 to 1, and a short text.

    Raises:
        ValueError: scores differ, or no layer has weights for both queries and keys.
    """
    layers: dict[tuple[str, bool], list[Change]] = {}
    for change in changes:
        layers.setdefault((change.place, change.role.startswith("index")), []).append(change)
    compared: set[str] = set()
    worst, weakest = 0.0, float("inf")
    for number, ((place, indexer), parts) in enumerate(layers.items()):
        report(0.8 + 0.2 * number / len(layers), "comparing scores")
        spec = model.of(parts[0].layer)
        weights = [one for one in parts if one.is_weight]
        if spec is None or not all(
            any(getattr(one, side) for one in weights) for side in ("queries", "keys")
        ):
            continue
        plain = RopeSpec(
            spec.head_dim,
            base=10000.0,
            rotary_dim=spec.rotary_dim,
            start=spec.start,
            interleaved=not interleaved,
        )
        if indexer:
            plain = replace(plain, head_dim=model.size("index_head_dim") or spec.head_dim, start=0)
        copied = [replace(one, entry=copies[one.entry.name]) for one in parts]
        old = _scores(parts, plain, number)
        new = _scores(copied, replace(plain, interleaved=interleaved), number)
        wrong = _scores(copied, plain, number)
        size = old.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        difference = float((old - new).abs().max() / size)
        if not difference <= BOUND:
            where = f"{place}.indexer" if indexer else place
            fail(
                f"scores must stay the same but those of {where} differ by {difference:.2g} of the largest "
                f"score, or are NaN"
            )
        compared.add(place)
        worst = max(worst, difference)
        weakest = min(weakest, float((old - wrong).abs().max() / size))
    report(1.0, "")
    if not compared:
        fail("to compare scores a layer must have weights for queries and keys but none has both")
    return Verified(len(compared), worst, weakest)


def _scores(parts: list[Change], spec: RopeSpec, seed: int) -> torch.Tensor:
    """Rotate queries and keys at distant positions; return their scores, ``(heads, tokens, tokens)``."""
    positions = torch.arange(_TOKENS) * _STRIDE
    q, k = (
        rotate(_vectors(parts, side, spec, seed)[None].contiguous(), spec, positions)[0]
        for side in ("queries", "keys")
    )
    repeats = max(q.shape[0] // k.shape[0], 1)
    return q @ k.repeat_interleave(repeats, 0)[: q.shape[0]].transpose(-1, -2)


def _vectors(parts: list[Change], side: str, spec: RopeSpec, seed: int) -> torch.Tensor:
    """Return the queries or keys of a layer, ``(heads, tokens, head_dim)``, with its norms applied."""
    width, start = spec.head_dim, spec.start
    made = []
    for weight in (one for one in parts if one.is_weight):
        generator = torch.Generator().manual_seed(seed)
        shape = _TOKENS, weight.entry.shape[1]
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        beside = [one for one in parts if one.module == weight.module and not one.is_weight]
        for first in getattr(weight, side):
            # Of a shared key, the rows that rotate are all that is read.
            latent = weight.role == "kv a"
            begin, count = (first, weight.width) if latent else (first - start, width)
            head = x @ weight.entry.rows(begin, count, weight.units).T
            for one in (one for one in beside if one.units == weight.units):
                row = one.entry.rows(begin, count, one.units)[:, 0]
                head = head * row if "scale" in one.suffix else head + row
            if latent:
                head = torch.nn.functional.pad(head, (start, width - start - count))
            made.append(head)
    heads = torch.stack(made)
    norms = [one for one in parts if one.role.endswith("norm") and getattr(one, side)]
    if norms:
        heads = heads / heads.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    for suffix in ("weight", "bias"):
        rows = [
            one.entry.rows(first - start, width, one.units)[:, 0]
            for one in norms
            if one.suffix == suffix
            for first in getattr(one, side)
        ]
        if rows:
            row = torch.stack(rows)[:, None]
            heads = heads * row if suffix == "weight" else heads + row
    return heads
