"""Derivatives by x, positions and tables, in the modes that tests/laws/test_derivatives.py does not draw."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck

from tests.support.helpers import noise
from tests.support.tolerances import assert_near
from tightrope import RopeSpec
from tightrope.functional import apply_rotary_pos_emb, rotate, rotate_, rotate_qk, rotate_qk_

TABLES = noise(3, 4, seed=1), noise(3, 4, seed=2)


def test_in_place_on_views_of_a_projection() -> None:
    """Slices and transposed views of one fused projection are rotated in place, as in a model."""
    spec = RopeSpec(8)
    weight = noise(16, 6 * 8).requires_grad_()
    x = noise(2, 5, 16, seed=1)

    def attend(weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        qkv = (x @ weight).unflatten(-1, (6, 8))
        q, k = qkv[:, :, :3].transpose(1, 2), qkv[:, :, 3:5].transpose(1, 2)
        q, k = (rotate_qk_ if in_place else rotate_qk)(q, k, spec, 3)
        # qkv itself is used again, so that a lost gradient would be detected.
        back = [q.transpose(1, 2), k.transpose(1, 2), qkv[:, :, 5:]]
        last = qkv if in_place else torch.cat(back, 2)
        return torch.cat((q.flatten(), k.flatten(), last.flatten()))

    assert torch.equal(attend(weight, True), attend(weight, False))
    probe = noise(attend(weight, True).numel(), seed=2)
    (a,) = torch.autograd.grad(attend(weight, True) @ probe, weight)
    (b,) = torch.autograd.grad(attend(weight, False) @ probe, weight)
    assert_near(a, b, "float64 ways")
    assert gradcheck(lambda w: attend(w, True), (weight,))


def test_a_tensor_that_needs_no_gradient_or_has_no_part_in_the_loss_gets_none() -> None:
    q, k = noise(1, 2, 5, 8).requires_grad_(), noise(1, 1, 5, 8, seed=1)
    for call in (rotate_qk, rotate_qk_):
        for learns in (False, True):
            key = k.clone().requires_grad_(learns)
            y, z = call(q * 1, key * 1, RopeSpec(8))
            assert (y.requires_grad, z.requires_grad) == (True, learns)
            y.sum().backward()
            assert key.grad is None
    for act in (None, "silu"):
        y, z = rotate_qk(q.detach(), k.clone().requires_grad_(), RopeSpec(8), act=act)
        assert (y.requires_grad, z.requires_grad) == (False, True)


@pytest.mark.parametrize("which", ["ids", "tables", "frequencies"])
def test_a_change_before_the_backward_pass_is_an_error(which: str) -> None:
    ids, tables = torch.tensor([5, 1, 7]), [t.clone() for t in TABLES]
    x = noise(2, 2, 3, 8).requires_grad_()
    if which == "ids":
        y = rotate(x, RopeSpec(8), ids)
        ids.add_(1)
    elif which == "frequencies":
        theta = noise(4).requires_grad_()
        y = rotate(x, RopeSpec(8).at(inv_freq=theta))
        with torch.no_grad():
            theta.mul_(2)
    else:
        y, _ = apply_rotary_pos_emb(x, None, *tables, tables="half")
        tables[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_written_loses_an_old_tangent() -> None:
    """The written tensor has the tangent of x, also where x has none but the tensor had one before."""
    x, old = noise(2, 3, 5, 8), noise(2, 3, 5, 8, seed=1)
    with forward_ad.dual_level():
        out = forward_ad.make_dual(torch.empty_like(x), old)
        assert (
            forward_ad.unpack_dual(rotate(x, RopeSpec(8), 3, out=out)).tangent.count_nonzero() == 0
        )
        assert_near(forward_ad.unpack_dual(out).primal, rotate(x, RopeSpec(8), 3), "float64 ways")


def test_a_dual_level_alone_changes_no_bit() -> None:
    """Tensors without a tangent give the same bits within dual_level, which is process-wide."""
    x = noise(2, 3, 5, 8, dtype=torch.float32)
    want = rotate(x, RopeSpec(8), 5)
    with forward_ad.dual_level():
        assert torch.equal(rotate(x, RopeSpec(8), 5), want)
        assert torch.equal(rotate_(x.clone(), RopeSpec(8), 5), want)
