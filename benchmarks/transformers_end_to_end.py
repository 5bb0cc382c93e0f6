"""Measure a transformers model before and after `patch`: its time, the share of that time that rotations
take, and the error of attention scores at large positions.

`python -m benchmarks.transformers_end_to_end` measures a Llama-shaped model (4 layers, 2048 channels,
32 query and 8 key heads, 2048 tokens, bfloat16), forward and training step, eager and compiled. Calls
of the two models alternate in random order, and medians are compared. `--out` writes JSON with the machine
and versions.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tightrope.environment import read_environment

from .pages import written
from .speed import method

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 2**21,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
SMALL = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
POSITIONS = (0, 131_072, 1_048_576)


def llama(shape: dict[str, Any]) -> Any:
    """Make a Llama of the given shape, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, attn_implementation="sdpa")
    return LlamaForCausalLM(config).to(torch.bfloat16)


def forward(model: Any, ids: torch.Tensor) -> None:
    """Run forward with logits of the last token only, so that mostly the layers are measured."""
    with torch.no_grad():
        model(ids, logits_to_keep=1, use_cache=False)


def training_step(model: Any, ids: torch.Tensor) -> None:
    """Compute a loss and its gradients, starting without gradients."""
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()


STEPS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "forward": forward,
    "training step": training_step,
}


def seconds_of(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, with cold caches, by the method of `benchmarks.speed`."""
    return method.medians(calls, cold=True, rounds=rounds, rng=random.Random(0))


def rotation_seconds(model: Any, ids: torch.Tensor, step: str) -> float:
    """Seconds that the rotary functions of all layers take in an eager step; in training, with backward."""
    attention = type(model.model.layers[0].self_attn)
    code = attention.forward
    names = [n for n in code.__code__.co_names if "apply_rotary_pos_emb" in n]
    function = code.__globals__[names[0]]
    heads, keys = model.config.num_attention_heads, model.config.num_key_value_heads
    channels = model.model.layers[0].self_attn.head_dim
    tokens = ids.shape[1]
    training = step != "forward"
    q, k = (
        torch.randn(1, tokens, h, channels, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_(training)
        for h in (heads, keys)
    )
    rotary = model.model.rotary_emb
    cos, sin = rotary(q, torch.arange(tokens)[None])
    cotangents = (torch.randn(q.shape).to(q.dtype), torch.randn(k.shape).to(k.dtype))

    def call() -> None:
        with torch.set_grad_enabled(training):
            ys = function(q, k, cos, sin)
        if training:
            torch.autograd.grad(ys, (q, k), cotangents)

    return seconds_of({"rotation": call}, 6)["rotation"] * len(model.model.layers)


def times(shape: dict[str, Any], tokens: int, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Measure each step, eager and, if `compiled`, compiled too; return one row for each."""
    from tightrope import patch

    before, after = llama(shape), llama(shape)
    patch(after)
    ids = torch.randint(0, shape["vocab_size"], (1, tokens))
    rows = []
    for way in ("eager", "compiled") if compiled else ("eager",):
        models = {"before": before, "after": after}
        if way == "compiled":
            models = {name: torch.compile(model) for name, model in models.items()}
        for step in STEPS:
            calls = {name: partial(STEPS[step], model, ids) for name, model in models.items()}
            seconds = seconds_of(calls, rounds)
            row: dict[str, Any] = {"way": way, "step": step, **seconds}
            if way == "eager":
                for name, model in models.items():
                    row[f"rotation {name}"] = rotation_seconds(model, ids, step) / seconds[name]
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    text = (
        f"{row['way']:9} {row['step']:14} {row['before'] * 1e3:8.1f} ms -> {row['after'] * 1e3:8.1f} ms"
        f"  ({row['before'] / row['after']:.2f} times as fast)"
    )
    if "rotation before" in row:
        text += f"  share of rotations {row['rotation before']:.1%} -> {row['rotation after']:.1%}"
    return text


def score_errors() -> list[dict[str, Any]]:
    """Root mean square error of a bfloat16 model's attention scores q·k, compared with float64.

    It covers all pairs of 64 consecutive tokens from each start position, with random q and k.
    """
    from tightrope import patch

    rows = []
    shape = SMALL | {"head_dim": 128, "num_key_value_heads": 4}
    for position in POSITIONS:
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, 4, 64, 128, generator=generator).bfloat16() for _ in range(2))
        ids = position + torch.arange(64)[None]
        omega = 500000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
        angle = ids[..., None].double() * omega
        angle = torch.cat((angle, angle), -1)
        exact = _scores(*_by_definition(q.double(), k.double(), angle.cos(), angle.sin()))
        row: dict[str, Any] = {"position": position, "scores": exact.square().mean().sqrt().item()}
        for name, angles in (("before", None), ("model", "model"), ("exact", "exact")):
            model = llama(shape)
            if angles is not None:
                patch(model, angles=angles)
            code = type(model.model.layers[0].self_attn).forward
            function = code.__globals__[
                next(n for n in code.__code__.co_names if "apply_rotary_pos_emb" in n)
            ]
            with torch.no_grad():
                cos, sin = model.model.rotary_emb(q, ids)
                scores = _scores(*function(q, k, cos, sin))
            row[name] = (scores - exact).square().mean().sqrt().item()
        rows.append(row)
        print(
            f"positions from {position:9,}: error of scores {row['before']:.4f} before, "
            f"{row['model']:.4f} patched, {row['exact']:.4f} with exact angles "
            f"(root mean squares; that of the scores is {row['scores']:.1f})",
            flush=True,
        )
    return rows


def _by_definition(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def turned(x: torch.Tensor) -> torch.Tensor:
        u, v = x.chunk(2, -1)
        return x * cos + torch.cat((-v, u), -1) * sin

    return turned(q), turned(k)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.double() @ k.double().transpose(-1, -2)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--no-compile", action="store_true", help="eager only")
    parser.add_argument("--only", choices=["times", "scores"], help="run one part only")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    data: dict[str, Any] = {
        "machine": asdict(read_environment()),
        "tokens": options.tokens,
        "rounds": options.rounds,
    }
    shape = SMALL if options.small else SHAPE
    data["shape"] = shape
    if options.only != "scores":
        data["times"] = times(shape, options.tokens, options.rounds, not options.no_compile)
    if options.only != "times":
        data["scores"] = score_errors()
    if options.out is not None:
        options.out.write_text(written(data), encoding="utf-8")


if __name__ == "__main__":
    main()
