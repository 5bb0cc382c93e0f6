"""Measure what streaming stores do to a rotation and to whatever reads its results next.

    python -m benchmarks.next_reader [--threads N ...] [--out FILE]

Two processes, one with TIGHTROPE_STREAM_BYTES=0 and one with the default, take turns at every call. Each
case rotates q (32 heads) and k (8 heads) of 128 channels with `out=`, all memory out of the caches, and is
followed by nothing, by a sum of the results, or by causal attention. The printed numbers are the median
time with streaming stores divided by the median without, for each of three runs.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.children import Child, ratios, serve
from benchmarks.pages import written
from tightrope import RopeSpec
from tightrope.environment import read_environment
from tightrope.functional import rotate_qk

TOKENS = (128, 512, 2048, 8192)
READERS = ("nothing", "sum", "attention")
SECONDS, MOST = 1.5, 21  # seconds of a case and run; most rounds of it


class Cases:
    """The tensors of the case that was asked last, and a function that times one call."""

    def __init__(self) -> None:
        self.spec, self.case, self.calls = RopeSpec(128), "", 0
        self.sets: list[list[torch.Tensor]] = []

    def __call__(self, line: str) -> float:
        """Return the seconds of one call; a line is "dtype tokens reader"."""
        case, _, reader = line.rpartition(" ")
        if case != self.case:
            self.case, (name, tokens) = case, case.split()
            dtype = getattr(torch, name)
            q, k = (
                torch.randn(1, int(tokens), heads, 128).to(dtype).transpose(1, 2)
                for heads in (32, 8)
            )
            count = max(2, 200_000_000 // ((q.numel() + k.numel()) * dtype.itemsize))
            self.sets = [[x.clone() for x in (q, k, q, k)] for _ in range(min(count, 64))]
        q, k, *out = self.sets[self.calls % len(self.sets)]
        self.calls += 1
        start = time.perf_counter()
        q, k = rotate_qk(q, k, self.spec, out=(out[0], out[1]))
        if reader == "sum":
            q.sum(), k.sum()
        elif reader == "attention":
            scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        return time.perf_counter() - start


def main() -> None:
    """Measure all cases and print or write the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--out")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        torch.set_num_threads(options.threads[0])
        return serve(Cases())
    results: dict[str, Any] = {"machine": asdict(read_environment())}
    for n in options.threads:
        results[f"streaming over ordinary, {n} threads"] = measured(n)
    if options.out:
        Path(options.out).write_text(written(results), encoding="utf-8")


def measured(threads: int) -> dict[str, list[float]]:
    """Measure and print all cases with a number of threads."""
    switches = ("--threads", str(threads))
    both = [
        Child("benchmarks.next_reader", *switches, **each)
        for each in ({"TIGHTROPE_STREAM_BYTES": "0"}, {})
    ]
    found = {}
    for dtype in ("float32", "bfloat16"):
        for tokens in TOKENS:
            for reader in READERS:
                line = f"{dtype} {tokens} {reader}"
                found[line] = ratios(both, line, SECONDS, MOST)
                print(threads, line, *found[line], flush=True)
    for child in both:
        child.end()
    return found


if __name__ == "__main__":
    main()
