"""Rotations timed against the eager expression and against touching each byte once."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .. import RopeSpec
from ..functional import rotate_qk, rotate_qk_
from ._interrupt import Interrupt
from ._rotations import eager_rotate_qk, eager_tables, tightrope_rotate_qk

IN_PLACE = "in place"
FORWARD = "forward"
BOTH_WAYS = "forward + backward"

_FLUSH_BYTES = 128 * 2**20
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 31
# A measurement that is shorter than this says more about the clock than about the call.
_SHORTEST_MEASUREMENT = 5e-4
# Beyond this ratio of median to fastest call, other processes had the cores.
_QUIET = 1.5

METHOD = (
    "Medians of interleaved calls in random order on transposed views, as models hand them over; "
    "for sequences of 1024 and more, caches are flushed before each call (128 MB touched). "
    "Eager is out of place with tables in the dtype of x; neg_ reads and writes each byte of "
    "q and k once."
)


@dataclass(frozen=True)
class Case:
    """Which rotation of which tensors is timed."""

    label: str
    what: str
    dtype: torch.dtype
    batch: int
    length: int
    q_heads: int
    k_heads: int
    head_dim: int
    position: int = 0

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def cold(self) -> bool:
        return self.length >= 1024


@dataclass(frozen=True)
class Timing:
    """Median seconds of each contestant in one case."""

    case: Case
    rounds: int
    tightrope: float
    eager: float
    neg: float
    unsteadiness: float
    """The largest ratio of median to fastest call among the contestants."""

    @property
    def steady(self) -> bool:
        return self.unsteadiness <= _QUIET


def large_cases(length: int, q_heads: int, k_heads: int, head_dim: int) -> list[Case]:
    """A long prompt and the decoding of one token, in float32 and bfloat16."""
    heads = (q_heads, k_heads, head_dim)
    dtypes = (torch.float32, torch.bfloat16)
    prompt = [
        Case(f"{length} tokens", what, dtype, 1, length, *heads)
        for what in (IN_PLACE, FORWARD, BOTH_WAYS)
        for dtype in dtypes
    ]
    decode = [
        Case("1 token", what, dtype, 1, 1, *heads, position=length)
        for what in (IN_PLACE, FORWARD)
        for dtype in dtypes
    ]
    return prompt + decode


def time_case(case: Case, *, seconds: float, seed: int, interrupt: Interrupt) -> Timing | None:
    """Time one case for about `seconds`; None if Ctrl-C came before there were enough rounds."""
    with torch.set_grad_enabled(case.what == BOTH_WAYS):
        return _time(case, seconds, seed, interrupt)


def _time(case: Case, seconds: float, seed: int, interrupt: Interrupt) -> Timing | None:
    contestants = _contestants(case, seed)
    flush = torch.zeros(_FLUSH_BYTES // 4) if case.cold else None
    order = random.Random(seed)
    repeats = {name: _repeats(call) for name, call in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    rounds = 0
    while rounds < _LEAST_ROUNDS or (
        rounds < _MOST_ROUNDS and time.perf_counter() - start < seconds
    ):
        if interrupt.requested:
            return None
        for name in order.sample(sorted(contestants), len(contestants)):
            if flush is not None:
                flush.add_(1.0)
            taken[name].append(_measure(contestants[name], repeats[name]))
        rounds += 1
    medians = {name: median(values) for name, values in taken.items()}
    unsteadiness = max(medians[name] / min(values) for name, values in taken.items())
    return Timing(case, rounds, **medians, unsteadiness=unsteadiness)


def _measure(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _repeats(call: Callable[[], object]) -> int:
    call()
    return max(1, round(_SHORTEST_MEASUREMENT / _measure(call, 3)))


def _contestants(case: Case, seed: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads: int) -> Tensor:
        shape = (case.batch, case.length, heads, case.head_dim)
        return torch.randn(shape, generator=generator).to(case.dtype).transpose(1, 2)

    q, k = tensor(case.q_heads), tensor(case.k_heads)
    spec = RopeSpec(head_dim=case.head_dim)
    rope = spec.at(case.position)
    positions = torch.arange(case.position, case.position + case.length)
    tables = eager_tables(case.head_dim, spec.base, positions)
    cos, sin = (table.to(case.dtype) for table in tables)

    def neg() -> None:
        q.neg_()
        k.neg_()

    calls: dict[str, Callable[[], object]] = {"neg": neg}
    if case.what == IN_PLACE:
        calls["eager"] = lambda: eager_rotate_qk(q, k, cos, sin)
        calls["tightrope"] = lambda: rotate_qk_(q, k, rope, layout="bhsd")
    elif case.what == FORWARD:
        calls["eager"] = lambda: eager_rotate_qk(q, k, cos, sin)
        calls["tightrope"] = lambda: rotate_qk(q, k, rope, layout="bhsd")
    else:
        x = q.detach().requires_grad_(), k.detach().requires_grad_()
        dy = tensor(case.q_heads), tensor(case.k_heads)
        grad = torch.autograd.grad
        calls["eager"] = lambda: grad(eager_rotate_qk(*x, cos, sin), x, dy)
        calls["tightrope"] = lambda: grad(tightrope_rotate_qk(*x, rope), x, dy)
    return calls
