"""Test the table of names and packings with the models of transformers.

A small random model of a family is saved, and its checkpoint converted. The converted weights run
in the same model with its rotary function switched to the other pairing, and must give the same
hidden states. The switch only reorders channels before and after the family's own function, so a
row that was forgotten, or taken from the wrong head, is detected.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tolerances import TABLE
from tightrope import RopeSpec
from tightrope.config.families import FAMILIES
from tightrope_tools.convert import Stated, convert
from tightrope_tools.convert.naming import FAMILY_NAMING, KEY_HEADS_OPTIONAL

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 64,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    "num_attention_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
_WIDE = {"head_dim": 24}
_MLA = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "head_dim": 8,
}
_NORMS = {"use_qk_norm": True, "qk_layernorm": True}
_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_PLAIN_ROPE, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
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
    ("deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa minicpm3 youtu", _MLA),
    ("mistral4", {**_MLA, "head_dim": 24}),
    ("lfm2 lfm2_moe", _ATTENTION),
    ("gpt_neox modernbert roformer", _ONE_KIND),
    ("gptj codegen", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, **_ONE_KIND}),
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
        "rope_parameters": _PLAIN_ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
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


def small(family: str, **own: Any) -> Any:
    """Return a configuration for a small model of a family, with these keys besides."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    sizes = {**SIZES, **OWN.get(family, {}), **own}
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


# Families without a (small) model in transformers; the packings among them are tested below.
ELSEWHERE = {"meta", "megatron", "internlm2", "kimi_k2", "minicpm", "solar", "mllama_text_model"}
ELSEWHERE |= {"qwen2_vl", "qwen2_5_vl"}  # their text models are tested


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", sorted(FAMILY_NAMING.keys() - ELSEWHERE))
def test_a_converted_model_computes_the_same(family: str, tmp_path: Path) -> None:
    check_conversion(family, tmp_path)


@pytest.mark.parametrize("own", [{"multi_query": True}, {"multi_query": False}], ids=str)
def test_the_older_falcons(own: dict[str, Any], tmp_path: Path) -> None:
    """One key head for all queries, or one for each, and no number of them in the configuration."""
    check_conversion("falcon", tmp_path, new_decoder_architecture=False, num_kv_heads=..., **own)


def check_conversion(family: str, tmp_path: Path, **own: Any) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(small(family, **own)).eval()
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


def test_families_whose_key_heads_are_optional() -> None:
    assert KEY_HEADS_OPTIONAL <= FAMILY_NAMING.keys()
    for family in sorted(KEY_HEADS_OPTIONAL - ELSEWHERE):
        config = small(family, num_key_value_heads=..., num_attention_heads=8)
        assert getattr(config, "num_key_value_heads", 8) == 8, family


# --- fused projections of code outside transformers -------------------------------------------------

HEADS, GROUPS, WIDTH, COLUMNS = 6, 3, 8, 20


