"""Frequency rules, compared with many-digit arithmetic."""

import dataclasses
import decimal
import json
import math
import pickle
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import refusals, refused
from tests.support.tolerances import value
from tightrope import RopeSpec, angles, frequencies, rotate
from tightrope.frequencies import (
    NTK,
    RULES,
    DynamicNTK,
    Frequencies,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rule,
    YaRN,
    _rule,
)

PROFILE = settings(
    derandomize=True,  # the same cases in CI and locally
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)


def as_real(number: decimal.Decimal) -> Any:
    return oracle.MP.mpf(str(number))


# --- the default rule -----------------------------------------------------------------------------


@pytest.mark.parametrize("base", [1e-9, 1e-3, 1.0, 2.0, 1e2, 1e4, 5e5, 1e7, 1e9, 1e300, 0.1])
@pytest.mark.parametrize("rotary_dim", [2, 4, 6, 10, 64, 128, 250, 512, 4096])
def test_default_rule_has_the_digits_of_a_word(rotary_dim: int, base: float) -> None:
    made = frequencies.default(rotary_dim, base)
    assert made.attention_scaling == 1.0
    assert made.shape is None
    assert_exact(made, oracle.frequencies(base, rotary_dim))


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
    assert YaRN(4.0, 4096).frequencies(0, 10000.0).exact == ()


