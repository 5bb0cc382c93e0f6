"""Targets of the audit: functions by name, models and configurations of transformers, other packages; and refusals."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.support.audits import ONLY_FLOAT32, QUICK
from tests.support.planted_faults import named
from tightrope import Axes, RopeSpec, patch
from tightrope_tools.audit import audit, audit_model

# --- models and configurations of transformers ----------------------------------------------------

MODELS = {
    "llama": "half (i, i + rotary_dim / 2), 0 to 127 of 128",
    "cohere": "interleaved (2i, 2i + 1), 0 to 127 of 128",
    "gpt_neox": "half (i, i + rotary_dim / 2), 0 to 23 of 96",
    "glm": "interleaved (2i, 2i + 1), 0 to 63 of 128",
    # The model cuts the slice out before the call.
    "phi": "half (i, i + rotary_dim / 2), 0 to 31 of 32",
    "deepseek_v3": "interleaved (2i, 2i + 1), 0 to 63 of 64",
    "gpt_oss": "half (i, i + rotary_dim / 2), 0 to 63 of 64",
}


@pytest.mark.parametrize("model", MODELS)
def test_no_false_alarm_on_a_model_of_transformers(model: str) -> None:
    report = named(audit(model))
    assert f"{report.facts['pairing']}, {report.facts['channels']}" == MODELS[model]
    # float32 angles give a note with the size of the error.
    (note,) = (each for each in report.findings if each.code == "angle-error")
    assert note.severity == "note"
    last = report.angle_errors[-1]
    assert last.position == 1_048_576
    assert last.float32 is not None
    assert 1e-3 < last.float32 < last.float32_angle


@pytest.mark.parametrize(
    "name, form, tables, pairing",
    [
        ("llama", "q, k, cos, sin", "cat", "half"),
        ("cohere", "q, k, cos, sin", "repeat", "interleaved"),
        ("gptj", "x, sin, cos", "half", "interleaved"),
    ],
)
def test_an_apply_function_alone(name: str, form: str, tables: str, pairing: str) -> None:
    module = getattr(getattr(transformers.models, name), f"modeling_{name}")
    facts = named(audit(module.apply_rotary_pos_emb)).facts
    assert facts["called as"] == f"fn({form})"
    assert facts["tables"].startswith(tables)
    assert facts["pairing"].startswith(pairing)


@pytest.mark.parametrize("one", [False, True])
def test_an_apply_function_that_is_a_module(one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit calls a function that transformers wraps in a module for the kernels package."""
    from transformers.models.llama import modeling_llama

    both = inspect.unwrap(
        getattr(modeling_llama.apply_rotary_pos_emb, "forward", modeling_llama.apply_rotary_pos_emb)
    )
    call: Callable[..., Any] = (lambda x, cos, sin: both(x, x, cos, sin)[0]) if one else both

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

    signature = inspect.signature(call)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Func.forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature.parameters.values()]
    )
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", Func())
    assert "apply_rotary_pos_emb" in named(audit("llama", **ONLY_FLOAT32)).target


def test_one_of_the_layers_that_differ() -> None:
    report = named(audit("gemma3_text", layer_type="full_attention"))
    assert report.facts["frequencies"] == "geometric, base 1e+06"


SECTIONS = RopeSpec(32, base=1e6, axes=Axes.sections((6, 5, 5)))


@pytest.mark.parametrize("outer", [False, True])
def test_a_model_with_sections_is_audited_against_them(outer: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = {**sizes, "num_key_value_heads": 2, "rope_parameters": rope}
    config = transformers.Qwen2VLTextConfig(**text)
    if outer:
        config = transformers.Qwen2VLConfig(text_config=text)
    report = named(audit(config, **QUICK))
    assert report.facts["declared"] == repr(SECTIONS)
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["each coordinate turns its own pairs"] == "passed"


def llama(**fields: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 9, "intermediate_size": 8, "max_position_embeddings": 512}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, **fields))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "key, value, codes",
    [
        ("rope_parameters", DYNAMIC, ("scaling-ignored",)),
        # as writing config.rope_scaling leaves it, without a base
        ("rope_parameters", YARN, ("amplitude", "scaling-ignored")),
        ("rope_theta", 5e5, ("config-unread",)),  # beside that of the section
    ],
)
def test_a_config_that_was_changed_after_the_model_was_built(
    key: str, value: object, codes: tuple[str, ...]
) -> None:
    model = llama()
    setattr(model.config, key, value)
    report = named(audit(model, **ONLY_FLOAT32), *codes)
    if codes == ("config-unread",):
        assert "from_config" in report.findings[0].evidence
        assert report.facts["declared"] == "nothing: the configuration cannot be read"
        # With a declaration, the configuration is not needed.
        named(audit(model, spec=RopeSpec(32), **ONLY_FLOAT32))


