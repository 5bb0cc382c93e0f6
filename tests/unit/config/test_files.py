"""The files that `from_config` reads: a folder, its one configuration, and the record of a conversion."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.checkpoints import LLAVA
from tests.support.reading import LLAMA, read, refused
from tests.support.records import conversion, write_record
from tightrope.config import provenance, records_of


def test_a_folder_must_have_one_file(tmp_path: Path) -> None:
    names = "config.json and params.json"
    for has in ("neither", names):
        refused(tmp_path, f"a folder must have exactly one of {names} but {tmp_path} has {has}.")
        for name in names.split(" and "):
            (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "params.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert read(tmp_path) == read(LLAMA)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.json")


ONE = json.dumps(LLAMA)[:-1]


@pytest.mark.parametrize(
    "text, why",
    [
        ("[1]", "must hold a JSON object but holds list"),
        (f'{ONE}, "rope_theta": 1e4}}', "key must have one value but rope_theta is 500000.0 and 1"),
        (f'{ONE}, "rope_theta": 500000.0, "x": NaN, "x": NaN}}', ""),
    ],
)
def test_a_file_must_hold_an_object_whose_keys_have_one_value(
    tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    if why:
        refused(file, why)
    else:
        assert read(file) == read(LLAMA)


# --- the record of a conversion -------------------------------------------------------------------

TEXT = {key: value for key, value in LLAVA["text_config"].items() if key != "model_type"}
OMNI: dict[str, Any] = {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": TEXT}}
IN_TEXT = {"section": "text_config", "model": "model_type 'llama'"}
IN_VISION = {"section": "vision_config", "model": "model_type 'pixtral'"}
PARTS = {"text_config": IN_TEXT, "vision_config": IN_VISION}
Q = "model.layers.0.self_attn.q_proj.weight"
UNPLACED = (
    f"interleaved must be given, as tightrope_convert.json states the pairing of {Q} and others but not which section "
    "of this configuration describes them."
)


def converted(folder: Path, config: dict[str, Any], *records: dict[str, Any]) -> Path:
    """Write a configuration and records of conversions to neighbours."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_record(folder, *(conversion("interleaved", **record) for record in records))
    return folder


def loaded_part(folder: Path, whole: Any, *path: str) -> Any:
    """A part of a configuration with the name of the folder, which transformers gives to that of a loaded part."""
    part = whole
    for name in path:
        part = getattr(part, name)
        assert not records_of(part)  # it has no name, as long as it is a part
    part.name_or_path = str(folder)
    return part


def test_a_converted_folder_has_the_pairing_of_its_record(tmp_path: Path) -> None:
    """Otherwise a converted checkpoint would be rotated with the pairing that it had before."""
    folder = converted(tmp_path, LLAMA, {})
    for config in (folder, str(folder), folder / "config.json", AutoConfig.from_pretrained(folder)):
        assert read(config).interleaved
        assert not read(config, interleaved=False).interleaved
    row = next(row for row in provenance(folder).rows if row.field == "interleaved")
    assert row.source == "the conversion record tightrope_convert.json"
    (folder / "other.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert not read(folder / "other.json").interleaved
    assert not read(LLAMA).interleaved


@pytest.mark.parametrize("records", [[IN_TEXT], [IN_VISION], [IN_TEXT, IN_VISION]])
def test_a_record_settles_nothing_about_other_sections(
    tmp_path: Path, records: list[dict[str, str]]
) -> None:
    folder = converted(tmp_path, LLAVA, *records)
    assert read(folder).interleaved == (IN_TEXT in records)
    whole = AutoConfig.from_pretrained(folder)
    assert read(whole).interleaved == (IN_TEXT in records)
    assert [*records_of(whole)] == [record["section"] for record in records]
    for name, record in PARTS.items():
        assert read(folder, section=name).interleaved == (record in records)
        part = loaded_part(folder, whole, name)
        assert read(part).interleaved == (record in records)
        assert [*records_of(part)] == [""] * (record in records)


def test_a_part_with_parts_is_found_too(tmp_path: Path) -> None:
    where = {"section": "thinker_config.text_config", "model": "model_type 'qwen2_5_omni_text'"}
    folder = converted(tmp_path, AutoConfig.for_model(**OMNI).to_dict(), where)
    whole = AutoConfig.from_pretrained(folder)
    assert [*records_of(loaded_part(folder, whole, "thinker_config"))] == ["text_config"]
    whole = AutoConfig.from_pretrained(folder)
    assert [*records_of(loaded_part(folder, whole, "thinker_config", "text_config"))] == [""]


@pytest.mark.parametrize(
    "record",
    [
        {"section": None, "model": "a checkpoint without configuration"},
        {"section": "", "model": "model_type 'llama'"},
        {"section": "text_config", "model": "model_type 'mistral'"},
        {"section": "gone_config", "model": "model_type 'llama'"},
    ],
)
def test_a_record_of_a_section_that_is_not_known_is_a_question(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    folder = converted(tmp_path, LLAVA, record)
    for section in (*PARTS, None):
        refused(folder, UNPLACED, section=section)
    assert not read(folder, interleaved=False).interleaved


def test_two_parts_of_one_kind_are_a_question(tmp_path: Path) -> None:
    folder = converted(tmp_path, {**LLAVA, "vision_config": LLAVA["text_config"]}, IN_TEXT)
    inner = AutoConfig.for_model(**LLAVA["text_config"])
    inner.name_or_path = str(folder)
    refused(inner, UNPLACED)


def test_a_record_of_a_part_of_a_section_is_a_question(tmp_path: Path) -> None:
    folder = converted(tmp_path, LLAMA, {"left": ["b"]})
    text = f"interleaved must be given, as tightrope_convert.json states one pairing of {Q} and the other of b."
    refused(folder, text)
    one = conversion("interleaved", left=["b"])
    write_record(folder, one, conversion("half", tensors=["b"]))
    refused(folder, text)
    write_record(folder, one, conversion("interleaved", tensors=["b"]))
    assert read(folder).interleaved
