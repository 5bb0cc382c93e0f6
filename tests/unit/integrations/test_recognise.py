"""Test `recognise` on the structures of rotary functions of libraries other than transformers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.tolerances import assert_each, assert_same_bits
from tightrope.integrations import _known, patch, recognise, unpatch
from tightrope.integrations._candidate import Candidate
from tightrope.integrations._find import constants_of
from tightrope.integrations._recognise import to_the_bit
from tightrope.integrations._replace import replacement

Function = Callable[..., Any]
F32, B16 = torch.float32, torch.bfloat16


def halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def adjacent(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@functools.cache
def recognised(function: Function, **constants: Any) -> Candidate:
    """The candidate of a function; fails unless its bits can be equalled."""
    recognition = to_the_bit(recognise(function, constants=tuple(constants.items())))
    assert recognition.candidate is not None, recognition.reason
    return recognition.candidate


def refused(function: Function, **constants: Any) -> str:
    """The reason for which a function is refused."""
    recognition = to_the_bit(recognise(function, constants=tuple(constants.items())))
    assert recognition.candidate is None, str(recognition.candidate)
    return recognition.reason


class Calls:
    """Wraps a function and counts its calls."""

    def __init__(self, function: Function) -> None:
        self.function, self.count = function, 0
        self.__signature__ = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def outcomes(
    function: Function, new: Function, xs: dict[str, torch.Tensor], **others: Any
) -> list[list[torch.Tensor]]:
    """Return the results and gradients of a function, and those of its replacement."""
    runs = []
    for each in (function, new):
        leaves = {name: x.detach().requires_grad_() for name, x in xs.items()}
        result = each(**leaves, **others)
        ys = result if isinstance(result, tuple) else (result,)
        weights = [torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype) for y in ys]
        runs.append([*ys, *torch.autograd.grad(ys, list(leaves.values()), weights)])
    return runs


def assert_alike(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    """Assert equal bits and strides."""
    assert_each(assert_same_bits, got, wanted)
    assert [x.stride() for x in got] == [x.stride() for x in wanted]


def original_runs(function: Function, candidate: Candidate, *given: Any, **named: Any) -> Any:
    """Return what a replacement returns for a call; assert that the original ran."""
    original = Calls(function)
    found = replacement(original, [candidate])(*given, **named)
    assert original.count == 1
    return found


def assert_replaced(
    function: Function, candidate: Candidate, xs: dict[str, torch.Tensor], **others: Any
) -> None:
    """Assert equal bits of results and gradients, or near ones if they are rounded once, all by the operator."""
    original = Calls(function)
    runs = outcomes(function, replacement(original, [candidate]), xs, **others)
    assert_alike(*runs)
    _, once = outcomes(function, replacement(original, [candidate], rounding="once"), xs, **others)
    assert original.count == 0
    for got, want in zip(once, runs[0], strict=True):
        near = 2 * torch.finfo(want.dtype).eps
        torch.testing.assert_close(got, want, rtol=near, atol=4 * near)


def test_a_list_of_results_is_refused() -> None:
    def one(x: Any, cos: Any, sin: Any) -> Any:
        return x * cos + halves(x) * sin

    def several(x: Any, cos: Any, sin: Any) -> Any:
        return [one(each, cos, sin) for each in ([x] if isinstance(x, torch.Tensor) else x)]

    def pair(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return [one(q, cos, sin), one(k, cos, sin)]

    recognised(one)
    recognised(lambda q, k, cos, sin: tuple(pair(q, k, cos, sin)))
    assert "tuple" in refused(several)
    assert "tuple" in refused(pair)


# --- angles, and tables that are cast to the dtype of x ---------------------------------------------


def by_angles(t: Any, freqs: Any, adjacent_pairs: bool = False, mscale: float = 1.0) -> Any:
    width = freqs.shape[-1]
    part, rest = t[..., :width], t[..., width:]
    cos, sin = ((each(freqs) * mscale).to(t.dtype) for each in (torch.cos, torch.sin))
    turned = (adjacent if adjacent_pairs else halves)(part)
    return torch.cat((part * cos + turned * sin, rest), -1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("adjacent_pairs", [False, True])
@pytest.mark.parametrize("dtype", [F32, B16])
def test_angles_whose_cosines_are_cast(dtype: torch.dtype, adjacent_pairs: bool) -> None:
    candidate = recognised(by_angles, adjacent_pairs=adjacent_pairs)
    assert candidate.call.form.name == "angles"
    assert candidate.rotation.pairs == ("interleaved" if adjacent_pairs else "half")
    x, angles = torch.randn(2, 3, 7, 24).to(dtype), 9 * torch.rand(2, 1, 7, 16)
    assert_replaced(by_angles, candidate, {"t": x}, freqs=angles, adjacent_pairs=adjacent_pairs)


def of_even_and_odd(x: Any, cos: Any, sin: Any) -> Any:
    u, v = x[..., ::2], x[..., 1::2]
    c, s = cos[..., ::2], sin[..., 1::2]
    return torch.stack((u * c - v * s, u * s + v * c), -1).flatten(-2).to(x.dtype)


def of_cosines_first(x: Any, cos_sin: Any) -> Any:
    cos, sin = cos_sin.chunk(2, -1)
    return x * cos + adjacent(x) * sin


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [of_even_and_odd, of_cosines_first])
@pytest.mark.parametrize("dtype", [F32, B16])
def test_readings_of_tables(function: Function, dtype: torch.dtype) -> None:
    candidate = recognised(function)
    angle = torch.arange(7.0)[:, None] * 0.5 ** torch.arange(8)
    cos, sin = (table.repeat_interleave(2, -1) for table in (angle.cos(), angle.sin()))
    x = torch.randn(2, 3, 7, 16).to(dtype)
    if function is of_even_and_odd:
        assert "even entries of cos, odd ones of sin read" in str(candidate)
        assert_replaced(function, candidate, {"x": x}, cos=cos, sin=sin)
        return
    assert "cos and sin in one table" in str(candidate)
    table = torch.cat((cos, sin), -1)
    if dtype == F32:
        assert_replaced(function, candidate, {"x": x}, cos_sin=table)
    else:  # where bfloat16 promotes, sums of gradients round to bfloat16 and products do not
        original_runs(function, candidate, x.requires_grad_(), table)


# --- functions that slice their tables ----------------------------------------------------------


def last_rows(t: Any, freqs: Any, scale: float = 1) -> Any:
    """Takes tables of rank three; of other tables it slices another dimension than the tokens."""
    freqs = freqs[:, -t.shape[-2] :]
    freqs = freqs[:, None] if t.ndim == 4 and freqs.ndim == 3 else freqs
    return by_angles(t.float(), freqs, True, scale).type(t.dtype)


def test_ranks_at_which_some_layouts_match_nothing_run_the_original() -> None:
    candidate = recognised(last_rows)
    assert candidate.tokens == "suffix"
    assert {key[:2] for key in candidate.shapes} >= {(4, 3), (3, 3)}
    assert (4, 4) not in {key[:2] for key in candidate.shapes}
    x, angles = torch.randn(2, 3, 7, 24), 9 * torch.rand(2, 9, 16)
    assert_replaced(last_rows, candidate, {"t": x}, freqs=angles)
    full = 9 * torch.rand(2, 3, 1, 16)
    new = replacement(last_rows, [candidate])
    assert_same_bits(new(x[:, :, :1], full), last_rows(x[:, :, :1], full))


# --- flags ----------------------------------------------------------------------------------------


def test_a_flag_that_is_passed_as_a_variable_is_tried_with_both_values() -> None:
    def flagged(x: Any, emb: Any, half: bool = False, scale: float = 2.5, mode: str = "all") -> Any:
        sin, cos = emb.chunk(2, -1)
        return x * cos + (halves if half else adjacent)(x) * sin

    def calls(x: Any, emb: Any, half: Any, flag: Any) -> Any:
        flagged(x, emb, half)
        flagged(x, emb, True, scale=flag, mode="some")
        return flagged(x, emb, half=False)

    combinations = constants_of("flagged", flagged, calls.__module__)
    assert set(combinations) == {(), (("half", True),), (("half", True), ("mode", "some"))}
    x, emb = torch.randn(2, 3, 7, 16), torch.randn(7, 32)
    candidates = [recognised(flagged, **dict(each)) for each in ((), (("half", True),))]
    assert [each.rotation.pairs for each in candidates] == ["interleaved", "half"]
    for half, candidate in zip((False, True), candidates):
        # An equal number counts as the default value, also if it is another object.
        assert_replaced(flagged, candidate, {"x": x}, emb=emb, half=half, scale=float("2.5"))
        counted = Calls(flagged)
        replacement(counted, [candidate])(x, emb, half, 2.0)
        replacement(counted, [candidate])(x, emb, int(half))
        assert counted.count == 2


# --- tokens in the first dimension ------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_tables_of_tokens_in_the_first_dimension(dtype: torch.dtype, contiguous: bool) -> None:
    candidate = recognised(by_angles)
    assert "s11d" in candidate.ones
    x = torch.randn(7, 2, 3, 24).to(dtype)
    if not contiguous:
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    angles = 9 * torch.rand(7, 1, 1, 16)
    assert_replaced(by_angles, candidate, {"t": x}, freqs=angles)
    assert_replaced(by_angles, candidate, {"t": x[:, :1]}, freqs=angles)
    assert_replaced(by_angles, candidate, {"t": x[:, :, :1]}, freqs=angles)


def test_functions_that_use_other_rows_with_tokens_in_the_first_dimension() -> None:
    def rows(x: Any, cos: Any, sin: Any) -> Any:
        if cos.dim() == 4 and cos.shape[1:3] == (1, 1):
            cos, sin = cos.flip(0), sin.flip(0)
        return x * cos + halves(x) * sin

    candidate = recognised(rows)
    assert "s11d" not in candidate.ones
    x, angle = torch.randn(7, 2, 3, 16), torch.rand(7, 1, 1, 16)
    new = replacement(rows, [candidate])
    assert_same_bits(new(x, angle.cos(), angle.sin()), rows(x, angle.cos(), angle.sin()))


# --- a tuple of sines and cosines -------------------------------------------------------------------


def test_a_tuple_of_sines_and_cosines() -> None:
    def turn(q: Any, k: Any, rope: Any) -> Any:
        sin, cos = rope
        wide = [each.to(sin.dtype) for each in (q, k)]
        rows = sin.shape[-2]
        ys = []
        for x, each in zip((q, k), wide):
            if each.shape[-2] < rows:
                raise ValueError("too few tokens")
            front, back = each.split([each.shape[-2] - rows, rows], -2)
            ys.append(torch.cat((front, back * cos + halves(back) * sin), -2).to(x.dtype))
        return tuple(ys)

    candidate = recognised(turn)
    assert candidate.call.form.name == "a tuple of sines and cosines"
    assert candidate.tokens == "prefix"
    q, k = torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16)
    angle = torch.rand(7, 16)
    assert_replaced(turn, candidate, {"q": q, "k": k}, rope=(angle.sin(), angle.cos()))


# --- 2 x 2 matrices: strides, dtypes, roundings -------------------------------------------------


def by_matrices(q: Any, k: Any, freqs_cis: Any) -> Any:
    """Sums of products in which the matrices come first, so that they decide the strides of results."""

    def one(x: Any) -> Any:
        pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
        y = freqs_cis[..., 0] * pairs[..., 0] + freqs_cis[..., 1] * pairs[..., 1]
        return y.reshape(x.shape).type_as(x)

    return one(q), one(k)


def matrices(angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))


@pytest.mark.parametrize("dtype", [F32, B16])
def test_results_whose_strides_follow_the_tables(dtype: torch.dtype) -> None:
    candidate = recognised(by_matrices)
    table = matrices(9 * torch.rand(2, 1, 7, 8))
    q, k = torch.randn(2, 3, 7, 16).to(dtype), torch.randn(2, 4, 7, 16).to(dtype)
    transposed = {
        n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in (("q", q), ("k", k))
    }
    assert_replaced(by_matrices, candidate, {"q": q, "k": k}, freqs_cis=table)
    assert_replaced(by_matrices, candidate, transposed, freqs_cis=table)
    # With tokens outermost, the strides of the original's results are neither.
    outer = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k)]
    original_runs(by_matrices, candidate, *outer, table)


def test_matrices_need_not_be_rotations() -> None:
    q, k, table = torch.randn(2, 3, 7, 16), torch.randn(2, 4, 7, 16), torch.randn(7, 8, 2, 2)
    assert_replaced(by_matrices, recognised(by_matrices), {"q": q, "k": k}, freqs_cis=table)
    original = Calls(by_matrices)
    with pytest.raises((RuntimeError, IndexError)):
        replacement(original, [recognised(by_matrices)])(q, k, table[..., :1])
    assert original.count == 1


def to_bfloat16(x: Any, rope: Any) -> Any:
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (rope * pairs).sum(-1).reshape(x.shape).to(B16)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F32, B16])
def test_results_of_one_dtype(dtype: torch.dtype) -> None:
    candidate = recognised(to_bfloat16)
    assert candidate.dtype == B16
    x, table = torch.randn(2, 3, 7, 16).to(dtype), matrices(9 * torch.rand(7, 8))
    assert_replaced(to_bfloat16, candidate, {"x": x}, rope=table)
    # Results of 16 bits show nothing of the arithmetic with a float64 x.
    original_runs(to_bfloat16, candidate, x.double(), table)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("result", [F32, B16])
def test_a_multiply_add_that_rounds_once_is_not_to_the_bit(result: torch.dtype) -> None:
    def fused(x: Any, rope: Any) -> Any:
        u, v = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        ys = [torch.addcmul(rope[..., i, 0] * u, rope[..., i, 1], v) for i in range(2)]
        return torch.stack(ys, -1).flatten(-2).to(result if result == B16 else x.dtype)

    a, b, c = torch.randn(3, 4096)
    if torch.equal(torch.addcmul(a, b, c), a + b * c):
        pytest.skip("torch does not fuse multiply-adds on this processor")
    assert "not to the bit" in refused(fused)


# --- tables with one row for each token and head --------------------------------------------------


def per_head(x: Any, freqs_cos: Any, freqs_sin: Any) -> Any:
    u, v = x[..., ::2].float(), x[..., 1::2].float()
    ys = u * freqs_cos - v * freqs_sin, u * freqs_sin + v * freqs_cos
    return torch.stack([y.to(x.dtype) for y in ys], -1).flatten(-2)


def test_tables_with_a_row_for_each_head() -> None:
    candidate = recognised(per_head)
    x, angles = torch.randn(2, 7, 3, 16), 9 * torch.rand(7, 3, 8)
    tables = {"freqs_cos": angles.cos(), "freqs_sin": angles.sin()}
    assert_replaced(per_head, candidate, {"x": x}, **tables)
    # Gradients of learned tables sum over the batch in another order.
    learned = {name: table.clone().requires_grad_() for name, table in tables.items()}
    original_runs(per_head, candidate, x, **learned)


def test_channels_before_tokens() -> None:
    def turn(hidden: Any, freqs: Any) -> Any:
        z = torch.view_as_complex(hidden.permute(0, 1, 3, 2).float().unflatten(3, (-1, 2)))
        return torch.view_as_real(z * freqs).flatten(3, 4).permute(0, 1, 3, 2).type_as(hidden)

    candidate = recognised(turn)
    assert "(batch, heads, dim, seq)" in str(candidate)
    angles = 9 * torch.rand(1, 1, 7, 16)
    freqs = torch.polar(torch.ones_like(angles), angles)
    for dtype in (F32, B16):
        x = torch.randn(2, 3, 7, 32).to(dtype).mT
        assert_replaced(turn, candidate, {"hidden": x}, freqs=freqs)


# --- tables of the axes of a grid ---------------------------------------------------------------


def on_grids(x: Any, grid_sizes: Any, freqs: Any) -> Any:
    """Rotate each sequence by the tables of its grid, in float64; tokens after the grid pass through."""
    heads, pairs = x.size(2), x.size(3) // 2
    axes = freqs.split([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3], dim=1)
    ys = []
    for row, (t, h, w) in enumerate(grid_sizes.tolist()):
        count = t * h * w
        z = torch.view_as_complex(x[row, :count].double().reshape(count, heads, -1, 2))
        views = (t, 1, 1, -1), (1, h, 1, -1), (1, 1, w, -1)
        table = [a[:n].view(v).expand(t, h, w, -1) for a, n, v in zip(axes, (t, h, w), views)]
        y = torch.view_as_real(z * torch.cat(table, -1).reshape(count, 1, -1)).flatten(2)
        ys.append(torch.cat([y, x[row, count:]]))
    return torch.stack(ys).float()


@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("grids", [[(2, 3, 4)], [(2, 3, 4), (2, 3, 4)], [(2, 3, 4), (4, 1, 6)]])
def test_tables_of_the_axes_of_a_grid(
    dtype: torch.dtype, grids: list[tuple[int, int, int]]
) -> None:
    candidate = recognised(on_grids)
    assert "grids" in str(candidate)
    angles = torch.arange(9.0, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(8)
    freqs = torch.polar(torch.ones_like(angles), angles)
    x, sizes = torch.randn(len(grids), 24, 3, 16).to(dtype), torch.tensor(grids)
    assert_replaced(on_grids, candidate, {"x": x}, grid_sizes=sizes, freqs=freqs)
    # Tokens without a place in the grid are the original's.
    longer = torch.cat((x, x[:, :1]), 1)
    found = original_runs(on_grids, candidate, longer, sizes, freqs)
    assert_same_bits(found, on_grids(longer, sizes, freqs))


def test_a_grid_beyond_the_table_is_the_originals_error() -> None:
    new = replacement(on_grids, [recognised(on_grids)])
    with pytest.raises(RuntimeError, match="shape"):
        new(torch.randn(1, 4, 3, 16), torch.tensor([[1, 4, 1]]), torch.randn(1, 8) + 0j)


# --- functions that make their tables from positions ------------------------------------------------


def of_positions(x: Any, pos: Any) -> Any:
    """Adjacent pairs, by tables that tile: each pair has two angles."""
    pairs = x.shape[-1] // 2
    omega = 1.0 / 10000 ** (torch.arange(pairs, dtype=x.dtype, device=x.device) / pairs)
    angles = pos.unsqueeze(-1) * omega
    return x * angles.cos().repeat(1, 1, 1, 2) + adjacent(x) * angles.sin().repeat(1, 1, 1, 2)


def of_positions_by_halves(t: Any, position_ids: Any) -> Any:
    """Halves; heads after tokens; arithmetic in the dtype of x."""
    omega = 100.0 ** -torch.linspace(0, 1, t.shape[-1] // 2)
    angles = (position_ids[:, None] * torch.cat((omega, omega)))[:, None]
    return t * angles.cos().to(t.dtype) + halves(t) * angles.sin().to(t.dtype)


@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("function", [of_positions, of_positions_by_halves])
def test_tables_that_a_function_makes_are_read_off_its_results(
    function: Function, dtype: torch.dtype
) -> None:
    candidate = recognised(function)
    behind = function is of_positions_by_halves
    assert candidate.rotation.pairs == ("half" if behind else "interleaved")
    name, positions = list(inspect.signature(function).parameters)
    x, ids = torch.randn(2, 6, 5, 16).to(dtype), torch.randint(0, 999, (6 if behind else 5,))
    original = Calls(function)
    runs = outcomes(function, replacement(original, [candidate]), {name: x}, **{positions: ids})
    assert_alike(*runs)
    assert original.count == 2  # once for ones in the first channels of pairs, once for the others


def test_positions_of_each_row_go_to_the_original() -> None:
    candidate = recognised(of_positions)
    x, ids = torch.randn(2, 3, 5, 16), torch.randint(0, 99, (2, 3, 5))
    found = original_runs(of_positions, candidate, x, ids)
    assert_same_bits(found, of_positions(x, ids))


def test_a_function_of_positions_that_raises_for_some_inputs_does_not_raise_here() -> None:
    def choosy(x: Any, pos: Any, smallest: int, dtypes: tuple[Any, ...]) -> Any:
        if x.shape[-2] < smallest or x.dtype not in dtypes:
            raise AssertionError("not for these")
        return of_positions(x, pos)

    every = F32, B16, torch.float16, torch.float64
    assert recognised(lambda x, pos: choosy(x, pos, 1, every))
    assert refused(lambda x, pos: choosy(x, pos, 2, every))
    assert refused(lambda x, pos: choosy(x, pos, 0, (F32,)))


# --- functions that resemble these ----------------------------------------------------------------


def of_heads(t: Any, freqs: Any) -> Any:
    if freqs.ndim != 4:
        raise ValueError("tables of rank four are needed")
    return by_angles(t, freqs[:, -t.shape[-2] :])


REFUSED: dict[str, Function] = {
    "twice the angles for sines": lambda t, freqs: t * freqs.cos() + halves(t) * (2 * freqs).sin(),
    "rounded angles": lambda t, freqs: by_angles(t, freqs.to(B16).to(freqs.dtype)),
    "slices of heads": of_heads,
    "one row of tables": lambda t, freqs: by_angles(t, freqs[..., :1, :]),
    "sines twice": lambda q, k, rope: tuple(x * rope[0] + halves(x) * rope[0] for x in (q, k)),
    "axes swapped": lambda x, grid_sizes, freqs: on_grids(x, grid_sizes[:, [0, 2, 1]], freqs),
    "a sum": lambda x, pos: of_positions(x, pos) + 1,
    "squares": lambda x, pos: of_positions(x.square(), pos),
    "heads added up": lambda x, pos: of_positions(x + x.roll(1, 1), pos),
    "a random factor": lambda x, pos: of_positions(x, pos) * torch.rand(()),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_are_refused(name: str) -> None:
    some = "at some shapes or widths and none at others"
    reasons = {"slices of heads": some, "one row of tables": some}
    assert reasons.get(name, "it matches no known rotation") in refused(REFUSED[name])


# --- signs ----------------------------------------------------------------------------------------


BY_HALVES = "rotate_half on all channels, cos/sin of"


def by_opposite_angles(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as nanochat does, (batch, seq, heads, dim) by the negative angles."""
    u, v = x.chunk(2, -1)
    return torch.cat((u * cos + v * sin, u * (-sin) + v * cos), -1).to(x.dtype)


