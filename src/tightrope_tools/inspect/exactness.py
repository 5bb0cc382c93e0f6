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
_TOGETHER = 256  # pairs per step: about 12 MB for each float64 array
_MOST_PAIRS = 1024  # more pairs are thinned evenly to at most this number

WORDS = "phase words"
FLOAT32 = "float32 angles"
TABLE = "float32 angles, bfloat16 table"
FREQUENCIES = "bfloat16 frequencies"
POSITIONS = "bfloat16 positions"

#: Method -> its description in reports.
MEANING = {
    WORDS: "this library, any dtype",
    FLOAT32: "frequency times position in float32, as model files do",
    TABLE: "the same, cos and sin then rounded",
    FREQUENCIES: "after .to(torch.bfloat16) of a module with a buffer",
    POSITIONS: "positions made in the dtype of x",
}

_CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """One way to compute angles, with its errors.

    Attributes:
        name: one of the keys of :data:`MEANING`.
        errors: for each requested length, the largest error of a cosine or sine at positions below it.
        reach: dtype -> number of positions before the first error above the rounding of that dtype;
            empty for the bfloat16 table.
    """

    name: str
    errors: tuple[float, ...]
    reach: dict[str, int]


@dataclass(frozen=True)
class Exactness:
    """The errors of each way to compute angles, below each of some lengths."""

    lengths: tuple[int, ...]
    methods: tuple[Method, ...]

    def method(self, name: str) -> Method:
        """Return a method by its name."""
        return next(method for method in self.methods if method.name == name)


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
    methods = []
    for name, curve in curves.items():
        worst = curve.cummax(0).values
        at = [int(torch.searchsorted(positions, end, right=False)) - 1 for end in ends]
        # The rounding of the table is the limit itself.
        limits = {} if name == TABLE else ROUNDINGS
        reach = {dtype: _reach(positions, worst, limit) for dtype, limit in limits.items()}
        methods.append(Method(name, tuple(float(worst[index]) for index in at), reach))
    return Exactness(ends, tuple(methods))


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
    """Return, by method, the largest error of a cosine or sine of any pair at each position.

    Args:
        positions: int64 ``(tokens,)``, not negative; used for all axes of the spec.
    """
    inv_freq = spec.frequencies(context).inv_freq
    if inv_freq.dim() == 3:
        inv_freq = inv_freq.sum(0)
    inv_freq = inv_freq.flatten()
    worst = {name: torch.zeros(len(positions), dtype=torch.float64) for name in MEANING}
    every = -(-len(inv_freq) // _MOST_PAIRS) or 1
    inv_freq = inv_freq[::every]
    for first in range(0, len(inv_freq), _TOGETHER):
        some = slice(first, first + _TOGETHER)
        phase = phases_at(
            spec, positions, context, slice(first * every, (first + _TOGETHER) * every, every)
        )
        exact = angles.cos_sin(phase, torch.float64)
        made = {WORDS: angles.cos_sin(phase, torch.float32)}
        for name, way in _WAYS.items():
            made[name] = way(inv_freq[some], positions)
        for name, tables in made.items():
            for got, wanted in zip(tables, exact, strict=True):
                error = (got.double() - wanted).abs().amax(-1)
                worst[name] = torch.maximum(worst[name], error)
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


def _float32(inv_freq: torch.Tensor, positions: torch.Tensor) -> _CosSin:
    angle = positions.float()[:, None] * inv_freq.float()
    return angle.cos(), angle.sin()


def _table(inv_freq: torch.Tensor, positions: torch.Tensor) -> _CosSin:
    cos, sin = _float32(inv_freq, positions)
    return cos.bfloat16(), sin.bfloat16()


_WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], _CosSin]] = {
    FLOAT32: _float32,
    TABLE: _table,
    FREQUENCIES: lambda inv_freq, positions: _float32(inv_freq.bfloat16(), positions),
    POSITIONS: lambda inv_freq, positions: _float32(inv_freq, positions.bfloat16()),
}


def _reach(positions: torch.Tensor, worst: torch.Tensor, limit: float) -> int:
    """Return how many positions from 0 on stay within a limit, according to the sample."""
    beyond = (worst > limit).nonzero()
    return EXACT if len(beyond) == 0 else int(positions[int(beyond[0])])
