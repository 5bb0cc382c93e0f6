"""RopeSpec: a frozen value whose derived tensors nothing can spoil."""

import copy
import dataclasses
import math
import pickle
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import oracle
from tightrope import RopeSpec, positions
from tightrope.functional import rotate, rotate_
from tightrope.spec import PreparedRotation

CPU = torch.device("cpu")

# --- a value --------------------------------------------------------------------------------------


def test_defaults() -> None:
    spec = RopeSpec(64)
    assert (spec.head_dim, spec.base, spec.rotary_dim, spec.start) == (64, 10000.0, 64, 0)
    assert spec.interleaved is False
    assert RopeSpec(64, start=16).rotary_dim == 48
    assert spec.axis_count == 1


def test_numbers_take_one_form() -> None:
    spec = RopeSpec(numpy.int64(64), base=500000, rotary_dim=numpy.int32(32))  # type: ignore[arg-type]
    assert type(spec.head_dim) is int
    assert type(spec.rotary_dim) is int
    assert type(spec.base) is float
    assert spec == RopeSpec(64, 5e5, 32)


def test_frozen() -> None:
    spec = RopeSpec(64)
    for field in dataclasses.fields(spec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, field.name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.inv_freq = torch.ones(32)  # type: ignore[attr-defined]


def test_equality_and_hash() -> None:
    spec = RopeSpec(64)
    assert spec == RopeSpec(64, 10000.0, 64, 0, False)
    assert hash(spec) == hash(RopeSpec(64, 10000, 64))
    others = [
        RopeSpec(66),
        RopeSpec(64, 10001.0),
        RopeSpec(64, rotary_dim=32),
        RopeSpec(64, rotary_dim=32, start=2),
        RopeSpec(64, interleaved=True),
    ]
    assert all(spec != other for other in others)
    assert len({spec, RopeSpec(64), *others}) == 1 + len(others)


def test_the_hash_is_computed_once() -> None:
    spec = RopeSpec(64)
    before = hash(spec)
    # A hash computed now would see another base.
    object.__setattr__(spec, "base", 5.0)
    assert hash(spec) == before
    assert hash(RopeSpec(64, 5.0)) != before


def test_frequencies() -> None:
    made = RopeSpec(64, base=5e5, rotary_dim=32, start=8).frequencies()
    assert made.inv_freq.tolist() == [float(omega) for omega in oracle.frequencies(5e5, 32)]
    assert made.attention_scaling == 1.0
    assert RopeSpec(64).frequencies(100) == RopeSpec(64).frequencies()


COPIES: list[Callable[[RopeSpec], RopeSpec]] = [
    copy.copy,
    copy.deepcopy,
    dataclasses.replace,
    *(lambda spec, n=n: pickle.loads(pickle.dumps(spec, n)) for n in range(2, 6)),  # type: ignore[misc]
]


@pytest.mark.parametrize("make", COPIES)
def test_copies_are_equal_and_rotate_equally(make: Callable[[RopeSpec], RopeSpec]) -> None:
    spec = RopeSpec(20, base=5e5, rotary_dim=12, start=3, interleaved=True)
    other = make(spec)
    assert other == spec
    assert hash(other) == hash(spec)
    x = torch.randn(7, 20)
    assert torch.equal(rotate(x, other, 99, layout="sd"), rotate(x, spec, 99, layout="sd"))


def test_replace_derives_anew() -> None:
    spec = RopeSpec(20)
    other = dataclasses.replace(spec, base=5e5)
    assert other == RopeSpec(20, 5e5)
    assert not torch.equal(other.at().words, spec.at().words)
    assert hash(other) == hash(RopeSpec(20, 5e5))


def test_a_pickle_carries_no_tensor() -> None:
    spec = RopeSpec(4096)
    spec.at(5)
    assert len(pickle.dumps(spec)) < 300


# --- prepared rotations ---------------------------------------------------------------------------


def test_at_gives_words_and_positions() -> None:
    rotation = RopeSpec(8).at(5)
    assert isinstance(rotation, PreparedRotation)
    assert rotation.words.dtype == torch.int64
    assert rotation.words.shape == (1, 1, 1, 4)
    assert rotation.words.flatten().tolist() == [
        oracle.phase(omega).word for omega in oracle.frequencies(10000.0, 8)
    ]
    assert rotation.turns is None
    assert (rotation.ids, rotation.offset, rotation.ramp) == (None, 5, True)
    assert rotation.device == CPU
    with pytest.raises(dataclasses.FrozenInstanceError):
        rotation.offset = 6  # type: ignore[misc]


def test_turns_are_there_where_a_frequency_passes_half_a_turn() -> None:
    turns = RopeSpec(8, base=1e-3).at().turns
    assert turns is not None
    assert turns.shape == (1, 1, 1, 4)
    assert turns.flatten().tolist() == [
        oracle.phase(omega).turns for omega in oracle.frequencies(1e-3, 8)
    ]


def test_at_goes_where_the_ids_are() -> None:
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    assert RopeSpec(8).at(ids).device.type == "meta"
    assert RopeSpec(8).at(torch.arange(3)).device == CPU
    assert RopeSpec(8).at(None).device == CPU
    moved = RopeSpec(8).at(torch.arange(3), device="meta")
    assert moved.device.type == "meta"
    assert moved.ids is not None
    assert moved.ids.device.type == "meta"


WHERE: dict[str, positions.PositionsLike] = {
    "none": None,
    "offset": 5,
    "negative": -5,
    "ids": torch.tensor([4, 2, 0]),
    "ids per row": torch.tensor([[4, 2, 0], [9, 9, 9]]),
    "fractional": torch.tensor([0.25, 7.3, -1e5]),
    "offset per row": positions.per_row(torch.tensor([3, 8191])),
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_a_prepared_rotation_gives_the_same_bits(where: positions.PositionsLike) -> None:
    spec = RopeSpec(6)
    x = torch.randn(2, 3, 6)
    wanted = rotate(x, spec, where, layout="bsd")
    rotation = spec.at(where)
    assert torch.equal(rotate(x, rotation, layout="bsd"), wanted)
    assert torch.equal(rotate(x, rotation, layout="bsd"), wanted)


# --- what nothing can spoil -----------------------------------------------------------------------

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "FakeTensorMode": FakeTensorMode,
    "meta device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "default float64": nullcontext,  # the test sets the default dtype
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def tables_of(spec: RopeSpec) -> list[torch.Tensor]:
    """Every tensor that a spec keeps, found by walking what it holds."""
    found: list[torch.Tensor] = []

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, (tuple, list)):
            for item in value:
                walk(item)

    walk(vars(spec))
    return found


@pytest.mark.parametrize("used_inside", [False, True])
@pytest.mark.parametrize("base", [1e4, 1e-3])
@pytest.mark.parametrize("name", MODES)
def test_a_spec_made_in_a_mode_works_after_it(name: str, base: float, used_inside: bool) -> None:
    wanted_spec = RopeSpec(10, base=base)
    x, ids = torch.randn(4, 10), torch.tensor([3.5, 0.0, 1e6, -2.25])
    wanted = rotate(x, wanted_spec, ids, layout="sd")
    default = torch.get_default_dtype()
    try:
        if name == "default float64":
            torch.set_default_dtype(torch.float64)
        with MODES[name]():
            spec = RopeSpec(10, base=base)
            if used_inside:
                rotate(torch.ones(4, 10), spec, 7, layout="sd")
                spec.at(3)
    finally:
        torch.set_default_dtype(default)
    assert spec == wanted_spec
    rotation = spec.at(ids)
    for tensor in (rotation.words, *tables_of(spec)):
        assert not isinstance(tensor, FakeTensor)
        assert not tensor.is_inference()
        assert tensor.dtype == torch.int64
    assert rotation.words.device == CPU
    assert torch.equal(rotation.words, wanted_spec.at().words)
    assert torch.equal(rotate(x, spec, ids, layout="sd"), wanted)
    # And autograd may save its tensors, which it may not of inference tensors.
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rotate(leaf, spec, ids, layout="sd").sum(), leaf)
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
    assert torch.equal(spec.at().words, RopeSpec(10).at().words)


