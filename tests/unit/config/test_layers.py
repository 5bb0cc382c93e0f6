"""Test layers that differ: which rotate, sections and bases of their own, and lists with an entry for each layer.

A key that says which layers rotate is read or is an error; `strict=False` does not silence it. A type of layer that
has no spec is an error, never None in silence.
"""

import copy
import pickle
from typing import Any

import pytest

from tests.support.helpers import refusals
from tests.support.reading import (
    JUNK,
    gguf,
    llama,
    outcome,
    read,
    refused,
    try_everywhere,
    two,
    without,
)
from tightrope import RopeSpec
from tightrope.config import LayerSpecs
from tightrope.frequencies import YaRN

LLAMA = llama(num_hidden_layers=4)
ZEBRA = {**LLAMA, "model_type": "zebra"}
ANSWERS: dict[str, Any] = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}
SPEC = RopeSpec(128, base=5e5)


# --- which layers rotate --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"layer_rope_theta": [5e5, 500000, 5e5, 0]},
    ],
    ids=repr,
)
def test_a_family_that_is_not_in_the_table_may_list_the_layers_that_rotate(
    more: dict[str, Any],
) -> None:
    config = {**ZEBRA, **more}
    specs = read(config, interleaved=False, rotary_dim=128)
    assert specs == {"rope": SPEC, "no_rope": None}
    assert specs.layers == ("rope", "rope", "rope", "no_rope")
    text = "rope_layers must be ['rope'] for model_type 'zebra' but got 'all'."
    refused(config, text, **ANSWERS)
    # It is not asked which layers rotate.
    assert str(outcome(config)).endswith("interleaved=False, rotary_dim=128).")


def test_a_list_of_layers_that_all_rotate_answers_the_question_too() -> None:
    listed = {"layer_rope_theta": [5e5] * 4}
    assert read({**ZEBRA, **listed}, interleaved=False, rotary_dim=128) == SPEC
    assert read({**ZEBRA, **listed}, **ANSWERS) == SPEC
    for listed in (
        {"no_rope_layers": []},
        {"no_rope_layers": (1,) * 4, "no_rope_layer_interval": 4},
    ):
        assert read({**LLAMA, **listed}) == read({**ZEBRA, **listed}, **ANSWERS) == SPEC


# A key that public code reads in two opposite ways -> the types that it gives the layers.
TWO_WAYS: list[tuple[dict[str, Any], list[str]]] = [
    ({"no_rope_layers": [1, 1, 1, 0]}, ["no_rope_layers=1"] * 3 + ["no_rope_layers=0"]),
    ({"no_rope_layers": [True, False] * 2}, ["no_rope_layers=1", "no_rope_layers=0"] * 2),
    ({"no_rope_layers": [1] * 4}, ["no_rope_layers=1"] * 4),
    ({"no_rope_layers": [0] * 4}, ["no_rope_layers=0"] * 4),
    ({"no_rope_layer_interval": 4}, ["others"] * 3 + ["last_of_4"]),
    ({"no_rope_layers": [], "no_rope_layer_interval": 2}, ["others", "last_of_2"] * 2),
    (
        {"no_rope_layers": [0, 1, 1, 1], "layer_types": ["full_attention", "mamba"] * 2},
        ["no_rope_layers=0", "mamba", "no_rope_layers=1", "mamba"],
    ),
]


@pytest.mark.parametrize("config", [ZEBRA, without(ZEBRA, "model_type")], ids=["zebra", "no type"])
@pytest.mark.parametrize("more, types", TWO_WAYS, ids=repr)
def test_a_key_with_two_meanings_is_a_question_for_a_family_that_is_not_in_the_table(
    more: dict[str, Any], types: list[str], config: dict[str, Any]
) -> None:
    config, rest = {**config, **more}, {"interleaved": False, "rotary_dim": 128}
    kinds = [name for name in dict.fromkeys(types) if name != "mamba"]
    text = str(outcome(config, **rest))
    assert "must give the layers that rotate" in text
    assert f"of {', '.join(map(repr, kinds))} (public code reads" in text
    assert read(config, **ANSWERS) == SPEC
    for kind in kinds:
        specs = read(config, **rest, rope_layers=[kind])
        if len(kinds) == 1:
            assert specs == SPEC
        else:
            assert specs == {name: SPEC if name == kind else None for name in kinds}
            assert specs.layers == tuple(types)


