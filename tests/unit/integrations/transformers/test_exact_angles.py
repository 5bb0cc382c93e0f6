"""Test exact angles per module object: each uses its own config, or runs the original code."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gptj import modeling_gptj
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama4 import modeling_llama4

from tests.support import oracle
from tests.support.models.of_transformers import TEXT, assert_outputs, small_inputs, small_model
from tests.support.tolerances import assert_each, assert_same_bits, value
from tightrope.integrations.transformers import Entry, Report, patch, unpatch

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("clean"),
]

X, SHORT, LONG = torch.zeros(1), torch.arange(24)[None], torch.arange(96)[None]
PAIRS = TEXT["head_dim"] // 2

# Rope sections of the configs; max_position_embeddings is 64.
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "default, another base": {"rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 10.0},
    "dynamic": {"rope_type": "dynamic", "factor": 10.0},
    "yarn": {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "factor": 2.0,
        "short_factor": [1.0] * PAIRS,
        "long_factor": [2.0 + k for k in range(PAIRS)],
    },
}
MODES = ("model", "exact", "library", "library, exact")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit `patch()` to the file of Llama; afterwards undo it and reset the default dtype."""
    for name in list(sys.modules):
        if ".modeling_" in name and name.startswith("transformers.models."):
            if not name.endswith(".modeling_llama"):
                monkeypatch.delitem(sys.modules, name)
    yield
    unpatch()
    torch.set_default_dtype(torch.float32)


def rope(name: str) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, **ROPES[name]}


def config_of(name: str) -> LlamaConfig:
    settings = {**TEXT, "max_position_embeddings": 64}
    return LlamaConfig(**settings, rope_parameters=rope(name))


def tables(module: Any, *more: Any) -> list[torch.Tensor]:
    """Return cosines and sines for 24 tokens, then for 96."""
    return [table for ids in (SHORT, LONG) for table in module(X, ids, *more)]


def assert_tables(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert_each(assert_outputs, got, want, "exact angles outputs")


def patched(mode: str, make: Callable[[], Any]) -> tuple[Any, Report]:
    """Make a model and patch it, or patch the library and make a model, depending on the mode."""
    angles = "exact" if "exact" in mode else "model"
    if mode.startswith("library"):
        report = patch(angles=angles)
        return make(), report
    model = make()
    return model, patch(model, angles=angles)


every_exact_mode = pytest.mark.parametrize("mode", ["exact", "library, exact"])
every_narrow_default = pytest.mark.parametrize(
    "default", [torch.bfloat16, torch.float16, torch.float64]
)


def llama(name: str) -> Any:
    return small_model("Llama", rope_parameters=rope(name), max_position_embeddings=64)


def is_served(module: Any) -> bool:
    """Return True if angles are exact: NaN in the frequency buffers of a copy does not reach them."""
    twin = copy.deepcopy(module)
    for buffer in twin.buffers():
        buffer.fill_(torch.nan)
    cos, _ = twin(X, SHORT[:, :3])
    return not bool(cos.isnan().any())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ROPES)
def test_objects_of_a_patched_class_serve_their_own_config(mode: str, first: str) -> None:
    """Every object computes the angles of its own config, also if it is initialised again."""
    want = {name: tables(LlamaRotaryEmbedding(config_of(name))) for name in ROPES}
    model, _ = patched(mode, lambda: llama(first))
    module = model.model.rotary_emb
    assert is_served(module) == ("exact" in mode)
    assert_tables(tables(module), want[first])
    for name in ROPES:
        module.__init__(config_of(name))
        made = type(module)(config_of(name)), type(module)(config=config_of(name)), module
        for each in made:
            assert_tables(tables(each), want[name])
    unpatch()
    unpatch(model)
    assert type(module) is LlamaRotaryEmbedding
    for name in ROPES:
        assert_each(assert_same_bits, tables(type(module)(config_of(name))), want[name])


@pytest.mark.one_in(3)
@every_exact_mode
@pytest.mark.parametrize("name", ["default", "dynamic", "longrope"])
@pytest.mark.parametrize(
    "change", ["config", "rope_parameters", "one of them", "attention_scaling", "rope_type"]
)
def test_the_original_runs_where_what_it_reads_was_assigned(
    mode: str, name: str, change: str
) -> None:
    def changed(module: Any) -> Any:
        other = {**rope(name), "rope_theta": 77.0, "factor": 3.0}
        if change == "config":
            module.config = copy.deepcopy(module.config)
            module.config.rope_parameters = other
        elif change == "rope_parameters":
            module.config.rope_parameters = other
        elif change == "one of them":
            module.config.rope_parameters["rope_theta"] = 77.0
        elif change == "attention_scaling":
            module.attention_scaling = 0.5
        else:
            module.rope_type = "yarn" if name == "default" else "default"
        return module

    want = tables(changed(LlamaRotaryEmbedding(config_of(name))))
    model, _ = patched(mode, lambda: llama(name))
    before = tables(LlamaRotaryEmbedding(config_of(name)))
    assert_tables(tables(model.model.rotary_emb), before)
    assert_tables(tables(changed(model.model.rotary_emb)), want)


