"""Compare two rotary functions: whether they agree to the bit, and if not, where they part.

Both are measured by the one measurement of an audit, and their profiles are compared in the order in which a rotation
is computed: channels, positions, frequencies, angles, tables, roundings. The first step that differs is where the two
part; later steps are compared too, because each is measured with the function's own earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tightrope._errors import bad_value, public
from tightrope.spec import RopeSpec

from ._alike import AFTER, CALLS, Call, results
from ._audit import check_all, check_options
from ._call import CallFailed, Subject, undisturbed
from ._faults import DIFFERENCES
from ._log import Log
from ._profile import (
    NARROW,
    ODD,
    SHORT,
    Near,
    Profile,
    apart,
    gaps,
    measure,
    wrapped,
)
from ._report import Comparison, Difference
from ._search import NoCallFound, subject_of
from ._targets import names_stack, resolve
from ._together import Target

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOT_COMPARED = "not compared", "not compared"
_MISSING, _UNKNOWN = ("no gradients",), ("unknown",)
#: A part of the words for angles, of which the first decides what differs.
_OF_ANGLES = {
    "unknown": "angles",
    "positions": "position-dtype",
    "frequencies": "frequency-dtype/of-angles",
    "": "angle-dtype",
}
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
    options: dict[str, Any] = {"layer_type": layer_type, "head_dim": head_dim}
    own = {"make": make, "form": form, "layout": layout, "tables": tables, **options}
    if names_stack(first):
        other = resolve(second, spec=spec, **options)
        targets = [resolve(first, spec=spec or other.spec, **own), other]
    else:
        one = resolve(first, **own)
        targets = [one, resolve(second, spec=spec or one.spec, **options)]
    spec = spec or targets[0].spec or targets[1].spec
    check_options(spec, head_dim, device)
    sides: list[tuple[Log, Profile]] = []
    with undisturbed():
        try:
            for target in targets:
                # The call of the second is found by trying, with the channels of the first.
                dim = sides[0][1].subject.head_dim if sides else None
                known = replace(target, head_dim=target.head_dim or dim)
                sides.append(_measured(known, spec, device))
            return _compared(*sides)
        except NoCallFound as error:
            raise bad_value(
                f"{target.name} must return a rotated x of the same shape but no call was found that "
                f"does: {str(error).rstrip('.')}"
            ) from None
        except CallFailed as error:
            raise bad_value(f"every call must succeed but one failed later: {error}") from None


def _measured(target: Target, spec: RopeSpec | None, device: str) -> tuple[Log, Profile]:
    """Return what an audit finds of a function, and its profile."""
    subject = subject_of(target, spec, device)
    farthest = _FARTHEST if subject.way.takes_ids else _MOST_TOKENS
    log = Log(target.name, subject, None, (torch.float32,), farthest, recorded=target.recorded)
    with suppress(CallFailed):
        check_all(log)
    profile = measure(log.subject.fresh(), Near.of(log.subject))
    if not profile.pairs or profile.tangled:
        raise bad_value(f"{target.name} must rotate pairs of channels but does not")
    return log, profile


# --- two functions --------------------------------------------------------------------------


@dataclass
class _Steps:
    """The steps of two functions, as far as they were compared.

    Attributes:
        first, second: what an audit finds of each function.
        a, b: their profiles.
        facts, found: as in :class:`Comparison`.
    """

    first: Log
    second: Log
    a: Profile
    b: Profile
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    found: list[Difference] = field(default_factory=list)

    @property
    def gets_tables(self) -> bool:
        """True if a function takes tables, so that its positions, frequencies and angles are the audit's."""
        return any(p.subject.way.takes_tables for p in (self.a, self.b))

    @property
    def aligned(self) -> bool:
        """False if angles at position 0 differ and no whole number of positions explains it.

        All angles of the two are then rounded from different values.
        """
        return torch.allclose(self.a.starts, self.b.starts, rtol=0, atol=1e-4)

    def add_once(self, code: str, sentence: str, evidence: str) -> None:
        """Add a difference, once per code."""
        if all(each.code != code for each in self.found):
            self.found.append(Difference(code, sentence, evidence))

    def add(self, kind: str, **words: Any) -> None:
        """Add a difference of a kind, whose text is filled in with words."""
        sentence, evidence = (text.format(**words) for text in DIFFERENCES[kind])
        self.add_once(kind.partition("/")[0], sentence, evidence)

    def fact(
        self, name: str, kind: str, one: Sequence[str], other: Sequence[str], **words: Any
    ) -> None:
        """Add a fact, which may be one of several, and a difference if the functions have none in common."""
        first, second = self.facts[name] = " or ".join(one), " or ".join(other)
        if not {*one} & {*other}:
            self.add(kind, first=first, second=second, **words)


