"""Test the width of a head: each key that may state it is read or contradicts another, and layers may differ."""

from typing import Any

import pytest

from tests.support.reading import llama, outcome, read, refused, two, without
from tightrope import Axes, RopeSpec
from tightrope.config import keys

LLAMA = llama(num_hidden_layers=4)
ZEBRA = {**LLAMA, "model_type": "zebra"}
ANSWERS: dict[str, Any] = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}
SPEC = RopeSpec(128, base=5e5)
DERIVED = "hidden_size / num_attention_heads = 4096 / 32 = 128"


@pytest.mark.parametrize("key", [*keys.HEAD_DIM, *keys.HEAD_DIM_ELSEWHERE])
def test_every_key_for_the_width_of_a_head_is_read_or_contradicts(key: str) -> None:
    assert read({**ZEBRA, key: 256}, **ANSWERS | {"rotary_dim": 256}) == RopeSpec(256, base=5e5)
    assert read({**LLAMA, key: 128}) == SPEC
    if key == "head_dim":
        return
    text = two("head_dim", "head_dim = 128", f"{key} = 256")
    refused({**ZEBRA, "head_dim": 128, key: 256}, text, **ANSWERS)
    refused({**LLAMA, "head_dim": 128, key: 256}, text)
    refused({**ZEBRA, key: [128, 256]}, f"{key} must be an int but got [128, 256].", TypeError)
    if key in keys.HEAD_DIM_ELSEWHERE:  # the code of a known family does not read these
        refused({**LLAMA, key: 256}, two("head_dim", DERIVED, f"{key} = 256"))


@pytest.mark.parametrize(
    "config, stated, first",
    [
        (LLAMA, {}, DERIVED),
        (ZEBRA, ANSWERS, DERIVED),
        ({**ZEBRA, "head_dim": 128}, ANSWERS, "head_dim = 128"),
        ({**ZEBRA, "d_head": 128}, ANSWERS, "d_head = 128"),
    ],
)
def test_settings_of_some_layers_give_no_width_to_the_others(
    config: dict[str, Any], stated: dict[str, Any], first: str
) -> None:
    """Step 3.5 has the numbers of heads of its sliding layers in a section of their own."""
    key = "attention_other_setting"
    other = {"head_dim": 64, "num_attention_heads": 96}
    refused({**config, key: other}, two("head_dim", first, f"{key}.head_dim = 64"), **stated)
    assert read({**config, key: {"head_dim": 128}}, **stated) == SPEC


def test_the_names_of_the_width_of_a_head_include_those_of_other_libraries() -> None:
    known = {*keys.HEAD_DIM, *keys.HEAD_DIM_ELSEWHERE}
    seen = "attention_head_dim d_head d_kv dim_head qk_head_dim key_channels attention_head_size head_width".split()
    more = "head_size_qk size_per_head hidden_size_per_head attn_head_dim query_head_dim decoder_head_dim".split()
    assert {*seen, *more} <= known


