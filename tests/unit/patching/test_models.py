"""`patch` and `unpatch` on small models: bits, options, what wraps or runs a model, and which models they concern."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.support.checkpoints import LLAVA
from tests.support.models.of_transformers import (
    FAMILIES,
    assert_equal_runs,
    assert_outputs,
    gradients,
    outputs,
    small_inputs,
    small_model,
)
from tests.support.records import conversion, write_record
from tests.support.tolerances import assert_same_bits, value
from tightrope import patch, unpatch
from tightrope.patching import Report

CHANGING: list[dict[str, Any]] = [{"angles": "exact"}, {"rounding": "once"}, {"stack": "vllm"}]
EVERY: list[dict[str, Any]] = [{}, *CHANGING]
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def llama() -> Any:
    return small_model("Llama")


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    return outputs(model)


def served(report: Report) -> bool:
    """Return whether the operator served all calls of rotary functions, and some."""
    found = [calls for place, calls in report.calls().items() if "apply" in place]
    return any(each.operator for each in found) and not any(each.original for each in found)


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_changes(family: str, dtype: torch.dtype) -> None:
    """In outputs and gradients, also of another model; complex tables round otherwise at the ends of vectors."""
    model, other = (small_model(family).to(dtype) for _ in range(2))
    before, exact = gradients(model), family != "Llama 4"
    with patch(model) as report:
        assert not report.left, str(report)
        assert all(entry.same_bits == exact for entry in report)
        for each in (model, other) if exact else ():
            assert_equal_runs(gradients(each), before)
        near = "patched outputs" if dtype == F32 else "patched outputs in bfloat16"
        assert_outputs(gradients(model)[0], before[0], near)
        assert served(report)
    assert_equal_runs(gradients(model), before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", CHANGING, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_options_that_change_bits_change_little(family: str, options: dict[str, Any]) -> None:
    model = small_model(family)
    before = run(model)
    if "stack" in options and family in ("Phi-3", "Llama 4", "GPT-J"):
        with pytest.raises(ValueError, match=r"can be exchanged.*call patch\(model\), which keeps"):
            patch(model, **options)
    else:
        report = patch(model, **options)
        assert not any(entry.same_bits for entry in report)
        assert_outputs(run(model), before, "exact angles outputs")
        assert served(report)
    unpatch(model)
    assert_same_bits(run(model), before)


@pytest.mark.parametrize("family", ["Llama", "GPT-NeoX"])
def test_one_rounding_is_as_near_to_float64_as_before(family: str) -> None:
    model = small_model(family).to(BF16)
    exact, before = run(copy.deepcopy(model).double()), run(model)
    with patch(model, rounding="once"):
        after = run(model)
    error = [(y.double() - exact).square().mean().sqrt().item() for y in (before, after)]
    assert error[1] <= value("patched bfloat16 outputs") * error[0], error
    assert not torch.equal(after, before)


def test_a_block_of_diffusers() -> None:
    """Its processor imports the function in its body."""
    from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

    torch.manual_seed(0)
    block = CogVideoXBlock(dim=32, num_attention_heads=2, attention_head_dim=16, time_embed_dim=8)
    x, text, time = torch.randn(2, 7, 32), torch.randn(2, 3, 32), torch.randn(2, 8)
    tables = torch.randn(7, 16), torch.randn(7, 16)
    before = block(x, text, time, tables)[0]
    with patch(block) as report:
        assert [entry.name for entry in report.replaced] == ["apply_rotary_emb"]
        assert torch.equal(block(x, text, time, tables)[0], before)
        assert served(report)


# --- models that something wraps or runs in another way -------------------------------------------


class Adapter(nn.Module):
    """A wrapper as that of PEFT, with the model inside."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.scale = model, nn.Parameter(torch.ones(()))

    def forward(self, **given: Any) -> Any:
        return (self.base_model(**given)[0] * self.scale,)


def hooked(model: Any) -> Any:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in [*model.modules()]:
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    return model


