"""`lrpe_rotate_1d`: an act and a rotation by θ for every shape of θ, dtype and offset; gradients; errors."""

import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck

from tests.support.helpers import noise
from tests.support.matrix import DTYPES
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.activations import ACTS, RMSNorm
from tightrope.functional import lrpe_rotate_1d, lrpe_rotate_1d_, rotate

ROWS, TOKENS, HEADS, WIDTH = 2, 5, 3, 12
PAIRS = WIDTH // 2

#: Every act by name, with its dim.
CALLS: list[tuple[str, int | None]] = [
    *((name, None) for name in ACTS if name not in ("softmax", "rms_norm")),
    ("softmax", -1),
    ("softmax", 1),
]
# For tests of shapes and strides: no act, one elementwise act, and softmax over either dimension.
some_acts = pytest.mark.parametrize(
    "act, dim", [("none", None), ("silu", None), ("softmax", -1), ("softmax", 1)]
)

#: Name -> shape of θ, theta_axis.
THETAS: dict[str, tuple[tuple[int, ...], str]] = {
    "(H, D/2)": ((HEADS, PAIRS), "auto"),
    "(H, E)": ((HEADS, 4), "auto"),
    "(1, E)": ((1, 4), "auto"),
    "(D/2,)": ((PAIRS,), "auto"),
    "(E,)": ((4,), "auto"),
    "(E,), E = H": ((HEADS,), "pair"),
    "(H,)": ((HEADS,), "auto"),
    "(H, 1)": ((HEADS, 1), "auto"),
    "(H, 1) as E = 1": ((HEADS, 1), "pair"),
}
every_theta = pytest.mark.parametrize("kind", THETAS)


