"""Checks on impulse responses: rotation, pairing, direction, amplitude, frequencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import torch

from ._guard import CallFailed
from ._identify import identify
from ._impulse import (
    NEAR,
    Line,
    MeasuredPair,
    Shape,
    agrees,
    lines_of,
    matrices,
    measure_shape,
    shift_of,
)
from ._log import Log
from ._memory import add_does_nothing, add_not_finite

_LOOSE = 8e-3
"""Tolerance of amplitudes; bfloat16 tables change them by up to 4e-3."""
# A rotation, even a scaled one, keeps equal lengths equal and right angles right.
_KEEPS = """
x = torch.zeros(1, {heads}, 1, {dim})
x[..., {u}] = 1.0
y = rotate(x, torch.tensor([[{position}]]))[0, 0, 0].double()
x = torch.zeros(1, {heads}, 1, {dim})
x[..., {v}] = 1.0
z = rotate(x, torch.tensor([[{position}]]))[0, 0, 0].double()
assert abs(y @ y - z @ z) < 1e-3 and abs(y @ z) < 1e-3, (y @ y, z @ z, y @ z)
"""
_ANGLE_BODY = """
x = torch.zeros(1, {heads}, 1, {dim}, dtype=torch.{dtype})
x[..., {u}] = 1.0
y = rotate(x, torch.tensor([[{position}]]))[0, 0, 0].double()
angle = math.atan2(y[{end}], y[{start}])  # of channels {u} and {v}
wanted = {wanted}
assert abs(math.remainder(angle - wanted, 2 * math.pi)) < {tolerance}, (angle, wanted)
"""


def angle_body(
    log: Log,
    *,
    pair: tuple[int, int],
    position: int,
    wanted: str,
    tolerance: float = 1e-3,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return snippet lines that compare one angle with the expression ``wanted``."""
    return _ANGLE_BODY.format(
        heads=log.subject.heads(2),
        dim=log.subject.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        u=pair[0],
        v=pair[1],
        start=pair[0] if log.shape is None else log.shape.comes_out(pair[0]),
        end=pair[1] if log.shape is None else log.shape.comes_out(pair[1]),
        position=position,
        wanted=wanted,
        tolerance=tolerance,
    )


def check_rotation(log: Log) -> bool:
    """Measure the channel pairs and report their faults; return whether angles can be checked."""
    subject = log.subject
    with log.check("it rotates pairs of channels") as fresh:
        shape = measure_shape(fresh)
        log.shape = shape
        sound = _pairs_are_rotations(log, shape)
    if log.shape is None or not log.shape.pairs:
        return False
    log.facts["pairing"] = shape.pairing
    log.facts["channels"] = _channels(shape, subject.head_dim)
    if not sound:
        return False
    if shape.order is not None:
        _moved(log, shape)
    log.lines = lines_of(shape)
    log.amplitude = median(a for pair in shape.pairs for a in pair.amplitude[:4])
    with log.check("direction and position 0"):
        _direction(log, shape)
    if log.found("not-linear"):
        log.skip(
            "amplitude and frequencies",
            "the function is not linear, so impulses do not predict its result for other x",
        )
        return False
    with log.check("amplitude"):
        _amplitude(log, shape)
    _name(log, shape)
    return True


def _moved(log: Log, shape: Shape) -> None:
    halves = shape.interleaved and shape.comes_out(shape.start + 2) == shape.start + 1
    how = (
        "pairs go in interleaved and come out as two halves"
        if halves
        else (f"channel {next(i for i, j in enumerate(shape.order or ()) if i != j)} changes place")
    )
    log.facts["order"] = how
    log.add(
        "channel-order",
        "note",
        "Channels come out in a different order.",
        f"{how}; scores stay the same, as q and k are reordered alike, but other implementations cannot "
        "use the rotated keys",
    )


def omegas_of(log: Log) -> list[float]:
    """Return the absolute frequency of each pair of the slice, rad per position; 0 if it never turns."""
    if log.shape is None:
        return []
    by_first = {
        pair.first: abs(line.slope) for pair, line in zip(log.shape.pairs, log.lines, strict=True)
    }
    half = log.shape.rotary_dim // 2
    step = 2 if log.shape.interleaved else 1
    return [by_first.get(log.shape.start + step * k, 0.0) for k in range(half)]


def _channels(shape: Shape, head_dim: int) -> str:
    last = shape.start + shape.rotary_dim - 1
    turning = 2 * len(shape.pairs)
    idle = f", {turning} of them turning" if turning < shape.rotary_dim else ""
    return f"{shape.start} to {last} of {head_dim}{idle}"


