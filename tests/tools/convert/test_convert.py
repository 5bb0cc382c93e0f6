"""Conversion of checkpoints: the rows that move, the bytes that stay, and the errors.

test_families.py tests that converted models compute the same results; tests/tools/cli/test_convert.py
tests the command line.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import (
    LLAMA,
    TRAINED,
    contents,
    interleaved_rows,
    llama_tensors,
    trained,
    write,
)
from tests.support.tolerances import TABLE
from tightrope_tools import place
from tightrope_tools.convert import Stated, convert, detect, rewrite, torch_file
from tightrope_tools.convert.marking import marked


def refused(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


# --- which rows move ------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    packing=st.sampled_from(["separate", "gated", "blocks", "grouped", "quarters"]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    start=st.integers(0, 3),
    pairs=st.integers(1, 5),
    rest=st.integers(0, 2),
    interleaved=st.booleans(),
)
def test_rows_of_every_packing(
    tmp_path_factory: pytest.TempPathFactory,
    packing: str,
    kv_heads: int,
    group: int,
    start: int,
    pairs: int,
    rest: int,
    interleaved: bool,
) -> None:
    if packing == "quarters":
        kv_heads, group = 4 * kv_heads, 1
    heads, width = kv_heads * group, 2 * pairs
    head_dim = start + width + rest

    def head(kind: str, number: int) -> list[tuple[str, int, int]]:
        return [(kind, number, channel) for channel in range(head_dim)]

    q = [head("q", n) for n in range(heads)]
    k, v = ([head(kind, n) for n in range(kv_heads)] for kind in "kv")
    fused = {
        "blocks": [*q, *k, *v],
        "grouped": [
            one for n in range(kv_heads) for one in (*q[n * group : (n + 1) * group], k[n], v[n])
        ],
        "quarters": [
            one
            for part in range(4)
            for kind in (q, v, k)
            for one in kind[part * heads // 4 : (part + 1) * heads // 4]
        ],
    }
    place_, modules = "layers.0.self_attn", {}
    naming = "llama"
    if packing == "separate":
        modules = {"q_proj": q, "k_proj": k, "v_proj": v}
    elif packing == "gated":
        gates = [head("gate", n) for n in range(heads)]
        modules = {
            "q_proj": [one for two in zip(q, gates) for one in two],
            "k_proj": k,
            "v_proj": v,
        }
        naming = "qwen3_next"
    else:
        place_, naming = "layers.0.attention", "gpt_neox"
        modules = {"query_key_value": fused[packing]}
    labels: dict[str, list[Any]] = {
        f"{place_}.{name}.weight": [row for one in each for row in one]
        for name, each in modules.items()
    }
    number = {label: n for n, label in enumerate(row for each in labels.values() for row in each)}
    folder = tmp_path_factory.mktemp("rows")
    weights = {
        name: torch.tensor([[number[row], -number[row]] for row in rows], dtype=torch.float32)
        for name, rows in labels.items()
    }
    biases = {name.replace("weight", "bias"): w[:, 0].clone() for name, w in weights.items()}
    save_file(weights | biases, folder / "in.safetensors")
    stated = Stated(
        source="half" if interleaved else "interleaved", naming=naming, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, rotary_dim=width, start=start,
        packing=packing if packing in fused else None,
    )  # fmt: skip
    convert(
        folder / "in.safetensors",
        folder / "out.safetensors",
        to="interleaved" if interleaved else "half",
        stated=stated,
    )
    before, after = (load_file(folder / f"{name}.safetensors") for name in ("in", "out"))
    for name, rows in labels.items():
        starts = [
            n for n, (kind, _, channel) in enumerate(rows) if kind in "qk" and channel == start
        ]
        # `old` has half pairing, `new` interleaved pairing, in either direction of the conversion.
        old, new = (before, after) if interleaved else (after, before)
        wanted = interleaved_rows(old[name].tolist(), starts, width)
        assert new[name].tolist() == wanted
        bias = name.replace("weight", "bias")
        assert new[bias].tolist() == [row[0] for row in wanted]


def test_norms_biases_and_the_rest(tmp_path: Path) -> None:
    tensors = llama_tensors()
    source = write(tmp_path / "a", tensors)
    done = convert(source, tmp_path / "b", to="interleaved", verify=True)
    after = load_file(tmp_path / "b" / "model.safetensors")
    starts = {"q_proj": range(0, 32, 8), "k_proj": range(0, 16, 8), "q_norm": [0], "k_norm": [0]}
    for name, before in tensors.items():
        module = name.split(".")[-2]
        if module in starts:
            assert name in done.changed
            wanted = torch.stack(interleaved_rows(list(before), list(starts[module]), 8))
            assert torch.equal(after[name], wanted)
            assert not torch.equal(after[name], before)
        else:
            assert name in done.left
            assert torch.equal(after[name], before)
    assert len(done.changed) + len(done.left) == len(tensors)
    assert done.verified is not None
    assert done.verified.layers == 2
    assert done.verified.unswitched > TABLE["other pairing"].value
    with safetensors.safe_open(tmp_path / "b" / "model.safetensors", "pt") as stream:
        assert stream.metadata() == {"format": "pt", "note": "kept"}


def test_norms_over_all_heads_and_one_per_head(tmp_path: Path) -> None:
    tensors = llama_tensors(bias=False)
    for layer in range(2):
        place_ = f"model.layers.{layer}.self_attn"
        tensors[f"{place_}.q_norm.weight"] = torch.randn(32)  # OLMo 2
        tensors[f"{place_}.k_norm.weight"] = torch.randn(2, 8)  # Cohere
    source = write(tmp_path / "a", tensors)
    convert(source, tmp_path / "b", to="interleaved", verify=True)
    after = load_file(tmp_path / "b" / "model.safetensors")
    for name, starts in (("q_norm", range(0, 32, 8)), ("k_norm", range(0, 16, 8))):
        full = f"model.layers.1.self_attn.{name}.weight"
        wanted = interleaved_rows(tensors[full].flatten().tolist(), list(starts), 8)
        assert after[full].flatten().tolist() == wanted
        assert after[full].shape == tensors[full].shape


def test_layers_without_rope_stay(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0]}
    source = write(tmp_path / "a", llama_tensors(), config)
    done = convert(source, tmp_path / "b", to="interleaved")
    assert done.layers_without_rope == (1,)
    assert all(".layers.0." in name for name in done.changed)
    assert any("layers without RoPE" in note for note in done.notes)


def test_a_low_rank_adapter(tmp_path: Path) -> None:
    place_ = "base_model.model.model.layers.0.self_attn"
    tensors = {
        f"{place_}.q_proj.lora_A.weight": torch.randn(4, 32),
        f"{place_}.q_proj.lora_B.weight": torch.randn(32, 4),
        f"{place_}.v_proj.lora_B.weight": torch.randn(16, 4),
    }
    save_file(tensors, tmp_path / "adapter.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    done = convert(tmp_path / "adapter.safetensors", tmp_path / "out.safetensors", to="interleaved")
    assert done.changed == (f"{place_}.q_proj.lora_B.weight",)
    after = load_file(tmp_path / "out.safetensors")[done.changed[0]]
    wanted = interleaved_rows(tensors[done.changed[0]].tolist(), range(0, 32, 8), 8)
    assert after.tolist() == wanted


def test_parts_of_a_model(tmp_path: Path) -> None:
    tensors = llama_tensors()
    for name in ("q_proj", "k_proj"):
        weight = tensors[f"model.layers.0.self_attn.{name}.weight"]
        tensors[f"mtp.layers.0.self_attn.{name}.weight"] = weight.clone()
    done = convert(write(tmp_path / "a", tensors), tmp_path / "b", to="interleaved", verify=True)
    assert "mtp.layers.0.self_attn.q_proj.weight" in done.changed
    assert done.verified is not None
    assert done.verified.layers == 3
    # A vision tower with layers of the same names is ambiguous: the user chooses the prefix.
    tensors = {name.replace("mtp.", "vision.encoder."): w for name, w in tensors.items()}
    source, stated = write(tmp_path / "c", tensors), Stated(prefix="model")
    done = convert(source, tmp_path / "d", to="interleaved", stated=stated)
    assert len(done.changed) == 12
    assert "vision.encoder.layers.0.self_attn.q_proj.weight" in done.left


def test_tensors_that_several_ranks_share(tmp_path: Path) -> None:
    params = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 1, "rope_theta": 10000.0}
    source = tmp_path / "meta"
    source.mkdir()
    (source / "params.json").write_text(json.dumps(params), encoding="utf-8")
    parts = []
    for rank in range(2):
        part = {
            "layers.0.attention.wq.weight": torch.randn(16, 32),
            "layers.0.attention.wk.weight": torch.randn(8, 32),
        }
        torch.save(part, source / f"consolidated.{rank:02d}.pth")
        parts.append(part)
    done = convert(source, tmp_path / "out", to="half", verify=True)
    assert done.verified is not None
    for rank, part in enumerate(parts):
        after = torch.load(tmp_path / "out" / f"consolidated.{rank:02d}.pth", weights_only=True)
        for name, weight in part.items():
            starts = range(0, len(weight), 8)
            assert interleaved_rows(after[name].tolist(), starts, 8) == weight.tolist()
    (source / "consolidated.00.pth").unlink()
    with refused("must have every rank's file but lacks consolidated.00.pth"):
        convert(source, tmp_path / "other", to="half")


# --- every layer ----------------------------------------------------------------------------------

FOUR = {**LLAMA, "num_hidden_layers": 4}
Tensors = dict[str, torch.Tensor]


def fused(tensors: Tensors, layer: int, name: str = "self_attn.qkv_proj") -> Tensors:
    """Return the tensors with one layer's projections as one tensor."""
    place_ = f"model.layers.{layer}."
    parts = [tensors[f"{place_}self_attn.{part}_proj.weight"] for part in "qkv"]
    kept = {
        key: x for key, x in tensors.items() if not re.match(rf"{place_}self_attn\.[qkv]_", key)
    }
    return {**kept, f"{place_}{name}.weight": torch.cat(parts)}


