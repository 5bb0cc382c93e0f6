"""Functions that the tests of `tightrope audit` name on the command line."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.support import planted_faults as planted

print("imported")
good, made = planted.PLAIN, planted.rope
bad = planted.rope(sign=-1.0)
dict, NUMBERS = dict, [1]


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return planted.turn(x.float(), cos[:, None], sin[:, None]).to(x.dtype)


def swapped(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angle = positions[..., None] * planted.inv_freq()
    return angle.sin(), angle.cos()


def crashes(x: torch.Tensor, positions: torch.Tensor) -> None:
    os.abort()


def hangs(x: torch.Tensor, positions: torch.Tensor) -> None:
    time.sleep(1e6)


def raises(x: torch.Tensor, positions: torch.Tensor) -> None:
    raise RuntimeError("[bold]no luck[/bold]")


def fails() -> Any:
    raise RuntimeError("no luck")
