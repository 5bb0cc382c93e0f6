"""Results that appear under their names whole or not at all.

Everything is written beside the target, under a name that says what it is, then flushed to the disk,
then renamed. A lock tells a conversion that runs from one that was killed: what a killed one left is
removed by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ._fail import fail, shown

SUFFIX = ".tightrope-partial"
_EXCHANGE = 2
_AT_FDCWD = -100


def partial_path(target: Path) -> Path:
    """Where a result is written before it has its name."""
    return target.with_name(f".{target.name}{SUFFIX}")


def check_target(target: Path, *, folder: bool, force: bool, writes: set[str]) -> None:
    """Refuse a target that something of the user's would be lost under.

    Args:
        target: where the result shall be.
        folder: whether the result is a folder.
        force: whether an older result may be replaced.
        writes: for a folder, the files that the result holds.
    """
    if not target.name:
        fail(f"OUT must have a name but got {str(target)!r}")
    if not target.parent.is_dir():
        fail(f"OUT must be in a folder that is there but {target.parent} is not")
    if not os.path.lexists(target):
        return
    if target.is_symlink():
        fail(f"OUT must not be a link but {target} is one")
    if target.is_dir() != folder:
        kind, got = ("folder", "file") if folder else ("file", "folder")
        fail(f"OUT must be a {kind}, as the checkpoint is, but {target} is a {got}")
    if not folder:
        if not force:
            fail(f"OUT is there already: {target}; --force replaces it")
        return
    there = {
        str((Path(where) / name).relative_to(target))
        for where, below, files in os.walk(target)
        for name in (*files, *(name for name in below if (Path(where) / name).is_symlink()))
    }
    if there and not force:
        fail(f"OUT is there already: {target}; --force replaces it")
    strange = sorted(there - writes)
    if strange:
        fail(
            f"OUT holds {shown(strange)}, which the result does not: --force replaces results only, "
            f"so remove or move {target} yourself"
        )


@contextlib.contextmanager
def placed_file(target: Path, force: bool) -> Iterator[IO[bytes]]:
    """A file to write; it gets its name when the block ends well, and goes when it does not."""
    temporary = partial_path(target)
    with _locked(temporary, folder=False) as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
        if not force and os.path.lexists(target):
            fail(f"OUT appeared while the conversion ran: {target}")
        os.replace(temporary, target)
        _sync_folder(target.parent)


@contextlib.contextmanager
def placed_folder(target: Path, force: bool) -> Iterator[Path]:
    """A folder to fill; it gets its name when the block ends well, and goes when it does not."""
    temporary = partial_path(target)
    with _locked(temporary, folder=True):
        yield temporary
        for where, _, _ in os.walk(temporary):
            _sync_folder(Path(where))
        if not os.path.lexists(target):
            os.rename(temporary, target)
        elif not os.listdir(target):
            os.rmdir(target)
            os.rename(temporary, target)
        elif force:
            _exchange(temporary, target)
        else:
            fail(f"OUT appeared while the conversion ran: {target}")
        _sync_folder(target.parent)


@contextlib.contextmanager
def _locked(temporary: Path, folder: bool) -> Iterator[Any]:
    """Make the temporary file or folder, which is this process's alone, and remove it at the end."""
    # The lock is a file of its own: a folder that is filled cannot be replaced in one step.
    lock_path = temporary.with_name(temporary.name + ".lock")
    with open(lock_path, "wb") as lock:
        if not _lock(lock):
            fail(f"another conversion is writing {temporary.name}")
        try:
            _remove(temporary)
            if folder:
                temporary.mkdir()
                yield temporary
            else:
                with open(temporary, "x+b") as stream:
                    yield stream
        finally:
            _remove(temporary)
            with contextlib.suppress(OSError):
                lock_path.unlink()


def _lock(stream: IO[bytes]) -> bool:
    try:
        import fcntl
    except (
        ImportError
    ):  # no such locks on this system: two conversions to one target are not told apart
        return True
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock on a file that has lost its name meanwhile keeps nobody out.
        return os.fstat(stream.fileno()).st_ino == os.stat(stream.name).st_ino
    except OSError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _exchange(temporary: Path, target: Path) -> None:
    """Replace a folder by another: in one step where the system can, else through a third name."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        names = os.fsencode(temporary), os.fsencode(target)
        if rename is not None and not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE):
            return  # what was there has the temporary name now, and is removed under it
    old = target.with_name(f".{target.name}.tightrope-old")
    _remove(old)
    os.rename(target, old)
    os.rename(temporary, target)
    _remove(old)


def _sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, where a file system has such a thing."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        return  # a system on which folders cannot be opened
    with contextlib.suppress(OSError):
        os.fsync(number)
    os.close(number)
