"""The files of a checkpoint: a safetensors file, or a folder with one or with shards and their index.

Files outside the checkpoint's folder are never read, except files of the Hugging Face cache that it links to.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from tightrope._errors import bad_value
from tightrope.config.files import Record, load, url_in

# The dtypes of weights and their scales, by safetensors' names; a projection of another dtype is refused.
FLOATS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PICKLED = ("pytorch_model", "model", "consolidated", "adapter_model")
_OTHERS = tuple(".gguf .ggml .onnx .onnx_data .msgpack .h5 .ot .tflite .npz".split())
_INDEX = ".index.json"
_WEIGHTS = (".safetensors", *_PICKLES, *_OTHERS)
_SHARD = re.compile(r"-\d+-of-\d+\.[a-z]+$")
_METADATA = "__metadata__"


def fail(message: str) -> NoReturn:
    """Raise a ValueError with this sentence."""
    raise bad_value(message)


def shown(names: list[str], most: int = 3) -> str:
    """Join the first `most` names and count the rest: ``a, b, c and 2 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Entry:
    """One tensor: its bytes are ``[offset, offset + nbytes)`` of ``file``, in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def mapped(self, units: int, *, write: bool = False) -> torch.Tensor:
        """Map its rows into memory, as bytes ``(units, bytes of a row)``; with ``write``, changes go to the file."""
        size = self.file.stat().st_size
        whole = torch.from_file(str(self.file), shared=write, size=size, dtype=torch.uint8)
        return whole[self.offset : self.offset + self.nbytes].view(units, -1)

    def rows(self, first: int, count: int, units: int) -> torch.Tensor:
        """Read ``count`` of its ``units`` rows, from row ``first``, as float64 ``(count, elements of a row)``."""
        data = self.mapped(units)[first : first + count].clone()
        return data.view(FLOATS[self.dtype]).double()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its tensors.

    Attributes:
        path: the path that the user gave; for an index, its folder.
        folder: its folder, or None if the path is a single file.
        files: its files of weights -> the conversions that the metadata of the file records.
        entries: the tensors of all files.
        others: the files of the folder that a conversion copies, as relative paths.
        ignored: files that a conversion leaves out: path -> reason.
    """

    path: Path
    folder: Path | None
    files: dict[Path, list[Record]]
    entries: tuple[Entry, ...]
    others: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """The folder in which to look for a configuration."""
        return self.folder or self.path.parent

    @property
    def is_shard(self) -> bool:
        """True for one shard of several, without the others."""
        return self.folder is None and _SHARD.search(self.path.name) is not None


def open_checkpoint(path: Path) -> Checkpoint:
    """Find the files of a checkpoint and read the offsets of their tensors.

    Raises:
        ValueError: the path holds no checkpoint or several, or the checkpoint is damaged or has files
            outside its folder.
        OSError: a file cannot be read.
    """
    if not path.exists():
        fail(f"the checkpoint {url_in(path) or f'must exist but {path} does not'}")
    if path.is_file() and not path.name.endswith(_INDEX):
        _check_name(path.name)
        entries, records = read_header(path)
        return Checkpoint(path, None, {path: records}, tuple(entries))
    folder = path if path.is_dir() else path.parent
    names, ignored = _listing(folder)
    weights = [name for name in names if name.lower().endswith((*_WEIGHTS, _INDEX))]
    indexes = [name for name in weights if re.fullmatch(rf"[^/]+\.safetensors{_INDEX}", name)]
    if path.is_file():
        indexes = [path.name]
    if len(indexes) > 1:
        fail(f"{folder} has several indexes, {shown(indexes)}: give the path of one of them")
    listed = _read_index(folder, indexes[0], names) if indexes else {}
    chosen = list(dict.fromkeys(listed.values())) or [_single(folder, names)]
    for name in chosen:
        _check_name(name)
    read = {name: read_header(folder / name) for name in chosen}
    held = {(entry.name, name) for name in chosen for entry in read[name][0]}
    if indexes and (wrong := sorted({tensor for tensor, _ in held ^ {*listed.items()}})):
        fail(
            f"{indexes[0]} and the files must agree on where tensors are but differ in {shown(wrong)}"
        )
    unused = [name for name in weights if name not in (*chosen, *indexes)]
    return Checkpoint(
        folder,
        folder,
        {folder / name: read[name][1] for name in chosen},
        tuple(entry for entries, _ in read.values() for entry in entries),
        tuple(name for name in names if name not in (*unused, *chosen, Record.file)),
        ignored | dict.fromkeys(unused, "other weights, which are not converted"),
    )


