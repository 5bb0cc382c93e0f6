"""Configurations of public models with the expected specs.

The data is in `data/model_configs.json`. Each entry names the repository of the configuration and its
format: ``v4`` for the flat keys that transformers wrote until 2025, ``v5`` for ``rope_parameters``,
``hub`` for custom code in the repository, or the name of another program's format. Keys unrelated to
attention are left out; all keys about RoPE are unchanged, even those without effect. The expected specs
were written from papers, model cards and modeling code, never with `from_config`.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
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


QWEN3_VL = _config("Qwen/Qwen3-VL-8B-Instruct:text_config")
LLAMA4_SCOUT = _config("meta-llama/Llama-4-Scout-17B-16E:text_config")


def llama3(factor: float) -> dict[str, Any]:
    """Return the rope section of Llama 3.1, with the given factor."""
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def v4(
    model_type: str, hidden: int, heads: int, theta: float | None, **more: Any
) -> dict[str, Any]:
    """Make a flat configuration with the keys that nearly all v4 files have."""
    made: dict[str, Any] = {
        "architectures": ["ForCausalLM"],
        "hidden_size": hidden,
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if theta is not None:
        made["rope_theta"] = theta
    if "layer_types" in more:
        made["num_hidden_layers"] = len(more["layer_types"])
    return {"max_position_embeddings": 8192, **made, **more}


# Values that a configuration may hold but programs do not expect.
ODD: list[Any] = [
    *(None, 0, -1, 1, 2, 3, -0.0, 1.5, 1e308, -1e308, 10**30, 2**63, 10**6, 65537),
    *(float("nan"), float("inf"), True, False, [], [1], [[1]], [None], {}, {"a": 1}),
    *("", "x", "1e4", "rope", "yarn", "llama3", "dynamic", "longrope", "mrope", "default"),
]


TELLING = ("rope", "rot", "head", "hidden", "max_pos", "layer", "factor", "model_type", "section")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path, as keys and indices, of each value; lists only up to their fifth item."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value[:5]))
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def damaged(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy of a configuration with one to three odd values or missing keys."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice((1, 1, 2, 3))):
        there = list(places(config))
        if not there:
            break
        telling = [path for path in there if any(word in str(path) for word in TELLING)]
        *above, last = rng.choice(telling if telling and rng.random() < 0.8 else there)
        holder: Any = config
        for key in above:
            holder = holder[key]
        if rng.random() < 0.15:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(rng.choice(ODD))
    return config
