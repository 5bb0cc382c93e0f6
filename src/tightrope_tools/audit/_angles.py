"""Check angles at small and large positions: find roundings to 16 bits and the ends of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._call import CallFailed
from ._frequencies import is_rounded, signs_of
from ._log import Log
from ._profile import (
    DENSE,
    NARROW,
    ODD,
    SHORT,
    Profile,
    difference,
    differences,
    pairs_of,
    renewed,
    shift_of,
    turned,
)
from ._report import AngleError

_FAR = (4096, 32768, 131072, 1_048_576)
_BELOW = (20, 14, 11, 7, 5, 3, 2, 1)
_ENDS = (
    *("far-angles", "position-jump", "padding-id", "table-clamp", "table-identity"),
    *("table-nan", "table-wrap", "table-zero"),
)
_ROUNDED = ("position-dtype", "frequency-dtype", "angle-dtype")
_CLEAR = 0.08
"""An error of a cosine or sine that is no rounding of tables."""
_COUNTED = 131_072
"""The largest position to test if the function numbers tokens itself and takes no offset."""


@dataclass(frozen=True)
class Expected:
    """The expected angles of the function.

    float64 is exact enough: an angle at position 2^20 is off by 1e-10.

    Attributes:
        omegas: frequency of each pair that turns, radians per position; negative if it turns backwards.
        starts: angle of each such pair at position 0, radians.
        shift: the function rotates position p as position p + shift should be rotated.
        sure: whether the frequencies are known exactly, not only measured.
        longer: length of the call -> frequencies, if they depend on it; ``omegas`` are then those of short calls.
    """

    omegas: torch.Tensor
    starts: torch.Tensor
    shift: int = 0
    sure: bool = False
    longer: Callable[[int], torch.Tensor] | None = None

    def at(self, length: int) -> torch.Tensor:
        """Return the frequencies of a call of this length."""
        return self.omegas if self.longer is None else self.longer(length)

    def table(self, positions: Sequence[int]) -> torch.Tensor:
        """Return cosines and sines at the positions of one call, complex128 ``[positions, pairs]``."""
        where = torch.tensor(list(positions), dtype=torch.float64)[:, None]
        return turned(where * self.at(max(*positions, 0) + 1) + self.starts)

    def bound(self, position: int) -> float:
        """Bound the error of a cosine or sine if frequency and angle are each rounded once to float32."""
        fastest = float(self.omegas.abs().max())
        return min(2.0, (position + abs(self.shift)) * fastest * 2.0**-23 + 2.0**-22)


def expected_of(log: Log, profile: Profile, declared: bool) -> Expected | None:
    """Return the expected angles: of the declared spec, else of the identified rule, else as measured.

    Return None, and record the check as skipped, if no angle can be judged.

    Args:
        declared: whether the function has the frequencies of the declared spec.
    """
    identity = log.identity
    spec = log.spec if declared else None if identity is None else identity.spec
    by_length = declared and spec is not None and spec.by_length
    why = ""
    if log.subject.way.form.takes_tables:
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
    as_measured = Expected(profile.omegas, starts, profile.shift)
    if spec is None:
        return as_measured
    signs = signs_of(log, profile, declared=declared)
    turning = [pair in profile.pairs for pair in pairs_of(spec)]

    def rates(length: int | None = None) -> torch.Tensor:
        return spec.frequencies(length).inv_freq[turning] * signs

    exact = rates()
    if not declared:
        # A base or a factor that was rounded to few digits gives other angles far away.
        gap = float(((profile.omegas - exact).abs() - 2 * profile.blur).max())
        loose = identity is not None and identity.loose
        loose |= gap > 2.0**-22 * float(exact.abs().max())
        if loose and not is_rounded(profile.omegas.abs(), exact.abs()):
            return as_measured
    return Expected(exact, starts, profile.shift, True, rates if by_length else None)


def measured(
    log: Log, profile: Profile, positions: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Measure cosines and sines of the function, divided by the factor.

    Raises:
        CallFailed: as in :meth:`Subject.rotate`.
    """
    return _scaled(log, profile, profile.tables(positions, dtype))


