"""Configurations of models of 2026 that the installed transformers may not have: each is read, or refused in one sentence.

The expected specs were written from the sources that each entry names, never with `from_config`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tightrope import RopeSpec

DATA = Path(__file__).parents[2] / "support" / "data" / "new_configs.json"
ROWS: list[dict[str, Any]] = json.loads(DATA.read_text("utf-8"))


def wanted(value: dict[str, Any]) -> Any:
    """One spec, or one for each type of layers."""
    if "version" in value:
        return RopeSpec.from_dict(value)
    return {name: RopeSpec.from_dict(each) for name, each in value.items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["origin"])
def test_a_new_configuration_is_read_or_refused(row: dict[str, Any]) -> None:
    if "refused" in row:
        with pytest.raises(ValueError, match=row["refused"]):
            RopeSpec.from_config(row["config"], **row["options"])
    else:
        assert RopeSpec.from_config(row["config"], **row["options"]) == wanted(row["wanted"])


def test_each_entry_names_its_source() -> None:
    assert len(ROWS) >= 14
    assert len({row["origin"] for row in ROWS}) == len(ROWS)
    assert all(row["source"] for row in ROWS)
