"""What specs, frequency rules, tables and lengths refuse; more rows are in unit/refusals.jsonl."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec, positions, rotate
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Linear, LongRoPE, Rule, YaRN

META = torch.device("meta")
TWO_AXES, BY_LENGTH = Axes.blocks((1, 1)), RopeSpec(8, scaling=DynamicNTK(2.0, 4))
LONGROPE = LongRoPE((1.0,) * 4, (2.0,) * 4, 4, factor=2.0)
LONG, MIXED = RopeSpec(8, scaling=LONGROPE), Given((((1.0, 0.1),), ((0.5, 9.0),)))
X, IDS = torch.zeros(2, 1, 5, 8), torch.arange(4)


def of(rule: Rule, dim: Any = 8, base: float = 1e4) -> Callable[[], object]:
    return lambda: rule.frequencies(dim, base)


test_specs = refusals(
    TypeError={
        "[RopeSpec] base must be a number": [
            lambda base=base: RopeSpec(8, base=base) for base in (1j, torch.tensor(1e4))
        ],
        "[RopeSpec] only head_dim may be given without a name": lambda: RopeSpec(64, 32),
        "theta; base may be meant": lambda: dataclasses.replace(RopeSpec(64), theta=1e4),
        "[RopeSpec] scaling must be a rule of tightrope.frequencies": [
            lambda scaling=scaling: RopeSpec(64, scaling=scaling)
            for scaling in (torch.ones(32), Linear)
        ],
        "[from_dict] a spec must be a dictionary": lambda: RopeSpec.from_dict(RopeSpec(8)),
        "[Linear] rotary_dim must be an int": of(Linear(2.0), 8.0),
        "got a tensor; call Given.of": lambda: Given(torch.ones(2)),
        "[Given.of] inv_freq must be a floating tensor": lambda: Given.of(IDS),
    },
    ValueError={
        "[RopeSpec] base must be positive and finite": lambda: RopeSpec(8, base=10**305),
        "in [0, 32) but got [0, 64)": lambda: dataclasses.replace(RopeSpec(64), head_dim=32),
        "one entry for each of the 4 pairs that rotate but got 8; count pairs, not channels": (
            lambda: RopeSpec(8, axes=Axes.blocks((4, 4)))
        ),
        "but got 2; rotary_dim=4 would fit": lambda: RopeSpec(8, axes=TWO_AXES),
        "if the given frequencies have axes of their own": (
            lambda: RopeSpec(4, axes=TWO_AXES, scaling=MIXED)
        ),
        "[Linear] factor must be positive and finite": lambda: Linear(10**400),
        "[Linear] base must be positive": of(Linear(2.0), base=-1.0),
        "[Linear] rotary_dim must be even and not negative": [of(Linear(2.0), n) for n in (7, -2)],
        "[YaRN] base must be above 1 but got 1.0": of(YaRN(4.0, 4096), base=1.0),
        "[LongRoPE] short_factor and long_factor must have one number per pair, 3": of(LONGROPE, 6),
        "[Given] inv_freq must have one number per pair, 4, but got 1": of(Given((1.0,))),
        "[Given] every frequency must stay below 1e+18": of(Given((1.0, -2e18)), 4),
        "[Linear] every frequency must stay below": of(Linear(1e-20)),
        "[Given.of] inv_freq must have at least one head and axis": (
            lambda: Given.of(torch.ones(2, 0, 4))
        ),
    },
)
test_tables = refusals(
    "cos_sin",
    ValueError={
        "tables must be one of cat, repeat, half, full": (
            lambda: RopeSpec(8).cos_sin(seq_len=3, tables="both")
        ),
        "for positions 0 to n - 1 pass seq_len=n": lambda: RopeSpec(8).cos_sin(),
        "got 5; pass ids or tightrope.positions.explicit": lambda: RopeSpec(8).cos_sin(5),
        "positions must have 1 axis for this spec but got 3": (
            lambda: RopeSpec(8).cos_sin(positions.multi_axis(IDS.expand(3, 2, 4)))
        ),
        "seq_len must be at least 4, the": lambda: BY_LENGTH.cos_sin(IDS, seq_len=3),
    },
    TypeError={
        "dtype must be float32, float64, bfloat16 or float16": (
            lambda: RopeSpec(8).cos_sin(seq_len=3, dtype=torch.int64)
        ),
        "must be an int but got int64[4]; pass positions": lambda: BY_LENGTH.cos_sin(seq_len=IDS),
    },
)
test_lengths = refusals(
    ValueError={
        "[rotate] seq_len must be one length but got 2 (layout 'thd' has no rows)": (
            lambda: rotate(X[0], LONG.at(seq_len=torch.tensor([2, 3])), layout="thd")
        ),
        "[rotate] seq_len must be one length, or one for each of 2 rows, but got 3": [
            lambda lengths=lengths: rotate(X, BY_LENGTH.at(seq_len=lengths))
            for lengths in ([5000, 6000, 7000], [5, 6, 7])
        ],
        "[seq_len] lengths must have data but are on the meta device": (
            lambda: rotate(X, BY_LENGTH.at(seq_len=torch.tensor(5, device=META)))
        ),
        "[seq_len] a length must not be negative": lambda: BY_LENGTH.cos_sin(seq_len=-1),
    },
)
