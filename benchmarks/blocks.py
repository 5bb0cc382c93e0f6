"""Measure one block of a video and of an image model, before and after ``patch``.

    python -m benchmarks.blocks [--only REGEX] [--out FILE] [--plot FILE]

Needs diffusers. Two processes, one with the model as it is and one with the patched model, take turns. Each
case is a block of real width (Wan 1.3B: 12 heads of 128 channels; Flux: 24 heads) with random weights and 4,096
tokens. The numbers are medians of one run of two rounds: seconds of the block and of its two rotations alone, and the
most bytes that tensors held at one time beyond those before the block, and before one rotation.

Also: the error of the cosines that diffusers makes, by the dtype of its angles and of the positions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Child, serve
from benchmarks.pages import written
from tightrope import RopeSpec, patch, unpatch
from tightrope.environment import read_environment
from tightrope.functional import rotate
from tightrope.patching import replaced

TOKENS = 4096
ROUNDS = 2
TEXT = 512  # tokens of the text


def wan(tokens: int, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    """A block, its arguments, and the arguments of one rotation."""
    from diffusers.models.transformers import transformer_wan as wan

    block = wan.WanTransformerBlock(1536, 8960, 12, cross_attn_norm=True).to(dtype)
    frames = tokens // 1024
    rope = wan.WanRotaryPosEmbed(128, (1, 2, 2), 1024)
    tables = rope(torch.empty(1, 16, frames, 64, 64))
    arguments = {
        "hidden_states": torch.randn(1, tokens, 1536).to(dtype),
        "encoder_hidden_states": torch.randn(1, TEXT, 1536).to(dtype),
        "temb": torch.randn(1, 6, 1536).to(dtype),
        "rotary_emb": tables,
    }
    return block, arguments, (torch.randn(1, tokens, 12, 128).to(dtype), *tables)


def flux(tokens: int, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    """A block, its arguments, and the arguments of one rotation."""
    from diffusers.models.transformers import transformer_flux as flux

    block = flux.FluxTransformerBlock(3072, 24, 128).to(dtype)
    side = int((tokens - TEXT) ** 0.5)
    image = torch.stack(
        torch.meshgrid(torch.arange(1), torch.arange(side), torch.arange(side), indexing="ij"), -1
    )
    ids = torch.cat((torch.zeros(TEXT, 3), image.reshape(-1, 3).float()))
    tables = flux.FluxPosEmbed(10000, [16, 56, 56])(ids)
    arguments = {
        "hidden_states": torch.randn(1, side * side, 3072).to(dtype),
        "encoder_hidden_states": torch.randn(1, TEXT, 3072).to(dtype),
        "temb": torch.randn(1, 3072).to(dtype),
        "image_rotary_emb": tables,
    }
    return block, arguments, (torch.randn(1, len(ids), 24, 128).to(dtype), tables)


MODELS: dict[str, Callable[[int, torch.dtype], tuple[torch.nn.Module, dict[str, Any], Any]]] = {
    "Wan": wan,
    "Flux": flux,
}


def highest(profile: torch.profiler.profile) -> int:
    """The most bytes that tensors held at one time during a profile, beyond those before it."""
    events = profile.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in steps), initial=0))


class Block:
    """The block that was asked last, and a function that measures one call."""

    def __init__(self, patched: bool) -> None:
        self.patched, self.case = patched, ""
        self.block: Any = None

    def __call__(self, line: str) -> dict[str, float]:
        """Measure one call; a line is "model dtype tokens work"."""
        case, _, work = line.rpartition(" ")
        if case != self.case:
            self.case, (name, dtype, tokens) = case, case.split()
            torch.manual_seed(0)
            made = MODELS[name](int(tokens), getattr(torch, dtype))
            self.block, self.arguments, self.rotated = made
            (entry,) = patch(self.block).replaced
            unpatch(self.block)
            function = vars(sys.modules[entry.module])[entry.name.rpartition(".")[2]]
            self.rotate = replaced(function) if self.patched else function
            self.options = {"sequence_dim": 1} if name == "Flux" else {}
            if self.patched:
                patch(self.block)
        train = work == "train"
        self.block.zero_grad()
        x, *tables = self.rotated
        x = x.requires_grad_(train)
        seconds, peak = self._timed(lambda: self.block(**self.arguments), train)
        alone, scratch = self._timed(lambda: self.rotate(x, *tables, **self.options), train)
        return {"block": seconds, "rotations": 2 * alone, "peak": peak, "scratch": scratch}

    def _timed(self, call: Callable[[], Any], train: bool) -> tuple[float, float]:
        """Seconds and the most bytes that tensors held."""
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with (
            torch.profiler.profile(activities=cpu, profile_memory=True) as profile,
            torch.set_grad_enabled(train),
        ):
            start = time.perf_counter()
            result = call()
            if train:
                results = result if isinstance(result, tuple) else (result,)
                torch.autograd.backward(results, [torch.ones_like(y) for y in results])
            seconds = time.perf_counter() - start
        return seconds, float(highest(profile))


def angles(positions: int = 16384, width: int = 56) -> dict[str, dict[str, float]]:
    """Errors of the cosines that diffusers makes.

    The reference is the exact cosine. Diffusers computes angles in float64 on a CPU and on CUDA, in float32
    on devices without it; pipelines may hold positions in bfloat16.
    """
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    first_channels = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(positions, width // 2)
    exact = rotate(first_channels[None], RopeSpec(width, interleaved=True), layout="bsd")[0, :, ::2]
    whole = torch.arange(positions, dtype=torch.float32)
    cases = {
        "float64": (whole, torch.float64),
        "float32": (whole, torch.float32),
        "float64 of positions in bfloat16": (whole.bfloat16().float(), torch.float64),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (ids, dtype) in cases.items():
        cos, _sin = get_1d_rotary_pos_embed(width, ids, use_real=True, freqs_dtype=dtype)
        error = (cos[:, ::2].double() - exact).abs().amax(-1)
        wrong = (error > 1e-3).nonzero()
        first = int(wrong[0]) if len(wrong) else -1
        found[name] = {"error": float(error.max()), "first position off by 0.001": first}
    return found


def plot(found: dict[str, Any], path: str) -> None:
    """Draw the time and the memory of each case after patching, relative to before."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(found)
    figure, axes = plt.subplots(1, 4, figsize=(16, 0.36 * len(names) + 1.5), sharey=True)
    for axis, (key, title) in zip(
        axes,
        (
            ("block", "time of the block"),
            ("rotations", "time of its rotations"),
            ("peak", "memory of the block"),
            ("scratch", "memory of a rotation"),
        ),
    ):
        values = [found[name]["after"][key] / found[name]["before"][key] for name in names]
        axis.barh(names, values, color="#4269d0")
        axis.axvline(1, color="0.6")
        axis.set_title(f"{title}, after / before")
        for i, value in enumerate(values):
            axis.text(value, i, f" {value:.2f}", va="center", fontsize=8)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure all cases; print or write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose names match, such as 'Wan.*4096'")
    parser.add_argument("--out")
    parser.add_argument("--plot")
    parser.add_argument("--serve", choices=("before", "after"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(Block(options.serve == "after"))
    children = {name: Child("benchmarks.blocks", name) for name in ("before", "after")}
    found: dict[str, Any] = {}
    for model, dtype, work in itertools.product(
        MODELS, ("float32", "bfloat16"), ("forward", "train")
    ):
        line = f"{model} {dtype} {TOKENS} {work}"
        if not re.search(options.only, line):
            continue
        answers: dict[str, list[dict[str, float]]] = {name: [] for name in children}
        for turn in range(ROUNDS + 1):  # the first calls warm up
            for name, child in children.items():
                answer = child.ask(line)
                if turn:
                    answers[name].append(answer)
        found[line] = {
            name: {key: float(f"{statistics.median(a[key] for a in each):.4g}") for key in each[0]}
            for name, each in answers.items()
        }
        before, after = found[line]["before"], found[line]["after"]
        shares = [100 * each["rotations"] / each["block"] for each in (before, after)]
        print(
            f"{line}: block {before['block']:.3g} -> {after['block']:.3g} s, rotations "
            f"{shares[0]:.1f} -> {shares[1]:.1f} % of it, peak "
            f"{before['peak'] / 2**20:.0f} -> {after['peak'] / 2**20:.0f} MB, of one rotation "
            f"{before['scratch'] / 2**20:.0f} -> {after['scratch'] / 2**20:.0f} MB",
            flush=True,
        )
    for child in children.values():
        child.end()
    made = angles()
    print(json.dumps(made, indent=1))
    if options.out:
        results = {"machine": asdict(read_environment()), "cases": found, "angles": made}
        Path(options.out).write_text(written(results), encoding="utf-8")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
