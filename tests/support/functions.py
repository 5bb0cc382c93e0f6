"""Calls of public functions beside rotate and rotate_qk, which obey the laws of every call too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.support import pairwise
from tests.support.by_length import RULES, spec_of
from tests.support.calls import HEADS, KV_HEADS, ROWS, TOKENS, WIDTH, Call, Tensors
from tests.support.helpers import noise, on
from tightrope import RopeSpec, gates, phases, positions
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.frequencies import YaRN
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    lrpe_rotate_1d,
    polar_scan,
    rerotate,
    rerotate_,
    rotary_apply,
    rotary_pos_embedding,
    rotate,
)
from tightrope.functional.scan import FORMS, PolarState


class Function:
    """A call as a function of its differentiable tensors, like :class:`tests.support.calls.Call`.

    Attributes:
        leaves: its tensors by name, in float64.
    """

    def __init__(self, call: Callable[..., Any], leaves: Tensors, *learned: str) -> None:
        self.call, self.leaves, self.names = call, leaves, list(learned or leaves)

    def learned(self) -> list[str]:
        """Return the names of the tensors that require grad: all, or those that were given."""
        return self.names

    new_leaves = Call.new_leaves

    def __call__(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tree_leaves(self.call(**self.leaves | tensors)))


def call_of(case: Mapping[str, Any] | Function) -> Call | Function:
    """Return the call of a case, or the call that it is."""
    return case if isinstance(case, Function) else Call(case)


IDS = [2, 0, 2, 4]
# Leading dimensions of the tables, and the position ids that select their rows.
LOOK_UPS: dict[str, tuple[tuple[int, ...], list[Any] | None]] = {
    "in order": ((TOKENS,), None),
    "in order, per row": ((ROWS, TOKENS), None),
    "ids": ((5,), IDS),
    "ids, tables per row": ((ROWS, 5), IDS),
    "ids per row": ((5,), [IDS, IDS[::-1]]),
    "ids per row, tables per row": ((ROWS, 5), [IDS, IDS[::-1]]),
}


def by_tables(case: Mapping[str, Any]) -> Function:
    lead, ids = LOOK_UPS[case["look_up"]]
    form, learns = case["tables"], case["learns"]
    leaves = {
        "q": noise(ROWS, HEADS, TOKENS, WIDTH),
        "k": noise(ROWS, KV_HEADS, TOKENS, WIDTH, seed=1),
        "cos": noise(*lead, WIDTH // 4, seed=2),
        "sin": noise(*lead, WIDTH // 4, seed=3),
    }
    names = {"x": ("q", "k"), "tables": ("cos", "sin"), "cos": ("cos",)}.get(learns, tuple(leaves))

    def call(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        options = {"interleaved": case["interleaved"], "start": 1, "tables": form}
        options["position_ids"] = None if ids is None else torch.tensor(ids, device=cos.device)
        options["inverse"] = learns == "both" and form != "full"
        options["rounding"] = "each" if form == "full" else "once"
        if form == "cat":
            cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        if form == "repeat":
            cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
        if form == "full":
            cos, sin = torch.cat((cos, sin), -1), torch.cat((sin, -cos), -1)
        # vmap writes only into tensors that are mapped.
        if case["in_place"] and "q" in names:
            return apply_rotary_pos_emb_(q.clone(), k.clone(), cos, sin, **options)
        return apply_rotary_pos_emb(q, k, cos, sin, **options)

    return Function(call, leaves, *names)


def lrpe(case: Mapping[str, Any]) -> Function:
    act, offset = case["act"], case["offset"]
    leaves = {"x": noise(ROWS, TOKENS, HEADS, WIDTH), "theta": noise(*case["shape"], seed=1)}
    leaves["x"] += 0.1 * leaves["x"].sign()  # away from the kink of relu
    if act == "rms_norm":
        leaves["weight"] = noise(WIDTH, seed=2)
    if offset == "fractions":
        leaves["at"] = torch.tensor([0.25, -7.5], dtype=torch.float64)
    over_tokens = act == "softmax over tokens"

    def call(x: Any, theta: Any, weight: Any = None, at: Any = 3) -> torch.Tensor:
        if act.startswith("softmax"):
            dim = 1 if over_tokens else -1
            return lrpe_rotate_1d(x, theta, 0 if over_tokens else at, "softmax", dim)
        return lrpe_rotate_1d(x, theta, at, act if weight is None else RMSNorm(weight, 1e-3))

    return Function(call, leaves)


def moved(case: Mapping[str, Any]) -> Function:
    """Return a move of keys; with a scaling, frequencies and amplitude change too."""
    old, new = RopeSpec(WIDTH, base=50.0), RopeSpec(WIDTH, base=50.0, scaling=case["scaling"])
    leaves = {"k": noise(ROWS, HEADS, TOKENS, WIDTH), "at": 5 * noise(ROWS, TOKENS, seed=1)}
    if case["later"]:
        leaves["later"] = 5 * noise(ROWS, TOKENS, seed=2)

    def call(k: torch.Tensor, at: torch.Tensor, later: Any = None) -> torch.Tensor:
        verb, k = (rerotate_, k.clone()) if case["in_place"] else (rerotate, k)
        return on(case["backend"], verb, k, old, new, at, later)  # type: ignore[no-any-return]

    return Function(call, leaves)


def scan(form: str, decay: tuple[int, ...]) -> Function:
    spec = RopeSpec(4, base=50.0, interleaved=True)
    leaves = {
        "q": noise(1, HEADS, TOKENS, 4),
        "k": noise(1, KV_HEADS, TOKENS, 4, seed=1),
        "v": noise(1, KV_HEADS, TOKENS, 4, seed=2),
        "gamma": 0.1 * noise(4, seed=3),
        "decay": -noise(*decay, seed=4).abs() - 0.1,
        "memory": noise(1, KV_HEADS, 4, 4, seed=5),
    }

    def call(q: Any, k: Any, v: Any, gamma: Any, decay: Any, memory: Any) -> Any:
        options = {"gate": gates.Exp(gamma), "state": PolarState(memory, 3), "form": form}
        out, after = polar_scan(q, k, v, spec, decay, chunk=3, **options)
        return out, after.memory

    return Function(call, leaves)


def sines(rows: tuple[int, int, int], *learns: str) -> Function:
    """Return the sines of phases that continue an earlier call; rows of increments, of those and of reset."""
    leaves = {"earlier": noise(rows[1], 2, 3, 2), "x": noise(rows[0], 2, 5, 2, seed=1)}

    def call(earlier: Any, x: Any) -> Any:
        reset = (torch.arange(5) + 3 * torch.arange(rows[2])[:, None]) % 4 == 3
        first = phases.running(earlier, reset=torch.arange(3) == 1)
        second = phases.running(x, first.state, reset)
        made = first, second, phases.given(x), phases.running(0 * x[:, :, :1], second.state)
        angles = [p.words(wide=True).double() * (2 * math.pi / 2**64) for p in made]
        drifts = [0.0 if p.drift is None else p.drift for p in made]
        return torch.cat([(at + drift).sin().flatten() for at, drift in zip(angles, drifts)])

    return Function(call, leaves, *learns)


def at_positions(make: Callable[[torch.Tensor], positions.Positions], p: torch.Tensor) -> Any:
    x, where = torch.ones(2, 1, 8, 20, dtype=p.dtype, device=p.device), make(p)
    axes = None if where.axes == 1 else Axes.blocks((3, 3))
    return rotate(x, RopeSpec(20, rotary_dim=12, start=3, axes=axes), where)


X, AT = noise(ROWS, HEADS, TOKENS, WIDTH), 5 * noise(TOKENS, seed=1)
TABLES = {"cos": noise(TOKENS, WIDTH // 2), "sin": noise(TOKENS, WIDTH // 2, seed=1)}
# Fractional positions of eight tokens, beside those of calls.py.
FRACTIONS: dict[str, Callable[[torch.Tensor], positions.Positions]] = {
    "packed": lambda p: positions.packed(
        torch.tensor([0, 3, 8], device=p.device), p[0, :2], total=8
    ),
    "text": lambda p: positions.text(p[0], axes=2),
    "several": lambda p: positions.concatenate(
        [positions.multi_axis(p[:2, :5]), positions.grid(1, 3, device=p.device)]
    ),
    "shard": lambda p: positions.shard(
        positions.multi_axis(torch.cat((p[:2], p[2:]), 1)), 0, 2, kind="zigzag"
    ),
    "explicit": lambda p: positions.explicit(positions.per_row(p[:2, 0]), 8),
}
# Rows of increments, of those of an earlier call and of reset -> what learns; both, if nothing is named.
LEARNS: dict[tuple[int, int, int], tuple[str, ...]] = {
    **dict.fromkeys([(2, 2, 2), (2, 1, 1)], ()),
    (1, 2, 1): ("x",),
    (1, 1, 2): ("earlier",),
}
MOVES = {"in_place": (False, True), "backend": (None, "reference"), "later": (False, True)}
MOVES["scaling"] = (None, YaRN(4.0, 64, attention_factor=1.3))
SHAPES = {
    "shape": ((HEADS, WIDTH // 2), (HEADS, 2), (1, 2), (3,), (HEADS, 1)),
    "act": ("none", "silu", "softmax", "softmax over tokens", "rms_norm"),
    "offset": ("one", "fractions"),
}
OF_TABLES = {
    "look_up": tuple(LOOK_UPS),
    "tables": ("cat", "repeat", "half", "full"),
    "learns": ("x", "tables", "cos", "both"),
    "in_place": (False, True),
    "interleaved": (False, True),
}


def has_one_sum(case: Mapping[str, Any]) -> bool:
    """Return whether a softmax over the tokens, which takes no offset, has none."""
    return "tokens" not in case.get("act", "") or case.get("offset") != "fractions"


def drawn(name: str, make: Callable[..., Function], cases: Any) -> dict[str, Function]:
    return {f"{name} {number}": make(case) for number, case in enumerate(cases)}


FUNCTIONS: dict[str, Function] = {
    **drawn("apply_rotary_pos_emb", by_tables, pairwise.covering(OF_TABLES, lambda _: True)),
    **drawn("lrpe_rotate_1d", lrpe, pairwise.covering(SHAPES, has_one_sum)),
    **drawn("rerotate", moved, pairwise.covering(MOVES, lambda _: True)),
    **{
        f"polar_scan {form} {i}": scan(form, shape)
        for form in FORMS
        for i, shape in enumerate(((KV_HEADS, 1), (1, KV_HEADS, TOKENS, 4)))
    },
    **{f"phases of {rows} rows": sines(rows, *learns) for rows, learns in LEARNS.items()},
    "rotary_pos_embedding": Function(lambda x, at: rotary_pos_embedding(x, at), {"x": X, "at": AT}),
    "rotary_apply": Function(rotary_apply, {"x": X, **TABLES}),
    "cos_sin": Function(
        lambda at: RopeSpec(WIDTH).cos_sin(at, dtype=torch.float64), {"at": noise(2, 3)}
    ),
    **{
        f"positions, {name}": Function(partial(at_positions, make), {"p": noise(4, 8)})
        for name, make in FRACTIONS.items()
    },
    # The second row of a map is of the original length, and the others are longer.
    **{
        f"{rule}, by ids": Function(
            lambda at, rule=rule: rotate(
                torch.ones(1, 1, 3, 12, dtype=at.dtype, device=at.device), spec_of(rule), at
            ),
            {"at": torch.tensor([0.0, 4400.25, 4500.5], dtype=torch.float64)},
        )
        for rule in RULES
    },
}
