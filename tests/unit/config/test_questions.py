"""Test what no key and no table gives: `from_config` asks for it, in one error, and each answer works."""

import re
from typing import Any

import pytest
import torch

from tests.support.reading import (
    JUNK,
    LATENT,
    LAYERS,
    asked,
    axial,
    gguf,
    llama,
    outcome,
    read,
    refused,
    try_everywhere,
    two,
    whole_head,
    without,
)
from tightrope import RopeSpec
from tightrope.config import provenance

TYPES = ["full_attention", "sliding_attention", "conv"]
LLAMA = llama(layer_types=TYPES)
ZEBRA = llama(model_type="zebra", layer_types=TYPES)
ANSWERS: dict[str, Any] = {"interleaved": True, "rotary_dim": 64, "rope_layers": "all"}
ZEBRA_GGUF = without(
    gguf("zebra", attention__key_length=128, rope__dimension_count=64), "zebra.block_count"
)


# --- an unknown family ----------------------------------------------------------------------------


def test_every_answer_is_used() -> None:
    part = RopeSpec(128, base=5e5, rotary_dim=64, interleaved=True)
    assert read(ZEBRA, **ANSWERS) == part
    assert read(ZEBRA, **ANSWERS | {"rotary_dim": 128}) == RopeSpec(128, base=5e5, interleaved=True)
    assert read(ZEBRA, **ANSWERS, start=64) == RopeSpec(
        128, base=5e5, rotary_dim=64, start=64, interleaved=True
    )
    specs = read(ZEBRA, **ANSWERS | {"rope_layers": ["sliding_attention"]})
    assert specs == {"full_attention": None, "sliding_attention": part}
    assert [specs.of(layer) for layer in range(3)] == [None, part, None]


def test_the_source_of_an_answer_is_the_argument() -> None:
    stated = {**ANSWERS, "rope_layers": ("sliding_attention",)}
    sources = {row.field: row.source for row in provenance(ZEBRA, **stated, start=0).rows}
    for field in ("interleaved", "rotary_dim", "start"):
        assert sources[field] == f"the argument {field}"
    assert sources["no RoPE"] == "the argument rope_layers"


FULL = {"rope_theta": 5e5, "rope_type": "default"}
ONE = {"head_dim": 64, "rope_theta": 1e4}  # one rotation, and no model
LATENT_GGUF = gguf("zebra", attention__key_length_mla=192, rope__dimension_count=64)


@pytest.mark.parametrize(
    "config, missing",
    [
        (ZEBRA, "interleaved rotary_dim rope_layers"),
        ({**ZEBRA, "rotary_dim": 64}, "interleaved rope_layers"),
        ({**ZEBRA, "partial_rotary_factor": 0.5}, "interleaved rope_layers"),
        ({**ZEBRA, "rotary_pct": 1.0}, "interleaved rope_layers"),
        ({**ZEBRA, "is_neox_style": False}, "rotary_dim rope_layers"),
        ({**ZEBRA, **LATENT}, "interleaved rope_layers"),
        ({**ZEBRA, "rope_parameters": dict.fromkeys(TYPES[:2], FULL)}, "interleaved rotary_dim"),
        (ONE, "interleaved rotary_dim"),
        ({**ONE, "num_hidden_layers": 2}, "interleaved rotary_dim rope_layers"),
        (LATENT_GGUF, "interleaved start rope_layers"),
        ({**LATENT_GGUF, "zebra.rope.dimension_count": 192}, "interleaved rope_layers"),
    ],
)
def test_only_what_is_missing_is_asked(config: dict[str, Any], missing: str) -> None:
    names = missing.split()
    for answered in (None, *names):
        stated = {} if answered is None else {answered: {**ANSWERS, "start": 128}[answered]}
        with pytest.raises(ValueError, match="the table of families does not contain") as caught:
            read(config, **stated)
        call = str(caught.value).rpartition("RopeSpec.from_config(config, ")[2]
        assert set(re.findall(r"(\w+)=", call)) - set(stated) == set(names) - {answered}


