"""The factor on the softmax scale is a fact of a family's attention; the keys that YaRN has do not state it."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.reading import gguf
from tightrope import RopeSpec
from tightrope.config import provenance
from tightrope.config.families import FAMILIES
from tightrope.frequencies import YaRN

PACKAGE = Path(transformers.__file__).parent / "models"
# The call in an attention whose softmax scale depends on YaRN's mscale_all_dim.
APPLIES = re.compile(r"self\.scaling = (\w+)\(config\.rope_parameters, ")
SECTION = {
    "rope_type": "yarn",
    "factor": 16.0,
    "rope_theta": 1e6,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 0.75,
}
# Enough keys for every family.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "max_position_embeddings": 262144,
    "rope_parameters": SECTION,
}
RULE = YaRN(16.0, 16384, mscale=1.0, mscale_all_dim=0.75)


def folder_of(name: str) -> str:
    return FAMILIES[name].source.partition(": ")[0]


IN_TRANSFORMERS = {
    name for name in FAMILIES if (PACKAGE / folder_of(name)).is_dir() and folder_of(name)
}


def test_the_table_has_the_families_whose_attention_applies_it() -> None:
    """All model files of transformers are searched, also those of families that the table lacks."""
    files = {path.parent.name: path.read_text("utf-8") for path in PACKAGE.glob("*/modeling_*.py")}
    applying = {folder for folder, text in files.items() if APPLIES.search(text)}
    stated = {folder_of(name) for name in IN_TRANSFORMERS if FAMILIES[name].scales_softmax}
    assert len(applying) == 14
    assert stated == applying
    # Other spellings of the same would be missed above; PhiMoE's mscales are LongRoPE's.
    assert {folder for folder, text in files.items() if "mscale" in text} == applying | {"phimoe"}


@pytest.mark.parametrize(
    "name", sorted(name for name in IN_TRANSFORMERS if FAMILIES[name].scales_softmax)
)
def test_it_is_the_factor_of_the_familys_own_code(name: str) -> None:
    folder = folder_of(name)
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    apply = APPLIES.search(Path(str(module.__file__)).read_text("utf-8"))
    assert apply is not None
    wanted = getattr(module, apply[1])(SECTION, 1.0)
    assert wanted > 1.4
    assert RULE.softmax_scaling == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("deepseek_v3", RULE.softmax_scaling),
        ("mistral4", RULE.softmax_scaling),
        ("kimi_k2", RULE.softmax_scaling),
        ("llama", 1.0),
        ("qwen3", 1.0),
        ("ministral3", 1.0),
    ],
)
def test_a_spec_has_the_factor_of_its_family(name: str, wanted: float) -> None:
    spec = RopeSpec.from_config({"model_type": name, **SIZES, "head_dim": 32})
    assert isinstance(spec, RopeSpec)
    assert spec.softmax_scaling == wanted
    # The rotation is the same in all of them.
    assert spec.attention_scaling() == RULE.frequencies(32, 1e6).attention_scaling
    assert RopeSpec.from_dict(spec.to_dict()) == spec


def test_gguf_and_megatron_have_that_of_their_code() -> None:
    more = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 8.0,
        "rope__scaling__original_context_length": 8192,
    }
    latent = {"attention__key_length_mla": 192, "rope__dimension_count": 64}
    deep = gguf("mistral4", **latent, **more, rope__scaling__yarn_log_multiplier=0.1)
    flat = gguf("mistral3", **more, rope__scaling__yarn_log_multiplier=1.0)
    megatron = {
        "multi_latent_attention": True,
        "rope_type": "yarn",
        "num_layers": 2,
        "hidden_size": 64,
    }
    megatron |= {
        "num_attention_heads": 4,
        "qk_head_dim": 64,
        "qk_pos_emb_head_dim": 32,
        "rotary_base": 1e4,
    }
    megatron |= {"rotary_scaling_factor": 16.0, "original_max_position_embeddings": 16384}
    made = RopeSpec.from_config({**megatron, "mscale": 1.0, "mscale_all_dim": 0.75})
    assert made.softmax_scaling == RULE.softmax_scaling  # type: ignore[union-attr]
    factors = [RopeSpec.from_config(config).softmax_scaling for config in (deep, flat)]  # type: ignore[union-attr]
    assert factors == [YaRN(8, 8192, mscale=1, mscale_all_dim=1).softmax_scaling, 1.0]


def test_of_an_unknown_family_it_is_not_known() -> None:
    config = {"model_type": "zebra9", **SIZES, "head_dim": 32, "rope_interleaved": True}
    spec = RopeSpec.from_config(config, rope_layers="all", rotary_dim=32)
    assert isinstance(spec, RopeSpec)
    with pytest.raises(ValueError, match="scales_softmax must be known but is None: if the model"):
        spec.softmax_scaling  # noqa: B018
    rows = {row.field: row for row in provenance(config, rope_layers="all", rotary_dim=32).rows}
    assert rows["scaling.scales_softmax"][2:] == (None, "not in the table of families")
    # Where nothing depends on it, nothing is asked.
    plain = {**config, "rope_parameters": {**SECTION, "mscale": None, "mscale_all_dim": None}}
    assert RopeSpec.from_config(plain, rope_layers="all", rotary_dim=32).softmax_scaling == 1.0  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="scales_softmax must be a bool or None but got 1"):
        YaRN(4.0, 16, scales_softmax=1)  # type: ignore[arg-type]


def test_no_key_of_a_file_states_it() -> None:
    config = {
        "model_type": "llama",
        **SIZES,
        "rope_parameters": {**SECTION, "scales_softmax": True},
    }
    with pytest.raises(ValueError, match=r"but got rope_parameters\.scales_softmax"):
        RopeSpec.from_config(config)
