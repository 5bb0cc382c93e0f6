"""Phase words of one spec as tensors, for sequences of any length and on any device.

The pure functions of :mod:`tightrope.phase_words` make phase words on the host, ``_device_cache`` caches
tensors, and ``_unread`` serves lengths whose values cannot be read. This module chooses between them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from .. import phase_words
from .._errors import bad_value, public, unsupported
from .._tracing import Constant, as_constant, is_tracing, outside_modes
from ..axes import Axes
from ..frequencies import Rule
from ..phase_words import HostWords, Table
from . import _lengths
from ._device_cache import DeviceCache
from ._lengths import Lengths, SeqLen
from ._unread import UnreadLengths

_CPU = torch.device("cpu")


class Tables:
    """The phase words of one spec.

    Attributes:
        rule: its frequency rule, or None.
        by_length: whether phase words depend on the length of the sequence.
        axis_count: number of coordinates of a position.
        amplitude_hex: the attention scaling within the original length, as a hexadecimal string,
            since the compiler would turn a float into a symbol.
    """

    def __init__(self, rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None) -> None:
        self.rule = rule
        self.by_length = rule is not None and rule.by_length
        self._rotary_dim = rotary_dim
        self._base_hex = base.hex()
        self._axes = axes
        self._constants: tuple[Constant[Rule | None], Constant[Axes | None]]
        if torch.compiler.is_dynamo_compiling():
            self._constants = (
                None if rule is None else (type(rule), rule._values()),
                None if axes is None else (Axes, (axes.count, axes.pairs)),
            )
        else:
            self._constants = as_constant(rule), as_constant(axes)
        # Phase words on the host: within the original length, and of the regime just above it.
        self._within = phase_words.made(
            self._constants[0], rotary_dim, base, self._constants[1], None
        )
        self._first: int | None = None
        self._beyond = self._within
        if rule is not None and rule.by_length:
            first = rule.regime(rule.original_max_position + 1)
            self._beyond = self._on_host(first)
            self._first = first
        self.axis_count = self._within.shape[0]
        self.amplitude_hex = self._within.amplitude_hex
        self._kept = DeviceCache()
        if not is_tracing():
            self._of_regime(_CPU)

    def __reduce__(self) -> tuple[Any, ...]:
        # Phase words and device tables are derived; a copy computes its own.
        return Tables, (self.rule, self._rotary_dim, float.fromhex(self._base_hex), self._axes)

    @property
    def constants(self) -> tuple[Constant[Rule | None], Constant[Axes | None], int, float]:
        """The rule, the axes, ``rotary_dim`` and the base, for functions that Dynamo runs while compiling."""
        # With dynamic shapes, Dynamo takes int attributes for symbols.
        return *self._constants, operator.index(self._rotary_dim), float.fromhex(self._base_hex)

    def read(self, seq_len: SeqLen, device: torch.device) -> Lengths | None:
        """Normalise ``seq_len``; None if the rule ignores it.

        While compiling, an int would become a constant, and each length would compile another graph. So
        it becomes a tensor, unless the attention scaling, which must be a constant, depends on it.

        Raises:
            ValueError, TypeError: an invalid length, also where the rule ignores it.
        """
        if seq_len is None:
            return None
        if not self.by_length:
            _lengths.check(seq_len)
            return None
        has_one_amplitude = self._beyond.amplitude_hex == self.amplitude_hex
        # Export passes torch.SymInt, which Dynamo presents as int.
        if torch.compiler.is_compiling() and isinstance(seq_len, (int, torch.SymInt)):
            if has_one_amplitude:
                seq_len = torch.full((1,), seq_len, dtype=torch.int64, device=device)
        return _lengths.read(seq_len)

    def words(self, lengths: Lengths | None, device: torch.device) -> Table:
        """Return phase words and turns for rows of given lengths; one row if all rows share them."""
        if lengths is None or self.rule is None:
            return self._of_regime(device)
        return self._of_rows(self.rule, lengths, device)

    @public("seq_len")
    def _of_rows(self, rule: Rule, lengths: Lengths, device: torch.device) -> Table:
        if isinstance(lengths, torch.Tensor):
            if lengths.is_meta and device.type != "meta":
                raise bad_value(
                    "lengths must have data but are on the meta device while the rotated tensors are on "
                    f"{device}"
                )
            within, lengths = self._of_regime(device), lengths.to(device)
            return self._unread(device).table(rule, self._axes, within, lengths)
        if not lengths:
            return self._of_regime(device)
        if rule.ntk_by_length and len(lengths) > 1 and not is_tracing():
            if min(lengths) < max(lengths) > rule.original_max_position:
                with outside_modes():
                    return self._of_lengths(lengths, device)
        regimes = [rule.regime(length) for length in lengths]
        if len(set(regimes)) == 1:
            return self._of_regime(device, regimes[0])
        tables = {regime: self._of_regime(device, regime) for regime in set(regimes)}
        with outside_modes():
            return phase_words.joined([tables[regime] for regime in regimes])

    @public("RopeSpec")
    def amplitude(self, lengths: Lengths | None) -> str:
        """Return the attention scaling for rows of given lengths, as a hexadecimal string.

        Raises:
            NotImplementedError: rows whose factors differ, or may differ.
        """
        rule = self.rule
        if lengths is None or rule is None or rule.ntk_by_length:
            return self.amplitude_hex
        known = not isinstance(lengths, torch.Tensor)
        regimes = [rule.regime(length) for length in lengths] if known else [None, self._first]
        found = {self._on_host(regime).amplitude_hex for regime in regimes} or {self.amplitude_hex}
        if len(found) == 1:
            return found.pop()
        factors = ", ".join(str(factor) for factor in sorted(map(float.fromhex, found)))
        advice = (
            "rotate short and long rows separately"
            if known
            else "a length that is traced or on a device may have either, so give seq_len as an int"
        )
        raise unsupported(
            f"all rows of one call must have one attention scaling but got {factors}; {advice}"
        )

    def _on_host(self, regime: int | None) -> HostWords:
        """Return phase words and attention scaling of a regime, as plain ints and a string."""
        if regime is None:
            return self._within
        if regime == self._first:
            return self._beyond
        rule, axes, rotary_dim, base = self.constants
        return phase_words.made(rule, rotary_dim, base, axes, regime)

    def _of_regime(self, device: torch.device, regime: int | None = None) -> Table:
        """Return phase words and whole turns for lengths of one regime, ``[axes, 1, heads|1, pairs]``.

        Args:
            regime: see :meth:`tightrope.frequencies.Rule.regime`.
        """
        if regime is not None and regime == self._first:
            return self._unread(device).beyond
        return self._kept.get(device, regime, self._make_table)

    def _make_table(self, device: torch.device, regime: int | None) -> Table:
        if is_tracing():
            return phase_words.table(self._on_host(regime), device)
        if self.by_length:
            self._unread(device)  # now: a CUDA graph captured later could not copy it
        if regime is None:
            return phase_words.table(self._within, device)
        return self._of_lengths((regime,), device)

    def _of_lengths(self, lengths: Sequence[int], device: torch.device) -> Table:
        """Compute phase words and turns for rows of known lengths; not while tracing."""
        rule: Rule = self.rule  # type: ignore[assignment]
        base = float.fromhex(self._base_hex)
        made = phase_words.of_lengths(rule, self._rotary_dim, base, self._axes, lengths)
        return phase_words.moved(made, device)

    def _unread(self, device: torch.device) -> UnreadLengths:
        return self._kept.get(device, "unread", self._make_unread)

    def _make_unread(self, device: torch.device, _: str) -> UnreadLengths:
        if device.type != "cpu":
            return self._unread(_CPU).on(device)
        rule, _axes, rotary_dim, base = self.constants
        dims = {rotary_dim}
        if self._axes is not None:
            dims = {dim for _, _, dim in self._axes.pairs}
        rows = {
            dim: torch.tensor(
                phase_words.inv_freq(rule, dim, base), dtype=torch.float64, device=_CPU
            )
            for dim in dims
        }
        return UnreadLengths(phase_words.table(self._beyond, _CPU), rows)
