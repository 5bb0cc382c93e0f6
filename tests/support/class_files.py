"""Files as people have them, and what the classes of transformers make of their keys.

- saved: every key of an object of a class, and then one or two more, most of which any program may have written;
- older: the same without a rope section, as transformers wrote files until 2025;
- short: a model type, the widths of a head and at most a few other keys; all else is a default;
- composite: a model of several parts, whose text says nothing but its type.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from ci.families import COUNTS, PATH, classes, quiet
from tightrope import RopeSpec

FILE: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
ROWS: dict[str, Any] = FILE["families"]
#: The model types whose class has a spec. The code in the repositories of nomic_bert reads more keys than its class.
NAMES = [name for name, row in ROWS.items() if "class" in row and name != "nomic_bert"]
COMPOSITES = [name for name, row in ROWS.items() if "text_config" in row.get("parts", {})]

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SECTION = {"rope_type": "default", "rope_theta": 54321.0}
HEAD_DIM = ("head_dim", "kv_channels")
ADDED: dict[str, dict[str, Any]] = {
    "base": {"rope_theta": 54321.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 8192},
    "llama3": {"rope_scaling": LLAMA3, "max_position_embeddings": 16384},
    "section": {"rope_parameters": SECTION},
    "scaled section": {"rope_parameters": {**SECTION, **YARN}, "max_position_embeddings": 8192},
    "a part, in a section": {"rope_parameters": {**SECTION, "partial_rotary_factor": 0.25}},
    "a base beside a section": {"rope_parameters": SECTION, "rope_theta": 999.0},
    "two sections": {"rope_parameters": SECTION, "rope_scaling": LINEAR},
    "a part": {"partial_rotary_factor": 0.5},
    "a part, as in GPT-NeoX": {"rotary_pct": 0.5},
    "a base, as in GPT-NeoX": {"rotary_emb_base": 77777},
    "a base, as in torchtune": {"rope_base": 77777},
    "a base, as in Conformers": {"rotary_embedding_base": 77777},
    "head_dim": {"head_dim": 32},
}


@functools.cache
def class_of(name: str) -> Any:
    """Return the configuration class of a model type."""
    return classes()[0][name]


def object_of(name: str, keys: dict[str, Any]) -> Any:
    """Return what the class makes of these keys, an object or a file of all its keys; None if it refuses them."""
    with quiet():
        try:
            made = class_of(name)(**copy.deepcopy(keys))
        except Exception:  # noqa: BLE001  # each class refuses in its own way
            return None
    if made.model_type == name:
        return made
    return {**json.loads(json.dumps(made.to_dict(), default=str)), "model_type": name}


def outcome(config: Any) -> Any:
    """Return the specs of a configuration; None if it is refused."""
    try:
        made = RopeSpec.from_config(config)
    except (ValueError, TypeError, NotImplementedError):
        return None
    return made if isinstance(made, RopeSpec) else dict(made)


def _without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


def saved(name: str) -> Iterator[dict[str, Any]]:
    """Yield every key of an object, with those of ADDED."""
    made = object_of(name, {})
    keys = json.loads(json.dumps(made if isinstance(made, dict) else made.to_dict(), default=str))
    yield from _with_added(_without(keys, "model_type"))


def older(name: str) -> Iterator[dict[str, Any]]:
    """Yield the same keys without a rope section, and with a base beside it."""
    keys = next(iter(saved(name)))
    yield from _with_added({**_without(keys, "rope_parameters"), "rope_theta": 10000.0})


def _with_added(keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield keys
    for what, added in ADDED.items():
        rest = _without(keys, "rope_theta", "rope_parameters") if "base," in what else keys
        yield rest | added


def widths(name: str) -> dict[str, int]:
    """Return the widths of a head and the number of layers, which a file must give, as the class has them."""
    row = ROWS[name]
    own = {*row.get("width", ()), *row["code"].get("width", ()), *HEAD_DIM, *COUNTS}
    keys = row.get("keys", {})
    return {key: keys[key] for key in keys if key in own or "head_dim" in key}


def short(name: str) -> Iterator[dict[str, Any]]:
    """Yield the keys of files that leave out most of what the class has."""
    row, given = ROWS[name], dict[str, Any](widths(name))
    if key := row["code"].get("position_type"):
        given[key] = "rotary"
    if key := row["code"].get("switch"):
        given[key] = True
    count = next((key for key in COUNTS if key in given), "num_hidden_layers")
    bases = list(row.get("bases", ()))
    changes: list[dict[str, Any]] = [
        {},
        *({key: 777000.0} for key in bases),
        *({key: 0.5} for key in row.get("fractions", ())),
        *({key: 2 * given[key]} for key in row.get("width", ())[:1] if key in given),
        {"rope_scaling": LINEAR},
        {"rope_scaling": YARN},
        {"rope_scaling": None},
        {"rope_parameters": {**LINEAR, "rope_theta": 5e5}},
        {count: 11},
        {count: 12, "sliding_window_pattern": 3},
        {"sliding_window": None},
        *([] if "head_dim" in row.get("also", ()) else [{"head_dim": None}]),
    ]
    if "head_dim" in given or "head_dim" in row.get("ignored", ()):
        changes.append({"head_dim": 96})
    if bases:
        changes.append({bases[0]: 5e5, "rope_scaling": LINEAR, count: 9})
    for changed in changes:
        yield {**given, **changed}
    # A width that is left out is asked for, or is the class's.
    yield from (_without(given, key) for key in given if key != count)


def composite(name: str) -> Iterator[dict[str, Any]]:
    """Yield the keys of a model of several parts whose text says its type, the number of its layers or its base."""
    for keys in ({}, {"num_hidden_layers": 7}, {"rope_theta": 777000.0}, {"rope_scaling": LINEAR}):
        yield {"text_config": {"model_type": ROWS[name]["parts"]["text_config"], **keys}}


#: Style of files -> the model types that have some, and their keys.
STYLES: dict[str, tuple[list[str], Callable[[str], Iterator[dict[str, Any]]]]] = {
    "saved": (NAMES, saved),
    "older": (NAMES, older),
    "short": (NAMES, short),
    "composite": (COMPOSITES, composite),
}


def compared(name: str, style: str) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """Yield files that the class of a model type takes, with their specs and those of what the class makes of them."""
    for keys in STYLES[style][1](name):
        made = object_of(name, keys)
        if made is not None:
            yield keys, outcome({**keys, "model_type": name}), outcome(made)
