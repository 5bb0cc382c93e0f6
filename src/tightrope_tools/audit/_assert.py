"""`assert_rope`: a test that a function is the meant rotation. A failure shows the smallest call that tells.

The function and its reference make the same calls, smaller ones first: those of :data:`CALLS`, and those with an
optional argument. Of the first call whose results differ, the audit and the comparison name the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tightrope._errors import bad_type, bad_value, public
from tightrope.frequencies import Given
from tightrope.spec import RopeSpec
from tightrope_tools.forms import Argument, left_out, signature

from ._audit import audit
from ._call import CallFailed, Subject, Way, counted_rows, describe_error, undisturbed
from ._compare import compare
from ._faults import FAULTS
from ._profile import SHORT, apart
from ._search import Hints, NoCallFound
from ._targets import Target, from_stack, resolve, subject_of
from ._together import together

# How much two right functions differ: by the roundings of x, relative to the dtype; by those of float32 cosines; and by
# those of float32 angles, per position.
_ROUNDED, _COSINE, _ANGLE = 5.0, 2e-6, 2e-6
_FEW = ((3, 1, 4, 1, 5), (9, 2, 6, 5, 3))
_COMPARED = (*Hints._fields, "make", "layer_type", "device")
# Differences of a comparison that are a matter of rounding, or say no more than that results differ.
_ROUNDINGS = frozenset("rounding gradient-rounding cosines calls unexplained".split())


class Call(NamedTuple):
    """A call of both functions.

    Attributes:
        what: the call in words.
        ids: the positions of the tokens of each row.
        heads, keys: the heads of x or q, and of k if they are fewer.
        dtype: of x.
        mode: "" for values; "gradient" for those too; "no gradient" for values without autograd.
    """

    what: str
    ids: tuple[tuple[int, ...], ...]
    heads: int = 1
    keys: int = 0
    dtype: torch.dtype = torch.float32
    mode: str = ""


_NARROW = (torch.bfloat16, torch.float16)
#: Smaller calls first; those that a function or its reference does not take are left out.
CALLS = (
    Call("a token at position 0", ((0,),)),
    Call("a token at position 1", ((1,),)),
    Call("two tokens", ((0, 1),)),
    Call("two heads", ((0, 1),), 2),
    Call("tokens after a cache", ((5, 6),)),
    Call("positions that fall", ((3, 1),)),
    Call("positions that start again", ((0, 1, 0),)),
    Call("two rows", ((0, 1), (0, 1)), 3),
    Call("rows at positions of their own", ((0, 1), (5, 6))),
    Call("k with fewer heads", ((0, 1),), 4, 2),
    Call("many heads", _FEW, 9),
    Call("many heads without gradients", _FEW, 9, mode="no gradient"),
    *(
        Call(f"the gradient of {SHORT[t]}", ((0, 1),), 1, 0, t, "gradient")
        for t in (torch.float32, *_NARROW)
    ),
    Call("gradients of many heads", _FEW, 9, mode="gradient"),
    *(Call(f"x in {SHORT[t]}", ((p,),), dtype=t) for t in _NARROW for p in (1, 257, 4097)),
    *(Call(f"position {p:,}", ((p,),)) for p in (4095, 4097, 100_003)),
    Call("5,000 tokens", (tuple(range(5000)),)),
)
# Those with an argument that a function can leave out.
_PACKED = (
    Call("packed rows", ((0, 1, 0),)),
    Call("packed rows", ((0, 1, 2, 0, 1, 0, 1, 2, 3, 4),), 3),
)
_OFFSETS = (Call("an offset", ((1,),)), Call("an offset", ((5, 6, 7), (5, 6, 7)), 2))
_OTHERS = (Call("", ((0, 1),)), Call("", _FEW, 4), Call("", _FEW, 4, mode="gradient"))
# It tells two layouts, and two shapes of tables, apart.
_PROBE = Call("", ((0, 1, 2),), 3)


class _Kept:
    """A function, the arguments of its last call, and the positions of the tables among them."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.args: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}
        self.ids = torch.zeros(1, 0)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.args, self.named = args, named
        return self.fn(*args, **named)


