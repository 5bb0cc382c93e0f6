"""Phase words for rows whose lengths cannot be read, because they are on a GPU or traced."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..angles import words_from
from ..axes import Axes
from ..frequencies import Rule
from ..phase_words import Table, moved


class UnreadLengths(NamedTuple):
    """Tensors on one device from which phase words for unreadable lengths are computed.

    Attributes:
        beyond: phase words and turns just above the original length.
        inv_freq: ``rotary_dim`` -> the frequencies up to the original length, float64 ``[pairs]``.
            Axes may have different values of ``rotary_dim``.
    """

    beyond: Table
    inv_freq: dict[int, torch.Tensor]

    def on(self, device: torch.device) -> UnreadLengths:
        """Copy everything to a device."""
        rows = {dim: row.to(device) for dim, row in self.inv_freq.items()}
        return UnreadLengths(moved(self.beyond, device), rows)

    def table(self, rule: Rule, axes: Axes | None, within: Table, lengths: torch.Tensor) -> Table:
        """Return phase words and whole turns for row lengths, ``[axes, rows, heads|1, pairs]``.

        Args:
            rule, axes: see :class:`tightrope.RopeSpec`.
            within: phase words and turns up to the original length.
            lengths: whole numbers as float64 ``[rows]``, on the device of these tensors.
        """
        limit = rule.original_max_position
        longer = (lengths > limit)[None, :, None, None]
        short, short_turns = within
        omega = self._frequencies(rule, axes, lengths.clamp(min=limit))
        long, long_turns = self.beyond if omega is None else words_from(omega)
        words = torch.where(longer, long, short)
        if short_turns is None and (long_turns is None or omega is not None):
            # Frequencies computed from lengths never exceed those within the original length, and
            # here the latter have no whole turns.
            return words, None
        zero = torch.zeros_like(short)
        return words, torch.where(
            longer,
            zero if long_turns is None else long_turns,
            zero if short_turns is None else short_turns,
        )

    def _frequencies(
        self, rule: Rule, axes: Axes | None, lengths: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the frequencies of :meth:`Rule.inv_freq_beyond` as ``[axes, rows, 1, pairs]``, or None."""
        rows = {dim: rule.inv_freq_beyond(row, lengths) for dim, row in self.inv_freq.items()}
        if axes is None:
            (made,) = rows.values()
            return None if made is None else made[None, :, None]
        columns = []
        for owner, index, dim in axes.pairs:
            made = rows[dim]
            if made is None:
                return None
            omega = made[:, index]
            zero = torch.zeros_like(omega)
            columns.append(
                torch.stack([omega if axis == owner else zero for axis in range(axes.count)])
            )
        return torch.stack(columns, -1)[:, :, None] if columns else None