def test_the_start_of_a_slice_of_latent_attention_can_be_answered() -> None:
    made = read(LATENT_GGUF, interleaved=False, start=128, rope_layers="all")
    assert made == RopeSpec(192, base=1e6, rotary_dim=64, start=128)


def test_layers_can_be_named_where_the_config_lists_them() -> None:
    text = asked(
        "the layers that rotate",
        "model_type 'zebra'",
        f"{LAYERS}, or a list of the types that do, of 'full_attention', 'sliding_attention'",
        example="interleaved=True, rotary_dim=64, rope_layers='all'",
    )
    refused(ZEBRA, text, interleaved=True, rotary_dim=64)
    specs = read(
        {**ZEBRA_GGUF, "layer_types": ["a", "b"]}, interleaved=True, start=0, rope_layers=["b"]
    )
    assert specs == {"a": None, "b": RopeSpec(128, base=1e6, rotary_dim=64, interleaved=True)}


def test_the_first_channel_is_asked_for_where_a_part_rotates() -> None:
    text = asked(
        "the first channel that rotates",
        "GGUF architecture 'zebra'",
        "start=0 if the first 64 channels of a head rotate, or the first that does",
        example="interleaved=True, start=0, rope_layers='all'",
    )
    refused(ZEBRA_GGUF, text, interleaved=True, rope_layers="all")


def test_the_example_begins_at_the_first_channel_that_rotates() -> None:
    text = asked(
        "the channels that rotate",
        "model_type 'zebra'",
        "rotary_dim=64 if all 64 channels from 64 on rotate, or the number that do",
        example="interleaved=True, rotary_dim=64, start=64, rope_layers='all'",
    )
    refused(ZEBRA, text, interleaved=True, start=64, rope_layers="all")


def test_a_section_for_each_type_of_layer_may_lack_those_that_do_not_rotate() -> None:
    config = {**ZEBRA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}
    text = (
        "each layer type must have a rope section but the config has none for sliding_attention; if they do not "
        "rotate, pass rope_layers, a list of the types that do."
    )
    refused(config, text, interleaved=True, rotary_dim=64)
    specs = read(config, **ANSWERS | {"rope_layers": ["full_attention"]})
    wanted = RopeSpec(128, base=5e5, rotary_dim=64, interleaved=True)
    assert specs == {"full_attention": wanted, "sliding_attention": None}


def test_an_error_that_no_answer_mends_comes_first() -> None:
    text = axial("rope_parameters.rope_type", "zebra")
    refused({**ZEBRA, "rope_parameters": {"rope_type": "axial"}}, text)
    with pytest.raises(TypeError, match="factor must be"):
        read({**ZEBRA, "rope_scaling": {"type": "linear", "factor": "x"}})


@pytest.mark.parametrize("config", [ZEBRA, {**ZEBRA, "layer_types": None, "num_hidden_layers": 3}])
def test_the_call_of_a_refusal_gives_a_spec(config: dict[str, Any]) -> None:
    several = {"a_config": LLAMA, "b_config": config}
    for one, stated in (
        (config, {}),
        ({"text_config": config}, {}),
        (several, {"section": "b_config"}),
    ):
        call = re.search(
            r"for code like Llama's: RopeSpec\.from_config\((.*)\)\.$", str(outcome(one, **stated))
        )
        assert call is not None
        assert eval(f"read({call[1]})", {"read": read, "config": one}) == RopeSpec(128, base=5e5)


# --- arguments that contradict --------------------------------------------------------------------

PHI = {**LLAMA, "model_type": "phi"}  # its class rotates half of the channels by default
DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3", **LATENT}
COHERE = {**LLAMA, "model_type": "cohere2"}


def test_arguments_may_repeat_keys_and_families() -> None:
    assert read(LLAMA, rotary_dim=128, start=0, rope_layers="all") == RopeSpec(128, base=5e5)
    assert read(LLAMA, rope_layers={"full_attention", "sliding_attention"}) == RopeSpec(
        128, base=5e5
    )
    assert read(PHI, rotary_dim=64, base=5e5) == RopeSpec(128, base=5e5, rotary_dim=64)
    assert read(DEEPSEEK, rotary_dim=32, start=96).start == 96
    sliding = RopeSpec(128, base=5e5, interleaved=True)
    assert read(COHERE, rope_layers=["sliding_attention"])["sliding_attention"] == sliding


