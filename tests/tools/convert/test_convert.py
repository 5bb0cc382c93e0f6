"""Conversion of checkpoints: the rows that move, the bytes that stay, and the errors.

test_families.py tests that converted models compute the same results; tests/tools/cli/test_convert.py
tests the command line.
"""

from __future__ import annotations

import json
import re
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
from tightrope_tools.convert import Stated, convert, detect


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
        source="half" if interleaved else "interleaved",
        naming=naming,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=width,
        start=start,
        packing=packing if packing in fused else None,
    )
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


LACKING: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "projections of another name": (lambda tensors: fused(tensors, 1), "1"),
    "attention of another name": (
        lambda tensors: without(fused(fused(tensors, 0, "attn.to_qkv"), 3), "o_proj"),
        "0, model.layers.3",
    ),
    "no projections": (lambda tensors: without(tensors, r"layers\.2\.self_attn\.[qkv]_"), "2"),
    "only a projection of another name": (
        lambda tensors: without(tensors, r"layers\.2\.self_attn") | odd("self_attn.mixed"),
        "2",
    ),
    "no attention": (lambda tensors: without(tensors, r"layers\.2\.self_attn"), "2"),
    "no attention, and experts": (
        lambda tensors: without(tensors, r"layers\.2\.self_attn") | odd("mlp.experts.0.up_proj"),
        "2",
    ),
    "no first and no last layer": (
        lambda tensors: without(tensors, r"layers\.[03]"),
        "0, model.layers.3",
    ),
}
MISSING = (
    "every layer must have projections called q_proj or k_proj but there are none in model.layers."
)


def four() -> Tensors:
    tensors = llama_tensors(FOUR, bias=False)
    mlps = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(8, 32) for n in range(4)}
    return tensors | mlps


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("case", LACKING)
def test_every_layer_must_have_its_projections(tmp_path: Path, case: str, shards: int) -> None:
    """Otherwise the result would have layers of both pairings."""
    change, layers = LACKING[case]
    source = write(tmp_path / "a", change(four()), FOUR, shards=shards)
    with refused(
        f"{re.escape(MISSING + layers)}: pass the whole checkpoint of all 4 layers, rename or"
    ):
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
    with refused(re.escape(f"{MISSING}1: pass")):
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
    with refused(re.escape(f"{MISSING}3: pass")):
        convert(source, tmp_path / "b", to="interleaved")


def test_a_file_may_hold_some_layers_but_no_gap(tmp_path: Path) -> None:
    stated = Stated(config=FOUR)
    files = [
        tmp_path / name
        for name in ("a.safetensors", "b.safetensors", "c-00001-of-00002.safetensors")
    ]
    for path, layers in zip(files, (r"layers\.[03]", r"layers\.2", r"layers\.2"), strict=True):
        save_file(without(four(), layers), path)
    done = convert(files[0], tmp_path / "1", to="interleaved", stated=stated)
    assert len(done.changed) == 8
    with refused(re.escape(f"{MISSING}2: pass")):
        convert(files[1], tmp_path / "2", to="interleaved", stated=stated)
    convert(files[2], tmp_path / "3", to="interleaved", stated=stated)
    save_file(fused(four(), 2), files[2])
    with refused(re.escape(f"{MISSING}2: pass")):
        convert(files[2], tmp_path / "4", to="interleaved", stated=stated)


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
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


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


def test_other_formats_are_refused(tmp_path: Path) -> None:
    tensors = quantised(llama_tensors(bias=False), secret=torch.ones(4))
    with refused("q_proj.secret must be a weight, a bias"):
        convert(write(tmp_path / "a", tensors), tmp_path / "b", to="interleaved")
    tensors = llama_tensors(bias=False)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(32, 32, dtype=torch.int8)
    with refused(
        r"must have a floating-point dtype but is I8\[32, 32\]: if the checkpoint is quantised, convert it"
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
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "kv_channels": 8,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    }
    source = write(tmp_path / "source", tensors, config)
    done = convert(source, tmp_path / "out", to="interleaved", stated=Stated(source="half"))
    assert done.changed == (f"{name}.weight",)


