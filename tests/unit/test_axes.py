"""Axes: the assignment of pairs to coordinates, compared with the published code of each family.

The families' own modules (transformers 5.23) compute cosines and sines, or rotate, at coordinates that
differ from axis to axis. The expected angles are plain float64 products of a coordinate and
base^(−2·index/dim), as the assignment defines them.
"""

import copy
import dataclasses
import math
import pickle
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.dinov3_vit.configuration_dinov3_vit import DINOv3ViTConfig
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as ernie
from transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeTextConfig,
)
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import (
    Qwen2VLTextConfig,
    Qwen2VLVisionConfig,
)
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from tests.support import oracle
from tests.support.matrix import every_backend
from tests.support.tolerances import Result, assert_near, assert_rotated, value
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate, rotate_qk
from tightrope.positions import Positions
from tightrope.spec import PreparedRotation

# --- the assignments as data ----------------------------------------------------------------------


def owners(axes: Axes) -> str:
    """Return the axis of each pair, as one digit per pair."""
    return "".join(str(axis) for axis, _, _ in axes.pairs)


def test_consecutive_sections() -> None:
    axes = Axes.sections((16, 24, 24))
    assert axes.count == 3
    assert owners(axes) == "0" * 16 + "1" * 24 + "2" * 24
    assert [(index, dim) for _, index, dim in axes.pairs] == [(k, 128) for k in range(64)]


def test_interleaved_sections() -> None:
    axes = Axes.sections((24, 20, 20), interleaved=True)
    assert axes.count == 3
    assert owners(axes) == "012" * 20 + "0" * 4
    assert [(index, dim) for _, index, dim in axes.pairs] == [(k, 128) for k in range(64)]
    # Qwen3.5: a quarter of 256 channels rotates.
    assert owners(Axes.sections((11, 11, 10), interleaved=True)) == "012" * 10 + "01"
    assert owners(Axes.sections((3, 1, 2), interleaved=True)) == "012002"


def test_blocks() -> None:
    axes = Axes.blocks((22, 21, 21))
    assert owners(axes) == "0" * 22 + "1" * 21 + "2" * 21
    assert axes.pairs[21:23] == ((0, 21, 44), (1, 0, 42))
    assert axes.pairs[-1] == (2, 20, 42)


def test_strided() -> None:
    axes = Axes.strided(2, pairs=32)
    assert owners(axes) == "0" * 16 + "1" * 16
    assert [index for _, index, _ in axes.pairs] == [*range(0, 32, 2), *range(1, 32, 2)]
    assert {dim for _, _, dim in axes.pairs} == {64}


# --- published code -------------------------------------------------------------------------------

# Time, height and width of a token all differ, and all tokens differ.
THW = torch.tensor([[3, 50, 0, 17, 41], [31, 2, 9, 0, 23], [7, 19, 44, 5, 1]])


class Family(NamedTuple):
    """An assignment, and a function that computes cosines and sines with the model's own code.

    Attributes:
        published: returns two tensors ``[tokens, pairs]``.
    """

    axes: Axes
    base: float
    at: torch.Tensor  # [axes, tokens]
    published: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def qwen2_vl_text() -> tuple[torch.Tensor, torch.Tensor]:
    config = Qwen2VLTextConfig(
        hidden_size=1024,
        num_attention_heads=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    )
    cos, sin = qwen2_vl.Qwen2VLRotaryEmbedding(config)(torch.zeros(1), THW[:, None])
    return cos[0, :, :64], sin[0, :, :64]


def qwen2_vl_text_as_first_published() -> tuple[torch.Tensor, torch.Tensor]:
    # Up to transformers 4, the sections were doubled and cut out of tables that hold both halves.
    inv_freq = 1.0 / (1e6 ** (torch.arange(0, 128, 2).float() / 128))
    angle = THW[..., None].float() * inv_freq
    angle = torch.cat((angle, angle), -1)
    parts = [part[i % 3] for i, part in enumerate(angle.split([16, 24, 24, 16, 24, 24], dim=-1))]
    assert torch.equal(torch.cat(parts[:3], -1), torch.cat(parts[3:], -1))
    whole = torch.cat(parts, -1)
    return whole.cos()[:, :64], whole.sin()[:, :64]