def _listing(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the files below a folder, and ignored files and folders with the reason."""
    names: list[str] = []
    ignored: dict[str, str] = {}

    def stop(error: OSError) -> None:
        raise error

    for where, below, files in os.walk(folder, onerror=stop):
        for path in sorted(Path(where, name) for name in (*below, *files)):
            name = path.relative_to(folder).as_posix()
            if path.name.startswith("."):
                ignored[name] = "hidden"
            elif path.name in files and _is_inside(folder, path):
                names.append(name)
            elif path.name in files or path.is_symlink():
                ignored[name] = "a link that leads outside the folder, to a folder, or nowhere"
        below[:] = sorted(name for name in below if not name.startswith("."))
    return names, ignored


def _is_inside(folder: Path, path: Path) -> bool:
    """True if a path is a file in the folder, or a link from it into the Hugging Face cache."""
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    blobs = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    return real.is_file() and (real.is_relative_to(home) or blobs)


def _read_index(folder: Path, index: str, names: list[str]) -> dict[str, str]:
    """Return the file of each tensor; only files of the folder are accepted."""
    if index not in names:
        fail(f"the index {index} must be a file inside its folder but is a link to another place")
    listed = load(folder / index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        fail(f"{index} must hold a weight_map from tensors to files but does not")
    for file in listed.values():
        if file not in names or not file.endswith(_WEIGHTS):
            fail(f"{index} must name files of weights that are in its folder but names {file!r}")
    return listed


def _single(folder: Path, names: list[str]) -> str:
    """Return the only file of weights of a folder without an index."""
    top = [name for name in names if "/" not in name]
    found = [name for name in top if name.endswith(".safetensors")]
    for wanted in ("model.safetensors", "adapter_model.safetensors"):
        if wanted in found:
            return wanted
    if len(found) > 1 or any(map(_SHARD.search, found)):
        fail(
            f"{folder} has several files of weights, {shown(found)}, but no index: give the path of one of them"
        )
    pickles = [name for name in top if name.startswith(_PICKLED) and name.endswith(_PICKLES)]
    if not found and not pickles:
        fail(f"{folder} must hold a checkpoint but has no safetensors")
    return (found or pickles)[0]


def _check_name(name: str) -> None:
    """Refuse a file that is not called like one of safetensors."""
    if name.lower().endswith(_PICKLES):
        fail(
            f"a checkpoint must be safetensors but {name} is a torch pickle: merge its ranks, if it is of one of several, "
            "and save it as docs/convert.md shows in 'What it reads'"
        )
    if not name.lower().endswith(".safetensors"):
        fail(f"the name of a checkpoint must end in .safetensors or {_INDEX} but got {name}")


# --- safetensors ----------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[list[Entry], list[Record]]:
    """Return the tensors of a safetensors file, in the order of their bytes, and the conversions in its metadata.

    The library `safetensors` checks that the file is valid, but does not tell the offsets.

    Raises:
        ValueError: the file is invalid.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:  # raises an OSError with the path if it cannot be read
        length = int.from_bytes(stream.read(8), "little")
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            fail(f"{path} must be a valid safetensors file but is not: {error}")
        header = json.loads(stream.read(length))
    records = Record.in_metadata(header.pop(_METADATA, None) or {}, path.name)
    entries = []
    for name, info in header.items():
        begin, stop = (8 + length + offset for offset in info["data_offsets"])
        entries.append(Entry(name, info["dtype"], tuple(info["shape"]), path, begin, stop - begin))
    return sorted(entries, key=lambda entry: entry.offset), records


def header_with(header: bytes, records: list[dict[str, Any]]) -> bytes:
    """Return a safetensors header that records these conversions and no others; padded to 8 bytes, as `safetensors` does.

    >>> before = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  '
    >>> after = header_with(before, [{"pairing": "half"}])
    >>> len(after) % 8, header_with(after, []) == before
    (0, True)
    """
    values = json.loads(header)
    metadata = values.pop(_METADATA, None) or {}
    metadata.pop(Record.key, None)
    if records:
        metadata[Record.key] = json.dumps(records, separators=(",", ":"))
    values = {_METADATA: metadata, **values} if metadata else values
    made = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    return made + b" " * (-len(made) % 8)
