"""Extra tensors that are not plain: negated views, wrappers, DTensors, sparse tensors.

The operator takes its extra tensors as a list. The dispatcher inspects the tensors in a list only
if the list is not an optional argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from tests.support.helpers import Watcher, refusals
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, gates, positions
from tightrope.activations import ACTS, RMSNorm
from tightrope.frequencies import DynamicNTK
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    rerotate,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.ops import schema

SPEC = RopeSpec(8)
X = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
VALUES = torch.rand(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5

# Options that pass values (3, 8) as an extra tensor.
STAGES: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "a weight": lambda values: {"act": RMSNorm(values)},
    "a weight past 1": lambda values: {"act": RMSNorm(values, unit_offset=True)},
    "a weight of all heads": lambda values: {"act": RMSNorm(values[0])},
    "a gate": lambda values: {"gate": gates.Exp(values)},
    "a slope": lambda values: {"gate": gates.Slope(values)},
    "a given gate": lambda values: {"gate": gates.Given(values.expand(5, 3, 8))},
}


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return a negated view with the values of x: its memory holds their negatives."""
    view = torch.complex(x, -x).conj().imag
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


class Wrapper(torch.Tensor):
    """A wrapper subclass without memory of its own; operations on it return plain tensors."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Wrapper:
        self: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        self.inside = inside
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def bare(value: Any) -> Any:
            return value.inside if isinstance(value, Wrapper) else value

        return func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("make", [negated, Wrapper])
def test_numbers_are_taken_as_they_are(
    make: Callable[[torch.Tensor], torch.Tensor], kind: str, prepared: bool
) -> None:
    spec = SPEC.at(None) if prepared else SPEC
    plain, other = STAGES[kind](VALUES), STAGES[kind](make(VALUES))
    wanted = rotate(X, spec, **plain)
    rotate(X, spec, **plain)  # a prepared rotation may have cached its arguments by now
    assert_near(rotate(X, spec, **other), wanted, "float64 ways")
    assert_near(rotate_(X.clone(), spec, **other), wanted, "float64 ways")
    both = rotate_qk(X, X, spec, **plain), rotate_qk(X, X, spec, **other)
    assert_near(both[1][0], both[0][0], "float64 ways")
    assert_near(both[1][1], both[0][1], "float64 ways")
    inverse = "gate" in plain
    if inverse:
        wanted = rotate(X, spec, inverse=True, **plain)
        assert_near(rotate(X, spec, inverse=True, **other), wanted, "float64 ways")


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("make", [negated, Wrapper])
def test_their_gradients(make: Callable[[torch.Tensor], torch.Tensor], kind: str) -> None:
    found = []
    for how in (torch.Tensor.clone, make):
        x, values = X.clone().requires_grad_(), VALUES.clone().requires_grad_()
        # A wrapper is a leaf of its own.
        some = make(VALUES).requires_grad_() if how is Wrapper else how(values)
        y = rotate(x, SPEC, **STAGES[kind](some))
        leaf = some if how is Wrapper else values
        found.append(torch.autograd.grad(y.square().sum(), (x, leaf)))
    assert_near(*found, "float64 ways")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("act", ["silu", "softmax", "norm"])
def test_a_negated_input_of_an_act_has_its_gradient(act: str, dtype: torch.dtype) -> None:
    f: Any = RMSNorm(VALUES[0]) if act == "norm" else act
    x = X.to(dtype)
    pairs = torch.view_as_complex(torch.stack((x, -x), -1))
    found = []
    for view in (x.clone(), pairs.conj().imag):
        view.requires_grad_()
        y = rotate(view, SPEC, act=f)
        found += torch.autograd.grad(y.square().sum(), view)
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gate_in_the_memory_that_is_written(dtype: torch.dtype, prepared: bool) -> None:
    """The call uses the values that the gate had before the call overwrote them."""
    spec = SPEC.at(None) if prepared else SPEC
    memory = X.to(dtype)[0] / 4
    wanted = rotate(memory[None], spec, gate=gates.Given(memory.reshape(5, 3, 8).clone()))
    there = memory.clone()
    got = rotate_(there[None], spec, gate=gates.Given(there.reshape(5, 3, 8)))
    assert_same_bits(got, wanted)
    there = memory.clone()
    out = rotate(memory[None], spec, gate=gates.Given(there.reshape(5, 3, 8)), out=there[None])
    assert_same_bits(out, wanted)


@pytest.mark.parametrize("into", [False, True], ids=["in place", "out"])
@pytest.mark.parametrize("what", ["weight", "gate", "positions"])
def test_extra_tensors_of_k_in_the_memory_of_q(what: str, into: bool) -> None:
    """Extra tensors of k keep their values although the call first writes q.

    Options that differ for q and k make two calls; the second must not read results of the first.
    """

    def call(source: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        more: dict[str, Any] = {"act": ("silu", None)}
        if what == "weight":
            more = {"act": (None, RMSNorm(source[0, 0, 0]))}
        elif what == "gate":
            more["gate"] = (None, gates.Given(source.transpose(1, 2)))
        else:
            more["positions"] = source[:, 0, :, 0]
        if not into:
            rotate_qk_(q, k, SPEC, **more)
            return q, k
        return rotate_qk(q.clone(), k, SPEC, out=(q, torch.empty_like(k)), **more)

    q, k = X.float(), X.float().flip(-1)
    wanted = call(q.clone(), q.clone(), k.clone())
    memory = q.clone()
    assert_same_bits(call(memory, memory, k.clone()), wanted)


# Options that read `source`, which has q's shape. One call of the operator rotates q and k, or
# usually two if autograd records.
OF_BOTH: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "a weight": lambda source: {"act": (RMSNorm(VALUES[0]), RMSNorm(source[0, 0, 0]))},
    "a gate": lambda source: {"gate": (gates.Exp(VALUES), gates.Given(source.transpose(1, 2)))},
    "a slope": lambda source: {"gate": (gates.Slope(VALUES), gates.Slope(source[0, :, 0]))},
    "positions": lambda source: {"positions": source[:, 0, :, 0]},
    "positions and a norm": lambda source: {
        "positions": source[:, 0, :, 0],
        "act": RMSNorm(VALUES[0]),
    },
    "frequencies": lambda source: {"inv_freq": source[0, 0, 0, :4]},
}


@pytest.mark.parametrize("detached", [False, True], ids=["", "detached"])
@pytest.mark.parametrize("kind", OF_BOTH)
def test_gradients_of_extra_tensors_in_the_memory_of_q(kind: str, detached: bool) -> None:
    found = []
    for call in (rotate_qk, rotate_qk_):
        leaves = (X / 4).requires_grad_(), X.flip(-1).requires_grad_()
        q, k = (leaf * 1 for leaf in leaves)
        y, z = call(q, k, SPEC, **OF_BOTH[kind](q.detach() if detached else q))
        loss = y.square()[0].sum() + z.sin().sum()
        found.append((y, z, *torch.autograd.grad(loss, leaves)))
    assert_near(*found, "float64 ways")


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[torch.Tensor]:
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield distribute_tensor(VALUES, init_device_mesh("cpu", (1,)), [Replicate()])
    finally:
        torch.distributed.destroy_process_group()


def test_shards_are_refused(sharded: torch.Tensor) -> None:
    """DTensors are refused: a kernel would read memory that they do not have."""
    advice = "must be a local tensor but got a DTensor; pass its to_local() or full_tensor()."
    y = X.transpose(1, 2)
    calls: dict[str, Callable[[], object]] = {
        "[rotate] the weight of RMSNorm for x": lambda: rotate(X, SPEC, act=RMSNorm(sharded)),
        "[rotate_] the weight of RMSNorm for x": lambda: rotate_(
            X.clone(), SPEC.at(None), act=RMSNorm(sharded)
        ),
        "[rotate] log of the gate Given": lambda: rotate(
            X, SPEC, gate=gates.Given(sharded.expand(5, 3, 8))
        ),
        "[rotate] gamma of the gate Exp": lambda: rotate(X, SPEC, gate=gates.Exp(sharded)),
        "[rotate] slope of the gate Slope": lambda: rotate(X, SPEC, gate=gates.Slope(sharded)),
        "[lrpe_rotate_1d] theta": lambda: lrpe_rotate_1d(y, sharded[:, :4]),
        "[rotate] inv_freq": lambda: rotate(X, SPEC, inv_freq=sharded[:, :4]),
    }
    ids = sharded[0, :5].to(torch.int64)
    cos = torch.ones(5, 8)
    by_length = RopeSpec(8, scaling=DynamicNTK(4.0, 4))
    calls |= {
        "[rotate] positions": lambda: rotate(X, SPEC, ids),
        "[rotate_] positions": lambda: rotate_(X.clone(), SPEC.at(ids)),
        "[packed] cu_seqlens": lambda: positions.packed(ids),
        "[left_padded] attention_mask": lambda: positions.left_padded(ids[None]),
        "[explicit] positions": lambda: positions.explicit(positions.per_row(ids), 5),
        "[shard] positions": lambda: positions.shard(positions.multi_axis(ids[None]), 0, 1),
        "[concatenate] positions": lambda: positions.concatenate([ids]),
        "[seq_len] lengths": lambda: rotate(X, by_length, seq_len=ids[:1]),
        "[rerotate] positions": lambda: rerotate(X, SPEC, SPEC, 0, ids),
        "[apply_rotary_pos_emb] position_ids": lambda: apply_rotary_pos_emb(
            X, None, cos, cos, position_ids=ids
        ),
        "[rotate] out": lambda: rotate(X, SPEC, out=sharded.new_zeros(X.shape)),
    }
    for what, call in calls.items():
        with pytest.raises(TypeError, match=f"^{re.escape(f'{what} {advice}')}$"):
            call()
    assert_same_bits(
        rotate(X, SPEC, gate=gates.Exp(sharded.to_local())),
        rotate(X, SPEC, gate=gates.Exp(VALUES)),
    )


test_other_layouts_are_refused = refusals(
    TypeError={
        f"[{name} must be a dense tensor but got one that is sparse_coo.": partial(
            make, VALUES.to_sparse()
        )
        for name, make in (
            ("RMSNorm] weight", RMSNorm),
            ("Exp] gamma", gates.Exp),
            ("Slope] slope", gates.Slope),
            ("Given] log", gates.Given),
            ("lrpe_rotate_1d] theta", partial(lrpe_rotate_1d, X.transpose(1, 2))),
        )
    }
)


# Kind of extra tensor -> (the options that declare it, a function from values (3, 8) to its shape).
RAW: dict[str, tuple[schema.Options, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a weight": (schema.Options(act=ACTS.index("rms_norm")), lambda values: values),
    "a gate": (schema.Options(gate=schema.LOG), lambda values: values[None, :, None]),
    "a slope": (schema.Options(gate=schema.SLOPE), lambda values: values),
    "frequencies": (schema.Options(learned=True), lambda values: values[None, None, :, :4]),
    "an input": (
        schema.Options(act=ACTS.index("silu"), direction=schema.TRANSPOSE),
        lambda values: values.expand(2, 5, 3, 8).transpose(1, 2),
    ),
}


def raw(kind: str, values: torch.Tensor, how: str = "new", *, share: bool = True) -> torch.Tensor:
    """Call the raw operator with one extra tensor; all other tensors are plain.

    Args:
        kind: kind of the extra tensor.
        values: values of the extra tensor, (3, 8), brought to the shape of its kind.
        how: where results go: to "new" tensors, "in place", or "into" given tensors.
        share: whether k is rotated too, with the same extra tensor; never for "frequencies".
    """
    return carrying(kind, RAW[kind][1](values), how, share=share)


def carrying(kind: str, one: torch.Tensor, how: str = "new", *, share: bool = True) -> torch.Tensor:
    """Call the raw operator like :func:`raw`, with an extra tensor that has its final shape."""
    options, x = RAW[kind][0], X.clone()
    k, extras = (None, [one]) if kind == "frequencies" or not share else (x.clone(), [one, one])
    end = (SPEC.at().angles.words, None, None, 3, options.pack(), 1.0, extras, 0.0)
    if how == "new":
        made: list[torch.Tensor] = schema.rotate_extras(x, k, *end)
        return made[0]
    if how == "in place":
        schema.rotate_extras_(x, k, *end)
        return x
    outs = [torch.zeros_like(X), None if k is None else torch.zeros_like(X)]
    schema.rotate_extras_into(x, k, *outs, *end)
    assert outs[0] is not None
    return outs[0]


every_raw = pytest.mark.parametrize("kind", RAW)
every_way = pytest.mark.parametrize("how", ["new", "in place", "into"])


@every_way
@every_raw
@pytest.mark.parametrize("make", [negated, Wrapper])
def test_the_dispatcher_sees_extra_tensors(
    make: Callable[[torch.Tensor], torch.Tensor], kind: str, how: str
) -> None:
    """The dispatcher materialises negated views, and lets wrappers run the operator themselves."""
    wanted = raw(kind, VALUES, how)
    assert torch.equal(raw(kind, make(VALUES), how), wanted)
    assert torch.equal(raw(kind, make(VALUES), how, share=False), wanted)


@every_raw
def test_vmap_over_extra_tensors_alone_is_refused_in_place(kind: str) -> None:
    stack = torch.stack([VALUES, 2 * VALUES])
    with pytest.raises(RuntimeError, match=r"\[rotate_\] vmap: x is not mapped"):
        torch.vmap(lambda values: raw(kind, values, "in place"))(stack)
    with pytest.raises(RuntimeError, match=r"\[rotate_into\] vmap: out is not mapped"):
        torch.vmap(lambda values: raw(kind, values, "into"))(stack)


@every_way
@every_raw
def test_fake_extra_tensors(kind: str, how: str) -> None:
    """No kernel runs with a fake extra tensor, whose data it would need."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(VALUES)
    y = raw(kind, fake, how)
    if how == "new":
        assert isinstance(y, FakeTensor)
        assert (y.shape, y.dtype, y.stride()) == (X.shape, X.dtype, X.stride())
    else:
        assert torch.equal(y, X if how == "in place" else torch.zeros_like(X))
    with pytest.raises(RuntimeError, match="must be on one device"):
        raw(kind, VALUES.to("meta"), how)


