"""What single families need besides the general rules: settings, inputs, the class to build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .catalogue import ModelType


@dataclass(frozen=True)
class Family:
    """Settings (nested by part), what makes the inputs, and the name of the model's class."""

    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[..., Any] | None = None
    model: str = ""


FAMILIES: dict[str, Family] = {}


def of(model_type: ModelType) -> Family:
    """The family's entry, or nothing special."""
    return FAMILIES.get(model_type.name, Family())
