"""`patch(angles="exact")` on modules of no library that make cosines and sines."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from other_libraries import calls_of
from tests.support.tolerances import assert_each
from tightrope.integrations import patch, unpatch

X, FAR = torch.zeros(1), torch.tensor([[99_991]])


def frequencies(base: float = 1e4) -> torch.Tensor:
    return 1 / base ** (torch.arange(0, 32, 2) / 32)


class Angles(torch.nn.Module):
    """Makes cosines and sines from a buffer; subclasses change them."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies())
        self.child = torch.nn.Identity()

    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return position_ids[:, :, None].float() * self.inv_freq

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angle = self.angle(position_ids).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Learned(Angles):
    def __init__(self) -> None:
        super().__init__()
        del self.inv_freq
        self.inv_freq = torch.nn.Parameter(frequencies())


class Traced(Angles):
    def __init__(self) -> None:
        super().__init__()
        self.inv_freq.requires_grad_()


class ByMode(Angles):
    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return super().angle(position_ids) * (2 if self.training else 1)


class ByModeOfChild(Angles):
    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return super().angle(position_ids) * (1 if self.child.training else 2)


class RaisesInTraining(Angles):
    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise NotImplementedError
        return super().angle(position_ids)


class Clamped(Angles):
    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return super().angle(position_ids.clamp(max=20_000))


class ClampedFar(Angles):
    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return super().angle(position_ids.clamp(max=600_000))


class ByLengthOfIds(Angles):
    """Dynamic NTK by the number of positions in a row."""

    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return super().angle(position_ids) * (0.5 if position_ids.shape[-1] > 4096 else 1)


class ByLengthOfX(Angles):
    dim = -2

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, position_ids * (2 if x.shape[self.dim] > 256 else 1))


class ByLengthOfOtherLayout(ByLengthOfX):
    dim = 1


class OfRows(Angles):
    """Has a table with a row for each position up to a limit."""

    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return (torch.arange(6000.0)[:, None] * self.inv_freq)[position_ids]


class Growing(Angles):
    """Makes a table with a row for each position up to the largest."""

    largest = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies().repeat_interleave(8) / 10)
        self.table = torch.zeros(0, 128)

    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        rows = int(position_ids.max()) + 1
        if rows > len(self.table):
            Growing.largest = max(Growing.largest, rows)
            self.table = torch.arange(float(rows))[:, None] * self.inv_freq
        return self.table[position_ids]


class OfChild(Angles):
    """A child has the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.child.register_buffer("inv_freq", frequencies())
        del self.inv_freq

    def __getattr__(self, name: str) -> Any:
        return self.child.inv_freq if name == "inv_freq" else super().__getattr__(name)


class OfOldState(Angles):
    """Has its frequencies under another name in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.inv_freq, persistent=False)
        self.register_buffer("old_freq", frequencies())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.inv_freq.copy_(state_dict[prefix + "old_freq"])


class OfExtraState(Angles):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.inv_freq, persistent=False)

    def get_extra_state(self) -> list[float]:
        found: list[float] = self.inv_freq.tolist()
        return found

    def set_extra_state(self, state: list[float]) -> None:
        self.inv_freq.copy_(torch.tensor(state))


