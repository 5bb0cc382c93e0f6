"""M-RoPE positions of a batch, from what trainers and servers hold: token types, grids, masks, lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._errors import bad_type, bad_value, check_dense, check_local, describe, public
from .._tracing import is_readable
from ._canonical import Positions, count, number
from ._line import check_cu_seqlens
from ._space import Segment, placed


class _Videos(NamedTuple):
    """What a family does with the frames of a video.

    Attributes:
        apart: each frame is an image of its own, as text with its time stands before it.
        merge: number of frames that become one cell in time.
        timed: frames are as far apart in position as in time: a step must be given.
    """

    apart: bool = False
    merge: int = 1
    timed: bool = False


_APART = _Videos(apart=True)
#: The names are those of ``model_type`` in the configurations of transformers.
_FAMILIES = {
    "qwen2_vl": _Videos(),
    "qwen2_5_vl": _Videos(timed=True),
    "qwen3_vl": _APART,
    "qwen3_vl_moe": _APART,
    "qwen3_5": _APART,
    "qwen3_5_moe": _APART,
    "glm4v": _APART,
    "glm4v_moe": _APART,
    "glm46v": _APART,
    "glm_ocr": _APART,
    "paddleocr_vl": _Videos(),
    "ernie4_5_vl_moe": _Videos(merge=2),
}


class MRope(NamedTuple):
    """Positions of a batch, and where each row goes on; the result of :func:`mrope_batch`.

    Attributes:
        positions: of all tokens, ids ``[3, rows, tokens]``.
        next: int64 ``(rows,)``, or ``(sequences,)`` with ``cu_seqlens``: the position, on all axes, of the next
            token. It is one past the largest coordinate, not the number of tokens.
    """

    positions: Positions
    next: torch.Tensor


@public("mrope_batch")
def mrope_batch(  # noqa: PLR0913  (what processors return)
    token_types: torch.Tensor,
    *,
    model: str,
    images: torch.Tensor | Sequence[Sequence[int]] | None = None,
    videos: torch.Tensor | Sequence[Sequence[int]] | None = None,
    merge: int = 2,
    time_step: float | Sequence[float] | torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    next_from: str = "all",
) -> MRope:
    """Return M-RoPE positions of a batch of text, images and videos, as the code of a model family numbers them.

    For a data collator, or a server before its first step: it reads values, so tensors must be on the CPU.
    Padding is at 0 on all axes. Each sequence begins at 0, also in packed rows.

    Args:
        token_types: integers ``(rows, tokens)`` or ``(tokens,)``: 0 for text, 1 for a token of an image, 2 for one
            of a video. Processors of transformers call them ``mm_token_type_ids``. From token ids they are
            ``(ids == image_token) + 2 * (ids == video_token)``. GLM marks its videos with the token of images, so there
            take those of the processor.
        model: the family, by its ``model_type`` in transformers, such as ``"qwen2_5_vl"``.
        images, videos: integers ``(number, 3)``: time, height and width in patches, before merging, in the order of
            the tokens. Processors call them ``image_grid_thw`` and ``video_grid_thw``.
        merge: number of patches that become one token, along height and along width (``spatial_merge_size``).
        time_step: for videos of Qwen2.5-VL, positions from one cell in time to the next: ``tokens_per_second`` of the
            configuration times ``second_per_grid_ts`` of the processor. One number, or one for each video.
        attention_mask: ``(rows, tokens)``: 0 or false for padding, on either side. Packed rows number their
            sequences: 1, 2, … for the tokens of each.
        cu_seqlens: int32 or int64 ``(sequences + 1,)``, instead of a mask: the packed sequences of a single row.
        next_from: "all", or "space" as in transformers 5: see :func:`mrope`. They differ for videos of Qwen2-VL,
            Qwen2.5-VL and ERNIE with more frames than rows and columns.

    Returns:
        The positions, and the position at which each row continues: rotate the tokens that are generated at
        ``positions.text(positions.per_row(next + step), axes=3)``. ``rope_deltas`` of transformers is ``next`` minus
        the number of real tokens.

    Raises:
        ValueError: an unknown family; grids that do not account for the tokens; a mask or lengths that do not fit.
        TypeError: arguments of another type.

    Source: ``get_rope_index`` of each family in transformers; Qwen2-VL (arXiv 2409.12191), section 2.1; Qwen2.5-VL
    (arXiv 2502.13923); Qwen3-VL (arXiv 2511.21631).

    >>> types = torch.tensor([[0, 0, 1, 1, 1, 1, 0]])  # two text tokens, an image, a text token
    >>> where, after = mrope_batch(types, model="qwen2_vl", images=[(1, 4, 4)])
    >>> where.ids[:, 0].tolist()
    [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    >>> after
    tensor([5])
    """
    if not isinstance(model, str) or model not in _FAMILIES:
        raise bad_value(f"model must be one of {', '.join(_FAMILIES)} but got {model!r}")
    videos_of = _FAMILIES[model]
    types = whole("token_types", token_types)
    if types.numel() and not 0 <= int(types.min()) <= int(types.max()) <= 2:
        raise bad_value("token_types must be 0 (text), 1 (image) or 2 (video)", token_types=types)
    grids: dict[int, Iterator[_Grid]] = {
        1: iter(_grids("images", images, (1, merge))),
        2: iter(_videos(videos, merge, videos_of, time_step)),
    }
    ids = types.new_zeros(3, *types.shape)
    ends: list[list[int]] = []
    for row, sequences in enumerate(parts(types, attention_mask, cu_seqlens)):
        ends.append([])
        for tokens in sequences:
            ids[:, row, tokens], end = placed(
                _segments(types[row, tokens], grids), next_from, device=types.device
            )
            ends[row].append(end)
    for name, rest in (("images", grids[1]), ("videos", grids[2])):
        if left := len(list(rest)):
            raise bad_value(
                f"{name} must have tokens in token_types, but the last {left} have none"
            )
    after = ends[0] if cu_seqlens is not None else [end[-1] if end else 0 for end in ends]
    packed = any(len(end) > 1 for end in ends)
    return MRope(Positions(ids, add_index=False, packed=packed), types.new_tensor(after))


def parts(
    ids: torch.Tensor, attention_mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> list[list[torch.Tensor]]:
    """Return, for each row of ``ids`` ``(…, rows, tokens)``, the indices of the tokens of each of its sequences."""
    rows, total = ids.shape[-2:]
    if cu_seqlens is not None:
        if attention_mask is not None or rows != 1:
            raise bad_value(
                "cu_seqlens must come with a single row and without attention_mask", ids=ids
            )
        check_cu_seqlens(cu_seqlens, total)
        if not is_readable(cu_seqlens):
            raise bad_value(
                "cu_seqlens must be on the CPU, outside of compiled code", cu_seqlens=cu_seqlens
            )
        return [list(torch.arange(total, device=ids.device).split(cu_seqlens.diff().tolist()))]
    if attention_mask is None:
        return [[torch.arange(total, device=ids.device)] for _ in range(rows)]
    mask = whole("attention_mask", attention_mask)
    if mask.shape != ids.shape[-2:]:
        raise bad_value(
            "attention_mask must have one entry for each token", attention_mask=mask, ids=ids
        )
    numbers = [[each for each, _ in itertools.groupby(filter(None, row))] for row in mask.tolist()]
    for row, found in enumerate(numbers):
        # Grids are in the order of the tokens, so sequences must be, too.
        if len({*found}) < len(found):
            raise bad_value(
                f"attention_mask must give each sequence of a row its own number but has {found} in row {row}"
            )
    return [
        [(mask[row] == each).nonzero()[:, 0] for each in found] for row, found in enumerate(numbers)
    ]


def whole(name: str, values: object) -> torch.Tensor:
    """Return integers or bools ``(rows, tokens)`` or ``(tokens,)`` as int64 with rows."""
    if not isinstance(values, torch.Tensor) or values.is_floating_point() or values.is_complex():
        raise bad_type(f"{name} must be a tensor of integers but got {describe(values)}")
    check_dense(name, values)
    check_local(name, values)
    if values.dim() not in (1, 2):
        raise bad_value(f"{name} must have shape (rows, tokens) or (tokens,)", **{name: values})
    if not is_readable(values):
        raise bad_value(f"{name} must be on the CPU, outside of compiled code", **{name: values})
    return values.to(torch.int64)[(None,) * (2 - values.dim())]


_Grid: TypeAlias = "tuple[int, int, int] | tuple[int, int, int, float]"


def _grids(name: str, sizes: Any, merge: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return the sizes of grids in cells: after merging patches, in time, and in height and width."""
    if sizes is None:
        return []
    time, space = (count("merge", each, least=1) for each in merge)
    sizes, merged = _listed(name, sizes), []
    if not isinstance(sizes, Iterable):
        raise bad_type(f"{name} must be a tensor (number, 3) or a sequence but got {sizes!r}")
    for row in (_listed(name, row) for row in sizes):
        if not isinstance(row, (tuple, list)) or len(row) != 3:
            raise bad_value(f"{name} must have rows (time, height, width) but got {row!r}")
        patches = [count(f"a size of {name}", _listed(name, size)) for size in row]
        if min(patches) < 1 or any(
            size % by for size, by in zip(patches, (time, space, space), strict=True)
        ):
            raise bad_value(
                f"sizes of {name} must be positive multiples of {time} in time and of {space}, merge, in height "
                f"and width, but got {tuple(patches)}; merge=1 is for sizes after merging"
            )
        merged.append((patches[0] // time, patches[1] // space, patches[2] // space))
    return merged


def _listed(name: str, values: Any) -> Any:
    """Return a tensor, or an array of NumPy, as lists and numbers, and anything else as it is."""
    if isinstance(values, torch.Tensor) and not is_readable(values):
        raise bad_value(f"{name} must be on the CPU, outside of compiled code", **{name: values})
    return values.tolist() if hasattr(values, "tolist") else values


def _videos(sizes: Any, merge: int, family: _Videos, time_step: Any) -> list[_Grid]:
    grids = _grids("videos", sizes, (family.merge, merge))
    if family.timed != (time_step is not None) and (grids or time_step is not None):
        raise bad_value(
            "time_step must be given for videos of qwen2_5_vl, and only for these; it is tokens_per_second of the "
            "configuration times second_per_grid_ts of the processor"
        )
    if family.apart:
        return [(1, height, width) for time, height, width in grids for _ in range(time)]
    if time_step is None:
        return list(grids)
    given = _listed("time_step", time_step)
    steps = given if isinstance(given, (tuple, list)) else [given] * len(grids)
    if len(steps) != len(grids):
        raise bad_value(
            f"time_step must be one number, or one for each of {len(grids)} videos, but got {len(steps)}"
        )
    return [
        (*grid, float(number("time_step", _listed("time_step", step))))
        for grid, step in zip(grids, steps, strict=True)
    ]


def _segments(types: torch.Tensor, grids: dict[int, Iterator[_Grid]]) -> Iterator[Segment]:
    """Yield the segments of one sequence, and take its images and videos from ``grids``."""
    kinds, counts = torch.unique_consecutive(types, return_counts=True)
    for kind, tokens in zip(kinds.tolist(), counts.tolist(), strict=True):
        if kind == 0:
            yield tokens
            continue
        left, name = tokens, ("images", "videos")[kind - 1]
        while left:
            grid = next(grids[kind], None)
            if grid is None:
                raise bad_value(
                    f"{name} must have a row for each one in token_types but these have more"
                )
            cells = math.prod(grid[:3])
            if cells > left:
                raise bad_value(
                    f"{name} must be in the order of their tokens, but one of {cells} cells after merging, "
                    f"{grid[:3]}, meets {left} tokens"
                )
            yield grid
            left -= cells
