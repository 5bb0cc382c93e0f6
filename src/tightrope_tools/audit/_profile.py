"""The profile of a rotary function: which channels turn together, by which angle, in which arithmetic.

An x that is 1 in channel i and 0 elsewhere gives column i of the matrix that the function applies at a
position. The matrices at a few positions give pairs, direction and factor. Then one x that is 1 in the first
channel of each pair gives the cosines and sines of all pairs, at any position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ._call import CallFailed, Subject, gradient

# Powers of two and 0, 3, 5: all dtypes represent them.
NEAR = (0, 1, 2, 3, 4, 5, 8, 16, 32)
_FAR = (512, 1024, 4096, 65536, 1_048_576)
# Integers up to 2^24 are exact in float32, and so is their product with a frequency if they are powers of
# two; other positions show how positions and angles are rounded.
_POWERS = tuple(2**n for n in range(2, 21))
#: Positions, some of which bfloat16 (above 256) or float16 (above 2048) cannot represent.
ODD = (0, 3, 37, 255, 257, 301, 515, 1003, 2051, 4099, 9999)
DENSE = 2048
"""The number of positions from 0 on that are tested in one call."""
_REACHES = (2**20 + 1, 2**16 + 2, 10_000, 4096, 1024, 512, 257)
_COUNTED = 2**12
"""The largest position to measure if the function numbers tokens itself."""
_UNITS = 5
"""Angles whose cosines and sines are equal but for their last bit differ by at most so many units of it."""
_ROUNDED_FROM = 64
"""Angles are called rounded if so many positions from 1 on say so."""
_ANGLE = 2e-4
"""Tolerance of equal angles, in radians; float32 is off by 1e-7."""
SHORT = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
NARROW = (torch.bfloat16, torch.float16)


def wrapped(angle: torch.Tensor) -> torch.Tensor:
    """Reduce angles to [-π, π]."""
    return angle - 2 * math.pi * torch.round(angle / (2 * math.pi))


def agree(a: torch.Tensor, b: torch.Tensor | float, tolerance: float = _ANGLE) -> torch.Tensor:
    """True where angles are equal within a tolerance, modulo a turn."""
    return wrapped(a - b).abs() <= tolerance


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference; infinite if one value is NaN and the other is not."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
    return float(difference.max()) if difference.numel() else 0.0


def matrices(subject: Subject, positions: Sequence[int]) -> torch.Tensor:
    """Measure the matrix at each position, float64 ``[positions, out, in]``.

    Raises:
        CallFailed: as in :meth:`Subject.rotate`.
    """
    dim, count = subject.head_dim, len(positions)
    eye = torch.eye(dim)[:, None, None, :]
    x = subject.laid_out(eye.expand(dim, subject.most_heads or 2, count, dim))
    try:
        y = subject.rotate(x, positions)
    except CallFailed:  # it may refuse so many rows
        y = torch.cat([subject.rotate(row, positions) for row in x.split(1)])
    return y[:, 0].detach().cpu().double().permute(1, 2, 0)


class Pair(NamedTuple):
    """Two channels that turn together, first < second."""

    first: int
    second: int


def pairs_in(start: int, rotary_dim: int, interleaved: bool) -> list[Pair]:
    """The channels of each pair of a slice."""
    step, stride = (1, 2) if interleaved else (rotary_dim // 2, 1)
    return [Pair(start + stride * k, start + stride * k + step) for k in range(rotary_dim // 2)]


class Angles(NamedTuple):
    """The dtypes that reproduce a function's angles: of positions, of frequencies and of their product."""

    positions: torch.dtype
    frequencies: torch.dtype
    product: torch.dtype

    def __str__(self) -> str:
        exact = self.product == torch.float64
        name = "more exact than float32" if exact else SHORT[self.product]
        if self.positions in NARROW:
            name += f", of positions in {SHORT[self.positions]}"
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
        matrices: the matrix at each of the near positions, ``[positions, out, in]``.
        pairs: the pairs of channels, ordered by their first channel.
        alone: channels that change but mix with no other.
        tangled: channels that mix with more than one other.
        order: the output channel of each input channel at position 0; None if none moves.
        firsts, seconds: the angle of each pair by position, ``[positions, pairs]``, measured on its first
            and on its second channel; equal for a rotation.
        lengths: the factors on the two channels, ``[2, positions, pairs]``.
        omegas: the frequency of each pair, signed, to about 1e-13 radians per position.
        intercepts: the angle of each pair at position 0, from the angles at positions 2 and 3.
        amplitude: the factor on the rotated channels.
        table: the narrowest dtype that holds its cosines and sines for float32 x, without the factor.
        reach: the first position that the function does not accept, or that is not measured.
        shift: the function rotates position p - shift as position p should be rotated.
        farthest: the largest position from which the frequencies were measured.
        rounded: the 16-bit dtype of the angles for float32 x; None if they are more exact.
        widths: the widths of the intervals in which the frequencies are, if angles are rounded.
    """

    subject: Subject
    matrices: torch.Tensor
    pairs: tuple[Pair, ...]
    alone: tuple[int, ...]
    tangled: tuple[int, ...]
    order: tuple[int, ...] | None
    firsts: torch.Tensor
    seconds: torch.Tensor
    lengths: torch.Tensor
    omegas: torch.Tensor
    intercepts: torch.Tensor
    amplitude: float = 1.0
    table: torch.dtype = torch.float32
    reach: int = NEAR[-1] + 1
    shift: int = 0
    farthest: int = 3
    rounded: torch.dtype | None = None
    widths: torch.Tensor | None = None

    @property
    def noise(self) -> float:
        """The largest error of a measured angle, in radians."""
        return _UNITS * torch.finfo(self.table).eps

    @property
    def blur(self) -> torch.Tensor:
        """The largest error of each measured frequency."""
        if self.widths is not None:
            return self.widths
        return torch.full_like(self.omegas, self.noise / self.farthest)

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
    def distances(self) -> set[int]:
        """The distances between the channels of the pairs."""
        return {pair.second - pair.first for pair in self.pairs}

    @property
    def interleaved(self) -> bool | None:
        """True for interleaved, False for half; None for neither, or for a single pair of neighbours."""
        if self.distances == {1}:
            return True if len(self.pairs) > 1 or self.rotary_dim > 2 else None
        if len(self.distances) == 1 and self.rotary_dim == 2 * min(self.distances):
            return None if self.blocks > 1 else False
        return None

    @property
    def blocks(self) -> int:
        """The number of blocks of half pairs, one after the other; 0 if the pairs are no such blocks."""
        if len(self.distances) != 1 or self.distances == {1}:
            return 0
        width = 2 * min(self.distances)
        places = {(pair.first - self.start) // width for pair in self.pairs}
        inside = all((pair.first - self.start) % width < width // 2 for pair in self.pairs)
        return len(places) if inside else 0

    @property
    def start(self) -> int:
        """The first channel that turns."""
        return min((pair.first for pair in self.pairs), default=0)

    @property
    def rotary_dim(self) -> int:
        """The number of channels that the pairing spans; for half pairing with pairs that never turn."""
        if not self.pairs:
            return 0
        if len(self.distances) == 1 and self.distances != {1}:
            return 2 * min(self.distances)
        return max(pair.second for pair in self.pairs) + 1 - self.start

    @property
    def pairing(self) -> str:
        """The pairing as text."""
        if not self.pairs:
            return "none"
        if self.interleaved is None:
            neighbours = self.distances == {1}
            return "one pair of neighbours" if neighbours else "neither half nor interleaved"
        return "interleaved (2i, 2i + 1)" if self.interleaved else "half (i, i + rotary_dim / 2)"

    @property
    def slots(self) -> list[Pair]:
        """All pairs of the slice, those that never turn included; needs a pairing."""
        return pairs_in(self.start, self.rotary_dim, bool(self.interleaved))

    def flips(self, channel: int) -> bool:
        """True if a channel only changes its sign, at odd positions."""
        return _flips(self.matrices[:, channel, channel])

    def comes_out(self, channel: int) -> int:
        """Return the output channel of an input channel."""
        return channel if self.order is None else self.order[channel]

    def given(self, positions: Sequence[int]) -> list[int]:
        """Return the positions to pass to the function for these positions."""
        return [position - self.shift for position in positions]

    def tables(self, positions: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Measure the cosine and sine of each pair, amplitude included, float64 ``[2, positions, pairs]``.

        Raises:
            CallFailed: as in :meth:`Subject.rotate`.
        """
        subject = self.subject
        ends = [[self.comes_out(channel) for channel in each] for each in zip(*self.pairs)]
        shape = (1, subject.most_heads or 2, len(positions), subject.head_dim)
        x = torch.zeros(shape, dtype=dtype)
        x[..., [pair.first for pair in self.pairs]] = 1.0
        y = subject.rotate(subject.laid_out(x), list(positions))[0, 0].detach().cpu().double()
        return torch.stack((y[:, ends[0]], y[:, ends[1]]))

    def explain(
        self,
        omegas: torch.Tensor,
        positions: Sequence[int],
        seen: torch.Tensor,
        tolerance: float,
        frequencies: Sequence[torch.dtype] = (torch.float64,),
    ) -> Angles | None:
        """Find the arithmetic of the angles that gives measured cosines and sines; None if none does.

        Args:
            omegas: the exact frequencies of the pairs, signed.
            positions: what the function was given, plus ``shift``.
            seen: what :meth:`tables` measured there, divided by the amplitude.
            tolerance: the largest difference of a cosine or sine.
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
            angle = how.at(positions, omegas, after).double() + self.starts
            wanted = torch.stack((angle.cos(), angle.sin()))
            # An infinite angle has no cosine.
            off = (wanted - seen).abs().masked_fill(wanted.isnan() & seen.isnan(), 0.0)
            error = float(off.nan_to_num(math.inf).max())
            # Another arithmetic must fit clearly better than one named before it.
            if error < 0.5 * best:
                best, found = error, how
        return found if best <= tolerance else None


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).double()


def _is_of(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """True if a dtype holds the values, but for one rounding to float32."""
    return bool(((_cast(values, dtype) - values).abs() <= 2.0**-22 * values.abs()).all())


def measure(subject: Subject, limit: int | None = None) -> Profile:
    """Measure the profile of a function.

    Args:
        limit: the first length of a call from which on the frequencies depend on the length; None if they
            never do.

    Raises:
        CallFailed: a call fails even at the near positions.
    """
    near = matrices(subject, NEAR)
    order = _order(near[0])
    seen = near if order is None else near[:, order]
    pairs, alone, tangled = _pairs(subject, seen, order)
    u, v = ([pair[i] for pair in pairs] for i in (0, 1))
    lengths = torch.stack(
        (torch.hypot(seen[:, u, u], seen[:, u, v]), torch.hypot(seen[:, v, u], seen[:, v, v]))
    )
    firsts = torch.atan2(-seen[:, u, v], seen[:, u, u])
    seconds = torch.atan2(seen[:, v, u], seen[:, v, v])
    zeros = torch.zeros(len(pairs), dtype=torch.float64)
    profile = Profile(
        subject, near, pairs, alone, tangled, order, firsts, seconds, lengths, zeros, zeros
    )
    if pairs and bool(near.isfinite().all()):
        _measure_angles(profile, limit)
    return profile


def _measure_angles(profile: Profile, limit: int | None) -> None:
    """Fill in the frequencies, from nearby positions to far ones, and what else the angles show."""
    near = list(NEAR)
    angles = profile.firsts
    profile.amplitude = float(profile.lengths[:, :4].median())
    profile.reach = _reach(profile)
    # Which length below the limit is the last one with the same frequencies is not known.
    last = profile.reach if limit is None else min(profile.reach, limit // 2)
    powers = [p for p in _POWERS if 64 <= p < last] or [32]
    seen = profile.tables(powers)
    # The factor may be applied before tables are rounded, or after.
    tables = seen, seen / profile.lengths[0, 0].median()
    narrow = (each for each in NARROW if any(_is_of(each, table) for table in tables))
    profile.table = next(narrow, torch.float32)
    if _measure_rounded(profile):
        return
    profile.omegas = wrapped(angles[near.index(3)] - angles[near.index(2)])
    profile.intercepts = wrapped(angles[near.index(2)] - 2 * profile.omegas)
    _refine(profile, [4, 8, 16, 32], angles[[near.index(p) for p in (4, 8, 16, 32)]], 0.3)
    profile.intercepts = wrapped(angles[near.index(2)] - 2 * profile.omegas)
    shift = shift_of(profile.omegas, profile.intercepts, 2 * profile.noise)
    # If position 0 is right, later positions are off: that is no offset.
    if shift and abs(shift) < profile.reach // 2 and float(angles[0].abs().max()) > 1e-3:
        profile.shift = shift
        profile.reach += min(shift, 0)
        powers = [p for p in powers if shift <= p < min(profile.reach, last)] or [32]
        seen = profile.tables(profile.given(powers))
    _refine(profile, powers, torch.atan2(seen[1], seen[0]), 0.5, profile.starts)


def _measure_rounded(profile: Profile) -> bool:
    """Fill in the frequencies if angles are rounded to 16 bits; return whether they are.

    Each rounded angle gives an interval for the frequency of its pair. All angles are values of the dtype,
    but not multiples of one number.
    """
    first, noise = profile.firsts[NEAR.index(1)], profile.noise
    if profile.table in NARROW or float(profile.firsts[0].abs().max()) > profile.least:
        return False
    if not any(len(_intervals(first[None], dtype, noise)[2]) for dtype in NARROW):
        return False
    cos, sin = profile.tables(range(1, min(DENSE, profile.reach)))
    seen = torch.atan2(sin, cos)
    for dtype in NARROW:
        low, high, angles = _intervals(seen, dtype, noise)
        count = len(angles)
        if count < _ROUNDED_FROM:
            continue
        multiples = torch.arange(1, count + 1)[:, None] * (angles[-1] / count)
        if bool(((angles - multiples).abs() > 8 * noise * angles.abs()).any()):
            profile.omegas, profile.widths = (low + high) / 2, high - low
            profile.intercepts = torch.zeros_like(profile.omegas)
            profile.farthest, profile.rounded = count, dtype
            return True
    return False


def _intervals(
    seen: torch.Tensor, dtype: torch.dtype, noise: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bounds of the frequencies whose angles, rounded to a dtype, are those seen.

    The third result are the rounded angles, not reduced by whole turns, up to the first that no frequency gives.

    Args:
        seen: the angles at positions 1, 2, …, in [-π, π], ``[positions, pairs]``.
    """
    info = torch.finfo(dtype)
    low = high = seen[0]
    angles: list[torch.Tensor] = []
    for position, angle in enumerate(seen, 1):
        tried = position * (low + (high - low) * torch.linspace(0, 1, 9).double()[:, None])
        values = _cast(tried, dtype)
        gap = wrapped(values - angle).abs()
        best, at = gap.min(0)
        value = values.gather(0, at[None])[0]
        if bool((best > noise * angle.abs().clamp(max=1.0)).any()):
            break
        # A little more than half a unit, as the product is rounded to float32 before.
        unit = torch.exp2(value.abs().clamp(min=info.tiny).log2().floor()) * info.eps
        bounds = [(value + sign * 0.5002 * unit) / position for sign in (-1, 1)]
        lower, upper = bounds
        if angles:
            lower, upper = torch.maximum(low, lower), torch.minimum(high, upper)
        if bool((lower > upper).any()):
            break
        low, high = lower, upper
        angles.append(value)
    return low, high, torch.stack(angles) if angles else seen[:0]


