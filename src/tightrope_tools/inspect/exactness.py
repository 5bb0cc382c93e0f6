"""Errors of cosines and sines by position, for several ways to compute angles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tightrope import angles
from tightrope.frequencies import LONGEST
from tightrope.spec import RopeSpec

#: Dtype -> the largest rounding error of a value below 1, such as a cosine: half of its last bit.
ROUNDINGS = {"bfloat16": 2.0**-9, "float16": 2.0**-12}

#: Positions below this have the error bound that docs/numerics.md states.
EXACT = LONGEST

_PER_OCTAVE = 192
_MOST_PAIRS = 512  # more pairs are thinned evenly to at most this number: 25 MB in float64

WORDS = "phase words"
FLOAT32 = "float32 angles"
TABLE = "float32 angles, bfloat16 table"
FREQUENCIES = "bfloat16 frequencies"
POSITIONS = "bfloat16 positions"

#: Way to compute angles -> its description in reports.
MEANING = {
    WORDS: "this library, any dtype",
    FLOAT32: "frequency times position in float32, as model files do",
    TABLE: "the same, cos and sin then rounded",
    FREQUENCIES: "after .to(torch.bfloat16) of a module with a buffer",
    POSITIONS: "positions made in the dtype of x",
}


@dataclass(frozen=True)
class Exactness:
    """The errors of each way to compute angles, by the keys of :data:`MEANING`.

    Attributes:
        lengths: the lengths for which errors are reported.
        errors: way -> for each length, the largest error of a cosine or sine at positions below it.
        reach: way -> dtype -> number of positions before the first error above the rounding of that dtype;
            the bfloat16 table has none.
    """

    lengths: tuple[int, ...]
    errors: dict[str, tuple[float, ...]]
    reach: dict[str, dict[str, int]]


def exactness_of(spec: RopeSpec, lengths: Iterable[int], context: int | None) -> Exactness:
    """Measure errors of a spec's cosines and sines, against those of 64-bit phases in float64.

    Positions are sampled, 192 per octave, so the largest errors are found to a few per cent.

    Args:
        lengths: the lengths up to which errors are reported.
        context: the length of the sequence, for rules that depend on it.
    """
    ends = tuple(sorted(set(lengths)))
    positions = sample(EXACT, {end - 1 for end in ends})
    curves = errors_at(spec, positions, context)
    errors = {
        name: tuple(float(curve[positions < end].max()) for end in ends)
        for name, curve in curves.items()
    }
    del curves[TABLE]  # its rounding is the limit itself
    reach = {
        name: {
            dtype: next(iter(positions[curve > limit].tolist()), EXACT)
            for dtype, limit in ROUNDINGS.items()
        }
        for name, curve in curves.items()
    }
    return Exactness(ends, errors, reach)


def sample(end: int, also: Iterable[int] = ()) -> torch.Tensor:
    """Return sorted int64 positions in [0, end): the first 192, then 192 evenly spread per octave.

    Args:
        also: positions to include.
    """
    parts = [torch.arange(min(_PER_OCTAVE, end))]
    start = _PER_OCTAVE
    while start < end:
        stop = min(2 * start, end)
        parts.append(torch.linspace(start, stop - 1, _PER_OCTAVE, dtype=torch.float64).long())
        start = stop
    positions: torch.Tensor = torch.cat([*parts, torch.tensor(sorted(also))]).long().unique()
    return positions


def errors_at(
    spec: RopeSpec, positions: torch.Tensor, context: int | None
) -> dict[str, torch.Tensor]:
    """Return, for each way to compute angles, the largest error of a cosine or sine of any pair at each position.

    Args:
        positions: int64 ``(tokens,)``, not negative; used for all axes of the spec.
    """
    inv_freq = spec.frequencies(context).inv_freq
    inv_freq = (inv_freq.sum(0) if inv_freq.dim() == 3 else inv_freq).flatten()
    some = slice(None, None, -(-len(inv_freq) // _MOST_PAIRS) or 1)
    phase = phases_at(spec, positions, context, some)
    exact = angles.cos_sin(phase, torch.float64)
    found: dict[str, Iterable[torch.Tensor]] = {WORDS: angles.cos_sin(phase, torch.float32)}
    found |= {name: way(inv_freq[some], positions) for name, way in _WAYS.items()}
    worst = {}
    for name, tables in found.items():
        errors = [(got.double() - wanted).abs() for got, wanted in zip(tables, exact, strict=True)]
        worst[name] = torch.cat([torch.zeros(len(positions), 1), *errors], -1).amax(-1)
    return worst


def phases_at(
    spec: RopeSpec, positions: torch.Tensor, context: int | None, pairs: slice = slice(None)
) -> torch.Tensor:
    """Return angles ``(tokens, heads · pairs)`` in 2^-64 turns.

    Args:
        positions: int64 ``(tokens,)``, not negative; used for all axes of the spec.
        pairs: the angles to return, of those of all heads.
    """
    words, turns = spec.words_for(context)
    ids = positions.expand(words.shape[0], 1, -1)
    flat = words.flatten(2)[:, :, None, pairs]
    more = None if turns is None else turns.flatten(2)[:, :, None, pairs]
    return angles.phase_at(flat, more, ids, 0, False, len(positions))[0, 0]


def _float32(inv_freq: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angle = positions.float()[:, None] * inv_freq.float()
    return angle.cos(), angle.sin()


_WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], Iterable[torch.Tensor]]] = {
    FLOAT32: _float32,
    TABLE: lambda inv_freq, ids: [one.bfloat16() for one in _float32(inv_freq, ids)],
    FREQUENCIES: lambda inv_freq, ids: _float32(inv_freq.bfloat16(), ids),
    POSITIONS: lambda inv_freq, ids: _float32(inv_freq, ids.bfloat16()),
}
