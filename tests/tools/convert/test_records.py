"""A record is about the tensors that were converted: obeyed for these, and for no others."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import (
    DEEPSEEK,
    LLAMA,
    LLAVA,
    contents,
    latent_tensors,
    llama_tensors,
    write,
)
from tests.support.matrix import every_pair
from tests.support.records import conversion
from tightrope import RopeSpec
from tightrope.config.files import RECORD
from tightrope_tools.convert import Conversion, Stated, convert, detect
from tightrope_tools.inspect import inspect

MODEL = "model.safetensors"


def read(folder: Path, **more: Any) -> Any:
    return RopeSpec.from_config(folder, **more)


def go(folder: Path, out: str, to: str, **stated: Any) -> Conversion:
    return convert(folder, folder.parent / out, to=to, stated=Stated(**stated))


def refused(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


NOTE = "no key of a configuration states the pairing: rotate "


# --- sections -------------------------------------------------------------------------------------

TOWER = "vision_tower.layers.*.attention."
TEXT, VISION = "language_model.model.layers.0.self_attn.", "vision_tower.layers.0.attention."
SECTIONS: dict[str, dict[str, Any]] = {
    "text_config": {"section": "text_config", "prefix": "language_model.model."},
    "vision_config": {
        "section": "vision_config",
        "naming": {f"{TOWER}q_proj": "q", f"{TOWER}k_proj": "k"},
    },
}


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    names = [f"{place}{x}_proj.weight" for place in (TEXT, VISION) for x in "qkv"]
    return write(tmp_path / "a", {name: torch.randn(64, 64) for name in names}, LLAVA)


def sections_of(folder: Path) -> dict[str, bool]:
    """Return the pairings that `from_config` and `inspect` read of both sections, which must agree."""
    found = {name: read(folder, section=name).interleaved for name in SECTIONS}
    assert {part.name: part.spec.interleaved for part in inspect(folder).parts} == found
    assert read(folder).interleaved == found["text_config"]
    return found


@every_pair(
    first=tuple(SECTIONS),
    undone=tuple(SECTIONS),
    ways=("folders", "files", "folders then files", "files then folders"),
)
def test_a_record_is_about_its_section(llava: Path, first: str, undone: str, ways: str) -> None:
    """One section after the other is converted, and back; a file carries the record of its folder."""
    here, expected = llava, dict.fromkeys(SECTIONS, False)
    last, left = (next(name for name in SECTIONS if name != one) for one in (first, undone))
    for step, name in enumerate((first, last, undone, left)):
        to, out = "interleaved" if step < 2 else "half", llava.parent / f"step {step}"
        stated = Stated(**SECTIONS[name])
        if ways.split(" then ")[step > 1 and "then" in ways] == "folders":
            done = convert(here, out, to=to, stated=stated, verify=True)
        else:
            out.mkdir()
            (out / "config.json").write_bytes((llava / "config.json").read_bytes())
            done = convert(here / MODEL, out / MODEL, to=to, stated=stated, verify=True)
        assert done.assumed == (step < 2)
        expected[name] = step < 2
        assert sections_of(out) == expected
        for section, interleaved in expected.items():
            found = detect(out, stated=Stated(**SECTIONS[section]))
            assert (found.stated == "interleaved", found.assumed) == (interleaved, not interleaved)
        here = out
    assert contents(here) == contents(llava)


def test_the_record_of_a_section(llava: Path) -> None:
    done = go(llava, "b", "interleaved", **SECTIONS["vision_config"])
    assert done.notes[0].startswith(
        f"{NOTE}vision_config by RopeSpec(…, interleaved=True), which pairs ne"
    )
    there = llava.parent / "b"
    (one,) = json.loads((there / RECORD).read_text("utf-8"))["conversions"]
    found = (one["section"], one["model"], one["pairing"], one["was"])
    assert found == ("vision_config", "model_type 'pixtral'", "interleaved", "half")
    (rows,) = one["rows"]
    assert rows["slice"] == "32 of 32 channels from 0 on"
    assert rows["tensors"] == dict.fromkeys((f"{VISION}k_proj.weight", f"{VISION}q_proj.weight"), 0)
    text = "is already half .assumed from model_type 'llama'.; if it is not, pass --from interleaved, and for another part"
    for more in ({}, {"prefix": "language_model.model."}):
        with refused(text):
            go(there, "c", "half", **more)


def test_a_record_without_a_section(llava: Path, tmp_path: Path) -> None:
    """Other configurations than that of the folder do not say which of its sections describes the tensors."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps(LLAVA["text_config"]), encoding="utf-8")
    known = {"head_dim": 16, "heads": 4, "kv_heads": 4, "naming": "llama", "source": "half"}
    for out, stated in (("b", {"config": other}), ("c", {"config": False, **known})):
        done = go(llava, out, "interleaved", prefix="language_model.model.", **stated)
        assert done.notes[0].startswith(f"{NOTE}the ")
        for function in (read, inspect):
            with refused("but not which section of this configuration describes them"):
                function(llava.parent / out)


