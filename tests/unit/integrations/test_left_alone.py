"""`tightrope.integrations.patch` on code that seems to rotate: no result changes, and no trace is left."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import ops
from torch._subclasses.fake_tensor import FakeTensorMode

from tightrope import integrations
from tightrope.integrations import patch, recognise, unpatch

ANGLE = torch.outer(torch.arange(9.0), 10.0 ** -torch.arange(8.0)).repeat(1, 2)
COS, SIN = ANGLE.cos(), ANGLE.sin()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def usual(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_half(x) * sin


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# --- functions that rotate some tensors only ------------------------------------------------------


def that_refuses_long(x: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.shape[-2] <= 70
    return x, sin


def that_refuses_nan(x: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.isnan().any():
        raise ValueError("x must not have NaN")
    return x, sin


# What the function rotates by which sines.
SOME: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "unless one row": lambda x, sin: (x, sin * 0.5 if x.shape[0] == 1 else sin),
    "unless long": lambda x, sin: (x, sin * 0.5 if x.shape[-2] > 256 else sin),
    "unless many heads": lambda x, sin: (x, sin * 0.5 if x.shape[1] > 16 else sin),
    "unless wide": lambda x, sin: (x, sin * 0.5 if x.shape[-1] >= 128 else sin),
    "unless large": lambda x, sin: (x.clamp(-1000, 1000), sin),
    "unless NaN": lambda x, sin: (torch.nan_to_num(x), sin),
    "that refuses long": that_refuses_long,
    "that refuses NaN": that_refuses_nan,
}


@pytest.mark.parametrize("name", SOME)
def test_a_function_that_rotates_some_tensors_only_is_left(name: str) -> None:
    changed = SOME[name]

    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        mine, sines = changed(x, sin)
        return usual(mine, cos, sines)

    assert recognise(usual)
    reason = recognise(function).reason
    assert reason.startswith("it matches a known rotation on some inputs but not on all that")


# --- methods that depend on their object ----------------------------------------------------------


class Method(torch.nn.Module):
    """The method is called for a rotation, and computes one for the defaults of the class."""

    factor = 1.0

    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return usual(x, cos, sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_rope(x, COS, SIN)


class WithDefault(Method):
    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (x * cos + rotate_half(x) * sin) * self.factor


class WithGetattr(Method):
    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = x * cos + rotate_half(x) * sin
        return y * 2 if getattr(self, "double", False) else y


class WithType(Method):
    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (x * cos + rotate_half(x) * sin) * getattr(type(self), "other_factor", 1.0)


class WithIsinstance(Method):
    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = x * cos + rotate_half(x) * sin
        return y * 2 if isinstance(self, Method) else y


def of_class(owner: Any) -> Any:
    return getattr(type(owner), "other_factor", 1.0)


class WithTypeInHelper(Method):
    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (x * cos + rotate_half(x) * sin) * of_class(self)


class WithOtherFactorInHelper(WithTypeInHelper):
    other_factor = 3.0


def checked(x: torch.Tensor) -> torch.Tensor:
    if not issubclass(type(x), torch.Tensor):
        raise TypeError
    return x


class WithCast(Method):
    """Neither ``x.type`` nor ``type(x)`` in a helper is a look at the object."""

    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (checked(x) * cos + rotate_half(x) * sin).type(x.dtype)


class WithOtherFactor(WithType):
    other_factor = 3.0


def methods() -> list[torch.nn.Module]:
    made: list[Any] = [WithDefault(), WithGetattr(), WithType(), WithIsinstance()]
    made[0].factor, made[1].double = 2.0, True
    made += [WithOtherFactor(), WithOtherFactorInHelper()]
    made += [WithCast()]
    return made


def test_methods_that_depend_on_their_object_keep_their_results() -> None:
    x, model = noise(2, 3, 9, 16), torch.nn.ModuleList([*methods(), Method()])
    before = [module(x) for module in model]
    report = patch(model)
    for module, wanted in zip(model, before, strict=True):
        assert torch.equal(module(x), wanted), (module, report)
    whole = {entry.name for entry in report.replaced}
    assert whole == {"Method.apply_rope", "WithCast.apply_rope"}
    assert {entry.reason for entry in report.left} == {
        "it reads attributes of its object, which may differ between objects",
        "it matches no known rotation",
    }


# --- code that changes after patch ----------------------------------------------------------------


def test_a_function_that_is_defined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook. The second patch finds the new function, also for calls that it leaves."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, factor: float) -> Any:
            return apply_again(x, COS, SIN, factor)

    x = noise(2, 3, 9, 16)
    for sign in (1.0, -1.0):

        def again(
            x: torch.Tensor,
            cos: torch.Tensor,
            sin: torch.Tensor,
            factor: float = 1.0,
            sign: float = sign,
        ) -> torch.Tensor:
            return usual(x, cos, sin) if factor == 1.0 else usual(x, cos, sin) * (factor * sign)

        again.__name__ = again.__qualname__ = "apply_again"
        monkeypatch.setitem(globals(), "apply_again", again)
        model = Model()
        before = [model(x, factor) for factor in (1.0, 2.0)]
        report = patch(model)
        assert [entry.name for entry in report.replaced] == ["apply_again"], report
        assert all(map(torch.equal, [model(x, factor) for factor in (1.0, 2.0)], before))
        unpatch(model)


apply_again: Any = None

CODE = """
import torch

def apply_rope(x, cos, sin):
    u, v = x.chunk(2, -1)
    return x * cos + torch.cat(({sign}v, u), -1) * sin