def offloaded(model: Any) -> Any:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True) or model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "PEFT": Adapter,
    "hooks": hooked,
    "offloaded": offloaded,
    "compiled": lambda model: torch.compile(model, backend="eager", fullgraph=True),
}
WRAPPED = [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in WRAPPERS]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"angles": "exact"}, {"stack": "vllm"}], ids=str)
@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_before_or_after(how: str, options: dict[str, Any], llama: Any) -> None:
    before = run(llama)
    with patch(llama, **options):
        want = run(llama)
    after = copy.deepcopy(llama)
    wrapped = WRAPPERS[how](llama)
    report = patch(wrapped, **options)
    assert_same_bits(run(wrapped), want)
    assert served(report) or how == "compiled"  # where calls are not counted
    unpatch(wrapped)
    assert_same_bits(run(wrapped), before)
    patch(after, **options)
    wrapped = WRAPPERS[how](after)
    assert_same_bits(run(wrapped), want)
    unpatch(after)
    assert_same_bits(run(wrapped), before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, llama: Any) -> None:
    llama.train()
    before = gradients(llama)
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    llama.enable_input_require_grads()
    with patch(llama) as report:
        assert_equal_runs(gradients(llama), before)
        assert served(report)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["Llama", "Phi-3", "GPT-J"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_model_generates_the_same(family: str, cache: str) -> None:
    model, given = small_model(family), small_inputs(28)
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    options |= {"cache_implementation": "static"} if cache == "static" and family != "GPT-J" else {}
    before = model.generate(**given, **options)
    with patch(model):
        assert torch.equal(model.generate(**given, **options), before)


# --- which models a patch concerns; test_machine.py has sequences ---------------------------------


@pytest.mark.parametrize("options", CHANGING, ids=str)
def test_an_unpatched_model_of_the_file_is_an_error(options: dict[str, Any], llama: Any) -> None:
    """With `all_models` it is served, by its own tables."""
    other, ((name, given),) = small_model("Llama"), options.items()
    before = run(other)
    patch(llama, **options)
    words = rf"must belong to a patched model, because patch\(LlamaForCausalLM, {name}='{given}'\) "
    with pytest.raises(ValueError, match=f"LlamaAttention {words}.*; call patch.*all_models=True"):
        run(other)
    run(llama)
    patch(other, **options)
    assert_same_bits(run(other), run(llama))
    for model in (llama, other):
        unpatch(model)
    assert_same_bits(run(other), before)
    patch(llama.to(BF16), **options, all_models=True)
    equal = torch.equal(run(llama), run(other.to(BF16)))
    assert equal == ("rounding" in options)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_a_pickled_model_is_loaded_unpatched(options: dict[str, Any], llama: Any) -> None:
    before = run(llama)
    patch(llama, **options)
    data = pickle.dumps(llama)
    assert b"tightrope." not in data  # no module of it, so that it is loaded without
    unpatch(llama)
    assert_same_bits(run(pickle.loads(data)), before)


# --- warnings and errors --------------------------------------------------------------------------


@pytest.mark.parametrize("section, model", [("text_config", "llama"), ("vision_config", "pixtral")])
def test_weights_of_another_pairing_are_warned_of(
    section: str, model: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """By the record of the conversion of a part of a model, for the whole and for that part alone."""
    (tmp_path / "config.json").write_text(json.dumps(LLAVA), encoding="utf-8")
    write_record(
        tmp_path, conversion("interleaved", section=section, model=f"model_type '{model}'")
    )
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    # As transformers.AutoModel.from_pretrained(folder, config=config.text_config).
    part = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    part.name_or_path = str(tmp_path)
    wanted = (
        (transformers.LlavaModel(config), 1),
        (
            transformers.LlamaModel(part),
            int(section == "text_config"),
        ),
    )
    for each, count in wanted:
        recwarn.clear()
        assert patch(each).replaced
        said = [str(w.message) for w in recwarn if "tightrope_convert" in str(w.message)]
        assert len(said) == count
        assert all("json beside its weights states that model.layers.0" in one for one in said)
