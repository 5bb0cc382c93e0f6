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
        act: f, by its name in :data:`tightrope.activations.ACTS`; a norm has a weight for q and one
            for k.
        gate: P: "exp", a factor for each head and channel, or "slope", one that follows the position.
        compiled: whether torch.compile of the rotation and of its definition takes part.
        threads: of every contender; 0 for as many as torch uses.
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
    act: str | None = None
    gate: str | None = None
    compiled: bool = False
    threads: int = 0


def in_both(case: Case) -> list[Case]:
    """A case in float32 and in bfloat16."""
    return [
        replace(case, name=f"{case.name}, {short}", dtype=dtype)
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16"))
    ]
