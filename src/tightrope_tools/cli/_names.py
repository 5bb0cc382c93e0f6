"""Short texts for lists of tensor names and for byte counts."""

import re
from collections.abc import Iterable


def grouped(names: Iterable[str]) -> list[tuple[str, int]]:
    """Merge names that differ only in their first number between dots: ``layers.{0-31}.q_proj``.

    Each entry has the number of names that it stands for.

    >>> grouped(["a.0.w", "a.1.w", "a.3.w", "b"])
    [('a.{0-1,3}.w', 3), ('b', 1)]
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = re.split(r"(?<=\.)(\d+)(?=\.)", name, maxsplit=1)
        if len(parts) == 3:
            groups.setdefault((parts[0], parts[2]), []).append(int(parts[1]))
        else:
            groups.setdefault((name, ""), [])
    made = []
    for (before, after), numbers in groups.items():
        several = (
            f"{{{_ranges(sorted(numbers))}}}" if len(numbers) > 1 else "".join(map(str, numbers))
        )
        made.append((f"{before}{several}{after}", max(len(numbers), 1)))
    return made


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def size(count: int) -> str:
    """Format a byte count with a fitting unit: ``2.15 GB``, ``64.0 MB``, ``812 bytes``."""
    for unit, value in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= value:
            amount = count / value
            return f"{amount:.{2 if amount < 10 else 1}f} {unit}"
    return f"{count} bytes"
