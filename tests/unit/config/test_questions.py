"""Test what no key and no table gives: `from_config` asks for it, in one error, and each answer works.

Layers are asked for too: a type of layer that has no spec is an error, never None in silence.
"""

import math
import re
from typing import Any

import pytest

from tests.support import oracle_frequencies as truth
from tightrope import RopeSpec
from tightrope.config import LayerSpecs, provenance
from tightrope.frequencies import YaRN

ZEBRA = {
    "model_type": "zebra",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "layer_types": ["full_attention", "sliding_attention", "conv"],
}
ANSWERS: dict[str, Any] = {"interleaved": True, "rotary_dim": 64, "rope_layers": "all"}
LLAMA = {**ZEBRA, "model_type": "llama"}


def read(config: object, **stated: Any) -> Any:
    return RopeSpec.from_config(config, **stated)


def refused(config: object, text: str, kind: type[Exception] = ValueError, **stated: Any) -> None:
    with pytest.raises(kind, match=f"^{re.escape('[from_config] ' + text)}$"):
        RopeSpec.from_config(config, **stated)


# --- an unknown family ----------------------------------------------------------------------------


def test_every_answer_is_used() -> None:
    whole = RopeSpec(128, 5e5, interleaved=True)
    part = RopeSpec(128, 5e5, 64, interleaved=True)
    assert read(ZEBRA, **ANSWERS) == part
    assert read(ZEBRA, **{**ANSWERS, "rotary_dim": 128}) == whole
    assert read(ZEBRA, **ANSWERS, start=64) == RopeSpec(128, 5e5, 64, 64, interleaved=True)
    specs = read(ZEBRA, **{**ANSWERS, "rope_layers": ["sliding_attention"]})
    assert specs == {"full_attention": None, "sliding_attention": part}
    assert [specs.of(layer) for layer in range(3)] == [None, part, None]


def test_the_source_of_an_answer_is_the_argument() -> None:
    stated = {**ANSWERS, "rope_layers": ("sliding_attention",)}
    sources = {row.field: row.source for row in provenance(ZEBRA, **stated, start=0).rows}
    names = {"interleaved": "interleaved", "rotary_dim": "rotary_dim", "start": "start"}
    for field, name in {**names, "no RoPE": "rope_layers"}.items():
        assert sources[field] == f"the argument {name}"


def test_only_what_is_missing_is_asked() -> None:
    def asked(config: dict[str, Any], **stated: Any) -> set[str]:
        with pytest.raises(ValueError, match="the table of families does not contain") as caught:
            RopeSpec.from_config(config, **stated)
        call = str(caught.value).rpartition("RopeSpec.from_config(config, ")[2]
        return set(re.findall(r"(\w+)=", call)) - set(stated)

    every = {"interleaved", "rotary_dim", "rope_layers"}
    assert asked(ZEBRA) == every
    for name in every:
        assert asked(ZEBRA, **{name: ANSWERS[name]}) == every - {name}
    for key, value in {"rotary_dim": 64, "partial_rotary_factor": 0.5, "rotary_pct": 1.0}.items():
        assert asked({**ZEBRA, key: value}) == every - {"rotary_dim"}
    assert asked({**ZEBRA, "is_neox_style": False}) == every - {"interleaved"}
    latent = {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32}
    assert asked({**ZEBRA, **latent}) == every - {"rotary_dim"}
    full = {"rope_theta": 5e5, "rope_type": "default"}
    complete = {"rope_parameters": {"full_attention": full, "sliding_attention": full}}
    assert asked({**ZEBRA, **complete}) == every - {"rope_layers"}
    one = {"head_dim": 64, "rope_theta": 1e4}  # one rotation, and no model
    assert asked(one) == every - {"rope_layers"}
    assert asked({**one, "num_hidden_layers": 2}) == every
    gguf = {
        "general.architecture": "zebra",
        "zebra.attention.key_length_mla": 192,
        "zebra.rope.dimension_count": 64,
        "zebra.rope.freq_base": 1e4,
    }
    assert asked(gguf) == {"interleaved", "start", "rope_layers"}
    assert asked({**gguf, "zebra.rope.dimension_count": 192}) == {"interleaved", "rope_layers"}
    wanted = RopeSpec(192, rotary_dim=64, start=128)
    assert read(gguf, interleaved=False, start=128, rope_layers="all") == wanted


