"""Small checkpoints for the tests of conversion, and the expected results.

The order of rows is computed here from the definition of the two pairings, without the code under
test: rows 2i and 2i + 1 of an interleaved head are row i of the first half, and row i of the second
half, of the same head with half pairing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: Configurations of small models.
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "checkpoints.json").read_text("utf-8")
)
LLAMA, TRAINED, DEEPSEEK, LLAVA = (
    CONFIGS[name] for name in ("llama", "trained", "deepseek", "llava")
)


def interleaved_rows(rows: Sequence[Any], starts: Sequence[int], width: int) -> list[Any]:
    """Reorder blocks of `width` rows from half to interleaved pairing, one at each of `starts`."""
    made = list(rows)
    for start in starts:
        for i in range(width // 2):
            made[start + 2 * i] = rows[start + i]
            made[start + 2 * i + 1] = rows[start + width // 2 + i]
    return made


def llama_tensors(
    config: dict[str, Any] = LLAMA, *, dtype: torch.dtype = torch.float32, bias: bool = True
) -> dict[str, torch.Tensor]:
    """Make random weights under Llama's names, with q and k norms and, if `bias`, biases."""
    generator = torch.Generator().manual_seed(0)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim", hidden // heads)
    rows = {"q": heads * width, "k": config["num_key_value_heads"] * width, "v": width}

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    made = {"model.embed_tokens.weight": fresh(11, hidden)}
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}.self_attn"
        for name, count in rows.items():
            made[f"{place}.{name}_proj.weight"] = fresh(count, hidden)
            if bias:
                made[f"{place}.{name}_proj.bias"] = fresh(count)
        made[f"{place}.q_norm.weight"] = fresh(width)
        made[f"{place}.k_norm.weight"] = fresh(width)
        made[f"{place}.o_proj.weight"] = fresh(hidden, heads * width)
    return made


def latent_tensors() -> dict[str, torch.Tensor]:
    """Make random weights of DeepSeek's latent attention."""
    shapes = {"q_proj": (24, 16), "kv_a_proj_with_mqa": (20, 16)}
    place = "model.layers.0.self_attn"
    return {f"{place}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any] | None = LLAMA,
    *,
    shards: int = 1,
) -> Path:
    """Write a safetensors checkpoint to a folder; several shards get an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "note": "kept"})
        return folder
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder: path -> bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def trained(
    interleaved: bool,
    *,
    layers: int = 12,
    width: int = 32,
    strength: float = 0.5,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Make weights like those of a trained model, in which the size of a row depends on its pair.

    The size falls from the fastest pair to the slowest, jumps at one pair, and has noise per layer and
    per head. Each pair is turned by a random angle.
    """
    generator = torch.Generator().manual_seed(seed)
    made = {"model.embed_tokens.weight": torch.randn(7, 64, generator=generator)}
    half = width // 2
    profile = strength * torch.linspace(1.0, -1.0, half) ** 3
    profile[3 * half // 4] += strength
    for layer in range(layers):
        for name, count in (("q", 8), ("k", 4)):
            rows = torch.randn(count, 2, half, 64, generator=generator)
            size = profile + 0.2 * strength * torch.randn(half, generator=generator)
            own = size + 0.3 * torch.randn(count, half, generator=generator)
            rows = rows * own.exp()[:, None, :, None]
            angle = torch.rand(count, half, 1, generator=generator) * 6.28
            u, v = rows[:, 0], rows[:, 1]
            turned = [u * angle.cos() - v * angle.sin(), u * angle.sin() + v * angle.cos()]
            order = torch.stack(turned, 2 if interleaved else 1).reshape(count * width, 64)
            made[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = order.contiguous()
    return made
