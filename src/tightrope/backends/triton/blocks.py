"""Block sizes of the kernels.

The sizes depend only on the kind of call and are not autotuned: nothing is timed at run time, and what is
added up is divided into the same tiles on every GPU. The order of a sum over the tokens of a tile is that
of the threads, which the compiler arranges by strides and alignment. The sizes are not measured yet, but
derived from a rule: 16 bytes per load and thread, two loads in flight. Few tokens fill no GPU that way: then
each program has one token.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Block sizes of one kind of program.

    Attributes:
        pairs: tokens times (padded) pairs of a tile; determines the number of tokens.
        warps: warps per program.
        together: heads that are loaded at a time, if registers hold only the pairs of a head.
        channels: maximum of tokens times (padded) channels of a tile.
        registers: registers per thread on NVIDIA GPUs; 0 leaves the choice to the compiler, which
            prefers fewer registers and loads the second head only after the first is finished.
    """

    pairs: int
    warps: int
    together: int
    channels: int
    registers: int = 0


# Keyed by bytes per element. A thread holds pairs // (32 * warps) pairs: 16 bytes of first channels and
# 16 of second ones, in float64 32 of each.
PLAIN = {
    2: Blocks(1024, 4, 2, 8192, 80),
    4: Blocks(512, 4, 2, 8192, 80),
    8: Blocks(512, 4, 1, 4096),
}

# An activation, a gate or per-head angles need more registers per pair.
HEAVY = {
    2: Blocks(1024, 4, 1, 4096, 96),
    4: Blocks(512, 4, 1, 4096, 96),
    8: Blocks(256, 4, 1, 2048),
}

# The transpose of an activation also holds its input.
BACK = {
    2: Blocks(1024, 4, 1, 4096, 128),
    4: Blocks(512, 4, 1, 4096, 128),
    8: Blocks(256, 4, 1, 2048),
}

# Heavy calls without 16-byte accesses: addresses take as many registers as the data.
APART = {2: Blocks(256, 4, 1, 1024), 4: Blocks(256, 4, 1, 1024), 8: Blocks(128, 4, 1, 512)}

# Sums over heads hold two values per pair.
SUMS = {2: Blocks(1024, 4, 1, 4096), 4: Blocks(512, 4, 1, 4096), 8: Blocks(256, 4, 1, 2048)}

#: A sum over tokens: chunks times (padded) pairs of a program.
WALKS = Blocks(256, 4, 1, 512)

#: Tokens of a chunk of such a sum, and of a chunk of phases that are not added up.
CHUNK, APIECE = 128, 8

#: With fewer tiles than this, the heads of a tile are divided among several programs; for a device with 128
#: multiprocessors.
PROGRAMS = 512

#: If programs of one token, each with the heads that are loaded at a time, are at most this many times `PROGRAMS`,
#: they rotate the call. Each of its warps then has as many instructions for half as many heads, but all run at once.
FEW = 4

#: Maximum number of channels of a head. The definition handles wider heads, for which a tile of one
#: token would not fit in registers.
WIDEST = 2048


#: Maximum number of floats for the sums of tiles if each head has its own weights.
MOST_SUMS = 1 << 23


def tiles_summed(channels: int) -> int:
    """Return the number of tiles whose sums fit in :data:`MOST_SUMS`, given the channels of all heads.

    >>> tiles_summed(40 * 128)
    1638
    """
    return max(MOST_SUMS // channels, 1)


#: Maximum number of programs in the second dimension of a grid.
MOST_ACROSS = 65535


def blocks_of(
    element: int, heavy: bool, back: bool, more: bool, whole: bool, all_whole: bool
) -> Blocks:
    """Return the block sizes of a rotation.

    Args:
        element: bytes per element.
        heavy: whether the call has an activation, a gate or per-head angles.
        back: whether the call is the transpose of an activation.
        more: whether registers hold more, such as channels of a head that do not rotate.
        whole: whether q, k and the results are accessed in 16-byte units.
        all_whole: whether all other tensors are accessed in 16-byte units.

    >>> blocks_of(2, False, False, False, True, True).pairs
    1024
    >>> blocks_of(2, True, False, False, False, True).pairs
    256
    """
    if heavy and not whole:
        return APART[element]
    found = (BACK if back else HEAVY if heavy else PLAIN)[element]
    # Calls that break one of these conditions need more registers: the compiler chooses how many.
    return found if whole and all_whole and not more else found._replace(registers=0)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 1.

    >>> power_of_two(0), power_of_two(5), power_of_two(64)
    (1, 8, 64)
    """
    return 1 << max(n - 1, 0).bit_length()


def tokens_of(blocks: Blocks, pairs: int, rest: int = 0) -> int:
    """Return the number of tokens of a tile, a power of two.

    Args:
        pairs: padded number of pairs of a head.
        rest: padded number of channels that do not rotate but are held in registers.

    >>> tokens_of(Blocks(1024, 4, 2, 8192), 64), tokens_of(Blocks(1024, 4, 2, 8192), 16, 160)
    (16, 32)
    """
    fits = min(blocks.pairs // pairs, blocks.channels // (2 * pairs + rest))
    return 1 << max(fits.bit_length() - 1, 0)


def programs_on(device: torch.device) -> int:
    """Return `PROGRAMS` for the multiprocessors of a device.

    >>> programs_on(torch.device("cpu"))
    512
    """
    return PROGRAMS * _multiprocessors(device) // 128


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 128
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def of_one_token(blocks: Blocks, pairs: int) -> Blocks:
    """Return the block sizes of programs that rotate one token each: two pairs per thread.

    Args:
        pairs: padded number of pairs of a head.

    >>> of_one_token(Blocks(1024, 4, 2, 8192), 64)[:2], of_one_token(Blocks(512, 4, 1, 4096), 256)[:2]
    ((64, 1), (256, 4))
    """
    return blocks._replace(pairs=pairs, warps=max(pairs // 64, 1))


def chunk_of(heads: int, tiles: int, together: int, programs: int) -> int:
    """Return the number of heads of a program, so that there are at least so many programs, if possible.

    >>> chunk_of(32, 4096, 2, 512), chunk_of(32, 1, 2, 512), chunk_of(1, 1, 2, 512)
    (32, 2, 2)
    """
    parts = min(-(-heads // together), -(-programs // max(tiles, 1)))
    each = -(-heads // max(parts, 1))
    return -(-each // together) * together
