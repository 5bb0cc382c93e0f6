"""Prepared rotations, and the tensors that a spec keeps: they stay valid under every mode of torch."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support import oracle
from tests.support.helpers import in_threads, refused
from tests.support.kept_tensors import tables_of
from tightrope import RopeSpec, positions
from tightrope.frequencies import DynamicNTK, LongRoPE, Rule
from tightrope.functional import rotate, rotate_
from tightrope.spec import PreparedRotation

CPU = torch.device("cpu")


def test_at_gives_words_and_positions() -> None:
    rotation = RopeSpec(8).at(5)
    assert isinstance(rotation, PreparedRotation)
    assert rotation.angles.words.dtype == torch.int64
    assert rotation.angles.words.shape == (1, 1, 1, 4)
    assert rotation.angles.words.flatten().tolist() == [
        oracle.phase(omega).word for omega in oracle.frequencies(10000.0, 8)
    ]
    assert rotation.angles.turns is None
    assert (rotation.ids, rotation.where.offset, rotation.where.add_index) == (None, 5, True)
    assert rotation.device == CPU
    with pytest.raises(dataclasses.FrozenInstanceError):
        rotation.offset = 6  # type: ignore[misc]


def test_at_goes_where_the_ids_are() -> None:
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    assert RopeSpec(8).at(ids).device.type == "meta"
    assert RopeSpec(8).at(torch.arange(3)).device == CPU
    assert RopeSpec(8).at(None).device == CPU
    moved = RopeSpec(8).at(torch.arange(3), device="meta")
    assert moved.device.type == "meta"
    assert moved.ids.device.type == "meta"


def test_repr_of_a_prepared_rotation_shows_what_was_given() -> None:
    shown = repr(RopeSpec(16).at(torch.arange(3)))
    assert "spec=RopeSpec(head_dim=16)" in shown
    assert "ids=tensor([[[0, 1, 2]]])" in shown
    assert "words" not in shown


def test_a_copy_of_a_prepared_rotation_rotates_as_the_original() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 4))
    ids = torch.tensor([[0, 1, 2], [0, 6, 7]])
    x, rope = torch.randn(2, 1, 3, 8), spec.at(ids)
    want = rotate(x, rope)
    for copied in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert torch.equal(rotate(x, copied), want)
        copied.ids[0] = torch.tensor([[0, 2, 3], [0, 7, 8]])
        assert torch.equal(rotate(x, copied), rotate(x, spec, copied.ids[0]))
        assert torch.equal(rotate(x, rope), want)


def test_a_replaced_prepared_rotation_keeps_nothing() -> None:
    rope, x = RopeSpec(8).at(3), torch.randn(1, 1, 3, 8)
    rotate(x, rope)
    moved = dataclasses.replace(rope, where=positions.as_positions(7))
    assert torch.equal(rotate(x, moved), rotate(x, RopeSpec(8), 7))


def test_what_a_prepared_rotation_takes_does_not_depend_on_its_past() -> None:
    rope, x = RopeSpec(8).at(3), torch.randn(1, 1, 3, 8)
    for _ in range(2):
        with pytest.raises(TypeError, match="inverse must be a bool"):
            rotate(x, rope, inverse=0)
        with pytest.raises(ValueError, match="layout must be one of"):
            rotate(x, rope, layout=["bhsd"])
        with pytest.raises(ValueError, match="x must have 4 dimensions"):
            rotate(torch.tensor(1.0), rope)
        rotate(x, rope)


def test_a_cast_of_the_ids_of_a_rotation_is_refused() -> None:
    """FSDP2 casts the floating tensors of dataclasses that are inputs of a module with mixed precision."""
    from torch.distributed.utils import _apply_to_tensors

    def cast(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: t.to(dtype) if t.is_floating_point() else t

    fractional = RopeSpec(8).at(torch.tensor([0.5, 1.5, 2.5]))
    x = torch.randn(1, 2, 3, 8)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        message = (
            "[Positions] ids must be int32, int64, float32 or float64; a wrapper of the model, such "
            f"as one for mixed precision, may have cast them (ids: {name}[1, 1, 3])."
        )
        with refused(TypeError, message):
            _apply_to_tensors(cast(dtype), fractional)
    whole = RopeSpec(8).at(torch.tensor([0, 1, 2]))
    for rope, dtype in ((whole, torch.bfloat16), (fractional, torch.float32)):
        again: Any = _apply_to_tensors(cast(dtype), rope)
        assert torch.equal(rotate(x, again), rotate(x, rope))


# --- kept tensors ---------------------------------------------------------------------------------

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "FakeTensorMode": FakeTensorMode,
    "meta device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "default float64": nullcontext,  # the test sets the default dtype
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


KEPT: dict[str, tuple[float, Rule | None]] = {
    "plain": (1e4, None),
    "turns": (1e-3, None),
    "dynamic": (1e4, DynamicNTK(2.0, 4)),
    "longrope": (1e4, LongRoPE((1.0,) * 5, (3.0,) * 5, 4, factor=2.0)),
    "unequal": (1e4, LongRoPE((1.0,) * 5, (3.0,) * 5, 4, short_mscale=1.25, long_mscale=1.5)),
}


@pytest.mark.parametrize("used_inside", [False, True])
@pytest.mark.parametrize("base, rule", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("name", [*MODES, "a transform"])
def test_a_spec_made_in_a_mode_works_after_it(
    name: str, base: float, rule: Rule | None, used_inside: bool
) -> None:
    wanted_spec = RopeSpec(10, base=base, scaling=rule)
    x, ids = torch.randn(1, 4, 10), torch.tensor([-2.25, 0.0, 3.5, 1e6])
    wanted = rotate(x, wanted_spec, ids, layout="bsd")
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
    assert spec == wanted_spec
    rotation = spec.at(ids)
    for tensor in (rotation.angles.words, *tables_of(spec)):
        assert not isinstance(tensor, FakeTensor)
        assert not tensor.is_inference()
        assert tensor.dtype in (torch.int64, torch.float64)
    assert rotation.angles.words.dtype == torch.int64
    assert rotation.angles.words.device == CPU
    assert torch.equal(rotation.angles.words, wanted_spec.at().angles.words)
    assert torch.equal(rotate(x, spec, ids, layout="bsd"), wanted)
    # Autograd can save the spec's tensors, which it cannot do with inference tensors.
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rotate(leaf, spec, ids, layout="bsd").sum(), leaf)
    assert grad.shape == x.shape


@pytest.mark.parametrize("name", MODES)
def test_a_spec_from_outside_used_in_a_mode_stays_as_it_was(name: str) -> None:
    spec = RopeSpec(10)
    with MODES[name]():
        x = torch.ones(4, 10)
        y = rotate(x, spec, 7, layout="sd")
        assert y.device == x.device
        rotate_(x, spec.at(3, device=x.device), layout="sd")
    for tensor in tables_of(spec):
        assert not isinstance(tensor, FakeTensor)
        assert not tensor.is_inference()
    assert torch.equal(spec.at().angles.words, RopeSpec(10).at().angles.words)


def test_a_table_is_kept_per_device() -> None:
    spec = RopeSpec(8)
    assert spec.at(1).angles.words is spec.at(2).angles.words
    assert spec.at(1, device="meta").angles.words is spec.at(2, device="meta").angles.words
    assert spec.at(1, device="meta").device.type == "meta"
    assert spec.at(1).device == CPU


def test_a_cpu_table_survives_a_compiled_first_use() -> None:
    """Tensors that a spec caches while its first use is compiled are real, not fake."""
    spec = RopeSpec(8)

    @torch.compile(fullgraph=True, backend="eager")
    def turn(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, 5, layout="sd")

    x = torch.randn(3, 8)
    assert torch.equal(turn(x), rotate(x, spec, 5, layout="sd"))
    assert not any(isinstance(tensor, FakeTensor) for tensor in tables_of(spec))


def test_one_spec_in_many_threads() -> None:
    x = torch.randn(4, 16)
    wanted = rotate(x, RopeSpec(16, base=777.0), 11, layout="sd")
    spec = RopeSpec(16, base=777.0)

    def work() -> None:
        for _ in range(50):
            assert torch.equal(rotate(x, spec, 11, layout="sd"), wanted)

    def work_on_meta() -> None:
        for _ in range(50):
            y = rotate(x.to("meta"), spec, 11, layout="sd")
            assert (y.shape, y.device.type) == (x.shape, "meta")

    in_threads(*[work, work_on_meta] * 4)
