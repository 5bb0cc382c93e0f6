"""What was done to a model, function by function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ._recognise import Recognition


@dataclass(frozen=True)
class Entry:
    """One rotary function, or one class of modules that make angles.

    A model for which ``angles="exact"`` found no such class has an entry under its own name; a
    modeling file has one named "angles".

    Attributes:
        module: the Python module that defines it.
        name: its name there: ``apply_rotary_pos_emb``, ``Attention._rotate``.
        recognised: what it computes, in words; None where that was not found out.
        replaced: whether calls go to this library now.
        reason: why.
    """

    module: str
    name: str
    recognised: str | None
    replaced: bool
    reason: str

    def __str__(self) -> str:
        verb = "replaced" if self.replaced else "left"
        what = f"{self.recognised}; " if self.recognised else ""
        return f"{verb:8} {self.module.rsplit('.', 1)[-1]}.{self.name}: {what}{self.reason}"


def entry_of(module: str, name: str, recognition: Recognition) -> Entry:
    """The line for a function that was tried."""
    candidate = recognition.candidate
    words = None if candidate is None else str(candidate)
    return Entry(module, name, words, candidate is not None, recognition.reason)


@dataclass
class Report:
    """What :func:`patch` found and what it did, an entry for each function."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def replaced(self) -> list[Entry]:
        """What is served by this library now."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left(self) -> list[Entry]:
        """What stays as it was."""
        return [entry for entry in self.entries if not entry.replaced]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"entries": [asdict(entry) for entry in self.entries]}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return "no rotary function found"
        counts = f"{len(self.replaced)} replaced, {len(self.left)} left"
        return "\n".join([counts, *map(str, self.entries)])
