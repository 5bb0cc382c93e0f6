"""The operator that sums angle gradients, compared with a plain float64 formula."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support import oracle
from tests.support.helpers import noise
from tests.support.matrix import DISTINCT_SETS, both_pairings, every_dtype, needs_kernel
from tests.support.tolerances import assert_angle_sums, assert_same_bits
from tightrope.backends import cpu
from tightrope.ops import gradients, schema

OPERATORS = {"operator": schema.angle_gradients, "definition": gradients.angle_gradients}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)

Operator = Callable[..., tuple[torch.Tensor, torch.Tensor]]


# --- reference ----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """Arguments of the operator, except the two that choose the gradients."""

    ys: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    words: torch.Tensor
    turns: torch.Tensor | None
    positions: torch.Tensor | None
    offset: int
    options: schema.Options

    def run(
        self, operator: Operator, by_positions: bool = True, by_frequencies: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        none = [None] * (2 - len(self.ys))
        return operator(
            *(*self.ys, *none),
            *(*self.grads, *none),
            *(self.words, self.turns, self.positions, self.offset, self.options.pack()),
            *(by_positions, by_frequencies),
        )


def numbers(call: Call, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frequencies [axes, rows|1, heads|1, pairs] and positions [axes, rows, tokens]."""
    omega = call.words.double() * (2 * math.pi * 2.0**-64)
    if call.turns is not None:
        omega = omega + call.turns.double() * (2 * math.pi)
    at = torch.zeros(len(omega), rows, tokens, dtype=torch.float64)
    if call.positions is not None:
        at = at + call.positions.double()
        at = torch.where(at.abs() < 2.0**62, at, math.nan)
    at = at + call.offset
    return omega, at + torch.arange(tokens) if call.options.add_index else at


