"""Compare two rotary functions: whether they agree to the bit, and if not, where they part.

Each function is measured by itself, in the order in which a rotation is computed: channels, positions,
frequencies, angles, tables, roundings. The first step that differs is where the two part; later steps are
compared too, because each is measured with the function's own earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

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
from ._targets import Target, names_stack, resolve, subject_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Difference:
    """One step in which two functions differ.

    Attributes:
        code: a stable short name, such as ``"frequencies"``.
        sentence: the difference in one sentence.
        evidence: the numbers behind it.
    """

    code: str
    sentence: str
    evidence: str


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`tightrope_tools.audit.compare`.

    Attributes:
        first, second: names of the functions.
        facts: measured properties; name -> (of the first, of the second).
        differences: the steps that differ, in the order in which a rotation is computed.
        shares: dtype -> shares of the results and of the gradients that differ in a bit; None for
            gradients that a function does not have.
    """

    first: str
    second: str
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    shares: dict[str, tuple[float, float | None]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if the functions agree to the bit."""
        return not self.differences

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the differences; the first one is where the functions part."""
        return tuple(each.code for each in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON types, with a format version."""
        return {"version": 2, "ok": self.ok} | asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Comparison:
        """Restore a comparison from :meth:`to_dict`."""
        return cls(
            first=saved["first"],
            second=saved["second"],
            facts={name: (values[0], values[1]) for name, values in saved["facts"].items()},
            differences=tuple(Difference(**each) for each in saved["differences"]),
            shares={name: (values[0], values[1]) for name, values in saved["shares"].items()},
        )


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
        for target in targets:
            try:
                subject = subject_of(target, hints, spec, device)
                profiles.append(_profile_of(subject.fresh(), target.name))
            except NoCallFound as error:
                reasons = str(error).rstrip(".")
                raise bad_value(
                    f"{target.name} must return a rotated x of the same shape but no call was found that "
                    f"does: {reasons}"
                ) from None
            except CallFailed as error:
                raise bad_value(f"every call must succeed but one failed later: {error}") from None
            # The call of the second is found by trying.
            hints = Hints(head_dim=head_dim or targets[1].head_dim or subject.head_dim)
        try:
            return _compared(targets, *profiles)
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


def _compared(targets: list[Target], a: Profile, b: Profile) -> Comparison:
    found: list[Difference] = []
    facts: dict[str, tuple[str, str]] = {}

    def add(code: str, sentence: str, evidence: str) -> None:
        found.append(Difference(code, sentence, evidence))

    _compare_channels(a, b, facts, add)
    if len(a.pairs) == len(b.pairs):
        _compare_frequencies(a, b, facts, add)
        odd, tables = _compare_angles(a, b, facts, add, {each.code for each in found})
        _compare_arithmetic(a, b, odd, tables, facts, add)
    shares = shares_of(a, b, _DTYPES)
    if not found and any(part for share in shares.values() for part in share):
        add(
            "unexplained",
            "Results differ for a reason that the comparison does not know.",
            "channels, frequencies, angles, tables and roundings are the same",
        )
    return Comparison(targets[0].name, targets[1].name, facts, tuple(found), shares)


_Add = Callable[[str, str, str], None]
_Facts = dict[str, tuple[str, str]]


def _compare_channels(a: Profile, b: Profile, facts: _Facts, add: _Add) -> None:
    facts["pairing"] = a.pairing, b.pairing
    slices = [f"{p.start} to {p.start + p.rotary_dim - 1}" for p in (a, b)]
    facts["channels"] = slices[0], slices[1]
    if a.pairing != b.pairing:
        add("pairing", "Channels are paired differently.", _either(facts["pairing"]))
    if slices[0] != slices[1]:
        add("slice", "Other channels rotate.", _either(facts["channels"]))
    if a.order != b.order:
        add("channel-order", "Channels come out in different orders.", "of one function, reordered")
    signs = [1.0 if float(p.omegas.sum()) >= 0 else -1.0 for p in (a, b)]
    if signs[0] != signs[1]:
        add("sign", "The functions rotate in opposite directions.", "angles have opposite signs")
    if a.shift != b.shift:
        add(
            "positions",
            "Positions count from different numbers.",
            f"position 0 is rotated as position {a.shift} should be by the first, and as position "
            f"{b.shift} by the second, a difference of {a.shift - b.shift:+d} positions",
        )
    elif len(a.pairs) == len(b.pairs):
        gap = wrapped(a.starts * signs[0] - b.starts * signs[1])
        if float(gap.abs().max()) > 1e-4:
            k = int(gap.abs().argmax())
            shift = float(gap[k] / a.omegas[k].abs()) if float(a.omegas[k]) else math.nan
            add(
                "positions",
                "Positions count from different numbers.",
                f"at position 0, pair {k} is turned by {float(gap[k]):+.6g} rad more by the first, which is "
                f"{shift:+.4g} positions",
            )


def _compare_frequencies(a: Profile, b: Profile, facts: _Facts, add: _Add) -> None:
    first, second = a.omegas.abs(), b.omegas.abs()
    gap = (first - second).abs()
    # Two angles at the last tested position that differ by less than this are equal but for the cosine.
    limit = torch.full_like(gap, max(p.noise / p.farthest for p in (a, b)))
    if _starts_differ(a, b):
        limit = max(p.least / p.farthest for p in (a, b)) + 2.0**-22 * torch.maximum(first, second)
    kinds = [_precision(p.omegas.abs(), q.omegas.abs(), limit) for p, q in ((a, b), (b, a))]
    if bool((gap > limit).any()):
        relative = gap / torch.maximum(first, second).clamp(min=1e-300)
        k = int(relative.argmax())
        evidence = (
            f"pair {k} turns by {float(first[k]):.12g} and {float(second[k]):.12g} rad per position, "
            f"ratio {float(first[k] / second[k]) if float(second[k]) else math.inf:.9g}; "
            f"{int((gap > limit).sum())} of {len(gap)} pairs differ"
        )
        if kinds[0] != kinds[1]:
            facts["frequencies"] = kinds[0], kinds[1]
            add("frequency-dtype", "Frequencies are rounded to different dtypes.", evidence)
        elif float(relative.max()) < 2.0**-21:
            add("frequencies", "Frequencies differ in their last bits.", evidence)
        else:
            add("frequencies", "Frequencies differ.", evidence)
    scale = a.amplitude, b.amplitude
    if abs(scale[0] - scale[1]) > max(a.noise, b.noise) * max(scale):
        facts["attention factor"] = f"{scale[0]:.9g}", f"{scale[1]:.9g}"
        add(
            "attention-factor",
            "Rotated channels are scaled by different factors.",
            f"{scale[0]:.9g} and {scale[1]:.9g}",
        )


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


def _compare_angles(
    a: Profile, b: Profile, facts: _Facts, add: _Add, before: set[str]
) -> tuple[list[int], list[torch.Tensor]]:
    """Compare angles at odd positions; return these positions and each function's float32 tables there."""
    reach = min(a.reach, b.reach)
    odd = [p for p in (*ODD[1:], 65537, 1_048_573) if max(a.shift, b.shift) <= p < reach]
    seen = [p.tables(p.given(odd)) for p in (a, b)]
    if _starts_differ(a, b):
        facts["angles"] = "not compared", "not compared"
        return odd, seen
    names = [_angles_of(p, odd, table) for p, table in zip((a, b), seen, strict=True)]
    facts["angles"] = names[0], names[1]
    if names[0] != names[1]:
        gap = (seen[0] - seen[1]).abs().amax((0, 2))
        worst = int(gap.argmax())
        code = "position-dtype" if any("positions" in name for name in names) else "angle-dtype"
        add(
            code,
            "Positions are rounded to different dtypes."
            if code == "position-dtype"
            else "Angles are rounded to different dtypes.",
            f"{_either((names[0], names[1]))}; at position {odd[worst]:,} a cosine or sine differs by "
            f"{float(gap[worst]):.3g}",
        )
    elif not before and a.table == b.table and not torch.equal(*seen):
        count = int((seen[0] != seen[1]).sum())
        add(
            "cosines",
            "Cosines and sines of the same angles differ in the last bit.",
            f"{count} of {seen[0].numel()}, by up to {float((seen[0] - seen[1]).abs().max()):.3g}",
        )
    return odd, seen


def _angles_of(profile: Profile, positions: list[int], seen: torch.Tensor) -> str:
    tolerance = max(5e-3, 2 * profile.noise)
    seen = seen / profile.amplitude
    found = profile.explain(profile.omegas, positions, seen, tolerance)
    return "unknown" if found is None else str(found)


def _compare_arithmetic(
    a: Profile, b: Profile, odd: list[int], tables: list[torch.Tensor], facts: _Facts, add: _Add
) -> None:
    reported: set[str] = set()

    def differ(code: str, sentence: str, evidence: str) -> None:
        if code not in reported:
            reported.add(code)
            add(code, sentence, evidence)

    for dtype in _DTYPES:
        name = SHORT[dtype]
        try:
            one, other = (
                arithmetic_of(p, dtype, odd, table) for p, table in zip((a, b), tables, strict=True)
            )
            for which, p, table in zip(("first", "second"), (a, b), tables, strict=True):
                _compare_dtype(which, p, dtype, odd, table, differ)
        except CallFailed:
            continue  # the shares of differing results show that a function refuses this dtype
        facts[f"tables, {name}"] = one.table, other.table
        if one.table != other.table:
            evidence = _either(facts[f"tables, {name}"])
            differ(
                "table-dtype", f"Cosines and sines have different dtypes, for {name} x.", evidence
            )
        for code, fact, sentence, first, second in (
            ("rounding", "rounding", "Results", one.forward, other.forward),
            ("gradient-rounding", "rounding of gradients", "Gradients", one.back, other.back),
        ):
            shown = facts[f"{fact}, {name}"] = _named(first), _named(second)
            alike = first == second or (first and second and not {*first}.isdisjoint(second))
            if not alike:
                differ(
                    code,
                    f"{sentence} are rounded at different places, for {name} x.",
                    _either(shown),
                )


def _named(roundings: tuple[str, ...] | None) -> str:
    return "no gradients" if roundings is None else " or ".join(roundings) or "unknown"


def _compare_dtype(
    which: str,
    p: Profile,
    dtype: torch.dtype,
    positions: list[int],
    table: torch.Tensor,
    differ: _Add,
) -> None:
    """Report a function whose angles depend on the dtype of x, as when positions take that dtype."""
    if dtype == torch.float32:
        return
    off = (p.tables(p.given(positions), dtype) - table).abs().amax((0, 2))
    if float(off.max()) > 2 * torch.finfo(dtype).eps * max(1.0, p.amplitude):
        worst = int(off.argmax())
        differ(
            "position-dtype",
            f"One function computes other angles for {SHORT[dtype]} x than for float32 x.",
            f"the {which}: at position {positions[worst]:,} a cosine or sine changes by "
            f"{float(off[worst]):.3g}",
        )


def _either(values: tuple[str, str]) -> str:
    return f"the first: {values[0]}; the second: {values[1]}"
