"""Train a layer to follow a running sum modulo 5, then decode sequences far beyond the training length.

    python examples/state_tracking.py --out RESULTS.json

Each token is a digit; the model predicts the sum of all digits so far, modulo 5. Attention with rotation by
position alone cannot represent that: the sum depends on the digits, not on their positions. A layer that rotates by
running sums of angles from the data can: digit d turns the state by d / 5 of a turn.

Three layers differ in their angles alone: positions ("rope"), running sums in float32 ("float32"), and
running sums of phase words ("exact"). Each trains on sequences of up to 64 tokens. The program then prints
their accuracy by length, with the trained weights and each kind of sum; the difference between a prefill
and decoding token by token; and the errors of the sums. `python -m benchmarks.state_tracking` draws the
results. Needs numpy besides torch and tightrope.
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
KINDS = ("rope", "float32", "exact")
WINDOW = 20  # training steps whose median loss is stored
ONE_BY_ONE = "float32, token by token"

# 2π as an integer, in units of 2^-200.
_UNIT = 200
_TWO_PI = int(
    Fraction("6.283185307179586476925286766559005768394338798750211641949889184615632812572418")
    * 2**_UNIT
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


class RunningPhases(nn.Module):
    """Running sums of increments W x / |x|, one for each token, head and pair, as in Selective RoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEADS * HEAD_DIM // 2, WIDTH))

    def increments(self, x: Tensor) -> Tensor:
        """Return increments in radians `(batch, heads, tokens, pairs)`, for x `(batch, tokens, channels)`."""
        seen = rounded(x)
        size = (seen.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        each = (seen @ rounded(self.weight).mT / size).float()
        return each.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Phases, Any]:
        """Return the phases of the tokens, and the state after the last one, from which the next call continues."""
        made = phases.running(self.increments(x), state)
        return made, made.state


class NoPhases(RunningPhases):
    """Phases of zero, for rotation by position alone."""

    def forward(self, x: Tensor, state: Any = None) -> tuple[Phases, Any]:
        """See :class:`RunningPhases`."""
        made = phases.running(torch.zeros(1, 1, x.shape[1], 1), state)
        return made, made.state


class FloatSums(RunningPhases):
    """Running sums in float32, as public code computes them; the state is the last sum.

    Attributes:
        one_by_one: whether a call adds the increments in the order and with the roundings of decoding
            token by token. If not, torch adds them, on the CPU in float64 within a call.
    """

    one_by_one = False

    def forward(self, x: Tensor, state: Any = None) -> tuple[Phases, Any]:
        """See :class:`RunningPhases`."""
        increments = self.increments(x)
        before = torch.zeros_like(increments[:, :, :1]) if state is None else state[:, :, None]
        if self.one_by_one:
            each = torch.cat((before, increments), 2).numpy()
            sums = torch.from_numpy(numpy.cumsum(each, 2))[:, :, 1:]
        else:
            sums = before + increments.cumsum(2)
        return phases.given(sums), sums[:, :, -1]


class State(NamedTuple):
    """The tokens so far, as a layer keeps them: the state of its phases, and of its scan."""

    phases: Any
    memory: PolarState


