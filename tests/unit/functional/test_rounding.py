"""`rounding=` and `tables="full"`: the bits of other implementations, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.support import oracle_rounding as oracle
from tests.support.helpers import noise
from tests.support.matrix import both_pairings, every_backend, every_dtype, every_way, needs_kernel
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    rotary_apply,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
)
from tightrope.gates import XPos
from tightrope.nn import RotaryPositionalEmbedding

Function = Callable[..., Any]

ROWS, Q_HEADS, K_HEADS, TOKENS = 2, 3, 2, 5
# (Rotated channels, head dim): less and more than a vector register holds, with and without remainder.
WIDTHS = [(2, 2), (6, 9), (14, 14), (62, 62), (96, 128), (128, 128)]


def tables_for(width: int, dtype: torch.dtype, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random numbers as tables, one entry for each token and channel."""
    both = noise(2, TOKENS, width, seed=seed)
    return both[0].to(dtype), both[1].to(dtype)


def qk(dims: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, (batch, heads, seq, dim), as views of a fused projection."""
    fused = noise(ROWS, TOKENS, Q_HEADS + K_HEADS, dims, seed=seed).to(dtype).transpose(1, 2)
    return fused[:, :Q_HEADS], fused[:, Q_HEADS:]


def turned(x: torch.Tensor, width: int, *rest: Any) -> torch.Tensor:
    """Rotate the first `width` channels by the oracle and keep the others."""
    return torch.cat((oracle.rotate(x[..., :width], *rest), x[..., width:]), -1)


def rotate_full(q: Any, k: Any, cos: Any, sin: Any, *how: Any, **more: Any) -> Any:
    """Rotate by tables with an entry for each channel; `how`: interleaved, rounding."""
    named = dict(zip(("interleaved", "rounding"), how))
    return apply_rotary_pos_emb(q, k, cos, sin, tables="full", **named, **more)


# --- the formulas ----------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("table_dtype", ["that of x", torch.float32])
@pytest.mark.parametrize("rounding", ["wide", "each", ("wide", "each"), ("each", "wide")])
def test_forward_and_backward_have_the_bits_of_the_formulas(
    dtype: torch.dtype, backend: str, interleaved: bool, table_dtype: Any, rounding: Any
) -> None:
    forward, back = rounding if isinstance(rounding, tuple) else (rounding, rounding)
    for width, dims in WIDTHS:
        held = dtype if table_dtype == "that of x" else table_dtype
        cos, sin = tables_for(width, held)
        xs = [x.detach().clone().requires_grad_() for x in qk(dims, dtype)]
        ys = rotate_full(*xs, cos, sin, interleaved, rounding, backend=backend)
        grads = qk(dims, dtype, seed=2)
        found = torch.autograd.grad(ys, xs, grads)
        for x, y, grad, by_x in zip(xs, ys, grads, found, strict=True):
            assert_same_bits(y, turned(x, width, cos, sin, interleaved, forward))
            assert_same_bits(by_x, turned(grad, width, cos, sin, interleaved, back, True))


@every_dtype
@both_pairings
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
def test_other_formats_equal_full_tables(
    dtype: torch.dtype, interleaved: bool, rounding: str
) -> None:
    """Tables in other formats give the bits of full tables whose entries are equal within each pair."""
    q, k = qk(64, dtype)
    half = [table[:, :32] for table in tables_for(64, dtype)]
    full = [oracle.join(table, table, interleaved) for table in half]
    want = rotate_full(q, k, *full, interleaved, rounding)
    for name, given in {
        "half": half,
        "cat": [torch.cat((table, table), -1) for table in half],
        "repeat": [table.repeat_interleave(2, -1) for table in half],
    }.items():
        ys = apply_rotary_pos_emb(
            q, k, *given, tables=name, interleaved=interleaved, rounding=rounding
        )
        assert_same_bits(ys, want)


@needs_kernel
@both_pairings
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
def test_bits_depend_on_nothing_else(interleaved: bool, rounding: str) -> None:
    """Instruction sets, threads, strides, writing in place and the size of a call change no bit."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (6, 46, 128):
            q, k = qk(width, dtype)
            cos, sin = tables_for(width, dtype)
            options = {"tables": "full", "interleaved": interleaved, "rounding": rounding}
            if rounding == "once":
                want = apply_rotary_pos_emb(q, k, cos, sin, **options)
            else:
                want = [oracle.rotate(x, cos, sin, interleaved, rounding) for x in (q, k)]
            for name in cpu.instruction_sets():
                cpu.use_instruction_set(name)
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    strided = torch.empty(*q.shape[:3], 2 * width, dtype=dtype)[..., ::2]
                    for x, y in zip((q, k, strided.copy_(q)), (*want, want[0]), strict=True):
                        assert_same_bits(apply_rotary_pos_emb(x, None, cos, sin, **options)[0], y)
                        inside = x.clone()
                        apply_rotary_pos_emb_(inside, None, cos, sin, **options)
                        assert_same_bits(inside, y)
                    one = apply_rotary_pos_emb(q[:1, :1, 3:4], None, cos[3:4], sin[3:4], **options)
                    assert_same_bits(one[0], want[0][:1, :1, 3:4])


def any_magnitude(*shape: int, seed: int, least: int) -> torch.Tensor:
    """Return float32 numbers of all magnitudes from 2^least up to 2^40, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(least, 40, shape, generator=generator)
    values = torch.ldexp(noise(*shape, seed=seed), exponent)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, values)


@needs_kernel
@both_pairings
@pytest.mark.parametrize("least", [-149, -60, -45])
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
def test_tiny_numbers(interleaved: bool, least: int, rounding: str) -> None:
    """Subnormal numbers, and numbers whose products are subnormal, have the same bits everywhere."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tiny_tables in (False, True):
            q = any_magnitude(ROWS, Q_HEADS, TOKENS, 142, seed=3, least=least).to(dtype)
            cos, sin = tables_for(142, torch.float32)
            if tiny_tables:
                cos, sin = (any_magnitude(*cos.shape, seed=s, least=-149) for s in (4, 5))
            options = {"tables": "full", "interleaved": interleaved, "rounding": rounding}
            found = []
            for name in cpu.instruction_sets():
                cpu.use_instruction_set(name)
                found.append(apply_rotary_pos_emb(q, None, cos, sin, **options)[0])
            if rounding != "once":
                found.append(oracle.rotate(q, cos, sin, interleaved, rounding))
            for y in found[1:]:
                assert_same_bits(y, found[0])


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
    spec = RopeSpec(64, interleaved=interleaved)
    rotation = spec.at(torch.arange(TOKENS) * 1001)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ones = torch.ones(1, 1, TOKENS, 64, dtype=wide)
    # Rotating (1, 0) in float64 or float32 gives the cosine and sine themselves.
    first = oracle.join(ones[..., :32], 0 * ones[..., :32], interleaved)
    seen = rotate(first, rotation, backend=backend)
    held = dtype if forward == "each" else wide
    cos, sin = (
        oracle.join(one, one, interleaved).to(held) for one in oracle.split(seen, interleaved)
    )
    xs, grads = [x.detach().requires_grad_() for x in qk(64, dtype)], qk(64, dtype, seed=2)
    ys = rotate_qk(*xs, rotation, rounding=rounding, backend=backend)
    found = torch.autograd.grad(ys, xs, grads)
    for x, y, grad, by_x in zip(xs, ys, grads, found, strict=True):
        if forward != "once":
            assert_same_bits(y, oracle.rotate(x, cos, sin, interleaved, forward))
        assert_same_bits(by_x, oracle.rotate(grad, cos, sin, interleaved, back, True))


def test_every_public_rotation_takes_it() -> None:
    q, k = qk(32, torch.bfloat16)
    prepared = RopeSpec(32).at(7)
    cos, sin = tables_for(32, torch.bfloat16)
    for rounding in ("wide", "each", ("wide", "each")):
        want = rotate_qk(q, k, prepared, rounding=rounding)
        for _ in range(2):  # the second call takes the fast path of a prepared rotation
            assert_same_bits(rotate(q, prepared, rounding=rounding), want[0])
            assert_same_bits(rotate_(q.clone(), prepared, rounding=rounding), want[0])
            assert_same_bits(rotate_qk_(q.clone(), k.clone(), prepared, rounding=rounding), want)
            out = torch.empty_like(q)
            assert_same_bits(rotate(q, prepared, rounding=rounding, out=out), want[0])
        rope = RotaryPositionalEmbedding(32, rounding=rounding)
        assert f"rounding={rounding!r}" in repr(rope)
        ids = torch.arange(TOKENS) + 7
        assert_same_bits(rope(q, positions=7), want[0])
        assert_same_bits(
            rotary_pos_embedding(q, ids, interleaved=False, rounding=rounding), want[0]
        )
        half = cos[:, :16], sin[:, :16]
        assert_same_bits(
            rotary_apply(q, *half, rounding=rounding),
            apply_rotary_pos_emb(
                q, None, *half, tables="half", interleaved=True, rounding=rounding
            )[0],
        )
    assert not torch.equal(rotate(q, prepared), rotate(q, prepared, rounding="each"))


# --- real functions --------------------------------------------------------------------

# Modules of transformers, by the rounding of their apply_rotary_pos_emb, forward and backward. OLMo
# keeps its tables in float32.
TRANSFORMERS = {
    "each": (
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3 gpt_oss glm phi3 granite deepseek_v3 gpt_neox "
        "stablelm starcoder2"
    ),
    "wide": "cohere cohere2",
    ("wide", "each"): "olmo ernie4_5 ernie4_5_moe",
}
INTERLEAVED = {"glm", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe"}
LOW = [torch.float32, torch.bfloat16, torch.float16]


def assert_equal_rotations(
    function: Function, ours: Function, dtype: torch.dtype, dims: int = 64
) -> None:
    """Assert that the results and gradients of two rotations of (q, k) are equal, bit for bit."""
    results = []
    for rotation in (function, ours):
        xs = [x.detach().clone().requires_grad_() for x in qk(dims, dtype)]
        ys = rotation(*xs)
        results.append((*ys, *torch.autograd.grad(ys, xs, qk(dims, dtype, seed=2))))
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "name, rounding", [(name, r) for r, names in TRANSFORMERS.items() for name in names.split()]
)
def test_functions_of_transformers(name: str, rounding: Any, dtype: torch.dtype) -> None:
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    interleaved = name in INTERLEAVED
    held = torch.float32 if name == "olmo" else dtype
    half = [table[None, :, :32] for table in tables_for(64, held)]
    cos, sin = (torch.cat((table, table), -1) for table in half)
    if name in ("cohere", "cohere2"):
        cos, sin = (table.repeat_interleave(2, -1) for table in half)
    if name == "gpt_oss":
        cos, sin = half
    full = [oracle.join(table, table, interleaved) for table in half]
    assert_equal_rotations(
        lambda q, k: module.apply_rotary_pos_emb(q, k, cos, sin),
        lambda q, k: rotate_full(q, k, *full, interleaved, rounding),
        dtype,
    )


def of_diffusers(unbind: int) -> Function:
    from diffusers.models.embeddings import apply_rotary_emb

    return lambda x, cos, sin: apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=unbind)


