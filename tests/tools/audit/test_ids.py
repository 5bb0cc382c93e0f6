"""Functions that give other positions to tokens than their own: one fault has one name, beside others too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import planted_faults as planted
from tests.support.planted_faults import Fn, named, ordinal
from tightrope import RopeSpec
from tightrope_tools.audit import audit

QUICK: dict[str, Any] = {"dtypes": [torch.float32], "longest": 2**14}
Where = Callable[[torch.Tensor], torch.Tensor]

# The code of a fault, and what the function makes of ids.
MAPS: dict[str, tuple[str, Where]] = {
    "first id": ("first-id", lambda p: p[:, :1] + ordinal(p)),
    "largest id": ("last-id", lambda p: p.amax(-1, keepdim=True) - ordinal(p).flip(-1)),
    "restarts": ("restarts", lambda p: p.cummax(-1).values),
    "sorted": ("position-order", lambda p: p.sort(-1).values),
    "from 0": ("offset-ignored", lambda p: p - p[:, :1]),
    "from the last restart": ("offset-ignored", lambda p: p - p.cummin(-1).values),
    "ignored": ("positions-ignored", ordinal),
}
OTHERS: dict[str, dict[str, Any]] = {
    "sign": {"sign": -1.0},
    "base": {"base": 500_000.0},
    "pairing": {"interleaved": True},
    "angle-dtype": {"types": {"a_type": torch.bfloat16}},
    "mutates": {"in_place": True},
    "gradient-wrong": {"detach": "sin"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", MAPS)
def test_two_faults_have_two_names(name: str, other: str) -> None:
    code, where = MAPS[name]
    report = audit(planted.rope(where=where, **OTHERS[other]), spec=RopeSpec(64), **QUICK)
    assert code in report.codes, str(report)
    # A function that writes to x is called with a copy if its tokens must be put in order first.
    assert {*report.codes} - {code} <= {other, "strides"}, str(report)
    assert other == "mutates" or other in report.codes, str(report)


@pytest.mark.parametrize("name", MAPS)
def test_the_positions_that_tokens_got_are_the_evidence(name: str) -> None:
    code, where = MAPS[name]
    evidence = named(audit(planted.rope(where=where), **QUICK), code).findings[0].evidence
    words = evidence.removeprefix("tokens at ").split(" come out as if at ")
    given, got = (torch.tensor([[*map(int, each.split(", "))]]) for each in words)
    assert torch.equal(where(given), got)


def test_a_table_that_ends_is_found_beside_the_first_id() -> None:
    def where(p: torch.Tensor) -> torch.Tensor:
        return (p[:, :1] + ordinal(p)).clamp(max=4999)

    named(audit(planted.rope(where=where), **QUICK), "first-id", "table-clamp")


def test_row_0_is_named_beside_the_first_id() -> None:
    where: Where = lambda p: p[:1, :1] + ordinal(p)  # noqa: E731
    named(audit(planted.rope(where=where), **QUICK), "first-id", "row-positions")


def test_offsets_of_rows_that_are_ignored() -> None:
    def fn(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return planted.PLAIN(x, ordinal(offsets[:, None].expand(-1, x.shape[2])))  # type: ignore[no-any-return]

    named(audit(fn, **QUICK), "offset-ignored")


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_ids_whose_lowest_are_padding(by: int) -> None:
    report = named(audit(planted.jumping(1, by), **QUICK), "padding-id")
    wanted = f"Ids count from {abs(by)}, as where lower ones are padding: "
    assert (
        report.findings[0].sentence
        == f"{wanted}position 0 stays, later positions are off by {by:+d}."
    )


# --- packed rows ------------------------------------------------------------------------------------

PACKED = planted.packed()


def of_both(q: Any, k: Any, cu_seqlens: Any) -> Any:
    return PACKED(q, cu_seqlens), PACKED(k, cu_seqlens)


def of_one_row(x: Any, cu_seqlens: Any) -> Any:
    return PACKED(x[0], cu_seqlens)[None]


def with_the_longest(x: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
    assert max_seqlen >= int(cu_seqlens.diff().max())
    return PACKED(x, cu_seqlens)


def with_default(x: Any, cu_seqlens: Any = None) -> Any:
    return PACKED(x, cu_seqlens)


def by_tables(x: Any, cos: Any, sin: Any, cu_seqlens: Any) -> Any:
    rows = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    half = x.shape[-1] // 2
    return planted.turn(x, *(t[rows, None, :half] for t in (cos, sin)))


def by_angles(t: Any, cu_seqlens: Any, freqs: Any) -> Any:
    """Take angles (positions, 1, 1, channels), as Megatron does."""
    angle = torch.cat([freqs[:n, 0] for n in cu_seqlens.diff().tolist()])
    u, v = t.chunk(2, -1)
    return t * angle.cos().to(t) + torch.cat((-v, u), -1) * angle.sin().to(t)


CALLS: dict[str, tuple[Fn, str, str]] = {
    "x": (PACKED, "x, cu_seqlens", "thd"),
    "q and k": (of_both, "q, k, cu_seqlens", "thd"),
    "one row": (of_one_row, "x, cu_seqlens", "bshd"),
    "the longest": (with_the_longest, "x, cu_seqlens, max_seqlen", "thd"),
    "a default": (with_default, "x, cu_seqlens", "thd"),
    "tables": (by_tables, "x, cos, sin, cu_seqlens", "thd"),
    "angles": (by_angles, "x, cu_seqlens, angles", "thd"),
}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_packed_rows_are_called(name: str, declared: bool) -> None:
    fn, form, layout = CALLS[name]
    report = named(audit(fn, spec=RopeSpec(64) if declared else None, **QUICK))
    assert (report.facts["called as"], report.facts["layout"]) == (f"fn({form})", layout)
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["each packed row begins at position 0"] == "passed"


def test_packed_rows_that_are_numbered_through_with_tables() -> None:
    def fn(x: Any, cos: Any, sin: Any, cu_seqlens: Any) -> Any:
        return by_tables(x, cos, sin, torch.tensor([0, len(x)]))

    named(audit(fn, **QUICK), "numbered-through")


def test_packed_rows_after_the_second_are_checked() -> None:
    def number(cu: torch.Tensor) -> torch.Tensor:
        p = torch.arange(int(cu[-1]))
        return torch.where(p >= cu[1], p - cu[1], p)

    report = named(audit(planted.packed(number), **QUICK), "batch")
    assert report.findings[0].sentence.startswith("The result of a row depends on the lengths of")


def test_packed_rows_of_different_lengths_that_are_refused() -> None:
    def fn(x: Any, cu_seqlens: Any) -> Any:
        rows = torch.arange(int(cu_seqlens[1])).repeat(len(cu_seqlens) - 1)
        return planted.packed(lambda _: rows)(x, cu_seqlens)

    report = named(audit(fn, **QUICK), "shapes")
    assert report.findings[0].sentence == "An x with packed rows of different lengths is refused."


@pytest.mark.parametrize("by", [1, -1])
def test_a_sign_and_an_offset_of_packed_rows(by: int) -> None:
    def number(cu: torch.Tensor) -> torch.Tensor:
        return by * (torch.cat([torch.arange(n) for n in cu.diff().tolist()]) + (by > 0))

    named(audit(planted.packed(number), **QUICK), "position-offset" if by > 0 else "sign")
