"""Calls on DTensors whose tokens are divided: positions of one rank, ids that are DTensors, one token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.support.dtensors import (
    BHSD,
    IDS,
    RANKS,
    SPEC,
    By,
    Q,
    assert_parts,
    place,
    placements_of,
    rank,
)
from tests.support.helpers import noise
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.frequencies import Given
from tightrope.functional import rerotate, rotate, rotate_qk

TOKENS = Shard(2)
every_kind = pytest.mark.parametrize("kind", ["contiguous", "zigzag"])


def zigzag(x: torch.Tensor, dim: int, chunks: int = RANKS) -> torch.Tensor:
    """Return tokens in the order in which a zig-zag group of ranks holds them."""
    parts = x.chunk(2 * chunks, dim)
    order = [index for r in range(chunks) for index in (r, 2 * chunks - 1 - r)]
    return torch.cat([parts[index] for index in order], dim)


def in_order(kind: str, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(zigzag(x, 2) for x in xs) if kind == "zigzag" else xs


@every_kind
@pytest.mark.parametrize("ids", [None, 5, IDS[:, :8].repeat(1, 2)], ids=["none", "offset", "ids"])
def test_positions_of_one_rank(kind: str, ids: torch.Tensor | int | None) -> None:
    q, k = noise(3, 6, 16, 16), noise(3, 3, 16, 16, seed=1)
    q, k, *wanted = in_order(kind, q, k, *rotate_qk(q, k, SPEC, ids))
    for number in range(RANKS):
        with rank(number) as mesh:
            where = positions.shard(ids, number, RANKS, kind=kind, tokens=16)
            given = [place(x, mesh, TOKENS) for x in (q, k)]
            for spec, at in ((SPEC, where), (SPEC.at(where), None)):
                assert_parts(rotate_qk(*given, spec, at), wanted, mesh, TOKENS)


def test_packed_sequences_in_zigzag_order() -> None:
    cu_seqlens = torch.tensor([0, 8, 24])
    where, x = positions.packed(cu_seqlens), noise(24, 6, 16)

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        each = [zigzag(one, 0, 2).chunk(2) for one in x.split([8, 16])]
        return [torch.cat(own) for own in zip(*each)]

    given, wanted = parts(x), parts(rotate(x, SPEC, where, layout="thd"))
    for number in range(RANKS):
        with rank(number, 2, 2) as mesh:
            r, head = divmod(number, 2)
            own = positions.shard(where, r, 2, kind="zigzag", cu_seqlens=cu_seqlens)
            y = rotate(place(torch.cat(given), mesh, Shard(0), Shard(1)), SPEC, own, layout="thd")
            assert_same_bits(y.to_local(), wanted[r][:, 3 * head :][:, :3])


def test_ids_that_are_sharded_by_hand_and_one_token() -> None:
    """Ids as a DTensor may be any tokens; only the first rank holds the one of decoding."""
    wanted, token = rotate(Q, SPEC, IDS), Q[:, :, :1]
    for number in range(RANKS):
        with rank(number) as mesh:
            ids, x = place(IDS, mesh, Shard(1)), place(Q, mesh, TOKENS)
            found = rotate(x, SPEC, ids), rotate(x, SPEC.at(ids))
            assert_parts(found, [wanted] * 2, mesh, TOKENS)
            ways = (SPEC, 7), (SPEC.at(7), None), (SPEC, torch.tensor([7]))
            found = [rotate(place(token, mesh, TOKENS), spec, at) for spec, at in ways]
            assert_parts(found, [rotate(token, SPEC, 7)] * 3, mesh, TOKENS)


@pytest.mark.parametrize("by", [("token",), ("token", "token")], ids=["one", "two"])
def test_shards_of_positions_are_rewritten(by: By) -> None:
    """Axes, further shards and further rows do not hide whose tokens the positions are of."""
    x, axes = noise(2, 6, 16, 16), RopeSpec(16, scaling=Given((((0.5,) * 8,), ((0.1,) * 8,))))
    wanted = rotate(x, axes, positions.text(3, axes=2)), *[rotate(x, SPEC, 3)] * 3
    for number in range(RANKS):
        with rank(number, *((4,) if len(by) == 1 else (2, 2))) as mesh:
            where = positions.shard(3, number, RANKS, tokens=16)
            again = positions.shard(where, 0, 1, tokens=4)
            half = positions.shard(3, number // 2, 2, tokens=16)
            nested = positions.shard(half, number % 2, 2, tokens=8)
            row = positions.Positions(positions.explicit(where, 4).ids, 0, False, part=where.part)
            rows = positions.concatenate([row, row], along="rows")
            own = placements_of(BHSD, by)
            given = place(x, mesh, *own)
            found = [rotate(given, axes, positions.text(where, axes=2))]
            found += [rotate(given, SPEC, each) for each in (again, nested, rows)]
            assert_parts(found, wanted, mesh, *own)


@every_kind
def test_rerotate_positions_of_one_rank(kind: str) -> None:
    x, ids = noise(3, 6, 16, 16), IDS[:, :1] + torch.arange(16)
    other = RopeSpec(16, base=5e5, rotary_dim=12, start=2)
    x, *wanted = in_order(kind, x, rerotate(x, SPEC, other), rerotate(x, SPEC, SPEC, ids, 3))
    for number in range(RANKS):
        with rank(number) as mesh:

            def own(where: Any, number: int = number) -> Any:
                return positions.shard(where, number, RANKS, kind=kind, tokens=16)

            given = place(x, mesh, TOKENS)
            changed = rerotate(given, SPEC, other, own(None))
            moved = rerotate(given, SPEC, SPEC, own(ids), own(3))
            assert_parts((changed, moved), wanted, mesh, TOKENS)


def test_ids_of_a_stack() -> None:
    """Their tables are kept, but not beyond a change of the ids, also of their local tensor."""
    x = noise(3, 6, 13, 16).float()
    with rank(1) as mesh:
        ids = place(IDS, mesh, Shard(1))
        given, spec = place(x, mesh, TOKENS), RopeSpec(16).at(ids, stack="vllm")
        for where in (IDS, IDS + 3):
            wanted = rotate(x, RopeSpec(16).at(where, stack="vllm"))
            assert_parts([rotate(given, spec)], [wanted], mesh, TOKENS)
            ids.to_local().add_(3)


def test_ids_that_start_to_require_grad() -> None:
    """The part of a prepared rotation that was kept before has no gradient."""
    with rank(1) as mesh:
        ids, x = place(IDS.double()[None], mesh, Replicate()), place(Q, mesh, TOKENS)
        prepared = SPEC.at(positions.Positions(ids, add_index=False))
        assert not rotate(x, prepared).requires_grad
        ids.requires_grad_()
        (grad,) = torch.autograd.grad(rotate(x, prepared).to_local().sum(), ids)
        assert bool(grad.to_local().any())