@every_exact_mode
def test_each_layer_type_has_its_angles(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, modeling_gemma3.__name__, modeling_gemma3)
    kinds = ("sliding_attention", "full_attention")
    bases = {
        kind: {"rope_type": "default", "rope_theta": 10.0**n} for n, kind in enumerate(kinds, 4)
    }
    config = Gemma3TextConfig(**TEXT, layer_types=list(kinds), rope_parameters=bases)
    plain = modeling_gemma3.Gemma3RotaryEmbedding(config)
    model, _ = patched(mode, lambda: AutoModelForCausalLM.from_config(config))
    module = model.model.rotary_emb
    for kind in kinds:
        assert_tables(tables(module, kind), tables(plain, kind))
    with pytest.raises(KeyError, match="chunked"):
        module(X, SHORT, "chunked")


# --- patched again, copied, undone ----------------------------------------------------------------


@pytest.mark.parametrize("what", ["inv_freq", "attention_scaling"])
def test_patching_again_takes_what_was_changed_by_hand(what: str) -> None:
    model = llama("default")
    patch(model, angles="exact")
    module = model.model.rotary_emb

    def change(by: float) -> None:
        if what == "inv_freq":
            module.inv_freq.mul_(by)
        else:
            module.attention_scaling *= by

    change(0.25)
    unpatch(model)
    want = tables(module)
    patch(model, angles="exact")
    assert_tables(tables(module), want)
    change(0.5)
    report = patch(model, angles="exact")
    assert not report.left, str(report)
    assert is_served(module)
    got = tables(module)
    unpatch(model)
    assert_tables(got, tables(module))


def test_a_rule_that_the_config_no_longer_states_is_the_modules_own() -> None:
    """A module keeps dynamic NTK after its config changes to the default rule.

    Dynamic NTK starts with the default frequencies, so these alone do not identify the rule.
    """
    model = llama("dynamic")
    want = tables(LlamaRotaryEmbedding(config_of("dynamic")))
    model.config.rope_parameters.update(rope("default"))  # keeps the factor of dynamic NTK
    patch(model, angles="exact")
    assert_tables(tables(model.model.rotary_emb), want)


@pytest.mark.parametrize("name", ["default", "dynamic", "longrope"])
@every_exact_mode
def test_copies_and_pickles_serve_what_they_were_made_from(mode: str, name: str) -> None:
    model, _ = patched(mode, lambda: llama(name))
    module = model.model.rotary_emb
    want = tables(module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    another = config_of("default, another base")
    loaded = pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(module), copy.copy(module), *loaded):
        assert is_served(twin)
        assert_each(assert_same_bits, tables(twin), want)
        assert_tables(tables(type(twin)(another)), tables(LlamaRotaryEmbedding(another)))
    assert "tightrope" not in str(module.state_dict())


@pytest.mark.parametrize(
    "option", [{"angles": "exact"}, {"stack": "vllm"}, {"rounding": "once"}], ids=str
)
def test_an_option_is_not_lost_by_another_patch(option: dict[str, Any]) -> None:
    """A callback, or a second cell of a notebook, may patch a model again; its bits must not change in silence."""
    model, given = llama("default"), small_inputs("Llama")
    report = str(patch(model, **option))
    want = model(**given).logits
    ((name, value),) = option.items()
    text = rf"was patched with {name}='{value}'; call patch\(model, {name}='{value}'\), or unpatch"
    for other in (model, copy.deepcopy(model)):
        for more in ({}, {} if name == "rounding" else {"rounding": "once"}):
            with pytest.raises(ValueError, match=text):
                patch(other, **more)
        assert torch.equal(other(**given).logits, want)
    assert str(patch(model, **option)) == report
    patch(model, stack="sglang")  # another option is no accident
    unpatch(model)
    patch(model)


# --- dtypes ---------------------------------------------------------------------------------------

FAR = torch.tensor([[0, 1, 4097, 123_457, 1_000_003]])