def with_signs_in_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by sines of which the first half is negated."""
    u, v = x.chunk(2, -1)
    return x * cos + torch.cat((v, u), -1) * sin


def with_signs_in_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as speechbrain does, by sines of which every second is negated."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return cos * x + sin * swapped


@pytest.mark.parametrize(
    ("function", "words", "width"),
    [
        (by_opposite_angles, f"{BY_HALVES} half width, negative angles", 8),
        (with_signs_in_halves, f"{BY_HALVES} full width, sines of u negated", 16),
        (
            with_signs_in_pairs,
            "adjacent pairs (GPT-J style) on all channels, cos/sin of full width, sines of u negated",
            16,
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_of_the_sines(function: Any, words: str, width: int, dtype: torch.dtype) -> None:
    """The tables are noise: the two entries of a pair need not be equal."""
    recognition = recognise(function)
    assert recognition.candidate is not None, recognition.reason
    assert str(recognition.candidate).startswith(words)
    assert str(recognition.candidate).endswith("to the bit")
    tables = zip(list(inspect.signature(function).parameters)[1:], torch.randn(2, 1, 5, 1, width))
    given = {name: table.to(dtype) for name, table in tables}
    x = torch.randn(2, 5, 3, 16).to(dtype)
    assert_replaced(function, recognition.candidate, {"x": x}, **given)


# --- while a model is loaded ----------------------------------------------------------------------


def turned_by_angles(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate by angles, whose cosines and sines in 16 bits lie beside the unit circle."""
    u, v = t[..., ::2], t[..., 1::2]
    return t * freqs.cos() + torch.stack((-v, u), -1).flatten(-2) * freqs.sin()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_default_dtype_and_device(dtype: torch.dtype) -> None:
    """Inside `from_pretrained` the default dtype is that of the model, and the device may be meta."""
    _known._entries.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.inference_mode():
            recognition = recognise(turned_by_angles)
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert recognition == recognise(turned_by_angles)
    assert recognition


