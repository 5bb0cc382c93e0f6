"""The report of ``patch``: one entry per rotary function or class of modules that make cos/sin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ._candidate import TO_THE_BIT
from ._recognise import TRIED, Recognition
from ._replace import original_runs

# The calls in which every replacement calls the original.
_ALWAYS = (
    "every replacement also calls the original for shapes and arguments that were not compared, tensor subclasses, "
    "meta tensors, torch.func transforms and forward-mode differentiation"
)
_COMPILED = (
    "compiled code has these bits too where the operator runs; torch.compile of the originals rounds less often, so "
    "its results differ"
)
# The beginning of kinds of calls in which compiled code does not call the original.
_EAGER = "in eager code"
_OTHER_BITS = f'where a line says "{_EAGER}", compiled code runs the operator, with other bits'


@dataclass(frozen=True)
class Entry:
    """The outcome for one rotary function, or for one class of modules that make cos/sin.

    A class of which modules were left because a wrapper hides their ``forward`` has an entry too. If no
    module's cosines and sines can be exchanged, an entry under the class name of the model says so.

    Attributes:
        module: the Python module that defines the function or class.
        name: its name there: ``apply_rotary_pos_emb``, ``Attention._rotate``.
        recognised: a description of what it computes; None if it was not recognised.
        replaced: whether a replacement takes its calls now.
        reason: why it was replaced or left.
        original_runs: the kinds of calls, special to this function, in which its replacement calls the
            original. All replacements do so for calls of kinds that were not compared, such as other
            shapes and arguments, tensor subclasses, meta tensors, torch.func transforms and forward-mode
            differentiation.
    """

    module: str
    name: str
    recognised: str | None
    replaced: bool
    reason: str
    original_runs: tuple[str, ...] = ()

    def __str__(self) -> str:
        verb = "replaced" if self.replaced else "left"
        recognised = f"{self.recognised}; " if self.recognised else ""
        same = ""
        if recognised.endswith(f", {TO_THE_BIT}; "):
            recognised = f"{str(self.recognised).removesuffix(f', {TO_THE_BIT}')}; "
            same = " (same bits)"
        line = f"{verb:8} {self.place}{same}: {recognised}{self.reason}"
        runs = "; ".join(self.original_runs)
        return f"{line}\n{'':8} the original runs for {runs}" if runs else line

    @property
    def place(self) -> str:
        """The last part of the module's name and the name: ``modeling_llama.apply_rotary_pos_emb``."""
        return _place(self.module, self.name)


def _place(module: str, name: str) -> str:
    return f"{module.rsplit('.', 1)[-1]}.{name}"


def entry_of(
    module: str,
    name: str,
    recognition: Recognition,
    rounding: str,
    constants: Sequence[tuple[str, Any]] = (),
) -> Entry:
    """The report entry of a function that was tested with constant keyword arguments."""
    candidate = recognition.candidate
    if candidate is not None and rounding != "model":
        candidate = replace(candidate, bits=())  # results round otherwise than those of the model
    if constants:
        name += f"({', '.join(f'{key}={value!r}' for key, value in constants)})"
    recognised = None if candidate is None else str(candidate)
    runs = () if candidate is None else original_runs(candidate, rounding)
    return Entry(module, name, recognised, candidate is not None, recognition.reason, runs)


@dataclass(frozen=True)
class Calls:
    """The eager calls of a replaced function since ``patch``, in all models that share it.

    Attributes:
        operator: how many calls the operator served.
        original: in how many calls the original ran.
    """

    operator: int
    original: int


@dataclass
class Report:
    """The entries of a patch: one per rotary function and per class that makes cos/sin.

    ``with patch(model) as report:`` undoes the patch at the end of the block.

    Attributes:
        entries: the entries, in order.
        notes: further lines, such as those about modules whose frequencies are not those that the model's
            configuration states.
        if_empty: the sentence for a report without entries; it says where functions were looked for.
    """

    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    if_empty: str = (
        "no rotary function found: no method of the model's modules, and no function that they are seen to "
        "call, adds two products with cos and sin, or takes a complex product apart"
    )
    # Module and name of a function -> the counts of its replacement, and those at the time of the patch.
    _counts: dict[tuple[str, str], tuple[list[int], tuple[int, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    # Undoes the patch.
    _undo: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def replaced(self) -> list[Entry]:
        """The entries whose calls go to a replacement, except for those in ``original_runs``."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left(self) -> list[Entry]:
        """The entries that were left unchanged."""
        return [entry for entry in self.entries if not entry.replaced]

    def calls(self) -> dict[str, Calls]:
        """Count the eager calls of each replaced function since ``patch``, by its place.

        Functions of equal places have the whole name of their module. Models that share a function share its
        counts. Calls in compiled code are not counted.
        """
        found = {}
        for (module, name), (counts, before) in self._counts.items():
            place = _place(module, name)
            if sum(place == _place(*each) for each in self._counts) > 1:
                place = f"{module}.{name}"
            found[place] = Calls(*(now - then for now, then in zip(counts, before)))
        return found

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
        if any(entry.original_runs for entry in self.replaced):
            lines.append(_ALWAYS)
        if any(str(entry.recognised).endswith(TO_THE_BIT) for entry in self.replaced):
            lines.append(_COMPILED)
        if any(run.startswith(_EAGER) for entry in self.replaced for run in entry.original_runs):
            lines.append(_OTHER_BITS)
        if self.replaced:
            lines.append(TRIED)
        for place, calls in self.calls().items():
            if calls.operator or calls.original:
                lines.append(
                    f"calls of {place}: the operator served {calls.operator:,}, the original ran in "
                    f"{calls.original:,}"
                )
        return "\n".join(lines)
