"""What `from_config` returns beside specs: layers, sources, sections; objects as configurations; rules of other programs."""

from __future__ import annotations

import argparse
import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers

from tests.support.reading import LLAMA, llama, read, refused
from tests.support.refused_calls import refused_calls
from tightrope import Axes, RopeSpec
from tightrope.config import LayerSpecs
from tightrope.frequencies import RULES, Frequencies, Rule, default

SPEC = RopeSpec(128, base=5e5)
ZEBRA = llama(model_type="zebra")
ANSWERS: dict[str, Any] = {"interleaved": False, "rotary_dim": 128, "rope_layers": "all"}

# --- layers -----------------------------------------------------------------------------------------


def test_layer_specs_are_a_mapping_that_a_person_can_read() -> None:
    specs = LayerSpecs({"a": RopeSpec(64), "b": None}, ("a", "a", "b", "a", "b", "a"))
    assert dict(specs) == {"a": RopeSpec(64), "b": None}
    assert copy.deepcopy(specs) == pickle.loads(pickle.dumps(specs)) == specs
    assert not hasattr(specs, "keys_of")
    assert repr(specs) == (
        "LayerSpecs({'a': RopeSpec(head_dim=64), 'b': None}, layers=<2 × a, 1 × b, 1 × a, 1 × b, …>)"
    )


def test_a_layer_has_the_spec_of_its_type() -> None:
    specs = LayerSpecs({"a": RopeSpec(64), "b": None}, ("a", "b", "mamba", "c"))
    assert [specs.of(layer) for layer in range(3)] == [RopeSpec(64), None, None]
    assert RopeSpec(64).of(2) == RopeSpec(64)  # code that serves both results asks both


LATER = LayerSpecs({"a": None, "b": RopeSpec(64)})
OF_A = LayerSpecs({"a": RopeSpec(64)}, ("a", "b"))
test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())


def test_a_layer_type_gives_its_spec_or_none() -> None:
    typed = llama(model_type="cohere2", layer_types=["full_attention", "sliding_attention", "conv"])
    specs = read(typed)
    assert read(typed, layer_type="full_attention") is None
    assert read(typed, layer_type="sliding_attention") == specs.of(1) != SPEC
    assert (specs.of(0), specs.of(2)) == (None, None)  # NoPE, and a convolution


@pytest.mark.parametrize("name", ["layer_type", "section"])
@pytest.mark.parametrize("value", ["sliding", ["a"], {"a": 1}, 3, b"a"], ids=repr)
def test_any_other_object_is_no_layer_type_and_no_section(name: str, value: object) -> None:
    what = {"layer_type": "layer types", "section": "sections"}[name]
    text = f"{name} must be one of the config's {what} but got {value!r}; the config has "
    given: Any = {name: value}
    refused({**LLAMA, "layer_types": ["a"] * 4}, text, **given)


@pytest.mark.parametrize(
    "wrong", [3, (), set(), frozenset(), {}, b"", b"all", [], "", "full_attention"], ids=repr
)
def test_rope_layers_is_all_or_a_collection_that_is_not_empty(wrong: Any) -> None:
    text = f"rope_layers must be 'all', a collection of layer types that is not empty, or None but got {wrong!r}."
    for config in (LLAMA, ZEBRA):
        refused(config, text, TypeError, **ANSWERS | {"rope_layers": wrong})


@pytest.mark.parametrize("number", ["4", "x", "-1", "1.0", "", "9" * 5000, 4, 1.5, None, (0,)])
def test_keys_of_a_single_layer_are_of_one_that_exists(number: object) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = {**ZEBRA, "layer_types": types, "per_layer_config": {number: {"head_dim": 512}}}
    refused(config, "per_layer_config must be of layers 0 to 3 but", interleaved=False)


def test_the_number_of_a_single_layer_may_be_an_int() -> None:
    one = {"per_layer_config": {3: {"head_dim": 512}}, "head_dim": 256, "num_hidden_layers": 4}
    text = "got per_layer_config.3.head_dim = 512 and head_dim = 256"
    refused({**ZEBRA, **one}, text, interleaved=False)


# --- sections ---------------------------------------------------------------------------------------


def test_a_model_with_two_rotations_names_the_way_to_each() -> None:
    config = transformers.CONFIG_MAPPING["sam3_tracker_video"]().to_dict()
    refused(config, "section='vision_config.backbone_config'")
    columns_first = [axis for axis, _, _ in Axes.blocks((16, 16)).pairs][::-1]
    images = read(config, section="vision_config.backbone_config")
    assert (images.head_dim, [axis for axis, _, _ in images.axes.pairs]) == (64, columns_first)
    memory = read({**config, "model_type": "sam2_video"})
    assert (memory.head_dim, memory.interleaved, memory.axes.count) == (256, True, 2)


# --- other forms of configurations, and of answers ----------------------------------------------------


def test_objects_with_attributes() -> None:
    class Saved:
        def to_dict(self) -> dict[str, Any]:
            return dict(LLAMA)

    assert read(Saved()) == read(argparse.Namespace(**LLAMA)) == SPEC
    refused(5, "config must be a mapping, a config object, a model or a path but got 5.", TypeError)


def test_a_new_rule_is_read_without_a_change_here() -> None:
    @dataclass(frozen=True)
    class Doubled(Rule):
        names = ("doubled",)
        keys: ClassVar[dict[str, tuple[str, ...]]] = {"times": ("how_often", "times")}
        times: int

        def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
            row = default(rotary_dim, base).exact
            return Frequencies(tuple(omega * 2**self.times for omega in row))

    def scaled(**section: Any) -> dict[str, Any]:
        return llama(rope_scaling={"rope_type": "doubled", **section})

    try:
        assert read(scaled(how_often=3)).scaling == Doubled(3)
        refused(scaled(), "scaling by 'doubled' must have how_often/times but")
        refused(scaled(times=3, factor=2), "known but got rope_scaling.factor")
    finally:
        del RULES["doubled"]
