"""Check on random activations that a conversion leaves attention scores unchanged.

In each layer of the original and of the copy, random activations pass through the projections in float64,
with biases and norms. The original's queries and keys are rotated with the old pairing, the copy's with the
new one. The scores may differ only because float64 sums have another order. As a control, the copy's scores
are also computed with the old pairing; that difference is reported as `unswitched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tightrope.functional import rotate
from tightrope.spec import RopeSpec

from ._fail import fail
from .model import Model
from .naming import PACKINGS
from .rewrite import Change

_TOKENS = 12
_STRIDE = 997
# Bound on the relative difference of two float64 sums of the same products, up to 2^16 of them.
BOUND = 1e-10


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Attributes:
        layers: the number of layers compared.
        difference: the largest difference of scores, relative to the largest score of the layer.
        unswitched: the control: the same difference with the copy rotated by the old pairing, in
            the layer where it is smallest. It should be much larger than ``difference``.
    """

    layers: int
    difference: float
    unswitched: float


@dataclass(frozen=True)
class Copied:
    """The converted copy of a file; its tensors begin ``shift`` bytes later than in the original."""

    path: Path
    shift: int = 0


def verify(
    changes: Iterable[Change],
    copies: Mapping[Path, Copied],
    model: Model,
    interleaved: bool,
    report: Callable[[float], None] = lambda _: None,
) -> Verified:
    """Compare attention scores before and after a conversion.

    Args:
        copies: file of weights -> its converted copy.
        interleaved: whether the copies pair neighbours.
        report: called with the fraction done.

    Raises:
        ValueError: scores differ, or no layer has weights for both queries and keys.
    """
    layers: dict[str, dict[str, list[Change]]] = {}
    for change in changes:
        place = change.module.rpartition(".")[0] if "norms." not in change.module else None
        place = place or change.module.split(".q_layernorm")[0].split(".k_layernorm")[0]
        layers.setdefault(place, {}).setdefault(change.role, []).append(change)
    compared: set[str] = set()
    worst, weakest = 0.0, float("inf")
    for number, (place, roles) in enumerate(layers.items()):
        report(number / len(layers))
        layer = next(iter(roles.values()))[0].layer
        spec = model.of(layer)
        if spec is None or not _complete(roles):
            continue
        plain = RopeSpec(spec.head_dim, 10000.0, spec.rotary_dim, spec.start)
        if "index q" in roles:
            plain = RopeSpec(model.index_dim or spec.head_dim, 10000.0, spec.rotary_dim)
        before = _heads(roles, None, model, plain, number)
        after = _heads(roles, copies, model, plain, number)
        old = _scores(*before, replace(plain, interleaved=not interleaved))
        new = _scores(*after, replace(plain, interleaved=interleaved))
        wrong = _scores(*after, replace(plain, interleaved=not interleaved))
        size = old.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        difference = float((old - new).abs().max() / size)
        if not difference <= BOUND:
            fail(
                f"scores must stay the same but those of {place} differ by {difference:.2g} of the largest "
                f"score, or are NaN"
            )
        compared.add(place.removesuffix(".indexer"))
        worst = max(worst, difference)
        weakest = min(weakest, float((old - wrong).abs().max() / size))
    report(1.0)
    if not compared:
        fail("to compare scores a layer must have weights for queries and keys but none has both")
    return Verified(len(compared), worst, weakest)


def _complete(roles: Mapping[str, list[Change]]) -> bool:
    kinds = {
        role for role, changes in roles.items() if any(len(c.entry.shape) == 2 for c in changes)
    }
    return (
        "qkv" in kinds
        or {"index q", "index k"} <= kinds
        or bool(kinds & {"q", "q gate"} and kinds & {"k", "kv a"})
    )