def qwen3_vl_text() -> tuple[torch.Tensor, torch.Tensor]:
    config = Qwen3VLTextConfig(
        head_dim=128,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    )
    cos, sin = qwen3_vl.Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), THW[:, None])
    return cos[0, :, :64], sin[0, :, :64]


def glm4v_text() -> tuple[torch.Tensor, torch.Tensor]:
    config = Glm4vTextConfig(
        hidden_size=1024,
        num_attention_heads=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [8, 12, 12],
        },
    )
    cos, sin = glm4v.Glm4vTextRotaryEmbedding(config)(torch.zeros(1), THW[:, None])
    return per_pair(cos[0]), per_pair(sin[0])


def per_pair(table: torch.Tensor) -> torch.Tensor:
    """Return one value per pair from a table that holds each value twice."""
    half = table.shape[-1] // 2
    if torch.equal(table[:, :half], table[:, half:]):
        return table[:, :half]
    assert torch.equal(table[:, 0::2], table[:, 1::2])
    return table[:, 0::2]


def ernie_text() -> tuple[torch.Tensor, torch.Tensor]:
    config = Ernie4_5_VLMoeTextConfig(
        hidden_size=1024,
        num_attention_heads=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e5,
            "mrope_section": [22, 22, 20],
        },
    )
    cos, sin = ernie.Ernie4_5_VLMoeTextRotaryEmbedding(config)(torch.zeros(1), THW[:, None])
    assert torch.equal(cos[..., 0::2], cos[..., 1::2])
    return cos[0, :, 0::2], sin[0, :, 0::2]


def qwen2_vl_vision() -> tuple[torch.Tensor, torch.Tensor]:
    config = Qwen2VLVisionConfig(
        embed_dim=640, num_heads=8, rope_parameters={"rope_type": "axial", "rope_theta": 1e4}
    )
    # The module takes positions [tokens, axes], although its comment states (2, N).
    cos, sin = qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)(torch.zeros(1), THW[1:].T)
    return cos[:, :40], sin[:, :40]


def pixtral_vision() -> tuple[torch.Tensor, torch.Tensor]:
    config = PixtralVisionConfig(
        hidden_size=512,
        num_attention_heads=8,
        rope_parameters={"rope_type": "axial", "rope_theta": 1e4},
    )
    cos, sin = pixtral.PixtralVisionRotaryEmbedding(config)(torch.zeros(1), THW[1:].T)
    return cos[:, :32], sin[:, :32]


DINOV3 = DINOv3ViTConfig(
    hidden_size=512, num_attention_heads=8, patch_size=16, image_size=64, rope_theta=100.0
)


def dinov3_vision() -> tuple[torch.Tensor, torch.Tensor]:
    module = dinov3.DINOv3ViTRopePositionEmbedding(DINOV3).eval()
    cos, sin = module(torch.zeros(1, 3, 3 * 16, 5 * 16))
    return cos[:, :32], sin[:, :32]


