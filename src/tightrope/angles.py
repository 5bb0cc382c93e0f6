"""Exact angles: phase words from frequencies, and cosines and sines from phase words and positions.

The phase word of a frequency ω, in radians per position, is ``round(ω / 2π · 2^64)`` modulo 2^64, held
as int64. ``position · word`` in wrapping int64 arithmetic is the angle modulo one turn, off by at most
``|position| · 2^-65`` turn, so neither range reduction nor float64 is needed. See docs/numerics.md for
the error bounds.

This module is plain torch, part of the definition; every kernel computes the same angles.
"""

from __future__ import annotations

import decimal
import functools
from dataclasses import dataclass

import torch

from ._tracing import exact_factor
from .channels import by_head
from .frequencies import CONTEXT, TWO_PI, Frequencies

_TURN = 2.0**-64  # one phase unit, in turns
_FLOAT_TWO_PI = float(TWO_PI)
_RADIANS = _FLOAT_TWO_PI * _TURN
NO_TURNS = -(2**63)  # marks a frequency that is NaN or too large; kernels use the same marker


def _parts(value: decimal.Decimal) -> tuple[float, float, float]:
    """Split a number below ¼ into a sum of parts of 24, 24 and 53 bits."""
    parts = []
    for scale in (2**26, 2**50):
        parts.append(int(CONTEXT.multiply(value, decimal.Decimal(scale))) / scale)
        value = CONTEXT.subtract(value, decimal.Decimal(parts[-1]))
    return parts[0], parts[1], float(value)


_RADIAN = CONTEXT.divide(decimal.Decimal(1), TWO_PI)  # in turns
_TURNS = float(_RADIAN)
_PARTS = _parts(_RADIAN)


@dataclass(frozen=True)
class Words:
    """Phase words of one set of pairs, as plain integers.

    Attributes:
        words: ``round(ω / 2π · 2^64)`` modulo 2^64, signed, one per pair.
        turns: whole turns that the modulo removed, one per pair; all zero unless some |ω| >= π. Only
            fractional positions need them.
    """

    words: tuple[int, ...]
    turns: tuple[int, ...]


def words_of(frequencies: Frequencies) -> Words:
    """Return the phase words of frequencies, correct to the last bit.

    >>> words_of(Frequencies((TWO_PI / 4,))).words == (2**62,)
    True
    """
    words, turns = [], []
    for omega in frequencies.exact:
        scaled = CONTEXT.multiply(CONTEXT.divide(omega, TWO_PI), decimal.Decimal(2**64))
        whole = int(scaled.to_integral_value(decimal.ROUND_HALF_EVEN, CONTEXT))
        word = (whole + 2**63) % 2**64 - 2**63
        words.append(word)
        turns.append((whole - word) >> 64)
    return Words(tuple(words), tuple(turns))


