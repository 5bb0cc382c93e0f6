"""Calls of rotate, rotate_qk and their in-place forms with every valid pair of values of any two options.

Elementwise activations differ in one formula, which has tests of its own: a pair with some of them stands for all.
The laws that hold for every call draw their cases from here; see tests/laws.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tests.support import oracle, pairwise
from tests.support.helpers import noise, on
from tightrope import RopeSpec, gates, phases, positions
from tightrope.activations import ACTS, RMSNorm
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, LongRoPE, YaRN
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.ops.schema import LAYOUTS

Tensors = dict[str, torch.Tensor]

ROWS, HEADS, KV_HEADS, TOKENS, WIDTH = 2, 2, 1, 4, 8
# A bound on the positions of all cases.
REACH = 50.0
# The original length of the rules that depend on the length.
TRAINED = 64
CHANNELS = {"whole": (6, 0), "slice": (4, 1)}

# Kinds of positions that have several axes, that rows have of their own, and that heads have of their own.
SPACES = ("grid", "text", "learned grid")
OF_ROWS = ("ids per row", "per row", "learned per row", "learned offsets")
OF_HEADS = ("per head", "learned per head")

VERBS: dict[str, Callable[..., Any]] = {
    "rotate": rotate,
    "rotate_": rotate_,
    "rotate_qk": rotate_qk,
    "rotate_qk_": rotate_qk_,
}
# Each elementwise activation of a case is then replaced: see `spread`.
SOME, ELEMENTWISE = ("relu", "sigmoid", "silu"), ACTS[1 : ACTS.index("softmax")]

# A call may also have the verb "rotate into" or "rotate_qk into": it then writes into given tensors.
# What is written to slots and in float8 has no gradients: see tests/laws/test_slots.py.
AXES: dict[str, Any] = {
    "verb": tuple(VERBS),
    "layout": LAYOUTS,
    "interleaved": (False, True),
    "channels": tuple(CHANNELS),
    "frequencies": ("spec", "prepared", "by length", "learned", "learned per head"),
    "positions": (
        *("none", "offset", "ids", "fractional", "learned"),
        *(*OF_ROWS, *OF_HEADS, *SPACES),
    ),
    "act": ("none", "rms_norm per head", *SOME, "softmax", "rms_norm"),
    "phases": ("none", "given", "given per head", "shared", "running"),
    "gate": (
        *("none", "scalar", "exp", "exp per head", "exp per pair", "slope", "given", "xpos"),
        "factor per head",
    ),
    "rounding": ("once", "each", ("wide", "each")),
    "inverse": (False, True),
    "amplitude": (1.0, 1.3),
    "learns": ("everything", "x", "the rest"),
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "backend": (None, "reference"),
}


def allowed(case: Mapping[str, Any]) -> bool:
    """Return whether the values chosen so far are compatible."""
    no_heads, where = case.get("layout") in ("bsd", "sd"), case.get("positions")
    both = case.get("verb") in ("rotate_qk", "rotate_qk_")
    return not (
        (case.get("inverse") and case.get("act", "none") != "none")
        or (
            case.get("rounding", "once") != "once"
            and {case.get("act", "none"), case.get("gate", "none")} != {"none"}
        )
        or (where in SPACES and case.get("frequencies") == "by length")
        or (case.get("layout") in ("thd", "sd") and where in OF_ROWS)
        or (no_heads and (case.get("frequencies") == "learned per head" or where in OF_HEADS))
        or (no_heads and "per head" in (case.get("gate", "") + case.get("act", "")))
        or (no_heads and both)
        or ((no_heads or both) and case.get("phases") == "given per head")
        or (where in SPACES and case.get("gate") in ("slope", "xpos"))
    )


def spread(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace elementwise activations: each comes as often as the others, with as many dtypes and both backends."""
    met: Counter[Any] = Counter()
    for case in cases:
        if case["act"] in SOME:
            near = case["dtype"], case["backend"]
            case["act"] = min(
                ELEMENTWISE, key=lambda act: (sum(met[act, x] > 0 for x in near), met[act])
            )
            met.update([case["act"], *((case["act"], x) for x in near)])
    return cases


