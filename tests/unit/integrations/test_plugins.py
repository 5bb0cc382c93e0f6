"""Callbacks of trainers, entry points that act only if they are named, and programs that are not installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.support.helpers import ROOT
from tests.support.matrix import needs_kernel
from tests.support.models.of_transformers import small_model
from tests.support.written_calls import rows_of
from tightrope import unpatch
from tightrope.integrations import comfyui, onnx, plugins, sglang, vllm
from tightrope.integrations.transformers import register


def functions_of(report: Any) -> list[str]:
    return [entry.name for entry in report.replaced]


def trained(callback: Any, folder: Any, **model: Any) -> list[float]:
    """Train for two steps and return the losses."""
    ids = torch.arange(10).view(1, 10)
    data = [{"input_ids": ids[0], "labels": ids[0]}] * 4
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
    trainer = transformers.Trainer(
        args=options, train_dataset=data, callbacks=[callback] if callback else None, **model
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_transformers(tmp_path: Any) -> None:
    """The model is patched once, built before or by the Trainer; the losses are those of the original."""
    torch.manual_seed(0)
    model = small_model("Llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    right = trained(None, tmp_path, model=model)
    for given in ({"model": model}, {"model_init": lambda: model}):
        model.load_state_dict(state)
        callback = plugins.trainer_callback()
        try:
            assert trained(callback, tmp_path, **given) == right
            assert functions_of(callback.report) == ["apply_rotary_pos_emb"]
            assert all(
                calls.operator and not calls.original for calls in callback.report.calls().values()
            )
        finally:
            unpatch(model)


def test_a_model_is_patched_once_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the parts of Lightning that are used, and without a Trainer."""
    package = ModuleType("lightning.pytorch")
    package.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", package)
    model = small_model("Llama")
    callback = plugins.lightning_callback()
    callback.on_fit_start(None, model)
    report = callback.report
    assert functions_of(report) == ["apply_rotary_pos_emb"]
    callback.on_validation_start(None, model)
    assert callback.report is report
    unpatch(model)
    assert plugins.for_lightning() == []
    monkeypatch.setenv("TIGHTROPE_PLUGINS", "vllm, lightning")
    assert [type(one).__name__ for one in plugins.for_lightning()] == ["Patch"]
    callback = plugins.trainer_callback(stack="vllm")
    callback.on_init_end(None, None, None, model=None)
    assert callback.report is None
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=model)
        assert len(callback.report.replaced) == 2  # the function, and the class that makes tables
    unpatch(model)


def test_axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    patched: list[Any] = []
    monkeypatch.setattr(plugins, "patch", lambda *given, **named: patched.append((*given, named)))
    plugin = plugins.ForAxolotl()
    assert isinstance(plugin, base.BasePlugin)
    plugin.post_model_build(None, "model")
    assert patched == []
    monkeypatch.setenv("TIGHTROPE_PLUGINS", "axolotl")
    plugin.post_model_build(None, "model")
    monkeypatch.setenv("TIGHTROPE_STACK", "sglang")
    plugin.post_model_build(None, "model")
    assert patched == [("model", {}), ("model", {"stack": "sglang"})]
    with pytest.raises(AttributeError):
        plugins.ForOthers  # noqa: B018


def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []
    stand_in = SimpleNamespace(register=lambda: registered.append(1))
    monkeypatch.setitem(sys.modules, "tightrope.integrations.vllm", stand_in)
    plugins.for_vllm()
    assert registered == []
    monkeypatch.setenv("TIGHTROPE_PLUGINS", "vllm")
    plugins.for_vllm()
    assert registered == [1]


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl takes the attribute and calls nothing; models that are built later are patched."""

    def rotary(model: Any) -> Any:
        return type(model.model.rotary_emb).forward

    own = rotary(small_model("Llama"))
    try:
        assert plugins.for_verl is None
        assert rotary(small_model("Llama")) is own
        monkeypatch.setenv("TIGHTROPE_PLUGINS", "verl")
        monkeypatch.setenv("TIGHTROPE_STACK", "vllm")
        assert plugins.for_verl is None
        assert rotary(small_model("Llama")) is not own
    finally:
        unpatch()
    assert rotary(small_model("Llama")) is own
    monkeypatch.setenv("TIGHTROPE_STACK", "vlm")
    with pytest.raises(ValueError, match="stack must be one of vllm, vllm-native, sglang"):
        plugins.patch_models()


def test_names_that_are_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTROPE_PLUGINS", "vlm,axolotl")
    with pytest.warns(
        UserWarning, match="may name axolotl, lightning, sglang, verl, vllm, but names vlm$"
    ):
        assert plugins.is_chosen("axolotl")


def test_entry_points_exist() -> None:
    """Each program finds its entry point by the group that it reads."""
    declared = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    assert declared["project"]["entry-points"] == {
        group: {"tightrope": f"tightrope.integrations.plugins:{name}"}
        for group, name in {
            "vllm.general_plugins": "for_vllm",
            "lightning.pytorch.callbacks_factory": "for_lightning",
            "axolotl.plugins": "ForAxolotl",
            "sglang.srt.plugins": "for_sglang",
            "verl.plugins": "for_verl",
        }.items()
    }


NAMES = {each.__name__.rpartition(".")[2]: each for each in (comfyui, onnx, plugins, sglang, vllm)}
ROWS = rows_of(Path(__file__).with_name("missing.jsonl"))


@needs_kernel
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["program"])
def test_what_is_not_installed(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these `modules` none can be imported; the call `python` raises an error with this `text`."""
    for module in row["modules"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises((ImportError, NotImplementedError), match=re.escape(row["text"])):
        eval(row["python"], {**NAMES, "register": register, "torch": torch})
