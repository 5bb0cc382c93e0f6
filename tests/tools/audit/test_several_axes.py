"""Audits of rotations whose positions have several coordinates."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.helpers import ROOT
from tightrope import Axes, RopeSpec, positions
from tightrope.frequencies import Given, YaRN
from tightrope.functional import rotate
from tightrope_tools.audit import audit

Rope = Callable[..., torch.Tensor]
SPECS = {
    "sections": RopeSpec(32, base=1e6, axes=Axes.sections((6, 5, 5))),
    "sections in turn": RopeSpec(32, base=1e6, axes=Axes.sections((6, 5, 5), interleaved=True)),
    "blocks": RopeSpec(32, axes=Axes.blocks((8, 8))),
    "neighbours": RopeSpec(32, interleaved=True, axes=Axes.sections((8, 8))),
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
    report = audit(of(spec), spec=spec, dtypes=[torch.float32], longest=2**16)
    assert report.codes == (), report
    assert report.facts["declared"] == repr(spec)
    assert report.facts["positions"] == f"({spec.axis_count}, rows, tokens)"
    results = {check.name: check.outcome for check in report.checks}
    assert results["each coordinate turns its own pairs"] == "passed"


def test_coordinates_that_are_exchanged_are_found(tmp_path: Path) -> None:
    spec = SPECS["sections"]
    report = audit(of(SPECS["sections in turn"]), spec=spec, dtypes=[torch.float32], longest=2**16)
    assert report.codes == ("axes",)
    (finding,) = report.findings
    assert finding.evidence == (
        "coordinate 0 does not turn pair 1 (channels 1 and 17), which is declared for coordinate 0"
    )
    program = finding.snippet.replace(
        "# fn is the audited function",
        f"from {__name__} import SPECS, of\nfn = of(SPECS['sections in turn'])",
    )
    (tmp_path / "wrong.py").write_text(program, encoding="utf-8")
    right = program.replace("sections in turn", "sections")
    (tmp_path / "right.py").write_text(right, encoding="utf-8")
    # One process runs both programs: the right one ends, then the wrong one fails.
    both = (
        f"import runpy, sys; sys.path[:0] = {[str(ROOT), *sys.path]!r}\n"
        "runpy.run_path(sys.argv[1]); print('right'); runpy.run_path(sys.argv[2]); print('wrong')"
    )
    command = [sys.executable, "-c", both, str(tmp_path / "right.py"), str(tmp_path / "wrong.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["right"], done.stdout + done.stderr
    assert "AssertionError" in done.stderr


def test_wrong_frequencies_of_text_are_found_before_axes() -> None:
    other = RopeSpec(32, base=1e4, axes=Axes.sections((6, 5, 5)))
    report = audit(of(other), spec=SPECS["sections"], dtypes=[torch.float32], longest=2**16)
    assert "base" in report.codes
    assert "axes" not in report.codes


@pytest.mark.parametrize("outer", [False, True])
def test_a_model_with_sections_is_audited_against_them(outer: bool) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    text = {
        "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "rope_parameters": rope,
    }  # fmt: skip
    config = transformers.Qwen2VLTextConfig(**text)
    if outer:
        config = transformers.Qwen2VLConfig(text_config=text)
    report = audit(config, dtypes=[torch.float32], longest=2**16)
    assert report.codes == (), report
    assert report.facts["declared"] == repr(SPECS["sections"])
    assert "each coordinate turns its own pairs" in {check.name for check in report.checks}


@pytest.mark.parametrize(
    "spec, text",
    [
        (
            RopeSpec(8, scaling=Given(((1.0,) * 4, (0.5,) * 4))),
            "spec must have the same frequencies for all heads, as the audit measures one head, but got",
        ),
        (
            RopeSpec(16, scaling=YaRN(4.0, 4096), axes=Axes.blocks((4, 4))),
            "spec must not combine scaling with frequencies that restart with each axis, as the audit "
            "needs a spec of one axis that equals it on text, but got",
        ),
    ],
)
def test_specs_that_cannot_be_compared_with(spec: RopeSpec, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'[audit] {text} {spec!r}')}\\.$"):
        audit(rotate, spec=spec)
