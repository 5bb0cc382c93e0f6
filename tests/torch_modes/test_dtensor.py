"""Calls on DTensors: what each process gets is its part of what one process gets, to the bit.

Each rank is played after the other: see tests/support/dtensors.py. Gradients that several ranks share are their
contributions, which the tests add up. `processes/sharded.py` runs calls on DTensors on real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support import calls
from tests.support.calls import Call
from tests.support.dtensors import (
    BHSD,
    IDS,
    RANKS,
    SPEC,
    By,
    Dims,
    K,
    Q,
    assert_parts,
    cos_sin,
    place,
    placements_of,
    rank,
    share,
)
from tests.support.helpers import noise
from tests.support.tolerances import assert_near
from tightrope import RopeSpec, gates, positions
from tightrope.frequencies import DynamicNTK, Given
from tightrope.functional import (
    PolarState,
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    polar_scan,
    rerotate,
    rotary_apply,
    rotary_pos_embedding,
    rotate,
    rotate_qk,
)

Placed = Mapping[str, tuple[torch.Tensor, Dims]]
AXES = ("row", "head", "token")


@dataclass
class Case:
    """One call, its tensors, and the axes of their dimensions.

    Attributes:
        function: takes the tensors by name.
        sharded: tensors that are rotated, and the dimensions of their axes; results have these placements,
            in this order.
        others: other tensors.
        results: the dimensions of the axes of results that are not placed like the sharded tensors.
        only: the axes that may be sharded.
    """

    function: Callable[..., Any]
    sharded: Placed
    others: Placed = field(default_factory=dict)
    results: Sequence[Dims] = ()
    only: Sequence[str] = AXES

    def __call__(self, tensors: Mapping[str, Any]) -> list[Any]:
        found = self.function(**tensors)
        return [y for y in ([found] if isinstance(found, torch.Tensor) else found) if y is not None]

    def placements(self, by: By) -> list[list[Any]]:
        """Return the placements of the results."""
        dims = self.results or [dims for _, dims in self.sharded.values()]
        return [placements_of(own, by) for own in dims]

    def divisions(self) -> list[By]:
        """Return the ways to divide its tensors."""
        has = next(iter(self.sharded.values()))[1]
        may = {None, *(axis for axis in self.only if axis in has)}
        return [by for by in BYS if may.issuperset(by)]


BSHD, THD = {"row": 0, "token": 1, "head": 2}, {"token": 0, "head": 1}
OF_HEADS, OF_TOKENS, OF_BOTH = {"head": 0}, {"token": 0}, {"row": 0, "token": 1}
QK: Placed = {"q": (Q, BHSD), "k": (K, BHSD)}
HEADS_LAST: Placed = {"x": (Q.transpose(1, 2), BSHD)}
NARROW: Placed = {"q": (Q.float(), BHSD), "k": (K.float(), BHSD)}


def two(function: Callable[..., Any], **others: tuple[torch.Tensor, Dims]) -> Case:
    """Return a case that rotates q and k."""
    return Case(function, QK, others)


def one(function: Callable[..., Any], **others: tuple[torch.Tensor, Dims]) -> Case:
    """Return a case that rotates x."""
    return Case(function, {"x": (Q, BHSD)}, others)


def lrpe(function: Callable[..., Any], *only: str, **others: tuple[torch.Tensor, Dims]) -> Case:
    """Return a case that rotates x with the heads after the tokens."""
    return Case(function, HEADS_LAST, others, (), only or AXES)


def by_ids(q: Any, k: Any, ids: Any) -> Any:
    return rotate_qk(q, k, SPEC, ids)


def scan(q: Any, k: Any, v: Any, decay: Any, memory: Any) -> Any:
    state, gate = PolarState(memory, 0), gates.Exp(noise(16, seed=8))
    out, new = polar_scan(q, k, v, SPEC, decay, 4, gate=gate, state=state)
    return out, new.memory


def tables(dims: Dims, *shape: int) -> dict[str, tuple[torch.Tensor, Dims]]:
    return {name: (table, dims) for name, table in cos_sin(*shape).items()}


PREPARED = SPEC.at(IDS)
# Rows that begin at 0, as those of whole sequences do.
WHOLE = IDS.sort().values - IDS.amin(1, keepdim=True)
EARLY = RopeSpec(16, scaling=DynamicNTK(4.0, 4))
WITH_HEADS = RopeSpec(16, scaling=Given(noise(6, 8, seed=4).tolist()))
PACKED = positions.packed(torch.tensor([0, 4, 13]))
CASES = {
    "uneven ids": two(by_ids, ids=(IDS, OF_BOTH)),
    "prepared": Case(
        lambda q, k: (*rotate_qk(q, k, PREPARED), *rotate_qk(q, k, PREPARED)),
        QK,
        results=(BHSD,) * 4,
    ),
    "packed": Case(
        lambda q, k: rotate_qk(q, k, SPEC, PACKED, layout="thd"),
        {"q": (Q[0].transpose(0, 1), THD), "k": (K[0].transpose(0, 1), THD)},
    ),
    "length from positions": two(lambda q, k: rotate_qk(q, k, EARLY, -7)),
    "length from ids": two(lambda q, k: rotate_qk(q, k, EARLY, WHOLE)),
    "spec with heads": one(lambda x: rotate(x, WITH_HEADS)),
    "a stack by length": Case(lambda q, k: rotate_qk(q, k, EARLY.at(stack="transformers")), NARROW),
    "lrpe, θ of heads": lrpe(
        lrpe_rotate_1d, theta=(noise(6, seed=4), OF_HEADS), offset=(IDS[:, 0], {"row": 0})
    ),
    "lrpe, θ of pairs": lrpe(
        lambda x, theta: lrpe_rotate_1d(x, theta, act="softmax", dim=-1),
        theta=(noise(5, seed=4), {}),
    ),
    "lrpe, softmax of tokens": lrpe(
        lambda x: lrpe_rotate_1d(x, noise(8, seed=4), act="softmax", dim=1), "row", "head"
    ),
    "tables": two(
        lambda q, k, cos, sin: apply_rotary_pos_emb(q, k, cos, sin, tables="half"),
        **tables(OF_BOTH, 3, 13, 7),
    ),
    "tables of tokens": two(
        lambda q, k, cos, sin: apply_rotary_pos_emb(q, k, cos, sin, tables="full"),
        **tables(OF_TOKENS, 13, 14),
    ),
    "tables of heads": lrpe(
        lambda x, cos, sin: apply_rotary_pos_emb(x, None, cos, sin, 2, tables="half"),
        **tables({"token": 1, "head": 2}, 1, 13, 6, 8),
    ),
    "tables and ids": two(
        lambda q, k, cos, sin, ids: apply_rotary_pos_emb(
            q, k, cos, sin, tables="half", position_ids=ids
        ),
        **tables({}, 50, 8),
        ids=(IDS % 50, OF_BOTH),
    ),
    "rotary_apply": one(rotary_apply, **tables({"row": 0, "token": 2}, 3, 1, 13, 8)),
    "rotary_pos_embedding": one(lambda x: rotary_pos_embedding(x)),
    "rerotate": one(
        lambda x: rerotate(x, SPEC, RopeSpec(16, base=5e5, rotary_dim=12, start=2), IDS, IDS + 3)
    ),
    "scan": Case(
        scan,
        {
            "q": (noise(3, 8, 13, 16), BHSD),
            "k": (noise(3, 4, 13, 16, seed=1), BHSD),
            "v": (noise(3, 4, 13, 8, seed=7), BHSD),
        },
        {
            "decay": (-noise(3, 4, 13, 1, seed=5).abs(), BHSD),
            "memory": (noise(3, 4, 16, 8, seed=6), {"row": 0, "head": 1}),
        },
        results=(BHSD, BHSD),
        only=("row", "head"),
    ),
}
BYS: dict[By, tuple[int, ...]] = {
    (None,): (4,),
    ("row",): (4,),
    ("head",): (4,),
    ("token",): (4,),
    ("row", "head"): (2, 2),
    ("head", "token"): (2, 2),
    ("token", "token"): (2, 2),
    (None, "token"): (2, 2),
}
# --- calls with all pairs of options ------------------------------------------------------------------


def of_generator(options: Mapping[str, Any]) -> Case:
    """Return a call of tests/support/calls.py."""
    call, layout = Call(options), options["layout"].replace("t", "s")
    letters = {"row": "b", "head": "h", "token": "s"}
    of_x = {axis: layout.index(each) for axis, each in letters.items() if each in layout}
    of_positions = {
        "learned": OF_TOKENS,
        "learned per row": OF_BOTH,
        "learned offsets": {"row": 0},
        "learned per head": {"head": 0, "token": 1},
        "learned grid": {"token": 2},
    }
    dims: dict[str, Dims] = {
        "q": of_x,
        "k": of_x,
        "weight": OF_HEADS if "head" in options["act"] else {},
        "gate": {"exp per head": OF_HEADS, "factor per head": OF_HEADS, "given": OF_TOKENS}.get(
            options["gate"], {}
        ),
        "positions": of_positions.get(options["positions"], {}),
    }
    if "inv_freq" in call.leaves and "head" in options["frequencies"]:
        dims["inv_freq"] = {"head": call.leaves["inv_freq"].dim() - 2}
    both = {name: (x, dims.get(name, {})) for name, x in call.leaves.items()}
    return Case(
        call,
        {name: pair for name, pair in both.items() if name in "qk"},
        {name: pair for name, pair in both.items() if name not in "qk"},
    )


def local(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the case in float64; q is alone where k would be repeated for its heads, which communicates."""
    per_head = any("per head" in str(value) for value in case.values())
    verb = case["verb"].replace("_qk", "") if per_head else case["verb"]
    return {**case, "verb": verb, "dtype": torch.float64, "backend": None}


