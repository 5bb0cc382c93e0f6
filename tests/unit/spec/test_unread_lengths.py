"""Lengths that cannot be read, while compiling, exporting or on a device; and transforms."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import oracle
from tests.support.by_length import LONG, RULES, SHORT, UNEQUAL, every_rule, rule_of, spec_of
from tests.support.helpers import refused
from tests.support.tolerances import assert_near, assert_rotations, assert_same_bits
from tightrope import positions
from tightrope.frequencies import LongRoPE
from tightrope.functional import rotate


def compiled(
    function: Callable[..., torch.Tensor], dynamic: bool | None
) -> tuple[Callable[..., torch.Tensor], CompileCounterWithBackend]:
    """Return a compiled function, and the counter of its graphs."""
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("eager")
    return torch.compile(function, fullgraph=True, backend=graphs, dynamic=dynamic), graphs


def steps(kind: str) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """Yield x, positions and seq_len of calls with lengths below and above 100."""
    for number in (3, 4, 94, 95, 96, 97, 250, 1000):
        x = torch.randn(2, 1, 1 if "off" in kind or "ids" in kind else 5, 12)
        if kind == "offset":
            yield x, number, None
        elif kind == "seq_len":
            yield x, -2, number
        elif kind == "a tensor of lengths":
            yield x, -2, torch.tensor([number, 5])
        elif kind == "offsets per row":
            yield x, positions.per_row(torch.tensor([number, 5])), None
        elif kind == "ids per row":
            yield x, torch.tensor([[number], [5]]), None
        else:
            yield torch.randn(2, 1, number, 12), 0, None


UNREAD = ["offset", "seq_len", "a tensor of lengths", "offsets per row", "ids per row", "tokens"]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", UNREAD)
@pytest.mark.parametrize("dynamic", [True, None])
@every_rule
def test_one_graph_for_all_lengths(rule: str, dynamic: bool | None, kind: str) -> None:
    spec = spec_of(rule_of(rule, 100, 4.0))

    def turn(x: torch.Tensor, where: Any, seq_len: Any) -> torch.Tensor:
        return rotate(x, spec, where, seq_len=seq_len)

    run, graphs = compiled(turn, dynamic)
    for x, where, seq_len in steps(kind):
        got, wanted = run(x, where, seq_len), turn(x, where, seq_len)
        if rule == "longrope":
            assert_same_bits(got, wanted)
        else:
            # The graph computes phase words in float64; their error is below float32's resolution.
            lengths = oracle.pair_lengths(x, 8, start=2)
            assert_rotations(got, wanted, lengths, 2, 1000.0)
    # Unless dynamic=True, the first graph is for the first int or size only, and the second for all others.
    assert graphs.frame_count == (1 if dynamic or "row" in kind or "tensor" in kind else 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["offset", "an offset that is read", "seq_len", "tokens"])
@every_rule
def test_an_exported_program_takes_all_lengths(rule: str, kind: str, strict: bool) -> None:
    spec = spec_of(rule_of(rule, 100, 4.0))

    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
            if kind == "seq_len":
                return rotate(x, spec, -2, seq_len=number)
            return rotate(x, spec, number.item() if isinstance(number, torch.Tensor) else number)

    def number(value: int) -> Any:
        return torch.tensor(value) if kind == "an offset that is read" else value

    dynamic = torch.export.Dim.DYNAMIC
    shapes = {"x": {2: dynamic}, "number": None if "read" in kind else dynamic}
    call = (torch.randn(2, 1, 5, 12), number(7))
    program = torch.export.export(Turn(), call, dynamic_shapes=shapes, strict=strict).module()
    for tokens, value in ((5, 7), (5, 500), (200, 300)) if kind != "seq_len" else ((5, 300),):
        x = torch.randn(2, 1, tokens, 12)
        lengths = oracle.pair_lengths(x, 8, start=2)
        # Eager code refuses several tokens after position 0 without their length; a program cannot see them.
        got, where = program(x, number(value)), -2 if kind == "seq_len" else value
        end = value if kind == "seq_len" else value + tokens
        wanted = rotate(x, spec, where, seq_len=end)
        assert_rotations(got, wanted, lengths, 2, 1000.0)


def test_unequal_factors_take_a_graph_for_short_and_one_for_long_rows() -> None:
    short = LongRoPE(SHORT, LONG, 100, short_mscale=1.25, long_mscale=1.5)
    spec = spec_of(short)

    def turn(x: torch.Tensor, where: Any, seq_len: Any) -> torch.Tensor:
        return rotate(x, spec, where, seq_len=seq_len)

    for kind in ("offset", "seq_len", "tokens"):
        run, graphs = compiled(turn, True)
        for call in steps(kind):
            assert_same_bits(run(*call), turn(*call))
        assert graphs.frame_count == 2, kind


@pytest.mark.parametrize("rule", [*RULES, "unequal"])
def test_lengths_on_a_device_are_not_read(rule: str) -> None:
    spec = spec_of(UNEQUAL if rule == "unequal" else rule)
    x = torch.empty(2, 1, 3, 12, device="meta")
    ids = torch.empty(2, 3, dtype=torch.int64, device="meta")
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    for where, seq_len in ((ids, None), (positions.per_row(lengths), None), (0, lengths)):
        if rule != "unequal":
            y = rotate(x, spec, where, seq_len=seq_len)
            assert (y.shape, y.device) == (x.shape, x.device)
            continue
        text = (
            "[RopeSpec] all rows of one call must have one attention scaling but got 1.25, 1.5; "
            "a length that is traced or on a device may have either, so give seq_len as an int."
        )
        with refused(NotImplementedError, text):
            rotate(x, spec, where, seq_len=seq_len)
    assert rotate(x, spec, ids, seq_len=6000).shape == x.shape
    assert rotate(x[:, :, :1], spec, 5000).shape == (2, 1, 1, 12)
    if rule != "unequal":
        with FakeTensorMode():
            y = rotate(torch.empty(2, 1, 3, 12), spec, torch.empty(2, 3, dtype=torch.int64))
            assert y.shape == x.shape


@every_rule
def test_transforms(rule: str) -> None:
    spec, x = spec_of(rule), torch.randn(1, 1, 3, 12, dtype=torch.float64)
    ids = torch.tensor([[0.0, 6.0, 7.0], [0.0, 5998.0, 5999.0]], dtype=torch.float64)
    batch = torch.func.vmap(lambda where: rotate(x, spec, where))(ids)
    for got, where in zip(batch, ids, strict=True):
        assert_near(got, rotate(x, spec, where), "float64 ways")
    for where in ids:
        wanted = where.clone().requires_grad_()
        (rotate(x, spec, wanted) ** 3).sum().backward()
        grad = torch.func.grad(lambda p: (rotate(x, spec, p) ** 3).sum())(where)
        assert_near(grad, wanted.grad, "float64 ways, higher order")
