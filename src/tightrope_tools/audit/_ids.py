"""Find out which positions a function gives to tokens: their own, or others.

One vector at positions 0, 1, 2, … of one call shows what the function makes of it at each of them. In a call with other
positions, its results then show which position each token got.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from ._call import CallFailed, Subject
from ._log import Log
from ._profile import apart
from ._rotation import add_does_nothing

_NEAR = 16
_SAME = 1e-5
_ANY = (5, 1, 11, 3, 2, 2, 0, 9)
_LATER = (5, 6, 7, 8, 9, 10, 11, 12)
_RESTART = (0, 1, 2, 3, 0, 1, 2, 3)
# Rows of 3, 2 and 5 tokens.
_PACKED = (0, 1, 2, 0, 1, 0, 1, 2, 3, 4)


class _Map(NamedTuple):
    """A map of positions ``(tokens,)`` that functions make.

    Attributes:
        kind: the kind of the finding.
        counts: the calls in which each token gets its own position, as in :class:`._call.Way`.
        made: the positions that the tokens get.
        how: words of the sentence.
    """

    kind: str
    counts: str
    made: Callable[[torch.Tensor], torch.Tensor]
    how: str = ""


def _through(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(ids))


_FROM_FIRST = "from the first"
_OFFSET = (
    _Map("offset-ignored", "from 0", lambda ids: ids - ids.min()),
    _Map("offset-ignored", "from 0", lambda ids: ids - ids[0]),
    _Map("offset-ignored", "from 0", lambda ids: ids - ids.cummin(0).values),
)
#: The first one that explains all results is named.
_MAPS = (
    *_OFFSET,
    _Map("positions-ignored", "from 0", _through),
    _Map("first-id", _FROM_FIRST, lambda ids: ids[0] + _through(ids), "first"),
    _Map("first-id", _FROM_FIRST, lambda ids: ids.min() + _through(ids), "smallest"),
    _Map("last-id", _FROM_FIRST, lambda ids: ids[-1] - _through(ids).flip(0), "last"),
    _Map("last-id", _FROM_FIRST, lambda ids: ids.max() - _through(ids).flip(0), "largest"),
    _Map("restarts", "rising", lambda ids: ids.cummax(0).values),
    _Map("position-order", "rising", lambda ids: ids.sort().values),
)


def check_ids(log: Log) -> bool:
    """Check that each token gets its own position; return False if no position is used, so that angles mean nothing.

    If it does not, later checks pass positions with which it does, so that one fault has one name.
    """
    way = log.subject.way
    if way.packed:
        with log.check("each packed row begins at position 0") as fresh:
            _packed(log, fresh)
        return True
    if not (way.takes_positions or way.takes_offset):
        return True
    with log.check("positions are used") as fresh:
        if way.takes_positions and not _used(log, fresh):
            return False
        calls, maps = (
            ((_ANY, _LATER, _RESTART), _MAPS) if way.takes_positions else ((_LATER,), _OFFSET)
        )
        found = _explain(log, calls, maps)
        if found is not None:
            given, each = found
            got = each.made(torch.tensor(given)).tolist()
            evidence = f"tokens at {_listed(given)} come out as if at {_listed(got)}"
            log.add(each.kind, evidence, which=each.how)
            by_row = each.counts == _FROM_FIRST and way.rows_differ
            way = replace(way, counts=each.counts, row_offsets=way.row_offsets or by_row)
            log.subject = replace(log.subject, way=way)
    return True


def _used(log: Log, subject: Subject) -> bool:
    """Report a function that uses no position at all."""
    x = subject.random(1, 2, 3, seed=8)
    results = [subject.rotate(x.clone(), where) for where in ([0, 1, 2], [7, 3, 11], [40, 50, 3])]
    if all(apart(x, each) <= _SAME for each in results):
        add_does_nothing(log)
        return False
    one = subject.laid_out(x[:, :, :1].expand_as(x))
    same = subject.rotate(one, [0, 1, 2])
    if (
        all(apart(results[0], each) <= _SAME for each in results[1:])
        and apart(same, same[:, :, :1].expand_as(same)) <= _SAME
    ):
        evidence = "tokens at 0, 1, 2 and at 7, 3, 11 and at 40, 50, 3 come out the same"
        log.add("positions-ignored", evidence)
        return False
    return True


def _explain(
    log: Log, calls: tuple[tuple[int, ...], ...], maps: tuple[_Map, ...]
) -> tuple[tuple[int, ...], _Map] | None:
    """Return the first call whose tokens do not get their positions, and the map that explains all calls, if any."""
    seen = {}
    for given in calls:
        with suppress(CallFailed):
            seen[given] = _matches(log.subject, given)

    def fits(made: Callable[[torch.Tensor], torch.Tensor], given: tuple[int, ...]) -> bool:
        at = made(torch.tensor(given)).tolist()
        inside = [t for t, position in enumerate(at) if 0 <= position < _NEAR]
        return all(bool(seen[given][t, at[t]]) for t in inside)

    wrong = [given for given in seen if not fits(lambda ids: ids, given)]
    for each in maps if wrong else ():
        if all(fits(each.made, given) for given in seen):
            # Of these calls, best one in which all positions are among those that were measured.
            return max(wrong, key=lambda given: int(each.made(torch.tensor(given)).min())), each
    return None


def _matches(subject: Subject, given: tuple[int, ...]) -> torch.Tensor:
    """True where a token of a call comes out like the same vector at a position, ``[tokens, positions]``."""
    one = subject.random(1, 2, 1, seed=9)
    reference = subject.fresh().rotate(
        subject.laid_out(one.expand(-1, -1, _NEAR, -1)), [*range(_NEAR)]
    )
    result = subject.fresh().rotate(subject.laid_out(one.expand(-1, -1, len(given), -1)), given)
    gap = (result[0, :, :, None].double() - reference[0, :, None].double()).abs().amax((0, 3))
    return (gap <= _SAME).detach().cpu()


def _packed(log: Log, subject: Subject) -> None:
    with log.refusal("shapes", what="packed rows of different lengths"):
        _compare_packed(log, _matches(subject, _PACKED))


def _compare_packed(log: Log, matches: torch.Tensor) -> None:
    tokens = range(len(_PACKED))
    if all(bool(matches[t, p]) for t, p in zip(tokens, _PACKED)):
        return
    got = [next(iter(row.nonzero().flatten().tolist()), "none of these") for row in matches]
    evidence = f"in rows of 3, 2 and 5 tokens, those at {_listed(_PACKED)} come out as if at {_listed(got)}"
    if all(bool(matches[t, t]) for t in tokens):
        log.add("numbered-through", evidence)
    else:
        log.add("batch", evidence, what="lengths")
    # The other checks give it one row at a time, so that this fault shows in none of them.
    log.subject = replace(log.subject, one_row=True)


def _listed(values: object) -> str:
    return ", ".join(map(str, values))  # type: ignore[call-overload]
