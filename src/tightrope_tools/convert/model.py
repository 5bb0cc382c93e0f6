"""The rotation of a checkpoint's model: channels, pairing, numbers of heads, and names of the projections.

These facts are read from the configuration and the table of families; the user states what both
lack. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tightrope import config as reader
from tightrope.config import LayerSpecs, formats, keys
from tightrope.config.files import NAMES, Record, load
from tightrope.spec import RopeSpec

from .files import Checkpoint, fail, shown
from .naming import FAMILY_NAMING, KEY_HEADS_OPTIONAL, NAMINGS, PACKINGS, Naming, own_naming

HEADS = (*keys.HEADS, "num_query_heads")
KV_HEADS = tuple(
    """num_key_value_heads n_kv_heads num_kv_heads num_query_groups n_head_kv kv_n_heads multi_query_group_num
    num_attention_groups encoder_num_key_value_heads decoder_num_key_value_heads""".split()
)
_BY_LAYER = ("per_layer_config", "block_configs")  # what layers have of their own
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_MOST = 65536  # heads, layers, or channels
_QUANTISED = "quantization_config"


def pairing_name(interleaved: bool) -> str:
    """Return the name of a pairing on the command line."""
    return "interleaved" if interleaved else "half"


def basis(who: str, assumed: bool) -> str:
    """Return where a pairing comes from: stated by a key, a record or the user, or assumed from the family."""
    return f"{'assumed from' if assumed else 'stated by'} {who}"


@dataclass(frozen=True)
class Stated:
    """The user's statements about a checkpoint, in place of its configuration or in addition to it.

    Attributes:
        config: a configuration, its file or folder; by default the one beside the weights. False for none, also if
            there is one.
        section: the part of a nested configuration to read.
        source: the pairing of the checkpoint: ``"half"`` or ``"interleaved"``.
        naming: a key of NAMINGS or FAMILY_NAMING in :mod:`tightrope_tools.convert.naming`; or a mapping from names of
            modules to their roles, with ``*`` for the number of the layer:
            ``{"layers.*.attn.q_k_v_proj": "qkv"}``.
        prefix: the name prefix of the layers to convert, if layers have several prefixes.
        packing: the order of heads in a fused projection: ``"blocks"``, ``"grouped"`` or
            ``"quarters"``.
        heads, kv_heads: numbers of query and key heads.
        head_dim, rotary_dim, start: as in :class:`tightrope.RopeSpec`.
    """

    config: object = None
    section: str | None = None
    source: str | None = None
    naming: str | Mapping[str, str] | None = None
    prefix: str | None = None
    packing: str | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    rotary_dim: int | None = None
    start: int | None = None


@dataclass(frozen=True)
class Model:
    """The rotation of a checkpoint's model, and the names of the projections it rotates.

    Attributes:
        specs: one spec for all layers, or one per layer.
        interleaved: the pairing of the checkpoint; None if nothing states it.
        who: the source of the pairing, for messages.
        naming: the naming scheme of the projections.
        stated: the user's statements.
        name: the kind of configuration, for messages.
        facts: the keys of the configuration.
        family: its family: a model_type, or "meta" or "megatron" for their formats.
        assumed: whether the pairing is that of the family's code, which no file and no user states.
        native: the pairing that the code of its family always has; None if unknown, or if a key chooses it.
        mark: the key of the configuration by which the family's own code chooses the pairing, if any.
        at: the keys that lead to the section of the configuration that was read; None without a configuration.
        alone: whether the configuration describes no other part of the model, with or without RoPE.
    """

    specs: RopeSpec | LayerSpecs
    interleaved: bool | None
    who: str
    naming: Naming
    stated: Stated
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    family: str | None = None
    assumed: bool = False
    native: bool | None = None
    mark: str | None = None
    at: tuple[str, ...] | None = None
    alone: bool = True

    def of(self, layer: int) -> RopeSpec | None:
        """Return the spec of a layer, or None for a layer without RoPE."""
        return self.specs if isinstance(self.specs, RopeSpec) else self.specs.of(layer)

    def size(self, *names: str) -> int | None:
        """Return the whole number of the first of these keys that the configuration has."""
        found = ((name, self.facts[name]) for name in names if self.facts.get(name) is not None)
        return next((_whole(*one) for one in found), None)

    @property
    def layers(self) -> int | None:
        """The number of layers; None if not stated."""
        return self.size(*_LAYERS)

    def attends(self, layer: int) -> RopeSpec | None:
        """Return the spec of a layer that must have attention; None if it may have none, or no RoPE."""
        kinds = self.facts.get("layer_types") or self.facts.get("layers_block_type")
        kind = kinds[layer] if isinstance(kinds, list | tuple) and layer < len(kinds) else None
        known = isinstance(self.specs, RopeSpec) or layer < len(self.specs.layers or ())
        if str(kind) in keys.LAYERS_WITHOUT_ATTENTION or not known:
            return None
        own = inside(self.facts, "block_configs", layer, "attention")  # Nemotron-NAS
        return None if own.get("no_op") or own.get("replace_with_linear") else self.of(layer)

    @property
    def heads(self) -> int | None:
        """The number of query heads; None if nothing states it, 0 if layers differ."""
        return self._count(HEADS, "--heads", self.stated.heads)

    @property
    def kv_heads(self) -> int | None:
        """The number of key heads; None if nothing states it, 0 if layers differ."""
        facts = self.facts
        # Megatron's arguments and ChatGLM's configuration hold a number of key heads even if it is not used.
        unused = any(facts.get(f"{kind}_query_attention") is False for kind in ("group", "multi"))
        multi = facts.get("multi_query") is True
        if self.family == "falcon":
            unused = not facts.get("new_decoder_architecture")
            multi = unused and bool(facts.get("multi_query", True))
        names = () if unused else KV_HEADS
        found = self._count(names, "--kv-heads", self.stated.kv_heads)
        if found is None and multi:
            return 1
        same = unused or self.family in {"falcon", *KEY_HEADS_OPTIONAL}
        return self.heads if found is None and same else found

    def _count(self, names: tuple[str, ...], flag: str, given: int | None) -> int | None:
        """Return the number of heads that the user or the configuration states; 0 if layers differ."""
        facts = self.facts
        found = {name: facts[name] for name in names if facts.get(name) is not None}
        own = (*_BY_LAYER, *(f"{name}_per_layer" for name in names))
        listed = any(isinstance(value, list | tuple) for value in found.values())
        if listed or any(facts.get(key) for key in own):
            return 0 if given is None else _whole(flag, given)
        if given is not None:
            found[flag] = given
        counts = {_whole(name, value) for name, value in found.items()}
        if len(counts) > 1:
            all_ = " and ".join(f"{key} = {value}" for key, value in found.items())
            fail(f"a number of heads must have one value but got {all_}")
        return next(iter(counts), None)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        fail(f"{name} must be a whole number from 1 to {_MOST} but got {value!r}")
    return value


def inside(value: Any, *path: str | int) -> Mapping[str, Any]:
    """Return the mapping at a path of keys and indices; empty if there is none."""
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return {}
    return value if isinstance(value, Mapping) else {}


def read_model(checkpoint: Checkpoint, stated: Stated) -> Model:
    """Read the model of a checkpoint from its configuration and the user's statements.

    Its pairing is that of the family's code or a key; :func:`.record.settled` adds what was recorded.

    Raises:
        ValueError: a value is missing, or its sources conflict.
        OSError: the configuration cannot be read.
    """
    if not isinstance(stated, Stated):
        fail(f"stated must be a Stated, such as Stated(source='half'), but got {stated!r}")
    if stated.source not in (None, "half", "interleaved"):
        fail(f"a pairing must be 'half' or 'interleaved' but got {stated.source!r}")
    found = stated.config
    if found is None and any((checkpoint.home / name).is_file() for name in NAMES):
        found = checkpoint.home
    read = found is not None and found is not False
    model = _from_config(found, stated) if read else _from_flags(stated)
    if stated.source is None:
        return model
    given = stated.source == "interleaved"
    return replace(model, interleaved=given, who="the user (--from)", assumed=False)


def _from_flags(stated: Stated) -> Model:
    needed = {"--head-dim": stated.head_dim, "--naming": stated.naming}
    missing = [flag for flag, value in needed.items() if not value]
    if missing:
        fail(f"without config.json or params.json, pass --config, or {' and '.join(missing)}")
    spec = RopeSpec(stated.head_dim, rotary_dim=stated.rotary_dim, start=stated.start or 0)  # type: ignore[arg-type]
    name = "a checkpoint without configuration"
    return Model(spec, None, "the command line", _naming(stated, None), stated, name)


def _naming(stated: Stated, family: str | None) -> Naming:
    key = stated.naming or FAMILY_NAMING.get(family or "")
    if key is None:
        fail(
            f"the names of the projections of {family or 'this checkpoint'} are not known: pass --naming, "
            f"one of {', '.join(NAMINGS)}, or names of your own"
        )
    if isinstance(key, str):
        key = FAMILY_NAMING.get(key, key)
        if key not in NAMINGS:
            fail(f"naming must be one of {', '.join(NAMINGS)} but got {key!r}")
        naming = NAMINGS[key]
    else:
        naming = own_naming(key)
    if stated.packing not in (None, *PACKINGS):
        fail(f"packing must be one of {', '.join(PACKINGS)} but got {stated.packing!r}")
    return replace(naming, packing=stated.packing or naming.packing)


def _from_config(found: object, stated: Stated) -> Model:
    if isinstance(found, str | Path):
        found = load(Path(found))
    source = reader.source_of(found, stated.section)
    values, family = source.values, source.family
    given = None if stated.source is None else stated.source == "interleaved"
    pair = next((key for key in keys.PAIRING if values.get(key) is not None), None)
    silent = family is None and given is None and pair is None
    asked: dict[str, Any] = {"rotary_dim": stated.rotary_dim, "start": stated.start}
    asked["interleaved"] = False if silent else given
    if family is None:
        # Layers without RoPE compute the same if their channels are permuted too.
        source = replace(source, knows=source.knows | {"layers"})
    else:  # a conversion needs no frequencies
        source = replace(source, family=replace(family, learned=None))
    read = reader.provenance(source, **asked)
    specs = read.spec.values() if isinstance(read.spec, LayerSpecs) else [read.spec]
    rotated = [spec for spec in specs if spec is not None]
    if read.spec is None or not rotated:
        fail(f"{source.name} has no RoPE")
    if stated.head_dim not in (None, rotated[0].head_dim):
        fail(f"--head-dim is {stated.head_dim} but the configuration states {rotated[0].head_dim}")
    who = next(row.source for row in read.rows if row.field == "interleaved")
    assumed = not silent and who.startswith(f"{source.name} (")
    if silent or assumed:
        who = source.name
    elif pair is not None and who.endswith(pair):
        who = f"the key {who}"
    kind, mark = _family(values), getattr(family, "pairing_key", None)
    parts = [key for key, value in values.items() if isinstance(value, Mapping)]
    parts = [key for key in parts if str(key).endswith("_config") and key != _QUANTISED]
    return Model(
        read.spec,
        None if silent else rotated[0].interleaved,
        who,
        _naming(stated, kind),
        stated,
        source.name,
        {_QUANTISED: inside(found, _QUANTISED), **values, **inside(values, "attn_config")},
        kind,
        assumed,
        None if family is None or mark is not None else family.interleaved,
        mark,
        tuple(source.prefix.split(".")[:-1]),
        not (source.prefix or parts),
    )


def _family(values: Mapping[str, Any]) -> str | None:
    """Return the model_type, or the name of another format."""
    if formats.is_meta(values):
        return "meta"
    if formats.is_megatron(values):
        return "megatron"
    own = values.get("model_type")
    return own if isinstance(own, str) else None


def describe(model: Model) -> str:
    """Describe a model in one line: its name and slice. The pairing is that of a checkpoint, not a model."""
    specs = [model.specs] if isinstance(model.specs, RopeSpec) else [*model.specs.values()]
    widths = dict.fromkeys(Record.slice_of(spec) for spec in specs if spec)
    section = f" ({'.'.join(model.at)})" if model.at else ""
    return f"{model.name}{section}: {shown(list(widths))}"
