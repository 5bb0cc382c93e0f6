"""The command line: commands end to end, Ctrl-C, wrong options, and a missing `cli` extra."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

import tightrope
from tests.support.helpers import ROOT
from tightrope import RopeSpec, environment
from tightrope.cli import app
from tightrope.cli._console import Ticker
from tightrope.cli._interrupt import Interrupt
from tightrope.examples import train_bytes
from tightrope.examples.train_bytes import Attention, ByteTransformer, Size
from tightrope.workbench.demo import polar
from tightrope.workbench.demo.rotations import EagerAttention, is_steady, seconds
from tightrope.workbench.text import duration

PYPROJECT = ROOT / "pyproject.toml"
PNG = b"\x89PNG\r\n\x1a\n"
COMMAND = [sys.executable, "-m", "tightrope.cli"]
# The entry point of the installed `tightrope`.
ENTRY = re.search(
    r'^tightrope = "(\w+(?:\.\w+)*):main"', PYPROJECT.read_text("utf-8"), re.MULTILINE
)
SCRIPT = f"import sys; from {ENTRY and ENTRY[1]} import main; sys.exit(main())"
# A hidden option: a toy model and short timings, so that every part of the demo runs quickly.
TINY = ["demo", "--size", "tiny"]


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process, like the entry point, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["tightrope", *arguments])
    return app.run()


def numbers_in(folder: Path) -> dict[str, Any]:
    assert (folder / "demo.png").read_bytes().startswith(PNG)
    numbers: dict[str, Any] = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    return numbers


# --- demo -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Numbers and output of one small demo."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    result = CliRunner().invoke(app.app, [*TINY, "--steps", "12", "--seed", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return numbers_in(out), result.output


def test_demo_trains_both_models(demo: tuple[dict[str, Any], str]) -> None:
    training = demo[0]["training"]
    assert training["steps"] == 12
    assert set(training["runs"]) == {"tightrope", "eager"}
    for run in training["runs"].values():
        assert len(run["losses"]) == len(run["step_seconds"]) == 12
        assert run["losses"][-1] < run["losses"][0]
        assert 0 < run["validation_nats_per_byte"] < run["losses"][0]
        assert run["median_step_seconds"] > 0


def test_demo_curves_coincide(demo: tuple[dict[str, Any], str]) -> None:
    # The loss of a toy model hardly depends on positions: after twelve steps, losses differ by about
    # 5e-7, even with a base 1 % too low. The gradients of the first step differ by 1e-7, with that
    # base by 2e-6, and with the other pairing by 1e-3.
    training = demo[0]["training"]
    assert training["max_loss_difference"] < 1e-5
    difference = training["first_gradient_relative_difference"]
    assert difference < 5e-7
    assert training["wrong_base_gradient_relative_difference"] > 5 * difference


def test_demo_decodes_as_it_reads(demo: tuple[dict[str, Any], str]) -> None:
    sample = demo[0]["sample"]
    assert sample["text"].startswith(sample["prompt"])
    assert sample["logit_difference"] < 1e-4


def test_demo_times_every_case(demo: tuple[dict[str, Any], str]) -> None:
    timings = demo[0]["timings"]
    assert len(timings["cases"]) == 10
    for case in [*timings["cases"], timings["in_model"]]:
        assert min(seconds(case, name) for name in ("tightrope", "eager", "floor")) > 0
        assert {len(runs) for runs in case["seconds"].values()} == {3}


def test_demo_trains_polar_attention_beside_plain(demo: tuple[dict[str, Any], str]) -> None:
    numbers = demo[0]["polar"]
    assert numbers["steps"] == 12
    assert set(numbers["runs"]) == {"polar", "plain RoPE"}
    for run in numbers["runs"].values():
        assert len(run["losses"]) == len(run["step_seconds"]) == 12
        assert run["losses"][-1] < run["losses"][0]
        places, stretches = run["nats_per_byte_by_position"], run["nats_per_byte_by_stretch"]
        assert len(places) == 4 * numbers["model"]["context"]
        assert len(stretches) == 4
        assert sum(stretches) / 4 == pytest.approx(sum(places) / len(places))
        assert 0 < max(places) < run["losses"][0]
    first, second = (run["losses"] for run in numbers["runs"].values())
    assert first != second


def test_demo_gates_learn(demo: tuple[dict[str, Any], str]) -> None:
    numbers = demo[0]["polar"]
    model = numbers["model"]
    assert len(numbers["half_distances"]) == model["head_dim"] // 2
    for pair in numbers["half_distances"]:
        assert len(pair) == model["layers"] * model["heads"]
        assert all(0 < distance < 100 for distance in pair)
    every = {distance for pair in numbers["half_distances"] for distance in pair}
    assert len(every) == model["head_dim"] // 2 * model["layers"] * model["heads"]


def test_models_of_the_second_part_begin_alike() -> None:
    contest = polar.set_up(Size(layers=2, heads=2, head_dim=8, context=8, batch=1), seed=0)
    gated, plain = (dict(run.model.named_parameters()) for run in contest.race.runs)
    assert plain.keys() < gated.keys()
    assert all(torch.equal(gated[name], weight) for name, weight in plain.items())
    assert {name.rsplit(".")[-1] for name in gated.keys() - plain.keys()} == {"gamma", "log_rate"}


def test_a_pair_decays_by_its_rate() -> None:
    size = Size(layers=1, heads=1, head_dim=2, context=4, batch=1)
    attention = polar.PolarAttention(size, gated=True)
    assert attention.log_rate is not None
    with torch.no_grad():
        # x is rotated back first, so all rotated queries and keys are (2, 2), and scores differ
        # only by decay.
        attention.log_rate.fill_(0.0)
        for name, weight in attention.attention.named_parameters():
            if name.endswith("weight"):
                weight.copy_(torch.eye(2) * (2 if "q_proj" in name or "k_proj" in name else 1))
        spec = RopeSpec(2, interleaved=True)
        x = tightrope.functional.rotate(torch.ones(1, 4, 2), spec, layout="bsd", inverse=True)
        got = attention(x, 0, None)
    distance = torch.arange(4.0)
    distance = (distance[:, None] - distance).masked_fill(
        torch.ones(4, 4).triu(1).bool(), torch.inf
    )
    scores = (8 / 2**0.5) * torch.exp(-distance)
    want = scores.masked_fill(distance.isinf(), -torch.inf).softmax(-1) @ x
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_the_second_part_counts_by_stretch() -> None:
    size = Size(layers=1, heads=1, head_dim=2, context=2, batch=1)
    contest = polar.set_up(size, seed=0)
    assert contest.past_length("polar") is None
    contest.by_position = {"polar": [1.0, 3.0, 5.0, 5.0, 7.0, 9.0, 2.0, 4.0]}
    assert contest.stretches("polar") == [2.0, 5.0, 8.0, 3.0]
    assert contest.past_length("polar") == pytest.approx(16 / 3 - 2)


def test_demo_describes_its_comparison(demo: tuple[dict[str, Any], str]) -> None:
    numbers, output = demo
    assert numbers["seed"] == 3
    assert not numbers["interrupted"]
    for text in (tightrope.__version__, torch.__version__, "seed 3", "curves", "bits per byte"):
        assert text in output
    for text in ("polar", "plain RoPE", "past training", "learned gates"):
        assert text in output
    assert output.count("training 100%") == output.count("polar attention 100%") == 1
    assert "\x1b" not in output


@pytest.mark.parametrize("runs, steady", [((1.0, 1.1, 1.2), True), ((1.0, 1.1, 4.0), False)])
def test_a_busy_machine_is_noticed(runs: tuple[float, ...], steady: bool) -> None:
    timing = {"seconds": {"tightrope": runs, "eager": (1.0, 1.0, 1.0), "neg_": (1.0, 1.0, 1.0)}}
    assert is_steady(timing) is steady
    assert seconds(timing, "tightrope") == 1.1


def test_demo_ends_when_its_seconds_are_over(tmp_path: Path) -> None:
    result = CliRunner().invoke(app.app, [*TINY, "--seconds", "0.2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert numbers_in(tmp_path)["training"]["steps"] > 0


@pytest.mark.slow
def test_demo_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    command = [*COMMAND, *TINY, "--seconds", "100", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("training"):
                break
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 130
    assert "Stopped by Ctrl-C" in output
    assert str(tmp_path / "demo.png") in output
    numbers = numbers_in(tmp_path)
    assert numbers["interrupted"]
    assert numbers["timings"]["cases"] == []
    assert numbers["polar"]["steps"] == 0


def test_demo_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_bytes.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    result = CliRunner().invoke(app.app, [*TINY, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds too few .py files" in result.stderr


def test_text_is_split_by_file(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"file_{index}.py").write_bytes(bytes([index]) * 6000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_bytes(b"\xff" * 6000)
    corpus = train_bytes.load_text(tmp_path)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert corpus.files == 40
    assert (len(train), len(validation)) == (36, 4)
    assert train.isdisjoint(validation)
    assert corpus.sha256 == train_bytes.load_text(tmp_path).sha256


@pytest.mark.parametrize("offset", [0, 5])
def test_rotations_agree(offset: int) -> None:
    q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16)
    size = Size(heads=4, head_dim=16)
    ours = Attention(size).rotate(q, k, offset)
    eager = EagerAttention(size).rotate(q, k, offset)
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5)


def test_the_example_runs_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Size(layers=1, heads=2, head_dim=8, context=16, batch=2)
    monkeypatch.setattr(train_bytes, "Size", lambda: small)
    train_bytes.main(["--steps", "21", "--seed", "1"])
    output = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", output))
    assert last < first
    assert "validation" in output
    assert "\ndef " in output


def test_the_example_decodes_as_it_reads() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(Size(layers=2, heads=2, head_dim=8))
    found = list(train_bytes.write(model, "abc", 5))
    tokens = torch.tensor([[*b"abc", *(token for token, _ in found)]])
    want = model(tokens)[0, 2:-1]
    torch.testing.assert_close(torch.stack([logits for _, logits in found]), want)


@pytest.mark.parametrize(
    "time, output",
    [
        (2.5, "2.50 s"),
        (0.1234, "123 ms"),
        (0.0123, "12.3 ms"),
        (4.567e-6, "4.57 us"),
        (1e-8, "0.01 us"),
    ],
)
def test_duration(time: float, output: str) -> None:
    assert duration(time) == output


def test_progress_off_a_terminal_is_a_few_plain_lines() -> None:
    console = Console(file=io.StringIO())
    with Ticker(console, "work") as ticker:
        for index in range(101):
            ticker.update(index / 100, f"[{index}]")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "work   0%  [0]"
    assert lines[-1] == "work 100%  [100]"


# --- info -----------------------------------------------------------------------------------------


def test_info_as_json() -> None:
    result = CliRunner().invoke(app.app, ["info", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["tightrope"] == tightrope.__version__
    assert found["torch"] == torch.__version__
    assert found["backends"] == tightrope.backends.why_not()
    assert found["runs"] == tightrope.which(torch.zeros(2))[0]
    assert found["threads"] == torch.get_num_threads()


def test_info_names_every_backend() -> None:
    output = CliRunner().invoke(app.app, ["info"]).output
    for name in tightrope.backends.why_not():
        assert f"backend {name}" in output


def test_info_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, a processor without a name, no git, no library, and a slow backend."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(environment, "which", lambda _: ("reference", "the reason"))
    monkeypatch.setattr(environment.cpu, "instruction_set", lambda: None)
    monkeypatch.setattr(environment, "Path", lambda _: Path("nowhere/a/b/c/d"))
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    found = environment.read_environment()
    assert found.gpus == ["GPU 0", "GPU 1"]
    assert found.why_no_gpu is found.commit is None
    assert found.processor == platform.machine()
    assert found.cores == os.cpu_count()
    monkeypatch.setattr("tightrope.cli.info.read_environment", lambda: found)
    output = " ".join(CliRunner().invoke(app.app, ["info"]).output.split())
    assert "gpu GPU 0, GPU 1" in output
    assert "the native library is not loaded" in output
    assert "why not faster the reason" in output
    assert "not installed no-such-package" in output


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, words in (("13.0", "torch finds no GPU"), (None, "torch was built for the CPU")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        assert words in (environment.read_environment().why_no_gpu or "")


def test_a_commit_that_git_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment.read_environment().commit is None


# --- the command line itself ----------------------------------------------------------------------


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"tightrope {tightrope.__version__}\n"


def test_version_of_source_that_is_not_installed() -> None:
    code = (
        "import importlib.metadata as metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import tightrope\n"
        "print(tightrope.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0+uninstalled\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"], ["info", "--help"]])
def test_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run_here(monkeypatch, *arguments) == 0
    output = capsys.readouterr().out
    assert "Example" in output
    assert f"tightrope {arguments[0] if arguments[1:] else 'demo'}" in output
    assert "--size" not in output


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--seconds", "inf"], "--seconds must be a finite number but got inf"),
        (["demo", "--seconds", "soon"], "--seconds"),
        (["demo", "--out", __file__], "test_command.py"),
        (["demo", "--out", f"{__file__}/below"], "Not a directory"),
        (["demo", "--sped"], "--sped"),
        (["sing"], "sing"),
    ],
)
def test_a_wrong_option_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    about: str,
) -> None:
    assert run_here(monkeypatch, *arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("Error: ")
    assert about in error
    assert error.count("\n") == 1


def test_without_the_extra() -> None:
    script = (
        "import sys; sys.modules['typer'] = sys.modules['rich'] = None;"
        "from tightrope.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "demo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "The tightrope command needs typer, rich. "
        'Install with `python -m pip install "tightrope[cli]"`, or in a clone of the repository with '
        "`pip install --no-build-isolation '.[cli]'`."
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help", 0),
        ("info", 0),
        ("demo", 2),
        ("inspect spec.json --plot x.png", 2),
    ],
)
def test_only_pictures_need_matplotlib(tmp_path: Path, arguments: str, code: int) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(RopeSpec(128).to_dict()), encoding="utf-8")
    script = (
        "import sys; sys.modules['matplotlib'] = sys.modules['safetensors'] = None;"
        "from tightrope.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, *arguments.split()]
    # The demo imports the benchmarks of the clone.
    paths = os.pathsep.join([str(PYPROJECT.parent), *sys.path])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]
    if code:
        assert done.stderr == (
            "Error: The tightrope command needs matplotlib. Install with `python -m pip install "
            '"tightrope[cli]"`, or in a clone of the repository with '
            "`pip install --no-build-isolation '.[cli]'`. Only pictures need it.\n"
        )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has this device")
@pytest.mark.parametrize(
    "arguments", [["inspect"], ["audit", "llama", "--no-isolate", "--json", "--meant"]]
)
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(RopeSpec(128).to_dict()), encoding="utf-8")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments, str(spec)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "Error: the output could not be written: No space left on device.\n"


def test_version_imports_nothing_heavy() -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)));"
        f"sys.argv[1:] = ['--version']; {SCRIPT}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"tightrope {tightrope.__version__}\n")
    assert {"torch", "numpy", "typer", "rich", "tightrope"}.isdisjoint(done.stderr.split())


def test_ctrl_c_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", stopped)
    assert tightrope.cli.main() == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_the_second_ctrl_c_interrupts_a_loop() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n", encoding="utf-8"
    )
    # Processes started in the background by a shell inherit an ignored SIGINT.
    script = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {SCRIPT}"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", script, "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "Interrupted.\n")


@pytest.mark.one_in(11)
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX pipes")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["inspect", "{spec}"],
        ["inspect", "{spec}", "--json"],
        ["audit", "llama", "--no-isolate", "--json"],
        ["audit", "llama", "--no-isolate"],
        ["info"],
        ["info", "--json"],
        ["demo", "--size", "tiny", "--steps", "1", "--out", "{folder}/demo"],
        ["detect", "{folder}/model.safetensors", "--heads=2", "--head-dim=8", "--naming=llama"],
        [
            *(
                "convert",
                "{folder}/model.safetensors",
                "{folder}/out.safetensors",
                "--naming",
                "llama",
            ),
            *("--heads", "2", "--head-dim", "8", "--from", "half", "--to", "interleaved"),
        ],
    ],
    ids=" ".join,
)
def test_a_closed_pipe_is_no_finding(tmp_path: Path, arguments: list[str]) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(RopeSpec(64).to_dict()), encoding="utf-8")
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qk"]
    save_file({name: torch.zeros(16, 16) for name in names}, tmp_path / "model.safetensors")
    given = [word.format(spec=spec, folder=tmp_path) for word in arguments]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert done.returncode == 141, done.stderr
    assert "rror" not in done.stderr
    assert not any(path.name.endswith("partial") for path in tmp_path.iterdir())
