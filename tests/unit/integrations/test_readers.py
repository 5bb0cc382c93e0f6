"""`patch(angles="exact")` refuses a model in which code that is not replaced reads the cosines and sines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from other_libraries import halves
from tightrope.integrations import patch, unpatch

pytestmark = pytest.mark.usefixtures("recognised_once")
DTYPES = [torch.float32, torch.bfloat16]
WIDTH = 16


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + halves(x) * sin


def spoiled(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Not a rotation."""
    return x * cos + halves(x) * sin * 1.25


def through(x: torch.Tensor, tables: Any) -> torch.Tensor:
    return spoiled(x, *tables)


class Angles(nn.Module):
    """Makes cosines and sines in the dtype of x, as modules of transformers do."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1 / 1e4 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angle = (position_ids[:, :, None].float() * self.inv_freq.float()).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Wrapper(nn.Module):
    """Gives what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Angles()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        return self.inner(x, ids)


class Layer(nn.Module):
    """Rotates by a recognised function, and projects, which needs the dtype of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        cos, sin = tables
        y: torch.Tensor = self.project(rotated(x, cos, sin))
        return y


class Model(nn.Module):
    """A layer whose function is recognised, and code that each subclass adds."""

    layer: type[nn.Module] = Layer
    maker: type[nn.Module] = Angles

    def __init__(self) -> None:
        super().__init__()
        self.rotary = self.maker()
        self.layers = nn.ModuleList(each() for each in (Layer, self.layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, tables=tables)
        return x


# --- code that reads tables -----------------------------------------------------------------------


class Inline(Layer):
    """Rotates in its body, and reads x again, so that the expression is not replaced."""

    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        cos, sin = tables
        y: torch.Tensor = self.project(x * cos + halves(x) * sin) + x
        return y


class OwnFunction(Layer):
    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        c, s = tables
        y: torch.Tensor = self.project(spoiled(x, c, s))
        return y


class TwoFunctions(Layer):
    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        y: torch.Tensor = self.project(through(x, tables))
        return y


class Adds(Layer):
    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        y: torch.Tensor = self.project(x + tables[0])
        return y


class Method(Layer):
    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        y: torch.Tensor = self.project(x.mul(tables[0]))
        return y


class Nested(Layer):
    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        cos, _sin = tables

        def inner(t: torch.Tensor) -> torch.Tensor:
            return t - cos

        y: torch.Tensor = self.project(inner(x))
        return y


class NestedWithArguments(Layer):
    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        def inner(t: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return t * s - c

        y: torch.Tensor = self.project(inner(x, tables[0], s=tables[1]))
        return y


class Generated(Layer):
    def parts(self, tables: Any) -> Any:
        yield tables[0]
        yield from tables[1:]

    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        for table in self.parts(tables):
            x = x + table
        y: torch.Tensor = self.project(x)
        return y


class OfKeywords(Layer):
    """Finds them among other keyword arguments."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = self.project(x + kwargs["tables"][1])
        return y


