"""The Triton backend within the library: registration, reasons why it is unavailable, and gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tightrope
from tests.support.command import python
from tests.support.tolerances import assert_near
from tests.support.triton.cases import (
    DEVICE,
    HAS_GPU,
    HAS_TRITON,
    needs_triton,
    noise,
    on_this_device,
)
from tightrope import RopeSpec
from tightrope.backends.triton import registration
from tightrope.functional import rotate, rotate_
from tightrope.ops import fake, gradients
from tightrope.ops.schema import LOG, Options

__all__ = ["on_this_device"]


@needs_triton
def test_every_operator_has_a_kernel_for_gpus() -> None:
    for name in registration.OPERATORS:
        for key in registration.DEVICES.values():
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tightrope::{name}", key)


def test_devices_for_which_the_kernels_were_never_compiled_have_none() -> None:
    """docs/gpu.md lists the GPUs that the tests compile for; on others the definition runs."""
    assert registration.DEVICES == {"cuda": "CUDA"}
    for name in registration.OPERATORS:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"tightrope::{name}", "XPU")


def test_reasons_why_the_backend_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        reason = tightrope.backends.why_not()["triton"]
        assert reason is not None
        assert reason.startswith("torch sees no GPU" if HAS_TRITON else "triton is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    reason = registration.why_not(torch.zeros(1))
    assert reason is not None
    assert reason.startswith("triton is not installed; ")
    monkeypatch.setenv("TIGHTROPE_TRITON", "0")
    assert registration.why_not() == "it is switched off by TIGHTROPE_TRITON=0"


@needs_triton
def test_an_old_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.3.1")
    assert registration.why_not() == "triton 3.3.1 is older than 3.4; pip install -U triton"
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.10.0+git")
    assert registration.why_not(torch.zeros(1)) == "the tensor is on cpu"


@needs_triton
def test_a_build_of_triton_with_another_package_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    monkeypatch.setattr(triton, "__version__", "3.2.0+rocm")
    assert registration.why_not() == "triton 3.2.0+rocm is older than 3.4; pip install -U triton"


def test_which_mentions_triton_only_where_it_could_run() -> None:
    name, reason = tightrope.which(torch.zeros(1, device="meta"))
    assert name == "reference"
    assert reason is not None
    assert "triton: " in reason
    _, reason = tightrope.which(torch.zeros(1))
    assert reason is None or "triton" not in reason


@needs_triton
def test_it_cannot_be_forced_on_the_cpu() -> None:
    with pytest.raises(NotImplementedError, match="the tensor is on cpu"):
        rotate(torch.zeros(1, 1, 2, 8), RopeSpec(8), backend="triton")


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


@needs_triton
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 5, 1), (2, 1, 5, 8), (1, 3, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_gates_have_the_strides_that_the_fake_kernel_promises(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Gradients of gates have the promised strides also if results and gradients are transposed."""
    from tightrope.backends.triton import operators

    y, grad = (noise(2, 5, 3, 8, seed=i).to(DEVICE, dtype).transpose(1, 2) for i in (1, 2))
    gate = noise(*shape, seed=3).to(DEVICE, dtype)
    arguments = (y, None, grad, None, gate, None, None, 0, Options(gate=LOG).pack())
    promised = fake._gate_gradients(*arguments)[0]
    for kernel in (operators.gate_gradients, gradients.gate_gradients):
        (found,) = kernel(*arguments)
        assert (found.shape, found.stride(), found.dtype) == (
            promised.shape,
            promised.stride(),
            promised.dtype,
        )


@needs_triton
@pytest.mark.usefixtures("on_this_device")
def test_the_gradient_of_a_rotation_in_place() -> None:
    spec, x = RopeSpec(8), noise(2, 3, 5, 8, seed=1).float().to(DEVICE)
    base = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rotate_(base * 1, spec, 7).sum(), base)
    want = rotate(torch.ones_like(x), spec, 7, inverse=True, backend="reference")
    assert_near(grad, want, "float32 ways")
