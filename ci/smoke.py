"""Try an installed wheel: kernel, values, gradients, errors and commands.

Run `python smoke.py NAME-OF-THE-WHEEL` outside the source tree, in an environment that has that wheel.
It needs torch alone.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from importlib.util import find_spec

import torch

import tightrope
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_

# One float32 rounding each of cos, sin and the result: at most 4e-7 of the length of a pair. No pair of
# a seeded normal tensor of this size is longer than 5.
TOLERANCE = 4e-7 * 5


def plain(x: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Rotate pairs (k, k + dim/2) at positions 0, 1, 2, … in float64, by the formula."""
    sequence, dim = x.shape[-2:]
    half = dim // 2
    y = x.double().clone()
    for p in range(sequence):
        for k in range(half):
            angle = p * base ** (-2 * k / dim)
            u, v = x[..., p, k].double(), x[..., p, k + half].double()
            y[..., p, k] = u * math.cos(angle) - v * math.sin(angle)
            y[..., p, k + half] = u * math.sin(angle) + v * math.cos(angle)
    return y


def check_values() -> None:
    """Compare with the formula, out of place and in place."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 64)
    got = rotate(x, tightrope.RopeSpec(64))
    error = (got.double() - plain(x)).abs().max().item()
    print(f"largest error of rotate: {error:.2g}")
    assert got.dtype == torch.float32, got.dtype
    assert error <= TOLERANCE, error
    rotate_(x, tightrope.RopeSpec(64))
    assert torch.equal(x, got), "in place and out of place differ"


def check_kernel(dtype: torch.dtype, interleaved: bool, instructions: str) -> None:
    """Compare the kernel with the definition, forward and backward."""
    cpu.use_instruction_set(instructions)
    spec = tightrope.RopeSpec(64, interleaved=interleaved)
    made = {}
    for backend in ("cpu", "reference"):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 33, 64, dtype=dtype, requires_grad=True)
        frequencies = torch.rand(4, 32, requires_grad=True)
        with tightrope.backends.use(backend):
            y = rotate(x, spec.at(1000, inv_freq=frequencies))
        like = torch.randn_like(y)
        made[backend] = y, *torch.autograd.grad(y, (x, frequencies), like)
    # A part of the largest number. The gradient of the frequencies is a sum of many.
    part = max(2 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)
    names = "the result", "the gradient of x", "the gradient of the frequencies"
    for name, one, other in zip(names, made["cpu"], made["reference"], strict=True):
        off = (one - other).abs() / other.abs().max()
        error = float(off.max())
        assert error <= part, (
            f"{name}, {dtype}, interleaved={interleaved}, {instructions}: {error} is more than {part} "
            f"at {(off > part).nonzero().tolist()[:8]}"
        )


def check_error() -> None:
    """An error of the library must arrive as an exception that torch and Python understand."""
    x, message = torch.randn(1, 2, 3, 8), "none"
    try:
        torch.ops.tightrope.rotate(x, None, torch.zeros(3), None, None, 0, 1 << 50, 1.0)
    except RuntimeError as error:
        message = str(error)
    assert "reserved bits" in message, f"the error of the library: {message}"


def check_commands() -> None:
    """`python -m tightrope` works; without the extra, the tools name it."""
    command = [sys.executable, "-m", "tightrope"]
    print(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if find_spec("matplotlib") is None:
        command = [sys.executable, "-m", "tightrope_tools", "info"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2, f"the tools cannot work without their extra: {done}"
        assert "Traceback" not in done.stderr, "a missing extra must not cause a traceback"
        assert "tightrope[tools]" in done.stderr, "the message must name the extra to install"


def main(wheel: str) -> None:
    """Check everything; an error ends the program."""
    print(f"tightrope from {tightrope.__file__}, torch {torch.__version__}")
    assert "site-packages" in tightrope.__file__, "this is not the installed package"
    check_values()
    present = tightrope.backends.why_not()
    if wheel.endswith("-py3-none-any.whl"):
        print("this wheel has no native library to check")
    else:
        assert "-py3-none-" in wheel, f"{wheel} is tied to one version of Python"
        assert present["cpu"] is None, f"the fused kernel is not usable: {present}"
        chosen = tightrope.which(torch.zeros(1, 1, 1, 64))
        assert chosen[0] == "cpu", f"the fused kernel would not run: {chosen}"
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        for dtype, interleaved, instructions in itertools.product(
            dtypes, (False, True), cpu.instruction_sets()
        ):
            check_kernel(dtype, interleaved, instructions)
        check_error()
    check_commands()
    print("the wheel works")


if __name__ == "__main__":
    main(sys.argv[1])
