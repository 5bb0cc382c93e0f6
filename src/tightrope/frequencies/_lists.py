"""Rules with one given number per pair: the divisors of LongRoPE, and explicit frequencies."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import torch

from .._errors import bad_type, bad_value, check_tensor, positive, public
from .._value import checked_calls
from ._row import default
from ._rule import Frequencies, Rule

Nested: TypeAlias = (
    "tuple[float, ...] | tuple[tuple[float, ...], ...] | tuple[tuple[tuple[float, ...], ...], ...]"
)


@checked_calls
@dataclass(frozen=True)
class LongRoPE(Rule):
    """LongRoPE: one divisor per pair, with separate sets for short and long sequences.

    ω'_k = ω_k / short_factor[k] up to the length L0 = ``original_max_position``, and
    ω_k / long_factor[k] for every longer sequence. The factor on the rotated channels is
    ``attention_factor`` if given; else ``short_mscale`` or ``long_mscale`` if given; else
    √(1 + ln(factor) / ln(L0)), or 1 for factor <= 1.

    Details that implementations get wrong: the length of the row itself selects the set, not the
    capacity of a cache or the longest row of the batch, and the switch is at L > L0: a sequence of
    exactly L0 tokens is short. Keys cached before the switch must be re-rotated after it. ``factor``
    is the ratio of the longest length to L0; if a configuration omits it, compute it from
    ``max_position_embeddings``. The factor on the channels is never guessed: give ``factor``,
    ``attention_factor`` or both mscales. Mscales may differ between short and long (PhiMoE).

    Args:
        short_factor, long_factor: one divisor per pair.
        original_max_position: L0, the training length.
        factor: longest length divided by L0.
        attention_factor: factor on the rotated channels, for all lengths.
        short_mscale, long_mscale: factors on the rotated channels, for lengths up to L0 and for
            longer ones.

    Raises:
        ValueError, TypeError: parameters out of range; lists of different lengths; no parameter, or
            conflicting ones, for the factor on the channels.

    Source: Ding et al., LongRoPE (arXiv 2402.13753), section 3; Phi-3 (arXiv 2404.14219) and its
    modelling code.

    >>> rule = LongRoPE((1.0, 1.0), (1.0, 32.0), original_max_position=4096, factor=32.0)
    >>> rule.frequencies(4, 10000.0, seq_len=4096).inv_freq.tolist()
    [1.0, 0.01]
    >>> rule.frequencies(4, 10000.0, seq_len=4097).inv_freq.tolist()
    [1.0, 0.0003125]
    >>> round(rule.frequencies(4, 10000.0).attention_scaling, 6)
    1.190238
    """

    names = ("longrope", "su")
    by_length = True

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None

    @public("LongRoPE")
    def __post_init__(self) -> None:
        self._set(short_factor=self._divisors("short_factor"))
        self._set(long_factor=self._divisors("long_factor"))
        self._length(least=2)
        self._positive("factor", "attention_factor", "short_mscale", "long_mscale", optional=True)
        if len(self.short_factor) != len(self.long_factor):
            raise bad_value(
                "short_factor and long_factor must have the same length, one number per pair, but got "
                f"{len(self.short_factor)} and {len(self.long_factor)}"
            )
        if (self.short_mscale is None) != (self.long_mscale is None):
            raise bad_value(
                f"short_mscale and long_mscale must be given together but got "
                f"{self.short_mscale} and {self.long_mscale}"
            )
        if self.attention_factor is not None and self.short_mscale is not None:
            raise bad_value(
                "attention_factor must not be given together with short_mscale and long_mscale "
                f"but got {self.attention_factor}, {self.short_mscale} and {self.long_mscale}"
            )
        if self.factor is self.attention_factor is self.short_mscale is None:
            raise bad_value(
                "factor (the longest length / original_max_position), attention_factor, or "
                "short_mscale and long_mscale must be given but got none"
            )

    def _divisors(self, field: str) -> tuple[float, ...]:
        values = getattr(self, field)
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise bad_type(f"{field} must be a sequence of numbers but got {values!r}")
        return tuple(positive(f"{field}[{k}]", value) for k, value in enumerate(values))

    def regime(self, seq_len: int | None) -> int | None:
        """Return None up to the original length, and the same number for all longer lengths."""
        if seq_len is None or seq_len <= self.original_max_position:
            return None
        return self.original_max_position + 1

    @public("LongRoPE")
    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
        if 2 * len(self.short_factor) != rotary_dim:
            raise bad_value(
                "short_factor and long_factor must have one number per pair, "
                f"{rotary_dim // 2}, but got {len(self.short_factor)}"
            )
        divisors = self.short_factor if seq_len is None else self.long_factor
        row = default(rotary_dim, base).exact
        exact = (omega / Decimal(divisor) for omega, divisor in zip(row, divisors, strict=True))
        return Frequencies(tuple(exact), self._attention_scaling(seq_len))

    def _attention_scaling(self, seq_len: int | None) -> float:
        given = self.attention_factor
        if given is None:
            given = self.short_mscale if seq_len is None else self.long_mscale
        if given is not None:
            return given
        if self.factor is None or self.factor <= 1.0:
            return 1.0
        ratio = Decimal(self.factor).ln() / Decimal(self.original_max_position).ln()
        return float((1 + ratio).sqrt())


@checked_calls
@dataclass(frozen=True)
class Given(Rule):
    """Explicit frequencies: learned and then frozen, or from a rule that is not implemented here.

    They may differ per head, or per axis and head (RoPE-Mixed). The base of the spec is ignored.

    Args:
        inv_freq: radians per position, nested as ``(pairs,)``, ``(heads, pairs)`` or
            ``(axes, heads, pairs)``; of any sign. For a tensor use :meth:`of`.

    Raises:
        ValueError, TypeError: numbers that are not finite, lists of unequal lengths.

    Source: per-head and mixed frequencies: Heo et al., RoPE for Vision Transformer
    (arXiv 2403.13298), section 3.2.

    >>> Given((1.0, 0.25)).frequencies(4, 10000.0).inv_freq.tolist()
    [1.0, 0.25]
    >>> Given(((1.0, 0.25), (2.0, 0.5))).shape
    (2, 2)
    """

    names = ("given",)

    inv_freq: Nested

    @public("Given")
    def __post_init__(self) -> None:
        inv_freq = _frozen(self.inv_freq)
        shape = _shape_of(inv_freq)
        if not 1 <= len(shape) <= 3:
            raise bad_value(
                "inv_freq must be nested as (pairs,), (heads, pairs) or (axes, heads, pairs) but "
                f"got {len(shape)} levels"
            )
        self._set(inv_freq=inv_freq)

    @classmethod
    @public("Given.of")
    def of(cls, inv_freq: torch.Tensor) -> Given:
        """Make the rule from the current values of a floating-point tensor on any device.

        No gradient reaches the tensor: to learn frequencies, pass ``spec.at(positions, inv_freq=…)``.

        >>> Given.of(torch.tensor([1.0, 0.25]))
        Given(inv_freq=(1.0, 0.25))
        """
        check_tensor("inv_freq", inv_freq, "a floating tensor", sharded=True)
        if 0 in inv_freq.shape[:-1]:
            raise bad_value("inv_freq must have at least one head and axis", inv_freq=inv_freq)
        return cls(inv_freq.detach().double().cpu().tolist())  # type: ignore[arg-type]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(pairs,)``, ``(heads, pairs)`` or ``(axes, heads, pairs)``."""
        return _shape_of(self.inv_freq)

    @public("Given")
    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        shape = self.shape
        if 2 * shape[-1] != rotary_dim:
            raise bad_value(
                f"inv_freq must have one number per pair, {rotary_dim // 2}, but got {shape[-1]}"
            )
        flat: Iterable[Any] = self.inv_freq
        for _ in shape[1:]:
            flat = itertools.chain.from_iterable(flat)
        return Frequencies(tuple(map(Decimal, flat)), 1.0, None if len(shape) == 1 else shape)


def _frozen(values: Any) -> Any:
    """Convert nested sequences of numbers to nested tuples of floats."""
    if isinstance(values, numbers.Real) and not isinstance(values, bool):
        omega = float(values)
        if not math.isfinite(omega):
            raise bad_value(f"inv_freq must be finite but got {omega}")
        return omega
    if isinstance(values, torch.Tensor):
        raise bad_type(
            "inv_freq must hold numbers but got a tensor; call Given.of", inv_freq=values
        )
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise bad_type(f"inv_freq must hold numbers but got {values!r}")
    return tuple(_frozen(value) for value in values)


def _shape_of(nested: Any) -> tuple[int, ...]:
    if not isinstance(nested, tuple):
        return ()
    shapes = {_shape_of(part) for part in nested}
    if len(shapes) > 1:
        raise bad_value(f"inv_freq must be nested evenly but got parts of shapes {sorted(shapes)}")
    return (len(nested), *(shapes.pop() if shapes else ()))
