"""The files that conversion reads and writes: their choice, records, damage, full disks and kills."""

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

from tests.support.checkpoints import LLAMA, contents, interleaved_rows, llama_tensors, write
from tests.support.helpers import full_disk
from tests.support.records import conversion, write_record
from tightrope_tools import place
from tightrope_tools.convert import Stated, convert, detect, run
from tightrope_tools.convert.files import FLOATS, open_checkpoint
from tightrope_tools.convert.run import marked

Q0 = "model.layers.0.self_attn.q_proj.weight"
K0 = "model.layers.0.self_attn.k_proj.weight"


def refused(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in one file, in a folder of its own."""
    return write(tmp_path / "a", llama_tensors())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_values_are_read_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.linspace(-200, 200, 48).view(6, 8).to(dtype)
    save_file({"a": values}, tmp_path / "a.safetensors")
    (entry,) = open_checkpoint(tmp_path / "a.safetensors").entries
    read = entry.rows(1, 4, 6)
    assert read.dtype == torch.float64
    assert torch.equal(read, values[1:5].double())


# --- which files ----------------------------------------------------------------------------------


def edit_index(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"].update(changes)
    path.write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "below/../../x.safetensors",
        "/etc/passwd",
        "link.safetensors",
        "loop.safetensors",
        "model.safetensors.index.json",
        "",
        1,
        ["x"],
    ],
)
def test_an_index_cannot_point_elsewhere(tmp_path: Path, file: Any) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=2)
    outside = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2)}, outside)
    (source / "link.safetensors").symlink_to(outside)
    (source / "loop.safetensors").symlink_to(source / "loop.safetensors")
    edit_index(source, x=file)
    with refused(f"must name files of weights inside its folder but names {re.escape(repr(file))}"):
        convert(source, tmp_path / "b", to="interleaved")
    (tmp_path / "c").mkdir()
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.symlink_to(source / index.name)
    with refused("the index .* must be a file inside its folder but is a link"):
        convert(index, tmp_path / "b", to="interleaved")
    assert not (tmp_path / "b").exists()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=2)
    edit_index(source, x="gone.safetensors")
    with refused(
        r"model\.safetensors\.index\.json names gone\.safetensors, but the folder has no such file\."
    ):
        convert(source, tmp_path / "b", to="interleaved")


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=2)
    index, first = (
        source / name
        for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors")
    )

    def differs(match: str) -> None:
        with refused(match):
            convert(source, tmp_path / "b", to="interleaved")

    text = index.read_text(encoding="utf-8")
    for name in (Q0, "x"):
        edit_index(source, **{name: first.name})
        differs(f"must agree on where tensors are but differ in {name}")
        index.write_text(text, encoding="utf-8")
    save_file({**load_file(first), K0: torch.zeros(2)}, first)
    differs(f"must agree on where tensors are but differ in {K0}")
    index.write_text('{"weight_map": {}}', encoding="utf-8")
    differs("must hold a weight_map")
    index.unlink()
    differs("has shards, .*but no index")


def test_other_files_come_along_and_other_weights_do_not(tmp_path: Path, source: Path) -> None:
    for name in ("tokenizer.json", "original/consolidated.00.pth", "model.gguf", "below/vocab.txt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x", encoding="utf-8")
    (source / ".git").mkdir()
    (source / "secret").symlink_to("/etc/hostname")
    done = convert(source, tmp_path / "b", to="interleaved")
    assert set(contents(tmp_path / "b")) == {
        "below/vocab.txt",
        "config.json",
        "model.safetensors",
        "tightrope_convert.json",
        "tokenizer.json",
    }
    assert set(done.ignored) == {"original/consolidated.00.pth", "model.gguf", ".git", "secret"}


@pytest.mark.parametrize(
    "names, match",
    [
        ([], "has no safetensors"),
        (["a.safetensors", "b.safetensors"], "has several files of weights, a.safetensors, b.safe"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "has several indexes"),
        (
            ["consolidated.00.pth", "consolidated.01.pth"],
            "is a torch pickle of one rank of several: merge the ranks",
        ),
    ],
)
def test_folders_without_one_checkpoint(tmp_path: Path, names: list[str], match: str) -> None:
    for name in names:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    with refused(match):
        convert(tmp_path, tmp_path.parent / "b", to="half")


@pytest.mark.parametrize("name", ["a.gguf", "a.txt"])
def test_other_files_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with refused(f"must end in .safetensors or .index.json but got {name}"):
        convert(tmp_path / name, tmp_path / "b", to="half", stated=Stated(config=LLAMA))


@pytest.mark.parametrize("kind", ["file", "folder", "shards"])
def test_the_answer_to_a_pickle_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # shared, and not contiguous
    tensors["transposed"] = torch.randn(3, 4).T
    source, names = write(tmp_path / "a", {"x": torch.zeros(1)}), list(tensors)
    (source / "model.safetensors").unlink()
    torch.save({"step": 1}, source / "optimizer.pt")
    parts = {"pytorch_model.bin": names}
    if kind == "shards":
        parts = {f"pytorch_model-{n + 1:05d}-of-00002.bin": names[n::2] for n in range(2)}
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, source / file)
    path = source / "pytorch_model.bin" if kind == "file" else source
    with refused(
        r"must be safetensors but pytorch_model\S*bin.* is a torch pickle; save it with this"
    ) as error:
        convert(path, tmp_path / "b", to="interleaved")
    exec(str(error.value).partition("first: ")[2].removesuffix("."))
    path = source / "pytorch_model.safetensors" if kind == "file" else source
    convert(path, tmp_path / "b", to="interleaved")
    after = load_file(tmp_path / "b" if kind == "file" else tmp_path / "b" / "model.safetensors")
    assert after.keys() == tensors.keys()
    assert torch.equal(after["transposed"], tensors["transposed"])


# --- the configuration ----------------------------------------------------------------------------


def test_the_way_back_takes_the_record_away_and_no_other(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "b", to="interleaved")
    # The user overrides the record, so this is not the way back.
    done = convert(tmp_path / "b", tmp_path / "c", to="interleaved", stated=Stated(source="half"))
    assert "tightrope_convert.json" in done.files
    call = f'RopeSpec.from_config("{tmp_path / "c"}", interleaved=True)'
    assert done.notes[0].endswith(f"rotate the result by {call}, which pairs neighbours")
    assert (tmp_path / "c" / "tightrope_convert.json").exists()
    done = convert(tmp_path / "b", tmp_path / "d", to="half")
    assert done.notes == ()  # the family's own pairing
    other = Stated(source="interleaved")
    assert convert(tmp_path / "b", tmp_path / "e", to="half", stated=other).notes == ()
    assert "tightrope_convert.json" not in done.files
    assert set(done.files) == set(contents(tmp_path / "d")) == set(contents(source))
    assert contents(tmp_path / "d") == contents(source)


def test_marking_changes_as_little_as_it_can() -> None:
    text = '{\n    "a": [1,2],\n    "rope_interleave":true\n}'
    assert marked(text, (), "rope_interleave", False) == text.replace("true", "false")
    assert marked(text, (), "rope_interleave", True) == text
    text = '{\n  "a": [1,2]\n}\n'
    added = marked(text, (), "rope_interleave", False)
    assert added == '{\n  "rope_interleave": false,\n  "a": [1,2]\n}\n'
    nested = '{"text_config": {"x": 1}, "rope_interleave": null}'
    document = json.loads(marked(nested, ("text_config",), "rope_interleave", False))
    assert document == {"text_config": {"x": 1, "rope_interleave": False}, "rope_interleave": None}
    assert json.loads(marked("{}", (), "is_neox_style", True)) == {"is_neox_style": False}


# --- the path of the result -----------------------------------------------------------------------


EXISTS = "OUT must not exist yet but .* does: remove it, or choose another name"


@pytest.mark.parametrize(
    "target, match",
    [
        ("a", EXISTS),
        ("a folder", EXISTS),
        ("a file", EXISTS),
        ("a link", EXISTS),
        ("a/below", "must not lie inside the checkpoint's folder"),
        ("x/y", "must be in an existing folder but"),
    ],
)
def test_nothing_is_replaced_or_written_in_other_places(
    tmp_path: Path, source: Path, target: str, match: str
) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").write_bytes(b"mine")
    (tmp_path / "a link").symlink_to("nowhere")
    before = contents(tmp_path)
    for checkpoint in [source] + [source / "model.safetensors"] * (match == EXISTS):
        with refused(match):
            convert(checkpoint, tmp_path / target, to="interleaved")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("single", [False, True])
def test_the_disk_that_is_needed_is_said_before(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, single: bool
) -> None:
    path = source / "model.safetensors" if single else source
    needed = sum(
        len(data) for name, data in contents(source).items() if not single or name != "config.json"
    )
    assert convert(path, tmp_path / "b", to="interleaved", dry_run=True).disk == needed
    usage = type("Usage", (), {"free": needed - 1})
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: usage)
    text = f"the result needs {needed:,} bytes but the disk has {needed - 1:,} bytes free"
    with pytest.raises(OSError, match=text) as error:
        convert(path, tmp_path / "b", to="interleaved")
    assert error.value.errno == errno.ENOSPC
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("single", [False, True])
def test_a_full_disk_leaves_nothing(tmp_path: Path, single: bool) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=1 if single else 3)
    path = source / "model.safetensors" if single else source
    before = contents(tmp_path)
    with full_disk(8000), pytest.raises(OSError, match="File too large"):
        convert(path, tmp_path / "b", to="interleaved")
    assert contents(tmp_path) == before
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("single", [False, True])
def test_what_a_killed_conversion_left_is_removed(
    tmp_path: Path, source: Path, single: bool
) -> None:
    left = place.partial_path(tmp_path / "b") / "tightrope-x" / "b"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half of it")
    convert(source / "model.safetensors" if single else source, tmp_path / "b", to="interleaved")
    assert names_in(tmp_path) == ["a", "b"]


def test_a_folder_of_the_user_is_no_leftover(tmp_path: Path) -> None:
    source = write(tmp_path / "b.partial", llama_tensors())
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="it holds files that no interrupted command left"):
        convert(source, tmp_path / "b", to="interleaved")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("ends", ["first", "second"])
def test_two_conversions_to_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The second takes the folder away from the first, so that no result is a mixture."""
    source, out = write(tmp_path / "a", llama_tensors(), shards=2), tmp_path / "b"
    reorder = run._reorder

    def meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(run, "_reorder", reorder)
        if ends == "second":
            convert(source, out, to="interleaved")
        else:
            with pytest.raises(OSError, match="Too little"), place.placed(out):
                raise OSError("Too little of something")
        reorder(*arguments)

    monkeypatch.setattr(run, "_reorder", meanwhile)
    with pytest.raises(FileNotFoundError):
        convert(source, out, to="interleaved")
    assert names_in(tmp_path) == (["a", "b"] if ends == "second" else ["a"])
    if ends == "second":
        convert(source, tmp_path / "c", to="interleaved")
        assert contents(out) == contents(tmp_path / "c")


def test_a_proof_that_fails_gives_no_result(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = llama_tensors()
    tensors[Q0][0, 0] = float("inf")
    infinite = write(tmp_path / "inf", tensors)
    with refused("or are NaN"):
        convert(infinite, tmp_path / "b", to="interleaved", verify=True)
    monkeypatch.setattr(run, "source_row", lambda row, *_: row)
    with refused("scores must stay the same but those of model.layers.0.self_attn differ by"):
        convert(source, tmp_path / "b", to="interleaved", verify=True)
    assert names_in(tmp_path) == ["a", "inf"]


# --- damaged files --------------------------------------------------------------------------------


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one part cut off, removed, doubled or overwritten."""
    made, size = bytearray(data), len(data)
    # At least half of the damage is within the first 900 bytes, where headers are.
    where = chance.randrange(min(size, 900) if chance.random() < 0.5 else size)
    kind = chance.randrange(6)
    if kind == 0:
        del made[where:]
    elif kind == 1:
        made[where] ^= 1 << chance.randrange(8)
    elif kind == 2:
        made[where : where + 8] = chance.randbytes(8)
    elif kind == 3:
        del made[where : where + chance.randrange(1, 64)]
    elif kind == 4:
        made[where:where] = made[max(where - 40, 0) : where]
    else:
        for digit in [n for n, byte in enumerate(made[:900]) if 48 <= byte <= 57][:40]:
            if chance.random() < 0.2:
                made[digit] = chance.choice(b"0179-e")
    return bytes(made)


@pytest.mark.parametrize("kind", ["shard", "index", "config"])
def test_damaged_files_are_reported_and_lose_nothing(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / "a", llama_tensors(bias=False), shards=2)
    names = {"shard": "model-00001-of-00002.safetensors", "index": "model.safetensors.index.json"}
    file = source / names.get(kind, "config.json")
    data, out = file.read_bytes(), tmp_path / "b"
    chance = random.Random(kind)
    messages = []
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


# --- the record in a single file ------------------------------------------------------------------


OWN = {"format": "pt", "tightrope": 'a "note"'}


def _one(path: Path, metadata: str) -> None:
    """Write a file with metadata of its "own", with "empty" metadata or with "none"."""
    save_file(llama_tensors(), path, metadata=OWN if metadata == "own" else None)
    if metadata == "empty":
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = b'{ "__metadata__": { },' + raw[9 : 8 + size]
        header += b" " * (-len(header) % 8)
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])


@pytest.mark.parametrize("metadata", ["own", "none", "empty"])
def test_a_single_file_carries_its_pairing(tmp_path: Path, metadata: str) -> None:
    a, b, c, d = (tmp_path / f"{name}.safetensors" for name in "abcd")
    _one(a, metadata)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    done = convert(a, b, to="interleaved", verify=True)
    assert done.verified is not None
    found = detect(b)
    assert (found.stated, found.who) == ("interleaved", f"the conversion record in {b.name}")
    with refused("is already interleaved .stated by the conversion record in b"):
        convert(b, c, to="interleaved")
    # Back without options, to the original bytes.
    assert convert(b, c, to="half", verify=True).source_from.startswith("the conversion record")
    assert c.read_bytes() == a.read_bytes()
    assert detect(c).who == "model_type 'llama'"
    # All readers see the same tensors as in a file without a record.
    before, after = load_file(a), load_file(b)
    assert list(after) == list(before)
    rows = interleaved_rows(list(range(32)), range(0, 32, 8), 8)
    assert torch.equal(after[Q0], before[Q0][rows])
    after_ = metadata_of(b) or {}
    (record,) = json.loads(after_.pop("tightrope.convert"))
    assert (record["pairing"], record["was"], record["section"]) == ("interleaved", "half", "")
    assert after_ == (OWN if metadata == "own" else {})
    assert int.from_bytes(b.read_bytes()[:8], "little") % 8 == 0
    # The user's statement overrides the record, and the new record states what was done.
    convert(b, d, to="interleaved", stated=Stated(source="half"))
    assert detect(d).stated == "interleaved"


def metadata_of(path: Path) -> dict[str, str] | None:
    with safetensors.safe_open(path, framework="pt") as opened:
        return opened.metadata()  # type: ignore[no-any-return]


def test_a_record_that_another_program_wrote_anew(tmp_path: Path) -> None:
    """safetensors sorts the keys of metadata as it likes."""
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    save_file(llama_tensors(), a)
    convert(a, b, to="interleaved", stated=Stated(config=LLAMA))
    record = {"z": "kept", **(metadata_of(b) or {}), "a": "kept"}
    save_file(load_file(b), b, metadata=record)
    convert(b, c, to="half", stated=Stated(config=LLAMA))
    assert metadata_of(c) == {"z": "kept", "a": "kept"}
    other = tmp_path / "d.safetensors"
    convert(b, other, to="interleaved", stated=Stated(config=LLAMA, source="half"))
    assert metadata_of(other) == record


def test_a_record_in_a_folder_is_kept_true(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "b"
    folder.mkdir()
    convert(source / "model.safetensors", folder / "model.safetensors", to="interleaved")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    assert detect(folder).stated == "interleaved"
    done = convert(folder, tmp_path / "c", to="half")
    assert done.source_from == "the conversion record in model.safetensors"
    before, after = (path / "model.safetensors" for path in (source, tmp_path / "c"))
    assert after.read_bytes() == before.read_bytes()
    write_record(folder, conversion("half"))
    with refused(
        "must agree but state model.safetensors: interleaved, tightrope_convert.json: half: pass"
    ):
        convert(folder, tmp_path / "d", to="half")
