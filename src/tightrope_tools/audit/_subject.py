"""The function under audit, with the call that was found for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ._adapter import Adapter
from ._guard import CallFailed, Guard

Rotate = Callable[..., Any]


@dataclass(frozen=True)
class Subject:
    """A function with its adapter, and the source code for snippets.

    Attributes:
        fn: the audited function. Calls go to a copy of it, or to a new one from ``make``, if possible.
        call: the adapter.
        head_dim: channels of one head.
        inv_freq: a Python expression for the frequencies of the tables that ``fn`` takes.
        header: source code that defines ``fn``; None if only the caller has it.
        make: returns a new ``fn``; None if ``fn`` is copied instead.
        renew: whether each call gets a new ``fn``, because state of earlier calls changes results.
        space: the namespace of the compiled adapter.
    """

    fn: Callable[..., Any]
    call: Adapter
    head_dim: int
    guard: Guard
    inv_freq: str
    header: str | None = None
    make: Callable[[], Callable[..., Any]] | None = None
    device: str = "cpu"
    renew: bool = False
    space: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        # Compile the source that the snippets show.
        self.space.update(torch=torch, fn=self.fn)
        exec(compile(self.source, "<adapter>", "exec"), self.space)

    @property
    def source(self) -> str:
        """The source of the adapter, which defines ``rotate(x, positions)``."""
        return self.call.source(inv_freq=self.inv_freq)

    @property
    def most_rows(self) -> int | None:
        return None if "b" in self.call.layout else 1

    @property
    def most_heads(self) -> int | None:
        return None if "h" in self.call.layout else 1

    def fresh(self) -> Subject:
        """Return the subject with a function that has not been called yet, if possible."""
        return replace(self, fn=fresh(self.fn, self.make), space={})

    @property
    def can_be_fresh(self) -> bool:
        """True if a fresh function is another object, with its own state."""
        return self.make is not None or fresh(self.fn, None) is not self.fn

    def heads(self, wanted: int) -> int:
        return min(wanted, self.most_heads or wanted)

    def random(
        self,
        rows: int,
        heads: int,
        tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> torch.Tensor:
        """Return a random x ``[rows, heads, tokens, head_dim]``, laid out by :meth:`laid_out`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, self.heads(heads), tokens, self.head_dim)
        return self.laid_out(torch.randn(shape, generator=generator).to(dtype))

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with the strides of a contiguous tensor in the function's own layout."""
        x = x.to(self.device)
        order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (2, 0, 1, 3)}.get(
            self.call.layout
        )
        if order is None:
            return x.contiguous()
        back = [order.index(axis) for axis in range(4)]
        return x.permute(order).contiguous().permute(back)

    def raw(self, name: str, *tensors: Any) -> Any:
        """Call a function of the adapter and return its unchecked result.

        Raises:
            CallFailed: the function raised an exception.
            Hangs: the function did not return in time.
        """

        if self.renew:
            self.space["fn"] = fresh(self.fn, self.make)
        return self.guard.run(lambda: self.space[name](*tensors))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Rotate x; row by row if one call takes only one row, or cannot take positions that differ by row.

        Args:
            x: ``(rows, heads, tokens, channels)``.
            positions: ``(rows, tokens)`` or ``(tokens,)``.

        Raises:
            CallFailed: the function raised an exception, or its result has another shape than x.
            Hangs: the function did not return in time.
        """
        ids = self.ids(positions, x.shape[0])
        one = self.most_rows == 1 or not (
            self.call.rows_differ or bool((ids == ids[:1]).all()) or self.call.roles <= _COUNTING
        )
        if one and x.shape[0] > 1:
            rows = [self.rotate(row, where) for row, where in zip(x.split(1), ids.split(1))]
            return torch.cat(rows)
        return like(self.raw("rotate", x, ids), x)

    def rotate_qk(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k in one call, for functions that take both."""
        result = self.raw("rotate_qk", q, k, self.ids(positions, q.shape[0]))
        return like(result[0], q), like(result[1], k)

    def ids(self, positions: torch.Tensor | Sequence[int], rows: int) -> torch.Tensor:
        """Return positions as the adapter takes them: ``(rows, tokens)``, on the device."""
        ids = positions
        if not isinstance(ids, torch.Tensor):
            ids = torch.tensor(ids, dtype=torch.int64)  # an empty list would give float32
        if ids.ndim == 1:
            ids = ids[None].repeat(rows, 1)
        return ids.to(self.device)


_COUNTING = {"x", "q", "k", "seq_dim"}


def fresh(
    fn: Callable[..., Any], make: Callable[[], Callable[..., Any]] | None
) -> Callable[..., Any]:
    """Return a new function or a copy; the same function if it cannot be copied."""
    if make is not None:
        return make()
    try:
        return copy.deepcopy(fn)
    except Exception:  # noqa: BLE001  # copying may raise anything
        return fn


def like(result: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the result if it is a tensor of the shape of x.

    Raises:
        CallFailed: the result is not a tensor, or has another shape.
    """
    if not isinstance(result, torch.Tensor):
        raise CallFailed(f"it returned {type(result).__name__}, not a tensor")
    if result.shape != x.shape:
        got, wanted = tuple(result.shape), tuple(x.shape)
        raise CallFailed(f"it returned shape {got} for x of shape {wanted}")
    return result
