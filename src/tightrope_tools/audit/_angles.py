"""Check angles at small and large positions: find roundings to 16 bits and the ends of tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ._call import CallFailed
from ._log import Log
from ._profile import DENSE, NARROW, ODD, SHORT, Profile, apart, renewed, shift_of
from ._report import AngleError
from ._rotation import is_rounded, pairs_of, signs_of

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
    shift: int
    sure: bool
    longer: Callable[[int], torch.Tensor] | None = None

    def at(self, length: int) -> torch.Tensor:
        """Return the frequencies of a call of this length."""
        return self.omegas if self.longer is None else self.longer(length)

    def table(self, positions: Sequence[int]) -> torch.Tensor:
        """Return cos and sin of the angles at the positions of one call, float64 ``[2, positions, pairs]``."""
        where = torch.tensor(list(positions), dtype=torch.float64)[:, None]
        angles = where * self.at(max(*positions, 0) + 1) + self.starts
        return torch.stack((angles.cos(), angles.sin()))

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
    name = "angles"
    if log.subject.way.form.takes_tables:
        log.skip(name, "the caller provides them")
        return None
    if log.found("history") and not log.subject.renew:
        log.skip(name, "they depend on earlier calls, and no fresh copy can be made; use make=True")
        return None
    spec = log.spec if declared else (log.identity.spec if log.identity is not None else None)
    by_length = declared and spec is not None and spec.by_length
    if log.found("length") and not by_length:
        log.skip(name, "they depend on the length of the call, by an undeclared rule")
        return None
    signs = signs_of(log, profile, declared=declared)
    # The measured angles at position 0 are less exact: each is one float32 angle.
    starts = profile.starts + profile.shift * profile.omegas
    if float(profile.firsts[0].abs().max()) <= 1e-3:
        starts = torch.zeros_like(starts)

    loose = log.identity is not None and log.identity.loose and not declared
    if spec is None:
        return Expected(profile.omegas, starts, profile.shift, False)
    turning = [pair in profile.pairs for pair in pairs_of(spec)]

    def rates(length: int | None = None) -> torch.Tensor:
        return spec.frequencies(length).inv_freq[turning] * signs

    exact = rates()
    if not declared:
        # A base or a factor that was rounded to few digits gives other angles far away.
        gap = float(((profile.omegas - exact).abs() - 2 * profile.blur).max())
        loose = loose or gap > 2.0**-22 * float(exact.abs().max())
        loose = loose and not is_rounded(profile.omegas.abs(), exact.abs())
    if loose:
        return Expected(profile.omegas, starts, profile.shift, False)
    return Expected(exact, starts, profile.shift, True, rates if by_length else None)


def measured(
    log: Log, profile: Profile, positions: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Measure cos and sin of the function, divided by the factor.

    Raises:
        CallFailed: as in :meth:`Subject.rotate`.
    """
    seen = profile.tables(positions, dtype)
    if log.found("amplitude-varies"):
        return seen / torch.hypot(seen[0], seen[1])
    return seen / profile.amplitude


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


def _accepted(
    log: Log, profile: Profile, positions: Sequence[int], dtype: torch.dtype
) -> tuple[list[int], torch.Tensor]:
    """Return the positions before the first that the function refuses, and their cos and sin."""
    positions = [position for position in positions if position <= _most(log)]
    while positions:
        try:
            return list(positions), measured(log, profile, positions, dtype)
        except CallFailed:
            positions = positions[:-1]
    raise CallFailed(f"it refuses x of {dtype}")


