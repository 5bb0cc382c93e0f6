"""Train a layer to follow a running sum modulo 5, then decode sequences far beyond the training length.

    python examples/state_tracking.py --out RESULTS.json

Each token is a digit; the model predicts the sum of all digits so far, modulo 5. Attention with rotation by
position alone cannot represent that: the sum depends on the digits, not on their positions. A layer that rotates by
running sums of angles from the data can: digit d turns the state by d / 5 of a turn.

Three layers differ in their angles alone: positions, running sums in float32, and running sums of phase words
("exact"). Each trains on sequences of up to 64 tokens. The program then prints their accuracy by length, with the
trained weights and each kind of sum; the difference between a prefill and decoding token by token; and the errors of
the sums. `python -m benchmarks.state_tracking` draws the results. Needs numpy besides torch and tightrope.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tightrope import RopeSpec, phases
from tightrope.frequencies import Proportional
from tightrope.functional import PolarState, polar_scan
from tightrope.phases import Phases

DIGITS, START = 5, 5  # the token before the first digit
WIDTH, HEADS, HEAD_DIM = 32, 4, 4
LONGEST_TRAINED, TOKENS_PER_STEP, PEAK_RATE = 64, 1024, 1e-2
CHUNK = 2048
KINDS = ("positions", "float32", "exact")
WINDOW = 20  # training steps whose median loss is stored
ONE_BY_ONE = "float32, token by token"
TWO_PI = Fraction(
    "6.283185307179586476925286766559005768394338798750211641949889184615632812572418"
)


def rounded(x: Tensor) -> Tensor:
    """Round vectors `(..., channels)`, so that scalar products of two of them are exact in float64.

    An ordinary product rounds differently for one token and for many, so the increments of a prefill and
    of single tokens would differ. Here each channel becomes a multiple of 2^-b of the power of two above
    the largest channel, with b = (53 - log2 channels) / 2, and float64 holds the sum of all products, in
    any order. Gradients pass through the rounding.
    """
    bits = (53 - math.ceil(math.log2(x.shape[-1]))) // 2
    wide = x.double()
    fixed = wide.detach()
    _, exponent = torch.frexp(fixed.abs().amax(-1, keepdim=True).clamp(min=2.0**-500))
    unit = torch.ldexp(torch.ones_like(fixed[..., :1]), exponent - bits)
    return (fixed / unit).round() * unit + (wide - fixed)


def exact(increments: Tensor, state: Any) -> tuple[Phases, Any]:
    """Sum increments `(batch, heads, tokens, pairs)` as phase words, after an earlier call's state."""
    made = phases.running(increments, state)
    return made, made.state


def float32(increments: Tensor, last: Tensor | None) -> tuple[Phases, Tensor]:
    """Sum in float32, as public code does, which torch adds in float64 within a call on the CPU."""
    sums = increments.cumsum(2) if last is None else last + increments.cumsum(2)
    return phases.given(sums), sums[:, :, -1:]


def one_by_one(increments: Tensor, last: Tensor | None) -> tuple[Phases, Tensor]:
    """Sum in float32, in the order and with the roundings of decoding token by token."""
    last = torch.zeros_like(increments[:, :, :1]) if last is None else last
    sums = torch.from_numpy(numpy.cumsum(torch.cat((last, increments), 2).numpy(), 2))[:, :, 1:]
    return phases.given(sums), sums[:, :, -1:]


# Ways to add up increments; the state of those in float32 is the last sum.
SUMS = {"float32": float32, ONE_BY_ONE: one_by_one, "exact": exact}


class State(NamedTuple):
    """The tokens so far: the state of their sum, and of the scan."""

    phases: Any
    memory: PolarState


