"""Test the files that `from_config` reads: a folder, its one configuration, and the record of a conversion."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.reading import LLAMA, read, refused
from tightrope.config import provenance


def test_a_folder_must_have_one_file(tmp_path: Path) -> None:
    names = "config.json and params.json"
    for has in ("neither", names):
        text = f"a folder must have exactly one of {names} but {tmp_path} has {has}."
        refused(tmp_path, text)
        for name in names.split(" and "):
            (tmp_path / name).write_text("{}", encoding="utf-8")


def test_a_file_must_hold_an_object(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[1]", encoding="utf-8")
    refused(file, f"{file} must hold a JSON object but holds list.")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.json")


def test_a_key_of_a_file_must_have_one_value(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    text = json.dumps(LLAMA)[:-1] + ', "rope_theta": 1e4, "vocab_size": 9, "vocab_size": 9}'
    file.write_text(text, encoding="utf-8")
    refused(file, f"in {file} each key must have one value but rope_theta is 500000.0 and 10000.0.")
    text = text.replace("1e4", "500000.0")[:-1] + ', "x": NaN, "x": NaN}'
    file.write_text(text, encoding="utf-8")
    assert read(file) == read(LLAMA)


# --- the record of a conversion -------------------------------------------------------------------


def converted(folder: Path, config: dict[str, Any], record: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tightrope_convert.json").write_text(f'{{"pairing": "{record}"}}', encoding="utf-8")
    return folder


def test_a_converted_folder_has_the_pairing_of_its_record(tmp_path: Path) -> None:
    """Otherwise a converted checkpoint would be rotated with the pairing that it had before."""
    from transformers import AutoConfig

    folder = converted(tmp_path / "a", LLAMA, "interleaved")
    for config in (folder, str(folder), folder / "config.json", AutoConfig.from_pretrained(folder)):
        assert read(config).interleaved
        assert not read(config, interleaved=False).interleaved
    row = next(row for row in provenance(folder).rows if row.field == "interleaved")
    assert row.source == "the conversion record tightrope_convert.json"
    (folder / "other.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert not read(folder / "other.json").interleaved
    assert not read(LLAMA).interleaved


def test_a_record_of_several_sections_or_no_pairing_is_an_error(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "rope_theta": 1e4}
    parts = {"text_config": sizes, "vision_config": {"hidden_size": 32, "num_heads": 4}}
    folder = converted(tmp_path / "a", {"model_type": "qwen2_5_vl", **parts}, "interleaved")
    text = (
        "interleaved must be given, as tightrope_convert.json states the pairing of the weights but not which of "
        "text_config, vision_config it means."
    )
    refused(folder, text, section="text_config")
    folder = converted(tmp_path / "b", LLAMA, "sideways")
    sentence = "tightrope_convert.json must state 'half' or 'interleaved' but states 'sideways'"
    with pytest.raises(ValueError, match=sentence):
        read(folder)
