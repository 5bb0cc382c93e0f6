"""The measurement of a rotary function: its matrices at positions 0 to 15, and the profile that they give.

The near matrices predict the results of other calls. They also give pairs, direction and factor. Then one x that is 1
in the first channel of each pair gives the cosines and sines of all pairs at the positions of a call, as complex numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tightrope_tools.forms import Pair, pairs_in

from ._call import CallFailed, Subject

NEAR = 16
"""The positions whose matrices are measured: 0 to 15."""
_SAME = 4e-5
"""Largest difference from a predicted result: float32 products of numbers below 5, and factors below 2, give 1e-6."""
#: Integers up to 2^24 are exact in float32, and so is their product with a frequency if they are powers of two; other
#: positions show how positions and angles are rounded.
_POWERS = [2**n for n in range(4, 21)]
#: Positions, some of which bfloat16 (above 256) or float16 (above 2048) cannot represent.
ODD = (0, 3, 37, 255, 257, 301, 515, 1003, 2051, 4099, 9999)
DENSE = 2048
"""The number of positions from 0 on that are tested in one call."""
_COUNTED = 2**12
"""The largest position to measure if the function numbers tokens itself."""
_UNITS = 5
"""Angles whose cosines and sines are equal but for their last bit differ by at most so many units of it."""
_ANGLE = 2e-4
"""Tolerance of equal angles, in radians; float32 is off by 1e-7."""
SHORT = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
NARROW = (torch.bfloat16, torch.float16)


# --- near matrices --------------------------------------------------------------------------------


def gaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the differences, of complex numbers the larger of both parts; infinite where one value alone is NaN."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.is_complex():
        return gaps(torch.view_as_real(a), torch.view_as_real(b)).amax(-1)
    same = (a == b) | (a.isnan() & b.isnan())
    return (a.double() - b.double()).abs().masked_fill(same, 0.0).nan_to_num(math.inf)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference; infinite if one value is NaN and the other is not."""
    return float(gaps(a, b).max()) if a.numel() else 0.0


def matrices(subject: Subject, positions: Sequence[int]) -> torch.Tensor:
    """Measure the matrix at each position, float64 ``[positions, out, in]``: a call for each channel.

    Raises:
        CallFailed: as in :meth:`Subject.rotate`.
    """
    columns = []
    for channel in range(subject.head_dim):
        x = torch.zeros(1, 1, len(positions), subject.head_dim)
        x[..., channel] = 1.0
        y = subject.rotate(subject.laid_out(x), positions)
        columns.append(y[0, 0].detach().cpu().double())
    return torch.stack(columns, -1)


