"""RopeSpec.cos_sin: tables of cosines and sines in every format, compared with exact ones."""

from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.helpers import noise, refusals
from tests.support.tolerances import assert_angles, assert_near, assert_same_bits, value
from tightrope import RopeSpec, apply_rotary_pos_emb, positions, rotate
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, YaRN
from tightrope.functional import build_freqs_cis

IDS = torch.tensor([[0, 1, 2, 1_000_000], [-7, 4096, 131_071, 5]])
FORMATS = ("half", "cat", "repeat", "full")


def written(pairs: torch.Tensor, tables: str, interleaved: bool) -> torch.Tensor:
    """Write one entry per pair in a format."""
    if tables == "half":
        return pairs
    neighbours = tables == "repeat" or (tables == "full" and interleaved)
    index = [k for k in range(pairs.shape[-1]) for _ in (0, 1)]
    return pairs[..., index] if neighbours else pairs.repeat(1, 1, 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tables", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_format_is_exact(dtype: torch.dtype, tables: str, interleaved: bool) -> None:
    spec = RopeSpec(16, base=5e5, rotary_dim=8, start=4, interleaved=interleaved)
    exact = oracle.cos_sin(IDS, oracle.frequencies(5e5, 8))
    found = spec.cos_sin(IDS, dtype=dtype, tables=tables)
    for got, wanted in zip(found, exact, strict=True):
        assert got.dtype == dtype
        assert_angles(got, written(wanted, tables, interleaved), 1_000_000)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tables", FORMATS)
def test_tables_rotate_as_the_spec_does(tables: str, interleaved: bool) -> None:
    spec = RopeSpec(16, rotary_dim=8, start=4, interleaved=interleaved)
    x = noise(2, 3, 4, 16, dtype=torch.float32)
    found = spec.cos_sin(IDS, tables=tables)
    options: dict[str, Any] = {"interleaved": interleaved, "tables": tables, "start": 4}
    y, _ = apply_rotary_pos_emb(x, None, *found, **options)
    assert_near(y, rotate(x, spec, IDS), "float32 ways")


def test_the_default_is_the_layout_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    ids = torch.arange(10).reshape(2, 5)
    theirs = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), ids)
    ours = RopeSpec.from_config(config).cos_sin(ids)
    assert float(ours[0][0, 0, 0]) > 1.1  # the attention scaling is included
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.shape == (2, 5, 32)
        assert_near(got, wanted, "float32 ways")


def test_the_attention_scaling_is_included() -> None:
    spec = RopeSpec(8, scaling=YaRN(4.0, 64))
    frequencies = spec.frequencies()
    assert frequencies.attention_scaling > 1.1
    plain = RopeSpec(8, scaling=Given.of(frequencies.inv_freq)).cos_sin(IDS, dtype=torch.float64)
    for got, wanted in zip(spec.cos_sin(IDS, dtype=torch.float64), plain, strict=True):
        assert_near(got, wanted * frequencies.attention_scaling, "float64 ways")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_round_once(dtype: torch.dtype) -> None:
    spec = RopeSpec(64)
    ids = torch.arange(400) * 997
    exact = oracle.cos_sin(ids, oracle.frequencies(10000.0, 64))
    for got, wanted in zip(spec.cos_sin(ids, dtype=dtype, tables="half"), exact, strict=True):
        assert got.dtype == dtype
        differ = oracle.steps_apart(got, oracle.rounded(wanted, dtype)) != 0
        assert differ.sum() <= differ.numel() * (1 - value("16-bit share"))


def test_positions_from_zero() -> None:
    spec = RopeSpec(8)
    for got, wanted in zip(spec.cos_sin(seq_len=5), spec.cos_sin(torch.arange(5)), strict=True):
        assert got.shape == (1, 5, 8)
        assert_same_bits(got, wanted)
    for got, wanted in zip(spec.cos_sin(seq_len=5, tables="half"), build_freqs_cis(5, 8)):
        assert_near(got[0], wanted, "float32 ways")
    assert spec.cos_sin(seq_len=0)[0].shape == (1, 0, 8)
    where = positions.explicit(positions.per_row(torch.tensor([3, 90])), 2)
    wanted = spec.cos_sin(torch.tensor([[3, 4], [90, 91]]))
    assert_same_bits(spec.cos_sin(where)[1], wanted[1])


