"""M-RoPE, vision and padded positions, compared with those that transformers 5.23 computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.generation.utils import GenerationMixin
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_position_ids

from tightrope.positions import (
    Positions,
    concatenate,
    grid,
    left_padded,
    mrope,
    mrope_next,
    multi_axis,
)

PROFILE = settings(derandomize=True, database=None, deadline=None)
MERGE = 2
TOKENS_PER_SECOND = 2


def ids_of(where: Positions) -> torch.Tensor:
    assert (where.offset, where.add_index) == (0, False)
    return where.ids


def stub_of(model: Any) -> Any:
    """Return an object with what `get_rope_index` uses: the configuration and one other method."""
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=TOKENS_PER_SECOND)
    methods = {"get_vision_position_ids": model.get_vision_position_ids}
    return type("Stub", (), {**methods, "config": SimpleNamespace(vision_config=vision)})()


def published(
    model: Any, rows: list[list[Any]], mask: torch.Tensor | None = None, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the `get_rope_index` of a model on rows of segments; return its positions and deltas."""
    kinds, images, videos = [], [], []
    for row in rows:
        line: list[int] = []
        for segment in row:
            if isinstance(segment, int):
                line += [0] * segment
                continue
            t, h, w = segment[:3]
            is_video = t > 1 or len(segment) > 3
            (videos if is_video else images).append([t, h * MERGE, w * MERGE])
            line += [2 if is_video else 1] * (t * h * w)
        kinds.append(line)
    width = max(map(len, kinds)) if mask is None else mask.shape[1]
    padded = torch.tensor([[0] * (width - len(line)) + line for line in kinds])
    positions, deltas = model.get_rope_index(
        stub_of(model),
        padded,
        padded,
        torch.tensor(images) if images else None,
        torch.tensor(videos) if videos else None,
        attention_mask=mask,
        **more,
    )
    return positions, deltas


TEXT = st.integers(1, 5)
SPACE = st.tuples(st.integers(1, 4), st.integers(1, 4))
IMAGE = SPACE.map(lambda space: (1, *space))
# Videos no longer in time than in space; for longer ones the two values of next_from differ.
SHORT = st.tuples(st.integers(2, 4), st.integers(4, 5), st.integers(1, 5))
LONG = st.tuples(st.integers(5, 9), st.integers(1, 3), st.integers(1, 3))


