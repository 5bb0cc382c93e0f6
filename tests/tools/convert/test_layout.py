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
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 4,
    "rope_theta": 10000.0,
}


def refused(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None, text: str, stated: Stated = HALF
) -> None:
    """Check that `convert` raises exactly this sentence and writes nothing, and that `detect` raises it."""
    source = write(folder / "source", tensors, config)
    for out in ("out", "source/model.safetensors"):
        path = source if out == "out" else source / "model.safetensors"
        with pytest.raises(ValueError, match=f"^{re.escape(f'[convert] {text}.')}$"):
            convert(path, folder / Path(out).name, to=other(stated), stated=stated)
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
    shards=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_any_wrong_number_of_rows_is_refused_before_anything_is_written(
    tmp_path_factory: pytest.TempPathFactory,
    packing: str,
    kv_heads: int,
    group: int,
    pairs: int,
    suffix: str,
    shards: int,
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
        "head_dim": width,
        "rotary_dim": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_theta": 1e4,
    }
    naming = {"gated": "qwen3_next", "q": "llama", "k": "llama"}.get(packing, "gpt_neox")
    stated = Stated(config, source="half", naming=naming, packing=None if separate else packing)
    folder = tmp_path_factory.mktemp("rows")

    wrong = tensors | {name: fresh(got, *tensors[name].shape[1:])}
    checkpoint = write(folder / "wrong", wrong, None, shards=shards)
    spelled = SPELLED.get(packing, "{0} + {1} + {1}").format(heads, kv_heads)
    text = f"[convert] {name} must have {spelled} heads of {width} = {total} rows but has {got}."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        convert(checkpoint, folder / "out", to="interleaved", stated=stated)
    assert [path.name for path in folder.iterdir()] == ["wrong"]

    checkpoint = write(folder / "right", tensors, None, shards=shards)
    convert(checkpoint, folder / "out", to="interleaved", stated=stated)
    after = load(folder / "out")
    for module, letters in modules.items():
        starts = [width * n for n, letter in enumerate(letters) if letter in "qk"]
        for full in (full for full in tensors if full.startswith(f"layers.0.{module}.")):
            assert after[full].tolist() == interleaved_rows(tensors[full].tolist(), starts, width)


def load(path: Path) -> Tensors:
    """Load the tensors of all files of a folder."""
    made: Tensors = {}
    for file in path.glob("*.safetensors"):
        made |= load_file(file)
    return made


@pytest.mark.parametrize(
    "rank, rows, end",
    [
        (12, 18, "must have 12 (kv_lora_rank) + 8 rotated rows but has 18"),
        (None, 6, "must have those of the latent + 8 rotated rows but has 6"),
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
    text = "--kv-heads must be a whole number from 1 to 65536 but got 0"
    refused(tmp_path, tensors, None, text, Stated(**stated, heads=4, kv_heads=0))


# --- layouts that the configuration states ----------------------------------------------------------


def gated(key: str, value: object) -> str:
    return (
        f"{key} is {value!r}, but no tensor holds the gates alone: gates among the rows of queries are not supported, "
        "except those of attn_output_gate with --naming qwen3_next"
    )


def order_of(packing: str, key: str, value: object, how: str) -> str:
    return f"fused rows must be in the order of --packing {packing}, but {key} is {value!r}: pass --packing {how}"


EIGHTHS = "quarters if mp_num is 4 in the code of the model, as not in all of CodeGen 2"
CODEGEN_QKV, INTERLEAVED = "h.0.attn.qkv_proj", Stated(source="interleaved")
# The number of rows fits the stated heads in all of these.
STATED: dict[str, tuple[str, dict[str, Any], dict[str, Any], Stated, str]] = {
    **{
        f"gates, {key}": (QKV, PHI3, {key: value}, HALF, gated(key, value))
        for key, value in {
            "attention_output_gate": True,
            "attn_output_gate": True,
            "headwise_attn_output_gate": True,
            "gating": "per-head",
            "linear_qgkv": True,
            "use_output_gate": 1,
            "use_gated_attention": True,
        }.items()
    },
    "an older order of NeMo": (
        LINEAR_QKV,
        MEGATRON,
        {"megatron_legacy": True},
        HALF,
        order_of("grouped", "megatron_legacy", True, "blocks"),
    ),
    "ChatGLM without groups": (
        "encoder.layers.0.self_attention.query_key_value",
        {**GLM, "num_key_value_heads": 4},
        {"multi_query_attention": False},
        CHATGLM,
        order_of("blocks", "multi_query_attention", False, "grouped"),
    ),
    "CodeGen 2 by its head_dim": (
        CODEGEN_QKV,
        CODEGEN,
        {"head_dim": 8},
        INTERLEAVED,
        order_of("quarters", "head_dim", 8, EIGHTHS),
    ),
    "CodeGen in other parts": (
        CODEGEN_QKV,
        CODEGEN,
        {"mp_num": 8},
        INTERLEAVED,
        order_of("quarters", "mp_num", 8, EIGHTHS),
    ),
    **{
        f"parts of {key}": (
            QKV,
            PHI3,
            config,
            HALF,
            order_of("blocks", key, 2, "blocks if the parts were merged"),
        )
        for key, config in {
            "tensor_model_parallel_size": {"tensor_model_parallel_size": 2},
            "mp_size": {"mp_size": 2},
            "tp_size": {"mapping": {"tp_size": 2}},
        }.items()
    },
    "two numbers of key heads": (
        QKV,
        PHI3,
        {"num_kv_heads": 4},
        HALF,
        "a number of heads must have one value but got num_key_value_heads = 2 and num_kv_heads = 4",
    ),
    "a number that is none": (
        QKV,
        PHI3,
        {"num_key_value_heads": ["2", 2]},
        HALF,
        "num_key_value_heads must be a whole number from 0 to 65536 but got '2'",
    ),
    "a list that is too short": (
        QKV.replace("0", "2"),
        PHI3,
        {"num_key_value_heads": [2, 1]},
        HALF,
        "num_key_value_heads must list the heads of every layer but does not list layer 2",
    ),
    "a layer without attention": (
        QKV,
        PHI3,
        {"num_key_value_heads": [0, 2]},
        HALF,
        f"the 4 query heads in {QKV}.bias must be a multiple of its 0 key heads",
    ),
}


@pytest.mark.parametrize("case", STATED)
def test_a_layout_is_refused_by_name_though_its_rows_fit(tmp_path: Path, case: str) -> None:
    module, config, more, stated, text = STATED[case]
    rows = 96 if "quarters" in text or "ChatGLM" in case else ROWS
    tensors = {f"{module}.weight": fresh(rows, 32), f"{module}.bias": fresh(rows)}
    refused(tmp_path, tensors, config | more, text, stated)
    if "short" in case:
        return
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


ZEBRA: dict[str, Any] = {**LLAMA, "model_type": "zebra"}
NAMED = Stated(source="half", naming="llama", rotary_dim=8)


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


def test_gates_among_separate_queries(tmp_path: Path) -> None:
    """Qwen3-Next has a gate after each query head; its forerunner has them after those of a key head."""
    tensors = llama_tensors(bias=False)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = fresh(64, 32)
    stated = Stated(source="half", naming="qwen3_next")
    source = write(tmp_path / "a", tensors, {**LLAMA, "attn_output_gate": True})
    assert len(convert(source, tmp_path / "b", to="interleaved", stated=stated).changed) == 8
    for key in ("elementwise_attn_output_gate", "use_gated_attention"):
        refused(tmp_path / key, tensors, {**LLAMA, key: True}, gated(key, True), stated)


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
        ("output_gate_type", "silu"),
        ("attn_output_gate", False),
        ("attention_output_gate", None),
        ("gating", "none"),
    ],
)
def test_keys_that_announce_no_gates_of_the_attention(
    tmp_path: Path, key: str, value: object
) -> None:
    source = write(tmp_path / "source", {f"{QKV}.weight": fresh(ROWS, 32)}, {**PHI3, key: value})
    assert convert(source, tmp_path / "out", to="interleaved").written


