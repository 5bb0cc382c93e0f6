"""The Triton kernels write into slots of a cache: the bits of the rotation alone, placed by a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.triton.cases import DEVICE, needs_triton, noise, words
from tests.support.triton.running import operators
from tightrope.activations import ACTS, RMS_NORM
from tightrope.ops.schema import LAYOUTS, LOG, TRANSPOSE, Options

pytestmark = [needs_triton, pytest.mark.usefixtures("few_programs")]

ROWS, TOKENS = 2, 5


def values_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return noise(*shape, seed=seed).to(dtype).to(DEVICE)


def place(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write tokens [rows, heads, tokens, d] to a cache [blocks, heads, entries, d], one by one."""
    entries = cache.shape[2]
    for row, own in enumerate(slots.reshape(len(x), -1).tolist()):
        for token, slot in enumerate(own):
            if 0 <= slot < cache.shape[0] * entries:
                cache[slot // entries, :, slot % entries] = x[row, :, token]


#: Head dimension, first rotated channel, pairs; whether strides allow 16-byte accesses.
SHAPES = [(16, 0, 8, True), (24, 4, 6, True), (20, 6, 7, False)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("act", ["none", "silu", "rms_norm"])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_and_values(dtype: torch.dtype, shape: Any, act: str, packed: bool) -> None:
    """Skipped tokens, slots outside the cache, blocks of odd sizes, and everything beside the entries."""
    width, start, pairs, whole = shape
    kinds = {"none": 0, "silu": ACTS.index("silu"), "rms_norm": RMS_NORM}
    if dtype == torch.float64 and act != "none":
        return  # the definition runs
    rows = 1 if packed else ROWS
    options = Options(LAYOUTS.index("thd" if packed else "bhsd"), start, act=kinds[act])
    q, k = (values_of(dtype, rows, heads, TOKENS, width, seed=heads) for heads in (5, 3))
    v = values_of(dtype, rows, 2, TOKENS, 11, seed=3)
    own = [values_of(dtype, 1, width, seed=4).abs().float()] * 2 if act == "rms_norm" else []
    arguments = (
        words(1, 1, 1, pairs),
        None,
        None,
        7,
        options.pack(),
        1.0,
        own,
        1e-5 if own else 0.0,
    )
    slots = torch.tensor([[3, -1, 13, 0, 15], [14, 9, -2, 1, 99]], device=DEVICE)[:rows]
    base = torch.full(
        (5, 3, 3, width + 24 if whole else width + 5), 7.0, dtype=dtype, device=DEVICE
    )
    keys = base[..., 8 if whole else 3 :][..., :width]
    of_values = torch.full((5, 2, 3, 13), 7.0, dtype=dtype, device=DEVICE)[..., 1:12]
    expected = [base.clone(), of_values._base.clone()]  # type: ignore[union-attr]
    want = operators().rotate(
        q, k, *arguments[:4], options._replace(layout=0).pack(), *arguments[5:]
    )
    place(want[1], expected[0][..., 8 if whole else 3 :][..., :width], slots)
    place(v, expected[1][..., 1:12], slots)
    out = torch.empty_like(q)

    def view(x: torch.Tensor) -> torch.Tensor:
        """Return [rows, heads, tokens, d] as packed tokens, and a cache as blocks of entries."""
        return x[0].transpose(0, 1) if len(x) == 1 else x.transpose(1, 2)

    tensors = (q, k, v, out, keys, of_values)
    index = (slots[0].int() if packed else slots,)
    operators().rotate_slots_extras(
        *map(view, tensors) if packed else tensors, *index, None, None, *arguments
    )
    assert torch.equal(out, want[0])
    assert torch.equal(base, expected[0])
    assert torch.equal(of_values._base, expected[1])


def test_a_program_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens have programs of their own, for q or for k."""
    from tightrope.backends.triton import blocks

    monkeypatch.setattr(blocks, "PROGRAMS", 512)
    q, k = (values_of(torch.float32, 2, heads, 2, 16, seed=heads) for heads in (3, 1))
    keys, out = torch.zeros(2, 1, 3, 16, device=DEVICE), torch.empty_like(q)
    slots = torch.tensor([[4, -1], [0, 6]], device=DEVICE)
    arguments = words(1, 1, 1, 8), None, None, 7, Options().pack(), 1.0
    want, want_k = operators().rotate(q, k, *arguments)
    operators().rotate_slots(q, k, out, keys, slots, *arguments)
    expected = torch.zeros_like(keys)
    place(want_k, expected, slots)
    assert torch.equal(out, want)
    assert torch.equal(keys, expected)


def test_several_tiles_and_a_gate() -> None:
    k, cache = values_of(torch.float32, 3, 2, 70, 64), torch.zeros(7, 2, 64, 64, device=DEVICE)
    slots = (
        torch.randperm(448, generator=torch.Generator().manual_seed(0))[:210].view(3, 70).to(DEVICE)
    )
    for options in (Options(), Options(gate=LOG)):
        gate = [values_of(torch.float32, 1, 2, 70, 1, seed=1)] if options.gate else []
        arguments = (words(1, 1, 1, 32), None, None, 0, options.pack(), 1.0, gate, 0.0)
        expected = torch.zeros_like(cache)
        place(operators().rotate(k, None, *arguments)[0], expected, slots)
        operators().rotate_slots_extras(
            k, None, None, cache.zero_(), None, None, slots, None, None, *arguments
        )
        assert torch.equal(cache, expected)


def test_wide_values_and_in_place_queries() -> None:
    """Values of more channels than a program copies, and a query that is its own result."""
    q, k, v = (values_of(torch.bfloat16, 1, 1, 4, d, seed=d) for d in (8, 8, 5000))
    arguments = (words(1, 1, 1, 4), None, None, 5, Options().pack(), 1.0, [], 0.0)
    want = operators().rotate(q, k, *arguments)
    cache, wide = (torch.zeros(3, 1, 2, d, dtype=k.dtype, device=DEVICE) for d in (8, 5000))
    expected, slots = [cache.clone(), wide.clone()], torch.tensor([[4, 0, 3, -1]], device=DEVICE)
    place(want[1], expected[0], slots)
    place(v, expected[1], slots)
    operators().rotate_slots_extras(q, k, v, q, cache, wide, slots, None, None, *arguments)
    assert torch.equal(q, want[0])
    assert torch.equal(cache, expected[0])
    assert torch.equal(wide, expected[1])


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_write(shape: tuple[int, int, int]) -> None:
    rows, heads, tokens = shape
    k, cache = (
        values_of(torch.float32, rows, heads, tokens, 8),
        torch.zeros(2, heads, 3, 8, device=DEVICE),
    )
    arguments = (words(1, 1, 1, 4), None, None, 5, Options().pack(), 1.0, [], 0.0)
    slots = torch.full((rows, tokens), -1, device=DEVICE)
    operators().rotate_slots_extras(k, None, None, cache, None, None, slots, None, None, *arguments)
    operators().rotate_slots_extras(
        k, None, k, cache, None, cache.clone(), slots, None, None, *arguments
    )


def test_wrong_calls() -> None:
    k, cache = values_of(torch.float32, 2, 3, 4, 8), torch.zeros(2, 3, 5, 8, device=DEVICE)
    slots, scale = (
        torch.zeros(2, 4, dtype=torch.int64, device=DEVICE),
        torch.ones((), device=DEVICE),
    )
    options = Options()
    arguments = (words(1, 1, 1, 4), None, None, 5, options.pack(), 1.0, [], 0.0)
    back = (*arguments[:4], options._replace(direction=TRANSPOSE).pack(), *arguments[5:])
    more = (None, None, slots, None, None, *arguments)
    for text, call in {
        "slots must be int32": (k, None, None, cache, None, None, slots[0], None, None, *arguments),
        "a cache must have the heads": (k, None, None, cache[:, 1:], *more),
        "a cache must have the dimensions": (k, None, None, cache[0], *more),
        "outs must have": (k, None, None, cache.double(), *more),
        "memory overlaps": (k, None, None, k, *more),
        "values must come": (k, None, k, cache, *more),
        "values must have the dtype": (
            k, None, k.double(), cache, None, cache.double(), slots, None, None, *arguments
        ),
        "and it the blocks": (k, None, k, cache, None, cache[1:].clone(), slots, None, None, *arguments),
        "scales are not": (k, None, None, cache, None, None, slots, None, scale, *arguments),
        "slots have no gradient": (k, None, None, cache, None, None, slots, None, None, *back),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=text):
            operators().rotate_slots_extras(*call)
    assert not cache.any()


@pytest.mark.parametrize("act", [0, ACTS.index("silu")])
@pytest.mark.parametrize("packed", [False, True])
def test_entries_rotate_in_place(packed: bool, act: int) -> None:
    rows = 1 if packed else ROWS
    cache = values_of(torch.bfloat16, 5, 3, 3, 24)
    slots = torch.tensor([[3, -1, 13, 0, 99], [14, 9, -2, 1, 6]], device=DEVICE)[:rows]
    options = Options(LAYOUTS.index("thd" if packed else "bhsd"), 4, act=act)
    arguments = (words(1, 1, 1, 6), None, None, 7)
    there = slots.clamp(0, 14)
    x = cache[there // 3, :, there % 3].transpose(1, 2).contiguous()
    (want,) = operators().rotate(
        x, None, *arguments, options._replace(layout=0).pack(), 1.0, [], 0.0
    )
    expected = cache.clone()
    place(want, expected, slots)
    own = cache.transpose(1, 2) if packed else cache
    index = slots[0] if packed else slots
    operators().rotate_slots_(own, index, *arguments, options.pack(), 1.0, [], 0.0)
    assert torch.equal(cache, expected)
    operators().rotate_slots_(
        cache[:0], slots[:, :0], *arguments, Options(start=4).pack(), 1.0, [], 0.0
    )
    operators().rotate_slots_(cache[:0], slots, *arguments, Options(start=4).pack(), 1.0, [], 0.0)
