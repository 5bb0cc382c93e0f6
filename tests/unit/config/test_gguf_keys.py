"""Test the metadata of GGUF: every architecture, scaling, layers, and facts that only llama.cpp's code has."""

import re
from typing import Any

import pytest

from tests.support.reading import assert_divided, gguf, read, refused
from tightrope import RopeSpec
from tightrope.config import Provenance, provenance
from tightrope.config.gguf import ARCHITECTURES as ROWS
from tightrope.frequencies import Given, Linear, LongRoPE, YaRN

GGUF = gguf("qwen2", context_length=32768)


# --- every architecture -----------------------------------------------------------------------------

ARCHITECTURES = sorted(
    name
    for name, facts in ROWS.items()
    if (facts.refused is None or facts.only_layers) and name != "dflash of deepseek4"
)
# Field of a row -> the values that the code knows; another one would have no effect.
RULES: dict[str, set[Any]] = {
    "axes": {None, "sections", "interleaved sections", "sections or none"},
    "factors": {None, "needed", "unused"},
    "layers": {None, "compressed", "every fourth still", "some still"},
    "compress_ratios": {None, "unused", "zero"},
    "window_base": {None, 10000.0, "always common", "common", "ignored", "own"},
}


@pytest.mark.parametrize("field", RULES)
def test_each_rule_that_a_row_names_is_known(field: str) -> None:
    assert {getattr(facts, field) for facts in ROWS.values()} == RULES[field]


# Keys that are read, after the architecture; those that begin with rope are all about the rotation.
READ = {
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.sliding_window",
}
ABOUT = re.compile(r"rope\.|attention\.key_length|attention\.(compress|max_alibi|rope)")


