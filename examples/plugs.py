"""Train a tiny Llama for two steps with Tightrope plugged in, and say which calls it served.

    python examples/plugs.py callback   the callback, in the Trainer of transformers
    python examples/plugs.py slot       the place for kernels in transformers; needs the package kernels
    python examples/plugs.py liger      Liger's dispatcher; needs liger-kernel

docs/plugs.md describes each. The losses are those of the model without a plug.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS, LAYERS = 2, 2
TOKENS = torch.arange(10)


def tiny() -> LlamaForCausalLM:
    """Make a Llama with the same random weights each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, num_hidden_layers=LAYERS, vocab_size=96, attn_implementation="eager"
    )
    return LlamaForCausalLM(config)


def train(model: Any) -> list[float]:
    """Train for two steps and return their losses; print how often the operator ran."""
    optimizer, losses = torch.optim.SGD(model.train().parameters(), lr=0.1), []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            loss = model(input_ids=TOKENS[None], labels=TOKENS[None]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    count = sum(e.count for e in profile.key_averages() if e.key == "tightrope::rotate")
    print(f"served {count} of {2 * LAYERS * STEPS} rotations, forward and backward")
    return losses


def callback() -> list[float]:
    """Train by the Trainer, whose callback patches the model."""
    from tightrope.integrations.plugins import trainer_callback

    plug = trainer_callback()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=STEPS, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True
        )
        rows = [{"input_ids": TOKENS, "labels": TOKENS}] * 2 * STEPS
        trainer = Trainer(tiny(), options, train_dataset=rows, callbacks=[plug])
        trainer.train()
    for name, calls in plug.report.calls().items():
        print(f"served {calls.operator} of {LAYERS * STEPS} calls of {name.rpartition('.')[2]}")
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def slot() -> list[float]:
    """Train with the kernels of transformers, of which one is Tightrope."""
    from tightrope.integrations.transformers import register

    register()
    model = tiny().train()
    model.set_use_kernels(True)
    model(input_ids=TOKENS[None])  # the first call tries the function that is replaced
    return train(model)


def liger() -> list[float]:
    """Train with Liger's rotation, which its dispatcher gives to Tightrope."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from tightrope.integrations.liger import register

    register()
    others = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    apply_liger_kernel_to_llama(rope=True, rms_norm=False, swiglu=False, **others)
    return train(tiny())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    plugs: dict[str, Callable[[], list[float]]] = {
        each.__name__: each for each in (callback, slot, liger)
    }
    names = sys.argv[1:] if arguments is None else arguments
    if len(names) != 1 or names[0] not in plugs:
        raise SystemExit(__doc__)
    losses = plugs[names[0]]()
    print(f"losses {losses[0]:.6f} and {losses[1]:.6f}")


if __name__ == "__main__":
    main()
