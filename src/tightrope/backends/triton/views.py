"""Views of tensors for the kernels: sizes and strides of rows, heads, tokens and channels; alignment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...ops.layouts import Layout
from .groups import Steps

#: Bytes per load or store of a thread.
ACCESS = 16


class View(NamedTuple):
    """A tensor as [rows, heads, tokens, channels].

    The stride of a dimension of size 1 is 0, but that of a single channel is 1.

    Attributes:
        rows, heads, tokens, channels: sizes.
        row, head, token, channel: strides, in elements.
    """

    rows: int
    heads: int
    tokens: int
    channels: int
    row: int
    head: int
    token: int
    channel: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """All four sizes."""
        return self[0], self[1], self[2], self[3]

    @property
    def steps(self) -> Steps:
        """The strides, for a kernel."""
        return steps_of(self[4:])


def steps_of(strides: tuple[int, ...]) -> Steps:
    """Return the strides of rows, heads, tokens and channels for a kernel."""
    row, head, token, channel = strides
    return Steps(row, head, token, None if channel == 1 else channel)


def view_of(x: torch.Tensor, layout: Layout) -> View:
    """Return the view of a tensor in a layout."""
    shape, strides = x.shape, x.stride()

    def of(dim: int | None) -> tuple[int, int]:
        if dim is None:
            return 1, 0
        return shape[dim], strides[dim] if shape[dim] != 1 else 0

    (rows, row), (heads, head), (tokens, token) = of(layout.row), of(layout.head), of(layout.token)
    channel = strides[-1] if shape[-1] != 1 else 1
    return View(rows, heads, tokens, shape[-1], row, head, token, channel)


def is_aligned(views: Iterable[View], element: int) -> bool:
    """Return whether every head begins at a multiple of 16 bytes if its tensor does."""
    unit = ACCESS // element
    return all(
        view.channel == 1 and not (view.row % unit or view.head % unit or view.token % unit)
        for view in views
    )


#: No tensor of a freed storage, which begins at address 0, lies further behind it.
NEAR = 1 << 40


def address(x: torch.Tensor) -> int:
    """Return the address of a tensor, 0 on the meta device; refuse one whose storage was freed."""
    at = x.data_ptr()
    if at < NEAR and at == x.storage_offset() * x.element_size() and x.numel() and not x.is_meta:
        raise RuntimeError(
            "tightrope: tensors must have their memory, but the storage of one is empty (freed by a "
            "wrapper of the model?)"
        )
    return at


def starts_aligned(x: torch.Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 16 bytes."""
    return x.data_ptr() % ACCESS == 0


def vector_of(xs: Iterable[torch.Tensor], strides: Iterable[tuple[int, ...]]) -> int:
    """Return the number of elements of a 16-byte access, or 0 if a tensor does not allow such accesses.

    Args:
        xs: tensors of one element size.
        strides: strides of each; the last is that of the channels.
    """
    unit = 0
    for x, steps in zip(xs, strides, strict=True):
        unit = ACCESS // x.element_size()
        if steps[-1] != 1 or any(step % unit for step in steps[:-1]) or not starts_aligned(x):
            return 0
    return unit


def broadcast_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, with 0 for dimensions of size 1."""
    return tuple(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))
