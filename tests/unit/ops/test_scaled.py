"""`cache_scale=`: results in 8 bits, compared with an encoder that only shifts integers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support import stated
from tests.support.helpers import noise, on
from tests.support.matrix import every_backend, every_dtype
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, phases, positions
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_qk, write_kv
from tightrope.gates import Scalar, Slope

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}  # bits of the mantissa, bias, the largest code
every_format = pytest.mark.parametrize("to", FORMATS, ids=str)
ROWS, HEADS, TOKENS, DIM = 2, 3, 5, 16
SPEC = RopeSpec(DIM, rotary_dim=12, start=2)
Q, K = noise(ROWS, 6, TOKENS, DIM).float(), noise(ROWS, HEADS, TOKENS, DIM, seed=1).float()


# --- truth ----------------------------------------------------------------------------------------


def code_of(bits: int, to: torch.dtype) -> int:
    """Return the code of the float32 of these bits, limited to the range of a format; -1 for NaN."""
    mantissa_bits, bias, largest = FORMATS[to]
    sign, exponent, mantissa = bits >> 31 << 7, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return -1 if mantissa else sign | largest
    if exponent:
        mantissa |= 1 << 23
    else:
        exponent = 1
    if mantissa == 0:
        return sign
    # The number is mantissa · 2^(exponent - 150). Codes are its multiples of 2^unit.
    unit = max(exponent - 150 + mantissa.bit_length() - 1, 1 - bias) - mantissa_bits
    drop = unit - (exponent - 150)
    if drop > 0:
        rest, half = mantissa & ((1 << drop) - 1), 1 << (drop - 1)
        count = mantissa >> drop
        count += rest > half or (rest == half and count & 1)
    else:
        count = mantissa << -drop
    # A carry out of the mantissa raises the exponent by itself.
    code = count + ((unit + mantissa_bits - (1 - bias)) << mantissa_bits)
    return sign | min(code, largest)


def codes(y: torch.Tensor, scale: float, to: torch.dtype) -> torch.Tensor:
    """Encode y / scale; -1 for NaN."""
    quotient = y.to(torch.float32) / torch.tensor(scale, dtype=torch.float32)
    bits = quotient.contiguous().view(torch.int32).flatten().tolist()
    return torch.tensor([code_of(each & 0xFFFFFFFF, to) for each in bits]).reshape(y.shape)


def stored(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of a float8 tensor; -1 for NaN."""
    found = x.contiguous().view(torch.uint8).long()
    return torch.where(x.float().isnan(), -1, found)


def test_the_encoder_knows_every_code() -> None:
    """It maps each number of a format to itself, ties to even, and numbers beyond it to the largest."""
    for to, (_, _, largest) in FORMATS.items():
        every = torch.arange(256, dtype=torch.uint8).view(to).float()
        finite = every.isfinite()
        assert torch.equal(codes(every, 1.0, to)[finite], torch.arange(256)[finite])
        far = codes(torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan]), 1.0, to)
        assert far.tolist() == [largest, largest | 0x80, largest, -1]
    ties = codes(torch.tensor([17.0, 19.0, 2.0**-10, 2.0**-10 * 1.01]), 1.0, E4M3)
    assert ties.tolist() == [0x58, 0x5A, 0x00, 0x01]


# --- numbers --------------------------------------------------------------------------------------

EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@every_format
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.37, 1e-6, 3e4])
def test_every_bfloat16(scale: float, to: torch.dtype) -> None:
    """In channels that do not rotate, with infinities, and beside 0 in a rotation by no angle."""
    still = RopeSpec(10, rotary_dim=2)
    options: dict[str, Any] = {"layout": "sd", "cache_scale": scale}
    x = torch.cat((torch.zeros(8192, 2).bfloat16(), EVERY.view(-1, 8)), -1)
    out = torch.empty(x.shape, dtype=to)
    assert write_kv(None, x, None, still, cache=(out, None), **options) is None
    assert torch.equal(stored(out)[:, 2:], codes(x, scale, to)[:, 2:])
    x = torch.stack((EVERY, torch.zeros_like(EVERY)), -1)
    x = torch.where(x.isinf(), torch.finfo(x.dtype).max, x)  # ∞ · 0 is NaN in a rotation
    want = codes(x, scale, to).masked_fill(x.isnan().any(-1, keepdim=True), -1)
    where = torch.zeros(len(x), dtype=torch.int64)
    for backend, rounding in itertools.product((None, "reference"), ("once", "each")):
        out, rope = torch.empty(x.shape, dtype=to), RopeSpec(2).at(where, rounding=rounding)
        on(backend, write_kv, None, x, None, rope, cache=(out, None), **options)
        assert torch.equal(stored(out), want)


@every_backend
@every_format
@every_dtype
def test_where_it_rounds(dtype: torch.dtype, to: torch.dtype, backend: str | None) -> None:
    """ "once" has no other rounding than that of float32; "wide" and "each" round to the dtype of x first."""
    x, scale = noise(ROWS, HEADS, 64, DIM, dtype=dtype), 0.11
    found = {}
    for rounding in ("once", "wide", "each"):
        rope, out = SPEC.at(7, rounding=rounding), torch.empty(x.shape, dtype=to)
        on(backend, write_kv, None, x, None, rope, cache=(out, None), cache_scale=scale)
        wide = x.float() if rounding == "once" and dtype != torch.float64 else x
        found[rounding] = stored(out)
        assert torch.equal(found[rounding], codes(on(backend, rotate, wide, rope), scale, to))
    if dtype == torch.bfloat16:
        assert not torch.equal(found["once"], found["wide"])


# --- destinations ---------------------------------------------------------------------------------

SLOTS = torch.tensor([[7, 2, -1, 0, 11], [5, 4, 3, 9, -1]])


@every_backend
@every_format
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_keys_and_values_in_slots(layout: str, to: torch.dtype, backend: str | None) -> None:
    """Each has its own scale, whatever its form; swapped scales are seen. Other bytes stay as they are."""
    order = ["bhsd".index(letter) for letter in layout]
    q, k, v = Q.bfloat16(), K.bfloat16(), noise(ROWS, HEADS + 1, TOKENS, 7, seed=2).bfloat16()
    want_q = on(backend, rotate, q, SPEC, 3)
    keys = codes(on(backend, rotate, k.float(), SPEC, 3), 0.5, to)
    values = codes(v, 3.0, to)
    for scale in ((0.5, 3.0), (torch.tensor(0.5), torch.tensor([3.0], dtype=torch.float64))):
        shapes = (4, HEADS, 3, DIM + 4), (4, HEADS + 1, 3, 9)
        memory = [torch.full(shape, 0x11, dtype=torch.uint8).view(to) for shape in shapes]
        own = memory[0][..., 2:-2], memory[1][..., 1:-1]
        q_out = torch.empty_like(q)
        q_in, k_in, v_in, out, cache, of_values = (x.permute(order) for x in (q, k, v, q_out, *own))
        options: dict[str, Any] = {"layout": layout, "cache_scale": scale, "slots": SLOTS}
        options |= {"cache": (cache, of_values), "out": out}
        assert on(backend, write_kv, q_in, k_in, v_in, SPEC, 3, **options) is out
        assert_same_bits(q_out, want_q)
        there = SLOTS >= 0
        rest = sorted(set(range(12)) - set(SLOTS[there].tolist()))
        for whole, written, expected in zip(memory, own, (keys, values), strict=True):
            found = stored(written).transpose(1, 2).flatten(0, 1)  # slots, heads, channels
            assert torch.equal(found[SLOTS[there]], expected.transpose(1, 2)[there])
            assert bool((found[rest] == 0x11).all())
            edge = (whole.shape[-1] - written.shape[-1]) // 2
            beside = torch.cat((stored(whole)[..., :edge], stored(whole)[..., -edge:]), -1)
            assert bool((beside == 0x11).all())


