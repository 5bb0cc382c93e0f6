"""Training of one model with two attentions, step by step side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import nn

from ...examples.train_bytes import (
    PEAK_RATE as PEAK_RATE,
    ByteTransformer,
    Size,
    Text,
    Trainer,
    random_windows,
    schedule,
    validate,
)

# The first steps of a process allocate memory and start threads; medians leave them out.
_UNTIMED_STEPS = 2

MakeAttention = Callable[[Size], nn.Module]
Stop = Callable[[], bool]


class Run(Trainer):
    """A model in training, with its name and its validation loss in nats per byte."""

    def __init__(self, name: str, model: ByteTransformer) -> None:
        super().__init__(model)
        self.name = name
        self.validation: float | None = None

    @property
    def median_step(self) -> float | None:
        """Median seconds of a step: forward, backward and optimizer."""
        timed = self.seconds[_UNTIMED_STEPS:] or self.seconds
        return median(timed) if timed else None

    @property
    def bits_per_byte(self) -> float | None:
        """The validation loss in bits."""
        return None if self.validation is None else self.validation / math.log(2)


@dataclass
class Race:
    """Two runs from the same weights on the same batches.

    Attributes:
        rates: the learning rate of each step.
        first_gradient_difference: |g1 − g2| / |g2| for the clipped gradients of the first step;
            None before that step, or if the models have different parameters.
    """

    runs: tuple[Run, Run]
    rates: list[float] = field(default_factory=list)
    first_gradient_difference: float | None = None

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return len(self.rates)

    @property
    def differences(self) -> list[float]:
        """|loss1 − loss2| of each step."""
        first, second = self.runs
        return [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]


def prepare(size: Size, attentions: Mapping[str, MakeAttention], seed: int) -> Race:
    """Build one model for each of two attentions, both with the same weights."""
    runs = []
    for name, make_attention in attentions.items():
        torch.manual_seed(seed)
        runs.append(Run(name, ByteTransformer(size, make_attention)))
    first, second = runs
    return Race((first, second))


def train(
    race: Race,
    text: Text,
    *,
    limit: tuple[int | None, float | None],
    seed: int,
    stop: Stop,
    report: Callable[[float], None],
    peak_rate: float = PEAK_RATE,
    alike: bool = True,
) -> None:
    """Train both models until a limit is reached or `stop` returns True.

    The learning rate follows the fraction done, so it ends low whichever limit is reached first.

    Args:
        limit: the largest number of steps and of seconds; None for no limit.
        stop: called before each step; True ends the training early.
        report: called before each step, and at the limit, with the fraction done.
        alike: whether both models have the same parameters, so that their gradients can be compared.
    """
    size = race.runs[0].model.size
    steps, seconds = limit
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    while not stop():
        by_steps = race.steps / steps if steps else 0.0
        by_time = (time.perf_counter() - start) / seconds if seconds else 0.0
        done = max(by_steps, by_time)
        report(done)
        if done >= 1.0:
            break
        windows = random_windows(text.train, size.batch, size.context + 1, generator)
        rate = peak_rate * schedule(done)
        # The models alternate in going first, as the second finds the batch in the cache.
        for run in race.runs if race.steps % 2 == 0 else reversed(race.runs):
            run.step(windows, rate)
        race.rates.append(rate)
        if race.steps == 1 and alike:
            race.first_gradient_difference = _gradient_difference(*race.runs)


def wrong_rotation_difference(
    size: Size, right: MakeAttention, wrong: MakeAttention, text: Text, seed: int
) -> float:
    """Return |g1 − g2| / |g2| for the first, unclipped gradients of a right and a wrong rotation.

    A right rotation's `Race.first_gradient_difference` must be far smaller.
    """
    race = prepare(size, {"right": right, "wrong": wrong}, seed)
    generator = torch.Generator().manual_seed(seed)
    windows = random_windows(text.train, size.batch, size.context + 1, generator)
    for run in race.runs:
        torch.autograd.backward(run.model.losses(windows).mean())
    return _gradient_difference(*race.runs)


def validate_both(race: Race, text: Text, stop: Stop) -> None:
    """Set the validation loss of each run, until `stop()` returns True."""
    for run in race.runs:
        if not stop():
            run.validation = validate(run.model, text.validation)


def _gradient_difference(first: Run, second: Run) -> float:
    apart = norm = 0.0
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        if a.grad is not None and b.grad is not None:
            apart += float((a.grad - b.grad).square().sum())
            norm += float(b.grad.square().sum())
    return math.sqrt(apart / norm)
