"""Read the rope sections of a configuration, over those that its class makes by default.

A section holds the keys of one rotation: ``rope_scaling`` of older files, ``rope_parameters`` of newer ones. Classes whose
layers differ make one for each type of layers, and move keys that stand beside a section into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..frequencies import RULES
from . import keys
from .source import Found, Section, Source, agreed, fail, items

_BASE, _PART = "rope_theta", "partial_rotary_factor"
# Type of layers -> its section, None for a type that does not rotate; the key None is that of all layers.
Made = dict[str | None, Section | None]
# Where keys stand beside a section, in code without a class in the table.
_PLAIN = (
    (_BASE, {key: [""] for key in keys.BASE}),
    (_PART, {key: [""] for key in keys.FRACTION}),
)


def sections_of(source: Source) -> Made:
    """Type of layers -> its rope section, None for types that do not rotate; the key None is that of all layers."""
    flat, inner, nulls = _given(source)
    if not source.facts.nested:
        return _one(source, flat, inner, nulls)
    return _for_each_type(source, flat, inner, nulls)


def _given(source: Source) -> tuple[dict[str, Section], Made, set[str]]:
    """The sections of the file: by their names, by the type of layers, and the keys that are null."""
    facts = source.facts
    types = source.listed("layer_types") or source.listed("layers_block_type")
    labels = {*types, *facts.labels.values(), *(facts.rope if facts.nested else ())}
    flat: dict[str, Section] = {}
    inner: Made = {}
    nulls: set[str] = set()
    for name in keys.SECTION:
        if source.values.get(name) is None:
            continue
        section = items(Found(source.values.get(name), source.shown(name)))
        _refuse_lost(source, name, section)
        held = any(isinstance(value, Mapping) for value in section.values())
        plain = {}
        for key, value in section.items():
            other = key not in keys.TYPE and not keys.about_rotation(key)
            if isinstance(value, Mapping):
                own = _section(source, f"{name}.{key}", value)
                inner[key] = _merged(inner.get(key) or {}, own)
                nulls |= {k for k, v in value.items() if v is None}
            elif value is None and (key in labels or (held and other)):
                inner.setdefault(key, None)
            else:
                plain[key] = value
        nulls |= {key for key, value in plain.items() if value is None}
        if plain:  # keys that are all null count for a class
            flat[name] = _section(source, name, plain)
    if inner and flat:
        has = sorted(found.source for section in flat.values() for found in section.values())
        fail(
            f"a rope section must hold keys or layer types but got both: {', '.join(has)} and "
            f"{', '.join(sorted(map(str, inner)))}"
        )
    _refuse_two(source, flat)
    if inner and facts.made_by and labels and not {*inner} <= labels:
        fail(
            f"a rope section must be of a type of layers, of {', '.join(sorted(map(str, labels)))}, but got "
            f"{', '.join(map(str, inner))}"
        )
    return flat, inner, nulls


def _refuse_lost(source: Source, name: str, section: Mapping[str, Any]) -> None:
    """Raise an error for a section of which the class of the family drops keys, or takes others."""
    facts, path = source.facts, source.shown(name)
    usual = {"rope_type": "default", **facts.fill} if not facts.nested else {}
    if not facts.made_by:
        return
    if not section and name == "rope_parameters" and facts.rope and facts.rope != usual:
        fail(f"{path} must not be empty, as {facts.made_by} drops its default section then")
    if (
        facts.nested
        and name == "rope_scaling"
        and any(isinstance(each, Mapping) for each in section.values())
    ):
        fail(f"{path} must hold one section; those of types of layers stand in rope_parameters")
    if facts.untyped and "type" in section and "rope_type" not in section:
        fail(f"{path} must have rope_type, as the code of {source.name} reads no type")
    for key in (_BASE, _PART):
        if not facts.places and section.get(key) not in (None, facts.base, facts.fill.get(key)):
            fail(
                f"{path}.{key} must not be given, as {facts.made_by} reads no rope section, but got {section[key]!r}"
            )


def _section(source: Source, path: str, values: Mapping[str, Any]) -> Section:
    """The keys of a section that are not null, by their usual names."""
    section: Section = {}
    for key, value in values.items():
        if value is not None:
            found = Found(value, source.shown(f"{path}.{key}"))
            section = _merged(section, {_usual(source, key): found})
    return section


def _usual(source: Source, key: str) -> str:
    """The usual key of a base or a part in a section; a class reads no other one."""
    if source.facts.made_by:
        return key
    return _BASE if key in keys.BASE else _PART if key in keys.FRACTION else key


def _refuse_two(source: Source, flat: dict[str, Section]) -> None:
    """Raise an error for two sections that differ: a class takes rope_scaling alone then."""
    held = [{key: each.value for key, each in section.items()} for section in flat.values()]
    if source.facts.made_by and len(held) == 2 and held[0] != held[1]:
        _merged(*flat.values())
        both = " and ".join(map(source.shown, flat))
        fail(
            f"a config must have one rope section but {both} differ, of which {source.facts.made_by} takes the first"
        )


def _merged(one: Section, other: Section) -> Section:
    for key in one.keys() & other.keys():
        agreed(key, [one[key], other[key]])
    return other | one


def _one(source: Source, flat: dict[str, Section], inner: Made, nulls: set[str]) -> Made:
    """The section of a class that makes one for all layers, or those of code from elsewhere."""
    facts, made = source.facts, dict(inner)
    if inner and facts.made_by:
        fail(
            f"{source.name} must have one rope section but has one for {', '.join(map(str, inner))}"
        )
    if not inner:
        section: Section = {}
        for name, own in flat.items():
            if facts.places.get(name) == []:
                fail(
                    f"the scaling must be in rope_parameters, as {facts.made_by} does not read {source.shown(name)}"
                )
            section = _merged(section, own)
        if not flat:
            _refuse_null(source)
            section = _defaults(source, facts.rope)
        made = {None: section}
    fill = {key: found for key, found in _defaults(source, facts.fill).items() if key not in nulls}
    for kind, each in made.items():
        if each is not None:
            made[kind] = filled = fill | each
            # The base beside sections is for the types that have none.
            _take(source, filled, "", bool(flat or inner), apart=bool(inner))
    return made


def _defaults(source: Source, section: Mapping[str, Any]) -> Section:
    owner = source.facts.owner
    return {
        key: Found(value, owner, given=False) for key, value in section.items() if value is not None
    }


def _refuse_null(source: Source) -> None:
    """Raise an error for a section that is null where the class scales by default: one that is absent is scaled."""
    null = [source.shown(name) for name in keys.SECTION if name in source.values]
    if null and source.facts.rope.get("rope_type", "default") not in keys.TYPES_WITHOUT_RULE:
        fail(
            f"{null[0]} must not be null, as {source.facts.made_by} scales by default; give a section that names its "
            "rope_type; 'default' is unscaled"
        )


def _for_each_type(source: Source, flat: dict[str, Section], inner: Made, nulls: set[str]) -> Made:
    """The sections of a class that makes one for each type of layers."""
    facts = source.facts
    made: Made = {
        kind: None if section is None else _defaults(source, section)
        for kind, section in facts.rope.items()
        if facts.adds or not inner
    }
    if inner and facts.labels and {*inner} != {*facts.labels.values()}:
        both = " and ".join(dict.fromkeys(facts.labels.values()))
        fail(
            f"{source.name} must have the rope sections {both} but has {', '.join(map(str, inner))}"
        )
    for kind, section in inner.items():
        if section is None and facts.adds:
            fail(
                f"the rope section of {kind} must not be null, as {facts.made_by} gives it its default"
            )
        fill = _defaults(source, facts.fill.get(str(kind), {}))
        free = {key: found for key, found in fill.items() if key not in nulls}
        for key, paths in facts.spare.items():
            beside = source.get(key, default=False)
            if beside is not None and f"{kind}.{_BASE}" in paths:
                free[_BASE] = beside
        made[kind] = None if section is None else free | section
    for name, own in flat.items():
        kinds = facts.places.get(name, [])
        if facts.labels:  # the base is the one beside the section
            own.pop(_BASE, None)
        if not kinds or kinds == [""]:
            fail(
                f"{source.name} must have a rope section for each type of layers, such as {', '.join(facts.rope) or 'full_attention'}, but "
                f"{source.shown(name)} holds keys"
            )
        for kind in kinds:
            before = made.get(kind) or {}
            made[kind] = {key: before[key] for key in (_BASE, _PART) if key in before} | own
    for kind, each in made.items():
        if each is not None:
            _take(source, each, f"{kind}.", kind in inner)
    return made


def _take(source: Source, section: Section, prefix: str, own: bool, apart: bool = False) -> None:
    """Move keys that stand beside a section into it, where the class does.

    Args:
        prefix: the type of layers and a point, or nothing.
        own: whether the file gives the section.
        apart: whether its keys count instead of those beside it.
    """
    facts = source.facts
    of_class = ((_BASE, facts.bases), (_PART, facts.fractions))
    for target, places in of_class if facts.bases or facts.made_by else _PLAIN:
        for name, paths in places.items():
            if prefix + target not in [path or target for path in paths]:
                continue
            if name in source.values and source.values[name] is None:
                if target == _PART and target in section and not section[target].given:
                    fail(
                        f"{source.shown(name)} must not be null, as null is not the default of {facts.made_by}, "
                        f"{section[target].value!r}"
                    )
                if not own:
                    section.pop(target, None)
            found = agreed(name, source.given(name))
            if found is None or isinstance(found.value, list | tuple):
                continue
            now = section.get(target)
            if now is not None and now.given:
                # Objects of a class keep its default beside a section, where it no longer counts.
                if not apart and found.value not in (
                    facts.fill.get(target),
                    facts.rope.get(target),
                ):
                    agreed("base" if target == _BASE else target, [now, found])
            elif name in facts.lost and not own and now is not None and now.value != found.value:
                fail(
                    f"{found.source} = {found.value!r} must stand in a rope section, as {facts.made_by} does not read it "
                    f"beside one that is missing, and takes {now.value!r}"
                )
            else:
                section[target] = found


# --- the type of a section ------------------------------------------------------------------------


def rule_name(section: Section) -> Any:
    """The type that a rope section names, if need be other than "default"; None without one."""
    found = [section[key] for key in keys.TYPE if key in section]
    for each in found:
        if not isinstance(each.value, str):
            fail(f"{each.source} must be a string but got {each.value!r}")
    given = [each for each in found if each.given]
    # Two spellings of one rule agree, and those of none.
    none = dict.fromkeys(keys.TYPES_WITHOUT_RULE)
    if len({(RULES | none).get(each.value, each.value) for each in given}) > 1:
        agreed("the kind of scaling", given)
    named = [each for each in found if each.value != "default"]
    return (named or found)[0].value if found else None
