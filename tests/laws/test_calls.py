"""Laws of every call, whatever its options: verbs, layouts, backends and transforms agree.

The cases contain every valid pair of values of any two options; see tests/support/calls.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from tests.support import oracle
from tests.support.calls import CASES, HEADS, ROWS, Call, allowed, is_defined, mapped
from tests.support.checkpointing import POLICIES, saving
from tests.support.functions import FUNCTIONS, Function, call_of
from tests.support.helpers import Copies, noise
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_each, assert_near, assert_same_bits, value
from tightrope import RopeSpec
from tightrope.functional import rotate
from tightrope.ops import schema
from tightrope.ops.schema import LAYOUTS

Tensors = Mapping[str, torch.Tensor]


def every_case(test: Callable[..., None]) -> Callable[..., None]:
    cases = pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
    return pytest.mark.one_in(2)(cases(test))


def every_call(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every case, and for calls of other functions."""
    calls, names = [*CASES, *FUNCTIONS.values()], [*map(str, range(len(CASES))), *FUNCTIONS]
    return pytest.mark.one_in(2)(pytest.mark.parametrize("case", calls, ids=names)(test))


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert closeness, relative to the largest channel of each head."""
    assert got.dtype == wanted.dtype
    size = wanted.double().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = (got.double() - wanted.double()).abs() / size
    assert error.max() <= 2 * value(f"f and P, {str(got.dtype)[6:]}")


def check_of(case: Mapping[str, Any]) -> Callable[..., None]:
    """Return the check that two results of a case agree."""
    return near if is_defined(case) else assert_same_bits


# --- destinations and layouts ---------------------------------------------------------------------


@needs_kernel
@every_case
def test_destinations_agree(case: Mapping[str, Any]) -> None:
    """New results, results in place and in given tensors, of q beside k or alone, and of prepared rotations."""
    base = Call(case)
    both, check = "qk" in case["verb"], check_of(case)
    wanted = base(**base.leaves)
    for verb in (
        ("rotate_qk", "rotate_qk_", "rotate_qk into")
        if both
        else ("rotate", "rotate_", "rotate into")
    ):
        other = Call({**case, "verb": verb})
        assert_each(check, other(**base.leaves), wanted)
    if both:
        alone = {name: x for name, x in base.leaves.items() if name != "k"}
        check(Call({**case, "verb": "rotate"})(**alone)[0], wanted[0])
    beside = {**case, "verb": "rotate_qk"}
    if not both and allowed(beside):
        check(Call(beside)(**base.leaves)[0], wanted[0])
    if case["frequencies"] in ("spec", "prepared"):
        prepared = Call({**case, "frequencies": "prepared"})
        arguments = prepared.arguments(**base.leaves)
        for _ in range(2):  # the second call reuses what the first one kept
            assert_each(check, prepared.run(*arguments), wanted)


OWN = "inv_freq", "phases"
OF_LAYERS = [c for c in CASES if c["phases"] != "none" or c["frequencies"].startswith("learned")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", OF_LAYERS, ids=range(len(OF_LAYERS)))
def test_a_layer_replaces_what_is_its_own(case: Mapping[str, Any]) -> None:
    """A rotation with other frequencies or phases is one that states them, also for gradients."""
    found = []
    for replaces in (False, True):
        call = Call(case)
        leaves, learned = call.new_leaves()
        xs, (rope,), options = call.arguments(**leaves)
        if replaces:
            shared = Call(case)
            shared.leaves = {name: x for name, x in leaves.items() if name not in OWN}
            _, (start, *where), _ = shared.arguments()
            start = start.at(*where) if isinstance(start, RopeSpec) else start
            rotate(xs[0].detach(), start, layout=case["layout"])  # none of what it keeps is taken
            rope = start.having(inv_freq=rope.inv_freq).having(phases=rope.phases)
        ys = call.run(xs, (rope,), options)
        slopes = torch.autograd.grad([y.sum() for y in ys], list(learned.values()))
        found.append([*ys, *slopes])
    assert_same_bits(*found)


@needs_kernel
@every_case
def test_layouts_and_strides_agree(case: Mapping[str, Any]) -> None:
    call, layout = Call(case), case["layout"]
    check, wanted = check_of(case), call(**call.leaves)
    xs = {name: x for name, x in call.leaves.items() if name in "qk"}
    spread = {name: torch.stack((x, x * torch.nan), -1)[..., 0] for name, x in xs.items()}
    turned = {name: x.transpose(-1, 0).contiguous().transpose(-1, 0) for name, x in xs.items()}
    for own in (spread, turned):
        found = call(**call.leaves | own)
        assert_each(check, found, wanted)
        assert found[0].stride() == torch.empty_like(own["q"]).stride()
    whole = {name: oracle.as_bhsd(x, layout) for name, x in xs.items()}
    found = Call({**case, "layout": LAYOUTS[0]})(**call.leaves | whole)
    assert_each(check, found, [oracle.as_bhsd(y, layout) for y in wanted])


@needs_kernel
@every_case
def test_the_kernel_is_near_the_definition(case: Mapping[str, Any]) -> None:
    """With the gradients of q and k; those of the results stay as they are."""
    found = []
    for backend in ("cpu", "reference"):
        call = Call({**case, "backend": backend})
        leaves = {name: x.clone().requires_grad_() for name, x in call.leaves.items()}
        ys = call(**leaves)
        xs = [name for name in leaves if name in "qk"]
        grads = [noise(*y.shape, seed=9).to(y.dtype) for y in ys]
        found.append([*ys, *torch.autograd.grad(ys, [leaves[name] for name in xs], grads)])
        assert_each(torch.equal, grads, [noise(*y.shape, seed=9).to(y.dtype) for y in ys])
    assert_each(near, *found)
    if case["rounding"] != "once" and case["dtype"].itemsize == 2:
        assert_same_bits(*(each[: len(ys)] for each in found))


@every_case
def test_the_inverse_undoes(case: Mapping[str, Any]) -> None:
    """Also gates and the attention scaling, by which it divides."""
    plain = {**case, "act": "none", "dtype": torch.float64}
    there, back = (Call({**plain, "inverse": inverse}) for inverse in (False, True))
    assert_near(back(q=there()[0])[0], there.leaves["q"], "float64 ways")


def gradients(call: Call | Function, run: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """Return the results of a call and the gradients of a loss, by the tensors that the case differentiates."""
    leaves, learned = call.new_leaves()
    ys = (run or call)(**leaves)
    loss = sum((y * y.detach().cos()).sum() for y in ys)
    return [*ys, *torch.autograd.grad(loss, list(learned.values()))]


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return a negated view with the values of x: its memory holds their negatives."""
    view = torch.complex(x, -x).conj().imag
    assert view.is_neg()
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
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def bare(value: Any) -> Any:
            return value.inside if isinstance(value, Wrapper) else value

        return func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))


