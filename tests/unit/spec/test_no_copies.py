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
        given = [x.device.type for x in _tensors((args, list((kwargs or {}).values())))]
        made = [x.device.type for x in _tensors(result)]
        name = getattr(func, "__name__", str(func))
        if name in ("tensor", "as_tensor", "from_numpy") and DEVICE.type in made:
            self.found.append(name)
        elif made and given and set(made) != set(given):
            self.found.append(f"{name}: {given} -> {made}")
        return result


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in _tensors(y)]
    return []


def test_a_copy_is_noted() -> None:
    with Copies() as mode:
        torch.zeros(2).to(DEVICE)
        torch.tensor([1.0], device=DEVICE)
        torch.zeros(2, device=DEVICE) * torch.full((), 2.0, device=DEVICE)
    assert [entry.split(":")[0] for entry in mode.found] == ["to", "tensor"]


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


Q, K = on_device(2, 4, 6, 16), on_device(2, 2, 6, 16)
IDS = on_device(2, 6, dtype=torch.int64)
SPEC = RopeSpec(16)
XPOS = XPos(centre=3)

CALLS: dict[str, Callable[[], Any]] = {
    "offset": lambda: rotate_qk(Q, K, SPEC, 7),
    "ids": lambda: rotate_qk(Q, K, SPEC, IDS),
    "per row": lambda: rotate_qk(Q, K, SPEC, positions.per_row(IDS[:, 0])),
    "fractional": lambda: rotate_qk(Q, K, SPEC, IDS.double()),
    "number": lambda: rotate_qk(Q, K, SPEC, 7, gate=Scalar(2.0)),
    "xPos": lambda: rotate_qk(Q, K, SPEC, 7, gate=XPOS),
    "xPos, ids": lambda: rotate_qk(Q, K, SPEC, IDS, gate=XPOS),
    "xPos, per row": lambda: rotate_qk(Q, K, SPEC, positions.per_row(IDS[:, 0]), gate=XPOS),
    "exp": lambda: rotate_qk(Q, K, SPEC, 7, gate=Exp(on_device(8), tied="pair")),
    "slope": lambda: rotate_qk(Q, K, SPEC, IDS, gate=Slope(on_device(16))),
    "given": lambda: rotate(Q, SPEC, IDS, gate=Given(on_device(6, 4, 16))),
    "norm": lambda: rotate_qk(Q, K, SPEC, 7, act=RMSNorm(on_device(16), 1e-6)),
    "norm of offset weights": lambda: rotate_qk(
        Q, K, SPEC, 7, act=RMSNorm(on_device(16), 1e-6, unit_offset=True)
    ),
    "learned": lambda: rotate_qk(Q, K, SPEC, 7, inv_freq=on_device(8)),
    "tables": lambda: apply_rotary_pos_emb(Q, K, on_device(2, 6, 16), on_device(2, 6, 16)),
    "in place": lambda: rotate_qk_(Q, K, SPEC, 7, gate=XPOS),
}
for name in stacks.names():
    at = SPEC.at(IDS, DEVICE, stack=name)
    CALLS[f"{name}, ids"] = lambda at=at: rotate_qk(Q, K, at)
for name, rule in {
    "dynamic NTK": frequencies.DynamicNTK(2.0, original_max_position=4),
    "LongRoPE": frequencies.LongRoPE([1.0] * 8, [2.0] * 8, 4, factor=1.0),
}.items():
    by_length = RopeSpec(16, scaling=rule)
    CALLS |= {
        f"{name}, ids": lambda spec=by_length: rotate_qk(Q, K, spec, IDS),
        f"{name}, offset": lambda spec=by_length: rotate_qk(Q, K, spec, -1),
        f"{name}, lengths": lambda spec=by_length: rotate_qk(Q, K, spec, 3, seq_len=IDS[:, 0]),
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_call_copies_nothing(name: str) -> None:
    CALLS[name]()
    with Copies() as mode:
        CALLS[name]()
    assert mode.found == []


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
        y, z = rotate_qk(q, k, SPEC, IDS, **LEARNED[name](*learned))
        torch.autograd.grad(y.sum() + z.sum(), leaves, allow_unused=True)

    step()
    with Copies() as mode:
        step()
    assert mode.found == []


@pytest.mark.parametrize("gate", [None, Scalar(2.0), XPOS, Slope(on_device(16))])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "where", [None, 5, IDS, positions.per_row(IDS[:, 0])], ids=["none", "offset", "ids", "rows"]
)
def test_a_call_takes_the_fast_path(
    gate: gates.Gate | None, where: Any, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device too, the fast path skips the checks of the slow one, and copies nothing."""
    monkeypatch.setitem(registry._ready_on, "meta", lambda: True)
    assert registry.takes(Q)

    def checked(*_: Any, **__: Any) -> Any:
        raise AssertionError("the slow path")

    call = (SPEC.at(where, device=DEVICE),) if prepared else (SPEC, where)
    rotate_qk(Q, K, *call, gate=gate)
    monkeypatch.setattr(sys.modules["tightrope.functional._rotate"], "perform", checked)
    with Copies() as mode:
        rotate_qk(Q, K, *call, gate=gate)
        rotate_qk_(Q, K, *call, gate=gate)
    assert mode.found == []


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_reads_what_was_kept_and_keeps_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CALLS[name]()
    kept = dict(gates._kept)
    for module in (gates, route, _prepared, _words):
        monkeypatch.setattr(module, "may_keep", lambda _: False)
    with Copies() as mode:
        CALLS[name]()
    assert mode.found == []
    rotate(Q, SPEC, 7, gate=XPos(centre=3, smoothing=0.123))
    assert gates._kept.keys() == kept.keys()


def test_ids_on_a_device_are_not_cached() -> None:
    """Gates at ids on a device are computed anew: a CUDA graph may be replayed with other ids."""
    prepared = SPEC.at(IDS, device=DEVICE)
    rotate_qk(Q, K, prepared, gate=XPOS)
    assert prepared.kept._values == {}


def test_a_spec_keeps_nothing_that_is_made_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RopeSpec(16, base=777.0, scaling=frequencies.DynamicNTK(2.0, original_max_position=4))
    shared = set(_words._shared)
    with monkeypatch.context() as patch:
        for module in (route, _words):
            patch.setattr(module, "may_keep", lambda _: False)
        for seq_len in (3, 5000, [3, 5000], IDS[:, 0]):
            spec.words_for(seq_len, DEVICE)
        rotate(Q, spec, 0)
    assert set(_words._shared) == shared
    assert set(spec.words._on) == {torch.device("cpu")}
    assert spec.words._last is None
    spec.words_for(5000, DEVICE)
    assert set(spec.words._on) == {torch.device("cpu"), DEVICE}
    assert spec.words._last is not None
