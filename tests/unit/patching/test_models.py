"""`patch` and `unpatch` on small models: bits, options, and which models they concern."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.of_transformers import (
    FAMILIES,
    assert_equal_runs,
    assert_outputs,
    gradients,
    outputs,
    small_inputs,
    small_model,
)
from tests.support.tolerances import assert_same_bits, value
from tightrope import patch, unpatch
from tightrope.patching import Report

CHANGING: list[dict[str, str]] = [{"angles": "exact"}, {"rounding": "once"}, {"stack": "vllm"}]
F32, BF16 = torch.float32, torch.bfloat16
NEAR = {F32: "patched outputs", BF16: "patched outputs in bfloat16"}


@pytest.fixture
def llama() -> Any:
    return small_model("Llama")


@torch.no_grad()
def run(model: Any, tokens: int = 12) -> torch.Tensor:
    return outputs(model, small_inputs(tokens))


def served(report: Report) -> bool:
    """Return whether the operator served all calls of rotary functions, and some."""
    found = [calls for place, calls in report.calls().items() if "apply" in place]
    return any(each.operator for each in found) and not any(each.original for each in found)


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_changes(family: str, dtype: torch.dtype) -> None:
    """The differences of outputs and gradients; complex tables round otherwise at the ends of vectors."""
    model, other = (small_model(family).to(dtype) for _ in range(2))
    before = gradients(model)
    report = patch(model)
    assert not report.left, str(report)
    after = gradients(model)
    assert served(report)
    assert all(entry.same_bits == (family != "Llama 4") for entry in report)
    if family == "Llama 4":
        assert_outputs(after[0], before[0], NEAR[dtype])
    else:
        assert_equal_runs(after, before)
        assert_equal_runs(gradients(other), before)
    unpatch(model)
    assert_equal_runs(gradients(model), before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", CHANGING, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_options_that_change_bits_change_little(family: str, options: dict[str, str]) -> None:
    model = small_model(family)
    before = run(model)
    if "stack" in options and family in ("Phi-3", "Llama 4", "GPT-J"):
        with pytest.raises(
            ValueError, match=r"can be exchanged.*; call patch\(model\), which keeps"
        ):
            patch(model, **options)  # type: ignore[arg-type]
    else:
        report = patch(model, **options)  # type: ignore[arg-type]
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


# --- which models a patch concerns ----------------------------------------------------------------


def test_patching_twice_changes_nothing(llama: Any) -> None:
    report = patch(llama)
    assert patch(llama) is report
    assert patch(llama, rounding="model", angles="model") is report
    unpatch(llama)


@pytest.mark.parametrize("options", CHANGING, ids=str)
def test_an_unpatched_model_of_the_file_is_an_error(options: dict[str, Any], llama: Any) -> None:
    other, ((name, given),) = small_model("Llama"), options.items()
    before = run(other)
    patch(llama, **options)
    words = (
        rf"LlamaAttention must belong to a patched model, because patch\(LlamaForCausalLM, {name}='{given}'\) "
        r".*; call patch\(other_model, .*, or unpatch\(model\) before .*all_models=True\)"
    )
    with pytest.raises(ValueError, match=words):
        run(other)
    run(llama)
    patch(other, **options)
    assert_outputs(run(other), before, "exact angles outputs")
    unpatch(llama)
    unpatch(other)
    assert_same_bits(run(other), before)


@pytest.mark.parametrize("options", CHANGING, ids=str)
def test_all_models_are_served_if_that_is_said(options: dict[str, Any], llama: Any) -> None:
    """Those that are not patched keep their own tables."""
    llama.to(BF16)
    other = copy.deepcopy(llama)
    before = run(other)
    patch(llama, **options, all_models=True)
    assert_outputs(run(other), before, NEAR[BF16])
    assert torch.equal(run(llama), run(other)) == ("rounding" in options)
    unpatch(llama)


@pytest.mark.parametrize("first", [{}, *CHANGING], ids=str)
def test_other_options_are_refused_by_name(first: dict[str, Any], llama: Any) -> None:
    """For the same model, for a copy of it, and for another model of the file; nothing changes then."""
    patch(llama, **first)
    before, said = run(llama), ", ".join(f"{k}='{v}'" for k, v in first.items()) or "no option"
    serves = rf"apply_rotary_pos_emb serves LlamaForCausalLM after patch\(…, {said}\); unpatch that"
    other = small_model("Llama")
    for second in ({}, *CHANGING, {"stack": "sglang"}, {"all_models": True}):
        if second == first:
            continue
        with pytest.raises(
            ValueError, match=rf"it is patched with {said}; call unpatch\(model\) first"
        ):
            patch(llama, **second)
        for each in (copy.deepcopy(llama), other):
            with pytest.raises(ValueError, match=serves):
                patch(each, **second)
    assert_same_bits(run(llama), before)
    unpatch(llama)
    with patch(other, rounding="once"):
        pass


@pytest.mark.parametrize("options", [{}, *CHANGING], ids=str)
def test_a_pickled_model_is_not_patched_where_it_is_loaded(
    options: dict[str, Any], llama: Any
) -> None:
    before = run(llama)
    patch(llama, **options)
    data = pickle.dumps(llama)
    assert b"tightrope." not in data  # no module of it, so that it is loaded without
    unpatch(llama)
    assert_same_bits(run(pickle.loads(data)), before)


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
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"angles": "exact"}, {"stack": "vllm"}], ids=str)
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(wrap, id=name, marks=[pytest.mark.slow] * (name == "compiled"))
        for name, wrap in WRAPPERS.items()
    ],
)
def test_wrapped_before_or_after(wrap: Any, options: dict[str, Any], llama: Any) -> None:
    before = run(llama)
    with patch(llama, **options):
        want = run(llama)
    after = copy.deepcopy(llama)
    wrapped = wrap(llama)
    report = patch(wrapped, **options)
    assert_same_bits(run(wrapped), want)
    assert served(report) or wrap is WRAPPERS["compiled"]  # where calls are not counted
    unpatch(wrapped)
    assert_same_bits(run(wrapped), before)
    patch(after, **options)
    wrapped = wrap(after)
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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"angles": "exact"}], ids=str)
def test_one_graph(options: dict[str, Any], llama: Any, fresh_compiler: None) -> None:
    patch(llama, **options)
    want = gradients(llama)
    after, grads = gradients(torch.compile(llama, fullgraph=True, backend="aot_eager"))
    assert_equal_runs((after, {k.removeprefix("_orig_mod."): v for k, v in grads.items()}), want)
    unpatch(llama)


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


# --- errors ------------------------------------------------------------------------------------


class Pipeline:
    """As a pipeline of diffusers: no module, with modules in its attributes."""

    def __init__(self) -> None:
        self.vae, self.transformer, self.name = nn.Linear(2, 2), nn.Linear(2, 2), "any"


@pytest.mark.parametrize("function", [patch, unpatch])
def test_what_is_no_module_is_refused(function: Any) -> None:
    words = rf"\[{function.__name__}\] model must be a torch.nn.Module but got "
    with pytest.raises(TypeError, match=words + r"3\."):
        function(3)
    held = rf"a Pipeline, whose modules are vae, transformer; call {function.__name__}\(pipeline.transformer\)"
    with pytest.raises(TypeError, match=words + held):
        function(Pipeline())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"angles": "x"}, "angles must be one of model, exact but got 'x'"),
        ({"rounding": "each"}, "rounding must be one of model, once but got"),
        ({"stack": "x"}, "stack must be one of vllm, vllm-native, sglang but"),
        ({"stack": "vllm", "rounding": "once"}, "must not be given with stack='vllm'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        patch(nn.Identity(), **options)
