"""RopeSpec: a rotary embedding as one frozen value, and the rotations that it prepares.

From the bottom up: ``_lengths`` (how long sequences are), ``_device_cache`` (tensors kept on each
device), ``_unread`` (lengths that nothing may read), ``_tables`` (phase words for any length and
device), ``_prepared`` (a rotation at given positions) and ``_rope`` (the value that users write, with
its dictionaries).
"""

from __future__ import annotations

from ._lengths import SeqLen as SeqLen
from ._prepared import Memo as Memo, PreparedRotation as PreparedRotation
from ._rope import VERSION as VERSION, RopeSpec as RopeSpec
