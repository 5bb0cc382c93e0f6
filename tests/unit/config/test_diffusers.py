"""Configurations of diffusers are read as diffusers itself rotates.

A small model of each class, with the widths that the published one has, runs patched; its calls of the operator must be
those of the spec of its configuration, as in tests/coverage/configs.py. rows/diffusers.json has for each class the
configuration; `small`, other sizes that fit it; `inputs`, those beside the inputs of tests/coverage/models; and `but`,
where text comes first or columns come before rows, so that the order of the coordinates is not that of an image.
rows/diffusers.jsonl has what is refused.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.coverage import configs, rows
from tests.coverage.building import SEED, made
from tests.coverage.libraries import LIBRARIES
from tests.coverage.runs import Subject
from tests.support.helpers import version_of
from tests.support.reading import read, refused
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.config import provenance
from tightrope.config.diffusers import TRANSFORMERS

diffusers = pytest.importorskip("diffusers")
LIBRARY = LIBRARIES["diffusers"]
CLASSES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "rows" / "diffusers.json").read_text("utf-8")
)
# Classes that diffusers has had since 0.42, which needs Python 3.11, and one whose code `patch` finds since then.
NEW = {
    *("BriaFibo2Transformer2DModel", "Flux3Transformer2DModel", "QwenImageTransformer2DModel"),
}
HERE = [name for name in CLASSES if name not in NEW or version_of("diffusers") >= (0, 42)]
REFUSED = [name for name, facts in TRANSFORMERS.items() if facts.refused is not None]


def config_of(name: str) -> dict[str, Any]:
    return {"_class_name": name, "_diffusers_version": "0.42.1", **CLASSES[name]["config"]}


def test_each_supported_class_has_a_case() -> None:
    assert {*CLASSES} == TRANSFORMERS.keys() - {*REFUSED}


@pytest.mark.parametrize("name", HERE)
def test_a_file_with_every_argument_of_its_class_is_read(name: str) -> None:
    made = provenance(config_of(name))
    assert made.name == f"_class_name {name!r}"
    assert all(row.source for row in made.rows)
    arguments = inspect.signature(getattr(diffusers, name)).parameters.values()
    assert read({each.name: each.default for each in arguments} | config_of(name)) == made.spec


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_without_a_spec_is_refused_by_name(name: str) -> None:
    assert hasattr(diffusers, name)
    refused({"_class_name": name, "attention_head_dim": 8}, f"_class_name {name!r} has no spec: ")


def test_a_model_reads_as_its_file() -> None:
    sizes = {"attention_head_dim": 16, "num_attention_heads": 1, "axes_dims_rope": [4, 6, 6]}
    sizes |= {"num_layers": 0, "num_single_layers": 0}
    sizes |= {"joint_attention_dim": 8, "pooled_projection_dim": 8}
    model = diffusers.FluxTransformer2DModel(**sizes)
    assert read(model) == RopeSpec(16, interleaved=True, axes=Axes.blocks((2, 3, 3)))


# --- the code of diffusers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", HERE)
def test_the_published_code_rotates_as_the_spec(name: str) -> None:
    row, own = CLASSES[name], LIBRARY.small[name]
    few = {key: n for key, n in own["config"].items() if key == "num_attention_heads"}
    sizes = {**own["config"], **row["config"], **few, **row.get("small", {})}
    inputs, calls = {**own["inputs"], **row.get("inputs", {})}, defaultdict(list)
    with rows.loadable(LIBRARY):
        model = made({"new": f"diffusers.{name}", **sizes}).eval().requires_grad_(False)
        given = made(inputs, torch.Generator().manual_seed(SEED))
        for call in configs.calls_of(Subject(LIBRARY, model, given)):
            far = call.angles[:: max(1, len(call.angles) // 13)]  # in other rows of an image too
            calls[call.part] += call, call._replace(angles=far)
    found = {configs.compared(read(model), each).partition(" of ")[0] for each in calls.values()}
    assert found
    assert found <= {"", row.get("but", "")}
