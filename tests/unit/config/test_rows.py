"""Configurations, a row each: what `from_config` reads in them, or the phrase with which it refuses or asks.

rows/*.jsonl have a configuration per line:

- like: the configuration that it changes, of rows/bases.json, or "gguf ARCHITECTURE", whose keys may begin with a point;
- set, drop: what it changes, and the keys that it leaves out;
- answers: the arguments of the caller;
- spec: the fields of the spec, as far as they are not those of `RopeSpec(head_dim)`; or specs: these by type of layers,
  null for those that do not rotate, and layers: the type of each layer, where it is known;
- sources: for some fields, the key or the code that gave them;
- refused: a phrase of the error, and error: its type, if it is not ValueError;
- sections: the parts that rotate;
- asks: the arguments that the question asks for, and spec: that of the call that it advises for code like Llama's.

Files of public models are in tests/support/data/model_configs.json too; models_of_2026.jsonl has those that the installed
transformers may not have. Every spec was written from papers, model cards and the code of models, never by `from_config`.
"""

from __future__ import annotations

import builtins
import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.advice import calls_in, made_by
from tests.support.model_configs import MODELS, REFUSED
from tests.support.reading import gguf, outcome, read, refused, without
from tightrope import Axes, RopeSpec
from tightrope.config import LayerSpecs, provenance, sections
from tightrope.frequencies import Rule

FOLDER = Path(__file__).with_name("rows")
BASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "bases.json").read_text("utf-8"))


@dataclass(frozen=True)
class Case:
    """A configuration and what is expected of it; `row` has what only some rows have."""

    name: str
    config: dict[str, Any]
    answers: dict[str, Any]
    wanted: Any
    row: dict[str, Any] = field(default_factory=dict)


def whole(value: Any) -> Any:
    """Return a value of a row, where "64 × 1.0" is a list of 64 numbers."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    times, _, number = value.partition(" × ") if isinstance(value, str) else ("", "", "")
    return [json.loads(number)] * int(times) if number else value


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a row."""
    kind, _, name = row.get("like", "").partition(" ")
    arch = f"{name}." if kind == "gguf" else ""
    start = gguf(name) if arch else BASES[row["like"]] if kind else {}
    changes = {
        re.sub(r"^\.", arch, key) if arch else key: whole(value)
        for key, value in row.get("set", {}).items()
    }
    drop = [re.sub(r"^\.", arch, key) if arch else key for key in row.get("drop", ())]
    return without({**copy.deepcopy(start), **changes}, *drop)


def spec_of(fields: dict[str, Any] | None) -> RopeSpec | None:
    """Return a spec by its fields; axes are the sizes of blocks, the coordinate of each pair, or (coordinate, pair, of)."""
    if fields is None:
        return None
    made = whole(fields)
    if "scaling" in made:
        made["scaling"] = Rule.from_dict(made["scaling"])
    if "axes" in made:
        ((kind, value),) = made["axes"].items()
        if kind == "blocks":
            made["axes"] = Axes.blocks(value)
        else:
            owners = list(map(int, value)) if kind == "owners" else value
            pairs = [(axis, pair, 2 * len(owners)) for pair, axis in enumerate(owners)]
            pairs = pairs if kind == "owners" else list(map(tuple, value))
            made["axes"] = Axes(1 + max(axis for axis, _, _ in pairs), tuple(pairs))
    return RopeSpec(**made)


def cases() -> list[Case]:
    """Return the rows of all files."""
    found = [Case(f"{one.name} {one.form}", one.config, one.options, one.wanted) for one in MODELS]
    found += [Case(one.origin, one.config, {}, None, {"refused": one.why}) for one in REFUSED]
    for file in sorted(FOLDER.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
            several = {name: spec_of(each) for name, each in row.get("specs", {}).items()}
            wanted = several or spec_of(row.get("spec"))
            answers = row.get("answers", {})
            found.append(Case(f"{file.stem}: {row['name']}", config_of(row), answers, wanted, row))
    return found


CASES = cases()
READ = [case for case in CASES if not {"refused", "asks"} & case.row.keys()]
REFUSALS = [case for case in CASES if {"refused", "asks"} & case.row.keys()]


def by_name(case: Case) -> str:
    return case.name


def test_names_are_unique_and_there_are_enough_real_files() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({model.origin for model in MODELS}) >= 100
    assert all("source" in case.row for case in CASES if case.name.startswith("models_of_2026"))


@pytest.mark.parametrize("case", READ, ids=by_name)
def test_a_configuration_gives_its_spec(case: Case, tmp_path: Path) -> None:
    """Also as a file, with a source for each field, and the caller's configuration does not change."""
    before = copy.deepcopy(case.config)
    got: Any = read(case.config, **case.answers)
    assert got == case.wanted
    if "layers" in case.row:
        assert got.layers == (case.row["layers"] and tuple(case.row["layers"]))
    sourced = provenance(case.config, **case.answers)
    assert sourced.spec == case.wanted
    sources = {row.field: row.source for row in sourced.rows}
    assert all(sources.values())
    assert sources.items() >= case.row.get("sources", {}).items()
    shown = [line for line in str(sourced).splitlines() if not line.endswith(":")]
    for line, row in zip(shown, sourced.rows, strict=True):
        assert line.startswith(row.field)
        assert line.endswith(row.source)
        value, text = line.removeprefix(row.field).removesuffix(row.source).strip(), repr(row.value)
        assert value == text if len(text) <= 40 else value.startswith(text[:36])
    starts = [len(line) - len(row.source) for line, row in zip(shown, sourced.rows)]
    assert len({*starts}) == 1, "the sources are not in one column"
    file = tmp_path / ("params.json" if "n_heads" in case.config else "config.json")
    file.write_text(json.dumps(case.config), encoding="utf-8")
    assert read(str(file), **case.answers) == case.wanted
    assert case.config == before
    assert isinstance(got, RopeSpec | LayerSpecs | None)


@pytest.mark.parametrize("case", REFUSALS, ids=by_name)
def test_a_configuration_is_refused_or_asked_about(case: Case) -> None:
    """Each call that the error advises works; strict=False does not silence it, unless the error says so."""
    kind = getattr(builtins, case.row.get("error", "ValueError"))
    refused(case.config, case.row.get("refused", "the config must give "), kind, **case.answers)
    said = str(outcome(case.config, **case.answers))
    if "strict" not in said:
        lax = str(outcome(case.config, **case.answers, strict=False))
        assert lax.partition("; ")[0] == said.partition("; ")[0]


@pytest.mark.parametrize("case", [one for one in CASES if "sections" in one.row], ids=by_name)
def test_sections_are_the_parts_that_rotate(case: Case) -> None:
    assert {*sections(case.config)} == {*case.row["sections"]}


ANSWERS = {"interleaved": True, "rotary_dim": 64, "start": 128, "rope_layers": "all"}


@pytest.mark.parametrize("case", [one for one in CASES if "asks" in one.row], ids=by_name)
def test_only_what_is_missing_is_asked(case: Case) -> None:
    asked = set(case.row["asks"])
    for answered in (None, *asked) if len(asked) > 1 else (None,):
        stated = case.answers | ({answered: ANSWERS[answered]} if answered else {})
        said = str(outcome(case.config, **stated))
        assert "the table of families does not contain" in said
        *_, call = calls_in(said)
        found = set(re.findall(r"(\w+)=", call)) - {*stated, "section"}
        # That some channels rotate leads to the question which ones.
        assert found - ({"start"} if answered == "rotary_dim" else set()) == asked - {answered}
        if case.wanted is not None and answered is None:
            assert made_by(call, case.config) == case.wanted
