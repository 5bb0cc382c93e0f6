"""Memory that a call changes, memory that it must not change, and version counters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support import helpers
from tests.support.helpers import on
from tests.support.rows import read_rows
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import reference
from tightrope.functional import (
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

noise = partial(helpers.noise, dtype=torch.float32)
SPEC = RopeSpec(8)
# The first of torch whose in-place operators fail at a negated view; older ones write to it.
RESOLVES_NO_MORE = helpers.version_of("torch") >= (2, 12)


# --- refused, and nothing was written ---------------------------------------------------------------


def leaf(*shape: int) -> torch.Tensor:
    return noise(*shape).requires_grad_()


def tracked(*shape: int) -> torch.Tensor:
    """Return a tensor that has a gradient and is no leaf."""
    return leaf(*shape) * 1


def with_slices(x: torch.Tensor, *slices: Any) -> list[torch.Tensor]:
    return [x[own] for own in slices]


def misaligned() -> list[torch.Tensor]:
    raw = bytearray(4 * 8 * 40)
    parts = [torch.frombuffer(raw, dtype=torch.float32, count=40, offset=at) for at in (0, 158)]
    return [x.view(1, 1, 5, 8) for x in parts]


def made_in(mode: Any, x: torch.Tensor) -> torch.Tensor:
    with mode:
        return x[:1]


# What an error says, and an expression for tensors, one or two, that cannot be rotated in place.
REFUSED = read_rows(Path(__file__).with_name("refused_in_place.jsonl"))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_rotated_in_place_is_left_unchanged(
    row: dict[str, str], backend: str | None
) -> None:
    """Views that autograd cannot follow are refused only where autograd records."""
    text, xs = row["text"], eval(row["tensors"], globals())
    before = [x.detach().clone() for x in xs]
    verb = rotate_ if len(xs) == 1 else rotate_qk_
    # Positions that learn, so that autograd records also where x does not.
    where = leaf(5).abs() if text.startswith(("x comes", "x is a view")) else 3
    with pytest.raises(ValueError, match=rf"\[{verb.__name__}\] {text}"):
        on(backend, verb, *xs, SPEC, where)
    for x, kept in zip(xs, before, strict=True):
        assert torch.equal(x.detach(), kept)
    if "memory" not in text and "overlap" not in text:
        with torch.no_grad():
            on(backend, verb, *xs, SPEC, where)
        assert not torch.equal(xs[0].detach(), before[0])


# Shape of a tensor, its layout, and the slices of it that are q and k.
DISJOINT: dict[str, Any] = {
    "heads": ((2, 5, 6, 8), "bshd", numpy.s_[:, :, :3], numpy.s_[:, :, 3:5]),
    "sbhd": ((5, 2, 6, 8), "sbhd", numpy.s_[:, :, 3:5], numpy.s_[:, :, :3]),
    "halves": ((2, 3, 5, 16), "bhsd", numpy.s_[..., :8], numpy.s_[..., 8:]),
    "interleaved heads": ((2, 5, 6, 8), "bshd", numpy.s_[:, :, ::2], numpy.s_[:, :, 1::2]),
    "batch": ((4, 3, 5, 8), "bhsd", numpy.s_[:2], numpy.s_[2:]),
}


@pytest.mark.parametrize("shape, layout, of_q, of_k", DISJOINT.values(), ids=DISJOINT)
def test_disjoint_slices_of_one_tensor_are_not_refused(
    shape: tuple[int, ...], layout: str, of_q: Any, of_k: Any
) -> None:
    for backend in (None, "reference"):
        q, k = with_slices(noise(*shape), of_q, of_k)
        expected = on(backend, rotate_qk, q, k, SPEC, 3, layout=layout)
        on(backend, rotate_qk_, q, k, SPEC, 3, layout=layout)
        assert_same_bits((q, k), expected)


def test_operators_of_the_definition_refuse_overlap_too() -> None:
    """They run where there is no kernel, and check as a kernel does."""
    x = noise(2, 3, 5, 8)
    before, call = x.clone(), (SPEC.at(3).angles.words, None, None, 3, 0, 1.0)
    with pytest.raises(RuntimeError, match="rotate_: memory overlaps"):
        reference.rotate_(x[:, :2], x[:, 1:], *call)
    for out in (x[:, :, 1:], x[:1, :, 1:].expand(2, 3, 4, 8)):
        with pytest.raises(RuntimeError, match="rotate_into: memory overlaps"):
            reference.rotate_into(x[:, :, :4], None, out, None, *call)
    assert torch.equal(x, before)


def test_autocast_changes_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = noise(2, 3, 5, 8).to(dtype)
        for backend in (None, "reference"):
            expected = on(backend, rotate, x, SPEC, 1_000_000)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert_same_bits(on(backend, rotate, x, SPEC, 1_000_000), expected)


def test_negated_views() -> None:
    x = torch.complex(noise(2, 3, 5, 8), noise(2, 3, 5, 8) + 1).conj().imag
    before = x.clone()
    assert torch.equal(rotate(x, SPEC, 3), rotate(x.resolve_neg(), SPEC, 3))
    if not RESOLVES_NO_MORE:
        rotate_(x, SPEC, 3)
        assert torch.equal(x, rotate(before, SPEC, 3))
        return
    text = r"must not be a negated view .*resolve_neg\(\) first"
    with pytest.raises(ValueError, match=rf"\[rotate_\] x {text}"):
        rotate_(x, SPEC, 3)
    q, raw = before.clone(), torch.ops.tightrope.rotate_
    for spec in (SPEC, SPEC.at(), SPEC.at()):
        with pytest.raises(ValueError, match=rf"\[rotate_qk_\] k {text}"):
            rotate_qk_(q, x, spec)
    for pair in ((x, noise(2, 3, 5, 8)), (x, None), (q, x)):
        with pytest.raises(RuntimeError, match="q and k must not be negated views"):
            raw(*pair, SPEC.at(3).angles.words, None, None, 3, 0, 1.0)
    assert torch.equal(x, before)
    assert torch.equal(q, before)
