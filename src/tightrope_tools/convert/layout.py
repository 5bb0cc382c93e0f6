"""Read from a configuration how the rows of projections are laid out: numbers of heads, gates, order.

Which rows move follows from these facts. A layout that conversion does not know is refused by the name of
the key that states it, even if the number of rows happens to fit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tightrope.config import keys

from ._fail import fail
from .naming import KEY_HEADS_OPTIONAL, Naming

# A number of heads: of all layers, or of each layer by its number; None if nothing states it.
Count = int | tuple[int | None, ...] | None

HEADS = (*keys.HEADS, "num_query_heads", "attention.head_count")
KV_HEADS = (
    "num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_query_groups", "n_head_kv", "kv_n_heads",
    "multi_query_group_num", "num_attention_groups", "encoder_num_key_value_heads",
    "decoder_num_key_value_heads", "attention.head_count_kv",
)  # fmt: skip
_WIDTHS = (*keys.HEAD_DIM, "qk_head_dim")
_VALUE_WIDTHS = (
    "v_head_dim", "head_dim_v", "value_head_dim", "v_channels", "attention.value_length",
)  # fmt: skip
# Digits of a layer's number, so that a wrong one takes no memory.
_LONGEST_NUMBER = 6
# Words of a key for the layers of one kind: swa_num_key_value_heads, num_global_key_value_heads.
_OF_A_KIND = frozenset("full global local sliding swa window windowed".split())
_PARALLEL = (
    "tensor_model_parallel_size", "tensor_parallel_size", "model_parallel_size", "tp_size", "mp_size",
)  # fmt: skip

_GATE = frozenset("gate gates gated gating".split())
_OF_ATTENTION = frozenset(
    "attention attn elementwise head heads headwise output q qkv query wise".split()
)
# Gates of other parts, and names of functions (output_gate_type).
_NOT_OF_ATTENTION = frozenset(
    "act activation conv cross expert experts ffn linear mamba mlp moe router ssm type".split()
)


def flattened(values: Mapping[str, Any], found: object) -> dict[str, Any]:
    """Return the keys of a configuration, those of ``attn_config``, and GGUF's without the architecture."""
    inner = values.get("attn_config")
    made = {**values, **(inner if isinstance(inner, Mapping) else {})}
    if isinstance(found, Mapping):
        gguf = {key: value for key, value in found.items() if ".attention." in str(key)}
        made |= {str(key).partition(".")[2]: value for key, value in gguf.items()}
    return made


# --- numbers of heads -----------------------------------------------------------------------------


def counts(
    facts: Mapping[str, Any],
    family: str | None,
    layers: int | None,
    heads: int | None,
    kv_heads: int | None,
) -> tuple[Count, Count]:
    """Return the numbers of query and of key heads.

    Args:
        facts: the flattened configuration.
        family: its family, a key of :data:`tightrope_tools.convert.naming.FAMILY_NAMING`.
        layers: the number of layers.
        heads, kv_heads: what the user states.
    """
    queries = _by_layer(_count(heads, "--heads", facts, HEADS), facts, HEADS, layers)
    if family == "falcon" and kv_heads is None:
        own = _falcon(facts)
        return queries, queries if own is None else own
    # Megatron's arguments and ChatGLM's configuration hold a number of key heads even if it is not used.
    same = any(
        facts.get(key) is False for key in ("group_query_attention", "multi_query_attention")
    )
    found = _count(kv_heads, "--kv-heads", {} if same else facts, KV_HEADS)
    if found is None and facts.get("multi_query") is True:
        found = 1
    keys_ = _by_layer(found, facts, KV_HEADS, layers, queries)
    if keys_ is None and (same or family in KEY_HEADS_OPTIONAL):
        keys_ = queries
    return queries, keys_


def size(values: Mapping[str, Any], names: Collection[str]) -> int | None:
    """Return the whole number of the first of these keys that a configuration has; None if it has none."""
    return next(
        (_number(name, values[name]) for name in names if values.get(name) is not None), None
    )


def of_layer(count: Count, layer: int) -> int | None:
    """Return the number of heads of a layer."""
    if not isinstance(count, tuple):
        return count
    if layer >= len(count):
        fail(
            f"the configuration must list the heads of every layer but lists {len(count)}, and the "
            f"checkpoint has a layer {layer}"
        )
    return count[layer]


