"""The `public` decorator, which prefixes errors with the operation's name, and the test helper that checks it."""

import traceback
from typing import Any

import pytest
import torch

from tests.support.helpers import assert_form, refusals
from tightrope import functional, gates, nn
from tightrope._errors import bad_index, bad_type, bad_value, public, unsupported


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


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (bad_value, ValueError),
        (bad_type, TypeError),
        (bad_index, IndexError),
        (unsupported, NotImplementedError),
    ],
)
def test_a_refusal_becomes_the_plain_error(made: Any, kind: type[Exception]) -> None:
    @public("here")
    def refuse() -> None:
        raise made("a rule")

    with pytest.raises(kind) as caught:
        refuse()
    assert_form(caught.value, kind, "here")
    shown = "".join(traceback.format_exception(caught.value))
    assert "During handling" not in shown
    assert "Refusal" not in shown


@pytest.mark.parametrize(
    "error",
    [
        *(
            ValueError(text)
            for text in ("[here] a rule", "a rule.", "[here] a rule..", "[here] a\nrule.")
        ),
        *(
            TypeError("[here] a rule."),
            UnicodeError("[here] a rule."),
            ValueError("[there] a rule."),
        ),
    ],
    ids=repr,
)
def test_other_forms_are_noticed(error: Exception) -> None:
    assert_form(ValueError("[here] a rule (x: float32[2, 8])."), ValueError, "here")
    with pytest.raises(AssertionError):
        assert_form(error, ValueError, "here")


@public("sum_of")
def sum_of(x: int, y: int = 0, *, base: int = 0, positions: int = 0) -> int:
    return x + y + base + positions


@public("turned")
def turned(x: int, rope: int) -> int:
    return x + rope


def test_other_errors_pass() -> None:
    with pytest.raises(TypeError, match=r"^can only concatenate str"):
        sum_of("1")  # type: ignore[arg-type]


test_arguments_that_do_not_fit = refusals(
    TypeError={
        "[sum_of] x must be given.": lambda: sum_of(),
        "[sum_of] x must be given once but got two values.": lambda: sum_of(1, x=2),
        "[sum_of] only x, y may be given without a name but got 3 values; name the others: base=, positions=.": (
            lambda: sum_of(1, 2, 3)
        ),
        "[sum_of] arguments must be of x, y, base, positions but got z.": lambda: sum_of(1, z=2),
        "got theta; base may be meant.": lambda: sum_of(1, theta=1e4),
        "got position, q; positions may be meant.": lambda: sum_of(1, position=1, q=2),
        "[sum_of] arguments must be of x, y, base, positions but got stack.": (
            lambda: sum_of(1, stack="vllm")
        ),
        "[turned] arguments must be of x, rope but got stack; pass spec.at(positions, stack=…) as rope.": (
            lambda: turned(1, stack="vllm")
        ),
        "[turned] arguments must be of x, rope but got spec; rope may be meant.": (
            lambda: turned(1, spec=2)
        ),
        "but got backend; call it in a block of tightrope.backends.use(name).": (
            lambda: turned(1, 2, backend="cpu")
        ),
        "[sum_of] arguments must be of x, y, base, positions but got backend.": (
            lambda: sum_of(1, backend="cpu")
        ),
        "[Scalar] value must be given.": lambda: gates.Scalar(),
        "[Scalar] arguments must be of value but got factor.": lambda: gates.Scalar(factor=2.0),
        "[Scalar] only value may be given without a name but got 2": lambda: gates.Scalar(1, 2),
        "[RotaryEmbedding] arguments must be of q, k, positions, seq_len but got position_ids; positions": (
            lambda: nn.RotaryEmbedding(8)(torch.ones(1, 1, 2, 8), position_ids=0)
        ),
    },
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
