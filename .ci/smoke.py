"""Smoke test of the installed wheel: kernel, values and command line.

Run `python smoke.py NAME-OF-THE-WHEEL` outside the source tree, in an environment that has only
that wheel, without extras.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import torch

import tightrope

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


def check_kernel(wheel: str, x: torch.Tensor) -> None:
    present = tightrope.backends.why_not()
    chosen = tightrope.which(x)
    print("backends:", present, " which:", chosen)
    if wheel.endswith("-py3-none-any.whl"):
        print("this wheel has no native library to check")
        return
    assert "-py3-none-" in wheel, f"{wheel} is tied to one version of Python"
    assert present["cpu"] is None, f"the fused kernel is not usable: {present}"
    assert chosen[0] == "cpu", f"the fused kernel would not run: {chosen}"


def check_values(x: torch.Tensor) -> None:
    from tightrope.functional import rotate, rotate_

    spec = tightrope.RopeSpec(x.shape[-1])
    wanted = plain(x)
    got = rotate(x, spec)
    error = (got.double() - wanted).abs().max().item()
    print(f"largest error of rotate: {error:.2g}")
    assert got.dtype == torch.float32, got.dtype
    assert error <= TOLERANCE, error

    rotate_(x, spec)
    assert torch.equal(x, got), "in place and out of place differ"


def check_command_line() -> None:
    script = Path(sys.executable).with_name("tightrope")
    done = subprocess.run([str(script), "info"], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    print(f"tightrope info, without the cli extra: exit status {done.returncode}\n{output.strip()}")
    assert done.returncode != 0, "tightrope info cannot work without the cli extra"
    assert "Traceback" not in output, "a missing extra must not cause a traceback"
    assert "tightrope[tools]" in output, "the message must name the extra to install"


def main() -> None:
    print(f"tightrope from {tightrope.__file__}, torch {torch.__version__}")
    assert "site-packages" in tightrope.__file__, "this is not the installed package"
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 64)
    check_kernel(sys.argv[1], x)
    check_values(x)
    check_command_line()
    print("the wheel works")


main()
