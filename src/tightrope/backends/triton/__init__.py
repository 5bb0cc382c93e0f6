"""The Triton backend: one kernel for the operator, on the GPUs that Triton compiles for."""

from __future__ import annotations

from .registration import (
    DEVICES as DEVICES,
    is_ready as is_ready,
    register as register,
    why_not as why_not,
)
