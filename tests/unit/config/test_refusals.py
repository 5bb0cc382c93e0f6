"""Test that `from_config` refuses what contradicts itself, is incomplete or is not known, in one sentence."""

import re
from typing import Any

import pytest

from tests.support.model_configs import QWEN2_VL
from tests.support.reading import (
    LAYERS,
    LLAMA,
    PAIRING,
    asked,
    axial,
    gguf,
    llama,
    read,
    refused,
    two,
    unknown,
    whole_head,
    without,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
GPTJ = {"model_type": "gptj", "n_embd": 256, "n_head": 4, "rotary_dim": 32}
VLLM = {"head_size": 64, "rotary_dim": 64, "rope_theta": 1e4, "is_neox_style": True}
MEGATRON = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rotary_base": 10000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
}
ADD_A_BASE = (
    "base=10000.0 if it is that of the paper, or a config with one of rope_theta, rotary_emb_base, rotary_base, rope_base, "
    "as its keys are"
)
CHANNELS = "rotary_dim=128 if all 128 channels of a head rotate, or the number that do, with start if they are not the first"
ADD_TYPES = f"{LAYERS} (to name some of them, add layer_types to the config)"
LATENT = "latent attention must have qk_nope_head_dim and qk_rope_head_dim but the config has"


def everything(name: str) -> str:
    """Return the sentence that asks for all facts about a family."""
    return asked(
        "the pairing of channels, the channels that rotate and the layers that rotate",
        name,
        PAIRING,
        CHANNELS,
        ADD_TYPES,
        example="interleaved=False, rotary_dim=128, rope_layers='all'",
    )


