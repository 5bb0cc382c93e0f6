"""Compare two rotary functions: whether they agree to the bit, and if not, where they part.

Each function is measured by itself, in the order in which a rotation is computed: channels, positions,
frequencies, angles, tables, roundings. The first step that differs is where the two part; later steps are
compared too, because each is measured with the function's own earlier ones.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from tightrope._errors import bad_value, public
from tightrope.spec import RopeSpec

from ._arithmetic import arithmetic_of, shares_of
from ._audit import check_all, check_options
from ._call import CallFailed, Subject, undisturbed
from ._frequencies import identity_of, is_of
from ._log import Log
from ._near import Near, apart
from ._profile import NARROW, ODD, SHORT, Angles, Profile, differences, measure, wrapped
from ._report import Comparison, Difference
from ._search import Hints, NoCallFound
from ._targets import Target, names_stack, resolve, subject_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOT_COMPARED = "not compared", "not compared"
# The farthest position of the checks of each function; the most tokens for one that numbers tokens itself.
_FARTHEST, _MOST_TOKENS = 1 << 17, 5000

# Findings of an audit about what the steps below do not measure, as each of them looks at a few usual calls: first
# those with which the steps can be named wrongly.
_MISLEADING = frozenset(
    """record nondeterminism history batch row-positions heads position-order not-linear k-not-rotated q-k table-clamp
    table-wrap table-identity table-zero table-nan position-jump padding-id positions-ignored first-id last-id restarts
    offset-ignored other-positions numbered-through gradient-missing""".split()
)
_FURTHER = frozenset(["length", "shape-dependent"])
# Other calls of which the results are compared to the bit if no step differs: rows, heads, and positions of each row.
_CALLS: dict[str, tuple[int, int, list[list[int]]]] = {
    "a token alone": (1, 2, [[3]]),
    "rows with positions of their own": (2, 3, [[3, 1, 4, 8, 6], [9, 2, 11, 13, 10]]),
    "many heads": (1, 40, [[1, 3, 5, 9, 2]]),
    "many tokens": (1, 1, [[*range(5000)]]),
    "an offset": (1, 2, [[*range(70_000, 70_016)]]),
    "powers of two": (1, 1, [[2**n + d for n in range(2, 17) for d in (-1, 0, 1)]]),
}


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
        A :class:`Comparison`. Its ``ok`` is True if results and gradients agree to the bit in float32, bfloat16
        and float16; ``differences`` are the steps that differ, each with ``code``, ``sentence`` and
        ``evidence``, and ``codes`` their codes; ``facts`` and ``shares`` are what was measured.

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
    profiles, logs = [], []
    with undisturbed():
        try:
            for target in targets:
                subject = subject_of(target, hints, spec, device)
                farthest = _FARTHEST if subject.way.takes_ids else _MOST_TOKENS
                log = Log(target.name, subject, None, (torch.float32,), farthest)
                log.recorded = target.recorded
                with suppress(CallFailed):
                    check_all(log)
                logs.append(log)
                profiles.append(_profile_of(log.subject.fresh(), target.name))
                # The call of the second is found by trying.
                hints = Hints(head_dim=head_dim or targets[1].head_dim or subject.head_dim)
            return _compared(targets, logs, *profiles)
        except NoCallFound as error:
            raise bad_value(
                f"{target.name} must return a rotated x of the same shape but no call was found that "
                f"does: {str(error).rstrip('.')}"
            ) from None
        except CallFailed as error:
            raise bad_value(f"every call must succeed but one failed later: {error}") from None


def _profile_of(subject: Subject, name: str) -> Profile:
    profile = measure(subject, Near.of(subject))
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

    @property
    def gets_tables(self) -> bool:
        """True if a function takes tables, so that its positions, frequencies and angles are the audit's."""
        return any(p.subject.way.form.takes_tables for p in (self.a, self.b))

    def add(self, code: str, sentence: str, evidence: str) -> None:
        """Add a difference, once per code."""
        if all(each.code != code for each in self.found):
            self.found.append(Difference(code, sentence, evidence))

    def fact(self, name: str, one: str, other: str, code: str, sentence: str) -> None:
        """Add a fact, and a difference if the functions do not have it in common."""
        self.facts[name] = one, other
        if one != other:
            self.add(code, sentence, f"the first: {one}; the second: {other}")


