"""Test the files that `from_config` reads: a folder, its one configuration, and the record of a conversion."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.reading import LLAMA, read, refused
from tests.support.records import conversion, write_record
from tightrope.config import provenance, records_of


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


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "rope_theta": 1e4, "num_hidden_layers": 1}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 5,
    "text_config": {"model_type": "llama", "vocab_size": 8, "intermediate_size": 8, **SIZES},
    "vision_config": {"model_type": "pixtral", "head_dim": 8, "intermediate_size": 8, **SIZES},
}
IN_TEXT = {"section": "text_config", "model": "model_type 'llama'"}
IN_VISION = {"section": "vision_config", "model": "model_type 'pixtral'"}
UNPLACED = (
    "[from_config] interleaved must be given, as tightrope_convert.json states the pairing of "
    "model.layers.0.self_attn.q_proj.weight and others but not which section of this configuration describes them."
)


def converted(folder: Path, config: dict[str, Any], *conversions: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_record(folder, *conversions)
    return folder


def test_a_converted_folder_has_the_pairing_of_its_record(tmp_path: Path) -> None:
    """Otherwise a converted checkpoint would be rotated with the pairing that it had before."""
    from transformers import AutoConfig

    folder = converted(tmp_path / "a", LLAMA, conversion("interleaved"))
    for config in (folder, str(folder), folder / "config.json", AutoConfig.from_pretrained(folder)):
        assert read(config).interleaved
        assert not read(config, interleaved=False).interleaved
    row = next(row for row in provenance(folder).rows if row.field == "interleaved")
    assert row.source == "the conversion record tightrope_convert.json"
    (folder / "other.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert not read(folder / "other.json").interleaved
    assert not read(LLAMA).interleaved


@pytest.mark.parametrize("record", [IN_TEXT, IN_VISION])
def test_a_record_settles_nothing_about_other_sections(
    tmp_path: Path, record: dict[str, str]
) -> None:
    folder = converted(tmp_path / "a", LLAVA, conversion("interleaved", **record))
    text, vision = (
        read(folder, section=name).interleaved for name in ("text_config", "vision_config")
    )
    assert (text, vision) == (record is IN_TEXT, record is IN_VISION)
    assert read(folder).interleaved == text
    write_record(folder, *(conversion("interleaved", **each) for each in (IN_TEXT, IN_VISION)))
    assert read(folder, section="text_config").interleaved
    assert read(folder, section="vision_config").interleaved


@pytest.mark.parametrize("record", [IN_TEXT, IN_VISION])
def test_a_part_that_was_loaded_from_the_folder_of_the_whole(
    tmp_path: Path, record: dict[str, str]
) -> None:
    """transformers gives the configuration of a loaded text part the name of the folder."""
    from transformers import AutoConfig

    folder = converted(tmp_path / "a", LLAVA, conversion("interleaved", **record))
    whole = AutoConfig.from_pretrained(folder)
    assert read(whole).interleaved == (record is IN_TEXT)
    assert [*records_of(whole)] == [record["section"]]
    for name, inside in (("text_config", IN_TEXT), ("vision_config", IN_VISION)):
        part = getattr(whole, name)
        assert not records_of(part)  # it has no name, as long as it is a part
        part.name_or_path = str(folder)
        assert read(part).interleaved == (record is inside)
        assert [*records_of(part)] == [""] * (record is inside)


def test_a_part_with_parts_is_found_too(tmp_path: Path) -> None:
    from transformers import AutoConfig

    inner = {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {**SIZES}}}
    config = AutoConfig.for_model(**inner).to_dict()
    where = {"section": "thinker_config.text_config", "model": "model_type 'qwen2_5_omni_text'"}
    folder = converted(tmp_path / "a", config, conversion("interleaved", **where))
    thinker = AutoConfig.from_pretrained(folder).thinker_config
    thinker.name_or_path = str(folder)
    assert [*records_of(thinker)] == ["text_config"]
    thinker.text_config.name_or_path = str(folder)
    assert [*records_of(thinker.text_config)] == [""]


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
    folder = converted(tmp_path / "a", LLAVA, conversion("interleaved", **record))
    for section in ("text_config", "vision_config", None):
        refused(folder, UNPLACED.removeprefix("[from_config] "), section=section)
    assert not read(folder, interleaved=False).interleaved


def test_two_parts_of_one_kind_are_a_question(tmp_path: Path) -> None:
    from transformers import AutoConfig

    part = LLAVA["text_config"]
    config = {**LLAVA, "vision_config": part}
    folder = converted(tmp_path / "a", config, conversion("interleaved", **IN_TEXT))
    inner = AutoConfig.for_model(**part)
    inner.name_or_path = str(folder)
    refused(inner, UNPLACED.removeprefix("[from_config] "))


def test_a_record_of_a_part_of_a_section_is_a_question(tmp_path: Path) -> None:
    folder = converted(tmp_path / "a", LLAMA, conversion("interleaved", left=["b"]))
    text = "interleaved must be given, as tightrope_convert.json states one pairing of {} and the other of {}."
    name = "model.layers.0.self_attn.q_proj.weight"
    refused(folder, text.format(name, "b"))
    write_record(folder, conversion("interleaved", left=["b"]), conversion("half", tensors=["b"]))
    refused(folder, text.format(name, "b"))
    write_record(
        folder, conversion("interleaved", left=["b"]), conversion("interleaved", tensors=["b"])
    )
    assert read(folder).interleaved


@pytest.mark.parametrize(
    "text",
    [
        '{"pairing": "half"}',
        '{"conversions": [{"pairing": "half"}]}',
        json.dumps({"conversions": [conversion("sideways")]}),
        json.dumps({"conversions": {"pairing": "half"}}),
    ],
)
def test_an_invalid_record_is_refused(tmp_path: Path, text: str) -> None:
    folder = converted(tmp_path / "b", LLAMA)
    (folder / "tightrope_convert.json").write_text(text, encoding="utf-8")
    refused(
        folder,
        "tightrope_convert.json must list conversions, each with its section, pairing and tensors, but does not: remove "
        "the record and pass the pairing.",
    )
