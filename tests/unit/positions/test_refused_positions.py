"""The errors for invalid positions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, positions
from tightrope.axes import Axes
from tightrope.functional import rotate

ENDS = torch.tensor([0, 3, 5])
X, Q = torch.ones(2, 5, 8), torch.ones(2, 6, 5, 8)
ONE, TWO = RopeSpec(8), RopeSpec(8, axes=Axes.blocks((2, 2)))
THREE = RopeSpec(12, axes=Axes.blocks((2, 2, 2)))
DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.int16, torch.uint8, torch.complex64]
HEADS = positions.per_head(torch.zeros(2, 3, 5))


def at(spec: RopeSpec, *where: Any) -> Callable[[], object]:
    return partial(spec.at, *where)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def turn(x: torch.Tensor, *rope: Any, by: Callable[..., object] = rotate) -> Callable[[], object]:
    return partial(by, x, *rope, layout={4: "bhsd", 3: "bsd"}[x.dim()])


MAKERS = {name: getattr(positions, name) for name in positions.__all__}
test_makers = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), MAKERS, globals())


def test_padding_at_either_end_makes_rows_equally_long() -> None:
    pad, grid, join = positions.multi_axis(ids(2, 2)), positions.grid, positions.concatenate
    for parts in ([grid(2, 2), pad], [pad, grid(2, 2)]):
        both = join([join(parts), grid(2, 3)], along="rows")
        assert both.ids is not None
        assert both.ids.shape == (2, 2, 6)
        assert both.ids.dtype == torch.int64
