"""`rounding=`: the bits of other implementations, forward and backward.

test_tables.py beside this file compares all roundings by tables with the formulas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import oracle_rounding as oracle
from tests.support.helpers import noise, on
from tests.support.matrix import both_pairings, every_backend, every_way, needs_kernel
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    rotary_apply,
    rotary_pos_embedding,
    rotate,
    rotate_qk,
)
from tightrope.nn import RotaryPositionalEmbedding

ROWS, Q_HEADS, K_HEADS, TOKENS = 2, 3, 2, 5
LOW = [torch.float32, torch.bfloat16, torch.float16]


def tables_for(width: int, dtype: torch.dtype, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random numbers as tables, one entry for each token and channel."""
    both = noise(2, TOKENS, width, seed=seed)
    return both[0].to(dtype), both[1].to(dtype)


def qk(dims: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, (batch, heads, seq, dim), as views of a fused projection."""
    fused = noise(ROWS, TOKENS, Q_HEADS + K_HEADS, dims, seed=seed).to(dtype).transpose(1, 2)
    return fused[:, :Q_HEADS], fused[:, Q_HEADS:]


def rotate_full(q: Any, k: Any, cos: Any, sin: Any, *how: Any, **more: Any) -> Any:
    """Rotate by tables with an entry for each channel; `how`: interleaved, rounding."""
    named = dict(zip(("interleaved", "rounding"), how))
    return apply_rotary_pos_emb(q, k, cos, sin, tables="full", **named, **more)


# --- the same bits everywhere ---------------------------------------------------------------------


def any_magnitude(*shape: int, seed: int, least: int) -> torch.Tensor:
    """Return float32 numbers of all magnitudes from 2^least up to 2^40, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(least, 40, shape, generator=generator)
    values = torch.ldexp(noise(*shape, seed=seed), exponent)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, values)


@needs_kernel
@both_pairings
@pytest.mark.parametrize("least", [None, -149, -60, -45])
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
def test_bits_depend_on_nothing_else(interleaved: bool, least: int | None, rounding: str) -> None:
    """Instruction sets, threads, strides, writing in place and the size of a call change no bit.

    Nor do they of subnormal numbers (`least`: the smallest exponent), nor of others whose products are
    subnormal. The widths are less and more than a vector register holds, with and without remainder.
    """
    for width in (6, 14, 46, 142):
        for dtype in LOW:
            q, (cos, sin) = qk(width, dtype)[0], tables_for(width, dtype)
            if least is not None:
                q = any_magnitude(*q.shape, seed=3, least=least).to(dtype)
                cos, sin = tables_for(width, torch.float32)
                if width == 142:
                    cos, sin = (any_magnitude(*cos.shape, seed=s, least=-149) for s in (4, 5))
            options = {"tables": "full", "interleaved": interleaved, "rounding": rounding}
            wanted = apply_rotary_pos_emb(q, None, cos, sin, **options)[0]
            if rounding != "once":
                assert_same_bits(wanted, oracle.rotate(q, cos, sin, interleaved, rounding))
            strided = torch.stack((q, q), -1)[..., 0]
            for name in cpu.instruction_sets():
                cpu.use_instruction_set(name)
                for threads, x in ((1, q), (2, strided)):
                    torch.set_num_threads(threads)
                    assert_same_bits(apply_rotary_pos_emb(x, None, cos, sin, **options)[0], wanted)
                inside, part = q.clone(), (None, cos[3:4], sin[3:4])
                apply_rotary_pos_emb_(inside, None, cos, sin, **options)
                one = apply_rotary_pos_emb(q[:1, :1, 3:4], *part, **options)[0]
                assert_same_bits([inside, one], [wanted, wanted[:1, :1, 3:4]])


@needs_kernel
@both_pairings
@pytest.mark.parametrize("exponent", [-61, -60, 0, 49, 50, 110])
@pytest.mark.parametrize("other", [-72, -61, -60, 0, 49, 50])
def test_products_of_any_two_bfloat16_are_rounded(
    interleaved: bool, exponent: int, other: int
) -> None:
    """All pairs of significands, ties among them, at and beyond the sizes from which the kernel multiplies in another way.

    Another head has zeros, infinities and NaN among its numbers.
    """
    significands = (1 + torch.arange(128) / 128).repeat(2)
    x = torch.ldexp(significands, torch.tensor(exponent)).expand(1, 2, 128, 256).bfloat16().clone()
    x[0, 1, :, ::37] = torch.tensor([0.0, -0.0, torch.inf, 1e-40, torch.nan, -3.0, 3e38]).bfloat16()
    by_token = torch.ldexp(1 + torch.arange(128) / 128, torch.tensor(other))[:, None]
    cos, sin = by_token.bfloat16().expand(128, 256), (-by_token).flip(0).bfloat16().expand(128, 256)
    wanted = oracle.rotate(x, cos, sin, interleaved, "each").float()
    for name in cpu.instruction_sets():
        cpu.use_instruction_set(name)
        for table in ("full", "cat" if not interleaved else "repeat"):
            options = {"interleaved": interleaved, "rounding": "each", "tables": table}
            found = apply_rotary_pos_emb(x, None, cos, sin, **options)[0].float()
            assert_same_bits(found.nan_to_num(5.0), wanted.nan_to_num(5.0))


