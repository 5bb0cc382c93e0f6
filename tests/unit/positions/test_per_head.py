"""Positions that differ between heads, compared with a loop that rotates head by head.

tests/laws/test_calls.py compares the rotations of every call so.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.helpers import noise, on
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_same_bits
from tests.support.triton.cases import kernels_in_place, needs_triton
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK
from tightrope.functional import rerotate, rerotate_, rotate
from tightrope.ops import schema
from tightrope.ops.schema import Options
from tightrope.positions import Positions, concatenate, explicit, per_head, shard

ROWS, HEADS, TOKENS, DIM, PAIRS = 2, 3, 5, 16, 6


def spec_of(**options: Any) -> RopeSpec:
    return RopeSpec(DIM, rotary_dim=2 * PAIRS, start=2, **options)


SPEC = spec_of()


def kept(dtype: torch.dtype = torch.int64, seed: int = 0) -> torch.Tensor:
    """Return the positions that each head kept, (rows, heads, tokens); fractional ones if floating."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(ROWS, HEADS, 400, generator=generator).argsort(-1)
    ids = order[..., :TOKENS].sort(-1).values.to(dtype)
    return ids + 0.375 if dtype.is_floating_point else ids


def x_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return noise(ROWS, HEADS, TOKENS, DIM, dtype=dtype, seed=seed)


def by_loop(x: torch.Tensor, turn: Callable[..., torch.Tensor], *ids: torch.Tensor) -> torch.Tensor:
    """Rotate each head of x (rows, heads, tokens, channels) by itself, at ids (rows, heads, tokens)."""
    return torch.cat([turn(x[:, [h]], *(each[:, h] for each in ids)) for h in range(HEADS)], 1)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_ids_of_every_type(dtype: torch.dtype, backend: str | None) -> None:
    """Also strided ones, those that all rows share, and tables of cosines."""
    ids, x = kept(dtype), x_of()
    strided = ids.transpose(1, 2).contiguous().transpose(1, 2)
    for own, where in ((ids, ids), (ids, strided), (ids[:1], ids[0])):
        want = by_loop(x, lambda one, at: on(backend, rotate, one, SPEC, at), own)
        assert_same_bits(on(backend, rotate, x, SPEC, per_head(where)), want)
    tables = zip(*[SPEC.cos_sin(ids[:, h], dtype=torch.float64) for h in range(HEADS)], strict=True)
    wanted = [torch.stack(table, 1) for table in tables]
    assert_same_bits(SPEC.cos_sin(per_head(ids), dtype=torch.float64), wanted)


@every_backend
def test_lost_positions_and_the_longest_of_a_row(backend: str | None) -> None:
    """A position that is NaN loses the pairs of its own head and token, and no others."""
    ids = kept(torch.float64)
    ids[1, 2, 3] = torch.nan
    lost = on(backend, rotate, x_of(), SPEC, per_head(ids)).isnan()
    assert bool(lost[1, 2, 3, 2 : 2 + 2 * PAIRS].all())
    assert int(lost.sum()) == 2 * PAIRS
    spec, ids = spec_of(scaling=DynamicNTK(2.0, original_max_position=64)), kept()
    ids[1] %= 50
    ids[:, :, 0] = 0

    def alone(one: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return on(backend, rotate, one, spec.at(at, seq_len=longest))

    longest = ids.amax((1, 2)) + 1
    some = ids.double()
    some[1, 0, 2] = torch.nan  # is no length
    for own in (ids, some):
        want = by_loop(x_of(), alone, own).nan_to_num(7.0)
        for rope, at in ((spec, per_head(own)), (spec.at(per_head(own)), None)):
            got = on(backend, rotate, x_of(), rope, at)
            assert_same_bits(got.nan_to_num(7.0), want)


@every_backend
def test_several_coordinates(backend: str | None) -> None:
    spec, x = RopeSpec(8, axes=Axes.blocks((2, 2))), x_of()[..., :8]
    ids = torch.stack((kept(), kept(seed=1)))
    where = Positions(ids.transpose(2, 3), add_index=False)

    def turn(one: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        return on(backend, rotate, one, spec, positions.multi_axis(torch.stack(at)))

    assert_same_bits(on(backend, rotate, x, spec, where), by_loop(x, turn, *ids))


@every_backend
@pytest.mark.parametrize("to", [SPEC, spec_of(base=500.0)], ids=repr)
def test_rerotate(to: RopeSpec, backend: str | None) -> None:
    """Each head closes its own gaps, from and to positions with heads or without."""
    old, new = kept(), torch.arange(TOKENS)
    k = on(backend, rotate, x_of(torch.float64), SPEC, per_head(old))
    with_heads, without = (old, per_head(old)), (new.expand_as(old), new)
    for (a, at), (b, to_at) in (
        (with_heads, without),
        (without, with_heads),
        (with_heads, with_heads),
    ):
        want = by_loop(k, lambda one, *ab: on(backend, rerotate, one, SPEC, to, *ab), a, b)
        for change in (rerotate, rerotate_):
            assert_same_bits(on(backend, change, k.clone(), SPEC, to, at, to_at), want)


def test_rewriting() -> None:
    ids = kept()
    where = per_head(ids)
    assert_same_bits(explicit(where).ids, where.ids)
    assert_same_bits(shard(where, 0, 5).ids, per_head(ids[:, :, :1]).ids)
    parts = [per_head(ids[:, :, :2]), per_head(ids[:, :, 2:])]
    assert_same_bits(concatenate(parts).ids, where.ids)
    rows = concatenate([per_head(ids[0]), per_head(ids[1:])], along="rows")
    assert_same_bits(rows.ids, where.ids)
    assert concatenate([per_head(ids[0]), where]).ids.shape == (1, ROWS, 2 * TOKENS, HEADS)


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
def test_raw_operators_check(triton: bool) -> None:
    """The kernels read no position outside the tensor, and take no combination that they do not know."""
    ids, plain = kept().transpose(1, 2)[None], Options(add_index=False)
    words, table = torch.zeros(1, 1, 1, PAIRS, dtype=torch.int64), torch.zeros(1, 1, 400, PAIRS)

    def raw(where: torch.Tensor, options: Options, *tables: Any, gate: Any = None) -> Any:
        given = x_of(), None, *(tables or (words, None)), where, 0, options.pack(), 1.0
        if gate is None:
            return schema.rotate(*given)
        return schema.rotate_extras(*given, [gate], 0.0)

    with kernels_in_place() if triton else contextlib.nullcontext():
        raw(ids, plain)
        for wrong in (ids[..., :2], ids[:, :, :2], torch.cat((ids, ids[:, :1]), 1), ids[None]):
            with pytest.raises(RuntimeError, match="tightrope: positions must"):
                raw(wrong, plain)
        with pytest.raises(RuntimeError, match="tightrope: positions must"):
            raw(ids[:, :, :1], Options())
        with pytest.raises(RuntimeError, match=r"in a table,? must have no heads"):
            raw(ids, plain._replace(source=schema.HALF), table, table)
        with pytest.raises(RuntimeError, match=r"tightrope: .*slopes"):
            raw(ids, plain._replace(gate=schema.SLOPE), gate=torch.zeros(1, DIM))
