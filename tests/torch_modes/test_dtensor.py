"""Calls on DTensors: what each process gets is its part of what one process gets, to the bit.

A fake process group plays one rank of a mesh after the other in this process. Its collectives do nothing,
so a gradient that several ranks share is left as each rank's contribution, and the tests add these up.
`processes/sharded.py` runs calls on DTensors on real processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

# The only process group that plays any rank in one process; no public module has it.
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: TID251

from tests.support.helpers import noise, refused, version_of
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, gates, phases, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK, Given
from tightrope.functional import (
    PolarState,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    lrpe_rotate_1d,
    lrpe_rotate_1d_,
    polar_scan,
    rerotate,
    rotary_apply,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

Tensors = Mapping[str, Any]
#: Dimension of each axis of a tensor.
Dims = Mapping[str, int]
#: The axis that each dimension of a mesh divides.
By = Sequence[str | None]

RANKS = 4

_meshes = itertools.count()


@contextmanager
def rank(number: int, shape: tuple[int, ...]) -> Iterator[Any]:
    """Play one rank of a mesh.

    The names of its dimensions are new, because DTensor caches what it learned about equal meshes, and
    expects that a process keeps its rank.
    """
    names = tuple(f"{name}{next(_meshes)}" for name in "ab"[: len(shape)])
    torch.distributed.init_process_group("fake", rank=number, world_size=RANKS, store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        torch.distributed.destroy_process_group()


def placements_of(dims: Dims, by: By) -> list[Any]:
    return [Shard(dims[axis]) if axis in dims else Replicate() for axis in by]


def share(x: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """Return this rank's part of a whole tensor, as torch.chunk divides it, with the whole's strides."""
    for index, placement in enumerate(placements):
        if placement.is_shard():
            size, at = mesh.size(index), mesh.get_coordinate()[index]
            chunk = -(-x.shape[placement.dim] // size)
            begin = min(chunk * at, x.shape[placement.dim])
            x = x.narrow(placement.dim, begin, min(chunk, x.shape[placement.dim] - begin))
    return x


def place(x: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """Return a whole tensor as a DTensor, without communication."""
    local = share(x, mesh, placements).clone()
    return DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())


@dataclass
class Case:
    """One call, its tensors, and the axes of their dimensions.

    Attributes:
        call: takes the tensors by name and returns the results.
        sharded: tensors that are rotated, and the dimensions of their axes; results have these placements,
            in this order.
        others: other tensors.
        results: names of the sharded tensors that the results look like.
        learns: whether the other tensors get gradients.
        only: the axes that may be sharded.
    """

    call: Callable[[Tensors], Sequence[Any]]
    sharded: Mapping[str, tuple[torch.Tensor, Dims]]
    others: Mapping[str, tuple[torch.Tensor, Dims]] = field(default_factory=dict)
    results: Sequence[str] = ()
    learns: bool = True
    only: Sequence[str] = ("row", "head", "token")


# Sizes that four ranks do not divide: 3 rows, 13 tokens, 6 heads of q and 3 of k.
BHSD, BSHD, THD = (
    {"row": 0, "head": 1, "token": 2},
    {"row": 0, "token": 1, "head": 2},
    {"token": 0, "head": 1},
)
Q, K = noise(3, 6, 13, 16), noise(3, 3, 13, 16, seed=1)
SPEC = RopeSpec(16, rotary_dim=12, start=2)
QK = {"q": (Q, BHSD), "k": (K, BHSD)}
X = {"x": (Q, BHSD)}
IDS = torch.randint(0, 100_000, (3, 13), generator=torch.Generator().manual_seed(2))
PER_ROW = {"ids": (IDS, {"row": 0, "token": 1})}


def qk(**arguments: Any) -> Callable[[Tensors], Sequence[Any]]:
    return lambda t: rotate_qk(t["q"], t["k"], SPEC, **arguments)


def in_place(rotate_them: Callable[..., Any]) -> Callable[[Tensors], Sequence[Any]]:
    """Rotate in place: a leaf that requires grad would be refused."""

    def call(t: Tensors) -> Sequence[Any]:
        xs = [x * 1 if x.requires_grad else x for name, x in t.items() if name in "xqk"]
        rotate_them(t, *xs)
        return xs

    return call


def flat(scanned: tuple[torch.Tensor, PolarState]) -> Sequence[Any]:
    return scanned[0], scanned[1].memory


def cos_sin(*shape: int) -> dict[str, torch.Tensor]:
    angles = noise(*shape, seed=3)
    return {"cos": angles.cos(), "sin": angles.sin()}


def tables(dims: Dims, *shape: int) -> dict[str, tuple[torch.Tensor, Dims]]:
    return {name: (table, dims) for name, table in cos_sin(*shape).items()}


LENGTHS = torch.tensor([100, 3000, 9000])
CASES = {
    "from 0": Case(qk(), QK),
    "offset": Case(qk(positions=-5), QK),
    "ids": Case(lambda t: rotate_qk(t["q"], t["k"], SPEC, t["ids"]), QK, PER_ROW),
    "ids of all rows": Case(
        lambda t: rotate_qk(t["q"], t["k"], SPEC, t["ids"]), QK, {"ids": (IDS[1], {"token": 0})}
    ),
    "fractional ids": Case(
        lambda t: rotate_qk(t["q"], t["k"], SPEC, t["ids"]),
        QK,
        {"ids": (IDS.double() / 7, {"row": 0, "token": 1})},
    ),
    "offsets per row": Case(
        lambda t: rotate_qk(t["q"], t["k"], SPEC, positions.per_row(t["ids"])),
        QK,
        {"ids": (IDS[:, 0], {"row": 0})},
    ),
    "several axes": Case(
        lambda t: rotate_qk(
            t["q"],
            t["k"],
            RopeSpec(16, scaling=Given((((0.5,) * 8,), ((0.1,) * 8,)))),
            positions.multi_axis(t["ids"]),
        ),
        QK,
        {"ids": (torch.stack((IDS, IDS + 5)), {"row": 1, "token": 2})},
    ),
    "prepared": Case(
        lambda t: [y for _ in range(2) for y in rotate_qk(t["q"], t["k"], PREPARED)],
        QK,
        results=("q", "k", "q", "k"),
    ),
    "prepared, ids": Case(lambda t: rotate_qk(t["q"], t["k"], SPEC.at(t["ids"])), QK, PER_ROW),
    "packed": Case(
        lambda t: rotate_qk(
            t["q"], t["k"], SPEC, positions.packed(torch.tensor([0, 4, 13])), layout="thd"
        ),
        {"q": (Q[0].transpose(0, 1), THD), "k": (K[0].transpose(0, 1), THD)},
    ),
    "lengths of rows": Case(
        lambda t: rotate_qk(
            t["q"], t["k"], RopeSpec(16, scaling=DynamicNTK(4.0, 64)), seq_len=LENGTHS
        ),
        QK,
    ),
    "length from positions": Case(
        lambda t: rotate_qk(t["q"], t["k"], RopeSpec(16, scaling=DynamicNTK(4.0, 4)), 7), QK
    ),
    "length from ids": Case(
        lambda t: rotate_qk(
            t["q"], t["k"], RopeSpec(16, scaling=DynamicNTK(4.0, 4)), IDS.sort().values
        ),
        QK,
    ),
    "frequencies of heads": Case(
        lambda t: [rotate(t["x"], SPEC, inv_freq=t["theta"])],
        X,
        {"theta": (noise(6, 6, seed=4), {"head": 0})},
    ),
    "frequencies": Case(
        lambda t: rotate_qk(t["q"], t["k"], SPEC, inv_freq=t["theta"]),
        QK,
        {"theta": (noise(6, seed=4), {})},
    ),
    "spec with heads": Case(
        lambda t: [rotate(t["x"], RopeSpec(16, scaling=Given(noise(6, 8, seed=4).tolist())))], X
    ),
    "norm": Case(
        lambda t: rotate_qk(
            t["q"], t["k"], SPEC, act=(RMSNorm(t["w"]), RMSNorm(t["v"], unit_offset=True))
        ),
        QK,
        {"w": (noise(6, 16, seed=5), {"head": 0}), "v": (noise(16, seed=6), {})},
    ),
    "activation": Case(qk(act="silu"), QK),
    "scalar": Case(qk(gate=gates.Scalar(0.5)), QK),
    "learned scalar": Case(
        lambda t: [rotate(t["x"], SPEC, gate=gates.Scalar(t["g"]))],
        X,
        {"g": (torch.tensor(0.7, dtype=torch.float64), {})},
    ),
    "exp": Case(
        lambda t: rotate_qk(
            t["q"], t["k"], SPEC, gate=(gates.Exp(t["g"]), gates.Exp(t["h"], tied="pair"))
        ),
        QK,
        {"g": (noise(6, 16, seed=5), {"head": 0}), "h": (noise(6, seed=6), {})},
    ),
    "slope": Case(
        lambda t: [rotate(t["x"], SPEC, 3, gate=gates.Slope(t["g"]))],
        X,
        {"g": (0.01 * noise(6, 16, seed=5), {"head": 0})},
    ),
    "given": Case(
        lambda t: [rotate(t["x"], SPEC, gate=gates.Given(t["g"]))],
        X,
        {"g": (0.1 * noise(3, 13, 6, 16, seed=5), {"row": 0, "token": 1, "head": 2})},
    ),
    "given, shared": Case(
        lambda t: [rotate(t["x"], SPEC, gate=gates.Given(t["g"]))],
        X,
        {"g": (0.1 * noise(13, 1, 16, seed=5), {"token": 0})},
    ),
    "xPos": Case(qk(gate=gates.XPos(centre=6)), QK),
    "inverse": Case(qk(inverse=True), QK),
    "rounding": Case(lambda t: rotate_qk(t["q"], t["k"], SPEC, rounding=("wide", "each")), QK),
    "a stack": Case(
        lambda t: rotate_qk(t["q"], t["k"], RopeSpec(16).at(5, stack="transformers")),
        {"q": (Q.float(), BHSD), "k": (K.float(), BHSD)},
    ),
    "a stack by length": Case(
        lambda t: rotate_qk(
            t["q"], t["k"], RopeSpec(16, scaling=DynamicNTK(4.0, 4)).at(stack="transformers")
        ),
        {"q": (Q.float(), BHSD), "k": (K.float(), BHSD)},
    ),
    "strides": Case(
        lambda t: rotate_qk(t["q"], t["k"], SPEC, layout="bshd"),
        {"q": (Q.transpose(1, 2), BSHD), "k": (K.transpose(1, 2), BSHD)},
    ),
    "in place": Case(in_place(lambda _, q, k: rotate_qk_(q, k, SPEC, 9)), QK),
    "in place, one": Case(in_place(lambda _, x: rotate_(x, SPEC, 9, act="silu")), X),
    "in place, prepared": Case(in_place(lambda _, q, k: rotate_qk_(q, k, PREPARED)), QK),
    "lrpe": Case(
        lambda t: [lrpe_rotate_1d(t["x"], t["theta"], 5, act="silu")],
        {"x": (Q.transpose(1, 2), BSHD)},
        {"theta": (noise(6, 8, seed=4), {"head": 0})},
    ),
    "lrpe, θ of heads": Case(
        lambda t: [lrpe_rotate_1d(t["x"], t["theta"], t["offset"])],
        {"x": (Q.transpose(1, 2), BSHD)},
        {"theta": (noise(6, seed=4), {"head": 0}), "offset": (IDS[:, 0], {"row": 0})},
    ),
    "lrpe, θ of pairs": Case(
        lambda t: [lrpe_rotate_1d(t["x"], t["theta"], act="softmax", dim=-1)],
        {"x": (Q.transpose(1, 2), BSHD)},
        {"theta": (noise(5, seed=4), {})},
    ),
    "lrpe, softmax of tokens": Case(
        lambda t: [lrpe_rotate_1d(t["x"], noise(8, seed=4), act="softmax", dim=1)],
        {"x": (Q.transpose(1, 2), BSHD)},
        only=("row", "head"),
    ),
    "lrpe in place": Case(
        in_place(lambda t, x: lrpe_rotate_1d_(x, t["theta"], 5)),
        {"x": (Q.transpose(1, 2), BSHD)},
        {"theta": (noise(6, 8, seed=4), {"head": 0})},
    ),
    "tables": Case(
        lambda t: apply_rotary_pos_emb(t["q"], t["k"], t["cos"], t["sin"], tables="half"),
        QK,
        tables({"row": 0, "token": 1}, 3, 13, 7),
    ),
    "tables of tokens": Case(
        lambda t: apply_rotary_pos_emb(t["q"], t["k"], t["cos"], t["sin"], tables="full"),
        QK,
        tables({"token": 0}, 13, 14),
    ),
    "tables of heads": Case(
        lambda t: apply_rotary_pos_emb(t["q"], None, t["cos"], t["sin"], 2, tables="half")[:1],
        {"q": (Q.transpose(1, 2), BSHD)},
        tables({"token": 1, "head": 2}, 1, 13, 6, 8),
    ),
    "tables and ids": Case(
        lambda t: apply_rotary_pos_emb(
            t["q"], t["k"], t["cos"], t["sin"], tables="half", position_ids=t["ids"]
        ),
        QK,
        {**tables({}, 50, 8), "ids": (IDS % 50, {"row": 0, "token": 1})},
    ),
    "tables in place": Case(
        in_place(lambda t, q, k: apply_rotary_pos_emb_(q, k, t["cos"], t["sin"], tables="half")),
        QK,
        tables({"row": 0, "token": 1}, 3, 13, 7),
    ),
    "rotary_apply": Case(
        lambda t: [rotary_apply(t["x"], t["cos"], t["sin"])],
        X,
        tables({"row": 0, "token": 2}, 3, 1, 13, 8),
    ),
    "rotary_pos_embedding": Case(lambda t: [rotary_pos_embedding(t["x"])], X),
    "rerotate": Case(lambda t: [rerotate(t["x"], SPEC, RopeSpec(16, 5e5, 12, 2), IDS, IDS + 3)], X),
    "scan": Case(
        lambda t: flat(
            polar_scan(
                t["q"],
                t["k"],
                t["v"],
                SPEC,
                t["decay"],
                4,
                gate=gates.Exp(noise(16, seed=8)),
                state=PolarState(t["memory"], 0),
            )
        ),
        {
            "q": (noise(3, 8, 13, 16), BHSD),
            "k": (noise(3, 4, 13, 16, seed=1), BHSD),
            "v": (noise(3, 4, 13, 8, seed=7), BHSD),
        },
        {
            "decay": (-noise(3, 4, 13, 1, seed=5).abs(), BHSD),
            "memory": (noise(3, 4, 16, 8, seed=6), {"row": 0, "head": 1}),
        },
        results=("out", "state"),
        only=("row", "head"),
    ),
}
PREPARED = SPEC.at(IDS)

BYS: dict[By, tuple[int, ...]] = {
    (None,): (4,),
    ("row",): (4,),
    ("head",): (4,),
    ("token",): (4,),
    ("row", "head"): (2, 2),
    ("head", "token"): (2, 2),
    ("token", "token"): (2, 2),
    (None, "token"): (2, 2),
}
#: How the other tensors are given if they get gradients; they may be plain if not.
MODES = ("replicated", "sharded")


def allowed(case: Case) -> list[By]:
    has = next(iter(case.sharded.values()))[1]
    return [
        by for by in BYS if all(axis is None or (axis in has and axis in case.only) for axis in by)
    ]


def results_of(case: Case) -> Sequence[str]:
    return case.results or list(case.sharded)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    case = CASES[name]
    wanted = case.call({key: x.clone() for key, (x, _) in tensors_of(case).items()})
    for by in allowed(case):
        for number in range(RANKS):
            with rank(number, BYS[by]) as mesh:
                found = case.call(placed(case, mesh, by, "plain"))
                check_results(case, mesh, by, found, wanted)


def dims_of(case: Case, key: str) -> Dims:
    """Return the dimensions of the axes of a result."""
    return {"out": BHSD, "state": {"row": 0, "head": 1}}.get(key) or case.sharded[key][1]


def tensors_of(case: Case) -> Mapping[str, tuple[torch.Tensor, Dims]]:
    return {**case.sharded, **case.others}


def placed(case: Case, mesh: Any, by: By, mode: str) -> dict[str, Any]:
    """Return the tensors of a case on a mesh: the others plain, replicated, or sharded with the rest."""
    given = {
        key: place(x, mesh, placements_of(dims, by)) for key, (x, dims) in case.sharded.items()
    }
    for key, (x, dims) in case.others.items():
        own = placements_of(dims if mode == "sharded" else {}, by)
        given[key] = x.clone() if mode == "plain" else place(x, mesh, own)
    return given


def check_results(
    case: Case, mesh: Any, by: By, found: Sequence[Any], wanted: Sequence[torch.Tensor]
) -> None:
    for key, one, whole in zip(results_of(case), found, wanted, strict=True):
        own = placements_of(dims_of(case, key), by)
        assert isinstance(one, DTensor)
        assert list(one.placements) == own
        assert (one.shape, one.stride(), one.dtype) == (whole.shape, whole.stride(), whole.dtype)
        assert_same_bits(one.to_local().detach(), share(whole, mesh, own).detach())


LEARNED = [name for name, case in CASES.items() if case.learns]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LEARNED)
def test_gradients(name: str) -> None:
    case = CASES[name]
    leaves = {
        key: x.clone().requires_grad_(x.is_floating_point())
        for key, (x, _) in tensors_of(case).items()
    }
    wanted = case.call(leaves)
    weights = [noise(*y.shape, seed=9, dtype=y.dtype) for y in wanted]
    floating = [key for key, x in leaves.items() if x.requires_grad]
    whole = dict(
        zip(floating, torch.autograd.grad(wanted, [leaves[key] for key in floating], weights))
    )
    for by in allowed(case):
        for mode in MODES if case.others else MODES[:1]:
            sums = {key: torch.zeros_like(whole[key]) for key in floating if key in case.others}
            for number in range(RANKS):
                with rank(number, BYS[by]) as mesh:
                    given = placed(case, mesh, by, mode)
                    for key in floating:
                        given[key].requires_grad_()
                    found = case.call(given)
                    check_results(case, mesh, by, found, wanted)
                    own = [placements_of(dims_of(case, key), by) for key in results_of(case)]
                    grads = torch.autograd.grad(
                        [y.to_local() for y in found],
                        [given[key] for key in floating],
                        [share(g, mesh, p) for g, p in zip(weights, own)],
                    )
                    for key, grad in zip(floating, grads):
                        assert isinstance(grad, DTensor)
                        assert grad.placements == given[key].placements
                        assert grad.shape == whole[key].shape
                        if key in sums:
                            # Ranks of a dimension that divides nothing contribute the same.
                            times = [mesh.size(at) for at, axis in enumerate(by) if axis is None]
                            part = share(sums[key], mesh, grad.placements)
                            part += grad.to_local() / torch.tensor(times).prod()
                        else:
                            assert_same_bits(
                                grad.to_local(), share(whole[key], mesh, grad.placements)
                            )
            for key, total in sums.items():
                assert_near(total, whole[key], "gradient added up over ranks")


# --- token shards that are not contiguous ---------------------------------------------------------


def zigzag(x: torch.Tensor, dim: int, chunks: int = RANKS) -> torch.Tensor:
    """Return tokens in the order in which a zig-zag group of ranks holds them."""
    parts = x.chunk(2 * chunks, dim)
    order = [index for r in range(chunks) for index in (r, 2 * chunks - 1 - r)]
    return torch.cat([parts[index] for index in order], dim)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ids", [None, 5, IDS[:, :8].repeat(1, 2)], ids=["none", "offset", "ids"])
def test_positions_of_one_rank(kind: str, ids: torch.Tensor | int | None) -> None:
    q, k = noise(3, 6, 16, 16), noise(3, 3, 16, 16, seed=1)
    wanted = rotate_qk(q, k, SPEC, ids)
    if kind == "zigzag":
        q, k, *wanted = (zigzag(x, 2) for x in (q, k, *wanted))
    for number in range(RANKS):
        with rank(number, (RANKS,)) as mesh:
            where = positions.shard(ids, number, RANKS, kind=kind, tokens=16)
            given = [place(x, mesh, [Shard(2)]) for x in (q, k)]
            for spec, at in ((SPEC, where), (SPEC.at(where), None)):
                for one, whole in zip(rotate_qk(*given, spec, at), wanted):
                    assert_same_bits(one.to_local(), share(whole, mesh, [Shard(2)]))


def test_packed_sequences_in_zigzag_order() -> None:
    cu_seqlens = torch.tensor([0, 8, 24])
    q = noise(24, 6, 16)
    where = positions.packed(cu_seqlens)
    wanted = rotate(q, SPEC, where, layout="thd")
    parts = [
        torch.cat([zigzag(x, 0, 2).chunk(2)[r] for x in wanted.split([8, 16])]) for r in range(2)
    ]
    given = [torch.cat([zigzag(x, 0, 2).chunk(2)[r] for x in q.split([8, 16])]) for r in range(2)]
    for number in range(RANKS):
        with rank(number, (2, 2)) as mesh:
            x = place(torch.cat(given), mesh, [Shard(0), Shard(1)])
            r = number // 2
            own = positions.shard(where, r, 2, kind="zigzag", cu_seqlens=cu_seqlens)
            y = rotate(x, SPEC, own, layout="thd")
            assert_same_bits(y.to_local(), parts[r][:, 3 * (number % 2) :][:, :3])


def test_ids_that_are_sharded_by_hand() -> None:
    """Ids as a DTensor may be any tokens, which no process has to know as a whole."""
    wanted = rotate(Q, SPEC, IDS)
    for number in range(RANKS):
        with rank(number, (RANKS,)) as mesh:
            ids = place(IDS, mesh, [Shard(1)])
            x = place(Q, mesh, [Shard(2)])
            for spec, at in ((SPEC, ids), (SPEC.at(ids), None)):
                assert_same_bits(rotate(x, spec, at).to_local(), share(wanted, mesh, [Shard(2)]))


def test_one_token() -> None:
    """A token that only the first rank holds, as in decoding."""
    x = noise(2, 4, 1, 16)
    wanted = rotate(x, SPEC, 7)
    for number in range(RANKS):
        with rank(number, (RANKS,)) as mesh:
            given = place(x, mesh, [Shard(2)])
            for spec, at in ((SPEC, 7), (SPEC.at(7), None), (SPEC, torch.tensor([7]))):
                y = rotate(given, spec, at)
                assert_same_bits(y.to_local(), share(wanted, mesh, [Shard(2)]))


@pytest.mark.parametrize("by", [("token",), ("token", "token")], ids=["one", "two"])
def test_shards_of_positions_are_rewritten(by: By) -> None:
    """Axes, further shards and further rows do not hide whose tokens the positions are of."""
    x, axes = noise(2, 6, 16, 16), RopeSpec(16, scaling=Given((((0.5,) * 8,), ((0.1,) * 8,))))
    wanted = rotate(x, axes, positions.text(3, axes=2)), rotate(x, SPEC, 3)
    for number in range(RANKS):
        with rank(number, (4,) if len(by) == 1 else (2, 2)) as mesh:
            where = positions.shard(3, number, RANKS, tokens=16)
            again = positions.shard(where, 0, 1, tokens=4)
            half = positions.shard(3, number // 2, 2, tokens=16)
            nested = positions.shard(half, number % 2, 2, tokens=8)
            row = positions.Positions(positions.explicit(where, 4).ids, 0, False, part=where.part)
            rows = positions.concatenate([row, row], along="rows")
            placements = placements_of(BHSD, by)
            given = place(x, mesh, placements)
            found = [rotate(given, axes, positions.text(where, axes=2))]
            found += [rotate(given, SPEC, each) for each in (again, nested, rows)]
            for one, whole in zip(found, (wanted[0], *[wanted[1]] * 3)):
                assert_same_bits(one.to_local(), share(whole, mesh, placements))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_rerotate_positions_of_one_rank(kind: str) -> None:
    x, other = noise(3, 6, 16, 16), RopeSpec(16, 5e5, 12, 2)
    wanted = rerotate(x, SPEC, other), rerotate(x, SPEC, SPEC, IDS[:, :1] + torch.arange(16), 3)
    if kind == "zigzag":
        x, *wanted = (zigzag(each, 2) for each in (x, *wanted))  # type: ignore[assignment]
    for number in range(RANKS):
        with rank(number, (RANKS,)) as mesh:

            def own(where: Any, number: int = number) -> Any:
                return positions.shard(where, number, RANKS, kind=kind, tokens=16)

            given = place(x, mesh, [Shard(2)])
            ids = IDS[:, :1] + torch.arange(16)
            found = (
                rerotate(given, SPEC, other, own(None)),
                rerotate(given, SPEC, SPEC, own(ids), own(3)),
            )
            for one, whole in zip(found, wanted):
                assert_same_bits(one.to_local(), share(whole, mesh, [Shard(2)]))
            with refused(
                ValueError,
                "[rerotate] positions and new_positions must be those of the tokens of the same rank.",
            ):
                rerotate(given, SPEC, SPEC, None, own(3))


def test_ids_of_a_stack() -> None:
    """Their tables are kept, but not beyond a change of the ids, also of their local tensor."""
    x = noise(3, 6, 13, 16).float()
    wanted = rotate(x, RopeSpec(16).at(IDS, stack="vllm"))
    with rank(1, (RANKS,)) as mesh:
        ids = place(IDS, mesh, [Shard(1)])
        given, spec = place(x, mesh, [Shard(2)]), RopeSpec(16).at(ids, stack="vllm")
        assert_same_bits(rotate(given, spec).to_local(), share(wanted, mesh, [Shard(2)]))
        ids.to_local().add_(3)
        wanted = rotate(x, RopeSpec(16).at(IDS + 3, stack="vllm"))
        assert_same_bits(rotate(given, spec).to_local(), share(wanted, mesh, [Shard(2)]))


# --- destinations, layouts of memory, torch's modes -----------------------------------------------


def test_out() -> None:
    wanted = rotate_qk(Q, K, SPEC, 3)
    with rank(1, (RANKS,)) as mesh:
        q, k, *outs = (place(x, mesh, [Shard(1)]) for x in (Q, K, Q * 0, K * 0))
        versions = [out._version for out in outs]
        found = rotate_qk(q, k, SPEC, 3, out=(outs[0], outs[1]))
        assert all(one is out for one, out in zip(found, outs))
        assert all(out._version > version for out, version in zip(outs, versions))
        for one, whole in zip(found, wanted):
            assert_same_bits(one.to_local(), share(whole, mesh, [Shard(1)]))
        with refused(ValueError, "[rotate] out must be a DTensor that is placed like x."):
            rotate(q, SPEC, out=place(Q, mesh, [Shard(0)]))


def test_out_of_a_tensor_that_learns() -> None:
    """A result written to `out` has no gradient, which would be lost silently."""
    with rank(1, (RANKS,)) as mesh:
        x, out = place(Q, mesh, [Shard(1)]).requires_grad_(), place(Q * 0, mesh, [Shard(1)])
        with refused(
            ValueError,
            "[rotate] a result written to out has no gradient, but x or out requires one; use "
            "torch.no_grad(), or omit out (x: float64[3, 2, 13, 16], out: float64[3, 2, 13, 16]).",
        ):
            rotate(x, SPEC, 3, out=out)
        assert not out.to_local().any()


def test_in_place_returns_its_arguments_and_counts_as_a_change() -> None:
    with rank(1, (RANKS,)) as mesh:
        q, k = (place(x, mesh, [Shard(1)]) for x in (Q, K))
        before = q._version, k._version
        found = rotate_qk_(q, k, PREPARED)
        assert found[0] is q
        assert found[1] is k
        assert q._version > before[0]
        assert k._version > before[1]
        leaf = place(Q, mesh, [Shard(1)]).requires_grad_()
        with refused(
            ValueError,
            "[rotate_] x is a leaf that requires grad, or a view of one, and cannot be changed in "
            "place; call rotate (x: float64[3, 6, 13, 16]).",
        ):
            rotate_(leaf, SPEC)
        assert_same_bits(leaf.to_local().detach(), share(Q, mesh, [Shard(1)]))


def test_local_tensors_with_gaps() -> None:
    """A local tensor may be a slice of a projection; its result is dense, with the same order."""
    wanted = rotate(Q, SPEC, 3)
    with rank(2, (RANKS,)) as mesh:
        local = share(Q, mesh, [Shard(1)])
        wide = torch.cat((local, local), -1).transpose(1, 2).contiguous().transpose(1, 2)[..., :16]
        x = DTensor.from_local(wide, mesh, [Shard(1)], shape=Q.shape, stride=Q.stride())
        y = rotate(x, SPEC, 3)
        assert_same_bits(y.to_local(), share(wanted, mesh, [Shard(1)]))
        assert y.stride() == Q.transpose(1, 2).contiguous().transpose(1, 2).stride()


def test_k_on_all_processes() -> None:
    """Keys with fewer heads than processes stay whole where queries are divided."""
    q, k = rotate_qk(Q, K, SPEC, IDS)
    with rank(1, (RANKS,)) as mesh:
        given = place(Q, mesh, [Shard(1)]), place(K, mesh, [Replicate()])
        one, other = rotate_qk(*given, SPEC, IDS, gate=(gates.Exp(noise(6, 16)), None))
        gated = rotate(Q, SPEC, IDS, gate=gates.Exp(noise(6, 16)))
        assert_same_bits(one.to_local(), share(gated, mesh, [Shard(1)]))
        assert_same_bits(other.to_local(), k)
        theta = noise(6, 6, seed=4)
        alone = "because q and k are sharded differently along heads; rotate q and k one by one."
        six = place(torch.cat((K, K), 1), mesh, [Replicate()])
        with refused(ValueError, f"[rotate_qk] inv_freq must not have heads, {alone}"):
            rotate_qk(given[0], six, SPEC, inv_freq=theta)
        learned = place(theta[0], mesh, [Replicate()]).requires_grad_()
        with refused(ValueError, f"[rotate_qk] inv_freq must not require grad, {alone}"):
            rotate_qk(*given, SPEC, inv_freq=learned)
        # The part of a rotation that is kept for divided heads is not used for others.
        with_heads = RopeSpec(16, scaling=Given(noise(6, 8).tolist())).at(3)
        rotate(given[0], with_heads)
        with pytest.raises(ValueError, match="spec must not have heads"):
            rotate_qk(given[0], six, with_heads)
    assert q.shape == Q.shape


def test_what_is_kept_for_the_backward_pass_must_not_change() -> None:
    """It is local tensors, whose versions torch does not count when DTensors change."""

    def scanned(t: Tensors) -> Any:
        return flat(polar_scan(t["x"], t["x"], t["x"], SPEC, t["decay"], form="step"))[1]

    shared, owned = [Replicate()], [Shard(1)]
    given: dict[str, tuple[torch.Tensor, list[Any]]] = {
        "x": (Q, owned),
        "ids": (IDS, shared),
        "w": (noise(16), shared),
        "log": (noise(13, 6, 16), owned),
        "decay": (-noise(6, 1).abs(), [Shard(0)]),
        **{key: (x, shared) for key, x in cos_sin(13, 8).items()},
    }
    learned = gates.Exp
    calls: list[tuple[str, Callable[[Tensors], Any]]] = [
        ("x", lambda t: rotate(t["x"], SPEC, act="silu")),
        ("ids", lambda t: rotate(t["x"], SPEC, t["ids"])),
        ("ids", lambda t: rotate_(t["x"] * 1, SPEC, t["ids"])),
        ("w", lambda t: rotate(t["x"], SPEC, act=RMSNorm(t["w"]))),
        ("log", lambda t: rotate(t["x"], SPEC, gate=gates.Given(t["log"]))),
        ("cos", lambda t: apply_rotary_pos_emb(t["x"], None, t["cos"], t["sin"], tables="half")[0]),
        ("y", lambda t: rotate(t["x"], SPEC, gate=learned(t["w"].requires_grad_()))),
        ("x", scanned),
        ("decay", scanned),
        ("y", scanned),
    ]
    with rank(1, (RANKS,)) as mesh:
        for name, call in calls:
            tensors = {key: place(x, mesh, own) for key, (x, own) in given.items()}
            leaf = tensors["x"].requires_grad_()
            tensors["x"] = leaf * 1
            y = call(tensors)
            total = y.to_local().sum()
            with torch.no_grad():
                (y if name == "y" else tensors[name]).mul_(0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(total, leaf)
        # A rotation alone keeps neither its input nor its result.
        leaf = place(Q, mesh, owned).requires_grad_()
        x = leaf * 1
        y = rotate(x, SPEC)
        x.mul_(2)
        y.mul_(2)
        torch.autograd.grad(y.to_local().sum(), leaf)


def test_ids_that_start_to_require_grad() -> None:
    """The part of a prepared rotation that was kept before has no gradient."""
    with rank(1, (RANKS,)) as mesh:
        ids, x = place(IDS.double()[None], mesh, [Replicate()]), place(Q, mesh, [Shard(1)])
        prepared = SPEC.at(positions.Positions(ids, add_index=False))
        assert not rotate(x, prepared).requires_grad
        ids.requires_grad_()
        (grad,) = torch.autograd.grad(rotate(x, prepared).to_local().sum(), ids)
        assert bool(grad.to_local().any())


def test_in_place_memory_under_autograd() -> None:
    with rank(1, (RANKS,)) as mesh:
        x = place(Q, mesh, [Shard(1)]).requires_grad_() * 1
        with pytest.raises(ValueError, match="q and k must not share memory"):
            rotate_qk_(x, x, SPEC)


def test_results_are_on_the_callers_mesh() -> None:
    """A mesh of an earlier process group may be equal to it."""
    for _ in range(2):
        torch.distributed.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("again",))
            x = place(noise(2, 4, 5, 16), mesh, [Shard(1)])
            for y in (*flat(polar_scan(x, x, x, SPEC)), rotate(x, SPEC)):
                assert y.device_mesh is mesh
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    version_of("torch") < (2, 12),
    reason="to_local of torch before 2.12 loses second derivatives, also those of x * x * x",
)
def test_second_derivatives() -> None:
    def gradient_of_norm(x: Any) -> Any:
        y = rotate(x, SPEC, 3, act="silu")
        y = y.to_local() if isinstance(y, DTensor) else y
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        first = first.to_local() if isinstance(first, DTensor) else first
        return torch.autograd.grad(first.square().sum(), x)[0]

    wanted = gradient_of_norm(Q.clone().requires_grad_())
    with rank(1, (RANKS,)) as mesh:
        found = gradient_of_norm(place(Q, mesh, [Shard(1)]).requires_grad_())
        assert_near(
            found.to_local(), share(wanted, mesh, [Shard(1)]), "gradient added up over ranks"
        )


def test_a_gradient_that_is_placed_differently() -> None:
    """Autograd may hand over a replicated gradient; that of x is placed like x."""
    with rank(1, (RANKS,)) as mesh:
        x = place(Q, mesh, [Shard(1)]).requires_grad_()
        (grad,) = torch.autograd.grad(rotate(x, SPEC, 3), x, place(Q, mesh, [Replicate()]))
        assert grad.placements == (Shard(1),)
        assert_same_bits(grad.to_local(), share(rotate(Q, SPEC, 3, inverse=True), mesh, [Shard(1)]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("learns", [False, True])
def test_compiled(learns: bool, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled call is one graph, and rotates as in eager code, also in place."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

    def step(q: Any, k: Any, w: Any, ids: Any) -> Any:
        q, k = rotate_qk(q * 1, k * 1, SPEC, ids, act=(RMSNorm(w), None))
        return rotate_qk_(q * 1, k * 1, SPEC, 5)

    with rank(1, (2, 2)) as mesh:
        by = "token", "head"
        given = [
            place(x, mesh, placements_of(BHSD, by))
            for x in (Q[:, :, :12], torch.cat((K, K), 1)[:, :, :12])
        ]
        given.append(place(noise(6, 16, seed=5), mesh, [Replicate(), Shard(0)]))
        ids = place(IDS[:, :12], mesh, [Shard(1), Replicate()])
        given = [x.requires_grad_(learns) for x in given]
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        wanted, found = step(*given, ids), compiled(*given, ids)
        for one, other in zip(wanted, found):
            assert one.placements == other.placements
            assert_same_bits(one.to_local(), other.to_local())
        if learns:
            weights = [torch.ones_like(y.to_local()) for y in wanted]
            for one, other in zip(
                torch.autograd.grad([y.to_local() for y in wanted], given, weights),
                torch.autograd.grad([y.to_local() for y in found], given, weights),
            ):
                assert one.placements == other.placements
                assert_near(other.to_local(), one.to_local(), "gradient added up over ranks")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_several_lengths(
    dynamic: bool | None, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    compiled = torch.compile(
        lambda x: rotate(x, SPEC, 3), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    with rank(1, (RANKS,)) as mesh:
        for tokens in (12, 16, 21):
            x = noise(3, 6, tokens, 16)
            for dim in (0, 2):
                y = compiled(place(x, mesh, [Shard(dim)]))
                assert y.shape == x.shape
                assert_same_bits(y.to_local(), share(rotate(x, SPEC, 3), mesh, [Shard(dim)]))


# --- refusals -------------------------------------------------------------------------------------


def refusals(mesh: Any) -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    """Return calls that must be refused on rank 1 of (2, 2), and their messages."""
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
    from torch.distributed.tensor.placement_types import _StridedShard

    def put(x: torch.Tensor, *placements: Any) -> Any:
        return place(x, mesh, placements)

    q, k = (put(x, Shard(2), Shard(1)) for x in (Q, K))
    whole = put(Q, Replicate(), Replicate())
    summed = DTensor.from_local(Q, mesh, [Partial(), Replicate()])
    strided = DTensor(
        q.to_local(),
        type(q._spec)(mesh, (_StridedShard(2, split_factor=2), Shard(1)), q._spec.tensor_meta),
        requires_grad=False,
    )
    wrong = DTensor.from_local(
        Q[:, :2], mesh, [Shard(2), Shard(1)], shape=Q.shape, stride=Q.stride()
    )
    weight = noise(16).requires_grad_()
    about = "(x: float64[3, 6, 13, 16])"
    spec = RopeSpec(16, scaling=DynamicNTK(4.0, 4))
    part = positions.shard(None, 1, 4, tokens=52)
    part_of_16 = positions.shard(None, 1, 4, tokens=16)
    ids = torch.arange(4)[None, None]
    rows_of_ranks = [positions.Positions(ids, 0, False, part=(r, 4, 16)) for r in range(2)]
    fractional = IDS.double().requires_grad_()
    alone = DTensor.from_local(
        noise(1, 16), mesh, [Replicate(), Shard(0)], shape=(1, 16), stride=(16, 1)
    )
    too_few = DTensor.from_local(
        noise(1, 16), mesh, [Replicate(), Shard(0)], shape=(6, 16), stride=(16, 1)
    )
    reordered = DTensor(
        noise(3, 6, 3, 16),
        type(q._spec)(
            mesh,
            (Shard(2), Shard(2)),
            tensor_meta=type(q._spec.tensor_meta)(
                torch.Size((3, 6, 12, 16)), (1152, 192, 16, 1), Q.dtype
            ),
            shard_order=(ShardOrderEntry(2, (1, 0)),),
        ),
        requires_grad=False,
    )
    scan = "must be sharded like q, along rows and heads only, because a scan needs all tokens of a head"
    zero = put(torch.zeros(3, 13, 13), Replicate(), Shard(1))
    return {
        "one of two": (
            lambda: rotate_qk(q, K, SPEC),
            TypeError,
            "[rotate_qk] q and k must all be DTensors or all be local tensors (k: float64[3, 3, 13, 16]).",
        ),
        "the other of two": (
            lambda: apply_rotary_pos_emb(Q, k, *cos_sin(13, 16).values()),
            TypeError,
            "[apply_rotary_pos_emb] q and k must all be DTensors or all be local tensors "
            "(q: float64[3, 6, 13, 16]).",
        ),
        "a sum": (
            lambda: rotate(summed, SPEC),
            ValueError,
            "[rotate] x must be replicated or sharded but is P(sum) on dimension 0 of its mesh; call "
            "x.redistribute.",
        ),
        "strided": (
            lambda: rotate(strided, SPEC),
            ValueError,
            "[rotate] x must be replicated or sharded but is _S(2, 2) on dimension 0 of its mesh; call "
            "x.redistribute.",
        ),
        "channels": (
            lambda: rotate(put(Q, Shard(3), Replicate()), SPEC),
            ValueError,
            "[rotate] x must not be sharded along its channels, which a rotation mixes; call "
            "x.redistribute to replicate it, or to shard its rows, heads or tokens.",
        ),
        "another division": (
            lambda: rotate(wrong, SPEC),
            ValueError,
            "[rotate] x must be divided as by torch.chunk, so that this process holds [3, 3, 7, 16], but "
            f"it holds [3, 2, 13, 16]; give its whole shape to DTensor.from_local {about}.",
        ),
        "q and k": (
            lambda: rotate_qk(q, put(K, Shard(0), Shard(1)), SPEC),
            ValueError,
            "[rotate_qk] q and k must be sharded alike along rows and tokens but are placed as "
            "(Shard(dim=2), Shard(dim=1)) and (Shard(dim=0), Shard(dim=1)); rotate them one by one.",
        ),
        "numbers of tokens": (
            lambda: rotate_qk(q, put(K[:, :, :12], Shard(2), Shard(1)), SPEC),
            ValueError,
            "[rotate_qk] q and k must have the same number of tokens but got 13 and 12; rotate them one "
            "by one (q: float64[3, 6, 13, 16], k: float64[3, 3, 12, 16]).",
        ),
        "ids": (
            lambda: rotate(q, SPEC, torch.arange(12)),
            ValueError,
            "[rotate] positions must hold one position for each of 13 tokens but got 12 (layout 'bhsd' "
            "has its tokens in dimension 2) (x: float64[3, 6, 13, 16], positions: int64[12]).",
        ),
        "ids, divided differently": (
            lambda: rotate(q, SPEC, put(IDS, Replicate(), Shard(1))),
            ValueError,
            "[rotate] positions must be replicated, or sharded like x; call its method redistribute.",
        ),
        "another rank's positions": (
            lambda: rotate(q, SPEC, part),
            ValueError,
            "[rotate] positions are those of rank 1 of 4, but this process holds part 0 of 2 of the "
            "tokens of x.",
        ),
        "positions of a rank, whole tokens": (
            lambda: rotate(whole, SPEC, part),
            ValueError,
            "[rotate] positions are those of rank 1 of 4, but this process holds part 0 of 1 of the "
            "tokens of x.",
        ),
        "positions of a rank of fewer tokens": (
            lambda: rotate(place(noise(3, 6, 24, 16), mesh, [Shard(2)] * 2), SPEC, part_of_16),
            ValueError,
            "[rotate] positions must be those of a part of 24 tokens, like the whole x, but are those of a "
            "part of 16.",
        ),
        "rows of two ranks": (
            lambda: positions.concatenate(rows_of_ranks, along="rows"),
            ValueError,
            "[concatenate] parts must all be positions of the tokens of one rank, or all of whole rows.",
        ),
        "a shard of other tokens": (
            lambda: positions.shard(part_of_16, 0, 2, tokens=16),
            ValueError,
            "[shard] tokens must be 4, the number of tokens of the rank, but got 16.",
        ),
        "a length that one rank cannot know": (
            lambda: rotate(q, spec, part),
            ValueError,
            "[rotate] seq_len must be given with the positions of one rank's tokens, as the frequencies "
            "depend on the length of the whole sequence.",
        ),
        "a length from divided ids": (
            lambda: spec.at(put(IDS, Shard(1), Replicate())),
            ValueError,
            "[at] seq_len must be given with the positions of one rank's tokens, as the frequencies "
            "depend on the length of the whole sequence (positions: int64[1, 3, 13]).",
        ),
        "a local weight that learns": (
            lambda: rotate(q, SPEC, act=RMSNorm(weight)),
            TypeError,
            "[rotate] weight of RMSNorm must be a DTensor because x is one and weight of RMSNorm requires "
            "grad: its gradient is summed over the mesh; make it one with distribute_tensor.",
        ),
        "a local θ that learns": (
            lambda: lrpe_rotate_1d(put(Q, Shard(0), Replicate()), weight[:8]),
            TypeError,
            "[lrpe_rotate_1d] theta must be a DTensor because x is one and theta requires grad: its "
            "gradient is summed over the mesh; make it one with distribute_tensor.",
        ),
        "a weight, divided differently": (
            lambda: rotate(q, SPEC, act=RMSNorm(put(noise(6, 16), Shard(0), Replicate()))),
            ValueError,
            "[rotate] weight of RMSNorm must be replicated, or sharded like x; call its "
            "method redistribute.",
        ),
        "a weight for other heads": (
            lambda: rotate(q, SPEC, act=RMSNorm(noise(3, 16))),
            ValueError,
            "[rotate] weight of RMSNorm must have 1 or 6 heads, like the whole x, but got 3 (weight of "
            "RMSNorm: float64[3, 16]).",
        ),
        "a weight of one head on one process": (
            lambda: rotate(q, SPEC, act=RMSNorm(alone)),
            ValueError,
            "[rotate] weight of RMSNorm must be replicated, or sharded like x; call its "
            "method redistribute.",
        ),
        "a weight that holds too little": (
            lambda: rotate(q, SPEC, act=RMSNorm(too_few)),
            ValueError,
            "[rotate] weight of RMSNorm must be divided as by torch.chunk, so that this process holds [3, "
            "16], but it holds [1, 16]; give its whole shape to DTensor.from_local (weight of RMSNorm: "
            "float64[6, 16]).",
        ),
        "another order of division": (
            lambda: rotate(reordered, SPEC),
            ValueError,
            "[rotate] x must be divided by the dimensions of its mesh in their order, but they divide "
            "dimension 2 in the order (1, 0); call x.redistribute.",
        ),
        "local positions that learn, next to whole queries": (
            lambda: rotate_qk(whole, put(K, Replicate(), Shard(1)), SPEC, fractional),
            TypeError,
            "[rotate_qk] positions must be a DTensor because q is one and positions requires grad: its "
            "gradient is summed over the mesh; make it one with distribute_tensor.",
        ),
        "out that requires grad": (
            lambda: rotate(whole, SPEC, out=put(Q, Replicate(), Replicate()).requires_grad_()),
            ValueError,
            "[rotate] out must not require grad, because a result written to it has none; use "
            "torch.no_grad(), or omit out (out: float64[3, 6, 13, 16]).",
        ),
        "no tables": (
            lambda: apply_rotary_pos_emb(q, None, None, None),
            TypeError,  # type: ignore[arg-type]
            "[apply_rotary_pos_emb] cos must be a tensor but got None.",
        ),
        "ids in the place of unsqueeze_dim": (
            lambda: apply_rotary_pos_emb(q, None, *cos_sin(13, 16).values(), IDS),
            TypeError,  # type: ignore[arg-type]
            "[apply_rotary_pos_emb] unsqueeze_dim must be an int but got int64[3, 13]; pass ids as "
            "position_ids=.",
        ),
        "a scan of values with other heads": (
            lambda: polar_scan(whole, whole, put(K, Replicate(), Replicate()), SPEC),
            ValueError,
            "[polar_scan] v must have the 6 heads of k but got 3 (v: float64[3, 3, 13, 16]).",
        ),
        "another gate": (
            lambda: rotate(q, SPEC, gate=gates.Gate()),
            TypeError,
            "[rotate] gate must be one of tightrope.gates with DTensors but got a Gate; rotate "
            "to_local() and convert the result with DTensor.from_local.",
        ),
        "phases": (
            lambda: rotate(q, SPEC, phases=phases.given(noise(1, 1, 13, 6))),
            TypeError,
            "[rotate] phases must be None with DTensors; rotate to_local() by the phases of its own "
            "tokens, and convert the result with DTensor.from_local.",
        ),
        "softmax of tokens": (
            lambda: lrpe_rotate_1d(put(Q, Shard(1), Replicate()), noise(8), act="softmax", dim=1),
            ValueError,
            "[lrpe_rotate_1d] x must not be sharded along tokens for a softmax over the tokens, which "
            f"needs all of them; call x.redistribute {about}.",
        ),
        "a scan along tokens": (
            lambda: polar_scan(q, k, k, SPEC),
            ValueError,
            f"[polar_scan] q {scan}; call q.redistribute (q: float64[3, 6, 13, 16]).",
        ),
        "a scan of other values": (
            lambda: polar_scan(whole, whole, put(Q, Replicate(), Shard(1)), SPEC),
            ValueError,
            f"[polar_scan] v {scan}; call v.redistribute (v: float64[3, 6, 13, 16]).",
        ),
        "a scan of other heads": (
            lambda: polar_scan(
                put(Q, Replicate(), Shard(1)), *(put(K, Replicate(), Shard(1)),) * 2, SPEC
            ),
            ValueError,
            "[polar_scan] q and k must be sharded such that each process has the heads of k that its "
            "heads of q share, but it has heads 3 to 6 of q and 2 to 3 of k (q: float64[3, 6, 13, 16], k: "
            "float64[3, 3, 13, 16]).",
        ),
        "the wrong rank": (
            lambda: rotate(zero, SPEC),
            ValueError,
            "[rotate] x must have 4 dimensions for layout 'bhsd' but got 3; layouts with 3 dimensions: "
            "'thd', 'bsd' (x: float32[3, 13, 13]).",
        ),
        "local tensors with divided ids": (
            lambda: rotate(Q, SPEC, put(IDS, Shard(1), Replicate())),
            TypeError,
            "[rotate] positions must be a local tensor but got a DTensor; pass its to_local() or "
            "full_tensor().",
        ),
    }


def test_refusals() -> None:
    with rank(1, (2, 2)) as mesh:
        for call, kind, text in refusals(mesh).values():
            with refused(kind, text):
                call()


def test_a_process_outside_the_mesh() -> None:
    with rank(3, (RANKS,)):
        half = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
        x = DTensor.from_local(Q, half, [Replicate()], shape=Q.shape, stride=Q.stride())
        with refused(ValueError, "[rotate] x must be on a device mesh that contains this process."):
            rotate(x, SPEC)


def test_a_local_weight_with_a_tangent() -> None:
    """DTensors have no tangents, so that of the result would be lost."""
    weight = noise(16)
    with rank(1, (RANKS,)) as mesh, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, weight)
        with refused(
            TypeError,
            "[rotate] weight of RMSNorm must not have a tangent because x is a DTensor, which has none.",
        ):
            rotate(place(Q, mesh, [Shard(1)]), SPEC, act=RMSNorm(dual))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_q_or_k_alone_learns(backend: str | None) -> None:
    """A result requires grad only if its tensor, or an argument of both, does."""
    for learns in ((True, False), (False, True)):
        q, k = (x.clone().requires_grad_(own) for x, own in zip((Q, K), learns))
        wanted = rotate_qk(q, k, SPEC, 3, backend=backend)
        with rank(1, (RANKS,)) as mesh:
            own = [place(x.detach(), mesh, [Shard(1)]) for x in (q, k)]
            for x, learn in zip(own, learns):
                x.requires_grad_(learn)
            found = rotate_qk(*own, SPEC, 3, backend=backend)
            for y, whole, x, learn in zip(found, wanted, own, learns):
                assert y.requires_grad == whole.requires_grad == learn
                assert_same_bits(y.to_local().detach(), share(whole, mesh, [Shard(1)]).detach())
                if learn:
                    (grad,) = torch.autograd.grad(y.to_local().sum(), x)
                    assert grad.placements == (Shard(1),)
