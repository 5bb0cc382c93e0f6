"""What stacks, rotations that were made for one, and the operator of their tables refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, stacks
from tightrope.frequencies import DynamicNTK, LongRoPE
from tightrope.ops import cosines, schema

SPEC, VLLM, META = RopeSpec(64), stacks.get("vllm"), stacks.get("meta")
DYNAMIC = RopeSpec(64, scaling=DynamicNTK(2.0, 128))
LONGROPE = RopeSpec(64, scaling=LongRoPE((1.0,) * 32, (2.0,) * 32, 128, 1.0))
FAR, Q = torch.arange(4) * 97, torch.zeros(2, 3, 4, 64)
ROPE = SPEC.at(FAR, stack="vllm")
AT, INV_FREQ = torch.ones(2, 4, 1).double(), torch.ones(32).double()


def at(scaling: Any, stack: str = "meta", where: Any = 0, **more: Any) -> Callable[[], object]:
    return lambda: RopeSpec(64, scaling=scaling).at(where, stack=stack, **more)


def by_server(name: str, spec: RopeSpec) -> list[Callable[[], object]]:
    return [
        lambda: spec.at(FAR, stack=name),
        lambda: spec.at(5, stack=name),
        lambda: stacks.get(name).frequencies(spec),
        lambda: stacks.get(name).tables(spec, FAR),
    ]


def raw(at: torch.Tensor, inv_freq: torch.Tensor) -> list[Callable[[], object]]:
    """Return calls of the operator, and of its definition for other devices."""
    rest = None, None, None, False
    return [
        lambda: schema.cos_sin(at, inv_freq, *rest),
        lambda: cosines.cos_sin(at, inv_freq, *rest),
    ]


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())
