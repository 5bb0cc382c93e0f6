"""The channel pairs of a spec: wavelengths, and the effect of scaling on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal

from tightrope.frequencies import CONTEXT, TWO_PI
from tightrope.spec import RopeSpec

from ..forms import pairs_of


@dataclass(frozen=True)
class PairRow:
    """Two channels that turn together.

    Attributes:
        index: number of its frequency, counted over all heads and axes with frequencies of their own.
        channels: the two channels of a head.
        axis: the coordinate that turns it; None if positions have one coordinate.
        head: its head; None if all heads have the same frequencies.
        inv_freq: radians per position, with scaling.
        wavelength: positions per turn; infinite for a pair that does not turn.
        unscaled: the wavelength without scaling.
        slower: how many times slower it turns than without scaling; exactly 1.0 if unchanged.
        turns: turns within the context; None if no length is known.
        turns_trained: turns without scaling within the length of training; None if unknown.
    """

    index: int
    channels: tuple[int, int]
    axis: int | None
    head: int | None
    inv_freq: float
    wavelength: float
    unscaled: float
    slower: float
    turns: float | None
    turns_trained: float | None

    @property
    def effect(self) -> str:
        """The effect of scaling: ``kept``, ``÷ 8`` (slower), ``× 1.25`` (faster), ``stopped``, ``started``."""
        if self.slower == 1.0:
            return "kept"
        if math.isinf(self.slower):
            return "stopped"
        if abs(self.slower) >= 1.0:
            return f"÷ {self.slower:.4g}"
        return f"× {1 / self.slower:.4g}" if self.slower else "started"


def rows_of(spec: RopeSpec, context: int | None, trained: int | None) -> tuple[PairRow, ...]:
    """Return a row for each pair of a spec, at a context length.

    >>> pairs = rows_of(RopeSpec(4), context=8, trained=None)
    >>> [round(pair.wavelength, 3) for pair in pairs]
    [6.283, 628.319]
    """
    scaled = spec.frequencies(context)
    plain = replace(spec, scaling=None).frequencies().exact
    count = max(len(plain), 1)
    heads = 1 if scaled.shape is None else scaled.shape[-2]
    made, channels = [], pairs_of(spec)
    for index, omega in enumerate(scaled.exact):
        pair, head, axis = index % count, None, None
        if scaled.shape is not None:
            head = index // count % heads
            axis = index // (count * heads) if len(scaled.shape) == 3 else None
        if spec.axes is not None:
            axis = spec.axes.pairs[pair][0]
        alone = plain[pair]
        waves = _wavelength(omega), _wavelength(alone), _ratio(alone, omega)
        turns = _turns(omega, context), _turns(alone, trained)
        made.append(PairRow(index, channels[pair], axis, head, float(omega), *waves, *turns))
    return tuple(made)


def _wavelength(omega: Decimal) -> float:
    return math.inf if omega == 0 else float(CONTEXT.divide(TWO_PI, abs(omega)))


def _turns(omega: Decimal, length: int | None) -> float | None:
    return None if length is None else float(CONTEXT.divide(abs(omega) * length, TWO_PI))


def _ratio(plain: Decimal, omega: Decimal) -> float:
    if plain == omega:
        return 1.0
    ratio = math.inf if omega == 0 else float(CONTEXT.divide(plain, omega))
    # 1.0 means unchanged: a ratio that only rounds to 1 becomes the next float.
    return math.nextafter(1.0, 2.0) if ratio == 1.0 else ratio
