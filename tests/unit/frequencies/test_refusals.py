"""What frequency rules refuse."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.support.helpers import refusals
from tightrope.frequencies import (
    NTK,
    DynamicNTK,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rule,
    YaRN,
)

ONE = (1.0,)
# Calls with a number that must be positive, by the name in the error.
NUMBERS: dict[str, Callable[[Any], Rule]] = {
    "[Linear] factor": Linear,
    "[NTK] factor": NTK,
    "[DynamicNTK] factor": lambda bad: DynamicNTK(bad, 4096),
    "[YaRN] factor": lambda bad: YaRN(bad, 4096),
    "[YaRN] beta_fast": lambda bad: YaRN(4.0, 4096, beta_fast=bad),
    "[YaRN] beta_slow": lambda bad: YaRN(4.0, 4096, beta_slow=bad),
    "[YaRN] attention_factor": lambda bad: YaRN(4.0, 4096, attention_factor=bad),
    "[LongRoPE] factor": lambda bad: LongRoPE(ONE, ONE, 9, factor=bad),
    "[LongRoPE] long_factor[0]": lambda bad: LongRoPE(ONE, (bad,), 9, factor=1.0),
    "[LongRoPE] short_factor[1]": lambda bad: LongRoPE((1.0, bad), ONE, 9),
    "[LongRoPE] long_mscale": lambda bad: LongRoPE(ONE, ONE, 9, long_mscale=bad),
    "[Llama3] factor": lambda bad: Llama3(bad, 1.0, 4.0, 8192),
    "[Llama3] low_freq_factor": lambda bad: Llama3(8.0, bad, 4.0, 8192),
    "[Llama3] high_freq_factor": lambda bad: Llama3(8.0, 1.0, bad, 8192),
    "[Proportional] factor": lambda bad: Proportional(0.5, bad),
}


def each(make: Callable[[Any], object], *values: Any) -> list[Callable[[], object]]:
    return [lambda value=value: make(value) for value in values]


test_numbers = refusals(
    ValueError={
        f"{name} must be positive and finite": each(make, 0, -1.0, math.nan, math.inf, 10**400)
        for name, make in NUMBERS.items()
    },
    TypeError={
        f"{name} must be a number": each(make, True, "4", 1j, [4.0], torch.tensor(4.0))
        for name, make in NUMBERS.items()
        if name == "[Linear] factor"
    },
)
test_rules = refusals(
    ValueError={
        "[Llama3] original_max_position must be at least 1": lambda: Llama3(8.0, 1.0, 4.0, 0),
        "[YaRN] original_max_position must be at most 2147483648": lambda: YaRN(4.0, 2**31 + 1),
        # ln 1 = 0 would be a divisor.
        "[LongRoPE] original_max_position must be at least 2": (
            lambda: LongRoPE(ONE, ONE, 1, factor=2.0)
        ),
        "[YaRN] mscale must be at least 0": lambda: YaRN(4.0, 4096, mscale=-1.0),
        "[YaRN] beta_fast must be at least beta_slow": (
            lambda: YaRN(4.0, 4096, beta_fast=1.0, beta_slow=32.0)
        ),
        "[YaRN] base must be above 1 but got 1.0": lambda: YaRN(4.0, 4096).frequencies(64, 1.0),
        "[LongRoPE] short_factor and long_factor must have the same length": (
            lambda: LongRoPE(ONE, (1.0, 2.0), 4096, factor=2.0)
        ),
        "[LongRoPE] short_factor and long_factor must have one number per pair, 4, but got 1": (
            lambda: LongRoPE(ONE, ONE, 4096, factor=2.0).frequencies(8, 1e4)
        ),
        "[LongRoPE] short_mscale and long_mscale must be given together": (
            lambda: LongRoPE(ONE, ONE, 4096, short_mscale=1.0)
        ),
        "[LongRoPE] attention_factor must not be given together with short_mscale": (
            lambda: LongRoPE(ONE, ONE, 4096, None, 1.0, 1.5, 2.0)
        ),
        "[LongRoPE] factor (the longest length / original_max_position), attention_factor, or": (
            lambda: LongRoPE(ONE, ONE, 4096)
        ),
        "[Llama3] high_freq_factor must be at least low_freq_factor": (
            lambda: Llama3(8.0, 5.0, 4.0, 8192)
        ),
        "[Proportional] rotary_fraction must be at most 1": lambda: Proportional(1.5),
        "[Proportional] rotary_fraction must be at least 0": lambda: Proportional(-0.5),
        "[Linear] base must be positive": lambda: Linear(2.0).frequencies(8, -1.0),
        "[Linear] rotary_dim must be even and not negative": each(
            lambda dim: Linear(2.0).frequencies(dim, 1e4), 7, -2
        ),
        "[Given] inv_freq must be nested as (pairs,), (heads, pairs) or (axes, heads, pairs)": [
            lambda: Given(1.0),
            lambda: Given.of(torch.ones(1, 1, 1, 1)),
        ],
        "[Given.of] inv_freq must have at least one head and axis": (
            lambda: Given.of(torch.ones(2, 0, 4))
        ),
        "[Given] inv_freq must be nested evenly": each(Given, (ONE, (1.0, 2.0)), (1.0, ONE)),
        "[Given] inv_freq must be finite": lambda: Given((1.0, math.nan)),
        "[Given] inv_freq must have one number per pair, 4, but got 1": (
            lambda: Given(ONE).frequencies(8, 1e4)
        ),
        "[Given] every frequency must stay below 1e+18": (
            lambda: Given((1.0, -2e18)).frequencies(4, 1e4)
        ),
        "[Linear] every frequency must stay below": lambda: Linear(1e-20).frequencies(4, 1e4),
        "[from_dict] rule must be one of": each(
            Rule.from_dict, {"rule": "quadratic"}, {"factor": 1.0}, {"rule": ["linear"]}
        ),
        "[from_dict] rule 'ntk' must have only the keys factor but got alpha": (
            lambda: Rule.from_dict({"rule": "ntk", "factor": 1.0, "alpha": 2.0})
        ),
        "[from_dict] rule 'dynamic' must have all required keys but lacks original_max_position": (
            lambda: Rule.from_dict({"rule": "dynamic", "factor": 1.0})
        ),
    },
    TypeError={
        "[Linear] rotary_dim must be an int": lambda: Linear(2.0).frequencies(8.0, 1e4),
        "[YaRN] original_max_position must be an int": each(
            lambda bad: YaRN(4.0, bad), True, "4096", 4096.0, None
        ),
        "[YaRN] truncate must be a bool": lambda: YaRN(4.0, 4096, truncate=1),
        "[YaRN] mscale must be a number": lambda: YaRN(4.0, 4096, mscale="1"),
        "[LongRoPE] short_factor must be a sequence of numbers": (
            lambda: LongRoPE(1.0, ONE, 4096, factor=2.0)
        ),
        "[Given] inv_freq must hold numbers": lambda: Given(("fast",)),
        "got a tensor; call Given.of": lambda: Given(torch.ones(2)),
        "[Given.of] inv_freq must be a floating tensor": each(
            Given.of, torch.ones(2).long(), [1.0]
        ),
    },
)
