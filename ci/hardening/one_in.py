"""A plugin of pytest that runs one in TIGHTROPE_ONE_IN tests, chosen by their names and TIGHTROPE_ONE_IN_SEED."""

from __future__ import annotations

import os
import zlib
from typing import Any


def pytest_collection_modifyitems(items: list[Any]) -> None:
    n = int(os.environ.get("TIGHTROPE_ONE_IN", "1"))
    seed = os.environ.get("TIGHTROPE_ONE_IN_SEED", "")
    items[:] = [item for item in items if zlib.crc32((seed + item.nodeid).encode()) % n == 0]