def test_dynamic_scaling_of_transformers_remembers() -> None:
    model = llama(rope_parameters=DYNAMIC)
    report = named(audit(model.config, **ONLY_FLOAT32), "history", "batch")
    assert "longer one" in report.findings[0].sentence
    # Without a spec, the audit also reports that frequencies depend on the length.
    blind = audit(type(model.rotary_emb)(model.config))
    assert set(blind.codes) == {"history", "batch", "length"}, str(blind)
    # A model that was used has no other fault than a new one.
    with torch.no_grad():
        model(torch.zeros(1, 700, dtype=torch.long))
    named(audit(model, **ONLY_FLOAT32), "history", "batch")


def test_a_config_that_the_library_reads_otherwise() -> None:
    """The config has base 10000: the intended rotation is the spec, not the config."""
    report = named(audit(transformers.LlamaConfig(), spec=RopeSpec(128, base=500_000.0)), "base")
    assert report.findings[0].sentence == "The base is 10000; 500000 was declared."


def test_bfloat16_positions_of_rotary_embedding_torch() -> None:
    package = pytest.importorskip("rotary_embedding_torch")
    rope = package.RotaryEmbedding(64)
    report = audit(rope.rotate_queries_or_keys)
    assert set(report.codes) == {"position-dtype", "history"}, str(report)
    history, positions = report.findings[:2]
    assert positions.sentence == "Positions are rounded to bfloat16, for bfloat16 x."
    assert "float32 results are coarser after a call in bfloat16" in history.sentence
    # With float32 alone there is nothing to find.
    named(audit(rope.rotate_queries_or_keys, **ONLY_FLOAT32))


def test_a_patched_model_is_refused() -> None:
    """An audit would call the functions of transformers, which a patched model does not."""
    model = llama()
    with (
        patch(model),
        pytest.raises(ValueError, match=r"^\[audit\] target must be .* patched; call"),
    ):
        audit(model)


# --- all parts of a model ---------------------------------------------------------------------------

TINY = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
TEXT = {**TINY, "num_key_value_heads": 1, "vocab_size": 9, "max_position_embeddings": 512}
IMAGES = {"hidden_size": 64, "num_heads": 2, "depth": 1, "intermediate_size": 8}


def qwen(**text: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope, **text}, vision_config=IMAGES
    )


def test_every_part_of_a_model_is_audited() -> None:
    found = audit_model(qwen(), **QUICK)
    assert [*found.parts] == ["text_config", "vision_config"]
    assert found.ok, str(found)
    assert found.unseen == ()
    text, images = found.parts.values()
    assert text.facts["declared"].startswith("RopeSpec(head_dim=32, base=1000000.0, axes=")
    assert images.facts["declared"].startswith("RopeSpec(head_dim=32, ")
    assert images.facts["layout"] == "bshd"
    for report in found.parts.values():
        outcomes = {check.name: check.outcome for check in report.checks}
        assert outcomes["each coordinate turns its own pairs"] == "passed"
    assert [*json.loads(json.dumps(found.to_dict()))["parts"]] == [*found.parts]


def test_a_part_that_cannot_be_called_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as code

    def forward(*_: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(code.Qwen2_5_VLVisionRotaryEmbedding, "forward", forward)
    found = audit_model(qwen(), **QUICK)
    assert found.unseen == ("vision_config",)
    assert found.ok
    (only,) = found.parts["vision_config"].findings
    assert (only.code, only.severity) == ("not-seen", "note")
    assert "no luck" in only.evidence
    verdict, part, unseen, declared = found.rows()[1]
    assert (verdict, part, unseen) == ("not seen", "vision_config", "all of it")
    assert declared.startswith("RopeSpec(head_dim=32, ")


def test_a_fault_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as code

    right = code.apply_rotary_pos_emb_vision

    def backwards(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return right(q, k, cos, -sin)

    monkeypatch.setattr(code, "apply_rotary_pos_emb_vision", backwards)
    found = audit_model(qwen(), **QUICK)
    assert not found.ok
    assert {name: report.codes for name, report in found.parts.items()} == {
        "text_config": (),
        "vision_config": ("sign",),
    }
