"""Frequencies in a checkpoint that contradict its configuration are a warning, with the number probably meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import checkpoints
from tests.support.model_configs import llama3
from tests.support.reading import LLAMA
from tightrope_tools.inspect import inspect

CONFIG: dict[str, Any] = {**LLAMA, "num_hidden_layers": 2}
ONE = "model.rotary_emb.inv_freq"
LAYERS = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
OTHER = "The checkpoint stores other frequencies in"


def powers(base: float, channels: int = 128) -> torch.Tensor:
    """Return frequencies as model files compute them, in float32."""
    return 1.0 / (base ** (torch.arange(0, channels, 2).float() / channels))


def warned(
    folder: Path, stored: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> list[str]:
    """Return the warnings about stored frequencies, beside weights that are not read."""
    weights = {"model.embed_tokens.weight": torch.zeros(4, 4), **stored}
    path = checkpoints.write(folder, weights, config or CONFIG, shards=2)
    found = inspect(path)
    assert inspect(path / "config.json").warnings == found.warnings
    return [note.text for note in found.warnings if note.code == "stored-frequencies"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("names", [[ONE], LAYERS])
def test_the_same_frequencies_are_no_warning(
    tmp_path: Path, names: list[str], dtype: torch.dtype
) -> None:
    stored = {name: powers(5e5).to(dtype) for name in names}
    assert warned(tmp_path, stored) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [1e4, 1e6, 150000.0, 5e6])
def test_another_base_is_named(tmp_path: Path, base: float, dtype: torch.dtype) -> None:
    end = f"those of base {base:,.0f}, probably the right one, not 500,000."
    assert warned(tmp_path / "a", {ONE: powers(base).to(dtype)}) == [f"{OTHER} {ONE}: {end}"]
    stored = {name: powers(base).to(dtype) for name in LAYERS}
    assert warned(tmp_path / "b", stored) == [f"{OTHER} {LAYERS[0]} and 1 more: {end}"]


def test_one_wrong_layer_is_named(tmp_path: Path) -> None:
    (text,) = warned(tmp_path, {LAYERS[0]: powers(5e5), LAYERS[1]: powers(1e4)})
    assert text.startswith(f"{OTHER} {LAYERS[1]}: those of base 10,000, probably")


LLAMA3 = llama3(8.0) | {"original_max_position_embeddings": 1024}


def scaled(base: float, rope: dict[str, Any]) -> torch.Tensor:
    (part,) = inspect({**CONFIG, "rope_theta": base, "rope_scaling": rope}).parts
    return part.spec.frequencies(1).inv_freq.float()


@pytest.mark.parametrize(
    "rope, stored, end",
    [
        (LLAMA3, scaled(5e5, LLAMA3), None),
        (LLAMA3, scaled(1e4, LLAMA3), "those of base 10,000, probably the right one, not 500,000."),
        (LLAMA3, powers(5e5), "those of base 500,000, without scaling."),
        (
            LLAMA3,
            powers(1e4),
            "those of base 10,000, probably the right one, not 500,000, without scaling.",
        ),
        ({"type": "linear", "factor": 4.0}, powers(5e5) / 4, None),
        ({"type": "linear", "factor": 4.0}, powers(5e5), None),  # programs that scale positions
        ({"type": "dynamic", "factor": 4.0}, powers(5e5), None),
        (None, powers(5e5) / 4, "those of the configuration divided by 4, as by linear scaling."),
        (None, powers(5e5).bfloat16().float(), "those of the configuration, rounded to bfloat16."),
        (None, powers(5e5, 64), "32, where the configuration gives 64."),
        (
            None,
            scaled(5e5, LLAMA3),
            "they look like another scaling, or learned ones: pair 53 turns by 2.38479e-06 radians per position "
            "there, by 1.90783e-05 in the configuration.",
        ),
        (None, torch.zeros(64), "by 1 in the configuration."),
        (None, -powers(5e5), "in the configuration."),
        (None, torch.full((64,), float("nan")), "in the configuration."),
    ],
)
def test_scaling(
    tmp_path: Path, rope: dict[str, Any] | None, stored: torch.Tensor, end: str | None
) -> None:
    texts = warned(tmp_path, {ONE: stored}, {**CONFIG, "rope_scaling": rope})
    assert [text.endswith(end or "") for text in texts] == [True] * (end is not None), texts


def test_layers_that_differ_have_their_own(tmp_path: Path) -> None:
    gemma = {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }
    local = "model.rotary_emb_local.inv_freq"
    assert warned(tmp_path / "a", {ONE: powers(1e6), local: powers(1e4)}, gemma) == []
    assert warned(tmp_path / "b", {LAYERS[1]: powers(1e6), LAYERS[0]: powers(1e4)}, gemma) == []
    (text,) = warned(tmp_path / "c", {LAYERS[1]: powers(1e4), LAYERS[0]: powers(1e4)}, gemma)
    assert text.endswith("those of base 10,000, probably the right one, not 1,000,000.")
    sliding = "model.rotary_emb.sliding_attention_inv_freq"
    (text,) = warned(tmp_path / "d", {sliding: powers(1e6)}, gemma)
    assert text.endswith("those of base 1,000,000, probably the right one, not 10,000.")


def test_a_tower_of_images_is_not_the_text(tmp_path: Path) -> None:
    vision = "visual.rotary_pos_emb.inv_freq"
    assert warned(tmp_path, {ONE: powers(5e5), vision: powers(1e4, 40)}) == []


def test_other_tensors_are_not_read(tmp_path: Path) -> None:
    stored = {
        "inv_freqs": powers(1e4),
        "rotary_emb.original_inv_freq": powers(1e4),
        "a.inv_freq": powers(1e4)[None],
        "b.inv_freq": torch.zeros(64, dtype=torch.int64),
    }
    assert warned(tmp_path, stored) == []
