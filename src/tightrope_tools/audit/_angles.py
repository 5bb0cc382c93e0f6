"""Check angles at small and large positions: find roundings to 16 bits and the ends of tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import torch

from ._declared import is_rounded
from ._exact import cos_sin, decimals
from ._guard import CallFailed
from ._impulse import Line, responses, shift_of, wrapped
from ._log import Log
from ._report import AngleError
from ._rotation import angle_body, direction, omegas_of
from ._subject import Subject

FAR = (4096, 32768, 131072, 1_048_576)
_BELOW = (1, 2, 3, 5, 7, 11, 14, 20)
# Positions to test: 0, for functions that number tokens themselves, and some that bfloat16 (above
# 256) or float16 (above 2048) cannot represent.
_ODD = (0, 37, 255, 257, 301, 515, 1003, 2051, 4099, 9999)
_PLACES = (
    *("far-angles", "position-jump", "table-clamp", "table-identity"),
    *("table-nan", "table-wrap", "table-zero"),
)
_NO_TABLE = 131_072
"""The largest position to test if the function numbers tokens itself and takes no offset."""
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Model:
    """The expected angles of the function.

    Attributes:
        omegas: frequency of each pair that turns, radians per position; negative if it turns backwards.
        intercepts: angle of each such pair at position 0, radians.
        sure: whether the frequencies are known exactly, not only measured.
        longer: length of the call -> frequencies, if they depend on it; ``omegas`` are then those of short calls.
    """

    omegas: tuple[Decimal, ...]
    intercepts: torch.Tensor
    sure: bool
    longer: Callable[[int], tuple[Decimal, ...]] | None = None

    def at(self, length: int) -> tuple[Decimal, ...]:
        """Return the frequencies of a call of this length."""
        return self.omegas if self.longer is None else self.longer(length)

    def table(self, positions: Sequence[int]) -> torch.Tensor:
        """Return cos and sin of the angles at the positions of one call, float64 ``[2, positions, pairs]``."""
        cos, sin = cos_sin(positions, self.at(max(*positions, 0) + 1))
        turn_cos, turn_sin = self.intercepts.cos(), self.intercepts.sin()
        return torch.stack((cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin))


def model_of(log: Log, declared: bool) -> Model | None:
    """Return the expected angles: of the declared spec, else of the identified rule, else as measured.

    Return None, and record the check as skipped, if no angle can be judged.

    Args:
        declared: whether the function has the frequencies of the declared spec.
    """
    shape = log.shape
    name = "angles"
    if shape is None or log.subject.call.form.takes_tables:
        log.skip(name, "the caller provides them")
        return None
    if log.found("history") and not log.subject.renew:
        log.skip(name, "they depend on earlier calls, and no fresh copy can be made; use make=True")
        return None
    spec = log.spec if declared else (log.identity.spec if log.identity is not None else None)
    by_length = declared and spec is not None and spec.by_length
    if any(finding.code == "length" for finding in log.findings) and not by_length:
        log.skip(name, "they depend on the length of the call, by an undeclared rule")
        return None
    signs = [int(direction(line)) for line in log.lines]
    intercepts = torch.tensor([line.intercept for line in log.lines], dtype=torch.float64)
    if log.shift is not None:
        # The measured intercepts are less exact: each is one float32 angle.
        intercepts = torch.tensor([log.shift * line.slope for line in log.lines]).double()
    elif float(intercepts.abs().max()) < 1e-3:
        intercepts = torch.zeros_like(intercepts)
    seen = omegas_of(log)

    def signed(exact: tuple[Decimal, ...]) -> tuple[Decimal, ...]:
        moving = [omega for omega, measured in zip(exact, seen, strict=True) if measured]
        return tuple(omega * sign for omega, sign in zip(moving, signs, strict=True))

    loose = not declared and log.identity is not None and log.identity.loose
    if loose and spec is not None:
        loose = not is_rounded(seen, spec.frequencies().inv_freq.tolist())
    if spec is None or loose:
        return Model(decimals([line.slope for line in log.lines]), intercepts, False)
    longer = (lambda length: signed(spec.frequencies(length).exact)) if by_length else None
    return Model(signed(spec.frequencies().exact), intercepts, True, longer)


def measure(
    subject: Subject, log: Log, positions: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Measure cos and sin of the function, float64 ``[2, positions, pairs]``, divided by the amplitude.

    Raises:
        CallFailed, Hangs: as in :meth:`Subject.rotate`.
    """
    if log.shape is None:
        raise CallFailed("its pairs of channels are unknown")
    seen = responses(subject, log.shape, positions, dtype)
    if log.found("amplitude-varies"):
        return seen / torch.hypot(seen[0], seen[1])
    return seen / log.amplitude