def _refine(
    profile: Profile,
    positions: Sequence[int],
    angles: torch.Tensor,
    most: float,
    starts: torch.Tensor | None = None,
) -> None:
    """Refine the frequencies by the angles at larger and larger positions, while all pairs agree."""
    starts = profile.intercepts if starts is None else starts
    for position, angle in zip(positions, angles):
        rest = wrapped(angle - starts - profile.omegas * position)
        if float(rest.abs().max()) > most:
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


def _reach(profile: Profile) -> int:
    most = max(_REACHES) if profile.subject.way.takes_ids else _COUNTED
    for reach in _REACHES:
        if reach > most:
            continue
        try:
            if bool(profile.tables([reach - 1]).isfinite().all()):
                return reach
        except CallFailed:
            continue
    return NEAR[-1] + 1


def _order(start: torch.Tensor) -> tuple[int, ...] | None:
    """Return the permutation of channels at position 0; None if it is the identity or there is none."""
    whole = start.round()
    ones = whole.sum(0).eq(1).all() and whole.sum(1).eq(1).all() and whole.min() >= 0
    if not ones or float((start - whole).abs().max()) > 1e-4:
        return None
    order = whole.argmax(0).tolist()
    return None if order == sorted(order) else tuple(order)


def _pairs(
    subject: Subject, near: torch.Tensor, order: tuple[int, ...] | None
) -> tuple[tuple[Pair, ...], tuple[int, ...], tuple[int, ...]]:
    """The pairs of channels, those that change alone, and those that mix with several others."""
    seen = torch.cat((near, _far(subject, order)))
    dim = seen.shape[-1]
    off = seen.abs() > 1e-9
    off[:, range(dim), range(dim)] = False
    mixes = off.any(0)
    mixes |= mixes.T.clone()
    partners = [mixes[i].nonzero().flatten().tolist() for i in range(dim)]
    moved = ((seen.diagonal(dim1=1, dim2=2) - 1).abs() > 1e-6).any(0)
    pairs, alone, tangled = [], [], []
    for i, others in enumerate(partners):
        if len(others) > 1 or (others and partners[others[0]] != [i]):
            tangled.append(i)
        elif others and others[0] > i:
            pairs.append(Pair(i, others[0]))
        elif not others and moved[i]:
            alone.append(i)
    # Half a turn only changes signs, so the distance of other pairs shows which channels are a pair.
    distances = {second - first for first, second in pairs}
    if len(distances) == 1:
        step = distances.pop()
        for i in [i for i in alone if _flips(near[:, i, i])]:
            if i in alone and i + step in alone:
                pairs.append(Pair(i, i + step))
                alone = [each for each in alone if each not in (i, i + step)]
    return tuple(sorted(pairs)), tuple(alone), tuple(tangled)


