"""RopeSpec: a rotary embedding as one frozen value, and rotations prepared from it.

From the bottom up: ``_lengths`` (lengths of sequences), ``_words`` (phase words for any length and device),
``_prepared`` (a rotation at given positions) and ``_rope`` (RopeSpec and its dictionaries).
"""

from __future__ import annotations

from ._lengths import LONGEST as LONGEST, Lengths as Lengths, SeqLen as SeqLen
from ._prepared import (
    Angles as Angles,
    PhasesLike as PhasesLike,
    PreparedRotation as PreparedRotation,
    prepared as prepared,
    warn_of_rounding as warn_of_rounding,
)
from ._rope import VERSION as VERSION, Rope as Rope, RopeSpec as RopeSpec

__all__ = ["PreparedRotation", "RopeSpec", "SeqLen"]
