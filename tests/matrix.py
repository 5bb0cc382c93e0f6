"""The axes that several test files run over: backends, dtypes, pairings."""

import pytest
import torch

import tightrope
from tightrope.backends import BY_NAME

# Those for tensors on the CPU; what runs on a GPU has tests of its own.
BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(reason is not None, reason=f"no such backend here: {reason}"),
    )
    for name, reason in tightrope.backends().items()
    if not BY_NAME[name].DEVICES or "cpu" in BY_NAME[name].DEVICES
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])

# For what the kernel promises and torch's own functions do not, such as bits that depend on nothing else.
needs_kernel = pytest.mark.skipif(
    tightrope.backends()["cpu"] is not None, reason="no native library"
)
