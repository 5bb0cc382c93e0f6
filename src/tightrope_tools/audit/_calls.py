"""Unusual calls: other rows, heads, shapes, places in memory, dtypes and lengths, whose results the near matrices predict.

They predict gradients too, and k must come out like an equal q.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ._alike import Call, results
from ._call import CallFailed, Subject
from ._log import Log
from ._profile import DENSE, NEAR, ODD, SHORT, Near, Profile, apart, matrices

_WHERE = (1, 3, 5, 9, 2)
_SAME = 1e-5
_HEADS = 9
Memory = Callable[[Subject, torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """An unusual call, whose result should be the predicted one.

    Attributes:
        kind: the kind of the finding if it is not.
        what: how x, or its positions, differ from usual ones.
        refused: the kind of the finding if the call is refused; "" if that is no fault.
        severity: that of a refusal, if not the usual one.
        rows, heads: of x.
        ids: the positions, of all rows or of each; those of a function that numbers tokens itself are 0 to n - 1.
        memory: puts x in another place in memory.
        dtype: that of the positions.
    """

    kind: str
    what: str = ""
    refused: str = ""
    severity: str | None = None
    rows: int = 1
    heads: int = 2
    ids: Sequence[Any] = _WHERE
    memory: Memory = lambda _, x: x
    dtype: torch.dtype = torch.int64


def _shape(what: str, rows: int, heads: int, ids: Sequence[int], severity: str = "warning") -> Case:
    return Case("shape-dependent", what, "shapes", severity, rows, heads, ids)


def _strides(what: str, memory: Memory, severity: str = "warning", rows: int = 1) -> Case:
    return Case("strides", what, "strides-refused", severity, rows, memory=memory)


def _exchanged(_: Subject, x: torch.Tensor) -> torch.Tensor:
    other = x.transpose(1, 2).contiguous().transpose(1, 2)
    return other if x.is_contiguous() else x.contiguous()


def _slice(subject: Subject, x: torch.Tensor) -> torch.Tensor:
    """Like q in a fused projection."""
    wide = subject.laid_out(torch.cat((x, x, x), -1))
    return wide[..., subject.head_dim : 2 * subject.head_dim]


def _parts(subject: Subject, x: torch.Tensor) -> torch.Tensor:
    """Like keys in a cache."""
    return subject.laid_out(torch.cat((x, x), 2))[:, :, : x.shape[2]]


_EXPANDED = "with heads expanded from one"
#: The calls of each check. A stride in the channels is unusual, as is an x without tokens; the other cases are common.
CHECKS: dict[str, tuple[Case, ...]] = {
    "the input is not modified": (Case("shape-dependent", "few tokens"),),
    "results do not depend on strides": (
        _strides("with tokens and heads exchanged in memory", _exchanged),
        _strides("that is a slice of a wider row", _slice),
        _strides(_EXPANDED, lambda _, x: x[:, :1].expand(-1, x.shape[1], -1, -1)),
        _strides(
            "with a stride of 2 in its channels",
            lambda _, x: torch.stack((x, x), -1)[..., 0],
            "note",
        ),
        _strides("of two rows that are parts of longer ones", _parts, rows=2),
    ),
    "results do not depend on the dtype of positions": (
        Case("position-type", "int32", "position-types", dtype=torch.int32),
        Case("position-type", "float32", dtype=torch.float32),
        Case("position-type", "float64", dtype=torch.float64),
    ),
    "edge shapes are accepted": (
        _shape("one token", 2, 3, (7,)),
        _shape("one row", 1, 3, range(4)),
        _shape("one head", 2, 1, range(4)),
        _shape("as many tokens as heads", 2, 4, range(4)),
        _shape("as many rows as tokens", 5, 3, range(5)),
        _shape("many tokens", 1, 4, [(3 + 5 * i) % 16 for i in range(80)]),
        _shape("no tokens", 2, 3, (), "note"),
    ),
}


#: The calls in which k is compared with q, beside those above.
_KEYS = (
    Case("heads", "9 heads", heads=_HEADS, ids=range(5)),
    Case("row-positions", "two rows", rows=2, heads=3, ids=((3, 1, 0, 2), (2, 5, 1, 4))),
)


def check_calls(log: Log) -> None:
    """Run the checks of inputs: what is overwritten, and the tables of calls."""
    for name, cases in CHECKS.items():
        if log.subject.way.takes_positions or cases[0].dtype == torch.int64:
            with log.check(name) as fresh:
                for case in cases:
                    _make(log, fresh, case)


def _ids(log: Log, subject: Subject, case: Case) -> torch.Tensor | None:
    """Return the positions of a case; None if the function cannot take it."""
    ids, way = subject.ids(case.ids, case.rows), subject.way
    if case.what == _EXPANDED and log.found("mutates"):
        return None  # heads that share memory are overwritten by one another
    if way.takes_ids or not case.kind:
        return ids
    few = ids.shape[1] in range(1, NEAR + 1)
    return subject.ids(range(ids.shape[1]), case.rows) if few else None


def _x(subject: Subject, case: Case, ids: torch.Tensor) -> torch.Tensor:
    return case.memory(subject, subject.random(case.rows, case.heads, ids.shape[-1], seed=11))


def _make(log: Log, subject: Subject, case: Case) -> None:
    """Make a call, and report if it is refused, overwrites its inputs, or has another result than predicted."""
    ids = _ids(log, subject, case)
    if ids is None:
        return
    x, given = _x(subject, case, ids), ids.to(case.dtype, copy=True)
    before = x.clone()
    with log.refusal(case.refused, case.severity, what=case.what):
        y = subject.rotate(x, given)
        if not torch.equal(x, before):
            how = f" if it is one {case.what}" if case.kind == "strides" else ""
            _add_overwritten(log, subject, x, before, how)
        if not torch.equal(given, ids.to(case.dtype)):
            log.add("mutates-positions", f"{ids.tolist()} becomes {given.tolist()}")
        if any(not torch.equal(*each) for each in subject.given):
            log.add("mutates-tables")
        if ids.numel() and (size := log.near.off(y, before, ids)):
            evidence = f"the result of x, {case.what}, differs by up to {size:.3g} from that of usual calls"
            log.add(case.kind, evidence, what=case.what)


def _add_overwritten(
    log: Log, subject: Subject, x: torch.Tensor, before: torch.Tensor, how: str
) -> None:
    meant = getattr(subject.fn, "__name__", "").endswith("_")
    severity, end = ("note", "; the function's name ends in _") if meant else ("error", "")
    count, total = int((x != before).sum()), x.numel()
    log.add("mutates", severity=severity, count=count, total=total, how=how, end=end)


# --- linear, heads and rows -----------------------------------------------------------------------


def check_linear(log: Log) -> None:
    """Check that the matrices predict the result of random vectors, and that no constant is added."""
    with log.check("it is linear in x") as subject:
        ids = range(len(log.near.matrices))
        x = subject.random(1, 1, len(ids), seed=14)
        before = x.clone()
        size = log.near.off(subject.rotate(x, ids), before, subject.ids(ids, 1))
        constant = apart(subject.rotate(0 * before, ids), 0 * before)
        if math.isinf(constant):
            log.add("not-finite", "an x of zeros comes back with values that are not finite")
        elif constant > 1e-4:
            log.add("not-linear/constant", size=constant)
        elif size:
            like = "as if x or the result were rounded to 16 bits"
            if size > 0.1:  # x has values up to 4, of which bfloat16 rounds off up to 2^-7
                like = "as with a norm or an activation"
            log.add("not-linear", size=size, like=like)


def check_heads(log: Log) -> None:
    """Check that all heads are rotated alike; if not, later checks rotate one head."""
    name = "all heads are rotated alike"
    if log.subject.most_heads == 1:
        log.skip(name, "x has no dimension for heads")
        return
    with log.check(name) as subject:
        ids = subject.ids(range(5), 1)
        x = subject.random(1, _HEADS, 5, seed=7)
        y = subject.rotate(x.clone(), ids)
        sizes = [log.near.off(y[:, h : h + 1], x[:, h : h + 1], ids) for h in range(_HEADS)]
        differs = [h for h in range(_HEADS) if sizes[h]]
        if not differs:
            return
        same = subject.rotate(subject.laid_out(x[:, :, :1].expand_as(x)), ids)
        log.along_heads = apart(same, same[:, :, :1].expand_as(same)) <= _SAME
        kind = "heads/as-tokens" if log.along_heads else "heads"
        words: dict[str, Any] = {"total": _HEADS, "count": len(differs), "head": differs[0]}
        log.add(kind, **words, size=max(sizes))
        log.subject = replace(log.subject, one_head=True)


def add_batch(log: Log, evidence: str) -> None:
    """Add the finding that rows influence one another; later checks pass one row at a time, so that it has one name."""
    log.add("batch", evidence)
    log.subject = replace(log.subject, one_row=True)


# --- dtypes and numbers of heads ------------------------------------------------------------------


def check_results(log: Log) -> None:
    """Check the dtypes of results, and k with fewer heads than q."""
    with log.check("the result has the dtype of x"):
        for dtype in (*log.dtypes, torch.float64):
            subject, name = log.subject.fresh(), SHORT[dtype]
            severity = "note" if dtype == torch.float64 else "warning"
            with log.refusal("refuses-{what}", severity, what=name):
                y = subject.rotate(subject.random(1, 2, len(_WHERE), dtype=dtype), _WHERE)
                if y.dtype != dtype:
                    seen = str(y.dtype).removeprefix("torch.")
                    log.add("output-dtype", severity=severity, what=name, dtype=seen)
    if log.subject.way.takes_keys and log.subject.most_heads is None:
        with log.check("k may have fewer heads than q") as fresh:
            _grouped(log, fresh)


def _grouped(log: Log, subject: Subject) -> None:
    q, k = subject.random(1, 4, 5, seed=12), subject.random(1, 2, 5, seed=13)
    wide = subject.rotate_all([q.clone(), subject.laid_out(k.repeat(1, 2, 1, 1))], _WHERE)
    with log.refusal("grouped/refused"):
        seen = torch.cat(subject.rotate_all([q.clone(), k.clone()], _WHERE), 1)
        size = apart(seen, torch.cat((wide[0], wide[1][:, :2]), 1))
        if size > _SAME:
            log.add("grouped", size=size)


# --- earlier calls, and the length of a call ------------------------------------------------------

#: Positions whose results are compared; one more token sets the length of a call.
FEW = (0, 1, 5, 7)
_LENGTHS = (16, 100, 600, 2500, 5000, 12_000, 40_000)


def lengths_of(log: Log) -> list[int]:
    """Return rising lengths of calls, some around the original length of the declared spec, if it has one."""
    wanted = set(_LENGTHS)
    original = getattr(getattr(log.spec, "scaling", None), "original_max_position", None)
    if isinstance(original, int):
        wanted |= {original // 2, original + 2, original * 3 // 2, original * 3}
    most = log.longest if log.subject.way.takes_ids else min(log.longest, 12_000)
    return sorted(length for length in wanted if len(FEW) * 2 < length <= most)


def _rotate_few(
    subject: Subject, length: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    """Rotate a few tokens, the last at position length - 1; return None if the call is refused.

    If rows differ, row 0 has only tokens near 0.
    """
    ids, x = _few(subject, length)
    with suppress(CallFailed):
        return subject.rotate(x.to(dtype), ids).detach()
    return None


def _few(subject: Subject, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and x of a call."""
    way = subject.way
    rows = [[*FEW, 2], [*FEW, length - 1]]
    ids = torch.tensor(rows if way.rows_differ and (way.takes_ids or way.row_offsets) else rows[1:])
    return ids, subject.random(len(ids), 2, ids.shape[1], seed=3)


