"""A guard against wrong first results of torch's functions on the CPU.

Builds of torch for x86-64 compute cosines, exponentials and the like with MKL. It chooses the code of a function in the
first call. If two threads make that call together, one of them may run code of low accuracy: the result of a large
tensor was then off by 1.5e-4 in the part of one thread, in every seventh process on one Xeon.

Source: https://github.com/pytorch/pytorch/issues/188792 (torch 2.10 to 2.13, with MKL 2024.2).
"""

from __future__ import annotations

import torch

#: The functions of MKL that this library calls, and those close to them.
FUNCTIONS = tuple("cos erf erfc exp expm1 log log1p log2 sin sqrt tan tanh".split())


def choose_code() -> None:
    """Call each function once, in one thread; called at import, before any other."""
    if not torch.backends.mkl.is_available():
        return
    # Without modes, which would see these calls, or return tensors that are not computed.
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        for dtype in (torch.float32, torch.float64):
            few = torch.full((16,), 0.5, dtype=dtype, device="cpu")  # one thread computes so few
            for name in FUNCTIONS:
                getattr(torch, name)(few)
