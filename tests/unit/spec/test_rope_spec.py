"""RopeSpec, an immutable value: fields, copies, dictionaries and errors."""

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy
import pytest
import torch

from tests.support import oracle
from tests.support.helpers import refusals
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import NTK, Given, Linear, Rule, YaRN


def test_defaults() -> None:
    spec = RopeSpec(64)
    assert (spec.head_dim, spec.base, spec.rotary_dim, spec.start) == (64, 10000.0, 64, 0)
    assert spec.interleaved is False
    assert RopeSpec(64, start=16).rotary_dim == 48
    assert spec.axis_count == 1


def test_numbers_take_one_form() -> None:
    spec = RopeSpec(numpy.int64(64), base=500000, rotary_dim=numpy.int32(32))  # type: ignore[arg-type]
    assert type(spec.head_dim) is int
    assert type(spec.rotary_dim) is int
    assert type(spec.base) is float
    assert spec == RopeSpec(64, base=5e5, rotary_dim=32)


def test_equality_and_hash() -> None:
    spec = RopeSpec(64)
    assert spec == RopeSpec(64, base=10000.0, rotary_dim=64, start=0, interleaved=False)
    assert hash(spec) == hash(RopeSpec(64, base=10000, rotary_dim=64))
    others = [
        RopeSpec(66),
        RopeSpec(64, base=10001.0),
        RopeSpec(64, rotary_dim=32),
        RopeSpec(64, rotary_dim=32, start=2),
        RopeSpec(64, interleaved=True),
        RopeSpec(64, scaling=Linear(1.0)),  # rotates like None, but is not equal to it
        RopeSpec(64, scaling=Linear(2.0)),
        RopeSpec(64, scaling=NTK(2.0)),
        RopeSpec(64, axes=Axes.blocks((16, 16))),
        RopeSpec(64, axes=Axes.strided(2, 32)),
    ]
    assert all(spec != other for other in others)
    assert len({spec, RopeSpec(64), *others}) == 1 + len(others)


def test_frequencies() -> None:
    made = RopeSpec(64, base=5e5, rotary_dim=32, start=8).frequencies()
    assert made.inv_freq.tolist() == [float(omega) for omega in oracle.frequencies(5e5, 32)]
    assert made.attention_scaling == 1.0
    assert RopeSpec(64).frequencies(100) == RopeSpec(64).frequencies()


def test_replace_derives_anew() -> None:
    spec = RopeSpec(20)
    other = dataclasses.replace(spec, base=5e5)
    assert other == RopeSpec(20, base=5e5)
    assert not torch.equal(other.at().angles.words, spec.at().angles.words)
    assert hash(other) == hash(RopeSpec(20, base=5e5))


def test_replace_hands_over_the_resolved_rotary_dim() -> None:
    """dataclasses.replace copies the resolved rotary_dim: a narrower head raises an error, and
    rotary_dim=None computes it anew."""
    spec = RopeSpec(64)
    with pytest.raises(ValueError, match="must lie in"):
        dataclasses.replace(spec, head_dim=32)
    assert dataclasses.replace(spec, head_dim=32, rotary_dim=None) == RopeSpec(32)  # type: ignore[arg-type]
    assert dataclasses.replace(spec, head_dim=128) == RopeSpec(128, rotary_dim=64)
    assert dataclasses.replace(spec, scaling=Linear(2.0)) == RopeSpec(64, scaling=Linear(2.0))


def test_a_pickle_carries_no_tensor() -> None:
    spec = RopeSpec(4096)
    spec.at(5)
    assert len(pickle.dumps(spec)) < 300


