"""Calls of tests/support/calls.py that write keys and values to caches, or rotate entries of one.

The results are those of a rotation into new tensors, placed by indexing; every number beside them is what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.support import oracle
from tests.support.calls import VERBS, Call, is_defined
from tests.support.helpers import noise, on
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope.functional import rerotate, rerotate_, rotate, rotate_qk, write_kv

ENTRIES, BLOCKS = 5, 3
# The layout of a cache with blocks, where it is not that of x.
WITH_BLOCKS = {"thd": "bshd", "sd": "bsd"}
STRIDES = ("contiguous", "inside", "every other channel", "reversed", "padded blocks")


def sevens(shape: Any, like: torch.Tensor, kind: int, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor of sevens with strides of a kind, on the device of a tensor, by default in its dtype."""

    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, 7.0, device=like.device).to(dtype or like.dtype)

    return {
        "contiguous": lambda: full(*shape),
        "inside": lambda: full(*shape[:-1], shape[-1] + 5)[..., 3:-2],
        "every other channel": lambda: full(*shape[:-1], 2 * shape[-1])[..., ::2],
        "reversed": lambda: full(*shape[::-1]).permute(*range(len(shape))[::-1]),
        "padded blocks": lambda: full(shape[0], torch.Size(shape[1:]).numel() + 11)[
            :, 4:-7
        ].unflatten(1, shape[1:]),
    }[STRIDES[kind % len(STRIDES)]]()


def base_of(x: torch.Tensor) -> torch.Tensor:
    return x if x._base is None else x._base


