"""Test the registry of forms that `audit` tries on unknown rotary functions, and that `patch` reads."""

from __future__ import annotations

import pickle

import pytest
import torch

from tests.support.models.forms import Function
from tests.support.tolerances import value
from tightrope_tools.forms import ARRANGEMENTS, FORMS, Argument, Call, calls_of

TABLES = {name: form for name, form in FORMS.items() if form.takes_tables}


@pytest.mark.parametrize("name", TABLES)
def test_built_tables_are_read_back(name: str) -> None:
    """Arguments of another kind are no tables."""
    form = FORMS[name]
    assert form.read is not None
    if form.grids:  # it can express only tables that are put together from axes
        cos, sin = form.read(*form.built(torch.randn(3, 12, 1, 6), torch.randn(3, 12, 1, 6)))
    else:
        cos, sin = torch.randn(2, 1, 5, 6), torch.randn(2, 1, 5, 6)
    if form.unit:
        cos, sin = cos.cos(), cos.sin()
    bound = value("angles read back") if form.unit else 0
    for got, want in zip(form.read(*form.built(cos, sin)), (cos, sin), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=bound)
    call = Call(form, tuple(Argument(role, role) for role in form.roles))
    for other in (None, 5, "text", {}, ()):
        assert call.read(dict.fromkeys(form.roles, other)) is None


def test_forms_are_known_by_their_names_and_roles() -> None:
    for name, form in FORMS.items():
        assert name == form.name
        assert pickle.loads(pickle.dumps(form)) is form
    assert len({form.roles for form in TABLES.values()}) == len(TABLES)
    size = {"b": 2, "h": 3, "s": 5, "d": 16, "1": 1}
    for one in ARRANGEMENTS:
        x, table = (torch.empty([size[each] for each in letters]) for letters in (one.x, one.table))
        placed = table if one.place is None else table.unsqueeze(one.place)
        assert (x * placed).shape == x.shape


# The roles of one argument that holds the whole table.
_ONE_TABLE = ("cis", "pair", "reversed_pair", "sin_cos", "cos_sin", "matrix", "angles")
# Parameters -> the calls that their names suggest.
SUGGESTED: dict[str, list[str]] = {
    "q, k, cos, sin, unsqueeze_dim=1": [
        "q, k, cos, sin, unsqueeze_dim",
        "q, k, sin, cos, unsqueeze_dim",
    ],
    "tensor, sin, cos": ["x, sin, cos", "x, cos, sin"],
    "xq, xk, freqs_cis": [f"q, k, {role}" for role in _ONE_TABLE],
    "x, cos, sin, position_ids=None": ["x, cos, sin", "x, sin, cos"],
    "q, k, cos, sin, position_ids": ["q, k, cos, sin, positions", "q, k, sin, cos, positions"],
    "x, positions": ["x, positions", "x, positions -> cos, sin"],
    "q, k, pos": ["q, k, positions"],
    "q, k=None, positions=None": ["q, k, positions"],
    "q, k, v, cos, sin": ["q, k, more, cos, sin", "q, k, more, sin, cos"],
    "t, seq_dim=None, offset=0": ["x, seq_dim, offset"],
    "x": ["x"],
    "a, b": [],
    "*xs, cos, sin": [],
}


def taking(parameters: str) -> Function:
    function: Function = eval(f"lambda {parameters}: None")
    return function


@pytest.mark.parametrize("parameters", SUGGESTED)
def test_calls_that_names_suggest(parameters: str) -> None:
    assert [str(call) for call in calls_of(taking(parameters))] == SUGGESTED[parameters]


def test_a_method_may_have_heads_still_flat() -> None:
    found = calls_of(taking("self, x, position_embeddings"), method=True)
    assert [call.form.flat for call in found] == [False] * len(_ONE_TABLE) + [True]
    assert all(call.method and call.rotated == ("x",) for call in found)
