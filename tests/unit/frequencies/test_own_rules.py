"""Rules of a user's own: what a class must define, and that its values, and no others, are used."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.helpers import noise
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.frequencies import RULES, DynamicNTK, Frequencies, Linear, LongRoPE, Rule
from tightrope.functional import rotate


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


class Turn(torch.nn.Module):
    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x, self.spec, 5)


def test_a_spec_keeps_the_class_of_its_rule() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, spec: rotate(x, spec, 5), fullgraph=True, backend="eager")
    x, found = noise(1, 2, 3, 64, dtype=torch.float32), []
    for divisor in (2, 3):
        spec = RopeSpec(64, scaling=divided(divisor))
        y = rotate(x, spec, 5)
        assert_same_bits(y, rotate(x, RopeSpec(64, scaling=Linear(float(divisor))), 5))
        for got in (
            torch.func.vmap(lambda x: rotate(x, spec, 5))(x[None])[0],  # noqa: B023
            compiled(x, spec),
            torch.export.export(Turn(spec), (x,), strict=False).module()(x),
        ):
            assert_same_bits(got, y)
        found.append(spec)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "made, phrase",
    [
        (Frequencies((Decimal(1),) * 3), "4, but returned 3 of shape (3,)."),
        (Frequencies((Decimal(1),) * 8), "4, but returned 8 of shape (8,)."),
        (Frequencies((Decimal(1),) * 9, 1.0, (2, 4)), "4, but returned 9 of shape (2, 4)."),
        ((1.0,) * 4, "make must return Frequencies but returned (1.0, 1.0, 1.0, 1.0)."),
    ],
    ids=str,
)
def test_a_rule_must_make_one_frequency_per_pair(made: Any, phrase: str) -> None:
    """With another number, other channels would rotate."""

    @dataclass(frozen=True)
    class Wrong(Rule):
        def make(self, *_: Any) -> Any:
            return made

    for call in (lambda: Wrong().frequencies(8, 1e4), lambda: RopeSpec(8, scaling=Wrong())):
        with pytest.raises((ValueError, TypeError), match=f"{re.escape(phrase)}$"):
            call()


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
