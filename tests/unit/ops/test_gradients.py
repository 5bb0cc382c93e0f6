"""The operator that sums angle gradients, and its definition, compared with a plain float64 formula."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import oracle, pairwise
from tests.support.helpers import noise
from tests.support.matrix import DTYPES
from tests.support.tolerances import assert_angle_sums, assert_same_bits
from tightrope.ops import gradients, schema
from tightrope.ops.schema import options_of

OPERATORS = {"operator": schema.angle_gradients, "definition": gradients.angle_gradients}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)

Operator = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Call(NamedTuple):
    """Arguments of the operator, except the two that choose the gradients."""

    y: torch.Tensor
    z: torch.Tensor | None
    grad_y: torch.Tensor
    grad_z: torch.Tensor | None
    words: torch.Tensor
    turns: torch.Tensor | None
    positions: torch.Tensor | None
    offset: int
    packed: int

    def run(
        self, operator: Operator, by_positions: bool = True, by_frequencies: bool = True
    ) -> Any:
        return operator(*self, by_positions, by_frequencies)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the results, each with its gradient."""
        both = (self.y, self.grad_y), (self.z, self.grad_z)
        return [(y, grad) for y, grad in both if y is not None and grad is not None]


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
    return omega, at + torch.arange(tokens) if options_of(call.packed).add_index else at


