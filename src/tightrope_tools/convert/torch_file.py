"""Read the offsets of the tensors in a torch checkpoint without running code from it.

`torch.load` with ``weights_only`` on the meta device reads names, shapes and offsets, but no data.
Conversion then copies the zip unchanged, except for rows that move, the checksums of their records, and
the conversion record in the comment.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ._fail import fail
from .paired import of_comment
from .tensors import DTYPE_NAMES, Entry, Record, Weights

# Exceptions that torch's reader raises on damaged files.
_DAMAGED = (
    RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError,
    AssertionError, OverflowError, MemoryError, struct.error,
)  # fmt: skip
# Keys of training state, whose tensors match the unconverted weights.
_OPTIMISERS = ("optimizer", "optimizer_state", "optimizer_state_dict", "optimizer_states", "optim")
# Real checkpoints nest a few mappings. A damaged one may nest without end, or name its tensors again and again.
_DEEPEST, _MOST = 100, 1_000_000


def read_torch(path: Path) -> Weights:
    """Return the tensors of a file that `torch.save` wrote, with the zip records that hold them.

    Raises:
        ValueError: torch cannot load the file safely, or it holds more than weights.
        OSError: the file cannot be read.
    """
    records, comment = _records(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged pickle may warn about its protocol
            loaded = _without_data(path)
    except pickle.UnpicklingError as error:
        fail(f"{path} must load with weights_only but does not: {_why_refused(str(error))}")
    except _DAMAGED as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"{path} must be a valid torch checkpoint but is not: {first}")
    if not isinstance(loaded, Mapping):
        fail(f"{path} must hold a mapping of tensors but holds {type(loaded).__name__}")
    found = [key for key in _OPTIMISERS if key in loaded]
    if found:
        fail(
            f"{path} holds {found[0]!r}, whose state would not match the converted weights: save the "
            f"weights alone"
        )
    starts = {record.start: record for record in records.values()}
    entries = []
    for name, tensor in _tensors(loaded, path):
        if tensor.layout is not torch.strided:
            fail(
                f"{path} must hold dense tensors but {name} is {str(tensor.layout).removeprefix('torch.')}"
            )
        offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if offset is None:
            continue  # the file holds no data for it
        if offset not in starts:
            fail(f"{path} holds {name} at an offset where no zip record begins")
        record = starts[offset]
        entry = _entry(name, tensor, path, record)
        if entry.offset + entry.nbytes > record.stop:
            fail(f"{path} must be a valid torch checkpoint, but {name} is larger than its record")
        entries.append(entry)
    version = loaded.get("checkpoint_version")
    return Weights(
        path, tuple(entries), tuple(records.values()), "torch", of_comment(comment), version
    )


def _why_refused(text: str) -> str:
    """Explain why torch refused a pickle; torch's own text suggests loading it in a way that runs code."""
    imported = re.search(r"GLOBAL (\S+)", text)
    if imported is None:
        return "its pickle is damaged or holds more than weights"
    return f"its pickle imports {imported[1]}, which could run code; save the weights alone"


def _without_data(path: Path) -> Any:
    if torch.__version__ >= "2.11":
        return torch.load(path, map_location="meta", weights_only=True)
    # torch 2.10 reads the data even on the meta device, and records offsets only for fake tensors.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.load(path, weights_only=True)


def _entry(name: str, tensor: torch.Tensor, path: Path, record: Record) -> Entry:
    size = tensor.element_size()
    contiguous = tensor.is_contiguous()
    # A view that is not contiguous gets its whole record. Its size comes from the zip, as torch 2.10
    # counts the size of a fake storage in other units.
    numel = tensor.numel() if contiguous else (record.stop - record.start) // size
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    first = record.start + (int(tensor.storage_offset()) * size if contiguous else 0)
    return Entry(name, dtype, tuple(tensor.shape), path, first, numel * size, contiguous)


def _tensors(loaded: Any, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested mappings and lists, with its path of keys."""
    count, rest = 0, [("", loaded, 0)]
    while rest:
        name, value, depth = rest.pop()
        count += 1
        if depth > _DEEPEST or count + len(rest) > _MOST:
            fail(
                f"{path} must hold at most {_MOST:,} tensors, in at most {_DEEPEST} mappings and lists within "
                f"each other"
            )
        if isinstance(value, torch.Tensor):
            yield name, value
            continue
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        rest += [
            (f"{name}.{key}" if name else str(key), inner, depth + 1)
            for key, inner in items
            if isinstance(inner, torch.Tensor | Mapping | list | tuple)
        ][::-1]


def _records(path: Path) -> tuple[dict[str, Record], bytes]:
    size = path.stat().st_size
    with open(path, "rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            fail(
                f"{path} must be a zip that torch.save wrote but is not; if torch before 1.6 wrote it, "
                f"load it and save it again"
            )
        try:
            with zipfile.ZipFile(stream) as archive:
                infos, comment = archive.infolist(), archive.comment
                scripted = any(info.filename.endswith("/constants.pkl") for info in infos)
                records = {}
                if not scripted:
                    central = _central_checksums(stream, archive.start_dir, len(infos))
                    for info, at in zip(infos, central, strict=True):
                        records[info.filename] = _record(stream, info, at, size)
        except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError) as error:
            fail(f"{path} must be a valid torch checkpoint but is not: {error}")
    if scripted:
        fail(f"{path} is a TorchScript archive: save its state_dict instead")
    return records, comment


def _central_checksums(stream: Any, start: int, count: int) -> list[int]:
    """Return the offsets of the checksums in the central directory of a zip."""
    at, found = start, []
    for _ in range(count):
        stream.seek(at)
        fields = struct.unpack("<4s24x3H12x", stream.read(46))
        if fields[0] != b"PK\x01\x02":
            raise zipfile.BadZipFile("its directory is damaged")
        found.append(at + 16)
        at += 46 + sum(fields[1:])
    return found


def _record(stream: Any, info: zipfile.ZipInfo, central: int, size: int) -> Record:
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{info.filename} is compressed")
    if not 0 <= info.header_offset <= size:
        raise zipfile.BadZipFile(
            f"{info.filename} begins at byte {info.header_offset}, outside the file"
        )
    stream.seek(info.header_offset)
    magic, flags, crc, name, extra = struct.unpack("<4s2xH6xI8x2H", stream.read(30))
    if magic != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{info.filename} has no header")
    start = info.header_offset + 30 + name + extra
    stop = start + info.file_size
    if stop > size:
        raise zipfile.BadZipFile(f"{info.filename} ends at byte {stop}, outside the file")
    where = [central]
    if flags & 8:
        stream.seek(stop)
        if stream.read(4) == b"PK\x07\x08":
            where.append(stop + 4)
    if crc == info.CRC and crc:
        where.append(info.header_offset + 14)
    return Record(info.filename, start, stop, info.CRC, tuple(where))
