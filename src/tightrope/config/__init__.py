"""Read model configurations into a :class:`tightrope.RopeSpec`, without guesses or silent defaults.

:func:`from_config` is :meth:`tightrope.RopeSpec.from_config`; :func:`provenance` also returns the key
that gave each field. docs/config.md lists the supported and the refused configurations.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .._errors import Refusal, bad_type, describe, public
from ..frequencies import Given
from ..spec import RopeSpec
from . import diffusers, files, formats, gguf, keys, observed, timm
from .families import FAMILIES, SECTIONS, Family
from .questions import CALL, advised, with_calls
from .reading import read
from .source import Source, Stated, fail
from .specs import LayerSpecs as LayerSpecs, Provenance as Provenance

__all__ = ["LayerSpecs", "Provenance", "from_config", "provenance", "sections"]


# Formats other than that of transformers: how each is recognised, and translated.
_FORMATS = (
    (diffusers.recognised, diffusers.translated),
    (timm.recognised, timm.translated),
    (gguf.is_gguf, gguf.gguf),
    (formats.is_genai, formats.genai),
    (formats.is_meta, formats.meta),
    (formats.is_megatron, formats.megatron),
)


@public("from_config")
def from_config(  # noqa: PLR0913  (one argument for each option)
    config: object,
    *,
    layer_type: str | None = None,
    section: str | None = None,
    strict: bool = True,
    interleaved: bool | None = None,
    rotary_dim: int | None = None,
    start: int | None = None,
    rope_layers: str | Collection[str] | None = None,
    inv_freq: torch.Tensor | None = None,
) -> RopeSpec | LayerSpecs | None:
    """See :meth:`tightrope.RopeSpec.from_config`."""
    given = None if inv_freq is None else Given.of(inv_freq)
    stated = Stated(layer_type, section, strict, interleaved, rotary_dim, start, rope_layers, given)
    return _read(config, stated).spec


@public("from_config")
def provenance(  # noqa: PLR0913  (one argument for each option)
    config: object,
    *,
    layer_type: str | None = None,
    section: str | None = None,
    strict: bool = True,
    interleaved: bool | None = None,
    rotary_dim: int | None = None,
    start: int | None = None,
    rope_layers: str | Collection[str] | None = None,
    inv_freq: torch.Tensor | None = None,
) -> Provenance:
    """Read a configuration like :meth:`tightrope.RopeSpec.from_config`, with the source of each field.

    Returns:
        An object with the ``spec`` and the ``rows`` of a table; ``print`` shows the table.

    Raises:
        OSError, ValueError, TypeError: see :meth:`tightrope.RopeSpec.from_config`.

    >>> pythia = {"model_type": "gpt_neox", "hidden_size": 2560, "num_attention_heads": 32,
    ...           "rotary_emb_base": 10000, "rotary_pct": 0.25}
    >>> print(provenance(pythia))
    head_dim     80       hidden_size / num_attention_heads = 2560 / 32
    base         10000.0  rotary_emb_base
    rotary_dim   20       rotary_pct = 0.25 of 80
    start        0        from the first channel
    interleaved  False    model_type 'gpt_neox' (gpt_neox: apply_rotary_pos_emb)
    scaling      None     no key gives one
    axes         None     one coordinate per position
    """
    given = None if inv_freq is None else Given.of(inv_freq)
    stated = Stated(layer_type, section, strict, interleaved, rotary_dim, start, rope_layers, given)
    return _read(config, stated)


def _read(config: object, stated: Stated) -> Provenance:
    if isinstance(config, Source):  # of convert, which adds what it knows
        return read(config, stated)
    source = source_of(config, stated.section)
    if stated.interleaved is None:
        source = replace(source, recorded=recorded(config, source.prefix.removesuffix(".")))
    try:
        return read(source, stated)
    except Refusal as error:
        text = advised(source, stated, read, error)
        whole = stated.section is None and not source.prefix and not _without_spec(source)
        if whole and "RopeSpec" not in text:
            text = with_calls(text, *_of_a_part(config, source, stated))
        error.args = (text,)
        raise


def _of_a_part(config: object, source: Source, stated: Stated) -> list[str]:
    """The calls that read a part of a model whose outer level was refused, or are refused with better advice."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for name, inner in _nested(source.values, source.values.get("model_type"), ""):
        call = f"{CALL}, section={name!r})"
        if not keys.holds_rotation(inner.values):
            continue
        try:
            _read(config, replace(stated, section=name))
        except (ValueError, TypeError) as error:
            if "RopeSpec" in str(error):
                found[False].append(call)
        else:
            found[True].append(call)
    calls = found[True] or found[False]
    return [f"; for a part of it: {' or '.join(calls[:3])}"] if calls else []


