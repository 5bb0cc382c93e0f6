"""Split a configuration into the parts that rotate, each with the sources of its fields."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from tightrope import config as reader
from tightrope.config import LayerSpecs, Provenance, files
from tightrope.frequencies import Rule
from tightrope.spec import RopeSpec

from .stored import Stored, shared_out, stored_in


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
        at: the numbers of these layers, if the configuration lists them.
        temperature: the key of a factor on queries that grows with the position, if the configuration has one.
        stored: the buffers of frequencies of these layers in the checkpoint beside the configuration.
    """

    name: str
    spec: RopeSpec | None
    fields: tuple[Field, ...] = ()
    context: tuple[str, int] | None = None
    layers: int | None = None
    why_not: str | None = None
    at: tuple[int, ...] = ()
    temperature: str | None = None
    stored: tuple[Stored, ...] = ()


def read(
    config: object, *, section: str | None = None, **options: Any
) -> tuple[str, str, list[Part]]:
    """Read a configuration and split it into its parts; return its name, the kind of configuration, and the parts.

    Args:
        config: a spec, any input of :meth:`tightrope.RopeSpec.from_config`, or the JSON of
            :meth:`tightrope.RopeSpec.to_dict`, as a mapping or in a file. If the configuration
            lies in a folder that `tightrope convert` wrote, and ``interleaved`` is not given, the
            pairing of each section that was converted is read from the record.
        section, options: as in :meth:`tightrope.RopeSpec.from_config`. Without a section,
            every part that rotates is read.

    Raises:
        OSError, ValueError, TypeError: as in :meth:`tightrope.RopeSpec.from_config`.
    """
    name, where, stored = type(config).__name__, config, list[Stored]()
    if isinstance(config, RopeSpec):
        return name, "a RopeSpec", [_of_spec(config, "given")]
    if isinstance(config, str | os.PathLike):
        name, path = os.fspath(config), Path(config)
        config = where = files.load(path)
        if path.is_dir() or path.name in files.NAMES:
            where = path  # records of conversions lie there
            stored = stored_in(path if path.is_dir() else path.parent)
    saved = isinstance(config, Mapping) and {"version", "head_dim"} <= config.keys()
    if saved and "model_type" not in config:  # type: ignore[operator]
        spec = RopeSpec.from_dict(config)  # type: ignore[arg-type]
        return name, "RopeSpec JSON", [_of_spec(spec, "the file")]
    sections = reader.sections(config)
    several = section is None and len(sections) > 1
    forms: list[str] = []
    found: list[Part] = []
    for one in sections if section is None else [section]:
        only = section is None and not several
        label = one or "outer level" * several
        chosen = one or section if only else one  # the only part, also if it is not the text
        try:
            provenance = reader.provenance(where, section=chosen, **options)
        except (ValueError, TypeError) as error:
            if not several:
                raise
            found.append(Part(label, None, why_not=str(error)))
        else:
            forms.append(provenance.name)
            found += _parts_of(provenance, label)
    if not forms:
        raise ValueError(found[0].why_not)
    return name, ", ".join(forms), shared_out(stored, found)


def _of_spec(spec: RopeSpec, source: str) -> Part:
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    if isinstance(rule := spec.scaling, Rule):
        inner = {f"scaling.{key}": value for key, value in rule.to_dict().items() if key != "rule"}
        values |= {"scaling": type(rule).__name__} | {
            k: v for k, v in inner.items() if v is not None
        }
    return Part("", spec, tuple(Field(name, value, source) for name, value in values.items()))


def _parts_of(provenance: Provenance, section: str) -> Iterator[Part]:
    """Yield the parts of a section."""
    specs: Mapping[Any, RopeSpec | None]
    specs, layers = {None: provenance.spec}, None  # type: ignore[dict-item]
    if isinstance(provenance.spec, LayerSpecs):
        specs, layers = provenance.spec, provenance.spec.layers
    for layer, spec in specs.items():
        at = tuple(number for number, one in enumerate(layers or ()) if one == layer)
        rows = [Field(*row[1:]) for row in provenance.rows if layer in (None, row.layer)]
        yield Part(
            ": ".join(filter(None, (section, layer))),
            spec,
            () if spec is None else tuple(rows),
            provenance.context,
            None if layers is None else len(at),
            "these layers do not rotate" if spec is None else None,
            at,
            provenance.temperature,
        )
