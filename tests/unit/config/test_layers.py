"""Test layers and heads that differ: lists with an entry for each layer, and the keys that state the width of a head.

A key that says which layers rotate, or how wide a head is, is read or is an error; `strict=False` silences neither.
"""

import re
from typing import Any

import pytest

from tightrope import RopeSpec
from tightrope.config import LayerSpecs, keys

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "num_hidden_layers": 4,
}
ZEBRA = {**LLAMA, "model_type": "zebra"}
ANSWERS: dict[str, Any] = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}
SPEC = RopeSpec(128, 5e5)


def read(config: object, **stated: Any) -> Any:
    return RopeSpec.from_config(config, **stated)


def refused(config: object, text: str, kind: type[Exception] = ValueError, **stated: Any) -> None:
    with pytest.raises(kind, match=f"^{re.escape('[from_config] ' + text)}$"):
        RopeSpec.from_config(config, **stated)


# --- which layers rotate --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys_",
    [
        {
            "no_rope_layers": [1, 1, 1, 0]
        },  # 1 is a layer that rotates, in all code that reads the key
        {"no_rope_layers": [True, True, True, False]},
        {"no_rope_layer_interval": 4},
        {"layer_rope_theta": [5e5, 500000, 5e5, 0]},
    ],
    ids=repr,
)
def test_a_family_that_is_not_in_the_table_may_list_the_layers_that_rotate(
    keys_: dict[str, Any],
) -> None:
    config = {**ZEBRA, **keys_}
    specs = read(config, interleaved=False, rotary_dim=128)
    assert specs == {"rope": SPEC, "no_rope": None}
    assert specs.layers == ("rope", "rope", "rope", "no_rope")
    refused(
        config,
        "rope_layers must be ['rope'] for model_type 'zebra' but got 'all'.",
        **ANSWERS,
    )
    with pytest.raises(ValueError, match="interleaved=False, rotary_dim=128\\)"):
        RopeSpec.from_config(config)  # it is not asked which layers rotate


def test_a_list_of_layers_that_all_rotate_answers_the_question_too() -> None:
    for listed in ({"no_rope_layers": [1] * 4}, {"layer_rope_theta": [5e5] * 4}):
        assert read({**ZEBRA, **listed}, interleaved=False, rotary_dim=128) == SPEC
        assert read({**ZEBRA, **listed}, **ANSWERS) == SPEC
    for listed in (
        {"no_rope_layers": []},
        {"no_rope_layers": (1,) * 4, "no_rope_layer_interval": 4},
    ):
        assert read({**LLAMA, **listed}) == read({**ZEBRA, **listed}, **ANSWERS) == SPEC
    none = read({**ZEBRA, "no_rope_layers": [0] * 4}, interleaved=False, rotary_dim=128)
    assert none == {"no_rope": None}


SAY_WHICH_LAYERS: dict[str, Any] = {
    "no_rope_layers": [1, 1, 1, 0],
    "no_rope_layer_interval": 4,
    "nope_layer_interval": 4,
    "no_rope_freq": [0, 1, 1, 1],
    "layer_rope_theta": [5e5, 5e5, 5e5, 0],
    "use_rope": [True, True, False, True],
    "rope_layers": [0, 1],
    "use_rope_layers": "0,1",
    "nope_layers": [3],
    "rope_scaling_layers": [0, 1],
    "nope_on_global_attention": True,
    "rope_skip_layers": 2,
    "use_pe_every_n": 4,
    "no_pe_layers": 4,
    "rotary_interval": 2,
    "attention_rope_pattern": "LLN",
}


@pytest.mark.parametrize("key", SAY_WHICH_LAYERS)
@pytest.mark.parametrize("family", ["llama", "zebra"])
def test_a_key_that_says_which_layers_rotate_is_never_ignored(family: str, key: str) -> None:
    read_here = {"no_rope_layers", "no_rope_layer_interval", "layer_rope_theta"}
    if family == "zebra" and key in read_here:
        return  # tested above
    config = {**LLAMA, "model_type": family, key: SAY_WHICH_LAYERS[key]}
    text = (
        f"every key that may say which layers rotate must be known but got {key}; pass a config without it only if "
        f"it has no effect."
    )
    stated = {} if family == "llama" else ANSWERS
    for strict in (True, False):
        refused(config, text, **stated, strict=strict)


