"""Lengths that cannot be read, while compiling, exporting or on a device; and transforms."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import oracle
from tests.support.by_length import LONG, RULES, SHORT, UNEQUAL, every_rule, rule_of, spec_of
from tests.support.helpers import noise
from tests.support.matrix import every_pair
from tests.support.tolerances import assert_near, assert_rotations, assert_same_bits
from tightrope import positions
from tightrope.frequencies import LongRoPE
from tightrope.functional import rotate

OF_INTS = "offset", "seq_len", "tokens"
UNREAD = (*OF_INTS, "a tensor of lengths", "offsets per row", "ids per row")


def steps(kind: str) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """Yield x, positions and seq_len of calls with lengths below and above 100."""
    for number in (3, 4, 94, 95, 96, 97, 250, 1000):
        tokens = {"tokens": number, "seq_len": 5, "a tensor of lengths": 5}.get(kind, 1)
        rows = torch.tensor([number, 5])
        where, seq_len = {
            "offset": (number, None),
            "seq_len": (-2, number),
            "a tensor of lengths": (-2, rows),
            "offsets per row": (positions.per_row(rows), None),
            "ids per row": (rows[:, None], None),
            "tokens": (0, None),
        }[kind]
        yield noise(2, 1, tokens, 12, dtype=torch.float32), where, seq_len


def assert_one_turn(got: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> None:
    """Assert closeness: a graph computes phase words in float64, with an error below float32's resolution."""
    assert_rotations(got, wanted, oracle.pair_lengths(x, 8, start=2), 2, 1000.0)


@pytest.mark.one_in(4)
@every_pair(
    lambda case: (
        case.get("rule") != "unequal"
        or (case.get("kind") in (None, *OF_INTS) and case.get("dynamic", True))
    ),
    rule=(*RULES, "unequal"),
    dynamic=(True, None),
    kind=UNREAD,
)
def test_one_graph_for_all_lengths(rule: str, dynamic: bool | None, kind: str) -> None:
    """Or one for short and one for long rows, where their factors differ."""
    unequal = LongRoPE(SHORT, LONG, 100, short_mscale=1.25, long_mscale=1.5)
    spec = spec_of(unequal if rule == "unequal" else rule_of(rule, 100, 4.0))
    by_row = "row" in kind or "tensor" in kind

    def turn(x: torch.Tensor, where: Any, seq_len: Any) -> torch.Tensor:
        return rotate(x, spec.at(where, seq_len=seq_len))

    torch.compiler.reset()
    graphs = CompileCounterWithBackend("eager")
    run = torch.compile(turn, fullgraph=True, backend=graphs, dynamic=dynamic)
    for call in steps(kind):
        got, wanted = run(*call), turn(*call)
        if rule == "dynamic":
            assert_one_turn(got, wanted, call[0])
        else:
            assert_same_bits(got, wanted)
    # Unless dynamic=True, the first graph is for the first int or size only, and the second for all others.
    assert graphs.frame_count == (1 if (dynamic and rule != "unequal") or by_row else 2)


@pytest.mark.one_in(2)
@every_pair(
    rule=tuple(RULES), kind=("offset", "an offset that is read", "seq_len"), strict=(False, True)
)
def test_an_exported_program_takes_all_lengths(rule: str, kind: str, strict: bool) -> None:
    """Eager code refuses several tokens after position 0 without their length; a program cannot see them."""
    spec, read = spec_of(rule_of(rule, 100, 4.0)), kind == "an offset that is read"

    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
            if kind == "seq_len":
                return rotate(x, spec.at(-2, seq_len=number))
            return rotate(x, spec, number.item() if read else number)

    def number(value: int) -> Any:
        return torch.tensor(value) if read else value

    dynamic = torch.export.Dim.DYNAMIC
    shapes = {"x": {2: dynamic}, "number": None if read else dynamic}
    call = (noise(2, 1, 5, 12, dtype=torch.float32), number(7))
    program = torch.export.export(Turn(), call, dynamic_shapes=shapes, strict=strict).module()
    for tokens, value in ((5, 7), (5, 500), (200, 300)) if kind != "seq_len" else ((5, 300),):
        x = noise(2, 1, tokens, 12, dtype=torch.float32)
        where, end = (-2, value) if kind == "seq_len" else (value, value + tokens)
        assert_one_turn(program(x, number(value)), rotate(x, spec.at(where, seq_len=end)), x)


@pytest.mark.parametrize("rule", [*RULES, "unequal"])
def test_lengths_on_a_device_are_not_read(rule: str) -> None:
    spec = spec_of(UNEQUAL if rule == "unequal" else rule)
    with torch.device("meta"):
        x, ids = torch.empty(2, 1, 3, 12), torch.empty(2, 3, dtype=torch.int64)
    for where, seq_len in ((ids, None), (positions.per_row(ids[:, 0]), None), (0, ids[:, 0])):
        if rule != "unequal":
            assert rotate(x, spec.at(where, device=x.device, seq_len=seq_len)).shape == x.shape
            continue
        with pytest.raises(NotImplementedError, match="a length that is traced or on a device"):
            rotate(x, spec.at(where, device=x.device, seq_len=seq_len))
    assert rotate(x, spec.at(ids, device=x.device, seq_len=6000)).shape == x.shape
    assert rotate(x[:, :, :1], spec, 5000).shape == (2, 1, 1, 12)
    if rule != "unequal":
        with FakeTensorMode():
            y = rotate(torch.empty(2, 1, 3, 12), spec, torch.empty(2, 3, dtype=torch.int64))
            assert y.shape == x.shape


@every_rule
def test_transforms_of_ids(rule: str) -> None:
    spec, x = spec_of(rule), noise(1, 1, 3, 12)
    ids = torch.tensor([[0.0, 6.0, 7.0], [0.0, 5998.0, 5999.0]], dtype=torch.float64)
    batch = torch.func.vmap(lambda where: rotate(x, spec, where))(ids)
    for got, where in zip(batch, ids, strict=True):
        assert_near(got, rotate(x, spec, where), "float64 ways")
        leaf = where.clone().requires_grad_()
        (wanted,) = torch.autograd.grad((rotate(x, spec, leaf) ** 3).sum(), leaf)
        grad = torch.func.grad(lambda p: (rotate(x, spec, p) ** 3).sum())(where)
        assert_near(grad, wanted, "float64 ways, higher order")
