"""Read the rotated slice of a head, the pairing and the axes from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .._errors import as_real, bad_type, describe
from ..axes import Axes
from . import keys
from .layers import Layer, Listed
from .scaling import claimed_by, kind_of_rule
from .source import WIDEST, Asked, Found, Question, Section, Source, Stated, agreed, fail, whole

# Limit on mrope_section, so that a wrong number raises an error before it takes memory and time.
_MOST_PAIRS = 32768
# The keys of the width of a head in most code.
_HEAD = ("head_dim", "head_size")
# Fields of a spec.
Facts = dict[str, Found]
_ROTATE = "the channels that rotate"


def slice_of(source: Source, layer: Layer, listed: Listed, stated: Stated, asked: Asked) -> Facts:
    """The width of a head, the channels that rotate and the first of them; nothing if no key gives the width."""
    facts, single = source.facts, _of_layer(source, layer, listed)
    nope, rope = (
        agreed(key, single[key]) if key in single else source.width(key)
        for key in (*keys.NOPE_DIM, *keys.ROPE_DIM)
    )
    if facts.start == "nope" or (facts.start != "last" and (nope or rope)):
        return _latent(source, layer.section or {}, nope, rope, stated)
    head = agreed("head_dim", single.get("head_dim", [])) or _head_dim(source, layer, asked)
    if head is None:
        if source.family is None and stated.rotary_dim is None:
            advice = "rotary_dim, the number of them, with start if they are not the first"
            asked["rotary_dim"] = Question(_ROTATE, advice, None)
        return {}
    got = _channels(source, layer.section or {}, head, rope, stated, asked)
    start = Found(0, "from the first channel", given=False)
    if facts.start == "last":
        start = Found(head.value - got.value, f"{source.name} rotates the last channels")
    elif source.family is None and "start" not in source.knows and stated.start is None:
        if got.value != head.value:
            first = f"start=0 if the first {got.value} channels of a head rotate"
            advice = f"{first}, or the first that does"
            asked["start"] = Question("the first channel that rotates", advice, 0)
    return {"head_dim": head, "rotary_dim": got, "start": _start(source, start, stated)}


def _of_layer(source: Source, layer: Layer, listed: Listed) -> dict[str, list[Found]]:
    """Widths that the configuration or its class gives to the layers of one type (Gemma 4)."""
    facts, found = source.facts, dict[str, list[Found]]()
    wide = facts.wide.get(str(layer.name))
    if wide is not None and source.given(wide):
        found["head_dim"] = whole(source.given(wide), WIDEST)
    single = source.values.get("per_layer_config") or {}
    if not isinstance(single, Mapping):
        raise bad_type(f"{source.shown('per_layer_config')} must be a mapping but got {single!r}")
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
        paths = [path for path, inner in mine.items() if inner.get(key) is not None]
        widths = [Found(mine[path][key], source.shown(f"{path}.{key}")) for path in paths]
        if widths and key not in found and len(widths) != len(alike):
            # The others have the width of the model.
            usual = _head_dim(source, layer, {}) if key == "head_dim" else None
            widths += whole(source.given(key)) if usual is None else [usual]
        if widths:
            found[key] = whole(found.get(key, []) + widths, WIDEST)
    if (own or wide is not None) and not found:
        key = source.shown(wide or "per_layer_config")
        fail(f"{source.name} has layers that differ, so the config must give {key}")
    return found


def _latent(
    source: Source, section: Section, nope: Found | None, rope: Found | None, stated: Stated
) -> Facts:
    """The slice of latent attention: it comes after the channels without RoPE."""
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
    counts = source.given(*keys.ROTARY_DIM) + stated.argument("rotary_dim")
    agreed("rotary_dim", [rope, *whole(counts)])
    for part in parts:
        fits = rope.value in [_part(width, part) for width in (total, *own)]
        if part.given and part.value != 1 and not fits:
            fail(
                f"rotary_dim must have one value but got {rope.source} = {rope.value} and {part.source} = {part.value!r}"
            )
    return {"head_dim": total, "rotary_dim": rope, "start": _start(source, nope, stated)}


def _channels(
    source: Source, section: Section, head: Found, rope: Found | None, stated: Stated, asked: Asked
) -> Found:
    """The number of channels that rotate; a question if nothing says it."""
    facts, own = source.facts, section.get(keys.OWN_ROTARY_DIM)
    counts = whole(source.given(*keys.ROTARY_DIM) if own is None else [own])
    # A class that has no such key takes a part from the section alone; a number must agree with it.
    stray = facts.made_by is not None and not {"rotary_dim"} & {*facts.keys, *facts.known}
    found = [] if stray else counts
    part = section.get("partial_rotary_factor")
    if "partial_rotary_factor" in claimed_by(kind_of_rule(section)):
        part = None
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
    if facts.part == "factor" and part is None:
        every = "all of head_dim, as the code reads a factor only"
        found.append(Found(head.value, every, given=False))
    if facts.part == "sixths":
        found.append(Found(head.value // 6 * 6, f"the largest multiple of 6 up to {head.value}"))
    got = agreed("rotary_dim", found + whole(stated.argument("rotary_dim")))
    if got is None:
        if default is not None:
            advice = f"rotary_dim={default.value}, the {facts.owner}, or the number that do"
            asked["rotary_dim"] = Question(_ROTATE, advice, default.value)
            return Found(min(default.value, head.value), "", given=False)
        if source.family is None and "slice" not in source.knows:
            return _ask_for_slice(head, stated, asked)
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


def _ask_for_slice(head: Found, stated: Stated, asked: Asked) -> Found:
    first = whole(stated.argument("start"), least=0)
    count = max(int(head.value - (first[0].value if first else 0)) // 2 * 2, 2)
    of_head = "of a head rotate, or the number that do, with start if they are not the first"
    if first:
        of_head = f"from {first[0].value} on rotate, or the number that do"
    advice = f"rotary_dim={count} if all {count} channels {of_head}"
    asked["rotary_dim"] = Question(_ROTATE, advice, count)
    return Found(count, "", given=False)


def _start(source: Source, found: Found, stated: Stated) -> Found:
    """The first channel that rotates; an argument must agree if keys or the family settle it."""
    for given in whole(stated.argument("start"), least=0):
        if source.family is None and not found.given:
            return given
        if given.value != found.value:
            fail(f"start must be {found.value} ({found.source}) but got {given.value}")
    return found


def _head_dim(source: Source, layer: Layer, asked: Asked) -> Found | None:
    """The width of a head; a question if no key gives it, an error if two give different ones."""
    facts, section = source.facts, layer.section or {}
    if keys.OWN_HEAD_DIM in section:
        return whole([section[keys.OWN_HEAD_DIM]], WIDEST)[0]
    ignored = "head_dim" in facts.ignored
    plain = not {*facts.width} - {*keys.HIDDEN, *keys.HEADS}
    own = ignored or facts.head_dim == "computed" or not plain
    # A class reads the keys that it has.
    of_class = {*facts.keys, *facts.beside, *facts.also, *facts.also.values()}
    mine = [key for key in keys.HEAD_DIM if not own and (not facts.made_by or key in of_class)]
    given = whole(source.given(*mine), WIDEST)
    more = [key for key in (_HEAD if own else keys.HEAD_DIM) if key not in (*mine, *facts.ignored)]
    others = whole(source.given(*keys.HEAD_DIM_ELSEWHERE, *more), WIDEST)
    found = given or (others if source.family is None else [])
    if not found and not own and (default := source.width(*keys.HEAD_DIM)):
        found = [default]
    for name, inner in source.values.items():  # of some layers: attention_other_setting of Step 3.5
        settings = "attention" in str(name) and not str(name).endswith("_config")
        if settings and isinstance(inner, Mapping) and inner.get("head_dim") is not None:
            others = others + whole([Found(inner["head_dim"], source.shown(f"{name}.head_dim"))])
    if not found and (derived := _derived(source, own, asked)):
        found = [derived]
    return agreed("head_dim", found + others) if found else None


def _derived(source: Source, own: bool, asked: Asked) -> Found | None:
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
        asked["head_dim"] = Question("the width of a head", f"a config with {advice}", None)
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


def by_object(source: Source) -> str:
    """The advice to pass an object of the class, which has every default; empty for other code."""
    if source.facts.made_by is None:
        return ""
    return (
        f"; transformers.AutoConfig.from_pretrained(…) gives what {source.facts.made_by} fills in"
    )


# --- pairing --------------------------------------------------------------------------------------


def pairing_of(source: Source, stated: Stated, asked: Asked) -> Found:
    """The pairing: of the argument, a conversion record, a key, or the family, in this order."""
    for given in stated.argument("interleaved"):
        if not isinstance(given.value, bool):
            raise bad_type(f"interleaved must be a bool or None but got {given.value!r}")
        return given
    if source.recorded is not None:
        return Found(source.recorded.interleaved, f"the conversion record {source.recorded.where}")
    got, facts = stated_pairing(source), source.facts
    if source.family is not None:
        own = Found(facts.interleaved, f"{source.name} ({facts.source})")
        if got is not None and facts.pairing_key is None and got.value != facts.interleaved:
            fail(
                f"interleaved must have one value but got {got.value} from {got.source} and {facts.interleaved} from "
                f"{source.name}; pass interleaved={got.value} if the key is right"
            )
        return own if got is None or facts.pairing_key is None else got
    if got is None:
        advice = (
            "interleaved=False if channel i is paired with i + rotary_dim / 2, as in Llama, or interleaved=True if adjacent "
            "channels are paired, as in GPT-J"
        )
        asked["interleaved"] = Question("the pairing of channels", advice, False)
    return got or Found(False, "", given=False)


def stated_pairing(source: Source) -> Found | None:
    """The pairing that the keys of a configuration state; None without one."""
    found = []
    for key, neighbours in keys.PAIRING.items():
        for given in source.given(key):
            if not isinstance(given.value, bool):
                raise bad_type(f"{given.source} must be a bool but got {given.value!r}")
            found.append(given._replace(value=given.value == neighbours))
    return agreed("interleaved", found)


# --- axes -----------------------------------------------------------------------------------------

# The axes of images, of a number of pairs: axis 0 is the row, axis 1 the column; of videos, time is before them.
_OF_IMAGES: dict[str | None, Callable[[int], Axes]] = {
    "alternating": lambda n: Axes(2, tuple((1 - k % 2, k // 2, n) for k in range(n))),
    "blocks": lambda n: Axes.blocks((n // 2, n // 2)),
    "columns, rows": lambda n: Axes(2, tuple((1 - 2 * k // n, k % (n // 2), n) for k in range(n))),
    "strided": lambda n: Axes.strided(2, n),
    "thirds": lambda n: Axes.blocks((n // 3,) * 3),
}


def axes_of(source: Source, section: Section, rotary_dim: int) -> Found:
    """The axes, which assign a coordinate to each pair."""
    facts, pairs = source.facts, rotary_dim // 2
    kind = facts.axes
    if kind in _OF_IMAGES:
        if pairs % 2 and kind != "thirds":
            fail(
                f"the number of pairs must be even, as {source.name} divides them between two axes, but got {pairs}"
            )
        return Found(_OF_IMAGES[kind](pairs), f"{source.name} ({facts.source})")
    several = f"{source.name} is not known to have several axes"
    for named in (section[key] for key in keys.TYPE if key in section):
        if named.value == "axial":
            fail(f"{named.source} is 'axial', but {several}")
    sizes = agreed("mrope_section", _both(source, section, keys.SECTIONS))
    flag = agreed("mrope_interleaved", _both(source, section, keys.SECTIONS_INTERLEAVED))
    if sizes is None and facts.sections is not None:
        sizes = Found(list(facts.sections), f"constant of the code of {source.name}")
    if sizes is None:
        if kind is not None and not facts.axes_with_sections:
            fail(
                f"{source.name} has positions of three coordinates, so the config must give mrope_section"
            )
        if flag is not None:
            fail(f"{flag.source} must come with mrope_section but the config has none")
        return Found(None, "one coordinate per position", given=False)
    woven = kind == "interleaved sections"
    if kind is None:
        if flag is None:
            fail(
                f"{sizes.source} must come with mrope_interleaved, as {several}: false if the pairs of a coordinate are "
                "adjacent, true if they alternate"
            )
        woven = flag.value
    elif flag is not None and flag.value != woven:
        fail(f"{flag.source} must be {woven} for {source.name} but got {flag.value!r}")
    if facts.time_first and isinstance(sizes.value, list | tuple):
        sizes = sizes._replace(value=[*sizes.value[1:], *sizes.value[:1]])
    return Found(_sections(kind, sizes, woven, pairs), sizes.source)


def _both(source: Source, section: Section, names: tuple[str, ...]) -> list[Found]:
    return [section[name] for name in names if name in section] + source.given(*names)


def _sections(kind: str | None, found: Found, woven: bool, pairs: int) -> Axes:
    """Axes by the number of pairs of each coordinate."""
    if not isinstance(found.value, list | tuple):
        raise bad_type(f"{found.source} must be a list but got {found.value!r}")
    sizes = tuple(one.value for one in whole([Found(size, found.source) for size in found.value]))
    blocks = kind == "unequal blocks"
    if sum(sizes) > max(_MOST_PAIRS, pairs) or (blocks and sum(sizes) != pairs):
        fail(f"{found.source} must sum to {pairs} pairs, half of rotary_dim, but got {list(sizes)}")
    if blocks:
        return Axes.blocks(sizes)
    if kind != "rows and columns, then time":
        return Axes.sections(sizes, interleaved=woven)
    if len(sizes) != 3 or sizes[0] != sizes[1]:
        fail(
            f"{found.source} must give three numbers of pairs, the first two equal, but got {list(sizes)}"
        )
    still = sizes[0] + sizes[1]
    owners = [1 + k % 2 if k < still else 0 for k in range(sum(sizes))]
    return Axes(3, tuple((axis, k, 2 * sum(sizes)) for k, axis in enumerate(owners)))
