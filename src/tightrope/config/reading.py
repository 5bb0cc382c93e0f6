"""Read a spec from a mapping with the key names of transformers; a missing fact is an error.

The facts are data in other places: the names of keys in keys.py, the facts of model families in
families.py, the parameters of a scaling rule in the rule itself (``Rule.names``, ``Rule.keys``). A new
rule needs no change here.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Container, Iterable, Mapping

from .._errors import outside, sentence
from ..frequencies import LONGEST, NTK, Given, YaRN
from ..spec import RopeSpec
from . import keys, observed
from .files import Record
from .heads import axes_of, base_of, pairing_of, slice_of
from .layers import Listed, flagged, parts_of, rule_of, with_attention
from .learned import given_for
from .questions import questions, refuse
from .scaling import Fact, claimed_by, kind_of_rule, scaling_of
from .source import (
    OPERATION,
    TRIED,
    Arguments,
    Base,
    Found,
    Part,
    Source,
    Stated,
    fail,
    settle,
    whole,
)
from .specs import LayerSpecs, Provenance, Row


def read(source: Source, stated: Stated) -> Provenance:
    """Read specs and their provenance from a configuration with the key names of transformers."""
    _refuse_without_rope(source)
    unknown = _unknown_outside(source)
    parts, layers = parts_of(source, stated)
    for part in parts:
        if part.rope:
            unknown |= _unknown_inside(part)
    if unknown:
        _complain(unknown, stated.strict)
    context, temperature = _context(source, parts), _temperature(source, parts)
    if stated.layer_type is not None:
        parts = _of_type(parts, layers, stated.layer_type)
    asked, answers = questions(source, parts, layers, stated)
    if asked:
        names = {name for *_, examples in asked for one in examples for name in one}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown keys: each has had its warning
            for answer in answers:
                read(source, answer)  # first, an error that no answer would mend
            # Advice runs no model.
            found = observed.answer(source, stated, names, read) if TRIED.get() is None else None
            if found is not None:
                return read(source, found)
        refuse(source, asked, answers)
    made: dict[str | None, RopeSpec | None] = {}
    rows: list[Row] = []
    for part in parts:
        if not part.rope:
            made[part.name] = None
            rows.append(Row(part.name, "no RoPE", None, part.why or source.name))
            continue
        made[part.name], facts = _one(source, part, stated)
        rows += [Row(part.name, *fact) for fact in facts]
    first = parts[0].name
    spec = made[first]
    if stated.layer_type is None and spec is not None and len(set(made.values())) == 1:
        rows = [row._replace(layer=None) for row in rows if row.layer == first]
    elif stated.layer_type is None:
        named = {name: one for name, one in made.items() if name is not None}
        return Provenance(LayerSpecs(named, layers), tuple(rows), source.name, context, temperature)
    return Provenance(spec, tuple(rows), source.name, context, temperature)


def _temperature(source: Source, parts: Iterable[Part]) -> str | None:
    """The key of a temperature of the attention by position, if one is on."""
    found = source.outer(keys.TEMPERATURE)
    found += [each for part in parts for each in part.inner(keys.TEMPERATURE)]
    # In GGUF such a key follows the architecture.
    found += [
        each for each in source.unread.items() if each[0].partition(".")[2] in keys.TEMPERATURE
    ]
    return next((path for path, value in found if value), None)


def _context(source: Source, parts: Iterable[Part]) -> Found | None:
    """The key and value of the context length; an error if any length in the configuration is invalid."""
    given = source.outer(keys.MAX_POSITION)
    others = source.outer(keys.ORIGINAL_MAX_POSITION)
    for part in parts:
        others += part.inner((*keys.MAX_POSITION, *keys.ORIGINAL_MAX_POSITION))
    return next(iter(whole([*given, *others], LONGEST)[: len(given)]), None)


def _of_type(parts: list[Part], layers: Listed, layer_type: str) -> list[Part]:
    """The part of a layer type; an error if the configuration has no such type, or none with attention."""
    named = [part.name for part in parts if part.name is not None]
    types = sorted({*named, *with_attention(layers)})
    if layer_type not in types:
        has = ", ".join(types) if types else "one type only, without a name"
        why = ", which has no attention" if layer_type in (layers or ()) else ""
        fail(
            f"layer_type must be one of the config's layer types but got {layer_type!r}{why}; the config has {has}"
        )
    return [part for part in parts if part.name in (layer_type, None)]


def _one(source: Source, part: Part, stated: Stated) -> tuple[RopeSpec, list[Fact]]:
    rule = kind_of_rule(part)
    base, base_from = base_of(source, part)
    slice_, facts = slice_of(source, part, rule, stated)
    head_dim, rotary_dim, start = slice_
    pairs, pairs_from = pairing_of(source, stated)
    scaling, scaling_facts = scaling_of(source, part, rule)
    if rotary_dim % 2:
        more = f"for code that then rotates {rotary_dim + 1}, by base ** (-2 * k / {rotary_dim})"
        settle(
            f"rotary_dim must be even but got {rotary_dim} from {facts[1][2]}",
            *(() if scaling or not base > 0 else ((more, None),)),
        )
        omega = RopeSpec(2 * rotary_dim, base=base).frequencies().exact
        scaling, rotary_dim = Given(tuple(map(float, omega[::2]))), rotary_dim + 1
    # The slice must fit before axes are made.
    spec = RopeSpec(head_dim, base=base, rotary_dim=rotary_dim, start=start, interleaved=pairs)
    record, name = source.recorded, Record.slice_of(spec)
    slices = record.slices if record is not None and stated.interleaved is None else set()
    if record is not None and slices and name not in slices:
        fail(
            f"interleaved must be given, as {record.where} states the pairing of {' and '.join(sorted(slices))} "
            f"and the configuration another slice, {name}"
        )
    axes, axes_from = axes_of(source, part, rotary_dim)
    spec = dataclasses.replace(spec, scaling=scaling, axes=axes)
    given = given_for(source, spec, stated)
    if given is not None:
        spec = dataclasses.replace(spec, scaling=given[0])
        scaling_facts = [("scaling", "Given", given[1])]
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
    for key, on in keys.SWITCHES.items():
        if source.values.get(key) is (not on):
            fail(f"the config has no RoPE: {source.shown(key)} is {not on}")
    switch = family.switch if family is not None else None
    if switch is not None and source.values.get(switch) is not True:
        fail(f"the config has no RoPE: {source.shown(switch)} is not True")
    if family is not None and family.position_type is None:
        return  # its code ignores position_embedding_type, which is often a left-over
    selecting = keys.POSITION_TYPE if family is None else (str(family.position_type),)
    given = source.outer(selecting)
    for path, value in given:
        if not isinstance(value, str) or value not in keys.POSITION_TYPES_WITH_ROPE:
            fail(f"the config has no RoPE: {path} is {value!r}")
    if family is not None and not given:
        fail(
            f"{source.name} has RoPE only if {selecting[0]} selects it, but the config "
            f"has no such key"
        )


def _unknown_outside(source: Source) -> dict[str, str | Base | None]:
    """Unknown keys of the outer level that could be about the rotation -> their effect, if it is sure."""
    unknown: dict[str, str | Base | None] = {}
    for key, value in source.unread.items():
        inner = str(key).partition(".")[2] or str(key)  # in GGUF, after the architecture
        if _is_unknown(inner, value, keys.INERT_OUTSIDE.keys()):
            unknown[str(key)] = _effect(inner, value)
    read = {*keys.READ_OUTSIDE, *keys.READ_BY_LAYERS.get(rule_of(source) or "", ())}
    listed = source.values.get("no_rope_layers")
    if flagged(source):  # the caller states which layers have RoPE
        read |= keys.READ_BY_LAYERS["no_rope_layers"]
    elif listed in ([], ()):
        read |= {"no_rope_layers"}
    elif source.family is not None and isinstance(listed, list | tuple) and all(listed):
        read |= keys.READ_BY_LAYERS["no_rope_layers"]  # every layer has RoPE
    for key, value in source.values.items():
        if not isinstance(key, str) or (key.endswith("_config") and _is_part(value)):
            continue
        if _is_unknown(key, value, read):
            unknown[source.shown(key)] = _effect(key, value)
    return unknown


def _effect(name: str, value: object) -> str | Base | None:
    """The effect of an unknown key that nothing may drop: "layers", a base (0 if a section holds it) or "channels"."""
    if keys.about_layers(name, value):
        return "layers"
    if keys.gives_base(name, value):
        return Base(value if isinstance(value, int | float) else 0)
    return "channels" if keys.about_channels(name, value) else None


def _is_part(value: object) -> bool:
    """Return True if a nested mapping describes a part of a model, such as the vision tower."""
    names = (*keys.LAYERS, *keys.HIDDEN, *keys.HEADS)
    return isinstance(value, Mapping) and any(name in value for name in names)


def _is_unknown(key: str, value: object, known: Container[str]) -> bool:
    """Return True if a key, or one that its value holds, could be about the rotation and is not known."""
    name = key.rpartition(".")[2]
    if value is None or name in known or value is keys.SWITCHES.get(name):
        return False
    if (name, _plain(value)) in keys.INERT_OUTSIDE_VALUES:
        return False
    return keys.about_rotation(key) or keys.holds_rotation(value)


_IGNORED = "strict=False ignores them with a warning"


def _complain(unknown: Mapping[str, str | Base | None], strict: bool) -> None:
    layered = [name for name, effect in unknown.items() if effect == "layers"]
    bases = [name for name, effect in unknown.items() if isinstance(effect, Base)]
    channels = [name for name, effect in unknown.items() if effect == "channels"]
    names = layered or bases or channels or [*unknown]
    known = f"must be known but got {', '.join(map(_with_guess, names))}"
    if layered:
        settle(
            f"every key that may say which layers rotate {known}; pass a config without it only if it has no effect, "
            f"or make a spec by hand for each kind of layers",
            ("for layers that it does not affect", None),
        )
    elif bases:
        values = [unknown[name] for name in bases]
        settle(
            f"every key that may give a base {known}; make a spec by hand for each kind of layers",
            *[
                ("for layers whose base it is", one)
                for one in values[:1]
                if one and len(values) == 1
            ],
            ("for layers whose base it is not", None),
        )
    elif channels:
        settle(
            f"every key that may give a width or the pairing {known}; pass a config without it only if it has no "
            f"effect, or make a RopeSpec by hand",
            ("if it has no effect", None),
        )
    elif strict:
        settle(f"every key about RoPE {known}; {_IGNORED}", ("", Arguments(strict=False)))
    else:
        text = f"every key about RoPE {known}; {_IGNORED}"
        warnings.warn(sentence(OPERATION, text), UserWarning, stacklevel=outside())


def _with_guess(name: str) -> str:
    """An unknown key, with the known one that it is like."""
    own = name.rpartition(".")[2]
    like = [] if own in keys.NAMES else difflib.get_close_matches(own, keys.NAMES, 1, 0.85)
    return f"{name} (perhaps {like[0]})" if like else name


def _unknown_inside(part: Part) -> dict[str, str | Base | None]:
    """The same for the keys of a rope section."""
    rule = kind_of_rule(part)
    known = {
        *keys.TYPE,
        *keys.BASE,
        *keys.FRACTION,
        *keys.SECTIONS,
        *keys.SECTIONS_INTERLEAVED,
        *keys.INERT,
        keys.OWN_HEAD_DIM,
        keys.OWN_ROTARY_DIM,
        *claimed_by(rule),
    }
    if rule is YaRN:
        known |= {"attn_factor", "apply_yarn_scaling"}
    if rule is NTK and "alpha" in part.entries:
        known = (known | keys.INERT_BESIDE_ALPHA) - {"factor"}
    return {
        path: _effect(key, value)
        for key, (path, value) in part.entries.items()
        if key not in known and value is not None and (key, _plain(value)) not in keys.INERT_VALUES
    }


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | str) else None
