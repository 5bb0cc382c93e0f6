"""Derivatives by x, positions and tables, in the modes that tests/laws/test_derivatives.py does not draw."""

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from tests.support.helpers import noise
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_near, value
from tightrope import RopeSpec, positions
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)

SPECS = {
    "half": RopeSpec(8),
    "interleaved": RopeSpec(8, interleaved=True),
    "slice": RopeSpec(8, rotary_dim=4, start=2),
    "interleaved slice": RopeSpec(8, rotary_dim=4, start=3, interleaved=True),
    "fast": RopeSpec(8, base=1e-3),
}


TABLES = noise(3, 4, seed=1), noise(3, 4, seed=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("at", ["ids", "ids per row", "per row"])
def test_by_position(spec: RopeSpec, at: str, inverse: bool) -> None:
    x = noise(2, 2, 3, 8).requires_grad_()
    shape = {"ids": (3,), "ids per row": (2, 3), "per row": (2,)}[at]
    p = (100 * noise(*shape, seed=1)).requires_grad_()

    def turned(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        where = positions.per_row(p) if at == "per row" else p
        return rotate(x, spec, where, inverse=inverse)

    assert gradcheck(turned, (x, p))
    assert gradgradcheck(turned, (x, p), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_position_of_narrow_x(dtype: torch.dtype) -> None:
    """Gradients of positions have the dtype of the positions, and the accuracy of the dtype of x."""
    x = noise(2, 3, 5, 64).to(dtype)
    weight = noise(2, 3, 5, 64, seed=1)
    got, wide = (torch.arange(5, dtype=torch.float32).requires_grad_() for _ in range(2))
    (rotate(x, RopeSpec(64), got) * weight.to(dtype)).sum().backward()
    (rotate(x.double(), RopeSpec(64), wide) * weight).sum().backward()
    assert got.grad is not None
    assert got.grad.dtype == torch.float32
    scale = wide.grad.abs().max().item()
    bound = value("narrow position gradient") * torch.finfo(dtype).eps * scale
    torch.testing.assert_close(got.grad, wide.grad, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "shape, ids, rows",
    [
        ((2, 64, 300, 64), (2, 300), False),
        ((2, 64, 300, 64), (300,), False),
        ((2, 64, 300, 64), (2,), True),
        ((1, 8, 5000, 64), (1,), True),
        ((1, 1280, 1, 128), (1,), False),  # a sum of 81,920 values
    ],
    ids=[
        "ids per row",
        "ids",
        "offset per row",
        "one offset of one row",
        "one token of many heads",
    ],
)
def test_the_gradient_of_positions_is_the_same_for_any_thread_count(
    shape: tuple[int, ...], ids: tuple[int, ...], rows: bool
) -> None:
    """Unlike torch.sum, which divides its values among the threads."""
    x, grads = noise(*shape, dtype=torch.float32), []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        p = noise(*ids, seed=1).requires_grad_()
        y = rotate(x, RopeSpec(shape[-1]), positions.per_row(p) if rows else p)
        grads += torch.autograd.grad(y.square().sin().sum(), p)
    assert all(torch.equal(grad, grads[0]) for grad in grads)


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
    grads = []
    for call, learns in ((rotate_qk, False), (rotate_qk, True), (rotate_qk_, False)):
        key = k.clone().requires_grad_(learns)
        y, z = call(q * 1, key, RopeSpec(8))
        assert (y.requires_grad, z.requires_grad) == (True, learns)
        (grad,) = torch.autograd.grad(y.sum(), q)
        grads.append(grad)
        y, _ = call(q * 1, key * 1, RopeSpec(8))
        y.sum().backward()
        assert key.grad is None
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    y, z = rotate_qk(q.detach(), k.clone().requires_grad_(), RopeSpec(8))
    assert (y.requires_grad, z.requires_grad) == (False, True)


@pytest.mark.parametrize("which", ["ids", "tables"])
def test_a_change_before_the_backward_pass_is_an_error(which: str) -> None:
    ids, tables = torch.tensor([5, 1, 7]), [t.clone() for t in TABLES]
    x = noise(2, 2, 3, 8).requires_grad_()
    if which == "ids":
        y = rotate(x, RopeSpec(8), ids)
        ids.add_(1)
    else:
        y, _ = apply_rotary_pos_emb(x, None, *tables, tables="half")
        tables[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_expanded_gradients() -> None:
    """An incoming gradient with strides of zero, as from `sum`, is rotated back correctly."""
    x = noise(2, 3, 5, 8).requires_grad_()
    rotate(x, RopeSpec(8), 2).sum().backward()
    expected = rotate(torch.ones_like(x), RopeSpec(8), 2, inverse=True)
    assert torch.equal(x.grad, expected)


def test_backward_does_not_change_the_incoming_gradient() -> None:
    x = noise(2, 3, 5, 8).requires_grad_()
    grad = noise(2, 3, 5, 8, seed=1)
    kept = grad.clone()
    rotate(x, RopeSpec(8), 2).backward(grad)
    rotate_(x * 1, RopeSpec(8), 2).backward(grad)
    assert torch.equal(grad, kept)


@pytest.mark.parametrize("function", [rotate, lambda x, *a: rotate_(x.clone(), *a)])
def test_forward_mode(function: Callable[..., torch.Tensor]) -> None:
    """The result has a tangent, which torch would silently drop for a registered operator."""
    spec = RopeSpec(8, rotary_dim=6, start=1)
    x, t = noise(2, 3, 5, 8), noise(2, 3, 5, 8, seed=1)
    with forward_ad.dual_level():
        y = function(forward_ad.make_dual(x, t), spec, 3)
        tangent = forward_ad.unpack_dual(y).tangent
    assert tangent is not None
    assert_near(tangent, rotate(t, spec, 3), "float64 ways")
    p = (100 * noise(2, 5, seed=2)).requires_grad_()
    check = {"check_forward_ad": True, "check_backward_ad": False}
    assert gradcheck(lambda x, p: function(x, spec, p), (x.requires_grad_(), p), **check)


def test_what_is_written_loses_an_old_tangent() -> None:
    """The written tensor has the tangent of x, also where x has none but the tensor had one before."""
    x, old = noise(2, 3, 5, 8), noise(2, 3, 5, 8, seed=1)
    with forward_ad.dual_level():
        out = forward_ad.make_dual(torch.empty_like(x), old)
        assert (
            forward_ad.unpack_dual(rotate(x, RopeSpec(8), 3, out=out)).tangent.count_nonzero() == 0
        )
        assert_near(forward_ad.unpack_dual(out).primal, rotate(x, RopeSpec(8), 3), "float64 ways")


@pytest.mark.parametrize("function", [rotate, lambda x, *a: rotate_(x.clone(), *a)])
def test_functorch(function: Callable[..., torch.Tensor]) -> None:
    spec = RopeSpec(8)
    x = noise(2, 3, 5, 8)
    probe = noise(2, 3, 5, 8, seed=1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (function(x, spec, 3) * probe).sum()

    expected = rotate(probe, spec, 3, inverse=True)
    assert_near(torch.func.grad(loss)(x), expected, "float64 ways")
    assert_near(torch.func.jacrev(loss)(x), expected, "float64 ways")
    assert_near(torch.func.jacfwd(loss)(x), expected, "float64 ways")
    _, tangent = torch.func.jvp(lambda x: function(x, spec, 3), (x,), (probe,))
    assert_near(tangent, rotate(probe, spec, 3), "float64 ways")
    quartic = torch.func.hessian(lambda x: function(x, spec, 3)[0, 0, :2].pow(4).sum())(x)
    eager = torch.autograd.functional.hessian(
        lambda x: rotate(x, spec, 3)[0, 0, :2].pow(4).sum(), x
    )
    assert_near(quartic, eager, "float64 ways, higher order")


def test_functorch_by_position() -> None:
    x, p = noise(3, 5, 8), 10 * noise(5, seed=1)

    def loss(p: torch.Tensor) -> torch.Tensor:
        return rotate(x, RopeSpec(8), p, layout="bsd").pow(3).sum()

    wanted = p.clone().requires_grad_()
    loss(wanted).backward()
    assert_near(torch.func.grad(loss)(p), wanted.grad, "float64 ways, higher order")


def test_gradients_of_every_dtype_are_the_rotation_backwards() -> None:
    """The backward pass gives the same bits as `inverse=True`, which runs the same kernel."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for spec in SPECS.values():
            x = noise(2, 3, 5, 8, dtype=torch.float64).to(dtype).requires_grad_()
            grad = noise(2, 3, 5, 8, seed=1).to(dtype)
            rotate(x, spec, 1_000_000).backward(grad)
            assert torch.equal(x.grad, rotate(grad, spec, 1_000_000, inverse=True))


def test_checkpoint_and_accumulation() -> None:
    from torch.utils.checkpoint import checkpoint

    spec, x = RopeSpec(8), noise(2, 3, 5, 8).requires_grad_()
    rotate(x, spec).pow(2).sum().backward()
    once = x.grad.clone()
    x.grad = None
    checkpoint(lambda x: rotate_(x * 1, spec).pow(2), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, once)
    rotate(x, spec).pow(2).sum().backward()
    assert torch.equal(x.grad, 2 * once)


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (1, 1)])
def test_by_position_when_vmap_maps_the_positions(in_dims: tuple[int | None, int]) -> None:
    """Positions mapped by vmap get gradients, although requires_grad is unreliable within vmap."""
    spec = RopeSpec(8)
    x, p = noise(4, 4, 3, 8), 10 * noise(4, 4, seed=1)

    def loss(p: torch.Tensor, backend: str | None) -> torch.Tensor:
        def one(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            return rotate(x, spec, p, layout="thd", backend=backend)

        mapped = x[0] if in_dims[0] is None else x
        return torch.vmap(one, in_dims=in_dims)(mapped, p).pow(3).sum()

    expected = p.clone().requires_grad_()
    loss(expected, "reference").backward()
    got = p.clone().requires_grad_()
    loss(got, None).backward()
    assert_near(got.grad, expected.grad, "float64 ways, higher order")
    assert got.grad.abs().min() > 0
    functional = torch.func.grad(lambda p: loss(p, None))(p)
    assert_near(functional, expected.grad, "float64 ways, higher order")


def test_by_position_in_place_on_slices_of_one_projection() -> None:
    """Gradients are correct if q and k, slices of one tensor, are rotated in place, and q twice."""
    spec = RopeSpec(8)
    base = noise(1, 6, 4, 8).requires_grad_()
    p = (10 * noise(4, seed=1)).requires_grad_()

    def function(base: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        qkv = base * 1
        q, k = rotate_qk_(qkv[:, :4], qkv[:, 4:], spec, p)
        rotate_(q, spec, p)
        return torch.cat((q, k), 1).mul_(2)

    assert gradcheck(function, (base, p))
    assert gradgradcheck(function, (base, p), fast_mode=True)


@every_backend
def test_by_position_in_place_on_every_backend(backend: str) -> None:
    """Gradients of positions are correct, although they need values of x that are overwritten."""
    x, p = noise(2, 2, 3, 8).requires_grad_(), (10 * noise(2, 3, seed=1)).requires_grad_()

    def function(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return rotate_(x * 1, RopeSpec(8), p, backend=backend).mul_(2)

    assert gradcheck(function, (x, p))
    assert gradgradcheck(function, (x, p), fast_mode=True)
    got, want = (
        torch.func.hessian(
            lambda p, f=f: f(x.detach() * 1, RopeSpec(8), p, backend=backend).pow(3).sum()
        )(p.detach())
        for f in (rotate_, rotate)
    )
    assert_near(got, want, "float64 ways, higher order")


def test_by_tables_in_place_in_functorch() -> None:
    x, cos, sin = noise(1, 2, 3, 8), noise(3, 8, seed=1), noise(3, 8, seed=2)
    for transform in (torch.func.grad, torch.func.hessian):
        got, want = (
            transform(lambda c, f=f: f(x * 1, None, c, sin)[0].pow(3).sum())(cos)
            for f in (apply_rotary_pos_emb_, apply_rotary_pos_emb)
        )
        assert_near(got, want, "float64 ways, higher order")


@pytest.mark.parametrize(
    "function, same_bits",
    [
        (lambda x: rotate(x, RopeSpec(8), 3), True),
        # The definition runs, whose cosines differ in the last bit.
        (lambda x: rotate(x, RopeSpec(8), torch.tensor([5, 1, 7])), False),
        (lambda x: apply_rotary_pos_emb(x, None, *TABLES, tables="half")[0], True),
    ],
    ids=["offset", "ids", "tables"],
)
def test_batched_gradients(
    function: Callable[[torch.Tensor], torch.Tensor], same_bits: bool
) -> None:
    """Batched gradients are correct, although torch's legacy vmap ignores registered vmap rules.

    Both is_grads_batched and vectorised jacobians use the legacy vmap.
    """
    x = noise(2, 2, 3, 8).requires_grad_()
    jacobian = torch.autograd.functional.jacobian
    got, want = jacobian(function, x, vectorize=True), jacobian(function, x)
    assert_near(got, want, "float64 ways")
    assert torch.equal(got, want) or not same_bits


@pytest.mark.parametrize("function", [rotate, lambda x, *a: rotate_(x * 1, *a)])
def test_functionalize(function: Callable[..., torch.Tensor]) -> None:
    x = noise(2, 3, 5, 8)
    got = torch.func.functionalize(lambda x: function(x, RopeSpec(8), 3))(x)
    assert torch.equal(got, rotate(x, RopeSpec(8), 3))


def test_a_dual_level_alone_changes_no_bit() -> None:
    """Tensors without a tangent give the same bits within dual_level, which is process-wide."""
    x = noise(2, 3, 5, 8, dtype=torch.float32)
    want = rotate(x, RopeSpec(8), 5)
    with forward_ad.dual_level():
        assert torch.equal(rotate(x, RopeSpec(8), 5), want)
        assert torch.equal(rotate_(x.clone(), RopeSpec(8), 5), want)
