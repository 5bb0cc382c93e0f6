"""Split a configuration into its layer types, each with the keys that apply to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from .._errors import bad_type, describe
from . import keys
from .heads import head_dim_of
from .source import (
    Arguments,
    Entries,
    Found,
    Part,
    Source,
    Stated,
    Way,
    agreed,
    fail,
    settle,
    whole,
)

_T = TypeVar("_T")
_MOST_LAYERS = 65536
# The types of layers of an unknown family that rotate if its code is like that of Llama 4.
FLAGGED, OTHERS = "no_rope_layers=1", "others"
# The types of layers of a family whose layers differ, unless its configuration lists them.
_BOTH = frozenset({"full_attention", "sliding_attention"})
# The type of each layer, if the configuration lists them.
Listed = tuple[str, ...] | None
Layers = tuple[list[Part], Listed]


def _sections(source: Source) -> tuple[Entries, dict[str, Entries | None]]:
    """The rope section, and the nested sections per layer type, if any."""
    flat: Entries = {}
    nested: dict[str, Entries | None] = {}
    labels = _types(source) or ()
    for name in keys.SECTION:
        section = source.values.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise bad_type(f"{source.shown(name)} must be a mapping but got {section!r}")
        for key, value in section.items():
            path = f"{name}.{key}"
            if isinstance(value, Mapping):
                inner = {k: (source.shown(f"{path}.{k}"), v) for k, v in value.items()}
                nested[key] = _merged(nested.get(key) or {}, inner)
            elif value is None and key in labels:
                nested.setdefault(key, None)
            else:
                flat = _merged(flat, {key: (source.shown(path), value)})
    if nested:  # a type without a section does not rotate, also if the layers are not listed
        still = [key for key in flat if flat[key][1] is None and not keys.about_rotation(key)]
        for key in [key for key in still if key not in keys.TYPE]:
            nested.setdefault(key, None)
            del flat[key]
    if nested and any(value is not None for _, value in flat.values()):
        fail(
            f"a rope section must hold keys or layer types but got both: "
            f"{', '.join(sorted(path for path, _ in flat.values()))} and "
            f"{', '.join(sorted(nested))}"
        )
    return flat, nested


def _merged(one: Entries, other: Entries) -> Entries:
    merged = dict(one)
    for key, found in other.items():
        both = [one for one in (merged.get(key, found), found) if one[1] is not None]
        merged[key] = agreed(key, both) or found
    return merged


def parts_of(source: Source, stated: Stated) -> tuple[list[Part], Listed]:
    """The layer types of a configuration, and the type of each layer if it lists them."""
    flat, nested = _sections(source)
    layers = flagged(source) or _types(source)
    rule = rule_of(source)
    if rule == "main and compress":
        parts, layers = _main_and_compress(source, flat, nested, layers)
    elif nested:
        of_class = source.family is not None and "model_type" in source.values
        if rule in _ONE_SECTION or (of_class and rule is None):
            fail(f"{source.name} must have one rope section but has one for {', '.join(nested)}")
        if of_class and layers is None and not _BOTH <= nested.keys():
            fail(
                f"{source.name} must have a rope section for {' and '.join(sorted(_BOTH))}, or list its types of layers in "
                f"layer_types, but has one for {', '.join(nested)}"
            )
        parts = _nested_parts(source, nested, layers, stated)
    elif rule is not None:
        parts, layers = _LAYERS[rule](source, flat, layers)
    elif source.family is None and stated.rope_layers not in (None, "all"):
        types = with_attention(layers)
        parts = [
            Part(name, flat, rope=_rotates(name, stated), why=stated.origin("rope_layers"))
            for name in types
        ]
    else:
        parts = [Part(None, flat)]
    named = [part.name for part in parts if part.name is not None]
    missing = [name for name in with_attention(layers) if name not in named]
    if named and missing:
        fail(
            f"{source.name} must have layers of types {', '.join(named)} only, but layer_types has "
            f"{', '.join(missing)}"
        )
    _check_stated(source, stated, parts, named or with_attention(layers))
    return _with_widths(source, parts, layers), layers


def rule_of(source: Source) -> str | None:
    """The name of the rule by which layers differ: the family's, or that of a key with one meaning in all code."""
    if source.family is not None:
        return source.family.layers
    return "layer_rope_theta" if source.values.get("layer_rope_theta") else None


