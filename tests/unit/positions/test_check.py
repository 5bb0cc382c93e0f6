"""`positions.check` names what is wrong with ids, and nothing else."""

from typing import Any

import pytest
import torch

from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.frequencies import Linear, Llama3, LongRoPE, YaRN
from tightrope.positions import check

LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
TWO = torch.tensor([0, 3, 5])
MROPE = positions.mrope([2, (1, 2, 2), 1]).ids
TYPES = torch.tensor([0, 0, 1, 1, 1, 1, 0])


def tensor(*values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


#: The code, the place, the ids, and what else is known.
WRONG: list[tuple[str, tuple[int, int], Any, dict[str, Any]]] = [
    ("numbered-through", (0, 3), tensor(0, 1, 2, 3, 4), {"cu_seqlens": TWO}),
    ("numbered-through", (1, 0), tensor([0, 1, 2], [3, 4, 5]), {}),
    ("numbered-through", (0, 2), tensor([0, 1, 2, 3]), {"attention_mask": tensor([1, 1, 2, 2])}),
    ("restarts-inside", (0, 2), tensor(0, 1, 0, 1, 2), {"cu_seqlens": tensor(0, 5)}),
    ("restarts-inside", (1, 3), tensor([0, 0, 0, 1, 2], [0, 1, 2, 0, 1]), {"attention_mask": LEFT}),
    ("position-order", (0, 3), tensor(0, 1, 5, 3, 4), {}),
    ("position-order", (0, 4), tensor(0, 1, 2, 3, 2), {"cu_seqlens": tensor(0, 5)}),
    ("position-offset", (0, 0), tensor(1, 2, 3), {}),
    ("position-offset", (1, 0), tensor([0, 1], [7, 8]), {}),
    ("position-offset", (0, 0), tensor(0.5, 1.5, 2.5, dtype=torch.float32), {}),
    (
        "padding-counted",
        (0, 2),
        tensor([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])[:1],
        {"attention_mask": LEFT[:1]},
    ),
    ("padding-counted", (0, 2), tensor([0, 1, 2, 3, 4], [0, 1, 2, 3, 5]), {"attention_mask": LEFT}),
    ("row-positions", (1, 0), tensor(0, 1, 2, 3, 4), {"attention_mask": LEFT}),
    ("row-positions", (1, 0), tensor([0, 0, 0, 1, 2], [0, 0, 0, 1, 2]), {"attention_mask": LEFT}),
    ("attention-mask", (0, 0), LEFT, {}),
    ("attention-mask", (0, 0), LEFT.bool(), {"attention_mask": LEFT}),
    ("beyond-length", (0, 4), tensor(0, 1, 2, 3, 4), {"length": 4}),
    ("beyond-length", (0, 8), torch.arange(9), {"spec": RopeSpec(8, scaling=YaRN(2.0, 4))}),
    (
        "beyond-length",
        (1, 1),
        tensor([0, 1], [0, 9]),
        {"spec": RopeSpec(8, scaling=Llama3(2.0, 1.0, 4.0, 4))},
    ),
    ("position-dtype", (0, 0), torch.arange(300).bfloat16(), {}),
    ("position-dtype", (0, 0), torch.arange(300).to(torch.uint8), {}),
    ("position-dtype", (0, 0), torch.arange(9).bfloat16() + 250, {}),
    ("attention-mask", (0, 0), LEFT.flip(-1), {}),
    ("attention-mask", (0, 0), tensor(1, 1, 0), {}),
    ("beyond-length", (0, 4), torch.arange(5).to(torch.uint16), {"length": 4}),
    ("position-order", (0, 3), tensor(0, 1, 2**53 + 1, 2**53), {}),
    ("position-dtype", (0, 0), torch.arange(2**24, 2**24 + 3).float() * tensor(0, 1, 1), {}),
    ("axes", (0, 2), torch.arange(7).expand(3, 1, 7), {"token_types": TYPES}),
    ("axes", (0, 3), MROPE, {"token_types": TYPES * 0}),
    ("axes", (0, 0), torch.arange(7), {"spec": RopeSpec(8, axes=Axes.sections((1, 1, 2)))}),
    (
        "restarts-inside",
        (0, 7),
        MROPE.repeat(1, 1, 2),
        {"cu_seqlens": tensor(0, 14), "token_types": TYPES.repeat(2)},
    ),
    (
        "numbered-through",
        (0, 7),
        torch.cat((MROPE, MROPE + 5), -1),
        {"cu_seqlens": tensor(0, 7, 14)},
    ),
    (
        "restarts-inside",
        (0, 2),
        torch.cat((tensor(0, 1, 0, 1)[None, None], torch.arange(4).expand(3, 1, 4))),
        {"cu_seqlens": tensor(0, 4)},
    ),
]


@pytest.mark.parametrize(("code", "place", "ids", "known"), WRONG)
def test_one_fault_has_one_name(code: str, place: Any, ids: Any, known: dict[str, Any]) -> None:
    report = check(ids, **known)
    assert [finding.code for finding in report.findings][:1] == [code], report
    assert not report.ok
    assert report.findings[0].places[0] == place
    others = {finding.code for finding in report.findings} - {code}
    assert others <= (
        {"position-order", "position-offset"} if code == "position-dtype" else set()
    ), report
    assert f"{code}, row {place[0]}, token {place[1]}" in str(report)


RIGHT: list[tuple[Any, dict[str, Any]]] = [
    (torch.arange(5), {"length": 5}),
    (
        torch.arange(9),
        {"spec": RopeSpec(8, scaling=LongRoPE((1.0,) * 4, (2.0,) * 4, 4, factor=3.0))},
    ),
    (torch.arange(3000).half()[:2048], {}),
    (tensor(0, 1), {}),
    (tensor(0, 1, 2, 0, 1), {"cu_seqlens": TWO}),
    (tensor(0, 1, 2, 0, 1), {}),
    (tensor([0, 1, 2, 0, 1]), {"attention_mask": tensor([1, 1, 1, 2, 2])}),
    (positions.packed(TWO), {"cu_seqlens": TWO}),
    (positions.left_padded(LEFT), {"attention_mask": LEFT}),
    (tensor([1, 1, 0, 1, 2], [0, 1, 2, 3, 4]), {"attention_mask": LEFT}),
    (tensor([0, 1, 2, 3, 4]), {"attention_mask": LEFT.flip(-1)}),
    (tensor([1, 1, 0, 1, 2], [0, 1, 2, 3, 4]), {}),
    (tensor(0, 1, 2**63 - 1), {}),
    (torch.arange(257).bfloat16(), {}),
    (positions.mrope([(1, 2, 2)]), {"token_types": TYPES[2:6]}),
    (torch.zeros(0, 5, dtype=torch.int64), {}),
    (torch.zeros(2, 0, dtype=torch.int64), {"token_types": torch.zeros(2, 0, dtype=torch.int64)}),
    (MROPE, {"token_types": TYPES, "spec": RopeSpec(8, axes=Axes.sections((1, 1, 2)))}),
    (torch.cat((torch.arange(7)[None, None], MROPE)), {"token_types": TYPES}),
    (torch.zeros(2, 0, dtype=torch.int64), {}),
    (positions.text(torch.arange(5), axes=3), {}),
]


@pytest.mark.parametrize(("ids", "known"), RIGHT)
def test_right_ids_have_no_findings(ids: Any, known: dict[str, Any]) -> None:
    report = check(ids, **known)
    assert report.ok, report
    assert str(report).startswith("Nothing looks wrong.")


def test_what_is_not_known_is_said() -> None:
    assert len(check(torch.arange(3)).unknown) == 2
    assert len(check(MROPE).unknown) == 3
    mask = torch.ones(1, 7, dtype=torch.bool)
    everything = check(MROPE, attention_mask=mask, token_types=TYPES, length=9)
    assert everything.unknown == ()
    # A rule without a fixed factor states no number of positions.
    assert any(
        "length" in each
        for each in check(torch.arange(3), spec=RopeSpec(8, scaling=Linear(0.5))).unknown
    )


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
