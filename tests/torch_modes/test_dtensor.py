"""Calls on DTensors: what each process gets is its part of what one process gets, to the bit.

Each rank is played after the other: see tests/support/dtensors.py. Gradients that several ranks share are their
contributions, which the tests add up. `processes/sharded.py` runs calls on DTensors on real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from tests.support.refused_calls import NAMES
from tests.support.rows import read_rows
from tests.support.tolerances import assert_near
from tightrope import RopeSpec, positions
from tightrope.frequencies import DynamicNTK, Given

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
X: Placed = {"x": (Q, BHSD)}
QK: Placed = {"q": (Q, BHSD), "k": (K, BHSD)}
HEADS_LAST: Placed = {"x": (Q.transpose(1, 2), BSHD)}


def tables(dims: Dims, *shape: int) -> dict[str, tuple[torch.Tensor, Dims]]:
    return {name: (table, dims) for name, table in cos_sin(*shape).items()}


PREPARED = SPEC.at(IDS)
# Rows that begin at 0, as those of whole sequences do.
WHOLE = IDS.sort().values - IDS.amin(1, keepdim=True)
EARLY = RopeSpec(16, scaling=DynamicNTK(4.0, 4))
WITH_HEADS = RopeSpec(16, scaling=Given(noise(6, 8, seed=4).tolist()))
PACKED = positions.packed(torch.tensor([0, 4, 13]))


def case_of(row: Mapping[str, str]) -> Case:
    """Return the case of a row of dtensor_calls.jsonl: a call of `x`, its rotated tensors, and of other ones."""
    names = {**NAMES, **globals()}
    x, others, results = (eval(row.get(key, "{}"), names) for key in ("x", "others", "results"))
    function = eval(f"lambda {', '.join([*x, *others])}: {row['call']}", names)
    return Case(function, x, others, results, row["only"].split() if "only" in row else AXES)


CASES = {
    name: case_of(row)
    for name, row in read_rows(Path(__file__).with_name("dtensor_calls.jsonl")).items()
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