def check_equal(log: Log) -> None:
    """Check that equal calls give equal, finite results."""
    with log.check("two equal calls give equal results") as subject:
        x = subject.random(1, 2, 4)
        # Only the second to fourth call are compared: the first may have filled a cache.
        results = [subject.rotate(x.clone(), [1, 2, 3, 4]).detach() for _ in range(4)]
        size = max(apart(results[2], each) for each in results[1:])
        if not bool(results[0].isfinite().all()):
            log.add("not-finite", "tokens at positions near 0")
        elif size > 0:
            log.add("nondeterminism", size=size)


def check_memory(log: Log) -> None:
    """Check that results depend neither on earlier calls nor on later tokens."""
    if log.subject.way.takes_tables:
        log.skip("results do not depend on earlier calls", "the caller provides the angles")
        return
    first = {length: _rotate_few(log.subject.fresh(), length) for length in lengths_of(log)}
    calls = {length: y for length, y in first.items() if y is not None}
    with log.check("results do not depend on earlier calls"):
        _history(log, calls)
    name = "results do not depend on later tokens"
    if log.found("history"):
        log.subject = replace(log.subject, renew=log.subject.make is not None)
        log.near = Near.of(log.subject)  # after long calls, those near 0 may have other results
        if not log.subject.renew:
            log.skip(name, "they depend on earlier calls")
            return
    with log.check(name):
        _length(log, calls)