def _compared(targets: list[Target], logs: list[Log], a: Profile, b: Profile) -> Comparison:
    steps = _Steps(_if_rounded(a, b), _if_rounded(b, a))
    a, b = steps.a, steps.b
    _compare_findings(steps, logs, _MISLEADING)
    _compare_channels(steps)
    dtypes: tuple[torch.dtype, ...] = _DTYPES
    if len(a.pairs) == len(b.pairs):
        if not steps.gets_tables:
            _compare_frequencies(steps, targets)
        dtypes = _compare_arithmetic(steps, *_compare_angles(steps))
    _compare_findings(steps, logs, _FURTHER)
    shares = shares_of(a, b, dtypes)
    if not steps.found and not any(part for share in shares.values() for part in share):
        _compare_calls(steps)
    if not steps.found and any(part for share in shares.values() for part in share):
        steps.add(
            "unexplained",
            "Results differ for a reason that the comparison does not know.",
            "channels, frequencies, angles, tables and roundings are the same",
        )
    return Comparison(targets[0].name, targets[1].name, steps.facts, tuple(steps.found), shares)


def _if_rounded(own: Profile, other: Profile) -> Profile:
    """Return the profile with the other's frequencies if these, with angles rounded to 16 bits, give its angles.

    With an offset or tables in 16 bits, its own angles alone do not show that they are rounded.
    """
    alike = len(own.pairs) == len(other.pairs)
    if not alike or own.rounded is not None or not (own.shift or own.table in NARROW):
        return own
    omegas = own.sign * other.omegas.abs()
    tried = replace(own, omegas=omegas, intercepts=own.shift * omegas)
    odd = [p for p in ODD if own.shift <= p < own.reach]
    seen = own.tables(own.given(odd)) / own.amplitude
    how = tried.explain(omegas, odd, seen, max(5e-3, 2 * own.noise))
    if how is None or how.product not in NARROW:
        return own
    widths = omegas.abs() * torch.finfo(how.product).eps
    return replace(tried, rounded=how.product, widths=widths)


def _compare_findings(steps: _Steps, logs: list[Log], codes: frozenset[str]) -> None:
    """Report what an audit finds of one function and not of the other."""
    first, second = logs
    for which, own, other in (("first", first, second), ("second", second, first)):
        for each in own.findings:
            if each.code in codes and not other.found(each.code):
                steps.add(each.code, each.sentence, f"the {which} alone: {each.evidence}")


def _compare_calls(steps: _Steps) -> None:
    """Compare the results of further calls to the bit; those that a function refuses are left out."""
    subjects = [
        replace(p.subject, one_row=False, one_head=False).fresh() for p in (steps.a, steps.b)
    ]
    if len({s.way.form.takes_tables for s in subjects}) > 1:
        return
    heads = min(s.most_heads or 40 for s in subjects)
    by_ids = all(s.way.takes_ids for s in subjects)
    for what, (rows, most, where) in _CALLS.items():
        if not by_ids and max(map(max, where)) >= _MOST_TOKENS:
            continue
        for grad in (True, False):
            x = subjects[0].random(rows, min(heads, most), len(where[0]), seed=21)
            ids = torch.tensor(where)
            with suppress(CallFailed), torch.set_grad_enabled(grad):
                one, other = (s.rotate(s.laid_out(x.clone()), ids).detach() for s in subjects)
                if apart(one, other) > 0:
                    mode = "" if grad else ", without gradients"
                    steps.add(
                        "calls",
                        f"Results differ in a call with {what}{mode}.",
                        f"by up to {apart(one, other):.4g}; in the other calls that were compared they are the same",
                    )
                    return


def _compare_channels(steps: _Steps) -> None:
    a, b, add = steps.a, steps.b, steps.add
    one, other = (f"{p.start} to {p.start + p.rotary_dim - 1}" for p in (a, b))
    steps.fact("pairing", a.pairing, b.pairing, "pairing", "Channels are paired differently.")
    steps.fact("channels", one, other, "slice", "Other channels rotate.")
    if a.order != b.order:
        add("channel-order", "Channels come out in different orders.", "of one function, reordered")
    signs = [p.sign for p in (a, b)]
    if signs[0] != signs[1]:
        add("sign", "The functions rotate in opposite directions.", "angles have opposite signs")
    evidence = ""
    if steps.gets_tables:
        return
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


