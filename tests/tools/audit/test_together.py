"""Two functions, one of which makes the cosines and sines that the other takes, audited as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import planted_faults as planted
from tests.support.audits import QUICK
from tests.support.planted_faults import named
from tests.support.zoo import adjacent, halves
from tightrope import RopeSpec
from tightrope_tools.audit import audit

Fn = Callable[..., Any]
INV_FREQ = planted.inv_freq()


class Rotary(nn.Module):
    """A module that makes cosines and sines of full width."""

    def __init__(self, repeats: bool = False, sign: float = 1.0) -> None:
        super().__init__()
        self.repeats, self.sign = repeats, sign
        self.register_buffer("inv_freq", INV_FREQ)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angle = position_ids[..., None].float() * INV_FREQ
        wide = angle.repeat_interleave(2, -1) if self.repeats else torch.cat((angle, angle), -1)
        return wide.cos().to(x), self.sign * wide.sin().to(x)


def applied(turned: Fn) -> Fn:
    def apply(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return tuple(x * cos[:, None] + turned(x) * sin[:, None] for x in (q, k))

    return apply


def by_length(seq_len: int) -> Any:
    angle = torch.arange(seq_len)[:, None].float() * INV_FREQ
    wide = torch.cat((angle, angle), -1)
    return wide.cos(), wide.sin()


def angles_of(max_seq_len: int) -> Any:
    angle = torch.arange(max_seq_len)[:, None].float() * INV_FREQ
    return torch.cat((angle, angle), -1)[:, None, None]


def by_rows(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    cos, sin = (t[position_ids][:, None] for t in (cos, sin))
    return tuple((x * cos + halves(x) * sin).to(x.dtype) for x in (q, k))


def of_complex(dim: int, end: int, theta: float = 10_000.0) -> Any:
    angle = torch.arange(end)[:, None] * planted.inv_freq(dim, theta)
    return torch.polar(torch.ones_like(angle), angle)


def by_complex(xq: Any, xk: Any, freqs_cis: Any) -> Any:
    def turn(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * freqs_cis[:, None]).flatten(-2).to(x)

    return turn(xq), turn(xk)


def of_packed(t: Any, cu_seqlens: Any, freqs: Any) -> Any:
    rows = torch.cat([freqs[:n, 0] for n in cu_seqlens.diff().tolist()])
    return t * rows.cos() + halves(t) * rows.sin()


def sines_first(positions: Any) -> Any:
    angle = positions[..., None].float() * INV_FREQ
    return angle.sin(), angle.cos()


def takes_sines_first(tensor: Any, sin: Any, cos: Any) -> Any:
    sin, cos = (t[:, None].repeat_interleave(2, -1) for t in (sin, cos))
    return tensor * cos + adjacent(tensor) * sin


def takes_both(x: Any, rope: Any) -> Any:
    cos, sin = rope
    return x * cos[:, None] + halves(x) * sin[:, None]


# Functions that make and take tables -> the code of what does not fit.
PAIRS: dict[str, tuple[Fn, Fn, tuple[str, ...]]] = {
    "module": (Rotary(), applied(halves), ()),
    "neighbours": (Rotary(True), applied(adjacent), ()),
    "by length, with rows": (by_length, by_rows, ()),
    "complex": (of_complex, by_complex, ()),
    "angles": (angles_of, of_packed, ()),
    "sines first": (sines_first, takes_sines_first, ()),
    "one argument": (Rotary(), takes_both, ()),
    "tables in halves for neighbours": (Rotary(), applied(adjacent), ("table-pairing",)),
    "tables of neighbours for halves": (Rotary(True), applied(halves), ("table-pairing",)),
    "cosines first": (
        lambda positions: sines_first(positions)[::-1],
        takes_sines_first,
        ("swapped-tables",),
    ),
    "sines that hold the sign": (Rotary(sign=-1.0), applied(halves), ("sign",)),
    "rows numbered through": (
        angles_of,
        lambda t, cu_seqlens, freqs: of_packed(t, cu_seqlens[[0, -1]], freqs),
        ("numbered-through",),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_functions_fit_or_do_not(name: str) -> None:
    make, apply, codes = PAIRS[name]
    for target, partner in ((make, apply), (apply, make))[bool(codes) :]:
        report = named(audit(target, partner=partner, **QUICK), *codes)
        assert "partner-unseen" not in {each.code for each in report.findings}
        assert codes or report.facts["frequencies"] == "geometric, base 10000"


@pytest.mark.parametrize(
    "fn, does", [(Rotary(), "applies"), (Rotary(True), "applies"), (applied(halves), "makes")]
)
def test_an_audit_of_one_of_them_says_that_the_other_was_not_seen(fn: Fn, does: str) -> None:
    (note,) = (each for each in named(audit(fn, **QUICK)).findings if each.code == "partner-unseen")
    assert note.severity == "note"
    assert note.sentence == f"The function that {does} the cosines and sines was not seen."
    assert "--with" in note.mend


def test_the_base_of_two_functions_is_compared_with_the_declared_one() -> None:
    spec = RopeSpec(64, base=500_000.0, interleaved=True)
    named(audit(by_complex, partner=of_complex, spec=spec, **QUICK), "base")


def test_a_pair_of_a_factory() -> None:
    report = audit(lambda: applied(halves), partner=Rotary(), make=True, **QUICK)
    assert named(report).facts["called as"] == "fn(q, k, positions)"
