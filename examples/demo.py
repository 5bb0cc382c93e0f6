"""Compare tightrope with eager rotation: training, times, and reading past the training length.

    python examples/demo.py

Three models of train_bytes.py start from the same weights and see the same batches. They differ only
in the rotation of queries and keys:

- tightrope: `rotate_qk`
- eager:     the usual expression in plain torch
- polar:     `rotate_qk` with a learned gate, so that scores fade with distance

Training amplifies rounding, so two right rotations may part after a while. Losses and gradients at the
same weights must agree: each step also reads the weights of the first model with eager rotation, and
with a wrong base, to show how far a mistake moves the loss.

The demo then reads longer windows than in training, times rotations alone, and draws
tightrope-demo/tightrope-demo.png. It takes two to three minutes, needs matplotlib, and exits with 1
if tightrope and eager rotation differ. Copy from it freely.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

import train_bytes
from tightrope import RopeSpec, __version__, rotate_qk, which
from tightrope.gates import Slope
from train_bytes import Attention, ByteTransformer, Size, Text, Trainer

try:
    from matplotlib.figure import Figure  # without pyplot, it saves with Agg and needs no display
except ModuleNotFoundError:
    sys.exit("The demo draws with matplotlib. Install it: pip install matplotlib")

say = partial(print, flush=True)  # so that lines appear at once, also in a file or a pipe

PEAK_RATE = 2e-3  # of learning; twice that of train_bytes.py, as the models are smaller
BASE, WRONG_BASE = train_bytes.BASE, train_bytes.BASE / 2
# Nats per byte of a loss; a share of the length of a gradient. At the same weights, rounding moves a
# loss by up to 1e-6, and a gradient by 1e-7 at first and 1e-6 after hundreds of steps.
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
TIMES_LONGER = 4
# Colours that colour-blind readers can tell apart.
BLUE, VERMILION, ORANGE, GREY = "#0072b2", "#d55e00", "#e69f00", "#66717d"


def eager_tables(head_dim: int, base: float, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at positions start … stop − 1, repeated for both halves."""
    inv_freq = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = (torch.arange(start, stop)[:, None] * inv_freq).repeat(1, 2)
    return angles.cos(), angles.sin()


