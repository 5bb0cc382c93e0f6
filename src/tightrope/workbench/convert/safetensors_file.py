"""Where the tensors of a safetensors file lie.

The library `safetensors` judges whether a file is sound; its header is then read once more for the
offsets, which that library keeps to itself and which a copy that streams bytes needs.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from ._fail import fail
from .paired import of_metadata
from .tensors import Entry, Weights


def read_safetensors(path: Path) -> Weights:
    """The tensors of a file, in the order of their bytes.

    Raises:
        ValueError: a file that is no sound safetensors file.
        OSError: a file that cannot be read.
    """
    try:
        import safetensors
    except ImportError:
        fail(
            "reading safetensors needs the package of that name: get it with "
            '`python -m pip install "tightrope[cli]"`'
        )
    with open(path, "rb") as stream:  # an OSError with the path, where it cannot be read
        size = stream.read(8)
        header = b""
        if len(size) == 8:
            length = struct.unpack("<Q", size)[0]
            if length <= path.stat().st_size - 8:
                header = stream.read(length)
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        fail(f"{path} must be a sound safetensors file but is not: {error}")
    begin = 8 + len(header)
    entries, paired = [], None
    for name, told in json.loads(header).items():
        if name == "__metadata__":
            paired = of_metadata(told, path)
            continue
        first, stop = told["data_offsets"]
        shape = tuple(told["shape"])
        entries.append(Entry(name, told["dtype"], shape, path, begin + first, stop - first))
    entries.sort(key=lambda entry: entry.offset)
    return Weights(path, tuple(entries), paired=paired)
