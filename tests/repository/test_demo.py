"""The demo, `examples/demo.py`: end to end as a process, its verdict, its training and its arguments."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.command import interrupted, python
from tests.support.helpers import ROOT, Scaled

EXAMPLES = ROOT / "examples"
QUICK = ["--quick", "--steps", "40"]
# What Python does when it starts the script.
START = f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_module('demo', run_name='__main__')"


@pytest.fixture
def demo() -> ModuleType:
    """The module, imported as it is when Python starts the script."""
    pytest.importorskip("matplotlib")
    import demo

    return demo


@pytest.mark.parametrize(
    "native", [pytest.param("", id="kernel"), pytest.param("0", marks=pytest.mark.slow)]
)
def test_it_runs_to_the_end(native: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    variables = {"TIGHTROPE_NATIVE": native} if native else {}
    script = EXAMPLES / "demo.py"
    done = python(script, *QUICK, "--out", out, OMP_NUM_THREADS="1", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("runs plain torch" in done.stdout) >= (native == "0")
    picture = out / "tightrope-demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    progress, _, summary = done.stdout.partition("\n\n")
    assert "step   40" in progress
    for panel, numbers in {"(a)": 3, "(b)": 2, "(c)": 4, "(d)": 3}.items():
        lines = [line for line in summary.splitlines() if line.startswith(panel)]
        assert lines
        assert all(len(re.findall(r"\d+(?:\.\d+)?", line)) >= numbers for line in lines), summary
        assert not any(re.search("nan|inf", line) for line in lines)
    assert "The two rotations agree" in summary
    assert str(picture) in summary


@pytest.mark.slow
def test_ctrl_c_ends_it_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = "--seconds", "100", "--out", str(tmp_path)
    code, rest = interrupted(START, *options, at="1 of 3", PYTHONUNBUFFERED="1")
    assert (code, rest.splitlines()[-1]) == (130, "Stopped by Ctrl-C.")
    assert "Traceback" not in rest


def test_without_matplotlib_it_says_how_to_install_it(tmp_path: Path) -> None:
    done = python("-c", f"import sys; sys.modules['matplotlib'] = None; {START}", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("Install it: pip install matplotlib")


@pytest.mark.parametrize("fault", ["unrotated", "backward"])
def test_a_wrong_rotation_is_noticed(
    demo: ModuleType,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = demo.eager_rotate

    def rotated(x: torch.Tensor, *tables: torch.Tensor) -> Any:
        return x if fault == "unrotated" else Scaled.apply(right(x, *tables), 1.1)

    monkeypatch.setattr(demo, "eager_rotate", rotated)
    assert demo.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert "THE TWO ROTATIONS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    "ours, gradient, wrong, agree, sentence",
    [
        (5e-6, 5e-5, 0.1, True, "a wrong base would have been noticed"),
        (5e-6, 5e-5, 0.0, True, "in so few steps a wrong base would pass too"),
        (2e-5, 0.0, 0.1, False, "THE TWO ROTATIONS DIFFER"),
        (0.0, 2e-4, 0.1, False, "THE TWO ROTATIONS DIFFER"),
        (math.nan, 0.0, 0.1, False, "THE TWO ROTATIONS DIFFER"),
        (0.0, math.nan, 0.1, False, "THE TWO ROTATIONS DIFFER"),
    ],
)
def test_the_tolerance_decides(
    demo: ModuleType,
    ours: float,
    gradient: float,
    wrong: float,
    agree: bool,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_position = {name: [1.0] * 16 for name in demo.READ}
    losses = {name: [5.0, 4.0, 3.0] for name in demo.ATTENTIONS}
    # The difference is in the first step, as a maximum ignores a NaN that comes later.
    gaps = {"tightrope": [0.0, ours], "wrong base": [0.0, wrong]}
    size, timing = demo.Size(1, 1, 2, context=4, batch=1), demo.Timing("any", "2 → 1 ms", 2.0)
    found = demo.Results(size, losses, gaps, gradient, by_position, [timing])
    assert demo.summarize(found) is agree
    assert sentence in capsys.readouterr().out


def test_polar_scores_fade_with_distance(demo: ModuleType) -> None:
    attention = demo.PolarAttention(demo.Size(heads=2, head_dim=8, context=10))
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    plain, polar = demo.Attention.rotate(attention, q, k, 3), attention.rotate(q, k, 3)
    position = torch.arange(6.0)
    want = plain[0] @ plain[1].mT * torch.exp(-(position[:, None] - position) / 10)
    torch.testing.assert_close(polar[0] @ polar[1].mT, want, rtol=1e-4, atol=1e-4)


def test_wrong_arguments(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--steps", "0"], ["--seconds", "nan"]):
        with pytest.raises(SystemExit, match="2"):
            demo.main(arguments)
        assert "--seconds and --steps must be positive and finite" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"The demo stopped: .*test_demo\.py"):
        demo.main(["--out", __file__])
