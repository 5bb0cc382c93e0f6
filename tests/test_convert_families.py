"""Test the table of names and packings with the models of transformers.

A small random model of a family is saved, and its checkpoint converted. The converted weights run
in the same model with its rotary function switched to the other pairing, and must give the same
hidden states. The switch only reorders channels before and after the family's own function, so a
row that was forgotten, or taken from the wrong head, is detected.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tightrope import RopeSpec
from tightrope.config.families import FAMILIES
from tightrope.workbench.convert import convert
from tightrope.workbench.convert.naming import FAMILY_NAMING
from tolerances import TABLE

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "n_group": 1, "topk_group": 1,
    "moe_num_experts": 4, "moe_k": 2,
}  # fmt: skip
_WIDE = {"head_dim": 24}
_MLA = {
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "head_dim": 8,
}  # fmt: skip
_NORMS = {"use_qk_norm": True, "qk_layernorm": True}
_LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_hidden_layers": 4,
}  # fmt: skip
_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
_SECTIONS = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 4, 4],
    "mrope_interleaved": True,
}
_VL = {**_WIDE, "rope_parameters": _SECTIONS}
_HYBRID = {
    **_WIDE,
    **_LINEAR,
    "rope_parameters": {**_SECTIONS, "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5},
}
_ONE_KIND = {"num_key_value_heads": ...}
_BY_NEED: list[tuple[str, dict[str, Any]]] = [
    ("gemma gemma2 gemma3_text gpt_oss qwen3 qwen3_moe seed_oss glm glm4 ministral3 cwm", _WIDE),
    ("ernie4_5 ministral laguna hunyuan_v1_dense hunyuan_v1_moe", _WIDE),
    ("cohere stablelm phi", _NORMS),
    ("deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa minicpm3 mistral4 youtu", _MLA),
    ("lfm2 lfm2_moe", _ATTENTION),
    ("gpt_neox modernbert roformer", _ONE_KIND),
    ("qwen3_vl_text qwen3_vl_moe_text", _VL),
    ("qwen3_5_text qwen3_5_moe_text", _HYBRID),
    (
        "qwen2_vl_text qwen2_5_vl_text",
        {"rope_parameters": {**_SECTIONS, "mrope_section": [2, 3, 3], "mrope_interleaved": False}},
    ),
]
# Further keys that a family needs, and switches that turn features on; `...` removes a size.
OWN: dict[str, dict[str, Any]] = {
    **{family: need for families, need in _BY_NEED for family in families.split()},
    "glm4v_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
        }
    },
    "qwen3_next": {**_WIDE, **_LINEAR},
    "persimmon": {**_NORMS, **_ONE_KIND},
    "helium": {"head_dim": 16},
    "bamba": {"attn_layer_indices": [0], "mamba_n_heads": 4, "mamba_d_head": 32},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": ["full_attention", "full_attention"],
        "layers_block_type": ["attention", "attention"],
    },
    "dots1": {"n_shared_experts": 1, **_WIDE},
    "glm4_moe": {**_WIDE, **_NORMS},
    "minimax_m2": {**_WIDE, "rotary_dim": 8},
    "longcat_flash": {**_MLA, "num_layers": 2, "ffn_hidden_size": 8, "zero_expert_num": 1},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, **_ONE_KIND},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, **_ONE_KIND},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3, **_ONE_KIND},
    "moonshine": {
        "partial_rotary_factor": 0.5,
        "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 1,
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
}


def small(family: str) -> Any:
    """Return a configuration for a small model of a family."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    sizes = {**SIZES, **OWN.get(family, {})}
    return kind(**{key: value for key, value in sizes.items() if value is not ...})


