"""Phase words of rules that depend on the length, and the tensors that equal specs share."""

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle, oracle_frequencies as truth
from tests.support.helpers import refused
from tests.support.tolerances import value
from tightrope import RopeSpec, phase_words, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Frequencies, LongRoPE, Rule
from tightrope.functional import rotate
from tightrope.spec import _words

LONGEST = 2**31
OWN = torch.tensor([[50005], [60000], [3]])


def spec_of(rule: Rule, dim: int, base: float = 10000.0, axes: Axes | None = None) -> RopeSpec:
    return RopeSpec(dim, base=base, scaling=rule, axes=axes)


def assert_words(rule: DynamicNTK, dim: int, base: float, lengths: list[int]) -> None:
    """Up to the original length words are exact, beyond it within the bound of float64."""
    made, turns = spec_of(rule, dim, base).words_for(lengths)
    made = made.expand(-1, len(lengths), -1, -1)
    for row, length in enumerate(lengths):
        limit = rule.original_max_position
        omegas = truth.dynamic_ntk(dim, base, rule.factor, limit, length)
        scale = 1 + rule.factor * max(length - limit, 0) / limit
        relative = value("dynamic float64") * (4 + 2 * math.log(scale))
        for pair, omega in enumerate(omegas):
            exact = oracle.phase(omega)
            word = int(made[0, row, 0, pair])
            turn = 0 if turns is None else int(turns.expand_as(made)[0, row, 0, pair])
            gap = abs((word - exact.word) + (turn - exact.turns) * 2**64)
            if length <= limit:
                assert gap == 0
            else:
                size = abs(exact.word + exact.turns * 2**64)
                assert gap <= size * (relative + value("word of a float64")) + 1


FACTORS = st.sampled_from([1.0, 2.0, 8.0]) | st.floats(1e-6, 1e6)
LIMITS = st.sampled_from([1, 2048, 4096, 8192]) | st.integers(1, LONGEST)
BASES = st.sampled_from([1e4, 5e5, 1e6]) | st.floats(0.5, 1e12) | st.floats(1.0, 1.0 + 2.0**-40)
WIDTHS = st.sampled_from([2, 4, 6, 64, 96, 128, 256]) | st.integers(1, 100).map(lambda n: 2 * n)
# Lengths, or numbers of tokens above the original length.
BEYOND = st.integers(0, LONGEST) | st.integers(4090, 9000) | st.integers(0, 3)


@settings(deadline=None, max_examples=300)
@given(
    factor=FACTORS,
    limit=LIMITS,
    base=BASES,
    dim=WIDTHS,
    lengths=st.lists(BEYOND, min_size=1, max_size=4),
    above=st.booleans(),
)
def test_words_of_any_lengths_are_within_the_bound(
    factor: float, limit: int, base: float, dim: int, lengths: list[int], above: bool
) -> None:
    more = limit if above else 0
    assert_words(DynamicNTK(factor, limit), dim, base, [more + length for length in lengths])


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("60 digits were computed")

    for name in names:
        monkeypatch.setattr(phase_words, name, never)


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
    """Phase words of a new length are computed without 60-digit arithmetic, which would take 300 µs."""
    spec = spec_of(DynamicNTK(2.0, 4096), 64, axes=axes)
    spec.words_for(5000)
    forbid(monkeypatch, "host_words", "words_of")
    call(spec)


def test_a_rule_with_two_sets_has_both_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = LongRoPE((1.0,) * 32, (4.0,) * 32, 4096, short_mscale=1.0, long_mscale=1.0)
    spec = spec_of(rule, 64)
    spec.words_for([1, 5000])
    forbid(monkeypatch, "host_words", "words_of")
    spec.words_for([50001, 60000, 3])
    assert spec.words_for(50002).words is spec.words_for([5000, 9999]).words
    assert spec.at(OWN).for_tokens(1).angles.words.shape == (1, 3, 1, 32)


# --- rules of a user's own ----------------------------------------------------------------------------

LACKS = (
    " must define scale_beyond and scale_exponents for sequences beyond its original length, or a regime that "
    "maps all of them to one length."
)


