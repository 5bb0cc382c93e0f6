"""Calls on DTensors, with real collectives; tests/torch_modes/test_dtensor.py tests all placements without them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tightrope import RopeSpec
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_qk
from tightrope.gates import Exp, Slope

from .harness import Group, scenario

Tensors = Mapping[str, Any]
SPEC = RopeSpec(16)
ROWS, HEADS, TOKENS = 4, 4, 10
#: The dimension of each axis of q and k.
BHSD = {"row": 0, "head": 1, "token": 2}
PER_HEAD = {"head": 0}


def learned(t: Tensors) -> Any:
    """Rotate with norms, gates and frequencies that learn."""
    act, gate = (RMSNorm(t["w"]), RMSNorm(t["v"])), (Exp(t["g"]), Slope(t["s"]))
    return rotate_qk(t["q"], t["k"], SPEC.at(100, inv_freq=t["theta"]), act=act, gate=gate)


def tensors() -> dict[str, tuple[torch.Tensor, Mapping[str, int]]]:
    """Return the tensors of the call, the same in all processes, and the axes of their dimensions."""
    xs = torch.randn(2, ROWS, HEADS, TOKENS, 16, dtype=torch.float64)
    learn = torch.rand(4, HEADS, 16, dtype=torch.float64) / 10
    return {
        "q": (xs[0], BHSD),
        "k": (xs[1], BHSD),
        "w": (learn[0], PER_HEAD),
        "v": (learn[1, 0], {}),
        "g": (learn[2], PER_HEAD),
        "s": (learn[3, 0], {}),
        "theta": (torch.rand(HEADS, 8, dtype=torch.float64), PER_HEAD),
    }


@scenario
def dtensors(group: Group) -> None:
    """Results and gradients along each axis, with learned tensors replicated and sharded."""
    given = tensors()
    leaves = {name: x.clone().requires_grad_() for name, (x, _) in given.items()}
    wanted = learned(leaves)
    sum(y.sin().sum() for y in wanted).backward()
    for axis, whole in itertools.product(BHSD, (True, False)):
        shards = {}
        for name, (x, dims) in given.items():
            replicated = axis not in dims or (whole and name not in "qk")
            own = Replicate() if replicated else Shard(dims[axis])
            shards[name] = distribute_tensor(x, group.mesh, [own]).requires_grad_()
        found = learned(shards)
        sum(y.to_local().sin().sum() for y in found).backward()
        for got, want in zip(found, wanted, strict=True):
            assert got.placements == (Shard(BHSD[axis]),)
            assert torch.equal(got.full_tensor(), want)
        for name, x in shards.items():
            assert x.grad.placements == x.placements, name
            got, want = x.grad.full_tensor(), leaves[name].grad
            # Gradients that processes share are sums, in another order than on one process.
            near = torch.allclose(got, want, rtol=0, atol=1e-12 * float(want.abs().max()))
            assert torch.equal(got, want) if name in "qk" else near, name


@scenario
def a_collective_that_still_runs(group: Group) -> None:
    """A DTensor whose shards are still on their way is waited for."""
    x = torch.randn(ROWS, HEADS, TOKENS, 16)
    wanted = rotate(x, SPEC, 5)
    for learns in (False, True):
        sharded = distribute_tensor(x, group.mesh, [Shard(1)]).requires_grad_(learns)
        later = sharded.redistribute(placements=[Shard(2)], async_op=True)
        assert torch.equal(rotate(later, SPEC, 5).full_tensor(), wanted)
