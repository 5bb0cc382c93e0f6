"""A plugin of pytest that runs one in TIGHTROPE_ONE_IN tests, chosen by their names and TIGHTROPE_ONE_IN_SEED."""

from __future__ import annotations

import os
import zlib
from typing import Any


def pytest_collection_modifyitems(items: list[Any]) -> None:
    n = int(os.environ.get("TIGHTROPE_ONE_IN", "1"))
    seed = os.environ.get("TIGHTROPE_ONE_IN_SEED", "")
    # By the name without the file, so that a test that moves is drawn as before.
    names = [item.nodeid.partition("::")[2] for item in items]
    drawn = [zlib.crc32((seed + name).encode()) % n == 0 for name in names]
    items[:] = [item for item, chosen in zip(items, drawn, strict=True) if chosen]
