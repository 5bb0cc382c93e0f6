"""Phase words from the fields of a spec, computed on the host by pure functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from . import frequencies
from ._tracing import Constant, value_of
from .angles import words_of
from .axes import Axes
from .frequencies import CONTEXT, TWO_PI, Frequencies, Rule

#: Computes phase words of a rule that is ``ntk_by_length``; see ``tightrope_stretched`` in
#: csrc/stretched.cpp. Arguments: the rule's constants, its original length, the lengths of the rows, the
#: error bound (:data:`_DOUBT`), the row to start at, and the tensor ``[rows, pairs]`` that it writes.
#: Returns the first row whose rounding it cannot prove correct, or the number of rows. Set when the
#: native library is loaded; while it is None, :func:`made` computes these phase words.
stretched_natively: Callable[[bytes, int, Sequence[int], int, int, torch.Tensor], int] | None = None

# In units of 2^-128 turn: 32 times the bound that csrc/stretched.cpp derives for the error of a frequency.
# For about one phase word in eight million, this leaves the rounding unproven.
_DOUBT = 2**40


# Phase words and turns, int64 ``[axes, rows|1, heads|1, pairs]``; turns are None if all are zero.
Table: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


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


def made(
    rule: Constant[Rule | None],
    rotary_dim: int,
    base: float,
    axes: Constant[Axes | None],
    regime: int | None,
) -> HostWords:
    """Return phase words and turns of a rule for one regime of lengths. A pure function.

    Args:
        rule, rotary_dim, base, axes: see :class:`tightrope.RopeSpec`.
        regime: see :meth:`tightrope.frequencies.Rule.regime`.
    """
    return _cached(value_of(rule), rotary_dim, base, value_of(axes), regime)


def inv_freq(rule: Constant[Rule | None], dim: int, base: float) -> list[float]:
    """Return one row of a rule's frequencies, for lengths up to its ``original_max_position``."""
    rule = value_of(rule)
    row = frequencies.default(dim, base) if rule is None else rule.frequencies(dim, base)
    return [float(omega) for omega in row.exact]


# A spec may be made inside a compiled function; its phase words are constants there, since Dynamo
# cannot trace decimals. torch.compiler.assume_constant_result sets the same attribute, but imports Dynamo.
made._dynamo_marked_constant = True  # type: ignore[attr-defined]
inv_freq._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=512)
def _cached(
    rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None, regime: int | None
) -> HostWords:
    result = assigned(rule, rotary_dim, base, axes, regime)
    flat = words_of(result)
    amplitude_hex = result.attention_scaling.hex()
    shape = result.shape or (len(result.exact),)
    pairs = shape[-1]
    heads = shape[-2] if len(shape) > 1 else 1
    if axes is None:
        count = shape[0] if len(shape) == 3 else 1
        return HostWords(flat.words, flat.turns, (count, heads, pairs), amplitude_hex)
    owners = [owner for owner, _, _ in axes.pairs] * heads
    words, turns = (
        tuple(
            value if axis == owner else 0
            for axis in range(axes.count)
            for owner, value in zip(owners, values, strict=True)
        )
        for values in (flat.words, flat.turns)
    )
    return HostWords(words, turns, (axes.count, heads, pairs), amplitude_hex)


