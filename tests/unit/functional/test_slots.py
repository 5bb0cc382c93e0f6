"""Particular calls that write to given tensors (`out`), to entries of a paged cache (`slots`), or rotate them.

tests/laws/test_slots.py has what holds for every call; test_refusals.py beside this file what is refused.
"""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.support import helpers
from tests.support.helpers import on
from tests.support.matrix import every_backend, needs_kernel
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.frequencies import YaRN
from tightrope.functional import rerotate, rerotate_, rotate, rotate_qk, write_kv
from tightrope.ops import schema

SPEC = RopeSpec(12, rotary_dim=8, start=2)
HEADS, TOKENS = 3, 5
both_backends = pytest.mark.parametrize("backend", [None, "reference"])
F32 = torch.float32


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return helpers.noise(*shape, seed=seed, dtype=dtype)


# --- out ------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("act", [None, "silu"])
def test_an_input_may_be_its_own_out(act: str | None, layout: str, backend: str) -> None:
    """q is rotated in place while k goes to another slice of its buffer, also with an act; there may be no k."""
    q, buffer, options = noise(2, 3, 5, 12), noise(2, 3, 15, 12), {"layout": layout, "act": act}
    k = buffer[:, :, 10:]
    wanted = on(backend, rotate_qk, q, k, SPEC, 3, **options)
    for given in (k, None):
        out = q.clone(), None if given is None else buffer[:, :, 2:7]
        found = on(backend, rotate_qk, out[0], given, SPEC, 3, out=out, **options)
        assert found[0] is out[0]
        assert found[1] is out[1]
        assert_same_bits([y for y in found if y is not None], wanted if given is k else wanted[:1])


def test_compiled_code_may_drop_the_copy_of_an_input() -> None:
    """Inductor drops a clone whose only use is to be rotated into the tensor that it copies."""
    x = noise(2, 3, 5, 12)
    wanted = rotate(x, SPEC, 3)

    @torch.compile
    def through_a_copy(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.clone(), SPEC, 3, out=x)

    assert_same_bits([through_a_copy(x), x], [wanted, wanted])


def test_the_raw_operator_of_out() -> None:
    x, raw = noise(2, 3, 5, 12), torch.zeros(2, 3, 5, 12)
    options = schema.Options(layout=4, start=2).pack()
    rest = (SPEC.at().angles.words, None, None, 9, options, 1.0)
    for one, out in zip(x, raw):
        schema.rotate_into(one, None, out, None, *rest)
    assert_same_bits(raw, rotate(x, SPEC, 9))
    torch.library.opcheck(schema.rotate_into, (x[0].clone(), None, raw[0].clone(), None, *rest))
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        schema.rotate_into(x[0].clone().requires_grad_(), None, raw[0], None, *rest)
    with pytest.raises(RuntimeError, match="memory overlaps"):
        schema.rotate_into(x[0, :, :4], None, x[0, :, 1:], None, *rest)


# --- a cache --------------------------------------------------------------------------------------


def some_slots(count: int, tokens: int) -> torch.Tensor:
    """Return distinct slots in random order, of which some are -1."""
    found = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:tokens]
    found[::4] = -1
    return found


