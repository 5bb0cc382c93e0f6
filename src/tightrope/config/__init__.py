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

from .._errors import bad_type, describe, public
from ..frequencies import Given
from ..spec import RopeSpec
from . import diffusers, files, formats, gguf, timm
from .parts import chosen, parts_of, rotating
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


def from_config(config: object, **options: Any) -> RopeSpec | LayerSpecs | None:
    """Read a configuration; see :meth:`tightrope.RopeSpec.from_config`, which takes the same options."""
    return provenance(config, **options).spec


@public("from_config")
def provenance(  # noqa: PLR0913  (one argument for each option)
    config: object,
    *,
    layer_type: str | None = None,
    section: str | None = None,
    strict: bool = True,
    base: float | None = None,
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
    scaling      None     default of GPTNeoXConfig, transformers 5.23
    axes         None     one coordinate per position
    """
    given = None if inv_freq is None else Given.of(inv_freq)
    stated = Stated(
        layer_type, section, strict, base, interleaved, rotary_dim, start, rope_layers, given
    )
    if isinstance(config, Source):  # of convert, which adds what it knows
        return read(config, stated)
    source = source_of(config, section)
    if interleaved is None:
        source = replace(source, recorded=recorded(config, source.prefix.removesuffix(".")))
    return read(source, stated)


@public("from_config")
def source_of(config: object, section: str | None = None) -> Source:
    """The section of a configuration that is read, with keys renamed as in transformers.

    Internal to the library.
    """
    values = _load(config)
    source = _of_other_format(values)
    if source is None:
        model = config if isinstance(config, torch.nn.Module) else None
        return replace(chosen(values, section), model=model)
    if section is not None:
        fail(f"section must be None for {source.name}, which has no sections, but got {section!r}")
    return source


def _of_other_format(values: Mapping[str, Any]) -> Source | None:
    """The configuration, translated; None if it has the key names of transformers."""
    found = (translated(values) for recognised, translated in _FORMATS if recognised(values))
    return next(found, None)


def _parts(values: Mapping[str, Any]) -> dict[str, Source]:
    """The parts of a configuration in any format; ``""`` is the outer level."""
    source = _of_other_format(values)
    return parts_of(values) if source is None else {"": source}


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
def recorded(config: object, section: str | None = None) -> files.Record | None:
    """Return a conversion record that states the pairing of a section of a configuration; None if none does.

    Internal to the library and its tools.

    Args:
        section: the section as this configuration names it; ``""`` is its outer level. By default the one that is read
            if none is given.

    Raises:
        ValueError: a record is about tensors that this section may describe, or about a part of those that it does.
    """
    by_section = records_of(config)
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
def records_of(config: object) -> dict[str | None, list[files.Record]]:
    """Return the conversion records about a configuration, by the section that describes their tensors.

    Internal to the library and its tools.

    Args:
        config: a configuration, its path, or a model. A text part that transformers loaded from the folder of a
            larger model is found in the configuration of that folder.

    Returns:
        Section as this configuration names it -> records; None for records that it cannot place.

    Raises:
        ValueError: a record is not one.
    """
    config = _inner(config)
    records = files.records_beside(config)
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
    return {name: source.name for name, source in _parts(values).items()}


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
    return tuple(rotating(parts_of(values))) or ("",)
