"""Specs whose frequency rules depend on the length, and what they are compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import oracle, oracle_frequencies as truth
from tests.support.tolerances import Result, assert_rotated, dynamic_drift
from tightrope import RopeSpec
from tightrope.frequencies import DynamicNTK, LongRoPE, Rule

TRAINED = 4096
SHORT, LONG = (1.0, 1.05, 1.1, 2.0), (1.0, 3.0, 17.5, 64.0)
# Unequal mscales, like PhiMoE's.
UNEQUAL = LongRoPE(SHORT, LONG, TRAINED, short_mscale=1.25, long_mscale=1.5)


def rule_of(name: str, trained: int = TRAINED, factor: float = 32.0) -> Rule:
    """Return a rule by its name, with an original length, and the factor of longrope."""
    if name == "dynamic":
        return DynamicNTK(2.0, trained)
    return LongRoPE(SHORT, LONG, trained, factor=factor)


RULES: dict[str, Rule] = {name: rule_of(name) for name in ("dynamic", "longrope")}
every_rule = pytest.mark.parametrize("rule", RULES)


def spec_of(rule: str | Rule, interleaved: bool = False) -> RopeSpec:
    """Return a spec of 12 channels; the 8 in the middle rotate."""
    made = RULES[rule] if isinstance(rule, str) else rule
    return RopeSpec(12, base=10000.0, rotary_dim=8, start=2, interleaved=interleaved, scaling=made)


def amplitude(rule: Rule | None, length: int) -> float:
    return float(truth.attention_of(rule, length))


def exact(
    x: torch.Tensor, spec: RopeSpec, ids: list[float], length: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row rotated by the papers' formulas in float64, and the lengths of its rotated pairs."""
    place = {"start": spec.start, "interleaved": spec.interleaved}
    layout = "bhsd"[-x.dim() :]
    y = oracle.rotate(
        x, ids, truth.of(spec.scaling, 8, 10000.0, length), layout=layout, **place, **options
    )
    lengths = oracle.pair_lengths(x, 8, **place)
    scale = amplitude(spec.scaling, length)
    scale = 1 / scale if options.get("inverse") else scale
    return torch.where(lengths > 0, y * scale, y), lengths * scale


def assert_exact(
    got: torch.Tensor,
    x: torch.Tensor,
    spec: RopeSpec,
    ids: list[float],
    length: int,
    **options: Any,
) -> None:
    wanted, lengths = exact(x, spec, ids, length, **options)
    reach, drift = max(map(abs, ids), default=0.0), 0.0
    rule = spec.scaling
    if isinstance(rule, DynamicNTK):
        drift = dynamic_drift(rule.factor, rule.original_max_position, length)
    assert_rotated([Result(got, wanted, lengths, reach, drift)])
