"""The files that conversion reads and writes: their choice, damage, full disks and kills."""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
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
from tests.support.helpers import full_disk
from tests.support.rows import read_rows
from tightrope_tools.convert import Stated, convert, run
from tightrope_tools.convert.files import FLOATS

Q0 = "model.layers.0.self_attn.q_proj.weight"
INDEX, FIRST = "model.safetensors.index.json", "model-00001-of-00002.safetensors"


def refused(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in one file, in a folder of its own."""
    return write(tmp_path / "a", llama_tensors())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A checkpoint in two files, in a folder of its own."""
    return write(tmp_path / "shards", llama_tensors(), shards=2)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is read and kept ------------------------------------------------------------------------


def linked(folder: Path) -> None:
    """Make a folder a snapshot of the hub's cache: links to blobs, which have no suffix."""
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    for number, name in enumerate(names_in(folder)):
        (folder / name).rename(blobs / str(number))
        (folder / name).symlink_to(Path("../../blobs") / str(number))


@pytest.mark.parametrize("kind", ["one file", "shards", "links", *map(str, FLOATS.values())])
def test_back_to_the_same_bytes(tmp_path: Path, kind: str) -> None:
    """Other files come along; the source and all but weights stay as they are on both ways."""
    dtype = {str(each): each for each in FLOATS.values()}.get(kind, torch.float32)
    tensors = llama_tensors(dtype=dtype)
    folder = tmp_path / "models--x" / "snapshots" / "1234"
    source = write(folder, tensors, shards=1 if kind == "one file" else 3)
    if kind == "links":
        linked(source)
    for name in ("tokenizer.json", "below/config.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}", encoding="utf-8")
    before = contents(source)
    convert(source, tmp_path / "b", to="interleaved", verify=True)
    convert(tmp_path / "b", tmp_path / "c", to="half", verify=True)
    assert contents(source) == before == contents(tmp_path / "c")
    there = contents(tmp_path / "b")
    changed = {name for name in before if there[name] != before[name]}
    assert changed
    assert all(name.endswith(".safetensors") for name in changed)
    for name in changed:
        with safetensors.safe_open(tmp_path / "b" / name, "pt") as new:
            with safetensors.safe_open(source / name, "pt") as old:
                assert (new.metadata(), list(new.keys())) == (old.metadata(), list(old.keys()))


def test_other_weights_do_not_come_along(tmp_path: Path, source: Path) -> None:
    others = ("original/consolidated.00.pth", "model.gguf")
    for name in others:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x", encoding="utf-8")
    (source / ".git").mkdir()
    (source / "secret").symlink_to("/etc/hostname")
    done = convert(source, tmp_path / "b", to="interleaved")
    kept = {"config.json", "model.safetensors", "tightrope_convert.json"}
    assert set(contents(tmp_path / "b")) == set(done.files) == kept
    assert set(done.ignored) == {*others, ".git", "secret"}


@pytest.mark.parametrize("before", [{"rope_interleave": True}, {"rope_interleave": None}, {}])
def test_a_configuration_that_states_the_pairing(tmp_path: Path, before: dict[str, Any]) -> None:
    """It is written as transformers writes it; one that states the pairing already keeps its bytes."""
    config = {"a": [1, 2], **before, **DEEPSEEK}
    source = write(tmp_path / "a", latent_tensors(), config)
    convert(source, tmp_path / "b", to="half")
    found = (tmp_path / "b" / "config.json").read_text("utf-8")
    assert found == json.dumps({**config, "rope_interleave": False}, indent=2) + "\n"
    (source / "config.json").write_text(json.dumps({**DEEPSEEK, "rope_interleave": False}))
    convert(source, tmp_path / "c", to="half", stated=Stated(source="interleaved"))
    assert contents(tmp_path / "c")["config.json"] == contents(source)["config.json"]


# --- folders and files that are no checkpoint -----------------------------------------------------


FOLDERS = read_rows(Path(__file__).with_name("folders.jsonl"))


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    """An index of two shards is changed, or the folder has other files; null removes one."""
    row, source = FOLDERS[name], tmp_path / "a"
    source.mkdir()
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    if "map" in row:
        write(source, llama_tensors(), shards=2)
        (source / "link.safetensors").symlink_to(tmp_path / "model.safetensors")
        (source / "loop.safetensors").symlink_to(source / "loop.safetensors")
        index = json.loads((source / INDEX).read_text(encoding="utf-8"))
        index["weight_map"].update(row["map"])
        (source / INDEX).write_text(json.dumps(index), encoding="utf-8")
    if "more" in row:
        save_file({**load_file(source / FIRST), row["more"]: torch.zeros(2)}, source / FIRST)
    for file, text in row.get("files", {}).items():
        (source / file).unlink() if text is None else (source / file).write_text(text)
    with refused(re.escape(row["error"])):
        convert(
            source / row.get("path", ""),
            tmp_path / "b",
            to="interleaved",
            stated=Stated(config=LLAMA),
        )
    assert not (tmp_path / "b").exists()


def test_an_index_may_not_be_a_link_to_elsewhere(tmp_path: Path, shards: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / INDEX).symlink_to(shards / INDEX)
    with refused("the index .* must be a file inside its folder but is a link"):
        convert(tmp_path / "c" / INDEX, tmp_path / "b", to="interleaved")


# --- the path of the result -----------------------------------------------------------------------


@pytest.mark.parametrize("single", [False, True])
def test_too_small_a_disk_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, single: bool
) -> None:
    """What is needed is said before; if the disk is full nevertheless, what was written is removed."""
    path = source / "model.safetensors" if single else source
    before = contents(tmp_path)
    needed = sum(
        len(data) for name, data in contents(source).items() if not single or name != "config.json"
    )
    assert convert(path, tmp_path / "b", to="interleaved", dry_run=True).disk == needed
    with full_disk(8000), pytest.raises(OSError, match="File too large"):
        convert(path, tmp_path / "b", to="interleaved")
    usage = type("Usage", (), {"free": needed - 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    text = f"the result needs {needed:,} bytes but the disk has {needed - 1:,} bytes free"
    with pytest.raises(OSError, match=text) as error:
        convert(path, tmp_path / "b", to="interleaved")
    assert error.value.errno == errno.ENOSPC
    assert contents(tmp_path) == before
    assert names_in(tmp_path) == ["a"]


def test_a_proof_that_fails_gives_no_result(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = llama_tensors()
    tensors[Q0][0, 0] = float("inf")
    infinite = write(tmp_path / "inf", tensors)
    with refused("or are NaN"):
        convert(infinite, tmp_path / "b", to="interleaved", verify=True)
    monkeypatch.setattr(run, "reorder", lambda *_: None)
    with refused("scores must stay the same but those of model.layers.0.self_attn differ by"):
        convert(source, tmp_path / "b", to="interleaved", verify=True)
    assert names_in(tmp_path) == ["a", "inf"]


# --- damaged files --------------------------------------------------------------------------------


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one part cut off, removed, doubled or overwritten, half of the time near their start."""
    where = chance.randrange(min(len(data), 900) if chance.random() < 0.5 else len(data))
    here, after = data[:where], data[where:]
    return chance.choice(
        [
            here,
            here + bytes([after[0] ^ 1 << chance.randrange(8)]) + after[1:],
            here + chance.randbytes(8) + after[8:],
            here + after[chance.randrange(1, 64) :],
            here + here[-40:] + after,
            here
            + re.sub(rb"\d", lambda _: chance.choice((b"0", b"9", b"-", b"e")), after, count=2),
        ]
    )


@pytest.mark.parametrize("name", [FIRST, INDEX, "config.json"])
def test_damaged_files_are_reported_and_lose_nothing(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "a", llama_tensors(bias=False), shards=2)
    file, out, chance, messages = source / name, tmp_path / "b", random.Random(name), []
    data = file.read_bytes()
    for _ in range(150):
        bad = mutated(data, chance)
        file.write_bytes(bad)
        try:
            convert(source, out, to="interleaved")
            shutil.rmtree(out)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
        assert file.read_bytes() == bad
        assert names_in(tmp_path) == ["a"]
    assert len(messages) > 40  # most damage to weights leaves the format valid
    assert [text for text in messages if not text.startswith("[") or "\n" in text] == []


def test_a_section_states_its_own_pairing(tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": x for name, x in latent_tensors().items()}
    config = {"model_type": "llava", "text_config": DEEPSEEK, "rope_interleave": None}
    source = write(tmp_path / "a", tensors, config)
    stated = Stated(section="text_config", prefix="language_model.model.")
    done = convert(source, tmp_path / "b", to="half", stated=stated)
    assert done.marked == "rope_interleave"
    found = json.loads((tmp_path / "b" / "config.json").read_text("utf-8"))
    assert found == {**config, "text_config": {**DEEPSEEK, "rope_interleave": False}}
