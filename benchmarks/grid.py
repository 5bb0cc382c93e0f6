"""This library beside eager and compiled torch, which have their tables already, over a grid of shapes.

    python -m benchmarks.grid [REGEX] [--runs 3] [--out RESULTS.json]
    python -m benchmarks.grid --page docs/cpu.md RESULTS.json…

A ratio is the time of eager code (as in transformers, or Meta's Llama where pairs are interleaved), or of the fastest
compiled code, divided by that of the fastest of ours: a spec with positions, a prepared rotation, or the caller's tables.
Above 1, ours is faster. Medians of one run, whose calls alternate in random order. "x2": two threads. A run takes about
four minutes; results of a machine that does other work meanwhile are measured again, up to three times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tightrope import RopeSpec, positions
from tightrope.environment import read_environment
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    rotate_qk,
    rotate_qk_,
)

from .pages import between_marks, table, written

Call = Callable[[], Any]
Tensors = tuple[torch.Tensor, ...]

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
#: Largest error of an element, as a share of the largest one; compiled code rounds several times.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-9}
#: From this number of elements on, ours is to be at least as fast; below, 0.9 of it.
LARGE = 1 << 16
MARK = "grid"


@dataclass(frozen=True)
class Case:
    """A shape to measure.

    Attributes:
        name: a name.
        shape: rows, heads of q, tokens, channels.
        kinds: dtypes, each with "x2" for two threads.
        k_heads: heads of k; 0 for none.
        at: positions: an offset, "each" for one offset per row, or "ids" for ids of their own.
        interleaved, rotary_dim: as in RopeSpec.
        token_axis: dimension of the tokens: 2, or 1 for (rows, tokens, heads, channels).
        memory: "", "qkv" for slices of one projection, or "apart" for channels that are not next to each other.
        work: "new", "in place" or "training".
        only_tables: whether ours rotates by the caller's tables alone.
    """

    name: str
    shape: tuple[int, int, int, int]
    kinds: str = "fp32 fp32x2 bf16 bf16x2"
    k_heads: int = 0
    at: int | str = 0
    interleaved: bool = False
    rotary_dim: int | None = None
    token_axis: int = 2
    memory: str = ""
    work: str = "new"
    only_tables: bool = False


_SOME, _TWO = "fp32 bf16 bf16x2", "fp32x2 bf16"
_PREFILL, _CHUNK, _LONGER = (1, 32, 2048, 128), (1, 32, 128, 128), (1, 32, 512, 128)
_TOKEN, _BATCH = (1, 32, 1, 128), (2, 16, 512, 64)
CASES = (
    Case("prefill 2048", _PREFILL, "fp32 fp32x2 bf16 bf16x2 fp16", 8),
    Case("prefill 128", _CHUNK, "fp32 fp32x2 bf16 bf16x2 fp16x2 fp64", 8),
    Case("1024 rows x 16 tokens", (1024, 1, 16, 64)),
    Case("1 head", (1, 1, 2048, 128)),
    Case("256 rows x 2 heads", (256, 2, 64, 32)),
    Case("ViT", (64, 12, 197, 64), "fp32x2 bf16 bf16x2"),
    Case("4096 rows x 1 token", (4096, 1, 1, 64), _SOME, at=17),
    Case("2 heads x 32768 tokens", (1, 2, 32768, 128), "fp32x2 bf16 bf16x2"),
    *(
        Case(
            f"decode {rows} x {q}+{k} heads", (rows, q, 1, 128), _TWO, k, "each" if rows > 1 else 17
        )
        for q, k in ((32, 8), (1, 0))
        for rows in (1, 64, 256)
    ),
    *(Case(f"head_dim {width}", (2, 16, 512, width), _TWO) for width in (16, 32, 80, 256)),
    *(
        Case(f"interleaved {shape[0]} x {shape[2]}", shape, interleaved=True)
        for shape in ((1, 32, 64, 128), (8, 8, 512, 64))
    ),
    Case("bshd", _BATCH, _TWO, 16, token_axis=1),
    Case("bshd 1 x 512 x 8", (1, 8, 512, 128), "fp32x2 bf16x2", token_axis=1),
    Case("sliced qkv", _BATCH, _SOME, 16, token_axis=1, memory="qkv"),
    Case("partial 32 of 128", _LONGER, k_heads=8, rotary_dim=32),
    Case("strided", _LONGER, _SOME, memory="apart"),
    Case("tables only", _LONGER, _SOME, 8, only_tables=True),
    Case("ids per row", (4, 32, 512, 128), "fp32x2 bf16 bf16x2", 8, "ids"),
    *(
        Case(f"in place {shape[2]}", shape, _SOME, 8, 17, work="in place")
        for shape in (_PREFILL, _CHUNK, _TOKEN)
    ),
    *(
        Case(f"training {shape[2]}", shape, _TWO, 8, work="training")
        for shape in ((4, 8, 512, 64), _PREFILL)
    ),
)


class Times(NamedTuple):
    """Ratios of a case in one run: eager and compiled code by ours.

    Attributes:
        eager, compiled: the ratios.
        noisy: whether another process was busy.
        wrong: whether results of eager or compiled code were wrong; they are measured nevertheless.
    """

    eager: float
    compiled: float
    noisy: bool
    wrong: bool


def tensors_of(case: Case, dtype: torch.dtype) -> Tensors:
    """Return q, and k if there is one."""
    rows, q_heads, tokens, width = case.shape
    xs = [
        torch.randn(rows, heads, tokens, width)
        .to(dtype)
        .transpose(1, 3 - case.token_axis)
        .contiguous()
        for heads in (q_heads, case.k_heads)
        if heads
    ]
    if case.memory == "apart":
        return tuple(x.mT.contiguous().mT for x in xs)
    if case.memory == "qkv":
        return torch.cat((*xs, xs[0]), 2).chunk(3, 2)[:2]
    return tuple(xs)


def contenders(case: Case, xs: Tensors) -> tuple[dict[str, Call], Tensors]:
    """Return the calls by name, of which those of ours begin with "ours", and the results in float64."""
    rows, _, tokens, width = case.shape
    rotary, dtype = case.rotary_dim or width, xs[0].dtype
    heads = 3 - case.token_axis
    each = 17 + 3 * torch.arange(rows)
    first = torch.tensor([[case.at]]) if isinstance(case.at, int) else each[:, None]
    ids = first + torch.arange(tokens)
    where: Any = case.at or None
    if isinstance(case.at, str):
        where = ids if case.at == "ids" else positions.per_row(each)
    angle = ids[..., None] * 10000.0 ** (-torch.arange(0, rotary, 2).double() / rotary)
    whole = angle.cos(), angle.sin()
    half = tuple(t.to(dtype) for t in whole)
    cat = tuple(torch.cat((t, t), -1).to(dtype) for t in whole)
    polar = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y if rotary == width else torch.cat((y, x[..., rotary:]), -1)

    def eager(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Rotate as transformers does, or in complex numbers as Meta's Llama does."""
        if case.interleaved:
            z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * c
            return torch.view_as_real(z).flatten(-2).to(dtype)
        u, v = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
        return joined(x, x[..., :rotary] * c + torch.cat((-v, u), -1) * s)

    def shortest(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Rotate by what compiles best: half-width tables, and no copy of a half."""
        head = x[..., :rotary]
        u, v = head.unflatten(-1, (-1, 2)).unbind(-1) if case.interleaved else head.chunk(2, -1)
        y = u * c - v * s, v * c + u * s
        return joined(x, torch.stack(y, -1).flatten(-2) if case.interleaved else torch.cat(y, -1))

    def over(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.copy_(shortest(x, c, s))

    def of_all(
        rotate: Callable[..., torch.Tensor], tables: Sequence[torch.Tensor], compiles: bool
    ) -> Call:
        def both(xs: Tensors, c: torch.Tensor, s: torch.Tensor) -> Tensors:
            return tuple(rotate(x, c, s) for x in xs)

        call = torch.compile(both, dynamic=False) if compiles else both
        own = [t.unsqueeze(heads) for t in tables]
        return lambda: call(xs, *own)

    spec = RopeSpec(width, rotary_dim=case.rotary_dim, interleaved=case.interleaved)
    layout, in_place = "bhsd" if case.token_axis == 2 else "bshd", case.work == "in place"
    by, by_tables = (
        (rotate_qk_, apply_rotary_pos_emb_) if in_place else (rotate_qk, apply_rotary_pos_emb)
    )
    q, k = (*xs, None)[:2]
    own, kind = (half, "half") if case.interleaved else (cat, "cat")
    more: dict[str, Any] = {"interleaved": case.interleaved, "tables": kind}
    prepared = spec.at(where)
    runs: dict[str, Call] = {
        "ours, a spec": lambda: by(q, k, spec, where, layout=layout),
        "ours, prepared": lambda: by(q, k, prepared, layout=layout),
        "ours, tables": lambda: by_tables(q, k, *own, heads, **more),
    }
    if not case.interleaved:
        runs["ours, half tables"] = lambda: by_tables(q, k, *half, heads, tables="half")
    if case.only_tables:
        runs = {name: call for name, call in runs.items() if "tables" in name}
    runs["eager"] = of_all(eager, [polar, polar] if case.interleaved else cat, False)
    runs["compiled"] = of_all(shortest, half, True)
    if in_place:
        runs["compiled, over its input"] = of_all(over, half, True)
    if rotary % 32:
        runs["compiled, as eager"] = of_all(eager, cat, True)
    wide = [t.unsqueeze(heads) for t in whole]
    return runs, tuple(shortest(x.double(), *wide) for x in xs)


def with_gradients(runs: Mapping[str, Call], xs: Tensors, grads: Tensors) -> dict[str, Call]:
    """Return calls that also compute the gradients of the tensors."""

    def trained(call: Call) -> Call:
        def both() -> Tensors:
            ys = [y for y in call() if y is not None]
            return (*ys, *torch.autograd.grad(ys, xs, grads))

        return both

    return {name: trained(call) for name, call in runs.items()}


def wrong_ones(runs: Mapping[str, Call], right: Tensors, renew: Call) -> set[str]:
    """Return the calls whose first results are wrong; raise an error if one of ours is among them."""
    wrong = set()
    for name, call in runs.items():
        renew()
        for got, want in zip([y for y in call() if y is not None], right):
            y, z = (
                t.detach().flatten(0, 2)[:: t.numel() // t.shape[-1] // 4096 | 1]
                for t in (got, want)
            )
            error = (y.double() - z).abs().max() / z.abs().max()
            if not error < ERROR[got.dtype]:
                wrong.add(name)
                if name.startswith("ours"):
                    raise RuntimeError(
                        f"the results of {name} are off by {error:.1e} of the largest"
                    )
    return wrong


def medians(runs: Mapping[str, Call], renew: Call) -> tuple[dict[str, float], bool]:
    """Return the median seconds of each call, and whether other processes took a tenth of a core meanwhile.

    Calls alternate in random order, each after an untimed call of its own; what is three times slower than the
    fastest takes part in every fourth round.
    """
    first = {name: min(timeit.repeat(call, number=1)) for name, call in runs.items()}
    fastest = min(first.values())
    for _ in range(3):
        times: dict[str, list[float]] = {name: [] for name in runs}
        start, before, turn = time.perf_counter(), _busy(), 0
        while turn < 13 or time.perf_counter() < start + 2.2:
            for name in random.sample(list(runs), len(runs)):
                if turn % 4 == 0 or first[name] < 3 * fastest:
                    count = max(1, min(200, int(2e-3 / first[name])))
                    renew()
                    runs[name]()
                    times[name].append(timeit.timeit(runs[name], number=count) / count)
            turn += 1
        noisy = (_busy() - before) / (time.perf_counter() - start) >= 0.1
        if not noisy:
            break
    return {name: statistics.median(each) for name, each in times.items()}, noisy


def _busy() -> float:
    """Return the seconds of all cores that other processes used so far; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    return (
        sum(map(int, stat.read_text().split()[1:4])) / os.sysconf("SC_CLK_TCK")
        - time.process_time()
    )


def measure(case: Case, kind: str) -> Times:
    """Measure a case once, in a dtype and with one or two threads."""
    torch.set_num_threads(2 if kind.endswith("x2") else 1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    xs = tensors_of(case, DTYPES[kind[:4]])
    saved, training = [x.clone() for x in xs], case.work == "training"
    runs, right = contenders(case, xs)
    if training:
        grads = tuple(torch.randn_like(x) for x in xs)
        xs = tuple(x.requires_grad_() for x in xs)
        runs = with_gradients(runs, xs, grads)

    def renew() -> None:
        if case.work == "in place":
            for x, y in zip(xs, saved):
                x.copy_(y)

    with torch.set_grad_enabled(training):
        wrong = wrong_ones(runs, right, renew)
        found, noisy = medians(runs, renew)
    ours, eager, compiled = (
        min(t for name, t in found.items() if name.startswith(start))
        for start in ("ours", "eager", "compiled")
    )
    return Times(eager / ours, compiled / ours, noisy, bool(wrong))


def page(files: Sequence[Path]) -> str:
    """Return a table of the results of files, one column for each."""
    every = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    machines = [each["environment"] for each in every]
    long_names = [f"{one['processor']}, {one['instruction_set']}" for one in machines]
    names = [name.replace("(R)", "").replace(" Processor", "") for name in long_names]
    rows = []
    for results in zip(*(each["cases"] for each in every), strict=True):
        cells = []
        for one in results:
            better = sorted(map(min, zip(one["eager"], one["compiled"])))
            low, middle, high = better[0], statistics.median(better), better[-1]
            text = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            cells.append(f"**{text}**" if middle < one["goal"] else text)
        rows.append([results[0]["case"], *cells])
    missed = [sum(row[1 + i].startswith("**") for row in rows) for i in range(len(every))]
    kept = "; ".join(f"{len(rows) - m} of {len(rows)} on {s}" for m, s in zip(missed, names))
    last = f"So many reach their goal (1, or 0.9 below 64 Ki elements): {kept}. "
    last += f"{machines[0]['cores']} cores."
    for each, name in zip(every, names):
        if wrong := "; ".join(one["case"] for one in each["cases"] if one.get("wrong")):
            last += f" Torch's results were wrong on {name} in: {wrong}."
    return "\n".join(
        [*table(["time of the better of eager and compiled code / ours", *names], rows), "", last]
    )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grid",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", help="regular expression of cases; with --page, files of results"
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page:
        between_marks(options.page, MARK, page([Path(name) for name in options.names]))
        return 0
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    torch.empty(2**25 - 2**17, dtype=torch.uint8)  # from here on, glibc recycles blocks up to 32 MB
    chosen = [
        (case, kind, f"{case.name}, {kind}")
        for case in CASES
        for kind in case.kinds.split()
        if re.search("".join(options.names), f"{case.name}, {kind}")
    ]
    found: dict[str, list[Times]] = {name: [] for *_, name in chosen}
    missed = 0
    for _ in range(options.runs):
        for case, kind, name in chosen:
            times = measure(case, kind)
            found[name].append(times)
            noise = " (another process was busy)" if times.noisy else ""
            noise += " (torch's results are wrong)" if times.wrong else ""
            print(
                f"{name:32} eager {times.eager:6.2f}  compiled {times.compiled:6.2f}{noise}",
                flush=True,
            )
    cases = []
    for case, _, name in chosen:
        rows, heads, tokens, width = case.shape
        large = rows * (heads + case.k_heads) * tokens * width >= LARGE
        goal = 1.0 if large else 0.9
        missed += statistics.median(min(one[:2]) for one in found[name]) < goal
        ratios = {
            key: [round(getattr(one, key), 3) for one in found[name]]
            for key in ("eager", "compiled")
        }
        wrong = {"wrong": True} if any(one.wrong for one in found[name]) else {}
        cases.append({"case": name, "goal": goal, **ratios, **wrong})
    print(f"{len(cases) - missed} of {len(cases)} cases reach their goal")
    if options.out:
        results = {"environment": asdict(read_environment()), "cases": cases}
        options.out.write_text(written(results), encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