@public("from_config")
def source_of(config: object, section: str | None = None) -> Source:
    """The section of a configuration that is read, with keys renamed as in transformers.

    Internal to the library.
    """
    values = _load(config)
    for recognised, translated in _FORMATS:
        if recognised(values):
            source = translated(values)
            if section is not None:
                fail(
                    f"section must be None for {source.name}, which has no sections, but got {section!r}"
                )
            return source
    source = _section(values, section)
    model = config if isinstance(config, torch.nn.Module) else None
    return replace(source, config=observed.object_of(_inner(config), source.prefix), model=model)


def _inner(config: object) -> object:
    """The configuration of a model; anything else unchanged."""
    if not isinstance(config, torch.nn.Module) or hasattr(config, "register_to_config"):
        return config  # diffusers' models are read with the name of their class
    inner = getattr(config, "config", None)
    if inner is None:
        raise bad_type(
            f"a model must have a config but {type(config).__name__} has none; pass the model of transformers or "
            f"diffusers that it holds, or a config as a mapping, an object or a path"
        )
    return inner


@public("from_config")
def recorded(
    config: object, section: str | None = None, records: list[files.Record] | None = None
) -> files.Record | None:
    """Return a conversion record that states the pairing of a section of a configuration; None if none does.

    Internal to the library and its tools.

    Args:
        section: the section as this configuration names it; ``""`` is its outer level. By default the one that is read
            if none is given.
        records: see :func:`records_of`.

    Raises:
        ValueError: a record is about tensors that this section may describe, or about a part of those that it does.
    """
    by_section = records_of(config, records)
    if by_section and section is None:
        section = source_of(config).prefix.removesuffix(".")
    about, unplaced = by_section.get(section or "", []), by_section.get(None, [])
    if unplaced and not about:
        where, name = unplaced[0].where, min(unplaced[0].tensors)
        fail(
            f"interleaved must be given, as {where} states the pairing of {name} and others but not which section of "
            "this configuration describes them"
        )
    done: set[str] = set().union(*(record.tensors for record in about))
    apart = {name for record in about for name in record.left} - done
    if apart or len({record.interleaved for record in about}) > 1:
        where, name = about[0].where, min(apart or about[-1].tensors)
        fail(
            f"interleaved must be given, as {where} states one pairing of {min(about[0].tensors)} and the other of {name}"
        )
    rows = [each for record in about for each in record.values["rows"]]
    return replace(about[0], values={**about[0].values, "rows": rows}) if about else None


@public("from_config")
def records_of(
    config: object, records: list[files.Record] | None = None
) -> dict[str | None, list[files.Record]]:
    """Return the conversion records about a configuration, by the section that describes their tensors.

    Internal to the library and its tools.

    Args:
        config: a configuration, its path, or a model. A text part that transformers loaded from the folder of a
            larger model is found in the configuration of that folder.
        records: what is recorded; by default what the folder of the configuration has.

    Returns:
        Section as this configuration names it -> records; None for records that it cannot place.

    Raises:
        ValueError: a record is not one.
    """
    config = _inner(config)
    records = files.records_beside(config) if records is None else records
    found: dict[str | None, list[files.Record]] = {}
    if not records:
        return found
    own = _names(_load(config))
    whole: dict[str | None, str] = own
    at: str | None = ""
    if not isinstance(config, str | os.PathLike | Mapping):
        with suppress(OSError, ValueError):
            whole = _names(files.load(Path(getattr(config, "name_or_path", ""))))
        places = [str(name) for name, model in whole.items() if model == own[""]]
        at = "" if "" in places else places[0] if len(places) == 1 else None
    for record in records:
        if at is None or whole.get(record.section) != record.model:
            found.setdefault(None, []).append(record)
        elif not at or f"{record.section}.".startswith(f"{at}."):
            section = str(record.section)[len(at) :].removeprefix(".")
            found.setdefault(section, []).append(record)
    return found


def _names(values: Mapping[str, Any]) -> dict[str | None, str]:
    """The kind of each section of a configuration, as errors name it; ``""`` is the outer level."""
    for recognised, translated in _FORMATS:
        if recognised(values):
            return {"": translated(values).name}
    _, outer, nested = _parts(values)
    return {"": outer.name, **{name: source.name for name, source in nested.items()}}


def _load(config: object) -> Mapping[str, Any]:
    """The keys of a configuration given as a mapping, an object, a file or a folder."""
    config = _inner(config)
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        return files.load(Path(config))
    inner = getattr(config, "config", None)
    if isinstance(inner, Mapping) and hasattr(config, "register_to_config"):
        # A model of diffusers: its config does not name the class.
        return {**inner, diffusers.CLASS: type(config).__name__}
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else getattr(config, "__dict__", None)
    if isinstance(config, type) or not isinstance(values, Mapping):
        raise bad_type(
            f"config must be a mapping, a config object, a model or a path but got {describe(config)}"
        )
    return values


# --- nested sections ------------------------------------------------------------------------------