@pytest.mark.parametrize(
    "name", ["lora_bias.weight", "weight_g", "qweight", "weight.absmax", "weight_packed"]
)
def test_parts_of_a_projection_that_convert_does_not_know(tmp_path: Path, name: str) -> None:
    tensors = quantised(llama_tensors(bias=False), **{name: torch.ones(32, 1)})
    text = (
        f"[convert] model.layers.0.self_attn.q_proj.{name} must be a weight, a bias, a scale or part of a LoRA "
        "adapter but is none that convert knows: if the checkpoint is quantised, convert it before that; else merge it "
        "into the weight of q_proj, or remove it."
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
        "must have 4 heads of 8 = 32 rows but has 40[.]$",
    ),
    "no whole heads": (tensor(Q0, (30, 32)), "must have 4 heads of 8 = 32 rows but has 30[.]$"),
    "a norm of the wrong size": (
        tensor("model.layers.0.self_attn.q_norm.weight", (12,)),
        "must have 4 heads of 8 = 32 rows but has 12[.]$",
    ),
    "no rows": (tensor(Q0, (0, 32)), "must have rows but is"),
    "two towers": (
        tensor("vision.layers.0.self_attn.q_proj.weight", (32, 32)),
        "several prefixes, 'model.', 'vision.': choose with --prefix",
    ),
    "channels that no key gives": (
        put(model_type="mystery"),
        "pass rotary_dim=8 if all 8 channels of a head rotate",
    ),
    "a family that is not known": (
        put(model_type="mystery", rotary_dim=8),
        "the names of the projections of mystery are not known",
    ),
    "keys as values": (put(attention_k_eq_v=True), "uses its keys as values"),
    "no RoPE": (put(model_type="gpt2"), "has no spec: it adds learned positions"),
    "heads that are no number": (
        put(num_attention_heads="4"),
        "num_attention_heads must be an int",
    ),
    "key heads below one": (
        put(num_key_value_heads=-1),
        "must be a whole number from 0 to 65536 but got -1",
    ),
    "a base that is no number": (put(rope_theta=float("nan")), "base"),
}


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
        ({"heads": 8}, "must have one value but got num_attention_heads = 4 and --heads = 8"),
        ({"head_dim": 16}, "--head-dim is 16 but the configuration states 8"),
        ({"rotary_dim": 3}, "rotary_dim must be even"),
        ({"naming": "gpt2"}, "naming must be one of"),
        ({"naming": ["q_proj"]}, "naming must be a name or a mapping from names of modules"),
        ({"naming": "meta"}, "must hold projections called …layers.N.attention.{wq, wk}"),
        (
            {"naming": {"self_attn.q_proj": "query"}},
            "naming must give 'self_attn.q_proj' one of the roles",
        ),
        (
            {"naming": {"a.*.q": "q", "b.*.k": "k"}},
            "must begin alike up to the layer's number but are",
        ),
    ],
)
def test_wrong_statements_of_the_user(tmp_path: Path, stated: dict[str, Any], match: str) -> None:
    source = write(tmp_path / "a", llama_tensors())
    with refused(match):
        convert(source, tmp_path / "b", to="interleaved", stated=Stated(**stated))


def test_a_checkpoint_without_configuration(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), None)
    with refused("without config.json or params.json, pass --config, or --head-dim and --naming"):
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
        "model_type": "deepseek_v3",
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 8,
        "v_head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "rope_theta": 1e4,
    }
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": torch.randn(24, 16),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.randn(20, 16),
    }
    source = write(tmp_path / "a", tensors, config | ({} if key is None else {key: True}))
    found = detect(source)
    who = "model_type 'deepseek_v3'" if key is None else "the key rope_interleave"
    assert (found.stated, found.assumed, found.who) == ("interleaved", key is None, who)


# --- names of one's own ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, packing, place, suffix",
    [
        (
            {"layers.*.attn.q_k_v_proj": "qkv"},
            "blocks",
            "model.layers.3.attn.q_k_v_proj",
            ".weight",
        ),
        ({"attn.in_proj": "qkv"}, "grouped", "block.attn.in_proj", "_weight"),
        ({"in_proj": "qkv"}, "blocks", "block.in_proj", "_weight"),
        (
            {"midlayer.self_attn.q_proj": "q", "midlayer.self_attn.k_proj": "k"},
            None,
            "midlayer.self_attn",
            ".weight",
        ),
    ],
)
def test_names_of_ones_own(
    tmp_path: Path, names: dict[str, str], packing: str | None, place: str, suffix: str
) -> None:
    """EAGLE's layer has no number, and torch's attention has no dot before `weight`."""
    if packing is None:
        before = {
            f"{place}.{name}.weight": torch.randn(n, 8)
            for name, n in (("q_proj", 32), ("k_proj", 16))
        }
        heads = {name: range(len(x) // 8) for name, x in before.items()}
    else:
        bias = suffix.replace("weight", "bias")
        before = {f"{place}{suffix}": torch.randn(64, 8), f"{place}{bias}": torch.randn(64)}
        # 4 queries, 2 keys, 2 values; or twice 2 queries, a key, a value
        heads = dict.fromkeys(
            before, [0, 1, 2, 3, 4, 5] if packing == "blocks" else [0, 1, 2, 4, 5, 6]
        )
    before["norm.weight"] = torch.randn(8)
    save_file(before, tmp_path / "a.safetensors")
    stated = Stated(naming=names, packing=packing, source="half", head_dim=8, heads=4, kv_heads=2)
    done = convert(
        tmp_path / "a.safetensors", tmp_path / "b", to="interleaved", stated=stated, verify=True
    )
    assert set(done.changed) == set(heads)
    after = load_file(tmp_path / "b")
    for name, x in before.items():
        assert after[name].tolist() == interleaved_rows(
            x.tolist(), [8 * n for n in heads.get(name, ())], 8
        )


def test_a_configuration_can_be_set_aside(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors(), {**LLAMA, "swa_rope_theta": 5e5})
    with refused("every key about RoPE must be known but got swa_rope_theta"):
        convert(source, tmp_path / "b", to="interleaved")
    stated = Stated(config=False, source="half", naming="llama", head_dim=8, heads=4)
    assert len(convert(source, tmp_path / "b", to="interleaved", stated=stated).changed) == 12
    text = (source / "config.json").read_text(encoding="utf-8")
    assert (tmp_path / "b" / "config.json").read_text(encoding="utf-8") == text


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