# Those that read key_length_swa.
OWN_WIDTHS = "dots3note gemma4 gemma4-assistant gemma-embedding2 laguna spark2_5 step35".split()
# What a file of an architecture has besides.
KNOWN: dict[str, dict[str, Any]] = {
    **{arch: {"rope_freqs.weight": [1.0] * 32} for arch in ("gemma4", "gemma4-assistant")},
    "deepseek4": {
        "deepseek4.attention.compress_ratios": [0] * 32,
        "deepseek4.attention.compress_rope_freq_base": 160000.0,
    },
    "cohere2moe": {"cohere2moe.leading_dense_block_count": 1},
    **{arch: {f"{arch}.rope.freq_base": 1e4} for arch in ("cogvlm", "deepseek2-ocr")},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_keys_of_any_architecture_are_read_without_its_name(arch: str) -> None:
    """The name of an architecture, such as gptneox, is in each of its keys, and says nothing about them."""
    constants = pytest.importorskip("gguf.constants")
    names = {
        name
        for group in vars(constants.Keys).values()
        if isinstance(group, type)
        for name in vars(group).values()
        if isinstance(name, str) and name.startswith("{arch}.")
    }
    assert len(names) > 100
    others = {name for name in names if name[7:] not in READ and not ABOUT.match(name[7:])}
    assert len(others) > 80
    known: dict[str, Any] = {
        "attention__key_length": 128,
        "attention__sliding_window": 64,
        "rope__dimension_count": 64,
        "context_length": 4096,
    }
    if ROWS[arch].axes in ("sections", "interleaved sections"):
        known["rope__dimension_sections"] = [11, 11, 10, 0]
    config = gguf(arch, 32, **known)
    config |= KNOWN.get(arch, {})
    wanted = read(config)
    more = {name.replace("{arch}", arch): 3 for name in others}
    assert read({**config, **more}) == wanted
    unknown = ["swa_rope_theta", "rope.tehta", "attention.key_length_swa"]
    for key in [f"{arch}.{key}" for key in unknown[: 2 if arch in OWN_WIDTHS else 3]]:
        with pytest.raises(ValueError, match=f"must be known but got {re.escape(key)}"):
            read({**config, **more, key: 3})


@pytest.mark.parametrize("factor", [0.0, 1.0, 1])
def test_no_scaling_may_have_a_factor_of_one(factor: float) -> None:
    """The converter writes it for Hunyuan, whose alpha is in the base."""
    more = {"type": "none", "factor": factor, "original_context_length": 262144}
    config = gguf("hunyuan-dense", **{f"rope__scaling__{key}": each for key, each in more.items()})
    assert read(config) == RopeSpec(128, base=1e6)
    with pytest.raises(ValueError, match=r"known but got hunyuan-dense\.rope\.scaling\.factor; "):
        read({**config, "hunyuan-dense.rope.scaling.factor": 2.0})


# --- scaling, layers, and sources --------------------------------------------------------------------


def test_gguf_tensors_of_factors() -> None:
    factors = [1.0] * 32 + [8.0] * 32
    made = read({**GGUF, "rope_freqs.weight": factors})
    assert isinstance(made.scaling, Given)
    assert_divided(made, 128, 1e6, factors)
    with pytest.raises(
        ValueError, match=r"must not come with rope\.scaling but the metadata has both"
    ):
        read({**GGUF, "rope_freqs.weight": factors, "qwen2.rope.scaling.type": "yarn"})


def test_gguf_longrope() -> None:
    scaling = {"original_context_length": 4096, "attn_factor": 1.19, "type": "longrope"}
    phi = gguf(
        "phi3",
        rope__dimension_count=96,
        **{f"rope__scaling__{key}": value for key, value in scaling.items()},
    )
    with pytest.raises(ValueError, match="'longrope' must have short_factor, long_factor but"):
        read(phi)
    short, long = (1.0,) * 48, (2.0,) * 48
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    wanted = LongRoPE(short, long, 4096, attention_factor=1.19)
    assert read({**phi, **tensors}) == RopeSpec(128, base=1e6, rotary_dim=96, scaling=wanted)


def test_gguf_linear_by_the_absence_of_a_type() -> None:
    for key in ("scaling.factor", "scale_linear"):
        made = read({**GGUF, f"qwen2.rope.{key}": 4.0})
        assert made == RopeSpec(128, base=1e6, scaling=Linear(4))
    assert read({**GGUF, "qwen2.rope.scaling.factor": 0.0}) == RopeSpec(128, base=1e6)


def test_gguf_without_its_architecture() -> None:
    config = {key: value for key, value in GGUF.items() if key != "general.architecture"}
    assert read(config) == read(GGUF) == RopeSpec(128, base=1e6)


def test_gguf_local_layers() -> None:
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    gemma = gguf("gemma3", attention__key_length=256, **linear)
    full = RopeSpec(256, base=1e6, scaling=Linear(8))
    assert read(gemma) == {"full_attention": full, "sliding_attention": RopeSpec(256)}
    made = read({**gemma, "gemma3.rope.freq_base_swa": 500.0})
    assert made == {"full_attention": full, "sliding_attention": RopeSpec(256, base=500.0)}


def test_provenance_names_the_users_own_keys() -> None:
    sourced = provenance(
        {**GGUF, "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    )
    assert isinstance(sourced, Provenance)
    assert str(sourced).splitlines() == [
        "head_dim                       128        qwen2.embedding_length / "
        "qwen2.attention.head_count = 2048 / 16",
        "base                           1000000.0  qwen2.rope.freq_base",
        "rotary_dim                     128        all of head_dim",
        "start                          0          from the first channel",
        "interleaved                    False      GGUF architecture 'qwen2' "
        "(llama.cpp: llama_model_rope_type)",
        "scaling                        'YaRN'     qwen2.rope.scaling.type = 'yarn'",
        "scaling.factor                 4.0        qwen2.rope.scaling.factor",
        "scaling.original_max_position  32768      qwen2.context_length, as no key gives the "
        "original length",
        "axes                           None       one coordinate per position",
    ]


# --- facts of the code of llama.cpp -----------------------------------------------------------------

WINDOW = {"attention__sliding_window": 128}
GGUF_YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 8.0,
    "rope__scaling__original_context_length": 8192,
}
HALF, PAIRS = RopeSpec(128, base=1e6), RopeSpec(128, base=1e6, interleaved=True)
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
        {
            "full_attention": RopeSpec(128, base=1e6, scaling=YaRN(8, 8192)),
            "sliding_attention": HALF,
        },
    ),
    **{
        arch: (gguf(arch, **GGUF_YARN), RopeSpec(128, base=1e6, scaling=YaRN(8, 8192)))
        for arch in ("mellum", "olmo2")
    },
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
        RopeSpec(256, base=1e6, rotary_dim=64, start=192, interleaved=True),
    ),
    "baichuan 7B": (gguf("baichuan", 32), PAIRS),
    "granite": (gguf("granite", rope__scaling__finetuned=True), PAIRS),
}


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_architectures_of_llama_cpp(name: str) -> None:
    config, wanted = LLAMA_CPP[name]
    specs = read(config)
    assert specs == wanted
    if name in ("afmoe", "llama4", "smollm3"):
        assert [specs.of(layer) is None for layer in range(8)] == [False, False, False, True] * 2


