"""Read a spec from a configuration with the key names of transformers; a missing fact is a question.

The facts are data in other places: the names of keys in keys.py, the facts of model families in families.json, the
parameters of a scaling rule in the rule itself (``Rule.names``, ``Rule.keys``). A new rule needs no change here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NoReturn

from .._errors import as_real, bad_type
from ..frequencies import LONGEST
from ..spec import RopeSpec
from . import keys
from .files import Record
from .heads import slice_of, some
from .layers import Layer, Listed, flagged, layers_of, types_of, with_attention
from .learned import given_for
from .pairs import axes_of, pairing_of
from .scaling import scaling_of
from .source import Found, Section, Source, Stated, agreed, fail, whole
from .specs import LayerSpecs, Provenance, Row
from .unknown import refuse_unknown

#: The call that advice spells.
CALL = "RopeSpec.from_config(config"
_LIKE_LLAMA = "for code like Llama's"
_WIDTHS_AND_BASES = (*keys.HEAD_DIM, *keys.HIDDEN, *keys.HEADS, *keys.BASE)


def read(source: Source, stated: Stated) -> Provenance:
    """Read specs and their provenance from a configuration with the key names of transformers."""
    source = dataclasses.replace(source, stated=stated, asked={})
    _refuse_without_rope(source)
    _refuse_null_alias(source)
    layers, listed = layers_of(source)
    refuse_unknown(source, layers, source.stated.strict)
    about = source.name, _context(source, layers), _temperature(source, layers), _norm(source)
    if source.stated.layer_type is not None:
        layers = _of_type(layers, listed, source.stated.layer_type)
    rotating = [layer for layer in layers if layer.section is not None]
    slices = {layer.name: slice_of(source, layer, listed) for layer in rotating}
    if _ask_for_each_width(source, slices) and source.stated.rotary_dim is not None:
        _refuse(source)  # no spec could be made
    made: dict[str | None, RopeSpec | None] = {}
    rows: list[Row] = []
    for layer in layers:
        facts = {"no RoPE": Found(None, layer.why or source.name)}
        made[layer.name] = None
        if layer.section is not None:
            made[layer.name], facts = _one(source, layer, slices[layer.name])
        rows += [Row(layer.name, name, found.value, found.source) for name, found in facts.items()]
    _ask_for_layers(source, layers)
    if source.asked:
        _refuse(source)
    first = layers[0].name
    if source.stated.layer_type is not None:
        return Provenance(made[first], tuple(rows), *about)
    if made[first] is not None and len({*made.values()}) == 1:
        rows = [row._replace(layer=None) for row in rows if row.layer == first]
        return Provenance(made[first], tuple(rows), *about)
    named = {name: one for name, one in made.items() if name is not None}
    return Provenance(LayerSpecs(named, listed), tuple(rows), *about)


def _in_sections(layers: Iterable[Layer], names: tuple[str, ...]) -> list[Found]:
    sections = [layer.section for layer in layers if layer.section]
    return [section[name] for section in sections for name in names if name in section]


def _temperature(source: Source, layers: Iterable[Layer]) -> str | None:
    """The key of a temperature of the attention by position, if one is on."""
    found = source.given(*keys.TEMPERATURE) + _in_sections(layers, keys.TEMPERATURE)
    for key, value in source.unread.items():
        if key.partition(".")[2] in keys.TEMPERATURE:  # in GGUF, after the architecture
            found.append(Found(value, key))
    return next((each.source for each in found if each.value), None)


def _norm(source: Source) -> str | None:
    """The class of a norm after the rotation, unless a key switches it off."""
    off = any(each.value is False for each in source.given("use_qk_norm"))
    return None if off else source.facts.norm


def _context(source: Source, layers: Iterable[Layer]) -> tuple[str, int] | None:
    """The key and value of the context length; an error if any length in the configuration is invalid."""
    given = source.given(*keys.MAX_POSITION)
    names = (*keys.MAX_POSITION, *keys.ORIGINAL_MAX_POSITION)
    others = source.given(*keys.ORIGINAL_MAX_POSITION) + _in_sections(layers, names)
    whole([*given, *others], LONGEST)
    return (given[0].source, given[0].value) if given else None


def _of_type(layers: list[Layer], listed: Listed, layer_type: str) -> list[Layer]:
    """The layers of a type; an error if the configuration has none, or none with attention."""
    named = [layer.name for layer in layers if layer.name is not None]
    types = sorted({*named, *with_attention(listed)})
    if layer_type not in types:
        has = ", ".join(types) if types else "one type only, without a name"
        why = ", which has no attention" if layer_type in (listed or ()) else ""
        fail(
            f"layer_type must be one of the config's layer types but got {layer_type!r}{why}; the config has {has}"
        )
    return [layer for layer in layers if layer.name in (layer_type, None)]


def _one(
    source: Source, layer: Layer, facts: dict[str, Found]
) -> tuple[RopeSpec | None, dict[str, Found]]:
    """The spec of a type of layers, and the source of each field; None if no key gives the width of a head."""
    section = layer.section or {}
    path = f"{layer.name}.rope_theta" if source.facts.nested else "rope_theta"
    base = _base(source, section, path)
    pairs = pairing_of(source)
    if not facts:
        return None, {}
    head, rotary, start = (facts[name].value for name in ("head_dim", "rotary_dim", "start"))
    scaling, of_rule = scaling_of(source, section)
    if rotary % 2:
        fail(f"rotary_dim must be even but got {rotary} from {facts['rotary_dim'].source}")
    # The slice must fit before axes are made.
    spec = RopeSpec(head, base=base.value, rotary_dim=rotary, start=start, interleaved=pairs.value)
    _check_record(source, spec)
    axes = axes_of(source, section, rotary)
    spec = dataclasses.replace(spec, scaling=scaling, axes=axes.value)
    given = given_for(source, spec)
    if given is not None:
        spec = dataclasses.replace(spec, scaling=given[0])
        of_rule = {"scaling": Found("Given", given[1])}
    of_head = {"head_dim": facts["head_dim"], "base": base._replace(value=spec.base)}
    return spec, {**of_head, **facts, "interleaved": pairs, **of_rule, "axes": axes}


def _check_record(source: Source, spec: RopeSpec) -> None:
    record, name = source.recorded, Record.slice_of(spec)
    slices = record.slices if record is not None and source.stated.interleaved is None else set()
    if slices and name not in slices:
        fail(
            f"interleaved must be given, as {record.where} states the pairing of {' and '.join(sorted(slices))} "
            f"and the configuration another slice, {name}"
        )


def _base(source: Source, section: Section, path: str) -> Found:
    """The base: of a key, of the class, or a constant of the family's code.

    Args:
        path: its path in the section of the class.
    """
    facts, argument = source.facts, source.stated.argument("base")
    found = section.get("rope_theta")
    if "base" in facts.fixed:
        for other in [found] if found is not None else source.given(*keys.BASE):
            if other.given and other.value != facts.base:
                fail(
                    f"base must be {facts.base:g}, as the code of {source.name} reads no key for it, but got "
                    f"{other.value!r} from {other.source}"
                )
    if found is None and facts.base is not None:
        found = Found(facts.base, f"constant of the code of {source.name}", given=False)
    elif found is not None and not found.given and path in facts.differs:
        # A base that the file gives to other layers, equal to the default, shows its version.
        if all(other.value != found.value for other in source.given(*facts.bases)):
            found = None if argument else _of_version(source, found, facts.differs[path])
    got = agreed("base", [*([found] if found is not None else []), *argument])
    if got is not None:
        if as_real(got.value) is None:
            raise bad_type(f"{got.source} must be a number but got {got.value!r}")
        return got
    if facts.null_base:
        fail(f"the config has no RoPE: {source.shown('rope_theta')} is null")
    ways = ", ".join(facts.bases or keys.USUAL_BASE)
    inside = sorted(each.source for each in section.values() if each.given)
    sure = "" if source.family is not None else ", if its model has RoPE"
    source.ask(
        "base",
        f"the base of the frequencies{sure}",
        f"base=10000.0 if it is that of the paper, or a config with one of {ways}, as its keys are "
        f"{some([*sorted(source.seen), *inside])}",
        10000.0,
    )
    return Found(10000.0, "", given=False)


def _of_version(source: Source, found: Found, differs: Mapping[str, float]) -> Found:
    """The default of the version of transformers that wrote a file; a question if nothing states it."""
    facts = source.facts
    (old, before), (new, now) = sorted(differs.items(), key=lambda item: _numbers(item[0]))
    wrote = _numbers(source.version or "")
    if wrote and not _numbers(old) < wrote < _numbers(new):
        late = wrote >= _numbers(new)
        origin = f"default of {facts.made_by}, transformers {new if late else old}"
        return found._replace(value=now if late else before, source=origin)
    source.ask(
        "base",
        "the base of the frequencies",
        f"base={before!r}, the default of {facts.made_by} in transformers {old}, or base={now!r}, that of {new}",
        now,
    )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [part for part in version.split(".")[:2] if part.isdecimal()]
    return tuple(map(int, numbers))


# --- what is missing ------------------------------------------------------------------------------


def _ask_for_layers(source: Source, layers: list[Layer]) -> None:
    """Ask which layers of an unknown family rotate, unless sections or flags of their own say it."""
    by_number, named = flagged(source), any(layer.name is not None for layer in layers)
    if source.family is not None or source.stated.rope_layers is not None or named:
        return
    if "layers" in source.knows and not by_number:
        return
    types, likely = with_attention(by_number or types_of(source)), list[str]()
    others = " (to name some of them, add layer_types to the config)"
    if types:
        others = f", or a list of the types that do, of {', '.join(map(repr, types))}"
    if by_number:
        others += " (public code reads no_rope_layers and its interval in two opposite ways)"
        likely = [name for name in types if name in ("no_rope_layers=1", "others")]
    advice = f"rope_layers='all' if all layers with attention rotate{others}"
    source.ask("rope_layers", "the layers that rotate", advice, likely or "all")


def _ask_for_each_width(source: Source, slices: dict[str | None, dict[str, Found]]) -> bool:
    """Ask for one type of layers at a time where one number of channels cannot answer for heads of several widths."""
    widths = {name: facts["head_dim"].value for name, facts in slices.items() if facts}
    several = source.family is None and len({*widths.values()}) > 1
    if several and ("rotary_dim" in source.asked or source.stated.rotary_dim is not None):
        each = " and ".join(f"{width} channels in {name}" for name, width in widths.items())
        advice = f"layer_type with the rotary_dim of its layers, as heads have {each}"
        source.ask("rotary_dim", "the channels that rotate", advice, None)
    return several


def _refuse(source: Source) -> NoReturn:
    """Raise the error that asks all questions, with the call that answers them for code like Llama's."""
    order = ("head_dim", "base", "interleaved", "rotary_dim", "start", "rope_layers")
    asked = {name: source.asked[name] for name in order if name in source.asked}
    *rest, last = [question.fact for question in asked.values()]
    facts = f"{', '.join(rest)} and {last}" if rest else last
    advice = "; ".join(question.advice for question in asked.values())
    stated = source.stated
    given = {**vars(stated), "section": source.prefix.removesuffix(".") or stated.section}
    given |= {name: each.likely for name, each in asked.items() if each.likely is not None}
    named = [
        f"{name}={name if name == 'inv_freq' else repr(value)}"
        for name, value in given.items()
        if value != getattr(Stated, name)
    ]
    # An object keeps null.
    null = any(
        value is None
        for key, value in source.values.items()
        if key in {*_WIDTHS_AND_BASES, *source.facts.bases}
    )
    why = call = ""
    if source.facts.made_by is not None and not null:
        call = f"; transformers.AutoConfig.from_pretrained(…) gives what {source.facts.made_by} fills in"
    if source.family is None:
        why = f", as the table of families does not contain {source.name}"
        if all(question.likely is not None for question in asked.values()):
            call = f"; {_LIKE_LLAMA}: {', '.join([CALL, *named])})"
    fail(f"the config must give {facts}{why}; pass {advice}{call}")


