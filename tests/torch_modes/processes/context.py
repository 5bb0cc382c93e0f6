"""Context parallelism: each process rotates its own tokens, and torch's ring attends.

`context_parallel` of torch shards the tensors, so the order of tokens is torch's, not ours. On the
CPU it does not replace `scaled_dot_product_attention`, so `Ring` calls the same ring directly.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    _cp_options,
    _PerDocumentHeadTailLoadBalancer,
    _templated_ring_attention,
)
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention_backward,
)
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama.modeling_llama import repeat_kv

from tightrope import RopeSpec, patch, positions
from tightrope.functional import rotate, rotate_qk

from .harness import Group, scenario
from .llama import VOCABULARY, small_llama

SPEC = RopeSpec(16)
TOKENS = 48


class Ring(torch.autograd.Function):
    """Causal attention to the tokens of all processes."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = _templated_ring_attention(dist.group.WORLD, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k and v."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return _templated_ring_attention_backward(
            dist.group.WORLD, 2, op, grad, "grad_out", *ctx.saved_tensors, True, dropout_p=0.0
        )


def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any):
    """Attend by `Ring`, as an attention function of transformers."""
    k, v = (repeat_kv(x, module.num_key_value_groups) for x in (k, v))
    return Ring.apply(q, k, v).transpose(1, 2).contiguous(), None


AttentionInterface.register("ring", attend)
AttentionMaskInterface.register("ring", lambda *_, **__: None)


def compare(group: Group, kind: str) -> None:
    """Rotate and attend, forward and backward, on one process and on all.

    torch shards the inputs, and the results of one process, in the same way.
    """
    q, k, v, grad = torch.randn(4, 2, 4, TOKENS, 16).unbind()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rotated = rotate_qk(*leaves[:2], SPEC)
    for x in rotated:
        x.retain_grad()
    out = torch.nn.functional.scaled_dot_product_attention(*rotated, leaves[2], is_causal=True)
    out.backward(grad)
    want = [*(x.detach() for x in rotated), out.detach(), *(x.grad for x in leaves)]

    buffers = [q, k, v, grad, *want]
    _cp_options.enable_load_balance = kind == "zigzag"
    with context_parallel(group.mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        where = positions.shard(None, group.rank, group.size, kind=kind, tokens=TOKENS)
        mine = rotate_qk(*leaves[:2], SPEC, where)
        for x, expected in zip(mine, want):
            assert torch.equal(x, expected)
            x.retain_grad()
        out = Ring.apply(*mine, leaves[2])
        out.backward(grad)
        # The ring adds the parts of a softmax in another order.
        for x, expected in zip((out, *(x.grad for x in leaves)), want[2:]):
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
        # Its gradients rotate back with the bits of one process.
        for x, leaf in zip(mine, leaves):
            whole = torch.zeros(2, 4, TOKENS, 16)
            tokens = positions.explicit(where, TOKENS // group.size).ids.flatten()
            whole[:, :, tokens] = x.grad
            assert torch.equal(leaf.grad, rotate(whole, SPEC, inverse=True)[:, :, tokens])


@scenario
def context_parallel_zigzag(group: Group) -> None:
    """Each process has two chunks, one from each end."""
    compare(group, "zigzag")


@scenario
def context_parallel_contiguous(group: Group) -> None:
    """Each process has one chunk, without load balancing."""
    compare(group, "contiguous")


@scenario
def context_parallel_packed(group: Group) -> None:
    """Packed sequences, each cut for itself in zig-zag."""
    lengths = [16, 32, 8]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(1, 4, sum(lengths), 16)
    balancer = _PerDocumentHeadTailLoadBalancer([lengths], group.size, "cpu")
    # The order of torch 2.13 has the parts of all ranks in one sequence before the next sequence.
    parts = balancer._generate_indices()[0].split(lengths)
    order = torch.cat([part.chunk(group.size)[group.rank] for part in parts])
    where = positions.packed(cu_seqlens)
    shard = positions.shard(where, group.rank, group.size, kind="zigzag", cu_seqlens=cu_seqlens)
    assert torch.equal(rotate(x[:, :, order], SPEC, shard), rotate(x, SPEC, where)[:, :, order])


@scenario
def context_parallel_llama(group: Group) -> None:
    """A patched Llama: torch shards tokens, labels and positions in zig-zag."""
    whole = small_llama(group.size, "sdpa")
    patch(whole, angles="exact")
    model = copy.deepcopy(whole)
    model.set_attn_implementation("ring")
    ids = torch.randint(0, VOCABULARY, (2, TOKENS))
    labels, where = ids.roll(-1, 1), torch.arange(TOKENS).repeat(2, 1)
    want = whole(ids, position_ids=where).logits
    torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten()).backward()
    want = want.detach()

    buffers = [ids, labels, where, want]
    _cp_options.enable_load_balance = True
    with context_parallel(group.mesh, buffers=buffers, buffer_seq_dims=[1] * 4):
        shard = positions.shard(None, group.rank, group.size, kind="zigzag", tokens=TOKENS)
        assert torch.equal(where[:1], shard.ids[0])
        logits = model(ids, position_ids=where, use_cache=False).logits
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for mine, full in zip(model.parameters(), whole.parameters()):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad / group.size, full.grad, rtol=1e-4, atol=1e-6)
