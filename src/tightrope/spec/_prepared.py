"""A rotation at given positions, validated once: what all layers of a forward pass share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .. import positions as positions_
from .._errors import bad_value
from .._tracing import is_readable, is_tracing
from ..channels import Channels
from ..positions import Positions
from . import _lengths
from ._lengths import Said, SeqLen
from ._tables import Tables


@dataclass(frozen=True, eq=False)
class PreparedRotation:
    """A spec at given positions on a device: what :meth:`tightrope.RopeSpec.at` returns.

    Attributes:
        channels: which channels rotate.
        words: phase words, int64 ``[axes, rows|1, heads|1, pairs]``.
        turns: None, or shaped as words: whole turns per position, where some |ω| >= π.
        ids, offset, ramp: as in :class:`tightrope.positions.Positions`.
        device: where the rotated tensors must live.
        amplitude_hex: :attr:`amplitude`, in digits: a float would be a symbol to the compiler.
        rows: for how many rows there are lengths; 1 for any number.
        awaits: where words come from once it is known how many tokens there will be, on which they
            depend; None where they do not. See :meth:`for_tokens`.
        made_from: the spec, or None where there is not one alone; for comparisons.
        calls: what the operator is called with, by layout and direction, once it was.
        by_tokens: what :meth:`for_tokens` returned.
        read: the version of the ids that lengths were read from; None where none were.
        seen: the bits of these ids, where they can be looked at: numpy counts no versions.
        logs: of gates by position, which all layers share: see :mod:`tightrope.gating`.
        said: lengths that the caller said, where positions can be compared with them.
        fits: the version and bits of the ids and the number of tokens that were, under the key 0.
    """

    channels: Channels
    words: torch.Tensor
    turns: torch.Tensor | None
    ids: torch.Tensor | None
    offset: int
    ramp: bool
    device: torch.device
    amplitude_hex: str = "0x1p+0"
    rows: int = 1
    awaits: Tables | None = None
    made_from: object = None
    calls: dict[Any, tuple[Any, ...]] = field(default_factory=dict, repr=False)
    by_tokens: dict[int, PreparedRotation] = field(default_factory=dict, repr=False)
    read: int | None = None
    logs: dict[Any, tuple[torch.Tensor, int, torch.Tensor | None]] = field(
        default_factory=dict, repr=False
    )
    said: Said | None = None
    fits: dict[int, tuple[int, int, torch.Tensor | None]] = field(default_factory=dict, repr=False)
    seen: torch.Tensor | None = field(default=None, repr=False)

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
        tracing = is_tracing()
        made = None if tracing else self.by_tokens.get(tokens)
        if made is None or made.is_stale:
            made = self._of_tokens(self.awaits, tokens)
            if not tracing:
                # The next step of decoding has another number; the layers of this one share it.
                self.by_tokens.clear()
                self.by_tokens[tokens] = made
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
            tables.amplitude(lengths),
            self.rows,
            made_from=self.made_from,
            read=_version(self.ids),
            said=self.said,
            fits=self.fits,
            seen=_bits(self.ids, kept=True),
        )

    def passed(self, tokens: int) -> tuple[int | None, int, int] | None:
        """The first row that is longer than was said of it: see :func:`_lengths.passed`.

        Args:
            tokens: how many tokens each row has.
        """
        if self.said is None or is_tracing():
            return None
        version = 0 if self.said.ids is None else _version(self.said.ids)
        before = self.fits.get(0)
        if before is not None and before[:2] == (version, tokens):
            if _are_bits(self.said.ids, before[2]):
                return None
        found = _lengths.passed(self.said, self.offset, self.ramp, tokens)
        if found is None and version is not None:
            self.fits[0] = version, tokens, _bits(self.said.ids, kept=True)
        return found

    def check_passed(self, tokens: int, said: str = "seq_len") -> None:
        """Refuse rows that are longer than was said of them, whose frequencies would be another's.

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
        if (self.read is None and self.seen is None) or is_tracing():
            return False
        return _version(self.ids) != self.read or not _are_bits(self.ids, self.seen)


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
    awaits = read = seen = told = lengths = None
    own = seq_len is None
    if tables.by_length and own:
        if ids is None or where.ramp:
            awaits = tables
        else:
            read, seen = _version(ids), _bits(ids, kept=True)
            lengths = _lengths.of_ids(where, ids, tables.rule)  # type: ignore[arg-type]
    else:
        lengths = tables.read(seq_len, device)
    if not own:
        told = _lengths.said(lengths, where)
        if told is not None and told.ids is not None and ids is not where.ids:
            # What is turned by a copy on a device does not follow the original.
            told = told._replace(ids=told.ids.clone())
    words, turns = tables.words(lengths, device)
    return PreparedRotation(
        channels,
        words,
        turns,
        ids,
        where.offset,
        where.ramp,
        device,
        tables.amplitude(lengths),
        1 if lengths is None else len(lengths),
        awaits,
        made_from,
        read=read,
        said=told,
        seen=seen,
    )


_OF_WIDTH = {torch.float32: torch.int32, torch.float64: torch.int64}


def _bits(ids: torch.Tensor | None, kept: bool = False) -> torch.Tensor | None:
    """Ids as integers, NaN included; None where nothing may look at them.

    Args:
        kept: whether they are copied, to be compared with later.
    """
    if type(ids) not in (torch.Tensor, torch.nn.Parameter) or not is_readable(ids):  # type: ignore[arg-type]
        return None
    bits = ids.detach()  # type: ignore[union-attr]
    if bits.dtype in _OF_WIDTH:
        bits = bits.view(_OF_WIDTH[bits.dtype])
    return bits.clone() if kept else bits


def _are_bits(ids: torch.Tensor | None, seen: torch.Tensor | None) -> bool:
    """Whether ids are what they were when they were seen, as far as anybody can tell."""
    if seen is None:
        return True
    bits = _bits(ids)
    return bits is not None and torch.equal(bits, seen)


def _version(ids: torch.Tensor | None) -> int | None:
    """How often ids changed in place; None where nobody counts."""
    if ids is None or is_tracing() or ids.is_inference():
        return None
    return ids._version
