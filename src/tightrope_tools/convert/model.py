"""The rotation of a checkpoint's model: channels, pairing, and names of the projections.

These facts are read from the configuration and the table of families; the user states what both
lack. Nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tightrope import config as reader
from tightrope.config import LayerSpecs, formats, keys
from tightrope.config.families import FAMILIES
from tightrope.config.files import url_in
from tightrope.config.source import Source
from tightrope.spec import RopeSpec

from . import layout
from ._fail import fail, shown
from .checkpoint import RECORD, Checkpoint, load_json, open_checkpoint
from .naming import FAMILY_NAMING, NAMINGS, PACKINGS, Naming

_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_LAYER_TYPES = ("layer_types", "layers_block_type")
_MOST_LAYERS = 65536


@dataclass(frozen=True)
class Stated:
    """The user's statements about a checkpoint, in place of its configuration or in addition to it.

    Attributes:
        config: a configuration, its file or folder; by default the one beside the weights.
        section: the part of a nested configuration to read.
        source: the pairing of the checkpoint: ``"half"`` or ``"interleaved"``.
        naming: a key of NAMINGS or FAMILY_NAMING in :mod:`tightrope_tools.convert.naming`.
        prefix: the name prefix of the layers to convert, if layers have several prefixes.
        packing: the order of heads in a fused projection: ``"blocks"``, ``"grouped"`` or
            ``"quarters"``.
        heads, kv_heads: numbers of query and key heads.
        head_dim, rotary_dim, start: as in :class:`tightrope.RopeSpec`.
    """

    config: object = None
    section: str | None = None
    source: str | None = None
    naming: str | None = None
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
        assumed: whether the pairing is that of the family's code, which no file and no user states.
        naming: the naming scheme of the projections.
        prefix: the name prefix of the layers; None to take it from the names.
        heads, kv_heads: numbers of heads, one for all layers or one per layer; None if not stated.
        latent: the number of rows of ``kv a`` that do not rotate; None if not stated.
        gates: keys of the configuration that announce gates of the attention, and their values.
        native: the pairing that the configuration's family has without any statement of the user or a
            record; None if unknown.
        mark: the key of the configuration by which the family's own code chooses the pairing, if any.
        at: the keys that lead to the section of the configuration that was read.
        block: the number of rows that share one scale, in checkpoints quantised by blocks.
        index_heads, index_dim: number of heads of a sparse indexer, and channels of each; None if not
            stated.
        name: the kind of configuration, for messages.
        layers: the number of layers; None if not stated.
        kinds: the type of each layer, if the configuration lists them.
    """

    specs: RopeSpec | LayerSpecs
    interleaved: bool | None
    who: str
    naming: Naming
    prefix: str | None = None
    heads: layout.Count = None
    kv_heads: layout.Count = None
    latent: int | None = None
    gates: Mapping[str, object] = field(default_factory=dict)
    mark: str | None = None
    at: tuple[str, ...] = ()
    block: int | None = None
    index_heads: int | None = None
    index_dim: int | None = None
    name: str = ""
    native: bool | None = None
    assumed: bool = False
    layers: int | None = None
    kinds: tuple[str, ...] = ()

    def attends(self, layer: int) -> RopeSpec | None:
        """Return the spec of a layer that must have attention; None if it may have none, or no RoPE."""
        if self.kinds[layer : layer + 1] and self.kinds[layer] in keys.LAYERS_WITHOUT_ATTENTION:
            return None
        if isinstance(self.specs, RopeSpec):
            return self.specs
        return self.of(layer) if layer < len(self.specs.layers or ()) else None

    def heads_of(self, layer: int) -> int | None:
        """Return the number of query heads of a layer."""
        return layout.of_layer(self.heads, layer)

    def kv_heads_of(self, layer: int) -> int | None:
        """Return the number of key heads of a layer."""
        return layout.of_layer(self.kv_heads, layer)

    def of(self, layer: int) -> RopeSpec | None:
        """Return the spec of a layer, or None for a layer without RoPE."""
        return self.specs if isinstance(self.specs, RopeSpec) else self.specs.of(layer)


