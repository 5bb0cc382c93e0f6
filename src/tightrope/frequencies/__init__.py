"""Frequency rules: the rotation speed of each channel pair, in radians per position.

A rule is a pure function from rotary dimension, base and sequence length to :class:`Frequencies`.
Frequencies are decimals with far more digits than float64, because a phase word has 64 significant
bits and the last one must be correct.

``_rule`` has the base class. The rules are grouped by how they compute frequencies: ``_row`` (one
geometric row), ``_blend`` (kept and slowed pairs, with a blend between them) and ``_lists`` (one
given number per pair).

A new rule is one frozen dataclass that derives from :class:`Rule`: :class:`tightrope.RopeSpec`, its
dictionaries and the configuration reader find it by its ``names`` and ``keys``. See
docs/write.md for an example.
"""

from __future__ import annotations

from ._blend import Llama3 as Llama3, YaRN as YaRN
from ._lists import Given as Given, LongRoPE as LongRoPE
from ._row import (
    NTK as NTK,
    DynamicNTK as DynamicNTK,
    Linear as Linear,
    Proportional as Proportional,
    default as default,
)
from ._rule import (
    CONTEXT as CONTEXT,
    LONGEST as LONGEST,
    RULES as RULES,
    TWO_PI as TWO_PI,
    Frequencies as Frequencies,
    Keys as Keys,
    Rule as Rule,
    length as length,
)

__all__ = [
    "CONTEXT",
    "LONGEST",
    "NTK",
    "TWO_PI",
    "DynamicNTK",
    "Frequencies",
    "Given",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Proportional",
    "Rule",
    "YaRN",
]
