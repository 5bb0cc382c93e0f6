"""Every verb gives the results of the definition in every mode of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.helpers import noise, on
from tests.support.matrix import every_pair
from tests.support.tolerances import assert_near
from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_
from tightrope.integrations import onnx

SPEC = RopeSpec(8, rotary_dim=6, start=1, base=50.0)
X = noise(1, 2, 5, 8)

Call = Callable[[torch.Tensor], torch.Tensor]


def by(verb: str, backend: str | None = None, **options: Any) -> Call:
    """Return a function that rotates by a verb and leaves its argument unchanged."""

    def call(x: torch.Tensor) -> torch.Tensor:
        out = {"out": torch.empty_like(x)} if verb == "out" else {}
        turn, x = (rotate_, x.clone()) if verb == "in place" else (rotate, x)
        return on(backend, turn, x, SPEC, 3, **out, **options)

    return call


def forward_mode(call: Call, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x))))
        assert tangent is not None
        return y


def compiled(call: Call, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)(x)


def exported(call: Call, x: torch.Tensor) -> torch.Tensor:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x)

    return torch.export.export(Module(), (x,)).module()(x)


def exported_to_onnx(call: Call, x: torch.Tensor) -> torch.Tensor:
    with onnx.plain_torch():
        return exported(call, x)


def differentiated(call: Call, x: torch.Tensor) -> torch.Tensor:
    y = call(x.requires_grad_())
    assert y.requires_grad
    return y.detach()


MODES: dict[str, Callable[[Call, torch.Tensor], torch.Tensor]] = {
    "eager": lambda call, x: call(x),
    "no_grad": lambda call, x: torch.no_grad()(call)(x.requires_grad_()),
    "inference": lambda call, x: torch.inference_mode()(call)(x),
    "requires grad": differentiated,
    "vmap": lambda call, x: torch.vmap(call)(x[None])[0],
    "func.grad": lambda call, x: torch.func.vjp(call, x)[0],
    "forward mode": forward_mode,
    "func.jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[0],
    "compiled vmap": lambda call, x: compiled(torch.vmap(call), x[None])[0],
    "compiled": compiled,
    "compiled with grad": lambda call, x: compiled(call, x.requires_grad_()).detach(),
    "exported": exported,
    "exported to ONNX": exported_to_onnx,
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
}
# Modes in which `out` is refused, because a gradient would be lost.
WITH_GRADIENT = ("requires grad", "func.grad", "compiled with grad")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "f and P": {"act": RMSNorm(noise(8, seed=1)), "gate": gates.Exp(0.1 * noise(8, seed=2))},
    "the definition": {"backend": "reference"},
}


@pytest.mark.one_in(2)
@every_pair(
    lambda case: case.get("verb") != "out" or case.get("mode") not in WITH_GRADIENT,
    mode=tuple(MODES),
    verb=("new", "in place", "out"),
    what=tuple(OPTIONS),
)
def test_a_rotation(mode: str, verb: str, what: str) -> None:
    options = OPTIONS[what]
    # In float64 the definition runs where there is an f or P.
    dtype = torch.float32 if "act" in options else torch.float64
    call, x = by(verb, **options), X.to(dtype, copy=True)
    wanted = by("new", **options | {"backend": "reference"})(X.to(dtype))
    assert_near(MODES[mode](call, x), wanted, f"{str(dtype)[6:]} ways")


@pytest.mark.parametrize("mode", WITH_GRADIENT)
def test_a_gradient_that_would_be_lost_is_refused(mode: str) -> None:
    error = torch._dynamo.exc.Unsupported if "compiled" in mode else ValueError
    with pytest.raises(error, match="out has no gradient" if error is ValueError else None):
        MODES[mode](by("out"), X.clone())
