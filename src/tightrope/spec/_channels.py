"""Which channels of a head rotate, and which of them are pairs."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from .._errors import sentence


@dataclass(frozen=True)
class Channels:
    """The slice of a head that rotates, and how its channels are paired.

    Attributes:
        head_dim, rotary_dim, start, interleaved: as of :class:`tightrope.RopeSpec`.
    """

    head_dim: int
    rotary_dim: int
    start: int
    interleaved: bool

    @classmethod
    def checked(
        cls,
        head_dim: object,
        rotary_dim: object,
        start: object,
        interleaved: object,
        operation: str = "RopeSpec",
    ) -> Channels:
        """From what a user wrote; ``rotary_dim=None`` is all channels from ``start`` on.

        Args:
            head_dim, rotary_dim, start, interleaved: as of :class:`tightrope.RopeSpec`.
            operation: named in errors.

        Raises:
            ValueError: an odd number of channels, or channels outside the head.
            TypeError: sizes that are no ints, a pairing that is no bool.

        >>> Channels.checked(64, None, 16, False).rotary_dim
        48
        """
        head, first = _size(operation, "head_dim", head_dim), _size(operation, "start", start)
        if rotary_dim is None and not 0 <= first <= max(head, 0):
            raise ValueError(sentence(operation, f"start must lie in [0, {head}] but got {first}"))
        width = head - first if rotary_dim is None else _size(operation, "rotary_dim", rotary_dim)
        if width % 2:
            raise ValueError(sentence(operation, f"rotary_dim must be even but got {width}"))
        if first < 0 or width < 0 or first + width > head:
            raise ValueError(
                sentence(
                    operation,
                    f"channels [start, start + rotary_dim) must lie in [0, {head}) but got "
                    f"[{first}, {first + width})",
                )
            )
        if not isinstance(interleaved, bool):
            raise TypeError(
                sentence(operation, f"interleaved must be a bool but got {interleaved!r}")
            )
        return cls(head, width, first, interleaved)


def _size(operation: str, name: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(sentence(operation, f"{name} must be an int but got {value}"))
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(sentence(operation, f"{name} must be an int but got {value!r}")) from None
