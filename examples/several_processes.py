"""Train a GPT with grouped queries on several processes, with DDP or FSDP2.

    torchrun --nproc-per-node 2 examples/several_processes.py
    torchrun --nproc-per-node 2 examples/several_processes.py --fsdp --compile

The rotation needs nothing for either: a spec is a value, so there is no buffer to broadcast, to shard or to cast. Both ways
have the losses of one process with the whole batch. The text is made of counting bytes. The file needs torch and tightrope;
copy from it freely.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tightrope import RopeSpec, rotate_qk
from tightrope.activations import RMSNorm
from tightrope.spec import PreparedRotation

VOCABULARY, CONTEXT, BATCH = 64, 48, 8
HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2
WIDTH = HEADS * HEAD_DIM
SPEC = RopeSpec(HEAD_DIM)


class Block(nn.Module):
    """Attention with grouped queries and a norm of queries and keys, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, rope: PreparedRotation) -> Tensor:
        """Return x after the block, `(rows, tokens, width)`."""
        heads = self.project(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
        q, k = rotate_qk(q, k, rope, act=RMSNorm(self.norm))  # normalises and rotates in one pass
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        rope = SPEC.at()  # positions 0, 1, 2, …, checked once for all layers
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, rope)
        logits = x @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """Return the whole batch of a step: rows that count up, each by its own stride."""
    draw = torch.Generator().manual_seed(step)
    start, stride = torch.randint(1, VOCABULARY, (2, BATCH, 1), generator=draw)
    return (start + stride * torch.arange(CONTEXT)) % VOCABULARY


def train(steps: int, *, fsdp: bool = False, compiled: bool = False) -> list[float]:
    """Return the loss of each step, the same in every process. Without a group, one process has the whole batch."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model: nn.Module = Model()
    if fsdp:
        mesh = init_device_mesh("cpu", (size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif size > 1:
        model = DistributedDataParallel(model)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = run(batch(step)[rank::size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the losses in the first process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--fsdp", action="store_true", help="shard the model instead of copying it")
    parser.add_argument("--compile", action="store_true", help="train the compiled model")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    losses = train(options.steps, fsdp=options.fsdp, compiled=options.compile)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
