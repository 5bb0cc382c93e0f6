"""Named tuples that group the parameters of the kernels.

Triton unpacks named tuples when it compiles, so a group costs nothing on the device. Groups with fields
in capitals hold compile-time constants. A group or field that a call does not need is None.

Only the host creates groups of constants: inside a kernel, Triton would turn them into runtime values.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Steps(NamedTuple):
    """Strides of a tensor, in elements; that of the channels is None if it is 1."""

    row: Any
    head: Any
    token: Any
    channel: Any


class PositionSteps(NamedTuple):
    """Strides of the positions.

    Attributes:
        axis, row, token, head: strides of the position tensor; None without one.
        add_index: 1 to add the token index to the positions, otherwise 0.
    """

    axis: Any
    row: Any
    token: Any
    head: Any
    add_index: Any


class AngleSteps(NamedTuple):
    """Sizes of the phase words, or size and strides of the tables; the other fields are None.

    Attributes:
        rows, heads: sizes of the phase words.
        length: number of positions in the tables.
        cos, sin: strides of the tables, with pairs as channels.
        phase: strides of the phases, in elements, with pairs as channels.
    """

    rows: Any = None
    heads: Any = None
    length: Any = None
    cos: Any = None
    sin: Any = None
    phase: Any = None


class Amplitude(NamedTuple):
    """Factors of the cosines and of the sines; a negative sine factor rotates backwards."""

    cosine: Any
    sine: Any


class SlotSteps(NamedTuple):
    """The slots of tokens, and the cache that they divide.

    Attributes:
        row, token: strides of the slots, in elements.
        entries: entries of a block of the cache.
        count: entries of all blocks.
        in_place: 1 if tokens also come from the cache, otherwise None.
    """

    row: Any
    token: Any
    entries: Any
    count: Any
    in_place: Any = None


class OperandSteps(NamedTuple):
    """Number of heads of q or k, and the strides of its tensors.

    Attributes:
        heads: number of heads.
        x, out: strides of the tensor to rotate and of the result.
        slots: where the result goes if it is a cache; its blocks then have the strides of rows, and its entries
            those of tokens.
        norm: 1 if each head has its own norm weights, 0 if they share them.
        gate: strides of the logarithms or slopes.
        input: strides of the forward call's x.
        scale: 1 if each head has its own scale of a cache in 8 bits, 0 if they share it.
    """

    heads: Any
    x: Any
    out: Any
    norm: Any = None
    gate: Any = None
    input: Any = None
    slots: Any = None
    scale: Any = None


class Carried(NamedTuple):
    """Tensors of q or of k for f, P and their gradients."""

    norm: Any = None
    gate: Any = None
    input: Any = None
    partial: Any = None


class Carries(NamedTuple):
    """Tensors of q and of k; the first tile if a call needs several launches; for the last result the slots that it
    goes to, and in 8 bits its scale."""

    q: Any = Carried()
    k: Any = Carried()
    first_tile: Any = None
    slots: Any = None
    scale: Any = None


class Extent(NamedTuple):
    """The work that the programs of a rotation divide among themselves.

    Attributes:
        count: tokens of all rows together.
        tokens: tokens per row.
        chunk: heads per program.
        apart: with FEW, the programs of a token for q, which come before those for k; else None.
    """

    count: Any
    tokens: Any
    chunk: Any
    apart: Any = None


class Tiling(NamedTuple):
    """Number of rows, tokens per row, and tiles per row."""

    rows: Any
    tokens: Any
    tiles: Any


class Walk(NamedTuple):
    """The work that the programs of a sum over tokens divide among themselves.

    Attributes:
        lanes: chunks of all rows and heads together.
        heads: heads per row.
        chunks: chunks per row and head.
        chunk: tokens per chunk; the last chunk may have fewer.
        tokens, pairs: tokens and pairs per row and head.
    """

    lanes: Any
    heads: Any
    chunks: Any
    chunk: Any
    tokens: Any
    pairs: Any


class Head(NamedTuple):
    """Constants: the channels of a head, and the block sizes for them.

    Attributes:
        DIM: number of channels.
        START: first channel of the rotated slice.
        PAIRS: number of rotated pairs.
        BLOCK_T: tokens per tile.
        BLOCK_P, BLOCK_F, BLOCK_B: padded number of pairs, of channels before and after the slice.
        INTERLEAVED: whether the pairing is interleaved.
        WIDE: whether to compute in float64.
    """

    DIM: Any
    START: Any
    PAIRS: Any
    BLOCK_T: Any
    BLOCK_P: Any
    BLOCK_F: Any
    BLOCK_B: Any
    INTERLEAVED: Any
    WIDE: Any


class AngleKind(NamedTuple):
    """Constants: the source of the angles.

    Attributes:
        TABLES: whether angles come from tables; otherwise from phase words.
        AXES: number of position axes.
        POSITIONS: 0 without a position tensor, 1 if positions are integers, 2 if floating.
        TURNS: whether frequencies have whole turns in addition to the phase words.
        ROWS, HEADS: whether each row and each head has its own angles.
        FULL: 0 if the channels of a pair share an entry of the tables, 1 if each has its own, 2 if
            each has its own and they exchange their sines, for the transpose.
        PHASES: whether each token has phases, to which those of AXES axes of phase words are added.
    """

    TABLES: Any
    AXES: Any
    POSITIONS: Any
    TURNS: Any
    ROWS: Any
    HEADS: Any
    FULL: Any
    PHASES: Any


class Kind(NamedTuple):
    """Constants: the kind of call.

    Attributes:
        ACT, GATE, DIRECTION: codes of f (tightrope.activations), P and direction
            (tightrope.ops.schema). DIRECTION is 0 without f, P and per-head angles: then the sign
            of the sine factor gives the direction.
        REST: whether to also write the channels outside the slice.
        TOGETHER: number of heads that are loaded at a time.
        FEW: whether a program rotates only so many heads of one token, of q or of k.
        ONE_SUM: whether heads share one sum for the gradient of the norm weights.
        BITS: whether to round to bfloat16, and to 8 bits, with integer operations.
        ROUNDING: index into ROUNDINGS of tightrope._rounding.
        NARROW: whether cosines and sines from phase words round to the dtype of x first.
        EIGHT: the code of the format of results with a scale; 0 if there are none.
    """

    ACT: Any
    GATE: Any
    DIRECTION: Any
    REST: Any
    TOGETHER: Any
    FEW: Any
    ONE_SUM: Any
    BITS: Any
    ROUNDING: Any
    NARROW: Any
    EIGHT: Any


#: Groups that Triton takes as one constant each; it unpacks the others.
CONSTANTS = (Head, AngleKind, Kind)


# The groups below are created inside kernels.


class Tile(NamedTuple):
    """The tokens of a program: row, index in the row, and whether the token exists."""

    row: Any
    token: Any
    inside: Any


class Positions(NamedTuple):
    """Position tensor or None, the offset that is added, and the strides."""

    ids: Any
    offset: Any
    steps: Any


class Angles(NamedTuple):
    """Phase words and turns, or tables; their sizes and strides, the amplitude, and the positions."""

    primary: Any
    secondary: Any
    steps: Any
    amplitude: Any
    positions: Any


class Turn(NamedTuple):
    """Cosines and sines of the first channels of the pairs (c, s) and of the second (c2, s2)."""

    c: Any
    s: Any
    c2: Any
    s2: Any


class Operand(NamedTuple):
    """The tensors of q or of k, their strides, the slots and the scale."""

    x: Any
    out: Any
    carried: Any
    steps: Any
    slots: Any
    scale: Any


class Common(NamedTuple):
    """Tokens and angles that the heads of a program share.

    Attributes:
        tile, angles: the tokens, and the source of their angles.
        by: their Turn, unless it is computed for each step.
        high, low: for slopes, the positions as the sum of two parts.
        eps: of a norm.
        own, sum_at: number of the tile; index of the sum over the heads.
    """

    tile: Any
    angles: Any
    by: Any
    high: Any
    low: Any
    eps: Any
    own: Any
    sum_at: Any


class Places(NamedTuple):
    """Where a head starts in each tensor, in elements.

    Attributes:
        out: an offset per token, [tokens, 1].
        norm: one offset for all tokens.
        scale: what the result of the head is divided by, in 8 bits.
    """

    out: Any
    norm: Any
    scale: Any


class Gate(NamedTuple):
    """Logarithms or slopes of a gate.

    Attributes:
        of: the tensor.
        at: the offset of a head in the tensor.
        channel: the stride of its channels.
        high, low: for slopes, the positions as the sum of two parts.
    """

    of: Any
    at: Any
    channel: Any
    high: Any
    low: Any
