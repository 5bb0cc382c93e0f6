"""Checks of what a result depends on, which inputs are accepted, and whether inputs are changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ._call import CallFailed, Subject
from ._log import Log
from ._profile import SHORT
from ._rotation import add_does_nothing, add_not_finite

# Positions whose results are compared; one more token sets the length of a call.
_FEW = (0, 1, 5, 7)
_LENGTHS = (16, 100, 600, 2500, 5000, 12_000, 40_000)
_WHERE = (1, 3, 5, 9, 2)
_SAME = 1e-5
_HEADS = 9


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference; infinite if one value is NaN and the other is not."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(same, 0.0).nan_to_num(float("inf"))
    return float(difference.max()) if difference.numel() else 0.0


def _lengths(log: Log) -> list[int]:
    """Return rising lengths of calls, some around the original length of the declared spec, if it has one."""
    wanted = set(_LENGTHS)
    scaling = None if log.spec is None else log.spec.scaling
    original = getattr(scaling, "original_max_position", None)
    if isinstance(original, int):
        wanted |= {original // 2, original + 2, original * 3 // 2, original * 3}
    most = log.longest if log.subject.way.takes_ids else min(log.longest, 12_000)
    return sorted(length for length in wanted if len(_FEW) * 2 < length <= most)


# --- other calls, tokens, rows and heads ----------------------------------------------------------------


def check_memory(log: Log) -> None:
    """Check determinism and history; runs first, before other calls have left state."""
    with log.check("two equal calls give equal results") as fresh:
        _deterministic(log, fresh)
    if log.found("nondeterminism", "not-finite"):
        return
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
    if not bool(results[0].isfinite().all()):
        add_not_finite(log)
        return
    size = max(apart(results[2], each) for each in results[1:])
    if size > 0:
        evidence = f"the results of equal calls differ by up to {size:.3g}"
        log.add("nondeterminism", "error", "Equal calls give different results.", evidence)


def _history(log: Log, subject: Subject) -> None:
    """Compare calls of rising lengths, of falling lengths, and of each length as a first call."""
    every = _lengths(log)
    rising = {length: _rotate_few(subject, length) for length in every}
    falling = {length: _rotate_few(subject, length) for length in reversed(every)}
    for length in every:
        up, down = rising[length], falling[length]
        alone = _rotate_few(log.subject.fresh(), length)
        for before, after in ((up, down), (alone, up)):
            if before is not None and after is not None and apart(before, after) > _SAME:
                _add_history(log, length, every[-1], apart(before, after))
                return
    for length in every:
        if (rising[length] is None) != (falling[length] is None):
            log.add(
                "history",
                "error",
                "Whether a call is refused depends on earlier calls.",
                f"a call with positions up to {length - 1:,} is refused only before or only after a "
                "longer one",
            )
            return


def _add_history(log: Log, length: int, other: int, size: float) -> None:
    """Report that history matters, with the shortest earlier call that shows it on a fresh function."""
    when = "after other calls it differs"
    first = _rotate_few(log.subject.fresh(), length)
    for candidate in _lengths(log):
        late = log.subject.fresh()
        _rotate_few(late, candidate)
        after = _rotate_few(late, length)
        if first is not None and after is not None and candidate != length:
            if apart(first, after) > _SAME:
                longer = "a longer one" if candidate > length else "a shorter one"
                other, size, when = candidate, apart(first, after), f"after {longer} it differs"
                break
    log.add(
        "history",
        "error",
        f"The result of a call depends on earlier calls: {when}.",
        f"positions up to {length - 1:,}, before and after a call with positions up to "
        f"{other - 1:,}: the results differ by up to {size:.3g}",
    )


def _length(log: Log, subject: Subject) -> None:
    """Compare the first tokens alone with the same tokens in a longer call."""
    x = subject.random(1, 2, len(_FEW) + 1, seed=3)
    alone = subject.rotate(x[:, :, :-1].clone(), _FEW)
    for length in _lengths(log):
        longer = _rotate_few(log.subject.fresh(), length)
        if longer is None:
            return
        if (size := apart(alone, longer[:, :, :-1])) > _SAME:
            break
    else:
        return
    log.limit = length
    log.facts["depends on length"] = f"yes, first seen in calls of {length:,} positions"
    by_length = log.spec is not None and log.spec.by_length
    log.add(
        "length",
        "note" if by_length else "warning",
        "How a token is rotated depends on the last position of the call, as with dynamic scaling.",
        f"tokens at {', '.join(map(str, _FEW))} alone, and with one at {length - 1:,}: the results differ by "
        f"up to {size:.3g}. Keys cached at one length do not fit queries at another",
    )


def check_ids(log: Log) -> bool:
    """Check that positions are used; return False if not, as angles then cannot be checked."""
    if not log.subject.way.takes_positions:
        return True
    with log.check("positions are used") as fresh:
        x = fresh.random(1, 2, 3, seed=8)
        results = [fresh.rotate(x.clone(), where) for where in ([0, 1, 2], [7, 3, 11], [40, 50, 3])]
        if all(apart(x, each) <= _SAME for each in results):
            add_does_nothing(log)
            return False
        if all(apart(results[0], each) <= _SAME for each in results[1:]):
            log.add(
                "positions-ignored",
                "error",
                "Positions are ignored: tokens are rotated as if at positions 0 to n − 1.",
                "tokens at 0, 1, 2 and at 7, 3, 11 and at 40, 50, 3 come out the same",
            )
            return False
        in_order = fresh.rotate(x.clone(), [3, 7, 11])
        if apart(results[1], in_order) <= _SAME:
            first = x[:, :, :1]
            if apart(fresh.rotate(first.clone(), [7]), in_order[:, :, :1]) <= _SAME:
                return True  # positions 3 and 7 turn alike, as with frequencies of π
            log.add(
                "position-order",
                "error",
                "Tokens get the positions of the call in rising order, not each its own.",
                "tokens at 7, 3, 11 come out as if at 3, 7, 11",
            )
    return True


def check_rows(log: Log) -> None:
    """Check that rows and heads do not influence one another."""
    way = log.subject.way
    if way.row_offsets or (way.takes_ids and way.rows_differ):
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
    near = [3, 1, 4, 8, 6]
    for far in [[9, 2, 11, 13, 10], *([0, 1, 2, 3, length - 1] for length in _lengths(log))]:
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
        as_first = [p + ahead for p in far] if log.subject.way.row_offsets else near
        with_first = subject.fresh().rotate(x[1:].clone(), as_first)
        if apart(both[1:], with_first) <= _SAME and sizes[0] <= _SAME:
            log.add(
                "row-positions",
                "error",
                "All rows of a batch get the positions of row 0.",
                f"row 1 at {far} comes out as if at {near}, off by {sizes[1]:.3g}",
            )
        else:
            log.add(
                "batch",
                "error",
                "The result of a row depends on the positions of the other rows in its batch.",
                f"rows at {near} and {far}, together and alone, differ by up to {max(sizes):.3g}",
            )
        return
    other = subject.random(2, 2, 5, seed=6)
    other[0] = x[0]
    size = apart(subject.rotate(x.clone(), near)[:1], subject.rotate(other, near)[:1])
    if size > _SAME:
        sentence = "The result of a row depends on the values of the other rows in its batch."
        log.add("batch", "error", sentence, f"the results differ by up to {size:.3g}")


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
    sentence = f"Heads are rotated differently: head {differs[0]} differs from head 0."
    evidence = f"of {_HEADS} heads with equal vectors, {len(differs)} differ from head 0 by up to {max(sizes):.3g}"
    if log.along_heads:
        sentence = (
            "It rotates along the heads, not along the tokens: each head has its own position."
        )
        evidence += "; equal vectors of different tokens come out the same"
    log.add("heads", "error", sentence, evidence)


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


def _plain(subject: Subject) -> torch.Tensor:
    return subject.random(1, 2, len(_WHERE), seed=11)


def _transposed(subject: Subject) -> torch.Tensor:
    """Return x with tokens and heads exchanged in memory: bshd for bhsd, or the reverse."""
    x = _plain(subject)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.is_contiguous() else x.contiguous()


def _wide(subject: Subject) -> torch.Tensor:
    """Return x as a slice of wider rows, like q in a fused projection."""
    x = _plain(subject)
    room = subject.laid_out(torch.cat((x, x, x), -1))
    return room[..., subject.head_dim : 2 * subject.head_dim]


def _sparse(subject: Subject) -> torch.Tensor:
    """Return x with a stride of 2 in its channels."""
    x = _plain(subject)
    return torch.stack((x, x), -1)[..., 0]


def _expanded(subject: Subject) -> torch.Tensor:
    """Return x with heads that share memory."""
    x = _plain(subject)
    return x[:, :1].expand(-1, x.shape[1], -1, -1)


_STRIDES: dict[str, Callable[[Subject], torch.Tensor]] = {
    "with tokens and heads exchanged in memory": _transposed,
    "that is a slice of a wider row": _wide,
    "with heads expanded from one": _expanded,
    "with a stride of 2 in its channels": _sparse,
}


def _mutation(log: Log, subject: Subject) -> None:
    meant = getattr(subject.fn, "__name__", "").endswith("_")
    some = {"": _plain} | dict([*_STRIDES.items()][:2])
    for name, make in some.items():
        x, ids = make(subject), subject.ids(_WHERE, 1)
        x_before, ids_before = x.clone(), ids.clone()
        tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            subject.rotate(x, ids, tables)
        except CallFailed:
            continue
        if not torch.equal(x, x_before):
            log.add(
                "mutates",
                "note" if meant else "error",
                f"x is overwritten if it is one {name}." if name else "x is overwritten.",
                f"{int((x != x_before).sum())} of {x.numel()} elements of x change"
                + ("; the function's name ends in _" if meant else ""),
            )
        if not torch.equal(ids, ids_before):
            evidence = f"{ids_before.tolist()} becomes {ids.tolist()}"
            log.add("mutates-positions", "error", "The positions are overwritten.", evidence)
        if not all(torch.equal(table, before) for table, before in tables):
            log.add(
                "mutates-tables",
                "error",
                "The given cosines and sines are overwritten.",
                "tables that all layers share are wrong from the second layer on",
            )


def _strides(log: Log, subject: Subject) -> None:
    for name, make in _STRIDES.items():
        if make is _expanded and log.found("mutates"):
            continue
        x = make(subject)
        # A copy, because an in-place function would overwrite heads that share memory.
        wanted = subject.rotate(subject.laid_out(x.clone()), _WHERE).detach().clone()
        # A stride in the channels is unusual; the other three cases are common.
        severity = "note" if make is _sparse else "warning"
        try:
            size = apart(subject.rotate(x, _WHERE), wanted)
        except CallFailed as error:
            log.add("strides-refused", severity, f"An x {name} is refused.", str(error))
            continue
        if size > _SAME:
            log.add(
                "strides",
                "error",
                f"An x {name} is rotated wrongly.",
                f"the result differs by up to {size:.3g} from that of a contiguous copy",
            )


def _position_types(log: Log, subject: Subject) -> None:
    x, where = _plain(subject), torch.tensor([_WHERE])
    wanted = subject.rotate(x.clone(), where)
    for dtype in (torch.int32, torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        try:
            seen = subject.rotate(x.clone(), where.to(dtype))
        except CallFailed as error:
            if dtype == torch.int32:
                sentence = "Positions in int32 are refused."
                log.add("position-types", "note", sentence, str(error))
            continue
        if (size := apart(seen, wanted)) > 1e-4:
            log.add(
                "position-type",
                "error",
                f"Positions in {name} give a different result than in int64.",
                f"the results differ by up to {size:.3g} for positions below 10",
            )


def _output_types(log: Log) -> None:
    for dtype in (*log.dtypes, torch.float64):
        subject, name = log.subject.fresh(), SHORT[dtype]
        severity = "note" if dtype == torch.float64 else "warning"
        try:
            y = subject.rotate(subject.random(1, 2, len(_WHERE), dtype=dtype), _WHERE)
        except CallFailed as error:
            log.add(f"refuses-{name}", severity, f"An x of {name} is refused.", str(error))
            continue
        if y.dtype != dtype:
            log.add(
                "output-dtype",
                severity,
                f"An x of {name} comes back as {str(y.dtype).removeprefix('torch.')}.",
                "later operations then compute in that dtype, at its speed and memory use",
            )


_SHAPES = (
    ("one token", 2, 3, 1),
    ("one row", 1, 3, 4),
    ("one head", 2, 1, 4),
    ("as many tokens as heads", 2, 4, 4),
    ("as many rows as tokens", 5, 3, 5),
    ("no tokens", 2, 3, 0),
)


def _shapes(log: Log) -> None:
    for name, rows, heads, tokens in _SHAPES:
        subject = log.subject.fresh()
        if not tokens and not subject.way.takes_ids:
            continue
        x = subject.random(subject.most_rows or rows, heads, tokens)
        where = [*range(tokens)]
        try:
            y = subject.rotate(x.clone(), where)
            one_by_one = [
                subject.rotate(x[r : r + 1, h : h + 1].clone(), where)
                for r in range(len(x) if tokens else 0)
                for h in range(x.shape[1])
            ]
        except CallFailed as error:
            severity = "warning" if tokens else "note"
            log.add("shapes", severity, f"An x with {name} is refused.", str(error))
            continue
        if log.found("heads"):
            continue
        if one_by_one and (size := apart(torch.cat(one_by_one).reshape(x.shape), y)) > _SAME:
            log.add(
                "shape-dependent",
                "error",
                f"An x with {name} is rotated differently from its heads and rows one by one.",
                f"the results differ by up to {size:.3g}",
            )


def check_alone(log: Log) -> None:
    """Check that a token alone is rotated like the same token among others; runs if no error was found."""
    name = "a token alone is rotated like the same token among others"
    if log.found() or not (log.subject.way.takes_ids or "offset" in log.subject.way.roles):
        log.skip(name, "it takes no positions" if not log.found() else "there are errors")
        return
    with log.check(name) as subject:
        # In no order, if the function takes the position of each token.
        step = 37 if subject.way.takes_ids else 1
        x, where = subject.random(1, 4, 80, seed=16), [3 + step * i % 80 for i in range(80)]
        y = subject.rotate(x.clone(), where)
        few = (0, 1, 5, 79)
        alone = [subject.rotate(x[:, :, i : i + 1].clone(), where[i : i + 1]) for i in few]
        size = apart(torch.cat(alone, 2), y[:, :, few])
        if size > _SAME:
            log.add(
                "shape-dependent",
                "error",
                "A token alone is rotated differently from the same token among others.",
                f"the results differ by up to {size:.3g}, as when decoding goes on after a prompt",
            )


def _grouped(log: Log, subject: Subject) -> None:
    q, k = subject.random(1, 4, 5, seed=12), subject.random(1, 2, 5, seed=13)
    wide = subject.rotate_qk(q.clone(), subject.laid_out(k.repeat(1, 2, 1, 1)), _WHERE)
    try:
        seen = subject.rotate_qk(q.clone(), k.clone(), _WHERE)
    except CallFailed as error:
        log.add("grouped", "warning", "k with fewer heads than q is refused.", str(error))
        return
    size = max(apart(seen[0], wide[0]), apart(seen[1], wide[1][:, :2]))
    if size > _SAME:
        log.add(
            "grouped",
            "error",
            "The result is different if k has fewer heads than q.",
            f"it differs by up to {size:.3g} from that of a k with repeated heads",
        )


def _linear(log: Log, subject: Subject) -> None:
    x, z = subject.random(1, 2, 5, seed=14), subject.random(1, 2, 5, seed=15)

    def turn(value: torch.Tensor) -> torch.Tensor:
        return subject.rotate(subject.laid_out(value), _WHERE).detach().double()

    size = apart(turn(3 * x - z), 3 * turn(x.clone()) - turn(z.clone()))
    if size > 1e-4:
        constant = apart(turn(0 * x), 0 * x)
        sentence = "The function does more than rotate x: "
        sentence += (
            "it adds a constant."
            if constant > 1e-4
            else "it is not linear, as with a norm or an activation."
        )
        evidence = f"f(3x − z) and 3f(x) − f(z) differ by up to {size:.3g}"
        if constant > 1e-4:
            evidence = f"an x of zeros comes back with values up to {constant:.3g}"
        log.add("not-linear", "error", sentence, evidence)
