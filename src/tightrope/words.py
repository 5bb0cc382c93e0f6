"""Phase words of the fields of a spec, made once for each and kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from . import frequencies
from .angles import words_of
from .axes import Axes
from .frequencies import Frequencies, Rule

T = TypeVar("T")


class Made(NamedTuple):
    """Words and turns as plain ints, flat, with their shape ``(axes, heads, pairs)``."""

    words: tuple[int, ...]
    turns: tuple[int, ...]
    shape: tuple[int, int, int]
    attention_scaling: float


# A value of a spec, or its class and fields.
Said: TypeAlias = "T | tuple[type[T], tuple[Any, ...]]"


def made(
    rule: Said[Rule | None],
    rotary_dim: int,
    base: float,
    axes: Said[Axes | None],
    regime: int | None,
) -> Made:
    """Words and turns of the fields of a spec at a regime of its rule. A pure function.

    Args:
        rule, rotary_dim, base, axes: as of :class:`tightrope.RopeSpec`.
        regime: as :meth:`tightrope.frequencies.Rule.regime` gives it.
    """
    return _cached(_heard(rule), rotary_dim, base, _heard(axes), regime)


def inv_freq(rule: Said[Rule | None], dim: int, base: float) -> list[float]:
    """The frequencies of one row of a rule, within its original length."""
    rule = _heard(rule)
    row = frequencies.default(dim, base) if rule is None else rule.frequencies(dim, base)
    return [float(omega) for omega in row.exact]


def _heard(said: Said[T]) -> T:
    if isinstance(said, tuple):
        kind, values = said
        return kind(*values)
    return said


# A spec may be made inside a compiled function; its words are constants there, since dynamo cannot
# trace decimals. This is what torch.compiler.assume_constant_result does, which would import dynamo.
made._dynamo_marked_constant = True  # type: ignore[attr-defined]
inv_freq._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=512)
def _cached(
    rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None, regime: int | None
) -> Made:
    result = assigned(rule, rotary_dim, base, axes, regime)
    flat = words_of(result)
    shape = result.shape or (len(result.exact),)
    pairs = shape[-1]
    heads = shape[-2] if len(shape) > 1 else 1
    if axes is None:
        count = shape[0] if len(shape) == 3 else 1
        return Made(flat.words, flat.turns, (count, heads, pairs), result.attention_scaling)
    owners = [owner for owner, _, _ in axes.pairs] * heads
    words, turns = (
        tuple(
            value if axis == owner else 0
            for axis in range(axes.count)
            for owner, value in zip(owners, values, strict=True)
        )
        for values in (flat.words, flat.turns)
    )
    return Made(words, turns, (axes.count, heads, pairs), result.attention_scaling)


@lru_cache(maxsize=512)
def assigned(
    rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None, regime: int | None
) -> Frequencies:
    """The frequencies of a rule, one per pair, as axes assign them."""

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


def joined(
    tables: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tables of single rows as one table."""
    words = torch.cat([words for words, _ in tables], 1)
    if all(turns is None for _, turns in tables):
        return words, None
    every = [torch.zeros_like(words) if turns is None else turns for words, turns in tables]
    return words, torch.cat(every, 1)
