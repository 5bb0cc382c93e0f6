"""Prepared rotations, and the tensors that a spec keeps: valid under every mode of torch, and never copied again.

A copy from the host would synchronise host and device, and prevent the capture of a CUDA graph. Meta tensors
stand in for tensors on a device: they have no data, so reading them fails too. A law of tests/laws/test_calls.py
has the same of every call that needs no length.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support import stated
from tests.support.helpers import Copies
from tests.support.kept_tensors import tensors_of
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, gates, positions, stacks
from tightrope.frequencies import DynamicNTK, LongRoPE, Rule
from tightrope.functional import apply_rotary_pos_emb, rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.gates import Scalar, Slope, XPos
from tightrope.ops import registry, route
from tightrope.spec import PreparedRotation, _prepared, _words

CPU = torch.device("cpu")
X = torch.randn(1, 1, 3, 8)


def test_at_goes_where_the_ids_are() -> None:
    meta = torch.zeros(3, dtype=torch.int64, device="meta")
    assert RopeSpec(8).at(meta).device.type == "meta"
    assert RopeSpec(8).at(meta.new_zeros(3, device="cpu")).device == CPU
    assert RopeSpec(8).at().device == CPU
    moved = RopeSpec(8).at(torch.arange(3), device="meta")
    assert moved.device.type == moved.ids.device.type == "meta"  # type: ignore[union-attr]


def test_a_prepared_rotation_is_a_frozen_value_that_shows_what_was_given() -> None:
    rope = RopeSpec(16).at(torch.arange(3))
    assert isinstance(rope, PreparedRotation)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rope.where = positions.as_positions(6)  # type: ignore[misc]
    assert "spec=RopeSpec(head_dim=16)" in repr(rope)
    assert "ids=tensor([[[0, 1, 2]]])" in repr(rope)
    assert "words" not in repr(rope)


def test_a_copy_rotates_as_the_original() -> None:
    spec = RopeSpec(8, base=500.0, scaling=DynamicNTK(2.0, 4))
    x, rope = X.expand(2, 1, 3, 8), spec.at(torch.tensor([[0, 1, 2], [0, 6, 7]]))
    want = rotate(x, rope)
    for copied in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert_same_bits(rotate(x, copied), want)
        copied.ids[0] = torch.tensor([[0, 2, 3], [0, 7, 8]])
        assert_same_bits(rotate(x, copied), rotate(x, spec, copied.ids[0]))
        assert_same_bits(rotate(x, rope), want)
    rope = RopeSpec(8).at(3)
    rotate(X, rope)
    moved = dataclasses.replace(rope, where=positions.as_positions(7))
    assert_same_bits(rotate(X, moved), rotate(X, RopeSpec(8), 7))


def test_a_cast_of_the_ids_of_a_rotation_is_refused() -> None:
    """FSDP2 casts the floating tensors of dataclasses that are inputs of a module with mixed precision."""
    from torch.distributed.utils import _apply_to_tensors

    def cast(rope: PreparedRotation, dtype: torch.dtype) -> Any:
        return _apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, rope)

    whole, fractional = (RopeSpec(8).at(torch.tensor(ids)) for ids in ([0, 1, 2], [0.5, 1.5, 2.5]))
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(TypeError, match=r"^\[Positions\] ids must be .* may have cast them"):
            cast(fractional, dtype)
    for rope, dtype in ((whole, torch.bfloat16), (fractional, torch.float32)):
        assert_same_bits(rotate(X, cast(rope, dtype)), rotate(X, rope))


# --- kept tensors ---------------------------------------------------------------------------------

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "FakeTensorMode": FakeTensorMode,
    "meta device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "default float64": nullcontext,  # the test sets the default dtype
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
LONGROPE = LongRoPE((1.0,) * 5, (3.0,) * 5, 4, short_mscale=1.25, long_mscale=1.5)
KEPT: dict[str, tuple[float, Rule | None]] = {
    "plain": (1e4, None),
    "turns": (1e-3, None),
    "dynamic": (1e4, DynamicNTK(2.0, 4)),
    "longrope": (1e4, dataclasses.replace(LONGROPE, long_mscale=1.25)),
    "unequal": (1e4, LONGROPE),
}


def assert_real(spec: RopeSpec) -> None:
    """Assert that autograd and later calls can use the tensors that a spec keeps."""
    for tensor in (spec.at().angles.words, *tensors_of(spec)):
        assert not isinstance(tensor, FakeTensor)
        assert not tensor.is_inference()
        assert tensor.dtype in (torch.int64, torch.float64)


@pytest.mark.parametrize("used_inside", [False, True])
@pytest.mark.parametrize("base, rule", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("name", [*MODES, "a transform"])
def test_a_spec_made_in_a_mode_works_after_it(
    name: str, base: float, rule: Rule | None, used_inside: bool
) -> None:
    x, ids = torch.randn(1, 4, 10), torch.tensor([-2.25, 0.0, 3.5, 1e6])
    wanted = rotate(x, RopeSpec(10, base=base, scaling=rule), ids, layout="bsd")
    made = []

    def make(y: torch.Tensor) -> torch.Tensor:
        made.append(RopeSpec(10, base=base, scaling=rule))
        return rotate(y, made[0], -1, layout="bsd").sum() if used_inside else y.sum()

    if name == "default float64":
        torch.set_default_dtype(torch.float64)
    if name == "a transform":
        torch.func.grad(make)(torch.ones(1, 4, 10))
    else:
        with MODES[name]():
            make(torch.ones(1, 4, 10))
    torch.set_default_dtype(torch.float32)
    (spec,) = made
    assert_real(spec)
    leaf = x.clone().requires_grad_()
    y = rotate(leaf, spec, ids, layout="bsd")
    assert_same_bits(y, wanted)
    assert torch.autograd.grad(y.sum(), leaf)[0].shape == x.shape


@pytest.mark.parametrize("name", MODES)
def test_a_spec_from_outside_used_in_a_mode_stays_as_it_was(name: str) -> None:
    spec, x = RopeSpec(10, base=4321.0), torch.randn(4, 10)
    with MODES[name]():
        y = rotate(torch.ones(4, 10), spec, 7, layout="sd")
        rotate_(torch.ones(4, 10), spec.at(3, device=y.device), layout="sd")
    assert_real(spec)
    assert_same_bits(
        rotate(x, spec, 7, layout="sd"), rotate(x, RopeSpec(10, base=4321.0), 7, layout="sd")
    )


def test_a_compiled_first_use_leaves_real_tensors() -> None:
    spec, x = RopeSpec(8, base=321.0), torch.randn(3, 8)
    turn = torch.compile(lambda x: rotate(x, spec, 5, layout="sd"), fullgraph=True, backend="eager")
    assert_same_bits(turn(x), rotate(x, spec, 5, layout="sd"))
    assert_real(spec)


# --- copies ---------------------------------------------------------------------------------------

DEVICE = torch.device("meta")


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
DYNAMIC = RopeSpec(16, scaling=DynamicNTK(2.0, original_max_position=4))
LONG = RopeSpec(16, scaling=LongRoPE([1.0] * 8, [2.0] * 8, 4, factor=1.0))


def turn(spec: Any = SPEC, where: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: stated.call(rotate_qk, Q, K, spec, where, **options)


CALLS: dict[str, Callable[[], Any]] = {
    "number": turn(SPEC, 7, gate=Scalar(2.0)),
    "xPos": turn(SPEC, 7, gate=XPOS),
    "xPos, ids": turn(SPEC, IDS, gate=XPOS),
    "xPos, per row": turn(SPEC, ROWS, gate=XPOS),
    "learned": turn(SPEC, 7, inv_freq=on_device(8)),
    "tables": lambda: apply_rotary_pos_emb(Q, K, on_device(2, 6, 16), on_device(2, 6, 16)),
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
