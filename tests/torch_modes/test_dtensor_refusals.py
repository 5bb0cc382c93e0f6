"""Calls on DTensors that are refused: rows of refused_calls.jsonl, which place tensors by `put` and `whole`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support import dtensors
from tests.support.dtensors import SPEC, Q, cos_sin, given_whole, place, rank
from tests.support.helpers import noise, refused
from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK
from tightrope.functional import rotate

WHOLE, PARTIAL, ROWS, HEADS, TOKENS = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
BY_LENGTH = RopeSpec(16, scaling=DynamicNTK(4.0, 4))
OF_RANK_1 = positions.shard(None, 1, 4, tokens=52)
TABLES = tuple(cos_sin(13, 16).values())
OF_16_TOKENS = positions.shard(None, 1, 4, tokens=16)


_meshes: list[DeviceMesh] = []


@pytest.fixture
def mesh() -> Iterator[None]:
    """A mesh of (2, 2), of which rank 1 is played."""
    with rank(1, 2, 2) as made:
        _meshes.append(made)
        yield
        _meshes.clear()


def put(x: torch.Tensor, *own: Any) -> Any:
    return place(x, _meshes[0], *own)


def whole(local: torch.Tensor, x: torch.Tensor, *own: Any) -> Any:
    return given_whole(local, x, _meshes[0], *own)


def norm(weight: torch.Tensor) -> Any:
    return rotate(put(Q, TOKENS, HEADS), SPEC, act=RMSNorm(weight))


# DTensors of specifications that no public function makes.
def strided() -> Any:
    q, places = put(Q, TOKENS, HEADS), (_StridedShard(2, split_factor=2), HEADS)
    spec = type(q._spec)(_meshes[0], places, tensor_meta=q._spec.tensor_meta)
    return DTensor(q.to_local(), spec, requires_grad=False)


def reordered() -> Any:
    of = put(Q, TOKENS, HEADS)._spec
    meta = type(of.tensor_meta)(torch.Size((3, 6, 12, 16)), (1152, 192, 16, 1), Q.dtype)
    order = (ShardOrderEntry(2, (1, 0)),)
    spec = type(of)(_meshes[0], (TOKENS, TOKENS), tensor_meta=meta, shard_order=order)
    return DTensor(noise(3, 6, 3, 16), spec, requires_grad=False)


# Beside local tensors a kernel would read memory that DTensors do not have.
test_calls = pytest.mark.usefixtures("mesh")(
    refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, vars(dtensors) | globals())
)


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
