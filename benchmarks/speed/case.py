"""A benchmark case, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """A rotation of queries and keys to measure: sizes, dtype, positions, prologue f and epilogue P.

    Attributes:
        name: a unique name.
        rows, tokens, q_heads, k_heads, head_dim: sizes.
        dtype: the dtype of q and k.
        work: "in place"; "out of place"; "training", which is forward and backward, out of place;
            or "backward", the backward pass alone, where q and k are the gradients that it rotates.
        cold: whether caches are flushed before each call.
        strided: whether q and k are transposed views of (batch, seq, heads, dim), as models pass
            them; if not, they are contiguous (batch, heads, seq, dim).
        interleaved, rotary_dim: as in :class:`tightrope.RopeSpec`; rotary_dim None means head_dim.
        positions: "0..n-1", "ids per row", "ids per head" (q and k with the same heads), "packed" (sequences
            in one row) or "M-RoPE" (three coordinates, by sections).
        act: prologue f, by its name in :data:`tightrope.activations.ACTS`; a norm has a weight for q
            and one for k.
        gate: epilogue P: "exp", a factor per head and channel, or "slope", which also depends on the
            position.
        rounding: as in :func:`tightrope.functional.rotate`. If it is "wide", the eager
            code also rounds as "wide"; otherwise as "each".
        tables: format of given tables, rotary_dim wide and in the dtype of q; None to rotate by the
            angles of the spec.
        phases: angles for each token, head and pair in place of those of the positions: "given", or
            "running", the sums of increments, whose cost counts. All heads share them if q and k
            differ in the number of heads.
        compiled: whether contenders that compile our rotation or its definition take part.
        threads: number of threads of every contender; 0 for torch's current number.
        device: the device of q and k: "cpu" or "cuda".
        neighbours: whether q and k are scaled before and after the rotation, for a compiler to fuse.
        graph: whether a CUDA graph replays the calls, which excludes the host's time.
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
    rounding: str = "once"
    tables: str | None = None
    phases: str | None = None
    compiled: bool = False
    threads: int = 0
    device: str = "cpu"
    neighbours: bool = False
    graph: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of q and k together."""
        return self.rows * self.tokens * (self.q_heads + self.k_heads) * self.head_dim

    @property
    def moved(self) -> int:
        """Bytes that must be read and written: each input once, each result once."""
        each = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        passes = 2 if self.work != "training" else 4 if self.act is None else 5
        moved = passes * self.elements * each
        if self.phases is not None:
            # As int32 in each direction.
            pairs = (self.rotary_dim or self.head_dim) // 2
            moved += (passes // 2) * self.rows * self.tokens * self.angle_heads * pairs * 4
        return moved

    @property
    def angle_heads(self) -> int:
        """Number of heads of the phases."""
        return self.q_heads if self.q_heads == self.k_heads else 1


def in_both(case: Case) -> list[Case]:
    """Return a case in float32 and in bfloat16."""
    return [
        replace(case, name=f"{case.name}, {short}", dtype=dtype)
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16"))
    ]
