"""The report of ``patch``: one entry per rotary function or class of modules that make cos/sin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ._candidate import TO_THE_BIT
from ._inline import INLINE
from ._recognise import Recognition

_COMPILED = "compiled code keeps these bits; torch.compile of the originals rounds less often, so its results differ"


@dataclass(frozen=True)
class Entry:
    """The outcome for one rotary function, or for one class of modules that make cos/sin.

    A class of which modules were left because a wrapper hides their ``forward`` has an entry too.

    If ``angles="exact"`` finds no such class, an entry says so: under the class name of the model, or for
    ``patch()`` under the name "angles", for each modeling file with a rotary function.

    Attributes:
        module: the Python module that defines the function or class.
        name: its name there: ``apply_rotary_pos_emb``, ``Attention._rotate``.
        recognised: a description of what it computes; None if it was not recognised.
        replaced: whether this library serves its calls now.
        reason: why it was replaced or left.
    """

    module: str
    name: str
    recognised: str | None
    replaced: bool
    reason: str

    def __str__(self) -> str:
        verb = "replaced" if self.replaced else "left"
        recognised = f"{self.recognised}; " if self.recognised else ""
        same = ""
        if recognised.endswith(f", {TO_THE_BIT}; "):
            recognised = f"{str(self.recognised).removesuffix(f', {TO_THE_BIT}')}; "
            same = " (same bits)"
        where = f"{self.module.rsplit('.', 1)[-1]}.{self.name}"
        return f"{verb:8} {where}{same}: {recognised}{self.reason}"


def entry_of(
    module: str,
    name: str,
    recognition: Recognition,
    rounding: str,
    constants: Sequence[tuple[str, Any]] = (),
) -> Entry:
    """The report entry of a function that was tested with constant keyword arguments."""
    candidate = recognition.candidate
    if candidate is not None and rounding == "once":
        candidate = replace(candidate, bits=())  # results round less often than those of the model
    if constants:
        name += f"({', '.join(f'{key}={value!r}' for key, value in constants)})"
    recognised = None if candidate is None else str(candidate)
    if recognised is not None and INLINE in name:  # x may be a slice of the channels
        recognised = recognised.replace("all channels", "all channels of x", 1)
    return Entry(module, name, recognised, candidate is not None, recognition.reason)


@dataclass
class Report:
    """The entries of a patch: one per rotary function and per class that makes cos/sin.

    Attributes:
        entries: the entries, in order.
        notes: lines about modules whose exact angles are not those that the model's configuration states.
    """

    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def replaced(self) -> list[Entry]:
        """The entries that this library serves now."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left(self) -> list[Entry]:
        """The entries that were left unchanged."""
        return [entry for entry in self.entries if not entry.replaced]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {"entries": [asdict(entry) for entry in self.entries], "notes": list(self.notes)}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return "no rotary function found"
        counts = f"{len(self.replaced)} replaced, {len(self.left)} left"
        exact = any(str(entry.recognised).endswith(TO_THE_BIT) for entry in self.replaced)
        return "\n".join(
            [counts, *map(str, self.entries), *self.notes, *([_COMPILED] if exact else [])]
        )
