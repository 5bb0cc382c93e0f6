"""The audit: every planted fault is found and named, nothing is found where nothing is wrong."""

from __future__ import annotations

from typing import Any

import planted_faults as planted
import pytest
import torch

from tightrope import RopeSpec
from tightrope.frequencies import Linear
from tightrope.workbench.audit import audit


def declared(fields: dict[str, Any] | None) -> RopeSpec | None:
    if fields is None:
        return None
    values = dict(fields)
    factor = values.pop("linear", None)
    return RopeSpec(**values, scaling=None if factor is None else Linear(factor))


def run(text: str, fn: planted.Fn) -> None:
    """Runs a snippet on a function; raises AssertionError where the fault is."""
    torch.manual_seed(0)
    exec(compile(text, "snippet", "exec"), {"fn": fn, "__name__": "snippet"})


@pytest.mark.parametrize("name", planted.FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    fault = planted.FAULTS[name]
    report = audit(fault.bad(), spec=declared(fault.spec), **fault.options)
    assert fault.code in report.codes, str(report)
    assert set(report.codes) <= {fault.code, *fault.also}, str(report)
    assert not report.ok
    (finding,) = (each for each in report.findings if each.code == fault.code)
    assert finding.sentence.endswith(".")
    if not finding.snippet:
        return
    with pytest.raises(AssertionError):
        run(finding.snippet, fault.bad())
    run(finding.snippet, fault.good())


@pytest.mark.parametrize("name", planted.FAULTS)
def test_without_its_fault_nothing_is_found(name: str) -> None:
    fault = planted.FAULTS[name]
    report = audit(fault.good(), spec=declared(fault.spec), **fault.options)
    assert report.ok, str(report)
