"""What `inspect` reads, and what it notes: laws over rows.jsonl, over published models, and over parts of a model.

A row has the codes of all warnings and of some notes, each with a phrase of its text, and codes that are `absent`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import gguf
from tests.support.model_configs import LLAMA4_SCOUT, MODELS, QWEN3_VL, Model, llama3, v4
from tests.support.rows import read_rows
from tightrope import RopeSpec
from tightrope.frequencies import Llama3
from tightrope_tools.inspect import compare, inspect

ROWS = read_rows(Path(__file__).with_name("rows.jsonl"), "config")
REFUSED = {name: row for name, row in ROWS.items() if "error" in row}
LLAMA31 = v4("llama", 4096, 32, 500000.0, max_position_embeddings=131072, rope_scaling=llama3(8.0))


def only(config: object, **options: Any) -> Any:
    """Inspect a configuration with one part; return that part."""
    (part,) = inspect(config, **options).parts
    return part


# --- notes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_warnings_and_notes(name: str) -> None:
    row = ROWS[name]
    found = inspect(row["config"], **row.get("options", {}))
    json.dumps(found.to_dict(), allow_nan=False)
    assert {note.code for note in found.warnings} == row.get("warnings", {}).keys()
    notes = {note.code: note for part in found.parts for note in part.notes}
    assert not notes.keys() & {*row.get("absent", ())}
    for wanted, warns in ((row.get("warnings", {}), True), (row.get("notes", {}), False)):
        for code, phrase in wanted.items():
            assert phrase in notes[code].text
            assert notes[code].warning == warns


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    row = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        inspect(row["config"], **row.get("options", {}))
    assert row["error"] in str(caught.value)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.origin} {model.form}")
def test_every_published_model_is_reported_whole(model: Model) -> None:
    """None gets a warning, except that tests/support/model_configs.py adds a context of 8192 where none is stated."""
    found = inspect(model.config)
    assert found.parts
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    for part, written in zip(found.parts, document["parts"], strict=True):
        assert RopeSpec.from_dict(written["spec"]) == part.spec
        assert len(written["pairs"]) == len(part.spec.frequencies().exact)
        untold = part.part.context is not None and part.part.context[1] == 8192
        codes = {note.code for note in part.notes if note.warning}
        assert codes <= ({"original-length"} if untold else set())


# --- fields and parts -----------------------------------------------------------------------------


def test_a_saved_spec(tmp_path: Path) -> None:
    spec = RopeSpec(128, base=5e5, scaling=Llama3(8, 1, 4, 8192))
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.to_dict()))
    for given in (path, str(path), spec.to_dict()):
        found = inspect(given)
        assert found.form == "RopeSpec JSON"
        assert found.parts[0].spec == spec
    assert only(spec).spec == spec
    names = {each.name for each in only(spec).part.fields}
    assert names >= {"head_dim", "scaling", "scaling.factor"}


def test_sections_and_layers() -> None:
    found = inspect(QWEN3_VL)
    assert [part.name for part in found.parts] == ["text_config", "vision_config"]
    assert [part.spec.axis_count for part in found.parts] == [3, 2]
    assert inspect(QWEN3_VL, section="text_config").parts == found.parts[:1]
    found = inspect(LLAMA4_SCOUT, section="text_config")
    assert [part.name for part in found.parts] == ["text_config: rope"]
    assert [part.name for part in found.without] == ["text_config: no_rope"]
    assert found.parts[0].part.layers == 36
    assert found.without[0].why_not == "these layers do not rotate"
    # A section that cannot be read leaves the others.
    broken = {**QWEN3_VL, "vision_config": {**QWEN3_VL["vision_config"], "num_heads": "many"}}
    found = inspect(broken)
    assert [part.name for part in found.parts] == ["text_config"]
    assert "num_heads must be an int" in str(found.without[0].why_not)


def test_a_gguf_file_is_read(tmp_path: Path) -> None:
    part = only(gguf.write(tmp_path / "model.gguf"))
    assert part.spec == RopeSpec(128, base=5e5, interleaved=True)
    assert part.part.context == ("llama.context_length", 131072)
    assert {each.source for each in part.part.fields} >= {"llama.rope.freq_base"}


def test_a_warning_points_at_the_line_of_the_caller() -> None:
    with pytest.warns(UserWarning, match="rope_unknown") as caught:
        inspect({**MODELS[0].config, "rope_unknown": 1}, strict=False)
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}


# --- factors of the attention, which no rotation has ----------------------------------------------


def test_softmax_scales_are_compared_and_may_be_unknown() -> None:
    """With YaRN by 16 and mscale_all_dim 1, DeepSeek's attention multiplies by (0.1 ln 16 + 1)²."""
    stated = ROWS["an unknown family, whose attention may multiply"]
    one, other = (inspect(ROWS[name]["config"]) for name in ("Mistral 4", MINISTRAL))
    unknown = inspect(stated["config"], **stated["options"])
    assert one.parts[0].softmax_scaling == pytest.approx((0.1 * math.log(16) + 1) ** 2)
    assert other.parts[0].softmax_scaling == 1.0
    assert unknown.parts[0].to_dict()["softmax_scaling"] is None
    for a, b, wanted in ((one, other, True), (other, other, False), (other, unknown, True)):
        (part,) = compare(a, b).parts
        assert any("softmax scale" in why for why in part.why) == wanted
    text = "the factors on the softmax scale are 1 in one and unknown in the other"
    assert text in compare(other, unknown).parts[0].why


MINISTRAL = "Ministral 3, whose attention does not multiply"
