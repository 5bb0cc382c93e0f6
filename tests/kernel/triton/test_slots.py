"""The Triton kernels write into slots of a cache: the bits of the rotation alone, placed by a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.helpers import noise
from tests.support.triton.cases import (
    DEVICE,
    needs_triton,
    on_this_device,
    operators,
    use_programs,
    words,
)
from tightrope.activations import ACTS, RMS_NORM
from tightrope.ops.schema import LAYOUTS, LOG, TRANSPOSE, Options

__all__ = ["on_this_device"]

pytestmark = [needs_triton, pytest.mark.usefixtures("on_this_device")]

PACKED = LAYOUTS.index("thd")


def values_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return noise(*shape, seed=seed).to(dtype).to(DEVICE)


def place(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write tokens [rows, heads, tokens, d] to a cache [blocks, heads, entries, d], one by one."""
    entries = cache.shape[2]
    for row, own in enumerate(slots.reshape(len(x), -1).tolist()):
        for token, slot in enumerate(own):
            if 0 <= slot < cache.shape[0] * entries:
                cache[slot // entries, :, slot % entries] = x[row, :, token]


def given(pairs: int, options: Options, *extras: torch.Tensor, eps: float = 0.0) -> tuple[Any, ...]:
    return words(1, 1, 1, pairs), None, None, 7, options.pack(), 1.0, list(extras), eps


def part_of(base: torch.Tensor, first: int, width: int) -> torch.Tensor:
    return base[..., first : first + width]


#: Head dimension, first rotated channel, pairs; channels before those of the cache, which allow accesses of 16 bytes.
SHAPES = [(16, 0, 8, 8), (24, 4, 6, 8), (20, 6, 7, 3)]
CALLS = {
    "plain": (torch.float32, 0),
    "float64": (torch.float64, 0),
    "silu": (torch.bfloat16, ACTS.index("silu")),
    "rms_norm": (torch.float32, RMS_NORM),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_keys_and_values(call: str, shape: tuple[int, ...], packed: bool) -> None:
    """Skipped tokens, slots outside the cache and its last one, blocks of odd sizes, and all beside the entries.

    In programs of a tile of tokens and of one; and an in-place query, whose result is its own.
    """
    (width, start, pairs, first), (dtype, act), rows = shape, CALLS[call], 1 if packed else 2
    options = Options(PACKED if packed else 0, start, act=act)
    q, k = (values_of(dtype, rows, heads, 5, width, seed=heads) for heads in (5, 3))
    v = values_of(dtype, rows, 2, 5, 11, seed=3)
    own = [values_of(dtype, 1, width, seed=4).abs().float()] * 2 if call == "rms_norm" else []
    slots = torch.tensor([[3, -1, 14, 0, 15], [13, 9, -2, 1, 99]], device=DEVICE)[:rows]
    want = operators().rotate(q, k, *given(pairs, options._replace(layout=0), *own, eps=1e-5))

    def view(x: torch.Tensor) -> torch.Tensor:
        """Return [rows, heads, tokens, d] as packed tokens, and a cache as blocks of entries."""
        if not packed:
            return x
        return x[0].transpose(0, 1) if len(x) == 1 else x.transpose(1, 2)

    for programs, in_place in ((1, False), (512, True)):
        use_programs(programs)
        keys = torch.full((5, 3, 3, width + 24), 7.0, dtype=dtype, device=DEVICE)
        values = torch.full((5, 2, 3, 13), 7.0, dtype=dtype, device=DEVICE)
        caches = part_of(keys, first, width), part_of(values, 1, 11)
        expected = keys.clone(), values.clone()
        place(want[1], part_of(expected[0], first, width), slots)
        place(v, part_of(expected[1], 1, 11), slots)
        query = q.clone()
        out = query if in_place else torch.empty_like(q)
        tensors = map(view, (query, k, v, out, *caches))
        index = slots[0].int() if packed else slots
        arguments = given(pairs, options, *own, eps=1e-5)
        operators().rotate_slots_extras(*tensors, index, None, None, *arguments)
        for found, wanted in ((out, want[0]), (keys, expected[0]), (values, expected[1])):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("gate", [0, LOG])
def test_several_tiles(gate: int) -> None:
    """Of keys, and of values wider than a program copies."""
    k, v = values_of(torch.float32, 3, 2, 19, 64), values_of(torch.float32, 3, 1, 19, 1500, seed=2)
    cache, wide = (torch.zeros(7, h, 9, d, device=DEVICE) for h, d in ((2, 64), (1, 1500)))
    order = torch.randperm(63, generator=torch.Generator().manual_seed(0))
    slots = order[:57].view(3, 19).to(DEVICE)
    extras = [values_of(torch.float32, 1, 2, 19, 1, seed=1)] if gate else []
    arguments = given(32, Options(gate=gate), *extras)
    expected = cache.clone(), wide.clone()
    place(operators().rotate(k, None, *arguments)[0], expected[0], slots)
    place(v, expected[1], slots)
    operators().rotate_slots_extras(k, None, v, cache, None, wide, slots, None, None, *arguments)
    assert torch.equal(cache, expected[0])
    assert torch.equal(wide, expected[1])


@pytest.mark.parametrize("act", [0, ACTS.index("silu")])
@pytest.mark.parametrize("packed", [False, True])
def test_entries_rotate_in_place(packed: bool, act: int) -> None:
    cache = values_of(torch.bfloat16, 5, 3, 3, 24)
    slots = torch.tensor([[3, -1, 14, 0, 15], [13, 9, -2, 1, 99]], device=DEVICE)
    slots = slots[:1] if packed else slots
    options = Options(PACKED if packed else 0, 4, act=act)
    there = slots.clamp(0, 14)
    x = cache[there // 3, :, there % 3].transpose(1, 2).contiguous()
    (want,) = operators().rotate(x, None, *given(6, options._replace(layout=0)))
    expected = cache.clone()
    place(want, expected, slots)
    own, index = (cache.transpose(1, 2), slots[0]) if packed else (cache, slots)
    operators().rotate_slots_(own, index, *given(6, options))
    assert torch.equal(cache, expected)
    for some, none in ((slots[:, :0], cache[:0]), (slots, cache[:0])):
        operators().rotate_slots_(none, some, *given(6, Options(start=4)))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_write(shape: tuple[int, int, int]) -> None:
    rows, heads, tokens = shape
    k, cache = torch.ones(*shape, 8, device=DEVICE), torch.zeros(2, heads, 3, 8, device=DEVICE)
    slots = torch.full((rows, tokens), -1, device=DEVICE)
    for values in ((None, None), (k, cache.clone())):
        own = (k, None, values[0], cache, None, values[1])
        operators().rotate_slots_extras(*own, slots, None, None, *given(4, Options()))


def test_wrong_calls() -> None:
    k, cache = values_of(torch.float32, 2, 3, 4, 8), torch.zeros(2, 3, 5, 8, device=DEVICE)
    slots, other = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE), cache.clone()
    scale = torch.ones((), device=DEVICE)
    for text, (v, keys, values, index, by, direction) in {
        "slots must be int32": (None, cache, None, slots[0], None, 0),
        "a cache must have the heads": (None, cache[:, 1:], None, slots, None, 0),
        "a cache must have the dimensions": (None, cache[0], None, slots, None, 0),
        "outs must have": (None, cache.double(), None, slots, None, 0),
        "memory overlaps": (None, k, None, slots, None, 0),
        "values must come": (k, cache, None, slots, None, 0),
        "values must have the dtype": (k.double(), cache, other.double(), slots, None, 0),
        "and it the blocks": (k, cache, other[1:], slots, None, 0),
        "scales are not": (None, cache, None, slots, scale, 0),
        "slots have no gradient": (None, cache, None, slots, None, TRANSPOSE),
    }.items():
        arguments = given(4, Options(direction=direction))
        with pytest.raises(RuntimeError, match=text):
            operators().rotate_slots_extras(
                k, None, v, keys, None, values, index, None, by, *arguments
            )
    assert not cache.any()
