"""Read a spec from a mapping with the key names of transformers; a missing fact is an error.

The facts are data in other places: the names of keys in keys.py, the facts of model families in
families.py, the parameters of a scaling rule in the rule itself (``Rule.names``, ``Rule.keys``). A new
rule needs no change here.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Container, Iterable, Mapping

from .._errors import outside, sentence
from ..frequencies import LONGEST, NTK, YaRN
from ..spec import RopeSpec
from . import keys
from .heads import axes_of, base_of, pairing_of, slice_of
from .layers import parts_of
from .questions import answered, questions, sentence_of
from .scaling import Fact, claimed_by, kind_of_rule, scaling_of
from .source import OPERATION, Found, Part, Source, Stated, fail, whole
from .specs import LayerSpecs, Provenance, Row

# Far above the head width of any model. A larger one is an error, before its frequencies are computed.
_WIDEST = 65536


def read(source: Source, stated: Stated) -> Provenance:
    """Read specs and their provenance from a configuration with the key names of transformers."""
    _refuse_without_rope(source)
    unknown = _unknown_outside(source)
    parts, layers = parts_of(source, stated)
    made: dict[str | None, RopeSpec | None] = {}
    rows: list[Row] = []
    for part in parts:
        if part.rope:
            unknown += [path for path in _unknown_inside(part) if path not in unknown]
    if unknown:
        _complain(unknown, stated.strict)
    asked = questions(source, parts, layers, stated)
    if asked:
        read(source, answered(stated, asked))  # first, an error that no answer would mend
        fail(sentence_of(source, stated, asked))
    context = _context(source, parts)
    for part in parts:
        if not part.rope:
            made[part.name] = None
            rows.append(Row(part.name, "no RoPE", None, part.why or source.name))
            continue
        spec, facts = _one(source, part, stated)
        made[part.name] = spec
        rows += [Row(part.name, *fact) for fact in facts]
    chosen = _choose(made, rows, layers, stated.layer_type)
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
        if layer_type not in names or layer_type in keys.LAYERS_WITHOUT_ATTENTION - made.keys():
            names -= keys.LAYERS_WITHOUT_ATTENTION - made.keys()
            has = ", ".join(sorted(names)) if names else "one type only, without a name"
            why = ", which has no attention" if layer_type in (layers or ()) else ""
            fail(
                f"layer_type must be one of the config's layer types but got {layer_type!r}{why}; the config has {has}"
            )
        chosen = made[layer_type] if layer_type in made else specs[0]
        rows = [row for row in rows if row.layer in (layer_type, None)]
        return Provenance(chosen, tuple(rows))
    if uniform and specs[0] is not None:
        first = next(iter(made))
        kept = tuple(row._replace(layer=None) for row in rows if row.layer == first)
        return Provenance(specs[0], kept)
    named = {name: spec for name, spec in made.items() if name is not None}
    return Provenance(LayerSpecs(named, layers), tuple(rows))


def _one(source: Source, part: Part, stated: Stated) -> tuple[RopeSpec, list[Fact]]:
    rule = kind_of_rule(part)
    base, base_from = base_of(source, part)
    slice_, facts = slice_of(source, part, rule, stated)
    head_dim, rotary_dim, start = slice_
    if head_dim > _WIDEST:
        fail(f"a head must have at most {_WIDEST} channels but got {head_dim} ({facts[0][2]})")
    pairs, pairs_from = pairing_of(source, stated.interleaved)
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


def _read_outside(source: Source) -> set[str]:
    """Keys of the outer level that are read in this configuration, or known not to affect the rotation."""
    known = {
        *keys.BASE, *keys.SECTION, *keys.FRACTION, *keys.ROTARY_DIM, *keys.PAIRING, *keys.ROPE_DIM,
        *keys.NOPE_DIM, *keys.SECTIONS, *keys.SECTIONS_INTERLEAVED, *keys.INERT_OUTSIDE,
        *keys.ORIGINAL_MAX_POSITION, *keys.POSITION_TYPE,
    }  # fmt: skip
    layers = source.family.layers if source.family is not None else None
    return known | keys.READ_BY_LAYERS.get(layers or "", frozenset())


def _unknown_outside(source: Source) -> list[str]:
    known = _read_outside(source)
    unknown = [
        str(key)
        for key, value in source.unread.items()
        if _is_unknown(str(key), value, keys.INERT_OUTSIDE)
    ]
    for key, value in source.values.items():
        if not isinstance(key, str) or (key.endswith("_config") and _is_part(value)):
            continue
        if key == "no_rope_layers" and isinstance(value, list | tuple) and all(value):
            continue  # a list of ones: every layer has RoPE
        if key == "no_rope_layer_interval" and "no_rope_layers" in source.values:
            continue
        if _is_unknown(key, value, known):
            unknown.append(source.shown(key))
    return unknown


def _is_part(value: object) -> bool:
    """Return True if a nested mapping describes a part of a model, such as the vision tower."""
    names = (*keys.LAYERS, *keys.HIDDEN, *keys.HEADS)
    return isinstance(value, Mapping) and any(name in value for name in names)


def _is_unknown(key: str, value: object, known: Container[str]) -> bool:
    """Return True if a key, or one that its value holds, could be about the rotation and is not known."""
    name = key.rpartition(".")[2]  # in GGUF, after the architecture
    if value is None or name in known or (name, _plain(value)) in keys.INERT_OUTSIDE_VALUES:
        return False
    if name in keys.SWITCHES and value is True:
        return False
    return keys.about_rotation(key) or keys.holds_rotation(value)


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