ZAMBA = llama(model_type="zamba2", hidden_size=3584, attention_head_dim=224, use_mem_rope=True)
MEMORY = {
    "memory_attention_hidden_size": 256,
    "memory_attention_downsample_rate": 2,
    "memory_attention_num_attention_heads": 1,
    "memory_attention_rope_theta": 1e4,
    "memory_attention_rope_feat_sizes": [64, 64],
}
SPEECH = {
    "hidden_size": 1024,
    "speech_encoder_attention_heads": 16,
    "position_embeddings_type": "rotary",
    "rotary_embedding_base": 500,
}
COLUMNS = Axes(2, tuple((1 - k // 32, k % 32, 64) for k in range(64)))


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        # Its class computes heads of 2 * 3584 / 32 channels, and kv_channels of half of them.
        ({**ZAMBA, "kv_channels": 112}, RopeSpec(224, base=5e5)),
        ({"model_type": "sam2_video", **MEMORY}, RopeSpec(128, interleaved=True, axes=COLUMNS)),
        ({"model_type": "edgetam_video", **MEMORY}, RopeSpec(128, interleaved=True, axes=COLUMNS)),
        ({"model_type": "seamless_m4t", **SPEECH}, RopeSpec(64, base=500)),
    ],
)
def test_heads_whose_width_has_keys_of_its_own(config: dict[str, Any], spec: RopeSpec) -> None:
    assert read(config) == spec
    for key in ("head_dim", "d_head"):
        assert read({**config, key: spec.head_dim}) == spec
        assert f"{key} = 96" in str(outcome({**config, key: 96}))


def test_a_key_of_such_a_width_must_be_there() -> None:
    memory = {"model_type": "sam2_video", **MEMORY}
    text = "must give the width of a head; pass a config with memory_attention_hidden_size and memory_attention_"
    for key in list(MEMORY)[:3]:
        assert text in str(outcome(without(memory, key)))
    assert "a config with attention_head_dim, as" in str(
        outcome(without(ZAMBA, "attention_head_dim"))
    )
    odd = {**memory, "memory_attention_num_attention_heads": 3}
    both = "memory_attention_downsample_rate * memory_attention_num_attention_heads"
    refused(odd, f"memory_attention_hidden_size must be a multiple of {both} but got 256 and 6.")


@pytest.mark.parametrize(("width", "each"), [(80, 13), (64, 10), (16, 2)])
def test_three_coordinates_share_what_they_can_of_a_head(width: int, each: int) -> None:
    """The images of MiniMax M3 rotate by time, row and column; the rest of a head does not rotate."""
    sizes = {"hidden_size": 2 * width, "num_attention_heads": 2, "rope_theta": 1e4}
    config = {"model_type": "minimax_m3_vl_vision", **sizes}
    spec = RopeSpec(width, rotary_dim=6 * each, axes=Axes.blocks((each,) * 3))
    assert read({**config, "rope_parameters": {"rope_type": "axial"}}) == read(config) == spec
    assert "rotary_dim must have one value" in str(outcome({**config, "rotary_dim": width}))


def test_latent_attention_has_both_widths() -> None:
    config = {**LLAMA, "model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    whole = "qk_nope_head_dim + qk_rope_head_dim = 192"
    for key in ("head_dim", "attention_head_dim", "d_head"):
        for width in (64, 192):
            assert read({**config, key: width}).head_dim == 192
        refused({**config, key: 96}, two("head_dim", f"{key} = 96", whole))
    assert read({**config, "qk_head_dim": 192}).head_dim == 192
    refused({**config, "qk_head_dim": 64}, two("head_dim", whole, "qk_head_dim = 64"))


@pytest.mark.parametrize("key", ["head_dim", "hidden_size", "attention_head_dim", "rotary_dim"])
def test_a_width_that_no_head_has_is_a_sentence(key: str) -> None:
    for family in ("llama", "zebra", "glm"):
        config = {**LLAMA, "model_type": family, key: 10**401, "partial_rotary_factor": 0.5}
        assert isinstance(outcome(config, **(ANSWERS if family == "zebra" else {})), ValueError)


def test_a_head_has_at_most_65536_channels() -> None:
    refused({**LLAMA, "head_dim": 65537}, "head_dim must be at most 65536 but got 65537.")
    latent = {"qk_nope_head_dim": 65536, "qk_rope_head_dim": 64}
    text = "qk_nope_head_dim + qk_rope_head_dim must be at most 65536 but got 65600."
    refused({**LLAMA, **latent}, text)


@pytest.mark.parametrize("family", ["dinov3_vit", "pixtral"])
def test_a_slice_is_checked_before_anything_of_its_size_is_made(family: str) -> None:
    """With 10**12 pairs, axes take all memory."""
    text = r"^\[RopeSpec\] channels \[start, start \+ rotary_dim\) must lie in \[0, 128\)"
    with pytest.raises(ValueError, match=text):
        read(llama(model_type=family), rotary_dim=10**12)


# --- heads of several widths ------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "model_type": "zebra",
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
    "per_layer_config": {"01": {"head_dim": 512}, 3: {"head_dim": 512}},
}
WIDE_SPECS = {"sliding_attention": RopeSpec(256), "full_attention": RopeSpec(512, base=1e6)}


def single(number: object, width: int) -> dict[str, Any]:
    """Return the key that states the width of one layer."""
    return {"per_layer_config": {number: {"head_dim": width}}}


def test_heads_of_several_widths_are_asked_about_one_by_one() -> None:
    text = (
        "pass layer_type with the rotary_dim of its layers, as heads have 256 channels in sliding_attention and 512 "
        "channels in full_attention."
    )
    refused(WIDE, text, interleaved=False)
    for width in (256, 512):  # one number cannot answer for both
        refused(WIDE, text, interleaved=False, rotary_dim=width)
    for name, spec in WIDE_SPECS.items():
        one = {"layer_type": name, "interleaved": False, "rotary_dim": spec.head_dim}
        assert read(WIDE, **one) == spec
    half = read(WIDE, layer_type="full_attention", interleaved=False, rotary_dim=128, start=384)
    assert half == RopeSpec(512, base=1e6, rotary_dim=128, start=384)
    parted = {**WIDE, "partial_rotary_factor": 0.5}  # a part of each width
    assert {spec.rotary_dim for spec in read(parted, interleaved=False).values()} == {128, 256}


def test_the_text_of_embedding_gemma_2_has_wide_heads_where_attention_is_full() -> None:
    assert read({**WIDE, "model_type": "embedding_gemma2_text"}) == WIDE_SPECS


@pytest.mark.parametrize("family", ["gemma4_text", "embedding_gemma2_text"])
def test_the_width_where_attention_is_full_may_be_stated_twice(family: str) -> None:
    both = {**WIDE, "model_type": family, "global_head_dim": 512}
    assert read(both) == WIDE_SPECS
    assert read({**both, **single("1", 512)}) == WIDE_SPECS
    text = two("head_dim", "global_head_dim = 512", "per_layer_config.1.head_dim = 128")
    refused({**both, **single("1", 128)}, text)


def test_a_width_of_single_layers_is_read_or_refused() -> None:
    text = two("head_dim", "per_layer_config.1.head_dim = 64", DERIVED)
    refused({**LLAMA, **single("1", 64)}, text)
    refused({**ZEBRA, **single("1", 64)}, text, **ANSWERS)
    typed = {**LLAMA, "layer_types": ["a"] * 4}
    refused({**typed, **single("1", 64)}, text)
    assert read({**LLAMA, **single("1", 128)}) == SPEC
    every = {str(n): {"head_dim": 64} for n in range(4)}
    assert read({**typed, "per_layer_config": every}) == RopeSpec(64, base=5e5)
    some = {**WIDE, "model_type": "embedding_gemma2_text", **single("1", 512)}
    refused(some, two("head_dim", "per_layer_config.1.head_dim = 512", "head_dim = 256"))


def test_a_width_of_single_layers_without_a_list_or_of_a_type_that_does_not_rotate() -> None:
    unlisted = {**without(WIDE, "layer_types"), "model_type": "gemma4_text", **single("3", 256)}
    assert read(unlisted) == {**WIDE_SPECS, "full_attention": RopeSpec(256, base=1e6)}
    sections = {**WIDE["rope_parameters"], "full_attention": None}
    still = {**WIDE, "rope_parameters": sections, **single("1", 512)}
    specs = read(still, interleaved=False, rotary_dim=256)
    assert specs == {**WIDE_SPECS, "full_attention": None}


@pytest.mark.parametrize("number", ["4", "x", "-1", "1.0", "", "9" * 5000, 4, 1.5, None, (0,)])
def test_keys_of_a_single_layer_are_of_one_that_exists(number: object) -> None:
    for family in ("zebra", "embedding_gemma2_text"):
        config = {**WIDE, "model_type": family, **single(number, 512)}
        text = r"^\[from_config\] per_layer_config must be of layers 0 to 3 but"
        with pytest.raises(ValueError, match=text):
            read(config, interleaved=False)


def test_keys_of_single_layers_are_a_mapping() -> None:
    wrong = {**WIDE, "per_layer_config": [{"head_dim": 512}]}
    text = "per_layer_config must be a mapping but got [{'head_dim': 512}]."
    refused(wrong, text, TypeError, interleaved=False)
