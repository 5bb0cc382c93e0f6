"""The demo, `examples/demo.py`: end to end as a process, its verdict and its arguments."""

from __future__ import annotations

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


@pytest.mark.parametrize("fault", ["unrotated", "backward", "NaN"])
def test_a_wrong_rotation_is_noticed(
    demo: ModuleType, fault: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    right = demo.eager_rotate
    wrong = {
        "unrotated": lambda x, *_: x,
        "backward": lambda x, *tables: Scaled.apply(right(x, *tables), 1.1),
        "NaN": lambda x, *tables: right(x, *tables) * torch.nan,
    }
    monkeypatch.setattr(demo, "eager_rotate", wrong[fault])
    assert demo.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert "THE TWO ROTATIONS DIFFER" in capsys.readouterr().out


def test_wrong_arguments(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--steps", "0"], ["--seconds", "nan"]):
        with pytest.raises(SystemExit, match="2"):
            demo.main(arguments)
        assert "--seconds and --steps must be positive and finite" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"The demo stopped: .*test_demo\.py"):
        demo.main(["--out", __file__])
