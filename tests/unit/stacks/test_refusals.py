"""What stacks, and rotations that were made for one, refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, stacks
from tightrope.frequencies import DynamicNTK, LongRoPE

SPEC, VLLM, META = RopeSpec(64), stacks.get("vllm"), stacks.get("meta")
DYNAMIC = RopeSpec(64, scaling=DynamicNTK(2.0, 128))
LONGROPE = RopeSpec(64, scaling=LongRoPE((1.0,) * 32, (2.0,) * 32, 128, 1.0))
FAR, Q = torch.arange(4) * 97, torch.zeros(2, 3, 4, 64)
ROPE = SPEC.at(FAR, stack="vllm")


def at(scaling: Any, stack: str = "meta", where: Any = 0, **more: Any) -> Callable[[], object]:
    return lambda: RopeSpec(64, scaling=scaling).at(where, stack=stack, **more)


def by_server(name: str, spec: RopeSpec) -> list[Callable[[], object]]:
    return [
        lambda: spec.at(FAR, stack=name),
        lambda: spec.at(5, stack=name),
        lambda: stacks.get(name).frequencies(spec),
        lambda: stacks.get(name).tables(spec, FAR),
    ]


test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())


def test_what_no_caller_passes_to_the_operator() -> None:
    """Its errors are those of torch."""
    from tightrope.ops import cosines, schema

    at, inv_freq = torch.ones(2, 4, 1, dtype=torch.float64), torch.ones(2, 32, dtype=torch.float64)
    rest = None, None, None, False
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        schema.cos_sin(at.clone().requires_grad_(), inv_freq[0], *rest)
    with pytest.raises(RuntimeError, match="only positions may be batched"):
        torch.vmap(lambda each: schema.cos_sin(at, each, *rest))(inv_freq)
    for made in (schema.cos_sin, cosines.cos_sin):
        with pytest.raises(RuntimeError, match="positions must be contiguous"):
            made(at.transpose(0, 1), inv_freq[0], *rest)
