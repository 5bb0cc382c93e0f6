"""First and second derivatives of the public functions.

For rotate, rotate_qk and their in-place forms, the cases contain every valid pair of values of any
two options. Derivatives are compared with finite differences of the function itself in float64, so
this file contains no derivative formula. Gradients in float32 and bfloat16 are compared with those
of the float64 call on the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.support import pairwise, tolerances
from tests.support.helpers import noise
from tests.support.matrix import both_pairings
from tightrope import RopeSpec, gates, phases, positions
from tightrope.activations import ACTS, RMSNorm
from tightrope.axes import Axes
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
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.functional.scan import FORMS, PolarState
from tightrope.ops.schema import LAYOUTS

ROWS, HEADS, KV_HEADS, TOKENS, WIDTH = 2, 2, 1, 4, 8
# A bound on the positions of all cases.
REACH = 50.0
CHANNELS = {"whole": (6, 0), "slice": (4, 1)}

# Kinds of positions that have several axes.
SPACES = ("grid", "text", "learned grid")

AXES: dict[str, Any] = {
    "verb": ("rotate", "rotate_", "rotate_qk", "rotate_qk_"),
    "layout": LAYOUTS,
    "interleaved": (False, True),
    "channels": tuple(CHANNELS),
    "frequencies": ("spec", "prepared", "learned", "learned per head"),
    "positions": (
        *("none", "offset", "ids", "ids per row", "per row", "fractional", "learned"),
        *SPACES,
    ),
    "act": ("none", "rms_norm", *ACTS[1:]),
    "phases": ("none", "given", "given per head"),
    "gate": ("none", "scalar", "exp", "exp per head", "exp per pair", "slope", "given", "xpos"),
    "inverse": (False, True),
    "amplitude": (1.0, 1.3),
    "learns": ("everything", "x", "the rest"),
    "dtype": (torch.float64, torch.float32, torch.bfloat16),
    "backend": (None, "reference"),
}


def allowed(case: Mapping[str, Any]) -> bool:
    """Return whether the values chosen so far are compatible."""
    no_heads, where = case.get("layout") in ("bsd", "sd"), case.get("positions")
    both = case.get("verb") in ("rotate_qk", "rotate_qk_")
    return not (
        (case.get("inverse") and case.get("act", "none") != "none")
        or (case.get("layout") in ("thd", "sd") and where in ("ids per row", "per row"))
        or (no_heads and case.get("frequencies") == "learned per head")
        or (no_heads and case.get("gate") == "exp per head")
        or (no_heads and both)
        or ((no_heads or both) and case.get("phases") == "given per head")
        or (where in SPACES and case.get("gate") in ("slope", "xpos"))
    )


CASES = pairwise.covering(AXES, allowed)


def spec_of(case: Mapping[str, Any]) -> RopeSpec:
    rotary_dim, start = CHANNELS[case["channels"]]
    return RopeSpec(
        WIDTH,
        base=50.0,
        rotary_dim=rotary_dim,
        start=start,
        interleaved=case["interleaved"],
        scaling=None if case["amplitude"] == 1.0 else YaRN(4.0, 64, attention_factor=1.3),
        axes=Axes.blocks((1, rotary_dim // 2 - 1)) if case["positions"] in SPACES else None,
    )


class Call:
    """The call of a case as a function of its differentiable tensors.

    Attributes:
        leaves: these tensors by name; q and k have the dtype of the case, the others float64.
    """

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case
        self.spec = spec_of(case)
        spec, layout, dtype = self.spec, case["layout"], case["dtype"]
        heads = {"q": HEADS, "k": KV_HEADS if "qk" in case["verb"] else 0}
        self.leaves: dict[str, torch.Tensor] = {}
        for seed, (name, count) in enumerate(heads.items()):
            sizes = {"b": ROWS, "h": count, "d": WIDTH}
            shape = [sizes.get(letter, TOKENS) for letter in layout]
            if count:
                # Keep x away from 0, the kink of relu.
                x = noise(*shape, seed=seed)
                self.leaves[name] = (x + 0.1 * x.sign()).to(dtype)
        if case["act"] == "rms_norm":
            self.leaves["weight"] = noise(WIDTH, seed=2)
        pairs = spec.rotary_dim // 2
        gate = {
            "scalar": lambda: noise(1)[0].abs() + 0.5,
            "exp": lambda: 0.3 * noise(WIDTH, seed=3),
            "exp per head": lambda: 0.3 * noise(HEADS, WIDTH, seed=3),
            "exp per pair": lambda: 0.3 * noise(pairs, seed=3),
            "slope": lambda: 0.02 * noise(WIDTH, seed=3),
            "given": lambda: 0.3 * noise(TOKENS, 1, WIDTH, seed=3),
        }.get(case["gate"])
        if gate is not None:
            self.leaves["gate"] = gate()
        if case["frequencies"].startswith("learned"):
            count = (1,) if case["frequencies"] == "learned" else (HEADS,)
            shape = (2, *count, pairs) if spec.axes else (*count, pairs)
            self.leaves["inv_freq"] = 0.5 + noise(*shape, seed=4).abs()
        if case["phases"] != "none":
            own = ROWS if "b" in layout else 1, HEADS if "head" in case["phases"] else 1
            self.leaves["phases"] = 3 * noise(*own, TOKENS, pairs, seed=6)
        if case["positions"] == "learned":
            self.leaves["positions"] = 5 * noise(TOKENS, seed=5)
        if case["positions"] == "learned grid":
            self.leaves["positions"] = 5 * noise(2, 1, TOKENS, seed=5)

    def learned(self) -> list[str]:
        """Return the names of the tensors that require grad."""
        own = [name for name in self.leaves if name in ("q", "k")]
        rest = [name for name in self.leaves if name not in own]
        return {"everything": own + rest, "x": own, "the rest": rest or own}[self.case["learns"]]

    def __call__(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        case, given = self.case, self.leaves | tensors
        where = self._positions(given.get("positions"))
        options: dict[str, Any] = {
            "layout": case["layout"],
            "inverse": case["inverse"],
            "backend": case["backend"],
        }
        rope: Any = self.spec
        if case["frequencies"] == "prepared":
            rope, where = rope.at(where), None
        if "inv_freq" in given:
            options["inv_freq"] = given["inv_freq"]
        if "phases" in given:
            options["phases"] = phases.given(given["phases"])
        if case["act"] != "none":
            norm = RMSNorm(given["weight"], 1e-3) if "weight" in given else None
            options["act"] = norm or case["act"]
        if case["gate"] != "none":
            options["gate"] = self._gate(given.get("gate"))
        verb: Any = {"rotate": rotate, "rotate_": rotate_}.get(case["verb"])
        xs = [given[name] for name in ("q", "k") if name in given]
        if case["verb"].endswith("_"):
            # In-place calls need tensors that are not leaves.
            xs = [x.clone() for x in xs]
        if verb is not None:
            return (verb(xs[0], rope, where, **options),)
        if ("inv_freq" in given and given["inv_freq"].shape[-2] != 1) or case[
            "gate"
        ] == "exp per head":
            # Frequencies and gates per head need as many heads in k as in q.
            xs[1] = xs[1].repeat_interleave(HEADS // KV_HEADS, case["layout"].index("h"))
        verb = {"rotate_qk": rotate_qk, "rotate_qk_": rotate_qk_}[case["verb"]]
        return verb(*xs, rope, where, **options)

    def _positions(self, learned: torch.Tensor | None) -> Any:
        ids = torch.tensor([3, -2, 7, 40])
        rows = torch.arange(ROWS)[:, None]
        made: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "offset": lambda: 7,
            "ids": lambda: ids,
            "ids per row": lambda: ids + 5 * rows,
            "per row": lambda: positions.per_row(3 * rows[:, 0]),
            "fractional": lambda: ids / 8,
            "learned": lambda: learned,
            "grid": lambda: positions.grid(2, 2),
            "text": lambda: positions.text(3, axes=2),
            "learned grid": lambda: positions.multi_axis(learned),
        }
        return made[self.case["positions"]]()

    def _gate(self, learned: torch.Tensor | None) -> gates.Gate:
        made: dict[str, Callable[[], gates.Gate]] = {
            "scalar": lambda: gates.Scalar(learned),
            "exp": lambda: gates.Exp(learned),
            "exp per head": lambda: gates.Exp(learned),
            "exp per pair": lambda: gates.Exp(learned, "pair"),
            "slope": lambda: gates.Slope(learned),
            "given": lambda: gates.Given(learned),
            "xpos": lambda: gates.XPos(1.25, scale_base=60.0),
        }
        return made[self.case["gate"]]()


def check(call: Callable[..., Any], leaves: Mapping[str, torch.Tensor]) -> None:
    """Check first and second derivatives of a function of named tensors by finite differences.

    The tensors are converted to float64. Derivatives are compared along random directions; first
    derivatives in reverse mode, batched reverse mode and forward mode.
    """
    names = list(leaves)
    tensors = [leaves[name].detach().double().requires_grad_() for name in names]

    def by_place(*values: torch.Tensor) -> Any:
        return call(**dict(zip(names, values)))

    modes = {"check_batched_grad": True, "check_forward_ad": True}
    assert gradcheck(by_place, tensors, fast_mode=True, **modes)
    assert gradgradcheck(by_place, tensors, fast_mode=True)


def slopes(call: Call, **tensors: torch.Tensor) -> tuple[dict[str, torch.Tensor], float]:
    """Compute gradients of the tensors that require grad, for random gradients of the results.

    Returns:
        The gradients by name, and an upper bound on sums of products of results and their gradients.
    """
    leaves = {name: t.clone().requires_grad_(name in call.learned()) for name, t in tensors.items()}
    results = call(**leaves)
    grads = [noise(*y.shape, seed=9 + i).to(y.dtype) for i, y in enumerate(results)]
    found = torch.autograd.grad(results, [leaves[name] for name in call.learned()], grads)
    size = sum(
        float(y.detach().double().norm() * g.double().norm()) for y, g in zip(results, grads)
    )
    return dict(zip(call.learned(), found)), size


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_axes(number: int) -> None:
    case = CASES[number]
    call, truth = Call(case), Call({**case, "dtype": torch.float64})
    check(truth, {name: truth.leaves[name] for name in truth.learned()})
    if case["dtype"] == torch.float64:
        return
    found, _ = slopes(call, **call.leaves)
    wanted, size = slopes(truth, **{name: t.double() for name, t in call.leaves.items()})
    bound = tolerances.value(f"f and P, {str(case['dtype'])[6:]}")
    for name, slope in found.items():
        assert slope.dtype == call.leaves[name].dtype
        # Gradients of other tensors sum products of results, their gradients and at most REACH.
        reach = float(wanted[name].abs().max()) if name in ("q", "k") else REACH * size
        assert (slope.double() - wanted[name]).abs().max() <= bound * reach, (name, case)


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


@pytest.mark.one_in(8)
@both_pairings
@pytest.mark.parametrize("learns", ["x", "tables", "both"])
@pytest.mark.parametrize("lead, ids", LOOK_UPS.values(), ids=LOOK_UPS)
@pytest.mark.parametrize("tables", ["cat", "repeat", "half", "full"])
@pytest.mark.parametrize("verb", [apply_rotary_pos_emb, apply_rotary_pos_emb_])
def test_tables(
    verb: Any, tables: str, lead: tuple[int, ...], ids: Any, learns: str, interleaved: bool
) -> None:
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


@pytest.mark.one_in(12)
@pytest.mark.parametrize("shape", THETAS, ids=str)
@pytest.mark.parametrize("act", ["none", "rms_norm", *ACTS[1:]])
@pytest.mark.parametrize("verb", [lrpe_rotate_1d, lrpe_rotate_1d_])
def test_lrpe(verb: Any, act: str, shape: tuple[int, ...]) -> None:
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
        return verb(k.clone() if verb is rerotate_ else k, old, new, at, to, backend=backend)

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
