"""The demo, `examples/demo.py`: end to end as a process, its verdict, its picture and its arguments."""

from __future__ import annotations

import math
import re
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.command import interrupted, python
from tests.support.helpers import ROOT

EXAMPLES = ROOT / "examples"
PNG = b"\x89PNG\r\n\x1a\n"
QUICK = ["--quick", "--steps", "40"]
# A number, with its exponent if it has one.
NUMBER = r"(?:\d+(?:\.\d+)?(?:e[-+]\d+)?)"


@pytest.fixture
def demo() -> ModuleType:
    """The module, imported as it is when Python starts the script."""
    pytest.importorskip("matplotlib")
    import demo

    return demo


def start(*arguments: str, **variables: str) -> CompletedProcess[str]:
    """Run the demo as a process."""
    return python(EXAMPLES / "demo.py", *arguments, **{"OMP_NUM_THREADS": "1", **variables})


def results(demo: ModuleType, gradient: float = 0.0, **gaps: list[float]) -> Any:
    """Results with the given differences, and made-up numbers in the other places."""
    size = demo.Size(1, 1, 2, context=4, batch=1)
    by_position = {name: [1.0] * 4 + [2.0] * 12 for name in demo.READ}
    timing = demo.Timing("float32, 1 token", "2 → 1 ms", 2.0)
    losses = {name: [5.0, 4.0, 3.0] for name in demo.ATTENTIONS}
    usual = {"tightrope": [0.0], "wrong base": [0.1]}
    return demo.Results(size, losses, usual | gaps, gradient, by_position, [timing])


# --- as a process ---------------------------------------------------------------------------------


