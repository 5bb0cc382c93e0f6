"""Atomic output: a file or folder appears under its name complete or not at all.

A result is written to a temporary folder beside its target, flushed to the disk, then renamed. A lock
in that folder distinguishes a process that is writing from one that was killed; the next process that
writes to the same target removes what a killed one left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

SUFFIX = ".tightrope-partial"
_LOCK = "lock"
# Prefixes of the paths of this process's streams; these are written to directly, even if they are files.
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
_EXCHANGE = 2
_AT_FDCWD = -100


def partial_path(target: Path) -> Path:
    """Return the temporary folder for a result that will be renamed to `target`."""
    return target.with_name(f".{target.name}{SUFFIX}")


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
            with placed_file(Path(os.path.realpath(path)), force=True) as stream:
                stream.write(data)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def placed_file(target: Path, force: bool) -> Iterator[IO[bytes]]:
    """Open a temporary file that is renamed to `target` if the block succeeds, else removed.

    Args:
        force: whether to replace an existing target.

    Raises:
        FileExistsError: the target exists at the end of the block, and `force` is False.
        BlockingIOError: another process is writing the target.
    """
    with _partial(target) as temporary, open(temporary, "x+b") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
        if not force and os.path.lexists(target):
            raise _appeared(target)
        os.replace(temporary, target)
        _sync_folder(target.parent)


@contextlib.contextmanager
def placed_folder(target: Path, force: bool) -> Iterator[Path]:
    """Make a temporary folder that is renamed to `target` if the block succeeds, else removed.

    Args:
        force: whether to replace a folder that is not empty; an empty one is always replaced.

    Raises:
        FileExistsError: the target is not empty at the end of the block, and `force` is False.
        BlockingIOError: another process is writing the target.
    """
    with _partial(target) as temporary:
        temporary.mkdir()
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
            raise _appeared(target)
        _sync_folder(target.parent)


def _appeared(target: Path) -> OSError:
    return FileExistsError(
        errno.EEXIST, "it appeared while the result was being written", str(target)
    )


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yield a path for the result, in a locked folder that is removed at the end."""
    folder = partial_path(target)
    folder.mkdir(exist_ok=True)
    try:
        with open(folder / _LOCK, "wb") as lock:
            if not _lock(lock):
                raise BlockingIOError(errno.EAGAIN, "another process is writing it", str(target))
            try:
                _clear(folder)
                yield folder / "result"
            finally:
                _clear(folder)
                with contextlib.suppress(OSError):
                    (folder / _LOCK).unlink()
    finally:
        # The folder stays if another process has its lock file in it.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != _LOCK:
            _remove(path)


def _lock(stream: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:  # no file locks on this system: two writers of one target may collide
        return True
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock on a file that was unlinked meanwhile does not exclude other processes.
        return os.fstat(stream.fileno()).st_ino == os.stat(stream.name).st_ino
    except OSError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _exchange(temporary: Path, target: Path) -> None:
    """Put `temporary` in the place of `target`: atomically if the system can, else in two renames."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        names = os.fsencode(temporary), os.fsencode(target)
        if rename is not None and not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE):
            return  # the old folder now has the temporary name, under which it is removed
    old = target.with_name(f".{target.name}.tightrope-old")
    _remove(old)
    os.rename(target, old)
    os.rename(temporary, target)
    _remove(old)


def _sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, if the file system supports it."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        return  # a system on which folders cannot be opened
    with contextlib.suppress(OSError):
        os.fsync(number)
    os.close(number)
