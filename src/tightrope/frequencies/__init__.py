"""Frequency rules: how fast each channel pair turns.

A rule is a pure function from (rotary dimension, base, length of the sequence) to
:class:`Frequencies`. Frequencies are exact decimals with far more digits than a float64 has, because
a phase word has 64 significant bits and its last bit must be right.

``_rule`` has what all rules share. The rules are grouped by how they make a frequency: ``_row`` (one
geometric row), ``_blend`` (kept and slowed pairs with a blend between) and ``_lists`` (a number for
every pair).

A new rule is one class in one of these files: :class:`tightrope.RopeSpec`, its dictionaries and the
reading of configurations find a frozen dataclass that derives from :class:`Rule` by its ``names`` and
``keys``. docs/extending.md shows one.
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
