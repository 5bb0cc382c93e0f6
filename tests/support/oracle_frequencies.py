"""Reference frequencies of every rule, from the papers' formulas at 80 digits.

The functions are written from the papers and their authors' code, which the docstrings cite; nothing
comes from the library under test. Floats are taken as exact numbers. The function of a rule returns
ω of every pair in radians per position. If a rule has an amplitude, a second function returns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support import oracle
from tests.support.oracle import MP, Real


def plain(d: int, base: float) -> list[Real]:
    """RoFormer (arXiv 2104.09864), section 3.2.2: θ_i = base^(−2(i−1)/d)."""
    return list(oracle.frequencies(base, d))


def linear(d: int, base: float, factor: float) -> list[Real]:
    """Position Interpolation (arXiv 2306.15595), equation 4: f'(x, m) = f(x, m·L/L')."""
    return [omega / MP.mpf(factor) for omega in plain(d, base)]


def ntk_base(d: int, base: float, scale: Real) -> Real:
    """YaRN (arXiv 2309.00071), section 3.1: b' = b · s^(|D| / (|D| − 2))."""
    return MP.mpf(base) * MP.power(scale, MP.mpf(d) / (d - 2))


def ntk(d: int, base: float, factor: float) -> list[Real]:
    if d == 2:  # θ_1 = b'^0, whatever b' is
        return [MP.mpf(1)]
    changed = ntk_base(d, base, MP.mpf(factor))
    return [MP.power(changed, -MP.mpf(2 * k) / d) for k in range(d // 2)]


def dynamic_ntk(d: int, base: float, factor: float, trained: int, length: int | None) -> list[Real]:
    """YaRN, section 3.3, with s = factor · l'/L − (factor − 1), as implementations compute it.

    The paper itself has s = max(1, l'/L).
    """
    if length is None or length <= trained:
        return plain(d, base)
    scale = MP.mpf(factor) * length / trained - (MP.mpf(factor) - 1)
    if d == 2:
        return [MP.mpf(1)]
    changed = ntk_base(d, base, scale)
    return [MP.power(changed, -MP.mpf(2 * k) / d) for k in range(d // 2)]


def yarn(
    d: int,
    base: float,
    factor: float,
    trained: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    **_: Any,
) -> list[Real]:
    """YaRN's published code: find_correction_dim, find_correction_range, linear_ramp_mask."""

    def correction(rotations: float) -> Real:
        return (
            d
            * MP.log(MP.mpf(trained) / (MP.mpf(rotations) * 2 * MP.pi))
            / (2 * MP.log(MP.mpf(base)))
        )

    low, high = correction(beta_fast), correction(beta_slow)
    if truncate:
        low, high = MP.floor(low), MP.ceil(high)
    low = low if low > 0 else MP.mpf(0)
    high = high if high < d - 1 else MP.mpf(d - 1)
    if low == high:
        high += MP.mpf("0.001")
    found = []
    for k, extrapolated in enumerate(plain(d, base)):
        ramp = (k - low) / (high - low)
        mask = 1 - (MP.mpf(0) if ramp < 0 else MP.mpf(1) if ramp > 1 else ramp)
        interpolated = extrapolated / MP.mpf(factor)
        found.append(interpolated * (1 - mask) + extrapolated * mask)
    return found


def yarn_mscale(scale: float, weight: float = 1.0) -> Real:
    """YaRN, equation 22, with a weight as in yarn_get_mscale of DeepSeek's modelling code."""
    if scale <= 1:
        return MP.mpf(1)
    return MP.mpf(1) / 10 * MP.mpf(weight) * MP.log(MP.mpf(scale)) + 1


def yarn_attention(
    factor: float,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    **_: Any,
) -> Real:
    """DeepSeek's code: a quotient of mscales, with mscale = 1 and mscale_all_dim = 0 by default.

    `attention_factor` overrides it, as in transformers.
    """
    if attention_factor is not None:
        return MP.mpf(attention_factor)
    above = yarn_mscale(factor, 1.0 if mscale is None else mscale)
    return above / yarn_mscale(factor, 0.0 if mscale_all_dim is None else mscale_all_dim)


def longrope(
    d: int,
    base: float,
    short: Sequence[float],
    long: Sequence[float],
    trained: int,
    length: int | None,
) -> list[Real]:
    """LongRoPE (arXiv 2402.13753), section 3.1, θ_i / λ_i, with Phi-3's two sets of λ."""
    factors = long if length is not None and length > trained else short
    return [omega / MP.mpf(each) for omega, each in zip(plain(d, base), factors, strict=True)]


def longrope_attention(factor: float, trained: int) -> Real:
    """Phi-3's modelling code: √(1 + ln s / ln L)."""
    if factor <= 1:
        return MP.mpf(1)
    return MP.sqrt(1 + MP.log(MP.mpf(factor)) / MP.log(MP.mpf(trained)))


def llama3(d: int, base: float, factor: float, low: float, high: float, trained: int) -> list[Real]:
    """apply_scaling of Meta's reference code for Llama 3.1, which compares wavelengths."""
    longest, shortest = MP.mpf(trained) / MP.mpf(low), MP.mpf(trained) / MP.mpf(high)
    found = []
    for omega in plain(d, base):
        wavelength = 2 * MP.pi / omega
        if wavelength < shortest:
            found.append(omega)
        elif wavelength > longest:
            found.append(omega / MP.mpf(factor))
        else:
            smooth = (trained / wavelength - MP.mpf(low)) / (MP.mpf(high) - MP.mpf(low))
            found.append((1 - smooth) * omega / MP.mpf(factor) + smooth * omega)
    return found


def proportional(d: int, base: float, fraction: float, factor: float = 1.0) -> list[Real]:
    """Round and Round We Go (arXiv 2410.06205), section 6.

    Only the fastest pairs rotate: `fraction` of all pairs, rounded down.
    """
    turning = int(fraction * d // 2)
    row = plain(d, base)
    return [omega / MP.mpf(factor) for omega in row[:turning]] + [MP.mpf(0)] * (d // 2 - turning)


def of(rule: Any, d: int, base: float, length: int | None = None) -> list[Real]:
    """Return the frequencies of a rule of the library, known by its first name and its fields."""
    name = None if rule is None else rule.names[0]
    if name is None:
        return plain(d, base)
    if name in ("linear", "ntk"):
        return {"linear": linear, "ntk": ntk}[name](d, base, rule.factor)
    if name == "proportional":
        return proportional(d, base, rule.rotary_fraction, rule.factor)
    trained = rule.original_max_position
    if name == "dynamic":
        return dynamic_ntk(d, base, rule.factor, trained, length)
    if name == "yarn":
        ramp = rule.beta_fast, rule.beta_slow, rule.truncate
        return yarn(d, base, rule.factor, trained, *ramp)
    if name == "llama3":
        return llama3(d, base, rule.factor, rule.low_freq_factor, rule.high_freq_factor, trained)
    return longrope(d, base, rule.short_factor, rule.long_factor, trained, length)


def attention_of(rule: Any, length: int | None = None) -> Real:
    """Return the amplitude of a rule of the library, see :func:`of`."""
    name = None if rule is None else rule.names[0]
    if name == "yarn":
        mscales = rule.mscale, rule.mscale_all_dim
        return yarn_attention(rule.factor, rule.attention_factor, *mscales)
    if name != "longrope":
        return MP.mpf(1)
    trained = rule.original_max_position
    if rule.factor is not None:
        return longrope_attention(rule.factor, trained)
    is_long = length is not None and length > trained
    return MP.mpf(rule.long_mscale if is_long else rule.short_mscale)
