"""Measure the steps of one rotary function: channels, frequencies, angles, tables and roundings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tightrope._errors import bad_value

from ._guard import CallFailed
from ._impulse import Line, Shape, lines_of, measure_shape, responses, shift_of
from ._subject import Subject

# Integers up to 2^24 are exact in float32, and so is their product with a frequency if they are powers of
# two; the other positions show how positions and angles are rounded.
_POWERS = tuple(2**n for n in range(21))
ODD = (3, 37, 255, 257, 301, 515, 1003, 2051, 4099, 9999, 65537, 1_048_573)
_REACHES = (2**20 + 1, 2**16 + 2, 10_000, 4096, 1024, 512, 257)
_NO_TABLE = 2**12
"""The largest position to test if the function numbers tokens itself."""
_UNITS = 5
"""Angles whose cosines and sines are equal but for their last bit differ by at most so many units of it."""
SHORT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass
class Profile:
    """The measured steps of one function.

    Attributes:
        subject: the function.
        shape: its pairs of channels.
        lines: the angle of each pair as a line in the position.
        omegas: the frequency of each pair, signed, to about 1e-13 radians per position.
        amplitude: the factor on the rotated channels.
        table: the narrowest dtype that holds its cosines and sines for float32 x.
        reach: the first position that the function does not accept, or that is not tested.
        shift: the function rotates position p − shift as position p should be rotated. All later
            measurements are made at p − shift, so an offset does not affect them.
        farthest: the largest position from which the frequencies were measured.
    """

    subject: Subject
    shape: Shape
    lines: tuple[Line, ...]
    omegas: torch.Tensor
    amplitude: float
    table: torch.dtype
    reach: int
    shift: int = 0
    farthest: int = 3

    @property
    def noise(self) -> float:
        """The largest error of a measured angle, in radians."""
        return _UNITS * torch.finfo(self.table).eps

    @property
    def least(self) -> float:
        """The smallest angle at position 0 that can be measured, in radians."""
        return max(1e-4, 2 * self.noise)

    @property
    def starts(self) -> torch.Tensor:
        """The angle of each pair where position 0 should be, in radians; 0 if it is too small to measure."""
        start = torch.tensor(
            [line.intercept - self.shift * line.slope for line in self.lines], dtype=torch.float64
        )
        start = wrapped(start)
        return torch.where(start.abs() < self.least, 0.0, start)

    def given(self, positions: Sequence[int]) -> list[int]:
        """Return the positions to pass to the function for these positions."""
        return [position - self.shift for position in positions]

    def tables(self, positions: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return cosines and sines, float64 ``[2, positions, pairs]``."""
        return responses(self.subject, self.shape, self.given(positions), dtype)


def profile_of(subject: Subject, name: str) -> Profile:
    """Measure a function; the name is for its errors."""
    shape = measure_shape(subject)
    if not shape.pairs or shape.tangled:
        raise bad_value(f"{name} must rotate pairs of channels but does not")
    lines = lines_of(shape)
    reach = _reach(subject, shape)
    amplitudes = torch.tensor([pair.amplitude[:4] for pair in shape.pairs], dtype=torch.float64)
    slopes = torch.tensor([line.slope for line in lines], dtype=torch.float64)
    powers = [p for p in _POWERS if 64 <= p < reach] or [2]
    seen = responses(subject, shape, powers)
    narrow = (
        each
        for each in (torch.bfloat16, torch.float16)
        if torch.equal(seen.to(each).double(), seen)
    )
    table = next(narrow, torch.float32)
    found = Profile(subject, shape, lines, slopes, float(amplitudes.median()), table, reach)
    shift = shift_of(lines, 2 * found.noise)
    if abs(shift) < reach // 2:
        found.shift = shift
        found.reach += min(shift, 0)
        powers = [p for p in powers if shift <= p < found.reach] or [2]
    seen = found.tables(powers)
    for p, angle in zip(powers, torch.atan2(seen[1], seen[0]), strict=True):
        rest = wrapped(angle - found.starts - found.omegas * p)
        if float(rest.abs().max()) > 0.5:
            break
        found.omegas = found.omegas + rest / p
        found.farthest = p
    return found


