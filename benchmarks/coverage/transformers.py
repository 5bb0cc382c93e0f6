"""Build a small model of any model type of transformers, and its inputs.

Sizes are chosen by the name of the setting. Every part has the same width, WIDTH channels in HEADS
heads, so that parts fit together. Exceptions for single types are in `transformers.json`; see `building`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import math
import re
from types import ModuleType
from typing import Any

import torch

from .building import reweigh
from .catalogue import TRANSFORMERS, catalogued, label, table
from .comparing import Run, Subject, part_of
from .inputs import SPECIAL, WIDTH, Maker

HEADS = 4
HEAD = WIDTH // HEADS
LAYERS = 2
VOCABULARY = 256

KEY_HEADS = (
    r".*(num_key_value_heads|num_key_value_attention_heads|kv_n?_?heads?|num_kv_heads|n_head_kv"
    r"|key_value_heads)(_per_layer)?|num_query_groups"
)
GROUPED = re.compile(KEY_HEADS)
# The first pattern that matches an integer setting's whole name gives its largest value; None keeps the
# default.
SIZES: tuple[tuple[str, int | None], ...] = (
    (r".*(max|min)_(pixels|duration|length).*|num_feat_extract_layers|pooling_kernel_size", None),
    (KEY_HEADS, 2),
    (r".*_heads|(num_)?((en|de)coder_)?(attention_)?(n_)?heads?", HEADS),
    (r"(.*_)?(head_dim|head_size|kv_channels|d_kv|attention_key_hidden_size)", HEAD),
    (r"rotary_dim", HEAD // 2),
    (r"q_lora_rank|o_lora_rank", 24),
    (r"kv_lora_rank", 32),
    (r"(.*_)?(layers|n_layer|depth|num_blocks)", LAYERS),
    (r"(.*_)?vocab(ulary)?_size.*", VOCABULARY),
    (r"(.*_)?(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)", 4),
    (
        r"(.*_)?(num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts|moe_top_k)",
        2,
    ),
    (r"n_group|topk_group|n_groups|num_group|num_expert_group", 1),
    (r"mm_tokens_per_image", 4),
    (r"upsample_groups|lru_width|adapter_(input_size|in_dim|out_dim)", WIDTH),
    (r"num_filters|n_filters", 4),
    (r"first_k_dense_replace|.*num_dense_layers", 1),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff|inner_dim|mlp_dim).*", 48),
    (
        r"(.*_)?(dim|hidden_size|d_model|n_embd|(embed|embedding|projection)_size|hidden_channels|width).*",
        WIDTH,
    ),
    (r"(.*_)?(image_size|img_size)", 32),
    (r"(.*_)?(patch_size|spatial_patch_size)", 8),
    (r"(.*_)?max_position_embeddings.*|n_positions|max_seq_len|seq_length", 128),
    (r"sliding_window|attention_window.*|local_attention", 8),
    (r"(.*_)?num_codebooks|n_codebooks", 2),
    (r"(.*_)?codebook_size|audio_vocab.*", VOCABULARY),
    (r"(.*_)?(num_mel_bins|n_mels|mel_bins|feature_size)", 16),
)
PATTERNS = [(re.compile(pattern), value) for pattern, value in SIZES]


def sized(name: str, value: int) -> int:
    """A small value for an integer setting, at most the given one."""
    for pattern, small in PATTERNS:
        if pattern.fullmatch(name):
            return value if small is None else min(small, value) if value > 0 else value
    return value


class Shrinker:
    """Turn the defaults of a configuration class into the arguments of a small configuration."""

    def __init__(self, grouped: bool = True) -> None:
        self._grouped = grouped
        self._special: dict[int, int] = {}

    def token(self, value: int) -> int:
        """The id of a special token in the small vocabulary; equal ids stay equal."""
        if value < 0:
            return value
        return self._special.setdefault(value, SPECIAL + len(self._special))

    def arguments(self, config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a small configuration of the same class."""
        from transformers import CONFIG_MAPPING, PreTrainedConfig

        given = {k: v for k, v in vars(config).items() if not k.startswith("_")}
        out: dict[str, Any] = {}
        layers = self._layers(given)
        fields = {f.name: f.default for f in dataclasses.fields(config)}
        for name, value in given.items():
            derived = type(value) in (int, float) and fields.get(name) is None
            if name in UNTOUCHED or name not in fields or (derived and name not in FILLED):
                continue
            if isinstance(value, PreTrainedConfig):
                if "model_type" in (other := dict(overrides.get(name, {}))):
                    out[name] = CONFIG_MAPPING[other.pop("model_type")](**other)
                    continue
                small = self.arguments(value, overrides.get(name, {}))
                out[name] = {"model_type": value.model_type, **small}
            elif (small := self._value(name, value, layers)) is not value:
                out[name] = small
        for name, value in overrides.items():
            if not isinstance(given.get(name), PreTrainedConfig):
                out[name] = value
        self._rope(config, given, out)
        return out

    def _layers(self, given: dict[str, Any]) -> tuple[int, list[int]] | None:
        """The number of layers and the indices of those to keep; None if no number is stated.

        The first layer of each kind is kept (at most four), then others until there are LAYERS.
        """
        counts = [v for n in LAYER_COUNTS if isinstance(v := given.get(n), int)]
        if not counts:
            return None
        count = counts[0]
        lists = [v for v in given.values() if isinstance(v, list) and len(v) == count]
        kinds: dict[str, int] = {}
        for i in range(count):
            kinds.setdefault(repr([v[i] for v in lists]), i)
        keep = sorted(kinds.values())
        if len(keep) > 4:
            keep = keep[:4]
        for i in range(count):
            if len(keep) < min(LAYERS, count) and i not in keep:
                keep.append(i)
        return count, sorted(keep)

    def _value(self, name: str, value: Any, layers: tuple[int, list[int]] | None) -> Any:
        if value is None:
            filled = FILLED.get(name)
            return HEADS if name == "num_key_value_heads" and not self._grouped else filled
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            if re.search(r"(^|_)(token_id|token_index|tokenid)$|_token$", name) or name.endswith(
                ("_start_id", "_end_id")
            ):
                return self.token(value)
            if layers and value == layers[0] and name in LAYER_COUNTS:
                return len(layers[1])
            small = sized(name, value)
            return HEADS if small == 2 and GROUPED.fullmatch(name) and not self._grouped else small
        if isinstance(value, list) and layers and len(value) == layers[0]:
            return [value[i] for i in layers[1]]
        if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            if re.search(r"token", name):
                return type(value)(self.token(v) for v in value)
            if re.search(r"ind(ex|ice)|layers?$|_layer$", name):
                return sorted({min(v, LAYERS - 1) if v >= 0 else v for v in value})
            return type(value)(sized(name, v) for v in value)
        return value

    def _rope(self, config: Any, given: dict[str, Any], out: dict[str, Any]) -> None:
        rope = out.get("rope_parameters", given.get("rope_parameters"))
        if isinstance(rope, dict):
            keys = getattr(type(config), "ignore_keys_at_rope_validation", None) or ()
            start = {"mrope_section": MROPE} if "mrope_section" in keys else {}
            if start or rope:
                out["rope_parameters"] = _rope({**start, **rope}, {**given, **out})


