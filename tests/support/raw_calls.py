"""Drawn calls of the raw operators: those that public functions make, with any sizes, strides and mistakes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.support import caches, calls
from tests.support.functions import FUNCTIONS
from tests.support.matrix import DTYPES
from tests.support.tolerances import assert_same_bits
from tightrope.ops import schema
from tightrope.ops.eight import FORMATS

# Sizes larger than any memory; torch still makes empty or expanded tensors of these sizes.
HUGE = (2**50, 2**62, 2**63 - 1)


# Strides of dimensions of size 1 or 0, which are never used.
ANY_STRIDE = (0, 1, 7, 2**31, 2**52, *HUGE)


# A tensor of more elements is a view of one element, and the results of a call with it are not
# compared.
FEW = 2**16


MARGIN = 64


class Draw(random.Random):
    """Draws random numbers.

    Attributes:
        eights: the share of caches in 8 bits, which the kernel for CPUs refuses.
    """

    eights = 0.02

    def sometimes(self, share: float) -> bool:
        return self.random() < share


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


# --- calls that public functions make ---------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of each operator of this library, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, list[Any]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tightrope":
            own = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), list(args))
            self.calls.setdefault(func.name().partition("::")[2], []).append((func, own))
        return func(*args, **(kwargs or {}))


# Sizes that differ from each other, so that each can change alone.
SIZES = {"HEADS": 6, "WIDTH": 24, "CHANNELS": {"whole": (22, 0), "slice": (18, 3)}}


@cache
def recorded() -> dict[str, list[tuple[Any, list[Any]]]]:
    """Return the calls of the operators that generated public calls make, forward and backward, by operator."""
    with patch.multiple(calls, **SIZES), Recorder() as mode:
        # Phase words by length are words like others.
        cases = [case for case in calls.CASES[::2] if case["frequencies"] != "by length"]
        for number, case in enumerate(cases):
            # With an f or P, float64 runs the definition.
            wide = case["dtype"] == torch.float64 and {case["act"], case["gate"]} != {"none"}
            case = {**case, "backend": None, "dtype": torch.float32 if wide else case["dtype"]}
            calls.Call(case).derivatives()
            verb = case["verb"].rstrip("_")
            for each in (verb, f"{verb}_", f"{verb} into"):
                calls.Call({**case, "verb": each})()
            caches.check_keys_and_values(case, number, contiguous=number % 3 == 0)
            caches.check_entries(case, number, undo=number % 2 == 0)
    with mode:
        for function in FUNCTIONS.values():
            leaves, learned = function.new_leaves()
            torch.autograd.grad(sum(y.sum() for y in function(**leaves)), [*learned.values()])
    return mode.calls


# --- changes of a call ------------------------------------------------------------------------------


def numbers(count: int, draw: Draw) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


def sized(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return x with other sizes: with what it holds again, or, if they are large, as a view of one element."""
    count = prod(sizes)
    if count > FEW or not x.numel():
        return x.new_ones(1).as_strided(sizes, [0] * len(sizes))
    for dim, size in enumerate(sizes):
        if size != x.shape[dim]:
            x = x.index_select(dim, torch.arange(size) % x.shape[dim])
    return x


def placed(draw: Draw, x: torch.Tensor, written: bool) -> torch.Tensor:
    """Return x with unused memory on both sides, often permuted, sometimes expanded.

    Dimensions of size 1 may have any stride.
    """
    sizes, order = x.shape, list(range(x.dim()))
    if x.numel() == 0 or x.numel() > FEW:
        strides = [draw.choice(ANY_STRIDE) if x.numel() == 0 or n == 1 else 0 for n in sizes]
        return x.new_ones(1).as_strided(sizes, strides)
    if draw.sometimes(0.5):
        draw.shuffle(order)
    strides, step = [0] * x.dim(), 1
    for d in reversed(order):
        if draw.sometimes(0.01 if written else 0.05):
            x = x.narrow(d, 0, 1)  # expanded
            continue
        strides[d] = step
        step *= sizes[d]
    memory = x.new_ones(step + 2 * MARGIN)
    memory.as_strided(x.shape, strides, MARGIN).copy_(x)
    for d, n in enumerate(sizes):
        if n == 1 and draw.sometimes(0.5):
            strides[d] = draw.choice(ANY_STRIDE)
    return memory.as_strided(sizes, strides, MARGIN)


