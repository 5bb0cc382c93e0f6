"""Test the registry of forms that `audit` tries on unknown rotary functions."""

from __future__ import annotations

import pickle

import pytest
import torch

from tests.support.models.forms import Function
from tests.support.tolerances import value
from tightrope_tools import forms
from tightrope_tools.forms import ARRANGEMENTS, FORMS, Argument, Arrangement, Call, calls_of

TABLES = {name: form for name, form in FORMS.items() if form.takes_tables}


# --- the registry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_built_tables_are_read_back(name: str) -> None:
    form = FORMS[name]
    assert form.read is not None
    if form.grids:  # it can express only tables that are put together from axes
        cos, sin = form.read(*form.built(torch.randn(3, 12, 1, 6), torch.randn(3, 12, 1, 6)))
    else:
        cos, sin = torch.randn(2, 1, 5, 6), torch.randn(2, 1, 5, 6)
    if form.unit:
        cos, sin = cos.cos(), cos.sin()
    for got, want in zip(form.read(*form.built(cos, sin)), (cos, sin), strict=True):
        if form.unit:
            torch.testing.assert_close(got, want, rtol=0, atol=value("angles read back"))
        else:
            assert torch.equal(got, want)


def test_forms_have_names_and_roles_of_their_own() -> None:
    assert all(name == form.name for name, form in FORMS.items())
    tables = [form.roles for form in TABLES.values()]
    assert len(set(tables)) == len(tables)
    assert all(len(form.build) == len(form.roles) for form in TABLES.values())


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_pickled_by_its_name(name: str) -> None:
    assert pickle.loads(pickle.dumps(FORMS[name])) is FORMS[name]


@pytest.mark.parametrize("width", forms.WIDTHS)
def test_widened_tables_are_split_into_the_same_entries(width: str) -> None:
    table = torch.arange(6.0)
    for entries in forms.entries(forms.widen(table, width), width):
        assert torch.equal(entries, table)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_placed_tables_broadcast(arrangement: Arrangement) -> None:
    size = {"b": 2, "h": 3, "s": 5, "d": 16, "1": 1}
    x, table = (
        torch.empty([size[letter] for letter in letters])
        for letters in (arrangement.x, arrangement.table)
    )
    placed = table if arrangement.place is None else table.unsqueeze(arrangement.place)
    assert (x * placed).shape == x.shape


# --- calls suggested by a signature --------------------------------------------------------------------

# The roles of one argument that holds the whole table.
_ONE_TABLE = ("cis", "pair", "reversed_pair", "sin_cos", "cos_sin", "matrix", "angles")

SUGGESTED: dict[str, tuple[str, list[str]]] = {
    "llama": (
        "q, k, cos, sin, unsqueeze_dim=1",
        ["q, k, cos, sin, unsqueeze_dim", "q, k, sin, cos, unsqueeze_dim"],
    ),
    "gptj": ("tensor, sin, cos", ["x, sin, cos", "x, cos, sin"]),
    "meta": (
        "xq, xk, freqs_cis",
        [f"q, k, {role}" for role in _ONE_TABLE],
    ),
    "ids that are not read": ("x, cos, sin, position_ids=None", ["x, cos, sin", "x, sin, cos"]),
    "rows": (
        "q, k, cos, sin, position_ids",
        ["q, k, cos, sin, positions", "q, k, sin, cos, positions"],
    ),
    "positions": ("x, positions", ["x, positions", "x, positions -> cos, sin"]),
    "both": ("q, k, pos", ["q, k, positions"]),
    "keys that may be missing": ("q, k=None, positions=None", ["q, k, positions"]),
    "a third tensor": ("q, k, v, cos, sin", ["q, k, more, cos, sin", "q, k, more, sin, cos"]),
    "an offset": ("t, seq_dim=None, offset=0", ["x, seq_dim, offset"]),
    "nothing": ("x", ["x"]),
    "names that tell nothing": ("a, b", []),
    "any number": ("*xs, cos, sin", []),
}


def taking(parameters: str) -> Function:
    function: Function = eval(f"lambda {parameters}: None")
    return function


@pytest.mark.parametrize("name", SUGGESTED)
def test_calls_that_names_suggest(name: str) -> None:
    parameters, wanted = SUGGESTED[name]
    assert [str(call) for call in calls_of(taking(parameters))] == wanted


def test_a_method_may_have_heads_still_flat() -> None:
    found = calls_of(taking("self, x, position_embeddings"), method=True)
    assert [call.form.flat for call in found] == [False] * len(_ONE_TABLE) + [True]
    assert all(call.method and call.rotated == ("x",) for call in found)


# --- forms shared by audit and patch --------------------------------------------------------


@pytest.mark.parametrize("other", [None, 5, "text", {}, ()])
@pytest.mark.parametrize("name", TABLES)
def test_arguments_of_another_kind_are_no_tables(name: str, other: object) -> None:
    form = TABLES[name]
    call = Call(form, tuple(Argument(role, role) for role in form.roles))
    assert call.read(dict.fromkeys(form.roles, other)) is None
