"""The reference backend: the definition of the operator in plain torch, for every device.

The other backends are optimisations of this one and are tested against it.
"""

from __future__ import annotations

from .rotate import (
    DEVICES as DEVICES,
    compose as compose,
    is_ready as is_ready,
    register as register,
    why_not as why_not,
)
