"""Conversion refuses projections whose rows are not those of the stated heads, before it writes anything.

test_families.py tests that the rows which move are those that the published code rotates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import (
    DEEPSEEK,
    LLAMA,
    interleaved_rows,
    latent_tensors,
    llama_tensors,
    write,
)
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
CHATGLM = Stated(source="interleaved", naming="chatglm")
Run = Callable[..., Any]


def refused_exactly(
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
    queries = 2 * heads if packing == "gated" else heads
    modules = {"self_attn.q_proj": queries, "self_attn.k_proj": kv_heads}
    if not separate:
        modules = {"attention.query_key_value": heads + 2 * kv_heads}
    columns: dict[str, tuple[int, ...]] = {
        "weight": (3,),
        "bias": (),
        "weight_scale": (1,),
        "lora_B.weight": (2,),
    }
    tensors = {
        f"layers.0.{module}.{name}": fresh(count * width, *shape)
        for module, count in modules.items()
        for name, shape in columns.items()
    }
    wanted = {"k": "self_attn.k_proj"}.get(packing, next(iter(modules)))
    name = f"layers.0.{wanted}.{suffix}"
    total = len(tensors[name])
    # One scale is that of the whole tensor, and stays.
    least = 2 if suffix == "weight_scale" else 1
    got = data.draw(st.integers(least, 3 * total).filter(lambda rows: rows != total))
    config = {"head_dim": width, "rotary_dim": width, "rope_theta": 1e4}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
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


@pytest.mark.parametrize(
    "rank, rows, end",
    [
        (12, 18, "must have 12 (kv_lora_rank) + 8 rotated rows but has 18"),
        (None, 6, "must have those of the latent + 8 rotated rows but has 6"),
    ],
)
def test_latent_attention(tmp_path: Path, rank: int | None, rows: int, end: str) -> None:
    text = f"model.layers.0.self_attn.kv_a_proj_with_mqa.weight {end}"
    config = {**DEEPSEEK, "kv_lora_rank": rank}
    refused_exactly(tmp_path, latent_tensors(rows), config, text, Stated(source="interleaved"))


DIVIDES = "must have whole heads of 8 rows, in a number that divides the 4 query heads, but has"


@pytest.mark.parametrize(
    "rows, heads, text",
    [
        (24, 4, f"{DIVIDES} 24 rows"),
        (20, 4, f"{DIVIDES} 20 rows"),
        (4, None, "must have whole heads of 8 rows but has 4 rows"),
    ],
)
def test_keys_whose_number_nothing_states(
    tmp_path: Path, rows: int, heads: int | None, text: str
) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    stated = Stated(source="half", naming="llama", head_dim=8, heads=heads)
    refused_exactly(tmp_path, {name: fresh(rows, 32)}, None, f"{name} {text}", stated)


@pytest.mark.parametrize(
    "more, text",
    [
        ({}, f"the number of query heads in {QKV}.weight must be known: pass --heads"),
        ({"heads": 4}, f"the number of key heads in {QKV}.weight must be known: pass --kv-heads"),
        (
            {"heads": 4, "kv_heads": 3},
            f"the 4 query heads in {QKV}.weight must be a multiple of its 3 key heads",
        ),
        (
            {"heads": 4, "kv_heads": 2, "packing": "quarters"},
            f"to be packed in quarters, {QKV}.weight must hold as many key as query heads, a multiple of 4, but "
            "holds 4 query and 2 key heads",
        ),
        (
            {"heads": 4, "kv_heads": 0},
            "--kv-heads must be a whole number from 1 to 65536 but got 0",
        ),
    ],
)
def test_numbers_of_heads_that_must_be_known(
    tmp_path: Path, more: dict[str, Any], text: str
) -> None:
    stated = Stated(source="half", naming="phi3", head_dim=8, **more)
    refused_exactly(tmp_path, {f"{QKV}.weight": fresh(96, 32)}, None, text, stated)


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
GATES = {
    "attention_output_gate": True,
    "attn_output_gate": True,
    "headwise_attn_output_gate": True,
    "gating": "per-head",
    "linear_qgkv": True,
    "use_output_gate": 1,
    "use_gated_attention": True,
}
PARTS: dict[str, dict[str, Any]] = {
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 2},
    "mp_size": {"mp_size": 2},
    "tp_size": {"mapping": {"tp_size": 2}},
}
MERGED = "blocks if the parts were merged"
FUSED_LLAMA = {
    **{f"gates, {key}": ({key: value}, gated(key, value)) for key, value in GATES.items()},
    **{f"parts, {key}": (more, order_of("blocks", key, 2, MERGED)) for key, more in PARTS.items()},
    "two numbers of key heads": (
        {"num_kv_heads": 4},
        "a number of heads must have one value but got num_key_value_heads = 2 and num_kv_heads = 4",
    ),
    "a number that is none": (
        {"num_key_value_heads": ["2", 2]},
        "num_key_value_heads must be a whole number from 0 to 65536 but got '2'",
    ),
    "a layer without attention": (
        {"num_key_value_heads": [0, 2]},
        f"the 4 query heads in {QKV}.bias must be a multiple of its 0 key heads",
    ),
}
# What the layout is -> module, its rows, configuration, keys of it that are refused, what the user states, error.
# The number of rows fits the stated heads in all of these.
STATED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], Stated, str]] = {
    **{name: (QKV, ROWS, PHI3, more, HALF, text) for name, (more, text) in FUSED_LLAMA.items()},
    "an older order of NeMo": (
        *(LINEAR_QKV, ROWS, MEGATRON, {"megatron_legacy": True}, HALF),
        order_of("grouped", "megatron_legacy", True, "blocks"),
    ),
    "ChatGLM without groups": (
        *("encoder.layers.0.self_attention.query_key_value", 96),
        PHI3 | {"model_type": "llama", "num_key_value_heads": 4},
        *({"multi_query_attention": False}, CHATGLM),
        order_of("blocks", "multi_query_attention", False, "grouped"),
    ),
    **{
        f"CodeGen, {key}": (
            *(CODEGEN_QKV, 96, CODEGEN, {key: 8}, INTERLEAVED),
            order_of("quarters", key, 8, EIGHTHS),
        )
        for key in ("head_dim", "mp_num")
    },
}


@pytest.mark.parametrize("case", STATED)
def test_a_layout_is_refused_by_name_though_its_rows_fit(
    tmp_path: Path, converted: Run, case: str
) -> None:
    module, rows, config, more, stated, text = STATED[case]
    tensors = {f"{module}.weight": fresh(rows, 32), f"{module}.bias": fresh(rows)}
    refused_exactly(tmp_path, tensors, config | more, text, stated)
    stated = replace(stated, packing="grouped" if "ChatGLM" in case else None)
    converted(tensors, config, to=other(stated), stated=stated, verify=True)


def test_a_list_that_is_too_short(tmp_path: Path) -> None:
    tensors = {f"{QKV.replace('0', '2')}.weight": fresh(ROWS, 32)}
    text = "num_key_value_heads must list the heads of every layer but does not list layer 2"
    refused_exactly(tmp_path, tensors, {**PHI3, "num_key_value_heads": [2, 1]}, text)


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


def test_the_layers_that_a_configuration_lists_need_no_option(converted: Run, refused: Run) -> None:
    listed = {"no_rope_layers": [1, 0]}
    config = {**LLAMA, "model_type": "smollm3", **listed}
    done, _ = converted(llama_tensors(), config, stated=NAMED, verify=True)
    assert {name.split(".")[2] for name in done.changed} == {"0"}
    assert done.layers_without_rope == (1,)
    assert any("layers without RoPE" in note for note in done.notes)
    way = "correct the configuration, or pass --no-config and all flags"
    for stated, what in (
        (Stated(rotary_dim=4), "rotary-dim is 4 {}8"),
        (Stated(start=4), "start is 4 {}0"),
    ):
        text = f"[convert] --{what.format('but the configuration states ')}: {way}."
        refused(f"^{re.escape(text)}$", llama_tensors(), config, stated=stated)
    assert converted(llama_tensors(), config, stated=Stated(rotary_dim=8))[0].written


def test_a_null_in_a_rope_section_asks_for_no_layers(converted: Run) -> None:
    config = {**ZEBRA, "rope_scaling": {"rope_type": "default", "factor": None}}
    assert converted(llama_tensors(), config, stated=NAMED)[0].written


def test_gates_among_separate_queries(tmp_path: Path, converted: Run) -> None:
    """Qwen3-Next has a gate after each query head; its forerunner has them after those of a key head."""
    queries = {f"model.layers.{layer}.self_attn.q_proj.weight": fresh(64, 32) for layer in range(2)}
    tensors = llama_tensors(bias=False) | queries
    stated = Stated(source="half", naming="qwen3_next")
    done, _ = converted(tensors, {**LLAMA, "attn_output_gate": True}, stated=stated)
    assert len(done.changed) == 8
    for key in ("elementwise_attn_output_gate", "use_gated_attention"):
        text = gated(key, True)
        refused_exactly(tmp_path / key, tensors, {**LLAMA, key: True}, text, stated)


@pytest.mark.parametrize("name", ["g_proj", "gate_proj", "output_gate", "o_gate"])
def test_gates_in_tensors_of_their_own(converted: Run, name: str) -> None:
    gates = {QKV.replace("qkv_proj", f"{name}.weight"): fresh(4, 32)}
    done, _ = converted({f"{QKV}.weight": fresh(ROWS, 32)} | gates, {**PHI3, "gating": True})
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
    converted: Run, key: str, value: object
) -> None:
    done, _ = converted({f"{QKV}.weight": fresh(ROWS, 32)}, {**PHI3, key: value})
    assert done.written


@pytest.mark.parametrize("module", ["linear_qgkv", "in_proj_qgkv", "qkvg_proj"])
def test_gates_by_the_name_of_a_tensor(refused: Run, module: str) -> None:
    name = f"decoder.layers.0.self_attention.{module}.weight"
    tensors = {name: fresh(96, 32), f"{LINEAR_QKV}.weight": fresh(ROWS, 32)}
    text = f"{re.escape(name)} may hold channels of queries or keys"
    refused(text, tensors, MEGATRON, stated=HALF)


JUNK: list[Any] = [
    *(True, -1, 0, 1.5, "x", "", [], [[]], [None], ["x"], [-1], {}, 10**30, [10**30]),
    *({"0": {}}, {"0": []}, {"0": {"head_dim": []}}, {"x": {"head_dim": 1}}),
    {"9" * 5000: {"head_dim": 1}},
    {"1": {"num_key_value_heads": [2]}},
    *({"tp_size": []}, {"num_attention_heads": {}}),
    *([{"attention": []}], [{"attention": {"n_heads_in_group": "x"}}]),
]
KEYS = """
    num_attention_heads num_key_value_heads num_key_value_heads_per_layer kv_lora_rank mapping tp_size v_head_dim
    swa_head_dim head_dim_per_layer attention_other_setting per_layer_config block_configs attn_config gating
    multi_query swa_num_key_value_heads num_hidden_layers
