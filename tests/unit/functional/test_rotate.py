"""Public rotation functions, compared with each other."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec, positions
from tightrope.frequencies import DynamicNTK
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.gates import Slope, XPos
from tightrope.ops import run

WAYS: dict[str, tuple[Any, ...]] = {
    "prepared": (RopeSpec(8).at(5),),
    "prepared by ids": (RopeSpec(8).at(torch.arange(3)),),
    "none": (RopeSpec(8),),
    "offset": (RopeSpec(8), 5),
    "ids": (RopeSpec(8), torch.arange(3)),
    "ids of rows": (RopeSpec(8), torch.arange(3)[None]),
    "fractions": (RopeSpec(8), torch.arange(3) / 2),
    "per row": (RopeSpec(8), positions.per_row(torch.tensor([5]))),
    "by length": (RopeSpec(8, scaling=DynamicNTK(2.0, 4)), -1),
}
# Positions that no call takes.
NO_POSITIONS: list[Any] = [
    torch.arange(4),
    torch.arange(1),
    torch.arange(6).reshape(2, 3),
    torch.arange(3).bfloat16(),
    torch.arange(3).short(),
    torch.arange(3) > 1,
    torch.arange(3)[None, None],
    torch.tensor(3),
    torch.empty(3, device="meta"),
    positions.per_row(torch.tensor([1, 2])),
    positions.multi_axis(torch.zeros(2, 3)),
    True,
    2**63,
    1.5,
    "5",
    [1, 2, 3],
]


def built(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    """Run a call without the fast path."""
    with monkeypatch.context() as patch:
        patch.setattr(run, "route_quick", lambda *_: None)
        return call()


def assert_same_error(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    """Assert that a call raises the same error with and without the fast path."""
    errors = []
    for way in (lambda call: call(), partial(built, monkeypatch)):
        with pytest.raises((TypeError, ValueError)) as error:
            way(call)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("way", WAYS)
def test_the_fast_path_is_taken_and_gives_the_same_bits(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    wanted = built(monkeypatch, lambda: rotate_qk(q, k, *WAYS[way]))
    monkeypatch.setattr(sys.modules["tightrope.functional._rotate"], "perform", None)
    for got in (rotate_qk(q, k, *WAYS[way]), rotate_qk_(q.clone(), k.clone(), *WAYS[way])):
        assert all(map(torch.equal, got, wanted))
    version = q._version
    assert torch.equal(rotate_(q, *WAYS[way]), wanted[0])
    assert q._version > version


@pytest.mark.parametrize("way", WAYS)
def test_the_fast_path_raises_the_same_errors(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path leaves some checks to the kernel, yet every error is the same."""
    q, k = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    rope = WAYS[way]
    rotate_qk(q, k, *rope)
    wrong: list[tuple[torch.Tensor, torch.Tensor | None]] = [
        (q[..., :6], None),
        (q[0], None),
        (q.int(), None),
        (q, k.double()),
        (q, k[..., :4]),
        (q, k[:, :, :2]),
        (q, q),
        (q[:, :, :1].expand(1, 4, 3, 8), None),
        (q.to("meta"), k),
        (torch.nn.Parameter(q.clone()), None),
    ]
    before = q.clone()
    for x, y in wrong:
        assert_same_error(monkeypatch, lambda: rotate_qk_(x, y, *rope))  # noqa: B023
    assert torch.equal(q, before)
    for not_a_tensor in (3, None, [q]):
        with pytest.raises(TypeError, match=r"^\[rotate_qk_\] q must be a tensor"):
            rotate_qk_(not_a_tensor, None, *rope)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^\[rotate_qk_\] k must be a tensor"):
            rotate_qk_(q, [q], *rope)  # type: ignore[type-var]


NOT_DENSE: dict[str, Callable[[torch.Tensor], Any]] = {
    "mkldnn": lambda x: x.to_mkldnn(),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[0, :2]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("gate", [None, XPos(8)])
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_the_fast_path_leaves_tensors_that_are_not_dense(
    kind: str, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(1, 4, 3, 8)
    other, spec = NOT_DENSE[kind](x), RopeSpec(8)
    for call in (
        lambda: rotate_(other, spec, gate=gate),
        lambda: rotate(other, spec, 3, gate=gate),
        lambda: rotate_qk(other, x, spec, gate=gate),
        lambda: rotate_qk_(x, other, spec, gate=gate),
    ):
        assert_same_error(monkeypatch, call)
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.parametrize("gate", [XPos(8), Slope(torch.ones(4, 8))], ids=["xPos", "slope"])
@pytest.mark.parametrize(
    "where",
    [torch.arange(4), torch.arange(6).reshape(2, 3), positions.multi_axis(torch.zeros(2, 3))],
    ids=["tokens", "rows", "axes"],
)
def test_the_fast_path_raises_the_same_errors_with_a_gate(
    gate: Any, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(1, 4, 3, 8)
    assert_same_error(monkeypatch, lambda: rotate(x, RopeSpec(8), where, gate=gate))


def test_negated_ids_by_a_gate_that_depends_on_them() -> None:
    x = torch.randn(1, 4, 3, 8)
    ids = torch.imag(torch.complex(torch.zeros(3), -torch.arange(3.0)).conj())
    assert ids.is_neg()
    for rope in ((RopeSpec(8), ids), (RopeSpec(8).at(ids),)):
        got = rotate(x, *rope, gate=XPos(8))
        assert torch.equal(got, rotate(x, RopeSpec(8), ids.resolve_neg(), gate=XPos(8)))
    stack = RopeSpec(8).at(ids, stack="vllm")
    assert torch.equal(rotate(x, stack), rotate(x, RopeSpec(8).at(ids.clone(), stack="vllm")))


def test_offsets_and_ids_beyond_any_length_agree() -> None:
    spec, x = RopeSpec(8, scaling=DynamicNTK(2.0, 4)), torch.randn(1, 4, 1, 8)
    last = 2**63 - 1
    assert torch.equal(rotate(x, spec, last), rotate(x, spec, torch.tensor([last])))
    assert torch.equal(rotate(x, spec.at(last)), rotate(x, spec, last, backend="cpu"))


@pytest.mark.parametrize("rule", [None, DynamicNTK(2.0, 4)])
@pytest.mark.parametrize("where", NO_POSITIONS, ids=repr)
def test_the_fast_path_refuses_the_same_positions(
    where: Any, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, x = RopeSpec(8, scaling=rule), torch.ones(1, 4, 3, 8)
    rotate(x, spec)
    assert_same_error(monkeypatch, lambda: rotate_(x, spec, where))
    assert torch.equal(x, torch.ones_like(x))


test_k_alone_is_told_what_to_call = refusals(
    TypeError={
        f"[{function.__name__}] q must be a tensor but got None; to rotate k alone, call "
        f"{alone}(k, …).": partial(function, None, torch.ones(1, 2, 3, 8), RopeSpec(8))
        for function, alone in ((rotate_qk, "rotate"), (rotate_qk_, "rotate_"))
    }
)
