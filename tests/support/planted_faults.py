"""Rotary functions with one fault each, and the same functions without it, written from scratch.

Nothing here uses the library under test. Most faults are keyword arguments of `rope`, a plain float32
rotation, each of which breaks one step; faults with state or another signature have functions of their
own. The faults are rows of data/planted_faults.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.rows import read_rows
from tests.support.zoo import adjacent, halves

Fn = Callable[..., Any]
DIM = 64


def inv_freq(dim: int = DIM, base: float = 10000.0, over: int | None = None) -> torch.Tensor:
    """Return base^(−2k / over), computed in float64 and rounded to float32; over = dim if None."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / (over or dim)
    return (base**-exponents).float()


def turn(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    sign: float = 1.0,
    both_plus: bool = False,
    detach: str = "",
    in_place: bool = False,
) -> torch.Tensor:
    """Rotate x by tables with one value per pair, which broadcast against the pairs of x."""
    if interleaved:
        u, v = x[..., ::2], x[..., 1::2]
    else:
        half = x.shape[-1] // 2
        u, v = x[..., :half], x[..., half:]
    minus = 1.0 if both_plus else -1.0
    cu, cv, su, sv = u, v, u, v
    if detach == "sin":
        su, sv = u.detach(), v.detach()
    elif detach == "cos":
        cu, cv = u.detach(), v.detach()
    first = cu * cos + minus * sign * sv * sin
    second = sign * su * sin + cv * cos
    if in_place:
        u.copy_(first)
        v.copy_(second)
        return x
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def angles(
    positions: torch.Tensor,
    omega: torch.Tensor,
    *,
    shift: float = 0,
    p_type: torch.dtype | None = None,
    w_type: torch.dtype | None = None,
    a_type: torch.dtype | None = None,
) -> torch.Tensor:
    """Return (position + shift) · ω in the dtype of ω, with positions, ω and angles rounded to the given dtypes."""
    p = positions if p_type is None else positions.to(p_type)
    w = omega if w_type is None else omega.to(w_type).to(omega)
    angle = (p.to(omega) + shift)[..., None] * w
    return angle if a_type is None else angle.to(a_type).float()


def rope(
    *,
    base: float = 10000.0,
    rotary_dim: int = DIM,
    start: int = 0,
    over: int | None = None,
    divide: float = 1.0,
    amplitude: float = 1.0,
    phase: float = 0.0,
    shift: float = 0,
    swap: bool = False,
    table_type: torch.dtype | str | None = None,
    by_x: str = "",
    where: Callable[[torch.Tensor], torch.Tensor] | None = None,
    touch: Callable[[torch.Tensor], torch.Tensor] | None = None,
    tables: Callable[..., Any] | None = None,
    after: Callable[..., torch.Tensor] | None = None,
    types: dict[str, torch.dtype] | None = None,
    rates: torch.Tensor | None = None,
    rounding: str = "wide",
    **rest: Any,
) -> Fn:
    """Return a rotation of x (rows, heads, tokens, channels) by positions (rows, tokens).

    Args:
        table_type: of cosines and sines; "x" for that of x.
        by_x: the name of one of `types` that is that of x.
        phase: an angle added to each.
        where, touch: what is made of positions, and of x, before the rotation.
        tables, after: what is made of cosines, sines and positions, and of the result, x and positions.
        rates: frequencies of all channels, in place of those of base; angles have their dtype.
        rounding: "wide" for products in float32, "each" for products in the dtype of x.
    """
    omega = inv_freq(rotary_dim, base, over) / divide if rates is None else rates
    rotary_dim = 2 * len(omega)

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        dtypes = dict(types or {})
        if by_x:
            dtypes[by_x] = x.dtype
        p = positions if where is None else where(positions)
        angle = angles(p, omega, shift=shift, **dtypes)[:, None] + phase
        cos, sin = angle.cos() * amplitude, angle.sin() * amplitude
        if tables is not None:
            cos, sin = tables(cos, sin, p)
        if swap:
            cos, sin = sin, cos
        if table_type is not None:
            cos, sin = (t.to(x.dtype if table_type == "x" else table_type) for t in (cos, sin))
        if touch is not None:
            x = touch(x)
        inside = x[..., start : start + rotary_dim]
        if rest.get("in_place"):
            turn(inside, cos.to(x.dtype), sin.to(x.dtype), **rest)
            return x
        if rounding == "wide":
            inside, cos, sin = inside.float(), cos.float(), sin.float()
        y = turn(inside, cos, sin, **rest).to(x.dtype)
        y = torch.cat((x[..., :start], y, x[..., start + rotary_dim :]), -1)
        return y if after is None else after(y, x, positions)

    return fn


