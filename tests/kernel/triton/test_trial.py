"""The first launch on a device: kernels that fail or are wrong there are replaced by the definition."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.support.tolerances import assert_same_bits
from tests.support.triton.cases import DEVICE, needs_triton, noise, words
from tests.support.triton.running import operators
from tightrope.backends import reference
from tightrope.backends.triton import registration, trial
from tightrope.ops.schema import Options

pytestmark = [needs_triton, pytest.mark.usefixtures("few_programs", "_untried")]

X = noise(2, 3, 4, 16, seed=1).float().to(DEVICE)
ARGUMENTS = (None, words(1, 1, 1, 8), None, None, 3, Options().pack(), 1.0)


@pytest.fixture
def _untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_reasons", {})


def test_a_device_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    whole = trial._try
    monkeypatch.setattr(trial, "_try", lambda device: tried.append(device) or whole(device))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for call in (registration._kernel("rotate"), registration._kernel("rotate")) * 2:
            assert_same_bits(call(X, *ARGUMENTS)[0], operators().rotate(X, *ARGUMENTS)[0])
    assert tried == [X.device]


def broken(*_: Any) -> list[torch.Tensor]:
    raise RuntimeError("no compiler was found\nmore lines")


def wrong(q: torch.Tensor, *_: Any) -> list[torch.Tensor]:
    return [q + 1]


def lost(q: torch.Tensor, *_: Any) -> list[torch.Tensor]:
    return [q * torch.nan]


REASONS = {
    broken: r"the first launch of its Triton kernel failed \(RuntimeError: no compiler was found\)$",
    wrong: r"the first result of its Triton kernel is off by \d\.\de[-+]\d\d of the largest value$",
    lost: "the first result of its Triton kernel is off by nan of the largest value$",
}


@pytest.mark.parametrize("kernel", REASONS)
def test_what_fails_is_replaced(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators(), "rotate", kernel)
    call = registration._kernel("rotate")
    with pytest.warns(
        UserWarning, match=f"tightrope runs on plain torch on {X.device}: {REASONS[kernel]}"
    ):
        found = call(X, *ARGUMENTS)
    assert_same_bits(found[0], reference.rotate(X, *ARGUMENTS)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registration._kernel("rotate_")(X.clone(), *ARGUMENTS)
    assert trial.why_not(X.device) is not None


def test_a_forced_backend_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "DEVICES", {X.device.type: ""})
    assert registration.why_not(X) is None
    trial._reasons[X.device] = "it is off"
    assert registration.why_not(X) == "it is off"


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 7)
    assert trial.why_not(device) is None
    assert not trial.is_known(device)


def test_every_operator_has_a_definition() -> None:
    for name in registration.OPERATORS.values():
        assert callable(trial.definition_of(name))
        assert callable(getattr(operators(), name))
    with pytest.raises(AttributeError):
        trial.definition_of("rotate_other")