def flagged(source: Source) -> Listed:
    """The type of each layer of an unknown family by no_rope_layers or no_rope_layer_interval; None without a list.

    Public code reads both keys in two opposite ways, so the types are named by the key, and the caller states
    which of them rotate.
    """
    if source.family is not None or _sections(source)[1]:
        return None
    key, every = "no_rope_layer_interval", source.values.get("no_rope_layer_interval")
    named = tuple(f"no_rope_layers={int(flag)}" for flag in _flags(source))
    named = named or _by_interval(source, key, f"last_of_{every}", OTHERS) or ()
    still = keys.LAYERS_WITHOUT_ATTENTION
    types = zip(_types(source) or named, named)
    return tuple(one if one in still else name for one, name in types) or None


def _rotates(name: str, stated: Stated) -> bool:
    return stated.rope_layers == "all" or name in (stated.rope_layers or ())


def with_attention(layers: Listed) -> list[str]:
    """The layer types with attention, each once."""
    return [
        name for name in dict.fromkeys(layers or ()) if name not in keys.LAYERS_WITHOUT_ATTENTION
    ]


def _check_stated(source: Source, stated: Stated, parts: list[Part], types: list[str]) -> None:
    """Raise an error if the argument rope_layers contradicts the layers as they were read."""
    given = stated.rope_layers
    if given is None:
        return
    chosen = set(types if given == "all" else given)
    if not chosen <= set(types):
        fail(
            f"rope_layers must be 'all' or types of layers in the config but got "
            f"{sorted(chosen - set(types))}; the config has {', '.join(types) or 'no layer_types'}"
        )
    still = [part.name for part in parts if not part.rope]
    rotating = [name for name in types if name not in still]
    if chosen != set(rotating):
        fail(f"rope_layers must be {rotating} for {source.name} but got {given!r}")


def _entries(source: Source, key: str, predicting: bool = False) -> list[object]:
    """The entries of a list with one for each layer, and perhaps more for layers that only predict; [] if absent."""
    listed = source.values.get(key)
    if listed is None:
        return []
    path = source.shown(key)
    if not isinstance(listed, list | tuple):
        raise bad_type(f"{path} must be a list but got {listed!r}")
    counts = [source.values.get(name) for name in (*keys.LAYER_COUNT, "num_nextn_predict_layers")]
    *counted, more = [count if isinstance(count, int) else 0 for count in counts]
    count = next(filter(None, counted), len(listed))
    most = len(listed) if predicting and len(listed) > count else count + more
    if len(listed) not in (0, count, most):
        fail(f"{path} must have an entry for each of {count} layers but has {len(listed)}")
    return list(listed[:count])


def _types(source: Source) -> Listed:
    """The type of each layer if the configuration lists them, else None."""
    for key in keys.LAYER_TYPES:
        listed = _entries(source, key)
        for name in listed:
            if not isinstance(name, str):
                raise bad_type(f"{source.shown(key)} must hold strings but got {name!r}")
        if listed:
            return tuple(map(str, listed))
    return None


def _nested_parts(
    source: Source,
    nested: dict[str, Entries | None],
    layers: Listed,
    stated: Stated,
) -> list[Part]:
    still: list[str] = []
    missing = sorted({*with_attention(layers)} - nested.keys())
    if source.family is None and stated.rope_layers is not None:
        still = [name for name in missing if not _rotates(name, stated)]
    if missing != still:
        way: Way
        way, advice = ("if they do not rotate", None), ""
        if source.family is None:
            rotating = [name for name, entries in nested.items() if entries is not None]
            way = "", Arguments(rope_layers=rotating)
            advice = "; if they do not rotate, pass rope_layers, a list of the types that do"
        settle(
            f"each layer type must have a rope section but the config has none for "
            f"{', '.join(missing)}{advice}",
            way,
        )
        still = missing
    parts = [Part(name, {}, rope=False, why=stated.origin("rope_layers")) for name in still]
    for name, entries in nested.items():
        if entries is None:
            parts.append(Part(name, {}, rope=False))
            continue
        # The outer base is for layer types without their own.
        has_base = any(entries.get(key, ("", None))[1] is not None for key in keys.BASE)
        parts.append(Part(name, entries, () if has_base else keys.BASE))
    return parts