def rows_of(vision: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Generate rows of the form text, vision, text, vision, …, text."""
    parts = st.lists(st.tuples(TEXT, vision), max_size=3)
    return st.builds(lambda pairs, last: [x for pair in pairs for x in pair] + [last], parts, TEXT)


def count_of(row: list[Any]) -> int:
    return len(ids_of(mrope(row))[0, 0])


@PROFILE
@given(rows_of(st.one_of(IMAGE, SHORT)))
def test_qwen2_vl(row: list[Any]) -> None:
    wanted, delta = published(Qwen2VLModel, [row])
    for next_from in ("all", "space"):
        assert torch.equal(ids_of(mrope(row, next_from=next_from)), wanted)
        assert mrope_next(row, next_from=next_from) - count_of(row) == delta.item()


@PROFILE
@given(rows_of(st.one_of(IMAGE, LONG)))
def test_long_videos_like_transformers_5(row: list[Any]) -> None:
    wanted, delta = published(Qwen2VLModel, [row])
    assert torch.equal(ids_of(mrope(row, next_from="space")), wanted)
    assert mrope_next(row, next_from="space") - count_of(row) == delta.item()


def test_what_follows_a_long_video() -> None:
    # In the paper and the models' own code (transformers up to version 4, with this very example in
    # its documentation), the text starts one past the largest position of the video, 100. In version
    # 5 it starts after the video's height and width, within its time range.
    row = [(3, 2, 2, 50), 5]
    text = ids_of(mrope(row))[:, 0, 12:]
    assert text.tolist() == [[101, 102, 103, 104, 105]] * 3
    wanted, _ = published(Qwen2_5_VLModel, [row], second_per_grid_ts=[25.0])
    assert wanted[:, 0, 12:].tolist() == [[2, 3, 4, 5, 6]] * 3
    assert torch.equal(ids_of(mrope(row, next_from="space")), wanted)


@PROFILE
@given(rows_of(st.one_of(IMAGE, SHORT, LONG)), st.sampled_from([0.25, 0.5, 1.0, 0.29, 1 / 3, 25.0]))
def test_qwen2_5_vl_time_steps(row: list[Any], seconds: float) -> None:
    # An image keeps its step of 1; all videos here have the same step.
    step = TOKENS_PER_SECOND * seconds
    timed = [(*s, step) if isinstance(s, tuple) and s[0] > 1 else s for s in row]
    wanted, delta = published(Qwen2_5_VLModel, [timed], second_per_grid_ts=[seconds] * len(row))
    assert torch.equal(ids_of(mrope(timed, next_from="space")), wanted)
    assert mrope_next(timed, next_from="space") - count_of(row) == delta.item()


def test_qwen3_vl_frames_among_text() -> None:
    # A video of three frames is given as three images, each after its time stamp as text.
    row = [4, (1, 2, 3), 2, (1, 2, 3), 2, (1, 2, 3), 1]
    wanted, delta = published_frames(row, frames=3)
    assert torch.equal(ids_of(mrope(row)), wanted)
    assert mrope_next(row) - count_of(row) == delta.item()


def published_frames(row: list[Any], frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    kinds = [k for s in row for k in ([0] * s if isinstance(s, int) else [2] * (s[1] * s[2]))]
    one = next(s for s in row if not isinstance(s, int))
    video = torch.tensor([[frames, one[1] * MERGE, one[2] * MERGE]])
    result: tuple[torch.Tensor, torch.Tensor] = Qwen3VLModel.get_rope_index(
        stub_of(Qwen3VLModel), torch.tensor([kinds]), torch.tensor([kinds]), None, video
    )
    return result


def test_a_left_padded_batch() -> None:
    rows: list[list[Any]] = [[2, (1, 2, 2), 1], [3]]
    lengths = [count_of(row) for row in rows]
    total = max(lengths)
    mask = torch.tensor([[0] * (total - n) + [1] * n for n in lengths])
    wanted, deltas = published(Qwen2VLModel, rows, mask)
    padded = [
        concatenate([multi_axis(torch.zeros(3, total - n, dtype=torch.int64)), mrope(row)])
        for row, n in zip(rows, lengths, strict=True)
    ]
    assert torch.equal(ids_of(concatenate(padded, along="rows")), wanted)
    nexts = [mrope_next(row) - n for row, n in zip(rows, lengths, strict=True)]
    assert deltas.flatten().tolist() == nexts


@PROFILE
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3
    ),
    st.integers(1, 3),
    st.booleans(),
)
def test_merged_vision_positions(
    sizes: list[tuple[int, int, int]], merge: int, with_time: bool
) -> None:
    thw = torch.tensor([[t, h * merge, w * merge] for t, h, w in sizes])
    wanted = get_vision_position_ids(thw, merge, include_temporal=with_time)
    parts = []
    for t, h, w in thw.tolist():
        if with_time:
            parts.append(grid(t, h, w, merge=(1, merge, merge)))
        else:
            parts += [grid(h, w, merge=merge)] * t
    assert torch.equal(ids_of(concatenate(parts))[:, 0].T, wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_padding_like_generation(dtype: torch.dtype) -> None:
    masks = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0]])
    masks = masks.to(dtype)
    stub = SimpleNamespace()
    wanted = GenerationMixin._prepare_position_ids_for_generation(
        stub, torch.zeros(4, 5), {"attention_mask": masks}
    )
    assert torch.equal(ids_of(left_padded(masks))[0], wanted)
