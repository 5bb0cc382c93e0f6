"""Where tests of the Triton kernels run, and the kernels in the place of those of the device.

With a GPU the kernels are compiled and run there; otherwise Triton's interpreter runs them on the CPU.
Triton chooses between the two when the kernels are first imported, which happens here. With the environment
variable TIGHTROPE_EMULATE, such as "sm_90", they are compiled for that GPU and executed on the CPU by
tests/emulator; with "sm_90:7" in a random order of warps, whose seed is 7.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import version_of
from tightrope.angles import words_from

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

EMULATED = "" if HAS_GPU else os.environ.get("TIGHTROPE_EMULATE", "")
INTERPRETED = HAS_TRITON and not HAS_GPU and not EMULATED

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
needs_fma = pytest.mark.skipif(
    INTERPRETED and version_of("triton") < (3, 9),
    reason="this interpreter rounds a fused multiply-add twice",
)

COMPILERS = os.environ.get("CC"), "gcc", "clang"
COMPILES = (
    any(map(shutil.which, filter(None, COMPILERS)))
    and Path(sysconfig.get_paths()["include"], "Python.h").exists()
)
# Marks of tests that need the stub of the driver.
needs_stub = (
    pytest.mark.skipif(HAS_GPU, reason="the driver of the GPU is loaded"),
    pytest.mark.skipif(
        not COMPILES, reason="Triton's launcher needs a C compiler and Python's headers"
    ),
)

if HAS_TRITON:
    # Import Triton before TRITON_INTERPRET is set: its own functions must all be compiled, or all
    # interpreted.
    import triton.language  # noqa: F401

    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import tightrope.backends.triton.kernels  # noqa: F401
    finally:
        if INTERPRETED:
            del os.environ["TRITON_INTERPRET"]
    if INTERPRETED:
        from triton.runtime import interpreter

        # A launch patches the language. Each call of a function would do so again: a third of the time of all tests.
        interpreter.InterpretedFunction.__call__ = lambda f, *args, **more: f.rewrite()(
            *args, **more
        )
    if EMULATED:
        from tests.emulator.launch import attach

        target, _, seed = EMULATED.removeprefix("sm_").partition(":")
        emulator = attach((int(target) // 10, int(target) % 10), int(seed) if seed else None)


def operators() -> Any:
    """Return the module of the backend's operators, which take the raw arguments of the schema."""
    from tightrope.backends.triton import operators

    return operators


def use_programs(count: int) -> None:
    """Divide work among so many programs: 1 makes one of each tile, and 512 programs of few tokens one of each token."""
    from tightrope.backends.triton import blocks, phases, rotation, slots

    blocks.PROGRAMS = count
    for module in (rotation, phases, slots):
        module._plans.clear()


@contextlib.contextmanager
def kernels_in_place() -> Iterator[None]:
    """Register the kernels for tensors on `DEVICE`, which is the CPU if there is no GPU."""
    from tightrope.backends.triton import blocks, operators, registration
    from tightrope.ops import scaled

    programs = blocks.PROGRAMS
    scaled.WITHOUT_SCALES.discard("cpu")
    if not HAS_GPU:
        library = torch.library.Library("tightrope", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in registration.OPERATORS.items():
                library.impl(name, getattr(operators, function), "CPU", allow_override=True)
    # The interpreter runs programs sequentially, so use one program per tile.
    use_programs(programs if HAS_GPU else 1)
    try:
        yield
    finally:
        use_programs(programs)
        if not HAS_GPU:
            library._destroy()
        scaled.WITHOUT_SCALES.add("cpu")


@pytest.fixture
def on_this_device() -> Iterator[None]:
    """Run a test within `kernels_in_place`."""
    with kernels_in_place():
        yield


def words(*sizes: int, seed: int = 5) -> torch.Tensor:
    """Return the phase words of random frequencies, [axes, rows, heads, pairs]."""
    generator = torch.Generator().manual_seed(seed)
    omegas = torch.rand(sizes, generator=generator, dtype=torch.float64)
    return words_from(omegas)[0].to(DEVICE)
