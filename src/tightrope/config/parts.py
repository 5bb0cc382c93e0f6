"""The parts of a configuration, such as text and images, and the one that is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import keys
from .families import FAMILIES, VERSION, Family
from .source import Source, fail

# Mappings that describe no part of a model.
_NO_PARTS = ("quantization_config", "per_layer_config")
_NO_TYPE = "a config without model_type"


def parts_of(values: Mapping[str, Any]) -> dict[str, Source]:
    """The parts of a configuration with the keys of transformers, by their paths; ``""`` is the outer level."""
    values, spelled = _hoisted(values)
    version = values.get("transformers_version")
    version = version if isinstance(version, str) else None
    found = _parts(values, values.get("model_type"), "", spelled)
    return {path: replace(source, version=version) for path, source in found}


def _parts(
    values: Mapping[str, Any], kind: object, prefix: str, spelled: Mapping[str, str]
) -> Iterator[tuple[str, Source]]:
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    facts, name = family or Family(), f"model_type {kind!r}"
    yield (
        prefix[:-1],
        _source(values, family, name if kind is not None else _NO_TYPE, prefix, spelled),
    )
    for key, inner in values.items():
        if not isinstance(inner, Mapping) or key in _NO_PARTS:
            continue
        own = inner.get("model_type")
        bare = key in facts.parts or (key in keys.BARE_SECTIONS and own)
        if not (bare or str(key).endswith("_config")):
            continue
        if own is None or own == kind:
            own = facts.parts.get(key, own)
        # Keys of this part that stand outside, and defaults that the class of the whole gives to it.
        outer = [each for each in facts.outer.get(key, ()) if each in values and each not in inner]
        more = {each: values[each] for each in outer}
        spelled = {each: f"{prefix}{each}" for each in more}
        for each, value in facts.defaults.get(key, {}).items():
            if inner.get(each) is None:
                more[each] = value
                inside = value if isinstance(value, Mapping) else ()
                paths = (each, *(f"{each}.{one}" for one in inside))
                spelled |= dict.fromkeys(paths, f"default of {name}, transformers {VERSION}")
        yield from _parts({**inner, **more}, own, f"{prefix}{key}.", spelled)


def _source(
    values: Mapping[str, Any],
    family: Family | None,
    name: str,
    prefix: str,
    spelled: Mapping[str, str],
) -> Source:
    seen = tuple(f"{prefix}{key}" for key in values)
    # A mapping without layers, such as vLLM's arguments, describes one rotation.
    layered = any(key in keys.LAYERS for key in values)
    knows = frozenset({"start"} if layered else {"start", "layers"})
    if family is not None and not family.source and family.refused is None:
        # A composite, whose outer level does not rotate; older files have the keys of the text there.
        text = (
            None
            if isinstance(values.get("text_config"), Mapping)
            else family.parts.get("text_config")
        )
        family = FAMILIES.get(text) if text and family.flat else None
    return Source(values, family, name, spelled, prefix, seen, knows=knows)


def _hoisted(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The outer level, with DBRX's base moved there from ``attn_config``, and that key's old path."""
    inner = values.get("attn_config")
    if values.get("model_type") != "dbrx" or not isinstance(inner, Mapping):
        return values, {}
    base = inner.get("rope_theta")
    if base is None or "rope_theta" in values:
        return values, {}
    rest = {key: value for key, value in inner.items() if key != "rope_theta"}
    return {**values, "attn_config": rest, "rope_theta": base}, {
        "rope_theta": "attn_config.rope_theta"
    }


def chosen(values: Mapping[str, Any], section: str | None) -> Source:
    """The part of a configuration that is read: the given one, the only one with RoPE, or the text.

    Raises:
        ValueError: there is no such part, or several could be meant.
    """
    parts = parts_of(values)
    if section is not None:
        if section not in [*parts]:  # a list compares objects of any kind
            has = ", ".join(name for name in parts if name) or "none"
            fail(
                f"section must be one of the config's sections but got {section!r}; the config has {has}"
            )
        return parts[section]
    found, whole = rotating(parts), FAMILIES.get(str(values.get("model_type")), Family())
    lacks = "text_config" in whole.parts and "text_config" not in parts
    if lacks and not whole.flat and not whole.source and whole.refused is None:
        fail(
            f"{parts[''].name} must have text_config, which describes its text, or section must name another part"
        )
    if not found or found == [""]:
        return parts[""]
    texts = [name for name in parts if name.rpartition(".")[2] in keys.TEXT]
    best = [] if "" in found else [name for name in texts if name in found]
    if len(best) > 1:
        best = [name for name in best if name.startswith(keys.THINKER)]
    if texts and not {"", *texts} & {*found}:
        fail(
            f"section must be given, as the text part, {texts[0]}, has no RoPE or no base; for example "
            f"RopeSpec.from_config(config, section={found[0]!r})"
        )
    if len(found) == 1 or len(best) == 1:
        # The keys of the outer level that describe no part of the model could still be about this one.
        described = {name.partition(".")[0] for name in parts if name}
        described |= {each for source in parts.values() for each in source.spelled.values()}
        outside = {} if parts[""].facts.refused else parts[""].values
        unread = {
            key: value
            for key, value in outside.items()
            if key not in described and not str(key).endswith("_config")
        }
        return replace(parts[(best or found)[0]], unread=unread)
    shown = ", ".join(repr(name) if name else "'' (the outer level)" for name in found)
    fail(
        f"section must name one part of the config, as RoPE is in {shown}; for example "
        f"RopeSpec.from_config(config, section={found[-1]!r})"
    )


def rotating(parts: Mapping[str, Source]) -> list[str]:
    """The names of the parts that use RoPE."""
    found = [name for name, source in parts.items() if name and _rotates(source)]
    if parts[""].facts.refused is not None:
        return [name for name in found if name.rpartition(".")[2] in keys.TEXT] or [""]
    if has_frequencies(parts[""]) or (parts[""].facts.made_by and _rotates(parts[""])):
        texts = [name for name in found if name.rpartition(".")[2] == "text_config"]
        return ["", *(name for name in texts if has_frequencies(parts[name]))]
    return found or ([""] if _rotates(parts[""]) else [])


def has_frequencies(source: Source) -> bool:
    """Return True if this level itself has a base or a rope section."""
    bases, values = (*keys.BASE, "rope_local_base_freq", "global_rope_theta"), source.values
    return any(values.get(key) is not None for key in bases) or any(map(values.get, keys.SECTION))


def _rotates(source: Source) -> bool:
    if source.facts.position_type is not None:
        found = source.get(source.facts.position_type)
        return found is not None and found.value in [*keys.POSITION_TYPES_WITH_ROPE]
    known = source.family is not None and source.facts.refused is None
    return known or has_frequencies(source)
