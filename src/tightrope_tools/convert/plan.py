"""Plan a conversion: which tensors of a checkpoint change, and which of their rows move."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tightrope.spec import RopeSpec

from ._fail import fail, shown
from .checkpoint import Checkpoint
from .model import Model
from .naming import NAMINGS, SIDE_PARTS, Naming
from .rewrite import Change
from .rows import ROLES, Part
from .tensors import FLOATS, Entry, each

# Suffixes after a module's name: tensors with its rows, tensors that stay, scales, quantised formats.
_ROWS = re.compile(
    r"(?:base_layer\.)?(?:weight|bias)|lora_B(?:\.\w+)?(?:\.weight)?|"
    r"lora_magnitude_vector(?:\.\w+)?(?:\.weight)?"
)
_STAYS = re.compile(
    r"lora_A(?:\.\w+)?(?:\.weight)?|input_scale|activation_scale|"
    r"layer_norm_(?:weight|bias)|_extra_state"  # Transformer Engine: the norm before the projection
)
_SCALE = re.compile(r"weight_scale(?:_inv)?")
_QUANTISED = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "scales": "GPTQ or AWQ",
    "SCB": "bitsandbytes int8",
    "weight_format": "bitsandbytes int8",
    "weight.absmax": "bitsandbytes 4-bit",
    "weight.quant_map": "bitsandbytes 4-bit",
    "weight.nested_absmax": "bitsandbytes 4-bit",
    "weight.nested_quant_map": "bitsandbytes 4-bit",
    "weight_packed": "compressed-tensors",
    "weight_shape": "compressed-tensors",
    "weight_zero_point": "compressed-tensors",
    "weight_blocks": "MXFP4",
    "weight_scales": "MXFP4",
    "codes": "AQLM",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
    "W_q": "HQQ",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The changes of a conversion to the tensors of a checkpoint.

    Attributes:
        changes: the tensors whose rows move.
        left: the names of all other tensors.
        still: layers without RoPE, whose projections stay.
    """

    changes: tuple[Change, ...]
    left: tuple[str, ...]
    still: tuple[int, ...]


@dataclass(frozen=True)
class _Match:
    entry: Entry
    prefix: str
    layer: int
    group: str
    module: str
    role: str
    suffix: str

    @property
    def group_module(self) -> str:
        """The module's full name."""
        return f"{self.prefix}{self.group}{self.module}"


def make_plan(checkpoint: Checkpoint, model: Model, *, every_layer: bool = False) -> Plan:
    """Find the projections of a checkpoint, and which of their rows rotate.

    Args:
        every_layer: whether layers without projections that should have them are an error.

    Raises:
        ValueError: names, shapes or formats do not fit the model.
    """
    entries = list(each(checkpoint.files))
    _check_gated(entries)
    matches = _matches(entries, model.naming)
    if not matches:
        wanted = model.naming.layer.replace("\\", "").replace("(d+)", "N")
        modules = ", ".join(model.naming.modules)
        fail(
            f"the checkpoint must hold projections called …{wanted}{{{modules}}} but holds "
            f"{shown([entry.name for entry in entries]) or 'no tensor'}; choose other names with --naming, "
            f"one of {', '.join(NAMINGS)}"
        )
    matches = _chosen(matches, model)
    _check_gates(entries, matches, model, checkpoint)
    rows = {
        match.group_module: match.entry.shape[0]
        for match in matches
        if match.suffix == "weight" and match.entry.shape
    }
    changes: list[Change] = []
    still: set[int] = set()
    for match in matches:
        spec = model.of(match.layer)
        if spec is None:
            still.add(match.layer)
            continue
        change = _change(match, spec, model, rows.get(match.group_module, 0), checkpoint.ranks)
        if change is not None:
            changes.append(change)
    _check_others(entries, matches, model)
    _check_complete(matches)
    if every_layer:
        _check_layers(entries, matches, model, checkpoint)
    _check_shared(changes, entries)
    if not changes:
        fail("the checkpoint must hold a projection that rotates but holds none")
    named = {id(change.entry) for change in changes}
    left = tuple(entry.name for entry in entries if id(entry) not in named)
    return Plan(tuple(changes), left, tuple(sorted(still)))