""".split()


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


def blocks(key: str, *numbers: int) -> dict[str, Any]:
    return {"block_configs": [{"attention": {key: number}} for number in numbers]}


BY_LAYER: dict[str, dict[str, Any]] = {
    "a list": {"num_key_value_heads": [2, 4]},
    "a list of its own": {"num_key_value_heads_per_layer": [2, 4]},
    "keys of single layers": {"per_layer_config": {"1": {"num_key_value_heads": 4}}},
    "blocks with numbers": blocks("num_key_value_heads", 2, 4),
    "blocks with groups": blocks("n_heads_in_group", 2, 1),
    "OpenELM's lists": {"num_query_heads": [4, 4], "num_kv_heads": [2, 4]}
    | {"num_key_value_heads": None},
}


def test_a_packing_does_not_replace_that_of_the_family(tmp_path: Path, converted: Run) -> None:
    tensors, grouped = {f"{QKV}.weight": fresh(ROWS, 32)}, Stated(source="half", packing="grouped")
    text = "--packing is grouped but the code of model_type 'phi3' has blocks: for other code, pass its --naming too"
    refused_exactly(tmp_path, tensors, PHI3, text, grouped)
    for n, parts in enumerate(({"tp_size": 2}, {"mp_num": 4})):
        wrong = order_of("blocks", "tp_size", 2, MERGED) if n == 0 else text
        refused_exactly(tmp_path / str(n), tensors, {**PHI3, **parts}, wrong, grouped)
    for stated in (replace(grouped, packing="blocks"), replace(grouped, naming="phi3")):
        assert converted(tensors, PHI3, stated=stated)[0].written


@pytest.mark.parametrize("case", BY_LAYER)
def test_key_heads_of_every_layer(converted: Run, refused: Run, case: str) -> None:
    config = {**LLAMA, "head_dim": 8, **BY_LAYER[case]}
    names = [f"model.layers.{n}.self_attn.qkv_proj.weight" for n in range(2)]
    fused = {names[0]: fresh(64, 32), names[1]: fresh(96, 32)}
    keys = "model.layers.1.self_attn.k_proj"
    tensors = llama_tensors() | {f"{keys}.weight": fresh(32, 32), f"{keys}.bias": fresh(32)}
    stated = Stated(naming="phi3")
    after = converted(tensors, config, verify=True)[1]
    after |= converted(fused, config, stated=stated, verify=True)[1]
    for name, before in (tensors | fused).items():
        module = name.split(".")[-2]
        count = {"q_proj": 4, "k_proj": 2, "q_norm": 1, "k_norm": 1, "qkv_proj": 6}.get(module, 0)
        if ".1." in name and module in ("k_proj", "qkv_proj"):
            count += 2
        assert after[name].tolist() == interleaved_rows(before.tolist(), range(0, 8 * count, 8), 8)
    text = re.escape("must have 4 + 2 + 2 heads of 8 = 64 rows but has 96")
    refused(text, dict(zip(reversed(names), fused.values())), config, stated=stated)


def test_query_heads_of_every_layer(tmp_path: Path, converted: Run) -> None:
    config = {**LLAMA, "model_type": "laguna", "head_dim": 8}
    section = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config |= {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), section)}
    config |= {"num_attention_heads_per_layer": [4, 8]}
    del config["rope_theta"]
    tensors = llama_tensors(bias=False)
    name = "model.layers.1.self_attn.q_proj.weight"
    converted(tensors | {name: fresh(64, 32)}, config, verify=True)
    text = f"{name} must have 8 heads of 8 = 64 rows but has 32"
    refused_exactly(tmp_path / "more", tensors, config, text)


def test_lists_of_gguf(converted: Run, refused: Run) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "qwen2",
        "qwen2.rope.freq_base": 10000.0,
        "qwen2.embedding_length": 32,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.key_length": 8,
        "qwen2.attention.head_count_kv": [2, 1],
    }
    stated = Stated(metadata, source="half", naming="llama")
    text = "model.layers.1.self_attn.k_proj.weight must have 1 heads of 8 = 8 rows but has 16"
    refused(re.escape(text), llama_tensors(bias=False), None, stated=stated)
    metadata["qwen2.attention.head_count_kv"] = [2, 2]
    converted(llama_tensors(bias=False), None, stated=stated)


@pytest.mark.parametrize(
    "more, kv_heads",
    [
        ({"group_query_attention": False, "num_query_groups": 1}, 4),
        ({"group_query_attention": True, "num_query_groups": 2}, 2),
        ({"num_query_groups": None}, 4),
        ({"num_query_groups": None, "multi_query": True}, 1),
    ],
)
def test_key_heads_of_megatron(
    converted: Run, refused: Run, more: dict[str, Any], kv_heads: int
) -> None:
    """Its arguments state one group of queries even if there are no groups."""
    tensors, wrong = (
        {f"{LINEAR_QKV}.weight": fresh(32 + 16 * count, 32)}
        for count in (kv_heads, 3 - kv_heads % 2)
    )
    converted(tensors, MEGATRON | more, stated=HALF, verify=True)
    text = f"must have 4 [+] {kv_heads} [+] {kv_heads} heads of 8 = "
    refused(text, wrong, MEGATRON | more, stated=HALF)
