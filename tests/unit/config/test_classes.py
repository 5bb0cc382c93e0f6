"""The facts in families.json are those of the installed classes, and files are read as these classes read them.

The model types are dealt to twelve groups, of which `make test` runs one. Files are as people have them:

- saved: every key of an object of a class, and then one or two more, most of which any program may have written;
- older: the same without a rope section, as transformers wrote files until 2025;
- short: a model type, the widths of a head and at most a few other keys; all else is a default;
- composite: a model of several parts, whose text says nothing but its type.
"""

from __future__ import annotations

import copy
import functools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ci.families import COUNTS, PATH, classes, quiet, refreshed_rows
from tests.support.reading import read, refused, without
from tightrope import RopeSpec
from tightrope.config import provenance
from tightrope.config.families import FAMILIES

FILE: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
ROWS: dict[str, Any] = FILE["families"]
#: The model types whose class has a spec. The code in the repositories of nomic_bert reads more keys than its class.
NAMES = [name for name, row in ROWS.items() if "class" in row and name != "nomic_bert"]
COMPOSITES = [name for name, row in ROWS.items() if "text_config" in row.get("parts", {})]
GROUPS = range(12)
same_version = pytest.mark.skipif(
    transformers.__version__ != FILE["transformers"],
    reason="the facts are those of another version of transformers, which has other classes",
)


def of_group(names: Any, group: int) -> list[str]:
    """The model types of one group; a new row moves no other."""
    return [name for name in names if zlib.crc32(name.encode()) % len(GROUPS) == group]


@same_version
@pytest.mark.one_in(12)
@pytest.mark.parametrize("group", GROUPS)
def test_the_facts_are_those_of_the_installed_classes(group: int) -> None:
    """Otherwise run `python -m ci.families`, and review what has changed."""
    names = of_group(ROWS, group)
    with quiet():
        made = refreshed_rows(FILE, names)
    assert made == {name: ROWS[name] for name in names}


def test_rows_come_from_classes_or_from_hand() -> None:
    assert len(NAMES) >= 230
    for name, row in ROWS.items():
        facts = {*row} - {"code", "parts", "flat", "defaults", "outer", "more", "as"}
        assert "as" in row or "parts" in row or "code" in row, name
        assert not facts or "code" in row, name
        assert "as" not in row or ROWS[row["as"]], name
        assert {*row.get("code", {})} == {"refused"} or row.get("code", {"source": "x"})["source"]


# --- files ----------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
HEAD_DIM = ("head_dim", "kv_channels")
# What a person or another program may add to a file.
ADDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).with_name("rows") / "added.json").read_text("utf-8")
)


@functools.cache
def class_of(name: str) -> Any:
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


def specs_of(config: Any) -> Any:
    """Return the specs of a configuration; None if it is refused."""
    try:
        made = RopeSpec.from_config(config)
    except (ValueError, TypeError, NotImplementedError):
        return None
    return made if isinstance(made, RopeSpec) else dict(made)


def saved(name: str) -> Iterator[dict[str, Any]]:
    """Yield every key of an object, with those of ADDED."""
    made = object_of(name, {})
    keys = json.loads(json.dumps(made if isinstance(made, dict) else made.to_dict(), default=str))
    yield from with_added(without(keys, "model_type"))


def older(name: str) -> Iterator[dict[str, Any]]:
    """Yield the same keys without a rope section, and with a base beside it."""
    keys = next(iter(saved(name)))
    yield from with_added({**without(keys, "rope_parameters"), "rope_theta": 10000.0})


