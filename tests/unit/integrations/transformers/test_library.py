"""Test `patch()` without a model, which changes modeling files imported before or after it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from tests.support.models.of_transformers import (
    assert_calls_operator,
    assert_outputs,
    outputs,
    small_inputs,
    small_model,
)
from tests.support.tolerances import assert_same_bits
from tightrope.integrations.transformers import Report, patch, unpatch

pytestmark = pytest.mark.usefixtures("recognised_once")

LATE = "transformers.models.stablelm.modeling_stablelm"


@pytest.fixture
def only_llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide imported modeling files without "llama" in their names; undo `patch()` afterwards."""
    for name in list(sys.modules):
        if ".modeling_" in name and name.startswith("transformers.models.") and "llama" not in name:
            monkeypatch.delitem(sys.modules, name)
    yield
    unpatch()


@pytest.mark.usefixtures("only_llama")
def test_models_made_before_and_after_are_served_and_undone() -> None:
    function = modeling_llama.apply_rotary_pos_emb
    before, given = small_model("Llama"), small_inputs("Llama")
    with torch.no_grad():
        want = outputs(before, given)
        report = patch()
        assert modeling_llama.apply_rotary_pos_emb is not function
        after = small_model("Llama")
        for model in (before, after):
            assert_outputs(outputs(model, given), want)
            assert_calls_operator(model, given)
        assert "transformers.models.llama.modeling_llama" in {entry.module for entry in report}
        assert patch() is report
        unpatch()
        assert modeling_llama.apply_rotary_pos_emb is function
        for model in (before, after):
            assert_same_bits(outputs(model, given), want)
        unpatch()


@pytest.mark.usefixtures("only_llama")
def test_files_imported_later_are_patched_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, LATE, raising=False)
    report = patch()
    assert LATE not in {entry.module for entry in report}
    module = importlib.import_module(LATE)
    assert [entry.replaced for entry in report if entry.module == LATE] == [True]
    assert hasattr(module.apply_rotary_pos_emb, "__wrapped__")
    unpatch()
    assert not hasattr(module.apply_rotary_pos_emb, "__wrapped__")
    monkeypatch.delitem(sys.modules, LATE)
    again = importlib.import_module(LATE)
    assert not hasattr(again.apply_rotary_pos_emb, "__wrapped__")


@pytest.mark.usefixtures("only_llama")
def test_exact_angles_for_models_made_afterwards() -> None:
    plain, given = small_model("Llama"), small_inputs("Llama")
    with torch.no_grad():
        want = outputs(plain, given)
        report = patch(angles="exact")
        model = small_model("Llama")
        assert type(model.model.rotary_emb) is not modeling_llama.LlamaRotaryEmbedding
        assert isinstance(model.model.rotary_emb, modeling_llama.LlamaRotaryEmbedding)
        assert [e.replaced for e in report if e.name == "LlamaRotaryEmbedding"] == [True]
        assert_outputs(outputs(model, given), want, "exact angles outputs")
        model.to(torch.bfloat16)
        cos, _ = model.model.rotary_emb(
            torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[1_000_000]])
        )
        assert cos.dtype == torch.float32
        unpatch()
        assert type(small_model("Llama").model.rotary_emb) is modeling_llama.LlamaRotaryEmbedding


@pytest.mark.usefixtures("only_llama")
def test_a_model_patched_by_itself_stays_when_the_library_is_undone() -> None:
    model, given = small_model("Llama"), small_inputs("Llama")
    patch()
    report = patch(model)
    assert len(report.replaced) == 1
    # The replacements of a patched model are also globals of the modeling file; they must not be patched.
    unpatch()
    assert not any(entry.name.startswith("_tightrope") for entry in patch())
    unpatch()
    assert_calls_operator(model, given)
    unpatch(model)


@pytest.mark.usefixtures("only_llama")
def test_what_others_put_there_meanwhile_stays() -> None:
    patch()
    ours: Any = modeling_llama.apply_rotary_pos_emb
    original = ours.__wrapped__

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    modeling_llama.apply_rotary_pos_emb = theirs
    unpatch()
    assert modeling_llama.apply_rotary_pos_emb is theirs
    modeling_llama.apply_rotary_pos_emb = original


def test_report_lists_what_is_left() -> None:
    report = Report()
    assert str(report).startswith("no rotary function found: no method of the model's modules")
    assert report.replaced == report.left == []


def test_importing_the_integration_imports_no_transformers() -> None:
    code = (
        "import sys, tightrope.integrations.transformers; "
        "assert 'transformers' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
