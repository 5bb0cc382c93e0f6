"""M-RoPE positions of batches, compared with those that each family's model in transformers computes."""

import importlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tightrope import positions
from tightrope.positions import MRope, Positions, mrope, mrope_batch

TOGETHER = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "paddleocr_vl": "PaddleOCRVLModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeModel",
}
APART = {
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
    "glm4v": "Glm4vModel",
    "glm4v_moe": "Glm4vMoeModel",
    "glm46v": "Glm46VModel",
    "glm_ocr": "GlmOcrModel",
}
MODELS = TOGETHER | APART
TOKENS_PER_SECOND = 2


class Batch(NamedTuple):
    """A batch of sequences: the types of their tokens, and the grids of images and videos in patches."""

    sequences: list[list[int]]
    images: list[list[int]]
    videos: list[list[int]]
    seconds: list[float]


def drawn(model: str, draw: random.Random, merge: int) -> Batch:
    """Draw sequences of text, images and videos, as the processor of a family lays them out."""
    batch = Batch([], [], [], [])
    for _ in range(draw.randint(1, 4)):
        kinds = [0] * draw.randint(1, 4)
        for _ in range(draw.randint(0, 4)):
            height, width = draw.randint(1, 4), draw.randint(1, 4)
            frames = draw.choice((0, 1, 2, 3, 9)) * (2 if model.startswith("ernie") else 1)
            of = batch.videos if frames else batch.images
            of.append([frames or 1, height * merge, width * merge])
            cells = height * width
            if not frames:
                kinds += [1] * cells
            elif model in APART:
                for _ in range(frames):
                    kinds += [2] * cells + [0] * draw.randint(1, 3)
            else:
                kinds += [2] * (cells * (frames // 2 if model.startswith("ernie") else frames))
            if frames:
                batch.seconds.append(draw.choice((0.25, 0.5, 1.0, 0.29, 1 / 3, 25.0)))
            kinds += [0] * draw.randint(1, 4)
        batch.sequences.append(kinds)
    return batch


def published(
    model: str, types: torch.Tensor, mask: torch.Tensor | None, batch: Batch, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `get_rope_index` of a model; return positions and, for each row, what it adds to counts of tokens."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    kind = getattr(module, MODELS[model])
    vision = SimpleNamespace(
        spatial_merge_size=merge, tokens_per_second=TOKENS_PER_SECOND, temporal_merge_size=2
    )
    # What the method uses of a model: the configuration and one other method.
    own = {"get_vision_position_ids": kind.get_vision_position_ids}
    stub = type("Stub", (), {**own, "config": SimpleNamespace(vision_config=vision)})()
    found = [torch.tensor(each) if each else None for each in (batch.images, batch.videos)]
    more = {"second_per_grid_ts": batch.seconds} if model == "qwen2_5_vl" else {}
    result: tuple[torch.Tensor, torch.Tensor] = kind.get_rope_index(
        stub, types, types, *found, attention_mask=mask, **more
    )
    return result


def ours(model: str, types: torch.Tensor, batch: Batch, merge: int, **more: Any) -> MRope:
    if model == "qwen2_5_vl" and batch.videos:
        more["time_step"] = [TOKENS_PER_SECOND * each for each in batch.seconds]
    return mrope_batch(
        *(types,),
        model=model,
        images=batch.images or None,
        videos=torch.tensor(batch.videos) if batch.videos else None,
        merge=merge,
        next_from="space",
        **more,
    )


def padded(rows: Sequence[Sequence[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    fill = [[0] * (longest - len(row)) for row in rows]
    types = [
        [*f, *row] if side == "left" else [*row, *f] for f, row in zip(fill, rows, strict=True)
    ]
    ones = [[1] * len(row) for row in rows]
    mask = [[*f, *row] if side == "left" else [*row, *f] for f, row in zip(fill, ones, strict=True)]
    return torch.tensor(types), torch.tensor(mask)


def assert_published(model: str, number: int) -> None:
    draw = random.Random(f"{model} {number}")
    merge = draw.choice((1, 2, 3))
    batch = drawn(model, draw, merge)
    types, mask = padded(batch.sequences, draw.choice(("left", "right")))
    ids, deltas = published(model, types, mask, batch, merge)
    made = ours(model, types, batch, merge, attention_mask=mask)
    assert torch.equal(made.positions.ids, ids)
    assert torch.equal(made.next, deltas[:, 0] + mask.sum(-1))
    # Packed sequences have the positions that they have as rows.
    lengths = mask.sum(-1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    row = types[mask.bool()]
    packed = ours(model, row, batch, merge, cu_seqlens=cu_seqlens)
    assert torch.equal(packed.positions.ids[:, 0], ids[:, mask.bool()])
    assert torch.equal(packed.next, made.next)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)) + 1, lengths)
    numbered = ours(model, row[None], batch, merge, attention_mask=numbers[None])
    assert torch.equal(numbered.positions.ids, packed.positions.ids)
    assert numbered.next.tolist() == made.next[-1:].tolist()
    # Nothing looks wrong about them.
    for where, by in ((made, {"attention_mask": mask}), (packed, {"cu_seqlens": cu_seqlens})):
        of_type = types if "attention_mask" in by else row
        report = positions.check(where.positions, token_types=of_type, **by)
        assert report.ok, report


@pytest.mark.parametrize("model", MODELS)
def test_batches(model: str) -> None:
    for number in range(25):
        assert_published(model, number)


@pytest.mark.slow
@pytest.mark.parametrize("model", [*TOGETHER, "qwen3_vl", "glm4v"])
def test_many_batches(model: str) -> None:
    """The other families have the code of Qwen3-VL and GLM-4V."""
    for number in range(25, 425):
        assert_published(model, number)


def ids_of(where: Positions) -> torch.Tensor:
    assert (where.offset, where.add_index) == (0, False)
    return where.ids


def test_what_follows_a_long_video() -> None:
    # In the paper and the models' own code (transformers up to version 4, with this very example in
    # its documentation), the text starts one past the largest position of the video, 100. In version
    # 5 it starts after the video's height and width, within its time range.
    types = torch.tensor([[2] * 12 + [0] * 5])
    batch = Batch([], [], [[3, 4, 4]], [25.0])
    made = mrope_batch(types, model="qwen2_5_vl", videos=batch.videos, time_step=50.0)
    assert made.positions.ids[:, 0, 12:].tolist() == [[101, 102, 103, 104, 105]] * 3
    assert made.next.tolist() == [106]
    wanted = published("qwen2_5_vl", types, None, batch, 2)
    assert wanted[0][:, 0, 12:].tolist() == [[2, 3, 4, 5, 6]] * 3
    assert torch.equal(ours("qwen2_5_vl", types, batch, 2).positions.ids, wanted[0])


def test_images_next_to_each_other() -> None:
    types = torch.tensor([0, 1, 1, 1, 1, 1, 0])
    made = mrope_batch(types, model="qwen3_vl", images=[(1, 2, 4), (1, 2, 6)])
    assert torch.equal(made.positions.ids, ids_of(mrope([1, (1, 1, 2), (1, 1, 3), 1])))


def test_sequences_without_tokens() -> None:
    types = torch.zeros(3, dtype=torch.int64)
    made = mrope_batch(types, model="qwen2_vl", cu_seqlens=torch.tensor([0, 0, 2, 2, 3, 3]))
    assert made.positions.ids[0].tolist() == [[0, 1, 0]]
    assert made.next.tolist() == [0, 2, 0, 1, 0]
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    made = mrope_batch(types.expand(2, -1), model="qwen2_vl", attention_mask=nothing)
    assert (made.positions.ids.tolist(), made.next.tolist()) == ([[[0] * 3] * 2] * 3, [0, 0])


def test_grids_and_steps_of_any_kind() -> None:
    types = torch.tensor([0, 1, 1, 2, 2, 2, 2, 0])
    made = []
    for kind in (list, torch.tensor, np.array):
        grids = {"images": kind([[1, 2, 4]]), "videos": [kind([2, 2, 4])]}
        made.append(mrope_batch(types, model="qwen2_5_vl", time_step=[kind([2.0])[0]], **grids))
    assert all(torch.equal(each.positions.ids, made[0].positions.ids) for each in made)


def test_no_rows() -> None:
    made = mrope_batch(torch.zeros(0, 5, dtype=torch.int64), model="qwen2_vl")
    assert made.positions.ids.shape == (3, 0, 5)
    assert made.next.dtype == torch.int64
    made = mrope_batch(torch.zeros(2, 0, dtype=torch.int64), model="qwen2_vl")
    assert made.next.tolist() == [0, 0]
