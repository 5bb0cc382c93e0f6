"""The roundings with which a function computes in one dtype, and the bits in which two functions differ."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from ._call import CallFailed, gradient
from ._profile import SHORT, Profile


class Arithmetic(NamedTuple):
    """The arithmetic that reproduces the results of a function for one dtype of x.

    Attributes:
        table: the dtype of cosines and sines, or "unknown".
        forward: the roundings that give the results; empty if no rounding does.
        back: the roundings that give the gradients; None if there are no gradients.
    """

    table: str = "unknown"
    forward: tuple[str, ...] = ()
    back: tuple[str, ...] | None = ()


def arithmetic_of(
    profile: Profile, dtype: torch.dtype, positions: Sequence[int], tables: torch.Tensor
) -> Arithmetic:
    """Find the table dtype and the roundings that reproduce the function's results and gradients.

    Args:
        tables: its float32 cosines and sines at the positions.
    """
    subject = profile.subject
    x = subject.random(1, 1, len(positions), dtype=dtype, seed=3).requires_grad_()
    out = subject.random(1, 1, len(positions), dtype=dtype, seed=4)
    y = subject.rotate(x * 1.0, profile.given(positions))
    back = gradient(y, x, out)
    cos, sin = tables.real.float(), tables.imag.float()
    kinds = {SHORT[profile.table if dtype == torch.float32 else torch.float32]: (cos, sin)}
    if dtype != torch.float32:
        kinds = {SHORT[dtype]: (cos.to(dtype).float(), sin.to(dtype).float()), **kinds}
    names = ("wide", "once") if dtype == torch.float32 else ("each", "wide", "once")
    given, result = (t.detach().cpu()[0, 0] for t in (x, y))
    for kind, (c, s) in kinds.items():
        fits = _roundings(profile, given, result, c, s)
        forward = tuple(name for name in names if fits[name])
        if not forward:
            continue
        if back is None or profile.order is not None:
            return Arithmetic(kind, forward, None if back is None else ())
        fits = _roundings(profile, out.cpu()[0, 0], back.cpu()[0, 0], c, -s)
        return Arithmetic(kind, forward, tuple(name for name in names if fits[name]))
    return Arithmetic(back=None if back is None else ())


def _roundings(
    profile: Profile, x: torch.Tensor, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> dict[str, bool]:
    """Return for each rounding whether it reproduces y from x, bit for bit.

    Args:
        x: ``(tokens, channels)``.
        y: the function's result, of the same shape and dtype.
        cos, sin: float32 ``(tokens, pairs)``.
    """
    firsts, seconds = (list(each) for each in zip(*profile.pairs, strict=True))
    ends = [[profile.comes_out(c) for c in each] for each in (firsts, seconds)]
    u, v = x[:, firsts].float(), x[:, seconds].float()
    dtype = x.dtype

    def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        same = (y[:, ends[0]] == one.to(dtype)) & (y[:, ends[1]] == other.to(dtype))
        return bool(same.all())

    def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """a·b + c·d in float32, with the first product not rounded."""
        return (a.double() * b.double() + (c * d).double()).float()

    def narrow(product: torch.Tensor) -> torch.Tensor:
        return product.to(dtype).float()

    return {
        "each": is_equal(narrow(u * cos) - narrow(v * sin), narrow(v * cos) + narrow(u * sin)),
        "wide": is_equal(u * cos - v * sin, v * cos + u * sin),
        "once": any(
            is_equal(one, other)
            for one in (fused(u, cos, -v, sin), fused(-v, sin, u, cos))
            for other in (fused(v, cos, u, sin), fused(u, sin, v, cos))
        ),
    }


def shares_of(
    a: Profile, b: Profile, dtypes: Sequence[torch.dtype]
) -> dict[str, tuple[float, float | None]]:
    """Return the shares of results and of gradients that differ, for each dtype that a function accepts.

    The shares are 1 and None if only one of them does. If one function takes tables, it gets those of the other.
    """
    a, b = _with_tables_of(b, a), _with_tables_of(a, b)
    heads = min(2, *(p.subject.most_heads or 2 for p in (a, b)))
    reach = min(a.reach, b.reach)
    far = torch.randint(0, reach, (32,), generator=torch.Generator().manual_seed(5)).tolist()
    positions = [*range(min(96, reach)), *far]
    keys = a.subject.way.takes_keys and b.subject.way.takes_keys
    found: dict[str, tuple[float, float | None]] = {}
    for dtype in dtypes:
        given = [a.subject.random(1, heads, len(positions), dtype=dtype, seed=n) for n in (8, 9)]
        results = []
        for subject in (a.subject, b.subject):
            x, out = map(subject.laid_out, given)
            x.requires_grad_()
            sides = [subject, subject.keys()] if keys else [subject]
            with suppress(CallFailed):
                y = torch.cat([side.rotate(x * 1.0, positions) for side in sides])
                results.append((y.detach(), gradient(y, x, torch.cat([out] * len(sides)))))
        if len(results) == 2:
            (y, by_x), (z, by_z) = results
            gradients = None if by_x is None or by_z is None else _share(by_x, by_z)
            found[SHORT[dtype]] = _share(y, z), gradients
        elif results:
            found[SHORT[dtype]] = (1.0, None)
    return found


def _with_tables_of(maker: Profile, taker: Profile) -> Profile:
    """Return the profile of a function that takes tables, with tables that are measured of another function."""
    takes = [p.subject.way.form.takes_tables for p in (maker, taker)]
    count = len(taker.subject.rates)
    if takes != [False, True] or maker.interleaved is None or len(maker.slots) != count:
        return taker
    at = [maker.slots.index(pair) for pair in maker.pairs]

    def made(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.ones(ids.numel(), count, dtype=torch.complex128)
        table[:, at] = maker.tables(ids.flatten().tolist())
        table = table.view(*ids.shape, -1)
        return table.real, maker.sign * table.imag

    return replace(taker, subject=replace(taker.subject, made=made))


def _share(one: torch.Tensor, other: torch.Tensor) -> float:
    same = (one == other) | (one.isnan() & other.isnan())
    return float((~same).double().mean()) if one.dtype == other.dtype else 1.0
