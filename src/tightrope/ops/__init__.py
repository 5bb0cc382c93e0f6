"""The operator in PyTorch: schema, fake kernel, gradients, vmap rule and input checks."""

from __future__ import annotations

from . import autograd, cosines, fake, phases, vmap


def register() -> None:
    """Register the fake kernels, the gradients and the vmap rules; called once, at import."""
    fake.register()
    autograd.register()
    vmap.register()
    phases.register()
    cosines.register()
