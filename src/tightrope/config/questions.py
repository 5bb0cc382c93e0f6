"""Ask for what neither a configuration nor the table of families gives: all questions at once."""

from __future__ import annotations

from dataclasses import replace

from . import keys
from .heads import base_of, head_dim_of, stated_pairing
from .source import Part, Source, Stated

# A missing fact, advice, the argument that gives it, and an example of its value.
Question = tuple[str, str, str, object]


def questions(
    source: Source, parts: list[Part], layers: tuple[str, ...] | None, stated: Stated
) -> list[Question]:
    """Return the open questions about a family that is not in the table; none for the others."""
    if source.family is not None:
        return []
    asked: list[Question] = []
    if stated.interleaved is None and source.recorded is None and stated_pairing(source) is None:
        advice = (
            "interleaved=False if channel i is paired with i + rotary_dim / 2, as in Llama, or "
            "interleaved=True if adjacent channels are paired, as in GPT-J"
        )
        asked.append(("the pairing of channels", advice, "interleaved", False))
    asked += _about_slice(source, parts, stated)
    named = any(part.name is not None for part in parts)
    if not named and stated.rope_layers is None and "layers" not in source.knows:
        types = dict.fromkeys(layers or ())
        some = [repr(name) for name in types if name not in keys.LAYERS_WITHOUT_ATTENTION]
        others = " (to name some of them, add layer_types to the config)"
        if some:
            others = f", or a list of the types that do, of {', '.join(some)}"
        advice = f"rope_layers='all' if all layers with attention rotate{others}"
        asked.append(("the layers that rotate", advice, "rope_layers", "all"))
    return asked


def _about_slice(source: Source, parts: list[Part], stated: Stated) -> list[Question]:
    part = next((part for part in parts if part.rope), None)
    latent = source.outer((*keys.ROPE_DIM, *keys.NOPE_DIM))
    if part is None or latent or stated.rotary_dim is not None or "slice" in source.knows:
        return []
    base_of(source, part)  # a missing key is the first error
    width = head_dim_of(source, part)[0]
    dims = [value for _, value in source.outer(keys.ROTARY_DIM)]
    parted = source.outer(keys.FRACTION) or any(each.inner(keys.FRACTION) for each in parts)
    first = "start" in source.knows or stated.start is not None
    if dims == [width] or ((dims or parted) and first):
        return []
    if dims:
        advice = f"start=0 if the first {dims[0]} channels of a head rotate, or the first that does"
        return [("the first channel that rotates", advice, "start", 0)]
    advice = (
        f"rotary_dim={width} if all {width} channels of a head rotate, or the number that do, with start if "
        f"they are not the first"
    )
    return [("the channels that rotate", advice, "rotary_dim", width)]


def answered(stated: Stated, asked: list[Question]) -> Stated:
    """Return the arguments with the example of each question."""
    return replace(stated, **{name: value for _, _, name, value in asked})  # type: ignore[arg-type]


def sentence_of(source: Source, stated: Stated, asked: list[Question]) -> str:
    """The error that asks all questions and ends with a call that works."""
    given = {
        **vars(answered(stated, asked)),
        "section": source.prefix.removesuffix(".") or stated.section,
    }
    named = [f"{name}={value!r}" for name, value in given.items() if value != getattr(Stated, name)]
    *some, last = [question[0] for question in asked]
    facts = f"{', '.join(some)} and {last}" if some else last
    advice = "; ".join([question[1] for question in asked])
    call = ", ".join(["config", *named])
    return (
        f"the config must give {facts}, as the table of families does not contain {source.name}; pass "
        f"{advice}; for code like Llama's: RopeSpec.from_config({call})"
    )
