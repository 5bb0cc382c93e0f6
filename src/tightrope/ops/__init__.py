"""How the operator enters PyTorch: schema, fake kernel, gradients, vmap, checks."""

from __future__ import annotations

from . import autograd, fake, vmap


def register() -> None:
    """Register everything but the kernels; once, at import."""
    fake.register()
    autograd.register()
    vmap.register()
