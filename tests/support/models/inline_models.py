"""Small modules that rotate in the body of a method that does more than rotate."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

import other_libraries


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return (−v, u) for the halves u and v of each head."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def noted(x: torch.Tensor) -> torch.Tensor:
    """Like `rotate_half`, but it changes something."""
    NOTES.append("called")
    return rotate_half(x)


NOTES: list[str] = []


class Base(nn.Module):
    """Queries and keys, (batch, heads, tokens, 16), and tables, (tokens, 16), with equal halves."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qk = nn.Linear(32, 64)
        angle = torch.arange(9)[:, None] * 0.5 ** torch.arange(8)
        self.register_buffer("angle", torch.cat((angle, angle), -1))

    def qk(self, x: torch.Tensor) -> Any:
        """Queries and keys."""
        return self.to_qk(x).unflatten(-1, (4, 16)).transpose(1, 2).chunk(2, 1)

    def tables(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines in the dtype of x."""
        angle = self.angle[: x.shape[1]]
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def scaled(self, q: torch.Tensor) -> torch.Tensor:
        """Something that a subclass calls with super()."""
        return q * 0.5


class Halves(Base):
    """Calls a helper in one line, as Ideogram and Cosmos do."""

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: float = 0.0) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        q = (q * cos) + (rotate_half(q) * sin)
        k = (k * cos) + (rotate_half(k) * sin)
        return scale * q @ k.mT + shift


class Cat(Base):
    """Rotates the first channels and joins the others, in several lines in a branch, as MiniMax does."""

    def forward(self, x: torch.Tensor, turn: bool = True) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        if turn:
            cos, sin = self.tables(x)
            cos, sin = cos[:, 4:12], sin[:, 4:12]
            dim = cos.shape[-1]
            q_turned, q_passed = q[..., :dim], q[..., dim:]
            k_turned, k_passed = k[..., :dim], k[..., dim:]
            q1, q2 = q_turned.chunk(2, dim=-1)
            k1, k2 = k_turned.chunk(2, dim=-1)
            q_half = torch.cat([-q2, q1], dim=-1)
            k_half = torch.cat([-k2, k1], dim=-1)
            q = torch.cat([q_turned * cos + q_half * sin, q_passed], dim=-1)
            k = torch.cat([k_turned * cos + k_half * sin, k_passed], dim=-1)
        return q @ k.mT


class Stack(Base):
    """Stacks the two sums of adjacent pairs, without a helper."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        c, s = (table[:, :8] for table in self.tables(x))
        a, b = q[..., ::2], q[..., 1::2]
        q = torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
        return q @ k.mT


class Parts(Base):
    """Names both sums before they are joined, in the float32 of a wider x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        half = q.shape[-1] // 2
        wide = q.float()
        q1, q2 = wide[..., :half], wide[..., half:]
        out1 = q1 * cos[..., :half] - q2 * sin[..., :half]
        out2 = q2 * cos[..., :half] + q1 * sin[..., :half]
        return self.scaled(torch.cat((out1, out2), dim=-1).type_as(q)) @ k.mT


class Attributes(Base):
    """Reads the tables from attributes and unsqueezes them in the expression."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        self.cos, self.sin = self.tables(x)
        q = q.transpose(1, 2)
        q = q * self.cos.unsqueeze(1) + rotate_half(q) * self.sin.unsqueeze(1)
        return q.transpose(1, 2) @ k.mT


class Complex(Base):
    """Multiplies complex numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        table = torch.polar(torch.ones(x.shape[1], 8), self.angle[: x.shape[1], :8].float())
        pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        q = torch.view_as_real(pairs * table).flatten(3).type_as(q)
        return q @ k.mT


class Super(Base):
    """Calls super() and another rotary function in the method that rotates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        q = super().scaled(q)
        half = lambda t: t * 2  # noqa: E731
        q = q * cos + rotate_half(q) * sin
        k = any_turn(half(k), self.tables(x), by_halves=True)
        return q @ k.mT


any_turn = other_libraries.turn


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return wrapper


class Decorated(Base):
    """A decorated method."""

    @doubled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        return torch.add(q * cos + rotate_half(q) * sin, k).square()


def attended(q: torch.Tensor, k: torch.Tensor, tables: Any, power: int) -> torch.Tensor:
    """Scores, by a function that does more than rotate."""
    cos, sin = tables
    q_turned = q * cos + rotate_half(q) * sin
    return (q_turned @ k.mT) ** power


class Function(Base):
    """Calls a function of its module that rotates among other things."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return attended(*self.qk(x), self.tables(x), 2)


class Processor:
    """A plain object that rotates in `__call__`."""

    def __call__(self, attn: Any, x: torch.Tensor) -> torch.Tensor:
        q, k = attn.qk(x)
        cos, sin = attn.tables(x)
        return (q * cos + rotate_half(q) * sin) @ k.mT


class Processed(Base):
    """Lets its processor attend."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        result: torch.Tensor = self.processor(self, x)
        return result


class Axes(Base):
    """Rotates six dimensions along two of them, by tables whose shape is a list, as the decoder of LTX-2."""

    def turn(self, x: torch.Tensor, angle: torch.Tensor, axis: int) -> torch.Tensor:
        """Rotate x by angles (tokens, pairs) along an axis."""
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        even, odd = pairs[..., 0].float(), pairs[..., 1].float()
        shape = [1, 1, 1, 1, 1, angle.shape[-1]]
        shape[axis] = angle.shape[0]
        cos, sin = angle.cos().reshape(shape), angle.sin().reshape(shape)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.reshape(x.shape).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        angle = self.angle[:, :8].float()
        q = self.turn(q[:, :, :, None, None], angle[: x.shape[1]], 2)
        return self.turn(q, angle[:2], 1).flatten(2, 4) @ k.mT


class ListOfSizes(Base):
    """Changes a list that other lines have read under another name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        sizes = [8, 2]
        other = sizes
        half = other[0]
        u, v = q[..., :half], q[..., half:]
        sizes[0] = 4
        other[1] = half
        q = q * cos + torch.cat((-v, u), -1) * sin
        return q @ k.mT * sizes[0] * other[1]


class Branches(Base):
    """Rotates in two branches, with the same names for the halves of both tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        if x.shape[1] > 70:
            return q * sin + rotate_half(q) * cos
        if x.shape[1] > 5:
            x1, x2 = q.chunk(2, -1)
            turned = torch.cat((-x2, x1), -1)
            out = q * cos + turned * sin
            x1, x2 = k.chunk(2, -1)
            turned = torch.cat((-x2, x1), -1)
            other = k * cos + turned * sin
        else:
            out, other = q, k
        return out @ other.mT


# --- bodies that stay -----------------------------------------------------------------------------


class InPlace(Base):
    """Changes x between the halves and the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        q = q.clone()
        q1, q2 = q.chunk(2, -1)
        half = torch.cat((-q2, q1), -1)
        q.mul_(2)
        return (q * cos + half * sin) @ k.mT


class InPlaceOfViews(Base):
    """Changes the memory of the halves between them and the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        q = q.clone()
        half = rotate_half(q)
        q[..., 0] = 1.0
        return (q * cos + half * sin) @ k.mT


class Augmented(Base):
    """Adds to a name in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        q1, q2 = q.chunk(2, -1)
        half = torch.cat((-q2, q1), -1)
        half += 1
        return (q * cos + half * sin) @ k.mT


class Again(Base):
    """Assigns x again in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        half = rotate_half(q)
        q = q * 2
        return (q * cos + half * sin) @ k.mT


class Carried(Base):
    """Uses the halves of the round before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        half = rotate_half(q)
        for _ in range(2):
            q = q * cos + half * sin
            half = rotate_half(q)
        return q @ k.mT


class Conditional(Base):
    """Computes the halves in a branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        half = rotate_half(q)
        if x.shape[1] > 5:
            half = q
        return (q * cos + half * sin) @ k.mT


class Deleted(Base):
    """Deletes a name that the halves were computed from."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        q1, q2 = q.chunk(2, -1)
        half = torch.cat((-q2, q1), -1)
        del q1, q2
        return (q * cos + half * sin) @ k.mT


class Captured(Base):
    """Changes the halves in a function in the body."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        half = rotate_half(q)

        def change() -> None:
            nonlocal half
            half = half * 2

        change()
        return (q * cos + half * sin) @ k.mT


class Called(Base):
    """Passes x to another method in between, which could change it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        half = rotate_half(q)
        self.spoil(q)
        return (q * cos + half * sin) @ k.mT

    def spoil(self, q: torch.Tensor) -> None:
        """Change a tensor."""
        q.data[0] = 0


class ReadLater(Base):
    """Reads x after the sum too, so that its gradients are added in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        turned = q * cos + rotate_half(q) * sin
        return turned @ k.mT + q @ k.mT


class HalfReadLater(Base):
    """Reads the halves after the sum too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        half = rotate_half(q)
        q = q * cos + half * sin
        return q @ k.mT + half @ k.mT


class ReadBeside(Base):
    """Reads x beside the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        return (q * cos + rotate_half(q) * sin) @ k.mT + 0.5 * q.mean()


class Noted(Base):
    """Calls a helper that changes something, though it computes a rotation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        return (q * cos + noted(q) * sin) @ k.mT


class Unlike(Base):
    """Adds two products that are no rotation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        q, k = self.qk(x)
        cos, sin = self.tables(x)
        return (q * cos + q.flip(-1) * sin) @ k.mT


def with_closure() -> nn.Module:
    """A module whose helper is a variable of the function that defines the class."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)

    class Closure(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.qk(x)
            cos, sin = self.tables(x)
            return (q * cos + turned(q) * sin) @ k.mT

    return Closure()
