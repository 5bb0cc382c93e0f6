"""The definition: the operator in plain torch, for every device.

Every other backend is an optimisation of this one and is tested against it.
"""

from __future__ import annotations

from .rotate import (
    DEVICES as DEVICES,
    compose as compose,
    is_ready as is_ready,
    register as register,
    why_not as why_not,
)
