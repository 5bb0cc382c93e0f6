"""Conversion of checkpoints: the rows that move, the bytes that stay, and the errors.

test_families.py tests that converted models compute the same results; tests/tools/cli/test_convert.py
tests the command line.
"""

from __future__ import annotations

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
    contents,
    interleaved_rows,
    llama_tensors,
    write,
)
from tests.support.tolerances import TABLE
from tightrope_tools.convert import Stated, convert

Tensors = dict[str, torch.Tensor]
Run = Callable[..., Any]
ATTENTION = "model.layers.0.self_attn"


def without(tensors: Tensors, pattern: str) -> Tensors:
    """Return the tensors whose names do not match."""
    return {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}


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
    if packing in fused:
        naming, modules = "gpt_neox", {"attention.query_key_value": fused[packing]}
    else:
        naming = "llama"
        if packing == "gated":
            naming, q = "qwen3_next", [one for n in range(heads) for one in (q[n], head("gate", n))]
        modules = {f"self_attn.{name}_proj": each for name, each in zip("qkv", (q, k, v))}
    labels: dict[str, list[Any]] = {
        f"layers.0.{name}.weight": [row for one in each for row in one]
        for name, each in modules.items()
    }
    number = {label: n for n, label in enumerate(row for each in labels.values() for row in each)}
    folder = tmp_path_factory.mktemp("rows")
    weights = {
        name: torch.tensor([[number[row], -number[row]] for row in rows], dtype=torch.float32)
        for name, rows in labels.items()
    }
    others = {
        f"{name.removesuffix('weight')}{suffix}": w[:, 0].reshape(len(w), *shape).clone()
        for name, w in weights.items()
        for suffix, shape in (("bias", ()), ("weight_scale", (1,)), ("lora_B.weight", (1,)))
    }
    save_file(weights | others, folder / "in.safetensors")
    source, to = ("half", "interleaved") if interleaved else ("interleaved", "half")
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": width}
    packed = packing if packing in fused else None
    stated = Stated(source=source, naming=naming, start=start, packing=packed, **sizes)
    convert(folder / "in.safetensors", folder / "out.safetensors", to=to, stated=stated)
    before, after = (load_file(folder / f"{name}.safetensors") for name in ("in", "out"))
    for name, rows in labels.items():
        starts = [
            n for n, (kind, _, channel) in enumerate(rows) if kind in "qk" and channel == start
        ]
        # `old` has half pairing, `new` interleaved pairing, in either direction of the conversion.
        old, new = (before, after) if interleaved else (after, before)
        wanted = interleaved_rows(old[name].tolist(), starts, width)
        assert new[name].tolist() == wanted
        for other in (full for full in others if full.startswith(name.removesuffix("weight"))):
            assert new[other].flatten().tolist() == [row[0] for row in wanted]


def test_norms_biases_and_the_rest(tmp_path: Path, converted: Run) -> None:
    tensors = llama_tensors()
    done, after = converted(tensors, verify=True)
    starts = {"q_proj": range(0, 32, 8), "k_proj": range(0, 16, 8), "q_norm": [0], "k_norm": [0]}
    moved = {name for name in tensors if name.split(".")[-2] in starts}
    assert (set(done.changed), set(done.left)) == (moved, tensors.keys() - moved)
    for name, before in tensors.items():
        wanted = before
        if name in moved:
            rows = interleaved_rows(list(before), list(starts[name.split(".")[-2]]), 8)
            wanted = torch.stack(rows)
            assert not torch.equal(wanted, before)
        assert torch.equal(after[name], wanted)
    assert done.verified.layers == 2
    assert done.verified.unswitched > TABLE["other pairing"].value
    (file,) = tmp_path.glob("*/out/model.safetensors")
    with safetensors.safe_open(file, "pt") as stream:
        assert stream.metadata() == {"format": "pt", "note": "kept"}


def test_norms_over_all_heads_and_one_per_head(converted: Run) -> None:
    tensors = llama_tensors(bias=False)
    for layer in range(2):
        place_ = f"model.layers.{layer}.self_attn"
        tensors[f"{place_}.q_norm.weight"] = torch.randn(32)  # OLMo 2
        tensors[f"{place_}.k_norm.weight"] = torch.randn(2, 8)  # Cohere
    after = converted(tensors, verify=True)[1]
    for name, starts in (("q_norm", range(0, 32, 8)), ("k_norm", range(0, 16, 8))):
        full = f"model.layers.1.self_attn.{name}.weight"
        wanted = interleaved_rows(tensors[full].flatten().tolist(), list(starts), 8)
        assert after[full].flatten().tolist() == wanted
        assert after[full].shape == tensors[full].shape


