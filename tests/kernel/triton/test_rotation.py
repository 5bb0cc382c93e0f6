"""The Triton kernels against the oracle and the definition in float64.

They run under Triton's interpreter, or compiled where there is a GPU; see tests/support/triton/cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tests.support import oracle, pairwise
from tests.support.tolerances import Result, assert_near, assert_rotated, assert_same_bits, value
from tests.support.triton.cases import (
    AXES,
    DEVICE,
    HAS_GPU,
    INTERPRETED,
    Made,
    allowed,
    make,
    needs_triton,
    noise,
    phases,
    words,
)
from tests.support.triton.running import (
    PLAIN,
    check,
    operators,
    run,
)
from tightrope.activations import ACTS, RMS_NORM
from tightrope.backends.reference import compose
from tightrope.ops import gradients
from tightrope.ops.call import Call
from tightrope.ops.layouts import BY_CODE
from tightrope.ops.schema import (
    LOG,
    PHASES,
    SLOPE,
    Options,
    options_of,
)

pytestmark = [needs_triton, pytest.mark.usefixtures("few_programs")]

CASES = pairwise.covering(AXES, allowed)
# Cases per test: the overhead of a test exceeds the cost of a case.
GROUP = 12


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, len(CASES), GROUP))
def test_every_pair_of_values(first: int) -> None:
    for case in CASES[first : first + GROUP]:
        try:
            check(make(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, len(CASES), GROUP))
def test_every_pair_of_values_of_one_token(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program has one token then; the kernel is another one."""
    from tightrope.backends.triton import blocks

    monkeypatch.setattr(blocks, "PROGRAMS", 2)
    for case in CASES[first : first + GROUP : 2]:
        check(make({**case, "tokens": 1}))


def test_the_cases_cover_what_they_should() -> None:
    for name, values in AXES.items():
        assert {str(case[name]) for case in CASES} == {str(v) for v in values}
    for a, b in (("dtype", "act"), ("positions", "gate"), ("layout", "strides")):
        both = {(str(case[a]), str(case[b])) for case in CASES}
        wanted = len(AXES[a]) * len(AXES[b]) - 3 * ((a, b) == ("positions", "gate"))
        assert len(both) == wanted


# --- angles ---------------------------------------------------------------------------------------

FAR = [0, 1, 8191, 131_071, 1_048_575, 2**31 - 2, -5, -(2**31)]


def exact_words(base: float, rotary_dim: int) -> torch.Tensor:
    found = [oracle.phase(omega).word for omega in oracle.frequencies(base, rotary_dim)]
    return torch.tensor(found, device=DEVICE)[None, None, None]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", AXES["dtype"])
def test_angles_against_the_oracle(dtype: torch.dtype, interleaved: bool) -> None:
    """The same in 16 bits, which are rounded once; that takes many numbers to see."""
    heads = 2 if dtype in (torch.float32, torch.float64) else 32
    omegas = oracle.frequencies(10000.0, 64)
    options = Options(interleaved=interleaved, add_index=False).pack()
    for ids in (
        torch.tensor(FAR),
        torch.tensor([0.5, 1 / 3, -2.75, 1000.1, 65536.015625], dtype=torch.float64),
    ):
        x = noise(1, heads, len(ids), 64, seed=1).to(dtype).to(DEVICE)
        at = ids[None, None].to(DEVICE)
        (y,) = operators().rotate(x, None, exact_words(10000.0, 64), None, at, 0, options, 1.0)
        exact = oracle.rotate(x.cpu(), ids[None], omegas, interleaved=interleaved)
        lengths = oracle.pair_lengths(x.cpu(), 64, interleaved=interleaved)
        reach = float(ids.double().abs().max()) if dtype == torch.float64 else 0.0
        assert_rotated([Result(y.cpu(), exact, lengths, reach)])