def _flips(factors: torch.Tensor) -> bool:
    """True if the factors on a channel at the near positions are 1, and -1 at odd ones."""
    wanted = torch.tensor([1.0 - 2.0 * (p % 2) for p in NEAR], dtype=factors.dtype)
    return torch.allclose(factors, wanted, atol=1e-4)


def _far(subject: Subject, order: tuple[int, ...] | None) -> torch.Tensor:
    """The matrices at far positions, where slow pairs have turned, as far as the function accepts them."""
    found = [torch.empty(0, subject.head_dim, subject.head_dim, dtype=torch.float64)]
    for position in _FAR:
        if position > 512 and not subject.way.takes_ids:
            break
        try:
            more = matrices(subject, [position])
        except CallFailed:
            break
        if not bool(more.isfinite().all()):
            break
        found.append(more if order is None else more[:, order])
    return torch.cat(found)


# --- the arithmetic of one dtype --------------------------------------------------------------------


class Arithmetic(NamedTuple):
    """The arithmetic that reproduces the results of a function for one dtype of x.

    Attributes:
        table: the dtype of cosines and sines, or "unknown".
        forward: the roundings that give the results; empty if no rounding does.
        back: the roundings that give the gradients; None if there are no gradients.
    """

    table: str = "unknown"
    forward: tuple[str, ...] = ()
    back: tuple[str, ...] | None = ()