@lru_cache(maxsize=512)
def assigned(
    rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None, regime: int | None
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


def of_lengths(
    rule: Rule, rotary_dim: int, base: float, axes: Axes | None, lengths: Sequence[int]
) -> Table:
    """Return phase words and turns for rows of given lengths, ``[axes, rows, heads|1, pairs]``, on the CPU.

    A pure function; each row is bitwise equal to the result of :func:`made` for the row's regime.

    Args:
        rule, rotary_dim, base, axes: see :class:`tightrope.RopeSpec`.
        lengths: length of each row; at least one.
    """
    dims, index, owners = _places(rotary_dim, axes)
    rows = [_stretched(rule, dim, base, lengths) for dim in dims]
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        regimes = map(rule.regime, lengths)
        cpu = torch.device("cpu")
        return joined([table(made(rule, rotary_dim, base, axes, it), cpu) for it in regimes])
    whole = found[0] if len(found) == 1 else torch.cat(found, 1)
    if index is not None:
        whole = whole.index_select(1, index)
    # Zero for the axes to which a pair does not belong.
    return (whole[None] if owners is None else whole * owners)[:, :, None], None


def _stretched(rule: Rule, dim: int, base: float, lengths: Sequence[int]) -> torch.Tensor | None:
    """Return phase words ``[rows, pairs]`` from the native library; None if it cannot compute them."""
    constants = None if stretched_natively is None else _constants(rule, dim, base)
    if stretched_natively is None or constants is None:
        return None
    limit, pairs = rule.original_max_position, dim // 2
    beyond = max(max(lengths) - limit, 0)
    # Within these limits the error is far below `_DOUBT`.
    if beyond >= 2**32 or pairs * ((beyond * constants.growth >> 128) + 2) >= 2**31:
        return None
    words = torch.empty((len(lengths), pairs), dtype=torch.int64, device="cpu")
    row = stretched_natively(constants.packed, limit, lengths, _DOUBT, 0, words)
    while row < len(lengths):
        exact = words_of(rule.frequencies(dim, base, lengths[row])).words
        words[row] = torch.tensor(exact, dtype=torch.int64, device="cpu")
        row = stretched_natively(constants.packed, limit, lengths, _DOUBT, row + 1, words)
    return words


class _Constants(NamedTuple):
    """Constants that :data:`stretched_natively` takes, the same for all lengths.

    Attributes:
        packed: the constants as bytes.
        growth: growth of the NTK scale per token, in units of 2^-128.
    """

    packed: bytes
    growth: int


@lru_cache(maxsize=512)
def _constants(rule: Rule, dim: int, base: float) -> _Constants | None:
    """Return the constants of a rule; None if the native library does not support its parameters."""
    if not rule.ntk_by_length or dim == 0 or not base > 1:
        return None
    growth = int(Fraction(rule.factor) * 2**128 / rule.original_max_position)  # type: ignore[attr-defined]
    ratio = (*frequencies.default(dim, base).exact, Decimal(0))[1]
    if not 2**68 <= growth < 2**128 or rule.original_max_position >= 2**62:
        return None
    turn, step = (
        int(CONTEXT.multiply(value, 2**128)) for value in (CONTEXT.divide(1, TWO_PI), ratio)
    )
    packed = b"".join(each.to_bytes(16, sys.byteorder) for each in (turn, step, growth))
    return _Constants(packed, growth)


@lru_cache(maxsize=512)
def _places(
    rotary_dim: int, axes: Axes | None
) -> tuple[tuple[int, ...], torch.Tensor | None, torch.Tensor | None]:
    """Return the rows of frequencies that the axes use, and the frequency and the axis of each pair.

    Returns:
        The rotary dimension of each row of frequencies; the column of each pair in the concatenated
        rows, or None if pair k has column k; and a one-hot mask of the axis of each pair,
        ``[axes, 1, pairs]``, or None without axes.
    """
    if axes is None:
        return (rotary_dim,), None, None
    dims = tuple(sorted({dim for _, _, dim in axes.pairs} or {rotary_dim}))
    starts = {dim: sum(dims[:i]) // 2 for i, dim in enumerate(dims)}
    columns = [starts[dim] + at for _, at, dim in axes.pairs]
    index = None
    if columns != list(range(sum(dims) // 2)):
        index = torch.tensor(columns, dtype=torch.int64, device="cpu")
    own = torch.tensor([axis for axis, _, _ in axes.pairs], dtype=torch.int64, device="cpu")
    owners = torch.arange(axes.count, device="cpu")[:, None, None] == own
    return dims, index, owners.to(torch.int64)


def table(made: HostWords, device: torch.device) -> Table:
    """Convert phase words and turns to tensors ``[axes, 1, heads|1, pairs]``."""
    axes, heads, pairs = made.shape
    words = torch.tensor(made.words, dtype=torch.int64, device=device)
    words = words.reshape(axes, 1, heads, pairs)
    if not any(made.turns):
        return words, None
    turns = torch.tensor(made.turns, dtype=torch.int64, device=device)
    return words, turns.reshape(words.shape)


def moved(table: Table, device: torch.device) -> Table:
    """Copy a table to a device."""
    if device.type == "cpu":
        return table  # already there: callers pass tables on the CPU
    words, turns = table
    return words.to(device), None if turns is None else turns.to(device)


def joined(tables: Sequence[Table]) -> Table:
    """Concatenate tables along the rows."""
    words = torch.cat([words for words, _ in tables], 1)
    if all(turns is None for _, turns in tables):
        return words, None
    every = [torch.zeros_like(words) if turns is None else turns for words, turns in tables]
    return words, torch.cat(every, 1)
