"""Where `patch` finds rotary functions, what it puts in their places, and what it says of the others."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.refused_calls import refused_calls
from tests.support.zoo import halves, turn
from tightrope import patch, unpatch
from tightrope.patching import Calls, Report, _patch, _verify

GENERATOR = torch.Generator().manual_seed(0)
X, COS, SIN = (torch.randn(size, generator=GENERATOR) for size in ((2, 3, 7, 16), (7, 16), (7, 16)))
STYLE = 1.0


def apply_rope(x: Any, cos: Any, sin: Any) -> Any:
    return turn(x, cos, sin)


def apply_rope_in_style(x: Any, cos: Any, sin: Any) -> Any:
    return turn(x, cos, sin * STYLE)


def spin(t: Any, c: Any, s: Any, scale: float = 1.0) -> Any:
    """Rotate, under names that do not tell."""
    return turn(t, c, s) * scale if scale != 1.0 else turn(t, c, s)


def helper(x: Any, cos: Any, sin: Any) -> Any:
    return apply_rope(x, cos, sin)


def logged(function: Any) -> Any:
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def unnamed(function: Any) -> Any:
    return lambda *args: function(*args)


class Kernel(nn.Module):
    """A module as the kernels package makes of a function."""

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)


apply_rope_logged = logged(lambda x, cos, sin: turn(x, cos, sin))
apply_rope_unnamed = unnamed(apply_rope)
apply_rope_kernel = Kernel()


def calling(name: str) -> type[nn.Module]:
    """Return a module that rotates by the function of this name."""
    forward = eval(f"lambda self, *args: {name}(*args)", globals())
    return type(name, (nn.Module,), {"forward": forward, "__module__": __name__})


Direct, ByHelper, ByLogged, ByKernel = map(
    calling, ("apply_rope", "helper", "apply_rope_logged", "apply_rope_kernel")
)
ByUnnamed, Unnamed = map(calling, ("apply_rope_unnamed", "spin"))


class ByProcessor(nn.Module):
    """Calls a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, *args: Any) -> Any:
        return self.processor(*args)


class Processor:
    def __call__(self, *args: Any) -> Any:
        return apply_rope(*args)


class Method(nn.Module):
    """Rotates by a method of a subclass."""

    num_heads, factor = 6, 3.0

    def forward(self, *args: Any) -> Any:
        return self.apply_rotary(*args)


class ByMethod(Method):
    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)


class BySuper(ByMethod):
    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return super().apply_rotary(x, cos, sin)


class ByStatic(Method):
    @staticmethod
    def apply_rotary(x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)


class ByClass(Method):
    @classmethod
    def apply_rotary(cls, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)


class ByAttribute(Method):
    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin) * getattr(self, "factor", 1.0)


class ByHeads(Method):
    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin) * (self.num_heads / 3)


class ByInner(nn.Module):
    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        def apply_rotary(x: Any, cos: Any, sin: Any) -> Any:
            return x * cos + halves(x) * sin

        return apply_rotary(x, cos, sin)


class InBody(nn.Module):
    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        y = x * cos + halves(x) * sin
        return y + x


