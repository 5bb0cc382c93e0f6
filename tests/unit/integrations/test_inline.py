"""`tightrope.integrations.patch` on rotations in the body of a method that does more than rotate."""

from __future__ import annotations

import copy
import inspect
import itertools
import linecache
import pickle
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import inline_models
from inline_models import Base, Halves, Processed
from tightrope.integrations import _inline, _run, patch, unpatch
from tightrope.integrations._graft import Swap
from tightrope.integrations._inline import INLINE

pytestmark = pytest.mark.usefixtures("recognised_once")

# Class -> (the lines that are replaced, calls of the operator in one forward pass).
REPLACED: dict[str, tuple[list[str], int]] = {
    "Halves": (["Halves.forward.<inline>.x * cos + rotate_half(x) * sin"], 2),
    "Cat": (["[-t5, t4]"], 2),
    "Stack": (["torch.stack([t1 * cos - t2 * sin, t1 * sin + t2 * cos], dim=-1).flatten(-2)"], 1),
    "Parts": (["type_as(x)"], 1),
    "Attributes": (["x * cos + rotate_half(x) * sin"], 1),
    "Complex": (["torch.view_as_real(t1 * freqs).flatten(3).type_as(x)"], 1),
    "Super": (["x * cos + rotate_half(x) * sin", "turn(by_halves=True)"], 2),
    "Decorated": (["Decorated.forward.<inline>.x * cos + rotate_half(x) * sin"], 1),
    "Function": (["attended.<inline>.x * cos + rotate_half(x) * sin"], 1),
    "Axes": (["t4.reshape(x.shape).to(x.dtype)"], 2),
    "Branches": (
        [
            "t1, t2 = x.chunk(2, -1); t3 = torch.cat((-t2, t1), -1); x * cos + t3 * sin",
            "x * sin + rotate_half(x) * cos",
        ],
        2,
    ),
    "Processed": (["Processor.__call__.<inline>.x * cos + rotate_half(x) * sin"], 1),
}
STAY = [
    *("InPlace", "InPlaceOfViews", "Augmented", "Again", "Carried", "Conditional", "Deleted"),
    *("Captured", "Called", "ReadLater", "HalfReadLater", "ReadBeside", "Noted", "Unlike"),
    "with_closure",
]


class Spy(TorchDispatchMode):
    """Count calls of the operator, and of `cat`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.cats = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket is torch.ops.tightrope.rotate
        self.cats += func.overloadpacket is torch.ops.aten.cat
        return func(*args, **(kwargs or {}))


def made(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(inline_models, name)()


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 7, 32, generator=generator).to(dtype).requires_grad_()


def results(model: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = inputs(dtype)
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def assert_equal(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> None:
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()


@pytest.fixture(params=list(REPLACED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_report_of_an_expression_names_the_tensor_whose_channels_rotate() -> None:
    """Around the expression, x may be a slice of the channels of a head."""
    (entry,) = patch(Halves()).replaced
    assert entry.recognised is not None
    assert entry.recognised.startswith("rotate_half on all channels of x, cos/sin of full width")


# --- what is replaced -----------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_keep_their_bits_and_strides(name: str, dtype: torch.dtype) -> None:
    model = made(name).to(dtype)
    before = results(model, dtype)
    report = patch(model)
    texts, calls = REPLACED[name]
    names = [entry.name for entry in report.replaced]
    assert len(names) == len(texts), str(report)
    for text in texts:
        assert any(each.endswith(text) or text in each for each in names), str(report)
    with torch.no_grad(), Spy() as spy:
        assert torch.equal(model(inputs(dtype)), before[0])
    assert spy.calls == calls
    with Spy() as spy:
        assert_equal(results(model, dtype), before)
    assert spy.calls == 2 * calls
    unpatch(model)
    with Spy() as spy:
        assert_equal(results(model, dtype), before)
    assert spy.calls == 0
    assert type(model) is type(made(name))


@pytest.mark.one_in(3)
def test_a_fault_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a table that is 1 % too large is noticed."""
    model = made(name)
    before = results(model)
    patch(model)
    right = _run.rotate_by

    def wrong(q: Any, k: Any, tables: Any) -> Any:
        return right(q, k, tables._replace(cos=1.01 * tables.cos))

    monkeypatch.setattr(_run, "rotate_by", wrong)
    packed = _run.run_packed
    monkeypatch.setattr(
        _run,
        "run_packed",
        lambda q, k, plain: packed(q, k, plain._replace(primary=1.01 * plain.primary)),
    )
    with pytest.raises(AssertionError):
        assert_equal(results(model), before)
    unpatch(model)


