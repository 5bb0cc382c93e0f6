"""Write what the configuration classes of transformers give to src/tightrope/config/families.json.

Run `python -m ci.families` after each new transformers and review the file as a diff. The program calls each
class with single keys and records where their values go: the defaults, the keys that the class drops, renames
or overrules, the lists of layers that it computes. `python -m ci.families --check` changes nothing: it prints the
facts of the file that differ from those of the installed classes, and exits with 1 if there are any.

What no class gives is written by hand, and the program keeps it: the facts of modeling code ("code"), additions to
the facts of a class ("more"), bases that differ between versions ("differs"), and the rows of families that
transformers does not have. A type of model gets a row when a person writes its "code"; the program prints the
types that have keys about RoPE but no row. A part of a composite has the row of its own type. A row with "as" is
another name of the type given there.

The rows of other families have the facts of a class by hand, as far as its programs agree on them; without a
default the configuration must give the key.

`tightrope.config.families.Family` explains each fact; there "class" is `made_by`, and "sections" of a row, not of its
"code", is `places`. A composite's "outer" is by hand, too.
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
from dataclasses import dataclass, field
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
WIDTHS = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
ABOUT_ROPE = "rope rotary theta freq interleave scal base partial".split()

# Values that no class has by default, so that they are found again.
BASE, FRACTION, FACTOR, WIDTH, LENGTH = 777.0, 0.375, 3.25, 496, 4321
DEFAULT_SECTION = {"rope_type": "default"}
LINEAR = {"rope_type": "linear", "factor": FACTOR}


# --- one class ------------------------------------------------------------------------------------


@dataclass
class Probe:
    """A configuration class that is called with chosen keys."""

    cls: Any
    default: Keys = field(init=False)

    def __post_init__(self) -> None:
        self.default = self.made()
        self.default.pop("transformers_version", None)

    def made(self, **values: Any) -> Keys:
        """The keys that an object of the class saves; none if the class refuses the values."""
        try:
            keys = self.cls(**copy.deepcopy(values)).to_dict()
        except Exception:  # noqa: BLE001  # each class has errors of its own
            return {}
        return json.loads(json.dumps(keys, default=str))  # type: ignore[no-any-return]

    def section(self, **values: Any) -> Keys:
        """The rope section of such an object."""
        return self.made(**values).get("rope_parameters") or {}

    def first(self, names: Iterable[str]) -> str | None:
        """The first of some keys that the class has."""
        return next((name for name in names if name in self.default), None)


def places(section: Mapping[str, Any], wanted: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of a value in a rope section."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from places(value, wanted, f"{path}{key}.")
        elif value == wanted:
            yield f"{path}{key}"


def moves(probe: Probe, names: Iterable[str], value: float, **beside: Any) -> dict[str, list[str]]:
    """Key -> the places in the rope section where the class puts its value."""
    found = {
        name: sorted(places(probe.section(**{name: value}, **beside), value)) for name in names
    }
    return {name: where for name, where in found.items() if where}


def row_of(cls: Any) -> Row:
    """The facts that one class gives."""
    probe = Probe(cls)
    if not probe.default:
        raise RuntimeError(f"{cls.__name__} must have a default for each key")
    rope = rope_of if "rope_parameters" in probe.default else outer_of
    facts = widths_of(probe) | rope(probe)
    facts |= {
        "class": cls.__name__,
        "also": also(probe),
        "known": known(probe),
        "lists": lists_of(probe),
        "per_layer": per_layer(probe),
    }
    return {name: value for name, value in facts.items() if value not in (None, [], {}, False)}


# --- widths and other plain keys ------------------------------------------------------------------


def widths_of(probe: Probe) -> Row:
    """The defaults of plain keys, and the keys that the class overrules."""
    default, width = probe.default, [k for k in map(probe.first, (HIDDEN, HEADS)) if k]
    names = [name for name in PLAIN if not isinstance(default.get(name, []), list)]
    keys = {name: default[name] for name in [*names, *width]} | constants(probe, width)
    for name in derived(probe, width):
        del keys[name]
    ignored = "head_dim" in default and probe.made(head_dim=WIDTH).get("head_dim") not in (
        WIDTH,
        None,
    )
    if ignored:
        keys.pop("head_dim", None)
    keys = {name: value for name, value in keys.items() if value is not None}
    beside = [k for k in default if k not in keys and any(n in k for n in ("head_dim", *width))]
    return {
        "width": width,
        "ignored": ["head_dim"] if ignored else [],
        "keys": keys,
        "beside": beside,
    }


def constants(probe: Probe, width: list[str]) -> Keys:
    """Widths of a head that are fields of the class with a number as default."""
    fields = getattr(probe.cls, "__dataclass_fields__", {}) if divided(probe, width) else {}
    found = {name: fields[name].default for name in HEAD_DIM if name in fields}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int) and name in probe.default
    }


def derived(probe: Probe, width: list[str]) -> list[str]:
    """Widths of a head that the class computes from the hidden size."""
    if not divided(probe, width):
        return []
    twice, fixed = probe.made(**{width[0]: 2 * probe.default[width[0]]}), constants(probe, width)
    return [
        name
        for name in HEAD_DIM
        if name in probe.default
        and name not in fixed
        and (probe.default[name] is None or (twice and twice.get(name) != probe.default[name]))
    ]


def divided(probe: Probe, width: list[str]) -> bool:
    """Say if the class has a hidden size and a number of heads."""
    return len(width) == 2 and isinstance(probe.default[width[0]], int)


def also(probe: Probe) -> dict[str, str]:
    """Key of the class -> the other name by which it reads the key."""
    plain = {*HIDDEN, *HEADS, *PLAIN}
    renamed = getattr(probe.cls, "attribute_map", None) or {}
    return {name: own for name, own in renamed.items() if name in plain or own in plain}


def known(probe: Probe) -> list[str]:
    """The keys of the class that look like keys about RoPE."""
    found = {
        key
        for key in probe.default
        if key != "rope_parameters" and any(word in key for word in ABOUT_ROPE)
    }
    if probe.section(rotary_dim=16) != probe.section():  # it makes a part of the number of channels
        found.add("rotary_dim")
    return sorted(found)


def per_layer(probe: Probe) -> dict[str, Keys]:
    """Layer type -> the widths of its layers, for classes with configurations of single layers."""
    default, found = probe.default, dict[str, Keys]()
    kinds = default.get("layer_types")
    for number, inner in (default.get("per_layer_config") or {}).items():
        kind = kinds[int(number)] if kinds else "all"
        found[kind] = {name: inner.get(name, default[name]) for name in WIDTHS if name in default}
    return found


# --- the rope section -----------------------------------------------------------------------------


def rope_of(probe: Probe) -> Row:
    """The effect of a class with a rope section on it and on the keys beside it."""
    rope = probe.default["rope_parameters"] or {}
    nested = any(isinstance(value, dict) for value in rope.values())
    rope = dict(sorted(rope.items())) if nested else rope  # some classes take them from a set
    flat = bool(rope) and not nested
    beside = {"rope_parameters": DEFAULT_SECTION} if flat else {}
    bases = moves(probe, BASES, BASE) | moves(probe, BASES, BASE, **beside)
    fractions = moves(probe, FRACTIONS, FRACTION, **beside)
    read = moves(probe, bases, BASE) | moves(probe, fractions, FRACTION)
    return {
        "rope": rope,
        "sections": sections_of(probe, rope) if not nested else inner_sections(probe, rope),
        "nested": nested,
        "fill": filled(probe, rope) if nested else taken(probe.section(**beside) or rope),
        "adds": nested and adds(probe, rope),
        "untyped": untyped(probe),
        "spare": spare(probe, rope, bases) if nested else {},
        "bases": bases,
        "fractions": fractions,
        "lost": [key for key in (*bases, *fractions) if key not in read] if flat else [],
    }


def taken(section: Mapping[str, Any]) -> Keys:
    """The keys of a section that no rule owns."""
    return {key: section[key] for key in ("rope_theta", "partial_rotary_factor") if key in section}


def filled(probe: Probe, rope: Mapping[str, Any]) -> dict[str, Keys]:
    """Layer type -> what the class adds to its section if that only names a rule."""
    found = {}
    for kind in rope:
        own = probe.section(rope_parameters={kind: LINEAR}).get(kind)
        if isinstance(own, dict) and own.get("factor") == FACTOR:
            found[kind] = taken(own)
    return {kind: more for kind, more in found.items() if more}


def adds(probe: Probe, rope: Mapping[str, Any]) -> bool:
    """Say if the class adds the default sections of the layer types that a configuration leaves out."""
    for kind in rope:
        made = probe.section(rope_parameters={kind: LINEAR})
        if any(made.get(other) != rope[other] for other in rope if other != kind):
            return False
    return len(rope) > 1


def untyped(probe: Probe) -> bool:
    """Say if the class reads the keys of a section but not its rule by the older key "type"."""
    made = probe.section(rope_scaling={"type": "linear", "factor": FACTOR})
    where = [path.rpartition("factor")[0] for path in places(made, FACTOR)]
    return bool(where) and not any(f"{path}rope_type" in places(made, "linear") for path in where)


def spare(probe: Probe, rope: Mapping[str, Any], bases: Iterable[str]) -> dict[str, list[str]]:
    """Key of a base -> the places where the class puts its value only if sections have no base of their own."""
    return moves(probe, {*BASES} - {*bases}, BASE, rope_parameters=dict.fromkeys(rope, LINEAR))


def sections_of(probe: Probe, rope: Mapping[str, Any]) -> dict[str, list[str]]:
    """Key of a rope section -> the sections of the object that the class makes of it; "" is the only one."""
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        made = next(
            (
                got
                for kind in ("linear", "axial", "default")
                if (
                    got := probe.made(
                        **{name: {"rope_type": kind, "factor": FACTOR, "rope_theta": 1e4}}
                    )
                )
            ),
            {"rope_parameters": {"factor": FACTOR}},
        )
        paths = places(made.get("rope_parameters") or {}, FACTOR)
        found[name] = sorted({path.rpartition(".")[0] for path in paths})
    return found


def inner_sections(probe: Probe, rope: Mapping[str, Any]) -> dict[str, list[str]]:
    """The same for a class with a section for each layer type; only "" if a flat section changes the bases."""
    made = probe.section(rope_scaling=LINEAR)
    for kind, section in rope.items():
        if made and section:
            base = section.get("rope_theta")
            if (made.get(kind) or {}).get("rope_theta", base) != base:
                return {"rope_scaling": [""], "rope_parameters": [""]}
    return sections_of(probe, rope)


def outer_of(probe: Probe) -> Row:
    """The keys for the base and the part of a class without a rope section."""
    bases = [name for name in BASES if name in probe.default]
    fractions = [name for name in FRACTIONS if name in probe.default]
    fill = [("rope_theta", probe.default[name]) for name in bases[-1:]]
    fill += [("partial_rotary_factor", probe.default[name]) for name in fractions[-1:]]
    return {
        "bases": {name: [""] for name in bases},
        "fractions": {name: [""] for name in fractions},
        "fill": dict(fill),
    }


# --- lists of layers ------------------------------------------------------------------------------


def lists_of(probe: Probe) -> dict[str, Row]:
    """Key of a list with an entry for each layer -> the rule by which the class fills it in."""
    count = probe.first(COUNTS)
    found = {key: listed(probe, key, count) for key in LISTS} if count else {}
    return {key: rule for key, rule in found.items() if rule}


def listed(probe: Probe, key: str, count: str) -> Row | None:
    """The repeated entries of one list, the last if it is another, and the key of the interval."""

    def made(**values: Any) -> list[Any]:
        got = probe.made(**values).get(key)
        return got if isinstance(got, list) else []

    default = probe.default.get(key)
    if not isinstance(default, list) or not default:
        return None
    long = made(**{count: 60})
    long = long if len(long) == 60 else default
    rule = pattern(long)
    for number in (37, 61):
        other = made(**{count: number})
        if rule and len(other) == number:
            rule = with_last(rule, other)
    if rule is None:
        return None
    if "sliding_window" in probe.default and made(sliding_window=None) != default:
        without = probe.made(sliding_window=None)
        if without and without.get(key) != default:
            rule["windows"] = True
    if len({json.dumps(entry) for entry in long}) == 1 and "last" not in rule:
        return rule
    for name in INTERVALS:
        others = [made(**{count: 60, name: number}) for number in (3, 4)]  # one may be the default
        if any(other and other != long and pattern(other) for other in others):
            rule["every"] = name
    # Other keys that change the list: with another value than the default, the rule says nothing.
    numbers = {key: value for key, value in probe.default.items() if type(value) is int}
    for name, value in {**dict.fromkeys(DENSE), **numbers}.items():
        other = made(**{count: 60, name: (value or 0) + 2})
        if name not in (count, rule.get("every")) and len(other) == 60 and other != long:
            rule.setdefault("only", {})[name] = value
    return rule


def pattern(entries: list[Any]) -> Row | None:
    """A list as entries that repeat, from the shortest period; a last entry outside the period is apart."""
    for last in (False, True):
        body = entries[:-1] if last else entries
        for n in range(1, len(body) // 2 + 1):
            if all(body[i] == body[i % n] for i in range(len(body))):
                return {"repeat": body[:n]} | ({"last": entries[-1]} if last else {})
    return None


def with_last(rule: Row, entries: list[Any]) -> Row | None:
    """The rule if it gives a list, perhaps by a last entry that it lacked; None if it does not."""
    repeat = rule["repeat"]
    made = [repeat[i % len(repeat)] for i in range(len(entries))]
    if "last" not in rule and made[:-1] == entries[:-1] and made != entries:
        rule = rule | {"last": entries[-1]}
    made[-1] = rule.get("last", made[-1])
    return rule if made == entries else None


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


def refreshed(old: Row, cls: Any, version: str) -> Row:
    """A row with the facts of its class, and with what the file has by hand."""
    facts, default = row_of(cls), Probe(cls).default
    own = {key: default.get(key) for key in old["code"].get("width", ()) if key not in PLAIN}
    facts.setdefault("keys", {}).update({k: v for k, v in own.items() if isinstance(v, int)})
    if "differs" in old:
        facts["differs"] = old["differs"]
    now = short(transformers.__version__)
    before, after = bases_of(old), bases_of(facts)
    for path in before.keys() & after.keys() if short(version) != now else ():
        if before[path] != after[path]:
            earlier = facts.get("differs", {}).get(path, {})
            facts["differs"] = facts.get("differs", {}) | {
                path: {short(version): before[path], **earlier, now: after[path]}
            }
    return facts


def whole_of(found: Mapping[str, Any], name: str, parts: Mapping[str, str]) -> Row:
    """The effect of a composite on its parts: defaults of its own, and keys of the outer level that go to the text."""
    whole = Probe(found[name])
    made = whole.made(max_position_embeddings=LENGTH) if "text_config" in parts else {}
    flat = (made.get("text_config") or {}).get("max_position_embeddings") == LENGTH
    facts = {"flat": flat, "defaults": part_defaults(whole, found, parts)}
    return {fact: value for fact, value in facts.items() if value}


def part_defaults(
    whole: Probe, found: Mapping[str, Any], parts: Mapping[str, str]
) -> dict[str, Keys]:
    """Key of a part -> the keys that the class of a composite sets in it, where that makes a difference."""
    made = {}
    for part, kind in parts.items():
        if kind not in found:
            continue
        alone = Probe(found[kind])

        def inner(**keys: Any) -> Keys:
            return whole.made(**{part: {"model_type": kind, **keys}}).get(part) or {}  # noqa: B023  # called here

        own, usual = inner(), alone.default
        names = [*PLAIN, *HIDDEN, *HEADS, *BASES, *FRACTIONS, "rope_parameters"]
        other = {key for key in names if key in own and own[key] != usual.get(key)}
        wider = inner(**{key: 2 * own[key] for key in HIDDEN if isinstance(own.get(key), int)})
        if other & {*HIDDEN, *HEADS}:  # a width that does not follow the hidden size
            other |= {key for key in HEAD_DIM if own.get(key) and own[key] == wider.get(key)}
        # A base beside a section that the class sets is lost.
        base = next(places(alone.section(rope_theta=BASE), BASE), None)
        kept = list(places(inner(rope_theta=BASE).get("rope_parameters") or {}, BASE))
        if base is not None and own and not kept:
            other.add("rope_parameters")
        if other:
            made[part] = {key: own[key] for key in names if key in other}
    return made


def short(version: str) -> str:
    """A version without its last number."""
    return ".".join(version.split(".")[:2])


def bases_of(row: Row) -> dict[str, Any]:
    """The path of each base in the default section -> its value."""
    rope = row.get("rope", {})
    nested = {
        f"{kind}.rope_theta": section for kind, section in rope.items() if isinstance(section, dict)
    }
    every = {
        path: section.get("rope_theta")
        for path, section in (nested or {"rope_theta": rope}).items()
    }
    return {path: value for path, value in every.items() if value is not None}


def refreshed_rows(file: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Row]:
    """The rows of a file with the facts of the installed classes: those named, or all and all composites."""
    found, parts = classes()
    rows: dict[str, Row] = file["families"]
    made = {}
    for name in {*rows, *parts} if names is None else names:
        row = rows.get(name, {})
        if name in found:
            facts = {fact: row[fact] for fact in ("outer", "more", "code") if fact in row}
            if "code" in row and "refused" not in row["code"]:
                facts |= refreshed(row, found[name], file["transformers"])
            row = facts | ({"parts": parts[name]} if name in parts else {})
            row |= whole_of(found, name, row.get("parts", {}))
        made[name] = row
    every = {**rows, **made}
    return {name: with_parts(row, every) for name, row in made.items() if rotates(name, every)}


def with_parts(row: Row, rows: Mapping[str, Row]) -> Row:
    """A row with those of its parts that have a row with facts of code."""
    parts = {part: kind for part, kind in row.get("parts", {}).items() if rotates(kind, rows)}
    rest = {fact: value for fact, value in row.items() if fact != "parts"}
    return rest | ({"parts": parts} if parts else {})


def rotates(name: str, rows: Mapping[str, Row], above: tuple[str, ...] = ()) -> bool:
    """Say if the rows have facts of code for a model type or for one of its parts."""
    row, above = rows.get(name, {}), (*above, name)
    inner = row.get("parts", {}) | row.get("more", {}).get("parts", {})
    return (
        "code" in row
        or "as" in row
        or any(rotates(part, rows, above) for part in inner.values() if part not in above)
    )


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


def without_row(families: Mapping[str, Row]) -> list[str]:
    """The model types whose classes have keys about RoPE, and that have no row."""
    found = {name: Probe(cls).default for name, cls in classes()[0].items() if name not in families}
    about = ("rope_parameters", *BASES)
    return sorted(name for name, keys in found.items() if any(key in keys for key in about))


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
    with quiet():
        rows = refreshed_rows(file)
        unknown = without_row(rows)
    changed = list(differences(file["families"], rows))
    for line in changed:
        print(line)
    print(f"{len(rows)} rows, {len(changed)} facts differ; no row: {', '.join(unknown) or 'none'}")
    if not check:
        PATH.write_text(text_of(rows), "utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
