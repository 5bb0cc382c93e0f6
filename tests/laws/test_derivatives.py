"""First and second derivatives of the public functions.

For rotate, rotate_qk and their in-place forms, the cases contain every valid pair of values of any
two options. Derivatives are compared with finite differences of the function itself in float64, so
this file contains no derivative formula. Gradients in narrower dtypes are compared with those of the
float64 call on the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.support import tolerances
from tests.support.calls import CASES, HEADS, KV_HEADS, REACH, ROWS, TOKENS, WIDTH, Call
from tests.support.helpers import noise, on
from tests.support.matrix import every_pair
from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.frequencies import YaRN
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    lrpe_rotate_1d,
    lrpe_rotate_1d_,
    polar_scan,
    rerotate,
    rerotate_,
    rotary_apply,
    rotary_pos_embedding,
)
from tightrope.functional.scan import FORMS, PolarState


def check(call: Callable[..., Any], leaves: Mapping[str, torch.Tensor]) -> None:
    """Check first and second derivatives of a function of named tensors by finite differences.

    The tensors are converted to float64. Derivatives are compared along random directions; first
    derivatives in reverse mode and forward mode, each batched too.
    """
    names = list(leaves)
    tensors = [leaves[name].detach().double().requires_grad_() for name in names]

    def by_place(*values: torch.Tensor) -> Any:
        return call(**dict(zip(names, values)))

    modes = ("check_batched_grad", "check_forward_ad", "check_batched_forward_grad")
    assert gradcheck(by_place, tensors, fast_mode=True, **dict.fromkeys(modes, True))
    assert gradgradcheck(by_place, tensors, fast_mode=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_axes(number: int) -> None:
    case = CASES[number]
    call, truth = Call(case), Call({**case, "dtype": torch.float64})
    check(truth, {name: truth.leaves[name] for name in truth.learned()})
    if case["dtype"] == torch.float64:
        return
    wide = {name: t.double() for name, t in call.leaves.items()}
    wanted = truth.derivatives(True, wide)
    norms = [(y.detach().double().norm(), g.detach().double().norm()) for y, g in zip(*wanted[:2])]
    size = sum(float(y * g) for y, g in norms)
    bound = tolerances.value(f"f and P, {str(case['dtype'])[6:]}")
    again = call.derivatives(True)
    for found in (call.derivatives().first, again.first):
        for name, slope in found.items():
            assert slope.dtype == call.leaves[name].dtype
            # Gradients of other tensors sum products of results, their gradients and at most REACH.
            reach = float(wanted.first[name].abs().max()) if name in ("q", "k") else REACH * size
            assert (slope.double() - wanted.first[name]).abs().max() <= bound * reach, (name, case)
    largest = max(float(one.abs().max()) for one in wanted.second.values())
    for name, one in again.second.items():
        # The second derivative rounds, and so did the first one.
        off = (one.double() - wanted.second[name]).abs().max()
        assert off <= 2 * bound * largest, (name, case)


IDS = torch.tensor([2, 0, 2, 4])
# Leading dimensions of the tables, and the position ids that select their rows.
LOOK_UPS = {
    "in order": ((TOKENS,), None),
    "in order, per row": ((ROWS, TOKENS), None),
    "ids": ((5,), IDS),
    "ids, tables per row": ((ROWS, 5), IDS),
    "ids per row": ((5,), torch.stack((IDS, IDS.flip(0)))),
    "ids per row, tables per row": ((ROWS, 5), torch.stack((IDS, IDS.flip(0)))),
}


@every_pair(
    look_up=tuple(LOOK_UPS),
    tables=("cat", "repeat", "half", "full"),
    learns=("x", "tables", "both"),
    verb=(apply_rotary_pos_emb, apply_rotary_pos_emb_),
    interleaved=(False, True),
)
def test_tables(look_up: str, tables: str, learns: str, verb: Any, interleaved: bool) -> None:
    lead, ids = LOOK_UPS[look_up]
    leaves = {
        "q": noise(ROWS, HEADS, TOKENS, WIDTH),
        "k": noise(ROWS, KV_HEADS, TOKENS, WIDTH, seed=1),
        "cos": noise(*lead, WIDTH // 4, seed=2),
        "sin": noise(*lead, WIDTH // 4, seed=3),
    }

    def call(**given: torch.Tensor) -> Any:
        q, k, cos, sin = (leaves | given).values()
        if verb is apply_rotary_pos_emb_:
            q, k = q.clone(), k.clone()
        if tables == "cat":
            cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        if tables == "repeat":
            cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
        if tables == "full":
            cos, sin = torch.cat((cos, sin), -1), torch.cat((sin, -cos), -1)
        options = {"interleaved": interleaved, "start": 1, "position_ids": ids}
        options["inverse"] = learns == "both" and tables != "full"
        options["rounding"] = "each" if tables == "full" else "once"
        return verb(q, k, cos, sin, tables=tables, **options)

    names = {"x": ("q", "k"), "tables": ("cos", "sin"), "both": tuple(leaves)}[learns]
    check(call, {name: leaves[name] for name in names})


# Shapes of θ: for each head and pair, with fewer pairs, shared by the heads, for each head.
THETAS = ((HEADS, WIDTH // 2), (HEADS, 2), (1, 2), (3,), (HEADS, 1))


KINDS = "none", "silu", "softmax", "rms_norm"


@every_pair(shape=THETAS, act=KINDS, verb=(lrpe_rotate_1d, lrpe_rotate_1d_))
def test_lrpe(shape: tuple[int, ...], act: str, verb: Any) -> None:
    leaves = {"x": noise(ROWS, TOKENS, HEADS, WIDTH), "theta": noise(*shape, seed=1)}
    leaves["x"] += 0.1 * leaves["x"].sign()
    if act == "rms_norm":
        leaves["weight"] = noise(WIDTH, seed=2)
    if act == "softmax" and verb is lrpe_rotate_1d:
        check(lambda x, theta: verb(x, theta, act=act, dim=1), leaves)

    def call(x: torch.Tensor, theta: torch.Tensor, weight: Any = None) -> torch.Tensor:
        x = x.clone() if verb is lrpe_rotate_1d_ else x
        f: Any = RMSNorm(weight, 1e-3) if act == "rms_norm" else act
        return verb(x, theta, 3, f, -1 if act == "softmax" else None)

    check(call, leaves)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 64, attention_factor=1.3)], ids=repr)
@pytest.mark.parametrize("verb", [rerotate, rerotate_])
def test_rerotate(verb: Any, scaling: Any, backend: str | None) -> None:
    """By keys, and by old and new positions; with the scaling, frequencies and amplitude change too."""
    old, new = RopeSpec(WIDTH, base=50.0), RopeSpec(WIDTH, base=50.0, scaling=scaling)
    leaves = {"k": noise(ROWS, HEADS, TOKENS, WIDTH), "at": 5 * noise(ROWS, TOKENS, seed=1)}

    def call(k: torch.Tensor, at: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
        return on(backend, verb, k.clone() if verb is rerotate_ else k, old, new, at, to)

    check(call, leaves)
    check(call, leaves | {"to": 5 * noise(ROWS, TOKENS, seed=2)})


def test_rotary_pos_embedding_and_rotary_apply() -> None:
    x, at = noise(ROWS, HEADS, TOKENS, WIDTH), 5 * noise(TOKENS, seed=1)
    check(lambda x, at: rotary_pos_embedding(x, at), {"x": x, "at": at})
    tables = {"cos": noise(TOKENS, WIDTH // 2), "sin": noise(TOKENS, WIDTH // 2, seed=1)}
    check(rotary_apply, {"x": x, **tables})


@pytest.mark.parametrize("decay", [(KV_HEADS, 1), (1, KV_HEADS, TOKENS, 4)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_polar_scan(form: str, decay: tuple[int, ...]) -> None:
    leaves = {
        "q": noise(1, HEADS, TOKENS, 4),
        "k": noise(1, KV_HEADS, TOKENS, 4, seed=1),
        "v": noise(1, KV_HEADS, TOKENS, 4, seed=2),
        "gamma": 0.1 * noise(4, seed=3),
        "decay": -noise(*decay, seed=4).abs() - 0.1,
        "memory": noise(1, KV_HEADS, 4, 4, seed=5),
    }

    def call(q: Any, k: Any, v: Any, gamma: Any, decay: Any, memory: Any) -> Any:
        spec, state = RopeSpec(4, base=50.0, interleaved=True), PolarState(memory, 3)
        gate = gates.Exp(gamma)
        out, after = polar_scan(q, k, v, spec, decay, gate=gate, state=state, form=form, chunk=3)
        return out, after.memory

    check(call, leaves)
