"""How much a program takes on: a table, and the machine that it was measured on.

Shapes are chosen by what a call is, not tuned by running it: no length is timed, and the same call has
the same programs everywhere, which keeps sums in one order.
"""

from __future__ import annotations

from typing import NamedTuple

#: The machine that the numbers below were measured on.
MEASURED_ON = "not measured yet: derived from 16 bytes per load and thread, two loads under way"


class Blocks(NamedTuple):
    """What a program of one kind takes on.

    Attributes:
        pairs: tokens times (padded) pairs of a tile; tokens follow from it.
        warps: of a program.
        together: heads that are under way at a time; one where more of a head than its pairs is held.
        channels: tokens times (padded) channels of a tile, at most.
    """

    pairs: int
    warps: int
    together: int
    channels: int


# By the bytes of an element: a thread has 16 bytes of either member of its pairs.
PLAIN = {2: Blocks(1024, 4, 2, 8192), 4: Blocks(512, 4, 2, 8192), 8: Blocks(512, 4, 1, 4096)}

# With an act, a gate, or angles of each head there is more to hold per pair.
HEAVY = {2: Blocks(1024, 4, 1, 4096), 4: Blocks(512, 4, 1, 4096), 8: Blocks(256, 4, 1, 2048)}

# Sums over heads hold two values per pair.
SUMS = {2: Blocks(1024, 4, 1, 4096), 4: Blocks(512, 4, 1, 4096), 8: Blocks(256, 4, 1, 2048)}

#: Where there are fewer programs than this, heads are shared out among more of them.
PROGRAMS = 512

#: Wider heads than this are left to the definition: a tile of one token would not fit in registers.
WIDEST = 2048


#: More programs than this a grid does not hold in its second dimension.
MOST_ACROSS = 65535


def power_of_two(n: int) -> int:
    """The least that is no less than n, and at least 1.

    >>> power_of_two(0), power_of_two(5), power_of_two(64)
    (1, 8, 64)
    """
    return 1 << max(n - 1, 0).bit_length()


def tokens_of(blocks: Blocks, pairs: int, rest: int = 0) -> int:
    """Tokens of a tile, a power of two.

    Args:
        pairs: of a head, padded.
        rest: channels of it that are held beside its pairs, padded.

    >>> tokens_of(Blocks(1024, 4, 2, 8192), 64), tokens_of(Blocks(1024, 4, 2, 8192), 16, 160)
    (16, 32)
    """
    fits = min(blocks.pairs // pairs, blocks.channels // (2 * pairs + rest))
    return 1 << max(fits.bit_length() - 1, 0)


def chunk_of(heads: int, tiles: int, together: int) -> int:
    """Heads of a program.

    >>> chunk_of(32, 4096, 2), chunk_of(32, 1, 2), chunk_of(1, 1, 2)
    (32, 2, 2)
    """
    parts = min(-(-heads // together), -(-PROGRAMS // max(tiles, 1)))
    each = -(-heads // max(parts, 1))
    return -(-each // together) * together