def angles(kind: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return noise(*THETAS[kind][0], seed=2).to(dtype)


def spread(theta: torch.Tensor, by_head: bool, pairs: int) -> torch.Tensor:
    """Expand θ to every pair, with zeros for pairs that do not rotate: (heads|1, pairs)."""
    if by_head:
        return theta.reshape(-1, 1).expand(-1, pairs)
    wide = theta.reshape(-1, theta.shape[-1])
    return torch.nn.functional.pad(wide, (0, pairs - wide.shape[1]))


# --- it is a rotation -----------------------------------------------------------------------------


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_it_rotates_by_theta(data: st.DataObject) -> None:
    """It has the bits of an act, then a rotation whose frequencies are θ, forward and backward.

    Generated sizes, slices, shapes of θ, offsets and dtypes, with and without heads.
    """
    draw = data.draw
    rows, tokens, heads = (
        draw(st.integers(1, 3), label=name) for name in ("rows", "tokens", "heads")
    )
    pairs = draw(st.integers(1, 6), label="pairs")
    start, after = draw(st.integers(0, 3), label="start"), draw(st.integers(0, 3), label="after")
    width = start + 2 * pairs + after
    headless = heads == 1 and draw(st.booleans(), label="no heads")
    act, dim = draw(st.sampled_from(CALLS), label="act")
    dtype = draw(st.sampled_from(DTYPES), label="dtype")
    kind = draw(st.sampled_from(["(H, E)", "(1, E)", "(E,)", "(H,)", "(H, 1)"]), label="theta")
    short = draw(st.integers(1, pairs), label="E")
    shape = {
        "(H, E)": (heads, short),
        "(1, E)": (1, short),
        "(E,)": (short,),
        "(H,)": (heads,),
        "(H, 1)": (heads, 1),
    }[kind]
    by_head = kind in ("(H,)", "(H, 1)")
    by_pair = (kind == "(E,)" and short != heads) or (len(shape) == 2 and short > 1)
    meant = "head" if by_head else "pair"
    # Without heads, or if as many numbers would fit both, "auto" has rules of its own; see below.
    certain = not headless and (kind == "(H, 1)" or (by_pair and not by_head))
    axis = draw(st.sampled_from(["auto", meant] if certain else [meant]), label="axis")
    some = st.integers(-(2**40), 2**40)
    offset: int | list[int] = 0
    if dim != 1:
        offset = draw(st.one_of(some, st.lists(some, min_size=rows, max_size=rows)), label="offset")
    at = torch.tensor(offset) if isinstance(offset, list) else offset
    x = noise(rows, tokens, heads, width, dtype=dtype)
    grad = noise(rows, tokens, heads, width, seed=1, dtype=dtype)
    if headless:
        x, grad = x[:, :, 0], grad[:, :, 0]
    layout = "bsd" if headless else "bshd"
    theta = noise(*shape, seed=2)
    spec = RopeSpec(width, rotary_dim=2 * pairs, start=start)
    place = {"start": start, "rotary_dim": 2 * pairs if after else None}

    def lrpe(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return lrpe_rotate_1d(x, theta, at, act, dim, theta_axis=axis, **place)

    def wanted(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        options = {"inv_freq": spread(theta, by_head, pairs), "layout": layout}
        if dim == 1:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return rotate(x.to(wide).softmax(1), spec, **options).to(dtype)
        where = positions.per_row(at) if isinstance(at, torch.Tensor) else at
        return rotate(x, spec, where, act=act, **options)

    found = []
    for function in (lrpe, wanted):
        leaves = x.clone().requires_grad_(), theta.clone().requires_grad_()
        y = function(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, grad)])
    assert_same_bits(*found)
    if dim != 1:
        inside = x.clone()
        assert lrpe_rotate_1d_(inside, theta, at, act, dim, theta_axis=axis, **place) is inside
        assert_same_bits(inside, found[0][0].detach())


@pytest.mark.filterwarnings("ignore:.theta. frequencies should be float32")
@every_theta
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_theta_is_the_number_that_it_is(kind: str, dtype: torch.dtype) -> None:
    x, theta = noise(ROWS, TOKENS, HEADS, WIDTH), angles(kind, dtype)
    call = {"act": "silu", "theta_axis": THETAS[kind][1]}
    narrow, wide = theta.clone().requires_grad_(), theta.double().requires_grad_()
    one, other = lrpe_rotate_1d(x, narrow, 7, **call), lrpe_rotate_1d(x, wide, 7, **call)
    assert_same_bits(one, other)
    grads = [
        torch.autograd.grad(y.square()[0].sum(), t)[0] for y, t in ((one, narrow), (other, wide))
    ]
    # The gradient is rounded once, after all sums.
    assert_same_bits(grads[0], grads[1].to(dtype))


# --- shapes ---------------------------------------------------------------------------------------


@some_acts
def test_without_heads(act: str, dim: int | None) -> None:
    x, theta = noise(2, 5, 12), noise(4, seed=1)
    got = lrpe_rotate_1d(x, theta, act=act, dim=dim)
    for same in (theta, theta[None]):
        assert_same_bits(lrpe_rotate_1d(x[:, :, None], same, act=act, dim=dim)[:, :, 0], got)
    every = lrpe_rotate_1d(x, theta[:1], act=act, dim=dim, theta_axis="head")
    assert_same_bits(lrpe_rotate_1d(x, theta[:1].expand(6), act=act, dim=dim), every)
    first = lrpe_rotate_1d(x, theta[:1], act=act, dim=dim)
    assert_same_bits(lrpe_rotate_1d(x, theta[:1, None], act=act, dim=dim), first)
    assert not torch.equal(first, every)


@some_acts
@pytest.mark.parametrize(
    "shape", [(0, 5, 3, 12), (2, 0, 3, 12), (2, 5, 0, 12), (2, 1, 1, 12), (1, 5, 3, 2), (0, 0, 12)]
)
def test_empty_and_single(shape: tuple[int, ...], act: str, dim: int | None) -> None:
    x = noise(*shape).requires_grad_()
    theta = noise(shape[-1] // 2, seed=1).requires_grad_()
    y = lrpe_rotate_1d(x, theta, act=act, dim=dim, theta_axis="pair")
    assert y.shape == x.shape
    dx, dtheta = torch.autograd.grad(y.square().sum(), (x, theta))
    assert dx.shape == x.shape
    assert dtheta.isfinite().all()


# --- positions ------------------------------------------------------------------------------------


def test_packed_sequences_begin_anew() -> None:
    x, theta = noise(1, 7, 3, 12), noise(3, 5, seed=1)
    packed = positions.packed(torch.tensor([0, 3, 7]))
    got = lrpe_rotate_1d(x, theta, packed, "silu")
    parts = [lrpe_rotate_1d(part, theta, 0, "silu") for part in (x[:, :3], x[:, 3:])]
    assert_same_bits(got, torch.cat(parts, 1))


def test_an_offset_that_is_a_fraction_has_a_gradient() -> None:
    x, theta = noise(2, 3, 2, 6), noise(2, 3, seed=1)
    at = torch.tensor([0.25, -7.5], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda at: lrpe_rotate_1d(x, theta, at, "silu"), at)


# --- the compiler ---------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("act, dim", [("none", None), ("silu", None), ("softmax", -1)])
def test_one_graph_for_all_offsets(act: str, dim: int | None) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lrpe_rotate_1d, backend=counter, fullgraph=True, dynamic=True)
    theta = noise(3, 4, seed=1).requires_grad_()
    for offset in (5, 6, 700, 2**40, 3):
        x = noise(2, 4, 3, 12)
        assert_same_bits(
            call(x, theta, offset, act, dim), lrpe_rotate_1d(x, theta, offset, act, dim)
        )
        # The same with a gradient.
        y = call(x.requires_grad_(), theta, offset, act, dim)
        wanted = lrpe_rotate_1d(x, theta, offset, act, dim)
        for got, other in zip(
            *(torch.autograd.grad(z.square()[0].sum(), (x, theta)) for z in (y, wanted)),
            strict=True,
        ):
            assert_near(got / offset, other / offset, "float64 ways")
    # One graph for x without a gradient, one for x with a gradient.
    assert counter.frame_count <= 2
    torch.compiler.reset()


# --- errors ---------------------------------------------------------------------------------------

X = torch.zeros(2, 5, 4, 16)


def test_a_theta_that_could_be_both_must_be_said() -> None:
    x, theta = noise(2, 5, 6, 12), noise(6, seed=1)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "[lrpe_rotate_1d] theta may mean one angle for each of 6 heads or of 6 pairs; pass "
            "theta_axis='head' or theta_axis='pair' (x: float64[2, 5, 6, 12], theta: float64[6])."
        ),
    ):
        lrpe_rotate_1d(x, theta)
    by_head = lrpe_rotate_1d(x, theta, theta_axis="head")
    by_pair = lrpe_rotate_1d(x, theta, theta_axis="pair")
    assert_same_bits(by_head, lrpe_rotate_1d(x, theta[:, None].expand(6, 6)))
    assert_same_bits(by_pair, lrpe_rotate_1d(x, theta[None].expand(6, 6)))
    # With one head and one pair, both meanings agree.
    one = noise(2, 5, 1, 2)
    assert_same_bits(lrpe_rotate_1d(one, theta[:1]), lrpe_rotate_1d(one, theta[:1, None]))