def formula(call: Call) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return the gradients of positions and of frequencies, each with a sum for its error bound.

    That sum adds the absolute values of the gradient's terms.
    """
    layout = schema.LAYOUTS[call.options.layout]
    rows, _, tokens, _ = oracle.as_bhsd(call.ys[0], layout).shape
    pairs = call.words.shape[3]
    first, second = oracle.channels(2 * pairs, call.options.start, call.options.interleaved)
    omega, at = numbers(call, rows, tokens)
    sign = 1.0 if call.options.direction == schema.FORWARD else -1.0
    results = []
    for modulus in (False, True):
        clean: Callable[[torch.Tensor], torch.Tensor] = torch.abs if modulus else lambda x: x
        by_position = torch.zeros(len(omega), rows, tokens, dtype=torch.float64)
        by_frequency = torch.zeros(omega.shape, dtype=torch.float64)
        for y, grad in zip(call.ys, call.grads):
            y, grad = (oracle.as_bhsd(x, layout).double() for x in (y, grad))
            one, other = y[..., first] * grad[..., second], y[..., second] * grad[..., first]
            each = one.abs() + other.abs() if modulus else sign * (one - other)
            heads = each.shape[1]
            wide = clean(omega).expand(-1, rows, heads, -1)
            by_position += torch.einsum("bhsp,abhp->abs", each, wide)
            found = torch.einsum("bhsp,abs->abhp", each, clean(at))
            for dim in (1, 2):
                if omega.shape[dim] == 1:
                    found = found.sum(dim, keepdim=True)
            by_frequency += found
        results.append((by_position, by_frequency))
    return tuple(zip(*results))


def check(call: Call, operator: Operator) -> None:
    got = call.run(operator)
    for found, (exact, scale) in zip(got, formula(call), strict=True):
        assert_angle_sums(found, exact, scale, call.ys[0].dtype)


# --- inputs ---------------------------------------------------------------------


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "reversed dimensions": lambda x: (
        x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])
    ),
    "every second channel": lambda x: torch.stack((x, x + 1), -1).flatten(-2)[..., ::2],
    "a slice": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 1))[..., 1:-1, 3:-2],
    "one value": lambda x: x.mean().expand(x.shape) if x.numel() else x,
    "one for all tokens": lambda x: x[..., :1, :].expand(x.shape) if x.numel() else x,
}


def make(
    *,
    dtype: torch.dtype = torch.float32,
    layout: str = "bhsd",
    rows: int = 2,
    heads: Sequence[int] = (3,),
    tokens: int = 5,
    pairs: int = 4,
    start: int = 0,
    rest: int = 0,
    interleaved: bool = False,
    direction: int = schema.FORWARD,
    axes: int = 1,
    word_rows: bool = False,
    word_heads: bool = False,
    turns: bool = False,
    at: torch.dtype | None = torch.int64,
    rows_of_positions: bool = True,
    add_index: bool = False,
    offset: int = 0,
    strides: tuple[str, str] = ("contiguous", "contiguous"),
    seed: int = 0,
) -> Call:
    def tensors(how: str, seed: int) -> list[torch.Tensor]:
        own = [{"b": rows, "h": n, "d": start + 2 * pairs + rest} for n in heads]
        shapes = [[sizes.get(letter, tokens) for letter in layout] for sizes in own]
        drawn = [noise(*shape, seed=seed + 9 * i, dtype=dtype) for i, shape in enumerate(shapes)]
        return [STRIDES[how](x) for x in drawn]

    ys, grads = (tensors(how, seed + i) for i, how in enumerate(strides))
    generator = torch.Generator().manual_seed(seed)
    shape = (axes, rows if word_rows else 1, heads[0] if word_heads else 1, pairs)
    words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    whole = torch.randint(-3, 4, shape, generator=generator) if turns else None
    positions = None
    if at is not None:
        where = (axes, rows if rows_of_positions else 1, 1 if add_index else tokens)
        spread = 1000 * torch.randn(where, generator=generator, dtype=torch.float64)
        positions = spread.to(at)
    code = schema.LAYOUTS.index(layout)
    options = schema.Options(code, start, interleaved, direction, add_index or at is None)
    return Call(ys, grads, words, whole, positions, offset, options)


# --- against the formula ------------------------------------------------------------------------


@every_operator
@both_pairings
@every_dtype
def test_every_dtype_and_pairing(dtype: torch.dtype, interleaved: bool, operator: Operator) -> None:
    # Whole vector registers of every width, and remainders.
    for pairs in (1, 2, 7, 8, 9, 16, 24, 33, 64, 111):
        check(make(dtype=dtype, pairs=pairs, interleaved=interleaved, at=torch.float64), operator)


# Around the ends of the blocks in which tokens are summed, for many heads, and for more pairs than go
# through at once: sizes, and other arguments that vary.
MANY: dict[str, tuple[dict[str, Any], dict[str, Sequence[Any]]]] = {
    **{
        f"{tokens} tokens": (
            {"tokens": tokens, "heads": (2, 2), "pairs": 3, "axes": 2, "at": torch.float32}
            | {"dtype": torch.float64},
            {"rows": (1, 3), "word_rows": (False, True), "word_heads": (False, True)},
        )
        for tokens in (1, 2, 31, 32, 33, 64, 65, 128, 4095, 4096, 4097, 5000)
    },
    **{
        f"{heads} heads": ({"heads": heads, "pairs": 9}, {"dtype": (torch.float32, torch.bfloat16)})
        for heads in ((1,), (7,), (8,), (9,), (16, 8), (5, 3), (64, 8))
    },
    **{
        f"{pairs} pairs": (
            {"pairs": pairs, "heads": (2,), "rows": 1, "turns": True, "at": torch.float64},
            {
                "word_heads": (False, True),
                "interleaved": (False, True),
                "start": (1,),
                "rest": (1,),
            },
        )
        for pairs in (2047, 2048, 2049, 4100)
    },
}


@every_operator
@pytest.mark.parametrize("name", MANY)
def test_many(name: str, operator: Operator) -> None:
    sizes, options = MANY[name]
    for values in itertools.product(*options.values()):
        check(make(**sizes | dict(zip(options, values))), operator)


@every_operator
def test_a_sum_over_many_heads_is_as_good_as_over_few(operator: Operator) -> None:
    """The bound holds for products of one sign, whose sum in float32 would lose several digits."""
    call = make(heads=(5000,), rows=1, tokens=3, pairs=8)
    for x in (*call.ys, *call.grads):
        x.abs_()
    call.ys[0][..., 8:] *= -1
    check(call, operator)


@every_operator
@pytest.mark.parametrize("empty", ["rows", "heads", "tokens", "pairs"])
def test_nothing_to_sum(empty: str, operator: Operator) -> None:
    sizes: dict[str, Any] = {"heads": (0,)} if empty == "heads" else {empty: 0}
    for word_rows, word_heads in itertools.product((False, True), (False, True)):
        call = make(**sizes, rest=2, word_rows=word_rows, word_heads=word_heads)
        by_position, by_frequency = call.run(operator)
        rows, _, tokens, _ = call.ys[0].shape
        assert by_position.shape == (1, rows, tokens)
        assert by_frequency.shape == call.words.shape
        assert not by_position.any()
        assert not by_frequency.any()


@every_operator
def test_gradients_that_are_not_needed_are_empty(operator: Operator) -> None:
    call = make(axes=2, at=torch.float64)
    both = call.run(operator)
    for wanted in itertools.product((False, True), (False, True)):
        got = call.run(operator, *wanted)
        for found, full, want in zip(got, both, wanted):
            if want:
                assert_same_bits(found, full)
            else:
                assert found.shape == (0, *full.shape[1:])


@every_operator
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, 2.0**62, -(2.0**62), 1e38])
@pytest.mark.parametrize("at", [torch.float32, torch.float64])
def test_an_invalid_position_makes_frequency_gradients_nan(
    at: torch.dtype, lost: float, operator: Operator
) -> None:
    """Frequency gradients that sum over an invalid position are NaN; other rows' are not."""
    call = make(at=at, axes=2, word_rows=True)
    assert call.positions is not None
    call.positions[1, 1, 3] = lost
    check(call, operator)
    call.ys[0][1, :, 3] = math.nan
    check(call, operator)
    by_position, by_frequency = call.run(operator)
    assert by_position[:, 1, 3].isnan().all()
    assert by_frequency[:, 1].isnan().all()
    assert not by_frequency[:, 0].isnan().any()


