"""Wrong calls of the functions of the audit are refused: rows of refused_calls.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support import planted_faults as planted, public_functions as public
from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec
from tightrope.frequencies import DynamicNTK, Given
from tightrope_tools.audit import assert_rope, audit, compare

number, right, megatron = 3, planted.PLAIN, public.megatron()
SPEC, NTK = RopeSpec(64), RopeSpec(64, scaling=DynamicNTK(2.0, 1024))
PER_HEAD = RopeSpec(8, scaling=Given(((1.0,) * 4, (0.5,) * 4)))


class Rope:
    """A class, which is no function."""


def by_tables(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return planted.with_tables()(q, k, cos, sin)


def by_length(seq_len: int) -> Any:
    angle = torch.arange(seq_len)[:, None].float() * planted.inv_freq()
    return angle.cos(), angle.sin()


CALLS = {"audit": audit, "compare": compare, "assert_rope": assert_rope}
test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), CALLS, globals())