def _pairs_are_rotations(log: Log, shape: Shape) -> bool:
    dim, heads = log.subject.head_dim, log.subject.heads(2)
    if not bool(shape.matrices.isfinite().all()):
        add_not_finite(log)
        return False
    if not shape.pairs and not shape.tangled and not shape.alone:
        add_does_nothing(log)
        return False
    if shape.tangled or (shape.pairs and shape.interleaved is None and shape.rotary_dim > 2):
        some = shape.tangled[:4] or tuple(pair.first for pair in shape.pairs[:4])
        index = 3
        column = shape.matrices[index, :, some[0]]
        reach = (column.abs() > 1e-6).nonzero().flatten().tolist()
        start = (
            f"x = torch.zeros(1, {heads}, 1, {dim})\nx[..., {some[0]}] = 1.0\n"
            f"y = rotate(x, torch.tensor([[{shape.positions[index]}]]))[0, 0, 0]\n"
            "reached = (y.abs() > 1e-6).nonzero().flatten().tolist()\n"
        )
        usual = f"(1, {dim // 2})" if not shape.tangled else "range(-len(y), len(y))"
        log.add(
            "not-pairs",
            "error",
            "Channels turn neither in half nor in interleaved pairs.",
            f"channel {some[0]} affects channels {_list(reach)} at position {shape.positions[index]}",
            f"{start}assert len(reached) <= 2 and reached[-1] - reached[0] in {usual}, reached",
        )
        return False
    if shape.alone:
        i = shape.alone[0]
        factors = shape.matrices[:, i, i]
        log.add(
            "pass-through",
            "error",
            f"Channels {_list(shape.alone)} belong to no pair but are changed.",
            f"channel {i} is multiplied by {_list([f'{f:.4g}' for f in factors[:5].tolist()])} at "
            f"positions {_list(shape.positions[:5])}",
            f"x = torch.zeros(1, {heads}, 1, {dim})\nx[..., {i}] = 1.0\n"
            f"y = rotate(x, torch.tensor([[3]]))\nassert abs(float(y[0, 0, 0, {i}]) - 1.0) < 1e-5, y",
        )
        if not shape.pairs:
            return False
    wrong = [pair for pair in shape.pairs if not _is_rotation(pair)]
    if not wrong:
        return True
    _add_not_a_rotation(log, shape, wrong[0], len(wrong))
    return False


def _is_rotation(pair: MeasuredPair) -> bool:
    same = all(agrees(a, b, 1e-2) for a, b in zip(pair.angle_first, pair.angle_second))
    return same and pair.skew <= 1e-2 * max(pair.amplitude)


def _add_not_a_rotation(log: Log, shape: Shape, pair: MeasuredPair, count: int) -> None:
    position = _clearest(shape.positions, pair)
    index = shape.positions.index(position)
    body = _KEEPS.format(
        heads=log.subject.heads(2),
        dim=log.subject.head_dim,
        u=pair.first,
        v=pair.second,
        position=position,
    )
    first, second = pair.angle_first[index], pair.angle_second[index]
    evidence = (
        f"{count} of {len(shape.pairs)} pairs; channels {pair.first} and {pair.second} at position "
        f"{position}: the first turns by {first:+.4f} rad, the second by {second:+.4f}"
    )
    opposite = all(
        agrees(a, -b, 1e-2) or agrees(a, math.pi - b, 1e-2)
        for a, b in zip(pair.angle_first, pair.angle_second)
    )
    if opposite:
        log.add(
            "sign-missing",
            "error",
            "The two sines of a pair have the same sign; in a rotation one of them is negative.",
            evidence,
            body,
        )
    elif pair.skew > 1e-2 * max(pair.amplitude):
        log.add(
            "not-a-rotation",
            "error",
            "The two channels of a pair are scaled by different factors, so this is not a rotation.",
            f"{evidence}; lengths differ by up to {pair.skew:.4f}",
            body,
        )
    else:
        log.add(
            "table-pairing",
            "error",
            "The two channels of a pair turn by different angles: channels have one pairing, and "
            "cosines and sines have the order of the other.",
            evidence,
            body,
        )


def _clearest(positions: Sequence[int], pair: MeasuredPair) -> int:
    """Return the smallest position where the angles of a pair's two channels differ clearly, else the last."""
    for position, a, b in zip(positions, pair.angle_first, pair.angle_second):
        if not agrees(a, b, 5e-2):
            return position
    return positions[-1]