REPRS = {
    "RopeSpec(head_dim=64)": RopeSpec(
        64, base=10000, rotary_dim=64, start=0, interleaved=False, scaling=None, axes=None
    ),
    "RopeSpec(head_dim=64, start=16)": RopeSpec(64, start=16),
    "RopeSpec(head_dim=64, rotary_dim=16, start=16)": RopeSpec(64, rotary_dim=16, start=16),
    "RopeSpec(head_dim=64, base=500000.0, interleaved=True)": RopeSpec(
        64, base=5e5, interleaved=True
    ),
    "RopeSpec(head_dim=64, scaling=YaRN(factor=4.0, original_max_position=4096, truncate=False))": (
        RopeSpec(64, scaling=YaRN(4.0, 4096, truncate=False))
    ),
    "RopeSpec(head_dim=128, axes=Axes.sections((16, 24, 24)))": RopeSpec(
        128, axes=Axes.sections((16, 24, 24))
    ),
}


@pytest.mark.parametrize("text", REPRS)
def test_repr_shows_values_other_than_the_defaults(text: str) -> None:
    assert repr(REPRS[text]) == text
    assert eval(text) == REPRS[text]


def test_the_form_of_a_dictionary() -> None:
    """`to_dict` writes version 1 of the format, which saved files contain."""
    spec = RopeSpec(
        12,
        base=5e5,
        rotary_dim=8,
        start=2,
        interleaved=True,
        scaling=Linear(3.3),
        axes=Axes.sections((1, 3)),
    )
    assert spec.to_dict() == {
        "version": 1,
        "head_dim": 12,
        "base": 500000.0,
        "rotary_dim": 8,
        "start": 2,
        "interleaved": True,
        "scaling": {"rule": "linear", "factor": 3.3},
        "axes": {"count": 2, "pairs": [[0, 0, 8], [1, 1, 8], [1, 2, 8], [1, 3, 8]]},
    }
    assert RopeSpec.from_dict({"version": 1, "head_dim": 64}) == RopeSpec(64)


def test_softmax_scaling_is_the_rules() -> None:
    assert RopeSpec(8).softmax_scaling == 1.0
    rule = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert RopeSpec(8, scaling=rule).softmax_scaling == rule.softmax_scaling > 1.8


def test_a_base_may_be_any_real_number() -> None:
    for base in (Fraction(3, 2), numpy.float32(1.5), 1.5):
        assert RopeSpec(8, base=base) == RopeSpec(8, base=1.5)


def test_sizes_without_channels_are_fine() -> None:
    assert RopeSpec(0).rotary_dim == 0
    assert RopeSpec(5, rotary_dim=0).frequencies().exact == ()