class Gates(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.sigmoid() * x + (1 - x.sigmoid()) * x.tanh()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """After each test, every name of this file has its function again."""
    owners = [sys.modules[__name__], *filter(inspect.isclass, globals().values())]
    before, code = [dict(vars(owner)) for owner in owners], ByInner.forward.__code__
    yield
    for owner, names in zip(owners, before):
        changed = {name for name in names if vars(owner)[name] is not names[name]}
        # The code of a function in a body finds its replacement under a global name.
        assert all(name.startswith("_tightrope_") for name in changed), changed
    assert ByInner.forward.__code__ == code


#: A model -> the name of its function, and the reason why it is left, if it is.
MODELS: dict[type[nn.Module], tuple[str, str]] = {
    Direct: ("apply_rope", ""),
    ByHelper: ("apply_rope", ""),
    ByLogged: ("apply_rope_logged", ""),
    ByKernel: ("apply_rope_kernel", ""),
    ByProcessor: ("apply_rope", ""),
    ByMethod: ("ByMethod.apply_rotary", ""),
    BySuper: ("ByMethod.apply_rotary", ""),
    ByStatic: ("ByStatic.apply_rotary", ""),
    ByInner: ("ByInner.forward.<locals>.apply_rotary", ""),
    ByUnnamed: ("apply_rope_unnamed", "is of no known kind"),
    ByClass: ("ByClass.apply_rotary", "is of no known kind"),
    ByAttribute: ("ByAttribute.apply_rotary", "is of no known kind"),
    ByHeads: ("ByHeads.apply_rotary", "is of no known kind"),
    InBody: ("InBody.forward", "seems to rotate in its body"),
}


@pytest.mark.parametrize("cls", MODELS)
def test_a_function_is_served_until_unpatch_or_left_with_the_reason(cls: type[nn.Module]) -> None:
    (name, reason), model, other = MODELS[cls], cls(), cls()
    wanted = model(X, COS, SIN)
    with patch(model) as report:
        found = {entry.name: (entry.module, entry.replaced, entry.reason) for entry in report}
        assert found[name] == (__name__, not reason, reason)
        assert (len(report.replaced), bool(report.left)) == (not reason, bool(reason))
        assert torch.equal(model(X, COS, SIN), wanted)
        assert torch.equal(other(X, COS, SIN), wanted)
    assert torch.equal(model(X, COS, SIN), wanted)
    assert report.calls() == ({} if reason else {f"{__name__}.{name}": Calls(2, 0)})


@pytest.mark.parametrize("cls", [ByMethod, ByStatic, ByInner])
def test_options_that_change_bits_refuse_models_that_are_not_patched(cls: type[nn.Module]) -> None:
    model, other = cls(), cls()
    wanted = other(X, COS, SIN)
    with patch(model, rounding="once"):
        model(X, COS, SIN)
        with pytest.raises(ValueError, match=r"(Method|ByInner) must belong to a patched model"):
            other(X, COS, SIN)
    assert torch.equal(other(X, COS, SIN), wanted)


def test_options_that_change_bits_need_callers_that_are_modules() -> None:
    """Others could not tell whether they belong to a patched model: here a processor calls it too."""
    words = r"model must call apply_rope in modules of its own file with rounding='once'.*all_models=True"
    with pytest.raises(ValueError, match=words):
        patch(Direct(), rounding="once")
    with patch(model := Direct(), rounding="once", all_models=True) as report:
        assert report.replaced
        model(X, COS, SIN)


def test_a_function_that_is_imported_is_replaced_in_the_file_that_imports_it() -> None:
    """Another file that has the function keeps it."""
    home, importing = (zoo.file_of(lambda x, cos, sin: turn(x, cos, sin)) for _ in range(2))
    importing.apply_rope = function = home.apply_rope
    model = importing.Model()
    with patch(model):
        assert importing.apply_rope is not function
        assert home.apply_rope is function
    assert importing.apply_rope is function


def test_the_text_and_the_data_of_a_report() -> None:
    model = nn.ModuleDict({"one": Direct(), "other": InBody()})
    with patch(model) as report:
        for x in (X, X, X.double()[0, 0]):
            model["one"](x, COS, SIN)
    place, bits = f"{__name__}.apply_rope", "(same bits, compared on cpu)"
    first, *middle, last = str(report).splitlines()
    assert first == "1 replaced, 1 left"
    assert middle[0] == f"replaced test_members.apply_rope {bits}: {zoo.HALVES}, cos and sin"
    assert middle[1] == "left     test_members.InBody.forward: seems to rotate in its body"
    assert last == f"calls of {place}: the operator served 2, the original ran in 1"
    saved = json.loads(json.dumps(report.to_dict()))
    assert saved["calls"] == {place: {"operator": 2, "original": 1, "doubtful": 0, "padded": 0}}
    assert [entry["replaced"] for entry in saved["entries"]] == [True, False]
    assert saved["entries"][0]["compared"] == ["cpu"]
    none = patch(Gates())
    assert str(none).startswith("no rotary function found")
    assert (len(none), str(none)) == (0, str(Report()))


def test_functions_of_one_name_are_counted_apart() -> None:
    files = [zoo.file_of(lambda x, cos, sin: turn(x, cos, sin)) for _ in range(2)]
    models = nn.ModuleList(file.Model() for file in files)
    with patch(models) as report:
        models[0](X, COS, SIN)
        counts = {place: calls.operator for place, calls in report.calls().items()}
    assert counts == {f"{files[0].__name__}.apply_rope": 1, f"{files[1].__name__}.apply_rope": 0}


def test_a_function_under_another_name_is_named() -> None:
    model = Unnamed()
    assert not len(patch(model))
    wanted = model(X, COS, SIN)
    report = patch(model, functions={spin: "x cos sin -"})
    assert [entry.name for entry in report.replaced] == ["spin"]
    assert torch.equal(model(X, COS, SIN), wanted)
    assert torch.equal(spin(X, COS, SIN, 2.0), wanted * 2.0)
    assert report.calls() == {f"{__name__}.spin": Calls(1, 1)}
    unpatch(model)


def test_what_a_function_reads_may_change_between_two_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_patch, "find", _verify.find)  # in every patch, as for users
    model = zoo.file_of(apply_rope_in_style).Model()
    with patch(model) as report:
        assert report.replaced
    monkeypatch.setitem(globals(), "STYLE", 2.0)
    wanted = model(X, COS, SIN)
    with patch(model):
        assert torch.equal(model(X, COS, SIN), wanted)


class Pipeline:
    """As a pipeline of diffusers: no module, with modules in its attributes."""

    def __init__(self) -> None:
        self.vae, self.transformer, self.name = nn.Linear(2, 2), nn.Linear(2, 2), "any"


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())
