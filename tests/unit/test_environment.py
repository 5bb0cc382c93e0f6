"""`python -m tightrope` and `read_environment`: this machine, others, and facts that are unknown."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tightrope import __main__ as program, environment


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
    rows = dict(found.rows())
    assert rows["gpu"] == "GPU 0, GPU 1"
    assert rows["instruction set"] == "the native library is not loaded"
    assert rows["why not faster"] == "the reason"
    assert rows["not installed"] == "no-such-package"


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, words in (("13.0", "torch finds no GPU"), (None, "torch was built for the CPU")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        assert words in (environment.read_environment().why_no_gpu or "")


def test_a_commit_that_git_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment.read_environment().commit is None


def test_the_module_prints_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tightrope"])
    assert program.main() == 0
    *lines, _, tools = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        name for name, _ in environment.read_environment().rows()
    ]
    assert "tightrope --help" in tools
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert program.main() == 0
    assert "pip install 'tightrope[tools]'" in capsys.readouterr().out.splitlines()[-1]


def test_the_module_takes_no_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tightrope", "inspect"])
    assert program.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_program_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tightrope"], capture_output=True, text=True, check=True
    )
    assert f"torch {torch.__version__}" in " ".join(done.stdout.split())