def _history(log: Log, first: dict[int, torch.Tensor]) -> None:
    """Compare first calls, by their lengths, with calls after longer and shorter ones, and after one in bfloat16."""
    rising = [*first]
    # Some functions keep tables of a few thousand positions.
    few = [length for length in rising if length <= 5000 and torch.bfloat16 in log.dtypes][-1:]
    passes = [("history", "longer", rising[::-1]), ("history", "shorter", rising)]
    for kind, how, lengths in (*passes, ("history/dtype", "", few)):
        subject = log.subject.fresh()
        for length in lengths:
            if kind == "history/dtype":
                _rotate_few(subject, length, torch.bfloat16)
            again = _rotate_few(subject, length)
            if again is not None and (size := apart(first[length], again)) > _SAME:
                log.add(kind, last=length - 1, how=how, size=size)
                return


def _length(log: Log, calls: dict[int, torch.Tensor]) -> None:
    """Compare the first tokens of longer and longer calls, and a row beside them, with those of short calls."""
    same = len(log.near.matrices)
    for length, y in calls.items():
        ids, x = _few(log.subject, length)
        if size := log.near.off(y[-1:, :, :-1], x[-1:, :, :-1], ids[-1:, :-1]):
            log.add_length(length, size)
            log.limit = same
        beside = 0.0 if len(x) == 1 else log.near.off(y[:1], x[:1], ids[:1])
        if beside and not log.found("row-positions"):
            evidence = f"row 0 at {ids[0].tolist()} beside one up to {length - 1:,} differs by {beside:.3g}"
            add_batch(log, evidence)
        if size or beside:
            return
        same = length