def test_what_only_the_expression_needed_is_not_computed() -> None:
    model = made("Cat")
    with Spy() as spy:
        model(inputs())
    assert spy.cats == 4
    patch(model)
    with Spy() as spy:
        model(inputs())
    assert spy.cats == 0


def test_calls_with_other_bits_run_the_original() -> None:
    model = made("Halves")
    model.angle = model.angle.double()
    model.tables = lambda _: (model.angle[:7].cos(), model.angle[:7].sin())
    x = inputs()
    before = model(x)
    patch(model)
    with Spy() as spy:
        assert torch.equal(model(x), before)
    assert before.dtype == torch.float64
    # float64 tables of a float32 x are among those whose bits the operator cannot equal.
    assert spy.calls in (0, 2)


def test_a_list_that_changes_after_it_was_read() -> None:
    model = made("ListOfSizes")
    before = results(model)
    patch(model)
    assert_equal(results(model), before)


@pytest.mark.parametrize("learned", [False, True])
def test_six_dimensions_that_were_not_tried_run_the_original(learned: bool) -> None:
    """Tables that vary along two of six dimensions, and learned ones."""
    model = made("Axes")
    x = torch.randn(2, 3, 4, 1, 2, 16)
    angle = torch.randn(3 if learned else 1, 8).requires_grad_(learned)
    before = model.turn(x, angle, 1)
    assert patch(model).replaced
    with Spy() as spy:
        assert torch.equal(model.turn(x, angle, 1), before)
    assert spy.calls == 0


def test_learned_tables_keep_their_gradients() -> None:
    class Learned(Halves):
        def __init__(self) -> None:
            super().__init__()
            self.cos, self.sin = (torch.nn.Parameter(torch.randn(7, 16)) for _ in range(2))

        def tables(self, _: torch.Tensor) -> Any:
            return self.cos, self.sin

    torch.manual_seed(0)
    model = Learned()
    before = results(model)
    assert patch(model).replaced
    assert_equal(results(model), before)


# --- what stays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stays", STAY)
def test_bodies_in_which_lines_could_not_move_stay(stays: str) -> None:
    model = made(stays)
    before = results(model)
    report = patch(model)
    assert not report.replaced, str(report)
    assert type(model).forward is type(made(stays)).forward or stays == "with_closure"
    with Spy() as spy:
        assert_equal(results(model), before)
    assert spy.calls == 0


@pytest.mark.parametrize(
    ("stays", "reason", "instead"),
    [
        ("InPlace", "q.mul_(2)", ""),
        ("InPlaceOfViews", "q[..., 0] = 1.0", ""),
        ("Augmented", "half += 1", ""),
        ("Again", "q = q * 2", ""),
        ("Conditional", "half = q\n", "pass\n"),
        ("Conditional", "if x.shape[1] > 5:\n            half = q", ""),
        ("Deleted", "del q1, q2", ""),
        ("Captured", "nonlocal half\n            half = half * 2", "pass"),
        ("Captured", "change()\n        return", "return"),
        ("Called", "self.spoil(q)", ""),
        ("ReadLater", " + q @ k.mT", ""),
        ("HalfReadLater", " + half @ k.mT", ""),
        ("ReadBeside", " + 0.5 * q.mean()", ""),
        ("Noted", "noted(q)", "rotate_half(q)"),
        ("Unlike", "q.flip(-1)", "rotate_half(q)"),
    ],
)
@pytest.mark.one_in(3)
def test_each_refusal_has_its_reason(stays: str, reason: str, instead: str) -> None:
    """The same code without the reason is replaced, unless another reason is left."""
    source = inspect.getsource(getattr(inline_models, stays))
    assert reason in source
    still = "pass" in instead or stays == "Captured"
    for text, wanted in ((source, 0), (source.replace(reason, instead), int(not still))):
        model = of_source(text, stays)()
        before = results(model)
        report = patch(model)
        assert len(report.replaced) == wanted, str(report)
        assert_equal(results(model), before)


