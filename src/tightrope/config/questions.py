"""Ask for what neither a configuration nor the table of families gives: all questions at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import keys
from .heads import argument, base_of, head_dim_of, stated_pairing
from .layers import Listed, with_attention
from .source import Part, Source, Stated

# A missing fact, advice, and the arguments of an example: one mapping, or one for each layer type.
Question = tuple[str, str, list[dict[str, Any]]]


def questions(
    source: Source, parts: list[Part], layers: Listed, stated: Stated
) -> tuple[list[Question], list[Stated]]:
    """Return the open questions about a family that is not in the table, and the arguments that answer them.

    There are several answers where heads differ in width, one for each layer type.
    """
    if source.family is not None:
        return [], []
    asked: list[Question] = []
    if stated.interleaved is None and source.recorded is None and stated_pairing(source) is None:
        advice = (
            "interleaved=False if channel i is paired with i + rotary_dim / 2, as in Llama, or "
            "interleaved=True if adjacent channels are paired, as in GPT-J"
        )
        asked.append(("the pairing of channels", advice, [{"interleaved": False}]))
    asked += _about_slice(source, parts, stated)
    named = any(part.name is not None for part in parts)
    if not named and stated.rope_layers is None and "layers" not in source.knows:
        some = [repr(name) for name in with_attention(layers)]
        others = " (to name some of them, add layer_types to the config)"
        if some:
            others = f", or a list of the types that do, of {', '.join(some)}"
        advice = f"rope_layers='all' if all layers with attention rotate{others}"
        asked.append(("the layers that rotate", advice, [{"rope_layers": "all"}]))
    answers = [stated]
    for _, _, examples in asked:
        answers = [replace(answer, **example) for answer in answers for example in examples]
    return asked, answers


def _about_slice(source: Source, parts: list[Part], stated: Stated) -> list[Question]:
    rotating = [part for part in parts if part.rope]
    latent = source.outer((*keys.ROPE_DIM, *keys.NOPE_DIM))
    if not rotating or latent or "slice" in source.knows:
        return []
    widths = {}
    for part in rotating:
        base_of(source, part)  # a missing key is the first error
        widths[part.name] = head_dim_of(source, part)[0]
    several = len({*widths.values()}) > 1
    dims = [value for _, value in source.outer(keys.ROTARY_DIM)]
    parted = source.outer(keys.FRACTION) or any(part.inner(keys.FRACTION) for part in parts)
    first = "start" in source.knows or stated.start is not None
    known = ((dims or parted) and first) or {*dims} == {*widths.values()}
    if known or (stated.rotary_dim is not None and not several):
        return []
    if dims:
        advice = f"start=0 if the first {dims[0]} channels of a head rotate, or the first that does"
        return [("the first channel that rotates", advice, [{"start": 0}])]
    start = argument(stated, "start", 0)
    skipped = start[0][1] if start else 0
    rest = {name: max((width - skipped) // 2 * 2, 2) for name, width in widths.items()}
    (count, *_) = rest.values()
    of_head = (
        f"from {skipped} on rotate, or the number that do"
        if start
        else "of a head rotate, or the number that do, with start if they are not the first"
    )
    advice = f"rotary_dim={count} if all {count} channels {of_head}"
    if several:
        each = [f"{width} channels in {name}" for name, width in widths.items()]
        advice = f"layer_type with the rotary_dim of its layers, as heads have {' and '.join(each)}"
    examples: list[dict[str, Any]] = [{"rotary_dim": count}]
    if several:
        examples = [{"layer_type": name, "rotary_dim": width} for name, width in rest.items()]
    return [("the channels that rotate", advice, examples)]


def sentence_of(source: Source, asked: list[Question], answers: list[Stated]) -> str:
    """The error that asks all questions and ends with a call that works."""
    calls = []
    for answer in answers:
        given = {**vars(answer), "section": source.prefix.removesuffix(".") or answer.section}
        named = [
            f"{name}={value!r}" for name, value in given.items() if value != getattr(Stated, name)
        ]
        calls.append(f"RopeSpec.from_config({', '.join(['config', *named])})")
    *some, last = [question[0] for question in asked]
    facts = f"{', '.join(some)} and {last}" if some else last
    advice = "; ".join([question[1] for question in asked])
    return (
        f"the config must give {facts}, as the table of families does not contain {source.name}; pass "
        f"{advice}; for code like Llama's: {' and '.join(calls)}"
    )
