"""Split a configuration into the parts that rotate, each with the sources of its fields."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from tightrope import config as reader
from tightrope.config import LayerSpecs, Provenance, files
from tightrope.spec import RopeSpec

from ..convert.model import pairing_beside, pairing_name


class Field(NamedTuple):
    """A field of a spec, its value, and the key or fact it was read from."""

    name: str
    value: object
    source: str


@dataclass(frozen=True)
class Part:
    """One rotation of a model: that of all layers, of one layer type, or of one section.

    Attributes:
        name: layer type, section, or both; empty if the model has one rotation only.
        spec: None for layers that do not rotate, and for sections that cannot be read.
        fields: the fields of the spec with their sources.
        context: the key that states the context length, and the length; None if no key does.
        layers: the number of layers of this type, if the configuration lists them.
        why_not: why there is no spec.
    """

    name: str
    spec: RopeSpec | None
    fields: tuple[Field, ...] = ()
    context: tuple[str, int] | None = None
    layers: int | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class Configuration:
    """An inspected configuration: its name, the kind of configuration, and its parts."""

    name: str
    form: str
    parts: tuple[Part, ...]


def read(
    config: object,
    *,
    section: str | None = None,
    interleaved: bool | None = None,
    **stated: Any,
) -> Configuration:
    """Read a configuration and split it into its parts.

    Args:
        config: a spec, any input of :meth:`tightrope.RopeSpec.from_config`, or the JSON of
            :meth:`tightrope.RopeSpec.to_dict`, as a mapping or in a file. If the configuration
            lies in a folder that `tightrope convert` wrote, and ``interleaved`` is None, the
            pairing is read from the conversion record.
        section, interleaved, stated: as in :meth:`tightrope.RopeSpec.from_config`. Without a section,
            every part that rotates is read.

    Raises:
        OSError, ValueError, TypeError: as in :meth:`tightrope.RopeSpec.from_config`.
    """
    name = os.fspath(config) if isinstance(config, str | os.PathLike) else type(config).__name__
    beside: tuple[bool, str] | None = None
    if isinstance(config, RopeSpec):
        return Configuration("RopeSpec", "a RopeSpec", (_of_spec(config, "given"),))
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        config = files.load(path)
        if interleaved is None and (path.is_dir() or path.name in files.NAMES):
            beside = pairing_beside(path if path.is_dir() else path.parent)
    if _is_saved_spec(config):
        spec = RopeSpec.from_dict(config)  # type: ignore[arg-type]
        return Configuration(str(name), "RopeSpec JSON", (_of_spec(spec, "the file"),))
    options: dict[str, Any] = {**stated, "interleaved": interleaved}
    rotating = reader.sections(config)
    if section is not None or len(rotating) == 1:
        if beside is not None:
            options["interleaved"] = beside[0]
        provenance = reader.provenance(config, section=section, **options)
        parts = _parts_of(provenance, section or "")
        return Configuration(
            str(name), provenance.name, tuple(_recorded(part, beside) for part in parts)
        )
    if beside is not None:
        warnings.warn(
            f"{beside[1]} states that the weights are {pairing_name(beside[0])}, but not which of "
            f"{', '.join(one or 'the outer level' for one in rotating)} it means: give the section",
            UserWarning,
            stacklevel=3,
        )
    found: list[Part] = []
    forms: list[str] = []
    for one in rotating:
        try:
            provenance = reader.provenance(config, section=one, **options)
        except (ValueError, TypeError) as error:
            found.append(Part(one or "outer level", None, why_not=str(error)))
        else:
            forms.append(provenance.name)
            found += _parts_of(provenance, one or "outer level")
    if not forms:
        raise ValueError(found[0].why_not)
    return Configuration(str(name), ", ".join(forms), tuple(found))


def _recorded(part: Part, beside: tuple[bool, str] | None) -> Part:
    """Return the part with a conversion record as the source of its pairing, if there is one."""
    if beside is None:
        return part
    rows = tuple(
        row._replace(source=beside[1]) if row.name == "interleaved" else row for row in part.fields
    )
    return replace(part, fields=rows)


def _is_saved_spec(config: object) -> bool:
    if not isinstance(config, Mapping) or "model_type" in config:
        return False
    return "version" in config and "head_dim" in config


def _of_spec(spec: RopeSpec, source: str) -> Part:
    rows = [Field(each.name, getattr(spec, each.name), source) for each in fields(spec)]
    if spec.scaling is not None:
        at = next(i for i, row in enumerate(rows) if row.name == "scaling")
        inner = [
            Field(f"scaling.{key}", value, source)
            for key, value in spec.scaling.to_dict().items()
            if key != "rule" and value is not None
        ]
        rows[at : at + 1] = [Field("scaling", type(spec.scaling).__name__, source), *inner]
    return Part("", spec, tuple(rows))


def _parts_of(provenance: Provenance, section: str) -> tuple[Part, ...]:
    specs = provenance.spec
    if not isinstance(specs, LayerSpecs):
        rows = tuple(Field(*row[1:]) for row in provenance.rows)
        why_not = None if specs is not None else f"{provenance.name}: these layers do not rotate"
        return (Part(section, specs, rows, provenance.context, why_not=why_not),)
    parts = []
    for layer, spec in specs.items():
        rows = tuple(Field(*row[1:]) for row in provenance.rows if row.layer == layer)
        part = Part(layer, spec, rows, provenance.context)
        if specs.layers is not None:
            part = replace(part, layers=specs.layers.count(layer))
        if spec is None:
            part = replace(part, fields=(), why_not="these layers do not rotate")
        parts.append(replace(part, name=f"{section}: {layer}" if section else layer))
    return tuple(parts)
