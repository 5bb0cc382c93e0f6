"""`positions.check` names what is wrong with ids, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.refused_calls import NAMES
from tests.support.written_calls import rows_of
from tightrope import positions
from tightrope.positions import check

LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
TWO = torch.tensor([0, 3, 5])
MROPE = positions.mrope([2, (1, 2, 2), 1]).ids
TYPES = torch.tensor([0, 0, 1, 1, 1, 1, 0])


def tensor(*values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


#: Ids and what else is known, as expressions; and the code and the place of what is wrong with them.
ROWS = rows_of(Path(__file__).with_name("checked_ids.jsonl"))
WRONG, RIGHT = ([row for row in ROWS if ("code" in row) == wrong] for wrong in (True, False))


def checked(row: dict[str, Any]) -> Any:
    """Return the report on the ids of a row."""
    names = {**NAMES, **globals()}
    known = {name: eval(value, names) for name, value in row.get("known", {}).items()}
    return check(eval(row["ids"], names), **known)


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row["ids"])
def test_one_fault_has_one_name(row: dict[str, Any]) -> None:
    report, code, place = checked(row), row["code"], tuple(row["place"])
    assert [finding.code for finding in report.findings][:1] == [code], report
    assert not report.ok
    assert report.findings[0].places[0] == place
    others = {finding.code for finding in report.findings} - {code}
    assert others <= (
        {"position-order", "position-offset"} if code == "position-dtype" else set()
    ), report
    assert f"{code}, row {place[0]}, token {place[1]}" in str(report)


@pytest.mark.parametrize("row", RIGHT, ids=lambda row: row["ids"])
def test_right_ids_have_no_findings(row: dict[str, Any]) -> None:
    report = checked(row)
    assert report.ok, report
    assert str(report).startswith("Nothing looks wrong.")


def test_what_is_not_known_is_said() -> None:
    assert len(check(torch.arange(3)).unknown) == 2
    assert len(check(MROPE).unknown) == 3
    mask = torch.ones(1, 7, dtype=torch.bool)
    everything = check(MROPE, attention_mask=mask, token_types=TYPES, length=9)
    assert everything.unknown == ()


def test_every_place_is_counted() -> None:
    report = check(tensor([0, 1, 5, 3], [0, 4, 2, 3]))
    assert report.findings[0].places == ((0, 3), (1, 2))
    assert str(report.findings[0]).startswith("position-order, row 0, token 3 and 1 more: ")


def test_a_place_that_several_axes_share_is_counted_once() -> None:
    report = check(torch.arange(5).expand(4, 1, 5), cu_seqlens=TWO)
    assert report.findings[0].places == ((0, 3),)


def test_one_axis_for_images_may_be_right() -> None:
    assert any(
        "axes of their own" in each for each in check(TYPES * 0 + 1, token_types=TYPES).unknown
    )


def test_another_default_device_changes_nothing() -> None:
    mask, ends = torch.ones(1, 7, dtype=torch.int64), torch.tensor([0, 7])
    for known in ({}, {"attention_mask": mask}, {"cu_seqlens": ends}):
        with torch.device("meta"):
            made = positions.mrope_batch(TYPES, model="qwen2_vl", images=[(1, 4, 4)], **known)
            assert check(made.positions, token_types=TYPES, **known).ok
        assert made.next.tolist() == [5]
        assert torch.equal(made.positions.ids, MROPE)
