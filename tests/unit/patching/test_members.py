"""Where `patch` finds rotary functions, what it puts in their places, and what it says of the others."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.zoo import halves, turn
from tightrope import patch, unpatch
from tightrope.patching import Calls, Report, _patch, _verify

GENERATOR = torch.Generator().manual_seed(0)
X, COS, SIN = (torch.randn(size, generator=GENERATOR) for size in ((2, 3, 7, 16), (7, 16), (7, 16)))


def apply_rope(x: Any, cos: Any, sin: Any) -> Any:
    return turn(x, cos, sin)


def spin(t: Any, c: Any, s: Any, scale: float = 1.0) -> Any:
    """Rotate, under names that do not tell."""
    return turn(t, c, s) * scale if scale != 1.0 else turn(t, c, s)


def helper(x: Any, cos: Any, sin: Any) -> Any:
    return apply_rope(x, cos, sin)


def logged(function: Any) -> Any:
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def unnamed(function: Any) -> Any:
    return lambda *args: function(*args)


apply_rope_logged = logged(lambda x, cos, sin: turn(x, cos, sin))
apply_rope_unnamed = unnamed(apply_rope)


class Kernel(nn.Module):
    """A module as the kernels package makes of a function."""

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)


apply_rope_kernel = Kernel()


class Model(nn.Module):
    """Rotates in a method, which subclasses define in other ways."""

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        return self.turned(x, cos, sin)


class Direct(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return apply_rope(x, cos, sin)


class ByHelper(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return helper(x, cos, sin)


class ByLogged(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return apply_rope_logged(x, cos, sin)


class ByKernel(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return apply_rope_kernel(x, cos, sin)


class ByMethod(Model):
    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return self.apply_rotary(x, cos, sin)


class BySuper(ByMethod):
    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return super().apply_rotary(x, cos, sin)


class ByStatic(Model):
    @staticmethod
    def apply_rotary(x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return self.apply_rotary(x, cos, sin)


class ByInner(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        def apply_rotary(x: Any, cos: Any, sin: Any) -> Any:
            return x * cos + halves(x) * sin

        return apply_rotary(x, cos, sin)


class Processor:
    """A plain object that a module calls."""

    def __call__(self, x: Any, cos: Any, sin: Any) -> Any:
        return apply_rope(x, cos, sin)


class ByProcessor(Model):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return self.processor(x, cos, sin)


class ByUnnamed(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return apply_rope_unnamed(x, cos, sin)


class ByClass(Model):
    @classmethod
    def apply_rotary(cls, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin)

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return self.apply_rotary(x, cos, sin)


class InBody(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        y = x * cos + halves(x) * sin
        return y + x


class ByAttribute(Model):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 3.0

    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin) * getattr(self, "factor", 1.0)

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return self.apply_rotary(x, cos, sin)


class ByHeads(ByAttribute):
    num_heads = 6

    def apply_rotary(self, x: Any, cos: Any, sin: Any) -> Any:
        return turn(x, cos, sin) * (self.num_heads / 3)


class Unnamed(Model):
    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        return spin(x, cos, sin)


class Gates(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.sigmoid() * x + (1 - x.sigmoid()) * x.tanh()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """After each test, every name of this file has its function again."""
    owners = [sys.modules[__name__], *filter(inspect.isclass, globals().values())]
    before = [dict(vars(owner)) for owner in owners]
    code = ByInner.turned.__code__
    yield
    for owner, names in zip(owners, before):
        changed = {name for name in names if vars(owner)[name] is not names[name]}
        # The code of a function in a body finds its replacement under a global name.
        assert all(name.startswith("_tightrope_") for name in changed), changed
    assert ByInner.turned.__code__ == code


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Direct, "apply_rope"),
        (ByHelper, "apply_rope"),
        (ByLogged, "apply_rope_logged"),
        (ByKernel, "apply_rope_kernel"),
        (ByMethod, "ByMethod.apply_rotary"),
        (BySuper, "ByMethod.apply_rotary"),
        (ByStatic, "ByStatic.apply_rotary"),
        (ByInner, "ByInner.turned.<locals>.apply_rotary"),
        (ByProcessor, "apply_rope"),
    ],
)
def test_a_function_is_served_until_unpatch(cls: type[Model], name: str) -> None:
    model, other = cls(), cls()
    wanted = model(X, COS, SIN)
    report = patch(model)
    assert [(entry.module, entry.name) for entry in report.replaced] == [(__name__, name)]
    assert torch.equal(model(X, COS, SIN), wanted)
    assert torch.equal(other(X, COS, SIN), wanted)
    assert report.calls() == {f"{__name__}.{name}": Calls(2, 0)}
    unpatch(model)
    assert torch.equal(model(X, COS, SIN), wanted)
    assert report.calls() == {f"{__name__}.{name}": Calls(2, 0)}


@pytest.mark.parametrize(
    ("cls", "name", "reason"),
    [
        (ByUnnamed, "apply_rope_unnamed", "is of no known kind"),
        (ByClass, "ByClass.apply_rotary", "is of no known kind"),
        (InBody, "InBody.turned", "seems to rotate in its body"),
        (ByAttribute, "ByAttribute.apply_rotary", "is of no known kind"),
        (ByHeads, "ByHeads.apply_rotary", "is of no known kind"),
    ],
)
def test_others_are_left_with_the_reason(cls: type[Model], name: str, reason: str) -> None:
    model = cls()
    wanted = model(X, COS, SIN)
    with patch(model) as report:
        assert [entry.reason for entry in report if entry.name == name] == [reason]
        assert torch.equal(model(X, COS, SIN), wanted)


@pytest.mark.parametrize("cls", [ByMethod, ByStatic, ByInner])
def test_options_that_change_bits_refuse_models_that_are_not_patched(cls: type[Model]) -> None:
    model, other = cls(), cls()
    wanted = other(X, COS, SIN)
    with patch(model, rounding="once"):
        model(X, COS, SIN)
        with pytest.raises(ValueError, match=f"{cls.__name__} must belong to a patched model"):
            other(X, COS, SIN)
    assert torch.equal(other(X, COS, SIN), wanted)


def test_options_that_change_bits_need_callers_that_are_modules() -> None:
    """Others could not tell whether they belong to a patched model: here a processor calls it too."""
    model = Direct()
    words = r"model must call apply_rope in modules of its own file with rounding='once'.*all_models=True"
    with pytest.raises(ValueError, match=words):
        patch(model, rounding="once")
    with patch(model, rounding="once", all_models=True) as report:
        assert [entry.name for entry in report.replaced] == ["apply_rope"]


def test_a_model_that_does_not_rotate() -> None:
    report = patch(Gates())
    assert len(report) == 0
    assert str(report).startswith("no rotary function found")
    assert str(Report()) == str(report)


def test_a_function_that_is_imported_is_replaced_in_the_file_that_imports_it() -> None:
    """Another file that has the function keeps it."""
    home = zoo.file_of(lambda x, cos, sin: turn(x, cos, sin))
    file: Any = types.ModuleType("importing")
    sys.modules["importing"] = file
    file.apply_rope = function = home.apply_rope
    exec(
        "from torch import nn\nclass Model(nn.Module):\n    def forward(self, *a): return apply_rope(*a)",
        vars(file),
    )
    model = file.Model()
    with patch(model):
        assert file.apply_rope is not function
        assert home.apply_rope is function
    assert file.apply_rope is function


def test_the_text_and_the_data_of_a_report() -> None:
    model = nn.ModuleDict({"one": Direct(), "other": InBody()})
    with patch(model) as report:
        for x in (X, X, X.double()[0, 0]):
            model["one"](x, COS, SIN)
    assert len(report) == len([*report]) == 2
    lines = str(report).splitlines()
    assert lines[0] == "1 replaced, 1 left"
    bits = "(same bits, compared on cpu)"
    assert lines[1] == f"replaced test_members.apply_rope {bits}: {zoo.HALVES}, cos and sin"
    assert lines[2] == "left     test_members.InBody.turned: seems to rotate in its body"
    assert lines[3].startswith("the original runs, and is counted, for shapes, dtypes, strides")
    assert lines[4].startswith("replacements serve every model of these files in this process")
    assert lines[5].startswith("compiled code has these bits too")
    place = f"{__name__}.apply_rope"
    assert lines[6:] == [f"calls of {place}: the operator served 2, the original ran in 1"]
    saved = json.loads(json.dumps(report.to_dict()))
    assert saved["calls"] == {place: {"operator": 2, "original": 1, "doubtful": 0}}
    assert [entry["replaced"] for entry in saved["entries"]] == [True, False]
    assert saved["entries"][0]["compared"] == ["cpu"]


def test_functions_of_one_name_are_counted_apart() -> None:
    files = [zoo.file_of(lambda x, cos, sin: turn(x, cos, sin)) for _ in range(2)]
    models = nn.ModuleList(file.Model() for file in files)
    with patch(models) as report:
        models[0](X, COS, SIN)
        counts = {place: calls.operator for place, calls in report.calls().items()}
    assert counts == {f"{files[0].__name__}.apply_rope": 1, f"{files[1].__name__}.apply_rope": 0}


# --- functions that a person names ----------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({lambda x, *_: x: "x"}, "found under their own names but got"),
        ({"spin": "x cos sin -"}, "found under their own names but got 'spin'"),
        ({spin: "x cos sin"}, "of a known kind, but spin with 'x cos sin' is of none"),
        ({spin: "x sin cos -"}, "of a known kind, but spin"),
        ({halves: "x cos"}, "of a known kind, but halves"),
    ],
)
def test_named_functions_that_are_refused(functions: Any, words: str) -> None:
    model = Unnamed()
    with pytest.raises(ValueError, match=f"functions must be {words}"):
        patch(model, functions=functions)
    assert not vars(model).get("_tightrope_patch")


def test_named_functions_need_a_model() -> None:
    with pytest.raises(ValueError, match="functions must be given with a model"):
        patch(functions={spin: "x cos sin -"})


# --- when other code changes the function ---------------------------------------------------------


STYLE = 1.0


def test_what_a_function_reads_may_change_between_two_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_patch, "find", _verify.find)  # in every patch, as for users
    file = zoo.file_of(apply_rope_in_style)
    model = file.Model()
    with patch(model) as report:
        assert report.replaced
    monkeypatch.setitem(globals(), "STYLE", 2.0)
    wanted = model(X, COS, SIN)
    with patch(model):
        assert torch.equal(model(X, COS, SIN), wanted)


def apply_rope_in_style(x: Any, cos: Any, sin: Any) -> Any:
    return turn(x, cos, sin * STYLE)
