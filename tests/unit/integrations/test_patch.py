"""`tightrope.integrations.patch` on models that are written as libraries other than transformers write them."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import other_libraries
from other_libraries import (
    ByHalves,
    Model,
    Processor,
    Spy,
    WithImport,
    WithInner,
    assert_served_until_unpatched,
)
from tests.support.tolerances import assert_each
from tightrope.integrations import patch, recognise, unpatch
from tightrope.integrations._replace import replacement

KINDS: dict[str, tuple[type[Processor], str]] = {
    "processor": (Processor, "turn"),
    "constant": (ByHalves, "turn(by_halves=True)"),
    "function in a body": (WithInner, "WithInner.__call__.<locals>.rotated"),
    "import in a body": (WithImport, "turn"),
}


def results(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The output and the gradients of the input and of all parameters."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, 32, generator=generator).to(dtype).requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def assert_equal(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> None:
    assert_each(torch.equal, xs, ys)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_keep_their_bits(kind: str, dtype: torch.dtype) -> None:
    cls, name = KINDS[kind]
    torch.manual_seed(0)
    model = Model(cls(), cls()).to(dtype)
    before = results(model, dtype)
    report = patch(model)
    assert name in [entry.name for entry in report.replaced], str(report)
    with Spy() as spy:
        assert_equal(results(model, dtype), before)
    assert spy.calls >= 4  # two layers, forward and backward
    unpatch(model)
    with Spy() as spy:
        assert_equal(results(model, dtype), before)
    assert spy.calls == 0


@pytest.mark.one_in(2)
def test_processors_are_shared_with_models_that_are_not_patched(kind: str) -> None:
    processor = KINDS[kind][0]()
    one, other = Model(processor, processor), Model(processor, processor)
    patch(one)
    assert one.layers[0].processor is one.layers[1].processor is not processor
    assert isinstance(one.layers[0].processor, KINDS[kind][0])
    assert type(one.layers[0].processor).__name__ == KINDS[kind][0].__name__
    assert other.layers[0].processor is processor
    with Spy() as spy:
        results(other)
    assert spy.calls == 0
    unpatch(one)
    assert one.layers[0].processor is processor


@pytest.mark.one_in(4)
def test_two_models_with_different_options(kind: str) -> None:
    cls = KINDS[kind][0]
    one, other = Model(cls()), Model(cls())
    other.load_state_dict(one.state_dict())
    keys = list(one.state_dict())
    before = results(one)
    patch(one, rounding="model")
    patch(other, rounding="once")
    assert_equal(results(one), before)
    for x, y in zip(results(other), before, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert list(one.state_dict()) == keys
    unpatch(one)
    patch(one, rounding="once")
    assert_equal(results(one), results(other))


@pytest.mark.one_in(4)
def test_a_processor_that_the_user_sets_later_stays(kind: str) -> None:
    model = Model(KINDS[kind][0]())
    patch(model)
    mine = Processor()
    model.layers[0].processor = mine
    unpatch(model)
    assert model.layers[0].processor is mine


@pytest.mark.parametrize("how", [lambda model: model, copy.deepcopy])
@pytest.mark.parametrize("undo", [patch, unpatch])
def test_what_is_set_on_a_processor_stays(how: Callable[[Model], Model], undo: Any) -> None:
    """In this model only, and for all modules that share the processor."""
    processor: Any = Processor()
    processor.scale, processor.old = 1.0, None
    model, other = Model(processor, processor), Model(processor)
    patch(model)
    model = how(model)
    seen: Any = model.layers[0].processor
    seen.scale, seen.new = 0.5, 2.0
    del seen.old
    undo(model)
    mine: Any = model.layers[0].processor
    assert model.layers[1].processor is mine
    assert vars(mine) == {"scale": 0.5, "new": 2.0}
    assert (type(mine) is Processor) == (undo is unpatch)
    assert other.layers[0].processor is processor
    assert vars(processor) == {"scale": 1.0, "old": None}
    unpatch(model)
    assert type(model.layers[0].processor) is Processor
    assert vars(model.layers[0].processor) == {"scale": 0.5, "new": 2.0}


def test_what_is_set_on_the_original_processor_is_used_by_the_next_patch() -> None:
    processor: Any = Processor()
    model = Model(processor)
    patch(model)
    processor.scale = 0.5
    patch(model)
    mine: Any = model.layers[0].processor
    assert mine.scale == 0.5


def test_a_processor_of_a_patched_model_can_be_given_to_another() -> None:
    one, other = Model(Processor()), Model(Processor())
    patch(one)
    other.layers[0].processor = one.layers[0].processor
    before = results(other)
    unpatch(one)
    assert "turn" in [entry.name for entry in patch(other).replaced]
    assert_equal(results(other), before)
    unpatch(other)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(kind: str, how: Callable[[Model], Model]) -> None:
    model = Model(KINDS[kind][0]())
    before = results(model)
    patch(model)
    again = how(model)
    with Spy() as spy:
        assert_equal(results(again), before)
    assert spy.calls
    unpatch(again)
    assert_equal(results(again), before)
    assert type(again.layers[0].processor) is KINDS[kind][0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("patched_first", [True, False])
def test_a_model_that_accelerate_offloads(
    kind: str, place: str, patched_first: bool, tmp_path: Path
) -> None:
    """Both orders: the hooks move the weights around each call, and the replacements stay."""
    from accelerate import cpu_offload, disk_offload

    device = torch.device("cpu")
    model = Model(KINDS[kind][0]())
    x = torch.randn(2, 7, 32)
    before = model(x).detach()
    if patched_first:
        patch(model)
    if place == "cpu":
        cpu_offload(model, execution_device=device)
    else:
        disk_offload(model, str(tmp_path), execution_device=device)
    if not patched_first:
        patch(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_served_until_unpatched(model, x, before)


@pytest.mark.slow
def test_threads_patch_their_own_models() -> None:
    models = [Model(cls()) for cls, _ in KINDS.values() for _ in range(2)]
    before = [results(model) for model in models]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(patch, models))
        after = list(pool.map(results, models))
    for xs, ys in zip(after, before, strict=True):
        assert_equal(xs, ys)


def test_a_function_is_recognised_for_each_combination_of_constants() -> None:
    found = [
        recognise(other_libraries.turn, constants=constants).candidate
        for constants in ((), (("by_halves", True),), (("axis_of_heads", 2),))
    ]
    assert [each is not None and each.rotation.pairs for each in found] == [
        "interleaved",
        "half",
        "interleaved",
    ]
    new = replacement(other_libraries.turn, [each for each in found if each is not None])
    x, tables = torch.randn(2, 3, 7, 16), other_libraries.tables(7)
    axis = int("2")  # equal to a constant, not the same object in every Python
    for options in ({}, {"by_halves": True}, {"axis_of_heads": axis}, {"by_halves": 1}):
        given = x.transpose(1, 2) if "axis_of_heads" in options else x
        assert torch.equal(
            new(given, tables, **options), other_libraries.turn(given, tables, **options)
        )


def make_local() -> tuple[Callable[..., Any], torch.nn.Module]:
    def local(x: Any, freqs: Any) -> Any:
        return other_libraries.turn(x, freqs)

    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return LOCAL(
                x.unflatten(-1, (2, 16)).transpose(1, 2), other_libraries.tables(x.shape[1])
            )

    return local, Local()


LOCAL: Any = None


def test_a_function_under_another_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    local, model = make_local()
    monkeypatch.setitem(globals(), "LOCAL", local)
    x = torch.randn(2, 7, 32)
    before = model(x)
    assert [entry.name for entry in patch(model).replaced] == ["LOCAL"]
    with Spy() as spy:
        assert torch.equal(model(x), before)
    assert spy.calls
    unpatch(model)


def test_a_function_that_no_module_has_is_left() -> None:
    names: dict[str, Any] = {"__name__": "nowhere", "turn": other_libraries.swap, "nn": torch.nn}
    text = """
