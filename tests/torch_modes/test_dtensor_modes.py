"""Calls on DTensors that write into given tensors, under autograd, in compiled code, and whose tokens are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.dtensors import (
    BHSD,
    IDS,
    RANKS,
    SPEC,
    By,
    K,
    Q,
    assert_parts,
    cos_sin,
    given_whole,
    group,
    place,
    placements_of,
    rank,
    share,
)
from tests.support.helpers import noise, on, refused, version_of
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, gates, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import Given
from tightrope.functional import (
    apply_rotary_pos_emb,
    rerotate,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

Tensors = Mapping[str, Any]
HEADS, TOKENS, EVERYWHERE = Shard(1), Shard(2), Replicate()


# --- destinations ---------------------------------------------------------------------------------


def test_what_is_written_is_returned_and_counts_as_a_change() -> None:
    with rank(1) as mesh:
        q, k = written = [place(x, mesh, HEADS) for x in (Q, K)]
        versions = [x._version for x in written]
        found = rotate_qk_(q, k, SPEC.at(IDS))
        assert all(one is x for one, x in zip(found, written))
        assert all(x._version > version for x, version in zip(written, versions))
        assert_parts(found, rotate_qk(Q, K, SPEC, IDS), mesh, HEADS)
        for x, text in (
            (place(Q, mesh, HEADS).requires_grad_(), "x is a leaf that requires grad, or a view"),
            (q.requires_grad_() * 1, "q and k must not share memory"),
        ):
            before = x.to_local().clone()
            with pytest.raises(ValueError, match=text):
                rotate_(x, SPEC) if x.is_leaf else rotate_qk_(x, x, SPEC)
            assert_same_bits(x.to_local(), before)


def test_local_tensors_with_gaps() -> None:
    """A local tensor may be a slice of a projection; its result is dense, with the same order."""
    with rank(2) as mesh:
        local = share(Q, mesh, [HEADS])
        wide = torch.cat((local, local), -1).transpose(1, 2).contiguous().transpose(1, 2)[..., :16]
        y = rotate(given_whole(wide, Q, mesh, HEADS), SPEC, 3)
        assert_parts([y], [rotate(Q, SPEC, 3)], mesh, HEADS)
        assert y.stride() == Q.transpose(1, 2).contiguous().transpose(1, 2).stride()


def test_k_on_all_processes() -> None:
    """Keys with fewer heads than processes stay whole where queries are divided."""
    own = gates.Exp(noise(6, 16))
    with rank(1) as mesh:
        given = place(Q, mesh, HEADS), place(K, mesh, EVERYWHERE)
        q, k = rotate_qk(*given, SPEC, IDS, gate=(own, None))
        assert_parts([q], [rotate(Q, SPEC, IDS, gate=own)], mesh, HEADS)
        assert_same_bits(k.to_local(), rotate(K, SPEC, IDS))
        theta = noise(6, 6, seed=4)
        alone = "because q and k are sharded differently along heads; rotate q and k one by one."
        six = place(torch.cat((K, K), 1), mesh, EVERYWHERE)
        learned = place(theta[0], mesh, EVERYWHERE).requires_grad_()
        for pair, own, rule in (
            ((given[0], six), theta, "must not have heads"),
            (given, learned, "must not require grad"),
        ):
            with refused(ValueError, f"[rotate_qk] inv_freq {rule}, {alone}"):
                rotate_qk(*pair, SPEC.at(inv_freq=own))
        # The part of a rotation that is kept for divided heads is not used for others.
        with_heads = RopeSpec(16, scaling=Given(noise(6, 8).tolist())).at(3)
        rotate(given[0], with_heads)
        with pytest.raises(ValueError, match="rope must not have heads"):
            rotate_qk(given[0], six, with_heads)


# --- autograd -------------------------------------------------------------------------------------


# The tensor that is changed after a call, and the call.
KEPT: list[tuple[str, Callable[[Tensors], Any]]] = [
    ("x", lambda t: rotate(t["x"], SPEC, act="silu")),
    ("ids", lambda t: rotate(t["x"], SPEC, t["ids"])),
    ("ids", lambda t: rotate_(t["x"] * 1, SPEC, t["ids"])),
    ("w", lambda t: rotate(t["x"], SPEC, act=RMSNorm(t["w"]))),
    ("log", lambda t: rotate(t["x"], SPEC, gate=gates.Given(t["log"]))),
    ("cos", lambda t: apply_rotary_pos_emb(t["x"], None, t["cos"], t["sin"], tables="half")[0]),
    ("y", lambda t: rotate(t["x"], SPEC, gate=gates.Exp(t["w"].requires_grad_()))),
]


def test_what_is_kept_for_the_backward_pass_must_not_change() -> None:
    """It is local tensors, whose versions torch does not count when DTensors change."""
    given: dict[str, tuple[torch.Tensor, Any]] = {
        "x": (Q, HEADS),
        "ids": (IDS, EVERYWHERE),
        "w": (noise(16), EVERYWHERE),
        "log": (noise(13, 6, 16), HEADS),
        **{key: (x, EVERYWHERE) for key, x in cos_sin(13, 8).items()},
    }
    with rank(1) as mesh:
        for name, call in KEPT:
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
        leaf = place(Q, mesh, HEADS).requires_grad_()
        x = leaf * 1
        y = rotate(x, SPEC)
        x.mul_(2)
        y.mul_(2)
        torch.autograd.grad(y.to_local().sum(), leaf)


def test_results_are_on_the_callers_mesh() -> None:
    """A mesh of an earlier process group may be equal to it."""
    for _ in range(2):
        with group(1):
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("again",))
            x = place(noise(2, 4, 5, 16), mesh, HEADS)
            assert rotate(x, SPEC).device_mesh is mesh


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
    with rank(1) as mesh:
        found = gradient_of_norm(place(Q, mesh, HEADS).requires_grad_())
        own = share(wanted, mesh, [HEADS])
        assert_near(found.to_local(), own, "gradient added up over ranks")


def test_a_gradient_that_is_placed_differently() -> None:
    """Autograd may hand over a replicated gradient; that of x is placed like x."""
    with rank(1) as mesh:
        x = place(Q, mesh, HEADS).requires_grad_()
        (grad,) = torch.autograd.grad(rotate(x, SPEC, 3), x, place(Q, mesh, EVERYWHERE))
        assert grad.placements == (HEADS,)
        assert_parts([grad], [rotate(Q, SPEC, 3, inverse=True)], mesh, HEADS)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_q_or_k_alone_learns(backend: str | None) -> None:
    """A result requires grad only if its tensor, or an argument of both, does."""
    wanted = on(backend, rotate_qk, Q, K, SPEC, 3)
    for learns in ((True, False), (False, True)):
        with rank(1) as mesh:
            own = [place(x, mesh, HEADS).requires_grad_(e) for x, e in zip((Q, K), learns)]
            found = on(backend, rotate_qk, *own, SPEC, 3)
            assert tuple(y.requires_grad for y in found) == learns
            assert_parts(found, wanted, mesh, HEADS)
            at = learns.index(True)
            (grad,) = torch.autograd.grad(found[at].to_local().sum(), own[at])
            assert grad.placements == (HEADS,)


# --- compiled code --------------------------------------------------------------------------------


@pytest.fixture
def compiler(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")


@pytest.mark.usefixtures("compiler")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("learns", [False, True])
def test_compiled(learns: bool) -> None:
    """A compiled call is one graph, and rotates as in eager code, also in place."""

    def step(q: Any, k: Any, w: Any, ids: Any) -> Any:
        q, k = rotate_qk(q * 1, k * 1, SPEC, ids, act=(RMSNorm(w), None))
        return rotate_qk_(q * 1, k * 1, SPEC, 5)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with rank(1, 2, 2) as mesh:
        own = placements_of(BHSD, ("token", "head"))
        given = [place(x[:, :, :12], mesh, *own) for x in (Q, torch.cat((K, K), 1))]
        given.append(place(noise(6, 16, seed=5), mesh, EVERYWHERE, Shard(0)))
        ids = place(IDS[:, :12], mesh, HEADS, EVERYWHERE)
        given = [x.requires_grad_(learns) for x in given]
        found = []
        for run in (step, compiled):
            ys = run(*given, ids)
            total = sum(y.to_local().sum() for y in ys)
            found.append((*ys, *(torch.autograd.grad(total, given) if learns else ())))
        for one, other in zip(*found, strict=True):
            assert one.placements == other.placements
            assert_near(other.to_local(), one.to_local(), "gradient added up over ranks")


@pytest.mark.usefixtures("compiler")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_several_lengths(dynamic: bool | None) -> None:
    options = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    compiled = torch.compile(lambda x: rotate(x, SPEC, 3), **options)
    with rank(1) as mesh:
        for tokens in (12, 16, 21):
            x = noise(3, 6, tokens, 16)
            for dim in (0, 2):
                y = compiled(place(x, mesh, Shard(dim)))
                assert y.shape == x.shape
                assert_parts([y], [rotate(x, SPEC, 3)], mesh, Shard(dim))


# --- positions -------------------------------------------------------------------------------------


def zigzag(x: torch.Tensor, dim: int, chunks: int = RANKS) -> torch.Tensor:
    """Return tokens in the order in which a zig-zag group of ranks holds them."""
    parts = x.chunk(2 * chunks, dim)
    order = [index for r in range(chunks) for index in (r, 2 * chunks - 1 - r)]
    return torch.cat([parts[index] for index in order], dim)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ids", [None, 5, IDS[:, :8].repeat(1, 2)], ids=["none", "offset", "ids"])
def test_positions_of_one_rank(kind: str, ids: torch.Tensor | int | None) -> None:
    """Of rotations, and of keys that move from these to others."""
    q, k = noise(3, 6, 16, 16), noise(3, 3, 16, 16, seed=1)
    other = RopeSpec(16, base=5e5, rotary_dim=12, start=2)
    whole = q, k, *rotate_qk(q, k, SPEC, ids), rerotate(q, SPEC, other, ids, 3)
    q, k, *wanted, moved = (zigzag(x, 2) if kind == "zigzag" else x for x in whole)
    for number in range(RANKS):
        with rank(number) as mesh:
            where, to = (
                positions.shard(one, number, RANKS, kind=kind, tokens=16) for one in (ids, 3)
            )
            given = [place(x, mesh, TOKENS) for x in (q, k)]
            for spec, at in ((SPEC, where), (SPEC.at(where), None)):
                assert_parts(rotate_qk(*given, spec, at), wanted, mesh, TOKENS)
            assert_parts([rerotate(given[0], SPEC, other, where, to)], [moved], mesh, TOKENS)


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
        ids, x = place(IDS.double()[None], mesh, EVERYWHERE), place(Q, mesh, TOKENS)
        prepared = SPEC.at(positions.Positions(ids, add_index=False))
        assert not rotate(x, prepared).requires_grad
        ids.requires_grad_()
        (grad,) = torch.autograd.grad(rotate(x, prepared).to_local().sum(), ids)
        assert bool(grad.to_local().any())
