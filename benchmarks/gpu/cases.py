"""What is measured on a GPU, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """One situation in which queries and keys are rotated.

    Attributes:
        name: unique.
        rows, tokens, q_heads, k_heads, head_dim: sizes; no keys for 0 k_heads.
        dtype: of q and k.
        work: "out", "in place", "backward", "training" (forward and backward) or "frequencies" (the
            gradient by learned ones alone).
        interleaved: the pairing.
        positions: "0..n-1", "offset", "ids per row", "packed" or "M-RoPE".
        act, gate: f and P; a gate is "slopes" or "logarithms".
    """

    name: str
    rows: int = 1
    tokens: int = 2048
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    work: str = "out"
    interleaved: bool = False
    positions: str = "0..n-1"
    act: str = "none"
    gate: str = ""

    @property
    def elements(self) -> int:
        """Of q and k."""
        return self.rows * self.tokens * (self.q_heads + self.k_heads) * self.head_dim

    @property
    def moved(self) -> int:
        """The bytes that must be moved: inputs read once, results written once."""
        passes = {"out": 2, "in place": 2, "backward": 2, "training": 4, "frequencies": 2}[
            self.work
        ]
        if self.act != "none" and self.work in ("backward", "training"):
            passes += 1  # f' reads x
        return passes * self.elements * (4 if self.dtype == "float32" else 2)


_LONG = Case("12 x 32768, 12 heads", 12, 32768, 12, 0)
_PREFILL = Case("prefill 32k", 1, 32768)

CASES = (
    _LONG,
    replace(_LONG, name="12 x 32768, 12 heads, backward", work="backward"),
    _PREFILL,
    replace(_PREFILL, name="prefill 32k, backward", work="backward"),
    replace(_PREFILL, name="prefill 32k, training", work="training"),
    replace(_PREFILL, name="prefill 32k, in place", work="in place"),
    replace(_PREFILL, name="prefill 32k, interleaved", interleaved=True),
    replace(_PREFILL, name="prefill 32k, float32", dtype="float32"),
    Case("prefill 2k, in place", work="in place"),
    Case("prefill 2k", work="out"),
    *(
        Case(f"decode {rows}, in place", rows, 1, work="in place", positions="ids per row")
        for rows in (1, 32, 256)
    ),
    Case("packed 32k", 1, 32768, positions="packed"),
    Case("M-RoPE 32k", 1, 32768, positions="M-RoPE"),
    Case("silu 32k", 1, 32768, act="silu"),
    Case("silu 32k, training", 1, 32768, act="silu", work="training"),
    Case("softmax 32k", 1, 32768, act="softmax"),
    Case("rms_norm 32k", 1, 32768, act="rms_norm"),
    Case("rms_norm 32k, training", 1, 32768, act="rms_norm", work="training"),
    Case("slopes 32k", 1, 32768, gate="slopes"),
    Case("gate of channels 32k", 1, 32768, gate="logarithms"),
    Case("frequencies 32k", 1, 32768, work="frequencies"),
)


def small(case: Case) -> Case:
    """The same at a size for Triton's interpreter."""
    heads = min(case.k_heads, 1)
    rows, tokens = min(case.rows, 2), min(case.tokens, 5)
    return replace(case, rows=rows, tokens=tokens, q_heads=2, k_heads=heads, head_dim=16)
