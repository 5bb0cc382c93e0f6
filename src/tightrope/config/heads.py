"""Read the rotated slice of a head, the base, the pairing and the axes from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .._errors import as_real, bad_type
from ..axes import Axes
from ..frequencies import Rule
from . import keys
from .scaling import Fact, claimed_by
from .source import (
    BASE,
    TRIED,
    Arguments,
    Found,
    Part,
    Source,
    Stated,
    agreed,
    fail,
    ignored,
    settle,
    whole,
)

# Far above the head width of any model: a larger one is an error before anything of its size is made.
_WIDEST = 65536
# Limit on mrope_section, so that a wrong number raises an error before it takes memory and time.
_MOST_PAIRS = 32768


def base_of(source: Source, part: Part) -> tuple[float, str]:
    """The base and its source: a key, or a constant of the family's code."""
    tried = (TRIED.get() or {}).get(BASE)
    if tried is not None:
        return float(tried), "tried"
    family = source.family
    got = agreed("base", part.inner(keys.BASE) + source.outer(part.base))
    if got is not None:
        read = None if family is None else family.bases
        own = all(key in keys.BASE for key in part.base)
        if own and read is not None and _is_stray(source, part, "rope_theta", read):
            ways = " or ".join([*read, "rope_parameters.rope_theta"])
            got = settle(
                f"the base must stand where the code of {source.name} reads it, in {ways}, but got "
                f"{got[1]!r} from {got[0]}",
                ("for other code, which reads it", got),
            )
        elif family is not None and "base" in family.fixed and got[1] != family.base:
            got = ignored(source, "base", f"{family.base:g}", got)
        if as_real(got[1]) is None:
            raise bad_type(f"{got[0]} must be a number but got {got[1]!r}")
        return got[1], got[0]
    if family is not None and family.base is not None:
        return family.base, f"constant of the code of {source.name}"
    null = [path for key, (path, _) in part.entries.items() if key in keys.BASE]
    null += [source.shown(key) for key in part.base if key in source.values]
    if family is not None and family.null_base and null:
        fail(f"the config has no RoPE: {null[0]} is null")
    ways = ", ".join(part.base if part.base and part.base != keys.BASE else keys.USUAL_BASE)
    inside = sorted(path for path, value in part.entries.values() if value is not None)
    sure = "" if family is not None else ", if its model has RoPE"
    of_paper = "if the base is 10000" if family is not None else "if it has RoPE of base 10000"
    base: float = settle(
        f"the config must give the base of the frequencies{sure}: add one of {ways} to its keys, which are "
        f"{_some([*sorted(source.seen), *inside])}",
        (f"{of_paper}, as in the paper", 10000.0),
    )
    return base, "tried"


def _is_stray(source: Source, part: Part, inside: str, outside: tuple[str, ...]) -> bool:
    """Return whether neither key by which the code of a family takes a fact is there: in the section, or outside."""
    return not part.inner([inside]) and not source.outer(outside)


def _some(names: list[str], most: int = 8) -> str:
    """Join the first names and count the rest: configurations have dozens of keys."""
    more = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {more} more" if more > 0 else "")


