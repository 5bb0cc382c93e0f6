"""From a mapping in the names of transformers to a spec; every fact is found by a key or refused.

The rules are data elsewhere: what a key is called in keys.py, what the code of a family decides in
families.py, what a scaling rule needs in the rule itself (``Rule.names``, ``Rule.keys``). So a new rule
is read without a change here.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .._errors import sentence
from ..axes import Axes
from ..frequencies import NTK, RULES, Given, Linear, Rule, YaRN
from ..spec import RopeSpec
from . import keys
from .families import Family
from .specs import LayerSpecs, Provenance, Row

OPERATION = "from_config"

# A value and the path of the key that gave it.
Found = tuple[str, Any]
# A rope section: key -> what it says.
Entries = dict[str, Found]


def fail(message: str) -> NoReturn:
    """Raise a ValueError in the form of the library."""
    raise ValueError(sentence(OPERATION, message))


@dataclass(frozen=True)
class Source:
    """A configuration in the names of transformers, whatever format it came in.

    Attributes:
        values: its keys.
        family: what its family's code decides; None for an unknown one.
        name: who says so, for sentences: ``model_type 'llama'``.
        spelled: path in ``values`` -> what the user's file calls it, where they differ.
        prefix: what stands before every path: ``text_config.`` for a nested section.
        seen: the keys of the user's file.
    """

    values: Mapping[str, Any]
    family: Family | None
    name: str
    spelled: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    seen: tuple[str, ...] = ()

    def shown(self, path: str) -> str:
        """A path as the user knows it."""
        return self.spelled.get(path, self.prefix + path)

    def outer(self, spellings: Iterable[str]) -> list[Found]:
        """What the outer level says under any of some spellings; null says nothing."""
        return [
            (self.shown(key), self.values[key])
            for key in spellings
            if self.values.get(key) is not None
        ]


@dataclass(frozen=True)
class Part:
    """One layer type: which keys speak of it."""

    name: str | None
    entries: Entries
    base: tuple[str, ...] = keys.BASE
    head_dim: Found | None = None
    rope: bool = True


def read(
    source: Source,
    *,
    layer_type: str | None = None,
    strict: bool = True,
    interleaved: bool | None = None,
) -> Provenance:
    """Specs and their provenance from a configuration in the names of transformers."""
    _refuse_without_rope(source)
    unknown = _unknown_outside(source)
    parts, layers = _parts(source)
    made: dict[str | None, RopeSpec | None] = {}
    rows: list[Row] = []
    for part in parts:
        if part.rope:
            unknown += [path for path in _unknown_inside(source, part) if path not in unknown]
    if unknown:
        _complain(source, unknown, strict)
    for part in parts:
        if not part.rope:
            made[part.name] = None
            rows.append(Row(part.name, "no RoPE", None, source.name))
            continue
        spec, facts = _one(source, part, interleaved)
        made[part.name] = spec
        rows += [Row(part.name, *fact) for fact in facts]
    return _choose(made, rows, layers, layer_type)


def _choose(
    made: dict[str | None, RopeSpec | None],
    rows: list[Row],
    layers: tuple[str, ...] | None,
    layer_type: str | None,
) -> Provenance:
    specs = list(made.values())
    uniform = len(set(specs)) == 1
    if layer_type is not None:
        names = {name for name in made if name is not None} | set(layers or ())
        if layer_type not in names:
            has = ", ".join(sorted(names)) if names else "one type only, without a name"
            fail(f"layer_type must be one of the config's layer types but got {layer_type!r}; it has {has}")
        if layer_type in made:
            chosen = made[layer_type]
            rows = [row for row in rows if row.layer == layer_type]
        elif uniform:
            chosen = specs[0]
        else:
            chosen = None  # a layer without attention, or with another kind of it
            rows = []
        return Provenance(chosen, tuple(rows))
    if uniform and specs[0] is not None:
        first = next(iter(made))
        kept = tuple(row._replace(layer=None) for row in rows if row.layer == first)
        return Provenance(specs[0], kept)
    named = {name: spec for name, spec in made.items() if name is not None}
    return Provenance(LayerSpecs(named, layers), tuple(rows))


# --- what is there --------------------------------------------------------------------------------


def _refuse_without_rope(source: Source) -> None:
    family = source.family
    if family is not None and family.refused is not None:
        fail(f"{source.name} has no spec: {family.refused}")
    if source.values.get("alibi") is True:
        fail(f"the config has no RoPE: {source.shown('alibi')} is True")
    for key in keys.SWITCHES:
        if source.values.get(key) is False:
            fail(f"the config has no RoPE: {source.shown(key)} is False")
    if family is not None and not family.needs_position_type:
        return  # its code does not look at what follows, which is often a left-over
    said = source.outer(keys.POSITION_TYPE)
    for path, value in said:
        if value not in keys.POSITION_TYPES_WITH_ROPE:
            fail(f"the config has no RoPE: {path} is {value!r}")
    if family is not None and not said:
        fail(
            f"{source.name} has RoPE only if position_embedding_type says so, but the config "
            f"does not say it"
        )


_WORD = re.compile(r"[a-z0-9]+")


def _speaks_of_rope(key: str) -> bool:
    """Whether a key looks as if it were about RoPE; so that a misspelt one is not passed over."""
    words = _WORD.findall(key.lower())
    return any(word.startswith(("rope", "mrope", "rotary")) or word == "theta" for word in words)


def _is_rope_section(value: object) -> bool:
    """Whether a mapping looks like a rope section under a name that nobody knows."""
    if not isinstance(value, Mapping):
        return False
    if "rope_type" in value or any(key in value for key in keys.BASE):
        return True
    return value.get("type") in RULES


def _read_outside(source: Source) -> set[str]:
    """Keys of the outer level that are read in this configuration, or are known to have no say."""
    known = {
        *keys.BASE, *keys.SECTION, *keys.FRACTION, *keys.ROTARY_DIM, *keys.PAIRING, *keys.ROPE_DIM,
        *keys.SECTIONS, *keys.SECTIONS_INTERLEAVED, *keys.SWITCHES, *keys.INERT_OUTSIDE,
    }  # fmt: skip
    family = source.family
    if family is None:
        return known
    known |= keys.READ_BY_LAYERS.get(family.layers or "", frozenset())
    if family.start == "last":
        known |= keys.READ_BY_LAYERS["last"]
    return known


def _unknown_outside(source: Source) -> list[str]:
    known = _read_outside(source)
    unknown = []
    for key, value in source.values.items():
        if not isinstance(key, str) or key in known or value is None or key.endswith("_config"):
            continue
        if key == "no_rope_layers" and all(value):
            continue  # 1 for each layer that rotates, so the list says nothing
        if key == "no_rope_layer_interval" and "no_rope_layers" not in source.values:
            unknown.append(source.shown(key))
        elif key != "no_rope_layer_interval" and (_speaks_of_rope(key) or _is_rope_section(value)):
            unknown.append(source.shown(key))
    return unknown


def _complain(source: Source, unknown: list[str], strict: bool) -> None:
    text = (
        f"every key about RoPE must be known but got {', '.join(unknown)}; strict=False warns and "
        f"ignores"
    )
    if strict:
        fail(text)
    warnings.warn(sentence(OPERATION, text), UserWarning, stacklevel=_outside())


def _outside() -> int:
    """The stack level of the first caller outside this package, whichever function it called."""
    frame, level = sys._getframe(1), 1
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


def _agreed(what: str, found: list[Found]) -> Found | None:
    """The one value that several keys give; an error if they give several."""
    if not found:
        return None
    first = found[0]
    for path, value in found[1:]:
        if value != first[1]:
            fail(
                f"{what} must be said once but got {first[0]} = {first[1]!r} and {path} = {value!r}"
            )
    return first


# --- sections and layers --------------------------------------------------------------------------


def _sections(source: Source) -> tuple[Entries, dict[str, Entries | None]]:
    """The rope section, and those per layer type where it is nested."""
    flat: Entries = {}
    nested: dict[str, Entries | None] = {}
    labels = source.values.get("layer_types") or ()
    for name in keys.SECTION:
        section = source.values.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise TypeError(
                sentence(
                    OPERATION, f"{source.shown(name)} must be a mapping but got {section!r}"
                )
            )
        for key, value in section.items():
            path = f"{name}.{key}"
            if isinstance(value, Mapping):
                inner = {k: (source.shown(f"{path}.{k}"), v) for k, v in value.items()}
                nested[key] = _merged(nested.get(key) or {}, inner)
            elif value is None and key in labels:
                nested.setdefault(key, None)
            else:
                flat = _merged(flat, {key: (source.shown(path), value)})
    if nested and any(value is not None for _, value in flat.values()):
        fail(
            f"a rope section must hold keys or layer types but got both: "
            f"{', '.join(sorted(path for path, _ in flat.values()))} beside "
            f"{', '.join(sorted(nested))}"
        )
    return flat, nested


def _merged(one: Entries, other: Entries) -> Entries:
    merged = dict(one)
    for key, found in other.items():
        if key in merged and merged[key][1] is not None and found[1] is not None:
            _agreed(key, [merged[key], found])
        if key not in merged or merged[key][1] is None:
            merged[key] = found
    return merged


def _parts(source: Source) -> tuple[list[Part], tuple[str, ...] | None]:
    """The layer types of a configuration, and the type of each layer where it lists them."""
    flat, nested = _sections(source)
    listed = source.values.get("layer_types")
    layers = tuple(listed) if isinstance(listed, list | tuple) else None
    if nested:
        return _nested_parts(source, nested, layers), layers
    kind = source.family.layers if source.family is not None else None
    if kind is None:
        return [Part(None, flat)], layers
    return _LAYERS[kind](source, flat, layers)


def _nested_parts(
    source: Source, nested: dict[str, Entries | None], layers: tuple[str, ...] | None
) -> list[Part]:
    missing = sorted(set(layers or ()) - nested.keys() - keys.LAYERS_WITHOUT_ATTENTION)
    # DeepSeek V4 names its sections otherwise than its layers, all of them.
    if missing and not nested.keys().isdisjoint(layers or ()):
        fail(
            f"a rope section must be there for each layer type but the config has none for "
            f"{', '.join(missing)}"
        )
    parts = []
    for name, entries in nested.items():
        if entries is None:
            parts.append(Part(name, {}, rope=False))
            continue
        # Each layer type says its own base; the outer one is for those that do not.
        has_base = any(entries.get(key, ("", None))[1] is not None for key in keys.BASE)
        parts.append(
            Part(name, entries, () if has_base else keys.BASE, _head_dim_of(source, name, layers))
        )
    return parts


def _head_dim_of(source: Source, name: str, layers: tuple[str, ...] | None) -> Found | None:
    """The width of the heads of one layer type, where layers differ in that too (Gemma 4)."""
    found = source.outer(["global_head_dim"]) if name == "full_attention" else []
    per_layer = source.values.get("per_layer_config")
    if isinstance(per_layer, Mapping) and layers is not None:
        for index, overrides in per_layer.items():
            if layers[int(index)] == name and isinstance(overrides, Mapping):
                width = overrides.get("head_dim")
                if width is not None:
                    found.append((source.shown(f"per_layer_config.{index}.head_dim"), width))
    wide = source.family is not None and source.family.layers == "wide where full"
    if wide and name == "full_attention" and not found:
        _need(source, "global_head_dim")
    return _agreed("head_dim", found)


Layers = tuple[list[Part], "tuple[str, ...] | None"]


def _need(source: Source, key: str) -> None:
    if key not in source.values:
        fail(f"{source.name} has layers that differ, so the config must say {source.shown(key)}")


def _local_base(source: Source, flat: Entries, layers: tuple[str, ...] | None) -> Layers:
    # Gemma 3: scaling is for the layers that see everything.
    _need(source, "rope_local_base_freq")
    if layers is None:
        layers = _by_interval(source, "sliding_window_pattern", "full_attention", "sliding_attention")
    return [
        Part("full_attention", flat),
        Part("sliding_attention", {}, ("rope_local_base_freq",)),
    ], layers


def _two_bases(source: Source, flat: Entries, layers: tuple[str, ...] | None) -> Layers:
    # ModernBERT: windows without a base of their own use the global one.
    for key in ("global_rope_theta", "local_rope_theta"):
        _need(source, key)
    local = "local_rope_theta" if source.values["local_rope_theta"] is not None else None
    return [
        Part("full_attention", flat, ("global_rope_theta",)),
        Part("sliding_attention", flat, (local or "global_rope_theta",)),
    ], layers


def _scaled_where_full(source: Source, flat: Entries, layers: tuple[str, ...] | None) -> Layers:
    # OLMo 3: the layers with a window keep the unscaled frequencies.
    unscaled = {key: found for key, found in flat.items() if key in keys.BASE}
    return [Part("full_attention", flat), Part("sliding_attention", unscaled)], layers


def _sliding_only(source: Source, flat: Entries, layers: tuple[str, ...] | None) -> Layers:
    return [Part("sliding_attention", flat), Part("full_attention", {}, rope=False)], layers


def _sliding_only_if(source: Source, flat: Entries, layers: tuple[str, ...] | None) -> Layers:
    _need(source, "sliding_window")
    if source.values["sliding_window"] is None:
        return [Part(None, flat)], layers
    return _sliding_only(source, flat, layers)


def _only_nested(source: Source, flat: Entries, layers: tuple[str, ...] | None) -> Layers:
    del flat, layers
    fail(f"{source.name} has layers that differ, so rope_parameters must have a section for each type")


def _by_number(source: Source, flat: Entries, layers: tuple[str, ...] | None) -> Layers:
    # Llama 4, SmolLM3: a list with 1 for each layer that rotates, or every n-th that does not.
    rotates = source.values.get("no_rope_layers")
    if rotates:
        layers = tuple("rope" if flag else "no_rope" for flag in rotates)
    else:
        layers = _by_interval(source, "no_rope_layer_interval", "no_rope", "rope")
    if layers is not None and "no_rope" not in layers:
        return [Part(None, flat)], layers
    return [Part("rope", flat), Part("no_rope", {}, rope=False)], layers


def _by_interval(source: Source, key: str, every: str, others: str) -> tuple[str, ...] | None:
    """The type of each layer where every n-th is another; None if the config does not say."""
    interval, count = source.values.get(key), source.values.get("num_hidden_layers")
    if not isinstance(interval, int) or not isinstance(count, int) or interval < 1:
        return None
    return tuple(others if (layer + 1) % interval else every for layer in range(count))


_LAYERS: dict[str, Callable[[Source, Entries, "tuple[str, ...] | None"], Layers]] = {
    "local base": _local_base,
    "global and local base": _two_bases,
    "scaled where full": _scaled_where_full,
    "sliding only": _sliding_only,
    "sliding only, if windows": _sliding_only_if,
    "no_rope_layers": _by_number,
    "wide where full": _only_nested,
}


# --- one spec -------------------------------------------------------------------------------------

Fact = tuple[str, object, str]


def _one(source: Source, part: Part, interleaved: bool | None) -> tuple[RopeSpec, list[Fact]]:
    rule = _kind_of_rule(source, part)
    base, base_from = _base(source, part, rule)
    slice_, facts = _slice(source, part, rule)
    head_dim, rotary_dim, start = slice_
    pairs, pairs_from = _pairing(source, interleaved)
    scaling, scaling_facts = _scaling(source, part, rule)
    axes, axes_from = _axes(source, part, rotary_dim)
    spec = RopeSpec(head_dim, base, rotary_dim, start, pairs, scaling, axes)
    return spec, [
        facts[0],
        ("base", spec.base, base_from),
        *facts[1:],
        ("interleaved", pairs, pairs_from),
        *scaling_facts,
        ("axes", axes, axes_from),
    ]


def _base(source: Source, part: Part, rule: type[Rule] | None) -> tuple[float, str]:
    found = [part.entries[key] for key in keys.BASE if part.entries.get(key, ("", None))[1] is not None]
    got = _agreed("base", found + source.outer(part.base))
    if got is not None:
        return got[1], got[0]
    family = source.family
    if family is not None and family.base is not None:
        return family.base, f"constant of the code of {source.name}"
    ways = ", ".join(part.base if part.base and part.base != keys.BASE else keys.BASE)
    inside = sorted(path for path, value in part.entries.values() if value is not None)
    fail(
        f"the config must say how fast channels turn, by one of {ways}, but has only the keys "
        f"{', '.join([*sorted(source.seen), *inside])}"
    )


def _claimed(rule: type[Rule] | None) -> set[str]:
    """The keys of a rope section that belong to a rule."""
    return {key for spelled in rule.keys.values() for key in spelled} if rule is not None else set()


def _kind_of_rule(source: Source, part: Part) -> type[Rule] | None:
    """The class that a rope section names; None for no scaling."""
    said: list[Found] = []
    for key in keys.TYPE:
        path, name = part.entries.get(key, ("", None))
        if name is None:
            continue
        if name not in keys.TYPES_WITHOUT_RULE and name not in RULES:
            known = ", ".join(sorted({*keys.TYPES_WITHOUT_RULE, *RULES}))
            fail(f"{path} must be one of {known} but got {name!r}")
        said.append((path, name))
    kinds = {RULES.get(name) for _, name in said}
    if len(kinds) > 1:
        _agreed("the kind of scaling", said)
    kind = kinds.pop() if kinds else None
    alpha = part.entries.get("alpha", ("", None))[1]
    if kind is RULES["dynamic"] and alpha is not None:
        return NTK  # HunYuan's and vLLM's: a fixed stretch, whatever the length
    if not said:
        known = {*keys.BASE, *keys.FRACTION, *keys.SECTIONS, *keys.SECTIONS_INTERLEAVED, *keys.INERT}
        others = [
            path
            for key, (path, value) in part.entries.items()
            if key not in known and value is not None
        ]
        if any(_is_of_a_rule(key) for key, (_, value) in part.entries.items() if value is not None):
            fail(
                f"a rope section must name its rope_type but has only {', '.join(sorted(others))}"
            )
    return kind


def _is_of_a_rule(key: str) -> bool:
    own = {key for rule in RULES.values() for key in _claimed(rule)}
    return key in own - {*keys.FRACTION, *keys.INERT}


def _unknown_inside(source: Source, part: Part) -> list[str]:
    rule = _kind_of_rule(source, part)
    known = {
        *keys.TYPE, *keys.BASE, *keys.FRACTION, *keys.SECTIONS, *keys.SECTIONS_INTERLEAVED,
        *keys.INERT, *_claimed(rule),
    }  # fmt: skip
    if rule is YaRN:
        known.add("attn_factor")
    if rule is NTK and "alpha" in part.entries:
        known |= keys.INERT_BESIDE_ALPHA
        if part.entries.get("factor", ("", None))[1] in (1, None):
            known.add("factor")
        else:
            known.discard("factor")
    return [
        path
        for key, (path, value) in part.entries.items()
        if key not in known and value is not None and (key, _plain(value)) not in keys.INERT_VALUES
    ]


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | str) else None


def _scaling(
    source: Source, part: Part, kind: type[Rule] | None
) -> tuple[Rule | None, list[Fact]]:
    turns = source.family is not None and source.family.scaling == "turns"
    if kind is None:
        if turns:
            why = f"{source.name} counts coordinates in turns"
            return Linear(1 / (2 * math.pi)), [("scaling", "Linear", why)]
        types = [part.entries[key] for key in keys.TYPE if key in part.entries]
        said = " and ".join(f"{path} = {value!r}" for path, value in types if value is not None)
        return None, [("scaling", None, said or "no rope section asks for it")]
    if turns:
        fail(f"{source.name} counts coordinates in turns, which no scaling rule here goes with")
    facts: list[Fact] = []
    values: dict[str, Any] = {}
    missing: list[str] = []
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    for one in fields:
        spelled = kind.keys.get(one.name, (one.name,))
        if kind is NTK and "alpha" in part.entries:
            spelled = ("alpha",)
        found = [part.entries[key] for key in spelled if part.entries.get(key, ("", None))[1] is not None]
        got = _from_outside(source, kind, one.name, found)
        if got is not None:
            values[one.name] = got[1]
            facts.append((f"scaling.{one.name}", got[1], got[0]))
        elif one.name == "factor" and _wants_ratio(part, one, spelled):
            ratio = _ratio(source, values.get("original_max_position"), part)
            if ratio is not None:
                values["factor"] = ratio[1]
                facts.append(("scaling.factor", ratio[1], ratio[0]))
            elif one.default is dataclasses.MISSING:
                missing.append(one.name)
        elif one.default is dataclasses.MISSING:
            missing.append(one.name)
    if missing:
        spelled_missing = ", ".join("/".join(kind.keys.get(name, (name,))) for name in missing)
        has = ", ".join(sorted(key for key, (_, v) in part.entries.items() if v is not None))
        fail(f"scaling by {kind.names[0]!r} must say {spelled_missing} but says only {has}")
    multiplier = part.entries.get("attn_factor", ("", None))
    if kind is YaRN and multiplier[1] not in (None, 1):
        values["attention_factor"] = _times(values, multiplier)
        facts.append(("scaling.attention_factor", values["attention_factor"], multiplier[0]))
    rule = kind(**values)
    types = [part.entries[key] for key in keys.TYPE if part.entries.get(key, ("", None))[1] is not None]
    said = " and ".join(f"{path} = {value!r}" for path, value in types)
    return rule, [("scaling", kind.__name__, said), *facts]


def _from_outside(
    source: Source, kind: type[Rule], name: str, found: list[Found]
) -> Found | None:
    """What a rule's field is, with the outer level's say in where scaling begins."""
    if name != "original_max_position":
        return _agreed(name, found)
    # Phi-3 says it at the outer level; for the rest transformers takes the length of the context.
    got = _agreed(name, found + source.outer(keys.ORIGINAL_MAX_POSITION))
    if got is None and kind.names[0] in keys.SCALED_FROM_MAX_POSITION:
        context = source.outer(keys.MAX_POSITION)
        if context:
            return f"{context[0][0]}, as nothing else says where scaling begins", context[0][1]
    return got


def _wants_ratio(part: Part, one: dataclasses.Field[Any], spelled: tuple[str, ...]) -> bool:
    null = any(key in part.entries and part.entries[key][1] is None for key in spelled)
    return null or one.default is None


def _ratio(source: Source, original: object, part: Part) -> Found | None:
    """The longest length divided by the original one, as transformers computes a missing factor."""
    if original is None:
        said = [part.entries[key] for key in keys.ORIGINAL_MAX_POSITION if key in part.entries]
        said = [one for one in said if one[1] is not None]
        got = _agreed("original_max_position", said + source.outer(keys.ORIGINAL_MAX_POSITION))
        original = got[1] if got is not None else None
    longest = source.outer(keys.MAX_POSITION)
    if not isinstance(original, int) or not longest or not isinstance(longest[0][1], int):
        return None
    return f"{longest[0][0]} / original_max_position", longest[0][1] / original


def _times(values: dict[str, Any], multiplier: Found) -> float:
    """vLLM's and llama.cpp's ``attn_factor`` multiplies YaRN's own factor."""
    if values.get("attention_factor") is not None:
        fail(
            f"attention_factor must be said once but got attention_factor = "
            f"{values['attention_factor']!r} and {multiplier[0]} = {multiplier[1]!r}"
        )
    return float(multiplier[1]) * float(YaRN(**values).frequencies(2, 10000.0).attention_scaling)


