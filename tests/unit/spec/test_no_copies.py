"""A repeated call on a device copies nothing from the host.

A copy would synchronise host and device, and prevent the capture of a CUDA graph. Meta tensors
stand in for tensors on a device: they have no data, so reading them fails too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.support import stated
from tightrope import RopeSpec, frequencies, gates, positions, stacks
from tightrope.activations import RMSNorm
from tightrope.functional import apply_rotary_pos_emb, rotate, rotate_qk, rotate_qk_
from tightrope.gates import Exp, Given, Scalar, Slope, XPos
from tightrope.ops import registry, route
from tightrope.spec import _prepared, _words

DEVICE = torch.device("meta")


class Copies(TorchFunctionMode):
    """Records each torch function that copies data between host and device.

    It is a torch function mode, because dispatch modes do not see what is cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {x.device.type for x in tree_leaves(each) if isinstance(x, torch.Tensor)}
            for each in ((args, kwargs), result)
        )
        name = getattr(func, "__name__", str(func))
        made_here = name in ("tensor", "as_tensor", "from_numpy") and DEVICE.type in made
        if made_here or (made and given and made != given):
            self.found.append(name)
        return result


def test_a_copy_is_noted() -> None:
    with Copies() as mode:
        torch.zeros(2).to(DEVICE)
        torch.tensor([1.0], device=DEVICE)
        torch.zeros(2, device=DEVICE) * torch.full((), 2.0, device=DEVICE)
    assert mode.found == ["to", "tensor"]


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


Q, K = on_device(2, 4, 6, 16), on_device(2, 2, 6, 16)
IDS = on_device(2, 6, dtype=torch.int64)
ROWS = positions.per_row(IDS[:, 0])
SPEC = RopeSpec(16)
XPOS = XPos(centre=3)
DYNAMIC = RopeSpec(16, scaling=frequencies.DynamicNTK(2.0, original_max_position=4))
LONG = RopeSpec(16, scaling=frequencies.LongRoPE([1.0] * 8, [2.0] * 8, 4, factor=1.0))


def turn(spec: Any = SPEC, where: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: stated.call(rotate_qk, Q, K, spec, where, **options)


CALLS: dict[str, Callable[[], Any]] = {
    "offset": turn(SPEC, 7),
    "ids": turn(SPEC, IDS),
    "per row": turn(SPEC, ROWS),
    "fractional": turn(SPEC, IDS.double()),
    "number": turn(SPEC, 7, gate=Scalar(2.0)),
    "xPos": turn(SPEC, 7, gate=XPOS),
    "xPos, ids": turn(SPEC, IDS, gate=XPOS),
    "xPos, per row": turn(SPEC, ROWS, gate=XPOS),
    "exp": turn(SPEC, 7, gate=Exp(on_device(8), tied="pair")),
    "slope": turn(SPEC, IDS, gate=Slope(on_device(16))),
    "given": lambda: rotate(Q, SPEC, IDS, gate=Given(on_device(6, 4, 16))),
    "norm": turn(SPEC, 7, act=RMSNorm(on_device(16), 1e-6)),
    "norm of offset weights": turn(SPEC, 7, act=RMSNorm(on_device(16), 1e-6, unit_offset=True)),
    "learned": turn(SPEC, 7, inv_freq=on_device(8)),
    "tables": lambda: apply_rotary_pos_emb(Q, K, on_device(2, 6, 16), on_device(2, 6, 16)),
    "in place": lambda: rotate_qk_(Q, K, SPEC, 7, gate=XPOS),
    **{name: turn(SPEC.at(IDS, device=DEVICE, stack=name)) for name in stacks.names()},
}
for name, spec in {"dynamic NTK": DYNAMIC, "LongRoPE": LONG}.items():
    CALLS[f"{name}, ids"] = turn(spec, IDS)
    CALLS[f"{name}, offset"] = turn(spec, -1)
    CALLS[f"{name}, lengths"] = turn(spec, 3, seq_len=IDS[:, 0])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_copies_nothing(name: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that captures it reads what was kept, and keeps nothing of its own."""
    CALLS[name]()
    kept = dict(gates._kept)
    if captured:
        for module in (gates, route, _prepared, _words):
            monkeypatch.setattr(module, "may_keep", lambda _: False)
    with Copies() as mode:
        CALLS[name]()
    assert mode.found == []
    if captured:
        rotate(Q, SPEC, 7, gate=XPos(centre=3, smoothing=0.123))
        assert gates._kept.keys() == kept.keys()


def test_a_spec_keeps_nothing_that_is_made_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RopeSpec(16, base=777.0, scaling=DYNAMIC.scaling)
    with monkeypatch.context() as patch:
        for module in (route, _words):
            patch.setattr(module, "may_keep", lambda _: False)
        made = [spec.words_for(n, DEVICE).words for n in (3, 5000, [3, 5000], IDS[:, 0])]
        rotate(Q, spec, 0)
    later = [spec.words_for(n, DEVICE).words for n in (3, 5000)]
    assert made[0] is not later[0]
    assert made[1] is not later[1]
    assert spec.words_for(5000, DEVICE).words is later[1]


LEARNED: dict[str, Callable[..., Any]] = {
    "x": lambda *_: {},
    "frequencies": lambda pairs, _: {"inv_freq": pairs},
    "slope": lambda pairs, _: {"gate": Slope(pairs, tied="pair")},
    "exp and number": lambda pairs, _: {"gate": (Exp(pairs, tied="pair"), Scalar(2.0))},
    "xPos": lambda *_: {"gate": XPOS},
    "norm": lambda _, channels: {"act": RMSNorm(channels, 1e-6)},
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_backward_pass_copies_nothing(name: str) -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, on_device(8), on_device(16))]
    q, k, *learned = leaves

    def step() -> None:
        y, z = stated.call(rotate_qk, q, k, SPEC, IDS, **LEARNED[name](*learned))
        torch.autograd.grad(y.sum() + z.sum(), leaves, allow_unused=True)

    step()
    with Copies() as mode:
        step()
    assert mode.found == []


@pytest.mark.parametrize("gate", [None, Scalar(2.0), XPOS, Slope(on_device(16))])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("where", [None, 5, IDS, ROWS], ids=["none", "offset", "ids", "rows"])
def test_a_call_takes_the_fast_path(
    gate: gates.Gate | None, where: Any, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device too, the fast path skips the checks of the slow one, and copies nothing."""
    monkeypatch.setitem(registry._ready_on, "meta", lambda: True)

    def checked(*_: Any, **__: Any) -> Any:
        raise AssertionError("the slow path")

    rope = SPEC.at(where, device=DEVICE) if prepared else SPEC
    call = (rope, None if prepared else where)
    rotate_qk(Q, K, *call, gate=gate)
    monkeypatch.setattr(sys.modules["tightrope.functional._rotate"], "perform", checked)
    with Copies() as mode:
        rotate_qk(Q, K, *call, gate=gate)
        rotate_qk_(Q, K, *call, gate=gate)
    assert mode.found == []
