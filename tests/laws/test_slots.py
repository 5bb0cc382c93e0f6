"""Laws of memory that is given: results go to any view or to a cache, and its entries rotate there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.calls import CASES, VERBS, Call, is_defined
from tests.support.helpers import noise, on
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope.functional import rerotate, rerotate_, rotate, rotate_qk, write_kv

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
    if is_defined(case) and not got.dtype.itemsize == 1:
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
    backend, verb = case["backend"], VERBS[case["verb"]]
    xs, rope, options = Call(case).arguments()
    before = [x.clone() for x in xs]
    wanted = on(backend, verb, *xs, *rope, **options)
    wanted = wanted if len(xs) == 2 else (wanted,)
    outs = [sevens(x.shape, x.dtype, STRIDES[(number + n) % 5]) for n, x in enumerate(xs)]
    expected, versions = [copied(out) for out in outs], [out._version for out in outs]
    out = tuple(outs) if len(xs) == 2 else outs[0]
    found = on(backend, verb, *xs, *rope, out=out, **options)
    for got, out, right, y in zip(found if len(xs) == 2 else (found,), outs, expected, wanted):
        assert got is out
        right.copy_(y)
        assert_written(out, right, case)
    assert_same_bits(xs, before)
    assert all(out._version > version for out, version in zip(outs, versions, strict=True))


@every_case
@pytest.mark.parametrize("contiguous", [False, True], ids=["slots", "contiguous"])
def test_keys_and_values_go_to_a_cache(contiguous: bool, number: int) -> None:
    """Of k alone, or beside q, with values or without, in the dtype of k or in float8."""
    case = CASES[number] | {"verb": CASES[number]["verb"].rstrip("_"), "inverse": False}
    backend, verb, layout = case["backend"], VERBS[case["verb"]], case["layout"]
    call = Call(case)
    xs, rope, options = call.arguments()
    wanted = on(backend, verb, *xs, *rope, **options)
    of_q, of_k = wanted if len(xs) == 2 else (None, wanted)
    q, k = xs if len(xs) == 2 else (None, xs[0])
    if q is None and case["gate"] == "xpos":  # that of keys is the inverse of that of queries
        of_k = on(backend, rotate_qk, k, k, *rope, **options)[1]
    del options["inverse"]
    slots, given = (None, None) if contiguous else own_slots(call, number, number)

    def cache_of(x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, str]:
        if contiguous:
            return sevens(x.shape, dtype or x.dtype, STRIDES[number % len(STRIDES)]), layout
        return cache_for(x, layout, number, dtype)

    def expected_of(x: torch.Tensor, cache: torch.Tensor, letters: str) -> torch.Tensor:
        expected = copied(cache)
        if slots is None:
            expected.copy_(x)
        else:
            write(x, layout, expected, letters, slots)
        return expected

    cache, letters = cache_of(k)
    expected, version = expected_of(of_k, cache, letters), cache._version
    v = v_cache = of_v = None
    if number % 2:
        v = noise(*k.shape[:-1], 7, dtype=k.dtype, seed=number)
        v_cache, _ = cache_of(v)
        of_v = expected_of(v, v_cache, letters)
    into = {"slots": given, **options}
    got = on(backend, write_kv, q, k, v, *rope, cache=(cache, v_cache), **into)
    assert cache._version > version
    assert_written(cache, expected, case)
    if of_q is None:
        assert got is None
    else:
        assert_written(got, of_q.contiguous(), case)
        out = sevens(q.shape, q.dtype, STRIDES[number // 3 % 5])
        assert on(backend, write_kv, q, k, v, *rope, cache=(cache, v_cache), out=out, **into) is out
        right = copied(out)
        right.copy_(got)
        assert_written(out, right, case)
    if v_cache is not None:
        assert_same_bits(base_of(v_cache), base_of(of_v))
    # In float8, the codes are those of a result that is written to a tensor like k.
    codes = torch.empty(k.shape, dtype=torch.float8_e4m3fn)
    into["cache_scale"] = 0.3
    on(backend, write_kv, q, k, None, *rope, cache=(codes, None), **options, cache_scale=0.3)
    cache, letters = cache_of(k, codes.dtype)
    expected = expected_of(codes, cache, letters)
    on(backend, write_kv, q, k, None, *rope, cache=(cache, None), **into)
    assert_same_bits(base_of(cache).view(torch.uint8), base_of(expected).view(torch.uint8))


@every_case
@pytest.mark.parametrize("undo", [False, True], ids=["rotate", "undo"])
def test_entries_rotate_in_place(undo: bool, number: int) -> None:
    """As if gathered, rotated and scattered; every number beside them is what it was."""
    case = CASES[number] | {"verb": "rotate", "act": "none", "gate": "none", "inverse": undo}
    call, layout = Call(case), case["layout"]
    (x,), rope, options = call.arguments()
    slots, given = own_slots(call, number, number + 1)
    cache, letters = cache_for(x, layout, number)
    cache.copy_(noise(*cache.shape, seed=number))
    expected, version = copied(cache), cache._version
    view, there = entries_of(cache, letters, slots)
    x = torch.zeros_like(x)
    oracle.as_bhsd(x, layout).transpose(1, 2)[slots >= 0] = view[there]
    turned = on(case["backend"], rotate, x, *rope, **options)
    write(turned, layout, expected, letters, slots)
    both = (rope[0], None) if undo else (None, rope[0])
    into = {"layout": layout, "slots": given}
    assert on(case["backend"], rerotate_, cache, *both, *rope[1:], **into) is cache
    assert cache._version > version
    assert_written(cache, expected, case)
    # Without slots, keys that have no old or no new rotation are turned once.
    inside, out = x.clone(), torch.empty_like(x)
    for verb, k, more in ((rerotate, x, {}), (rerotate_, inside, {}), (rerotate, x, {"out": out})):
        found = on(case["backend"], verb, k, *both, *rope[1:], layout=layout, **more)
        assert found is {rerotate_: inside}.get(verb, more.get("out", found))
        assert_written(found.clone(), turned.clone(), case)