def test_turns_count_for_fractions() -> None:
    """Frequencies of one turn per position or more are accurate at fractional positions."""
    omegas = [2 * oracle.MP.pi, 5 * oracle.MP.pi, oracle.MP.mpf(100)]
    phases = [oracle.phase(omega) for omega in omegas]
    word, turn = (
        torch.tensor([p[i] for p in phases], device=DEVICE)[None, None, None] for i in (0, 1)
    )
    ids = torch.tensor([0.5, 0.25, -7.125, 300.75], dtype=torch.float64)
    x = noise(1, 1, 4, 6, seed=1).float().to(DEVICE)
    (y,) = operators().rotate(
        x, None, word, turn, ids[None, None].to(DEVICE), 0, Options(add_index=False).pack(), 1.0
    )
    exact = oracle.rotate(x.cpu(), ids[None], omegas)
    assert_rotated([Result(y.cpu(), exact, oracle.pair_lengths(x.cpu(), 6))])


def test_nan_and_infinity_give_nan() -> None:
    x = torch.ones(1, 1, 4, 8, device=DEVICE)
    ids = torch.tensor([[[1.0, math.nan, math.inf, -1e30]]], device=DEVICE)
    (y,) = operators().rotate(
        x, None, words(1, 1, 1, 3), None, ids, 0, Options(add_index=False).pack(), 1.0
    )
    assert y[0, 0, 0].isfinite().all()
    assert y[0, 0, 1:, :6].isnan().all()
    assert (y[..., 6:] == 1).all()
    turns = torch.zeros_like(words(1, 1, 1, 3))
    turns[..., 1] = -(2**63)
    (y,) = operators().rotate(x, None, words(1, 1, 1, 3), turns, None, 0, Options().pack(), 1.0)
    assert y.isnan().any(2)[0, 0].tolist() == [False, True, False, False, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_phases_that_stand_for_nan_give_nan(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 4, 8, device=DEVICE)
    given = phases((2, 1, 4, 3), dtype)
    given[1, 0, 2, 1] = torch.iinfo(dtype).min
    for secondary in (None, words(1, 1, 3, 3)):
        options = Options(source=PHASES, add_index=secondary is not None).pack()
        (y,) = operators().rotate(x, None, given, secondary, None, 0, options, 1.0)
        assert y.isnan().nonzero().tolist() == [[1, h, 2, c] for h in range(3) for c in (1, 4)]


def test_rows_outside_a_table_become_nan() -> None:
    x = torch.ones(2, 3, 4, 8, device=DEVICE)
    table = torch.ones(1, 1, 5, 4, device=DEVICE)
    ids = torch.tensor([[[0, 4, 5, -1]]], device=DEVICE)
    options = Options(add_index=False, source=3).pack()
    (y,) = operators().rotate(x, None, table, table, ids, 0, options, 1.0)
    assert y[:, :, :2].isfinite().all()
    assert y[:, :, 2:].isnan().all()
    (y,) = operators().rotate(x, None, table[:, :, :0], table[:, :, :0], ids, 0, options, 1.0)
    assert y.isnan().all()


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", AXES["dtype"])
def test_the_same_row_has_the_same_bits(dtype: torch.dtype) -> None:
    """A row has the same bits in every call.

    The calls rotate it alone or in a batch, token by token, without k, in another layout, with
    other strides, in place or into `out`.
    """
    whole = make({**PLAIN, "dtype": dtype, "channels": (24, 4, 12), "positions": "offset"})
    want, want_k = run(whole)
    alone = operators().rotate(whole.q, None, *whole.arguments)
    assert_same_bits(alone[0], want)
    primary, secondary, _, offset, options, *rest = whole.arguments
    for token in (0, 3, 6):
        one = whole.q[1:, :, token : token + 1]
        (y,) = operators().rotate(
            one, None, primary, secondary, None, offset + token, options, *rest
        )
        assert_same_bits(y, want[1:, :, token : token + 1])
    other = Options(layout=1, start=4).pack()
    turned = whole.q.transpose(1, 2).contiguous()
    (y,) = operators().rotate(turned, None, primary, secondary, None, offset, other, *rest)
    assert_same_bits(y.transpose(1, 2), want)
    step = whole.q.repeat_interleave(2, -1)[..., ::2]
    (y,) = operators().rotate(step, None, *whole.arguments)
    assert_same_bits(y.contiguous(), want)
    for where in ("in place", "out"):
        again = run(Made(whole.q.clone(), whole.k.clone(), whole.arguments, where))
        assert_same_bits(again[0], want)
        assert_same_bits(again[1], want_k)


@pytest.mark.parametrize("act", ["silu", "rms_norm", "softmax"])
@pytest.mark.parametrize("programs", [3, 512], ids=["heads shared out", "one token each"])
def test_any_division_into_programs_has_the_same_bits(
    programs: int, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightrope.backends.triton import blocks, rotation

    made = make({**PLAIN, "act": act, "gate": LOG, "tokens": 2})
    want = run(made)
    monkeypatch.setattr(blocks, "PROGRAMS", programs)
    rotation._plans.clear()
    for one, other in zip(run(made), want, strict=True):
        assert_same_bits(one, other)


def test_an_offset_on_the_device_is_read_at_every_launch() -> None:
    """Each launch reads the offsets anew; they may change between replays of a CUDA graph."""
    made = make({**PLAIN, "positions": "per row"})
    ids = made.arguments[2]
    assert ids is not None
    first = run(made)[0]
    ids.add_(1)
    second = run(made)[0]
    assert not torch.equal(first, second)
    assert_same_bits(
        second[:, :, :-1], operators().rotate(made.q[:, :, :-1], None, *made.arguments)[0]
    )


def test_rows_further_apart_than_32_bits() -> None:
    """A view that spans more than 2^31 elements, but touches few pages, is rotated correctly."""
    x = torch.empty(2, 2**30 + 64, dtype=torch.bfloat16, device=DEVICE)
    view = torch.as_strided(x, (3, 1, 2, 8), (2**30 + 8, 8, 8, 1))
    view.copy_(noise(3, 1, 2, 8, seed=1))
    (y,) = operators().rotate(view, None, words(1, 1, 1, 4), None, None, 3, Options().pack(), 1.0)
    (small,) = operators().rotate(
        view.clone(), None, words(1, 1, 1, 4), None, None, 3, Options().pack(), 1.0
    )
    assert_same_bits(y, small)
    operators().rotate_(view, None, words(1, 1, 1, 4), None, None, 3, Options().pack(), 1.0)
    assert_same_bits(view.contiguous(), small)


def test_rows_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and indices equal Python's divmod, for rows of one token, of a tile and of more than 2^32 tokens."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    from tests.support.triton.rows import store_rows

    block = 64
    sizes = [1, 2, 3, 63, 64, 65, 127, 128, 1000, 2**31 - 1, 2**31, 2**31 + 7, 2**32 + 1, 2**40]
    cases = [
        (start // block * block, size)
        for size in sizes
        for start in (0, 64, size - 1, size, 5 * size + 70, 999 * size + 12_345)
    ]
    given = [torch.tensor(column, device=DEVICE) for column in zip(*cases)]
    rows, tokens = (torch.zeros(len(cases), block, dtype=torch.int64, device=DEVICE) for _ in "rt")
    # Without the option, Triton 3.9 warns that its default will change.
    store_rows[(len(cases),)](*given, rows, tokens, block, enable_fp_fusion=False)
    for (start, size), own, places in zip(cases, rows.tolist(), tokens.tolist(), strict=True):
        want = [divmod(start + i, size) for i in range(block)]
        assert list(zip(own, places, strict=True)) == want, (start, size)


# --- element-wise activations ---------------------------------------------------------------------

REACH = torch.cat(
    [torch.linspace(-12, 12, 481), torch.logspace(-30, 1.9, 100), -torch.logspace(-30, 1.9, 100)]
)


def rounds_twice(self: Any, x: Any, y: Any, z: Any) -> Any:
    """A multiply-add that rounds twice, like that of the interpreter before Triton 3.9."""
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)


@pytest.mark.parametrize(
    "fused",
    [True, pytest.param(False, marks=pytest.mark.skipif(HAS_GPU, reason="a GPU rounds once"))],
    ids=["", "rounded twice"],
)
@pytest.mark.parametrize("act", [name for name in ACTS[1:] if name not in ("softmax", "rms_norm")])
def test_acts_over_their_whole_range(
    act: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elementwise activations and their derivatives are accurate relative to their own size.

    The derivatives of silu and gelu, which pass through 0, have an absolute bound in addition.
    """
    if not fused:
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_fma", rounds_twice)
    size = len(REACH) + 1
    x = torch.cat((REACH, torch.zeros(1))).reshape(1, 1, 1, size).to(DEVICE)
    still = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=DEVICE)
    for direction in (0, 1):
        options = Options(act=ACTS.index(act), direction=direction).pack()
        grad = torch.ones_like(x)
        extras = [x] if direction else []
        (y,) = operators().rotate(
            grad if direction else x, None, still, None, None, 0, options, 1.0, extras
        )
        wide = [one.double().cpu() for one in extras]
        (want,) = compose(
            (grad if direction else x).double().cpu(),
            None,
            still.cpu(),
            None,
            None,
            0,
            options,
            1.0,
            wide,
        )
        got = y.cpu().double()
        largest = torch.finfo(torch.float32).max
        over = want.abs() > largest
        assert torch.equal(got[over].isinf(), torch.ones_like(got[over], dtype=torch.bool))
        error = (got - want).abs()[~over]
        bound = value("triton act") * want.abs()[~over] + value("float32 tiny")
        if direction and act in ("silu", "gelu"):
            bound = bound + value("triton slope")
        assert bool((error <= bound).all()), REACH[(error > bound).nonzero()[:5, 0]]


@pytest.mark.parametrize("positions", ["offset", "fractional", "ids per row"])
def test_gates_in_float64(positions: str) -> None:
    """Without an activation; with one, the definition computes float64."""
    for gate, direction, shape in product((LOG, SLOPE), (0, 1, 2), ("full", "heads")):
        case = {"gate": gate, "positions": positions, "direction": direction, "gate shape": shape}
        check(make(PLAIN | {"dtype": torch.float64} | case))


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("angles", AXES["angles"])
def test_sums_by_angles(angles: str, dtype: torch.dtype) -> None:
    for at, interleaved, direction in (
        ("axes", False, 0),
        ("fractional", True, 1),
        ("offset", False, 2),
    ):
        case = {
            **PLAIN,
            "dtype": dtype,
            "angles": angles,
            "positions": at,
            "interleaved": interleaved,
        }
        case |= {"channels": (24, 4, 12), "direction": direction, "strides": "transposed"}
        made, grads = make(case), make(case)
        primary, secondary, ids, offset, options, *_ = made.arguments
        grads = [noise(*x.shape, seed=9 + i).to(dtype).to(DEVICE) for i, x in enumerate(made.xs)]
        got = operators().angle_gradients(
            made.q, made.k, *grads, primary, secondary, ids, offset, options, True, True
        )
        wide = made.wide()
        at_wide = (wide.arguments[0], None, wide.arguments[2], offset, options_of(options))
        doubles = [grad.double().cpu() for grad in grads]
        call = Call(wide.q, wide.k, *at_wide, 1.0)
        want = gradients.by_angles(call, wide.xs, doubles, True, True)
        moduli = moduli_of(wide.xs, doubles, *at_wide)
        entry = "angle sums, float64" if dtype == torch.float64 else "angle sums, float32"
        for one, other, scale in zip(got, want, moduli, strict=True):
            assert one.shape == other.shape
            assert one.dtype == torch.float64
            assert bool(((one.cpu() - other).abs() <= value(entry) * scale + 1e-30).all())
        only = operators().angle_gradients(
            made.q, made.k, *grads, primary, secondary, ids, offset, options, False, True
        )
        assert only[0].shape[0] == 0
        assert torch.equal(only[1], got[1])


def moduli_of(
    ys: list[torch.Tensor],
    grads: list[torch.Tensor],
    primary: torch.Tensor,
    turns: None,
    ids: torch.Tensor | None,
    offset: int,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Σ |ω| · |product| for positions, and Σ |position| · |product| for frequencies.

    The sums run over the same dimensions as the gradients.
    """
    axes, rows, heads, pairs = primary.shape
    omega = (primary.double() * (2 * math.pi * 2.0**-64)).abs()[:, :, :, None]
    by_position: Any = 0.0
    by_frequency: Any = 0.0
    for products in products_of(ys, grads, pairs, options):
        tokens = products.shape[2]
        place = torch.zeros(axes, 1, 1, dtype=torch.float64) if ids is None else ids.double()
        place = (place + offset + (torch.arange(tokens) if options.add_index else 0)).abs()
        by_position = by_position + torch.stack(
            [(products * omega[a]).sum((1, 3)) for a in range(axes)]
        )
        full = products[None] * place[:, :, None, :, None].expand(axes, -1, -1, -1, -1)
        dims = [3, *([1] if rows == 1 else []), *([2] if heads == 1 else [])]
        by_frequency = by_frequency + full.sum(dims).reshape(primary.shape)
    return by_position, by_frequency


def products_of(
    ys: list[torch.Tensor], grads: list[torch.Tensor], pairs: int, options: Options
) -> Iterator[torch.Tensor]:
    """Yield |u·dv| + |v·du| for each pair (u, v), ``[rows, heads, tokens, pairs]``, for q and k."""
    first, second = oracle.channels(2 * pairs, options.start, options.interleaved)
    layout = BY_CODE[options.layout]
    for y, grad in zip(ys, grads, strict=True):
        y, grad = layout.to_bhsd(y).abs(), layout.to_bhsd(grad).abs()
        yield y[..., first] * grad[..., second] + y[..., second] * grad[..., first]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("angles", AXES["angles"])
def test_sums_by_phases(angles: str, dtype: torch.dtype) -> None:
    """Gradients of phases have their shape, and sum over the rows and heads that share them."""
    for at, interleaved, direction in (("phases", True, 0), ("phases alone", False, 1)):
        case = {**PLAIN, "dtype": dtype, "angles": angles, "positions": at}
        case |= {"interleaved": interleaved, "direction": direction, "strides": "transposed"}
        made = make({**case, "channels": (24, 4, 12)})
        primary, secondary, ids, offset, options, *_ = made.arguments
        grads = [noise(*x.shape, seed=9 + i).to(dtype).to(DEVICE) for i, x in enumerate(made.xs)]
        arguments = (made.q, made.k, *grads, primary, secondary, ids, offset, options, False)
        nothing, got = operators().angle_gradients(*arguments, True)
        wide, doubles = made.wide(), [grad.double().cpu() for grad in grads]
        call = Call(wide.q, wide.k, *wide.arguments[:4], options_of(options), 1.0)
        _, want = gradients.by_angles(call, wide.xs, doubles, False, True)
        moduli = 0.0
        for products in products_of(wide.xs, doubles, primary.shape[-1], options_of(options)):
            over = [dim for dim in (0, 1) if primary.shape[dim] == 1]
            moduli = moduli + (products.sum(over, keepdim=True) if over else products)
        entry = "angle sums, float64" if dtype == torch.float64 else "angle sums, float32"
        assert nothing.shape == (0, made.q.shape[0], made.q.shape[2])
        assert got.shape == want.shape == primary.shape
        assert got.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert bool(((got.cpu().double() - want).abs() <= value(entry) * moduli).all())
        assert operators().angle_gradients(*arguments, False)[1].shape == (0, *primary.shape[1:])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("gate", [LOG, SLOPE])
def test_sums_by_gates(gate: int, dtype: torch.dtype) -> None:
    for kind in AXES["gate shape"]:
        for at in ("offset", "fractional"):
            case = {**PLAIN, "dtype": dtype, "gate": gate, "gate shape": kind, "positions": at}
            made = make(case | {"channels": (24, 4, 12), "strides": "transposed"})
            _, _, ids, offset, options, _, gates, _ = made.arguments
            grads = [
                noise(*x.shape, seed=9 + i).to(dtype).to(DEVICE) for i, x in enumerate(made.xs)
            ]
            got = operators().gate_gradients(made.q, made.k, *grads, *gates, ids, offset, options)
            wide = made.wide()
            doubles = [grad.double().cpu() for grad in grads]
            where, own = wide.arguments[2], wide.arguments[6]
            away, rest = None if where is None else where.abs(), (offset, options)
            want = gradients.gate_gradients(*wide.xs, *doubles, *own, where, *rest)
            sizes = [t.abs() for t in (*wide.xs, *doubles)]
            moduli = gradients.gate_gradients(*sizes, *own, away, *rest)
            entry = "angle sums, float64" if dtype == torch.float64 else "angle sums, float32"
            for one, other, scale in zip(got, want, moduli, strict=True):
                assert one.shape == other.shape
                assert one.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert bool(((one.cpu().double() - other).abs() <= value(entry) * scale).all())


def test_sums_are_the_same_every_time() -> None:
    made = make({**PLAIN, "act": "rms_norm", "direction": 1})
    first = run(made)
    for one, other in zip(run(made), first, strict=True):
        assert_same_bits(one, other)


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow", "ignore::RuntimeWarning")
def test_a_norm_whose_sum_overflows_is_that_of_the_definition() -> None:
    """Squares beyond float32's range have an infinite mean, so the result is 0."""
    x = torch.tensor([[3e19, -2.0, 1e20, 0.5], [1.0, 2.0, -3.0, 4.0]], device=DEVICE)
    x = x.reshape(1, 1, 2, 4)
    still, weight = words(1, 1, 1, 2), torch.ones(1, 4, device=DEVICE)
    for direction in (0, 1):
        options = Options(act=RMS_NORM, direction=direction).pack()
        given = torch.ones_like(x) if direction else x
        extras = [weight, x] if direction else [weight]
        got = operators().rotate(given, None, still, None, None, 0, options, 1.0, extras, 1e-6)
        want = compose(given, None, still, None, None, 0, options, 1.0, extras, 1e-6)
        assert not bool(got[0].isnan().any())
        for one, other in zip(got, want, strict=True):
            assert_near(one, other, "float32 ways")


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["shared", "of each head"])
def test_sums_by_weights_in_parts(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of norm weights agree for one launch and several, and for heads divided or not."""
    from tightrope.backends.triton import blocks, rotation

    case = {**PLAIN, "act": "rms_norm", "direction": 1, "channels": (20, 6, 14)}
    made = make(case)
    q = noise(3, 3, 131, 20, seed=1).float().to(DEVICE)
    weights = [noise(3 if own else 1, 20, seed=2 + i).float().to(DEVICE) for i in range(2)]
    inputs = [noise(3, n, 131, 20, seed=4 + i).float().to(DEVICE) for i, n in enumerate((3, 3))]
    arguments = (*made.arguments[:6], [*weights, *inputs], 1e-6)
    call = Made(q, q.flip(-1), arguments, "new")
    whole = run(call)
    rotation._plans.clear()
    monkeypatch.setattr(blocks, "MOST_SUMS", 3 * 20 * 2)
    monkeypatch.setattr(blocks, "PROGRAMS", 10_000)
    parts = run(call)
    (plan,) = rotation._plans.values()
    assert plan is not None
    assert (len(plan.launches) > 3) == own
    assert plan.partials[0][:2] == ((2, 3) if own else (plan.launches[0].tiles, 3))
    for one, other in zip(whole[:2], parts[:2], strict=True):
        assert_same_bits(one, other)
    for one, other in zip(whole[2:], parts[2:], strict=True):
        assert_near(one, other, "float32 ways")
    check(call)


@pytest.mark.parametrize("together", [1, 2, 8])
def test_no_shape_loses_a_head(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take at most two heads at a time, also if a table of `blocks` requests more."""
    from tightrope.backends.triton import blocks

    for table in (blocks.PLAIN, blocks.HEAVY):
        monkeypatch.setitem(table, 4, table[4]._replace(together=together))
    for act in ("none", "silu"):
        check(make({**PLAIN, "act": act, "channels": (128, 0, 128)}))


def test_sums_by_weights_take_little_memory() -> None:
    """Sums for gradients of norm weights take at most 64 MiB, for as many tokens as models have."""
    from tightrope.backends.triton import rotation

    rotation._plans.clear()
    q = torch.empty(1, dtype=torch.bfloat16).expand(12, 40, 32_768, 128)
    for heads in (1, 40):
        options = Options(act=RMS_NORM, direction=1).pack()
        extras = [torch.empty(heads, 128), q]
        arguments = (torch.zeros(1, 1, 1, 64, dtype=torch.int64), None, None, 0, options, 1.0)
        plan = rotation._plan(q, None, [q], rotation.GIVEN, True, (*arguments, extras, 1e-6))
        assert plan is not None
        ((tiles, each, channels),) = plan.partials
        assert 4 * tiles * each * channels <= 64 << 20
        assert sum(launch.tiles for launch in plan.launches) >= tiles
