"""RopeSpec: a rotary embedding as one frozen value, and what it prepares for a forward pass.

From the bottom up: ``_lengths`` (how long sequences are), ``_tables`` (phase words by device and
length), ``_prepared`` (a rotation at given positions) and ``_rope`` (the value that users write, with
its dictionaries).
"""

from __future__ import annotations

from ._lengths import SeqLen as SeqLen
from ._prepared import Memo as Memo, PreparedRotation as PreparedRotation
from ._rope import VERSION as VERSION, RopeSpec as RopeSpec