# --- methods that call methods --------------------------------------------------------------------


class OfMethods(torch.nn.Module):
    """Rotates as OLMo 1 and LLaDA do: by a method that calls another method of its class."""

    def rotate_half(self, x: torch.Tensor) -> torch.Tensor:
        u, v = x.chunk(2, -1)
        return torch.cat((-v, u), -1)

    def apply_rotary_pos_emb(
        self, pos_sin: torch.Tensor, pos_cos: torch.Tensor, t: torch.Tensor
    ) -> torch.Tensor:
        return ((t * pos_cos) + (self.rotate_half(t) * pos_sin)).to(t.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.rand(x.shape[-2], 8, generator=torch.Generator().manual_seed(0)).repeat(1, 2)
        return self.apply_rotary_pos_emb(angle.sin()[None, None], angle.cos()[None, None], x)


class DefinedAgain(OfMethods):
    def rotate_half(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WithState(OfMethods):
    sign = 1.0

    def rotate_half(self, x: torch.Tensor) -> torch.Tensor:
        return self.sign * super().rotate_half(x)


class ByStatic(OfMethods):
    @staticmethod
    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        u, v = x.chunk(2, -1)
        return torch.cat((-v, u), -1)


class ByTwo(OfMethods):
    def halves(self, x: torch.Tensor) -> Any:
        return x.chunk(2, -1)

    def rotate_half(self, x: torch.Tensor) -> torch.Tensor:
        u, v = self.halves(x)
        return torch.cat((-v, u), -1)

    def apply_rotary_pos_emb(
        self, pos_sin: torch.Tensor, pos_cos: torch.Tensor, t: torch.Tensor
    ) -> torch.Tensor:
        return ((t * pos_cos) + (self.rotate_half(t) * pos_sin)).to(t.dtype)


class Counting(OfMethods):
    calls = 0

    def rotate_half(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return super().rotate_half(x)


X4 = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("classes", "served"),
    [
        ([OfMethods], True),
        ([ByTwo], True),
        ([DefinedAgain], False),
        ([WithState], False),
        ([ByStatic], False),  # which a subclass has, so it is not the method that was tried
        ([Counting], False),
        ([OfMethods, DefinedAgain], False),
    ],
)
def test_methods_that_call_methods_of_their_class(classes: Any, served: bool) -> None:
    model = torch.nn.Sequential(*(cls() for cls in classes))
    want = model(X4)
    report = patch(model)
    assert bool(report.replaced) == served, str(report)
    assert torch.equal(model(X4), want)
    unpatch(model)
    assert torch.equal(model(X4), want)


def test_an_object_whose_method_is_replaced_runs_the_original() -> None:
    model: Any = OfMethods()
    model.rotate_half = lambda x: x
    want = model(X4)
    assert not patch(model).replaced
    assert torch.equal(model(X4), want)
    model = OfMethods()
    assert patch(model).replaced
    model.rotate_half = lambda x: x
    assert torch.equal(model(X4), want)


def test_a_class_whose_method_is_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = OfMethods()
    assert patch(model).replaced
    monkeypatch.setattr(OfMethods, "rotate_half", lambda _self, x: x)
    with pytest.raises(RuntimeError, match="rotate_half was replaced after patch"):
        model(X4)
