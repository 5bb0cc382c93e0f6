"""Ask for what neither a configuration nor the table of families gives, and end refusals with calls that work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

from .._errors import Refusal, bad_value
from ..spec import RopeSpec
from . import keys
from .heads import argument, base_of, head_dim_of, stated_pairing
from .layers import FLAGGED, OTHERS, Listed, flagged, with_attention
from .source import BASE, TRIED, Arguments, Base, Part, Source, Stated, Way
from .specs import LayerSpecs, Provenance

# A missing fact, advice, and the arguments of an example: one mapping, or one for each layer type.
Question = tuple[str, str, list[dict[str, Any]]]
Read: TypeAlias = Callable[[Source, Stated], Provenance]

CALL = "RopeSpec.from_config(config"
_LIKE_LLAMA = "for code like Llama's"
_MOST = 4  # of the open facts that one piece of advice settles


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
    listed = flagged(source)
    asks = "layers" not in source.knows or listed
    if not named and stated.rope_layers is None and asks:
        likely: list[str] = [name for name in (FLAGGED, OTHERS) if name in (listed or ())]
        some = [repr(name) for name in with_attention(layers)]
        others = " (to name some of them, add layer_types to the config)"
        if some:
            others = f", or a list of the types that do, of {', '.join(some)}"
        if listed:
            others += " (public code reads no_rope_layers and its interval in two opposite ways)"
        advice = f"rope_layers='all' if all layers with attention rotate{others}"
        asked.append(("the layers that rotate", advice, [{"rope_layers": likely or "all"}]))
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


def refuse(source: Source, asked: list[Question], answers: list[Stated]) -> NoReturn:
    """Raise the error that asks all questions and ends with a call that works."""
    *some, last = [question[0] for question in asked]
    facts = f"{', '.join(some)} and {last}" if some else last
    advice = "; ".join([question[1] for question in asked])
    calls = " and ".join(_call(source, answer) for answer in answers)
    error = bad_value(
        f"the config must give {facts}, as the table of families does not contain {source.name}; pass "
        f"{advice}; {_LIKE_LLAMA}: {calls}"
    )
    if len(answers) == 1:
        error.ways = ((_LIKE_LLAMA, Arguments(vars(answers[0]))),)
    raise error


def _call(source: Source, stated: Stated) -> str:
    given = {**vars(stated), "section": source.prefix.removesuffix(".") or stated.section}
    named = [
        f"{name}={name if name == 'inv_freq' else repr(value)}"
        for name, value in given.items()
        if value != getattr(Stated, name)
    ]
    return f"{', '.join([CALL, *named])})"


# --- the advice at the end of a refusal -----------------------------------------------------------


def advised(source: Source, stated: Stated, read: Read, error: Refusal) -> str:
    """The sentence of a refusal, with the call for each of its ways that leads to a spec at the end.

    Each way is tried: what it settles is assumed, and the configuration is read again.
    """
    text = str(error.args[0])
    if CALL in text:
        return text  # of open questions
    calls = [_tried(source, stated, read, text, way) for way in error.ways]
    return with_calls(text, *calls)


def with_calls(text: str, *calls: str) -> str:
    """A sentence with calls before its full stop."""
    return "".join([text.removesuffix("."), *calls, "."])


def _tried(source: Source, stated: Stated, read: Read, text: str, way: Way) -> str:
    """The conditions and the call of a way, with the first ways to settle what it leaves open; empty if none works."""
    conditions: list[str] = []
    tried: dict[str, Any] = {}
    for _ in range(_MOST):
        condition, answer = way
        conditions += [condition] * (condition not in conditions)
        if isinstance(answer, Arguments):
            stated = replace(stated, **answer)
        else:
            tried |= {text: answer} | ({BASE: answer} if isinstance(answer, Base) else {})
        token = TRIED.set({**tried})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                specs = read(source, stated).spec
        except Refusal as error:
            if not error.ways:
                return ""
            text, way = str(error.args[0]), error.ways[0]
        except (ValueError, TypeError):
            return ""
        else:
            call = _made(specs) if tried else _call(source, stated)
            when = ", ".join(filter(None, conditions))
            return (f"; {when}" * bool(when) + f": {call}") * bool(call)
        finally:
            TRIED.reset(token)
    return ""


def _made(specs: RopeSpec | LayerSpecs | None) -> str:
    """The calls that make these specs; empty for none."""
    named = specs if isinstance(specs, LayerSpecs) else {"": specs}
    calls: dict[str, list[str]] = {}
    for name, spec in named.items():
        if spec is not None:
            calls.setdefault(repr(spec), []).append(name)
    if "…" in "".join(calls):  # the middle of a long list is not shown, so a call would not run
        return ""
    return " and ".join(
        f"{call}{' for ' * bool(names[0])}{' and '.join(names)}" for call, names in calls.items()
    )