def eager_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x `(..., seq, head_dim)`; channel i is paired with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class EagerAttention(Attention):
    """Attention with eager rotation."""

    def rotate(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """See :class:`Attention`."""
        cos, sin = eager_tables(self.head_dim, self.spec.base, offset, offset + q.shape[-2])
        return eager_rotate(q, cos, sin), eager_rotate(k, cos, sin)


class PolarAttention(Attention):
    """Attention with gates exp(−rate · p) on queries and exp(rate · p) on keys; rates learn."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        first = torch.full((size.heads, size.head_dim // 2), 1 / size.context)
        self.log_rate = torch.nn.Parameter(first.log())

    def rotate(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """See :class:`Attention`."""
        rate = self.log_rate.exp()
        gates = Slope(-rate, tied="pair"), Slope(rate, tied="pair")
        return rotate_qk(q, k, self.spec, offset, gate=gates)


ATTENTIONS: dict[str, Callable[[Size], Attention]] = {
    "tightrope": Attention,
    "eager": EagerAttention,
    "polar": PolarAttention,
}
# The rotations that read the weights of the model "tightrope".
READERS = {"eager": EagerAttention, "wrong base": partial(Attention, base=WRONG_BASE)}

READ = {"tightrope": "plain RoPE", "polar": "polar"}  # the models that read longer windows


def gradient_of(model: ByteTransformer, windows: Tensor) -> Tensor:
    """Return the gradient of the mean loss by all weights, as one vector."""
    gradients = torch.autograd.grad(model.losses(windows).mean(), list(model.parameters()))
    return torch.cat([each.flatten() for each in gradients])


def train(
    size: Size, text: Text, options: argparse.Namespace
) -> tuple[dict[str, Trainer], dict[str, list[float]], float]:
    """Train side by side, for a number of steps or else of seconds.

    Returns the models, and how far losses of each step, and the last gradient, are from those of eager
    rotation at the same weights.
    """
    trainers = {}
    for name, attention in ATTENTIONS.items():
        torch.manual_seed(options.seed)
        trainers[name] = Trainer(ByteTransformer(size, attention))
    ours = trainers["tightrope"].model
    readers = {name: ByteTransformer(size, attention) for name, attention in READERS.items()}
    for reader in readers.values():
        reader.load_state_dict(ours.state_dict(), assign=True)  # the same tensors, as they train
    gaps: dict[str, list[float]] = {"tightrope": [], "wrong base": []}
    generator = torch.Generator().manual_seed(options.seed)
    start, step, done, next_line = time.perf_counter(), 0, 0.0, 0.0
    while done < 1.0:
        windows = train_bytes.random_windows(text.train, size.batch, size.context + 1, generator)
        with torch.no_grad():
            read = {name: reader.losses(windows).mean().item() for name, reader in readers.items()}
        for trainer in trainers.values():
            trainer.step(windows, PEAK_RATE * train_bytes.schedule(done))
        gaps["tightrope"].append(abs(trainers["tightrope"].losses[-1] - read["eager"]))
        gaps["wrong base"].append(abs(read["wrong base"] - read["eager"]))
        step, elapsed = step + 1, time.perf_counter() - start
        done = min(1.0, step / options.steps if options.steps else elapsed / options.seconds)
        if done >= next_line:
            losses = ", ".join(f"{name} {each.losses[-1]:.3f}" for name, each in trainers.items())
            say(f"  step {step:4}  loss: {losses}  about {elapsed / done - elapsed:.0f} s left")
            next_line = min(1.0, next_line + 0.1)
    want = gradient_of(readers["eager"], windows)
    gradient = ((gradient_of(ours, windows) - want).norm() / want.norm()).item()
    return trainers, gaps, gradient


@torch.no_grad()
def losses_by_position(model: ByteTransformer, text: Text, windows: int) -> list[float]:
    """Return the mean loss at each position of windows longer than those of training."""
    length = TIMES_LONGER * model.size.context
    batches = train_bytes.even_windows(text.validation, windows, length + 1).split(16)
    losses: list[float] = torch.cat([model.losses(batch) for batch in batches]).mean(0).tolist()
    return losses


class Timing(NamedTuple):
    """Median times of one rotation, and eager time / tightrope time."""

    name: str
    times: str
    ratio: float


def time_rotation(tokens: int, dtype: torch.dtype, backward: bool, budget: float) -> Timing:
    """Time the rotation of 32 query and 8 key heads with 128 channels; both ways take turns."""
    # Transposed views, as models make them. Both rotations write new tensors.
    q, k = (torch.randn(1, tokens, heads, 128, dtype=dtype).transpose(1, 2) for heads in (32, 8))
    gradients = torch.randn_like(q), torch.randn_like(k)
    q, k = q.requires_grad_(backward), k.requires_grad_(backward)
    # Neither tables nor the prepared rotation are timed: models make them once for all layers.
    cos, sin = (table.to(dtype) for table in eager_tables(128, BASE, 0, tokens))
    rope = RopeSpec(128, base=BASE).at(0)

    def seconds(rotate: Callable[[], Sequence[Tensor]], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            rotated = rotate()
            if backward:
                torch.autograd.grad(rotated, (q, k), gradients)
        return (time.perf_counter() - start) / calls

    both = (lambda: [eager_rotate(x, cos, sin) for x in (q, k)], lambda: rotate_qk(q, k, rope))
    slower = max(min(seconds(rotate, 1) for _ in range(3)) for rotate in both)
    calls = math.ceil(0.005 / slower)  # short calls are timed in groups of about 5 ms
    end = time.perf_counter() + budget
    times: list[list[float]] = []
    while len(times) < 5 or time.perf_counter() < end:
        times.append([seconds(rotate, calls) for rotate in both])
    eager, ours = (median(each) for each in zip(*times, strict=True))
    name = f"{str(dtype)[6:]}, {tokens} token{'s' * (tokens > 1)}" + ", with backward" * backward
    return Timing(name, f"{eager * 1e6:,.0f} → {ours * 1e6:,.0f} µs", eager / ours)


class Results(NamedTuple):
    """Losses by step and, in long windows, by position; gaps at the same weights; times."""

    size: Size
    losses: dict[str, list[float]]
    gaps: dict[str, list[float]]
    gradient: float
    by_position: dict[str, list[float]]
    timings: list[Timing]


def draw(results: Results, caption: str) -> Figure:
    """Draw the four panels."""
    losses, timings, context = results.losses, results.timings, results.size.context
    figure = Figure(figsize=(13, 8.5), dpi=120, layout="constrained")
    figure.supxlabel(caption, fontsize=9)
    a, b, c, d = figure.subplots(2, 2).flat
    steps = range(1, len(losses["eager"]) + 1)
    a.set(title="(a) Training with both rotations", xlabel="step", ylabel="loss (nats per byte)")
    a.plot(steps, losses["eager"], color=ORANGE, lw=5, label="eager rotation")
    a.plot(steps, losses["tightrope"], color=BLUE, lw=1.2, label="tightrope")

    b.set(title=f"(b) Difference from eager at the same weights (wrong base: {WRONG_BASE:g})")
    b.set(xlabel="step", ylabel="|difference| of losses", yscale="log", ylim=(5e-9, 1e2))
    for name, color in (("wrong base", VERMILION), ("tightrope", BLUE)):
        shown = [max(each, 1e-8) for each in results.gaps[name]]  # a log axis has no 0
        b.plot(steps, shown, color=color, lw=1, label=name)
    b.axhline(TOLERANCE, color="black", ls="--", lw=1, label=f"tolerance, {TOLERANCE:g}")

    c.set(title="(c) Rotations alone", xlabel="times as fast as eager (ratio of median times)")
    ratios = [each.ratio for each in timings]
    c.barh(range(len(timings)), ratios, height=0.6, color=BLUE, label="tightrope")
    for row, each in enumerate(timings):
        c.text(each.ratio, row, f"  {each.ratio:.1f}x\n  {each.times}", va="center")
    c.axvline(1, color=ORANGE, lw=3, label="eager rotation")
    c.set_yticks(range(len(timings)), [each.name.replace(", w", ",\nw") for each in timings])
    c.set(xlim=(0, 1.5 * max(1.0, *ratios)), ylim=(len(timings) - 0.5, -0.5))

    d.set(title=f"(d) Reading {TIMES_LONGER} times the training length", xlabel="position (bytes)")
    d.set_ylabel("loss on other files (nats per byte)")
    for name, color, marker in (("tightrope", VERMILION, "s"), ("polar", BLUE, "o")):
        means = torch.tensor(results.by_position[name]).view(-1, context // 2).mean(1)
        middles = (torch.arange(len(means)) + 0.5) * (context // 2)
        d.plot(middles, means, color=color, marker=marker, label=READ[name])
    d.axvspan(0, context, color=GREY, alpha=0.2, lw=0, label="training length")
    for axes in (a, b, c, d):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def summarize(results: Results) -> bool:
    """Print the numbers of each panel; return whether tightrope and eager rotation agree."""
    losses, context = results.losses, results.size.context
    ours, wrong = results.gaps["tightrope"], results.gaps["wrong base"]
    # False also for NaN.
    agree = all(each <= TOLERANCE for each in ours) and results.gradient <= GRADIENT_TOLERANCE
    last = ", ".join(f"{name} {losses[name][-1]:.4f}" for name in ("tightrope", "eager"))
    say(f"(a) loss after {len(ours)} steps: {last} nats per byte")
    say(f"(b) at the same weights they differ by at most {max(ours):.1e}; tolerance {TOLERANCE:g}")
    say(f"    the gradients by {results.gradient:.1e} of their length; with base {WRONG_BASE:g}")
    say(f"    instead of {BASE:g}, the losses by up to {max(wrong):.1e}")
    for each in results.timings:
        say(f"(c) {each.name}: {each.ratio:.2f} times as fast as eager ({each.times})")
    for name, label in READ.items():
        by_position = results.by_position[name]
        within, past = fmean(by_position[:context]), fmean(by_position[context:])
        say(f"(d) {label}: {within:.3f} nats per byte up to {context} bytes, {past:.3f} past them")
    if not agree:
        say("THE TWO ROTATIONS DIFFER: one of them is wrong.")
    elif max(wrong) > TOLERANCE:
        say("The two rotations agree up to rounding; a wrong base would have been noticed.")
    else:
        say("The two rotations agree, but in so few steps a wrong base would pass too.")
    say("Do not quote (c) from a busy machine; a whole training step gains far less than it shows.")
    say("Panel (d) is one small model and one seed: an example, not a benchmark.")
    return agree


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, time and draw; return the exit code."""
    size, tokens, windows = Size(3, 4, 32, context=64, batch=16), 2048, 192
    if options.quick:
        size, tokens, windows = Size(2, 2, 32, context=64, batch=4), 64, 16
    options.out.mkdir(parents=True, exist_ok=True)
    text = train_bytes.load_text()
    backend, reason = which(torch.empty(1, 1, 1, 64))
    say(f"tightrope {__version__} runs", f"plain torch ({reason})" if reason else "its C++ kernel")
    say("1 of 3: training three models side by side; parts 2 and 3 then take about 20 s")
    trainers, gaps, gradient = train(size, text, options)
    say(f"2 of 3: reading windows of {TIMES_LONGER * size.context} bytes")
    read = {name: losses_by_position(trainers[name].model, text, windows) for name in READ}
    say("3 of 3: timing rotations")
    timings = [
        time_rotation(count, dtype, backward, 0.1 if options.quick else 2.0)
        for dtype in (torch.float32, torch.bfloat16)
        for count, backward in ((1, False), (tokens, False), (tokens, True))
    ]
    losses = {name: each.losses for name, each in trainers.items()}
    results = Results(size, losses, gaps, gradient, read, timings)
    path, threads = options.out / "tightrope-demo.png", torch.get_num_threads()
    draw(results, f"backend {backend}, threads: {threads}, seed {options.seed}").savefig(path)
    say(f"\nThe picture is {path}. Its panels:")
    return 0 if summarize(results) else 1


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments and run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tightrope-demo"), help="folder")
    parser.add_argument("--seconds", type=float, default=100.0, help="time to train (default 100)")
    parser.add_argument("--steps", type=int, help="steps to train, instead; results then repeat")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the program")
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < math.inf or (options.steps is not None and options.steps < 1):
        parser.error("--seconds and --steps must be positive and finite")
    try:
        return run(options)
    except OSError as error:
        sys.exit(f"The demo stopped: {error}")
    except KeyboardInterrupt:
        say("Stopped by Ctrl-C.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