def without(tensors: Tensors, pattern: str) -> Tensors:
    """Return the tensors whose names do not match."""
    return {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}


def odd(name: str) -> Tensors:
    """Return a tensor of another name than the tensors of other layers have."""
    return {f"model.layers.2.{name}.weight": torch.randn(64, 32)}


SAY = "say so in layer_types of the configuration ('none' for such a layer)"
ELSE = f"if they are no projections of attention, {SAY}"
UNLESS = f"if it has no attention, {SAY}; if it has, pass the whole checkpoint"
LACKING: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "projections of another name": (
        lambda tensors: fused(tensors, 1),
        f"model.layers.1: rename or split model.layers.1.self_attn.qkv_proj.weight; {ELSE}.",
    ),
    "attention of another name": (
        lambda tensors: without(fused(fused(tensors, 0, "attn.to_qkv"), 3), "o_proj"),
        "model.layers.0, model.layers.3: rename or split model.layers.0.attn.to_qkv.weight, "
        f"model.layers.3.self_attn.qkv_proj.weight; {ELSE}.",
    ),
    "no projections": (
        lambda tensors: without(tensors, r"layers\.2\.self_attn\.[qkv]_"),
        "model.layers.2: pass the whole checkpoint.",
    ),
    "only a projection of another name": (
        lambda tensors: without(tensors, r"layers\.2\.self_attn") | odd("self_attn.mixed"),
        f"model.layers.2: rename or split model.layers.2.self_attn.mixed.weight; {ELSE}.",
    ),
    "no attention": (
        lambda tensors: without(tensors, r"layers\.2\.self_attn"),
        f"model.layers.2: {UNLESS}.",
    ),
    "no attention, and experts": (
        lambda tensors: without(tensors, r"layers\.2\.self_attn") | odd("mlp.experts.0.up_proj"),
        f"model.layers.2: {UNLESS}.",
    ),
    "no first and no last layer": (
        lambda tensors: without(tensors, r"layers\.[03]"),
        "model.layers.0, model.layers.3: pass the whole checkpoint; the configuration states 4 layers.",
    ),
    "no layer, and one without attention": (
        lambda tensors: without(tensors, r"layers\.(0|2\.self_attn)"),
        "model.layers.0: pass the whole checkpoint; the configuration states 4 layers.",
    ),
}


def four() -> Tensors:
    tensors = llama_tensors(FOUR, bias=False)
    mlps = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(8, 32) for n in range(4)}
    return tensors | mlps


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("case", LACKING)
def test_every_layer_must_have_its_projections(tmp_path: Path, case: str, shards: int) -> None:
    """Otherwise the result would have layers of both pairings."""
    change, end = LACKING[case]
    source = write(tmp_path / "a", change(four()), FOUR, shards=shards)
    text = f"[convert] every layer must have projections called q_proj or k_proj but there are none in {end}"
    with refused(f"^{re.escape(text)}$"):
        convert(source, tmp_path / "b", to="interleaved", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ("attn.proj_q.weight", "attn.proj_k.weight"),
        ("attention.query_projection.weight",),
        ("attn.q_weight", "attn.k_weight"),
        ("attn.in_proj_weight",),
        ("attn.queries.weight",),
        ("attn_mlp.q_proj.weight", "attn_mlp.k_proj.weight"),
    ],
    ids="".join,
)
def test_projections_of_unknown_names_are_no_other_kind_of_layer(
    tmp_path: Path, names: tuple[str, ...], shard: bool
) -> None:
    """Left as they are, they would give a layer of the other pairing."""
    named = {f"model.layers.1.{name}": torch.randn(64, 32) for name in names}
    tensors = without(four(), r"layers\.1\.self_attn") | named
    source = write(tmp_path / "a", tensors, FOUR)
    if shard:
        (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
        source = source / "model-00001-of-00002.safetensors"
    wanted = f"in model.layers.1: rename or split {', '.join(sorted(named))}; {ELSE}."
    with refused(re.escape(wanted) + "$"):
        convert(source, tmp_path / "b.safetensors" if shard else tmp_path / "b", to="interleaved")


def test_a_shard_may_hold_a_part_of_a_layer(tmp_path: Path) -> None:
    shard = tmp_path / "model-00002-of-00003.safetensors"
    save_file(without(four(), r"layers\.(0|1\.self_attn\.[qkv]|2.*(v|o)_proj|3)"), shard)
    done = convert(shard, tmp_path / "out", to="interleaved", stated=Stated(config=FOUR))
    assert len(done.changed) == 4


def test_a_side_part_does_not_hide_a_missing_layer(tmp_path: Path) -> None:
    side = {
        name.replace("model.layers.0", "mtp.layers.0"): x
        for name, x in four().items()
        if ".0." in name
    }
    source = write(tmp_path / "a", without(four(), r"layers\.3") | side, FOUR)
    with refused("there are none in model.layers.3: pass the whole checkpoint"):
        convert(source, tmp_path / "b", to="interleaved")


def test_a_file_may_hold_some_layers_but_no_gap(tmp_path: Path) -> None:
    stated, out = Stated(config=FOUR), tmp_path / "out.safetensors"
    file, shard = tmp_path / "a.safetensors", tmp_path / "model-00001-of-00002.safetensors"
    save_file(without(four(), r"layers\.[03]"), file)
    assert len(convert(file, out, to="interleaved", stated=stated).changed) == 8
    for path in (file, shard):
        save_file(without(four(), r"layers\.2"), path)
    with refused("but there are none in model.layers.2: pass the whole checkpoint"):
        convert(file, out, to="interleaved", stated=stated, force=True)
    convert(shard, out, to="interleaved", stated=stated, force=True)
    save_file(fused(four(), 2), shard)
    with refused("rename or split model.layers.2.self_attn.qkv_proj.weight"):
        convert(shard, out, to="interleaved", stated=stated, force=True)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("none", "mlp.gate.weight"),
        ("mlp", "mlp.gate.weight"),
        ("no_op", "mlp.gate.weight"),
        ("identity", "mlp.gate.weight"),
        ("none", "memory.keys.weight"),
        ("linear_attention", "linear_attn.in_proj_qkvz.weight"),
        ("linear_attention", "self_attn.qkv_proj.weight"),
        (None, "linear_attn.q_proj.weight"),
        (None, "cross_attn.q_proj.weight"),
        (None, "mamba.in_proj.weight"),
        (None, "conv.in_proj.weight"),
    ],
)
def test_layers_without_attention_may_lack_projections(
    tmp_path: Path, kind: str | None, name: str
) -> None:
    config: dict[str, Any] = dict(FOUR)
    if kind is not None:
        config["layer_types"] = ["full_attention", kind, "full_attention", "full_attention"]
    tensors = without(four(), r"layers\.1\.self_attn") | {
        f"model.layers.1.{name}": torch.randn(64, 32)
    }
    done = convert(write(tmp_path / "a", tensors, config), tmp_path / "b", to="interleaved")
    assert len(done.changed) == 12


