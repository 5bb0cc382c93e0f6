"""`tightrope info`: words, JSON, a required backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tightrope
from tests.support.command import call
from tightrope.environment import PACKAGES, read_environment
from tightrope_tools.command import main


def run(*arguments: object, width: int = 80) -> tuple[int, str, str]:
    """Run one command; return its exit code, output and error stream."""
    return call(main, *arguments, width=width)


def test_info_as_json() -> None:
    code, output, _ = run("info", "--json")
    assert code == 0
    found = json.loads(output)
    assert found["tightrope"] == tightrope.__version__
    assert found["torch"] == torch.__version__
    assert found["backends"] == tightrope.backends.why_not()
    assert found["runs"] == tightrope.which(torch.zeros(2))[0]
    assert found["threads"] == torch.get_num_threads()


def test_info_names_every_backend() -> None:
    output = run("info")[1]
    for name in tightrope.backends.why_not():
        assert f"backend {name}" in output


@pytest.mark.parametrize("width", [80, 200])
def test_info_in_words(width: int) -> None:
    code, output, error = run("info", width=width)
    assert (code, error) == (0, "")
    assert max(map(len, output.splitlines())) <= width
    for name in ("processor", "threads", "instruction set", "gpu", "found"):
        assert f"\n{name}" in output


def test_info_has_the_facts_for_a_bug_report() -> None:
    found = json.loads(run("info", "--json")[1])
    assert set(found["packages"]) == set(PACKAGES)
    assert found["packages"]["matplotlib"] is not None
    assert found["cores"] >= 1
    assert Path(found["installed_at"]) == Path(tightrope.__file__).parent
    assert (found["why_no_gpu"] is None) == torch.cuda.is_available()


@pytest.mark.parametrize("reason, code", [(None, 0), ("it is not built", 1)])
def test_a_backend_can_be_required(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, code: int
) -> None:
    here = read_environment()
    here.backends["cpu"] = reason
    monkeypatch.setattr("tightrope.environment.read_environment", lambda: here)
    assert run("info", "--require", "cpu")[0] == code
    assert run("info", "--require", "reference", "--json")[0] == 0


def test_an_unknown_backend() -> None:
    code, output, error = run("info", "--require", "abacus")
    assert (code, output) == (2, "")
    assert error.startswith("Error: --require must be one of ")
    assert error.endswith("but got 'abacus'.\n")
