"""`assert_rope` on functions with the interfaces of six public ones: each passes, and each planted fault is named.

The first line of a failure is one sentence with a call. The tests run that call as a reader who pastes it would.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import public_functions as public
from tests.support.helpers import ROOT
from tests.support.planted_faults import Fn, turn
from tightrope import RopeSpec, rotate
from tightrope_tools.audit import assert_rope


def plainly(interleaved: bool, layout: str) -> Fn:
    """Return a reference of x and half tables ``(tokens, pairs)``, in float64."""

    def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width, shape = 2 * cos.shape[-1], [1] * x.dim()
        shape[layout.index("s")], shape[-1] = cos.shape
        tables = (t.double().view(shape) for t in (cos, sin))
        y = turn(x[..., :width].double(), *tables, interleaved=interleaved)
        return torch.cat((y.to(x.dtype), x[..., width:]), -1)

    return reference


class Public(NamedTuple):
    """An interface.

    Attributes:
        make: makes the function, with a fault.
        options: how it is called, where that is not found.
        spec: fields of the rotation, of head_dim 64.
        like: another right function, if it is not that of `make`.
        faults: the name of a fault -> a phrase of the first line.
    """

    make: Callable[..., Fn]
    faults: dict[str, str]
    options: Mapping[str, Any] = MappingProxyType({})
    spec: Mapping[str, Any] = MappingProxyType({})
    like: Fn | None = None


PUBLIC = {
    "flash-attention": Public(
        public.flash,
        {
            "pairing": "Channels are paired differently",
            "offset": "A call with an offset is rotated as if at positions 0 to n − 1",
            "restarts": "A call with packed rows is rotated as if at positions 0 to n − 1",
            "width": "Other channels rotate",
        },
        {"layout": "bshd"},
        like=plainly(False, "bshd"),
    ),
    "flash-attention, interleaved": Public(
        partial(public.flash, default=True),
        {"pairing": "Channels are paired differently"},
        {"layout": "bshd"},
        {"interleaved": True},
        plainly(True, "bshd"),
    ),
    "Liger": Public(
        public.liger,
        {
            "gradient": "The gradient of q is wrong: the incoming gradient is rotated forwards",
            "k": "k is returned unchanged; only q is rotated",
            "rows": "All rows of a batch get the positions of row 0",
        },
    ),
    "torchtune": Public(
        lambda fault="": public.RotaryPositionalEmbeddings(fault=fault),
        {
            "sine in 16 bits": "Cosines, sines, angles or x are rounded to 16 bits",
            "sign": "the sine has the wrong sign",
            "last pair": "Other channels rotate",
            "first position": "Only the first id of a call is used",
            "dtype": "X of dtype bfloat16 comes back as float32",
        },
        {"layout": "bshd"},
        {"interleaved": True},
    ),
    "Megatron, unfused": Public(
        public.megatron,
        {
            "pairing": "Channels are paired differently",
            "swapped": "Cosine and sine are swapped",
            "rest": "tables for half of the channels",
        },
        {"layout": "sbhd"},
    ),
    "Megatron, packed": Public(
        public.megatron_packed,
        {"restarts": "Rows are numbered through: only the first of a call starts at position 0"},
        {"layout": "thd"},
    ),
    "Megatron, fused": Public(
        public.megatron_fused,
        {
            "gradient": "The gradient of x is wrong: the incoming gradient is rotated forwards",
            "no backward": "The gradient of x is wrong: the incoming gradient is passed on unrotated",
        },
        {"layout": "sbhd"},
        like=public.megatron(),
    ),
    "a kernel of the hub": Public(
        lambda fault="": public.by_kernel(public.hub(fault), fault=fault),
        {
            "conj": "All pairs turn in the opposite direction to RoPE: the sine has the wrong sign",
            "gradient": "The gradient of x is wrong: the incoming gradient is rotated forwards",
        },
        like=plainly(False, "bhsd"),
    ),
}
FAULTS = [(name, fault) for name, each in PUBLIC.items() for fault in each.faults]


@pytest.mark.parametrize("name", PUBLIC)
def test_right_functions_pass(name: str) -> None:
    each = PUBLIC[name]
    assert_rope(each.make(), like=each.like or each.make(), **each.options)
    assert_rope(each.make(), RopeSpec(64, **each.spec), **each.options)


def failure(*arguments: Any, **options: Any) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        assert_rope(*arguments, **options)
    return str(caught.value).splitlines()


def pasted(lines: list[str], function: Fn) -> list[torch.Tensor]:
    """Make the call that a failure shows: return the results, and the gradients of the tensors that require them."""
    call = re.search(r", as in (\w+)\((.*)\)\.$", lines[0])
    assert call is not None, lines[0]
    names: dict[str, Any] = {"torch": torch, "RopeSpec": RopeSpec}
    for line in lines[1:]:
        if re.search(r" = .*(cos_sin|\.build)\(|import FORMS", line):
            exec(line.strip(), names)
    torch.manual_seed(3)
    given: list[torch.Tensor] = []

    def noted(*args: Any, **named: Any) -> Any:
        given.extend(x for x in args if isinstance(x, torch.Tensor) and x.requires_grad)
        return function(*args, **named)

    made = eval(f"noted({call[2]})", names | {"noted": noted})
    ys = [*made] if isinstance(made, tuple) else [made]
    for y in ys:
        if y.requires_grad:
            y.backward(torch.randn(y.shape).to(y.dtype), retain_graph=True)
    return [y.detach() for y in ys] + [x.grad for x in given if x.grad is not None]


@pytest.mark.parametrize("name, fault", FAULTS)
def test_a_planted_fault_is_named_with_a_call_that_shows_it(name: str, fault: str) -> None:
    each = PUBLIC[name]
    lines = failure(each.make(fault), like=each.make(), **each.options)
    assert each.faults[fault] in lines[0]
    seen, wanted = (pasted(lines, function) for function in (each.make(fault), each.make()))
    same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(seen, wanted, strict=True)]
    assert not all(same), lines


@pytest.mark.parametrize("name", PUBLIC)
def test_a_spec_in_place_of_a_reference(name: str) -> None:
    each = PUBLIC[name]
    for fault in each.faults.keys() - {"rest"}:  # all channels rotate here
        first = failure(each.make(fault), RopeSpec(64, **each.spec), **each.options)[0]
        assert first.endswith("."), first


def test_small_calls_are_shown() -> None:
    """The smallest one that tells: one token, unless the fault needs more."""
    spec = RopeSpec(64)

    def off_by_one(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, positions + 1)

    def falling(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, positions.sort(-1).values)

    def heads(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            (rotate(x[:, :1], spec, positions), rotate(x[:, 1:], spec, positions + 1)), 1
        )

    def rows(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, positions[:1].expand_as(positions))

    for function, call in (
        (off_by_one, "off_by_one(torch.randn(1, 1, 1, 64), torch.tensor([[0]]))"),
        (falling, "falling(torch.randn(1, 1, 2, 64), torch.tensor([[3, 1]]))"),
        (heads, "heads(torch.randn(1, 2, 2, 64), torch.tensor([[0, 1]]))"),
        (rows, "rows(torch.randn(2, 1, 2, 64), torch.tensor([[0, 1], [5, 6]]))"),
    ):
        assert failure(function, spec)[0].endswith(f", as in {call}.")


def test_functions_that_count_tokens_themselves() -> None:
    """Their calls begin at position 0, for gradients and other dtypes too."""
    spec = RopeSpec(64)

    def right(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec)

    def detached(x: torch.Tensor) -> torch.Tensor:
        return right(x.detach()) + 0 * x

    def widened(x: torch.Tensor) -> torch.Tensor:
        return right(x.float())

    def late(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, spec, int(x.shape[2] > 3000))

    assert_rope(right, spec, longest=2**13)
    assert_rope(right, like=lambda x: right(x))
    assert_rope(right, like=lambda x: right(x.detach()))  # a reference without gradients
    for function, words in (
        (detached, "The gradient of x "),
        (
            widened,
            "X of dtype bfloat16 comes back as float32, as in widened(torch.randn(1, 1, 2, 64",
        ),
        (late, "as in late(torch.randn(1, 1, 4096, 64))"),
    ):
        assert words in failure(function, like=right)[0]


def test_a_gradient_that_k_alone_lacks() -> None:
    def right(q: Any, k: Any, positions: Any) -> Any:
        return rotate(q, RopeSpec(64), positions), rotate(k, RopeSpec(64), positions)

    def frozen(q: Any, k: Any, positions: Any) -> Any:
        return right(q, k.detach(), positions)

    assert "The gradient of k is missing" in failure(frozen, like=right)[0]


def test_q_alone() -> None:
    spec = RopeSpec(64)

    def right(q: torch.Tensor, k: torch.Tensor | None = None, positions: Any = None) -> Any:
        return rotate(q, spec, positions), None if k is None else rotate(k, spec, positions)

    def wrong(q: torch.Tensor, k: torch.Tensor | None = None, positions: Any = None) -> Any:
        return right(q, k, positions + (k is None))

    assert_rope(right, like=lambda q, k=None, positions=None: right(q, k, positions))
    assert_rope(right, spec)
    for reference in ({"like": right}, {"spec": spec}):
        first = failure(wrong, **reference)[0]
        assert "in a call with q alone" in first
        assert ", as in wrong(torch.randn(1, 1, 2, 64), k=None, positions=" in first


def test_what_a_reference_takes_may_not_be_refused() -> None:
    right = public.megatron()

    def narrow(t: torch.Tensor, freqs: torch.Tensor, mscale: float = 1.0) -> Any:
        if t.dtype != torch.float32:
            raise TypeError("float32 alone")
        return right(t, freqs, mscale)

    first = failure(narrow, like=right, layout="sbhd")[0]
    assert first.startswith("A call with the gradient of bfloat16 is refused, as in narrow(")
    assert_rope(right, like=narrow, layout="sbhd")


def test_an_x_that_is_overwritten() -> None:
    kernel, options = public.hub(), {"layout": "bhsd"}
    wrong = public.by_kernel(public.hub("in place"), in_place=True)
    right = public.by_kernel(kernel)
    assert failure(public.by_kernel(kernel, in_place=True), like=right, **options)[0].startswith(
        "X is overwritten, as in rope("
    )
    assert len(failure(wrong, like=right, **options)) > 1


def test_a_compiled_function() -> None:
    spec = RopeSpec(64)

    def right(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[..., None].float() * 10_000.0 ** (-torch.arange(0, 64, 2) / 64)
        u, v = x.chunk(2, -1)
        cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
        return torch.cat((u * cos - v * sin, v * cos + u * sin), -1)

    def wrong(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return right(x, positions + torch.compiler.is_compiling())

    assert_rope(right, spec, compiled="aot_eager")
    assert_rope(wrong, spec)
    first = failure(wrong, like=right, compiled="aot_eager")[0]
    assert first.startswith("X comes out differently in a call with torch.compile, as in wrong(")


ALONE = """
import sys
for name in ("transformers", "diffusers", "safetensors", "matplotlib", "gguf", "pytest", "hypothesis"):
    sys.modules[name] = None
import torch
from tightrope import RopeSpec, rotate
from tightrope_tools.audit import assert_rope
spec = RopeSpec(64)
assert_rope(lambda x, positions: rotate(x, spec, positions), spec)
"""


def test_it_needs_torch_and_this_library_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=ROOT / "src", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
