"""Time of rotations with an activation in float64, beside torch's function and a rotation.

OMP_NUM_THREADS=1 python -m benchmarks.float64_acts --out RESULTS.json

8 heads of 128 channels, 512 tokens, alone and with the gradient of x. Both sides rotate by our kernel. Functions of
MKL, which torch calls, choose their own instructions: for AVX2, set MKL_ENABLE_INSTRUCTIONS=AVX2,
ATEN_CPU_CAPABILITY=avx2 and TIGHTROPE_CPU_ISA=avx2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tightrope import RopeSpec, rotate

from .small_calls import command
from .speed.method import Call

ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("exp", "sin", "cos", "sigmoid", "tanh")},
    **{name: getattr(functional, name) for name in ("silu", "gelu", "elu", "softplus")},
}
RATIOS = [
    (f"{name}{more}", f"torch's {name}{more}") for name in ACTS for more in ("", ", training")
]


def calls() -> dict[str, Call]:
    """Return the calls by name."""
    x, cotangent = torch.randn(2, 1, 8, 512, 128, dtype=torch.float64)
    leaf, prepared = x.clone().requires_grad_(), RopeSpec(128).at(None)
    found: dict[str, Call] = {}

    def add(name: str, act: str | None, before: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def both(x: torch.Tensor) -> torch.Tensor:
            return rotate(before(x), prepared, act=act)

        found[name] = lambda: both(x)
        found[f"{name}, training"] = lambda: torch.autograd.grad(both(leaf), leaf, cotangent)

    for name, of_torch in ACTS.items():
        add(name, name, lambda x: x)
        add(f"torch's {name}", None, of_torch)
    return found


if __name__ == "__main__":
    command(__doc__, calls(), RATIOS, 25)