def test_layers_can_be_named_where_the_config_lists_them() -> None:
    text = (
        "the config must give the layers that rotate, as the table of families does not contain model_type "
        "'zebra'; pass rope_layers='all' if all layers with attention rotate, or a list of the types that do, of "
        "'full_attention', 'sliding_attention'; for code like Llama's: RopeSpec.from_config(config, "
        "interleaved=True, rotary_dim=64, rope_layers='all')."
    )
    refused(ZEBRA, text, interleaved=True, rotary_dim=64)
    text = (
        "the config must give the first channel that rotates, as the table of families does not contain GGUF "
        "architecture 'zebra'; pass start=0 if the first 64 channels of a head rotate, or the first that does; for "
        "code like Llama's: RopeSpec.from_config(config, interleaved=True, start=0, rope_layers='all')."
    )
    gguf = {
        "general.architecture": "zebra",
        "zebra.attention.key_length": 128,
        "zebra.rope.dimension_count": 64,
        "zebra.rope.freq_base": 1e4,
    }
    refused(gguf, text, interleaved=True, rope_layers="all")
    gguf = {**gguf, "layer_types": ["a", "b"]}
    specs = read(gguf, interleaved=True, start=0, rope_layers=["b"])
    assert specs == {"a": None, "b": RopeSpec(128, rotary_dim=64, interleaved=True)}


def test_a_section_for_each_type_of_layer_may_lack_those_that_do_not_rotate() -> None:
    config = {**ZEBRA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}
    text = (
        "each layer type must have a rope section but the config has none for sliding_attention; if they do not "
        "rotate, pass rope_layers, a list of the types that do."
    )
    refused(config, text, interleaved=True, rotary_dim=64)
    specs = read(config, **{**ANSWERS, "rope_layers": ["full_attention"]})
    wanted = RopeSpec(128, 5e5, 64, interleaved=True)
    assert specs == {"full_attention": wanted, "sliding_attention": None}


def test_an_error_that_no_answer_mends_comes_first() -> None:
    axial = {**ZEBRA, "rope_parameters": {"rope_type": "axial"}}
    refused(
        axial,
        "rope_parameters.rope_type is 'axial', but model_type 'zebra' is not known to have several axes.",
    )
    wrong = {**ZEBRA, "rope_scaling": {"type": "linear", "factor": "x"}}
    with pytest.raises(TypeError, match="factor must be"):
        RopeSpec.from_config(wrong)


@pytest.mark.parametrize("config", [ZEBRA, {**ZEBRA, "layer_types": None, "num_hidden_layers": 3}])
def test_the_call_of_a_refusal_gives_a_spec(config: dict[str, Any]) -> None:
    for one in (config, {"text_config": config}):
        with pytest.raises(ValueError, match="for code like Llama's") as caught:
            RopeSpec.from_config(one)
        call = re.search(r"RopeSpec\.from_config\((.*)\)\.$", str(caught.value))
        assert call is not None
        made = eval(f"read({call[1]})", {"read": read, "config": one})
        assert made == RopeSpec(128, 5e5)


# --- arguments that contradict --------------------------------------------------------------------


def test_the_example_begins_at_the_first_channel_that_rotates() -> None:
    stated = {key: value for key, value in ANSWERS.items() if key != "rotary_dim"} | {"start": 64}
    text = (
        "the config must give the channels that rotate, as the table of families does not contain model_type 'zebra'; "
        "pass rotary_dim=64 if all 64 channels from 64 on rotate, or the number that do; for code like Llama's: "
        "RopeSpec.from_config(config, interleaved=True, rotary_dim=64, start=64, rope_layers='all')."
    )
    refused(ZEBRA, text, **stated)


def test_an_empty_config_has_no_keys_to_list() -> None:
    ways = "rope_theta, rotary_emb_base, rotary_base, rope_base"
    refused(
        {},
        f"the config must give the base of the frequencies: add one of {ways} to its keys, which are none.",
    )