def test_the_length_of_each_row() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 4))
    ids = torch.tensor([[0, 1, 2], [0, 4, 9]])
    for length in (None, 20):
        got = spec.cos_sin(ids, seq_len=length, tables="half")[1]
        for row, own in enumerate((3, 10) if length is None else (20, 20)):
            omegas = oracle.frequencies(10000.0, 8)
            if own > 4:
                omegas = spec.frequencies(own).exact
            wanted = oracle.cos_sin(ids[row : row + 1], [oracle.MP.mpf(str(o)) for o in omegas])[1]
            assert_angles(got[row : row + 1], wanted, 9)
    short = RopeSpec(8).cos_sin(seq_len=4)
    assert_same_bits(spec.cos_sin(seq_len=4)[0], short[0])
    assert not torch.equal(spec.cos_sin(seq_len=5)[0][:, :4], short[0])


def test_several_axes_are_added_up() -> None:
    axes = Axes.sections((1, 2, 1))
    spec = RopeSpec(8, axes=axes)
    ids = torch.arange(24).reshape(3, 2, 4) * 13
    own = oracle.frequencies(10000.0, 8)
    by_axis = [
        [own[k] if axis == pair[0] else oracle.MP.mpf(0) for k, pair in enumerate(axes.pairs)]
        for axis in range(3)
    ]
    exact = oracle.cos_sin(ids, by_axis)
    found = spec.cos_sin(positions.multi_axis(ids), tables="half")
    for got, wanted in zip(found, exact, strict=True):
        assert_angles(got, wanted, 3 * 24 * 13)


def test_frequencies_per_head() -> None:
    given = noise(3, 4)
    cos, sin = RopeSpec(8, scaling=Given.of(given)).cos_sin(IDS)
    assert cos.shape == sin.shape == (2, 3, 4, 8)
    for head in range(3):
        wanted = RopeSpec(8, scaling=Given.of(given[head])).cos_sin(IDS)
        assert_same_bits(cos[:, head], wanted[0])
        assert_same_bits(sin[:, head], wanted[1])


def test_fractional_positions_have_gradients() -> None:
    ids = noise(2, 3).requires_grad_()
    spec = RopeSpec(8)
    assert torch.autograd.gradcheck(lambda ids: spec.cos_sin(ids, dtype=torch.float64), ids)
    lost = spec.cos_sin(torch.tensor([0.5, torch.nan]))[0]
    assert lost[0, 1].isnan().all()
    assert lost[0, 0].isfinite().all()


def test_devices_and_compiled_code() -> None:
    spec = RopeSpec(8)
    assert spec.cos_sin(seq_len=5, device="meta")[0].device.type == "meta"
    assert spec.cos_sin(torch.arange(5, device="meta"))[0].device.type == "meta"
    compiled = torch.compile(lambda ids: spec.cos_sin(ids), fullgraph=True, backend="aot_eager")
    assert_near(compiled(IDS), spec.cos_sin(IDS), "float32 ways")


SPEC, BY_LENGTH = RopeSpec(8), RopeSpec(8, scaling=DynamicNTK(2.0, 4))
test_errors = refusals(
    "cos_sin",
    ValueError={
        "tables must be one of cat, repeat, half, full but got 'both'.": (
            lambda: SPEC.cos_sin(seq_len=3, tables="both")
        ),
        "positions must hold the position of every token but is None; for positions 0 to n - 1 pass "
        "seq_len=n.": lambda: SPEC.cos_sin(),
        "positions must hold the position of every token but got 5; pass ids or "
        "tightrope.positions.explicit(positions, tokens).": lambda: SPEC.cos_sin(5),
        "positions must have 1 axis for this spec but got 3…": (
            lambda: SPEC.cos_sin(positions.multi_axis(IDS.expand(3, 2, 4)))
        ),
        "seq_len must be at least 10, the largest position plus 1, but got 5…": (
            lambda: BY_LENGTH.cos_sin(torch.arange(10), seq_len=5)
        ),
    },
    TypeError={
        "dtype must be float32, float64, bfloat16 or float16 but got torch.int64.": (
            lambda: SPEC.cos_sin(seq_len=3, dtype=torch.int64)
        ),
        "seq_len must be an int but got int64[2]; pass positions for rows of different lengths.": (
            lambda: BY_LENGTH.cos_sin(seq_len=torch.tensor([3, 4]))
        ),
    },
)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^\[seq_len\] a length must not be negative but got -1"):
        BY_LENGTH.cos_sin(seq_len=-1)
