"""What specs, frequency rules, tables and lengths refuse; more rows are in unit/refused_calls.jsonl."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, LongRoPE, Rule

META = torch.device("meta")
TWO_AXES, BY_LENGTH = Axes.blocks((1, 1)), RopeSpec(8, scaling=DynamicNTK(2.0, 4))
LONGROPE = LongRoPE((1.0,) * 4, (2.0,) * 4, 4, factor=2.0)
LONG, MIXED = RopeSpec(8, scaling=LONGROPE), Given((((1.0, 0.1),), ((0.5, 9.0),)))
X, IDS = torch.zeros(2, 1, 5, 8), torch.arange(4)


def of(rule: Rule, dim: Any = 8, base: float = 1e4) -> Callable[[], object]:
    return lambda: rule.frequencies(dim, base)


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())