def _scaled(log: Log, profile: Profile, seen: torch.Tensor) -> torch.Tensor:
    return seen / (seen.abs() if log.found("amplitude-varies") else profile.amplitude)


def check_angles(log: Log, profile: Profile, expected: Expected) -> None:
    """Check whether angles were rounded to 16 bits, and up to which position they are right."""
    if profile.table in NARROW:
        log.add(
            "table-dtype",
            f"every one that was measured is a {SHORT[profile.table]}; each is off by up to "
            f"{torch.finfo(profile.table).eps / 2:.1g} of it",
            dtype=SHORT[profile.table],
        )
    for dtype in log.dtypes:
        with log.check(f"angles below position 10,000, {SHORT[dtype]} x"):
            _near(log, renewed(profile), expected, dtype)
    if log.found("amplitude-varies"):
        log.skip("angles at large positions", "the factor varies, so results may vanish there")
        return
    with log.check("angles at large positions"):
        _far(log, renewed(profile), expected)


def _most(log: Log) -> int:
    counts = not log.subject.way.takes_ids and not log.subject.way.takes_offset
    return min(log.longest, _COUNTED) if counts else log.longest


def _odd(log: Log, profile: Profile, dtype: torch.dtype) -> tuple[list[int], torch.Tensor]:
    """Return the odd positions before the first that is refused, and cosines and sines there."""
    positions, seen = profile.accepted([p for p in ODD if p <= _most(log)], dtype)
    if not positions:
        raise CallFailed(f"it refuses x of {dtype}")
    return positions, _scaled(log, profile, seen)


