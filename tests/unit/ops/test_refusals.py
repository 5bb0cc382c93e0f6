"""Calls that are refused, as rows of refused_calls.jsonl; and gates of another device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import stated
from tests.support.helpers import refused
from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, gates, nn, positions
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.backends import use
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
    write_kv,
)

SPEC, X = RopeSpec(8), torch.zeros(2, 4, 5, 8)


def stating(verb: Callable[..., Any]) -> Callable[..., object]:
    """Return a function of tensors by their names, and of a `spec`, by default of 8 channels, or what its `at` makes."""

    def call(spec: Any = None, prepared: Any = None, **values: Any) -> object:
        given = {"head_dim": 8} if spec is None else spec
        axes = {"axes": Axes.blocks(tuple(given["axes"]))} if "axes" in str(given) else {}
        rope = RopeSpec(**given | axes) if isinstance(given, dict) else given
        rope = rope if prepared is None else rope.at(**prepared)
        xs = [values.pop(name) for name in "xqkv" if name in values]
        where = [values.pop("positions")] if "positions" in values else []
        if "gate" in values:  # so that the next call may take the fast path
            stated.call(verb, *xs, rope, *where, **{**values, "gate": None})
        return stated.call(verb, *xs, rope, *where, **values)

    return call


VERBS = rotate, rotate_qk, write_kv
OTHERS = lrpe_rotate_1d, apply_rotary_pos_emb, rotary_pos_embedding, use, positions.shard
MAKERS = positions.Positions, RMSNorm, gates.Exp, gates.Slope, gates.Given
test_calls = refused_calls(
    Path(__file__).with_name("refused_calls.jsonl"),
    {
        **{verb.__name__: stating(verb) for verb in VERBS},
        **{each.__name__: each for each in (*OTHERS, *MAKERS)},
        "RotaryPositionalEmbedding": nn.RotaryPositionalEmbedding(8),
    },
    {},
)


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