def test_arguments_must_agree_with_keys_and_families() -> None:
    assert read(LLAMA, rotary_dim=128, start=0, rope_layers="all") == RopeSpec(128, 5e5)
    assert read(LLAMA, rope_layers={"full_attention", "sliding_attention"}) == RopeSpec(128, 5e5)
    text = (
        "rotary_dim must be 128, as the code of model_type 'llama' rotates all channels of a head, but got 64 from "
        "the argument rotary_dim; for other code, which rotates a part, pass a config without its model_type, "
        "with interleaved=False and rope_layers='all'."
    )
    refused(LLAMA, text, rotary_dim=64)
    without = {key: value for key, value in LLAMA.items() if key != "model_type"}
    stated: dict[str, Any] = {"interleaved": False, "rotary_dim": 64, "rope_layers": "all"}
    assert read(without, **stated) == RopeSpec(128, 5e5, 64)  # the advice
    refused(LLAMA, "start must be 0 (from the first channel) but got 64.", start=64)
    text = "rope_layers must be ['full_attention', 'sliding_attention'] for model_type 'llama' but got ['full_attention']."
    refused(LLAMA, text, rope_layers=["full_attention"])
    phi = {**LLAMA, "model_type": "phi"}
    assert read(phi, rotary_dim=32) == RopeSpec(128, 5e5, 32)  # its files must give a part
    text = (
        "rotary_dim must have one value but got rotary_dim = 64 and the argument rotary_dim = 32."
    )
    refused({**phi, "rotary_dim": 64}, text, rotary_dim=32)
    refused({**ZEBRA, "rotary_dim": 64}, text, interleaved=True, rope_layers="all", rotary_dim=32)
    latent = {**LLAMA, "model_type": "deepseek_v3", "qk_nope_head_dim": 96, "qk_rope_head_dim": 32}
    assert read(latent, rotary_dim=32, start=96).start == 96
    refused(latent, "start must be 96 (qk_nope_head_dim) but got 0.", start=0)
    text = "rotary_dim must have one value but got qk_rope_head_dim = 32 and the argument rotary_dim = 64."
    refused(latent, text, rotary_dim=64)
    cohere = {**LLAMA, "model_type": "cohere2"}
    sliding = RopeSpec(128, 5e5, interleaved=True)
    assert read(cohere, rope_layers=["sliding_attention"])["sliding_attention"] == sliding
    text = "rope_layers must be ['sliding_attention'] for model_type 'cohere2' but got 'all'."
    refused(cohere, text, rope_layers="all")


def test_arguments_of_the_wrong_kind() -> None:
    text = (
        "rope_layers must be 'all', a collection of layer types that is not empty, or None but got "
    )
    refused(
        ZEBRA, f"{text}'full_attention'.", TypeError, **{**ANSWERS, "rope_layers": "full_attention"}
    )
    refused(ZEBRA, f"{text}3.", TypeError, **{**ANSWERS, "rope_layers": 3})
    text = "rope_layers must be 'all' or types of layers in the config but got "
    has = "; the config has full_attention, sliding_attention."
    refused(ZEBRA, f"{text}['full']{has}", **{**ANSWERS, "rope_layers": ["full"]})
    refused(ZEBRA, f"{text}['conv']{has}", **{**ANSWERS, "rope_layers": ["conv"]})
    unlisted = {**ZEBRA, "layer_types": None}
    refused(
        unlisted,
        f"{text}['a']; the config has no layer_types.",
        **{**ANSWERS, "rope_layers": ["a"]},
    )
    refused(
        ZEBRA,
        "the argument rotary_dim must be an int but got 64.0.",
        TypeError,
        **{**ANSWERS, "rotary_dim": 64.0},
    )
    refused(
        ZEBRA,
        "the argument rotary_dim must be at least 1 but got 0.",
        **{**ANSWERS, "rotary_dim": 0},
    )
    refused(ZEBRA, "the argument start must be at least 0 but got -1.", **ANSWERS, start=-1)


# --- types of layers ------------------------------------------------------------------------------


