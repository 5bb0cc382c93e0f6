"""A program that is not installed is named by the error: rows of missing.jsonl."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.matrix import needs_kernel
from tests.support.written_calls import rows_of
from tightrope.integrations import comfyui, onnx, plugins, sglang, vllm
from tightrope.integrations.transformers import register

NAMES = {each.__name__.rpartition(".")[2]: each for each in (comfyui, onnx, plugins, sglang, vllm)}
ROWS = rows_of(Path(__file__).with_name("missing.jsonl"))


@needs_kernel
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["program"])
def test_what_is_not_installed(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these `modules` none can be imported; the call `python` raises an error with this `text`."""
    for module in row["modules"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises((ImportError, NotImplementedError), match=re.escape(row["text"])):
        eval(row["python"], {**NAMES, "register": register, "torch": torch})
