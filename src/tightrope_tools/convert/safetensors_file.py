"""Read the offsets of the tensors in a safetensors file.

The library `safetensors` checks that a file is valid, but does not expose offsets, which a streaming
copy needs. So the header is read here as well.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from ._fail import fail
from .paired import of_metadata
from .tensors import Entry, Weights


def read_safetensors(path: Path) -> Weights:
    """Return the tensors of a file, in the order of their bytes.

    Raises:
        ValueError: the file is invalid, or the package safetensors is missing.
        OSError: the file cannot be read.
    """
    try:
        import safetensors
    except ImportError:
        fail(
            "reading safetensors needs the package of that name: install it with "
            '`python -m pip install "tightrope[tools]"`'
        )
    with open(path, "rb") as stream:  # raises an OSError with the path if it cannot be read
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
        fail(f"{path} must be a valid safetensors file but is not: {error}")
    begin = 8 + len(header)
    entries, paired = [], None
    for name, info in json.loads(header).items():
        if name == "__metadata__":
            paired = of_metadata(info, path)
            continue
        first, stop = info["data_offsets"]
        shape = tuple(info["shape"])
        entries.append(Entry(name, info["dtype"], shape, path, begin + first, stop - first))
    entries.sort(key=lambda entry: entry.offset)
    return Weights(path, tuple(entries), paired=paired)