def test_a_type_of_layer_without_attention_has_no_spec() -> None:
    text = (
        "layer_type must be one of the config's layer types but got 'conv', which has no attention; the config "
        "has full_attention, sliding_attention."
    )
    refused(LLAMA, text, layer_type="conv")
    refused({**LLAMA, "model_type": "cohere2"}, text, layer_type="conv")
    qwen = {
        "model_type": "qwen3_next",
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "layer_types": ["linear_attention", "full_attention"],
    }
    assert read(qwen, layer_type="full_attention") == RopeSpec(256, 1e7, 64)
    text = (
        "layer_type must be one of the config's layer types but got 'linear_attention', which has no attention; "
        "the config has full_attention."
    )
    refused(qwen, text, layer_type="linear_attention")
    blocks = {**LLAMA, "layer_types": None, "layers_block_type": ["mamba", "attention"]}
    assert read(blocks, layer_type="attention") == RopeSpec(128, 5e5)
    with pytest.raises(
        ValueError, match="got 'mamba', which has no attention; the config has attention"
    ):
        RopeSpec.from_config(blocks, layer_type="mamba")


def test_none_is_only_for_attention_that_does_not_rotate() -> None:
    cohere = {**LLAMA, "model_type": "cohere2"}
    specs = read(cohere)
    assert read(cohere, layer_type="full_attention") is None
    assert (specs.of(0), specs.of(2)) == (None, None)  # NoPE, and a convolution
    other = {**cohere, "layer_types": ["full_attention", "chunked_attention"]}
    text = (
        "model_type 'cohere2' must have layers of types sliding_attention, full_attention only, but layer_types "
        "has chunked_attention."
    )
    refused(other, text)


def test_a_layer_of_a_type_without_a_spec_is_an_error() -> None:
    specs = LayerSpecs({"a": RopeSpec(64)}, ("a", "b", "mamba"))
    assert specs.of(2) is None
    text = r"^\[LayerSpecs.of\] layer 1 must be of a type with a spec, of a, but is 'b'\.$"
    with pytest.raises(ValueError, match=text):
        specs.of(1)


def test_one_section_for_all_layers() -> None:
    default = {"rope_type": "default", "rope_theta": 1e4}
    config = {
        **LLAMA,
        "model_type": "exaone4",
        "sliding_window": 8,
        "rope_parameters": {"full_attention": default, "sliding_attention": default},
    }
    text = "model_type 'exaone4' must have one rope section but has one for full_attention, sliding_attention."
    refused({**config, "rope_theta": None}, text)


# --- formats and families that were read wrongly --------------------------------------------------

MISTRAL: dict[str, Any] = {
    "dim": 3072,
    "n_layers": 26,
    "head_dim": 128,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1e6,
}
SCALED: dict[str, Any] = {
    "factor": 16,
    "beta": 32,
    "alpha": 1,
    "original_max_position_embeddings": 16384,
    "apply_scale": False,
}


@pytest.mark.parametrize("apply_scale", [False, True])
def test_yarn_of_mistrals_own_file(apply_scale: bool) -> None:
    made = read({**MISTRAL, "yarn": {**SCALED, "apply_scale": apply_scale}}).frequencies()
    wanted = truth.yarn(128, 1e6, 16, 16384, 32, 1)
    for got, omega in zip(made.exact, wanted, strict=True):
        assert float(got) == pytest.approx(float(omega), rel=1e-14)
    assert made.inv_freq[63].item() == pytest.approx(7.756e-8, rel=1e-4)
    scale = 0.1 * math.log(16) + 1 if apply_scale else 1.0
    assert made.attention_scaling == pytest.approx(scale, rel=1e-14)


def test_alpha_and_beta_of_mistrals_own_file() -> None:
    made = read({**MISTRAL, "yarn": {**SCALED, "beta": 4, "alpha": 2}})
    assert made.scaling == YaRN(16, 16384, beta_fast=4, beta_slow=2, attention_factor=1)
    rows = {row.field: row.source for row in provenance({**MISTRAL, "yarn": SCALED}).rows}
    assert rows["scaling.beta_slow"] == "yarn.alpha"
    assert rows["scaling.attention_factor"] == "yarn.apply_scale"


