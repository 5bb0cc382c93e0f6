"""Compare two rotary functions: whether they agree to the bit, and if not, where they part.

Each function is measured by itself, in the order in which a rotation is computed: channels, positions,
frequencies, angles, tables, roundings. The first step that differs is where the two part; later steps are
compared too, because each is measured with the function's own earlier ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from tightrope._errors import bad_value, public
from tightrope.spec import RopeSpec

from ._audit import check_options
from ._call import CallFailed, Hints, NoCallFound, Subject, undisturbed
from ._profile import (
    NARROW,
    ODD,
    SHORT,
    Profile,
    arithmetic_of,
    measure,
    shares_of,
    wrapped,
)
from ._report import Comparison, Difference
from ._targets import Target, names_stack, resolve, subject_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@public("compare")
def compare(  # noqa: PLR0913  (one argument for each option)
    first: object,
    second: object,
    *,
    spec: RopeSpec | None = None,
    form: str | None = None,
    layout: str | None = None,
    tables: str | None = None,
    head_dim: int | None = None,
    make: bool = False,
    layer_type: str | None = None,
    device: str = "cpu",
) -> Comparison:
    """Compare two rotary functions bit by bit, and name the steps in which they differ.

    Args:
        first, second: targets as in :func:`tightrope_tools.audit.audit`; or ``"stack:NAME"`` for a
            library in :mod:`tightrope.stacks`, or ``"stack:exact"`` for exact angles, both with ``spec``
            or with the spec of the other target's configuration.
        spec: the rotation of stacks; otherwise it only gives the head dimension.
        form, layout, tables, make: how to call ``first``, as in
            :func:`tightrope_tools.audit.audit`; the call of ``second`` is found by trying.
        head_dim: channels of one head, for both.
        layer_type: the layer type of models, if their layers differ.
        device: the device of the tensors passed to the functions.

    Returns:
        A :class:`Comparison`; ``ok`` is True if results and gradients agree to the bit in float32,
        bfloat16 and float16.

    Raises:
        ValueError, TypeError: a target does not exist or is not callable, no call was found, a call
            failed, or an option is wrong.

    >>> found = compare("stack:litgpt", "stack:diffusers", spec=RopeSpec(64))
    >>> found.ok, found.facts["rounding of gradients, bfloat16"]
    (True, ('each', 'each'))
    """
    targets = _targets(first, second, spec, make, layer_type)
    spec = spec or targets[0].spec or targets[1].spec
    check_options(spec, head_dim, device)
    hints = Hints(form, layout, tables, head_dim)
    hints.check()
    profiles = []
    with undisturbed():
        try:
            for target in targets:
                subject = subject_of(target, hints, spec, device)
                profiles.append(_profile_of(subject.fresh(), target.name))
                # The call of the second is found by trying.
                hints = Hints(head_dim=head_dim or targets[1].head_dim or subject.head_dim)
            return _compared(targets, *profiles)
        except NoCallFound as error:
            raise bad_value(
                f"{target.name} must return a rotated x of the same shape but no call was found that "
                f"does: {str(error).rstrip('.')}"
            ) from None
        except CallFailed as error:
            raise bad_value(f"every call must succeed but one failed later: {error}") from None


def _profile_of(subject: Subject, name: str) -> Profile:
    profile = measure(subject)
    if not profile.pairs or profile.tangled:
        raise bad_value(f"{name} must rotate pairs of channels but does not")
    return profile


def _targets(
    first: object, second: object, spec: RopeSpec | None, make: bool, layer_type: str | None
) -> list[Target]:
    """Resolve both targets; a stack gets the spec of the other target if none is given."""

    def found(target: object, make: bool, spec: RopeSpec | None) -> Target:
        return resolve(target, make=make, layer_type=layer_type, spec=spec)

    if names_stack(first):
        other = found(second, False, spec)
        return [found(first, make, spec or other.spec), other]
    own = found(first, make, None)
    return [own, found(second, False, spec or own.spec)]


# --- two functions --------------------------------------------------------------------------


@dataclass
class _Steps:
    """The steps of two functions, as far as they were compared.

    Attributes:
        a, b: the profiles of the functions.
        facts, found: as in :class:`Comparison`.
    """

    a: Profile
    b: Profile
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    found: list[Difference] = field(default_factory=list)

    def add(self, code: str, sentence: str, evidence: str) -> None:
        """Add a difference, once per code."""
        if all(each.code != code for each in self.found):
            self.found.append(Difference(code, sentence, evidence))

    def fact(self, name: str, one: str, other: str, code: str, sentence: str) -> None:
        """Add a fact, and a difference if the functions do not have it in common."""
        self.facts[name] = one, other
        if one != other:
            self.add(code, sentence, f"the first: {one}; the second: {other}")


def _compared(targets: list[Target], a: Profile, b: Profile) -> Comparison:
    steps = _Steps(a, b)
    _compare_channels(steps)
    if len(a.pairs) == len(b.pairs):
        _compare_frequencies(steps)
        _compare_arithmetic(steps, *_compare_angles(steps))
    shares = shares_of(a, b, _DTYPES)
    if not steps.found and any(part for share in shares.values() for part in share):
        steps.add(
            "unexplained",
            "Results differ for a reason that the comparison does not know.",
            "channels, frequencies, angles, tables and roundings are the same",
        )
    return Comparison(targets[0].name, targets[1].name, steps.facts, tuple(steps.found), shares)


def _compare_channels(steps: _Steps) -> None:
    a, b, add = steps.a, steps.b, steps.add
    one, other = (f"{p.start} to {p.start + p.rotary_dim - 1}" for p in (a, b))
    steps.fact("pairing", a.pairing, b.pairing, "pairing", "Channels are paired differently.")
    steps.fact("channels", one, other, "slice", "Other channels rotate.")
    if a.order != b.order:
        add("channel-order", "Channels come out in different orders.", "of one function, reordered")
    signs = [1.0 if float(p.omegas.sum()) >= 0 else -1.0 for p in (a, b)]
    if signs[0] != signs[1]:
        add("sign", "The functions rotate in opposite directions.", "angles have opposite signs")
    evidence = ""
    if a.shift != b.shift:
        evidence = (
            f"position 0 is rotated as position {a.shift} should be by the first, and as position "
            f"{b.shift} by the second, a difference of {a.shift - b.shift:+d} positions"
        )
    elif len(a.pairs) == len(b.pairs):
        gap = wrapped(a.starts * signs[0] - b.starts * signs[1])
        k = int(gap.abs().argmax())
        if float(gap[k].abs()) > 1e-4:
            shift = float(gap[k] / a.omegas[k].abs()) if float(a.omegas[k]) else math.nan
            evidence = (
                f"at position 0, pair {k} is turned by {float(gap[k]):+.6g} rad more by the first, which is "
                f"{shift:+.4g} positions"
            )
    if evidence:
        add("positions", "Positions count from different numbers.", evidence)


def _compare_frequencies(steps: _Steps) -> None:
    a, b = steps.a, steps.b
    first, second = a.omegas.abs(), b.omegas.abs()
    gap = (first - second).abs()
    # Two angles at the last tested position that differ by less than this are equal but for the cosine.
    limit = torch.full_like(gap, max(p.noise / p.farthest for p in (a, b)))
    if _starts_differ(a, b):
        limit = max(p.least / p.farthest for p in (a, b)) + 2.0**-22 * torch.maximum(first, second)
    if bool((gap > limit).any()):
        relative = gap / torch.maximum(first, second).clamp(min=1e-300)
        k = int(relative.argmax())
        evidence = (
            f"pair {k} turns by {float(first[k]):.12g} and {float(second[k]):.12g} rad per position, "
            f"ratio {float(first[k] / second[k]) if float(second[k]) else math.inf:.9g}; "
            f"{int((gap > limit).sum())} of {len(gap)} pairs differ"
        )
        one, other = _precision(first, second, limit), _precision(second, first, limit)
        last = " in their last bits" * (float(relative.max()) < 2.0**-21)
        if one != other:
            steps.facts["frequencies"] = one, other
            steps.add("frequency-dtype", "Frequencies are rounded to different dtypes.", evidence)
        else:
            steps.add("frequencies", f"Frequencies differ{last}.", evidence)
    if abs(a.amplitude - b.amplitude) > max(a.noise, b.noise) * max(a.amplitude, b.amplitude):
        scales = f"{a.amplitude:.9g}", f"{b.amplitude:.9g}"
        sentence = "Rotated channels are scaled by different factors."
        steps.fact("attention factor", *scales, "attention-factor", sentence)


def _starts_differ(a: Profile, b: Profile) -> bool:
    """True if angles at position 0 differ and no whole number of positions explains it.

    All angles of the two are then rounded from different values.
    """
    return not torch.allclose(a.starts, b.starts, rtol=0, atol=1e-4)


def _precision(own: torch.Tensor, other: torch.Tensor, limit: torch.Tensor) -> str:
    """Return the dtype that frequencies are rounded to: 16 bits only if they are the other ones rounded."""

    def is_rounded(dtype: torch.dtype) -> bool:
        return bool(((own.to(dtype).double() - own).abs() <= 2 * limit).all())

    for dtype in NARROW:
        step = torch.finfo(dtype).eps
        if is_rounded(dtype) and bool(((own - other).abs() <= step * other + limit).all()):
            return SHORT[dtype]
    return "float32" if is_rounded(torch.float32) else "more exact than float32"


def _compare_angles(steps: _Steps) -> tuple[list[int], list[torch.Tensor]]:
    """Compare angles at odd positions; return these positions and each function's float32 tables there."""
    a, b = steps.a, steps.b
    odd = [
        p
        for p in (*ODD[1:], 65537, 1_048_573)
        if max(a.shift, b.shift) <= p < min(a.reach, b.reach)
    ]
    seen = [p.tables(p.given(odd)) for p in (a, b)]
    if _starts_differ(a, b):
        steps.facts["angles"] = "not compared", "not compared"
        return odd, seen
    before = {each.code for each in steps.found}
    gap = (seen[0] - seen[1]).abs()
    one, other = (_angles_of(p, odd, table) for p, table in zip((a, b), seen, strict=True))
    steps.facts["angles"] = one, other
    if one != other:
        what = "position" if "positions" in one + other else "angle"
        worst = int(gap.amax((0, 2)).argmax())
        steps.add(
            f"{what}-dtype",
            f"{what.title()}s are rounded to different dtypes.",
            f"the first: {one}; the second: {other}; at position {odd[worst]:,} a cosine or sine differs by "
            f"{float(gap.max()):.3g}",
        )
    elif not before and a.table == b.table and bool(gap.any()):
        steps.add(
            "cosines",
            "Cosines and sines of the same angles differ in the last bit.",
            f"{int((gap > 0).sum())} of {gap.numel()}, by up to {float(gap.max()):.3g}",
        )
    return odd, seen


