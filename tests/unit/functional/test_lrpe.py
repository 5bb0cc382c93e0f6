"""`lrpe_rotate_1d`: an act and a rotation by θ for every shape of θ, dtype and offset.

tests/support/functions.py has calls of it that obey the laws of every call.
"""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.support.helpers import noise
from tests.support.matrix import DTYPES
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.activations import ACTS, RMSNorm
from tightrope.functional import lrpe_rotate_1d, rotate

#: Every act, with its dim.
CALLS: list[tuple[Any, int | None]] = [
    *((name, None) for name in ACTS if name not in ("softmax", "rms_norm")),
    (RMSNorm(), None),
    ("softmax", -1),
    ("softmax", 1),
]


def spread(theta: torch.Tensor, by_head: bool, pairs: int) -> torch.Tensor:
    """Expand θ to every pair, with zeros for pairs that do not rotate: (heads|1, pairs)."""
    if by_head:
        return theta.reshape(-1, 1).expand(-1, pairs)
    wide = theta.reshape(-1, theta.shape[-1])
    return torch.nn.functional.pad(wide, (0, pairs - wide.shape[1]))


@pytest.mark.filterwarnings("ignore:.theta. frequencies should be float32")
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_it_rotates_by_theta(data: st.DataObject) -> None:
    """It has the bits of an act, then a rotation whose frequencies are θ, forward and backward.

    Generated sizes, slices, shapes of θ, offsets and dtypes, with and without heads. A narrow θ is the number that
    it is, and its gradient is rounded once, after all sums.
    """
    draw = data.draw
    rows, tokens, heads = (draw(st.integers(0, 3), label=name) for name in ("b", "s", "h"))
    pairs, headless = draw(st.integers(1, 6)), heads == 1 and draw(st.booleans())
    start, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    width, short = start + 2 * pairs + after, draw(st.integers(1, pairs))
    act, dim = draw(st.sampled_from(CALLS), label="act")
    dtype, held = draw(st.sampled_from(DTYPES), label="dtype"), draw(st.sampled_from(DTYPES))
    shapes = [(heads, short), (1, short), (short,), (heads,), (heads, 1)]
    number = draw(st.integers(0, 4) if heads else st.integers(1, 2), label="theta")
    theta, by_head = noise(*shapes[number], seed=2, dtype=held), number > 2
    meant = "head" if by_head else "pair"
    # Without heads, or if as many numbers would fit both, "auto" has rules of its own; see below.
    by_pair = (number < 2 and short > 1) or (number == 2 and short != heads)
    certain = not headless and (number == 4 or (by_pair and not by_head))
    axis = draw(st.sampled_from(["auto", meant] if certain else [meant]), label="axis")
    some, at = st.integers(-(2**40), 2**40), 0
    if dim != 1:
        several = st.lists(some, min_size=rows, max_size=rows).map(torch.LongTensor)
        at = draw(st.one_of(some, several), label="offset")
    shape = (rows, tokens, width) if headless else (rows, tokens, heads, width)
    x, grad = (noise(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    spec = RopeSpec(width, rotary_dim=2 * pairs, start=start)
    place = {"start": start, "rotary_dim": 2 * pairs if after else None}

    def lrpe(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return lrpe_rotate_1d(x, theta, at, act, dim, theta_axis=axis, **place)

    def wanted(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        options = {"layout": "bsd" if headless else "bshd"}
        omega = spread(theta, by_head, pairs)
        if dim == 1:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return rotate(x.to(wide).softmax(1), spec.at(inv_freq=omega), **options).to(dtype)
        where = positions.per_row(at) if isinstance(at, torch.Tensor) else at
        return rotate(x, spec.at(where, inv_freq=omega), act=act, **options)

    found = []
    for function, of in ((lrpe, theta.clone()), (wanted, theta.double())):
        leaves = x.clone().requires_grad_(), of.requires_grad_()
        y = function(*leaves)
        by_x, by_theta = torch.autograd.grad(y, leaves, grad)
        found.append([y, by_x, by_theta.to(held)])
    assert_same_bits(*found)


@pytest.mark.parametrize("act, dim", [("silu", None), ("softmax", -1), ("softmax", 1)])
def test_without_heads(act: str, dim: int | None) -> None:
    """As with one head; a single number is that of the first pair."""
    x, theta = noise(2, 5, 12), noise(4, seed=1)
    with_heads = lrpe_rotate_1d(x[:, :, None], theta, 0, act, dim)
    assert_same_bits(lrpe_rotate_1d(x, theta, 0, act, dim), with_heads[:, :, 0])
    theta = theta[:1]
    every, first = lrpe_rotate_1d(x, theta, theta_axis="head"), lrpe_rotate_1d(x, theta)
    assert_same_bits(lrpe_rotate_1d(x, theta.expand(6)), every)
    assert_same_bits(lrpe_rotate_1d(x, theta[:, None]), first)
    assert not torch.equal(first, every)


def test_theta_of_as_many_numbers_as_heads() -> None:
    """One for each head; where there are as many pairs, it must be said (test_refusals.py)."""
    x, theta = noise(2, 5, 3, 8), noise(3, seed=1)
    by_head, by_pair = (lrpe_rotate_1d(x, theta, theta_axis=axis) for axis in ("head", "pair"))
    assert not torch.equal(by_head, by_pair)
    assert_same_bits(by_head, lrpe_rotate_1d(x, theta))
    # With one head and one pair, both meanings agree.
    one = noise(2, 5, 1, 2)
    assert_same_bits(lrpe_rotate_1d(one, theta[:1]), lrpe_rotate_1d(one, theta[:1, None]))


def test_packed_sequences_begin_anew() -> None:
    x, theta = noise(1, 7, 3, 12, dtype=torch.float32), noise(3, 5, seed=1)
    packed = positions.packed(torch.tensor([0, 3, 7]))
    parts = [lrpe_rotate_1d(part, theta, 0, "silu") for part in (x[:, :3], x[:, 3:])]
    assert_same_bits(lrpe_rotate_1d(x, theta, packed, "silu"), torch.cat(parts, 1))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("act, dim", [call for call in CALLS if call != ("softmax", 1)], ids=str)
def test_x_is_kept_only_where_a_slope_needs_it(act: Any, dim: int | None, learns: bool) -> None:
    """The gradient with respect to θ needs the result, not x."""
    x = noise(2, 50, 3, 12, dtype=torch.float32).requires_grad_()
    theta = noise(3, 4, seed=1).requires_grad_(learns)
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        lrpe_rotate_1d(x, theta, 3, act, dim)
    big = {t.data_ptr() for t in found if t.numel() == x.numel()}
    needed = act != "none"
    assert (x.data_ptr() in big, len(big)) == (needed, learns + needed)
