"""One rank of a mesh after the other in this process, and tensors to divide among them.

A fake process group plays the ranks. Its collectives do nothing, so a gradient that several ranks share is left
as each rank's contribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

# The only process group that plays any rank in one process; no public module has it.
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: TID251

from tests.support.helpers import noise
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec

#: Dimension of each axis of a tensor.
Dims = Mapping[str, int]
#: The axis that each dimension of a mesh divides.
By = Sequence[str | None]

RANKS = 4

# Sizes that four ranks do not divide: 3 rows, 13 tokens, 6 heads of q and 3 of k.
BHSD = {"row": 0, "head": 1, "token": 2}
Q, K = noise(3, 6, 13, 16), noise(3, 3, 13, 16, seed=1)
SPEC = RopeSpec(16, rotary_dim=12, start=2)
IDS = torch.randint(0, 100_000, (3, 13), generator=torch.Generator().manual_seed(2))

_meshes = itertools.count()


@contextmanager
def group(number: int) -> Iterator[None]:
    """Play one rank."""
    torch.distributed.init_process_group("fake", rank=number, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def rank(number: int, *shape: int) -> Iterator[Any]:
    """Play one rank of a mesh, by default one of one dimension.

    The names of its dimensions are new, because DTensor caches what it learned about equal meshes, and
    expects that a process keeps its rank.
    """
    shape = shape or (RANKS,)
    names = tuple(f"{name}{next(_meshes)}" for name in "ab"[: len(shape)])
    with group(number):
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


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


def place(x: torch.Tensor, mesh: Any, *placements: Any) -> Any:
    """Return a whole tensor as a DTensor, without communication."""
    return given_whole(share(x, mesh, placements).clone(), x, mesh, *placements)


def given_whole(local: torch.Tensor, whole: torch.Tensor, mesh: Any, *placements: Any) -> Any:
    """Return the DTensor of a local tensor, with the shape and the strides of a whole one."""
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def assert_parts(
    found: Iterable[Any], wanted: Iterable[torch.Tensor], mesh: Any, *placements: Any
) -> None:
    """Assert that DTensors hold this rank's parts of whole tensors, to the bit."""
    for one, whole in zip(found, wanted, strict=True):
        assert_same_bits(one.to_local(), share(whole, mesh, placements))


def cos_sin(*shape: int) -> dict[str, torch.Tensor]:
    angles = noise(*shape, seed=3)
    return {"cos": angles.cos(), "sin": angles.sin()}