def bound_of(model: Model, position: int) -> float:
    """Bound the error of a cosine or sine if frequency and angle are each rounded once to float32."""
    fastest = max(abs(float(omega)) for omega in model.omegas)
    return min(2.0, position * fastest * 2.0**-23 + 2.0**-22)


def check_angles(log: Log, model: Model) -> None:
    """Check whether angles were rounded to 16 bits, and up to which position they are right."""
    for dtype in log.dtypes:
        name = str(dtype).removeprefix("torch.")
        with log.check(f"angles below position 10,000, {name} x") as fresh:
            _near(log, fresh, model, dtype)
    if torch.float32 not in log.dtypes:
        log.skip("angles at large positions", "float32 is not tested")
        return
    if log.found("amplitude-varies"):
        log.skip("angles at large positions", "the amplitude varies, so results may vanish there")
        return
    with log.check("angles at large positions") as fresh:
        _far(log, fresh, model)


def _most(log: Log) -> int:
    counts = not log.subject.call.takes_ids and "offset" not in log.subject.call.roles
    return min(log.longest, _NO_TABLE) if counts else log.longest


def _accepted(
    log: Log, subject: Subject, positions: Sequence[int], dtype: torch.dtype
) -> tuple[list[int], torch.Tensor]:
    """Return the positions before the first that the function refuses, and their cos and sin."""
    if "offset" in subject.call.roles:
        # One call goes over all tokens up to the last position: limit their number.
        positions = [position for position in positions if position <= _NO_TABLE // 8]
    positions = [position for position in positions if position <= _most(log)]
    while positions:
        try:
            return list(positions), measure(subject, log, positions, dtype)
        except CallFailed:
            positions = positions[:-1]
    raise CallFailed(f"it refuses x of {dtype}")


def _near(log: Log, subject: Subject, model: Model, dtype: torch.dtype) -> None:
    positions, seen = _accepted(log, subject, _ODD, dtype)
    exact = model.table(positions)
    step = torch.finfo(dtype).eps
    slack = torch.tensor([0.6 * step + 3 * bound_of(model, p) + 1e-6 for p in positions])[:, None]
    error = (seen - exact).abs().nan_to_num(math.inf)
    if bool((error <= slack).all()):
        return
    if dtype is torch.float32 and _is_table_type(log, subject, model, positions, seen, exact):
        return
    causes = []
    if model.sure or dtype is not torch.float32:
        causes = _rounding(model, positions, seen, 0.6 * step + 1e-4)
    if not causes and dtype is torch.float32:
        first = next(p for p, bad in zip(positions, (error > slack).any(2).any(0)) if bad)
        _where_it_ends(log, subject, model, first + 1)
        return
    if not causes and log.found(*_PLACES):
        return
    # Without a known cause, report only that angles are wrong.
    for code, fault in causes or [("far-angles", "Angles are wrong")]:
        pair, position, wanted = _worst(log, model, positions, seen, exact)
        size = float(error[:, positions.index(position)].max())
        log.add(
            code,
            "error",
            f"{fault}{'' if dtype is torch.float32 else f', for {_short(dtype)} x'}.",
            f"at position {position:,} a cosine or sine is off by {size:.3g}",
            angle_body(
                log,
                pair=pair,
                position=position,
                wanted=wanted,
                tolerance=3e-2 if size > 6e-2 else size / 2,
                dtype=dtype,
            ),
        )


def _is_table_type(
    log: Log,
    subject: Subject,
    model: Model,
    positions: Sequence[int],
    seen: torch.Tensor,
    exact: torch.Tensor,
) -> bool:
    """Report cosines and sines rounded to 16 bits, if that explains all errors; return whether it does."""
    angle = torch.tensor([3 * bound_of(model, p) + 1e-6 for p in positions])[:, None]
    for name, dtype in _TYPES.items():
        step = 0.51 * torch.finfo(dtype).eps * torch.maximum(seen.abs(), exact.abs())
        is_whole = (seen.to(dtype).double() - seen).abs() <= 1e-7
        if bool(((seen - exact).abs() <= step + angle).all()) and bool(is_whole.all()):
            error = (seen - exact).abs().amax((0, 2))
            log.add(
                "table-dtype",
                "warning",
                f"Cosines and sines are rounded to {name} although x is float32.",
                f"they are off by up to {float(error.max()):.3g}, for example at position "
                f"{positions[int(error.argmax())]}",
                _TABLE_BODY.format(
                    heads=subject.heads(2),
                    dim=subject.head_dim,
                    u=log.shape.pairs[0].first if log.shape else 0,
                    count=len(positions),
                    tokens=", ".join(map(str, positions)),
                    dtype=name,
                ),
            )
            return True
    return False


_TABLE_BODY = """
x = torch.zeros(1, {heads}, {count}, {dim})
x[..., {u}] = 1.0
y = rotate(x, torch.tensor([[{tokens}]]))[0, 0]
assert not torch.equal(y, y.to(torch.{dtype}).float()), "every cosine and sine is a {dtype}"
"""


def _worst(
    log: Log, model: Model, positions: Sequence[int], seen: torch.Tensor, exact: torch.Tensor
) -> tuple[tuple[int, int], int, str]:
    """Return (channels, position, expression of the right angle) of an error.

    It is the first clear error, else the largest.
    """
    error = (seen - exact).abs().nan_to_num(math.inf).amax(0)
    clear = (error > 0.08).nonzero()
    if len(clear):
        row, column = (int(each) for each in clear[0])
    else:
        row, column = divmod(int(error.argmax()), error.shape[1])
    pairs = log.shape.pairs if log.shape is not None else ()
    pair = pairs[column]
    omega = model.at(max(positions) + 1)[column]
    wanted = f"{positions[row]} * {float(omega):.17g}"
    if float(model.intercepts[column]):
        wanted += f" + {float(model.intercepts[column]):.6g}"
    return (pair.first, pair.second), positions[row], wanted


def _rounding(
    model: Model, positions: Sequence[int], seen: torch.Tensor, tolerance: float
) -> list[tuple[str, str]]:
    """Return (code, fault) of the steps that, rounded to 16 bits, explain the angles; [] if none do."""
    omegas = torch.tensor([float(omega) for omega in model.omegas], dtype=torch.float64)
    where = torch.tensor(list(positions), dtype=torch.float64)[:, None]
    steps = (
        ("position-dtype", "Positions are rounded to {}"),
        ("frequency-dtype", "The frequencies are rounded to {}"),
        ("angle-dtype", "Angles, position times frequency, are rounded to {}"),
    )
    best: tuple[float, list[tuple[str, str]]] = (math.inf, [])
    for name, dtype in _TYPES.items():
        for mask in (1, 2, 4, 3, 5, 6, 7):
            p = _cast(where, dtype) if mask & 1 else where
            w = _cast(omegas, dtype) if mask & 2 else omegas
            angle = p * w
            if mask & 4:
                angle = _cast(angle, dtype)
            angle = angle + model.intercepts
            error = float(
                (torch.stack((angle.cos(), angle.sin())) - seen).abs().nan_to_num(2.0).max()
            )
            # A hypothesis with more roundings must fit much better than a simpler one.
            if error <= max(tolerance, 1e-3) and error < 0.5 * best[0]:
                chosen = [
                    (code, fault.format(name))
                    for bit, (code, fault) in enumerate(steps)
                    if mask & (1 << bit)
                ]
                best = (error, chosen)
    return best[1]


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).double()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- far away --------------------------------------------------------------------------------------


