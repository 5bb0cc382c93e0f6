"""A record is about the tensors that were converted: obeyed for these, and for no others."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import (
    DEEPSEEK,
    LLAMA,
    contents,
    latent_tensors,
    llama_tensors,
    write,
)
from tightrope import RopeSpec
from tightrope.config.files import RECORD
from tightrope_tools.convert import Conversion, Stated, convert, detect
from tightrope_tools.inspect import inspect

TOWER = "vision_tower.layers.*.attention."
TEXT, VISION = "language_model.model.layers.0.self_attn.", "vision_tower.layers.0.attention."
CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_theta": 5e5,
        "num_hidden_layers": 1,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "text_config": {"section": "text_config", "prefix": "language_model.model."},
    "vision_config": {
        "section": "vision_config",
        "naming": {f"{TOWER}q_proj": "q", f"{TOWER}k_proj": "k"},
    },
}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [f"{place}{x}_proj.weight" for place in (TEXT, VISION) for x in "qkv"]
    return {name: torch.randn(64, 64, generator=generator) for name in names}


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    return write(tmp_path / "a", weights(), CONFIG)


def go(folder: Path, out: str, to: str, part: str = "", **more: Any) -> Conversion:
    stated = Stated(**{**OPTIONS.get(part, {}), **more})
    return convert(folder, folder.parent / out, to=to, stated=stated, verify=True)


def pairings(folder: Path) -> dict[str, bool]:
    """Return what `from_config` and `inspect` read of both sections, which must agree."""
    found = {name: RopeSpec.from_config(folder, section=name).interleaved for name in OPTIONS}  # type: ignore[union-attr]
    parts = {part.name: part.spec.interleaved for part in inspect(folder).parts}
    assert parts == found
    assert RopeSpec.from_config(folder).interleaved == found["text_config"]  # type: ignore[union-attr]
    return found


def record_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / RECORD).read_text("utf-8")
    listed: list[dict[str, Any]] = json.loads(text)["conversions"]
    return listed


def test_a_section_brings_no_other_back(llava: Path) -> None:
    go(llava, "b", "interleaved", "vision_config")
    (one,) = record_of(llava.parent / "b")
    assert (one["section"], one["model"], one["pairing"]) == (
        "vision_config",
        "model_type 'pixtral'",
        "interleaved",
    )
    (rows,) = one["rows"]
    assert rows["slice"] == "32 of 32 channels from 0 on"
    assert rows["tensors"] == dict.fromkeys((f"{VISION}k_proj.weight", f"{VISION}q_proj.weight"), 0)
    assert pairings(llava.parent / "b") == {"text_config": False, "vision_config": True}
    text = "is already half .assumed from model_type 'llama'.; if it is not, pass --from interleaved; for another part "
    for more in ({}, {"prefix": "language_model.model."}):
        with pytest.raises(ValueError, match=f"{text}.*, pass --section vision_config"):
            go(llava.parent / "b", "c", "half", **more)
    go(llava.parent / "b", "c", "half", "vision_config")
    assert contents(llava.parent / "c") == contents(llava)


@pytest.mark.parametrize("last", OPTIONS)
def test_a_record_leaves_with_what_is_undone(llava: Path, last: str) -> None:
    first = next(name for name in OPTIONS if name != last)
    go(llava, "b", "interleaved", "vision_config")
    done = go(llava.parent / "b", "c", "interleaved", "text_config")
    assert done.source_from == "model_type 'llama'"
    assert pairings(llava.parent / "c") == dict.fromkeys(OPTIONS, True)
    assert {one["section"] for one in record_of(llava.parent / "c")} == {*OPTIONS}
    go(llava.parent / "c", "d", "half", first)
    assert pairings(llava.parent / "d") == {first: False, last: True}
    assert [one["section"] for one in record_of(llava.parent / "d")] == [last]
    go(llava.parent / "d", "e", "half", last)
    assert contents(llava.parent / "e") == contents(llava)


@pytest.mark.parametrize("last", OPTIONS)
def test_a_single_file_names_the_section(llava: Path, last: str) -> None:
    """Its metadata hold what a folder has in a file."""
    first = next(name for name in OPTIONS if name != last)
    steps = (("b", first, "interleaved"), ("c", last, "interleaved"), ("d", first, "half"))
    source = llava / "model.safetensors"
    for name, section, to in steps:
        made = llava / f"{name}.safetensors"
        convert(source, made, to=to, stated=Stated(**OPTIONS[section]))
        source = made
    (llava / "model.safetensors").rename(llava.parent / "kept.safetensors")
    for name in ("b", "c"):
        (llava / f"{name}.safetensors").unlink()
    (llava / "d.safetensors").rename(llava / "model.safetensors")
    parts = {part.name: part for part in inspect(llava).parts}
    assert {name: part.spec.interleaved for name, part in parts.items()} == {
        first: False,
        last: True,
    }
    whence = {row.name: row.source for row in parts[last].fields}["interleaved"]
    assert whence == "the conversion record in model.safetensors"
    convert(
        llava / "model.safetensors",
        llava / "e.safetensors",
        to="half",
        stated=Stated(**OPTIONS[last]),
    )
    assert (llava / "e.safetensors").read_bytes() == (
        llava.parent / "kept.safetensors"
    ).read_bytes()


def test_a_folders_record_goes_with_a_file_of_it(llava: Path) -> None:
    go(llava, "b", "interleaved", "vision_config")
    here = llava.parent / "b"
    options = OPTIONS["text_config"]
    for other in ("model", "alone"):
        made = here / f"{other}-{other}.safetensors"
        convert(here / "model.safetensors", made, to="interleaved", stated=Stated(**options))
        (here / RECORD).unlink(missing_ok=True)  # the file has its own
        assert detect(made, stated=Stated(**OPTIONS["vision_config"])).stated == "interleaved"
        assert detect(made, stated=Stated(**options)).stated == "interleaved"
        made.rename(here / "model.safetensors")
        convert(
            here / "model.safetensors",
            here / "back.safetensors",
            to="half",
            stated=Stated(**options),
        )
        (here / "back.safetensors").rename(here / "model.safetensors")
    assert detect(here, stated=Stated(**OPTIONS["vision_config"])).stated == "interleaved"
    assert detect(here, stated=Stated(**options)).stated == "half"


# --- the tensors of one section -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_prefix_is_a_part_of_its_section(tmp_path: Path, order: str, family: str) -> None:
    """A configuration without sections, and layers under two prefixes; DeepSeek's has a key for the pairing."""
    own = {"llama": LLAMA, "deepseek_v3": {**DEEPSEEK, "rope_interleave": True}}[family]
    one_part = llama_tensors() if family == "llama" else latent_tensors()
    tensors = {f"{side}.{name}": x.clone() for side in "ab" for name, x in one_part.items()}
    source = write(tmp_path / "a", tensors, own)
    was, to = ("half", "interleaved") if family == "llama" else ("interleaved", "half")
    one, other = order

    def step(source: str, out: str, to: str, side: str) -> Path:
        made = tmp_path / out
        stated = Stated(prefix=f"{side}.model.")
        done = convert(tmp_path / source, made, to=to, stated=stated)
        text = "must be given, as tightrope_convert.json states one pairing of .* and the other of "
        if out in ("b", "d"):
            assert done.marked is None
            with pytest.raises(ValueError, match=text):
                RopeSpec.from_config(made)
            with pytest.raises(ValueError, match=text):
                inspect(made)
        if out == "b":
            (note,) = (note for note in done.notes if "rotate" in note)
            assert "projections under other prefixes stay" in note
        return made

    step("a", "b", to, one)
    both = RopeSpec.from_config(step("b", "c", to, other))
    assert both.interleaved == (to == "interleaved")  # type: ignore[union-attr]
    config = json.loads((tmp_path / "c" / "config.json").read_text("utf-8"))
    assert config.get("rope_interleave") == {"llama": None, "deepseek_v3": False}[family]
    step("c", "d", was, other)
    # What was undone has its old pairing, whatever else is stated.
    again = Stated(prefix=f"{other}.model.")
    with pytest.raises(ValueError, match=f"already {was} .stated by the conversion record"):
        convert(tmp_path / "d", tmp_path / "x", to=was, stated=again)
    assert contents(step("d", "e", was, one)) == contents(source)