# Modules with gates beside queries, keys and values; and those with gates alone.
_GATED = re.compile(r"(?:\w+_)?(?:qgkv|qkvg)(?:_\w+)?")
_GATES = re.compile(r"(?:\w+_)?gates?(?:_\w+)?|g_proj")


def _check_gated(entries: list[Entry]) -> None:
    """Refuse a projection that holds gates by its name."""
    for entry in entries:
        parts = entry.name.split(".")
        if any(map(_GATED.fullmatch, parts)) and not _WITHOUT_ROPE.search(entry.name):
            fail(
                f"{entry.name} holds gates beside queries, keys and values by its name, which is not "
                f"supported: split it"
            )


def _check_gates(
    entries: list[Entry], matches: list[_Match], model: Model, checkpoint: Checkpoint
) -> None:
    """Refuse a configuration that announces gates, unless tensors of their own hold them.

    Gates among the rows of separate queries would show in their number, so a part of a checkpoint may lack
    those tensors.
    """
    fused = any(match.role == "qkv" for match in matches)
    partial = checkpoint.is_shard or any("lora_" in match.suffix for match in matches)
    if not model.gates or (partial and not fused):
        return
    groups = tuple({match.prefix + match.group for match in matches})
    for entry in entries:
        if entry.name.startswith(groups) and any(map(_GATES.fullmatch, entry.name.split("."))):
            return
    key, value = next(iter(model.gates.items()))
    advice = ""
    if key == "attn_output_gate" and not fused:
        advice = f": --naming qwen3_next knows those of {key}"
    where = next((m.module for m in matches if m.role in ("q", "q gate", "qkv")), matches[0].module)
    fail(
        f"{key} is {value!r}, but no tensor holds the gates of the attention alone: gates among the rows of "
        f"{where} are not supported{advice}"
    )


def _matches(entries: list[Entry], naming: Naming) -> list[_Match]:
    modules = [(re.compile(name), role) for name, role in naming.modules.items()]
    layer = re.compile(rf"(?:^|^(?P<prefix>.*?)\.)(?P<group>{naming.layer})(?P<rest>.*)$")
    found = []
    for entry in entries:
        hit = layer.match(entry.name)
        if hit is None:
            continue
        number = int(re.search(r"\d+", hit["group"])[0])  # type: ignore[index]
        for module, role in modules:
            at = module.match(hit["rest"])
            if at is not None and hit["rest"][at.end() : at.end() + 1] == ".":
                prefix = "" if hit["prefix"] is None else hit["prefix"] + "."
                suffix = hit["rest"][at.end() + 1 :]
                found.append(_Match(entry, prefix, number, hit["group"], at[0], role, suffix))
                break
    return found


def _chosen(matches: list[_Match], model: Model) -> list[_Match]:
    """Keep the matches under the requested prefix, or all if none is requested."""
    prefixes = list(dict.fromkeys(match.prefix for match in matches))
    if model.prefix is not None:
        wanted = model.prefix if model.prefix in prefixes else model.prefix.rstrip(".") + "."
        if wanted not in prefixes:
            fail(f"prefix must be one of {', '.join(map(repr, prefixes))} but got {model.prefix!r}")
        return [match for match in matches if match.prefix == wanted]
    main = [prefix for prefix in prefixes if not prefix.endswith(SIDE_PARTS)]
    if len(main) > 1 and not model.naming.several:
        fail(
            f"layers are found under several prefixes, {', '.join(map(repr, main))}: choose with --prefix"
        )
    return matches


# --- one tensor -----------------------------------------------------------------------------------


