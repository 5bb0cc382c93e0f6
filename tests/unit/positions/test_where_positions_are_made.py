"""Positions made in compiled functions, on other devices and of fake tensors; nothing reads from a device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.functional import rotate
from tightrope.positions import (
    Positions,
    concatenate,
    explicit,
    grid,
    left_padded,
    mrope,
    mrope_next,
    packed,
    per_row,
    shard,
    text,
)


class Inputs(NamedTuple):
    ends: torch.Tensor
    mask: torch.Tensor


MADE: dict[str, Callable[[Inputs], Positions]] = {
    "per_row": lambda g: per_row(g.ends[1:]),
    "packed": lambda g: packed(g.ends, total=g.mask.shape[1]),
    "packed with an offset": lambda g: packed(g.ends, 4, total=g.mask.shape[1]),
    "packed with offsets": lambda g: packed(g.ends, g.ends[1:], total=g.mask.shape[1]),
    "left_padded": lambda g: left_padded(g.mask),
    "text": lambda g: text(g.mask.to(torch.int64), axes=3),
    "text offset": lambda g: text(3, axes=3, device=g.ends.device),
    "grid": lambda g: grid(2, g.mask.shape[1] // 2, device=g.ends.device),
    "normalised grid": lambda g: grid(2, 4, span=(-1, 1), device=g.ends.device),
    "merged grid": lambda g: grid(2, 4, merge=2, device=g.ends.device),
    "mrope": lambda g: mrope([2, (1, 2, 2), 2], device=g.ends.device),
    "mrope with time steps": lambda g: mrope([(2, 2, 2, 1.5)], device=g.ends.device),
    "concatenate": lambda g: concatenate([g.ends, g.ends, g.mask[0].to(torch.int32)[:2]]),
    "explicit": lambda g: explicit(per_row(g.ends[1:]), g.mask.shape[1]),
    "shard": lambda g: shard(per_row(g.ends[1:]), 1, 2, tokens=2 * g.mask.shape[1]),
    "zigzag shard": lambda g: shard(
        per_row(g.ends[1:]), 1, 2, kind="zigzag", tokens=2 * g.mask.shape[1]
    ),
    "packed zigzag shard": lambda g: shard(
        packed(g.ends, total=g.mask.shape[1]), 1, 2, kind="zigzag", cu_seqlens=g.ends
    ),
}


def example_inputs() -> Inputs:
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8], dtype=torch.bool)
    return Inputs(torch.tensor([0, 4, 8], dtype=torch.int32), mask)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MADE)
def test_made_in_a_compiled_function(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    make, g = MADE[name], example_inputs()
    where = make(g)
    axes = where.axes
    spec = RopeSpec(12, axes=None if axes == 1 else Axes.blocks((6 // axes,) * axes))
    tokens = 8 if where.ids is None or where.add_index else where.ids.shape[2]
    x = torch.randn(2, 3, tokens, 12)

    def function(x: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, make(Inputs(ends, mask)))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same_bits(compiled(x, *g), function(x, *g))


@pytest.mark.parametrize("steps", [(1.5, 0.29, 0.7), (2, 3, 5)], ids=["floats", "ints"])
def test_a_time_step_may_be_an_argument_of_a_compiled_function(steps: Sequence[float]) -> None:
    """From its second value on, the compiler passes a symbol in place of the number."""
    torch._dynamo.reset()

    def ids(x: torch.Tensor, step: float) -> torch.Tensor:
        return x + mrope([(101, 1, 1, step), 1]).ids + mrope_next([(101, 1, 1, step)])

    compiled = torch.compile(ids, fullgraph=True, backend="aot_eager")
    x = torch.zeros(1, dtype=torch.int64)
    for step in steps:
        assert torch.equal(compiled(x, step), ids(x, step))


@pytest.mark.parametrize("name", MADE)
def test_made_on_the_meta_device_and_of_fake_tensors(name: str) -> None:
    """Meta tensors stand for those of a device: reading one is an error."""
    make, g = MADE[name], example_inputs()
    wanted = make(g)
    meta = make(Inputs(*(tensor.to("meta") for tensor in g)))
    assert meta.ids.device.type == "meta"
    with FakeTensorMode() as mode:
        fake = make(Inputs(*map(mode.from_tensor, g)))
    for ids in (meta.ids, fake.ids):
        assert (ids.shape, ids.dtype) == (wanted.ids.shape, wanted.ids.dtype)
    assert (meta.offset, meta.add_index) == (wanted.offset, wanted.add_index)