def written(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy of a cache (blocks, entries, heads, channels) with tokens (tokens, heads, channels) in it."""
    flat, there = cache.flatten(0, 1).clone(), slots >= 0
    flat[slots[there]] = x[there]
    return flat.view(cache.shape)


@both_backends
@pytest.mark.parametrize("layout", ["thd", "bhsd"])
def test_latent_attention(layout: str, backend: str | None) -> None:
    """The tail of q in place, the key that heads share into its part of the cache, the latent beside it, in one call."""
    rank, nope, rope, rows = 6, 4, 8, 1 if layout == "thd" else 2
    spec, count = RopeSpec(rope, interleaved=True), rows * TOKENS
    q, latent = noise(count, HEADS, nope + rope), noise(count, 1, rank + rope, seed=1)
    cache, slots = torch.full((4, 5, 1, rank + rope), 7.0), some_slots(20, count)
    pair = q[..., nope:], latent[..., rank:]
    turned, k = on(backend, rotate_qk, *pair, spec, slots.abs(), layout="thd")
    of_q = torch.cat((q[..., :nope], turned), -1)
    expected = written(torch.cat((latent[..., :rank], k), -1), cache, slots)
    tail, key, paged = q[..., nope:], latent, cache
    if layout == "bhsd":
        tail, key = (x.unflatten(0, (rows, TOKENS)).transpose(1, 2) for x in (tail, key))
        paged, slots = cache.transpose(1, 2), slots.view(rows, TOKENS)
    caches = paged[..., rank:], paged[..., :rank]
    xs = tail, key[..., rank:], key[..., :rank]
    options = {"layout": layout, "cache": caches, "slots": slots, "out": tail}
    assert on(backend, write_kv, *xs, spec, slots.abs(), **options) is tail
    assert_same_bits([q, cache], [of_q, expected])


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "threads"),
    [(64, 1, 2, 1), (1, 512, 8, 2), (6, 300, 2, 2), (300, 2, 16, 2)],
)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_large_calls_and_threads(
    dtype: torch.dtype, rows: int, tokens: int, heads: int, threads: int
) -> None:
    """Tiles, heads divided among threads, rows that share angles, and rows of one token each."""
    spec, count = RopeSpec(64), rows * tokens + 64
    x, v = noise(rows, tokens, heads, 64, dtype=dtype), noise(rows, tokens, 2, 16, dtype=dtype)
    slots = torch.randperm(count)[: rows * tokens].view(rows, tokens)
    slots[0, 0] = slots[-1, -1] = -1
    torch.set_num_threads(threads)
    for where in (None, positions.per_row(torch.arange(rows))):
        wanted = rotate(x, spec, where, layout="bshd")
        caches = [torch.zeros(1, count, *y.shape[2:], dtype=dtype) for y in (x, v)]
        expected = [
            written(y.flatten(0, 1), cache, slots.flatten())
            for y, cache in zip((wanted, v), caches, strict=True)
        ]
        write_kv(None, x, v, spec, where, layout="bshd", cache=tuple(caches), slots=slots)
        assert_same_bits(caches, expected)


@both_backends
def test_nothing_to_write(backend: str | None) -> None:
    for tokens, entries in ((TOKENS, 4), (TOKENS, 0), (0, 4), (0, 0)):
        q, k = noise(tokens, 4, 12), noise(tokens, HEADS, 12)
        cache, slots = torch.full((3, entries, HEADS, 12), 7.0), torch.full((tokens,), -1)
        into = {"cache": (cache, None), "slots": slots}
        new = on(backend, write_kv, q, k, None, SPEC, layout="thd", **into)
        assert torch.equal(new, on(backend, rotate, q, SPEC, layout="thd"))
        assert (cache == 7.0).all()


@both_backends
def test_one_of_several_tokens_wins(backend: str | None) -> None:
    k, cache = noise(TOKENS, HEADS, 12), torch.zeros(4, HEADS, 12)
    into = {"cache": (cache, None), "slots": torch.full((TOKENS,), 2)}
    on(backend, write_kv, None, k, None, SPEC, layout="thd", **into)
    keys = on(backend, rotate, k, SPEC, layout="thd")
    assert any(torch.equal(cache[2], one) for one in keys)
    assert (cache[[0, 1, 3]] == 0).all()


def test_tables_of_another_library() -> None:
    k, cache, slots = noise(TOKENS, HEADS, 12), torch.zeros(3, 6, HEADS, 12), some_slots(18, TOKENS)
    at = RopeSpec(12).at(torch.arange(TOKENS), stack="transformers")
    expected = written(rotate(k, at, layout="thd"), cache, slots)
    write_kv(None, k, None, at, layout="thd", cache=(cache, None), slots=slots)
    assert_same_bits(cache, expected)
    assert_same_bits(rerotate(k, None, at, layout="thd"), rotate(k, at, layout="thd"))


@both_backends
def test_queries_and_keys_of_different_kinds(backend: str | None) -> None:
    """Two calls run; the keys and values go to slots that were read before the first one wrote over them."""
    memory = torch.zeros(2 * TOKENS * 12, dtype=torch.int32)
    q = memory.view(F32).view(TOKENS, 2, 12)
    slots = memory[:TOKENS]
    slots.copy_(torch.tensor([4, 2, 0, 7, 9]))
    k, kept = noise(TOKENS, HEADS, 12), slots.clone()
    v = k[:, :1] + 1
    wanted = on(backend, rotate, q.clone(), SPEC, layout="thd", act="silu")
    caches = [torch.zeros(1, 12, heads, 12) for heads in (HEADS, 1)]
    keys = on(backend, rotate, k, SPEC, layout="thd")
    expected = [written(x, cache, kept) for x, cache in zip((keys, v), caches, strict=True)]
    into = {"cache": tuple(caches), "slots": slots, "out": q, "act": ("silu", None)}
    on(backend, write_kv, q, k, v, SPEC, layout="thd", **into)
    assert_same_bits([q, *caches], [wanted, *expected])


@both_backends
@pytest.mark.parametrize("act", [None, ("silu", None)], ids=str)
def test_a_part_of_a_contiguous_cache_that_holds_them_already(
    act: object, backend: str | None
) -> None:
    """Keys rotate there, values stay, and q may be a slice of the same projection as both."""
    fused, given = noise(2, TOKENS, 8, 12), noise(2, TOKENS, 8, 12)
    wanted = fused.clone()
    pair = on(backend, rotate_qk, fused[:, :, :4], fused[:, :, 4:6], SPEC, layout="bshd", act=act)
    wanted[:, :, :4], wanted[:, :, 4:6] = pair
    given.copy_(fused)
    q, k, v = given.split((4, 2, 2), 2)
    into = {"cache": (k, v), "layout": "bshd", "act": act, "out": q}
    assert on(backend, write_kv, q, k, v, SPEC, **into) is q
    assert_same_bits(given, wanted)


# --- entries --------------------------------------------------------------------------------------


@both_backends
def test_entries_move(backend: str | None) -> None:
    """A context shift of some entries, and a rescale in mid-conversation of all of them."""
    spec, scaled = RopeSpec(16), RopeSpec(16, scaling=YaRN(4.0, original_max_position=32))
    before, some, every = noise(8, 5, 2, 16), torch.tensor([31, 7, 12, -1, 38]), torch.arange(40)
    for to, slots, shift in ((spec, some, 5), (scaled, every, 0)):
        at, cache = slots.clamp(0), before.clone()
        move = (spec, to, at, at - shift if shift else None)
        keys = on(backend, rerotate, before.flatten(0, 1)[at], *move, layout="thd")
        on(backend, rerotate_, cache, *move, layout="thd", slots=slots)
        assert_same_bits(cache, written(keys, before, slots))


@both_backends
def test_more_rows_than_a_loop_can_visit(backend: str | None) -> None:
    """Rows without tokens, of which there may be any number, take no time."""
    cache, slots = noise(0, HEADS, 3, 12), torch.empty(2**50, 0, dtype=torch.int64)
    assert on(backend, rerotate_, cache, None, SPEC, 3, slots=slots) is cache


@needs_kernel
def test_more_heads_than_a_loop_can_visit() -> None:
    """A cache without entries takes none of them. The definition would make them, and has no memory for that."""
    cache, slots = torch.empty(1, 2**55, 0, 12), torch.tensor([-1, -1])
    assert rerotate_(cache, None, SPEC, 3, slots=slots) is cache


# --- the compiler and the raw operator ------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("sliced", ["inside", "outside"])
def test_compiled(sliced: str, backend: str) -> None:
    """Keys, values and entries. Where the number of blocks changes, Inductor needs slices that are made outside
    (docs/serve.md)."""

    def step(q, k, v, both, slots, ids):
        cache, v_cache = (both[..., :12], both[..., 13:]) if sliced == "inside" else both
        q = write_kv(q, k, v, SPEC, ids, layout="thd", cache=(cache, v_cache), slots=slots)
        rerotate_(cache, None, SPEC, ids, layout="thd", slots=slots)
        return q + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    q, k, v = (noise(TOKENS, *size) for size in ((4, 12), (HEADS, 12), (HEADS, 7)))
    slots, ids = some_slots(12, TOKENS), torch.arange(TOKENS) + 7
    for blocks in (4,) if sliced == "inside" else (4, 5, 6):
        caches = [noise(blocks, 3, HEADS, 20) for _ in range(2)]
        found = []
        for run, cache in zip((compiled, step), caches, strict=True):
            both = cache if sliced == "inside" else (cache[..., :12], cache[..., 13:])
            found.append(run(q, k, v, both, slots, ids))
        assert_same_bits([found[0], caches[0]], [found[1], caches[1]])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_contiguous_cache_in_compiled_code(backend: str) -> None:
    def step(q, k, v, keys, values, ids):
        here = keys[:, 2:7], values[:, 2:7]
        q = write_kv(q, k, v, SPEC, ids, layout="bshd", cache=here)
        write_kv(None, k, None, SPEC, ids, layout="bshd", cache=(keys[:, 7:], None))
        return q + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    q, k, v = (noise(2, TOKENS, *size) for size in ((4, 12), (HEADS, 12), (HEADS, 7)))
    found = []
    for run in (compiled, step):
        caches = noise(2, 12, HEADS, 12), noise(2, 12, HEADS, 7)
        found.append([run(q, k, v, *caches, torch.arange(TOKENS) + 7), *caches])
    assert_same_bits(*found)


def test_compiled_code_makes_no_buffer_of_the_size_of_the_cache() -> None:
    def step(k, cache, slots):
        write_kv(None, k + 1, None, SPEC, 3, layout="thd", cache=(cache, None), slots=slots)
        return cache[:2] * 2

    k, cache, slots = noise(TOKENS, HEADS, 12), torch.zeros(1001, HEADS, 12), torch.arange(TOKENS)
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), k, cache, slots)
    assert "rotate_slots" in code
    made = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\)", code)
    assert made
    assert all("1001" not in shape for shape in made)


def test_the_raw_operator() -> None:
    k, v = noise(TOKENS, HEADS, 12), noise(TOKENS, HEADS, 7)
    cache, v_cache = torch.zeros(4, 3, HEADS, 12), torch.zeros(4, 3, HEADS, 7)
    slots, words = torch.arange(TOKENS) * 2, SPEC.at().angles.words
    options = schema.Options(schema.LAYOUTS.index("thd"), start=2)
    rest = (slots, None, None, words, None, None, 0, options.pack(), 1.0, [], 0.0)
    torch.library.opcheck(schema.rotate_slots_extras, (k, None, v, cache, None, v_cache, *rest))
    given = [k, None, None, cache, None, None, *rest]
    back = options._replace(direction=schema.TRANSPOSE).pack()
    # For each error, the numbers of the wrong arguments, and their values.
    for text, change in {
        "the raw operator has no gradient": {0: k.clone().requires_grad_()},
        "slots must be -1 or": {6: slots + 9},
        "slots must be int32 or": {6: slots[1:]},
        "memory overlaps": {3: k, 6: slots // 2},
        "values must come": {2: v},
        "values must have": {2: v, 5: v_cache[1:]},
        "and takes no scales": {7: torch.ones(1)},
        "slots have no gradient": {13: back},
    }.items():
        with pytest.raises(RuntimeError, match=text):
            schema.rotate_slots_extras(*(change.get(i, one) for i, one in enumerate(given)))
    assert not cache.any()
    assert not v_cache.any()
