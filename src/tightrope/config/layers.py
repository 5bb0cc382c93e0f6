"""Split a configuration into its types of layers, each with its rope section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from .._errors import bad_type
from . import keys
from .rope_section import rule_name, sections_of
from .source import Found, Section, Source, agreed, entries, fail, integers, items, whole

# The type of each layer, if the configuration or its class lists them.
Listed = tuple[str, ...] | None


class Layer(NamedTuple):
    """One type of layers.

    Attributes:
        name: the type; None if layers do not differ.
        section: the keys of its rope section; None if it does not rotate.
        why: the source of that, if it is not the family.
    """

    name: str | None
    section: Section | None
    why: str = ""


Layers = tuple[list[Layer], Listed]


def layers_of(source: Source) -> Layers:
    """The types of layers of a configuration, and the type of each layer if it is known."""
    layers, listed = _layers(source)
    named = [layer.name for layer in layers if layer.name is not None]
    more = [name for name in with_attention(listed) if name not in named]
    if named and more:
        fail(
            f"{source.name} must have layers of types {', '.join(named)} only, but layer_types has "
            f"{', '.join(more)}"
        )
    _check_stated(source, layers, named or with_attention(listed))
    return layers, listed


def _layers(source: Source) -> Layers:
    facts, listed = source.facts, types_of(source)
    if facts.rule == "step3p5" and not _has_sections(source):
        return _by_lists(source, listed)
    made = sections_of(source)
    if facts.labels:
        return _labelled(source, made, listed)
    if None in made:
        section, flags = made[None] or {}, flags_key(source)
        windows = facts.rotates_if_windows if source.get("sliding_window") is not None else ()
        if flags is not None:
            return _flagged(source, section, flags)
        if facts.scaled is not None:
            return _scaled(source, section)
        if facts.rotates or windows:
            return _some(source, section, facts.rotates or windows, listed)
    if source.family is None and source.stated.rope_layers not in (None, "all"):
        return _chosen(source, made, flagged(source) or listed)
    if None in made:
        return [Layer(None, made[None])], listed or flagged(source)
    names = with_attention(listed)
    if missing := [name for name in names if name not in made]:
        advice = "; if they do not rotate, pass rope_layers, a list of the types that do"
        _lack_sections(missing, "" if source.family is not None else advice)
    # All that the class knows, also types that this file does not list.
    return [Layer(name, made[name]) for name in dict.fromkeys([*names, *made])], listed


def _lack_sections(names: list[str], advice: str = "") -> NoReturn:
    fail(
        f"each layer type must have a rope section but the config has none for {', '.join(names)}{advice}"
    )


def types_of(source: Source) -> Listed:
    """The type of each layer if the configuration or its class lists them."""
    for key in keys.LAYER_TYPES:
        listed = source.listed(key) if key not in source.facts.ignored else []
        for name in listed:
            if not isinstance(name, str):
                raise bad_type(f"{source.shown(key)} must hold strings but got {name!r}")
        if listed:
            return tuple(listed)
    return tuple(_by_ratios(source)) or None


def _by_ratios(source: Source) -> list[str]:
    """The type of each layer by compress_ratios of DeepSeek V4; [] without them."""
    types = source.facts.ratios
    ratios = source.listed("compress_ratios", predicting=True) if types else []
    if not all(type(ratio) is int and str(ratio) in types for ratio in ratios):
        known = " and ".join([", ".join([*types][:-1]), [*types][-1]])
        fail(f"{source.shown('compress_ratios')} must hold {known} only but got {ratios}")
    return [types[str(ratio)] for ratio in ratios]


def flags_key(source: Source) -> str | None:
    """The key of the list that says which layers rotate: the family's, or one with one meaning in all code."""
    if source.family is None and source.values.get("layer_rope_theta"):
        return "layer_rope_theta"
    return source.facts.flags


def flagged(source: Source) -> Listed:
    """The type of each layer of an unknown family by no_rope_layers or no_rope_layer_interval; None without a list.

    Public code reads both keys in two opposite ways, so the types are named by the key, and the caller states
    which of them rotate.
    """
    if source.family is not None or _has_sections(source):
        return None
    key, count = "no_rope_layer_interval", source.layer_count()
    named = [f"no_rope_layers={flag}" for flag in _flags(source, "no_rope_layers")]
    every = whole(source.given(key))
    if not named and every and count:
        step = every[0].value
        named = ["others" if (n + 1) % step else f"last_of_{step}" for n in range(count)]
    types = zip(source.listed("layer_types") or named, named)
    return (
        tuple(one if one in keys.LAYERS_WITHOUT_ATTENTION else name for one, name in types) or None
    )