@pytest.mark.parametrize(
    ("line", "listed"), [("x.tanh()", 1), ("x * x + x", 1), ("x * cos - x * sin", 2)]
)
def test_a_function_whose_only_rotation_is_replaced_is_listed_once(line: str, listed: int) -> None:
    """With a sum of products beside the expression, the function is listed too."""
    text = f"""
        def apply_rotary(x, cos, sin):
            x = {line}
            return (x * cos + rotate_half(x) * sin).clamp(-1, 1)


        class Model(Base):
            def forward(self, x, cos, sin):
                return apply_rotary(x, cos, sin)
    """
    report = patch(of_source(inspect.cleandoc(text) + "\n", "Model")())
    whole = [entry for entry in report if INLINE not in entry.name]
    assert [entry.replaced for entry in report if INLINE in entry.name] == [True], str(report)
    assert [(entry.name, entry.replaced) for entry in whole] == [("apply_rotary", False)][
        2 - listed :
    ]


TURNED = "q * cos + rotate_half(q) * sin"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (f"for _ in range(2):\n    k = k + ({TURNED})", 0),
        (f"for q in (q, k):\n    k = k + ({TURNED})", 1),
        (f"for _ in range(2):\n    q = q * 2\n    k = k + ({TURNED})", 0),
        (f"for _ in range(2):\n    p = q * 2\n    k = k + ({TURNED.replace('q', 'p')})", 1),
        (f"for _ in range(1):\n    q = k * 2\n    k = k + ({TURNED})\nk = k + q", 0),
        (f"for i in range(2):\n    k = k + ({TURNED})\n    if i: continue\n    q = k * 1", 0),
        (
            f"for i in range(2):\n    if not i:\n        k = k + ({TURNED})\n        continue\n    q = k * 1",
            0,
        ),
        (f"for _ in range(2):\n    for _ in range(1):\n        k = k + ({TURNED})", 0),
        (f"for _ in ():\n    pass\nelse:\n    k = k + ({TURNED})", 1),
        (f"for _ in (1,):\n    k = k + ({TURNED})\n    q = k * 1\nelse:\n    k = k + q", 1),
        (f"while ({TURNED}).sum() + k.sum() < 0:\n    k = k + 100", 0),
        (f"def later():\n    return q * 2\nk = k + ({TURNED})\nk = k + later()", 0),
        (f"later = lambda: q * 2\nk = k + ({TURNED})\nk = k + later()", 0),
        (f"try:\n    k = k + ({TURNED})\nfinally:\n    k = k + q", 0),
        (f"p = q\nk = k + ({TURNED})\nk = k + p", 0),
        (f"p = q.float()\nk = k + ({TURNED.replace('q', 'p')})\nk = k + q", 0),
        (f"p = q.float()\nk = ({TURNED.replace('q', 'p')}) @ q.mT", 0),
        (f"p: Any = q.float()\nk = ({TURNED.replace('q', 'p')}) @ q.mT", 0),
        (f"p, o = q, 3\nk = ({TURNED.replace('q', 'p')}) @ q.mT", 0),
        (f"p, o = k, 3\nk = p + ({TURNED})", 1),
        (f"p = q if k.ndim else q.float()\nk = ({TURNED.replace('q', 'p')}) @ q.mT", 0),
        (f"k = (p := q).mT\nk = ({TURNED.replace('q', 'p')}) @ q.mT", 0),
        (f"p = q.float()\nif k.ndim:\n    o = p.to(k)\nk = k + ({TURNED})\nk = k + o", 0),
        (f"p = q.float()\nq = ({TURNED.replace('q', 'p')})\nk = k + q", 1),
        (f"p = q.float()\nk = ({TURNED.replace('q', 'p')}).to(q.dtype)\nk = k.view(q.shape)", 1),
        (f"p = q.float()\nk = ({TURNED.replace('q', 'p')}).type_as(q)", 1),
        (f"with torch.enable_grad():\n    k = k + ({TURNED})", 1),
    ],
)
def test_a_tensor_that_is_read_again_elsewhere(body: str, wanted: int) -> None:
    """In the next iteration of a loop, in a function, after an exception, or under another name."""
    lines = ["q, k = self.qk(x)", "cos, sin = self.tables(x)", *body.splitlines(), "return k"]
    text = "class Model(Base):\n    def forward(self, x):\n" + "".join(
        f"        {line}\n" for line in lines
    )
    model = of_source(text, "Model")()
    before = results(model)
    report = patch(model)
    assert len(report.replaced) == wanted, str(report)
    assert_equal(results(model), before)


