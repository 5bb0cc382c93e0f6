"""Rotary position embedding (RoPE): exact at any position, fused forward and backward."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError as _NotFound, version as _version

from . import backends as backends, ops as _ops

_ops.register()
backends.register()

from . import (  # noqa: E402
    frequencies as frequencies,
    functional as functional,
    gates as gates,
    nn as nn,
    phases as phases,
    positions as positions,
    stacks as stacks,
)
from .axes import Axes as Axes  # noqa: E402
from .backends import which as which  # noqa: E402
from .spec import RopeSpec as RopeSpec  # noqa: E402

try:
    __version__ = _version("tightrope")
except _NotFound:
    # Imported from a checkout that is on the path but not installed.
    __version__ = "0+uninstalled"

__all__ = [
    "Axes",
    "RopeSpec",
    "__version__",
    "backends",
    "frequencies",
    "functional",
    "gates",
    "nn",
    "phases",
    "positions",
    "stacks",
    "which",
]
