"""Measure what streaming stores do to a rotation and to whatever reads its results next.

    python -m benchmarks.next_reader [--threads N] [--out FILE]

Two processes, one with TIGHTROPE_STREAM_BYTES=0 and one with the default, take turns at every call. Each
case rotates q (32 heads) and k (8 heads) of 128 channels with `out=`, all memory out of the caches, and is
followed by nothing, by a sum of the results, or by causal attention. The printed number is the median
time with streaming stores divided by the median without, for each of three runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

TOKENS = (128, 512, 2048, 8192)
READERS = ("nothing", "sum", "attention")
RUNS, SECONDS, MOST = 3, 1.5, 21  # seconds of a case and run; most rounds of it


def serve(threads: int) -> None:
    """Time one call for each line on standard input: "dtype tokens reader"."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from tightrope import RopeSpec
    from tightrope.functional import rotate_qk

    torch.set_num_threads(threads)
    spec, case, sets, calls = RopeSpec(128), None, [], 0
    for line in sys.stdin:
        name, tokens, reader = line.split()
        if case != (name, tokens):
            case, dtype = (name, tokens), getattr(torch, name)
            count = max(2, 200_000_000 // (40 * 128 * int(tokens) * dtype.itemsize))
            q, k = (
                torch.randn(1, int(tokens), heads, 128).to(dtype).transpose(1, 2)
                for heads in (32, 8)
            )
            sets = [[x.clone() for x in (q, k, q, k)] for _ in range(min(count, 64))]
        q, k, *out = sets[calls % len(sets)]
        calls += 1
        start = time.perf_counter()
        q, k = rotate_qk(q, k, spec, out=(out[0], out[1]))
        if reader == "sum":
            q.sum(), k.sum()
        elif reader == "attention":
            scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        print(time.perf_counter() - start, flush=True)


def child(threads: int, **environment: str) -> subprocess.Popen[str]:
    """Start a process that serves calls."""
    command = [sys.executable, "-m", "benchmarks.next_reader", "--serve", "--threads", str(threads)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | environment, **pipes)


def call(process: subprocess.Popen[str], line: str) -> float:
    """Return the seconds of one call."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process must have pipes")
    print(line, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    """Measure all cases and print or write the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.threads)
    both = child(options.threads, TIGHTROPE_STREAM_BYTES="0"), child(options.threads)
    found = {}
    for dtype in ("float32", "bfloat16"):
        for tokens in TOKENS:
            for reader in READERS:
                line = f"{dtype} {tokens} {reader}"
                slowest = max(call(process, line) for process in both)
                rounds = max(1, min(MOST, int(SECONDS / (2 * slowest))))
                ratios = []
                for _ in range(RUNS):
                    times = [[call(process, line) for process in both] for _ in range(rounds)]
                    off, on = (statistics.median(column) for column in zip(*times, strict=True))
                    ratios.append(round(on / off, 3))
                found[line] = sorted(ratios)
                print(line, *found[line], flush=True)
    for process in both:
        process.terminate()
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"threads": options.threads, "streaming / ordinary": found}, file, indent=1)


if __name__ == "__main__":
    main()