def _compared(one: tuple[Log, Profile], other: tuple[Log, Profile]) -> Comparison:
    a = _aligned(one[1], other[1])
    steps = _Steps(one[0], other[0], a, _aligned(other[1], a))
    _compare_findings(steps, _MISLEADING)
    _compare_channels(steps)
    counted = [*_DTYPES]
    if len(steps.a.pairs) == len(steps.b.pairs):
        if not steps.gets_tables:
            _compare_frequencies(steps)
        odd = _odd(max(a.shift, steps.b.shift), min(a.reach, steps.b.reach), (65537, 1_048_573))
        wide = [p.tables(p.given(odd)) for p in (steps.a, steps.b)]
        counted = [dtype for dtype in counted if _compare_type(steps, dtype, odd, wide)]
    _compare_findings(steps, _FURTHER)
    shares = shares_of(steps.a, steps.b, counted)
    differ = any(part for share in shares.values() for part in share)
    if not steps.found and not differ:
        _compare_calls(steps, counted)
    elif not steps.found:
        steps.add("unexplained")
    names = steps.first.target, steps.second.target
    return Comparison(*names, steps.facts, tuple(steps.found), shares)


def _odd(least: int, most: int, more: tuple[int, ...] = ()) -> list[int]:
    """Positions that show how angles are rounded."""
    return [p for p in (*ODD[1:], *more) if least <= p < most]


def _aligned(own: Profile, other: Profile) -> Profile:
    """Return the profile with the other's frequencies if these, rounded to 16 bits as angles, give its own tables.

    With an offset or tables in 16 bits, its own angles alone do not show that they are rounded.
    """
    exact = not own.shift and own.table not in NARROW and own.rounded is None
    if exact or len(own.pairs) != len(other.pairs):
        return own
    theirs = own.sign * other.omegas.abs()
    tried = replace(own, omegas=theirs, intercepts=own.shift * theirs)
    odd = _odd(own.shift, own.reach)
    how = tried.explain(odd, own.tables(own.given(odd)))
    narrow = how is not None and how.product in NARROW
    return replace(tried, rounded=how.product) if how and narrow else own


def _compare_findings(steps: _Steps, codes: frozenset[str]) -> None:
    """Report what an audit finds of one function and not of the other."""
    one, two = steps.first, steps.second
    for which, own, other in (("first", one, two), ("second", two, one)):
        for each in own.findings:
            if each.code in codes and not other.found(each.code):
                steps.add_once(each.code, each.sentence, f"the {which} alone: {each.evidence}")


def _compare_channels(steps: _Steps) -> None:
    """Compare pairing, slice, order, direction and the angle at position 0."""
    a, b = steps.a, steps.b
    channels = ([f"{p.start} to {p.start + p.rotary_dim - 1}"] for p in (a, b))
    steps.fact("pairing", "pairing", [a.pairing], [b.pairing])
    steps.fact("channels", "slice", *channels)
    if a.order != b.order:
        steps.add("channel-order")
    if a.sign != b.sign:
        steps.add("sign")
    if steps.gets_tables:
        return
    if a.shift != b.shift:
        steps.add("positions", first=a.shift, second=b.shift, ahead=a.shift - b.shift)
    elif len(a.pairs) == len(b.pairs):
        gap = wrapped(a.starts * a.sign - b.starts * b.sign)
        k = int(gap.abs().argmax())
        if float(gap[k].abs()) > 1e-4:
            ahead = float(gap[k] / a.omegas[k].abs())
            steps.add("positions/by-a-part", pair=k, gap=float(gap[k]), ahead=ahead)