def with_attention(listed: Listed) -> list[str]:
    """The types of layers with attention, each once."""
    return [
        name for name in dict.fromkeys(listed or ()) if name not in keys.LAYERS_WITHOUT_ATTENTION
    ]


def _has_sections(source: Source) -> bool:
    sections = [source.values.get(name) for name in keys.SECTION]
    return any(
        isinstance(value, Mapping)
        for each in sections
        if isinstance(each, Mapping)
        for value in each.values()
    )


def _check_stated(source: Source, layers: list[Layer], types: list[str]) -> None:
    """Raise an error if the argument rope_layers contradicts the layers as they were read."""
    given = source.stated.rope_layers
    if given is None:
        return
    chosen = set(types if given == "all" else given)
    if not chosen <= {*types}:
        fail(
            f"rope_layers must be 'all' or types of layers in the config but got {sorted(chosen - {*types})}; the config "
            f"has {', '.join(types) or 'no layer_types'}"
        )
    still = [layer.name for layer in layers if layer.section is None]
    rotating = [name for name in types if name not in still]
    if chosen != {*rotating}:
        fail(f"rope_layers must be {rotating} for {source.name} but got {given!r}")


# --- the rules by which layers differ -------------------------------------------------------------


def _need(source: Source, key: str) -> NoReturn:
    fail(f"{source.name} has layers that differ, so the config must give {source.shown(key)}")


def _labelled(source: Source, made: dict[str | None, Section | None], listed: Listed) -> Layers:
    # DeepSeek V4: layers with a sliding window only use the section "main"; those that also attend to compressed
    # entries use "compress".
    for layer, types in enumerate(zip(listed or (), _by_ratios(source))):
        names = (f"layer_types[{layer}]", f"compress_ratios[{layer}]")
        agreed(f"layer {layer}", [Found(one, name) for one, name in zip(types, names)])
    # Sections that the file has are complete.
    factors = {} if _has_sections(source) else source.facts.attention_factor
    for label, factor in factors.items():
        section = made.get(label) or {}
        if rule_name(section) == "yarn":
            constant = Found(factor, f"constant of the code of {source.name}", given=False)
            section.setdefault("attention_factor", constant)
    return [Layer(name, made[label]) for name, label in source.facts.labels.items()], listed


def _flagged(source: Source, section: Section, key: str) -> Layers:
    # Llama 4, SmolLM3: 1 for each layer with RoPE. Muse Glimmer: its base, and all layers have the same.
    flags, path = source.listed(key), source.shown(key)
    if key != "layer_rope_theta":
        _flags(source, key)
    elif source.given(key):  # otherwise its class repeats the base of the model
        own = section.get("rope_theta")
        bases = [own] if own is not None else []
        bases += [Found(base, f"{path}[{layer}]") for layer, base in enumerate(flags) if base]
        base = agreed("base", bases)
        section = section | ({"rope_theta": base} if base else {})
    names = tuple("rope" if flag else "no_rope" for flag in flags)
    usual = source.facts.lists.get(key, {}).get("repeat", [0])
    kinds = names or (("rope",) if all(usual) else ("rope", "no_rope"))  # as the class lists them
    sections = {"rope": section, "no_rope": None}
    return [Layer(name, sections[name], path) for name in sections if name in kinds], names or None


def _flags(source: Source, key: str) -> list[int]:
    """The entries of a list of 0 and 1; [] if absent."""
    flags = source.listed(key)
    for flag in flags:
        if not isinstance(flag, int) or flag not in (0, 1):
            fail(f"{source.shown(key)} must hold 0 and 1 only but got {flag!r}")
    return [int(flag) for flag in flags]