def rotated(x, cos, sin):
    return x * cos + turn(x) * sin
class Attention(nn.Module):
    def forward(self, x, cos, sin):
        return rotated(x, cos, sin)
"""
    exec(text, names)
    model = names["Attention"]()
    report = patch(model)
    (left,) = report.left
    assert left.reason.startswith("it is not what its module has under its name")
    tables = other_libraries.tables(7)
    assert model(torch.randn(2, 7, 16), *tables).shape == (2, 7, 16)


class Registered(torch.nn.Module):
    """Keeps its rotary function in an attribute of the same name, and passes 1.0 for 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = staticmethod(scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = other_libraries.tables(x.shape[1])
        heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
        return scaled(heads, cos, sin, scale=1.0)


def scaled(x: Any, cos: Any, sin: Any, scale: float = 1) -> Any:
    return x * cos * scale + other_libraries.swap(x) * sin * scale


def test_an_attribute_with_the_name_of_a_function_and_a_number_of_another_type() -> None:
    model, x = Registered(), torch.randn(2, 7, 32)
    before = model(x)
    assert [entry.name for entry in patch(model).replaced] == ["scaled"]
    assert_served_until_unpatched(model, x, before)


class Listed(torch.nn.Module):
    """Keeps a list of its subclasses, which have to name themselves."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()
        Listed.known[key] = cls


class Turns(Listed, key="turns"):
    """Has a processor, which keeps a list of its subclasses too."""

    def __init__(self) -> None:
        super().__init__()
        self.processor: Any = Slotted()

    def forward(self, x: torch.Tensor) -> Any:
        heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
        return self.processor(turn(heads, other_libraries.tables(x.shape[1])))


class Slotted:
    """A processor without ``__dict__``."""

    __slots__ = ("scale", "unset")
    known: ClassVar[list[type]] = []

    def __init__(self) -> None:
        self.scale = 2.0

    def __init_subclass__(cls) -> None:
        Slotted.known.append(cls)

    def __call__(self, x: torch.Tensor) -> Any:
        return turn(x, other_libraries.tables(x.shape[2])) * self.scale


turn = other_libraries.turn


@pytest.mark.parametrize(
    "how", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_classes_that_list_their_subclasses(how: Callable[[Any], Any]) -> None:
    model, x = Turns(), torch.randn(2, 7, 32)
    before = model(x)
    assert patch(model).replaced
    model = how(model)
    assert (Listed.known, Slotted.known) == ({"turns": Turns}, [])
    assert type(model).__mro__[1:] == Turns.__mro__
    assert type(model.processor).__mro__[1:] == Slotted.__mro__
    assert not hasattr(model.processor, "__dict__")
    patch(model)
    model.processor.scale = 2
    assert_served_until_unpatched(model, x, before)
    assert (type(model), type(model.processor)) == (Turns, Slotted)
    assert type(model.processor.scale) is int
    assert (Listed.known, Slotted.known) == ({"turns": Turns}, [])


def test_a_class_derived_from_a_generated_one_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listed, "known", {})
    model = Turns()
    patch(model)
    derived = types.new_class("derived", (type(model),), {"key": "derived"})
    assert Listed.known == {"derived": derived}
    with pytest.raises(TypeError, match="key"):
        types.new_class("derived", (type(model),))


class Pipeline:
    """As a pipeline of diffusers: no module, with modules in its attributes."""

    def __init__(self) -> None:
        self.vae, self.transformer, self.name = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), "any"


def test_the_error_for_a_pipeline_names_the_module_to_patch() -> None:
    for function in (patch, unpatch):
        name = function.__name__
        with pytest.raises(
            TypeError,
            match=rf"\[{name}\] model must be a torch.nn.Module but got a Pipeline, whose modules are vae, transformer; "
            rf"call {name}\(pipeline\.transformer\)\.",
        ):
            function(Pipeline())  # type: ignore[operator]
