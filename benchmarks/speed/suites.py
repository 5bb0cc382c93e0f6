"""The suites of benchmark cases. `python -m benchmarks.speed --suite NAME` runs one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .case import Case, in_both


def _in_both(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(each for case in cases for each in in_both(case))


#: For users: the calls of a model, with the sizes of Llama 3 8B's attention.
SHORT = _in_both(
    (
        Case("prefill 2048, in place"),
        Case("prefill 2048, out of place", work="out of place"),
        Case("training 2048", work="training"),
        Case("prefill 2048, interleaved", interleaved=True),
        Case("M-RoPE 2048, in place", positions="M-RoPE"),
        Case("decode 1 token, out of place", tokens=1, cold=False, work="out of place"),
        Case("decode 32 rows, in place", rows=32, tokens=1, cold=False),
    )
)

_ROTATION = _in_both(
    (
        Case("prefill 128, cold", tokens=128),
        Case("prefill 128, warm", tokens=128, cold=False),
        Case(
            "prefill 128, warm, out of place",
            tokens=128,
            cold=False,
            work="out of place",
            compiled=True,
        ),
        Case("prefill 2048, cold"),
        Case("prefill 2048, warm", cold=False),
        Case("prefill 8192, cold", tokens=8192),
        Case("prefill 2048, cold, 1 thread", threads=1),
        Case("prefill 2048, out of place", work="out of place", compiled=True),
        Case("training 2048", work="training", compiled=True),
        Case("decode 1 row", tokens=1, cold=False),
        Case(
            "decode 1 row, out of place", tokens=1, cold=False, work="out of place", compiled=True
        ),
        Case("decode 32 rows", rows=32, tokens=1, cold=False),
        Case("decode 256 rows", rows=256, tokens=1, cold=False),
        Case("interleaved 2048, cold", interleaved=True),
        Case("partial 64 of 128, cold", rotary_dim=64),
        Case("contiguous 2048, cold", strided=False),
        Case("ids per row, 4 x 512, cold", rows=4, tokens=512, positions="ids per row"),
        Case("packed 2048, cold", positions="packed"),
        Case("M-RoPE 2048, cold", positions="M-RoPE"),
        Case("ids per head 2048, k 32 heads, cold", k_heads=32, positions="ids per head"),
        Case("head_dim 64, cold", head_dim=64),
        Case("head_dim 80, cold", head_dim=80),
        Case("head_dim 256, cold", head_dim=256, q_heads=16, k_heads=4),
    )
)

# Cases with f or P, compared with the rotation alone and with torch's functions in sequence.
_F_AND_P: dict[str, dict[str, Any]] = {
    **{act: {"act": act} for act in ("relu", "silu", "rms_norm", "gelu", "softmax")},
    "exp gate": {"gate": "exp"},
    "slope gate": {"gate": "slope"},
}
_WITH = _in_both(
    case
    for name, given in _F_AND_P.items()
    for case in (
        Case(f"with {name}, 2048, cold", **given),
        Case(f"with {name}, 2048, warm", cold=False, **given),
        Case(f"with {name}, training 2048", work="training", compiled=True, **given),
    )
)

# Compared with the same rotation rounded once. For cases with tables, that rotation has "cat"
# tables, or "repeat" tables if pairs are interleaved.
_ROUNDINGS = _in_both(
    (
        *(
            Case(f"{work}2048, rounding {rounding}", work=work_, rounding=rounding)
            for rounding in ("wide", "each")
            for work, work_ in (("", "in place"), ("training ", "training"))
        ),
        Case("tables 2048, cat", tables="cat"),
        Case("tables 2048, full", tables="full"),
        Case("tables 2048, full, rounding each", tables="full", rounding="each"),
        Case("tables 2048, full, interleaved", tables="full", interleaved=True),
    )
)

# Compared with frequencies per head, and with eager code that forms the angles in float32.
_PHASES = _in_both(
    Case(f"phases 2048, k 32 heads, {name}", k_heads=32, phases=kind, work=work)
    for name, kind, work in (
        ("given", "given", "in place"),
        ("running", "running", "out of place"),
        ("running, training", "running", "training"),
    )
)

#: For docs/benchmarks.md, and for comparing the library before and after a change.
FULL = (
    *_ROTATION,
    *_WITH,
    *_ROUNDINGS,
    *_PHASES,
    Case("prefill 2048, cold, fp16", dtype="float16"),
    Case("prefill 2048, warm, fp16", dtype="float16", cold=False),
    Case("prefill 2048, cold, fp64", dtype="float64"),
)

#: The cases of `python -m benchmarks.speed`, and of `--suite` with another name.
SUITES = {"short": SHORT, "full": FULL}
