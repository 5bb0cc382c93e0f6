"""Check that the gradient of x is the transposed rotation matrix times the incoming gradient."""

from __future__ import annotations

import torch

from ._guard import CallFailed
from ._impulse import matrices
from ._log import Log
from ._memory import apart
from ._subject import Subject

_WHERE = (0, 1, 5, 40)
_BODY = """
x = torch.randn(1, {heads}, 4, {dim}, requires_grad=True)
where = torch.tensor([[0, 1, 5, 40]])
y = {call}
assert y.requires_grad, "the result has no gradient"
out = torch.randn_like(y)
(seen,) = torch.autograd.grad(y, x, out)
# The function is linear in x, so (gradient · z) is (out · f(z)) for any z.
z = torch.randn_like(x)
with torch.no_grad():
    wanted = (out * {again}).sum()
assert torch.allclose((seen * z).sum(), wanted, rtol=1e-3, atol=1e-3), ((seen * z).sum(), wanted)
"""


def check_gradients(log: Log) -> None:
    """Check the gradient of x, or those of q and k."""
    if log.shape is None or log.found("not-linear", "nondeterminism"):
        log.skip("gradients", "no fixed linear map of x was measured")
        return
    with log.check("gradients") as fresh:
        _gradient(log, fresh, keys=False)
    if log.subject.call.takes_keys:
        with log.check("gradients of k") as fresh:
            _gradient(log, fresh, keys=True)


def _gradient(log: Log, subject: Subject, *, keys: bool) -> None:
    name = "k" if keys else ("q" if subject.call.takes_keys else "x")
    maps = matrices(subject, _WHERE, keys=keys)
    leaf = subject.random(1, 1 if log.found("heads") else 2, len(_WHERE), seed=21).requires_grad_()
    ids = subject.ids(list(_WHERE), 1)

    def forward() -> torch.Tensor:
        # A copy of the leaf, as an in-place function may write to it.
        x = leaf * 1.0
        if subject.renew:
            subject.space["fn"] = subject.fresh().fn
        if not keys:
            result = subject.space["rotate"](x, ids)
        else:
            result = subject.space["rotate_qk"](x.detach().clone(), x, ids)[1]
        return result  # type: ignore[no-any-return]

    index = "[1]" if keys else ""
    call = "rotate_qk(x.detach().clone(), x * 1.0, where)[1]" if keys else "rotate(x * 1.0, where)"
    body = _BODY.format(
        heads=subject.heads(2),
        dim=subject.head_dim,
        call=call,
        again=f"rotate_qk(z.clone(), z.clone(), where){index}"
        if keys
        else "rotate(z.clone(), where)",
    )
    code = "gradient"

    def run() -> tuple[torch.Tensor | None, torch.Tensor]:
        y = forward()
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(22)).to(y)
        if not y.requires_grad:
            return None, cotangent
        (grad,) = torch.autograd.grad(y, leaf, cotangent, allow_unused=True)
        return grad, cotangent.detach()

    try:
        seen, cotangent = subject.guard.run(run)
    except CallFailed as error:
        log.add(
            f"{code}-raises",
            "error",
            f"The forward or backward pass raises if {name} requires grad.",
            str(error),
            body,
        )
        return
    if seen is None:
        log.add(
            f"{code}-missing",
            "error",
            f"The gradient of {name} is missing: the result does not depend on {name} for autograd.",
            f"the result has no grad_fn that leads to {name}",
            body,
        )
        return
    flat = cotangent.detach().cpu().double()
    # [tokens, out, in] and [.., tokens, out] -> [.., tokens, in]
    wanted = torch.einsum("toi,bhto->bhti", maps, flat)
    got = seen.detach().cpu().double()
    if apart(got, wanted) <= 1e-3:
        return
    diagonal = maps.diagonal(dim1=-2, dim2=-1)
    why = "it is not the incoming gradient rotated back"
    if apart(got, diagonal * flat) <= 1e-3:
        why = "the term with the sine is detached"
    elif apart(got, wanted - diagonal * flat) <= 1e-3:
        why = "the term with the cosine is detached"
    elif apart(got, torch.einsum("tio,bhto->bhti", maps, flat)) <= 1e-3:
        why = "the incoming gradient is rotated forwards instead of back"
    elif apart(got, flat) <= 1e-3:
        why = "the incoming gradient is passed on unrotated"
    elif not bool(got.any()):
        why = "it is zero"
    log.add(
        f"{code}-wrong",
        "error",
        f"The gradient of {name} is wrong: {why}.",
        f"it differs by up to {apart(got, wanted):.3g} from the transposed rotation",
        body,
    )
