"""Find out which positions a function gives to tokens: their own, or others.

The near matrices tell at which positions the tokens of a call were rotated. What functions make of positions, in place
of each token's own, is a table of maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ._call import CallFailed
from ._calls import add_batch
from ._log import Log
from ._profile import NEAR, apart

Ids = torch.Tensor
_ANY = ((5, 1, 11, 3, 2, 2, 0, 9),)
_LATER = ((5, 6, 7, 8, 9, 10, 11, 12),)
_RESTART = ((0, 1, 2, 3, 0, 1, 2, 3),)
_ROWS = ((3, 1, 0, 2), (2, 5, 1, 4))
# Rows of 3, 2 and 5 tokens.
_PACKED = ((0, 1, 2, 0, 1, 0, 1, 2, 3, 4),)


class Map(NamedTuple):
    """What functions make of positions ``[rows, tokens]``.

    Attributes:
        kind: the kind of the finding.
        counts: how a subject is called from then on, so that each token gets its own position; "" if by the row.
        made: the positions that the tokens get.
        which: of the ids is used, for the sentence.
    """

    kind: str
    counts: str
    made: Callable[[Ids], Ids]
    which: str = ""


def _up(start: Ids, ids: Ids) -> Ids:
    """Number the tokens of each row from a first position on."""
    return start + torch.arange(ids.shape[-1])


def _down(end: Ids, ids: Ids) -> Ids:
    """Number the tokens of each row up to a last position."""
    return end - torch.arange(ids.shape[-1]).flip(0)


_OFFSETS = (
    Map("offset-ignored", "from 0", lambda ids: ids - ids.amin(-1, keepdim=True)),
    Map("offset-ignored", "from 0", lambda ids: ids - ids[:, :1]),
    Map("offset-ignored", "from 0", lambda ids: ids - ids.cummin(-1).values),
)
#: The first map that explains all calls of a function that takes positions is named.
_MAPS = (
    *_OFFSETS,
    Map("positions-ignored", "from 0", lambda ids: _up(0 * ids, ids)),
    Map("first-id", "from the first", lambda ids: _up(ids[:, :1], ids), "first"),
    Map("first-id", "from the first", lambda ids: _up(ids.amin(-1, True), ids), "smallest"),
    Map("last-id", "from the first", lambda ids: _down(ids[:, -1:], ids), "last"),
    Map("last-id", "from the first", lambda ids: _down(ids.amax(-1, True), ids), "largest"),
    Map("restarts", "rising", lambda ids: ids.cummax(-1).values),
    Map("position-order", "rising", lambda ids: ids.sort(-1).values),
)
_PACKED_MAPS = (Map("numbered-through", "", lambda ids: torch.arange(ids.numel()).view_as(ids)),)
#: Of the rows of a call: numbered one after the other; as row 0; from the first position of row 0 on.
_ROW_MAPS = (
    Map(
        "numbered-through", "", lambda ids: ids + (ids.max() + 1) * torch.arange(len(ids))[:, None]
    ),
    Map("row-positions", "", lambda ids: ids[:1].expand_as(ids)),
    Map("row-positions", "", lambda ids: ids - ids.amin(-1, True) + ids[0].min()),
)


def check_ids(log: Log) -> None:
    """Check that each token gets its own position.

    If it does not, later checks pass positions with which it does, so that one fault has one name.
    """
    way = log.subject.way
    if way.packed:
        with log.check("each packed row begins at position 0"):
            with log.refusal("shapes", what="packed rows of different lengths"):
                if evidence := _unexplained(log, (_PACKED,), _PACKED_MAPS):
                    add_batch(log, f"in rows of 3, 2 and 5 tokens, {evidence}")
    elif way.takes_positions or way.takes_offset:
        with log.check("positions are used"):
            calls = (_ANY, _LATER, _RESTART) if way.takes_positions else (_LATER,)
            evidence = _unexplained(log, calls, _MAPS if way.takes_positions else _OFFSETS)
            # Frequencies that depend on the length of a call differ between these calls too.
            if evidence and way.takes_positions and not (log.spec and log.spec.by_length):
                log.add("other-positions", evidence)
                log.subject = replace(log.subject, way=replace(way, counts="rising"))


def check_rows(log: Log) -> None:
    """Check that rows do not influence one another, and that each gets its own positions."""
    name = "rows do not depend on one another"
    if not log.subject.way.rows_differ:
        log.skip(name, "all rows have the same positions")
        return
    with log.check(name) as subject:
        if _unexplained(log, (_ROWS,), _ROW_MAPS):
            x, ids = subject.random(2, 3, 4, seed=9), torch.tensor(_ROWS)
            alone = [subject.rotate(x[i : i + 1].clone(), ids[i : i + 1]) for i in (0, 1)]
            size = apart(subject.rotate(x.clone(), ids), torch.cat(alone))
            if size > log.near.tolerance:
                rows = f"rows at {_listed(_ROWS)}, together and alone"
                add_batch(log, f"{rows}, differ by up to {size:.3g}")


def _unexplained(log: Log, calls: Sequence[Sequence[Sequence[int]]], maps: tuple[Map, ...]) -> str:
    """Report the map that explains in which positions tokens of calls do not get their own.

    Return a call in which some do not, if no map explains it; else "".
    """
    seen: dict[Any, torch.Tensor] = {}
    for given in calls:
        with suppress(CallFailed) if len(calls) > 1 else nullcontext():
            seen[given] = _matches(log, given)

    def fits(made: Callable[[Ids], Ids], given: Any) -> bool:
        at = made(torch.tensor(given))
        inside = (at >= 0) & (at < NEAR)
        got = seen[given].gather(-1, at.clamp(0, NEAR - 1)[..., None])[..., 0]
        return bool((got | ~inside).all())

    wrong = [given for given in seen if not fits(lambda ids: ids, given)]
    if not wrong:
        return ""
    found = next((each for each in maps if all(fits(each.made, given) for given in seen)), None)
    if found is None:
        given = wrong[0]
        got = [next(iter(row.nonzero().flatten().tolist()), "none") for row in seen[given][-1]]
        return f"tokens at {_listed(given[-1])} come out as if at {_listed(got)}"
    # Of these calls, best one in which all positions are among those that were measured.
    given = max(wrong, key=lambda given: int(found.made(torch.tensor(given)).min()))
    got, which = found.made(torch.tensor(given))[-1].tolist(), "tokens at"
    if len(given) > 1:
        which = f"the tokens of row {len(given) - 1} at"
    evidence = f"{which} {_listed(given[-1])} come out as if at {_listed(got)}"
    log.add(found.kind, evidence, which=found.which)
    way = log.subject.way
    if found.counts:
        by_row = found.counts == "from the first" and way.rows_differ
        way = replace(way, counts=found.counts, row_offsets=way.row_offsets or by_row)
    alone = log.subject.one_row or found.kind == "numbered-through"
    log.subject = replace(log.subject, way=way, one_row=alone)
    return ""


def _matches(log: Log, given: Sequence[Sequence[int]]) -> torch.Tensor:
    """True where a token of a call comes out as if at a position from 0 to 15, ``[rows, tokens, positions]``."""
    subject, ids = log.subject.fresh(), torch.tensor(given)
    x = subject.random(len(ids), 3, ids.shape[1], seed=9)
    return log.near.matches(subject.rotate(x.clone(), subject.ids(ids, len(ids))), x)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))
