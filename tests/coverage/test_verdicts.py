"""A measured row has the right verdict, and a fault changes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.coverage import rows, small
from tests.coverage.libraries import TRANSFORMERS
from tests.coverage.runs import Run, Subject, spoilt
from tests.support.helpers import Scaled
from tightrope.patching import _patch

pytest.importorskip("transformers")

# Warnings of transformers models are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")


def after(change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """Change all results of a replacement."""
    return lambda real: lambda *given, **options: tuple(map(change, real(*given, **options)))


def last_bits(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 1e-7)


UNCHANGED = lambda real: real  # noqa: E731
NO_REACH = "no method of its modules reaches a rotary function"
#: A type, what is done to all replacements, the status of its row and the beginning of the reason.
VERDICTS: list[tuple[str, Callable[[Any], Any], str, str]] = [
    ("llama", UNCHANGED, "equal", ""),
    ("llama", spoilt, "different", "by "),
    ("qwen2_vl", spoilt, "different", "by "),
    ("dinov3_vit", spoilt, "different", "by "),
    ("llama", after(last_bits), "different", "by "),
    ("llama4_text", after(last_bits), "close", "the last bits of complex products differ"),
    ("llama", after(lambda x: Scaled.apply(x, 0.5)), "different", "by "),
    (
        "llama",
        lambda real: real.__wrapped__,
        "not exercised",
        "the original served every call: llama.apply_rotary_pos_emb",
    ),
    ("jamba", UNCHANGED, "does not rotate", NO_REACH),
    ("idefics_perciever", UNCHANGED, "does not rotate", NO_REACH),
    ("moshi_depth", UNCHANGED, "does not rotate", "no method of its modules computes a cosine"),
    ("clvp_decoder", UNCHANGED, "not exercised", "no rotary function ran"),
]


@pytest.mark.parametrize("name, change, status, reason", VERDICTS)
def test_a_fault_decides_the_status(
    name: str, change: Any, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _patch.replacement
    monkeypatch.setattr(_patch, "replacement", lambda *given: change(real(*given)))
    row = rows.of_model(TRANSFORMERS, name)
    assert (row["status"], row.get("reason", "")[: len(reason)]) == (status, reason), row
    assert status != "equal" or "reason" not in row


def broken(*_: Any) -> None:
    raise RuntimeError("Titles come first:\n    the sentence last")


RUN, COUNT = Subject.run, itertools.count(1)


def noisy(self: Subject) -> Run:
    result, off = RUN(self), next(COUNT)
    for value in result.values.values():
        value.view(-1)[0] += off
    return result


@pytest.mark.parametrize(
    ("place", "planted", "status", "reason"),
    [
        ("runs.spoilt", UNCHANGED, "not exercised", "no output depends on the rotation"),
        ("runs.Subject.run", noisy, "different", "not deterministic by itself"),
        ("small.small_model", broken, "not built", "RuntimeError: Titles come first: the sentence"),
    ],
)
def test_a_measurement_that_shows_nothing_is_no_success(
    place: str, planted: Any, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tests.coverage.{place}", planted)
    row = rows.of_model(TRANSFORMERS, "llama")
    assert (row["status"], row["reason"][: len(reason)]) == (status, reason)


@pytest.mark.parametrize("name", ["llama", "gptj", "roformer", "vjepa2", "llama4_text"])
def test_code_of_a_model_that_rotates_reaches_its_rotary_function(name: str) -> None:
    assert not rows.why_none(TRANSFORMERS, small.prepare(name)[0].model)
