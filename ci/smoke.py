"""Try an installed wheel: kernel, values, gradients, errors and commands.

Run `python smoke.py NAME-OF-THE-WHEEL` outside the source tree, in an environment that has that wheel.
It needs torch alone.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib.util import find_spec

import torch

import tightrope
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_

OFFSET = 1000


def plain(x: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x from position `OFFSET` on by the formula, in the dtype of its arguments."""
    angle = torch.arange(OFFSET, OFFSET + x.shape[2])[:, None] * frequencies[:, None]
    cos, sin = angle.cos(), angle.sin()
    u, v = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    pair = u * cos - v * sin, u * sin + v * cos
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def check(dtype: torch.dtype, interleaved: bool) -> None:
    """Compare with the formula in float64: results, out of place and in place, and gradients."""
    spec = tightrope.RopeSpec(64, interleaved=interleaved)
    torch.manual_seed(0)
    x = torch.randn(2, 4, 33, 64, dtype=dtype, requires_grad=True)
    frequencies = torch.rand(4, 32, requires_grad=True)
    y = rotate(x, spec.at(OFFSET, inv_freq=frequencies))
    like = torch.randn_like(y)
    got = y.detach(), *torch.autograd.grad(y, (x, frequencies), like)
    wide, omega = (each.detach().double().requires_grad_() for each in (x, frequencies))
    right = plain(wide, omega, interleaved)
    wanted = right.detach(), *torch.autograd.grad(right, (wide, omega), like.double())
    # A part of the largest number. The gradient of the frequencies is a sum of many.
    part = max(2 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)
    names = "the result", "the gradient of x", "the gradient of the frequencies"
    for name, one, other in zip(names, got, wanted, strict=True):
        off = (one - other).abs() / other.abs().max()
        assert float(off.max()) <= part, (
            f"{name}, {dtype}, interleaved={interleaved}: {float(off.max())} is more than {part} "
            f"at {(off > part).nonzero().tolist()[:8]}"
        )
    with torch.no_grad():
        made, again = rotate(x, spec, OFFSET), rotate_(x.clone(), spec, OFFSET)
        right = plain(x.double(), spec.frequencies().inv_freq[None], interleaved)
    assert torch.equal(made, again), "in place and out of place differ"
    assert made.dtype == dtype, made.dtype
    # One rounding each of cosine, sine and the result; no pair of these is longer than 5.
    most = 5 * max(torch.finfo(dtype).eps, 4e-7)
    assert float((made - right).abs().max()) <= most, f"{dtype}: {(made - right).abs().max()}"


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
    present, sets = tightrope.backends.why_not(), [""]
    if wheel.endswith("-py3-none-any.whl"):
        print("this wheel has no native library to check")
    else:
        assert "-py3-none-" in wheel, f"{wheel} is tied to one version of Python"
        assert present["cpu"] is None, f"the fused kernel is not usable: {present}"
        chosen = tightrope.which(torch.zeros(1, 1, 1, 64))
        assert chosen[0] == "cpu", f"the fused kernel would not run: {chosen}"
        sets = cpu.instruction_sets()
        check_error()
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for dtype, interleaved, name in itertools.product(dtypes, (False, True), sets):
        if name:
            cpu.use_instruction_set(name)
        check(dtype, interleaved)
    check_commands()
    print("the wheel works")


if __name__ == "__main__":
    main(sys.argv[1])
