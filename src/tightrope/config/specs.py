"""The result of reading a configuration: one spec or one per layer type, and their provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from .._errors import bad_type, bad_value, describe, integer, public, sentence
from .._value import dictionary
from ..spec import RopeSpec
from .keys import LAYERS_WITHOUT_ATTENTION


class LayerSpecs(Mapping[str, "RopeSpec | None"]):
    """The specs of a model whose layers differ: layer type -> spec, None if its attention does not rotate.

    A mapping, equal to any other mapping with the same specs. Layer types without attention, such as
    ``"conv"``, are not in it.

    Args:
        specs: layer type -> spec or None.
        layers: the type of each layer, if the configuration lists them.

    >>> specs = LayerSpecs({"local": RopeSpec(64), "global": None}, ("local", "local", "global"))
    >>> specs["local"], specs.of(2)
    (RopeSpec(head_dim=64), None)
    """

    @public()
    def __init__(
        self, specs: Mapping[str, RopeSpec | None], layers: tuple[str, ...] | None = None
    ) -> None:
        self._specs = dictionary("specs", specs)
        for spec in self._specs.values():
            if not isinstance(spec, RopeSpec | None):
                raise bad_type(f"each spec must be a RopeSpec or None but got {describe(spec)}")
        if not isinstance(layers, tuple | None):
            raise bad_type(
                f"layers must be a tuple of layer types or None but got {describe(layers)}"
            )
        self.layers = layers

    def __getitem__(self, layer_type: str) -> RopeSpec | None:
        spec: RopeSpec | None = self._specs[layer_type]
        return spec

    def __getattr__(self, name: str) -> Any:
        # Only for what this class lacks. A private name may be asked for before the constructor has run.
        if name.startswith("_") or not hasattr(RopeSpec(0), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        one = next((kind for kind, spec in self.items() if spec is not None), "…")
        rule = f"{name} must be read from one spec of a layer type, as layers differ; specs[{one!r}].{name}"
        raise AttributeError(sentence(type(self).__name__, rule))

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __repr__(self) -> str:
        listed = "" if self.layers is None else f", layers={_runs(self.layers)}"
        return f"LayerSpecs({self._specs!r}{listed})"

    @public("LayerSpecs.of")
    def of(self, layer: int) -> RopeSpec | None:
        """Return the spec of a layer by its number; None if it has no attention, or none that rotates.

        Raises:
            ValueError: the configuration does not list its layers, the layer is not listed, or its type
                has no spec and is not known to be without attention.
            TypeError: the number is not an int.
        """
        if self.layers is None:
            raise bad_value("the config must list the type of each layer but does not")
        layer = integer("layer", layer)
        if not 0 <= layer < len(self.layers):
            raise bad_value(f"layer must lie in [0, {len(self.layers)}) but got {layer}")
        name = self.layers[layer]
        if name not in self._specs and name not in LAYERS_WITHOUT_ATTENTION:
            raise bad_value(
                f"layer {layer} must be of a type with a spec, of {', '.join(self)}, but is {name!r}"
            )
        return self.get(name)


def _runs(layers: tuple[str, ...]) -> str:
    """A short text for a list of layer types: ``3 × local, 1 × global, …``."""
    runs = [f"{len([*run])} × {name}" for name, run in groupby(layers)]
    return f"<{', '.join([*runs[:4], '…'] if len(runs) > 4 else runs)}>"


class Row(NamedTuple):
    """A layer type, a field of its spec, the field's value, and the key or fact that gave it."""

    layer: str | None
    field: str
    value: object
    source: str


@dataclass(frozen=True)
class Provenance:
    """A spec and the source of each of its fields; ``print`` shows it as a table.

    Attributes:
        spec: the result of :meth:`tightrope.RopeSpec.from_config`.
        rows: layer type, field, value, and the key or fact that gave it.
        name: the kind of configuration: ``model_type 'llama'``.
        context: the key of the context length and its value; None if there is none.
        temperature: the key of a factor on queries that grows with the position; None if there is none. It belongs to
            attention, so no spec has it.
        norm: the class of the norm that the model applies to queries and keys after their rotation; None for other
            models. :class:`tightrope.gates.Factor` expresses its weight.
    """

    spec: RopeSpec | LayerSpecs | None
    rows: tuple[Row, ...]
    name: str = ""
    context: tuple[str, int] | None = None
    temperature: str | None = None
    norm: str | None = None

    def __str__(self) -> str:
        shown = [(row.field, _short(row.value), row.source) for row in self.rows]
        widths = [max((len(row[column]) for row in shown), default=0) for column in (0, 1)]
        lines = []
        layer = None
        for row, (field, value, source) in zip(self.rows, shown, strict=True):
            if row.layer != layer:
                layer = row.layer
                lines.append(f"{layer}:")
            lines.append(f"{field:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip())
        return "\n".join(lines)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]} …{text[-1]}"