def test_as_many_numbers_as_heads_are_one_for_each() -> None:
    x, theta = noise(2, 5, 3, 12), noise(3, seed=1)
    by_head = lrpe_rotate_1d(x, theta)
    assert_same_bits(by_head, lrpe_rotate_1d(x, theta, theta_axis="head"))
    assert_same_bits(by_head, lrpe_rotate_1d(x, theta[:, None]))
    by_pair = lrpe_rotate_1d(x, theta, theta_axis="pair")
    assert_same_bits(by_pair, lrpe_rotate_1d(x, theta[None]))
    assert not torch.equal(by_head, by_pair)


THETA = (
    "theta must have shape (8,), (4, 8), (1, 8), (4,) or (4, 1); fewer than 8 pairs are accepted"
)
OVER = "dim must be -1 (the channels of a head) or 1 (the tokens) for act 'softmax' but got"
WHOLE = "offset must be 0 for a softmax over the tokens, which needs all of them in one call"
OF_ROWS = "offset must be an int or have shape (2,), one for each row"
PAIR = "act must be a single value for one tensor but got a pair"


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


# The beginning of a sentence -> what is wrong in a call that is otherwise valid, or several such.
TYPES: dict[str, Any] = {
    "x must be a tensor but got 3": {"x": 3},
    "x must be float32, float64, bfloat16 or float16 but got int64": {"x": X.long()},
    "start must be an int but got 1.5": {"start": 1.5},
    "theta must be a floating tensor but got 0.5": {"theta": 0.5},
    "theta must be a floating tensor but got int64[8]": {"theta": ints(8)},
    "act must be None, one of none, relu,": {"act": 3},
    PAIR: [{"act": ("relu", "relu")}, {"act": ("softmax", "relu"), "dim": 1}],
    "dim must be an int but got 1.0": {"act": "softmax", "dim": 1.0},
    "dim must be an int but got True": {"act": "softmax", "dim": True},
    "offset must be an int but got 1.5": {"offset": 1.5},
    "offset must be an int but got True": {"offset": True},
    "offset must be an int but got None": {"offset": None},
    "offset must be int32, int64, float32 or float64 (offset: bool[2])": {"offset": ints(2).bool()},
}
VALUES: dict[str, Any] = {
    "x must have shape (batch, tokens, heads, channels) or (batch, tokens, channels) "
    "(x: float32[5, 16])": {"x": torch.zeros(5, 16)},
    "rotary_dim must be even but got 15": {"x": X[..., :15]},
    "rotary_dim must be even but got 5": {"rotary_dim": 5},
    "channels [start, start + rotary_dim) must lie in [0, 16) but got [2, 18)": {
        "start": 2,
        "rotary_dim": 16,
    },
    "theta is on meta but x is on cpu": {"theta": torch.zeros(8, device="meta")},
    f"{THETA} too (x: float32[2, 5, 4, 16], theta: float32[9])": {"theta": torch.zeros(9)},
    THETA: [{"theta": torch.zeros(shape)} for shape in ((3, 8), (1, 4, 8), ())],
    "theta must have shape (4,) or (4, 1) for theta_axis='head'": {
        "theta": torch.zeros(4, 8),
        "theta_axis": "head",
    },
    "theta must have shape (8,), (4, 8) or (1, 8); fewer than 8 pairs are accepted too": {
        "theta": torch.zeros(9),
        "theta_axis": "pair",
    },
    "theta_axis must be one of auto, head, pair but got 'heads'": {"theta_axis": "heads"},
    "act must be one of none, relu,": {"act": "swish"},
    "dim must be None for act 'relu' but got -1": {"act": "relu", "dim": -1},
    "dim must be None for act 'none' but got 1": {"dim": 1},
    **{f"{OVER} {dim}": {"act": "softmax", "dim": dim} for dim in (None, 0, 2, 4, -2)},
    f"{WHOLE}, but got 3": {"act": "softmax", "dim": 1, "offset": 3},
    WHOLE: [
        {"act": "softmax", "dim": -3, "offset": ints(2)},
        {"act": "softmax", "dim": 1, "offset": positions.packed(torch.tensor([0, 2, 5]))},
    ],
    "offset must have 1 axis but got 2 (offset: int64[2, 1, 5])": {
        "offset": positions.multi_axis(ints(2, 5))
    },
    "an offset must fit in 64 bits but got": {"offset": 2**63},
    OF_ROWS: [{"offset": ints(3)}, {"offset": torch.tensor(3)}],
}


