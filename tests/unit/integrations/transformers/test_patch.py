"""Test `patch` on transformers models: common families, caches, copies, compilation and hooks."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.support.helpers import noise
from tests.support.models.of_transformers import (
    FAMILIES,
    assert_calls_operator,
    assert_equal_runs,
    assert_outputs,
    gradients,
    outputs,
    small_inputs,
    small_model,
)
from tests.support.records import conversion, write_record
from tests.support.tolerances import assert_each, assert_same_bits, value
from tightrope import integrations
from tightrope.config.files import RECORD
from tightrope.integrations._recognise import to_the_bit
from tightrope.integrations._replace import replacement
from tightrope.integrations.transformers import patch, recognise, unpatch
from tightrope.ops import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


Inputs = dict[str, torch.Tensor]


@pytest.fixture
def llama() -> Any:
    return small_model("Llama")


@pytest.fixture
def inputs() -> Inputs:
    return small_inputs("Llama")


@torch.no_grad()
def logits(model: Any, given: Inputs) -> torch.Tensor:
    return outputs(model, given)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_not_one_bit_changes(family: str, dtype: torch.dtype) -> None:
    model = small_model(family).to(dtype)
    given = small_inputs(family)
    if dtype == torch.bfloat16:
        given = _halved(given)
    before = gradients(model, given)
    report = patch(model)
    assert report.replaced
    assert not report.left, str(report)
    assert_equal_runs(gradients(model, given), before)
    # The operator ran, not the original functions.
    assert_calls_operator(model, given)
    unpatch(model)
    assert_equal_runs(gradients(model, given), before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "ModernBERT"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_family_generates_the_same(family: str, cache: str) -> None:
    model, given = small_model(family), small_inputs(family)
    static = cache == "static" and family != "GPT-J"
    options = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
    options |= {"cache_implementation": "static"} if static else {}
    before = model.generate(**given, **options)
    patch(model)
    assert torch.equal(model.generate(**given, **options), before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_exact_angles(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = small_model(family), small_inputs(family)
    before = logits(model, given)
    report = patch(model, angles="exact")
    assert_outputs(logits(model, given), before, "exact angles outputs")
    served = [entry for entry in report.replaced if "RotaryEmbedding" in entry.name]
    if family == "GPT-J":  # its attention stores a table of sines, so there is no module to replace
        assert not served
    elif family == "Qwen2-VL":  # the vision module takes (height, width) positions, so it is left
        assert [entry.name for entry in served] == ["Qwen2VLRotaryEmbedding"]
    else:
        assert served
    # Sines that are 1 % too large change outputs by more than five times the bound of `assert_outputs`.
    right = run.launch

    def wrong(operator: Any, q: Any, k: Any, packed: Any) -> Any:
        primary, secondary, *others = packed
        return right(operator, q, k, (primary, 1.01 * secondary, *others))

    with monkeypatch.context() as planted:
        planted.setattr(run, "launch", wrong)
        off = ((logits(model, given) - before).abs().max() / before.abs().max()).item()
    assert off > 5 * value("patched outputs")
    model.to(torch.bfloat16)
    assert logits(model, _halved(given)).dtype == torch.bfloat16


def _halved(given: Inputs) -> Inputs:
    return {k: v.bfloat16() if v.is_floating_point() else v for k, v in given.items()}


@pytest.mark.parametrize("family", ["Llama", "GPT-NeoX", "Cohere", "GPT-J"])
def test_one_rounding_is_as_near_to_float64_as_before(family: str) -> None:
    model, given = small_model(family), small_inputs(family)
    model.to(torch.bfloat16)
    exact = logits(copy.deepcopy(model).double(), given)
    before = logits(model, given)
    assert "same bits" not in str(patch(model, rounding="once"))
    after = logits(model, given)
    error = [(y.double() - exact).square().mean().sqrt().item() for y in (before, after)]
    assert error[1] <= value("patched bfloat16 outputs") * error[0], error


# --- only the given model is affected ----------------------------------------------------------------------


def test_only_this_model_is_affected(llama: Any, inputs: Inputs) -> None:
    other = copy.deepcopy(llama)
    function, method = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    before = logits(other, inputs)
    patch(llama)
    assert_same_bits(logits(other, inputs), before)
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is method
    assert type(other.model.layers[0].self_attn) is modeling_llama.LlamaAttention
    assert isinstance(llama.model.layers[0].self_attn, modeling_llama.LlamaAttention)
    assert type(llama.model.layers[0].self_attn).__name__ == "LlamaAttention"


def test_patching_twice_changes_nothing(llama: Any, inputs: Inputs) -> None:
    first = patch(llama)
    once, cls = logits(llama, inputs), type(llama.model.layers[0].self_attn)
    second = patch(llama)
    assert type(llama.model.layers[0].self_attn) is cls
    assert first.entries == second.entries
    assert_same_bits(logits(llama, inputs), once)


# --- saving, compiling and wrapping models --------------------------------------------------------------------


@pytest.mark.parametrize("angles", ["model", "exact"])
def test_deepcopy_and_pickle_keep_the_patch(llama: Any, inputs: Inputs, angles: str) -> None:
    # If transformers calls its functions through the kernels package, its models cannot be pickled.
    pickles = not isinstance(modeling_llama.apply_rotary_pos_emb, torch.nn.Module)
    patch(llama, angles=angles)
    want, attention = logits(llama, inputs), type(llama.model.layers[0].self_attn)
    rotary = type(llama.model.rotary_emb)
    twins = [copy.deepcopy(llama) for _ in range(2)]
    if pickles:
        twins.append(pickle.loads(pickle.dumps(llama)))
        buffer = io.BytesIO()
        torch.save(llama, buffer)
        buffer.seek(0)
        twins.append(torch.load(buffer, weights_only=False))
    # Each is still patched when others are not.
    for each in (twins[0], llama, *twins[1:]):
        assert type(each.model.layers[0].self_attn) is attention
        assert type(each.model.rotary_emb) is rotary
        assert_same_bits(logits(each, inputs), want)
        unpatch(each)
        assert type(each.model.layers[0].self_attn) is modeling_llama.LlamaAttention


@pytest.mark.parametrize("angles", ["model", "exact"])
def test_save_pretrained_writes_the_same_files(
    llama: Any, inputs: Inputs, tmp_path: Path, angles: str
) -> None:
    before = logits(llama, inputs)
    llama.save_pretrained(tmp_path / "before")
    patch(llama, angles=angles)
    llama.save_pretrained(tmp_path / "after")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after", attn_implementation="eager")
    assert_same_bits(logits(loaded.eval(), inputs), before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("angles", ["model", "exact"])
def test_compiles_as_one_graph(llama: Any, inputs: Inputs, angles: str) -> None:
    before = gradients(llama, inputs)
    patch(llama, angles=angles)
    torch._dynamo.reset()
    compiled = torch.compile(llama, fullgraph=True, backend="aot_eager")
    after, grads = gradients(compiled, inputs)
    if angles == "model":
        # This compiler runs each operation as eager code does.
        named = {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}
        assert_equal_runs((after, named), before)
    else:
        assert_outputs(after, before[0], "exact angles outputs")
    torch._dynamo.reset()


# --- exact angles ---------------------------------------------------------------------------------


def test_dynamic_rules_forget_the_last_call() -> None:
    """transformers keeps the longest length seen; exact angles depend on the current length only."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = small_model("Llama", rope_parameters=rope, max_position_embeddings=16)
    patch(model, angles="exact")
    x, short, long = torch.zeros(1), torch.arange(24)[None], torch.arange(60)[None]
    before = model.model.rotary_emb(x, short)
    model.model.rotary_emb(x, long)
    assert_each(assert_same_bits, model.model.rotary_emb(x, short), before)
    # Rows of unequal length: each has its own frequencies.
    both = torch.stack((short[0], torch.arange(24) // 4))
    found = model.model.rotary_emb(x, both)[0]
    assert_same_bits(found[:1], before[0])
    assert_same_bits(found[1:], model.model.rotary_emb(x, both[1:])[0])


@pytest.mark.parametrize("known", [True, False])
def test_a_reader_that_is_not_replaced_is_refused(known: bool) -> None:
    """Also beside functions that are replaced. Its results in bfloat16 would be float32."""

    class Reader(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)
            self.layer = modeling_llama.LlamaAttention(config, 0) if known else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cos, sin = self.rotary_emb(x, torch.arange(x.shape[1])[None])
            return x * cos + x.roll(8, -1) * sin

    model = Reader(small_model("Llama").config)
    with pytest.raises(
        ValueError, match=r"no code that may read its cosines and sines .*Reader\.forward"
    ):
        patch(model, angles="exact")
    assert type(model.rotary_emb) is modeling_llama.LlamaRotaryEmbedding


# --- the report and errors ------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["model", "once"])
def test_compiled_and_eager_calls_of_a_replacement_have_the_same_bits(
    rounding: str, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    original = modeling_llama.apply_rotary_pos_emb
    candidate = recognise(original).candidate
    assert candidate is not None
    ours = replacement(original, [candidate], rounding=rounding)
    q, k = (noise(2, heads, 5, 16).bfloat16().requires_grad_() for heads in (4, 2))
    cos, sin = (noise(1, 5, 16, seed=seed).bfloat16() for seed in (1, 2))
    runs = []
    for function in (original, ours, torch.compile(ours, fullgraph=True)):
        ys = function(q, k, cos, sin)
        runs.append((*ys, *torch.autograd.grad(ys, (q, k), [torch.ones_like(y) for y in ys])))
    assert all(map(torch.equal, runs[1], runs[2]))
    assert all(map(torch.equal, runs[0], runs[1])) == (rounding == "model")


def of_scaled_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    u, v = x.chunk(2, -1)
    y = x * (3 * cos) + torch.cat((-v, u), -1) * (3 * sin)
    return (y / 3).to(x.dtype)


def test_a_function_with_other_roundings_is_replaced_only_if_bits_may_change() -> None:
    found = recognise(of_scaled_tables)
    assert found.candidate is not None
    assert str(found.candidate).endswith(", to rounding")
    refused = to_the_bit(found)
    assert refused.candidate is None
    assert refused.reason.endswith(", but not to the bit; rounding='once' replaces it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"angles": "x"}, r"\[patch\] angles must be one of model, exact but got 'x'"),
        ({"rounding": "each"}, r"\[patch\] rounding must be one of model, once but got 'each'"),
    ],
)
def test_options_that_are_unknown(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch(torch.nn.Linear(1, 1), **options)


@pytest.mark.parametrize("function", [patch, unpatch])
def test_what_is_no_model(function: Any) -> None:
    message = rf"\[{function.__name__}\] model must be a torch.nn.Module but got 3\."
    with pytest.raises(TypeError, match=message):
        function(3)


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_patch_of_any_library_without_a_model_names_the_call_for_all_models(
    arguments: tuple[None, ...],
) -> None:
    for function in (integrations.patch, integrations.unpatch):
        name = function.__name__
        message = (
            f"[{name}] model must be a torch.nn.Module but got None; to {name} all models of "
            f"transformers, call tightrope.integrations.transformers.{name}()."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            function(*arguments)


@pytest.mark.parametrize("what", ["inv_freq", "attention_scaling", "config"])
def test_exact_angles_are_those_that_the_model_has_now(
    llama: Any, inputs: Inputs, what: str
) -> None:
    rotary = llama.model.rotary_emb
    if what == "inv_freq":
        rotary.inv_freq.mul_(0.25)  # position interpolation by hand
    elif what == "attention_scaling":
        rotary.attention_scaling = 0.5
    else:  # the module reads its config only when it is constructed
        llama.config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    before = llama(**inputs).logits
    report = patch(llama, angles="exact")
    assert not report.left
    assert_outputs(llama(**inputs).logits, before)
    notes = [
        f"note: the configuration states {llama.config.rope_parameters}; LlamaRotaryEmbedding holds other "
        "frequencies or another factor, which are used. Build the model from the configuration to use its own."
    ]
    assert report.notes == report.to_dict()["notes"] == notes
    assert all(note in str(report).splitlines() for note in report.notes)
    unpatch(llama)
    assert not patch(llama).notes


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_weights_of_another_pairing_than_the_code_are_warned_of(
    llama: Any, pairing: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The model would write fluent nonsense, patched or not."""
    write_record(tmp_path, conversion(pairing))
    llama.config._name_or_path = str(tmp_path)
    assert patch(llama).replaced
    texts = [str(each.message) for each in recwarn if RECORD in str(each.message)]
    assert len(texts) == (pairing == "interleaved")
    assert all(text.startswith("[patch] the model's code pairs halves, but ") for text in texts)
