"""Find the files of a checkpoint: a file, a folder, or shards with an index.

Files outside the checkpoint's folder are never read, except files of the Hugging Face cache that it
links to.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightrope.config.files import RECORD as RECORD, TwoValues, single, url_in

from ._fail import fail, shown
from .safetensors_file import read_safetensors
from .tensors import Weights, each
from .torch_file import read_torch

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_WEIGHTS = (
    ".gguf",
    ".ggml",
    ".onnx",
    ".onnx_data",
    ".msgpack",
    ".h5",
    ".ot",
    ".tflite",
    ".npz",
)
WEIGHT_SUFFIXES = (".safetensors", *TORCH_SUFFIXES, *_OTHER_WEIGHTS)
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.[a-z]+$")
_RANK = re.compile(r"consolidated\.\d+\.pth$")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its tensors.

    Attributes:
        path: the path that the user gave; for an index, its folder.
        files: its files of weights.
        folder: its folder, or None if the path is a single file.
        index: the index of its shards, if it has one.
        others: files of the folder that are not weights, as relative paths.
        ignored: files that a conversion leaves out: path -> reason.
        ranks: the number of files over which each projection is split: 1, except for Meta's
            consolidated files.
    """

    path: Path
    files: tuple[Weights, ...]
    folder: Path | None
    index: Path | None
    others: tuple[Path, ...]
    ignored: Mapping[str, str]
    ranks: int = 1

    @property
    def home(self) -> Path:
        """The folder in which to look for a configuration."""
        return self.folder or self.path.parent

    @property
    def is_shard(self) -> bool:
        """True for one shard of several, without the others."""
        return self.folder is None and _SHARD.search(self.path.name) is not None

    @property
    def nbytes(self) -> int:
        """The size of its files of weights in bytes."""
        return sum(weights.path.stat().st_size for weights in self.files)


def open_checkpoint(path: Path) -> Checkpoint:
    """Find the files of a checkpoint and read the offsets of their tensors.

    Raises:
        ValueError: the path holds no checkpoint or several, or the checkpoint is damaged or has files
            outside its folder.
        OSError: a file cannot be read.
    """
    if not path.exists():
        fail(f"the checkpoint {url_in(path) or f'must exist but {path} does not'}")
    if path.is_dir():
        return _folder(path, None)
    if path.name.endswith(".index.json"):
        return _folder(path.parent, path)
    if not path.is_file():
        fail(f"the checkpoint must be a file or a folder but {path} is neither")
    return Checkpoint(path, (_read(path),), None, None, (), {})


def _read(path: Path) -> Weights:
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return read_safetensors(path)
    if suffix in TORCH_SUFFIXES:
        return read_torch(path)
    if suffix in (".gguf", ".ggml"):
        fail(
            f"{path.name} is a GGUF file, which is not supported: pass the checkpoint that it was made from"
        )
    known = ", ".join((".safetensors", *TORCH_SUFFIXES))
    fail(f"the name of a checkpoint must end in one of {known} or .index.json but got {path.name}")


def _folder(folder: Path, index: Path | None) -> Checkpoint:
    names, ignored = _listing(folder)
    top = [name for name in names if name.parent == Path()]
    index = index or _find_index(folder, top)
    if index is not None:
        if index.is_symlink():
            inside(folder, index.name, "the given path")
        chosen = _indexed(folder, index)
    else:
        chosen = _unindexed(folder, top)
    files = tuple(_read(inside(folder, name, str(folder))) for name in chosen)
    ranks = len(files) if all(_RANK.match(name) for name in chosen) else 1
    if index is not None:
        _check_index(index, files)
    if ranks == 1:
        _check_unique(files)
    others = []
    for name in names:
        if str(name) in chosen or str(name) == RECORD or (index and str(name) == index.name):
            continue
        if name.suffix.lower() in WEIGHT_SUFFIXES or name.name.endswith(".index.json"):
            ignored[str(name)] = "other weights, which are not converted"
        else:
            others.append(name)
    return Checkpoint(folder, files, folder, index, tuple(others), ignored, ranks)


