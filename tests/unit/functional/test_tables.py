"""Rotation by tables of cosines and sines: `apply_rotary_pos_emb` and its in-place form."""

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.support import oracle
from tests.support.helpers import noise, refusals
from tests.support.tolerances import assert_near
from tightrope import angles
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    build_freqs_cis,
    rotary_apply,
    rotary_embedding,
)
from tightrope.ops import schema

BACKENDS = ["reference", None]
FORMS = ("cat", "repeat", "half")


def written(values: torch.Tensor, form: str, junk: float = 0.0) -> torch.Tensor:
    """Convert one value per pair to a table of this format; duplicates differ by `junk`."""
    if form == "half":
        return values
    if form == "cat":
        return torch.cat((values, values + junk), -1)
    return torch.stack((values, values + junk), -1).flatten(-2)


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
    # All 12 channels of the head, the first 8, and 8 in the middle.
    for (pairs, start), dtype, table_dtype in itertools.product(
        ((6, 0), (4, 0), (4, 3)), DTYPES, DTYPES
    ):
        x, y = noise(*q, dtype=dtype), noise(*k, seed=1, dtype=dtype)
        c, s = (noise(*values, pairs, seed=n, dtype=table_dtype) for n in (2, 3))
        # Duplicates may differ only in tables that require grad.
        given = [written(t, form, junk=7.0).requires_grad_() for t in (c, s)]
        given.append(dim)
        call = {"interleaved": interleaved, "tables": form, "start": start, "backend": backend}
        before = x.clone()
        ys = apply_rotary_pos_emb(x, y, *given, **call)
        assert torch.equal(x, before)
        for got, raw in zip(ys, (x, y), strict=True):
            rows = tuple(min(n, m) for n, m in zip(broadcast, raw.shape[:-1], strict=True))
            c, s = c.reshape(*rows, pairs), s.reshape(*rows, pairs)
            assert got.dtype == dtype
            want = oracle.turned(raw, c, s, start, interleaved)
            assert_near(got.double(), want, f"table rotation, {dtype}")
            for rest in (slice(0, start), slice(start + 2 * pairs, None)):
                assert torch.equal(got[..., rest], raw[..., rest])
        alone, none = apply_rotary_pos_emb(x, None, *given, **call)
        assert none is None
        copies = x.clone(), y.clone()
        apply_rotary_pos_emb_(*copies, *given, **call)
        for got, want in zip((alone, *copies), (ys[0], *ys), strict=True):
            assert torch.equal(got, want)


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
    found = angles.look_up(table[None, None], "cat", where[None, None], 0, False, 5)
    assert torch.equal(found.isnan()[0, 0].all(-1), outside)
    form = schema.Options(add_index=False, source=schema.SOURCES.index("cat")).pack()
    (raw,) = schema.rotate(
        x, None, table[None, None], table[None, None], where[None, None], 0, form, 1.0
    )
    assert torch.equal(raw.isnan(), y.isnan())