def _reach(subject: Subject, shape: Shape) -> int:
    most = max(_REACHES) if subject.call.takes_ids else _NO_TABLE
    for reach in _REACHES:
        if reach > most:
            continue
        try:
            if bool(responses(subject, shape, [reach - 1]).isfinite().all()):
                return reach
        except CallFailed:
            continue
    return max(shape.positions) + 1


def wrapped(angle: torch.Tensor) -> torch.Tensor:
    """Reduce angles to [-π, π]."""
    return angle - 2 * math.pi * torch.round(angle / (2 * math.pi))


def _float32(p: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return p.float() * w.float()


# How positions, frequencies and their product may be rounded: name -> (dtype of positions, function of
# position and frequency).
_ANGLES: dict[str, tuple[torch.dtype, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "float32": (torch.float64, _float32),
    "more exact than float32": (torch.float64, lambda p, w: p * w),
    "float32, of positions in bfloat16": (torch.bfloat16, _float32),
    "float32, of positions in float16": (torch.float16, _float32),
    "bfloat16": (torch.float64, lambda p, w: _float32(p, w).bfloat16()),
    "bfloat16, of positions in bfloat16": (
        torch.bfloat16, lambda p, w: p.bfloat16() * w.bfloat16(),
    ),
    "float16": (torch.float64, lambda p, w: _float32(p, w).half()),
}  # fmt: skip


def angles_of(profile: Profile, odd: Sequence[int], seen: torch.Tensor) -> str:
    """Return the name of the arithmetic that gives the angles at odd positions."""
    where = torch.tensor(odd, dtype=torch.float64)[:, None]
    best, found = math.inf, "unknown"
    # A function with an offset adds it before positions are rounded, or after it.
    for after in (0, profile.shift):
        for name, (dtype, compute) in _ANGLES.items():
            rounded = (where - after).to(dtype).double() + after
            angle = compute(rounded, profile.omegas).double() + profile.starts
            wanted = profile.amplitude * torch.stack((angle.cos(), angle.sin()))
            error = float((wanted - seen).abs().nan_to_num(math.inf).max())
            # Another arithmetic must fit clearly better than one named before it.
            if error < 0.5 * best:
                best, found = error, name
    return found if best < max(5e-3, 2 * profile.noise) else "unknown"


def _roundings(
    x: torch.Tensor, y: torch.Tensor, shape: Shape, cos: torch.Tensor, sin: torch.Tensor
) -> dict[str, bool]:
    """Return for each rounding whether it reproduces y from x, bit for bit.

    Args:
        x: ``(tokens, channels)``.
        y: the function's result, of the same shape and dtype.
        cos, sin: float32 ``(tokens, pairs)``.
    """
    firsts, seconds = (list(each) for each in zip(*shape.channels, strict=True))
    ends = [[shape.comes_out(c) for c in each] for each in (firsts, seconds)]
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


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that reproduces the results of a function for one dtype.

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
    subject, shape = profile.subject, profile.shape
    x = subject.random(1, 1, len(positions), dtype=dtype, seed=3).requires_grad_()
    out = subject.random(1, 1, len(positions), dtype=dtype, seed=4)
    y = subject.rotate(x * 1.0, profile.given(positions))
    back = None
    if y.requires_grad:
        (back,) = torch.autograd.grad(y, x, out)
    cos, sin = tables.float()
    kinds = {SHORT[profile.table if dtype == torch.float32 else torch.float32]: (cos, sin)}
    if dtype != torch.float32:
        kinds = {SHORT[dtype]: (cos.to(dtype).float(), sin.to(dtype).float()), **kinds}
    names = ("wide", "once") if dtype == torch.float32 else ("each", "wide", "once")
    given, result = (t.detach().cpu()[0, 0] for t in (x, y))
    for kind, (c, s) in kinds.items():
        fits = _roundings(given, result, shape, c, s)
        forward = tuple(name for name in names if fits[name])
        if not forward:
            continue
        if back is None or shape.order is not None:
            return Arithmetic(kind, forward, None if back is None else ())
        fits = _roundings(out.cpu()[0, 0], back.cpu()[0, 0], shape, c, -s)
        return Arithmetic(kind, forward, tuple(name for name in names if fits[name]))
    return Arithmetic(back=None if back is None else ())
