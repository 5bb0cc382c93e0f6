"""RopeSpec, an immutable value: fields, copies and dictionaries. What it refuses is in test_refusals.py."""

import dataclasses
import pickle
from fractions import Fraction

import numpy
import pytest

from tests.support import oracle
from tightrope import RopeSpec
from tightrope.axes import Axes
from tightrope.frequencies import NTK, Linear, YaRN


def test_defaults_and_equality() -> None:
    spec = RopeSpec(64)
    assert spec == RopeSpec(64, base=10000, rotary_dim=64, start=0, interleaved=False)
    assert RopeSpec(64, start=16).rotary_dim == 48
    assert (spec.axis_count, spec.softmax_scaling) == (1, 1.0)
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
    assert len({spec, RopeSpec(64), *others}) == 1 + len(others)


def test_numbers_take_one_form() -> None:
    spec = RopeSpec(numpy.int64(64), base=500000, rotary_dim=numpy.int32(32))
    assert [*map(type, (spec.head_dim, spec.rotary_dim, spec.base))] == [int, int, float]
    assert spec == RopeSpec(64, base=5e5, rotary_dim=32)
    for base in (Fraction(3, 2), numpy.float32(1.5), 1.5):
        assert RopeSpec(8, base=base) == RopeSpec(8, base=1.5)


def test_frequencies() -> None:
    made = RopeSpec(64, base=5e5, rotary_dim=32, start=8).frequencies()
    assert made.inv_freq.tolist() == [float(omega) for omega in oracle.frequencies(5e5, 32)]
    assert made.attention_scaling == 1.0
    assert RopeSpec(64).frequencies(100) == RopeSpec(64).frequencies()
    assert RopeSpec(0).rotary_dim == len(RopeSpec(5, rotary_dim=0).frequencies().exact) == 0
    rule = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert RopeSpec(8, scaling=rule).softmax_scaling == rule.softmax_scaling > 1.8


def test_replace_derives_anew() -> None:
    """But hands over the resolved rotary_dim; rotary_dim=None computes it anew."""
    spec = RopeSpec(20)
    other = dataclasses.replace(spec, base=5e5)
    assert other == RopeSpec(20, base=5e5)
    assert not other.at().angles.words.equal(spec.at().angles.words)
    assert hash(other) == hash(RopeSpec(20, base=5e5)) != hash(spec)
    assert dataclasses.replace(spec, head_dim=10, rotary_dim=None) == RopeSpec(10)  # type: ignore[arg-type]
    assert dataclasses.replace(spec, head_dim=40) == RopeSpec(40, rotary_dim=20)


def test_a_pickle_carries_no_tensor() -> None:
    spec = RopeSpec(4096)
    spec.at(5)
    assert len(pickle.dumps(spec)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "RopeSpec(head_dim=64)",
        "RopeSpec(head_dim=64, start=16)",
        "RopeSpec(head_dim=64, rotary_dim=16, start=16)",
        "RopeSpec(head_dim=64, base=500000.0, interleaved=True)",
        "RopeSpec(head_dim=64, scaling=YaRN(factor=4.0, original_max_position=4096, truncate=False))",
        "RopeSpec(head_dim=128, axes=Axes.sections((16, 24, 24)))",
    ],
)
def test_repr_is_the_shortest_call(text: str) -> None:
    assert repr(eval(text)) == text


def test_the_form_of_a_dictionary() -> None:
    """`to_dict` writes version 1 of the format, which saved files contain."""
    channels = {"rotary_dim": 8, "start": 2, "interleaved": True}
    spec = RopeSpec(12, base=5e5, **channels, scaling=Linear(3.3), axes=Axes.sections((1, 3)))  # type: ignore[arg-type]
    assert spec.to_dict() == {
        "version": 1,
        "head_dim": 12,
        "base": 500000.0,
        **channels,
        "scaling": {"rule": "linear", "factor": 3.3},
        "axes": {"count": 2, "pairs": [[0, 0, 8], [1, 1, 8], [1, 2, 8], [1, 3, 8]]},
    }
    assert RopeSpec.from_dict({"version": 1, "head_dim": 64}) == RopeSpec(64)