# --- the tensors of one section -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_prefix_is_a_part_of_its_section(tmp_path: Path, order: str, family: str) -> None:
    """A configuration without sections, and layers under two prefixes; DeepSeek's has a key for the pairing."""
    was, to = ("half", "interleaved") if family == "llama" else ("interleaved", "half")
    own = LLAMA if family == "llama" else {**DEEPSEEK, "rope_interleave": True}
    one_part = llama_tensors() if family == "llama" else latent_tensors()
    tensors = {f"{side}.{name}": x.clone() for side in "ab" for name, x in one_part.items()}
    source = write(tmp_path / "a", tensors, own)
    one, other = (f"{side}.model." for side in order)
    done = go(source, "b", to, prefix=one)
    (note,) = (note for note in done.notes if "rotate" in note)
    assert note.startswith(f"{NOTE}the changed tensors by ")
    assert done.marked is None
    go(tmp_path / "b", "c", to, prefix=other)
    go(tmp_path / "c", "d", was, prefix=other)
    for function in (read, inspect):
        for name in "bcd":
            with refused("but not which section of this configuration describes them"):
                function(tmp_path / name)
    with refused(f"already {to} .stated by the conversion record"):
        go(tmp_path / "c", "x", to, prefix=other)
    go(tmp_path / "d", "e", was, prefix=one)
    assert contents(tmp_path / "e") == contents(source)


def test_layers_of_a_part_without_rope_are_not_of_the_section(tmp_path: Path) -> None:
    """Gemma 3 has images from SigLIP, which has layers of the same names and no RoPE."""
    parts = ("language_model", "vision_tower")
    tensors = {f"{part}.{name}": x.clone() for part in parts for name, x in llama_tensors().items()}
    siglip = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_attention_heads": 4}
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": siglip}
    source = write(tmp_path / "a", tensors, config)
    go(source, "b", "interleaved", prefix="language_model.model.")
    assert read(tmp_path / "b").interleaved
    go(tmp_path / "b", "c", "half", prefix="language_model.model.")
    assert contents(tmp_path / "c") == contents(source)


def test_a_record_about_tensors_that_were_renamed(tmp_path: Path) -> None:
    """Neither the record nor the family states their pairing: the family's would permute them twice."""
    source = write(tmp_path / "a", llama_tensors(), LLAMA)
    go(source, "b", "interleaved")
    file = tmp_path / "b" / MODEL
    save_file({f"wrapped.{name}": tensor for name, tensor in load_file(file).items()}, file)
    text = r"must be in the checkpoint but .* are not, perhaps because they were renamed: pass --from, or remove"
    for to in ("half", "interleaved"):
        with refused(text):
            go(tmp_path / "b", "c", to)
    with refused(text):
        detect(tmp_path / "b")
    go(tmp_path / "b", "c", "half", source="interleaved")
    found = {
        name.removeprefix("wrapped."): x for name, x in load_file(tmp_path / "c" / MODEL).items()
    }
    wanted = load_file(source / MODEL)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("shards", [1, 2])