def mistaken(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    """Return x, occasionally with one size changed, or in another dtype."""
    if x.dim() and draw.sometimes(0.04):
        sizes = list(x.shape)
        sizes[draw.randrange(len(sizes))] = draw.choice((0, 1, 2, *HUGE))
        return sized(x, sizes)
    return x.to(draw.choice((*DTYPES, torch.int32))) if draw.sometimes(0.02) else x


def drawn(draw: Draw, beginning: str) -> Call:
    """Draw a call of an operator whose name begins so: with other sizes everywhere, strides, extreme numbers and mistakes."""
    names = [name for name in recorded() if name.startswith(beginning)]
    operator, arguments = draw.choice(recorded()[draw.choice(sorted(names))])
    given = operator._schema.arguments
    written = [i for i, each in enumerate(given) if each.alias_info and each.alias_info.is_write]
    by_name = dict(zip([each.name for each in given], arguments))
    if "values_scale" in by_name and draw.sometimes(draw.eights):
        to = draw.choice(FORMATS)
        for name in ("out_k" if by_name["k"] is not None else "out_q", "out_values"):
            by_name[name] = None if by_name[name] is None else by_name[name].to(to)
        by_name["scale"] = torch.ones(1)
        by_name["values_scale"] = None if by_name["values"] is None else torch.ones(1)
    if by_name.get("offset") is not None and draw.sometimes(0.5):
        by_name["offset"] = draw.choice((0, 3, -(2**62), 2**62, 2**63 - 1, -(2**63)))
    if by_name.get("positions") is not None and draw.sometimes(0.3):
        ids = by_name["positions"]
        by_name["positions"] = numbers(ids.numel(), draw).view(ids.shape).to(ids.dtype)
    if "options" in by_name and draw.sometimes(0.08):
        flipped = by_name["options"] ^ 1 << draw.randrange(63)
        by_name["options"] = draw.choice((flipped, draw.getrandbits(63), -1, -(2**63)))
    arguments = list(by_name.values())
    sizes = sorted({n for x in tensors_of(arguments) for n in x.shape} - {0, 1})
    some = {n: draw.choice((0, 1, 1, 2, 3, 5, 9)) for n in sizes if draw.sometimes(0.2)}
    # The work of gradients grows with these sizes: they are huge without pairs, and gates' only where a head is.
    huge = sizes if "gate_q" not in by_name else [by_name["y"].shape[-1]]
    some |= {n: draw.choice(HUGE) for n in huge if draw.sometimes(0.03)}
    if "words" in by_name and set(HUGE) & set(some.values()):
        some[by_name["words"].shape[-1]] = 0

    def changed(x: torch.Tensor, written: bool = False) -> torch.Tensor:
        x = mistaken(draw, sized(x, [some.get(n, n) for n in x.shape]))
        return placed(draw, x, written)

    for i, (name, value) in enumerate(by_name.items()):
        if isinstance(value, list):
            arguments[i] = [changed(x) for x in value]
        elif isinstance(value, torch.Tensor):
            # Slots that are named again would have one of several results, and operators need words that are contiguous.
            arguments[i] = changed(value, i in written or name == "slots")
            if name == "slots" and value.numel() and arguments[i].numel() <= FEW:
                flat = arguments[i].flatten().tolist()
                once = [-1 if each in flat[:at] else each for at, each in enumerate(flat)]
                arguments[i].copy_(torch.tensor(once).view(arguments[i].shape))
            elif value.dtype == torch.int64 and name in ("primary", "secondary", "words", "turns"):
                arguments[i] = sized(value, [some.get(n, n) for n in value.shape])
    return operator, arguments, written


def rotation(draw: Draw) -> Call:
    return drawn(draw, "rotate")


def angle_gradients(draw: Draw) -> Call:
    return drawn(draw, "angle_gradients")


def gate_gradients(draw: Draw) -> Call:
    return drawn(draw, "gate_gradients")


def phases(draw: Draw) -> Call:
    return drawn(draw, draw.choice(("phase_words", "phase_sums")))


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
    if any(each.name == "extras" for each in operator._schema.arguments):
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
            arguments = [tame(one) for one in arguments] if tamed else arguments
            with warnings.catch_warnings():  # that an extreme number overflows
                warnings.simplefilter("ignore")
                operator(*arguments)
        except RuntimeError:
            continue
        others = tensors_of(arguments)
        unread = unread_by(operator, arguments)
        for x in [one for one in others if one is not unread]:
            kept = {id(one): memory_of(one).clone() for one in others}
            yield partial(operator, *replaced(arguments, x, freed(x)))
            for one in others:
                assert_same_bits(memory_of(one), kept[id(one)])
