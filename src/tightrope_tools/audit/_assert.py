"""`assert_rope`: a test that a function is the meant rotation. A failure shows the smallest call that tells.

The function and its reference make the same calls, smaller ones first: those of :data:`._alike.CALLS`, and those with an
optional argument. Of the first call whose results differ, the audit and the comparison name the fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tightrope._errors import bad_type, bad_value, public
from tightrope.frequencies import Given
from tightrope.patching import FORMS
from tightrope.spec import RopeSpec
from tightrope_tools.forms import left_out, signature

from ._alike import AFTER, CALLS, ROWS, Call, results
from ._audit import audit
from ._call import (
    NOTHING,
    CallFailed,
    Subject,
    index_of,
    undisturbed,
)
from ._compare import compare
from ._faults import FAULTS
from ._profile import NARROW, SHORT, apart
from ._search import NoCallFound, subject_of
from ._targets import from_stack, resolve
from ._together import Target

# How much two right functions differ: by the roundings of x, relative to the dtype; by those of float32 cosines; and by
# those of float32 angles, per radian.
_ROUNDED, _COSINE, _ANGLE = 5.0, 2e-6, 2e-6
# Options that say how a function is called.
_HOW = ("form", "layout", "tables")
_COMPARED = (*_HOW, "make", "head_dim", "layer_type", "device")
# Differences of a comparison that are a matter of rounding, or say no more than that results differ.
_ROUNDINGS = frozenset("rounding gradient-rounding cosines calls unexplained".split())


# The calls of a variant: one that tells with few tokens, one with many, and the gradient.
_OTHERS = (Call("", ((0, 1),)), Call("", ROWS, 4), Call("", ROWS, 4, mode="gradient"))
_PACKED = (Call("", ((0, 1, 0),)), Call("", ((0, 1, 2, 0, 1, 0, 1, 2, 3, 4),), 3))
_OFFSETS = (Call("", ((1,),)), Call("", ((5, 6, 7), (5, 6, 7)), 2))
_PROBE = Call("", ((0, 1, 2),), 3)


class Variant(NamedTuple):
    """A function and its reference, with one argument more or less than usual.

    Attributes:
        what: this argument in words; "" if all are as usual.
    """

    what: str
    mine: Subject
    theirs: Subject
    calls: tuple[Call, ...]


class Failure(NamedTuple):
    """The first call whose results differ.

    Attributes:
        sentence: what differs.
        evidence: by how much.
        known: "named" if the sentence names the fault, so that no audit is asked; "small" if it is a matter of precision;
            "gradients" if the gradients alone differ.
        mine: the function, as it was called.
        code: the call, and the lines that define its tables.
    """

    sentence: str
    evidence: str
    known: str = "named"
    mine: Subject | None = None
    code: tuple[str, ...] = ()


_COMPILED = "torch.compile"


@public("assert_rope")
def assert_rope(
    function: object,
    spec: RopeSpec | None = None,
    *,
    like: object = None,
    compiled: bool | str = False,
    **options: Any,
) -> None:
    """Raise an AssertionError if a function is not the rotation of a spec, or not that of another function.

    For a test of one's own: ``assert_rope(fused, like=plain)``. Compared are values, gradients, tables for a part of the
    channels, q alone, offsets, positions in any order, rows that differ, packed rows, and the dtypes of x, as far as
    the reference takes them. Roundings of x, tables and angles are no difference.

    Args:
        function: the function, as in :func:`audit`.
        spec: the intended rotation; the function must then pass a whole audit too.
        like: the reference in place of a spec: another function, or any target of :func:`audit`.
        compiled: whether ``torch.compile`` of the function must give the same; the name of a backend to compile with.
        options: further arguments of :func:`audit`, such as ``layout="bshd"`` or ``make=True``.

    Raises:
        AssertionError: the function is another rotation. The first line names the fault and the smallest call that
            shows it, as code to paste; further lines have the numbers and what mends it.
        ValueError, TypeError: as in :func:`audit`; neither a spec nor a reference, or both.

    >>> from tightrope.functional import rotate
    >>> spec = RopeSpec(64)
    >>> assert_rope(lambda x, positions: rotate(x, spec, positions), spec)
    >>> try:
    ...     assert_rope(lambda x: rotate(x, spec, 1), like=lambda x: rotate(x, spec))
    ... except AssertionError as error:
    ...     print(str(error).partition(", ")[2].splitlines()[0])
    as in f(torch.randn(1, 1, 1, 64)).
    """
    if (spec is None) == (like is None):
        raise bad_type(
            "assert_rope must get the intended rotation, assert_rope(function, spec), or a reference, "
            f"assert_rope(function, like=reference), but got {'neither' if spec is None else 'both'}"
        )
    report = None if spec is None else audit(function, spec=spec, **options)
    failure = None
    if spec is None or not spec.by_length:
        failure = _first_failure(function, spec, like, compiled, options)
    lines: list[str] = []
    if report is not None and not report.ok:
        worst, *others = (each for each in report.findings if each.severity != "note")
        lines = [worst.sentence, worst.evidence, worst.mend]
        lines += [f"{each.code}: {each.sentence}" for each in others]
    elif failure is not None:
        lines = ([] if like is None else _named(function, like, failure, options)) or [
            failure.sentence
        ]
    if not lines:
        return
    if failure is not None:
        if failure.code:
            lines[0] = f"{lines[0].rstrip('.')}, as in {failure.code[0]}."
        lines[1:1] = [*failure.code[1:], failure.evidence]
    raise AssertionError("\n  ".join(filter(None, lines)))


def _named(function: object, like: object, failure: Failure, options: dict[str, Any]) -> list[str]:
    """The fault that an audit of both functions, or their comparison, names; empty if none does."""
    if failure.known == "named" or failure.mine is None:
        return []
    given, way = dict(options), failure.mine.way
    if not any(each.keyword for each in way.arguments):
        found = {"form": str(way), "layout": way.layout}
        found |= {"tables": way.width} if way.takes_tables else {}
        given = found | {name: value for name, value in options.items() if value is not None}
    with suppress(ValueError, TypeError):
        right = audit(like, **_of_reference(function, like, given))
        for each in audit(function, **given).findings:
            new = each.severity != "note" and each.code not in right.codes
            if new and ("gradient" in each.code) == (failure.known == "gradients"):
                return [each.sentence, each.evidence, each.mend]
        if not failure.known:
            known = {name: given[name] for name in _COMPARED if name in given}
            for part in compare(function, like, **known).differences:
                if part.code not in _ROUNDINGS and "last bits" not in part.sentence:
                    return [part.sentence, part.evidence]
    return []


# --- the two functions ----------------------------------------------------------------------------


def _are_called_alike(function: object, like: object) -> bool:
    """True if two functions have parameters of the same names."""
    seen = [signature(each) for each in (function, like)]
    names = [[] if each is None else [*each.parameters] for each in seen]
    return bool(names[0]) and names[0] == names[1]


def _of_reference(function: object, like: object, options: dict[str, Any]) -> dict[str, Any]:
    """The options with which a reference is called: how the function is called only if it is called alike."""
    own = ("partner", "make", *(() if _are_called_alike(function, like) else _HOW))
    return {name: value for name, value in options.items() if name not in own}


def _target(target: object, options: dict[str, Any], spec: RopeSpec | None = None) -> Target:
    others = ("dtypes", "longest", "device")
    return resolve(target, spec=spec, **{k: v for k, v in options.items() if k not in others})


def _exact(own: Target, spec: RopeSpec, options: dict[str, Any]) -> tuple[Subject, Subject]:
    """The function and the exact rotation, by the frequencies of the tables that the function takes, if any.

    Tables of another format may also give a rotation: those with which results agree are its own.
    """
    mine = subject_of(own, spec, options.get("device", "cpu"))
    widths: tuple[str, ...] = ()
    if mine.way.takes_tables:
        widths = mine.way.form.widths if options.get("tables") is None else ()
        rates = tuple(mine.rates.tolist())
        start = spec.start if spec.start + 2 * len(rates) <= spec.head_dim else 0
        given = Given(rates)
        spec = replace(spec, rotary_dim=2 * len(rates), start=start, scaling=given, axes=None)
    theirs = subject_of(from_stack("exact", spec), spec, mine.device)
    ways = [mine, *(replace(mine, way=replace(mine.way, width=each)) for each in widths)]
    return next(filter(lambda each: _agree(each, theirs, False), ways), mine), theirs


def _agree(mine: Subject, theirs: Subject, strict: bool = True) -> bool:
    """True if two functions agree in a call that tells two layouts, and two shapes of tables, apart."""
    return _difference(Variant("", mine.fresh(), theirs.fresh(), ()), _PROBE, strict) is None


def _alike(own: Target, like: object, options: dict[str, Any]) -> tuple[Subject, Subject]:
    """The function and its reference, called like it if parameters have the same names and results agree; else as found.

    A fault may mislead the search for a call, but functions with parameters of the same names may differ in layout.
    """
    given, device = _of_reference(own.fn, like, options), options.get("device", "cpu")
    try:
        theirs = subject_of(_target(like, given), None, device)
    except NoCallFound as error:
        why = str(error).rstrip(".")
        raise bad_value(
            f"like must return a rotated x of the same shape but no call was found that does: {why}"
        ) from None
    ways = []
    if own.form == options.get("form") and _are_called_alike(own.fn, like):
        ways = [replace(theirs, fn=own.fn, make=own.make)]
    with suppress(*[NoCallFound] * len(ways)):
        own = replace(own, head_dim=own.head_dim or theirs.head_dim)
        ways.append(subject_of(own, None, device))
    mine = next(filter(lambda each: _agree(each, theirs), ways), ways[0])
    if mine.way.takes_tables != theirs.way.takes_tables:
        raise bad_value(
            "function and like must both take cosines and sines, or both make their own, but got one of each; "
            "compare functions of x and positions"
        )
    return mine, theirs


def _variants(
    mine: Subject, theirs: Subject, strict: bool, compiled: bool | str
) -> Iterator[Variant]:
    """The function and its reference as they are, and with arguments that can be left out."""
    way, by_tables = mine.way, mine.way.takes_tables

    def adding(*roles: str, **fields: Any) -> Subject:
        arguments = (*way.arguments, *(found[role] for role in roles if role in found))
        return replace(mine, way=replace(way, arguments=arguments, **fields))

    yield Variant("", mine, theirs, CALLS)
    keys = [each for each in way.arguments if each.role == "k"]
    if keys and (keys[0].keyword or theirs.way.takes_keys):
        yield Variant("q alone", _alone(mine), _alone(theirs), _OTHERS)
    if by_tables and strict and len(mine.rates) > 3:
        half = mine.rates[: len(mine.rates) // 2]
        one, other = replace(mine, rates=half), replace(theirs, rates=half)
        yield Variant("tables for half of the channels", one, other, _OTHERS)
    found = left_out(mine.fn, way) if by_tables else {}
    if "offset" in found and way.table_shape == "sd":
        yield Variant("an offset", adding("offset", counts="in tables"), theirs, _OFFSETS)
    if "cu_seqlens" in found:
        for layout in dict.fromkeys(("thd", way.layout)):
            one = adding("cu_seqlens", "max_seqlen", table_shape="sd", layout=layout)
            with suppress(CallFailed):
                one.rotate(one.random(1, 1, 3), [0, 1, 0])
                yield Variant("packed rows", one, theirs, _PACKED)
                break
    if compiled:
        backend = compiled if isinstance(compiled, str) else "inductor"
        fn = torch.compile(mine.fn, backend=backend)
        yield Variant(_COMPILED, replace(mine, fn=fn), theirs, _OTHERS)


def _alone(subject: Subject) -> Subject:
    """A function of q and k as one of x, which gets None as k; another as it is."""
    roles = {"q": "x", "k": NOTHING}
    given = subject.way.arguments
    arguments = tuple(each._replace(role=roles.get(each.role, each.role)) for each in given)
    return replace(subject, way=replace(subject.way, arguments=arguments))


# --- the calls ------------------------------------------------------------------------------------


def _first_failure(
    function: object,
    spec: RopeSpec | None,
    like: object,
    compiled: bool | str,
    options: dict[str, Any],
) -> Failure | None:
    """The first call in which the function differs from its reference."""
    dtypes = options.get("dtypes", (torch.float32, *NARROW))
    longest = options.get("longest", math.inf)
    with undisturbed():
        try:
            own = _target(function, options, spec)
            found = _alike(own, like, options) if spec is None else _exact(own, spec, options)
        except NoCallFound as error:  # with a spec, the audit says so
            return Failure(FAULTS["cannot-call"].sentence, str(error)) if spec is None else None
        name = getattr(own.fn, "__name__", "")
        mine, theirs = found[0].fresh(), found[1].fresh()
        for variant in _variants(mine, theirs, spec is None, compiled):
            for call in variant.calls:
                tested = call.dtype in dtypes and max(map(max, call.ids)) < longest
                if not (tested and call.fits(variant.mine) and call.fits(variant.theirs)):
                    continue
                strict = spec is None or variant.what == _COMPILED
                if failure := _difference(variant, call, strict):
                    code = _shown(name if name.isidentifier() else "f", variant.mine, spec)
                    return failure._replace(mine=mine, code=code)
    return None


def _difference(variant: Variant, call: Call, strict: bool = True) -> Failure | None:
    """How a function differs from its reference in a call; None if it does not, or the reference refuses the call.

    Args:
        strict: whether a refusal, another dtype and an overwritten x are differences; with a spec, the audit decides.
    """
    what, mine, theirs, _ = variant
    names, words = ["q", "k"] if mine.way.takes_keys else ["x"], what or call.what
    least = call._replace(heads=1, keys=0) if theirs.most_heads else call
    xs, outs = (least.random(mine, len(names), seed) for seed in (51, 61))
    fastest = max([1.0, *theirs.rates.abs().tolist()])
    far = 0.0 if mine.way.takes_tables else fastest * max(map(max, call.ids))
    limit = _ROUNDED * torch.finfo(call.dtype).eps + _COSINE + _ANGLE * far
    limit *= max(float(each.abs().max()) for each in (*xs, *outs))
    try:
        wanted = results(theirs, call, xs, outs)
    except CallFailed:
        return None
    try:
        seen = results(mine, call, xs, outs)
    except CallFailed as error:
        return Failure(f"A call with {words} is refused", str(error)) if strict else None
    for name, right in wanted.items():
        title = f"{name[0].upper()}{name[1:]}"
        if name not in seen:
            return Failure(f"{title} is missing", "the result does not depend on it for autograd")
        got = seen[name]
        if name == AFTER:
            if strict and apart(got, right):
                return Failure("X is overwritten", "the reference leaves it as it is")
            continue
        if strict and got.dtype != right.dtype:
            kinds = [str(each.dtype).removeprefix("torch.") for each in (got, right)]
            sentence = f"{title} of dtype {SHORT[call.dtype]} comes back as {kinds[0]}"
            return Failure(sentence, f"the reference gives {kinds[1]}")
        size = apart(got, right)
        if size <= limit:
            continue
        sentence = f"{title} comes out differently in a call with {words}"
        evidence = f"{name} differs by up to {size:.4g}, and roundings explain {limit:.2g}"
        if what:
            counted = [*range(len(call.ids[0]))]
            if name == names[0] and apart(got, theirs.rotate(xs[0], counted)) <= limit:
                sentence = f"A call with {what} is rotated as if at positions 0 to n − 1"
            return Failure(sentence, evidence)
        if name not in names:
            return Failure(sentence, evidence, "gradients")
        # A slow pair that does not turn differs as little, but alone.
        off = (got.double() - right.double()).abs().amax((0, 1, 2)) > limit
        small = size < max(float(x.abs().max()) for x in xs) / 256
        if call.dtype == torch.float32 and small and 8 * int(off.sum()) > len(off):
            sentence = "Cosines, sines, angles or x are rounded to 16 bits, or nearly so"
            return Failure(sentence, evidence, "small")
        return Failure(sentence, evidence, "")
    return None


# --- the call as code -----------------------------------------------------------------------------


def _shown(name: str, subject: Subject, spec: RopeSpec | None) -> tuple[str, ...]:
    """The last call of a subject as code, and the lines that define its tables."""
    way, last = subject.way, subject.last
    tables = way.form.roles if way.takes_tables else ()
    texts = [
        f"{each.name}=" * each.keyword
        + (each.role if each.role in tables else _code(last[each.role]))
        for each in way.arguments
    ]
    call = f"{name}({', '.join(texts)})"
    if not tables:
        return (call,)
    width = 2 * len(subject.rates)
    made = repr(spec) if spec is not None and spec.rotary_dim == width else f"RopeSpec({width})"
    both = f'{made}.cos_sin({_code(last["ids"])}, tables="{way.width}")'
    if index := index_of(way.table_shape):
        words = (":" if isinstance(each, slice) else str(each) for each in index)
        both = f"(t[{', '.join(words)}] for t in {both})"
    lines = (call, f"cos, sin = {both}")
    if tables == ("cos", "sin"):
        return lines
    form = next(name for name, form in FORMS.items() if form is way.form)
    built = f"({tables[0]},) = FORMS[{form!r}].build(cos, sin)"
    return (*lines, "from tightrope.patching import FORMS", built)


def _code(value: Any) -> str:
    """An argument as code: random numbers for an x, every number of positions if they are few."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    more = "" if value.dtype in (torch.float32, torch.int64) else f", dtype={value.dtype}"
    more += "" if value.device.type == "cpu" else f', device="{value.device}"'
    if value.is_floating_point():
        more += ", requires_grad=True" * value.requires_grad
        return f"torch.randn({', '.join(map(str, value.shape))}{more})"
    numbers = value.flatten().tolist()
    if len(numbers) > 20 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"torch.arange({numbers[0]}, {numbers[-1] + 1}{more}){'[None]' * (value.dim() - 1)}"
    return f"torch.tensor({value.tolist()}{more})"
