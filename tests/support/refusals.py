"""Tests of error sentences, made from tables: a whole sentence -> the call, or calls, that raise it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import pytest

from tests.support.helpers import refused

Call: TypeAlias = Callable[[], object]
Sentences: TypeAlias = Mapping[str, Call | list[Call]]


def refusals(tables: Mapping[type[Exception], Sentences]) -> Callable[[Call, type, str], None]:
    """Make a test that each call raises an error of its type with exactly its sentence."""
    cases = [
        pytest.param(call, kind, text, id=text)
        for kind, sentences in tables.items()
        for text, calls in sentences.items()
        for call in (calls if isinstance(calls, list) else [calls])
    ]

    @pytest.mark.parametrize("call, kind, text", cases)
    def test(call: Call, kind: type[Exception], text: str) -> None:
        with refused(kind, text):
            call()

    return test
