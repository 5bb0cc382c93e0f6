"""Context parallelism: each process rotates its own tokens.

`context_parallel` of torch shards the tensors, so the order of tokens is torch's, not ours.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    _cp_options,
    _PerDocumentHeadTailLoadBalancer,
)

from tightrope import RopeSpec, positions
from tightrope.functional import rotate, rotate_qk

from .harness import Group, scenario

SPEC = RopeSpec(16)
TOKENS = 48


@scenario
def context_parallel_of_one_sequence(group: Group) -> None:
    """Each process has two chunks, one from each end, or a contiguous one: forward and backward as one process.

    torch shards the inputs, and the results of one process, in the same way.
    """
    *xs, one, other = torch.randn(4, 2, 4, TOKENS, 16).unbind()
    leaves = [x.requires_grad_() for x in xs]
    rotated = rotate_qk(*leaves, SPEC)
    want = [*(y.detach() for y in rotated), *torch.autograd.grad(rotated, leaves, (one, other))]
    whole = [*(x.detach() for x in xs), one, other, *want, torch.arange(TOKENS)[None]]
    for kind in ("zigzag", "contiguous"):
        q, k, one, other, *want, ids = buffers = [x.clone() for x in whole]
        _cp_options.enable_load_balance = kind == "zigzag"
        with context_parallel(group.mesh, buffers=buffers, buffer_seq_dims=[2] * 8 + [1]):
            where = positions.shard(None, group.rank, group.size, kind=kind, tokens=TOKENS)
            assert torch.equal(positions.explicit(where, TOKENS // group.size).ids[0], ids)
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            mine = rotate_qk(*leaves, SPEC, where)
            found = *mine, *torch.autograd.grad(mine, leaves, (one, other))
            assert all(map(torch.equal, found, want))


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
