"""The slice of a head that rotates, and the pairing of its channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._errors import as_real, bad_type, bad_value, check_flag, plain_integer


@dataclass(frozen=True)
class Channels:
    """The slice of a head that rotates, and the pairing of its channels.

    Attributes:
        head_dim, start, rotary_dim, interleaved: see :class:`tightrope.RopeSpec`.
    """

    head_dim: int
    start: int
    rotary_dim: int
    interleaved: bool

    @classmethod
    def checked(
        cls, head_dim: object, rotary_dim: object, start: object, interleaved: Any
    ) -> Channels:
        """Validate a user's values; ``rotary_dim=None`` means all channels from ``start`` on.

        Args:
            head_dim, rotary_dim, start, interleaved: see :class:`tightrope.RopeSpec`.

        Raises:
            ValueError: a negative ``head_dim``, an odd ``rotary_dim``, or channels outside the
                head.
            TypeError: a size that is not an int, or ``interleaved`` not a bool.

        >>> Channels.checked(64, None, 16, False).rotary_dim
        48
        """
        head, first = plain_integer("head_dim", head_dim), plain_integer("start", start)
        if head < 0:
            raise bad_value(f"head_dim must not be negative but got {head}")
        if rotary_dim is None and not 0 <= first <= head:
            raise bad_value(f"start must lie in [0, {head}] but got {first}")
        part = as_real(rotary_dim)
        if part is not None and part < 1 and part * head >= 2:
            raise bad_type(
                f"rotary_dim must be a number of channels but got {rotary_dim}; that part of {head} is "
                f"rotary_dim={int(part * head)}"
            )
        width = head - first if rotary_dim is None else plain_integer("rotary_dim", rotary_dim)
        if width % 2 and width > 0:
            default = ", its default of head_dim - start" if rotary_dim is None else ""
            raise bad_value(
                f"rotary_dim must be even but got {width}{default}; rotary_dim={width - 1} leaves the last "
                "channel as it is"
            )
        if first < 0 or width < 0 or first + width > head:
            raise bad_value(
                f"channels [start, start + rotary_dim) must lie in [0, {head}) but got "
                f"[{first}, {first + width})"
            )
        check_flag("interleaved", interleaved)
        return cls(head, first, width, interleaved)

    @property
    def pairs(self) -> int:
        """Number of pairs that rotate."""
        return self.rotary_dim // 2

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Expand one value per pair to one per channel; 0 for channels that do not rotate.

        >>> Channels(6, 0, 4, False).spread(torch.tensor([1, 2])).tolist()
        [1, 2, 1, 2, 0, 0]
        >>> Channels(6, 2, 4, True).spread(torch.tensor([1, 2])).tolist()
        [0, 0, 1, 1, 2, 2]
        """
        values = values.expand(*values.shape[:-1], self.pairs)
        parts = (values, values)
        both = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        if self.rotary_dim == self.head_dim:
            return both
        after = self.head_dim - self.start - self.rotary_dim
        return torch.nn.functional.pad(both, (self.start, after))


def split_pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second channels of the pairs."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def join_pairs(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Undo :func:`split_pairs`."""
    if interleaved:
        return torch.stack((first, second), -1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    return torch.cat((first, second), -1)


def by_head(ids: torch.Tensor, before: int = 2) -> torch.Tensor:
    """View ids as ``[…, heads|1, tokens|1, 1]``, to broadcast with angles or channels.

    Args:
        ids: ``[…, tokens|1]`` or ``[…, tokens|1, heads]``.
        before: number of dimensions before that of the tokens.
    """
    if ids.dim() == before + 1:
        return ids.unsqueeze(before).unsqueeze(-1)
    return ids.transpose(before, before + 1).unsqueeze(-1)