def formula(call: Call) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return the gradients of positions and of frequencies, each with the sum of the moduli of its terms."""
    options = options_of(call.packed)
    layout = schema.LAYOUTS[options.layout]
    rows, _, tokens, _ = oracle.as_bhsd(call.y, layout).shape
    pairs = call.words.shape[3]
    first, second = oracle.channels(2 * pairs, options.start, options.interleaved)
    omega, at = numbers(call, rows, tokens)
    sign = 1.0 if options.direction == schema.FORWARD else -1.0
    results = []
    for modulus in (False, True):
        clean: Callable[[torch.Tensor], torch.Tensor] = torch.abs if modulus else lambda x: x
        by_position = torch.zeros(len(omega), rows, tokens, dtype=torch.float64)
        by_frequency = torch.zeros(omega.shape, dtype=torch.float64)
        for y, grad in call.pairs():
            y, grad = (oracle.as_bhsd(x, layout).double() for x in (y, grad))
            one, other = y[..., first] * grad[..., second], y[..., second] * grad[..., first]
            each = one.abs() + other.abs() if modulus else sign * (one - other)
            wide = clean(omega).expand(-1, rows, each.shape[1], -1)
            by_position += torch.einsum("bhsp,abhp->abs", each, wide)
            found = torch.einsum("bhsp,abs->abhp", each, clean(at))
            by_frequency += found.sum_to_size(len(omega), *omega.shape[1:3], pairs)
        results.append((by_position, by_frequency))
    return tuple(zip(*results))


def check(call: Call, operator: Operator) -> None:
    for found, (exact, scale) in zip(call.run(operator), formula(call), strict=True):
        assert_angle_sums(found, exact, scale, call.y.dtype)


def make(
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = 2,
    heads: Sequence[int] = (3,),
    tokens: int = 5,
    pairs: int = 4,
    start: int = 0,
    rest: int = 0,
    interleaved: bool = False,
    axes: int = 1,
    word_rows: bool = False,
    word_heads: bool = False,
    turns: bool = False,
    at: torch.dtype = torch.float64,
) -> Call:
    width = start + 2 * pairs + rest
    own = [noise(rows, n, tokens, width, seed=seed, dtype=dtype) for seed in (0, 1) for n in heads]
    tensors = [own[0], None, own[1], None] if len(heads) == 1 else own
    generator = torch.Generator().manual_seed(0)
    shape = (axes, rows if word_rows else 1, heads[0] if word_heads else 1, pairs)
    words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    whole = torch.randint(-3, 4, shape, generator=generator) if turns else None
    where = 1000 * torch.randn((axes, rows, tokens), generator=generator, dtype=torch.float64)
    options = schema.Options(start=start, interleaved=interleaved, add_index=False)
    return Call(*tensors, words, whole, where.to(at), 0, options.pack())  # type: ignore[arg-type]


# --- against the formula ------------------------------------------------------------------------


def allowed(case: Mapping[str, Any]) -> bool:
    """Return whether a call, of which some sizes are chosen, is small, and what heads share fits both tensors."""
    heads = case.get("heads", (1,))
    sizes = [case.get(name, 1) for name in ("rows", "tokens", "pairs")]
    alike = len(set(heads)) == 1 or not case.get("word_heads")
    return math.prod([sum(heads), *sizes]) <= 2**19 and alike


# Whole vector registers and remainders, the ends of the blocks in which tokens are summed, many heads, and
# more pairs than go through at once.
SIZES: dict[str, Any] = {
    "pairs": (1, 2, 7, 8, 9, 33, 64, 111, 2047, 2048, 2049, 4100),
    "tokens": (1, 2, 31, 32, 33, 64, 65, 128, 4095, 4096, 4097, 5000),
    "heads": ((1,), (7,), (8,), (9,), (2, 2), (5, 3), (64, 8)),
    "rows": (1, 3),
    "axes": (1, 2),
    "dtype": DTYPES,
    "at": (torch.float64, torch.float32),
    "start": (0, 1),
    **dict.fromkeys(("interleaved", "word_rows", "word_heads", "turns"), (False, True)),
}
CASES = pairwise.covering(SIZES, allowed)


@every_operator
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_sums_of_many_terms(case: Mapping[str, Any], operator: Operator) -> None:
    check(make(**case), operator)


@every_operator
def test_a_sum_over_many_heads_is_as_good_as_over_few(operator: Operator) -> None:
    """The bound holds for products of one sign, whose sum in float32 would lose several digits."""
    call = make(heads=(5000,), rows=1, tokens=3, pairs=8)
    call = call._replace(y=call.y.abs(), grad_y=call.grad_y.abs())
    call.y[..., 8:] *= -1
    check(call, operator)


@every_operator
def test_gradients_that_are_not_needed_are_empty(operator: Operator) -> None:
    call = make(axes=2)
    both = call.run(operator)
    for wanted in itertools.product((False, True), (False, True)):
        for found, full, want in zip(call.run(operator, *wanted), both, wanted):
            assert_same_bits(found, full if want else full[:0])


@every_operator
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, 2.0**62, -(2.0**62), 1e38])
@pytest.mark.parametrize("at", [torch.float32, torch.float64])
def test_an_invalid_position_makes_frequency_gradients_nan(
    at: torch.dtype, lost: float, operator: Operator
) -> None:
    """Those that sum over the position; not those of other rows."""
    call = make(at=at, axes=2, word_rows=True)
    assert call.positions is not None
    call.positions[1, 1, 3] = lost
    check(call, operator)
    call.y[1, :, 3] = math.nan
    check(call, operator)
    assert not call.run(operator)[1][:, 0].isnan().any()


@every_operator
def test_channels_that_do_not_rotate_are_not_read(operator: Operator) -> None:
    call = make(start=3, rest=2)
    clean = call.run(operator)
    for x in (call.y, call.grad_y):
        x[..., :3] = math.nan
        x[..., -2:] = math.inf
    assert_same_bits(call.run(operator), clean)


@every_operator
def test_threads_change_no_bit(operator: Operator) -> None:
    """Of a sum that is one number, too; kernel/cpu/test_instruction_sets.py has all calls."""
    call, results = make(rows=1, heads=(640,), tokens=1, pairs=64), []
    for threads in (1, 2, 4, 3):
        torch.set_num_threads(threads)
        results.append(call.run(operator))
    for result in results[1:]:
        assert_same_bits(result, results[0])
