"""The rotations of the demo, timed with the method of `benchmarks.speed`."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import CONTENDERS, FLOORS, Case, floor_of, in_both, measure
from benchmarks.speed.contenders import rotate_half

from ...examples.train_bytes import Attention, Size

Timing = dict[str, Any]
"""Result of :func:`benchmarks.speed.measure` for a case."""

#: Runs of each case; their spread shows whether other processes used the cores.
RUNS = 3
# With a larger ratio between the slowest and the fastest run, the times are unreliable.
_QUIET = 1.5
_WANTED = re.compile(f"^({'|'.join((*FLOORS, 'eager'))})$")


class EagerAttention(Attention):
    """The example's attention, rotating like model files: float32 tables and `rotate_half`."""

    def rotate(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Attention.rotate`."""
        cos, sin = _tables(self.head_dim, self.spec.base, offset, offset + q.shape[-2])
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@lru_cache(maxsize=1)
def _tables(head_dim: int, base: float, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions start … stop − 1, computed once for all layers as in model files."""
    inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(start, stop)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def cases(tokens: int, q_heads: int, k_heads: int, head_dim: int) -> list[Case]:
    """Return the cases: a long prompt, also in training, and one token; in float32 and bfloat16."""

    works = ("in place", "out of place", "training")
    prompt = Case(
        f"{tokens} tokens", tokens=tokens, q_heads=q_heads, k_heads=k_heads, head_dim=head_dim,
        cold=tokens >= 1024, threads=torch.get_num_threads(),
    )  # fmt: skip
    token = replace(prompt, name="1 token", tokens=1, cold=False)
    made = [replace(prompt, work=work) for work in works]
    made += [replace(token, work=work) for work in works[:2]]
    return [each for case in made for each in in_both(case)]


def case_in_model(size: Size) -> Case:
    """Return the case of one layer of the example's model, forward and backward."""
    return Case(
        "one layer of the model", rows=size.batch, tokens=size.context, q_heads=size.heads,
        k_heads=size.heads, head_dim=size.head_dim, work="training", cold=False,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def time_case(case: Case, rounds: int) -> Timing:
    """Time tightrope, the eager expression and memory traffic alone."""
    return measure(case, CONTENDERS, runs=RUNS, rounds=rounds, wanted=_WANTED)


def seconds(timing: Timing, name: str) -> float:
    """Return the median seconds of "tightrope", "eager" or "floor" (`neg_` in place, else `clone`)."""
    taken = timing["seconds"]
    return float(median(floor_of(taken) if name == "floor" else taken[name]))


def is_steady(timing: Timing) -> bool:
    """Return whether each contender's slowest run took at most 1.5 times as long as its fastest."""
    return all(max(runs) <= _QUIET * min(runs) for runs in timing["seconds"].values())
