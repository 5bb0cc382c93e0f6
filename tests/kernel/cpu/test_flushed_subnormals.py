"""Results where `torch.set_flush_denormal(True)` is on, as some trainers set it: subnormal numbers of the
arithmetic count as zero.

The pairs of a head then still have equal results if they have equal channels and angles, whether they lie
in the vector body of a loop or in its tail. float16 has subnormal numbers (below 6.1e-5) that are normal
numbers of the arithmetic, which is float32. They are kept, as in torch's own conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.matrix import needs_kernel
from tightrope import RopeSpec
from tightrope.activations import RMSNorm
from tightrope.backends import cpu
from tightrope.frequencies import Given
from tightrope.functional import apply_rotary_pos_emb, rotate
from tightrope.gates import Scalar

pytestmark = needs_kernel

SETS = cpu.instruction_sets()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Numbers of pairs: those of the tests of partial vectors, and some that fill one to several registers.
PAIRS = (1, 3, 4, 7, 8, 10, 17, 33, 40, 64, 67)
ANGLE = 0.3


@pytest.fixture(autouse=True)
def _flushed() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def test_the_processor_flushes() -> None:
    smallest = torch.finfo(torch.float32).smallest_normal
    assert (torch.tensor([smallest]) * 0.5).item() == 0.0


def tables(pairs: int, interleaved: bool, dtype: torch.dtype, size: float) -> Any:
    cos, sin = (torch.full((1, 2 * pairs), size * factor, dtype=dtype) for factor in (0.8, 0.6))
    kind = "repeat" if interleaved else "cat"
    return {"cos": cos, "sin": sin, "interleaved": interleaved, "tables": kind}


def turned(work: str, x: torch.Tensor, interleaved: bool, dtype: torch.dtype) -> torch.Tensor:
    pairs = x.shape[-1] // 2
    if work.startswith("tables"):
        kind = torch.float32 if work == "tables" else dtype
        size = 1.0 if work == "tables" else 3e-5
        return apply_rotary_pos_emb(x, None, **tables(pairs, interleaved, kind, size))[0]
    spec = RopeSpec(2 * pairs, interleaved=interleaved, scaling=Given((ANGLE,) * pairs))
    named: dict[str, Any] = {
        "words": {},
        "wide": {"rounding": "wide"},
        "each": {"rounding": "each"},
        "silu": {"act": "silu"},
        "softmax": {"act": "softmax"},
        "norm": {"act": RMSNorm(torch.ones(2 * pairs, dtype=torch.float32), 1e-6)},
        "gate": {"gate": Scalar(0.7)},
    }[work]
    return rotate(x, spec, 1, **named)


WORKS = (
    "words",
    "wide",
    "each",
    "tables",
    "tables of subnormals",
    "silu",
    "softmax",
    "norm",
    "gate",
)


def subnormal(dtype: torch.dtype) -> float:
    """Return a number below the smallest normal one of the dtype, or its neighbourhood."""
    return {torch.float16: 3e-6, torch.bfloat16: 3e-39, torch.float32: 3e-39}.get(dtype, 1e-309)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("work", WORKS)
def test_equal_pairs_have_equal_results(work: str, dtype: torch.dtype, name: str) -> None:
    cpu.use_instruction_set(name)
    tiny = subnormal(dtype)
    smallest = torch.finfo(dtype).smallest_normal
    for pairs in PAIRS:
        for interleaved in (False, True):
            for one in (tiny, -tiny, smallest, 1.7 * smallest, 1.0):
                x = torch.full((1, 1, 1, 2 * pairs), one, dtype=torch.float64).to(dtype)
                y = turned(work, x, interleaved, dtype).view(-1)
                split = y.view(pairs, 2).T if interleaved else y.view(2, pairs)
                for side in split:
                    assert len(set(side.tolist())) == 1, (pairs, interleaved, one, side)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("work", ["words", "wide", "each", "tables", "tables of subnormals"])
def test_subnormal_numbers_of_float16_are_kept(work: str, interleaved: bool, name: str) -> None:
    """The results are within one step of float16's subnormal numbers, 2^-24, of the exact ones."""
    cpu.use_instruction_set(name)
    # float64 has no subnormal numbers here, so the exact results are not flushed.
    angle, size = torch.tensor(ANGLE, dtype=torch.float64), 1.0
    c, s = angle.cos(), angle.sin()
    if work.startswith("tables"):
        c, s = (torch.tensor(one, dtype=torch.float64) for one in (0.8, 0.6))
        size = 3e-5 if work == "tables of subnormals" else 1.0
        c, s = (torch.tensor(size * one.item(), dtype=torch.float16).double() for one in (c, s))
    for pairs in PAIRS:
        u, v = (
            torch.linspace(first, last, pairs, dtype=torch.float64).to(torch.float16)
            for first, last in ((6e-8, 6e-5), (-6e-5, 1e-7))
        )
        if size != 1.0:
            u, v = u * 2**14, v * 2**14
        x = torch.stack((u, v), -1 if interleaved else 0).reshape(1, 1, 1, -1)
        y = turned(work, x, interleaved, torch.float16).view(-1).double()
        u, v = u.double(), v.double()
        want = torch.stack((u * c - v * s, v * c + u * s), -1 if interleaved else 0).view(-1)
        steps = 2 if work == "each" else 1  # it rounds the products as well
        assert (y - want).abs().max().item() <= steps * 2.0**-24
        assert y.abs().max().item() > 1e-5


def test_subnormal_numbers_at_position_0_come_back() -> None:
    every = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    x = torch.cat((every, -every)).view(1, 1, 1, -1)
    for name in SETS:
        cpu.use_instruction_set(name)
        assert torch.equal(
            rotate(x, RopeSpec(x.shape[-1]), 0).view(torch.int16), x.view(torch.int16)
        )
