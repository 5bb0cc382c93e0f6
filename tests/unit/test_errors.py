"""The `public` decorator, which prefixes errors with the operation's name, and the test helper that checks it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import assert_form
from tests.support.refused_calls import refused_calls
from tightrope import functional
from tightrope._errors import bad_value, public


@public("double")
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    if x.dim() != 1:
        raise bad_value(f"x must have 1 dimension but got {x.dim()}", x=x)
    return 2 * x


@public("quadruple")
def quadruple(x: torch.Tensor) -> torch.Tensor:
    return double(double(x))


class Doubler:
    @public()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return double.__wrapped__(x)  # type: ignore[attr-defined]


class Other(Doubler):
    pass


WIDE = torch.ones(2, 3)
RULE = "x must have 1 dimension but got 2 (x: float32[2, 3])."


@pytest.mark.parametrize(
    ("call", "named"),
    [(double, "double"), (quadruple, "double"), (Doubler(), "Doubler"), (Other(), "Other")],
)
def test_the_innermost_edge_names_itself(call: Any, named: str) -> None:
    assert torch.equal(call(torch.ones(2)), (4 if call is quadruple else 2) * torch.ones(2))
    with pytest.raises(ValueError, match="1 dimension") as caught:
        call(WIDE)
    assert str(caught.value) == f"[{named}] {RULE}"
    assert_form(caught.value, ValueError, named)


@public("sum_of")
def sum_of(x: int, y: int = 0, *, base: int = 0, positions: int = 0) -> int:
    return x + y + base + positions


@public("turned")
def turned(x: int, rope: int) -> int:
    return x + rope


def test_other_errors_pass() -> None:
    with pytest.raises(TypeError, match=r"^can only concatenate str"):
        sum_of("1")  # type: ignore[arg-type]


test_arguments_that_do_not_fit = refused_calls(
    Path(__file__).with_name("refused_arguments.jsonl"), {}, globals()
)


def test_name_docstring_and_module_stay() -> None:
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert functional.rotate_.__module__ == "tightrope.functional._rotate"


def test_compiled_without_a_break() -> None:
    compiled = torch.compile(quadruple, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), 4 * torch.ones(3))

    def caught(x: torch.Tensor) -> torch.Tensor:
        try:
            return quadruple(x)
        except ValueError:
            return x

    assert torch.equal(torch.compile(caught, fullgraph=True, backend="eager")(WIDE), WIDE)