def test_yarn_of_architectures_with_latent_attention() -> None:
    more = {"attention__key_length_mla": 192, "rope__dimension_count": 64, **GGUF_YARN}
    made = read(gguf("mistral4", **more, rope__scaling__yarn_log_multiplier=0.1))
    assert made.scaling == YaRN(8, 8192, mscale=1, mscale_all_dim=1)
    made = read(gguf("mistral3", **GGUF_YARN, rope__scaling__yarn_log_multiplier=1.0))
    assert made.scaling == YaRN(8, 8192, mscale=1, mscale_all_dim=1, scales_softmax=False)
    made = read(gguf("qwen2", **GGUF_YARN, rope__scaling__yarn_log_multiplier=1.0))
    assert made.scaling == YaRN(8, 8192)


def test_yarn_of_grok_begins_elsewhere() -> None:
    assert read(gguf("grok", **GGUF_YARN)).scaling == YaRN(8, 8192, beta_fast=8)
    made = read(gguf("grok", **GGUF_YARN, rope__scaling__yarn_beta_fast=16.0))
    assert made.scaling == YaRN(8, 8192, beta_fast=16)


# --- layers with a sliding window ---------------------------------------------------------------------

KINDS = [True, True, False, True, True, False, True, True]
TYPES = tuple("sliding_attention" if one else "full_attention" for one in KINDS)
LISTED = {**WINDOW, "attention__sliding_window_pattern": KINDS}
LOCAL = {**LISTED, "attention__key_length": 128, "rope__freq_base_swa": 5e3}
GEMMA4 = gguf(
    "gemma4",
    **LISTED,
    attention__key_length=512,
    attention__key_length_swa=256,
    rope__dimension_count=512,
    rope__dimension_count_swa=256,
)
LAGUNA = {"attention__key_length": 128, "rope__dimension_count": 64, **GGUF_YARN}
YARN_8 = YaRN(8, 8192)
SCALED = RopeSpec(128, base=1e6, scaling=YARN_8)


def test_layers_of_gemma4_differ_in_the_width_of_a_head() -> None:
    text = (
        "gemma4 must come with rope_freqs.weight, which scales its layers with full attention; pass the path of the "
        ".gguf file, or add the tensor to the metadata."
    )
    refused(GEMMA4, text)
    specs = read({**GEMMA4, "rope_freqs.weight": [1.0] * 64 + [1e30] * 192})
    full, sliding = specs["full_attention"], specs["sliding_attention"]
    assert (full.head_dim, full.rotary_dim, full.base) == (512, 512, 1e6)
    assert_divided(full, 512, 1e6, [1.0] * 64 + [1e30] * 192)
    assert sliding == RopeSpec(256)
    assert specs.layers == TYPES


