"""`tightrope.integrations.patch` on modules whose methods were replaced by wrappers before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch

import other_libraries
from other_libraries import (
    Attention,
    Model,
    Processor,
    Spy,
    assert_served_until_unpatched,
)
from tests.support.models.of_transformers import small_model
from tests.support.tolerances import assert_each
from tightrope.integrations import patch, unpatch


class Turning(torch.nn.Module):
    """A module that calls a rotary function."""

    def forward(self, x: torch.Tensor) -> Any:
        heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
        return self.turned(heads, tables(x.shape[1]))

    def turned(self, x: torch.Tensor, freqs: Any) -> Any:
        return turn(x, freqs)


turn, tables = other_libraries.turn, other_libraries.tables
X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))


class Holder:
    """A wrapper that is an object, as accelerate's for mixed precision."""

    def __init__(self, old: Any) -> None:
        self.old = old

    def __call__(self, *args: Any) -> Any:
        return self.old(*args)


def by_closure(module: Any) -> Any:
    old = module.forward
    return lambda *a, **k: old(*a, **k)


def by_attribute(module: Any) -> Any:
    module.mine = module.forward
    return functools.update_wrapper(
        functools.partial(lambda self, *args: self.mine(*args), module), module.forward
    )


def by_bound_function(module: Any) -> Any:
    old = module.forward
    return MethodType(lambda _self, *args: old(*args), module)


def by_accelerate(module: Any) -> Any:
    from accelerate.hooks import ModelHook, add_hook_to_module

    return add_hook_to_module(module, ModelHook()).forward


def by_diffusers(module: Any) -> Any:
    from diffusers.hooks.hooks import HookRegistry, ModelHook

    class Hook(ModelHook):  # type: ignore[misc]
        def new_forward(self, _module: Any, *args: Any) -> Any:
            return self.fn_ref.original_forward(*args)

    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Hook(), "one")
    registry.register_hook(ModelHook(), "two")
    return module.forward


FOLLOWED = [by_attribute, by_accelerate]


@pytest.mark.parametrize("wrap", FOLLOWED)
def test_wrappers_that_keep_the_old_forward_in_the_module_are_served(
    wrap: Callable[[Any], Any],
) -> None:
    model, other = torch.nn.Sequential(Turning()), torch.nn.Sequential(Turning())
    for each in (other, model):
        each[0].forward = wrap(each[0])
    wrapper = vars(model[0])["forward"]
    before = model(X)
    report = patch(model)
    assert report.replaced, str(report)
    assert not report.left, str(report)
    assert vars(model[0])["forward"] is wrapper
    with torch.no_grad(), Spy() as spy:
        other(X)
    assert not spy.calls
    patch(model)
    assert_served_until_unpatched(model, X, before)
    assert vars(model[0])["forward"] is wrapper


@pytest.mark.parametrize("wrap", FOLLOWED)
def test_such_wrappers_made_after_patch_are_undone(wrap: Callable[[Any], Any]) -> None:
    model: Any = Turning()
    before = model(X)
    patch(model)
    model.forward = wrap(model)
    assert_served_until_unpatched(model, X, before)


def test_a_wrapper_made_after_patch_that_unpatch_cannot_reach_is_named() -> None:
    model: Any = Turning()
    patch(model)
    old = model.turned
    model.turned = lambda *args: old(*args)
    with pytest.warns(UserWarning, match="Turning.turned was wrapped after patch"):
        unpatch(model)


def instead(self: Any, x: torch.Tensor) -> Any:
    return x + 1


def of_the_class(self: Any, x: torch.Tensor) -> Any:
    return Turning.forward(self, x)


def hiding_by_lambda(_module: Any) -> Any:
    return lambda x: x + 1


def by_list(module: Any) -> Any:
    several = [module.forward]
    return lambda *args: several[0](*args)