def test_such_a_key_in_another_format_or_section_is_never_ignored() -> None:
    gguf = {
        "general.architecture": "llama",
        "llama.embedding_length": 4096,
        "llama.attention.head_count": 32,
        "llama.rope.freq_base": 500000.0,
        "llama.attention.rope_pattern": [1, 0],
    }
    megatron = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "rotary_base": 500000,
        "rotary_interleaved": False,
        "rotary_percent": 1.0,
        "no_rope_freq": 4,
    }
    section = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "layers": [0, 1]}}
    inside = {**LLAMA, "attention": {"nope_every": 4}}
    for config in (gguf, megatron, section, inside):
        with pytest.raises(ValueError, match="may say which layers rotate must be known but got"):
            RopeSpec.from_config(config, strict=False)


def test_other_unknown_keys_can_still_be_a_warning() -> None:
    with pytest.warns(UserWarning, match="known but got swa_rope_theta; strict=False ignores them"):
        assert read({**LLAMA, "swa_rope_theta": 1e4}, strict=False) == SPEC
    section = {
        "rope_type": "linear",
        "factor": 2.0,
        "short_factor": [1.0] * 64,
    }  # of another rule, for each pair
    with pytest.warns(
        UserWarning, match=r"known but got rope_scaling\.short_factor; strict=False ignores them"
    ):
        assert read({**LLAMA, "rope_scaling": section}, strict=False).scaling.factor == 2


@pytest.mark.parametrize("empty", [[], (), set(), frozenset(), {}, "", b"", b"all"], ids=repr)
def test_no_layer_is_not_an_answer(empty: Any) -> None:
    text = f"rope_layers must be 'all', a collection of layer types that is not empty, or None but got {empty!r}."
    for config in (LLAMA, ZEBRA, {**ZEBRA, "layer_types": ["full_attention"] * 4}):
        refused(config, text, TypeError, **{**ANSWERS, "rope_layers": empty})


# --- lists with an entry for each layer -------------------------------------------------------------

COHERE = {**LLAMA, "model_type": "cohere2", "layer_types": ["sliding_attention"] * 4}
SMOLLM = {**LLAMA, "model_type": "smollm3"}
MUSE: dict[str, Any] = {
    "model_type": "muse_glimmer_text",
    "head_dim": 128,
    "rope_theta": 1e4,
    "num_hidden_layers": 4,
}
V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_hidden_layers": 4,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
}
LISTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "layer_types": (COHERE, ["sliding_attention"] * 3 + ["full_attention"]),
    "layers_block_type": (LLAMA, ["attention", "mamba", "attention", "mamba"]),
    "no_rope_layers": (SMOLLM, [1, 1, 1, 0]),
    "layer_rope_theta": (MUSE, [1e4, 0, 1e4, 0]),
    "compress_ratios": (V4, [0, 4, 128, 4]),
}


@pytest.mark.parametrize("key", LISTS)
def test_a_list_has_an_entry_for_each_layer(key: str) -> None:
    config, listed = LISTS[key]
    read({**config, key: listed})
    rule = f"{key} must have an entry for each of 4 layers but has"
    refused({**config, key: listed[:3]}, f"{rule} 3.")
    more = {**config, key: [*listed, listed[0]]}
    if key == "compress_ratios":  # the published format lists layers that only predict
        assert read(more).layers == read({**config, key: listed}).layers
    else:
        refused(more, f"{rule} 5.")
        predicts = {
            **more,
            "num_nextn_predict_layers": 1,
        }  # files of Step 3.5 list these layers too
        assert read(predicts) == read({**config, key: listed})
        if isinstance(read(predicts), LayerSpecs):
            assert read(predicts).layers == read({**config, key: listed}).layers
        refused({**predicts, key: [*more[key], listed[0]]}, f"{rule} 6.")
    for wrong in ("sliding_attention", {"a": 1}, 4, True):
        text = f"{key} must be a list but got {wrong!r}."
        refused({**config, key: wrong}, text, TypeError)


