"""Rules that keep fast pairs, slow down slow pairs and blend between them: YaRN, Llama 3."""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from .._errors import bad_type, bad_value, check_flag, public
from .._value import checked_calls
from ._row import default
from ._rule import CONTEXT, TWO_PI, Frequencies, Keys, Rule


@checked_calls
@dataclass(frozen=True)
class YaRN(Rule):
    """YaRN: interpolates slow pairs, keeps fast ones, and blends linearly (a ramp) between them.

    Pair k turns ``r = L0 · ω_k / 2π`` times within the original length L0. With d = ``rotary_dim``, a
    pair turns n times if its index is ``c(n) = d · ln(L0 / 2πn) / (2 ln base)``. Then:

        low = max(⌊c(beta_fast)⌋, 0)
        high = min(⌈c(beta_slow)⌉, d − 1)
        t = clamp((k − low) / (high − low), 0, 1)
        ω' = (1 − t) · ω + t · ω / factor

    So pairs up to ``low`` keep their exact phase words, and pairs from ``high`` on have those of
    :class:`Linear`.

    Details that implementations get wrong:

    - The ramp is linear in the index k, as in the authors' code and every trained model; in section 3.2
      of the paper it is linear in the number of turns r.
    - ``truncate=False`` (gpt-oss) omits ⌊ ⌋ and ⌈ ⌉. transformers 5.23 ignores it in
      configurations that are nested per layer type.
    - ``high`` is bounded by d − 1 although there are only d/2 pairs. Where low = high the ramp is
      0.001 wide.
    - The factor on the rotated channels is ``attention_factor`` if given, else
      m(mscale) / m(mscale_all_dim), where m(w) is 0.1 · w · ln(factor) + 1 for factor > 1 and 1
      otherwise; ``mscale`` defaults to 1 and ``mscale_all_dim`` to 0. That is the paper's
      0.1 · ln(factor) + 1 when neither is given, and 1 when both are equal, as in DeepSeek-V2 and V3.
      transformers 5.23 uses the two mscales only together, so it differs if just one is given or
      one is 0.
    - DeepSeek's attention also multiplies its softmax scale by m(mscale_all_dim)²: see
      :attr:`softmax_scaling`, which this library does not apply. Others with the same keys do not.

    Args:
        factor: ratio of the extended length to L0.
        original_max_position: L0, the training length.
        beta_fast: pairs with at least this many turns within L0 are kept.
        beta_slow: pairs with at most this many turns within L0 are interpolated.
        truncate: whether to round the ends of the ramp outwards to whole indices.
        attention_factor: factor on the rotated channels; None to derive it.
        mscale, mscale_all_dim: DeepSeek's weights of the derived factor.
        scales_softmax: whether the model's attention multiplies its softmax scale as DeepSeek's does; None if that is
            not known. Configurations do not state it: :meth:`tightrope.RopeSpec.from_config` has it from a table of
            model families.

    Raises:
        ValueError, TypeError: parameters out of range, or a base of at most 1.

    Source: Peng et al., YaRN (arXiv 2309.00071), sections 3.2 to 3.4, equation 22 and the authors'
    code; DeepSeek-V2 (arXiv 2405.04434), section 3.1.4, and its modelling code.

    >>> rule = YaRN(4.0, original_max_position=4096)
    >>> round(rule.frequencies(64, 10000.0).attention_scaling, 6)
    1.138629
    >>> YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707).frequencies(64, 1e4).attention_scaling
    1.0
    """

    names = ("yarn", "deepseek_yarn")
    keys: ClassVar[Keys] = {"scales_softmax": ()}

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    scales_softmax: bool | None = True

    @public("YaRN")
    def __post_init__(self) -> None:
        self._positive("factor", "beta_fast", "beta_slow")
        self._length()
        self._positive("attention_factor", optional=True)
        self._positive("mscale", "mscale_all_dim", zero=True, optional=True)
        check_flag("truncate", self.truncate)
        if not isinstance(self.scales_softmax, bool | None):
            raise bad_type(f"scales_softmax must be a bool or None but got {self.scales_softmax!r}")
        if self.beta_fast < self.beta_slow:
            raise bad_value(
                f"beta_fast must be at least beta_slow but got {self.beta_fast} and "
                f"{self.beta_slow}; they are probably swapped"
            )

    @public("YaRN")
    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:  # noqa: ARG002
        if not base > 1:
            raise bad_value(f"base must be above 1 but got {base}")
        low, high = self._ramp(rotary_dim, base)
        factor, exact = Decimal(self.factor), []
        for k, omega in enumerate(default(rotary_dim, base).exact):
            t = min(max((k - low) / (high - low), Decimal(0)), Decimal(1))
            # Outside the ramp nothing is blended, so phase words equal those of default or Linear.
            exact.append(
                omega if t == 0 else omega / factor if t == 1 else omega * (1 - t + t / factor)
            )
        return Frequencies(tuple(exact), self._attention_scaling())

    def _ramp(self, rotary_dim: int, base: float) -> tuple[Decimal, Decimal]:
        """Return the pair indices of both ends of the ramp; they always differ."""
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
        """Return m(weight), see the class."""
        if self.factor <= 1.0:
            return Decimal(1)
        return Decimal("0.1") * Decimal(weight) * Decimal(self.factor).ln() + 1

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Rule.to_dict`; without ``scales_softmax`` where it has its default, as in 0.3."""
        made = super().to_dict()
        return {
            key: value for key, value in made.items() if (key, value) != ("scales_softmax", True)
        }

    @property
    def softmax_scaling(self) -> float:
        """The factor on the model's softmax scale: m(mscale_all_dim)² in DeepSeek's attention, 1.0 in others.

        It belongs to attention, so this library does not apply it.

        Raises:
            ValueError: ``scales_softmax`` is None, and the factor depends on it.

        >>> round(YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0).softmax_scaling, 6)
        1.873854
        """
        with decimal.localcontext(CONTEXT):
            factor = float(self._magnitude(self.mscale_all_dim or 0.0) ** 2)
        if self.scales_softmax is None and factor != 1.0:
            raise bad_value(
                f"scales_softmax must be known but is None: if the model's attention multiplies its softmax scale by "
                f"{factor:.6g} for mscale_all_dim, as DeepSeek's does, pass scales_softmax=True to YaRN, else False"
            )
        return factor if self.scales_softmax else 1.0


@checked_calls
@dataclass(frozen=True)
class Llama3(Rule):
    """Llama 3.1: like YaRN it blends a band of pairs, but the ends of the band are given in turns.

    With r = L0 · ω / 2π turns within the original length L0: pairs with r > high_freq_factor are
    kept, pairs with r < low_freq_factor are divided by ``factor``, and between them

        s = (r − low_freq_factor) / (high_freq_factor − low_freq_factor)
        ω' = s · ω + (1 − s) · ω / factor

    Kept pairs have the exact phase words of the default rule, divided ones those of :class:`Linear`.

    Details that implementations get wrong: for Llama 3.1 ``original_max_position`` is 8192, the length
    before the extension, not the 131072 of ``max_position_embeddings``; the blend is linear in r, whereas
    YaRN's is linear in the pair index; and there is no factor on the rotated channels.

    Args:
        factor: the divisor of slow pairs.
        low_freq_factor: pairs with fewer turns within L0 are slow.
        high_freq_factor: pairs with more turns within L0 are kept.
        original_max_position: L0, the training length before the extension.

    Raises:
        ValueError, TypeError: parameters out of range, or ``high_freq_factor`` below ``low_freq_factor``.
            Equal factors are allowed: a step without a blend, as in Llama 4 Scout.

    Source: Llama 3 (arXiv 2407.21783), section 3.4.2, and ``apply_scaling`` in Meta's reference code
    for Llama 3.1.

    >>> rule = Llama3(8.0, 1.0, 4.0, original_max_position=8192)
    >>> rule.frequencies(128, 500_000.0).inv_freq.tolist()[0]
    1.0
    """

    names = ("llama3",)

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    @public("Llama3")
    def __post_init__(self) -> None:
        self._positive("factor", "low_freq_factor", "high_freq_factor")
        self._length()
        if self.high_freq_factor < self.low_freq_factor:
            raise bad_value(
                f"high_freq_factor must be at least low_freq_factor but got "
                f"{self.high_freq_factor} and {self.low_freq_factor}; they are probably swapped"
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