def _direction(log: Log, shape: Shape) -> None:
    """Check the direction of the turn, and that nothing turns at position 0."""
    lines = [line for line in log.lines if abs(line.slope) > 1e-6] or list(log.lines)
    pair = shape.pairs[0]
    backward = sum(line.slope < 0 for line in lines)
    quarter = [agrees(abs(line.intercept), math.pi / 2, 2e-2) for line in lines]
    both = (pair.first, pair.second)
    slope = abs(log.lines[0].slope)
    if all(quarter):
        log.add(
            "swapped-tables",
            "error",
            "Cosine and sine are swapped: at position 0 every pair turns by a quarter turn.",
            f"channels {pair.first} and {pair.second}: {log.lines[0].intercept:+.4f} rad at position 0",
            angle_body(log, pair=both, position=0, wanted="0.0"),
        )
        return
    if backward:
        name = (
            "All pairs turn" if backward == len(lines) else f"{backward} of {len(lines)} pairs turn"
        )
        log.add(
            "sign",
            "warning" if log.spec is None else "error",
            f"{name} in the opposite direction to RoPE: the sine has the wrong sign.",
            f"channels {pair.first} and {pair.second} turn by {log.lines[0].slope:+.4f} rad per "
            "position; RoPE turns the first channel towards the second. Either direction works, but the two cannot be mixed",
            angle_body(log, pair=both, position=1, wanted=f"{slope:.9g}"),
        )
    if all(agrees(line.intercept, 0.0, 1e-3) for line in lines):
        return
    if all(agrees(each.angle_first[0], 0.0, 1e-3) for each in shape.pairs):
        # Position 0 itself is right: the check of angles finds where the others begin to be wrong.
        log.shift = 0
        return
    if whole := shift_of(lines):
        log.shift = whole
        log.add(
            "position-offset",
            "warning",
            f"Positions are off by {whole:+d}: position 0 is rotated as position {whole} should be.",
            f"channels {pair.first} and {pair.second}: {log.lines[0].intercept:+.4f} rad at position "
            f"0, and {log.lines[0].slope:.4f} rad per position; harmless if q and all keys go through "
            "this function, wrong with keys that other code cached",
            angle_body(log, pair=both, position=0, wanted="0.0"),
        )
    else:
        log.add(
            "phase",
            "error",
            "Position 0 is rotated by angles that no position offset explains.",
            f"channels {pair.first} and {pair.second}: {log.lines[0].intercept:+.4f} rad at position 0",
            angle_body(log, pair=both, position=0, wanted="0.0"),
        )


def _amplitude(log: Log, shape: Shape) -> None:
    meant = 1.0 if log.spec is None else log.spec.amplitude
    if log.subject.call.form.takes_tables and abs(log.amplitude - 1.0) <= _LOOSE:
        meant = 1.0  # the caller's tables may include the factor; those of the audit do not
    if abs(log.amplitude - meant) <= _LOOSE:
        # Replace a measurement that may come from rounded tables.
        log.amplitude = meant
    log.facts["amplitude"] = f"{log.amplitude:.6g}"
    pair = shape.pairs[0]
    # Near positions only: faults far away have findings of their own.
    every = [a for each in shape.pairs for a in each.amplitude[: len(NEAR)]]
    body = (
        f"x = torch.zeros(1, {log.subject.heads(2)}, 1, {log.subject.head_dim})\n"
        f"x[..., {pair.first}] = 1.0\n"
        "length = float(rotate(x, torch.tensor([[{position}]]))[0, 0, 0].norm())\n"
        f"assert abs(length - {meant:.9g}) < 1e-3, length"
    )
    if max(every) - min(every) > _LOOSE * log.amplitude:
        worst = max(range(len(NEAR)), key=lambda i: abs(pair.amplitude[i] - meant))
        log.add(
            "amplitude-varies",
            "warning",
            "The factor on the rotated channels depends on position or pair, as with xPos or a gate.",
            f"factors from {min(every):.4g} to {max(every):.4g}",
            body.format(position=shape.positions[worst]),
        )
    elif abs(log.amplitude - meant) > _LOOSE:
        log.add(
            "amplitude",
            "warning" if log.spec is None else "error",
            f"The rotated channels are multiplied by {log.amplitude:.6g}, not by {meant:.6g}.",
            f"scores of two rotated vectors are multiplied by the square, {log.amplitude**2:.6g}",
            body.format(position=3),
        )


def _name(log: Log, shape: Shape) -> None:
    """Identify base and scaling from the frequencies."""
    if log.subject.call.form.takes_tables:
        log.facts["frequencies"] = "provided by the caller, as cosines and sines"
        return
    omegas = omegas_of(log)
    if len(shape.pairs) == 1 and shape.interleaved is None:
        log.facts["frequencies"] = f"{omegas[0]:.6g} rad per position"
        return
    log.identity = identify(
        omegas,
        log.amplitude,
        head_dim=log.subject.head_dim,
        rotary_dim=shape.rotary_dim,
        start=shape.start,
        interleaved=bool(shape.interleaved),
    )
    text = log.identity.text
    log.facts["frequencies"] = f"about {text}" if log.identity.loose else text
    _settle_amplitude(log)


