"""The report of `patch` says in which calls the original runs, as the replacements decide it."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from other_libraries import calls_of, halves
from tightrope.integrations import _recognise, patch
from tightrope.integrations._replace import replacement
from tightrope.integrations._report import entry_of

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
NAMES = {F32: "float32", F64: "float64", BF16: "bfloat16", F16: "float16"}


def complex_pair(q: torch.Tensor, k: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
    """Rotate as Llama 4 does, by one complex table."""
    return tuple(
        torch.view_as_real(
            torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs_cis[:, :, None]
        )
        .flatten(3)
        .type_as(x)
        for x in (q, k)
    )


def complex_one(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate as Qwen-Image does, one tensor by one complex table."""
    y = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs_cis.unsqueeze(1)
    return torch.view_as_real(y).flatten(3).type_as(x)


def of_half_width(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, seq, heads, dim) by tables of half width, in the dtype of x."""
    u, v = x.chunk(2, -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((u * cos - v * sin, v * cos + u * sin), -1).to(x.dtype)


def of_full_width(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as Llama does."""
    return x * cos[:, None] + halves(x) * sin[:, None]


def of_matrices(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate as Flux of Black Forest Labs does; gradients depend on the strides of x."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    y = freqs_cis[..., 0] * pairs[..., 0] + freqs_cis[..., 1] * pairs[..., 1]
    return y.reshape(*x.shape).type_as(x)


def tables(rows: int, tokens: int, pairs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(rows, tokens, pairs, generator=torch.Generator().manual_seed(seed))
    return angle.cos(), angle.sin()


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Counted:
    """A function, and its replacement, which counts the calls of the original."""

    def __init__(self, function: Callable[..., Any], rounding: str = "model") -> None:
        recognition = _recognise.recognise(function)
        assert recognition.candidate is not None, recognition.reason
        self.ran = 0

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.ran += 1
            return function(*args, **kwargs)

        counting.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        self.original = function
        self.replaced = replacement(counting, [recognition.candidate], rounding=rounding)
        self.entry = entry_of("module", "name", recognition, rounding)

    def falls_back(self, *args: Any) -> bool:
        """Call the replacement; return whether the original ran. Values and gradients keep their bits."""
        self.ran = 0
        try:
            ours = outcome(self.replaced, *args)
        except RuntimeError:  # that of the original
            assert self.ran
            return True
        assert all(map(torch.equal, ours, outcome(self.original, *args)))
        return self.ran > 0


def outcome(function: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """Results, and the gradients of the arguments that need them."""
    found = function(*args)
    ys = list(found) if isinstance(found, tuple) else [found]
    leaves = [x for x in args if x.requires_grad]
    ends = [y for y in ys if y.requires_grad]
    grads = torch.autograd.grad(ends, leaves, [torch.ones_like(y) for y in ends]) if ends else ()
    return [*ys, *grads]


def complex_table(rows: int, tokens: int, pairs: int) -> torch.Tensor:
    return torch.complex(*tables(rows, tokens, pairs))


# --- threads, sizes, devices ----------------------------------------------------------------------

LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
THREADS = (
    "in eager code, tensors of more than 32,768 pairs that the threads of torch divide into parts of which one is "
    f"no multiple of {LANES} pairs"
)
PAIRS = f"in eager code, a number of rotated pairs that is no multiple of {LANES}"
DEVICES = "in eager code, devices other than CPUs"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "heads"),
    [(128, (8, 2)), (457, (9, 2)), (457, (2, 9)), (514, (9, 2)), (700, (8, 8)), (1371, (3, 9))],
)
def test_large_complex_products_keep_their_bits_on_several_threads(
    threads: int, tokens: int, heads: tuple[int, int]
) -> None:
    """The original runs where a thread's part does not end with a vector."""
    torch.set_num_threads(threads)
    counted = Counted(complex_pair)
    q, k = (noise(1, tokens, each, 2 * LANES, seed=each) for each in heads)

    def cuts(x: torch.Tensor) -> bool:
        count = x.numel() // 2
        parts = min(threads, math.ceil(count / 32768))
        return parts > 1 and math.ceil(count / parts) % LANES > 0

    assert counted.falls_back(q, k, complex_table(1, tokens, LANES)) == (cuts(q) or cuts(k))
    assert {THREADS, PAIRS, DEVICES} <= set(counted.entry.original_runs)


def test_odd_numbers_of_complex_pairs_run_the_original() -> None:
    torch.set_num_threads(1)
    counted = Counted(complex_one)
    for channels, falls_back in ((2 * LANES, False), (3 * LANES, True), (4 * LANES, False)):
        x, table = noise(2, 5, 3, channels), complex_table(1, 5, channels // 2)[0]
        assert counted.falls_back(x, table) == falls_back
    assert {THREADS, PAIRS, DEVICES} <= set(counted.entry.original_runs)


@pytest.mark.parametrize("function", [of_half_width, of_full_width])
def test_real_products_are_replaced_on_any_number_of_threads(function: Any) -> None:
    torch.set_num_threads(2)
    counted = Counted(function)
    halved = function is of_half_width
    x = noise(2, 300, 9, 24) if halved else noise(2, 9, 300, 24)
    cos, sin = (t if halved else torch.cat((t, t), -1) for t in tables(2, 300, 12))
    assert not counted.falls_back(x, cos, sin)
    assert not [each for each in counted.entry.original_runs if "eager" in each]


def test_once_rounds_complex_products_of_any_size() -> None:
    torch.set_num_threads(2)
    counted = Counted(complex_one, rounding="once")
    counted.replaced(noise(2, 300, 9, 24), complex_table(1, 300, 12)[0])
    assert not counted.ran
    assert not [each for each in counted.entry.original_runs if "eager" in each]


# --- dtypes and gradients -------------------------------------------------------------------------


def sentences(counted: Counted, make: Callable[[torch.dtype, torch.dtype], tuple[Any, ...]]) -> Any:
    """The pairs of dtypes for which the original runs: always, with gradients of x, and of the tables."""
    found: dict[str, list[tuple[torch.dtype, torch.dtype]]] = {"": [], "x": [], "tables": []}
    for pair in itertools.product(NAMES, NAMES):
        arguments = make(*pair)
        if arguments is None:
            continue
        count = 2 if counted.original is complex_pair else 1
        for which, wants in (
            ("", ()),
            ("x", range(count)),
            ("tables", range(count, len(arguments))),
        ):
            given = [each.detach().requires_grad_(i in wants) for i, each in enumerate(arguments)]
            if counted.falls_back(*given):
                found[which].append(pair)
    return found


def stated(counted: Counted) -> dict[str, list[tuple[torch.dtype, torch.dtype]]]:
    """The same pairs, as the lines of the report name them."""
    found: dict[str, list[tuple[torch.dtype, torch.dtype]]] = {"": [], "x": [], "tables": []}
    for line in counted.entry.original_runs:
        if "cos/sin" not in line or line.startswith("in eager") or "rows" in line:
            continue
        which = "x" if line.startswith("with gradients") else "tables" if "need" in line else ""
        text = line.removeprefix("with gradients, ").removeprefix("cos/sin that need gradients")
        if not text:
            found[which] += itertools.product(NAMES, NAMES)
        for part in text.removeprefix(", for ").split(", and ") if text else []:
            xs, _, ys = part.removesuffix(" cos/sin").partition(" x by ")
            found[which] += [
                pair
                for pair in itertools.product(NAMES, NAMES)
                if NAMES[pair[0]] in xs.replace(" or", ",").split(", ")
                and NAMES[pair[1]] in ys.replace(" or", ",").split(", ")
            ]
    found["x"] = sorted({*found[""], *found["x"]}, key=str)
    found["tables"] = sorted({*found["x"], *found["tables"]}, key=str)
    return {which: sorted(pairs, key=str) for which, pairs in found.items()}


def of_angles(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate as Stable Audio 3 does: by angles, in float32."""
    angle = freqs.float()[:, None]
    return (x.float() * angle.cos() + halves(x.float()) * angle.sin()).to(x.dtype)


def _given(function: Any) -> Callable[[torch.dtype, torch.dtype], Any]:
    def make(dtype: torch.dtype, table: torch.dtype) -> Any:
        channels = 32  # whole vectors also of AVX-512: see LANES
        cos, sin = (t.to(table) for t in tables(2, 6, channels // 2))
        if function is complex_pair:
            if table in (BF16, F16):
                return None
            x = noise(2, 6, 3, channels).to(dtype)
            return x, x.clone(), torch.complex(cos, sin)
        if function is of_half_width:
            return noise(2, 6, 3, channels).to(dtype), cos, sin
        x = noise(2, 3, 6, channels).to(dtype)
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        return (x, torch.atan2(sin, cos)) if function is of_angles else (x, cos, sin)

    return make


@pytest.mark.parametrize("function", [complex_pair, of_half_width, of_full_width, of_angles])
def test_the_dtypes_of_the_report_are_those_for_which_the_original_runs(function: Any) -> None:
    """Each of 16 pairs of dtypes, without gradients, with those of x, and with those of the tables."""
    torch.set_num_threads(1)
    counted = Counted(function)
    ran = {
        which: sorted(pairs, key=str)
        for which, pairs in sentences(counted, _given(function)).items()
    }
    said = stated(counted)
    if function is complex_pair:  # no complex table has entries of 16 bits that torch multiplies
        said = {which: [p for p in pairs if p[1] in (F32, F64)] for which, pairs in said.items()}
    assert said == ran
    assert ran["x"], "the test shows nothing"


def test_the_sentence_of_llama() -> None:
    """bfloat16 queries by float32 tables, as under autocast, run the original in training."""
    entry = Counted(of_full_width).entry
    assert entry.original_runs == (
        "x of a rank other than 3 or 4",
        "float32, bfloat16 or float16 x by float64 cos/sin, and float64 x by bfloat16 or float16 cos/sin",
        "with gradients, bfloat16 x by float32 or float16 cos/sin, and float16 x by float32 or bfloat16 cos/sin",
        "cos/sin that need gradients and that rows of x share",
    )


# --- other kinds of calls -------------------------------------------------------------------------


def test_rows_that_do_not_lie_one_after_the_other() -> None:
    counted = Counted(of_matrices)
    cos, sin = (t[:1, None] for t in tables(1, 6, 8))
    matrices = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
    x = noise(2, 3, 6, 16)
    between = noise(3, 2, 6, 16).transpose(0, 1)
    assert [counted.falls_back(each, matrices) for each in (x, between)] == [False, True]
    (line,) = (each for each in counted.entry.original_runs if each.startswith("x whose rows"))
    assert line == "x whose rows do not lie one after the other in memory"


class Subclass(torch.Tensor):
    pass


def _forward_mode(function: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(x, x), cos, sin)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, *given: f(*(each[:, :-1] for each in given)),
        lambda f, x, cos, sin: f(x.as_subclass(Subclass), cos, sin),
        lambda f, *given: f(*(each.to("meta") for each in given)),
        lambda f, *given: torch.func.vmap(f)(*(each[None] for each in given)),
        _forward_mode,
    ],
    ids=["shapes", "subclass", "meta", "transform", "forward mode"],
)
def test_every_replacement_calls_the_original_for_the_calls_that_the_report_names(
    call: Callable[..., Any],
) -> None:
    counted = Counted(of_full_width)
    cos, sin = (torch.cat((t, t), -1) for t in tables(2, 6, 8))
    counted.replaced(noise(2, 3, 6, 16), cos, sin)
    assert not counted.ran
    try:
        call(counted.replaced, noise(2, 3, 6, 16), cos, sin)
    except RuntimeError:  # that of the original, for shapes that do not fit
        pass
    assert counted.ran


# --- the report of a model ------------------------------------------------------------------------


class Complex(torch.nn.Module):
    """Two projections that are rotated by one complex table."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = (torch.nn.Linear(6 * LANES, 6 * LANES) for _ in range(2))

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        q, k = (each(x).unflatten(-1, (3, 2 * LANES)) for each in (self.to_q, self.to_k))
        q, k = complex_pair(q, k, freqs_cis)
        return (q * k).sum(-1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [8, 2049])
def test_a_model_runs_the_original_only_where_its_report_says_so(threads: int, tokens: int) -> None:
    torch.set_num_threads(threads)
    model, given = Complex(), (noise(1, tokens, 6 * LANES), complex_table(1, tokens, LANES))
    before = model(*given)
    report = patch(model)
    cut = threads > 1 and tokens > 8  # 2,049 x 3 vectors
    assert calls_of(complex_pair, lambda: model(*given)) == cut
    assert torch.equal(model(*given), before)
    counts = report.calls()["test_report.complex_pair"]
    assert (counts.operator, counts.original) == ((0, 2) if cut else (2, 0))
    (entry,) = report.replaced
    assert THREADS in entry.original_runs
    first, line, runs, always, compiled, other, tried, calls = str(report).splitlines()
    assert first == "1 replaced, 0 left"
    assert line.startswith("replaced test_report.complex_pair (same bits): adjacent pairs")
    assert runs == f"{'':9}the original runs for {'; '.join(entry.original_runs)}"
    assert always == (
        "every replacement also calls the original for shapes and arguments that were not compared, "
        "tensor subclasses, meta tensors, torch.func transforms and forward-mode differentiation"
    )
    assert compiled == (
        "compiled code has these bits too where the operator runs; torch.compile of the originals rounds less "
        "often, so its results differ"
    )
    assert (
        other
        == 'where a line says "in eager code", compiled code runs the operator, with other bits'
    )
    assert tried.startswith("functions were compared with the operator in eager code on the CPU, ")
    assert calls == (
        "calls of test_report.complex_pair: the operator served "
        f"{counts.operator}, the original ran in {counts.original}"
    )
    saved = json.loads(json.dumps(report.to_dict()))
    assert saved["entries"][0]["original_runs"] == [*entry.original_runs]
    assert saved["calls"] == {
        "test_report.complex_pair": {"operator": counts.operator, "original": counts.original}
    }


def test_calls_are_counted_from_the_patch_on() -> None:
    model, given = Complex(), (noise(1, 8, 6 * LANES), complex_table(1, 8, LANES))
    with patch(model) as first:
        model(*given)
        second = patch(model)
        model(*given)
        counts = [each.calls()["test_report.complex_pair"].operator for each in (first, second)]
        assert counts == [2, 1]
    assert calls_of(complex_pair, lambda: model(*given)) == 1
    assert type(model) is Complex


def test_compiled_code_never_runs_the_original_of_a_complex_product(fresh_compiler: None) -> None:
    torch.set_num_threads(2)
    model, given = Complex(), (noise(1, 2049, 6 * LANES), complex_table(1, 2049, LANES))
    report = patch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(*given)
    assert not calls_of(complex_pair, lambda: compiled(*given))
    assert not report.calls()["test_report.complex_pair"].operator  # compiled calls are not counted
    assert calls_of(complex_pair, lambda: model(*given)) == 1