def test_other_keys_of_mistrals_own_file() -> None:
    temperature = {"original_max_position_embeddings": 16384, "beta": 0.1}
    other = {
        "llama_4_scaling": temperature,
        "sliding_window": [4096, None],
        "moe": {"num_experts": 8},
        "vision_encoder": {"rope_theta": 10000.0, "hidden_size": 1024},
        "model_type": None,
    }
    assert read({**MISTRAL, **other}) == read(MISTRAL) == RopeSpec(128, 1e6, interleaved=True)
    latent = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": None}
    assert read({**MISTRAL, **latent, "yarn": SCALED}).start == 128


def test_yarn_that_is_not_mistrals() -> None:
    text = "yarn.apply_scale must be true or false but got None."
    refused({**MISTRAL, "yarn": {"factor": 16, "original_max_position_embeddings": 16384}}, text)
    refused({**MISTRAL, "yarn": 16}, "yarn must be a mapping but got 16.", TypeError)
    text = "every key about RoPE must be known but got yarn.beta_fast; strict=False ignores them with a warning."
    refused({**MISTRAL, "yarn": {**SCALED, "beta_fast": 32}}, text)
    text = "only one kind of scaling can apply but got use_scaled_rope and yarn."
    refused({**MISTRAL, "yarn": SCALED, "use_scaled_rope": True}, text)
    text = "yarn.apply_scale must be false with latent attention, where it could mean two factors."
    latent = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    refused({**MISTRAL, **latent, "yarn": {**SCALED, "apply_scale": True}}, text)


def test_ntk_has_two_meanings() -> None:
    gte = {
        "head_size": 64,
        "rotary_dim": 64,
        "is_neox_style": True,
        "rope_theta": 160000,
        "rope_parameters": {"rope_type": "ntk", "factor": 2.0},
    }
    text = (
        "rope_parameters.rope_type must name one rule but 'ntk' names two: if it multiplies the base by factor ** "
        "(d / (d - 2)), with d = rotary_dim, make a RopeSpec with scaling=NTK(factor); if, as in vLLM, it divides "
        "frequency k by factor ** (2 * (k + 1) / d), one with scaling=Given(frequencies)."
    )
    refused(gte, text)


V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_hidden_layers": 4,
}
V4_FLAT: dict[str, Any] = {
    **V4,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 128, 4, 0, 0],
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def test_deepseek_v4_has_a_section_for_layers_that_compress() -> None:
    main = RopeSpec(512, 1e4, 64, 448, interleaved=True)
    yarn = YaRN(16, 65536, attention_factor=1)
    compress = RopeSpec(512, 1.6e5, 64, 448, interleaved=True, scaling=yarn)
    specs = read(V4_FLAT)
    assert specs == {
        "sliding_attention": main,
        "compressed_sparse_attention": compress,
        "heavily_compressed_attention": compress,
    }
    assert [specs.of(layer) for layer in range(4)] == [main, compress, compress, main]
    scaling = {
        **V4_FLAT["rope_scaling"],
        "rope_type": "yarn",
        "rope_theta": 1.6e5,
        "attention_factor": 1.0,
    }
    sections = {"main": {"rope_type": "default", "rope_theta": 1e4}, "compress": scaling}
    nested = {**V4, "rope_parameters": sections, "layer_types": list(specs.layers)}
    assert read(nested) == specs
    assert read(nested).layers == specs.layers
    refused(
        {**nested, "compress_rope_theta": 5.0},
        "base must have one value but got rope_parameters.compress.rope_theta = 160000.0 and compress_rope_theta = 5.0.",
    )
    only = {**nested, "rope_parameters": {"main": sections["main"]}}
    refused(
        only, "model_type 'deepseek_v4' must have the rope sections main and compress but has main."
    )
    refused(
        {**V4_FLAT, "compress_ratios": [0, 8, 4, 0]},
        "compress_ratios must hold 0, 4 and 128 only but got [0, 8, 4, 0].",
    )
    lacking = {key: value for key, value in V4_FLAT.items() if key != "compress_rope_theta"}
    refused(
        lacking,
        "model_type 'deepseek_v4' has layers that differ, so the config must give compress_rope_theta.",
    )


