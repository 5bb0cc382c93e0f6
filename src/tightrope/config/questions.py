"""Ask for what neither a configuration nor the table of families gives: all questions at once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from . import keys
from .heads import base_of, head_dim_of, stated_pairing
from .source import Part, Source, Stated


class Question(NamedTuple):
    """A missing fact, the arguments that give it, and an example of them."""

    fact: str
    advice: str
    example: dict[str, object]


def questions(
    source: Source, parts: list[Part], layers: tuple[str, ...] | None, stated: Stated
) -> list[Question]:
    """Return the open questions about a family that is not in the table; none for the others."""
    if source.family is not None:
        return []
    asked = []
    if stated.interleaved is None and source.recorded is None and stated_pairing(source) is None:
        advice = (
            "interleaved=False if channel i is paired with i + rotary_dim / 2, as in Llama, or "
            "interleaved=True if adjacent channels are paired, as in GPT-J"
        )
        asked.append(Question("the pairing of channels", advice, {"interleaved": False}))
    asked += _about_slice(source, parts, stated)
    named = any(part.name is not None for part in parts)
    if not named and stated.rope_layers is None and "layers" not in source.knows:
        types = dict.fromkeys(layers or ())
        some = [repr(name) for name in types if name not in keys.LAYERS_WITHOUT_ATTENTION]
        others = " (to name some of them, add layer_types to the config)"
        if some:
            others = f", or a list of the types that do, of {', '.join(some)}"
        advice = f"rope_layers='all' if all layers with attention rotate{others}"
        asked.append(Question("the layers that rotate", advice, {"rope_layers": "all"}))
    return asked


def _about_slice(source: Source, parts: list[Part], stated: Stated) -> list[Question]:
    part = next((part for part in parts if part.rope), None)
    latent = source.outer((*keys.ROPE_DIM, *keys.NOPE_DIM))
    if part is None or latent or stated.rotary_dim is not None or "slice" in source.knows:
        return []
    base_of(source, part)  # a missing key is the first error
    width = head_dim_of(source, part)[0]
    dims = source.outer(keys.ROTARY_DIM)
    parted = source.outer(keys.FRACTION) or any(each.inner(keys.FRACTION) for each in parts)
    if (dims or parted) and ("start" in source.knows or stated.start is not None):
        return []
    if dims and dims[0][1] == width:
        return []
    if dims:
        advice = (
            f"start=0 if the first {dims[0][1]} channels of a head rotate, or the first that does"
        )
        return [Question("the first channel that rotates", advice, {"start": 0})]
    advice = (
        f"rotary_dim={width} if all {width} channels of a head rotate, or the number that do, with start if "
        f"they are not the first"
    )
    return [Question("the channels that rotate", advice, {"rotary_dim": width})]


def answered(stated: Stated, asked: list[Question]) -> Stated:
    """Return the arguments with the example of each question."""
    for question in asked:
        stated = replace(stated, **question.example)  # type: ignore[arg-type]
    return stated


def sentence_of(source: Source, stated: Stated, asked: list[Question]) -> str:
    """The error that asks all questions and ends with a call that works."""
    given = vars(answered(stated, asked))
    if source.prefix:
        given = {**given, "section": source.prefix.removesuffix(".")}
    named = [f"{name}={value!r}" for name, value in given.items() if value != getattr(Stated, name)]
    facts = [question.fact for question in asked]
    shown = " and ".join([", ".join(facts[:-1]), facts[-1]] if len(facts) > 1 else facts)
    return (
        f"the config must give {shown}, as the table of families does not contain {source.name}; pass "
        f"{'; '.join(question.advice for question in asked)}; for code like Llama's: "
        f"RopeSpec.from_config({', '.join(['config', *named])})"
    )
