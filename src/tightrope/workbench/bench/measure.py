"""One case measured: every contender made, its result checked, and all of them timed in turns."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ... import positions
from ...functional import rotate_qk
from . import factors, method
from .case import Case
from .contender import Contender, Made, spec_of

# The gate is there to catch wrong pairings, signs and positions. Peers hold their tables in the
# dtype of x, so a 16-bit peer may be off by a few of its roundings.
GATE = {"float64": 1e-9, "float32": 2e-3, "bfloat16": 0.2, "float16": 0.03}


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and ids of a case."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def make(heads: int) -> torch.Tensor:
        shape = (case.rows, case.tokens, heads, case.head_dim)
        x = torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)
        return x if case.strided else x.contiguous()

    ids = torch.arange(case.tokens).expand(case.rows, -1)
    if case.positions == "ids per row":
        ids = (ids + torch.arange(case.rows)[:, None]).contiguous()
    elif case.positions == "packed":
        ids = ids % (case.tokens // 3 + 1)
    elif case.positions == "M-RoPE":
        ids = torch.stack((ids, ids // 7, ids % 31))
    return make(case.q_heads), make(case.k_heads), ids


def expected(
    case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q and k by the definition in float64."""
    with torch.no_grad():
        where = positions.multi_axis(ids) if ids.dim() == 3 else ids
        outer = factors.arguments(case, [one.double() for one in factors.tensors_of(case)])
        return rotate_qk(q.double(), k.double(), spec_of(case), where, backend="reference", **outer)


def gate(case: Case, made: Made, wanted: tuple[torch.Tensor, ...]) -> str | None:
    """Why a contender's result is wrong, or None."""
    if made.result is None:
        return None
    for got, want in zip(made.result, wanted, strict=True):
        error = (got.double() - want).abs().max().item()
        # Of small results, a softmax's say, a share of the largest.
        if not error <= GATE[case.dtype] * min(1.0, want.abs().max().item()):
            return f"its result is off by {error:.2g}"
    return None


def measure(
    case: Case,
    contenders: Iterable[Contender],
    *,
    runs: int,
    rounds: int,
    wanted: re.Pattern[str],
) -> dict[str, Any]:
    """Time all contenders of a case.

    Args:
        contenders: the first is this library; ratios are those of its time to the others'.
        runs: how often everything is measured.
        rounds: turns of each contender in a run.
        wanted: who takes part, by a search in its name; the first always does.

    Returns:
        The case; by name the seconds of each run and the sorted ratios; who was absent, and why.

    Raises:
        RuntimeError: this library's own result is wrong.
    """
    ours, *others = contenders
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        return _measure(case, ours, others, runs, rounds, wanted)
    finally:
        torch.set_num_threads(threads)


def _measure(
    case: Case,
    ours: Contender,
    others: list[Contender],
    runs: int,
    rounds: int,
    wanted: re.Pattern[str],
) -> dict[str, Any]:
    q, k, ids = inputs(case)
    right = expected(case, q, k, ids)
    calls: dict[str, method.Call] = {}
    absent: dict[str, str] = {}
    # Copies keep the strides; each contender has its own, as some change theirs.
    own = {ours.name: (q.clone(), k.clone())}
    made = ours.make(case, *own[ours.name], ids)
    reason = gate(case, made, right)
    if reason is not None:
        raise RuntimeError(f"[measure] {ours.name} must be right in {case.name} but {reason}.")
    calls[ours.name] = made.call
    for contender in others:
        asked = wanted.search(contender.name) is not None
        reason = contender.why_not(case) if asked else "not asked for"
        if reason is None:
            own[contender.name] = q.clone(), k.clone()
            made_or_why = _attempt(contender, case, *own[contender.name], ids)
            if isinstance(made_or_why, str):
                reason = made_or_why
            else:
                made, reason = made_or_why, gate(case, made_or_why, right)
        if reason is None:
            calls[contender.name] = made.call
        else:
            absent[contender.name] = reason
    rng = random.Random(0)
    rest = any(contender.own_threads for contender in others if contender.name in calls)
    renew: dict[str, method.Call] = {}
    if case.work == "in place" and not factors.is_alone(case):
        renew = {name: partial(_restore, own[name], (q, k)) for name in calls}
    results = [
        method.medians(calls, cold=case.cold, rounds=rounds, rng=rng, rest=rest, renew=renew)
        for _ in range(runs)
    ]
    return {
        "case": asdict(case),
        "seconds": {name: [run[name] for run in results] for name in calls},
        "ratios": {
            name: sorted(run[ours.name] / run[name] for run in results)
            for name in calls
            if name != ours.name
        },
        "absent": absent,
    }


def _restore(own: Iterable[torch.Tensor], originals: Iterable[torch.Tensor]) -> None:
    for x, original in zip(own, originals, strict=True):
        x.copy_(original)


def _attempt(
    contender: Contender, case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor
) -> Made | str:
    """A contender ready to be timed, or why it is not: others' failures end nobody's measurement."""
    try:
        return contender.make(case, q, k, ids)
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return f"it failed: {type(error).__name__}: {first[:200]}"