def llama4_vision() -> tuple[torch.Tensor, torch.Tensor]:
    config = Llama4VisionConfig(
        hidden_size=352,
        num_attention_heads=4,
        image_size=70,
        patch_size=14,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    table = llama4.Llama4VisionRotaryEmbedding(config).freqs_ci.squeeze(1)
    return table.real, table.imag


# Rows and columns count from 1; the class token comes last and does not rotate.
LLAMA4_AT = torch.cat(
    (
        torch.stack([torch.arange(25) % 5, torch.arange(25) // 5]) + 1,
        torch.zeros(2, 1, dtype=torch.int64),
    ),
    1,
)

FAMILIES = {
    "Qwen2-VL": Family(Axes.sections((16, 24, 24)), 1e6, THW, qwen2_vl_text),
    "Qwen2-VL, sections doubled": Family(
        Axes.sections((16, 24, 24)), 1e6, THW, qwen2_vl_text_as_first_published
    ),
    "Qwen3-VL": Family(Axes.sections((24, 20, 20), interleaved=True), 5e6, THW, qwen3_vl_text),
    "GLM-4.1V": Family(Axes.sections((8, 12, 12)), 1e4, THW, glm4v_text),
    "ERNIE 4.5 VL": Family(
        Axes(3, tuple((1 + k % 2 if k < 44 else 0, k, 128) for k in range(64))),
        5e5,
        THW,
        ernie_text,
    ),
    "Qwen2-VL vision": Family(Axes.blocks((20, 20)), 1e4, THW[1:], qwen2_vl_vision),
    "Pixtral": Family(Axes.strided(2, pairs=32), 1e4, THW[1:], pixtral_vision),
    "DINOv3": Family(
        Axes.blocks((16, 16)),
        100.0,
        torch.tensor(
            [
                [
                    2 * math.pi * (2 * (cell + 0.5) / size - 1)
                    for cell in (divmod(token, 5)[axis] for token in range(15))
                ]
                for axis, size in ((0, 3), (1, 5))
            ],
            dtype=torch.float64,
        ),
        dinov3_vision,
    ),
    "Llama 4 vision": Family(Axes.blocks((22, 22)), 1e4, LLAMA4_AT, llama4_vision),
}


def angles(axes: Axes, base: float, at: torch.Tensor) -> torch.Tensor:
    """Return angles ``[tokens, pairs]`` in float64, as the docstring of Axes defines them."""
    return torch.stack(
        [at[axis].double() * base ** (-2 * index / dim) for axis, index, dim in axes.pairs], -1
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_published_cosines_and_sines(name: str) -> None:
    axes, base, at, published = FAMILIES[name]
    cos, sin = published()
    angle = angles(axes, base, at)
    assert cos.shape == angle.shape
    assert_near(cos.double(), angle.cos(), "float32 ways")
    assert_near(sin.double(), angle.sin(), "float32 ways")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_pair_is_where_it_is_for_a_reason(name: str) -> None:
    # The test above would fail if any one pair had another axis.
    axes, base, at, published = FAMILIES[name]
    cos, sin = published()
    changed = [
        (*axes.pairs[:k], ((axis + 1) % axes.count, index, dim), *axes.pairs[k + 1 :])
        for k, (axis, index, dim) in enumerate(axes.pairs)
    ]
    for pairs in changed:
        angle = angles(Axes(axes.count, pairs), base, at)
        assert not (is_near(cos, angle.cos()) and is_near(sin, angle.sin()))


def is_near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    bound = value("float32 ways")
    return torch.allclose(got.double(), wanted, rtol=bound, atol=bound)


# --- whole rotations ------------------------------------------------------------------------------


def at(
    axes: Axes, base: float, where: Positions, *, head_dim: int, interleaved: bool = False
) -> PreparedRotation:
    spec = RopeSpec(head_dim, base, axes.rotary_dim, interleaved=interleaved, axes=axes)
    return spec.at(where)


def draw(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) * 2 - 1


EXACT = [
    Axes.sections((4, 3, 5)),
    Axes.sections((5, 4, 3), interleaved=True),
    Axes.blocks((6, 4, 2)),
    Axes.strided(3, pairs=12),
]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("axes", EXACT, ids=repr)
def test_against_many_digits(axes: Axes, dtype: torch.dtype, backend: str) -> None:
    still = oracle.MP.mpf(0)
    omegas = [
        [
            oracle.frequencies(5e5, dim)[index] if owner == axis else still
            for owner, index, dim in axes.pairs
        ]
        for axis in range(axes.count)
    ]
    far = torch.tensor([[[0, 1, 70_001]], [[1_000_003, 2, 17]], [[5, 131_072, 999_999]]])
    x = draw(2, 2, 3, 30).to(dtype)
    for ids in (far, far.double() + 0.375):
        spec = RopeSpec(30, 5e5, 24, start=3, axes=axes)
        got = rotate(x, spec, positions.multi_axis(ids), backend=backend)
        exact = oracle.rotate(x, ids.expand(-1, 2, -1), omegas, start=3)
        lengths = oracle.pair_lengths(x, 24, start=3)
        assert_rotated([Result(got, exact, lengths, reach=float(ids.max()))])


def test_qwen2_vl_text_and_image() -> None:
    q, k = draw(2, 4, 18, 128), draw(2, 2, 18, 128)
    where = positions.mrope([4, (2, 2, 3), 2])
    assert where.ids is not None
    config = Qwen2VLTextConfig(
        hidden_size=1024,
        num_attention_heads=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    )
    tables = qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, where.ids)
    wanted = qwen2_vl.apply_rotary_pos_emb(q, k, *tables)
    got = rotate_qk(q, k, at(Axes.sections((16, 24, 24)), 1e6, where, head_dim=128))
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, "float32 ways")


def test_glm4v_turns_the_first_half_in_pairs_of_neighbours() -> None:
    q, k = draw(1, 4, 10, 128), draw(1, 2, 10, 128)
    where = positions.mrope([3, (1, 2, 3), 1])
    assert where.ids is not None
    config = Glm4vTextConfig(
        hidden_size=1024,
        num_attention_heads=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [8, 12, 12],
        },
    )
    tables = glm4v.Glm4vTextRotaryEmbedding(config)(q, where.ids)
    wanted = glm4v.apply_rotary_pos_emb(q, k, *tables)
    rotation = at(Axes.sections((8, 12, 12)), 1e4, where, head_dim=128, interleaved=True)
    for a, b in zip(rotate_qk(q, k, rotation), wanted, strict=True):
        assert_near(a, b, "float32 ways")


def test_qwen2_vl_vision() -> None:
    q, k = draw(24, 8, 80), draw(24, 8, 80)
    config = Qwen2VLVisionConfig(
        embed_dim=640, num_heads=8, rope_parameters={"rope_type": "axial", "rope_theta": 1e4}
    )
    where = positions.grid(4, 6, merge=2)
    assert where.ids is not None
    tables = qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)(q, where.ids[:, 0].T)
    wanted = qwen2_vl.apply_rotary_pos_emb_vision(q, k, *tables)
    got = rotate_qk(q, k, at(Axes.blocks((20, 20)), 1e4, where, head_dim=80), layout="thd")
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, "float32 ways")


