"""Laws over the zoo: replaced functions keep values, gradients and strides to the bit; faulty ones are left."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from tests.support import pairwise, zoo
from tests.support.helpers import Watcher
from tests.support.rows import read_rows
from tests.support.tolerances import assert_each, value
from tests.support.zoo import FAULTS, ROWS, Outcome, Row, call_of, model_of, outcome
from tightrope import patch
from tightrope.patching import Calls, Report, _kinds, _patch

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
PLAIN = {"b": 2, "h": 3, "s": 11, "d": 40}
# None is a size that verification tries.
SIZES = (
    PLAIN,
    {"b": 1, "h": 3, "s": 1, "d": 16},
    {"b": 1, "h": 3, "s": 301, "d": 8},
    {"b": 3, "h": 3, "s": 3, "d": 24},
)
KINDS = [
    pytest.param(row, letters, id=f"{name} {letters}")
    for name, row in ROWS.items()
    for letters in row.calls
]


def calls_of(report: Report) -> Calls:
    """The calls of the one function of a model."""
    (calls,) = report.calls().values()
    return calls


def assert_alike(got: Outcome, wanted: Outcome, steps: float = 0.0) -> None:
    """Assert equal errors, dtypes, strides and bits; every NaN counts as one number.

    Args:
        steps: how many steps of the dtype, at the largest magnitude, a number may be off.
    """

    def check(one: Any, other: Any) -> None:
        assert (one is None) == (other is None)
        if one is not None:
            bound = steps * torch.finfo(other.dtype).eps * other.detach().abs().amax()
            assert one.dtype == other.dtype
            near = (one == other) | (one.isnan() & other.isnan()) | ((one - other).abs() <= bound)
            assert near.all()

    assert got.error == wanted.error
    assert_each(check, got.ys, wanted.ys)
    assert_each(check, got.grads, wanted.grads)


# --- the zoo --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_the_report_names_the_kind(name: str) -> None:
    row = ROWS[name]
    model = model_of(row.function, row.method)
    with patch(model) as report:
        (entry,) = report
    words = entry.kind or ""
    assert row.words in (words, *words.split(" or "))
    assert entry.same_bits == ("complex" not in words)
    assert entry.compared == ["cpu"]


def test_every_row_of_the_tables_of_kinds_has_a_function() -> None:
    found = [_patch.find(row.function, "cpu", row.method, "") for row in ROWS.values()]
    kinds = [kind for kind in found if kind is not None]
    read = {name for name, form in _kinds.FORMS.items() if form.read is not None}
    assert {form for kind in kinds for form in kind.forms.values()} == read
    turns = {place.turn for kind in kinds for place in kind.places.values()}
    assert {turn.words for turn in turns} == {turn.words for turn in _kinds.TURNS}
    made = {(a.rounding, a.cast) for kind in kinds for a in kind.arithmetics.values()}
    assert made == {(a.rounding, a.cast) for a in _kinds.ARITHMETICS}
    shapes = {each for row in ROWS.values() for each in row.calls}
    assert shapes == {"/".join(shape) for shape in _kinds.SHAPES}


def variants(row: Row) -> list[tuple[tuple[torch.dtype, torch.dtype], bool, bool]]:
    """The dtypes of x and of the tables, whether gradients are needed, and whether the operator must serve."""
    narrow = row.form not in ("complex", "angles")
    return [
        ((F32, F32), True, True),
        ((BF16, BF16 if narrow else F32), True, True),
        ((BF16, F32), False, True),
        ((F64, F64), True, False),
        ((F64, F64), False, False),
    ]


@pytest.mark.parametrize("row, letters", KINDS)
def test_results_and_gradients_keep_their_bits(row: Row, letters: str) -> None:
    """In sizes and strides that verification never tries, in any order; where it must, the operator serves."""
    model = model_of(row.function, row.method)
    steps = value("complex products") if row.form == "complex" else 0.0
    kept = [each for each in zoo.STRIDES if "f" not in letters or "transposed" not in each]
    axes = {"sizes": SIZES, "variant": variants(row), "strides": kept}
    cases = [(*each.values(), False) for each in pairwise.covering(axes, lambda _: True)]
    cases += itertools.product(SIZES[:2], variants(row)[:2], ["contiguous"], [True])

    def run(case: Any) -> Outcome:
        sizes, (dtypes, grads, _), strides, learned = case
        with torch.set_grad_enabled(grads):
            return outcome(model, call_of(row, letters, sizes, dtypes, strides, learned))

    wanted = list(map(run, cases))
    with patch(model) as report:
        for case, want in [*zip(cases, wanted), *zip(cases[:20:4], wanted[::4])]:
            before = calls_of(report).original
            got = run(case)
            assert_alike(got, want, steps)
            _, (_, _, must), strides, learned = case
            flat = "transposed" in strides and len(letters.split("/")[0]) == 3
            rare = learned or flat or strides == "expanded"
            assert not must or rare or calls_of(report).original == before, case
            if strides != "expanded":
                assert list(map(zoo.strides_of, got.ys)) == list(map(zoo.strides_of, want.ys)), case


@pytest.mark.parametrize("what", FAULTS)
def test_a_faulty_function_is_left(what: str) -> None:
    model = model_of(FAULTS[what])
    with patch(model) as report:
        (entry,) = report
    assert (entry.name, entry.replaced) == ("apply_rope", False)
    assert entry.reason.startswith(("is of no known kind", "computes "))


# --- which calls the operator serves --------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def tangents(function: Any, q: Any, *others: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        y = function(torch.autograd.forward_ad.make_dual(q, q), *others)[0]
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def fake(function: Any, *given: torch.Tensor) -> Any:
    with FakeTensorMode() as mode:
        return function(*map(mode.from_tensor, given))[0].shape


def watched(function: Any, *given: Any) -> Any:
    with Watcher():
        return function(*given)


def doubled(f: Any, q: Any, k: Any, c: Any, s: Any) -> Any:
    return f(q.bfloat16(), k.bfloat16(), c.double(), s.double())


# Calls of f, a model that rotates by Llama's function, with q, k, cosines c and sines s. Those that were not compared are
# not served: the original runs, and is counted.
CALLS = read_rows(Path(__file__).with_name("calls_of_the_zoo.jsonl"))


@pytest.mark.parametrize("what", CALLS)
def test_the_operator_serves_or_the_original_runs_and_is_counted(what: str) -> None:
    model = model_of(zoo.llama)
    args = [each.detach() for each in call_of(ROWS["llama"], "bhsd/bsd", PLAIN).args]
    names = {**globals(), **dict(zip("fqkcs", (model, *args)))}

    def run() -> tuple[Any, ...]:
        try:
            found = eval(CALLS[what]["call"], names)
        except (IndexError, RuntimeError, TypeError) as error:
            return (type(error),)
        return found if isinstance(found, tuple) else (found,)

    wanted = run()
    with patch(model) as report:
        got = run()
        assert calls_of(report) == (Calls(1, 0) if "served" in CALLS[what] else Calls(0, 1))
    for one, other in zip(got, wanted, strict=True):
        assert type(one) is type(other)
        alike = torch.equal if isinstance(one, torch.Tensor) else lambda a, b: a == b
        assert getattr(one, "is_meta", False) or alike(one, other)


def test_distributed_tensors_run_the_original(one_process: None) -> None:
    model, args = model_of(zoo.llama), call_of(ROWS["llama"], "bhsd/bsd", PLAIN).args
    mesh = init_device_mesh("cpu", (1,))
    with patch(model) as report:
        found = model(*(distribute_tensor(each.detach(), mesh) for each in args))
        assert calls_of(report) == Calls(0, 1)
    assert_each(torch.equal, [y.full_tensor() for y in found], model(*args))


def test_tables_whose_dimensions_the_function_reads_otherwise_run_the_original() -> None:
    """As many rows as heads: only values show which of the two a table has."""
    model = model_of(zoo.of_last_angles, False)
    for rows, heads in ((3, 1), (3, 3), (2, 3)):
        x, freqs = torch.randn(rows, heads, 5, 16), torch.randn(rows, 5, 16)
        wanted = model(x, freqs)
        with patch(model) as report:
            assert torch.equal(model(x, freqs), wanted)
            assert calls_of(report).original == 1


# --- compiled code --------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ROWS)
def test_compiled_calls_have_the_bits_of_eager_ones(name: str, fresh_compiler: None) -> None:
    """In one graph with the operator, also in sizes that come later."""
    row, letters = ROWS[name], ROWS[name].calls[-1]
    model, graphs = model_of(row.function, row.method), list[Any]()

    def kept(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with patch(model) as report:
        compiled = torch.compile(model, fullgraph=True, backend=kept)
        for tokens in (11, 17):
            call = call_of(row, letters, {**PLAIN, "s": tokens})
            assert_alike(outcome(compiled, call), outcome(model, call))
        assert calls_of(report) == Calls(2, 0)  # the eager ones
    assert all("tightrope" in graph.print_readable(print_output=False) for graph in graphs)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", ROWS)
def test_exported_programs_hold_the_operator(name: str) -> None:
    row = ROWS[name]
    model = model_of(row.function, row.method)
    call = call_of(row, row.calls[0], PLAIN)
    with patch(model), torch.no_grad():
        program = torch.export.export(model, call.args, call.options, strict=False)
        assert_alike(outcome(program.module(), call), outcome(model, call))
    assert any("tightrope" in str(node.target) for node in program.graph.nodes)