NUMBER = "base must be positive and finite, above 1e-18 and below 1e300, but got"
PLACE = "channels [start, start + rotary_dim) must lie in [0, 8) but got"
RULE = "scaling must be a rule of tightrope.frequencies, such as YaRN(4.0, 8192), but got"
test_errors = refusals(
    "RopeSpec",
    TypeError={
        **{
            f"base must be a number but got {base!r}.": lambda base=base: RopeSpec(8, base=base)
            for base in (True, "10000", None, 1j, torch.tensor(1e4))
        },
        **{
            f"{name} must be an int but got {value!r}.": (
                lambda name=name, value=value: RopeSpec(**{"head_dim": 8, name: value})
            )
            for name in ("head_dim", "rotary_dim", "start")
            for value in (True, 4.0, "4")
        },
        "interleaved must be a bool but got 1.": lambda: RopeSpec(8, interleaved=1),
        "only head_dim may be given without a name but got 2 values; name the others: base=, "
        "rotary_dim=, start=, interleaved=, scaling=, axes=.": lambda: RopeSpec(64, 32),
        "arguments must be of head_dim, base, rotary_dim, start, interleaved, scaling, axes but got "
        "theta; base may be meant.": [
            lambda: RopeSpec(64, theta=1e4),
            lambda: dataclasses.replace(RopeSpec(64), theta=1e4),
        ],
        f"{RULE} float32[32].": lambda: RopeSpec(64, scaling=torch.ones(32)),
        f"{RULE} {{'rope_type': 'yarn'}}; RopeSpec.from_config reads configurations.": lambda: (
            RopeSpec(8, scaling={"rope_type": "yarn"})
        ),
        f"{RULE} {Linear!r}.": lambda: RopeSpec(8, scaling=Linear),
        "axes must be an Axes, such as Axes.blocks((16, 16)), but got 2.": lambda: RopeSpec(
            8, axes=2
        ),
    },
    ValueError={
        "rotary_dim must be even but got 7, its default of head_dim - start; rotary_dim=6 leaves the last channel as it is.": lambda: (
            RopeSpec(7)
        ),
        "axes must have one entry for each of the 4 pairs that rotate but got 8; count pairs, not channels.": (
            lambda: RopeSpec(8, axes=Axes.blocks((4, 4)))
        ),
        "rotary_dim must be even but got 7; rotary_dim=6 leaves the last channel as it is.": lambda: (
            RopeSpec(8, rotary_dim=7)
        ),
        f"{PLACE} [0, 10).": lambda: RopeSpec(8, rotary_dim=10),
        f"{PLACE} [6, 10).": lambda: RopeSpec(8, rotary_dim=4, start=6),
        f"{PLACE} [-2, 2).": lambda: RopeSpec(8, rotary_dim=4, start=-2),
        f"{PLACE} [4, 2).": lambda: RopeSpec(8, rotary_dim=-2, start=4),
        "head_dim must not be negative but got -4.": lambda: RopeSpec(-4),
        "start must lie in [0, 8] but got -1.": lambda: RopeSpec(8, start=-1),
        "start must lie in [0, 8] but got 9.": lambda: RopeSpec(8, start=9),
        **{
            f"{NUMBER} {base}.": lambda base=base: RopeSpec(8, base=base)
            for base in (0, -1.0, 1e-30, 10**305, math.nan, math.inf, -math.inf)
        },
        "axes must have one entry for each of the 4 pairs that rotate but got 2; rotary_dim=4 would "
        "fit.": lambda: RopeSpec(8, axes=Axes.blocks((1, 1))),
        "axes must be None if the given frequencies have axes of their own but got "
        "Axes.blocks((1, 1)).": lambda: RopeSpec(
            4, axes=Axes.blocks((1, 1)), scaling=Given((((1.0, 0.1),), ((0.5, 9.0),)))
        ),
    },
)
SAVED = {"version": 1, "head_dim": 2}
test_errors_of_dictionaries = refusals(
    "from_dict",
    TypeError={
        "a spec must be a dictionary but got '{}'.": lambda: RopeSpec.from_dict("{}"),
        "a spec must be a dictionary but got RopeSpec(head_dim=8).": (
            lambda: RopeSpec.from_dict(RopeSpec(8))
        ),
        "a rule must be a dictionary but got Linear(factor=2.0).": lambda: Rule.from_dict(
            Linear(2.0)
        ),
        "scaling must be a dictionary but got 'yarn'.": (
            lambda: RopeSpec.from_dict({**SAVED, "scaling": "yarn"})
        ),
    },
    ValueError={
        "version must be 1 but got 2.": lambda: RopeSpec.from_dict({**SAVED, "version": 2}),
        "version must be 1 but got tensor([1., 1.]).": (
            lambda: RopeSpec.from_dict({**SAVED, "version": torch.ones(2)})
        ),
        "version must be 1 but got True.": lambda: RopeSpec.from_dict({**SAVED, "version": True}),
        "version must be 1 but got None; pass the result of to_dict.": (
            lambda: RopeSpec.from_dict({"head_dim": 8})
        ),
        "a spec must have only the keys head_dim, base, rotary_dim, start, interleaved, scaling, "
        "axes but got rope_theta.": lambda: RopeSpec.from_dict({**SAVED, "rope_theta": 1e4}),
        "a spec must have all required keys but lacks head_dim.": (
            lambda: RopeSpec.from_dict({"version": 1})
        ),
        "axes must have only the keys count, pairs but got names.": (
            lambda: RopeSpec.from_dict({**SAVED, "axes": {"count": 1, "pairs": [], "names": "t"}})
        ),
        "axes must have all required keys but lacks count, pairs.": (
            lambda: RopeSpec.from_dict({**SAVED, "axes": {}})
        ),
    },
)