def test_layers_of_a_part_without_rope_are_not_of_the_section(tmp_path: Path) -> None:
    """Gemma 3 has images from SigLIP, which has layers of the same names and no RoPE."""
    tensors = {f"language_model.{name}": x for name, x in llama_tensors().items()}
    tensors |= {f"vision_tower.{name}": x.clone() for name, x in llama_tensors().items()}
    siglip = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_attention_heads": 4}
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": siglip}
    source = write(tmp_path / "a", tensors, config)
    stated = Stated(prefix="language_model.model.")
    done = convert(source, tmp_path / "b", to="interleaved", stated=stated)
    (call,) = calls_in(done)
    for read in (eval(call), RopeSpec.from_config(tmp_path / "b")):
        assert read.interleaved
    convert(tmp_path / "b", tmp_path / "c", to="half", stated=stated)
    assert contents(tmp_path / "c") == contents(source)


def test_records_of_some_of_the_tensors(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=2)
    name = "model-00001-of-00002.safetensors"
    convert(source / name, tmp_path / name, to="interleaved", stated=Stated(config=source))
    (tmp_path / name).rename(source / name)
    text = f"must agree but state {re.escape(name)}: interleaved, nothing about model.layers.*: pass --from if all"
    with pytest.raises(ValueError, match=text):
        detect(source)