@pytest.mark.parametrize(
    "error, message, change",
    [
        pytest.param(error, message, change, id=message)
        for error, table in ((TypeError, TYPES), (ValueError, VALUES))
        for message, changes in table.items()
        for change in (changes if isinstance(changes, list) else [changes])
    ],
)
def test_what_is_refused(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": X, "theta": torch.zeros(8)} | change
    for call in (lrpe_rotate_1d, lrpe_rotate_1d_):
        with pytest.raises(error, match=re.escape(message)) as caught:
            call(**arguments)
        assert str(caught.value).startswith(f"[{call.__name__}]")
    assert not X.any()


def test_a_softmax_over_the_tokens_is_refused_in_place() -> None:
    x = noise(2, 5, 4, 16)
    before = x.clone()
    with pytest.raises(
        ValueError,
        match=re.escape(
            "[lrpe_rotate_1d_] a softmax over the tokens cannot be computed in place; call lrpe_rotate_1d"
        ),
    ):
        lrpe_rotate_1d_(x, torch.zeros(8), act="softmax", dim=1)
    assert torch.equal(x, before)


@pytest.mark.parametrize("call", [lrpe_rotate_1d, lrpe_rotate_1d_])
def test_16_bit_angles_warn_at_the_line_of_the_caller(call: Any) -> None:
    theta, x = noise(8, dtype=torch.bfloat16), noise(2, 5, 4, 16)
    match = r"^\[theta\] frequencies .* are bfloat16, .* pass theta\.float\(\) if"
    with pytest.warns(UserWarning, match=match) as caught:
        call(x, theta)
    assert [warning.filename for warning in caught] == [__file__]
    call(x, theta.float())


def test_a_norm_is_an_act_too() -> None:
    x, weight, theta = noise(2, 5, 3, 12), noise(12, seed=1), noise(3, 5, seed=2)
    got = lrpe_rotate_1d(x, theta, 7, RMSNorm(weight))
    normal = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert_near(got, lrpe_rotate_1d(normal, theta, 7), "float64 ways")


# --- memory ---------------------------------------------------------------------------------------


def kept(x: torch.Tensor, theta: torch.Tensor, act: str, dim: int | None) -> tuple[bool, int]:
    """Return True if autograd saves x, and the number of tensors of the size of x that it saves."""
    found: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        lrpe_rotate_1d(x, theta, 3, act, dim)
    big = {t.data_ptr() for t in found if t.numel() == x.numel()}
    return x.data_ptr() in big, len(big)


@pytest.mark.parametrize("act, dim", [call for call in CALLS if call != ("softmax", 1)])
def test_x_is_kept_only_where_a_slope_needs_it(act: str, dim: int | None) -> None:
    x, theta = noise(2, 50, 3, 12).requires_grad_(), noise(3, 4, seed=1)
    needed = act != "none"
    assert kept(x, theta, act, dim) == (needed, int(needed))
    # The gradient with respect to θ needs the result, not x.
    assert kept(x, theta.requires_grad_(), act, dim) == (needed, 1 + needed)