def _angles_of(profile: Profile, positions: list[int], seen: torch.Tensor) -> str:
    tolerance = max(5e-3, 2 * profile.noise)
    seen = seen / profile.amplitude
    found = profile.explain(profile.omegas, positions, seen, tolerance)
    return "unknown" if found is None else str(found)


def _compare_arithmetic(steps: _Steps, odd: list[int], tables: list[torch.Tensor]) -> None:
    both = [*zip((steps.a, steps.b), tables, strict=True)]
    for dtype in _DTYPES:
        name = SHORT[dtype]
        try:
            one, other = (arithmetic_of(p, dtype, odd, table) for p, table in both)
            if dtype != torch.float32:
                _compare_dtype(steps, both, dtype, odd)
        except CallFailed:
            continue  # the shares of differing results show that a function refuses this dtype
        steps.fact(
            *(f"tables, {name}", one.table, other.table, "table-dtype"),
            f"Cosines and sines have different dtypes, for {name} x.",
        )
        for code, fact, what, first, second in (
            ("rounding", "rounding", "Results", one.forward, other.forward),
            ("gradient-rounding", "rounding of gradients", "Gradients", one.back, other.back),
        ):
            shown = _named(first), _named(second)
            sentence = f"{what} are rounded at different places, for {name} x."
            if first and second and not {*first}.isdisjoint(second):
                steps.facts[f"{fact}, {name}"] = shown
            else:
                steps.fact(f"{fact}, {name}", *shown, code, sentence)


def _named(roundings: tuple[str, ...] | None) -> str:
    return "no gradients" if roundings is None else " or ".join(roundings) or "unknown"


def _compare_dtype(
    steps: _Steps, both: list[tuple[Profile, torch.Tensor]], dtype: torch.dtype, odd: list[int]
) -> None:
    """Report a function whose angles depend on the dtype of x, as when positions take that dtype."""
    for which, (profile, table) in zip(("first", "second"), both):
        off = (profile.tables(profile.given(odd), dtype) - table).abs().amax((0, 2))
        if float(off.max()) > 2 * torch.finfo(dtype).eps * max(1.0, profile.amplitude):
            worst = int(off.argmax())
            steps.add(
                "position-dtype",
                f"One function computes other angles for {SHORT[dtype]} x than for float32 x.",
                f"the {which}: at position {odd[worst]:,} a cosine or sine changes by {float(off[worst]):.3g}",
            )
