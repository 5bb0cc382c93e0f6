"""Real text that every machine with Python has: the sources of its standard library."""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_MOST_BYTES = 4_000_000
_LEAST_BYTES = 20_000
_EVERY_NTH_IS_VALIDATION = 10
# Other people's packages, tests that only some machines have, and tables of hexadecimal numbers.
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
)


class NoTextError(Exception):
    """The standard library's sources are not on this machine."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and, from other files, bytes to validate on (both uint8)."""

    train: torch.Tensor
    validation: torch.Tensor
    files: int
    sha256: str


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the sources in a fixed shuffled order and split them by file."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    train, validation = bytearray(), bytearray()
    files = 0
    for files, text in enumerate(_read(folder), start=1):
        (train if files % _EVERY_NTH_IS_VALIDATION else validation).extend(text)
        if len(train) + len(validation) >= _MOST_BYTES:
            break
    if min(len(train), len(validation)) < _LEAST_BYTES:
        raise NoTextError(
            f"The demo trains on the sources of Python's standard library, and {folder} "
            "holds too few .py files."
        )
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        validation=torch.frombuffer(validation, dtype=torch.uint8),
        files=files,
        sha256=hashlib.sha256(train + validation).hexdigest(),
    )


def _read(folder: Path) -> Iterator[bytes]:
    paths = sorted(
        path
        for path in folder.rglob("*.py")
        if _SKIPPED.isdisjoint(path.relative_to(folder).parts) and path.is_file()
    )
    # Shuffled with a seed of its own: the cap then takes from the whole alphabet, always the same.
    random.Random(0).shuffle(paths)
    for path in paths:
        yield path.read_bytes()


def byte_entropy(text: torch.Tensor) -> float:
    """Nats per byte that a model reaches which knows only how frequent each byte is."""
    shares = torch.bincount(text.long(), minlength=256).double() / text.numel()
    return float(torch.special.entr(shares).sum())