OF_LAYERS = "rope_layers must be 'all' or types of layers in the config but got"
HAS = "; the config has full_attention, sliding_attention."


@pytest.mark.parametrize(
    "config, stated, text",
    [
        (LLAMA, {"rotary_dim": 64}, whole_head("llama", "64 from the argument rotary_dim")),
        (LLAMA, {"base": 1e4}, two("base", "rope_theta = 500000.0", "the argument base = 10000.0")),
        (LLAMA, {"start": 64}, "start must be 0 (from the first channel) but got 64."),
        (
            LLAMA,
            {"rope_layers": ["full_attention"]},
            "rope_layers must be ['full_attention', 'sliding_attention'] for model_type 'llama' but got "
            "['full_attention'].",
        ),
        (
            {**PHI, "rotary_dim": 32},  # its class takes a part from the section alone
            {},
            two(
                "rotary_dim",
                "rotary_dim = 32",
                "default of PhiConfig, transformers 5.23 = 0.5 of 128 = 64",
            ),
        ),
        (
            {**ZEBRA, "rotary_dim": 64},
            {**ANSWERS, "rotary_dim": 32},
            two("rotary_dim", "rotary_dim = 64", "the argument rotary_dim = 32"),
        ),
        (DEEPSEEK, {"start": 0}, "start must be 96 (qk_nope_head_dim) but got 0."),
        (
            DEEPSEEK,
            {"rotary_dim": 64},
            two("rotary_dim", "qk_rope_head_dim = 32", "the argument rotary_dim = 64"),
        ),
        (
            COHERE,
            {"rope_layers": "all"},
            "rope_layers must be ['sliding_attention'] for model_type 'cohere2' but got 'all'.",
        ),
        (ZEBRA, {**ANSWERS, "rope_layers": ["full"]}, f"{OF_LAYERS} ['full']{HAS}"),
        (ZEBRA, {**ANSWERS, "rope_layers": ["conv"]}, f"{OF_LAYERS} ['conv']{HAS}"),
        (
            {**ZEBRA, "layer_types": None},
            {**ANSWERS, "rope_layers": ["a"]},
            f"{OF_LAYERS} ['a']; the config has no layer_types.",
        ),
        (
            ZEBRA,
            {**ANSWERS, "rotary_dim": 0},
            "the argument rotary_dim must be at least 1 but got 0.",
        ),
        (ZEBRA, {**ANSWERS, "start": -1}, "the argument start must be at least 0 but got -1."),
    ],
)
def test_arguments_must_agree_with_keys_and_families(
    config: dict[str, Any], stated: dict[str, Any], text: str
) -> None:
    refused(config, text, **stated)


def test_a_width_is_a_whole_number() -> None:
    text = "the argument rotary_dim must be an int but got 64.0."
    refused(ZEBRA, text, TypeError, **ANSWERS | {"rotary_dim": 64.0})


@pytest.mark.parametrize(
    "wrong",
    ["full_attention", 3, [], (), set(), frozenset(), {}, "", b"", b"all", torch.ones(3)],
    ids=repr,
)
def test_rope_layers_is_all_or_a_collection_that_is_not_empty(wrong: Any) -> None:
    text = f"rope_layers must be 'all', a collection of layer types that is not empty, or None but got {wrong!r}."
    for config in (LLAMA, ZEBRA, {**ZEBRA, "layer_types": None}):
        refused(config, text, TypeError, **ANSWERS | {"rope_layers": wrong})


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_an_argument_is_refused_in_a_sentence(junk: Any) -> None:
    for name in ("rotary_dim", "start", "rope_layers"):
        for config in (ZEBRA, LLAMA, {**ZEBRA, **LATENT}):
            outcome(config, **ANSWERS | {name: junk})


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_a_config_of_an_unknown_family_is_refused_in_a_sentence(junk: object) -> None:
    try_everywhere(junk, {**ZEBRA, **LATENT})
    try_everywhere(junk, {**ZEBRA, **LATENT}, **ANSWERS)
