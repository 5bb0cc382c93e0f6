"""The committed rows: those of today, and on the pages; with COVERAGE=all every row is measured again (half an hour)."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata

import pytest

from tests.coverage import configs, pages, rows, stacks as measured
from tests.coverage.libraries import LIBRARIES, TRANSFORMERS
from tests.coverage.runs import SERVED
from tightrope import stacks
from tightrope.config.families import FAMILIES

# Warnings of the libraries' models are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

DATA = {name: rows.read(name) for name in LIBRARIES}
EVERY = [(name, row) for name, found in DATA.items() for row in found]
FUNCTIONS = [(name, row) for name, row in EVERY if "function" in row]
MODELS = {(name, row["model"]): row for name, row in EVERY if "model" in row}
CONFIGS = {row["model"]: row for row in rows.read("configs")[1:]}


def same_version(library: str) -> None:
    """Skip the test if another version than that of the committed rows is installed."""
    pytest.importorskip(library.replace("-", "_"))
    if metadata.version(library) != DATA[library][0]["version"]:
        pytest.skip(f"the committed rows are of {library} {DATA[library][0]['version']}")


def test_rows_that_are_not_equal_have_a_reason() -> None:
    for row in (*MODELS.values(), *(row for _, row in FUNCTIONS)):
        assert row["status"] != "different", row
        assert (row["status"] == "equal") == ("reason" not in row), row
        assert "(/" not in str(row)  # no place of a machine
    for row in MODELS.values():
        assert row["status"] not in SERVED or (row["calls"] and row["replaced"]), row


def test_as_many_are_equal_as_were_asked_for() -> None:
    equal = [library for (library, _), row in MODELS.items() if row["status"] in SERVED]
    assert equal.count("transformers") >= 305
    assert equal.count("diffusers") >= 58
    allowed = "does not run", "the original served every call"
    for (library, _), row in MODELS.items():
        if library == "transformers" and "bfloat16" in row:
            assert any(words in row["bfloat16"] for words in allowed), row
    found = [row["status"] for row in CONFIGS.values()]
    # Of those whose frequencies only weights hold, `from_config` asks for a model; `patch` leaves two to their code.
    held = [row for row in CONFIGS.values() if "only its weights hold" in row.get("reason", "")]
    assert found.count("equal") + len(held) >= 286
    assert (len(found) >= 311, len(held) <= 2, "different" in found) == (True, True, False)
    assert not [row for row in CONFIGS.values() if "object" in row]


def test_the_pages_show_the_committed_rows() -> None:
    for name, text in pages.texts().items():
        page = pages.PAGES[name].read_text("utf-8")
        assert f"<!-- {name} -->\n{text}\n<!-- end of {name} -->" in page
        shown = MODELS.values() if name == "coverage" else CONFIGS.values()
        hidden = "does not rotate" if name == "coverage" else "equal"
        assert all(f"`{r['model']}`" in text for r in shown if r["status"] != hidden)
    assert measured.table() in measured.PAGE.read_text(encoding="utf-8")


def test_stacks_that_claim_to_have_run_did() -> None:
    """In tests/unit/stacks, or in the stored comparisons, where no result and no gradient differs."""
    stored = json.loads(measured.RESULTS.read_text(encoding="utf-8"))
    here = {"transformers", "diffusers", "diffusers-float64"}  # tests/unit/stacks
    ran = {name for name in stacks.names() if stacks.get(name).verified == stacks.RUN}
    assert ran == here | stored.keys()
    for name, entry in stored.items():
        assert (entry.pop("source"), bool(entry.pop("torch"))) == (stacks.get(name).source, True)
        assert entry
        assert all(counts[0] > 0 == counts[1] == counts[2] for counts in entry.values())


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_the_committed_rows_are_those_of_the_catalogue(library: str) -> None:
    same_version(library)
    known = LIBRARIES[library]
    assert [name for each, name in MODELS if each == library] == [*known.models]
    assert known.small.keys() <= known.models.keys()
    found = {(each.file, each.name) for each in known.functions}
    assert {(r["file"], r["function"]) for name, r in FUNCTIONS if name == library} == found


def test_every_small_model_has_a_row() -> None:
    for name in LIBRARIES.keys() - {"transformers", "diffusers"}:
        found = {model for library, model in MODELS if library == name}
        assert found == LIBRARIES[name].small.keys()


def test_the_catalogue_is_every_type_of_a_folder_that_rotates() -> None:
    same_version("transformers")
    types, files = TRANSFORMERS.models, {each.file for each in TRANSFORMERS.functions}
    assert (len(types) >= 360, len(files) >= 205) == (True, True)
    assert types["qwen2_vl_vision"] == types["qwen2_vl"]
    assert {"llama/modeling_llama", "vjepa2/modeling_vjepa2", "jamba/modeling_jamba"} <= files


def test_published_functions_pair_as_the_table_of_families_says() -> None:
    """The functions are recognised by what they compute."""
    kinds = {(row["file"], row["function"]): row.get("kind", "") for _, row in FUNCTIONS}
    for name, family in FAMILIES.items():
        # Composites have no source, as their parts rotate.
        if family.refused is None and family.source and "repository" not in family.source:
            folder, function = family.source.split(": ")
            found = kinds[f"{folder}/modeling_{folder}", function]
            assert found.startswith("adjacent pairs" if family.interleaved else "halves"), name


# --- rows of today ----------------------------------------------------------------------------------

ALL = os.environ.get("COVERAGE") == "all"
# Files of functions whose code has no like in another test.
FILES = {
    "x-transformers": "",
    "rotary-embedding-torch": "",
    "diffusers": "transformer_(wan|qwenimage)$",
    "transformers": "^(llama|gptj|deepseek_v2|roformer|gemma4|gpt_oss|glm|cohere|olmo|ernie4_5)/",
}
# One type for each feature: plain heads, partial channels, three axes and images, latent attention, complex tables, a
# method, rows and columns, audio, a sliding window, partial width, two angles for each pair, learned tables, float64, …
ODD = """llama gptj qwen2_vl deepseek_v3 llama4_text roformer dinov3_vit glmasr gemma3 gpt_neox cohere
    pe_audio_encoder hunyuan_vl lightglue musicflamingo""".split()
# Of diffusers one model for each set of functions that are replaced.
SETS = {
    str(row["replaced"]): (library, name)
    for (library, name), row in MODELS.items()
    if library == "diffusers" and row["status"] in SERVED
}
CHOSEN = [
    ("x-transformers", "TransformerWrapper"),
    *SETS.values(),
    *(("transformers", name) for name in ODD),
]
# Other tests reach the functions of the others.
FAST = ("dinov3_vit", "hunyuan_vl", "lightglue", "WanVACETransformer3DModel")
TODAY = [
    pytest.param(*one, marks=[pytest.mark.slow] * (one[1] not in FAST))
    for one in (MODELS if ALL else CHOSEN)
]
# Types whose layers differ, by the rule of their family, and others.
RULES = "nested rotates rotates_if_windows flags scaled wide labels rule".split()
LAYERED = [
    name
    for name in CONFIGS
    if (family := FAMILIES.get(name)) and any(getattr(family, rule) for rule in RULES)
]
# Those whose pairs are divided among coordinates in other ways.
AXIAL = """qwen2_vl qwen3_vl_text glm4v_text ernie4_5_vl_moe_text qwen2_vl_vision kimi_k25_vision pixtral dinov3_vit
    llama4_vision_model""".split()
TYPES = [*"llama gptj deepseek_v2 nanochat".split(), *AXIAL, *LAYERED]


@pytest.mark.parametrize("library", DATA if ALL else FILES)
def test_a_function_of_today_is_that_committed(library: str) -> None:
    same_version(library)
    only = "" if ALL else FILES[library]
    with rows.loadable(LIBRARIES[library]):
        today = rows.of_functions(LIBRARIES[library], only)
    then = [row for name, row in FUNCTIONS if name == library and re.search(only, row["file"])]
    assert today
    assert sorted(today, key=str) == sorted(then, key=str)


@pytest.mark.parametrize(("library", "name"), TODAY)
def test_a_model_of_today_is_that_committed(library: str, name: str) -> None:
    same_version(library)
    with rows.loadable(LIBRARIES[library]):
        assert rows.of_model(LIBRARIES[library], name) == MODELS[library, name]


@pytest.mark.parametrize("name", CONFIGS if ALL else TYPES)
def test_a_configuration_of_today_is_that_committed(name: str) -> None:
    same_version("transformers")
    assert len(LAYERED) >= 36  # a rule that is lost would lose its test
    with rows.loadable(TRANSFORMERS):
        assert configs.row(name) == CONFIGS[name]
