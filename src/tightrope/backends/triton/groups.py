"""What kernels hand to each other, grouped by what it is about.

Triton takes named tuples apart when it compiles: a group is no object on the device, and costs nothing.
Groups in capitals hold constants. A group, or a part of one, that a call does not have is None.

Groups of constants are made by the host alone: inside a kernel, Triton would make values of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Steps(NamedTuple):
    """Strides of a tensor. Those of rows, heads and tokens count accesses of several elements where
    all of its heads begin at one (`VECTOR`, `GATE_VECTOR`, …), and elements otherwise."""

    row: Any
    head: Any
    token: Any
    channel: Any


class PositionSteps(NamedTuple):
    """How positions follow each other.

    Attributes:
        axis, row, token: strides of the tensor of positions; None without one.
        ramp: what each token adds to the position of the one before it: 1 or 0.
    """

    axis: Any
    row: Any
    token: Any
    ramp: Any


class AngleSteps(NamedTuple):
    """Sizes and strides of phase words, or of tables; the others are None.

    Attributes:
        rows, heads: of words.
        length: of tables, in positions.
        cos, sin: strides of tables, their pairs as channels.
    """

    rows: Any = None
    heads: Any = None
    length: Any = None
    cos: Any = None
    sin: Any = None


class Amplitude(NamedTuple):
    """Factors of cosines and of sines, the latter with the direction in its sign."""

    cosine: Any
    sine: Any


class OperandSteps(NamedTuple):
    """The heads of q or of k, and the strides of what belongs to them.

    Attributes:
        heads: their number.
        x, out: what is turned, and the results.
        norm: 1 if heads have weights of their own, 0 if they share them.
        gate: logarithms or slopes.
        input: x of the forward call.
    """

    heads: Any
    x: Any
    out: Any
    norm: Any = None
    gate: Any = None
    input: Any = None


class Carries(NamedTuple):
    """Tensors that only some calls have, for q and for k, and the first tile of a launch of several."""

    norm_q: Any = None
    norm_k: Any = None
    gate_q: Any = None
    gate_k: Any = None
    input_q: Any = None
    input_k: Any = None
    partial_q: Any = None
    partial_k: Any = None
    first_tile: Any = None


class Extent(NamedTuple):
    """What the programs of a rotation share out.

    Attributes:
        count: tokens of all rows.
        tokens: of a row.
        chunk: heads of a program.
    """

    count: Any
    tokens: Any
    chunk: Any


class Tiling(NamedTuple):
    """Rows, the tokens of each, and the tiles that these are shared out in."""

    rows: Any
    tokens: Any
    tiles: Any


class Head(NamedTuple):
    """Constants: the channels of a head, and the blocks that hold them.

    Attributes:
        DIM: channels.
        START: where the rotated slice begins.
        PAIRS: that rotate.
        BLOCK_T: tokens of a tile.
        BLOCK_P, BLOCK_F, BLOCK_B: places for pairs, and for channels in front of and behind them.
        INTERLEAVED: whether the members of a pair are neighbours.
        UNIT: whether channels lie side by side.
        WIDE: whether all is computed in float64.
    """

    DIM: Any
    START: Any
    PAIRS: Any
    BLOCK_T: Any
    BLOCK_P: Any
    BLOCK_F: Any
    BLOCK_B: Any
    INTERLEAVED: Any
    UNIT: Any
    WIDE: Any


class AngleKind(NamedTuple):
    """Constants: where angles come from.

    Attributes:
        TABLES: whether from a caller's tables; otherwise from phase words.
        TABLE_VECTOR: elements that strides of tables count; 0 if pairs do not lie side by side.
        AXES: of positions.
        POSITIONS: 0 without a tensor of positions, 1 if they are integers, 2 if floating.
        TURNS: whether there are whole turns beside the words.
        ROWS, HEADS: whether rows and heads have angles of their own.
    """

    TABLES: Any
    TABLE_VECTOR: Any
    AXES: Any
    POSITIONS: Any
    TURNS: Any
    ROWS: Any
    HEADS: Any


class Kind(NamedTuple):
    """Constants: what a rotation does.

    Attributes:
        ACT, GATE, DIRECTION: f, P and the way round, by the codes of tightrope.ops.schema.
        REST: whether channels that do not rotate are written too.
        TOGETHER: heads that are under way at a time.
        VECTOR: elements that strides of x and of results count.
        GATE_VECTOR, INPUT_VECTOR: those of gates and inputs; 0 if channels do not lie side by side.
        ONE_SUM: whether heads share the sums for the gradients by weights.
        BITS: whether rounding to bfloat16 is spelled out.
    """

    ACT: Any
    GATE: Any
    DIRECTION: Any
    REST: Any
    TOGETHER: Any
    VECTOR: Any
    GATE_VECTOR: Any
    INPUT_VECTOR: Any
    ONE_SUM: Any
    BITS: Any


#: Groups that are one constant each to Triton; the others it takes apart.
CONSTANTS = (Head, AngleKind, Kind)


# What follows is made inside of kernels.


class Tile(NamedTuple):
    """The tokens of a program: their rows, their places in them, and whether they are there."""

    row: Any
    token: Any
    inside: Any


class Positions(NamedTuple):
    """Positions as a tensor, which may be None, what is added to them, and their steps."""

    ids: Any
    offset: Any
    steps: Any


class Angles(NamedTuple):
    """Phase words and turns, or cosines and sines, their steps, their amplitude, and positions."""

    primary: Any
    secondary: Any
    steps: Any
    amplitude: Any
    positions: Any


class Operand(NamedTuple):
    """The tensors of q or of k, and their steps."""

    x: Any
    out: Any
    norm: Any
    gate: Any
    input: Any
    partial: Any
    steps: Any


class Places(NamedTuple):
    """Where a head begins, in elements: [tokens, 1] each, but one place for weights."""

    out: Any
    norm: Any
    input: Any


class Gate(NamedTuple):
    """Logarithms or slopes, where those of a head begin, their channel stride, and of slopes the
    positions, in two parts that add up to them."""

    of: Any
    at: Any
    channel: Any
    high: Any
    low: Any
