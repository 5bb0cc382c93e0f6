"""Calls on DTensors that are refused: the beginning of each error, up to the phrase that carries the rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
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
    rerotate,
    rerotate_,
    rotate,
    rotate_,
    rotate_qk,
    write_kv,
)

WHOLE, ROWS, HEADS, TOKENS = Replicate(), Shard(0), Shard(1), Shard(2)
BY_LENGTH = RopeSpec(16, scaling=DynamicNTK(4.0, 4))
OF_RANK_1 = positions.shard(None, 1, 4, tokens=52)
OF_16_TOKENS = positions.shard(None, 1, 4, tokens=16)


def refuse(
    kind: type[Exception], text: str, call: Callable[..., object], *arguments: Any, **options: Any
) -> None:
    """Expect an error of this type, which begins with the name of the call and then this text."""
    start = re.escape(f"[{options.pop('of', call.__name__)}] {text}")
    with pytest.raises(kind, match=f"^{start}"):
        call(*arguments, **options)


value, kind = partial(refuse, ValueError), partial(refuse, TypeError)


@pytest.fixture
def put() -> Iterator[Callable[..., Any]]:
    """A function that places a tensor on a mesh of (2, 2), of which rank 1 is played."""
    with rank(1, 2, 2) as mesh:
        yield lambda x, *own: place(x, mesh, *own)


def test_placements_that_do_not_fit_a_rotation(put: Callable[..., Any]) -> None:
    q = put(Q, TOKENS, HEADS)
    mesh, of_spec = q.device_mesh, type(q._spec)

    def made(local: torch.Tensor, places: Any, **others: Any) -> Any:
        """Return a DTensor of a specification that no public function makes."""
        return DTensor(local, of_spec(mesh, places, **others), requires_grad=False)

    whole = "x must be replicated or sharded but is"
    value(f"{whole} P(sum) on", rotate, DTensor.from_local(Q, mesh, [Partial(), WHOLE]), SPEC)
    by = _StridedShard(2, split_factor=2), HEADS
    strided = made(q.to_local(), by, tensor_meta=q._spec.tensor_meta)
    value(f"{whole} _S(2, 2) on dimension 0 of its mesh", rotate, strided, SPEC)
    value("x must not be sharded along its channels", rotate, put(Q, Shard(3), WHOLE), SPEC)
    narrow = given_whole(Q[:, :2], Q, mesh, TOKENS, HEADS)
    text = "so that this process holds [3, 3, 7, 16], but it holds [3, 2, 13, 16]; give its whole"
    value(f"x must be divided as by torch.chunk, {text}", rotate, narrow, SPEC)
    shape = torch.Size((3, 6, 12, 16))
    meta = type(q._spec.tensor_meta)(shape, (1152, 192, 16, 1), Q.dtype)
    order = (ShardOrderEntry(2, (1, 0)),)
    local, places = noise(3, 6, 3, 16), (TOKENS, TOKENS)
    reordered = made(local, places, tensor_meta=meta, shard_order=order)
    text = "but they divide dimension 2 in the order (1, 0)"
    value(
        f"x must be divided by the dimensions of its mesh in their order, {text}",
        rotate,
        reordered,
        SPEC,
    )
    flat = put(torch.zeros(3, 13, 13), WHOLE, HEADS)
    value("x must have 4 dimensions for layout 'bhsd' but got 3; layouts", rotate, flat, SPEC)
    text = "q and k must be sharded alike along rows and tokens but are placed as"
    value(text, rotate_qk, q, put(K, ROWS, HEADS), SPEC)
    k = put(K[:, :, :12], TOKENS, HEADS)
    value("q and k must have the same number of tokens but got 13 and 12", rotate_qk, q, k, SPEC)
    kind("q and k must all be DTensors or all be local tensors (k: f", rotate_qk, q, K, SPEC)


def test_positions_of_other_tokens(put: Callable[..., Any]) -> None:
    q, whole, ids = put(Q, TOKENS, HEADS), put(Q, WHOLE, WHOLE), put(IDS, HEADS, WHOLE)
    text = "positions must hold one position for each of 13 tokens but got 12"
    value(text, rotate, q, SPEC, torch.arange(12))
    text = "positions must be replicated, or sharded like x; call its method redistribute."
    value(text, rotate, q, SPEC, put(IDS, WHOLE, HEADS))
    text = "positions are those of rank 1 of 4, but this process holds part 0 of"
    value(f"{text} 2 of the tokens of x.", rotate, q, SPEC, OF_RANK_1)
    value(f"{text} 1 of the tokens of x.", rotate, whole, SPEC, OF_RANK_1)
    text = (
        "positions must be those of a part of 24 tokens, like the whole x, but are those of a part"
    )
    value(text, rotate, put(noise(3, 6, 24, 16), TOKENS, TOKENS), SPEC, OF_16_TOKENS)
    at = torch.arange(4)[None, None]
    rows = [positions.Positions(at, 0, False, part=(r, 4, 16)) for r in range(2)]
    text = "parts must all be positions of the tokens of one rank, or all of whole"
    value(text, positions.concatenate, rows, along="rows")
    text = "tokens must be 4, the number of tokens of the rank, but got 16."
    value(text, positions.shard, OF_16_TOKENS, 0, 2, tokens=16)
    text = "positions and new_positions must be those of the tokens of the same rank."
    x = put(noise(3, 6, 16, 16), TOKENS, TOKENS)
    value(text, rerotate, x, SPEC, SPEC, None, OF_16_TOKENS)
    text = "seq_len must be given with the positions of one rank's tokens"
    value(text, rotate, q, BY_LENGTH, OF_RANK_1)
    value(text, BY_LENGTH.at, ids)


def test_other_tensors_that_do_not_fit(put: Callable[..., Any]) -> None:
    q, whole = put(Q, TOKENS, HEADS), put(Q, WHOLE, WHOLE)
    mesh = q.device_mesh

    def norm(weight: torch.Tensor) -> Any:
        return rotate(q, SPEC, act=RMSNorm(weight))

    of = {"of": "rotate"}
    one = noise(1, 16)
    text = "weight of RMSNorm must be replicated, or sharded like x; call its method redistribute."
    value(text, norm, put(noise(6, 16), ROWS, WHOLE), **of)
    value(text, norm, given_whole(one, one, mesh, WHOLE, ROWS), **of)
    text = "weight of RMSNorm must have 1 or 6 heads, like the whole x, but got 3"
    value(text, norm, noise(3, 16), **of)
    text = "weight of RMSNorm must be divided as by torch.chunk, so that this process holds [3, 16], but"
    value(text, norm, given_whole(one, noise(6, 16), mesh, WHOLE, ROWS), **of)
    value(
        "out must not require grad", rotate, whole, SPEC, out=put(Q, WHOLE, WHOLE).requires_grad_()
    )
    value("out must be a DTensor that is placed like x.", rotate, q, SPEC, out=put(Q, WHOLE, ROWS))
    learns = put(Q, WHOLE, WHOLE).requires_grad_()
    value("a result written to out has no gradient, but x", rotate, learns, SPEC, out=whole)
    x = put(Q, HEADS, WHOLE)
    text = "x must not be sharded along tokens for a softmax over the tokens"
    value(text, lrpe_rotate_1d, x, noise(8), act="softmax", dim=1)
    heads, k = put(Q, WHOLE, HEADS), put(K, WHOLE, HEADS)
    text = "must be sharded like q, along rows and heads only, because a scan needs all tokens"
    value(f"q {text}", polar_scan, q, put(K, TOKENS, HEADS), put(K, TOKENS, HEADS), SPEC)
    value(f"v {text}", polar_scan, whole, whole, heads, SPEC)
    text = "v must have the 6 heads of k but got 3"
    value(text, polar_scan, whole, whole, put(K, WHOLE, WHOLE), SPEC)
    text = "share, but it has heads 3 to 6 of q and 2 to 3 of k"
    text = f"q and k must be sharded such that each process has the heads of k that its heads of q {text}"
    value(text, polar_scan, heads, k, k, SPEC)
    text = "keys must not be DTensors; pass to_local() of q, k and v, and local caches."
    caches = {"cache": (q, None), "slots": IDS}
    kind(text, write_kv, None, q, None, SPEC, **caches)
    text = "gate must be one of tightrope.gates with DTensors but got a Gate"
    kind(text, rotate, q, SPEC, gate=gates.Gate())
    text = "phases must be None with DTensors; rotate to_local() by the phases of its own"
    kind(text, rotate, q, SPEC.at(phases=phases.given(noise(1, 1, 13, 6))))
    tables = tuple(cos_sin(13, 16).values())
    text = "q and k must all be DTensors or all be local tensors"
    kind(text, apply_rotary_pos_emb, Q, put(K, TOKENS, HEADS), *tables)
    text = "cos must be a tensor but got None."
    kind(text, apply_rotary_pos_emb, q, None, None, None)
    text = "unsqueeze_dim must be an int but got int64[3, 13]; pass ids as"
    kind(text, apply_rotary_pos_emb, q, None, *tables, IDS)
    grad = (
        "requires grad: its gradient is summed over the mesh; make it one with distribute_tensor."
    )
    weight, fractional = noise(16).requires_grad_(), IDS.double().requires_grad_()
    text = f"weight of RMSNorm must be a DTensor because x is one and weight of RMSNorm {grad}"
    kind(text, norm, weight, **of)
    text = f"theta must be a DTensor because x is one and theta {grad}"
    kind(text, lrpe_rotate_1d, put(Q, ROWS, WHOLE), weight[:8])
    text = f"positions must be a DTensor because q is one and positions {grad}"
    kind(text, rotate_qk, whole, k, SPEC, fractional)


def test_dtensors_beside_local_tensors(put: Callable[..., Any]) -> None:
    """A kernel would read memory that they do not have."""
    local = "must be a local tensor but got a DTensor; pass its to_local() or full_tensor()."
    q, learned, ids = put(Q, WHOLE, WHOLE), put(noise(6, 16), WHOLE, WHOLE), put(IDS, WHOLE, WHOLE)
    log = put(noise(13, 6, 16), WHOLE, WHOLE)
    of, tables = ids[0], tuple(cos_sin(13, 16).values())
    kind(f"cache[0] {local}", write_kv, None, Q, None, SPEC, cache=(q, None), slots=IDS)
    kind(f"cache[1] {local}", write_kv, None, Q, Q, SPEC, cache=(Q.clone(), q), slots=IDS)
    kind(f"v {local}", write_kv, None, Q, q, SPEC, cache=(Q.clone(), Q.clone()), slots=IDS)
    kind(f"out {local}", rotate, Q, SPEC, out=q)
    kind(f"slots {local}", write_kv, None, Q, None, SPEC, cache=(Q.clone(), None), slots=ids)
    kind(f"k {local}", rerotate_, q, None, SPEC, IDS, slots=IDS)
    kind(f"positions {local}", rotate, Q, SPEC, ids)
    kind(f"positions {local}", rotate_, Q.clone(), SPEC.at(ids))
    kind(f"the weight of RMSNorm for x {local}", rotate, Q, SPEC, act=RMSNorm(learned))
    kind(f"gamma of the gate Exp {local}", rotate, Q, SPEC, gate=gates.Exp(learned))
    kind(f"slope of the gate Slope {local}", rotate, Q, SPEC, gate=gates.Slope(learned))
    kind(f"log of the gate Given {local}", rotate, Q, SPEC, gate=gates.Given(log))
    kind(f"theta {local}", lrpe_rotate_1d, Q.transpose(1, 2), learned[:, :8])
    kind(f"inv_freq {local}", rotate, Q, SPEC.at(inv_freq=learned[:, :6]))
    kind(f"cu_seqlens {local}", positions.packed, of)
    kind(f"attention_mask {local}", positions.left_padded, ids)
    kind(f"positions {local}", positions.explicit, positions.per_row(of), 5)
    kind(f"positions {local}", positions.shard, positions.multi_axis(ids), 0, 1)
    kind(f"positions {local}", positions.concatenate, [of])
    kind(f"lengths {local}", BY_LENGTH.at, seq_len=of[:3], of="seq_len")
    kind(f"positions {local}", rerotate, Q, SPEC, SPEC, of, 0)
    kind(f"new_positions {local}", rerotate, Q, SPEC, SPEC, 0, of)
    text = f"position_ids {local}"
    kind(text, apply_rotary_pos_emb, Q, None, *tables, position_ids=of)


def test_a_process_outside_the_mesh() -> None:
    with rank(3):
        x = given_whole(Q, Q, DeviceMesh("cpu", [0, 1]), WHOLE)
        with refused(ValueError, "[rotate] x must be on a device mesh that contains this process."):
            rotate(x, SPEC)


def test_a_local_weight_with_a_tangent() -> None:
    """DTensors have no tangents, so that of the result would be lost."""
    weight, text = noise(16), "[rotate] weight of RMSNorm must not have a tangent because x is a"
    with rank(1) as mesh, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, weight)
        with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
            rotate(place(Q, mesh, Shard(1)), SPEC, act=RMSNorm(dual))