EXTRAS = "weight", "gate", "inv_freq"


@pytest.mark.parametrize("make", [negated, Wrapper])
@every_case
def test_what_learns_is_taken_as_the_numbers_that_it_is(
    case: Mapping[str, Any], make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The dispatcher inspects tensors in a list only if the list is not optional: a kernel would read others' memory."""
    call = Call(case)
    others = {name: make(x) for name, x in call.leaves.items() if name in EXTRAS}
    if others:
        assert_each(near, call(**others), call())
    if others and make is negated:
        views = lambda **leaves: call(**leaves | {name: negated(leaves[name]) for name in others})  # noqa: E731
        wanted = gradients(call)
        assert_each(check_of(case), gradients(call, views), wanted)


# --- parts of a call: rows and heads do not affect each other ----------------------------------------

SIZES = {"b": ROWS, "h": HEADS}


@needs_kernel
@every_case
@pytest.mark.parametrize("axis", SIZES)
def test_a_row_or_a_head_is_rotated_as_if_alone(axis: str, case: Mapping[str, Any]) -> None:
    """With its own positions, frequencies, phases, length, norm and gate, where these differ."""
    case = {**case, "verb": "rotate"}
    if axis not in case["layout"]:
        case["layout"] = "bhsd"
    call, dim = Call(case), case["layout"].index(axis)
    (whole,) = call()
    parts = torch.cat([call.part(axis, index)()[0] for index in range(SIZES[axis])], dim)
    if not is_defined(case):
        assert_same_bits(parts, whole)
        return
    size = whole.double().abs().amax(-1, keepdim=True)
    error = (parts.double() - whole.double()).abs()
    assert bool((error <= 2 * value(f"f and P, {str(whole.dtype)[6:]}") * size).all())


# --- modes that watch ------------------------------------------------------------------------------


# Calls of other functions, out of place, by tables, and by rows whose frequencies depend on their length.
OTHERS = "rotary_apply", "dynamic, by ids", "longrope, by ids"
CHECKPOINTED = [*CASES[::5], *(FUNCTIONS[name] for name in OTHERS)]


@pytest.mark.parametrize("case", CHECKPOINTED, ids=range(len(CHECKPOINTED)))
def test_selective_checkpointing_gives_the_same_results_and_gradients(case: Any) -> None:
    """In the backward pass it repeats the forward pass, and takes each saved result by its number.

    Evaluation before training, in inference mode, leaves nothing that the backward pass could not use.
    """
    first = call_of(case)
    with torch.inference_mode():
        first()
    assert_each(assert_same_bits, gradients(first), gradients(call_of(case)))

    def found(name: str | None) -> list[torch.Tensor]:
        call = call_of(case)  # with nothing kept

        def layer(names: list[str], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(y.sin() * y for y in call(**dict(zip(names, tensors))))

        def run(**leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
            arguments = list(leaves), *leaves.values()
            if name is None:
                return layer(*arguments)
            context = saving(POLICIES[name])
            return checkpoint(layer, *arguments, use_reentrant=False, context_fn=context)

        return gradients(call, run)

    # torch refuses to save a tensor that then changes in place. Where results are copied into x, autograd adds the
    # zeros of what x was, and a gradient of -0 becomes 0.
    in_place = not isinstance(case, Function) and case["verb"].endswith("_")
    check = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    for name in ["rotations"] if in_place else POLICIES:
        assert_each(check if in_place else assert_same_bits, found(name), found(None))


# --- without data ---------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
def test_shapes_without_data(case: Any, fake: bool) -> None:
    """Meta or fake tensors give the shapes, dtypes and strides of real ones, and of their gradients."""
    call = call_of(case)

    def run(leaves: Tensors) -> tuple[Any, ...]:
        given, learned = call.new_leaves(leaves)
        ys = call(**given)
        return ys, torch.autograd.grad([y.sum() for y in ys], list(learned.values()))

    wanted = run(call.leaves)
    with FakeTensorMode() if fake else torch.device("meta") as mode:
        move = mode.from_tensor if fake else lambda x: x.to("meta")
        found = run({name: move(x) for name, x in call.leaves.items()})
    for got, want in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.device.type == ("cpu" if fake else "meta")
    assert [y.stride() for y in found[0]] == [y.stride() for y in wanted[0]]


@every_case
def test_a_repeated_call_on_a_device_copies_nothing(case: Mapping[str, Any]) -> None:
    """Nor does its backward pass: a copy would wait for the device, and no CUDA graph could be captured."""
    call = Call(case)
    leaves, learned = call.new_leaves({name: x.to("meta") for name, x in call.leaves.items()})
    with torch.device("meta"):
        arguments = call.arguments(**leaves)

    def step() -> None:
        ys = [y.sum() for y in call.run(*arguments)]
        torch.autograd.grad(ys, list(learned.values()), retain_graph=True)

    step()
    with Copies() as mode:
        step()
    assert mode.found == []


# --- transforms -----------------------------------------------------------------------------------


def stacked(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, 0.75 * x, 1.25 * x))


@every_call
def test_vmap_and_gradients_in_it(case: Any) -> None:
    """Mapped calls and their gradients are those of a loop, whichever tensors are mapped."""
    call = case if isinstance(case, Function) else mapped(case, dtype=torch.float64)
    names = call.learned()
    stacks = [stacked(call.leaves[name]) for name in names]

    def turned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(**dict(zip(names, tensors)))

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return sum(y.pow(3).sum() for y in turned(*tensors))

    rows = list(zip(*stacks))
    alone = [turned(*row) for row in rows]
    last = [x.movedim(0, -1) for x in stacks]
    found = torch.vmap(turned, in_dims=-1)(*last)
    assert_near(found, [torch.stack(ys) for ys in zip(*alone)], "float64 ways")
    slopes = []
    for row in rows:
        leaves = [x.clone().requires_grad_() for x in row]
        slopes.append(torch.autograd.grad(loss(*leaves), leaves))
    wanted = [torch.stack(each) for each in zip(*slopes)]
    every = tuple(range(len(names)))
    assert_near(
        torch.vmap(torch.func.grad(loss, every))(*stacks), wanted, "float64 ways, higher order"
    )
    leaves = [x.requires_grad_() for x in stacks]
    found = torch.autograd.grad(torch.vmap(loss)(*leaves).sum(), leaves)
    assert_near(found, wanted, "float64 ways, higher order")


# --- registration ---------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of each operator of this library.

    Attributes:
        learns: whether copies require grad like the originals, for operators that have gradients.
    """

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.learns = learns
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tightrope":
            differentiable = (schema.rotate, schema.rotate_extras, schema.phase_drift)
            learns = self.learns and func in differentiable

            def kept(x: Any) -> Any:
                if not isinstance(x, torch.Tensor):
                    return x
                same = x.clone(memory_format=torch.preserve_format).detach()
                return same.requires_grad_(learns and x.requires_grad)

            self.calls.append((func, tree_map(kept, args)))
        return func(*args, **(kwargs or {}))


REGISTERED = [*CASES[::12], *list(FUNCTIONS.values())[::5]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", REGISTERED, ids=range(len(REGISTERED)))
def test_operators_are_registered_as_torch_asks(case: Any) -> None:
    """Those of the call and of its backward pass pass opcheck."""
    call = call_of(case)
    leaves, learned = call.new_leaves()
    with Recorder(learns=True) as there:
        loss = sum(y.square().sum() for y in call(**leaves))
    with Recorder(learns=False) as back:
        torch.autograd.grad(loss, list(learned.values()))
    for operator, arguments in there.calls + back.calls:
        torch.library.opcheck(operator, arguments)