def test_from_config_obeys_a_record_in_the_files_of_weights(tmp_path: Path, shards: int) -> None:
    source = write(tmp_path / "a", llama_tensors(), LLAMA, shards=shards)
    for file in sorted(source.glob("*.safetensors")):
        convert(file, tmp_path / file.name, to="interleaved", stated=Stated(config=source))
        (tmp_path / file.name).rename(file)
    for config in (source, source / "config.json"):
        assert read(config).interleaved
        (part,) = inspect(config).parts
        whence = {row.name: row.source for row in part.fields}["interleaved"]
        assert whence.startswith("the conversion record in model")
    assert not inspect(source, interleaved=False).parts[0].spec.interleaved  # the user's choice
    # A stand-in for a file of weights, and a damaged one, have no record.
    damaged = b"\x15\0\0\0\0\0\0\0{tightrope.convert: 1}"
    for text in (b"version https://git-lfs.github.com/spec/v1", damaged):
        for file in source.glob("*.safetensors"):
            file.write_bytes(text)
        assert not read(source).interleaved
        assert not inspect(source).parts[0].spec.interleaved


# --- the user, and other programs -----------------------------------------------------------------


def metadata_of(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as opened:
        return opened.metadata() or {}


@pytest.mark.parametrize("metadata", [{"format": "pt", "tightrope": 'a "ñote"\n'}, None])
def test_a_single_file_carries_its_pairing(tmp_path: Path, metadata: Any) -> None:
    a, b, c, d = (tmp_path / f"{name}.safetensors" for name in "abcd")
    save_file(llama_tensors(), a, metadata=metadata)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    convert(a, b, to="interleaved", verify=True)
    found = detect(b)
    assert (found.stated, found.who) == ("interleaved", f"the conversion record in {b.name}")
    with refused("is already interleaved .stated by the conversion record in b"):
        convert(b, c, to="interleaved")
    # Back without options, to the original bytes.
    convert(b, c, to="half", verify=True)
    assert c.read_bytes() == a.read_bytes()
    assert detect(c).who == "model_type 'llama'"
    kept = metadata_of(b)
    (record,) = json.loads(kept.pop("tightrope.convert"))
    assert (record["pairing"], record["was"], record["section"]) == ("interleaved", "half", "")
    assert kept == (metadata if isinstance(metadata, dict) else {})
    assert int.from_bytes(b.read_bytes()[:8], "little") % 8 == 0
    # The user's statement overrides the record, and the new record states what was done.
    convert(b, d, to="interleaved", stated=Stated(source="half"))
    assert detect(d).stated == "interleaved"


def test_a_record_that_another_program_wrote_anew(tmp_path: Path) -> None:
    """safetensors sorts the keys of metadata as it likes."""
    a, b, c, d = (tmp_path / f"{name}.safetensors" for name in "abcd")
    save_file(llama_tensors(), a)
    convert(a, b, to="interleaved", stated=Stated(config=LLAMA))
    record = {"z": "kept", **metadata_of(b), "a": "kept"}
    save_file(load_file(b), b, metadata=record)
    convert(b, c, to="half", stated=Stated(config=LLAMA))
    assert metadata_of(c) == {"z": "kept", "a": "kept"}
    convert(b, d, to="interleaved", stated=Stated(config=LLAMA, source="half"))
    assert metadata_of(d) == record


@pytest.mark.parametrize(
    "text",
    [
        *('{"pairing": "half"}', '{"conversions": [{}]}', '{"conversions": 1}', "{"),
        json.dumps({"conversions": [conversion("sideways")]}),
    ],
)
def test_an_invalid_record_is_refused(tmp_path: Path, text: str) -> None:
    """The record of an earlier version states a pairing and no section."""
    beside, inside = (write(tmp_path / name, llama_tensors()) for name in ("beside", "inside"))
    (beside / RECORD).write_text(text, encoding="utf-8")
    old = {"tightrope.pairing": "half"} if "pairing" in text else {"tightrope.convert": text}
    save_file(load_file(inside / MODEL), inside / MODEL, metadata=old)
    message = "must list conversions, each with its section, pairing and tensors, but does not"
    with refused(message):
        detect(inside)
    for function in (detect, inspect, read, lambda path: go(path, "b", "interleaved")):
        with refused("must hold JSON" if text == "{" else message):
            function(beside)
