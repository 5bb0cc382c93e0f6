"""The C++ backend: fused loops for each instruction set, parallel on torch's own thread pool."""

from __future__ import annotations

from .native import (
    DEVICES as DEVICES,
    instruction_set as instruction_set,
    instruction_sets as instruction_sets,
    is_ready as is_ready,
    library_path as library_path,
    register as register,
    use_instruction_set as use_instruction_set,
    why_not as why_not,
)

__all__ = ["instruction_set", "instruction_sets", "library_path", "use_instruction_set"]