# What is wrong -> the configuration, and the sentence.
WRONG: dict[str, tuple[object, str]] = {
    "two bases": (
        llama(rope_parameters={"rope_theta": 10000.0}),
        two("base", "rope_parameters.rope_theta = 10000.0", "rope_theta = 500000.0"),
    ),
    "a fraction and a width": (
        llama(partial_rotary_factor=0.5, rotary_dim=32),
        whole_head("llama", "64 from partial_rotary_factor = 0.5 of 128"),
    ),
    "two kinds of scaling": (
        llama(rope_scaling={**YARN, "type": "linear"}),
        two(
            "the kind of scaling", "rope_scaling.rope_type = 'yarn'", "rope_scaling.type = 'linear'"
        ),
    ),
    "two sections": (
        llama(rope_scaling=YARN, rope_parameters={**YARN, "factor": 8.0}),
        two("factor", "rope_scaling.factor = 4.0", "rope_parameters.factor = 8.0"),
    ),
    "two original lengths": (
        llama(rope_scaling=YARN, original_max_position_embeddings=4096),
        two(
            "original_max_position",
            "rope_scaling.original_max_position_embeddings = 8192",
            "original_max_position_embeddings = 4096",
        ),
    ),
    "two context lengths": (
        llama(rope_scaling=DYNAMIC, max_position_embeddings=8192, max_sequence_length=2048),
        two("the context length", "max_position_embeddings = 8192", "max_sequence_length = 2048"),
    ),
    "an original length of dynamic scaling": (
        llama(
            rope_scaling={**DYNAMIC, "original_max_position_embeddings": 1024},
            max_position_embeddings=8192,
        ),
        "'dynamic' scaling must begin at one length but the config has "
        "rope_scaling.original_max_position_embeddings = 1024 and max_position_embeddings = 8192, which transformers "
        "takes.",
    ),
    "one mscale": (
        llama(rope_scaling={**YARN, "factor": 40.0, "mscale": 0.707}),
        "mscale and mscale_all_dim must both be given and not 0 but the config has only rope_scaling.mscale = 0.707: "
        "DeepSeek's code scales attention by 1.2608, transformers ignores the key and scales by 1.36889.",
    ),
    "a base of code with a constant": (
        {**GPTJ, "rope_theta": 5e5},
        "base must be 10000, as the code of model_type 'gptj' reads no key for it, but got 500000.0 from rope_theta.",
    ),
    "scaling of code without": (
        {**GPTJ, "rope_scaling": LINEAR},
        "scaling must be 'default', as the code of model_type 'gptj' reads no key for it, but got 'linear' from "
        "rope_scaling.rope_type.",
    ),
    "two factors on the channels": (
        llama(
            model_type="internlm2", rope_scaling={**YARN, "attention_factor": 1.5, "attn_factor": 2}
        ),
        two("attention_factor", "attention_factor = 1.5", "rope_scaling.attn_factor = 2"),
    ),
    "two pairings": (
        {**VLLM, "rope_interleaved": True},
        two("interleaved", "rope_interleaved = True", "is_neox_style = False"),
    ),
    "a pairing that is not the family's": (
        llama(rope_interleaved=True),
        "interleaved must have one value but got True from rope_interleaved and False from model_type 'llama'; "
        "pass interleaved=True if the key is right.",
    ),
    "a factor twice in GGUF": (
        gguf("qwen2", rope__scaling__factor=2.0, rope__scale_linear=4.0),
        two("factor", "qwen2.rope.scaling.factor = 2.0", "qwen2.rope.scale_linear = 4.0"),
    ),
    "a factor without a rule": (
        llama(rope_scaling={"rope_type": "default", "factor": 2.0}),
        unknown("rope_scaling.factor"),
    ),
    "misspelt keys": (
        llama(rope_tehta=1e6, rope_tipe="yarn"),
        unknown("rope_tehta (perhaps rope_theta)", "rope_tipe"),
    ),
    "a misspelt width": (
        llama(rope_tehta=1e6, rotary_fraction=0.5),
        "every key that may give a width or the pairing must be known but got rotary_fraction (perhaps "
        "rotary_emb_fraction); pass a config without it only if it has no effect, or make a RopeSpec by hand.",
    ),
    "a section without a type": (
        llama(rope_scaling={"factor": 2.0}),
        "a rope section must name its rope_type but has only rope_scaling.factor.",
    ),
    "an unknown type": (
        llama(rope_scaling={"rope_type": "magic"}),
        "rope_scaling.rope_type must be one of axial, deepseek_yarn, default, dynamic, given, linear, llama3, "
        "longrope, mrope, none, proportional, su, yarn but got 'magic'.",
    ),
    "a rule without its parameters": (
        llama(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "scaling by 'llama3' must have low_freq_factor, high_freq_factor, original_max_position_embeddings but has "
        "only factor, rope_type.",
    ),
    "a fraction above 1": (
        llama(partial_rotary_factor=2),
        "partial_rotary_factor must be above 0 and at most 1 but got 2.",
    ),
    "a fraction of nothing": (
        llama(model_type="phi3", partial_rotary_factor=0.01),
        "partial_rotary_factor must give at least 2 of 128 channels but got 0.01.",
    ),
    "a fraction of latent attention that is text": (
        {
            **llama(model_type="deepseek_v3", partial_rotary_factor="half"),
            **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
        },
        "partial_rotary_factor must be above 0 and at most 1 but got 'half'.",
    ),
    "a part where the code rotates all channels": (
        llama(rope_parameters={"partial_rotary_factor": 0.5}),
        whole_head("llama", "64 from rope_parameters.partial_rotary_factor = 0.5 of 128"),
    ),
    "a part by a key that transformers does not read": (
        llama(model_type="minimax", rotary_dim=64),
        whole_head("minimax", "64 from rotary_dim"),
    ),
    "a missing number of channels": (
        {"model_type": "gptj", "n_embd": 4096, "n_head": 16},
        "the config must give the channels that rotate; pass rotary_dim=64, the default of GPTJConfig, transformers 5.23, or "
        "the number that do",
    ),
    "a missing head width": (
        llama(model_type="gemma"),
        "a config with head_dim, as model_type 'gemma' has another one than hidden size / heads; "
        "transformers.AutoConfig.from_pretrained(…) gives what GemmaConfig fills in.",
    ),
    "no width": (
        {"model_type": "llama", "rope_theta": 1e4, "hidden_size": 64},
        "the config must give the width of a head; pass a config with one of head_dim, kv_channels, head_size, or with "
        "hidden_size and num_attention_heads, as its keys are hidden_size, model_type, rope_theta",
    ),
    "a width that does not divide": (
        llama(num_attention_heads=33),
        "hidden_size must be a multiple of num_attention_heads but got 4096 and 33.",
    ),
    "an unknown family": (llama(model_type="zebra"), everything("model_type 'zebra'")),
    "an unknown architecture of GGUF": (
        without(gguf("zebra"), "zebra.block_count"),
        everything("GGUF architecture 'zebra'"),
    ),
    "no family": (
        without(LLAMA, "model_type"),
        asked(
            "the pairing of channels and the channels that rotate",
            "a config without model_type",
            PAIRING,
            CHANNELS,
            example="interleaved=False, rotary_dim=128",
        ),
    ),
    "Megatron without a pairing": (
        without(MEGATRON, "rotary_interleaved"),
        asked(
            "the pairing of channels", "Megatron's arguments", PAIRING, example="interleaved=False"
        ),
    ),
    "latent attention, one key missing": (
        llama(model_type="deepseek_v3", qk_rope_head_dim=64),
        f"{LATENT} qk_rope_head_dim.",
    ),
    "latent attention, both keys missing": (llama(model_type="deepseek_v2"), f"{LATENT} neither."),
    "no sections": (
        gguf("qwen2vl"),
        "GGUF architecture 'qwen2vl' has positions of three coordinates, so the config must give mrope_section.",
    ),
    "sections that the family weaves otherwise": (
        {**QWEN2_VL, "mrope_interleaved": True},
        "mrope_interleaved must be False for model_type 'qwen2_vl' but got True.",
    ),
    "sections in a family without": (
        llama(rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
        "rope_scaling.mrope_section must come with mrope_interleaved, as model_type 'llama' is not known to have "
        "several axes.",
    ),
    "axial in a family without": (
        llama(rope_scaling={"type": "axial"}),
        axial("rope_scaling.type", "llama"),
    ),
    "keys beside layer types": (
        llama(rope_parameters={"full_attention": {"rope_theta": 1.0}, "rope_theta": 2.0}),
        "a rope section must hold keys or layer types but got both: rope_parameters.rope_theta and full_attention.",
    ),
    "a layer type without a section": (
        llama(
            model_type="lfm3",
            layer_types=["a", "b", "conv"],
            rope_parameters={"a": {"rope_type": "default"}},
        ),
        "each layer type must have a rope section but the config has none for b.",
    ),
    "a layer type with a line break and a code for a terminal": (
        llama(
            model_type="lfm3",
            layer_types=["a", "b\n\x1b[1m"],
            rope_parameters={"a": {"rope_type": "default"}},
        ),
        r"each layer type must have a rope section but the config has none for b\n\x1b[1m.",
    ),
    "no rotary embedding": (
        {"model_type": "zamba", "use_mem_rope": False, **VLLM},
        "the config has no RoPE: use_mem_rope is False.",
    ),
    "GGUF without frequencies": (
        without(gguf("qwen2"), "qwen2.rope.freq_base"),
        f"{ADD_A_BASE} general.architecture, qwen2.attention.head_count, qwen2.block_count, qwen2.embedding_length.",
    ),
    "no base among many keys": (
        {"model_type": "zebra", "hidden_size": 64, **dict.fromkeys("abcdefghij")},
        f"{ADD_A_BASE} a, b, c, d, e, f, g, h and 4 more",
    ),
    "an empty config": (
        {},
        "the config must give the width of a head, the base of the frequencies, if its model has RoPE, the pairing of "
        "channels and the channels that rotate, as the table of families does not contain a config without model_type",
    ),
    "Megatron with two scalings": (
        MEGATRON
        | {"use_rope_scaling": True, "rope_scaling_factor": 8.0}
        | {"rotary_seq_len_interpolation_factor": 4},
        "only one kind of scaling can apply but got use_rope_scaling and rotary_seq_len_interpolation_factor.",
    ),
    "Megatron with learned positions": (
        {**MEGATRON, "position_embedding_type": "learned_absolute"},
        "the config has no RoPE: position_embedding_type is 'learned_absolute'.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configurations_are_refused(case: str) -> None:
    refused(*WRONG[case])


NOT_A_CONFIG = "config must be a mapping, a config object, a model or a path but got 5."


@pytest.mark.parametrize(
    "config, stated, kind, text",
    [
        (llama(rope_scaling=4.0), {}, TypeError, "rope_scaling must be a mapping but got 4.0."),
        (
            {**VLLM, "is_neox_style": "yes"},
            {},
            TypeError,
            "is_neox_style must be a bool but got 'yes'.",
        ),
        (
            LLAMA,
            {"interleaved": 1},
            TypeError,
            "interleaved must be a bool or None but got 1.",
        ),
        (5, {}, TypeError, NOT_A_CONFIG),
        (
            QWEN2_VL,
            {"section": "audio_config"},
            ValueError,
            "section must be one of the config's sections but got 'audio_config'; the config has vision_config.",
        ),
        (
            gguf("qwen2"),
            {"section": "text_config"},
            ValueError,
            "section must be None for GGUF architecture 'qwen2', which has no sections, but got 'text_config'.",
        ),
        (
            LLAMA,
            {"layer_type": "sliding"},
            ValueError,
            "layer_type must be one of the config's layer types but got 'sliding'; the config has one type only, "
            "without a name.",
        ),
    ],
)
def test_wrong_types_and_arguments_are_refused(
    config: object, stated: dict[str, Any], kind: type[Exception], text: str
) -> None:
    refused(config, text, kind, **stated)


def test_sections_of_another_sum_are_refused_by_the_spec() -> None:
    section = {"type": "mrope", "mrope_section": [8, 8, 8]}
    text = "[RopeSpec] axes must have one entry for each of the 64 pairs that rotate but got 24; rotary_dim=48 would fit."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read({**QWEN2_VL, "rope_scaling": section})
