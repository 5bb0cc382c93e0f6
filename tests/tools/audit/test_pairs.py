"""Declared frequencies on pairs of other channels than declared: a fault of the pairing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import planted_faults as planted
from tests.support.planted_faults import named
from tightrope import RopeSpec
from tightrope.frequencies import Proportional
from tightrope_tools.audit import audit

QUICK: dict[str, Any] = {"dtypes": [torch.float32], "longest": 4096}
NARROW = planted.rope(rotary_dim=24, over=64)
RATES = torch.where(torch.arange(32) < 12, planted.inv_freq(), 0.0)
# A function, its spec, how the channels are paired and should be, and what its frequencies are.
CASES: dict[str, tuple[planted.Fn, RopeSpec, str, str]] = {
    "a part of them": (
        NARROW,
        RopeSpec(64),
        "i with i + 12; i with i + 32",
        "the first 12 of 32 declared ones",
    ),
    "all that turn": (
        NARROW,
        RopeSpec(64, scaling=Proportional(0.375)),
        "i with i + 12; i with i + 32",
        "the declared ones",
    ),
    "wider": (
        planted.by_rates(RATES),
        RopeSpec(64, base=10_000 ** (24 / 64), rotary_dim=24),
        "i with i + 32; i with i + 12",
        "the declared ones",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_pairing_is_named_and_no_base_of_the_slice(name: str) -> None:
    function, spec, paired, frequencies = CASES[name]
    report = named(audit(function, spec=spec, **QUICK), "pairing")
    assert report.findings[0].sentence == f"Channels are paired {paired} was declared."
    assert report.facts["frequencies"] == frequencies


def test_a_slice_that_starts_elsewhere_is_still_a_slice() -> None:
    function = planted.rope(rotary_dim=24, start=8)
    report = named(audit(function, spec=RopeSpec(64, rotary_dim=24), **QUICK), "slice")
    assert report.facts["frequencies"] == "the declared ones"


def test_blocks_of_half_pairs_where_one_was_declared() -> None:
    one = planted.rope(rotary_dim=32)

    def blocks(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.cat((one(x[..., :32], positions), one(x[..., 32:], positions)), -1)

    report = named(audit(blocks, spec=RopeSpec(64), **QUICK), "pairing")
    wanted = "Channels are paired i with i + 16; i with i + 32 was declared."
    assert report.findings[0].sentence == wanted