@every_operator
def test_channels_that_do_not_rotate_are_not_read(operator: Operator) -> None:
    call = make(start=3, rest=2)
    clean = call.run(operator)
    for x in (*call.ys, *call.grads):
        x[..., :3] = math.nan
        x[..., -2:] = math.inf
    assert_same_bits(call.run(operator), clean)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    layout = draw(st.sampled_from(schema.LAYOUTS))
    rows = draw(st.integers(0, 3)) if "b" in layout else 1
    head = st.integers(0, 9) if "h" in layout else st.just(1)
    at = draw(st.sampled_from([None, torch.int32, torch.int64, torch.float32, torch.float64]))
    word_heads = draw(st.booleans())
    heads = [draw(head)]
    if draw(st.booleans()):
        heads.append(heads[0] if word_heads else draw(head))
    return make(
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        layout=layout,
        rows=rows,
        heads=heads,
        tokens=draw(st.integers(0, 70)),
        pairs=draw(st.integers(0, 40)),
        start=draw(st.integers(0, 5)),
        rest=draw(st.integers(1, 5)),
        interleaved=draw(st.booleans()),
        direction=draw(st.integers(0, 2)),
        axes=draw(st.integers(1, 3)),
        word_rows=draw(st.booleans()) and rows > 0,
        word_heads=word_heads,
        turns=draw(st.booleans()),
        at=at,
        rows_of_positions=draw(st.booleans()),
        add_index=draw(st.booleans()),
        offset=draw(st.integers(-(2**31), 2**31)),
        strides=(draw(st.sampled_from(list(STRIDES))), draw(st.sampled_from(list(STRIDES)))),
        seed=draw(st.integers(0, 2**32)),
    )


@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(call=calls())
def test_generated_calls(call: Call) -> None:
    for operator in OPERATORS.values():
        check(call, operator)