def grouped(qkv: torch.Tensor, groups: int) -> list[torch.Tensor]:
    """InternLM2 and Megatron: for each group, its queries, then one key, then one value."""
    every = qkv.view(len(qkv), groups, HEADS // groups + 2, WIDTH)
    return [every[:, :, :-2].flatten(1, 2), every[:, :, -2], every[:, :, -1]]


def heads_of_three(qkv: torch.Tensor, groups: int) -> list[torch.Tensor]:
    """Megatron before groups, and ChatGLM without them: a query, a key and a value of each head."""
    assert groups == HEADS
    return list(qkv.view(len(qkv), HEADS, 3 * WIDTH).chunk(3, -1))


def blocks(qkv: torch.Tensor, groups: int) -> list[torch.Tensor]:
    """ChatGLM: all queries, all keys, all values; Megatron did so before version 1."""
    parts = qkv.split([HEADS * WIDTH, groups * WIDTH, groups * WIDTH], -1)
    return [part.view(len(qkv), -1, WIDTH) for part in parts]


MEGATRON: dict[str, Any] = {
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "hidden_size": HEADS * WIDTH,
    "num_attention_heads": HEADS,
    "rotary_interleaved": False,
}
PLAIN = {"head_dim": WIDTH, "num_attention_heads": HEADS, "rope_theta": 1e4}
FAMILY = {**PLAIN, "model_type": "internlm2"}
OF_GROUPS = {**MEGATRON, "num_query_groups": GROUPS}
WQKV = "layers.0.attention.wqkv"
LINEAR, QKV = "layers.0.self_attention.linear_qkv", "layers.0.self_attention.query_key_value"
CHATGLM: dict[str, Any] = {"naming": "chatglm", "source": "interleaved", "rotary_dim": WIDTH // 2}
IN_GROUPS = {**PLAIN, "multi_query_attention": True, "multi_query_group_num": GROUPS}
REFINED = {**PLAIN, "model_type": "RefinedWebModel", "rotary_dim": 8, "multi_query": True}
# Case -> module, its split and groups, configuration, and what the user states.
REFERENCES: dict[str, tuple[str, Any, int, dict[str, Any], dict[str, Any]]] = {
    "internlm2": (WQKV, grouped, GROUPS, FAMILY | {"num_key_value_heads": GROUPS}, {}),
    "internlm2 without groups": (WQKV, grouped, HEADS, FAMILY, {}),
    "megatron": (LINEAR, grouped, GROUPS, OF_GROUPS, {}),
    "megatron, in parallel": (
        *(LINEAR, grouped, GROUPS),
        *(OF_GROUPS | {"tensor_model_parallel_size": 3}, {}),
    ),
    "megatron without groups": (QKV, heads_of_three, HEADS, MEGATRON, {}),
    "nemo, legacy": (
        *(QKV, blocks, HEADS),
        *(MEGATRON | {"megatron_legacy": True}, {"packing": "blocks"}),
    ),
    "chatglm": (f"encoder.{QKV}", blocks, GROUPS, IN_GROUPS, CHATGLM),
    "chatglm without groups": (
        *(f"encoder.{QKV}", heads_of_three, HEADS),
        IN_GROUPS | {"multi_query_attention": False, "multi_query_group_num": 1},
        CHATGLM | {"packing": "grouped"},
    ),
    "falcon before transformers": (
        *("h.0.self_attention.query_key_value", grouped, 1),
        *(REFINED, {"naming": "falcon", "source": "half"}),
    ),
}


def rotated(x: torch.Tensor, width: int, neighbours: bool) -> torch.Tensor:
    """Rotate the first ``width`` channels of ``(tokens, heads, channels)`` as complex numbers."""
    pairs = x[..., :width].double().unflatten(-1, (-1, 2) if neighbours else (2, -1))
    re_, im = pairs.unbind(-1 if neighbours else -2)
    angles = torch.arange(len(x)).outer(10000.0 ** (-torch.arange(0, width, 2).double() / width))
    turned = torch.complex(re_, im) * torch.polar(torch.ones(()).double(), angles)[:, None]
    made = torch.stack((turned.real, turned.imag), -1 if neighbours else -2).flatten(-2)
    return torch.cat((made, x[..., width:]), -1)


def attended(
    qkv: torch.Tensor, split: Any, groups: int, width: int, neighbours: bool
) -> torch.Tensor:
    q, k, v = split(qkv, groups)
    q, k = (rotated(x, width, neighbours) for x in (q, k))
    k, v = (x.repeat_interleave(HEADS // groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / WIDTH**0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("case", REFERENCES)
def test_a_converted_fused_projection_computes_the_same(case: str, tmp_path: Path) -> None:
    module, split, groups, config, given = REFERENCES[case]
    stated = Stated(**given)
    generator = torch.Generator().manual_seed(5)
    rows = (HEADS + 2 * groups) * WIDTH
    before = {
        f"{module}.weight": torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64),
        f"{module}.bias": torch.randn(rows, generator=generator, dtype=torch.float64),
    }
    safetensors_torch.save_file(before, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    source = stated.source == "interleaved"
    to = "half" if source else "interleaved"
    out = tmp_path / "out.safetensors"
    done = convert(tmp_path / "model.safetensors", out, to=to, stated=stated, verify=True)
    assert len(done.changed) == 2
    after = safetensors_torch.load_file(out)
    x = torch.randn(11, COLUMNS, generator=generator, dtype=torch.float64)

    def output(tensors: dict[str, torch.Tensor], neighbours: bool) -> torch.Tensor:
        qkv = x @ tensors[f"{module}.weight"].T + tensors[f"{module}.bias"]
        return attended(qkv, split, groups, stated.rotary_dim or WIDTH, neighbours)

    check(output(before, source), output(after, not source), output(after, source))
