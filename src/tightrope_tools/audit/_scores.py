"""Whether k is rotated as q is, and whether gradients are rotated back."""

from __future__ import annotations

import itertools
from contextlib import suppress

import torch

from ._call import CallFailed, Subject, gradient
from ._calls import check_calls_of_keys
from ._log import Log
from ._near import NEAR, apart, matrices
from ._profile import DENSE, ODD, SHORT, Profile


def check_keys(log: Log, profile: Profile) -> None:
    """Check that k comes out like an equal q: in all dtypes, near and far, and in all calls of the tables."""
    if not log.subject.way.takes_keys:
        return
    with log.check("k is rotated like q") as fresh:
        odd = [p for p in ODD if p < profile.reach]
        where = [torch.tensor([[*p]]) for p in (range(NEAR), odd, range(min(DENSE, profile.reach)))]
        if (axes := fresh.way.axes) > 1 and not fresh.way.counts:
            where.append(torch.arange(4 * axes).view(axes, 1, 4))
        for dtype, ids in itertools.product(log.dtypes, where):
            x = fresh.random(1, 2, ids.shape[-1], dtype=dtype, seed=41)
            with suppress(CallFailed):
                q, k = fresh.rotate_all([x.clone(), x.clone()], ids)
                size = apart(q, k) / float(x.abs().max())
                if dtype == torch.float32 and apart(k, x) == 0 < size:
                    log.add("k-not-rotated")
                    return
                if size > 4 * torch.finfo(dtype).eps * max(1.0, profile.amplitude):
                    evidence = (
                        f"at positions up to {int(ids.max()):,} k differs by up to {size:.3g}"
                    )
                    log.add("q-k", f"for {SHORT[dtype]} vectors {evidence} of an equal q")
        if not log.found("not-linear", "q-k"):
            check_calls_of_keys(log, fresh)


_GRADIENTS = (0, 1, 5, 14)


def check_gradients(log: Log) -> None:
    """Check that the gradients of x, or of q and k, are the transposed rotation of the incoming ones."""
    if log.found("not-linear", "nondeterminism"):
        log.skip("gradients", "no fixed linear map of x was measured")
        return
    with log.check("gradients") as fresh:
        _gradient(log, fresh, "q" if fresh.way.takes_keys else "x")
    if log.subject.way.takes_keys:
        with log.check("gradients of k") as fresh:
            _gradient(log, fresh.keys(), "k")


def _gradient(log: Log, subject: Subject, name: str) -> None:
    maps = matrices(subject, _GRADIENTS)
    leaf = subject.random(1, 2, len(_GRADIENTS), seed=21).requires_grad_()
    generator = torch.Generator().manual_seed(22)
    with log.refusal("gradient-raises", name=name):
        # A copy of the leaf, as an in-place function may write to it.
        y = subject.rotate(leaf * 1.0, _GRADIENTS)
        cotangent = torch.randn(y.shape, generator=generator).to(y)
        seen = gradient(y, leaf, cotangent)
        if seen is None:
            log.add("gradient-missing", name=name)
            return
        flat, got = (t.detach().cpu().double() for t in (cotangent, seen))
        # [tokens, out, in] and [.., tokens, out] -> [.., tokens, in]
        wanted = torch.einsum("toi,bhto->bhti", maps, flat)
        diagonal = maps.diagonal(dim1=-2, dim2=-1)
        forwards = torch.einsum("tio,bhto->bhti", maps, flat)
        causes = {
            "": wanted,
            "the term with the sine is detached": diagonal * flat,
            "the term with the cosine is detached": wanted - diagonal * flat,
            "the incoming gradient is rotated forwards instead of back": forwards,
            "the incoming gradient is passed on unrotated": flat,
            "it is zero": torch.zeros_like(flat),
        }
        fits = (cause for cause, each in causes.items() if apart(got, each) <= 1e-3)
        if cause := next(fits, "it is not the incoming gradient rotated back"):
            log.add("gradient-wrong", name=name, cause=cause, size=apart(got, wanted))
