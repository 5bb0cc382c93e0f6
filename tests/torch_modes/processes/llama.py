"""Llama of transformers, patched, with sharded heads and sharded tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils import logging

from tests.support.helpers import Watcher
from tightrope import functional, patch, unpatch

from .harness import Group, scenario

HEAD_DIM, TOKENS, VOCABULARY = 16, 24, 64
START = 1_000_000  # the first position: here the model's own angles are off by up to 0.06


class Layer:
    """The tensors that the rotation of one attention layer reads and writes, with gradients.

    Attributes:
        before, after: queries and keys, (batch, heads, tokens, channels), before and after it.
        tables: cosines and sines.
    """

    def __init__(self, attention: nn.Module) -> None:
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []
        self.tables: tuple[torch.Tensor, ...] = ()
        attention.register_forward_pre_hook(self._enter, with_kwargs=True)
        for projection in (attention.q_proj, attention.k_proj):
            projection.register_forward_hook(self._projected)
        attention.seen = self

    def _enter(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self.tables = tuple(local(table) for table in kwargs["position_embeddings"])

    def _projected(self, _module: nn.Module, _args: Any, y: torch.Tensor) -> torch.Tensor:
        y.retain_grad()
        self.before.append(y)
        return y

    def heads(self, which: str) -> list[torch.Tensor]:
        """Return queries and keys, or their gradients, before the rotation, with heads apart."""
        found = [y if which == "values" else y.grad for y in self.before]
        return [local(y).detach().unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for y in found]


def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any):
    """Attend as usual, and record the rotated queries and keys."""
    query.retain_grad()
    key.retain_grad()
    module.seen.after += [query, key]
    return sdpa_attention_forward(module, query, key, *args, **options)


logging.disable_progress_bar()
AttentionInterface.register("recorded", attend)
AttentionMaskInterface.register("recorded", sdpa_mask)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def check_tables(layer: Layer) -> None:
    """Compare cosines and sines with float64."""
    rates = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(START, START + TOKENS, dtype=torch.float64)[:, None] * rates.repeat(2)
    for table, expected in zip(layer.tables, (angles.cos(), angles.sin())):
        assert (table - expected).abs().max() < 1.2e-7


def small_llama(size: int, attention: str = "recorded") -> LlamaForCausalLM:
    """Make a random model with two query heads and one key head for each process."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2 * size,
        num_key_value_heads=size,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(model: nn.Module, patched: bool = True) -> tuple[torch.Tensor, list[Layer]]:
    """Run the model forward and backward; return the logits and the recorded layers.

    A patched model must not fall back to its own rotation: `patched` states if the operator runs.
    """
    layers = [Layer(layer.self_attn) for layer in model.model.layers]
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(START, START + TOKENS)[None]
    with Watcher() as operators:
        logits = local(model(ids, position_ids=positions, use_cache=False).logits)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    assert any(name.startswith("tightrope") for name in operators.seen) == patched
    return logits.detach(), layers


def compare(
    group: Group, plan: dict[str, ParallelStyle], patch_first: bool, exact: bool = False
) -> None:
    """Compare a patched and sharded model with one process: the original, or with exact angles."""
    whole = small_llama(group.size)
    sharded = copy.deepcopy(whole)
    angles = "exact" if exact else "model"
    # A patch serves every model of a file, so the original runs before it.
    if exact:
        patch(whole, angles=angles)
    want, _ = train(whole, patched=exact)
    if patch_first:
        patch(sharded, angles=angles)
    parallelize_module(sharded, group.mesh, plan)
    if not patch_first:
        patch(sharded, angles=angles)
    got, layers = train(sharded)

    for one in layers:
        check_rotation(group, one, exact)
        if exact:
            check_tables(one)
    # Products with sharded weights are summed over processes, so in another order.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, full in zip(sharded.parameters(), whole.parameters()):
        torch.testing.assert_close(full_grad(mine), full.grad, rtol=1e-4, atol=1e-6)
    unpatch(whole)
    unpatch(sharded)


def full_grad(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter of any placement."""
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def check_rotation(group: Group, layer: Layer, exact: bool) -> None:
    """Check results and gradients of a rotation: the heads of all processes, rotated by one."""
    q, k = (group.gather(x, 1).requires_grad_() for x in layer.heads("values"))
    grads = [group.gather(y.grad, 1) for y in layer.after]
    # Exact angles round a rotation once; the model's own code rounds each product.
    rotate = functional.apply_rotary_pos_emb if exact else apply_rotary_pos_emb
    rotated = rotate(q, k, *layer.tables)
    back = torch.autograd.grad(rotated, (q, k), grads)
    for mine, full in zip(layer.after, rotated):
        assert torch.equal(mine, full.chunk(group.size, 1)[group.rank])
    for mine, full in zip(layer.heads("grads"), back):
        assert torch.equal(mine, full.chunk(group.size, 1)[group.rank])


def tensor_parallel() -> dict[str, ParallelStyle]:
    """Shard heads and hidden channels of each layer."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, ParallelStyle] = {}
    for layer in ("model.layers.0", "model.layers.1"):
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {
            f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
        }
    return plan


def sequence_parallel() -> dict[str, ParallelStyle]:
    """Shard heads in attention, and tokens outside of it."""
    tokens = {"output_layouts": Shard(1), "use_local_output": False}
    plan = tensor_parallel()
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), **tokens)
    plan["model.norm"] = SequenceParallel()
    plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for layer in ("model.layers.0", "model.layers.1"):
        plan[f"{layer}.input_layernorm"] = SequenceParallel()
        plan[f"{layer}.post_attention_layernorm"] = SequenceParallel()
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        )
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel(**tokens)
    return plan


@scenario
def tensor_parallel_after_patch(group: Group) -> None:
    """Patch, then shard."""
    compare(group, tensor_parallel(), patch_first=True)


@scenario
def tensor_parallel_before_patch(group: Group) -> None:
    """Shard, then patch, with exact angles."""
    compare(group, tensor_parallel(), patch_first=False, exact=True)


@scenario
def sequence_parallel_with_exact_angles(group: Group) -> None:
    """Tokens are sharded outside of attention; the module that makes the tables gets a DTensor."""
    compare(group, sequence_parallel(), patch_first=True, exact=True)


@scenario
def sharded_llama_with_exact_angles(group: Group) -> None:
    """FSDP in bfloat16: layers that cast their inputs would round the tables, so they do not."""
    whole = small_llama(group.size)
    patch(whole, angles="exact")
    model = copy.deepcopy(whole)  # a copy stays patched
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=group.mesh, mp_policy=policy)
    want, whole_layers = train(whole.bfloat16())
    got, layers = train(model)
    assert torch.equal(got, want)
    for mine, full in zip(layers, whole_layers):
        check_tables(mine)
        assert all(map(torch.equal, mine.after, full.after))
    for mine, full in zip(model.parameters(), whole.parameters()):
        # All processes have the same rows, so their mean is exact.
        assert torch.equal(full_grad(mine), full.grad.float())
    unpatch(whole)
    unpatch(model)


@scenario
def tensor_parallel_of_transformers(group: Group) -> None:
    """transformers shards the model as it loads it."""
    whole = small_llama(group.size)
    if group.rank == 0:
        whole.save_pretrained(group.folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(
        group.folder,
        attn_implementation="recorded",
        distributed_config=DistributedConfig(tp_size=group.size),
    )
    want, _ = train(whole, patched=False)
    patch(model)
    got, layers = train(model)
    unpatch(model)
    for layer in layers:
        check_rotation(group, layer, exact=False)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
