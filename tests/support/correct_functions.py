"""Correct rotary functions in plain torch: forms crossed with pairings, slices, layouts, rules and dtypes.

Nothing here uses the library under test, except for the frequencies of a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.planted_faults import Fn, turn
from tightrope import RopeSpec
from tightrope.frequencies import Given, Linear, Llama3, Proportional, YaRN

DIM = 32

RULES: dict[str, Any] = {
    "plain": (10_000.0, lambda _: None),
    "base 500000": (5e5, lambda _: None),
    "linear": (10_000.0, lambda _: Linear(4.0)),
    "YaRN": (10_000.0, lambda _: YaRN(4.0, 4096)),
    "Llama 3": (5e5, lambda _: Llama3(8.0, 1.0, 4.0, 8192)),
    "trailing zeros": (10_000.0, lambda _: Proportional(0.25)),
    "above π": (
        10_000.0,
        lambda pairs: Given.of(torch.linspace(50.0, 2.0, pairs, dtype=torch.float64)),
    ),
}
# (first channel, number of channels)
SLICES = {"whole": (0, DIM), "first": (0, 16), "middle": (8, 16)}
# Dimensions of x, and how to bring it to (rows, heads, tokens, channels) and back.
LAYOUTS: dict[str, tuple[int, Fn, Fn]] = {
    "bhsd": (4, lambda x: x, lambda y: y),
    "bshd": (4, lambda x: x.transpose(1, 2), lambda y: y.transpose(1, 2)),
    "sbhd": (4, lambda x: x.permute(1, 2, 0, 3), lambda y: y.permute(2, 0, 1, 3)),
    "thd": (3, lambda x: x.transpose(0, 1)[None], lambda y: y[0].transpose(0, 1)),
    "bsd": (3, lambda x: x[:, None], lambda y: y[:, 0]),
    "sd": (2, lambda x: x[None, None], lambda y: y[0, 0]),
}


@dataclass(frozen=True)
class Case:
    """One correct function.

    Attributes:
        form: a key of FORMS.
        interleaved, where, rule, layout: how it rotates; keys of the tables above.
        exact: whether angles are computed in float64 instead of float32.
    """

    form: str
    interleaved: bool
    where: str
    rule: str
    layout: str
    exact: bool

    @property
    def spec(self) -> RopeSpec:
        """The rotation."""
        start, width = SLICES[self.where]
        base, scaling = RULES[self.rule]
        return RopeSpec(
            DIM,
            base=base,
            rotary_dim=width,
            start=start,
            interleaved=self.interleaved,
            scaling=scaling(width // 2),
        )

    def __str__(self) -> str:
        pairing = "interleaved" if self.interleaved else "half"
        dtype = "float64" if self.exact else "float32"
        return "-".join((self.form, pairing, self.where, self.rule, self.layout, dtype))

    def make(self) -> Fn:
        """The function."""
        return FORMS[self.form](self)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``(rows, 1, tokens, pairs)`` at ``(rows, tokens)``."""
        dtype = torch.float64 if self.exact else torch.float32
        rates = self.spec.frequencies().inv_freq.to(positions.device, dtype)
        angle = positions.to(dtype)[:, None, :, None] * rates
        factor = self.spec.attention_scaling()
        return angle.cos() * factor, angle.sin() * factor

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x ``(rows, heads, tokens, channels)`` by tables with one entry per pair."""
        start, width = SLICES[self.where]
        part = x[..., start : start + width]
        y = turn(part, cos.to(x), sin.to(x), interleaved=self.interleaved)
        return torch.cat((x[..., :start], y, x[..., start + width :]), -1)

    def by_tables(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x of the case's layout by tables ``(rows, 1, tokens, pairs)``."""
        dims, into, back = LAYOUTS[self.layout]
        if x.ndim != dims:
            raise ValueError(f"{self.layout} has {dims} dimensions")
        return back(self.turn(into(x), cos, sin))  # type: ignore[no-any-return]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x of the case's layout by positions ``(rows, tokens)``."""
        return self.by_tables(x, *self.tables(positions))

    def counted(self, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Rotate x by the positions from an offset on."""
        tokens = LAYOUTS[self.layout][1](x).shape[2]
        return self.rotate(x, torch.arange(offset, offset + tokens)[None])


def _x_positions(case: Case) -> Fn:
    if case.layout == "thd":
        return lambda x, positions: case.rotate(x, positions.reshape(1, -1))
    return lambda x, positions: case.rotate(x, positions)


def _qk_positions(case: Case) -> Fn:
    one = _x_positions(case)
    return lambda q, k, positions: (one(q, positions), one(k, positions))


def _x_offsets(case: Case) -> Fn:
    """A function that takes the first position of each row."""

    def fn(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        tokens = LAYOUTS[case.layout][1](x).shape[2]
        return case.rotate(x, offsets[:, None] + torch.arange(tokens))

    return fn


def _packed(case: Case) -> Fn:
    """A function of packed rows, each of which begins at position 0."""

    def fn(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        rows = [torch.arange(n) for n in cu_seqlens.diff().tolist()]
        return case.rotate(x, torch.cat(rows)[None])

    return fn


def _qk_packed(case: Case) -> Fn:
    one = _packed(case)

    def fn(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> Any:
        if int(cu_seqlens.diff().max()) > max_seqlen:
            raise ValueError("a row is longer than max_seqlen")
        return one(q, cu_seqlens), one(k, cu_seqlens)

    return fn


class _Growing(nn.Module):
    """A module whose tables grow with the longest sequence."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.tables = case.tables(torch.arange(4)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[self.case.layout.replace("t", "s").index("s") - len(self.case.layout)]
        if self.tables[0].shape[2] < tokens:
            self.tables = self.case.tables(torch.arange(tokens)[None])
        return self.case.by_tables(x, *(t[:, :, :tokens] for t in self.tables))


def _held(case: Case) -> Fn:
    """A function that reads a table of fixed length, kept outside of it."""
    tables = case.tables(torch.arange(5000)[None])

    def fn(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        ids = position_ids.reshape(1, -1) if case.layout == "thd" else position_ids
        cos, sin = (t[0, 0][ids][:, None] for t in tables)
        return case.by_tables(x, cos, sin)

    return fn


def _qk_cos_sin(case: Case) -> Fn:
    def one(x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        half = slice(None, None, 2) if case.interleaved else slice(tables[0].shape[-1] // 2)
        cos, sin = (t[:, None, ..., half] for t in tables)
        return case.by_tables(x, cos, sin)

    return lambda q, k, cos, sin: (one(q, cos, sin), one(k, cos, sin))


def _x_cos_sin(case: Case) -> Fn:
    return lambda x, cos, sin: case.by_tables(x, cos[:, None], sin[:, None])


def _qk_cis(case: Case) -> Fn:
    one = _x_cos_sin(case)

    def fn(q: torch.Tensor, k: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
        return tuple(one(x, freqs_cis.real, freqs_cis.imag) for x in (q, k))

    return fn


def _maker(case: Case) -> Fn:
    def fn(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (t[:, 0] for t in case.tables(position_ids))
        if case.interleaved:
            wide = [t.repeat_interleave(2, -1) for t in (cos, sin)]
        else:
            wide = [torch.cat((t, t), -1) for t in (cos, sin)]
        return wide[0].to(x), wide[1].to(x)

    return fn


FORMS: dict[str, Callable[[Case], Fn]] = {
    "x, positions": _x_positions,
    "q, k, positions": _qk_positions,
    "x": lambda case: lambda x: case.counted(x),
    "x, offset": lambda case: lambda x, offset=0: case.counted(x, offset),
    "x, offsets": _x_offsets,
    "q, k": lambda case: lambda q, k: (case.counted(q), case.counted(k)),
    "q, k, offset": lambda case: (
        lambda q, k, offset=0: (case.counted(q, offset), case.counted(k, offset))
    ),
    "x, cu_seqlens": _packed,
    "q, k, cu_seqlens, max_seqlen": _qk_packed,
    "module": _Growing,
    "held table": _held,
    "q, k, cos, sin": _qk_cos_sin,
    "x, cos, sin": _x_cos_sin,
    "q, k, cis": _qk_cis,
    "x, positions -> cos, sin": _maker,
}
# Layouts that a form takes; the others take all, but a single row has no positions of rows.
_LAYOUTS = {
    "x, offsets": ("bhsd", "bshd", "sbhd", "bsd"),
    **dict.fromkeys(("x, cu_seqlens", "q, k, cu_seqlens, max_seqlen"), ("bhsd", "bshd", "thd")),
    "held table": ("bhsd", "bshd", "thd", "bsd"),
    "x, positions -> cos, sin": ("bhsd",),
}
_TAKE_TABLES = ("q, k, cos, sin", "x, cos, sin", "q, k, cis")


def cases() -> Iterator[Case]:
    """All crossings that make sense: functions that take tables make no angles, and those that give them no slice."""
    for values in itertools.product(FORMS, (False, True), SLICES, RULES, LAYOUTS, (False, True)):
        case = Case(*values)
        if case.form in _TAKE_TABLES and (
            case.rule != "plain" or case.exact or case.layout == "thd"
        ):
            continue
        if case.form == "x, positions -> cos, sin" and case.where != "whole":
            continue
        if case.layout not in _LAYOUTS.get(case.form, LAYOUTS) or (
            case.layout == "sd" and case.form != "x"
        ):
            continue
        yield case
