"""What a rotary function does, from its answers to impulses: which channels mix, and by which angle.

For each channel i an x that is 1 there and 0 elsewhere; the answers are the columns of the matrix that
the function multiplies by at a position. From matrices at a few positions follow pairs, direction,
amplitude and frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ._guard import CallFailed
from ._subject import Subject

# Powers of two, which every type represents, and a few others.
NEAR = (0, 1, 2, 3, 4, 5, 8, 16, 64)
FAR = (512, 1024, 4096, 65536, 1_048_576)
_ANGLE = 2e-4
"""How far apart two angles must be, in radians, to count as different; float32 has 1e-7."""


def matrices(
    subject: Subject,
    positions: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    keys: bool = False,
) -> torch.Tensor:
    """The matrix at each position, float64 ``[positions, out, in]``.

    Args:
        keys: of the function's k instead of its q.

    Raises:
        CallFailed, Hangs: as of :meth:`Subject.rotate`.
    """
    dim, count = subject.head_dim, len(positions)
    eye = torch.eye(dim, dtype=dtype)
    heads = subject.heads(2)
    x = subject.laid_out(eye[:, None, None, :].expand(dim, heads, count, dim))
    if not keys:
        y = subject.rotate(x, positions)
    elif subject.most_rows == 1:
        rows = [subject.rotate_qk(row.clone(), row, positions)[1] for row in x.split(1)]
        y = torch.cat(rows)
    else:
        y = subject.rotate_qk(x.clone(), x, positions)[1]
    return y[:, 0].detach().cpu().double().permute(1, 2, 0)


@dataclass(frozen=True)
class Pair:
    """Two channels that turn together, and what they do at each measured position.

    Attributes:
        first, second: the channels, first < second.
        angle_first, angle_second: the angle that the rows of the first and of the second channel
            show, radians, by position; equal for a rotation.
        amplitude: the mean length of the two rows, by position.
        skew: how far the lengths of the rows are apart, at most.
    """

    first: int
    second: int
    angle_first: tuple[float, ...]
    angle_second: tuple[float, ...]
    amplitude: tuple[float, ...]
    skew: float


@dataclass(frozen=True)
class Shape:
    """Which channels mix with which.

    Attributes:
        positions: where it was measured.
        pairs: ordered by their first channel.
        alone: channels that mix with no other but do not stay what they are.
        tangled: channels that mix with more than one other.
        rotary_dim: how many channels the pairing spans, with those between that never move.
        order: where the channels come out at position 0, if not where they went in.
        matrices: as measured.
    """

    positions: tuple[int, ...]
    pairs: tuple[Pair, ...]
    alone: tuple[int, ...]
    tangled: tuple[int, ...]
    matrices: torch.Tensor = field(repr=False)
    order: tuple[int, ...] | None = None

    @property
    def channels(self) -> list[tuple[int, int]]:
        """The channels of each pair."""
        return [(pair.first, pair.second) for pair in self.pairs]

    def comes_out(self, channel: int) -> int:
        """Where the result has what x has in a channel."""
        return channel if self.order is None else self.order[channel]

    @property
    def distances(self) -> set[int]:
        return {pair.second - pair.first for pair in self.pairs}

    @property
    def interleaved(self) -> bool | None:
        """The pairing; None where it is neither."""
        if self.distances == {1}:
            return True if len(self.pairs) > 1 or self.rotary_dim > 2 else None
        if len(self.distances) == 1 and self.rotary_dim == 2 * min(self.distances):
            return False
        return None

    @property
    def start(self) -> int:
        return min((pair.first for pair in self.pairs), default=0)

    @property
    def rotary_dim(self) -> int:
        if not self.pairs:
            return 0
        if len(self.distances) == 1 and self.distances != {1}:
            # Pairs that never turn lie behind those that do: they belong to the slice.
            return 2 * min(self.distances)
        return max(pair.second for pair in self.pairs) + 1 - self.start

    @property
    def pairing(self) -> str:
        """The pairing in words."""
        said = {True: "interleaved (2i, 2i + 1)", False: "half (i, i + rotary_dim / 2)"}
        if self.interleaved is None and self.distances == {1}:
            return "one pair of neighbours"
        return said.get(self.interleaved, "neither half nor interleaved") if self.pairs else "none"  # type: ignore[arg-type]


def measure_shape(subject: Subject, *, keys: bool = False) -> Shape:
    """The shape of a function, from impulses at as many positions as it takes.

    Raises:
        CallFailed, Hangs: not even the nearest positions can be asked.
    """
    positions = list(NEAR)
    seen = matrices(subject, positions, keys=keys)
    if subject.call.takes_ids or "offset" in subject.call.roles:
        far = FAR if subject.call.takes_ids else ()
        for position in far:
            try:
                more = matrices(subject, [position], keys=keys)
            except CallFailed:
                break
            if not bool(more.isfinite().all()):
                break
            positions.append(position)
            seen = torch.cat((seen, more))
    else:
        try:
            more = matrices(subject, (*NEAR, 512), keys=keys)[-1:]
            positions.append(512)
            seen = torch.cat((seen, more))
        except CallFailed:
            pass
    return shape_of(seen, positions)


def shape_of(measured: torch.Tensor, positions: Sequence[int]) -> Shape:
    """The shape that matrices ``[positions, out, in]`` have, the first of them at position 0."""
    dim = measured.shape[-1]
    order = _order(measured[0])
    seen = measured if order is None else measured[:, order]
    off = seen.abs() > 1e-9
    off[:, range(dim), range(dim)] = False
    mixes = off.any(0)
    mixes |= mixes.T.clone()
    partners = [mixes[i].nonzero().flatten().tolist() for i in range(dim)]
    pairs: list[Pair] = []
    alone: list[int] = []
    tangled: list[int] = []
    for i, others in enumerate(partners):
        if len(others) > 1 or (others and partners[others[0]] != [i]):
            tangled.append(i)
        elif others and others[0] > i:
            pairs.append(_pair(seen, i, others[0]))
        elif not others:
            moved = bool(((seen[:, i, i] - 1).abs() > 1e-6).any())
            if moved:
                alone.append(i)
    shape = tuple(positions), tuple(pairs), tuple(alone), tuple(tangled)
    return Shape(*shape, measured, order)


def _order(start: torch.Tensor) -> tuple[int, ...] | None:
    """Where channels come out at position 0, if that is a mere change of places."""
    whole = start.round()
    ones = whole.sum(0).eq(1).all() and whole.sum(1).eq(1).all() and whole.min() >= 0
    if not ones or float((start - whole).abs().max()) > 1e-4:
        return None
    order = whole.argmax(0).tolist()
    return None if order == sorted(order) else tuple(order)


def _pair(seen: torch.Tensor, u: int, v: int) -> Pair:
    uu, uv, vu, vv = seen[:, u, u], seen[:, u, v], seen[:, v, u], seen[:, v, v]
    first, second = torch.hypot(uu, uv), torch.hypot(vu, vv)
    return Pair(
        u,
        v,
        tuple(torch.atan2(-uv, uu).tolist()),
        tuple(torch.atan2(vu, vv).tolist()),
        tuple(((first + second) / 2).tolist()),
        float((first - second).abs().max()),
    )


def wrapped(angle: float) -> float:
    """An angle in [-π, π]."""
    return math.remainder(angle, 2 * math.pi)


@dataclass(frozen=True)
class Line:
    """The angle of a pair as a line over positions: intercept + slope · position.

    Attributes:
        slope: radians per position, signed.
        intercept: the angle at position 0, in [-π, π].
    """

    slope: float
    intercept: float


def lines_of(shape: Shape) -> tuple[Line, ...]:
    """The line of each pair, through angles that are known modulo a turn.

    Slopes come from positions 2 and 3 and are sharpened at each power of two where all pairs agree.
    """
    angles = [dict(zip(shape.positions, pair.angle_first, strict=True)) for pair in shape.pairs]
    slopes = [wrapped(at[3] - at[2]) for at in angles]

    def intercepts() -> list[float]:
        return [wrapped(at[2] - 2 * slope) for at, slope in zip(angles, slopes, strict=True)]

    for position in (4, 8, 16, 64, 512, 1024, 4096, 65536):
        if position not in shape.positions:
            continue
        start = intercepts()
        rests = [
            wrapped(at[position] - first - slope * position)
            for at, first, slope in zip(angles, start, slopes, strict=True)
        ]
        if max(map(abs, rests)) > 0.3:
            break
        slopes = [slope + rest / position for slope, rest in zip(slopes, rests, strict=True)]
    return tuple(Line(slope, first) for slope, first in zip(slopes, intercepts(), strict=True))


def agrees(a: float, b: float, tolerance: float = _ANGLE) -> bool:
    """Whether two angles are the same, modulo a turn."""
    return abs(wrapped(a - b)) <= tolerance