def test_such_a_key_without_a_type_for_each_layer_is_an_error() -> None:
    sections = {name: {"rope_type": "default", "rope_theta": 7.0} for name in "ab"}
    typed = {
        **without(ZEBRA, "rope_theta"),
        "layer_types": ["a", "b"] * 2,
        "rope_parameters": sections,
    }
    for config in (
        {**typed, "no_rope_layers": [1, 1, 0, 0]},
        {**without(ZEBRA, "num_hidden_layers"), "no_rope_layer_interval": 4},
    ):
        assert "may say which layers rotate must be known" in str(outcome(config, **ANSWERS))


# Key -> a value, and whether it is read where the family is not in the table.
SAY_WHICH_LAYERS: dict[str, tuple[Any, bool]] = {
    "no_rope_layers": ([1, 1, 1, 0], True),
    "no_rope_layer_interval": (4, True),
    "layer_rope_theta": ([5e5, 5e5, 5e5, 0], True),
    "nope_layer_interval": (4, False),
    "no_rope_freq": ([0, 1, 1, 1], False),
    "use_rope": ([True, True, False, True], False),
    "rope_layers": ([0, 1], False),
    "use_rope_layers": ("0,1", False),
    "nope_layers": ([3], False),
    "rope_scaling_layers": ([0, 1], False),
    "nope_on_global_attention": (True, False),
    "rope_skip_layers": (2, False),
    "use_pe_every_n": (4, False),
    "no_pe_layers": (4, False),
    "rotary_interval": (2, False),
    "attention_rope_pattern": ("LLN", False),
}


@pytest.mark.parametrize("key", SAY_WHICH_LAYERS)
def test_a_key_that_says_which_layers_rotate_is_never_ignored(key: str) -> None:
    value, is_read = SAY_WHICH_LAYERS[key]
    text = (
        f"every key that may say which layers rotate must be known but got {key}; pass a config without it only if "
        f"it has no effect, or make a spec by hand for each kind of layers."
    )
    for strict in (True, False):
        refused({**LLAMA, key: value}, text, strict=strict)
        if not is_read:
            refused({**ZEBRA, key: value}, text, **ANSWERS, strict=strict)


MEGATRON = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rotary_base": 500000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
}


@pytest.mark.parametrize(
    "config",
    [
        gguf("llama", attention__rope_pattern=[1, 0]),
        {**MEGATRON, "no_rope_freq": 4},
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "layers": [0, 1]}},
        {**LLAMA, "attention": {"nope_every": 4}},
    ],
    ids=["GGUF", "Megatron", "a rope section", "another section"],
)
def test_such_a_key_in_another_format_or_section_is_never_ignored(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="may say which layers rotate must be known but got"):
        read(config, strict=False)


# --- types of layers ------------------------------------------------------------------------------

TYPED = llama(layer_types=["full_attention", "sliding_attention", "conv"])
COHERE = {**TYPED, "model_type": "cohere2"}
QWEN = {
    "model_type": "qwen3_next",
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "layer_types": ["linear_attention", "full_attention"],
}
BLOCKS = llama(layers_block_type=["mamba", "attention"])


@pytest.mark.parametrize(
    "config, other, has",
    [
        (TYPED, "conv", "full_attention, sliding_attention"),
        (COHERE, "conv", "full_attention, sliding_attention"),
        (QWEN, "linear_attention", "full_attention"),
        (BLOCKS, "mamba", "attention"),
    ],
    ids=["llama", "cohere2", "qwen3_next", "layers_block_type"],
)
def test_a_type_of_layer_without_attention_has_no_spec(
    config: dict[str, Any], other: str, has: str
) -> None:
    text = (
        f"layer_type must be one of the config's layer types but got {other!r}, which has no attention; the config "
        f"has {has}."
    )
    refused(config, text, layer_type=other)
    assert read(QWEN, layer_type="full_attention") == RopeSpec(256, base=1e7, rotary_dim=64)
    assert read(BLOCKS, layer_type="attention") == SPEC


