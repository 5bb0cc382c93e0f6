"""The bytes of results do not change from version to version."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import LLAMA, contents
from tightrope import __version__
from tightrope_tools.convert import Stated, convert

WIDTH = {"F32": 4, "BF16": 2}
Shapes = dict[str, tuple[int, ...]]


def save(path: Path, shapes: Shapes, dtype: str, metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file whose bytes do not depend on the version of any package."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = bytes((n * n + 7 * n) % 251 for n in range(end))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def llama_shapes(layer: int) -> Shapes:
    place = f"model.layers.{layer}.self_attn"
    return {
        f"{place}.q_proj.weight": (32, 32),
        f"{place}.q_proj.bias": (32,),
        f"{place}.k_proj.weight": (16, 32),
        f"{place}.v_proj.weight": (16, 32),
        f"{place}.q_norm.weight": (8,),
        f"{place}.k_norm.weight": (8,),
    }


def shards(folder: Path) -> Path:
    weight_map = {}
    for layer in range(2):
        file = f"model-{layer + 1:05d}-of-00002.safetensors"
        save(folder / file, llama_shapes(layer), "BF16", {"format": "pt"})
        weight_map |= dict.fromkeys(llama_shapes(layer), file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(LLAMA, indent=2), encoding="utf-8")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n", encoding="utf-8")
    return folder


def snapshot(folder: Path) -> Path:
    """Make a snapshot of the hub's cache: links to blobs, which have no suffix."""
    plain, made = shards(folder / "plain"), folder / "models--x" / "snapshots" / "1234"
    blobs = made.parent.parent / "blobs"
    for each in (made, blobs):
        each.mkdir(parents=True)
    for n, path in enumerate(sorted(path for path in plain.iterdir() if path.is_file())):
        path.rename(blobs / str(n))
        (made / path.name).symlink_to(Path("../../blobs") / str(n))
    return made


def neox(folder: Path) -> Path:
    place = "gpt_neox.layers.0.attention.query_key_value"
    config = {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "rotary_pct": 0.5,
        "rotary_emb_base": 10000,
        "num_hidden_layers": 1,
    }
    path = save(folder / "a.safetensors", {f"{place}.weight": (96, 32), "x": (3,)}, "F32")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


CASES: dict[str, tuple[Any, str]] = {
    "shards": (shards, "7439235af82de8d3"),
    "snapshot": (snapshot, "21d454da54443a3e"),
    "gpt_neox, one file": (neox, "4a8e0a99c1416880"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_results_stay(tmp_path: Path, case: str) -> None:
    make, wanted = CASES[case]
    source = make(tmp_path / "in")
    before = contents(tmp_path / "in")
    stated = Stated(config=source.parent if source.is_file() else None)
    there, again = tmp_path / f"out{source.suffix}", tmp_path / f"again{source.suffix}"
    convert(source, there, to="interleaved", stated=stated)
    made = {"": there.read_bytes()} if there.is_file() else contents(there)
    sha = hashlib.sha256()
    for name, data in sorted(made.items()):
        sha.update(name.encode() + data.replace(__version__.encode(), b"VERSION"))
    assert sha.hexdigest()[:16] == wanted
    convert(there, again, to="half", stated=stated)
    assert contents(tmp_path / "in") == before
    if source.is_file():
        assert again.read_bytes() == source.read_bytes()
    else:
        weights = {
            name: data for name, data in contents(source).items() if name.endswith("safetensors")
        }
        assert {name: contents(again)[name] for name in weights} == weights