def test_a_record_about_tensors_that_were_renamed(tmp_path: Path) -> None:
    """Neither the record nor the family states their pairing: the family's would permute them twice."""
    source = write(tmp_path / "a", llama_tensors(), LLAMA)
    convert(source, tmp_path / "b", to="interleaved")
    file = tmp_path / "b" / "model.safetensors"
    save_file({f"wrapped.{name}": tensor for name, tensor in load_file(file).items()}, file)
    for to in ("half", "interleaved"):
        with pytest.raises(
            ValueError, match=r"must be in the checkpoint but .* are not, perhaps because they were"
        ):
            convert(tmp_path / "b", tmp_path / "c", to=to)
    with pytest.raises(
        ValueError, match="perhaps because they were renamed: pass --from, or remove"
    ):
        detect(tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c", to="half", stated=Stated(source="interleaved"))
    assert {
        name.removeprefix("wrapped."): each.tolist()
        for name, each in load_file(tmp_path / "c" / "model.safetensors").items()
    } == {name: each.tolist() for name, each in load_file(source / "model.safetensors").items()}


@pytest.mark.parametrize("shards", [1, 2])
def test_from_config_obeys_a_record_in_the_files_of_weights(tmp_path: Path, shards: int) -> None:
    source = write(tmp_path / "a", llama_tensors(), LLAMA, shards=shards)
    for file in sorted(source.glob("*.safetensors")):
        convert(file, tmp_path / file.name, to="interleaved", stated=Stated(config=source))
        (tmp_path / file.name).rename(file)
    for config in (source, source / "config.json"):
        assert RopeSpec.from_config(config).interleaved  # type: ignore[union-attr]
    (part,) = inspect(source).parts
    assert part.spec.interleaved
    # A stand-in for a file of weights, and a damaged one, have no record.
    for text in (
        b"version https://git-lfs.github.com/spec/v1",
        b"\x15\0\0\0\0\0\0\0{tightrope.convert: 1}",
    ):
        for file in source.glob("*.safetensors"):
            file.write_bytes(text)
        assert not RopeSpec.from_config(source).interleaved  # type: ignore[union-attr]


def test_a_record_is_about_the_slice_that_was_converted(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), LLAMA)
    convert(source, tmp_path / "b", to="interleaved")
    config = tmp_path / "b" / "config.json"
    config.write_text(json.dumps({**LLAMA, "rope_theta": 3e4}))
    assert RopeSpec.from_config(tmp_path / "b").interleaved  # type: ignore[union-attr]
    config.write_text(json.dumps({**LLAMA, "head_dim": 4, "num_attention_heads": 8}))
    with pytest.raises(
        ValueError,
        match=r"interleaved must be given, as .* and the configuration another slice, 4 of 4",
    ):
        RopeSpec.from_config(tmp_path / "b")
    assert RopeSpec.from_config(tmp_path / "b", interleaved=True)


