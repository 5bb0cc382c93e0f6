"""The command line: commands end to end, Ctrl-C, wrong options, and a missing `tools` extra."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tightrope
from tests.support.helpers import ROOT
from tightrope import RopeSpec, __main__ as program
from tightrope_tools import command
from tightrope_tools.cli._output import progress

COMMANDS = ("inspect", "audit", "convert", "detect", "info")
PYPROJECT = ROOT / "pyproject.toml"
PNG = b"\x89PNG\r\n\x1a\n"
COMMAND = [sys.executable, "-m", "tightrope_tools"]
# The entry point of the installed `tightrope`.
ENTRY = re.search(
    r'^tightrope = "(\w+(?:\.\w+)*):main"', PYPROJECT.read_text("utf-8"), re.MULTILINE
)
SCRIPT = f"import sys; from {ENTRY and ENTRY[1]} import main; sys.exit(main())"


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process, like the entry point, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["tightrope", *arguments])
    return command.main()


def test_progress_off_a_terminal_is_a_few_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work") as update:
        for index in range(101):
            update(index / 100, f"[{index}]")
    output, error = capsys.readouterr()
    assert output == ""
    lines = error.splitlines()
    assert len(lines) == 11
    assert lines[0] == "work   0%  [0]"
    assert lines[-1] == "work 100%  [100]"


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


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run_here(monkeypatch, *arguments) == 0
    output = capsys.readouterr().out
    assert "Example" in output
    assert f"tightrope {arguments[0] if arguments[1:] else 'inspect'}" in output


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["inspect", "--context", "soon"], "--context"),
        (["inspect", f"{__file__}/below"], "No such file or directory"),
        (["audit", "llama", "--sped"], "--sped"),
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


@pytest.mark.parametrize(
    "missing", [("matplotlib", "safetensors"), ("matplotlib",), ("safetensors",)]
)
def test_without_the_extra(missing: tuple[str, ...]) -> None:
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}));"
        "from tightrope_tools.command import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "info"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"The tightrope command needs {', '.join(missing)}. "
        'Install with `python -m pip install "tightrope[tools]"`, or in a clone of the repository with '
        "`pip install --no-build-isolation '.[tools]'`."
    ]


def test_help_needs_no_extra() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('matplotlib', 'safetensors')));"
        "from tightrope_tools.command import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


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


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)));"
        f"sys.argv[1:] = {arguments!r}; {SCRIPT}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage" in done.stdout
    assert {"torch", "numpy", "tightrope", "matplotlib"}.isdisjoint(done.stderr.split())


def test_the_packages_that_are_needed_are_those_of_the_extra() -> None:
    """The library and the command each have the list: neither may import the other to say what is missing."""
    extra = re.search(r"^tools = \[(.*?)\]", PYPROJECT.read_text("utf-8"), re.MULTILINE)
    assert extra is not None
    assert command.NEEDS == program.TOOLS == tuple(re.findall(r'"(\w+)"', extra[1]))


def test_version_imports_nothing_heavy() -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)));"
        f"sys.argv[1:] = ['--version']; {SCRIPT}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"tightrope {tightrope.__version__}\n")
    assert {"torch", "numpy", "matplotlib", "tightrope"}.isdisjoint(done.stderr.split())


def test_ctrl_c_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tightrope_tools.cli.info.run", stopped)
    assert run_here(monkeypatch, "info") == 130
    assert capsys.readouterr().err == "Interrupted.\n"


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
