"""Modes that only watch change nothing, and no cache holds what another mode could not use.

A dispatch mode that counts FLOPs, tracks memory or checkpoints activations sees real tensors: all checks
stay on, and nothing is made anew in each call. Evaluation in inference mode leaves nothing behind that
training cannot use.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from tests.support.helpers import Watcher, noise, refused
from tightrope import RopeSpec, _tracing, frequencies, phases, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK, LongRoPE
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.gates import Exp, Scalar, Slope, XPos
from tightrope.spec import _lengths, _prepared, _words

LENGTH = 100
X = noise(2, 3, LENGTH, 16, dtype=torch.float32)
BY_LENGTH = {
    "dynamic NTK": RopeSpec(16, scaling=DynamicNTK(2.0, original_max_position=64)),
    "LongRoPE": RopeSpec(16, scaling=LongRoPE([1.0] * 8, [2.0] * 8, 64, factor=1.0)),
}


def saving(name: str) -> Callable[..., CheckpointPolicy]:
    """Return a policy that saves the results of operators whose names contain this one."""

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        return (
            CheckpointPolicy.MUST_SAVE if name in str(func) else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return policy


@contextlib.contextmanager
def selective_checkpointing() -> Iterator[None]:
    with create_selective_checkpoint_contexts(saving(""))[0]:
        yield


WATCHING: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "selective checkpointing": selective_checkpointing,
    "any other": Watcher,
}


def test_tracing_is_noticed() -> None:
    found = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append((_tracing.is_tracing(), _tracing.is_readable(x)))
        return x + 1

    with FakeTensorMode():
        note(torch.zeros(2))
    with FakeTensorMode(), Watcher():
        note(torch.zeros(2))
    with FunctionalTensorMode():
        note(torch.zeros(2))
    for mode in ("real", "fake", "symbolic"):
        make_fx(note, tracing_mode=mode)(torch.zeros(2))
    make_fx(note, pre_dispatch=True)(torch.zeros(2))
    torch.func.vmap(note)(torch.zeros(2))
    torch.func.functionalize(note)(torch.zeros(2))
    assert found == [(True, False)] * 9


def test_a_fake_tensor_is_not_readable_outside_of_its_mode() -> None:
    with FakeTensorMode():
        x = torch.zeros(2)
    assert not _tracing.is_tracing()
    assert not _tracing.is_readable(x)


# --- checks stay on -------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[], Any]] = {
    "beyond seq_len": lambda: rotate(X, BY_LENGTH["dynamic NTK"].at(0, seq_len=50)),
    "ids beyond seq_len": lambda: rotate(X, BY_LENGTH["LongRoPE"], torch.arange(100), seq_len=50),
    "positions start again": lambda: rotate(X, BY_LENGTH["LongRoPE"], torch.arange(100) % 90),
    "mislabelled tables": lambda: apply_rotary_pos_emb(
        X, None, *[noise(LENGTH, 8, dtype=torch.float32).repeat_interleave(2, 1)] * 2
    ),
    "ids outside the tables": lambda: apply_rotary_pos_emb(
        X, None, torch.ones(9, 16), torch.ones(9, 16), position_ids=torch.arange(LENGTH)
    ),
    "packed lengths that do not add up": lambda: positions.packed(torch.tensor([0, 7, 5])),
    "changed increments": lambda: changed_increments(),
}


def changed_increments() -> Any:
    angles = noise(1, 1, LENGTH, 8, dtype=torch.float32)
    given = phases.given(angles)
    angles.add_(1)
    return rotate(X.double(), RopeSpec(16), phases=given)


@pytest.mark.parametrize("mode", WATCHING)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_under_a_watching_mode(name: str, mode: str) -> None:
    with pytest.raises((ValueError, IndexError)) as without:
        REFUSED[name]()
    with WATCHING[mode](), refused(without.type, str(without.value)):
        REFUSED[name]()


# --- a watching mode sees the same operators in every call ------------------------------------------


def norm(x: torch.Tensor) -> RMSNorm:
    return RMSNorm(torch.ones(x.shape[-1]), 1e-6)


IDS = torch.arange(LENGTH)
COS, SIN = (function(noise(LENGTH, 8, dtype=torch.float32)) for function in (torch.cos, torch.sin))
CALLS: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "spec": lambda: lambda x: rotate(x, RopeSpec(16, base=77.0), 5),
    "one spec": lambda: (lambda spec: lambda x: rotate(x, spec, IDS))(RopeSpec(16, base=78.0)),
    "prepared": lambda: (lambda rope: lambda x: rotate(x, rope))(RopeSpec(16).at(IDS)),
    "in place": lambda: (lambda rope: lambda x: rotate_qk_(x * 1, x * 2, rope))(RopeSpec(16).at(5)),
    "in place, act": lambda: (lambda rope: lambda x: rotate_(x * 1, rope, act="silu"))(
        RopeSpec(16).at(5)
    ),
    "q and k": lambda: (lambda rope: lambda x: rotate_qk(x, x * 2, rope)[1])(RopeSpec(16).at(5)),
    "xPos": lambda: (lambda rope: lambda x: rotate(x, rope, gate=XPos(4, 8.0)))(
        RopeSpec(16).at(IDS)
    ),
    "norm and act": lambda: (
        lambda rope: lambda x: rotate_qk(x, x * 2, rope, act=(norm(x), "silu"))[0]
    )(RopeSpec(16).at(5)),
    "turns": lambda: (lambda spec: lambda x: rotate(x, spec))(
        RopeSpec(16, scaling=frequencies.Given.of(torch.linspace(9.0, 1.0, 8)))
    ),
    "norm": lambda: (lambda rope: lambda x: rotate(x, rope, act=norm(x)))(RopeSpec(16).at(5)),
    "act and number": lambda: (
        lambda rope: lambda x: rotate(x, rope, act="silu", gate=Scalar(2.0))
    )(RopeSpec(16).at(5)),
    "exp": lambda: (lambda rope: lambda x: rotate(x, rope, gate=Exp(torch.ones(16))))(
        RopeSpec(16).at(5)
    ),
    "slope": lambda: (lambda rope: lambda x: rotate(x, rope, gate=Slope(torch.full((16,), 1e-3))))(
        RopeSpec(16).at(5)
    ),
    "phases": lambda: (
        lambda rope: lambda x: rotate(x, rope, phases=phases.running(x[:, :, :, :8]))
    )(RopeSpec(16).at(0)),
    "learned": lambda: lambda x: rotate(x, RopeSpec(16), inv_freq=torch.ones(8)),
    "tables": lambda: (
        lambda x: apply_rotary_pos_emb(x, None, torch.cat((COS, COS), 1), torch.cat((SIN, SIN), 1))
    ),
    "one pair of tables": lambda: (lambda c, s: lambda x: apply_rotary_pos_emb(x, None, c, s))(
        torch.cat((COS, COS), 1), torch.cat((SIN, SIN), 1)
    ),
    "lrpe": lambda: lambda x: lrpe_rotate_1d(x.transpose(1, 2), torch.ones(8)).transpose(1, 2),
    "functional": lambda: rotary_pos_embedding,
}
for name, spec in BY_LENGTH.items():
    CALLS |= {
        f"{name}, offset": lambda spec=spec: lambda x: rotate(x, spec, -3),
        f"{name}, prepared": lambda spec=spec: (lambda rope: lambda x: rotate(x, rope))(
            spec.at(-3)
        ),
        f"{name}, ids": lambda spec=spec: (lambda rope: lambda x: rotate(x, rope))(spec.at(IDS)),
        f"{name}, per row": lambda spec=spec: (lambda rope: lambda x: rotate(x, rope))(
            spec.at(positions.per_row(torch.tensor([-3, -70])))
        ),
        f"{name}, seq_len": lambda spec=spec: (lambda rope: lambda x: rotate(x, rope))(
            spec.at(positions.per_row(torch.tensor([3, 70])), seq_len=[103, 200])
        ),
    }
for stack in ("transformers", "meta"):
    CALLS[stack] = lambda stack=stack: (lambda rope: lambda x: rotate(x, rope))(
        RopeSpec(16, interleaved=stack == "meta").at(IDS, stack=stack)
    )


POLICIES = {"everything": "", "rotations": "tightrope", "the rest": "aten"}


@pytest.mark.parametrize("learns", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        (name, policy)
        for name in CALLS
        for policy in POLICIES
        # torch refuses to save a tensor that then changes in place.
        if policy == "rotations" or "in place" not in name
    ],
)
def test_selective_checkpointing_gives_the_same_results_and_gradients(
    name: str, learns: bool, policy: str
) -> None:
    """In the backward pass it repeats the forward pass, and takes each saved result by its number."""
    others = 0.5 + noise(2, 3, LENGTH, 16, seed=1, dtype=torch.float32)

    def layer(call: Callable[..., Any], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = call(x * others)
        y = made[0] if isinstance(made, tuple) else made
        return (w * y).sin() * y * (w * 2)

    def context() -> Any:
        return create_selective_checkpoint_contexts(saving(POLICIES[policy]))

    found = []
    for checkpoints in (False, True):
        x, w = X.clone().requires_grad_(learns), others.clone().requires_grad_()
        arguments = CALLS[name](), x, w  # a call with nothing kept
        if checkpoints:
            loss = checkpoint(layer, *arguments, use_reentrant=False, context_fn=context)
        else:
            loss = layer(*arguments)
        loss.sum().backward()
        found.append((loss, w.grad, x.grad))
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_results_written_to_out_are_there_in_a_repeated_pass() -> None:
    """Selective checkpointing does not run an operator again whose result was saved."""
    w = X.clone().requires_grad_()

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, torch.nan)
        return w * rotate(x, RopeSpec(16), 5, out=out) * w

    def context() -> Any:
        return create_selective_checkpoint_contexts(saving("tightrope"))

    checkpoint(layer, X, w, use_reentrant=False, context_fn=context).sum().backward()
    assert torch.equal(w.grad, 2 * w * rotate(X, RopeSpec(16), 5))  # type: ignore[arg-type]


COMPILED: dict[str, Callable[[], Any]] = {
    **{name: lambda spec=spec: spec.at(IDS) for name, spec in BY_LENGTH.items()},
    "stack": lambda: RopeSpec(16).at(IDS, stack="transformers"),
    "plain": lambda: RopeSpec(16).at(IDS),
}


@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_under_a_watching_mode(name: str, first: str) -> None:
    """Dynamo runs such code as it is; it must not compile what runs without the mode inside."""
    torch.compiler.reset()
    rope, gate = COMPILED[name](), None if name == "stack" else XPos(4, 8.0)
    compiled = torch.compile(lambda x: rotate(x, rope, gate=gate), backend="aot_eager")
    if first == "outside":
        compiled(X)
    for _ in range(2):
        with FlopCounterMode(display=False):
            assert torch.allclose(compiled(X), rotate(X, rope, gate=gate), atol=1e-6)


def test_phase_words_are_made_once_under_a_watching_mode() -> None:
    spec = RopeSpec(16, base=79.0)
    device = torch.device("meta")
    x = torch.empty(2, 3, LENGTH, 16, device=device)
    with Watcher() as mode:
        rotate(x, spec, 5)
        rotate(x, spec, 5)
    assert not [name for name in mode.seen if "copy" in name or "tensor" in name]
    (words, _), (again, _) = spec.words_for(None, device), spec.words_for(None, device)
    assert words is again


# --- errors of a mode -------------------------------------------------------------------------------


class Fails(TorchDispatchMode):
    """Raises an error after its n-th rotation, as a hook of a tool may do."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.rotations = error, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith("tightrope.rotate"):
            self.rotations += 1
            raise self.error
        return result