HEAD = "import torch\nfrom inline_models import Base, noted, rotate_half\n\n\n"
_numbers = itertools.count()


def of_source(text: str, name: str, after: str | None = None) -> Any:
    """A class of a new module with this source; `after` replaces the source once it has run."""
    home = ModuleType(f"inline_source_{next(_numbers)}")
    file = f"<{home.__name__}>"
    sys.modules[home.__name__] = home

    def store(source: str) -> None:
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file

    store(HEAD + text)
    exec(compile(HEAD + text, file, "exec"), vars(home))
    if after is not None:
        store(HEAD + after)
    return vars(home)[name]


def test_a_stale_source_is_noticed() -> None:
    text = inspect.getsource(Halves)
    stale = text.replace("(q * cos) + (rotate_half(q) * sin)", "(q * sin) + (rotate_half(q) * cos)")
    assert stale != text
    for after, wanted in ((None, 1), (stale, 0), ("", 0)):
        cls = of_source(text, "Halves", after)
        model = cls()
        before = results(model)
        report = patch(model)
        assert len(report.replaced) == wanted, (after, str(report))
        assert_equal(results(model), before)


# --- what a copied method keeps -------------------------------------------------------------------


def test_a_method_keeps_its_defaults_names_and_lines() -> None:
    model = made("Halves")
    old = type(model).forward
    patch(model)
    new = type(model).forward
    assert new is not old
    for each in ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__"):
        assert getattr(new, each) == getattr(old, each)
    assert new.__kwdefaults__ == old.__kwdefaults__
    assert new.__annotations__ == old.__annotations__
    assert inspect.signature(new) == inspect.signature(old)
    for each in ("co_filename", "co_firstlineno", "co_flags", "co_name", "co_varnames"):
        assert getattr(new.__code__, each) == getattr(old.__code__, each)
    x = inputs()
    assert torch.equal(model(x, 2.0, shift=1.0), made("Halves")(x, 2.0, shift=1.0))


def test_tracebacks_show_the_lines_of_the_file() -> None:
    model = made("Halves")

    def lines() -> list[tuple[str, int | None, str | None]]:
        model.tables = lambda _: (torch.ones(3, 5), torch.ones(3, 5))
        with pytest.raises(RuntimeError) as caught:
            model(inputs())
        frames = traceback.extract_tb(caught.value.__traceback__)
        return [(f.name, f.lineno, f.line) for f in frames if f.filename == inline_models.__file__]

    before = lines()
    assert patch(model).replaced
    after = lines()
    assert before[0] == after[0]
    assert "rotate_half(q)" in str(before[0])


