"""Notes on a rotation: facts worth knowing, and warnings of combinations that look like mistakes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightrope.frequencies import Given, Llama3, LongRoPE, YaRN

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

#: What looks like a mistake: the code of the note, and perhaps a variant after a slash -> its text.
WARNINGS = {
    "base": "base {base:g} is not above 1: later pairs turn as fast as the first, or faster.",
    "usual-base": "base 10000 without scaling at {length:,} positions: models of that length use larger bases. A lost "
    "rope_theta or rope_scaling looks like this.",
    "original-length/beyond": "original_max_position {original:,} is beyond the context of {stated:,}: it should be the "
    "length before the extension{meant_or_swapped}.",
    "original-length/same": "original_max_position is the context itself, {stated:,}: one should be the length before "
    "the extension, the other the length after it{meant}.",
    "factor/context": "the context of {stated:,} is more than factor {factor:g} times original_max_position "
    "{original:,}: slow pairs reach angles beyond those of training.",
    "factor/below": "factor {factor:g} is below 1: it should be the ratio of the new length to the old one, probably the "
    "inverse, {inverse:.6g}.",
    "divisors": "{name}[{at}] = {least:g} is below 1: that pair turns faster than unscaled.",
    "no-effect": "{rule} changes no pair at this length.",
    "stored-frequencies": "{sentence}",
}
#: Facts, likewise.
FACTS = {
    "unextended": "The context is the original length of YaRN, {stated:,}: with factor {factor:g} the extended one is "
    "{extended:,.0f}, which programs other than transformers assume (Qwen's files are like that). If {stated:,} is the "
    "extended length, the original one should be before the extension{meant}.",
    "wraps": "Every pair completes a turn within the context, the slowest in {slowest:,.0f} of {length:,} positions, so "
    "longer distances look like shorter ones.",
    "never-turn": "{some} of {count} pairs never complete a turn within the {trained:,} positions of training (pair "
    "{span}): training covers only part of their circle.",
    "unseen-angles": "At {length:,} positions {some} of these reach angles beyond those of the first {trained:,}, up to "
    "{most:.3g} times as far: a model that was not trained further has not seen them.",
    "no-rotation": "{some} of {count} pairs do not turn at all (pair {span}): their channels carry no position.",
    "16-bit": "Up to position {last:,} cosines are wrong by up to {cast:.2g} with bfloat16 frequencies (a buffer after "
    ".to(bfloat16)), by up to {made:.2g} with bfloat16 positions.",
    "float32": "Cosines of angles computed in float32 are wrong by up to {plain:.2g} at {length:,} positions, "
    "{times:.3g} times the rounding of a bfloat16; the error stays below that rounding for about {reach:,} positions.",
    "by-length": "Beyond {original:,} positions the frequencies depend on the length of the sequence, so keys cached "
    "under another length must be rotated anew (rerotate).",
    "softmax/unknown": "DeepSeek's attention multiplies its softmax scale by {softmax:.6g} for mscale_all_dim, and "
    "others do not; what the attention of this model does is not known. It is not part of the rotation.",
    "softmax": "The model multiplies its softmax scale by {softmax:.6g}; that is not part of the rotation.",
    "temperature": "{key} is a temperature of the attention: code that reads it multiplies queries by a factor that "
    "grows with their position. It is not part of the rotation.",
}

# The key of each note that holds, and values for its text.
_Found = Iterator[tuple[str, dict[str, Any]]]


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
    found = [*_of_rule(report), *_of_pairs(report), *_of_tables(report)]
    return tuple(
        Note(key.partition("/")[0], texts is WARNINGS, texts[key].format(**values))
        for texts in (WARNINGS, FACTS)
        for wanted in texts
        for key, values in found
        if key == wanted
    )


def _of_rule(part: PartReport) -> _Found:
    """Yield what the scaling rule and the length that the configuration states lead to."""
    rule, spec = part.spec.scaling, part.spec
    factor, original = (getattr(rule, name, None) for name in ("factor", "original_max_position"))
    if part.part.context is not None and original is not None:
        stated = part.part.context[1]
        before = stated / max(factor or 1.0, 1.0)
        known = before < stated and before.is_integer()
        meant = f", probably {before:,.0f}" if known else ""
        values = {"original": original, "stated": stated, "factor": factor, "meant": meant}
        grows = (factor or 0.0) > 1
        if original > stated:
            yield (
                "original-length/beyond",
                values | {"meant_or_swapped": meant or ", or the two are swapped"},
            )
        elif original == stated and isinstance(rule, Llama3) and grows:
            yield "original-length/same", values
        elif original == stated and isinstance(rule, YaRN) and grows:
            yield "unextended", values | {"extended": stated * rule.factor}
        elif isinstance(rule, YaRN) and stated > _MARGIN * rule.factor * original:
            yield "factor/context", values
    # Image coordinates are scaled to change their unit.
    if factor is not None and factor < 1.0 and spec.axis_count == 1:
        yield "factor/below", {"factor": factor, "inverse": 1 / factor}
    elif isinstance(rule, LongRoPE):
        for name in ("short_factor", "long_factor"):
            divisors = getattr(rule, name)
            least = min(divisors)
            if least < 1.0:
                yield "divisors", {"name": name, "at": divisors.index(least), "least": least}
    # A rule by length has no effect up to that length.
    elif rule is not None and factor is not None and not rule.by_length and spec.axis_count == 1:
        if all(pair.slower == 1.0 for pair in part.pairs):
            yield "no-effect", {"rule": type(rule).__name__}
    if rule is not None and rule.by_length:
        yield "by-length", {"original": original}
    if isinstance(rule, YaRN) and part.softmax_scaling is None:
        unknown = dataclasses.replace(rule, scales_softmax=True).softmax_scaling
        yield "softmax/unknown", {"softmax": unknown}
    elif part.softmax_scaling != 1.0:
        yield "softmax", {"softmax": part.softmax_scaling}


def _of_pairs(part: PartReport) -> _Found:
    """Yield what the pairs show at the context and at the length of training."""
    length, trained, base = part.context or 0, part.trained or 0, part.spec.base
    windowed = any(word in part.name for word in ("sliding", "local", "chunked"))
    unscaled = part.spec.scaling is None and part.spec.axis_count == 1 and not windowed
    if part.pairs and not isinstance(part.spec.scaling, Given):
        if base <= 1.0:
            yield "base", {"base": base}
        if base == _USUAL_BASE and unscaled and length >= _LONG_FOR_USUAL_BASE:
            yield "usual-base", {"length": length}
    slowest = max((pair.wavelength for pair in part.pairs), default=math.inf)
    if unscaled and slowest < length:
        yield "wraps", {"slowest": slowest, "length": length}
    slow = [pair for pair in part.pairs if 0 < (pair.turns_trained or 0) < 1]
    if slow:
        yield "never-turn", {**_span(slow, part), "trained": trained}
    further = [(pair.turns or 0.0) / (pair.turns_trained or 1.0) for pair in slow]
    beyond = [times for times in further if times > _MARGIN]
    if beyond and length > trained:
        values = {"length": length, "some": len(beyond), "trained": trained, "most": max(beyond)}
        yield "unseen-angles", values
    still = [pair for pair in part.pairs if math.isinf(pair.wavelength)]
    if still:
        yield "no-rotation", _span(still, part)


def _span(pairs: list[PairRow], part: PartReport) -> dict[str, Any]:
    """Return the values for a text about pairs; ``span`` is ``12``, ``12–31``, or ``3, …, 9`` with gaps."""
    first, last = pairs[0].index, pairs[-1].index
    span = f"{first}–{last}" if last - first == len(pairs) - 1 else f"{first}, …, {last}"
    span = str(first) if first == last else span
    return {"some": len(pairs), "count": len(part.pairs), "span": span}


def _of_tables(part: PartReport) -> _Found:
    """Yield what stored frequencies, tables in other dtypes and the attention's own factors lead to."""
    for sentence in contradictions(part.spec, part.part.stored):
        yield "stored-frequencies", {"sentence": sentence}
    length, limit = part.context, ROUNDINGS["bfloat16"]
    if length is not None and part.pairs:
        at = part.exactness.lengths.index(length)
        cast, made, plain = (
            part.exactness.errors[name][at] for name in (FREQUENCIES, POSITIONS, FLOAT32)
        )
        if max(cast, made) > limit:
            yield "16-bit", {"last": length - 1, "cast": cast, "made": made}
        if plain > limit:
            reach = rounded(part.exactness.reach[FLOAT32]["bfloat16"])
            yield (
                "float32",
                {"plain": plain, "length": length, "times": plain / limit, "reach": reach},
            )
    if part.part.temperature is not None:
        yield "temperature", {"key": part.part.temperature}


def rounded(length: int) -> int:
    """Round down to two digits, the accuracy of a sample of positions."""
    step: int = 10 ** max(len(str(length)) - 2, 0)
    return length // step * step
