"""Raw operators give correct results, or fail before writing, for any sizes, strides and options.

An accepted call is compared with the same call on contiguous copies, unless they are too large.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.helpers import noise
from tests.support.matrix import DISTINCT_SETS, needs_kernel
from tests.support.raw_calls import (
    MAKERS,
    Call,
    Draw,
    freed_storages,
    holds,
)
from tests.support.tolerances import assert_same_bits
from tightrope.backends import cpu
from tightrope.ops import schema

pytestmark = needs_kernel


@pytest.fixture(autouse=True, params=DISTINCT_SETS)
def _each_set(request: pytest.FixtureRequest) -> None:
    cpu.use_instruction_set(request.param)


def words(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.int64)


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


def cosines(draw: Draw) -> Call:
    rows, tokens, pairs = (draw.choice((1, 2, 5)) for _ in range(3))
    at, inv_freq = torch.ones(rows, tokens, draw.choice((1, pairs))), torch.ones(pairs)
    return schema.cos_sin, [at, inv_freq, None, None, None, draw.sometimes(0.5)], []


@pytest.mark.parametrize("of", [*MAKERS, cosines])
def test_freed_storage_is_refused(of: Callable[[Draw], Call]) -> None:
    tried = 0
    for call in freed_storages(of, 120):
        with pytest.raises(RuntimeError, match="tensors must have their memory"):
            call()
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
    assert refused > 8