# Phases are refused with DTensors.
GENERATED = [local(case) for case in calls.CASES if case["phases"] == "none"][::5]
CASES |= {str(number): of_generator(options) for number, options in enumerate(GENERATED)}


# --- results and gradients ----------------------------------------------------------------------------


def placed(case: Case, mesh: Any, by: By, mode: str) -> dict[str, Any]:
    """Return the tensors of a case on a mesh: the others plain, replicated, or sharded with the rest."""
    given = {
        key: place(x, mesh, *placements_of(dims, by)) for key, (x, dims) in case.sharded.items()
    }
    for key, (x, dims) in case.others.items():
        own = placements_of(dims if mode == "sharded" else {}, by)
        given[key] = x.clone() if mode == "plain" else place(x, mesh, *own)
    return given


def check_results(
    case: Case, mesh: Any, by: By, found: Sequence[Any], wanted: Sequence[torch.Tensor]
) -> None:
    for own, one, whole in zip(case.placements(by), found, wanted, strict=True):
        assert isinstance(one, DTensor)
        assert list(one.placements) == own
        strides = [
            [step for step, size in zip(x.stride(), x.shape) if size > 1] for x in (one, whole)
        ]
        assert strides[0] == strides[1]  # those of dimensions of size 1 mean nothing
        assert (one.shape, one.dtype) == (whole.shape, whole.dtype)
        assert_parts([one], [whole], mesh, *own)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    """With the other tensors plain, where nothing learns, replicated, and sharded."""
    case = CASES[name]
    leaves = {
        key: x.clone().requires_grad_(x.is_floating_point())
        for key, (x, _) in (*case.sharded.items(), *case.others.items())
    }
    wanted = case(leaves)
    weights = [noise(*y.shape, seed=9, dtype=y.dtype) for y in wanted]
    floating = [key for key, x in leaves.items() if x.requires_grad]
    grads = torch.autograd.grad(wanted, [leaves[key] for key in floating], weights)
    whole = dict(zip(floating, grads))
    for by in case.divisions():
        for mode in ("plain", "replicated", "sharded")[: 3 if case.others else 2]:
            learned = [] if mode == "plain" else floating
            sums = {key: torch.zeros_like(whole[key]) for key in learned if key in case.others}
            for number in range(RANKS):
                with rank(number, *BYS[by]) as mesh:
                    given = placed(case, mesh, by, mode)
                    for key in learned:
                        given[key].requires_grad_()
                    found = case(given)
                    check_results(case, mesh, by, found, wanted)
                    if not learned:
                        continue
                    own = [share(g, mesh, p) for g, p in zip(weights, case.placements(by))]
                    local = [y.to_local() for y in found]
                    grads = torch.autograd.grad(local, [given[key] for key in learned], own)
                    for key, grad in zip(learned, grads):
                        assert isinstance(grad, DTensor)
                        assert grad.placements == given[key].placements
                        assert grad.shape == whole[key].shape
                        if key in sums:
                            # Ranks of a dimension that divides nothing contribute the same.
                            times = [mesh.size(at) for at, axis in enumerate(by) if axis is None]
                            part = share(sums[key], mesh, grad.placements)
                            part += grad.to_local() / torch.tensor(times).prod()
                        else:
                            assert_parts([grad], [whole[key]], mesh, *grad.placements)
            for key, total in sums.items():
                assert_near(total, whole[key], "gradient added up over ranks")