def _compare_frequencies(steps: _Steps) -> None:
    """Compare the frequencies, and the factor."""
    a, b = steps.a, steps.b
    first, second = a.omegas.abs(), b.omegas.abs()
    gap, larger = (first - second).abs(), torch.maximum(first, second)
    # Two angles at the last tested position that differ by less than this are equal but for the cosine.
    limit = torch.maximum(a.blur, b.blur)
    if not steps.aligned:
        limit = max(p.least / p.farthest for p in (a, b)) + 2.0**-22 * larger
    if bool((gap > limit).any()):
        relative = gap / larger.clamp(min=1e-300)
        k = int(relative.argmax())
        words: dict[str, Any] = {"first": float(first[k]), "second": float(second[k]), "pair": k}
        words |= {"count": int((gap > limit).sum()), "total": len(gap), "rules": ""}
        words |= {"last": " in their last bits" * (float(relative.max()) < 2.0**-21)}
        types = _precision(first, second, limit), _precision(second, first, limit)
        kind = "frequency-dtype"
        if types[0] == types[1]:
            kind, words["rules"] = _rules(steps)
        else:
            steps.facts["frequencies"] = types
        steps.add(kind, ratio=float(first[k] / second[k]), **words)
    if abs(a.amplitude - b.amplitude) > max(a.noise, b.noise) * max(a.amplitude, b.amplitude):
        scales = ([f"{p.amplitude:.9g}"] for p in (a, b))
        steps.fact("attention factor", "attention-factor", *scales)


def _rules(steps: _Steps) -> tuple[str, str]:
    """Return how the rules of different frequencies differ, as a kind of difference, and more evidence."""
    rules = steps.first.identity, steps.second.identity
    one, other = (None if rule is None else rule.spec for rule in rules)
    if one is None or other is None or one == other:
        return "frequencies", ""
    kind = "frequencies/scaling"
    if one.scaling == other.scaling:
        kind = "frequencies/base"
    elif one.base == other.base and None in (one.scaling, other.scaling):
        kind = f"frequencies/lost-by-{'first' if one.scaling is None else 'second'}"
    texts = (
        f"base {s.base:g}" + f", {s.scaling!r}" * (s.scaling is not None) for s in (one, other)
    )
    return kind, "; the first: {}; the second: {}".format(*texts)


def _precision(own: torch.Tensor, other: torch.Tensor, limit: torch.Tensor) -> str:
    """Return the dtype that frequencies are rounded to: 16 bits only if they are the other ones rounded."""
    for dtype in (*NARROW, torch.float32):
        is_held = bool(((own.to(dtype).double() - own).abs() <= 2 * limit).all())
        near = (own - other).abs() <= torch.finfo(dtype).eps * other + limit
        if is_held and (dtype == torch.float32 or bool(near.all())):
            return SHORT[dtype]
    return "more exact than float32"


def _compare_type(
    steps: _Steps, dtype: torch.dtype, odd: list[int], wide: list[torch.Tensor]
) -> bool:
    """Compare angles, tables and roundings for x of one dtype; return whether its results can be compared.

    Args:
        odd: positions that show how angles are rounded.
        wide: the cosines and sines of each function there, for float32 x.
    """
    name = SHORT[dtype]
    try:
        one, other = map(bits_of, (steps.a, steps.b), [dtype] * 2, [odd] * 2, wide)
    except CallFailed:
        return True  # the shares of differing results show that a function refuses this dtype
    if steps.gets_tables or not steps.aligned:
        steps.facts["angles"] = _NOT_COMPARED
    else:
        _compare_angles(steps, dtype, odd, one, other)
    if not (one.known and other.known) and _UNKNOWN in (one.forward, other.forward):
        steps.facts[f"rounding, {name}"] = _NOT_COMPARED
        return True
    same = not steps.gets_tables or one.table == other.table or dtype == torch.float32
    if not steps.gets_tables:
        steps.fact(f"tables, {name}", "table-dtype", [one.table], [other.table], dtype=name)
    elif not same:
        steps.facts[f"tables, {name}"] = one.table, other.table
        steps.facts[f"results, {name}"] = _NOT_COMPARED
    steps.fact(f"rounding, {name}", "rounding", one.forward, other.forward, dtype=name)
    missing = (one.back == _MISSING) != (other.back == _MISSING)
    kind = "gradient-missing" if missing else "gradient-rounding"
    steps.fact(f"rounding of gradients, {name}", kind, one.back, other.back, dtype=name)
    return same


