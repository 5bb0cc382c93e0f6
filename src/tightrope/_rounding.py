"""Where a rotation rounds: the names, and the check of the argument that has them."""

from __future__ import annotations

from typing import TypeAlias

from ._errors import bad_value

#: "once": at the store, after fused multiply-adds in float32. "wide": products and their sum, each to float32.
#: "each": products, from float32, and their sum, each to the dtype of x. For float64 x, float64 replaces float32.
ROUNDINGS = ("once", "wide", "each")

#: One of ROUNDINGS, or a pair of them: forward and backward.
RoundingLike: TypeAlias = str | tuple[str, str]

#: The default: the most exact.
ONCE = ("once", "once")


def rounding_pair(value: object) -> tuple[str, str]:
    """Check ``rounding=`` of a public function, and return the rounding forward and backward."""
    both = value if isinstance(value, tuple) else (value, value)
    if len(both) != 2 or not all(isinstance(one, str) and one in ROUNDINGS for one in both):
        raise bad_value(
            f"rounding must be {', '.join(map(repr, ROUNDINGS[:-1]))} or {ROUNDINGS[-1]!r}, or a pair "
            f"of them for forward and backward, but got {value!r}"
        )
    return both


def codes_of(rounding: tuple[str, str]) -> tuple[int, int]:
    """Return the indices into ROUNDINGS, as the operators take them.

    >>> codes_of(("wide", "each"))
    (1, 2)
    """
    return ROUNDINGS.index(rounding[0]), ROUNDINGS.index(rounding[1])