@pytest.mark.parametrize("wrong", [[2, 1, 1, 0], [1, "0", "1", 0], [1, 1, 1, None], [0.5, 1, 1, 1]])
def test_no_rope_layers_holds_flags(wrong: list[Any]) -> None:
    for config, stated in ((SMOLLM, {}), (ZEBRA, ANSWERS)):
        first = next(flag for flag in wrong if flag != 1)
        text = f"no_rope_layers must hold 0 and 1 only but got {first!r}."
        refused({**config, "no_rope_layers": wrong}, text, **stated)


def test_ratios_and_types_must_agree() -> None:
    types = ["sliding_attention", "compressed_sparse_attention"] * 2
    ratios = [0, 4, 0, 4, 0]
    assert read({**V4, "compress_ratios": ratios, "layer_types": types}).layers == tuple(types)
    text = (
        "layer 3 must have one value but got layer_types[3] = 'compressed_sparse_attention' and "
        "compress_ratios[3] = 'sliding_attention'."
    )
    refused({**V4, "compress_ratios": [0, 4, 0, 0], "layer_types": types}, text)


# --- the width of a head ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*keys.HEAD_DIM, *keys.HEAD_DIM_ELSEWHERE])
def test_every_key_for_the_width_of_a_head_is_read_or_contradicts(key: str) -> None:
    assert read({**ZEBRA, key: 256}, **{**ANSWERS, "rotary_dim": 256}) == RopeSpec(256, 5e5)
    assert read({**LLAMA, key: 128}) == SPEC
    if key == "head_dim":
        return
    text = f"head_dim must have one value but got head_dim = 128 and {key} = 256."
    refused({**ZEBRA, "head_dim": 128, key: 256}, text, **ANSWERS)
    refused({**LLAMA, "head_dim": 128, key: 256}, text)
    refused({**ZEBRA, key: [128, 256]}, f"{key} must be an int but got [128, 256].", TypeError)
    if key in keys.HEAD_DIM_ELSEWHERE:  # the code of a known family does not read these
        derived = "hidden_size / num_attention_heads = 4096 / 32 = 128"
        text = f"head_dim must have one value but got {derived} and {key} = 256."
        refused({**LLAMA, key: 256}, text)


def test_settings_of_some_layers_give_no_width_to_the_others() -> None:
    """Step 3.5 has the numbers of heads of its sliding layers in a section of their own."""
    other = {"attention_other_setting": {"head_dim": 64, "num_attention_heads": 96}}
    derived = "hidden_size / num_attention_heads = 4096 / 32 = 128"
    for config, stated, first in (
        (LLAMA, {}, derived),
        (ZEBRA, ANSWERS, derived),
        ({**ZEBRA, "head_dim": 128}, ANSWERS, "head_dim = 128"),
        ({**ZEBRA, "d_head": 128}, ANSWERS, "d_head = 128"),
    ):
        text = f"head_dim must have one value but got {first} and attention_other_setting.head_dim = 64."
        refused({**config, **other}, text, **stated)
        other_width = {"attention_other_setting": {"head_dim": 128}}
        assert read({**config, **other_width}, **stated) == SPEC


def test_the_names_of_the_width_of_a_head_include_those_of_other_libraries() -> None:
    known = {*keys.HEAD_DIM, *keys.HEAD_DIM_ELSEWHERE}
    seen = "attention_head_dim d_head d_kv dim_head qk_head_dim key_channels attention_head_size head_width".split()
    more = "head_size_qk size_per_head hidden_size_per_head attn_head_dim query_head_dim decoder_head_dim".split()
    assert {*seen, *more} <= known


