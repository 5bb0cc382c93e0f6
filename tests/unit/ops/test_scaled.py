"""`scale=`: results in 8 bits, compared with an encoder that only shifts integers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.helpers import noise, refusals
from tests.support.matrix import every_backend
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, phases, positions
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_qk
from tightrope.gates import Scalar, Slope
from tightrope.spec import PreparedRotation

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}  # bits of the mantissa, bias, the largest code
every_format = pytest.mark.parametrize("to", FORMATS, ids=str)
ROWS, HEADS, TOKENS, DIM = 2, 3, 5, 16
SPEC = RopeSpec(DIM, rotary_dim=12, start=2)
STILL = RopeSpec(2)


# --- truth ----------------------------------------------------------------------------------------


def code_of(bits: int, to: torch.dtype) -> int | None:
    """Return the code of the float32 of these bits, limited to the range of a format; None for NaN."""
    mantissa_bits, bias, largest = FORMATS[to]
    sign, exponent, mantissa = bits >> 31 << 7, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return None if mantissa else sign | largest
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
    """Encode y / scale, int32; -1 for NaN."""
    quotient = y.to(torch.float32) / torch.tensor(scale, dtype=torch.float32)
    bits = quotient.contiguous().view(torch.int32).flatten().tolist()
    found = [code_of(each & 0xFFFFFFFF, to) for each in bits]
    return torch.tensor([-1 if each is None else each for each in found]).reshape(y.shape)


def stored(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of a float8 tensor; -1 for NaN."""
    found = x.contiguous().view(torch.uint8).long()
    return torch.where(x.float().isnan(), -1, found)


def test_the_encoder_knows_every_code() -> None:
    """It maps each number of a format to itself, ties to even, and numbers beyond it to the largest."""
    for to, (_, _, largest) in FORMATS.items():
        every = torch.arange(256, dtype=torch.uint8).view(to)
        real = every.float()
        finite = real.isfinite()
        assert torch.equal(codes(real, 1.0, to)[finite], torch.arange(256)[finite])
        assert codes(torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan]), 1.0, to).tolist() == [
            largest,
            largest | 0x80,
            largest,
            -1,
        ]
    assert codes(torch.tensor([17.0, 19.0, 2.0**-10, 2.0**-10 * 1.01]), 1.0, E4M3).tolist() == [
        0x58,
        0x5A,
        0x00,
        0x01,
    ]


# --- numbers --------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.37, 1e-6, 3e4])
def test_every_bfloat16(scale: float, to: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 2)
    x = torch.stack((x[:, 0], torch.zeros_like(x[:, 0]), x[:, 1], torch.zeros_like(x[:, 0])), -1)
    x = torch.where(x.isinf(), torch.finfo(x.dtype).max, x).view(
        -1, 2
    )  # ∞ · 0 is NaN in a rotation
    where = torch.zeros(len(x), dtype=torch.int64)  # a rotation that keeps x, but for NaN
    want = codes(x, scale, to).masked_fill(x.isnan().any(-1, keepdim=True), -1)
    for backend, rounding in itertools.product((None, "reference"), ("once", "each")):
        out, options = torch.empty(x.shape, dtype=to), {"rounding": rounding, "backend": backend}
        assert rotate(x, STILL, where, layout="sd", out=out, scale=scale, **options) is out
        assert torch.equal(stored(out), want)


