"""The rotations that a rotary function can compute on one tensor, and their definition in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from tightrope.channels import join_pairs, split_pairs

HALF, INTERLEAVED = "half", "interleaved"

#: The table entries for the channels u and v of pair k, with P pairs in all. The first two read one
#: entry for u and another for v, and are rotations only if both are equal. The others read one
#: entry for both: "k of 2P" is entry k of a table with 2P entries.
READINGS = {
    "cat": "k for u and k + P for v",
    "repeat": "2k for u and 2k + 1 for v",
    "first": "k of 2P",
    "second": "k + P of 2P",
    "even": "2k of 2P",
    "odd": "2k + 1 of 2P",
    "even, odd": "2k of 2P cosines and 2k + 1 of 2P sines",
    "half": "k of P",
}


@dataclass(frozen=True)
class Rotation:
    """A rotation of the channels of a head by a row of cosines and a row of sines.

    Attributes:
        pairs: the pairing of the input, "half" (rotate_half) or "interleaved" (adjacent pairs).
        out: the pairing in whose order the rotated channels are returned.
        reading: a key of READINGS.
        slice: the rotated channels: "first", "last", or "whole" if all channels must be rotated.
        sign: 1; −1 for a rotation by the negative angles; 0 if the entries of the sines for u, the first channel
            of each pair, are those of −sin.
    """

    pairs: str
    out: str
    reading: str
    slice: str
    sign: int

    def pairs_of(self, width: int) -> int:
        """The number of pairs that tables of this width rotate."""
        return width if self.reading == "half" else width // 2

    @property
    def width(self) -> str:
        """The key of WIDTHS for tables of this reading."""
        if self.reading == "half":
            return "half"
        return "repeat" if self.reading in ("repeat", "even", "odd", "even, odd") else "cat"

    @property
    def aligned(self) -> bool:
        """True if full-width tables have the entry for a channel at the channel's own index."""
        return self.reading == ("cat" if self.pairs == HALF else "repeat")

    def fits(self, channels: int, width: int) -> bool:
        """Return True if tables of this width can rotate heads with this number of channels."""
        if self.reading != "half" and width % 2:
            return False
        rotated = 2 * self.pairs_of(width)
        return rotated == channels or (rotated < channels and self.slice != "whole")

    def start(self, channels: int, width: int) -> int:
        """The first rotated channel."""
        return channels - 2 * self.pairs_of(width) if self.slice == "last" else 0

    def __str__(self) -> str:
        pairing = {HALF: "rotate_half", INTERLEAVED: "adjacent pairs (GPT-J style)"}[self.pairs]
        channels = {
            "first": "the first rotary_dim channels",
            "last": "the last rotary_dim channels",
            "whole": "all channels",
        }[self.slice]
        words = [f"{pairing} on {channels}"]
        if self.out != self.pairs:
            words.append(f"returned {'as halves' if self.out == HALF else 'interleaved'}")
        words.append(
            {
                "cat": f"cos/sin of full width{'' if self.aligned else ' (two equal halves)'}",
                "repeat": f"cos/sin of full width{'' if self.aligned else ' (interleaved)'}",
                "first": "cos/sin of full width (first half read)",
                "second": "cos/sin of full width (second half read)",
                "even": "cos/sin of full width (even entries read)",
                "odd": "cos/sin of full width (odd entries read)",
                "even, odd": "cos/sin of full width (even entries of cos, odd ones of sin read)",
                "half": "cos/sin of half width",
            }[self.reading]
        )
        if self.sign != 1:
            words.append("negative angles" if self.sign else "sines of u negated")
        return ", ".join(words)


def candidates() -> Iterator[Rotation]:
    """Yield every rotation that a function is compared with."""
    orders = (HALF, INTERLEAVED)
    for values in product(orders, orders, READINGS, ("first", "last"), (1, -1, 0)):
        rotation = Rotation(*values)
        if rotation.sign or rotation.aligned:
            yield rotation


def entries(table: torch.Tensor, reading: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of a table, along its last dimension, that multiply u and v."""
    if reading == "half":
        return table, table
    first, second = split_pairs(table, reading in ("repeat", "even", "odd"))
    if reading in ("first", "even"):
        return first, first
    if reading in ("second", "odd"):
        return second, second
    return first, second


def both_entries(
    cos: torch.Tensor, sin: torch.Tensor, reading: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """:func:`entries` of the cosines and of the sines."""
    of_cos, of_sin = ("even", "odd") if reading == "even, odd" else (reading, reading)
    return entries(cos, of_cos), entries(sin, of_sin)


def plain(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation
) -> torch.Tensor:
    """Rotate x in plain torch by tables of the same dtype that broadcast against it."""
    channels, width = x.shape[-1], cos.shape[-1]
    count = rotation.pairs_of(width)
    start = rotation.start(channels, width)
    part = x[..., start : start + 2 * count]
    u, v = split_pairs(part, rotation.pairs == INTERLEAVED)
    (c_u, c_v), (s_u, s_v) = both_entries(cos, sin, rotation.reading)
    s_u = s_u if rotation.sign > 0 else -s_u
    s_v = -s_v if rotation.sign < 0 else s_v
    turned = join_pairs(u * c_u - v * s_u, v * c_v + u * s_v, rotation.out == INTERLEAVED)
    return torch.cat((x[..., :start], turned, x[..., start + 2 * count :]), dim=-1)