class Attention(nn.Module):
    """Causal attention without softmax, whose queries and keys rotate by phases."""

    def __init__(self, rotary: RunningPhases, spec: RopeSpec) -> None:
        super().__init__()
        self.rotary, self.spec = rotary, spec
        inside = HEADS * HEAD_DIM
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, inside, bias=False) for _ in range(3)
        )
        self.out = nn.Linear(inside, WIDTH, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Attend over the tokens of x `(batch, tokens, channels)` and those before; return the new state too."""
        before, memory = (None, None) if state is None else state
        turns, after = self.rotary(x, before)
        q, k, v = (
            each(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        form = "step" if x.shape[1] == 1 else "chunked"
        q = q * HEAD_DIM**-0.5
        rope = self.spec.at(0 if memory is None else memory.tokens, phases=turns)
        y, memory = polar_scan(q, k, v, rope, state=memory, form=form)
        return self.out(y.transpose(1, 2).flatten(2)), State(after, memory)


class Tracker(nn.Module):
    """An embedding, one layer of attention without softmax, and a linear readout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        rotary = {"rope": NoPhases, "float32": FloatSums, "exact": RunningPhases}[kind]()
        # With phases, positions add nothing to the angles.
        spec = RopeSpec(HEAD_DIM, scaling=None if kind == "rope" else Proportional(0.0))
        self.embed = nn.Embedding(DIGITS + 1, WIDTH)
        self.attention = Attention(rotary, spec)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return scores `(batch, tokens, 5)` of each sum, for tokens `(batch, tokens)`, and the state."""
        x, state = self.attention(self.embed(tokens), state)
        return self.head(x), state


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


def accuracy(model: Tracker, lengths: list[int], seed: int) -> dict[int, float]:
    """Return the fraction of right sums in the eighth of the sequences that ends at each length."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens, sums = sequences(2, max(lengths), generator)
    right = (decode(model, tokens, CHUNK)[0].argmax(-1) == sums)[:, 1:].double()
    return {n: right[:, n - n // 8 : n].mean().item() for n in lengths}


@torch.no_grad()
def drift(model: Tracker, length: int) -> dict[str, float]:
    """Return the difference between one prefill and decoding token by token, at any token.

    The phases are compared after the last token, in turns.
    """
    tokens, _ = sequences(2, length, torch.Generator().manual_seed(0))
    (whole, first), (parts, second) = (decode(model, tokens, n) for n in (length + 1, 1))
    one, other = first.phases, second.phases
    if isinstance(one, Tensor):  # sums in float32, in radians
        turns = (one - other).abs() / (2 * math.pi)
    else:
        turns = (one.words - other.words).abs() * 2.0**-64
    return {"turns": turns.max().item(), "scores": (whole - parts).abs().max().item()}


@torch.no_grad()
def sum_errors(model: Tracker, longest: int) -> dict[str, dict[int, float]]:
    """Return errors of running sums in radians, by number of tokens, for a head and pair that learned.

    The increments are those of the model; their exact sums are integers of any size.
    """
    x = model.embed(torch.arange(DIGITS))[None]
    every = model.attention.rotary.increments(x)[0].transpose(1, 2).flatten(0, 1)
    turns = every.double() * DIGITS / (2 * math.pi)
    # The pair whose increments are closest to multiples of a fifth of a turn, other than 0.
    off = (turns - turns.round()).abs().amax(1) + (turns.abs().amax(1) < 0.5)
    own = every[off.argmin()]
    digits = torch.randint(0, DIGITS, (longest,), generator=torch.Generator().manual_seed(0))
    steps = own[digits].numpy()
    each = [int(value * 2**60) for value in own.double().tolist()]  # exact: 60 bits below 1
    exact = numpy.cumsum(numpy.array(each, dtype=object)[digits.numpy()])
    words = phases.running(torch.from_numpy(steps)[None, None, :, None]).words(True).flatten()
    one_by_one, in_chunks = numpy.cumsum(steps), [torch.zeros(1)]
    for chunk in torch.from_numpy(steps).split(CHUNK):
        in_chunks.append(in_chunks[-1][-1] + chunk.cumsum(0))
    chunked = torch.cat(in_chunks[1:])
    found: dict[str, dict[int, float]] = {ONE_BY_ONE: {}, "float32": {}, "exact": {}}
    for n in (2**i for i in range(6, longest.bit_length())):
        angle = exact[n - 1] << (_UNIT - 60)
        for name, value in ((ONE_BY_ONE, one_by_one[n - 1]), ("float32", chunked[n - 1])):
            error = int(Fraction(float(value)) * 2**_UNIT) - angle
            found[name][n] = abs(error) / 2**_UNIT
        error = (int(words[n - 1]) * _TWO_PI >> 64) - angle
        error = (error + _TWO_PI // 2) % _TWO_PI - _TWO_PI // 2
        found["exact"][n] = abs(error) / 2**_UNIT
    return found


def ways_of(model: Tracker) -> dict[str, Tracker]:
    """Return the model with every way to add up its increments; a model of positions has one."""
    if isinstance(model.attention.rotary, NoPhases):
        return {"positions": model}
    ways = {}
    for name, kind in (("float32", "float32"), (ONE_BY_ONE, "float32"), ("exact", "exact")):
        ways[name] = Tracker(kind)
        ways[name].load_state_dict(model.state_dict())
        rotary = ways[name].attention.rotary
        if isinstance(rotary, FloatSums):
            rotary.one_by_one = name == ONE_BY_ONE
    return ways


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
            right = {name: accuracy(one, lengths, seed) for name, one in ways_of(model).items()}
            for name, each in right.items():
                shown = "  ".join(f"{n}: {100 * value:.1f}%" for n, value in each.items())
                print(f"    {name:24} {shown}", flush=True)
            windows = [losses[at : at + WINDOW] for at in range(0, steps, WINDOW)]
            medians = [float(f"{statistics.median(each):.3g}") for each in windows]
            runs.append({"losses": medians, "accuracy": right})
        kinds[kind] = {"runs": runs, "drift": drift(model, min(longest, 4096))}
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
