"""Phase words from the fields of a spec, computed on the host by pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

from . import frequencies
from ._tracing import Constant, value_of
from .angles import words_of
from .axes import Axes
from .frequencies import Frequencies, Rule

T = TypeVar("T")


class PhaseWords(NamedTuple):
    """Phase words as tensors.

    Attributes:
        words: int64 ``[axes, rows|1, heads|1, pairs]``, with zeros for the axes that a pair does not belong to.
        turns: whole turns per position, in the shape of ``words``; None if all are zero.
    """

    words: torch.Tensor
    turns: torch.Tensor | None


class HostWords(NamedTuple):
    """Phase words of a rule for one regime of lengths, as plain ints.

    A regime is a result of :meth:`tightrope.frequencies.Rule.regime`.

    Attributes:
        words, turns: see :class:`tightrope.angles.Words`; flattened from ``shape``.
        shape: ``(axes, heads, pairs)``.
        amplitude_hex: the attention scaling, as a hexadecimal string.
    """

    words: tuple[int, ...]
    turns: tuple[int, ...]
    shape: tuple[int, int, int]
    amplitude_hex: str


def host_words(
    rule: Constant[Rule | None],
    axes: Constant[Axes | None],
    rotary_dim: int,
    base: float,
    regime: int | None,
) -> HostWords:
    """Return phase words and turns of a rule for one regime of lengths. A pure function.

    Args:
        rule, axes, rotary_dim, base: see :class:`tightrope.RopeSpec`.
        regime: see :meth:`tightrope.frequencies.Rule.regime`.
    """
    return _cached(value_of(rule), value_of(axes), rotary_dim, base, regime)


# A spec may be made inside a compiled function; its phase words are constants there, since Dynamo
# cannot trace decimals. torch.compiler.assume_constant_result sets the same attribute, but imports Dynamo.
host_words._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=512)
def _cached(
    rule: Rule | None, axes: Axes | None, rotary_dim: int, base: float, regime: int | None
) -> HostWords:
    result = assigned(rule, axes, rotary_dim, base, regime)
    flat = words_of(result)
    amplitude_hex = result.attention_scaling.hex()
    count, heads, pairs = (1, 1, *(result.shape or (len(result.exact),)))[-3:]
    shape = count if axes is None else axes.count, heads, pairs
    words, turns = by_axis(axes, flat.words), by_axis(axes, flat.turns)
    return HostWords(words, turns, shape, amplitude_hex)


def by_axis(axes: Axes | None, values: Sequence[T]) -> tuple[T | int, ...]:
    """Return the values of all pairs for each axis, with zeros for the axes that a pair does not belong to."""
    if axes is None:
        return tuple(values)
    owners = [owner for owner, _, _ in axes.pairs]
    return tuple(
        value if axis == owners[index % len(owners)] else 0
        for axis in range(axes.count)
        for index, value in enumerate(values)
    )


@lru_cache(maxsize=512)
def assigned(
    rule: Rule | None, axes: Axes | None, rotary_dim: int, base: float, regime: int | None
) -> Frequencies:
    """Return the frequencies of a rule, one per pair, as assigned by the axes."""

    def row(dim: int) -> Frequencies:
        if rule is None:
            return frequencies.default(dim, base)
        return rule.frequencies(dim, base, regime)

    if axes is None:
        return row(rotary_dim)
    rows = {dim: row(dim) for dim in {dim for _, _, dim in axes.pairs} or {rotary_dim}}
    whole = next(iter(rows.values()))
    heads = 1 if whole.shape is None else whole.shape[-2]
    exact = tuple(
        rows[dim].exact[head * (dim // 2) + index]
        for head in range(heads)
        for _, index, dim in axes.pairs
    )
    shape = None if whole.shape is None else (heads, len(axes.pairs))
    return Frequencies(exact, whole.attention_scaling, shape)


def as_tensors(host: HostWords, device: torch.device) -> PhaseWords:
    """Convert phase words and turns to tensors with one row."""
    axes, heads, pairs = host.shape
    words = torch.tensor(host.words, dtype=torch.int64, device=device)
    words = words.reshape(axes, 1, heads, pairs)
    if not any(host.turns):
        return PhaseWords(words, None)
    turns = torch.tensor(host.turns, dtype=torch.int64, device=device)
    return PhaseWords(words, turns.reshape(words.shape))
