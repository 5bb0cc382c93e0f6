"""The ways in which other libraries call rotary functions, and the rotations of these functions.

Code that tests or replaces an unknown rotary function tries the entries of :data:`FORMS`. To support
another way of passing angles, add an entry.
"""

from ._calls import (
    Argument as Argument,
    Call as Call,
    calls_of as calls_of,
    signature as signature,
    unwrapped as unwrapped,
)
from ._layouts import (
    ARRANGEMENTS as ARRANGEMENTS,
    WIDTHS as WIDTHS,
    Arrangement as Arrangement,
    widen as widen,
)
from ._registry import COS_SIN as COS_SIN, FORMS as FORMS, Form as Form
from ._rotation import (
    HALF as HALF,
    INTERLEAVED as INTERLEAVED,
    Rotation as Rotation,
    both_entries as both_entries,
    candidates as candidates,
    entries as entries,
    plain as plain,
)
