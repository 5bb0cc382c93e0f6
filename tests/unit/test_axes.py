"""Axes: the assignment of pairs to coordinates, compared with the published code of each family.

The families' own modules (transformers 5.23) compute cosines and sines, or rotate, at coordinates that
differ from axis to axis. The expected angles are plain float64 products of a coordinate and
base^(−2·index/dim), as the assignment defines them.
"""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import oracle
from tests.support.helpers import noise
from tests.support.matrix import every_backend
from tests.support.tolerances import Result, assert_near, assert_rotated
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate, rotate_qk

# --- published code -------------------------------------------------------------------------------


def code(name: str) -> Any:
    return import_module(f"transformers.models.{name}.modeling_{name}")


DINOV3, GLM4V, LLAMA4, QWEN2_VL = map(code, ("dinov3_vit", "glm4v", "llama4", "qwen2_vl"))
# Time, height and width of a token all differ, and all tokens differ.
THW = torch.tensor([[3, 50, 0, 17, 41], [31, 2, 9, 0, 23], [7, 19, 44, 5, 1]])
TOKEN = torch.zeros(1)


def text(kind: Any, module: Any, theta: float, sections: list[int], **more: Any) -> Any:
    """Return a family's rotary module of text, of heads of 128 channels."""
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}
    return module(kind(hidden_size=1024, num_attention_heads=8, rope_parameters=rope))


