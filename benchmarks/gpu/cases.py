"""The GPU benchmark cases, the most important first, because time may run out."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..speed import Case
from .plugin import OPTIONS

_LONG = Case(
    "12 x 32768, 12 heads", 12, 32768, 12, 12, dtype="bfloat16", work="out of place", device="cuda"
)
_PREFILL = replace(_LONG, name="prefill 32k", rows=1, q_heads=32, k_heads=8)
_DECODE = replace(_PREFILL, tokens=1, work="in place", positions="ids per row", cold=False)

#: The cases with a budget relative to a copy's bandwidth.
SHARES = (
    _LONG,
    _PREFILL,
    replace(_LONG, name="12 x 32768, 12 heads, backward", work="backward"),
    replace(_PREFILL, name="prefill 32k, backward", work="backward"),
)


def _both(name: str, **changes: object) -> tuple[Case, ...]:
    """Return two variants of the prefill case, forward and training, with compiled contenders."""
    forward = replace(_PREFILL, name=f"{name} 32k", compiled=True, **changes)
    return forward, replace(forward, name=f"{name} 32k, training", work="training")


#: The cases in which all contenders take turns.
CASES = (
    replace(_LONG, compiled=True),
    *_both("prefill"),
    replace(_PREFILL, name="prefill 32k, in place", work="in place"),
    *(
        replace(_DECODE, name=f"decode {rows}{', graph' * graph}", rows=rows, graph=graph)
        for rows in (1, 32, 256)
        for graph in (False, True)
    ),
    replace(_PREFILL, name="prefill 2k", tokens=2048),
    replace(_PREFILL, name="prefill 2k, in place", tokens=2048, work="in place"),
    replace(_PREFILL, name="prefill 32k, interleaved", interleaved=True),
    *_both("silu", act="silu"),
    *_both("rms_norm", act="rms_norm"),
    *_both("neighbours", neighbours=True),
    replace(_PREFILL, name="packed 32k", positions="packed"),
    replace(_PREFILL, name="M-RoPE 32k", positions="M-RoPE"),
    replace(_PREFILL, name="phases 32k", phases="given"),
    *_both("running phases", phases="running"),
    *_both("running phases, per head", phases="running", q_heads=16, k_heads=16),
    replace(_DECODE, name="running phases, decode 32", rows=32, phases="running"),
    replace(_PREFILL, name="softmax 32k", act="softmax"),
    replace(_PREFILL, name="slope gate 32k", gate="slope"),
    replace(_PREFILL, name="exp gate 32k", gate="exp"),
    replace(_PREFILL, name="prefill 32k, float32", dtype="float32"),
)

#: Number of copies of q and k that must fit in GPU memory: each contender has its own, and eager
#: contenders need several more.
COPIES = 40


def small(case: Case, tokens: int = 5) -> Case:
    """Return a tiny case: at most 2 rows and `tokens` tokens, 2 query heads, 16 channels.

    It has 1 key head, or 2 if the case has as many key heads as query heads.
    """
    rows, tokens = min(case.rows, 2), min(case.tokens, tokens)
    k_heads = 2 if case.k_heads == case.q_heads else 1
    return replace(case, rows=rows, tokens=tokens, q_heads=2, k_heads=k_heads, head_dim=16)


def sized(case: Case) -> Case:
    """Return a case that fits the device: if necessary with fewer rows, then with fewer tokens.

    In a dry run it is a tiny case on the CPU.
    """
    if OPTIONS.dry:
        return replace(small(case), device="cpu", threads=1)
    room = torch.cuda.mem_get_info()[1]
    return fitted(case, room // COPIES)


def fitted(case: Case, room: int) -> Case:
    """Return a case whose q and k take at most `room` bytes.

    >>> fitted(CASES[0], 10**9).rows, fitted(CASES[0], 10**12) == CASES[0]
    (3, True)
    """
    for name, least in (("rows", 1), ("tokens", 16)):
        while case.moved // 2 > room and getattr(case, name) > least:
            case = replace(case, **{name: max(least, getattr(case, name) // 2)})
    return case
