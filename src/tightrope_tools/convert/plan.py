"""Plan a conversion: which tensors of a checkpoint change, and which of their rows move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tightrope.spec import RopeSpec

from .files import FLOATS, Checkpoint, Entry, fail, shown
from .model import Model, inside
from .naming import FAMILY_NAMING, NAMINGS, PACKINGS, SIDE_PARTS
from .rules import BESIDE, GATED, GATES, KEY, LAYER, MOVES, PART, REFUSED, SCALE, STAYS, rule_of


@dataclass(frozen=True)
class Change:
    """A tensor of a projection, or of a norm of queries or keys, and the rows of it that move.

    Attributes:
        entry: the tensor.
        prefix, layer: the prefix of its layer's name, and the layer's number.
        place: the name of the module that holds its module.
        module, suffix: the rest of its name.
        role: the role of its module, as in :class:`tightrope_tools.convert.naming.Naming`.
        units: the number of its rows: its first dimension; for a norm, its number of elements.
        queries, keys: the first rotated row of each head.
        width: the number of rows of a head that rotate.
    """

    entry: Entry
    prefix: str
    layer: int
    place: str
    module: str
    suffix: str
    role: str
    units: int = 0
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    width: int = 0

    @property
    def sides(self) -> str:
        """``q``, ``k``, or both for a fused projection."""
        return "qk" if self.role == "qkv" else self.role.removeprefix("index ")[0]

    def heads(self, side: str) -> torch.Tensor:
        """Read the rotated rows of each head of the ``queries`` or ``keys``, float64 ``(heads, width, columns)``."""
        starts: tuple[int, ...] = getattr(self, side)
        return torch.stack([self.entry.rows(start, self.width, self.units) for start in starts])

    @property
    def is_index(self) -> bool:
        """True for a part of an indexer."""
        return self.role.startswith("index")

    @property
    def is_norm(self) -> bool:
        """True for a part of a norm of queries or keys."""
        return self.role.endswith("norm")

    @property
    def is_weight(self) -> bool:
        """True for the weight of a projection, which has columns."""
        return len(self.entry.shape) == 2 and self.suffix.endswith("weight") and not self.is_norm


@dataclass(frozen=True)
class Plan:
    """The changes of a conversion to the tensors of a checkpoint.

    Attributes:
        changes: the tensors whose rows move.
        left: the names of all other tensors.
        still: layers without RoPE, whose projections stay.
        partial: whether the configuration describes more projections, under other prefixes than the requested one.
    """

    changes: tuple[Change, ...]
    left: tuple[str, ...]
    still: tuple[int, ...]
    partial: bool = False


def make_plan(checkpoint: Checkpoint, model: Model, *, every_layer: bool = False) -> Plan:
    """Find the projections of a checkpoint, and which of their rows rotate.

    Args:
        every_layer: whether layers without projections that should have them are an error.

    Raises:
        ValueError: names, shapes or formats do not fit the model.
    """
    named = [*_named(checkpoint.entries, model)]
    found = _chosen(named, model)
    _check_keys(checkpoint, found, model)
    whole = [one for one in found if one.is_weight and "lora_" not in one.suffix]
    rows = {f"{one.place}.{one.module}": one.entry.shape[0] for one in whole}
    changes, still = list[Change](), set[int]()
    for one in found:
        spec = model.of(one.layer)
        if spec is None:
            still.add(one.layer)
            continue
        own = rows.get(f"{one.place}.{one.module}", 0)
        if _moves(one, spec, model, own):
            units = one.entry.numel if one.is_norm else one.entry.shape[0]
            queries, keys = _heads(one, spec, model, units)
            changes.append(
                replace(one, units=units, queries=queries, keys=keys, width=spec.rotary_dim)
            )
    for one in changes:
        own = rows.get(f"{one.place}.{one.module}", one.units)
        if own != one.units and not one.is_norm:
            fail(f"{one.entry.name} must have the {own} rows of its weight but has {one.units}")
    lacking = _check_others(checkpoint, found, model)
    # A shard or an adapter may be for some projections.
    if every_layer and not checkpoint.is_shard and not any("lora_" in one.suffix for one in found):
        _check_layers(lacking, found, model)
    if not changes:
        fail("the checkpoint must hold a projection that rotates but holds none")
    names = {change.entry.name for change in changes}
    left = tuple(entry.name for entry in checkpoint.entries if entry.name not in names)
    partial = len(found) < len(named) and (model.alone or model.naming.several)
    return Plan(tuple(changes), left, tuple(sorted(still)), partial)


# --- names ----------------------------------------------------------------------------------------


def _numbered(name: str) -> str:
    """Return the regular expression of a name with ``*`` for numbers; the first is the group ``layer``."""
    return re.escape(name).replace(r"\*", r"(?P<layer>\d+)", 1).replace(r"\*", r"\d+")


def _named(entries: tuple[Entry, ...], model: Model) -> Iterator[Change]:
    """Yield the tensors of the modules that the naming lists."""
    naming = model.naming
    modules = {re.escape(name).replace(r"\*", r"\d+"): name for name in naming.modules}
    pattern = re.compile(
        rf"(?:^|^(?P<prefix>.*?)\.)(?P<group>{_numbered(naming.layer)})(?P<module>{'|'.join(modules)})"
        r"(?:\.|_(?=(?:weight|bias)$))(?P<suffix>.*)$"
    )
    for entry in entries:
        if hit := pattern.match(entry.name):
            name = next(name for form, name in modules.items() if re.fullmatch(form, hit["module"]))
            prefix = "" if hit["prefix"] is None else f"{hit['prefix']}."
            place = f"{prefix}{hit['group']}".removesuffix(".")
            layer = int(hit.groupdict().get("layer") or 0)
            rest = hit["module"], hit["suffix"], naming.modules[name]
            yield Change(entry, prefix, layer, place, *rest)


def _chosen(found: list[Change], model: Model) -> list[Change]:
    """Keep the tensors under the requested prefix, or all if none is requested."""
    naming, asked = model.naming, model.stated.prefix
    if not found:
        fail(
            f"the checkpoint must hold projections called …{naming.layer.replace('*', 'N')}"
            f"{{{', '.join(naming.modules)}}} but holds none; pass another --naming"
        )
    prefixes = list(dict.fromkeys(one.prefix for one in found))
    if asked is not None:
        wanted = asked if asked in prefixes else asked.rstrip(".") + "."
        if wanted not in prefixes:
            fail(f"prefix must be one of {', '.join(map(repr, prefixes))} but got {asked!r}")
        return [one for one in found if one.prefix == wanted]
    main = [prefix for prefix in prefixes if not prefix.endswith(SIDE_PARTS)]
    if len(main) > 1 and not naming.several:
        several = ", ".join(map(repr, main))
        fail(f"layers are found under several prefixes, {several}: choose with --prefix")
    return found


def _check_keys(checkpoint: Checkpoint, found: list[Change], model: Model) -> None:
    """Refuse keys about rows that do not move, or about another order of them, as their number may fit."""
    roles, chosen, own = {one.role for one in found}, model.stated.packing, model.naming.packing
    if not model.stated.naming and model.family in FAMILY_NAMING:
        own = NAMINGS[FAMILY_NAMING[model.family]].packing
    places = tuple({f"{one.place}." for one in found})
    ours = [entry.name for entry in checkpoint.entries if entry.name.startswith(places)]
    gates = any(GATES.fullmatch(part) for name in ours for part in name.split("."))
    for key, value in {**inside(model.facts, "mapping"), **model.facts}.items():
        rule = rule_of(KEY, [str(key)])
        if rule is None or value in rule.usual:
            continue
        if rule.what == GATED:
            known = gates or (key == "attn_output_gate" and "q gate" in roles)
            if known or not roles & {"qkv", "q gate"}:
                continue
        elif rule.packings:
            if "qkv" not in roles or own not in rule.packings.split():
                continue
            if chosen in rule.why.format(own).split():
                own = chosen
                continue
        rule.refuse(f"{key} ({value!r})", str(own))
    if "qkv" in roles and chosen not in (None, own):
        fail(
            f"--packing is {chosen} but the code of {model.name} has {own}: for other code, pass its --naming too"
        )


# --- one tensor -----------------------------------------------------------------------------------


def _moves(one: Change, spec: RopeSpec, model: Model, rows: int) -> bool:
    """Return True if rows of a tensor of a projection with ``rows`` rows move; refuse what is not known."""
    entry, rule = one.entry, rule_of(PART, [one.suffix])
    assert rule is not None  # noqa: S101
    scalar = entry.numel == 1 and (rule.result != MOVES or rule.what == SCALE)  # such as k_scale
    if rule.result == STAYS or scalar:
        return False
    if rule.result == REFUSED:
        rule.refuse(entry.name)
    if rule.what == SCALE and len(entry.shape) == 2 and entry.shape[1] != 1:
        _check_blocks(one, spec, model, rows)
        return False
    if entry.dtype not in FLOATS:
        fail(
            f"{entry.name} must have a floating-point dtype but is {entry}: if the checkpoint is quantised, convert it "
            "before that"
        )
    if not entry.shape or not entry.numel:
        fail(f"{entry.name} must have rows but is {entry}")
    return True


def _check_blocks(one: Change, spec: RopeSpec, model: Model, rows: int) -> None:
    """Refuse scales by block where a head's rotated rows lie in several blocks."""
    sizes = inside(model.facts, "quantization_config").get("weight_block_size")
    block = sizes[0] if isinstance(sizes, list | tuple) and sizes else None
    if not isinstance(block, int) or block < 1 or -(-rows // block) != one.entry.shape[0]:
        fail(
            f"{one.entry.name} holds scales by block, and the configuration states no block size that fits "
            f"{one.entry} (quantization_config.weight_block_size)"
        )
    for start in sum(_heads(one, spec, model, rows), ()):
        if start // block != (start + spec.rotary_dim - 1) // block:
            fail(
                f"{one.entry.name} scales blocks of {block} rows, and the {spec.rotary_dim} rotated rows of a head "
                "lie in several blocks: convert the checkpoint before it is quantised"
            )


def _heads(
    one: Change, spec: RopeSpec, model: Model, rows: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first rotated row of each query head and of each key head of a tensor with ``rows`` rows."""
    name, width, start = one.entry.name, spec.head_dim, spec.start
    if one.role == "kv a":
        latent, rotated = model.size("kv_lora_rank"), spec.rotary_dim
        if rows < rotated or latent not in (None, rows - rotated):
            before = "those of the latent" if latent is None else f"{latent} (kv_lora_rank)"
            fail(f"{name} must have {before} + {rotated} rotated rows but has {rows}")
        return (), (rows - rotated,)
    if one.is_index:
        start, width = 0, model.size("index_head_dim") or 0
        if width < spec.rotary_dim:
            fail(
                f"the heads of {name} must have {spec.rotary_dim} rotated rows but have {width} (index_head_dim)"
            )
    order = _order(one, width, model, rows)
    if rows != (total := len(order) * width):
        counts = " + ".join(str(order.count(kind)) for kind in "qkvg" if kind in order)
        parts = total // rows if rows and total % rows == 0 else 0
        merge = f": merge the {parts} ranks' parts first, if it is one of them" if parts else ""
        fail(f"{name} must have {counts} heads of {width} = {total} rows but has {rows}{merge}")
    queries, keys = (
        tuple(n * width + start for n, kind in enumerate(order) if kind == side) for side in "qk"
    )
    return queries, keys


def _order(one: Change, width: int, model: Model, rows: int) -> str:
    """Return the heads in a tensor in their order: q and k, v for values, g for gates."""
    if one.role == "qkv":
        return _packed(one, model)
    head = "qg" if one.role == "q gate" else one.sides
    stated = model.heads if one.sides == "q" else model.kv_heads
    if one.sides == "q" and stated is None:
        fail("the number of query heads must be known: pass --heads")
    # The rows show the number of an indexer, of layers that differ, and whether a norm is one for all heads.
    if not stated or one.is_index or (one.is_norm and rows == width):
        stated = rows // (width * len(head)) or 1
    return head if one.is_index and one.sides == "k" else head * stated


def _packed(one: Change, model: Model) -> str:
    """Return the heads of a fused projection in their order."""
    name, packing = one.entry.name, model.naming.packing
    heads, kv_heads = model.heads, model.kv_heads
    if packing is None or not heads or not kv_heads:
        fail(f"the order of heads in {name} must be known: pass --packing, --heads and --kv-heads")
    fours = packing != "quarters" or (heads % 4 == 0 and heads == kv_heads)
    if heads % kv_heads or not fours:
        fail(f"{name} cannot hold {heads} query and {kv_heads} key heads in the packing {packing}")
    return PACKINGS[packing](heads, kv_heads)


# --- all other tensors ----------------------------------------------------------------------------


def _check_others(checkpoint: Checkpoint, found: list[Change], model: Model) -> dict[str, int]:
    """Refuse channels of queries or keys that the naming does not list, as they would stay.

    Returns:
        The layers without projections, and without a module of another kind that takes their place: name -> number.
    """
    stem, number, _ = model.naming.layer.partition("*")
    ours = {one.entry.name for one in found}
    places = {f"{one.place}.": one.layer for one in found}
    main = [one for one in found if number and one.suffix.endswith("weight")]
    main = [one for one in main if not one.is_norm and not one.is_index]
    has: dict[str, set[str]] = {}
    for one in main:
        has.setdefault(f"{one.prefix}{stem}{one.layer}.", set()).update(one.sides)
    lacking = dict(_expected(checkpoint, main, model))
    other = {home for home, sides in has.items() if len(sides) == 2}
    starts = "|".join({re.escape(one.prefix + stem) for one in main})
    pattern = re.compile(rf"(?:{starts})(\d+)\." if main else "(?!)")
    for entry in checkpoint.entries:
        hit = pattern.match(entry.name)
        home, layer = (hit[0], int(hit[1])) if hit else ("", 0)
        place = next((one for one in places if entry.name.startswith(one)), home)
        if entry.name in ours or entry.numel < 2 or not place:
            continue
        path = entry.name[len(place) :].lower().split(".")
        if place in places:
            path, layer = [f"{path[0]}.", *path], places[place]
        elif home in has:
            path = path[:1]  # other modules have queries and keys of their own
        elif rule_of(LAYER, path):
            other.add(home)
            continue
        else:
            lacking[home] = layer
        spec = model.attends(layer)
        whole = spec is not None and entry.numel % spec.head_dim == 0
        rule = rule_of(BESIDE, path, whole=whole)
        if spec is not None and rule is not None and rule.result == REFUSED:
            rule.refuse(entry.name)
    return {home: layer for home, layer in lacking.items() if home not in other}


def _expected(
    checkpoint: Checkpoint, main: list[Change], model: Model
) -> Iterator[tuple[str, int]]:
    """Yield the layers that should have projections: name and number."""
    stem = model.naming.layer.partition("*")[0]
    prefixes = list(dict.fromkeys(one.prefix for one in main))
    for prefix in prefixes:
        numbers = [one.layer for one in main if one.prefix == prefix]
        every = range(min(numbers), max(numbers) + 1)
        only = [prefix] == [one for one in prefixes if not one.endswith(SIDE_PARTS)]
        if checkpoint.folder is not None and only and model.stated.prefix is None and model.layers:
            every = range(model.layers)
        for layer in every:
            yield f"{prefix}{stem}{layer}.", layer


def _check_layers(lacking: dict[str, int], found: list[Change], model: Model) -> None:
    """Refuse a checkpoint in which layers lack the projections that the others have."""
    missing = {layer: home for home, layer in lacking.items() if model.attends(layer) is not None}
    if missing:
        modules = {one.module: None for one in found if not one.is_norm and not one.is_index}
        names = [missing[layer][:-1] for layer in sorted(missing)]
        fail(
            f"layers must have queries and keys ({', '.join(modules)}) but {shown(names)} lack some: pass the whole "
            "checkpoint, rename or split projections, or state layer_types ('none')"
        )
