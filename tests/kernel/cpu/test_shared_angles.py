"""Angles that rows and heads share are computed once, or kept, or read where they are; no bit changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.helpers import noise
from tests.support.matrix import DISTINCT_SETS, every_dtype, needs_kernel
from tests.support.tolerances import assert_each, assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.frequencies import YaRN
from tightrope.functional import rotate, rotate_, rotate_qk
from tightrope.ops import schema
from tightrope.positions import per_head

pytestmark = needs_kernel


@pytest.fixture(autouse=True, params=DISTINCT_SETS or [None])
def isa(request: pytest.FixtureRequest) -> None:
    """Run each test with each instruction set of this machine."""
    cpu.use_instruction_set(request.param)


def same(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [2, 7])
@pytest.mark.parametrize("heads", [131, 701])
def test_threads_divide_heads(heads: int, threads: int) -> None:
    """Of one or two tokens, also where their number does not divide that of the heads: none is lost or rotated twice.

    With few heads of k, and in rows whose heads are not one run of memory.
    """
    spec, kinds = RopeSpec(512), ("shared", "apart", "per head", "silu")
    for tokens, rows, kind in itertools.product((1, 2), (1, 3), kinds):
        q = noise(rows, heads, tokens, 512, dtype=torch.float32)
        q = q.transpose(1, 2).contiguous().transpose(1, 2) if kind == "apart" else q
        own = per_head(torch.arange(heads * tokens).view(heads, tokens))
        where = own if kind == "per head" else 5
        options: dict[str, Any] = {"act": "silu" if kind == "silu" else None}
        torch.set_num_threads(1)
        want = rotate(q, spec, where, **options)
        torch.set_num_threads(threads)
        if kind != "per head":
            ys = rotate_qk(q, q[:, :5], spec, where, **options)
            assert_same_bits(ys, (want, want[:, :5]))
        out = torch.full_like(q, torch.nan)
        assert_same_bits(rotate(q, spec, where, out=out, **options), want)
        assert_same_bits(rotate_(q, spec, where, **options), want)


# --- kept angles ----------------------------------------------------------------------------------


def kept(at: Any) -> bool:
    return any("angles" in key for key in at.kept._values)


IDS = torch.randint(-9, 2**40, (300,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@every_dtype
def test_a_prepared_rotation_keeps_the_angles_of_few_heads(dtype: torch.dtype, layout: str) -> None:
    """They change no bit, and ids that change are seen."""
    own = torch.randn(2, 300).double() * 50
    specs = (
        RopeSpec(48, rotary_dim=30, start=8),
        RopeSpec(48, interleaved=True, scaling=YaRN(4.0, 1024)),
    )
    q, k = torch.randn(2, 2, 300, 48).to(dtype), torch.randn(2, 1, 300, 48).to(dtype)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    for positions, inverse, rounding, spec in itertools.product(
        (None, -7, IDS.clone(), own), (False, True), ("once", "wide"), specs
    ):
        options: dict[str, Any] = {"layout": layout, "inverse": inverse}
        at = spec.at(positions, rounding=rounding)
        for call in range(4):
            if call == 3 and isinstance(positions, torch.Tensor):
                positions += 5
            found = rotate_qk(q, k, at, **options)
            fresh = (
                (spec, positions) if rounding == "once" else (spec.at(positions, rounding="wide"),)
            )
            assert_each(assert_same_bits, found, rotate_qk(q, k, *fresh, **options))
            assert kept(at) == (call > 0)


#: Rows, heads, tokens, width, ids, act, rounding; whether angles are kept. Rows with ids of their own count as tokens.
KEEPS: list[tuple[Any, ...]] = [
    (1, 9, 64, 16, None, None, "once", False),  # many heads
    (1, 1, 63, 16, None, None, "once", False),  # few tokens
    (1, 1, 64, 16, None, None, "each", False),  # whose cosines and sines round
    (1, 1, 64, 16, None, "silu", "once", False),
    (300, 1, 1, 16, IDS[:, None], None, "once", True),
    (200, 1, 1, 16, IDS[:200, None], None, "once", False),
    (1, 1, 2**16, 128, None, None, "once", True),
    (1, 1, 2**16 + 1, 128, None, None, "once", False),  # large tables
]


@pytest.mark.parametrize("row", KEEPS, ids=str)
def test_what_keeps_angles(row: tuple[Any, ...]) -> None:
    rows, heads, tokens, width, ids, act, rounding, keeps = row
    x, spec = torch.ones(rows, heads, tokens, width), RopeSpec(width)
    at = spec.at(ids, rounding=rounding)
    want = rotate(
        x, *((spec, ids) if rounding == "once" else (spec.at(ids, rounding=rounding),)), act=act
    )
    for _ in range(3):
        assert torch.equal(rotate(x, at, act=act), want)
    assert kept(at) == keeps


@pytest.mark.parametrize("kind", ["words", "a table", "tables of rows"])
@pytest.mark.parametrize("heads", [1, 3])
@every_dtype
def test_rows_of_one_token(dtype: torch.dtype, heads: int, kind: str) -> None:
    """They count as tokens, also with phase words of their own, and with an offset into a table."""
    rows, pairs, offset, options = 37, 6, 7, schema.Options(start=3, source=schema.HALF)
    where: torch.Tensor | None = torch.randint(0, 290, (1, rows, 1))
    if kind == "words":
        where = torch.rand(2, rows, 1, dtype=torch.float64) * 300
        options = options._replace(source=schema.WORDS)
        first = torch.randint(-(2**62), 2**62, (2, rows, heads, pairs))
        second = torch.randint(0, 3, first.shape)
        second[0, 5, :, 2] = -(2**63)  # a frequency without phase words: its channels become NaN
    elif kind == "a table":
        where[0, 3] = 293  # with the offset outside the table: NaN
        first = second = torch.randn(1, 1, 300, pairs).to(dtype)
    else:
        where = None  # the offset is outside tables of one entry, and inside those of 8
        first = second = torch.randn(1, rows, 1, 8, pairs).to(dtype)[0]
    x = torch.randn(rows, heads, 1, 16).to(dtype)

    def rotated(part: slice, length: int = 8) -> torch.Tensor:
        own = [t[:, part].contiguous() for t in (first, second)] if kind == "words" else [first] * 2
        if kind == "tables of rows":
            own = [first[part, :, :length].contiguous()] * 2
        ids = None if where is None else where[:, part].contiguous()
        given = x[part].contiguous(), None, *own, ids, offset, options.pack(), 1.0
        return schema.rotate(*given)[0]  # type: ignore[no-any-return]

    for length in (8, 1) if kind == "tables of rows" else (8,):
        alone = torch.cat([rotated(slice(row, row + 1), length) for row in range(rows)])
        assert bool(alone.isnan().any()) == (length == 1 or kind != "tables of rows")
        same(rotated(slice(None), length), alone)
