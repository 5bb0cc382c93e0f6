"""Axes: the assignment of pairs to coordinates, compared with the published code of each family.

The families' own modules (transformers 5.23) compute cosines and sines, or rotate, at coordinates that
differ from axis to axis. The expected angles are plain float64 products of a coordinate and
base^(−2·index/dim), as the assignment defines them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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
from tests.support.helpers import refusals
from tests.support.matrix import every_backend
from tests.support.tolerances import Result, assert_near, assert_rotated
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate, rotate_qk
from tightrope.positions import Positions
from tightrope.spec import PreparedRotation

# --- the assignments as data ----------------------------------------------------------------------


def owners(axes: Axes) -> str:
    """Return the axis of each pair, as one digit per pair."""
    return "".join(str(axis) for axis, _, _ in axes.pairs)


def test_interleaved_sections() -> None:
    axes = Axes.sections((24, 20, 20), interleaved=True)
    assert axes.count == 3
    assert owners(axes) == "012" * 20 + "0" * 4
    assert [(index, dim) for _, index, dim in axes.pairs] == [(k, 128) for k in range(64)]
    # Qwen3.5: a quarter of 256 channels rotates.
    assert owners(Axes.sections((11, 11, 10), interleaved=True)) == "012" * 10 + "01"
    assert owners(Axes.sections((3, 1, 2), interleaved=True)) == "012002"


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


def text_config(kind: Any, theta: float, sections: list[int], **more: Any) -> Any:
    parameters = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}
    return kind(hidden_size=1024, num_attention_heads=8, rope_parameters=parameters)


QWEN2_VL = text_config(Qwen2VLTextConfig, 1e6, [16, 24, 24])
QWEN3_VL = text_config(Qwen3VLTextConfig, 5e6, [24, 20, 20], mrope_interleaved=True)
GLM4V = text_config(Glm4vTextConfig, 1e4, [8, 12, 12], partial_rotary_factor=0.5)
ERNIE = text_config(Ernie4_5_VLMoeTextConfig, 5e5, [22, 22, 20])
AXIAL = {"rope_type": "axial", "rope_theta": 1e4}
QWEN2_VL_VISION = Qwen2VLVisionConfig(embed_dim=640, num_heads=8, rope_parameters=AXIAL)
PIXTRAL = PixtralVisionConfig(hidden_size=512, num_attention_heads=8, rope_parameters=AXIAL)
DINOV3 = DINOv3ViTConfig(
    hidden_size=512, num_attention_heads=8, patch_size=16, image_size=64, rope_theta=100.0
)
LLAMA4 = Llama4VisionConfig(
    hidden_size=352,
    num_attention_heads=4,
    image_size=70,
    patch_size=14,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)


def per_pair(table: torch.Tensor) -> torch.Tensor:
    """Return one value per pair from a table that holds each value twice."""
    half = table.shape[-1] // 2
    if torch.equal(table[:, :half], table[:, half:]):
        return table[:, :half]
    assert torch.equal(table[:, 0::2], table[:, 1::2])
    return table[:, 0::2]


def by_module(module: torch.nn.Module, *given: torch.Tensor) -> Callable[[], Any]:
    """Return a function that computes cosines and sines with a module, for at most one row."""
    return lambda: tuple(per_pair(t[0] if t.dim() == 3 else t) for t in module.eval()(*given))


def qwen2_vl_text_as_first_published() -> tuple[torch.Tensor, torch.Tensor]:
    # Up to transformers 4, the sections were doubled and cut out of tables that hold both halves.
    inv_freq = 1.0 / (1e6 ** (torch.arange(0, 128, 2).float() / 128))
    angle = THW[..., None].float() * inv_freq
    angle = torch.cat((angle, angle), -1)
    parts = [part[i % 3] for i, part in enumerate(angle.split([16, 24, 24, 16, 24, 24], dim=-1))]
    whole = torch.cat(parts, -1)
    return per_pair(whole.cos()), per_pair(whole.sin())


def llama4_vision() -> tuple[torch.Tensor, torch.Tensor]:
    table = llama4.Llama4VisionRotaryEmbedding(LLAMA4).freqs_ci.squeeze(1)
    return table.real, table.imag


# Rows and columns count from 1; the class token comes last and does not rotate.
LLAMA4_AT = torch.nn.functional.pad(
    torch.stack([torch.arange(25) % 5, torch.arange(25) // 5]) + 1, (0, 1)
)
# Middles of 3 rows and 5 columns, from -1 to 1.
ROW, COLUMN = torch.arange(15).double() // 5, torch.arange(15).double() % 5
DINOV3_AT = 2 * math.pi * torch.stack((2 * (ROW + 0.5) / 3 - 1, 2 * (COLUMN + 0.5) / 5 - 1))

TOKEN, TEXT, IMAGE = torch.zeros(1), THW[:, None], THW[1:].T
FAMILIES = {
    "Qwen2-VL": Family(
        Axes.sections((16, 24, 24)),
        1e6,
        THW,
        by_module(qwen2_vl.Qwen2VLRotaryEmbedding(QWEN2_VL), TOKEN, TEXT),
    ),
    "Qwen2-VL, sections doubled": Family(
        Axes.sections((16, 24, 24)), 1e6, THW, qwen2_vl_text_as_first_published
    ),
    "Qwen3-VL": Family(
        Axes.sections((24, 20, 20), interleaved=True),
        5e6,
        THW,
        by_module(qwen3_vl.Qwen3VLTextRotaryEmbedding(QWEN3_VL), TOKEN, TEXT),
    ),
    "GLM-4.1V": Family(
        Axes.sections((8, 12, 12)),
        1e4,
        THW,
        by_module(glm4v.Glm4vTextRotaryEmbedding(GLM4V), TOKEN, TEXT),
    ),
    "ERNIE 4.5 VL": Family(
        Axes(3, tuple((1 + k % 2 if k < 44 else 0, k, 128) for k in range(64))),
        5e5,
        THW,
        by_module(ernie.Ernie4_5_VLMoeTextRotaryEmbedding(ERNIE), TOKEN, TEXT),
    ),
    # The module takes positions [tokens, axes], although its comment states (2, N).
    "Qwen2-VL vision": Family(
        Axes.blocks((20, 20)),
        1e4,
        THW[1:],
        by_module(qwen2_vl.Qwen2VLVisionRotaryEmbedding(QWEN2_VL_VISION), TOKEN, IMAGE),
    ),
    "Pixtral": Family(
        Axes.strided(2, pairs=32),
        1e4,
        THW[1:],
        by_module(pixtral.PixtralVisionRotaryEmbedding(PIXTRAL), TOKEN, IMAGE),
    ),
    "DINOv3": Family(
        Axes.blocks((16, 16)),
        100.0,
        DINOV3_AT,
        by_module(dinov3.DINOv3ViTRopePositionEmbedding(DINOV3), torch.zeros(1, 3, 48, 80)),
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


# --- whole rotations ------------------------------------------------------------------------------


def at(
    axes: Axes, base: float, where: Positions, *, head_dim: int, interleaved: bool = False
) -> PreparedRotation:
    spec = RopeSpec(
        head_dim, base=base, rotary_dim=axes.rotary_dim, interleaved=interleaved, axes=axes
    )
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
        spec = RopeSpec(30, base=5e5, rotary_dim=24, start=3, axes=axes)
        got = rotate(x, spec, positions.multi_axis(ids), backend=backend)
        exact = oracle.rotate(x, ids.expand(-1, 2, -1), omegas, start=3)
        lengths = oracle.pair_lengths(x, 24, start=3)
        assert_rotated([Result(got, exact, lengths, reach=float(ids.max()))])


def assert_all_near(got: Iterable[Any], wanted: Iterable[Any]) -> None:
    assert_near(got, wanted, "float32 ways")


def test_glm4v_turns_the_first_half_in_pairs_of_neighbours() -> None:
    q, k = draw(1, 4, 10, 128), draw(1, 2, 10, 128)
    where = positions.mrope([3, (1, 2, 3), 1])
    tables = glm4v.Glm4vTextRotaryEmbedding(GLM4V)(q, where.ids)
    rope = at(Axes.sections((8, 12, 12)), 1e4, where, head_dim=128, interleaved=True)
    assert_all_near(rotate_qk(q, k, rope), glm4v.apply_rotary_pos_emb(q, k, *tables))


def test_dinov3_leaves_class_and_register_tokens() -> None:
    q, k = draw(2, 8, 5 + 15, 64), draw(2, 8, 5 + 15, 64)
    tables = dinov3.DINOv3ViTRopePositionEmbedding(DINOV3).eval()(torch.zeros(1, 3, 48, 80))
    wanted = dinov3.apply_rotary_pos_emb(q, k, *tables)
    still = positions.multi_axis(torch.zeros(2, 5))
    patches = positions.grid(3, 5, span=(-2 * math.pi, 2 * math.pi))
    where = positions.concatenate([still, patches])
    got = rotate_qk(q, k, at(Axes.blocks((16, 16)), 100.0, where, head_dim=64))
    assert_all_near(got, wanted)
    assert torch.equal(got[0][:, :, :5], wanted[0][:, :, :5])


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
def test_the_repr_and_lists_make_an_equal_value(axes: Axes) -> None:
    assert eval(repr(axes), {"Axes": Axes}) == axes
    assert Axes(axes.count, [list(pair) for pair in axes.pairs]) == axes


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


# --- errors ------------------------------------------------------------------------------------


test_invalid_axes_are_refused = refusals(
    ValueError={
        "[Axes] count must be at least 1 but got 0.": lambda: Axes(0, ()),
        "[Axes] pairs must be a sequence of (axis, index, dim) but got (0, 0).": lambda: Axes(
            1, ((0, 0),)
        ),
        "[Axes] axis must lie in [0, 2) but got 2 in (2, 0, 4).": lambda: Axes(2, ((2, 0, 4),)),
        "[Axes] axis must lie in [0, 2) but got -1 in (-1, 0, 4).": lambda: Axes(2, ((-1, 0, 4),)),
        "[Axes] dim must be even and positive but got 3 in (0, 0, 3).": lambda: Axes(
            1, ((0, 0, 3),)
        ),
        "[Axes] dim must be even and positive but got 0 in (0, 0, 0).": lambda: Axes(
            1, ((0, 0, 0),)
        ),
        "[Axes] index must lie in [0, 2), the frequencies of 4 channels, but got 2 in (0, 2, "
        "4).": lambda: Axes(1, ((0, 2, 4),)),
        "[Axes.sections] sizes must hold at least one number of pairs, none negative, but got "
        "().": lambda: Axes.sections(()),
        "[Axes.blocks] sizes must hold at least one number of pairs, none negative, but got (4, "
        "-1).": lambda: Axes.blocks((4, -1)),
        "[Axes.sections] sizes must fit pairs 0 to 63 when interleaved but axis 1 would reach "
        "pair 70; got (16, 24, 24).": lambda: Axes.sections((16, 24, 24), interleaved=True),
        "[Axes.strided] count must be at least 1 but got 0.": lambda: Axes.strided(0, 4),
        "[Axes.strided] pairs must be at least 0 and a multiple of count 3 but got 32.": lambda: (
            Axes.strided(3, 32)
        ),
    },
    TypeError={
        "[Axes] count must be an int but got True.": lambda: Axes(True, ()),
        "[Axes] count must be an int but got 2.0.": lambda: Axes(2.0, ()),
        "[Axes] pairs must be a sequence of (axis, index, dim) but got 7.": lambda: Axes(1, 7),
        "[Axes] pairs must be a sequence of (axis, index, dim) but got 5.": lambda: Axes(1, (5,)),
        "[Axes] each of axis, index and dim must be an int but got 0.5.": lambda: Axes(
            1, ((0, 0.5, 4),)
        ),
        "[Axes.sections] sizes must be a sequence of ints, one per axis, but got 16.": lambda: (
            Axes.sections(16)
        ),
        "[Axes.sections] sizes must be a sequence of ints, one per axis, but got '16'.": lambda: (
            Axes.sections("16")
        ),
        "[Axes.blocks] a size must be an int but got 2.5.": lambda: Axes.blocks((4, 2.5)),
        "[Axes.sections] interleaved must be a bool but got 1.": lambda: Axes.sections(
            (4, 4), interleaved=1
        ),
        "[Axes.strided] pairs must be an int but got '32'.": lambda: Axes.strided(2, "32"),
    },
)