@pytest.mark.parametrize("module", ["linear_qgkv", "in_proj_qgkv", "qkvg_proj"])
def test_gates_by_the_name_of_a_tensor(tmp_path: Path, module: str) -> None:
    name = f"decoder.layers.0.self_attention.{module}.weight"
    tensors = {name: fresh(96, 32), f"{LINEAR_QKV}.weight": fresh(ROWS, 32)}
    source = write(tmp_path / "source", tensors, MEGATRON)
    with pytest.raises(ValueError, match=f"{re.escape(name)} may hold channels of queries or keys"):
        convert(source, tmp_path / "out", to="interleaved", stated=HALF)


JUNK: list[Any] = [
    True,
    -1,
    0,
    1.5,
    "x",
    "",
    [],
    [[]],
    [None],
    ["x"],
    [-1],
    {},
    {"0": {}},
    {"0": []},
    {"0": {"head_dim": []}},
    {"x": {"head_dim": 1}},
    {"9" * 5000: {"head_dim": 1}},
    {"1": {"num_key_value_heads": [2]}},
    {"tp_size": []},
    {"num_attention_heads": {}},
    [{"attention": []}],
    [{"attention": {"n_heads_in_group": "x"}}],
    10**30,
    [10**30],
]
KEYS = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_key_value_heads_per_layer",
    "kv_lora_rank",
    "mapping",
    "tp_size",
    "v_head_dim",
    "swa_head_dim",
    "head_dim_per_layer",
    "attention_other_setting",
    "per_layer_config",
    "block_configs",
    "attn_config",
    "gating",
    "multi_query",
    "swa_num_key_value_heads",
    "num_hidden_layers",
)


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
        "block_configs": [
            {"attention": {"num_key_value_heads": 2}},
            {"attention": {"num_key_value_heads": 4}},
        ]
    },
    "blocks with groups": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}},
            {"attention": {"n_heads_in_group": 1}},
        ]
    },
    "OpenELM's lists": {
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 4],
        "num_key_value_heads": None,
    },
}


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
    text = f"{name} must have 8 heads of 8 = 64 rows but has 32"
    refused(tmp_path / "more", tensors, config, text)


def test_lists_of_gguf(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "qwen2",
        "qwen2.rope.freq_base": 10000.0,
        "qwen2.embedding_length": 32,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.key_length": 8,
        "qwen2.attention.head_count_kv": [2, 1],
    }
    stated = Stated(metadata, source="half", naming="llama")
    source = write(tmp_path / "a", llama_tensors(bias=False), None)
    text = "model.layers.1.self_attn.k_proj.weight must have 1 heads of 8 = 8 rows but has 16"
    with pytest.raises(ValueError, match=re.escape(text)):
        convert(source, tmp_path / "b", to="interleaved", stated=stated)
    metadata["qwen2.attention.head_count_kv"] = [2, 2]
    convert(source, tmp_path / "b", to="interleaved", stated=stated)


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
