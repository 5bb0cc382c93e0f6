"""Commands in processes of their own: imports, a missing `tools` extra, Ctrl-C, closed pipes, kills, memory."""

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
from tests.support.checkpoints import LLAMA, contents, llama_tensors, write
from tests.support.command import call, interrupted, python
from tests.support.helpers import ROOT
from tightrope import RopeSpec
from tightrope_tools import command

COMMANDS = ("inspect", "audit", "convert", "detect", "info")
PYPROJECT = ROOT / "pyproject.toml"
COMMAND = [sys.executable, "-m", "tightrope_tools"]
# The entry point of the installed `tightrope`.
ENTRY = re.search(
    r'^tightrope = "(\w+(?:\.\w+)*):main"', PYPROJECT.read_text("utf-8"), re.MULTILINE
)
SCRIPT = f"import sys; from {ENTRY and ENTRY[1]} import main; sys.exit(main())"


def imports(*arguments: str) -> tuple[str, set[str]]:
    """Run the command line, which must succeed; return its output, and the modules that it imported."""
    start = "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))"
    done = python("-c", f"{start}; {SCRIPT}", *arguments)
    assert done.returncode == 0
    return done.stdout, set(done.stderr.split())


# --- the command line itself ----------------------------------------------------------------------


def test_version_of_source_that_is_not_installed() -> None:
    code = (
        "import importlib.metadata as metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import tightrope\n"
        "print(tightrope.__version__)"
    )
    assert python("-c", code).stdout == "0+uninstalled\n"


WITHOUT = "import sys; sys.modules.update(dict.fromkeys({0!r}));" + SCRIPT


@pytest.mark.parametrize(
    "missing", [("matplotlib", "safetensors"), ("matplotlib",), ("safetensors",)]
)
def test_without_the_extra(missing: tuple[str, ...]) -> None:
    done = python("-c", WITHOUT.format(missing), "info")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(
        f"The tightrope command needs {', '.join(missing)}. Install with "
    )
    done = python("-c", WITHOUT.format(missing), "inspect", "--help")
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


@pytest.mark.parametrize("arguments", ["--version", "--help", *(f"{c} --help" for c in COMMANDS)])
def test_help_and_version_import_nothing_heavy(arguments: str) -> None:
    output, imported = imports(*arguments.split())
    assert output == f"tightrope {tightrope.__version__}\n" or "usage" in output
    assert {"torch", "numpy", "tightrope", "matplotlib"}.isdisjoint(imported)


def test_ctrl_c_is_one_line_and_may_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert call(command.main, "info")[0] == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, heard)
    monkeypatch.setattr("tightrope_tools.cli.info.run", stopped)
    assert call(command.main, "info") == (130, "", "Interrupted.\n")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n", encoding="utf-8"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    made = interrupted(SCRIPT, "info", at="importing", PYTHONPATH=paths)
    assert made == (-signal.SIGINT, "")  # of which a shell makes 130


@pytest.mark.one_in(6)
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX pipes")
@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "inspect {spec}",
        "audit llama --no-isolate --json",
        "info --json",
        "convert {folder}/model.safetensors {folder}/out.safetensors --naming=llama --heads=2 --head-dim=8 "
        "--from=half --to=interleaved",
    ],
)
def test_a_closed_pipe_is_no_finding(tmp_path: Path, arguments: str) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(RopeSpec(64).to_dict()), encoding="utf-8")
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qk"]
    save_file({name: torch.zeros(16, 16) for name in names}, tmp_path / "model.safetensors")
    given = [word.format(spec=spec, folder=tmp_path) for word in arguments.split()]
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", SCRIPT, *given]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 141, done.stderr
    assert "rror" not in done.stderr
    assert not any(path.name.endswith("partial") for path in tmp_path.iterdir())


# --- audit and convert ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_ends_both_processes_of_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import sys, time\nsys.stderr.write('begun\\n')\nsys.stderr.flush()\ntime.sleep(60)\n"
    Path("slow_rope.py").write_text(text, encoding="utf-8")
    paths = f"{ROOT}:{ROOT / 'src'}"
    code, rest = interrupted(SCRIPT, "audit", "slow_rope:f", at="begun", PYTHONPATH=paths)
    assert code == 130
    assert "Traceback" not in rest


def test_wrong_use_that_the_other_process_finds(capfd: pytest.CaptureFixture[str]) -> None:
    name = "tests.tools.cli.audited"
    code, output, error = call(command.main, "audit", "--isolate", f"{name}:f")
    assert (code, output) == (2, "")
    error += "".join(capfd.readouterr())
    assert f"module '{name}' must define 'f' but does not" in error
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize("step", ["read_header", "reorder", "compare"])
def test_ctrl_c_removes_written_files(tmp_path: Path, step: str) -> None:
    # The step waits, so that the signal arrives before it.
    script = (
        "import sys, time; from tightrope_tools.convert import run\n"
        "def slow(*_): print('begun', flush=True); time.sleep(30)\n"
        f"run.{step} = slow\n"
        "from tightrope_tools.command import main; sys.exit(main())"
    )
    source = write(tmp_path / "model", llama_tensors(), shards=2)
    before = contents(source)
    arguments = [
        "convert",
        str(source),
        str(tmp_path / "out"),
        "--to",
        "interleaved",
        "--json",
        "--verify",
    ]
    for sent, wanted, left in (
        (signal.SIGKILL, -9, {"model", "out.partial"}),
        (signal.SIGINT, 130, {"model"}),
    ):
        code, rest = interrupted(script, *arguments, at="begun", sent=sent)
        assert code == wanted
        assert "Traceback" not in rest
        assert {path.name for path in tmp_path.iterdir()} == left
        assert contents(source) == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from Linux")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Converting 220 MB takes at most 128 MB more than `tightrope info`, there and back, and the bytes are the same."""
    config = {**LLAMA, "hidden_size": 1024, "num_hidden_layers": 40}
    tensors = llama_tensors(config, dtype=torch.bfloat16)
    source = write(tmp_path / "model", tensors, config, shards=16)
    script = (
        "import sys; from tightrope_tools.command import main; code = main()\n"
        "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')])\n"
        "sys.exit(code)"
    )

    def peak(*arguments: object) -> int:
        done = python("-c", script, *arguments)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-2]) // 1024

    before = peak("info")
    assert peak("convert", source, tmp_path / "there", "--to", "interleaved") < before + 128
    back = tmp_path / "back"
    assert peak("convert", tmp_path / "there", back, "--to", "half", "--verify") < before + 128
    for shard in source.glob("*.safetensors"):
        assert (back / shard.name).read_bytes() == shard.read_bytes()
        assert (tmp_path / "there" / shard.name).read_bytes() != shard.read_bytes()
