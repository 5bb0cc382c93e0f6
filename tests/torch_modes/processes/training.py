"""Sharded parameters and checkpoints of a model made of this library's modules."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tightrope import RopeSpec
from tightrope.activations import RMSNorm
from tightrope.functional import rotate_qk
from tightrope.nn import (
    LrpeRotate1d,
    PolarRoPEAttention,
    RotaryEmbedding,
    RotaryPositionalEmbedding,
)

from .harness import Group, scenario

WIDTH, HEADS, HEAD_DIM, TOKENS = 64, 4, 16, 12


class Attention(nn.Module):
    """Attention whose queries and keys are normed and rotated, in one of three ways.

    Args:
        kind: "norm", learned weights of RMSNorm, normed and rotated in one pass; "module", two
            rotary modules, one with learned frequencies; "learned", learned angles of each head.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kind = kind
        if kind == "norm":
            self.spec = RopeSpec(HEAD_DIM)
            self.q_weight = nn.Parameter(1 + torch.randn(HEAD_DIM) / 8)
            self.k_weight = nn.Parameter(1 + torch.randn(HEAD_DIM) / 8)
        elif kind == "module":
            self.rope = RotaryPositionalEmbedding(HEAD_DIM, interleaved=True)
            self.k_rope = RotaryEmbedding(HEAD_DIM, interleaved=True, layout="bshd", learnable=True)
        else:
            self.rope = LrpeRotate1d(HEAD_DIM, HEADS, act="silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over the tokens of x, (batch, tokens, channels)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        if self.kind == "norm":
            act = RMSNorm(self.q_weight), RMSNorm(self.k_weight)
            q, k = rotate_qk(q, k, self.spec.at(1_000_000), layout="bshd", act=act)
        elif self.kind == "module":
            q, k = self.rope(q, seq_dim=1), self.k_rope(k)
        else:
            q, k = self.rope(q), self.rope(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Polar(PolarRoPEAttention):
    """Polar attention with learned gates and a residual path."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, HEAD_DIM, causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over the tokens of x, (batch, tokens, channels)."""
        return x + super().forward(x)


def layers() -> nn.Sequential:
    """Make a model with a rotation of every kind."""
    torch.manual_seed(0)
    return nn.Sequential(Attention("norm"), Attention("module"), Attention("learned"), Polar())


def shard(model: nn.Sequential, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard the parameters; learned frequencies keep their dtype."""
    for layer in model:
        if isinstance(getattr(layer, "rope", None), LrpeRotate1d):
            fully_shard(layer.rope, mesh=mesh)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients, by names without those of wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.replace("_checkpoint_wrapped_module.", "")] = full
    return found


@scenario
def sharded_parameters_in_bfloat16(group: Group) -> None:
    """FSDP with a bfloat16 policy and activation checkpointing; each process has its own rows."""
    batches = torch.randn(group.size, 2, TOKENS, WIDTH).bfloat16()
    model = layers()
    # What the policy does, by hand.
    plain = copy.deepcopy(model).bfloat16()
    plain[2].rope.theta.data = model[2].rope.theta.data.clone()
    results, grads = [], []
    for batch in batches:
        results.append(plain(batch))
        results[-1].float().square().mean().backward()
        grads.append({name: grad.float() for name, grad in gradients(plain).items()})
        plain.zero_grad()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Attention | Polar)
    )
    shard(model, group.mesh, policy)
    dtypes = []
    model[2].rope.register_forward_pre_hook(lambda rope, _: dtypes.append(rope.theta.dtype))
    y = model(batches[group.rank])
    assert set(dtypes) == {torch.float32}
    assert torch.equal(y, results[group.rank])
    y.float().square().mean().backward()
    for name, grad in gradients(model).items():
        parts = torch.stack([one[name] for one in grads])
        # The mean over processes is a float32 sum in any order.
        bound = parts.abs().sum(0) * 2**-23
        assert ((grad - parts.mean(0)).abs() <= bound).all(), name


@scenario
def checkpoint_for_fewer_processes(group: Group) -> None:
    """Save on all processes and load on half of them."""
    model = layers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 16)
    x = torch.randn(2, TOKENS, WIDTH)
    want = model(x)
    keys = {name for name, _ in model.named_parameters()}
    assert set(model.state_dict()) == keys  # no frequencies, no tables
    shard(model, group.mesh, MixedPrecisionPolicy())
    state = get_model_state_dict(model)
    assert set(state) == keys
    dcp.save(state, checkpoint_id=group.folder)

    half = list(range(group.size // 2))
    mesh = DeviceMesh("cpu", half)
    if group.rank in half:
        with torch.device("meta"):
            fresh = layers()
        shard(fresh, mesh, MixedPrecisionPolicy())
        fresh.to_empty(device="cpu")
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=group.folder, process_group=mesh.get_group())
        set_model_state_dict(fresh, state)
        assert torch.equal(fresh(x), want)
    dist.barrier()
