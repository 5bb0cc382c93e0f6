"""Calls that are refused, as rows of refused_calls.jsonl; and gates of another device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import stated
from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, gates, nn, positions
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.backends import use
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    rotary_pos_embedding,
    rotate,
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
MAKERS = positions.Positions, RMSNorm, gates.Exp, gates.Slope, gates.Given, gates.Factor
test_calls = refused_calls(
    Path(__file__).with_name("refused_calls.jsonl"),
    {
        **{verb.__name__: stating(verb) for verb in VERBS},
        **{each.__name__: each for each in (*OTHERS, *MAKERS)},
        "RotaryPositionalEmbedding": nn.RotaryPositionalEmbedding(8),
    },
    globals(),
)


@pytest.mark.parametrize("gate", [gates.Scalar, gates.Exp, gates.Slope, gates.Given, gates.Factor])
def test_a_gate_of_the_meta_device(gate: Callable[[torch.Tensor], Any]) -> None:
    """It may be on another device if x has no data, unless it learns."""
    shape = {gates.Scalar: (), gates.Given: (5, 1, 8)}.get(gate, (8,))
    there = X.to("meta")
    for device in ("cpu", "meta"):
        assert rotate(there, SPEC, gate=gate(torch.ones(shape, device=device))).is_meta
    with pytest.raises(ValueError, match=r"is on cpu but x is on meta; put both on one device\.$"):
        rotate(there, SPEC, gate=gate(torch.ones(shape, requires_grad=True)))
