"""The tensors of a checkpoint in any format, with the file and the offset of their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .paired import Paired

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
DTYPE_NAMES = {dtype: name for name, dtype in FLOATS.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor: its bytes are ``[offset, offset + nbytes)`` of ``file``, in row-major order.

    If ``contiguous`` is False, the tensor is a strided view, and the bytes are its whole storage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    contiguous: bool = True

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """Return dtype and shape for messages: ``BF16[64, 64]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def rows(self, first: int, count: int, units: int) -> torch.Tensor:
        """Read ``count`` of its ``units`` rows, from row ``first``, as ``(count, elements of a row)``."""
        unit = self.nbytes // units
        with open(self.file, "rb") as stream:
            stream.seek(self.offset + first * unit)
            data = bytearray(stream.read(count * unit))
        if len(data) != count * unit:
            raise OSError(
                f"{self.file} must have {count * unit} bytes from byte {self.offset + first * unit} on "
                f"but has {len(data)}"
            )
        return torch.frombuffer(data, dtype=FLOATS[self.dtype]).view(count, -1)


@dataclass(frozen=True)
class Weights:
    """One file of a checkpoint and its tensors.

    Attributes:
        kind: ``"safetensors"`` or ``"torch"``.
        records: the zip records of a torch file; their checksums change with their bytes.
        paired: the conversion record inside the file, if any.
        version: Megatron's version of the format, if a torch file states one.
    """

    path: Path
    entries: tuple[Entry, ...]
    records: tuple[Record, ...] = ()
    kind: str = "safetensors"
    paired: Paired | None = None
    version: object = None


@dataclass(frozen=True)
class Record:
    """One record of a zip: the offsets of its bytes, its checksum, and where that is stored."""

    name: str
    start: int
    stop: int
    crc: int
    crc_at: tuple[int, ...]


def each(files: tuple[Weights, ...]) -> Iterator[Entry]:
    """Yield the tensors of several files."""
    for weights in files:
        yield from weights.entries
