"""Modes that only watch change nothing, and no cache holds what another mode could not use.

A dispatch mode that counts FLOPs, tracks memory or checkpoints activations sees real tensors: all checks
stay on, and nothing is made anew in each call. Evaluation in inference mode leaves nothing behind that
training cannot use. tests/laws/test_calls.py checkpoints calls with all pairs of options, and has evaluation before training.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.checkpointing import saving
from tests.support.helpers import Watcher, noise, refused
from tests.support.kept_tensors import tensors_of
from tightrope import RopeSpec, phases, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK, LongRoPE
from tightrope.functional import apply_rotary_pos_emb, rotate, rotate_qk_
from tightrope.gates import XPos
from tightrope.spec import _lengths, _prepared, _words

LENGTH = 100
X = noise(2, 3, LENGTH, 16, dtype=torch.float32)
IDS, LENGTHS = torch.arange(LENGTH), torch.tensor([100, 200])
COS, SIN = (function(noise(LENGTH, 8, dtype=torch.float32)) for function in (torch.cos, torch.sin))
BY_LENGTH = {
    "dynamic NTK": RopeSpec(16, scaling=DynamicNTK(2.0, original_max_position=64)),
    "LongRoPE": RopeSpec(16, scaling=LongRoPE([1.0] * 8, [2.0] * 8, 64, factor=1.0)),
}
WATCHING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "selective checkpointing": lambda: saving("")()[0],
    "any other": Watcher,
}


def by_value(name: str, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Return a prepared rotation whose ids or lengths are these, on their device."""
    spec = BY_LENGTH["dynamic NTK" if "NTK" in name else "LongRoPE"]
    if "stack" in name:
        return RopeSpec(16).at(ids, stack="transformers")
    if name in ("plain", "fractional"):
        return RopeSpec(16).at(ids[0])
    if name == "ids of the CPU":
        return RopeSpec(16).at(IDS, device=ids.device)
    if "offset" in name:
        return spec.at(-3, device=ids.device)
    if "per row" in name:
        return spec.at(positions.per_row(ids[:, 0]))
    return spec.at(ids, seq_len=lengths if "lengths" in name else None)


VALUES = [f"{rule}, {kind}" for rule in BY_LENGTH for kind in ("ids", "per row", "lengths")]
VALUES.append("stack")
OFFSETS = [f"{rule}, offset" for rule in BY_LENGTH]


# --- checks stay on -------------------------------------------------------------------------------


def changed_increments() -> Any:
    angles = noise(1, 1, LENGTH, 8, dtype=torch.float32)
    given = phases.given(angles)
    angles.add_(1)
    return rotate(X.double(), RopeSpec(16).at(phases=given))


REFUSED: dict[str, Callable[[], Any]] = {
    "beyond seq_len": lambda: rotate(X, BY_LENGTH["dynamic NTK"].at(0, seq_len=50)),
    "ids beyond seq_len": lambda: rotate(X, BY_LENGTH["LongRoPE"].at(IDS, seq_len=50)),
    "positions start again": lambda: rotate(X, BY_LENGTH["LongRoPE"], IDS % 90),
    "mislabelled tables": lambda: apply_rotary_pos_emb(X, None, *[COS.repeat_interleave(2, 1)] * 2),
    "ids outside the tables": lambda: apply_rotary_pos_emb(
        X, None, torch.ones(9, 16), torch.ones(9, 16), position_ids=IDS
    ),
    "packed lengths that do not add up": lambda: positions.packed(torch.tensor([0, 7, 5])),
    "changed increments": changed_increments,
}


@pytest.mark.parametrize("mode", WATCHING)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_under_a_watching_mode(name: str, mode: str) -> None:
    with pytest.raises((ValueError, IndexError)) as without:
        REFUSED[name]()
    with WATCHING[mode](), refused(without.type, str(without.value)):
        REFUSED[name]()


# --- a watching mode sees the same operators in every call ------------------------------------------


def test_results_written_to_out_are_there_in_a_repeated_pass() -> None:
    """Selective checkpointing does not run an operator again whose result was saved."""
    w = X.clone().requires_grad_()

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * rotate(x, RopeSpec(16), 5, out=torch.full_like(x, torch.nan)) * w

    checkpoint(layer, X, w, use_reentrant=False, context_fn=saving("tightrope")).sum().backward()
    assert torch.equal(w.grad, 2 * w * rotate(X, RopeSpec(16), 5))  # type: ignore[arg-type]