# --- the same bits --------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("words", ["shared", "per row", "per head"])
def test_threads_change_no_bit(words: str, operator: Operator) -> None:
    big = make(
        rows=3,
        heads=(9, 2) if words != "per head" else (3, 3),
        tokens=700,
        pairs=32,
        axes=2,
        at=torch.float64,
        word_rows=words == "per row",
        word_heads=words == "per head",
    )
    one = make(rows=1, heads=(640,), tokens=1, pairs=64, at=torch.float64)
    for call in (big, one):
        results = []
        for threads in (1, 2, 4, 3):
            torch.set_num_threads(threads)
            results.append(call.run(operator))
        for result in results[1:]:
            assert_same_bits(result, results[0])


@needs_kernel
@both_pairings
@every_dtype
def test_strides_and_calls_change_no_bit(dtype: torch.dtype, interleaved: bool) -> None:
    call = make(dtype=dtype, interleaved=interleaved, pairs=27, heads=(9, 4), at=torch.float64)
    want = call.run(schema.angle_gradients)
    for how in ("reversed dimensions", "every second channel", "a slice"):
        other = call._replace(
            ys=[STRIDES[how](y) for y in call.ys], grads=[STRIDES[how](g) for g in call.grads]
        )
        assert_same_bits(other.run(schema.angle_gradients), want)
    # The gradient of a position does not depend on other tokens.
    for row, token in ((0, 0), (1, 4)):
        alone = call._replace(
            ys=[y[row : row + 1, :, token : token + 1] for y in call.ys],
            grads=[g[row : row + 1, :, token : token + 1] for g in call.grads],
            positions=call.positions[:, row : row + 1, token : token + 1],
        )
        by_position, _ = alone.run(schema.angle_gradients)
        assert_same_bits(by_position[:, 0, 0], want[0][:, row, token])


@needs_kernel
@every_dtype
def test_sets_give_the_same_bits(dtype: torch.dtype) -> None:
    """They do the same operations in the same order."""
    for pairs, interleaved in itertools.product((1, 7, 8, 17, 64, 90, 2100), (False, True)):
        call = make(
            dtype=dtype,
            pairs=pairs,
            interleaved=interleaved,
            heads=(9,),
            tokens=40,
            at=torch.float64,
            turns=True,
            rows=1,
        )
        results = []
        for name in DISTINCT_SETS:
            cpu.use_instruction_set(name)
            check(call, schema.angle_gradients)
            results.append(call.run(schema.angle_gradients))
        for result in results[1:]:
            assert_same_bits(result, results[0])


# --- the raw operator is safe -------------------------------------------------------------------


