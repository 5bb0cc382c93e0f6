"""Phase words as tensors: kept per device and length, or made of lengths that nothing may read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import words as words_
from .._errors import bad_value, public, unsupported
from .._tracing import is_tracing, may_keep
from ..angles import words_from
from ..axes import Axes
from ..frequencies import Rule
from . import _lengths
from ._lengths import Lengths, SeqLen

# Words and turns, int64 ``[axes, rows|1, heads|1, pairs]``; turns are None where all are zero.
Table: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"

# Tables that a spec keeps, over devices and lengths. Decoding under a rule that depends on the length
# meets a new one with every token, so there is an end to what is kept.
_KEPT = 64


class Tables:
    """The words of one set of frequencies, for any length and on any device.

    Attributes:
        rule: the rule that makes them, or None.
        by_length: whether they depend on the length.
        axis_count: how many coordinates a position has.
        amplitude_hex: the attention scaling within the original length, in digits: a float would be a
            symbol to the compiler.
    """

    def __init__(self, rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None) -> None:
        self.rule = rule
        self.by_length = rule is not None and rule.by_length
        self._of = rotary_dim, base.hex(), axes
        self._said: tuple[Any, Any] = rule, axes
        if torch.compiler.is_dynamo_compiling():
            # What is made inside a compiled function is nothing yet that could be handed to a constant,
            # and torch 2.11 hands over no object at all there.
            self._said = (
                None if rule is None else (type(rule), rule._values()),
                None if axes is None else (Axes, (axes.count, axes.pairs)),
            )
        self._within = words_.made(self._said[0], rotary_dim, base, self._said[1], None)
        self.axis_count = self._within.shape[0]
        self.amplitude_hex = self._within.attention_scaling.hex()
        self._kept: dict[Any, Table] = {}
        # The regime just above the original length, and its attention scaling.
        self._first = None
        self._first_hex = self.amplitude_hex
        if rule is not None and rule.by_length:
            self._first = rule.regime(rule.original_max_position + 1)
            self._first_hex = self._made(self._first).attention_scaling.hex()
        self._beyond: _Beyond | None = None
        self._beyond_on: dict[torch.device, _Beyond] = {}
        if not is_tracing():
            self._table(torch.device("cpu"))

    def read(self, seq_len: SeqLen, device: torch.device) -> Lengths | None:
        """What a caller says of lengths, as the other functions take it; None where it is no matter.

        While compiling, a length that is a number would be a constant, and each another graph. It
        becomes a tensor, unless the attention scaling, which is a number too, hangs on it.

        Raises:
            ValueError, TypeError: what is no length, whether or not it matters.
        """
        if seq_len is None:
            return None
        if not self.by_length:
            _lengths.check(seq_len)
            return None
        if torch.compiler.is_compiling() and isinstance(seq_len, int) and self._has_one_amplitude:
            seq_len = torch.full((1,), seq_len, dtype=torch.int64, device=device)
        return _lengths.read(seq_len)

    @public("seq_len")
    def words(self, lengths: Lengths | None, device: torch.device) -> Table:
        """Words for rows of such lengths; one row where all have the same."""
        if lengths is None:
            return self._table(device)
        if isinstance(lengths, torch.Tensor):
            if lengths.is_meta and device.type != "meta":
                raise bad_value(
                    "lengths must hold numbers but are on the meta device, and what rotates is on "
                    f"{device}"
                )
            return self._unread_table(lengths.to(device), device)
        rule = self.rule
        if rule is None or not lengths:
            return self._table(device)
        if rule.ntk_by_length and len(lengths) > 1 and not is_tracing():
            if min(lengths) < max(lengths) > rule.original_max_position:
                with _outside_inference():
                    return self._made_at(lengths, device)
        regimes = [rule.regime(length) for length in lengths]
        if len(set(regimes)) == 1:
            return self._table(device, regimes[0])
        tables = {regime: self._table(device, regime) for regime in set(regimes)}
        with _outside_inference():
            return words_.joined([tables[regime] for regime in regimes])

    @public("RopeSpec")
    def amplitude(self, lengths: Lengths | None) -> str:
        """The attention scaling of rows of such lengths, in digits.

        Raises:
            NotImplementedError: rows whose factors differ, or may.
        """
        rule = self.rule
        if lengths is None or rule is None or rule.ntk_by_length:
            return self.amplitude_hex
        known = not isinstance(lengths, torch.Tensor)
        regimes = [rule.regime(length) for length in lengths] if known else [None, self._first]
        found = {self._amplitude(regime) for regime in regimes} or {self.amplitude_hex}
        if len(found) == 1:
            return found.pop()
        factors = ", ".join(str(factor) for factor in sorted(map(float.fromhex, found)))
        advice = (
            "rotate short and long rows apart"
            if known
            else "what is traced or on a device may be either, so say seq_len as an int"
        )
        raise unsupported(
            f"all rows of one call must have one attention scaling but got {factors}; {advice}"
        )

    @property
    def _has_one_amplitude(self) -> bool:
        return self._first_hex == self.amplitude_hex

    def _amplitude(self, regime: int | None) -> str:
        if regime is None:
            return self.amplitude_hex
        if regime == self._first:
            return self._first_hex
        return self._made(regime).attention_scaling.hex()

    def _made(self, regime: int | None) -> words_.Made:
        if regime is None:
            return self._within
        rotary_dim, base, _ = self._of
        rule, axes = self._said
        return words_.made(rule, rotary_dim, float.fromhex(base), axes, regime)

    def _table(self, device: torch.device, regime: int | None = None) -> Table:
        """Words and turns on a device, ``[axes, 1, heads|1, pairs]``.

        Kept per device and regime, but never while something traces or transforms: a cache must not
        hold a fake or wrapped tensor, nor may the words of a fake program be real ones.
        """
        tracing = is_tracing()
        if tracing and not torch.compiler.is_dynamo_compiling():
            return self._make_table(device, regime)
        key = device if regime is None else (device, regime)
        table = self._kept.get(key)
        if table is None:
            if tracing and regime is not None and regime == self._first:
                return self._ready(device).table
            if tracing:
                return self._make_table(device, regime)
            with _outside_inference():
                table = self._make_table(device, regime)
            if self.by_length:
                self._ready(device)  # of a spec that was made where nothing could be kept
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[key] = table
        return table

    def _make_table(self, device: torch.device, regime: int | None) -> Table:
        if regime is None or is_tracing():
            return words_.table(self._made(regime), device)
        return self._made_at((regime,), device)

    def _made_at(self, lengths: Sequence[int], device: torch.device) -> Table:
        """Words and turns of rows of known lengths, made anew; not while tracing."""
        rotary_dim, base, axes = self._of
        rule: Rule = self.rule  # type: ignore[assignment]
        words, turns = words_.of_lengths(rule, rotary_dim, float.fromhex(base), axes, lengths)
        if device.type == "cpu":
            return words, turns
        return words.to(device), None if turns is None else turns.to(device)

    def _unread_table(self, lengths: torch.Tensor, device: torch.device) -> Table:
        """Words and turns of rows whose lengths only the device knows, or nobody yet."""
        limit = self.rule.original_max_position  # type: ignore[union-attr]
        longer = (lengths > limit)[None, :, None, None]
        long_turns: torch.Tensor | None
        short, short_turns = self._table(device)
        made = self._inv_freq_beyond(lengths.clamp(min=limit))
        if made is not None:
            long, long_turns = words_from(made)
        else:
            long, long_turns = self._ready(device).table
        words = torch.where(longer, long, short)
        if short_turns is None and (long_turns is None or made is not None):
            # What a rule makes of lengths turns no faster than what it starts from.
            return words, None
        zero = torch.zeros_like(short)
        return words, torch.where(
            longer,
            zero if long_turns is None else long_turns,
            zero if short_turns is None else short_turns,
        )

    def _ready(self, device: torch.device) -> _Beyond:
        """What is ready for unknown lengths, on a device; kept as of :meth:`_table`."""
        found = self._beyond_on.get(device)
        if found is not None and (torch.compiler.is_dynamo_compiling() or not is_tracing()):
            return found
        made = self._ready_on_host()
        if device.type != "cpu":
            with _outside_inference():
                made = made.on(device)
        if may_keep(device):
            self._beyond_on[device] = made
        return made

    def _ready_on_host(self) -> _Beyond:
        """What is ready for unknown lengths; as of :meth:`_table`, a fake program has its own."""
        tracing = is_tracing()
        if self._beyond is not None and not (tracing and not torch.compiler.is_dynamo_compiling()):
            return self._beyond
        rotary_dim, base, axes = self._of
        # The compiler takes a number that it read from an object for a constant only in a sum.
        dims = {rotary_dim + 0} if axes is None else {dim for _, _, dim in axes.pairs}
        cpu = torch.device("cpu")
        with _outside_inference():
            rows = {
                dim: torch.tensor(
                    words_.inv_freq(self._said[0], dim, float.fromhex(base)),
                    dtype=torch.float64,
                    device=cpu,
                )
                for dim in dims
            }
            made = _Beyond(rows, self._make_table(cpu, self._first))
        if not tracing:
            self._beyond = made
        return made

    def _inv_freq_beyond(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """As :meth:`Rule.inv_freq_beyond`, but ``[axes, rows, 1, pairs]``."""
        rotary_dim, _, axes = self._of
        rows = {
            dim: self.rule.inv_freq_beyond(within, lengths)  # type: ignore[union-attr]
            for dim, within in self._ready(lengths.device).rows.items()
        }
        if axes is None:
            made = rows[rotary_dim]
            return None if made is None else made[None, :, None]
        columns = []
        for axis, index, dim in axes.pairs:
            made = rows[dim]
            if made is None:
                return None
            omega = made[:, index]
            zero = torch.zeros_like(omega)
            columns.append(
                torch.stack([omega if a == axis else zero for a in range(self.axis_count)])
            )
        return torch.stack(columns, -1)[:, :, None] if columns else None


def _outside_inference() -> AbstractContextManager[object]:
    """Where words are made that autograd may save, whatever mode the caller is in."""
    if is_tracing() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


class _Beyond(NamedTuple):
    """What a rule that depends on the length has ready for lengths that nobody may read.

    Attributes:
        rows: for each rotary dimension, its frequencies within the original length.
        table: words and turns just above the original length.
    """

    rows: dict[int, torch.Tensor]
    table: Table

    def on(self, device: torch.device) -> _Beyond:
        """The same on a device."""
        words, turns = self.table
        return _Beyond(
            {dim: row.to(device) for dim, row in self.rows.items()},
            (words.to(device), None if turns is None else turns.to(device)),
        )
