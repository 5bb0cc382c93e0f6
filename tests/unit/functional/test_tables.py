"""Rotation by tables of cosines and sines: `apply_rotary_pos_emb`, its in-place form and `rotary_embedding`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.support import oracle
from tests.support.helpers import noise, refused
from tests.support.matrix import DTYPES
from tests.support.table_calls import CASES, check_tables
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import angles
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    build_freqs_cis,
    rotary_apply,
    rotary_embedding,
)
from tightrope.ops import schema

F64, F32 = torch.float64, torch.float32


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_pair_of_options(case: Mapping[str, Any]) -> None:
    check_tables(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_nothing_else(dtype: torch.dtype) -> None:
    """Strides of tables and of x, q alone or with k, and the number of threads change no bit."""
    x, y = noise(2, 4, 300, 24, dtype=dtype), noise(2, 2, 300, 24, seed=1, dtype=dtype)
    cos, sin = (noise(2, 300, 12, seed=n, dtype=dtype) for n in (2, 3))
    wanted = apply_rotary_pos_emb(x, y, cos, sin, tables="half")
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, cos)]
    again = apply_rotary_pos_emb(strided[0], y, strided[1], sin, tables="half")
    one = apply_rotary_pos_emb(x[1:, 2:3, 7:8], None, cos[1:, 7:8], sin[1:, 7:8], tables="half")
    assert_same_bits([*again, one[0]], [*wanted, wanted[0][1:, 2:3, 7:8]])
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert_same_bits(apply_rotary_pos_emb(x, y, cos, sin, tables="half"), wanted)


@pytest.mark.parametrize("ids", [[0, 1, 9, 2, 3], [0, -1, 2, 3, 4]])
def test_a_row_outside_the_tables(ids: list[int]) -> None:
    """It is refused where ids can be read, before anything is written; in compiled code it gives NaN."""
    x, where = noise(2, 3, 5, 12, dtype=F32), torch.tensor(ids)
    table = noise(9, 6, dtype=F32)
    before, outside = x.clone(), (where < 0) | (where >= 9)
    rule = "position_ids must lie in [0, 9), the rows of cos and sin, but go"
    with refused(IndexError, f"[apply_rotary_pos_emb_] {rule} from {min(ids)} to {max(ids)}."):
        apply_rotary_pos_emb_(x, None, table, table, tables="half", position_ids=where)
    assert_same_bits(x, before)

    def turn(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(x, None, table, table, tables="half", position_ids=where)[0]

    y = torch.compile(turn, fullgraph=True, backend="aot_eager")(x, where)
    assert y[:, :, outside].isnan().all()
    inside = turn(x, where.clamp(0, 8))
    assert_same_bits(y[:, :, ~outside], inside[:, :, ~outside])
    found = angles.look_up(table[None, None], "half", where[None, None], 0, False, 5)
    assert torch.equal(found.isnan()[0, 0].all(-1), outside)
    form = schema.Options(add_index=False, source=schema.HALF).pack()
    both = table[None, None], table[None, None]
    (raw,) = schema.rotate(x, None, *both, where[None, None], 0, form, 1.0)
    assert torch.equal(raw.isnan(), y.isnan())


def test_registration() -> None:
    x = noise(2, 3, 5, 8, dtype=F32).requires_grad_()
    cos, sin = (noise(2, 1, 5, 8, seed=n, dtype=F32).requires_grad_() for n in (1, 2))
    rest = (None, 0, schema.Options(source=schema.SOURCES.index("cat")).pack(), 1.0)
    torch.library.opcheck(schema.rotate, (x, None, cos, sin, *rest))
    torch.library.opcheck(schema.rotate_, (x.detach(), None, cos.detach(), sin.detach(), *rest))


def test_transforms() -> None:
    leaves = noise(4, 2, 3, 5, 8), noise(4, 5, 4, seed=1), noise(4, 5, 4, seed=2)

    def turn(*leaves: torch.Tensor) -> torch.Tensor:
        x, cos, sin = leaves
        return apply_rotary_pos_emb(x, None, cos, sin, tables="half")[0]

    for mapped in ((0, 0, 0), (None, 0, 0), (None, 0, None), (None, None, 0), (0, 0, None)):
        given = [t if dim == 0 else t[0] for t, dim in zip(leaves, mapped, strict=True)]
        rows = [
            turn(*[t[i] if dim == 0 else t for t, dim in zip(given, mapped, strict=True)])
            for i in range(4)
        ]
        assert_same_bits(torch.vmap(turn, in_dims=mapped)(*given), torch.stack(rows))
    own = [leaf[0].clone().requires_grad_() for leaf in leaves]
    wanted = torch.autograd.grad(turn(*own).pow(3).sum(), own)

    def in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_(x * 1, None, cos, sin, tables="half")[0]

    for verb in (turn, in_place):
        found = torch.func.grad(lambda *each: verb(*each).pow(3).sum(), (0, 1, 2))(*own)  # noqa: B023
        assert_near(found, wanted, "float64 ways")
        compiled = torch.compile(verb, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (5, 9, 17):
            each = noise(2, 3, tokens, 8), noise(tokens, 4, seed=1), noise(tokens, 4, seed=2)
            each = tuple(leaf.requires_grad_() for leaf in each)
            found = [
                [y := run(*each), *torch.autograd.grad(y.sin().sum(), each)]
                for run in (compiled, turn)
            ]
            assert_same_bits(*found)


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8, numpy.array])
def test_integers_of_numpy_are_integers(kind: Callable[[int], Any]) -> None:
    given = noise(2, 5, 4, 12), None, noise(5, 4, seed=1), noise(5, 4, seed=2)
    found, _ = apply_rotary_pos_emb(*given, kind(2), start=kind(3), tables="half")
    assert_same_bits(found, apply_rotary_pos_emb(*given, 2, start=3, tables="half")[0])


# --- the signature that is proposed for torch.nn.functional ---------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(interleaved: bool, dtype: torch.dtype) -> None:
    x, (cos, sin) = noise(2, 3, 5, 12, dtype=dtype), build_freqs_cis(40, 12, dtype=F64)
    ids = torch.tensor([[0, 7, 7, 39, 2], [5, 6, 7, 8, 9]])
    assert rotary_embedding(x[0, 0], cos[:5], sin[:5]).shape == (5, 12)
    for shape in (None, (5, 6), (2, 1, 5, 6), (1, 3, 1, 6)):
        c, s = (cos, sin) if shape is None else (noise(*shape, seed=n) for n in (1, 2))
        where = ids if shape is None else None
        picked = (c[ids][:, None], s[ids][:, None]) if shape is None else (c, s)
        wanted = oracle.turned(x, *picked, 0, interleaved)
        found = rotary_embedding(x, c, s, where, interleaved=interleaved)
        assert found.dtype == dtype
        assert_near(found.double(), wanted, f"table rotation, {dtype}")
        if shape is not None:
            assert_same_bits(found, rotary_apply(x, c, s, interleaved=interleaved))


def test_rotary_embedding_has_gradients() -> None:
    leaves = [noise(1, 2, 3, 4), noise(2, 2, seed=1), noise(2, 2, seed=2)]
    leaves = [x.requires_grad_() for x in leaves]
    for check in (gradcheck, gradgradcheck):
        assert check(lambda *xs: rotary_embedding(*xs, torch.tensor([[1, 0, 1]])), leaves)