def reordered(spec: RopeSpec, neighbours: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that reorders the rotated channels of a tensor to the other pairing.

    If `neighbours`, it reorders from half to interleaved pairing, else from interleaved to half.
    """

    def back(x: torch.Tensor) -> torch.Tensor:
        width = spec.rotary_dim
        first = spec.start if x.shape[-1] > width else 0
        rotated = x[..., first : first + width]
        if neighbours:
            own = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
        else:
            own = torch.cat((rotated[..., ::2], rotated[..., 1::2]), -1)
        return torch.cat((x[..., :first], own, x[..., first + width :]), -1)

    return back


@contextmanager
def switched(family: str, spec: RopeSpec) -> Iterator[None]:
    """Make a family's rotary function use the other pairing inside a `with` block."""
    folder, _, name = FAMILIES[family].source.partition(": ")
    owner: Any = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    own = getattr(owner, last)
    first = 1 if path else 0  # RoFormer's function takes the angles first

    def change(x: Any, to: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        head = isinstance(x, torch.Tensor) and x.dim() == 4 and x.is_floating_point()
        return to(x) if head else x

    def function(*args: Any, **kwargs: Any) -> Any:
        order = reordered(spec, spec.interleaved)
        args = tuple(
            change(x, order) if first <= index < first + 2 else x for index, x in enumerate(args)
        )
        kwargs = {key: change(x, order) if key in ("q", "k") else x for key, x in kwargs.items()}
        made = own(*args, **kwargs)
        order = reordered(spec, not spec.interleaved)
        if isinstance(made, tuple):
            return tuple(change(x, order) for x in made)
        return change(made, order)

    setattr(owner, last, staticmethod(function) if path else function)
    try:
        yield
    finally:
        setattr(owner, last, staticmethod(own) if path else own)


def check(before: torch.Tensor, after: torch.Tensor, forgotten: torch.Tensor) -> None:
    """Check that `before` equals `after` (pairing switched) but not `forgotten` (not switched)."""
    wrong = (before - forgotten).abs().max()
    assert wrong > TABLE["other pairing"].value * before.abs().max()
    assert (before - after).abs().max() <= TABLE["channels reordered"].value * wrong


# Families without a (small) model in transformers; their packings are tested elsewhere.
ELSEWHERE = {"meta", "megatron", "internlm2", "kimi_k2", "minicpm", "solar", "mllama_text_model"}
ELSEWHERE |= {"qwen2_vl", "qwen2_5_vl"}  # their text models are tested


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", sorted(FAMILY_NAMING.keys() - ELSEWHERE))
def test_a_converted_model_computes_the_same(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(small(family)).eval()
    for name, parameter in model.named_parameters():
        # Fresh norms are ones and fresh biases zeros, which would hide a wrong order.
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.config.save_pretrained(tmp_path)
    source, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    safetensors_torch.save_model(model, str(source))
    found = RopeSpec.from_config(tmp_path, strict=False)
    spec = found if isinstance(found, RopeSpec) else next(each for each in found.values() if each)
    ids = torch.randint(4, 37, (1, 11), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids}
    if family == "moonshine":
        inputs = {"input_values": torch.randn(1, 16000), "decoder_input_ids": ids}

    done = convert(source, out, to="half" if spec.interleaved else "interleaved", verify=True)

    assert done.verified is not None
    assert done.verified.unswitched > TABLE["other pairing"].value
    with torch.no_grad():
        before = model(**inputs)[0]
        safetensors_torch.load_model(model, str(out), strict=False)
        forgotten = model(**inputs)[0]
        with switched(family, spec):
            after = model(**inputs)[0]
    check(before, after, forgotten)


KINDS = {"llama": "LlamaForCausalLM", "gptj": "GPTJForCausalLM"}


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("family", KINDS)
def test_logits_of_a_sharded_model(family: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = getattr(transformers, KINDS[family])(small(family)).eval()
    source, out = tmp_path / "source", tmp_path / "out"
    if kind == "safetensors":
        model.save_pretrained(source, max_shard_size="30KB")
        assert len(list(source.glob("*.safetensors"))) > 2
    else:
        model.config.save_pretrained(source)
        torch.save(model.state_dict(), source / "pytorch_model.bin")
    spec = RopeSpec.from_config(source)
    done = convert(source, out, to="half" if spec.interleaved else "interleaved")
    assert len(done.changed) == 4
    if kind == "safetensors":
        converted = type(model).from_pretrained(out).eval()
    else:
        converted = type(model)(model.config).eval()
        converted.load_state_dict(torch.load(out / "pytorch_model.bin", weights_only=True))
    ids = torch.randint(4, 37, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, forgotten = model(ids).logits, converted(ids).logits
        with switched(family, spec):
            after = converted(ids).logits
    check(before, after, forgotten)


def test_a_family_with_a_key_for_it_needs_no_switch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(small("deepseek_v3")).eval()
    model.save_pretrained(tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "out", to="half")
    assert (done.marked, done.notes) == ("rope_interleave", ())
    converted = type(model).from_pretrained(tmp_path / "out").eval()
    assert converted.config.rope_interleave is False
    ids = torch.randint(4, 37, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = model(ids).logits, converted(ids).logits
        converted.load_state_dict(model.state_dict())
        forgotten = converted(ids).logits
    check(before, after, forgotten)
    convert(tmp_path / "out", tmp_path / "back", to="interleaved")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