def test_it_runs_to_the_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    done = start(*QUICK, "--seed", "3", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    picture = out / "tightrope-demo.png"
    assert picture.read_bytes().startswith(PNG)
    progress, _, summary = done.stdout.partition("\n\n")
    assert [line[:6] for line in progress.splitlines() if " of 3" in line] == [
        "1 of 3",
        "2 of 3",
        "3 of 3",
    ]
    assert len(re.findall(r"^  step +\d+  loss: .* about \d+ s left$", progress, re.M)) >= 10
    assert "step   40" in progress
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    for panel, numbers in {"(a)": 3, "(b)": 2, "(c)": 4, "(d)": 3}.items():
        lines = [line for line in summary.splitlines() if line.startswith(panel)]
        assert lines
        for line in lines:
            assert len(re.findall(NUMBER, line)) >= numbers, line
            assert "nan" not in line
            assert "inf" not in line
    assert "The two rotations agree" in summary
    assert str(picture) in summary


@pytest.mark.slow
def test_it_runs_on_plain_torch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = start("--quick", "--steps", "5", "--out", str(tmp_path), TIGHTROPE_NATIVE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs plain torch (cpu: the native library is switched off" in done.stdout
    assert "The two rotations agree" in done.stdout


@pytest.mark.slow
def test_ctrl_c_ends_it_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_module('demo', run_name='__main__')"
    options = "--seconds", "100", "--out", str(tmp_path)
    code, rest = interrupted(script, *options, at="1 of 3", PYTHONUNBUFFERED="1")
    assert (code, rest.splitlines()[-1]) == (130, "Stopped by Ctrl-C.")
    assert "Traceback" not in rest


def test_without_matplotlib_it_says_how_to_install_it(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.modules['matplotlib'] = None\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_module('demo')"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("Install it: pip install matplotlib")


# --- the verdict ----------------------------------------------------------------------------------


def test_a_wrong_rotation_is_noticed(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "eager_rotate", lambda x, *_: x)
    assert demo.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert "THE TWO ROTATIONS DIFFER" in capsys.readouterr().out
    assert (tmp_path / "tightrope-demo.png").exists()


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
    # The difference is in the first step, as a maximum ignores a NaN that comes later.
    gaps = {"tightrope": [0.0, ours], "wrong base": [0.0, wrong]}
    assert demo.summarize(results(demo, gradient, **gaps)) is agree
    assert sentence in capsys.readouterr().out


# --- its parts ------------------------------------------------------------------------------------


def test_the_picture_has_four_panels(demo: ModuleType) -> None:
    gaps = {"tightrope": [0.0, 1e-7, 0.0], "wrong base": [0.1, 0.1, 0.1]}
    figure = demo.draw(results(demo, **gaps), "a caption")
    assert [axes.get_title()[:3] for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_legend() is not None
    a, b, c, d = figure.axes
    assert [len(line.get_xdata()) for line in a.lines] == [3, 3]
    assert b.get_yscale() == "log"
    assert min(b.lines[0].get_ydata()) > 0
    assert [bar.get_width() for bar in c.patches] == [2.0]
    assert [max(line.get_xdata()) for line in d.lines] == [15, 15]
    assert [line.get_ydata().tolist() for line in d.lines] == [[1.0] * 2 + [2.0] * 6] * 2


def test_rotations_agree(demo: ModuleType) -> None:
    q, k, size = torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16), demo.Size(heads=4, head_dim=16)
    ours, eager = (each(size).rotate(q, k, 5) for each in (demo.Attention, demo.EagerAttention))
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5)


def test_polar_scores_fade_with_distance(demo: ModuleType) -> None:
    attention = demo.PolarAttention(demo.Size(heads=2, head_dim=8, context=10))
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    plain, polar = demo.Attention.rotate(attention, q, k, 3), attention.rotate(q, k, 3)
    position = torch.arange(6.0)
    fade = torch.exp(-(position[:, None] - position) / 10)
    want = plain[0] @ plain[1].mT * fade
    torch.testing.assert_close(polar[0] @ polar[1].mT, want, rtol=1e-4, atol=1e-4)


def test_the_seed_decides_and_weights_are_the_same(demo: ModuleType) -> None:
    size, text = demo.Size(1, 2, 8, context=8, batch=2), demo.train_bytes.load_text()

    def losses(seed: int) -> dict[str, list[float]]:
        options = demo.argparse.Namespace(steps=3, seconds=1.0, seed=seed)
        trainers, gaps, _ = demo.train(size, text, options)
        return {name: each.losses for name, each in trainers.items()} | {"gaps": gaps["tightrope"]}

    first = losses(0)
    assert first == losses(0) != losses(1)
    assert {len(each) for each in first.values()} == {3}
    weights = []
    for attention in demo.ATTENTIONS.values():
        torch.manual_seed(0)
        weights.append(dict(demo.ByteTransformer(size, attention).named_parameters()))
    for other in weights[1:]:
        assert all(torch.equal(other[name], weight) for name, weight in weights[0].items())


def test_training_ends_when_its_seconds_are_over(demo: ModuleType) -> None:
    size, text = demo.Size(1, 2, 8, context=8, batch=2), demo.train_bytes.load_text()
    options = demo.argparse.Namespace(steps=None, seconds=0.3, seed=0)
    assert len(demo.train(size, text, options)[0]["eager"].losses) > 0


def test_losses_and_gradients_at_the_same_weights(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers follow the weights as they train; a fault in the backward alone is in the gradient."""
    size, text = demo.Size(2, 2, 32, context=64, batch=4), demo.train_bytes.load_text()
    options = demo.argparse.Namespace(steps=40, seconds=1.0, seed=0)
    _, gaps, gradient = demo.train(size, text, options)
    assert max(gaps["tightrope"]) < 1e-5 < max(gaps["wrong base"])
    assert gradient < 1e-6

    class WrongBackward(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 1.1 * gradient

    right = demo.eager_rotate
    monkeypatch.setattr(
        demo, "eager_rotate", lambda x, cos, sin: WrongBackward.apply(right(x, cos, sin))
    )
    _, gaps, gradient = demo.train(size, text, options)
    assert max(gaps["tightrope"]) < 1e-5
    assert gradient > demo.GRADIENT_TOLERANCE


# --- its arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "--seconds and --steps must be positive and finite"),
        (["--seconds", "nan"], "--seconds and --steps must be positive and finite"),
    ],
)
def test_wrong_arguments(
    demo: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments)
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(demo: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"The demo stopped: .*test_demo\.py"):
        demo.main(["--out", __file__])


def test_no_text_to_train_on(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo.train_bytes.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")}
    )
    with pytest.raises(SystemExit, match=r"holds too few \.py files"):
        demo.main(["--out", str(tmp_path)])
