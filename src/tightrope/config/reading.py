"""Read a spec from a mapping with the key names of transformers; a missing fact is an error.

The facts are data in other places: the names of keys in keys.py, the facts of model families in
families.py, the parameters of a scaling rule in the rule itself (``Rule.names``, ``Rule.keys``). A new
rule needs no change here.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping

from .._errors import outside, sentence
from ..frequencies import LONGEST, NTK, RULES, YaRN
from ..spec import RopeSpec
from . import keys
from .heads import axes_of, base_of, pairing_of, slice_of
from .layers import parts_of
from .scaling import Fact, claimed_by, kind_of_rule, scaling_of
from .source import OPERATION, Found, Part, Source, fail, whole
from .specs import LayerSpecs, Provenance, Row

# Far above the head width of any model. A larger one is an error, before its frequencies are computed.
_WIDEST = 65536


def read(
    source: Source,
    *,
    layer_type: str | None = None,
    strict: bool = True,
    interleaved: bool | None = None,
) -> Provenance:
    """Read specs and their provenance from a configuration with the key names of transformers."""
    _refuse_without_rope(source)
    unknown = _unknown_outside(source)
    parts, layers = parts_of(source)
    made: dict[str | None, RopeSpec | None] = {}
    rows: list[Row] = []
    for part in parts:
        if part.rope:
            unknown += [path for path in _unknown_inside(part) if path not in unknown]
    if unknown:
        _complain(unknown, strict)
    context = _context(source, parts)
    for part in parts:
        if not part.rope:
            made[part.name] = None
            rows.append(Row(part.name, "no RoPE", None, source.name))
            continue
        spec, facts = _one(source, part, interleaved)
        made[part.name] = spec
        rows += [Row(part.name, *fact) for fact in facts]
    chosen = _choose(made, rows, layers, layer_type)
    return dataclasses.replace(chosen, name=source.name, context=context)


def _context(source: Source, parts: Iterable[Part]) -> Found | None:
    """The key and value of the context length; an error if any length in the configuration is invalid."""
    given = source.outer(keys.MAX_POSITION)
    others = source.outer(keys.ORIGINAL_MAX_POSITION)
    for part in parts:
        others += part.inner((*keys.MAX_POSITION, *keys.ORIGINAL_MAX_POSITION))
    return next(iter(whole([*given, *others], LONGEST)[: len(given)]), None)


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
            fail(
                f"layer_type must be one of the config's layer types but got {layer_type!r}; the config has {has}"
            )
        if layer_type in made:
            chosen = made[layer_type]
            rows = [row for row in rows if row.layer == layer_type]
        elif uniform:
            chosen = specs[0]
        else:
            chosen = None  # a layer without attention, or with linear attention
            rows = []
        return Provenance(chosen, tuple(rows))
    if uniform and specs[0] is not None:
        first = next(iter(made))
        kept = tuple(row._replace(layer=None) for row in rows if row.layer == first)
        return Provenance(specs[0], kept)
    named = {name: spec for name, spec in made.items() if name is not None}
    return Provenance(LayerSpecs(named, layers), tuple(rows))


def _one(source: Source, part: Part, interleaved: bool | None) -> tuple[RopeSpec, list[Fact]]:
    rule = kind_of_rule(part)
    base, base_from = base_of(source, part)
    slice_, facts = slice_of(source, part, rule)
    head_dim, rotary_dim, start = slice_
    if head_dim > _WIDEST:
        fail(f"a head must have at most {_WIDEST} channels but got {head_dim} ({facts[0][2]})")
    pairs, pairs_from = pairing_of(source, interleaved)
    scaling, scaling_facts = scaling_of(source, part, rule)
    axes, axes_from = axes_of(source, part, rotary_dim)
    spec = RopeSpec(head_dim, base, rotary_dim, start, pairs, scaling, axes)
    return spec, [
        facts[0],
        ("base", spec.base, base_from),
        *facts[1:],
        ("interleaved", pairs, pairs_from),
        *scaling_facts,
        ("axes", axes, axes_from),
    ]


# --- refused configurations and unknown keys ------------------------------------------------------


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
        return  # its code ignores position_embedding_type, which is often a left-over
    given = source.outer(keys.POSITION_TYPE)
    for path, value in given:
        if not isinstance(value, str) or value not in keys.POSITION_TYPES_WITH_ROPE:
            fail(f"the config has no RoPE: {path} is {value!r}")
    if family is not None and not given:
        fail(
            f"{source.name} has RoPE only if position_embedding_type selects it, but the config "
            f"has no such key"
        )


_WORD = re.compile(r"[a-z0-9]+")


def _looks_like_rope(key: str) -> bool:
    """Return True if a key looks like one about RoPE, so that a misspelt key is not ignored."""
    words = _WORD.findall(key.lower())
    return any(word.startswith(("rope", "mrope", "rotary")) or word == "theta" for word in words)


def _is_rope_section(value: object) -> bool:
    """Return True if a value looks like a rope section under an unknown name."""
    if not isinstance(value, Mapping):
        return False
    if "rope_type" in value or any(key in value for key in keys.BASE):
        return True
    return value.get("type") in RULES


def _read_outside(source: Source) -> set[str]:
    """Keys of the outer level that are read in this configuration, or known not to affect the rotation."""
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
    unknown = [key for key in source.unread if _looks_like_rope(str(key))]
    for key, value in source.values.items():
        if not isinstance(key, str) or key in known or value is None or key.endswith("_config"):
            continue
        if key == "no_rope_layers" and isinstance(value, list | tuple) and all(value):
            continue  # a list of ones: every layer has RoPE
        if key == "no_rope_layer_interval" and "no_rope_layers" not in source.values:
            unknown.append(source.shown(key))
        elif key != "no_rope_layer_interval" and (_looks_like_rope(key) or _is_rope_section(value)):
            unknown.append(source.shown(key))
    return unknown


def _complain(unknown: list[str], strict: bool) -> None:
    text = (
        f"every key about RoPE must be known but got {', '.join(unknown)}; strict=False ignores "
        f"them with a warning"
    )
    if strict:
        fail(text)
    warnings.warn(sentence(OPERATION, text), UserWarning, stacklevel=outside())


def _unknown_inside(part: Part) -> list[str]:
    rule = kind_of_rule(part)
    known = {
        *keys.TYPE, *keys.BASE, *keys.FRACTION, *keys.SECTIONS, *keys.SECTIONS_INTERLEAVED,
        *keys.INERT, *claimed_by(rule),
    }  # fmt: skip
    if rule is YaRN:
        known.add("attn_factor")
    if rule is NTK and "alpha" in part.entries:
        known |= keys.INERT_BESIDE_ALPHA
        if part.value("factor") not in (1, None):
            known.discard("factor")
    return [
        path
        for key, (path, value) in part.entries.items()
        if key not in known and value is not None and (key, _plain(value)) not in keys.INERT_VALUES
    ]


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | str) else None