def test_functions_in_the_body_stay_the_same() -> None:
    model = made("Super")
    old = type(model).forward.__code__
    patch(model)
    new = type(model).forward.__code__
    assert new.co_freevars == old.co_freevars == ("__class__",)
    kept = [[c for c in each.co_consts if hasattr(c, "co_code")] for each in (old, new)]
    assert kept[0] == kept[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(name: str, how: Callable[[Any], Any]) -> None:
    model = made(name)
    before = results(model)
    patch(model)
    again = how(model)
    with Spy() as spy:
        assert_equal(results(again), before)
    assert spy.calls
    unpatch(again)
    with Spy() as spy:
        assert_equal(results(again), before)
    assert spy.calls == 0


def test_a_swap_finds_its_function_again() -> None:
    text = "x * cos + rotate_half(x) * sin"
    first, second = (
        Swap(inline_models.__name__, f"{name}.forward.<inline>.{text}", ()).original()
        for name in ("Halves", "Super")
    )
    assert first is second
    x, cos, sin = torch.randn(3, 7, 16)
    assert torch.equal(first(x, cos, sin), x * cos + inline_models.rotate_half(x) * sin)


@pytest.mark.one_in(4)
@pytest.mark.one_in(3)
def test_two_models_with_different_options(name: str) -> None:
    one, other, third = made(name), made(name), made(name)
    before = results(one)
    patch(one, rounding="model")
    patch(other, rounding="once")
    assert_equal(results(one), before)
    for x, y in zip(results(other), before, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    with Spy() as spy:
        assert_equal(results(third), before)
    assert spy.calls == 0
    unpatch(one)
    patch(one, rounding="once")
    assert_equal(results(one), results(other))


def test_processors_are_shared_with_models_that_are_not_patched() -> None:
    one, other = Processed(), Processed()
    other.processor = one.processor
    patch(one)
    assert one.processor is not other.processor
    with Spy() as spy:
        results(other)
    assert spy.calls == 0
    unpatch(one)
    assert one.processor is other.processor


@pytest.mark.one_in(4)
@pytest.mark.one_in(3)
def test_a_model_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    model = made(name)
    before = results(model)
    patch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_equal(results(compiled), before)


@pytest.mark.slow
def test_one_head_and_one_token() -> None:
    """Sizes of 1 do not mix up the heads and the tokens."""
    names = vars(inline_models)
    turned = _inline.function_of(names, "x * cos + rotate_half(x) * sin")
    model = made("Halves")
    patch(model)
    new = next(
        value
        for name, value in names.items()
        if name.startswith("_tightrope_inline") and value._tightrope_original is turned
    )
    for x, table in (
        ((7, 1, 16), (7, 1, 16)), ((1, 7, 16), (7, 16)), ((1, 1, 16), (1, 16)),
        ((7, 3, 16), (7, 1, 16)), ((1, 3, 16), (1, 1, 16)), ((2, 7, 1, 16), (2, 7, 1, 16)),
        ((2, 7, 3, 16), (1, 7, 1, 16)), ((2, 1, 3, 16), (2, 1, 1, 16)), ((7, 7, 16), (7, 1, 16)),
        ((2, 3, 5, 7, 16), (7, 16)), ((2, 7, 7, 16), (7, 1, 16)), ((7, 16), (7, 16)),
        ((3, 3, 3, 16), (3, 3, 1, 16)), ((3, 3, 3, 16), (3, 1, 3, 16)), ((1, 1, 7, 16), (7, 1, 16)),
    ):  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            xs = torch.randn(x, dtype=dtype).requires_grad_()
            cos, sin = torch.randn(table, dtype=dtype), torch.randn(table, dtype=dtype)
            both = [each(xs, cos, sin) for each in (turned, new)]
            weights = torch.randn(both[0].shape).to(dtype)
            assert torch.equal(*both), (x, table, dtype)
            grads = [torch.autograd.grad(y, xs, weights)[0] for y in both]
            assert torch.equal(*grads), (x, table, dtype)


def test_models_without_such_expressions_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Base):
        def forward(self, x: torch.Tensor) -> Any:
            q, k = self.qk(x)
            return q * 2 + k * 3

    read: list[str] = []
    old = _inline._parsed
    monkeypatch.setattr(_inline, "_parsed", lambda *args: read.append("") or old(*args))
    patch(Plain())
    count = len(read)
    patch(Plain())
    assert len(read) == count <= 3
