"""Translate the metadata of a GGUF file to the key names of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import keys
from .families import (
    GGUF_HALVES,
    GGUF_INTERLEAVED_SECTIONS,
    GGUF_MAYBE_SECTIONS,
    GGUF_NEIGHBOURS,
    GGUF_SECTIONS,
    GGUF_WITHOUT_ROPE,
    Family,
)
from .scaling import given_by_factors
from .source import Source, fail

_GGUF_CODE = "llama.cpp: llama_model_rope_type"
_GGUF_KEY = re.compile(r"^([A-Za-z0-9_-]+)\.(rope|attention|embedding_length|context_length)(\.|$)")

# Suffix of the key -> the name in transformers.
_GGUF_OUTER = {
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "rope_theta",
}
_GGUF_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scale_linear": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.attn_factor": "attn_factor",
    "rope.scaling.finetuned": "finetuned",
}
# The widths of the heads of layers with a sliding window; with latent attention, key_length_mla_swa.
_GGUF_WIDTHS = {
    "attention.key_length_swa": keys.OWN_HEAD_DIM,
    "rope.dimension_count_swa": keys.OWN_ROTARY_DIM,
}
# How many tokens a compressed entry of the cache has, by layer, and the base of layers that have such entries.
_GGUF_COMPRESSED = {
    "attention.compress_ratios": "compress_ratios",
    "attention.compress_rope_freq_base": "compress_rope_theta",
}
_GGUF_TENSORS = {
    "rope_factors_short.weight": "short_factor",
    "rope_factors_long.weight": "long_factor",
}
# How layers differ; llama.cpp decides this in its code (src/models, October 2026), by architecture, and no file lists it.
_GGUF_LAYERS = {
    **dict.fromkeys(("afmoe", "llama4", "smollm3"), "no_rope_layers"),  # every fourth
    **dict.fromkeys(("cohere2", "exaone-moe", "maple", "muse-glimmer"), "sliding only"),
    "cohere2moe": "sliding or dense",
    "deepseek4": "main and compress",
    "exaone4": "sliding only, if windows",
}
# The same for models whose files give a window; smallthinker has no RoPE in the first layer, the fifth, ….
_GGUF_WINDOWED = {
    **dict.fromkeys(("mellum", "olmo2"), "scaled where full"),
    "smallthinker": "no_rope_layers",
}
# All layers have one base; llama.cpp does not use that of layers with a window.
_GGUF_ONE_BASE = frozenset({"cohere2", "cohere2moe", "dflash", "mellum", "olmo2"})
# Layers with full attention are scaled by this tensor.
_GGUF_FACTORED = frozenset({"gemma4", "gemma4-assistant"})
_GGUF_REFUSED = {
    **dict.fromkeys(GGUF_WITHOUT_ROPE, "llama.cpp rotates none of its layers"),
    "baichuan": "llama.cpp rotates only its 7B, which has 32 layers",
}
# `rope.scaling.finetuned` is their switch for RoPE.
_GGUF_SWITCHED = frozenset({"granite", "granitemoe", "granitehybrid", "graniteswitch"})
# Their base is a constant of llama.cpp's code, which rotates all channels and scales nothing.
_GGUF_CONSTANT = frozenset({"cogvlm", "deepseek2-ocr"})
# Their code loads no factors, or loads some and does not use them.
_GGUF_UNFACTORED = _GGUF_CONSTANT | {"pangu-embedded"}
# Latent attention: the channels without RoPE come first.
_GGUF_LATENT = frozenset(
    "bailingmoe3 deepseek2 deepseek32 deepseek4 dots3note glm-dsa hy_v4 minicpm3 mistral4 plm".split()
)
# Their converter stores mscale_all_dim / 10, and their graph multiplies the softmax scale.
_GGUF_TENTH = frozenset({"deepseek2", "deepseek32", "mistral4"})
# llama.cpp ignores that multiplier in all others.
_GGUF_MULTIPLIED = _GGUF_TENTH | {"mistral3"}
# Architectures that rotate a part of a head (_GGUF_PART), or whose head_dim is not hidden size / heads
# (_GGUF_HEAD). Their files always have the key for this number; a file without the key is damaged.
_GGUF_PART = frozenset(
    """chatglm glm4 glm4moe gptneox laguna mimo2 minimax-01 minimax-m2 minimax-m3 nemotron phi2
    qwen3next stablelm step35""".split()
)
_GGUF_HEAD = frozenset(
    """cohere2moe deepseek4 dflash gemma gemma2 gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding2
    gpt-oss grovemoe hunyuan_vl hy_v3 laguna maincoder maple mimo2 minimax-01 minimax-m3 qwen3 qwen3moe
    qwen3next rnd1 seed_oss step35""".split()
)
# Layers with a sliding window have their own base, by default 10000.
_GGUF_LOCAL_BASE = frozenset(
    """dots3note gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding gemma-embedding2 mimo2
    modern-bert plamo3 step35""".split()
)
# They have the common base by default.
_GGUF_COMMON_BASE = frozenset({"laguna", "spark2_5"})
# They may have widths of their own.
_GGUF_LOCAL_WIDTHS = frozenset(
    "dots3note gemma4 gemma4-assistant gemma-embedding2 laguna spark2_5 step35".split()
)
# They are scaled like the others.
_GGUF_LOCAL_SCALED = frozenset({"dots3note", "gemma2", "gpt-oss", "spark2_5"})
# Architectures that tell layers with a window by a list, or by a period -> the period of files without either (None:
# the list must be there), and the first layer with full attention. From `set_swa_pattern` in llama.cpp's src/models,
# October 2026.
_GGUF_PERIODS: dict[str, tuple[int | None, int]] = {
    **dict.fromkeys(("gemma3", "gemma-embedding", "gemma-embedding2"), (6, 5)),
    **dict.fromkeys(("cohere2", "exaone4", "mellum", "olmo2"), (4, 3)),
    **dict.fromkeys(
        ("dots3note", "gemma4", "gemma4-assistant", "maple", "mimo2", "spark2_5", "step35"),
        (None, 0),
    ),
    **dict.fromkeys(("cohere2moe", "laguna"), (4, 0)),
    "plamo3": (8, 7),
    "modern-bert": (3, 0),
}
_MOST_LAYERS = 65536
# The base of llama.cpp where neither a file nor an architecture has another.
_GGUF_BASE = 10000.0


def is_gguf(values: Mapping[str, Any]) -> bool:
    """Return True if a mapping is the metadata of a GGUF file."""
    if "general.architecture" in values:
        return True
    return any(isinstance(key, str) and ".rope." in key for key in values)


def _architecture(values: Mapping[str, Any]) -> str:
    given = values.get("general.architecture")
    if given is not None:
        return str(given)
    found = {match[1] for key in values if (match := _GGUF_KEY.match(str(key)))}
    if len(found) != 1:
        fail(
            f"GGUF metadata must be of one architecture but got {', '.join(sorted(found)) or 'none'}"
        )
    return found.pop()


def gguf(values: Mapping[str, Any]) -> Source:
    """Read GGUF metadata: keys of the architecture, and factor tensors, if any.

    The keys are ``<arch>.rope.*``, ``<arch>.attention.*`` and sizes (``<arch>.context_length``, …).
    """
    arch = _architecture(values)
    outer: dict[str, Any] = {}
    section: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    read = set(_GGUF_TENSORS) | {"rope_freqs.weight"}

    def take(suffix: str, into: dict[str, Any], name: str, path: str) -> Any:
        key = f"{arch}.{suffix}"
        read.add(key)
        value = values.get(key)
        if value is not None:
            if name in into and into[name] != value:
                fail(
                    f"{name} must have one value but got {spelled[path]} = {into[name]!r} and {key} = {value!r}"
                )
            into[name] = value
            spelled[path] = key
        return value

    for suffix, name in _GGUF_OUTER.items():
        # With latent attention, key_length is the width of the cache, which all heads share, and
        # key_length_mla that of a head.
        latent = f"{suffix}_mla"
        take(latent if f"{arch}.{latent}" in values else suffix, outer, name, name)
    for suffix, name in _GGUF_SCALING.items():
        take(suffix, section, name, f"rope_scaling.{name}")
    if isinstance(outer.get("num_attention_heads"), list | tuple):
        # One number per layer, so head_dim cannot be derived and must be given.
        del outer["num_attention_heads"]
    if section.get("factor") == 0:
        del section["factor"]  # llama.cpp writes 0 for "no scaling"
    if arch in _GGUF_SWITCHED and section.get("finetuned") is False:
        fail(f"the config has no RoPE: {spelled['rope_scaling.finetuned']} is False")
    # A drafter of DeepSeek V4 is one of its layers without compressed entries.
    spark = arch == "dflash" and bool(values.get("dflash.hyper_connection.count"))
    for suffix, name in _GGUF_COMPRESSED.items():
        if arch == "deepseek4":
            take(suffix, outer, name, name)
        elif spark or arch == "qwen4exp":
            read.add(f"{arch}.{suffix}")  # qwen4exp: the sizes of blocks of keys
    ratios = values.get("dflash.attention.compress_ratios")
    if spark and isinstance(ratios, list | tuple) and any(ratios):
        fail(f"dflash.attention.compress_ratios must hold 0 only but got {ratios}")
    _scaling(values, arch, section, spelled, take)
    if spark:
        section.clear()
    if arch in _GGUF_UNFACTORED:
        _settle_constants(values, arch, outer, section, spelled)
    sizes = values.get(f"{arch}.rope.dimension_sections")
    read.add(f"{arch}.rope.dimension_sections")
    if sizes is not None and not (arch in GGUF_MAYBE_SECTIONS and _one_coordinate(sizes)):
        # llama.cpp writes four entries; the last is 0 but in HunyuanVL.
        tail = isinstance(sizes, list | tuple) and len(sizes) == 4 and sizes[3] == 0
        outer["mrope_section"] = sizes[:3] if tail else sizes
        spelled["mrope_section"] = f"{arch}.rope.dimension_sections"
    factors = values.get("rope_freqs.weight")
    if factors is not None:
        if section.get("rope_type", "none") != "none":
            fail("rope_freqs.weight must not come with rope.scaling but the metadata has both")
        section = {"rope_type": "given", "inv_freq": _divided(outer, arch, list(factors))}
        spelled["rope_scaling.rope_type"] = spelled["rope_scaling.inv_freq"] = "rope_freqs.weight"
    elif arch in _GGUF_FACTORED:
        fail(
            f"{arch} must come with rope_freqs.weight, which scales its layers with full attention; pass the path of "
            f"the .gguf file, or add the tensor to the metadata"
        )
    outer |= {key: values[key] for key in keys.LAYER_TYPES if key in values}
    if arch == "exaone4" and outer.get("num_hidden_layers") not in (None, 64):
        outer.setdefault("sliding_window", None)  # only the large model has windows
    if arch == "granite_swa":
        take("attention.rope_pattern", outer, "no_rope_layers", "no_rope_layers")
    family = _gguf_family(arch, outer, spark)
    if family is not None and _GGUF_LAYERS.get(arch) == "no_rope_layers":
        outer["no_rope_layer_interval"] = 4
        spelled["no_rope_layer_interval"] = f"constant of llama.cpp for {arch}"
    if section:
        outer["rope_scaling"] = section
    _list_windows(values, arch, outer, spelled, read)
    if arch == "cohere2moe":
        _list_dense(values, arch, outer, spelled)
    local = _local(values, arch, outer, spelled, read)
    if local is not None:
        base = outer.pop("rope_theta", None)
        full = {**section, "rope_theta": base}
        outer.pop("rope_scaling", None)
        sliding = {**(section if arch in _GGUF_LOCAL_SCALED else {}), "rope_theta": local}
        if arch in _GGUF_LOCAL_WIDTHS:
            path = "rope_parameters.sliding_attention"
            for suffix, name in _GGUF_WIDTHS.items():
                read.add(f"{arch}.{suffix}")
                latent = suffix.replace("key_length", "key_length_mla")
                given = latent if f"{arch}.{latent}" in values else suffix
                take(given, sliding, name, f"{path}.{name}")
        if arch == "step35" and isinstance(outer.get("rotary_dim"), int):
            full[keys.OWN_ROTARY_DIM] = outer["rotary_dim"] // 2
            spelled[f"rope_scaling.{keys.OWN_ROTARY_DIM}"] = f"half of {spelled['rotary_dim']}"
        outer["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
        for key in sliding.keys() & section.keys():
            spelled[f"rope_parameters.sliding_attention.{key}"] = spelled[f"rope_scaling.{key}"]
        for key in full:
            spelled[f"rope_parameters.full_attention.{key}"] = spelled.get(
                f"rope_scaling.{key}", spelled.get(key, key)
            )
    unread = {key: value for key, value in values.items() if key not in read}
    name = f"GGUF architecture {arch!r}"
    return Source(outer, family, name, spelled, seen=tuple(values), unread=unread)


def _gguf_family(arch: str, outer: Mapping[str, Any], spark: bool) -> Family | None:
    window = outer.get("sliding_window")
    refused = _GGUF_REFUSED.get(arch)
    if refused is not None and (arch != "baichuan" or outer.get("num_hidden_layers") != 32):
        return Family(False, "", refused=refused)
    if arch == "llama4" and window == 0:
        return None  # llama.cpp leaves out one layer at most, by the number of layers
    layers = _GGUF_LAYERS.get(arch) or (_GGUF_WINDOWED.get(arch) if window else None)
    if "no_rope_layers" in outer:
        layers = "no_rope_layers"
    axes = None
    if arch in GGUF_SECTIONS or (arch in GGUF_MAYBE_SECTIONS and "mrope_section" in outer):
        axes = "sections"
    elif arch in GGUF_INTERLEAVED_SECTIONS:
        axes = "interleaved sections"
    elif arch not in GGUF_NEIGHBOURS | GGUF_HALVES:
        return None
    latent = spark or arch in _GGUF_LATENT
    return Family(
        (spark or arch in GGUF_NEIGHBOURS) and axes is None,
        _GGUF_CODE,
        start="last" if latent else "first",
        axes=axes,
        layers=layers,
        fraction="required" if latent or arch in _GGUF_PART else "optional",
        head_dim="required" if arch in _GGUF_HEAD else "derived",
        base=_GGUF_BASE if arch in _GGUF_CONSTANT else None,
        scales_softmax=arch in _GGUF_TENTH,
    )


def _one_coordinate(sizes: Any) -> bool:
    """Return True for sections without a second coordinate, which llama.cpp does not use."""
    return isinstance(sizes, list | tuple) and 0 in sizes[:2]


def _scaling(
    values: Mapping[str, Any],
    arch: str,
    section: dict[str, Any],
    spelled: dict[str, str],
    take: Any,
) -> None:
    """Translate scaling that GGUF stores differently: an implied type, YaRN's mscale, factor tensors."""
    for tensor, name in _GGUF_TENSORS.items():
        if values.get(tensor) is not None:
            section[name] = list(values[tensor])
            spelled[f"rope_scaling.{name}"] = tensor
            section.setdefault("rope_type", "longrope")
            spelled.setdefault("rope_scaling.rope_type", tensor)
    kind = section.get("rope_type")
    holder: dict[str, Any] = {}
    if arch == "hunyuan_vl" and take("rope.scaling.alpha", holder, "alpha", "rope_scaling.alpha"):
        if kind not in (None, "none"):
            fail(f"{arch}.rope.scaling.alpha must not come with scaling by {kind!r}")
        kind = "dynamic"  # with alpha, a fixed change of the base
        section |= {"rope_type": kind, **holder}
        spelled["rope_scaling.rope_type"] = spelled["rope_scaling.alpha"]
    if kind is None and section.get("factor") is not None:
        section["rope_type"] = "linear"
        spelled["rope_scaling.rope_type"] = f"{arch}.rope.scaling.type (absent)"
    if kind == "longrope" and "attn_factor" in section:
        section["attention_factor"] = section.pop("attn_factor")
        spelled["rope_scaling.attention_factor"] = f"{arch}.rope.scaling.attn_factor"
    if kind == "yarn" and arch == "grok" and "beta_fast" not in section:
        section["beta_fast"] = 8.0
        spelled["rope_scaling.beta_fast"] = "constant of llama.cpp for grok"
    share = take("rope.scaling.yarn_log_multiplier", holder, "mscale_all_dim", "")
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        fail(f"{arch}.rope.scaling.yarn_log_multiplier must be a number but got {share!r}")
    if share is not None and kind == "yarn" and arch in _GGUF_MULTIPLIED:
        key = f"{arch}.rope.scaling.yarn_log_multiplier"
        # DeepSeek's mscale equals mscale_all_dim, so they cancel on the rotated channels; elsewhere mscale is 1.
        section["mscale_all_dim"] = 10 * share if arch in _GGUF_TENTH else share
        section["mscale"] = section["mscale_all_dim"] if arch == "deepseek2" else 1.0
        spelled["rope_scaling.mscale"] = spelled["rope_scaling.mscale_all_dim"] = key


