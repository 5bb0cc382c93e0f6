"""Rotate with the installed wheel, forward and backward: `python smoke.py FOLDER OF THE WHEEL`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

import tightrope
from tightrope.backends import cpu
from tightrope.functional import rotate


def check(dtype: torch.dtype, interleaved: bool, instructions: str) -> None:
    """Compare the kernel with the definition."""
    cpu.use_instruction_set(instructions)
    spec = tightrope.RopeSpec(64, interleaved=interleaved)
    made = {}
    for backend in ("cpu", "reference"):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 33, 64, dtype=dtype, requires_grad=True)
        frequencies = torch.rand(4, 32, requires_grad=True)
        y = rotate(x, spec, 1000, inv_freq=frequencies, backend=backend)
        like = torch.randn_like(y)
        made[backend] = y, *torch.autograd.grad(y, (x, frequencies), like)
    # A part of the largest number. The gradient of the frequencies is a sum of many.
    part = max(2 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)
    for one, other in zip(made["cpu"], made["reference"], strict=True):
        error = float((one - other).abs().max() / other.abs().max())
        assert error <= part, f"{dtype}, {instructions}: {error} is more than {part}"


def check_error() -> None:
    """An error of the library must arrive as an exception that torch and Python understand."""
    x, message = torch.randn(1, 2, 3, 8), "none"
    try:
        torch.ops.tightrope.rotate(x, None, torch.zeros(3), None, None, 0, 1 << 50, 1.0)
    except RuntimeError as error:
        message = str(error)
    assert "reserved bits" in message, f"the error of the library: {message}"


def main(folder: str) -> None:
    assert Path(tightrope.__file__).is_relative_to(folder), tightrope.__file__
    reason = tightrope.backends.why_not()["cpu"]
    assert reason is None, f"the kernel cannot be used: {reason}"
    sets = cpu.instruction_sets()
    for dtype, interleaved, instructions in itertools.product(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16), (False, True), sets
    ):
        check(dtype, interleaved, instructions)
    check_error()
    print(f"torch {torch.__version__}: forward and backward with {', '.join(sets)}")


if __name__ == "__main__":
    main(sys.argv[1])
