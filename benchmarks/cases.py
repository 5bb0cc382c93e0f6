"""What is measured for the README and from change to change, as data."""

from __future__ import annotations

from tightrope.workbench.bench.case import Case, in_both

_IN_BOTH = (
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
    Case("decode 1 row, out of place", tokens=1, cold=False, work="out of place", compiled=True),
    Case("decode 32 rows", rows=32, tokens=1, cold=False),
    Case("decode 256 rows", rows=256, tokens=1, cold=False),
    Case("interleaved 2048, cold", interleaved=True),
    Case("partial 64 of 128, cold", rotary_dim=64),
    Case("contiguous 2048, cold", strided=False),
    Case("ids per row, 4 x 512, cold", rows=4, tokens=512, positions="ids per row"),
    Case("packed 2048, cold", positions="packed"),
    Case("M-RoPE 2048, cold", positions="M-RoPE"),
    Case("head_dim 64, cold", head_dim=64),
    Case("head_dim 80, cold", head_dim=80),
    Case("head_dim 256, cold", head_dim=256, q_heads=16, k_heads=4),
)

# What f and P cost beside the rotation alone, and against the same composed of torch's functions.
_OUTER = {
    **{act: {"act": act} for act in ("relu", "silu", "rms_norm", "gelu", "softmax")},
    "exp gate": {"gate": "exp"},
    "slope gate": {"gate": "slope"},
}
_WITH = (
    case
    for name, outer in _OUTER.items()
    for case in (
        Case(f"with {name}, 2048, cold", **outer),
        Case(f"with {name}, 2048, warm", cold=False, **outer),
        Case(f"with {name}, training 2048", work="training", compiled=True, **outer),
    )
)

CASES = (
    *(case for group in _IN_BOTH for case in in_both(group)),
    *(case for group in _WITH for case in in_both(group)),
    Case("prefill 2048, cold, fp16", dtype="float16"),
    Case("prefill 2048, warm, fp16", dtype="float16", cold=False),
    Case("prefill 2048, cold, fp64", dtype="float64"),
)
