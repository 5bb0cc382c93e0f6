"""Write what the configuration classes of transformers give to src/tightrope/config/families.json.

Run `python -m ci.families` after each new transformers and review the file as a diff. The program calls each
class with single keys and records where their values go: the defaults, the keys that the class drops, renames
or overrules, the lists of layers that it computes. `python -m ci.families --check` changes nothing: it prints the
facts of the file that differ from those of the installed classes, and exits with 1 if there are any.

What no class gives is written by hand, and the program keeps it: the facts of modeling code ("code"), additions to
the facts of a class ("more"), a composite's "outer", and the rows of families that transformers does not have. A type
of model gets a row when a person writes its "code"; the program prints the types that have keys about RoPE but no
row. A part of a composite has the row of its own type. A row with "as" is another name of the type given there.

The rows of other families have the facts of a class by hand, as far as their programs agree on them; without a
default the configuration must give the key.

`tightrope.config.families.Family` explains each fact; there "class" is `made_by`, and "sections" of a row, not of its
"code", is `places`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tightrope.config import keys as spelled

PATH = Path(__file__).resolve().parents[1] / "src" / "tightrope" / "config" / "families.json"

Keys = dict[str, Any]
Row = dict[str, Any]

# The order of the facts of a row.
FACTS = """as class width ignored keys beside also rope known sections nested fill adds untyped spare bases fractions lost
    lists per_layer differs parts flat defaults outer more code""".split()

HIDDEN, HEADS = (*spelled.HIDDEN, "embed_dim"), spelled.HEADS
HEAD_DIM = "head_dim kv_channels attention_head_dim".split()
COUNTS = "num_hidden_layers num_layers n_layer depth".split()
# Those of all layers, and of some.
BASES = (
    *spelled.BASE,
    *"rope_local_base_freq global_rope_theta local_rope_theta swa_rope_theta compress_rope_theta".split(),
)
FRACTIONS = spelled.FRACTION
# Other keys whose defaults matter.
PLAIN = """head_dim kv_channels attention_head_dim global_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim
    max_position_embeddings n_positions max_position num_hidden_layers num_layers n_layer depth sliding_window
    layer_types no_rope_layers no_rope_layer_interval layer_rope_theta mlp_layer_types
    prefix_dense_sliding_window_pattern rope_scaling_layers rope_interleave use_mem_rope position_embedding_type
    position_embeddings_type alibi use_alibi original_max_position_embeddings layers_block_type""".split()
LISTS = "layer_types layers_block_type no_rope_layers layer_rope_theta mlp_layer_types".split()
INTERVALS = """sliding_window_pattern layer_group_size no_rope_layer_interval global_attn_every_n_layers
    full_attention_interval global_attention_interval attn_layer_period sliding_window_interval
    layer_switch""".split()
# Keys by which classes count first layers, though they do not keep them.
DENSE = ("first_k_dense_replace", "n_dense_layers", "num_dense_layers")
ABOUT_ROPE = "rope rotary theta freq interleave scal base partial".split()

# Values that no class has by default, so that they are found again.
BASE, FRACTION, WIDTH, LENGTH = 777.0, 0.375, 496, 4321
LINEAR = {"rope_type": "linear", "factor": 3.25}


# --- one class ------------------------------------------------------------------------------------


class Probe:
    """A configuration class that is called with chosen keys."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.default = self.made()
        self.default.pop("transformers_version", None)

    def made(self, **values: Any) -> Keys:
        """The keys that an object of the class saves; none if the class refuses the values."""
        try:
            keys = self.cls(**copy.deepcopy(values)).to_dict()
        except Exception:  # noqa: BLE001  # each class has errors of its own
            return {}
        return json.loads(json.dumps(keys, default=str))  # type: ignore[no-any-return]

    def first(self, names: Iterable[str]) -> str | None:
        """The first of some keys that the class has."""
        return next((name for name in names if name in self.default), None)

    def moves(self, names: Iterable[str], value: float, **beside: Any) -> dict[str, list[str]]:
        """Key -> the places in the rope section where the class puts its value."""
        made = {name: self.made(**{name: value}, **beside) for name in names}
        found = {
            name: sorted(places(keys.get("rope_parameters") or {}, value))
            for name, keys in made.items()
        }
        return {name: where for name, where in found.items() if where}


