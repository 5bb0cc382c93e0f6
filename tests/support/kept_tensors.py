"""The tensors that a spec or a rotation keeps."""

from typing import Any

import torch


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors that a value holds, at any depth; of an object of this library, those of its attributes."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value).__module__.startswith("tightrope.") and hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [x for one in value for x in tensors_of(one)] if isinstance(value, list | tuple) else []
