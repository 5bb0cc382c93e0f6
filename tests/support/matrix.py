"""Backends, dtypes, pairings and compilers: parametrisations and marks that several test files share."""

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import tightrope
from tests.support import pairwise
from tightrope.backends import cpu
from tightrope.ops import registry

# The instruction sets to compare where all code counts, not only the plain rotation of bfloat16: in
# nothing else does AVX-512 with conversions to bfloat16 differ from AVX-512, whose code it calls.
DISTINCT_SETS = [
    name
    for name in cpu.instruction_sets()
    if name != "avx512" or cpu.instruction_sets()[0] != "avx512bf16"
]

# Backends for CPU tensors. GPU backends have their own test files.
BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(reason is not None, reason=f"no such backend here: {reason}"),
    )
    for name, reason in tightrope.backends.why_not().items()
    if not registry.BACKENDS[name].DEVICES or "cpu" in registry.BACKENDS[name].DEVICES
]
#: The instruction sets that are not in use here, which `on` takes for a backend.
OTHER_SETS = [
    name if name == "avx2" else pytest.param(name, marks=pytest.mark.slow)
    for name in cpu.instruction_sets()
    if name != cpu.instruction_set()
]
#: Marks of what only `make emulate` runs.
EMULATED = (pytest.mark.slow, pytest.mark.emulated)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


def every_way(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in each dtype, on each backend, with both pairings."""
    return every_dtype(every_backend(both_pairings(test)))


def every_pair(
    allowed: pairwise.Allowed = lambda _: True, **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """Run a test for cases that together have every allowed pair of values of any two of these parameters."""
    cases = [tuple(case.values()) for case in pairwise.covering(axes, allowed)]
    names = ["-".join(str(getattr(x, "__name__", x)) for x in case) for case in cases]
    return pytest.mark.parametrize(tuple(axes), cases, ids=names)


# For guarantees of the kernel that torch's own functions do not give, such as reproducible bits.
needs_kernel = pytest.mark.skipif(
    tightrope.backends.why_not()["cpu"] is not None, reason="no native library"
)

# The compiler of C++ that Inductor calls for CPU code; None without one.
INDUCTOR = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
# One that compiles programs and the library.
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
