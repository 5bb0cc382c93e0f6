"""A default that a class of transformers adds is read with its name, or asked for; null is not absent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tightrope import RopeSpec
from tightrope.config import provenance
from tightrope.config.families import FAMILIES

HEADS = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 8, "head_dim": 64}
SCALED = [
    name
    for name, family in FAMILIES.items()
    if family.rope.get("rope_type", "default") not in ("default", "axial")
]
LATENT = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32}


def config_of(name: str, **more: Any) -> dict[str, Any]:
    latent = LATENT if FAMILIES[name].start == "nope" else {}
    heads = {key: value for key, value in HEADS.items() if not latent or key != "head_dim"}
    return {"model_type": name, **heads, **latent, "rope_theta": 1e4, **more}


def test_one_base_is_not_taken_for_all_types_of_layers() -> None:
    with pytest.raises(ValueError, match="that may give a base must be known but got rope_theta"):
        RopeSpec.from_config(config_of("gemma4_text", global_head_dim=64))
    flat = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="must have a rope section for each type of layers"):
        RopeSpec.from_config(config_of("gemma4_text", global_head_dim=64, rope_parameters=flat))


@pytest.mark.parametrize("name", SCALED)
def test_a_missing_section_is_that_of_the_class_and_null_is_refused(name: str) -> None:
    config = config_of(name)
    del config["rope_theta"]
    given = {"inv_freq": torch.ones(16)} if FAMILIES[name].learned else {}
    if not given:
        rows = provenance(config).rows
        assert any(row.field == "scaling.factor" and "default of" in row.source for row in rows)
    with pytest.raises(
        ValueError, match=r"rope_scaling must not be null, as \w+ scales by default"
    ):
        RopeSpec.from_config({**config, "rope_scaling": None})
    section = {"rope_type": "default", "rope_theta": 1e4}
    spec = RopeSpec.from_config(config_of(name, rope_parameters=section), **given)
    assert isinstance(spec, RopeSpec) or set(spec) <= {"rope", "no_rope"}


def test_a_type_without_a_section_does_not_rotate_even_if_no_layers_are_listed() -> None:
    section = {"rope_type": "default", "rope_theta": 1e4}
    both = {"sliding_attention": section, "full_attention": None}
    specs = RopeSpec.from_config(config_of("beam", rope_parameters=both))
    assert specs == {"sliding_attention": RopeSpec(64), "full_attention": None}


@pytest.mark.parametrize("name", ["cohere2", "flint"])
def test_layers_with_windows_need_a_window(name: str) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    with pytest.raises(ValueError, match="sliding_window must not be null"):
        RopeSpec.from_config(config_of(name, layer_types=kinds, sliding_window=None))


def test_the_list_of_bases_repeats_the_base_that_the_file_has() -> None:
    spec = RopeSpec(64, base=5e5)
    assert RopeSpec.from_config(config_of("granite_swa") | {"rope_theta": 5e5}) == spec
    null = config_of("granite_swa", layer_rope_theta=None) | {"rope_theta": 5e5}
    assert RopeSpec.from_config(null) == spec


@pytest.mark.parametrize("text", ["nemotron_h", "unknown"])
def test_images_are_not_read_in_place_of_a_text_that_does_not_rotate(text: str) -> None:
    config = {
        "text_config": {"model_type": text, "hidden_size": 64},
        "vision_config": {"model_type": "qwen2_5_vl_vision", "hidden_size": 160, "num_heads": 2},
    }
    with pytest.raises(ValueError, match="section must be given, as the text part") as error:
        RopeSpec.from_config(config)
    assert "section='vision_config'" in str(error.value)
    assert RopeSpec.from_config(config, section="vision_config").head_dim == 80


@pytest.mark.parametrize("value", [0, "false"])
def test_a_switch_must_be_a_bool(value: object) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(TypeError, match="apply_yarn_scaling must be a bool"):
        RopeSpec.from_config(
            config_of("internlm2", rope_scaling={**scaling, "apply_yarn_scaling": value})
        )


@pytest.mark.parametrize(
    "name", ["ernie4_5", "minimax_m2", "ministral3", "jetmoe", "hrm_text", "pe_audio_encoder"]
)
def test_a_width_that_the_class_fixes_is_not_derived(name: str) -> None:
    section = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    config = config_of(name, rope_parameters=section)
    del config["head_dim"]
    with pytest.raises(ValueError, match="the width of a head; pass a config with head_dim"):
        RopeSpec.from_config(config)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("olmo_hybrid", {"rope_theta": None}, "rope_theta is null"),
        ("olmo_hybrid", {"rope_theta": None, "rope_parameters": {"rope_theta": None}}, "is null"),
        ("zamba2", {"attention_head_dim": 64}, "use_mem_rope is not True"),
        ("zamba2", {"attention_head_dim": 64, "use_mem_rope": False}, "use_mem_rope is False"),
        ("wav2vec2-bert", {"position_embeddings_type": "relative_key"}, "is 'relative_key'"),
        ("a_new_conformer", {"position_embeddings_type": "relative"}, "is 'relative'"),
    ],
)
def test_no_rotation_is_said_to_be_none(name: str, more: dict[str, Any], why: str) -> None:
    config = {"model_type": name, **HEADS, "rope_theta": 1e4, **more}
    with pytest.raises(ValueError, match=f"the config has no RoPE: .*{why}"):
        RopeSpec.from_config(config)


def test_a_base_in_the_section_counts_beside_a_null_one() -> None:
    config = config_of("olmo_hybrid", rope_parameters={"rope_theta": 5e5})
    assert RopeSpec.from_config({**config, "rope_theta": None}) == RopeSpec(64, base=5e5)


@pytest.mark.parametrize("name", ["wav2vec2-bert", "wav2vec2-conformer"])
def test_a_conformer_rotates_if_its_file_says_so(name: str) -> None:
    config = {"model_type": name, **HEADS, "rotary_embedding_base": 500}
    for more in ({}, {"position_embedding_type": "rotary"}):  # a key that its class does not read
        with pytest.raises(ValueError, match="only if position_embeddings_type selects it"):
            RopeSpec.from_config({**config, **more})
    spec = RopeSpec.from_config({**config, "position_embeddings_type": "rotary"})
    assert spec == RopeSpec(64, base=500)


@pytest.mark.parametrize(
    ("more", "rotary_dim"),
    [
        ({}, 32),
        ({"partial_rotary_factor": 0.5}, 32),
        ({"partial_rotary_factor": 0.25}, None),  # its class puts 0.5 in its place
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, 16),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, None),
    ],
)
def test_bamba_rotates_half_whatever_the_outer_level_says(
    more: dict[str, Any], rotary_dim: int | None
) -> None:
    config = config_of("bamba", **more)
    if rotary_dim is None:
        with pytest.raises(
            ValueError, match="the pairing must be known but got partial_rotary_factor"
        ):
            RopeSpec.from_config(config)
    else:
        assert RopeSpec.from_config(config) == RopeSpec(64, rotary_dim=rotary_dim)


# --- bases that differ between versions of transformers -----------------------------------------------

DIFFERING = {name: family.differs for name, family in FAMILIES.items() if family.differs}


@pytest.mark.parametrize("name", DIFFERING)
def test_the_version_that_wrote_a_file_decides_its_default(name: str) -> None:
    assert DIFFERING.keys() >= {"cohere", "olmo3", "qwen3_vl_text"}
    path, versions = next(iter(DIFFERING[name].items()))
    (old, before), (new, now) = versions.items()
    config = config_of(name, hidden_size=2048) | {"head_dim": 128}
    del config["rope_theta"]

    def bases(**more: Any) -> set[tuple[Any, str]]:
        rows = provenance({**config, **more}, layer_type=path.rpartition(".")[0] or None).rows
        return {(row.value, row.source) for row in rows if row.field == "base"}

    text = (
        f"base={before!r}, the default of .* in transformers {old}, or base={now!r}, that of {new}"
    )
    for version in (None, "5.3.0", 5, "", "main"):
        with pytest.raises(ValueError, match=text):
            RopeSpec.from_config({**config, "transformers_version": version})
    assert (before, f"default of {FAMILIES[name].made_by}, transformers {old}") in bases(
        transformers_version=f"{old}.1"
    )
    assert (now, f"default of {FAMILIES[name].made_by}, transformers {new}") in bases(
        transformers_version=f"{new}.0.dev0"
    )


def test_a_base_that_is_stated_answers() -> None:
    config = config_of("cohere")
    del config["rope_theta"]
    assert RopeSpec.from_config(config, base=8e6).base == 8e6
    zebra = {"model_type": "zebra", **HEADS}
    stated: dict[str, Any] = {"interleaved": False, "rotary_dim": 64, "rope_layers": "all"}
    assert RopeSpec.from_config(zebra, base=7.0, **stated) == RopeSpec(64, base=7.0)
    for wrong in ("x", True, [7.0]):
        with pytest.raises(TypeError, match="the argument base must be a number"):
            RopeSpec.from_config(zebra, base=wrong, **stated)  # type: ignore[arg-type]


# --- parts of composites ------------------------------------------------------------------------------


def test_a_part_has_the_defaults_of_the_whole() -> None:
    voxtral = {"model_type": "voxtral", "text_config": {"model_type": "llama"}}
    assert RopeSpec.from_config(voxtral) == RopeSpec(128, base=1e8)
    (base,) = [row for row in provenance(voxtral).rows if row.field == "base"]
    assert base.source == "default of model_type 'voxtral', transformers 5.23"


def test_a_misspelt_width_of_a_part_is_not_taken_for_the_default() -> None:
    text = {"model_type": "llama", "num_attention_heads": 8, "hidden_sizes": 512}
    with pytest.raises(ValueError, match=r"must be known but got text_config\.hidden_sizes"):
        RopeSpec.from_config({"model_type": "llava", "text_config": text})


# --- keys that a class does not read, or drops --------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LOST: dict[str, tuple[dict[str, Any], str]] = {
    "a width under another program's name": (
        config_of("llama", kv_channels=96),
        "head_dim must have one value but got head_dim = 64 and kv_channels = 96",
    ),
    "a number of channels where a factor is read": (
        config_of("phi", rotary_dim=16),
        "rotary_dim must have one value but got rotary_dim = 16 and",
    ),
    "a base in the section of a class without one": (
        config_of("esm", position_embedding_type="rotary", rope_parameters={"rope_theta": 1e6}),
        "must not be given, as EsmConfig reads no rope section",
    ),
    "a rule by its older key": (
        config_of("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0}),
        "rope_scaling must have rope_type, as the code of model_type 'gemma3_text' reads no type",
    ),
    "sections under the older name": (
        config_of("gemma3_text", rope_scaling={"full_attention": LINEAR}),
        "those of types of layers stand in rope_parameters",
    ),
    "a type of layers that is null": (
        config_of(
            "gemma3_text", rope_parameters={"sliding_attention": None, "full_attention": LINEAR}
        ),
        "the rope section of sliding_attention must not be null, as Gemma3TextConfig gives it its default",
    ),
    "an empty section": (
        config_of("moonshine_streaming", rope_parameters={}),
        "rope_parameters must not be empty",
    ),
    "two sections": (
        config_of("llama", rope_scaling=LINEAR, rope_parameters={"rope_theta": 1e4}),
        "must have one rope section but rope_scaling and rope_parameters differ, of which LlamaConfig takes the first",
    ),
    "a rule beside none": (
        config_of("llama", rope_scaling={"rope_type": "default", "type": "linear", "factor": 8.0}),
        "the kind of scaling must have one value but got",
    ),
    "an alpha": (
        config_of("llama", rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0}),
        "rope_scaling.alpha must not be given for model_type 'llama', as LlamaConfig does not read it, but got 1000.0",
    ),
    "a factor of another program": (
        config_of("llama", rope_scaling={**YARN, "attn_factor": 1.3}),
        "rope_scaling.attn_factor must not be given for model_type 'llama'",
    ),
    "a switch of another program": (
        config_of("llama", rope_scaling={**YARN, "apply_yarn_scaling": False}),
        "rope_scaling.apply_yarn_scaling must not be given for model_type 'llama'",
    ),
    "a length beside sections of types of layers": (
        config_of(
            "gemma3_text",
            original_max_position_embeddings=64,
            rope_parameters={
                "full_attention": {"rope_type": "yarn", "factor": 4.0},
                "sliding_attention": {"rope_type": "default"},
            },
        ),
        "original_max_position_embeddings must stand in the rope section of each type of layers",
    ),
    "a part whose default depends on the rule": (
        config_of("mimo_v2_flash", rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "a rope section of model_type 'mimo_v2_flash' must give partial_rotary_factor",
    ),
    "a width that code computes": (
        config_of("wav2vec2-bert", head_dim=32, position_embeddings_type="rotary"),
        "head_dim must have one value but got hidden_size / num_attention_heads = ",
    ),
    "a length under another program's name": (
        config_of("llama", max_trained_positions=32, rope_scaling={"type": "yarn", "factor": 4.0}),
        "max_trained_positions must not be given for model_type 'llama', as LlamaConfig does not read it",
    ),
    "a length that the class has outside of the section": (
        config_of("phi3", rope_scaling=YARN),
        "original_max_position must have one value but got rope_scaling.original_max_position_embeddings = 64 and "
        "default of Phi3Config, transformers 5.23 = 4096",
    ),
    "a switch that sections of types of layers do not have": (
        config_of(
            "gemma3_text",
            rope_parameters={
                "full_attention": {**YARN, "truncate": False},
                "sliding_attention": {"rope_type": "default"},
            },
        ),
        "truncate must not be given for model_type 'gemma3_text', as Gemma3TextConfig does not read it",
    ),
    "a part that is null": (
        config_of("phi", partial_rotary_factor=None, rope_scaling=LINEAR),
        "partial_rotary_factor must not be null, as null is not the default of PhiConfig, 0.5",
    ),
    "an alias that is null": (
        config_of("jetmoe", head_dim=None),
        "head_dim must not be null, as JetMoeConfig takes it for kv_channels",
    ),
    "a width of latent attention that is null": (
        config_of("deepseek_v3", head_dim=None),
        "head_dim must not be null, as DeepseekV3Config computes it then",
    ),
    "another name of the heads": (
        config_of("dots3_note_vision_encoder", num_heads=3, head_dim=None),
        "num_attention_heads must have one value but got",
    ),
    "a section whose keys are null": (
        config_of("gemma3_text", rope_parameters={"rope_theta": None}),
        "model_type 'gemma3_text' must have a rope section for each type of layers",
    ),
    "a part of another width than that of the code": (
        config_of("glm4_moe_lite", qk_nope_head_dim=96, partial_rotary_factor=0.25),
        "rotary_dim must have one value but got",
    ),
    "a list of which class and code use the zeros only": (
        config_of("muse_spark_text", layer_rope_theta=[5e5] * 8, rope_parameters=LINEAR),
        "base must have one value but got",
    ),
    "first layers without experts": (
        config_of("cohere2_moe", first_k_dense_replace=2),
        "the config must give layer_types",
    ),
    "a text that is missing": (
        {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}},
        "model_type 'mistral3' must have text_config",
    ),
    "a misspelt width": (
        {
            key: value
            for key, value in config_of("mistral", headdim=128).items()
            if key != "head_dim"
        },
        "must be known but got headdim",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_class_would_drop_is_refused(name: str) -> None:
    config, text = LOST[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        RopeSpec.from_config(config)


def test_what_a_class_reads_from_few_keys() -> None:
    """The number of layers between those with full attention; the part that code fills in; a whole beside its parts."""
    modern = config_of("modernbert", num_hidden_layers=6, global_attn_every_n_layers=2)
    del modern["rope_theta"]
    specs = RopeSpec.from_config(modern)
    assert specs.layers == ("full_attention", "sliding_attention") * 3
    section = {"rope_type": "default", "rope_theta": 1e4}
    stated = {**section, "partial_rotary_factor": 0.334}
    both = {"full_attention": stated, "sliding_attention": stated}
    mimo = config_of("mimo_v2_flash", rope_parameters=both) | {"head_dim": 192}
    assert RopeSpec.from_config(mimo) == RopeSpec(192, rotary_dim=64)
    moshi = config_of("moshi", audio_encoder_config={"model_type": "mimi", "rope_theta": 1e4})
    del moshi["rope_theta"]
    assert RopeSpec.from_config(moshi) == RopeSpec(64)
    qwen = {"model_type": "qwen2_vl", "hidden_size": 2048, "num_attention_heads": 16}
    images = {"vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16}}
    assert RopeSpec.from_config({**qwen, **images}).head_dim == 128
