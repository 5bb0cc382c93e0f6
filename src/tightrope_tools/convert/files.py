"""The files of a checkpoint: a safetensors file, or a folder with one or with shards and their index.

Files outside the checkpoint's folder are never read, except files of the Hugging Face cache that it links to.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
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
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = (
    ".safetensors",
    *PICKLES,
    *".gguf .ggml .onnx .onnx_data .msgpack .h5 .ot .tflite .npz".split(),
)
_PICKLED_WEIGHTS = re.compile(r"pytorch_model|model|consolidated|adapter_model")
_INDEX = ".index.json"
_SHARD = re.compile(r"-\d+-of-\d+\.[a-z]+$")
_METADATA = "__metadata__"
_OWN = rf'"{re.escape(Record.key)}": *"(?:[^"\\]|\\.)*"'


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

    def rows(self, first: int, count: int, units: int) -> torch.Tensor:
        """Read ``count`` of its ``units`` rows, from row ``first``, as float64 ``(count, elements of a row)``."""
        unit = self.nbytes // units
        with open(self.file, "rb") as stream:
            stream.seek(self.offset + first * unit)
            data = bytearray(stream.read(count * unit))
        if len(data) != count * unit:
            raise OSError(f"{self.file} became shorter while it was read")
        made = torch.frombuffer(data, dtype=FLOATS[self.dtype]).view(count, -1)
        return made.to(torch.float32).double()


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
    ignored: dict[str, str] | None = None

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
        entries, record = _read(path)
        return Checkpoint(path, None, {path: record}, tuple(entries))
    folder = path if path.is_dir() else path.parent
    names, ignored = _listing(folder)
    index = _find_index(folder, names) if path.is_dir() else path.name
    listed = {} if index is None else _read_index(folder, index, names)
    chosen = list(dict.fromkeys(listed.values())) or [_single(folder, names)]
    read = {name: _read(folder / name) for name in chosen}
    held = {(entry.name, name) for name in chosen for entry in read[name][0]}
    wrong = sorted({tensor for tensor, _ in held ^ {*listed.items()}})
    if index is not None and wrong:
        fail(f"{index} and the files must agree on where tensors are but differ in {shown(wrong)}")
    weights = [name for name in names if name.lower().endswith((*_WEIGHTS, _INDEX))]
    others = [name for name in names if name not in (*weights, Record.file)]
    others += [] if index is None else [index]
    unused = [name for name in weights if name not in (*chosen, index)]
    ignored |= dict.fromkeys(unused, "other weights, which are not converted")
    every = tuple(entry for entries, _ in read.values() for entry in entries)
    files = {folder / name: read[name][1] for name in chosen}
    return Checkpoint(folder, folder, files, every, tuple(others), ignored)


def _listing(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the files below a folder, and ignored files and folders with the reason."""
    names: list[str] = []
    ignored: dict[str, str] = {}

    def raise_it(error: OSError) -> None:
        raise error

    for where, below, files in os.walk(folder, onerror=raise_it):
        here = Path(where)
        for path in sorted(here / name for name in (*below, *files)):
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


# --- choice of the weight files -------------------------------------------------------------------


def _find_index(folder: Path, names: list[str]) -> str | None:
    found = [name for name in names if name.endswith(f".safetensors{_INDEX}") and "/" not in name]
    if len(found) > 1:
        fail(f"{folder} has several indexes, {shown(found)}: give the path of one of them")
    return found[0] if found else None