def _with_widths(source: Source, parts: list[Part], layers: Listed) -> list[Part]:
    """The parts with the width of their heads, where the configuration states it for single layers (Gemma 4)."""
    single = source.values.get("per_layer_config") or {}
    if not isinstance(single, Mapping):
        raise bad_type(f"{source.shown('per_layer_config')} must be a mapping but got {single!r}")
    types = {str(layer).lstrip("0"): name for layer, name in enumerate(layers or ())}
    own: list[tuple[str | None, Found]] = []
    for number, inner in single.items():
        layer = str(number).lstrip("0") if str(number).isdecimal() else None
        if layers is not None and layer not in types:
            last = len(layers) - 1
            fail(
                f"per_layer_config must be of layers 0 to {last} but has one of {describe(number)}"
            )
        if isinstance(inner, Mapping) and inner.get("head_dim") is not None:
            path = source.shown(f"per_layer_config.{number}.head_dim")
            own.append((types.get(layer or ""), (path, inner["head_dim"])))
    made = []
    for part in parts:
        wide = rule_of(source) == "wide where full" and part.name == "full_attention"
        found = source.outer(["global_head_dim"]) if wide else part.inner([keys.OWN_HEAD_DIM])
        mine = [one for name, one in own if layers is None or part.name in (None, name)]
        if wide and not found and not mine:
            _need(source, "global_head_dim")
        alike = [name for name in layers or () if part.name in (None, name)]
        if own and part.rope and not found and len(mine) != len(alike):
            width, path = head_dim_of(source, part)  # of the layers without their own
            mine.append((path, width))
        made.append(replace(part, head_dim=agreed("head_dim", found + mine)))
    return made


def _need(source: Source, key: str, null: bool = True) -> None:
    if key not in source.values or not (null or source.values[key]):
        fail(f"{source.name} has layers that differ, so the config must give {source.shown(key)}")


def _local_base(source: Source, flat: Entries, layers: Listed) -> Layers:
    # Gemma 3: scaling applies only to the layers with full attention.
    _need(source, "rope_local_base_freq")
    if layers is None:
        layers = _by_interval(
            source, "sliding_window_pattern", "full_attention", "sliding_attention"
        )
    return [
        Part("full_attention", flat),
        Part("sliding_attention", {}, ("rope_local_base_freq",)),
    ], layers


def _two_bases(source: Source, flat: Entries, layers: Listed) -> Layers:
    # ModernBERT: sliding-window layers without their own base use the global one.
    for key in ("global_rope_theta", "local_rope_theta"):
        _need(source, key)
    local = "local_rope_theta" if source.values["local_rope_theta"] is not None else None
    return [
        Part("full_attention", flat, ("global_rope_theta",)),
        Part("sliding_attention", flat, (local or "global_rope_theta",)),
    ], layers


def _scaled_layers(source: Source, flat: Entries, layers: Listed) -> Layers:
    # Molmo 2: a list of the numbers of the layers whose frequencies are scaled.
    del layers
    scaled, path = source.values.get("rope_scaling_layers"), source.shown("rope_scaling_layers")
    if scaled is None:
        return [Part(None, flat)], None
    _need(source, "num_hidden_layers", null=False)
    ((_, count),) = whole(source.outer(["num_hidden_layers"]), _MOST_LAYERS)
    if not isinstance(scaled, list | tuple):
        raise bad_type(f"{path} must be a list but got {scaled!r}")
    whole([(path, number) for number in scaled], count - 1, least=0)
    if len({*scaled}) == count:
        return [Part(None, flat)], None
    base = {key: found for key, found in flat.items() if key in keys.BASE}
    listed = tuple("scaled" if layer in scaled else "unscaled" for layer in range(count))
    both = {"scaled": flat, "unscaled": base}
    return [Part(name, each) for name, each in both.items() if name in listed], listed


def _scaled_where_full(source: Source, flat: Entries, layers: Listed) -> Layers:
    # OLMo 3: sliding-window layers use unscaled frequencies.
    if _by_class(source):
        _no_flat_parameters(source)
        for path, base in source.outer(["rope_theta"]):
            if base != 500000:
                fail(
                    f"{path} must be 500000, as the code of {source.name} takes another one for full_attention "
                    f"only, but got {base!r}; rope_parameters may give each type of layers its own"
                )
    unscaled = {key: found for key, found in flat.items() if key in keys.BASE}
    return [Part("full_attention", flat), Part("sliding_attention", unscaled)], layers


def _by_class(source: Source) -> bool:
    """Return whether the code is a class of transformers, which reads a few spellings only."""
    return source.family is not None and source.family.bases is not None


def _no_flat_parameters(source: Source) -> None:
    """Raise an error for keys in rope_parameters, where the code reads a section for each type of layers."""
    flat = source.values.get("rope_parameters")
    if flat and not any(isinstance(value, Mapping) for value in flat.values()):
        _only_nested(source, {}, None)