def of_meta(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by complex numbers, as the original code of Llama, DeepSeek and Mistral does."""
    turns = torch.complex(cos[..., 0::2].contiguous(), sin[..., 0::2].contiguous())
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * turns).flatten(3).type_as(x)


def of_rotary_embedding_torch(angles: torch.Tensor) -> Function:
    from rotary_embedding_torch import apply_rotary_emb

    return lambda x, *_: apply_rotary_emb(angles, x)


def of_x_transformers(angles: torch.Tensor) -> Function:
    from x_transformers.x_transformers import apply_rotary_pos_emb as theirs

    return lambda x, *_: theirs(x, angles[None])


ANGLES = oracle.join(*[(torch.arange(TOKENS)[:, None] * torch.rand(32)) * 3] * 2, True)
OTHERS: dict[str, tuple[Function, bool, Any]] = {
    "diffusers, neighbours": (of_diffusers(-1), True, ("wide", "each")),
    "diffusers, halves": (of_diffusers(-2), False, ("wide", "each")),
    "complex numbers": (of_meta, True, "wide"),
    "rotary-embedding-torch": (of_rotary_embedding_torch(ANGLES), True, ("wide", "each")),
    "x-transformers": (of_x_transformers(ANGLES), True, ("wide", "each")),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", OTHERS)
def test_functions_of_other_libraries(name: str, dtype: torch.dtype) -> None:
    function, interleaved, rounding = OTHERS[name]
    cos, sin = ANGLES.cos(), ANGLES.sin()
    if "halves" in name:
        cos, sin = tables_for(64, torch.float32)
    assert_equal_rotations(
        lambda q, k: (function(q, cos, sin), function(k, cos, sin)),
        lambda q, k: rotate_full(q, k, cos, sin, interleaved, rounding),
        dtype,
    )


# --- gradients, transforms, the compiler -----------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@both_pairings
def test_gradients_of_full_tables_have_the_bits_of_eager_code(
    dtype: torch.dtype, interleaved: bool
) -> None:
    """Gradients of tables have the bits of eager code: PyTorch sums the same products in both."""
    found = []
    for function in (
        lambda x, c, s: oracle.eager(x, c, s, interleaved),
        lambda x, c, s: rotate_full(x, None, c, s, interleaved, "each")[0],
    ):
        q = qk(64, dtype)[0].contiguous()
        cos, sin = (t[None].requires_grad_() for t in tables_for(64, dtype))
        y = function(q, cos, sin)
        found.append(torch.autograd.grad(y, (cos, sin), qk(64, dtype, seed=2)[0].contiguous()))
    assert_same_bits(*found)


@both_pairings
@pytest.mark.parametrize("rounding", ["each", ("wide", "each"), ("each", "wide")])
def test_transforms_keep_the_rounding(interleaved: bool, rounding: Any) -> None:
    q, grad = qk(64, torch.bfloat16)[0], qk(64, torch.bfloat16, seed=2)[0]
    cos, sin = tables_for(64, torch.bfloat16)

    def rotation(x: torch.Tensor) -> torch.Tensor:
        return rotate_full(x, None, cos, sin, interleaved, rounding)[0]

    leaf = q.detach().requires_grad_()
    want = rotation(leaf)
    (by_x,) = torch.autograd.grad(want, leaf, grad)
    y, pull = torch.func.vjp(rotation, q)
    assert_same_bits(y, want)
    assert_same_bits(pull(grad)[0], by_x)
    assert_same_bits(torch.vmap(rotation)(q[None])[0], want)
    assert_same_bits(torch.func.jvp(rotation, (q,), (grad,))[0], want)


@pytest.mark.one_in(3)
@both_pairings
@pytest.mark.parametrize("rounding", ["wide", "each", ("wide", "each")])
def test_compiled_code_keeps_the_bits(
    interleaved: bool, rounding: Any, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    cos, sin = tables_for(64, torch.bfloat16)

    def rotation(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate_full(q * 2, k * 2, cos, sin, interleaved, rounding)

    assert_equal_rotations(rotation, torch.compile(rotation, fullgraph=True), torch.bfloat16)


# --- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["twice", ("once",), ("once", "none"), 1, ["once", "each"]])
def test_unknown_roundings_are_refused(value: Any) -> None:
    x = torch.randn(1, 1, 4, 8)
    message = (
        r"^\[rotate\] rounding must be 'once', 'wide' or 'each', or a pair of them for forward and "
        r"backward, but got "
    )
    for spec in (RopeSpec(8), RopeSpec(8).at(0)):
        with pytest.raises(ValueError, match=message):
            rotate(x, spec, rounding=value)
    with pytest.raises(ValueError, match=r"^\[RotaryPositionalEmbedding\] rounding must be"):
        RotaryPositionalEmbedding(8, rounding=value)
    with pytest.raises(ValueError, match=r"^\[apply_rotary_pos_emb\] rounding must be 'once'"):
        apply_rotary_pos_emb(x, None, x[0, 0], x[0, 0], tables="full", rounding=value)


def test_rounding_with_an_act_or_a_gate_is_refused() -> None:
    x, prepared = torch.randn(1, 1, 4, 8), RopeSpec(8).at(0)
    gate = XPos(8)
    for _ in range(2):
        rotate(x, prepared, gate=gate)
        rotate(x, prepared, rounding="each")
        for more in ({"act": "silu"}, {"gate": gate}):
            with pytest.raises(
                ValueError,
                match=r"^\[rotate\] rounding must be 'once' with an act or a gate but got 'each'\.",
            ):
                rotate(x, prepared, rounding="each", **more)


def test_the_inverse_of_full_tables_is_refused() -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(
        ValueError, match=r"^\[apply_rotary_pos_emb\] inverse must be False with tables='full'"
    ):
        apply_rotary_pos_emb(x, None, x[0, 0], x[0, 0], tables="full", inverse=True)


# --- faults found by review ------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001])
def test_tables_with_any_nan_give_nan(bits: int, rounding: str, backend: str) -> None:
    table = torch.full((TOKENS, 64), bits, dtype=torch.int32).view(torch.float32)
    for dtype in LOW:
        x = qk(64, dtype)[0]
        y = rotate_full(x, None, table, table, rounding=rounding, backend=backend)[0]
        assert y.isnan().all()


@both_pairings
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_gradients_of_full_tables_of_empty_tensors(
    shape: tuple[int, int, int], interleaved: bool
) -> None:
    q = torch.zeros(*shape, 8)
    cos, sin = (torch.ones(shape[2], 8).requires_grad_() for _ in range(2))
    y = rotate_full(q, None, cos, sin, interleaved)[0]
    for grad in torch.autograd.grad(y.sum(), (cos, sin)):
        assert torch.equal(grad, torch.zeros(shape[2], 8))
