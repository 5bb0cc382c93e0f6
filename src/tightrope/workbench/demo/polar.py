"""Polar attention and plain RoPE attention, also evaluated beyond their training length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from ...examples.train_bytes import Size, Text, even_windows
from ...gates import Slope
from ...nn import KVCache, PolarRoPEAttention
from .race import Race, Run, Stop, prepare

PEAK_RATE = 3e-3
"""Three times the rate of :mod:`.race`, as these models are a fifth of the size."""

TIMES_LONGER = 4
_WINDOWS, _BATCH = 384, 16


class PolarAttention(nn.Module):
    """Polar attention as the demo's model calls it; without gates it is plain RoPE attention.

    The gates are exp(γ) and, at position p, exp(−rate · p) on queries and exp(rate · p) on keys.
    Each pair of each head has its own γ and rate: with every token of distance, its contribution to
    a score is multiplied by exp(−rate).
    """

    def __init__(self, size: Size, *, gated: bool) -> None:
        super().__init__()
        self.attention = PolarRoPEAttention(
            size.width, size.heads, size.head_dim, use_spd=gated, tied="pair", causal=True
        )
        self.log_rate: nn.Parameter | None = None
        if gated:
            first = torch.full((size.heads, size.head_dim // 2), _first_rate(size))
            self.log_rate = nn.Parameter(first.log())

    def forward(self, x: Tensor, offset: int, cache: KVCache | None) -> Tensor:
        gate = None
        if self.log_rate is not None:
            rate = self.log_rate.exp()
            gate = Slope(-rate, "pair"), Slope(rate, "pair")
        out: Tensor = self.attention(x, positions=offset, gate=gate, cache=cache)
        return out


def _first_rate(size: Size) -> float:
    return 1.0 / size.context


@dataclass
class Contest:
    """Both models, and their losses on windows longer than those of training."""

    size: Size
    race: Race
    by_position: dict[str, list[float]] = field(default_factory=dict)
    """Name of a run -> mean loss in nats by position in the long windows; empty if not reached."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the larger model, the one with gates."""
        return max(sum(w.numel() for w in run.model.parameters()) for run in self.race.runs)

    def last_loss(self, run: Run) -> float:
        """Return the mean of the last tenth of the training losses, as single losses scatter."""
        return fmean(run.losses[-max(1, self.race.steps // 10) :])

    def stretches(self, name: str) -> list[float]:
        """Return the mean nats per byte in stretches as long as in training; [] if not reached."""
        return means(self.by_position.get(name, []), self.size.context)

    def past_length(self, name: str) -> float | None:
        """Return how many more nats a byte costs beyond the training length than within it; None if not reached."""
        within, *past = self.stretches(name) or [0.0]
        return fmean(past) - within if past else None

    @property
    def first_half_distance(self) -> float:
        """The half distance of every pair before the first step, in tokens."""
        return math.log(2) / _first_rate(self.size)

    @property
    def half_distances(self) -> list[list[float]]:
        """Distances in tokens over which a pair's contribution to a score halves.

        One list per pair, with the values of all heads of all layers.
        """
        every = [
            module.log_rate.detach()
            for run in self.race.runs
            for module in run.model.modules()
            if isinstance(module, PolarAttention) and module.log_rate is not None
        ]
        distances: list[list[float]] = (math.log(2) / torch.cat(every).exp()).T.tolist()
        return distances


def set_up(size: Size, seed: int) -> Contest:
    """Build both models with the same weights; one has gates in addition."""
    makers = {
        "polar": partial(PolarAttention, gated=True),
        "plain RoPE": partial(PolarAttention, gated=False),
    }
    return Contest(size, prepare(size, makers, seed))


@torch.no_grad()
def read_longer(contest: Contest, text: Text, stop: Stop) -> None:
    """Evaluate both models on windows of `TIMES_LONGER` training lengths; set `by_position`.

    Args:
        stop: called before each batch; True ends the evaluation, and `by_position` stays empty.
    """
    length = TIMES_LONGER * contest.size.context
    count = min(_WINDOWS, text.validation.numel() // length)
    windows = even_windows(text.validation, count, length + 1)
    found = {}
    for run in contest.race.runs:
        losses = []
        for batch in windows.split(_BATCH):
            if stop():
                return
            losses.append(run.model.losses(batch))
        found[run.name] = torch.cat(losses).mean(0).tolist()
    contest.by_position = found


def means(losses: Sequence[float], size: int) -> list[float]:
    """Return the means of successive groups of `size` losses; the last group may be smaller."""
    return [fmean(losses[at : at + size]) for at in range(0, len(losses), size)]
