"""The audit condemns no correct function: forms crossed with pairings, slices, layouts, rules and dtypes."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support import correct_functions
from tests.support.correct_functions import Case
from tightrope_tools.audit import audit

ALL = list(correct_functions.cases())
CHOSEN = random.Random(7).sample(ALL, 300)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.parametrize("declared", [True, False])
def test_a_correct_function_is_not_condemned(case: Case, declared: bool) -> None:
    # Positions are (tokens,) for packed sequences, and tables end at 5,000.
    report = audit(
        case.make(),
        spec=case.spec if declared else None,
        head_dim=correct_functions.DIM,
        layout=case.layout,
        longest=2**14,
    )
    assert report.codes == (), str(report)


def test_the_functions_are_many() -> None:
    assert len(CHOSEN) >= 300
    for name in ("form", "where", "rule", "layout"):
        assert {getattr(case, name) for case in CHOSEN} == {getattr(case, name) for case in ALL}


def test_they_rotate() -> None:
    case = next(case for case in ALL if case.rule == "plain" and case.form == "x, positions")
    x = torch.randn(1, 1, 3, correct_functions.DIM)
    assert not torch.equal(case.make()(x, torch.arange(3)[None]), x)