def assert_exact(module: Any, dtype: torch.dtype) -> None:
    """Assert that tables at far positions are float32 (float64 for a float64 x) and within the error bound."""
    cos, sin = module(torch.zeros(1, dtype=dtype), FAR)
    exact = oracle.cos_sin(FAR, oracle.frequencies(1e4, 2 * PAIRS))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    name = "float64 angle" if dtype == torch.float64 else "float32 angle"
    for table, expected in zip((cos, sin), exact, strict=True):
        assert table.dtype == wide
        off = (table.double() - torch.cat((expected, expected), -1)).abs().max().item()
        assert off <= value(name), off
    # The tables of the original miss the bound by far, so the assertion above can fail.
    rough, _ = LlamaRotaryEmbedding.forward(module, torch.zeros(1), FAR)
    assert (rough.double() - torch.cat((exact[0],) * 2, -1)).abs().max() > 1000 * value(name)


def entry_of(report: Report, name: str) -> Entry:
    (entry,) = [entry for entry in report if entry.name == name]
    return entry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_exact_mode
def test_loaded_models_are_served(mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    llama("default").save_pretrained(tmp_path)
    model, report = patched(
        mode,
        lambda: AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, attn_implementation="eager"
        ),
    )
    assert model.dtype == dtype
    entry = entry_of(report, "LlamaRotaryEmbedding")
    assert entry.replaced
    assert entry.recognised == "cos/sin of RopeSpec(head_dim=16), full width, float32"
    assert "LlamaRotaryEmbedding" not in [entry.name for entry in report.left]
    assert_exact(model.model.rotary_emb, dtype)
    with torch.no_grad():
        logits = model(**small_inputs("Llama")).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
@every_exact_mode
def test_loaded_models_are_still_served_after_use(mode: str, name: str, tmp_path: Path) -> None:
    """Angles stay exact after loading, generating and saving, which change config attributes."""
    llama(name).save_pretrained(tmp_path)
    model, _ = patched(
        mode, lambda: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    )
    assert is_served(model.model.rotary_emb)
    model.generate(**small_inputs("Llama"), max_new_tokens=2, do_sample=False)
    model.save_pretrained(tmp_path)
    model.float().train()
    assert is_served(model.model.rotary_emb)


@every_narrow_default
@every_exact_mode
def test_the_default_dtype_does_not_matter(mode: str, default: torch.dtype) -> None:
    def make() -> Any:
        return AutoModelForCausalLM.from_config(config_of("default"), attn_implementation="eager")

    torch.set_default_dtype(default)
    model, report = patched(mode, make)
    assert torch.get_default_dtype() == default
    assert entry_of(report, "LlamaRotaryEmbedding").replaced, str(report)
    assert not [entry for entry in report.left if "llama" in entry.module]
    module = model.model.rotary_emb
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert_exact(module, dtype)
    torch.set_default_dtype(torch.float32)
    assert_exact(module, torch.bfloat16)


# --- modules that are not served -----------------------------------------------------------------------------

NONE = "none of its modules takes (x, position_ids), as modules of transformers that make angles do, so angles stay as they are"


@pytest.mark.parametrize("angles", ["model", "exact"])
def test_a_model_without_a_module_that_makes_angles_is_listed(
    angles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, modeling_gptj.__name__, modeling_gptj)
    model = small_model("GPT-J")
    report = patch(model, angles=angles)
    if angles == "model":
        assert not report.left
        return
    assert [(e.module, e.name, e.reason) for e in report.left] == [
        ("transformers.models.gptj.modeling_gptj", "GPTJForCausalLM", NONE)
    ]
    assert f"left     modeling_gptj.GPTJForCausalLM: {NONE}" in str(report).splitlines()
    (line,) = patch(torch.nn.Linear(2, 2), angles="exact")
    assert (line.name, line.replaced, line.reason) == ("Linear", False, NONE)


def test_a_module_that_makes_angles_of_something_else_is_listed() -> None:
    """A module that cannot get exact angles is listed as left, even if another module gets them."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = config_of("default")
            config.image_size, config.patch_size = 8, 4
            self.vision = modeling_llama4.Llama4VisionRotaryEmbedding(config)
            self.text = LlamaRotaryEmbedding(config)

    report = patch(Both(), angles="exact")
    assert entry_of(report, "LlamaRotaryEmbedding").replaced
    entry = entry_of(report, "Llama4VisionRotaryEmbedding")
    assert not entry.replaced
    assert entry.reason == "its forward takes (hidden_states), not (x, position_ids)"