def arithmetic_of(
    profile: Profile, dtype: torch.dtype, positions: Sequence[int], tables: torch.Tensor
) -> Arithmetic:
    """Find the table dtype and the roundings that reproduce the function's results and gradients.

    Args:
        tables: its float32 cosines and sines at the positions.
    """
    subject = profile.subject
    x = subject.random(1, 1, len(positions), dtype=dtype, seed=3).requires_grad_()
    out = subject.random(1, 1, len(positions), dtype=dtype, seed=4)
    y = subject.rotate(x * 1.0, profile.given(positions))
    back = gradient(y, x, out)
    cos, sin = tables.float()
    kinds = {SHORT[profile.table if dtype == torch.float32 else torch.float32]: (cos, sin)}
    if dtype != torch.float32:
        kinds = {SHORT[dtype]: (cos.to(dtype).float(), sin.to(dtype).float()), **kinds}
    names = ("wide", "once") if dtype == torch.float32 else ("each", "wide", "once")
    given, result = (t.detach().cpu()[0, 0] for t in (x, y))
    for kind, (c, s) in kinds.items():
        fits = _roundings(profile, given, result, c, s)
        forward = tuple(name for name in names if fits[name])
        if not forward:
            continue
        if back is None or profile.order is not None:
            return Arithmetic(kind, forward, None if back is None else ())
        fits = _roundings(profile, out.cpu()[0, 0], back.cpu()[0, 0], c, -s)
        return Arithmetic(kind, forward, tuple(name for name in names if fits[name]))
    return Arithmetic(back=None if back is None else ())


