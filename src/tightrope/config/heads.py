"""Read the rotated slice of a head from a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from .._errors import as_real, describe
from . import keys
from .layers import Layer, Listed
from .scaling import claimed_by, kind_of_rule
from .source import WIDEST, Found, Source, agreed, fail, items, whole

# The keys of the width of a head in most code.
_HEAD = ("head_dim", "head_size")
# Fields of a spec.
Facts = dict[str, Found]
_ROTATE = "the channels that rotate"


def slice_of(source: Source, layer: Layer, listed: Listed) -> Facts:
    """The width of a head, the channels that rotate and the first of them; nothing if no key gives the width."""
    facts, single = source.facts, _of_layer(source, layer, listed)
    nope, rope = (
        agreed(key, single[key]) if key in single else source.width(key)
        for key in (*keys.NOPE_DIM, *keys.ROPE_DIM)
    )
    if facts.start == "nope" or (facts.start != "last" and (nope or rope)):
        return _latent(source, layer, nope, rope, single.get("head_dim", []))
    head = agreed("head_dim", single.get("head_dim", [])) or _head_dim(source, layer)
    if head is None:
        if source.family is None and source.stated.rotary_dim is None:
            advice = "rotary_dim, the number of them, with start if they are not the first"
            source.ask("rotary_dim", _ROTATE, advice, None)
        return {}
    got = _channels(source, layer, head, rope)
    start = Found(0, "from the first channel", given=False)
    if facts.start == "last":
        start = Found(head.value - got.value, f"{source.name} rotates the last channels")
    elif source.family is None and "start" not in source.knows and source.stated.start is None:
        if got.value != head.value:
            first = f"start=0 if the first {got.value} channels of a head rotate"
            advice = f"{first}, or the first that does"
            source.ask("start", "the first channel that rotates", advice, 0)
    return {"head_dim": head, "rotary_dim": got, "start": _start(source, start)}


def _of_layer(source: Source, layer: Layer, listed: Listed) -> dict[str, list[Found]]:
    """Widths that the configuration or its class gives to the layers of one type (Gemma 4)."""
    facts, found = source.facts, dict[str, list[Found]]()
    wide = facts.wide.get(str(layer.name))
    if wide is not None and source.given(wide):
        found["head_dim"] = whole(source.given(wide), WIDEST)
    path = source.shown("per_layer_config")
    single = items(Found(source.values.get("per_layer_config") or None, path))
    own = facts.per_layer.get(str(layer.name), {}) if not single else {}
    for key, value in own.items() if source.prefix else ():
        found.setdefault(key, [Found(value, facts.owner, given=False)])
    types = {str(number): name for number, name in enumerate(listed or ())}
    alike = [number for number, name in types.items() if layer.name in (None, name)]
    mine = {}
    for number, inner in single.items():
        at = str(number).lstrip("0") or str(number)[:1]
        if types and at not in types:
            last = len(types) - 1
            fail(
                f"per_layer_config must be of layers 0 to {last} but has one of {describe(number)}"
            )
        if isinstance(inner, Mapping) and (not types or at in alike):
            mine[f"per_layer_config.{number}"] = inner
    for key in ("head_dim", *keys.NOPE_DIM, *keys.ROPE_DIM):
        widths = [
            Found(inner[key], source.shown(f"{at}.{key}"))
            for at, inner in mine.items()
            if inner.get(key) is not None
        ]
        if widths and key not in found and len(widths) != len(alike):
            # The others have the width of the model.
            usual = _head_dim(replace(source, asked={}), layer) if key == "head_dim" else None
            widths += whole(source.given(key)) if usual is None else [usual]
        if widths:
            found[key] = whole(found.get(key, []) + widths, WIDEST)
    if (own or wide is not None) and not found:
        key = source.shown(wide) if wide is not None else path
        fail(f"{source.name} has layers that differ, so the config must give {key}")
    return found


def _latent(
    source: Source, layer: Layer, nope: Found | None, rope: Found | None, single: list[Found]
) -> Facts:
    """The slice of latent attention: it comes after the channels without RoPE.

    Args:
        single: the width of a head in layers of this type alone.
    """
    section = layer.section or {}
    if nope is None or rope is None:
        has = ", ".join(each.source for each in (nope, rope) if each is not None) or "neither"
        fail(
            f"latent attention must have {keys.NOPE_DIM[0]} and {keys.ROPE_DIM[0]} but the config has {has}"
        )
    total = Found(nope.value + rope.value, f"{nope.source} + {rope.source}")
    agreed("head_dim", whole([total], WIDEST) + whole(source.given("qk_head_dim")))
    # The width that a part of the channels is taken of may be another one, which a class may also overrule.
    own = whole(source.given(*keys.HEAD_DIM, *keys.HEAD_DIM_ELSEWHERE))
    parts = [section["partial_rotary_factor"]] if "partial_rotary_factor" in section else []
    parts += [each for each in source.given(*keys.FRACTION) if each not in parts]
    for other in own if not source.facts.ignored else ():
        if rope.value not in (other.value, *(_part(other, part) for part in parts)):
            agreed("head_dim", [other, total])
    counts = source.given(*keys.ROTARY_DIM) + source.stated.argument("rotary_dim")
    agreed("rotary_dim", [rope, *whole(counts)])
    widths = _whole_of_part(source, layer, total, single) if source.facts.made_by else None
    widths = [total, *own] if widths is None else widths
    for part in parts:
        fits = rope.value in [_part(width, part) for width in widths]
        if part.given and part.value != 1 and not fits:
            fail(
                f"rotary_dim must have one value but got {rope.source} = {rope.value} and {part.source} = {part.value!r}"
            )
    return {"head_dim": total, "rotary_dim": rope, "start": _start(source, nope)}


def _whole_of_part(
    source: Source, layer: Layer, total: Found, single: list[Found]
) -> list[Found] | None:
    """The width of which a class takes a part: head_dim, often another one than the total; None if any may be meant."""
    facts = source.facts
    if "head_dim" in facts.ignored:
        # Its value is not in the table. Without a rule, not all code takes a part.
        return whole(single) if kind_of_rule(layer.section or {}) else None
    if source.values.get("head_dim", 0) is None:
        fail(f"{source.shown('head_dim')} must not be null, as {facts.made_by} computes it then")
    width = source.get("head_dim")
    if facts.head_dim == "summed" and width is not None and not width.given:
        width = total
    return whole(single or ([] if width is None else [width]))


def _channels(source: Source, layer: Layer, head: Found, rope: Found | None) -> Found:
    """The number of channels that rotate; a question if nothing says it."""
    facts, section = source.facts, layer.section or {}
    own = section.get(keys.OWN_ROTARY_DIM)
    counts = whole(source.given(*keys.ROTARY_DIM) if own is None else [own])
    claimed = "partial_rotary_factor" in claimed_by(kind_of_rule(section))
    # A class that has no such key takes a part from the section alone; a number must agree with it. A rule that
    # takes the part itself is for whole heads.
    read = {"rotary_dim"} & {*facts.keys, *facts.known}
    stray = facts.made_by is not None and (claimed or not read)
    found = [] if stray else counts
    part = None if claimed else section.get("partial_rotary_factor")
    default = None if counts or facts.part == "factor" else source.get(*keys.ROTARY_DIM)
    if default is not None and source.prefix and (part is None or not part.given):
        found, part = [default], None
    if part is not None and (part.given or not found):
        channels = _part(head, part)
        if channels < 2:
            fail(
                f"{part.source} must give at least 2 of {head.value} channels but got {part.value!r}"
            )
        found.append(Found(channels, f"{part.source} = {part.value!r} of {head.value}", part.given))
    if facts.start == "last" and rope is not None and rope.given:
        found.append(rope)
    if facts.part == "stated" and part is None:
        fail(
            f"a rope section of {source.name} must give partial_rotary_factor, as the default of its code depends on the "
            "rule"
        )
    if facts.part == "factor" and part is None:
        every = "all of head_dim, as the code reads a factor only"
        found.append(Found(head.value, every, given=False))
    if facts.part == "sixths":
        found.append(Found(head.value // 6 * 6, f"the largest multiple of 6 up to {head.value}"))
    got = agreed("rotary_dim", found + whole(source.stated.argument("rotary_dim")))
    if got is None:
        if default is not None:
            advice = f"rotary_dim={default.value}, the {facts.owner}, or the number that do"
            source.ask("rotary_dim", _ROTATE, advice, default.value)
            return Found(min(default.value, head.value), "", given=False)
        if source.family is None and "slice" not in source.knows:
            return _ask_for_slice(source, head)
        got = Found(head.value, "all of head_dim", given=False)
    for each in (got, *counts) if facts.part == "none" else ():
        if each.value < head.value:
            fail(
                f"rotary_dim must be {head.value}, as the code of {source.name} rotates all channels of a head, but got "
                f"{each.value} from {each.source}; for other code, which rotates a part, make a RopeSpec by hand"
            )
    agreed("rotary_dim", [*counts, got] if stray else [])
    return got


def _part(width: Found, part: Found) -> int:
    """A part of a number of channels."""
    share = as_real(part.value)
    if share is None or not 0 < share <= 1:
        fail(f"{part.source} must be above 0 and at most 1 but got {part.value!r}")
    return int(width.value * share)


def _ask_for_slice(source: Source, head: Found) -> Found:
    first = whole(source.stated.argument("start"), least=0)
    count = max(int(head.value - (first[0].value if first else 0)) // 2 * 2, 2)
    of_head = "of a head rotate, or the number that do, with start if they are not the first"
    if first:
        of_head = f"from {first[0].value} on rotate, or the number that do"
    advice = f"rotary_dim={count} if all {count} channels {of_head}"
    source.ask("rotary_dim", _ROTATE, advice, count)
    return Found(count, "", given=False)


def _start(source: Source, found: Found) -> Found:
    """The first channel that rotates; an argument must agree if keys or the family settle it."""
    for given in whole(source.stated.argument("start"), least=0):
        if source.family is None and not found.given:
            return given
        if given.value != found.value:
            fail(f"start must be {found.value} ({found.source}) but got {given.value}")
    return found


def _head_dim(source: Source, layer: Layer) -> Found | None:
    """The width of a head; a question if no key gives it, an error if two give different ones."""
    facts, section = source.facts, layer.section or {}
    if keys.OWN_HEAD_DIM in section:
        return whole([section[keys.OWN_HEAD_DIM]], WIDEST)[0]
    ignored = "head_dim" in facts.ignored
    plain = not {*facts.width} - {*keys.HIDDEN, *keys.HEADS}
    own = ignored or facts.head_dim == "computed" or not plain
    # A class reads the keys that it has, and code head_dim.
    of_class = {"head_dim", *facts.keys, *facts.beside, *facts.also, *facts.also.values()}
    mine = [key for key in keys.HEAD_DIM if not own and (not facts.made_by or key in of_class)]
    given = whole(source.given(*mine), WIDEST)
    more = [key for key in (_HEAD if own else keys.HEAD_DIM) if key not in (*mine, *facts.ignored)]
    others = whole(source.given(*keys.HEAD_DIM_ELSEWHERE, *more), WIDEST)
    found = given or (others if source.family is None else [])
    if not found and mine and (default := source.width(*mine)):
        found = [default]
    for name, inner in source.values.items():  # of some layers: attention_other_setting of Step 3.5
        settings = "attention" in str(name) and not str(name).endswith("_config")
        if settings and isinstance(inner, Mapping) and inner.get("head_dim") is not None:
            others = others + whole([Found(inner["head_dim"], source.shown(f"{name}.head_dim"))])
    if not found and (derived := _derived(source, own)):
        found = [derived]
    return agreed("head_dim", found + others) if found else None


def _derived(source: Source, own: bool) -> Found | None:
    """The width of a head that no key gives: hidden size / heads."""
    facts, advice = source.facts, ""
    names = [(key,) for key in facts.width] or [keys.HIDDEN, keys.HEADS]
    found = [one for one in (source.width(*each) for each in names) if one is not None]
    if not source.prefix and not own and any(key in facts.keys for key in keys.HEAD_DIM):
        advice = f"head_dim, as {source.name} has another one than hidden size / heads"
    elif len(found) < len(names):
        direct = "" if own else f"one of {', '.join(keys.HEAD_DIM)}, or with "
        ways = " and ".join(each[0] for each in names)
        advice = f"{direct}{ways}, as its keys are {some(sorted(source.seen))}"
    if advice:
        source.ask("head_dim", "the width of a head", f"a config with {advice}", None)
        return None
    first, *rest = found
    if not rest:
        return first
    total = math.prod(one.value for one in rest)
    if first.value % total:
        by = " * ".join(one.source for one in rest)
        fail(f"{first.source} must be a multiple of {by} but got {first.value!r} and {total!r}")
    terms = [one.source if one.given else each[0] for one, each in zip(found, names)]
    path = f"{' / '.join(terms)} = {' / '.join(str(one.value) for one in found)}"
    origin = next((one.source for one in found if not one.given), "")
    return Found(first.value // total, f"{path} ({origin})" if origin else path, not origin)


def some(names: list[str], most: int = 8) -> str:
    """Join the first names and count the rest: configurations have dozens of keys."""
    more = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {more} more" if more > 0 else "")
