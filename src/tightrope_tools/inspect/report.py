"""The inspection report of one configuration."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tightrope._errors import bad_value, integer, public
from tightrope.spec import RopeSpec

from .exactness import EXACT, Exactness, exactness_of
from .notes import Note, notes_on
from .pairs import PairRow, rows_of
from .subject import Field, Part, read

# Lengths up to which errors are reported, in addition to the context.
_LENGTHS = (4096, 131072, 1048576)


@dataclass(frozen=True)
class PartReport:
    """The report on one rotation of a model.

    Attributes:
        part: the layers that rotate, and the sources of the fields of their spec.
        spec: the rotation.
        context: the length for which frequencies, turns and scalings are given; None if neither the
            caller nor a key states one.
        trained: the scaling rule's original length, else the stated context, else ``context``.
        pairs: all pairs of channels.
        attention_scaling: factor on the rotated channels at the length ``context``.
        softmax_scaling: factor on the model's softmax scale, apart from the rotation; None if it is not known whether
            its attention has one.
        exactness: errors of cosines and sines, for several ways to compute angles.
        notes: notes, warnings first.
    """

    part: Part
    spec: RopeSpec
    context: int | None
    trained: int | None
    pairs: tuple[PairRow, ...]
    attention_scaling: float
    softmax_scaling: float | None
    exactness: Exactness
    notes: tuple[Note, ...] = ()

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the spec and the context, with their sources."""
        if self.context is None:
            return self.part.fields
        key, stated = self.part.context or ("", None)
        source = key if self.context == stated else "as requested"
        return (*self.part.fields, Field("context", self.context, source))

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types; infinite values and NaN become null."""
        made: dict[str, Any] = plain(dataclasses.asdict(self))
        del made["part"]
        for pair, row in zip(self.pairs, made["pairs"], strict=True):
            row["effect"] = pair.effect if self.spec.scaling is not None else None
        fields = [
            dict(zip(("field", "value", "source"), plain(one), strict=True)) for one in self.fields
        ]
        first = {"name": self.name, "layers": self.part.layers}
        return {
            **first,
            **made,
            "spec": self.spec.to_dict(),
            "fields": fields,
            "exact_below": EXACT,
        }


@dataclass(frozen=True)
class Inspection:
    """The report on a model's rotary embedding.

    Attributes:
        name: path of the configuration, or the type of the object.
        form: the kind of configuration, such as ``model_type 'llama'``.
        parts: the rotations of the model.
        without: parts that do not rotate or cannot be read; their ``why_not`` gives the reason.
    """

    name: str
    form: str
    parts: tuple[PartReport, ...]
    without: tuple[Part, ...]

    @property
    def warnings(self) -> tuple[Note, ...]:
        """The warnings of all parts."""
        return tuple(note for part in self.parts for note in part.notes if note.warning)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        return {
            "name": self.name,
            "form": self.form,
            "parts": [part.to_dict() for part in self.parts],
            "without": [{"name": part.name, "why": part.why_not} for part in self.without],
        }


@public("inspect")
def inspect(config: object, *, context: int | None = None, **stated: Any) -> Inspection:
    """Inspect a model's rotary embedding.

    Args:
        config: any input of :meth:`tightrope.RopeSpec.from_config` (a mapping, an object, a model, the
            path of a JSON or GGUF file, or of a folder), the JSON of a spec, or a spec.
        context: the context length; by default that of the configuration.
        stated: layer_type, section, strict, base, interleaved, rotary_dim, start, rope_layers and inv_freq, as in
            :meth:`tightrope.RopeSpec.from_config`; without a section, every section that rotates is read.

    Raises:
        OSError: a file cannot be read.
        ValueError, TypeError: as in :meth:`tightrope.RopeSpec.from_config`, or the context is out of
            range.

    >>> found = inspect(RopeSpec(128), context=4096)
    >>> found.parts[0].pairs[0].turns > 651
    True
    >>> [note.code for note in found.parts[0].notes]
    ['never-turn', '16-bit']
    """
    if context is not None:
        context = integer("context", context, tensors=True)
        if not 1 <= context <= EXACT:
            raise bad_value(f"context must lie in [1, {EXACT}] but got {context}")
    name, form, parts = read(config, **stated)
    return Inspection(
        name,
        form,
        tuple(_report(part, part.spec, context) for part in parts if part.spec is not None),
        tuple(part for part in parts if part.spec is None),
    )


def _report(part: Part, spec: RopeSpec, context: int | None) -> PartReport:
    stated = None if part.context is None else part.context[1]
    length = context if context is not None else stated
    trained = getattr(spec.scaling, "original_max_position", None) or stated or context
    made = PartReport(
        part,
        spec,
        length,
        trained,
        rows_of(spec, length, trained),
        spec.attention_scaling(length),
        None if getattr(spec.scaling, "scales_softmax", True) is None else spec.softmax_scaling,
        exactness_of(spec, {*_LENGTHS, length or _LENGTHS[0]}, length),
    )
    return dataclasses.replace(made, notes=notes_on(made))


def plain(value: Any) -> Any:
    """Return a value in JSON types: null for NaN and infinity, the text of any other object."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value if value is None or isinstance(value, str | int) else repr(value)
