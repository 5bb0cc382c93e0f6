"""Measure a rotary function by impulses: which channels mix, and by which angle.

An x that is 1 in channel i and 0 elsewhere gives column i of the matrix that the function applies at a
position. The matrices at a few positions give pairs, direction, amplitude and frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ._guard import CallFailed
from ._subject import Subject

# Powers of two and 0, 3, 5: all dtypes represent them.
NEAR = (0, 1, 2, 3, 4, 5, 8, 16, 64)
FAR = (512, 1024, 4096, 65536, 1_048_576)
_ANGLE = 2e-4
"""Tolerance of equal angles, in radians; float32 is off by 1e-7."""


def matrices(
    subject: Subject,
    positions: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    keys: bool = False,
) -> torch.Tensor:
    """Measure the matrix at each position, float64 ``[positions, out, in]``.

    Args:
        keys: measure the function's k instead of its q.

    Raises:
        CallFailed, Hangs: as in :meth:`Subject.rotate`.
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


def responses(
    subject: Subject, shape: Shape, positions: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Measure the cosine and sine of each pair, amplitude included, float64 ``[2, positions, pairs]``.

    Raises:
        CallFailed, Hangs: as in :meth:`Subject.rotate`.
    """
    firsts = [pair.first for pair in shape.pairs]
    ends = [[shape.comes_out(channel) for channel in each] for each in zip(*shape.channels)]
    x = torch.zeros(1, subject.heads(2), len(positions), subject.head_dim, dtype=dtype)
    x[..., firsts] = 1.0
    y = subject.rotate(subject.laid_out(x), list(positions))[0, 0].detach().cpu().double()
    return torch.stack((y[:, ends[0]], y[:, ends[1]]))


@dataclass(frozen=True)
class MeasuredPair:
    """Two channels that turn together, measured at each position.

    Attributes:
        first, second: the channels, first < second.
        angle_first, angle_second: the angle in radians, by position, computed from the first and from
            the second channel's matrix row; equal for a rotation.
        amplitude: the mean length of the two rows, by position.
        skew: the largest difference between the two lengths at any position.
    """

    first: int
    second: int
    angle_first: tuple[float, ...]
    angle_second: tuple[float, ...]
    amplitude: tuple[float, ...]
    skew: float


@dataclass(frozen=True)
class Shape:
    """The measured pairs of channels.

    Attributes:
        positions: the measured positions.
        pairs: the pairs, ordered by their first channel.
        alone: channels that change but mix with no other.
        tangled: channels that mix with more than one other.
        rotary_dim: the number of channels that the pairing spans; with half pairing this includes
            pairs that never turn.
        order: the output channel of each input channel at position 0; None if none moves.
        matrices: the matrix at each position, ``[positions, out, in]``.
    """

    positions: tuple[int, ...]
    pairs: tuple[MeasuredPair, ...]
    alone: tuple[int, ...]
    tangled: tuple[int, ...]
    matrices: torch.Tensor = field(repr=False)
    order: tuple[int, ...] | None = None

    @property
    def channels(self) -> list[tuple[int, int]]:
        """The channels of each pair."""
        return [(pair.first, pair.second) for pair in self.pairs]

    def comes_out(self, channel: int) -> int:
        """Return the output channel of an input channel."""
        return channel if self.order is None else self.order[channel]

    @property
    def distances(self) -> set[int]:
        return {pair.second - pair.first for pair in self.pairs}

    @property
    def interleaved(self) -> bool | None:
        """True for interleaved, False for half; None for neither, or for a single pair of neighbours."""
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
            # Pairs that never turn, after those that do, belong to the slice.
            return 2 * min(self.distances)
        return max(pair.second for pair in self.pairs) + 1 - self.start

    @property
    def pairing(self) -> str:
        """The pairing as text."""
        names = {True: "interleaved (2i, 2i + 1)", False: "half (i, i + rotary_dim / 2)"}
        if self.interleaved is None and self.distances == {1}:
            return "one pair of neighbours"
        return names.get(self.interleaved, "neither half nor interleaved") if self.pairs else "none"  # type: ignore[arg-type]


def measure_shape(subject: Subject, *, keys: bool = False) -> Shape:
    """Measure the channel pairs of a function with impulses, at as many positions as it accepts.

    Raises:
        CallFailed, Hangs: a call fails even at the near positions.
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
    """Find the pairs of channels in matrices ``[positions, out, in]``; position 0 must come first."""
    dim = measured.shape[-1]
    order = _order(measured[0])
    seen = measured if order is None else measured[:, order]
    off = seen.abs() > 1e-9
    off[:, range(dim), range(dim)] = False
    mixes = off.any(0)
    mixes |= mixes.T.clone()
    partners = [mixes[i].nonzero().flatten().tolist() for i in range(dim)]
    pairs: list[MeasuredPair] = []
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
    """Return the permutation of channels at position 0; None if it is the identity or there is none."""
    whole = start.round()
    ones = whole.sum(0).eq(1).all() and whole.sum(1).eq(1).all() and whole.min() >= 0
    if not ones or float((start - whole).abs().max()) > 1e-4:
        return None
    order = whole.argmax(0).tolist()
    return None if order == sorted(order) else tuple(order)


def _pair(seen: torch.Tensor, u: int, v: int) -> MeasuredPair:
    uu, uv, vu, vv = seen[:, u, u], seen[:, u, v], seen[:, v, u], seen[:, v, v]
    first, second = torch.hypot(uu, uv), torch.hypot(vu, vv)
    return MeasuredPair(
        u,
        v,
        tuple(torch.atan2(-uv, uu).tolist()),
        tuple(torch.atan2(vu, vv).tolist()),
        tuple(((first + second) / 2).tolist()),
        float((first - second).abs().max()),
    )


def wrapped(angle: float) -> float:
    """Reduce an angle to [-π, π]."""
    return math.remainder(angle, 2 * math.pi)


@dataclass(frozen=True)
class Line:
    """The angle of a pair as a linear function of position: intercept + slope · position.

    Attributes:
        slope: radians per position, signed.
        intercept: the angle at position 0, in [-π, π].
    """

    slope: float
    intercept: float


def lines_of(shape: Shape) -> tuple[Line, ...]:
    """Fit a line to the angles of each pair, which are known modulo a turn.

    Slopes come from positions 2 and 3 and are refined at larger positions while all pairs agree.
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


def shift_of(lines: Sequence[Line], tolerance: float = _ANGLE) -> int:
    """Return the whole number of positions that all pairs are ahead of their frequencies; 0 if there is none."""
    candidates = [round(line.intercept / line.slope) for line in lines if abs(line.slope) > 1e-6]
    for shift in (0, *candidates):
        if all(
            agrees(line.intercept, shift * line.slope, max(tolerance, 0.02 * abs(line.slope)))
            for line in lines
        ):
            return shift
    return 0


def agrees(a: float, b: float, tolerance: float = _ANGLE) -> bool:
    """True if two angles are equal within a tolerance, modulo a turn."""
    return abs(wrapped(a - b)) <= tolerance
