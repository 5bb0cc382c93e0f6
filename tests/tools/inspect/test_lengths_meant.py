"""Notes on lengths that contradict a scaling factor name the length that was probably meant."""

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


@pytest.mark.parametrize(
    ("kind", "original", "factor", "end"),
    [
        ("llama3", 4096, 4.0, "the length after it, probably 1,024."),
        ("llama3", 4096, 3.0, "the length after it."),
        ("yarn", 4096, 4.0, "before the extension, probably 1,024."),
        ("yarn", 4096, 3.0, "before the extension."),
        *(
            (kind, 8192, 2.0, "before the extension, probably 2,048.")
            for kind in ("yarn", "llama3")
        ),
        *((kind, 1024, 4.0, None) for kind in ("yarn", "llama3")),
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
    codes = ("original-length", "unextended")
    found = [note.text for note in part.notes if note.code in codes]
    if found and kind == "yarn" and original == 4096:
        assert f"the extended one is {4096 * factor:,.0f}" in found[0]
    assert [text.endswith(end or "") for text in found] == [True] * (end is not None)
