"""Build a small model of any model type of transformers, and its inputs.

Sizes are chosen by the name of the setting, as `sizes.json` says: "largest" has the largest value of an integer setting
for patterns of its whole name, the first that matches, null for the default; "filled" the values of settings that are
None by default but that some classes need; "untouched" the settings that do not affect the shape of a model; "inputs"
those of a type whose entry lists none, if its forward has them, and "embedded" those without tokens; "preferred" the
endings of model classes: those with a language head run all other parts. Every part has the same width, 64 channels in
HEADS heads, so that parts fit together. Exceptions for single types are in `models/transformers.json`; see `building`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import math
import re
from types import ModuleType
from typing import Any

import torch

from .building import SEED, made, reweigh
from .libraries import FOLDER, TRANSFORMERS, label
from .runs import Run, Subject

HEADS, HEAD, LAYERS = 4, 16, 2
# First id of special tokens; ordinary tokens have smaller ids.
SPECIAL = 160
LARGEST = 20_000_000  # parameters of a small model
SIZES = json.loads((FOLDER / "sizes.json").read_text("utf-8"))
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
TOKEN = re.compile(r"(^|_)(token_id|token_index|tokenid)$|_token$|_start_id$|_end_id$")


def sized(name: str, value: int, key_heads: int = 2) -> int:
    """A small value for an integer setting, at most the given one."""
    if re.fullmatch(SIZES["key_heads"], name):
        return key_heads if value > 1 else value
    for pattern, largest in SIZES["largest"].items():
        if re.fullmatch(pattern, name):
            return value if largest is None else min(largest, value)
    return value


class Shrinker:
    """Turn the defaults of a configuration class into the arguments of a small configuration.

    Args:
        grouped: whether to have half as many key heads as query heads.
    """

    def __init__(self, grouped: bool = True) -> None:
        self._key_heads = HEADS // 2 if grouped else HEADS
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
        layers = _layers(given)
        fields = {f.name: f.default for f in dataclasses.fields(config)}
        for name, value in given.items():
            derived = type(value) in (int, float) and fields.get(name) is None
            filled = name in SIZES["filled"]
            if name in SIZES["untouched"] or name not in fields or (derived and not filled):
                continue
            if not isinstance(value, PreTrainedConfig):
                if (small := self._value(name, value, layers)) is not value:
                    out[name] = small
                continue
            other = dict(overrides.get(name, {}))
            if "model_type" in other:
                out[name] = CONFIG_MAPPING[other.pop("model_type")](**other)
            else:
                out[name] = {"model_type": value.model_type, **self.arguments(value, other)}
        for name, value in overrides.items():
            if not isinstance(given.get(name), PreTrainedConfig):
                out[name] = value
        rope = out.get("rope_parameters", given.get("rope_parameters"))
        if isinstance(rope, dict):
            keys = getattr(type(config), "ignore_keys_at_rope_validation", None) or ()
            start = {"mrope_section": [16, 24, 24]} if "mrope_section" in keys else {}
            if start or rope:
                out["rope_parameters"] = _rope({**start, **rope}, {**given, **out})
        return out

    def _value(self, name: str, value: Any, layers: list[int]) -> Any:
        if value is None:
            heads = name == "num_key_value_heads"
            return self._key_heads if heads else SIZES["filled"].get(name)
        if type(value) is int:
            if TOKEN.search(name):
                return self.token(value)
            if layers and value == len(layers) and name in LAYER_COUNTS:
                return sum(layers)
            return sized(name, value, self._key_heads) if value > 0 else value
        if isinstance(value, list) and layers and len(value) == len(layers):
            return [each for each, kept in zip(value, layers) if kept]
        if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            if "token" in name:
                return type(value)(self.token(v) for v in value)
            if re.search(r"ind(ex|ice)|layers?$|_layer$", name):
                return sorted({min(v, LAYERS - 1) if v >= 0 else v for v in value})
            return type(value)(sized(name, v) if v > 0 else v for v in value)
        return value


def _layers(given: dict[str, Any]) -> list[int]:
    """1 for each layer to keep, 0 for others; nothing if no number of layers is stated.

    The first layer of each kind is kept (at most four), then others until there are LAYERS.
    """
    count = next((v for n in LAYER_COUNTS if isinstance(v := given.get(n), int)), 0)
    lists = [v for v in given.values() if isinstance(v, list) and len(v) == count]
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists]), i)
    keep = sorted(kinds.values())[:4]
    keep += [i for i in range(count) if i not in keep][: max(0, LAYERS - len(keep))]
    return [int(i in keep) for i in range(count)]


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
        grouped: see `Shrinker`.
    """
    small = config_class(**Shrinker(grouped).arguments(config_class(), overrides))
    for part in (small, *(v for v in vars(small).values() if hasattr(v, "to_dict"))):
        for name, value in vars(part).items():
            if isinstance(value, float) and re.search("dropout|pdrop", name):
                setattr(part, name, 0.0)
    return small


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


def model_class(module: ModuleType, config_class: type[Any]) -> type[Any]:
    """The most complete model class of a modeling file that takes a configuration class.

    Raises:
        LookupError: there is none.
    """
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
        ends = [i for i, end in enumerate(SIZES["preferred"]) if value.__name__.endswith(end)]
        return (ends[0] if ends else len(SIZES["preferred"]), len(value.__name__))

    if not found:
        raise LookupError(f"no model class takes a {config_class.__name__}")
    return min(found, key=rank)


def inputs(called: Any, config: Any, given: dict[str, Any] | None) -> dict[str, Any]:
    """The inputs that an entry lists, or those of a model of tokens or embeddings."""
    if given is None:
        names = inspect.signature(getattr(called, "forward", called)).parameters
        plain = SIZES["inputs" if "input_ids" in names else "embedded"]
        given = {name: text for name, text in plain.items() if name in names}
    found: dict[str, Any] = made(given, torch.Generator().manual_seed(SEED), config)
    return found


def prepare(name: str) -> tuple[Subject, Run]:
    """Build a small model of a type with inputs, and run it once."""
    from transformers import CONFIG_MAPPING

    entry = TRANSFORMERS.small.get(name, {})
    whole = entry.get("whole")
    config_class = CONFIG_MAPPING[whole or name]
    home = TRANSFORMERS.module_name(TRANSFORMERS.models[name])
    module = importlib.import_module(home)
    named = entry.get("model")
    chosen = getattr(module, named) if named else model_class(module, config_class)
    if "stub" in entry:
        setattr(module, entry["stub"], lambda *_: None)
    config = small_config(config_class, entry.get("config", {}), entry.get("grouped", True))
    model = small_model(chosen, config, entry.get("attention", "eager"))
    subject = Subject(TRANSFORMERS, model, {}, entry.get("part", ""), label(home, ""))
    subject.inputs = inputs(subject.called, config, entry.get("inputs"))
    if whole:
        subject.model, subject.part = subject.called, ""
    return subject, subject.run()
