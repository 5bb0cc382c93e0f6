"""Audits of rotations whose positions have several coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.helpers import refused
from tests.support.planted_faults import named
from tightrope import Axes, RopeSpec, positions
from tightrope.frequencies import Given, YaRN
from tightrope.functional import rotate
from tightrope_tools.audit import audit

Rope = Callable[..., torch.Tensor]
QUICK: dict[str, Any] = {"dtypes": [torch.float32], "longest": 2**16}
SPECS = {
    "sections": RopeSpec(32, base=1e6, axes=Axes.sections((6, 5, 5))),
    "sections in turn": RopeSpec(32, base=1e6, axes=Axes.sections((6, 5, 5), interleaved=True)),
    "blocks": RopeSpec(32, axes=Axes.blocks((8, 8))),
    "neighbours": RopeSpec(32, interleaved=True, axes=Axes.sections((8, 8))),
    "scaled blocks": RopeSpec(32, scaling=YaRN(4.0, 4096), axes=Axes.blocks((8, 8))),
    "scaled": RopeSpec(32, scaling=YaRN(4.0, 4096), axes=Axes.sections((6, 5, 5))),
}


def of(spec: RopeSpec) -> Rope:
    def rope(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        assert position_ids.shape[0] == spec.axis_count
        assert position_ids.dim() == 3
        return rotate(x, spec, positions.multi_axis(position_ids))

    return rope


@pytest.mark.parametrize("name", SPECS)
def test_a_rotation_of_several_coordinates_is_as_declared(name: str) -> None:
    spec = SPECS[name]
    report = named(audit(of(spec), spec=spec, **QUICK))
    assert report.facts["declared"] == repr(spec)
    assert report.facts["positions"] == f"({spec.axis_count}, rows, tokens)"
    results = {check.name: check.outcome for check in report.checks}
    assert results["each coordinate turns its own pairs"] == "passed"


def test_coordinates_that_are_exchanged_are_found() -> None:
    spec = SPECS["sections"]
    report = named(audit(of(SPECS["sections in turn"]), spec=spec, **QUICK), "axes")
    (finding,) = report.findings
    assert finding.evidence == (
        "coordinate 0 does not turn pair 1 (channels 1 and 17), which is declared for coordinate 0"
    )


def test_wrong_frequencies_of_text_are_found_before_axes() -> None:
    other = RopeSpec(32, base=1e4, axes=Axes.sections((6, 5, 5)))
    report = audit(of(other), spec=SPECS["sections"], **QUICK)
    assert "base" in report.codes
    assert "axes" not in report.codes


@pytest.mark.parametrize("outer", [False, True])
def test_a_model_with_sections_is_audited_against_them(outer: bool) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = {**sizes, "num_key_value_heads": 2, "rope_parameters": rope}
    config = transformers.Qwen2VLTextConfig(**text)
    if outer:
        config = transformers.Qwen2VLConfig(text_config=text)
    report = named(audit(config, **QUICK))
    assert report.facts["declared"] == repr(SPECS["sections"])
    assert "each coordinate turns its own pairs" in {check.name for check in report.checks}


def test_heads_that_differ_cannot_be_compared_with() -> None:
    spec = RopeSpec(8, scaling=Given(((1.0,) * 4, (0.5,) * 4)))
    text = (
        "spec must have the same frequencies for all heads, as the audit measures one head, but got"
    )
    with refused(ValueError, f"[audit] {text} {spec!r}."):
        audit(rotate, spec=spec)