@pytest.mark.parametrize("name", ["bhsd, 4-D", "bshd, (S, W)", "thd, 3-D"])
def test_gradients(name: str) -> None:
    """In other shapes than those of tests/laws/test_derivatives.py."""
    q, k, dim, values, _ = SHAPES[name]
    leaves = noise(*q), noise(*k, seed=1), *(noise(*values, 4, seed=n) for n in (2, 3))
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def function(*leaves: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(*leaves, dim, tables="half")

    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


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

    for mapped in ((0, 0, 0), (None, 0, 0), (None, 0, None), (None, None, 0), (0, 0, None)):
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


X, C, ROWS = torch.zeros(2, 3, 5, 8), torch.zeros(5, 8), torch.zeros(2, 5).long()


def turn(**changes: Any) -> Callable[[], object]:
    """Return a call with these arguments, and valid ones otherwise."""
    return partial(apply_rotary_pos_emb, **({"q": X, "k": None, "cos": C, "sin": C} | changes))


def tables(*shape: int) -> dict[str, torch.Tensor]:
    return {"cos": torch.zeros(shape), "sin": torch.zeros(shape)}


NAME = "[apply_rotary_pos_emb]"
IS_Q = "q: float32[2, 3, 5, 8]"
FLOATING = "must be float32, float64, bfloat16 or float16 but got int32"
VALUES = {
    f"{NAME} unsqueeze_dim must be the heads dimension of q: 1 or 2 if q has four dimensions, "
    f"0 or 1 if it has three, but got 3 ({IS_Q}).": turn(unsqueeze_dim=3),
    f"{NAME} tables must be one of cat, repeat, half, full but got 'neox'.": turn(tables="neox"),
    f"{NAME} cos and sin must share shape, dtype and device (cos: float32[5, 8], "
    "sin: float32[5, 4]).": turn(sin=C[:, :4]),
    f"{NAME} tables 'half' of width 8 rotate 16 channels but q has 8 "
    f"({IS_Q}, cos: float32[5, 8]).": turn(tables="half"),
    f"{NAME} tables 'cat' must have an even width but got 5 (cos: float32[5, 5]).": turn(
        **tables(5, 5)
    ),
    f"{NAME} cos and sin must have one row for each of 5 tokens but got 4; give position_ids to "
    f"select rows ({IS_Q}, cos: float32[4, 8]).": turn(**tables(4, 8)),
    f"{NAME} cos and sin must have one row for each of 3 tokens but got 5; give position_ids to "
    f"select rows ({IS_Q}, cos: float32[5, 8]).": turn(unsqueeze_dim=2),
    f"{NAME} cos and sin must have 1 or 2 rows but got 3 ({IS_Q}, cos: float32[3, 5, 8]).": turn(
        **tables(3, 5, 8)
    ),
    f"{NAME} cos and sin must have 1 or 2 heads for k but got 3 (k: float32[2, 2, 5, 8], "
    "cos: float32[2, 3, 5, 8]).": turn(k=X[:, :2], **tables(2, 3, 5, 8)),
    f"{NAME} cos and sin must have 2, 3 or 4 dimensions for a q of 4 but got 1 "
    f"({IS_Q}, cos: float32[8]).": turn(**tables(8)),
    f"{NAME} q and k must have the same number of tokens but got 5 and 4; rotate them one by one, "
    f"or pass layout='bshd' if their tokens are in dimension 1 ({IS_Q}, "
    "k: float32[2, 3, 4, 8]).": turn(k=X[:, :, :4]),
    f"{NAME} q and k must have the same number of channels but got 8 and 16; rotate them one by "
    f"one ({IS_Q}, k: float32[2, 3, 5, 16]).": turn(k=torch.zeros(2, 3, 5, 16)),
    f"{NAME} position_ids must have shape (5,) or (2, 5) ({IS_Q}, "
    "position_ids: int64[3, 5]).": turn(position_ids=torch.zeros(3, 5).long()),
    **{
        f"{NAME} start must lie between 0 and 4, because tables 'cat' of width 4 rotate 4 "
        f"channels, but got {start} ({IS_Q}, cos: float32[5, 4]).": turn(
            start=start, **tables(5, 4)
        )
        for start in (5, -1)
    },
    "[rotary_embedding] x must have shape (batch, heads, seq, d) with an even d "
    "(x: float32[3, 5, 8]).": lambda: rotary_embedding(X[0], C, C, ROWS),
    "[rotary_embedding] sin must have shape (n, 4) with position_ids (x: float32[2, 3, 5, 8], "
    "sin: float32[9, 3]).": lambda: rotary_embedding(X, torch.zeros(9, 4), torch.zeros(9, 3), ROWS),
}
TYPES = {
    f"{NAME} q {FLOATING} (q: int32[2, 3, 5, 8]).": turn(q=X.int()),
    f"{NAME} q must be a tensor but got None.": turn(q=None),
    f"{NAME} sin {FLOATING} (sin: int32[5, 8]).": turn(sin=C.int()),
    f"{NAME} cos must be a tensor but got None.": turn(cos=None),
    f"{NAME} position_ids must be int32 or int64 but got float32[5].": turn(
        position_ids=torch.zeros(5)
    ),
    f"{NAME} start must be an int but got 1.0.": turn(start=1.0),
    f"{NAME} start must be an int but got True.": turn(start=True),
}
INDICES = {
    "[rotary_embedding] position_ids must lie in [0, 9), the rows of cos and sin, but go from 9 to "
    "9.": lambda: rotary_embedding(X, torch.zeros(9, 4), torch.zeros(9, 4), ROWS + 9),
}
test_sentence = refusals(ValueError=VALUES, TypeError=TYPES, IndexError=INDICES)


# --- the other direction ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8, numpy.array])
def test_integers_of_numpy_are_integers(kind: Callable[[int], Any]) -> None:
    q, cos, sin = noise(2, 5, 4, 12), noise(5, 4, seed=1), noise(5, 4, seed=2)
    got, _ = apply_rotary_pos_emb(q, None, cos, sin, kind(2), start=kind(3), tables="half")
    assert torch.equal(got, apply_rotary_pos_emb(q, None, cos, sin, 2, start=3, tables="half")[0])


# --- the signature that is proposed for torch.nn.functional ---------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(interleaved: bool, dtype: torch.dtype) -> None:
    x, (cos, sin) = noise(2, 3, 5, 12, dtype=dtype), build_freqs_cis(40, 12, dtype=torch.float64)
    ids = torch.tensor([[0, 7, 7, 39, 2], [5, 6, 7, 8, 9]])
    want = oracle.turned(x, cos[ids][:, None], sin[ids][:, None], 0, interleaved)
    got = rotary_embedding(x, cos, sin, ids, interleaved=interleaved)
    assert got.dtype == dtype
    assert_near(got.double(), want, f"table rotation, {dtype}")
    for shape in ((5, 6), (2, 1, 5, 6), (1, 3, 1, 6)):
        c, s = noise(*shape, seed=1), noise(*shape, seed=2)
        got = rotary_embedding(x, c, s, interleaved=interleaved)
        assert_near(
            got.double(), oracle.turned(x, c, s, 0, interleaved), f"table rotation, {dtype}"
        )
        other = rotary_apply(x, c, s, interleaved=interleaved)
        assert torch.equal(got, other)
    assert rotary_embedding(x[0, 0], cos[:5], sin[:5]).shape == (5, 12)


def test_rotary_embedding_has_gradients() -> None:
    ids = torch.tensor([[1, 0, 1]])
    leaves = [noise(1, 2, 3, 4), noise(2, 2, seed=1), noise(2, 2, seed=2)]
    leaves = [x.requires_grad_() for x in leaves]
    assert gradcheck(lambda *xs: rotary_embedding(*xs, ids), leaves)
    assert gradgradcheck(lambda *xs: rotary_embedding(*xs, ids), leaves)