def _count(
    given: int | None, flag: str, values: Mapping[str, Any], names: Collection[str]
) -> int | tuple[int, ...] | None:
    """Return the number of heads that the user or the configuration states; an error if they disagree."""
    found: dict[str, int | tuple[int, ...]] = {}
    for name in names:
        listed = f"{name}_per_layer"
        key = name if values.get(listed) is None else listed
        if values.get(key) is not None:
            found[key] = _whole(key, values[key])
    if not found:
        if given is not None and given < 1:
            fail(f"{flag} must be above 0 but got {given}")
        return given
    first, value = next(iter(found.items()))
    for name, other in found.items():
        if other != value:
            fail(
                f"a number of heads must have one value but got {first} = {value} and {name} = {other}"
            )
    if given is not None and given != value:
        fail(f"{flag} is {given} but the configuration states {first} = {value}")
    return value


def _whole(name: str, value: object) -> int | tuple[int, ...]:
    """Check a number of heads, or a list of one per layer, in which 0 is a layer without attention."""
    if not isinstance(value, list | tuple):
        return _number(name, value)
    numbers = tuple(_number(f"each entry of {name}", one, least=0) for one in value)
    return numbers[0] if len(set(numbers)) == 1 and numbers[0] else numbers


def _number(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fail(f"{name} must be a whole number{' above 0' if least else ''} but got {value!r}")
    return value


def _by_layer(
    count: Count,
    facts: Mapping[str, Any],
    names: Collection[str],
    layers: int | None,
    heads: Count = None,
) -> Count:
    """Apply the numbers that a configuration states for single layers."""
    own: dict[int, int] = {}
    for layer, inner in _single_layers(facts):
        group = inner.get("n_heads_in_group")
        queries = of_layer(heads, layer)
        found = [name for name in names if inner.get(name) is not None]
        if found:
            own[layer] = _number(f"{found[0]} of layer {layer}", inner[found[0]])
        elif queries and isinstance(group, int) and group > 0:  # Nemotron-NAS
            own[layer] = queries // group
    if not own:
        return count
    every = range(max(layers or 0, *(layer + 1 for layer in own)))
    made = tuple(own[n] if n in own else of_layer(count, n) for n in every)
    return made[0] if len(set(made)) == 1 else made


def _single_layers(facts: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and the keys of each layer that has keys of its own."""
    single = facts.get("per_layer_config")
    if isinstance(single, Mapping):
        for layer, inner in single.items():
            number = str(layer)
            if isinstance(inner, Mapping) and number.isdecimal() and len(number) < _LONGEST_NUMBER:
                yield int(number), inner
    blocks = facts.get("block_configs")
    for layer, block in enumerate(blocks if isinstance(blocks, list) else []):
        inner = block.get("attention") if isinstance(block, Mapping) else None
        if isinstance(inner, Mapping):
            yield layer, inner


def _falcon(facts: Mapping[str, Any]) -> Count:
    """Return Falcon's number of key heads, None for that of the queries.

    Only its newer architecture reads it from the configuration.
    """
    if facts.get("new_decoder_architecture"):
        return _count(None, "", facts, KV_HEADS)
    return 1 if facts.get("multi_query", True) else None


# --- layouts that are refused ---------------------------------------------------------------------


def gates(facts: Mapping[str, Any], naming: Naming) -> dict[str, object]:
    """Return the keys that announce gates of the attention, which may lie among the rows of queries."""
    known = {"attn_output_gate"} if "q gate" in naming.modules.values() else set()
    return {
        key: value
        for key, value in facts.items()
        if key not in known
        and isinstance(value, bool | int | str)
        and value not in (0, "", "none")
        and _is_gate(str(key))
    }


def _is_gate(key: str) -> bool:
    words = set(re.split(r"[^a-z]+", key.lower()))
    if "qgkv" in words or words == {"gating"}:
        return True
    return bool(words & _GATE and words & _OF_ATTENTION and not words & _NOT_OF_ATTENTION)


def check(
    facts: Mapping[str, Any],
    naming: Naming,
    widths: tuple[int, ...],
    heads: Count,
    kv_heads: Count,
    *,
    packed: bool,
) -> None:
    """Refuse a configuration that states another layout than the naming.

    Args:
        facts: the flattened configuration.
        widths: the channels of a head, in any layer.
        packed: whether the user stated the order of rows.
    """
    for key, value in facts.items():
        if str(key).startswith("heterogeneous_layers_config") and value:
            fail(f"{key} states layers that differ in their heads, and conversion does not read it")
    _check_kinds(facts, widths, heads, kv_heads)
    fused = " and ".join(name for name, role in naming.modules.items() if role == "qkv")
    if not fused:
        return
    if facts.get("multi_latent_attention") is False:
        # Every run of Megatron-LM has the sizes of latent attention.
        facts = {key: facts[key] for key in facts if key not in ("kv_lora_rank", "v_head_dim")}
    for key in ("multi_latent_attention", "kv_lora_rank"):
        if facts.get(key):
            fail(
                f"{key} is {facts[key]!r}: latent attention has no projection such as {fused}, so choose "
                f"another naming"
            )
    for key in _VALUE_WIDTHS:
        value = facts.get(key)
        if value is not None and any(value != width for width in widths):
            fail(
                f"the values in {fused} must be as wide as the keys, {_shown(widths)} channels, but {key} "
                f"is {value!r}"
            )
    if not packed:
        _check_order(facts, naming, fused)


def _check_kinds(
    facts: Mapping[str, Any], widths: tuple[int, ...], heads: Count, kv_heads: Count
) -> None:
    """Refuse numbers and widths of heads for layers of one kind, as it is not known which layers these are."""
    stated = {str(key): value for key, value in facts.items()}
    for name, inner in facts.items():
        if (
            isinstance(inner, Mapping)
            and "attention" in str(name)
            and not str(name).endswith("_config")
        ):
            stated |= {f"{name}.{key}": value for key, value in inner.items()}
    for layer, inner in _single_layers(facts):
        stated |= {f"layer {layer}.{key}": inner[key] for key in _WIDTHS if key in inner}
    for key, value in stated.items():
        section, _, name = key.rpartition(".")
        words = name.removesuffix("_per_layer").split("_")
        plain = "_".join(word for word in words if word not in _OF_A_KIND)
        read = (plain == name and not section) or name.endswith("heads_per_layer")
        for names, what, known in (
            (HEADS, "{} query heads", heads),
            (KV_HEADS, "{} key heads", kv_heads),
            (_WIDTHS, "heads of {} channels", widths),
        ):
            if plain not in names or read or value is None:
                continue
            every = known if isinstance(known, tuple) else (known,)
            if all(one in every for one in (value if isinstance(value, list | tuple) else [value])):
                continue
            advice = ": list the number of each layer, as in num_key_value_heads_per_layer"
            fail(
                f"every layer must have {what.format(_shown(every))} but {key} is {value!r}"
                f"{'' if names is _WIDTHS else advice}"
            )


def _shown(numbers: Collection[int | None]) -> str:
    return " or ".join(map(str, sorted({n for n in numbers if n}))) or "a stated number of"


def _check_order(facts: Mapping[str, Any], naming: Naming, fused: str) -> None:
    """Refuse keys that state another order of rows in a fused projection than the naming does."""
    packing = naming.packing
    order = f"the rows of {fused} must be in the order of --packing {packing}, but "
    if packing == "grouped" and facts.get("megatron_legacy"):
        fail(f"{order}megatron_legacy is {facts['megatron_legacy']!r}: pass --packing blocks")
    if packing == "blocks" and facts.get("multi_query_attention") is False:
        fail(f"{order}multi_query_attention is False: pass --packing grouped")
    if packing == "quarters":
        for key in ("mp_num", "head_dim"):
            # CodeGen 2 packs the rows of some of its models in eighths; its configurations have a head_dim.
            if facts.get(key) is not None and (key, facts[key]) != ("mp_num", 4):
                fail(
                    f"{order}{key} is {facts[key]!r}, as in CodeGen 2, some of whose models are packed in "
                    f"eighths: pass --packing quarters if mp_num is 4 in the code of the model"
                )
    inner = facts.get("mapping")
    parallel = {**(inner if isinstance(inner, Mapping) else {}), **facts}
    for key in _PARALLEL if packing != "grouped" else ():
        value = parallel.get(key)
        if isinstance(value, int) and value > 1:
            fail(
                f"{order}{key} is {value}, so they may be in that order within each of {value} parts: pass "
                f"--packing {packing} if the parts were merged"
            )


def check_version(version: object, naming: Naming, *, packed: bool) -> None:
    """Refuse a Megatron checkpoint from before version 2, whose rows had another order."""
    number = isinstance(version, int | float) and not isinstance(version, bool)
    fused = [name for name, role in naming.modules.items() if role == "qkv"]
    if number and version < 2 and fused and naming.packing == "grouped" and not packed:  # type: ignore[operator]
        how = "pass --packing blocks" if version == 0 else "let Megatron load and save it"
        fail(
            f"the rows of {' and '.join(fused)} must be in the order of --packing grouped, but "
            f"checkpoint_version is {version!r}: {how}"
        )
