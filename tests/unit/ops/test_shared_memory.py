"""Tensors that a call overwrites while it still needs them: results are those of calls into new tensors.

Options that differ for q and k make two calls; the second must not read what the first has written. Transforms
and compilers hide data pointers, so the library cannot see there which tensors share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import stated
from tests.support.helpers import noise
from tests.support.matrix import INDUCTOR, every_pair
from tests.support.raw_calls import ANGLES, assert_reads_before_it_writes
from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_

SPEC = RopeSpec(8)
X, VALUES = noise(2, 3, 5, 8) / 4, noise(3, 8, seed=1).abs() + 0.5
K = 4 * X.flip(-1)

Options = dict[str, Any]
# Options that read `source`, which has q's shape: in two calls of the operator, and in one.
OF_TWO: dict[str, Callable[[torch.Tensor], Options]] = {
    "a weight": lambda source: {"act": ("silu", RMSNorm(source[0, 0, 0]))},
    "a gate": lambda source: {"gate": (None, gates.Given(source.transpose(1, 2)))},
    "a gate and positions": lambda source: {
        "gate": (None, gates.Given(source.transpose(1, 2))),
        "positions": source[:, 1, :, 0],
    },
    "a slope": lambda source: {"gate": (None, gates.Slope(source[0, :, 0]))},
    "positions": lambda source: {"act": ("silu", None), "positions": source[:, 0, :, 0]},
    "frequencies": lambda source: {"act": ("silu", None), "inv_freq": source[0, 0, 0, :4]},
}
OF_ONE: dict[str, Callable[[torch.Tensor], Options]] = {
    "weights": lambda source: {"act": (RMSNorm(VALUES[0]), RMSNorm(source[0, 0, 0]))},
    "gates": lambda source: {"gate": (gates.Exp(VALUES), gates.Given(source.transpose(1, 2)))},
    "slopes": lambda source: {"gate": (gates.Slope(VALUES), gates.Slope(source[0, :, 0]))},
    "positions of both": lambda source: {"positions": source[:, 0, :, 0]},
    "positions and a norm": lambda source: {
        "positions": source[:, 0, :, 0],
        "act": RMSNorm(VALUES[0]),
    },
    "frequencies of both": lambda source: {"inv_freq": source[0, 0, 0, :4]},
}
KINDS = OF_TWO | OF_ONE


def in_place(source: torch.Tensor, q: torch.Tensor, k: torch.Tensor, kind: str, **more: Any) -> Any:
    return stated.call(rotate_qk_, q, k, SPEC, **KINDS[kind](source), **more)


def into(source: torch.Tensor, q: torch.Tensor, k: torch.Tensor, kind: str, **more: Any) -> Any:
    """Rotate k and a copy of q; the result for the copy is written over q."""
    out = q, torch.empty_like(k)
    return stated.call(rotate_qk, q * 1, k, SPEC, out=out, **KINDS[kind](source), **more)


def anew(source: torch.Tensor, q: torch.Tensor, k: torch.Tensor, kind: str, **more: Any) -> Any:
    return stated.call(rotate_qk, q, k, SPEC, **KINDS[kind](source), **more)


COMPILERS = (None, "aot_eager", *(["inductor"] if INDUCTOR else []))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.one_in(3)
@every_pair(
    lambda case: case.get("kind", "a weight") in OF_TWO or case.get("compiler") is None,
    kind=tuple(KINDS),
    verb=(in_place, into),
    compiler=COMPILERS,
    source=("a view", "an argument"),
    backend=(None, "reference"),
)
def test_results(
    kind: str, verb: Callable[..., Any], compiler: str | None, source: str, backend: str | None
) -> None:
    memory, k = X.float(), K.float()
    wanted = anew(memory, memory, k, kind, backend=backend)

    def run(other: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        own = q if source == "a view" else other.transpose(0, 1)
        return verb(own, q, k, kind, backend=backend)

    call = torch.compile(run, backend=compiler, fullgraph=True) if compiler else run
    found = call(memory.transpose(0, 1), memory, k)
    if compiler and backend is None:
        assert_same_bits(found, wanted)
    assert_near(found, wanted, "float32 ways")
    assert_same_bits(memory, found[0])
    assert memory is found[0] or compiler


WAYS = [
    *((kind, way, None) for kind in OF_TWO for way in ("vmap", "functionalize")),
    *((kind, way, None) for kind in KINDS for way in ("autograd", "detached")),
    *((kind, "aot_eager", None) for kind in ("a weight", "a gate", "positions", "frequencies")),
    *((kind, "aot_eager", "reference") for kind in ("a weight", "positions")),
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind, way, backend", WAYS)
def test_transforms_and_gradients(kind: str, way: str, backend: str | None) -> None:
    """Calls under autograd use q's old values, or the backward pass raises an error."""

    def results(verb: Callable[..., Any], x: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
        q, k = x * 1, k * 1
        q, k = verb(q.detach() if way == "detached" else q, q, k, kind, backend=backend)
        return q, k, q.square()[0].sum() + k.sin().sum()

    xs, run, derived = (X.float(), K.float()), results, way not in ("vmap", "functionalize")
    if way == "vmap":
        xs = tuple(torch.stack(pair).float() for pair in ((X, X / 2), (K, 2 * K)))
        run = torch.vmap(results, in_dims=(None, 0, 0))
    elif way == "functionalize":
        run = torch.func.functionalize(results)
    elif way == "aot_eager":
        run = torch.compile(results, backend=way, fullgraph=True)
    leaves = [x.clone().requires_grad_(derived) for x in xs]
    if way == "aot_eager" and backend is None and kind not in ("a weight", "a gate", "a slope"):
        # q's backward pass also reads positions or frequencies, which the result has overwritten.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(run(in_place, *leaves)[2], leaves)
        return
    found = []
    for verb in (in_place, anew):
        ys = run(verb, *leaves)
        found.append((*ys, *(torch.autograd.grad(ys[2], leaves) if derived else ())))
    assert_each(assert_near, *found, "float32 ways")


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gate_in_the_memory_that_is_written(dtype: torch.dtype, prepared: bool) -> None:
    spec, memory = SPEC.at(None) if prepared else SPEC, X.to(dtype)[0]

    def gate(x: torch.Tensor) -> gates.Given:
        return gates.Given(x.reshape(5, 3, 8))

    wanted = rotate(memory[None], spec, gate=gate(memory.clone()))
    there = memory.clone()
    assert_same_bits(rotate_(there[None], spec, gate=gate(there)), wanted)
    there = memory.clone()
    assert_same_bits(rotate(memory[None], spec, gate=gate(there), out=there[None]), wanted)


def test_one_tensor_is_not_written_twice_where_there_are_no_addresses() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return rotate_qk_(x, x, SPEC, act=("silu", "relu"))[0]

    with pytest.raises(ValueError, match="the results of q and k must not share memory"):
        torch.vmap(call)(noise(2, 1, 4, 5, 8))


@pytest.mark.parametrize("source", ANGLES)
def test_angles_that_several_threads_write_over(source: str) -> None:
    """Every thread needs the old positions, tables or phases: a tile of tokens is divided by its heads."""
    torch.set_num_threads(2)
    x = noise(2, 64, 16, 128).float()
    for _ in range(5):
        assert_reads_before_it_writes(torch.ops.tightrope, source, x)
