"""Results and gradients of random calls of all sizes, compared with the equation in float64.

f, P, phases, layout, strides, positions, dtype, in place or not, forward or inverse, and the set of tensors
that require grad combine at random. Each instruction set, and the definition, is compared with one formula,
which autograd differentiates.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support import oracle, oracle_acts, stated, tolerances
from tests.support.matrix import DISTINCT_SETS, DTYPES, needs_kernel
from tightrope import RopeSpec, gates, phases
from tightrope.activations import ACTS, RMSNorm
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_
from tightrope.ops.schema import LAYOUTS

WAYS = ["reference", *DISTINCT_SETS]
STRIDES = ("contiguous", "permuted", "inside", "every other channel", "expanded", "misaligned")


@st.composite
def cases(draw: st.DrawFn) -> SimpleNamespace:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    pairs, before, after = one_of(1, 2, 3, 7, 8, 16, 17, 33), one_of(*range(4)), one_of(*range(4))
    layout, act = one_of(*LAYOUTS), one_of("none", "rms_norm", "rms_norm", *ACTS)
    place = {"rotary_dim": 2 * pairs, "start": before, "interleaved": draw(st.booleans())}
    return SimpleNamespace(
        layout=layout,
        rows=one_of(1, 2, 3) if "b" in layout else 1,
        heads=one_of(1, 2, 3, 4, 40) if "h" in layout else 1,
        tokens=one_of(1, 2, 3, 5, 18),
        spec=RopeSpec(before + 2 * pairs + after, base=100.0, **place),
        act=act,
        unit_offset=draw(st.booleans()),
        gate=one_of("none", "scalar", "exp", "slope", "given", "xpos", "factor"),
        tied=draw(st.booleans()),
        per_head=draw(st.booleans()),
        positions=one_of("offset", "ids", "rows", "fractions"),
        phased=draw(st.booleans()),
        learned=draw(st.booleans()),
        strides=one_of(*STRIDES),
        of_grad=one_of(*STRIDES),
        dtype=one_of(*DTYPES),
        inverse=act == "none" and draw(st.booleans()),
        in_place=draw(st.booleans()),
        learns=[name for name in Inputs._fields if draw(st.booleans())],
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def laid_out(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the same values with other strides; for "expanded", the first token repeated."""
    if kind == "permuted":
        return x.movedim(0, -2).contiguous().movedim(-2, 0)
    if kind == "inside":
        return torch.nn.functional.pad(x, (3, 2), value=math.nan)[..., 3 : 3 + x.shape[-1]]
    if kind == "every other channel":
        return torch.stack((x, x * math.nan), -1)[..., 0]
    if kind == "expanded":
        return x[..., :1, :].expand(x.shape)
    if kind == "misaligned":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x.contiguous()


class Inputs(NamedTuple):
    """All tensors of a case; ``gate`` holds factors ("scalar", "factor"), slopes ("slope") or logarithms."""

    x: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor
    gate: torch.Tensor
    omega: torch.Tensor
    where: torch.Tensor
    phases: torch.Tensor


