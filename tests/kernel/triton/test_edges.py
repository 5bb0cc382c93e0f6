"""Edge shapes, memory, and wrong direct calls of the Triton kernels; see test_rotation.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import oracle_rounding as rounded
from tests.support.tolerances import assert_same_bits
from tests.support.triton.cases import (
    DEVICE,
    needs_triton,
    noise,
    phases,
    words,
)
from tests.support.triton.running import operators
from tightrope.activations import ACTS, RMS_NORM
from tightrope.backends.reference import compose
from tightrope.ops.schema import (
    FORWARD,
    FULL,
    LOG,
    PHASES,
    ROUNDINGS,
    SLOPE,
    TRANSPOSE,
    Options,
)

pytestmark = [needs_triton, pytest.mark.usefixtures("few_programs")]


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (1, 1, 1, 8)])
def test_edge_shapes(shape: tuple[int, ...]) -> None:
    x = noise(*shape, seed=1).float().to(DEVICE)
    for options in (Options(), Options(gate=LOG)):
        extras = [torch.zeros(1, 1, 1, 1, device=DEVICE)] if options.gate else []
        (y,) = operators().rotate(
            x, None, words(1, 1, 1, 4), None, None, 3, options.pack(), 1.0, extras
        )
        (want,) = compose(x, None, words(1, 1, 1, 4), None, None, 3, options.pack(), 1.0, extras)
        torch.testing.assert_close(y, want)
    sums = operators().angle_gradients(
        x, None, x, None, words(1, 1, 1, 4), None, None, 0, Options().pack(), True, True
    )
    assert [tuple(s.shape) for s in sums] == [(1, shape[0], shape[2]), (1, 1, 1, 4)]
    weight = torch.ones(1, 8, device=DEVICE)
    options = Options(act=RMS_NORM, direction=1).pack()
    found = operators().rotate(
        x, None, words(1, 1, 1, 4), None, None, 3, options, 1.0, [weight, x], 1e-6
    )
    assert found[1].shape == weight.shape
    assert found[1].isfinite().all()


@pytest.mark.parametrize("into", [False, True], ids=["in place", "out"])
def test_a_gate_in_the_memory_that_is_written(into: bool) -> None:
    """A gate that shares memory with the result is read before it is overwritten."""
    memory = noise(1, 2, 301, 8, seed=1).float().to(DEVICE) / 4
    options = Options(gate=LOG).pack()
    arguments = (words(1, 1, 1, 4), None, None, 5, options, 1.0)
    gate = memory[:, :, :-1].clone()
    want = operators().rotate(memory[:, :, 1:], None, *arguments, [gate])[0]
    x, gate = memory[:, :, 1:], memory[:, :, :-1]
    if into:
        x = x.clone()
        operators().rotate_into(x, None, memory[:, :, 1:], None, *arguments, [gate])
    else:
        operators().rotate_(x, None, *arguments, [gate])
    assert_same_bits(memory[:, :, 1:], want)


@pytest.mark.parametrize("act, slope", [("relu", 1.0), ("leaky_relu", 0.01)])
def test_the_slope_at_nan_is_that_of_torch(act: str, slope: float) -> None:
    x = torch.full((1, 1, 1, 8), math.nan, device=DEVICE)
    options = Options(act=ACTS.index(act), direction=1).pack()
    (y,) = operators().rotate(
        torch.ones_like(x), None, words(1, 1, 1, 4) * 0, None, None, 0, options, 1.0, [x]
    )
    assert torch.equal(y, torch.full_like(x, slope))


def test_calls_that_run_the_definition() -> None:
    """Without pairs, with too wide a head, or with float64 and an act, the definition runs."""
    x = noise(1, 2, 3, 8, seed=1).to(DEVICE)
    nothing = words(1, 1, 1, 4)[..., :0]
    assert torch.equal(
        operators().rotate(x, None, nothing, None, None, 0, Options().pack(), 1.0)[0], x
    )
    silu = Options(act=ACTS.index("silu")).pack()
    arguments = (words(1, 1, 1, 4), None, None, 5, silu, 1.0)
    want = compose(x, None, *arguments)[0]
    assert torch.equal(operators().rotate(x, None, *arguments)[0], want)
    out, again = torch.empty_like(x), x.clone()
    operators().rotate_into(x, None, out, None, *arguments)
    operators().rotate_(again, None, *arguments)
    assert torch.equal(out, want)
    assert torch.equal(again, want)
    broad = noise(1, 1, 2, 5000, seed=1).float().to(DEVICE)
    arguments = (words(1, 1, 1, 2500), None, None, 5, Options().pack(), 1.0)
    (found,) = operators().rotate(broad.requires_grad_(), None, *arguments)
    assert torch.equal(found, compose(broad, None, *arguments)[0])
    assert (
        not found.requires_grad
    )  # a call may come without the dispatcher, and autograd is above it


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rounding", [0, 1, 2])
def test_roundings_and_full_tables(rounding: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Roundings "each" and "wide" give the bits of their formulas, by tables and by phase words."""
    name = ROUNDINGS[rounding]
    x = noise(2, 3, 5, 40, seed=1).to(dtype).to(DEVICE)
    turning = x[..., 2:38]
    tables = [noise(1, 1, 5, 36, seed=seed).to(DEVICE) for seed in (2, 3)]
    for held, step in ((dtype, 1), (torch.float32, 1), (torch.float32, 2)):
        # With step 2, the entries of a table are not adjacent in memory.
        cos, sin = (torch.stack((t.to(held),) * step, -1).flatten(-2)[..., ::step] for t in tables)
        for direction in (FORWARD, TRANSPOSE):
            options = Options(
                start=2,
                interleaved=interleaved,
                direction=direction,
                source=FULL,
                rounding=rounding,
            )
            arguments = (cos, sin, None, 0, options.pack(), 1.0)
            (y,) = operators().rotate(x, None, *arguments)
            assert_same_bits(y[..., :2], x[..., :2])
            if name == "once":
                torch.testing.assert_close(y, compose(x, None, *arguments)[0])
                continue
            want = rounded.rotate(turning, cos, sin, interleaved, name, direction == TRANSPOSE)
            assert_same_bits(y[..., 2:38], want)
    if name == "once":
        return
    primary = words(1, 1, 1, 18)
    first = rounded.join(
        *(torch.full((1, 1, 5, 18), v, device=DEVICE) for v in (1.0, 0.0)), interleaved
    )
    still = Options(interleaved=interleaved)
    (seen,) = operators().rotate(first, None, primary, None, None, 7, still.pack(), 1.5)
    held = dtype if name == "each" else torch.float32
    cos, sin = (
        rounded.join(one, one, interleaved).to(held) for one in rounded.split(seen, interleaved)
    )
    options = still._replace(start=2, rounding=rounding, narrow=rounding == 2)
    (y,) = operators().rotate(x, None, primary, None, None, 7, options.pack(), 1.5)
    assert_same_bits(y[..., 2:38], rounded.rotate(turning, cos, sin, interleaved, name))