def test_a_table_is_kept_per_device() -> None:
    spec = RopeSpec(8)
    assert spec.at(1).words is spec.at(2).words
    assert spec.at(1, device="meta").words is spec.at(2, device="meta").words
    assert spec.at(1, device="meta").device.type == "meta"
    assert spec.at(1).device == CPU


def test_words_outside_of_a_fake_mode_are_not_fake_ones_of_it() -> None:
    spec = RopeSpec(8)
    with FakeTensorMode():
        inside = spec.at(1).words
    assert isinstance(inside, FakeTensor)
    assert not isinstance(spec.at(1).words, FakeTensor)


def test_a_cpu_table_survives_a_compiled_first_use() -> None:
    """Compiling traces through `at`; what it leaves behind must be usable and real."""
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
    wanted_meta = torch.Size([4, 16])
    spec = RopeSpec(16, base=777.0)
    start = threading.Barrier(8)
    failures: list[object] = []

    def work(device: str) -> None:
        start.wait()
        for _ in range(50):
            if device == "meta":
                y = rotate(x.to("meta"), spec, 11, layout="sd")
                if y.shape != wanted_meta or y.device.type != "meta":
                    failures.append(y)
            elif not torch.equal(rotate(x, spec, 11, layout="sd"), wanted):
                failures.append("other bits")

    threads = [threading.Thread(target=work, args=(("cpu", "meta")[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_many_specs_made_in_many_threads() -> None:
    """Construction shares caches of rules and words."""
    bases = [1000.0 + i for i in range(24)]
    wanted = {base: [oracle.phase(w).word for w in oracle.frequencies(base, 8)] for base in bases}
    start = threading.Barrier(4)
    failures: list[float] = []

    def work() -> None:
        start.wait()
        for base in bases:
            if RopeSpec(8, base=base).at().words.flatten().tolist() != wanted[base]:
                failures.append(base)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- sentences ------------------------------------------------------------------------------------


def refused(kind: type[Exception], text: str) -> AbstractContextManager[object]:
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize("dims", [{"head_dim": 7}, {"head_dim": 8, "rotary_dim": 7}])
def test_odd_dims(dims: dict[str, int]) -> None:
    with refused(ValueError, "[RopeSpec] rotary_dim must be even but got 7."):
        RopeSpec(**dims)


@pytest.mark.parametrize(
    "rotary_dim, start, got",
    [(10, 0, "[0, 10)"), (4, 6, "[6, 10)"), (4, -2, "[-2, 2)"), (-2, 4, "[4, 2)")],
)
def test_a_slice_outside_the_head(rotary_dim: int, start: int, got: str) -> None:
    rule = "channels [start, start + rotary_dim) must lie in [0, 8) but got"
    with refused(ValueError, f"[RopeSpec] {rule} {got}."):
        RopeSpec(8, rotary_dim=rotary_dim, start=start)


@pytest.mark.parametrize("base", [0, -1.0, math.nan, math.inf, -math.inf])
def test_a_base_that_is_no_base(base: float) -> None:
    with refused(
        ValueError,
        f"[RopeSpec] base must be positive and finite, above 1e-18 and below 1e300, but got {base}.",
    ):
        RopeSpec(8, base=base)


def test_a_base_may_be_any_real_number() -> None:
    for base in (Fraction(3, 2), numpy.float32(1.5), 1.5):
        assert RopeSpec(8, base=base) == RopeSpec(8, base=1.5)


@pytest.mark.parametrize("base", [True, "10000", None, 1j, torch.tensor(1e4)])
def test_a_base_that_is_no_number(base: object) -> None:
    with refused(TypeError, f"[RopeSpec] base must be a number but got {base!r}."):
        RopeSpec(8, base=base)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["head_dim", "rotary_dim", "start"])
@pytest.mark.parametrize("value", [True, 4.0, "4"])
def test_a_size_that_is_no_int(name: str, value: object) -> None:
    sizes: dict[str, object] = {"head_dim": 8, name: value}
    with refused(TypeError, f"[RopeSpec] {name} must be an int but got {value!r}."):
        RopeSpec(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_interleaved_that_is_no_bool(value: object) -> None:
    with refused(TypeError, f"[RopeSpec] interleaved must be a bool but got {value!r}."):
        RopeSpec(8, interleaved=value)  # type: ignore[arg-type]


def test_positions_of_another_number_of_axes() -> None:
    rule = "positions must have 1 axis for this spec but got 2 (positions: int64[2, 1, 9])."
    with refused(ValueError, f"[at] {rule}"):
        RopeSpec(8).at(positions.multi_axis(torch.zeros(2, 9, dtype=torch.int64)))


def test_at_refuses_what_is_no_position() -> None:
    with refused(TypeError, "[at] positions must not be a bool but got True."):
        RopeSpec(8).at(True)


def test_sizes_that_describe_no_channel_are_fine() -> None:
    assert RopeSpec(0).rotary_dim == 0
    assert RopeSpec(5, rotary_dim=0).frequencies().exact == ()
