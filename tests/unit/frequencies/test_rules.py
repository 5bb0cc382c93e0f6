"""Frequency rules, compared with the formulas of their papers in many-digit arithmetic; and rules of a user's own."""

import dataclasses
import decimal
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import noise
from tests.support.tolerances import assert_near, assert_same_bits, value
from tightrope import RopeSpec, angles, frequencies
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
from tightrope.functional import rotate

PROFILE = settings(
    derandomize=True,  # the same cases in CI and locally
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)


def assert_exact(made: Frequencies, wanted: Sequence[Any]) -> None:
    """Assert that phase words are equal, and that 54 of 60 digits of each frequency agree.

    A phase word or a float64 has fewer digits.
    """
    assert len(made.exact) == len(wanted)
    for mine, omega in zip(made.exact, wanted, strict=True):
        if omega == 0:
            assert mine == 0
        else:
            assert abs(oracle.MP.mpf(str(mine)) / omega - 1) < value("frequency digits")
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


# --- the default rule, and the results of all ---------------------------------------------------------


@pytest.mark.parametrize("rotary_dim", [0, 2, 4, 6, 10, 64, 128, 250, 1024])
def test_default_rule_has_the_digits_of_a_word(rotary_dim: int) -> None:
    for base in (1e-9, 1e-3, 1.0, 2.0, 1e2, 1e4, 5e5, 1e7, 1e9, 1e300, 0.1):
        made = frequencies.default(rotary_dim, base)
        assert (made.attention_scaling, made.shape) == (1.0, None)
        assert_exact(made, oracle.frequencies(base, rotary_dim))
        with torch.device("meta"):
            inv_freq = made.inv_freq
        assert (inv_freq.dtype, inv_freq.device.type) == (torch.float64, "cpu")
        assert inv_freq.tolist() == [float(omega) for omega in oracle.frequencies(base, rotary_dim)]


