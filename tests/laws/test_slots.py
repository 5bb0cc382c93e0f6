"""Laws of memory that is given: results go to any view or to entries of a cache, and entries rotate there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.calls import CASES, VERBS, Call
from tests.support.helpers import noise
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope.functional import rotate, rotate_

ENTRIES, BLOCKS = 5, 3
# The layout of a cache with blocks, where it is not that of x.
WITH_BLOCKS = {"thd": "bshd", "sd": "bsd"}
STRIDES = ("contiguous", "inside", "every other channel", "reversed", "padded blocks")


def every_case(test: Callable[..., None]) -> Callable[..., None]:
    numbers = pytest.mark.parametrize("number", range(len(CASES)))
    return needs_kernel(pytest.mark.one_in(3)(numbers(test)))


def sevens(shape: Any, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Return a tensor of sevens with these strides."""

    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, 7.0).to(dtype)

    if kind == "inside":
        return full(*shape[:-1], shape[-1] + 5)[..., 3:-2]
    if kind == "every other channel":
        return full(*shape[:-1], 2 * shape[-1])[..., ::2]
    if kind == "reversed":
        return full(*shape[::-1]).permute(*range(len(shape))[::-1])
    if kind == "padded blocks":
        size = torch.Size(shape[1:])
        return full(shape[0], size.numel() + 11)[:, 4:-7].unflatten(1, size)
    return full(*shape)