@every_way
@pytest.mark.parametrize(
    "rounding", ["wide", "each", ("each", "wide"), ("once", "each"), ("wide", "each")]
)
def test_phase_words_are_rounded_first(
    dtype: torch.dtype, backend: str, interleaved: bool, rounding: Any
) -> None:
    """ "each" rounds cosine and sine, amplitude included; "wide" leaves them as they are.

    The forward rounding determines the cosines that both passes use.
    """
    forward, back = rounding if isinstance(rounding, tuple) else (rounding, rounding)
    spec, ids = RopeSpec(64, interleaved=interleaved), torch.arange(TOKENS) * 1001
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ones = torch.ones(1, 1, TOKENS, 32, dtype=wide)
    # Rotating (1, 0) in float64 or float32 gives the cosine and sine themselves.
    seen = on(backend, rotate, oracle.join(ones, 0 * ones, interleaved), spec, ids)
    held = dtype if forward == "each" else wide
    cos, sin = (
        oracle.join(one, one, interleaved).to(held) for one in oracle.split(seen, interleaved)
    )
    xs, grads = [x.detach().requires_grad_() for x in qk(64, dtype)], qk(64, dtype, seed=2)
    ys = on(backend, rotate_qk, *xs, spec.at(ids, rounding=rounding))
    found = torch.autograd.grad(ys, xs, grads)
    for x, y, grad, by_x in zip(xs, ys, grads, found, strict=True):
        if forward != "once":
            assert_same_bits(y, oracle.rotate(x, cos, sin, interleaved, forward))
        assert_same_bits(by_x, oracle.rotate(grad, cos, sin, interleaved, back, True))


def test_functions_of_seeds_and_the_module_take_it() -> None:
    q, spec = qk(32, torch.bfloat16)[0], RopeSpec(32)
    half = [table[:, :16] for table in tables_for(32, torch.bfloat16)]
    as_tables = {"tables": "half", "interleaved": True}
    for rounding in ("wide", "each", ("wide", "each")):
        wanted = rotate(q, spec.at(7, rounding=rounding))
        rope, ids = RotaryPositionalEmbedding(32, rounding=rounding), torch.arange(TOKENS) + 7
        assert_same_bits(rope(q, positions=7), wanted)
        assert_same_bits(rotary_pos_embedding(q, ids, False, rounding=rounding), wanted)
        by_tables = apply_rotary_pos_emb(q, None, *half, **as_tables, rounding=rounding)[0]
        assert_same_bits(rotary_apply(q, *half, rounding=rounding), by_tables)
    assert not torch.equal(rotate(q, spec, 7), rotate(q, spec.at(7, rounding="each")))


# --- complex numbers --------------------------------------------------------------------------------


# --- gradients and transforms ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@both_pairings
def test_gradients_of_full_tables_have_the_bits_of_eager_code(
    dtype: torch.dtype, interleaved: bool
) -> None:
    """PyTorch sums the same products in both."""
    found = []
    for function in (
        lambda x, c, s: oracle.eager(x, c, s, interleaved),
        lambda x, c, s: rotate_full(x, None, c, s, interleaved, "each")[0],
    ):
        q, grad = (qk(64, dtype, seed=seed)[0].contiguous() for seed in (1, 2))
        tables = [t[None].requires_grad_() for t in tables_for(64, dtype)]
        found.append(torch.autograd.grad(function(q, *tables), tables, grad))
    assert_same_bits(*found)


@both_pairings
@pytest.mark.parametrize("rounding", ["each", ("wide", "each"), ("each", "wide")])
def test_transforms_keep_the_rounding(interleaved: bool, rounding: Any) -> None:
    q, grad = (qk(64, torch.bfloat16, seed=seed)[0] for seed in (1, 2))
    tables = tables_for(64, torch.bfloat16)

    def rotation(x: torch.Tensor) -> torch.Tensor:
        return rotate_full(x, None, *tables, interleaved, rounding)[0]

    leaf = q.detach().requires_grad_()
    wanted = rotation(leaf)
    by_x = torch.autograd.grad(wanted, leaf, grad)
    y, pull = torch.func.vjp(rotation, q)
    primal = torch.func.jvp(rotation, (q,), (grad,))[0]
    assert_same_bits([y, torch.vmap(rotation)(q[None])[0], primal], [wanted.detach()] * 3)
    assert_same_bits(pull(grad), by_x)


# --- faults found by review -----------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001])
def test_tables_with_any_nan_give_nan(bits: int, rounding: str, backend: str) -> None:
    table = torch.full((TOKENS, 64), bits, dtype=torch.int32).view(torch.float32)
    for dtype in LOW:
        x = qk(64, dtype)[0]
        y = on(backend, rotate_full, x, None, table, table, rounding=rounding)[0]
        assert y.isnan().all()


@both_pairings
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_gradients_of_full_tables_of_empty_tensors(shape: Any, interleaved: bool) -> None:
    tables = [torch.ones(shape[2], 8).requires_grad_() for _ in range(2)]
    y = rotate_full(torch.zeros(*shape, 8), None, *tables, interleaved)[0]
    for grad in torch.autograd.grad(y.sum(), tables):
        assert_same_bits(grad, torch.zeros(shape[2], 8))
