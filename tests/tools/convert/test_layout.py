"""Conversion refuses projections whose rows are not those of the stated heads, before it writes anything.

test_families.py tests that the rows which move are those that the published code rotates.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import LLAMA, interleaved_rows, llama_tensors, write
from tightrope_tools.convert import Stated, convert, detect

Tensors = dict[str, torch.Tensor]
HALF = Stated(source="half")
# 4 query heads and 2 key heads of 8 channels.
PHI3: dict[str, Any] = {**LLAMA, "model_type": "phi3", "num_hidden_layers": 1}
ROWS = 4 * 8 + 2 * 8 + 2 * 8
QKV = "model.layers.0.self_attn.qkv_proj"
MEGATRON: dict[str, Any] = {
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "kv_channels": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}
LINEAR_QKV = "decoder.layers.0.self_attention.linear_qkv"
CODEGEN = {"model_type": "codegen", "n_embd": 32, "n_head": 4, "rotary_dim": 8}
GLM = {**LLAMA, "num_hidden_layers": 1}
CHATGLM = Stated(source="interleaved", naming="chatglm")
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 8,
    "v_head_dim": 4, "rope_theta": 10000.0,
}  # fmt: skip


def refused(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None, text: str, stated: Stated = HALF
) -> None:
    """Check that `convert` raises exactly this sentence and writes nothing, and that `detect` raises it."""
    source = write(folder / "source", tensors, config)
    for out in ("out", "source/model.safetensors"):
        path = source if out == "out" else source / "model.safetensors"
        with pytest.raises(ValueError, match=f"^{re.escape(f'[convert] {text}.')}$"):
            convert(path, folder / Path(out).name, to=other(stated), stated=stated, force=True)
    with pytest.raises(ValueError, match=re.escape(text)):
        detect(source, stated=stated)
    assert [path.name for path in folder.iterdir()] == ["source"]


def other(stated: Stated) -> str:
    return "half" if stated.source == "interleaved" else "interleaved"


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- the number of rows ---------------------------------------------------------------------------


def order(packing: str, heads: int, kv_heads: int) -> str:
    """Spell the order of heads in a projection, a letter each."""
    group = heads // kv_heads
    if packing == "grouped":
        return ("q" * group + "kv") * kv_heads
    if packing == "quarters":
        return ("q" * (heads // 4) + "v" * (heads // 4) + "k" * (heads // 4)) * 4
    return {"q": "q" * heads, "k": "k" * kv_heads, "gated": "qg" * heads}.get(
        packing, "q" * heads + "k" * kv_heads + "v" * kv_heads
    )


SPELLED = {"gated": "{0} + {0}", "q": "{0}", "k": "{1}"}


@settings(max_examples=60, deadline=None)
@given(
    packing=st.sampled_from(["blocks", "grouped", "quarters", "gated", "q", "k"]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    pairs=st.integers(1, 3),
    suffix=st.sampled_from(["weight", "bias", "weight_scale", "lora_B.weight"]),
    container=st.sampled_from(["safetensors", "torch", "shards", "torch shards"]),
    data=st.data(),
)
def test_any_wrong_number_of_rows_is_refused_before_anything_is_written(
    tmp_path_factory: pytest.TempPathFactory,
    packing: str,
    kv_heads: int,
    group: int,
    pairs: int,
    suffix: str,
    container: str,
    data: st.DataObject,
) -> None:
    if packing == "quarters":
        kv_heads, group = 4 * kv_heads, 1
    heads, width = kv_heads * group, 2 * pairs
    separate = packing in ("gated", "q", "k")
    modules = {
        f"self_attn.{name}_proj": order(
            {"q": "gated" if packing == "gated" else "q"}.get(name, name), heads, kv_heads
        )
        for name in "qk"
    }
    if not separate:
        modules = {"attention.query_key_value": order(packing, heads, kv_heads)}
    tensors: Tensors = {}
    for module, letters in modules.items():
        rows = len(letters) * width
        for name, columns in (
            ("weight", 3),
            ("bias", 0),
            ("weight_scale", 1),
            ("lora_B.weight", 2),
        ):
            shape = (rows, columns) if columns else (rows,)
            tensors[f"layers.0.{module}.{name}"] = fresh(*shape)
    wanted = {"k": "self_attn.k_proj"}.get(packing, next(iter(modules)))
    name = f"layers.0.{wanted}.{suffix}"
    total = len(tensors[name])
    # One scale is that of the whole tensor, and stays.
    least = 2 if suffix == "weight_scale" else 1
    got = data.draw(st.integers(least, 3 * total).filter(lambda rows: rows != total))
    config = {
        "head_dim": width, "rotary_dim": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "rope_theta": 1e4,
    }  # fmt: skip
    naming = {"gated": "qwen3_next", "q": "llama", "k": "llama"}.get(packing, "gpt_neox")
    stated = Stated(config, source="half", naming=naming, packing=None if separate else packing)
    folder = tmp_path_factory.mktemp("rows")

    checkpoint = save(
        folder / "wrong", tensors | {name: fresh(got, *tensors[name].shape[1:])}, container
    )
    spelled = SPELLED.get(packing, "{0} + {1} + {1}").format(heads, kv_heads)
    noun = "head" if spelled == "1" else "heads"
    text = f"[convert] {name} must have {spelled} {noun} of {width} = {total} rows but has {got}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}(: .* would explain it)?[.]$"):
        convert(checkpoint, folder / f"out{checkpoint.suffix}", to="interleaved", stated=stated)
    assert [path.name for path in folder.iterdir()] == ["wrong"]

    checkpoint = save(folder / "right", tensors, container)
    out = folder / f"out{checkpoint.suffix}"
    convert(checkpoint, out, to="interleaved", stated=stated)
    after = load(out)
    for module, letters in modules.items():
        starts = [width * n for n, letter in enumerate(letters) if letter in "qk"]
        for full in (full for full in tensors if full.startswith(f"layers.0.{module}.")):
            assert after[full].tolist() == interleaved_rows(tensors[full].tolist(), starts, width)


def save(folder: Path, tensors: Tensors, container: str) -> Path:
    """Save tensors as one file, or as two shards with an index."""
    if container == "shards":
        return write(folder, tensors, None, shards=2)
    folder.mkdir()
    if container == "safetensors":
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = list(tensors)
    parts = [names] if container == "torch" else [names[::2], names[1::2]]
    for number, part in enumerate(parts):
        torch.save({name: tensors[name] for name in part}, folder / f"part-{number}.bin")
    if container == "torch":
        return folder / "part-0.bin"
    where = {name: f"part-{number}.bin" for number, part in enumerate(parts) for name in part}
    index = str({"weight_map": where}).replace("'", '"')
    (folder / "pytorch_model.bin.index.json").write_text(index, encoding="utf-8")
    return folder


def load(path: Path) -> Tensors:
    """Load the tensors of a file or of all files of a folder."""
    files = (
        [path]
        if path.is_file()
        else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    )
    made: Tensors = {}
    for file in files:
        made |= (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, weights_only=True)
        )
    return made


WRONG: dict[str, tuple[str, int, str]] = {
    "gates": (
        "weight", ROWS + 32,
        "rows but has 96: a gate for each query head, 4 key heads or heads of 12 rows would "
        "explain it",
    ),
    "gates of one row": (
        "weight", ROWS + 4, "rows but has 68: a gate of one row for each query head or values of 10 rows would "
        "explain it",
    ),
    "as many key heads as query heads": (
        "bias", 96, "rows but has 96: a gate for each query head, 4 key heads or heads of 12 "
        "rows would explain it",
    ),
    "one key head": ("weight", 48, "rows but has 48: 1 key head or heads of 6 rows would explain it"),
    "narrow values": ("weight", ROWS - 8, "rows but has 56: values of 4 rows would explain it"),
    "a shard": (
        "weight", ROWS // 2,
        "rows but has 32: heads of 4 rows or one of 2 shards of a tensor-parallel checkpoint would explain it",
    ),
    "nothing that is known": ("bias", 37, "rows but has 37"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_would_explain_the_rows_of_a_fused_projection(tmp_path: Path, case: str) -> None:
    suffix, rows, end = WRONG[case]
    name = f"{QKV}.{suffix}"
    tensors = {f"{QKV}.weight": fresh(ROWS, 32), f"{QKV}.bias": fresh(ROWS)}
    tensors[name] = fresh(rows, *tensors[name].shape[1:])
    refused(tmp_path, tensors, PHI3, f"{name} must have 4 + 2 + 2 heads of 8 = 64 {end}")


SEPARATE: dict[str, tuple[str, int, str]] = {
    "gated queries": (
        "q", 64, "4 heads of 8 = 32 rows but has 64: a gate for each query head (--naming qwen3_next), 8 heads or "
        "heads of 16 rows would explain it",
    ),
    "a gate of one row": (
        "q", 36, "4 heads of 8 = 32 rows but has 36: a gate of one row for each query head "
        "would explain it",
    ),
    "too few keys": (
        "k", 8, "2 heads of 8 = 16 rows but has 8: 1 head, heads of 4 rows or one of 2 shards of a tensor-parallel "
        "checkpoint would explain it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEPARATE)
def test_what_would_explain_the_rows_of_separate_projections(tmp_path: Path, case: str) -> None:
    letter, rows, end = SEPARATE[case]
    name = f"model.layers.0.self_attn.{letter}_proj.weight"
    tensors = llama_tensors(bias=False) | {name: fresh(rows, 32)}
    refused(tmp_path, tensors, LLAMA, f"{name} must have {end}")


def test_queries_without_the_gates_of_their_family(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    config = {**LLAMA, "model_type": "qwen3_next", "head_dim": 8, "partial_rotary_factor": 0.5}
    text = (
        f"{name} must have 4 + 4 heads of 8 = 64 rows but has 32: queries without gates (--naming llama), heads "
        "of 4 rows or one of 2 shards of a tensor-parallel checkpoint would explain it"
    )
    refused(tmp_path, llama_tensors(bias=False), config, text)
    stated = Stated(source="half", naming="llama")
    convert(tmp_path / "source", tmp_path / "out", to="interleaved", stated=stated)


@pytest.mark.parametrize(
    "rank, rows, end",
    [
        (
            12,
            18,
            "must have 12 + 8 = 20 rows, the latent (kv_lora_rank) and the rotated ones, but has 18",
        ),
        (None, 6, "must end in 8 rotated rows but has 6 rows"),
    ],
)
def test_latent_attention(tmp_path: Path, rank: int | None, rows: int, end: str) -> None:
    place = "model.layers.0.self_attn"
    tensors = {
        f"{place}.q_proj.weight": fresh(24, 16),
        f"{place}.kv_a_proj_with_mqa.weight": fresh(rows, 16),
    }
    config = {**DEEPSEEK, "kv_lora_rank": rank}
    text = f"{place}.kv_a_proj_with_mqa.weight {end}"
    refused(tmp_path, tensors, config, text, Stated(source="interleaved"))


@pytest.mark.parametrize(
    "rows, heads, text",
    [
        (
            24,
            4,
            "must have whole heads of 8 rows, in a number that divides the 4 query heads, but has 24 rows",
        ),
        (
            20,
            4,
            "must have whole heads of 8 rows, in a number that divides the 4 query heads, but has 20 rows",
        ),
        (4, None, "must have whole heads of 8 rows but has 4 rows"),
    ],
)
def test_keys_whose_number_nothing_states(
    tmp_path: Path, rows: int, heads: int | None, text: str
) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    stated = Stated(source="half", naming="llama", head_dim=8, heads=heads)
    refused(tmp_path, {name: fresh(rows, 32)}, None, f"{name} {text}", stated)


def test_numbers_of_heads_that_must_be_known(tmp_path: Path) -> None:
    stated = {"source": "half", "naming": "phi3", "head_dim": 8}
    tensors = {f"{QKV}.weight": fresh(96, 32)}
    text = f"the number of query heads in {QKV}.weight must be known: pass --heads"
    refused(tmp_path, tensors, None, text, Stated(**stated))
    text = f"the number of key heads in {QKV}.weight must be known: pass --kv-heads"
    refused(tmp_path, tensors, None, text, Stated(**stated, heads=4))
    text = f"the 4 query heads in {QKV}.weight must be a multiple of its 3 key heads"
    refused(tmp_path, tensors, None, text, Stated(**stated, heads=4, kv_heads=3))
    text = (
        f"to be packed in quarters, {QKV}.weight must hold as many key as query heads, a multiple of 4, but holds "
        "4 query and 2 key heads"
    )
    refused(
        tmp_path, tensors, None, text, Stated(**stated, heads=4, kv_heads=2, packing="quarters")
    )
    text = "--kv-heads must be above 0 but got 0"
    refused(tmp_path, tensors, None, text, Stated(**stated, heads=4, kv_heads=0))


def test_files_of_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for rank in range(2):
        part = {
            "layers.0.attention.wq.weight": fresh(12, 32),
            "layers.0.attention.wk.weight": fresh(12, 32),
            f"{QKV}.weight": fresh(32, 32),
        }
        torch.save(part, tmp_path / "source" / f"consolidated.{rank:02d}.pth")
    stated = {"source": "interleaved", "head_dim": 8}
    for text, given_ in (
        (
            "layers.0.attention.wq.weight must have a share of 3 heads in each of 2 files",
            Stated(**stated, naming="meta", heads=3),
        ),
        (
            f"{QKV}.weight must be whole but is split over 2 files: merge them",
            Stated(**stated, naming="phi3", heads=4, kv_heads=2),
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'[convert] {text}.')}$"):
            convert(tmp_path / "source", tmp_path / "out", to="half", stated=given_)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- layouts that the configuration states ----------------------------------------------------------


def gated(key: str, value: object, where: str = "linear_qkv", advice: str = "") -> str:
    return (
        f"{key} is {value!r}, but no tensor holds the gates of the attention alone: gates among the rows of {where} "
        f"are not supported{advice}"
    )


ORDER = "the rows of {} must be in the order of --packing {}, but "
PARTS = (
    ORDER.format("qkv_proj", "blocks")
    + "{} is 2, so they may be in that order within each of 2 parts: pass --packing blocks if the parts were "
    "merged"
)
EIGHTHS = (
    ORDER.format("qkv_proj", "quarters")
    + "{} is 8, as in CodeGen 2, some of whose models are packed in eighths: pass --packing quarters if mp_num is "
    "4 in the code of the model"
)
KINDS = (
    "every layer must have {} heads but {} is {}: list the number of each layer, as in "
    "num_key_value_heads_per_layer"
)
LATENT = "{} is {}: latent attention has no projection such as qkv_proj, so choose another naming"
VALUES = "the values in {} must be as wide as the keys, 8 channels, but {} is {}"
# The number of rows fits the stated heads in all of these.
STATED: dict[str, tuple[str, dict[str, Any], dict[str, Any], Stated, str]] = {
    "Megatron's gates": (
        LINEAR_QKV, MEGATRON, {"attention_output_gate": True}, HALF, gated("attention_output_gate", True),
    ),
    "Qwen's gates": (QKV, PHI3, {"attn_output_gate": True}, HALF, gated("attn_output_gate", True, "qkv_proj")),
    "gates of one row": (
        QKV, PHI3, {"headwise_attn_output_gate": True}, HALF, gated("headwise_attn_output_gate", True, "qkv_proj"),
    ),
    "a name of gates": (
        QKV, PHI3, {"gating": "per-head"}, HALF, gated("gating", "per-head", "qkv_proj"),
    ),
    "gates of a fused projection": (LINEAR_QKV, MEGATRON, {"linear_qgkv": True}, HALF, gated("linear_qgkv", True)),
    "an output gate": (LINEAR_QKV, MEGATRON, {"use_output_gate": 1}, HALF, gated("use_output_gate", 1)),
    "gated attention": (
        LINEAR_QKV, MEGATRON, {"use_gated_attention": True}, HALF, gated("use_gated_attention", True),
    ),
    "an older order of NeMo": (
        LINEAR_QKV, MEGATRON, {"megatron_legacy": True}, HALF,
        ORDER.format("linear_qkv and query_key_value", "grouped") + "megatron_legacy is True: pass --packing blocks",
    ),
    "ChatGLM without groups": (
        "encoder.layers.0.self_attention.query_key_value",
        {**GLM, "num_key_value_heads": 4}, {"multi_query_attention": False}, CHATGLM,
        ORDER.format("query_key_value", "blocks") + "multi_query_attention is False: pass --packing grouped",
    ),
    "CodeGen 2 by its head_dim": (
        "h.0.attn.qkv_proj", CODEGEN, {"head_dim": 8}, Stated(source="interleaved"), EIGHTHS.format("head_dim"),
    ),
    "CodeGen in other parts": (
        "h.0.attn.qkv_proj", CODEGEN, {"mp_num": 8}, Stated(source="interleaved"), EIGHTHS.format("mp_num"),
    ),
    **{
        f"parts of {key}": (QKV, PHI3, {key: 2}, HALF, PARTS.format(key))
        for key in (
            "tensor_model_parallel_size", "tensor_parallel_size", "model_parallel_size", "tp_size", "mp_size",
        )
    },
    "parts of TensorRT-LLM": (QKV, PHI3, {"mapping": {"tp_size": 2}}, HALF, PARTS.format("tp_size")),
    **{
        f"narrow values, {key}": (QKV, PHI3, {key: 4}, HALF, VALUES.format("qkv_proj", key, 4))
        for key in ("v_head_dim", "head_dim_v", "value_head_dim", "v_channels")
    },
    "wide values": (
        LINEAR_QKV, MEGATRON, {"v_head_dim": 16}, HALF,
        VALUES.format("linear_qkv and query_key_value", "v_head_dim", 16),
    ),
    "latent attention": (QKV, PHI3, {"kv_lora_rank": 8}, HALF, LATENT.format("kv_lora_rank", 8)),
    "Megatron's latent attention": (
        QKV, PHI3, {"multi_latent_attention": True}, HALF, LATENT.format("multi_latent_attention", True),
    ),
    "key heads of some layers": (
        QKV, PHI3, {"num_global_key_value_heads": 1}, HALF,
        KINDS.format("2 key", "num_global_key_value_heads", 1),
    ),
    "key heads of others": (
        QKV, PHI3, {"swa_num_key_value_heads": 4}, HALF,
        KINDS.format("2 key", "swa_num_key_value_heads", 4),
    ),
    "query heads of some layers": (
        QKV, PHI3, {"num_sliding_attention_heads": 8}, HALF,
        KINDS.format("4 query", "num_sliding_attention_heads", 8),
    ),
    "a setting of some layers": (
        QKV, PHI3, {"attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2}}, HALF,
        KINDS.format("4 query", "attention_other_setting.num_attention_heads", 8),
    ),
    "key heads of layers of a kind, where nothing states those of the others": (
        QKV,
        {**PHI3, "model_type": "solar", "num_key_value_heads": None},
        {"swa_num_key_value_heads": 2},
        Stated(source="half", naming="phi3", kv_heads=None),
        KINDS.format("a stated number of key", "swa_num_key_value_heads", 2),
    ),
    "a width of one layer": (
        QKV, PHI3, {"block_configs": [{"attention": {"head_dim": 16}}]}, HALF,
        "every layer must have heads of 8 channels but layer 0.head_dim is 16",
    ),
    "layers in a file of their own": (
        LINEAR_QKV, MEGATRON, {"heterogeneous_layers_config_path": "blocks.json"}, HALF,
        "heterogeneous_layers_config_path states layers that differ in their heads, and conversion does not read it",
    ),
    "two numbers of key heads": (
        QKV, PHI3, {"num_kv_heads": 4}, HALF,
        "a number of heads must have one value but got num_key_value_heads = 2 and num_kv_heads = 4",
    ),
    "a number that is none": (
        QKV, PHI3, {"num_key_value_heads": [2, "2"]}, HALF,
        "each entry of num_key_value_heads must be a whole number but got '2'",
    ),
    "a list that is too short": (
        QKV.replace("0", "2"), PHI3, {"num_key_value_heads": [2, 1]}, HALF,
        "the configuration must list the heads of every layer but lists 2, and the checkpoint has a layer 2",
    ),
    "a layer without attention": (
        QKV, PHI3, {"num_key_value_heads": [0, 2]}, HALF,
        f"the 4 query heads in {QKV}.bias must be a multiple of its 0 key heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATED)
def test_a_layout_is_refused_by_name_though_its_rows_fit(tmp_path: Path, case: str) -> None:
    module, config, more, stated, text = STATED[case]
    rows = 96 if "quarters" in text or "ChatGLM" in case else ROWS
    tensors = {f"{module}.weight": fresh(rows, 32), f"{module}.bias": fresh(rows)}
    refused(tmp_path, tensors, config | more, text, stated)
    if "short" in case:
        return
    if "nothing states" in case:
        stated = replace(stated, kv_heads=2)
    stated = replace(stated, packing="grouped" if "ChatGLM" in case else None)
    source = write(tmp_path / "again", tensors, config)
    convert(source, tmp_path / "out", to=other(stated), stated=stated, verify=True)


def test_dense_arguments_of_megatron_have_the_sizes_of_latent_attention_too(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    tensors, made = {f"{LINEAR_QKV}.weight": fresh(ROWS, 32)}, []
    for name, more in (("plain", {}), ("full", {**latent, "multi_latent_attention": False})):
        source = write(tmp_path / name, tensors, MEGATRON | more)
        convert(source, tmp_path / f"{name} out", to="interleaved", stated=HALF, verify=True)
        made.append(load_file(tmp_path / f"{name} out" / "model.safetensors"))
        assert "8 of 8 channels from 0 on" in detect(source).model
    (name,) = made[0].keys() | made[1].keys()
    assert torch.equal(made[0][name], made[1][name])


# --- errors about configurations name the options of the command --------------------------------------

ZEBRA: dict[str, Any] = {**LLAMA, "model_type": "zebra"}
WIDE = {**ZEBRA, "layer_types": ["a", "b"], "per_layer_config": {"0": {"head_dim": 16}}}
NAMED = Stated(source="half", naming="llama", rotary_dim=8)
OPTIONS: dict[str, tuple[dict[str, Any], Stated, str]] = {
    "an unknown key": (
        {**LLAMA, "swa_rope_theta": 5e5}, HALF,
        "every key about RoPE must be known but got swa_rope_theta; pass --config, a file without them, if they do not "
        "change which channels rotate",
    ),
    "widths of some layers": (
        {**LLAMA, "swa_head_dim": 16}, HALF,
        "every key about RoPE must be known but got swa_head_dim; pass --config, a file without them, if they do not "
        "change which channels rotate",
    ),
    "a width of every layer": (
        {**LLAMA, "head_dim_per_layer": [16, 8]}, HALF,
        "every key that may say which layers rotate must be known but got head_dim_per_layer; pass a config without it "
        "only if it has no effect",
    ),
    "a key of layers": (
        {**LLAMA, "nope_layers": [1]}, HALF,
        "every key that may say which layers rotate must be known but got nope_layers; pass a config without it only "
        "if it has no effect",
    ),
    "a part": (
        {**LLAMA, "partial_rotary_factor": 0.5}, HALF,
        "rotary_dim must be 8, as the code of model_type 'llama' rotates all channels of a head, but got 4 from "
        "partial_rotary_factor = 0.5 of 8; for other code, which rotates a part, pass a config without its model_type, "
        "with --from half",
    ),
    "several sections": (
        {"model_type": "zoo", "a_config": LLAMA, "b_config": LLAMA}, HALF,
        "section must name one part of the config, as RoPE is in 'a_config', 'b_config'; for example "
        "--section b_config",
    ),
    "a slice": (
        ZEBRA, replace(NAMED, rotary_dim=None),
        "the config must give the channels that rotate, as the table of families does not contain model_type 'zebra'; "
        "pass --rotary-dim=8 if all 8 channels of a head rotate, or the number that do, with --start if they are not the first",
    ),
    "a slice after a start": (
        ZEBRA, replace(NAMED, rotary_dim=None, start=4),
        "the config must give the channels that rotate, as the table of families does not contain model_type 'zebra'; "
        "pass --rotary-dim=4 if all 4 channels from 4 on rotate, or the number that do",
    ),
    "heads of two widths": (
        {**WIDE, "rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e4}}}, NAMED,
        "the config must give the channels that rotate, as the table of families does not contain model_type 'zebra'; "
        "pass --config, a file with partial_rotary_factor, as heads have 16 channels in a and 8 channels in b",
    ),
    "a width of one layer": (
        {**LLAMA, "per_layer_config": {"0": {"head_dim": 16}}}, HALF,
        "head_dim must have one value but got per_layer_config.0.head_dim = 16 and hidden_size / num_attention_heads "
        "= 32 / 4 = 8",
    ),
    "a pairing that the code does not read": (
        {**LLAMA, "model_type": "glm", "partial_rotary_factor": 0.5, "head_dim": 8, "rope_interleaved": False},
        Stated(),
        "interleaved must have one value but got False from rope_interleaved and True from model_type 'glm'; pass "
        "--from if the key is right",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_sentences_about_configurations_name_options(tmp_path: Path, case: str) -> None:
    config, stated, text = OPTIONS[case]
    source = write(tmp_path / "source", llama_tensors(), config)
    sentence = f"^{re.escape(f'[from_config] {text}.')}$"
    with pytest.raises(ValueError, match=sentence):
        convert(source, tmp_path / "out", to="interleaved", stated=stated)
    with pytest.raises(ValueError, match=sentence):
        detect(source, stated=stated)


def test_the_layers_that_a_configuration_lists_need_no_option(tmp_path: Path) -> None:
    tensors = llama_tensors()
    source = write(tmp_path / "source", tensors, {**ZEBRA, "no_rope_layers": [1, 0]})
    done = convert(
        source, tmp_path / "out", to="interleaved", stated=replace(NAMED, rotary_dim=8), verify=True
    )
    assert {name.split(".")[2] for name in done.changed} == {"0"}
    text = "[convert] rotary_dim and start must not be given if layers have different specs."
    source = write(
        tmp_path / "other", tensors, {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0]}
    )
    for stated in (Stated(rotary_dim=4), Stated(start=4)):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            convert(source, tmp_path / "no", to="interleaved", stated=stated)
    assert convert(source, tmp_path / "no", to="interleaved", stated=Stated(rotary_dim=8)).written


def test_a_null_in_a_rope_section_asks_for_no_layers(tmp_path: Path) -> None:
    config = {**ZEBRA, "rope_scaling": {"rope_type": "default", "factor": None}}
    source = write(tmp_path / "source", llama_tensors(), config)
    assert convert(source, tmp_path / "out", to="interleaved", stated=NAMED).written


@pytest.mark.parametrize("naming", ["qwen3_next", "llama"])
@pytest.mark.parametrize(
    "key", ["attn_output_gate", "elementwise_attn_output_gate", "headwise_attn_output_gate", "use_gated_attention"]
)  # fmt: skip
def test_gates_among_separate_queries(tmp_path: Path, key: str, naming: str) -> None:
    """Qwen3-Next has a gate after each query head; its forerunner has them after those of a key head."""
    tensors = llama_tensors(bias=False)
    if naming == "qwen3_next":
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = fresh(64, 32)
    stated = Stated(source="half", naming=naming)
    config = {**LLAMA, key: True}
    if (key, naming) == ("attn_output_gate", "qwen3_next"):
        source = write(tmp_path / "source", tensors, config)
        assert len(convert(source, tmp_path / "out", to="interleaved", stated=stated).changed) == 8
        return
    # Only this key means the order of Qwen3-Next.
    advice = (
        ": --naming qwen3_next knows those of attn_output_gate" if key == "attn_output_gate" else ""
    )
    refused(tmp_path, tensors, config, gated(key, True, "q_proj", advice), stated)


@pytest.mark.parametrize("name", ["g_proj", "gate_proj", "output_gate", "o_gate"])
def test_gates_in_tensors_of_their_own(tmp_path: Path, name: str) -> None:
    tensors = {
        f"{QKV}.weight": fresh(ROWS, 32),
        QKV.replace("qkv_proj", f"{name}.weight"): fresh(4, 32),
    }
    source = write(tmp_path / "source", tensors, {**PHI3, "gating": True})
    done = convert(source, tmp_path / "out", to="interleaved")
    assert done.changed == (f"{QKV}.weight",)


@pytest.mark.parametrize(
    "key, value",
    [
        ("output_gate_type", "silu"), ("linear_attn_output_gate", True), ("mlp_gated_output", True),
        ("moe_router_gate_heads", 4), ("gate_multiplier", 2), ("attn_output_gate", False),
        ("attention_output_gate", None), ("attn_gate", "none"), ("use_head_wise_attn_gate", 0),
    ],
)  # fmt: skip
def test_keys_that_announce_no_gates_of_the_attention(
    tmp_path: Path, key: str, value: object
) -> None:
    source = write(tmp_path / "source", {f"{QKV}.weight": fresh(ROWS, 32)}, {**PHI3, key: value})
    assert convert(source, tmp_path / "out", to="interleaved").written


def test_a_part_of_a_checkpoint_may_lack_the_gates(tmp_path: Path) -> None:
    config, place = {**LLAMA, "gating": True}, "model.layers.0.self_attn"
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file(
        {f"{place}.q_proj.weight": fresh(32, 32), f"{place}.k_proj.weight": fresh(16, 32)}, shard
    )
    convert(shard, tmp_path / "a.safetensors", to="interleaved", stated=Stated(config))
    adapter = {f"base.{place}.q_proj.lora_B.weight": fresh(32, 2)}
    save_file(adapter, tmp_path / "adapter.safetensors")
    convert(
        tmp_path / "adapter.safetensors",
        tmp_path / "b.safetensors",
        to="interleaved",
        stated=Stated(config),
    )
    save_file({f"{QKV}.weight": fresh(ROWS, 32)}, shard)
    with pytest.raises(ValueError, match=re.escape(gated("gating", True, "qkv_proj"))):
        convert(shard, tmp_path / "c", to="interleaved", stated=Stated({**PHI3, "gating": True}))


@pytest.mark.parametrize("module", ["linear_qgkv", "in_proj_qgkv", "qkvg_proj"])
def test_gates_by_the_name_of_a_tensor(tmp_path: Path, module: str) -> None:
    name = f"decoder.layers.0.self_attention.{module}.weight"
    text = f"{name} holds gates beside queries, keys and values by its name, which is not supported: split it"
    refused(tmp_path, {name: fresh(96, 32)}, MEGATRON, text)
    refused(
        tmp_path / "more",
        {name: fresh(96, 32), f"{LINEAR_QKV}.weight": fresh(ROWS, 32)},
        MEGATRON,
        text,
    )


def test_the_gated_projection_of_the_report(tmp_path: Path) -> None:
    """192 rows are 4 queries, 4 gates, 2 keys and 2 values of 16, and also 4 of each without gates."""
    weights = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.randn(192, 64)}
    save_file(weights, tmp_path / "g.safetensors")
    config = {
        "rotary_base": 10000, "rotary_percent": 1.0, "kv_channels": 16, "hidden_size": 64, "num_attention_heads": 4,
        "attention_output_gate": True,
    }  # fmt: skip
    stated = Stated(source="half", naming="megatron", config=config)
    for extra in ({}, {"num_query_groups": 2}):
        stated = Stated(source="half", naming="megatron", config=config | extra)
        with pytest.raises(ValueError, match=re.escape(gated("attention_output_gate", True))):
            convert(
                tmp_path / "g.safetensors",
                tmp_path / "o.safetensors",
                to="interleaved",
                stated=stated,
            )
    config |= {"attention_output_gate": False, "num_query_groups": 2}
    stated = Stated(source="half", naming="megatron", config=config)
    with pytest.raises(
        ValueError, match="rows but has 192: a gate for each query head, 4 key heads"
    ):
        convert(
            tmp_path / "g.safetensors", tmp_path / "o.safetensors", to="interleaved", stated=stated
        )
    assert [path.name for path in tmp_path.iterdir()] == ["g.safetensors"]


@pytest.mark.parametrize(
    "version, how",
    [(0, "pass --packing blocks"), (1.0, "let Megatron load and save it")],
)
def test_older_versions_of_megatron(tmp_path: Path, version: float, how: str) -> None:
    path, out = tmp_path / "a.pt", tmp_path / "b.pt"
    weights = {
        "model": {LINEAR_QKV.replace("linear_qkv", "query_key_value.weight"): fresh(ROWS, 32)}
    }
    torch.save({**weights, "checkpoint_version": version}, path)
    text = (
        ORDER.format("linear_qkv and query_key_value", "grouped")
        + f"checkpoint_version is {version}: {how}."
    )
    for stated in (
        Stated(MEGATRON, source="half"),
        Stated(source="half", naming="megatron", head_dim=8, heads=4, kv_heads=2),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'[convert] {text}')}$"):
            convert(path, out, to="interleaved", stated=stated)
    assert not out.exists()
    convert(path, out, to="interleaved", stated=Stated(MEGATRON, source="half", packing="blocks"))
    torch.save({**weights, "checkpoint_version": 3.0}, path)
    convert(path, out, to="interleaved", stated=Stated(MEGATRON, source="half"), force=True)


JUNK: list[Any] = [
    True, -1, 0, 1.5, "x", "", [], [[]], [None], ["x"], [-1], {}, {"0": {}}, {"0": []}, {"0": {"head_dim": []}},
    {"x": {"head_dim": 1}}, {"9" * 5000: {"head_dim": 1}}, {"1": {"num_key_value_heads": [2]}}, {"tp_size": []},
    {"num_attention_heads": {}}, [{"attention": []}], [{"attention": {"n_heads_in_group": "x"}}], 10**30, [10**30],
]  # fmt: skip
KEYS = (
    "num_attention_heads", "num_key_value_heads", "num_key_value_heads_per_layer", "kv_lora_rank", "mapping",
    "tp_size", "v_head_dim", "swa_head_dim", "head_dim_per_layer", "attention_other_setting", "per_layer_config",
    "block_configs", "attn_config", "gating", "multi_query", "swa_num_key_value_heads", "num_hidden_layers",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_damaged_values_are_reported(tmp_path: Path, key: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({f"{QKV}.weight": fresh(ROWS, 32)}, path)
    for value in JUNK:
        stated = Stated({**PHI3, "head_dim": 8, key: value}, source="half")
        try:
            convert(path, tmp_path / "b.safetensors", to="interleaved", stated=stated, dry_run=True)
        except (ValueError, TypeError) as error:
            assert str(error).startswith("[")  # noqa: PT017


# --- numbers of heads -------------------------------------------------------------------------------


BY_LAYER: dict[str, dict[str, Any]] = {
    "a list": {"num_key_value_heads": [2, 4]},
    "a list of its own": {"num_key_value_heads_per_layer": [2, 4]},
    "keys of single layers": {"per_layer_config": {"1": {"num_key_value_heads": 4}}},
    "blocks with numbers": {
        "block_configs": [{"attention": {"num_key_value_heads": 2}}, {"attention": {"num_key_value_heads": 4}}]
    },
    "blocks with groups": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}}, {"attention": {"n_heads_in_group": 1}}]
    },
    "OpenELM's lists": {"num_query_heads": [4, 4], "num_kv_heads": [2, 4], "num_key_value_heads": None},
}  # fmt: skip


@pytest.mark.parametrize("case", BY_LAYER)
def test_key_heads_of_every_layer(tmp_path: Path, case: str) -> None:
    config = {**LLAMA, "head_dim": 8, **BY_LAYER[case]}
    fused = {
        f"model.layers.{n}.self_attn.qkv_proj.weight": fresh(32 + 2 * 8 * kv, 32)
        for n, kv in ((0, 2), (1, 4))
    }
    tensors = llama_tensors() | {
        f"model.layers.1.self_attn.k_proj.{name}": fresh(32, *shape)
        for name, shape in (("weight", (32,)), ("bias", ()))
    }
    convert(write(tmp_path / "a", tensors, config), tmp_path / "b", to="interleaved", verify=True)
    stated = Stated(naming="phi3")
    source = write(tmp_path / "c", fused, config)
    convert(source, tmp_path / "d", to="interleaved", stated=stated, verify=True)
    after = load(tmp_path / "b") | load(tmp_path / "d")
    for name, before in (tensors | fused).items():
        module = name.split(".")[-2]
        count = {"q_proj": 4, "k_proj": 2, "q_norm": 1, "k_norm": 1, "qkv_proj": 6}.get(module, 0)
        if ".1." in name and module in ("k_proj", "qkv_proj"):
            count += 2
        assert after[name].tolist() == interleaved_rows(before.tolist(), range(0, 8 * count, 8), 8)
    wrong = {
        name: fused[f"model.layers.{1 - n}.self_attn.qkv_proj.weight"]
        for n, name in enumerate(fused)
    }
    with pytest.raises(
        ValueError, match=re.escape("must have 4 + 2 + 2 heads of 8 = 64 rows but has 96")
    ):
        convert(
            write(tmp_path / "e", wrong, config), tmp_path / "f", to="interleaved", stated=stated
        )


def test_query_heads_of_every_layer(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "laguna", "head_dim": 8, "partial_rotary_factor": 1.0}
    config |= {"num_attention_heads_per_layer": [4, 8]}
    tensors = llama_tensors(bias=False)
    name = "model.layers.1.self_attn.q_proj.weight"
    convert(
        write(tmp_path / "a", tensors | {name: fresh(64, 32)}, config),
        tmp_path / "b",
        to="interleaved",
        verify=True,
    )
    text = f"{name} must have 8 heads of 8 = 64 rows but has 32: 4 heads, heads of 4 rows or one of 2 shards of a "
    refused(
        tmp_path / "more", tensors, config, f"{text}tensor-parallel checkpoint would explain it"
    )


def test_lists_of_gguf(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "qwen2", "qwen2.rope.freq_base": 10000.0, "qwen2.embedding_length": 32,
        "qwen2.attention.head_count": 4, "qwen2.attention.key_length": 8, "qwen2.attention.head_count_kv": [2, 1],
    }  # fmt: skip
    stated = Stated(metadata, source="half", naming="llama")
    source = write(tmp_path / "a", llama_tensors(bias=False), None)
    text = (
        "model.layers.1.self_attn.k_proj.weight must have 1 head of 8 = 8 rows but has 16: 2 heads"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        convert(source, tmp_path / "b", to="interleaved", stated=stated)
    metadata["qwen2.attention.head_count_kv"] = [2, 2]
    convert(source, tmp_path / "b", to="interleaved", stated=stated)
    metadata["qwen2.attention.value_length"] = 4
    with pytest.raises(
        ValueError, match=re.escape(VALUES.format("qkv_proj", "attention.value_length", 4))
    ):
        detect(source, stated=replace(stated, naming="phi3"))


@pytest.mark.parametrize(
    "config, kv_heads",
    [
        ({"group_query_attention": False, "num_query_groups": 1}, 4),
        ({"group_query_attention": True, "num_query_groups": 2}, 2),
        ({"num_query_groups": None}, 4),
        ({"num_query_groups": None, "multi_query": True}, 1),
    ],
)
def test_key_heads_of_megatron(tmp_path: Path, config: dict[str, Any], kv_heads: int) -> None:
    """Its arguments state one group of queries even if there are no groups."""
    tensors = {f"{LINEAR_QKV}.weight": fresh(32 + 16 * kv_heads, 32)}
    convert(
        write(tmp_path / "a", tensors, MEGATRON | config),
        tmp_path / "b",
        to="interleaved",
        stated=HALF,
        verify=True,
    )
    wrong = {f"{LINEAR_QKV}.weight": fresh(32 + 16 * (3 - kv_heads % 2), 32)}
    with pytest.raises(
        ValueError, match=f"must have 4 [+] {kv_heads} [+] {kv_heads} heads of 8 = "
    ):
        convert(
            write(tmp_path / "c", wrong, MEGATRON | config),
            tmp_path / "d",
            to="interleaved",
            stated=HALF,
        )