AXIAL = {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
GLM_TABLES = text(
    GLM4V.Glm4vTextConfig,
    GLM4V.Glm4vTextRotaryEmbedding,
    1e4,
    [8, 12, 12],
    partial_rotary_factor=0.5,
)
DINO_TABLES = DINOV3.DINOv3ViTRopePositionEmbedding(
    DINOV3.DINOv3ViTConfig(
        hidden_size=512, num_attention_heads=8, patch_size=16, image_size=64, rope_theta=100.0
    )
).eval()


def qwen2_vl_as_first_published() -> tuple[torch.Tensor, torch.Tensor]:
    """Up to transformers 4, the sections were doubled and cut out of tables that hold both halves."""
    inv_freq = 1.0 / (1e6 ** (torch.arange(0, 128, 2).float() / 128))
    angle = THW[..., None].float() * inv_freq
    angle = torch.cat((angle, angle), -1)
    parts = [part[i % 3] for i, part in enumerate(angle.split([16, 24, 24, 16, 24, 24], dim=-1))]
    whole = torch.cat(parts, -1)
    return whole.cos(), whole.sin()


def llama4_vision() -> tuple[torch.Tensor, torch.Tensor]:
    sizes = {"hidden_size": 352, "num_attention_heads": 4, "image_size": 70, "patch_size": 14}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = LLAMA4.Llama4VisionConfig(**sizes, rope_parameters=rope)
    table = LLAMA4.Llama4VisionRotaryEmbedding(config).freqs_ci.squeeze(1)
    return table.real, table.imag


def vision(name: str, **sizes: int) -> Callable[[], Any]:
    """Return a function that computes a vision tower's tables, at positions [tokens, axes]."""
    module, prefix = code(name), {"qwen2_vl": "Qwen2VL", "pixtral": "Pixtral"}[name]
    config = getattr(module, f"{prefix}VisionConfig")(
        num_heads=8, num_attention_heads=8, **sizes, **AXIAL
    )
    return lambda: getattr(module, f"{prefix}VisionRotaryEmbedding")(config)(TOKEN, THW[1:].T)


class Family(NamedTuple):
    """An assignment, and a function that computes cosines and sines with the model's own code.

    Attributes:
        at: coordinates ``[axes, tokens]``.
        published: returns two tensors ``[tokens, pairs]``, or with each value twice, of at most one row.
    """

    axes: Axes
    base: float
    at: torch.Tensor
    published: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def of_text(name: str, prefix: str, axes: Axes, base: float, *rest: Any, **more: Any) -> Family:
    module = code(name)
    config, kind = (getattr(module, f"{prefix}{part}") for part in ("Config", "RotaryEmbedding"))
    return Family(
        axes, base, THW, lambda: text(config, kind, base, *rest, **more)(TOKEN, THW[:, None])
    )


# Middles of 3 rows and 5 columns, from -1 to 1.
ROW, COLUMN = torch.arange(15).double() // 5, torch.arange(15).double() % 5
DINOV3_AT = 2 * math.pi * torch.stack((2 * (ROW + 0.5) / 3 - 1, 2 * (COLUMN + 0.5) / 5 - 1))
# Rows and columns count from 1; the class token comes last and does not rotate.
CELL = torch.arange(25)
LLAMA4_AT = torch.nn.functional.pad(torch.stack([CELL % 5, CELL // 5]) + 1, (0, 1))
QWEN = Axes.sections((16, 24, 24))
ERNIE = Axes(3, tuple((1 + k % 2 if k < 44 else 0, k, 128) for k in range(64)))
FAMILIES = {
    "Qwen2-VL, first": Family(QWEN, 1e6, THW, qwen2_vl_as_first_published),
    "Qwen2-VL": Family(
        QWEN,
        1e6,
        THW,
        lambda: text(
            QWEN2_VL.Qwen2VLTextConfig, QWEN2_VL.Qwen2VLRotaryEmbedding, 1e6, [16, 24, 24]
        )(TOKEN, THW[:, None]),
    ),
    "Qwen3-VL": of_text(
        "qwen3_vl",
        "Qwen3VLText",
        Axes.sections((24, 20, 20), interleaved=True),
        5e6,
        [24, 20, 20],
        mrope_interleaved=True,
    ),
    "GLM-4.1V": Family(
        Axes.sections((8, 12, 12)), 1e4, THW, lambda: GLM_TABLES(TOKEN, THW[:, None])
    ),
    "ERNIE 4.5 VL": of_text("ernie4_5_vl_moe", "Ernie4_5_VLMoeText", ERNIE, 5e5, [22, 22, 20]),
    "Qwen2-VL vision": Family(
        Axes.blocks((20, 20)), 1e4, THW[1:], vision("qwen2_vl", embed_dim=640)
    ),
    "Pixtral": Family(Axes.strided(2, pairs=32), 1e4, THW[1:], vision("pixtral", hidden_size=512)),
    "DINOv3": Family(
        Axes.blocks((16, 16)), 100.0, DINOV3_AT, lambda: DINO_TABLES(torch.zeros(1, 3, 48, 80))
    ),
    "Llama 4 vision": Family(Axes.blocks((22, 22)), 1e4, LLAMA4_AT, llama4_vision),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_published_cosines_and_sines(name: str) -> None:
    axes, base, at, published = FAMILIES[name]
    angle = torch.stack(
        [at[axis].double() * base ** (-2 * index / dim) for axis, index, dim in axes.pairs], -1
    )
    for found, wanted in zip(published(), (angle.cos(), angle.sin()), strict=True):
        table = found.double().squeeze(0)
        # Tables may hold each value twice, in halves or side by side.
        twice = torch.cat((wanted, wanted), -1), wanted.repeat_interleave(2, -1)
        if table.shape != wanted.shape:
            halves = bool((table[:, : wanted.shape[1]] - wanted).abs().max() < 1e-4)
            wanted = twice[0] if halves else twice[1]
        assert_near(table, wanted, "float32 ways")


def test_glm4v_turns_the_first_half_in_pairs_of_neighbours() -> None:
    q, k = noise(1, 4, 10, 128).float(), noise(1, 2, 10, 128, seed=1).float()
    where = positions.mrope([3, (1, 2, 3), 1])
    spec = RopeSpec(128, rotary_dim=64, interleaved=True, axes=Axes.sections((8, 12, 12)))
    wanted = GLM4V.apply_rotary_pos_emb(q, k, *GLM_TABLES(q, where.ids))
    assert_near(rotate_qk(q, k, spec, where), wanted, "float32 ways")


def test_dinov3_leaves_class_and_register_tokens() -> None:
    q, k = noise(2, 8, 5 + 15, 64).float(), noise(2, 8, 5 + 15, 64, seed=1).float()
    wanted = DINOV3.apply_rotary_pos_emb(q, k, *DINO_TABLES(torch.zeros(1, 3, 48, 80)))
    still = positions.multi_axis(torch.zeros(2, 5))
    patches = positions.grid(3, 5, span=(-2 * math.pi, 2 * math.pi))
    spec = RopeSpec(64, base=100.0, axes=Axes.blocks((16, 16)))
    got = rotate_qk(q, k, spec, positions.concatenate([still, patches]))
    assert_near(got, wanted, "float32 ways")
    assert torch.equal(got[0][:, :, :5], wanted[0][:, :, :5])


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "axes",
    [
        Axes.sections((4, 3, 5)),
        Axes.sections((5, 4, 3), interleaved=True),
        Axes.blocks((6, 4, 2)),
        Axes.strided(3, pairs=12),
    ],
    ids=repr,
)
def test_against_many_digits(axes: Axes, dtype: torch.dtype, backend: str) -> None:
    omegas = [
        [oracle.frequencies(5e5, dim)[index] * (owner == axis) for owner, index, dim in axes.pairs]
        for axis in range(axes.count)
    ]
    far = torch.tensor([[[0, 1, 70_001]], [[1_000_003, 2, 17]], [[5, 131_072, 999_999]]])
    x = noise(2, 2, 3, 30).to(dtype)
    for ids in (far, far.double() + 0.375):
        spec = RopeSpec(30, base=5e5, rotary_dim=24, start=3, axes=axes)
        got = rotate(x, spec, positions.multi_axis(ids), backend=backend)
        exact = oracle.rotate(x, ids.expand(-1, 2, -1), omegas, start=3)
        lengths = oracle.pair_lengths(x, 24, start=3)
        assert_rotated([Result(got, exact, lengths, reach=float(ids.max()))])


# --- the assignments as data ----------------------------------------------------------------------

PROFILE = settings(derandomize=True, database=None, deadline=None)
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@PROFILE
@given(SIZES)
def test_sections_and_blocks_give_every_axis_its_pairs(sizes: list[int]) -> None:
    owners, total = [axis for axis, size in enumerate(sizes) for _ in range(size)], sum(sizes)
    wanted = [(axis, k, 2 * total) for k, axis in enumerate(owners)]
    assert list(Axes.sections(sizes).pairs) == wanted
    assert Axes.sections(sizes).rotary_dim == 2 * total
    # Blocks are small embeddings side by side.
    wanted = [(axis, j, 2 * size) for axis, size in enumerate(sizes) for j in range(size)]
    assert list(Axes.blocks(sizes).pairs) == wanted


@PROFILE
@given(SIZES)
def test_interleaved_sections_follow_the_published_slices(sizes: list[int]) -> None:
    count, total = len(sizes), sum(sizes)
    owner = torch.zeros(total, dtype=torch.int64)
    for axis in range(1, count):
        owner[slice(axis, sizes[axis] * count, count)] = axis
    if any(int((owner == axis).sum()) != size for axis, size in enumerate(sizes)):
        with pytest.raises(ValueError, match=r"sizes must fit pairs 0 to \d+ when interleaved"):
            Axes.sections(sizes, interleaved=True)
        return
    wanted = [(axis, k, 2 * total) for k, axis in enumerate(owner.tolist())]
    assert list(Axes.sections(sizes, interleaved=True).pairs) == wanted


@PROFILE
@given(st.integers(1, 5), st.integers(0, 9))
def test_strides_use_every_frequency_once(count: int, each: int) -> None:
    total = count * each
    wanted = [(axis, k, 2 * total) for axis in range(count) for k in range(axis, total, count)]
    assert list(Axes.strided(count, total).pairs) == wanted


PAIRS = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(4, 6).map(lambda n: 2 * n))
ANY = st.one_of(
    SIZES.map(Axes.sections),
    SIZES.map(Axes.blocks),
    st.builds(lambda n, m: Axes.strided(n, n * m), st.integers(1, 3), st.integers(0, 4)),
    st.lists(PAIRS, max_size=6).map(lambda pairs: Axes(3, tuple(pairs))),
)


@PROFILE
@given(ANY)
def test_the_repr_and_lists_make_an_equal_value(axes: Axes) -> None:
    assert eval(repr(axes), {"Axes": Axes}) == axes
    assert Axes(axes.count, [list(pair) for pair in axes.pairs]) == axes  # type: ignore[arg-type,misc]


def test_the_repr_is_the_shortest_call() -> None:
    for text in (
        "Axes.sections((16, 24, 24))",
        "Axes.sections((24, 20, 20), interleaved=True)",
        "Axes.blocks((22, 21, 21))",
        "Axes.strided(2, pairs=32)",
        "Axes(count=2, pairs=((1, 0, 4), (0, 0, 4)))",
    ):
        assert repr(eval(text)) == text
    assert Axes.sections((8,)) == Axes.blocks((8,)) == Axes.strided(1, 8)