def test_none_is_only_for_attention_that_does_not_rotate() -> None:
    specs = read(COHERE)
    assert read(COHERE, layer_type="full_attention") is None
    assert (specs.of(0), specs.of(2)) == (None, None)  # NoPE, and a convolution
    text = (
        "model_type 'cohere2' must have layers of types sliding_attention, full_attention only, but layer_types "
        "has chunked_attention."
    )
    refused({**COHERE, "layer_types": ["full_attention", "chunked_attention"]}, text)


def test_layer_specs_are_a_mapping_that_a_person_can_read() -> None:
    specs = LayerSpecs({"a": RopeSpec(64), "b": None}, ("a", "a", "b", "a", "b", "a"))
    assert dict(specs) == {"a": RopeSpec(64), "b": None}
    assert repr(specs) == (
        "LayerSpecs({'a': RopeSpec(head_dim=64), 'b': None}, layers=<2 × a, 1 × b, 1 × a, 1 × b, …>)"
    )
    with pytest.raises(
        ValueError, match=r"^\[LayerSpecs.of\] layer must lie in \[0, 6\) but got 6\.$"
    ):
        specs.of(6)
    with pytest.raises(ValueError, match="must list the type of each layer but does not"):
        LayerSpecs({"a": None}).of(0)


def test_a_layer_of_a_type_without_a_spec_is_an_error() -> None:
    specs = LayerSpecs({"a": RopeSpec(64)}, ("a", "b", "mamba"))
    assert specs.of(2) is None
    text = r"^\[LayerSpecs.of\] layer 1 must be of a type with a spec, of a, but is 'b'\.$"
    with pytest.raises(ValueError, match=text):
        specs.of(1)


test_errors_of_layer_specs = refusals(
    "LayerSpecs",
    TypeError={
        "specs must be a dictionary but got 3.": lambda: LayerSpecs(3),
        "each spec must be a RopeSpec or None but got 3.": lambda: LayerSpecs({"a": 3}),
        "layers must be a tuple of layer types or None but got 'ab'.": (
            lambda: LayerSpecs({"a": None}, "ab")
        ),
    },
    AttributeError={
        f"{name} must be read from one spec of a layer type, as layers differ; specs['b'].{name}.": (
            lambda name=name: getattr(LayerSpecs({"a": None, "b": RopeSpec(64)}), name)
        )
        for name in ("cos_sin", "at", "head_dim")
    },
)
test_errors_of_layers = refusals(
    "LayerSpecs.of",
    TypeError={
        f"layer must be an int but got {layer!r}.": (
            lambda layer=layer: LayerSpecs({"a": None}, ("a",)).of(layer)
        )
        for layer in ("a", True, 0.5)
    },
)


def test_other_attributes_of_layer_specs_and_their_copies() -> None:
    specs = LayerSpecs({"a": RopeSpec(64)})
    assert not hasattr(specs, "keys_of")
    assert copy.deepcopy(specs) == pickle.loads(pickle.dumps(specs)) == specs


@pytest.mark.parametrize("name", ["layer_type", "section"])
@pytest.mark.parametrize("value", ["sliding", ["a"], {"a": 1}, 3, b"a"], ids=repr)
def test_any_other_object_is_no_layer_type_and_no_section(name: str, value: object) -> None:
    text = {
        "layer_type": f"layer_type must be one of the config's layer types but got {value!r}; the config has a.",
        "section": f"section must be one of the config's sections but got {value!r}; the config has none.",
    }
    refused({**LLAMA, "layer_types": ["a"] * 4}, text[name], **{name: value})


# --- a section or a base for each type --------------------------------------------------------------