def test_only_calls_that_carry_tensors_have_a_list() -> None:
    """Calls without extra tensors pass no list: even an empty list costs 0.5 microseconds."""
    with Watcher() as mode:
        rotate(X, SPEC)
        rotate_(X.clone(), SPEC.at(3), act="silu")
        rotate(X, SPEC, out=torch.empty_like(X))
        for stages in STAGES.values():
            rotate(X, SPEC, **stages(VALUES))
            rotate_(X.clone(), SPEC.at(3), **stages(VALUES))
            rotate(X, SPEC, **stages(VALUES), out=torch.empty_like(X))
        rotate(X, SPEC, inv_freq=VALUES[:, :4])
    plain = [
        "tightrope.rotate.default",
        "tightrope.rotate_.default",
        "tightrope.rotate_into.default",
    ]
    extras = [name.replace("default", "extras") for name in plain]
    names = [name for name in mode.seen if name.startswith("tightrope")]
    assert names == [*plain, *extras * len(STAGES), extras[0]]


def test_a_list_may_be_empty() -> None:
    """The overload with a list accepts an empty list, so a caller may use it for every call."""
    end = (SPEC.at().angles.words, None, None, 3, schema.Options().pack(), 1.0)
    x = X.clone().requires_grad_()
    (wanted,), (got,) = schema.rotate(x, None, *end), schema.rotate_extras(x, None, *end, [], 0.0)
    assert torch.equal(got, wanted)
    one, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, wanted))
    assert torch.equal(one, other)
    torch.library.opcheck(schema.rotate_extras, (x, None, *end, [], 0.0))
    both = torch.vmap(lambda x: schema.rotate_extras(x, None, *end, [], 0.0)[0])(X[None])
    assert torch.equal(both[0], wanted)
    with pytest.raises(RuntimeError, match="tightrope"):
        schema.rotate(X, None, *end[:4], RAW["a weight"][0].pack(), 1.0)


@needs_kernel
@pytest.mark.parametrize("kind", ["a weight", "a gate", "a slope", "an input"])
def test_a_kernel_refuses_extra_tensors_without_memory(kind: str) -> None:
    """A tensor whose memory was freed, as FSDP frees that of parameters, raises an error.

    Otherwise a kernel would read from address 0.
    """
    freed = RAW[kind][1](VALUES.clone())
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="tensors must have their memory"):
        carrying(kind, freed)
