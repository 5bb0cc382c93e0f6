"""What a case must give, in float64 by the formulas: nothing here is ours.

Every element is compared, some tokens at a time; a gradient by frequencies is a sum over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .cases import Case
from .inputs import SCALE, SHIFT, Inputs, gate_values, ids_of, sections

#: Elements that are compared at a time: in float64 and with all that leads to them, some 2 GB.
AT_A_TIME = 1 << 24

#: Of the largest channel of a head: rounding once or, of others, several times to 16 bits, of angles too.
NEAR = {"float32": 1e-5, "float64": 1e-9, "bfloat16": 2.0**-6, "float16": 2.0**-9}


def chunks(case: Case, device: torch.device) -> Iterator[torch.Tensor]:
    """Tokens that are compared at a time, of all rows: each once."""
    at_a_time = max(1, AT_A_TIME * case.tokens // case.elements)
    yield from torch.arange(case.tokens, device=device).split(at_a_time)


def angles(case: Case, ids: torch.Tensor) -> torch.Tensor:
    """Radians, float64 (rows, tokens, pairs), of ids as `ids_of` gives them."""
    k = torch.arange(0, case.head_dim, 2, device=ids.device, dtype=torch.float64)
    omega = 10000.0 ** (-k / case.head_dim)
    if ids.dim() == 2:
        return ids[..., None].double() * omega
    axis = torch.repeat_interleave(
        torch.arange(3, device=ids.device), torch.tensor(sections(case), device=ids.device)
    )
    return ids.movedim(0, -1)[..., axis].double() * omega


def pairs_of(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The two channels of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def joined(u: torch.Tensor, v: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The head of two channels of each pair."""
    return torch.stack((u, v), -1).flatten(-2) if interleaved else torch.cat((u, v), -1)


def _f(case: Case, x: torch.Tensor) -> torch.Tensor:
    if case.act == "silu":
        return x / (1 + (-x).exp())
    if case.act == "softmax":
        return x.softmax(-1)
    if case.act == "rms_norm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x


def expected(case: Case, inputs: Inputs, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Results for all rows and some tokens."""
    device = inputs.q.device
    ids = ids_of(case, device)[..., tokens]
    angle = angles(case, ids)[:, None]
    if case.work == "backward":
        angle = -angle
    cos, sin = angle.cos(), angle.sin()
    given = inputs.grads if case.work == "backward" else inputs.xs
    values = gate_values(case, device) if case.gate else [None] * len(given)
    found = []
    for index, (x, value) in enumerate(zip(given, values, strict=True)):
        part = x[:, :, tokens].double()
        part.requires_grad_(case.work == "training")
        before = part * SCALE + SHIFT if case.neighbours else part
        u, v = pairs_of(_f(case, before), case.interleaved)
        y = joined(u * cos - v * sin, u * sin + v * cos, case.interleaved)
        if value is not None:
            log = value.double()[None, :, None]
            y = y * (log * ids[:, None, :, None] if case.gate == "slopes" else log).exp()
        y = y * SCALE if case.neighbours else y
        if case.work == "training":
            (y,) = torch.autograd.grad(y, part, inputs.grads[index][:, :, tokens].double())
        found.append(y.detach())
    return found


def _by_frequencies(case: Case, inputs: Inputs) -> torch.Tensor:
    position = ids_of(case, inputs.q.device).double()[:, None, :, None]
    total = torch.zeros(case.head_dim // 2, dtype=torch.float64, device=inputs.q.device)
    for y, grad in zip(inputs.xs, inputs.grads, strict=True):
        u, v = pairs_of(y, case.interleaved)
        du, dv = pairs_of(grad, case.interleaved)
        # A head at a time: all of them in float64 would be several times the inputs.
        for head in range(y.shape[1]):
            at = (slice(None), slice(head, head + 1))
            by_angle = u[at].double() * dv[at].double() - v[at].double() * du[at].double()
            total += (position * by_angle).sum((0, 1, 2))
    return total


def error(case: Case, found: Sequence[torch.Tensor], inputs: Inputs) -> float:
    """How far results are off, of the largest channel of each head; NaN for what is no number.

    Args:
        found: results of all tokens, each of which is compared; or the gradient by frequencies, last.
        inputs: what they are of, as it was before.
    """
    if case.work == "frequencies":
        want = _by_frequencies(case, inputs)
        return ((found[-1].reshape(-1).double() - want).abs().max() / want.abs().max()).item()
    shapes = [x.shape for x in (inputs.grads if case.work == "backward" else inputs.xs)]
    if [x.shape for x in found] != shapes:
        return float("nan")
    worst = torch.zeros((), dtype=torch.float64, device=inputs.q.device)
    for tokens in chunks(case, inputs.q.device):
        for x, want in zip(found, expected(case, inputs, tokens), strict=True):
            wide = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            off = ((x.detach()[:, :, tokens].double() - want).abs() / wide).amax()
            # A maximum of torch keeps what is no number.
            worst = torch.maximum(worst, off)
    return worst.item()


def bound(case: Case) -> float:
    """How far a right result may be off."""
    # Float32 sums within tiles, of terms that cancel to about a thousandth of their moduli.
    return 1e-3 if case.work == "frequencies" else NEAR[case.dtype]
