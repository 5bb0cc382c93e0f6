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


def test_info_as_json() -> None:
    code, output, _ = call(main, "info", "--json")
    assert code == 0
    found = json.loads(output)
    wanted = {
        "tightrope": tightrope.__version__,
        "torch": torch.__version__,
        "backends": tightrope.backends.why_not(),
        "runs": tightrope.which(torch.zeros(2))[0],
        "threads": torch.get_num_threads(),
        "installed_at": str(Path(tightrope.__file__).parent),
    }
    assert {key: found[key] for key in wanted} == wanted
    assert set(found["packages"]) == set(PACKAGES)
    assert found["packages"]["matplotlib"] is not None
    assert found["cores"] >= 1
    assert (found["why_no_gpu"] is None) == torch.cuda.is_available()


@pytest.mark.parametrize("width", [80, 200])
def test_info_in_words(width: int) -> None:
    code, output, error = call(main, "info", width=width)
    assert (code, error) == (0, "")
    assert max(map(len, output.splitlines())) <= width
    backends = [f"backend {name}" for name in tightrope.backends.why_not()]
    for name in ("processor", "threads", "instruction set", "gpu", "found", *backends):
        assert f"\n{name}" in output


@pytest.mark.parametrize("reason, code", [(None, 0), ("it is not built", 1)])
def test_a_backend_can_be_required(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, code: int
) -> None:
    here = read_environment()
    here.backends["cpu"] = reason
    monkeypatch.setattr("tightrope.environment.read_environment", lambda: here)
    assert call(main, "info", "--require", "cpu")[0] == code
    assert call(main, "info", "--require", "reference", "--json")[0] == 0


def test_an_unknown_backend() -> None:
    code, output, error = call(main, "info", "--require", "abacus")
    assert (code, output) == (2, "")
    assert error.startswith("Error: --require must be one of ")
    assert error.endswith("but got 'abacus'.\n")