@dataclass(frozen=True)
class _Seen(Subject):
    """A subject that keeps its last call; if `shifted`, it gets tables from position 0 on, and an offset."""

    kept: _Kept = field(default_factory=lambda: _Kept(lambda: None), compare=False)
    shifted: bool = False

    @classmethod
    def of(cls, subject: Subject) -> _Seen:
        """Return the subject with a function of its own that has not been called yet."""
        kept = _Kept(subject.fresh().fn)
        return cls(**{**vars(subject), "fn": kept, "make": None}, kept=kept)

    def _call(self, xs: list[torch.Tensor], ids: torch.Tensor, start: Any) -> list[torch.Tensor]:
        if self.shifted:
            start, end = int(ids.min()), int(ids.max()) + 1
            ids = torch.arange(end)[None].expand(len(ids), -1)
        return super()._call(xs, ids, start)

    def _tables(self, x: torch.Tensor, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        self.kept.ids = ids
        return super()._tables(x, ids)


# What is in x after a call, by its name among the results.
_AFTER = "x, afterwards"
# If each row comes out as if numbered from 0 on.
_IGNORED = {
    "an offset": "The offset is ignored: tokens are rotated as if at positions 0 to n − 1",
    "packed rows": "Packed rows are numbered through: only the first begins at position 0",
}
_INDEXED = {"sd": "[0]", "b1sd": "[:, None]", "bs1d": "[:, :, None]", "s11d": "[0][:, None, None]"}


class Failure(NamedTuple):
    """The first call whose results differ.

    Attributes:
        sentence: what differs.
        evidence: by how much.
        code: the call, and the lines that define its tables.
        known: what is known of the fault: "named" if the sentence names it, so that no audit is asked; "small" if it is a
            matter of precision; "gradients" if the gradients alone differ.
        way: how the function was called.
    """

    sentence: str
    evidence: str
    code: tuple[str, ...] = ()
    known: str = "named"
    way: Way | None = None


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
        worst = [each for each in report.findings if each.severity != "note"]
        lines = [worst[0].sentence, worst[0].evidence, worst[0].mend]
        lines += [f"{each.code}: {each.sentence}" for each in worst[1:]]
    elif failure is not None:
        lines = [failure.sentence]
        if like is not None and failure.known != "named":
            lines = _named(function, like, failure, options) or lines
    if lines:
        raise AssertionError(_text(failure, *lines))


def _text(failure: Failure | None, sentence: str, *lines: str) -> str:
    """One sentence, and the details below it."""
    if failure is None or not failure.code:
        evidence = () if failure is None else (failure.evidence,)
        return "\n  ".join((sentence, *evidence, *filter(None, lines)))
    call, *defined = failure.code
    first = f"{sentence.rstrip('.')}, as in {call}."
    return "\n  ".join((first, *defined, failure.evidence, *filter(None, lines)))


def _named(function: object, like: object, failure: Failure, options: dict[str, Any]) -> list[str]:
    """The fault that an audit of both functions, or their comparison, names; empty if none does."""
    given, way = dict(options), failure.way
    if way is not None and not any(each.keyword for each in way.arguments):
        found = {"form": str(way), "layout": way.layout}
        found |= {"tables": way.width} if way.form.takes_tables else {}
        given = found | {name: value for name, value in options.items() if value is not None}
    with suppress(ValueError, TypeError):
        right = audit(like, **_of_reference(function, like, given))
        for each in audit(function, **given).findings:
            about_gradients = "gradient" in each.code
            new = each.severity != "note" and each.code not in right.codes
            if new and about_gradients == (failure.known == "gradients"):
                return [each.sentence, each.evidence, each.mend]
        if not failure.known:
            known = {name: given[name] for name in _COMPARED if name in given}
            for part in compare(function, like, **known).differences:
                if part.code not in _ROUNDINGS and "last bits" not in part.sentence:
                    return [part.sentence, part.evidence]
    return []


# --- the calls ------------------------------------------------------------------------------------


def _first_failure(
    function: object,
    spec: RopeSpec | None,
    like: object,
    compiled: bool | str,
    options: dict[str, Any],
) -> Failure | None:
    """The first call in which the function differs from its reference."""
    dtypes = options.get("dtypes", (torch.float32, *_NARROW))
    longest = options.get("longest", math.inf)
    with undisturbed():
        try:
            mine, theirs, name = _subjects(function, spec, like, options)
        except NoCallFound as error:
            if like is None:
                return None  # the audit says so
            return Failure(FAULTS["cannot-call"].sentence, str(error))
        for what, one, other, calls in _variants(mine, theirs, like is not None, compiled):
            strict = like is not None or what == _COMPILED
            for call in calls:
                tested = call.dtype in dtypes and max(map(max, call.ids)) < longest
                if not (tested and _fits(one, call) and _fits(other, call)):
                    continue
                if found := _difference(one, other, call, what, strict):
                    code = _shown(name, one, mine.way.arguments, spec)
                    return found._replace(code=code, way=mine.way)
    return None


def _are_called_alike(function: object, like: object) -> bool:
    """True if two functions have parameters of the same names."""
    seen = [signature(each) for each in (function, like)]
    names = [[] if each is None else [*each.parameters] for each in seen]
    return bool(names[0]) and names[0] == names[1]


def _of_reference(function: object, like: object, options: dict[str, Any]) -> dict[str, Any]:
    """The options with which a reference is called: how the function is called only if it is called alike."""
    alike = _are_called_alike(function, like)
    own = ("partner",) if alike else ("partner", "make", "form", "layout", "tables")
    return {name: value for name, value in options.items() if name not in own}


def _target(target: object, options: dict[str, Any], spec: RopeSpec | None = None) -> Target:
    make, layer_type = options.get("make", False), options.get("layer_type")
    found = resolve(target, make=make, layer_type=layer_type, spec=spec)
    partner = options.get("partner")
    return (
        found if partner is None else together(found, resolve(partner, make=False, layer_type=None))
    )


def _subject(
    target: Target, options: dict[str, Any], spec: RopeSpec | None = None, dim: int | None = None
) -> Subject:
    hints = Hints(*(options.get(name) for name in Hints._fields))
    hints = hints._replace(head_dim=hints.head_dim or dim)
    return subject_of(target, hints, spec, options.get("device", "cpu"))


def _subjects(
    function: object, spec: RopeSpec | None, like: object, options: dict[str, Any]
) -> tuple[_Seen, Subject, str]:
    """The function, its reference, and the name of the function."""
    own = _target(function, options, spec)
    if spec is not None:
        mine = _Seen.of(_subject(own, options, spec))
        exact = from_stack("exact", _reference(spec, mine))
        theirs = _subject(exact, {"device": mine.device}, exact.spec)
    else:
        given = _of_reference(function, like, options)
        try:
            theirs = _subject(_target(like, given), given)
        except NoCallFound as error:
            why = str(error).rstrip(".")
            raise bad_value(
                f"like must return a rotated x of the same shape but no call was found that does: {why}"
            ) from None
        mine = _called(own, theirs, own.form is None and _are_called_alike(function, like), options)
        if mine.way.form.takes_tables != theirs.way.form.takes_tables:
            raise bad_value(
                "function and like must both take cosines and sines, or both make their own, but got one of each; "
                "compare functions of x and positions"
            )
    name = own.name.rpartition(":")[2].rpartition(".")[2].removesuffix("()")
    is_named = hasattr(own.fn, "__name__") and name.isidentifier()
    return mine, theirs.fresh(), name if is_named else "f"


def _called(own: Target, theirs: Subject, alike: bool, options: dict[str, Any]) -> _Seen:
    """The function as its reference is called, if parameters have the same names and results agree; else as found.

    A fault may mislead the search for a call, but functions with parameters of the same names may differ in layout.
    """
    first = _Seen.of(replace(theirs, fn=own.fn, make=own.make)) if alike else None
    if first is not None and _difference(first, theirs.fresh(), _PROBE, "", strict=True) is None:
        return first
    try:
        found = _Seen.of(_subject(own, options, None, theirs.head_dim))
    except NoCallFound:
        if first is None:
            raise
        return first
    if first is None or _difference(found, theirs.fresh(), _PROBE, "", strict=True) is None:
        return found
    return first


def _reference(spec: RopeSpec, subject: Subject) -> RopeSpec:
    """The rotation that a function must compute: by the frequencies of the tables that it gets, if it takes them."""
    if not subject.way.form.takes_tables:
        return spec
    rates = tuple(subject.rates.tolist())
    start = spec.start if spec.start + 2 * len(rates) <= spec.head_dim else 0
    return replace(spec, rotary_dim=2 * len(rates), start=start, scaling=Given(rates), axes=None)


_Variant = tuple[str, _Seen, Subject, tuple[Call, ...]]
_COMPILED = "torch.compile"


def _variants(
    mine: _Seen, theirs: Subject, strict: bool, compiled: bool | str
) -> Iterator[_Variant]:
    """The function and its reference as they are, and with arguments that can be left out."""
    way, by_tables = mine.way, mine.way.form.takes_tables
    yield "", mine, theirs, CALLS
    keys = [each for each in way.arguments if each.role == "k"]
    if keys and theirs.way.takes_keys:
        yield "q alone", _alone(mine), _alone(theirs), _OTHERS
    elif keys and keys[0].keyword:
        yield "q alone", _alone(mine), theirs, _OTHERS
    if by_tables and strict and len(mine.rates) > 3:
        half = mine.rates[: len(mine.rates) // 2]
        one, other = replace(mine, rates=half), replace(theirs, rates=half)
        yield "tables for half of the channels", one, other, _OTHERS
    found = left_out(mine.kept.fn, way) if by_tables else {}
    if "offset" in found and way.table_shape == "sd":
        one = replace(mine, way=_adding(mine, found["offset"]), shifted=True)
        yield "an offset", one, theirs, _OFFSETS
    if "cu_seqlens" in found:
        added = (found[role] for role in ("cu_seqlens", "max_seqlen") if role in found)
        packed = replace(_adding(mine, *added), table_shape="sd")
        for layout in dict.fromkeys(("thd", way.layout)):
            one = replace(mine, way=replace(packed, layout=layout))
            with suppress(CallFailed):
                one.rotate(one.random(1, 1, 3), [0, 1, 0])
                yield "packed rows", one, theirs, _PACKED
                break
    if compiled:
        backend = compiled if isinstance(compiled, str) else "inductor"
        kept = _Kept(torch.compile(mine.kept.fn, backend=backend))
        yield _COMPILED, replace(mine, fn=kept, kept=kept), theirs, _OTHERS


def _adding(subject: Subject, *arguments: Argument) -> Any:
    return replace(subject.way, arguments=(*subject.way.arguments, *arguments))


def _alone(subject: Any) -> Any:
    """A function of q and k as one of x, which passes None as k, or nothing if k can be left out."""
    way = subject.way
    places = [each.role for each in way.arguments if not each.keyword]
    at = places.index("k") if "k" in places else None

    def one(*args: Any, **named: Any) -> Any:
        given = args if at is None else (*args[:at], None, *args[at:])
        made = subject.fn(*given, **named)
        return made[0] if isinstance(made, tuple | list) else made

    rest = (each for each in way.arguments if each.role != "k")
    arguments = tuple(each._replace(role="x") if each.role == "q" else each for each in rest)
    return replace(subject, fn=one, make=None, way=replace(way, arguments=arguments))


def _fits(subject: Subject, call: Call) -> bool:
    """True if a function takes the positions of a call as they are."""
    way, ids = subject.way, torch.tensor(call.ids)
    if (subject.most_rows == 1 and len(ids) > 1) or (call.keys and not way.takes_keys):
        return False
    alike = bool((ids == ids[:1]).all())
    if way.packed:
        return bool(counted_rows(ids))
    if way.takes_ids:
        return alike or way.rows_differ
    start = ids[:, :1] if way.takes_offset else 0
    counted = bool((ids - start == torch.arange(ids.shape[1])).all())
    return counted and (alike or way.row_offsets)


def _difference(
    mine: _Seen, theirs: Subject, call: Call, what: str, strict: bool
) -> Failure | None:
    """How a function differs from its reference in a call; None if it does not, or the reference refuses the call.

    Args:
        what: the argument that the call has or lacks; "" for a usual call.
        strict: whether a refusal, another dtype and an overwritten x are differences; with a spec, the audit decides.
    """
    names = ["q", "k"] if mine.way.takes_keys else ["x"]
    counts = [call.heads, call.keys or call.heads][: len(names)]
    counts = [min(n, mine.most_heads or n, theirs.most_heads or n) for n in counts]
    shapes = [(len(call.ids), n, len(call.ids[0])) for n in counts]
    xs, outs = (
        [mine.random(*shape, dtype=call.dtype, seed=seed + i) for i, shape in enumerate(shapes)]
        for seed in (51, 61)
    )
    try:
        wanted = _results(theirs, names, xs, outs, call)
    except CallFailed:
        return None
    words = what or call.what
    try:
        seen = _results(mine, names, xs, outs, call)
    except CallFailed as error:
        return Failure(f"A call with {words} is refused", str(error)) if strict else None
    for name, right in wanted.items():
        got, title = seen[name], f"{name[0].upper()}{name[1:]}"
        if right is None:
            continue
        if got is None:
            return Failure(f"{title} is missing", "the result does not depend on it for autograd")
        if strict and got.dtype != right.dtype:
            kinds = [str(each.dtype).removeprefix("torch.") for each in (got, right)]
            evidence = f"the reference gives {kinds[1]}"
            return Failure(
                f"{title} of dtype {SHORT[call.dtype]} comes back as {kinds[0]}", evidence
            )
        size, limit = apart(got, right), _limit(mine, call, [*xs, *outs])
        if name == _AFTER:
            if strict and size:
                return Failure("X is overwritten", "the reference leaves it as it is")
        elif size > limit:
            evidence = f"{name} differs by up to {size:.4g}, and roundings explain {limit:.2g}"
            through = torch.arange(len(call.ids[0])).expand(len(call.ids), -1)
            if (
                what in _IGNORED
                and name == names[0]
                and apart(got, theirs.rotate(xs[0], through)) <= limit
            ):
                return Failure(_IGNORED[what], evidence)
            sentence = f"{title} comes out differently in a call with {words}"
            if what:
                return Failure(sentence, evidence)
            if name not in names:
                return Failure(sentence, evidence, known="gradients")
            # A slow pair that does not turn differs as little, but alone.
            apart_in = (got.double() - right.double()).abs().amax((0, 1, 2)) > limit
            small = size < max(float(x.abs().max()) for x in xs) / 256
            if call.dtype == torch.float32 and small and 8 * int(apart_in.sum()) > len(apart_in):
                sentence = "Cosines, sines, angles or x are rounded to 16 bits, or nearly so"
                return Failure(sentence, evidence, known="small")
            return Failure(sentence, evidence, known="")
    return None


def _results(
    subject: Subject,
    names: list[str],
    xs: list[torch.Tensor],
    outs: list[torch.Tensor],
    call: Call,
) -> dict[str, torch.Tensor | None]:
    """What a function makes of x, or of q and k, and of gradients; and what is in x afterwards.

    Raises:
        CallFailed: it refuses the call, or the backward pass raises an error.
    """
    given, ids = [subject.laid_out(x.clone()) for x in xs], torch.tensor(call.ids)
    leaves = given
    if call.mode == "gradient":
        leaves = [x.requires_grad_() for x in given]
        given = [x * 1.0 for x in leaves]  # an in-place function may not write to a leaf
    with torch.set_grad_enabled(call.mode != "no gradient"):
        if subject.way.takes_keys and len(given) > 1:
            ys = subject.rotate_all(given, ids)
        else:
            ys = [subject.rotate(x, ids) for x in given]
    made: dict[str, torch.Tensor | None] = dict(zip(names, ys))
    if call.mode == "gradient":
        made |= {f"the gradient of {name}": None for name in names}
        if all(y.requires_grad for y in ys):
            cotangents = [out.to(y) for out, y in zip(outs, ys)]
            try:
                found = torch.autograd.grad(ys, leaves, cotangents, allow_unused=True)
            except Exception as error:  # foreign code
                raise CallFailed(describe_error(error)) from error
            made |= {f"the gradient of {name}": each for name, each in zip(names, found)}
    else:
        made[_AFTER] = torch.cat([x.flatten() for x in given])
    return made


def _limit(subject: Subject, call: Call, tensors: list[torch.Tensor]) -> float:
    """The largest difference that roundings explain."""
    far = 0 if subject.way.form.takes_tables else max(map(max, call.ids))
    size = max(float(each.abs().max()) for each in tensors)
    return size * (_ROUNDED * torch.finfo(call.dtype).eps + _COSINE + _ANGLE * far)


# --- the call as code -----------------------------------------------------------------------------


def _shown(
    name: str, subject: _Seen, arguments: Sequence[Argument], spec: RopeSpec | None
) -> tuple[str, ...]:
    """The last call of a subject as code, and the lines that define its tables.

    Args:
        arguments: those of the usual call of the function.
    """
    way, kept = subject.way, subject.kept
    roles = {str(each.name): each.role for each in (*arguments, *way.arguments) if each.keyword}
    given = [(each.role, "") for each in arguments if not each.keyword]
    passed = [(role, "", value) for (role, _), value in zip(given, kept.args)]
    passed += [(roles[key], f"{key}=", value) for key, value in kept.named.items()]
    tables = way.form.roles if way.form.takes_tables else ()
    texts = [f"{key}{role if role in tables else _code(value)}" for role, key, value in passed]
    call = f"{name}({', '.join(texts)})"
    if not tables:
        return (call,)
    width = 2 * len(subject.rates)
    made = repr(spec) if spec is not None and spec.rotary_dim == width else f"RopeSpec({width})"
    both = f'{made}.cos_sin({_code(kept.ids)}, tables="{way.width}")'
    if way.table_shape != "bsd":
        both = f"(t{_INDEXED[way.table_shape]} for t in {both})"
    lines = (call, f"cos, sin = {both}")
    if tables == ("cos", "sin"):
        return lines
    return (
        *lines,
        f"({tables[0]},) = tightrope_tools.forms.FORMS[{way.form.name!r}].build(cos, sin)",
    )


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
