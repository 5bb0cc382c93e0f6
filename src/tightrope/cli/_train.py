"""The same model trained twice, step by step side by side, with two attentions."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from ._interrupt import Interrupt
from ._model import ByteTransformer, MakeAttention, ModelSize
from ._text import Corpus

PEAK_RATE = 1e-3
_LAST_RATE = 0.05
_WARM_UP = 0.08
_VALIDATION_BATCHES = 6
# The first steps of a process allocate and start threads; medians leave them out.
_UNTIMED_STEPS = 2


@dataclass
class Run:
    """One model and what was recorded while it trained."""

    name: str
    model: ByteTransformer
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float | None = None

    @property
    def median_step(self) -> float | None:
        """Median seconds of a step: forward, backward and optimizer."""
        timed = self.seconds[_UNTIMED_STEPS:] or self.seconds
        return median(timed) if timed else None

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.validation is None else self.validation / math.log(2)

    def step(self, windows: Tensor, rate: float) -> None:
        """Take one optimizer step on `windows` and record its loss and time."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        start = time.perf_counter()
        loss = self.model.loss(windows)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


@dataclass
class Race:
    """Two runs from the same weights on the same batches."""

    runs: tuple[Run, Run]
    rates: list[float] = field(default_factory=list)
    first_gradient_difference: float | None = None
    """|g1 - g2| / |g2| over all parameters, after the first step's backward pass."""

    @property
    def steps(self) -> int:
        return len(self.rates)

    @property
    def differences(self) -> list[float]:
        """|loss1 - loss2| of each step."""
        first, second = self.runs
        return [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]


def prepare(size: ModelSize, attentions: Mapping[str, MakeAttention], seed: int) -> Race:
    """Build one model per attention, all with the same weights."""
    runs = []
    for name, make_attention in attentions.items():
        torch.manual_seed(seed)
        model = ByteTransformer(size, make_attention)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        runs.append(Run(name, model, optimizer))
    first, second = runs
    return Race((first, second))


def train(
    race: Race,
    corpus: Corpus,
    *,
    limit: tuple[int | None, float | None],
    seed: int,
    interrupt: Interrupt,
    report: Callable[[float], None],
    peak_rate: float = PEAK_RATE,
    alike: bool = True,
) -> None:
    """Train to the `limit`, in steps and in seconds, or until Ctrl-C; `report` the fraction done.

    Models that are `alike`, with the same parameters, have their first gradients compared.

    The learning rate follows the fraction done, so it ends low whichever limit binds; both models
    get the same rate at the same step.
    """
    size = race.runs[0].model.size
    steps, seconds = limit
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    while not interrupt.requested:
        by_steps = race.steps / steps if steps else 0.0
        by_time = (time.perf_counter() - start) / seconds if seconds else 0.0
        done = max(by_steps, by_time)
        report(done)
        if done >= 1.0:
            break
        windows = _draw(corpus.train, size.batch, size.context + 1, generator)
        rate = peak_rate * _rate(done)
        # Which one goes first alternates: the second finds the batch in the cache.
        for run in race.runs if race.steps % 2 == 0 else reversed(race.runs):
            run.step(windows, rate)
        race.rates.append(rate)
        if race.steps == 1 and alike:
            race.first_gradient_difference = _gradient_difference(*race.runs)


def wrong_rotation_difference(
    size: ModelSize, right: MakeAttention, wrong: MakeAttention, corpus: Corpus, seed: int
) -> float:
    """How far a wrong rotation moves the first step's gradients, as the demo measures them.

    Without it nobody knows whether the difference that the demo finds is small.
    """
    race = prepare(size, {"right": right, "wrong": wrong}, seed)
    generator = torch.Generator().manual_seed(seed)
    windows = _draw(corpus.train, size.batch, size.context + 1, generator)
    for run in race.runs:
        torch.autograd.backward(run.model.loss(windows))
    return _gradient_difference(*race.runs)


def validate(race: Race, corpus: Corpus, interrupt: Interrupt) -> None:
    """Set each run's mean loss on evenly spaced windows of the validation files."""
    size = race.runs[0].model.size
    windows = evenly(corpus.validation, _VALIDATION_BATCHES * size.batch, size.context)
    batches = windows.chunk(_VALIDATION_BATCHES)
    for run in race.runs:
        losses = []
        for windows in batches:
            if interrupt.requested:
                return
            with torch.no_grad():
                losses.append(run.model.loss(windows).item())
        run.validation = sum(losses) / len(losses)


def _rate(done: float) -> float:
    """Of the highest rate: up, then down half a cosine."""
    if done < _WARM_UP:
        return 0.02 + 0.98 * done / _WARM_UP
    turn = math.pi * (done - _WARM_UP) / (1.0 - _WARM_UP)
    return _LAST_RATE + (1.0 - _LAST_RATE) * 0.5 * (1.0 + math.cos(turn))


def evenly(text: Tensor, count: int, length: int) -> Tensor:
    """Evenly spaced windows of `length` bytes and the one after: (count, length + 1)."""
    starts = torch.linspace(0, text.numel() - length - 1, count, dtype=torch.float64).long()
    return _windows(text, starts, length + 1)


def _draw(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, text.numel() - length + 1, (count,), generator=generator)
    return _windows(text, starts, length)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def _gradient_difference(first: Run, second: Run) -> float:
    apart = norm = 0.0
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        if a.grad is not None and b.grad is not None:
            apart += float((a.grad - b.grad).square().sum())
            norm += float(b.grad.square().sum())
    return math.sqrt(apart / norm)
