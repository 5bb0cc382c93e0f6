"""Test the metadata of GGUF of the architectures of llama.cpp, each with the keys that its files have.

Each spec is written out from the file of llama.cpp's src/models that the comment before it names.
"""

from typing import Any

import pytest

from tests.support.reading import assert_divided, gguf, read, refused
from tightrope import Axes, RopeSpec
from tightrope.frequencies import NTK, YaRN

YARN_4 = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 262144,
}
#: The widths of latent attention: of the cache, which all heads share, of a head, and of its rotated end.
LATENT = {
    "attention__key_length": 576,
    "attention__key_length_mla": 192,
    "rope__dimension_count": 64,
}
#: The width of a head, where that is not hidden size / heads.
WIDTH = {"attention__key_length": 128}
PART = {**WIDTH, "rope__dimension_count": 64}
HALF, PAIRS = RopeSpec(128, base=1e6), RopeSpec(128, base=1e6, interleaved=True)
TAIL = RopeSpec(192, base=1e6, rotary_dim=64, start=128, interleaved=True)
YARN = YaRN(4, 262144)

# --- one rotation in all layers with attention -------------------------------------------------------

MODELS: dict[str, tuple[Any, RopeSpec]] = {
    # hy-v3.cpp, jais2.cpp, talkie.cpp, hrm-text.cpp and pangu-embed.cpp: halves of the whole head
    "hy_v3": (gguf("hy_v3", **WIDTH, **YARN_4), RopeSpec(128, base=1e6, scaling=YARN)),
    **{arch: (gguf(arch), HALF) for arch in ("jais2", "talkie", "pangu-embedded")},
    "hrm_text": (gguf("hrm_text", hrm__h_cycles=2), HALF),
    # minimax-m3.cpp: the first n_rot channels, by halves
    "minimax-m3": (gguf("minimax-m3", **PART), RopeSpec(128, base=1e6, rotary_dim=64)),
    # minimax-01.cpp: the same in every eighth layer; the others have linear attention
    "minimax-01": (gguf("minimax-01", **PART), RopeSpec(128, base=1e6, rotary_dim=64)),
    # nanbeige.cpp, pockettts.cpp, eagle3.cpp and granite-switch.cpp: neighbours
    **{arch: (gguf(arch), PAIRS) for arch in ("pockettts", "eagle3")},
    "nanbeige": (gguf("nanbeige", num_loops=2), PAIRS),
    "graniteswitch": (gguf("graniteswitch", rope__scaling__finetuned=True), PAIRS),
    # hy-v4.cpp and bailingmoe3.cpp: neighbours at the end of a head of latent attention
    "hy_v4": (gguf("hy_v4", **LATENT), TAIL),
    "bailingmoe3": (
        gguf("bailingmoe3", attention__head_count_kv=[0, 0, 0, 1] * 2, **LATENT),
        TAIL,
    ),
    # cogvlm.cpp: ggml_rope, whose base is 10000; deepseek2.cpp with is_ocr: halves of n_embd / n_head channels
    "cogvlm": (gguf("cogvlm", rope__freq_base=1e4), RopeSpec(128)),
    "deepseek2-ocr": (
        gguf("deepseek2-ocr", rope__freq_base=1e4, rope__dimension_count=0),
        RopeSpec(128),
    ),
}


@pytest.mark.parametrize("arch", MODELS)
def test_models_that_rotate_alike_in_all_layers(arch: str) -> None:
    metadata, wanted = MODELS[arch]
    assert read(metadata) == wanted


# --- positions with several coordinates ---------------------------------------------------------------


def axes(*sizes: int, woven: str = "") -> Axes:
    """Return axes by the number of pairs of each coordinate, or by a digit for each pair: its coordinate."""
    owners = list(map(int, woven)) or [axis for axis, size in enumerate(sizes) for _ in range(size)]
    triples = tuple((axis, pair, 2 * len(owners)) for pair, axis in enumerate(owners))
    return Axes(max(owners) + 1, triples)


