"""Test the registry of forms that `audit` tries on unknown rotary functions."""

from __future__ import annotations

import pytest

from tests.support.zoo import Function
from tightrope_tools.forms import calls_of

# The roles of one argument that holds the whole table.
_ONE_TABLE = "pair stacked cis matrix sin_cos cos_sin angles reversed_pair".split()
# Parameters -> the calls that their names suggest.
SUGGESTED: dict[str, list[str]] = {
    "q, k, cos, sin, unsqueeze_dim=1": ["q, k, cos, sin"],
    "tensor, sin, cos": ["x, sin, cos"],
    "x, sinus, freqs": ["x, cos, sin", "x, sin, cos"],
    "xq, xk, freqs_cis": [f"q, k, {role}" for role in _ONE_TABLE],
    "x, cos, sin, position_ids=None": ["x, cos, sin"],
    "q, k, cos, sin, position_ids": ["q, k, cos, sin, positions"],
    "x, positions": ["x, positions", "x, positions -> cos, sin"],
    "q, k, pos": ["q, k, positions"],
    "Q, K, position_ids": ["q, k, positions"],
    "query, key, positions": ["q, k, positions"],
    "x, positions, seq_dim=1": ["x, positions, seq_dim", "x, positions -> cos, sin"],
    "q, k=None, positions=None": ["q, k, positions"],
    "q, k, v, cos, sin": [],
    "q, k, cos, sin, v=None": ["q, k, cos, sin"],
    "x, freqs, grid_sizes": [],
    "t, seq_dim=None, offset=0": ["x, seq_dim, offset"],
    "x, cu_seqlens": ["x, cu_seqlens"],
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
