"""Conversion of the indexers of sparse attention (DeepSeek V3.2, GLM-5).

Norms of queries and keys that the naming (the table of tensor names) does not list are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import interleaved_rows, llama_tensors
from tightrope_tools.convert import Stated, convert, detect

PLACE = "model.layers.0.self_attn."
Run = Callable[..., Any]
GLM5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "index_n_heads": 3,
    "index_head_dim": 14,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def glm5_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q_a_proj.weight": (12, 24),
        "q_a_layernorm.weight": (12,),
        "q_b_proj.weight": (28, 12),
        "kv_a_proj_with_mqa.weight": (18, 24),
        "kv_a_layernorm.weight": (10,),
        "kv_b_proj.weight": (24, 10),
        "o_proj.weight": (24, 12),
        "indexer.wq_b.weight": (42, 12),
        "indexer.wk.weight": (14, 24),
        "indexer.k_norm.weight": (14,),
        "indexer.k_norm.bias": (14,),
        "indexer.weights_proj.weight": (3, 24),
    }
    return {PLACE + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


MOVED = {"q_b_proj.weight": [6, 20], "kv_a_proj_with_mqa.weight": [10]}
OF_THE_INDEXER = {
    "indexer.wq_b.weight": [0, 14, 28],
    "indexer.wk.weight": [0],
    "indexer.k_norm.weight": [0],
    "indexer.k_norm.bias": [0],
}


@pytest.mark.parametrize(
    "family, starts", [("glm_moe_dsa", MOVED | OF_THE_INDEXER), ("deepseek_v32", MOVED)]
)
def test_an_indexer_moves_with_its_attention_where_it_is_paired_like_it(
    tmp_path: Path, converted: Run, family: str, starts: dict[str, list[int]]
) -> None:
    """GLM-5's indexer is converted with its attention; DeepSeek V3.2's stays as it is.

    GLM-5 pairs both in the same way; the indexer of DeepSeek V3.2 always has half pairing.
    """
    tensors, config = glm5_tensors(), GLM5 | {"model_type": family}
    done, got = converted(tensors, config, to="half", verify=True)
    assert done.verified.layers == 1
    for name, before in tensors.items():
        after = got[name]
        if name.removeprefix(PLACE) in starts:
            assert not torch.equal(after, before), name
            after = torch.stack(interleaved_rows(list(after), starts[name.removeprefix(PLACE)], 8))
        assert torch.equal(after, before), name
    (folder,) = tmp_path.glob("*/out")
    convert(folder, tmp_path / "back", to="interleaved")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_a_proof_looks_at_the_indexer_too(refused: Run) -> None:
    tensors = glm5_tensors()
    tensors[PLACE + "indexer.wk.weight"][0, 0] = torch.inf
    text = r"scores must stay the same but those of .*indexer differ"
    refused(text, tensors, GLM5, to="half", verify=True)


MUST_BE_KNOWN = ".* must be known: pass a configuration with it as --config"


@pytest.mark.parametrize(
    "config, shapes, match",
    [
        ({"index_n_heads": 2}, {}, "wq_b.weight must have 2 heads of 14 = 28 rows but has 42[.]$"),
        ({}, {"wk": (28, 24)}, "must have 1 heads of 14 = 14 rows but has 28[.]$"),
        ({"index_head_dim": 6}, {}, "must have 8 rotated rows but have 6 .index_head_dim."),
        ({"index_n_heads": None}, {}, f"index_n_heads for {MUST_BE_KNOWN}"),
        ({"index_head_dim": None}, {}, f"index_head_dim for {MUST_BE_KNOWN}"),
    ],
    ids=["number of heads", "two keys", "narrow heads", "number not stated", "size not stated"],
)
def test_indexers_that_do_not_fit(
    refused: Run, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], match: str
) -> None:
    other = {f"{PLACE}indexer.{name}.weight": torch.zeros(size) for name, size in shapes.items()}
    refused(match, glm5_tensors() | other, GLM5 | config, to="half")


def unlisted(name: str) -> str:
    return (
        f"[convert] {name} may hold channels of queries or keys, by its name and size, and the naming does not list it: "
        "pass another --naming, merge it into the projection, remove it if the model can do without, or rename it if "
        "it holds none."
    )


IN_ATTENTION = """
    k_cache_scale k_scale attn.key_scale q_scale.weight q_conv1d.weight k_conv.bias q_bias query_bias gamma_q
    q_head_norm.weight qkv_bias k_gain qconv.weight key.weight inner.Q_shift
""".split()
NORMS = "q_layernorm query_layernorm norm_k ln_q k_ln q_rms norm.query_norm norm.key_norm".split()


@pytest.mark.parametrize(
    "own",
    [f"self_attn.{one}" for one in IN_ATTENTION]
    + [f"self_attn.{one}.weight" for one in NORMS]
    + ["k_conv.weight", "q_head_norm.weight", "q_layernorm.weight"],
)
def test_other_channels_of_queries_or_keys_are_refused_and_single_numbers_stay(
    converted: Run, refused: Run, own: str
) -> None:
    """Left in place, they would scale or shift the wrong channels."""
    tensors = llama_tensors(bias=False)
    there = f"model.layers.1.{own}"
    shape = (16, 1, 4) if "conv" in own and "weight" in own else (16,)
    text = f"^{re.escape(unlisted(there))}$"
    source = refused(text, tensors | {there: torch.rand(shape)}, stated=Stated(naming="llama"))
    with pytest.raises(ValueError, match=re.escape("may hold channels of queries or keys")):
        detect(source)
    assert there in converted(tensors | {there: torch.rand(1)})[0].left


@pytest.mark.parametrize(
    "own",
    [
        "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "self_attn.k_b_proj.weight",
        "self_attn.lambda_q1",
        "self_attn.rotary_emb.inv_freq",
        "encoder_attn.q_norm.weight",
        "mlp.key.weight",
        "linear_attn.q_conv1d.weight",
        "self_attn.monkey.weight",
        "kronecker.weight",
    ],
)
def test_channels_that_do_not_rotate_stay(converted: Run, own: str) -> None:
    there = f"model.layers.1.{own}"
    assert there in converted(llama_tensors(bias=False) | {there: torch.rand(16)})[0].left