def test_pixtral_images_of_two_sizes() -> None:
    q, k = draw(1, 8, 22, 64), draw(1, 8, 22, 64)
    config = PixtralVisionConfig(
        hidden_size=512,
        num_attention_heads=8,
        rope_parameters={"rope_type": "axial", "rope_theta": 1e4},
    )
    where = positions.concatenate([positions.grid(2, 5), positions.grid(4, 3)])
    assert where.ids is not None
    tables = pixtral.PixtralVisionRotaryEmbedding(config)(q, where.ids[:, 0].T)
    wanted = pixtral.apply_rotary_pos_emb(q, k, *tables, unsqueeze_dim=0)
    got = rotate_qk(q, k, at(Axes.strided(2, pairs=32), 1e4, where, head_dim=64))
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, "float32 ways")


def test_dinov3_leaves_class_and_register_tokens() -> None:
    q, k = draw(2, 8, 5 + 15, 64), draw(2, 8, 5 + 15, 64)
    tables = dinov3.DINOv3ViTRopePositionEmbedding(DINOV3).eval()(torch.zeros(1, 3, 48, 80))
    wanted = dinov3.apply_rotary_pos_emb(q, k, *tables)
    still = positions.multi_axis(torch.zeros(2, 5))
    patches = positions.grid(3, 5, span=(-2 * math.pi, 2 * math.pi))
    where = positions.concatenate([still, patches])
    got = rotate_qk(q, k, at(Axes.blocks((16, 16)), 100.0, where, head_dim=64))
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, "float32 ways")
        assert torch.equal(a[:, :, :5], b[:, :, :5])