def test_layers_of_rope_parameters_without_rope() -> None:
    full, sliding = "full_attention", "sliding_attention"
    sections = {full: {"rope_type": "default"}, sliding: None}
    listed = [full, sliding, full]
    config = llama(model_type="lfm3", head_dim=128, layer_types=listed, rope_parameters=sections)
    specs = read(config)  # a section without a base takes the one beside it
    assert specs == {full: SPEC, sliding: None}
    assert specs.layers == (full, sliding, full)
    assert [specs.of(n) for n in range(3)] == [SPEC, None, SPEC]
    assert read(config, layer_type=full) == SPEC
    assert read(config, layer_type=sliding) is None


def test_equal_layers_are_one_spec() -> None:
    sections = {name: {"rope_type": "default", "rope_theta": 7.0} for name in "ab"}
    typed = llama(model_type="lfm3", head_dim=128, layer_types=["a", "b"], rope_parameters=sections)
    config = without(typed, "rope_theta")
    assert read(config) == read(config, layer_type="b") == RopeSpec(128, base=7.0)


def test_a_section_for_each_type_of_a_class_that_has_types() -> None:
    """Llama's class reads one section; Gemma's has two types of layers, whether the file lists them or not."""
    sections = {
        name: {"rope_type": "default", "rope_theta": 7.0}
        for name in ("full_attention", "slidng_attention")
    }
    refused(
        llama(rope_parameters=sections),
        "model_type 'llama' must have one rope section but has one for full_attention, slidng_attention.",
    )
    gemma = llama(model_type="gemma3_text", head_dim=128, rope_parameters=sections)
    refused(
        without(gemma, "rope_theta"),
        "a rope section must be of a type of layers, of full_attention, sliding_attention, but got full_attention, "
        "slidng_attention.",
    )
    # Its class adds the section of a type that is left out.
    some = {"full_attention": sections["full_attention"]}
    specs = read({**without(gemma, "rope_theta"), "rope_parameters": some})
    assert specs == {"full_attention": RopeSpec(128, base=7.0), "sliding_attention": RopeSpec(128)}


def test_one_section_for_all_layers() -> None:
    sections = {
        name: {"rope_type": "default", "rope_theta": 1e4}
        for name in ("full_attention", "sliding_attention")
    }
    text = "model_type 'exaone4' must have one rope section but has one for full_attention, sliding_attention."
    config = {**TYPED, "model_type": "exaone4", "sliding_window": 8, "rope_theta": None}
    refused({**config, "rope_parameters": sections}, text)


V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_hidden_layers": 4,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
}
V4_YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
V4_FLAT: dict[str, Any] = {
    **V4,
    "compress_ratios": [0, 128, 4, 0, 0],
    "rope_scaling": {"type": "yarn", **V4_YARN},
}
V4_MAIN = {"rope_type": "default", "rope_theta": 1e4}
V4_COMPRESS = {**V4_YARN, "rope_type": "yarn", "rope_theta": 1.6e5, "attention_factor": 1.0}
V4_NESTED: dict[str, Any] = {
    **without(V4, "rope_theta", "compress_rope_theta"),
    "rope_parameters": {"main": V4_MAIN, "compress": V4_COMPRESS},
}


def test_deepseek_v4_has_a_section_for_layers_that_compress() -> None:
    main = RopeSpec(512, base=1e4, rotary_dim=64, start=448, interleaved=True)
    yarn = YaRN(16, 65536, attention_factor=1)
    compress = RopeSpec(512, base=1.6e5, rotary_dim=64, start=448, interleaved=True, scaling=yarn)
    specs = read(V4_FLAT)
    assert specs == {
        "sliding_attention": main,
        "compressed_sparse_attention": compress,
        "heavily_compressed_attention": compress,
    }
    assert [specs.of(layer) for layer in range(4)] == [main, compress, compress, main]
    nested = read({**V4_NESTED, "layer_types": list(specs.layers)})
    assert (nested, nested.layers) == (specs, specs.layers)