def test_frequencies_are_values() -> None:
    one = frequencies.default(4, 10000.0)
    others = [
        frequencies.default(4, 10001.0),
        Frequencies(one.exact, attention_scaling=1.25),
        Frequencies(one.exact, shape=(2, 1)),
    ]
    assert len({one, Frequencies(one.exact), *others}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.attention_scaling = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("rule", [None, YaRN(4.0, 4096, mscale_all_dim=1.0), DynamicNTK(2.0, 4096)])
def test_the_callers_decimal_context_does_not_matter(rule: Rule | None) -> None:
    """The context's precision, rounding and traps affect no frequency and no softmax scale."""

    def make() -> tuple[Frequencies, float]:
        frequencies.default.cache_clear()
        _rule._made.cache_clear()
        if rule is None:
            return frequencies.default(16, 10000.0), 1.0
        return rule.frequencies(16, 10000.0, 5000), rule.softmax_scaling

    with decimal.localcontext() as context:
        context.prec = 5
        context.rounding = decimal.ROUND_UP
        context.traps[decimal.Inexact] = True
        coarse = make()
    assert coarse == make()


# --- every rule against its paper -----------------------------------------------------------------

factors = st.one_of(st.sampled_from([0.5, 1.0, 4.0]), st.floats(0.01, 1e5))
trained = st.one_of(st.integers(2, 40), st.sampled_from([4096, 8192]), st.integers(2, 2**21))
turns = st.one_of(st.sampled_from([1.0, 3.0, 32.0]), st.floats(0.01, 500))
betas = st.one_of(st.tuples(turns, turns).map(sorted), turns.map(lambda one: [one, one]))
bands = st.tuples(st.floats(0.01, 100), st.floats(0.01, 100))
bands = st.one_of(bands, st.floats(0.01, 100).map(lambda end: (end, end)))  # Llama 4 Scout has none
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


@settings(PROFILE, max_examples=300)
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


@pytest.mark.parametrize(
    "given, short, long",
    [
        ({"attention_factor": 1.5, "factor": 32.0}, 1.5, 1.5),
        ({"short_mscale": 1.25, "long_mscale": 1.5}, 1.25, 1.5),
        ({"short_mscale": 1.25, "long_mscale": 1.5, "factor": 32.0}, 1.25, 1.5),
    ],
)
def test_given_scalings_of_longrope_come_first(
    given: dict[str, float], short: float, long: float
) -> None:
    rule = LongRoPE((1.0, 1.0), (1.0, 1.0), 4096, **given)
    found = [rule.frequencies(4, 1e4, length).attention_scaling for length in (None, 4096, 4097)]
    assert found == [short, short, long]


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (1, 6), (1, 1, 6), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_given_of_a_tensor_has_its_values_and_shape(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = (torch.randn(shape, dtype=torch.float64) ** 21).to(dtype).requires_grad_()
    rule = Given.of(tensor)
    assert rule == Given(tensor.tolist())
    assert rule.shape == shape
    made = rule.frequencies(2 * shape[-1], 1e4)
    assert made.shape == (None if len(shape) == 1 else shape)
    assert torch.equal(made.inv_freq, tensor.detach().double())
    assert_exact(made, [oracle.MP.mpf(omega) for omega in tensor.double().flatten().tolist()])
    assert made == rule.frequencies(2 * shape[-1], 5e5)  # it ignores the base


def test_the_softmax_scale_of_deepseek() -> None:
    """It is the square of transformers' yarn_get_mscale, by which DeepSeek's attention multiplies its scale."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    for weight in (0.707, 1.0):
        rule = YaRN(40.0, 4096, mscale=weight, mscale_all_dim=weight)
        assert rule.softmax_scaling == pytest.approx(yarn_get_mscale(40.0, weight) ** 2, rel=1e-14)
        assert rule.frequencies(64, 1e4).attention_scaling == 1.0
    rule = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.8)
    assert rule.softmax_scaling == float(truth.yarn_mscale(40.0, 0.8) ** 2)
    for rule in (
        YaRN(40.0, 4096),
        YaRN(40.0, 4096, mscale=1.0),
        YaRN(1.0, 4096, mscale_all_dim=1.0),
    ):
        assert rule.softmax_scaling == 1.0


# --- length ---------------------------------------------------------------------------------------

ONES = (1.0,) * 32
BY_LENGTH = [
    DynamicNTK(2.0, 4096),
    DynamicNTK(1.0, 4096),
    LongRoPE(ONES, (4.0,) * 32, 4096, factor=8.0),
    LongRoPE(ONES, ONES, 4096, short_mscale=1.0, long_mscale=1.5),
]


@pytest.mark.parametrize("rule", [*BY_LENGTH, YaRN(4.0, 4096)])
def test_the_switch_is_above_the_original_length(rule: Rule) -> None:
    within = rule.frequencies(64, 1e4)
    for length in (0, 1, 4095, 4096):
        assert rule.frequencies(64, 1e4, length) is within
        assert rule.regime(length) is None
    longer = [rule.frequencies(64, 1e4, length) for length in (4097, 4098, 10**9)]
    assert (longer[0] == within) == (not rule.by_length)
    assert (longer[0] is longer[2]) == (not isinstance(rule, DynamicNTK))


def test_numbers_take_one_form() -> None:
    rule = YaRN(numpy.float32(4), numpy.int64(4096), beta_fast=16)
    assert rule == YaRN(4.0, 4096, 16.0)
    numbers = rule.factor, rule.original_max_position, rule.beta_fast
    assert [*map(type, numbers)] == [float, int, float]
    made = LongRoPE([1, 2], numpy.array([1.0, 2.0]), 4096, factor=1)  # type: ignore[arg-type]
    assert made == LongRoPE((1.0, 2.0), (1.0, 2.0), 4096, factor=1.0)
    assert Given([[1, 2], [3, 4]]) == Given(((1.0, 2.0), (3.0, 4.0)))  # type: ignore[arg-type]


# --- rules of a user ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Root(Rule):
    """Frequencies that fall with the square root of the length."""

    by_length = True
    original_max_position: int = 100

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
        plain = RopeSpec(rotary_dim, base=base).frequencies().exact
        root = (Decimal(seq_len or 100) / 100).sqrt()
        return Frequencies(tuple(omega / root for omega in plain))

    def scale_beyond(self, length: Any) -> Any:
        return length / 100

    def scale_exponents(self, pairs: int) -> list[float]:
        return [0.5] * pairs


def test_a_rule_by_length() -> None:
    x = noise(2, 1, 3, 8)
    y = rotate(x, RopeSpec(8, scaling=Root()), torch.tensor([[0, 88, 89], [0, 398, 399]]))
    for row, length in enumerate((90, 400)):
        root = max(length / 100, 1.0) ** 0.5
        omegas = [omega / root for omega in oracle.frequencies(10000.0, 8)]
        wanted = oracle.rotate(x[row : row + 1], [0, length - 2, length - 1], omegas)
        assert_near(y[row : row + 1], wanted, "float64 ways")


def changed(name: str) -> type[DynamicNTK]:
    """Return a class that derives from dynamic NTK and changes one of its methods, or takes it from a mixin."""

    class Mixin:
        def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
            made = DynamicNTK.make(self, rotary_dim, base, seq_len)  # type: ignore[arg-type]
            return Frequencies(tuple(omega / 2 for omega in made.exact))

    def method(self: Any, *arguments: Any) -> Any:
        return getattr(super(kind, self), name)(*arguments)

    bases = (Mixin, DynamicNTK) if name == "mixin" else (DynamicNTK,)
    own = {} if name in ("mixin", "nothing") else {name: method}
    kind = dataclass(frozen=True)(type("Changed", bases, {"names": (), **own}))
    return kind


@pytest.mark.parametrize("name", ["make", "regime", "frequencies", "mixin", "nothing"])
def test_a_subclass_that_changes_a_rule_must_state_its_scale(name: str) -> None:
    """Its words beyond the original length would otherwise be those of the rule that it derives from."""
    spec = RopeSpec(64, scaling=changed(name)(2.0, 4096))
    if name == "nothing":
        wanted = RopeSpec(64, scaling=DynamicNTK(2.0, 4096)).words_for(5000)
        assert_same_bits(spec.words_for(5000)[0], wanted[0])
        return
    spec.words_for(3)
    for lengths in (5000, [5000, 3], torch.tensor([5000, 3])):
        with pytest.raises(
            NotImplementedError, match=r"^\[seq_len\] Changed must define scale_bey"
        ):
            spec.words_for(lengths)


@pytest.mark.parametrize("rule", [Linear(2.0), LongRoPE((1.0,), (2.0,), 9, factor=2.0)])
def test_a_rule_with_one_long_set_has_no_scale(rule: Rule) -> None:
    for call in (lambda: rule.scale_beyond(5000.0), lambda: rule.scale_exponents(4)):
        with pytest.raises(NotImplementedError, match=rf"{type(rule).__name__} must define scale_"):
            call()


def divided(divisor: int) -> Rule:
    """Return a rule whose class has the same name for any divisor, as a cell of a notebook that runs again makes."""

    @dataclass(frozen=True)
    class Divided(Rule):
        names = ()

        def make(self, rotary_dim: int, base: float, _: int | None) -> Frequencies:
            plain = RopeSpec(rotary_dim, base=base).frequencies().exact
            return Frequencies(tuple(omega / divisor for omega in plain))

    return Divided()


def test_a_spec_keeps_the_class_of_its_rule() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, spec: rotate(x, spec, 5), fullgraph=True, backend="eager")
    x, found = noise(1, 2, 3, 64, dtype=torch.float32), []
    for divisor in (2, 3):
        spec = RopeSpec(64, scaling=divided(divisor))
        y = rotate(x, spec, 5)
        assert_same_bits(y, rotate(x, RopeSpec(64, scaling=Linear(float(divisor))), 5))
        assert_same_bits(compiled(x, spec), y)
        found.append(spec)
    assert found[0] != found[1]


def test_a_rule_may_make_floats_and_must_be_frozen() -> None:
    @dataclass(frozen=True)
    class Floats(Rule):
        def make(self, *_: Any) -> Frequencies:
            return Frequencies((0.5, 1))  # type: ignore[arg-type]

    @dataclass(eq=False)
    class Loose(Rule):
        factor: float = 2.0

    assert Floats().frequencies(4, 1e4).exact == (Decimal("0.5"), Decimal(1))
    with pytest.raises(TypeError, match=r"Loose must be decorated with @dataclass\(frozen=True\)"):
        Loose().frequencies(4, 1e4)
    with pytest.raises(NotImplementedError):
        dataclass(frozen=True)(type("Unfinished", (Rule,), {}))().frequencies(4, 1e4)


def test_a_name_has_one_rule() -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match=r"^\[Other\] names must be new but got 'linear'"):

        class Other(Rule):
            names = ("linear",)

    assert before == RULES


def test_what_is_saved_is_read_as_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule without a name, or whose class was defined again, is refused when it is saved; one without @dataclass when read."""
    monkeypatch.setattr("tightrope.frequencies._rule.RULES", dict(RULES))

    def named(*names: str) -> type[Rule]:
        return dataclass(frozen=True)(type("Mine", (Rule,), {"names": names}))

    with pytest.raises(ValueError, match="Mine must have names of its own to be saved"):
        named()().to_dict()
    first, again = named("mine")(), named("mine")()  # a cell of a notebook runs once more
    assert Rule.from_dict(again.to_dict()) == again
    with pytest.raises(ValueError, match="and must not be defined anew"):
        first.to_dict()
    with pytest.raises(TypeError, match=r"Bare must be decorated with @dataclass\(frozen=True\)"):
        type("Bare", (Rule,), {"names": ("bare",)}).spellings()
    with pytest.raises(ValueError, match="once the module of its class is imported"):
        Rule.from_dict({"rule": "theirs"})
