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
GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 128,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
}
ROTARY, VISION = "model.rotary_emb.", "visual.rotary_pos_emb.inv_freq"
ONE, LOCAL = f"{ROTARY}inv_freq", "model.rotary_emb_local.inv_freq"
LAYERS = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
LLAMA3 = llama3(8.0) | {"original_max_position_embeddings": 1024}
LINEAR, DYNAMIC = ({"type": kind, "factor": 4.0} for kind in ("linear", "dynamic"))


def powers(base: float, channels: int = 128) -> torch.Tensor:
    """Return frequencies as model files compute them, in float32."""
    return 1.0 / (base ** (torch.arange(0, channels, 2).float() / channels))


def scaled(base: float, rope: dict[str, Any]) -> torch.Tensor:
    (part,) = inspect({**CONFIG, "rope_theta": base, "rope_scaling": rope}).parts
    return part.spec.frequencies(1).inv_freq.float()


def warned(
    folder: Path, stored: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG
) -> list[str]:
    """Return the warnings about stored frequencies, beside weights that are not read."""
    weights = {"model.embed_tokens.weight": torch.zeros(4, 4), **stored}
    path = checkpoints.write(folder, weights, config, shards=2)
    found = inspect(path)
    assert inspect(path / "config.json").warnings == found.warnings
    return [note.text for note in found.warnings if note.code == "stored-frequencies"]


def meant(base: int, not_: str = "500,000") -> str:
    return f"those of base {base:,}, probably the right one, not {not_}."


NOISE = "in the configuration."
# Configured scaling, stored frequencies, and how the warning ends; None without one.
CASES: list[tuple[dict[str, Any] | None, torch.Tensor, str | None]] = [
    *((None, powers(5e5).to(getattr(torch, f"float{bits}")), None) for bits in (16, 32, 64)),
    (None, powers(5e5).bfloat16(), None),
    *((None, powers(base), meant(base)) for base in (10_000, 10**6, 150_000, 5 * 10**6)),
    *((None, powers(base).bfloat16(), meant(base)) for base in (10_000, 5 * 10**6)),
    (LLAMA3, scaled(5e5, LLAMA3), None),
    (LLAMA3, scaled(1e4, LLAMA3), meant(10_000)),
    (LLAMA3, powers(5e5), "those of base 500,000, without scaling."),
    (LLAMA3, powers(1e4), f"{meant(10_000)[:-1]}, without scaling."),
    (LINEAR, powers(5e5) / 4, None),
    (LINEAR, powers(5e5), None),  # programs that scale positions
    (DYNAMIC, powers(5e5), None),
    (None, powers(5e5) / 4, "those of the configuration divided by 4, as by linear scaling."),
    (None, powers(5e5).bfloat16().float(), "those of the configuration, rounded to bfloat16."),
    (None, powers(5e5, 64), "32, where the configuration gives 64."),
    (
        None,
        scaled(5e5, LLAMA3),
        "they look like another scaling, or learned ones: pair 53 turns by 2.38479e-06 radians per position "
        "there, by 1.90783e-05 in the configuration.",
    ),
    *((None, x, NOISE) for x in (torch.zeros(64), -powers(5e5))),
]


@pytest.mark.parametrize("rope, stored, end", CASES)
def test_stored_frequencies(
    tmp_path: Path, rope: dict[str, Any] | None, stored: torch.Tensor, end: str | None
) -> None:
    for names in ([ONE], LAYERS):
        texts = warned(
            tmp_path / names[0], dict.fromkeys(names, stored), {**CONFIG, "rope_scaling": rope}
        )
        assert [text.endswith(end or "") for text in texts] == [True] * (end is not None), texts
        where = ONE if names == [ONE] else f"{LAYERS[0]} and 1 more"
        for text in texts:
            assert text.startswith(f"The checkpoint stores other frequencies in {where}: ")


FIRST, LAST = LAYERS
# Buffers and the bases of their frequencies -> how the warning ends; None without one.
PLACES: list[tuple[dict[str, Any], dict[str, float], str | None]] = [
    (CONFIG, {FIRST: 5e5, LAST: 1e4}, f"in {LAST}: {meant(10_000)}"),
    (CONFIG, {ONE: 5e5, VISION: 1e4}, None),
    (GEMMA, {ONE: 1e6, LOCAL: 1e4}, None),
    (GEMMA, {FIRST: 1e4, LAST: 1e6}, None),
    (GEMMA, {FIRST: 1e4, LAST: 1e4}, meant(10_000, "1,000,000")),
    (GEMMA, {f"{ROTARY}sliding_attention_inv_freq": 1e6}, meant(10**6, "10,000")),
    (CONFIG, {"inv_freqs": 1e4, f"{ROTARY}original_inv_freq": 1e4}, None),
]


@pytest.mark.parametrize("config, bases, end", PLACES)
def test_buffers_belong_to_layers_by_their_names(
    tmp_path: Path, config: dict[str, Any], bases: dict[str, float], end: str | None
) -> None:
    texts = warned(tmp_path, {name: powers(base) for name, base in bases.items()}, config)
    assert [text.endswith(end or "") for text in texts] == [True] * (end is not None), texts


def test_other_values_shapes_and_dtypes(tmp_path: Path) -> None:
    other = torch.zeros(64, dtype=torch.int64)
    (text,) = warned(tmp_path / "nan", {ONE: torch.full((64,), torch.nan)})
    assert text.endswith(NOISE)
    assert warned(tmp_path, {"a.inv_freq": powers(1e4)[None], "b.inv_freq": other}) == []