def made(case: SimpleNamespace) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def noise(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or inside)

    # Other tensors than x keep more digits than 16 bits have.
    inside = torch.float64 if case.dtype == torch.float64 else torch.float32

    spec, heads = case.spec, case.heads if case.per_head else 1
    sizes = {"b": case.rows, "h": case.heads, "d": spec.head_dim}
    shape = [sizes.get(letter, case.tokens) for letter in case.layout]
    width = spec.rotary_dim // 2 if case.tied else spec.head_dim
    gate = {
        "scalar": noise(1)[0].abs() + 0.5,
        "slope": 0.02 * noise(heads, width),
        "given": 0.3 * noise(case.tokens, heads, width),
        "factor": (lambda x: x + 0.5 * x.sign())(noise(heads, spec.head_dim)),
    }.get(case.gate, 0.3 * noise(heads, width))
    where = torch.randint(-40, 40, (case.rows, case.tokens), generator=generator)
    if case.positions == "offset":
        where = where[:1, :1] + torch.arange(case.tokens)
    if case.positions == "ids":
        where = where[:1]
    if case.positions == "fractions":
        where = where.to(inside) / 8
    return Inputs(
        laid_out(noise(*shape, dtype=case.dtype), case.strides),
        laid_out(noise(*shape, dtype=case.dtype), case.of_grad),
        noise(heads, spec.head_dim),
        gate,
        0.5 * noise(heads, spec.rotary_dim // 2).abs(),
        where,
        3 * noise(case.rows if case.tied else 1, heads, case.tokens, spec.rotary_dim // 2),
    )


def leaves(case: SimpleNamespace, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Make the tensors that the case differentiates require grad; return them by name."""
    used = {
        "x": True,
        "weight": case.act == "rms_norm",
        "gate": case.gate not in ("none", "xpos"),
        "omega": case.learned,
        "where": case.positions == "fractions",
        "phases": case.phased,
    }
    return {name: getattr(inputs, name).requires_grad_() for name in case.learns if used.get(name)}


def found(case: SimpleNamespace, way: str) -> dict[str, torch.Tensor]:
    """Return the result and the gradients of the library."""
    if way != "reference":
        cpu.use_instruction_set(way)
    inputs = Inputs(*(t.detach() for t in made(case)))
    wanted = leaves(case, inputs)
    tied = "pair" if case.tied else None
    gate: gates.Gate | None = {
        "none": lambda: None,
        "scalar": lambda: gates.Scalar(inputs.gate),
        "exp": lambda: gates.Exp(inputs.gate, tied),
        "slope": lambda: gates.Slope(inputs.gate, tied),
        "given": lambda: gates.Given(inputs.gate, tied),
        "xpos": lambda: gates.XPos(1.25, scale_base=60.0),
        "factor": lambda: gates.Factor(inputs.gate),
    }[case.gate]()
    norm = RMSNorm(inputs.weight, 1e-3, case.unit_offset)
    act: Any = norm if case.act == "rms_norm" else case.act
    where: Any = inputs.where
    if case.positions == "offset":
        where = int(where[0, 0])
    elif len(where) == 1:
        where = where[0]
    options: dict[str, Any] = {
        "layout": case.layout,
        "act": None if case.inverse else act,
        "gate": gate,
        "inverse": case.inverse,
        "inv_freq": inputs.omega if case.learned else None,
        "phases": phases.given(inputs.phases) if case.phased else None,
    }
    backend = "reference" if way == "reference" else None
    # A copy, because expanded tensors and leaves would be refused.
    x = inputs.x.clone() if case.in_place else inputs.x
    verb = rotate_ if case.in_place else rotate
    y = stated.call(verb, x, case.spec, where, backend=backend, **options)
    result = {"y": oracle.as_bhsd(y.detach(), case.layout)}
    if y.requires_grad:
        slopes = torch.autograd.grad(y, list(wanted.values()), inputs.grad)
        result |= zip(wanted, slopes)
    return result


def true(case: SimpleNamespace) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return what `found` returns, from the formula in float64, and the size that errors are relative to.

    The size is the largest element. For a gradient that is a sum over elements, it is at least the largest
    product times the root of the number of elements; for omega and gate, times the largest position too.
    """
    given_ = Inputs(*(t.detach() for t in made(case)))
    inputs = Inputs(*(t.double() for t in given_))
    wanted = leaves(case, inputs)
    spec, x = case.spec, oracle.as_bhsd(inputs.x, case.layout)
    x = (
        oracle_acts.norm(x, inputs.weight, 1e-3, float(case.unit_offset))
        if case.act == "rms_norm"
        else oracle_acts.act(case.act, x)
    )
    pairs = spec.rotary_dim // 2
    k = torch.arange(pairs, dtype=torch.float64)
    omega = inputs.omega if case.learned else spec.base ** (-k / pairs)[None]
    where = inputs.where

    def spread(values: torch.Tensor) -> torch.Tensor:
        if not case.tied and case.gate != "xpos":
            return values
        both = (values, values)
        wide = torch.stack(both, -1).flatten(-2) if spec.interleaved else torch.cat(both, -1)
        after = spec.head_dim - spec.start - spec.rotary_dim
        return torch.nn.functional.pad(wide, (spec.start, after))

    at = where[:, None, :, None]
    if case.gate in ("none", "factor"):
        log = torch.zeros((), dtype=torch.float64)
    elif case.gate == "scalar":
        log = inputs.gate.log()
    elif case.gate == "xpos":
        log = spread(((k / pairs + 0.4) / 1.4).log()) * (at - 1.25) / 60.0
    elif case.gate == "given":
        log = spread(inputs.gate).transpose(0, 1)[None]
    else:
        log = spread(inputs.gate)[None, :, None] * (at if case.gate == "slope" else 1.0)
    angle = at * omega[None, :, None] + (inputs.phases if case.phased else 0.0)
    factor = inputs.gate[None, :, None] if case.gate == "factor" else torch.exp(log)
    if case.inverse:
        x, angle, factor = x / factor, -angle, torch.ones((), dtype=torch.float64)
    y = oracle.turned(x, angle.cos(), angle.sin(), spec.start, spec.interleaved) * factor
    result = {"y": y.detach()}
    sizes = {"y": y.abs().max().item()}
    if y.requires_grad:
        grad = oracle.as_bhsd(inputs.grad, case.layout)
        slopes = torch.autograd.grad(y, list(wanted.values()), grad)
        result |= zip(wanted, slopes)
        terms = sizes["y"] * inputs.grad.abs().max().item() * math.sqrt(y.numel())
        far = max(1.0, where.abs().max().item())
        for name, slope in zip(wanted, slopes):
            own = terms * (far if name in ("omega", "gate") else 1.0) if name != "x" else 0.0
            sizes[name] = max(slope.abs().max().item(), own)
    return result, sizes


@needs_kernel
@settings(
    max_examples=400,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_random_calls(case: SimpleNamespace) -> None:
    wanted, sizes = true(case)
    inputs = made(case)._asdict()
    bound = tolerances.value(f"f and P, {str(case.dtype)[6:]}")
    for way in WAYS:
        got = found(case, way)
        assert got.keys() == wanted.keys()
        for name, value in got.items():
            error = (value.double() - wanted[name]).abs()
            if name in "xy":  # relative to the largest channel of each head
                limit = bound * wanted[name].abs().amax(-1, keepdim=True).clamp(min=1e-30)
            else:
                limit = 4 * bound * torch.tensor(sizes[name])
            assert value.dtype == (case.dtype if name in "xy" else inputs[name].dtype)
            assert bool((error <= limit).all()), (way, name, error.max(), sizes[name])