def _compare_angles(
    steps: _Steps, dtype: torch.dtype, odd: list[int], one: Bits, other: Bits
) -> None:
    """Compare the angles at odd positions for x of one dtype."""
    gap, both = gaps(one.seen, other.seen), one.angles + other.angles
    wide = dtype == torch.float32
    if wide:
        steps.facts["angles"] = one.angles, other.angles
    if one.angles != other.angles and (wide or not (one.known and other.known)):
        kind = next(kind for part, kind in _OF_ANGLES.items() if part in both)
        words = {"first": one.angles, "second": other.angles, "gap": float(gap.max())}
        words["x"] = "" if wide else f", for {SHORT[dtype]} x"
        steps.add(kind, position=odd[int(gap.amax(1).argmax())], **words)
    elif wide and not steps.found and steps.a.table == steps.b.table and bool(gap.any()):
        count = int((gap > 0).sum())
        steps.add("cosines", count=count, total=gap.numel(), gap=float(gap.max()))


def _compare_calls(steps: _Steps, dtypes: Sequence[torch.dtype]) -> None:
    """Compare the results of further calls to the bit; those that a function refuses are left out."""
    subjects = [
        replace(p.subject, one_row=False, one_head=False).fresh() for p in (steps.a, steps.b)
    ]
    if len({s.way.takes_tables for s in subjects}) > 1:
        return
    most = math.inf if all(s.way.takes_ids for s in subjects) else _MOST_TOKENS
    calls = (each for each in CALLS if each.dtype in dtypes and max(map(max, each.ids)) < most)
    for call in (each for each in calls if all(map(each.fits, subjects))):
        for mode in dict.fromkeys((call.mode, "no gradient")):
            own = _results_of(subjects, call._replace(mode=mode))
            gap = max([0.0, *(apart(*both) for _, both in _shared(own))])
            if gap > 0:
                how = ", without gradients" if mode == "no gradient" else ""
                steps.add("calls", what=call.what, mode=how, gap=gap)
                return


def _results_of(subjects: list[Subject], call: Call) -> list[dict[str, torch.Tensor]]:
    """Return what the functions make of the same x, or of q and k; those that refuse the call are left out."""
    count = 2 if all(s.way.takes_keys for s in subjects) else 1
    call = call._replace(heads=1, keys=0) if any(s.most_heads for s in subjects) else call
    xs, outs = (call.random(subjects[0], count, seed) for seed in (8, 18))
    found = []
    for subject in subjects:
        with suppress(CallFailed):
            found.append(results(subject, call, xs, outs))
    return found


