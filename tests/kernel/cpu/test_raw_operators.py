"""Raw operators give correct results, or fail before writing, for any sizes, strides and options.

An accepted call is compared with the same call on contiguous copies, unless they are too large.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import noise
from tests.support.matrix import DISTINCT_SETS, DTYPES, needs_kernel
from tests.support.raw_calls import (
    FEW,
    MAKERS,
    Call,
    Draw,
    holds,
    memory_of,
    tame,
    tensors_of,
)
from tests.support.tolerances import assert_same_bits
from tightrope._rounding import ROUNDINGS
from tightrope.activations import ACTS
from tightrope.backends import cpu
from tightrope.ops import schema

pytestmark = needs_kernel


@pytest.fixture(autouse=True, params=DISTINCT_SETS)
def _each_set(request: pytest.FixtureRequest) -> None:
    cpu.use_instruction_set(request.param)


def words(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.int64)


def wide_table(source: str, width: int) -> Call:
    table, x = torch.empty(1, 1, 0, width), torch.ones(1, 1, 1, 8)
    options = schema.Options(add_index=True, source=schema.SOURCES.index(source))
    return schema.rotate_, [x, None, table, table, None, 0, options.pack(), 1.0], [0]


def far_apart(dtype: torch.dtype, act: str) -> Call:
    x = torch.linspace(-1, 1, 64, dtype=dtype).as_strided(
        (1, 1, 1, 64), (2**62, 2**63 - 1, 2**62, 1)
    )
    options = schema.Options(act=ACTS.index(act))
    return schema.rotate, [x, None, words(1, 1, 1, 32), None, None, 5, options.pack(), 1.0], []


def wide_head(width: int, gate: list[int], kind: int) -> Call:
    y, options = torch.ones(1).expand(1, 1, 1, width), schema.Options(gate=kind)
    of = torch.ones(gate)
    return schema.gate_gradients, [y, None, y, None, of, None, None, 0, options.pack()], []


def many_heads(*extras: torch.Tensor, dtype: torch.dtype = torch.float32, **options: int) -> Call:
    q, k = (
        torch.empty(0, dtype=dtype).as_strided((0, 2**62, 2**62, 8), (2**62,) * 4) for _ in range(2)
    )
    layout = schema.LAYOUTS.index("sbhd")
    end = [words(1, 1, 1, 4), None, None, 0, schema.Options(layout, **options).pack(), 1.0]
    if extras:
        return schema.rotate_extras_, [q, k, *end, [*extras, *extras], 0.0], [0, 1]
    return schema.rotate_, [q, k, *end], [0, 1]


def without_heads(gate: int) -> Call:
    q = torch.empty(0).as_strided((2, 0, 3, 8), (2**62, 2**62, 2**62, 1))
    k = torch.linspace(-1, 1, 96).view(2, 2, 3, 8)
    end = [words(1, 1, 1, 4), None, None, 0, schema.Options(gate=gate).pack(), 1.0]
    if gate == schema.NO_GATE:
        return schema.rotate_, [q, k, *end], [0, 1]
    gates = [torch.ones(2, 1, 3, 8) for _ in range(2)]
    return schema.rotate_extras_, [q, k, *end, gates, 0.0], [0, 1]


def many_axes(operator: str) -> Call:
    x, axes = torch.ones(1, 1, 1, 8), words(2**62, 1, 1, 0)
    if operator == "rotate":
        return schema.rotate, [x, None, axes, None, None, 0, schema.Options().pack(), 1.0], []
    end = [axes, None, None, 0, schema.Options().pack(), False, True]
    return schema.angle_gradients, [x, None, x, None, *end], []


def lost_positions() -> Call:
    """Rotate by tables at positions outside them: all results are NaN.

    Some of these NaNs have another sign where channels lie apart than where they are adjacent.
    """
    x = torch.linspace(-1, 1, 2 * 9 * 24).view(2, 24, 9).transpose(1, 2)
    options = schema.Options(
        layout=schema.LAYOUTS.index("bsd"),
        interleaved=True,
        direction=schema.INVERSE,
        add_index=False,
        source=schema.SOURCES.index("repeat"),
        rounding=ROUNDINGS.index("wide"),
    )
    table = torch.ones(2, 1, 9, 24)
    return schema.rotate, [x, None, table, table, None, -(2**62), options.pack(), 0.5], []


def to_slot(slot: int) -> Call:
    """Write one token to a slot of a cache of 6 entries, which has other memory behind them."""
    k, cache = torch.ones(1, 1, 1, 8), torch.zeros(3, 1, 3, 8)[:2]
    end = [torch.tensor([[slot]]), words(1, 1, 1, 4), None, None, 5, schema.Options().pack(), 1.0]
    return schema.rotate_slots, [k, None, cache, None, *end], [2]


TAKEN: dict[str, Callable[[], Call]] = {
    **{f"slot {slot}": lambda slot=slot: to_slot(slot) for slot in (-1, 0, 5)},
    "lost positions": lost_positions,
    **{
        f"far apart, {dtype}, {act}": lambda dtype=dtype, act=act: far_apart(dtype, act)
        for dtype in DTYPES
        for act in ("none", "silu", "softmax")
        if dtype != torch.float64 or act == "none"
    },
    "many heads": many_heads,
    "many heads and a gate": lambda: many_heads(
        torch.ones(1).expand(2**62, 1, 1, 1), gate=schema.LOG
    ),
    "no heads": lambda: without_heads(schema.NO_GATE),
    "no heads and a gate": lambda: without_heads(schema.LOG),
    "axes without pairs": lambda: many_axes("rotate"),
    "gradients by axes without pairs": lambda: many_axes("angle_gradients"),
}
REFUSED: dict[str, tuple[str, Callable[[], Call]]] = {
    **{
        f"slot {slot}": (
            "slots must be -1 or entries of the cache",
            lambda slot=slot: to_slot(slot),
        )
        for slot in (-2, 6, 7, 2**40)
    },
    **{
        f"far apart, float64, {act}": (
            "float64 with an act or a gate needs the definition",
            lambda act=act: far_apart(torch.float64, act),
        )
        for act in ("silu", "softmax")
    },
    "a gate of float64": (
        "float64 with an act or a gate needs the definition",
        lambda: many_heads(
            torch.ones(1).expand(2**62, 1, 1, 1), dtype=torch.float64, gate=schema.LOG
        ),
    ),
    **{
        f"a table {width} wide, {source}": (
            "rotated channels lie outside the head",
            lambda source=source, width=width: wide_table(source, width),
        )
        for source, width in (("half", 2**62), ("half", 2**63 - 1), ("cat", 2**63 - 2))
    },
    **{
        f"a head {width} wide, {kind}": (
            "a head must fit into memory" if width > 2**52 else "memory|parallel_for",
            lambda width=width, kind=kind: wide_head(width, [1] * (4 if kind == 1 else 2), kind),
        )
        for width in (2**48, 2**62, 2**63 - 1)
        for kind in (schema.LOG, schema.SLOPE)
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_calls_that_are_taken(name: str) -> None:
    assert holds(TAKEN[name]())


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused(name: str) -> None:
    text, make = REFUSED[name]
    call = make()
    assert not holds(call)
    with pytest.raises(RuntimeError, match=text):
        call[0](*call[1])


@pytest.mark.parametrize("source", ["half", "cat", "repeat", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_outside_a_table_give_nan(dtype: torch.dtype, source: str) -> None:
    """Also the first one behind it, with memory there; tables are read where they are, or copied."""
    memory = torch.ones(1, 1, 9, 8)
    for held in {dtype, torch.float32}:
        table = memory.to(held)[:, :, 1:6, : 4 if source == "half" else 8]
        for offset, interleaved in ((0, False), (2**40, True)):
            kind = schema.SOURCES.index(source)
            options = schema.Options(add_index=False, source=kind, interleaved=interleaved)
            for own in ([-1, 0, 4, 5, 6], [0, 4, 5], [-1, 4], [5]):
                ids = torch.tensor([[own]]) - offset
                given = table, table, ids, offset, options.pack(), 1.0
                (y,) = schema.rotate(torch.ones(1, 2, len(own), 8, dtype=dtype), None, *given)
                assert y.isnan().all(-1)[0, 0].tolist() == [not 0 <= at < 5 for at in own]
                assert torch.equal(y.isnan().any(-1), y.isnan().all(-1))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_heads_and_tokens_further_apart_than_32_bits(dim: int, tmp_path: Path) -> None:
    """In the input, the result, gates, inputs of an activation, gradients, tables and caches."""
    files = (tmp_path / str(number) for number in range(9))

    def far(x: torch.Tensor) -> torch.Tensor:
        """Copy x to a file with holes, in which it spans more than 2^31 elements but touches few pages."""
        strides, length = list(x.stride()), x.shape[dim]
        strides[dim] = 2**31 + 64 if length == 2 else 2**26 + 64
        count = (length - 1) * strides[dim] + x.numel()
        memory = torch.from_file(str(next(files)), shared=True, size=count, dtype=x.dtype)
        return memory.as_strided(x.shape, strides).copy_(x)

    # More tokens than are processed together.
    x, other, table = (noise(2, 2, 70, n, seed=n).bfloat16() for n in (8, 8, 4))
    end = words(1, 1, 1, 4), None, None, 5, schema.Options().pack(), 1.0
    (want,) = schema.rotate(x, None, *end)
    inside, out = far(x), far(x * 0)
    schema.rotate_into(inside, None, out, None, *end)
    assert_same_bits(out, want)
    schema.rotate_(inside, None, *end)
    assert_same_bits(inside, want)
    slots = torch.randperm(140).view(2, 70)
    by_table = 0, schema.Options(source=schema.HALF).pack(), 1.0
    found = []
    for one, held, cache in (
        (other, table, torch.zeros_like(x)),
        (far(other), far(table), far(x * 0)),
    ):
        schema.rotate_slots(x, None, cache, None, slots, *end)
        own = [cache, *schema.angle_gradients(x, None, one, None, *end[:5], True, True)]
        own += schema.rotate(x, None, held, held, None, *by_table)
        for options in (schema.Options(gate=schema.LOG), schema.Options(act=3, direction=1)):
            own += schema.rotate_extras(x, None, *end[:4], options.pack(), 1.0, [one], 0.0)
        found.append(own)
    assert_same_bits(*found)


@pytest.mark.parametrize("rows", [1, 2])
def test_ids_without_leading_dimensions(rows: int) -> None:
    x, ids = torch.randn(2, 3, 5, 8), torch.randint(0, 99, (1, rows, 10))[..., ::2]
    options = schema.Options(add_index=False).pack()

    def rotated(positions: torch.Tensor) -> torch.Tensor:
        return schema.rotate(x, None, words(1, 1, 1, 4), None, positions, 3, options, 1.0)[0]

    assert_same_bits(rotated(ids[0]), rotated(ids))
    if rows == 1:
        assert_same_bits(rotated(ids[0, 0]), rotated(ids))
    for wrong in (ids[0, 0, 0], ids[None], ids.new_zeros(3, 5)):
        with pytest.raises(RuntimeError, match="tightrope: positions must"):
            rotated(wrong)


def cosines(draw: Draw) -> Call:
    rows, tokens, pairs = (draw.choice((1, 2, 5)) for _ in range(3))
    at, inv_freq = torch.ones(rows, tokens, draw.choice((1, pairs))), torch.ones(pairs)
    return schema.cos_sin, [at, inv_freq, None, None, None, draw.sometimes(0.5)], []


def freed(x: torch.Tensor) -> torch.Tensor:
    """Return a copy whose storage was freed; its address is 0, or a small number if it has an offset."""
    copy = memory_of(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())
    copy.untyped_storage().resize_(0)
    return copy


def replaced(arguments: list[Any], old: torch.Tensor, new: torch.Tensor) -> list[Any]:
    lists = [replaced(one, old, new) if isinstance(one, list) else one for one in arguments]
    return [new if one is old else one for one in lists]


def unread_by(operator: Callable[..., Any], arguments: list[Any]) -> torch.Tensor | None:
    """Return the tensor of a call that its kernel does not read, if there is one."""
    if operator is schema.gate_gradients:  # only slopes are multiplied by positions
        return arguments[6] if schema.options_of(arguments[8]).gate == schema.LOG else None
    if operator in (schema.rotate_extras, schema.rotate_extras_, schema.rotate_extras_into):
        *_, options, _, extras, _ = arguments
        return extras[0] if schema.options_of(options).learned else None  # only autograd reads it
    return None


@pytest.mark.parametrize("of", [*MAKERS, cosines])
def test_freed_storage_is_refused(of: Callable[[Draw], Call]) -> None:
    tried = 0
    for seed in range(60):
        try:
            operator, arguments, _ = of(Draw(seed))
            operator(*[tame(one) for one in arguments])
        except RuntimeError:
            continue
        others = tensors_of(arguments)
        if any(x.numel() == 0 for x in others) or any(x.numel() > FEW for x in others):
            continue
        unread = unread_by(operator, arguments)
        for x in [one for one in others if one is not unread]:
            kept = {id(one): memory_of(one).clone() for one in others}
            with pytest.raises(RuntimeError, match="tensors must have their memory"):
                operator(*replaced(arguments, x, freed(x)))
            for one in others:
                assert_same_bits(memory_of(one), kept[id(one)])
            tried += 1
    assert tried > 40


@pytest.mark.parametrize("of", MAKERS)
def test_drawn_calls(of: Callable[[Draw], Call]) -> None:
    taken, refused = 0, 0
    for seed in range(200):
        try:
            call = of(Draw(seed))
        except RuntimeError:  # torch cannot make such a tensor
            continue
        if holds(call):
            taken += 1
        else:
            refused += 1
    assert taken > 60
    assert refused > 20