def _far(log: Log, subject: Subject, model: Model) -> None:
    """Fill the table of angle errors; find the cause of those above the float32 bound."""
    large: AngleError | None = None
    wrong_at: int | None = None
    for position in FAR:
        if position > _most(log):
            break
        window = [position - below for below in _BELOW][::-1]
        exact = model.table(window)
        try:
            error = _error(measure(subject, log, window), exact)
        except CallFailed as refusal:
            _refused(log, subject, position, str(refusal))
            log.angle_errors.append(AngleError(position, None, None, bound_of(model, position)))
            break
        narrow: float | None = None
        if torch.bfloat16 in log.dtypes:
            try:
                narrow = _error(measure(subject, log, window, torch.bfloat16), exact)
            except CallFailed:
                narrow = None
        bound = bound_of(model, position)
        found = AngleError(position, error, narrow, bound)
        log.angle_errors.append(found)
        if error > 3 * bound + 1e-6:
            wrong_at = wrong_at or position
            if model.sure:
                break
        if error > 1e-3:
            large = found
    if log.found("position-dtype", "frequency-dtype", "angle-dtype", "table-dtype", *_PLACES):
        return
    if wrong_at is not None:
        _where_it_ends(log, subject, model, wrong_at)
    elif large is not None and large.float32 is not None and model.sure:
        log.add(
            "angle-error",
            "note",
            f"Below position {large.position:,} a cosine or sine is off by up to {large.float32:.2g}: "
            "the angles are products in float32.",
            "most models compute angles in this way; for comparison, rounding to bfloat16 changes a value by "
            "up to 3.9e-3 of it",
        )