MUSE: dict[str, Any] = {
    "model_type": "muse_glimmer_text",
    "head_dim": 128,
    "rope_theta": 1e4,
    "layer_rope_theta": [1e4, 0, 10000, 0],
}
LATENT = {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32}


def test_a_base_for_each_layer() -> None:
    specs = read(MUSE)
    assert specs == {"rope": RopeSpec(128), "no_rope": None}
    assert specs.layers == ("rope", "no_rope", "rope", "no_rope")
    text = "base must have one value but got rope_theta = 10000.0 and layer_rope_theta[2] = 500.0."
    refused({**MUSE, "layer_rope_theta": [1e4, 0, 500.0]}, text)
    refused(
        {**MUSE, "layer_rope_theta": 0}, "layer_rope_theta must be a list but got 0.", TypeError
    )


JUNK = ["x", "", [], [1], [[]], {}, {"a": 1}, -1, 0, 1.5, True, float("nan"), float("inf")]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_these_is_refused_in_a_sentence(junk: object) -> None:
    for config in (V4_FLAT, {**MISTRAL, "yarn": SCALED}, MUSE, {**ZEBRA, **LATENT}):
        for key, value in config.items():
            inner = [{**value, name: junk} for name in value] if isinstance(value, dict) else []
            for changed in (junk, *inner):
                for stated in ({}, ANSWERS):
                    try:
                        RopeSpec.from_config({**config, key: changed}, **stated)
                    except (ValueError, TypeError) as error:
                        if not str(error).startswith("["):
                            raise


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_an_argument_is_refused_in_a_sentence(junk: Any) -> None:
    for name in ("rotary_dim", "start", "rope_layers"):
        for config in (ZEBRA, LLAMA, {**ZEBRA, **LATENT}):
            try:
                RopeSpec.from_config(config, **{**ANSWERS, name: junk})
            except (ValueError, TypeError) as error:
                if not str(error).startswith("["):
                    raise


def test_minimaxs_rotary_dim_is_not_read_by_transformers() -> None:
    config = {
        **LLAMA,
        "model_type": "minimax",
        "head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
    }
    assert read(config) == RopeSpec(128, 5e5)
    text = (
        "rotary_dim must be 128, as the code of model_type 'minimax' rotates all channels of a head, but got 64 "
        "from rotary_dim; for other code, which rotates a part, pass a config without its model_type, with "
        "interleaved=False and rope_layers='all'."
    )
    refused({**config, "rotary_dim": 64}, text)
    own = {key: value for key, value in config.items() if key != "model_type"}
    assert read({**own, "rotary_dim": 64}, interleaved=False, rope_layers="all").rotary_dim == 64


# --- GGUF -----------------------------------------------------------------------------------------


def gguf(arch: str, layers: int = 8, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.embedding_length": 2048,
        f"{arch}.attention.head_count": 16,
        f"{arch}.rope.freq_base": 1e6,
    }
    return made | {f"{arch}.{key.replace('__', '.')}": value for key, value in more.items()}