def test_frequencies_are_values() -> None:
    one = frequencies.default(8, 10000.0)
    assert one == Frequencies(one.exact)
    assert hash(one) == hash(Frequencies(one.exact))
    assert one != frequencies.default(8, 10001.0)
    assert one != Frequencies(one.exact, attention_scaling=1.25)
    assert one != Frequencies(one.exact, shape=(2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.attention_scaling = 2.0  # type: ignore[misc]


def test_a_repr_is_one_short_line() -> None:
    made = YaRN(4.0, 4096).frequencies(128, 10000.0)
    first, *_, last = made.inv_freq.tolist()
    assert repr(made) == (
        f"Frequencies(64 pairs: inv_freq=[{first}, …, {last}], "
        f"attention_scaling={made.attention_scaling})"
    )
    one = Frequencies(frequencies.default(4, 10000.0).exact, shape=(2, 1))
    shown = "Frequencies(2 pairs of shape (2, 1): inv_freq=[1.0, 0.01], attention_scaling=1.0)"
    assert repr(one) == shown
    assert pickle.loads(pickle.dumps(made)) == made
    assert repr(frequencies.default(0, 10000.0)) == (
        "Frequencies(0 pairs: inv_freq=[], attention_scaling=1.0)"
    )


@pytest.mark.parametrize("rule", [None, YaRN(4.0, 4096), DynamicNTK(2.0, 4096)])
def test_the_callers_decimal_context_does_not_matter(rule: Rule | None) -> None:
    """The context's precision, rounding and traps affect no frequency and no softmax scale."""

    def make() -> Frequencies:
        if rule is None:
            return frequencies.default(16, 10000.0)
        return rule.frequencies(16, 10000.0, 5000)

    def clear() -> None:
        frequencies.default.cache_clear()
        _rule._made.cache_clear()

    clear()
    with decimal.localcontext() as context:
        context.prec = 5
        context.rounding = decimal.ROUND_UP
        context.traps[decimal.Inexact] = True
        coarse = make()
        scaling = YaRN(4.0, 4096, mscale=1.0, mscale_all_dim=1.0).softmax_scaling
    clear()
    assert coarse == make()
    assert scaling == YaRN(4.0, 4096, mscale=1.0, mscale_all_dim=1.0).softmax_scaling


# --- every rule against its paper -----------------------------------------------------------------


def assert_exact(made: Frequencies, wanted: Sequence[Any]) -> None:
    """Assert that phase words are equal, and that 54 of 60 digits of each frequency agree.

    A phase word or a float64 has fewer digits.
    """
    assert len(made.exact) == len(wanted)
    for mine, omega in zip(made.exact, wanted, strict=True):
        if omega == 0:
            assert mine == 0
        else:
            assert abs(as_real(mine) / omega - 1) < value("frequency digits")
    words = angles.words_of(made)
    phases = [oracle.phase(omega) for omega in wanted]
    assert words.words == tuple(phase.word for phase in phases)
    assert words.turns == tuple(phase.turns for phase in phases)


def assert_of_paper(rule: Rule, d: int, base: float, length: int | None = None) -> Frequencies:
    """Assert that frequencies and scaling of a rule are those of its paper; return them."""
    made = rule.frequencies(d, base, length)
    assert_exact(made, truth.of(rule, d, base, length))
    # The attention scaling is the float64 nearest to the exact value.
    assert type(made.attention_scaling) is float
    assert made.attention_scaling == float(truth.attention_of(rule, length))
    return made


def test_the_softmax_scale_of_deepseek() -> None:
    """It is the square of transformers' yarn_get_mscale, by which DeepSeek's attention multiplies its scale."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    for weight in (0.707, 1.0):
        rule = YaRN(40.0, 4096, mscale=weight, mscale_all_dim=weight)
        assert rule.softmax_scaling == pytest.approx(yarn_get_mscale(40.0, weight) ** 2, rel=1e-14)
        assert rule.frequencies(64, 1e4).attention_scaling == 1.0
    rule = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.8)
    assert rule.softmax_scaling == float(truth.yarn_mscale(40.0, 0.8) ** 2)
    assert YaRN(40.0, 4096).softmax_scaling == 1.0
    assert YaRN(40.0, 4096, mscale=1.0).softmax_scaling == 1.0
    assert YaRN(1.0, 4096, mscale_all_dim=1.0).softmax_scaling == 1.0
    # The softmax scale belongs to attention, so it does not affect the rotation.
    assert rule.frequencies(64, 1e4).attention_scaling == float(
        truth.yarn_mscale(40.0, 1.0) / truth.yarn_mscale(40.0, 0.8)
    )
    others = [each for each in ONE_OF_EACH if not isinstance(each, YaRN)]
    assert all(each.softmax_scaling == 1.0 for each in others)


def test_the_attention_scaling_of_longrope() -> None:
    ones = (1.0, 1.0)

    def scalings(**given: float) -> tuple[float, float]:
        rule = LongRoPE(ones, ones, 4096, **given)  # type: ignore[arg-type]
        short, long = rule.frequencies(4, 1e4, 4096), rule.frequencies(4, 1e4, 4097)
        assert rule.frequencies(4, 1e4).attention_scaling == short.attention_scaling
        return short.attention_scaling, long.attention_scaling

    assert scalings(attention_factor=1.5, factor=32.0) == (1.5, 1.5)
    assert scalings(short_mscale=1.25, long_mscale=1.5) == (1.25, 1.5)
    assert scalings(short_mscale=1.25, long_mscale=1.5, factor=32.0) == (1.25, 1.5)


SHAPES = [(6,), (3, 6), (2, 3, 6), (1, 6), (1, 1, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_given(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, dtype=torch.float64).mul(7).to(dtype).requires_grad_()
    rule = Given.of(tensor)
    assert rule.shape == shape
    made = rule.frequencies(12, 1e4)
    assert made.shape == (None if len(shape) == 1 else shape)
    assert made.inv_freq.dtype == torch.float64
    assert torch.equal(made.inv_freq, tensor.detach().double())
    assert_exact(made, [oracle.MP.mpf(omega) for omega in tensor.double().flatten().tolist()])
    assert rule == Given(tensor.tolist())
    assert made == rule.frequencies(12, 5e5)


def test_given_without_pairs() -> None:
    assert Given(()).frequencies(0, 1e4).exact == ()
    assert Given(()).shape == (0,)
    assert Given(((), ())).shape == (2, 0)


# --- length ---------------------------------------------------------------------------------------

BY_LENGTH = [
    DynamicNTK(2.0, 4096),
    DynamicNTK(1.0, 4096),
    LongRoPE((1.0,) * 32, (4.0,) * 32, 4096, factor=8.0),
    LongRoPE((1.0,) * 32, (4.0,) * 32, 4096, short_mscale=1.0, long_mscale=1.5),
]


@pytest.mark.parametrize("rule", BY_LENGTH)
def test_the_switch_is_above_the_original_length(rule: Rule) -> None:
    within = rule.frequencies(64, 1e4)
    for length in (0, 1, 4095, 4096):
        assert rule.frequencies(64, 1e4, length) is within
        assert rule.regime(length) is None
    assert rule.frequencies(64, 1e4, 4097) != within
    assert rule.regime(4097) == 4097


def test_equal_regimes_share_their_work() -> None:
    rule = LongRoPE((1.0,) * 32, (4.0,) * 32, 4096, factor=8.0)
    assert rule.frequencies(64, 1e4, 4097) is rule.frequencies(64, 1e4, 10**9)
    fixed = YaRN(4.0, 4096)
    assert fixed.frequencies(64, 1e4, 10**9) is fixed.frequencies(64, 1e4)
    assert fixed.regime(10**9) is None


@pytest.mark.parametrize("d", [2, 4, 64, 128, 256])
@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0, 64.0])
def test_the_scale_of_a_length_is_that_of_its_frequencies(d: int, factor: float) -> None:
    rule, base = DynamicNTK(factor, 4096), 1e4
    lengths = [4096, 4097, 4099, 5000, 8192, 65537, 10**6, 2**31 - 1]
    within, exponents = frequencies.default(d, base).inv_freq, rule.scale_exponents(d // 2)
    scales = rule.scale_beyond(torch.tensor(lengths, dtype=torch.float64))
    for length, scale in zip(lengths, scales.tolist(), strict=True):
        assert rule.scale_beyond(float(length)) == scale >= 1.0
        bound = value("dynamic float64") * (4 + 2 * math.log(scale))
        exact = truth.dynamic_ntk(d, base, factor, 4096, length)
        for omega, exponent, wanted in zip(within.tolist(), exponents, exact, strict=True):
            assert abs(omega * scale**-exponent / wanted - 1) <= bound


def test_a_rule_with_one_long_set_has_no_scale() -> None:
    text = (
        " must define scale_beyond and scale_exponents for sequences beyond its original length, or a regime "
        "that maps all of them to one length"
    )
    for rule in (BY_LENGTH[2], Linear(2.0)):
        for call in (lambda: rule.scale_beyond(5000.0), lambda: rule.scale_exponents(4)):  # noqa: B023
            with pytest.raises(NotImplementedError, match=f"{type(rule).__name__}{text}"):
                call()


# --- rules as values ------------------------------------------------------------------------------

ONE_OF_EACH: list[Rule] = [
    Linear(4.0),
    NTK(8.0),
    DynamicNTK(2.0, 4096),
    YaRN(32.0, 4096, beta_fast=16.0, truncate=False, attention_factor=1.25, mscale_all_dim=0.5),
    LongRoPE((1.0, 1.5), (1.0, 32.1), 4096, factor=32.0),
    Llama3(8.0, 1.0, 4.0, 8192),
    Proportional(0.25, 8.0),
    Given(((1.0, 0.1), (-2.0, 1 / 3))),
]
NAMES = [type(rule).__name__ for rule in ONE_OF_EACH]


def test_the_table_of_rules() -> None:
    assert {type(rule) for rule in ONE_OF_EACH} <= set(RULES.values())
    for rule in ONE_OF_EACH:
        kind = type(rule)
        assert kind.names
        assert all(RULES[name] is kind for name in kind.names)
        assert kind.spellings().keys() == {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        assert kind.keys.keys() <= kind.spellings().keys()
    assert RULES["deepseek_yarn"] is YaRN
    assert RULES["su"] is LongRoPE
    assert {rule.names[0] for rule in ONE_OF_EACH if rule.by_length} == {"dynamic", "longrope"}
    assert all(
        "original_max_position" in each.spellings() for each in ONE_OF_EACH if each.by_length
    )


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=NAMES)
def test_a_dictionary_brings_a_rule_back(rule: Rule) -> None:
    made = rule.to_dict()
    assert made["rule"] == rule.names[0]
    again = Rule.from_dict(json.loads(json.dumps(made)))
    assert again == rule
    assert type(again) is type(rule)
    assert again.frequencies(4, 1e4, 5000) == rule.frequencies(4, 1e4, 5000)


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=NAMES)
def test_pickles_from_before_the_rules_were_in_several_files_load(rule: Rule) -> None:
    name = type(rule).__name__
    old = pickle.dumps(rule, 0).replace(
        f"c{type(rule).__module__}\n{name}\n".encode(), f"ctightrope.frequencies\n{name}\n".encode()
    )
    assert b"tightrope.frequencies\n" in old
    assert pickle.loads(old) == rule


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=NAMES)
def test_rules_differ(rule: Rule) -> None:
    assert sum(rule == other for other in ONE_OF_EACH) == 1
    assert eval(repr(rule)) == rule


def test_every_field_counts() -> None:
    yarn = YaRN(32.0, 4096)
    others = [
        YaRN(33.0, 4096),
        YaRN(32.0, 4097),
        YaRN(32.0, 4096, beta_fast=31.0),
        YaRN(32.0, 4096, beta_slow=2.0),
        YaRN(32.0, 4096, truncate=False),
        YaRN(32.0, 4096, attention_factor=1.0),
        YaRN(32.0, 4096, mscale=1.0),
        YaRN(32.0, 4096, mscale_all_dim=1.0),
    ]
    assert len({yarn, *others}) == 1 + len(others)
    assert NTK(2.0) != Linear(2.0)
    assert hash(NTK(2.0)) != hash(Linear(2.0))


def test_repr_shows_values_other_than_the_defaults() -> None:
    assert repr(YaRN(4, 4096)) == "YaRN(factor=4.0, original_max_position=4096)"
    assert (
        repr(YaRN(4, 4096, truncate=False))
        == "YaRN(factor=4.0, original_max_position=4096, truncate=False)"
    )
    assert repr(Proportional(0.25)) == "Proportional(rotary_fraction=0.25)"
    long = tuple(float(k) for k in range(1, 49))
    assert repr(LongRoPE((1.0,) * 6, long[:6], 4096, factor=2.0)) == (
        "LongRoPE(short_factor=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0), "
        "long_factor=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), original_max_position=4096, factor=2.0)"
    )
    assert repr(LongRoPE((1.0,) * 48, long, 4096, factor=2.0)) == (
        "LongRoPE(short_factor=(1.0, 1.0, … 45 more …, 1.0), "
        "long_factor=(1.0, 2.0, … 45 more …, 48.0), original_max_position=4096, factor=2.0)"
    )
    assert repr(Given((0.5,))) == "Given(inv_freq=(0.5,))"
    assert len(repr(Given.of(torch.ones(2, 12, 64)))) < 400


def test_numbers_take_one_form() -> None:
    rule = YaRN(numpy.float32(4), numpy.int64(4096), beta_fast=16)  # type: ignore[arg-type]
    assert rule == YaRN(4.0, 4096, 16.0)
    assert [type(x) for x in (rule.factor, rule.original_max_position, rule.beta_fast)] == [
        float,
        int,
        float,
    ]
    assert LongRoPE([1, 2], numpy.array([1.0, 2.0]), 4096, factor=1) == LongRoPE(  # type: ignore[arg-type]
        (1.0, 2.0), (1.0, 2.0), 4096, factor=1.0
    )
    assert Given([[1, 2], [3, 4]]) == Given(((1.0, 2.0), (3.0, 4.0)))  # type: ignore[arg-type]


def test_a_name_has_one_rule() -> None:
    before = dict(RULES)
    with refused(
        ValueError, "[Other] names must be new but got 'linear', which belongs to Linear."
    ):

        class Other(Rule):
            names = ("linear",)

    assert before == RULES


def test_a_rule_that_makes_nothing() -> None:
    @dataclasses.dataclass(frozen=True)
    class Unfinished(Rule):
        pass

    with pytest.raises(NotImplementedError):
        Unfinished().frequencies(4, 1e4)


@pytest.mark.parametrize(
    "made, text",
    [
        (
            Frequencies((Decimal(1),) * 3),
            "make must return one frequency per pair, 4, but returned 3 of shape (3,).",
        ),
        (
            Frequencies((Decimal(1),) * 8),
            "make must return one frequency per pair, 4, but returned 8 of shape (8,).",
        ),
        (
            Frequencies((Decimal(1),) * 9, 1.0, (2, 4)),
            "make must return one frequency per pair, 4, but returned 9 of shape (2, 4).",
        ),
        ((1.0,) * 4, "make must return Frequencies but returned (1.0, 1.0, 1.0, 1.0)."),
    ],
    ids=str,
)
def test_a_rule_must_make_one_frequency_per_pair(made: Any, text: str) -> None:
    """With another number, other channels would rotate."""

    @dataclasses.dataclass(frozen=True)
    class Wrong(Rule):
        def make(self, *_: Any) -> Any:
            return made

    for call in (
        lambda: Wrong().frequencies(8, 1e4),
        lambda: rotate(torch.ones(1, 1, 2, 8), RopeSpec(8, scaling=Wrong())),
    ):
        with pytest.raises((ValueError, TypeError), match=f"{re.escape(text)}$"):
            call()


def test_a_rule_may_make_floats_and_must_be_frozen() -> None:
    @dataclasses.dataclass(frozen=True)
    class Floats(Rule):
        def make(self, *_: Any) -> Frequencies:
            return Frequencies((0.5, 1))  # type: ignore[arg-type]

    assert Floats().frequencies(4, 1e4).exact == (Decimal("0.5"), Decimal(1))

    class Plain(Floats):
        later: int = 3

    assert Plain().frequencies(4, 1e4).exact == (Decimal("0.5"), Decimal(1))

    @dataclasses.dataclass(eq=False)
    class Loose(Rule):
        factor: float = 2.0

        def make(self, *_: Any) -> Frequencies:
            return Frequencies((Decimal(1), Decimal(self.factor)))

    with pytest.raises(
        TypeError, match=r"Loose must be decorated with @dataclass\(frozen=True\)\.$"
    ):
        Loose().frequencies(4, 1e4)


# --- properties, on generated cases ---------------------------------------------------------------

factors = st.one_of(st.sampled_from([0.5, 1.0, 4.0]), st.floats(0.01, 1e5))
trained = st.one_of(st.integers(2, 40), st.sampled_from([4096, 8192]), st.integers(2, 2**21))
turns = st.one_of(st.sampled_from([1.0, 3.0, 32.0]), st.floats(0.01, 500))
betas = st.one_of(st.tuples(turns, turns).map(sorted), turns.map(lambda one: [one, one]))
bands = st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)).filter(lambda ends: len({*ends}) == 2)
mscales = st.one_of(st.none(), st.just(0.0), st.floats(0.01, 10))
ANY = st.one_of(
    st.builds(Linear, factors),
    st.builds(NTK, factors),
    st.builds(DynamicNTK, factors, trained),
    st.builds(
        lambda factor, trained, betas, *others: YaRN(factor, trained, *betas[::-1], *others),
        *(factors, trained, betas, st.booleans()),
        *(st.one_of(st.none(), st.floats(0.1, 4)), mscales, mscales),
    ),
    st.builds(
        lambda factor, band, trained: Llama3(factor, *sorted(band), trained),
        factors,
        bands,
        trained,
    ),
    st.builds(Proportional, st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), factors),
)
bases = st.one_of(st.sampled_from([1.0001, 2.5, 1e4, 5e5]), st.floats(1.001, 1e9))
lengths = st.one_of(st.none(), st.integers(0, 2**31))
beside = st.integers(-1, 2)  # lengths around the original one, where rules switch


# This number of turns puts pair 20 in the middle of a ramp of width 0.001.
NARROW = 4096 / (2 * math.pi) * 1e4 ** (-2 * 19.9995 / 64)


@settings(PROFILE, max_examples=600)
@example(YaRN(4.0, 4096, NARROW, NARROW, truncate=False), 64, 1e4, None, 0)
@given(
    rule=ANY,
    d=st.one_of(st.integers(1, 80), st.just(128)).map(lambda pairs: 2 * pairs),
    base=bases,
    length=lengths,
    beside=beside,
)
def test_any_rule(rule: Rule, d: int, base: float, length: int | None, beside: int) -> None:
    if rule.by_length:
        assert_of_paper(rule, d, base, rule.original_max_position + beside)
    made = assert_of_paper(rule, d, base, length)
    if isinstance(rule, YaRN):  # every frequency lies between the two that it blends
        ends = Linear(rule.factor).frequencies(d, base).exact, frequencies.default(d, base).exact
        for mine, *both in zip(made.exact, *ends, strict=True):
            assert min(both) <= mine <= max(both)


@PROFILE
@given(base=bases, trained=trained, length=lengths, beside=beside, data=st.data())
def test_any_longrope(
    base: float, trained: int, length: int | None, beside: int, data: st.DataObject
) -> None:
    short = data.draw(st.lists(st.floats(0.5, 100), min_size=1, max_size=64))
    long = data.draw(st.lists(st.floats(0.5, 100), min_size=len(short), max_size=len(short)))
    rule = LongRoPE(short, long, trained, factor=data.draw(factors))
    for each in (length, trained + beside):
        assert_of_paper(rule, 2 * len(short), base, each)
    assert Rule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


@PROFILE
@given(
    omegas=st.lists(st.floats(-1e17, 1e17), min_size=1, max_size=32),
    heads=st.integers(1, 4),
)
def test_any_given(omegas: list[float], heads: int) -> None:
    rule = Given([omegas] * heads)
    made = rule.frequencies(2 * len(omegas), 1e4)
    assert made.shape == (heads, len(omegas))
    assert_exact(made, [oracle.MP.mpf(omega) for omega in omegas * heads])
    assert Rule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


# --- errors ---------------------------------------------------------------------------------------

# Calls with a number that must be positive, by the name in the error.
POSITIVE: dict[str, Callable[[Any], Rule]] = {
    "[Linear] factor": Linear,
    "[NTK] factor": NTK,
    "[DynamicNTK] factor": lambda bad: DynamicNTK(bad, 4096),
    "[YaRN] factor": lambda bad: YaRN(bad, 4096),
    "[YaRN] beta_fast": lambda bad: YaRN(4.0, 4096, beta_fast=bad),
    "[YaRN] beta_slow": lambda bad: YaRN(4.0, 4096, beta_slow=bad),
    "[YaRN] attention_factor": lambda bad: YaRN(4.0, 4096, attention_factor=bad),
    "[LongRoPE] factor": lambda bad: LongRoPE((1.0,), (1.0,), 9, factor=bad),
    "[LongRoPE] long_factor[0]": lambda bad: LongRoPE((1.0,), (bad,), 9, factor=1.0),
    "[LongRoPE] short_factor[1]": lambda bad: LongRoPE((1.0, bad), (1.0,), 9),
    "[LongRoPE] long_mscale": lambda bad: LongRoPE((1.0,), (1.0,), 9, long_mscale=bad),
    "[Llama3] factor": lambda bad: Llama3(bad, 1.0, 4.0, 8192),
    "[Llama3] low_freq_factor": lambda bad: Llama3(8.0, bad, 4.0, 8192),
    "[Llama3] high_freq_factor": lambda bad: Llama3(8.0, 1.0, bad, 8192),
    "[Proportional] factor": lambda bad: Proportional(0.5, bad),
}


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, 10**400])
@pytest.mark.parametrize("name", POSITIVE)
def test_a_number_that_must_be_positive(name: str, bad: Any) -> None:
    with refused(ValueError, f"{name} must be positive and finite but got {bad}."):
        POSITIVE[name](bad)


@pytest.mark.parametrize("saved", [{"rule": "quadratic"}, {"factor": 1.0}, {"rule": ["linear"]}])
def test_an_invalid_dictionary(saved: dict[str, Any]) -> None:
    # RULES is read only now, as an earlier test may have added a rule.
    known, got = ", ".join(sorted(RULES)), saved.get("rule")
    with refused(ValueError, f"[from_dict] rule must be one of {known} but got {got!r}."):
        Rule.from_dict(saved)


ONE = (1.0,)
NESTED = "inv_freq must be nested as (pairs,), (heads, pairs) or (axes, heads, pairs) but got"
EVENLY = "inv_freq must be nested evenly but got parts of shapes"
FASTEST = "every frequency must stay below 1e+18 radians per position but got"
LISTS = "[LongRoPE] short_factor and long_factor must have"
test_errors = refusals(
    ValueError={
        "[Llama3] original_max_position must be at least 1 but got 0.": (
            lambda: Llama3(8.0, 1.0, 4.0, 0)
        ),
        # ln 1 = 0 would be a divisor.
        "[LongRoPE] original_max_position must be at least 2 but got 1.": (
            lambda: LongRoPE(ONE, ONE, 1, factor=2.0)
        ),
        "[YaRN] mscale must be at least 0 and finite but got -1.0.": (
            lambda: YaRN(4.0, 4096, mscale=-1.0)
        ),
        "[YaRN] beta_fast must be at least beta_slow but got 1.0 and 32.0; they are probably swapped.": (
            lambda: YaRN(4.0, 4096, beta_fast=1.0, beta_slow=32.0)
        ),
        "[YaRN] base must be above 1 but got 1.0.": lambda: YaRN(4.0, 4096).frequencies(64, 1.0),
        f"{LISTS} the same length, one number per pair, but got 1 and 2.": (
            lambda: LongRoPE(ONE, (1.0, 2.0), 4096, factor=2.0)
        ),
        f"{LISTS} one number per pair, 4, but got 1.": (
            lambda: LongRoPE(ONE, ONE, 4096, factor=2.0).frequencies(8, 1e4)
        ),
        "[LongRoPE] short_mscale and long_mscale must be given together but got 1.0 and None.": (
            lambda: LongRoPE(ONE, ONE, 4096, short_mscale=1.0)
        ),
        "[LongRoPE] attention_factor must not be given together with short_mscale and long_mscale "
        "but got 1.0, 1.5 and 2.0.": lambda: LongRoPE(ONE, ONE, 4096, None, 1.0, 1.5, 2.0),
        "[LongRoPE] factor (the longest length / original_max_position), attention_factor, or "
        "short_mscale and long_mscale must be given but got none.": (
            lambda: LongRoPE(ONE, ONE, 4096)
        ),
        "[Llama3] high_freq_factor must be at least low_freq_factor but got 4.0 and 5.0; they are probably swapped.": (
            lambda: Llama3(8.0, 5.0, 4.0, 8192)
        ),
        "[Proportional] rotary_fraction must be at most 1 but got 1.5.": lambda: Proportional(1.5),
        "[Proportional] rotary_fraction must be at least 0 and finite but got -0.5.": (
            lambda: Proportional(-0.5)
        ),
        "[Linear] base must be positive and finite but got -1.0.": (
            lambda: Linear(2.0).frequencies(8, -1.0)
        ),
        "[Linear] rotary_dim must be even and not negative but got 7.": (
            lambda: Linear(2.0).frequencies(7, 1e4)
        ),
        f"[Given] {NESTED} 0 levels.": lambda: Given(1.0),
        f"[Given] {NESTED} 4 levels.": lambda: Given.of(torch.ones(1, 1, 1, 1)),
        "[Given.of] inv_freq must have at least one head and axis (inv_freq: float32[2, 0, 4]).": (
            lambda: Given.of(torch.ones(2, 0, 4))
        ),
        f"[Given] {EVENLY} [(1,), (2,)].": lambda: Given((ONE, (1.0, 2.0))),
        f"[Given] {EVENLY} [(), (1,)].": lambda: Given((1.0, ONE)),
        "[Given] inv_freq must be finite but got nan.": lambda: Given((1.0, math.nan)),
        "[Given] inv_freq must have one number per pair, 4, but got 1.": (
            lambda: Given(ONE).frequencies(8, 1e4)
        ),
        f"[Given] {FASTEST} 2e+18.": lambda: Given((1.0, -2e18)).frequencies(4, 1e4),
        f"[Linear] {FASTEST} 1e+20.": lambda: Linear(1e-20).frequencies(4, 1e4),
        "[from_dict] rule 'ntk' must have only the keys factor but got alpha.": (
            lambda: Rule.from_dict({"rule": "ntk", "factor": 1.0, "alpha": 2.0})
        ),
        "[from_dict] rule 'dynamic' must have all required keys but lacks original_max_position.": (
            lambda: Rule.from_dict({"rule": "dynamic", "factor": 1.0})
        ),
    },
    TypeError={
        "[Linear] rotary_dim must be an int but got 8.0.": lambda: Linear(2.0).frequencies(
            8.0, 1e4
        ),
        **{
            f"[{kind} must be a number but got {bad!r}.": lambda make=make, bad=bad: make(bad)
            for kind, make in {
                "Linear] factor": Linear,
                "YaRN] mscale": lambda bad: YaRN(4.0, 4096, mscale=bad),
            }.items()
            for bad in (True, "4", 1j, [4.0], torch.tensor(4.0))
        },
        **{
            f"[YaRN] original_max_position must be an int but got {bad!r}.": (
                lambda bad=bad: YaRN(4.0, bad)
            )
            for bad in (True, "4096", 4096.0, None)
        },
        "[YaRN] truncate must be a bool but got 1.": lambda: YaRN(4.0, 4096, truncate=1),
        "[LongRoPE] short_factor must be a sequence of numbers but got 1.0.": (
            lambda: LongRoPE(1.0, ONE, 4096, factor=2.0)
        ),
        "[Given] inv_freq must hold numbers but got 'fast'.": lambda: Given(("fast",)),
        "[Given] inv_freq must hold numbers but got a tensor; call Given.of (inv_freq: float32[2]).": (
            lambda: Given(torch.ones(2))
        ),
        "[Given.of] inv_freq must be a floating tensor (inv_freq: int64[2]).": (
            lambda: Given.of(torch.ones(2).long())
        ),
        "[Given.of] inv_freq must be a floating tensor (inv_freq: [1.0]).": lambda: Given.of([1.0]),
    },
)


def test_llama3_without_a_band_is_a_step() -> None:
    """With low_freq_factor = high_freq_factor, as in Llama 4 Scout, no pair is blended."""
    kept = frequencies.default(128, 5e5).exact
    divided = Linear(16.0).frequencies(128, 5e5).exact
    made = Llama3(16.0, 1.0, 1.0, 8192).frequencies(128, 5e5).exact
    slow = [float(omega) * 8192 < 2 * math.pi for omega in kept]
    assert made == tuple(b if s else a for a, b, s in zip(kept, divided, slow, strict=True))
    assert 0 < sum(slow) < 64