def test_zamba_has_heads_of_twice_the_hidden_size() -> None:
    """Its rotary module has 112 frequencies: transformers computes heads of 2 * 3584 / 32 channels."""
    zamba = {
        "model_type": "zamba2",
        "hidden_size": 3584,
        "num_attention_heads": 32,
        "attention_head_dim": 224,
        "use_mem_rope": True,
        "rope_theta": 10000,
    }
    assert read(zamba, interleaved=False, rotary_dim=224, rope_layers="all") == RopeSpec(224)
    text = "head_dim must have one value but got kv_channels = 112 and attention_head_dim = 224."
    refused({**zamba, "kv_channels": 112}, text, **ANSWERS)


def test_latent_attention_has_both_widths() -> None:
    config = {**LLAMA, "model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    for key in ("head_dim", "attention_head_dim", "d_head"):
        for width in (64, 192):
            assert read({**config, key: width}).head_dim == 192
        text = f"head_dim must have one value but got {key} = 96 and qk_nope_head_dim + qk_rope_head_dim = 192."
        refused({**config, key: 96}, text)
    assert read({**config, "qk_head_dim": 192}).head_dim == 192
    text = "head_dim must have one value but got qk_nope_head_dim + qk_rope_head_dim = 192 and qk_head_dim = 64."
    refused({**config, "qk_head_dim": 64}, text)


HUGE = 10**401


@pytest.mark.parametrize("key", ["head_dim", "hidden_size", "attention_head_dim", "rotary_dim"])
def test_a_width_that_no_head_has_is_a_sentence(key: str) -> None:
    for family in ("llama", "zebra", "glm"):
        config = {**LLAMA, "model_type": family, key: HUGE, "partial_rotary_factor": 0.5}
        with pytest.raises(ValueError, match=r"^\[\w+\] "):
            RopeSpec.from_config(config, **(ANSWERS if family == "zebra" else {}))
    text = "head_dim must be at most 65536 but got 65537."
    refused({**LLAMA, "head_dim": 65537}, text)
    latent = {"qk_nope_head_dim": 65536, "qk_rope_head_dim": 64}
    text = "qk_nope_head_dim + qk_rope_head_dim must be at most 65536 but got 65600."
    refused({**LLAMA, **latent}, text)


def test_a_slice_is_checked_before_anything_of_its_size_is_made() -> None:
    """With 10**12 pairs, axes take all memory."""
    dino = {
        "model_type": "dinov3_vit",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "rope_theta": 100.0,
    }
    text = r"^\[RopeSpec\] channels \[start, start \+ rotary_dim\) must lie in \[0, 64\)"
    for config in (dino, {**dino, "model_type": "pixtral"}):
        with pytest.raises(ValueError, match=text):
            RopeSpec.from_config(config, rotary_dim=10**12)


@pytest.mark.parametrize("name", ["layer_type", "section"])
@pytest.mark.parametrize("value", [["a"], {"a": 1}, 3, b"a"], ids=repr)
def test_any_other_object_is_no_layer_type_and_no_section(name: str, value: object) -> None:
    text = {
        "layer_type": f"layer_type must be one of the config's layer types but got {value!r}; the config has a.",
        "section": f"section must be one of the config's sections but got {value!r}; the config has none.",
    }
    refused({**LLAMA, "layer_types": ["a"] * 4}, text[name], **{name: value})


# --- heads of several widths ------------------------------------------------------------------------

TYPES = ["sliding_attention", "full_attention"] * 2
SECTIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
WIDE: dict[str, Any] = {
    "model_type": "zebra",
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": TYPES,
    "rope_parameters": SECTIONS,
    "per_layer_config": {"01": {"head_dim": 512}, 3: {"head_dim": 512}},
}
WIDE_SPECS = {"sliding_attention": RopeSpec(256), "full_attention": RopeSpec(512, base=1e6)}


def test_heads_of_several_widths_are_asked_about_one_by_one() -> None:
    calls = (
        "RopeSpec.from_config(config, layer_type='sliding_attention', interleaved=False, rotary_dim=256) and "
        "RopeSpec.from_config(config, layer_type='full_attention', interleaved=False, rotary_dim=512)"
    )
    advice = (
        "layer_type with the rotary_dim of its layers, as heads have 256 channels in sliding_attention and 512 "
        "channels in full_attention"
    )
    text = (
        "the config must give the channels that rotate, as the table of families does not contain model_type 'zebra'; "
        f"pass {advice}; for code like Llama's: {calls}."
    )
    refused(WIDE, text, interleaved=False)
    for width in (256, 512):  # one number cannot answer for both
        refused(WIDE, text, interleaved=False, rotary_dim=width)
    for call, (name, spec) in zip(calls.split(" and "), WIDE_SPECS.items(), strict=True):
        assert eval(call, {"RopeSpec": RopeSpec, "config": WIDE}) == spec
        assert f"layer_type={name!r}" in call
    half = read(WIDE, layer_type="full_attention", interleaved=False, rotary_dim=128, start=384)
    assert half == RopeSpec(512, 1e6, 128, 384)
    parted = {**WIDE, "partial_rotary_factor": 0.5}  # a part of each width
    assert {spec.rotary_dim for spec in read(parted, interleaved=False).values()} == {128, 256}


def test_the_text_of_embedding_gemma_2_has_wide_heads_where_attention_is_full() -> None:
    assert read({**WIDE, "model_type": "embedding_gemma2_text"}) == WIDE_SPECS


def test_the_width_where_attention_is_full_may_be_stated_twice() -> None:
    for model_type in ("gemma4_text", "embedding_gemma2_text"):
        both = {**WIDE, "model_type": model_type, "global_head_dim": 512}
        assert read(both) == WIDE_SPECS
        assert read({**both, "per_layer_config": {"1": {"head_dim": 512}}}) == WIDE_SPECS
        text = "head_dim must have one value but got global_head_dim = 512 and per_layer_config.1.head_dim = 128."
        refused({**both, "per_layer_config": {"1": {"head_dim": 128}}}, text)


def test_a_width_of_single_layers_is_read_or_refused() -> None:
    single = {"per_layer_config": {"1": {"head_dim": 64}}}
    text = (
        "head_dim must have one value but got per_layer_config.1.head_dim = 64 and hidden_size / "
        "num_attention_heads = 4096 / 32 = 128."
    )
    refused({**LLAMA, **single}, text)
    refused({**ZEBRA, **single}, text, **ANSWERS)
    refused({**LLAMA, **single, "layer_types": ["a"] * 4}, text)
    assert read({**LLAMA, "per_layer_config": {"1": {"head_dim": 128}}}) == SPEC
    every = {str(n): {"head_dim": 64} for n in range(4)}
    assert read({**LLAMA, "layer_types": ["a"] * 4, "per_layer_config": every}) == RopeSpec(64, 5e5)
    some = {
        **WIDE,
        "model_type": "embedding_gemma2_text",
        "per_layer_config": {"1": {"head_dim": 512}},
    }
    text = (
        "head_dim must have one value but got per_layer_config.1.head_dim = 512 and head_dim = 256."
    )
    refused(some, text)


@pytest.mark.parametrize("number", ["4", "x", "-1", "1.0", "", "9" * 5000, 4, 1.5, None, (0,)])
def test_keys_of_a_single_layer_are_of_one_that_exists(number: object) -> None:
    for family in ("zebra", "embedding_gemma2_text"):
        config = {**WIDE, "model_type": family, "per_layer_config": {number: {"head_dim": 512}}}
        with pytest.raises(
            ValueError, match=r"^\[from_config\] per_layer_config must be of layers 0 to 3 but"
        ):
            RopeSpec.from_config(config, interleaved=False)
    wrong = {**WIDE, "per_layer_config": [{"head_dim": 512}]}
    text = "per_layer_config must be a mapping but got [{'head_dim': 512}]."
    refused(wrong, text, TypeError, interleaved=False)