def test_what_is_remembered_of_tables_is_computed_unseen() -> None:
    """The first call compares the halves of the tables; the second one knows that they are equal."""
    tables = [table.repeat(1, 2) for table in (COS, SIN)]
    with Watcher() as first:
        apply_rotary_pos_emb(X, None, *tables)
    with Watcher() as second:
        apply_rotary_pos_emb(X, None, *tables)
    assert first.seen == second.seen


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("name", ["dynamic NTK, ids", "LongRoPE, ids", "stack", "plain"])
def test_compiled_code_under_a_watching_mode(name: str, first: str) -> None:
    """Dynamo runs such code as it is; it must not compile what runs without the mode inside."""
    rope = by_value(name, IDS.repeat(2, 1), LENGTHS)
    gate = None if name == "stack" else XPos(4, 8.0)
    compiled = torch.compile(lambda x: rotate(x, rope, gate=gate), backend="aot_eager")
    if first == "outside":
        compiled(X)
    for _ in range(2):
        with FlopCounterMode(display=False):
            assert torch.allclose(compiled(X), rotate(X, rope, gate=gate), atol=1e-6)


# --- errors of a mode -------------------------------------------------------------------------------


class Fails(TorchDispatchMode):
    """Raises an error after a rotation, as a hook of a tool may do."""

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
    "rotate_qk_, norm": lambda x, spec: rotate_qk_(
        x, x.clone(), spec, act=RMSNorm(torch.ones(16), 1e-6)
    ),
    "out": lambda x, spec: rotate(x, spec, out=torch.empty_like(x)),
    "tables": lambda x, _: apply_rotary_pos_emb(x, None, COS, SIN, tables="half"),
}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("used", [False, True], ids=["first", "used"])
@pytest.mark.parametrize("error", [RuntimeError("tightrope: a hook failed"), ValueError("other")])
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*VALUES, *OFFSETS, "plain", "fractional", "ids of the CPU"])
def test_evaluation_before_training(name: str, device: str) -> None:
    x, ids = X.to(device), IDS.repeat(2, 1).to(device)
    ids = ids / 2 if name == "fractional" else ids
    lengths = LENGTHS.to(device)
    ways = itertools.product((False, True), (False, True), (None, XPos(centre=3)))
    for prepares_in_evaluation, watch, gate in ways:
        if gate is not None and name == "stack":
            continue  # a stack takes no gate
        with torch.inference_mode(prepares_in_evaluation):
            rope = by_value(name, ids, lengths)
        with torch.inference_mode(), Watcher() if watch else nullcontext():
            for _ in range(2):
                rotate(x, rope, gate=gate)
        y = rotate(x.clone().requires_grad_(), rope, gate=gate)
        y.sum().backward()
        if device == "cpu":
            assert torch.equal(y, rotate(x, by_value(name, ids, lengths), gate=gate))
        assert not any(one.is_inference() for one in tensors_of(rope))


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
        ids, lengths = IDS.repeat(2, 1), torch.tensor([50, 60])
        rope = by_value(name, ids, lengths)
        rotate(X, rope)
        for _ in range(2):
            ids.data.numpy()[:] += 37  # no version counter counts this
            lengths.data.numpy()[:] += 41
            fresh = by_value(name, ids.clone(), lengths.clone())
            assert torch.equal(rotate(X, rope), rotate(X, fresh))


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", VALUES)
def test_a_copy_of_a_rotation_is_not_taken_for_a_changed_one(
    name: str, copied: Callable[[Any], Any]
) -> None:
    ids, lengths = IDS.repeat(2, 1), torch.tensor([150, 160])
    ids.add_(1)  # its version counter is 1, that of a copy is 0
    rope = by_value(name, ids, lengths)
    expected = rotate(X, rope)
    assert torch.equal(rotate(X, copy.copy(rope)), expected)
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
    ids, lengths = IDS.repeat(2, 1), torch.tensor([150, 160])
    gate = None if name == "stack" else XPos(4, 8.0)
    for module in (_prepared, _words):
        monkeypatch.setattr(module, "may_keep", lambda _: False)
    expected = rotate(X, by_value(name, ids, lengths), gate=gate)
    rope = by_value(name, ids, lengths)
    for _ in range(2):
        assert torch.equal(rotate(X, rope, gate=gate), expected)
    assert rope.kept._values == {}


@pytest.mark.usefixtures("unreadable")
def test_a_stack_by_length_needs_the_length_of_ids_on_a_device() -> None:
    spec = BY_LENGTH["dynamic NTK"]
    with pytest.raises(ValueError, match=r"\[at\] seq_len must be given with positions on a dev"):
        spec.at(IDS, stack="transformers")
    spec.at(IDS, stack="transformers", seq_len=100)