HIDING: dict[str, Callable[[Any], Any]] = {
    "closure": by_closure,
    "partial": lambda module: functools.partial(module.forward),
    "object": lambda module: Holder(module.forward),
    "bound function": by_bound_function,
    "no_grad": lambda module: torch.no_grad()(module.forward),
    "compiler": lambda module: torch.compile(module.forward, backend="eager"),
    "diffusers": by_diffusers,
    "another method": lambda module: MethodType(instead, module),
    "lambda": hiding_by_lambda,
    "its name": lambda module: functools.wraps(module.forward)(lambda x: x + 1),
    "class": lambda module: MethodType(of_the_class, module),
    "list": by_list,
    "other module": lambda _: Turning().forward,
    "plain function": lambda m: MethodType(functools.partial(m.forward.__func__), m),
    "helper": lambda module: functools.partial(instead, module),
}


@pytest.mark.parametrize("wrap", HIDING.values(), ids=HIDING)
def test_a_module_whose_forward_may_not_be_called_is_left(wrap: Callable[[Any], Any]) -> None:
    model = torch.nn.Sequential(Turning())
    model[0].forward = wrap(model[0])
    before = model(X)
    report = patch(model)
    assert not report.replaced
    [entry] = report.left
    assert entry.name == "Turning"
    assert "its forward was replaced by " in entry.reason
    assert entry.reason.endswith(
        ", which patch does not see call it; call patch before you replace it"
    )
    with Spy() as spy:
        assert torch.equal(model(X), before)
    assert not spy.calls
    assert type(model[0]) is Turning


def test_other_modules_are_patched() -> None:
    """The report lists the function as replaced, and the one module that does not call it as left."""
    model = torch.nn.Sequential(Turning(), Turning(), Turning())
    hidden: Any = model[1]
    hidden.forward = MethodType(instead, hidden)
    report = patch(model)
    assert [entry.name for entry in report.replaced] == ["turn"]
    assert [entry.reason for entry in report.left] == [
        "its forward was replaced by instead, which patch does not see call it; "
        "call patch before you replace it"
    ]
    assert type(model[1]) is Turning
    assert type(model[0]) is type(model[2]) is not Turning


def test_another_method_that_is_hidden() -> None:
    model: Any = Turning()
    model.turned = lambda x, _freqs: x
    [entry] = patch(model)
    assert not entry.replaced
    assert "its turned was replaced by " in entry.reason
    model = Turning()
    model.extra_repr = lambda: ""  # no rotation
    assert not patch(model).left


def test_processors_of_a_module_whose_forward_is_hidden() -> None:
    model: Any = Model(Processor(), Processor())
    model.layers[0].forward = hiding_by_lambda(model.layers[0])
    report = patch(model)
    assert [entry.name for entry in report.left] == ["Attention"]
    assert type(model.layers[0].processor) is Processor
    assert type(model.layers[1].processor) is not Processor
    model.layers[1].forward = by_attribute(model.layers[1])
    assert type(model.layers[1]) is Attention
    assert "turn" in [entry.name for entry in patch(model).replaced]


FAR = torch.tensor([[99_991]])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrap", FOLLOWED)
def test_exact_angles_through_wrappers(wrap: Callable[[Any], Any]) -> None:
    plain, model = small_model("Llama").model, small_model("Llama").model
    patch(plain, angles="exact")
    want = plain.rotary_emb(torch.zeros(1), FAR)
    model.rotary_emb.forward = wrap(model.rotary_emb)
    before = model.rotary_emb(torch.zeros(1), FAR)
    assert not patch(model, angles="exact").left
    found = model.rotary_emb(torch.zeros(1), FAR)
    assert_each(torch.equal, found, want)
    assert not any(map(torch.equal, found, before))
    unpatch(model)
    assert_each(torch.equal, model.rotary_emb(torch.zeros(1), FAR), before)


def test_angles_that_a_wrapper_hides_are_left() -> None:
    model: Any = small_model("Llama").model
    tables = model.rotary_emb(torch.zeros(1), FAR)
    model.rotary_emb.forward = lambda *_: tables
    report = patch(model, angles="exact")
    assert [entry.name for entry in report.left] == ["LlamaRotaryEmbedding"]
    assert model.rotary_emb(torch.zeros(1), FAR) is tables
