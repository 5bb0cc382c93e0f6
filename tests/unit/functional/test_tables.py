"""Rotation by tables of cosines and sines: `apply_rotary_pos_emb` and its in-place form."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.support.helpers import noise, refused
from tests.support.tolerances import assert_near
from tightrope.backends import why_not
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    build_freqs_cis,
    rotary_apply,
    rotary_embedding,
)
from tightrope.ops import schema

HAS_CPU = why_not()["cpu"] is None
BACKENDS = ["reference", None]
FORMS = ("cat", "repeat", "half")


def written(values: torch.Tensor, form: str, junk: float = 0.0) -> torch.Tensor:
    """Convert one value per pair to a table of this format; duplicates differ by `junk`."""
    if form == "half":
        return values
    if form == "cat":
        return torch.cat((values, values + junk), -1)
    return torch.stack((values, values + junk), -1).flatten(-2)


def turned(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate by the formula in float64; c and s broadcast to the pairs of x."""
    pairs = c.shape[-1]
    x, c, s = x.double().clone(), c.double(), s.double()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    u, v = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = u * c - v * s, v * c + u * s
    return x


# name: q, k, unsqueeze_dim, shape of the values, shape that broadcasts to q
SHAPES = {
    "bhsd, (S, W)": ((2, 4, 5, 12), (2, 2, 5, 12), 1, (5,), (1, 1, 5)),
    "bhsd, (B, S, W)": ((2, 4, 5, 12), (2, 2, 5, 12), 1, (2, 5), (2, 1, 5)),
    "bhsd, (1, S, W)": ((2, 4, 5, 12), (2, 2, 5, 12), 1, (1, 5), (1, 1, 5)),
    "bhsd, 4-D": ((2, 4, 5, 12), (2, 4, 5, 12), 1, (2, 4, 5), (2, 4, 5)),
    "bhsd, 4-D of one head": ((2, 4, 5, 12), (2, 2, 5, 12), 1, (1, 1, 5), (1, 1, 5)),
    "bshd, (S, W)": ((2, 5, 4, 12), (2, 5, 2, 12), 2, (5,), (1, 5, 1)),
    "bshd, (B, S, W)": ((2, 5, 4, 12), (2, 5, 2, 12), -2, (2, 5), (2, 5, 1)),
    "bshd, 4-D": ((2, 5, 4, 12), (2, 5, 4, 12), 2, (2, 5, 4), (2, 5, 4)),
    "thd, (S, W)": ((5, 4, 12), (5, 2, 12), 1, (5,), (5, 1)),
    "thd, 3-D": ((5, 4, 12), (5, 4, 12), -2, (5, 4), (5, 4)),
    "hsd, (S, W)": ((4, 5, 12), (4, 5, 12), 0, (5,), (1, 5)),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("q, k, dim, values, broadcast", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_shapes(q, k, dim, values, broadcast, form, interleaved, backend) -> None:
    for pairs in (6, 4):  # all 12 channels of the head, and the first 8
        for dtype in DTYPES:
            for table_dtype in DTYPES:
                x, y = noise(*q, dtype=dtype), noise(*k, seed=1, dtype=dtype)
                c, s = (noise(*values, pairs, seed=n, dtype=table_dtype) for n in (2, 3))
                # Duplicates may differ only in tables that require grad.
                cos, sin = (
                    written(c, form, junk=7.0).requires_grad_(),
                    written(s, form, junk=9.0).requires_grad_(),
                )
                before = x.clone()
                a, b = apply_rotary_pos_emb(
                    x, y, cos, sin, dim, interleaved=interleaved, tables=form, backend=backend
                )
                assert torch.equal(x, before)
                for got, raw in ((a, x), (b, y)):
                    rows = tuple(min(n, m) for n, m in zip(broadcast, raw.shape[:-1], strict=True))
                    want = turned(
                        raw, c.reshape(*rows, pairs), s.reshape(*rows, pairs), interleaved
                    )
                    assert got.dtype == dtype
                    assert_near(got.double(), want, f"table rotation, {dtype}")
                    assert torch.equal(got[..., 2 * pairs :], raw[..., 2 * pairs :])
                alone, none = apply_rotary_pos_emb(
                    x, None, cos, sin, dim, interleaved=interleaved, tables=form, backend=backend
                )
                assert none is None
                assert torch.equal(alone, a)
                p, q_ = x.clone(), y.clone()
                apply_rotary_pos_emb_(
                    p, q_, cos, sin, dim, interleaved=interleaved, tables=form, backend=backend
                )
                assert torch.equal(p, a)
                assert torch.equal(q_, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_ids_choose_rows(form: str, backend: str | None) -> None:
    x = noise(2, 3, 5, 12)
    c, s = noise(9, 6, seed=1), noise(9, 6, seed=2)
    cos, sin = written(c, form), written(s, form)
    for ids in (
        torch.tensor([8, 0, 3, 3, 1]),
        torch.tensor([[8, 0, 3, 3, 1]], dtype=torch.int32),
        torch.tensor([[8, 0, 3, 3, 1], [1, 2, 3, 4, 5]]),
    ):
        got, _ = apply_rotary_pos_emb(
            x, None, cos, sin, tables=form, position_ids=ids, backend=backend
        )
        gathered = cos[ids.reshape(-1, 5).long()], sin[ids.reshape(-1, 5).long()]
        want, _ = apply_rotary_pos_emb(x, None, *gathered, tables=form, backend=backend)
        assert torch.equal(got, want)
    rows = noise(2, 9, 6, seed=3), noise(2, 9, 6, seed=4)
    ids = torch.tensor([[8, 0, 3, 3, 1], [1, 2, 3, 4, 5]])
    got, _ = apply_rotary_pos_emb(x, None, *rows, tables="half", position_ids=ids, backend=backend)
    picked = (table[torch.arange(2)[:, None], ids] for table in rows)
    assert torch.equal(
        got, apply_rotary_pos_emb(x, None, *picked, tables="half", backend=backend)[0]
    )


@pytest.mark.parametrize("ids", [[0, 1, 9, 2, 3], [0, -1, 2, 3, 4]])
def test_a_row_outside_the_tables(ids: list[int]) -> None:
    x = noise(2, 3, 5, 12, dtype=torch.float32)
    table = written(noise(9, 6, seed=1, dtype=torch.float32), "cat")
    where = torch.tensor(ids)
    before = x.clone()
    text = re.escape(
        "[apply_rotary_pos_emb_] position_ids must lie in [0, 9), the rows of cos and sin, but go "
        f"from {min(ids)} to {max(ids)}."
    )
    with pytest.raises(IndexError, match=f"^{text}$"):
        apply_rotary_pos_emb_(x, None, table, table, position_ids=where)
    assert torch.equal(x, before)

    def function(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(x, None, table, table, position_ids=where)[0]

    y = torch.compile(function, fullgraph=True, backend="aot_eager")(x, where)
    outside = (where < 0) | (where >= 9)
    assert y[:, :, outside].isnan().all()
    inside, _ = apply_rotary_pos_emb(x, None, table, table, position_ids=where.clamp(0, 8))
    assert torch.equal(y[:, :, ~outside], inside[:, :, ~outside])
    form = schema.Options(add_index=False, source=schema.SOURCES.index("cat")).pack()
    (raw,) = schema.rotate(
        x, None, table[None, None], table[None, None], where[None, None], 0, form, 1.0
    )
    assert torch.equal(raw.isnan(), y.isnan())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["bhsd, (B, S, W)", "bhsd, 4-D", "bshd, (S, W)", "thd, 3-D"])
def test_gradients(name: str, form: str, interleaved: bool) -> None:
    q, k, dim, values, _ = SHAPES[name]
    x, y = noise(*q).requires_grad_(), noise(*k, seed=1).requires_grad_()
    cos, sin = (written(noise(*values, 4, seed=n), form).requires_grad_() for n in (2, 3))

    def function(x, y, cos, sin):
        return apply_rotary_pos_emb(x, y, cos, sin, dim, interleaved=interleaved, tables=form)

    def in_place(x, y, cos, sin):
        x, y = x * 1, y * 1
        return apply_rotary_pos_emb_(x, y, cos, sin, dim, interleaved=interleaved, tables=form)

    for one in (function, in_place):
        assert gradcheck(one, (x, y, cos, sin), fast_mode=True)
        assert gradgradcheck(one, (x, y, cos, sin), fast_mode=True)
    forward = {"check_forward_ad": True, "check_backward_ad": False, "fast_mode": True}
    assert gradcheck(function, (x, y, cos, sin), **forward)


def test_gradients_by_tables_through_ids() -> None:
    x = noise(2, 3, 5, 8).requires_grad_()
    for shape in ((9, 4), (2, 9, 4)):
        cos, sin = noise(*shape, seed=1).requires_grad_(), noise(*shape, seed=2).requires_grad_()
        for ids in (
            torch.tensor([8, 0, 3, 3, 1]),
            torch.tensor([[8, 0, 3, 3, 1], [1, 2, 8, 4, 5]]),
        ):
            assert gradcheck(
                lambda x, c, s, ids=ids: apply_rotary_pos_emb(
                    x, None, c, s, tables="half", position_ids=ids
                )[0],
                (x, cos, sin),
            )


def test_gradients_of_duplicates_reach_what_was_duplicated() -> None:
    x = noise(2, 3, 5, 8)
    for form in ("cat", "repeat"):
        grads = []
        for how in (form, "half"):
            angle = noise(5, 4, seed=1).requires_grad_()
            cos, sin = written(angle.cos(), how), written(angle.sin(), how)
            y, _ = apply_rotary_pos_emb(x, None, cos, sin, tables=how)
            y.pow(3).sum().backward()
            grads.append(angle.grad)
        assert_near(*grads, "float64 ways")


def test_registration() -> None:
    x = noise(2, 3, 5, 8, dtype=torch.float32).requires_grad_()
    cos, sin = (noise(2, 1, 5, 8, seed=n, dtype=torch.float32).requires_grad_() for n in (1, 2))
    rest = (None, 0, schema.Options(source=schema.SOURCES.index("cat")).pack(), 1.0)
    torch.library.opcheck(schema.rotate, (x, None, cos, sin, *rest))
    fixed = (cos.detach(), sin.detach(), *rest)
    torch.library.opcheck(schema.rotate_, (x.detach(), None, *fixed))


def test_transforms() -> None:
    x = noise(4, 2, 3, 5, 8)
    cos, sin = (written(noise(4, 5, 4, seed=n), "cat") for n in (1, 2))

    def function(x, cos, sin):
        return apply_rotary_pos_emb(x, None, cos, sin)[0]

    expected = torch.stack([function(*each) for each in zip(x, cos, sin, strict=True)])
    assert torch.equal(torch.vmap(function)(x, cos, sin), expected)
    assert torch.equal(
        torch.vmap(function, in_dims=(None, 0, 0))(x[0], cos, sin),
        torch.stack([function(x[0], c, s) for c, s in zip(cos, sin, strict=True)]),
    )
    for mapped in ((None, 0, None), (None, None, 0), (0, 0, None)):
        given = [t if dim == 0 else t[0] for t, dim in zip((x, cos, sin), mapped)]
        rows = [[t[i] if dim == 0 else t for t, dim in zip(given, mapped)] for i in range(4)]
        got = torch.vmap(function, in_dims=mapped)(*given)
        assert torch.equal(got, torch.stack([function(*row) for row in rows]))
    grads = torch.func.grad(lambda *a: function(*a).pow(3).sum(), argnums=(0, 1, 2))
    got = grads(x[0], cos[0], sin[0])
    leaves = [t[0].clone().requires_grad_() for t in (x, cos, sin)]
    function(*leaves).pow(3).sum().backward()
    for a, b in zip(got, leaves, strict=True):
        assert_near(a, b.grad, "float64 ways")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 17):
        tables = (written(noise(tokens, 4, seed=n), "cat") for n in (1, 2))
        each = noise(2, 3, tokens, 8), *tables
        assert torch.equal(compiled(*each), function(*each))


def test_bitwise_invariance() -> None:
    """Strides of tables and of x, q alone or with k, and the number of threads change no bit."""
    for dtype in DTYPES:
        x, y = noise(2, 4, 300, 24, dtype=dtype), noise(2, 2, 300, 24, seed=1, dtype=dtype)
        cos, sin = (written(noise(2, 300, 12, seed=n, dtype=dtype), "cat") for n in (2, 3))
        want = apply_rotary_pos_emb(x, y, cos, sin)
        strided = cos.transpose(1, 2).contiguous().transpose(1, 2)
        again = apply_rotary_pos_emb(
            x.transpose(1, 2).contiguous().transpose(1, 2), y, strided, sin
        )
        assert torch.equal(want[0], again[0])
        one = apply_rotary_pos_emb(x[1:, 2:3, 7:8], None, cos[1:, 7:8], sin[1:, 7:8])[0]
        assert torch.equal(one, want[0][1:, 2:3, 7:8])
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert torch.equal(apply_rotary_pos_emb(x, y, cos, sin)[1], want[1])


X, C = torch.zeros(2, 3, 5, 8), torch.zeros(5, 8)
ERRORS = {
    "unsqueeze_dim": (
        lambda: apply_rotary_pos_emb(X, None, C, C, 3),
        ValueError,
        "[apply_rotary_pos_emb] unsqueeze_dim must be the heads dimension of q: 1 or 2 if q has "
        "four dimensions, 0 or 1 if it has three, but got 3 (q: float32[2, 3, 5, 8]).",
    ),
    "format": (
        lambda: apply_rotary_pos_emb(X, None, C, C, tables="neox"),
        ValueError,
        "[apply_rotary_pos_emb] tables must be one of cat, repeat, half, full but got 'neox'.",
    ),
    "integer q": (
        lambda: apply_rotary_pos_emb(X.int(), None, C, C),
        TypeError,
        "[apply_rotary_pos_emb] q must be float32, float64, bfloat16 or float16 but got int32 "
        "(q: int32[2, 3, 5, 8]).",
    ),
    "no q": (
        lambda: apply_rotary_pos_emb(None, None, C, C),
        TypeError,
        "[apply_rotary_pos_emb] q must be a tensor but got None.",
    ),
    "integer table": (
        lambda: apply_rotary_pos_emb(X, None, C, C.int()),
        TypeError,
        "[apply_rotary_pos_emb] sin must be float32, float64, bfloat16 or float16 but got int32 "
        "(sin: int32[5, 8]).",
    ),
    "no table": (
        lambda: apply_rotary_pos_emb(X, None, None, C),
        TypeError,
        "[apply_rotary_pos_emb] cos must be a tensor but got None.",
    ),
    "two shapes": (
        lambda: apply_rotary_pos_emb(X, None, C, C[:, :4]),
        ValueError,
        "[apply_rotary_pos_emb] cos and sin must share shape, dtype and device "
        "(cos: float32[5, 8], sin: float32[5, 4]).",
    ),
    "too wide": (
        lambda: apply_rotary_pos_emb(X, None, C, C, tables="half"),
        ValueError,
        "[apply_rotary_pos_emb] tables 'half' of width 8 rotate 16 channels but q has 8 "
        "(q: float32[2, 3, 5, 8], cos: float32[5, 8]).",
    ),
    "odd width": (
        lambda: apply_rotary_pos_emb(X, None, C[:, :5], C[:, :5]),
        ValueError,
        "[apply_rotary_pos_emb] tables 'cat' must have an even width but got 5 "
        "(cos: float32[5, 5]).",
    ),
    "too few rows": (
        lambda: apply_rotary_pos_emb(X, None, C[:4], C[:4]),
        ValueError,
        "[apply_rotary_pos_emb] cos and sin must have one row for each of 5 tokens but got 4; give "
        "position_ids to select rows (q: float32[2, 3, 5, 8], cos: float32[4, 8]).",
    ),
    "another head dimension": (
        lambda: apply_rotary_pos_emb(X, None, C, C, 2),
        ValueError,
        "[apply_rotary_pos_emb] cos and sin must have one row for each of 3 tokens but got 5; give "
        "position_ids to select rows (q: float32[2, 3, 5, 8], cos: float32[5, 8]).",
    ),
    "batch": (
        lambda: apply_rotary_pos_emb(X, None, C.expand(3, -1, -1), C.expand(3, -1, -1)),
        ValueError,
        "[apply_rotary_pos_emb] cos and sin must have 1 or 2 rows but got 3 "
        "(q: float32[2, 3, 5, 8], cos: float32[3, 5, 8]).",
    ),
    "heads": (
        lambda: apply_rotary_pos_emb(X, X[:, :2], *(C.expand(2, 3, -1, -1),) * 2),
        ValueError,
        "[apply_rotary_pos_emb] cos and sin must have 1 or 2 heads for k but got 3 "
        "(k: float32[2, 2, 5, 8], cos: float32[2, 3, 5, 8]).",
    ),
    "rank": (
        lambda: apply_rotary_pos_emb(X, None, C[0], C[0]),
        ValueError,
        "[apply_rotary_pos_emb] cos and sin must have 2, 3 or 4 dimensions for a q of 4 but got "
        "1 (q: float32[2, 3, 5, 8], cos: float32[8]).",
    ),
    "k of another length": (
        lambda: apply_rotary_pos_emb(X, X[:, :, :4], C, C),
        ValueError,
        "[apply_rotary_pos_emb] q and k must have the same number of tokens but got 5 and 4; rotate "
        "them one by one, or pass layout='bshd' if their tokens are in dimension 1 "
        "(q: float32[2, 3, 5, 8], k: float32[2, 3, 4, 8]).",
    ),
    "k of another width": (
        lambda: apply_rotary_pos_emb(X, torch.zeros(2, 3, 5, 16), C, C),
        ValueError,
        "[apply_rotary_pos_emb] q and k must have the same number of channels but got 8 and 16; "
        "rotate them one by one (q: float32[2, 3, 5, 8], k: float32[2, 3, 5, 16]).",
    ),
    "float ids": (
        lambda: apply_rotary_pos_emb(X, None, C, C, position_ids=torch.zeros(5)),
        TypeError,
        "[apply_rotary_pos_emb] position_ids must be int32 or int64 but got float32[5].",
    ),
    "shape of ids": (
        lambda: apply_rotary_pos_emb(X, None, C, C, position_ids=torch.zeros(3, 5).long()),
        ValueError,
        "[apply_rotary_pos_emb] position_ids must have shape (5,) or (2, 5) "
        "(q: float32[2, 3, 5, 8], position_ids: int64[3, 5]).",
    ),
}


@pytest.mark.parametrize("call, error, text", ERRORS.values(), ids=ERRORS)
def test_sentence(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


# --- where the rotated channels start, and the other direction ------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 3, 4])
def test_start_rotates_a_slice_and_copies_the_rest(
    form: str, interleaved: bool, start: int
) -> None:
    q, k = noise(2, 4, 5, 12), noise(2, 2, 5, 12, seed=1)
    cos, sin = noise(2, 5, 4, seed=2), noise(2, 5, 4, seed=3)
    c, s = cos[:, None], sin[:, None]
    ys = apply_rotary_pos_emb(
        q,
        k,
        written(cos, form),
        written(sin, form),
        interleaved=interleaved,
        tables=form,
        start=start,
    )
    for y, x in zip(ys, (q, k), strict=True):
        wanted = x.clone()
        wanted[..., start : start + 8] = turned(x[..., start : start + 8], c, s, interleaved)
        assert_near(y, wanted, "table rotation, torch.float64")
    copies = q.clone(), k.clone()
    apply_rotary_pos_emb_(
        *copies,
        written(cos, form),
        written(sin, form),
        interleaved=interleaved,
        tables=form,
        start=start,
    )
    for y, x in zip(copies, ys, strict=True):
        assert torch.equal(y, x)


def test_inverse_is_by_the_negative_angles_and_undoes_unit_tables() -> None:
    q, k = noise(2, 4, 5, 12), noise(2, 2, 5, 12, seed=1)
    angle = noise(5, 6, seed=2)
    cos, sin = angle.cos(), angle.sin()
    there = apply_rotary_pos_emb(q, k, cos, sin, tables="half", inverse=True)
    same = apply_rotary_pos_emb(q, k, cos, -sin, tables="half")
    back = apply_rotary_pos_emb(*there, cos, sin, tables="half")
    for a, b, c, x in zip(there, same, back, (q, k), strict=True):
        assert torch.equal(a, b)
        assert_near(c, x, "table rotation, torch.float64")
    x = q.clone().requires_grad_()
    assert gradcheck(
        lambda t: apply_rotary_pos_emb(t, None, cos, sin, tables="half", start=0, inverse=True)[0],
        x,
    )


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8, numpy.array])
def test_integers_of_numpy_are_integers(kind: Callable[[int], Any]) -> None:
    q, cos, sin = noise(2, 5, 4, 12), noise(5, 4, seed=1), noise(5, 4, seed=2)
    got, _ = apply_rotary_pos_emb(q, None, cos, sin, kind(2), start=kind(3), tables="half")
    assert torch.equal(got, apply_rotary_pos_emb(q, None, cos, sin, 2, start=3, tables="half")[0])


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (
            5,
            ValueError,
            "start must lie between 0 and 4, because tables 'cat' of width 8 rotate 8 channels",
        ),
        (-1, ValueError, "start must lie between 0 and 4"),
        (1.0, TypeError, "start must be an int but got 1.0"),
        (True, TypeError, "start must be an int but got True"),
    ],
)
def test_start_errors(start: object, error: type[Exception], message: str) -> None:
    q, table = noise(2, 4, 5, 12), noise(5, 8)
    with pytest.raises(error, match=re.escape(f"[apply_rotary_pos_emb] {message}")):
        apply_rotary_pos_emb(q, None, table, table, start=start)  # type: ignore[arg-type]


