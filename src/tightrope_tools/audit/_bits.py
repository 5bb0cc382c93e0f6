"""The roundings with which a function computes for x of one dtype, and the bits in which two functions differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from ._call import CallFailed, gradient
from ._profile import NARROW, SHORT, Profile, difference


class Bits(NamedTuple):
    """How a function computes for x of one dtype.

    Attributes:
        seen: its cosines and sines at some positions, complex128 ``[positions, pairs]``.
        angles: the dtypes that give its angles, or "unknown".
        table: the dtype of cosines and sines, or "unknown".
        forward: the roundings that give its results; empty if none do, or its tables are not known.
        back: the roundings that give its gradients; None if there are no gradients.
        known: whether its tables are known before they are rounded to the dtype of x.
    """

    seen: torch.Tensor
    angles: str
    table: str
    forward: tuple[str, ...]
    back: tuple[str, ...] | None
    known: bool


def bits_of(
    profile: Profile, dtype: torch.dtype, positions: Sequence[int], wide: torch.Tensor
) -> Bits:
    """Find the dtypes of angles and tables, and the roundings that reproduce the function's results and gradients.

    Args:
        wide: what it has for cosines and sines at the positions for float32 x.
    """
    seen, limit = profile.tables(profile.given(positions), dtype), 2 * torch.finfo(dtype).eps
    known = dtype == torch.float32 or difference(seen, wide) <= limit * max(1.0, profile.amplitude)
    if known:
        how = profile.explain(positions, wide)
    else:
        how = profile.explain(positions, seen, limit, (torch.float64, *NARROW))
    rounded = "unknown" if profile.rounded is None else SHORT[profile.rounded]
    tables = {SHORT[dtype]: seen} if dtype != torch.float32 else {}
    if known:
        tables[SHORT[profile.table] if dtype == torch.float32 else "float32"] = wide
    # An angle in float16 may be infinite, which has no cosine.
    finite = torch.stack([table.isfinite().all(1) for table in tables.values()]).all(0)
    where = [p for p, fits in zip(positions, finite.tolist(), strict=True) if fits]
    subject, shape = profile.subject, (1, 1, len(where))
    x = subject.random(*shape, dtype=dtype, seed=3).requires_grad_()
    out = subject.random(*shape, dtype=dtype, seed=4)
    y = subject.rotate(x * 1.0, profile.given(where))
    gradients = gradient(y, x, out)
    fitting = ((name, _reproducing(profile, x, y, table[finite])) for name, table in tables.items())
    name, forward = next((each for each in fitting if each[1]), ("unknown", ()))
    back: tuple[str, ...] | None = None if gradients is None else ()
    if forward and gradients is not None and profile.order is None:
        back = _reproducing(profile, out, gradients, tables[name][finite].conj())
    return Bits(seen, rounded if how is None else str(how), name, forward, back, known)


def _reproducing(
    profile: Profile, x: torch.Tensor, y: torch.Tensor, table: torch.Tensor
) -> tuple[str, ...]:
    """Return the roundings that give y for x ``[1, 1, tokens, channels]``, bit for bit."""
    x, y = (t.detach().cpu()[0, 0] for t in (x, y))
    cos, sin = table.real.float(), table.imag.float()
    ends = [list(each) for each in zip(*profile.pairs, strict=True)]
    u, v = (x[:, each].float() for each in ends)
    seen = [y[:, [profile.comes_out(channel) for channel in each]] for each in ends]

    def rounds(*made: Callable[..., torch.Tensor]) -> bool:
        """True if each channel of a pair, a·cos + b·sin, is the result of one of some ways to compute it."""
        sides = zip(seen, ((u, cos, -v, sin), (v, cos, u, sin)), strict=True)
        return all(any(torch.equal(y, how(*of).to(x.dtype)) for how in made) for y, of in sides)

    def each(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return (a * b).to(x.dtype).float() + (c * d).to(x.dtype).float()

    def once(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """a·b + c·d in float32, with the first product not rounded."""
        return (a.double() * b.double() + (c * d).double()).float()

    ways = {
        "each": x.dtype != torch.float32 and rounds(each),  # else no product is narrower
        "wide": rounds(lambda a, b, c, d: a * b + c * d),
        "once": rounds(once, lambda a, b, c, d: once(c, d, a, b)),
    }
    return tuple(name for name, fits in ways.items() if fits)


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
