"""Angles that rows and heads share are computed once, or kept, or read where they are; no bit changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.helpers import noise
from tests.support.matrix import DISTINCT_SETS, DTYPES, every_dtype, needs_kernel
from tests.support.tolerances import assert_each, assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.frequencies import YaRN
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    rotate,
    rotate_,
    rotate_qk,
)
from tightrope.ops import schema
from tightrope.positions import per_head

pytestmark = needs_kernel


@pytest.fixture(autouse=True, params=DISTINCT_SETS or [None])
def isa(request: pytest.FixtureRequest) -> None:
    """Run each test with each instruction set of this machine."""
    cpu.use_instruction_set(request.param)


def same(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


# (rows, heads, tokens): rows that become heads; one head, more heads than a group; a tile of tokens and a rest;
# enough elements for several threads, which divide the tokens, or the heads where there are few tokens.
SHAPES = [(3, 1, 5), (5, 2, 33), (2, 11, 1), (1, 9, 40), (64, 1, 16), (1, 700, 3)]


def laid(shape: tuple[int, int, int], width: int, dtype: torch.dtype, order: str) -> torch.Tensor:
    """Return random numbers as (rows, heads, tokens, channels), whose memory has the given order."""
    sizes = dict(zip("bhsd", (*shape, width)))
    x = torch.randn([sizes[name] for name in order]).to(dtype)
    return x.permute([order.index(name) for name in "bhsd"])


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd", "bhds", "hbds", "dsbh"])
@every_dtype
def test_rows_heads_and_tokens_rotate_as_if_each_were_alone(dtype: torch.dtype, order: str) -> None:
    for shape, interleaved, rounding in itertools.product(SHAPES, (False, True), ("once", "each")):
        # 19 pairs: registers of every width, and a rest.
        spec = RopeSpec(44, rotary_dim=38, start=2, interleaved=interleaved)
        both = [laid((shape[0], heads, shape[2]), 44, dtype, order) for heads in (shape[1], 2)]
        found = rotate_qk(*both, spec.at(1000, rounding=rounding))
        for x, y in zip(both, found):
            assert y.stride() == x.stride()
            rotated = x.clone(memory_format=torch.preserve_format)
            assert torch.equal(rotate_(rotated, spec.at(1000, rounding=rounding)), y)
        whole, together = torch.cat(both, 1), torch.cat(found, 1)
        for index in range(40):
            at = index % shape[0], index * 7 % (shape[1] + 2), index * 5 % shape[2]
            alone = whole[at].clone()[None]
            y = rotate(alone, spec.at(1000 + at[2], rounding=rounding), layout="sd")
            assert torch.equal(together[at], y[0]), (shape, interleaved, at)


@pytest.mark.parametrize("threads", [2, 7])
@pytest.mark.parametrize("heads", [131, 701])
def test_threads_divide_heads(heads: int, threads: int) -> None:
    """Of one or two tokens, also where their number does not divide that of the heads: no head is lost."""
    spec = RopeSpec(512)
    for tokens, rows, kind in itertools.product((1, 2), (1, 3), ("shared", "per head", "silu")):
        q = noise(rows, heads, tokens, 512, dtype=torch.float32)
        own = per_head(torch.arange(heads * tokens).view(heads, tokens))
        where = own if kind == "per head" else 5
        options: dict[str, Any] = {"act": "silu" if kind == "silu" else None}
        torch.set_num_threads(1)
        want = rotate(q, spec, where, **options)
        torch.set_num_threads(threads)
        out = torch.full_like(q, torch.nan)
        rotate(q, spec, where, out=out, **options)
        assert_same_bits(out, want)


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


# --- tables and words that are read where they are ------------------------------------------------


@pytest.mark.parametrize("pairs", [19, 24])  # 24: pairs of bfloat16 that fill registers
@pytest.mark.parametrize("tables", ["half", "cat", "repeat", "full"])
@every_dtype
def test_tables_of_any_rank_and_dtype_have_the_same_bits(
    dtype: torch.dtype, tables: str, pairs: int
) -> None:
    """Tables with fewer dimensions, read where they are, equal those of each head, one entry in two in memory."""
    head, width = 2 * pairs + 6, pairs if tables == "half" else 2 * pairs
    for own, interleaved, inverse in itertools.product(DTYPES, (False, True), (False, True)):
        if inverse and tables == "full":
            continue
        q, k = torch.randn(2, 3, 21, head).to(dtype), torch.randn(2, 1, 21, head).to(dtype)
        c, s = torch.randn(21, width).to(own), torch.randn(21, width).to(own)
        # A NaN whose low bits would carry into an infinity of bfloat16.
        if own == torch.float32:
            c[3, 0] = s[5, -1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(own)
        if tables == "cat":
            c, s = c[:, :pairs].repeat(1, 2), s[:, :pairs].repeat(1, 2)
        elif tables == "repeat":
            c, s = (table[:, :pairs].repeat_interleave(2, -1) for table in (c, s))
        options = {"interleaved": interleaved, "tables": tables, "start": 2, "inverse": inverse}
        rows = c.expand(2, 21, width), s.expand(2, 21, width)
        apart = (
            table.expand(2, 3, 21, width).repeat_interleave(2, -1)[..., ::2] for table in (c, s)
        )
        want = apply_rotary_pos_emb(q, k.expand(2, 3, 21, head), *apart, **options)
        for cos, sin in ((c, s), rows, (c[None, None], s[None, None])):
            for _ in range(2):  # the second call finds that the tables were checked
                found = apply_rotary_pos_emb(q, k, cos, sin, **options)
                same(found[0], want[0])
                same(found[1], want[1][:, :1])
        x = q.transpose(1, 2).clone()
        apply_rotary_pos_emb_(x, None, c, s, 2, **options)
        same(x.transpose(1, 2), want[0])


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


#: What an error says -> q, and a table, of 6 tokens and 8 channels, changed.
WRONG: dict[str, Any] = {
    "one row for each of 5 tokens but got 6": lambda q, c: (q[:, :, :5], c),
    "one row for each of 6 tokens but got 5": lambda q, c: (q, c[:5]),
    "rotate 8 channels but q has 6": lambda q, c: (q[..., :6], c),
    "must have an even width but got 5": lambda q, c: (q, c[..., :5]),
    "must have 1 or 2 rows but got 3": lambda q, c: (q, c.expand(3, 6, 8)),
    "q must": lambda q, c: (q.int(), c),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_the_fast_path_by_tables_raises_the_errors_of_the_other(sentence: str) -> None:
    q, c = WRONG[sentence](torch.randn(2, 3, 6, 8), torch.ones(6, 8))
    before = q.clone()
    for tables in ("cat", "full"):  # the first of them is checked once
        for function in (apply_rotary_pos_emb, apply_rotary_pos_emb_):
            with pytest.raises((ValueError, TypeError), match=sentence):
                function(q, None, c, c, tables=tables)
    assert torch.equal(q, before)
