"""Inspect a model's rotary embedding, and compare those of two models.

    from tightrope_tools.inspect import compare, inspect

    found = inspect("config.json")
    found.parts[0].pairs[-1].wavelength
    compare(found, inspect("other/config.json")).alike

Pictures: :mod:`tightrope_tools.inspect.plot`, which needs matplotlib.
"""

from __future__ import annotations

from ._compare import Comparison as Comparison, compare as compare
from .exactness import Exactness as Exactness
from .notes import Note as Note
from .pairs import PairRow as PairRow
from .report import Inspection as Inspection, PartReport as PartReport, inspect as inspect
from .subject import Field as Field, Part as Part

__all__ = [
    "Comparison",
    "Exactness",
    "Field",
    "Inspection",
    "Note",
    "PairRow",
    "Part",
    "PartReport",
    "compare",
    "inspect",
]