class Tracker(nn.Module):
    """An embedding, one layer of causal attention without softmax, and a linear readout.

    Attributes:
        way: how queries and keys rotate: by "positions", or by a way of `SUMS`.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, inside = way, HEADS * HEAD_DIM
        self.turns = nn.Parameter(torch.randn(inside // 2, WIDTH))
        self.embed = nn.Embedding(DIGITS + 1, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, inside, bias=False) for _ in range(3))
        self.out = nn.Linear(inside, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def increments(self, x: Tensor) -> Tensor:
        """Return increments W x / |x| in radians, for each token, head and pair, as in Selective RoPE."""
        seen = rounded(x)
        size = (seen.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        each = (seen @ rounded(self.turns).mT / size).float()
        return each.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return scores `(batch, tokens, 5)` of each sum, for tokens `(batch, tokens)`, and the state."""
        x = self.embed(tokens)
        before, memory = (None, None) if state is None else state
        start, after = 0 if memory is None else memory.tokens, None
        rope = RopeSpec(HEAD_DIM).at(start)
        if self.way in SUMS:
            made, after = SUMS[self.way](self.increments(x), before)
            # Positions add nothing to the angles.
            rope = RopeSpec(HEAD_DIM, scaling=Proportional(0.0)).at(start, phases=made)
        q, k, v = (each(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for each in self.qkv)
        form = "step" if x.shape[1] == 1 else "chunked"
        y, memory = polar_scan(q * HEAD_DIM**-0.5, k, v, rope, state=memory, form=form)
        return self.head(self.out(y.transpose(1, 2).flatten(2))), State(after, memory)


def sequences(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a start token and random digits, and their running sums: `(count, length + 1)` each."""
    digits = torch.randint(0, DIGITS, (count, length), generator=generator)
    start = torch.full((count, 1), START)
    sums = torch.cat((torch.zeros_like(start), digits.cumsum(1) % DIGITS), 1)
    return torch.cat((start, digits), 1), sums


def train(kind: str, seed: int, steps: int) -> tuple[Tracker, list[float]]:
    """Train a model; return it and its loss at each step.

    The length grows from 4 to 64 tokens in the first 40% of the steps. The loss is the squared error of
    the one-hot sum: zero only for exact increments, whereas cross-entropy hardly changes any more as soon
    as all predictions are right.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, losses = Tracker(kind), []
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        done = step / steps
        rate = PEAK_RATE * min(1.0, done / 0.05) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = int(4 * (LONGEST_TRAINED / 4) ** min(1.0, done / 0.4))
        tokens, sums = sequences(TOKENS_PER_STEP // length, length, generator)
        loss = (model(tokens)[0] - F.one_hot(sums, DIGITS)).square().sum(-1).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def decode(model: Tracker, tokens: Tensor, chunk: int) -> tuple[Tensor, State]:
    """Return the scores of tokens read in chunks, and the state after the last one."""
    scores, state = [], None
    for part in tokens.split(chunk, 1):
        each, state = model(part, state)
        scores.append(each)
    assert state is not None
    return torch.cat(scores, 1), state


def accuracy(model: Tracker, way: str, lengths: list[int], seed: int) -> dict[int, float]:
    """Return the fraction of right sums in the eighth of the sequences that ends at each length."""
    model.way = way
    tokens, sums = sequences(2, max(lengths), torch.Generator().manual_seed(1000 + seed))
    right = (decode(model, tokens, CHUNK)[0].argmax(-1) == sums)[:, 1:].double()
    return {n: right[:, n - n // 8 : n].mean().item() for n in lengths}


def drift(model: Tracker, kind: str, length: int) -> dict[str, float]:
    """Return the difference between one prefill and decoding token by token, at any token.

    The phases are compared after the last token, in turns.
    """
    model.way = kind
    tokens, _ = sequences(2, length, torch.Generator().manual_seed(0))
    (whole, first), (parts, second) = (decode(model, tokens, n) for n in (length + 1, 1))
    one, other = first.phases, second.phases
    if kind == "exact":
        turns = (one.words - other.words).abs() * 2.0**-64
    else:
        turns = (one - other).abs() / (2 * math.pi)
    return {"turns": turns.max().item(), "scores": (whole - parts).abs().max().item()}


@torch.no_grad()
def sum_errors(model: Tracker, longest: int) -> dict[str, dict[int, float]]:
    """Return errors of running sums in radians, by number of tokens, for a head and pair that learned.

    The increments are those of the model; their right sums are integers of any size.
    """
    x = model.embed(torch.arange(DIGITS))[None]
    every = model.increments(x)[0].transpose(1, 2).flatten(0, 1)
    turns = every.double() * DIGITS / (2 * math.pi)
    # The pair whose increments are closest to multiples of a fifth of a turn, other than 0.
    off = (turns - turns.round()).abs().amax(1) + (turns.abs().amax(1) < 0.5)
    own = every[off.argmin()]
    digits = torch.randint(0, DIGITS, (longest,), generator=torch.Generator().manual_seed(0))
    whole = numpy.array([int(value * 2**60) for value in own.double().tolist()], dtype=object)
    right = numpy.cumsum(whole[digits.numpy()])  # exact: an increment has 60 bits below 1
    found: dict[str, dict[int, float]] = {name: {} for name in SUMS}
    for n in (2**i for i in range(6, longest.bit_length())):
        for name, way in SUMS.items():
            state = None
            for part in own[digits[:n]].split(CHUNK):
                _, state = way(part[None, None, :, None], state)
            is_words = name == "exact"
            last = Fraction((state.words if is_words else state).item())
            error = (last * TWO_PI / 2**64 if is_words else last) - Fraction(right[n - 1], 2**60)
            found[name][n] = abs(float(error - round(error / TWO_PI) * TWO_PI))
    return found


def run(seeds: int, steps: int, longest: int) -> dict[str, Any]:
    """Train and measure every layer, for several seeds; return results as JSON types."""
    lengths = sorted({*(2**i for i in range(6, longest.bit_length(), 3)), longest})
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        runs = []
        for seed in range(seeds):
            start = time.perf_counter()
            model, losses = train(kind, seed, steps)
            took = time.perf_counter() - start
            print(f"trained with {kind}, seed {seed}: loss {losses[-1]:.0e} ({took:.0f} s)")
            ways = SUMS if kind in SUMS else [kind]
            right = {way: accuracy(model, way, lengths, seed) for way in ways}
            for way, each in right.items():
                shown = "  ".join(f"{n}: {100 * value:.1f}%" for n, value in each.items())
                print(f"    {way:24} {shown}", flush=True)
            windows = [losses[at : at + WINDOW] for at in range(0, steps, WINDOW)]
            medians = [float(f"{statistics.median(each):.3g}") for each in windows]
            runs.append({"losses": medians, "accuracy": right})
        kinds[kind] = {"runs": runs}
        if kind in SUMS:
            kinds[kind]["drift"] = drift(model, kind, min(longest, 4096))
            print(f"prefill against token by token, {kind}: {kinds[kind]['drift']}")
    sums = sum_errors(model, min(32 * longest, 2**20))
    for name, errors in sums.items():
        n = max(errors)
        print(f"error of a sum of {n} increments, {name}: {errors[n]:.1e} radians")
    settings = {"torch": torch.__version__, "seeds": list(range(seeds)), "steps": steps}
    return {**settings, **kinds, "sums": sums}


def main(arguments: list[str] | None = None) -> None:
    """Train, measure and print; write the results if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=700, help="training steps of each model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=2**15, help="tokens of the longest sequence")
    parser.add_argument("--quick", action="store_true", help="a few seconds, which learn nothing")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.seeds, options.longest = 20, 1, 256
    results = run(options.seeds, options.steps, options.longest)
    if options.out is not None:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in results.items()]
        options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