def _change(match: _Match, spec: RopeSpec, model: Model, rows: int, ranks: int) -> Change | None:
    """Return the change of one tensor of a projection with ``rows`` rows, or None if it stays."""
    entry, suffix = match.entry, match.suffix
    if _STAYS.fullmatch(suffix):
        return None
    scale = _SCALE.fullmatch(suffix) is not None
    if not scale and not _ROWS.fullmatch(suffix):
        kind = "bitsandbytes 4-bit" if "quant_state" in suffix else _QUANTISED.get(suffix)
        if kind is None:
            fail(
                f"{entry.name} must be a weight, a bias, a scale or part of a LoRA adapter but is none that "
                f"convert knows: merge it into the weight of {match.module}, or remove it"
            )
        fail(
            f"{match.module} of layer {match.layer} is quantised by {kind} ({entry.name}): convert the "
            "checkpoint before it is quantised"
        )
    if scale and entry.numel == 1:
        return None
    if scale and len(entry.shape) == 2 and entry.shape[1] != 1:
        _check_blocks(match.role, Part(entry, spec, model, match.layer, rows, ranks))
        return None
    if entry.dtype not in FLOATS:
        fail(
            f"{entry.name} must have a floating-point dtype but is {entry.describe()}: convert the "
            "checkpoint before it is quantised"
        )
    if not entry.contiguous:
        fail(
            f"{entry.name} must be contiguous but is a transposed or strided view: save a copy of it"
        )
    if not entry.shape or entry.numel == 0:
        fail(f"{entry.name} must have rows but is {entry.describe()}")
    norm = match.role.endswith("norm")
    units = entry.numel if norm else entry.shape[0]
    if entry.nbytes % units:
        fail(
            f"each row of {entry.name} must be a whole number of bytes but it is {entry.describe()}"
        )
    starts = ROLES[match.role](Part(entry, spec, model, match.layer, units, ranks))
    return Change(
        entry, match.role, match.layer, units, starts, spec.rotary_dim,
        match.group_module,
    )  # fmt: skip