def with_added(keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield keys
    for what, added in ADDED.items():
        rest = without(keys, "rope_theta", "rope_parameters") if "base," in what else keys
        yield rest | added


def widths(name: str) -> dict[str, int]:
    """Return the widths of a head and the number of layers, which a file must give, as the class has them."""
    row = ROWS[name]
    own = {*row.get("width", ()), *row["code"].get("width", ()), *HEAD_DIM, *COUNTS}
    return {
        key: each for key, each in row.get("keys", {}).items() if key in own or "head_dim" in key
    }


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
    yield from ({**given, **changed} for changed in changes)
    # A width that is left out is asked for, or is the class's.
    yield from (without(given, key) for key in given if key != count)


def composite(name: str) -> Iterator[dict[str, Any]]:
    """Yield the keys of a model of several parts whose text says its type, the number of its layers or its base."""
    for keys in ({}, {"num_hidden_layers": 7}, {"rope_theta": 777000.0}, {"rope_scaling": LINEAR}):
        yield {"text_config": {"model_type": ROWS[name]["parts"]["text_config"], **keys}}


# The model types that have files of a style, these, and the least share of them that are read, in any group; most others
# have a key that the class ignores.
STYLES: list[tuple[list[str], Callable[[str], Iterator[dict[str, Any]]], float]] = [
    (NAMES, saved, 0.18),
    (NAMES, older, 0.35),
    (NAMES, short, 0.6),
    (COMPOSITES, composite, 0.4),
]
# Objects of these types state a number of channels that their code ignores, beside the factor that it reads.
ONLY_FILES = {"minimax_m3_vl_text", "minimax_m3_vl"}


@same_version
@pytest.mark.one_in(12)
@pytest.mark.parametrize("group", GROUPS)
def test_a_file_is_read_as_its_class_reads_it(group: int) -> None:
    for all_names, style, share in STYLES:
        files = were_read = 0
        for name in of_group(all_names, group):
            for keys in style(name):
                made = object_of(name, keys)
                if made is None:
                    continue
                found, wanted = specs_of({**keys, "model_type": name}), specs_of(made)
                files += 1
                were_read += found is not None
                if found is not None and wanted is None:
                    assert name in ONLY_FILES, keys
                elif found is not None:
                    assert found == wanted, (name, keys)
        assert were_read >= share * files


# --- defaults ---------------------------------------------------------------------------------------


@same_version
@pytest.mark.one_in(12)
@pytest.mark.parametrize("group", GROUPS)
def test_a_default_names_the_class_that_gives_it(group: int) -> None:
    named = 0
    for name in of_group(NAMES, group):
        row, file = ROWS[name], {"model_type": name, **next(iter(short(name)))}
        try:
            rows = provenance(file).rows if "base" not in row["code"] else ()
        except ValueError:
            continue
        version = FILE["transformers"].rpartition(".")[0]
        sources = [each.source for each in rows if each.field == "base"]
        wanted = f"default of {row['class']}, transformers {version}"
        assert all(wanted in source for source in sources), (name, sources)
        named += len(sources)
    assert named >= 5


HEADS = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 8}
LATENT = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
SCALED = [
    name
    for name, family in FAMILIES.items()
    if family.rope.get("rope_type", "default") not in ("default", "axial")
]
DIFFERING = {name: family.differs for name, family in FAMILIES.items() if family.differs}


def heads_of(name: str) -> dict[str, Any]:
    widths = LATENT if FAMILIES[name].start == "nope" else {"head_dim": 128}
    return {"model_type": name, **HEADS, **widths}


@pytest.mark.parametrize("name", SCALED)
def test_a_missing_section_is_that_of_the_class_and_null_is_refused(name: str) -> None:
    config = heads_of(name)
    given = {"inv_freq": torch.ones(16)} if FAMILIES[name].learned else {}
    if not given:
        rows = provenance(config).rows
        assert any(row.field == "scaling.factor" and "default of" in row.source for row in rows)
    made_by = FAMILIES[name].made_by
    null = f"rope_scaling must not be null, as {made_by} scales by default"
    refused({**config, "rope_scaling": None}, null)
    section = {"rope_type": "default", "rope_theta": 1e4}
    spec = read({**config, "rope_parameters": section}, **given)
    assert isinstance(spec, RopeSpec) or set(spec) <= {"rope", "no_rope"}


@pytest.mark.parametrize("name", DIFFERING)
def test_the_version_that_wrote_a_file_decides_its_default(name: str) -> None:
    assert DIFFERING.keys() >= {"cohere", "olmo3", "qwen3_vl_text"}
    path, versions = next(iter(DIFFERING[name].items()))
    (old, before), (new, now) = versions.items()
    config, made_by = heads_of(name), FAMILIES[name].made_by
    text = f"base={before!r}, the default of {made_by} in transformers {old}, or base={now!r}, that of {new}"
    for version in (None, "5.3.0", 5, "", "main"):
        refused({**config, "transformers_version": version}, text)
    for wrote, base, number in ((f"{old}.1", before, old), (f"{new}.0.dev0", now, new)):
        layer = path.rpartition(".")[0] or None
        rows = provenance({**config, "transformers_version": wrote}, layer_type=layer).rows
        found = {row[2:] for row in rows if row.field == "base"}
        assert (base, f"default of {made_by}, transformers {number}") in found


def test_layers_of_a_short_file_are_those_that_the_class_lists() -> None:
    file = {"model_type": "gemma3_text", **widths("gemma3_text"), "num_hidden_layers": 8}
    assert read(file).layers == tuple(class_of("gemma3_text")(num_hidden_layers=8).layer_types)
