"""Translate configurations of diffusers' transformers to the key names of transformers.

The class that a configuration names, ``_class_name``, determines the pairing, how pairs are divided
among coordinates, and any constant of its code. These facts are in diffusers.json, class ->
:class:`Transformer`; each entry names the code that it was read from. `tests/unit/config/test_diffusers.py`
runs that code and compares its rotation with the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._errors import bad_type
from .families import Family
from .keys import table
from .source import WIDEST, Found, Source, fail, integers, whole

CLASS = "_class_name"


@dataclass(frozen=True)
class Transformer:
    """Facts about one class of diffusers 0.42.

    Attributes:
        interleaved: the pairing, as in :class:`tightrope.RopeSpec`.
        source: the code that makes the angles: ``file: class or function``.
        keys: name in transformers -> the key of this class. Without one for ``rope_theta`` the base is 10000.
        widths: the key of the number of channels of each coordinate.
        default: these numbers if the key is missing or null: files may be older than it.
        split: the rule by which the code divides a head among coordinates, if no key does; see ``_SPLITS``.
        part: the fraction of a head that rotates; or ``"widths"``, their sum. All of it without both.
        inert: keys that could be about the rotation but do not affect it: a table's length, the choice of
            coordinates, the time step of the diffusion, what the class does not use.
        switch: a key that must be True, as the model has no RoPE otherwise.
        refused: why no spec can express this class; None for all others.
    """

    interleaved: bool = False
    source: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    widths: str | None = None
    default: list[int] | None = None
    split: str | None = None
    part: str | float | None = None
    inert: list[str] = field(default_factory=list)
    switch: str | None = None
    refused: str | None = None


_TABLE = table("diffusers")
TRANSFORMERS = {name: Transformer(**facts) for name, facts in _TABLE.items()}
_UNKNOWN = Transformer(refused="the table of diffusers' transformers does not contain it")


# The number of pairs of each coordinate, by the name of the rule.
_SPLITS: dict[str, Callable[[int], list[int]]] = {
    "halves": lambda head_dim: [head_dim // 4, head_dim // 4],
    "thirds": lambda head_dim: [head_dim // 2 - head_dim // 6 * 2, head_dim // 6, head_dim // 6],
    "quarter for time": lambda head_dim: [head_dim // 8] + [head_dim // 8 * 3 // 2] * 2,
}


def recognised(values: Mapping[str, Any]) -> bool:
    """Return True if a mapping is the configuration of a class of diffusers."""
    return CLASS in values and "model_type" not in values


def translated(values: Mapping[str, Any]) -> Source:
    """Read the configuration of a transformer of diffusers, by the table of classes."""
    name = f"{CLASS} {values[CLASS]!r}"
    facts = TRANSFORMERS.get(str(values[CLASS]), _UNKNOWN)
    if facts.refused is not None:
        return Source({}, Family(False, "", refused=facts.refused), name, seen=tuple(values))
    read = {*facts.keys.values(), *filter(None, (facts.widths, facts.switch))}
    _check_complete(facts, values, name, read)
    spelled = dict(facts.keys)
    outer = {name: values[key] for name, key in facts.keys.items()}
    origin = f"{name} ({facts.source})"
    sizes, sizes_from = _sizes(facts, values, origin)
    if sizes is not None:
        outer["mrope_section"], spelled["mrope_section"] = sizes, sizes_from
    if facts.part == "widths" and sizes is not None:
        outer["rotary_dim"], spelled["rotary_dim"] = 2 * sum(sizes), f"the sum of {facts.widths}"
    elif facts.part is not None:
        outer["partial_rotary_factor"], spelled["partial_rotary_factor"] = facts.part, origin
    scale = outer.pop("rope_scale", None)
    if scale is not None and sizes is not None:
        outer["rope_scaling"] = {"rope_type": "given", "inv_freq": _scaled(sizes, scale)}
        spelled |= dict.fromkeys(("rope_scaling.rope_type", "rope_scaling.inv_freq"), "rope_scale")
    family = Family(
        facts.interleaved,
        facts.source,
        base=None if "rope_theta" in facts.keys else 10000.0,
        axes=None if sizes is None else "sections" if scale is not None else "unequal blocks",
    )
    unread = {key: one for key, one in values.items() if key not in {*read, *facts.inert}}
    return Source(outer, family, name, spelled, seen=tuple(values), unread=unread)


def _check_complete(
    facts: Transformer, values: Mapping[str, Any], name: str, read: set[str]
) -> None:
    """Raise an error if a key is missing, or the one that switches RoPE on is off."""
    absent = {key for key in read if values.get(key) is None}
    if facts.default is not None:
        absent.discard(str(facts.widths))
    if absent:
        fail(
            f"{name} must come with {', '.join(sorted(absent))} but has only the keys "
            f"{', '.join(sorted(map(str, values)))}"
        )
    if facts.switch is not None and values[facts.switch] is not True:
        fail(f"the config has no RoPE: {facts.switch} is {values[facts.switch]!r}")


def _sizes(
    facts: Transformer, values: Mapping[str, Any], origin: str
) -> tuple[list[int] | None, str]:
    """The number of pairs of each coordinate, and its source; None for one coordinate."""
    if facts.split is not None:
        key = facts.keys["head_dim"]
        whole([Found(values[key], key)], WIDEST)
        return _SPLITS[facts.split](values[key]), origin
    if facts.widths is None:
        return None, origin
    key, widths = facts.widths, values.get(facts.widths)
    source = f"half of {key}"
    if widths is None:
        widths, source = facts.default, origin
    widths = integers(Found(widths, key))
    whole([Found(sum(widths), f"the sum of {key}")], WIDEST)
    if any(width % 2 for width in widths):
        fail(f"{key} must hold even numbers but got {widths}")
    return [width // 2 for width in widths], source


def _scaled(sizes: list[int], scale: object) -> list[float]:
    """The frequencies of Cosmos: NTK-aware scaling, with a factor for each coordinate."""
    rule = "rope_scale must be a list of numbers from 1e-9 to 1e9, one per coordinate, but got"
    if not isinstance(scale, list | tuple) or len(scale) != len(sizes):
        raise bad_type(f"{rule} {scale!r}")
    for one in scale:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 1e-9 <= one <= 1e9:
            fail(f"{rule} {scale!r}")
    if min(sizes) < 2:
        fail(f"each coordinate must have at least two pairs but got {sizes}")
    return [
        (10000.0 * factor ** (size / (size - 1))) ** (-pair / size)
        for factor, size in zip(scale, sizes, strict=True)
        for pair in range(size)
    ]