@pytest.mark.parametrize("own", ["make", "regime", "frequencies"])
def test_a_subclass_that_changes_a_rule_must_state_its_scale(own: str) -> None:
    """Its words would otherwise be those of the rule that it derives from."""

    @dataclass(frozen=True)
    class Slower(DynamicNTK):
        names = ()

        if own == "make":

            def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
                return super().make(rotary_dim, base, seq_len and 2 * seq_len)

        elif own == "regime":

            def regime(self, seq_len: int | None) -> int | None:
                length = super().regime(seq_len)
                return None if length is None else -(-length // 1024) * 1024

        else:

            def frequencies(
                self, rotary_dim: int, base: float, seq_len: int | None = None
            ) -> Frequencies:
                return super().frequencies(rotary_dim, base, seq_len and 2 * seq_len)

    spec = spec_of(Slower(2.0, 4096), 64)
    assert torch.equal(spec.words_for(3)[0], RopeSpec(64).words_for()[0])
    for lengths in (5000, [5000, 3], torch.tensor([5000, 3])):
        with refused(NotImplementedError, f"[seq_len] Slower{LACKS}"):
            spec.words_for(lengths)


def test_a_rule_that_gets_its_frequencies_from_a_mixin_must_state_its_scale() -> None:
    class Halved:
        def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
            made = DynamicNTK.make(self, rotary_dim, base, seq_len)  # type: ignore[arg-type]
            return Frequencies(tuple(omega / 2 for omega in made.exact))

    @dataclass(frozen=True)
    class Mixed(Halved, DynamicNTK):  # type: ignore[misc]
        names = ()

    with refused(NotImplementedError, f"[seq_len] Mixed{LACKS}"):
        spec_of(Mixed(2.0, 4096), 64).words_for(5000)


REDEFINED = """
@dataclass(frozen=True)
class Redefined(Rule):
    names = ()
    factor: float

    def make(self, rotary_dim, base, seq_len):
        plain = RopeSpec(rotary_dim, base=base).frequencies().exact
        return Frequencies(tuple(omega / {divisor} for omega in plain))
"""


def test_a_spec_keeps_the_class_of_its_rule() -> None:
    """A cell of a notebook that runs again defines a class of the same name."""
    module = globals()
    exec(REDEFINED.format(divisor=2), module)
    spec, x = spec_of(module["Redefined"](1.0), 64), torch.randn(1, 2, 3, 64)
    wanted = rotate(x, spec, 5)
    exec(REDEFINED.format(divisor=3), module)
    other = spec_of(module["Redefined"](1.0), 64)
    assert not torch.equal(rotate(x, other, 5), wanted)

    def turn(x: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
        return rotate(x, spec, 5)

    del module["Redefined"]
    torch.compiler.reset()
    compiled = torch.compile(turn, fullgraph=True, backend="eager")
    for got in (
        rotate(x, spec, 5),
        torch.func.vmap(lambda x: rotate(x, spec, 5))(x[None])[0],
        compiled(x, spec),
        torch.export.export(Turn(spec), (x,), strict=False).module()(x),
    ):
        assert torch.equal(got, wanted)
    assert torch.equal(compiled(x, other), rotate(x, other, 5))
    rotate(x.to("meta"), spec, 5)


class Turn(torch.nn.Module):
    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x, self.spec, 5)


def test_a_subclass_that_changes_nothing_keeps_the_scale() -> None:
    @dataclass(frozen=True)
    class Named(DynamicNTK):
        names = ()

    spec = spec_of(Named(2.0, 4096), 64)
    assert torch.equal(
        spec.words_for(5000)[0], spec_of(DynamicNTK(2.0, 4096), 64).words_for(5000)[0]
    )


def test_a_rule_of_a_users_own() -> None:
    """Frequencies that fall with the square root of the length."""

    @dataclass(frozen=True)
    class Root(Rule):
        by_length = True
        original_max_position: int = 100

        def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
            plain = RopeSpec(rotary_dim, base=base).frequencies().exact
            if seq_len is None:
                return Frequencies(plain)
            root = (Decimal(seq_len) / 100).sqrt()
            return Frequencies(tuple(omega / root for omega in plain))

        def scale_beyond(self, length: Any) -> Any:
            return length / 100

        def scale_exponents(self, pairs: int) -> list[float]:
            return [0.5] * pairs

    spec = spec_of(Root(), 8)
    x = torch.randn(2, 1, 3, 8, dtype=torch.float64)
    plain = [float(omega) for omega in RopeSpec(8).frequencies().exact]
    for row, length in enumerate((90, 400)):
        y = rotate(x, spec, torch.tensor([[0, 88, 89], [0, 398, 399]]))
        root = max(length / 100, 1.0) ** 0.5
        wanted = oracle.rotate(
            x[row : row + 1], [0, length - 2, length - 1], [omega / root for omega in plain]
        )
        torch.testing.assert_close(y[row : row + 1], wanted, rtol=0, atol=value("float64 ways"))


# --- shared tensors ------------------------------------------------------------------------------------


def test_equal_specs_share_their_tensors() -> None:
    specs = [
        RopeSpec(64, base=12345.0),
        RopeSpec(64, base=12345.0),
        copy.deepcopy(RopeSpec(64, base=12345.0)),
    ]
    words = [spec.at(1).angles.words for spec in specs]
    assert words[0] is words[1] is words[2]
    assert RopeSpec(64, base=12346.0).at(1).angles.words is not words[0]
    assert (
        RopeSpec(66, base=12345.0, rotary_dim=64, start=2).at(1).angles.words is words[0]
    )  # other channels, same angles


def test_shared_tensors_live_as_long_as_a_spec() -> None:
    before = set(_words._shared)
    spec = RopeSpec(64, base=54321.0)
    rotate(torch.zeros(3, 64), spec, layout="sd")
    assert len(set(_words._shared) - before) == 1
    del spec
    gc.collect()
    assert not set(_words._shared) - before


def test_the_words_of_the_last_length_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a decoding step share them; the next length replaces them."""
    spec = spec_of(DynamicNTK(2.0, 100), 64)
    first = spec.words_for(200).words
    assert spec.words_for([200, 200]).words is first
    other = spec.words_for(201).words
    assert not torch.equal(other, first)
    again = spec.words_for(200).words
    assert again is not first
    assert torch.equal(again, first)
    monkeypatch.setattr(_words, "may_keep", lambda _: False)  # as while a CUDA graph is captured
    assert spec.words_for(200).words is not again