def test_packed_keys_in_pages_and_one_scale_for_both() -> None:
    k, v, slots = K[0].transpose(0, 1), noise(TOKENS, 1, 6).float(), SLOTS[0]
    pages, of_values = (torch.zeros(4, 3, *x.shape[1:], dtype=E4M3) for x in (k, v))
    cache = pages, of_values
    write_kv(None, k, v, SPEC, layout="thd", cache=cache, slots=slots, cache_scale=2)
    for x, cache in ((rotate(k, SPEC, layout="thd"), pages), (v, of_values)):
        found = stored(cache).flatten(0, 1)[slots[slots >= 0]]
        assert torch.equal(found, codes(x, 2.0, E4M3)[slots >= 0])


def test_q_may_be_its_own_out_and_no_slots_are_needed() -> None:
    q, k = Q.bfloat16(), K.bfloat16()
    want = rotate(q, SPEC), codes(rotate(k.float(), SPEC), 0.7, E5M2)
    out = torch.empty(ROWS, HEADS, TOKENS, 2 * DIM, dtype=E5M2)[..., ::2]
    assert write_kv(q, k, None, SPEC, cache=(out, None), out=q, cache_scale=0.7) is q
    assert_same_bits(q, want[0])
    assert torch.equal(stored(out), want[1])


IDS = positions.per_head(torch.arange(ROWS * HEADS * TOKENS).view(ROWS, HEADS, TOKENS))
OPTIONS: dict[str, dict[str, Any]] = {
    "norm": {"act": (RMSNorm(torch.ones(DIM)), None)},
    "gates": {"act": "silu", "gate": (Scalar(0.5), Slope(torch.full((DIM,), 0.1)))},
    "phases": {"phases": (None, phases.given(noise(1, 1, TOKENS, 1)))},
    "frequencies": {"inv_freq": torch.rand(6, generator=torch.Generator().manual_seed(0))},
    "positions of heads": {"positions": IDS},
    "stack": {"stack": "transformers"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_with_everything_else(options: dict[str, Any]) -> None:
    """q is what it is without a scale; k gets its own part of a pair."""
    given = dict(options)
    spec = RopeSpec(DIM) if "stack" in options else SPEC
    rope, q, out = (spec, given.pop("positions", 3)), K * 2, torch.empty(K.shape, dtype=E4M3)
    got = stated.call(write_kv, q, K, None, *rope, cache=(out, None), cache_scale=0.25, **given)
    want = stated.call(rotate_qk, q, K, *rope, **given)
    assert_same_bits(got, want[0])
    assert torch.equal(stored(out), codes(want[1], 0.25, E4M3))


@pytest.mark.parametrize("slots", [None, SLOTS])
def test_compiled(slots: torch.Tensor | None) -> None:
    def step(k: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        to: dict[str, Any] = {"cache": (cache, None), "slots": slots, "cache_scale": scale}
        write_kv(None, k + 1, None, SPEC, 3, **to)
        return k * 2

    k, scale = K.bfloat16(), torch.tensor(0.3)
    cache = torch.zeros((4, HEADS, 3, DIM) if slots is not None else k.shape, dtype=E4M3)
    expected = cache.clone()
    step(k, expected, scale)
    torch.compile(step, fullgraph=True, backend="aot_eager")(k, cache, scale)
    assert torch.equal(stored(cache), stored(expected))


# --- refused, and nothing was written ---------------------------------------------------------------


def test_nothing_is_written_by_a_refused_call() -> None:
    q, cache = K.clone(), torch.zeros(4, HEADS, 3, DIM, dtype=E4M3)
    for slots in (SLOTS + 1, SLOTS[:1]):
        with pytest.raises((ValueError, IndexError)):
            write_kv(q, K, None, SPEC, cache=(cache, None), slots=slots, out=q, cache_scale=1.0)
    assert torch.equal(q, K)
    assert not bool(stored(cache).any())