# Settings that are None by default but that some classes need.
FILLED = {
    "head_dim": HEAD,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "top_k_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "sliding_window": 8,
}
MROPE = [16, 24, 24]
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")

# Settings that are derived from other settings or do not affect the shape of a model.
UNTOUCHED = frozenset(
    {
        "transformers_version",
        "architectures",
        "id2label",
        "label2id",
        "problem_type",
        "dtype",
        "return_dict",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "name_or_path",
        "torch_dtype",
        "num_labels",
        "output_attentions",
        "gradient_checkpointing",
    }
)


def _rope(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(v, dict) for v in rope.values()):
        start = {k: v for k, v in rope.items() if not isinstance(v, dict)}
        return {k: _rope({**start, **v}, config) for k, v in rope.items() if isinstance(v, dict)}
    small = dict(rope)
    head = config.get("qk_rope_head_dim") or config.get("head_dim") or HEAD
    pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if key in small:
            small[key] = list(small[key][:pairs])
    if small.get("mrope_section"):
        small["mrope_section"] = sections(small["mrope_section"], pairs)
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = 64
    return small


def sections(old: list[int], pairs: int) -> list[int]:
    """Scale sections so that they sum to `pairs`, none empty, in about the old proportions.

    >>> sections([16, 24, 24], 8)
    [2, 3, 3]
    """
    new = [max(1, math.floor(v * pairs / sum(old))) for v in old]
    while sum(new) < pairs:
        short = [v * pairs / sum(old) - n for v, n in zip(old, new)]
        new[short.index(max(short))] += 1
    while sum(new) > pairs:
        new[new.index(max(new))] -= 1
    return new