def _read_index(folder: Path, index: str, names: list[str]) -> dict[str, str]:
    """Return the file of each tensor; only files of the folder are accepted."""
    if index not in names:
        fail(f"the index {index} must be a file inside its folder but is a link to another place")
    listed = load(folder / index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        fail(f"{index} must hold a weight_map from tensors to files but does not")
    for file in listed.values():
        plain = isinstance(file, str) and Path(file).name == file and file.endswith(_WEIGHTS)
        if plain and not os.path.lexists(folder / file):
            fail(f"{index} names {file}, but the folder has no such file")
        if not plain or file not in names:
            fail(f"{index} must name files of weights inside its folder but names {file!r}")
    return listed


def _single(folder: Path, names: list[str]) -> str:
    """Return the only file of weights of a folder without an index."""
    top = [name for name in names if Path(name).name == name]
    found = [name for name in top if name.endswith(".safetensors")]
    for wanted in ("model.safetensors", "adapter_model.safetensors"):
        if wanted in found:
            return wanted
    if any(map(_SHARD.search, found)):
        fail(f"{folder} has shards, {shown(found)}, but no index of their tensors")
    if len(found) > 1:
        fail(f"{folder} has several files of weights, {shown(found)}: give the path of one of them")
    if not found:
        pickles = [name for name in top if name.endswith(PICKLES)]
        own = [name for name in pickles if _PICKLED_WEIGHTS.match(name)] or pickles
        if own:
            _refuse_pickles([folder / name for name in own], folder / "model.safetensors")
        fail(f"{folder} must hold a checkpoint but has no safetensors")
    return found[0]


def _refuse_pickles(paths: list[Path], target: Path) -> NoReturn:
    """Say how to save torch pickles as safetensors."""
    what = f"a checkpoint must be safetensors but {shown([path.name for path in paths])} is a torch pickle"
    if len(paths) > 1 and all(path.name.startswith("consolidated") for path in paths):
        fail(f"{what} of one rank of several: merge the ranks, and save the result as safetensors")
    names = [str(path) for path in paths]
    fail(
        f"{what}; save it with this Python code first: import torch; from safetensors.torch import save_file; "
        f"save_file({{name: x.contiguous().clone() for file in {names} for name, x in torch.load(file, "
        f"weights_only=True).items()}}, {str(target)!r})"
    )


def _read(path: Path) -> tuple[list[Entry], list[Record]]:
    """Read a header as :func:`read_header` does, if the name of the file is that of safetensors."""
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        _refuse_pickles([path], path.with_suffix(".safetensors"))
    if suffix != ".safetensors":
        fail(f"the name of a checkpoint must end in .safetensors or {_INDEX} but got {path.name}")
    return read_header(path)


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
    metadata = header.pop(_METADATA, None) or {}
    entries = []
    for name, info in header.items():
        begin, stop = info["data_offsets"]
        shape = tuple(info["shape"])
        entries.append(Entry(name, info["dtype"], shape, path, 8 + length + begin, stop - begin))
    records = Record.in_metadata(metadata, path.name)
    return sorted(entries, key=lambda entry: entry.offset), records


def header_with(header: bytes, records: list[dict[str, Any]]) -> bytes:
    """Return a safetensors header that records these conversions and no others; padded to 8 bytes.

    All other bytes stay, so that taking the record away restores the header.

    >>> before = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  '
    >>> after = header_with(before, [{"pairing": "half"}])
    >>> len(after) % 8, header_with(after, []) == before
    (0, True)
    """
    made = header.decode()
    for pattern in (rf'"{_METADATA}":\{{{_OWN}\}},', f"{_OWN},?"):
        made = re.sub(pattern, "", made, count=1)
    values = json.loads(header)
    metadata = values.pop(_METADATA, None) or {}
    metadata.pop(Record.key, None)
    if records:
        text = json.dumps(records, separators=(",", ":"))
        at = re.search(rf'"{_METADATA}"\s*:\s*\{{(\s*\}})?', made)
        before, after = (f'"{_METADATA}":{{', "},") if at is None else ("", "" if at[1] else ",")
        begin = made.index("{") + 1 if at is None else at.end() - len(at[1] or "")
        parts = [f'{before}"{Record.key}":', f"{json.dumps(text)}{after}"]
        padding = " " * (-len("".join(parts)) % 8)
        made = made[:begin] + padding.join(parts) + made[begin:]
        metadata[Record.key] = text
    wanted = {_METADATA: metadata, **values}
    try:
        if {_METADATA: {}, **json.loads(made)} == wanted:
            return made.encode()
    except ValueError:
        pass
    # Another program has written the record anew.
    made = json.dumps(wanted, separators=(",", ":"), ensure_ascii=False)
    return made.encode() + b" " * (-len(made.encode()) % 8)