def _check_blocks(role: str, part: Part) -> None:
    """Refuse scales by block where a head's rotated rows lie in several blocks."""
    block, entry, width = part.model.block, part.entry, part.spec.rotary_dim
    if block is None or -(-part.rows // block) != entry.shape[0]:
        fail(
            f"{entry.name} holds scales by block, and the configuration states no block size that fits "
            f"{entry.describe()} (quantization_config.weight_block_size)"
        )
    for start in ROLES[role](part):
        if start // block != (start + width - 1) // block:
            fail(
                f"{entry.name} scales blocks of {block} rows, and the {width} rotated rows of a head lie in "
                f"several blocks: convert the checkpoint before it is quantised"
            )


# --- all tensors ----------------------------------------------------------------------------------


# Names of norms of queries or keys, and of other tensors that may hold their channels; those of a latent
# (q_a_layernorm, k_b_proj) have channels that do not rotate.
_SIDE = r"(?:q|k|qk|kv|qkv|query|queries|keys?)"
_KIND = r"(?:(?:layer|rms)?_?norm|rms|ln)"
_NORM = re.compile(rf"{_SIDE}_?{_KIND}|{_KIND}_?{_SIDE}")
_NAMED = re.compile(rf"(?:.*_)?{_SIDE}(?:(?:bias|conv|gain|gamma|scale).*|_(?![ab]_).*)?")


def _check_others(entries: list[Entry], matches: list[_Match], model: Model) -> None:
    """Refuse channels of queries or keys that the naming does not list, as they would stay."""
    naming = model.naming
    ours = {id(match.entry) for match in matches}
    groups = {match.prefix + match.group: match.layer for match in matches}
    places = groups | {
        f"{m.prefix}{m.group.partition(f'.{m.layer}.')[0]}.{m.layer}.": m.layer for m in matches
    }
    for entry in entries:
        place = next((place for place in places if entry.name.startswith(place)), None)
        if place is None or id(entry) in ours or entry.numel < 2:
            continue
        path = entry.name[len(place) :].lower().split(".")
        if place not in groups:
            path = path[:1]  # other modules have queries and keys of their own
        if path[0] == "indexer":
            continue  # it has channels of its own, and stays where the naming does not list it
        if not any(map(_NORM.fullmatch, path)):
            spec = model.of(places[place])
            fits = spec is not None and entry.numel % spec.head_dim == 0
            if fits and any(map(_NAMED.fullmatch, path)):
                fail(
                    f"{entry.name} may hold channels of queries or keys, by its name and size, and convert does "
                    f"not move them: merge it into the projection, remove it if the model can do without, or "
                    f"rename it if it holds none"
                )
            continue
        module = path[0]
        knowing = [
            name
            for name, other in NAMINGS.items()
            if place in groups
            and other.layer == naming.layer
            and any(re.fullmatch(known, module) for known in other.modules)
        ]
        hint = f"; --naming {' or '.join(knowing)} does" if knowing else ""
        fail(
            f"{entry.name} is a norm of queries or keys by its name, but the given or detected naming does "
            f"not list it{hint}"
        )


def _check_complete(matches: list[_Match]) -> None:
    """Refuse a checkpoint in which a layer has queries without keys, or keys without queries."""
    if any("lora_" in match.suffix for match in matches):
        return  # an adapter may be for the queries alone
    groups: dict[str, set[str]] = {}
    for match in matches:
        if match.suffix == "weight":
            groups.setdefault(match.prefix + match.group, set()).add(match.role)
    needs_keys = {
        "q": {"k", "kv a"},
        "q gate": {"k"},
        "k": {"q", "q gate"},
        "kv a": {"q"},
        "index q": {"index k"},
        "index k": {"index q"},
    }
    for group, roles in groups.items():
        for role in roles & needs_keys.keys():
            if roles & needs_keys[role]:
                continue
            other = "keys" if role.endswith("q") or role == "q gate" else "queries"
            fail(f"{group[:-1]} has {'queries' if other == 'keys' else 'keys'} but no {other}")


# Names of projections of queries, keys or both; of modules whose projections have no RoPE; of modules
# with attention; and of those that layers with and without attention have.
_PROJECTION = re.compile(
    r"(?:to_|c_|linear_|proj_|w)?(?:q|k|qk|qkv|query|queries|key|keys|query_key|query_key_value)"
    r"(?:_?(?:proj|projection|lin|linear|weight))?|c_attn|in_proj_weight"
)
_WITHOUT_ROPE = re.compile(r"cross|linear_?att|mamba|ssm|conv")
_ATTENTION = re.compile(r"attn|attention")
_IN_NORM = re.compile(r"norm|(?:^|[._])ln(?:[._]|$)")
_IN_ANY = re.compile(_IN_NORM.pattern + "|mlp|ffn|feed_?forward|moe|expert")
_MAIN_ROLES = ("q", "q gate", "k", "kv a", "qkv")


def _check_layers(
    entries: list[Entry], matches: list[_Match], model: Model, checkpoint: Checkpoint
) -> None:
    """Refuse a checkpoint in which layers lack the projections that the others have.

    A layer may lack them if the configuration says so; if it has tensors of another kind, such as those
    of a convolution, and none of attention; and in a shard. No layer may have projections of other
    names instead.
    """
    if any("lora_" in match.suffix for match in matches):
        return  # an adapter may be for some layers
    known = {(match.prefix, match.layer) for match in matches if match.role in _MAIN_ROLES}
    prefixes = list(dict.fromkeys(match.prefix for match in matches))
    main = [prefix for prefix in prefixes if not prefix.endswith(SIDE_PARTS)]
    stem = model.naming.layer.partition(r"(\d+)\.")[0]
    place = re.compile(rf"({'|'.join(map(re.escape, prefixes))}){stem}(\d+)\.")
    layers: dict[tuple[str, int], dict[str, Entry]] = {}
    for entry in entries:
        if at := place.match(entry.name):
            layers.setdefault((at[1], int(at[2])), {})[entry.name[at.end() :]] = entry
    usual = {(prefix, rest) for prefix, layer in known for rest in layers[prefix, layer]}
    for prefix in prefixes:
        numbers = [layer for where, layer in known if where == prefix] or [0]
        whole = checkpoint.folder is not None and main == [prefix] and model.prefix is None
        every = range(model.layers) if whole and model.layers else range(min(numbers), max(numbers))
        for layer in every:
            layers.setdefault((prefix, layer), {})
    lacking: dict[str, list[str]] = {}
    found: dict[str, list[str]] = {}
    for (prefix, layer), tensors in sorted(layers.items()):
        spec = model.attends(layer)
        if (prefix, layer) in known or spec is None:
            continue
        own = [rest for rest in tensors if (prefix, rest) not in usual]
        like = [rest for rest, one in tensors.items() if _is_projection(rest, one, spec)]
        if like:
            why = "other names"
        elif checkpoint.is_shard:
            continue
        elif like := [rest for rest in own if _in_attention(rest)]:
            why = "other tensors"
        elif not tensors:
            why = "no tensors"
        elif any(map(_in_attention, tensors)):
            why = "a part"
        elif all(_IN_ANY.search(rest.lower()) for rest in own):
            why = "no attention"
        else:
            continue
        lacking.setdefault(why, []).append(f"{prefix}{stem}{layer}".replace("\\", ""))
        found.setdefault(why, []).extend(tensors[rest].name for rest in like)
    known_count = checkpoint.folder is not None and model.layers
    count = f"; the configuration states {model.layers} layers" if known_count else ""
    none = "say so in layer_types of the configuration ('none' for such a layer)"
    rename = "rename or split {}; if they are no projections of attention, " + none
    advice = {
        "other names": rename,
        "other tensors": rename,
        "a part": "pass the whole checkpoint",
        "no tensors": f"pass the whole checkpoint{count}",
        "no attention": f"if it has no attention, {none}; if it has, pass the whole checkpoint",
    }
    for why, what in advice.items():
        if why in lacking:
            wanted = [name for name, role in model.naming.modules.items() if role in _MAIN_ROLES]
            fail(
                f"every layer must have projections called {' or '.join(wanted)} but there are none in "
                f"{shown(lacking[why])}: {what.format(shown(found[why]))}"
            )


def _is_projection(rest: str, entry: Entry, spec: RopeSpec) -> bool:
    """True if a tensor of a layer is a projection of queries or keys by its name and shape."""
    if len(entry.shape) != 2 or entry.shape[0] % spec.head_dim or _WITHOUT_ROPE.search(rest):
        return False
    parts = rest.lower().split(".")
    inner = any(_IN_ANY.search(part) and not _ATTENTION.search(part) for part in parts)
    return any(map(_PROJECTION.fullmatch, parts)) and not inner


def _in_attention(rest: str) -> bool:
    """True if a tensor of a layer lies in a module of attention with RoPE by its name."""
    return any(
        _ATTENTION.search(part) and not (_WITHOUT_ROPE.search(part) or _IN_NORM.search(part))
        for part in rest.lower().split(".")
    )


def _check_shared(changes: list[Change], entries: list[Entry]) -> None:
    """Refuse to move bytes that two tensors share, unless the rows of both move in the same way."""
    moved = {(change.entry.file, change.entry.offset): change for change in changes}
    for change in changes:
        first = moved[change.entry.file, change.entry.offset]
        if (first.starts, first.units, first.width) != (change.starts, change.units, change.width):
            fail(
                f"{change.entry.name} shares its bytes with {first.entry.name}, whose rows move differently"
            )
    ours = {id(change.entry) for change in changes}
    spans = sorted(
        (entry.file, entry.offset, entry.offset + entry.nbytes, entry.name, id(entry) in ours)
        for entry in entries
        if entry.nbytes
    )
    before = None
    for span in spans:
        if before is not None and before[0] == span[0] and span[1] < before[2]:
            same = before[1:3] == span[1:3]
            if (before[4] or span[4]) and not (same and before[4] and span[4]):
                fail(
                    f"{span[3]} shares its bytes with {before[3]}, and only one of them would move"
                )
        if before is None or before[0] != span[0] or span[2] > before[2]:
            before = span