def _heads(
    roles: Mapping[str, list[Change]],
    copies: Mapping[Path, Copied] | None,
    model: Model,
    spec: RopeSpec,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys of a layer, ``(heads, tokens, head_dim)``, with its norms applied."""
    width = spec.head_dim
    if "qkv" in roles:
        every = _project(roles["qkv"], copies, seed).unflatten(-1, (-1, width))
        heads = model.heads_of(roles["qkv"][0].layer) or 0
        kv_heads = (every.shape[1] - heads) // 2
        rows = PACKINGS[model.naming.packing or ""].rows(heads, kv_heads)
        q, k = every[:, rows[0]], every[:, rows[1]]
    elif "index q" in roles:
        q = _project(roles["index q"], copies, seed).unflatten(-1, (-1, width))
        k = _norm(
            _project(roles["index k"], copies, seed)[:, None],
            roles.get("index k norm", []),
            copies,
        )
        return q.transpose(0, 1), k.transpose(0, 1)
    else:
        role = "q" if "q" in roles else "q gate"
        q = _project(roles[role], copies, seed).unflatten(
            -1, (-1, width * (1 if role == "q" else 2))
        )
        q = q[..., :width]
        if "k" in roles:
            k = _project(roles["k"], copies, seed).unflatten(-1, (-1, width))
        else:
            rotated = _project(roles["kv a"], copies, seed)[:, -spec.rotary_dim :]
            k = q.new_zeros(q.shape[0], 1, width)
            k[:, 0, spec.start : spec.start + spec.rotary_dim] = rotated
    q, k = _norm(q, roles.get("q norm", []), copies), _norm(k, roles.get("k norm", []), copies)
    return q.transpose(0, 1), k.transpose(0, 1)


def _read(
    change: Change, copies: Mapping[Path, Copied] | None, first: int, count: int
) -> torch.Tensor:
    entry = change.entry
    if copies is not None:
        copied = copies[entry.file]
        entry = replace(entry, file=copied.path, offset=entry.offset + copied.shift)
    return entry.rows(first, count, change.units).to(torch.float32).double()


def _project(
    changes: list[Change], copies: Mapping[Path, Copied] | None, seed: int
) -> torch.Tensor:
    """Project random activations, reading a few rows of the weights at a time."""
    # If there are several weights, they are parts of one: whole heads, each part in its own file.
    weights = [c for c in changes if len(c.entry.shape) == 2 and c.entry.name.endswith("weight")]
    columns = weights[0].entry.shape[1]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_TOKENS, columns, generator=generator, dtype=torch.float64)
    step = max((4 << 20) // (8 * columns), 1)
    every = []
    for weight in sorted(weights, key=lambda change: change.entry.file):
        parts = [
            x @ _read(weight, copies, first, min(step, weight.units - first)).T
            for first in range(0, weight.units, step)
        ]
        made = torch.cat(parts, -1)
        for change in changes:
            elsewhere = len(weights) > 1 and change.entry.file != weight.entry.file
            if change is weight or change.units != weight.units or elsewhere:
                continue
            if change.entry.name.endswith("bias"):
                made = made + _read(change, copies, 0, change.units)[:, 0]
            elif "scale" in change.entry.name.rpartition(".")[2]:
                made = made * _read(change, copies, 0, change.units)[:, 0]
        every.append(made)
    return torch.cat(every, -1)


def _norm(
    heads: torch.Tensor, changes: list[Change], copies: Mapping[Path, Copied] | None
) -> torch.Tensor:
    if not changes:
        return heads
    per_head = heads.shape[-1]
    weights = [c for c in changes if c.entry.name.endswith("weight")]
    made = heads / heads.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    if len(weights) == heads.shape[1] and weights[0].units == per_head:
        scale = torch.stack([_read(c, copies, 0, c.units)[:, 0] for c in weights])
    else:
        scale = _read(weights[0], copies, 0, weights[0].units).view(-1, per_head)
    made = made * scale
    for shift in (c for c in changes if c.entry.name.endswith("bias") and c.units == per_head):
        made = made + _read(shift, copies, 0, per_head)[:, 0]
    return made


def _scores(q: torch.Tensor, k: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Rotate queries and keys at distant positions; return their scores, ``(heads, tokens, tokens)``."""
    positions = torch.arange(q.shape[-2]) * _STRIDE
    turned = rotate(q[None].contiguous(), spec, positions)[0]
    keys = rotate(k[None].contiguous(), spec, positions)[0]
    repeats = max(turned.shape[0] // keys.shape[0], 1)
    return turned @ keys.repeat_interleave(repeats, 0)[: turned.shape[0]].transpose(-1, -2)
