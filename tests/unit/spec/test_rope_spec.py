"""RopeSpec, an immutable value: fields, copies, dictionaries, and its tables of cosines and sines.

What it refuses is in test_refusals.py.
"""

import dataclasses
import pickle
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from tests.support import oracle
from tests.support.helpers import noise
from tests.support.tolerances import assert_angles, assert_near, assert_same_bits, value
from tightrope import RopeSpec, apply_rotary_pos_emb, positions, rotate
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, Linear, YaRN


def test_defaults_and_equality() -> None:
    spec = RopeSpec(64)
    assert spec == RopeSpec(64, base=10000, rotary_dim=64, start=0, interleaved=False)
    assert RopeSpec(64, start=16).rotary_dim == 48
    assert (spec.axis_count, spec.softmax_scaling) == (1, 1.0)
    # It rotates alike, but is not equal.
    assert spec != RopeSpec(64, scaling=Linear(1.0))


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


# --- tables ---------------------------------------------------------------------------------------

IDS = torch.tensor([[0, 1, 2, 1_000_000], [-7, 4096, 131_071, 5]])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tables", ["half", "cat", "repeat", "full"])
def test_every_format_is_exact_and_rotates_as_the_spec_does(tables: str, interleaved: bool) -> None:
    spec = RopeSpec(16, base=5e5, rotary_dim=8, start=4, interleaved=interleaved)
    exact = oracle.cos_sin(IDS, oracle.frequencies(5e5, 8))
    if tables == "repeat" or (tables == "full" and interleaved):
        exact = tuple(table.repeat_interleave(2, -1) for table in exact)  # type: ignore[assignment]
    elif tables != "half":
        exact = tuple(table.repeat(1, 1, 2) for table in exact)  # type: ignore[assignment]
    x = noise(2, 3, 4, 16, dtype=torch.float32)
    for dtype in (torch.float32, torch.float64):
        found = spec.cos_sin(IDS, dtype=dtype, tables=tables)
        for got, wanted in zip(found, exact, strict=True):
            assert got.dtype == dtype
            assert_angles(got, wanted, 1_000_000)
    options: dict[str, Any] = {"interleaved": interleaved, "tables": tables, "start": 4}
    y, _ = apply_rotary_pos_emb(x, None, *spec.cos_sin(IDS, tables=tables), **options)
    assert_near(y, rotate(x, spec, IDS), "float32 ways")


def test_the_default_is_the_layout_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters={"rope_theta": 10000.0, **yarn}
    )
    ids = torch.arange(10).reshape(2, 5)
    theirs = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), ids)
    ours = RopeSpec.from_config(config).cos_sin(ids)
    assert float(ours[0][0, 0, 0]) > 1.1  # the attention scaling is included
    assert_near(ours, theirs, "float32 ways")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_round_once(dtype: torch.dtype) -> None:
    ids = torch.arange(400) * 997
    exact = oracle.cos_sin(ids, oracle.frequencies(10000.0, 64))
    found = RopeSpec(64).cos_sin(ids, dtype=dtype, tables="half")
    for got, wanted in zip(found, exact, strict=True):
        assert got.dtype == dtype
        differ = oracle.steps_apart(got, oracle.rounded(wanted, dtype)) != 0
        assert differ.sum() <= differ.numel() * (1 - value("16-bit share"))


def test_positions() -> None:
    spec = RopeSpec(8)
    assert_same_bits(spec.cos_sin(seq_len=5), spec.cos_sin(torch.arange(5)))
    assert spec.cos_sin(seq_len=5)[0].shape == (1, 5, 8)
    assert spec.cos_sin(seq_len=0)[0].shape == (1, 0, 8)
    where = positions.explicit(positions.per_row(torch.tensor([3, 90])), 2)
    assert_same_bits(spec.cos_sin(where), spec.cos_sin(torch.tensor([[3, 4], [90, 91]])))
    with torch.device("meta"):
        assert spec.cos_sin(seq_len=5, device="meta")[0].is_meta
        assert spec.cos_sin(torch.arange(5))[0].is_meta


ALL = RopeSpec(8, axes=Axes.sections((1, 2, 1)), scaling=YaRN(4.0, 64))
# Specs with positions.
OTHERS: dict[str, tuple[RopeSpec, Any]] = {
    "an attention scaling": (RopeSpec(8, scaling=YaRN(4.0, 64)), IDS),
    "lengths of rows": (
        RopeSpec(8, scaling=DynamicNTK(2.0, 4)),
        torch.tensor([[0, 1, 2, 3], [0, 3, 6, 9]]),
    ),
    "several axes": (ALL, positions.multi_axis(torch.arange(24).reshape(3, 2, 4) * 13)),
    "frequencies per head": (RopeSpec(8, scaling=Given.of(noise(3, 4))), IDS),
    "fractions": (RopeSpec(8), IDS / 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tables_are_the_rotation_of_pairs_1_and_0(name: str) -> None:
    spec, where = OTHERS[name]
    x = torch.zeros(2, 3, 4, 8, dtype=torch.float64)
    x[..., :4] = 1
    y = rotate(x, spec, where)
    cos, sin = spec.cos_sin(where, dtype=torch.float64, tables="half")
    rows = cos.dim() == 4
    assert cos.shape == ((2, 3, 4, 4) if rows else (2, 4, 4))
    for got, wanted in ((cos, y[..., :4]), (sin, y[..., 4:])):
        assert_near((got if rows else got[:, None].expand(wanted.shape)), wanted, "float64 ways")


def test_a_stated_length_counts() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 4))
    longer = spec.cos_sin(torch.arange(4), seq_len=20)
    assert_same_bits(longer, [table[:, :4] for table in spec.cos_sin(seq_len=20)])
    short = spec.cos_sin(seq_len=4)
    assert_same_bits(short, RopeSpec(8).cos_sin(seq_len=4))
    assert not torch.equal(spec.cos_sin(seq_len=5)[0][:, :4], short[0])


def test_a_lost_position_loses_its_row() -> None:
    lost = RopeSpec(8).cos_sin(torch.tensor([0.5, torch.nan]))[0]
    assert lost[0, 1].isnan().all()
    assert lost[0, 0].isfinite().all()
