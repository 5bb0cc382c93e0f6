"""Llama of transformers, patched, with sharded heads and sharded tokens."""

from __future__ import annotations

import copy

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
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from tests.support.helpers import Watcher
from tightrope import patch, unpatch

from .harness import Group, scenario

TOKENS, VOCABULARY = 24, 64
START = 1_000_000  # the first position: here the model's own angles are off by up to 0.06

logging.disable_progress_bar()


def local(x: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def small_llama(size: int) -> LlamaForCausalLM:
    """Make a random model with two query heads and one key head for each process; its scores depend on angles."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2 * size,
        num_key_value_heads=size,
        head_dim=16,
        initializer_range=0.12,
        vocab_size=VOCABULARY,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(model: nn.Module, patched: bool = True) -> torch.Tensor:
    """Run the model forward and backward; return the logits.

    A patched model must not fall back to its own rotation: `patched` states if the operator runs.
    """
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(START, START + TOKENS)[None]
    with Watcher() as operators:
        logits = local(model(ids, position_ids=positions, use_cache=False).logits)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    assert any(name.startswith("tightrope") for name in operators.seen) == patched
    return logits.detach()


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
    want = train(whole, patched=exact)
    if patch_first:
        patch(sharded, angles=angles)
    parallelize_module(sharded, group.mesh, plan)
    if not patch_first:
        patch(sharded, angles=angles)
    got = train(sharded)
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
    want, got = train(whole.bfloat16()), train(model)
    assert torch.equal(got, want)
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
        attn_implementation="sdpa",
        distributed_config=DistributedConfig(tp_size=group.size),
    )
    want = train(whole, patched=False)
    patch(model)
    got = train(model)
    unpatch(model)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
