"""Compare the angles of a function with exact ones, near and far.

Where they differ, a step was rounded, or frequencies depend on the length of the call, or later positions are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tightrope_tools.forms import pairs_of

from ._call import CallFailed
from ._calls import FEW
from ._log import Log
from ._profile import (
    DENSE,
    NARROW,
    NEAR,
    ODD,
    SHORT,
    Profile,
    apart,
    gaps,
    shift_of,
    turned,
)
from ._report import AngleError
from ._rotation import is_rounded, signs_of

_FAR = (4096, 32768, 131072, 1_048_576)
_BELOW = (20, 14, 11, 7, 5, 3, 2, 1)
_ENDS = (
    *("far-angles", "position-jump", "padding-id", "table-clamp", "table-identity"),
    *("table-nan", "table-wrap", "table-zero"),
)
_ROUNDED = ("position-dtype", "frequency-dtype", "angle-dtype")
_CLEAR = 0.08
"""An error of a cosine or sine that is no rounding of tables."""
_FAST = 0.04
"""An error below position 10,000 that float32 angles of frequencies up to 64 rad per position do not explain."""
_COUNTED = 131_072
"""The largest position to test if the function numbers tokens itself and takes no offset."""


# --- the angles that are meant --------------------------------------------------------------------


class _Seen(NamedTuple):
    """Cosines and sines at the positions of one call, complex ``[positions, pairs]``, and the error at each."""

    positions: Sequence[int]
    table: torch.Tensor
    error: torch.Tensor
    wrong: torch.Tensor

    @property
    def off(self) -> dict[str, Any]:
        """The first clear error, else the largest, as words of a finding."""
        clear = self.error > _CLEAR
        at = int(clear.nonzero()[0]) if bool(clear.any()) else int(self.error.argmax())
        return {"position": self.positions[at], "off": float(self.error[at])}


@dataclass(frozen=True)
class Angles:
    """The angles of a function for x of one dtype, beside those that are meant.

    These are exact enough in float64, as an angle at position 2^20 is off by 1e-10.

    Attributes:
        omegas: meant frequency of each pair that turns, radians per position; negative if it turns backwards.
        starts: meant angle of each such pair at position 0, radians.
        blur: the largest error of these frequencies, if they were only measured.
        longer: length of the call -> frequencies, if they depend on it; ``omegas`` are then those of short calls.
    """

    log: Log
    profile: Profile
    omegas: torch.Tensor
    starts: torch.Tensor
    blur: float = 0.0
    longer: Callable[[int], torch.Tensor] | None = None
    dtype: torch.dtype = torch.float32

    def renewed(self, dtype: torch.dtype = torch.float32) -> Angles:
        """Return the angles of a function that has not been called yet, if possible."""
        profile = replace(self.profile, subject=self.profile.subject.fresh())
        return replace(self, profile=profile, dtype=dtype)

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """Return the frequencies that are meant for a call."""
        return self.omegas if self.longer is None else self.longer(max(*positions, 0) + 1)

    def meant(self, positions: Sequence[int]) -> torch.Tensor:
        """Return the cosines and sines that are meant for one call, complex128 ``[positions, pairs]``."""
        where = torch.tensor(list(positions), dtype=torch.float64)[:, None]
        return turned(where * self.at(positions) + self.starts)

    def bound(self, position: int) -> float:
        """Bound the error of a cosine or sine if frequency and angle are each rounded once to float32."""
        fastest = float(self.omegas.abs().max())
        return min(2.0, (position + abs(self.profile.shift)) * fastest * 2.0**-23 + 2.0**-22)

    @property
    def x(self) -> str:
        """The dtype of x as words, unless it is float32."""
        return "" if self.dtype == torch.float32 else f", for {SHORT[self.dtype]} x"

    @property
    def step(self) -> float:
        """The step of the results between 1/2 and 1."""
        step = max(torch.finfo(each).eps for each in (self.dtype, self.profile.table))
        return step if self.profile.amplitude == 1.0 else 2 * step  # the factor may be rounded

    @property
    def most(self) -> int:
        """The largest position to test."""
        way = self.log.subject.way
        counts = not way.takes_ids and not way.takes_offset
        return min(self.log.longest, _COUNTED) if counts else self.log.longest

    def slack(self, positions: Sequence[int]) -> torch.Tensor:
        """The largest error at each position that roundings to float32, and of results, explain."""
        bounds = torch.tensor([3 * self.bound(p) + self.blur * p for p in positions])
        return 0.6 * self.step + bounds + 1e-6

    def seen(self, positions: Sequence[int]) -> _Seen:
        """Measure cosines and sines, divided by the factor.

        Raises:
            CallFailed: as in :meth:`Subject.rotate`.
        """
        table = self.profile.tables(positions, self.dtype)
        varies = self.log.found("amplitude-varies")
        table = table / (table.abs() if varies else self.profile.amplitude)
        error = gaps(table, self.meant(positions)).amax(1)
        return _Seen(positions, table, error, error > self.slack(positions))

    def is_right(self, position: int) -> bool:
        """True if a position is right in a call of its own."""
        return bool(self.seen([position]).error <= self.slack([position]) + 1e-4)

    def is_taken(self, position: int) -> bool:
        """True if a call of one position is not refused."""
        with suppress(CallFailed):
            return bool(self.seen([position]))
        return False


def meant_of(log: Log, profile: Profile, declared: bool) -> Angles | None:
    """Return the angles beside those of the declared spec, else of the identified rule, else as measured.

    Return None, and record the check as skipped, if no angle can be judged.

    Args:
        declared: whether the function has the frequencies of the declared spec.
    """
    identity = log.identity
    spec = log.spec if declared else None if identity is None else identity.spec
    by_length = declared and spec is not None and spec.by_length
    why = ""
    if profile.rounded is not None:
        dtype = SHORT[profile.rounded]
        evidence = f"each angle at positions 0 to {NEAR - 1} is a {dtype}"
        log.add("angle-dtype", evidence, dtype=dtype, x="")
        why = "" if declared else "they are rounded"
    elif log.subject.way.takes_tables:
        why = "the caller provides them"
    elif log.found("history") and not log.subject.renew:
        why = "they depend on earlier calls, and no fresh copy can be made; use make=True"
    elif log.found("length") and not by_length:
        why = "they depend on the length of the call, by an undeclared rule"
    if why:
        log.skip("angles", why)
        return None
    # The measured angles at position 0 are less exact: each is one float32 angle.
    starts = profile.starts + profile.shift * profile.omegas
    if float(profile.firsts[0].angle().abs().max()) <= 1e-3:
        starts = torch.zeros_like(starts)
    as_measured = Angles(log, profile, profile.omegas, starts, float(profile.blur.max()))
    if spec is None:
        return as_measured
    signs = signs_of(log, profile, declared=declared)
    turning = [pair in profile.pairs for pair in pairs_of(spec)]

    def rates(length: int | None = None) -> torch.Tensor:
        return spec.frequencies(length).inv_freq[turning] * signs

    exact = rates()
    if not declared and not is_rounded(profile.omegas.abs(), exact.abs()):
        # A base or a factor that was rounded to few digits gives other angles far away.
        gap = (profile.omegas - exact).abs() - 2 * profile.blur
        if (identity and identity.loose) or float(gap.max()) > 2.0**-22 * float(exact.abs().max()):
            return as_measured
    return replace(as_measured, omegas=exact, blur=0.0, longer=rates if by_length else None)


def check_angles(log: Log, meant: Angles) -> None:
    """Check whether angles were rounded to 16 bits, and up to which position they are right."""
    if (table := meant.profile.table) in NARROW:
        log.add("table-dtype", dtype=SHORT[table], off=torch.finfo(table).eps / 2)
    for dtype in log.dtypes:
        with log.check(f"angles below position 10,000, {SHORT[dtype]} x"):
            _near(meant.renewed(dtype))
    if log.found("amplitude-varies"):
        log.skip("angles at large positions", "the factor varies, so results may vanish there")
        return
    with log.check("angles at large positions"):
        _far(meant.renewed())


def _near(angles: Angles) -> None:
    """Compare the first angles, and those at odd positions, with the ones that are meant."""
    every = [p for p in sorted({*range(DENSE), *ODD}) if p <= angles.most]
    try:
        seen = angles.seen(every)
    except CallFailed:
        seen = angles.seen([p for p in every if p < angles.profile.reach])
    if bool(seen.wrong.any()):
        odd = seen.wrong & torch.tensor([p in ODD for p in seen.positions])
        first = (odd if bool(odd.any()) else seen.wrong).nonzero()[0]
        _add_cause(angles, seen, seen.positions[int(first)])


def _far(angles: Angles) -> None:
    """Fill the table of angle errors; find the cause of those above the float32 bound."""
    log = angles.log
    few = () if log.subject.way.takes_offset else FEW
    wrong: _Seen | None = None
    for position in (p for p in _FAR if p <= angles.most):
        call = [*few, *(position - below for below in _BELOW)]
        bound, narrow = angles.bound(position), None
        try:
            seen = angles.seen(call)
        except CallFailed as refusal:
            first = _bisect(1, position - 1, angles.is_taken) + 1
            log.add("table-end-refused", str(refusal), first=first)
            log.angle_errors.append(AngleError(position, None, None, bound))
            break
        if torch.bfloat16 in log.dtypes:
            with suppress(CallFailed):
                off = replace(angles, dtype=torch.bfloat16).seen(call).error
                narrow = float(off[len(few) :].max())
        size = float(seen.error[len(few) :].max())
        log.angle_errors.append(AngleError(position, size, narrow, bound))
        if bool(seen.wrong.any()):
            wrong = seen
            break
    if log.found(*_ROUNDED, "table-dtype", *_ENDS):
        return
    large = [each for each in log.angle_errors if each.float32 and each.float32 > 1e-3]
    if wrong is not None:
        _add_cause(angles, wrong, wrong.positions[-1])
    elif large and not angles.blur:
        log.add("angle-error", position=large[-1].position, size=large[-1].float32)


# --- round, scale by the length, end --------------------------------------------------------------


def _add_cause(angles: Angles, seen: _Seen, position: int) -> None:
    """Report the first cause that explains wrong angles, of which one is at a position."""
    log, wide = angles.log, angles.dtype == torch.float32
    if _round(angles, seen) or (not wide and log.found(*_ENDS)):
        return
    if wide and (_scale(angles, seen) or _end(angles, position)):
        return
    # Measured frequencies may be faster by whole turns, so that float32 angles are less exact than they seem.
    clear = float(seen.error.max()) > _FAST and max(seen.positions) <= ODD[-1]
    if clear or not angles.blur:
        count, total = int(seen.wrong.sum()), len(seen.positions)
        where = angles.x or f" at {count:,} of {total:,} positions that were tested"
        log.add("far-angles", where=where, **seen.off)


def _round(angles: Angles, seen: _Seen) -> bool:
    """Report the steps that, rounded to 16 bits, explain the angles; False if there are none."""
    odd = [k for k, p in enumerate(seen.positions) if p in ODD]
    given = [seen.positions[k] + angles.profile.shift for k in odd]
    tolerance = max(0.6 * angles.step + 1e-4, 1e-3)
    exact = replace(angles.profile, omegas=angles.at(seen.positions), amplitude=1.0)
    how = exact.explain(given, seen.table[odd], tolerance, (torch.float64, *NARROW)) if odd else ()
    narrow = {kind: SHORT[each] for kind, each in zip(_ROUNDED, how or ()) if each in NARROW}
    for kind, dtype in narrow.items():
        angles.log.add(kind, dtype=dtype, x=angles.x, **seen.off)
    return bool(narrow)


def _scale(angles: Angles, seen: _Seen) -> bool:
    """Report frequencies of long calls that are not those that are meant; False if these do not explain the angles.

    Then tokens near 0 are wrong too; or all are right by the frequencies of short calls, which were not declared.
    """
    log, spec = angles.log, angles.log.spec
    few, depends = [k for k, p in enumerate(seen.positions) if p in FEW], False
    if few:
        alone = angles.renewed().seen([seen.positions[k] for k in few])
        size = apart(alone.table, seen.table[few])
        depends = size > 1e-5
    if angles.longer is None or spec is None:
        if depends and not log.found("history"):  # else what earlier calls left has a finding
            log.add_length(max(seen.positions) + 1, size)
        return depends
    depends &= bool(seen.wrong[few].any())
    short = gaps(seen.table, replace(angles, longer=None).meant(seen.positions)).amax(1)
    fits = bool((short <= angles.slack(seen.positions) + 1e-4).all())
    plain = replace(spec, scaling=None)
    words: dict[str, Any] = {"declared": spec.scaling, "plain": plain, **seen.off}
    if fits and torch.equal(plain.frequencies().inv_freq, spec.frequencies().inv_freq):
        log.add("scaling-ignored/long", **words)
    elif fits or depends:
        what = "are not those of the declared scaling" if depends else "do not depend on the length"
        log.add("scaling/long", what=what, **words)
    return fits or depends


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the last position where a condition holds; it holds at `low` and not at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _end(angles: Angles, wrong: int) -> bool:
    """Bisect for the last right position and report what the function does after it.

    Return False, and report nothing, if positions after it, or each in a call of its own, are right.
    """
    log, way = angles.log, angles.log.subject.way
    near = (p for p in (wrong, wrong - 1, wrong - 2) if p > 0 and not angles.is_right(p))
    if (bad := next(near, None)) is None:
        return False
    size = _bisect(0, bad, angles.is_right) + 1
    at, kind, jump = [size + 1, size + 7, bad], "far-angles", 0
    with suppress(CallFailed):
        if all(map(angles.is_right, at[:2])):
            return False
        kind, jump = _after(angles, size, at)
    if kind == "position-jump" and size == 1 and abs(jump) <= 2:
        kind = "padding-id" if way.takes_positions and not way.counts else kind
    if kind == "far-angles" and angles.blur:
        return False
    words: dict[str, Any] = {"size": size, "last": size - 1, "jump": jump, "first": abs(jump)}
    count, where = ("position", "offset")[way.takes_offset], f" from position {size:,} on"
    log.add(kind, count=count, where=where, **words, **angles.seen([bad]).off)
    return True


def _after(angles: Angles, size: int, at: list[int]) -> tuple[str, int]:
    """Return what the function does from a position on: the kind of finding, and its jump of positions.

    Args:
        at: later positions.
    """
    seen = torch.cat([angles.seen([p]).table for p in at])
    limit = angles.slack(at) + 1e-3
    ahead = (seen[0] / angles.meant(at[:1])[0]).angle()
    jump = shift_of(angles.at(at[:1]), ahead, float(limit[0]))
    known: dict[str, Callable[[int], torch.Tensor]] = {
        "table-nan": lambda _: torch.full_like(seen[:1], complex(math.nan, math.nan)),
        "table-identity": lambda _: torch.ones_like(seen[:1]),
        "table-zero": lambda _: torch.zeros_like(seen[:1]),
        "table-clamp": lambda _: angles.meant([size - 1]),
        "table-wrap": lambda p: angles.meant([p % size]),
        "position-jump": lambda p: angles.meant([p + jump]),
    }
    for kind, wanted in known.items():
        if bool((gaps(seen, torch.cat([*map(wanted, at)])).amax(1) <= limit).all()):
            return kind, jump
    return "far-angles", 0
