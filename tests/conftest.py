"""Fixtures for all test files. What they import instead is in helpers.py, matrix.py and tolerances.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tightrope.backends import cpu


@pytest.fixture(autouse=True)
def _settings_of_the_process() -> Iterator[None]:
    """Undo what a test did to the threads, the instruction set and torch's defaults."""
    threads, instruction_set = torch.get_num_threads(), cpu.instruction_set()
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if instruction_set is not None:
        cpu.use_instruction_set(instruction_set)
    torch.set_default_dtype(dtype)
    if torch.get_default_device() != device:
        torch.set_default_device(None)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget compiled functions before and after a test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
