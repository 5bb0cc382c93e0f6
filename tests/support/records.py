"""The record that `tightrope convert` writes beside the weights of a folder."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tightrope.config.files import RECORD


def conversion(
    pairing: str,
    section: str | None = "",
    model: str = "model_type 'llama'",
    tensors: Collection[str] = ("model.layers.0.self_attn.q_proj.weight",),
    left: Collection[str] = (),
) -> dict[str, Any]:
    """Return the record of one conversion, with what its readers need."""
    rows = {"width": 8, "first_rows": [0], "tensors": dict.fromkeys(tensors, 0)}
    return {
        "pairing": pairing,
        "section": section,
        "model": model,
        "left": [*left],
        "rows": [rows],
    }


def write_record(folder: Path, *conversions: dict[str, Any]) -> None:
    """Write the record of these conversions into a folder."""
    text = json.dumps({"files": [], "conversions": conversions})
    (folder / RECORD).write_text(text, encoding="utf-8")