@pytest.mark.parametrize(
    "config, text",
    [
        (
            {**V4_NESTED, "compress_rope_theta": 5.0},
            two(
                "base",
                "rope_parameters.compress.rope_theta = 160000.0",
                "compress_rope_theta = 5.0",
            ),
        ),
        (
            {**V4_NESTED, "rope_parameters": {"main": V4_MAIN}},
            "model_type 'deepseek_v4' must have the rope sections main and compress but has main.",
        ),
        (
            {**V4_FLAT, "compress_ratios": [0, 8, 4, 0]},
            "compress_ratios must hold 0, 4 and 128 only but got [0, 8, 4, 0].",
        ),
    ],
)
def test_layers_that_compress_need_both_sections(config: dict[str, Any], text: str) -> None:
    refused({"layer_types": ["sliding_attention"] * 4, **config}, text)


MUSE: dict[str, Any] = {
    "model_type": "muse_glimmer_text",
    "head_dim": 128,
    "rope_theta": 1e4,
    "num_hidden_layers": 4,
    "layer_rope_theta": [1e4, 0, 10000, 0],
}


def test_a_base_for_each_layer() -> None:
    specs = read(MUSE)
    assert specs == {"rope": RopeSpec(128), "no_rope": None}
    assert specs.layers == ("rope", "no_rope", "rope", "no_rope")
    text = two("base", "rope_theta = 10000.0", "layer_rope_theta[2] = 500.0")
    refused({**MUSE, "layer_rope_theta": [1e4, 0, 500.0, 0]}, text)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_these_is_refused_in_a_sentence(junk: object) -> None:
    for config in (V4_FLAT, without(MUSE, "num_hidden_layers")):
        try_everywhere(junk, config)
        try_everywhere(junk, config, **ANSWERS)


# --- lists with an entry for each layer -------------------------------------------------------------

SMOLLM = {**LLAMA, "model_type": "smollm3"}
SLIDING = ["sliding_attention"] * 3
LISTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "layer_types": ({**LLAMA, "model_type": "cohere2"}, [*SLIDING, "full_attention"]),
    "layers_block_type": (LLAMA, ["attention", "mamba", "attention", "mamba"]),
    "no_rope_layers": (SMOLLM, [1, 1, 1, 0]),
    "layer_rope_theta": (MUSE, [1e4, 0, 1e4, 0]),
    "compress_ratios": (V4, [0, 4, 128, 4]),
}


@pytest.mark.parametrize("key", LISTS)
def test_a_list_has_an_entry_for_each_layer(key: str) -> None:
    config, listed = LISTS[key]
    made = read({**config, key: listed})
    rule = f"{key} must have an entry for each of 4 layers but has"
    refused({**config, key: listed[:3]}, f"{rule} 3.")
    more = {**config, key: [*listed, listed[0]]}
    if key != "compress_ratios":
        refused(more, f"{rule} 5.")
        more |= {"num_nextn_predict_layers": 1}  # files of Step 3.5 list these layers too
        refused({**more, key: [*more[key], listed[0]]}, f"{rule} 6.")
    # The published format of DeepSeek V4 lists layers that only predict.
    again = read(more)
    assert again == made
    if isinstance(again, LayerSpecs):
        assert again.layers == made.layers
    for wrong in ("sliding_attention", {"a": 1}, 4, True, 0):
        refused({**config, key: wrong}, f"{key} must be a list but got {wrong!r}.", TypeError)


@pytest.mark.parametrize("wrong", [[2, 1, 1, 0], [1, "0", "1", 0], [1, 1, 1, None], [0.5, 1, 1, 1]])
def test_no_rope_layers_holds_flags(wrong: list[Any]) -> None:
    first = next(flag for flag in wrong if flag != 1)
    text = f"no_rope_layers must hold 0 and 1 only but got {first!r}."
    refused({**SMOLLM, "no_rope_layers": wrong}, text)
    refused({**ZEBRA, "no_rope_layers": wrong}, text, **ANSWERS)


def test_ratios_and_types_must_agree() -> None:
    types = ["sliding_attention", "compressed_sparse_attention"] * 2
    config = {**V4, "layer_types": types}
    assert read({**config, "compress_ratios": [0, 4, 0, 4, 0]}).layers == tuple(types)
    text = two(
        "layer 3",
        "layer_types[3] = 'compressed_sparse_attention'",
        "compress_ratios[3] = 'sliding_attention'",
    )
    refused({**config, "compress_ratios": [0, 4, 0, 0]}, text)