def copied(x: torch.Tensor) -> torch.Tensor:
    """Return the view of a copy of the base of x that x is of its base."""
    return base_of(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def assert_written(got: torch.Tensor, wanted: torch.Tensor, case: Mapping[str, Any]) -> None:
    """Assert that two views hold the same, and that the memory beside them does."""
    if is_defined(case) and not got.dtype.itemsize == 1:
        bound = {8: "float64 ways", 4: "float32 ways"}.get(got.element_size())
        assert_near(got, wanted, bound or f"table rotation, {got.dtype}")
        wanted.copy_(got)
    assert_same_bits(base_of(got), base_of(wanted))


class Cached:
    """A call without verb or device of its own, and slots of a cache for its tokens.

    Attributes:
        xs, rope, options: its arguments.
        slots, given: the slots as (rows, tokens), and in the form to pass; None for a contiguous cache.
    """

    def __init__(self, case: Mapping[str, Any], number: int, device: Any, seed: int | None) -> None:
        self.case, self.number, self.layout = case, number, case["layout"]
        call = Call(case)
        call.leaves = {name: x.to(device) for name, x in call.leaves.items()}
        with torch.device(device):
            self.xs, self.rope, self.options = call.arguments()
        self.slots = self.given = None
        if seed is not None:
            rows, _, tokens, _ = oracle.as_bhsd(self.xs[0], self.layout).shape
            generator = torch.Generator().manual_seed(seed)
            slots = torch.randperm(BLOCKS * ENTRIES, generator=generator)[: rows * tokens]
            slots[:: 3 + seed % 3] = -1
            self.slots = slots = slots.view(rows, tokens).to(device)
            self.given = (slots.int() if number % 3 else slots)[
                0 if rows == 1 and number % 4 else ...
            ]

    def on(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Call a function with the backend of the case."""
        return on(self.case["backend"], function, *arguments, **options)

    def cache_of(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        """Return a cache of sevens for the tokens of a tensor, and its layout; its strides depend on the number."""
        if self.slots is None:
            return sevens(like.shape, like, self.number, dtype), self.layout
        letters = self.layout.replace("t", "s")
        if self.number % 2:
            letters = WITH_BLOCKS.get(self.layout, letters)
        blocks = BLOCKS if "b" in letters else 1
        sizes = {"b": blocks, "s": ENTRIES * BLOCKS // blocks, "d": like.shape[-1]}
        sizes["h"] = like.shape[self.layout.index("h")] if "h" in letters else 1
        return sevens([sizes[letter] for letter in letters], like, self.number, dtype), letters

    def entries_of(self, cache: torch.Tensor, letters: str) -> Any:
        """Return a view of a cache as (blocks, heads, entries, channels), and the index of the entries of slots."""
        view, own = oracle.as_bhsd(cache, letters), self.slots[self.slots >= 0]
        return view, (own // view.shape[2], slice(None), own % view.shape[2])

    def with_(self, x: torch.Tensor, cache: torch.Tensor, letters: str) -> torch.Tensor:
        """Return a copy of a cache to which each token of x is copied that has a place."""
        expected = copied(cache)
        if self.slots is None:
            expected.copy_(x)
        else:
            view, there = self.entries_of(expected, letters)
            view[there] = oracle.as_bhsd(x, self.layout).transpose(1, 2)[self.slots >= 0]
        return expected


def check_keys_and_values(
    case: Mapping[str, Any], number: int, contiguous: bool, device: Any = "cpu"
) -> None:
    """Write k alone, or beside q, with values or without, in the dtype of k and in float8."""
    verb = case["verb"].rstrip("_")
    case = {**case, "verb": verb, "inverse": False}
    own = Cached(case, number, device, None if contiguous else number)
    xs, rope, options = own.xs, own.rope, own.options
    wanted = own.on(VERBS[verb], *xs, *rope, **options)
    of_q, of_k = wanted if len(xs) == 2 else (None, wanted)
    q, k = xs if len(xs) == 2 else (None, xs[0])
    if q is None and case["gate"] == "xpos":  # that of keys is the inverse of that of queries
        of_k = own.on(rotate_qk, k, k, *rope, **options)[1]
    del options["inverse"]
    cache, letters = own.cache_of(k)
    expected, version = own.with_(of_k, cache, letters), cache._version
    v = v_cache = of_v = None
    if number % 2:
        v = noise(*k.shape[:-1], 7, dtype=k.dtype, seed=number).to(device)
        v_cache, _ = own.cache_of(v)
        of_v = own.with_(v, v_cache, letters)
    into = {"slots": own.given, **options}
    got = own.on(write_kv, q, k, v, *rope, cache=(cache, v_cache), **into)
    assert cache._version > version
    assert_written(cache, expected, case)
    if of_q is None:
        assert got is None
    else:
        assert_written(got, of_q.contiguous(), case)
        # q may be its own out.
        out = q.clone() if number % 4 == 0 else sevens(q.shape, q, number // 3)
        given, right = out if number % 4 == 0 else q, copied(out)
        assert own.on(write_kv, given, k, v, *rope, cache=(cache, v_cache), out=out, **into) is out
        right.copy_(got)
        assert_written(out, right, case)
    if v_cache is not None:
        assert_same_bits(base_of(v_cache), base_of(of_v))
    # In float8, by a scale each, codes are those of a result in new memory; of float32, those of torch's conversion.
    eight = (torch.float8_e4m3fn, torch.float8_e5m2)[number // 2 % 2]
    of_keys, of_values = (torch.tensor(x, device=device) for x in (0.3, 1.7))
    most = torch.finfo(eight).max
    codes = torch.empty(k.shape, dtype=eight, device=device)
    own.on(write_kv, q, k, None, *rope, cache=(codes, None), cache_scale=of_keys, **options)
    if k.dtype == torch.float32 and not is_defined(case):
        assert torch.equal(codes.float(), (of_k / of_keys).clamp(-most, most).to(eight).float())
    cache, letters = own.cache_of(k, eight)
    expected = own.with_(codes, cache, letters)
    into["cache_scale"] = of_keys
    if v is not None:
        v_cache, _ = own.cache_of(v, eight)
        of_v = own.with_((v.float() / of_values).clamp(-most, most).to(eight), v_cache, letters)
        into["cache_scale"] = of_keys, of_values
    got = own.on(write_kv, q, k, v, *rope, cache=(cache, v_cache), **into)
    if of_q is not None:
        assert_written(got, of_q.contiguous(), case)
    for found, right in ((cache, expected), (v_cache, of_v)):
        if found is not None:
            assert_same_bits(*(base_of(x).view(torch.uint8) for x in (found, right)))


def check_entries(case: Mapping[str, Any], number: int, undo: bool, device: Any = "cpu") -> None:
    """Rotate entries as if they were gathered, rotated and scattered."""
    case = {**case, "verb": "rotate", "act": "none", "gate": "none", "inverse": undo}
    own = Cached(case, number, device, number + 1)
    (x,), rope = own.xs, own.rope
    cache, letters = own.cache_of(x)
    cache.copy_(noise(*cache.shape, seed=number))
    version, (view, there) = cache._version, own.entries_of(cache, letters)
    x = torch.zeros_like(x)
    oracle.as_bhsd(x, own.layout).transpose(1, 2)[own.slots >= 0] = view[there]
    turned = own.on(rotate, x, *rope, **own.options)
    expected = own.with_(turned, cache, letters)
    both = (rope[0], None) if undo else (None, rope[0])
    into = {"layout": own.layout, "slots": own.given}
    assert own.on(rerotate_, cache, *both, *rope[1:], **into) is cache
    assert cache._version > version
    assert_written(cache, expected, case)
    # Without slots, keys that have no old or no new rotation are turned once.
    inside, out = x.clone(), torch.empty_like(x)
    for verb, k, more in ((rerotate, x, {}), (rerotate_, inside, {}), (rerotate, x, {"out": out})):
        found = own.on(verb, k, *both, *rope[1:], layout=own.layout, **more)
        assert found is {rerotate_: inside}.get(verb, more.get("out", found))
        assert_written(found.clone(), turned.clone(), case)
