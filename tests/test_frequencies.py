"""Frequency rules against many-digit arithmetic."""

import dataclasses
import decimal

import pytest
import torch

import oracle
from tightrope import frequencies


def as_real(number: decimal.Decimal) -> object:
    return oracle.MP.mpf(str(number))


@pytest.mark.parametrize("base", [1e-9, 1e-3, 1.0, 2.0, 1e2, 1e4, 5e5, 1e7, 1e9, 1e300, 0.1])
@pytest.mark.parametrize("rotary_dim", [2, 4, 6, 10, 64, 128, 250, 512, 4096])
def test_default_rule_has_the_digits_of_a_word(rotary_dim: int, base: float) -> None:
    made = frequencies.default(rotary_dim, base)
    wanted = oracle.frequencies(base, rotary_dim)
    assert len(made.exact) == rotary_dim // 2
    assert made.attention_scaling == 1.0
    for mine, omega in zip(made.exact, wanted, strict=True):
        assert abs(as_real(mine) / omega - 1) < oracle.MP.mpf(10) ** -54


def test_inv_freq_is_correctly_rounded_float64_on_the_cpu() -> None:
    made = frequencies.default(128, 10000.0)
    with torch.device("meta"):
        inv_freq = made.inv_freq
    assert inv_freq.dtype == torch.float64
    assert inv_freq.device == torch.device("cpu")
    assert inv_freq.shape == (64,)
    assert inv_freq.tolist() == [float(omega) for omega in oracle.frequencies(10000.0, 128)]


def test_no_pairs() -> None:
    made = frequencies.default(0, 10000.0)
    assert made.exact == ()
    assert made.inv_freq.shape == (0,)


def test_frequencies_are_values() -> None:
    one = frequencies.default(8, 10000.0)
    assert one == frequencies.Frequencies(one.exact)
    assert hash(one) == hash(frequencies.Frequencies(one.exact))
    assert one != frequencies.default(8, 10001.0)
    assert one != frequencies.Frequencies(one.exact, attention_scaling=1.25)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.attention_scaling = 2.0  # type: ignore[misc]


def test_the_callers_decimal_context_does_not_matter() -> None:
    """Digits are the rule's own business, whatever precision and traps a program has set."""
    frequencies.default.cache_clear()
    with decimal.localcontext() as context:
        context.prec = 5
        context.rounding = decimal.ROUND_UP
        context.traps[decimal.Inexact] = True
        coarse = frequencies.default(16, 10000.0)
    frequencies.default.cache_clear()
    assert coarse == frequencies.default(16, 10000.0)
