"""Memory that a call changes, memory that it must not change, and version counters."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from tests.support import helpers
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import reference
from tightrope.functional import (
    apply_rotary_pos_emb_,
    rerotate_,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.ops import schema

noise = partial(helpers.noise, dtype=torch.float32)


SPEC = RopeSpec(8)


def raw_arguments() -> tuple[object, ...]:
    rotation = SPEC.at(3)
    return (rotation.angles.words, None, None, 3, schema.Options().pack(), 1.0)


VIEWS = {
    "contiguous": lambda: noise(2, 3, 5, 8),
    "transposed": lambda: noise(2, 5, 3, 8).transpose(1, 2),
    "sliced": lambda: noise(2, 7, 9, 12)[:, 1:4, 2:7, 3:11],
    "expanded": lambda: noise(1, 3, 1, 8).expand(2, 3, 5, 8),
    "every second channel": lambda: noise(2, 3, 5, 16)[..., ::2],
    "channels first": lambda: noise(2, 3, 8, 5).transpose(2, 3),
    "empty": lambda: noise(2, 3, 0, 8),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_out_of_place_changes_nothing(make) -> None:
    x, k = make(), make()
    before = x.clone()
    y = rotate(x, SPEC, 3)
    rotate_qk(x, k, SPEC, 3)
    assert torch.equal(x, before)
    assert y.data_ptr() != x.data_ptr() or x.numel() == 0
    assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(y, rotate(before, SPEC, 3))


def test_in_place_calls_bump_the_version_counter() -> None:
    """rotate_ and rotate_qk_ increase the version counter of x.

    Autograd needs the counter to refuse a backward pass that uses an overwritten value.
    """
    x = noise(2, 3, 5, 8)
    version = x._version
    rotate_(x, SPEC)
    assert x._version > version
    weight = torch.ones(8, requires_grad=True)
    y = (x * weight).sum()
    rotate_qk_(x, noise(2, 3, 5, 8), SPEC)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_the_raw_operator_refuses_a_tensor_that_requires_grad() -> None:
    """The raw operator raises an error for a tensor that requires grad, except under no_grad.

    Without an autograd kernel, torch would silently use the gradient of the identity.
    """
    x = noise(2, 3, 5, 8).requires_grad_() * 1
    with pytest.raises(RuntimeError, match=r"the raw operator has no gradient"):
        torch.ops.tightrope.rotate_(x, None, *raw_arguments())
    plain = noise(2, 3, 5, 8)
    expected, version = rotate(plain, SPEC, 3), plain._version
    torch.ops.tightrope.rotate_(plain, None, *raw_arguments())
    assert torch.equal(plain, expected)
    assert plain._version > version
    with torch.no_grad():
        torch.ops.tightrope.rotate_(x, None, *raw_arguments())


def test_leaves_that_require_grad_are_refused_unchanged() -> None:
    leaf = noise(2, 3, 5, 8).requires_grad_()
    before = leaf.detach().clone()
    for x in (leaf, leaf[:1]):
        with pytest.raises(ValueError, match=r"\[rotate_\] x is a leaf that requires grad"):
            rotate_(x, SPEC)
    with pytest.raises(ValueError, match=r"\[rotate_qk_\] k is a leaf .*call rotate_qk"):
        rotate_qk_(leaf * 1, leaf, SPEC)
    assert torch.equal(leaf.detach(), before)
    with torch.no_grad():
        rotate_(leaf, SPEC)
    assert not torch.equal(leaf.detach(), before)


def test_overlapping_memory_is_refused_unchanged() -> None:
    wide = noise(1, 3, 1, 8).expand(2, 3, 5, 8)
    rolling = noise(100).as_strided((1, 1, 5, 8), (100, 100, 4, 1))
    for x in (wide, rolling):
        before = x.clone()
        for backend in (None, "reference"):
            with pytest.raises(ValueError, match=r"\[rotate_\] x must not overlap itself in mem"):
                rotate_(x, SPEC, backend=backend)
            assert torch.equal(x, before)
    x = noise(2, 3, 5, 8)
    before = x.clone()
    for k in (x, x[:, 1:], x.transpose(0, 1).transpose(0, 1)):
        with pytest.raises(ValueError, match=r"\[rotate_qk_\] q and k must not share memory"):
            rotate_qk_(x, k, SPEC)
    assert torch.equal(x, before)


# Shape of a tensor, its layout, and the slices of it that are q and k.
DISJOINT: dict[str, Any] = {
    "heads": ((2, 5, 6, 8), "bshd", numpy.s_[:, :, :3], numpy.s_[:, :, 3:5]),
    "sbhd": ((5, 2, 6, 8), "sbhd", numpy.s_[:, :, 3:5], numpy.s_[:, :, :3]),
    "halves": ((2, 3, 5, 16), "bhsd", numpy.s_[..., :8], numpy.s_[..., 8:]),
    "interleaved heads": ((2, 5, 6, 8), "bshd", numpy.s_[:, :, ::2], numpy.s_[:, :, 1::2]),
    "batch": ((4, 3, 5, 8), "bhsd", numpy.s_[:2], numpy.s_[2:]),
}


@pytest.mark.parametrize("shape, layout, of_q, of_k", DISJOINT.values(), ids=DISJOINT)
def test_disjoint_slices_of_one_tensor_are_not_refused(shape, layout, of_q, of_k) -> None:
    qkv = noise(*shape)
    q, k = qkv[of_q], qkv[of_k]
    expected = rotate_qk(q, k, SPEC, 3, layout=layout)
    rotate_qk_(q, k, SPEC, 3, layout=layout)
    assert_same_bits((q, k), expected)


def test_the_definition_refuses_overlap_too() -> None:
    """Its operators run where there is no kernel, and check as a kernel does."""
    x = noise(2, 3, 5, 8)
    before = x.clone()
    with pytest.raises(RuntimeError, match="rotate_: memory overlaps"):
        reference.rotate_(x[:, :2], x[:, 1:], *raw_arguments())
    for out in (x[:, :, 1:], x[:1, :, 1:].expand(2, 3, 4, 8)):
        with pytest.raises(RuntimeError, match="rotate_into: memory overlaps"):
            reference.rotate_into(x[:, :, :4], None, out, None, *raw_arguments())
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_inference_tensors_do_not_change_outside_of_inference_mode(backend: str | None) -> None:
    """Writing to an inference tensor outside inference mode raises an error, as in torch.

    Such a tensor has no version counter.
    """
    with torch.inference_mode():
        frozen = noise(1, 2, 5, 8)
    x, cos = noise(1, 2, 5, 8), torch.ones(5, 8)
    before = x.clone(), frozen.clone()
    made = {"backend": backend}
    calls = {
        "rotate_] x": lambda: rotate_(frozen, SPEC, 3, **made),
        "rotate_] x ": lambda: rotate_(frozen[:, 1:], SPEC.at(3), **made),
        "rotate_] x  ": lambda: rotate_(frozen, SPEC, act="silu", **made),
        "rotate_qk_] k": lambda: rotate_qk_(x, frozen, SPEC, **made),
        "rotate_qk_] k ": lambda: rotate_qk_(x, frozen, SPEC, act=("silu", None), **made),
        "rotate_qk_] q": lambda: rotate_qk_(frozen, x, SPEC.at(None), **made),
        "rerotate_] k": lambda: rerotate_(frozen, SPEC, SPEC, 0, 3, **made),
        "apply_rotary_pos_emb_] q": lambda: apply_rotary_pos_emb_(frozen, None, cos, cos, **made),
        "rotate] out": lambda: rotate(x, SPEC, out=frozen, **made),
        "rotate_qk] out": lambda: rotate_qk(x, x, SPEC, out=(x.clone(), frozen), **made),
    }
    for name, call in calls.items():
        text = f"[{name.rstrip()} is an inference tensor, which cannot be changed outside inference mode"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}; give a clone of it "):
            call()
        assert torch.equal(x, before[0]), name
        assert torch.equal(frozen, before[1]), name
    assert not rotate(frozen, SPEC, 3, **made).is_inference()


def test_autocast_changes_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = noise(2, 3, 5, 8).to(dtype)
        expected = rotate(x, SPEC, 1_000_000)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(rotate(x, SPEC, 1_000_000), expected)
            reference = rotate(x, SPEC, 1_000_000, backend="reference")
        assert reference.dtype == dtype
        assert torch.equal(reference, rotate(x, SPEC, 1_000_000, backend="reference"))


def test_overlap_is_refused_under_grad_too() -> None:
    y = noise(1, 4, 5, 8).requires_grad_() * 1
    before = y.detach().clone()
    for q, k in ((y, y), (y[:, :3], y[:, 2:]), (y[:, :2], noise(1, 1, 1, 8).expand(1, 4, 5, 8))):
        with pytest.raises(ValueError, match=r"\[rotate_qk_\] .* memory"):
            rotate_qk_(q, k, SPEC)
        assert torch.equal(y.detach(), before)


class Half(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x[:1].view(x[:1].shape)

    @staticmethod
    def backward(_, grad):
        return torch.cat((grad, torch.zeros_like(grad)))


def tracked(*shape: int) -> torch.Tensor:
    """Return a tensor that has a gradient and is no leaf."""
    return noise(*shape).requires_grad_() * 1


def made_in(mode: Any, x: torch.Tensor) -> torch.Tensor:
    with mode:
        return x[:1]


# How a view is made -> the view and what its error says.
UNFOLLOWED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "chunk": (lambda: tracked(2, 9, 5, 8).chunk(3, 1)[0], "chunk, split or unbind.*slice"),
    "split": (lambda: tracked(2, 9, 5, 8).split(3, 1)[0], "chunk, split or unbind.*slice"),
    "unbind": (lambda: tracked(3, 2, 3, 5, 8).unbind(0)[0], "chunk, split or unbind.*slice"),
    "chunk of a base without grad": (lambda: noise(2, 3, 5, 8).chunk(2)[0], "chunk, split or"),
    "custom function": (lambda: Half.apply(tracked(2, 3, 5, 8)), "custom function"),
    "inference mode": (
        lambda: made_in(torch.inference_mode(), noise(2, 3, 5, 8)),
        "inference mode",
    ),
    "no_grad": (lambda: made_in(torch.no_grad(), noise(2, 3, 5, 8)), "no_grad"),
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("make, text", UNFOLLOWED.values(), ids=UNFOLLOWED)
def test_views_that_autograd_cannot_follow_are_refused_unchanged(make, text, backend) -> None:
    x, ids = make(), torch.rand(5).requires_grad_()
    before = x.detach().clone()
    with pytest.raises(ValueError, match=rf"\[rotate_\] x .*{text}"):
        rotate_(x, SPEC, ids, backend=backend)
    assert torch.equal(x.detach(), before)
    with torch.no_grad():
        rotate_(x, SPEC, ids, backend=backend)
    assert not torch.equal(x.detach(), before)


def test_memory_that_is_misaligned_by_less_than_an_element() -> None:
    raw = bytearray(4 * 8 * 40)
    q = torch.frombuffer(raw, dtype=torch.float32, count=40, offset=0).view(1, 1, 5, 8)
    k = torch.frombuffer(raw, dtype=torch.float32, count=40, offset=158).view(1, 1, 5, 8)
    with pytest.raises(ValueError, match="must not share memory"):
        rotate_qk_(q, k, SPEC)


def test_negated_views() -> None:
    x = torch.complex(noise(2, 3, 5, 8), noise(2, 3, 5, 8) + 1).conj().imag
    before = x.clone()
    assert torch.equal(rotate(x, SPEC, 3), rotate(x.resolve_neg(), SPEC, 3))
    if helpers.version_of("torch") < (2, 12):  # older torch writes the resolved tensor back
        rotate_(x, SPEC, 3)
        assert torch.equal(x, rotate(before, SPEC, 3))
        return
    with pytest.raises(
        ValueError, match=r"\[rotate_\] x must not be a negated view .*resolve_neg\(\) first"
    ):
        rotate_(x, SPEC, 3)
    assert torch.equal(x, before)
    q = before.clone()
    for spec in (SPEC, SPEC.at(), SPEC.at()):
        with pytest.raises(ValueError, match=r"\[rotate_qk_\] k must not be a negated view"):
            rotate_qk_(q, x, spec)
        assert torch.equal(q, before)


def test_raw_operators_refuse_negated_views_before_they_write() -> None:
    if helpers.version_of("torch") < (2, 12):
        pytest.skip("older torch writes the resolved tensor back")
    q, table = noise(2, 3, 5, 8), noise(1, 1, 5, 8)
    call = (table, None, None, 0, 0, 1.0)
    before = q.clone()
    for k in (noise(2, 3, 5, 8), None):
        first = torch.complex(q, q).conj().imag
        with pytest.raises(RuntimeError, match="q and k must not be negated views"):
            torch.ops.tightrope.rotate_(first, k, *call)
    with pytest.raises(RuntimeError, match="q and k must not be negated views"):
        torch.ops.tightrope.rotate_(q, torch.complex(q, q).conj().imag, *call)
    assert torch.equal(q, before)