def read_model(checkpoint: Checkpoint, stated: Stated, *, pairing: bool = True) -> Model:
    """Read the model of a checkpoint from its configuration and the user's statements.

    Args:
        pairing: whether an unknown pairing is an error.

    Raises:
        ValueError: a value is missing, or its sources conflict.
    """
    given = _pairing(stated.source)
    found = stated.config if stated.config is not None else _config_of(checkpoint.home)
    if isinstance(found, str | Path):
        path = Path(found)
        if not path.exists():
            fail(f"the configuration {url_in(path) or f'must exist but {path} does not'}")
    if found is None:
        model = _from_flags(stated)
    else:
        model = _from_config(found, stated, given)
    if stated.rotary_dim is not None or stated.start is not None:
        model = replace(model, specs=_sliced(model.specs, stated))
    for weights in checkpoint.files:
        layout.check_version(weights.version, model.naming, packed=stated.packing is not None)
    recorded = _recorded(checkpoint) if given is None else None
    if recorded is not None:
        model = replace(model, interleaved=recorded[0], who=recorded[1], assumed=False)
    if given is not None:
        model = replace(model, interleaved=given, who="the user (--from)", assumed=False)
    if model.interleaved is None and pairing:
        fail(
            f"the pairing of the checkpoint must be known, and {model.who} does not state it: pass --from "
            f"half or --from interleaved (`tightrope detect` may find it from the weights)"
        )
    return model


def _pairing(name: str | None) -> bool | None:
    if name is None:
        return None
    if name not in ("half", "interleaved"):
        fail(f"a pairing must be 'half' or 'interleaved' but got {name!r}")
    return name == "interleaved"


def _config_of(home: Path) -> Path | None:
    there = [home / name for name in ("config.json", "params.json") if (home / name).is_file()]
    if len(there) > 1:
        fail(f"{home} has config.json and params.json: choose with --config")
    return there[0] if there else None


def pairing_beside(home: Path) -> tuple[bool, str] | None:
    """Read from a conversion record whether a folder's weights are interleaved, and name the record.

    Args:
        home: a folder, perhaps without weights.

    Returns:
        (interleaved, name of the record), or None if there is no record or the folder has no readable
        checkpoint.

    Raises:
        ValueError: records disagree, or the record file is invalid.
    """
    try:
        found = open_checkpoint(home)
    except (OSError, ValueError):
        return None
    return _recorded(found)


def _recorded(checkpoint: Checkpoint) -> tuple[bool, str] | None:
    """Read the pairing as :func:`pairing_beside` does, for a checkpoint that is already open."""
    names = {str(each.path.name): each.paired for each in checkpoint.files}
    within = {record.pairing for record in names.values() if record is not None}
    beside = _beside(checkpoint)
    if beside is None and not within:
        return None
    if len(within) > 1 or (within and (None in names.values() or beside not in (None, *within))):
        parts = [
            f"{name}: {record.pairing if record else 'nothing'}" for name, record in names.items()
        ]
        parts += [f"{RECORD}: {beside}"] if beside else []
        fail(f"conversion records must agree but state {shown(parts)}: pass --from")
    if within:
        return "interleaved" in within, f"the conversion record in {next(iter(names))}"
    return beside == "interleaved", f"the conversion record {RECORD}"


def _beside(checkpoint: Checkpoint) -> str | None:
    path = checkpoint.home / RECORD
    if not path.is_file():
        return None
    record = load_json(path)
    if checkpoint.folder is None and checkpoint.path.name not in (record.get("files") or []):
        return None
    if record.get("pairing") not in ("half", "interleaved"):
        fail(f"{RECORD} must state 'half' or 'interleaved' but states {record.get('pairing')!r}")
    return str(record["pairing"])


# --- without a configuration ----------------------------------------------------------------------


def _from_flags(stated: Stated) -> Model:
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("head_dim", "naming")
        if getattr(stated, name) is None
    ]
    if missing:
        fail(
            "there is no config.json or params.json beside the checkpoint: pass --config, or "
            f"{' and '.join(missing)}"
        )
    spec = RopeSpec(stated.head_dim, rotary_dim=stated.rotary_dim, start=stated.start or 0)  # type: ignore[arg-type]
    return Model(
        spec, None, "the command line", _naming(stated, None), stated.prefix,
        *layout.counts({}, None, None, stated.heads, stated.kv_heads),
        name="a checkpoint without configuration",
    )  # fmt: skip


