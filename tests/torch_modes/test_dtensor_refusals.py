"""Calls on DTensors that are refused, and what the errors say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.dtensors import IDS, SPEC, K, Q, cos_sin, given_whole, place, rank
from tests.support.helpers import noise, refused
from tightrope import RopeSpec, gates, phases, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    polar_scan,
    rotate,
    rotate_,
    rotate_qk,
)

Refusals = dict[str, Callable[[], object] | list[Callable[[], object]]]
WHOLE = Replicate()
BY_LENGTH = RopeSpec(16, scaling=DynamicNTK(4.0, 4))
OF_RANK_1 = positions.shard(None, 1, 4, tokens=52)
OF_16_TOKENS = positions.shard(None, 1, 4, tokens=16)


def wrong_values(mesh: Any) -> Refusals:
    """Return calls that must be refused with a ValueError on rank 1 of (2, 2), and the messages."""

    def put(x: torch.Tensor, *own: Any) -> Any:
        return place(x, mesh, *own)

    def norm(weight: torch.Tensor) -> Any:
        return rotate(q, SPEC, act=RMSNorm(weight))

    def made(local: torch.Tensor, places: Any, **others: Any) -> Any:
        return DTensor(local, type(q._spec)(mesh, places, **others), requires_grad=False)

    q, k = (put(x, Shard(2), Shard(1)) for x in (Q, K))
    whole, heads, other_heads = (
        put(Q, WHOLE, WHOLE),
        put(Q, WHOLE, Shard(1)),
        put(K, WHOLE, Shard(1)),
    )
    summed = DTensor.from_local(Q, mesh, [Partial(), WHOLE])
    by = _StridedShard(2, split_factor=2), Shard(1)
    strided = made(q.to_local(), by, tensor_meta=q._spec.tensor_meta)
    wrong = given_whole(Q[:, :2], Q, mesh, Shard(2), Shard(1))
    rows_of_ranks = [
        positions.Positions(torch.arange(4)[None, None], 0, False, part=(r, 4, 16))
        for r in range(2)
    ]
    alone, too_few = (
        given_whole(noise(1, 16), noise(heads, 16), mesh, WHOLE, Shard(0)) for heads in (1, 6)
    )
    meta = type(q._spec.tensor_meta)(torch.Size((3, 6, 12, 16)), (1152, 192, 16, 1), Q.dtype)
    order = (ShardOrderEntry(2, (1, 0)),)
    reordered = made(noise(3, 6, 3, 16), (Shard(2), Shard(2)), tensor_meta=meta, shard_order=order)
    scan = "must be sharded like q, along rows and heads only, because a scan needs all tokens of a head"
    part = "this process holds part 0 of"
    unlike = "must be replicated, or sharded like x; call its method redistribute."
    about_length = (
        "seq_len must be given with the positions of one rank's tokens, as the frequencies depend on the "
        "length of the whole sequence"
    )
    return {
        "[rotate] x must be replicated or sharded but is P(sum) on dimension 0 of its mesh; call "
        "x.redistribute.": (lambda: rotate(summed, SPEC)),
        "[rotate] x must be replicated or sharded but is _S(2, 2) on dimension 0 of its mesh; call "
        "x.redistribute.": (lambda: rotate(strided, SPEC)),
        "[rotate] x must not be sharded along its channels, which a rotation mixes; call "
        "x.redistribute to replicate it, or to shard its rows, heads or tokens.": (
            lambda: rotate(put(Q, Shard(3), WHOLE), SPEC)
        ),
        "[rotate] x must be divided as by torch.chunk, so that this process holds [3, 3, 7, 16], but "
        "it holds [3, 2, 13, 16]; give its whole shape to DTensor.from_local (x: float64[3, 6, 13, 16]).": (
            lambda: rotate(wrong, SPEC)
        ),
        "[rotate_qk] q and k must be sharded alike along rows and tokens but are placed as "
        "(Shard(dim=2), Shard(dim=1)) and (Shard(dim=0), Shard(dim=1)); rotate them one by one.": (
            lambda: rotate_qk(q, put(K, Shard(0), Shard(1)), SPEC)
        ),
        "[rotate_qk] q and k must have the same number of tokens but got 13 and 12; rotate them one "
        "by one (q: float64[3, 6, 13, 16], k: float64[3, 3, 12, 16]).": (
            lambda: rotate_qk(q, put(K[:, :, :12], Shard(2), Shard(1)), SPEC)
        ),
        "[rotate] positions must hold one position for each of 13 tokens but got 12 (layout 'bhsd' "
        "has its tokens in dimension 2) (x: float64[3, 6, 13, 16], positions: int64[12]).": (
            lambda: rotate(q, SPEC, torch.arange(12))
        ),
        f"[rotate] positions {unlike}": (lambda: rotate(q, SPEC, put(IDS, WHOLE, Shard(1)))),
        f"[rotate] positions are those of rank 1 of 4, but {part} 2 of the tokens of x.": (
            lambda: rotate(q, SPEC, OF_RANK_1)
        ),
        f"[rotate] positions are those of rank 1 of 4, but {part} 1 of the tokens of x.": (
            lambda: rotate(whole, SPEC, OF_RANK_1)
        ),
        "[rotate] positions must be those of a part of 24 tokens, like the whole x, but are those of a "
        "part of 16.": (
            lambda: rotate(put(noise(3, 6, 24, 16), Shard(2), Shard(2)), SPEC, OF_16_TOKENS)
        ),
        "[concatenate] parts must all be positions of the tokens of one rank, or all of whole rows.": (
            lambda: positions.concatenate(rows_of_ranks, along="rows")
        ),
        "[shard] tokens must be 4, the number of tokens of the rank, but got 16.": (
            lambda: positions.shard(OF_16_TOKENS, 0, 2, tokens=16)
        ),
        f"[rotate] {about_length}.": (lambda: rotate(q, BY_LENGTH, OF_RANK_1)),
        f"[at] {about_length} (positions: int64[3, 13]).": (
            lambda: BY_LENGTH.at(put(IDS, Shard(1), WHOLE))
        ),
        f"[rotate] weight of RMSNorm {unlike}": [
            (lambda: norm(put(noise(6, 16), Shard(0), WHOLE))),
            (lambda: norm(alone)),
        ],
        "[rotate] weight of RMSNorm must have 1 or 6 heads, like the whole x, but got 3 (weight of "
        "RMSNorm: float64[3, 16]).": (lambda: norm(noise(3, 16))),
        "[rotate] weight of RMSNorm must be divided as by torch.chunk, so that this process holds [3, "
        "16], but it holds [1, 16]; give its whole shape to DTensor.from_local (weight of RMSNorm: "
        "float64[6, 16]).": (lambda: norm(too_few)),
        "[rotate] x must be divided by the dimensions of its mesh in their order, but they divide "
        "dimension 2 in the order (1, 0); call x.redistribute.": (lambda: rotate(reordered, SPEC)),
        "[rotate] out must not require grad, because a result written to it has none; use "
        "torch.no_grad(), or omit out (out: float64[3, 6, 13, 16]).": (
            lambda: rotate(whole, SPEC, out=put(Q, WHOLE, WHOLE).requires_grad_())
        ),
        "[polar_scan] v must have the 6 heads of k but got 3 (v: float64[3, 3, 13, 16]).": (
            lambda: polar_scan(whole, whole, put(K, WHOLE, WHOLE), SPEC)
        ),
        "[lrpe_rotate_1d] x must not be sharded along tokens for a softmax over the tokens, which "
        "needs all of them; call x.redistribute (x: float64[3, 6, 13, 16]).": (
            lambda: lrpe_rotate_1d(put(Q, Shard(1), WHOLE), noise(8), act="softmax", dim=1)
        ),
        f"[polar_scan] q {scan}; call q.redistribute (q: float64[3, 6, 13, 16]).": (
            lambda: polar_scan(q, k, k, SPEC)
        ),
        f"[polar_scan] v {scan}; call v.redistribute (v: float64[3, 6, 13, 16]).": (
            lambda: polar_scan(whole, whole, heads, SPEC)
        ),
        "[polar_scan] q and k must be sharded such that each process has the heads of k that its "
        "heads of q share, but it has heads 3 to 6 of q and 2 to 3 of k (q: float64[3, 6, 13, 16], k: "
        "float64[3, 3, 13, 16]).": (lambda: polar_scan(heads, other_heads, other_heads, SPEC)),
        "[rotate] x must have 4 dimensions for layout 'bhsd' but got 3; layouts with 3 dimensions: "
        "'thd', 'bsd' (x: float32[3, 13, 13]).": (
            lambda: rotate(put(torch.zeros(3, 13, 13), WHOLE, Shard(1)), SPEC)
        ),
    }


def wrong_types(mesh: Any) -> Refusals:
    """Return calls that must be refused with a TypeError on rank 1 of (2, 2), and the messages."""
    q, k = (place(x, mesh, Shard(2), Shard(1)) for x in (Q, K))
    whole, heads = place(Q, mesh, WHOLE, WHOLE), place(K, mesh, WHOLE, Shard(1))
    rows = place(Q, mesh, Shard(0), WHOLE)
    weight, fractional = noise(16).requires_grad_(), IDS.double().requires_grad_()
    ids, tables = place(IDS, mesh, Shard(1), WHOLE), tuple(cos_sin(13, 16).values())
    both = "q and k must all be DTensors or all be local tensors"

    def local(name: str, sharded: str = "x") -> str:
        return (
            f"{name} must be a DTensor because {sharded} is one and {name} requires grad: its gradient is "
            "summed over the mesh; make it one with distribute_tensor."
        )

    return {
        f"[rotate_qk] {both} (k: float64[3, 3, 13, 16]).": (lambda: rotate_qk(q, K, SPEC)),
        f"[apply_rotary_pos_emb] {both} (q: float64[3, 6, 13, 16]).": (
            lambda: apply_rotary_pos_emb(Q, k, *tables)
        ),
        f"[rotate] {local('weight of RMSNorm')}": (lambda: rotate(q, SPEC, act=RMSNorm(weight))),
        f"[lrpe_rotate_1d] {local('theta')}": (lambda: lrpe_rotate_1d(rows, weight[:8])),
        f"[rotate_qk] {local('positions', 'q')}": (
            lambda: rotate_qk(whole, heads, SPEC, fractional)
        ),
        "[apply_rotary_pos_emb] cos must be a tensor but got None.": (
            lambda: apply_rotary_pos_emb(q, None, None, None)
        ),
        "[apply_rotary_pos_emb] unsqueeze_dim must be an int but got int64[3, 13]; pass ids as "
        "position_ids=.": (lambda: apply_rotary_pos_emb(q, None, *tables, IDS)),
        "[rotate] gate must be one of tightrope.gates with DTensors but got a Gate; rotate "
        "to_local() and convert the result with DTensor.from_local.": (
            lambda: rotate(q, SPEC, gate=gates.Gate())
        ),
        "[rotate] phases must be None with DTensors; rotate to_local() by the phases of its own "
        "tokens, and convert the result with DTensor.from_local.": (
            lambda: rotate(q, SPEC, phases=phases.given(noise(1, 1, 13, 6)))
        ),
        "[rotate] slots must be None with DTensors; pass to_local() of the keys, and local caches.": (
            lambda: rotate(q, SPEC, out=q, slots=IDS)
        ),
        "[rotate] out must be a local tensor but got a DTensor; pass its to_local() or full_tensor().": (
            lambda: rotate(Q, SPEC, out=q, slots=IDS)
        ),
        "[rotate] slots must be a local tensor but got a DTensor; pass its to_local() or full_tensor().": (
            lambda: rotate(Q, SPEC, out=Q.clone(), slots=ids)
        ),
        "[rotate_] x must be a local tensor but got a DTensor; pass its to_local() or full_tensor().": (
            lambda: rotate_(q, SPEC, slots=IDS)
        ),
        "[rotate] positions must be a local tensor but got a DTensor; pass its to_local() or "
        "full_tensor().": (lambda: rotate(Q, SPEC, ids)),
    }


def test_refusals() -> None:
    with rank(1, 2, 2) as mesh:
        for kind, calls in ((ValueError, wrong_values(mesh)), (TypeError, wrong_types(mesh))):
            for text, wrong in calls.items():
                for call in wrong if isinstance(wrong, list) else [wrong]:
                    with refused(kind, text):
                        call()


def test_a_process_outside_the_mesh() -> None:
    with rank(3):
        x = given_whole(Q, Q, DeviceMesh("cpu", [0, 1]), WHOLE)
        with refused(ValueError, "[rotate] x must be on a device mesh that contains this process."):
            rotate(x, SPEC)


def test_a_local_weight_with_a_tangent() -> None:
    """DTensors have no tangents, so that of the result would be lost."""
    weight = noise(16)
    with rank(1) as mesh, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, weight)
        with refused(
            TypeError,
            "[rotate] weight of RMSNorm must not have a tangent because x is a DTensor, which has none.",
        ):
            rotate(place(Q, mesh, Shard(1)), SPEC, act=RMSNorm(dual))
