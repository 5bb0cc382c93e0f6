"""Other people's configurations -> :class:`tightrope.RopeSpec`, with no guess and no silent default.

:func:`from_config` is :meth:`tightrope.RopeSpec.from_config`; :func:`provenance` tells which key gave
which field. What is read and what is refused: docs/config.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import bad_type, public
from ..spec import RopeSpec
from . import files, formats, keys
from .families import FAMILIES, SECTIONS, Family
from .reading import read
from .source import Source, fail
from .specs import LayerSpecs as LayerSpecs, Provenance as Provenance


@public("from_config")
def from_config(
    config: object,
    *,
    layer_type: str | None = None,
    section: str | None = None,
    strict: bool = True,
    interleaved: bool | None = None,
) -> RopeSpec | LayerSpecs | None:
    """See :meth:`tightrope.RopeSpec.from_config`."""
    return provenance(
        config, layer_type=layer_type, section=section, strict=strict, interleaved=interleaved
    ).spec


@public("from_config")
def provenance(
    config: object,
    *,
    layer_type: str | None = None,
    section: str | None = None,
    strict: bool = True,
    interleaved: bool | None = None,
) -> Provenance:
    """As :meth:`tightrope.RopeSpec.from_config`, and which key of the configuration gave which field.

    Returns:
        An object with the ``spec`` and the ``rows`` of a table, which ``print`` shows.

    Raises:
        ValueError, TypeError: as :meth:`tightrope.RopeSpec.from_config`.

    >>> pythia = {"model_type": "gpt_neox", "hidden_size": 2560, "num_attention_heads": 32,
    ...           "rotary_emb_base": 10000, "rotary_pct": 0.25}
    >>> print(provenance(pythia))
    head_dim     80       hidden_size / num_attention_heads = 2560 / 32
    base         10000.0  rotary_emb_base
    rotary_dim   20       rotary_pct = 0.25 of 80
    start        0        from the first channel
    interleaved  False    model_type 'gpt_neox' (gpt_neox: apply_rotary_pos_emb)
    scaling      None     no rope section asks for it
    axes         None     one coordinate per position
    """
    source = source_of(config, section)
    return read(source, layer_type=layer_type, strict=strict, interleaved=interleaved)


@public("from_config")
def source_of(config: object, section: str | None = None) -> Source:
    """The part of a configuration that is read, in the names of transformers, and its family.

    Internal to the library.
    """
    values = _load(config)
    if formats.is_gguf(values):
        source = formats.gguf(values)
    elif formats.is_meta(values):
        source = formats.meta(values)
    elif formats.is_megatron(values):
        source = formats.megatron(values)
    else:
        return _section(values, section)
    if section is not None:
        fail(f"section must be None for {source.name}, which has none, but got {section!r}")
    return source


def _load(config: object) -> Mapping[str, Any]:
    """The keys of a configuration: a mapping, an object with attributes, a file or its folder."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        return files.load(Path(config))
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else getattr(config, "__dict__", None)
    if isinstance(config, type) or not isinstance(values, Mapping):
        raise bad_type(f"config must be a mapping, a config object or a path but got {config!r}")
    return values


# --- nested sections ------------------------------------------------------------------------------


@public("from_config")
def sections(config: object) -> tuple[str, ...]:
    """Which parts of a configuration rotate: ``""`` for the outer level, else names of sections.

    Several, where :meth:`tightrope.RopeSpec.from_config` must be told which one is meant.

    >>> sections({"model_type": "llama", "rope_theta": 10000.0})
    ('',)
    """
    values = _load(config)
    if formats.is_gguf(values) or formats.is_meta(values) or formats.is_megatron(values):
        return ("",)
    values, spelled = _hoisted(values)
    nested = dict(_nested(values, values.get("model_type"), ""))
    outer = _source(values, values.get("model_type"), "", spelled)
    return tuple(_speaking(values, outer, nested)) or ("",)


def _section(values: Mapping[str, Any], chosen: str | None) -> Source:
    """The part of a configuration to read: itself, or one of its ``*_config``."""
    values, spelled = _hoisted(values)
    nested = dict(_nested(values, values.get("model_type"), ""))
    if chosen is not None and chosen != "":
        if chosen not in nested:
            has = ", ".join(nested) or "none"
            fail(f"section must be one of the config's sections but got {chosen!r}; it has {has}")
        return nested[chosen]
    outer = _source(values, values.get("model_type"), "", spelled)
    if chosen == "":
        return outer
    speaking = _speaking(values, outer, nested)
    if not speaking or speaking == [""]:
        return outer
    if len(speaking) == 1:
        return nested[speaking[0]]
    shown = ", ".join(repr(name) for name in speaking)
    fail(
        f"section must say which part of the config is meant, as RoPE is in {shown}; for example "
        f"RopeSpec.from_config(config, section={speaking[-1]!r})"
    )


def _speaking(values: Mapping[str, Any], outer: Source, nested: Mapping[str, Source]) -> list[str]:
    """The parts that say something about RoPE; the outer level is the empty name."""
    if outer.family is not None and outer.family.refused is not None:
        return [""]
    speaking = [name for name, source in nested.items() if _has_rope(source)]
    if _says_rope(values):
        speaking = [name for name in speaking if _says_rope(nested[name].values)]
        return ["", *(name for name in speaking if name.rpartition(".")[2] == "text_config")]
    return speaking


def _nested(values: Mapping[str, Any], model_type: object, prefix: str) -> list[tuple[str, Source]]:
    found: list[tuple[str, Source]] = []
    for key, inner in values.items():
        if not isinstance(inner, Mapping) or not str(key).endswith("_config"):
            continue
        if key in ("quantization_config", "per_layer_config"):
            continue
        own = inner.get("model_type")
        if own is None or own == model_type:
            own = SECTIONS.get((str(model_type), key), own)
        found.append((f"{prefix}{key}", _source(inner, own, f"{prefix}{key}.")))
        found += _nested(inner, own, f"{prefix}{key}.")
    return found


def _source(
    values: Mapping[str, Any],
    model_type: object,
    prefix: str,
    spelled: Mapping[str, str] | None = None,
) -> Source:
    family: Family | None = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    name = "a config without model_type" if model_type is None else f"model_type {model_type!r}"
    seen = tuple(f"{prefix}{key}" for key in values)
    return Source(values, family, name, spelled or {}, prefix, seen)


def _says_rope(values: Mapping[str, Any]) -> bool:
    """Whether a level says anything about how fast channels turn, by itself."""
    bases = (*keys.BASE, "rope_local_base_freq", "global_rope_theta")
    if any(values.get(key) is not None for key in bases):
        return True
    return any(bool(values.get(key)) for key in keys.SECTION)


def _has_rope(source: Source) -> bool:
    if _says_rope(source.values):
        return True
    return source.family is not None and source.family.refused is None


def _hoisted(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """DBRX keeps the base inside ``attn_config``."""
    inner = values.get("attn_config")
    if values.get("model_type") != "dbrx" or not isinstance(inner, Mapping):
        return values, {}
    base = inner.get("rope_theta")
    if base is None or "rope_theta" in values:
        return values, {}
    return {**values, "rope_theta": base}, {"rope_theta": "attn_config.rope_theta"}