def _near(log: Log, profile: Profile, expected: Expected, dtype: torch.dtype) -> None:
    positions, seen = _accepted(log, profile, ODD, dtype)
    step = max(torch.finfo(each).eps for each in (dtype, profile.table))
    step *= 1 if profile.amplitude == 1.0 else 2  # the factor may be rounded by itself

    def errors(where: Sequence[int], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest error at each position, and whether it is too large."""
        slack = torch.tensor([0.6 * step + 3 * expected.bound(p) + 1e-6 for p in where])
        error = (table - expected.table(where)).abs().nan_to_num(math.inf).amax((0, 2))
        return error, error > slack

    error, wrong = errors(positions, seen)
    if not bool(wrong.any()):
        block = range(min(DENSE, profile.reach, log.longest))
        error, wrong = errors(block, measured(log, profile, block, dtype))
        if not expected.sure:
            wrong &= error > _CLEAR  # a smaller error may be due to the measurement
        if bool(wrong.any()):
            worst = int(error.argmax())
            _add_wrong(
                *(log, profile, expected, block[-1]),
                f"at position {worst:,} a cosine or sine is off by {float(error[worst]):.3g}",
                f" at {int(wrong.sum()):,} of the first {len(block):,} positions",
            )
        return
    causes: dict[str, str] = {}
    if expected.sure or dtype != torch.float32:
        causes = _rounding(profile, expected, positions, seen, max(0.6 * step + 1e-4, 1e-3))
    if not causes and dtype == torch.float32:
        first = next(p for p, bad in zip(positions, wrong) if bad)
        if _where_it_ends(log, profile, expected, first + 1) or not expected.sure:
            return
    if not causes and log.found(*_ENDS):
        return
    # Show the first clear error, else the largest.
    sizes = error.tolist()
    worst, size = next(
        ((p, each) for p, each in zip(positions, sizes) if each > _CLEAR),
        (positions[sizes.index(max(sizes))], max(sizes)),
    )
    evidence = f"at position {worst:,} a cosine or sine is off by {size:.3g}"
    named = "" if dtype == torch.float32 else f", for {SHORT[dtype]} x"
    for kind, rounded in causes.items():
        log.add(kind, evidence, dtype=rounded, x=named)
    if not causes:
        _add_wrong(log, profile, expected, positions[-1], evidence, named)


def _rounding(
    profile: Profile,
    expected: Expected,
    positions: Sequence[int],
    seen: torch.Tensor,
    tolerance: float,
) -> dict[str, str]:
    """Return the steps that, rounded to 16 bits, explain the angles: kind of finding -> dtype; {} if none do."""
    where = [position + profile.shift for position in positions]
    found = profile.explain(expected.omegas, where, seen, tolerance, (torch.float64, *NARROW))
    return {kind: SHORT[dtype] for kind, dtype in zip(_ROUNDED, found or ()) if dtype in NARROW}


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
            error = _error(measured(log, profile, window), exact)
        except CallFailed as refusal:
            last = _bisect(1, position - 1, lambda p: _is_taken(log, profile, p))
            log.add("table-end-refused", str(refusal), first=last + 1)
            log.angle_errors.append(AngleError(position, None, None, bound))
            break
        narrow: float | None = None
        if torch.bfloat16 in log.dtypes:
            with suppress(CallFailed):
                narrow = _error(measured(log, profile, window, torch.bfloat16), exact)
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
    elif large is not None and large.float32 is not None and expected.sure:
        log.add(
            "angle-error",
            "most models compute angles in this way; for comparison, rounding to bfloat16 changes a value by "
            "up to 3.9e-3 of it",
            position=large.position,
            size=large.float32,
        )


def _error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    return float((seen - exact).abs().nan_to_num(math.inf).max())


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
        return _error(measured(log, profile, [position]), expected.table([position]))

    def right(position: int) -> bool:
        return error(position) <= 3 * expected.bound(position) + max(1e-4, profile.noise)

    before = (wrong - 1, wrong - 2, wrong - 3)
    bad = next((p for p in before if p > 0 and not right(p)), None)
    if bad is None:
        return False
    last = _bisect(0, bad, right)
    kind, jump = _behaviour_after(log, profile, expected, last, bad)
    if expected.sure or kind in ("position-jump", "padding-id"):
        size = last + 1
        evidence = f"right up to position {last:,}; at position {bad:,} a cosine or sine is off by {error(bad):.3g}"
        count = "offset" if log.subject.way.takes_offset else "position"
        where = f" from position {size:,} on"
        if kind == "far-angles":
            _add_wrong(log, profile, expected, bad, evidence, where)
        else:
            log.add(kind, evidence, size=size, last=last, jump=jump, count=count, first=abs(jump))
    return True


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
    depends = apart(alone, seen[:, : len(few)]) > 1e-5
    wrong = _error(seen, expected.table(where_all)) > slack
    short = _error(seen, replace(expected, longer=None).table(where_all)) <= slack
    if depends and log.found("history"):
        return  # what earlier calls left has a finding
    if expected.longer is None or spec is None:
        if depends:
            add_length(log, evidence, bad + 1)
            return
    elif wrong and (depends or short):
        evidence += f"; declared {spec.scaling!r}"
        plain = replace(spec, scaling=None)
        if short and torch.equal(plain.frequencies().inv_freq, spec.frequencies().inv_freq):
            log.add("scaling-ignored", evidence, plain=plain)
            return
        what = "are not those of the declared scaling" if depends else "do not depend on the length"
        log.add("scaling", evidence, what=f"The frequencies of long calls {what}")
        return
    log.add("far-angles", evidence, where=where)


def add_length(log: Log, evidence: str, length: int) -> None:
    """Add the finding that the frequencies depend on the length of the call; a note if that is declared."""
    log.limit = length
    log.facts["depends on length"] = f"yes, first seen in calls of {length:,} positions"
    declared = log.spec is not None and log.spec.by_length
    log.add("length", evidence, "note" if declared else "warning")


def _behaviour_after(
    log: Log, profile: Profile, expected: Expected, last: int, bad: int
) -> tuple[str, int]:
    """Return what the function does after the last right position: the kind of finding, and its jump of positions."""
    size = last + 1
    after = [size + 1, size + 7, bad]
    try:
        seen = {p: measured(log, profile, [p]) for p in dict.fromkeys((size, *after))}
    except CallFailed:
        return "far-angles", 0

    def all_are(wanted: Callable[[int], torch.Tensor]) -> bool:
        return all(
            _error(seen[p], wanted(p)) <= 3 * expected.bound(p) + max(1e-3, profile.noise)
            for p in after
        )

    none = torch.zeros(2, 1, len(expected.omegas), dtype=torch.float64)
    ones = torch.stack((torch.ones_like(none[0]), none[1]))
    known: dict[str, Callable[[int], torch.Tensor]] = {
        "table-identity": lambda _: ones,
        "table-zero": lambda _: none,
        "table-clamp": lambda _: expected.table([last]),
        "table-wrap": lambda p: expected.table([p % size]),
    }
    for kind, wanted in known.items():
        if all_are(wanted):
            return kind, 0
    if any(not bool(each.isfinite().all()) for each in seen.values()):
        return "table-nan", 0
    place = after.pop(0)
    exact = expected.table([place])[:, 0]
    ahead = torch.atan2(*seen[place][:, 0].flip(0)) - torch.atan2(*exact.flip(0))
    jump = shift_of(expected.at(place + 1), ahead, 3 * expected.bound(place) + 1e-3)
    if jump and all_are(lambda p: expected.table([p + jump])):
        by_id = log.subject.way.takes_positions and not log.subject.way.counts
        return "padding-id" if by_id and last == 0 and abs(jump) <= 2 else "position-jump", jump
    return "far-angles", 0


def check_type_history(log: Log, profile: Profile) -> None:
    """Check whether a call in bfloat16 makes later float32 results coarser, as a cached table would."""
    if torch.bfloat16 not in log.dtypes or log.found("history"):
        return
    with log.check("results do not depend on the dtype of earlier calls"):
        near = [position for position in ODD if position < 5000]
        positions, alone = _accepted(log, renewed(profile), near, torch.float32)
        used = renewed(profile)
        measured(log, used, positions, torch.bfloat16)
        size = _error(measured(log, used, positions), alone)
        if size > 1e-4:
            log.add(
                "history",
                f"a cosine or sine differs by {size:.3g} from that of a function never called in bfloat16",
                what="The result of a call",
                how=": float32 results are coarser after a call in bfloat16",
            )
