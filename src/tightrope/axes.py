"""Axes: the assignment of channel pairs to coordinates of a position (height, width, time).

A token of an image or a video has several coordinates. Model families assign the pairs to them
differently; an :class:`Axes` records one assignment, pair by pair. The frequencies themselves come
from the rule of a spec, the coordinates from positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ._errors import bad_type, bad_value, check_flag, plain_integer, public
from ._value import Value, checked_calls

__all__ = ["Axes"]


@checked_calls
@dataclass(frozen=True)
class Axes(Value):
    """An assignment of pairs to coordinates and frequencies.

    Two assignments are equal when they give every pair the same coordinate and frequency, however
    they were made.

    Attributes:
        count: number of coordinates of a position.
        pairs: one ``(axis, index, dim)`` per pair. Coordinate ``axis`` rotates the pair, with frequency
            number ``index`` of the row that the spec's rule gives for ``dim`` channels; with the default
            rule, that frequency is ``base^(−2·index/dim)``.

    Raises:
        ValueError: a count below 1, an entry without exactly three values, an axis or index out of
            range, or a dim that is odd or below 2.
        TypeError: values that are not ints, or ``pairs`` or an entry that is not a sequence.

    Source: each constructor names the paper and the models.

    >>> Axes(2, ((0, 0, 4), (1, 0, 4)))
    Axes(count=2, pairs=((0, 0, 4), (1, 0, 4)))
    >>> Axes(2, ((0, 0, 2), (1, 0, 2))) == Axes.blocks((1, 1))
    True
    """

    count: int
    pairs: tuple[tuple[int, int, int], ...]

    @public("Axes")
    def __post_init__(self) -> None:
        count = plain_integer("count", self.count)
        if count < 1:
            raise bad_value(f"count must be at least 1 but got {count}")
        rule = "pairs must be a sequence of (axis, index, dim) but got"
        pairs = []
        for pair in _sequence(rule, self.pairs):
            triple = _sequence(rule, pair)
            if len(triple) != 3:
                raise bad_value(f"{rule} {pair!r}")
            axis, index, dim = (
                plain_integer("each of axis, index and dim", value) for value in triple
            )
            if not 0 <= axis < count:
                raise bad_value(f"axis must lie in [0, {count}) but got {axis} in {triple}")
            if dim < 2 or dim % 2:
                raise bad_value(f"dim must be even and positive but got {dim} in {triple}")
            if not 0 <= index < dim // 2:
                raise bad_value(
                    f"index must lie in [0, {dim // 2}), the frequencies of {dim} channels, but "
                    f"got {index} in {triple}"
                )
            pairs.append((axis, index, dim))
        self._set(count=count, pairs=tuple(pairs))

    @classmethod
    @public("Axes.sections")
    def sections(cls, sizes: Iterable[int], interleaved: bool = False) -> Axes:
        """Multimodal RoPE (M-RoPE): one row of frequencies, each pair assigned to one axis.

        Pair ``k`` has frequency ``k`` of the whole rotary dimension, as without axes, so a token
        whose coordinates are all equal rotates as text does.

        Args:
            sizes: number of pairs of each axis, ``mrope_section`` in a configuration.
            interleaved: false: the first ``sizes[0]`` pairs belong to axis 0, the next ``sizes[1]``
                to axis 1, and so on. True: pair ``k`` belongs to axis ``a = k % count`` if
                ``a >= 1`` and ``k < count · sizes[a]``, and to axis 0 otherwise. So axes alternate
                (t h w t h w …), and pairs that another axis no longer needs belong to axis 0.

        Raises:
            ValueError: no sizes or a negative one; or sizes that cannot be interleaved, as an axis
                other than 0 would need a pair after the last.
            TypeError: sizes that are not ints, or ``interleaved`` not a bool.

        Source: consecutive: Qwen2-VL (arXiv 2409.12191), section 2.1; interleaved: Qwen3-VL (arXiv
        2511.21631).

        >>> Axes.sections((1, 2)).pairs
        ((0, 0, 6), (1, 1, 6), (1, 2, 6))
        >>> [axis for axis, _, _ in Axes.sections((4, 2, 2), interleaved=True).pairs]
        [0, 1, 2, 0, 1, 2, 0, 0]
        """
        sizes = _sizes(sizes)
        check_flag("interleaved", interleaved)
        count, total = len(sizes), sum(sizes)
        if not interleaved:
            owner = [axis for axis, size in enumerate(sizes) for _ in range(size)]
        else:
            owner = [0] * total
            for axis in range(1, count):
                last = axis + count * (sizes[axis] - 1)
                if sizes[axis] and last >= total:
                    raise bad_value(
                        f"sizes must fit pairs 0 to {total - 1} when interleaved but axis {axis} would "
                        f"reach pair {last}; got {sizes}"
                    )
                for pair in range(axis, last + 1, count):
                    owner[pair] = axis
        return cls(count, tuple((axis, k, 2 * total) for k, axis in enumerate(owner)))

    @classmethod
    @public("Axes.blocks")
    def blocks(cls, sizes: Iterable[int]) -> Axes:
        """Axial RoPE: each axis rotates its own block of pairs, with its own row of frequencies.

        Axis ``a`` has ``sizes[a]`` consecutive pairs, with the frequencies of a head of
        ``2 · sizes[a]`` channels.

        Args:
            sizes: number of pairs of each axis; they may differ, as they do for video.

        Source: images: EVA-02 (arXiv 2303.11331), Qwen2-VL's vision tower (arXiv 2409.12191), DINOv3
        (arXiv 2508.10104). Video with unequal blocks: Wan (arXiv 2503.20314).

        >>> Axes.blocks((2, 1)).pairs
        ((0, 0, 4), (0, 1, 4), (1, 0, 2))
        """
        sizes = _sizes(sizes)
        return cls(
            len(sizes),
            tuple((axis, j, 2 * size) for axis, size in enumerate(sizes) for j in range(size)),
        )

    @classmethod
    @public("Axes.strided")
    def strided(cls, count: int, pairs: int) -> Axes:
        """Strided axial RoPE: each axis takes every ``count``-th of the same frequencies.

        Axis ``a`` rotates the ``a``-th block of ``pairs / count`` pairs, with frequencies ``a``,
        ``a + count``, ``a + 2 · count``, … of the ``pairs`` that the spec's rule gives.

        Args:
            count: number of axes.
            pairs: total number of pairs, a multiple of count.

        Source: Pixtral (arXiv 2410.07073).

        >>> Axes.strided(2, pairs=4).pairs
        ((0, 0, 8), (0, 2, 8), (1, 1, 8), (1, 3, 8))
        """
        count, pairs = plain_integer("count", count), plain_integer("pairs", pairs)
        if count < 1:
            raise bad_value(f"count must be at least 1 but got {count}")
        if pairs < 0 or pairs % count:
            raise bad_value(
                f"pairs must be at least 0 and a multiple of count {count} but got {pairs}"
            )
        return cls(
            count,
            tuple(
                (axis, index, 2 * pairs)
                for axis in range(count)
                for index in range(axis, pairs, count)
            ),
        )

    @property
    def rotary_dim(self) -> int:
        """Number of channels that rotate, two per pair.

        >>> Axes.blocks((16, 16)).rotary_dim
        64
        """
        return 2 * len(self.pairs)

    def __repr__(self) -> str:
        # A constructor call that makes an equal value, if there is one: hundreds of triples are unreadable.
        sizes = [0] * self.count
        for axis, _, _ in self.pairs:
            sizes[axis] += 1
        one, total = tuple(sizes), len(self.pairs)
        calls: list[tuple[Any, ...]] = [
            ("sections", one),
            ("blocks", one),
            ("strided", self.count, total),
            ("sections", one, True),
        ]
        for name, *given in calls:
            with suppress(ValueError):  # sizes that cannot be strided or interleaved
                if self == getattr(Axes, name)(*given):
                    return f"Axes.{name}({', '.join(map(repr, given))})"
        return f"Axes(count={self.count}, pairs={self.pairs})"


def _sizes(sizes: object) -> tuple[int, ...]:
    rule = "sizes must be a sequence of ints, one per axis, but got"
    values = tuple(plain_integer("a size", size) for size in _sequence(rule, sizes))
    if not values or min(values) < 0:
        raise bad_value(
            f"sizes must hold at least one number of pairs, none negative, but got {values}"
        )
    return values


def _sequence(rule: str, values: object) -> tuple[object, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise bad_type(f"{rule} {values!r}")
    return tuple(values)