def _listing(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files below a folder, and ignored files and folders with the reason."""
    names: list[Path] = []
    ignored: dict[str, str] = {}

    def raise_it(error: OSError) -> None:
        raise error

    for where, below, files in os.walk(folder, onerror=raise_it):
        here = Path(where).relative_to(folder)
        for name in sorted(below):
            if name.startswith(".") or (Path(where) / name).is_symlink():
                ignored[str(here / name)] = (
                    "hidden" if name.startswith(".") else "a link to a folder"
                )
        below[:] = sorted(name for name in below if str(here / name) not in ignored)
        for name in sorted(files):
            if name.startswith("."):
                ignored[str(here / name)] = "hidden"
            elif not _is_inside(folder, Path(where) / name):
                ignored[str(here / name)] = "a link that leads outside the folder, or nowhere"
            else:
                names.append(here / name)
    return names, ignored


def _is_inside(folder: Path, path: Path) -> bool:
    """True if a path is a file in the folder, or a link from it into the Hugging Face cache."""
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    if not real.is_file():
        return False
    if real.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"


def inside(folder: Path, name: str, who: str) -> Path:
    """Return the path of a named file; raise if it is missing or outside the folder.

    Args:
        who: the file or folder that names it, for the error.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        fail(f"{who} names {name!r}, which lies outside the folder")
    if not os.path.lexists(path):
        fail(f"{who} names {name!r}, which does not exist")
    if not _is_inside(folder, path):
        fail(f"{who} names {name!r}, which is not a file inside the folder")
    return path


# --- choice of the weight files -------------------------------------------------------------------


def _find_index(folder: Path, names: list[Path]) -> Path | None:
    found = [name.name for name in names if name.name.endswith(".index.json")]
    for kind in (".safetensors.index.json", ".index.json"):
        of_kind = [name for name in found if name.endswith(kind)]
        single = [name for name in names if name.name == "model.safetensors"]
        if len(of_kind) == 1 and not (single and kind == ".index.json"):
            return folder / of_kind[0]
        if len(of_kind) > 1:
            fail(f"{folder} has several indexes, {shown(of_kind)}: give the path of one of them")
    return None


def _indexed(folder: Path, index: Path) -> list[str]:
    values = load_json(index)
    names = values.get("weight_map")
    if not isinstance(names, dict) or not names:
        fail(f"{index} must hold a weight_map from tensors to files but does not")
    files = list(names.values())
    for name, file in names.items():
        if not isinstance(file, str) or not file:
            fail(f"{index} must name a file for {name} but names {file!r}")
    for file in dict.fromkeys(files):
        inside(folder, file, index.name)
        if file.endswith(".index.json") or Path(file).suffix.lower() not in WEIGHT_SUFFIXES:
            fail(f"{index.name} names {file!r}, which is not a file of weights")
    return list(dict.fromkeys(files))


def _unindexed(folder: Path, names: list[Path]) -> list[str]:
    every = [name.name for name in names]
    for wanted in ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors"):
        if wanted in every:
            return [wanted]
    ranks = [name for name in every if _RANK.match(name)]
    for found in (
        [name for name in every if name.endswith(".safetensors")],
        ranks,
        [name for name in every if name.endswith(TORCH_SUFFIXES) and name != "training_args.bin"],
    ):
        if any(_SHARD.search(name) for name in found):
            fail(f"{folder} has shards, {shown(found)}, but no index of their tensors")
        if found is ranks and ranks:
            wanted_ranks = [f"consolidated.{n:02d}.pth" for n in range(len(ranks))]
            if ranks != wanted_ranks:
                missing = sorted(set(wanted_ranks) - set(ranks))
                fail(f"{folder} must have every rank's file but lacks {shown(missing)}")
            return ranks
        if len(found) == 1:
            return found
        if found:
            fail(
                f"{folder} has several files of weights, {shown(found)}: give the path of one of them"
            )
    fail(f"{folder} must hold a checkpoint but has no safetensors and no torch file")


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=single)
    except TwoValues as error:
        fail(f"in {path} {error}")
    except (ValueError, RecursionError) as error:
        fail(f"{path} must be JSON but is not: {error}")
    if not isinstance(values, dict):
        fail(f"{path} must hold a JSON object but holds {type(values).__name__}")
    return values


def _check_index(index: Path, files: tuple[Weights, ...]) -> None:
    listed = load_json(index)["weight_map"]
    has = {entry.name: weights.path.name for weights in files for entry in weights.entries}
    missing = [f"{name} ({file})" for name, file in listed.items() if has.get(name) is None]
    if missing:
        fail(f"{index.name} names tensors that are not in their files: {shown(missing)}")
    moved = [name for name, file in listed.items() if has[name] != Path(file).name]
    if moved:
        fail(f"{index.name} names the wrong file for {shown(moved)}")
    extra = [name for name in has if name not in listed]
    if extra:
        fail(f"{index.name} does not name {shown(extra)}, which its files hold")


def _check_unique(files: tuple[Weights, ...]) -> None:
    seen: dict[str, Path] = {}
    for entry in each(files):
        if entry.name in seen:
            fail(
                f"a tensor must be in one file but {entry.name} is in {seen[entry.name].name} and "
                f"{entry.file.name}"
            )
        seen[entry.name] = entry.file