class PassesKeywords(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.part = Adds()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = self.part(x, **kwargs)
        return y


class InAttribute(Layer):
    """Calls a function that an attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = spoiled

    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        y: torch.Tensor = self.project(self.turn(x, *tables))
        return y


scripted = torch.jit.script(spoiled)


class Scripted(Layer):
    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        y: torch.Tensor = self.project(scripted(x, tables[0], tables[1]))
        return y


class Projected(Layer):
    """Gives them to a module of torch."""

    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        y: torch.Tensor = self.project(x) * self.project(tables[0])
        return y


class Stored(Model):
    """Keeps them in an attribute, which another method reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tables = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.later(super().forward(x))

    def later(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0].project(x + self.tables[1])
        return y


class Registered(Model):
    """Keeps them as a buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        self.register_buffer("cos", tables[0], persistent=False)
        y: torch.Tensor = self.layers[0].project(super().forward(x) * self.cos)
        return y


class OfDict(Model):
    layer = Adds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = {"full": self.rotary(x, torch.arange(x.shape[1])[None])}
        for i, layer in enumerate(self.layers[:2]):
            x = layer(x, tables["full"]) if i else layer(x, tables=tables["full"])
        return x


class Checkpointed(Model):
    layer = Inline

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = checkpoint(layer, x, tables, use_reentrant=False)
        return x


class Wrapped(Model):
    layer, maker = Inline, Wrapper


class Directly(Model):
    """Reads them where they are made, under the name of something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other, _ = self.rotary(x, torch.arange(x.shape[1])[None])
        y: torch.Tensor = self.layers[0].project(super().forward(x) * other)
        return y


def with_layer(cls: type[nn.Module]) -> type[Model]:
    return type(f"Model{cls.__name__}", (Model,), {"layer": cls})


READERS: dict[str, tuple[type[Model], str, str]] = {
    "inline": (with_layer(Inline), "Inline.forward", "x * cos"),
    "own function": (with_layer(OwnFunction), "spoiled", "x * cos"),
    "two functions": (with_layer(TwoFunctions), "spoiled", "x * cos"),
    "adds": (with_layer(Adds), "Adds.forward", "x + tables[0]"),
    "method": (with_layer(Method), "Method.forward", "x.mul(tables[0])"),
    "nested": (with_layer(Nested), "Nested.forward", "t - cos"),
    "nested with arguments": (
        with_layer(NestedWithArguments),
        "NestedWithArguments.forward",
        "t * s",
    ),
    "generated": (with_layer(Generated), "Generated.forward", "x + table"),
    "of keywords": (with_layer(OfKeywords), "OfKeywords.forward", "x + kwargs['tables'][1]"),
    "passes keywords": (with_layer(PassesKeywords), "Adds.forward", "x + tables[0]"),
    "in an attribute": (with_layer(InAttribute), "spoiled", "x * cos"),
    "scripted": (with_layer(Scripted), "Scripted.forward", "scripted(x, tables[0], tables[1])"),
    "module of torch": (with_layer(Projected), "Projected.forward", "self.project(tables[0])"),
    "stored": (Stored, "Stored.later", "x + self.tables[1]"),
    "registered": (
        Registered,
        "Registered.forward",
        "self.register_buffer('cos', tables[0], persistent=False)",
    ),
    "of a dict": (OfDict, "Adds.forward", "x + tables[0]"),
    "checkpointed": (Checkpointed, "Inline.forward", "x * cos"),
    "wrapped maker": (Wrapped, "Inline.forward", "x * cos"),
    "directly": (Directly, "Directly.forward", "super().forward(x) * other"),
}


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model with weights of a dtype; its frequencies stay in float32."""
    for each in model.parameters():
        each.data = each.data.to(dtype)
    return model


def run(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """The result and the gradients of the parameters."""
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = model(x.requires_grad_())
    grads = torch.autograd.grad(y.float().sum(), [*model.parameters()], allow_unused=True)
    return [y.detach(), *(each for each in grads if each is not None)]


def is_near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two results are equal up to some roundings to bfloat16."""
    difference, scale = ((x.detach().abs().max()) for x in (got - want, want))
    return bool(difference <= 0.05 * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", READERS)
def test_a_reader_that_is_not_replaced_is_refused_by_name(kind: str, dtype: torch.dtype) -> None:
    cls, name, text = READERS[kind]
    model = cast(cls(), dtype)
    before, kinds = run(model, dtype), [type(each) for each in model.modules()]
    maker = "Angles"
    message = (
        "[patch] angles must be 'model' but got 'exact' for a model in which code that is not replaced reads the "
        f"cosines and sines of {maker}: {name} ({text}); call patch(model), which keeps the model's own."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        patch(model, angles="exact")
    assert [type(each) for each in model.modules()] == kinds
    assert all(map(torch.equal, run(model, dtype), before))
    assert patch(model).replaced
    assert all(map(torch.equal, run(model, dtype), before))


def test_all_of_them_are_named() -> None:
    model = Model()
    model.layers.extend([Inline(), Adds(), Adds()])
    with pytest.raises(
        ValueError,
        match=re.escape(
            "sines of Angles: Adds.forward (x + tables[0]), Inline.forward (x * cos); call"
        ),
    ):
        patch(model, angles="exact")


@pytest.mark.parametrize("angles", ["model", "exact"])
def test_a_model_that_is_patched_stays_as_it_is(angles: str) -> None:
    """A refusal changes nothing, also where an earlier call did."""
    model = cast(Model(), torch.bfloat16)
    patch(model, angles=angles)
    model.layers.append(cast(Adds(), torch.bfloat16))
    before, kinds = (
        run(model, torch.bfloat16) if angles == "model" else None,
        [type(each) for each in model.modules()],
    )
    with pytest.raises(ValueError, match="angles must be 'model'"):
        patch(model, angles="exact")
    assert [type(each) for each in model.modules()] == kinds
    assert Layer not in kinds
    if before is not None:
        assert all(map(torch.equal, run(model, torch.bfloat16), before))
    unpatch(model)


# --- code that may get them -----------------------------------------------------------------------


class Views(Layer):
    """Takes views and casts of tables, and reads their shapes."""

    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        if tables is None or tables[0].shape[-1] != x.shape[-1]:
            return x
        cos, sin = (table.to(x.device)[:, : x.shape[1]] for table in tables)
        both = torch.stack((cos, sin)).contiguous()
        x = x.to(cos.device).view_as(x) + 0
        y: torch.Tensor = self.project(rotated(x, both[0], both[1]))
        return y


class Renamed(Layer):
    """A name holds tables first, and something else when it is computed with."""

    def forward(self, x: torch.Tensor, tables: Any = None, **_: Any) -> torch.Tensor:
        part = tables
        y = rotated(x, *part)
        part = x * 2
        z: torch.Tensor = self.project(y + part)
        return z


class Shared(Model):
    """Gives tables and other tensors to the same method."""

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        tables = tuple(self.first(each) for each in tables)
        x = self.first(x) * 2
        for layer in self.layers:
            x = layer(x, tables=tables) + x
        return x


class Missing(Model):
    """Calls a part only where it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        if self.extra is not None:
            x = self.extra(x, tables)
        for layer in self.layers:
            x = layer(x, tables=tables)
        return x


class Two(Model):
    """Two modules make tables under names that are the same in two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(super().forward(x))
        return y


KNOWN: dict[str, type[Model]] = {
    "plain": Model,
    "views": with_layer(Views),
    "renamed": with_layer(Renamed),
    "wrapped maker": type("WrappedModel", (Model,), {"maker": Wrapper}),
    "shared": Shared,
    "missing": Missing,
    "two": Two,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KNOWN)
def test_where_every_reader_is_replaced_tables_are_float32(kind: str, dtype: torch.dtype) -> None:
    model = cast(KNOWN[kind](), dtype)
    before = run(model, dtype)
    report = patch(model, angles="exact")
    assert {"rotated", "Angles"} == {entry.name for entry in report.replaced}, str(report)
    assert ", float32;" in str(report)
    for got, want in zip(run(model, dtype), before, strict=True):
        assert got.dtype == want.dtype == dtype
        assert is_near(got, want)
    unpatch(model)
    assert all(map(torch.equal, run(model, dtype), before))


def of_text() -> Model:
    """A model whose code has no source."""
    names: dict[str, Any] = {**globals()}
    text = (
        "class OfText(Layer):\n    def forward(self, x, tables=None, **_):\n"
        "        return self.project(x + tables[0])\n"
    )
    exec(text, names)
    return with_layer(names["OfText"])()


class Unseen(Model):
    """Makes tables where the source does not show it, and nowhere else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = getattr(self, "rot" + "ary")(x, torch.arange(x.shape[1])[None])
        return sum(layer(x, tables) for layer in self.layers) + x * tables[0]


@pytest.mark.parametrize("make", [of_text, Unseen])
def test_where_readers_are_unknown_tables_have_the_dtype_of_x(make: Callable[[], Model]) -> None:
    model = cast(make(), torch.bfloat16)
    want = run(model, torch.bfloat16)[0]
    report = patch(model, angles="exact")
    assert ", in dtype of x;" in str(report)
    got = run(model, torch.bfloat16)[0]
    assert got.dtype == torch.bfloat16
    assert is_near(got, want)


# --- calls of replaced functions in which the original runs ---------------------------------------


def test_the_original_of_a_replaced_function_keeps_the_dtype_of_x() -> None:
    """Its tables are float32 where those of the module are bfloat16; the weights of the next layer are too."""
    model = cast(Model(), torch.bfloat16)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()

    def differentiated() -> torch.Tensor:
        _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return tangent

    want = differentiated()
    patch(model, angles="exact")
    got = differentiated()
    assert got.dtype == torch.bfloat16
    assert is_near(got, want)
