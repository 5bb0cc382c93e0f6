"""The report of ``patch``: an entry per rotary function, and per class of modules that make cosines and sines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

_ORIGINAL = (
    "the original runs, and is counted, for shapes, dtypes, strides and arguments that were not compared, cosines and sines "
    "that need gradients and that rows share, tensor subclasses, meta tensors, torch.func transforms and forward-mode "
    "differentiation"
)
_SHARED = "replacements serve every model of these files in this process, until each patched one is unpatched"
_COMPILED = (
    "compiled code has these bits too where the operator runs; torch.compile of the originals rounds less often, so "
    "its results differ"
)


@dataclass(frozen=True)
class Entry:
    """The outcome for one rotary function, or for one class of modules that make cosines and sines.

    Attributes:
        module: the Python module that defines the function or class.
        name: its name there: ``apply_rotary_pos_emb``, ``Attention._rotate``.
        kind: what it computes; None if it is of no kind that `patch` knows.
        replaced: whether a replacement takes its calls now.
        reason: why it was left; empty if it was replaced.
        same_bits: whether results and gradients keep their bits in the calls that the operator serves. They were
            compared on the devices in ``compared``.
        compared: the types of devices on which bits were compared; more are added as the model runs on them.
    """

    module: str
    name: str
    kind: str | None
    replaced: bool
    reason: str = ""
    same_bits: bool = False
    compared: list[str] = field(default_factory=list, hash=False, compare=False)

    def __str__(self) -> str:
        place = f"{self.module.rsplit('.', 1)[-1]}.{self.name}"
        if not self.replaced:
            return f"left     {place}: {self.reason}"
        bits = f" (same bits, compared on {' and '.join(self.compared)})" if self.same_bits else ""
        return f"replaced {place}{bits}: {self.kind}"


@dataclass(frozen=True)
class Calls:
    """The eager calls of a replaced function since ``patch``, in all models that share it.

    Attributes:
        operator: how many calls the operator served.
        original: in how many calls the original ran.
        doubtful: of the first 100 calls of a module that makes M-RoPE tables, those whose ids restart within a row and
            are equal on all axes, as those of packed text are. Such a model rotates by them, but may not see that the
            row holds several sequences. Only ids on the CPU are looked at.
        padded: of the same calls, those whose rows share ids, though some rows begin with two equal tokens, as
            padding on the left is, and others do not. Padded rows need ids of their own. Rows that are not padded but begin
            with a repeated token are counted too: a mask is not seen here.
    """

    operator: int
    original: int
    doubtful: int = 0
    padded: int = 0


@dataclass
class Report:
    """The entries of a patch. ``with patch(model) as report:`` undoes the patch at the end of the block.

    Attributes:
        entries: the entries, in order.
        notes: further lines, such as those about modules whose frequencies are not those of their configuration.
        if_empty: the sentence for a report without entries.
    """

    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    if_empty: str = (
        "no rotary function found: `patch` looks for functions in the code of the model's classes whose name has 'rot' or "
        "'rope' and that take cosines and sines; name others with the option `functions`"
    )
    # (module, name) -> the counts of the replacement, and those at the time of the patch.
    _counts: dict[tuple[str, str], tuple[list[int], tuple[int, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _undo: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def replaced(self) -> list[Entry]:
        """The entries whose calls go to a replacement."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left(self) -> list[Entry]:
        """The entries that were left unchanged."""
        return [entry for entry in self.entries if not entry.replaced]

    def calls(self) -> dict[str, Calls]:
        """Count the eager calls of each replaced function since ``patch``, by ``module.name``.

        Models that share a function share its counts. Calls in compiled code are not counted.
        """
        return {
            f"{module}.{name}": Calls(*(now - then for now, then in zip(counts, before)))
            for (module, name), (counts, before) in self._counts.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "entries": [asdict(entry) for entry in self.entries],
            "notes": list(self.notes),
            "calls": {place: asdict(calls) for place, calls in self.calls().items()},
        }

    def add(self, other: Report) -> None:
        """Add the entries, notes and counts of another report that this one lacks."""
        self.entries += [each for each in other.entries if each not in self.entries]
        self.notes += [each for each in other.notes if each not in self.notes]
        self._counts = {**other._counts, **self._counts}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        if self._undo is not None:
            self._undo()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return "\n".join([self.if_empty, *self.notes])
        lines = [f"{len(self.replaced)} replaced, {len(self.left)} left"]
        lines += [*map(str, self.entries), *self.notes]
        lines += [_ORIGINAL, _SHARED] if self.replaced else []
        lines += [_COMPILED] if any(entry.same_bits for entry in self.replaced) else []
        for place, calls in self.calls().items():
            if calls.operator or calls.original:
                served = f"the operator served {calls.operator:,}"
                lines.append(f"calls of {place}: {served}, the original ran in {calls.original:,}")
            if calls.doubtful:
                lines.append(
                    f"calls of {place} in which ids restart within a row, equal on all axes: {calls.doubtful:,}; give "
                    "rows of packed text ids with a first row for text, or an attention mask of blocks"
                )
            if calls.padded:
                lines.append(
                    f"calls of {place} in which rows share ids, but some seem to begin with padding: "
                    f"{calls.padded:,}; give padded rows ids of their own, such as "
                    "positions.left_padded(attention_mask).ids[0] for text"
                )
        return "\n".join(lines)