def test_a_low_rank_adapter(converted: Run) -> None:
    place_ = f"base_model.model.{ATTENTION}"
    tensors = {
        f"{place_}.q_proj.lora_A.weight": torch.randn(4, 32),
        f"{place_}.q_proj.lora_B.weight": torch.randn(32, 4),
        f"{place_}.v_proj.lora_B.weight": torch.randn(16, 4),
    }
    done, after = converted(tensors)
    name = f"{place_}.q_proj.lora_B.weight"
    assert done.changed == (name,)
    assert after[name].tolist() == interleaved_rows(tensors[name].tolist(), range(0, 32, 8), 8)


def test_parts_of_a_model(converted: Run) -> None:
    tensors = llama_tensors()
    for name in ("q_proj", "k_proj"):
        weight = tensors[f"{ATTENTION}.{name}.weight"]
        tensors[f"mtp.layers.0.self_attn.{name}.weight"] = weight.clone()
    done, _ = converted(tensors, verify=True)
    assert "mtp.layers.0.self_attn.q_proj.weight" in done.changed
    assert done.verified.layers == 3
    # A vision tower with layers of the same names is ambiguous: the user chooses the prefix.
    tensors = {name.replace("mtp.", "vision.encoder."): w for name, w in tensors.items()}
    done, _ = converted(tensors, stated=Stated(prefix="model"))
    assert len(done.changed) == 12
    assert "vision.encoder.layers.0.self_attn.q_proj.weight" in done.left


# --- names of one's own ---------------------------------------------------------------------------


