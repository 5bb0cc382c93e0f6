"""What specs, frequency rules, tables and lengths refuse; more rows are in unit/refused_calls.jsonl."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.support.by_length import RULES, TRAINED, UNEQUAL, spec_of
from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, LongRoPE, Rule, YaRN
from tightrope.functional import rotate, rotate_
from tightrope.nn import RotaryEmbedding
from tightrope.spec import PreparedRotation

META, ONE = torch.device("meta"), Decimal(1)
TWO_AXES, BY_LENGTH = Axes.blocks((1, 1)), RopeSpec(8, scaling=DynamicNTK(2.0, 4))
LONGROPE = LongRoPE((1.0,) * 4, (2.0,) * 4, 4, factor=2.0)
LONG, MIXED = RopeSpec(8, scaling=LONGROPE), Given((((1.0, 0.1),), ((0.5, 9.0),)))
X, IDS = torch.zeros(2, 1, 5, 8), torch.arange(4)
# For specs of 12 channels.
WIDE, LAST, BOTH = torch.ones(2, 2, 3, 12), torch.zeros(2, 1, 1, 12), spec_of(UNEQUAL)
OF_TWO = BY_LENGTH.at(seq_len=[10, 20])
SPECS = [spec_of(rule) for rule in (None, YaRN(4.0, TRAINED), *RULES)]


def of(rule: Rule, dim: Any = 8, base: float = 1e4) -> Callable[[], object]:
    return lambda: rule.frequencies(dim, base)


@dataclass(frozen=True)
class Wrong(Rule):
    """A rule that makes something else than one frequency for each pair: other channels would rotate."""

    made: Any

    def make(self, *_: Any) -> Any:
        return self.made


def making(made: Any) -> list[Callable[[], object]]:
    return [of(Wrong(made)), lambda: RopeSpec(8, scaling=Wrong(made))]


def used(rope: PreparedRotation) -> PreparedRotation:
    """Return a rotation after a valid call: what it refuses does not depend on its past."""
    rotate(X, rope)
    return rope


def stating(seq_len: Any) -> list[Callable[[], object]]:
    """Return calls that state a length, by every rule, also by those that do not depend on it."""
    calls: list[Callable[[], object]] = []
    for spec in SPECS:
        calls += [
            lambda spec=spec: spec.at(seq_len=seq_len),
            lambda spec=spec: RotaryEmbedding(spec)(WIDE, seq_len=seq_len),
            lambda spec=spec: spec.words_for(seq_len),
            lambda spec=spec: spec.attention_scaling(seq_len),
        ]
        if not isinstance(seq_len, (torch.Tensor, list)) and numpy.ndim(seq_len) == 0:
            calls.append(lambda spec=spec: spec.frequencies(seq_len))
    return calls


def part(where: Any, *sections: int, tables: bool = False) -> list[Callable[[], object]]:
    """Return calls with three tokens that may be a part of a longer sequence."""
    axes = Axes.sections(sections) if sections else None
    specs = [replace(spec_of(rule), axes=axes) for rule in RULES]
    if tables:
        return [lambda spec=spec: spec.cos_sin(where) for spec in specs]
    return [
        call
        for spec in specs
        for call in (
            lambda spec=spec: rotate(WIDE, spec, where),
            lambda spec=spec: rotate_(WIDE, spec.at(where)),
        )
    ]


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())