X = noise(2, 2, 3, 8, seed=1).float().to(DEVICE)
W = words(1, 1, 1, 4)
BY_PHASES = Options(source=PHASES)
# What is wrong -> the arguments that a sound call has otherwise, and the error.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "words": ({"primary": W.float()}, "phase words must be contiguous"),
    "turns": ({"secondary": W[..., :1]}, "turns must have the shape"),
    "layout": ({"q": X[0]}, "fit the layout"),
    "k": ({"k": X.double()}, "share a dtype"),
    "tokens of k": ({"k": X[:, :, :1]}, "share rows"),
    "width": ({"options": Options(start=2)}, "outside the head"),
    "rows": ({"primary": words(1, 3, 1, 4)}, "angles must have 1 row"),
    "heads": ({"primary": words(1, 1, 3, 4)}, "angles must have 1 head"),
    "positions": (
        {"positions": X[:1, :1, :2, 0], "options": Options(add_index=False)},
        "positions must have the tokens",
    ),
    "rows of positions": ({"positions": X.new_zeros(1, 3, 1)}, "positions must have 1 row"),
    "axes of positions": ({"positions": X.new_zeros(2, 1, 1)}, "positions must be"),
    "dtype of positions": ({"positions": X[:1, :1, :1, 0].bool()}, "positions must be int32"),
    "phases": ({"options": BY_PHASES}, "phases must be int32 or int64"),
    "pairs of phases": (
        {"primary": phases((1, 1, 3, 2), torch.int32), "secondary": W, "options": BY_PHASES},
        "phases must have the pairs",
    ),
    "sines": ({"primary": X, "options": Options(source=3)}, "must come with sines"),
    "gate": ({"options": Options(gate=LOG), "extras": [X[..., :3]]}, "gates must be"),
    "slopes": (
        {"primary": words(2, 1, 1, 4), "options": Options(gate=SLOPE), "extras": [X[0, 0, :1]]},
        "positions of 1 axis",
    ),
    "weight": (
        {"options": Options(act=RMS_NORM), "extras": [X[0, 0, :1, :4]]},
        "weights must be",
    ),
    "inputs": (
        {"options": Options(act=1, direction=1), "extras": [X[:, :1]]},
        "inputs must have",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_direct_call_is_refused(case: str) -> None:
    changes, sentence = WRONG[case]
    given = {"q": X, "k": None, "primary": W, "secondary": None, "positions": None}
    given |= {"options": Options(), "extras": []} | changes
    *tensors, options, extras = given.values()
    with pytest.raises(RuntimeError, match=sentence):
        operators().rotate(*tensors, 0, options.pack(), 1.0, extras)


def freed(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor like x whose storage was freed, as FSDP frees that of parameters."""
    copy = x.clone()
    copy.untyped_storage().resize_(0)
    return copy


READ: dict[str, Callable[[], list[Any]]] = {
    "words": lambda: [
        words(1, 1, 1, 4),
        words(1, 1, 1, 4),
        torch.ones(1, 2, 3, dtype=torch.int64, device=DEVICE),
        0,
        Options(add_index=False),
    ],
    "tables": lambda: [torch.ones(1, 1, 3, 4, device=DEVICE)] * 2 + [None, 0, Options(source=3)],
    "phases": lambda: [words(1, 1, 3, 4), words(1, 1, 1, 4), None, 0, Options(source=PHASES)],
    "weight": lambda: [
        *(words(1, 1, 1, 4), None, None, 0, Options(act=RMS_NORM)),
        torch.ones(1, 8, device=DEVICE),
    ],
    "slope": lambda: [
        *(words(1, 1, 1, 4), None, None, 0, Options(gate=SLOPE)),
        torch.ones(1, 8, device=DEVICE),
    ],
}


@pytest.mark.parametrize("case", READ)
def test_freed_storage_is_refused(case: str) -> None:
    primary, secondary, where, offset, options, *extras = READ[case]()
    given = [X, None, primary, secondary, where, offset, options.pack(), 1.0, extras, 1e-6]
    operators().rotate(*given)
    for at in range(5):
        if given[at] is not None:
            with pytest.raises(RuntimeError, match="tensors must have their memory"):
                operators().rotate(*given[:at], freed(given[at]), *given[at + 1 :])
    for one in extras:
        with pytest.raises(RuntimeError, match="tensors must have their memory"):
            operators().rotate(*given[:8], [freed(one)], 1e-6)


def test_overlapping_memory_is_refused() -> None:
    x = X.clone()
    arguments = (words(1, 1, 1, 4), None, None, 0, Options().pack(), 1.0)
    for _ in range(2):
        for xs in ((x[:1].expand(2, -1, -1, -1), None), (x, x)):
            with pytest.raises(RuntimeError, match="memory overlaps"):
                operators().rotate_(*xs, *arguments)
        for given, out in ((x[:, :, :2], x[:, :, 1:]), (x, x.transpose(0, 1))):
            with pytest.raises(RuntimeError, match="memory overlaps"):
                operators().rotate_into(given, None, out, None, *arguments)
    y, z = x.clone(), torch.empty_like(x)
    operators().rotate_into(y, None, y, None, *arguments)  # each program reads before it writes
    operators().rotate_into(x, None, z, None, *arguments)
    assert torch.equal(y, z)
    fused = noise(2, 3, 4, 8, seed=1).float().to(DEVICE)
    operators().rotate_(
        fused[:, :, :2].transpose(1, 2), fused[:, :, 2:].transpose(1, 2), *arguments
    )


@pytest.mark.parametrize(
    "act", ["relu", "sigmoid", "silu", "gelu", "elu", "softplus", "exp", "leaky_relu", "tanh"]
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore::RuntimeWarning")
def test_infinities_are_those_of_the_definition(act: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0, -1.0], device=DEVICE).reshape(1, 1, 1, 5)
    still = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=DEVICE)
    for direction in (0, 1):
        options = Options(act=ACTS.index(act), direction=direction, start=3).pack()
        given = torch.ones_like(x) if direction else x
        arguments = (still, None, None, 0, options, 1.0, [x] if direction else [])
        (got,) = operators().rotate(given, None, *arguments)
        (want,) = compose(given, None, *arguments)
        assert torch.equal(got[..., :3].isnan(), want[..., :3].isnan())
        assert torch.equal(got[..., :3].nan_to_num(7.0), want[..., :3].nan_to_num(7.0))


def test_more_heads_than_a_grid_holds_are_left_to_the_definition() -> None:
    x = torch.ones(1, 65_536, 1, 2, device=DEVICE)
    gate = torch.zeros(1, 65_536, 1, 1, device=DEVICE)
    (found,) = operators().gate_gradients(
        x, None, x, None, gate, None, None, 0, Options(gate=LOG).pack()
    )
    assert torch.equal(found, torch.full_like(gate, 2.0))
