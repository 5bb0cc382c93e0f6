"""Parts of tensors that are divided between processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias


class Span(NamedTuple):
    """A part of a dimension.

    Attributes:
        start: its first index.
        size: its number of indices.
        whole: size of the whole dimension.
    """

    start: int
    size: int
    whole: int


#: Take this process's part of an argument: maps the argument's name (for errors), its tensor, and the axes
#: of the tensor's last dimensions ("row", "head", "token" or None) to the part. It returns anything but a tensor as it is.
Take: TypeAlias = Callable[[str, Any, Sequence[str | None]], Any]