# --- keys and gradients ---------------------------------------------------------------------------


def check_keys(log: Log, profile: Profile) -> None:
    """Check that k comes out like an equal q: near and far, in all calls of the tables, in all dtypes."""
    way = log.subject.way
    if not way.takes_keys:
        return
    odd = [p for p in ODD if p < profile.reach]
    cases = [
        Case("", f"at positions up to {max(where):,}", ids=where)
        for where in (range(NEAR), odd, range(min(DENSE, profile.reach)))
    ]
    if way.axes > 1 and not way.counts:
        differ = torch.arange(4 * way.axes).view(way.axes, 1, 4).tolist()
        cases.append(Case("", "at positions whose coordinates differ", ids=differ))
    cases += [*_KEYS, *(case for each in CHECKS.values() for case in each)]
    with log.check("k is rotated like q") as fresh:
        for dtype, case in itertools.product(log.dtypes, cases):
            if log.found("k-not-rotated", "q-k"):
                return
            if (ids := _ids(log, fresh, case)) is None or log.found(case.kind):
                continue
            q, k = (_x(fresh, case, ids).to(dtype) for _ in range(2))
            before = k.clone()
            with suppress(CallFailed):
                ys = fresh.rotate_all([q, k], ids.to(case.dtype))
                if not torch.equal(k, before):
                    _add_overwritten(log, fresh, k, before, " if it is passed as k")
                size = apart(*ys)
                if case is cases[0] and dtype == torch.float32 and apart(ys[1], before) == 0 < size:
                    log.add("k-not-rotated")
                elif size > 16 * torch.finfo(dtype).eps * max(1.0, profile.amplitude):
                    words = f"for {SHORT[dtype]} x, {case.what}"
                    log.add("q-k", f"{words}, k differs by up to {size:.3g} from an equal q")


_GRADIENTS = (0, 1, 5, 14)


def check_gradients(log: Log) -> None:
    """Check that the gradients of x, or of q and k, are the transposed rotation of the incoming ones."""
    if log.found("not-linear", "nondeterminism"):
        log.skip("gradients", "no fixed linear map of x was measured")
        return
    with log.check("gradients") as fresh:
        _gradient(log, fresh, "q" if fresh.way.takes_keys else "x")
    if log.subject.way.takes_keys:
        with log.check("gradients of k") as fresh:
            _gradient(log, replace(fresh, side=1), "k")


def _gradient(log: Log, subject: Subject, name: str) -> None:
    maps = matrices(subject, _GRADIENTS)
    call = Call("", (_GRADIENTS,), 2, mode="gradient")
    (x,), (out,) = (call.random(subject, 1, seed) for seed in (21, 22))
    with log.refusal("gradient-raises", name=name):
        seen = results(subject, call, [x], [out]).get("the gradient of x")
        if seen is None:
            log.add("gradient-missing", name=name)
            return
        flat, got = (t.detach().cpu().double() for t in (out, seen))
        # [tokens, out, in] and [.., tokens, out] -> [.., tokens, in]
        wanted = torch.einsum("toi,bhto->bhti", maps, flat)
        diagonal = maps.diagonal(dim1=-2, dim2=-1)
        forwards = torch.einsum("tio,bhto->bhti", maps, flat)
        causes = {
            "": wanted,
            "the term with the sine is detached": diagonal * flat,
            "the term with the cosine is detached": wanted - diagonal * flat,
            "the incoming gradient is rotated forwards instead of back": forwards,
            "the incoming gradient is passed on unrotated": flat,
            "it is zero": torch.zeros_like(flat),
        }
        fits = (cause for cause, each in causes.items() if apart(got, each) <= 1e-3)
        if cause := next(fits, "it is not the incoming gradient rotated back"):
            log.add("gradient-wrong", name=name, cause=cause, size=apart(got, wanted))
