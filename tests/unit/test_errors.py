"""The `public` decorator, which prefixes errors with the operation's name."""

import inspect
import re
import traceback

import pytest
import torch

from tests.support.helpers import refusals
from tightrope import functional, gates, nn, positions
from tightrope._errors import (
    Refusal,
    bad_index,
    bad_type,
    bad_value,
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


@public("sum_of")
def sum_of(x: int, y: int = 0, *, base: int = 0, positions: int = 0) -> int:
    return x + y + base + positions


test_arguments_that_do_not_fit = refusals(
    "sum_of",
    TypeError={
        "x must be given.": lambda: sum_of(),
        "x must be given once but got two values.": lambda: sum_of(1, x=2),
        "only x, y may be given without a name but got 3 values; name the others: base=, positions=.": (
            lambda: sum_of(1, 2, 3)
        ),
        "arguments must be of x, y, base, positions but got z.": lambda: sum_of(1, z=2),
        "arguments must be of x, y, base, positions but got theta; base may be meant.": (
            lambda: sum_of(1, theta=1e4)
        ),
        "arguments must be of x, y, base, positions but got position, q; positions may be meant.": (
            lambda: sum_of(1, position=1, q=2)
        ),
        "arguments must be of x, y, base, positions but got stack; spec.at(positions, stack=…) takes it, "
        "and then the place of the spec.": lambda: sum_of(1, stack="vllm"),
    },
)


test_arguments_of_a_gate = refusals(
    "Scalar",
    TypeError={
        "value must be given.": lambda: gates.Scalar(),  # type: ignore[call-arg]
        "arguments must be of value but got factor.": lambda: gates.Scalar(factor=2.0),  # type: ignore[call-arg]
        "only value may be given without a name but got 2 values.": lambda: gates.Scalar(1.0, 2.0),  # type: ignore[call-arg]
    },
)


test_arguments_of_a_module = refusals(
    "RotaryEmbedding",
    TypeError={
        "arguments must be of q, k, positions, seq_len but got position_ids; positions may be meant.": (
            lambda: nn.RotaryEmbedding(8)(torch.ones(1, 1, 2, 8), position_ids=0)
        )
    },
)


def test_an_error_inside_of_a_call_that_fits_stays() -> None:
    with pytest.raises(TypeError, match=r"^can only concatenate str"):
        sum_of("1")


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