# --- the slice of a head --------------------------------------------------------------------------


def _slice(
    source: Source, part: Part, rule: type[Rule] | None
) -> tuple[tuple[int, int, int], list[Fact]]:
    """(head_dim, rotary_dim, start) and where they come from."""
    family = source.family
    rope, nope = source.outer(keys.ROPE_DIM), source.outer(keys.NOPE_DIM)
    last = family is not None and family.start == "last"
    if not last and (rope or nope or (family is not None and family.start == "nope")):
        return _latent_slice(source, part, rope, nope)
    head_dim, head_from = _head_dim(source, part)
    found: list[Found] = list(source.outer(keys.ROTARY_DIM)) + list(rope)
    claimed = _claimed(rule)
    for path, fraction in _fractions(source, part, claimed):
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            fail(f"{path} must be above 0 and at most 1 but got {fraction!r}")
        found.append((f"{path} = {fraction!r} of {head_dim}", int(head_dim * fraction)))
    got = _agreed("rotary_dim", found)
    if got is None:
        needed = family is not None and family.fraction == "required"
        if needed and not claimed & {*keys.FRACTION}:
            ways = ", ".join([*keys.FRACTION, *keys.ROTARY_DIM])
            fail(f"{source.name} rotates a part of each head, so the config must say one of {ways}")
        got = ("all of head_dim", head_dim)
    rotary_dim, rotary_from = got[1], got[0]
    start, start_from = (0, "from the first channel")
    if last:
        start, start_from = head_dim - rotary_dim, f"{source.name} rotates the last channels"
    return (head_dim, rotary_dim, start), [
        ("head_dim", head_dim, head_from),
        ("rotary_dim", rotary_dim, rotary_from),
        ("start", start, start_from),
    ]


