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

from tests.support import oracle
from tests.support.matrix import DTYPES, both_pairings, needs_kernel
from tests.support.stated import call
from tightrope import RopeSpec
from tightrope.activations import RMSNorm
from tightrope.backends import cpu
from tightrope.frequencies import Given
from tightrope.functional import apply_rotary_pos_emb, rotate
from tightrope.gates import Scalar

pytestmark = needs_kernel

SETS = cpu.instruction_sets()
# Numbers of pairs: those of the tests of partial vectors, and some that fill one to several registers.
PAIRS = (1, 3, 4, 7, 8, 10, 17, 33, 40, 64, 67)
ANGLE = torch.tensor(0.3, dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "words": {},
    "wide": {"rounding": "wide"},
    "each": {"rounding": "each"},
    "silu": {"act": "silu"},
    "softmax": {"act": "softmax"},
    "norm": {},
    "gate": {"gate": Scalar(0.7)},
}
STAGES = ("silu", "softmax", "norm", "gate")
TABLES = {"tables": 1.0, "tables of subnormals": 3e-5}  # the size of their entries


@pytest.fixture(autouse=True, params=SETS)
def _flushed(request: pytest.FixtureRequest) -> Iterator[None]:
    cpu.use_instruction_set(request.param)
    assert torch.set_flush_denormal(True)
    assert (torch.tensor([torch.finfo(torch.float32).smallest_normal]) * 0.5).item() == 0.0
    yield
    torch.set_flush_denormal(False)


def cos_sin(work: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosine and sine of all pairs; those of tables in a dtype."""
    if work not in TABLES:
        return ANGLE.cos(), ANGLE.sin()
    kind = torch.float32 if work == "tables" else dtype
    cos, sin = (
        torch.tensor(TABLES[work] * one, dtype=torch.float64).to(kind) for one in (0.8, 0.6)
    )
    return cos, sin


def turned(work: str, x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    width = x.shape[-1]
    if work in TABLES:
        tables = [one.expand(1, width) for one in cos_sin(work, x.dtype)]
        kind = "repeat" if interleaved else "cat"
        return apply_rotary_pos_emb(x, None, *tables, interleaved=interleaved, tables=kind)[0]
    spec = RopeSpec(width, interleaved=interleaved, scaling=Given((ANGLE.item(),) * (width // 2)))
    norm = {"act": RMSNorm(torch.ones(width), 1e-6)} if work == "norm" else {}
    return call(rotate, x, spec, 1, **OPTIONS[work], **norm)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "work, dtype",
    [
        pytest.param(work, dtype, id=f"{work}-{dtype}")
        for work in (*OPTIONS, *TABLES)
        for dtype in DTYPES
        if dtype != torch.float64 or work not in STAGES  # those run the definition
    ],
)
def test_equal_pairs_have_equal_results(work: str, dtype: torch.dtype) -> None:
    # Below the smallest normal number of the dtype, or its neighbourhood.
    tiny = {torch.float16: 3e-6, torch.bfloat16: 3e-39, torch.float32: 3e-39}.get(dtype, 1e-309)
    smallest = torch.finfo(dtype).smallest_normal
    for pairs in PAIRS:
        for interleaved in (False, True):
            for one in (tiny, -tiny, smallest, 1.7 * smallest, 1.0):
                x = torch.full((1, 1, 1, 2 * pairs), one, dtype=torch.float64).to(dtype)
                y = turned(work, x, interleaved).view(-1)
                for side in oracle.channels(2 * pairs, 0, interleaved):
                    assert len(set(y[side].tolist())) == 1, (pairs, interleaved, one)


@both_pairings
@pytest.mark.parametrize("work", ["words", "wide", "each", *TABLES])
def test_subnormal_numbers_of_float16_are_kept(work: str, interleaved: bool) -> None:
    """The results are within one step of float16's subnormal numbers, 2^-24, of the exact ones.

    float64 has no subnormal numbers here, so the exact results are not flushed.
    """
    scale = 2**14 if work == "tables of subnormals" else 1
    for pairs in PAIRS:
        x = torch.zeros(1, 1, 1, 2 * pairs, dtype=torch.float16)
        first, second = oracle.channels(2 * pairs, 0, interleaved)
        for side, ends in ((first, (6e-8, 6e-5)), (second, (-6e-5, 1e-7))):
            line = torch.linspace(*ends, pairs, dtype=torch.float64).to(torch.float16)
            x[..., side] = line * scale
        y = turned(work, x, interleaved).double()
        cos, sin = (one.expand(1, 1, 1, pairs) for one in cos_sin(work, torch.float16))
        want = oracle.turned(x, cos, sin, 0, interleaved)
        steps = 2 if work == "each" else 1  # it rounds the products as well
        assert (y - want).abs().max().item() <= steps * 2.0**-24
        assert y.abs().max().item() > 1e-5


def test_subnormal_numbers_at_position_0_come_back() -> None:
    every = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    x = torch.cat((every, -every)).view(1, 1, 1, -1)
    y = rotate(x, RopeSpec(x.shape[-1]), 0)
    assert torch.equal(y.view(torch.int16), x.view(torch.int16))