class ClampedToTable(Angles):
    """Makes a large table at once, and clamps positions to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.arange(2.0**17)[:, None] * self.inv_freq

    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.rows[position_ids.clamp(max=len(self.rows) - 1)]


class Model(torch.nn.Module):
    """Rotates by the tables of a module."""

    def __init__(self, angles: Any) -> None:
        super().__init__()
        self.angles = angles

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return rotated(x, *self.angles(x, position_ids))


def halves(x: torch.Tensor) -> torch.Tensor:
    """Defined here, as what a function of another module computes is searched each time."""
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + halves(x) * sin


def is_exact(module: Any, inv_freq: torch.Tensor | None = None) -> bool:
    inv_freq = frequencies().double() if inv_freq is None else inv_freq
    cos, _ = module(X, FAR)
    want = (FAR.double()[..., None] * inv_freq).cos().repeat(1, 1, 2)
    return bool(torch.allclose(cos.double(), want, rtol=0, atol=1e-6))


@pytest.mark.parametrize("cls", [Angles, OfRows])
def test_exact_angles_are_served(cls: type[Angles]) -> None:
    model = Model(cls())
    assert cls is OfRows or not is_exact(model.angles)
    model.angles.child.eval()
    entries = {entry.name: entry for entry in patch(model, angles="exact")}
    assert entries[cls.__name__].replaced, entries
    assert is_exact(model.angles)
    assert model.angles.training
    assert not model.angles.child.training
    unpatch(model)


def test_the_report_names_the_calls_in_which_the_module_runs() -> None:
    model = Model(Angles())
    model.angles.attention_scaling = 1.0
    (entry,) = (each for each in patch(model, angles="exact") if each.name == "Angles")
    assert entry.original_runs == (
        "position_ids of a rank other than 2, or that are neither int64 nor int32",
        "x that is no floating-point tensor, and other arguments",
        "calls after config, rope_type or attention_scaling was assigned",
    )

    def runs(x: torch.Tensor, ids: torch.Tensor) -> bool:
        with contextlib.suppress(RuntimeError):
            return calls_of(Angles.forward, lambda: model.angles(x, ids)) > 0
        return True  # its own error

    assert not any(runs(x, ids) for x in (X, X.bfloat16()) for ids in (FAR, FAR.int()))
    assert runs(X, FAR.short())
    assert runs(X, FAR.float())
    assert runs(X, FAR[None])
    assert runs(X.int(), FAR)
    model.angles.attention_scaling = 2.0
    assert runs(X, FAR)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Learned, "it has learned tensors, to which exact angles would give no gradients"),
        (Traced, "it has learned tensors, to which exact angles would give no gradients"),
        (ByMode, "the cosines and sines differ from those of the module"),
        (ByModeOfChild, "the cosines and sines differ from those of the module"),
        (RaisesInTraining, "the module raises an error for the positions tried"),
        (Clamped, "the cosines and sines differ from those of the module"),
        (ClampedFar, "the cosines and sines differ from those of the module"),
        (ClampedToTable, "the cosines and sines differ from those of the module"),
        (ByLengthOfIds, "the cosines and sines differ from those of the module"),
        (ByLengthOfX, "the cosines and sines differ from those of the module"),
        (ByLengthOfOtherLayout, "the cosines and sines differ from those of the module"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_compute_something_else_are_left(
    cls: type[Angles], reason: str, training: bool
) -> None:
    model = Model(cls()).train(training)
    report = patch(model, angles="exact")
    (entry,) = (entry for entry in report if entry.name == cls.__name__)
    assert not entry.replaced
    assert reason in entry.reason
    assert type(model.angles) is cls


@pytest.mark.parametrize("cls", [Angles, OfOldState, OfExtraState])
@pytest.mark.parametrize("how", ["loaded", "assigned", "in place"])
def test_loaded_frequencies_take_effect(cls: type[Angles], how: str) -> None:
    """torch.distributed.checkpoint loads in place, before load_state_dict."""
    model, other = Model(cls()), Model(cls())
    assert [entry.name for entry in patch(model, angles="exact").replaced][1:] == [cls.__name__]
    model.load_state_dict(other.state_dict(), assign=how == "assigned")
    assert is_exact(model.angles)
    for each in other.buffers():
        each.copy_(frequencies(5e5))
    state = model.state_dict() if how == "in place" else other.state_dict()
    for name, loaded in other.state_dict().items():
        if isinstance(loaded, torch.Tensor):
            state[name].copy_(loaded)
        else:
            state[name] = loaded
    model.load_state_dict(state, assign=how == "assigned")
    assert is_exact(model.angles, frequencies(5e5).double())


def test_frequencies_that_children_load_are_their_own() -> None:
    model, other = Model(OfChild()), Model(OfChild())
    assert len(patch(model, angles="exact").replaced) == 2
    other.angles.child.inv_freq.copy_(frequencies(5e5))
    with pytest.warns(UserWarning, match="OfChild makes its own cosines and sines again"):
        model.load_state_dict(other.state_dict())
    assert_each(torch.equal, model.angles(X, FAR), other.angles(X, FAR))


class WithConfig(LlamaRotaryEmbedding):
    """Keeps its frequencies in checkpoints, as modules of older versions do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("inv_freq", self.inv_freq, persistent=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["assign", "to_empty"])
def test_a_model_that_was_patched_on_the_meta_device_keeps_exact_angles(
    how: str, dtype: torch.dtype
) -> None:
    """Its config gives the frequencies, and the checkpoint has the same ones."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1)
    state = {name: each.to(dtype) for name, each in WithConfig(config).state_dict().items()}
    assert "inv_freq" in state
    with torch.device("meta"):
        model = Model(WithConfig(config))
    assert len(patch(model, angles="exact").replaced) == 2
    if how == "to_empty":
        model.to_empty(device="cpu")
        for each in model.buffers():
            each.fill_(torch.nan)
    model.angles.load_state_dict(state, assign=how == "assign")
    assert is_exact(model.angles, 1e4 ** -(torch.arange(0, 32, 2).double() / 32))


def test_a_table_grows_as_far_as_it_must() -> None:
    """Tables of a million rows take gigabytes for each layer."""
    report = patch(Model(Growing()), angles="exact")
    assert [entry.name for entry in report.replaced] == ["rotated", "Growing"], report
    assert 8192 <= Growing.largest <= 2**15


def test_frequencies_in_a_distributed_tensor_are_the_modules_own(one_process: None) -> None:
    model = Model(Angles())
    assert patch(model, angles="exact").replaced
    mesh = init_device_mesh("cpu", (1,))
    state = {name: distribute_tensor(each * 0.5, mesh) for name, each in model.state_dict().items()}
    with pytest.warns(UserWarning, match="makes its own cosines and sines again"):
        model.load_state_dict(state, assign=True)
    assert isinstance(model.angles.inv_freq, DTensor)
    model.angles.inv_freq = model.angles.inv_freq.to_local()
    assert not is_exact(model.angles)


def test_frequencies_that_are_nan_are_named() -> None:
    model = Model(Angles())
    model.angles.inv_freq.fill_(torch.nan)
    report = patch(model)
    assert "note: angles.inv_freq holds NaN, and so will what it rotates" in report.notes
    assert patch(model.angles).notes == ["note: inv_freq holds NaN, and so will what it rotates"]
    (entry,) = (each for each in patch(model, angles="exact") if each.name == "Angles")
    assert entry.reason == "inv_freq holds NaN"