@needs_kernel
def test_the_raw_operator_reads_nothing_outside_its_tensors() -> None:
    y, grad = noise(2, 3, 5, 8, dtype=torch.float32), noise(2, 3, 5, 8, dtype=torch.float32, seed=1)
    words = torch.ones(1, 1, 1, 3, dtype=torch.int64)
    add_index, ids = schema.Options(start=1).pack(), schema.Options(start=1, add_index=False).pack()
    good = {
        "y": y,
        "z": None,
        "grad_y": grad,
        "grad_z": None,
        "words": words,
        "turns": None,
        "positions": None,
        "offset": 0,
        "options": add_index,
        "by_positions": True,
        "by_frequencies": True,
    }
    schema.angle_gradients(**good)
    bad: dict[str, dict[str, Any]] = {
        "a gradient of fewer rows": {"grad_y": grad[:1]},
        "a gradient of more rows": {"grad_y": grad.repeat(2, 1, 1, 1)},
        "a gradient of fewer heads": {"grad_y": grad[:, :1]},
        "a gradient of fewer tokens": {"grad_y": grad[:, :, :4]},
        "a gradient of fewer channels": {"grad_y": grad[..., :4]},
        "a gradient of fewer dimensions": {"grad_y": grad[0]},
        "a gradient of more dimensions": {"grad_y": grad[None]},
        "a gradient of another dtype": {"grad_y": grad.double()},
        "a gradient of a narrower dtype": {"grad_y": grad.half()},
        "a gradient too many": {"grad_z": grad},
        "a result too many": {"z": y},
        "a second gradient of another dtype": {"z": y, "grad_z": grad.half()},
        "a second gradient of fewer heads": {"z": y, "grad_z": grad[:, :2]},
        "a second result of other rows": {"z": y[:1], "grad_z": grad[:1]},
        "a second result of other tokens": {"z": y[:, :, :4], "grad_z": grad[:, :, :4]},
        "a second result of other channels": {"z": y[..., :7], "grad_z": grad[..., :7]},
        "a second result of another dtype": {"z": y.half(), "grad_z": grad.half()},
        "integers": {"y": y.long(), "grad_y": grad.long()},
        "pairs": {"words": words.repeat(1, 1, 1, 2)},
        "start": {"options": schema.Options(start=3).pack()},
        "huge start": {"options": schema.Options(start=2**20 - 1).pack()},
        "rows of words": {"words": words.repeat(1, 3, 1, 1)},
        "heads of words": {"words": words.repeat(1, 1, 2, 1)},
        "heads of words, of a second result": {
            "words": words.repeat(1, 1, 3, 1),
            "z": y[:, :1],
            "grad_z": grad[:, :1],
        },
        "dtype of words": {"words": words.int()},
        "dimensions of words": {"words": words[0]},
        "strided words": {"words": torch.ones(1, 1, 1, 6, dtype=torch.int64)[..., ::2]},
        "no axes": {"words": words[:0]},
        "turns": {"turns": words[..., :1]},
        "dtype of turns": {"turns": words.float()},
        "strided turns": {"turns": torch.ones(1, 1, 1, 6, dtype=torch.int64)[..., ::2]},
        "tokens of ids": {"positions": torch.zeros(1, 1, 4), "options": ids},
        "tokens without ids": {"positions": torch.zeros(1, 1, 5)},
        "rows of ids": {"positions": torch.zeros(1, 3, 5), "options": ids},
        "axes of ids": {"positions": torch.zeros(2, 1, 5), "options": ids},
        "no dimension of ids": {"positions": torch.zeros(()), "options": ids},
        "dimensions of ids": {"positions": torch.zeros(1, 1, 1, 5), "options": ids},
        "dtype of ids": {"positions": torch.zeros(1, 1, 5).half(), "options": ids},
        "layout": {"options": schema.Options(layout=6, start=1).pack()},
        "rank of the layout": {"options": schema.Options(layout=3, start=1).pack()},
        "direction": {"options": schema.Options(start=1, direction=3).pack()},
        "tables": {"options": schema.Options(start=1, source=1).pack()},
        "a gate": {"options": schema.Options(start=1, gate=1).pack()},
        "a negative form": {"options": -1},
    }
    for change in bad.values():
        with pytest.raises(RuntimeError, match="tightrope: "):
            schema.angle_gradients(**{**good, **change})


def test_no_gradient_is_lost_through_the_raw_operator() -> None:
    """The raw operator, which has no gradient of its own, refuses tensors that require grad."""
    call = make(at=torch.float64)
    for x in (call.ys[0], call.grads[0], call.positions):
        x.requires_grad_()
        rule = r"\[tightrope::angle_gradients\] the raw operator has no gradient; call torch\."
        with pytest.raises(RuntimeError, match=rule):
            call.run(schema.angle_gradients)
        with torch.no_grad():
            call.run(schema.angle_gradients)
        x.requires_grad_(False)


def test_devices_are_not_mixed() -> None:
    """A call with one meta tensor raises an error.

    The call is dispatched to the fake kernel, which must not return uninitialised memory.
    """
    call = make(at=torch.float64, turns=True)
    for change in (
        {"grads": [call.grads[0].to("meta")]},
        {"words": call.words.to("meta")},
        {"turns": call.turns.to("meta")},
        {"positions": call.positions.to("meta")},
    ):
        with pytest.raises(RuntimeError, match="must be on one device"):
            call._replace(**change).run(schema.angle_gradients)
