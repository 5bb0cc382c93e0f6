"""Test the recognitions that tests share: what changes is recognised again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import recognitions
from tests.support.recognitions import once
from tightrope.integrations import _recognise, _replace
from tightrope.integrations._recognise import recognise


def turned(x: Any) -> Any:
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def by_global(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + turned(x) * sin


def other(x: Any) -> Any:
    return x.flip(-1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are recognised, with an empty cache."""
    found: list[Any] = []

    def noted(function: Any, *rest: Any) -> Any:
        found.append(function)
        return recognise(function, *rest)

    monkeypatch.setattr(recognitions, "recognise", noted)
    monkeypatch.setattr(recognitions, "_known", {})
    return found


def test_a_function_is_recognised_once(asked: list[Any]) -> None:
    first = once(by_global)
    assert first == recognise(by_global)
    assert first.candidate is not None
    assert once(by_global) is first
    assert len(asked) == 1


def test_a_function_that_calls_another_one_now_is_recognised_again(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert once(by_global)
    monkeypatch.setitem(globals(), "turned", other)
    assert not once(by_global)


def test_code_and_defaults_that_change_are_seen(asked: list[Any]) -> None:
    def own(x: Any, cos: Any, sin: Any, sign: int = 1) -> Any:
        return x * cos + sign * turned(x) * sin

    def wrong(x: Any, cos: Any, sin: Any, sign: int = 1) -> Any:
        return x * cos + sign * other(x) * sin

    first = once(own)
    assert first
    own.__defaults__ = (-1,)
    assert once(own) != first
    own.__code__ = wrong.__code__
    assert not once(own)
    assert len(asked) == 3


def test_settings_and_constants_of_another_type_are_recognised_by_themselves(
    asked: list[Any],
) -> None:
    def own(x: Any, cos: Any, sin: Any, flag: bool = False) -> Any:
        return x * cos + (turned(x) if flag is True else other(x)) * sin

    assert once(own, None, (("flag", True),))
    assert not once(own, None, (("flag", 1),))
    torch.set_default_dtype(torch.float64)
    assert once(own, None, (("flag", True),))
    assert len(asked) == 3


def test_what_could_change_unnoticed_is_recognised_again(asked: list[Any]) -> None:
    factors = [1.0]

    def by_list(x: Any, cos: Any, sin: Any) -> Any:
        return x * cos + factors[0] * turned(x) * sin

    first = once(by_list)
    factors[0] = -1.0
    assert once(by_list) != first
    for wrapped in (torch.nn.Identity(), len):
        once(wrapped)
        once(wrapped)
    assert len(asked) == 6


@pytest.mark.parametrize(("module", "name"), [(_replace, "fused"), (_recognise, "bits_of")])
def test_with_other_code_nothing_is_shared(
    module: Any, name: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, real = once(by_global), getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *args, **kwargs: real(*args, **kwargs))
        once(by_global)
    assert len(asked) == 2
    assert once(by_global) is first
