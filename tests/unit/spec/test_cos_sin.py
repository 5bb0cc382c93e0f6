"""RopeSpec.cos_sin: tables of cosines and sines in every format, compared with exact ones."""

from typing import Any

import pytest
import torch

from tests.support import oracle
from tests.support.helpers import noise
from tests.support.tolerances import assert_angles, assert_near, assert_same_bits, value
from tightrope import RopeSpec, apply_rotary_pos_emb, positions, rotate
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, YaRN

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
    compiled = torch.compile(lambda: spec.cos_sin(where), fullgraph=True, backend="aot_eager")
    assert_near(compiled(), spec.cos_sin(where), "float32 ways")


def test_a_stated_length_counts() -> None:
    spec = RopeSpec(8, scaling=DynamicNTK(2.0, 4))
    longer = spec.cos_sin(torch.arange(4), seq_len=20)
    assert_same_bits(longer, [table[:, :4] for table in spec.cos_sin(seq_len=20)])
    short = spec.cos_sin(seq_len=4)
    assert_same_bits(short, RopeSpec(8).cos_sin(seq_len=4))
    assert not torch.equal(spec.cos_sin(seq_len=5)[0][:, :4], short[0])


def test_fractional_positions_have_gradients() -> None:
    ids, spec = noise(2, 3).requires_grad_(), RopeSpec(8)
    assert torch.autograd.gradcheck(lambda ids: spec.cos_sin(ids, dtype=torch.float64), ids)
    lost = spec.cos_sin(torch.tensor([0.5, torch.nan]))[0]
    assert lost[0, 1].isnan().all()
    assert lost[0, 0].isfinite().all()
