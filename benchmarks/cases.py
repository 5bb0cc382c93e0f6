"""What is measured, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """One situation in which queries and keys are rotated.

    Attributes:
        name: unique.
        rows, tokens, q_heads, k_heads, head_dim: sizes.
        dtype: of q and k.
        work: "in place", "out of place", or "training": forward and backward, out of place.
        cold: whether caches are flushed before each call.
        strided: q and k as transposed views of (batch, seq, heads, dim), as models hand them over;
            else contiguous (batch, heads, seq, dim).
        interleaved, rotary_dim: the spec.
        positions: "0..n-1", "ids per row", "packed" (sequences in one row) or "M-RoPE" (three
            coordinates, by sections).
        compiled: whether torch.compile of the rotation and of its definition takes part.
        threads: of every contender.
    """

    name: str
    rows: int = 1
    tokens: int = 2048
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    dtype: str = "float32"
    work: str = "in place"
    cold: bool = True
    strided: bool = True
    interleaved: bool = False
    rotary_dim: int | None = None
    positions: str = "0..n-1"
    compiled: bool = False
    threads: int = 2


def _both(case: Case) -> list[Case]:
    return [
        replace(case, name=f"{case.name}, {short}", dtype=dtype)
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16"))
    ]


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

CASES = (
    *(case for group in _IN_BOTH for case in _both(group)),
    Case("prefill 2048, cold, fp16", dtype="float16"),
    Case("prefill 2048, warm, fp16", dtype="float16", cold=False),
    Case("prefill 2048, cold, fp64", dtype="float64"),
)
