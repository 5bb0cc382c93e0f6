"""What specs, their dictionaries, tables and lengths refuse."""

import dataclasses
import math

import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec, positions, rotate
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Linear, LongRoPE, Rule

META = torch.device("meta")
TWO_AXES, BY_LENGTH = Axes.blocks((1, 1)), RopeSpec(8, scaling=DynamicNTK(2.0, 4))
LONG = RopeSpec(8, scaling=LongRoPE((1.0,) * 4, (2.0,) * 4, 4, factor=2.0))
MIXED = Given((((1.0, 0.1),), ((0.5, 9.0),)))
SAVED = {"version": 1, "head_dim": 2}
X, IDS = torch.zeros(5, 8), torch.arange(4)

test_specs = refusals(
    "RopeSpec",
    TypeError={
        "base must be a number": [
            lambda base=base: RopeSpec(8, base=base)
            for base in (True, "10000", None, 1j, torch.tensor(1e4))
        ],
        "must be an int": [
            lambda name=name, value=value: RopeSpec(**{"head_dim": 8, name: value})
            for name in ("head_dim", "rotary_dim", "start")
            for value in (True, 4.0, "4")
        ],
        "interleaved must be a bool": lambda: RopeSpec(8, interleaved=1),
        "only head_dim may be given without a name": lambda: RopeSpec(64, 32),
        "got theta; base may be meant": [
            lambda: RopeSpec(64, theta=1e4),
            lambda: dataclasses.replace(RopeSpec(64), theta=1e4),
        ],
        "scaling must be a rule of tightrope.frequencies": [
            lambda: RopeSpec(64, scaling=torch.ones(32)),
            lambda: RopeSpec(8, scaling=Linear),
        ],
        "RopeSpec.from_config reads configurations": (
            lambda: RopeSpec(8, scaling={"rope_type": "yarn"})
        ),
        "axes must be an Axes": lambda: RopeSpec(8, axes=2),
    },
    ValueError={
        "rotary_dim must be even but got 7, its default of head_dim - start; rotary_dim=6 leaves": (
            lambda: RopeSpec(7)
        ),
        "rotary_dim must be even but got 7; rotary_dim=6": lambda: RopeSpec(8, rotary_dim=7),
        "must lie in [0, 8) but got [0, 10)": lambda: RopeSpec(8, rotary_dim=10),
        "must lie in [0, 8) but got [6, 10)": lambda: RopeSpec(8, rotary_dim=4, start=6),
        "must lie in [0, 8) but got [-2, 2)": lambda: RopeSpec(8, rotary_dim=4, start=-2),
        "must lie in [0, 8) but got [4, 2)": lambda: RopeSpec(8, rotary_dim=-2, start=4),
        "channels [start, start + rotary_dim)": (
            lambda: dataclasses.replace(RopeSpec(64), head_dim=32)
        ),
        "head_dim must not be negative": lambda: RopeSpec(-4),
        "start must lie in [0, 8]": [lambda: RopeSpec(8, start=-1), lambda: RopeSpec(8, start=9)],
        "base must be positive and finite": [
            lambda base=base: RopeSpec(8, base=base)
            for base in (0, -1.0, 1e-30, 10**305, math.nan, math.inf, -math.inf)
        ],
        "one entry for each of the 4 pairs that rotate but got 8; count pairs, not channels": (
            lambda: RopeSpec(8, axes=Axes.blocks((4, 4)))
        ),
        "but got 2; rotary_dim=4 would fit": lambda: RopeSpec(8, axes=TWO_AXES),
        "if the given frequencies have axes of their own": (
            lambda: RopeSpec(4, axes=TWO_AXES, scaling=MIXED)
        ),
    },
)
test_dictionaries = refusals(
    "from_dict",
    TypeError={
        "a spec must be a dictionary": [
            lambda: RopeSpec.from_dict("{}"),
            lambda: RopeSpec.from_dict(RopeSpec(8)),
        ],
        "a rule must be a dictionary": lambda: Rule.from_dict(Linear(2.0)),
        "scaling must be a dictionary": lambda: RopeSpec.from_dict({**SAVED, "scaling": "yarn"}),
    },
    ValueError={
        "version must be 1": [
            lambda version=version: RopeSpec.from_dict({**SAVED, "version": version})
            for version in (2, True, torch.ones(2))
        ],
        "but got None; pass the result of to_dict": lambda: RopeSpec.from_dict({"head_dim": 8}),
        "only the keys head_dim, base, rotary_dim, start, interleaved, scaling, axes but got rope_theta": (
            lambda: RopeSpec.from_dict({**SAVED, "rope_theta": 1e4})
        ),
        "lacks head_dim": lambda: RopeSpec.from_dict({"version": 1}),
        "axes must have only the keys count, pairs but got names": (
            lambda: RopeSpec.from_dict({**SAVED, "axes": {"count": 1, "pairs": [], "names": "t"}})
        ),
        "axes must have all required keys but lacks count, pairs": (
            lambda: RopeSpec.from_dict({**SAVED, "axes": {}})
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
        "seq_len must be at least 4, the largest position plus 1": (
            lambda: BY_LENGTH.cos_sin(IDS, seq_len=3)
        ),
    },
    TypeError={
        "dtype must be float32, float64, bfloat16 or float16": (
            lambda: RopeSpec(8).cos_sin(seq_len=3, dtype=torch.int64)
        ),
        "seq_len must be an int but got int64[4]; pass positions": (
            lambda: BY_LENGTH.cos_sin(seq_len=IDS)
        ),
    },
)
test_lengths = refusals(
    ValueError={
        "[rotate] seq_len must be one length but got 2 (layout 'thd' has no rows)": (
            lambda: rotate(X[:, None], LONG, seq_len=torch.tensor([2, 3]), layout="thd")
        ),
        "[rotate] seq_len must be None with a prepared rotation": (
            lambda: rotate(X, BY_LENGTH.at(), seq_len=5, layout="sd")
        ),
        "[rotate] seq_len must be one length, or one for each of 2 rows, but got 3": [
            lambda lengths=lengths: rotate(X.expand(2, 1, 5, 8), BY_LENGTH, seq_len=lengths)
            for lengths in ([5000, 6000, 7000], [5, 6, 7])
        ],
        "[seq_len] lengths must have data but are on the meta device": (
            lambda: rotate(X, BY_LENGTH, layout="sd", seq_len=torch.tensor(5, device=META))
        ),
        "[seq_len] a length must not be negative": [
            lambda: LONG.at(seq_len=[5, -5]),
            lambda: BY_LENGTH.cos_sin(seq_len=-1),
        ],
    },
)