def named(report: Any, *codes: str) -> Any:
    """Check that a report of the audit names these faults alone, in this order; return the report."""
    assert report.codes == codes, str(report)
    return report


# --- functions with state, a table, or another signature ---------------------------------------------


def table_of(size: int, past: str, **rest: Any) -> Fn:
    """Return a rotation by a table of `size` positions; `past` names its behaviour beyond them."""
    fills = {"identity": (1.0, 0.0), "zero": (0.0, 0.0), "nan": (math.nan, math.nan)}

    def where(p: torch.Tensor) -> torch.Tensor:
        if past == "refuse" and int(p.max()) >= size:
            raise IndexError("position outside the table")
        return {"clamp": p.clamp(max=size - 1), "wrap": p % size}.get(past, p)

    def tables(cos: torch.Tensor, sin: torch.Tensor, p: torch.Tensor) -> Any:
        outside = (p >= size)[:, None, :, None]
        given = zip((cos, sin), fills.get(past, (0.0, 0.0)))
        return [t.masked_fill(outside, fill) for t, fill in given]

    return rope(where=where, tables=tables, **rest)


def dynamic_ntk(*, original: int = 1024, remembers: bool = False, by_batch: bool = True) -> Fn:
    """Return a rotation with dynamic NTK by the largest position of the batch.

    If not `by_batch`, each row has its own base. If `remembers`, positions of earlier calls count
    too.
    """
    longest = [original]

    def row(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        length = max(int(positions.max()) + 1 if len(positions[0]) else 0, longest[0])
        longest[0] = length if remembers else original
        base = 10000.0 * (length / original) ** (DIM / (DIM - 2))
        return rope(base=base)(x, positions)  # type: ignore[no-any-return]

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if by_batch:
            return row(x, positions)
        return torch.cat([row(a, b) for a, b in zip(x.split(1), positions.split(1))])

    return fn


class GrowingCache(nn.Module):
    """A rotation with a growing table; with `stale`, each new part starts at position 0 again."""

    def __init__(self, stale: bool) -> None:
        super().__init__()
        self.stale = stale
        self.table = torch.zeros(0, DIM // 2)

    def forward(self, x: torch.Tensor, seq_dim: int = -2) -> torch.Tensor:
        length = x.shape[seq_dim]
        have = len(self.table)
        if have < length:
            begin = 0 if self.stale else have
            more = angles(torch.arange(begin, begin + length - have), inv_freq())
            self.table = torch.cat((self.table, more))
        shape = [1] * x.ndim
        shape[seq_dim], shape[-1] = length, DIM // 2
        angle = self.table[:length].reshape(shape)
        return turn(x.float(), angle.cos(), angle.sin()).to(x.dtype)


class FirstDtype(nn.Module):
    """A rotation by a growing table in the dtype of the x that made it grow; with `fixed`, in float32."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.table = torch.zeros(2, 0, DIM // 2)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        length = int(positions.max()) + 1
        if self.table.shape[1] < length:
            angle = angles(torch.arange(length), inv_freq())
            self.table = torch.stack((angle.cos(), angle.sin()))
            self.table = self.table.to(torch.float32 if self.fixed else x.dtype)
        cos, sin = self.table[:, positions, None].movedim(-2, -3).float()
        return turn(x.float(), cos, sin).to(x.dtype)


def ordinal(positions: torch.Tensor) -> torch.Tensor:
    """Return the number of each token in its row."""
    return torch.arange(positions.shape[-1]).expand_as(positions)


def still(turning: int = 20) -> Fn:
    """Return a rotation of which only the first pairs turn."""
    return rope(rates=torch.where(torch.arange(DIM // 2) < turning, inv_freq(), 0.0))


def on_both(q_side: Fn, k_side: Fn | None) -> Fn:
    """Return a function of q, k and positions; without `k_side` it does not rotate k."""

    def fn(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Any:
        return q_side(q, positions), k if k_side is None else k_side(k, positions)

    return fn


def with_tables(
    *, swap: bool = False, interleaved: bool = False, in_place: bool = False, **rest: Any
) -> Fn:
    """Return a rotation of q and k by tables (rows, tokens, channels) with each value twice."""

    def fn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if swap:
            cos, sin = sin, cos
        pick = slice(None, None, 2) if interleaved else slice(0, cos.shape[-1] // 2)
        c, s = cos[:, None, :, pick], sin[:, None, :, pick]
        result = tuple(turn(x, c, s, interleaved=interleaved, **rest) for x in (q, k))
        if in_place:
            sin.neg_()
        return result

    return fn


def wrong_halves() -> Fn:
    """Return a rotation of interleaved pairs by tables that are laid out for half pairing."""
    take = cut(DIM, other=adjacent)

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = angles(positions, inv_freq())[:, None].repeat(1, 1, 1, 2)
        return take(x, angle.cos(), angle.sin()).to(x.dtype)  # type: ignore[no-any-return]

    return fn


def per_head(first: int, step: int) -> Fn:
    """Return a rotation that rotates some heads by the previous position."""
    which = slice(first, None, step)

    def after(y: torch.Tensor, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y[:, which] = PLAIN(x[:, which], positions - 1)
        return y

    return rope(after=after)


def cut(dim: int, factor: float = 1.0, other: Fn = halves) -> Fn:
    """Return a rotation of the first channels by tables of the caller, with each value twice."""

    def fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = x[..., :dim] * cos + other(x[..., :dim]) * sin
        return torch.cat((factor * y, x[..., dim:]), -1)

    return fn


def by_storage(x: torch.Tensor) -> torch.Tensor:
    """Read the memory of x as if x were contiguous."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())


def rows_by_storage(x: torch.Tensor) -> torch.Tensor:
    """Read the rows of x as if they followed each other in memory."""
    rows = (x[0].numel(), *x.stride()[1:])
    return torch.as_strided(x, x.shape, rows, x.storage_offset())


def as_viewed(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(x.shape)


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + 1e-3 * torch.randn_like(x)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.float().square().mean(-1, keepdim=True).add(1.0).sqrt().to(x.dtype)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Mix all channels by a reflection."""
    return x - 2 / DIM * x.sum(-1, keepdim=True)


def only_inference(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        raise NotImplementedError("inference only")
    return x


def other_columns() -> Fn:
    """Return a partial rotation that multiplies the other channels by 0.5."""
    halved = torch.ones(DIM).index_fill(0, torch.arange(32, DIM), 0.5)
    return rope(rotary_dim=32, after=lambda y, *_: y * halved.to(y))


class ForwardAgain(torch.autograd.Function):
    """A rotation whose backward pass rotates the gradient forwards instead of back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.positions = positions
        return PLAIN(x, positions)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return PLAIN(grads[0], ctx.positions), None


def forwards() -> Fn:
    return lambda x, positions: ForwardAgain.apply(x, positions)


def does_nothing() -> Fn:
    return lambda x, _: x.clone()


def by_sizes() -> Fn:
    """Return a rotation that confuses heads and tokens if their numbers are equal."""
    plain = rope()

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == positions.shape[1]:
            return plain(x.transpose(1, 2), positions).transpose(1, 2)
        return plain(x, positions)

    return fn


def grouped(refuses: bool) -> Fn:
    """Return a rotation of q and k that refuses unequal head counts, or rotates k then by the previous position."""
    plain = rope()

    def fn(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Any:
        differ = q.shape[1] != k.shape[1]
        if differ and refuses:
            raise ValueError("heads differ")
        return plain(q, positions), plain(k, positions - int(differ))

    return fn


def xpos() -> Fn:
    """Return a rotation that also multiplies channels by factors that fall with the position."""
    scale = (torch.arange(0, DIM, 2) + 0.4 * DIM) / (1.4 * DIM)

    def after(y: torch.Tensor, _: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        factor = scale ** (positions[..., None] / 512)
        return y * torch.cat((factor, factor), -1)[:, None].to(y)

    return rope(after=after)


def lengths_differ() -> Fn:
    """Return a rotation that omits the cosine of the second channel of each pair."""

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = angles(positions, inv_freq())[:, None]
        u, v = x.float().chunk(2, -1)
        y = torch.cat((u * angle.cos() - v * angle.sin(), u * angle.sin() + v), -1)
        return y.to(x.dtype)

    return fn


def jumping(start: int, by: int, **rest: Any) -> Fn:
    """Return a rotation that shifts the positions from `start` on."""
    return rope(where=lambda p: torch.where(p >= start, p + by, p), **rest)


def decoding(start: int = 0, by: int = 0) -> Fn:
    """Return a rotation by an offset, which it shifts from `start` on."""
    plain = rope()

    def fn(x: torch.Tensor, offset: int) -> torch.Tensor:
        first = offset + by if offset >= start else offset
        return plain(x, torch.arange(first, first + x.shape[2])[None])  # type: ignore[no-any-return]

    return fn


def counting() -> Fn:
    """Return a rotation by positions from 0 on, whatever the offset."""
    return lambda x, offset=0: PLAIN(x, torch.arange(x.shape[2])[None])  # noqa: ARG005


def counting_alone() -> Fn:
    return lambda x: PLAIN(x, torch.arange(x.shape[2])[None])


def through() -> Fn:
    """Return a rotation that numbers the tokens of all rows through."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows, _, tokens, _ = x.shape
        return PLAIN(x, torch.arange(rows * tokens).view(rows, tokens))  # type: ignore[no-any-return]

    return fn


def packed(number: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Fn:
    """Return a rotation of packed rows x (tokens, heads, channels), with other numbers of the tokens if given."""

    def fn(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
        p = torch.arange(len(x)) - starts if number is None else number(cu_seqlens)
        return PLAIN(x.transpose(0, 1)[None], p[None])[0].transpose(0, 1)  # type: ignore[no-any-return]

    return fn


def drifting() -> Fn:
    """Return a rotation by positions that grow slightly too fast."""
    return rope(rates=inv_freq().double(), where=lambda p: p.double() + 1e-9 * p.double() ** 2)


def both(k: dict[str, Any] | None = {}) -> Fn:  # noqa: B006  (is not changed)
    """Return a rotation of q and k, of which k has its own row of arguments; None does not rotate k."""
    return on_both(PLAIN, None if k is None else made(k))


PLAIN = rope()
# What functions make of positions (rows, tokens), of x before its rotation, and of `cu_seqlens`.
NAMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ordinal": ordinal,
    "sorted": lambda p: p.sort(-1).values,
    "rolled": lambda p: torch.where((p.diff(dim=-1) >= 0).all(-1, keepdim=True), p, p.roll(1, -1)),
    "first id": lambda p: p[:, :1] + ordinal(p),
    "first id, clamped": lambda p: (p[:, :1] + ordinal(p)).clamp(max=4999),
    "first id of row 0": lambda p: p[:1, :1] + ordinal(p),
    "smallest id": lambda p: p.amin(-1, keepdim=True) + ordinal(p),
    "last id": lambda p: p[:, -1:] - ordinal(p).flip(-1),
    "largest id": lambda p: p.amax(-1, keepdim=True) - ordinal(p).flip(-1),
    "largest so far": lambda p: p.cummax(-1).values,
    "from 0": lambda p: p - p[:, :1],
    "from the last restart": lambda p: p - p.cummin(-1).values,
    "from 2": lambda p: (p - 2).clamp(min=0),
    "1000 ahead": lambda p: p + (p == 1000),
    "row 0": lambda p: p[:1].expand_as(p),
    "second row ahead": lambda p: p + (torch.arange(len(p)) == 1)[:, None],
    "0 alone": lambda p: p * 0 if p.shape[1] == 1 else p,
    "int32 behind": lambda p: p - int(p.dtype is torch.int32),
    "shifted": lambda x: x + 0.1,
    "rounded": lambda x: x.bfloat16().to(x.dtype),
    "detached": torch.Tensor.detach,
    "widened": torch.Tensor.float,
    **{f.__name__: f for f in (normed, noise, by_storage, rows_by_storage, as_viewed, mixed)},
    "only_inference": only_inference,
    "packed, through": lambda cu: torch.arange(int(cu[-1])),
    "packed, the first length": lambda cu: torch.arange(int(cu[-1])) % cu[1],
    "packed, two rows": lambda cu: torch.cat(
        [torch.arange(n) for n in (int(cu[1]), int(cu[-1] - cu[1]))]
    ),
    "packed, from 1": lambda cu: torch.cat([torch.arange(n) + 1 for n in cu.diff().tolist()]),
    "packed, backwards": lambda cu: torch.cat([-torch.arange(n) for n in cu.diff().tolist()]),
}
RATES = {
    "of no rule": 1 / (1 + torch.arange(32.0)) ** 2,
    "evenly spaced": torch.linspace(1.0, 0.01, 32),
    "of 8 pairs": torch.where(torch.arange(32) < 8, inv_freq(), 0.0),
}
DTYPES = ("float32", "bfloat16", "float16")


def known(value: Any) -> Any:
    """Return what a value of a row stands for: a dtype, one of NAMED, or itself."""
    if isinstance(value, str):
        return getattr(torch, value) if value in DTYPES else (NAMED | RATES).get(value, value)
    return {key: known(each) for key, each in value.items()} if isinstance(value, dict) else value


def made(values: dict[str, Any]) -> Fn:
    """Return the function of a row: the name of what makes it, `rope` if there is none, and the arguments."""
    arguments = {key: value for key, value in values.items() if key != "make"}
    if "k" not in arguments:
        arguments = known(arguments)
    return globals()[values.get("make", "rope")](**arguments)  # type: ignore[no-any-return]


#: What is wrong -> a row: the `code` of the finding and its `severity`, if it is no error; `bad` and `good`, rows of the
#: function with and without the fault; `also`, codes of further findings; fields of the declared `spec`, with rules by
#: their names; `options` of the audit.
FAULTS = read_rows(Path(__file__).parent / "data" / "planted_faults.jsonl")
