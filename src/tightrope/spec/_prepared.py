"""Prepared rotation: a spec at given positions, validated once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import positions as positions_
from .._errors import bad_type, bad_value, is_dtensor, public
from .._parts import Span, Take
from .._tracing import is_readable, is_tracing, may_keep, outside_modes
from ..channels import Channels
from ..positions import Positions
from ..stacks import Row, Stack
from . import _lengths
from ._lengths import Lengths, Limit, SeqLen
from ._tables import Tables


class Snapshot(NamedTuple):
    """The values that ids or lengths had when something was computed from them, to notice changes.

    Attributes:
        bits: a copy of their bits; None without ids.
    """

    bits: torch.Tensor | None

    @classmethod
    def of(cls, ids: torch.Tensor | None) -> Snapshot | None:
        """Record the values as they are now; None if changes could not be noticed.

        On a device a comparison would synchronise, and version counters miss what numpy and CUDA graphs
        write.
        """
        if ids is None:
            return cls(None)
        with outside_modes():
            bits = _bits(ids)
            return None if bits is None else cls(bits.clone())

    def is_of(self, ids: torch.Tensor | None) -> bool:
        """Return True if the values have not changed."""
        if ids is None:
            return True
        with outside_modes():
            bits = _bits(ids)
            return bits is not None and self.bits is not None and torch.equal(bits, self.bits)


# Parts that one rotation keeps: q and k may have different heads, and a rotation that lives long sees
# several numbers of tokens.
_MOST_PARTS = 16


@dataclass(eq=False)
class Memo:
    """Facts about one prepared rotation, cached by its calls. Rotated tensors are never cached.

    All tensors in it are made in :func:`tightrope._tracing.outside_modes`, none while tracing or capturing
    a CUDA graph, and none from values that may change unnoticed. Deep copies and pickles of a rotation
    start with an empty memo.

    Attributes:
        packed: the arguments of the operator, by layout, direction and rounding.
        for_tokens: the number of tokens of the last call, its ids and the rotation for it, if phase
            words depend on that number.
        gate_logs: the logarithms of gates without tensors, by gate and dtype, with the number of
            tokens and the ids that they were made for.
        fitted: the number of tokens and the ids of the last successful length check.
        tables: cosines and sines of a stack, by number of tokens and dtype of the rotated tensors, for
            the ids of the rotation's snapshot.
        row: the frequencies of a stack, for tables that are made in every call.
        parts: the rotations of parts of the rows, heads and tokens; see :meth:`PreparedRotation.cut`.
    """

    packed: dict[tuple[str, bool, Any], Any] = field(default_factory=dict)
    for_tokens: tuple[int, Snapshot, PreparedRotation] | None = None
    gate_logs: dict[Any, tuple[torch.Tensor, int, Snapshot]] = field(default_factory=dict)
    fitted: tuple[int, Snapshot] | None = None
    tables: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    row: Row | None = None
    parts: dict[tuple[Span, Span, Span], PreparedRotation] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


@dataclass(frozen=True, eq=False)
class PreparedRotation:
    """A spec at given positions on a device, as returned by :meth:`tightrope.RopeSpec.at`.

    An immutable value, with a cache for its calls.

    Attributes:
        channels: the slice that rotates, and its pairing.
        words: phase words, int64 ``[axes, rows|1, heads|1, pairs]``.
        turns: None, or shaped like ``words``: whole turns per position, if some |ω| >= π.
        ids, offset, add_index: see :class:`tightrope.positions.Positions`.
        device: the device that rotated tensors must be on.
        memo: see :class:`Memo`.
        amplitude_hex: :attr:`amplitude` as a hexadecimal string, since the compiler would turn a
            float into a symbol.
        rows: number of rows that have lengths of their own; 1 if all rows share one length.
        awaits: the source of phase words if they depend on the number of tokens, which is not known
            yet, or on values that cannot be read, which may change before the call; else None. See
            :meth:`for_tokens`.
        lengths: the tensor of lengths that the caller gave, if it cannot be read and the frequencies
            depend on it.
        made_from: the spec, or None if there is not exactly one; for comparisons and for
            :attr:`stack`.
        snapshot: the state of the ids when they were prepared, if row lengths or the tables of a
            stack depend on their values and they can be read; else None.
        limit: the lengths that the caller stated, if positions can be compared with them.
        stack: the library whose arithmetic makes the tables of this rotation, which it uses instead of
            ``words``; None for exact angles.
        stack_length: the ``seq_len`` that the caller gave for the stack.
        part: see :class:`tightrope.positions.Positions`.
    """

    channels: Channels
    words: torch.Tensor = field(repr=False)
    turns: torch.Tensor | None = field(repr=False)
    ids: torch.Tensor | None
    offset: int
    add_index: bool
    device: torch.device
    memo: Memo = field(repr=False)  # no default: torch's Dynamo cannot trace a factory
    amplitude_hex: str = "0x1p+0"
    rows: int = 1
    awaits: Tables | None = field(default=None, repr=False)
    made_from: object = None
    snapshot: Snapshot | None = field(default=None, repr=False)
    limit: Limit | None = None
    stack: Stack | None = None
    stack_length: int | None = None
    part: tuple[int, int, int] | None = None
    lengths: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.ids is not None and self.ids.dtype not in positions_.DTYPES:
            _refuse_dtype(self.ids)
        # dataclasses.replace would pass on the cache of another value.
        memo = self.memo
        used = memo.packed or memo.for_tokens or memo.gate_logs or memo.fitted or memo.tables
        if used or memo.row or memo.parts:
            object.__setattr__(self, "memo", Memo())

    @property
    def amplitude(self) -> float:
        """The factor on the rotated channels."""
        return float.fromhex(self.amplitude_hex)

    def for_tokens(self, tokens: int) -> PreparedRotation:
        """Return the rotation for rows with this number of tokens: self, unless :attr:`awaits` is set.

        Args:
            tokens: number of tokens per row.
        """
        if self.awaits is None:
            return self
        source = self.ids if self.lengths is None else self.lengths
        before = None if is_tracing() else self.memo.for_tokens
        if before is not None and before[0] == tokens and before[1].is_of(source):
            return before[2]
        seen = Snapshot.of(source)
        if seen is None:
            return self._of_tokens(self.awaits, tokens)
        with outside_modes():
            made = self._of_tokens(self.awaits, tokens)
        if may_keep(self.device):
            # Keep only the last one: all layers of a decoding step share it, and the next step has
            # another length.
            self.memo.for_tokens = tokens, seen, made
        return made

    def _of_tokens(self, tables: Tables, tokens: int) -> PreparedRotation:
        lengths: Lengths | None = None
        if self.lengths is not None:
            lengths = tables.read(self.lengths, self.device)
        elif self.ids is None:
            lengths = tables.read(max(0, self.offset + tokens), self.device)
        elif self.ids.shape[2]:
            lengths = _lengths.ends(self.ids, self.offset + (tokens if self.add_index else 1))
        words, turns = tables.words(lengths, self.device)
        # Not dataclasses.replace, which takes as long as computing the phase words of a new length.
        return PreparedRotation(
            self.channels,
            words,
            turns,
            self.ids,
            self.offset,
            self.add_index,
            self.device,
            Memo(),
            tables.amplitude(lengths),
            self.rows,
            made_from=self.made_from,
        )

    def cut(self, rows: Span, heads: Span, tokens: Span, take: Take) -> PreparedRotation:
        """Return the rotation for a part of the rows, heads and tokens.

        Args:
            rows, heads, tokens: the part, of tensors that this rotation fits (see
                :func:`tightrope.ops.checks.prepare`).
            take: see :data:`tightrope._parts.Take`.
        """
        if not may_keep(self.device) or not self._has_lasting_parts:
            return self._cut(rows, tokens, take)
        key = rows, heads, tokens
        kept = self.memo.parts.get(key)  # another thread may clear them
        if kept is None:
            with outside_modes():
                kept = self._cut(rows, tokens, take)
            if len(self.memo.parts) >= _MOST_PARTS:
                self.memo.parts.clear()
            self.memo.parts[key] = kept
        return kept

    @property
    def _has_lasting_parts(self) -> bool:
        """True if nothing in a part depends on values of ids that may change undetected."""
        ids = self.ids
        if ids is None:
            return True
        return not ids.requires_grad and (self.stack is None or is_readable(ids))

    def _cut(self, rows: Span, tokens: Span, take: Take) -> PreparedRotation:
        ids, length = self.ids, self.stack_length
        by_length: bool = getattr(self.made_from, "by_length", False)
        if self.stack is not None and length is None and by_length:
            length = self._longest(tokens.whole)
        whole = self.part is None and not self.add_index
        if ids is not None:
            ids = take("positions", ids, (None, "row", "token" if whole else None))
        axes = (None, "row", "head", None)
        return PreparedRotation(
            self.channels,
            take("spec", self.words, axes),
            None if self.turns is None else take("spec", self.turns, axes),
            ids,
            self.offset + (tokens.start if self.add_index and self.part is None else 0),
            self.add_index,
            self.device,
            Memo(),
            self.amplitude_hex,
            self.rows if self.rows == 1 else rows.size,
            made_from=self.made_from,
            snapshot=None if self.stack is None or ids is None else Snapshot.of(ids),
            stack=self.stack,
            stack_length=length,
        )

    def _longest(self, tokens: int) -> int | None:
        """Return the largest position plus 1; None without tokens, or if the ids are not whole."""
        if self.ids is None:
            return max(0, self.offset + tokens)
        if self.ids.numel() == 0 or is_dtensor(self.ids):
            return None
        ends = _lengths.ends(self.ids, self.offset + (tokens if self.add_index else 1))
        return max(ends) if isinstance(ends, tuple) else int(ends.max())

    def tables(self, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of :attr:`stack`, ``(rows|1, 1, tokens, pairs)``.

        If ids changed in place after the rotation was prepared, prepare it again first.

        Args:
            tokens: number of tokens per row.
            dtype: the dtype of the rotated tensors.
        """
        if self.ids is not None and self.snapshot is None:
            return self._tables_by(self._row(), tokens, dtype)
        memo = self.memo
        kept = None if is_tracing() else memo.tables.get((tokens, dtype))
        if kept is not None:
            return kept
        with outside_modes():
            made = self._tables_by(None, tokens, dtype)
        if may_keep(self.device):
            # Tables of the last number of tokens only: decoding makes one pair of tables per token.
            memo.tables = {key: value for key, value in memo.tables.items() if key[0] == tokens}
            memo.tables[tokens, dtype] = made
        return made

    def _tables_by(
        self, row: Row | None, tokens: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        where = Positions(self.ids, self.offset, self.add_index)
        return self.stack.tables_at(  # type: ignore[union-attr]
            self.made_from,  # type: ignore[arg-type]
            where,
            tokens,
            self.stack_length,
            dtype,
            self.device,
            row,
        )

    def _row(self) -> Row | None:
        """Return the frequencies of the stack on the device; None while tracing."""
        if is_tracing():
            return None
        row = self.memo.row
        if row is None:
            with outside_modes():
                row = self.stack.row(  # type: ignore[union-attr]
                    self.made_from,  # type: ignore[arg-type]
                    self.stack_length,
                    self.device,
                )
            if may_keep(self.device):
                self.memo.row = row
        return row

    def passed(self, tokens: int) -> tuple[int | None, int, int] | None:
        """Find the first row that is longer than the caller stated: see :func:`_lengths.passed`.

        Args:
            tokens: number of tokens per row.
        """
        if self.limit is None or is_tracing():
            return None
        before = self.memo.fitted
        if before is not None and before[0] == tokens and before[1].is_of(self.limit.ids):
            return None
        seen = Snapshot.of(self.limit.ids)
        with outside_modes():
            found = _lengths.passed(self.limit, self.offset, self.add_index, tokens)
        if found is None and seen is not None:
            self.memo.fitted = tokens, seen
        return found

    def check_passed(self, tokens: int, name: str = "seq_len") -> None:
        """Raise an error for a row longer than stated: it would get the frequencies of a shorter one.

        Args:
            tokens: number of tokens per row.
            name: name of the lengths in the error.
        """
        found = self.passed(tokens)
        if found is None:
            return
        row, end, stated = found
        of_row = "" if row is None else f" of row {row}"
        about = {} if self.ids is None else {"positions": self.ids}
        raise bad_value(
            f"{name} must be at least {end}, the largest position{of_row} plus 1, but got {stated}; "
            "give the length of the whole sequence",
            **about,
        )

    @property
    def is_stale(self) -> bool:
        """True if ids changed in place after :attr:`snapshot` was taken."""
        if self.snapshot is None or is_tracing():
            return False
        return not self.snapshot.is_of(self.ids)


@public("PreparedRotation")
def _refuse_dtype(ids: torch.Tensor) -> None:
    # FSDP2 casts floating tensors in dataclasses that are inputs of a module.
    raise bad_type(
        "ids must be int32, int64, float32 or float64; a wrapper of the model, such as one for mixed "
        "precision, may have cast them",
        ids=ids,
    )


def prepare(
    channels: Channels,
    tables: Tables,
    where: Positions,
    device: torch.device,
    seq_len: SeqLen,
    made_from: object,
) -> PreparedRotation:
    """Validate positions for a spec, and look up the phase words for their lengths.

    Args:
        channels, tables: channels and phase words of the spec.
        where: canonical positions.
        device: device of the rotated tensors.
        seq_len: see :meth:`tightrope.RopeSpec.at`.
        made_from: the spec itself.
    """
    ids = _ids_on(where, tables, device)
    awaits = snapshot = limit = lengths = unread = None
    own = seq_len is None
    if tables.by_length and own:
        _check_whole(where)
        if ids is None or where.add_index:
            awaits = tables
        else:
            snapshot = Snapshot.of(ids)
            if snapshot is not None or is_tracing():
                lengths = _lengths.of_ids(where, ids, tables.rule)  # type: ignore[arg-type]
            else:
                _lengths.check_packed(where, ids, tables.rule)  # type: ignore[arg-type]
                tables.amplitude(ids)
                awaits = tables
    else:
        lengths = tables.read(seq_len, device)
        if isinstance(lengths, torch.Tensor) and not is_tracing():
            tables.amplitude(lengths)
            awaits, unread, lengths = tables, seq_len, None
    if not own:
        limit = _lengths.limit(lengths, where)
        if limit is not None and limit.ids is not None and ids is not where.ids:
            # The rotation uses a copy of the ids on the device, so later changes of the original do not
            # count.
            limit = limit._replace(ids=limit.ids.clone())
    words, turns = tables.words(lengths, device)
    amplitude_hex = tables.amplitude_hex if lengths is None else tables.amplitude(lengths)
    return PreparedRotation(
        channels,
        words,
        turns,
        ids,
        where.offset,
        where.add_index,
        device,
        Memo(),
        amplitude_hex,
        1 if lengths is None else len(lengths),
        awaits,
        made_from,
        snapshot=snapshot,
        limit=limit,
        part=where.part,
        lengths=unread,  # type: ignore[arg-type]
    )


def _check_whole(where: Positions) -> None:
    """Refuse positions that do not tell the length of the whole sequence."""
    if where.part is not None or is_dtensor(where.ids):
        raise bad_value(
            "seq_len must be given with the positions of one rank's tokens, as the frequencies depend on "
            "the length of the whole sequence",
            **({} if where.ids is None else {"positions": where.ids}),
        )


def _ids_on(where: Positions, tables: Tables, device: torch.device) -> torch.Tensor | None:
    """Check the coordinates of positions and return their ids on the device of the rotated tensors."""
    positions_.check_axes(where, tables.axis_count)
    ids = where.ids
    if ids is None or ids.device == device:
        return ids
    if ids.device.type == "meta":
        raise bad_value(
            "positions must have data but are on the meta device while the rotated tensors are on "
            f"{device}; create them with device={str(device)!r}",
            positions=ids,
        )
    if device.type == "meta" and ids.requires_grad:
        raise bad_value(
            "positions that require a gradient must be on the meta device when the rotated tensors "
            "are, as no gradient can leave it",
            positions=ids,
        )
    with outside_modes():  # so that autograd can save the copy
        return ids.to(device)


def prepare_for_stack(
    channels: Channels,
    tables: Tables,
    where: Positions,
    device: torch.device,
    seq_len: int | None,
    made_from: object,
    stack: Stack,
) -> PreparedRotation:
    """Validate positions for a spec; the rotation makes its tables by the arithmetic of a stack.

    Args:
        channels, tables, where, device, made_from: see :func:`prepare`.
        seq_len: length of the sequence, for rules that depend on it.
        stack: the stack whose bits the rotation must equal.
    """
    ids = _ids_on(where, tables, device)
    if ids is not None and ids.requires_grad:
        raise bad_value("positions must not require a gradient with a stack", positions=ids)
    snapshot = None if ids is None else Snapshot.of(ids)
    if seq_len is None and tables.by_length:
        _check_whole(where)
        if ids is not None and snapshot is None and not is_tracing():
            raise bad_value(
                "seq_len must be given with positions on a device, as the frequencies of this stack depend "
                "on the largest position",
                positions=ids,
            )
    words, turns = tables.words(None, device)
    limit = None if seq_len is None else _lengths.limit((seq_len,), where)
    return PreparedRotation(
        channels,
        words,
        turns,
        ids,
        where.offset,
        where.add_index,
        device,
        Memo(),
        made_from=made_from,
        snapshot=snapshot,
        limit=limit,
        stack=stack,
        stack_length=seq_len,
        part=where.part,
    )


_OF_WIDTH = {torch.float32: torch.int32, torch.float64: torch.int64}


def _bits(ids: torch.Tensor | None) -> torch.Tensor | None:
    """View ids as integers, so that NaN equals NaN; None if they cannot be read."""
    if is_dtensor(ids):
        ids = ids._local_tensor  # type: ignore[union-attr]
    if ids is None or not is_readable(ids):
        return None
    bits = ids.detach()
    return bits.view(_OF_WIDTH[bits.dtype]) if bits.dtype in _OF_WIDTH else bits