def _compare_frequencies(steps: _Steps, targets: list[Target]) -> None:
    a, b = steps.a, steps.b
    first, second = a.omegas.abs(), b.omegas.abs()
    gap = (first - second).abs()
    # Two angles at the last tested position that differ by less than this are equal but for the cosine.
    limit = torch.maximum(a.blur, b.blur)
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
            sentence, rules = _rules(steps, targets)
            steps.add("frequencies", sentence or f"Frequencies differ{last}.", evidence + rules)
    if abs(a.amplitude - b.amplitude) > max(a.noise, b.noise) * max(a.amplitude, b.amplitude):
        scales = f"{a.amplitude:.9g}", f"{b.amplitude:.9g}"
        sentence = "Rotated channels are scaled by different factors."
        steps.fact("attention factor", *scales, "attention-factor", sentence)


def _rules(steps: _Steps, targets: list[Target]) -> tuple[str, str]:
    """Return a sentence about the rules of different frequencies, and more evidence; "" if one is not known."""
    one, other = (
        _rule_of(profile, target.spec)
        for profile, target in zip((steps.a, steps.b), targets, strict=True)
    )
    if one is None or other is None or _as_text(one) == _as_text(other):
        return "", ""
    evidence = f"; the first: {_as_text(one)}; the second: {_as_text(other)}"
    if one.scaling == other.scaling:
        return "The bases of the frequencies differ.", evidence
    if one.base == other.base and other.scaling is None:
        return "The second does not apply the scaling of the first.", evidence
    if one.base == other.base and one.scaling is None:
        return "The first does not apply the scaling of the second.", evidence
    return "Frequencies are scaled by different rules.", evidence


def _as_text(spec: RopeSpec) -> str:
    return f"base {spec.base:g}" + ("" if spec.scaling is None else f", {spec.scaling!r}")