def _settle_amplitude(log: Log) -> None:
    """Drop the amplitude finding if the recognised scaling rule has that amplitude."""
    found = log.identity.spec if log.identity is not None else None
    if log.spec is None and found is not None and found.scaling is not None:
        if abs(found.amplitude - log.amplitude) <= _LOOSE:
            log.findings = [each for each in log.findings if each.code != "amplitude"]


def check_keys(log: Log) -> None:
    """Check that k is rotated like q."""
    if not log.subject.call.takes_keys or log.shape is None:
        return
    with log.check("k is rotated like q") as fresh:
        positions = log.shape.positions[:9]
        ours = log.shape.matrices[: len(positions)]
        keys = matrices(fresh, positions, keys=True)
        eye = torch.eye(keys.shape[-1], dtype=torch.float64)
        body = (
            f"x = torch.randn(1, {fresh.heads(2)}, 4, {fresh.head_dim})\n"
            "q, k = rotate_qk(x.clone(), x.clone(), torch.tensor([[1, 2, 3, 4]]))\n"
            "assert torch.allclose(q, k, atol=1e-4), float((q - k).abs().max())"
        )
        apart = float((keys - ours).abs().max())
        if bool(((keys - eye).abs() < 1e-9).all()) and bool((ours - eye).abs().max() > 1e-3):
            log.add(
                "k-not-rotated",
                "error",
                "k is returned unchanged; only q is rotated.",
                "impulses in k come back unchanged at every position",
                body,
            )
        elif apart > 1e-4:
            log.add(
                "q-k",
                "error",
                "q and k are rotated differently.",
                f"for equal vectors at equal positions the results differ by up to {apart:.4g}",
                body,
            )


_SHIFTS = (1, 100, 1000, 30_000)
_RELATIVE = """
q = torch.randn(1, {heads}, 1, {dim})
k = torch.randn(1, {heads}, 1, {dim})


def score(m, n):
    return (rotate(q.clone(), torch.tensor([[m]])) * rotate(k.clone(), torch.tensor([[n]]))).sum(-1)


near, far = score(7, 3), score({m}, {n})
assert torch.allclose(near, far, atol={tolerance}), float((near - far).abs().max())
"""


def check_relative(log: Log) -> None:
    """Check that scores do not change when both positions shift. A drift with a known cause is no finding."""
    if log.subject.call.form.takes_tables:
        log.skip("scores depend on relative position only", "the caller provides the angles")
        return
    with log.check("scores depend on relative position only") as fresh:
        q, k = fresh.random(1, 2, 1, seed=31), fresh.random(1, 2, 1, seed=32)

        def score(m: int, n: int) -> torch.Tensor:
            turned = [fresh.rotate(x.clone(), [p]).detach().double() for x, p in ((q, m), (k, n))]
            return (turned[0] * turned[1]).sum(-1).cpu()

        here = score(7, 3)
        size = float((q.double().norm(dim=-1) * k.double().norm(dim=-1)).max())
        drift = {}
        for shift in _SHIFTS:
            if shift + 7 > log.longest or (not fresh.call.takes_ids and shift > 2000):
                break
            try:
                drift[shift] = float((score(7 + shift, 3 + shift) - here).abs().max()) / size
            except CallFailed:
                break
        log.facts["scores"] = (
            "change by "
            + ", ".join(f"{value:.1e} (+{shift})" for shift, value in drift.items())
            + " of |q| |k|"
        )
        worst = max(drift, key=drift.__getitem__, default=1)
        # Two float32 angles at position 30,000 are each off by at most 4e-3.
        if drift and drift[worst] > 1e-2 and not log.found() and not log.found("length"):
            log.add(
                "relative",
                "error",
                "Scores depend on the positions of q and k, not only on their distance.",
                f"from positions 7 and 3 to {7 + worst} and {3 + worst} a score changes by "
                f"{drift[worst]:.3g} of |q| |k|",
                _RELATIVE.format(
                    heads=fresh.heads(2),
                    dim=fresh.head_dim,
                    m=7 + worst,
                    n=3 + worst,
                    tolerance=f"{1e-2 * size:.3g}",
                ),
            )


def _list(values: Sequence[object]) -> str:
    shown = [str(value) for value in values[:8]]
    return ", ".join(shown) + (", …" if len(values) > 8 else "")


def direction(line: Line) -> float:
    """Return +1 if positions turn the first channel towards the second, else -1."""
    return -1.0 if line.slope < 0 else 1.0
