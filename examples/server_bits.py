"""Train a Llama that rotates with the bits of its server, and prove it on the trained model.

    python examples/server_bits.py [vllm | vllm-native | sglang]

docs/parity.md says which name is yours.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from tightrope import RopeSpec, patch, rotate_qk, unpatch

STEPS, LAYERS = 3, 2


def main(stack: str = "vllm") -> None:
    """Patch, train, and compare the bits of rotated queries and keys with those of the server's arithmetic."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, intermediate_size=96)
    model = LlamaForCausalLM(config).bfloat16().train()
    q, k = torch.randn(2, 1, 4, 64, 16).bfloat16()
    ids, spec = torch.arange(64)[None], RopeSpec.from_config(config)
    served = rotate_qk(q, k, spec.at(ids, stack=stack))

    def rotated() -> tuple[torch.Tensor, torch.Tensor]:
        """Call what the model calls."""
        return modeling_llama.apply_rotary_pos_emb(q, k, *model.model.rotary_emb(q, ids))

    before = sum(int((a != b).sum()) for a, b in zip(rotated(), served))
    report = patch(model, stack=stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:.3f}")
    after = sum(int((a != b).sum()) for a, b in zip(rotated(), served))
    print(
        f"numbers that differ from {stack}: {before} of {2 * q.numel()} before patch, {after} after"
    )
    print(report.calls())
    unpatch(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
