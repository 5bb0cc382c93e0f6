"""The table of known rotary functions: it saves a search and decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from tightrope.integrations import _known, _recognise, recognise
from tightrope.integrations._candidate import Candidate
from tightrope.integrations._state import State


@pytest.fixture(autouse=True)
def own_table() -> Iterator[dict[str, Any]]:
    """The table of the library, without what this process has recognised; restored afterwards."""
    _known._entries.cache_clear()
    yield _known._entries()
    _known._entries.cache_clear()


def key_of(function: FunctionType) -> str | None:
    return _known.key_of(State(function).functions, (), False)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return (−v, u) for the halves u and v."""
    u, v = x.chunk(2, -1)  # a comment
    return torch.cat((-v, u), -1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x."""
    return x * cos + turned(x) * sin


def calls_in(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of searches in a call."""
    searches = []
    search = _recognise._explain
    monkeypatch.setattr(_recognise, "_explain", lambda caller: searches.append(1) or search(caller))
    run()
    monkeypatch.undo()
    return len(searches)


def test_every_entry_is_read_and_written_as_it_is(own_table: dict[str, Any]) -> None:
    assert len(own_table) > 60
    for key, held in own_table.items():
        candidate = Candidate.from_dict(held)
        assert Candidate.from_dict(json.loads(json.dumps(candidate.to_dict()))) == candidate
        assert _known.lookup(key) == candidate


def test_sums_that_differ_in_float32_are_not_called_equal_in_fewer_bits(
    own_table: dict[str, Any],
) -> None:
    """A gradient of tables in 16 bits differs in few entries: whether a probe sees one is chance."""
    for held in own_table.values():
        found = Candidate.from_dict(held).bits
        assert all(each[:2] == (torch.float32, torch.float32) for each in found[:1])
        assert all(found[0][2].tables >= bits.tables for _, _, bits in found)


@pytest.mark.parametrize("module", [modeling_llama, modeling_cohere])
def test_functions_of_transformers_are_confirmed_without_a_search(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = module.apply_rotary_pos_emb
    assert calls_in(lambda: recognise(function), monkeypatch) == 0
    known = recognise(function)
    monkeypatch.setattr(_known, "lookup", lambda _: None)
    assert recognise(function) == known


def test_a_function_is_searched_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_in(lambda: recognise(apply_rotary), monkeypatch) > 0
    assert calls_in(lambda: recognise(apply_rotary), monkeypatch) == 0


@pytest.mark.parametrize("field", ["rotation", "bits", "shapes"])
def test_a_wrong_entry_is_not_believed(field: str, own_table: dict[str, Any]) -> None:
    right = recognise(apply_rotary).candidate
    assert right is not None
    key = key_of(apply_rotary)
    assert key is not None
    others = [each for each in right.bits if each[:2] != (torch.bfloat16, torch.bfloat16)]
    (bits,) = (each[2] for each in right.bits if each not in others)
    swapped = bits._replace(rounding=("wide", "wide"))
    wrong = {
        "rotation": {"rotation": replace(right.rotation, pairs="interleaved", out="interleaved")},
        "bits": {"bits": ((torch.bfloat16, torch.bfloat16, swapped), *others)},
        "shapes": {"shapes": frozenset({(3, 2, 7, None)}), "ones": frozenset()},
    }[field]
    own_table[key] = replace(right, **wrong)
    assert recognise(apply_rotary).candidate == right
    assert own_table[key] == right


LIMIT = 3


def with_limit(x: torch.Tensor, longest: int = LIMIT) -> torch.Tensor:
    return x * longest


def with_number(x: torch.Tensor, longest: int = -3) -> torch.Tensor:
    return x * longest


def with_class(x: torch.Tensor) -> torch.Tensor:
    return x * Candidate.tokens  # type: ignore[operator]


def test_a_function_that_depends_on_more_than_its_source_has_no_key() -> None:
    assert key_of(with_number) is not None
    assert key_of(with_limit) is None
    assert key_of(with_class) is None
