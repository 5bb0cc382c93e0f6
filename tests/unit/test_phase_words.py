"""Phase words of rules that depend on the length, computed for many lengths at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from tests.support import oracle, oracle_frequencies as truth
from tests.support.matrix import needs_kernel
from tightrope import RopeSpec, angles, phase_words, positions
from tightrope.axes import Axes
from tightrope.backends import cpu
from tightrope.frequencies import DynamicNTK, Frequencies, LongRoPE, Rule

LONGEST = 2**31
OWN = torch.tensor([[50005], [60000], [3]])
UNSURE = 2**63 - 1  # an error bound so large that hardly any rounding can be proven


def exact_words(
    rule: DynamicNTK, dim: int, base: float, length: int
) -> tuple[list[int], list[int]]:
    limit = rule.original_max_position
    phases = [
        oracle.phase(omega) for omega in truth.dynamic_ntk(dim, base, rule.factor, limit, length)
    ]
    return [phase.word for phase in phases], [phase.turns for phase in phases]


def assert_words(rule: DynamicNTK, dim: int, base: float, lengths: list[int]) -> None:
    made, turns = phase_words.of_lengths(rule, dim, base, None, lengths)
    wanted = [exact_words(rule, dim, base, length) for length in lengths]
    assert made[0, :, 0].tolist() == [row for row, _ in wanted]
    if turns is None:
        assert not any(any(row) for _, row in wanted)
    else:
        assert turns[0, :, 0].tolist() == [row for _, row in wanted]


FACTORS = st.sampled_from([1.0, 2.0, 8.0]) | st.floats(1e-6, 1e6)
LIMITS = st.sampled_from([1, 2048, 4096, 8192]) | st.integers(1, LONGEST)
BASES = st.sampled_from([1e4, 5e5, 1e6]) | st.floats(0.5, 1e12) | st.floats(1.0, 1.0 + 2.0**-40)
WIDTHS = st.sampled_from([2, 4, 6, 64, 96, 128, 256]) | st.integers(1, 100).map(lambda n: 2 * n)
LENGTHS = st.lists(st.integers(0, LONGEST) | st.integers(4090, 9000), min_size=1, max_size=4)
ANY = {"factor": FACTORS, "limit": LIMITS, "base": BASES, "dim": WIDTHS, "lengths": LENGTHS}


@settings(deadline=None, max_examples=300)
@given(**ANY)
def test_words_of_any_lengths_are_exact(
    factor: float, limit: int, base: float, dim: int, lengths: list[int]
) -> None:
    assert_words(DynamicNTK(factor, limit), dim, base, lengths)


@settings(deadline=None, max_examples=100)
@given(beyond=st.lists(st.integers(0, 3) | st.integers(0, 10**6), min_size=1, max_size=8), **ANY)
def test_words_just_above_the_original_length_are_exact(
    beyond: list[int], factor: float, limit: int, base: float, dim: int, lengths: list[int]
) -> None:
    assume(lengths)
    assert_words(DynamicNTK(factor, limit), dim, base, [limit + tokens for tokens in beyond])


@pytest.mark.parametrize("doubt", [2**40, 2**62, UNSURE])
def test_a_rounding_that_is_not_proven_is_left_to_the_definition(
    doubt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def words_of(frequencies: Frequencies) -> angles.Words:
        asked.append(len(frequencies.exact))
        return angles.words_of(frequencies)

    monkeypatch.setattr(phase_words, "words_of", words_of)
    monkeypatch.setattr(phase_words, "_DOUBT", doubt)
    rule, lengths = DynamicNTK(2.0, 4096), [4000, *range(4097, 70000, 1999)]
    assert_words(rule, 128, 10000.0, lengths)
    if cpu.why_not() is None:
        assert asked == [64] * (0 if doubt == 2**40 else len(lengths))


def test_without_the_library_the_definition_makes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_words, "stretched_natively", None)
    assert_words(DynamicNTK(2.0, 4096), 64, 10000.0, [10, 4097, 10**6, 4096])


@pytest.mark.parametrize(
    "axes",
    [
        None,
        Axes.sections((8, 12, 12)),
        Axes.blocks((16, 16)),
        Axes(3, ((2, 1, 8), (0, 0, 64), (0, 31, 64), (2, 2, 6), *((1, i, 64) for i in range(28)))),
    ],
)
def test_axes_take_their_pairs(axes: Axes | None) -> None:
    rule, lengths = DynamicNTK(2.0, 100), [7, 101, 5000, 100]
    made, turns = phase_words.of_lengths(rule, 64, 10000.0, axes, lengths)
    assert turns is None
    for row, length in enumerate(lengths):
        regime = rule.regime(length)
        alone, _ = phase_words.table(
            phase_words.made(rule, 64, 10000.0, axes, regime), torch.device("cpu")
        )
        assert torch.equal(made[:, row : row + 1], alone)


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("60 digits were computed")

    for name in names:
        monkeypatch.setattr(phase_words, name, never)


@needs_kernel
@pytest.mark.parametrize(
    "call",
    [
        lambda spec: spec.words_for(50001),
        lambda spec: spec.words_for([50002, 60000, 3]),
        lambda spec: spec.words_for(torch.tensor([50003, 60000, 3])),
        lambda spec: spec.at(positions.text(50004, axes=spec.axis_count)).for_tokens(1),
        lambda spec: spec.at(positions.text(OWN, axes=spec.axis_count)),
    ],
)
@pytest.mark.parametrize("axes", [None, Axes.blocks((8, 24))])
def test_a_new_length_needs_no_digits(
    axes: Axes | None, call: Callable[[RopeSpec], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phase words of a new length are computed without 60-digit arithmetic.

    That would take 300 µs for 64 pairs, ten times as long as rotating a token.
    """
    spec = RopeSpec(64, scaling=DynamicNTK(2.0, 4096), axes=axes)
    spec.words_for(5000)
    forbid(monkeypatch, "made", "words_of")
    call(spec)


