"""Rotations that `patch` cannot see or replace are in its report; without any, it says where it looked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import other_libraries
from other_libraries import spin
from tightrope.integrations import Report, patch

NOTHING = (
    "no rotary function found: no method of the model's modules, and no function that they are seen to call, "
    "adds two products with cos and sin, or takes a complex product apart"
)
UNSEEN = "it may rotate, but patch replaces only Python functions of the model's code that are called by their name"
BODY = "it may rotate in its body, in a form that patch does not replace"


def halves(x: torch.Tensor) -> torch.Tensor:
    """Defined here, as what a function of another module computes is searched each time."""
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + halves(x) * sin


scripted = torch.jit.script(rope)
partial = functools.partial(rope)


def closed(cos: torch.Tensor, sin: torch.Tensor) -> Any:
    def inner(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return x * cos + halves(x) * sin

    return inner


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + halves(x) * sin


class Callable:
    """A plain object that is called."""

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = x * cos + halves(x) * sin
        return y + x


called = Callable()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(8.0).repeat(2)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turned(x, self.cos, self.sin)

    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class InAttribute(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        kinds = {"function": rope, "closure": closed(self.cos, self.sin), "partial": partial}
        self.spinning: Any = kinds[kind]

    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return self.spinning(x, cos, sin)


class Scripted(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return scripted(x, cos, sin)


class InModule(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return other_libraries.turn(x, (cos[None], sin[None]))


class OtherNames(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return spin(x, cos, sin)


class Differentiated(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return Rope.apply(x, cos, sin)  # type: ignore[no-untyped-call]


class OfObject(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return called(x, cos, sin)


class InBody(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = x * cos + halves(x) * sin
        return y + x  # x is read again, so the expression is not moved


class InNested(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def inner(t: torch.Tensor) -> torch.Tensor:
            return t * cos + halves(t) * sin

        return inner(x)


class Complex(Base):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        table = torch.complex(cos, sin)[:8]
        y = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table
        return torch.view_as_real(y).flatten(-2) + x


@pytest.mark.parametrize(
    ("cls", "name", "reason"),
    [
        *(
            pytest.param(
                functools.partial(InAttribute, kind), "InAttribute.spinning", UNSEEN, id=kind
            )
            for kind in ("function", "closure", "partial")
        ),
        (Scripted, "scripted", UNSEEN),
        (InModule, "turn", UNSEEN),
        (OtherNames, "spin", UNSEEN),
        (Differentiated, "Rope", UNSEEN),
        (OfObject, "called", UNSEEN),
        (InBody, "InBody.turned", BODY),
        (InNested, "InNested.turned", BODY),
        (Complex, "Complex.turned", BODY),
    ],
)
def test_rotations_that_cannot_be_replaced_are_listed(cls: Any, name: str, reason: str) -> None:
    model, x = cls(), torch.randn(2, 3, 5, 16)
    before = model(x)
    report = patch(model)
    assert [(each.name, each.reason) for each in report.left] == [(name, reason)], str(report)
    assert not report.replaced
    assert str(report).startswith("0 replaced, 1 left\nleft     ")
    assert torch.equal(model(x), before)


class Both(InAttribute):
    """One rotation that is replaced, and one that is not."""

    def __init__(self) -> None:
        super().__init__("function")

    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return self.spinning(rope(x, cos, sin), cos, sin)


def test_they_are_listed_beside_those_that_are_replaced() -> None:
    report = patch(Both())
    assert [entry.name for entry in report.replaced] == ["rope"]
    assert [entry.name for entry in report.left] == ["Both.spinning"]


# --- models that do not rotate --------------------------------------------------------------------


class Sinusoids(nn.Module):
    """Absolute positions, added to x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2])[:, None] * torch.arange(8)
        return x * 2 + torch.cat((angle.cos() * 0.5, angle.sin() * 0.5), -1)


class Gates(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = x.sigmoid()
        return gate * x + (1 - gate) * x.tanh() * x


@pytest.mark.parametrize("cls", [Sinusoids, Gates, functools.partial(nn.Linear, 2, 2)])
def test_a_model_that_does_not_rotate(cls: Any) -> None:
    report = patch(cls())
    assert len(report) == 0
    assert str(report) == NOTHING
    assert "no rotary function" not in str(patch(InBody()))


# --- all models of transformers -------------------------------------------------------------------


def test_a_report_that_was_made_by_hand() -> None:
    report = Report()
    assert str(report) == NOTHING
    assert report.replaced == report.left == []
