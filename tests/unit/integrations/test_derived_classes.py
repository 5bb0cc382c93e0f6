"""`tightrope.integrations.patch` on modules whose class torch replaces, before or after."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import other_libraries
from other_libraries import Spy, assert_served_until_unpatched
from tightrope.integrations import patch, unpatch

turn = other_libraries.turn


class Turning(torch.nn.Module):
    """Calls a rotary function, and has two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(32)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        heads = (x * self.weight + self.bias).unflatten(-1, (2, 16)).transpose(1, 2)
        return turn(heads, other_libraries.tables(x.shape[1]))


class Doubled(torch.nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def fully_shard(one_process: None) -> Callable[[Any], Any]:
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    return lambda module: fully_shard(module, mesh=mesh)


def parametrized(module: Any, name: str = "weight") -> Any:
    return parametrize.register_parametrization(module, name, Doubled())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_parametrized_modules(first: bool, again: bool) -> None:
    """In both orders, a second patch included."""
    model = torch.nn.Sequential(Turning())
    if first:
        patch(model)
    parametrized(model[0])
    if not first or again:
        assert patch(model).replaced
    parametrized(model[0], "bias")
    if again:
        assert patch(model).replaced
    plain = parametrized(parametrized(Turning()), "bias")
    plain.load_state_dict(model[0].state_dict())
    assert len(type(model[0]).__mro__) == len(type(plain).__mro__) + 1
    assert type(model[0]).__name__ == "ParametrizedTurning"
    assert_served_until_unpatched(model, X, plain(X).detach())
    assert parametrize.is_parametrized(model[0])
    assert parametrize.type_before_parametrizations(model[0]) is Turning


@pytest.mark.parametrize("undone", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_parametrizations_can_be_removed(first: bool, undone: bool) -> None:
    model: Any = Turning()
    before = model(X).detach()
    if first:
        patch(model)
    parametrized(model)
    if not first:
        patch(model)
    if undone:
        unpatch(model)
    parametrize.remove_parametrizations(model, "weight", leave_parametrized=False)
    with torch.no_grad(), Spy() as spy:
        assert torch.equal(model(X), before)
    assert bool(spy.calls) != undone
    unpatch(model)
    assert type(model) is Turning


def test_copies_of_parametrized_modules() -> None:
    model = parametrized(Turning())
    before = model(X).detach()
    patch(model)
    assert_served_until_unpatched(copy.deepcopy(model), X, before)
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(model)


def test_sharded_modules(fully_shard: Callable[[Any], Any]) -> None:
    model: Any = torch.nn.Sequential(Turning(), Turning())
    before = model[0](X).detach()
    patch(model)
    for module in model:
        fully_shard(module)
    assert patch(model).replaced
    assert type(model[0]) is type(model[1])
    assert type(model[0]).__name__ == "FSDPTurning"
    assert_served_until_unpatched(model[0], X, before)
    unpatch(model)
    assert type(model[0]).__mro__[2] is Turning
    assert patch(model).replaced
    assert_served_until_unpatched(model[0], X, before)


def test_a_class_that_a_user_derives_is_an_error() -> None:
    model: Any = torch.nn.Sequential(Turning(), Turning())
    patch(model)

    class Mine(type(model[1])):  # type: ignore[misc]
        pass

    made = type(model[1])
    model[1].__class__ = Mine
    for undo in (patch, unpatch):
        with pytest.raises(
            ValueError, match="Mine is derived from a class that patch made"
        ) as caught:
            undo(model)
        assert str(caught.value).startswith(f"[{undo.__name__}]")
    assert type(model[0]) is made
    model[1].__class__ = made
    unpatch(model)
    assert type(model[0]) is type(model[1]) is Turning
