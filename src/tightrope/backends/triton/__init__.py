"""The Triton backend: fused kernels for the GPUs that Triton supports."""

from __future__ import annotations

from .registration import (
    DEVICES as DEVICES,
    KERNELS as KERNELS,
    is_ready as is_ready,
    register as register,
    why_not as why_not,
)
