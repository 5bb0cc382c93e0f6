"""Compare the measured rotation with the declared spec: pairing, slice, frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tightrope._errors import bad_type, bad_value
from tightrope.frequencies import Given
from tightrope.spec import RopeSpec

from ._adapter import rates
from ._impulse import Shape
from ._log import Log
from ._rotation import angle_body, omegas_of
from ._subject import Subject, like

_CLOSE = 1e-4
"""Largest relative error of a frequency that counts as equal. float32 gives 1e-6."""
_FAR = 2**16
"""A position at which even slow pairs have turned visibly."""


def check_spec(spec: RopeSpec | None, head_dim: int | None) -> None:
    """Refuse a spec with which the audit cannot compare a function."""
    if spec is None:
        return
    if not isinstance(spec, RopeSpec):
        raise bad_type(f"spec must be a RopeSpec or None but got {spec!r}")
    if head_dim is not None and head_dim != spec.head_dim:
        raise bad_value(
            f"head_dim must be that of the spec, {spec.head_dim}, or None but got {head_dim}"
        )
    if len(spec.frequencies().inv_freq.shape) > 1:
        raise bad_value(
            "spec must have the same frequencies for all heads, as the audit measures one head, but "
            f"got {spec!r}"
        )
    if spec.axis_count > 1 and text_of(spec) is None:
        raise bad_value(
            "spec must not combine scaling with frequencies that restart with each axis, as the audit "
            f"needs a spec of one axis that equals it on text, but got {spec!r}"
        )


def text_of(spec: RopeSpec) -> RopeSpec | None:
    """Return the one-axis spec that equals a spec of several axes on text (equal coordinates).

    Returns:
        None if there is none, because scaled frequencies restart with each axis.
    """
    if spec.axes is None:
        return spec
    rates = spec.frequencies().inv_freq
    plain = replace(spec, axes=None)
    if torch.equal(plain.frequencies().inv_freq, rates):
        return plain
    return None if spec.scaling is not None else replace(plain, scaling=Given.of(rates))


def check_axes(log: Log, spec: RopeSpec) -> None:
    """Check that each coordinate turns the pairs declared for it, and no others."""
    if spec.axes is None or log.shape is None:
        return
    name = "each coordinate turns its own pairs"
    if not log.subject.call.takes_positions:
        log.skip(name, "the function takes no positions")
        return
    with log.check(name) as subject:
        _axes(log, spec, subject)


def _axes(log: Log, spec: RopeSpec, subject: Subject) -> None:
    far = min(log.longest, _FAR)
    where = [1, 3, 50, far // 17, far]
    x = subject.laid_out(torch.ones(1, subject.heads(2), len(where), subject.head_dim))
    rates = spec.frequencies().inv_freq.tolist()
    for axis in range(spec.axis_count):
        ids = torch.zeros(spec.axis_count, 1, len(where), dtype=torch.int64)
        ids[axis, 0] = torch.tensor(where)
        y = like(subject.raw("rotate", x.clone(), ids.to(subject.device)), x).detach()
        moved = (y - x * log.amplitude).abs().amax((0, 1, 2)) > 1e-3
        for k, (own, _, _) in enumerate(spec.axes.pairs):  # type: ignore[union-attr]
            u = spec.start + k * (2 if spec.interleaved else 1)
            v = u + (1 if spec.interleaved else spec.rotary_dim // 2)
            if abs(rates[k]) * far < 2e-2 or bool(moved[u] | moved[v]) == (own == axis):
                continue
            does = "does not turn" if own == axis else "turns"
            log.add(
                "axes",
                "error",
                "Coordinates do not turn the pairs declared for them.",
                f"coordinate {axis} {does} pair {k} (channels {u} and {v}), which is declared for "
                f"coordinate {own}",
                f"x = torch.ones(1, {subject.heads(2)}, {len(where)}, {subject.head_dim})\n"
                f"positions = torch.zeros({spec.axis_count}, 1, {len(where)}, dtype=torch.int64)\n"
                f"positions[{axis}, 0] = torch.tensor({where})\n"
                f"change = (rotate(x, positions) - {log.amplitude!r} * x)[..., [{u}, {v}]].abs().max()\n"
                f"assert (float(change) > 1e-3) is {own == axis}, float(change)",
            )
            return


def check_declared(log: Log) -> bool:
    """Compare with the declared spec; return whether the frequencies are the declared ones."""
    spec, shape = log.spec, log.shape
    if spec is None or shape is None:
        return False
    with log.check("pairing and slice are as declared"):
        same = _pairing(log, spec, shape)
    if not same or log.subject.call.form.takes_tables:
        return False
    with log.check("frequencies are as declared"):
        return _frequencies(log, spec)
    return False


def add_unchecked(log: Log, spec: RopeSpec) -> None:
    """Add the note that tables of the caller leave a part of the declared spec unchecked."""
    log.skip("frequencies are as declared", "the caller provides them")
    parts = ["base", *(name for name in ("scaling", "axes") if getattr(spec, name) is not None)]
    what = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    log.add(
        "frequencies-unchecked",
        "note",
        f"The caller provides cosines and sines, so the audit did not check the declared {what}.",
        "audit a function of (x, positions) that makes them",
    )


def _pairing(log: Log, spec: RopeSpec, shape: Shape) -> bool:
    pairs = [(pair.first, pair.second) for pair in shape.pairs]
    step = 1 if spec.interleaved else spec.rotary_dim // 2
    stride = 2 if spec.interleaved else 1
    meant = {
        (spec.start + stride * k, spec.start + stride * k + step)
        for k in range(spec.rotary_dim // 2)
    }
    idle = {
        (spec.start + stride * k, spec.start + stride * k + step)
        for k, omega in enumerate(spec.frequencies().inv_freq.tolist())
        if omega == 0
    }
    if set(pairs) == meant - idle or (set(pairs) <= meant and shape.rotary_dim == spec.rotary_dim):
        return True
    dim, heads = log.subject.head_dim, log.subject.heads(2)
    u = spec.start
    body = (
        f"x = torch.zeros(1, {heads}, 1, {dim})\nx[..., {u}] = 1.0\n"
        "y = rotate(x, torch.tensor([[1]]))[0, 0, 0]\n"
        f"assert float(y[{u + step}].abs()) > 1e-3, y.nonzero().flatten()  # the partner of channel {u}"
    )
    # The corrected function takes tables for the declared slice.
    declared = replace(log.subject, inv_freq=rates(spec.rotary_dim, spec.base), space={})
    if shape.interleaved is not None and shape.interleaved != spec.interleaved:
        names = {True: "interleaved", False: "half"}
        log.add(
            "pairing",
            "error",
            f"Channels are paired {names[shape.interleaved]}; {names[spec.interleaved]} was declared.",
            f"channel {pairs[0][0]} turns with channel {pairs[0][1]}, not with {u + step}; weights "
            "made for one pairing give fluent nonsense with the other",
            body,
            declared,
        )
        return False
    log.add(
        "slice",
        "error",
        f"Channels {shape.start} to {shape.start + shape.rotary_dim - 1} rotate; {spec.start} to "
        f"{spec.start + spec.rotary_dim - 1} were declared.",
        f"{len(pairs)} pairs turn, the first being channels {pairs[0][0]} and {pairs[0][1]}",
        body,
        declared,
    )
    return False


def _frequencies(log: Log, spec: RopeSpec) -> bool:
    measured = omegas_of(log)
    meant = spec.frequencies().inv_freq.tolist()
    off = [
        abs(a - b) / max(abs(b), 1e-30) if b else abs(a)
        for a, b in zip(measured, meant, strict=True)
    ]
    # A pair that turns too little to be measured counts as correct.
    off = [
        0.0 if a == 0 and b < 1e-8 else each
        for a, b, each in zip(measured, meant, off, strict=True)
    ]
    worst = max(range(len(off)), key=off.__getitem__)
    # Declared frequencies rounded to 16 bits pass here: the check of angles finds what was rounded.
    if off[worst] <= _CLOSE or is_rounded(measured, meant):
        return True
    code, sentence, extra = _cause(log, spec, measured, meant)
    u = spec.start + worst * (2 if spec.interleaved else 1)
    v = u + (1 if spec.interleaved else spec.rotary_dim // 2)
    position = _visible(abs(measured[worst] - meant[worst]))
    log.add(
        code,
        "error",
        sentence,
        f"pair {worst} (channels {u} and {v}) turns by {measured[worst]:.6g} rad per position, "
        f"{meant[worst]:.6g} declared{extra}",
        angle_body(
            log,
            pair=(u, v),
            position=position,
            wanted=f"{position} * {meant[worst]:.12g}",
            tolerance=1e-2,
        ),
    )
    return False


def _visible(difference: float) -> int:
    """Return a position where a difference of frequencies gives a clear difference of angles."""
    position = 1
    while position * difference < 2e-2 and position < 2**16:
        position *= 2
    return position


def _cause(
    log: Log, spec: RopeSpec, measured: Sequence[float], meant: Sequence[float]
) -> tuple[str, str, str]:
    """Return (code, sentence, more evidence) for frequencies that are not the declared ones."""
    plain = replace(spec, scaling=None)
    if spec.scaling is not None and _same(measured, plain.frequencies().inv_freq.tolist()):
        return (
            "scaling-ignored",
            f"The declared scaling is not applied: frequencies are those of {plain!r}.",
            f"; declared {spec.scaling!r}",
        )
    if spec.rotary_dim < spec.head_dim:
        row = [spec.base ** (-2 * k / spec.head_dim) for k in range(len(measured))]
        if _same(measured, row):
            return (
                "denominator",
                f"The exponents of the frequencies are divided by head_dim, {spec.head_dim}, not by "
                f"rotary_dim, {spec.rotary_dim}.",
                "",
            )
    ratios = [b / a for a, b in zip(measured, meant, strict=True) if a and b]
    if len(ratios) > 1 and max(ratios) - min(ratios) <= 2 * _CLOSE * max(ratios):
        return (
            "scaling",
            f"All frequencies are the declared ones divided by {ratios[0]:.6g}.",
            "",
        )
    found = None if log.identity is None else log.identity.spec
    if found is not None and not log.identity.loose:  # type: ignore[union-attr]
        if found.scaling is None and spec.scaling is None:
            return "base", f"The base is {found.base:g}; {spec.base:g} was declared.", ""
        return "scaling", f"The frequencies are those of {found!r}.", f"; declared {spec!r}"
    return "frequencies", "The frequencies are not the declared ones.", ""


def _same(measured: Sequence[float], row: Sequence[float]) -> bool:
    return all(
        abs(a - b) <= _CLOSE * max(abs(b), 1e-30) for a, b in zip(measured, row, strict=True)
    )


def is_rounded(measured: Sequence[float], meant: Sequence[float]) -> bool:
    """True if the measured values are those of `meant` rounded to a 16-bit dtype."""
    exact = torch.tensor(meant, dtype=torch.float64)
    seen = torch.tensor(measured, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        near = exact.to(dtype).double()
        differs = (near - exact).abs() > 2e-5 * exact
        if int(differs.sum()) >= 1 and bool(((seen - near).abs() <= 2e-5 * near + 1e-12).all()):
            return True
    return False


def check_identity(log: Log) -> None:
    """Without a declared spec, warn of a base below 1000 if exponents divided by head_dim may explain it."""
    identity, shape = log.identity, log.shape
    if log.spec is not None or identity is None or shape is None or identity.spec is None:
        return
    if identity.loose:
        return
    with log.check("frequencies are plausible"):
        if identity.by_head_dim is not None and identity.spec.base < 1000 <= identity.by_head_dim:
            log.add(
                "denominator",
                "warning",
                f"The base is {identity.spec.base:g}; or it is {identity.by_head_dim:g}, and the "
                f"exponents are divided by head_dim, {log.subject.head_dim}, not by rotary_dim, "
                f"{shape.rotary_dim}.",
                "declare the intended rotation with spec=",
            )