def _fractions(source: Source, part: Part, claimed: set[str]) -> list[Found]:
    inside = [
        part.entries[key]
        for key in keys.FRACTION
        if key not in claimed and part.entries.get(key, ("", None))[1] is not None
    ]
    return inside + source.outer(key for key in keys.FRACTION if key not in claimed)


def _latent_slice(
    source: Source, part: Part, rope: list[Found], nope: list[Found]
) -> tuple[tuple[int, int, int], list[Fact]]:
    """Latent attention: channels without positions, then those that rotate."""
    if not rope or not nope:
        said = ", ".join(path for path, _ in rope + nope) or "neither"
        fail(
            f"latent attention must say {keys.NOPE_DIM[0]} and {keys.ROPE_DIM[0]} but the config "
            f"says {said}"
        )
    width, start = rope[0][1], nope[0][1]
    total = width + start
    _agreed("head_dim", [(f"{nope[0][0]} + {rope[0][0]}", total), *source.outer(["qk_head_dim"])])
    for path, value in source.outer(keys.HEAD_DIM):
        if value not in (width, total):
            fail(
                f"head_dim must be said once but got {path} = {value!r} and {nope[0][0]} + "
                f"{rope[0][0]} = {total}"
            )
    _agreed("rotary_dim", [rope[0], *source.outer(keys.ROTARY_DIM)])
    for path, fraction in _fractions(source, part, set()):
        if fraction != 1 and int(total * fraction) != width:
            fail(f"rotary_dim must be said once but got {rope[0][0]} = {width} and {path} = {fraction!r}")
    return (total, width, start), [
        ("head_dim", total, f"{nope[0][0]} + {rope[0][0]}"),
        ("rotary_dim", width, rope[0][0]),
        ("start", start, nope[0][0]),
    ]