def slice_of(
    source: Source, part: Part, rule: type[Rule] | None, stated: Stated
) -> tuple[tuple[int, int, int], list[Fact]]:
    """(head_dim, rotary_dim, start) and their sources."""
    family = source.family
    rope, nope = whole(source.outer(keys.ROPE_DIM)), whole(source.outer(keys.NOPE_DIM))
    chosen = argument(stated, "rotary_dim", 1)
    last = family is not None and family.start == "last"
    if not last and (rope or nope or (family is not None and family.start == "nope")):
        return _latent_slice(source, part, rope, nope, stated)
    head_dim, head_from = head_dim_of(source, part)
    found: list[Found] = [
        *whole(part.inner([keys.OWN_ROTARY_DIM]) or source.outer(keys.ROTARY_DIM)),
        *rope,
    ]
    claimed = claimed_by(rule)
    _refuse_stray_part(source, part, claimed)
    for path, fraction in _fractions(source, part, claimed):
        if int(head_dim * fraction) < 2:
            fail(f"{path} must give at least 2 of {head_dim} channels but got {fraction!r}")
        found.append((f"{path} = {fraction!r} of {head_dim}", int(head_dim * fraction)))
    how = "" if family is None else family.fraction
    if (not found and how == "optional") or (
        how == "factor" and not _fractions(source, part, claimed)
    ):
        found.append(("all of head_dim", head_dim))
    if how == "half" and not part.inner(keys.FRACTION):
        found.append(
            (f"half of {head_dim}, which {source.name} sets in place of a key", head_dim // 2)
        )
    if how == "sixths":
        found.append((f"the largest multiple of 6 up to {head_dim}", head_dim // 6 * 6))
    got = agreed("rotary_dim", found + chosen)
    if got is not None and family is not None and family.fraction == "none" and got[1] < head_dim:
        advice = "make a RopeSpec by hand"
        if not (family.layers or family.axes or family.scaling or family.base or family.width):
            advice = (
                f"pass a config without its model_type, with interleaved={family.interleaved} and "
                f"rope_layers='all'"
            )
        got = settle(
            f"rotary_dim must be {head_dim}, as the code of {source.name} rotates all channels of a head, but "
            f"got {got[1]} from {got[0]}; for other code, which rotates a part, {advice}",
            ("by hand", got),
        )
    if got is None:
        # An object of the class has the class's defaults: without a key, all channels rotate.
        needed = family is not None and family.fraction == "required"
        needed = needed and (source.config is None or bool(family and family.axes))
        if needed and not claimed & {*keys.FRACTION}:
            ways = ", ".join([*keys.FRACTION, *keys.ROTARY_DIM])
            settle(
                f"{source.name} rotates a part of each head, so the config must give one of {ways}",
                ("for example, if it is half", Arguments(rotary_dim=max(head_dim // 4, 1) * 2)),
            )
        got = ("all of head_dim", head_dim)
    rotary_dim, rotary_from = got[1], got[0]
    start = (0, "from the first channel")
    if last:
        start = (head_dim - rotary_dim, f"{source.name} rotates the last channels")
    start = _start(start, stated, settled=family is not None)
    return (head_dim, rotary_dim, start[0]), [
        ("head_dim", head_dim, head_from),
        ("rotary_dim", rotary_dim, rotary_from),
        ("start", *start),
    ]


def argument(stated: Stated, name: str, least: int) -> list[Found]:
    """An argument of from_config as if it were a key; empty for None."""
    value = getattr(stated, name)
    return [] if value is None else whole([(stated.origin(name), value)], least=least)


def _start(found: tuple[int, str], stated: Stated, settled: bool) -> tuple[int, str]:
    """The first channel that rotates; an argument must agree if keys or the family settle it."""
    for path, given in argument(stated, "start", 0):
        if not settled:
            return given, path
        if given != found[0]:
            fail(f"start must be {found[0]} ({found[1]}) but got {given}")
    return found


def _fractions(source: Source, part: Part, claimed: set[str]) -> list[Found]:
    free = [key for key in keys.FRACTION if key not in claimed]
    found = part.inner(free) + source.outer(free)
    for path, fraction in found:
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not number or not 0 < fraction <= 1:
            fail(f"{path} must be above 0 and at most 1 but got {fraction!r}")
    return found


def _refuse_stray_part(source: Source, part: Part, claimed: set[str]) -> None:
    """Raise an error if the part of the channels has none of the keys that the code of the family reads."""
    family = source.family
    if family is None or family.parts is None or family.fraction == "none":
        return
    found = _fractions(source, part, claimed)
    if found and _is_stray(source, part, "partial_rotary_factor", family.parts):
        ways = " or ".join([*family.parts, "rope_parameters.partial_rotary_factor"])
        path, fraction = found[0]
        settle(
            f"the part of the channels that rotates must stand where the code of {source.name} reads it, in "
            f"{ways}, but got {fraction!r} from {path}",
            ("for other code, which reads it", None),
        )


def _latent_slice(
    source: Source, part: Part, rope: list[Found], nope: list[Found], stated: Stated
) -> tuple[tuple[int, int, int], list[Fact]]:
    """The slice of latent attention: it comes after the channels without RoPE."""
    if not rope or not nope:
        has = ", ".join(path for path, _ in rope + nope) or "neither"
        fail(
            f"latent attention must have {keys.NOPE_DIM[0]} and {keys.ROPE_DIM[0]} but the config "
            f"has {has}"
        )
    width, start = rope[0][1], nope[0][1]
    total = width + start
    both = (f"{nope[0][0]} + {rope[0][0]}", total)
    agreed(
        "head_dim",
        whole([both], _WIDEST) + whole(source.outer(["qk_head_dim"])),
        choose=False,
    )
    for path, value in whole(source.outer((*keys.HEAD_DIM, *keys.HEAD_DIM_ELSEWHERE))):
        if value not in (width, total):
            agreed("head_dim", [(path, value), both], choose=False)
    chosen = argument(stated, "rotary_dim", 1)
    widths = [rope[0], *whole(source.outer(keys.ROTARY_DIM)), *chosen]
    agreed("rotary_dim", widths, choose=False)
    for path, fraction in _fractions(source, part, set()):
        if fraction != 1 and int(total * fraction) != width:
            fail(
                f"rotary_dim must have one value but got {rope[0][0]} = {width} and {path} = {fraction!r}"
            )
    return (total, width, start), [
        ("head_dim", total, both[0]),
        ("rotary_dim", width, rope[0][0]),
        ("start", *_start((start, nope[0][0]), stated, settled=True)),
    ]


def head_dim_of(source: Source, part: Part) -> tuple[int, str]:
    """The width of a head and its source; an error if another key gives another width."""
    if part.head_dim is not None:
        whole([part.head_dim], _WIDEST)
        return part.head_dim[1], part.head_dim[0]
    family = source.family
    own = family is not None and (bool(family.width) or family.head_dim == "computed")
    given = [] if own else whole(source.outer(keys.HEAD_DIM), _WIDEST)
    more = ("head_dim", "head_size") if own else ()
    others = whole(source.outer((*keys.HEAD_DIM_ELSEWHERE, *more)), _WIDEST)
    found = given or (others if family is None else []) or _derived(source)
    for name, inner in source.values.items():  # of some layers: attention_other_setting of Step 3.5
        settings = "attention" in str(name) and not str(name).endswith("_config")
        if settings and isinstance(inner, Mapping) and inner.get("head_dim") is not None:
            others += whole([(source.shown(f"{name}.head_dim"), inner["head_dim"])])
    path, width = agreed("head_dim", found + others) or found[0]
    return width, path


def _derived(source: Source) -> list[Found]:
    """The width of a head that no key gives: hidden size / heads."""
    family = source.family
    if family is not None and family.head_dim == "required":
        settle(
            f"{source.name} has a head_dim other than hidden size / heads, so the config must "
            f"give {keys.HEAD_DIM[0]}",
            ("if it is hidden size / heads all the same", None),
        )
    own = [(key,) for key in family.width] if family is not None else []
    widths, *counts = own or (keys.HIDDEN, keys.HEADS)
    hidden = agreed("hidden size", whole(source.outer(widths)))
    found = [agreed("the number of heads", whole(source.outer(names))) for names in counts]
    divisors = [count for count in found if count is not None]
    if hidden is None or len(divisors) < len(counts):
        ways = " and ".join([widths[0], *(names[0] for names in counts)])
        direct = "" if own else f"one of {', '.join(keys.HEAD_DIM)}, or by "
        fail(
            f"the config must give the width of a head, by {direct}{ways}, but its keys are "
            f"{_some(sorted(source.seen))}"
        )
    if not divisors:
        return whole([hidden], _WIDEST)
    total = math.prod(count for _, count in divisors)
    if hidden[1] % total:
        by = " * ".join(path for path, _ in divisors)
        fail(f"{hidden[0]} must be a multiple of {by} but got {hidden[1]!r} and {total!r}")
    names, numbers = zip(hidden, *divisors, strict=True)
    path = f"{' / '.join(names)} = {' / '.join(map(str, numbers))}"
    return whole([(path, hidden[1] // total)], _WIDEST)


def pairing_of(source: Source, stated: Stated) -> tuple[bool, str]:
    """The pairing and its source: the argument, a conversion record, a key, or the family, in this order."""
    interleaved = stated.interleaved
    if interleaved is not None:
        if not isinstance(interleaved, bool):
            raise bad_type(f"interleaved must be a bool or None but got {interleaved!r}")
        return interleaved, stated.origin("interleaved")
    if source.recorded is not None:
        return source.recorded.interleaved, f"the conversion record {source.recorded.where}"
    got = stated_pairing(source)
    family = source.family
    if got is None and family is not None:
        return family.interleaved, f"{source.name} ({family.source})"
    if got is None:
        fail("the config must give the pairing of channels")  # questions.py has asked for it
    free = family is None or family.pairing_key is not None
    if not free and family is not None and got[1] != family.interleaved:
        settle(
            f"interleaved must have one value but got {got[1]} from {got[0]} and "
            f"{family.interleaved} from {source.name}; pass interleaved={got[1]} if the key is right",
            ("", Arguments(interleaved=got[1])),
            (f"if {source.name} is right", Arguments(interleaved=family.interleaved)),
        )
    return got[1], got[0]


def stated_pairing(source: Source) -> Found | None:
    """The key that gives the pairing, and whether it is interleaved; None without such a key."""
    found = []
    for key, neighbours in keys.PAIRING.items():
        for path, value in source.outer([key]):
            if not isinstance(value, bool):
                raise bad_type(f"{path} must be a bool but got {value!r}")
            found.append((path, value == neighbours))
    return agreed("interleaved", found)


# The axes of images, of a number of pairs: axis 0 is the row, axis 1 the column; of videos, time is before them.
_OF_IMAGES: dict[str | None, Callable[[int], Axes]] = {
    "alternating": lambda n: Axes(2, tuple((1 - k % 2, k // 2, n) for k in range(n))),
    "blocks": lambda n: Axes.blocks((n // 2, n // 2)),
    "columns, rows": lambda n: Axes(2, tuple((1 - 2 * k // n, k % (n // 2), n) for k in range(n))),
    "strided": lambda n: Axes.strided(2, n),
    "thirds": lambda n: Axes.blocks((n // 3,) * 3),
}


def axes_of(source: Source, part: Part, rotary_dim: int) -> tuple[Axes | None, str]:
    """The axes, which assign a coordinate to each pair, and their source."""
    family = source.family
    kind = family.axes if family is not None else None
    section = agreed("mrope_section", part.inner(keys.SECTIONS) + source.outer(keys.SECTIONS))
    flags = part.inner(keys.SECTIONS_INTERLEAVED) + source.outer(keys.SECTIONS_INTERLEAVED)
    flag = agreed("mrope_interleaved", flags)
    pairs = rotary_dim // 2
    if kind in _OF_IMAGES:
        if pairs % 2 and kind != "thirds":
            fail(
                f"the number of pairs must be even, as {source.name} divides them between two axes, but "
                f"got {pairs}"
            )
        return _OF_IMAGES[kind](
            pairs
        ), f"{source.name} ({family.source})" if family is not None else ""
    axial = [path for path, name in part.inner(keys.TYPE) if name == "axial"]
    if axial:
        halves = (
            "if the first half of the pairs rotates by the row and the rest by the column",
            None,
        )
        settle(
            f"{axial[0]} is 'axial', but {source.name} is not known to have several axes",
            *(() if pairs % 2 else (halves,)),
        )
        return Axes.blocks((pairs // 2, pairs // 2)), "tried"
    if section is None and family is not None and family.sections is not None:
        section = f"constant of the code of {source.name}", list(family.sections)
    if kind is None and section is None:
        if flag is not None:
            fail(f"{flag[0]} must come with mrope_section but the config has none")
        return None, "one coordinate per position"
    if section is None:
        fail(
            f"{source.name} has positions of three coordinates, so the config must give mrope_section"
        )
    if kind is None and flag is None:
        flag = (
            "tried",
            settle(
                f"{section[0]} must come with mrope_interleaved, as {source.name} is not known to have "
                f"several axes",
                ("if the pairs of a coordinate are adjacent", False),
                ("if they alternate", True),
            ),
        )
    woven = flag[1] if kind is None and flag is not None else kind == "interleaved sections"
    if flag is not None and flag[1] != woven:
        fail(f"{flag[0]} must be {woven} for {source.name} but got {flag[1]!r}")
    if not isinstance(section[1], list | tuple):
        raise bad_type(f"{section[0]} must be a list but got {section[1]!r}")
    sizes = tuple(whole([(section[0], size) for size in section[1]]) and section[1])
    blocks = kind == "unequal blocks"
    if sum(sizes) > max(_MOST_PAIRS, pairs) or (blocks and sum(sizes) != pairs):
        fail(f"{section[0]} must sum to {pairs} pairs, half of rotary_dim, but got {list(sizes)}")
    if blocks:
        return Axes.blocks(sizes), section[0]
    if kind == "rows and columns, then time":
        if len(sizes) != 3 or sizes[0] != sizes[1]:
            fail(
                f"{section[0]} must give three numbers of pairs, the first two equal, but got {list(sizes)}"
            )
        still = sizes[0] + sizes[1]
        owners = [1 + k % 2 if k < still else 0 for k in range(sum(sizes))]
        triples = tuple((axis, k, 2 * sum(sizes)) for k, axis in enumerate(owners))
        return Axes(3, triples), section[0]
    return Axes.sections(sizes, interleaved=woven), section[0]