@every_format
def test_infinities_are_limited(to: torch.dtype) -> None:
    """Channels that do not rotate keep every value, infinities too."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 8)
    spec = RopeSpec(10, rotary_dim=2)
    x = torch.cat((torch.zeros_like(x[:, :2]), x), -1)
    out = rotate(x, spec, layout="sd", out=torch.empty(x.shape, dtype=to), scale=0.5)
    assert torch.equal(stored(out)[:, 2:], codes(x, 0.5, to)[:, 2:])


@every_backend
@every_format
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_where_it_rounds(dtype: torch.dtype, to: torch.dtype, backend: str | None) -> None:
    """ "once" has no other rounding than that of float32; "wide" and "each" round to the dtype of x first."""
    x, scale = noise(ROWS, HEADS, 64, DIM, dtype=dtype), 0.11
    options: dict[str, Any] = {"backend": backend}
    found = {}
    for rounding in ("once", "wide", "each"):
        out = torch.empty(x.shape, dtype=to)
        rotate(x, SPEC, 7, out=out, scale=scale, rounding=rounding, **options)
        wide = x.float() if rounding == "once" and dtype != torch.float64 else x
        y = rotate(wide, SPEC, 7, rounding=rounding, **options)
        assert y.dtype == (
            torch.float32 if rounding == "once" and dtype != torch.float64 else dtype
        )
        found[rounding] = stored(out)
        assert torch.equal(found[rounding], codes(y, scale, to))
    if dtype == torch.bfloat16:
        assert not torch.equal(found["once"], found["wide"])


# --- destinations ---------------------------------------------------------------------------------

SLOTS = torch.tensor([[7, 2, -1, 0, 11], [5, 4, 3, 9, -1]])
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}


@every_backend
@every_format
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_in_slots(layout: str, to: torch.dtype, backend: str | None) -> None:
    """Each has its own scale, whatever its form; swapped scales are seen. Other bytes stay as they are."""
    order = LAYOUTS[layout]
    q, k, v = (
        noise(ROWS, heads, TOKENS, width, seed=seed, dtype=torch.bfloat16)
        for seed, (heads, width) in enumerate(((6, DIM), (HEADS, DIM), (HEADS + 1, 7)))
    )
    want_q = rotate(q, SPEC, 3, backend=backend)
    keys = codes(rotate(k.float(), SPEC, 3, backend=backend), 0.5, to)
    values = codes(v, 3.0, to)
    for scale in ((0.5, 3.0), (torch.tensor(0.5), torch.tensor([3.0], dtype=torch.float64))):
        caches = [
            torch.full(shape, 0x11, dtype=torch.uint8).view(to)
            for shape in ((4, HEADS, 3, DIM + 4), (4, HEADS + 1, 3, 9))
        ]
        caches = [cache.permute(order) for cache in caches]
        own = caches[0][..., 2:-2], caches[1][..., 1:-1]
        q_out = torch.empty_like(q.permute(order))
        got = rotate_qk(
            *(x.permute(order) for x in (q, k)),
            SPEC,
            3,
            layout=layout,
            out=(q_out, own[0]),
            slots=SLOTS,
            values=(v.permute(order), own[1]),
            scale=scale,
            backend=backend,
        )
        assert got[0] is q_out
        assert got[1] is own[0]
        assert_same_bits(q_out.permute(order), want_q)
        for whole, cache, expected in zip(caches, own, (keys, values), strict=True):
            found = (
                stored(cache.permute(order)).transpose(1, 2).flatten(0, 1)
            )  # slots, heads, channels
            there = SLOTS >= 0
            assert torch.equal(found[SLOTS[there]], expected.transpose(1, 2)[there])
            rest = sorted(set(range(12)) - set(SLOTS[there].tolist()))
            assert bool((found[rest] == 0x11).all())
            beside = torch.ones(whole.shape[-1], dtype=torch.bool)
            beside[(whole.shape[-1] - cache.shape[-1]) // 2 :][: cache.shape[-1]] = False
            assert bool((stored(whole)[..., beside] == 0x11).all())


def test_packed_keys_in_pages_and_one_scale_for_both() -> None:
    k, v, slots = noise(TOKENS, HEADS, DIM).float(), noise(TOKENS, 1, 6).float(), SLOTS[0]
    pages, of_values = (torch.zeros(4, 3, *x.shape[1:], dtype=E4M3) for x in (k, v))
    rotate(k, SPEC, layout="thd", out=pages, slots=slots, values=(v, of_values), scale=2)
    y = rotate(k, SPEC, layout="thd")
    for x, cache in ((y, pages), (v, of_values)):
        assert torch.equal(
            stored(cache).flatten(0, 1)[slots[slots >= 0]], codes(x, 2.0, E4M3)[slots >= 0]
        )


def test_q_may_be_its_own_out_and_no_slots_are_needed() -> None:
    q, k = (
        noise(ROWS, 6, TOKENS, DIM).bfloat16(),
        noise(ROWS, HEADS, TOKENS, DIM, seed=1).bfloat16(),
    )
    want = rotate(q, SPEC), codes(rotate(k.float(), SPEC), 0.7, E5M2)
    out = torch.empty(ROWS, HEADS, TOKENS, 2 * DIM, dtype=E5M2)[..., ::2]
    rotate_qk(q, k, SPEC, out=(q, out), scale=0.7)
    assert_same_bits(q, want[0])
    assert torch.equal(stored(out), want[1])


@pytest.mark.parametrize(
    "options",
    [
        {"act": (RMSNorm(torch.ones(DIM)), None)},
        {"act": "silu", "gate": (Scalar(0.5), Slope(torch.full((DIM,), 0.1)))},
        {"phases": (None, phases.given(noise(1, 1, TOKENS, 1)))},
        {"inv_freq": torch.rand(6, generator=torch.Generator().manual_seed(0))},
        {"inverse": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_with_everything_else(options: dict[str, Any]) -> None:
    """q is what it is without a scale; k gets its own part of a pair."""
    q, k = (noise(ROWS, HEADS, TOKENS, DIM, seed=seed).float() for seed in (0, 1))
    out = torch.empty_like(q), torch.empty(k.shape, dtype=E4M3)
    rotate_qk(q, k, SPEC, 3, out=out, scale=0.25, **options)
    want = rotate_qk(q, k, SPEC, 3, **options)
    assert_same_bits(out[0], want[0])
    assert torch.equal(stored(out[1]), codes(want[1], 0.25, E4M3))


def test_positions_per_head_and_stacks() -> None:
    k = noise(ROWS, HEADS, TOKENS, DIM).bfloat16()
    ids = torch.arange(ROWS * HEADS * TOKENS).view(ROWS, HEADS, TOKENS)
    out = rotate(k, SPEC, positions.per_head(ids), out=torch.empty(k.shape, dtype=E4M3), scale=0.5)
    assert torch.equal(
        stored(out), codes(rotate(k.float(), SPEC, positions.per_head(ids)), 0.5, E4M3)
    )
    rope = RopeSpec(DIM).at(7, stack="transformers")
    assert isinstance(rope, PreparedRotation)
    out = rotate(k, rope, out=torch.empty(k.shape, dtype=E4M3), scale=0.5)
    assert torch.equal(stored(out), codes(rotate(k, rope), 0.5, E4M3))


@pytest.mark.parametrize("slots", [None, SLOTS])
def test_compiled(slots: torch.Tensor | None) -> None:
    def step(k: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rotate(k + 1, SPEC, 3, out=cache, slots=slots, scale=scale)
        return k * 2

    k, scale = noise(ROWS, HEADS, TOKENS, DIM).bfloat16(), torch.tensor(0.3)
    cache = torch.zeros((4, HEADS, 3, DIM) if slots is not None else k.shape, dtype=E4M3)
    expected = cache.clone()
    step(k, expected, scale)
    torch.compile(step, fullgraph=True, backend="aot_eager")(k, cache, scale)
    assert torch.equal(stored(cache), stored(expected))


# --- errors ---------------------------------------------------------------------------------------

K = noise(ROWS, HEADS, TOKENS, DIM).float()
V = K[..., :7]


def written(out: Any = None, scale: Any = 0.5, x: torch.Tensor = K, **options: Any) -> object:
    out = torch.empty(K.shape, dtype=E4M3) if out is None else out
    return rotate(x, SPEC, out=out, scale=scale, **options)


def with_tangent() -> None:
    with forward_ad.dual_level():
        written(x=forward_ad.make_dual(K, torch.ones_like(K)))


def pages(width: int = DIM, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(4, HEADS, 3, width, dtype=dtype)


IN_8_BITS = "must be float8_e4m3fn or float8_e5m2 with a scale, and caches of keys and values alike"
test_refusals = refusals(
    ValueError={
        "[rotate] scale must come with out, of float8_e4m3fn or float8_e5m2.": (
            lambda: rotate(K, SPEC, scale=0.5)
        ),
        "[rotate_qk] scale must come with k, which it divides; to write q alone, call rotate.": (
            lambda: rotate_qk(K, None, SPEC, out=(torch.empty_like(K), None), scale=0.5)
        ),
        "[rotate] scale must be positive and finite but got 0.0.": lambda: written(scale=0),
        "[rotate] scale must be positive and finite but got -1.0.": lambda: written(scale=-1.0),
        "[rotate] scale must be positive and finite but got nan.": lambda: written(
            scale=float("nan")
        ),
        **{
            f"[rotate] scale must be positive and finite but got {scale}.": (
                lambda scale=scale: written(scale=torch.tensor(scale))
            )
            for scale in (-0.0, -2.0, float("inf"))
        },
        "[rotate] scale must be a number, or a floating tensor of one element (scale: float32[3]).": (
            lambda: written(scale=torch.ones(3))
        ),
        "[rotate] scale must be a number, or a floating tensor of one element (scale: int64[]).": (
            lambda: written(scale=torch.tensor(1))
        ),
        "[rotate] scale must be one scale without values but got a pair.": (
            lambda: written(scale=(0.5, 0.5))
        ),
        "[rotate] scale must be one scale or a pair, for keys and values, but got 3.": (
            lambda: written(pages(), (1.0, 1.0, 1.0), slots=SLOTS, values=(V, pages(7)))
        ),
        "[rotate] out must have the shape and device of x (x: float32[2, 3, 5, 16], out: "
        "float8_e4m3fn[2, 3, 4, 16]).": lambda: written(torch.empty(2, 3, 4, 16, dtype=E4M3)),
        "[rotate] a result in 8 bits has no gradient, but a tensor requires one; use torch.no_grad().": [
            lambda: written(x=K.clone().requires_grad_()),
            lambda: written(inv_freq=torch.ones(6, requires_grad=True)),
        ],
        "[rotate] out must not overlap itself…": (
            lambda: written(torch.empty(2, 3, 1, 16, dtype=E4M3).expand(K.shape))
        ),
        "[rotate] slots must have shape…": lambda: written(pages(), slots=SLOTS[:, :3]),
        "[rotate] values must have the rows, tokens…": (
            lambda: written(pages(), slots=SLOTS, values=(V[:, :, :4], pages(7)))
        ),
    },
    IndexError={
        "[rotate] slots must be -1 or lie in [0, 12) but got 12…": (
            lambda: written(pages(), slots=SLOTS + 1)
        ),
    },
    TypeError={
        f"[rotate] out {IN_8_BITS} (out: float32[2, 3, 5, 16]).": lambda: written(
            torch.empty_like(K)
        ),
        f"[rotate] values[1] {IN_8_BITS} (values[1]: float8_e5m2[4, 3, 3, 7]).": (
            lambda: written(pages(), slots=SLOTS, values=(V, pages(7, E5M2)))
        ),
        "[rotate] scale must be a number or a tensor but got 'k'.": lambda: written(scale="k"),
        "[rotate] scale[1] must be a number or a tensor but got None.": (
            lambda: written(pages(), (0.5, None), slots=SLOTS, values=(V, pages(7)))
        ),
    },
    NotImplementedError={
        "[rotate] scale cannot be used in a transform of torch.func, with forward-mode tangents or in an export "
        "to ONNX.": [
            lambda: torch.func.vmap(lambda x: rotate(x, SPEC, out=pages()[:3, :, :2], scale=1.0))(
                K[None, :, :, :2]
            ),
            with_tangent,
        ],
    },
)


def test_nothing_is_written_by_a_refused_call() -> None:
    q, cache = K.clone(), pages()
    calls: list[Callable[[], object]] = [
        lambda: rotate_qk(q, K, SPEC, out=(q, cache), slots=SLOTS + 1, scale=1.0),
        lambda: rotate_qk(q, K, SPEC, out=(q, cache), slots=SLOTS[:1], scale=1.0),
    ]
    for call in calls:
        with pytest.raises((ValueError, IndexError)):
            call()
    assert torch.equal(q, K)
    assert not bool(stored(cache).any())
