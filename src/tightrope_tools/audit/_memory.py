"""Check that results do not depend on earlier calls, other rows, later tokens or chance."""

from __future__ import annotations

from dataclasses import replace

import torch

from ._guard import CallFailed
from ._log import Log
from ._subject import Subject

# Positions whose results are compared; one more token sets the length of a call.
_FEW = (0, 1, 5, 7)
_LENGTHS = (16, 100, 600, 2500, 5000, 12_000, 40_000)
_SAME = 1e-5


def lengths(log: Log) -> list[int]:
    """Return rising lengths of calls, some around the original length of the declared spec, if it has one."""
    wanted = set(_LENGTHS)
    scaling = None if log.spec is None else log.spec.scaling
    original = getattr(scaling, "original_max_position", None)
    if isinstance(original, int):
        wanted |= {original // 2, original + 2, original * 3 // 2, original * 3}
    most = log.longest if log.subject.call.takes_ids else min(log.longest, 12_000)
    return sorted(length for length in wanted if len(_FEW) * 2 < length <= most)


def check_memory(log: Log) -> None:
    """Check determinism and history; runs first, before other calls have left state."""
    with log.check("two equal calls give equal results") as fresh:
        _deterministic(log, fresh)
    if log.found("nondeterminism", "not-finite"):
        return
    if log.subject.call.form.takes_tables:
        log.skip("results do not depend on earlier calls", "the caller provides the angles")
        return
    with log.check("results do not depend on earlier calls") as fresh:
        _history(log, fresh)
    if log.found("history") and log.subject.can_be_fresh:
        log.subject = replace(log.subject, renew=True, space={})
    with log.check("results do not depend on later tokens") as fresh:
        _length(log, fresh)


def _positions(length: int) -> list[int]:
    return [*_FEW, length - 1]


def _rotate_few(subject: Subject, length: int) -> torch.Tensor | None:
    """Rotate a few tokens, the last at position length − 1; return None if the call is refused."""
    x = subject.random(1, 2, len(_FEW) + 1, seed=3)
    try:
        return subject.rotate(x, _positions(length)).detach().cpu().double()
    except CallFailed:
        return None


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference; infinite if one value is NaN and the other is not."""
    difference = (a - b).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(difference.masked_fill(same, 0.0).nan_to_num(float("inf")).max())


def _deterministic(log: Log, subject: Subject) -> None:
    x = subject.random(1, 2, 4)
    # Only the second to fourth call are compared: the first may have filled a cache.
    results = [subject.rotate(x.clone(), [1, 2, 3, 4]).detach() for _ in range(4)]
    if not bool(results[0].isfinite().all()):
        add_not_finite(log)
        return
    size = max(apart(results[2].double(), each.double()) for each in results[1:])
    if size > 0:
        log.add(
            "nondeterminism",
            "error",
            "Equal calls give different results.",
            f"the results of equal calls differ by up to {size:.3g}",
            f"x = torch.randn(1, {subject.heads(2)}, 4, {subject.head_dim})\n"
            "where = torch.tensor([[1, 2, 3, 4]])\n"
            "results = [rotate(x.clone(), where) for _ in range(8)]\n"
            "assert all(torch.equal(results[1], each) for each in results[1:])",
        )


def _history(log: Log, subject: Subject) -> None:
    """Compare calls of rising lengths, of falling lengths, and of each length as a first call."""
    every = lengths(log)
    rising = {length: _rotate_few(subject, length) for length in every}
    falling = {length: _rotate_few(subject, length) for length in reversed(every)}
    for length in every:
        up, down = rising[length], falling[length]
        alone = _rotate_few(log.subject.fresh(), length)
        for before, after in ((up, down), (alone, up)):
            if before is None or after is None:
                continue
            size = apart(before, after)
            if size > _SAME:
                _add_history(log, length, every[-1], size)
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
    """Report that history matters, with the shortest earlier call that shows it on fresh copies."""
    few = ", ".join(map(str, _FEW))
    heads, dim = log.subject.heads(2), log.subject.head_dim
    start = (
        f"x = torch.randn(1, {heads}, {len(_FEW) + 1}, {dim})\n"
        f"here = torch.tensor([[{few}, {length - 1}]])\n"
        "there = torch.tensor([[{there}]])\n"
    )
    end = "assert torch.allclose(before, after, atol=1e-5), float((before - after).abs().max())"
    again = "before = rotate(x.clone(), here)\nrotate(x.clone(), there)\nafter = rotate(x.clone(), here)\n"
    copied = (
        "untouched = copy.deepcopy(fn)\nrotate(x.clone(), there)\nafter = rotate(x.clone(), here)\n"
        "fn = untouched\nbefore = rotate(x.clone(), here)\n"
    )
    body, when = again, "after other calls it differs"
    for candidate in lengths(log):
        if candidate == length:
            continue
        trial, untouched = log.subject.fresh(), log.subject.fresh()
        first = _rotate_few(untouched, length)
        once = _rotate_few(trial, length)
        _rotate_few(trial, candidate)
        twice = _rotate_few(trial, length)
        late = log.subject.fresh()
        _rotate_few(late, candidate)
        after = _rotate_few(late, length)
        longer = "a longer one" if candidate > length else "a shorter one"
        if once is not None and twice is not None and apart(once, twice) > _SAME:
            other, size, when = candidate, apart(once, twice), f"after {longer} it differs"
            break
        if first is not None and after is not None and apart(first, after) > _SAME:
            other, size, when = candidate, apart(first, after), f"after {longer} it differs"
            body = copied
            break
    there = f"{few}, {other - 1}"
    log.add(
        "history",
        "error",
        f"The result of a call depends on earlier calls: {when}.",
        f"positions up to {length - 1:,}, before and after a call with positions up to "
        f"{other - 1:,}: the results differ by up to {size:.3g}",
        start.format(there=there) + body + end,
    )


def _length(log: Log, subject: Subject) -> None:
    """Compare the first tokens alone with the same tokens in a longer call."""
    x = subject.random(1, 2, len(_FEW) + 1, seed=3)
    alone = subject.rotate(x[:, :, :-1].clone(), list(_FEW)).detach().cpu().double()
    for length in lengths(log):
        other = log.subject.fresh()
        longer = _rotate_few(other, length)
        if longer is None:
            return
        size = apart(alone, longer[:, :, :-1])
        if size > _SAME:
            break
    else:
        return
    few = ", ".join(map(str, _FEW))
    by_length = log.spec is not None and log.spec.by_length
    log.facts["depends on length"] = f"yes, first seen in calls of {length:,} positions"
    log.add(
        "length",
        "note" if by_length else "warning",
        "How a token is rotated depends on the last position of the call, as with dynamic scaling.",
        f"tokens at {few} alone, and with one at {length - 1:,}: the results differ by up to {size:.3g}. "
        "Keys cached at one length do not fit queries at another",
        f"x = torch.randn(1, {subject.heads(2)}, {len(_FEW) + 1}, {subject.head_dim})\n"
        f"where = torch.tensor([[{few}, {length - 1}]])\n"
        "alone = rotate(x[:, :, :-1].clone(), where[:, :-1])\n"
        "together = rotate(x.clone(), where)[:, :, :-1]\n"
        "assert torch.allclose(alone, together, atol=1e-5), float((alone - together).abs().max())",
    )


def check_rows(log: Log) -> None:
    """Check that rows and heads do not influence one another."""
    if not log.subject.call.rows_differ:
        log.skip("rows do not depend on one another", "all rows have the same positions")
    else:
        with log.check("rows do not depend on one another") as fresh:
            _rows(log, fresh)
    if log.subject.most_heads == 1:
        log.skip("all heads are rotated alike", "x has no dimension for heads")
        return
    with log.check("all heads are rotated alike") as fresh:
        _heads(log, fresh)


def _rows(log: Log, subject: Subject) -> None:
    x = subject.random(2, 2, 5, seed=5)
    near = [3, 1, 4, 8, 6]
    for far in [[9, 2, 11, 13, 10], *([0, 1, 2, 3, length - 1] for length in lengths(log))]:
        here = log.subject.fresh()
        try:
            alone = [
                log.subject.fresh().rotate(row.clone(), where).detach().cpu().double()
                for row, where in zip(x.split(1), (near, far))
            ]
            both = here.rotate(x.clone(), torch.tensor([near, far])).detach().cpu().double()
        except CallFailed:
            if far[-1] < 20:
                raise
            break
        sizes = [apart(both[i : i + 1], alone[i]) for i in (0, 1)]
        if max(sizes) <= _SAME:
            continue
        body = (
            f"x = torch.randn(2, {subject.heads(2)}, 5, {subject.head_dim})\n"
            f"where = torch.tensor([{near}, {far}])\n"
            "both = rotate(x.clone(), where)\n"
            "for row in (0, 1):\n"
            "    alone = rotate(x[row : row + 1].clone(), where[row : row + 1])\n"
            "    assert torch.allclose(both[row : row + 1], alone, atol=1e-5), row"
        )
        with_first = subject.fresh().rotate(x[1:].clone(), near).detach().cpu().double()
        if apart(both[1:], with_first) <= _SAME and apart(both[:1], alone[0]) <= _SAME:
            log.add(
                "row-positions",
                "error",
                "All rows of a batch get the positions of row 0.",
                f"row 1 at {far} comes out as if at {near}, off by {sizes[1]:.3g}",
                body,
            )
        else:
            log.add(
                "batch",
                "error",
                "The result of a row depends on the positions of the other rows in its batch.",
                f"rows at {near} and {far}, together and alone, differ by up to {max(sizes):.3g}",
                body,
            )
        return
    other = subject.random(2, 2, 5, seed=6)
    other[0] = x[0]
    where = torch.tensor([near, near])
    size = apart(
        subject.rotate(x.clone(), where)[:1].double(), subject.rotate(other, where)[:1].double()
    )
    if size > _SAME:
        log.add(
            "batch",
            "error",
            "The result of a row depends on the values of the other rows in its batch.",
            f"the results differ by up to {size:.3g}",
            f"x = torch.randn(2, {subject.heads(2)}, 5, {subject.head_dim})\n"
            f"where = torch.tensor([{near}, {near}])\n"
            "other = torch.cat((x[:1], torch.randn_like(x[1:])))\n"
            "first, second = rotate(x.clone(), where)[0], rotate(other, where)[0]\n"
            "assert torch.allclose(first, second, atol=1e-5)",
        )


def _heads(log: Log, subject: Subject) -> None:
    one = subject.random(1, 1, 5, seed=7)
    x = subject.laid_out(one.expand(-1, 4, -1, -1))
    y = subject.rotate(x, [1, 3, 5, 9, 2]).detach().cpu().double()
    differs = [h for h in range(4) if apart(y[:, h], y[:, 0]) > _SAME]
    if differs:
        size = max(apart(y[:, h], y[:, 0]) for h in differs)
        log.add(
            "heads",
            "error",
            f"Heads are rotated differently: head {differs[0]} differs from head 0.",
            f"of 4 heads with equal vectors, {len(differs)} differ from head 0 by up to {size:.3g}",
            f"x = torch.randn(1, 1, 5, {subject.head_dim}).repeat(1, 4, 1, 1)\n"
            "y = rotate(x, torch.tensor([[1, 3, 5, 9, 2]]))\n"
            "assert torch.allclose(y, y[:, :1].expand_as(y), atol=1e-5)",
        )


def add_not_finite(log: Log) -> None:
    """Add the finding of NaN or infinite results."""
    heads, dim = log.subject.heads(2), log.subject.head_dim
    log.add(
        "not-finite",
        "error",
        "The function returns NaN or infinite values for finite x and positions.",
        "tokens at positions 1 to 4",
        f"x = torch.randn(1, {heads}, 4, {dim})\n"
        "assert rotate(x, torch.tensor([[1, 2, 3, 4]])).isfinite().all()",
    )


def add_does_nothing(log: Log) -> None:
    """Add the finding that x comes back unchanged."""
    heads, dim = log.subject.heads(2), log.subject.head_dim
    log.add(
        "does-nothing",
        "error",
        "The function returns x unchanged at every position.",
        "tokens at positions up to 50 come back unchanged",
        f"x = torch.randn(1, {heads}, 4, {dim})\n"
        "y = rotate(x, torch.tensor([[1, 2, 3, 4]]))\nassert not torch.equal(x, y)",
    )


def check_ids(log: Log) -> bool:
    """Check that positions are used; return False if not, as angles then cannot be checked."""
    if not log.subject.call.takes_positions:
        return True
    with log.check("positions are used") as fresh:
        x = fresh.random(1, 2, 3, seed=8)
        results = [
            fresh.rotate(x.clone(), where).detach().cpu().double()
            for where in ([0, 1, 2], [7, 3, 11], [40, 50, 3])
        ]
        if all(apart(x.cpu().double(), each) <= _SAME for each in results):
            add_does_nothing(log)
            return False
        if all(apart(results[0], each) <= _SAME for each in results[1:]):
            log.add(
                "positions-ignored",
                "error",
                "Positions are ignored: tokens are rotated as if at positions 0 to n − 1.",
                "tokens at 0, 1, 2 and at 7, 3, 11 and at 40, 50, 3 come out the same",
                f"x = torch.randn(1, {fresh.heads(2)}, 3, {fresh.head_dim})\n"
                "first = rotate(x.clone(), torch.tensor([[0, 1, 2]]))\n"
                "second = rotate(x.clone(), torch.tensor([[7, 3, 11]]))\n"
                "assert not torch.allclose(first, second)",
            )
            return False
    return True
