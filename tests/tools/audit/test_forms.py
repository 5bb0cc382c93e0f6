"""The audit calls rotary functions of many forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models.forms import NEW, Function, along, by_one_table, by_rows
from tests.support.planted_faults import named
from tightrope_tools.audit import audit
from tightrope_tools.audit._search import parse
from tightrope_tools.forms import FORMS

OPTIONS: dict[str, Any] = {"dtypes": [torch.float32], "longest": 2048}


def with_wrong_sign(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    return by_rows(q, k, cos, sin, position_ids)[0], by_rows(q, k, cos, -sin, position_ids)[1]


@pytest.mark.parametrize(
    ("function", "call", "layout", "pairing"),
    [
        (by_rows, "fn(q, k, cos, sin, positions)", "bhsd", "half"),
        (by_one_table, "fn(x, sin_cos)", "bshd", "interleaved"),
    ],
)
def test_the_audit_calls_functions_of_rarer_forms(
    function: Function, call: str, layout: str, pairing: str
) -> None:
    report = named(audit(function, **OPTIONS))
    assert (report.facts["called as"], report.facts["layout"]) == (call, layout)
    assert report.facts["pairing"].startswith(pairing)


def test_a_fault_in_such_a_function_is_found() -> None:
    report = audit(with_wrong_sign, **OPTIONS)
    assert "q-k" in report.codes, str(report)


def test_another_axis_of_tokens_than_was_tried_is_audited() -> None:
    named(audit(along, **OPTIONS))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NEW)
def test_a_new_form_is_audited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, function, pairing = NEW[name]
    named(audit(function, **OPTIONS), "cannot-call")
    monkeypatch.setitem(FORMS, form.name, form)
    report = named(audit(function, **OPTIONS))
    assert report.facts["called as"] == f"fn(x, {form.roles[0]})"
    assert report.facts["pairing"].startswith(pairing)


@pytest.mark.parametrize(
    "text", ["x", "x, offset", "q, k, cis", "x, sin, cos", "x, positions -> cos, sin", "x, sin_cos"]
)
def test_a_call_is_parsed_as_it_is_written(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "x, y", "x, cos", "x, q", "k", "x, x", "x, positions -> cos", "x, cos, sin, cis"]
)
def test_invalid_descriptions_of_calls_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^form must list the arguments, .* but got"):
        parse(text)
