"""Results of the CPU kernel that two processors can compare: `python bits.py FILE [INSTRUCTION SET]`.

Inputs are integers times powers of two and inputs of the kernel itself, so they have the same bits on
each machine. Torch computes nothing but conversions and the logarithms of gates.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tightrope import RopeSpec, gates, phases
from tightrope.activations import ACTS, RMSNorm
from tightrope.backends import cpu
from tightrope.functional import apply_rotary_pos_emb, rotate, rotate_

Case = Callable[[], Any]
Results = dict[str, list[torch.Tensor]]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
POSITIONS = {
    "0": 0,
    "1": 1,
    "10^6": 10**6,
    "2^31": 2**31 - 9,
    "negative": -(10**9) - 3,
    "fractions": torch.arange(9) / 8 + 0.0625,
    "far fractions": torch.arange(9, dtype=torch.float64) * 1234.40625 - 5000,
}
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 6e-8, 3e38, 65519.0, -70.0)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return numbers of many sizes, up to 8, most of which 16 bits round."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-22, -16, shape, generator=generator).double().exp2()
    return (torch.randint(-(2**20), 2**20, shape, generator=generator) * size).to(dtype)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with every special number in each channel of a pair."""
    x = numbers(1, 3, 9, 20, dtype=dtype)
    x[0, 0, :, :10] = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    x[0, 1, :, 10:] = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    return x


def both_ways(x: torch.Tensor, learns: tuple[torch.Tensor, ...], function: Case) -> Any:
    """Return a result and its gradients."""
    learns = tuple(each.requires_grad_() for each in (x, *learns))
    y = function()
    like = numbers(*y.shape, seed=9, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, learns, like)]