#: Qwen 3.5 and its relatives: 11, 11 and 10 of 32 pairs, woven.
WOVEN = axes(woven="012" * 10 + "01")
OF_64 = {"attention__key_length": 256, "rope__dimension_count": 64}
WOVEN_64 = {**OF_64, "rope__dimension_sections": [11, 11, 10, 0]}
GLM4V = {"rope__dimension_count": 64, "rope__dimension_sections": [8, 12, 12, 0]}
GLM = RopeSpec(128, base=1e6, rotary_dim=64, axes=axes(8, 12, 12))
HUNYUAN_OCR: dict[str, Any] = {
    **WIDTH,
    "context_length": 32768,
    "rope__freq_base": 1e4,
    "rope__scaling__type": "none",
    "rope__scaling__factor": 1.0,
    "rope__scaling__original_context_length": 32768,
    "rope__scaling__alpha": 1000.0,
    "rope__dimension_sections": [16, 16, 16, 16],
}
SECTIONS: dict[str, tuple[Any, RopeSpec]] = {
    # glm4.cpp, glm4-moe.cpp: LLAMA_ROPE_TYPE_MROPE, of halves, if the first two sections are not 0
    "GLM-4.1V": (gguf("glm4", **GLM4V), GLM),
    "GLM-4.5V": (gguf("glm4moe", **GLM4V), GLM),
    "GLM-4": (
        gguf("glm4", rope__dimension_count=64),
        RopeSpec(128, base=1e6, rotary_dim=64, interleaved=True),
    ),
    "GLM-4 with sections of 0": (
        gguf("glm4", **{**GLM4V, "rope__dimension_sections": [0] * 4}),
        RopeSpec(128, base=1e6, rotary_dim=64, interleaved=True),
    ),
    "GLM-4.5 with one section": (
        gguf("glm4moe", **{**GLM4V, "rope__dimension_sections": [32, 0, 0, 0]}),
        RopeSpec(128, base=1e6, rotary_dim=64),
    ),
    # hunyuan-vl.cpp: base * alpha ** (d / (d - 2)), and four sections
    "HunyuanOCR": (
        gguf("hunyuan_vl", **HUNYUAN_OCR),
        RopeSpec(128, scaling=NTK(1000), axes=axes(16, 16, 16, 16)),
    ),
    "HunyuanVL with neither": (gguf("hunyuan_vl", **WIDTH, rope__scaling__alpha=0.0), HALF),
    # bailingmoe3.cpp: "VL files carry mrope sections"
    "Ling 3 VL": (
        gguf("bailingmoe3", **LATENT, rope__dimension_sections=[12, 10, 10, 0]),
        RopeSpec(192, base=1e6, rotary_dim=64, start=128, axes=axes(12, 10, 10)),
    ),
    # qwen3vl.cpp (qwen3tts has its graph), clef.cpp, qwen4exp.cpp: LLAMA_ROPE_TYPE_IMROPE
    "Qwen3-TTS": (
        gguf("qwen3tts", rope__dimension_sections=[24, 20, 20, 0]),
        RopeSpec(128, base=1e6, axes=axes(woven="012" * 20 + "0000")),
    ),
    "Clef": (gguf("clef", **WOVEN_64), RopeSpec(256, base=1e6, rotary_dim=64, axes=WOVEN)),
    "Qwen 4 Exp": (
        gguf("qwen4exp", attention__compress_ratios=[0, 0, 0, 16] * 2, **WOVEN_64),
        RopeSpec(256, base=1e6, rotary_dim=64, axes=WOVEN),
    ),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_models_whose_positions_may_have_several_coordinates(name: str) -> None:
    metadata, wanted = SECTIONS[name]
    assert read(metadata) == wanted


def test_alpha_is_the_only_scaling() -> None:
    metadata, _ = SECTIONS["HunyuanOCR"]
    text = "hunyuan_vl.rope.scaling.alpha must not come with scaling by 'yarn'."
    refused({**metadata, "hunyuan_vl.rope.scaling.type": "yarn"}, text)
    for arch in ("hunyuan-dense", "qwen2"):  # llama.cpp ignores it
        with pytest.raises(ValueError, match=rf"known but got {arch}\.rope\.scaling\.alpha"):
            read(gguf(arch, rope__scaling__alpha=1000.0))


# --- layers that differ -------------------------------------------------------------------------------


def windows(*pattern: int, size: int = 512) -> dict[str, Any]:
    """Return the keys of layers with a sliding window (1) and without (0)."""
    listed = list(map(bool, pattern))
    return {"attention__sliding_window": size, "attention__sliding_window_pattern": listed}


FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA_WIDTHS = {
    "attention__key_length": 512,
    "attention__key_length_swa": 256,
    "rope__dimension_count": 512,
    "rope__dimension_count_swa": 256,
    "rope__freq_base_swa": 1e4,
}
ONE_OF_FOUR = windows(1, 1, 1, 0, 1, 1, 1, 0)
SPARK = {
    "rope__dimension_count": 64,
    "rope__dimension_count_swa": 128,
    **windows(0, 1, 1, 1, 0, 1, 1, 1),
}
DOTS3 = {
    **LATENT,
    "attention__key_length_swa": 320,
    "attention__key_length_mla_swa": 256,
    "rope__freq_base_swa": 1e4,
}
PERIOD = {"attention__sliding_window": 4096, "attention__sliding_window_pattern": 4}
COHERE = {
    **WIDTH,
    "rope__scaling__type": "none",
    "rope__freq_base_swa": 1e4,
    "leading_dense_block_count": 2,
}
# Metadata -> the specs by type, and the numbers of the layers of each.
LAYERED: dict[str, tuple[Any, dict[str, Any], dict[str, set[int]]]] = {
    # plamo3.cpp: the base of layers with a window is 10000 by default; every eighth layer has none
    "plamo3": (
        gguf("plamo3", 16, attention__sliding_window=2048),
        {FULL: HALF, SLIDING: RopeSpec(128)},
        {FULL: {7, 15}},
    ),
    # maple.cpp: only layers with a window rotate, by their own base, if there is one
    "maple": (gguf("maple", **WIDTH, **ONE_OF_FOUR), {FULL: None, SLIDING: HALF}, {FULL: {3, 7}}),
    "maple with another base": (
        gguf("maple", **WIDTH, rope__freq_base_swa=1e4, **ONE_OF_FOUR),
        {FULL: None, SLIDING: RopeSpec(128)},
        {FULL: {3, 7}},
    ),
    # spark2-5.cpp: a base (by default the common one) and a part for each kind; all are scaled
    "spark2_5": (
        gguf("spark2_5", **SPARK, rope__freq_base_swa=1e4),
        {FULL: RopeSpec(128, base=1e6, rotary_dim=64), SLIDING: RopeSpec(128)},
        {FULL: {0, 4}},
    ),
    "spark2_5 with one base and YaRN": (
        gguf("spark2_5", **SPARK, **YARN_4),
        {
            FULL: RopeSpec(128, base=1e6, rotary_dim=64, scaling=YARN),
            SLIDING: RopeSpec(128, base=1e6, scaling=YARN),
        },
        {FULL: {0, 4}},
    ),
    # granite-swa.cpp: a list of the layers that rotate, all by one base
    "granite_swa": (
        gguf("granite_swa", attention__rope_pattern=[1, 1, 1, 0, 1, 1, 1, 0], **ONE_OF_FOUR),
        {"rope": PAIRS, "no_rope": None},
        {"no_rope": {3, 7}},
    ),
    # gemma-embedding2.cpp: as Gemma 4, but without factors; every sixth layer has no window
    "gemma-embedding2": (
        gguf("gemma-embedding2", 24, attention__sliding_window=1024, **GEMMA_WIDTHS),
        {FULL: RopeSpec(512, base=1e6), SLIDING: RopeSpec(256)},
        {FULL: {5, 11, 17, 23}},
    ),
    # dots3note.cpp: heads of two widths, whose last 64 channels rotate, by two bases; one layer only predicts
    "dots3note": (
        gguf("dots3note", 9, **DOTS3, **YARN_4, **ONE_OF_FOUR, nextn_predict_layers=1),
        {
            FULL: RopeSpec(192, base=1e6, rotary_dim=64, start=128, interleaved=True, scaling=YARN),
            SLIDING: RopeSpec(
                256, base=1e4, rotary_dim=64, start=192, interleaved=True, scaling=YARN
            ),
        },
        {FULL: {3, 7}},
    ),
    # cohere2moe.cpp: layers with a window rotate, and the first ones, without experts; all by one base
    "cohere2moe": (
        gguf("cohere2moe", **COHERE, **windows(0, 1, 1, 1, 0, 1, 1, 1)),
        {SLIDING: PAIRS, FULL: None, "dense": PAIRS},
        {"dense": {0}, FULL: {4}},
    ),
    "cohere2moe with a period, and a layer that only predicts": (
        gguf("cohere2moe", 9, **COHERE, **PERIOD, nextn_predict_layers=1),
        {SLIDING: PAIRS, FULL: None, "dense": PAIRS},
        {"dense": {0, 8}, FULL: {4}},
    ),
}


@pytest.mark.parametrize("name", LAYERED)
def test_models_whose_layers_differ(name: str) -> None:
    metadata, wanted, numbers = LAYERED[name]
    specs = read(metadata)
    assert specs == wanted
    for kind, layers in numbers.items():
        assert {n for n, one in enumerate(specs.layers) if one == kind} == layers
    others = set(specs.layers) - set(numbers)
    assert len(others) == 1  # all other layers are of one type


def test_the_queries_of_gemma4_assistant_rotate_as_in_gemma4() -> None:
    """gemma4-assistant.cpp: the keys are those of the target; the factors are for layers without a window."""
    sizes = {**GEMMA_WIDTHS, **windows(1, 1, 1, 0, size=1024), "nextn_predict_layers": 4}
    metadata = gguf("gemma4-assistant", 4, **sizes)
    text = (
        "gemma4-assistant must come with rope_freqs.weight, which scales its layers with full attention; pass the "
        "path of the .gguf file, or add the tensor to the metadata."
    )
    refused(metadata, text)
    specs = read({**metadata, "rope_freqs.weight": [1.0] * 64 + [1e30] * 192})
    assert specs.layers == (SLIDING, SLIDING, SLIDING, FULL)
    assert specs[SLIDING] == RopeSpec(256)
    assert_divided(specs[FULL], 512, 1e6, [1.0] * 64 + [1e30] * 192)


def test_models_whose_layers_may_differ_but_do_not() -> None:
    assert read(gguf("plamo3")) == HALF
    all_rotate = gguf("granite_swa", **ONE_OF_FOUR)
    assert read(all_rotate) == PAIRS
    assert read({**all_rotate, "granite_swa.attention.rope_pattern": [1] * 8}) == read(all_rotate)


def test_the_layers_of_cohere2moe_must_be_known() -> None:
    metadata, _, _ = LAYERED["cohere2moe"]
    key = "cohere2moe.leading_dense_block_count"
    text = f"GGUF architecture 'cohere2moe' has layers that differ, so it must come with {key}."
    refused({name: value for name, value in metadata.items() if name != key}, text)


@pytest.mark.parametrize("arch", ["mimo2", "step35"])
def test_layers_that_only_predict_need_no_entry(arch: str) -> None:
    """mimo2.cpp and step35.cpp list the windows of their main layers."""
    sizes = {"attention__key_length": 128, "rope__dimension_count": 128, "nextn_predict_layers": 3}
    metadata = gguf(arch, 11, **sizes, **windows(0, 1, 1, 1, 0, 1, 1, 1))
    assert read(metadata).layers == (FULL, *[SLIDING] * 3) * 2
    short = {**metadata, f"{arch}.attention.sliding_window_pattern": [False] * 7}
    text = f"{arch}.attention.sliding_window_pattern must have an entry for each of 8 layers but has 7."
    refused(short, text)


# --- DeepSeek V4, and drafters -------------------------------------------------------------------------

V4_SIZES: dict[str, Any] = {
    "rope__freq_base": 1e4,
    "attention__key_length": 512,
    "attention__sliding_window": 128,
    "attention__compress_rope_freq_base": 160000.0,
    "rope__dimension_count": 64,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 16.0,
    "rope__scaling__original_context_length": 65536,
    "rope__scaling__yarn_beta_fast": 32.0,
    "rope__scaling__yarn_beta_slow": 1.0,
}
RATIOS = [0, 0, *[4, 128] * 20, 4, 0]  # of DeepSeek V4 Flash: 43 layers, and one that only predicts
MAIN = RopeSpec(512, base=1e4, rotary_dim=64, start=448, interleaved=True)


def test_deepseek4_has_layers_of_two_bases() -> None:
    """deepseek4.cpp: layers with compressed entries have their own base, and YaRN without its factor on channels."""
    metadata = gguf("deepseek4", 43, **V4_SIZES, attention__compress_ratios=RATIOS)
    specs = read(metadata)
    scaled = YaRN(16, 65536, attention_factor=1)
    compressed = RopeSpec(
        512, base=160000.0, rotary_dim=64, start=448, interleaved=True, scaling=scaled
    )
    assert specs == {
        "sliding_attention": MAIN,
        "compressed_sparse_attention": compressed,
        "heavily_compressed_attention": compressed,
    }
    names = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
    assert specs.layers == tuple(f"{names[ratio]}_attention" for ratio in RATIOS[:43])


@pytest.mark.parametrize("key", ["compress_ratios", "compress_rope_freq_base"])
def test_deepseek4_without_its_second_base(key: str) -> None:
    sizes = {**V4_SIZES, "attention__compress_ratios": RATIOS}
    del sizes[f"attention__{key}"]
    metadata = gguf("deepseek4", 43, **sizes)
    if key == "compress_ratios":  # the types have their specs, but the layers are not listed
        assert read(metadata).layers is None
    else:
        text = f"GGUF architecture 'deepseek4' has layers that differ, so it must come with deepseek4.attention.{key}."
        refused(metadata, text)


DFLASH: dict[str, Any] = {
    **WIDTH,
    "block_size": 16,
    "target_layers": [2, 17, 32, 47, 62],
    **windows(1, 1, 1, 1, 0, size=2048),
}
# dflash.cpp -> the spec; the base of layers with a window is ignored
DRAFTERS: dict[str, tuple[Any, RopeSpec]] = {
    "of Qwen 3.6": (gguf("dflash", 5, **DFLASH), HALF),
    "of a model with several coordinates": (
        gguf("dflash", 5, **DFLASH, rope__dimension_sections=[64, 0, 0, 0]),
        HALF,
    ),
    "of Laguna": (
        gguf("dflash", 5, **DFLASH, rope__freq_base_swa=1e4, **YARN_4),
        RopeSpec(128, base=1e6, scaling=YARN),
    ),
    # hyper_connection.count > 0: a layer of DeepSeek V4, whose scaling and second base it does not use
    "of DeepSeek V4": (
        gguf(
            "dflash",
            3,
            **V4_SIZES,
            attention__compress_ratios=[0, 0, 0],
            hyper_connection__count=4,
        ),
        MAIN,
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_of_dflash(name: str) -> None:
    metadata, wanted = DRAFTERS[name]
    assert read(metadata) == wanted


def test_a_drafter_of_deepseek4_has_no_compressed_entries() -> None:
    metadata, _ = DRAFTERS["of DeepSeek V4"]
    key = "dflash.attention.compress_ratios"
    refused({**metadata, key: [0, 4, 0]}, f"{key} must hold 0 only but got [0, 4, 0].")


# --- what llama.cpp's code contradicts or does not use ---------------------------------------------------

PANGU, COGVLM, OCR = (MODELS[arch][0] for arch in ("pangu-embedded", "cogvlm", "deepseek2-ocr"))
CONTRADICTED: dict[str, tuple[Any, str]] = {
    "a base of CogVLM2": (
        {**COGVLM, "cogvlm.rope.freq_base": 5e5},
        "base must be 10000, as the code of GGUF architecture 'cogvlm' reads no key for it, but got 500000.0 from "
        "cogvlm.rope.freq_base.",
    ),
    "a scaling": (
        {**OCR, "deepseek2-ocr.rope.scaling.factor": 4.0},
        "scaling must be 'default', as the code of GGUF architecture 'deepseek2-ocr' reads no key for it, but got 'linear' "
        "from deepseek2-ocr.rope.scaling.type (absent).",
    ),
    "factors of LongRoPE": (
        {**PANGU, "rope_factors_long.weight": [1.0] * 64},
        "pangu-embedded must not come with rope_factors_long.weight, which llama.cpp does not use; to rotate as it "
        "does, pass the metadata without it.",
    ),
    "factors of Llama 3": (
        {**COGVLM, "rope_freqs.weight": [1.0] * 64},
        "cogvlm must not come with rope_freqs.weight, which llama.cpp does not use; to rotate as it does, pass the "
        "metadata without it.",
    ),
    "a switch that is off": (
        {**MODELS["graniteswitch"][0], "graniteswitch.rope.scaling.finetuned": False},
        "the config has no RoPE: graniteswitch.rope.scaling.finetuned is False.",
    ),
    # bert.cpp rotates for jina-bert-v3 and the nomic-berts only
    "learned positions": (
        gguf("bert"),
        "GGUF architecture 'bert' has no spec: llama.cpp rotates none of its layers.",
    ),
    "heads with ALiBi": (
        gguf("baichuan", 40),
        "GGUF architecture 'baichuan' has no spec: llama.cpp rotates only its 7B, which has 32 layers.",
    ),
    # minimax-m3.cpp: rope.dimension_count is 64 of 128
    "a part that is missing": (
        gguf("minimax-m3", **WIDTH),
        "GGUF architecture 'minimax-m3' must come with minimax-m3.rope.dimension_count, as all its files do.",
    ),
    "a part of latent attention that is missing": (
        gguf("hy_v4", attention__key_length_mla=192),
        "GGUF architecture 'hy_v4' must come with hy_v4.rope.dimension_count, as all its files do.",
    ),
    "a width that is missing": (
        gguf("gemma", rope__dimension_count=128),
        "GGUF architecture 'gemma' must come with gemma.attention.key_length, as all its files do.",
    ),
    "compressed entries of another size": (
        gguf("deepseek4", 2, **{**V4_SIZES, "attention__compress_ratios": [0, 8]}),
        "deepseek4.attention.compress_ratios must hold 0, 4 and 128 only but got [0, 8].",
    ),
    "too few layers with compressed entries": (
        gguf("deepseek4", 3, **{**V4_SIZES, "attention__compress_ratios": [0, 4]}),
        "deepseek4.attention.compress_ratios must have an entry for each of 3 layers but has 2.",
    ),
    # They have one base, and llama.cpp reads no other one.
    "a second base": (
        gguf("exaone-moe", rope__freq_base_swa=1e4),
        "every key that may give a base must be known but got exaone-moe.rope.freq_base_swa",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTED)
def test_keys_that_the_code_of_llama_cpp_contradicts(name: str) -> None:
    metadata, text = CONTRADICTED[name]
    refused(metadata, text)


def test_the_base_of_a_constant_need_not_be_given() -> None:
    metadata = {key: value for key, value in COGVLM.items() if key != "cogvlm.rope.freq_base"}
    assert read(metadata) == RopeSpec(128)


# --- YaRN's weight and factor ------------------------------------------------------------------------------

EXT, ATTN = "rope__scaling__yarn_ext_factor", "rope__scaling__yarn_attn_factor"
OWN = 1.138629436111989  # 0.1 * ln(4) + 1, for the factor 4


@pytest.mark.parametrize("ext", [{}, {EXT: -1.0}, {EXT: 1.0}])
@pytest.mark.parametrize("attn", [{}, {ATTN: 1.0}, {ATTN: 1.1386294364929199}])
@pytest.mark.parametrize("arch", ["grok", "laguna", "qwen2"])
def test_the_weight_and_the_factor_of_yarn_may_be_its_own(
    arch: str, ext: dict[str, Any], attn: dict[str, Any]
) -> None:
    """llama-context.cpp: cparams.yarn_attn_factor is set to YaRN's own where yarn_ext_factor is not 0."""
    made = read(gguf(arch, **PART, **YARN_4, **ext, **attn))
    assert made == read(gguf(arch, **PART, **YARN_4))
    assert made.frequencies().attention_scaling == pytest.approx(OWN, rel=1e-15)


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_without_yarn_its_weight_is_0_and_its_factor_1(kind: str) -> None:
    scaling = {"rope__scaling__type": kind, "rope__scaling__factor": 4.0}
    scaling = scaling if kind == "linear" else {}
    assert read(gguf("grok", **scaling, **{EXT: 0.0, ATTN: 1.0})) == read(gguf("grok", **scaling))


WEIGHT = "YaRN's weight, must be {}, as no rule has another one, but got {}."
REPLACED = "must be 1 or {}, which llama.cpp takes in its place, but got {}."
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "no ramp": ({**YARN_4, EXT: 0.0}, f"ext_factor, {WEIGHT.format(1, 0.0)}"),
    "half a weight": ({**YARN_4, EXT: 0.5}, f"ext_factor, {WEIGHT.format(1, 0.5)}"),
    "the ratio of the lengths": ({**YARN_4, EXT: 4.0}, f"ext_factor, {WEIGHT.format(1, 4.0)}"),
    "no number": ({**YARN_4, EXT: float("nan")}, f"ext_factor, {WEIGHT.format(1, 'nan')}"),
    "a weight without YaRN": ({EXT: 1.0}, f"ext_factor, {WEIGHT.format(0, 1.0)}"),
    "another factor": ({**YARN_4, ATTN: 1.5}, f"attn_factor {REPLACED.format(1.138629, 1.5)}"),
    "a factor without YaRN": ({ATTN: 1.5}, f"attn_factor {REPLACED.format(1, 1.5)}"),
    "a word": ({**YARN_4, ATTN: "x"}, "attn_factor must be a number but got 'x'."),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_weight_or_factor_of_yarn_is_refused(name: str) -> None:
    more, text = OTHERS[name]
    refused(gguf("grok", **more), f"grok.rope.scaling.yarn_{text}")


# --- damaged metadata ------------------------------------------------------------------------------------


@pytest.mark.parametrize("factors", ["x", [], [0.0] * 64, ["x"] * 64, 3, [[1.0]]])
@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_short.weight"])
def test_factors_are_numbers_that_divide(name: str, factors: Any) -> None:
    shown = repr(factors) if len(repr(factors)) < 100 else "a list"
    text = f"{name} must be a list of numbers other than 0 but got {shown}."
    refused({**gguf("llama"), name: factors}, text, TypeError)


def test_compressed_entries_are_a_list() -> None:
    metadata = gguf("deepseek4", 2, **V4_SIZES, attention__compress_ratios=4)
    text = "deepseek4.attention.compress_ratios must be a list but got 4."
    refused(metadata, text, TypeError)


def test_cohere2moe_without_windows_does_not_say_which_layers_rotate() -> None:
    key = "cohere2moe.attention.sliding_window_pattern"
    text = f"GGUF architecture 'cohere2moe' has layers that differ, so it must come with {key}."
    refused(gguf("cohere2moe", **COHERE, attention__sliding_window=0), text)
