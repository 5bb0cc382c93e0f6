"""Fixtures for the tests of conversion: write a checkpoint, convert it, and read the result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import LLAMA, write
from tightrope_tools.convert import convert

Tensors = dict[str, torch.Tensor]


def _load(folder: Path) -> Tensors:
    made: Tensors = {}
    for file in folder.glob("*.safetensors"):
        made |= load_file(file)
    return made


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., tuple[Any, Tensors]]:
    """Return a function that converts tensors, and returns what was done and the new tensors."""
    number = count()

    def run(tensors: Tensors, config: Any = LLAMA, **options: Any) -> tuple[Any, Tensors]:
        folder = tmp_path / f"converted {next(number)}"
        source = write(folder / "in", tensors, config)
        done = convert(source, folder / "out", **{"to": "interleaved", **options})
        return done, _load(folder / "out")

    return run


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that checks that tensors are refused and nothing is written; it returns the checkpoint."""
    number = count()

    def run(
        match: str, tensors: Tensors, config: Any = LLAMA, *, shards: int = 1, **options: Any
    ) -> Path:
        folder = tmp_path / f"refused {next(number)}"
        source = write(folder / "in", tensors, config, shards=shards)
        with pytest.raises((ValueError, TypeError), match=match):
            convert(source, folder / "out", **{"to": "interleaved", **options})
        assert [path.name for path in folder.iterdir()] == ["in"]
        return source

    return run
