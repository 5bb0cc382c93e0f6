"""Measurement of one case: make every contender, check its result, time all of them in turns."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from tightrope import phases
from tightrope.functional import rotate_qk

from . import factors, method
from .case import Case
from .contender import Contender, Made, between, cotangents, positions_of, spec_of

#: Largest error of an element, as a share of the largest channel of its head. Other libraries hold
#: their tables in the dtype of x and round several times: eager bfloat16 is off by up to 2^-5 after a
#: softmax and its backward. Some libraries compute their angles in float32.
TOLERANCE = {"float64": 1e-9, "float32": 2e-3, "bfloat16": 2.0**-4, "float16": 2.0**-7}

#: The same for this library, which by default rounds once.
OWN_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}

#: Elements compared at a time, in float64; elements of the largest case whose expected values are kept.
AT_A_TIME, KEPT = 2**24, 2**26

_NAMES = ("q", "k", "the gradient of q", "the gradient of k")


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and position ids of a case."""
    generator = torch.Generator(case.device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def make(heads: int) -> torch.Tensor:
        shape = (case.rows, case.tokens, heads, case.head_dim)
        x = torch.randn(shape, generator=generator, device=case.device).to(dtype).transpose(1, 2)
        return x if case.strided else x.contiguous()

    ids = torch.arange(case.tokens, device=case.device).expand(case.rows, -1)
    if case.positions == "ids per row":
        # As in decoding: each row continues its own sequence.
        past = 1000 + 17 * torch.arange(case.rows, device=case.device)
        ids = (ids + past[:, None]).contiguous()
    elif case.positions == "ids per head":
        ids = (ids[:, None] + 17 * torch.arange(case.k_heads)[:, None]).contiguous()
    elif case.positions == "packed":
        ids = ids % (case.tokens // 3 + 1)
    elif case.positions == "M-RoPE":
        ids = torch.stack((ids, ids // 7, ids % 31))
    return make(case.q_heads), make(case.k_heads), ids


class WrongError(RuntimeError):
    """The result of a contender is wrong."""


class Part(NamedTuple):
    """The expected results of some tokens, in float64."""

    tokens: slice
    results: tuple[torch.Tensor, ...]


class Expected:
    """The expected results of a case, by the definition in float64, some tokens at a time."""

    def __init__(self, case: Case, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> None:
        self._case, self._ids = case, ids
        self._xs = q, k
        self._grads = cotangents(q, k) if case.work == "training" else ()
        self._kept = list(self._parts()) if case.elements <= KEPT else None

    def __iter__(self) -> Iterator[Part]:
        return self._parts() if self._kept is None else iter(self._kept)

    def _parts(self) -> Iterator[Part]:
        tokens = self._case.tokens
        step = max(1, AT_A_TIME * tokens // self._case.elements)
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            q, k = (x[:, :, part] for x in self._xs)
            grads = [grad[:, :, part] for grad in self._grads]
            yield Part(part, expected(self._case, q, k, self._ids[..., part], grads, part))


def expected(
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    ids: torch.Tensor,
    grads: Iterable[torch.Tensor] = (),
    tokens: slice = slice(None),
) -> tuple[torch.Tensor, ...]:
    """Rotate q and k by the definition in float64.

    Args:
        grads: gradients of the rotated q and k; if given, the gradients of q and k are returned after
            the results.
        tokens: the tokens of the case that q and k hold.
    """
    where = ids if ids.dim() == 2 else positions_of(case, ids)
    f_and_p = factors.arguments(case, [one.double() for one in factors.tensors_of(case)])
    f_and_p["inverse"] = case.work == "backward"
    if case.phases is not None:
        angle = factors.increments_of(case).double()
        angle = angle.cumsum(2) if case.phases == "running" else angle
        f_and_p["phases"] = phases.given(angle[:, :, tokens])
    spec = spec_of(case)
    given = [grad.double() for grad in grads]
    a, b = (x.detach().double().requires_grad_(bool(given)) for x in (q, k))
    rotate = between(
        case, lambda q, k: rotate_qk(q, k, spec, where, backend="reference", **f_and_p)
    )
    y, z = rotate(a, b)
    found = torch.autograd.grad((y, z), (a, b), given) if given else ()
    return (y.detach(), z.detach(), *found)


def mismatch(
    case: Case, made: Made, right: Iterable[Part], tolerance: dict[str, float] = TOLERANCE
) -> str | None:
    """Compare each element of a contender's result; return why it is wrong, or None.

    Args:
        right: an :class:`Expected`, or its parts.
        tolerance: largest error of an element, by the dtype of the case.
    """
    if made.result is None:
        return None
    wrong, compared, worst, first = 0, 0, 0.0, ""
    for tokens, wanted in right:
        for name, got, want in zip(_NAMES, made.result, wanted, strict=False):
            part = got[:, :, tokens]
            if part.shape != want.shape or len(made.result) != len(wanted):
                return f"its results have wrong shapes: {[tuple(x.shape) for x in made.result]}"
            compared += want.numel()
            largest = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            off = (part.double() - want).abs() / largest
            bad = ~(off <= tolerance[case.dtype])  # true for NaN
            if not bad.any():
                continue
            wrong += int(bad.sum())
            worst = max(worst, off.nan_to_num(float("inf")).max().item())
            row, head, token, channel = (int(i) for i in bad.nonzero()[0])
            found, sought = part[row, head, token, channel].item(), want[row, head, token, channel]
            token += tokens.start
            first = first or (
                f"{name}[{row}, {head}, {token}, {channel}]: {found:.4g} instead of {sought:.4g}"
            )
    if compared != sum(x.numel() for x in made.result):
        return f"its results have wrong shapes: {[tuple(x.shape) for x in made.result]}"
    if not wrong:
        return None
    return (
        f"its result is off by {worst:.2g} of a head's largest channel: {wrong:,} of {compared:,} "
        f"elements are wrong; the first is {first}"
    )


def check(
    contender: Contender,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    ids: torch.Tensor,
    right: Iterable[Part],
) -> Made:
    """Make a contender and check its result.

    Raises:
        WrongError: the result is wrong. Exceptions of `contender.make` are not caught.
    """
    if q.device.type != "cpu":
        _poison(q, k)
    made = contender.make(case, q, k, ids)
    # With other roundings, given tables or neighbouring operations, errors are those of eager code.
    exact = case.rounding == "once" and case.tables is None and not case.neighbours
    ours = exact and contender.name == "tightrope"
    reason = mismatch(case, made, right, OWN_TOLERANCE if ours else TOLERANCE)
    if reason is not None:
        raise WrongError(reason)
    return made


def _poison(*xs: torch.Tensor) -> None:
    """Overwrite freed memory, which may hold the right results of an earlier contender, with NaN."""
    for spoilt in [torch.empty_like(x) for _ in range(2) for x in xs]:
        spoilt.fill_(float("nan"))


def measure(
    case: Case,
    contenders: Iterable[Contender],
    *,
    runs: int,
    rounds: int,
    wanted: re.Pattern[str],
) -> dict[str, Any]:
    """Time all contenders of a case on its device.

    Args:
        contenders: the first is this library; a ratio is its time divided by another contender's.
        runs: how often everything is measured.
        rounds: turns of each contender in a run.
        wanted: contenders whose name it matches take part; the first always does.

    Returns:
        ``case``; ``seconds`` of each run and sorted ``ratios``, by contender; ``absent``, the reason for
        each contender that did not take part.

    Raises:
        RuntimeError: this library's own result is wrong.
    """
    ours, *others = contenders
    threads = torch.get_num_threads()
    case = replace(case, threads=case.threads or threads)
    torch.set_num_threads(case.threads)
    if "torch._dynamo" in sys.modules:
        # Compilations for other cases count towards torch's limit of recompilations.
        torch._dynamo.reset()
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
    right = Expected(case, q, k, ids)
    graphed = case.graph and case.device != "cpu"
    calls: dict[str, method.Call] = {}
    absent: dict[str, str] = {}
    # Each contender has its own copies, with the same strides, as some write to them.
    own: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def admit(contender: Contender) -> None:
        xs = q.clone(), k.clone()
        call = check(contender, case, *xs, ids, right).call
        calls[contender.name] = method.captured(call) if graphed else call
        own[contender.name] = xs

    try:
        admit(ours)
    except WrongError as error:
        raise RuntimeError(
            f"[measure] {ours.name} must be right in {case.name} but {error}."
        ) from None
    for contender in others:
        selected = wanted.search(contender.name) is not None
        reason = contender.why_not(case) if selected else "not selected"
        if reason is None:
            reason = _attempt(partial(admit, contender))
        if reason is not None:
            absent[contender.name] = reason
    rng = random.Random(0)
    rest = any(contender.own_threads for contender in others if contender.name in calls)
    renew: dict[str, method.Call] = {}
    if case.work == "in place" and not factors.is_alone(case):
        renew = {name: partial(_restore, own[name], (q, k)) for name in calls}
    timed = partial(
        method.medians,
        calls,
        cold=case.cold,
        rounds=rounds,
        rng=rng,
        rest=rest,
        renew=renew,
        device=case.device,
        each=method.GRAPHED if graphed else 1,
    )
    results = [timed() for _ in range(runs)]
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


def _attempt(admit: method.Call) -> str | None:
    """Return why a contender cannot take part, or None; its failure does not end the measurement."""
    try:
        admit()
    except WrongError as error:
        return str(error)
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return f"it failed: {type(error).__name__}: {first[:200]}"
    return None