def _rule_of(profile: Profile, spec: RopeSpec | None) -> RopeSpec | None:
    """Return the declared spec if it has the measured frequencies, else the one that is identified, if any."""
    if spec is not None and is_of(profile, spec):
        return spec
    if profile.interleaved is None or len(profile.pairs) < 2:
        return None
    found = identity_of(profile)
    return None if found.loose else found.spec


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
    if steps.gets_tables or _starts_differ(a, b):
        steps.facts["angles"] = _NOT_COMPARED
        return odd, seen
    before = {each.code for each in steps.found}
    gap = torch.view_as_real(seen[0] - seen[1]).abs()
    one, other = _angles_of(a, b, odd, seen[0]), _angles_of(b, a, odd, seen[1])
    steps.facts["angles"] = one, other
    if one != other:
        what = "position" if "positions" in one + other else "angle"
        worst = int(gap.amax((1, 2)).argmax())
        known = "unknown" not in (one, other)
        steps.add(
            f"{what}-dtype" if known else "angles",
            f"{what.title()}s are rounded to different dtypes."
            if known
            else "Angles differ, and no rounding explains it.",
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


def _angles_of(profile: Profile, other: Profile, positions: list[int], seen: torch.Tensor) -> str:
    tolerance = max(5e-3, 2 * profile.noise)
    seen = seen / profile.amplitude
    omegas = profile.omegas
    if profile.rounded is not None:
        # Rounded angles show frequencies to few digits: those of the other function may be the same.
        nearby = (omegas.abs() - other.omegas.abs()).abs() <= profile.blur + other.blur
        omegas = torch.where(nearby, profile.sign * other.omegas.abs(), omegas)
    found = profile.explain(omegas, positions, seen, tolerance)
    if found is None and profile.rounded is not None:
        return SHORT[profile.rounded]
    return "unknown" if found is None else str(found)


def _compare_arithmetic(
    steps: _Steps, odd: list[int], tables: list[torch.Tensor]
) -> tuple[torch.dtype, ...]:
    """Compare tables and roundings for each dtype of x; return the dtypes whose results can be compared."""
    counted = [*_DTYPES]
    profiles = steps.a, steps.b
    for dtype in _DTYPES:
        name = SHORT[dtype]
        try:
            own, known = tables, True
            if dtype != torch.float32 and not steps.gets_tables:
                own, known = _compare_dtype(steps, tables, dtype, odd)
            # An angle in float16 may be infinite, which has no cosine.
            fits = torch.stack(own).isfinite().all(-1).all(0)
            where = [p for p, fit in zip(odd, fits.tolist(), strict=True) if fit]
            one, other = (
                arithmetic_of(p, dtype, where, t[fits]) for p, t in zip(profiles, own, strict=True)
            )
        except CallFailed:
            continue  # the shares of differing results show that a function refuses this dtype
        if not known and not (one.forward and other.forward):
            steps.facts[f"rounding, {name}"] = _NOT_COMPARED
            continue
        if not steps.gets_tables:
            steps.fact(
                *(f"tables, {name}", one.table, other.table, "table-dtype"),
                f"Cosines and sines have different dtypes, for {name} x.",
            )
        elif one.table != other.table and dtype != torch.float32:
            counted.remove(dtype)
            steps.facts[f"tables, {name}"] = one.table, other.table
            steps.facts[f"results, {name}"] = _NOT_COMPARED
        for code, fact, what, first, second in (
            ("rounding", "rounding", "Results", one.forward, other.forward),
            ("gradient-rounding", "rounding of gradients", "Gradients", one.back, other.back),
        ):
            shown = _named(first), _named(second)
            sentence = f"{what} are rounded at different places, for {name} x."
            if (first is None) != (second is None):
                code, sentence = "gradient-missing", f"One has no gradients, for {name} x."
            if first and second and not {*first}.isdisjoint(second):
                steps.facts[f"{fact}, {name}"] = shown
            else:
                steps.fact(f"{fact}, {name}", *shown, code, sentence)
    return tuple(counted)


def _named(roundings: tuple[str, ...] | None) -> str:
    return "no gradients" if roundings is None else " or ".join(roundings) or "unknown"


def _compare_dtype(
    steps: _Steps, tables: list[torch.Tensor], dtype: torch.dtype, odd: list[int]
) -> tuple[list[torch.Tensor], bool]:
    """Report angles that one function rounds for this dtype of x and not for float32 x.

    Return each function's float32 tables for this dtype, and whether they are known.
    """
    name, limit = SHORT[dtype], 2 * torch.finfo(dtype).eps
    exact: Angles | None = Angles(torch.float64, torch.float64, torch.float64)
    found: list[tuple[Angles | None, float, int]] = []
    own, known, narrow = [], True, []
    for profile, table in zip((steps.a, steps.b), tables, strict=True):
        seen = profile.tables(profile.given(odd), dtype)
        off = differences(seen, table).amax(1)
        worst, how = int(off.argmax()), exact
        if float(off[worst]) > limit * max(1.0, profile.amplitude):
            how = profile.explain(
                *(profile.omegas, odd, seen / profile.amplitude, limit),
                (torch.float64, *NARROW),
            )
            if how is not None and not profile.shift:
                angles = how.at(odd, profile.omegas).float()
                turned = torch.complex(angles.cos(), angles.sin()).to(torch.complex128)
                table = profile.amplitude * turned
            else:
                known = False
        found.append((how, float(off[worst]), odd[worst]))
        own.append(table)
        narrow.append(torch.view_as_real(seen).nan_to_num())
    if torch.equal(*narrow) or found[0][0] == found[1][0] is not None:
        return own, known
    for which, (how, size, position) in zip(("first", "second"), found, strict=True):
        evidence = f"the {which}: at position {position:,} a cosine or sine changes by {size:.3g}"
        if how is None:
            sentence = f"One function computes other angles for {name} x than for float32 x."
            steps.add("angle-dtype", sentence, evidence)
        for what, rounded in zip(("position", "frequency", "angle"), how or ()):
            if rounded in NARROW:
                plural = "frequencies" if what == "frequency" else f"{what}s"
                sentence = f"One function rounds {plural} to {SHORT[rounded]}, for {name} x."
                steps.add(f"{what}-dtype", sentence, evidence)
    return own, known
