"""Layouts: the order of the dimensions of q and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .schema import LAYOUTS

View = Callable[[torch.Tensor], torch.Tensor]


class Layout(NamedTuple):
    """One layout.

    Attributes:
        name: its public name.
        code: its integer code in the operator's schema.
        dims: rank of the tensor.
        row, head, token: index of the dimension of rows, heads and tokens; None if the layout lacks it.
        to_bhsd, from_bhsd: functions that view a tensor as [..., rows, heads, tokens, channels] and
            back.
    """

    name: str
    code: int
    dims: int
    row: int | None
    head: int | None
    token: int
    to_bhsd: View
    from_bhsd: View


# Dimensions count from the end, so that leading ones (those of vmap) pass through.
_VIEWS: dict[str, tuple[View, View]] = {
    "bhsd": (lambda x: x, lambda x: x),
    "bshd": (lambda x: x.transpose(-3, -2), lambda x: x.transpose(-3, -2)),
    "sbhd": (lambda x: x.movedim(-4, -2), lambda x: x.movedim(-2, -4)),
    "thd": (lambda x: x.transpose(-3, -2).unsqueeze(-4), lambda x: x.squeeze(-4).transpose(-3, -2)),
    "bsd": (lambda x: x.unsqueeze(-3), lambda x: x.squeeze(-3)),
    "sd": (lambda x: x.unsqueeze(-3).unsqueeze(-3), lambda x: x.squeeze(-3).squeeze(-3)),
}

BY_NAME = {
    name: Layout(
        name,
        code,
        len(name),
        name.index("b") if "b" in name else None,
        name.index("h") if "h" in name else None,
        name.index("t" if name == "thd" else "s"),
        *_VIEWS[name],
    )
    for code, name in enumerate(LAYOUTS)
}
BY_CODE = tuple(BY_NAME.values())

#: Layouts without rows -> the same with rows, or with the tokens of a cache divided into blocks.
WITH_ROWS = {"thd": "bshd", "sd": "bsd"}