def words_from(inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the phase words of a tensor of frequencies, computed on its device without synchronising.

    Each frequency is taken as an exact number, and the rounding error of its product with 1 / 2π is
    recovered from exact partial products. Below 2^50 turns per position, a phase word is therefore off
    by at most half a unit (2^-65 turn) plus 2^-79 · ω turns; for ω below 2^14 the sum is less than
    one unit. From 2^50 turns on, a phase word has only the digits of a float64 product.

    Args:
        inv_freq: floating, radians per position; taken as float64.

    Returns:
        Phase words and turns as in :class:`Words`, int64, in the shape of ``inv_freq``. A frequency
        that is NaN, or at least 2^62 turns per position in magnitude, gets a marker in ``turns``
        that makes all angles of its pair NaN.

    >>> words_from(torch.tensor([0.0, 2 * float(TWO_PI)]))[1].tolist()
    [0, 2]
    """
    omega = inv_freq.to(torch.float64)
    scaled = omega * _TURNS
    lost = ~(scaled.abs() < 2.0**62)
    fraction = (scaled - torch.round(scaled)) * 2.0**62
    units = torch.round(fraction)
    # The rounding error of the product. It is dropped from 2^50 turns on, where it may overflow int64.
    upper = omega.to(torch.float32).to(torch.float64)
    lower = omega - upper
    first, second, third = _PARTS
    error = (upper * first - scaled) + (upper * second + lower * first)
    error = error + (lower * second + omega * third)
    fine = torch.round(error * 2.0**64 + (fraction - units) * 4)
    fine = torch.where(scaled.abs() < 2.0**50, fine, 0.0)
    words = (torch.where(lost, 0.0, units).to(torch.int64) << 2) + fine.to(torch.int64)
    # int64 times a Python float would have the default dtype, which may be float16.
    turns = torch.round(scaled - words.to(torch.float64) * 2.0**-64)
    return words, torch.where(lost, float(NO_TURNS), turns).to(torch.int64)


def without_frequency(turns: torch.Tensor) -> torch.Tensor:
    """Return a mask of the pairs whose frequency is NaN or too large, ``[rows|1, heads|1, 1, pairs]``."""
    return (turns == NO_TURNS).any(0)[:, :, None]


def phase_at(
    words: torch.Tensor,
    turns: torch.Tensor | None,
    positions: torch.Tensor | None,
    offset: int,
    add_index: bool,
    tokens: int,
) -> torch.Tensor:
    """Return angles as 64-bit fractions of a turn.

    Args:
        words: int64 ``[axes, rows|1, heads|1, pairs]``.
        turns: the whole turns of :class:`Words`, int64 in the shape of ``words``; None for zeros.
        positions: None for zeros, or int32, int64, float32 or float64 ``[axes, rows|1, tokens|1]``, or
            ``[axes, rows|1, tokens, heads|1]``.
        offset: added to every position.
        add_index: whether to add the token index to the position.
        tokens: number of tokens.

    Returns:
        int64 ``[rows|1, heads|1, tokens, pairs]``, in units of 2^-64 turn, wrapped.
    """
    whole, fraction = _split(positions, words.device)
    whole = whole + offset
    if add_index:
        whole = whole + torch.arange(tokens, device=words.device)
    word = words[:, :, :, None]
    phase = by_head(whole) * word
    if fraction is not None:
        fine = by_head(fraction)
        phase = phase + 2 * _high_product(fine, word)
        if turns is not None:
            phase = phase + 2 * (fine * turns[:, :, :, None])
    # Axis by axis: the sum of int64 numbers in ONNX Runtime does not wrap around, its addition does.
    return functools.reduce(torch.add, phase.unbind(0))


def is_no_phase(phases: torch.Tensor) -> torch.Tensor:
    """Return a mask of the phases that stand for NaN: the smallest number of their dtype."""
    return phases == torch.iinfo(phases.dtype).min


def widened(phases: torch.Tensor) -> torch.Tensor:
    """Return phases in units of 2^-64 turn, int64; those in int32 are in units of 2^-32 turn."""
    return phases if phases.dtype == torch.int64 else phases.to(torch.int64) << 32


def cos_sin(phase: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of phases, computed from angles of at most an eighth of a turn.

    Args:
        phase: int64, in units of 2^-64 turn.
        dtype: float32 or float64, of the results.
    """
    quarter = (phase + 2**61) >> 62
    remainder = phase - (quarter << 62)
    angle = remainder.to(dtype)
    angle = angle * exact_factor(_RADIANS, angle)
    cos, sin = torch.cos(angle), torch.sin(angle)
    swap = (quarter & 1).bool()
    negative_cos = ((quarter + 1) & 2).bool()
    negative_sin = (quarter & 2).bool()
    cos, sin = torch.where(swap, sin, cos), torch.where(swap, cos, sin)
    return torch.where(negative_cos, -cos, cos), torch.where(negative_sin, -sin, sin)


def look_up(
    table: torch.Tensor,
    form: str,
    positions: torch.Tensor | None,
    offset: int,
    add_index: bool,
    tokens: int,
) -> torch.Tensor:
    """Look up rows of a caller's cos or sin table, one value per pair; for "full", one per channel.

    Differentiable in the table.

    Args:
        table: floating ``[rows|1, heads|1, length, width]``.
        form: "cat", "repeat", "half" or "full": the format of the table.
        positions, offset, add_index, tokens: as in :func:`phase_at`, with one axis of integers.

    Returns:
        ``[rows|1, heads|1, tokens, pairs or channels]``; NaN where a position lies outside the table.
    """
    pairs = table.shape[3] if form == "full" else pairs_of(table, form)
    table = table[..., 0::2] if form == "repeat" else table[..., :pairs]
    if is_whole(table, positions, offset, add_index, tokens):
        return table
    at, inside = _rows_of(table, positions, offset, add_index, tokens)
    if table.shape[2] == 0:
        table = table.new_zeros((*table.shape[:2], 1, pairs))
    if at.shape[0] == 1:
        found = table.index_select(2, at[0])
    elif table.shape[0] == 1:
        found = table[0].index_select(1, at.flatten()).unflatten(1, at.shape).movedim(1, 0)
    else:
        index = at[:, None, :, None].expand(-1, table.shape[1], -1, pairs)
        found = table.gather(2, index)
    return torch.where(inside[:, None, :, None], found, torch.nan)


def put_back(
    grad: torch.Tensor,
    table: torch.Tensor,
    form: str,
    positions: torch.Tensor | None,
    offset: int,
    add_index: bool,
) -> torch.Tensor:
    """Return the gradient of a table, given that of the result of :func:`look_up`.

    Args:
        grad: ``[rows, heads|1, tokens, pairs or channels]``; if :func:`is_whole`, with as many rows as
            the table.
        table, form, positions, offset, add_index: as in :func:`look_up`.

    Returns:
        Shape and dtype of the table; zeros for duplicate entries, which :func:`look_up` does not read.
    """
    tokens, pairs = grad.shape[2:]
    # autograd.grad(is_grads_batched=True) runs a vmap that supports reshape and narrow, but not flatten
    # or a full slice.
    if not is_whole(table, positions, offset, add_index, tokens):
        at, inside = _rows_of(table, positions, offset, add_index, tokens)
        grad = torch.where(inside[:, None, :, None], grad, 0.0)
        rows, heads, length = table.shape[:3]
        zeros = grad.new_zeros((rows, heads, max(length, 1), pairs))
        if at.shape[0] == 1:
            grad = zeros.index_add(2, at[0], grad if rows != 1 else grad.sum(0, keepdim=True))
        elif rows == 1:
            whole = grad.movedim(0, 1).reshape(1, heads, -1, pairs)
            grad = zeros.index_add(2, at.flatten(), whole)
        else:
            grad = zeros.scatter_add(2, at[:, None, :, None].expand_as(grad), grad)
        grad = grad.narrow(2, 0, length)
    if form == "cat":
        grad = torch.cat((grad, torch.zeros_like(grad)), -1)
    elif form == "repeat":
        grad = torch.stack((grad, torch.zeros_like(grad)), -1).reshape(*grad.shape[:3], -1)
    return grad.to(table.dtype)


def is_whole(
    table: torch.Tensor, positions: torch.Tensor | None, offset: int, add_index: bool, tokens: int
) -> bool:
    """Return True if every token t reads row t of the table, and the table has no further rows."""
    return positions is None and add_index and offset == 0 and table.shape[2] == tokens


def _rows_of(
    table: torch.Tensor, positions: torch.Tensor | None, offset: int, add_index: bool, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table row of each token and a mask of rows that exist, ``[rows|1, tokens]``.

    Row 0 stands for rows outside the table.
    """
    whole, _ = _split(positions, table.device)
    at = whole[0] + offset
    if add_index:
        at = at + torch.arange(tokens, device=table.device)
    inside = (at >= 0) & (at < table.shape[2])
    return torch.where(inside, at, 0), inside


def pairs_of(table: torch.Tensor, form: str) -> int:
    """Return the number of pairs in a table of the given format."""
    return table.shape[3] if form == "half" else table.shape[3] // 2


def position_angle(
    words: torch.Tensor, turns: torch.Tensor | None, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return zeros whose derivative with respect to the position is ω.

    Phases are integers and have no derivative. Adding these zeros to an angle makes it
    differentiable, in every mode of differentiation, without changing its value.

    Returns:
        ``[rows|1, heads|1, tokens|1, pairs]``.
    """
    whole, fraction = _split(positions, words.device)
    constant = whole.to(positions.dtype)
    if fraction is not None:
        constant = constant + fraction.to(positions.dtype) * 2.0**-63
    drift = (positions - constant).nan_to_num(0.0, 0.0, 0.0).to(dtype)
    return (by_head(drift) * inv_freq(words, turns, dtype)[:, :, :, None]).sum(0)


def frequency_angle(
    inv_freq_: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return zeros like :func:`position_angle`, but differentiable in the frequencies.

    Args:
        inv_freq_: the frequencies that the phase words were computed from: floating, in the shape of
            the phase words.
        positions: floating ``[axes, rows|1, tokens|1]`` or with heads, see :func:`real`; NaN gives NaN.
    """
    # Phase words hold more digits, so subtracting their value would not give zero.
    drift = (inv_freq_ - inv_freq_.detach()).to(positions.dtype)
    return (by_head(positions) * drift[:, :, :, None]).sum(0).to(dtype)


def real(
    positions: torch.Tensor | None,
    offset: int,
    add_index: bool,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return positions in floating point, in their shape or ``[1, 1, tokens|1]``; NaN where :func:`is_lost`."""
    number = torch.zeros(1, 1, 1, dtype=dtype, device=device)
    if positions is not None:
        number = positions.to(dtype)
        lost = is_lost(positions)
        if lost is not None:
            number = torch.where(lost, torch.nan, number)
    number = number + offset
    return number + torch.arange(tokens, device=device) if add_index else number


def inv_freq(words: torch.Tensor, turns: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return frequencies in radians per position, recovered from phase words."""
    omega = words.to(dtype) * _RADIANS
    return omega if turns is None else omega + turns.to(dtype) * _FLOAT_TWO_PI


def is_lost(positions: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask of positions that are NaN, infinite, or at least 2^62 in magnitude.

    None if positions are integers or None.
    """
    if positions is None or not positions.is_floating_point():
        return None
    return ~(positions.abs() < 2.0**62)


def _split(
    positions: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split positions into whole numbers and fractions within [-1/2, 1/2], both int64.

    Fractions are in units of 2^-63, and None for positions that are integers or None. Positions for
    which :func:`is_lost` is true count as 0.
    """
    if positions is None:
        return torch.zeros(1, 1, 1, dtype=torch.int64, device=device), None
    if not positions.is_floating_point():
        return positions.to(torch.int64), None
    safe = torch.where(positions.abs() < 2.0**62, positions, 0.0)
    whole = torch.round(safe)
    return whole.to(torch.int64), ((safe - whole) * 2.0**63).to(torch.int64)


def _high_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``floor(a · b / 2^64)``, or up to 2 less, in int64; ``|a| <= 2^62``.

    torch has no 128-bit product, so this multiplies 32-bit halves. It omits the lowest of the four
    products, which cannot change the result by more than one.
    """
    a_high, a_low = a >> 32, a & 0xFFFFFFFF
    b_high, b_low = b >> 32, b & 0xFFFFFFFF
    return a_high * b_high + ((a_high * b_low) >> 32) + ((a_low * b_high) >> 32)
