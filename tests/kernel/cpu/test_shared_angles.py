"""Angles that rows and heads share are computed once, or kept, or read where they are; no bit changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.support.matrix import DISTINCT_SETS, DTYPES, every_dtype, needs_kernel
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
from tightrope.spec import PreparedRotation

pytestmark = needs_kernel


@pytest.fixture(autouse=True, params=DISTINCT_SETS or [None])
def isa(request: pytest.FixtureRequest) -> None:
    """Run each test with each instruction set of this machine."""
    cpu.use_instruction_set(request.param)


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
        q = laid(shape, 44, dtype, order)
        k = laid((shape[0], 2, shape[2]), 44, dtype, order)
        found = rotate_qk(q, k, spec, 1000, rounding=rounding)
        together = torch.cat(found, 1)
        for x, y in zip((q, k), found):
            assert y.stride() == x.stride()
            rotated = x.clone(memory_format=torch.preserve_format)
            assert torch.equal(rotate_(rotated, spec, 1000, rounding=rounding), y)
        whole = torch.cat((q, k), 1)
        for row, head, token in {
            (index % shape[0], index * 7 % (shape[1] + 2), index * 5 % shape[2])
            for index in range(40)
        }:
            alone = whole[row, head, token].clone()[None]
            y = rotate(alone, spec, 1000 + token, layout="sd", rounding=rounding)
            assert torch.equal(together[row, head, token], y[0]), (
                shape,
                interleaved,
                row,
                head,
                token,
            )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@every_dtype
def test_a_prepared_rotation_keeps_the_angles_of_few_heads(dtype: torch.dtype, layout: str) -> None:
    ids = torch.randint(-9, 2**40, (300,))
    for positions, inverse, rounding, spec in itertools.product(
        (None, -7, ids, torch.randn(2, 300).double() * 50),
        (False, True),
        ("once", "wide"),
        (
            RopeSpec(48, rotary_dim=30, start=8),
            RopeSpec(48, interleaved=True, scaling=YaRN(4.0, 1024)),
        ),
    ):
        q, k = torch.randn(2, 2, 300, 48).to(dtype), torch.randn(2, 1, 300, 48).to(dtype)
        if layout == "bshd":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        want = rotate_qk(q, k, spec, positions, layout=layout, inverse=inverse, rounding=rounding)
        at = spec.at(positions)
        for call in range(3):
            found = rotate_qk(q, k, at, layout=layout, inverse=inverse, rounding=rounding)
            assert bool(kept(at)) == (call > 0)
            for x, y in zip(want, found):
                assert torch.equal(x, y)
                assert torch.equal(x.signbit(), y.signbit())


def kept(at: PreparedRotation) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [value for key, (_, value) in at.kept._values.items() if "angles" in key]  # type: ignore[operator]


def test_ids_that_change_are_seen_by_kept_angles() -> None:
    spec, x = RopeSpec(16), torch.randn(1, 1, 256, 16)
    ids = torch.arange(256)
    at = spec.at(ids)
    for _ in range(3):
        rotate(x, at)
    ids += 5
    assert torch.equal(rotate(x, at), rotate(x, spec, 5))


@pytest.mark.parametrize(
    ("heads", "tokens", "options"),
    [
        (9, 64, {}),  # many heads
        (1, 63, {}),  # few tokens
        (1, 64, {"rounding": "each"}),  # whose cosines and sines round
        (1, 64, {"act": "silu"}),
    ],
)
def test_other_calls_keep_no_angles(heads: int, tokens: int, options: dict[str, str]) -> None:
    at, x = RopeSpec(16).at(None), torch.randn(1, heads, tokens, 16)
    for _ in range(3):
        rotate(x, at, **options)  # type: ignore[arg-type]
    assert not kept(at)


def test_rows_with_ids_of_their_own_count_as_tokens() -> None:
    spec, ids = RopeSpec(16), torch.arange(300)[:, None] * 7
    x, at = torch.randn(300, 1, 1, 16), spec.at(ids)
    want = rotate(x, spec, ids)
    for _ in range(3):
        assert torch.equal(rotate(x, at), want)
    assert kept(at)
    few = spec.at(ids[:200])
    for _ in range(3):
        rotate(x[:200], few)
    assert not kept(few)


def test_large_tables_are_not_kept() -> None:
    at, x = RopeSpec(128).at(None), torch.zeros(1, 1, 2**16 + 1, 128)
    for _ in range(3):
        rotate(x, at)
    assert not kept(at)
    small = x[:, :, : 2**16]
    for _ in range(3):
        rotate(small, at)
    assert len(kept(at)) == 1


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
                torch.testing.assert_close(found[0], want[0], rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(found[1], want[1][:, :1], rtol=0, atol=0, equal_nan=True)
        x = q.transpose(1, 2).clone()
        apply_rotary_pos_emb_(x, None, c, s, 2, **options)
        torch.testing.assert_close(x.transpose(1, 2), want[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [1, 3])
@every_dtype
def test_rows_of_one_token_with_phase_words_of_their_own(dtype: torch.dtype, heads: int) -> None:
    axes, rows, pairs = 2, 37, 6
    words = torch.randint(-(2**62), 2**62, (axes, rows, heads, pairs))
    turns = torch.randint(0, 3, words.shape)
    turns[0, 5, :, 2] = -(2**63)  # a frequency without phase words: its channels become NaN
    ids = torch.rand(axes, rows, 1, dtype=torch.float64) * 300
    x, options = torch.randn(rows, heads, 1, 16).to(dtype), schema.Options(start=3).pack()

    def rotated(part: slice) -> torch.Tensor:
        own = (words[:, part].contiguous(), turns[:, part].contiguous(), ids[:, part].contiguous())
        return schema.rotate(x[part].contiguous(), None, *own, 7, options, 1.0)[0]  # type: ignore[no-any-return]

    alone = torch.cat([rotated(slice(row, row + 1)) for row in range(rows)])
    assert alone.isnan().sum() == 2 * heads
    torch.testing.assert_close(rotated(slice(None)), alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda q, c: (q[:, :, :5], c), "one row for each of 5 tokens but got 6"),
        (lambda q, c: (q, c[:5]), "one row for each of 6 tokens but got 5"),
        (lambda q, c: (q[..., :6], c), "rotate 8 channels but q has 6"),
        (lambda q, c: (q, c[..., :5]), "must have an even width but got 5"),
        (lambda q, c: (q, c.expand(3, 6, 8)), "must have 1 or 2 rows but got 3"),
        (lambda q, c: (q.int(), c), "q must"),
    ],
)
def test_the_fast_path_by_tables_raises_the_errors_of_the_other(
    change: Callable[..., tuple[torch.Tensor, torch.Tensor]], sentence: str
) -> None:
    q, c = change(torch.randn(2, 3, 6, 8), torch.ones(6, 8))
    before = q.clone()
    for tables in ("cat", "full"):  # the first of them is checked once
        for function in (apply_rotary_pos_emb, apply_rotary_pos_emb_):
            with pytest.raises((ValueError, TypeError), match=sentence):
                function(q, None, c, c, tables=tables)
    assert torch.equal(q, before)