class Model(torch.nn.Module):
    def forward(self, x, cos, sin):
        return apply_rope(x, cos, sin)
"""


@pytest.mark.parametrize("changed", ["as before", "another rotation", "no rotation", "gone"])
def test_a_pickle_is_checked_against_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    name = f"tightrope_pickled_{changed.replace(' ', '_')}"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / f"{name}.py"

    def module(code: str) -> Any:
        file.write_text(code)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    model = module(CODE.format(sign="-")).Model()
    assert patch(model).replaced
    data = pickle.dumps(model)
    codes = {
        "as before": CODE.format(sign="-"),
        "another rotation": CODE.format(sign=""),
        "no rotation": CODE.format(sign="-").replace("* sin", "+ sin"),
        "gone": CODE.format(sign="-").replace("apply_rope", "turn"),
    }
    new = module(codes[changed])
    x = noise(2, 3, 9, 16)
    wanted = new.Model()(x, COS, SIN)
    if changed in ("as before", "another rotation"):
        loaded = pickle.loads(data)
        assert type(loaded) is not new.Model
    else:
        with pytest.warns(
            UserWarning, match=rf"without its patch, because {name}.apply_rope is not the code"
        ):
            loaded = pickle.loads(data)
        assert type(loaded) is new.Model
    assert torch.equal(loaded(x, COS, SIN), wanted)


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_in_which_a_model_is_patched_or_loaded(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model = noise(2, 3, 9, 16), Method()
    before = model(x)
    with mode():
        assert patch(model).replaced
        again = copy.deepcopy(model)
    monkeypatch.setattr(integrations._graft, "_replacements", {})
    monkeypatch.setattr(integrations._graft, "_classes", {})
    data = pickle.dumps(model)
    with mode():
        loaded = pickle.loads(data)
    for each in (model, again, loaded):
        assert type(each) is not Method
        assert torch.equal(each(x), before)


# --- functions that keep state --------------------------------------------------------------------

TABLES: dict[str, Any] = {}
SEEN: list[torch.dtype] = []
CALLS = 0


class Registry:
    dtype: torch.dtype | None = None


def with_a_table(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if not TABLES:
        TABLES["cos"], TABLES["sin"] = COS.to(x.dtype), SIN.to(x.dtype)
    return usual(x, TABLES["cos"][positions], TABLES["sin"][positions])


def with_a_list(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    SEEN.append(x.dtype)
    return usual(x, cos.to(SEEN[0]), sin.to(SEEN[0]))


def with_a_class(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if Registry.dtype is None:
        Registry.dtype = x.dtype
    return usual(x, cos.to(Registry.dtype), sin.to(Registry.dtype))


def with_an_attribute(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    keep: Any = with_an_attribute
    keep.dtype = getattr(keep, "dtype", x.dtype)
    return usual(x, cos.to(keep.dtype), sin.to(keep.dtype))


def with_a_counter(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return usual(x, cos, sin)


class Recent(OrderedDict[Any, Any]):
    """A dict whose ``copy`` raises an error."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class Making(OrderedDict[Any, Any]):
    """Makes what it returns, as ``ACT2FN`` of transformers does."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()


RECENT, COUNTS, MAKING = Recent(2), Counter[str](), Making(dtype=torch.get_default_dtype)


def with_a_cache(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    RECENT[x.dtype] = MAKING["dtype"]
    return usual(x, cos, sin)


def with_a_counting_dict(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    COUNTS["calls"] += 1
    return usual(x, cos, sin)


@pytest.mark.parametrize(
    "function",
    [
        with_a_table,
        with_a_list,
        with_a_class,
        with_an_attribute,
        with_a_counter,
        with_a_cache,
        with_a_counting_dict,
    ],
)
def test_recognition_leaves_no_state(function: Any) -> None:
    assert not recognise(function)
    assert (TABLES, SEEN, Registry.dtype, CALLS) == ({}, [], None, 0)
    assert not RECENT
    assert not COUNTS
    assert dict.items(MAKING) == {"dtype": torch.get_default_dtype}.items()
    assert not vars(with_an_attribute)


def test_a_compiled_function_is_neither_called_nor_replaced() -> None:
    """Trying it would compile it for sizes of no model, until torch gives up compiling it."""
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(usual, backend=backend)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return compiled_rope(x, cos, sin)

    globals()["compiled_rope"] = compiled
    report = patch(Model())
    assert not report.replaced, report
    assert report.left[0].reason.startswith("torch.compile made it")
    assert not compilations


compiled_rope: Any = None


class LazyModule(types.ModuleType):
    """Imports what it names when it is first read, as transformers does; here that is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


lazy = LazyModule("lazy")


def with_a_lazy_module(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    if x.is_cuda:
        return lazy.rope(x, cos, sin)
    return usual(x, cos, sin)


def with_torch_ops(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    if x.is_cuda:
        return ops.a_library.rope(x, cos, sin)
    return usual(x, cos, sin)


disabled: Any = torch.compiler.disable(usual)


class Compiled:
    @torch.compile
    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return usual(x, cos, sin)


turn = Compiled().turn


def with_a_compiled_method(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return turn(x, cos, sin)


def test_a_function_that_calls_a_compiled_method() -> None:
    assert recognise(with_a_compiled_method).reason.startswith("torch.compile made it")


@pytest.mark.parametrize("function", [with_a_lazy_module, with_torch_ops, disabled])
def test_what_a_function_names_is_not_read(function: Any) -> None:
    """Reading it may import it, and torch.ops has every attribute."""
    assert recognise(function)