def _near(log: Log, profile: Profile, expected: Expected, dtype: torch.dtype) -> None:
    step = max(torch.finfo(each).eps for each in (dtype, profile.table))
    step *= 1 if profile.amplitude == 1.0 else 2  # the factor may be rounded by itself

    def errors(where: Sequence[int], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest error at each position, and whether it is too large."""
        slack = torch.tensor([0.6 * step + 3 * expected.bound(p) + 1e-6 for p in where])
        error = differences(table, expected.table(where)).amax(1)
        return error, error > slack

    positions, seen = _odd(log, profile, dtype)
    error, wrong = errors(positions, seen)
    if not bool(wrong.any()):
        positions = [*range(min(DENSE, profile.reach, log.longest))]
        error, wrong = errors(positions, measured(log, profile, positions, dtype))
        if not expected.sure:
            wrong &= error > _CLEAR  # a smaller error may be due to the measurement
        if bool(wrong.any()):
            where = f" at {int(wrong.sum()):,} of the first {len(positions):,} positions"
            _add_wrong(log, profile, expected, positions[-1], _off(positions, error, 9.0), where)
        return
    causes: dict[str, str] = {}
    if expected.sure or dtype != torch.float32:
        # The steps that, rounded to 16 bits, explain the angles.
        given = [position + profile.shift for position in positions]
        tolerance = max(0.6 * step + 1e-4, 1e-3)
        how = profile.explain(expected.omegas, given, seen, tolerance, (torch.float64, *NARROW))
        causes = {kind: SHORT[each] for kind, each in zip(_ROUNDED, how or ()) if each in NARROW}
    if not causes and dtype == torch.float32:
        first = next(p for p, bad in zip(positions, wrong) if bad)
        if _where_it_ends(log, profile, expected, first + 1) or not expected.sure:
            return
    if not causes and log.found(*_ENDS):
        return
    evidence = _off(positions, error, _CLEAR)
    named = "" if dtype == torch.float32 else f", for {SHORT[dtype]} x"
    for kind, rounded in causes.items():
        log.add(kind, evidence, dtype=rounded, x=named)
    if not causes:
        _add_wrong(log, profile, expected, positions[-1], evidence, named)


def _off(positions: Sequence[int], error: torch.Tensor, clear: float) -> str:
    """Name the first clear error, else the largest."""
    at = int((error > clear).nonzero()[0]) if bool((error > clear).any()) else int(error.argmax())
    return f"at position {positions[at]:,} a cosine or sine is off by {float(error[at]):.3g}"


# --- far away --------------------------------------------------------------------------------------


def _far(log: Log, profile: Profile, expected: Expected) -> None:
    """Fill the table of angle errors; find the cause of those above the float32 bound."""
    large: AngleError | None = None
    wrong_at: int | None = None
    for position in _FAR:
        if position > _most(log):
            break
        window = [position - below for below in _BELOW]
        exact, bound = expected.table(window), expected.bound(position)
        try:
            error = difference(measured(log, profile, window), exact)
        except CallFailed as refusal:
            last = _bisect(1, position - 1, lambda p: _is_taken(log, profile, p))
            log.add("table-end-refused", str(refusal), first=last + 1)
            log.angle_errors.append(AngleError(position, None, None, bound))
            break
        narrow: float | None = None
        if torch.bfloat16 in log.dtypes:
            with suppress(CallFailed):
                narrow = difference(measured(log, profile, window, torch.bfloat16), exact)
        found = AngleError(position, error, narrow, bound)
        log.angle_errors.append(found)
        if error > 3 * bound + 1e-6 + profile.noise * (profile.table in NARROW):
            wrong_at = wrong_at or position
            if expected.sure:
                break
        if error > 1e-3:
            large = found
    if log.found(*_ROUNDED, "table-dtype", *_ENDS):
        return
    if wrong_at is not None:
        if not _where_it_ends(log, profile, expected, wrong_at) and expected.sure:
            evidence = (
                f"in a call of positions up to {wrong_at:,}, and not in calls of one position"
            )
            _add_wrong(log, profile, expected, wrong_at - 1, evidence, f" below {wrong_at:,}")
    elif large is not None and expected.sure:
        log.add(
            "angle-error",
            "most models compute angles in this way; for comparison, rounding to bfloat16 changes a value by "
            "up to 3.9e-3 of it",
            position=large.position,
            size=large.float32,
        )


def _is_taken(log: Log, profile: Profile, position: int) -> bool:
    try:
        measured(log, profile, [position])
    except CallFailed:
        return False
    return True


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the last position where a condition holds; it holds at `low` and not at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _where_it_ends(log: Log, profile: Profile, expected: Expected, wrong: int) -> bool:
    """Bisect for the last right position and report what the function does after it.

    Return False, and report nothing, if each position is right in a call of its own.
    If the frequencies were only measured, report nothing but a jump of positions: angles that differ from the
    expected ones in another way may be due to the measurement.
    """

    def error(position: int) -> float:
        return difference(measured(log, profile, [position]), expected.table([position]))

    def right(position: int) -> bool:
        return error(position) <= 3 * expected.bound(position) + max(1e-4, profile.noise)

    bad = next((p for p in (wrong - 1, wrong - 2, wrong - 3) if p > 0 and not right(p)), None)
    if bad is None:
        return False
    size = _bisect(0, bad, right) + 1
    kind, jump = _behaviour_from(log, profile, expected, size, bad)
    if expected.sure or kind in ("position-jump", "padding-id"):
        evidence = f"right up to position {size - 1:,}; at position {bad:,} a cosine or sine is off by {error(bad):.3g}"
        if kind == "far-angles":
            where = f" from position {size:,} on"
            _add_wrong(log, profile, expected, bad, evidence, where)
        else:
            count = "offset" if log.subject.way.takes_offset else "position"
            words: dict[str, Any] = {"size": size, "last": size - 1, "jump": jump}
            log.add(kind, evidence, count=count, first=abs(jump), **words)
    return True


def _behaviour_from(
    log: Log, profile: Profile, expected: Expected, size: int, bad: int
) -> tuple[str, int]:
    """Return what the function does from a position on: the kind of finding, and its jump of positions."""
    place, *after = size, size + 1, size + 7, bad
    try:
        seen = {p: measured(log, profile, [p]) for p in (place, *after)}
    except CallFailed:
        return "far-angles", 0

    def all_are(wanted: Callable[[int], torch.Tensor]) -> bool:
        slack = max(1e-3, profile.noise)
        return all(difference(seen[p], wanted(p)) <= 3 * expected.bound(p) + slack for p in after)

    one = torch.ones_like(seen[place])
    known: dict[str, Callable[[int], torch.Tensor]] = {
        "table-identity": lambda _: one,
        "table-zero": lambda _: 0 * one,
        "table-clamp": lambda _: expected.table([size - 1]),
        "table-wrap": lambda p: expected.table([p % size]),
    }
    for kind, wanted in known.items():
        if all_are(wanted):
            return kind, 0
    if any(not bool(each.isfinite().all()) for each in seen.values()):
        return "table-nan", 0
    first = after[0]
    ahead = (seen[first] / expected.table([first]))[0].angle()
    jump = shift_of(expected.at(first + 1), ahead, 3 * expected.bound(first) + 1e-3)
    if jump and all_are(lambda p: expected.table([p + jump])):
        by_id = log.subject.way.takes_positions and not log.subject.way.counts
        is_padding = by_id and size == 1 and abs(jump) <= 2
        return "padding-id" if is_padding else "position-jump", jump
    return "far-angles", 0


def _add_wrong(
    log: Log, profile: Profile, expected: Expected, bad: int, evidence: str, where: str
) -> None:
    """Report angles that are wrong in a call up to a position, by the length of the call if that is the cause."""
    spec, few = log.spec, (0, 1, 5, 7)
    where_all = (*few, bad)
    try:
        alone, seen = (measured(log, renewed(profile), each) for each in (few, where_all))
    except CallFailed:
        log.add("far-angles", evidence, where=where)
        return
    slack = 3 * expected.bound(bad) + max(1e-4, profile.noise)
    depends = difference(alone, seen[: len(few)]) > 1e-5
    wrong = difference(seen, expected.table(where_all)) > slack
    short = difference(seen, replace(expected, longer=None).table(where_all)) <= slack
    if depends and log.found("history"):
        return  # what earlier calls left has a finding
    if depends and (expected.longer is None or spec is None):
        log.add_length(evidence, bad + 1)
    elif expected.longer is None or spec is None or not wrong or not (depends or short):
        log.add("far-angles", evidence, where=where)
    else:
        evidence += f"; declared {spec.scaling!r}"
        plain = replace(spec, scaling=None)
        if short and torch.equal(plain.frequencies().inv_freq, spec.frequencies().inv_freq):
            log.add("scaling-ignored", evidence, plain=plain)
            return
        what = "are not those of the declared scaling" if depends else "do not depend on the length"
        log.add("scaling", evidence, what=f"The frequencies of long calls {what}")


def check_type_history(log: Log, profile: Profile) -> None:
    """Check whether a call in bfloat16 makes later float32 results coarser, as a cached table would."""
    if torch.bfloat16 not in log.dtypes or log.found("history"):
        return
    with log.check("results do not depend on the dtype of earlier calls"):
        # Some functions keep tables of a few thousand positions.
        near = [p for p in ODD if p <= min(log.longest, 5000)]
        positions, alone = renewed(profile).accepted(near)
        used = renewed(profile)
        used.tables(positions, torch.bfloat16)
        size = difference(used.tables(positions), alone)
        if size > 1e-4:
            log.add(
                "history",
                f"a cosine or sine differs by {size:.3g} from that of a function never called in bfloat16",
                what="The result of a call",
                how=": float32 results are coarser after a call in bfloat16",
            )