CASES = spread(pairwise.covering(AXES, allowed))


def is_defined(case: Mapping[str, Any]) -> bool:
    """Return whether the definition rotates a case, in plain torch, whose rounding depends on sizes and strides."""
    wide = case["dtype"] == torch.float64 and (case["act"], case["gate"]) != ("none", "none")
    return case["backend"] == "reference" or wide


def spec_of(case: Mapping[str, Any]) -> RopeSpec:
    rotary_dim, start = CHANNELS[case["channels"]]
    rules: dict[float, Any] = {1.0: None, 1.3: YaRN(4.0, 64, attention_factor=1.3)}
    if case["frequencies"] == "by length":
        longer = (1.0,) * (rotary_dim // 2), (2.0,) * (rotary_dim // 2)
        scaled = LongRoPE(*longer, TRAINED, short_mscale=1.3, long_mscale=1.3)
        rules = {1.0: DynamicNTK(2.0, TRAINED), 1.3: scaled}
    return RopeSpec(
        WIDTH,
        base=50.0,
        rotary_dim=rotary_dim,
        start=start,
        interleaved=case["interleaved"],
        scaling=rules[case["amplitude"]],
        axes=Axes.blocks((1, rotary_dim // 2 - 1)) if case["positions"] in SPACES else None,
    )


def mapped(case: Mapping[str, Any], **changes: Any) -> Call:
    """Return the call of a case for vmap, which writes only into tensors that are mapped."""
    verb = case["verb"].rstrip("_") if case["learns"] == "the rest" else case["verb"]
    return Call({**case, "verb": verb, **changes})


class Derivatives(NamedTuple):
    """What a call gives: results, their random gradients, and first and second derivatives by name."""

    results: list[torch.Tensor]
    grads: list[torch.Tensor]
    first: Tensors
    second: Tensors


class Call:
    """The call of a case as a function of its differentiable tensors.

    Attributes:
        leaves: these tensors by name; q and k have the dtype of the case, the others float64.
    """

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case
        self.spec = spec_of(case)
        self.rows, self.heads = slice(None), slice(None)
        spec, layout, dtype = self.spec, case["layout"], case["dtype"]
        heads = {"q": HEADS, "k": KV_HEADS if "qk" in case["verb"] else 0}
        self.leaves: Tensors = {}
        for seed, (name, count) in enumerate(heads.items()):
            sizes = {"b": ROWS, "h": count, "d": WIDTH}
            shape = [sizes.get(letter, TOKENS) for letter in layout]
            if count:
                # Keep x away from 0, the kink of relu.
                x = noise(*shape, seed=seed)
                self.leaves[name] = (x + 0.1 * x.sign()).to(dtype)
        if "norm" in case["act"]:
            heads = (HEADS,) if "head" in case["act"] else ()
            self.leaves["weight"] = noise(*heads, WIDTH, seed=2)
        pairs = spec.rotary_dim // 2
        gate = {
            "scalar": lambda: noise(1)[0].abs() + 0.5,
            "exp": lambda: 0.3 * noise(WIDTH, seed=3),
            "exp per head": lambda: 0.3 * noise(HEADS, WIDTH, seed=3),
            "exp per pair": lambda: 0.3 * noise(pairs, seed=3),
            "slope": lambda: 0.02 * noise(WIDTH, seed=3),
            "given": lambda: 0.3 * noise(TOKENS, 1, WIDTH, seed=3),
            "factor per head": lambda: (lambda x: x + 0.5 * x.sign())(noise(HEADS, WIDTH, seed=3)),
        }.get(case["gate"])
        if gate is not None:
            self.leaves["gate"] = gate()
        if case["frequencies"].startswith("learned"):
            count = (1,) if case["frequencies"] == "learned" else (HEADS,)
            shape = (2, *count, pairs) if spec.axes else (*count, pairs)
            self.leaves["inv_freq"] = 0.5 + noise(*shape, seed=4).abs()
        if case["phases"] != "none":
            own = ROWS if "b" in layout else 1, HEADS if "head" in case["phases"] else 1
            sizes = (1, 1, TOKENS, 1) if case["phases"] == "shared" else (*own, TOKENS, pairs)
            self.leaves["phases"] = 3 * noise(*sizes, seed=6)
        where = {
            "learned": (TOKENS,),
            "learned per row": (ROWS, TOKENS),
            "learned offsets": (ROWS,),
            "learned per head": (HEADS, TOKENS),
            "learned grid": (2, 1, TOKENS),
        }.get(case["positions"])
        if where is not None:
            self.leaves["positions"] = 5 * noise(*where, seed=5)

    def part(self, axis: str, index: int) -> Call:
        """Return the call of x alone for one row ("b") or one head ("h") of this one."""
        own, part = slice(index, index + 1), copy.copy(self)
        part.rows, part.heads = (own, self.heads) if axis == "b" else (self.rows, own)
        # The dimension of rows or heads of each tensor that has one.
        where = "per head" if axis == "h" else "per row"
        dims = {
            "q": self.case["layout"].index(axis),
            "weight": 0 if where in self.case["act"] else None,
            "gate": 0 if where in self.case["gate"] else None,
            "inv_freq": -2 if where in self.case["frequencies"] else None,
            "phases": "bh".index(axis),
            "positions": 0,
        }
        if axis == "h" and where not in self.case["positions"]:
            dims["positions"] = None
        if axis == "b" and self.case["positions"] not in OF_ROWS:
            dims["positions"] = None
        part.leaves = {
            name: x
            if dims[name] is None or x.shape[dims[name]] == 1
            else x.narrow(dims[name] % x.dim(), index, 1)
            for name, x in self.leaves.items()
            if name != "k"
        }
        return part

    def learned(self) -> list[str]:
        """Return the names of the tensors that require grad."""
        own = [name for name in self.leaves if name in ("q", "k")]
        rest = [name for name in self.leaves if name not in own]
        return {"everything": own + rest, "x": own, "the rest": rest or own}[self.case["learns"]]

    def new_leaves(
        self, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return copies of the leaves, or of other tensors of these names, and those of them that require grad."""
        names = self.learned()
        copies = {
            name: x.detach().clone().requires_grad_(name in names)
            for name, x in (tensors or self.leaves).items()
        }
        return copies, {name: copies[name] for name in names}

    def derivatives(
        self, twice: bool = False, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Derivatives:
        """Compute results, and their gradients for random gradients of the results.

        Args:
            twice: whether to also differentiate a random sum of these gradients, by the same tensors and by the
                gradients of the results.
            tensors: in place of the leaves.
        """
        leaves, learned = self.new_leaves(tensors)
        results = self(**leaves)
        grads = [noise(*y.shape, seed=9 + i).to(y.dtype) for i, y in enumerate(results)]
        by = {f"gradient {i}": grad.requires_grad_(twice) for i, grad in enumerate(grads)}
        first = torch.autograd.grad(results, list(learned.values()), grads, create_graph=twice)
        second: Tensors = {}
        if twice:
            sums = [(y.double().flatten() * noise(y.numel(), seed=20)).sum() for y in first]
            second = learned | by
            values = torch.autograd.grad(sum(sums), list(second.values()), materialize_grads=True)
            second = dict(zip(second, values))
        first = {name: slope.detach() for name, slope in zip(learned, first)}
        return Derivatives(list(results), grads, first, second)

    def __call__(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results for these tensors, and the leaves of other names."""
        return self.run(*self.arguments(**tensors))

    def run(
        self, xs: list[torch.Tensor], rope: Any, options: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Return the results for these arguments."""
        verb, _, into = self.case["verb"].partition(" ")
        if verb.endswith("_"):
            # In-place calls need tensors that are not leaves.
            xs = [x.clone() for x in xs]
        if into:
            outs = tuple(torch.empty_like(x) for x in xs)
            options = options | {"out": outs if len(xs) == 2 else outs[0]}
        made = on(self.case["backend"], VERBS[verb], *xs, *rope, **options)
        return (made,) if isinstance(made, torch.Tensor) else made

    def arguments(self, **tensors: torch.Tensor) -> tuple[list[torch.Tensor], Any, dict[str, Any]]:
        """Return x or q and k, the rotation and its positions, and the options of the call."""
        case, given = self.case, self.leaves | tensors
        where = self._positions(given.get("positions"))
        stated: dict[str, Any] = {}
        if case["frequencies"] == "by length":
            lengths, rows = [60, 90][self.rows], oracle.as_bhsd(given["q"], case["layout"]).shape[0]
            stated["seq_len"] = lengths if rows == len(lengths) else 90
        if "inv_freq" in given:
            stated["inv_freq"] = given["inv_freq"]
        if "phases" in given:
            made = phases.given(given["phases"])
            if case["phases"] == "running":
                made = phases.running(given["phases"], reset=torch.arange(TOKENS) == 2)
            elif case["phases"] == "given" and "k" in given:
                made = made, phases.given(-given["phases"])
            stated["phases"] = made
        if case["rounding"] != "once":
            stated["rounding"] = case["rounding"]
        rope: Any = (self.spec, where)
        if stated or case["frequencies"] == "prepared":
            rope = (self.spec.at(where, device=given["q"].device, **stated),)
        options: dict[str, Any] = {name: case[name] for name in ("layout", "inverse")}
        xs = [given[name] for name in ("q", "k") if name in given]
        if case["act"] != "none":
            norm = RMSNorm(given["weight"], 1e-3) if "weight" in given else None
            options["act"] = norm or case["act"]
            if case["act"] in ELEMENTWISE and len(xs) == 2 and case["interleaved"]:
                options["act"] = case["act"], "relu"  # two kinds of f are two calls of the operator
            if norm and len(xs) == 2:
                options["act"] = norm, RMSNorm(-given["weight"], 1e-3)
        if case["gate"] != "none":
            options["gate"] = gate = self._gate(given.get("gate"))
            if case["gate"] == "exp" and len(xs) == 2:
                options["gate"] = gate, gates.Exp(-given["gate"])
        if len(xs) == 2 and (
            "per head" in case["frequencies"] + case["gate"] + case["act"]
            or case["positions"] in OF_HEADS
        ):
            # What differs between heads needs as many of them in k as in q.
            xs[1] = xs[1].repeat_interleave(HEADS // KV_HEADS, case["layout"].index("h"))
        return xs, rope, options

    def _positions(self, learned: torch.Tensor | None) -> Any:
        ids = torch.tensor([3, -2, 7, 40]).repeat(TOKENS // 4)
        rows, heads = torch.arange(ROWS)[self.rows, None], torch.arange(HEADS)[self.heads, None]
        made: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "offset": lambda: 7,
            "ids": lambda: ids,
            "ids per row": lambda: ids + 5 * rows,
            "per row": lambda: positions.per_row(3 * rows[:, 0]),
            "fractional": lambda: ids / 8,
            "learned": lambda: learned,
            "learned per row": lambda: learned,
            "learned offsets": lambda: positions.per_row(learned),
            "per head": lambda: positions.per_head(ids + 5 * heads),
            "learned per head": lambda: positions.per_head(learned),
            "grid": lambda: positions.grid(2, TOKENS // 2),
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
            "factor per head": lambda: gates.Factor(learned),
        }
        return made[self.case["gate"]]()
