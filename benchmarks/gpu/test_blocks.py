"""Block shapes other than those in `backends/triton/blocks.py`, timed relative to a copy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ..speed import CONTENDERS, Case, measure
from .cases import CASES, sized
from .plugin import OPTIONS

pytestmark = pytest.mark.usefixtures("device")

#: Case -> the name in `blocks.py` that it varies: a table of shapes, or `PROGRAMS`, the number of
#: tiles below which heads are divided among several programs.
_VARIED = {
    "prefill 32k": "PLAIN",
    "12 x 32768, 12 heads": "PLAIN",
    "silu 32k": "HEAVY",
    "decode 256, graph": "PROGRAMS",
    "decode 32, graph": "PROGRAMS",
}
_TILES = ((512, 2), (512, 4), (1024, 2), (1024, 8), (2048, 4), (2048, 8), (4096, 8))
_SHAPES = (
    {},  # as in the table
    *({"together": n} for n in (1, 2, 4, 8)),
    *({"registers": n} for n in (0, 64, 96, 128)),
    *({"pairs": pairs, "warps": warps, "registers": 0} for pairs, warps in _TILES),
)
_PROGRAMS = ({}, *({"programs": n} for n in (64, 128, 256, 1024, 2048)))
_UNITS = [
    pytest.param(case, change, id=f"{case.name} | {change or 'as in the table'}")
    for turn in range(max(len(_SHAPES), len(_PROGRAMS)))
    for case in CASES
    if case.name in _VARIED
    for change in (_PROGRAMS if _VARIED[case.name] == "PROGRAMS" else _SHAPES)[turn : turn + 1]
]


@pytest.mark.parametrize("case, change", _UNITS)
def test_blocks(
    case: Case, change: dict[str, int], record: dict[str, Any], monkeypatch: Any
) -> None:
    """Time one block shape or value of `PROGRAMS`, after checking the result."""
    from tightrope.backends.triton import blocks, rotation

    table = _VARIED[case.name]
    if table == "PROGRAMS":
        monkeypatch.setattr(blocks, table, change.get("programs", blocks.PROGRAMS))
    else:
        shape = getattr(blocks, table)[2]._replace(**change)
        monkeypatch.setitem(getattr(blocks, table), 2, shape)
    rotation._plans.clear()
    record |= {"change": change}
    often = {"runs": 1, "rounds": 1} if OPTIONS.dry else {"runs": 3, "rounds": 20}
    try:
        record |= measure(sized(case), CONTENDERS, **often, wanted=re.compile("^(clone|neg_)$"))
    finally:
        rotation._plans.clear()
