"""What stacks, and rotations that were made for one, refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.helpers import refusals
from tightrope import RopeSpec, functional, gates, phases, positions, rotate, stacks
from tightrope.frequencies import NTK, DynamicNTK, Given, Linear, Llama3, LongRoPE

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


test_errors = refusals(
    ValueError={
        f"[at] stack must be one of {', '.join(stacks.names())} but got 'vlm'": at(None, "vlm"),
        "[stacks.get] stack must be one of transformers, ": lambda: stacks.get(3),
        "[rotate] act and gate must be None with a rotation made for stack 'vllm'; normalise or": [
            lambda: rotate(Q, ROPE, act="silu"),
            lambda: rotate(Q, ROPE, gate=gates.XPos(8)),
        ],
        "[at] inv_freq must be None with a rotation made for stack 'vllm'": (
            at(None, "vllm", inv_freq=torch.ones(32))
        ),
        "[at] phases must be None with a rotation made for stack 'vllm'": (
            at(None, "vllm", phases=phases.given(torch.zeros(1, 1, 1, 1)))
        ),
        "[having] inv_freq must be None with a rotation made for stack 'vllm'": (
            lambda: ROPE.having(inv_freq=torch.ones(32))
        ),
        "[polar_scan] rope must have exact angles but was made for stack 'vllm'": (
            lambda: functional.polar_scan(Q, Q, Q, ROPE)
        ),
        "[at] positions must not require a gradient with a stack": (
            at(None, "vllm", torch.ones(3, requires_grad=True))
        ),
        "[at] positions must be those of all heads with a stack": (
            at(None, "vllm", positions.per_head(torch.ones(1, 2, 3)))
        ),
        "[at] seq_len must be at least 292": at(None, "vllm", FAR, seq_len=9),
        "[at] positions must have 1 axis ": at(None, "vllm", positions.text(1, axes=3)),
        "[tables] tokens must be given": lambda: VLLM.tables(SPEC, 3),
        "[cast] stack 'meta' must not be cast": lambda: META.cast(torch.bfloat16),
        # Positions do not tell which frequencies a server took.
        "] seq_len must be given for DynamicNTK with stack 'vllm', which": by_server(
            "vllm", DYNAMIC
        ),
        "DynamicNTK with stack 'vllm-native', which": by_server("vllm-native", DYNAMIC),
        "LongRoPE with stack 'sglang-native', which": by_server("sglang-native", LONGROPE),
        "LongRoPE with stack 'flashinfer', which": by_server("flashinfer", LONGROPE),
    },
    TypeError={"[cast] dtype must be a floating dtype": lambda: VLLM.cast(torch.int64)},
    NotImplementedError={
        "[at] scaling must be None, Given or a rule that stack 'meta' has (Llama3) but got NTK": (
            at(NTK(2.0))
        ),
        "a rule that stack 'flash-attention' has (none) ": (
            lambda: stacks.get("flash-attention").frequencies(RopeSpec(64, scaling=Linear(2.0)))
        ),
        "[at] factor must be 8.0, the only value that this stack supports": (
            at(Llama3(4.0, 1.0, 4.0, 8192))
        ),
        "[at] frequencies per head or axis must not be used with a stack ": (
            lambda: RopeSpec(4, scaling=Given(((1.0, 0.5), (2.0, 0.1)))).at(0, stack="vllm")
        ),
        "[frequencies] seq_len must not be 129 for this LongRoPE rule": (
            lambda: stacks.get("sglang-native").frequencies(LONGROPE, 129)
        ),
        "[frequencies] seq_len must be at least 65 for this DynamicNTK rule": (
            lambda: VLLM.frequencies(DYNAMIC, 64)
        ),
    },
)


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
