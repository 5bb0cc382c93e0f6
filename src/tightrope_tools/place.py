"""Write a file or folder so that it appears under its name complete or not at all.

It is written to the folder `<name>.partial` beside its target, flushed to the disk, and renamed. If the process is
killed, only that folder is left, and the next one that writes the same target removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_OURS = "tightrope-"
# Prefixes of the paths of this process's streams; these are written to directly, even if they are files.
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")


def partial_path(target: Path) -> Path:
    """Return the folder in which a result is written before it is renamed to ``target``."""
    return target.with_name(f"{target.name}.partial")


@contextlib.contextmanager
def placed(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a path where the block makes a file or folder, which is then renamed to ``target``.

    If the block fails, what it made is removed. If another process is still writing the same target, that process
    fails.

    Args:
        replace: whether to replace a file that exists.

    Raises:
        FileExistsError: the target exists at the end of the block and ``replace`` is False, or its folder
            `<name>.partial` holds files that are not of this function.
    """
    partial = partial_path(target)
    partial.mkdir(exist_ok=True)
    try:
        left = list(partial.iterdir())
        if not all(path.name.startswith(_OURS) for path in left):
            why = "it holds files that no interrupted command left: move it"
            raise FileExistsError(errno.EEXIST, why, str(partial))
        for path in left:
            # The rename takes it away from a process that may still be writing it, before it is removed.
            with tempfile.TemporaryDirectory(prefix=_OURS, dir=partial) as away:
                os.rename(path, Path(away) / "left")
        with tempfile.TemporaryDirectory(prefix=_OURS, dir=partial) as work:
            made = Path(work) / target.name
            yield made
            for path in (made, *made.rglob("*")):
                _flush(path)
            if not replace and os.path.lexists(target):
                why = "it appeared while the result was being written"
                raise FileExistsError(errno.EEXIST, why, str(target))
            os.replace(made, target)
            _flush(target.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.rmdir()


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk; not every system can flush folders."""
    folder = path.is_dir()
    with contextlib.suppress(OSError) if folder else contextlib.nullcontext():
        number = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file completely, or leave the old one. Devices and pipes are written to directly.

    Raises:
        OSError: the file cannot be written; its ``filename`` is ``path``.
    """
    try:
        if str(path).startswith(_STREAMS) or (path.exists() and not path.is_file()):
            path.write_bytes(data)
        else:
            # A link stays a link: its target is replaced.
            with placed(Path(os.path.realpath(path)), replace=True) as made:
                made.write_bytes(data)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