def small_config(config_class: type[Any], overrides: dict[str, Any], grouped: bool = True) -> Any:
    """A small configuration of a class, without dropout.

    Args:
        overrides: settings that replace the small ones, nested for the parts of a configuration.
        grouped: whether to have half as many key heads as query heads, which some families do not
            support.
    """
    arguments = Shrinker(grouped).arguments(config_class(), overrides)
    small = config_class(**arguments)
    for part in (small, *(v for v in vars(small).values() if hasattr(v, "to_dict"))):
        for name, value in vars(part).items():
            if isinstance(value, float) and re.search("dropout|pdrop", name):
                setattr(part, name, 0.0)
    return small


LARGEST = 20_000_000  # parameters of a small model


def small_model(model_class: type[Any], config: Any, attention: str) -> Any:
    """A float32 model in eval mode, with random weights that all affect the output.

    Raises:
        ValueError: the model has too many parameters.
    """

    def build() -> Any:
        # Classes of transformers that are parts of models, not models, have no `_from_config`.
        if hasattr(model_class, "_from_config"):
            return model_class._from_config(config, attn_implementation=attention)
        config._attn_implementation = attention
        return model_class(config)

    size = 0
    with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
        size = sum(p.numel() for p in build().parameters())
    if size > LARGEST:
        raise ValueError(f"the small configuration still has {size:,} parameters")
    torch.manual_seed(0)
    model = build().float().eval()
    reweigh(model)
    return model


# Endings of model classes, the preferred first: those with a language head run all other parts.
PREFERRED = (
    "ForConditionalGeneration",
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForCTC",
    "ForRNNT",
    "ForTDT",
    "Model",
)


def model_classes(module: ModuleType, config_class: type[Any]) -> list[type[Any]]:
    """The model classes of a modeling file that take a configuration class, the most complete first."""
    from transformers import PreTrainedModel

    found = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and not name.endswith("PreTrainedModel")
        and getattr(value, "config_class", None) is config_class
    ]

    def rank(value: type[Any]) -> tuple[int, int]:
        ends = [i for i, end in enumerate(PREFERRED) if value.__name__.endswith(end)]
        return (ends[0] if ends else len(PREFERRED), len(value.__name__))

    return sorted(found, key=rank)


def prepare(name: str) -> tuple[Subject, Run]:
    """Build a small model of a type with inputs, and run it once."""
    from transformers import CONFIG_MAPPING

    entry = table(TRANSFORMERS).get(name, {})
    whole, part = entry.get("whole", ""), entry.get("part", "")
    config_class = CONFIG_MAPPING[whole or name]
    home = TRANSFORMERS.module_name(catalogued(TRANSFORMERS)[name])
    module = importlib.import_module(home)
    classes = model_classes(module, config_class)
    if "model" in entry:
        classes = [getattr(module, entry["model"])]
    if not classes:
        raise LookupError(f"no model class takes a {config_class.__name__}")
    if "stub" in entry:
        setattr(module, entry["stub"], lambda *_: None)
    failure: Exception | None = None
    for model_class, grouped in itertools.product(classes[:3], (True, False)):
        try:
            config = small_config(config_class, entry.get("config", {}), grouped)
            model = small_model(model_class, config, entry.get("attention", "eager"))
            inputs = Maker(model, config, entry)()
            if whole:
                model, part = part_of(model, part), ""
            subject = Subject(TRANSFORMERS, model, inputs, part, own=label(home, ""))
            return subject, subject.run()
        except Exception as error:  # noqa: BLE001 - the next class may work
            if model_class is classes[0]:
                failure = error
    raise failure  # type: ignore[misc]
