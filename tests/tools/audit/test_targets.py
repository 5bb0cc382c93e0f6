"""Targets of the audit: functions and modules by name, models and configurations of transformers, other packages."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support import planted_faults as planted
from tests.support.planted_faults import named
from tests.support.records import conversion, write_record
from tightrope import Axes, RopeSpec, patch
from tightrope_tools.audit import audit
from tightrope_tools.audit._targets import from_model

ONLY_FLOAT32 = {"dtypes": [torch.float32]}

# --- other packages ---------------------------------------------------------------------------------


def test_dynamic_ntk_of_transformers_remembers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        max_position_embeddings=2048,
    )
    report = named(audit(config), "history", "batch")
    assert "longer one" in report.findings[0].sentence
    # Without a spec, the audit also reports that frequencies depend on the length.
    blind = audit(LlamaRotaryEmbedding(config))
    assert set(blind.codes) == {"history", "batch", "length"}, str(blind)


def test_bfloat16_positions_of_rotary_embedding_torch() -> None:
    package = pytest.importorskip("rotary_embedding_torch")
    rope = package.RotaryEmbedding(64)
    report = audit(rope.rotate_queries_or_keys)
    assert set(report.codes) == {"position-dtype", "history"}, str(report)
    positions, history = report.findings[:2]
    assert positions.sentence == "Positions are rounded to bfloat16, for bfloat16 x."
    assert "float32 results are coarser after a call in bfloat16" in history.sentence
    # With float32 alone there is nothing to find.
    named(audit(rope.rotate_queries_or_keys, **ONLY_FLOAT32))


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
    report = named(audit(module.apply_rotary_pos_emb))
    assert report.facts["called as"] == f"fn({form})"
    assert report.facts["tables"].startswith(tables)
    assert report.facts["pairing"].startswith(pairing)


# --- names, files and configurations ----------------------------------------------------------------

MODULE = """
import torch
from tests.support.planted_faults import rope

bad, number = rope(sign=-1.0), 3


class Rope:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_function_by_name(folder: Path) -> None:
    (folder / "some_rope.py").write_text(MODULE, encoding="utf-8")
    assert named(audit("some_rope:bad"), "sign").target == "some_rope:bad"
    made = audit("tests.support.planted_faults:rope", make=True, **ONLY_FLOAT32, longest=4096)
    assert named(made).target == "tests.support.planted_faults:rope()"
    (folder / "broken_rope.py").write_text("1 / 0\n", encoding="utf-8")
    for target, kind, text in (
        (
            "some_rope:number",
            TypeError,
            r"^\[audit\] some_rope:number must be callable but is int\.$",
        ),
        (
            "some_rope:x",
            ValueError,
            r"^\[audit\] module 'some_rope' must define 'x' but does not\.$",
        ),
        ("some_rope:Rope", TypeError, r"but is a class: pass a function without arguments"),
        (
            "broken_rope:x",
            ValueError,
            r"must be importable from .* but raised ZeroDivisionError: division",
        ),
    ):
        with pytest.raises(kind, match=text):
            audit(target)


def test_a_config_file(tmp_path: Path) -> None:
    values = {"model_type": "llama", "rope_theta": 500000.0, "head_dim": 64, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    for target in (str(tmp_path), tmp_path / "config.json"):
        facts = named(audit(target)).facts
        assert facts["frequencies"] == "geometric, base 500000"
        assert facts["declared"] == "RopeSpec(head_dim=64, base=500000.0)"


def test_a_conversion_record_that_contradicts_the_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "head_dim": 64}))
    for pairing, codes in (("half", ()), ("interleaved", ("record",))):
        write_record(tmp_path, conversion(pairing))
        report = named(audit(str(tmp_path), **ONLY_FLOAT32, longest=4096), *codes)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    named(audit(config, **ONLY_FLOAT32, longest=4096), "record")
    (found,) = (each for each in report.findings if each.code == "record")
    assert found.severity == "error"
    assert found.sentence.startswith("The weights have interleaved pairing")
    assert found.mend.endswith("tightrope convert FOLDER OUT --to half")


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
    Func.forward.__signature__ = signature.replace(
        parameters=[itself, *signature.parameters.values()]
    )  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", Func())
    report = named(audit("llama", **ONLY_FLOAT32))
    assert "apply_rotary_pos_emb" in report.target


def test_a_config_that_the_library_reads_otherwise() -> None:
    # The config has base 10000: the intended rotation is the spec, not the config.
    report = named(audit(transformers.LlamaConfig(), spec=RopeSpec(128, base=500_000.0)), "base")
    assert report.findings[0].sentence == "The base is 10000; 500000 was declared."


WRONG_USE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target": 3}, TypeError, "target must be a function, a module, .* but got int"),
    ({"target": "no such thing"}, ValueError, "target must be MODULE:FUNCTION, .*'no such thing'"),
    (
        {"target": "of/mine.py:rope"},
        ValueError,
        ".* run from the folder .*/of and pass mine:rope, but",
    ),
    ({"target": "mine.py:rope"}, ValueError, ".* run from the folder .* and pass mine:rope, but"),
    ({"form": "x, y"}, ValueError, "form must list the arguments, .* but got 'x, y'"),
    ({"layout": "hbsd"}, ValueError, "layout must be one of bhsd, .* but got 'hbsd'"),
    ({"tables": "both"}, ValueError, "tables must be one of cat, repeat, half but got 'both'"),
    ({"head_dim": 7}, ValueError, "head_dim must be even and positive but got 7"),
    ({"dtypes": [torch.int32]}, ValueError, "dtypes must be among float32, bfloat16, float16"),
    ({"dtypes": [torch.bfloat16]}, ValueError, "dtypes must include float32"),
    ({"longest": 3}, ValueError, "longest must be at least 128 but got 3"),
    ({"spec": 3}, TypeError, "spec must be a RopeSpec or None but got 3"),
    (
        {"spec": RopeSpec(64), "head_dim": 32},
        ValueError,
        "head_dim must be that of the spec, 64, or None but got 32",
    ),
    # Layers that differ must be chosen.
    ({"target": "gemma3_text"}, ValueError, "layer_type must be one of "),
]


@pytest.mark.parametrize("options, kind, sentence", WRONG_USE)
def test_wrong_use_is_one_sentence(
    options: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=rf"^\[audit\] {sentence}"):
        audit(**({"target": planted.PLAIN} | options))


def test_a_model_without_rope() -> None:
    with pytest.raises(ValueError, match="learned positions"):
        audit("bert")


def test_a_patched_model_is_refused() -> None:
    """An audit would call the functions of transformers, which a patched model does not."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(**sizes, intermediate_size=8, vocab_size=9))
    with (
        patch(model),
        pytest.raises(ValueError, match=r"^\[audit\] target must be .* patched; call"),
    ):
        audit(model)


def test_one_of_the_layers_that_differ() -> None:
    report = named(audit("gemma3_text", layer_type="full_attention"))
    assert report.facts["frequencies"] == "geometric, base 1e+06"


def test_the_text_of_a_model_of_defaults_is_audited_with_its_spec() -> None:
    config = transformers.CONFIG_MAPPING["qwen2_vl"]()
    target = from_model(config, None)
    assert not target.unread
    assert target.spec == RopeSpec.from_config(config, section="text_config")
    assert target.spec.axes == Axes.sections((16, 24, 24))
