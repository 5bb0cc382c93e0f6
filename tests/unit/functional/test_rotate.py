"""The fast path of the public rotation functions gives the bits and the errors of the call that is built."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.helpers import on
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.frequencies import DynamicNTK
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.gates import Slope, XPos
from tightrope.ops import run

SPEC, BY_LENGTH = RopeSpec(8), RopeSpec(8, scaling=DynamicNTK(2.0, 4))
IDS = torch.arange(3)
WAYS: dict[str, tuple[Any, ...]] = {
    "prepared": (SPEC.at(5),),
    "prepared by ids": (SPEC.at(IDS),),
    "none": (SPEC,),
    "offset": (SPEC, 5),
    "ids": (SPEC, IDS),
    "ids of rows": (SPEC, IDS[None]),
    "fractions": (SPEC, IDS / 2),
    "per row": (SPEC, positions.per_row(torch.tensor([5]))),
    "by length": (BY_LENGTH, -1),
}
every_way = pytest.mark.parametrize("way", WAYS)
ROPES = [*WAYS.values(), (BY_LENGTH.at(IDS, seq_len=64),)]
Q, K = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)


@every_way
def test_the_fast_path_is_taken_and_gives_the_same_bits(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, rope = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), WAYS[way]
    with monkeypatch.context() as patch:
        patch.setattr(run, "route_quick", lambda *_: None)
        wanted = rotate_qk(q, k, *rope)
    monkeypatch.setattr(sys.modules["tightrope.functional._rotate"], "perform", None)
    for got in (rotate_qk(q, k, *rope), rotate_qk_(q.clone(), k.clone(), *rope)):
        assert_same_bits(got, wanted)
    version = q._version
    assert_same_bits(rotate_(q, *rope), wanted[0])
    assert q._version > version


# Positions that no call takes.
NO_POSITIONS: list[Any] = [
    *(torch.arange(4), torch.arange(1), torch.arange(6).reshape(2, 3), IDS[None, None]),
    *(IDS.bfloat16(), IDS.short(), IDS > 1, torch.tensor(3), torch.empty(3, device="meta")),
    *(positions.per_row(torch.tensor([1, 2])), positions.multi_axis(torch.zeros(2, 3))),
    *(True, 2**63, 1.5, "5", [1, 2, 3]),
]
NOT_DENSE: list[Callable[[torch.Tensor], Any]] = [
    torch.Tensor.to_mkldnn,
    torch.Tensor.to_sparse,
    lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    lambda x: torch.nested.nested_tensor([x[0], x[0, :2]], layout=torch.jagged),
]
WRONG: list[tuple[Any, Any]] = [
    *((Q[..., :6], None), (Q[0], None), (Q.int(), None), (Q, K.double()), (Q, K[..., :4])),
    *((Q, K[:, :, :2]), (Q, Q), (Q[:, :, :1].expand(1, 4, 3, 8), None), (Q.to("meta"), K)),
    *((torch.nn.Parameter(Q.clone()), None), (3, None), (None, None), ([Q], None), (Q, [Q])),
]


def refused_calls() -> dict[str, Callable[[], object]]:
    made: list[Callable[[], object]] = [
        lambda xs=xs, rope=rope: rotate_qk_(*xs, *rope) for xs in WRONG for rope in ROPES
    ]
    for where in NO_POSITIONS:
        made += [lambda w=where, spec=spec: rotate_(Q, spec, w) for spec in (SPEC, BY_LENGTH)]
    for gate in (XPos(8), Slope(torch.ones(4, 8))):
        wrong = torch.arange(4), torch.arange(6).reshape(2, 3), NO_POSITIONS[10]
        made += [lambda w=w, gate=gate: rotate(Q, SPEC, w, gate=gate) for w in wrong]
    for make in NOT_DENSE:
        for gate in (None, XPos(8)):
            made += [
                lambda make=make, gate=gate: rotate_(make(Q), SPEC, gate=gate),
                lambda make=make, gate=gate: rotate(make(Q), SPEC, 3, gate=gate),
                lambda make=make, gate=gate: rotate_qk(make(Q), Q, SPEC, gate=gate),
                lambda make=make, gate=gate: rotate_qk_(Q, make(Q), SPEC, gate=gate),
            ]
    return {str(number): call for number, call in enumerate(made)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", refused_calls().values(), ids=refused_calls())
def test_the_fast_path_raises_the_same_errors(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves some checks to the kernel, yet every error is the same, and nothing is written."""
    for rope in ROPES:
        rotate_qk(Q, K, *rope)  # a prepared rotation takes the fast path from its second call on
    errors = []
    for slow in (False, True):
        with monkeypatch.context() as patch:
            if slow:
                patch.setattr(run, "route_quick", lambda *_: None)
            with pytest.raises((TypeError, ValueError)) as error:
                call()
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
    assert errors[0][1].startswith("[rotate")
    assert_same_bits([Q, K], [torch.ones_like(Q), torch.ones_like(K)])


def test_negated_ids_by_a_gate_that_depends_on_them() -> None:
    x, ids = torch.randn(1, 4, 3, 8), torch.imag(torch.complex(torch.zeros(3), -IDS / 1).conj())
    assert ids.is_neg()
    for rope in ((SPEC, ids), (SPEC.at(ids),)):
        got = rotate(x, *rope, gate=XPos(8))
        assert_same_bits(got, rotate(x, SPEC, ids.resolve_neg(), gate=XPos(8)))
    stack, wanted = (SPEC.at(each, stack="vllm") for each in (ids, ids.clone()))
    assert_same_bits(rotate(x, stack), rotate(x, wanted))


def test_offsets_and_ids_beyond_any_length_agree() -> None:
    x, last = torch.randn(1, 4, 1, 8), 2**63 - 1
    wanted = rotate(x, BY_LENGTH, last)
    assert_same_bits(rotate(x, BY_LENGTH, torch.tensor([last])), wanted)
    assert_same_bits(rotate(x, BY_LENGTH.at(last)), on("cpu", rotate, x, BY_LENGTH, last))