ROTATIONS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "rotate": lambda x, spec: rotate(x, spec),
    "rotate_qk_": lambda x, spec: rotate_qk_(x, x.clone(), spec),
    "rotate_qk_, norm": lambda x, spec: rotate_qk_(x, x.clone(), spec, act=norm(x)),
    "rotate_qk": lambda x, spec: rotate_qk(x, x.clone(), spec),
    "out": lambda x, spec: rotate(x, spec, out=torch.empty_like(x)),
    "tables": lambda x, _: apply_rotary_pos_emb(x, None, COS, SIN, tables="half"),
}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("used", [False, True], ids=["first", "used"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("a hook failed"), RuntimeError("tightrope: a hook failed"), ValueError("other")],
    ids=["RuntimeError", "our prefix", "ValueError"],
)
def test_an_error_after_the_kernel_wrote_reaches_the_caller(
    error: Exception, used: bool, name: str
) -> None:
    prepared, call = RopeSpec(16).at(7), ROTATIONS[name]
    if used:
        call(X.clone(), prepared)
    x, once = X.clone(), X.clone()
    call(once, prepared)
    with Fails(error) as mode, refused(type(error), str(error)):
        call(x, prepared)
    assert mode.rotations == 1
    assert torch.equal(x, once), "x was rotated again"


