"""Find keys that could be about the rotation and that nothing reads: misspelt ones, and those of other code."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping

from .._errors import outside, sentence
from ..frequencies import NTK, YaRN
from . import keys
from .layers import Layer, flagged, flags_key
from .scaling import claimed_by, kind_of_rule
from .source import OPERATION, Section, Source, fail

# Key -> what it may change: "layers", "a base" or "a width or the pairing"; "" if only its name is about the rotation.
Unknown = dict[str, str]


def refuse_unknown(source: Source, layers: list[Layer], strict: bool) -> None:
    """Raise an error for keys that are not known; a warning for some if not strict.

    Raises:
        ValueError: see above.
    """
    sections = [layer.section for layer in layers if layer.section is not None]
    unknown = {
        **_outside(source),
        **{path: effect for section in sections for path, effect in _inside(section).items()},
    }
    # A base or a part that is that of all layers, under a name that the class does not read, changes nothing.
    for names, key in ((keys.BASE, "rope_theta"), (keys.FRACTION, "partial_rotary_factor")):
        read = [section[key].value if key in section else None for section in sections]
        for name in names if source.facts.made_by and read else ():
            if all(value == source.values.get(name) for value in read):
                unknown.pop(source.shown(name), None)
    for effect, doing, way in _EFFECTS:
        found = [name for name in unknown if unknown[name] == effect]
        text = (
            f"every key {doing} must be known but got {', '.join(map(_with_guess, found))}; {way}"
        )
        if found and (effect or strict):
            fail(text)
        if found:
            warnings.warn(sentence(OPERATION, text), UserWarning, stacklevel=outside())


_BY_HAND = "pass a config without it only if it has no effect, or make a"
_FOR_EACH = f"{_BY_HAND} spec by hand for each kind of layers"
_EFFECTS = (
    ("layers", "that may say which layers rotate", _FOR_EACH),
    ("base", "that may give a base", _FOR_EACH),
    ("channels", "that may give a width or the pairing", f"{_BY_HAND} RopeSpec by hand"),
    ("", "about RoPE", "strict=False ignores them with a warning"),
)


def _outside(source: Source) -> Unknown:
    """The keys of the outer level."""
    unknown: Unknown = {}
    for key, value in source.unread.items():
        inner = str(key).partition(".")[2] or str(key)  # in GGUF, after the architecture
        if _is_unknown(inner, value, keys.INERT_OUTSIDE.keys()):
            unknown[str(key)] = keys.effect(inner, value)
    facts = source.facts
    moved = {*facts.bases, *facts.fractions, *facts.spare}
    read = {*keys.READ_OUTSIDE, *facts.known, *moved, *facts.keys, *facts.lists}
    read |= {*facts.wide.values(), *filter(None, (facts.scaled, flags_key(source)))}
    if facts.made_by:  # it reads some spellings only
        others = {k for k in keys.FRACTION if source.values.get(k) != 1}
        read -= (others if "base" in facts.fixed else others | {*keys.BASE}) - moved
    listed = source.values.get("no_rope_layers")
    every_layer = isinstance(listed, list | tuple) and all(listed)
    # Read by the code, or the caller states which layers have RoPE.
    if flagged(source) or every_layer or facts.flags == "no_rope_layers":
        read |= {"no_rope_layers", "no_rope_layer_interval"}
    single = source.values.get("per_layer_config")
    each = {**source.values, "per_layer_config": None}
    for number, inner in single.items() if isinstance(single, Mapping) else ():
        for key in inner if isinstance(inner, Mapping) else ():
            each[f"per_layer_config.{number}.{key}"] = inner[key]
    for key, value in each.items():
        if not isinstance(key, str) or (key.endswith("_config") and _is_part(value)):
            continue
        if _is_unknown(key, value, read):
            unknown[source.shown(key)] = keys.effect(key, value)
    return unknown | _near_widths(source)


def _near_widths(source: Source) -> Unknown:
    """Keys that may be misspelt widths, where a default of the class would stand in for them."""
    facts = source.facts
    wanted = ("head_dim", *(facts.width if source.prefix else ())) if facts.made_by else ()
    others = {*facts.beside, *facts.keys, *keys.HEAD_DIM_ELSEWHERE, *wanted, "v_head_dim"}
    others |= {*keys.NOPE_DIM, *keys.ROPE_DIM}
    unknown: Unknown = {}
    for name in wanted:
        for key in source.values if not source.given(name) else ():
            if not isinstance(key, str) or key in others:
                continue
            if (source.prefix and name in key) or difflib.get_close_matches(key, [name], 1, 0.9):
                unknown[source.shown(key)] = "channels"
    return unknown


def _is_part(value: object) -> bool:
    """Return True if a nested mapping describes a part of a model, such as the vision tower."""
    names = (*keys.LAYERS, *keys.HIDDEN, *keys.HEADS)
    return isinstance(value, Mapping) and any(name in value for name in names)


def _is_unknown(key: str, value: object, known: Collection[object]) -> bool:
    """Return True if a key, or one that its value holds, could be about the rotation and is not known."""
    name = key.rpartition(".")[2]
    if value is None or name in known or value is keys.SWITCHES.get(name):
        return False
    if (name, _plain(value)) in keys.INERT_OUTSIDE_VALUES:
        return False
    return keys.about_rotation(key) or keys.holds_rotation(value)


def _inside(section: Section) -> Unknown:
    """The keys of a rope section."""
    rule = kind_of_rule(section)
    known = {"rope_theta", *keys.TYPE, *keys.FRACTION, *keys.SECTIONS, *keys.SECTIONS_INTERLEAVED}
    known |= {*keys.INERT, keys.OWN_HEAD_DIM, keys.OWN_ROTARY_DIM, *claimed_by(rule)}
    if rule is YaRN:
        known |= {"attn_factor", "apply_yarn_scaling"}
    if rule is NTK and "alpha" in section:
        known = (known | keys.INERT_BESIDE_ALPHA) - {"factor"}
    base = section.get("rope_theta")
    return {
        found.source: keys.effect(key, found.value)
        for key, found in section.items()
        if key not in known
        and (key, _plain(found.value)) not in keys.INERT_VALUES
        and not (base is not None and key in keys.BASE and found.value == base.value)
    }


def _with_guess(name: str) -> str:
    """An unknown key, with the known one that it is like."""
    own = name.rpartition(".")[2]
    like = [] if own in keys.NAMES else difflib.get_close_matches(own, keys.NAMES, 1, 0.85)
    return f"{name} (perhaps {like[0]})" if like else name


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | str) else None
