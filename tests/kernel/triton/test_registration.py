"""When the Triton kernels are registered and used, and why not: versions, devices, and the first launch on a device."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tightrope
from tests.support.command import python
from tests.support.helpers import noise, on
from tests.support.tolerances import assert_same_bits
from tests.support.triton.cases import (
    DEVICE,
    HAS_GPU,
    HAS_TRITON,
    needs_triton,
    on_this_device,
    operators,
    words,
)
from tightrope import RopeSpec
from tightrope.backends import reference
from tightrope.backends.triton import registration, trial
from tightrope.functional import rotate
from tightrope.ops.schema import Options

__all__ = ["on_this_device"]


def has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"tightrope::{name}", key))


@pytest.mark.parametrize("name", registration.OPERATORS)
def test_operators_have_kernels_for_the_devices_that_the_tests_compile_for(name: str) -> None:
    """docs/gpu.md lists them; on others the definition runs, which every operator has."""
    assert registration.DEVICES == {"cuda": "CUDA"}
    assert has_kernel(name, "CUDA") == HAS_TRITON
    assert not has_kernel(name, "XPU")
    assert callable(trial.definition_of(registration.OPERATORS[name]))


def test_reasons_why_the_backend_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    if not HAS_GPU:
        reason = tightrope.backends.why_not()["triton"] or ""
        assert reason.startswith("torch sees no GPU" if HAS_TRITON else "triton is not installed")
    if HAS_TRITON:
        import triton

        for version in ("3.3.1", "3.4.0", "3.10.0+git"):
            monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
            old = f"triton {version} is older than 3.4; pip install -U triton"
            assert registration.why_not(x) == (old if version[2] == "3" else "the tensor is on cpu")

        def unknown(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        # A build of triton with another package name.
        monkeypatch.setattr("importlib.metadata.version", unknown)
        monkeypatch.setattr(triton, "__version__", "3.2.0+rocm")
        assert registration.why_not() == old.replace("3.10.0+git", "3.2.0+rocm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert (registration.why_not(x) or "").startswith("triton is not installed; ")
    monkeypatch.setenv("TIGHTROPE_TRITON", "0")
    assert registration.why_not() == "it is switched off by TIGHTROPE_TRITON=0"


def test_which_mentions_triton_only_where_it_could_run() -> None:
    name, reason = tightrope.which(torch.zeros(1, device="meta"))
    assert (name, "triton: " in (reason or "")) == ("reference", True)
    _, reason = tightrope.which(torch.zeros(1))
    assert reason is None or "triton" not in reason


@needs_triton
def test_it_cannot_be_forced_on_the_cpu() -> None:
    with pytest.raises(NotImplementedError, match="the tensor is on cpu"):
        on("triton", rotate, torch.zeros(1, 1, 2, 8), RopeSpec(8))


@needs_triton
@pytest.mark.slow
def test_switched_off_it_registers_nothing() -> None:
    code = (
        "import tightrope, torch, sys\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print(has('tightrope::rotate', 'CUDA'), 'triton' in sys.modules)\n"
    )
    assert python("-c", code, TIGHTROPE_TRITON="0").stdout.split() == ["False", "False"]
    assert python("-c", code).stdout.split() == ["True", "False"]


# --- the first launch on a device -----------------------------------------------------------------

X = noise(2, 3, 4, 16, seed=1).float().to(DEVICE)
ARGUMENTS = (None, words(1, 1, 1, 8), None, None, 3, Options().pack(), 1.0)
untried = pytest.mark.usefixtures("on_this_device", "_untried")


@pytest.fixture
def _untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trial, "_reasons", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@needs_triton
@untried
def test_a_device_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    whole = trial._try
    monkeypatch.setattr(trial, "_try", lambda device: tried.append(device) or whole(device))
    for call in (registration._kernel("rotate"), registration._kernel("rotate")) * 2:
        assert_same_bits(call(X, *ARGUMENTS)[0], operators().rotate(X, *ARGUMENTS)[0])
    assert tried == [X.device]
    assert trial.is_known(X.device)


def broken(*_: Any) -> list[torch.Tensor]:
    raise RuntimeError("no compiler was found\nmore lines")


KERNELS: dict[str, Callable[..., list[torch.Tensor]]] = {
    r"first launch of its .* failed \(RuntimeError: no compiler was found\)$": broken,
    r"result of its .* is off by \d\.\de[-+]\d\d of the largest value$": lambda q, *_: [q + 1],
    "result of its .* is off by nan of the largest value$": lambda q, *_: [q * torch.nan],
}


@needs_triton
@untried
@pytest.mark.parametrize("reason", KERNELS)
def test_a_device_that_fails_runs_the_definition(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one warning; a forced backend then names the reason."""
    monkeypatch.setattr(operators(), "rotate", KERNELS[reason])
    call = registration._kernel("rotate")
    with pytest.warns(
        UserWarning, match=f"tightrope runs on plain torch on {DEVICE}.*: .*{reason}"
    ):
        found = call(X, *ARGUMENTS)
    assert_same_bits(found[0], reference.rotate(X, *ARGUMENTS)[0])
    registration._kernel("rotate_")(X.clone(), *ARGUMENTS)
    assert trial.why_not(X.device) is not None
    monkeypatch.setattr(registration, "DEVICES", {X.device.type: ""})
    assert registration.why_not(X) == trial.why_not(X.device)


@needs_triton
@untried
def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 7)
    assert trial.why_not(device) is None
    assert not trial.is_known(device)