@pytest.mark.parametrize("other", ["packing", "rotary_dim"])
def test_the_way_back_of_other_rows_is_refused(tmp_path: Path, other: str) -> None:
    tensors = {"layers.0.attn.qkv.weight": torch.randn(96, 32)}
    source = write(tmp_path / "a", tensors, None)
    naming = {"layers.*.attn.qkv": "qkv"}
    known = {"naming": naming, "head_dim": 8, "heads": 4, "kv_heads": 4, "packing": "blocks"}
    there = Stated(**known, source="half")  # type: ignore[arg-type]
    convert(source, tmp_path / "b", to="interleaved", stated=there)
    changed = {"packing": "grouped"} if other == "packing" else {"rotary_dim": 4}
    text = "must be about the rows of layers.0.attn.qkv.weight that would move but states others: state the slice"
    with pytest.raises(ValueError, match=text):
        convert(tmp_path / "b", tmp_path / "c", to="half", stated=Stated(**{**known, **changed}))  # type: ignore[arg-type]
    convert(tmp_path / "b", tmp_path / "c", to="half", stated=Stated(**known))  # type: ignore[arg-type]
    assert contents(tmp_path / "c") == contents(source)
    # Where the user states the pairing, nothing is undone, and the record stays.
    stated = Stated(**{**known, **changed}, source="interleaved")  # type: ignore[arg-type]
    convert(tmp_path / "b", tmp_path / "d", to="half", stated=stated)
    assert record_of(tmp_path / "d")[0]["pairing"] == "half"


# --- the advice after a conversion ----------------------------------------------------------------


def calls_in(done: Conversion) -> Iterator[str]:
    for note in done.notes:
        yield from re.findall(r"RopeSpec[^,]*\(.*?\)(?=, which)", note)


def test_the_note_names_a_call_for_the_section(llava: Path) -> None:
    (call,) = calls_in(go(llava, "b", "interleaved", "vision_config"))
    (llava.parent / "b" / RECORD).unlink()  # the call needs no record
    spec = eval(call)
    assert spec == RopeSpec.from_config(CONFIG, section="vision_config", interleaved=True)


def test_the_note_is_about_the_configuration_that_was_read(llava: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**CONFIG["text_config"], "rope_theta": 7e5}), encoding="utf-8")
    more = {"section": None, "prefix": "language_model.model."}
    (call,) = calls_in(go(llava, "b", "interleaved", **more, config=other))
    assert eval(call) == RopeSpec(16, base=7e5, interleaved=True)
    config = json.loads(other.read_text("utf-8"))
    (call,) = calls_in(go(llava, "c", "interleaved", **more, config=config))
    assert eval(call) == RopeSpec(16, base=7e5, interleaved=True)
    known = {"config": False, "head_dim": 16, "heads": 4, "kv_heads": 4, "naming": "llama"}
    done = go(llava, "d", "interleaved", **more, **known, source="half")
    assert [*calls_in(done)] == ["RopeSpec(…, interleaved=True)"]
    # None of the three says which section of config.json describes the tensors.
    for name in "bcd":
        with pytest.raises(
            ValueError, match="but not which section of this configuration describes them"
        ):
            RopeSpec.from_config(llava.parent / name)
        with pytest.raises(ValueError, match="but not which section of this configuration"):
            inspect(llava.parent / name)


def test_the_note_of_an_unknown_family_leaves_open_what_the_user_must_state(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "zebra9"}
    source = write(tmp_path / "a", llama_tensors(), config)
    stated = Stated(source="half", naming="llama", rotary_dim=8)
    (call,) = calls_in(convert(source, tmp_path / "b", to="interleaved", stated=stated))
    assert call.endswith("interleaved=True, rope_layers=…, rotary_dim=8)")
    assert eval(call.replace("…", "'all'")).interleaved


# --- invalid records ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"pairing": "half"}', '{"conversions": [{}]}', '{"conversions": 1}']
)
def test_an_invalid_record_is_refused(tmp_path: Path, text: str) -> None:
    """The record of an earlier version states a pairing and no section."""
    source = write(tmp_path / "a", llama_tensors())
    (source / RECORD).write_text(text, encoding="utf-8")
    message = "must list conversions, each with its section, pairing and tensors, but does not"
    for function in (detect, inspect, RopeSpec.from_config):
        with pytest.raises(ValueError, match=message):
            function(source)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "b", to="interleaved")


@pytest.mark.parametrize("metadata", [{"tightrope.pairing": "half"}, {"tightrope.convert": "{"}])
def test_invalid_metadata_are_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    source = write(tmp_path / "a", llama_tensors())
    file = source / "model.safetensors"
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(ValueError, match="must list conversions, each with its section"):
        detect(source)