def _head_dim(source: Source, part: Part) -> tuple[int, str]:
    if part.head_dim is not None:
        return part.head_dim[1], part.head_dim[0]
    said = _agreed("head_dim", source.outer(keys.HEAD_DIM))
    if said is not None:
        return said[1], said[0]
    family = source.family
    if family is not None and family.head_dim == "required":
        fail(
            f"{source.name} has heads of another width than hidden size / heads, so the config must "
            f"say {keys.HEAD_DIM[0]}"
        )
    widths = (family.hidden,) if family is not None and family.hidden else keys.HIDDEN
    hidden, heads = _agreed("hidden size", source.outer(widths)), source.outer(keys.HEADS)
    count = _agreed("the number of heads", heads)
    if hidden is None or count is None:
        fail(
            f"the width of a head must be known, by one of {', '.join(keys.HEAD_DIM)}, or by "
            f"{widths[0]} and {keys.HEADS[0]}, but the config has only the keys "
            f"{', '.join(sorted(source.seen))}"
        )
    if count[1] < 1 or hidden[1] % count[1]:
        fail(
            f"{hidden[0]} must be a multiple of {count[0]} but got {hidden[1]!r} and {count[1]!r}"
        )
    return hidden[1] // count[1], f"{hidden[0]} / {count[0]} = {hidden[1]} / {count[1]}"


