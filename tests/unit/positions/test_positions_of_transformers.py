"""M-RoPE positions, compared with those that transformers 5.23 computes."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from tightrope.positions import Positions, mrope, mrope_next

PROFILE = settings(derandomize=True, database=None, deadline=None)
MERGE = 2
TOKENS_PER_SECOND = 2


def ids_of(where: Positions) -> torch.Tensor:
    assert (where.offset, where.add_index) == (0, False)
    return where.ids


def count_of(row: list[Any]) -> int:
    return len(ids_of(mrope(row))[0, 0])


def published(
    model: Any, row: list[Any], frames: int | None = None, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the `get_rope_index` of a model on a row of segments; return positions and the delta.

    Args:
        frames: the number of frames that are the segments of one video; None for videos of one segment.
    """
    kinds, images, videos = [], [], []
    for segment in row:
        if isinstance(segment, int):
            kinds += [0] * segment
            continue
        t, h, w = segment[:3]
        is_video = t > 1 or len(segment) > 3 or frames is not None
        (videos if is_video else images).append([frames or t, h * MERGE, w * MERGE])
        kinds += [2 if is_video else 1] * (t * h * w)
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=TOKENS_PER_SECOND)
    # What the method uses of a model: the configuration and one other method.
    own = {"get_vision_position_ids": model.get_vision_position_ids}
    stub = type("Stub", (), {**own, "config": SimpleNamespace(vision_config=vision)})()
    found = [
        torch.tensor(each) if each else None for each in (images, videos[:1] if frames else videos)
    ]
    result: tuple[torch.Tensor, torch.Tensor] = model.get_rope_index(
        stub, *[torch.tensor([kinds])] * 2, *found, attention_mask=None, **more
    )
    return result


def assert_published(row: list[Any], wanted: Any, next_from: str = "space") -> None:
    """Assert the positions of a row of segments, and where the next token goes."""
    positions, delta = wanted
    assert torch.equal(ids_of(mrope(row, next_from=next_from)), positions)
    assert mrope_next(row, next_from=next_from) - count_of(row) == delta.item()


SPACE = st.tuples(st.integers(1, 4), st.integers(1, 4))
IMAGE = SPACE.map(lambda space: (1, *space))
# Videos no longer in time than in space; for longer ones the two values of next_from differ.
SHORT = st.tuples(st.integers(2, 4), st.integers(4, 5), st.integers(1, 5))
LONG = st.tuples(st.integers(5, 9), st.integers(1, 3), st.integers(1, 3))


def rows_of(*vision: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Generate rows of the form text, vision, text, vision, …, text."""
    parts = st.lists(st.tuples(st.integers(1, 5), st.one_of(*vision)), max_size=3)
    return st.builds(lambda pairs, last: [*sum(pairs, ()), last], parts, st.integers(1, 5))


@PROFILE
@given(rows_of(IMAGE, SHORT), rows_of(IMAGE, LONG))
def test_qwen2_vl(row: list[Any], with_long_videos: list[Any]) -> None:
    for next_from in ("all", "space"):
        assert_published(row, published(Qwen2VLModel, row), next_from)
    assert_published(with_long_videos, published(Qwen2VLModel, with_long_videos))


def test_what_follows_a_long_video() -> None:
    # In the paper and the models' own code (transformers up to version 4, with this very example in
    # its documentation), the text starts one past the largest position of the video, 100. In version
    # 5 it starts after the video's height and width, within its time range.
    row = [(3, 2, 2, 50), 5]
    assert ids_of(mrope(row))[:, 0, 12:].tolist() == [[101, 102, 103, 104, 105]] * 3
    wanted = published(Qwen2_5_VLModel, row, second_per_grid_ts=[25.0])
    assert wanted[0][:, 0, 12:].tolist() == [[2, 3, 4, 5, 6]] * 3
    assert_published(row, wanted)


@PROFILE
@given(rows_of(IMAGE, SHORT, LONG), st.sampled_from([0.25, 0.5, 1.0, 0.29, 1 / 3, 25.0]))
def test_qwen2_5_vl_time_steps(row: list[Any], seconds: float) -> None:
    # An image keeps its step of 1; all videos here have the same step.
    step = TOKENS_PER_SECOND * seconds
    timed = [(*s, step) if isinstance(s, tuple) and s[0] > 1 else s for s in row]
    wanted = published(Qwen2_5_VLModel, timed, second_per_grid_ts=[seconds] * len(row))
    assert_published(timed, wanted)


def test_qwen3_vl_frames_among_text() -> None:
    # A video of three frames is given as three images, each after its time stamp as text.
    row = [4, (1, 2, 3), 2, (1, 2, 3), 2, (1, 2, 3), 1]
    assert_published(row, published(Qwen3VLModel, row, frames=3), "all")
