"""Frequency rules: how fast each channel pair turns.

A rule is a pure function from (rotary dimension, base, length of the sequence) to
:class:`Frequencies`. Frequencies are kept as exact decimals, with far more digits than a float64 has,
because a phase word has 64 significant bits and its last bit must be right.

A new rule is one class here: a frozen dataclass that derives from :class:`Rule` is known to
:class:`tightrope.RopeSpec`, to its dictionaries and to configurations by its ``names`` and ``keys``.
docs/extending.md shows one.
"""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import torch

from ._errors import bad_type, bad_value, public
from ._rules import (
    CONTEXT as CONTEXT,
    RULES as RULES,
    TWO_PI as TWO_PI,
    Frequencies as Frequencies,
    Keys as Keys,
    Rule as Rule,
    number,
)

Nested: TypeAlias = (
    "tuple[float, ...] | tuple[tuple[float, ...], ...] | tuple[tuple[tuple[float, ...], ...], ...]"
)


@lru_cache(maxsize=256)
def default(rotary_dim: int, base: float) -> Frequencies:
    r"""The rule of the first RoPE paper, :math:`\omega_k = base^{-2k/rotary\_dim}`.

    Args:
        rotary_dim: number of channels that rotate; even.
        base: positive; the wavelengths run from 2π to nearly 2π · base positions.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    >>> [round(float(omega), 6) for omega in default(4, 10000.0).exact]
    [1.0, 0.01]
    """
    if rotary_dim == 0:
        return Frequencies(())
    with decimal.localcontext(CONTEXT):
        return Frequencies(_row(rotary_dim // 2, Decimal(base).ln() * -2 / rotary_dim))


def _row(pairs: int, step: Decimal) -> tuple[Decimal, ...]:
    """The geometric row ``exp(k · step)``.

    One exponential in all; the products lose one digit in the sixtieth place each.
    """
    ratio, omega = step.exp(), Decimal(1)
    row = []
    for _ in range(pairs):
        row.append(omega)
        omega *= ratio
    return tuple(row)


@dataclass(frozen=True)
class Linear(Rule):
    """Position interpolation: every pair turns ``factor`` times slower, ω' = ω / factor.

    Positions are left alone and frequencies divided, which is the same angle; so an integer position
    stays an integer, whatever the factor.

    Args:
        factor: how many times longer sequences become.

    Raises:
        ValueError, TypeError: a factor that is no positive number.

    Source: Chen et al., Position Interpolation (arXiv 2306.15595), equation 4.

    >>> Linear(4.0).frequencies(4, 10000.0).inv_freq.tolist()
    [0.25, 0.0025]
    """

    names = ("linear",)
    keys: ClassVar[Keys] = {"factor": ("factor",)}

    factor: float

    def __post_init__(self) -> None:
        self._set(factor=self._positive("factor"))

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        factor = Decimal(self.factor)
        return Frequencies(tuple(omega / factor for omega in default(rotary_dim, base).exact))


@dataclass(frozen=True)
class NTK(Rule):
    """NTK-aware scaling: another base, so that fast pairs keep their speed and slow ones scale.

    base' = base · factor^(d / (d − 2)) with d = ``rotary_dim``. The exponent is chosen so that the
    slowest pair, k = d/2 − 1, is divided by ``factor`` exactly and the fastest, k = 0, by nothing.
    With d = 2 there is only that one pair, whose frequency is 1 for any base.

    Details that implementations get wrong: d is the number of channels that rotate, not the width of
    the head; and "alpha" in configurations (Hunyuan, ExLlama) is this factor, not a new base.

    Args:
        factor: what the slowest pair is divided by.

    Raises:
        ValueError, TypeError: a factor that is no positive number.

    Source: bloc97, 2023, as in Peng et al., YaRN (arXiv 2309.00071), section 3.1, definition 1.

    >>> NTK(8.0).frequencies(4, 10000.0).inv_freq.tolist()
    [1.0, 0.00125]
    """

    names = ("ntk",)
    keys: ClassVar[Keys] = {"factor": ("factor", "alpha")}

    factor: float

    def __post_init__(self) -> None:
        self._set(factor=self._positive("factor"))

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        return Frequencies(_stretched(rotary_dim, base, Decimal(self.factor)))


def _stretched(rotary_dim: int, base: float, scale: Decimal) -> tuple[Decimal, ...]:
    """The row of base · scale^(d/(d−2)): ω_k = base^(−2k/d) · scale^(−2k/(d−2))."""
    if rotary_dim == 0:
        return ()
    step = Decimal(base).ln() * -2 / rotary_dim
    if rotary_dim > 2:
        step -= 2 * scale.ln() / (rotary_dim - 2)
    return _row(rotary_dim // 2, step)


@dataclass(frozen=True)
class DynamicNTK(Rule):
    """NTK-aware scaling by the length of the sequence itself.

    Up to ``original_max_position`` = L0 the frequencies are the default ones. For a length L above it
    they are those of :class:`NTK` with the scale ``factor · L / L0 − (factor − 1)``, which grows from
    1 at L0. With ``factor=1`` that is L / L0, the rule as the paper has it.

    Details that implementations get wrong: L is the length of the row itself, so a row does not
    change with its neighbours in a batch or with what ran before (transformers 5.23 keeps the
    frequencies of the longest sequence seen until one below L0 comes); the switch is at L > L0, not
    at L >= L0; and keys that were cached under another length must be re-rotated before they meet
    queries of this one.

    Args:
        factor: how fast the scale grows.
        original_max_position: L0, the length that the model was trained with.

    Raises:
        ValueError, TypeError: a factor or a length that is no positive number.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.3 and appendix A.2 (factor 1); emozilla,
    2023, for the factor, as in transformers.

    >>> rule = DynamicNTK(2.0, original_max_position=4096)
    >>> rule.frequencies(4, 10000.0, seq_len=4096) == rule.frequencies(4, 10000.0)
    True
    >>> rule.frequencies(4, 10000.0, seq_len=8192).inv_freq.tolist()[1] * 3
    0.01
    """

    names = ("dynamic",)
    keys: ClassVar[Keys] = {
        "factor": ("factor",),
        "original_max_position": ("original_max_position_embeddings",),
    }
    by_length = True
    ntk_by_length = True

    factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        self._set(factor=self._positive("factor"), original_max_position=self._length())

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
        if seq_len is None:
            return default(rotary_dim, base)
        excess = Decimal(seq_len - self.original_max_position) / self.original_max_position
        return Frequencies(_stretched(rotary_dim, base, 1 + Decimal(self.factor) * excess))

    def inv_freq_beyond(self, within: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """In float64: relative error at most 1e-15 · (4 + 2 ln scale), so 4e-14 up to scale 1e7."""
        excess = (lengths - self.original_max_position) / self.original_max_position
        logarithm = torch.log1p(self.factor * excess)[:, None]
        pairs = within.shape[0]
        index = torch.arange(pairs, dtype=torch.float64, device=lengths.device)
        # The exponent is 2k / (d − 2), which is k / (d/2 − 1).
        return within * torch.exp(-index * logarithm / max(pairs - 1, 1))


@dataclass(frozen=True)
class YaRN(Rule):
    """YaRN: slow pairs are interpolated, fast ones kept, and a ramp lies between.

    Pair k turns ``r = L0 · ω_k / 2π`` times within the original length L0. The index at which that is
    n turns is ``c(n) = d · ln(L0 / 2πn) / (2 ln base)``. With low = max(⌊c(beta_fast)⌋, 0) and
    high = min(⌈c(beta_slow)⌉, d − 1) and t = clamp((k − low) / (high − low), 0, 1),

        ω' = (1 − t) · ω + t · ω / factor

    so that pairs up to ``low`` keep their exact word and pairs from ``high`` have that of
    :class:`Linear`.

    Details that implementations get wrong:

    - The ramp is linear in the index k, as in the authors' code and every trained model; section 3.2
      of the paper has it linear in the number of turns r.
    - ``truncate=False`` (gpt-oss) leaves out ⌊ ⌋ and ⌈ ⌉. transformers 5.23 ignores it where
      configurations are nested per layer type.
    - ``high`` is bounded by d − 1 although there are only d/2 pairs. Where low = high the ramp is
      0.001 wide.
    - The factor on the rotated channels is ``attention_factor`` if given. Otherwise, with
      m(w) = 0.1 · w · ln(factor) + 1 for factor > 1, else 1: it is m(mscale) / m(mscale_all_dim),
      where ``mscale`` defaults to 1 and ``mscale_all_dim`` to 0. That is the paper's
      0.1 · ln(factor) + 1 when neither is given, and 1 when both are equal, as in DeepSeek-V2 and V3.
      transformers 5.23 looks at the two only together, so it differs where one is given or one is 0.
    - DeepSeek's attention multiplies its softmax scale by m(mscale_all_dim)² besides: see
      :attr:`softmax_scaling`, which nothing here applies.

    Args:
        factor: how many times longer sequences become.
        original_max_position: L0, the length that the model was trained with.
        beta_fast: pairs with at least so many turns within L0 are kept.
        beta_slow: pairs with at most so many turns within L0 are interpolated.
        truncate: whether the ends of the ramp are rounded outwards to whole indices.
        attention_factor: factor on the rotated channels; None to derive it.
        mscale, mscale_all_dim: DeepSeek's weights of the derived factor.

    Raises:
        ValueError, TypeError: parameters out of range; a base that is not above 1.

    Source: Peng et al., YaRN (arXiv 2309.00071), sections 3.2 to 3.4, equation 22 and the authors'
    code; DeepSeek-V2 (arXiv 2405.04434), section 3.1.4, and its modelling code.

    >>> rule = YaRN(4.0, original_max_position=4096)
    >>> round(rule.frequencies(64, 10000.0).attention_scaling, 6)
    1.138629
    >>> YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707).frequencies(64, 1e4).attention_scaling
    1.0
    """

    names = ("yarn", "deepseek_yarn")
    keys: ClassVar[Keys] = {
        "factor": ("factor",),
        "original_max_position": ("original_max_position_embeddings",),
        "beta_fast": ("beta_fast",),
        "beta_slow": ("beta_slow",),
        "truncate": ("truncate",),
        "attention_factor": ("attention_factor",),
        "mscale": ("mscale",),
        "mscale_all_dim": ("mscale_all_dim",),
    }

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @public("YaRN")
    def __post_init__(self) -> None:
        self._set(
            factor=self._positive("factor"),
            original_max_position=self._length(),
            beta_fast=self._positive("beta_fast"),
            beta_slow=self._positive("beta_slow"),
            attention_factor=self._positive_or_none("attention_factor"),
        )
        for field in ("mscale", "mscale_all_dim"):
            value = getattr(self, field)
            if value is not None:
                self._set(**{field: number(field, value, zero=True)})
        if not isinstance(self.truncate, bool):
            raise bad_type(f"truncate must be a bool but got {self.truncate!r}")
        if self.beta_fast < self.beta_slow:
            raise bad_value(
                f"beta_fast must be at least beta_slow but got {self.beta_fast} and "
                f"{self.beta_slow}"
            )

    @public("YaRN")
    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        if not base > 1:
            raise bad_value(f"base must be above 1 but got {base}")
        low, high = self._ramp(rotary_dim, base)
        factor, exact = Decimal(self.factor), []
        for k, omega in enumerate(default(rotary_dim, base).exact):
            t = min(max((k - low) / (high - low), Decimal(0)), Decimal(1))
            # Both ends of the ramp are their own formulas, so their words are exact.
            exact.append(
                omega if t == 0 else omega / factor if t == 1 else omega * (1 - t + t / factor)
            )
        return Frequencies(tuple(exact), self._attention_scaling())

    def _ramp(self, rotary_dim: int, base: float) -> tuple[Decimal, Decimal]:
        """The indices of pairs between which the ramp lies; they differ."""
        log_base = Decimal(base).ln()

        def index(turns: float) -> Decimal:
            span = (self.original_max_position / (TWO_PI * Decimal(turns))).ln()
            return rotary_dim * span / (2 * log_base)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low = low.to_integral_value(decimal.ROUND_FLOOR)
            high = high.to_integral_value(decimal.ROUND_CEILING)
        low, high = max(low, Decimal(0)), min(high, Decimal(rotary_dim - 1))
        return low, high if low != high else high + Decimal("0.001")

    def _attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        mscale = 1.0 if self.mscale is None else self.mscale
        return float(self._magnitude(mscale) / self._magnitude(self.mscale_all_dim or 0.0))

    def _magnitude(self, weight: float) -> Decimal:
        """m(weight)."""
        if self.factor <= 1.0:
            return Decimal(1)
        return Decimal("0.1") * Decimal(weight) * Decimal(self.factor).ln() + 1

    @property
    def softmax_scaling(self) -> float:
        """m(mscale_all_dim)², by which DeepSeek's attention multiplies its softmax scale.

        1.0 without ``mscale_all_dim``. It is no part of the rotation, and nothing here applies it.

        >>> round(YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0).softmax_scaling, 6)
        1.873854
        """
        with decimal.localcontext(CONTEXT):
            return float(self._magnitude(self.mscale_all_dim or 0.0) ** 2)


@dataclass(frozen=True)
class LongRoPE(Rule):
    """LongRoPE: a divisor of its own for every pair, one set for short and one for long sequences.

    ω'_k = ω_k / short_factor[k] up to the length L0 = ``original_max_position``, and
    ω_k / long_factor[k] for every longer sequence. The factor on the rotated channels is
    ``attention_factor`` if given; ``short_mscale`` and ``long_mscale`` if given; and otherwise
    √(1 + ln(factor) / ln(L0)), or 1 for factor <= 1.

    Details that implementations get wrong: which set applies is decided by the length of the row
    itself, not by the capacity of a cache or the longest row of the batch, and at L > L0: a sequence
    of exactly L0 tokens is short. Keys cached before the switch must be re-rotated after it. The
    factor is the ratio of the longest length to L0, which configurations often leave to be computed
    from ``max_position_embeddings``; without it there is no factor on the channels to guess, so one
    of the three must be given. Mscales may differ between short and long (PhiMoE).

    Args:
        short_factor, long_factor: one divisor per pair.
        original_max_position: L0, the length that the model was trained with.
        factor: longest length divided by L0.
        attention_factor: factor on the rotated channels, for all lengths.
        short_mscale, long_mscale: factor on the rotated channels, up to L0 and above.

    Raises:
        ValueError, TypeError: parameters out of range; lists that are not one number per pair;
            nothing, or too much, to take the factor on the channels from.

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
    keys: ClassVar[Keys] = {
        "short_factor": ("short_factor",),
        "long_factor": ("long_factor",),
        "original_max_position": ("original_max_position_embeddings",),
        "factor": ("factor",),
        "attention_factor": ("attention_factor",),
        "short_mscale": ("short_mscale",),
        "long_mscale": ("long_mscale",),
    }
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
        self._set(
            short_factor=self._divisors("short_factor"),
            long_factor=self._divisors("long_factor"),
            original_max_position=self._length(least=2),
            factor=self._positive_or_none("factor"),
            attention_factor=self._positive_or_none("attention_factor"),
            short_mscale=self._positive_or_none("short_mscale"),
            long_mscale=self._positive_or_none("long_mscale"),
        )
        if len(self.short_factor) != len(self.long_factor):
            raise bad_value(
                "short_factor and long_factor must have one number per pair each but got "
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
        return tuple(number(f"{field}[{k}]", value) for k, value in enumerate(values))

    def regime(self, seq_len: int | None) -> int | None:
        """None up to the original length; one and the same length for all that are longer."""
        if seq_len is None or seq_len <= self.original_max_position:
            return None
        return self.original_max_position + 1

    def inv_freq_beyond(self, within: torch.Tensor, lengths: torch.Tensor) -> None:
        """Nothing to make: there is one set for all longer sequences."""

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


@dataclass(frozen=True)
class Llama3(Rule):
    """Llama 3.1: as YaRN a band of pairs that blend, with its ends counted in turns.

    With r = L0 · ω / 2π turns within the original length L0: pairs with r > high_freq_factor are
    kept, pairs with r < low_freq_factor are divided by ``factor``, and between them

        s = (r − low_freq_factor) / (high_freq_factor − low_freq_factor)
        ω' = s · ω + (1 − s) · ω / factor

    Kept pairs have the exact words of the default rule, divided ones those of :class:`Linear`.

    Details that implementations get wrong: ``original_max_position`` is 8192, the length before the
    extension, not the 131072 of ``max_position_embeddings``; the blend is linear in r, where YaRN's is
    linear in the index of the pair; and there is no factor on the rotated channels.

    Args:
        factor: what slow pairs are divided by.
        low_freq_factor: pairs with fewer turns within L0 are slow.
        high_freq_factor: pairs with more turns within L0 are kept.
        original_max_position: L0, the length that the model was first trained with.

    Raises:
        ValueError, TypeError: parameters out of range; a high factor below the low one. Equal ones are a
            step without a blend, as in Llama 4 Scout.

    Source: Llama 3 (arXiv 2407.21783), section 3.4.2, and ``apply_scaling`` in Meta's reference code
    for Llama 3.1.

    >>> rule = Llama3(8.0, 1.0, 4.0, original_max_position=8192)
    >>> rule.frequencies(128, 500_000.0).inv_freq.tolist()[0]
    1.0
    """

    names = ("llama3",)
    keys: ClassVar[Keys] = {
        "factor": ("factor",),
        "low_freq_factor": ("low_freq_factor",),
        "high_freq_factor": ("high_freq_factor",),
        "original_max_position": ("original_max_position_embeddings",),
    }

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    @public("Llama3")
    def __post_init__(self) -> None:
        self._set(
            factor=self._positive("factor"),
            low_freq_factor=self._positive("low_freq_factor"),
            high_freq_factor=self._positive("high_freq_factor"),
            original_max_position=self._length(),
        )
        if self.high_freq_factor < self.low_freq_factor:
            raise bad_value(
                f"high_freq_factor must be at least low_freq_factor but got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        factor, low = Decimal(self.factor), Decimal(self.low_freq_factor)
        high = Decimal(self.high_freq_factor)
        exact = []
        for omega in default(rotary_dim, base).exact:
            turns = self.original_max_position * omega / TWO_PI
            if turns > high or turns == low == high:
                exact.append(omega)
            elif turns < low:
                exact.append(omega / factor)
            else:
                s = (turns - low) / (high - low)
                exact.append(omega * (s + (1 - s) / factor))
        return Frequencies(tuple(exact))


@dataclass(frozen=True)
class Proportional(Rule):
    """p-RoPE: only the fastest pairs turn; the slow rest have frequency zero.

    ω_k = base^(−2k/d) / factor for the first ``rotary_fraction · d / 2`` pairs, rounded down, and 0
    for the others; d is the whole width that pairs are made of.

    Details that implementations get wrong: this is not partial rotation. The pairs that turn have the
    denominator d of the whole width, and channel i is paired with i + d/2, not with its neighbour
    within a narrower slice. So a spec with this rule has ``rotary_dim`` = the width of the head.

    Args:
        rotary_fraction: share of the pairs that turn, from 0 to 1. ``rotary_fraction · d`` is rounded
            to float64 before it is halved and rounded down, as the models' code does: 0.6 of 10
            channels are 3 pairs.
        factor: what their frequencies are divided by.

    Raises:
        ValueError, TypeError: a fraction outside [0, 1], a factor that is no positive number.

    Source: Barbero et al., Round and Round We Go (arXiv 2410.06205), section 6; Gemma 4 in
    transformers for the factor.

    >>> Proportional(0.5).frequencies(8, 10000.0).inv_freq.tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    names = ("proportional",)
    keys: ClassVar[Keys] = {"rotary_fraction": ("partial_rotary_factor",), "factor": ("factor",)}

    rotary_fraction: float
    factor: float = 1.0

    @public("Proportional")
    def __post_init__(self) -> None:
        fraction = number("rotary_fraction", self.rotary_fraction, zero=True)
        if fraction > 1:
            raise bad_value(f"rotary_fraction must be at most 1 but got {fraction}")
        self._set(rotary_fraction=fraction, factor=self._positive("factor"))

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        turning = int(self.rotary_fraction * rotary_dim // 2)
        factor = Decimal(self.factor)
        row = default(rotary_dim, base).exact
        still = (Decimal(0),) * (len(row) - turning)
        return Frequencies(tuple(omega / factor for omega in row[:turning]) + still)


@dataclass(frozen=True)
class Given(Rule):
    """Frequencies as numbers: learned and then frozen, or of a rule that is not here.

    They may differ per head, and per head and axis: RoPE-mixed. The base of a spec plays no part.

    Args:
        inv_freq: radians per position, nested as ``(pairs,)``, ``(heads, pairs)`` or
            ``(axes, heads, pairs)``; of any sign. A tensor: :meth:`of`.

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
    keys: ClassVar[Keys] = {"inv_freq": ("inv_freq",)}

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
        """From a floating tensor of any device; its values now.

        >>> Given.of(torch.tensor([1.0, 0.25]))
        Given(inv_freq=(1.0, 0.25))
        """
        if not isinstance(inv_freq, torch.Tensor) or not inv_freq.is_floating_point():
            raise bad_type("inv_freq must be a floating tensor", inv_freq=inv_freq)
        if 0 in inv_freq.shape[:-1]:
            raise bad_value("inv_freq must have heads and axes", inv_freq=inv_freq)
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
        exact = tuple(Decimal(omega) for omega in _flat(self.inv_freq))
        return Frequencies(exact, 1.0, None if len(shape) == 1 else shape)


def _frozen(values: Any) -> Any:
    """Nested sequences of numbers as nested tuples of floats."""
    if isinstance(values, numbers.Real) and not isinstance(values, bool):
        omega = float(values)
        if not math.isfinite(omega):
            raise bad_value(f"inv_freq must be finite but got {omega}")
        return omega
    if isinstance(values, torch.Tensor):
        raise bad_type("inv_freq must be nested numbers; call Given.of", inv_freq=values)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise bad_type(f"inv_freq must hold numbers but got {values!r}")
    return tuple(_frozen(value) for value in values)


def _shape_of(nested: Any) -> tuple[int, ...]:
    if not isinstance(nested, tuple):
        return ()
    shapes = {_shape_of(part) for part in nested}
    if len(shapes) > 1:
        raise bad_value(f"inv_freq must be nested evenly but got {sorted(shapes)} side by side")
    return (len(nested), *(shapes.pop() if shapes else ()))


def _flat(nested: Any) -> Iterator[float]:
    if isinstance(nested, tuple):
        for part in nested:
            yield from _flat(part)
    else:
        yield nested
