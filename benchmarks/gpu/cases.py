"""What is measured on a GPU, as data; the most valuable first, as time may run out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

#: What each kind of work reads and writes of q and k together, in passes over them.
PASSES = {"out": 2, "in place": 2, "backward": 2, "training": 4, "frequencies": 2}

#: Who is measured, in the order of the report; `contenders` says how.
CONTENDERS = (
    "tightrope",
    "copy",
    "torch.compile",
    "definition, torch.compile",
    "flash-attention",
    "Liger",
    "eager",
    "transformers",
    "FLA",
    "definition",
    "xopes",
)

#: Us, and beside whom nothing is expected: it computes something else.
OURS, FLOOR = CONTENDERS[:2]

#: The shape of blocks that is in use, among others that are tried.
TABLE = "as in the table"

#: Whom DESIGN 11 wants us never to be slower than.
RIVALS = ("torch.compile", "definition, torch.compile", "Liger", "flash-attention", "xopes", "FLA")

#: Who tunes itself with dozens of compilations.
TUNED = ("FLA", "xopes")

#: Rounds in which contenders take turns, in a random order of each.
ROUNDS = 3

#: How a call is timed: replays of a graph, the host until it returns, single calls.
WAYS = ("replays", "host", "calls")


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
        positions: "0..n-1", "ids per row", "packed" or "M-RoPE".
        act, gate: f and P; a gate is "slopes" or "channels".
        against: "all", or "few": a copy, torch.compile and whoever else has such an f.
        neighbours: whether q and k are scaled before and after, under torch.compile.
        budget: whether DESIGN 11 asks for a share of the copy's bandwidth.
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
    against: str = "all"
    neighbours: bool = False
    budget: bool = False

    @property
    def elements(self) -> int:
        """Of q and k."""
        return self.rows * self.tokens * (self.q_heads + self.k_heads) * self.head_dim

    @property
    def one_pass(self) -> int:
        """Bytes of q and k."""
        return self.elements * (4 if self.dtype == "float32" else 2)

    @property
    def moved(self) -> int:
        """The bytes that must be moved: inputs read once, results written once."""
        # The backward pass of an f reads x beside the gradient.
        again = 1 if self.act != "none" and self.work == "training" else 0
        return (PASSES[self.work] + again) * self.one_pass

    @property
    def copied(self) -> int:
        """The bytes that the copy of this case moves, see `contenders.copy`."""
        return PASSES[self.work] * self.one_pass


_LONG = Case("12 x 32768, 12 heads", 12, 32768, 12, 0, budget=True)
_PREFILL = Case("prefill 32k", 1, 32768, budget=True)
_FEW = replace(_PREFILL, against="few", budget=False)

CASES = (
    _LONG,
    _PREFILL,
    replace(_LONG, name="12 x 32768, 12 heads, backward", work="backward", against="few"),
    replace(_PREFILL, name="prefill 32k, backward", work="backward", against="few"),
    replace(_PREFILL, name="prefill 32k, in place", work="in place", budget=False),
    replace(_PREFILL, name="prefill 32k, training", work="training", budget=False),
    *(
        Case(f"decode {rows}, in place", rows, 1, work="in place", positions="ids per row")
        for rows in (1, 32, 256)
    ),
    Case("prefill 2k", work="out"),
    Case("prefill 2k, in place", work="in place"),
    replace(_PREFILL, name="prefill 32k, interleaved", interleaved=True, budget=False),
    replace(_FEW, name="between neighbours 32k", neighbours=True),
    replace(_FEW, name="between neighbours 32k, training", neighbours=True, work="training"),
    replace(_FEW, name="silu 32k", act="silu"),
    replace(_FEW, name="silu 32k, training", act="silu", work="training"),
    replace(_FEW, name="rms_norm 32k", act="rms_norm"),
    replace(_FEW, name="rms_norm 32k, training", act="rms_norm", work="training"),
    replace(_FEW, name="frequencies 32k", work="frequencies"),
    replace(_PREFILL, name="packed 32k", positions="packed", budget=False),
    replace(_FEW, name="M-RoPE 32k", positions="M-RoPE"),
    replace(_FEW, name="softmax 32k", act="softmax"),
    replace(_FEW, name="slopes 32k", gate="slopes"),
    replace(_FEW, name="gate of channels 32k", gate="channels"),
    replace(_FEW, name="prefill 32k, float32", dtype="float32"),
)


def cut(case: Case, bytes_: int, floors: Iterable[int] = (1, 16)) -> Case:
    """A case whose q and k take no more than so many bytes: of half the rows, then tokens, and so on.

    >>> cut(CASES[0], 10**9).rows, cut(CASES[0], 10**12) == CASES[0]
    (6, True)
    """
    for name, floor in zip(("rows", "tokens"), floors):
        while case.one_pass > bytes_ and getattr(case, name) > floor:
            case = replace(case, **{name: max(floor, getattr(case, name) // 2)})
    return case


def small(case: Case) -> Case:
    """The same at a size for Triton's interpreter."""
    heads = min(case.k_heads, 1)
    rows, tokens = min(case.rows, 2), min(case.tokens, 5)
    return replace(case, rows=rows, tokens=tokens, q_heads=2, k_heads=heads, head_dim=16)
