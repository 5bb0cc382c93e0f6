"""The numbers of `inspect` and `compare`, against 40- or 60-digit arithmetic and a search of all positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from mpmath import mp

from tests.support import oracle, oracle_frequencies as papers
from tests.support.model_configs import QWEN3_VL
from tests.support.tolerances import value
from tightrope import Axes, RopeSpec, frequencies as rules
from tightrope.frequencies import DynamicNTK, Given, Linear, Llama3, LongRoPE, Proportional, YaRN
from tightrope_tools.inspect import Inspection, compare, exactness, inspect

RULES: dict[str, tuple[rules.Rule | None, Any]] = {
    "none": (None, lambda: papers.plain(64, 1e4)),
    "linear": (Linear(4), lambda: papers.linear(64, 1e4, 4)),
    "ntk": (rules.NTK(8), lambda: papers.ntk(64, 1e4, 8)),
    "dynamic": (DynamicNTK(2, 2048), lambda: papers.dynamic_ntk(64, 1e4, 2, 2048, 8192)),
    "llama3": (Llama3(8, 1, 4, 2048), lambda: papers.llama3(64, 1e4, 8, 1, 4, 2048)),
    "proportional": (Proportional(0.5), lambda: papers.proportional(64, 1e4, 0.5)),
}


def near(got: float, wanted: Any) -> bool:
    return abs(mp.mpf(got) - wanted) <= value("reported number") * abs(wanted)


def pairs_of(spec: RopeSpec, context: int | None = None) -> Any:
    return inspect(spec, context=context).parts[0].pairs


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_pairs_are_those_of_the_papers(name: str) -> None:
    rule, wanted = RULES[name]
    part = inspect(RopeSpec(64, scaling=rule), context=8192).parts[0]
    trained = getattr(rule, "original_max_position", 8192)
    assert part.trained == trained
    with mp.workdps(40):
        omegas, plain = wanted(), papers.plain(64, 1e4)
        assert len(part.pairs) == len(omegas) == 32
        for pair, omega, unscaled in zip(part.pairs, omegas, plain, strict=True):
            assert near(pair.unscaled, 2 * mp.pi / unscaled)
            assert near(pair.turns_trained, trained * unscaled / (2 * mp.pi))
            assert near(pair.turns, 8192 * omega / (2 * mp.pi))
            if omega == 0:
                assert math.isinf(pair.wavelength)
                assert pair.effect == "stopped"
                continue
            assert near(pair.wavelength, 2 * mp.pi / omega)
            assert near(pair.slower, unscaled / omega)
            assert omega != unscaled or pair.effect == "kept"


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_are_those_that_turn_together(interleaved: bool) -> None:
    spec = RopeSpec(20, rotary_dim=12, start=4, interleaved=interleaved)
    pairs = pairs_of(spec)
    wanted = zip(*oracle.channels(12, 4, interleaved), strict=True)
    assert [pair.channels for pair in pairs] == list(wanted)
    assert all(pair.turns is None and pair.turns_trained is None for pair in pairs)


NEARLY = tuple(math.nextafter(float(omega), 0.0) for omega in RopeSpec(4).frequencies().exact)
LONG = LongRoPE((1.0, 2.0, 0.8), (1.0, 2.0, 3.25), 64, factor=4.0)


@pytest.mark.parametrize(
    "rule, width, context, effects",
    [
        (LONG, 6, 64, ["kept", "÷ 2", "× 1.25"]),
        (LONG, 6, 65, ["kept", "÷ 2", "÷ 3.25"]),
        (Given(NEARLY), 4, 8, ["÷ 1", "÷ 1"]),  # a ratio that only rounds to one
    ],
)
def test_effects_in_words(rule: Any, width: int, context: int, effects: list[str]) -> None:
    pairs = pairs_of(RopeSpec(width, scaling=rule), context)
    assert [pair.effect for pair in pairs] == effects


def test_axes_and_heads_of_pairs() -> None:
    axial = pairs_of(RopeSpec(8, axes=Axes.blocks((2, 2))), 4)
    assert [(pair.axis, pair.head) for pair in axial] == [(axis, None) for axis in (0, 0, 1, 1)]
    mixed = RopeSpec(4, scaling=Given((((1.0, 2.0),) * 3, ((3.0, 4.0),) * 3)))
    pairs = pairs_of(mixed, 4)
    assert [pair.axis for pair in pairs] == [0] * 6 + [1] * 6
    assert [pair.head for pair in pairs] == [0, 0, 1, 1, 2, 2] * 2
    assert {pair.channels for pair in pairs} == {(0, 2), (1, 3)}


# --- exactness ------------------------------------------------------------------------------------

Tables = tuple[torch.Tensor, torch.Tensor]


def exact_tables(omegas: list[Any], position: int) -> Tables:
    cosines, sines = (
        torch.tensor([float(f(omega * position)) for omega in omegas], dtype=torch.float64)
        for f in (mp.cos, mp.sin)
    )
    return cosines, sines


def largest_error(tables: Tables, exact: Tables) -> float:
    return max(
        float((got.double() - right).abs().max()) for got, right in zip(tables, exact, strict=True)
    )


@pytest.mark.parametrize("position", [1, 2, 3, 100, 4095, 131071, 1048575])
def test_errors_are_those_of_the_way_itself(position: int) -> None:
    """Each way to compute angles is written again here, and compared with 60 digits."""
    got = exactness.errors_at(RopeSpec(64), torch.tensor([position]), None)
    with mp.workdps(60):
        omegas = papers.plain(64, 1e4)
        exact = exact_tables(omegas, position)
        inv_freq = torch.tensor([float(omega) for omega in omegas], dtype=torch.float64)
        where = torch.tensor(float(position))
        single = inv_freq.float() * where
        cast = inv_freq.bfloat16().float() * where
        coarse = inv_freq.float() * where.bfloat16().float()
        ways = {
            exactness.FLOAT32: (single.cos(), single.sin()),
            exactness.TABLE: (single.cos().bfloat16(), single.sin().bfloat16()),
            exactness.FREQUENCIES: (cast.cos(), cast.sin()),
            exactness.POSITIONS: (coarse.cos(), coarse.sin()),
        }
        for name, tables in ways.items():
            wanted = largest_error(tables, exact)
            assert abs(float(got[name][0]) - wanted) <= value("float64 angle"), name
        assert float(got[exactness.WORDS][0]) <= value("float32 angle")


def test_the_largest_exact_context() -> None:
    found = inspect(RopeSpec(128), context=5000).parts[0].exactness
    assert {4096, 5000, 131072} <= {*found.lengths}
    assert list(found.errors) == list(exactness.MEANING)
    assert found.reach[exactness.WORDS] == dict.fromkeys(exactness.ROUNDINGS, exactness.EXACT)
    assert exactness.TABLE not in found.reach
    # bfloat16 has 8 significant bits: 257 is the first integer that it cannot represent, and becomes 256.
    assert found.reach[exactness.POSITIONS]["bfloat16"] == 257
    for kind, limit in exactness.ROUNDINGS.items():
        reach = found.reach[exactness.FLOAT32][kind]
        where = torch.arange(reach + 1)
        every = exactness.errors_at(RopeSpec(128), where, None)[exactness.FLOAT32]
        assert float(every[reach]) > limit
        # Only some positions are sampled, so the first one beyond the limit may lie before `reach`.
        assert float(every[: reach // 2].max()) <= limit
    for errors in found.errors.values():
        assert list(errors) == sorted(errors)


def test_more_pairs_than_are_looked_at_together_count() -> None:
    both = exactness.errors_at(RopeSpec(600), torch.tensor([131071]), None)
    with mp.workdps(60):
        last = papers.plain(600, 1e4)[256:]
        angle = torch.tensor([float(omega) for omega in last]) * 131071.0
        worst = largest_error((angle.cos(), angle.sin()), exact_tables(last, 131071))
    assert float(both[exactness.FLOAT32]) >= worst - value("float64 angle")


def test_axes_are_walked_together() -> None:
    """If all coordinates of each token are equal, M-RoPE equals RoPE with one axis."""
    axes = RopeSpec(128, axes=Axes.sections((16, 24, 24)))
    plain, other = (inspect(spec).parts[0].exactness for spec in (RopeSpec(128), axes))
    assert plain == other


# --- two configurations ---------------------------------------------------------------------------


def both(one: RopeSpec, other: RopeSpec, context: int = 500) -> Any:
    made = compare(inspect(one, context=context), inspect(other, context=context))
    (part,) = made.parts
    return part


@pytest.mark.parametrize(
    "other",
    [
        RopeSpec(16, base=5e5),
        RopeSpec(16, scaling=Linear(4)),
        RopeSpec(16, scaling=YaRN(4, 64)),
        RopeSpec(16, scaling=Given((0.5, 9.0, -1.0, 7.0, 0.0, 2.0, 3.0, 4.0))),
        RopeSpec(16, scaling=Linear(1.001)),
    ],
)
def test_the_largest_disagreement_is_that_of_counting(other: RopeSpec) -> None:
    apart = both(RopeSpec(16), other).disagreement
    with mp.workdps(40):
        mine, theirs = (
            [mp.mpf(str(omega)) for omega in spec.frequencies(500).exact]
            for spec in (RopeSpec(16), other)
        )

        def distance(position: int, pair: int) -> Any:
            angle = mp.fmod(abs(mine[pair] - theirs[pair]) * position, 2 * mp.pi)
            return min(angle, 2 * mp.pi - angle)

        everywhere = [
            (distance(position, pair), position) for position in range(500) for pair in range(8)
        ]
        largest = max(angle for angle, _ in everywhere)
        assert near(apart.largest, distance(apart.position, apart.pair))
        # If the angles of a pair come to differ by half a turn, `largest` is taken where they first
        # do, but a later position may be slightly nearer to half a turn.
        assert apart.largest >= min(largest * (1 - value("reported number")), mp.pi * 0.9)
        for limit, first in ((0.01, apart.noticed), (1.0, apart.lost)):
            wanted = min((p for angle, p in everywhere if angle >= limit), default=None)
            assert first == wanted


def test_equal_rotations_are_alike_under_any_name() -> None:
    part = both(RopeSpec(16), RopeSpec(16, scaling=Linear(1.0)))
    assert part.alike
    assert [each.field for each in part.differences] == ["scaling", "scaling.factor"]
    assert (part.disagreement.largest, part.disagreement.noticed) == (0.0, None)
    assert both(RopeSpec(16), RopeSpec(16)).differences == ()


@pytest.mark.parametrize(
    "other, why",
    [
        (RopeSpec(16, interleaved=True), "the pairings differ: half and interleaved"),
        (RopeSpec(16, rotary_dim=8), "16 channels rotate in one and 8 in the other"),
        (RopeSpec(18, rotary_dim=16, start=2), "different channels rotate"),
        (RopeSpec(16, base=5e5), "7 of 8 pairs have different frequencies"),
        (RopeSpec(16, axes=Axes.sections((4, 4))), "the coordinates of positions, or the pairs"),
        (
            RopeSpec(16, scaling=YaRN(1, 64, attention_factor=2.0)),
            "scaled by 1 in one and 2 in the other",
        ),
        (
            RopeSpec(16, scaling=YaRN(40, 64, mscale=1.0, mscale_all_dim=1.0)),
            "the factors on the softmax scale are 1 in one and 1.87385 in the other",
        ),
    ],
)
def test_why_two_are_unlike(other: RopeSpec, why: str) -> None:
    part = both(RopeSpec(16), other)
    assert not part.alike
    assert any(why in reason for reason in part.why), part.why
    # Other numbers of pairs are not compared.
    assert (part.disagreement is None) == (other.rotary_dim == 8)


def test_parts_belong_together_by_name() -> None:
    one, other = inspect(QWEN3_VL), inspect(QWEN3_VL)
    assert compare(one, other).alike
    assert len(compare(one, other).parts) == 2
    text = inspect(QWEN3_VL, section="text_config")
    assert [part.alike for part in compare(text, other).parts] == [True, False]
    image = replace(one.parts[1], part=replace(one.parts[1].part, name="new"))
    apart = compare(replace(one, parts=(one.parts[0], image)), other)
    assert apart.unmatched == ("new", "vision_config")
    assert not apart.alike


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match=r"^\[compare\] both models must have RoPE but other"):
        compare(inspect(RopeSpec(16)), Inspection("other.json", "nothing", (), ()))