def _error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    return float((seen - exact).abs().nan_to_num(math.inf).max())


def _refused(log: Log, subject: Subject, position: int, why: str) -> None:
    last = _bisect(1, position - 1, lambda p: _is_taken(log, subject, p))
    log.add(
        "table-end-refused",
        "note",
        f"Positions from {last + 1:,} on are refused.",
        why,
        None,
    )


def _is_taken(log: Log, subject: Subject, position: int) -> bool:
    try:
        measure(subject, log, [position])
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


def _where_it_ends(log: Log, subject: Subject, model: Model, wrong: int) -> None:
    """Bisect for the last right position and report what the function does after it.

    If the frequencies were only measured, report nothing but a jump of positions: angles that differ from the
    expected ones in another way may be due to the measurement.
    """

    def right(position: int) -> bool:
        seen = measure(subject, log, [position])
        return _error(seen, model.table([position])) <= 3 * bound_of(model, position) + 1e-4

    def wrong_near(position: int) -> int | None:
        return next((p for p in (position, position - 1, position - 2) if not right(p)), None)

    bad = wrong_near(wrong - 1)
    if bad is None:
        bad = wrong - 1
    last = _bisect(0, bad, right)
    first = last + 1
    after = [first + 1, first + 7, bad]
    name, sentence = _behaviour_after(log, subject, model, last, after)
    if not model.sure and name != "position-jump":
        return
    # Some positions after the end come out almost right: show one with a clear error.
    errors = {
        p: _error(measure(subject, log, [p]), model.table([p])) for p in (first, first + 7, bad)
    }
    shown = next((p for p, size in errors.items() if size > 5e-2), bad)
    pair, position, wanted = _worst(
        log, model, [shown], measure(subject, log, [shown]), model.table([shown])
    )
    log.add(
        name,
        "error",
        sentence,
        f"right up to position {last:,}; at position {bad:,} a cosine or sine is off by {errors[bad]:.3g}",
        angle_body(
            log,
            pair=pair,
            position=position,
            wanted=wanted,
            tolerance=min(1e-2, float(f"{errors[shown] / 2:.1g}")),
        ),
    )


