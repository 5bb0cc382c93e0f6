"""Detect the pairing of a checkpoint from its weights.

Evidence. The two channels of a pair turn into one another, so training treats them alike: on average
their weight rows have the same size, whatever their frequency. Fast and slow pairs get different sizes.
So row sizes, averaged over heads, agree within true pairs and differ within false ones. The size of a
channel is ``log |q row| + log |k row|``: attention cannot distinguish a large query and a small key from
the reverse.

Confidence. Take the sum of squared differences between neighbours, less that between channels i and
i + rotary_dim / 2. For the mean sizes of all heads, this quadratic form is positive if the pairing is
half and negative if it is interleaved. In weights without structure, each head's centred sizes are as
likely as their negatives, so their mean is about normal, with the heads' own second moments.
:func:`_chance` bounds the probability that the form then reaches the observed value (Chernoff's bound for a
weighted sum of squares). No distribution of weights is assumed, and a few heads never suffice. No pairing is
reported if this chance is above :data:`NEEDED`, as for fresh weights and models without RoPE, or if
another kind of evidence favours the other pairing with a chance below 1 %.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tightrope._errors import public

from .files import open_checkpoint
from .model import Model, Stated, describe, pairing_name, read_model
from .plan import Change, Plan, make_plan
from .record import known, settled

# The largest chance at which a pairing is reported.
NEEDED = 1e-5
_MOST_LAYERS = 64
# Contrary evidence with a chance below this prevents an answer.
_DOUBT = 1e-2


@dataclass(frozen=True)
class Evidence:
    """The evidence from one kind of weights, whose sizes are compared between channels.

    Attributes:
        kind: ``"products"`` (of query and key rows, per key head) or ``"queries"`` (query rows, per head).
        samples: the number of heads compared.
        favours: the pairing that it favours, however weakly.
        chance: an upper bound of the probability that weights without structure favour either pairing
            as strongly.
    """

    kind: str
    samples: int
    favours: str
    chance: float


@dataclass(frozen=True)
class Detection:
    """The pairing of a checkpoint according to its weights and according to its files.

    Attributes:
        pairing: ``"half"``, ``"interleaved"``, or None if the weights do not show it.
        confidence: 1 - chance; 0 if the weights do not show the pairing.
        chance: an upper bound of the probability that weights without structure give evidence as strong.
        evidence: the evidence by kind of tensor.
        stated: the pairing stated by the user, a conversion record, the configuration or its family.
        who: the source of that statement.
        model: the model in one line.
        assumed: whether ``stated`` is only the pairing of the family's code, which no file states.
    """

    pairing: str | None
    confidence: float
    chance: float
    evidence: tuple[Evidence, ...]
    stated: str | None
    who: str
    model: str
    assumed: bool = False

    @property
    def contradicts(self) -> bool:
        """True if the weights contradict the files."""
        return self.pairing is not None and self.stated is not None and self.pairing != self.stated


@public("detect")
def detect(
    checkpoint: str | os.PathLike[str],
    *,
    stated: Stated | None = None,
) -> Detection:
    """Detect the pairing of a checkpoint from its weights, which may not show it.

    Args:
        checkpoint: as in :func:`tightrope_tools.convert.convert`.
        stated: facts that the configuration does not state.

    Raises:
        ValueError: the checkpoint is of an unknown kind, damaged, quantised, or partly outside its
            folder, or a fact about its model is missing or contradictory.
        OSError: a file cannot be read.
    """
    found = open_checkpoint(Path(checkpoint))
    model = read_model(found, stated or Stated())
    plan = make_plan(found, model)
    return weigh(plan, settled(found, model, plan, known(found)))


def weigh(plan: Plan, model: Model) -> Detection:
    """Detect as :func:`detect` does, for a planned checkpoint."""
    places: dict[str, list[Change]] = {}
    for change in plan.changes:
        places.setdefault(change.place, []).append(change)
    samples: dict[tuple[str, int], list[torch.Tensor]] = {}
    for parts in [*places.values()][:: -(-len(places) // _MOST_LAYERS)]:
        for kind, sizes in _sizes(parts):
            samples.setdefault((kind, sizes.shape[-1]), []).append(sizes)
    found = {kind: _weigh(torch.cat(parts)) for kind, parts in samples.items()}
    evidence = [
        Evidence(kind, len(torch.cat(samples[kind, width])), *one)
        for (kind, width), one in found.items()
        if one is not None
    ]
    best = min(evidence, key=lambda each: each.chance, default=None)
    pairing, chance = None, 1.0
    if best is not None:
        chance = min(best.chance * len(evidence), 1.0)
        against = [e for e in evidence if e.favours != best.favours and e.chance < _DOUBT]
        if chance <= NEEDED and not against:
            pairing = best.favours
    return Detection(
        pairing,
        0.0 if pairing is None else 1.0 - chance,
        chance,
        tuple(evidence),
        None if model.interleaved is None else pairing_name(model.interleaved),
        model.who,
        describe(model),
        model.assumed,
    )


# --- sizes of channels ----------------------------------------------------------------------------


def _sizes(changes: list[Change]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (kind, sizes of rotated channels ``[samples, rotary_dim]``) of a layer."""
    sides = []
    for side in ("queries", "keys"):
        rows = [
            one.heads(side).norm(dim=-1).clamp_min(1e-30).log()
            for one in changes
            if one.is_weight and not one.is_index and getattr(one, side)
        ]
        sides += [torch.cat(rows)] if rows else []
    if len(sides) == 2 and len(sides[0]) % len(sides[1]) == 0:
        q, k = sides
        yield "products", q.view(len(k), -1, q.shape[-1]).mean(1) + k
        yield "queries", q


def _weigh(samples: torch.Tensor) -> tuple[str, float] | None:
    """Return (the pairing that samples favour, its chance), or None if they cannot show one."""
    width = samples.shape[-1]
    if width < 4 or not bool(samples.isfinite().all()):
        return None
    centred = samples - samples.mean(-1, keepdim=True)
    size = centred.square().mean(-1, keepdim=True).sqrt()
    if bool((size < 1e-12).any()):
        return None  # equal rows: fresh norms
    centred = centred / size
    eye = torch.eye(width, dtype=torch.float64)
    halves = eye[: width // 2] - eye[width // 2 :]
    neighbours = eye[::2] - eye[1::2]
    form = neighbours.T @ neighbours - halves.T @ halves
    mean = centred.sum(0) / math.sqrt(len(centred))
    value = float(mean @ form @ mean)
    # For normal x with these second moments, x · form · x is a sum of squares with these weights.
    root = torch.linalg.svd(centred / math.sqrt(len(centred)), full_matrices=False)
    half_root = root.S[:, None] * root.Vh
    weights = torch.linalg.eigvalsh(half_root @ form @ half_root.T)
    return pairing_name(value < 0), _chance(abs(value), weights if value > 0 else -weights)


def _chance(value: float, weights: torch.Tensor) -> float:
    """Return an upper bound of twice the probability that ``sum weights_j x_j²`` reaches a value.

    The x_j are standard normal. The factor two is for the two pairings.
    """
    top = float(weights.max())
    if top <= 0.0:
        return 1.0
    slopes = torch.linspace(0.0, 1.0, 1001, dtype=torch.float64)[:-1, None] / (2.0 * top)
    bounds = -slopes[:, 0] * value - 0.5 * torch.log1p(-2.0 * slopes * weights).sum(-1)
    return min(2.0 * math.exp(float(bounds.min())), 1.0)