def _settle_constants(
    values: Mapping[str, Any],
    arch: str,
    outer: dict[str, Any],
    section: dict[str, Any],
    spelled: dict[str, str],
) -> None:
    """Refuse keys that constants of llama.cpp's code contradict; drop a width that it ignores."""
    unused = [
        name for name in (*_GGUF_TENSORS, "rope_freqs.weight") if values.get(name) is not None
    ]
    if unused:
        fail(
            f"{arch} must not come with {unused[0]}, which llama.cpp does not use; to rotate as it does, pass the "
            f"metadata without it"
        )
    if arch not in _GGUF_CONSTANT:
        return
    base = outer.get("rope_theta", _GGUF_BASE)
    if base != _GGUF_BASE:
        fail(
            f"{spelled['rope_theta']} must be 10000, the constant of llama.cpp for {arch}, but got {base!r}; for other "
            f"code, make a RopeSpec by hand"
        )
    kind = section.get("rope_type", "none")
    if kind != "none":
        fail(f"{arch} must have no scaling, as llama.cpp ignores it, but got {kind!r}")
    if arch == "deepseek2-ocr":
        outer.pop("rotary_dim", None)  # its files have 0; all channels rotate


def _divided(outer: dict[str, Any], arch: str, factors: list[float]) -> list[float]:
    base = outer.get("rope_theta")
    if base is None:
        fail(f"rope_freqs.weight must come with {arch}.rope.freq_base but the metadata has none")
    if arch == "step35" and isinstance(outer.get("rotary_dim"), int):
        # The first ones, for the half of the channels that rotates.
        factors = factors[: outer["rotary_dim"] // 4]
    return list(given_by_factors(2 * len(factors), base, factors).inv_freq)  # type: ignore[arg-type]


def _list_windows(
    values: Mapping[str, Any],
    arch: str,
    outer: dict[str, Any],
    spelled: dict[str, str],
    read: set[str],
) -> None:
    """Add the type of each layer, by a list or a period in the file or in llama.cpp's code."""
    key = f"{arch}.attention.sliding_window_pattern"
    period, first = _GGUF_PERIODS.get(arch, (None, 0))
    count, pattern = outer.get("num_hidden_layers"), values.get(key, period)
    windows = outer.get("sliding_window", 1) not in (0, None)
    stated = any(name in outer for name in keys.LAYER_TYPES)
    if arch not in _GGUF_PERIODS or not windows or stated or not isinstance(count, int):
        return
    single = isinstance(pattern, int) and not isinstance(pattern, bool) and period is not None
    if not single and not isinstance(pattern, list | tuple):
        return
    read.add(key)
    if count > _MOST_LAYERS:
        fail(f"{spelled['num_hidden_layers']} must be at most {_MOST_LAYERS} but got {count}")
    main = _without_predicting(values, arch, count)
    if isinstance(pattern, int):
        last = 0 if first == 0 else max(pattern, 1) - 1
        pattern = [not pattern or layer % pattern != last for layer in range(main)]
        pattern += [False] * (count - main)
    if len(pattern) < main:
        fail(f"{key} must have an entry for each of {main} layers but has {len(pattern)}")
    outer["num_hidden_layers"] = min(count, len(pattern))
    outer["layer_types"] = [f"{'sliding' if one else 'full'}_attention" for one in pattern[:count]]
    spelled["layer_types"] = key


def _without_predicting(values: Mapping[str, Any], arch: str, count: int) -> int:
    """The number of layers but the last ones, which only predict."""
    more = values.get(f"{arch}.nextn_predict_layers")
    return max(count - more, 0) if isinstance(more, int) and more > 0 else count


def _list_dense(
    values: Mapping[str, Any], arch: str, outer: dict[str, Any], spelled: dict[str, str]
) -> None:
    """Add which layers have no experts: the first; and the last, which only predict, rotate like them."""
    key = f"{arch}.leading_dense_block_count"
    spelled["mlp_layer_types"] = key
    dense, count = values.get(key), values.get(f"{arch}.block_count")
    if isinstance(dense, int) and "layer_types" in outer and isinstance(count, int):
        main = _without_predicting(values, arch, count)
        outer["mlp_layer_types"] = [
            "dense" if layer < dense or layer >= main else "sparse"
            for layer in range(outer["num_hidden_layers"])
        ]


def _local(
    values: Mapping[str, Any],
    arch: str,
    outer: dict[str, Any],
    spelled: dict[str, str],
    read: set[str],
) -> Any:
    """The base of layers with a sliding window; None if all layers share one base."""
    key = f"{arch}.rope.freq_base_swa"
    read.add(key)
    base = values.get(key)
    path = "rope_parameters.sliding_attention.rope_theta"
    if arch in _GGUF_ONE_BASE:
        return None
    if arch == "maple":
        if base is not None:  # only these layers rotate
            outer["rope_theta"], spelled["rope_theta"] = base, key
        return None
    if arch in ("laguna", "plamo3") and not outer.get("sliding_window"):
        return None  # some of their models have no windows
    if arch in _GGUF_COMMON_BASE and base is None:
        spelled[path] = spelled.get("rope_theta", "rope_theta")
        return outer.get("rope_theta")
    if base is not None:
        spelled[path] = key
        return base
    if (
        arch in _GGUF_LOCAL_BASE
        and outer.get("rope_theta") is not None
        and outer.get("sliding_window") != 0
    ):
        spelled[path] = f"constant of llama.cpp for {arch}"
        return _GGUF_BASE
    return None