def _behaviour_after(
    log: Log, subject: Subject, model: Model, last: int, after: Sequence[int]
) -> tuple[str, str]:
    size = last + 1
    ones = torch.stack((torch.ones(1), torch.zeros(1)))[:, :, None].double()

    def all_are(wanted: Callable[[int], torch.Tensor]) -> bool:
        for position in after:
            try:
                seen = measure(subject, log, [position])
            except CallFailed:
                return False
            if not _error(seen, wanted(position)) <= 3 * bound_of(model, position) + 1e-3:
                return False
        return True

    if all_are(lambda _: ones.expand(2, 1, len(model.omegas))):
        return "table-identity", f"Tokens at positions from {size:,} on are returned unrotated."
    if all_are(lambda _: torch.zeros(2, 1, len(model.omegas)).double()):
        return "table-zero", f"Tokens at positions from {size:,} on come back as zeros."
    if all_are(lambda _: model.table([last])):
        return "table-clamp", f"All positions from {size:,} on are rotated as position {last:,}."
    if all_are(lambda position: model.table([position % size])):
        return (
            "table-wrap",
            f"Positions start again at {size:,}: p is rotated as p modulo {size:,}.",
        )
    if any(not bool(measure(subject, log, [position]).isfinite().all()) for position in after):
        return "table-nan", f"Tokens at positions from {size:,} on come back as NaN."
    if (jump := _jump(log, subject, model, size)) and all_are(
        lambda position: model.table([position + jump])
    ):
        count = "offset" if "offset" in subject.call.roles else "position"
        return "position-jump", f"From {count} {size:,} on, positions are off by {jump:+d}."
    return "far-angles", f"Positions from about {size:,} on are rotated by wrong angles."


def _jump(log: Log, subject: Subject, model: Model, position: int) -> int:
    """Return by how many positions a position is rotated too far; 0 if no whole number explains its angles."""
    seen, exact = measure(subject, log, [position])[:, 0], model.table([position])[:, 0]
    angles = torch.atan2(seen[1], seen[0]) - torch.atan2(exact[1], exact[0])
    slopes = [float(omega) for omega in model.at(position + 1)]
    lines = [Line(slope, wrapped(angle)) for slope, angle in zip(slopes, angles.tolist())]
    return shift_of(lines, 3 * bound_of(model, position) + 1e-3)


def check_type_history(log: Log, model: Model) -> None:
    """Check whether a call in bfloat16 makes later float32 results coarser, as a cached table would."""
    if torch.bfloat16 not in log.dtypes or log.found("history"):
        return
    with log.check("results do not depend on the dtype of earlier calls") as subject:
        near = [position for position in _ODD if position < 5000]
        positions, alone = _accepted(log, log.subject.fresh(), near, torch.float32)
        measure(subject, log, positions, torch.bfloat16)
        after = measure(subject, log, positions)
        if _error(after, alone) <= 1e-4:
            return
        pair, position, wanted = _worst(log, model, positions, after, alone)
        first = (
            f"x = torch.zeros(1, {subject.heads(2)}, {len(positions)}, {subject.head_dim})\n"
            f"rotate(x.bfloat16(), torch.tensor([{positions}]))\n"
            f"rotate(x, torch.tensor([{positions}]))\n"
        )
        log.add(
            "history",
            "error",
            "The result of a call depends on earlier calls: float32 results are coarser after a "
            "call in bfloat16.",
            f"at position {position} a cosine or sine differs by {_error(after, alone):.3g} from that of "
            "a function never called in bfloat16",
            first
            + angle_body(log, pair=pair, position=position, wanted=wanted, tolerance=1e-2).strip(),
        )