def places(section: Mapping[str, Any], wanted: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of a value in a rope section."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from places(value, wanted, f"{path}{key}.")
        elif value == wanted:
            yield f"{path}{key}"


def row_of(probe: Probe, code: Row) -> Row:
    """The facts that one class gives, if the code reads some keys of its own."""
    default = probe.default
    if not default:
        raise RuntimeError(f"{probe.cls.__name__} must have a default for each key")
    facts = widths_of(probe, code.get("width", ())) | rope_of(probe)
    renamed = getattr(probe.cls, "attribute_map", None) or {}
    plain = {*HIDDEN, *HEADS, *PLAIN}
    facts |= {
        "class": probe.cls.__name__,
        "also": {name: own for name, own in renamed.items() if {name, own} & plain},
        "known": known(probe),
        "lists": lists_of(probe),
        "per_layer": per_layer(probe.default),
        "untyped": untyped(probe),
    }
    return {name: value for name, value in facts.items() if value not in (None, [], {}, False)}


def per_layer(default: Keys) -> dict[str, Keys]:
    """Layer type -> the widths of its layers, for classes with configurations of single layers."""
    names = [n for n in ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim") if n in default]
    single = (default.get("per_layer_config") or {}).items()
    kinds = default.get("layer_types") or {}
    return {
        kinds[int(number)] if kinds else "all": {n: inner.get(n, default[n]) for n in names}
        for number, inner in single
    }


def untyped(probe: Probe) -> bool:
    """Say if the class reads the keys of a section but not its rule by the older key "type"."""
    made = probe.made(rope_scaling={"type": "linear", "factor": LINEAR["factor"]})
    section = made.get("rope_parameters") or {}
    where = [path.rpartition("factor")[0] for path in places(section, LINEAR["factor"])]
    return bool(where) and not any(f"{at}rope_type" in places(section, "linear") for at in where)


def known(probe: Probe) -> list[str]:
    """The keys of the class that look like keys about RoPE."""
    rest = probe.default.keys() - {"rope_parameters"}
    found = {key for key in rest if any(word in key for word in ABOUT_ROPE)}
    made = probe.made(rotary_dim=16).get("rope_parameters") or {}
    if made != (probe.default.get("rope_parameters") or {}):  # a part of the number of channels
        found.add("rotary_dim")
    return sorted(found)


def widths_of(probe: Probe, others: Iterable[str]) -> Row:
    """The defaults of plain keys, and the keys that the class overrules or computes."""
    default, width = probe.default, [k for k in map(probe.first, (HIDDEN, HEADS)) if k]
    names = [name for name in PLAIN if not isinstance(default.get(name, []), list)]
    keys = {name: default[name] for name in [*names, *width]}
    keys |= {name: default[name] for name in others if isinstance(default.get(name), int)}
    if len(width) == 2 and isinstance(default[width[0]], int):
        fields = getattr(probe.cls, "__dataclass_fields__", {})
        twice = probe.made(**{width[0]: 2 * default[width[0]]})
        for name in keys.keys() & HEAD_DIM:
            fixed = getattr(fields.get(name), "default", None)
            if isinstance(fixed, int):
                keys[name] = fixed
            elif twice and twice.get(name) != default[name]:
                del keys[name]
    ignored = probe.made(head_dim=WIDTH).get("head_dim") if "head_dim" in default else None
    if ignored not in (None, WIDTH):
        keys.pop("head_dim", None)
    keys = {name: value for name, value in keys.items() if value is not None}
    beside = [k for k in default if k not in keys and any(n in k for n in ("head_dim", *width))]
    return {
        "width": width,
        "ignored": ["head_dim"] if ignored not in (None, WIDTH) else [],
        "keys": keys,
        "beside": beside,
    }


def rope_of(probe: Probe) -> Row:
    """The rope section of a class, and where keys beside it go."""
    default = probe.default
    if "rope_parameters" not in default:
        outer, partly = ([n for n in names if n in default] for names in (BASES, FRACTIONS))
        last = {"rope_theta": outer[-1:], "partial_rotary_factor": partly[-1:]}
        return {
            "bases": {name: [""] for name in outer},
            "fractions": {name: [""] for name in partly},
            "fill": {key: default[name] for key, names in last.items() for name in names},
        }
    rope = default["rope_parameters"] or {}
    facts = {
        "rope": rope,
        "sections": {n: sections_of(probe, n) for n in ("rope_scaling", "rope_parameters")},
    }
    if any(isinstance(value, dict) for value in rope.values()):
        return facts | nested_rope_of(probe, dict(sorted(rope.items())))
    beside = {"rope_parameters": {"rope_type": "default"}} if rope else {}
    bases = probe.moves(BASES, BASE) | probe.moves(BASES, BASE, **beside)
    fractions = probe.moves(FRACTIONS, FRACTION, **beside)
    read = probe.moves(bases, BASE) | probe.moves(fractions, FRACTION)
    return facts | {
        "fill": taken(probe.made(**beside).get("rope_parameters") or rope),
        "bases": bases,
        "fractions": fractions,
        "lost": [key for key in (*bases, *fractions) if key not in read] if rope else [],
    }


def nested_rope_of(probe: Probe, rope: Keys) -> Row:
    """The same facts of a class with a section for each type of layers, some of which take them from a set."""
    made = {
        kind: probe.made(rope_parameters={kind: LINEAR}).get("rope_parameters") or {}
        for kind in rope
    }
    kept = [kind for kind in rope if (made[kind].get(kind) or {}).get("factor")]
    bases = probe.moves(BASES, BASE)
    others = [(kind, other) for kind in rope for other in rope if other != kind]
    return {
        "rope": rope,
        "nested": True,
        "fill": {kind: more for kind in kept if (more := taken(made[kind][kind]))},
        "adds": bool(others)
        and all(made[kind].get(other) == rope[other] for kind, other in others),
        "bases": bases,
        "fractions": probe.moves(FRACTIONS, FRACTION),
        # Bases that count only if sections have none of their own.
        "spare": probe.moves(
            {*BASES} - {*bases}, BASE, rope_parameters=dict.fromkeys(rope, LINEAR)
        ),
    }


def sections_of(probe: Probe, name: str) -> list[str]:
    """The sections of the object that the class makes of one by this name; "" is the only one."""
    rules = [
        LINEAR | {"rope_type": rule, "rope_theta": 1e4} for rule in ("linear", "axial", "default")
    ]
    made = next(filter(None, (probe.made(**{name: rule}) for rule in rules)), {})
    paths = places(made.get("rope_parameters", LINEAR) or {}, LINEAR["factor"])
    return sorted({path.rpartition(".")[0] for path in paths})


def taken(section: Mapping[str, Any]) -> Keys:
    """The keys of a section that no rule owns."""
    return {key: section[key] for key in ("rope_theta", "partial_rotary_factor") if key in section}


# --- lists of layers ------------------------------------------------------------------------------


def lists_of(probe: Probe) -> dict[str, Row]:
    """Key of a list with an entry for each layer -> the rule by which the class fills it in."""
    count = probe.first(COUNTS)
    lists = [key for key in LISTS if isinstance(probe.default.get(key), list)]
    found = {key: listed(probe, key, count) for key in lists if count and probe.default[key]}
    return {key: rule for key, rule in found.items() if rule}


def listed(probe: Probe, key: str, count: str) -> Row | None:
    """The repeated entries of one list, the last if it is another, and the keys that change the list."""
    default = probe.default

    def made(number: int = 60, **values: Any) -> list[Any]:
        got = probe.made(**{count: number}, **values).get(key)
        return got if isinstance(got, list) and len(got) == number else []

    long = made() or default[key]
    rule = rule_of([long, *filter(None, map(made, (37, 61)))])
    if rule is None:
        return None
    without = probe.made(sliding_window=None) if "sliding_window" in default else {}
    if without and without.get(key) != default[key]:
        rule["windows"] = True
    if all(entry == long[0] for entry in long) and "last" not in rule:
        return rule
    for name in INTERVALS:
        others = [made(**{name: number}) for number in (3, 4)]  # one may be the default
        if any(other and other != long and rule_of([other]) for other in others):
            rule["every"] = name
    # Other keys that change the list: with another value than the default, the rule says nothing.
    numbers = {name: value for name, value in default.items() if type(value) is int}
    for name in {**dict.fromkeys(DENSE), **numbers}.keys() - {count, rule.get("every")}:
        other = made(**{name: (numbers.get(name) or 0) + 2})
        if other and other != long:
            rule.setdefault("only", {})[name] = numbers.get(name)
    return rule


def rule_of(lists: list[list[Any]]) -> Row | None:
    """The shortest entries whose repetition gives all the lists, perhaps apart from the last entry."""
    first = lists[0]
    for last in ([], first[-1:]):
        for n in range(1, len(first) // 2 + 1):
            if all(
                each == ((first[:n] * len(each))[: len(each) - len(last)] + last) for each in lists
            ):
                return {"repeat": first[:n]} | ({"last": last[0]} if last else {})
    return None


# --- all classes ----------------------------------------------------------------------------------


def classes() -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Model type -> its class, and composite -> part -> the model type of the part."""
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, str]] = {}
    seen = set()

    def visit(cls: Any, name: str = "") -> None:
        if not isinstance(cls, type) or (cls, name) in seen or cls.__name__ == "AutoConfig":
            return
        seen.add((cls, name))
        own = name or getattr(cls, "model_type", "") or cls.__name__
        found.setdefault(own, cls)
        inner = getattr(cls, "sub_configs_defaults", None) or getattr(cls, "sub_configs", None)
        for key, part in (inner or {}).items():
            part_class = getattr(part, "config_class", part)
            kind = getattr(part, "model_type", None) or getattr(part_class, "model_type", None)
            if kind:
                parts.setdefault(own, {})[key] = kind
            visit(part_class)

    for name in CONFIG_MAPPING:
        visit(CONFIG_MAPPING[name], name)
    return found, parts


def short(version: str) -> str:
    """A version without its last number."""
    return ".".join(version.split(".")[:2])


def bases_of(row: Row) -> dict[str, Any]:
    """The path of each base in the default section -> its value."""
    rope = row.get("rope", {})
    sections = (
        {f"{kind}.": section for kind, section in rope.items()} if row.get("nested") else {"": rope}
    )
    found = {f"{path}rope_theta": (s or {}).get("rope_theta") for path, s in sections.items()}
    return {path: value for path, value in found.items() if value is not None}


def add_differences(facts: Row, old: Row, before: str, now: str) -> None:
    """Note the bases that the classes of two versions give otherwise."""
    earlier, later = bases_of(old), bases_of(facts)
    for path in earlier.keys() & later.keys():
        if before != now and earlier[path] != later[path]:
            known = facts.get("differs", {}).get(path, {})
            versions = {before: earlier[path], **known, now: later[path]}
            facts["differs"] = facts.get("differs", {}) | {path: versions}


def whole_of(whole: Probe, found: Mapping[str, Any], parts: Mapping[str, str]) -> Row:
    """The effect of a composite on its parts: keys of the outer level that go to the text, and other defaults."""
    facts: Row = {}
    if "text_config" in parts:
        text = whole.made(max_position_embeddings=LENGTH).get("text_config") or {}
        if text.get("max_position_embeddings") == LENGTH:
            facts["flat"] = True
    for part, kind in parts.items():
        own = whole.made(**{part: {"model_type": kind}}).get(part) or {}
        usual = Probe(found[kind]).default if kind in found else own
        names = [*PLAIN, *HIDDEN, *HEADS, *BASES, *FRACTIONS, "rope_parameters"]
        other = {key: own[key] for key in names if key in own and own[key] != usual.get(key)}
        if other:
            facts.setdefault("defaults", {})[part] = other
    return facts


def refreshed_rows(file: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Row]:
    """The rows of a file with the facts of the installed classes: those named, or all and all composites."""
    found, parts = classes()
    rows: dict[str, Row] = file["families"]
    made = {}
    for name in {*rows, *parts} if names is None else names:
        old = rows.get(name, {})
        row = dict(old)
        if name in found:
            row = {fact: old[fact] for fact in ("outer", "more", "code", "differs") if fact in old}
            if "code" in old and "refused" not in old["code"]:
                row |= row_of(Probe(found[name]), old["code"])
                add_differences(
                    row, old, short(file["transformers"]), short(transformers.__version__)
                )
            row |= {"parts": parts[name]} if name in parts else {}
            row |= whole_of(Probe(found[name]), found, row.get("parts", {}))
        made[name] = row
    every = {**rows, **made}

    def rotates(name: str, above: tuple[str, ...] = ()) -> bool:
        row, above = every.get(name, {}), (*above, name)
        inner = {*row.get("parts", {}).values(), *row.get("more", {}).get("parts", {}).values()}
        return "code" in row or "as" in row or any(rotates(n, above) for n in inner - {*above})

    # A composite has those of its parts that have facts of code.
    for row in made.values():
        inner = {part: kind for part, kind in row.pop("parts", {}).items() if rotates(kind)}
        row.update({"parts": inner} if inner else {})
    return {name: row for name, row in made.items() if rotates(name)}


# --- the file -------------------------------------------------------------------------------------


def text_of(families: Mapping[str, Row]) -> str:
    """The text of the file: each fact of a row is one line."""
    rows = []
    for name, row in sorted(families.items()):
        lines = [f"{json.dumps(fact)}: {json.dumps(row[fact])}" for fact in FACTS if fact in row]
        rows.append(f"{json.dumps(name)}: {{\n  " + ",\n  ".join(lines) + "\n}")
    version = json.dumps(transformers.__version__)
    return f'{{"transformers": {version}, "families": {{\n' + ",\n".join(rows) + "\n}}\n"


def differences(old: Mapping[str, Row], new: Mapping[str, Row]) -> Iterator[str]:
    """A line for each fact of these rows that differs."""
    for name in sorted({*old, *new}):
        one, other = old.get(name, {}), new.get(name, {})
        for fact in FACTS:
            if one.get(fact) != other.get(fact):
                yield f"{name}: {fact} is {other.get(fact)} but the file has {one.get(fact)}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of classes about the values that they are called with."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(level)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only; change nothing")
    check = parser.parse_args().check
    file = json.loads(PATH.read_text("utf-8"))
    about = {"rope_parameters", *BASES}
    with quiet():
        rows = refreshed_rows(file)
        others = [(name, cls) for name, cls in classes()[0].items() if name not in rows]
        unknown = sorted(name for name, cls in others if about & Probe(cls).default.keys())
    changed = list(differences(file["families"], rows))
    for line in changed:
        print(line)
    print(f"{len(rows)} rows, {len(changed)} facts differ; no row: {', '.join(unknown) or 'none'}")
    if not check:
        PATH.write_text(text_of(rows), "utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
