"""Copy a file and reorder rows of some tensors on the way, in bounded memory.

All other bytes stay (headers, metadata, padding, other tensors), except the checksums of a zip and the
conversion record in a single file. Memory holds one head of one tensor and a buffer.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

from .paired import Paired, comment_with, header_with
from .tensors import Entry, Record, Weights

_BUFFER = 8 << 20
# Size in bytes of a zip's end-of-central-directory record, without its comment.
_DIRECTORY_END = 22

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Change:
    """The rows of a tensor that move.

    Attributes:
        entry: the tensor.
        role: its role, as in :class:`tightrope_tools.convert.naming.Naming`.
        layer: the layer's number.
        units: the number of its rows: its first dimension; for a norm, its number of elements.
        starts: the first rotated row of each head.
        width: the number of rows of a head that rotate.
        module: the name of its module.
    """

    entry: Entry
    role: str
    layer: int
    units: int
    starts: tuple[int, ...]
    width: int
    module: str = ""

    @property
    def unit(self) -> int:
        """The size of a row in bytes."""
        return self.entry.nbytes // self.units


def source_row(row: int, width: int, interleaved: bool) -> int:
    """Return which of a head's ``width`` rotated rows moves to place ``row``.

    Args:
        interleaved: whether the rows become interleaved; otherwise they become half.

    >>> [source_row(row, 6, True) for row in range(6)]
    [0, 3, 1, 4, 2, 5]
    >>> [source_row(row, 6, False) for row in range(6)]
    [0, 2, 4, 1, 3, 5]
    """
    half = width // 2
    if interleaved:
        return row // 2 + row % 2 * half
    return 2 * row if row < half else 2 * (row - half) + 1


def rewrite(
    weights: Weights,
    changes: Iterable[Change],
    interleaved: bool,
    target: IO[bytes],
    progress: Progress | None = None,
    *,
    record: bool = False,
) -> int:
    """Write a copy of a file in which the rows of ``changes`` have the other pairing.

    Args:
        weights: the file.
        changes: the changes of this file. Rows that several tensors share move once.
        interleaved: whether the copy pairs neighbours.
        target: an empty file, open for reading and writing.
        progress: called with the number of bytes written since the last call.
        record: whether a file without a conversion record gets one; an existing one is always updated,
            or removed if the copy restores the original pairing.

    Returns:
        The number of bytes by which tensors begin later in the copy than in the file.
    """
    paired = _record(weights, interleaved) if record or weights.paired is not None else None
    edits = record or weights.paired is not None
    with open(weights.path, "rb") as source:
        copy = _Copy(source, target, weights.records, progress or (lambda _: None))
        shift = 0
        if edits and weights.kind == "safetensors":
            shift = copy.header(paired)
        done: set[int] = set()
        for change in sorted(changes, key=lambda each: each.entry.offset):
            if change.entry.offset in done:
                continue
            done.add(change.entry.offset)
            for start in sorted(change.starts):
                copy.until(change.entry.offset + start * change.unit)
                copy.reorder(change.width, change.unit, interleaved)
        size = os.fstat(source.fileno()).st_size
        if edits and weights.kind != "safetensors":
            copy.comment(size, paired)
        copy.until(size)
        if copy.at != size:
            raise OSError(f"{weights.path} became shorter while it was read")
        copy.checksums()
    return shift


def _record(weights: Weights, interleaved: bool) -> Paired | None:
    """Return the record of a copy, or None if the copy restores the pairing of the original."""
    to, was = ("interleaved", "half") if interleaved else ("half", "interleaved")
    if weights.paired is not None and weights.paired.was == to:
        return None
    return Paired(to, was)


class _Copy:
    """A copy of a weight file in progress: reorders rows and updates the checksums of zip records."""

    def __init__(
        self,
        source: IO[bytes],
        target: IO[bytes],
        records: tuple[Record, ...],
        progress: Progress,
    ) -> None:
        self.at = 0
        self._source = source
        self._target = target
        self._progress = progress
        self._buffer = memoryview(bytearray(_BUFFER))
        self._records = sorted(records, key=lambda record: record.start)
        self._starts = [record.start for record in self._records]
        self._crc = dict.fromkeys(self._starts, 0)
        self._changed: set[int] = set()

    def until(self, position: int) -> None:
        """Copy unchanged up to a position."""
        while self.at < position:
            part = self._buffer[: min(_BUFFER, position - self.at)]
            got = self._source.readinto(part)  # type: ignore[attr-defined]
            if not got:
                return
            self._write(part[:got])

    def header(self, record: Paired | None) -> int:
        """Copy the header of a safetensors file with this record; return by how many bytes it grew."""
        length = struct.unpack("<Q", self._source.read(8))[0]
        old = self._source.read(length)
        new = header_with(old, record)
        self._target.write(struct.pack("<Q", len(new)) + new)
        self.at = 8 + length
        self._progress(self.at)
        return len(new) - len(old)

    def comment(self, size: int, record: Paired | None) -> None:
        """Copy the end of a zip with this record in its comment; unchanged if the record does not fit."""
        with zipfile.ZipFile(self._source.name) as archive:
            old = archive.comment
        begin = size - _DIRECTORY_END - len(old)
        self.until(begin)
        end, new = self._source.read(_DIRECTORY_END), comment_with(old, record)
        # If other bytes follow the zip, or the comment is full, the end stays as it is.
        if end[:4] != b"PK\x05\x06" or len(new) >= 1 << 16:
            self._source.seek(begin)
            return
        self._target.write(end[:-2] + struct.pack("<H", len(new)) + new)
        self._source.seek(size)
        self._progress(size - begin)
        self.at = size

    def reorder(self, width: int, unit: int, interleaved: bool) -> None:
        """Copy ``width`` rows of ``unit`` bytes in the order of the other pairing."""
        rows = memoryview(self._source.read(width * unit))
        if len(rows) != width * unit:
            raise OSError(f"{self._source.name} became shorter while it was read")
        moved = bytearray(width * unit)
        for row in range(width):
            begin = source_row(row, width, interleaved) * unit
            moved[row * unit : (row + 1) * unit] = rows[begin : begin + unit]
        if self._starts:
            self._changed.add(self._record_at(self.at).start)
        self._write(memoryview(moved))

    def checksums(self) -> None:
        """Write the checksums of the records that changed."""
        for record in self._records:
            if record.start in self._changed:
                for position in record.crc_at:
                    self._target.seek(position)
                    self._target.write(struct.pack("<I", self._crc[record.start]))
        self._target.seek(0, os.SEEK_END)

    def _record_at(self, position: int) -> Record:
        return self._records[max(bisect_right(self._starts, position) - 1, 0)]

    def _write(self, data: memoryview) -> None:
        self._target.write(data)
        self._sum(data)
        self.at += len(data)
        self._progress(len(data))

    def _sum(self, data: memoryview) -> None:
        """Add bytes that begin at the current position to the checksums of their records."""
        if not self._starts:
            return
        first = max(bisect_right(self._starts, self.at) - 1, 0)
        for record in self._records[first:]:
            if record.start >= self.at + len(data):
                return
            begin = max(record.start - self.at, 0)
            stop = min(record.stop - self.at, len(data))
            if begin < stop:
                self._crc[record.start] = zlib.crc32(data[begin:stop], self._crc[record.start])
