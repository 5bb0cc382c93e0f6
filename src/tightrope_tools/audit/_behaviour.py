"""Checks of what a result depends on, which inputs are accepted, and whether inputs are changed."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ._angles import add_length
from ._call import CallFailed, Subject
from ._log import Log
from ._profile import SHORT, apart

# Positions whose results are compared; one more token sets the length of a call.
_FEW = (0, 1, 5, 7)
_LENGTHS = (16, 100, 600, 2500, 5000, 12_000, 40_000)
_WHERE = (1, 3, 5, 9, 2)
_SAME = 1e-5
_HEADS = 9


def _lengths(log: Log) -> list[int]:
    """Return rising lengths of calls, some around the original length of the declared spec, if it has one."""
    wanted = set(_LENGTHS)
    scaling = None if log.spec is None else log.spec.scaling
    original = getattr(scaling, "original_max_position", None)
    if isinstance(original, int):
        wanted |= {original // 2, original + 2, original * 3 // 2, original * 3}
    most = log.longest if log.subject.way.takes_ids else min(log.longest, 12_000)
    return sorted(length for length in wanted if len(_FEW) * 2 < length <= most)


def _compare(log: Log, kind: str, seen: torch.Tensor, wanted: torch.Tensor, **words: Any) -> None:
    """Add a finding if the result of an unusual call differs from that of usual ones."""
    if (size := apart(seen, wanted)) > _SAME:
        log.add(kind, f"the results of two calls differ by up to {size:.3g}", **words)


# --- other calls, tokens, rows and heads ----------------------------------------------------------------


def check_equal(log: Log) -> None:
    """Check determinism."""
    with log.check("two equal calls give equal results") as fresh:
        _deterministic(log, fresh)


def check_memory(log: Log) -> None:
    """Check history and the length of calls."""
    if log.subject.way.form.takes_tables:
        log.skip("results do not depend on earlier calls", "the caller provides the angles")
        return
    with log.check("results do not depend on earlier calls") as fresh:
        _history(log, fresh)
    if log.found("history") and log.subject.can_be_fresh:
        log.subject = replace(log.subject, renew=True)
    with log.check("results do not depend on later tokens") as fresh:
        _length(log, fresh)


def _rotate_few(subject: Subject, length: int) -> torch.Tensor | None:
    """Rotate a few tokens, the last at position length - 1; return None if the call is refused."""
    x = subject.random(1, 2, len(_FEW) + 1, seed=3)
    try:
        return subject.rotate(x, [*_FEW, length - 1]).detach()
    except CallFailed:
        return None


def _deterministic(log: Log, subject: Subject) -> None:
    x = subject.random(1, 2, 4)
    # Only the second to fourth call are compared: the first may have filled a cache.
    results = [subject.rotate(x.clone(), [1, 2, 3, 4]).detach() for _ in range(4)]
    size = max(apart(results[2], each) for each in results[1:])
    if not bool(results[0].isfinite().all()):
        log.add("not-finite", "tokens at positions near 0")
    elif size > 0:
        log.add("nondeterminism", f"the results of equal calls differ by up to {size:.3g}")


def _history(log: Log, subject: Subject) -> None:
    """Compare calls after shorter ones, after longer ones, and as first calls."""
    every = _lengths(log)
    rising = {length: _rotate_few(subject, length) for length in every}
    falling = {length: _rotate_few(subject, length) for length in reversed(every)}
    for length in every:
        shorter, longer = rising[length], falling[length]
        alone = _rotate_few(log.subject.fresh(), length)
        for how, before, after in (("longer", shorter, longer), ("shorter", alone, shorter)):
            if before is None or after is None:
                continue
            if (size := apart(before, after)) > _SAME:
                log.add(
                    "history",
                    f"positions up to {length - 1:,}, before and after {how} calls: the results "
                    f"differ by up to {size:.3g}",
                    what="The result of a call",
                    how=f": after a {how} one it differs",
                )
                return
    for length in every:
        if (rising[length] is None) != (falling[length] is None):
            evidence = f"one with positions up to {length - 1:,} is refused only before or only after a longer one"
            log.add("history", evidence, what="Whether a call is refused", how="")


def _length(log: Log, subject: Subject) -> None:
    """Compare the first tokens alone with the same tokens in a longer call."""
    x = subject.random(1, 2, len(_FEW) + 1, seed=3)
    alone = subject.rotate(x[:, :, :-1].clone(), _FEW)
    for length in _lengths(log):
        longer = _rotate_few(log.subject.fresh(), length)
        if longer is None:
            return
        if (size := apart(alone, longer[:, :, :-1])) > _SAME:
            add_length(
                log,
                f"tokens at {', '.join(map(str, _FEW))} alone, and with one at {length - 1:,}: the results "
                f"differ by up to {size:.3g}. Keys cached at one length do not fit queries at another",
                length,
            )
            return


def check_rows(log: Log) -> None:
    """Check that rows and heads do not influence one another."""
    if log.subject.way.rows_differ:
        with log.check("rows do not depend on one another") as fresh:
            _rows(log, fresh)
    else:
        log.skip("rows do not depend on one another", "all rows have the same positions")
    if log.subject.most_heads == 1:
        log.skip("all heads are rotated alike", "x has no dimension for heads")
        return
    with log.check("all heads are rotated alike") as fresh:
        _heads(log, fresh)


def _rows(log: Log, subject: Subject) -> None:
    x = subject.random(2, 2, 5, seed=5)
    near, way = [3, 1, 4, 8, 6], log.subject.way
    longer = [[0, 1, 2, 3, length - 1] for length in _lengths(log)]
    for far in [[9, 2, 11, 13, 10], *longer * (way.takes_ids or way.row_offsets)]:
        try:
            alone = [
                log.subject.fresh().rotate(row.clone(), where)
                for row, where in zip(x.split(1), (near, far))
            ]
            both = log.subject.fresh().rotate(x.clone(), torch.tensor([near, far]))
        except CallFailed:
            if far[-1] < 20:
                raise
            break
        sizes = [apart(both[i : i + 1], alone[i]) for i in (0, 1)]
        if max(sizes) <= _SAME:
            continue
        ahead = min(near) - min(far)
        as_first = [p + ahead for p in far] if way.row_offsets else near

        comes_out_at = partial(_comes_out_at, subject, x[1:], both[1:])
        if (
            sizes[0] <= _SAME
            and not way.takes_ids
            and comes_out_at([p + max(far) + 1 for p in far])
        ):
            evidence = f"in two rows of {max(far) + 1} tokens, row 1 comes out as if at {max(far) + 1} and later"
            log.add("numbered-through", evidence)
            log.subject = replace(log.subject, one_row=True)
        elif sizes[0] <= _SAME and comes_out_at(as_first):
            evidence = f"row 1 at {far} comes out as if at {near}, off by {sizes[1]:.3g}"
            log.add("row-positions", evidence)
        else:
            evidence = (
                f"rows at {near} and {far}, together and alone, differ by up to {max(sizes):.3g}"
            )
            log.add("batch", evidence, what="positions")
            # The other checks give it one row at a time, so that this fault shows in none of them.
            log.subject = replace(log.subject, one_row=True)
        return
    other = subject.random(2, 2, 5, seed=6)
    other[0] = x[0]
    size = apart(subject.rotate(x.clone(), near)[:1], subject.rotate(other, near)[:1])
    if size > _SAME:
        log.add("batch", f"the results differ by up to {size:.3g}", what="values")


def _comes_out_at(subject: Subject, x: torch.Tensor, y: torch.Tensor, where: list[int]) -> bool:
    return apart(y, subject.fresh().rotate(x.clone(), where)) <= _SAME


def _heads(log: Log, subject: Subject) -> None:
    one = subject.random(1, 1, 5, seed=7)
    x = subject.laid_out(one.expand(-1, _HEADS, -1, -1))
    y = subject.rotate(x, _WHERE)
    sizes = [apart(y[:, h], y[:, 0]) for h in range(_HEADS)]
    differs = [h for h in range(_HEADS) if sizes[h] > _SAME]
    if not differs:
        return
    same = subject.rotate(subject.laid_out(x[:, :, :1].expand_as(x)), _WHERE)
    log.along_heads = apart(same, same[:, :, :1].expand_as(same)) <= _SAME
    what = f"Heads are rotated differently: head {differs[0]} differs from head 0"
    evidence = f"of {_HEADS} heads with equal vectors, {len(differs)} differ from head 0 by up to {max(sizes):.3g}"
    if log.along_heads:
        what = "It rotates along the heads, not along the tokens: each head has its own position"
        evidence += "; equal vectors of different tokens come out the same"
    log.add("heads", evidence, what=what)


# --- inputs and outputs -----------------------------------------------------------------------------------


def check_inputs(log: Log) -> None:
    """Run the checks of inputs and outputs."""
    with log.check("the input is not modified") as fresh:
        _mutation(log, fresh)
    with log.check("results do not depend on strides") as fresh:
        _strides(log, fresh)
    if log.subject.way.takes_positions:
        with log.check("results do not depend on the dtype of positions") as fresh:
            _position_types(log, fresh)
    with log.check("the result has the dtype of x"):
        _output_types(log)
    with log.check("edge shapes are accepted"):
        _shapes(log)
    if log.subject.way.takes_keys and log.subject.most_heads is None:
        with log.check("k may have fewer heads than q") as fresh:
            _grouped(log, fresh)
    with log.check("it is linear in x") as fresh:
        _linear(log, fresh)


def _inputs(subject: Subject) -> dict[str, torch.Tensor]:
    """The same x in several places of memory; the heads of one share their memory."""
    x = subject.random(1, 2, len(_WHERE), seed=11)
    exchanged = x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = subject.laid_out(torch.cat((x, x, x), -1))
    longer = subject.random(2, 2, 2 * len(_WHERE), seed=12)  # like keys in a cache
    return {
        "": x,
        "with tokens and heads exchanged in memory": exchanged
        if x.is_contiguous()
        else x.contiguous(),
        # Like q in a fused projection.
        "that is a slice of a wider row": wide[..., subject.head_dim : 2 * subject.head_dim],
        "with heads expanded from one": x[:, :1].expand(-1, x.shape[1], -1, -1),
        "with a stride of 2 in its channels": torch.stack((x, x), -1)[..., 0],
        "of two rows that are parts of longer ones": subject.laid_out(longer)[:, :, : len(_WHERE)],
    }


def _mutation(log: Log, subject: Subject) -> None:
    meant = getattr(subject.fn, "__name__", "").endswith("_")
    for name, x in [*_inputs(subject).items()][:3]:
        ids = subject.ids(_WHERE, 1)
        given = [(x, x.clone()), (ids, ids.clone())]
        try:
            subject.rotate(x, ids, given)
        except CallFailed:
            continue
        changed = [not torch.equal(value, before) for value, before in given]
        if changed[0]:
            evidence = f"{int((x != given[0][1]).sum())} of {x.numel()} elements of x change"
            evidence += "; the function's name ends in _" * meant
            how = f" if it is one {name}" if name else ""
            log.add("mutates", evidence, "note" if meant else "error", how=how)
        if changed[1]:
            log.add("mutates-positions", f"{given[1][1].tolist()} becomes {ids.tolist()}")
        if any(changed[2:]):
            evidence = "tables that all layers share are wrong from the second layer on"
            log.add("mutates-tables", evidence)


def _strides(log: Log, subject: Subject) -> None:
    for name, x in [*_inputs(subject).items()][1:]:
        if "expanded" in name and log.found("mutates"):
            continue
        # A copy, because an in-place function would overwrite heads that share memory.
        try:
            wanted = subject.rotate(subject.laid_out(x.clone()), _WHERE).detach().clone()
        except CallFailed:
            if len(x) == 1:
                raise
            continue  # it takes one row only
        # A stride in the channels is unusual; the other cases are common.
        severity = "note" if "channels" in name else "warning"
        with log.refusal("strides-refused", severity, what=name):
            _compare(log, "strides", subject.rotate(x, _WHERE), wanted, what=name)


def _position_types(log: Log, subject: Subject) -> None:
    x, where = subject.random(1, 2, len(_WHERE), seed=11), torch.tensor([_WHERE])
    wanted = subject.rotate(x.clone(), where)
    with log.refusal("position-types", what="int32"):
        _compare(log, "position-type", subject.rotate(x.clone(), where.int()), wanted, what="int32")
    for dtype in (torch.float32, torch.float64):
        with suppress(CallFailed):
            seen = subject.rotate(x.clone(), where.to(dtype))
            _compare(log, "position-type", seen, wanted, what=SHORT[dtype])


def _output_types(log: Log) -> None:
    for dtype in (*log.dtypes, torch.float64):
        subject, name = log.subject.fresh(), SHORT[dtype]
        severity = "note" if dtype == torch.float64 else "warning"
        with log.refusal("refuses", severity, code=f"refuses-{name}", what=name):
            y = subject.rotate(subject.random(1, 2, len(_WHERE), dtype=dtype), _WHERE)
            if y.dtype != dtype:
                seen = str(y.dtype).removeprefix("torch.")
                evidence = (
                    "later operations then compute in that dtype, at its speed and memory use"
                )
                log.add("output-dtype", evidence, severity, what=name, dtype=seen)


_SHAPES = {
    "one token": (2, 3, 1),
    "one row": (1, 3, 4),
    "one head": (2, 1, 4),
    "as many tokens as heads": (2, 4, 4),
    "as many rows as tokens": (5, 3, 5),
    "no tokens": (2, 3, 0),
}


def _shapes(log: Log) -> None:
    for name, (rows, heads, tokens) in _SHAPES.items():
        subject = log.subject.fresh()
        if not tokens and not subject.way.takes_ids:
            continue
        x = subject.random(subject.most_rows or rows, heads, tokens)
        where = [*range(tokens)]
        with log.refusal("shapes", "warning" if tokens else "note", what=name):
            y = subject.rotate(x.clone(), where)
            alone = [
                subject.rotate(x[r : r + 1, h : h + 1].clone(), where)
                for r in range(len(x) if tokens else 0)
                for h in range(x.shape[1])
            ]
            if alone and not log.found("heads"):
                one_by_one = torch.cat(alone).reshape(x.shape)
                words = {"what": f"An x with {name}", "than": "from its heads and rows one by one"}
                _compare(log, "shape-dependent", y, one_by_one, **words)


def check_alone(log: Log) -> None:
    """Check that a token alone is rotated like the same token among others; runs if no error was found."""
    name = "a token alone is rotated like the same token among others"
    if log.found() or not (log.subject.way.takes_ids or log.subject.way.takes_offset):
        log.skip(name, "it takes no positions" if not log.found() else "there are errors")
        return
    with log.check(name) as subject:
        # In no order, if the function takes the position of each token.
        step = 37 if subject.way.takes_ids else 1
        x, where = subject.random(1, 4, 80, seed=16), [3 + step * i % 80 for i in range(80)]
        few = (0, 1, 5, 79)
        among = subject.rotate(x.clone(), where)[:, :, few]
        alone = [subject.rotate(x[:, :, i : i + 1].clone(), where[i : i + 1]) for i in few]
        words = {"what": "A token alone", "than": "from the same token among others"}
        _compare(log, "shape-dependent", torch.cat(alone, 2), among, **words)


def _grouped(log: Log, subject: Subject) -> None:
    q, k = subject.random(1, 4, 5, seed=12), subject.random(1, 2, 5, seed=13)
    wide = subject.rotate_qk(q.clone(), subject.laid_out(k.repeat(1, 2, 1, 1)), _WHERE)
    with log.refusal("grouped-refused", code="grouped"):
        seen = subject.rotate_qk(q.clone(), k.clone(), _WHERE)
        _compare(log, "grouped", torch.cat(seen, 1), torch.cat((wide[0], wide[1][:, :2]), 1))


def _linear(log: Log, subject: Subject) -> None:
    x, z = subject.random(1, 2, 5, seed=14), subject.random(1, 2, 5, seed=15)

    def turn(value: torch.Tensor) -> torch.Tensor:
        return subject.rotate(subject.laid_out(value), _WHERE).detach().double()

    size = apart(turn(3 * x - z), 3 * turn(x.clone()) - turn(z.clone()))
    constant = apart(turn(0 * x), 0 * x)
    if math.isinf(constant):
        log.add("not-finite", "an x of zeros comes back with values that are not finite")
    elif constant > 1e-4:
        evidence = f"an x of zeros comes back with values up to {constant:.3g}"
        log.add("not-linear", evidence, what="it adds a constant")
    elif size > 1e-4:
        evidence = f"f(3x − z) and 3f(x) − f(z) differ by up to {size:.3g}"
        like = "as if x or the result were rounded to 16 bits"
        if size > 0.1:  # x has values up to 4, of which bfloat16 rounds off up to 2^-7
            like = "as with a norm or an activation"
        log.add("not-linear", evidence, what=f"it is not linear, {like}")