def _sliding_only(source: Source, flat: Entries, layers: Listed) -> Layers:
    if source.values.get("sliding_window", 0) is None:
        fail(
            f"{source.shown('sliding_window')} must not be null for {source.name}: no layer would rotate"
        )
    for key in ("sliding_window_pattern", "global_attn_every_n_layers"):
        layers = layers or _by_interval(source, key, "full_attention", "sliding_attention")
    return [Part("sliding_attention", flat), Part("full_attention", {}, rope=False)], layers


def _sliding_or_dense(source: Source, flat: Entries, layers: Listed) -> Layers:
    # Cohere 2 MoE: the first layers, without experts, may have no window and rotate all the same.
    if _by_class(source) and source.values.get("rope_scaling"):
        fail(
            f"the scaling must be in rope_parameters, as the code of {source.name} does not read "
            f"{source.shown('rope_scaling')}"
        )
    for key in ("layer_types", "mlp_layer_types"):
        _need(source, key, null=False)
    parts, layers = _sliding_only(source, flat, layers)
    experts = _entries(source, "mlp_layer_types")
    if "dense" not in experts or source.values.get("prefix_dense_sliding_window_pattern", 1) != 1:
        return parts, layers
    still = ("full_attention", "dense")
    return [*parts, Part("dense", flat)], tuple(
        "dense" if both == still else both[0] for both in zip(layers or (), experts)
    )


def _sliding_only_if(source: Source, flat: Entries, layers: Listed) -> Layers:
    _need(source, "sliding_window")
    if source.values["sliding_window"] is None:
        return [Part(None, flat)], layers
    return _sliding_only(source, flat, layers)


def _only_nested(source: Source, flat: Entries, layers: Listed) -> Layers:
    del flat, layers
    fail(
        f"{source.name} has layers that differ, so rope_parameters must have a section for each type"
    )


# compress_ratios of DeepSeek's own files -> layer type.
_RATIOS = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}


def _main_and_compress(
    source: Source, flat: Entries, nested: Mapping[str, Entries | None], listed: Listed
) -> Layers:
    # DeepSeek V4: layers with a sliding window only use the section "main"; those that also attend to
    # compressed entries use "compress". In a flat section, all but the base is that of "compress".
    if nested and nested.keys() != {"main", "compress"}:
        has = ", ".join(sorted(nested))
        fail(f"{source.name} must have the rope sections main and compress but has {has}")
    if not nested:
        _need(source, "compress_rope_theta")
        scaled = {key: found for key, found in flat.items() if key not in keys.BASE}
        if any(scaled.get(key, ("", None))[1] == "yarn" for key in keys.TYPE):
            scaled.setdefault("attention_factor", (f"constant of the code of {source.name}", 1.0))
        own = {key: found for key, found in flat.items() if key in (*keys.BASE, *keys.FRACTION)}
        nested = {"main": own, "compress": scaled}
    ratios = _entries(source, "compress_ratios", predicting=True)
    if not all(isinstance(ratio, int) and ratio in _RATIOS for ratio in ratios):
        fail(f"{source.shown('compress_ratios')} must hold 0, 4 and 128 only but got {ratios}")
    stated = tuple(f"{_RATIOS[ratio]}_attention" for ratio in ratios)  # type: ignore[index]
    listed = listed or stated or None
    for layer, pair in enumerate(zip(listed or (), stated, strict=False)):
        sources = (f"layer_types[{layer}]", f"compress_ratios[{layer}]")
        agreed(f"layer {layer}", list(zip(sources, pair, strict=True)), choose=False)
    main, compress = nested["main"] or {}, nested["compress"] or {}
    return [
        Part(f"{name}_attention", compress, ("compress_rope_theta",))
        if ratio
        else Part(f"{name}_attention", main)
        for ratio, name in _RATIOS.items()
    ], listed


def _thetas(source: Source, flat: Entries, layers: Listed) -> Layers:
    # Muse Glimmer: a base for each layer, 0 for those without RoPE; all others must have the model's base.
    del layers
    _need(source, "layer_rope_theta", null=source.values.get("layer_rope_theta") is not None)
    path, thetas = source.shown("layer_rope_theta"), _entries(source, "layer_rope_theta")
    found = Part(None, flat).inner(keys.BASE) + source.outer(keys.BASE)
    own = [(f"{path}[{n}]", theta) for n, theta in enumerate(thetas) if theta]
    agreed("base", found + own, choose=False)
    return _rope_and_no_rope(flat, thetas)


