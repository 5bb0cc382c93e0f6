"""The tensors that a spec keeps."""

import torch

from tightrope import RopeSpec
from tightrope.spec._words import OnDevice, Words


def tables_of(spec: RopeSpec) -> list[torch.Tensor]:
    """Return every tensor that a spec keeps, found by walking its attributes."""
    found: list[torch.Tensor] = []

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, (tuple, list)):
            for item in value:
                walk(item)
        elif isinstance(value, (Words, OnDevice)):
            walk(vars(value))

    walk(vars(spec))
    return found
