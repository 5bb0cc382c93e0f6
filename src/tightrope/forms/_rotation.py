"""What a rotary function can compute on one tensor, as a value; and its definition in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

HALF, INTERLEAVED = "half", "interleaved"

#: How entries of a table belong to the channels u and v of a pair k of P. The first two read one entry
#: for u and another for v, and are rotations only where a table holds each twice.
READINGS = {
    "cat": "k for u and k + P for v",
    "repeat": "2k for u and 2k + 1 for v",
    "first": "k of 2P",
    "second": "k + P of 2P",
    "even": "2k of 2P",
    "odd": "2k + 1 of 2P",
    "half": "k of P",
}


@dataclass(frozen=True)
class Rotation:
    """A linear map of the channels of a head, by a row of cosines and one of sines.

    Attributes:
        pairs: which channels make a pair: "half" or "interleaved".
        out: in which of these orders the rotated channels leave.
        reading: a key of READINGS.
        slice: where the rotated channels are, if there are others: "first", "last", or "whole" where
            there must not be others.
        sign: 1, or −1 for a rotation by the negative angles.
    """

    pairs: str
    out: str
    reading: str
    slice: str
    sign: int

    def pairs_of(self, width: int) -> int:
        """How many pairs tables of a width rotate."""
        return width if self.reading == "half" else width // 2

    @property
    def width(self) -> str:
        """How tables hold the entries that are read, of WIDTHS."""
        if self.reading == "half":
            return "half"
        return "repeat" if self.reading in ("repeat", "even", "odd") else "cat"

    @property
    def assumes(self) -> str | None:
        """How tables must hold entries twice for this to be a rotation; None where one is read."""
        return self.reading if self.reading in ("cat", "repeat") else None

    def fits(self, channels: int, width: int) -> bool:
        """Whether tables of this width can rotate heads of so many channels."""
        if self.reading != "half" and width % 2:
            return False
        rotated = 2 * self.pairs_of(width)
        return rotated == channels or (rotated < channels and self.slice != "whole")

    def start(self, channels: int, width: int) -> int:
        """The first rotated channel."""
        return channels - 2 * self.pairs_of(width) if self.slice == "last" else 0

    def __str__(self) -> str:
        words = ["interleaved pairs" if self.pairs == INTERLEAVED else "half pairs"]
        if self.out != self.pairs:
            words.append(f"leaving in {self.out} order")
        words.append(
            {"first": "first channels", "last": "last channels", "whole": "whole width"}[self.slice]
        )
        words.append(
            {
                "cat": "tables with halves twice",
                "repeat": "tables with entries twice",
                "first": "first half of its tables",
                "second": "second half of its tables",
                "even": "even entries of its tables",
                "odd": "odd entries of its tables",
                "half": "tables with an entry per pair",
            }[self.reading]
        )
        if self.sign < 0:
            words.append("negative angles")
        return ", ".join(words)


def candidates() -> Iterator[Rotation]:
    """Everything that a function is tested against."""
    orders = (HALF, INTERLEAVED)
    for values in product(orders, orders, READINGS, ("first", "last"), (1, -1)):
        yield Rotation(*values)


def entries(table: torch.Tensor, reading: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What of a table, by its last dimension, u and v are multiplied by."""
    if reading == "half":
        return table, table
    pairs = table.shape[-1] // 2
    if reading in ("cat", "first", "second"):
        first, second = table[..., :pairs], table[..., pairs:]
    else:
        first, second = table[..., 0::2], table[..., 1::2]
    if reading in ("first", "even"):
        return first, first
    if reading in ("second", "odd"):
        return second, second
    return first, second


def plain(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation, dtype: torch.dtype
) -> torch.Tensor:
    """The definition: tables that broadcast against x; one rounding, to dtype, at the end.

    Arithmetic is in float32, or in float64 where anything is.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    channels, width = x.shape[-1], cos.shape[-1]
    count = rotation.pairs_of(width)
    start = rotation.start(channels, width)
    part = x if 2 * count == channels else x[..., start : start + 2 * count]
    if rotation.pairs == HALF:
        u, v = part[..., :count], part[..., count:]
    else:
        u, v = part[..., 0::2], part[..., 1::2]
    u, v = u.to(wide), v.to(wide)
    c_u, c_v = entries(cos.to(wide), rotation.reading)
    s_u, s_v = entries(sin.to(wide), rotation.reading)
    if rotation.sign < 0:
        s_u, s_v = -s_u, -s_v
    first, second = (u * c_u - v * s_u).to(dtype), (v * c_v + u * s_v).to(dtype)
    if rotation.out == HALF:
        turned = torch.cat((first, second), dim=-1)
    else:
        turned = torch.stack((first, second), dim=-1).flatten(-2)
    if 2 * count == channels:
        return turned
    rest = x.to(dtype)
    if start:
        return torch.cat((rest[..., :start], turned), dim=-1)
    return torch.cat((turned, rest[..., 2 * count :]), dim=-1)
