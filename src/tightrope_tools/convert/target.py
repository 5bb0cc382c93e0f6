"""Check the target path of a conversion."""

from __future__ import annotations

import os
from pathlib import Path

from ._fail import fail, shown


def check_target(target: Path, *, folder: bool, force: bool, writes: set[str]) -> None:
    """Refuse an invalid target, or one where the user would lose data.

    Args:
        target: path of the result.
        folder: whether the result is a folder.
        force: whether an older result may be replaced.
        writes: for a folder, the files of the result.

    Raises:
        ValueError: the target is refused.
    """
    if not target.name:
        fail(f"OUT must have a name but got {str(target)!r}")
    if not target.parent.is_dir():
        fail(f"OUT must be in an existing folder but {target.parent} does not exist")
    if not os.path.lexists(target):
        return
    if target.is_symlink():
        fail(f"OUT must not be a link but {target} is one")
    if target.is_dir() != folder:
        kind, got = ("folder", "file") if folder else ("file", "folder")
        fail(f"OUT must be a {kind}, as the checkpoint is, but {target} is a {got}")
    if not folder:
        if not force:
            fail(f"OUT already exists: {target}; --force replaces it")
        return
    there = {
        str((Path(where) / name).relative_to(target))
        for where, below, files in os.walk(target)
        for name in (*files, *(name for name in below if (Path(where) / name).is_symlink()))
    }
    if there and not force:
        fail(f"OUT already exists: {target}; --force replaces it")
    strange = sorted(there - writes)
    if strange:
        fail(
            f"OUT holds {shown(strange)}, which the result does not: --force replaces only results of a "
            f"conversion, so remove or move {target} first"
        )