def _refuse_null_alias(source: Source) -> None:
    facts = source.facts
    for key, target in facts.also.items():
        if source.values.get(key, key) is None:
            fail(
                f"{source.shown(key)} must not be null, as {facts.made_by or source.name} takes it for {target}"
            )


def _refuse_without_rope(source: Source) -> None:
    facts = source.facts
    if facts.refused is not None:
        fail(f"{source.name} has no spec: {facts.refused}")
    for key, on in keys.SWITCHES.items():
        if source.values.get(key) is (not on):
            fail(f"the config has no RoPE: {source.shown(key)} is {not on}")
    if facts.switch is not None:
        switch = source.get(facts.switch)
        if switch is None or switch.value is not True:
            fail(f"the config has no RoPE: {source.shown(facts.switch)} is not True")
    if source.family is not None and facts.position_type is None:
        return  # its code ignores position_embedding_type, which is often a left-over
    selecting = keys.POSITION_TYPE if facts.position_type is None else (facts.position_type,)
    for each in [source.get(name) for name in selecting]:
        if each is not None and each.value in [*keys.POSITION_TYPES_WITH_ROPE]:
            continue
        if each is not None and each.given:
            fail(f"the config has no RoPE: {each.source} is {each.value!r}")
        if source.family is not None:
            fail(
                f"{source.name} has RoPE only if {selecting[0]} selects it, but the config has no such key"
            )