# --- pairing and axes -----------------------------------------------------------------------------


def _pairing(source: Source, interleaved: bool | None) -> tuple[bool, str]:
    if interleaved is not None:
        if not isinstance(interleaved, bool):
            raise TypeError(
                sentence(OPERATION, f"interleaved must be a bool or None but got {interleaved!r}")
            )
        return interleaved, "the argument interleaved"
    found = []
    for key, neighbours in keys.PAIRING.items():
        for path, value in source.outer([key]):
            if not isinstance(value, bool):
                raise TypeError(sentence(OPERATION, f"{path} must be a bool but got {value!r}"))
            found.append((path, value == neighbours))
    got = _agreed("interleaved", found)
    family = source.family
    if got is not None:
        free = family is None or family.pairing_key is not None
        if not free and family is not None and got[1] != family.interleaved:
            fail(
                f"interleaved must be said once but got {got[0]} for {got[1]} and {source.name} for "
                f"{family.interleaved}; pass interleaved={got[1]} if the key is right"
            )
        return got[1], got[0]
    if family is None:
        fail(
            f"the config must say how channels are paired, and {source.name} is not in the table of "
            f"families; pass interleaved=False if channel i is paired with i + rotary_dim / 2, as in "
            f"Llama, or interleaved=True if neighbours are, as in GPT-J"
        )
    return family.interleaved, f"{source.name} ({family.source})"


