"""Notes on a rotation: facts worth knowing, and warnings of combinations that look like mistakes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightrope.frequencies import Given, Llama3, LongRoPE, Rule, YaRN

from .exactness import FLOAT32, FREQUENCIES, POSITIONS, ROUNDINGS
from .pairs import PairRow
from .stored import contradictions

if TYPE_CHECKING:
    from .report import PartReport

# The base of the RoPE paper, and the fallback of many implementations when a key is lost.
_USUAL_BASE = 10000.0
# From this context on, every published model with full attention and no scaling has a larger base.
_LONG_FOR_USUAL_BASE = 65536
# Rounding alone may push an angle slightly beyond those of training.
_MARGIN = 1.01

# Code and text of each note.
_Found = Iterator[tuple[str, str]]


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
    warnings = (_base, _lengths, _scaling, _yarn_elsewhere, _stored)
    facts = (_unextended, _turns, _tables, _elsewhere)
    return tuple(
        Note(code, check in warnings, text)
        for check in (*warnings, *facts)
        for code, text in check(report)
    )


# --- likely mistakes ------------------------------------------------------------------------------


def _base(part: PartReport) -> _Found:
    base = part.spec.base
    if isinstance(part.spec.scaling, Given) or not part.pairs:
        return
    if base <= 1.0:
        text = f"base {base:g} is not above 1: later pairs turn as fast as the first, or faster."
        yield "base", text
    if base == _USUAL_BASE and _unscaled_length(part) >= _LONG_FOR_USUAL_BASE:
        text = (
            f"base 10000 without scaling at {part.context:,} positions: models of that length use larger "
            "bases. A lost rope_theta or rope_scaling looks like this."
        )
        yield "usual-base", text


def _unscaled_length(part: PartReport) -> int:
    """Return the context, or 0 with scaling, a window or positions with several coordinates."""
    windowed = any(word in part.name for word in ("sliding", "local", "chunked"))
    plain = part.spec.scaling is None and part.spec.axis_count == 1 and not windowed
    return (part.context or 0) if plain else 0


def _lengths(part: PartReport) -> _Found:
    rule = part.spec.scaling
    original = getattr(rule, "original_max_position", None)
    if original is None or part.part.context is None:
        return
    _, stated = part.part.context
    if original > stated:
        text = (
            f"original_max_position {original:,} is beyond the context of {stated:,}: it should be "
            f"the length before the extension{_meant(rule, stated) or ', or the two are swapped'}."
        )
        yield "original-length", text
    elif original == stated and isinstance(rule, Llama3) and rule.factor > 1:
        text = (
            f"original_max_position is the context itself, {stated:,}: one should be the length "
            f"before the extension, the other the length after it{_meant(rule, stated)}."
        )
        yield "original-length", text
    elif isinstance(rule, YaRN) and stated > _MARGIN * rule.factor * original:
        text = (
            f"the context of {stated:,} is more than factor {rule.factor:g} times "
            f"original_max_position {original:,}: slow pairs reach angles beyond those of training."
        )
        yield "factor", text


def _meant(rule: Rule | None, stated: int) -> str:
    """Name the original length that a factor leads to from the context, if it is a whole number."""
    length = stated / max(getattr(rule, "factor", None) or 1.0, 1.0)
    return f", probably {length:,.0f}" if length < stated and length.is_integer() else ""


def _scaling(part: PartReport) -> _Found:
    rule = part.spec.scaling
    factor = getattr(rule, "factor", None)
    # Image coordinates are scaled to change their unit.
    if factor is not None and factor < 1.0 and part.spec.axis_count == 1:
        yield (
            "factor",
            f"factor {factor:g} is below 1: it should be the ratio of the new length to the old one, probably the "
            f"inverse, {1 / factor:.6g}.",
        )
        return
    if isinstance(rule, LongRoPE):
        for name in ("short_factor", "long_factor"):
            least = min(getattr(rule, name))
            if least < 1.0:
                at = getattr(rule, name).index(least)
                text = f"{name}[{at}] = {least:g} is below 1: that pair turns faster than unscaled."
                yield "divisors", text
        return
    # A rule by length has no effect up to that length.
    if rule is None or factor is None or rule.by_length or part.spec.axis_count > 1:
        return
    if all(pair.slower == 1.0 for pair in part.pairs):
        yield "no-effect", f"{type(rule).__name__} changes no pair at this length."


def _yarn_elsewhere(part: PartReport) -> _Found:
    rule = part.spec.scaling
    if not isinstance(rule, YaRN) or rule.attention_factor is not None:
        return
    # transformers 5.23 uses mscale and mscale_all_dim only if both are given and neither is 0.
    given = [rule.mscale, rule.mscale_all_dim]
    if any(value is not None for value in given) and not all(given) and rule.factor > 1:
        alone = YaRN(rule.factor, rule.original_max_position).frequencies(2, 10000.0)
        if not math.isclose(alone.attention_scaling, part.spec.attention_scaling(), rel_tol=1e-6):
            text = (
                "mscale and mscale_all_dim are not both given and nonzero: transformers 5.23 then ignores them "
                f"and scales by {alone.attention_scaling:.4g}; YaRN's formula gives "
                f"{part.spec.attention_scaling():.4g}."
            )
            yield "stacks-differ", text


def _stored(part: PartReport) -> _Found:
    for text in contradictions(part.spec, part.part.stored):
        yield "stored-frequencies", text


# --- facts ----------------------------------------------------------------------------------------


def _unextended(part: PartReport) -> _Found:
    rule, context = part.spec.scaling, part.part.context
    if not isinstance(rule, YaRN) or context is None or rule.factor <= 1:
        return
    _, stated = context
    if rule.original_max_position == stated:
        text = (
            f"The context is the original length of YaRN, {stated:,}: with factor {rule.factor:g} the extended one is "
            f"{stated * rule.factor:,.0f}, which programs other than transformers assume (Qwen's files are like "
            f"that). If {stated:,} is the extended length, the original one should be before the extension"
            f"{_meant(rule, stated)}."
        )
        yield "unextended", text


def _turns(part: PartReport) -> _Found:
    count, length, trained = len(part.pairs), part.context or 0, part.trained or 0
    slowest = max((pair.wavelength for pair in part.pairs), default=math.inf)
    if slowest < _unscaled_length(part):
        text = (
            f"Every pair completes a turn within the context, the slowest in {slowest:,.0f} of "
            f"{length:,} positions, so longer distances look like shorter ones."
        )
        yield "wraps", text
    slow = [pair for pair in part.pairs if 0 < (pair.turns_trained or 0) < 1]
    if slow:
        text = (
            f"{len(slow)} of {count} pairs never complete a turn within the {trained:,} "
            f"positions of training (pair {_span(slow)}): training covers only part of their circle."
        )
        yield "never-turn", text
    further = [(pair.turns or 0.0) / (pair.turns_trained or 1.0) for pair in slow]
    beyond = [times for times in further if times > _MARGIN]
    if beyond and length > trained:
        text = (
            f"At {length:,} positions {len(beyond)} of these reach angles beyond those of the "
            f"first {trained:,}, up to {max(beyond):.3g} times as far: a model that was not "
            "trained further has not seen them."
        )
        yield "unseen-angles", text
    still = [pair for pair in part.pairs if math.isinf(pair.wavelength)]
    if still:
        text = (
            f"{len(still)} of {count} pairs do not turn at all (pair {_span(still)}): "
            "their channels carry no position."
        )
        yield "no-rotation", text


def _span(pairs: list[PairRow]) -> str:
    """Format pair indices: ``12``, ``12–31``, or ``3, …, 9`` if they are not contiguous."""
    first, last = pairs[0].index, pairs[-1].index
    if first == last:
        return str(first)
    return f"{first}–{last}" if last - first == len(pairs) - 1 else f"{first}, …, {last}"


def _tables(part: PartReport) -> _Found:
    length = part.context
    if length is None or not part.pairs:
        return
    at = part.exactness.lengths.index(length)
    limit = ROUNDINGS["bfloat16"]
    cast, made, plain = (
        part.exactness.errors[name][at] for name in (FREQUENCIES, POSITIONS, FLOAT32)
    )
    if max(cast, made) > limit:
        text = (
            f"Up to position {length - 1:,} cosines are wrong by up to {cast:.2g} with bfloat16 "
            f"frequencies (a buffer after .to(bfloat16)), by up to {made:.2g} with bfloat16 positions."
        )
        yield "16-bit", text
    if plain > limit:
        reach = part.exactness.reach[FLOAT32]["bfloat16"]
        text = (
            f"Cosines of angles computed in float32 are wrong by up to {plain:.2g} at "
            f"{length:,} positions, {plain / limit:.3g} times the rounding of a bfloat16; "
            f"the error stays below that rounding for about {rounded(reach):,} positions."
        )
        yield "float32", text


def rounded(length: int) -> int:
    """Round down to two digits, the accuracy of a sample of positions."""
    step: int = 10 ** max(len(str(length)) - 2, 0)
    return length // step * step


def _elsewhere(part: PartReport) -> _Found:
    rule, factor = part.spec.scaling, part.softmax_scaling
    if rule is not None and rule.by_length:
        text = (
            f"Beyond {rule.original_max_position:,} positions the frequencies depend on the length of "
            "the sequence, so keys cached under another length must be rotated anew (rerotate)."
        )
        yield "by-length", text
    if isinstance(rule, YaRN) and factor is None:
        factor = dataclasses.replace(rule, scales_softmax=True).softmax_scaling
        text = (
            f"DeepSeek's attention multiplies its softmax scale by {factor:.6g} for mscale_all_dim, and others do not; "
            "what the attention of this model does is not known. It is not part of the rotation."
        )
        yield "softmax", text
    elif factor != 1.0:
        text = f"The model multiplies its softmax scale by {factor:.6g}; that is not part of the rotation."
        yield "softmax", text
    if part.part.temperature is not None:
        text = (
            f"{part.part.temperature} is a temperature of the attention: code that reads it multiplies queries by a "
            "factor that grows with their position. It is not part of the rotation."
        )
        yield "temperature", text
