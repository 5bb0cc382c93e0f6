"""The `public` decorator, which prefixes errors with the operation's name."""

import inspect
import re
import traceback

import pytest
import torch

from tightrope import functional, positions
from tightrope._errors import (
    OPERATION,
    OUT_OF_PLACE,
    Refusal,
    as_integer,
    bad_index,
    bad_type,
    bad_value,
    integer,
    public,
    unsupported,
)


def below(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 1:
        raise bad_value(f"x must have 1 dimension but got {x.dim()}", x=x)
    return 2 * x


@public("double")
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return below(x)


@public("quadruple")
def quadruple(x: torch.Tensor) -> torch.Tensor:
    return double(double(x))


class Doubler:
    @public()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return below(x)


class Other(Doubler):
    pass


@pytest.mark.parametrize(
    ("call", "named"),
    [(double, "double"), (quadruple, "double"), (Doubler(), "Doubler"), (Other(), "Other")],
)
def test_the_innermost_edge_names_itself(call, named: str) -> None:
    assert torch.equal(call(torch.ones(2)), (4 if call is quadruple else 2) * torch.ones(2))
    wanted = f"[{named}] x must have 1 dimension but got 2 (x: float32[2, 3])."
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        call(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (bad_value, ValueError),
        (bad_type, TypeError),
        (bad_index, IndexError),
        (unsupported, NotImplementedError),
    ],
)
def test_a_refusal_becomes_the_plain_error(made, kind: type[Exception]) -> None:
    assert isinstance(made("a rule"), Refusal)
    assert isinstance(made("a rule"), kind)

    @public("here")
    def refuse() -> None:
        raise made("a rule")

    with pytest.raises(kind) as caught:
        refuse()
    assert type(caught.value) is kind
    assert str(caught.value) == "[here] a rule."
    assert caught.value.__cause__ is None
    shown = "".join(traceback.format_exception(caught.value))
    assert "During handling" not in shown
    assert "Refusal" not in shown


def test_other_errors_pass() -> None:
    error = ValueError("somebody else's")

    @public("here")
    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="somebody else's") as caught:
        fail()
    assert caught.value is error


def test_a_rule_may_name_the_operation() -> None:
    @public("turn_")
    def refuse() -> None:
        raise bad_value(f"after {OPERATION} call {OUT_OF_PLACE}")

    with pytest.raises(ValueError, match=r"^\[turn_\] after turn_ call turn\.$"):
        refuse()


def test_signature_and_docstring_stay() -> None:
    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."
    assert list(inspect.signature(functional.rotate_).parameters)[:3] == ["x", "spec", "positions"]
    assert functional.rotate_.__module__ == "tightrope.functional._rotate"
    assert (positions.packed.__doc__ or "").startswith("Return positions of sequences packed")


def test_compiled_without_a_break() -> None:
    compiled = torch.compile(quadruple, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), 4 * torch.ones(3))

    def caught(x: torch.Tensor) -> torch.Tensor:
        try:
            return quadruple(x)
        except ValueError:
            return x

    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(caught, fullgraph=True, backend="eager")(x), x)


@pytest.mark.parametrize(
    ("value", "tensors", "wanted"),
    [
        (3, False, 3),
        (True, False, None),
        (3.0, False, None),
        ("3", True, None),
        (torch.tensor(3), False, None),
        (torch.tensor(3), True, 3),
        (torch.tensor(True), True, None),
        (torch.tensor([1, 2]), True, None),
        (torch.tensor(3, device="meta"), True, None),
    ],
)
def test_what_counts_as_an_integer(value: object, tensors: bool, wanted: int | None) -> None:
    assert as_integer(value, tensors) == wanted
    if wanted is None:
        with pytest.raises(TypeError, match="size must be an int but got"):
            integer("size", value, tensors=tensors)
