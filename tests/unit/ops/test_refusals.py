"""Calls that are refused: in refusals.jsonl a row each, of the error and the beginning of its sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import stated
from tests.support.helpers import on, refused
from tests.support.tolerances import assert_same_bits
from tests.support.written_calls import rows_of, value_of
from tightrope import RopeSpec, backends, functional, gates, nn, phases, positions
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_, write_kv

SPEC, X = RopeSpec(8), torch.zeros(2, 4, 5, 8)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "given": phases.given,
    "pair": tuple,
    "sparse": torch.Tensor.to_sparse,
    "tensor": torch.tensor,
    "expanded": lambda x: x[:1].expand(x.shape),
    "per_row": positions.per_row,
    "multi_axis": positions.multi_axis,
    "XPos": lambda centre: gates.XPos(centre=centre),
    **{name: getattr(gates, name) for name in ("Exp", "Slope", "Given")},
}
CALLS: dict[str, Callable[..., Any]] = {
    **{name: MAKERS[name] for name in ("Exp", "Slope", "Given")},
    "use": backends.use,
    "Positions": positions.Positions,
    "shard": positions.shard,
    "RMSNorm": RMSNorm,
    "RotaryPositionalEmbedding": nn.RotaryPositionalEmbedding(8),
}
ROWS = rows_of(Path(__file__).with_name("refusals.jsonl"))


def spec_of(row: dict[str, Any]) -> Any:
    """Return the spec of a row, by default of 8 channels, or what its `at` makes of the arguments "prepared"."""
    given = row.get("spec", {"head_dim": 8})
    if not isinstance(given, dict):
        return given
    axes = {"axes": Axes.blocks(tuple(given["axes"]))} if "axes" in given else {}
    spec = RopeSpec(**given | axes)
    return spec.at(**row["prepared"]) if "prepared" in row else spec


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["text"])
def test_a_call(row: dict[str, Any]) -> None:
    kind = {"ValueError": ValueError, "TypeError": TypeError, "IndexError": IndexError}[
        row["error"]
    ]
    call: Any = CALLS.get(row["call"]) or getattr(functional, row["call"])
    given = {key: row[key] for key in row.keys() - {"error", "text", "call", "prepared", "spec"}}
    values = {key: value_of(one, MAKERS) for key, one in given.items()}
    if call in (rotate, rotate_qk, write_kv):
        names = {rotate: ("x",), rotate_qk: ("q", "k"), write_kv: ("q", "k", "v")}[call]
        where = (values.pop("positions"),) if "positions" in values else ()
        call = partial(stated.call, call, *map(values.pop, names), spec_of(row), *where)
        if "gate" in values:
            call(**{**values, "gate": None})  # so that the next call may take the fast path
    with pytest.raises(kind, match=f"^{re.escape(row['text'])}"):
        call(**values)


def test_bad_input_loses_nothing() -> None:
    x = torch.arange(240.0).reshape(2, 3, 5, 8)
    before, ids = x.clone(), torch.arange(4)
    for arguments in ((RopeSpec(16),), (SPEC, ids), (SPEC, True), (SPEC.at(1), 2), (8,)):
        with pytest.raises((ValueError, TypeError)):
            rotate_(x, *arguments)
    with pytest.raises(ValueError, match="same number of tokens"):
        rotate_qk_(x, x[:, :, :4].clone(), SPEC)
    assert torch.equal(x, before)


def test_a_forced_backend_that_cannot_run_raises_with_the_reason() -> None:
    reason = backends.why_not()["cpu"] or "the tensor is on meta"
    text = f"[rotate] backend 'cpu' cannot run: {reason} (tensor: float32[2, 4, 5, 8])."
    with refused(NotImplementedError, text):
        on("cpu", rotate, X.to("meta"), SPEC)


# --- gates ----------------------------------------------------------------------------------------

GATES = {
    "value of the gate Scalar": lambda device: gates.Scalar(torch.ones((), device=device)),
    "gamma of the gate Exp": lambda device: gates.Exp(torch.ones(8, device=device)),
    "slope of the gate Slope": lambda device: gates.Slope(torch.ones(8, device=device)),
    "log of the gate Given": lambda device: gates.Given(torch.ones(5, 1, 8, device=device)),
}


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("name", GATES)
def test_a_gate_on_another_device_is_refused(name: str, prepared: bool) -> None:
    """Also by the fast path, and when only positions learn."""
    x, rope, ids = X.clone(), SPEC.at(3) if prepared else SPEC, torch.ones(5, requires_grad=True)
    rotate_(x, rope)
    kept = x.clone()
    text = f"{name} is on meta but x is on cpu; put both on one device."
    with refused(ValueError, f"[rotate_] {text}"):
        rotate_(x, rope, gate=GATES[name]("meta"))
    with refused(ValueError, f"[rotate] {text}"):
        rotate(x, SPEC, ids, gate=GATES[name]("meta"))
    assert_same_bits(x, kept)
    there, learns = X.to("meta"), GATES[name]("cpu")
    for gate in (GATES[name]("cpu"), GATES[name]("meta")):
        assert rotate(there, SPEC, gate=gate).is_meta
    getattr(learns, name.split()[0]).requires_grad_()
    with pytest.raises(ValueError, match=r"is on cpu but x is on meta; put both on one device\.$"):
        rotate(there, SPEC, gate=learns)


@pytest.mark.parametrize("slope", [50.0, -50.0, 1e30, -1e30])
@pytest.mark.parametrize("heads", [1, 20])
def test_a_factor_beyond_float32_is_infinite_and_one_below_it_zero(
    heads: int, slope: float
) -> None:
    gate = gates.Slope(torch.full((heads, 64), slope))
    for name, backend in [("", "reference"), *((name, None) for name in cpu.instruction_sets())]:
        if name:
            cpu.use_instruction_set(name)
        y = on(backend, rotate, torch.ones(1, heads, 4, 64), RopeSpec(64), gate=gate)
        assert bool((y[:, :, 3:].abs() == (math.inf if slope > 0 else 0.0)).all()), name