@public("from_config")
def sections(config: object) -> tuple[str, ...]:
    """Names of the sections of a configuration that use RoPE; ``""`` is the outer level.

    If none is found, the result is the outer level alone. If there are several,
    :meth:`tightrope.RopeSpec.from_config` reads the text, unless ``section`` names another.

    >>> sections({"model_type": "llama", "rope_theta": 10000.0})
    ('',)
    """
    values = _load(config)
    if any(recognised(values) for recognised, _ in _FORMATS):
        return ("",)
    values, outer, nested = _parts(values)
    return tuple(_with_rope(values, outer, nested)) or ("",)


def _parts(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], Source, dict[str, Source]]:
    """The keys of a configuration in the form of transformers, its outer level and its sections."""
    values, spelled = _hoisted(values)
    nested = dict(_nested(values, values.get("model_type"), ""))
    return values, _source(values, values.get("model_type"), "", spelled), nested


def _section(values: Mapping[str, Any], chosen: str | None) -> Source:
    """The section of a configuration that is read: the outer level or one of its ``*_config``."""
    values, outer, nested = _parts(values)
    if chosen is not None and chosen != "":
        if chosen not in [*nested]:  # a list compares objects of any kind
            has = ", ".join(nested) or "none"
            fail(
                f"section must be one of the config's sections but got {chosen!r}; the config has {has}"
            )
        return nested[chosen]
    if chosen == "":
        return outer
    found = _with_rope(values, outer, nested)
    if not found or found == [""]:
        return outer
    texts = [name for name in nested if name.rpartition(".")[2] in keys.TEXT]
    parts = [] if "" in found else [name for name in texts if name in found]
    if len(parts) > 1:
        parts = [name for name in parts if name.startswith(keys.THINKER)]
    if texts and not {"", *texts} & {*found}:
        fail(
            f"section must be given, as the text part, {texts[0]}, has no RoPE or no base; for example "
            f"RopeSpec.from_config(config, section={found[0]!r})"
        )
    if len(found) == 1 or len(parts) == 1:
        # The keys of the outer level that describe no part of the model could still be about this one.
        described = {name.partition(".")[0] for name in nested}
        outside = {
            key: value
            for key, value in values.items()
            if key not in described
            and not str(key).endswith("_config")
            and not _without_spec(outer)
        }
        return replace(nested[(parts or found)[0]], unread=outside)
    shown = ", ".join(repr(name) if name else "'' (the outer level)" for name in found)
    fail(
        f"section must name one part of the config, as RoPE is in {shown}; for example "
        f"RopeSpec.from_config(config, section={found[-1]!r})"
    )


def _without_spec(source: Source) -> bool:
    return source.family is not None and source.family.refused is not None


def _with_rope(values: Mapping[str, Any], outer: Source, nested: Mapping[str, Source]) -> list[str]:
    """Names of the sections that use RoPE; the outer level is the empty name."""
    found = [name for name, source in nested.items() if _has_rope(source)]
    if _without_spec(outer):
        return [name for name in found if name.rpartition(".")[2] in keys.TEXT] or [""]
    if _has_frequencies(values):
        found = [name for name in found if _has_frequencies(nested[name].values)]
        return ["", *(name for name in found if name.rpartition(".")[2] == "text_config")]
    return found


def _nested(values: Mapping[str, Any], model_type: object, prefix: str) -> list[tuple[str, Source]]:
    found: list[tuple[str, Source]] = []
    for key, inner in values.items():
        if not isinstance(inner, Mapping) or key in ("quantization_config", "per_layer_config"):
            continue
        bare = key in keys.BARE_SECTIONS and "model_type" in inner
        if not bare and not str(key).endswith("_config"):
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
    # A mapping without layers, such as vLLM's arguments, describes one rotation.
    layered = any(key in keys.LAYERS for key in values)
    knows = frozenset({"start"} if layered else {"start", "layers"})
    return Source(values, family, name, spelled or {}, prefix, seen, knows=knows)


def _has_frequencies(values: Mapping[str, Any]) -> bool:
    """Return True if this level itself has a base or a rope section."""
    bases = (*keys.BASE, "rope_local_base_freq", "global_rope_theta")
    if any(values.get(key) is not None for key in bases):
        return True
    return any(bool(values.get(key)) for key in keys.SECTION)


def _has_rope(source: Source) -> bool:
    if source.family is not None and source.family.position_type is not None:
        return source.values.get(source.family.position_type) in [*keys.POSITION_TYPES_WITH_ROPE]
    if _has_frequencies(source.values):
        return True
    return source.family is not None and source.family.refused is None


def _hoisted(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The outer level, with DBRX's base moved there from ``attn_config``, and that key's old path."""
    inner = values.get("attn_config")
    if values.get("model_type") != "dbrx" or not isinstance(inner, Mapping):
        return values, {}
    base = inner.get("rope_theta")
    if base is None or "rope_theta" in values:
        return values, {}
    rest = {key: value for key, value in inner.items() if key != "rope_theta"}
    moved = {**values, "attn_config": rest, "rope_theta": base}
    return moved, {"rope_theta": "attn_config.rope_theta"}
