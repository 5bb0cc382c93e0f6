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
        registers: that a thread may have on NVIDIA's GPUs; 0 leaves it to the compiler, which would
            rather have few and load the second head when it is done with the first.
    """

    pairs: int
    warps: int
    together: int
    channels: int
    registers: int = 0


# By the bytes of an element: a thread has 16 bytes of either member of its pairs.
PLAIN = {
    2: Blocks(1024, 4, 2, 8192, 80),
    4: Blocks(512, 4, 2, 8192, 80),
    8: Blocks(512, 4, 1, 4096),
}

# With an act, a gate, or angles of each head there is more to hold per pair.
HEAVY = {
    2: Blocks(1024, 4, 1, 4096, 96),
    4: Blocks(512, 4, 1, 4096, 96),
    8: Blocks(256, 4, 1, 2048),
}

# The transpose of an act holds its input besides.
BACK = {
    2: Blocks(1024, 4, 1, 4096, 128),
    4: Blocks(512, 4, 1, 4096, 128),
    8: Blocks(256, 4, 1, 2048),
}

# Where no access is of 16 bytes, addresses take as many registers as what they are of.
APART = {2: Blocks(256, 4, 1, 1024), 4: Blocks(256, 4, 1, 1024), 8: Blocks(128, 4, 1, 512)}

# Sums over heads hold two values per pair.
SUMS = {2: Blocks(1024, 4, 1, 4096), 4: Blocks(512, 4, 1, 4096), 8: Blocks(256, 4, 1, 2048)}

#: Where there are fewer programs than this, heads are shared out among more of them.
PROGRAMS = 512

#: Wider heads than this are left to the definition: a tile of one token would not fit in registers.
WIDEST = 2048


#: Floats that the sums of tiles take at most, where heads have weights of their own.
MOST_SUMS = 1 << 23


def tiles_summed(channels: int) -> int:
    """Tiles whose sums there is room for, of all channels of all heads.

    >>> tiles_summed(40 * 128)
    1638
    """
    return max(MOST_SUMS // channels, 1)


#: More programs than this a grid does not hold in its second dimension.
MOST_ACROSS = 65535


def blocks_of(
    element: int, heavy: bool, back: bool, long: bool, whole: bool, all_whole: bool
) -> Blocks:
    """The shape of a rotation.

    Args:
        element: bytes of one.
        heavy: whether there is an act, a gate, or angles of each head.
        back: whether it is the transpose of an act.
        long: whether more of a head than its pairs is held.
        whole: whether what is turned is read and written by 16 bytes.
        all_whole: whether all else is.

    >>> blocks_of(2, False, False, False, True, True).pairs
    1024
    >>> blocks_of(2, True, False, False, False, True).pairs
    256
    """
    if heavy and not whole:
        return APART[element]
    found = (BACK if back else HEAVY if heavy else PLAIN)[element]
    # What needs more registers is not held to a number.
    return found if whole and all_whole and not long else found._replace(registers=0)


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
