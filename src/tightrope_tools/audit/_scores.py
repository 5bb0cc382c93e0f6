"""Whether k is rotated as q is, whether scores depend on distance alone, and whether gradients are rotated back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ._call import CallFailed, Subject, gradient
from ._calls import check_calls_of_keys
from ._log import Log
from ._near import Near, apart, matrices
from ._profile import DENSE, ODD, SHORT, Profile, difference


def check_keys(log: Log, profile: Profile) -> None:
    """Check that k comes out like an equal q: in all calls of the tables, in all dtypes, near and far."""
    if not log.subject.way.takes_keys:
        return
    with log.check("k is rotated like q") as fresh:
        keys, axes = fresh.keys(), fresh.way.axes
        log.measure_near()  # earlier calls may have changed the function
        near = Near.of(keys).matrices
        size = apart(near, log.near.matrices)
        if size > log.near.tolerance:
            if apart(near, torch.eye(near.shape[-1]).expand_as(near)) == 0:
                log.add("k-not-rotated")
            else:
                log.add("q-k", f"at positions near 0 the results differ by up to {size:.4g}")
            return
        if not log.found("not-linear"):
            check_calls_of_keys(log, keys)
        if axes > 1 and not fresh.way.counts:
            x, ids = fresh.random(1, 2, 4, seed=41), torch.arange(4 * axes).view(axes, 1, 4)
            size = apart(*fresh.rotate_all([x, x.clone()], ids))
            if size > log.near.tolerance:
                log.add("q-k", f"where coordinates differ, so do the results, by up to {size:.4g}")
        for dtype in log.dtypes:
            for where in ([p for p in ODD if p < profile.reach], range(min(DENSE, profile.reach))):
                with suppress(CallFailed):
                    sides = (replace(profile, subject=each) for each in (fresh, keys))
                    size = difference(*(side.tables(where, dtype) for side in sides))
                    if size > 4 * torch.finfo(dtype).eps * max(1.0, profile.amplitude):
                        evidence = f"at positions up to {where[-1]:,} a cosine or sine differs by {size:.4g}"
                        log.add("q-k", f"for {SHORT[dtype]} vectors {evidence}")


_SHIFTS = (1, 100, 1000, 30_000)


def check_relative(log: Log) -> None:
    """Check that scores do not change when both positions shift. A drift with a known cause is no finding."""
    name = "scores depend on relative position only"
    if log.subject.way.form.takes_tables:
        log.skip(name, "the caller provides the angles")
        return
    with log.check(name) as fresh:
        q, k = fresh.random(1, 2, 1, seed=31), fresh.random(1, 2, 1, seed=32)

        def score(m: int, n: int) -> torch.Tensor:
            turned = [fresh.rotate(x.clone(), [p]).detach().double() for x, p in ((q, m), (k, n))]
            return (turned[0] * turned[1]).sum(-1).cpu()

        here = score(7, 3)
        size = float((q.double().norm(dim=-1) * k.double().norm(dim=-1)).max())
        drift = {}
        for shift in _SHIFTS:
            if shift + 7 > log.longest or (not fresh.way.takes_ids and shift > 2000):
                break
            try:
                drift[shift] = float((score(7 + shift, 3 + shift) - here).abs().max()) / size
            except CallFailed:
                break
        sizes = ", ".join(f"{value:.1e} (+{shift})" for shift, value in drift.items())
        log.facts["scores"] = f"change by {sizes} of |q| |k|"
        worst = max(drift, key=drift.__getitem__, default=1)
        # Two float32 angles at position 30,000 are each off by at most 4e-3.
        known = log.found() or log.found("length", "amplitude-varies")
        if drift and drift[worst] > 1e-2 and not known:
            log.add("relative", m=7 + worst, n=3 + worst, drift=drift[worst])


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
