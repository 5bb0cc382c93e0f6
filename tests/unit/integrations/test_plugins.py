"""The callback and the hook of trainers, in transformers itself, and programs that are not installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.matrix import needs_kernel
from tests.support.models.of_transformers import small_model
from tests.support.written_calls import rows_of
from tightrope import unpatch
from tightrope.integrations import comfyui, liger, onnx, plugins
from tightrope.integrations.transformers import register


def trained(folder: Path, *callbacks: Any, **model: Any) -> list[float]:
    """Train for two steps and return the losses."""
    ids = torch.arange(10)
    options = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": ids, "labels": ids}] * 4
    trainer = transformers.Trainer(
        args=options, train_dataset=rows, callbacks=[*callbacks], **model
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stack", [None, "vllm"])
@pytest.mark.parametrize("given", ["model", "model_init"])
def test_a_trainer_of_transformers(tmp_path: Path, given: str, stack: str | None) -> None:
    """The model that is trained is patched, with the options; without any, losses are the same.

    A Trainer with `model_init` builds a model, and another one for its training.
    """
    models: list[Any] = []

    def build() -> Any:
        models[:] = [small_model("Llama")]  # only the last one lives
        return models[0]

    def train(*callbacks: Any) -> list[float]:
        return trained(tmp_path, *callbacks, **{given: build if "init" in given else build()})

    right, callback = train(), plugins.trainer_callback(stack=stack)
    assert callback.report is None
    losses = train(callback)
    try:
        assert stack or losses == right
        replaced = [entry.name for entry in callback.report.replaced]
        assert replaced == ["apply_rotary_pos_emb", *["LlamaRotaryEmbedding"] * bool(stack)]
        counts = callback.report.calls()
        served = sum(c.operator for name, c in counts.items() if name.endswith("pos_emb"))
        assert served == 2 * models[0].config.num_hidden_layers
        assert not any(calls.original for calls in counts.values())
        report = callback.report
        callback.on_train_begin(None, None, None, model=torch.nn.ModuleList(models))  # wrapped
        assert callback.report is report
    finally:
        unpatch(models[0])


def test_a_hook_patches_models_that_are_built_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotary() -> Any:
        model = small_model("Llama")
        return type(model.model.rotary_emb).forward

    own = rotary()
    monkeypatch.setenv("TIGHTROPE_STACK", "vllm")
    try:
        plugins.patch_models()
        assert rotary() is not own
    finally:
        unpatch()
    assert rotary() is own
    monkeypatch.setenv("TIGHTROPE_STACK", "vlm")
    with pytest.raises(ValueError, match="stack must be one of vllm, vllm-native, sglang"):
        plugins.patch_models()


NAMES = {each.__name__.rpartition(".")[2]: each for each in (comfyui, liger, onnx, plugins)}
ROWS = rows_of(Path(__file__).with_name("missing.jsonl"))


@needs_kernel
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["program"])
def test_what_is_not_installed(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these `modules` none can be imported; the call `python` raises an error with this `text`."""
    for module in row["modules"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises((ImportError, NotImplementedError), match=re.escape(row["text"])):
        eval(row["python"], {**NAMES, "register": register, "torch": torch})
