"""The committed coverage of configurations, and the comparison that it rests on."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.coverage import configs, report
from benchmarks.coverage.configs import Call, compared, differs
from benchmarks.pages import between_marks
from tightrope import Axes, RopeSpec
from tightrope.config import LayerSpecs
from tightrope.config.families import FAMILIES

pytest.importorskip("transformers")
DATA: dict[str, Any] = json.loads(configs.RESULTS.read_text("utf-8"))
ROWS = {row["model"]: row for row in DATA["models"]}


def test_no_committed_row_differs_and_most_are_equal() -> None:
    status = [row["status"] for row in ROWS.values()]
    assert "different" not in status
    # Of those whose frequencies only weights hold, `from_config` asks for a model.
    held = [row for row in ROWS.values() if "only its weights hold" in str(row.get("reason", ""))]
    # Nor those that `patch` leaves to their code, so that no call shows what rotates (muse_glimmer_assistant).
    assert status.count("equal") + len(held) >= 286
    assert len(held) <= 2
    assert not [row["model"] for row in ROWS.values() if "object" in row]
    assert len(status) >= 311
    assert len(LAYERED) >= 36  # a rule that is lost would lose its test


def test_the_published_files_of_today_are_the_committed_ones() -> None:
    assert configs.published() == DATA["published"]
    assert DATA["published"]["different"] == []
    assert len(DATA["published"]["equal"]) >= 120


def test_the_page_shows_the_committed_rows(tmp_path: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text(configs.PAGE.read_text("utf-8"), "utf-8")
    between_marks(page, "config-coverage", configs.page(DATA))
    assert page.read_text("utf-8") == configs.PAGE.read_text("utf-8")


@pytest.mark.parametrize("option", ["--page", "--results"])
def test_a_file_that_cannot_be_written_is_named_at_once(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run takes eleven minutes."""
    with pytest.raises(SystemExit, match="2"):
        configs.main([option, str(tmp_path / "none" / "x")])
    assert str(tmp_path / "none") in capsys.readouterr().err.splitlines()[-1]


# Types whose layers differ, by the rule of their family, and others.
RULES = "nested rotates rotates_if_windows flags scaled wide labels rule".split()
LAYERED = [
    name
    for name in ROWS
    if (family := FAMILIES.get(name)) and any(getattr(family, rule) for rule in RULES)
]
OTHERS = "llama gptj qwen2_vl deepseek_v2 kimi_k25_vision nanochat".split()


@pytest.mark.skipif(
    importlib.metadata.version("transformers") != DATA["version"],
    reason="counted with another version of transformers, which has other classes",
)
@pytest.mark.parametrize("name", [*OTHERS, *LAYERED])
def test_a_row_of_today_is_the_committed_one(name: str) -> None:
    assert configs.row(name) == ROWS[name]


def test_published_functions_pair_as_the_table_of_families_says() -> None:
    """The functions are recognised by what they compute."""
    rows = report.read(configs.MODELS)["functions"]
    recognised = {(row["file"], row["function"]): row.get("recognised", "") for row in rows}
    for name, family in FAMILIES.items():
        # Composites have no source, as their parts rotate.
        if family.refused is None and family.source and "repository" not in family.source:
            folder, function = family.source.split(": ")
            found = recognised[f"{folder}/modeling_{folder}", function]
            assert found.startswith("adjacent pairs" if family.interleaved else "halves"), name


# --- the comparison -------------------------------------------------------------------------------

SPEC = RopeSpec(16, base=100.0, rotary_dim=8, start=4)


def call(spec: RopeSpec, layer: int = 0, **changes: Any) -> Call:
    """Return the call of a rotation by a spec of one coordinate."""
    angles = torch.arange(9.0)[:, None] * spec.frequencies().inv_freq
    angles = torch.atan2(angles.sin(), angles.cos()).tolist()
    made = Call(f"layers.{layer}.attn", spec.head_dim, spec.start, spec.interleaved, angles)
    return made._replace(**changes)


def test_a_call_is_compared_in_pairing_channels_and_angles() -> None:
    assert differs(call(SPEC), SPEC) == ""
    assert differs(call(SPEC, width=8, start=0), SPEC) == ""  # the channels were cut out first
    for other, what in (
        (RopeSpec(16, base=100.0, rotary_dim=8, start=4, interleaved=True), "the pairing"),
        (RopeSpec(16, base=100.0, rotary_dim=8, start=2), "the channels"),
        (RopeSpec(16, base=100.0, rotary_dim=6, start=4), "the channels"),
        (RopeSpec(32, base=100.0, rotary_dim=8, start=4), "the channels"),
        (RopeSpec(16, base=101.0, rotary_dim=8, start=4), "the angles of token 1"),
    ):
        assert differs(call(SPEC), other).startswith(what)
    negated = [[-angle for angle in token] for token in call(SPEC).angles]
    assert differs(call(SPEC, angles=negated), SPEC) == "the direction of layers.#.attn"


def test_each_coordinate_has_a_value_of_its_own() -> None:
    spec = RopeSpec(8, axes=Axes.blocks((2, 2)))
    angles = [[1.0, 0.01, 2.0, 0.02]] * 3
    assert differs(Call("", 8, 0, False, angles), spec) == ""
    assert differs(Call("", 8, 0, False, [[1.0, 0.02, 2.0, 0.02]] * 3), spec)


def test_the_last_coordinate_is_the_one_that_changes_along_a_row() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]  # by rows, in squares of four

    def seen(axes: Axes) -> str:
        angles = [
            [place[axis] * 1e4 ** (-2 * k / n) for axis, k, n in axes.pairs] for place in places
        ]
        return differs(Call("", 8, 0, False, angles), RopeSpec(8, axes=Axes.blocks((2, 2))))

    assert seen(Axes.blocks((2, 2))) == ""
    assert (
        seen(Axes(2, ((1, 0, 4), (1, 1, 4), (0, 0, 4), (0, 1, 4))))
        == "the order of the coordinates of "
    )


def test_layers_are_compared_with_their_specs() -> None:
    specs = LayerSpecs({"on": SPEC, "off": None}, ("on", "off", "on"))
    assert compared(specs, [call(SPEC, 0), call(SPEC, 2)]) == ""
    assert compared(specs, [call(SPEC, 0)]) == "layer 2 does not rotate"
    every = [call(SPEC, layer) for layer in range(3)]
    assert compared(specs, every) == "layer 1 of layers.#.attn rotates"


def test_sections_are_cut_as_models_cut_them() -> None:
    config = {
        "model_type": "qwen3_vl_text",
        "head_dim": 16,
        "rope_parameters": {"mrope_section": [2, 3, 3]},
    }
    assert configs.fitted(config)["rope_parameters"]["mrope_section"] == [3, 3, 2]
    assert configs.fitted({**config, "model_type": "qwen2_vl_text"}) == {
        **config,
        "model_type": "qwen2_vl_text",
    }
