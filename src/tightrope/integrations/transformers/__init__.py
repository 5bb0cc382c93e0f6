"""The rotation as a kernel of transformers; see docs/plugs.md. For a model or all models, see :func:`tightrope.patch`."""

from ._kernels import mapping as mapping, register as register

__all__ = ["mapping", "register"]