# --- the signature that is proposed for torch.nn.functional ---------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(interleaved: bool, dtype: torch.dtype) -> None:
    x, (cos, sin) = noise(2, 3, 5, 12, dtype=dtype), build_freqs_cis(40, 12, dtype=torch.float64)
    ids = torch.tensor([[0, 7, 7, 39, 2], [5, 6, 7, 8, 9]])
    want = turned(x, cos[ids][:, None], sin[ids][:, None], interleaved)
    got = rotary_embedding(x, cos, sin, ids, interleaved=interleaved)
    assert got.dtype == dtype
    assert_near(got.double(), want, f"table rotation, {dtype}")
    for shape in ((5, 6), (2, 1, 5, 6), (1, 3, 1, 6)):
        c, s = noise(*shape, seed=1), noise(*shape, seed=2)
        got = rotary_embedding(x, c, s, interleaved=interleaved)
        assert_near(got.double(), turned(x, c, s, interleaved), f"table rotation, {dtype}")
        other = rotary_apply(x, c, s, interleaved=interleaved)
        assert torch.equal(got, other)
    assert rotary_embedding(x[0, 0], cos[:5], sin[:5]).shape == (5, 12)


def test_rotary_embedding_has_gradients() -> None:
    ids = torch.tensor([[1, 0, 1]])
    leaves = [noise(1, 2, 3, 4), noise(2, 2, seed=1), noise(2, 2, seed=2)]
    leaves = [x.requires_grad_() for x in leaves]
    assert gradcheck(lambda *xs: rotary_embedding(*xs, ids), leaves)
    assert gradgradcheck(lambda *xs: rotary_embedding(*xs, ids), leaves)


def test_rotary_embedding_refuses() -> None:
    x, (cos, sin), ids = noise(2, 3, 5, 12), build_freqs_cis(9, 12), torch.zeros(2, 5, dtype=int)
    for call, kind, text in (
        (
            lambda: rotary_embedding(x[0], cos, sin, ids),
            ValueError,
            "x must have shape (batch, heads, seq, d) with an even d (x: float64[3, 5, 12]).",
        ),
        (
            lambda: rotary_embedding(x, cos, sin[:, :5], ids),
            ValueError,
            "sin must have shape (n, 6) with position_ids (x: float64[2, 3, 5, 12], sin: float32[9, 5]).",
        ),
        (
            lambda: rotary_embedding(x, cos, sin, ids + 9),
            IndexError,
            "position_ids must lie in [0, 9), the rows of cos and sin, but go from 9 to 9.",
        ),
    ):
        with refused(kind, f"[rotary_embedding] {text}"):
            call()
