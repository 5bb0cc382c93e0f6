"""Benchmark rotations against memory traffic and other installed libraries.

    import re
    from benchmarks.speed import CONTENDERS, SUITES, measure

    measure(SUITES["short"][0], CONTENDERS, runs=1, rounds=7, wanted=re.compile("neg_|^eager"))

The method is described in :mod:`benchmarks.speed.method`.
"""

from __future__ import annotations

from . import method as method, runtimes as runtimes
from ._measure import measure as measure
from .case import Case as Case, in_both as in_both
from .contender import (
    FLOORS as FLOORS,
    Contender as Contender,
    Made as Made,
    floor_of as floor_of,
)
from .contenders import CONTENDERS as CONTENDERS
from .suites import SUITES as SUITES

__all__ = ["CONTENDERS", "SUITES", "Case", "Contender", "measure"]
