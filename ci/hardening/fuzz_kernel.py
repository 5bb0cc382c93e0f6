"""Fuzzes the raw operators: the bytes choose sizes, strides, dtypes, options and extra tensors.

Each input becomes a call of tests/support/raw_calls.py, whose random numbers are read from the bytes. The
call must fail before it writes, or give the result of the same call on contiguous copies and write nowhere
else. The instrumented kernel adds the checks of AddressSanitizer.
"""

from __future__ import annotations

import contextlib
import random

from ci.hardening import fuzzing

chosen = fuzzing.options()

from tests.support import raw_calls  # noqa: E402
from tightrope.backends import cpu  # noqa: E402

KINDS = (
    *(raw_calls.rotation, raw_calls.rotation, raw_calls.rotation),
    *(raw_calls.angle_gradients, raw_calls.gate_gradients, raw_calls.phases),
)


class Draw(fuzzing.Bytes, raw_calls.Draw):
    """Draws a call from bytes."""


def test(data: bytes) -> None:
    draw = Draw(data)
    cpu.use_instruction_set(draw.choice(cpu.instruction_sets()))
    # Without a margin, a read just outside a tensor is one outside its memory.
    raw_calls.MARGIN = draw.choice((0, 0, 64))
    make = draw.choice(KINDS)
    with contextlib.suppress(RuntimeError):  # torch cannot make such a tensor
        call = make(draw)
    if "call" in locals():
        raw_calls.holds(call)


if __name__ == "__main__":
    seeds = [random.Random(n).randbytes(400) for n in range(64)]
    fuzzing.fuzz(chosen, test, seeds)
