"""Drawn calls of the raw operators, with any sizes, strides and options."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from tests.support.matrix import DTYPES
from tests.support.tolerances import assert_same_bits
from tightrope._rounding import ROUNDINGS
from tightrope.activations import ACTS, NONE, RMS_NORM
from tightrope.ops import schema
from tightrope.ops.eight import FORMATS

# Indices of the sources that are tables.
TABLES = [schema.SOURCES.index(name) for name in schema.TABLES]


# Sizes larger than any memory; torch still makes empty or expanded tensors of these sizes.
HUGE = (2**50, 2**62, 2**63 - 1)


# Strides of dimensions of size 1 or 0, which are never used.
ANY_STRIDE = (0, 1, 7, 2**31, 2**52, *HUGE)


# A tensor of more elements is a view of one element, and the results of a call with it are not
# compared.
FEW = 2**16


MARGIN = 64


class Draw(random.Random):
    """Draws random sizes and makes tensors.

    Attributes:
        eights: the share of caches in 8 bits, which the kernel for CPUs refuses.
    """

    eights = 0.02

    def sometimes(self, share: float) -> bool:
        return self.random() < share

    def size(self, *, huge: float = 0.03) -> int:
        return self.choice(HUGE) if self.sometimes(huge) else self.choice((1, 1, 2, 3, 5, 9))

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes, occasionally with one of them changed."""
        found = list(sizes)
        if self.sometimes(0.03):
            found[self.randrange(len(found))] = self.choice((0, 1, 2, *HUGE))
        return found

    def tensor(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        *,
        written: bool = False,
        low: int = -(2**62),
    ) -> torch.Tensor:
        """Return a tensor with unused memory on both sides, often permuted, sometimes expanded.

        Dimensions of size 1 may have any stride. A tensor that is empty, or has more than FEW
        elements, is a view of one element; any other tensor is not expanded if `written`.
        """
        sizes, count = list(sizes), prod(sizes)
        if count == 0 or count > FEW:
            strides = [self.choice(ANY_STRIDE) if count == 0 or n == 1 else 0 for n in sizes]
            return numbers(1, dtype, self, low).as_strided(sizes, strides)
        order = list(range(len(sizes)))
        if self.sometimes(0.5):
            self.shuffle(order)
        strides, step = [0] * len(sizes), 1
        for d in reversed(order):
            if not written and self.sometimes(0.05):
                continue  # expanded
            strides[d] = step
            step *= sizes[d]
        memory = numbers(step + 2 * MARGIN, dtype, self, low)
        for d, n in enumerate(sizes):
            if n == 1 and self.sometimes(0.5):
                strides[d] = self.choice(ANY_STRIDE)
        return memory.as_strided(sizes, strides, MARGIN)

    def words(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return phase words: contiguous, as the operator requires, unless they are huge."""
        count = prod(sizes)
        if count > FEW:
            return numbers(1, torch.int64, self).as_strided(sizes, [0] * len(sizes))
        strides = [prod(sizes[d + 1 :]) for d in range(len(sizes))]
        for d, n in enumerate(sizes):
            if count == 0 or n == 1:
                strides[d] = self.choice(ANY_STRIDE)
        return numbers(max(count, 1), torch.int64, self).as_strided(sizes, strides)


def numbers(count: int, dtype: torch.dtype, draw: Draw, low: int = -(2**62)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    if dtype == torch.uint8:
        return torch.randint(0, 2, (count,), generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        low = max(low, torch.iinfo(dtype).min)
        return torch.randint(low, -low, (count,), generator=generator, dtype=dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def tame(value: Any) -> Any:
    """Copy a tensor, or each tensor of a list, to contiguous memory; return any other value."""
    if isinstance(value, list):
        return [tame(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return [one for one in flat if isinstance(one, torch.Tensor)]


def memory_of(x: torch.Tensor) -> torch.Tensor:
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((count,), (1,), 0)


# An operator, its arguments, and the indices of the arguments that it writes.
Call = tuple[Callable[..., Any], list[Any], list[int]]


def shape(layout: int, rows: int, heads: int, tokens: int, head_dim: int) -> list[int]:
    by_name = {"b": rows, "h": heads, "s": tokens, "t": tokens, "d": head_dim}
    return [by_name[name] for name in schema.LAYOUTS[layout]]


def problem(draw: Draw) -> tuple[int, list[int], list[int], int, int, int]:
    """Draw a layout, [rows, tokens, channels], the number of heads of each tensor, pairs and start."""
    layout = draw.randrange(len(schema.LAYOUTS))
    name = schema.LAYOUTS[layout]
    rows, tokens = draw.size() if "b" in name else 1, draw.size()
    head_dim = draw.choice(HUGE) if draw.sometimes(0.05) else draw.choice((1, 2, 5, 8, 24, 72, 130))
    heads = [draw.size() if "h" in name else 1 for _ in range(draw.choice((1, 2)))]
    if draw.sometimes(0.1):
        heads[-1] = 0
    if "b" in name and draw.sometimes(0.05):
        rows = 0
    if draw.sometimes(0.05):
        tokens = 0
    widest = min(head_dim // 2, 40)
    pairs = draw.choice((0, widest, widest, draw.randint(0, widest)))
    start = draw.randint(0, min(head_dim - 2 * pairs, 2**20 - 1))
    return layout, [rows, tokens, head_dim], heads, pairs, start


def angle_sizes(draw: Draw, rows: int, heads: Sequence[int]) -> list[int]:
    alike = heads[0] if len(set(heads)) == 1 else 1
    return [draw.choice((1, rows)), draw.choice((1, alike))]


def given_phases(
    draw: Draw, rows: int, heads: Sequence[int], tokens: int, pairs: int, axes: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Draw phases, phase words or None, and the number of axes that their positions must have."""
    sizes = draw.sizes([*angle_sizes(draw, rows, heads), tokens, pairs])
    given = draw.tensor(sizes, draw.choice((torch.int32, torch.int64)))
    if draw.sometimes(0.5):
        return given, None, 0
    return given, draw.words(draw.sizes([axes, *angle_sizes(draw, rows, heads), pairs])), axes


def positions_of(
    draw: Draw, axes: int, rows: int, tokens: int, add_index: bool, tables: bool
) -> torch.Tensor | None:
    if add_index and draw.sometimes(0.5):
        return None
    sizes = draw.sizes([axes, draw.choice((1, rows)), 1 if add_index else tokens])
    dtypes = [torch.int32, torch.int64] + [torch.float32, torch.float64] * (not tables)
    ids = draw.tensor(sizes, draw.choice(dtypes), low=draw.choice((-4, -(2**62))))
    while ids.dim() > 1 and ids.shape[0] == 1 and draw.sometimes(0.3):
        ids = ids[0]
    return ids


def offset_of(draw: Draw) -> int:
    return draw.choice((0, 0, 3, -(2**62), 2**62, 2**63 - 1, -(2**63)))


def packed(draw: Draw, options: schema.Options) -> int:
    if draw.sometimes(0.1):
        return draw.choice(
            (options.pack() ^ 1 << draw.randrange(63), draw.getrandbits(63), -1, -(2**63))
        )
    return options.pack()


def rotation(draw: Draw) -> Call:
    layout, (rows, tokens, head_dim), heads, pairs, start = problem(draw)
    dtype = draw.choice(DTYPES)
    source = draw.randrange(len(schema.SOURCES))
    act = draw.choice((NONE, NONE, draw.randrange(len(ACTS)), RMS_NORM))
    gate = draw.choice((schema.NO_GATE, schema.NO_GATE, schema.LOG, schema.SLOPE, schema.FACTOR))
    plain = act == NONE and gate == schema.NO_GATE
    if dtype == torch.float64 and not plain and draw.sometimes(0.8):  # refused on CPUs
        dtype = draw.choice([one for one in DTYPES if one != torch.float64])
    direction = draw.choice((schema.FORWARD, schema.TRANSPOSE))
    if act == NONE and draw.sometimes(0.3):
        direction = schema.INVERSE
    add_index, learned = draw.sometimes(0.7), draw.sometimes(0.2)
    options = schema.Options(
        *(layout, start, draw.sometimes(0.5), direction, add_index, source, learned, act, gate),
        rounding=draw.randrange(len(ROUNDINGS)) if plain else schema.ONCE,
        narrow=draw.sometimes(0.3),
        dense=draw.sometimes(0.3),
    )

    def values(*sizes: int) -> torch.Tensor:
        return draw.tensor(draw.sizes(sizes), draw.choice(DTYPES))

    axes = 1 if source in TABLES or gate == schema.SLOPE else draw.choice((1, 2))
    angles = angle_sizes(draw, rows, heads)
    if pairs == 0 and source == schema.WORDS and gate != schema.SLOPE and draw.sometimes(0.3):
        axes = draw.choice(HUGE)
    if source == schema.WORDS:
        sizes = draw.sizes([axes, *angles, pairs])
        turns = draw.words(sizes) if draw.sometimes(0.3) else None
        primary, secondary = draw.words(sizes), turns
    elif source == schema.PHASES:
        primary, secondary, axes = given_phases(draw, rows, heads, tokens, pairs, axes)
    else:
        width = pairs if source == schema.SOURCES.index("half") else 2 * pairs
        sizes = draw.sizes([*angles, draw.choice((0, 1, 9)), width])
        of = draw.choice(DTYPES)
        primary, secondary = draw.tensor(sizes, of), draw.tensor(sizes, of)
    end: list[Any] = [
        primary,
        secondary,
        positions_of(draw, axes, rows, tokens, add_index, source in TABLES),
        offset_of(draw),
        packed(draw, options),
        draw.choice((1.0, 0.5)),
    ]
    extras = [draw.tensor([1, 1, 1, 1], torch.float32)] if learned else []
    if act == RMS_NORM:
        extras += [values(draw.choice((1, n)), head_dim) for n in heads]
    for n in heads if gate else ():
        own = [draw.choice((1, n)), draw.choice((1, head_dim))]
        if gate != schema.SLOPE:
            own = [draw.choice((1, rows)), own[0], draw.choice((1, tokens)), own[1]]
        extras.append(values(*own))
    xs = [shape(layout, rows, n, tokens, head_dim) for n in heads]
    if act != NONE and direction != schema.FORWARD:
        extras += [draw.tensor(draw.sizes(one), dtype) for one in xs]
    carries = bool(extras) or draw.sometimes(0.2)
    if carries:
        end += [extras, 1e-6 if act == RMS_NORM else 0.0]

    def operands(*, written: bool) -> list[torch.Tensor | None]:
        made = [draw.tensor(draw.sizes(one), dtype, written=written) for one in xs]
        return [*made, *[None] * (2 - len(made))]

    few = not any(n in HUGE for n in (rows if tokens else 0, tokens, head_dim, *heads))
    if few and draw.sometimes(0.3):
        end = end if carries else [*end, [], 0.0]
        return to_slots(draw, layout, (rows, tokens, head_dim), heads, operands(written=False), end)
    verb = draw.choice((schema.NEW, schema.IN_PLACE, schema.OUT))
    first = operands(written=verb is schema.IN_PLACE)
    if verb is schema.OUT:
        first += operands(written=True)
    written = {schema.NEW: [], schema.IN_PLACE: [0, 1], schema.OUT: [2, 3]}[verb]
    return verb.carrying if carries else verb.plain, first + end, written


def to_slots(
    draw: Draw,
    layout: int,
    sizes: Sequence[int],
    heads: Sequence[int],
    xs: list[torch.Tensor | None],
    end: list[Any],
) -> Call:
    """Draw a call that writes to slots of a cache, or rotates them in place; no slot is named twice."""
    (rows, tokens, head_dim), dtype = sizes, xs[0].dtype
    of_cache, name = layout, schema.LAYOUTS[layout]
    blocks = 1 if "b" not in name else draw.choice((0, 1, 2, 3))
    if "b" not in name and draw.sometimes(0.5):
        of_cache, blocks = (
            schema.LAYOUTS.index("bshd" if "h" in name else "bsd"),
            draw.choice((0, 1, 3)),
        )
    entries = draw.choice((0, 1, 4, 5, 19))
    eight = draw.choice(FORMATS) if draw.sometimes(draw.eights) else None
    contiguous = eight is not None and draw.sometimes(0.3)

    def cache(heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        own = draw.sizes(shape(of_cache, blocks, heads, entries, width))
        if contiguous:
            own = shape(layout, rows, heads, tokens, width)
        if eight is not None:
            return draw.tensor(own, torch.uint8, written=True).view(eight)
        return draw.tensor(own, dtype, written=True)

    own = [tokens] if rows == 1 and draw.sometimes(0.5) else [rows, tokens]
    slots = draw.tensor(draw.sizes(own), draw.choice((torch.int32, torch.int64)), written=True)
    if slots.numel() <= FEW:
        chosen = torch.full((slots.numel(),), -1)
        some = list(range(blocks * entries + draw.sometimes(0.05)))
        draw.shuffle(some)
        some = some[: len(chosen)]
        chosen[: len(some)] = torch.tensor(some, dtype=chosen.dtype)
        slots.copy_(chosen.flip(0).view(slots.shape))
    if len(heads) == 1 and eight is None and draw.sometimes(0.3):
        return schema.rotate_slots_, [cache(heads[0], head_dim, dtype), slots, *end], [0]
    outs = [
        draw.tensor(shape(layout, rows, n, tokens, head_dim), dtype, written=True)
        for n in heads[:-1]
    ]
    outs = [*outs, cache(heads[-1], head_dim, dtype), *[None] * (2 - len(heads))]
    if not end[-2] and eight is None and draw.sometimes(0.4):
        return schema.rotate_slots, [*xs, *outs, slots, *end[:-2]], [2, 3]
    values: list[torch.Tensor | None] = [None, None]
    if draw.sometimes(0.7):
        n, width = 1 if "h" not in name else draw.choice((1, 3)), draw.choice((1, 7, 16))
        of = dtype if draw.sometimes(0.95) else draw.choice(DTYPES)
        values = [
            draw.tensor(draw.sizes(shape(layout, rows, n, tokens, width)), of),
            cache(n, width, of),
        ]
    scales: list[torch.Tensor | None] = [None, None]
    if eight is not None:
        counts = heads[-1], None if values[0] is None else n
        scales = [
            None if one is None else draw.tensor([draw.choice((1, one))], torch.float32)
            for one in counts
        ]
    index = None if contiguous else slots
    arguments = [*xs, values[0], *outs, values[1], index, *scales, *end]
    return schema.rotate_slots_extras, arguments, [3, 4, 5]


def results(
    draw: Draw, layout: int, sizes: Sequence[int], heads: Sequence[int]
) -> list[torch.Tensor | None]:
    """Draw y, z and their gradients."""
    (rows, tokens, head_dim), dtype = sizes, draw.choice(DTYPES)
    found: list[torch.Tensor | None] = []
    for _ in range(2):
        made = [
            draw.tensor(draw.sizes(shape(layout, rows, n, tokens, head_dim)), dtype) for n in heads
        ]
        found += [*made, *[None] * (2 - len(made))]
    return found


def angle_gradients(draw: Draw) -> Call:
    layout, (rows, tokens, head_dim), heads, pairs, start = problem(draw)
    # The work grows with these sizes, so huge ones are tested without pairs, that is, without work.
    if max(rows, tokens, *heads) in HUGE:
        pairs, start = 0, 0
    add_index, axes = draw.sometimes(0.7), draw.choice((1, 2))
    if pairs == 0 and draw.sometimes(0.3):
        axes = draw.choice(HUGE)
    sizes = draw.sizes([axes, *angle_sizes(draw, rows, heads), pairs])
    words, turns = draw.words(sizes), draw.words(sizes) if draw.sometimes(0.3) else None
    source = draw.choice((schema.WORDS, schema.WORDS, schema.PHASES))
    if source == schema.PHASES:
        words, turns, axes = given_phases(draw, rows, heads, tokens, pairs, axes)
    options = schema.Options(
        layout, start, draw.sometimes(0.5), draw.choice((0, 2)), add_index, source
    )
    arguments = [
        *results(draw, layout, (rows, tokens, head_dim), heads),
        words,
        turns,
        positions_of(draw, axes, rows, tokens, add_index, False),
        offset_of(draw),
        packed(draw, options),
        draw.sometimes(0.1 if source == schema.PHASES else 0.5),
        draw.sometimes(0.5),
    ]
    return schema.angle_gradients, arguments, []


def gate_gradients(draw: Draw) -> Call:
    layout, (rows, tokens, head_dim), heads, _, start = problem(draw)
    # The work grows with these sizes, so huge ones become 3. A huge head_dim stays: such
    # a head does not fit into memory, so the call fails.
    if rows * tokens * max(heads) != 0:
        rows, tokens, *heads = (3 if n in HUGE else n for n in (rows, tokens, *heads))
    add_index, gate = draw.sometimes(0.7), draw.choice((schema.LOG, schema.SLOPE))
    gates: list[torch.Tensor | None] = []
    for n in heads:
        own = [draw.choice((1, n)), draw.choice((1, head_dim))]
        if gate == schema.LOG:
            own = [draw.choice((1, rows)), own[0], draw.choice((1, tokens)), own[1]]
        gates.append(draw.tensor(draw.sizes(own), draw.choice(DTYPES)))
    options = schema.Options(
        layout, start, direction=draw.choice((0, 2)), add_index=add_index, gate=gate
    )
    arguments = [
        *results(draw, layout, (rows, tokens, head_dim), heads),
        *gates,
        *[None] * (2 - len(gates)),
        positions_of(draw, 1, rows, tokens, add_index, False),
        offset_of(draw),
        packed(draw, options),
    ]
    return schema.gate_gradients, arguments, []


def phases(draw: Draw) -> Call:
    """Draw a call of phase_words or phase_sums, whose tensors are alike."""
    sizes = [draw.size() for _ in range(4)]
    if draw.sometimes(0.2):
        sizes[draw.randrange(4)] = draw.choice((0, 40, 70))
    rows, heads, tokens, pairs = sizes
    back, running = draw.sometimes(0.4), draw.sometimes(0.8)
    dtype = draw.choice(DTYPES[:2]) if back else draw.choice(DTYPES)
    x = draw.tensor(draw.sizes([draw.choice((1, rows)), heads, tokens, pairs]), dtype)
    own = [draw.choice((1, rows)), heads, pairs]
    kind = dtype if back else torch.int64
    start = draw.tensor(draw.sizes(own), kind) if running and draw.sometimes(0.5) else None
    reset = None
    if running and draw.sometimes(0.5):
        reset = draw.tensor(draw.sizes([draw.choice((1, rows)), tokens]), torch.uint8)
        reset = reset.view(torch.bool) if draw.sometimes(0.7) else reset
    if back:
        return schema.phase_sums, [x, start, reset], []
    return schema.phase_words, [x, start, reset, running, draw.sometimes(0.5)], []


# What draws a call, of each kind.
MAKERS = (rotation, angle_gradients, gate_gradients, phases)


def on_ordinary_memory(arguments: list[Any]) -> list[Any] | None:
    """Return contiguous copies of the tensors; None if they are too large for torch or the test."""
    if any(x.numel() > FEW for x in tensors_of(arguments)):
        return None
    try:
        return [tame(value) for value in arguments]
    except RuntimeError:
        return None


def with_one_nan(x: torch.Tensor) -> torch.Tensor:
    """Replace every NaN by the same one, as the sign of a NaN depends on the order of the operands of a sum."""
    return x.masked_fill(x.isnan(), torch.nan) if x.is_floating_point() else x


def holds(call: Call) -> bool:
    """Make the call and fail if its effect is wrong; return whether the operator accepted it."""
    operator, arguments, written = call
    tensors = tensors_of(arguments)
    ordinary = on_ordinary_memory(arguments)
    kept = {id(x): memory_of(x).clone() for x in tensors}
    try:
        made = operator(*arguments)
    except RuntimeError:
        made = None
        taken = False
    else:
        taken = True
        targets = [i for i in written if arguments[i] is not None]
        if ordinary is not None:
            right = operator(*ordinary)
            for got, wanted in zip(made or (), right or (), strict=True):
                assert_same_bits(with_one_nan(got), with_one_nan(wanted))
            for i in targets:
                assert_same_bits(with_one_nan(arguments[i]), with_one_nan(ordinary[i]))
        for x in (arguments[i] for i in targets):
            place = kept[id(x)].as_strided(x.shape, x.stride(), x.storage_offset())
            place.copy_(x)
    for x in tensors:
        assert_same_bits(memory_of(x), kept[id(x)])
    return taken


ANGLES = {"positions": schema.WORDS, "tables": schema.HALF, "phases": schema.PHASES}


def angles_in(source: str, x: torch.Tensor) -> tuple[Any, ...]:
    """Return arguments after q and k whose angles lie in the memory of x, [rows, heads, tokens, channels]."""
    half, some = x.shape[-1] // 2, x[:1, :1, :, : x.shape[-1] // 2]
    words = torch.arange(1, half + 1, device=x.device).mul(2**54).view(1, 1, 1, half)
    angles = {
        "positions": (words, None, x[:, 0, :, 0][None]),
        "tables": (some, x[:1, 1:2, :, :half], None),
        "phases": (some.view(torch.int32), None, None),
    }
    return *angles[source], 0, schema.Options(source=ANGLES[source], add_index=False).pack(), 1.0


def assert_reads_before_it_writes(operators: Any, source: str, x: torch.Tensor) -> None:
    """Assert that a call reads angles before it writes over them: in place, into `out`, and in a cache."""
    wanted = operators.rotate(x, None, *angles_in(source, x))[0]
    slots = torch.arange(x.shape[0] * x.shape[2], device=x.device).view(x.shape[0], -1)
    for call in (
        lambda y, given: operators.rotate_(y, None, *given),
        lambda y, given: operators.rotate_into(x, None, y, None, *given),
        lambda y, given: operators.rotate_slots(x, None, y, None, slots, *given),
        lambda y, given: operators.rotate_slots_(y, slots, *given, [], 0.0),
    ):
        y = x.clone()
        call(y, angles_in(source, y))
        assert_same_bits(y, wanted)


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


def freed_storages(
    of: Callable[[Draw], Call], seeds: int, tamed: bool = False
) -> Iterator[Callable[[], object]]:
    """Yield calls in which the storage of one tensor was freed; assert after each that no other has changed.

    Args:
        of: draws a call.
        seeds: the number of calls.
        tamed: whether all tensors are contiguous, at the start of their storages.
    """
    for seed in range(seeds):
        try:
            operator, arguments, _ = of(Draw(seed))
            if any(x.numel() == 0 or x.numel() > FEW for x in tensors_of(arguments)):
                continue
            plain = [tame(one) for one in arguments]
            operator(*plain)
        except RuntimeError:
            continue
        arguments = plain if tamed else arguments
        others = tensors_of(arguments)
        unread = unread_by(operator, arguments)
        for x in [one for one in others if one is not unread]:
            kept = {id(one): memory_of(one).clone() for one in others}
            yield partial(operator, *replaced(arguments, x, freed(x)))
            for one in others:
                assert_same_bits(memory_of(one), kept[id(one)])
