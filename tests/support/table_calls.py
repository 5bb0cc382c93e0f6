"""Rotations by tables of cosines and sines with every valid pair of values of any two options, and their oracle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support import oracle_rounding as rounded, pairwise
from tests.support.helpers import noise, on
from tests.support.rows import read_rows
from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tightrope.functional import apply_rotary_pos_emb, apply_rotary_pos_emb_
from tightrope.ops import schema

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOKENS, LENGTH = 5, 9

# The tables' shapes lack the width; TOKENS is replaced by the number of their rows. "broadcast" fits q.
FIELDS = "q", "k", "unsqueeze_dim", "tables", "broadcast"
ROWS = read_rows(Path(__file__).parent / "data" / "shapes_of_tables.jsonl")
SHAPES = {name: [row[field] for field in FIELDS] for name, row in ROWS.items()}
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
    "place": ((30, 0), (19, 0), (28, 3)),  # pairs and start
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


def check_tables(case: Mapping[str, Any], device: Any = "cpu") -> None:
    """Results and gradients are the oracle's, out of place and in place, of q alone or beside k, of any strides.

    Where the pairing is interleaved, the entries of tables are not adjacent in memory.
    """
    *shapes, dim, lead, spread = SHAPES[case["shape"]]
    (pairs, start), (dtype, held) = case["place"], case["dtypes"]
    form, interleaved, rounding = case["tables"], case["interleaved"], case["rounding"]
    forward, back = rounding if isinstance(rounding, tuple) else (rounding, rounding)
    if case["ids"]:
        lead = tuple(LENGTH if size == TOKENS else size for size in lead)
    values = [noise(*lead, 2 * pairs, seed=n).to(device, held) for n in (2, 3)]
    if form != "full":
        values = [value[..., :pairs] for value in values]
    # Duplicates may differ only in tables that require grad.
    given = [v if form == "full" else written(v, form) for v in values]
    if interleaved:
        given = [torch.stack((table, table * torch.nan), -1)[..., 0] for table in given]
    given = [table.detach().requires_grad_() for table in given]
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
        ids = (IDS if case["ids"] == "per row" else IDS[0]).to(device)
        options["position_ids"] = ids.int() if case["ids"] == "int32" else ids
        if len(lead) == 1:
            whole = [table[ids] for table in whole]
        else:
            rows = torch.arange(lead[0], device=device)[:, None]
            whole = [table[rows, ids.expand(lead[0], TOKENS)] for table in whole]
        if ids.dim() == 2:
            spread = tuple(2 if i == 0 else size for i, size in enumerate(spread))
    whole = [table.reshape(*spread, 2 * pairs) for table in whole]
    xs = [noise(*shape, dtype=dtype, seed=n).to(device) for n, shape in enumerate(shapes)]
    xs = [x.requires_grad_() for x in xs]
    grads = [noise(*shape, dtype=dtype, seed=5 + n).to(device) for n, shape in enumerate(shapes)]
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
    with torch.no_grad():
        backend, copies = case["backend"], [x.clone() for x in xs]
        alone, none = on(backend, apply_rotary_pos_emb, xs[0], None, *given, dim, **options)
        inside = on(backend, apply_rotary_pos_emb_, *copies, *given, dim, **options)
        strided = [torch.stack((t, t), -1)[..., 0].requires_grad_() for t in (*xs, *given)]
        again = on(backend, apply_rotary_pos_emb, *strided, dim, **options)
        if case["ids"] is None:  # tables of as many dimensions as q
            each = [table.detach().reshape(*spread, table.shape[-1]) for table in given]
            # Of tables without a gradient, duplicates must not differ.
            each = [table.requires_grad_() for table in each]
            assert_same_bits(
                on(backend, apply_rotary_pos_emb, xs[0], None, *each, dim, **options)[0], alone
            )
    assert none is None
    assert_each(lambda a, b: a is b, inside, copies)
    assert_same_bits([alone, *copies, *again], [ys[0], *ys, *ys])
