"""The tokens of a program, the entries of a cache that they go to, and the copy of values to the same entries."""

from __future__ import annotations

import triton
import triton.language as tl

from ..groups import Tile
from .heads import encoded


@triton.jit
def rows_of(start, index, tokens, BLOCK_T: tl.constexpr):
    """Row and index in the row of tokens `start + index`, with 0 <= index < BLOCK_T.

    Takes one 64-bit division per program instead of one per token.
    """
    row = start // tokens
    # The distance from the end of that row is less than BLOCK_T, so it fits in 32 bits.
    beyond = index + (start - row * tokens - tokens)
    size = tl.minimum(tokens, BLOCK_T).to(tl.uint32)
    more = tl.maximum(beyond, 0).to(tl.uint32) // size
    passed = tl.where(beyond < 0, 0, more.to(tl.int64) + 1)
    return row + passed, beyond + tokens - passed * tokens


@triton.jit
def tile_of(start, extent, BLOCK_T: tl.constexpr):
    """Rows and tokens from `start` on; a token beyond the last one is the last one once more, and not `inside`."""
    index = tl.arange(0, BLOCK_T)
    inside = start + index < extent.count
    row, token = rows_of(start, tl.minimum(index, extent.count - 1 - start), extent.tokens, BLOCK_T)
    return Tile(row, token, inside)


@triton.jit
def slot_of(slots, steps, tile):
    """Block and entry of each token, and whether it goes to one: not for slots outside the cache."""
    slot = tl.load(slots + (tile.row * steps.row + tile.token * steps.token)).to(tl.int64)
    inside = tile.inside & (slot >= 0) & (slot < steps.count)
    slot = tl.where(inside, slot, 0)
    block = slot // steps.entries
    return block, slot - block * steps.entries, inside


@triton.jit
def copy_values(
    values,
    cache,
    slots,
    scale,
    extent,
    steps,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EIGHT: tl.constexpr,
    BITS: tl.constexpr,
):
    """Copy the values of a tile of tokens to their entries, for one head and up to BLOCK_W channels.

    Args:
        slots: None if each token goes to its own place.
        scale: what values are divided by, in 8 bits; or None.
        steps: OperandSteps.
        EIGHT, BITS: see Kind.
    """
    tile = tile_of(tl.program_id(0).to(tl.int64) * BLOCK_T, extent, BLOCK_T)
    block = tile.row
    entry = tile.token
    inside = tile.inside
    if slots is not None:
        block, entry, inside = slot_of(slots, steps.slots, tile)
    head = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    at = tile.row * steps.x.row + tile.token * steps.x.token + head * steps.x.head
    to = block * steps.out.row + entry * steps.out.token + head * steps.out.head
    here = inside[:, None] & (channel < WIDTH)
    from_channel = channel
    to_channel = channel
    if steps.x.channel is not None:
        from_channel = channel * steps.x.channel
    if steps.out.channel is not None:
        to_channel = channel * steps.out.channel
    value = tl.load(values + (at[:, None] + from_channel), mask=here, other=0.0)
    if scale is not None:
        value = encoded(value, tl.load(scale + head * steps.scale), EIGHT, BITS)
    tl.store(cache + (to[:, None] + to_channel), value, mask=here)