def test_a_rule_with_two_sets_has_both_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = LongRoPE((1.0,) * 32, (4.0,) * 32, 4096, short_mscale=1.0, long_mscale=1.0)
    spec = RopeSpec(64, scaling=rule)
    spec.words_for([1, 5000])
    forbid(monkeypatch, "made", "words_of")
    spec.words_for([50001, 60000, 3])
    spec.words_for(50002)
    assert spec.at(OWN).words.shape == (1, 3, 1, 32)


@pytest.mark.parametrize("own", ["make", "regime", "frequencies"])
def test_a_subclass_keeps_what_it_overrides(own: str) -> None:
    """Phase words match `frequencies`, also for a subclass of a rule whose words are computed natively."""

    @dataclass(frozen=True)
    class Slower(DynamicNTK):
        names = ()

        if own == "make":

            def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
                made = super().make(rotary_dim, base, seq_len)
                return Frequencies(tuple(omega / 2 for omega in made.exact))

        elif own == "regime":

            def regime(self, seq_len: int | None) -> int | None:
                length = super().regime(seq_len)
                return None if length is None else -(-length // 1024) * 1024

        else:

            def frequencies(
                self, rotary_dim: int, base: float, seq_len: int | None = None
            ) -> Frequencies:
                return super().frequencies(rotary_dim, base, seq_len and 2 * seq_len)

    spec = RopeSpec(64, scaling=Slower(2.0, 4096))
    lengths = [5000, 7000, 3]
    rows, _ = spec.words_for(lengths)
    for row, length in enumerate(lengths):
        wanted = angles.words_of(spec.frequencies(length)).words
        assert rows[0, row, 0].tolist() == list(wanted)
        assert spec.words_for(length)[0].flatten().tolist() == list(wanted)


def test_an_attention_scaling_of_every_length_is_its_own() -> None:
    """Each length beyond the original has its own attention scaling, as the rule defines it."""

    @dataclass(frozen=True)
    class Louder(Rule):
        by_length = True
        original_max_position: int = 100

        def make(
            self,
            rotary_dim: int,
            base: float,  # noqa: ARG002
            seq_len: int | None,
        ) -> Frequencies:
            ones = (Decimal(1),) * (rotary_dim // 2)
            return Frequencies(ones, 1.0 + (seq_len or 0) // 200)

    spec = RopeSpec(8, scaling=Louder())
    found = [spec.attention_scaling(length) for length in (100, 101, 200, 401)]
    assert found == [1.0, 1.0, 2.0, 3.0]
    assert spec.at(400).for_tokens(1).amplitude == 3.0
    with pytest.raises(
        NotImplementedError, match=r"one attention scaling but got 1\.0, 2\.0; rotate"
    ):
        spec.at(torch.tensor([[120], [250]]))
