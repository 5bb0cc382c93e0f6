"""Test `recognise`: every known rotation is recognised, any other function is left."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.tolerances import assert_each, assert_same_bits, value
from tightrope.integrations._replace import replacement
from tightrope.integrations.transformers import recognise

Function = Callable[..., Any]


def half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def pairwise(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def usual(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


# --- every rotation, in plain code -----------------------------------------------------


def written(pairs: str, out: str, reading: str, last: bool, sign: int) -> Function:
    """Return a rotation written with index arithmetic, which shares no code with the library."""

    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        count = width if reading == "half" else width // 2
        if 2 * count > x.shape[-1]:
            raise ValueError("the tables are wider than x")
        start = x.shape[-1] - 2 * count if last else 0
        y = x.clone()
        for k in range(count):
            u, v = (2 * k, 2 * k + 1) if pairs == "interleaved" else (k, k + count)
            to_u, to_v = (2 * k, 2 * k + 1) if out == "interleaved" else (k, k + count)
            at_u, at_v = {
                "cat": (k, k + count),
                "repeat": (2 * k, 2 * k + 1),
                "first": (k, k),
                "second": (k + count, k + count),
                "even": (2 * k, 2 * k),
                "odd": (2 * k + 1, 2 * k + 1),
                "half": (k, k),
            }[reading]
            a, b = x[..., start + u], x[..., start + v]
            y[..., start + to_u] = a * cos[..., at_u] - sign * b * sin[..., at_u]
            y[..., start + to_v] = b * cos[..., at_v] + sign * a * sin[..., at_v]
        return y

    return function


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairs", "out", "reading", "last", "sign"),
    [
        ("half", "half", "cat", False, 1),
        ("interleaved", "interleaved", "repeat", True, -1),
        ("half", "interleaved", "first", True, 1),
        ("interleaved", "half", "second", False, -1),
        ("interleaved", "half", "even", True, 1),
        ("half", "interleaved", "odd", False, -1),
        ("interleaved", "interleaved", "half", False, 1),
    ],
)
def test_every_rotation_is_distinguished_from_the_others(
    pairs: str, out: str, reading: str, last: bool, sign: int
) -> None:
    function = written(pairs, out, reading, last, sign)
    recognition = recognise(function)
    assert recognition.candidate is not None, recognition.reason
    rotation = recognition.candidate.rotation
    assert (rotation.pairs, rotation.out, rotation.reading) == (pairs, out, reading)
    assert (rotation.slice, rotation.sign) == ("last" if last else "first", sign)
    # The replacement equals the function, whether or not the two table entries of a pair are equal.
    generator = torch.Generator().manual_seed(0)
    new = replacement(function, [recognition.candidate])
    for table in tables(reading, generator):
        x = torch.randn(2, 3, 5, 16, generator=generator, requires_grad=True)
        weight = torch.randn(2, 3, 5, 16, generator=generator)
        want, got = function(x, *table), new(x, *table)
        assert_near(got, want)
        (g,) = torch.autograd.grad(got, x, weight)
        (w,) = torch.autograd.grad(want, x, weight)
        assert_near(g, w)


def tables(reading: str, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    single = torch.randn(2, 1, 1, 5, 4, generator=generator)
    if reading in ("cat", "first", "second"):
        double = torch.cat((single, single), -1)
    elif reading == "half":
        double = single
    else:
        double = single.repeat_interleave(2, -1)
    other = torch.randn(double.shape, generator=generator)
    return [(double[0], double[1]), (other[0], other[1])]


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    off = (got - want).abs().max() / want.abs().max()
    assert off <= value("patched outputs"), off


# --- functions that are no known rotation ------------------------------------------------------------


def with_one_row_for_all(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return usual(q, k, cos[:1], sin[:1], unsqueeze_dim)


def with_k_the_other_way(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return usual(q, k, cos, sin, unsqueeze_dim)[0], usual(q, k, cos, -sin, unsqueeze_dim)[1]


def with_a_scale(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    a, b = usual(q, k, cos, sin, unsqueeze_dim)
    return 1.001 * a, b


def with_detached_keys(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return usual(q, k.detach(), cos, sin, unsqueeze_dim)


def with_a_wrong_gradient(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    a, b = usual(q, k, cos, sin, unsqueeze_dim)
    return a + (q - q.detach()), b


def with_noise(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    a, b = usual(q, k, cos, sin, unsqueeze_dim)
    return a * (1 + 1e-7 * torch.rand(a.shape)), b


def in_place(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    a, b = usual(q.detach(), k.detach(), cos, sin, unsqueeze_dim)
    with torch.no_grad():
        return q.copy_(a), k.copy_(b)


def ignoring_unsqueeze_dim(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return usual(q, k, cos, sin, 2)


def half_precision_results(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    a, b = usual(q, k, cos, sin, unsqueeze_dim)
    return (a.float(), b.float()) if q.dtype == torch.float16 else (a, b)


NO_MATCH = "it matches no known rotation"
WRONG: dict[Function, str] = {
    with_one_row_for_all: "at some shapes or widths and none at others",
    with_k_the_other_way: NO_MATCH,
    with_a_scale: NO_MATCH,
    with_detached_keys: "gradients",
    with_a_wrong_gradient: "gradients",
    with_noise: "different results",
    in_place: "writes to its arguments",
    half_precision_results: "dtype",
}


def test_ignoring_unsqueeze_dim_is_known_only_where_it_is_right() -> None:
    candidate = recognise(ignoring_unsqueeze_dim).candidate
    assert candidate is not None
    assert {shape[2] for shape in candidate.shapes} <= {2, -2}
    new = replacement(ignoring_unsqueeze_dim, [candidate])
    q, table = torch.randn(2, 4, 4, 16), torch.randn(2, 4, 8).repeat(1, 1, 2)
    found, want = new(q, q, table, table), ignoring_unsqueeze_dim(q, q, table, table)
    assert_each(assert_same_bits, found, want)


def any_number(*xs: Any, cos: Any, sin: Any) -> Any:
    return [x * cos + half(x) * sin for x in xs]


def never(q: Any, cos: Any, sin: Any) -> Any:
    raise RuntimeError(f"not {q}, {cos}, {sin}")


def text(q: Any, cos: Any, sin: Any) -> str:
    return f"{q}, {cos}, {sin}"


def axis_by_shape(q: Any, cos: Any, sin: Any) -> Any:
    axis = 2 if q.shape[1] == cos.shape[1] else 1
    return q * cos.unsqueeze(axis) + half(q) * sin.unsqueeze(axis)


def symmetric(q: Any, a_cos: Any, a_sin: Any) -> Any:
    """Use only the sum of both tables, so which one is the cosine is ambiguous."""
    both = a_cos + a_sin
    return q * both + half(q) * both


def nothing(x: Any) -> Any:
    return x


OTHERS: dict[Function, str] = {
    axis_by_shape: "the axis at which it unsqueezes cos/sin is ambiguous",
    nothing: "are not those of a rotation by given cos/sin",
    any_number: "are not those of a rotation by given cos/sin",
    never: "does not run",
    text: NO_MATCH,
    symmetric: NO_MATCH,
}


@pytest.mark.parametrize(
    ("function", "reason"),
    {**WRONG, **OTHERS}.items(),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_is_something_else_is_left_alone(function: Function, reason: str) -> None:
    recognition = recognise(function)
    assert recognition.candidate is None, str(recognition.candidate)
    assert reason in recognition.reason


# --- forms ----------------------------------------------------------------------------------------


def test_sines_before_cosines_are_found_by_number() -> None:
    def misnamed(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        return x * sin + half(x) * cos  # the parameter named sin is the cosine

    recognition = recognise(misnamed)
    assert recognition.candidate is not None
    assert recognition.candidate.call.tables == ("sin", "cos")


def test_random_numbers_of_the_caller_stay() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    recognise(usual)
    assert_same_bits(torch.rand(4), want)


# --- the replacement ------------------------------------------------------------------------------


def replaced(function: Function = usual) -> Function:
    recognition = recognise(function)
    assert recognition.candidate is not None, recognition.reason
    return replacement(function, [recognition.candidate])


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, h, 16, generator=generator).to(dtype).transpose(1, 2) for h in (4, 2))
    angle = torch.rand(2, 5, 8, generator=generator).repeat(1, 1, 2)
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)


def test_signature_stays() -> None:
    new = replaced()
    assert inspect.signature(new) == inspect.signature(usual)
    assert new.__name__ == "usual"
    q, k, cos, sin = operands()
    want = new(q, k, cos, sin)
    for got in (new(k=k, q=q, sin=sin, cos=cos), new(q, k, cos, sin=sin, unsqueeze_dim=1)):
        assert_each(assert_same_bits, got, want)


@pytest.mark.parametrize("arguments", [(), (1, 2), (1, 2, 3, 4, 5, 6)])
def test_wrong_calls_fail_as_before(arguments: tuple[Any, ...]) -> None:
    for call in (lambda: replaced()(*arguments), lambda: replaced()(*operands(), wrong=1)):
        with pytest.raises(TypeError, match="argument"):
            call()


def test_both_entries_of_a_pair_are_read() -> None:
    q, k, cos, sin = operands()
    cos = cos + torch.arange(16) * 0.1
    assert_each(assert_same_bits, replaced()(q, k, cos, sin), usual(q, k, cos, sin))


def test_keys_of_another_dtype_go_to_the_original() -> None:
    q, k, cos, sin = operands(torch.bfloat16)
    assert_each(assert_same_bits, replaced()(q, k.float(), cos, sin), usual(q, k.float(), cos, sin))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_edge_sizes(tokens: int, heads: int) -> None:
    q, table = torch.randn(2, heads, tokens, 16), torch.randn(1, tokens, 8).repeat(1, 1, 2)
    for got, want in zip(replaced()(q, q, table, table), usual(q, q, table, table), strict=True):
        assert got.shape == want.shape
        if got.numel():
            assert_near(got, want)


def in_two_dimensions(q: Any, k: Any, cos: Any, sin: Any, num_k_exclude_rope: int = 0) -> Any:
    tokens = k.shape[-2] - num_k_exclude_rope
    turned = k[..., :tokens, :] * cos + pairwise(k[..., :tokens, :]) * sin
    return q * cos + pairwise(q) * sin, torch.cat((turned, k[..., tokens:, :]), -2)


def seen_from_the_tokens(query: Any, key: Any, freqs_ci: Any) -> Any:
    def turn(x: Any) -> Any:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return (
            torch.view_as_real(z * freqs_ci.view(1, z.shape[1], 1, z.shape[3]))
            .flatten(3)
            .type_as(x)
        )

    return turn(query), turn(key)


def served(function: Function, learned: bool = False, **arguments: Any) -> bool:
    """Return True if a call does not run the original; check bits, contiguity and gradients against it."""
    asked = []

    @functools.wraps(function)
    def original(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return function(*args, **kwargs)

    recognition = recognise(function)
    assert recognition.candidate is not None, recognition.reason
    rotated = recognition.candidate.call.rotated
    leaves = [v.requires_grad_() for n, v in arguments.items() if learned or n in rotated]
    got, want = replacement(original, [recognition.candidate])(**arguments), function(**arguments)
    weights = [torch.randn_like(y) for y in want]
    assert_each(torch.equal, got, want)
    assert [y.is_contiguous() for y in got] == [y.is_contiguous() for y in want]
    grads = (torch.autograd.grad(ys, leaves, weights) for ys in (got, want))
    assert_each(torch.equal, *grads)
    return not asked


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[1]))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 3, 5])
@pytest.mark.parametrize("tokens", [1, 5])
def test_one_row_of_tables_for_all_of_four_dimensions(batch: int, heads: int, tokens: int) -> None:
    q, k = normal(batch, heads, tokens, 16), normal(batch, 1, tokens, 16)
    cos, sin = (normal(tokens, 8).roll(n, 1).repeat_interleave(2, -1)[None] for n in (0, 1))
    assert served(in_two_dimensions, q=q, k=k, cos=cos, sin=sin)


@pytest.mark.parametrize("batch", [2, 3])
def test_tables_of_three_dimensions_with_a_row_for_each_head(batch: int) -> None:
    q, table = normal(batch, 3, 5, 16), normal(3, 5, 8).repeat_interleave(2, -1)
    assert served(in_two_dimensions, q=q, k=q.clone(), cos=table, sin=table.flip(1))


def repeated(q: Any, k: Any, cos: Any, sin: Any, num_k_exclude_rope: int = 0) -> Any:
    end = k.shape[-2] - num_k_exclude_rope
    longer = [table.repeat(1, 1, end // q.shape[-2], 1) for table in (cos, sin)]
    turned = in_two_dimensions(k[..., :end, :], k[..., :end, :], *longer)[1]
    whole = torch.cat((turned, k[..., end:, :]), -2)
    return in_two_dimensions(q, q, cos, sin)[0], whole


@pytest.mark.parametrize("excluded", [0, 2])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_keys_that_are_not_all_rotated_and_longer_ones(excluded: int, times: int) -> None:
    q, k = normal(1, 3, 5, 16), normal(1, 3, 5 * times + excluded, 16)
    cos, sin = (normal(1, 5, 8).roll(n, 1).repeat_interleave(2, -1) for n in (0, 1))
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin, "num_k_exclude_rope": excluded}
    assert served(repeated, **arguments)
    if times == 1:
        assert served(in_two_dimensions, **arguments)


def test_keys_that_no_whole_number_of_tables_fits_go_to_the_original() -> None:
    def cut(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        longer = [table.repeat(1, 1, 9, 1)[..., : k.shape[-2], :] for table in (cos, sin)]
        return in_two_dimensions(q, q, cos, sin)[0], in_two_dimensions(k, k, *longer)[1]

    table = normal(1, 5, 8).repeat_interleave(2, -1)
    tables = {"cos": table, "sin": table.flip(1)}
    assert served(cut, q=normal(1, 3, 5, 16), k=normal(1, 3, 10, 16), **tables)
    assert not served(cut, q=normal(1, 3, 5, 16), k=normal(1, 3, 12, 16), **tables)


@pytest.mark.parametrize(("heads", "tokens"), [(3, 5), (5, 5), (4, 1)])
def test_complex_tables_with_one_for_the_heads(heads: int, tokens: int) -> None:
    q, angle = normal(2, tokens, heads, 32), normal(tokens, 1, 16)  # whole vectors also of AVX-512
    table = torch.polar(torch.ones_like(angle), angle)
    assert served(seen_from_the_tokens, query=q, key=q.flip(0), freqs_ci=table)


def test_what_a_view_makes_of_other_tables_goes_to_the_original() -> None:
    # As many tokens as heads: broadcasting could confuse the two dimensions.
    q, angle = normal(2, 5, 5, 32), normal(1, 5, 16)
    table = torch.polar(torch.ones_like(angle), angle)
    assert not served(seen_from_the_tokens, query=q, key=q.flip(0), freqs_ci=table)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_tables_of_two_dimensions_with_unsqueeze_dim_zero(batch: int, heads: int) -> None:
    q, k = normal(batch, heads, 5, 16), normal(batch, 1, 5, 16)
    cos, sin = (normal(5, 8).roll(n, 1).repeat(1, 2) for n in (0, 1))
    assert served(usual, q=q, k=k, cos=cos, sin=sin, unsqueeze_dim=0)


# --- bits that depend on more than the rounding ------------------------------------------


def transposed(*shape: int) -> torch.Tensor:
    rows, heads, tokens, channels = shape
    return normal(rows, tokens, heads, channels).transpose(1, 2)


def passing(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Rotate the first channels; for transposed x, y is contiguous only if some pass through."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        head, rest = x[..., :width], x[..., width:]
        u, v = head.chunk(2, -1)
        y = head * cos[:, None] + torch.cat((-v, u), -1) * sin[:, None]
        return torch.cat((y, rest), -1) if width < x.shape[-1] else y

    return turn(q), turn(k)


@pytest.mark.parametrize("width", [8, 16])
def test_strides_that_depend_on_the_width_are_those_of_the_original(width: int) -> None:
    q, k = transposed(2, 4, 9, 16), transposed(2, 2, 9, 16)
    cos, sin = normal(2, 9, width), normal(2, 9, width)
    assert not served(passing, q=q, k=k, cos=cos, sin=sin)
    assert not served(passing, learned=True, q=q, k=k, cos=cos, sin=sin)


def test_learned_tables_that_rows_share() -> None:
    q, k = transposed(4, 4, 9, 16), transposed(4, 2, 9, 16)
    cos, sin = normal(1, 9, 16), normal(1, 9, 16)
    assert not served(usual, learned=True, q=q, k=k, cos=cos, sin=sin)


def _in_float64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    u, v = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-v, u), -1) * sin).to(x.dtype)


def _tables_cast_to_x(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    u, v = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-v, u), -1) * sin.to(x.dtype)


def _by_angles(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return _tables_cast_to_x(x, freqs.cos(), freqs.sin())


@pytest.mark.parametrize(
    ("function", "cast"),
    [(_in_float64, "float64"), (_tables_cast_to_x, "tables"), (_by_angles, "tables")],
)
def test_casts_of_arguments_are_found(function: Any, cast: str) -> None:
    candidate = recognise(function).candidate
    assert candidate is not None
    bits = candidate.bits_of(torch.bfloat16, torch.float32, True)
    assert bits is not None
    assert bits.cast == cast