def _roundings(
    profile: Profile, x: torch.Tensor, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> dict[str, bool]:
    """Return for each rounding whether it reproduces y from x, bit for bit.

    Args:
        x: ``(tokens, channels)``.
        y: the function's result, of the same shape and dtype.
        cos, sin: float32 ``(tokens, pairs)``.
    """
    firsts, seconds = (list(each) for each in zip(*profile.pairs, strict=True))
    ends = [[profile.comes_out(c) for c in each] for each in (firsts, seconds)]
    u, v = x[:, firsts].float(), x[:, seconds].float()
    dtype = x.dtype

    def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        same = (y[:, ends[0]] == one.to(dtype)) & (y[:, ends[1]] == other.to(dtype))
        return bool(same.all())

    def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """a·b + c·d in float32, with the first product not rounded."""
        return (a.double() * b.double() + (c * d).double()).float()

    def narrow(product: torch.Tensor) -> torch.Tensor:
        return product.to(dtype).float()

    return {
        "each": is_equal(narrow(u * cos) - narrow(v * sin), narrow(v * cos) + narrow(u * sin)),
        "wide": is_equal(u * cos - v * sin, v * cos + u * sin),
        "once": any(
            is_equal(one, other)
            for one in (fused(u, cos, -v, sin), fused(-v, sin, u, cos))
            for other in (fused(v, cos, u, sin), fused(u, sin, v, cos))
        ),
    }


def shares_of(
    a: Profile, b: Profile, dtypes: Sequence[torch.dtype]
) -> dict[str, tuple[float, float | None]]:
    """Return the shares of results and of gradients that differ, for each dtype that a function accepts.

    The shares are 1 and None if only one of them does. If one function takes tables, it gets those of the other.
    """
    a, b = _with_tables_of(b, a), _with_tables_of(a, b)
    heads = min(2, *(p.subject.most_heads or 2 for p in (a, b)))
    reach = min(a.reach, b.reach)
    far = torch.randint(0, reach, (32,), generator=torch.Generator().manual_seed(5)).tolist()
    positions = [*range(min(96, reach)), *far]
    keys = a.subject.way.takes_keys and b.subject.way.takes_keys
    found: dict[str, tuple[float, float | None]] = {}
    for dtype in dtypes:
        given = [a.subject.random(1, heads, len(positions), dtype=dtype, seed=n) for n in (8, 9)]
        results = []
        for subject in (a.subject, b.subject):
            x, out = map(subject.laid_out, given)
            x.requires_grad_()
            sides = [subject, subject.keys()] if keys else [subject]
            with suppress(CallFailed):
                y = torch.cat([side.rotate(x * 1.0, positions) for side in sides])
                results.append((y.detach(), gradient(y, x, torch.cat([out] * len(sides)))))
        if len(results) == 2:
            (y, by_x), (z, by_z) = results
            gradients = None if by_x is None or by_z is None else _share(by_x, by_z)
            found[SHORT[dtype]] = _share(y, z), gradients
        elif results:
            found[SHORT[dtype]] = (1.0, None)
    return found


def _with_tables_of(maker: Profile, taker: Profile) -> Profile:
    """Return the profile of a function that takes tables, with tables that are measured of another function."""
    takes = [p.subject.way.form.takes_tables for p in (maker, taker)]
    count = len(taker.subject.rates)
    if takes != [False, True] or maker.interleaved is None or len(maker.slots) != count:
        return taker
    at = [maker.slots.index(pair) for pair in maker.pairs]

    def made(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos = torch.ones(ids.numel(), count, dtype=torch.float64)
        sin = torch.zeros_like(cos)
        cos[:, at], sin[:, at] = maker.tables(ids.flatten().tolist())
        return cos.view(*ids.shape, -1), maker.sign * sin.view(*ids.shape, -1)

    return replace(taker, subject=replace(taker.subject, made=made))


def _share(one: torch.Tensor, other: torch.Tensor) -> float:
    same = (one == other) | (one.isnan() & other.isnan())
    return float((~same).double().mean()) if one.dtype == other.dtype else 1.0


def renewed(profile: Profile) -> Profile:
    """Return the profile with a function that has not been called yet, if possible."""
    return replace(profile, subject=profile.subject.fresh())
