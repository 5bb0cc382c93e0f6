"""vmap over x, positions and learned frequencies, also of calls in place and of two levels."""

from functools import partial

import pytest
import torch

from tests.support import helpers
from tightrope import RopeSpec
from tightrope.functional import rotate

noise = partial(helpers.noise, dtype=torch.float32)
SPEC = RopeSpec(8, rotary_dim=6, start=1)


@pytest.mark.parametrize(
    "layout, shape",
    {
        "bhsd": (2, 3, 5, 8),
        "bshd": (2, 5, 3, 8),
        "sbhd": (5, 2, 3, 8),
        "thd": (5, 3, 8),
        "bsd": (2, 5, 8),
        "sd": (5, 8),
    }.items(),
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_over_x(layout: str, shape: tuple[int, ...], dim: int) -> None:
    stack = noise(4, *shape).movedim(0, dim)
    got = torch.vmap(lambda x: rotate(x, SPEC, 3, layout=layout), in_dims=dim)(stack)
    parts = [rotate(x, SPEC, 3, layout=layout) for x in stack.unbind(dim)]
    assert torch.equal(got, torch.stack(parts))


def test_vmap_over_positions_and_both() -> None:
    x, p = noise(4, 2, 3, 5, 8), torch.arange(20).reshape(4, 5)
    rows = torch.arange(40).reshape(4, 2, 5)
    for ids in (p, rows, rows.double() / 3):
        both = torch.vmap(lambda x, p: rotate(x, SPEC, p))(x, ids)
        assert torch.equal(both, torch.stack([rotate(a, SPEC, b) for a, b in zip(x, ids)]))
        only = torch.vmap(lambda p: rotate(x[0], SPEC, p))(ids)
        assert torch.equal(only, torch.stack([rotate(x[0], SPEC, b) for b in ids]))


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (1, 1), (-1, 2)])
def test_vmap_over_learned_frequencies(dims: tuple[int | None, int | None]) -> None:
    x, theta = noise(4, 2, 3, 5, 8), noise(4, 3, 3, dtype=torch.float64)
    both = tuple(t[0] if dim is None else t.movedim(0, dim) for t, dim in zip((x, theta), dims))
    got = torch.vmap(lambda x, t: rotate(x, SPEC, 3, inv_freq=t), in_dims=dims)(*both)
    each = [
        rotate(x[0 if dims[0] is None else i], SPEC, 3, inv_freq=theta[0 if dims[1] is None else i])
        for i in range(4)
    ]
    assert torch.equal(got, torch.stack(each))


def test_vmap_of_two_levels_and_of_gradients() -> None:
    x = noise(2, 3, 2, 5, 8)
    got = torch.vmap(torch.vmap(lambda x: rotate(x, SPEC, 3, layout="bsd")))(x)
    assert torch.equal(got, rotate(x.flatten(0, 1), SPEC, 3).reshape(x.shape))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, SPEC, 3, layout="bsd").pow(3).sum()

    each = torch.vmap(torch.func.grad(loss))(x[0])
    whole = torch.func.grad(lambda x: rotate(x, SPEC, 3).pow(3).sum())(x[0])
    torch.testing.assert_close(each, whole)