def _scaled(source: Source, section: Section) -> Layers:
    # Molmo 2: a list of the numbers of the layers whose frequencies are scaled.
    key, count = str(source.facts.scaled), source.layer_count()
    found = source.get(key)
    if found is None:
        return [Layer(None, section)], None
    if count is None:
        _need(source, "num_hidden_layers")
    numbers = integers(found, count - 1, least=0)
    plain = {key: each for key, each in section.items() if key == "rope_theta"}
    names = tuple("scaled" if layer in numbers else "unscaled" for layer in range(count))
    if {*names} <= {"scaled"}:
        return [Layer(None, section)], None
    both = {"scaled": section, "unscaled": plain}
    return [Layer(name, each) for name, each in both.items() if name in names], names


def _some(source: Source, section: Section, rotating: Sequence[str], listed: Listed) -> Layers:
    if source.values.get("sliding_window", 0) is None:
        fail(
            f"{source.shown('sliding_window')} must not be null for {source.name}: no layer would rotate"
        )
    # Cohere 2 MoE: the first layers, without experts, may have no window and rotate all the same.
    names = [name for name in rotating if name != "dense"]
    prefix = source.get("prefix_dense_sliding_window_pattern")
    if "dense" in rotating and not listed:
        _need(source, "layer_types")
    if "dense" in rotating and listed and (prefix is None or prefix.value == 1):
        experts = source.listed("mlp_layer_types")
        if not experts:
            _need(source, "mlp_layer_types")
        still = ("full_attention", "dense")
        listed = tuple("dense" if pair == still else pair[0] for pair in zip(listed, experts))
        names += ["dense"] * ("dense" in listed)
    layers, why = [Layer(name, section) for name in names], source.name
    window = source.get("sliding_window") if source.facts.rotates_if_windows else None
    if window is not None and not window.given:
        why = f"sliding_window = {window.value}, {window.source}"
    return [*layers, Layer("full_attention", None, why)], listed


def _chosen(source: Source, made: dict[str | None, Section | None], listed: Listed) -> Layers:
    """The layers of an unknown family, of which the caller says which rotate."""
    layers, why = [], "the argument rope_layers"
    for name in dict.fromkeys(
        [*with_attention(listed), *(name for name in made if name is not None)]
    ):
        rotates = name in (source.stated.rope_layers or ())
        if rotates and made.get(name, made.get(None)) is None and None not in made:
            _lack_sections([name])
        layers.append(Layer(name, made.get(name, made.get(None)) if rotates else None, why))
    return layers or [Layer(None, made.get(None))], listed


def _by_lists(source: Source, listed: Listed) -> Layers:
    # Step 3.5: a base and a part of the channels for each layer; equal for all layers of one type. Scaling is for
    # some types.
    if not listed:
        _need(source, "layer_types")
    path = source.shown("rope_scaling")
    section = items(Found(source.values.get("rope_scaling"), path))
    if section and "rope_type" not in section:
        fail(f"{path} must have rope_type, as the code of {source.name} reads no type")
    if source.values.get("use_rope_layers"):
        fail(
            f"{source.shown('use_rope_layers')} must be empty; make a RopeSpec by hand for each layer"
        )
    scaling = {k: Found(v, f"{path}.{k}") for k, v in section.items() if v is not None}
    only = source.values.get("yarn_only_types")
    scaled = entries(Found(only, source.shown("yarn_only_types"))) if only is not None else []
    scaled = scaled or ["full_attention"]
    fill = Found(source.facts.rope["full_attention"]["rope_theta"], source.facts.owner, given=False)
    layers = []
    for kind in with_attention(listed):
        own: Section = {"rope_theta": fill, **(scaling if kind in scaled else {})}
        for name, key in (
            ("rope_theta", "rope_theta"),
            ("partial_rotary_factor", "partial_rotary_factors"),
        ):
            value, path = source.values.get(key), source.shown(key)
            found = [Found(value, path)] if value is not None else []
            if isinstance(value, list | tuple):
                each = zip(source.listed(key, predicting=True), listed or ())
                found = [Found(v, f"{path}[{n}]") for n, (v, of) in enumerate(each) if of == kind]
            # The section is read last. Its value counts for the class; other code may read the list.
            found += [own[name]] if name in own and own[name].given else []
            got = agreed(f"{name} of {kind}", found)
            if got is not None and got.value is not None:
                own[name] = got
        layers.append(Layer(kind, own))
    return layers, listed