def test_llama4_vision() -> None:
    q, k = draw(1, 26, 4, 88), draw(1, 26, 4, 88)
    config = Llama4VisionConfig(
        hidden_size=352,
        num_attention_heads=4,
        image_size=70,
        patch_size=14,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    table = llama4.Llama4VisionRotaryEmbedding(config).freqs_ci
    wanted = llama4.vision_apply_rotary_emb(q, k, table)
    # The first block rotates by the column, which is the second coordinate of the grid.
    axes = Axes(2, tuple((1 - axis, j, dim) for axis, j, dim in Axes.blocks((22, 22)).pairs))
    still = positions.multi_axis(torch.zeros(2, 1, dtype=torch.int64))
    where = positions.concatenate([positions.grid(5, 5, start=1), still])
    rotation = at(axes, 1e4, where, head_dim=88, interleaved=True)
    for a, b in zip(rotate_qk(q, k, rotation, layout="bshd"), wanted, strict=True):
        assert_near(a, b, "float32 ways")


def test_wan_gives_time_the_larger_block() -> None:
    # The published rule: height and width get 2·(d // 6) of d channels each, time the rest.
    d = 128
    space = 2 * (d // 6)
    time = d - 2 * space
    axes = Axes.blocks((time // 2, space // 2, space // 2))
    row = [1e4 ** (-2 * j / dim) for dim in (time, space, space) for j in range(dim // 2)]
    assert [1e4 ** (-2 * index / dim) for _, index, dim in axes.pairs] == row
    assert [len([0 for axis, _, _ in axes.pairs if axis == a]) for a in range(3)] == [22, 21, 21]


# --- equality, repr, copies --------------------------------------------------------------------------------------

PROFILE = settings(derandomize=True, database=None, deadline=None)
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@PROFILE
@given(SIZES)
def test_sections_give_every_axis_its_pairs(sizes: list[int]) -> None:
    axes = Axes.sections(sizes)
    total = sum(sizes)
    assert Counter(axis for axis, _, _ in axes.pairs) == Counter(
        {axis: size for axis, size in enumerate(sizes) if size}
    )
    assert [pair[1:] for pair in axes.pairs] == [(k, 2 * total) for k in range(total)]
    assert axes.rotary_dim == 2 * total
    assert list(owners(axes)) == sorted(owners(axes))


@PROFILE
@given(SIZES)
def test_interleaved_sections_follow_the_published_slices(sizes: list[int]) -> None:
    count, total = len(sizes), sum(sizes)
    owner = torch.zeros(total, dtype=torch.int64)
    for axis in range(1, count):
        owner[slice(axis, sizes[axis] * count, count)] = axis
    fits = all(int((owner == axis).sum()) == size for axis, size in enumerate(sizes))
    if not fits:
        with pytest.raises(
            ValueError, match=r"^\[Axes.sections\] sizes must fit pairs 0 to \d+ when interleaved"
        ):
            Axes.sections(sizes, interleaved=True)
        return
    axes = Axes.sections(sizes, interleaved=True)
    assert owners(axes) == "".join(map(str, owner.tolist()))
    assert [pair[1:] for pair in axes.pairs] == [(k, 2 * total) for k in range(total)]


@PROFILE
@given(SIZES)
def test_blocks_are_small_embeddings_side_by_side(sizes: list[int]) -> None:
    wanted = []
    for axis, size in enumerate(sizes):
        wanted += [(axis, j, 2 * size) for j in range(size)]
    assert Axes.blocks(sizes).pairs == tuple(wanted)


@PROFILE
@given(st.integers(1, 5), st.integers(0, 9))
def test_strides_use_every_frequency_once(count: int, each: int) -> None:
    axes = Axes.strided(count, count * each)
    assert sorted(index for _, index, _ in axes.pairs) == list(range(count * each))
    for axis, index, dim in axes.pairs:
        assert index % count == axis
        assert dim == 2 * count * each
    assert list(owners(axes)) == sorted(owners(axes))


PAIRS = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(4, 6).map(lambda n: 2 * n))
ANY = st.one_of(
    SIZES.map(Axes.sections),
    SIZES.map(Axes.blocks),
    st.builds(lambda n, m: Axes.strided(n, n * m), st.integers(1, 3), st.integers(0, 4)),
    st.just(Axes.sections((24, 20, 20), interleaved=True)),
    st.lists(PAIRS, max_size=6).map(lambda pairs: Axes(3, tuple(pairs))),
)


@PROFILE
@given(ANY)
def test_repr_makes_an_equal_value(axes: Axes) -> None:
    assert eval(repr(axes), {"Axes": Axes}) == axes


@PROFILE
@given(ANY)
def test_copies_are_equal(axes: Axes) -> None:
    for other in (
        copy.copy(axes),
        copy.deepcopy(axes),
        pickle.loads(pickle.dumps(axes)),
        dataclasses.replace(axes),
        Axes(axes.count, [list(pair) for pair in axes.pairs]),  # type: ignore[arg-type]
    ):
        assert other == axes
        assert hash(other) == hash(axes)


def test_repr_is_the_shortest_call() -> None:
    for text in (
        "Axes.sections((16, 24, 24))",
        "Axes.sections((24, 20, 20), interleaved=True)",
        "Axes.blocks((22, 21, 21))",
        "Axes.strided(2, pairs=32)",
        "Axes(count=2, pairs=((1, 0, 4), (0, 0, 4)))",
    ):
        assert repr(eval(text)) == text


def test_one_axis_is_plain_rotation_by_any_name() -> None:
    assert Axes.sections((8,)) == Axes.blocks((8,)) == Axes.strided(1, 8)


def test_frozen() -> None:
    axes = Axes.blocks((2, 2))
    for field in dataclasses.fields(axes):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(axes, field.name, 1)


# --- errors ------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Axes(0, ()), ValueError, "[Axes] count must be at least 1 but got 0."),
    (lambda: Axes(True, ()), TypeError, "[Axes] count must be an int but got True."),
    (lambda: Axes(2.0, ()), TypeError, "[Axes] count must be an int but got 2.0."),  # type: ignore[arg-type]
    (
        lambda: Axes(1, 7),  # type: ignore[arg-type]
        TypeError,
        "[Axes] pairs must be a sequence of (axis, index, dim) but got 7.",
    ),
    (
        lambda: Axes(1, (5,)),  # type: ignore[arg-type]
        TypeError,
        "[Axes] pairs must be a sequence of (axis, index, dim) but got 5.",
    ),
    (
        lambda: Axes(1, ((0, 0),)),  # type: ignore[arg-type]
        ValueError,
        "[Axes] pairs must be a sequence of (axis, index, dim) but got (0, 0).",
    ),
    (
        lambda: Axes(1, ((0, 0.5, 4),)),  # type: ignore[arg-type]
        TypeError,
        "[Axes] each of axis, index and dim must be an int but got 0.5.",
    ),
    (
        lambda: Axes(2, ((2, 0, 4),)),
        ValueError,
        "[Axes] axis must lie in [0, 2) but got 2 in (2, 0, 4).",
    ),
    (
        lambda: Axes(2, ((-1, 0, 4),)),
        ValueError,
        "[Axes] axis must lie in [0, 2) but got -1 in (-1, 0, 4).",
    ),
    (
        lambda: Axes(1, ((0, 0, 3),)),
        ValueError,
        "[Axes] dim must be even and positive but got 3 in (0, 0, 3).",
    ),
    (
        lambda: Axes(1, ((0, 0, 0),)),
        ValueError,
        "[Axes] dim must be even and positive but got 0 in (0, 0, 0).",
    ),
    (
        lambda: Axes(1, ((0, 2, 4),)),
        ValueError,
        "[Axes] index must lie in [0, 2), the frequencies of 4 channels, but got 2 in (0, 2, 4).",
    ),
    (
        lambda: Axes.sections(()),
        ValueError,
        "[Axes.sections] sizes must hold at least one number of pairs, none negative, but got ().",
    ),
    (
        lambda: Axes.blocks((4, -1)),
        ValueError,
        "[Axes.blocks] sizes must hold at least one number of pairs, none negative, but got (4, -1).",
    ),
    (
        lambda: Axes.sections(16),  # type: ignore[arg-type]
        TypeError,
        "[Axes.sections] sizes must be a sequence of ints, one per axis, but got 16.",
    ),
    (
        lambda: Axes.sections("16"),  # type: ignore[arg-type]
        TypeError,
        "[Axes.sections] sizes must be a sequence of ints, one per axis, but got '16'.",
    ),
    (
        lambda: Axes.blocks((4, 2.5)),  # type: ignore[list-item]
        TypeError,
        "[Axes.blocks] a size must be an int but got 2.5.",
    ),
    (
        lambda: Axes.sections((4, 4), interleaved=1),  # type: ignore[arg-type]
        TypeError,
        "[Axes.sections] interleaved must be a bool but got 1.",
    ),
    (
        lambda: Axes.sections((16, 24, 24), interleaved=True),
        ValueError,
        "[Axes.sections] sizes must fit pairs 0 to 63 when interleaved but axis 1 would reach pair 70; "
        "got (16, 24, 24).",
    ),
    (
        lambda: Axes.strided(0, 4),
        ValueError,
        "[Axes.strided] count must be at least 1 but got 0.",
    ),
    (
        lambda: Axes.strided(3, 32),
        ValueError,
        "[Axes.strided] pairs must be at least 0 and a multiple of count 3 but got 32.",
    ),
    (
        lambda: Axes.strided(2, "32"),  # type: ignore[arg-type]
        TypeError,
        "[Axes.strided] pairs must be an int but got '32'.",
    ),
]


@pytest.mark.parametrize("call, error, text", WRONG, ids=[text for _, _, text in WRONG])
def test_invalid_axes_are_refused(
    call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text
