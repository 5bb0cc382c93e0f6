"""Rotary functions in forms that other libraries use, and new forms to add to FORMS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightrope_tools.forms import Form

Function = Callable[..., Any]


def half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def pairwise(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def by_rows(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def by_one_table(x: Any, sincos: Any) -> Any:
    sin, cos = (each.repeat_interleave(2, -1)[:, :, None] for each in sincos.chunk(2, -1))
    return x * cos + pairwise(x) * sin


def along(x: Any, cos: Any, sin: Any, seq_dim: int = 2) -> Any:
    x = x.movedim(seq_dim, -2)
    return (x * cos + half(x) * sin).movedim(-2, seq_dim)


def apply_rotary_of_a_dictionary(x: Any, freqs_cis: Any) -> Any:
    cos, sin = freqs_cis["cos"][None, None], freqs_cis["sin"][None, None]
    return (x.float() * cos + pairwise(x).float() * sin).to(x.dtype)


def apply_rotary_of_stacked_tables(x: Any, freqs: Any) -> Any:
    cos, sin = freqs.unbind(-1)
    return (x * cos + pairwise(x) * sin).to(x.dtype)


def apply_rotary_of_named_angles(t: Any, freqs: Any) -> Any:
    freqs = freqs["angles"]
    return (t * freqs.cos() + half(t) * freqs.sin()).to(t.dtype)


#: Name -> (a new form, a function that takes tables in this form, the function's pairing).
NEW: dict[str, tuple[Form, Function, str]] = {
    "dictionary": (
        Form(
            ("dictionary",),
            lambda cos, sin: ({"cos": cos, "sin": sin},),
        ),
        apply_rotary_of_a_dictionary,
        "interleaved",
    ),
    "stacked": (
        Form(
            ("stacked",),
            lambda cos, sin: (torch.stack((cos, sin), -1),),
        ),
        apply_rotary_of_stacked_tables,
        "interleaved",
    ),
    "named angles": (
        Form(
            ("named",),
            lambda cos, sin: ({"angles": torch.atan2(sin, cos)},),
            narrow=False,
        ),
        apply_rotary_of_named_angles,
        "half",
    ),
}
