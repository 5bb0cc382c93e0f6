"""Plan a conversion: which tensors of a checkpoint change, and which of their rows move."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from tightrope.spec import RopeSpec

from .files import FLOATS, Checkpoint, Entry, fail, shown
from .model import Model, inside
from .naming import FAMILY_NAMING, NAMINGS, PACKINGS, SIDE_PARTS
from .rules import BESIDE, GATES, KEY, LAYER, MOVES, PART, REFUSED, SCALE, STAYS, rule_of


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
    def is_weight(self) -> bool:
        """True for the weight of a projection, which has columns."""
        norm = self.role.endswith("norm")
        return len(self.entry.shape) == 2 and self.suffix.endswith("weight") and not norm


@dataclass(frozen=True)
class Plan:
    """The changes of a conversion to the tensors of a checkpoint.

    Attributes:
        changes: the tensors whose rows move.
        left: the names of all other tensors.
        still: layers without RoPE, whose projections stay.
        apart: names of the same projections under other prefixes than the requested one.
    """

    changes: tuple[Change, ...]
    left: tuple[str, ...]
    still: tuple[int, ...]
    apart: frozenset[str] = frozenset()


def make_plan(checkpoint: Checkpoint, model: Model, *, every_layer: bool = False) -> Plan:
    """Find the projections of a checkpoint, and which of their rows rotate.

    Args:
        every_layer: whether layers without projections that should have them are an error.

    Raises:
        ValueError: names, shapes or formats do not fit the model.
    """
    naming = model.naming
    named = _named(checkpoint.entries, model)
    found = _chosen(named, model)
    if not found:
        wanted = naming.layer.replace("\\", "").replace("(d+)", "N")
        fail(
            f"the checkpoint must hold projections called …{wanted}{{{', '.join(naming.modules)}}} but holds "
            f"{shown([entry.name for entry in checkpoint.entries]) or 'no tensor'}; pass another --naming"
        )
    _check_order(checkpoint, found, model)
    rows = {f"{one.place}.{one.module}": one.entry.shape[0] for one in found if one.is_weight}
    changes: list[Change] = []
    still: set[int] = set()
    for one in found:
        spec = model.of(one.layer)
        if spec is None:
            still.add(one.layer)
        elif _moves(one, spec, model, rows.get(f"{one.place}.{one.module}", 0)):
            norm = one.role.endswith("norm")
            units = one.entry.numel if norm else one.entry.shape[0]
            queries, keys = _heads(one, spec, model, units)
            changes.append(
                replace(one, units=units, queries=queries, keys=keys, width=spec.rotary_dim)
            )
    _check_others(checkpoint.entries, found, model)
    if not any("lora_" in one.suffix for one in found):  # an adapter may be for some projections
        _check_complete(found)
        if every_layer:
            _check_layers(checkpoint, found, model)
    if not changes:
        fail("the checkpoint must hold a projection that rotates but holds none")
    names = {change.entry.name for change in changes}
    left = tuple(entry.name for entry in checkpoint.entries if entry.name not in names)
    apart = {one.entry.name for one in named if one not in found and _has_rows(one)}
    return Plan(tuple(changes), left, tuple(sorted(still)), frozenset(apart))


def _has_rows(one: Change) -> bool:
    """True for a tensor whose rows are those of its projection, whatever its size."""
    rule = rule_of(PART, [one.suffix])
    return rule is not None and rule.result == MOVES and rule.what != SCALE


def _named(entries: tuple[Entry, ...], model: Model) -> list[Change]:
    """Return the tensors of the modules that the naming lists."""
    naming = model.naming
    layer = naming.layer.replace(r"(\d+)", r"(?P<layer>\d+)")
    pattern = re.compile(
        rf"(?:^|^(?P<prefix>.*?)\.)(?P<group>{layer})(?P<module>{'|'.join(naming.modules)})"
        r"(?:\.|_(?=(?:weight|bias)$))(?P<suffix>.*)$"
    )
    found = []
    for entry in entries:
        if hit := pattern.match(entry.name):
            prefix = "" if hit["prefix"] is None else hit["prefix"] + "."
            role = next(
                r for name, r in naming.modules.items() if re.fullmatch(name, hit["module"])
            )
            number = int(hit.groupdict().get("layer") or 0)
            place = f"{prefix}{hit['group']}".removesuffix(".")
            found.append(Change(entry, prefix, number, place, hit["module"], hit["suffix"], role))
    return found


def _chosen(found: list[Change], model: Model) -> list[Change]:
    """Keep the tensors under the requested prefix, or all if none is requested."""
    prefixes = list(dict.fromkeys(one.prefix for one in found))
    asked = model.stated.prefix
    if asked is not None and found:
        wanted = asked if asked in prefixes else asked.rstrip(".") + "."
        if wanted not in prefixes:
            fail(f"prefix must be one of {', '.join(map(repr, prefixes))} but got {asked!r}")
        return [one for one in found if one.prefix == wanted]
    main = [prefix for prefix in prefixes if not prefix.endswith(SIDE_PARTS)]
    if len(main) > 1 and not model.naming.several:
        fail(
            f"layers are found under several prefixes, {', '.join(map(repr, main))}: choose with --prefix"
        )
    return found


# --- one tensor -----------------------------------------------------------------------------------


def _moves(one: Change, spec: RopeSpec, model: Model, rows: int) -> bool:
    """Return True if rows of a tensor of a projection with ``rows`` rows move; refuse what is not known."""
    entry, rule = one.entry, rule_of(PART, [one.suffix])
    assert rule is not None  # noqa: S101
    if rule.result == STAYS or (entry.numel == 1 and not _has_rows(one)):  # such as k_scale
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
    role, name, width, start = one.role, one.entry.name, spec.head_dim, spec.start
    if role == "kv a":
        latent, rotated = model.size("kv_lora_rank"), spec.rotary_dim
        if rows < rotated or latent not in (None, rows - rotated):
            before = "those of the latent" if latent is None else f"{latent} (kv_lora_rank)"
            fail(f"{name} must have {before} + {rotated} rotated rows but has {rows}")
        return (), (rows - rotated,)
    if role.startswith("index"):
        how = "a configuration with it as --config"
        start, width = 0, _known(model.size("index_head_dim"), "index_head_dim for", name, how)
        if width < spec.rotary_dim:
            fail(
                f"the heads of {name} must have {spec.rotary_dim} rotated rows but have {width} (index_head_dim)"
            )
    order = _order(one, width, model, rows)
    if rows != len(order) * width:
        counts = " + ".join(str(order.count(kind)) for kind in "qkvg" if kind in order)
        total = f"{counts} heads of {width} = {len(order) * width}"
        part = f": merge the {len(order) * width // rows} ranks' parts first, if it is one of them"
        is_part = rows > 0 and len(order) * width % rows == 0
        fail(f"{name} must have {total} rows but has {rows}{part * is_part}")
    queries, keys = (
        tuple(n * width + start for n, kind in enumerate(order) if kind == side) for side in "qk"
    )
    return queries, keys


def _order(one: Change, width: int, model: Model, rows: int) -> str:
    """Return the heads in a tensor in their order: q and k, v for values, g for gates."""
    role, name = one.role, one.entry.name
    side = "q" if role in ("q", "q gate", "q norm", "index q") else "k"
    if role in ("index k", "index k norm") or (role.endswith("norm") and rows == width):
        return side  # one weight for all heads
    heads = kv_heads = 0
    if role == "index q":
        how = "a configuration with it as --config"
        heads = _known(model.size("index_n_heads"), "index_n_heads for", name, how)
    elif role == "qkv" or side == "q":
        heads = _known(model.heads(one.layer), "the number of query heads in", name, "--heads")
    if side == "k":
        kv_heads = _key_heads(one, width, model, rows)
    if role != "qkv":
        return ("qg" if role == "q gate" else side) * (heads + kv_heads)
    packing: str = _known(model.naming.packing, "the packing of", name, "--packing")
    _check_packing(name, packing, heads, kv_heads)
    return PACKINGS[packing](heads, kv_heads)


def _known(value: Any, what: str, name: str, how: str) -> Any:
    if value is None:
        fail(f"{what} {name} must be known: pass {how}")
    return value


def _key_heads(one: Change, width: int, model: Model, rows: int) -> int:
    """Return the number of key heads as stated, or else by the rows of a projection of keys alone."""
    stated, queries = model.kv_heads(one.layer), model.heads(one.layer)
    if stated is not None or one.role == "qkv":
        name = one.entry.name
        return int(_known(stated, "the number of key heads in", name, "--kv-heads"))
    heads, rest = divmod(rows, width)
    if rest or not heads or (queries or 0) % heads:
        of = "" if queries is None else f", in a number that divides the {queries} query heads,"
        fail(f"{one.entry.name} must have whole heads of {width} rows{of} but has {rows} rows")
    return heads


def _check_packing(name: str, packing: str, heads: int, kv_heads: int) -> None:
    if not kv_heads or heads % kv_heads:
        fail(f"the {heads} query heads in {name} must be a multiple of its {kv_heads} key heads")
    if packing == "quarters" and (heads % 4 or kv_heads != heads):
        fail(
            f"packed in quarters, {name} must hold as many key as query heads, a multiple of 4, but holds "
            f"{heads} query and {kv_heads} key heads"
        )


def _check_order(checkpoint: Checkpoint, found: list[Change], model: Model) -> None:
    """Refuse a configuration that states another layout of the rows than the naming, as their number may fit."""
    facts, packing, roles = model.facts, model.naming.packing, {one.role for one in found}
    places = tuple({f"{one.place}." for one in found})
    ours = [one.name for one in checkpoint.entries if one.name.startswith(places)]
    alone = any(GATES.fullmatch(part) for name in ours for part in name.split("."))
    parts = {**inside(facts, "mapping"), **facts}
    chosen, own = model.stated.packing, packing
    if not model.stated.naming and model.family in FAMILY_NAMING:
        own = NAMINGS[FAMILY_NAMING[model.family]].packing
    for key in parts:
        rule = rule_of(KEY, [str(key)])
        if rule is None or parts[key] in rule.usual:
            continue
        title = f"{key} ({parts[key]!r})"
        if not rule.packings:
            known = alone or (key == "attn_output_gate" and "q gate" in roles)
            if roles & {"qkv", "q gate"} and not known:
                rule.refuse(title)
        elif "qkv" in roles and own in rule.packings.split():
            if chosen in {*rule.why.format(own).split()} & PACKINGS.keys():
                return
            rule.refuse(title, str(own))
    if "qkv" not in roles:
        return
    if chosen not in (None, own):
        fail(
            f"--packing is {chosen} but the code of {model.name} has {own}: for other code, pass its --naming too"
        )


# --- all tensors ----------------------------------------------------------------------------------


def _check_others(entries: tuple[Entry, ...], found: list[Change], model: Model) -> None:
    """Refuse channels of queries or keys that the naming does not list, as they would stay."""
    ours = {one.entry.name for one in found}
    places = {f"{one.place}.": one.layer for one in found}
    stem = model.naming.layer.partition(r"(\d+)\.")[0].replace("\\", "")
    layers = {f"{one.prefix}{stem}{one.layer}.": one.layer for one in found}
    for entry in entries:
        place = next((place for place in (*places, *layers) if entry.name.startswith(place)), None)
        if place is None or entry.name in ours or entry.numel < 2:
            continue
        path = entry.name[len(place) :].lower().split(".")
        # Other modules have queries and keys of their own.
        path = [f"{path[0]}.", *path] if place in places else path[:1]
        spec = model.of((places | layers)[place])
        whole = spec is not None and entry.numel % spec.head_dim == 0
        rule = rule_of(BESIDE, path, whole=whole)
        if rule is not None and rule.result == REFUSED:
            rule.refuse(entry.name)


def _check_complete(found: list[Change]) -> None:
    """Refuse a checkpoint in which a layer has queries without keys, or keys without queries."""
    places: dict[str, set[str]] = {}
    for one in found:
        if one.suffix == "weight":
            places.setdefault(one.place, set()).add(one.role)
    for place, roles in places.items():
        for queries, keys in (({"q", "q gate"}, {"k", "kv a"}), ({"index q"}, {"index k"})):
            if bool(roles & queries) != bool(roles & keys):
                has = "queries but no keys" if roles & queries else "keys but no queries"
                fail(f"{place} has {has}")


def _check_layers(checkpoint: Checkpoint, found: list[Change], model: Model) -> None:
    """Refuse a checkpoint in which layers lack the projections that the others have.

    A layer may lack them if the configuration says so; if it has a module of another kind, such as a convolution;
    and in a shard. No layer may have projections of other names instead.
    """
    stem, number, _ = model.naming.layer.partition(r"(\d+)\.")
    if not number:
        return
    main = {one.role for one in found if "norm" not in one.role and "index" not in one.role}
    known = {(one.prefix, one.layer) for one in found if one.role in main}
    prefixes = list(dict.fromkeys(one.prefix for one in found))
    place = re.compile(rf"({'|'.join(map(re.escape, prefixes))}){stem}(\d+)\.")
    layers: dict[tuple[str, int], dict[str, Entry]] = {}
    for entry in checkpoint.entries:
        if at := place.match(entry.name):
            layers.setdefault((at[1], int(at[2])), {})[entry.name[at.end() :]] = entry
    for prefix in prefixes:
        numbers = [layer for where, layer in known if where == prefix] or [0]
        only = [prefix] == [one for one in prefixes if not one.endswith(SIDE_PARTS)]
        whole = checkpoint.folder is not None and only and model.stated.prefix is None
        every = range(model.layers) if whole and model.layers else range(min(numbers), max(numbers))
        for layer in every:
            layers.setdefault((prefix, layer), {})
    lacking = []
    for (prefix, layer), tensors in sorted(layers.items()):
        spec = model.attends(layer)
        if (prefix, layer) in known or spec is None:
            continue
        results = {_result(*one, spec) for one in tensors.items()}
        if REFUSED in results or not (STAYS in results or checkpoint.is_shard):
            lacking.append(f"{prefix}{stem}{layer}".replace("\\", ""))
    if lacking:
        wanted = " or ".join(name for name, role in model.naming.modules.items() if role in main)
        fail(
            f"layers must have {wanted} but there are none in {shown(lacking)}: pass the whole checkpoint, rename or split "
            "projections, or state layer_types ('none')"
        )


def _result(rest: str, entry: Entry, spec: RopeSpec) -> str:
    """What the table makes of a tensor of a layer without the projections of the naming; "" if nothing."""
    whole = len(entry.shape) == 2 and entry.shape[0] % spec.head_dim == 0
    rule = rule_of(LAYER, [rest, *rest.lower().split(".")], whole=whole)
    return "" if rule is None else rule.result
