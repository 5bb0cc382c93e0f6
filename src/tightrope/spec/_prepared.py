"""A rotation at given positions, validated once: what all layers of a forward pass share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import positions as positions_
from .._errors import bad_value
from .._tracing import is_readable, is_tracing
from ..channels import Channels
from ..positions import Positions
from . import _lengths
from ._lengths import Limit, SeqLen
from ._tables import Tables


class Snapshot(NamedTuple):
    """Ids as they were when something was read from them.

    Attributes:
        version: how often they had changed in place; None where nothing counts that.
        bits: their bits, where they can be looked at: numpy changes them without counting. Else None.
    """

    version: int | None
    bits: torch.Tensor | None

    @classmethod
    def of(cls, ids: torch.Tensor | None) -> Snapshot:
        """The ids as they are now."""
        bits = _bits(ids)
        return cls(_version(ids), None if bits is None else bits.clone())

    def is_of(self, ids: torch.Tensor | None) -> bool:
        """Whether the ids are still the same, as far as can be told."""
        if self.bits is None:
            return _version(ids) == self.version
        # A copy of a rotation has ids with versions of their own.
        bits = _bits(ids)
        return bits is not None and torch.equal(bits, self.bits)


@dataclass(eq=False)
class Memo:
    """Cached facts about one prepared rotation, found by its calls; never a result.

    Attributes:
        packed: the arguments of the operator, by layout and direction.
        for_tokens: the number of tokens of the last call and the rotation for it, where phase words
            depend on that number.
        gate_logs: the logarithms of gates that have no tensors of their own, by gate and dtype, with
            the tokens and ids that they were made for.
        fitted: the number of tokens and the ids of the last check of lengths that found nothing.
    """

    packed: dict[tuple[str, bool], Any] = field(default_factory=dict)
    for_tokens: tuple[int, PreparedRotation] | None = None
    gate_logs: dict[Any, tuple[torch.Tensor, int, torch.Tensor | None]] = field(
        default_factory=dict
    )
    fitted: tuple[int, Snapshot] | None = None


@dataclass(frozen=True, eq=False)
class PreparedRotation:
    """A spec at given positions on a device: what :meth:`tightrope.RopeSpec.at` returns.

    An immutable value, and a memo of what its calls have found out.

    Attributes:
        channels: which channels rotate.
        words: phase words, int64 ``[axes, rows|1, heads|1, pairs]``.
        turns: None, or shaped as words: whole turns per position, where some |ω| >= π.
        ids, offset, ramp: as in :class:`tightrope.positions.Positions`.
        device: where the rotated tensors must live.
        memo: see :class:`Memo`.
        amplitude_hex: :attr:`amplitude`, in digits: a float would be a symbol to the compiler.
        rows: for how many rows there are lengths; 1 for any number.
        awaits: where words come from once it is known how many tokens there will be, on which they
            depend; None where they do not. See :meth:`for_tokens`.
        made_from: the spec, or None where there is not one alone; for comparisons.
        snapshot: the ids from which the lengths of rows were read; None where none were.
        limit: lengths that the caller stated, where positions can be compared with them.
    """

    channels: Channels
    words: torch.Tensor = field(repr=False)
    turns: torch.Tensor | None = field(repr=False)
    ids: torch.Tensor | None
    offset: int
    ramp: bool
    device: torch.device
    memo: Memo = field(repr=False)  # no default: torch's Dynamo cannot trace a factory
    amplitude_hex: str = "0x1p+0"
    rows: int = 1
    awaits: Tables | None = field(default=None, repr=False)
    made_from: object = None
    snapshot: Snapshot | None = field(default=None, repr=False)
    limit: Limit | None = None

    def __post_init__(self) -> None:
        # dataclasses.replace would hand on what was found out about another value.
        if self.memo.packed or self.memo.for_tokens is not None or self.memo.gate_logs:
            object.__setattr__(self, "memo", Memo())

    @property
    def amplitude(self) -> float:
        """The factor on the rotated channels."""
        return float.fromhex(self.amplitude_hex)

    def for_tokens(self, tokens: int) -> PreparedRotation:
        """The rotation of rows of that many tokens: itself, unless the words depend on their number.

        Args:
            tokens: how many tokens each row has.
        """
        if self.awaits is None:
            return self
        tracing, before = is_tracing(), self.memo.for_tokens
        if not tracing and before is not None and before[0] == tokens and not before[1].is_stale:
            return before[1]
        made = self._of_tokens(self.awaits, tokens)
        if not tracing:
            # The next step of decoding has another number; the layers of this one share it.
            self.memo.for_tokens = tokens, made
        return made

    def _of_tokens(self, tables: Tables, tokens: int) -> PreparedRotation:
        if self.ids is None:
            lengths = tables.read(max(0, self.offset + tokens), self.device)
        else:
            lengths = _lengths.ends(self.ids, self.offset + tokens)
        words, turns = tables.words(lengths, self.device)
        # Not dataclasses.replace, which takes as long as the words of a new length.
        return PreparedRotation(
            self.channels,
            words,
            turns,
            self.ids,
            self.offset,
            self.ramp,
            self.device,
            Memo(),
            tables.amplitude(lengths),
            self.rows,
            made_from=self.made_from,
            snapshot=None if self.ids is None else Snapshot.of(self.ids),
        )

    def passed(self, tokens: int) -> tuple[int | None, int, int] | None:
        """The first row that is longer than the caller stated: see :func:`_lengths.passed`.

        Args:
            tokens: how many tokens each row has.
        """
        if self.limit is None or is_tracing():
            return None
        before = self.memo.fitted
        if before is not None and before[0] == tokens and before[1].is_of(self.limit.ids):
            return None
        found = _lengths.passed(self.limit, self.offset, self.ramp, tokens)
        seen = Snapshot.of(self.limit.ids)
        if found is None and (self.limit.ids is None or seen.version is not None):
            self.memo.fitted = tokens, seen
        return found

    def check_passed(self, tokens: int, said: str = "seq_len") -> None:
        """Refuse rows that are longer than stated: they would get the frequencies of a shorter length.

        Args:
            tokens: how many tokens each row has.
            said: what the user calls the lengths.
        """
        found = self.passed(tokens)
        if found is None:
            return
        row, end, told = found
        of = "" if row is None else f" of row {row}"
        about = {} if self.ids is None else {"positions": self.ids}
        raise bad_value(
            f"{said} must be at least {end}, the last position + 1{of}, but got {told}; say the "
            "length of the whole sequence",
            **about,
        )

    @property
    def is_stale(self) -> bool:
        """Whether ids changed in place after words were made of their lengths."""
        if self.snapshot is None or is_tracing():
            return False
        return not self.snapshot.is_of(self.ids)


def prepare(
    channels: Channels,
    tables: Tables,
    where: Positions,
    device: torch.device,
    seq_len: SeqLen,
    made_from: object,
) -> PreparedRotation:
    """Check positions against what they turn, and find the words of their lengths.

    Args:
        channels, tables: of a spec.
        where: canonical positions.
        device: where the rotated tensors live.
        seq_len: as of :meth:`tightrope.RopeSpec.at`.
        made_from: the spec itself.
    """
    positions_.check_axes(where, tables.axis_count)
    ids = where.ids
    if ids is not None and ids.device != device:
        if ids.device.type == "meta":
            raise bad_value(
                f"positions must hold numbers but are on the meta device, and what rotates is on "
                f"{device}; say device={str(device)!r} where they are made",
                positions=ids,
            )
        if device.type == "meta" and ids.requires_grad:
            raise bad_value(
                "positions must be on the meta device, where what rotates is and no gradient comes "
                "back from",
                positions=ids,
            )
        ids = ids.to(device)
    awaits = snapshot = limit = lengths = None
    own = seq_len is None
    if tables.by_length and own:
        if ids is None or where.ramp:
            awaits = tables
        else:
            snapshot = Snapshot.of(ids)
            lengths = _lengths.of_ids(where, ids, tables.rule)  # type: ignore[arg-type]
    else:
        lengths = tables.read(seq_len, device)
    if not own:
        limit = _lengths.limit(lengths, where)
        if limit is not None and limit.ids is not None and ids is not where.ids:
            # What is turned by a copy on a device does not follow the original.
            limit = limit._replace(ids=limit.ids.clone())
    words, turns = tables.words(lengths, device)
    amplitude_hex = tables.amplitude_hex if lengths is None else tables.amplitude(lengths)
    return PreparedRotation(
        channels,
        words,
        turns,
        ids,
        where.offset,
        where.ramp,
        device,
        Memo(),
        amplitude_hex,
        1 if lengths is None else len(lengths),
        awaits,
        made_from,
        snapshot=snapshot,
        limit=limit,
    )


_OF_WIDTH = {torch.float32: torch.int32, torch.float64: torch.int64}


def _bits(ids: torch.Tensor | None) -> torch.Tensor | None:
    """Ids as integers, NaN included; None where nothing may look at them."""
    if type(ids) not in (torch.Tensor, torch.nn.Parameter) or not is_readable(ids):  # type: ignore[arg-type]
        return None
    bits = ids.detach()  # type: ignore[union-attr]
    return bits.view(_OF_WIDTH[bits.dtype]) if bits.dtype in _OF_WIDTH else bits


def _version(ids: torch.Tensor | None) -> int | None:
    """How often ids changed in place; None where nothing counts that."""
    if ids is None or is_tracing() or ids.is_inference():
        return None
    return ids._version
