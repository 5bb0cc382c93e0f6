"""Read which channels are paired, and the coordinate of a position by which each pair rotates."""

from __future__ import annotations

from collections.abc import Callable

from .._errors import bad_type
from ..axes import Axes
from . import keys
from .source import Found, Section, Source, agreed, boolean, fail, integers

# Limit on mrope_section, so that a wrong number raises an error before it takes memory and time.
_MOST_PAIRS = 32768


def pairing_of(source: Source) -> Found:
    """The pairing: of the argument, a conversion record, a key, or the family, in this order."""
    for given in source.stated.argument("interleaved"):
        if not isinstance(given.value, bool):
            raise bad_type(f"interleaved must be a bool or None but got {given.value!r}")
        return given
    if source.recorded is not None:
        return Found(source.recorded.interleaved, source.recorded.source)
    got, facts = stated_pairing(source), source.facts
    if source.family is None:
        if got is not None:
            return got
        advice = (
            "interleaved=False if channel i is paired with i + rotary_dim / 2, as in Llama, or interleaved=True if adjacent "
            "channels are paired, as in GPT-J"
        )
        source.ask("interleaved", "the pairing of channels", advice, False)
        return Found(False, "", given=False)
    if got is not None and facts.pairing_key is not None:
        return got
    if got is not None and got.value != facts.interleaved:
        fail(
            f"interleaved must have one value but got {got.value} from {got.source} and {facts.interleaved} from "
            f"{source.name}; pass interleaved={got.value} if the key is right"
        )
    return Found(facts.interleaved, f"{source.name} ({facts.source})")


def stated_pairing(source: Source) -> Found | None:
    """The pairing that the keys of a configuration state; None without one."""
    found = [
        given._replace(value=boolean(given) == neighbours)
        for key, neighbours in keys.PAIRING.items()
        for given in source.given(key)
    ]
    return agreed("interleaved", found)


# --- axes ------------------------------------------------------------------------------------------

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
    sizes = tuple(integers(found))
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
