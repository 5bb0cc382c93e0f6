"""Compare two rotations: their fields, and their angles over a context."""

from __future__ import annotations

import dataclasses
import decimal
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tightrope._errors import bad_value, public
from tightrope.frequencies import CONTEXT, TWO_PI
from tightrope.spec import RopeSpec

from .report import Inspection, PartReport, plain
from .subject import Field

# Radians: 0.01 shows in a bfloat16 cosine; at 1 a pair no longer encodes the position.
NOTICED, LOST = 0.01, 1.0
_NO_CONTEXT = 131072


@dataclass(frozen=True)
class Disagreement:
    """The difference of the angles of two rotations, pair by pair, in radians.

    Attributes:
        context: the number of positions compared.
        largest: the largest difference of any pair, at most π. For a pair whose difference exceeds
            half a turn within the context: the value at the position nearest to its first half turn.
        position, pair: where the largest difference is.
        noticed, lost: the first positions with a difference of at least 0.01 and 1 radian; None if
            there is no such position.
    """

    context: int
    largest: float
    position: int
    pair: int
    noticed: int | None
    lost: int | None


@dataclass(frozen=True)
class Difference:
    """A field whose values in two configurations differ, in JSON types, and the sources of the values."""

    field: str
    one: object
    one_source: str
    other: object
    other_source: str


@dataclass(frozen=True)
class PartComparison:
    """The differences between a rotation of one model and a rotation of another.

    Attributes:
        one, other: the names of the two rotations.
        differences: fields whose values differ, even if no angle differs.
        alike: whether both rotate equally, to the last bit, at the compared length, and multiply
            the softmax scale equally.
        disagreement: the difference of the angles; None if the numbers of pairs differ.
        why: the reasons why they are not alike, as phrases; empty if they are alike.
    """

    one: str
    other: str
    differences: tuple[Difference, ...]
    alike: bool
    disagreement: Disagreement | None
    why: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The differences between two models' rotations.

    Attributes:
        one, other: the two inspections.
        parts: the comparisons of the matched parts.
        unmatched: names of parts that only one of them has.
    """

    one: Inspection
    other: Inspection
    parts: tuple[PartComparison, ...]
    unmatched: tuple[str, ...]

    @property
    def alike(self) -> bool:
        """True if both rotate equally in all parts."""
        return not self.unmatched and all(part.alike for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON types."""
        return {
            "one": self.one.name,
            "other": self.other.name,
            "alike": self.alike,
            "unmatched": list(self.unmatched),
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }


@public("compare")
def compare(one: Inspection, other: Inspection) -> Comparison:
    """Compare the rotations of two models.

    Parts are matched by name; a model with a single part is compared with all parts of the other.
    Angles are compared over the larger of the two contexts, or over 131,072 positions without any.

    Raises:
        ValueError: one of the models has no RoPE.

    >>> from tightrope import RopeSpec
    >>> from .report import inspect
    >>> made = compare(inspect(RopeSpec(64), context=4096), inspect(RopeSpec(64, base=5e5), context=4096))
    >>> made.alike, made.parts[0].disagreement.lost
    (False, 8)
    """
    if not one.parts or not other.parts:
        empty = one if not one.parts else other
        raise bad_value(f"both models must have RoPE but {empty.name} has none")
    together, unmatched = _matched(one, other)
    return Comparison(one, other, tuple(_parts(a, b) for a, b in together), unmatched)


def _matched(
    one: Inspection, other: Inspection
) -> tuple[list[tuple[PartReport, PartReport]], tuple[str, ...]]:
    if len(one.parts) == 1 or len(other.parts) == 1:
        return [(a, b) for a in one.parts for b in other.parts], ()
    mine, theirs = ({part.name: part for part in each.parts} for each in (one, other))
    together = [(part, theirs[name]) for name, part in mine.items() if name in theirs]
    alone = [name for name in (*mine, *theirs) if name not in mine or name not in theirs]
    return together, tuple(alone)


def _parts(one: PartReport, other: PartReport) -> PartComparison:
    context = max(one.context or 0, other.context or 0) or _NO_CONTEXT
    mine, theirs = (part.spec.frequencies(context).exact for part in (one, other))
    apart = _disagreement(mine, theirs, context) if len(mine) == len(theirs) else None
    why = list(_unlike(one.spec, other.spec, context))
    factors = [each.softmax_scaling for each in (one, other)]
    if factors[0] != factors[1]:
        a, b = ("unknown" if each is None else f"{each:.6g}" for each in factors)
        why.append(f"the factors on the softmax scale are {a} in one and {b} in the other")
    if apart is not None and mine != theirs:
        count = sum(x != y for x, y in zip(mine, theirs, strict=True))
        why.append(f"{count} of {len(mine)} pairs have different frequencies")
    return PartComparison(
        one.name, other.name, tuple(_fields(one, other)), not why, apart, tuple(why)
    )


def _unlike(a: RopeSpec, b: RopeSpec, context: int) -> Iterator[str]:
    if a.rotary_dim != b.rotary_dim:
        yield f"{a.rotary_dim} channels rotate in one and {b.rotary_dim} in the other"
    elif (a.head_dim, a.start) != (b.head_dim, b.start):
        yield "different channels rotate"
    if a.interleaved != b.interleaved:
        yield "the pairings differ: half and interleaved (tightrope convert changes that)"
    if a.axes != b.axes:
        yield "the coordinates of positions, or the pairs that they turn, differ"
    scales = [spec.attention_scaling(context) for spec in (a, b)]
    if scales[0] != scales[1]:
        yield f"rotated channels are scaled by {scales[0]:.6g} in one and {scales[1]:.6g} in the other"


def _fields(one: PartReport, other: PartReport) -> Iterator[Difference]:
    mine, theirs = ({each.name: each for each in part.fields} for part in (one, other))
    for name in mine | theirs:
        sides = [each.get(name, Field(name, None, "")) for each in (mine, theirs)]
        a, b = ((plain(value), source) for _, value, source in sides)
        if a[0] != b[0]:
            yield Difference(name, *a, *b)


def _disagreement(
    mine: tuple[Decimal, ...], theirs: tuple[Decimal, ...], context: int
) -> Disagreement:
    with decimal.localcontext(CONTEXT):
        apart = [_modulo(x - y) for x, y in zip(mine, theirs, strict=True)]
        found = [(Decimal(0), 0, 0)]
        for pair, step in enumerate(apart):
            # The difference grows up to half a turn, or to the end of the context.
            half = int(TWO_PI / 2 / step) if step else 0
            places = [min(half + more, context - 1) for more in (0, 1)]
            found += [(_modulo(step * place), place, pair) for place in places]
        largest, position, pair = max(found, key=lambda each: each[0])
        fastest = max(apart, default=Decimal(0))
        first = [
            math.ceil(Decimal(angle) / fastest) if fastest else context for angle in (NOTICED, LOST)
        ]
    noticed, lost = (place if place < context else None for place in first)
    return Disagreement(context, float(largest), position, pair, noticed, lost)


def _modulo(difference: Decimal) -> Decimal:
    """Reduce an angle per position to [0, π]; whole turns vanish as positions are integers."""
    turns = (difference / TWO_PI).to_integral_value(decimal.ROUND_HALF_EVEN)
    return abs(difference - turns * TWO_PI)