def test_statements_are_no_mapping(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    text = re.escape(
        "[convert] stated must be a Stated, such as Stated(source='half'), but got {'heads': 4}."
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        convert(source, tmp_path / "b", to="interleaved", stated={"heads": 4})


@pytest.mark.parametrize(
    "names, packing, place, suffix",
    [
        ({"layers.*.attn.q_k_v": "qkv"}, "blocks", "model.layers.3.attn.q_k_v", ".weight"),
        ({"attn.in_proj": "qkv"}, "grouped", "block.attn.in_proj", "_weight"),
        ({"in_proj": "qkv"}, "blocks", "block.in_proj", "_weight"),
        ({f"mid.self_attn.{n}_proj": n for n in "qk"}, None, "mid.self_attn", ".weight"),
    ],
)
def test_names_of_ones_own(
    converted: Run, names: dict[str, str], packing: str | None, place: str, suffix: str
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
    stated = Stated(naming=names, packing=packing, source="half", head_dim=8, heads=4, kv_heads=2)
    done, after = converted(before, None, stated=stated, verify=True)
    assert set(done.changed) == set(heads)
    for name, x in before.items():
        assert after[name].tolist() == interleaved_rows(
            x.tolist(), [8 * n for n in heads.get(name, ())], 8
        )


# --- every layer ----------------------------------------------------------------------------------

FOUR = {**LLAMA, "num_hidden_layers": 4}
MISSING = (
    "every layer must have projections called q_proj or k_proj but there are none in model.layers."
)


def fused(tensors: Tensors, layer: int, name: str = "self_attn.qkv_proj") -> Tensors:
    """Return the tensors with one layer's projections as one tensor."""
    place_ = f"model.layers.{layer}."
    parts = [tensors[f"{place_}self_attn.{part}_proj.weight"] for part in "qkv"]
    kept = {
        key: x for key, x in tensors.items() if not re.match(rf"{place_}self_attn\.[qkv]_", key)
    }
    return {**kept, f"{place_}{name}.weight": torch.cat(parts)}


def odd(name: str) -> Tensors:
    """Return a tensor of another name than the tensors of other layers have."""
    return {f"model.layers.2.{name}.weight": torch.randn(64, 32)}


MLPS = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(8, 32) for n in range(4)}
WHOLE = llama_tensors(FOUR, bias=False) | MLPS
LACKS_2 = without(WHOLE, r"layers\.2\.self_attn")
ENDS = "0, model.layers.3"
# What is wrong -> the tensors, and the layers without projections.
LACKING: dict[str, tuple[Tensors, str]] = {
    "projections of another name": (fused(WHOLE, 1), "1"),
    "attention of another name": (
        without(fused(fused(WHOLE, 0, "attn.to_qkv"), 3), "o_proj"),
        ENDS,
    ),
    "no projections": (without(WHOLE, r"layers\.2\.self_attn\.[qkv]_"), "2"),
    "only a projection of another name": (LACKS_2 | odd("self_attn.mixed"), "2"),
    "no attention": (LACKS_2, "2"),
    "no attention, and experts": (LACKS_2 | odd("mlp.experts.0.up_proj"), "2"),
    "no first and no last layer": (without(WHOLE, r"layers\.[03]"), ENDS),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("case", LACKING)
def test_every_layer_must_have_its_projections(refused: Run, case: str, shards: int) -> None:
    """Otherwise the result would have layers of both pairings."""
    tensors, layers = LACKING[case]
    text = f"{re.escape(MISSING + layers)}: pass the whole checkpoint of all 4 layers, rename or"
    refused(text, tensors, FOUR, shards=shards, verify=True)


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
    tensors = without(WHOLE, r"layers\.1\.self_attn") | named
    source = write(tmp_path / "a", tensors, FOUR)
    if shard:
        (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
        source = source / "model-00001-of-00002.safetensors"
    with pytest.raises(ValueError, match=re.escape(f"{MISSING}1: pass")):
        convert(source, tmp_path / "b.safetensors" if shard else tmp_path / "b", to="interleaved")


def test_a_shard_may_hold_a_part_of_a_layer(tmp_path: Path) -> None:
    shard = tmp_path / "model-00002-of-00003.safetensors"
    save_file(without(WHOLE, r"layers\.(0|1\.self_attn\.[qkv]|2.*(v|o)_proj|3)"), shard)
    done = convert(shard, tmp_path / "out", to="interleaved", stated=Stated(config=FOUR))
    assert len(done.changed) == 4


def test_a_side_part_does_not_hide_a_missing_layer(refused: Run) -> None:
    layer = {name: x.clone() for name, x in WHOLE.items() if ".0." in name}
    side = {name.replace("model.", "mtp."): x for name, x in layer.items()}
    refused(re.escape(f"{MISSING}3: pass"), without(WHOLE, r"^model\.layers\.3") | side, FOUR)


@pytest.mark.parametrize(
    "file, lacking, missing",
    [
        ("a.safetensors", r"layers\.[03]", False),
        ("b.safetensors", r"layers\.2", True),
        ("c-00001-of-00002.safetensors", r"layers\.2", False),
        ("d-00001-of-00002.safetensors", None, True),
    ],
)
def test_a_file_may_hold_some_layers_but_no_gap(
    tmp_path: Path, file: str, lacking: str | None, missing: bool
) -> None:
    tensors = fused(WHOLE, 2) if lacking is None else without(WHOLE, lacking)
    save_file(tensors, tmp_path / file)

    def done() -> int:
        made = convert(
            tmp_path / file, tmp_path / "out", to="interleaved", stated=Stated(config=FOUR)
        )
        return len(made.changed)

    if missing:
        with pytest.raises(ValueError, match=re.escape(f"{MISSING}2: pass")):
            done()
    else:
        assert done() == 4 * len({name.split(".")[2] for name in tensors if "layers" in name})


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
    converted: Run, kind: str | None, name: str
) -> None:
    types = ["full_attention", kind, "full_attention", "full_attention"]
    config = FOUR if kind is None else {**FOUR, "layer_types": types}
    other = {f"model.layers.1.{name}": torch.randn(64, 32)}
    done, _ = converted(without(WHOLE, r"layers\.1\.self_attn") | other, config)
    assert len(done.changed) == 12


def test_a_layer_after_those_that_the_configuration_lists_needs_no_projections(
    converted: Run,
) -> None:
    config = {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0]}
    more = {"model.layers.2.mlp.up_proj.weight": torch.ones(8, 32)}
    assert len(converted(llama_tensors() | more, config)[0].changed) == 6


@pytest.mark.parametrize("key", ["no_op", "replace_with_linear"])
def test_blocks_of_the_configuration_may_have_no_attention(converted: Run, key: str) -> None:
    """Models pruned by search (Nemotron-NAS) list their layers as block_configs."""
    config = {**FOUR, "model_type": "nemotron-nas", "num_key_value_heads": None}
    config["block_configs"] = [{"attention": {key: layer == 1}} for layer in range(4)]
    tensors = without(WHOLE, r"layers\.1\.self_attn")
    tensors["model.layers.1.self_attn.linear_attn.weight"] = torch.randn(32, 32)
    done, _ = converted(tensors, config, stated=Stated(source="half", naming="llama"))
    assert len(done.changed) == 12


# --- nothing else moves ---------------------------------------------------------------------------

FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2".split()


@pytest.mark.parametrize("name, shards", [*((name, 3) for name in FLOATS), ("float32", 1)])
def test_back_to_the_same_bytes(tmp_path: Path, name: str, shards: int) -> None:
    dtype = getattr(torch, name)
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


# --- quantised weights ----------------------------------------------------------------------------


def quantised(dtype: torch.dtype = torch.float32, **extra: torch.Tensor) -> Tensors:
    """Return Llama's tensors, with others beside each query projection."""
    beside = {
        f"model.layers.{layer}.self_attn.q_proj.{name}": tensor.clone()
        for layer in range(2)
        for name, tensor in extra.items()
    }
    return llama_tensors(bias=False, dtype=dtype) | beside


def test_scales_by_row_move_and_scales_by_tensor_stay(converted: Run) -> None:
    scales = {"weight_scale": torch.rand(32, 1), "input_scale": torch.tensor(0.5)}
    done, after = converted(quantised(torch.float8_e4m3fn, **scales), verify=True)
    name = f"{ATTENTION}.q_proj.weight_scale"
    wanted = interleaved_rows(scales["weight_scale"].tolist(), range(0, 32, 8), 8)
    assert after[name].tolist() == wanted
    assert f"{ATTENTION}.q_proj.input_scale" in done.left


@pytest.mark.parametrize("block, sound", [(8, True), (16, True), (4, False), (12, False)])
def test_scales_by_block(converted: Run, refused: Run, block: int, sound: bool) -> None:
    config = {**LLAMA, "quantization_config": {"weight_block_size": [block, 16]}}
    tensors = quantised(weight_scale_inv=torch.rand(-(-32 // block), 2))
    if sound:
        done, _ = converted(tensors, config)
        assert f"{ATTENTION}.q_proj.weight_scale_inv" in done.left
    else:
        text = f"scales blocks of {block} rows, and the 8 rotated rows of a head lie in"
        refused(text, tensors, config)


@pytest.mark.parametrize(
    "name, tensor, text",
    [
        ("weight_scale_inv", torch.rand(4, 2), "states no block size"),
        ("secret", torch.ones(4), "q_proj.secret must be a weight, a bias"),
        (
            "weight",
            torch.ones(32, 32, dtype=torch.int8),
            r"must have a floating-point dtype but is I8\[32, 32\]: if the checkpoint is quantised, convert it",
        ),
    ],
)
def test_other_formats_are_refused(
    refused: Run, name: str, tensor: torch.Tensor, text: str
) -> None:
    refused(text, quantised(**{name: tensor}))


def test_a_norm_that_is_stored_with_the_projection_stays(converted: Run) -> None:
    """Transformer Engine's layers hold the norm before a projection under its name."""
    name = "decoder.layers.0.self_attention.linear_qkv"
    tensors = {
        f"{name}.weight": torch.randn(64, 32),
        f"{name}.layer_norm_weight": torch.randn(32),
        f"{name}.layer_norm_bias": torch.randn(32),
        f"{name}._extra_state": torch.zeros(5, dtype=torch.uint8),
    }
    rotary = {"rotary_base": 10000, "rotary_percent": 1.0, "kv_channels": 8, "hidden_size": 32}
    config = rotary | {"num_attention_heads": 4, "num_query_groups": 2}
    done, _ = converted(tensors, config, stated=Stated(source="half"))
    assert done.changed == (f"{name}.weight",)


@pytest.mark.parametrize(
    "name", ["lora_bias.weight", "weight_g", "qweight", "weight.absmax", "weight_packed"]
)
def test_parts_of_a_projection_that_convert_does_not_know(refused: Run, name: str) -> None:
    text = (
        f"[convert] {ATTENTION}.q_proj.{name} must be a weight, a bias, a scale or part of a LoRA "
        "adapter but is none that convert knows: if the checkpoint is quantised, convert it before that; else merge it "
        "into the weight of q_proj, or remove it."
    )
    refused(f"^{re.escape(text)}$", quantised(**{name: torch.ones(32, 1)}))


# --- what is refused ------------------------------------------------------------------------------

Q0, K0 = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight"
MYSTERY = {"model_type": "mystery"}
ROWS = "must have 4 heads of 8 = 32 rows but has"
# What is wrong -> changes of tensors, whose shape may be None, and of the configuration, and the error.
REFUSED: dict[str, tuple[dict[str, tuple[int, ...] | None], dict[str, Any], str]] = {
    "no keys": ({K0: None}, {}, f"{ATTENTION} has queries but no keys"),
    "no queries": ({Q0: None}, {}, f"{ATTENTION} has keys but no queries"),
    "heads of the wrong number": ({Q0: (40, 32)}, {}, f"{ROWS} 40[.]$"),
    "no whole heads": ({Q0: (30, 32)}, {}, f"{ROWS} 30[.]$"),
    "a norm of the wrong size": ({f"{ATTENTION}.q_norm.weight": (12,)}, {}, f"{ROWS} 12[.]$"),
    "no rows": ({Q0: (0, 32)}, {}, "must have rows but is"),
    "two towers": (
        {Q0.replace("model", "vision"): (32, 32)},
        {},
        "several prefixes, 'model.', 'vis",
    ),
    "channels that no key gives": ({}, MYSTERY, "pass rotary_dim=8 if all 8 channels of a head"),
    "an unknown family": ({}, {**MYSTERY, "rotary_dim": 8}, "projections of mystery are not known"),
    "keys as values": ({}, {"attention_k_eq_v": True}, "uses its keys as values"),
    "no RoPE": ({}, {"model_type": "gpt2"}, "has no spec: it adds learned positions"),
    "heads that are text": ({}, {"num_attention_heads": "4"}, "num_attention_heads must be an int"),
    "key heads below one": ({}, {"num_key_value_heads": -1}, "number from 0 to 65536 but got -1"),
    "a base that is no number": ({}, {"rope_theta": float("nan")}, "base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_written(refused: Run, case: str) -> None:
    shapes, config, match = REFUSED[case]
    tensors = llama_tensors(bias=False)
    for name, shape in shapes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    refused(match, tensors, LLAMA | config, verify=True)


@pytest.mark.parametrize(
    "stated, match",
    [
        ({"source": "sideways"}, "a pairing must be 'half' or 'interleaved' but got 'sideways'"),
        ({"naming": "mystery"}, "naming must be one of llama, meta"),
        ({"prefix": "tower."}, "prefix must be one of 'model.' but got 'tower.'"),
        ({"packing": "mixed"}, "packing must be one of blocks, grouped, quarters but got 'mixed'"),
        ({"heads": 8}, "must have one value but got num_attention_heads = 4 and --heads = 8"),
        ({"head_dim": 16}, "--head-dim is 16 but the configuration states 8"),
        ({"rotary_dim": 4}, "--rotary-dim is 4 but the configuration states 8"),
        ({"start": 2}, "--start is 2 but the configuration states 0"),
        ({"naming": "gpt2"}, "naming must be one of"),
        ({"naming": ["q_proj"]}, "naming must be a name or a mapping from names of modules"),
        ({"naming": "meta"}, "must hold projections called …layers.N.attention.{wq, wk}"),
        ({"naming": {"attn.q": "query"}}, "naming must give 'attn.q' one of the roles"),
        ({"naming": {"a.*.q": "q", "b.*.k": "k"}}, "begin alike up to the layer's number but are"),
    ],
)
def test_wrong_statements_of_the_user(refused: Run, stated: dict[str, Any], match: str) -> None:
    refused(match, llama_tensors(), stated=Stated(**stated))


def test_a_checkpoint_without_configuration(converted: Run, refused: Run) -> None:
    known: dict[str, Any] = {}
    for more, text in (
        ({}, "without config.json or params.json, pass --config, or --head-dim and --naming"),
        (
            {"head_dim": 8, "naming": "llama"},
            "the number of query heads in model.layers.0.self_attn.q_.* must be known: pass --heads[.]$",
        ),
        (
            {"heads": 4},
            "the pairing of the checkpoint must be known, and the command line does not state it",
        ),
    ):
        known |= more
        refused(text, llama_tensors(), None, stated=Stated(**known))
    done, _ = converted(llama_tensors(), None, stated=Stated(**known, source="half"))
    assert len(done.changed) == 12


def test_paired_so_already(tmp_path: Path, refused: Run) -> None:
    text = "is already half .assumed from model_type 'llama'."
    source = refused(text, llama_tensors(), to="half")
    refused("to must be 'half' or 'interleaved' but got 'both'", llama_tensors(), to="both")
    convert(source, tmp_path / "b", to="interleaved")
    text = "is already interleaved .stated by the conversion record tightrope_convert.json."
    for path in (tmp_path / "b", tmp_path / "b" / "model.safetensors"):
        with pytest.raises(ValueError, match=text):
            convert(path, tmp_path / f"c{path.suffix}", to="interleaved")
