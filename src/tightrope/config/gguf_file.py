"""Read the metadata of a GGUF file and the factor tensors that its RoPE depends on.

Only the beginning of the file and these tensors are read, so the time does not depend on the model size.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, either byte order.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .source import fail

MAGIC = b"GGUF"

# Frequency factors of Llama 3.1 and LongRoPE, which are stored as tensors and not as metadata.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

# GGUF's number of a value type -> its struct format.
_PLAIN = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
# GGUF's number of a tensor type that stores factors -> its struct format.
_FACTOR_TYPES = {0: "f", 1: "e"}
_VERSIONS = (2, 3)
_ALIGNMENT = 32
# Longer lists hold tokens or their scores, which are not needed here.
_LONGEST_LIST = 65536


def read(path: Path) -> Mapping[str, Any]:
    """Return the metadata of a file, key -> value, with the factor tensors under their own names.

    Lists of more than 65,536 entries (the tokens of a tokenizer) are left out.

    Raises:
        ValueError: the file is truncated or invalid, or not GGUF version 2 or 3.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(path, data).read()
        except (struct.error, OverflowError):
            fail(
                f"{path} must be a complete GGUF file but ends within its metadata or factor tensors"
            )


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, len(MAGIC)
        self.order = "<"

    def read(self) -> dict[str, Any]:
        version = self.number("I")
        if version not in _VERSIONS:
            self.order, self.at = ">", len(MAGIC)
            if (swapped := self.number("I")) not in _VERSIONS:
                fail(
                    f"{self.path} must be GGUF version 2 or 3 but is version {min(version, swapped)}"
                )
        tensors, entries = self.number("Q"), self.number("Q")
        values: dict[str, Any] = {}
        for _ in range(entries):
            key = self.string()
            if key in values:
                fail(f"{self.path} must have each key once but has {key} twice")
            values[key] = self.value(self.number("I"))
        values = {key: value for key, value in values.items() if value is not None}
        found = self.factor_tensors(tensors)
        alignment = values.get("general.alignment", _ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
            fail(f"general.alignment of {self.path} must be a positive int but got {alignment!r}")
        start = -(-self.at // alignment) * alignment
        for name, (form, count, offset) in found.items():
            layout = f"{self.order}{count}{form}"
            values[name] = list(struct.unpack_from(layout, self.data, start + offset))
        return values

    def number(self, form: str) -> Any:
        layout = self.order + form
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise struct.error

    def string(self) -> str:
        length = self.number("Q")
        start = self.at
        self.skip(length)
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Read a value; None for a list longer than the limit."""
        if kind in _PLAIN:
            return self.number(_PLAIN[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            fail(f"{self.path} must hold values of GGUF's types but has one of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _PLAIN:
            layout = f"{self.order}{count}{_PLAIN[inner]}"
            start = self.at
            # If the count is too large for struct, it is too large for the file as well.
            self.skip(count * struct.calcsize(self.order + _PLAIN[inner]))
            if count > _LONGEST_LIST:
                return None
            return list(struct.unpack_from(layout, self.data, start))
        if inner != _STRING:
            fail(f"{self.path} must hold lists of numbers or strings but has one of type {inner}")
        if count > _LONGEST_LIST:
            for _ in range(count):
                self.skip(self.number("Q"))
            return None
        return [self.string() for _ in range(count)]

    def factor_tensors(self, count: int) -> dict[str, tuple[str, int, int]]:
        """Factor tensors by name: (struct format, count, offset in the data section)."""
        found = {}
        for _ in range(count):
            name = self.string()
            sizes = [self.number("Q") for _ in range(self.number("I"))]
            kind, offset = self.number("I"), self.number("Q")
            if name not in FACTORS:
                continue
            if kind not in _FACTOR_TYPES or len(sizes) != 1 or sizes[0] > _LONGEST_LIST:
                fail(
                    f"{name} of {self.path} must be a row of at most {_LONGEST_LIST:,} numbers in float32 "
                    f"(type 0) or float16 (type 1) but has shape {sizes} and type {kind}"
                )
            found[name] = (_FACTOR_TYPES[kind], sizes[0], offset)
        return found
