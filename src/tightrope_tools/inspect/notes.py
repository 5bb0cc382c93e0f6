"""Notes on a rotation: facts worth knowing, and warnings of combinations that look like mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightrope.frequencies import DynamicNTK, Given, Llama3, LongRoPE, Rule, YaRN

from .exactness import FLOAT32, FREQUENCIES, POSITIONS, ROUNDINGS
from .pairs import PairRow

if TYPE_CHECKING:
    from .report import PartReport

# The base of the RoPE paper, and the fallback of many implementations when a key is lost.
_USUAL_BASE = 10000.0
# From this context on, every published model with full attention and no scaling has a larger base.
_LONG_FOR_USUAL_BASE = 65536
# Rounding alone may push an angle slightly beyond those of training.
_MARGIN = 1.01


@dataclass(frozen=True)
class Note:
    """One note on a rotation.

    Attributes:
        code: a stable identifier, for programs.
        warning: whether the configuration looks mistaken; otherwise the note is a fact.
        text: the sentence to show.
    """

    code: str
    warning: bool
    text: str


def notes_on(report: PartReport) -> tuple[Note, ...]:
    """Return all notes on a report, which has none yet; warnings first."""
    found = [note for check in _CHECKS for note in check(report)]
    return tuple(sorted(found, key=lambda note: not note.warning))


# --- facts ----------------------------------------------------------------------------------------


def _never_turn(part: PartReport) -> Iterator[Note]:
    slow = [pair for pair in part.pairs if 0 < (pair.turns_trained or 0) < 1]
    if part.trained is None or not slow:
        return
    text = (
        f"{len(slow)} of {len(part.pairs)} pairs never complete a turn within the {part.trained:,} "
        f"positions of training (pair {_span(slow)}): training covers only part of their circle."
    )
    yield Note("never-turn", False, text)
    if part.context is None or part.context <= part.trained:
        return
    further = [(pair.turns or 0.0) / (pair.turns_trained or 1.0) for pair in slow]
    beyond = [times for times in further if times > _MARGIN]
    if beyond:
        text = (
            f"At {part.context:,} positions {len(beyond)} of these reach angles beyond those of the "
            f"first {part.trained:,}, up to {max(beyond):.3g} times as far: a model that was not "
            "trained further has not seen them."
        )
        yield Note("unseen-angles", False, text)


def _stopped(part: PartReport) -> Iterator[Note]:
    still = [pair for pair in part.pairs if math.isinf(pair.wavelength)]
    if still:
        yield Note(
            "no-rotation",
            False,
            f"{len(still)} of {len(part.pairs)} pairs do not turn at all (pair {_span(still)}): "
            "their channels carry no position.",
        )


def _tables(part: PartReport) -> Iterator[Note]:
    length = part.context
    if length is None or length not in part.exactness.lengths or not part.pairs:
        return
    at = part.exactness.lengths.index(length)
    limit = ROUNDINGS["bfloat16"]
    cast, made = (part.exactness.method(name).errors[at] for name in (FREQUENCIES, POSITIONS))
    if max(cast, made) > limit:
        yield Note(
            "16-bit",
            False,
            f"Up to position {length - 1:,} cosines are wrong by up to {cast:.2g} with bfloat16 "
            f"frequencies (a buffer after .to(bfloat16)), by up to {made:.2g} with bfloat16 positions.",
        )
    plain = part.exactness.method(FLOAT32)
    if plain.errors[at] > limit:
        yield Note(
            "float32",
            False,
            f"Cosines of angles computed in float32 are wrong by up to {plain.errors[at]:.2g} at "
            f"{length:,} positions, {plain.errors[at] / limit:.3g} times the rounding of a bfloat16; "
            f"the error stays below that rounding for about {_round(plain.reach['bfloat16']):,} positions.",
        )


def _by_length(part: PartReport) -> Iterator[Note]:
    rule = part.spec.scaling
    if rule is None or not rule.by_length:
        return
    yield Note(
        "by-length",
        False,
        f"Beyond {rule.original_max_position:,} positions the frequencies depend on the length of "
        "the sequence, so keys cached under another length must be rotated anew (rerotate).",
    )


def _softmax(part: PartReport) -> Iterator[Note]:
    if part.spec.softmax_scaling != 1.0:
        yield Note(
            "softmax",
            False,
            f"The model multiplies its softmax scale by {part.spec.softmax_scaling:.6g}; that is not "
            "part of the rotation.",
        )


# --- likely mistakes ------------------------------------------------------------------------------


def _base(part: PartReport) -> Iterator[Note]:
    spec = part.spec
    if isinstance(spec.scaling, Given) or not part.pairs:
        return
    if spec.base <= 1.0:
        yield Note(
            "base",
            True,
            f"base {spec.base:g} is not above 1: later pairs turn as fast as the first, or faster.",
        )
    length = part.context
    if length is None or part.is_windowed or spec.axis_count > 1 or spec.scaling is not None:
        return
    slowest = max(pair.wavelength for pair in part.pairs)
    if spec.base == _USUAL_BASE and length >= _LONG_FOR_USUAL_BASE:
        yield Note(
            "usual-base",
            True,
            f"base 10000 without scaling at {length:,} positions: models of that length use larger "
            "bases. A lost rope_theta or rope_scaling looks like this.",
        )
    elif slowest < length:
        yield Note(
            "wraps",
            False,
            f"Every pair completes a turn within the context, the slowest in {slowest:,.0f} of "
            f"{length:,} positions, so longer distances look like shorter ones.",
        )


def _no_scaling(part: PartReport) -> Iterator[Note]:
    rule = part.spec.scaling
    factor = getattr(rule, "factor", None)
    if rule is None or factor is None or isinstance(rule, LongRoPE):
        return
    if part.spec.axis_count > 1:
        return  # image coordinates are scaled to change their unit
    if not isinstance(rule, DynamicNTK) and factor < 1.0:
        yield Note("factor", True, f"factor {factor:g} is below 1: pairs turn faster, not slower.")
    elif all(pair.slower == 1.0 for pair in part.pairs) and _within(part, rule):
        yield Note(
            "no-effect",
            not isinstance(rule, DynamicNTK),
            f"{type(rule).__name__} changes no pair at this length.",
        )


def _within(part: PartReport, rule: Rule) -> bool:
    return not rule.by_length or (
        part.context is not None and part.context <= rule.original_max_position
    )


def _original(part: PartReport) -> Iterator[Note]:
    rule, stated = part.spec.scaling, part.stated
    original = getattr(rule, "original_max_position", None)
    if original is None or stated is None:
        return
    if original > stated:
        yield Note(
            "original-length",
            True,
            f"original_max_position {original:,} is beyond the context of {stated:,}: it should be "
            "the length before the extension.",
        )
    elif original == stated and isinstance(rule, Llama3):
        yield Note(
            "original-length",
            True,
            f"original_max_position is the context itself, {stated:,}: one should be the length "
            "before the extension, the other the length after it.",
        )
    elif isinstance(rule, YaRN) and stated > _MARGIN * rule.factor * original:
        yield Note(
            "factor",
            True,
            f"the context of {stated:,} is more than factor {rule.factor:g} times "
            f"original_max_position {original:,}: slow pairs reach angles beyond those of training.",
        )


def _yarn_elsewhere(part: PartReport) -> Iterator[Note]:
    rule = part.spec.scaling
    if not isinstance(rule, YaRN) or rule.attention_factor is not None:
        return
    # transformers 5.23 uses mscale and mscale_all_dim only if both are given and neither is 0.
    given = [rule.mscale, rule.mscale_all_dim]
    if any(value is not None for value in given) and not all(given) and rule.factor > 1:
        alone = YaRN(rule.factor, rule.original_max_position).frequencies(2, 10000.0)
        if not math.isclose(alone.attention_scaling, part.spec.amplitude, rel_tol=1e-6):
            yield Note(
                "stacks-differ",
                True,
                "mscale and mscale_all_dim are not both given and nonzero: transformers 5.23 then ignores them "
                f"and scales by {alone.attention_scaling:.4g}; YaRN's formula gives "
                f"{part.spec.amplitude:.4g}.",
            )


def _divisors(part: PartReport) -> Iterator[Note]:
    rule = part.spec.scaling
    if not isinstance(rule, LongRoPE):
        return
    for name, divisors in (("short_factor", rule.short_factor), ("long_factor", rule.long_factor)):
        if min(divisors) < 1.0:
            at = divisors.index(min(divisors))
            yield Note(
                "divisors",
                True,
                f"{name}[{at}] = {divisors[at]:g} is below 1: that pair turns faster than unscaled.",
            )


_CHECKS: tuple[Callable[[PartReport], Iterator[Note]], ...] = (
    _base,
    _original,
    _no_scaling,
    _divisors,
    _yarn_elsewhere,
    _never_turn,
    _stopped,
    _tables,
    _by_length,
    _softmax,
)


def _span(pairs: list[PairRow]) -> str:
    """Format pair indices: ``12``, ``12–31``, or ``3, …, 9`` if they are not contiguous."""
    first, last = pairs[0].index, pairs[-1].index
    if first == last:
        return str(first)
    return f"{first}–{last}" if last - first == len(pairs) - 1 else f"{first}, …, {last}"


def _round(length: int) -> int:
    """Round down to two digits, the accuracy of a sample of positions."""
    step: int = 10 ** max(len(str(length)) - 2, 0)
    return length // step * step
