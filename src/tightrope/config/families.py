"""Facts about the rotation of model families: what their configuration classes fill in, and what only their code says.

The facts are data: families.json has a row for each ``model_type``. `ci/families.py` writes what the classes of
transformers give; the facts of modeling code are written by hand, with their source, and compared with that code by
the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .keys import table


@dataclass(frozen=True)
class Family:
    """Facts about one ``model_type``.

    Attributes:
        interleaved: the pairing, as in :class:`tightrope.RopeSpec`.
        source: the code that shows the pairing: ``folder: function`` of transformers, or a description; empty if the
            outer level of this family does not rotate.
        pairing_key: the key by which the code lets a configuration choose the pairing.
        base: a constant of the code, for families whose configurations have no key for it.
        fixed: what the code takes from no key: "base", "scaling" or both.
        part: ``"none"``: the code rotates all channels whatever a key says. ``"factor"``: it reads a factor, and no
            number of channels. ``"stated"``: a section must give a factor. ``"sixths"``: as many channels rotate as three coordinates with equal numbers of pairs
            can share.
        head_dim: ``"computed"`` if the code ignores a key for the width of a head; ``"summed"`` if the class adds the two
            widths of latent attention in its place.
        width: the keys of the width and of the numbers that divide it into heads.
        start: ``"first"``, ``"nope"`` (after the channels of ``qk_nope_head_dim``) or ``"last"``.
        axes: the name of the rule that assigns coordinates to pairs; see ``axes_of`` in pairs.py.
        sections: the number of pairs of each coordinate if no key gives it.
        axes_with_sections: whether positions have one coordinate if no key gives sections.
        time_first: whether the first of three numbers of pairs is that of the time.
        rotates: the only types of layers that rotate; "dense" is a layer with full attention and without experts.
        rotates_if_windows: the same, unless ``sliding_window`` is null: then all layers rotate.
        flags: a key with a list that is not 0 for each layer that rotates.
        scaled: a key with the numbers of the layers whose frequencies are scaled.
        wide: type of layers -> the key of the width of their heads.
        labels: type of layers -> the label of its rope section.
        ratios: entry of ``compress_ratios`` -> type of layers, for files that do not list the types.
        alpha: whether ``alpha`` makes "dynamic" a fixed change of the base.
        attention_factor: label of a section -> YaRN's factor on the channels if no key gives it.
        rule: the name of a rule in layers.py that no fact above can state.
        position_type: the key that must select RoPE, as the model has none otherwise.
        switch: a key that must be true, as the model has no RoPE otherwise.
        null_base: whether a model whose base is null has no RoPE.
        turns: whether coordinates count turns, so that frequencies are multiplied by 2π.
        scales_softmax: whether its attention multiplies its softmax scale by the square of YaRN's magnitude at
            ``mscale_all_dim`` (`yarn_apply_mscale` in transformers).
        norm: the class of the norm that queries and keys get after their rotation, unless ``use_qk_norm`` is false.
        learned: the tensor in the weights by which the rotary module computes its frequencies; see learned.py.
        refused: why no spec can express this family; None for all others.
        made_by: the configuration class of transformers; None for code from elsewhere.
        keys: key -> its default.
        also: name that the class also takes -> the name of the key.
        ignored: keys whose values the class overwrites.
        beside: keys with a width that is not that of a rotated head.
        known: further keys of the class whose names have a word of the rotation.
        rope: the rope section by default; if ``nested``, one for each type of layers.
        nested: whether the class makes a section for each type of layers.
        fill: what the class adds to a section that is given; if ``nested``, for each type of layers.
        adds: whether a nested class adds the sections of the types that a file leaves out.
        untyped: whether the class does not read ``type``, the older key of a rule.
        spare: key of a base beside nested sections -> the paths of those that take it if they have none.
        lists: key with an entry for each layer -> the pattern of its default: the entries that repeat, the last, the key
            of their number, and further keys that the pattern holds for, with their values.
        bases, fractions: key outside of a section -> the paths in it to which the class moves the value.
        lost: those of these keys that the class reads only beside a section.
        places: name of a section -> the types of layers that get its keys; none if the class does not read it.
        per_layer: type of layers -> widths that the class gives to them alone.
        differs: path of a base in the section -> version of transformers -> its default, if versions differ.
        parts: key of a part of a composite -> its model type.
        flat: whether a composite puts keys of the outer level into its text.
        outer: key of a part -> the keys of the whole that are about this part.
        defaults: key of a part -> the defaults that the class of the whole gives to it, if they are others.
    """

    interleaved: bool = False
    source: str = ""
    pairing_key: str | None = None
    base: float | None = None
    fixed: tuple[str, ...] = ()
    part: str | None = None
    head_dim: str | None = None
    width: tuple[str, ...] = ()
    start: str = "first"
    axes: str | None = None
    sections: tuple[int, ...] | None = None
    axes_with_sections: bool = False
    time_first: bool = False
    rotates: tuple[str, ...] = ()
    rotates_if_windows: tuple[str, ...] = ()
    flags: str | None = None
    scaled: str | None = None
    wide: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, str] = field(default_factory=dict)
    alpha: bool = False
    attention_factor: Mapping[str, float] = field(default_factory=dict)
    rule: str | None = None
    position_type: str | None = None
    switch: str | None = None
    null_base: bool = False
    turns: bool = False
    scales_softmax: bool = False
    norm: str | None = None
    learned: str | None = None
    refused: str | None = None
    made_by: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    rope: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False
    fill: Mapping[str, Any] = field(default_factory=dict)
    adds: bool = False
    untyped: bool = False
    spare: Mapping[str, list[str]] = field(default_factory=dict)
    lists: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bases: Mapping[str, list[str]] = field(default_factory=dict)
    fractions: Mapping[str, list[str]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    places: Mapping[str, list[str]] = field(default_factory=dict)
    per_layer: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    differs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    flat: bool = False
    outer: Mapping[str, list[str]] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The source of a default."""
        if self.made_by is None:
            return f"default of the code ({self.source})"
        return f"default of {self.made_by}, transformers {VERSION}"


# Names in families.json -> those of the attributes, as "class" is a word of Python and code has sections of its own.
_NAMES = {"class": "made_by", "sections": "places"}


def _family(row: Mapping[str, Any]) -> Family:
    values = {_NAMES.get(key, key): value for key, value in row.items()}
    for key, more in values.pop("more", {}).items():  # what other code of the same type also reads
        values[key] = (
            {**values.get(key, {}), **more}
            if isinstance(more, dict)
            else [*values.get(key, ()), *more]
        )
    values |= values.pop("code", {})
    for each in fields(Family):
        if each.name in values and "tuple" in str(each.type):
            values[each.name] = tuple(values[each.name])
    return Family(**values)


_DATA = table("families")
#: The version of transformers whose classes gave the defaults.
VERSION: str = ".".join(_DATA["transformers"].split(".")[:2])
#: model_type -> the facts about it.
FAMILIES: dict[str, Family] = {
    name: _family(_DATA["families"][row.get("as", name)]) for name, row in _DATA["families"].items()
}
#: The last of each number of layers that ``no_rope_layer_interval`` gives, by default four, does not rotate.
LAST_OF_EACH: dict[str, dict[str, Any]] = {
    "no_rope_layers": {"repeat": [1, 1, 1, 0], "every": "no_rope_layer_interval"}
}