def cache_for(
    like: torch.Tensor, layout: str, number: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, str]:
    """Return a cache of sevens for the tokens of a tensor, and its layout; its strides depend on a number."""
    letters = layout.replace("t", "s")
    if number % 2:
        letters = WITH_BLOCKS.get(layout, letters)
    blocks = BLOCKS if "b" in letters else 1
    sizes = {"b": blocks, "s": ENTRIES * BLOCKS // blocks, "d": like.shape[-1]}
    sizes["h"] = like.shape[layout.index("h")] if "h" in letters else 1
    shape = [sizes[letter] for letter in letters]
    return sevens(shape, dtype or like.dtype, STRIDES[number % len(STRIDES)]), letters


def base_of(x: torch.Tensor) -> torch.Tensor:
    return x if x._base is None else x._base


def copied(x: torch.Tensor) -> torch.Tensor:
    """Return the view of a copy of the base of x that x is of its base."""
    return base_of(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def entries_of(cache: torch.Tensor, letters: str, slots: torch.Tensor) -> Any:
    """Return a view of a cache as (blocks, heads, entries, channels), and the index of the entries of slots."""
    view = oracle.as_bhsd(cache, letters)
    own = slots[slots >= 0]
    return view, (own // view.shape[2], slice(None), own % view.shape[2])


def write(x: torch.Tensor, layout: str, cache: torch.Tensor, letters: str, slots: Any) -> None:
    """Copy each token of x that has a slot to its entry."""
    view, there = entries_of(cache, letters, slots)
    view[there] = oracle.as_bhsd(x, layout).transpose(1, 2)[slots >= 0]


def some_slots(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Return distinct slots in random order; some are -1."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randperm(BLOCKS * ENTRIES, generator=generator)[: rows * tokens]
    found[:: 3 + seed % 3] = -1
    return found.view(rows, tokens)


def assert_written(got: torch.Tensor, wanted: torch.Tensor, case: Mapping[str, Any]) -> None:
    """Assert that two views hold the same, and that the memory beside them does."""
    if case["backend"] == "reference" and not got.dtype.itemsize == 1:
        # The rounding of torch's own functions depends on strides.
        bound = {8: "float64 ways", 4: "float32 ways"}.get(got.element_size())
        assert_near(got, wanted, bound or f"table rotation, {got.dtype}")
        wanted.copy_(got)
    assert_same_bits(base_of(got), base_of(wanted))


def own_slots(call: Call, number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots for the tokens of a call as (rows, tokens), and in the form to pass."""
    q, layout = call.leaves["q"], call.case["layout"]
    rows, _, tokens, _ = oracle.as_bhsd(q, layout).shape
    slots = some_slots(rows, tokens, seed)
    return slots, (slots.int() if number % 3 else slots)[0 if rows == 1 and number % 4 else ...]


@every_case
def test_results_go_to_any_memory(number: int) -> None:
    """Every number beside it is what it was, and so are the inputs."""
    case = CASES[number] | {"verb": CASES[number]["verb"].rstrip("_")}
    xs, rope, options = Call(case).arguments()
    before, verb = [x.clone() for x in xs], VERBS[case["verb"]]
    wanted = verb(*xs, *rope, **options)
    wanted = wanted if len(xs) == 2 else (wanted,)
    outs = [sevens(x.shape, x.dtype, STRIDES[(number + n) % 5]) for n, x in enumerate(xs)]
    expected, versions = [copied(out) for out in outs], [out._version for out in outs]
    found = verb(*xs, *rope, out=tuple(outs) if len(xs) == 2 else outs[0], **options)
    for got, out, right, y in zip(found if len(xs) == 2 else (found,), outs, expected, wanted):
        assert got is out
        right.copy_(y)
        assert_written(out, right, case)
    assert_same_bits(xs, before)
    assert all(out._version > version for out, version in zip(outs, versions, strict=True))


@every_case
def test_results_go_to_slots(number: int) -> None:
    """Of x, or of k beside q, with values or without, in the dtype of x or in float8."""
    case = CASES[number] | {"verb": CASES[number]["verb"].rstrip("_")}
    call, layout = Call(case), case["layout"]
    xs, rope, options = call.arguments()
    k, verb = xs[-1], VERBS[case["verb"]]
    slots, given = own_slots(call, number, number)
    wanted = verb(*xs, *rope, **options)
    q = [wanted[0]] if len(xs) == 2 else []
    wanted = wanted[-1] if q else wanted
    cache, letters = cache_for(k, layout, number)
    expected, version = copied(cache), cache._version
    write(wanted, layout, expected, letters, slots)
    out = (torch.empty_like(xs[0]), cache) if q else cache
    more: dict[str, Any] = {"slots": given}
    if number % 2:
        v = noise(*k.shape[:-1], 7, dtype=k.dtype, seed=number)
        v_cache, _ = cache_for(v, layout, number)
        of_values = copied(v_cache)
        write(v, layout, of_values, letters, slots)
        more["values"] = v, v_cache
    got = verb(*xs, *rope, out=out, **more, **options)
    assert (got[-1] if q else got) is cache
    assert cache._version > version
    assert_written(cache, expected, case)
    if q:
        assert_written(got[0], q[0].contiguous(), case)
    if number % 2:
        assert_same_bits(base_of(v_cache), base_of(of_values))
    # In float8, the codes are those of a result that is written to a tensor like x.
    codes = torch.empty(k.shape, dtype=torch.float8_e4m3fn)
    out = (torch.empty_like(xs[0]), codes) if q else codes
    verb(*xs, *rope, out=out, scale=0.3, **options)
    cache, letters = cache_for(k, layout, number, codes.dtype)
    expected = copied(cache)
    write(codes, layout, expected, letters, slots)
    out = (torch.empty_like(xs[0]), cache) if q else cache
    verb(*xs, *rope, out=out, slots=given, scale=0.3, **options)
    assert_same_bits(base_of(cache).view(torch.uint8), base_of(expected).view(torch.uint8))


@every_case
def test_entries_rotate_in_place(number: int) -> None:
    """As if gathered, rotated and scattered; every number beside them is what it was."""
    case = CASES[number] | {"verb": "rotate"}
    call, layout = Call(case), case["layout"]
    (x,), rope, options = call.arguments()
    slots, given = own_slots(call, number, number + 1)
    cache, letters = cache_for(x, layout, number)
    cache.copy_(noise(*cache.shape, seed=number))
    expected, version = copied(cache), cache._version
    view, there = entries_of(cache, letters, slots)
    x = torch.zeros_like(x)
    oracle.as_bhsd(x, layout).transpose(1, 2)[slots >= 0] = view[there]
    write(rotate(x, *rope, **options), layout, expected, letters, slots)
    assert rotate_(cache, *rope, slots=given, **options) is cache
    assert cache._version > version
    assert_written(cache, expected, case)