def _axes(source: Source, part: Part, rotary_dim: int) -> tuple[Axes | None, str]:
    family = source.family
    kind = family.axes if family is not None else None
    found = [part.entries[key] for key in keys.SECTIONS if part.entries.get(key, ("", None))[1]]
    said = _agreed("mrope_section", found + source.outer(keys.SECTIONS))
    flags = [
        part.entries[key]
        for key in keys.SECTIONS_INTERLEAVED
        if part.entries.get(key, ("", None))[1] is not None
    ]
    flag = _agreed("mrope_interleaved", flags + source.outer(keys.SECTIONS_INTERLEAVED))
    pairs = rotary_dim // 2
    if kind in ("blocks", "strided"):
        if pairs % 2:
            fail(f"{source.name} shares pairs out to two axes, but a head has {pairs}")
        made = Axes.blocks((pairs // 2, pairs // 2)) if kind == "blocks" else Axes.strided(2, pairs)
        return made, f"{source.name} ({family.source})" if family is not None else ""
    axial = [p for key in keys.TYPE for p, v in [part.entries.get(key, ("", None))] if v == "axial"]
    if axial:
        fail(f"{axial[0]} is 'axial', but {source.name} is not known to have axes")
    if kind is None and said is None:
        return None, "one coordinate per position"
    if said is None:
        fail(
            f"{source.name} has positions of three coordinates, so the config must say mrope_section"
        )
    if kind is None and flag is None:
        fail(
            f"{said[0]} must come with mrope_interleaved, as {source.name} is not known to have "
            f"several axes"
        )
    woven = flag[1] if kind is None and flag is not None else kind == "interleaved sections"
    if flag is not None and flag[1] != woven:
        fail(f"{flag[0]} must be {woven} for {source.name} but got {flag[1]!r}")
    sizes = tuple(said[1])
    if kind == "rows and columns, then time":
        if len(sizes) != 3 or sizes[0] != sizes[1]:
            fail(f"{said[0]} must give rows and columns equally many pairs but got {list(sizes)}")
        still = sizes[0] + sizes[1]
        owners = [1 + k % 2 if k < still else 0 for k in range(sum(sizes))]
        triples = tuple((axis, k, 2 * sum(sizes)) for k, axis in enumerate(owners))
        return Axes(3, triples), said[0]
    return Axes.sections(sizes, interleaved=woven), said[0]


def given_by_factors(rotary_dim: int, base: float, factors: list[float]) -> Given:
    """The frequencies that result from one divisor per pair."""
    exact = RopeSpec(rotary_dim, base).frequencies().exact
    return Given(tuple(float(omega) / factor for omega, factor in zip(exact, factors, strict=True)))
