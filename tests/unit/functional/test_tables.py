"""Rotation by tables of cosines and sines: `apply_rotary_pos_emb`, its in-place form and `rotary_embedding`."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support import oracle, oracle_rounding as rounded, pairwise
from tests.support.helpers import noise, on, refused
from tests.support.matrix import DTYPES
from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tightrope import angles
from tightrope.backends import use
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    build_freqs_cis,
    rotary_apply,
    rotary_embedding,
)
from tightrope.ops import schema

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOKENS, LENGTH = 5, 9

# name: q, k, unsqueeze_dim, shape of the tables (5 is replaced by the number of their rows), shape that
# broadcasts to q
SHAPES: dict[str, tuple[Any, ...]] = {
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
IDS = torch.tensor([[8, 0, 3, 3, 1], [1, 2, 3, 4, 5]])
AXES: dict[str, Any] = {
    "shape": tuple(SHAPES),
    # Of x and of the tables.
    "dtypes": (
        *((F64, F64), (F64, F32), (F32, F32), (F32, F64), (F32, F16), (BF16, BF16)),
        *((BF16, F32), (F16, F16), (F16, BF16)),
    ),
    "tables": schema.TABLES,
    "interleaved": (False, True),
    "place": ((6, 0), (4, 0), (4, 3)),  # pairs and start
    "rounding": ("once", "wide", "each", ("wide", "each"), ("each", "wide")),
    "inverse": (False, True),
    "ids": (None, "shared", "int32", "per row"),
    "backend": (None, "reference"),
}


def allowed(case: Mapping[str, Any]) -> bool:
    shape, (dtype, held) = case.get("shape", "bhsd, (S, W)"), case.get("dtypes", (F64, F64))
    per_row = case.get("ids") == "per row"
    return not (
        (case.get("inverse") and case.get("tables") == "full")
        or (case.get("rounding", "once") != "once" and held not in (dtype, F32))
        or (per_row and (shape[0] != "b" or "(1" in shape))
        or (case.get("ids") and "-D" in shape)
    )


CASES = pairwise.covering(AXES, allowed)


def written(values: torch.Tensor, form: str) -> torch.Tensor:
    """Convert one value per pair to a table of this format; duplicates, of which one is read, differ."""
    return {
        "half": lambda: values,
        "cat": lambda: torch.cat((values, values + 7), -1),
        "repeat": lambda: torch.stack((values, values + 7), -1).flatten(-2),
    }[form]()


def right(x: torch.Tensor, tables: Any, start: int, *how: Any) -> torch.Tensor:
    """Rotate by tables with an entry for each channel, from `start` on; `how` as for the oracle."""
    stop = start + tables[0].shape[-1]
    turned = rounded.rotate(x[..., start:stop], *tables, *how)
    return torch.cat((x[..., :start], turned, x[..., stop:]), -1)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_pair_of_options(case: Mapping[str, Any]) -> None:
    """Results and gradients are the oracle's, out of place and in place, of q alone or beside k, of any strides."""
    *shapes, dim, lead, spread = SHAPES[case["shape"]]
    (pairs, start), (dtype, held) = case["place"], case["dtypes"]
    form, interleaved, rounding = case["tables"], case["interleaved"], case["rounding"]
    forward, back = rounding if isinstance(rounding, tuple) else (rounding, rounding)
    if case["ids"]:
        lead = tuple(LENGTH if size == TOKENS else size for size in lead)
    values = [noise(*lead, 2 * pairs, seed=n).to(held) for n in (2, 3)]
    if form != "full":
        values = [value[..., :pairs] for value in values]
    # Duplicates may differ only in tables that require grad.
    given = [v if form == "full" else written(v, form) for v in values]
    given = [table.requires_grad_() for table in given]
    options = {"interleaved": interleaved, "tables": form, "start": start, "rounding": rounding}
    options["inverse"] = case["inverse"]
    whole = given if form != "half" else [torch.cat((v, v), -1) for v in given]
    if form == "cat":
        whole = [torch.cat((table[..., :pairs],) * 2, -1) for table in given]
    if form == "repeat":
        whole = [torch.cat((table[..., ::2],) * 2, -1) for table in given]
    if form != "full" and interleaved:
        whole = [rounded.join(*table.chunk(2, -1), True) for table in whole]
    if case["ids"]:
        ids = IDS if case["ids"] == "per row" else IDS[0]
        options["position_ids"] = ids.int() if case["ids"] == "int32" else ids
        if len(lead) == 1:
            whole = [table[ids] for table in whole]
        else:
            rows = torch.arange(lead[0])[:, None]
            whole = [table[rows, ids.expand(lead[0], TOKENS)] for table in whole]
        if ids.dim() == 2:
            spread = tuple(2 if i == 0 else size for i, size in enumerate(spread))
    whole = [table.reshape(*spread, 2 * pairs) for table in whole]
    xs = [noise(*shape, dtype=dtype, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    grads = [noise(*shape, dtype=dtype, seed=5 + n) for n, shape in enumerate(shapes)]
    ys = on(case["backend"], apply_rotary_pos_emb, *xs, *given, dim, **options)
    found = torch.autograd.grad(ys, [*xs, *given], grads)
    for x, y, grad, by_x in zip(xs, ys, grads, found, strict=False):
        assert y.dtype == by_x.dtype == dtype
        for got, of, how, turned in (
            (y, x, forward, case["inverse"]),
            (by_x, grad, back, not case["inverse"]),
        ):
            own = of.double() if how == "once" else of
            wide = [table.double() if how == "once" else table for table in whole]
            wanted = right(own, wide, start, interleaved, "wide" if how == "once" else how, turned)
            if how == "once":
                assert_near(got.double(), wanted, f"table rotation, {dtype}")
                for rest in (slice(0, start), slice(start + 2 * pairs, None)):
                    assert_same_bits(got[..., rest], of[..., rest])
            else:
                assert_same_bits(got, wanted)
    if dtype == held == F64:
        wanted = [right(x, whole, start, interleaved, "wide", case["inverse"]) for x in xs]
        assert_each(
            assert_near, found, torch.autograd.grad(wanted, [*xs, *given], grads), "float64 ways"
        )
    with torch.no_grad(), use(case["backend"]) if case["backend"] else nullcontext():
        alone, none = apply_rotary_pos_emb(xs[0], None, *given, dim, **options)
        strided = [torch.stack((t, t), -1)[..., 0].requires_grad_() for t in (*xs, *given)]
        again = apply_rotary_pos_emb(*strided, dim, **options)
        copies = [x.clone() for x in xs]
        assert_each(
            lambda a, b: a is b, apply_rotary_pos_emb_(*copies, *given, dim, **options), copies
        )
    assert none is None
    assert_same_bits([alone, *copies, *again], [ys[0], *ys, *ys])


@pytest.mark.parametrize("ids", [[0, 1, 9, 2, 3], [0, -1, 2, 3, 4]])
def test_a_row_outside_the_tables(ids: list[int]) -> None:
    """It is refused where ids can be read, before anything is written; in compiled code it gives NaN."""
    x, where = noise(2, 3, 5, 12, dtype=F32), torch.tensor(ids)
    table = written(noise(9, 6, dtype=F32), "half")
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
    # Of tables with as many rows as tokens, ids select rows too.
    some = torch.tensor([[4, 0, 3, 1, 2]]).expand(2, -1)
    few = rotary_embedding(x, cos[:5], sin[:5], some)
    assert_same_bits(few, rotary_embedding(x, cos, sin, some))