def _shared(
    found: list[dict[str, torch.Tensor]],
) -> list[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return the results of two functions, and their gradients, by their names, as far as both have them."""
    if len(found) < 2:
        return []
    one, other = found
    return [(name, (y, other[name])) for name, y in one.items() if name in other and name != AFTER]


# --- bits -------------------------------------------------------------------------------------------


class Bits(NamedTuple):
    """How a function computes for x of one dtype.

    Attributes:
        seen: its cosines and sines at some positions, complex128 ``[positions, pairs]``.
        angles: the dtypes that give its angles, or "unknown".
        table: the dtype of cosines and sines, or "unknown".
        forward: the roundings that give its results; unknown if none do, or its tables are not known.
        back: those that give its gradients.
        known: whether its tables are known before they are rounded to the dtype of x.
    """

    seen: torch.Tensor
    angles: str
    table: str
    forward: tuple[str, ...]
    back: tuple[str, ...]
    known: bool


def bits_of(
    profile: Profile, dtype: torch.dtype, positions: Sequence[int], wide: torch.Tensor
) -> Bits:
    """Find the dtypes of angles and tables, and the roundings that reproduce the function's results and gradients.

    Args:
        wide: what it has for cosines and sines at the positions for float32 x.
    """
    seen, limit = profile.tables(profile.given(positions), dtype), 2 * torch.finfo(dtype).eps
    known = dtype == torch.float32 or apart(seen, wide) <= limit * max(1.0, profile.amplitude)
    if known:
        how = profile.explain(positions, wide)
    else:
        how = profile.explain(positions, seen, limit, (torch.float64, *NARROW))
    rounded = "unknown" if profile.rounded is None else SHORT[profile.rounded]
    tables = {SHORT[dtype]: seen} if dtype != torch.float32 else {}
    if known:
        tables[SHORT[profile.table] if dtype == torch.float32 else "float32"] = wide
    # An angle in float16 may be infinite, which has no cosine.
    finite = torch.stack([table.isfinite().all(1) for table in tables.values()]).all(0)
    where = [p for p, fits in zip(positions, finite.tolist(), strict=True) if fits]
    call = Call("", (tuple(profile.given(where)),), dtype=dtype, mode="gradient")
    (x,), (out,) = (call.random(profile.subject, 1, seed) for seed in (3, 4))
    made = results(profile.subject, call, [x], [out])
    y, gradients = made["x"], made.get("the gradient of x")
    fitting = ((name, _reproducing(profile, x, y, table[finite])) for name, table in tables.items())
    name, forward = next((each for each in fitting if each[1]), ("unknown", ()))
    back: tuple[str, ...] = ()
    if forward and gradients is not None and profile.order is None:
        back = _reproducing(profile, out, gradients, tables[name][finite].conj())
    back = _MISSING if gradients is None else back or _UNKNOWN
    angles = rounded if how is None else str(how)
    return Bits(seen, angles, name, forward or _UNKNOWN, back, known)


def _reproducing(
    profile: Profile, x: torch.Tensor, y: torch.Tensor, table: torch.Tensor
) -> tuple[str, ...]:
    """Return the roundings that give y for x ``[1, 1, tokens, channels]``, bit for bit."""
    x, y = (t.detach().cpu()[0, 0] for t in (x, y))
    cos, sin = table.real.float(), table.imag.float()
    ends = [list(each) for each in zip(*profile.pairs, strict=True)]
    u, v = (x[:, each].float() for each in ends)
    seen = [y[:, [profile.comes_out(channel) for channel in each]] for each in ends]

    def rounds(*made: Callable[..., torch.Tensor]) -> bool:
        """True if each channel of a pair, a·cos + b·sin, is the result of one of some ways to compute it."""
        sides = zip(seen, ((u, cos, -v, sin), (v, cos, u, sin)), strict=True)
        return all(any(torch.equal(y, how(*of).to(x.dtype)) for how in made) for y, of in sides)

    def each(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return (a * b).to(x.dtype).float() + (c * d).to(x.dtype).float()

    def once(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """a·b + c·d in float32, with the first product not rounded."""
        return (a.double() * b.double() + (c * d).double()).float()

    ways = {
        "each": x.dtype != torch.float32 and rounds(each),  # else no product is narrower
        "wide": rounds(lambda a, b, c, d: a * b + c * d),
        "once": rounds(once, lambda a, b, c, d: once(c, d, a, b)),
    }
    return tuple(name for name, fits in ways.items() if fits)


def shares_of(
    a: Profile, b: Profile, dtypes: Sequence[torch.dtype]
) -> dict[str, tuple[float, float | None]]:
    """Return the shares of results and of gradients that differ, for each dtype that a function accepts.

    The shares are 1 and None if only one of them does. If one function takes tables, it gets those of the other.
    """
    a, b = _with_tables_of(b, a), _with_tables_of(a, b)
    reach = min(a.reach, b.reach)
    far = torch.randint(0, reach, (32,), generator=torch.Generator().manual_seed(5)).tolist()
    call = Call("", ((*range(min(96, reach)), *far),), 2, mode="gradient")
    found: dict[str, tuple[float, float | None]] = {}
    for dtype in dtypes:
        own = _results_of([a.subject, b.subject], call._replace(dtype=dtype))
        both = _shared(own)
        back = [each for name, each in both if "gradient" in name]
        if both:
            values = [each for name, each in both if "gradient" not in name]
            found[SHORT[dtype]] = _share(values), _share(back) if back else None
        elif own:
            found[SHORT[dtype]] = (1.0, None)
    return found


def _with_tables_of(maker: Profile, taker: Profile) -> Profile:
    """Return the profile of a function that takes tables, with tables that are measured of another function."""
    takes = [p.subject.way.takes_tables for p in (maker, taker)]
    count = len(taker.subject.rates)
    if takes != [False, True] or maker.interleaved is None or len(maker.slots) != count:
        return taker
    at = [maker.slots.index(pair) for pair in maker.pairs]

    def made(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.ones(ids.numel(), count, dtype=torch.complex128)
        table[:, at] = maker.tables(ids.flatten().tolist())
        table = table.view(*ids.shape, -1)
        return table.real, maker.sign * table.imag

    return replace(taker, subject=replace(taker.subject, made=made))


def _share(results: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the share of numbers that differ in a bit; 1 if dtypes do."""
    if any(one.dtype != other.dtype for one, other in results):
        return 1.0
    return float(torch.cat([gaps(*both).flatten() > 0 for both in results]).double().mean())