# Architecture, keys -> the specs of layers with full attention and with a window.
WINDOWED: dict[str, tuple[dict[str, Any], RopeSpec, RopeSpec]] = {
    "gemma3": (gguf("gemma3", **LOCAL), HALF, RopeSpec(128, base=5e3)),
    "laguna": (
        gguf("laguna", **LAGUNA, **LISTED, rope__freq_base_swa=1e4, rope__dimension_count_swa=128),
        RopeSpec(128, base=1e6, rotary_dim=64, scaling=YARN_8),
        RopeSpec(128),
    ),
    "laguna without keys for windows": (
        gguf("laguna", **LAGUNA, **LISTED),
        RopeSpec(128, base=1e6, rotary_dim=64, scaling=YARN_8),
        RopeSpec(128, base=1e6, rotary_dim=64),
    ),
    "mimo2": (
        gguf("mimo2", **LOCAL, rope__dimension_count=64),
        RopeSpec(128, base=1e6, rotary_dim=64),
        RopeSpec(128, base=5e3, rotary_dim=64),
    ),
    "step35": (
        gguf("step35", **LOCAL, rope__dimension_count=128),
        RopeSpec(128, base=1e6, rotary_dim=64),
        RopeSpec(128, base=5e3),
    ),
    "step35 with a width of its own": (
        gguf("step35", **LOCAL, rope__dimension_count=64, rope__dimension_count_swa=128),
        RopeSpec(128, base=1e6, rotary_dim=32),
        RopeSpec(128, base=5e3),
    ),
    # Layers with a window may share the base but not the scaling.
    **{arch: (gguf(arch, **LOCAL, **GGUF_YARN), SCALED, HALF) for arch in ("mellum", "olmo2")},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_with_a_window_have_keys_of_their_own(name: str) -> None:
    config, full, sliding = WINDOWED[name]
    specs = read(config)
    assert specs == {"full_attention": full, "sliding_attention": sliding}
    assert specs.layers == TYPES


@pytest.mark.parametrize("arch", ["gpt-oss", "gemma2"])
def test_layers_with_a_window_are_scaled_where_llama_cpp_scales_them(arch: str) -> None:
    sliding = RopeSpec(128, base=5e3, scaling=YARN_8)
    made = read(gguf(arch, **LOCAL, **GGUF_YARN))
    assert made == {"full_attention": SCALED, "sliding_attention": sliding}


def test_laguna_may_have_no_windows() -> None:
    spec = RopeSpec(128, base=1e6, rotary_dim=64, scaling=YARN_8)
    for more in ({}, {"attention__sliding_window": 0}, {"rope__freq_base_swa": 1e4}):
        assert read(gguf("laguna", **LAGUNA, **more)) == spec


def test_the_factors_of_step35_are_for_its_full_layers() -> None:
    config = gguf("step35", **LOCAL, rope__dimension_count=128)
    specs = read({**config, "rope_freqs.weight": [2.0] * 64})
    assert_divided(specs["full_attention"], 64, 1e6, [2.0] * 32)
    assert specs["sliding_attention"] == RopeSpec(128, base=5e3)


@pytest.mark.parametrize(
    "arch, stated, full",
    [
        ("gemma3", None, {5}),
        ("gemma3", 4, {3, 7}),
        ("gemma3", 0, set()),
        ("gemma3", 1, set(range(8))),
        ("gemma-embedding", None, {5}),
        ("modern-bert", None, {0, 3, 6}),
        ("modern-bert", 2, {0, 2, 4, 6}),
        ("laguna", None, {0, 4}),
        ("cohere2", None, {3, 7}),
        ("olmo2", KINDS, {2, 5}),
        ("olmo2", [*KINDS, True], {2, 5}),  # of a layer that only predicts
    ],
)
def test_layers_are_told_by_a_list_or_a_period(arch: str, stated: Any, full: set[int]) -> None:
    more = {} if stated is None else {"attention__sliding_window_pattern": stated}
    more |= GGUF_YARN if arch in ("laguna", "olmo2") else {}  # else all layers are alike
    specs = read(gguf(arch, **WINDOW, **more, attention__key_length=128, rope__dimension_count=128))
    assert {n for n, name in enumerate(specs.layers) if name == "full_attention"} == full
    assert len(specs.layers) == 8


def test_lists_of_windows_that_do_not_fit() -> None:
    key = "gemma3.attention.sliding_window_pattern"
    config = gguf("gemma3", **LOCAL)
    refused({**config, key: KINDS[1:]}, f"{key} must have an entry for each of 8 layers but has 7.")
    large = {**config, key: 6, "gemma3.block_count": 10**9}
    refused(large, "gemma3.block_count must be at most 65536 but got 1000000000.")
    step = gguf("step35", **LOCAL, rope__dimension_count=128)
    made = read({**step, "step35.attention.sliding_window_pattern": 4})  # not a list
    assert made.layers is None


@pytest.mark.parametrize("arch", ["granite", "granitemoe", "granitehybrid"])
def test_granites_switch_in_gguf(arch: str) -> None:
    config = gguf(arch, rope__scaling__finetuned=False)
    refused(config, f"the config has no RoPE: {arch}.rope.scaling.finetuned is False.")


def test_other_layers_in_gguf_are_unknown() -> None:
    with pytest.raises(ValueError, match=r"known but got llama\.rope\.dimension_count_swa"):
        read(gguf("llama", rope__dimension_count_swa=64))
    with pytest.raises(
        ValueError, match="the table of families does not contain GGUF architecture 'llama4'"
    ):
        read(gguf("llama4", attention__sliding_window=0))