def plain(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Rotations: widths with and without tails, positions, memory, roundings, both directions."""
    for width, interleaved in itertools.product((2, 6, 24, 34, 90, 128, 222), (False, True)):
        spec = RopeSpec(width + 3, rotary_dim=width, start=width % 4 // 2, interleaved=interleaved)
        x = numbers(2, 3, 9, width + 3, seed=width, dtype=dtype)
        for (name, at), inverse in itertools.product(POSITIONS.items(), (False, True)):

            def call(x=x, spec=spec, at=at, **options) -> Any:
                return rotate(x, spec, at, backend="cpu", **options)

            options: dict[str, Any] = {"inverse": inverse}
            yield f"{width} {interleaved} {name} {inverse}", lambda c=call, o=options: c(**o)
            if name in ("10^6", "fractions"):
                rounded = options | {"rounding": "wide"}
                if dtype in (torch.bfloat16, torch.float16):
                    rounded = options | {"rounding": "each"}
                yield (
                    f"{width} {interleaved} {name} {inverse} strided, in place",
                    lambda s=spec, a=at, x=x: rotate_(x.clone().mT.contiguous().mT, s, a),
                )
                if dtype is not torch.float64:
                    rounding = f"{width} {interleaved} {name} {inverse} rounded"
                    yield rounding, lambda c=call, o=rounded: c(**o)
    for interleaved in (False, True):
        spec = RopeSpec(20, interleaved=interleaved)
        yield (
            f"special {interleaved}",
            lambda s=spec: rotate(special(dtype), s, 1000, backend="cpu"),
        )


def angles(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Gradients of angles, phases of tokens, and tables."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for width, interleaved in itertools.product((6, 24, 90), (False, True)):
        spec = RopeSpec(width, interleaved=interleaved)
        x = numbers(2, 3, 9, width, seed=width, dtype=dtype)
        name = f"{width} {interleaved}"

        def learned(x=x, spec=spec, width=width) -> Any:
            x, freq, at = x.clone(), numbers(3, width // 2) / 8, numbers(2, 9).to(wide)
            return both_ways(
                x, (freq, at), lambda: rotate(x, spec, at, inv_freq=freq, backend="cpu")
            )

        def running(x=x, spec=spec, width=width) -> Any:
            x, steps = x.clone(), numbers(2, 3, 9, width // 2).to(wide)

            def call() -> Any:
                return rotate(x, spec, phases=phases.running(steps), backend="cpu")

            return both_ways(x, (steps,), call)

        def tables(x=x, width=width, interleaved=interleaved) -> Any:
            cos, sin = (numbers(2, 9, width, seed=seed, dtype=dtype) / 8 for seed in (1, 2))
            q = x.clone()

            def call() -> Any:
                options: Any = {"interleaved": interleaved, "tables": "full", "backend": "cpu"}
                return apply_rotary_pos_emb(q, None, cos, sin, **options)[0]

            return both_ways(q, (), call)

        yield f"{name} learned", learned
        yield f"{name} running", running
        yield f"{name} tables", tables


def staged(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Acts and gates, forward and backward."""
    for width, interleaved in itertools.product((6, 40, 90), (False, True)):
        spec = RopeSpec(width + 2, rotary_dim=width, interleaved=interleaved)
        x = numbers(2, 3, 9, width + 2, seed=width, dtype=dtype)
        for act in (*ACTS, "rms_norm"):

            def acted(x=x, spec=spec, act=act) -> Any:
                x, weight = x.clone(), numbers(x.shape[-1], seed=3).float()
                norm = act == "rms_norm"
                f: Any = RMSNorm(weight) if norm else act
                return both_ways(
                    x,
                    (weight,) if norm else (),
                    lambda: rotate(x, spec, 100, act=f, backend="cpu"),
                )

            yield f"{width} {interleaved} {act}", acted
        made: dict[str, Callable[..., gates.Gate]] = {
            "slope": lambda n: gates.Slope(numbers(3, n) / 64),
            "given": lambda n: gates.Given(numbers(2, 9, 3, n)),
            "given, one for all channels": lambda _: gates.Given(numbers(2, 9, 3, 1)),
        }
        for kind, make in made.items():
            for inverse in (False, True):

                def gated(x=x, spec=spec, make=make, inverse=inverse) -> Any:
                    x, gate = x.clone(), make(x.shape[-1])
                    tensors = tuple(v for v in vars(gate).values() if isinstance(v, torch.Tensor))

                    def call() -> Any:
                        return rotate(x, spec, 3, gate=gate, inverse=inverse, backend="cpu")

                    return both_ways(x, tensors, call)

                yield f"{width} {interleaved} {kind} {inverse}", gated


def results() -> Results:
    """Run every case; return its tensors, with one bit pattern for all NaNs."""
    found = {}
    for dtype, family in itertools.product(DTYPES, (plain, angles, staged)):
        for name, case in family(dtype):
            made = case()
            made = made if isinstance(made, list) else [made]
            made = [x.detach().contiguous().clone() for x in made]
            for x in made:
                x[x.isnan()] = torch.nan
            found[f"{family.__name__} {str(dtype)[6:]} {name}"] = made
    return found


class Family(NamedTuple):
    """A family of cases: how many there are, how many have equal bits, and what the others differ by."""

    cases: int = 0
    equal: int = 0
    most: float = 0.0  # of the largest number of a tensor
    allowed: float = 0.0

    def __str__(self) -> str:
        text = f"{self.equal} of {self.cases} results have the bits of AVX2"
        return text + (f"; others differ by up to {self.most:.1g}" if self.most else "")

    def agrees(self) -> bool:
        return self.equal == self.cases or 0 < self.most <= self.allowed


def compare(one: Results, two: Results) -> dict[str, Family]:
    """Compare results by family and dtype."""
    table: dict[str, Family] = {}
    for name in one:
        key = " ".join(name.split()[:2])
        cases, equal, most, _ = table.get(key, Family())
        pairs = list(zip(one[name], two[name], strict=True))
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        for a, b in [] if same else pairs:
            if not torch.equal(a.isnan(), b.isnan()):
                most = math.inf
            size = a.double().nan_to_num(0, 0, 0).abs().max()
            most = max(most, float((a.double() - b.double()).abs().nan_to_num(0).max() / size))
        # Acts of doubles call the C library, whose erfc has other bits on other processors.
        allowed = 4e-16 if key == "staged float64" else 0.0
        table[key] = Family(cases + 1, equal + same, most, allowed)
    return table


if __name__ == "__main__":
    if len(sys.argv) > 2:
        cpu.use_instruction_set(sys.argv[2])
    torch.save(results(), sys.argv[1])