@dataclass(frozen=True)
class Near:
    """The matrices at positions 0 to 15, float64 ``[positions, out, in]``."""

    matrices: torch.Tensor

    @classmethod
    def of(cls, subject: Subject) -> Near:
        """Measure a function."""
        return cls(matrices(subject.fresh(), range(NEAR)))

    @property
    def is_finite(self) -> bool:
        """False if some entry is NaN or infinite."""
        return bool(self.matrices.isfinite().all())

    @property
    def tolerance(self) -> float:
        """The largest difference from a predicted result that is a matter of rounding."""
        return _SAME * max(1.0, float(self.matrices.abs().max()))

    def predicted(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return what x ``[rows, heads, tokens, channels]`` should become at ids ``[rows, tokens]`` below 16."""
        maps = self.matrices[ids.cpu()]
        return torch.einsum("rtij,rhtj->rhti", maps, x.detach().cpu().double())

    def off(self, y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> float:
        """Return by how much a result differs from the predicted one; 0 if roundings explain it."""
        size = apart(y, self.predicted(x, ids))
        return size if size > self.tolerance else 0.0

    def matches(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """True where a token of a call comes out as if at a position from 0 to 15, ``[rows, tokens, positions]``."""
        every = torch.einsum("pij,rhtj->rhtpi", self.matrices, x.detach().cpu().double())
        gap = (y.detach().cpu().double()[..., None, :] - every).abs().amax((1, 4))
        return gap <= self.tolerance


# --- pairs and angles -----------------------------------------------------------------------------


def wrapped(angle: torch.Tensor) -> torch.Tensor:
    """Reduce angles to [-π, π]."""
    return angle - 2 * math.pi * torch.round(angle / (2 * math.pi))


def agree(
    a: torch.Tensor, b: torch.Tensor | float, tolerance: torch.Tensor | float
) -> torch.Tensor:
    """True where angles are equal within a tolerance, modulo a turn."""
    return wrapped(a - b).abs() <= tolerance


def turned(angle: torch.Tensor) -> torch.Tensor:
    """The cosines and sines of angles, as complex numbers."""
    return torch.polar(torch.ones_like(angle), angle)


class Angles(NamedTuple):
    """The dtypes that reproduce a function's angles: of positions, of frequencies and of their product."""

    positions: torch.dtype
    frequencies: torch.dtype
    product: torch.dtype

    def __str__(self) -> str:
        exact = self.product == torch.float64
        name = "more exact than float32" if exact else SHORT[self.product]
        for what, dtype in (("positions", self.positions), ("frequencies", self.frequencies)):
            name += f", of {what} in {SHORT[dtype]}" * (dtype in NARROW)
        return name

    def at(self, positions: Sequence[int], omegas: torch.Tensor, after: int = 0) -> torch.Tensor:
        """Return the angles ``[positions, pairs]`` in the dtype of the product.

        Args:
            after: a part of the positions that is added after they are rounded.
        """
        where = torch.tensor(list(positions), dtype=torch.float64)[:, None]
        p = _cast(where - after, self.positions) + after
        rates = _cast(omegas, self.frequencies)
        if self.product == torch.float64:
            return p * rates
        return (p.float() * rates.float()).to(self.product)


@dataclass
class Profile:
    """The measured steps of one function.

    Attributes:
        subject: the function.
        order: the output channel of each input channel at position 0; None if none moves.
        pairs: the pairs of channels, ordered by their first channel.
        alone: channels that change but mix with no other.
        tangled: channels that mix with more than one other.
        firsts, seconds: the cosines and sines of each pair at the near positions, complex ``[positions, pairs]``,
            measured on its first and on its second channel; equal for a rotation.
        omegas: the frequency of each pair, signed, to about 1e-13 radians per position.
        intercepts: the angle of each pair at position 0, from the angles at positions 2 and 3.
        amplitude: the factor on the rotated channels.
        table: the narrowest dtype that holds its cosines and sines for float32 x, without the factor.
        reach: the first position that the function does not accept, or that is not measured.
        shift: the function rotates position p - shift as position p should be rotated.
        farthest: the largest position from which the frequencies were measured.
        rounded: the 16-bit dtype of the angles for float32 x; None if they are more exact.
        widths: the errors of the frequencies if angles are rounded.
    """

    subject: Subject
    order: tuple[int, ...] | None
    pairs: tuple[Pair, ...]
    alone: tuple[int, ...]
    tangled: tuple[int, ...]
    firsts: torch.Tensor
    seconds: torch.Tensor
    omegas: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    intercepts: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    amplitude: float = 1.0
    table: torch.dtype = torch.float32
    reach: int = NEAR
    shift: int = 0
    farthest: int = 3
    rounded: torch.dtype | None = None
    widths: torch.Tensor | float = 0.0

    @property
    def noise(self) -> float:
        """The largest error of a measured angle, in radians."""
        return _UNITS * torch.finfo(self.table).eps

    @property
    def blur(self) -> torch.Tensor:
        """The largest error of each measured frequency."""
        return torch.full_like(self.omegas, self.noise / self.farthest) + self.widths

    @property
    def least(self) -> float:
        """The smallest angle at position 0 that can be measured, in radians."""
        return max(1e-4, 2 * self.noise)

    @property
    def starts(self) -> torch.Tensor:
        """The angle of each pair where position 0 should be, in radians; 0 if it is too small to measure."""
        start = wrapped(self.intercepts - self.shift * self.omegas)
        return torch.where(start.abs() < self.least, 0.0, start)

    @property
    def sign(self) -> float:
        """+1 if it turns the first channel of a pair towards the second, else -1."""
        return 1.0 if float(self.omegas.sum()) >= 0 else -1.0

    @property
    def distance(self) -> int:
        """The distance between the two channels of each pair; 0 if it differs from pair to pair."""
        found = {pair.second - pair.first for pair in self.pairs}
        return found.pop() if len(found) == 1 else 0

    @property
    def interleaved(self) -> bool | None:
        """True for interleaved, False for half; None for neither, or for a single pair of neighbours."""
        if self.distance == 1:
            return True if self.rotary_dim > 2 else None
        return False if self.blocks == 1 else None

    @property
    def blocks(self) -> int:
        """The number of blocks of half pairs, one after the other; 0 if the pairs are no such blocks."""
        width = 2 * self.distance
        if width <= 2:
            return 0
        places = [divmod(pair.first - self.start, width) for pair in self.pairs]
        inside = all(place < self.distance for _, place in places)
        return len({block for block, _ in places}) if inside else 0

    @property
    def start(self) -> int:
        """The first channel that turns."""
        return min((pair.first for pair in self.pairs), default=0)

    @property
    def rotary_dim(self) -> int:
        """The number of channels that the pairing spans; for half pairing with pairs that never turn."""
        if self.distance > 1:
            return 2 * self.distance
        return max((pair.second + 1 for pair in self.pairs), default=0) - self.start

    @property
    def pairing(self) -> str:
        """The pairing as text."""
        if self.interleaved is None:
            return (
                "one pair of neighbours" if self.distance == 1 else "neither half nor interleaved"
            )
        return "interleaved (2i, 2i + 1)" if self.interleaved else "half (i, i + rotary_dim / 2)"

    @property
    def slots(self) -> list[Pair]:
        """All pairs of the slice, those that never turn included; needs a pairing."""
        return pairs_in(self.start, self.rotary_dim, bool(self.interleaved))

    def comes_out(self, channel: int) -> int:
        """Return the output channel of an input channel."""
        return channel if self.order is None else self.order[channel]

    def given(self, positions: Sequence[int]) -> list[int]:
        """Return the positions to pass to the function for these positions."""
        return [position - self.shift for position in positions]

    def tables(
        self, positions: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Measure the cosine and sine of each pair, amplitude included, complex128 ``[positions, pairs]``.

        Raises:
            CallFailed: as in :meth:`Subject.rotate`.
        """
        subject, ids = self.subject, torch.as_tensor(positions, dtype=torch.int64)
        ends = [[self.comes_out(channel) for channel in each] for each in zip(*self.pairs)]
        shape = (1, subject.most_heads or 2, ids.shape[-1], subject.head_dim)
        x = torch.zeros(shape, dtype=dtype)
        x[..., [pair.first for pair in self.pairs]] = 1.0
        y = subject.rotate(subject.laid_out(x), ids)[0, 0].detach().cpu().double()
        return torch.complex(y[:, ends[0]], y[:, ends[1]])

    def explain(
        self,
        positions: Sequence[int],
        seen: torch.Tensor,
        tolerance: float | None = None,
        frequencies: Sequence[torch.dtype] = (torch.float64,),
    ) -> Angles | None:
        """Find the arithmetic of the angles that gives measured cosines and sines; None if none does.

        Args:
            positions: what the function was given, plus ``shift``.
            seen: what :meth:`tables` measured there.
            tolerance: the largest difference of a cosine or sine of amplitude 1; by default, one that tables in
                16 bits explain.
            frequencies: dtypes to which the function may round its frequencies.
        """
        best, found = math.inf, None
        wide = (torch.float32, torch.float64)
        # A function with an offset adds it before positions are rounded, or after it.
        tried = (
            (Angles(p, w, a), after)
            for after in dict.fromkeys((0, self.shift))
            for a in (*wide, *NARROW)
            for w in frequencies
            for p in (torch.float64, *NARROW)
        )
        for how, after in tried:
            angles = how.at(positions, self.omegas, after).double() + self.starts
            error = apart(turned(angles), seen / self.amplitude)
            # Another arithmetic must fit clearly better than one named before it.
            if error < 0.5 * best:
                best, found = error, how
        allowed = max(5e-3, 2 * self.noise) if tolerance is None else tolerance
        return found if best <= allowed else None


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).double()


def _is_of(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """True if a dtype holds the values, but for one rounding to float32."""
    real = torch.view_as_real(values)
    return bool(((_cast(real, dtype) - real).abs() <= 2.0**-22 * real.abs()).all())


def measure(subject: Subject, near: Near, limit: int | None = None) -> Profile:
    """Measure the profile of a function.

    Args:
        near: its matrices.
        limit: the longest call with the same frequencies as short ones, if they depend on its length.

    Raises:
        CallFailed: a call failed.
    """
    order = _order(near.matrices[0])
    seen = near.matrices if order is None else near.matrices[:, order]
    pairs, alone, tangled = _pairs(seen)
    u, v = ([pair[i] for pair in pairs] for i in (0, 1))
    firsts = torch.complex(seen[:, u, u], -seen[:, u, v])
    seconds = torch.complex(seen[:, v, v], seen[:, v, u])
    profile = Profile(subject, order, pairs, alone, tangled, firsts, seconds)
    if pairs:
        _measure_angles(profile, limit)
    return profile


def _measure_angles(profile: Profile, limit: int | None) -> None:
    """Fill in the frequencies, from nearby positions to far ones, and what else the angles show."""
    angles = profile.firsts.angle()
    profile.amplitude = float(torch.cat((profile.firsts[:4], profile.seconds[:4])).abs().median())
    most = _POWERS[-1] if profile.subject.way.takes_ids else _COUNTED
    powers, seen = _accepted(profile, [p for p in _POWERS if p <= most])
    profile.reach = powers[-1] + 1 if powers else NEAR
    if limit is not None:
        powers, seen = _accepted(profile, [p for p in powers if p < limit])
    # The factor may be applied before tables are rounded, or after.
    tables, factor = torch.cat((profile.firsts, seen)), profile.firsts[0].abs().median()
    narrow = (each for each in NARROW if _is_of(each, tables) or _is_of(each, tables / factor))
    profile.table = next(narrow, torch.float32)
    if _measure_rounded(profile):
        return
    profile.omegas = wrapped(angles[3] - angles[2])
    few = torch.cat((angles[[4, 8]], seen[:2].angle()))
    _refine(profile, wrapped(angles[2] - 2 * profile.omegas), [4, 8, *powers[:2]], few)
    profile.intercepts = wrapped(angles[2] - 2 * profile.omegas)
    shift = shift_of(profile.omegas, profile.intercepts, 2 * profile.noise)
    # If position 0 is right, later positions are off: that is no offset.
    if shift and abs(shift) < profile.reach // 2 and float(angles[0].abs().max()) > 1e-3:
        profile.shift = shift
        profile.reach += min(shift, 0)
        powers = [p for p in powers if shift <= p < profile.reach]
        seen = profile.tables(profile.given(powers)) if powers else seen[:0]
    _refine(profile, profile.starts, powers, seen.angle())


def _accepted(profile: Profile, positions: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the positions before the first that is refused or gives no numbers, and the tables there."""
    while positions:
        with suppress(CallFailed):
            table = profile.tables(positions)
            if bool(table.isfinite().all()):
                return positions, table
        positions = positions[:-1]
    return [], profile.firsts[:0]


def _measure_rounded(profile: Profile) -> bool:
    """Fill in the frequencies if angles are rounded to 16 bits; return whether they are.

    All angles are then values of the dtype, but not multiples of one number.
    """
    near, count = profile.firsts[1:].angle(), torch.arange(1.0, NEAR).double()[:, None]
    if profile.table in NARROW or float(profile.firsts[0].angle().abs().max()) > profile.least:
        return False
    if bool(agree(near, count * near[0], 8 * profile.noise * count).all()):
        return False
    whole = (count * near[0]).abs() < 3.0  # not reduced by a turn
    for dtype in NARROW:
        if bool(((_cast(near, dtype) - near).abs() <= profile.noise * near.abs())[whole].all()):
            profile.omegas = (count * near * whole).sum(0) / (count**2 * whole).sum(0)
            profile.widths = profile.omegas.abs() * torch.finfo(dtype).eps
            profile.intercepts = torch.zeros_like(profile.omegas)
            profile.rounded = dtype
            return True
    return False


def _refine(
    profile: Profile, starts: torch.Tensor, positions: Sequence[int], angles: torch.Tensor
) -> None:
    """Refine the frequencies by the angles at larger and larger positions, while all pairs agree."""
    for position, angle in zip(positions, angles):
        rest = wrapped(angle - starts - profile.omegas * position)
        if float(rest.abs().max()) > 0.3:
            break
        profile.omegas = profile.omegas + rest / position
        profile.farthest = position


def shift_of(omegas: torch.Tensor, starts: torch.Tensor, tolerance: float) -> int:
    """Return the whole number of positions that all pairs are ahead of their frequencies; 0 if there is none."""
    moving = omegas.abs() > 1e-6
    shifts = (starts[moving] / omegas[moving]).round().long().tolist()
    allowed = torch.clamp(0.02 * omegas.abs(), min=max(tolerance, _ANGLE))
    for shift in dict.fromkeys((0, *shifts)):
        if bool((wrapped(starts - shift * omegas).abs() <= allowed).all()):
            return int(shift)
    return 0


def _order(start: torch.Tensor) -> tuple[int, ...] | None:
    """Return the permutation of channels at position 0; None if it is the identity or there is none."""
    whole = start.round()
    ones = whole.sum(0).eq(1).all() and whole.sum(1).eq(1).all() and whole.min() >= 0
    if not ones or float((start - whole).abs().max()) > 1e-4:
        return None
    order = whole.argmax(0).tolist()
    return None if order == sorted(order) else tuple(order)


def _pairs(
    seen: torch.Tensor,
) -> tuple[tuple[Pair, ...], tuple[int, ...], tuple[int, ...]]:
    """The pairs of channels, those that change alone, and those that mix with several others."""
    reach = (seen.abs() > 1e-9).any(0)
    mixes = (reach | reach.T).fill_diagonal_(False)
    moved = ((seen.diagonal(dim1=1, dim2=2) - 1).abs() > 1e-6).any(0)
    pairs, alone, tangled = [], [], []
    for i, row in enumerate(mixes):
        others = row.nonzero().flatten().tolist()
        if len(others) > 1:
            tangled.append(i)
        elif others and others[0] > i:
            pairs.append(Pair(i, others[0]))
        elif not others and moved[i]:
            alone.append(i)
    # Half a turn only changes signs, so the distance of other pairs shows which channels are a pair.
    distances = {second - first for first, second in pairs}
    if len(distances) == 1:
        step = distances.pop()
        for i in [i for i in alone if flips(seen[:, i, i])]:
            if i in alone and i + step in alone:
                pairs.append(Pair(i, i + step))
                alone = [each for each in alone if each not in (i, i + step)]
    return tuple(sorted(pairs)), tuple(alone), tuple(tangled)


def flips(factors: torch.Tensor) -> bool:
    """True if the factors on a channel at the near positions are 1, and -1 at odd ones."""
    wanted = torch.tensor([1.0 - 2.0 * (p % 2) for p in range(NEAR)], dtype=factors.dtype)
    return torch.allclose(factors, wanted, atol=1e-4)
