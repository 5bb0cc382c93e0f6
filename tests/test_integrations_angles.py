"""`patch(angles="exact")` on modules of no library that make cosines and sines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from any_models import halves
from tightrope.integrations import patch, unpatch

pytestmark = pytest.mark.usefixtures("recognised_once")
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


class OfRows(Angles):
    """Has a table with a row for each position up to a limit."""

    def angle(self, position_ids: torch.Tensor) -> torch.Tensor:
        return (torch.arange(6000.0)[:, None] * self.inv_freq)[position_ids]


class Model(torch.nn.Module):
    """Rotates by the tables of a module."""

    def __init__(self, angles: Angles) -> None:
        super().__init__()
        self.angles = angles

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return rotated(x, *self.angles(x, position_ids))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + halves(x) * sin


def is_exact(module: Any) -> bool:
    cos, _ = module(X, FAR)
    want = (FAR.double()[..., None] * frequencies().double()).cos().repeat(1, 1, 2)
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


def test_loaded_frequencies_take_effect() -> None:
    """The original runs if they are others, also from inside a larger model."""
    model, other = Model(Angles()), Model(Angles())
    patch(model, angles="exact")
    model.load_state_dict(other.state_dict())
    assert is_exact(model.angles)
    other.angles.inv_freq.copy_(frequencies(5e5))
    model.load_state_dict(other.state_dict())
    for got, want in zip(model.angles(X, FAR), other.angles(X, FAR), strict=True):
        assert torch.equal(got, want)
    model.load_state_dict(Model(Angles()).state_dict(), assign=True)
    assert patch(model, angles="exact").replaced
    assert is_exact(model.angles)
    model.load_state_dict(other.state_dict(), assign=True)
    for got, want in zip(model.angles(X, FAR), other.angles(X, FAR), strict=True):
        assert torch.equal(got, want)