@pytest.mark.parametrize("key", ["no_op", "replace_with_linear"])
def test_blocks_of_the_configuration_may_have_no_attention(tmp_path: Path, key: str) -> None:
    """Models pruned by search (Nemotron-NAS) list their layers as block_configs."""
    config = {**FOUR, "model_type": "nemotron-nas", "num_key_value_heads": None}
    config["block_configs"] = [{"attention": {key: layer == 1}} for layer in range(4)]
    tensors = without(four(), r"layers\.1\.self_attn")
    tensors["model.layers.1.self_attn.linear_attn.weight"] = torch.randn(32, 32)
    source = write(tmp_path / "a", tensors, config)
    stated = Stated(source="half", naming="llama")
    done = convert(source, tmp_path / "b", to="interleaved", stated=stated)
    assert len(done.changed) == 12


def test_the_slice_of_an_unknown_family_is_a_flag(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), {**LLAMA, "model_type": "mystery"})
    stated = Stated(source="half", naming="llama", rotary_dim=8)
    convert(source, tmp_path / "b", to="interleaved", stated=stated)
    known = write(tmp_path / "c", llama_tensors())
    convert(known, tmp_path / "d", to="interleaved")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("b", "d"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# --- nothing else moves ---------------------------------------------------------------------------


FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_back_to_the_same_bytes(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    source = write(tmp_path / "a", llama_tensors(dtype=dtype), shards=shards)
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (source / "below").mkdir()
    (source / "below" / "config.json").write_text("{}", encoding="utf-8")
    before = contents(source)
    convert(source, tmp_path / "b", to="interleaved", verify=True)
    convert(tmp_path / "b", tmp_path / "c", to="half", verify=True)
    assert contents(source) == before
    assert contents(tmp_path / "c") == before
    there = contents(tmp_path / "b")
    changed = {name for name in before if there[name] != before[name]}
    assert changed
    assert all(name.endswith(".safetensors") for name in changed)


def test_infinities_and_payloads_of_nan_are_kept(tmp_path: Path) -> None:
    tensors = llama_tensors(dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    bits = torch.randint(-(2**15), 2**15, tensors[name].shape, dtype=torch.int16)
    tensors[name] = bits.view(torch.bfloat16)
    source = write(tmp_path / "a", tensors)
    convert(source, tmp_path / "b", to="interleaved")
    after = load_file(tmp_path / "b" / "model.safetensors")[name].view(torch.int16)
    assert after.tolist() == interleaved_rows(bits.tolist(), range(0, 32, 8), 8)


def test_a_torch_file_keeps_all_else(tmp_path: Path) -> None:
    tensors = llama_tensors()
    fused = torch.randn(64, 32)
    for name, rows in (("q", fused[:32]), ("k", fused[32:48]), ("v", fused[48:])):
        tensors[f"model.layers.0.self_attn.{name}_proj.weight"] = rows
    tied = "model.layers.1.self_attn.q_proj.weight"
    saved = {
        "model": {**tensors, "again": {"model.layers.1": 0}},
        "step": 7,
        "empty": torch.zeros(0),
    }
    saved["model"]["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(saved, tmp_path / "a.pt")
    stated = Stated(config=LLAMA)
    done = convert(
        tmp_path / "a.pt", tmp_path / "b.pt", to="interleaved", stated=stated, verify=True
    )
    assert f"model.{tied}" in done.changed
    for mmap in (False, True):
        after = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
        assert after["step"] == 7
        for name, before in tensors.items():
            if f"model.{name}" in done.changed:
                starts = range(0, len(before), 8)
                assert torch.equal(
                    after["model"][name], torch.stack(interleaved_rows(list(before), starts, 8))
                )
            else:
                assert torch.equal(after["model"][name], before)
        parts = [after["model"][f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert zipfile.ZipFile(tmp_path / "b.pt").testzip() is None
    stated = Stated(config=LLAMA, source="interleaved")
    convert(tmp_path / "b.pt", tmp_path / "c.pt", to="half", stated=stated)
    assert (tmp_path / "c.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()


def test_a_weight_that_two_layers_share_moves_once(tmp_path: Path) -> None:
    tensors = llama_tensors(bias=False)
    for name in ("q_proj", "k_proj"):
        shared = tensors[f"model.layers.0.self_attn.{name}.weight"]
        tensors[f"model.layers.1.self_attn.{name}.weight"] = shared
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", to="interleaved", stated=Stated(config=LLAMA))
    after = torch.load(tmp_path / "b.pt", weights_only=True)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert after[name].tolist() == interleaved_rows(tensors[name].tolist(), range(0, 32, 8), 8)


def test_memory_is_one_head_and_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_BUFFER", 512)
    source = write(tmp_path / "a", llama_tensors())
    largest = []
    real = rewrite._Copy._write

    def watched(copy: Any, data: memoryview) -> None:
        largest.append(len(data))
        real(copy, data)

    monkeypatch.setattr(rewrite._Copy, "_write", watched)
    convert(source, tmp_path / "b", to="interleaved")
    assert max(largest) == 8 * 32 * 4  # a head of eight rows of 32 float32


# --- quantised weights ----------------------------------------------------------------------------


def quantised(tensors: dict[str, torch.Tensor], **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a copy with tensors added beside each query projection."""
    return {
        **tensors,
        **{
            f"model.layers.{layer}.self_attn.q_proj.{name}": tensor.clone()
            for layer in range(2)
            for name, tensor in extra.items()
        },
    }


def test_scales_by_row_move_and_scales_by_tensor_stay(tmp_path: Path) -> None:
    tensors = quantised(
        llama_tensors(bias=False, dtype=torch.float8_e4m3fn),
        weight_scale=torch.rand(32, 1),
        input_scale=torch.tensor(0.5),
    )
    source = write(tmp_path / "a", tensors)
    done = convert(source, tmp_path / "b", to="interleaved", verify=True)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    after = load_file(tmp_path / "b" / "model.safetensors")[name]
    assert after.tolist() == interleaved_rows(tensors[name].tolist(), range(0, 32, 8), 8)
    assert "model.layers.0.self_attn.q_proj.input_scale" in done.left


@pytest.mark.parametrize("block, sound", [(8, True), (16, True), (4, False), (12, False)])
def test_scales_by_block(tmp_path: Path, block: int, sound: bool) -> None:
    config = {**LLAMA, "quantization_config": {"weight_block_size": [block, 16]}}
    scales = torch.rand(-(-32 // block), 2)
    tensors = quantised(llama_tensors(bias=False), weight_scale_inv=scales)
    source = write(tmp_path / "a", tensors, config)
    if sound:
        done = convert(source, tmp_path / "b", to="interleaved")
        assert "model.layers.0.self_attn.q_proj.weight_scale_inv" in done.left
    else:
        with refused(f"scales blocks of {block} rows, and the 8 rotated rows of a head lie in"):
            convert(source, tmp_path / "b", to="interleaved")


def test_scales_by_a_block_of_unknown_size(tmp_path: Path) -> None:
    tensors = quantised(llama_tensors(bias=False), weight_scale_inv=torch.rand(4, 2))
    with refused("states no block size"):
        convert(write(tmp_path / "a", tensors), tmp_path / "b", to="interleaved")


@pytest.mark.parametrize(
    "name, kind",
    [
        ("qweight", "GPTQ or AWQ"),
        ("weight.absmax", "bitsandbytes 4-bit"),
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes 4-bit"),
        ("SCB", "bitsandbytes int8"),
        ("weight_packed", "compressed-tensors"),
        ("codebooks", "AQLM"),
    ],
)
def test_quantised_formats_are_named(tmp_path: Path, name: str, kind: str) -> None:
    tensors = quantised(llama_tensors(bias=False), **{name: torch.ones(4, 4, dtype=torch.int8)})
    with refused(f"q_proj of layer 0 is quantised by {kind}"):
        convert(write(tmp_path / "a", tensors), tmp_path / "b", to="interleaved")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    tensors = quantised(llama_tensors(bias=False), secret=torch.ones(4))
    with refused("q_proj.secret must be a weight, a bias"):
        convert(write(tmp_path / "a", tensors), tmp_path / "b", to="interleaved")
    tensors = llama_tensors(bias=False)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(32, 32, dtype=torch.int8)
    with refused(
        r"must have a floating-point dtype but is I8\[32, 32\]: convert the checkpoint before"
    ):
        convert(write(tmp_path / "b", tensors), tmp_path / "c", to="interleaved")


def test_a_norm_that_is_stored_with_the_projection_stays(tmp_path: Path) -> None:
    """Transformer Engine's layers hold the norm before a projection under its name."""
    name = "decoder.layers.0.self_attention.linear_qkv"
    tensors = {
        f"{name}.weight": torch.randn(64, 32),
        f"{name}.layer_norm_weight": torch.randn(32),
        f"{name}.layer_norm_bias": torch.randn(32),
        f"{name}._extra_state": torch.zeros(5, dtype=torch.uint8),
    }
    config = {
        "rotary_base": 10000, "rotary_percent": 1.0, "kv_channels": 8, "hidden_size": 32, "num_attention_heads": 4,
        "num_query_groups": 2,
    }  # fmt: skip
    source = write(tmp_path / "source", tensors, config)
    done = convert(source, tmp_path / "out", to="interleaved", stated=Stated(source="half"))
    assert done.changed == (f"{name}.weight",)


@pytest.mark.parametrize("name", ["lora_bias.weight", "weight_g", "ia3_l"])
def test_parts_of_a_projection_that_no_quantisation_made(tmp_path: Path, name: str) -> None:
    tensors = quantised(llama_tensors(bias=False), **{name: torch.ones(32, 1)})
    text = (
        f"[convert] model.layers.0.self_attn.q_proj.{name} must be a weight, a bias, a scale or part of a LoRA "
        "adapter but is none that convert knows: merge it into the weight of q_proj, or remove it."
    )
    with refused(f"^{re.escape(text)}$"):
        convert(write(tmp_path / "a", tensors), tmp_path / "b", to="interleaved")


# --- what is refused ------------------------------------------------------------------------------


def drop(*names: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        for name in names:
            tensors.pop(name, None)
            config.pop(name, None)

    return change


def put(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        config.update(values)

    return change


def tensor(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors[name] = torch.zeros(shape)

    return change


Q0 = "model.layers.0.self_attn.q_proj.weight"
K0 = "model.layers.0.self_attn.k_proj.weight"
REFUSED: dict[str, tuple[Any, str]] = {
    "no keys": (drop(K0), "model.layers.0.self_attn has queries but no keys"),
    "no queries": (drop(Q0), "model.layers.0.self_attn has keys but no queries"),
    "heads of the wrong number": (
        tensor(Q0, (40, 32)),
        "must have 4 heads of 8 = 32 rows but has 40: 5 heads or heads of 10 rows would explain it",
    ),
    "no whole heads": (tensor(Q0, (30, 32)), "must have 4 heads of 8 = 32 rows but has 30[.]$"),
    "a norm of the wrong size": (
        tensor("model.layers.0.self_attn.q_norm.weight", (12,)),
        "must have 8 elements, or 4 heads of 8 = 32, but has 12[.]$",
    ),
    "no rows": (tensor(Q0, (0, 32)), "must have rows but is"),
    "two towers": (
        tensor("vision.layers.0.self_attn.q_proj.weight", (32, 32)),
        "several prefixes, 'model.', 'vision.': choose with --prefix",
    ),
    "channels that no key gives": (put(model_type="mystery"), "pass --rotary-dim=8 if all 8 channels of a head rotate"),
    "a family that is not known": (put(model_type="mystery", rotary_dim=8), "the names of the projections of mystery are not known"),
    "keys as values": (put(attention_k_eq_v=True), "uses its keys as values"),
    "no RoPE": (put(model_type="gpt2"), "has no spec: it adds learned positions"),
    "heads that are no number": (put(num_attention_heads="4"), "num_attention_heads must be an int"),
    "key heads below one": (put(num_key_value_heads=-1), "must be a whole number above 0 but got -1"),
    "a base that is no number": (put(rope_theta=float("nan")), "base"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_written(tmp_path: Path, case: str) -> None:
    change, match = REFUSED[case]
    tensors, config = llama_tensors(bias=False), dict(LLAMA)
    change(tensors, config)
    source = write(tmp_path / "a", tensors, config)
    with pytest.raises((ValueError, TypeError), match=match):
        convert(source, tmp_path / "b", to="interleaved", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "stated, match",
    [
        ({"source": "sideways"}, "a pairing must be 'half' or 'interleaved' but got 'sideways'"),
        ({"naming": "mystery"}, "naming must be one of llama, meta"),
        ({"prefix": "tower."}, "prefix must be one of 'model.' but got 'tower.'"),
        ({"packing": "mixed"}, "packing must be one of blocks, grouped, quarters but got 'mixed'"),
        ({"heads": 8}, "--heads is 8 but the configuration states num_attention_heads = 4"),
        ({"head_dim": 16}, "--head-dim is 16 but the configuration states 8"),
        ({"rotary_dim": 3}, "rotary_dim must be even"),
        ({"naming": "gpt2"}, "naming must be one of"),
        ({"naming": "meta"}, "must hold projections called …layers.N.attention.{wq, wk}"),
        ({"config": "nowhere/config.json"}, "the configuration must exist but"),
    ],
)
def test_wrong_statements_of_the_user(tmp_path: Path, stated: dict[str, Any], match: str) -> None:
    source = write(tmp_path / "a", llama_tensors())
    with refused(match):
        convert(source, tmp_path / "b", to="interleaved", stated=Stated(**stated))


def test_a_checkpoint_without_configuration(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), None)
    with refused(
        "no config.json or params.json beside the checkpoint: pass --config, or --head-dim and "
        "--naming"
    ):
        convert(source, tmp_path / "b", to="interleaved")
    stated = Stated(head_dim=8, naming="llama")
    with refused(
        "the pairing of the checkpoint must be known, and the command line does not state it"
    ):
        convert(source, tmp_path / "b", to="interleaved", stated=stated)
    stated = Stated(head_dim=8, naming="llama", source="half")
    with refused(
        "the number of query heads in model.layers.0.self_attn.q_.* must be known: pass --heads[.]$"
    ):
        convert(source, tmp_path / "b", to="interleaved", stated=stated)
    stated = Stated(head_dim=8, naming="llama", source="half", heads=4)
    assert len(convert(source, tmp_path / "b", to="interleaved", stated=stated).changed) == 12


def test_paired_so_already(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    with refused("is already half .assumed from model_type 'llama'."):
        convert(source, tmp_path / "b", to="half")
    convert(source, tmp_path / "b", to="interleaved")
    with refused("is already interleaved .stated by the conversion record tightrope_convert.json."):
        convert(tmp_path / "b", tmp_path / "c", to="interleaved")
    with refused("is already interleaved .stated by the conversion record tightrope_convert.json."):
        convert(tmp_path / "b" / "model.safetensors", tmp_path / "c.safetensors", to="interleaved")
    with refused("to must be 'half' or 'interleaved' but got 'both'"):
        convert(source, tmp_path / "c", to="both")


def test_weights_that_contradict_their_configuration(tmp_path: Path) -> None:
    source = write(tmp_path / "a", trained(interleaved=True), TRAINED)
    with refused("is half .assumed from model_type 'llama'. but its weights show interleaved"):
        convert(source, tmp_path / "b", to="interleaved")
    done = convert(source, tmp_path / "b", to="interleaved", stated=Stated(source="half"))
    assert not done.assumed
    (warning,) = done.warnings
    assert re.fullmatch(
        r"the weights show interleaved, not half \(by chance at most once in \S+ cases\)", warning
    )


def test_weights_that_show_their_pairing_or_do_not(tmp_path: Path) -> None:
    source = write(tmp_path / "a", trained(interleaved=False), TRAINED)
    done = convert(source, tmp_path / "b", to="interleaved")
    assert (done.assumed, done.source_from) == (True, "model_type 'llama'")
    assert done.warnings == ()
    back = convert(tmp_path / "b", tmp_path / "c", to="half")
    assert (back.assumed, back.warnings) == (False, ())
    source = write(tmp_path / "d", llama_tensors())
    assert convert(source, tmp_path / "e", to="interleaved", dry_run=True).warnings == (
        "the weights do not show their pairing: half is only assumed from model_type 'llama'",
    )
    given = Stated(source="half")
    assert convert(source, tmp_path / "e", to="interleaved", stated=given).warnings == (
        "the weights do not show their pairing: half is only stated by the user (--from)",
    )


@pytest.mark.parametrize("key", [None, "rope_interleave"])
def test_a_pairing_is_stated_by_a_key_or_assumed(tmp_path: Path, key: str | None) -> None:
    config = {
        "model_type": "deepseek_v3", "qk_nope_head_dim": 4, "qk_rope_head_dim": 8, "v_head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16, "rope_theta": 1e4,
    }  # fmt: skip
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": torch.randn(24, 16),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.randn(20, 16),
    }
    source = write(tmp_path / "a", tensors, config | ({} if key is None else {key: True}))
    found = detect(source)
    who = "model_type 'deepseek_v3'" if key is None else "the key rope_interleave"
    assert (found.stated, found.assumed, found.who) == ("interleaved", key is None, who)


def test_training_state_is_refused(tmp_path: Path) -> None:
    torch.save({"model": llama_tensors(), "optimizer": {}}, tmp_path / "a.pt")
    with refused("holds 'optimizer', whose state would not match the converted weights"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", to="interleaved", stated=Stated(config=LLAMA))


def test_strided_and_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    stated = Stated(config=LLAMA)
    tensors = llama_tensors()
    tensors[Q0] = tensors[Q0].T
    torch.save(tensors, tmp_path / "a.pt")
    with refused("must be contiguous but is a transposed or strided view"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", to="interleaved", stated=stated)
    tensors = llama_tensors()
    tensors["other"] = tensors[Q0][:2]
    torch.save(tensors, tmp_path / "a.pt")
    with refused("shares its bytes with"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", to="interleaved", stated=stated)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def test_pickles_do_not_run(tmp_path: Path) -> None:
    torch.save({"a": Harmful()}, tmp_path / "a.pt")
    with refused(
        "must load with weights_only but does not: its pickle imports posix.system, which"
    ):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", to="half", stated=Stated(config=LLAMA))
    torch.save({"a": 1}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with refused("must be a zip that torch.save wrote"):
        convert(tmp_path / "old.bin", tmp_path / "b.bin", to="half", stated=Stated(config=LLAMA))


@pytest.mark.parametrize(
    "pickled, why",
    [
        (
            b"cargparse\nNamespace\n)R.",
            "its pickle imports argparse.Namespace, which could run code",
        ),
        (b"cposix\nsystem\n.", "its pickle imports posix.system, which could run code"),
        (b"\x80\x02\xff.", "its pickle is damaged or holds more than weights"),
    ],
)
def test_no_error_suggests_loading_a_pickle_that_runs_code(
    tmp_path: Path, pickled: bytes, why: str
) -> None:
    path = zipped(tmp_path / "a.pt", pickled)
    with refused(why) as error:
        convert(path, tmp_path / "b.pt", to="half", stated=Stated(config=LLAMA))
    for advice in ("False", "trust", "safe_globals", "torch.load", "Re-running"):
        assert advice not in str(error.value)


def zipped(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"a/{name}", data)
    return path


def shared(levels: int) -> list[Any]:
    """Nest lists of which each names the next one four times."""
    made: list[Any] = [torch.ones(1)]
    for _ in range(levels):
        made = [made] * 4
    return made


@pytest.mark.parametrize("kind", ["in itself", "deep", "shared"])
def test_endless_nesting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(torch_file, "_MOST", 5_000)  # the real limit takes seconds
    path, endless = tmp_path / "a.pt", shared(20)
    if kind == "deep":  # too deep for torch.save
        zipped(path, b"\x80\x02}(X\x01\x00\x00\x00a" + b"]" * 10_000 + b"a" * 9_999 + b"u.")
    else:
        if kind == "in itself":
            endless.append(endless)
            endless[:-1] = []
        torch.save({**llama_tensors(), "endless": endless}, path)
    with refused("must hold at most 5,000 tensors, in at most 100 mappings and lists within"):
        detect(path, stated=Stated(config=LLAMA))


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({**llama_tensors(), "sparse": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with refused("must hold dense tensors but sparse is sparse_coo"):
        detect(tmp_path / "a.pt", stated=Stated(config=LLAMA))


@pytest.mark.parametrize("field, why", [(24, "ends at byte"), (42, "begins at byte")])
def test_records_outside_the_file_are_refused(tmp_path: Path, field: int, why: str) -> None:
    """A size or an offset of 64 bits, which Python cannot seek to, is one sentence as well."""
    path = zipped(tmp_path / "a.pt", b"\x80\x02}.")
    made = bytearray(path.read_bytes())
    entry, end = made.index(b"PK\x01\x02"), made.rindex(b"PK\x05\x06")
    name, extra = struct.unpack_from("<2H", made, entry + 28)
    more = struct.pack("<2HQ", 1, 8, 2**64 - 1)
    struct.pack_into("<I", made, end + 12, struct.unpack_from("<I", made, end + 12)[0] + len(more))
    struct.pack_into("<I", made, entry + field, 2**32 - 1)
    struct.pack_into("<H", made, entry + 30, extra + len(more))
    made[entry + 46 + name + extra : entry + 46 + name + extra] = more
    path.write_bytes(made)
    with refused(f"a/data.pkl {why} 18446744073709551"):
        detect(path, stated=Stated(config=LLAMA))


# --- which files ----------------------------------------------------------------------------------


def edit_index(folder: Path, **changes: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"].update(changes)
    path.write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    "file, match",
    [
        ("../model.safetensors", "names '../model.safetensors', which lies outside the folder"),
        ("below/../../x.safetensors", "lies outside the folder"),
        ("/etc/passwd", "names '/etc/passwd', which lies outside the folder"),
        ("gone.safetensors", "names 'gone.safetensors', which does not exist"),
        ("link.safetensors", "names 'link.safetensors', which is not a file inside the folder"),
        ("loop.safetensors", "names 'loop.safetensors', which is not a file inside the folder"),
        ("model.safetensors.index.json", "which is not a file of weights"),
        ("", "must name a file for x but names ''"),
        ("model-00001-of-00002.safetensors", "names tensors that are not in their files: x"),
    ],
)
def test_an_index_cannot_point_elsewhere(tmp_path: Path, file: str, match: str) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=2)
    outside = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2)}, outside)
    (source / "link.safetensors").symlink_to(outside)
    (source / "loop.safetensors").symlink_to(source / "loop.safetensors")
    edit_index(source, x=file)
    with refused(match):
        convert(source, tmp_path / "b", to="interleaved")
    assert not (tmp_path / "b").exists()


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=2)
    edit_index(source, **{Q0: "model-00001-of-00002.safetensors"})
    edit_index(source, **{K0: "model-00001-of-00002.safetensors"})
    with refused("names the wrong file for"):
        convert(source, tmp_path / "b", to="interleaved")
    index = source / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}', encoding="utf-8")
    with refused("must hold a weight_map"):
        convert(source, tmp_path / "b", to="interleaved")
    index.unlink()
    with refused("has shards, .*but no index"):
        convert(source, tmp_path / "b", to="interleaved")


def test_a_snapshot_of_the_hub(tmp_path: Path) -> None:
    # The hub's cache: a snapshot's files are links to blobs, which have no suffix.
    plain = write(tmp_path / "plain", llama_tensors(), shards=2)
    snapshot = tmp_path / "models--x" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for n, path in enumerate(sorted(plain.iterdir())):
        path.rename(blobs / str(n))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(n))
    done = convert(snapshot, tmp_path / "out", to="interleaved")
    assert len(done.files) == 5
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_other_files_come_along_and_other_weights_do_not(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    for name in ("tokenizer.json", "original/consolidated.00.pth", "model.gguf", "below/vocab.txt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x", encoding="utf-8")
    (source / ".git").mkdir()
    (source / "secret").symlink_to("/etc/hostname")
    done = convert(source, tmp_path / "b", to="interleaved")
    assert set(contents(tmp_path / "b")) == {
        "below/vocab.txt", "config.json", "model.safetensors", "tightrope_convert.json",
        "tokenizer.json",
    }  # fmt: skip
    assert set(done.ignored) == {"original/consolidated.00.pth", "model.gguf", ".git", "secret"}


@pytest.mark.parametrize(
    "names, match",
    [
        ([], "has no safetensors and no torch file"),
        (["a.safetensors", "b.safetensors"], "has several files of weights, a.safetensors, b.safe"),
        (["a.index.json", "b.index.json"], "has several indexes"),
    ],
)
def test_folders_without_one_checkpoint(tmp_path: Path, names: list[str], match: str) -> None:
    for name in names:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    with refused(match):
        convert(tmp_path, tmp_path.parent / "b", to="half")


@pytest.mark.parametrize(
    "name, match",
    [("a.gguf", "is a GGUF file"), ("a.txt", "must end in one of .safetensors, .bin")],
)
def test_other_files_are_no_checkpoints(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with refused(match):
        convert(tmp_path / name, tmp_path / "b", to="half", stated=Stated(config=LLAMA))


# --- the configuration ----------------------------------------------------------------------------


def test_the_way_back_takes_the_record_away_and_no_other(tmp_path: Path) -> None:
    source, again = write(tmp_path / "a", llama_tensors()), Stated(source="half")
    convert(source, tmp_path / "b", to="interleaved")
    # The user overrides the record, so this is not the way back.
    done = convert(tmp_path / "b", tmp_path / "c", to="interleaved", stated=again)
    assert "tightrope_convert.json" in done.files
    call = f'RopeSpec.from_config("{tmp_path / "c"}", interleaved=True)'
    assert done.notes[0].endswith(f"rotate the result by {call}, which pairs neighbours")
    assert (tmp_path / "c" / "tightrope_convert.json").exists()
    done = convert(tmp_path / "b", tmp_path / "d", to="half")
    assert done.notes == ()  # the family's own pairing
    other = Stated(source="interleaved")
    assert convert(tmp_path / "b", tmp_path / "e", to="half", stated=other).notes == ()
    assert "tightrope_convert.json" not in done.files
    assert set(done.files) == set(contents(tmp_path / "d")) == set(contents(source))
    # A result without a record replaces one with a record.
    convert(tmp_path / "b", tmp_path / "c", to="half", force=True)
    assert contents(tmp_path / "c") == contents(source)


def test_marking_changes_as_little_as_it_can() -> None:
    text = '{\n    "a": [1,2],\n    "rope_interleave":true\n}'
    assert marked(text, (), "rope_interleave", False) == text.replace("true", "false")
    assert marked(text, (), "rope_interleave", True) == text
    text = '{\n  "a": [1,2]\n}\n'
    added = marked(text, (), "rope_interleave", False)
    assert added == '{\n  "rope_interleave": false,\n  "a": [1,2]\n}\n'
    nested = '{"text_config": {"x": 1}, "rope_interleave": null}'
    document = json.loads(marked(nested, ("text_config",), "rope_interleave", False))
    assert document == {"text_config": {"x": 1, "rope_interleave": False}, "rope_interleave": None}
    assert json.loads(marked("{}", (), "is_neox_style", True)) == {"is_neox_style": False}


def test_a_key_of_the_configuration_must_have_one_value(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    text = json.dumps(LLAMA)[:-1] + ', "num_attention_heads": 2}'
    (source / "config.json").write_text(text, encoding="utf-8")
    with refused("each key must have one value but num_attention_heads is 4 and 2"):
        convert(source, tmp_path / "b", to="interleaved")


# --- the path of the result -----------------------------------------------------------------------


def test_an_older_result_is_replaced_only_with_force(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a", llama_tensors()), tmp_path / "b"
    convert(source, out, to="interleaved")
    first = contents(out)
    with refused("OUT already exists: .*b; --force replaces it"):
        convert(source, out, to="interleaved")
    (out / "model.safetensors").write_bytes(b"damaged")
    convert(source, out, to="interleaved", force=True)
    assert contents(out) == first
    (out / "thesis.tex").write_text("years of work", encoding="utf-8")
    with refused("OUT holds thesis.tex, which the result does not"):
        convert(source, out, to="interleaved", force=True)
    assert (out / "thesis.tex").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    (tmp_path / "b").mkdir()
    assert convert(source, tmp_path / "b", to="interleaved").written


def test_force_on_a_file(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a", llama_tensors()), tmp_path / "b.safetensors"
    file = source / "model.safetensors"
    out.write_bytes(b"older")
    with refused("OUT already exists"):
        convert(file, out, to="interleaved")
    assert out.read_bytes() == b"older"
    convert(file, out, to="interleaved", force=True)
    assert detect(out, stated=Stated(config=source)).stated == "interleaved"


@pytest.mark.parametrize("which", ["itself", "inside", "around", "link", "file", "no parent"])
def test_targets_that_would_lose_something(tmp_path: Path, which: str) -> None:
    source = write(tmp_path / "home" / "a", llama_tensors())
    before = contents(tmp_path)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "file").write_bytes(b"")
    target, match = {
        "itself": (source, "must differ from the checkpoint"),
        "inside": (source / "below", "must not lie inside the checkpoint's folder or contain it"),
        "around": (tmp_path / "home", "must not lie inside the checkpoint's folder or contain it"),
        "link": (tmp_path / "link", "must differ from the checkpoint"),
        "file": (tmp_path / "file", "must be a folder, as the checkpoint is"),
        "no parent": (tmp_path / "x" / "y", "must be in an existing folder but"),
    }[which]
    with refused(match):
        convert(source, target, to="interleaved", force=True)
    assert contents(source) == contents(tmp_path / "home" / "a")
    assert set(before) <= set(contents(tmp_path))


def test_a_file_cannot_replace_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "a", llama_tensors()) / "model.safetensors"
    os.link(file, tmp_path / "hard.safetensors")
    for target in (file, tmp_path / "hard.safetensors"):
        with refused("must differ from the checkpoint"):
            convert(file, target, to="interleaved", force=True)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    done = convert(source, tmp_path / "b", to="interleaved", dry_run=True)
    assert (done.written, len(done.changed)) == (False, 12)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_a_full_disk_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single: bool, older: bool
) -> None:
    source = write(tmp_path / "a", llama_tensors(), shards=1 if single else 3)
    checkpoint = source / "model.safetensors" if single else source
    out = tmp_path / ("out.safetensors" if single else "out")
    if older:
        convert(checkpoint, out, to="interleaved")
    before = contents(tmp_path)
    real, written = rewrite._Copy._write, [0]

    def full(copy: Any, data: memoryview) -> None:
        written[0] += len(data)
        if written[0] > 8000:
            raise OSError(28, "No space left on device")
        real(copy, data)

    monkeypatch.setattr(rewrite._Copy, "_write", full)
    with pytest.raises(OSError, match="No space left on device"):
        convert(checkpoint, out, to="interleaved", force=older)
    assert contents(tmp_path) == before


def test_a_proof_that_fails_gives_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a", llama_tensors())
    monkeypatch.setattr(rewrite, "source_row", lambda row, *_: row)
    with refused("scores must stay the same but those of model.layers.0.self_attn differ by"):
        convert(source, tmp_path / "b", to="interleaved", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_proof_of_infinite_weights_fails(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors[Q0][0, 0] = float("inf")
    with refused("or are NaN"):
        convert(write(tmp_path / "a", tensors), tmp_path / "b", to="interleaved", verify=True)


def test_files_of_a_killed_conversion_are_removed(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a", llama_tensors()), tmp_path / "b"
    left = place.partial_path(out)
    (left / "result").mkdir(parents=True)
    (left / "result" / "model.safetensors").write_bytes(b"half of it")
    (left / "lock").write_bytes(b"")
    convert(source, out, to="interleaved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_two_conversions_to_one_place(tmp_path: Path) -> None:
    source, out = write(tmp_path / "a", llama_tensors()), tmp_path / "b"
    with place.placed_folder(out, force=False) as folder:
        (folder / "x").write_bytes(b"")
        with pytest.raises(BlockingIOError, match=r"another process is writing it: '.*/b'"):
            convert(source, out, to="interleaved")
    assert (out / "x").exists()


@pytest.mark.parametrize("exchange", [True, False])
def test_folders_change_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(place.sys, "platform", "elsewhere")
    out = tmp_path / "out"
    for text in ("first", "second"):
        with place.placed_folder(out, force=True) as folder:
            (folder / "x").write_text(text, encoding="utf-8")
    assert (out / "x").read_text(encoding="utf-8") == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- damaged files --------------------------------------------------------------------------------


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one part cut off, removed, doubled or overwritten."""
    made, size = bytearray(data), len(data)
    # At least half of the damage is within the first 900 bytes, where headers are.
    where = chance.randrange(min(size, 900) if chance.random() < 0.5 else size)
    kind = chance.randrange(6)
    if kind == 0:
        del made[where:]
    elif kind == 1:
        made[where] ^= 1 << chance.randrange(8)
    elif kind == 2:
        made[where : where + 8] = chance.randbytes(8)
    elif kind == 3:
        del made[where : where + chance.randrange(1, 64)]
    elif kind == 4:
        made[where:where] = made[max(where - 40, 0) : where]
    else:
        for digit in [n for n, byte in enumerate(made[:900]) if 48 <= byte <= 57][:40]:
            if chance.random() < 0.2:
                made[digit] = chance.choice(b"0179-e")
    return bytes(made)


@pytest.mark.parametrize("kind", ["shard", "index", "config", "torch"])
def test_damaged_files_are_reported_and_lose_nothing(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / "a", llama_tensors(bias=False), shards=2)
    torch.save(llama_tensors(bias=False), source / "model.pt")
    file = (
        source
        / {
            "shard": "model-00001-of-00002.safetensors",
            "index": "model.safetensors.index.json",
            "config": "config.json",
            "torch": "model.pt",
        }[kind]
    )
    checkpoint = file if kind == "torch" else source
    data, out = file.read_bytes(), tmp_path / ("b.pt" if kind == "torch" else "b")
    chance = random.Random(kind)
    messages = []
    for _ in range(150):
        bad = mutated(data, chance)
        file.write_bytes(bad)
        try:
            convert(checkpoint, out, to="interleaved", force=True)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
        assert file.read_bytes() == bad
        assert not any(place.SUFFIX in path.name for path in tmp_path.iterdir())
    assert len(messages) > 40  # most damage to weights leaves the format valid
    assert [text for text in messages if not text.startswith("[") or "\n" in text] == []


# --- detection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_both_pairings_of_the_same_weights_are_detected(
    tmp_path: Path, interleaved: bool, width: int
) -> None:
    weights = trained(interleaved, width=width)
    source = write(tmp_path / "a", weights, {**TRAINED, "head_dim": width})
    with pytest.raises(ValueError, match=r"^\[detect\] the checkpoint must exist"):
        detect(tmp_path / "gone")
    found = detect(source)
    name, other = ("interleaved", "half") if interleaved else ("half", "interleaved")
    assert (found.pairing, found.stated) == (name, "half")
    assert found.confidence > 0.9999
    assert found.contradicts == interleaved
    convert(source, tmp_path / "b", to=other, stated=Stated(source=name))
    converted = detect(tmp_path / "b")
    assert (converted.pairing, converted.stated) == (other, other)
    assert not converted.contradicts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strength", [0.0, 0.03, 0.1, 0.3])
def test_never_a_wrong_answer(tmp_path: Path, strength: float, seed: int) -> None:
    interleaved = seed % 2 == 0
    weights = trained(interleaved, strength=strength, seed=seed)
    found = detect(write(tmp_path / "a", weights, TRAINED))
    if strength == 0.0:
        assert found.pairing is None
        assert found.confidence == 0.0
    else:
        assert found.pairing in (None, "interleaved" if interleaved else "half")
    if strength == 0.3:
        assert found.pairing is not None


def test_random_weights_and_few_heads_tell_nothing(tmp_path: Path) -> None:
    found = detect(write(tmp_path / "a", llama_tensors()))
    assert found.pairing is None
    assert {each.kind for each in found.evidence} == {"products", "queries", "norms"}
    few = {name: w for name, w in trained(True).items() if ".0." in name or "embed" in name}
    assert detect(write(tmp_path / "b", few, TRAINED)).pairing is None


def test_chance_is_a_bound(tmp_path: Path) -> None:
    from tightrope_tools.convert._detect import _weigh

    generator = torch.Generator().manual_seed(0)
    for heads, width in ((16, 8), (96, 32)):
        chances = []
        for _ in range(300):
            # Heads and channels with unequal noise.
            noise = torch.randn(heads, width, generator=generator, dtype=torch.float64)
            scale = torch.rand(heads, 1, generator=generator) * torch.rand(
                width, generator=generator
            )
            found = _weigh(noise * scale)
            assert found is not None
            chances.append(found[1])
        below = sum(chance < 0.1 for chance in chances)
        assert below <= 0.1 * len(chances)


def test_norms_are_evidence_too(tmp_path: Path) -> None:
    layers = 60
    weights = {"model.embed_tokens.weight": torch.randn(7, 32)}
    generator = torch.Generator().manual_seed(0)
    profile = torch.linspace(1.0, -1.0, 4).repeat_interleave(2)
    for layer in range(layers):
        place_ = f"model.layers.{layer}.self_attn"
        weights[f"{place_}.q_proj.weight"] = torch.randn(32, 32, generator=generator)
        weights[f"{place_}.k_proj.weight"] = torch.randn(16, 32, generator=generator)
        for name in ("q_norm", "k_norm"):
            noise = 0.1 * torch.randn(8, generator=generator)
            weights[f"{place_}.{name}.weight"] = (profile + noise).exp()
    config = {**LLAMA, "num_hidden_layers": layers}
    found = detect(write(tmp_path / "a", weights, config))
    assert found.pairing == "interleaved"
    assert min(found.evidence, key=lambda each: each.chance).kind == "norms"


def test_fused_projections_are_read(tmp_path: Path) -> None:
    separate = trained(True)
    fused = {"layers.x": torch.zeros(1)}
    for layer in range(12):
        q, k = (separate[f"model.layers.{layer}.self_attn.{n}_proj.weight"] for n in "qk")
        parts = []
        for n in range(4):
            parts += [q[64 * n : 64 * n + 64], k[32 * n : 32 * n + 32], torch.randn(32, 64)]
        fused[f"layers.{layer}.attention.query_key_value.weight"] = torch.cat(parts)
    save_file(fused, tmp_path / "a.safetensors")
    stated = Stated(head_dim=32, heads=8, kv_heads=4, naming="gpt_neox")
    found = detect(tmp_path / "a.safetensors", stated=stated)
    assert (found.pairing, found.stated) == ("interleaved", None)


# --- the record in a single file ------------------------------------------------------------------


def _one(path: Path, kind: str, metadata: str) -> Path:
    """Write a checkpoint of one file, with metadata of its "own", with "empty" metadata or "none".

    A torch file has no metadata: instead, its zip archive has a comment if `metadata` is "own".
    """
    tensors = llama_tensors()
    if kind == "torch":
        torch.save(tensors, path)
        if metadata == "own":
            with zipfile.ZipFile(path, "a") as archive:
                archive.comment = b"mine"
        return path
    given = {"own": {"format": "pt", "tightrope": 'a "note"'}, "none": None, "empty": None}[
        metadata
    ]
    save_file(tensors, path, metadata=given)
    if metadata == "empty":
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = b'{ "__metadata__": { },' + raw[9 : 8 + size]
        header += b" " * (-len(header) % 8)
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    return path


@pytest.mark.parametrize("metadata", ["own", "none", "empty"])
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_single_file_carries_its_pairing(tmp_path: Path, kind: str, metadata: str) -> None:
    suffix = "safetensors" if kind == "safetensors" else "pt"
    a, b, c, d = (tmp_path / f"{name}.{suffix}" for name in "abcd")
    _one(a, kind, metadata)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    done = convert(a, b, to="interleaved", verify=True)
    assert done.verified is not None
    found = detect(b)
    assert (found.stated, found.who) == ("interleaved", f"the conversion record in {b.name}")
    with refused("is already interleaved .stated by the conversion record in b"):
        convert(b, c, to="interleaved")
    # Back without options, to the original bytes.
    assert convert(b, c, to="half", verify=True).source_from.startswith("the conversion record")
    assert c.read_bytes() == a.read_bytes()
    assert detect(c).who == "model_type 'llama'"
    # All readers see the same tensors as in a file without a record.
    before = load_file(a) if kind == "safetensors" else torch.load(a)
    for after in (
        [load_file(b)] if kind == "safetensors" else [torch.load(b), torch.load(b, mmap=True)]
    ):
        assert list(after) == list(before)
        name = "model.layers.0.self_attn.q_proj.weight"
        rows = interleaved_rows(list(range(32)), range(0, 32, 8), 8)
        assert torch.equal(after[name], before[name][rows])
    if kind == "safetensors":
        with safetensors.safe_open(b, framework="pt") as opened:
            kept = {"format": "pt", "tightrope": 'a "note"'} if metadata == "own" else {}
            record = {"tightrope.pairing": "interleaved", "tightrope.was": "half"}
            assert opened.metadata() == {**kept, **record}
        assert int.from_bytes(b.read_bytes()[:8], "little") % 8 == 0
    else:
        with zipfile.ZipFile(b) as archive:
            assert archive.testzip() is None
            assert archive.comment.startswith(b"mine\n" if metadata == "own" else b"tightrope")
    # The user's statement overrides the record, and the new record states what was done.
    convert(b, d, to="interleaved", stated=Stated(source="half"))
    assert detect(d).stated == "interleaved"


def test_a_record_in_a_folder_is_kept_true(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    folder = tmp_path / "b"
    folder.mkdir()
    convert(source / "model.safetensors", folder / "model.safetensors", to="interleaved")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    assert detect(folder).stated == "interleaved"
    done = convert(folder, tmp_path / "c", to="half")
    assert done.source_from == "the conversion record in model.safetensors"
    assert (tmp_path / "c/model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    (folder / "tightrope_convert.json").write_text('{"pairing": "half"}', encoding="utf-8")
    with refused(
        "must agree but state model.safetensors: interleaved, tightrope_convert.json: half"
    ):
        convert(folder, tmp_path / "d", to="half")
    shards = write(tmp_path / "e", llama_tensors(), shards=2)
    first = shards / "model-00001-of-00002.safetensors"
    header = {"tightrope.pairing": "interleaved", "tightrope.was": "half"}
    save_file(load_file(first), first, metadata=header)
    with refused(
        "must agree but state .*00001-of-00002.safetensors: interleaved, .*: nothing: pass"
    ):
        detect(shards)
    save_file(load_file(first), first, metadata={"tightrope.pairing": "sideways"})
    with refused("must state a pairing in its metadata .tightrope.pairing. but states 'sideways'"):
        detect(shards)