# --- evaluation before training ---------------------------------------------------------------------


def by_value(name: str, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Return a prepared rotation whose ids or lengths are these, on their device."""
    spec = BY_LENGTH["dynamic NTK" if "NTK" in name else "LongRoPE"]
    if "stack" in name:
        return RopeSpec(16).at(ids, stack="transformers")
    if name in ("plain", "fractional"):
        return RopeSpec(16).at(ids[0])
    if name == "ids of the CPU":
        return RopeSpec(16).at(IDS, ids.device)
    if "offset" in name:
        return spec.at(-3, ids.device)
    if "per row" in name:
        return spec.at(positions.per_row(ids[:, 0]))
    return spec.at(ids, seq_len=lengths if "lengths" in name else None)


VALUES = [f"{rule}, {kind}" for rule in BY_LENGTH for kind in ("ids", "per row", "lengths")] + [
    "stack"
]
OTHERS = ["plain", "fractional", "ids of the CPU", *(f"{rule}, offset" for rule in BY_LENGTH)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "gate"),
    [
        (name, gate)
        for name in (*VALUES, *OTHERS)
        for gate in (None, XPos(centre=3))
        if gate is None or name != "stack"  # a stack takes no gate
    ],
)
def test_evaluation_before_training(name: str, gate: Any, device: str) -> None:
    x, ids = X.to(device), torch.arange(LENGTH).repeat(2, 1).to(device)
    ids = ids / 2 if name == "fractional" else ids
    prepare = functools.partial(by_value, name, ids, torch.tensor([100, 200]).to(device))
    for prepares_in_evaluation, watch in itertools.product((False, True), (False, True)):
        with torch.inference_mode(prepares_in_evaluation):
            rope = prepare()
        with torch.inference_mode(), Watcher() if watch else contextlib.nullcontext():
            for _ in range(2):
                rotate(x, rope, gate=gate)
        trained = x.clone().requires_grad_()
        y = rotate(trained, rope, gate=gate)
        y.sum().backward()
        if device == "cpu":
            assert torch.equal(y, rotate(x, prepare(), gate=gate))
        for one in tensors_of(rope):
            assert not one.is_inference()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors that a rotation holds, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for one in value.values() for t in tensors_of(one)]
    if isinstance(value, (list, tuple)):
        return [t for one in value for t in tensors_of(one)]
    if isinstance(value, (_prepared.PreparedRotation, _prepared.Kept, positions.Positions)):
        return tensors_of(vars(value))
    return []


# --- values that cannot be read -----------------------------------------------------------------------


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tensors of the CPU as if they were on a GPU, where reading would synchronise."""
    for module in (_prepared, _lengths):
        monkeypatch.setattr(module, "is_readable", lambda _: False)


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize("inference", [False, True], ids=["tensor", "inference tensor"])
@pytest.mark.parametrize("name", VALUES)
def test_values_on_a_device_are_those_of_each_call(name: str, inference: bool) -> None:
    """Inference tensors have no version counter, and a CUDA graph that is replayed bumps none."""
    with torch.inference_mode(inference):
        ids = torch.arange(LENGTH).repeat(2, 1)
        lengths = torch.tensor([50, 60])
        rope = by_value(name, ids, lengths)
        rotate(X, rope)
        for _ in range(2):
            ids.data.numpy()[:] += 37  # no version counter counts this
            lengths.data.numpy()[:] += 41
            fresh = by_value(name, ids.clone(), lengths.clone())
            assert torch.equal(rotate(X, rope), rotate(X, fresh))


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("name", VALUES)
def test_a_copy_of_a_rotation_is_not_taken_for_a_changed_one(
    name: str, copied: Callable[[Any], Any]
) -> None:
    ids, lengths = torch.arange(LENGTH).repeat(2, 1), torch.tensor([150, 160])
    ids.add_(1)  # its version counter is 1, that of a copy is 0
    rope = by_value(name, ids, lengths)
    expected = rotate(X, rope)
    other = copied(rope)
    assert torch.equal(rotate(X, other), expected)
    other.ids.add_(1)
    fresh = by_value(name, other.ids[0].clone(), lengths)
    assert torch.equal(rotate(X, other), rotate(X, fresh))


@pytest.mark.parametrize("readable", [True, False], ids=["readable", "unreadable"])
@pytest.mark.parametrize("name", [*VALUES, "plain"])
def test_nothing_is_kept_while_a_graph_is_captured(
    name: str, readable: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A CUDA graph repeats what it captured without Python, in memory that it owns."""
    if not readable:
        request.getfixturevalue("unreadable")
    ids, lengths = torch.arange(LENGTH).repeat(2, 1), torch.tensor([150, 160])
    rope = by_value(name, ids, lengths)
    gate = None if name == "stack" else XPos(4, 8.0)
    for module in (_prepared, _words):
        monkeypatch.setattr(module, "may_keep", lambda _: False)
    expected = rotate(X, rope, gate=gate)
    rope = by_value(name, ids, lengths)
    for _ in range(2):
        assert torch.equal(rotate(X, rope, gate=gate), expected)
    assert rope.kept._values == {}


@pytest.mark.usefixtures("unreadable")
def test_a_stack_by_length_needs_the_length_of_ids_on_a_device() -> None:
    spec, ids = BY_LENGTH["dynamic NTK"], torch.arange(LENGTH)
    text = (
        "[at] seq_len must be given with positions on a device, as the frequencies of this stack depend on the "
        "largest position (positions: int64[100])."
    )
    with refused(ValueError, text):
        spec.at(ids, stack="transformers")
    spec.at(ids, stack="transformers", seq_len=100)
