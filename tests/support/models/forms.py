"""Rotary functions in forms that other libraries use, and new forms to add to FORMS."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.zoo import Function, adjacent, halves
from tightrope_tools.forms import Form


def by_rows(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def along(x: Any, cos: Any, sin: Any, seq_dim: int = 2) -> Any:
    x = x.movedim(seq_dim, -2)
    return (x * cos + halves(x) * sin).movedim(-2, seq_dim)


def apply_rotary_of_a_dictionary(x: Any, freqs_cis: Any) -> Any:
    cos, sin = freqs_cis["cos"][None, None], freqs_cis["sin"][None, None]
    return (x.float() * cos + adjacent(x).float() * sin).to(x.dtype)


def apply_rotary_of_named_angles(t: Any, freqs: Any) -> Any:
    freqs = freqs["angles"]
    return (t * freqs.cos() + halves(t) * freqs.sin()).to(t.dtype)


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
