"""Configurations of public models with the expected specs.

The data is in `data/model_configs.json`. Each entry names the repository of the configuration and its
format: ``v4`` for the flat keys that transformers wrote until 2025, ``v5`` for ``rope_parameters``,
``hub`` for custom code in the repository, or the name of another program's format. Keys unrelated to
attention are left out; all keys about RoPE are unchanged, even those without effect. The expected specs
were written from papers, model cards and modeling code, never with `from_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightrope import RopeSpec

Wanted = RopeSpec | Mapping[str, RopeSpec | None]

_DATA = json.loads((Path(__file__).parent / "data" / "model_configs.json").read_text("utf-8"))


@dataclass(frozen=True)
class Model:
    """A configuration, the options for reading it, and the expected spec.

    Attributes:
        wanted: one spec, or one per layer type, None for layers without RoPE.
    """

    origin: str
    form: str
    config: dict[str, Any]
    wanted: Wanted
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        section = self.options.get("section")
        return f"{self.origin}:{section}" if section else self.origin


@dataclass(frozen=True)
class Refused:
    """A configuration from which no spec can be read, and the expected error."""

    origin: str
    config: dict[str, Any]
    why: str


def _wanted(value: dict[str, Any]) -> Wanted:
    if "version" in value:
        return RopeSpec.from_dict(value)
    return {name: each and RopeSpec.from_dict(each) for name, each in value.items()}


MODELS = [Model(**{**each, "wanted": _wanted(each["wanted"])}) for each in _DATA["models"]]
REFUSED = [Refused(**each) for each in _DATA["refused"]]


def _config(name: str) -> dict[str, Any]:
    return next(model.config for model in MODELS if model.name == name)


QWEN2_VL = _config("Qwen/Qwen2-VL-7B-Instruct")
QWEN3_VL = _config("Qwen/Qwen3-VL-8B-Instruct:text_config")
LLAMA4_SCOUT = _config("meta-llama/Llama-4-Scout-17B-16E:text_config")
GEMMA3_LAYERS = ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(26)]


def llama3(factor: float) -> dict[str, Any]:
    """Return the rope section of Llama 3.1, with the given factor."""
    return {
        "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip


def v4(
    model_type: str, hidden: int, heads: int, theta: float | None, **more: Any
) -> dict[str, Any]:
    """Make a flat configuration with the keys that nearly all v4 files have."""
    made: dict[str, Any] = {
        "architectures": ["ForCausalLM"], "hidden_size": hidden, "model_type": model_type,
        "num_attention_heads": heads, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    }  # fmt: skip
    if theta is not None:
        made["rope_theta"] = theta
    if "layer_types" in more:
        made["num_hidden_layers"] = len(more["layer_types"])
    return {"max_position_embeddings": 8192, **made, **more}