def _by_lists(source: Source, flat: Entries, layers: Listed) -> Layers:
    # Step 3.5: a base and a part of the channels for each layer; equal for all layers of one type. Scaling is for
    # some types.
    if _by_class(source):
        _no_flat_parameters(source)
        section = source.values.get("rope_scaling")
        if isinstance(section, Mapping) and section and "rope_type" not in section:
            fail(
                f"{source.shown('rope_scaling')} must have rope_type, as the code of {source.name} reads no type"
            )
    _need(source, "layer_types", null=False)
    if source.values.get("use_rope_layers"):
        fail(
            f"{source.shown('use_rope_layers')} must be empty; make a RopeSpec by hand for each layer"
        )
    scaled = source.values.get("yarn_only_types") or ["full_attention"]
    lists = {
        name: (source.shown(key), _entries(source, key, predicting=True))
        for name, key in (
            ("rope_theta", "rope_theta"),
            ("partial_rotary_factor", "partial_rotary_factors"),
        )
        if isinstance(source.values.get(key), list | tuple)
    }
    parts = []
    for kind in with_attention(layers):
        own = dict(flat) if kind in scaled else {}
        for name, (path, listed) in lists.items():
            each = [
                (f"{path}[{n}]", listed[n]) for n, one in enumerate(layers or ()) if one == kind
            ]
            own[name] = agreed(f"{name} of {kind}", each, choose=False) or (path, None)
        parts.append(Part(kind, own, () if "rope_theta" in lists else keys.BASE))
    return parts, layers


def _by_number(source: Source, flat: Entries, layers: Listed) -> Layers:
    # Llama 4, SmolLM3: a list with 1 for each layer with RoPE and 0 for the others; or an interval n,
    # and every n-th layer has no RoPE.
    del layers
    flags = _flags(source)
    every = _by_interval(source, "no_rope_layer_interval", 0, 1)
    return _rope_and_no_rope(flat, flags or every or ())


def _flags(source: Source) -> list[int]:
    """The entries of no_rope_layers; [] if absent."""
    whole(source.outer(["no_rope_layer_interval"]))
    flags: list[int] = []
    for flag in _entries(source, "no_rope_layers"):
        if not isinstance(flag, int) or flag not in (0, 1):
            fail(f"{source.shown('no_rope_layers')} must hold 0 and 1 only but got {flag!r}")
        flags.append(flag)
    return flags


def _rope_and_no_rope(flat: Entries, flags: Sequence[object]) -> Layers:
    """The layers that rotate and the others, by a list that is true for the former, or without one."""
    layers = tuple("rope" if flag else "no_rope" for flag in flags) or None
    names = [name for name in ("rope", "no_rope") if layers is None or name in layers]
    return [
        Part(name, flat if name == "rope" else {}, rope=name == "rope") for name in names
    ], layers


def _by_interval(source: Source, key: str, every: _T, others: _T) -> tuple[_T, ...] | None:
    """A value for each layer if that of every n-th one differs; None without n or the number of layers."""
    interval, count = source.values.get(key), source.values.get("num_hidden_layers")
    if not isinstance(interval, int) or not isinstance(count, int) or interval < 1:
        return None
    if count > _MOST_LAYERS:
        fail(f"{source.shown('num_hidden_layers')} must be at most {_MOST_LAYERS} but got {count}")
    return tuple(others if (layer + 1) % interval else every for layer in range(count))


_LAYERS: dict[str, Callable[[Source, Entries, Listed], Layers]] = {
    "local base": _local_base,
    "global and local base": _two_bases,
    "scaled layers": _scaled_layers,
    "scaled where full": _scaled_where_full,
    "sliding only": _sliding_only,
    "sliding only, if windows": _sliding_only_if,
    "sliding or dense": _sliding_or_dense,
    "no_rope_layers": _by_number,
    "layer_rope_theta": _thetas,
    "lists": _by_lists,
    "nested": _only_nested,
    "nested or flat": lambda _, flat, layers: ([Part(None, flat)], layers),
    "wide where full": _only_nested,
}
# Rules of families whose code reads one rope section for all layers.
_ONE_SECTION = frozenset(
    {
        "sliding only",
        "sliding only, if windows",
        "sliding or dense",
        "no_rope_layers",
        "layer_rope_theta",
    }
)
