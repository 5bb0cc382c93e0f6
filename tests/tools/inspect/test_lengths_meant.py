"""Warnings of lengths that contradict a scaling factor name the length that was probably meant."""

from __future__ import annotations

import pytest

from tightrope_tools.inspect import inspect

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
@pytest.mark.parametrize(
    ("original", "factor", "end"),
    [
        (4096, 4.0, "the length after it, probably 1,024."),
        (4096, 3.0, "the length after it."),
        (8192, 2.0, "before the extension, probably 2,048."),
        (1024, 4.0, None),
    ],
)
def test_the_original_length(kind: str, original: int, factor: float, end: str | None) -> None:
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        **(LLAMA3 if kind == "llama3" else {}),
    }
    (part,) = inspect({**LLAMA, "rope_scaling": scaling}).parts
    found = [note.text for note in part.notes if note.code == "original-length"]
    assert [text.endswith(end or "") for text in found] == [True] * (end is not None)
