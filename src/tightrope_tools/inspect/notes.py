"""Notes on a rotation: facts worth knowing, and warnings of combinations that look like mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tightrope.frequencies import DynamicNTK, Given, Llama3, LongRoPE, Rule, YaRN
from tightrope.spec import RopeSpec

from .exactness import FLOAT32, FREQUENCIES, POSITIONS, ROUNDINGS, Exactness
from .pairs import PairRow

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


@dataclass(frozen=True)
class Facts:
    """The input of the note checks; fields as in :class:`tightrope_tools.inspect.PartReport`."""

    spec: RopeSpec
    context: int | None
    stated: int | None
    """The context that the configuration states."""
    trained: int | None
    windowed: bool
    """True if these layers attend within a window only."""
    pairs: tuple[PairRow, ...]
    exactness: Exactness


def notes_on(facts: Facts) -> tuple[Note, ...]:
    """Return all notes, warnings first."""
    found = [note for check in _CHECKS for note in check(facts)]
    return tuple(sorted(found, key=lambda note: not note.warning))


# --- facts ----------------------------------------------------------------------------------------


def _never_turn(facts: Facts) -> Iterator[Note]:
    if facts.trained is None:
        return
    slow = [pair for pair in facts.pairs if pair.turns_trained is not None]
    slow = [pair for pair in slow if pair.turns_trained is not None and 0 < pair.turns_trained < 1]
    if not slow:
        return
    text = (
        f"{len(slow)} of {len(facts.pairs)} pairs never complete a turn within the {facts.trained:,} "
        f"positions of training (pair {_span(slow)}): training covers only part of their circle."
    )
    yield Note("never-turn", False, text)
    if facts.context is None or facts.context <= facts.trained:
        return
    beyond = [
        pair
        for pair in slow
        if pair.turns is not None
        and pair.turns_trained is not None
        and pair.turns > _MARGIN * pair.turns_trained
    ]
    if beyond:
        most = max((pair.turns or 0.0) / (pair.turns_trained or 1.0) for pair in beyond)
        yield Note(
            "unseen-angles",
            False,
            f"At {facts.context:,} positions {len(beyond)} of these reach angles beyond those of the "
            f"first {facts.trained:,}, up to {most:.3g} times as far: a model that was not trained "
            "further has not seen them.",
        )


def _stopped(facts: Facts) -> Iterator[Note]:
    still = [pair for pair in facts.pairs if math.isinf(pair.wavelength)]
    if still:
        yield Note(
            "no-rotation",
            False,
            f"{len(still)} of {len(facts.pairs)} pairs do not turn at all (pair {_span(still)}): "
            "their channels carry no position.",
        )


def _tables(facts: Facts) -> Iterator[Note]:
    length = facts.context
    if length is None or length not in facts.exactness.lengths or not facts.pairs:
        return
    at = facts.exactness.lengths.index(length)
    limit = ROUNDINGS["bfloat16"]
    cast, made = (facts.exactness.method(name).errors[at] for name in (FREQUENCIES, POSITIONS))
    if max(cast, made) > limit:
        yield Note(
            "16-bit",
            False,
            f"Up to position {length - 1:,} cosines are wrong by up to {cast:.2g} with bfloat16 "
            f"frequencies (a buffer after .to(bfloat16)), by up to {made:.2g} with bfloat16 positions.",
        )
    plain = facts.exactness.method(FLOAT32)
    if plain.errors[at] > limit:
        yield Note(
            "float32",
            False,
            f"Cosines of angles computed in float32 are wrong by up to {plain.errors[at]:.2g} at "
            f"{length:,} positions, {plain.errors[at] / limit:.3g} times the rounding of a bfloat16; "
            f"the error stays below that rounding for about {_round(plain.reach['bfloat16']):,} positions.",
        )


def _by_length(facts: Facts) -> Iterator[Note]:
    rule = facts.spec.scaling
    if rule is None or not rule.by_length:
        return
    yield Note(
        "by-length",
        False,
        f"Beyond {rule.original_max_position:,} positions the frequencies depend on the length of "
        "the sequence, so keys cached under another length must be rotated anew (rerotate).",
    )


def _softmax(facts: Facts) -> Iterator[Note]:
    if facts.spec.softmax_scaling != 1.0:
        yield Note(
            "softmax",
            False,
            f"The model multiplies its softmax scale by {facts.spec.softmax_scaling:.6g}; that is not "
            "part of the rotation.",
        )


# --- likely mistakes ------------------------------------------------------------------------------


def _base(facts: Facts) -> Iterator[Note]:
    spec = facts.spec
    if isinstance(spec.scaling, Given) or not facts.pairs:
        return
    if spec.base <= 1.0:
        yield Note(
            "base",
            True,
            f"base {spec.base:g} is not above 1: later pairs turn as fast as the first, or faster.",
        )
    length = facts.context
    if length is None or facts.windowed or spec.axis_count > 1 or spec.scaling is not None:
        return
    slowest = max(pair.wavelength for pair in facts.pairs)
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


def _no_scaling(facts: Facts) -> Iterator[Note]:
    rule = facts.spec.scaling
    factor = getattr(rule, "factor", None)
    if rule is None or factor is None or isinstance(rule, LongRoPE):
        return
    if facts.spec.axis_count > 1:
        return  # image coordinates are scaled to change their unit
    if not isinstance(rule, DynamicNTK) and factor < 1.0:
        yield Note("factor", True, f"factor {factor:g} is below 1: pairs turn faster, not slower.")
    elif all(pair.slower == 1.0 for pair in facts.pairs) and _within(facts, rule):
        yield Note(
            "no-effect",
            not isinstance(rule, DynamicNTK),
            f"{type(rule).__name__} changes no pair at this length.",
        )


def _within(facts: Facts, rule: Rule) -> bool:
    return not rule.by_length or (
        facts.context is not None and facts.context <= rule.original_max_position
    )


def _original(facts: Facts) -> Iterator[Note]:
    rule, stated = facts.spec.scaling, facts.stated
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


def _yarn_elsewhere(facts: Facts) -> Iterator[Note]:
    rule = facts.spec.scaling
    if not isinstance(rule, YaRN) or rule.attention_factor is not None:
        return
    # transformers 5.23 uses mscale and mscale_all_dim only if both are given and neither is 0.
    given = [rule.mscale, rule.mscale_all_dim]
    if any(value is not None for value in given) and not all(given) and rule.factor > 1:
        alone = YaRN(rule.factor, rule.original_max_position).frequencies(2, 10000.0)
        if not math.isclose(alone.attention_scaling, facts.spec.amplitude, rel_tol=1e-6):
            yield Note(
                "stacks-differ",
                True,
                "mscale and mscale_all_dim are not both given and nonzero: transformers 5.23 then ignores them "
                f"and scales by {alone.attention_scaling:.4g}; YaRN's formula gives "
                f"{facts.spec.amplitude:.4g}.",
            )


def _divisors(facts: Facts) -> Iterator[Note]:
    rule = facts.spec.scaling
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


_CHECKS: tuple[Callable[[Facts], Iterator[Note]], ...] = (
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