WINDOW = {"attention__sliding_window": 128}
GGUF_YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 8.0,
    "rope__scaling__original_context_length": 8192,
}
HALF, PAIRS = RopeSpec(128, 1e6), RopeSpec(128, 1e6, interleaved=True)
SLIDING = {"sliding_attention": HALF, "full_attention": None}
NUMBERED = {"rope": HALF, "no_rope": None}
# Facts of llama.cpp's src/models that no file gives.
LLAMA_CPP: dict[str, tuple[dict[str, Any], Any]] = {
    "afmoe": (gguf("afmoe"), NUMBERED),
    "smollm3": (gguf("smollm3"), {**NUMBERED, "rope": PAIRS}),
    "llama4": (gguf("llama4"), {**NUMBERED, "rope": PAIRS}),
    "smallthinker": (gguf("smallthinker", **WINDOW), NUMBERED),
    "smallthinker without windows": (gguf("smallthinker"), HALF),
    "exaone-moe": (gguf("exaone-moe", **WINDOW), SLIDING),
    "exaone4": (gguf("exaone4", 64, **WINDOW), SLIDING),
    "exaone4 without windows": (gguf("exaone4", 30), HALF),
    "muse-glimmer": (gguf("muse-glimmer", **WINDOW), {**SLIDING, "sliding_attention": PAIRS}),
    "olmo2 of OLMo 3": (
        gguf("olmo2", **WINDOW, **GGUF_YARN),
        {"full_attention": RopeSpec(128, 1e6, scaling=YaRN(8, 8192)), "sliding_attention": HALF},
    ),
    "olmo2": (gguf("olmo2", **GGUF_YARN), RopeSpec(128, 1e6, scaling=YaRN(8, 8192))),
    "gemma-embedding": (
        gguf("gemma-embedding", **WINDOW),
        {"full_attention": HALF, "sliding_attention": RopeSpec(128)},
    ),
    "modern-bert": (
        gguf("modern-bert", **WINDOW),
        {"full_attention": HALF, "sliding_attention": RopeSpec(128)},
    ),
    "modern-bert without windows": (gguf("modern-bert", attention__sliding_window=0), HALF),
    "glm-dsa": (
        gguf("glm-dsa", attention__key_length_mla=256, rope__dimension_count=64),
        RopeSpec(256, 1e6, 64, 192, interleaved=True),
    ),
    "baichuan 7B": (gguf("baichuan", 32), PAIRS),
    "granite": (gguf("granite", rope__scaling__finetuned=True), PAIRS),
}


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_architectures_of_llama_cpp(name: str) -> None:
    config, wanted = LLAMA_CPP[name]
    assert read(config) == wanted


@pytest.mark.parametrize("arch", ["afmoe", "llama4", "smollm3"])
def test_one_layer_in_four_of_llama_cpp(arch: str) -> None:
    specs = read(gguf(arch))
    assert [specs.of(layer) is None for layer in range(8)] == [False, False, False, True] * 2


def test_yarn_of_architectures_with_latent_attention() -> None:
    more = {"attention__key_length_mla": 192, "rope__dimension_count": 64, **GGUF_YARN}
    made = read(gguf("mistral4", **more, rope__scaling__yarn_log_multiplier=0.1))
    assert made.scaling == YaRN(8, 8192, mscale=1, mscale_all_dim=1)


def test_yarn_of_grok_begins_elsewhere() -> None:
    assert read(gguf("grok", **GGUF_YARN)).scaling == YaRN(8, 8192, beta_fast=8)
    made = read(gguf("grok", **GGUF_YARN, rope__scaling__yarn_beta_fast=16.0))
    assert made.scaling == YaRN(8, 8192, beta_fast=16)


GGUF_REFUSED = {
    "baichuan 13B": (
        gguf("baichuan", 40),
        "has no spec: llama.cpp rotates only its 7B, which has 32 layers.",
    ),
    "starcoder": (gguf("starcoder"), "has no spec: llama.cpp rotates none of its layers."),
    "nemotron_h": (gguf("nemotron_h"), "has no spec: llama.cpp rotates none of its layers."),
    "gemma4": (gguf("gemma4"), "has no spec: its layers differ in the width of a head."),
}


@pytest.mark.parametrize("name", GGUF_REFUSED)
def test_architectures_of_llama_cpp_without_a_spec(name: str) -> None:
    config, text = GGUF_REFUSED[name]
    refused(config, f"GGUF architecture {config['general.architecture']!r} {text}")


@pytest.mark.parametrize("arch", ["granite", "granitemoe", "granitehybrid"])
def test_granites_switch_in_gguf(arch: str) -> None:
    config = gguf(arch, rope__scaling__finetuned=False)
    refused(config, f"the config has no RoPE: {arch}.rope.scaling.finetuned is False.")


def test_other_widths_and_patterns_in_gguf_are_unknown() -> None:
    for key in ("attention.key_length_swa", "attention.rope_pattern", "rope.dimension_count_swa"):
        with pytest.raises(ValueError, match=rf"known but got llama\.{re.escape(key)}"):
            RopeSpec.from_config({**gguf("llama"), f"llama.{key}": 64})
    with pytest.raises(
        ValueError, match="the table of families does not contain GGUF architecture 'llama4'"
    ):
        RopeSpec.from_config(gguf("llama4", attention__sliding_window=0))
