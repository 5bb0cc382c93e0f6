"""Rotation by tables of cosines and sines: `apply_rotary_pos_emb`, its in-place form and `rotary_apply`."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

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
)
from tightrope.ops import schema

F64, F32 = torch.float64, torch.float32


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_pair_of_options(case: Mapping[str, Any]) -> None:
    check_tables(case)


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
    # Such a token gives the tables no gradient.
    leaf, grad = table.clone().requires_grad_(), noise(2, 3, 5, 12, seed=1, dtype=F32)
    slopes = []
    for some in (torch.ones(5, dtype=torch.bool), ~outside):
        given = leaf[None, None], leaf[None, None], where[some][None, None], 0, form, 1.0
        (y,) = schema.rotate(x[:, :, some], None, *given)
        slopes += torch.autograd.grad(y, leaf, grad[:, :, some])
    assert_near(*slopes, "float32 ways")


# --- tables that broadcast -------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_apply(interleaved: bool, dtype: torch.dtype) -> None:
    x = noise(2, 3, 5, 12, dtype=dtype)
    for shape in ((5, 6), (2, 1, 5, 6), (1, 3, 1, 6)):
        cos, sin = (noise(*shape, seed=n) for n in (1, 2))
        found = rotary_apply(x, cos, sin, interleaved=interleaved)
        assert found.dtype == dtype
        wanted = oracle.turned(x, cos, sin, 0, interleaved)
        assert_near(found.double(), wanted, f"table rotation, {dtype}")
    assert rotary_apply(x[0, 0], cos[0, 0], sin[0, 0]).shape == (5, 12)


def test_ids_select_rows_of_tables_with_as_many_rows_as_tokens() -> None:
    x, (cos, sin) = noise(2, 3, 5, 12), build_freqs_cis(40, 12, dtype=F64)
    some = torch.tensor([[4, 0, 3, 1, 2]])
    found = [
        apply_rotary_pos_emb(x, None, *given, tables="half", position_ids=some)[0]
        for given in ((cos[:5], sin[:5]), (cos, sin))
    ]
    assert_same_bits(*found)
