"""Check every contender of every case, then time the contenders of each case in turns."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ..speed import FLOORS, Case, Contender, measure
from ..speed._measure import Expected, check, inputs
from .cases import CASES, sized, small
from .contenders import CONTENDERS, OURS
from .plugin import OPTIONS, read_units

pytestmark = pytest.mark.usefixtures("device")

_OFTEN = {"runs": 1, "rounds": 1} if OPTIONS.dry else {"runs": 3, "rounds": 30}
_PAIRS = [
    pytest.param(case, one, id=f"{case.name} | {one.name}")
    for case in CASES
    for one in CONTENDERS
    if one.why_not(case) is None and one.name not in FLOORS
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small(case: Case, dtype: str) -> None:
    """This library gives right results in every case, at sizes that do not fill whole tiles."""
    case = replace(case, dtype=dtype, neighbours=False, graph=False)
    for tokens in (1,) if case.tokens == 1 else (5,) if OPTIONS.dry else (1, 37, 300):
        k_heads = 5 if case.q_heads == case.k_heads else 2
        sizes = {} if OPTIONS.dry else {"q_heads": 5, "k_heads": k_heads, "head_dim": 128}
        here = replace(sized(small(case, tokens)), **sizes)
        given = inputs(here)
        check(OURS, here, *given, Expected(here, *given))


@pytest.mark.parametrize("case, contender", _PAIRS)
def test_right(case: Case, contender: Contender) -> None:
    """Compile a contender and compare each element with float64, in parallel with other workers.

    The compiled kernels are cached on disk for the timing.
    """

    def work() -> None:
        here = sized(case)
        given = inputs(here)
        check(contender, here, *given, Expected(here, *given))

    for _ in range(3):
        # Other workers use the memory too.
        with suppress(torch.OutOfMemoryError):
            return _unless_other(contender, work)
        torch.cuda.empty_cache()
        time.sleep(5)
    return _unless_other(contender, work)


def _unless_other(contender: Contender, work: Any) -> None:
    """Call `work`; skip the test if another library's contender fails."""
    try:
        work()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if contender is OURS:
            raise
        pytest.skip(f"{type(error).__name__}: {error}"[:1000])


def lost(case: Case, units: list[dict[str, Any]]) -> dict[str, str]:
    """Return the contenders that were wrong or crashed in a case, with the reason."""
    return {
        unit["contender"]: unit["note"].splitlines()[0][:300] if unit["note"] else unit["outcome"]
        for unit in units
        if unit.get("case") == case.name
        and unit.get("contender", OURS.name) != OURS.name
        and unit["outcome"] not in ("passed", "no time")
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_time(case: Case, record: dict[str, Any]) -> None:
    """Time the contenders of a case, without those that were found wrong or that crashed."""
    without = lost(case, read_units(Path(OPTIONS.results)))
    there = [one for one in CONTENDERS if one.name not in without]
    record |= measure(sized(case), there, **_OFTEN, wanted=re.compile(""))
    record["absent"] |= without