def _sliced(spec: RopeSpec | LayerSpecs, stated: Stated) -> RopeSpec | LayerSpecs:
    if isinstance(spec, LayerSpecs):
        asked = (stated.rotary_dim, stated.start)
        for one in filter(None, spec.values()):
            # The flags have given the slice of a family that is not in the table.
            if any(
                want not in (None, got)
                for want, got in zip(asked, (one.rotary_dim, one.start), strict=True)
            ):
                fail("rotary_dim and start must not be given if layers have different specs")
        return spec
    start = spec.start if stated.start is None else stated.start
    rotary = stated.rotary_dim
    if rotary is None:
        rotary = min(spec.rotary_dim, spec.head_dim - start)
    return replace(spec, rotary_dim=rotary, start=start, scaling=None, axes=None)


def _naming(stated: Stated, family: str | None) -> Naming:
    key = stated.naming or FAMILY_NAMING.get(family or "")
    if key is None:
        fail(
            f"the names of the projections of {family or 'this checkpoint'} are not known: pass --naming, "
            f"one of {', '.join(NAMINGS)}"
        )
    key = FAMILY_NAMING.get(key, key)
    if key not in NAMINGS:
        fail(f"naming must be one of {', '.join(NAMINGS)} but got {key!r}")
    naming = NAMINGS[key]
    if stated.packing is None:
        return naming
    if stated.packing not in PACKINGS:
        fail(f"packing must be one of {', '.join(PACKINGS)} but got {stated.packing!r}")
    return replace(naming, packing=stated.packing)


# --- with a configuration -------------------------------------------------------------------------


def _from_config(found: object, stated: Stated, given: bool | None) -> Model:
    if isinstance(found, str | Path):
        path = Path(found)
        if path.is_dir():
            path = _config_of(path) or path / "config.json"
        found = load_json(path)
    with _with_options():
        source = reader.source_of(found, stated.section)
    refused = _refused(source)
    if refused is not None:
        fail(refused)
    silent = source.family is None and given is None and _key_of(source) is None
    with _with_options():
        read = _provenance(source, stated, False if silent else given)
    spec = read.spec
    every = spec.values() if isinstance(spec, LayerSpecs) else [spec]
    specs = [each for each in every if each is not None]
    if spec is None or not specs:
        fail(f"{source.name} has no RoPE")
    first = specs[0]
    interleaved = None if silent else first.interleaved
    who, assumed = _origin(read, source, silent)
    if stated.head_dim is not None and stated.head_dim != first.head_dim:
        fail(f"--head-dim is {stated.head_dim} but the configuration states {first.head_dim}")
    values = source.values
    family = _family(source)
    layers = min(layout.size(values, _LAYERS) or 0, _MOST_LAYERS) or None
    facts = layout.flattened(values, found)
    heads, kv_heads = layout.counts(facts, family, layers, stated.heads, stated.kv_heads)
    naming = _naming(stated, family)
    widths = tuple(each.head_dim for each in specs)
    layout.check(facts, naming, widths, heads, kv_heads, packed=stated.packing is not None)
    if stated.naming is None:
        _check_indexer(values, naming, source.name)
    return Model(
        spec,
        interleaved,
        who,
        naming,
        stated.prefix,
        heads,
        kv_heads,
        layout.size(values, ("kv_lora_rank",)) if "kv a" in naming.modules.values() else None,
        layout.gates(facts, naming),
        None if source.family is None else source.family.pairing_key,
        tuple(source.prefix.split(".")[:-1]),
        _block(found, values),
        layout.size(values, ("index_n_heads",)),
        layout.size(values, ("index_head_dim",)),
        source.name,
        _native(source) if given is not None else interleaved,
        assumed,
        layers,
        _kinds(values),
    )


def _kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the type of each layer if the configuration lists them."""
    listed = next((values[key] for key in _LAYER_TYPES if values.get(key)), None)
    if listed is None and isinstance(blocks := values.get("block_configs"), list):
        # Nemotron-NAS
        return tuple("none" if _pruned(block) else "attention" for block in blocks)
    return tuple(map(str, listed)) if isinstance(listed, list | tuple) else ()


def _pruned(block: object) -> bool:
    """True if a block of a configuration has no attention, or a linear layer in its place."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    return isinstance(attention, Mapping) and bool(
        attention.get("no_op") or attention.get("replace_with_linear")
    )


def _origin(read: reader.Provenance, source: Source, silent: bool) -> tuple[str, bool]:
    """Return the source of the pairing, and whether it is only the family's code."""
    origin = next(row.source for row in read.rows if row.field == "interleaved")
    if silent:
        return source.name, False
    if origin.startswith(f"{source.name} ("):
        return source.name, True
    key = _key_of(source)
    return f"the key {origin}" if key is not None and origin.endswith(key) else origin, False


def _native(source: Source) -> bool | None:
    """Return the pairing of a family whose code has only one."""
    family = source.family
    return None if family is None or family.pairing_key is not None else family.interleaved


# Advice of the reader -> the same with the options of `tightrope convert`.
_SPELLED = {
    r"strict=False ignores them with a warning": "pass --config, a file without them, if they do not change "
    "which channels rotate",
    r"; for code like Llama's: .*": ".",
    r"RopeSpec\.from_config\(config, section='(.*)'\)": r"--section \1",
    r"interleaved=False and rope_layers='all'": "--from half",
    r"interleaved=True and rope_layers='all'": "--from interleaved",
    r"interleaved=(False|True) if the key": "--from if the key",
    r"layer_type with the rotary_dim of its layers": "--config, a file with partial_rotary_factor",
    r"\brotary_dim=": "--rotary-dim=",
    r"\bstart=": "--start=",
    r"with start if": "with --start if",
}


@contextmanager
def _with_options() -> Iterator[None]:
    """Name the options of the command in the reader's errors."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for advice, option in _SPELLED.items():
            text = re.sub(advice, option, text)
        raise ValueError(text) from None


def _provenance(source: Source, stated: Stated, interleaved: bool | None) -> reader.Provenance:
    """Read a configuration with what the flags state.

    For an unknown family, the flags give the slice. Its layers need no statement: layers without RoPE
    compute the same if their channels are permuted too.
    """
    asked: dict[str, Any] = {}
    if source.family is None:
        source = replace(source, knows=source.knows | {"layers"})
        asked = {"rotary_dim": stated.rotary_dim, "start": stated.start}
    return reader.provenance(source, interleaved=interleaved, **asked)


def _refused(source: Source) -> str | None:
    if source.values.get("attention_k_eq_v"):
        return f"{source.name} uses its keys as values (attention_k_eq_v), which must stay in order"
    if source.values.get("rotary_value"):
        return f"{source.name} rotates its values too (rotary_value), and conversion does not support that"
    return None


def _key_of(source: Source) -> str | None:
    return next((key for key in keys.PAIRING if source.values.get(key) is not None), None)


def _family(source: Source) -> str | None:
    """Return the model_type, which a section may inherit, or the name of another format."""
    if formats.is_meta(source.values):
        return "meta"
    if formats.is_megatron(source.values):
        return "megatron"
    if source.family is not None:
        return next((name for name, family in FAMILIES.items() if family is source.family), None)
    own = source.values.get("model_type")
    return own if isinstance(own, str) else None


def _check_indexer(values: Mapping[str, Any], naming: Naming, who: str) -> None:
    """Refuse a configuration whose stated pairing of the sparse indexer differs from the family's code."""
    for key in ("indexer_rope_interleave", "index_rope_interleave"):
        stated = values.get(key)
        moves = "index q" in naming.modules.values()
        if stated is None or "kv a" not in naming.modules.values() or bool(stated) is moves:
            continue
        fail(
            f"{key} is {stated!r}, but the code of {who} ignores it and pairs its indexer by "
            f"{'neighbours' if moves else 'halves'}: --naming glm_moe_dsa converts the indexer along "
            "with the attention, --naming deepseek leaves it as it is"
        )


def _block(found: object, values: Mapping[str, Any]) -> int | None:
    for level in (found, values):
        inner = level.get("quantization_config") if isinstance(level, Mapping) else None
        size = inner.get("weight_block_size") if isinstance(inner, Mapping) else None
        if isinstance(size, list | tuple) and size and isinstance(size[0], int) and size[0] > 0:
            return size[0]
    return None


def describe(model: Model) -> str:
    """Describe a model in one line: its name and slice. The pairing is that of a checkpoint, not a model."""
    specs = [model.specs] if isinstance(model.specs, RopeSpec) else list(model.specs.values())
    widths = dict.fromkeys(
        f"{spec.rotary_dim} of {spec.head_dim} channels from {spec.start} on"
        for spec in specs
        if spec
    )
    return f"{model.name}: {shown(list(widths))}"
