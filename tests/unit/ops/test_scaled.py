"""`cache_scale=`: results in 8 bits, compared with the nearest of all numbers of a format.

tests/laws/test_slots.py writes every call so, with values, to slots and to contiguous caches.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.eight import E4M3, EVERY, LARGEST, codes, stored
from tests.support.helpers import noise, on
from tests.support.matrix import every_backend, every_dtype
from tightrope import RopeSpec
from tightrope.functional import rotate, write_kv

every_format = pytest.mark.parametrize("to", LARGEST, ids=str)
ROWS, HEADS, TOKENS, DIM = 2, 3, 5, 16
SPEC = RopeSpec(DIM, rotary_dim=12, start=2)
K = noise(ROWS, HEADS, TOKENS, DIM, seed=1).float()


# --- truth ----------------------------------------------------------------------------------------


def test_the_encoder_knows_every_code() -> None:
    """It maps each number of a format to itself, ties to even, and numbers beyond it to the largest."""
    for to, largest in LARGEST.items():
        every = torch.arange(256, dtype=torch.uint8).view(to).float()
        finite = every.isfinite()
        assert torch.equal(codes(every, 1.0, to)[finite], torch.arange(256)[finite])
        far = codes(torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan]), 1.0, to)
        assert far.tolist() == [largest, largest | 0x80, largest, -1]
    ties = codes(torch.tensor([17.0, 19.0, 2.0**-10, 2.0**-10 * 1.01]), 1.0, E4M3)
    assert ties.tolist() == [0x58, 0x5A, 0x00, 0x01]


# --- numbers --------------------------------------------------------------------------------------


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


@every_backend
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_each_head_has_its_scale(layout: str, backend: str | None) -> None:
    """Keys and values have other numbers of heads, and scales of their own; a tensor of one element is for all."""
    k, v = (noise(ROWS, n, TOKENS, d, seed=n).bfloat16() for n, d in ((HEADS, DIM), (1, 7)))
    if layout == "thd":
        k, v = (x[0].transpose(0, 1).contiguous() for x in (k, v))
    of_keys, of_values = torch.tensor([0.1, 1.0, 7.0]), torch.tensor([0.3])
    outs = tuple(torch.empty(x.shape, dtype=E4M3) for x in (k, v))
    options: dict[str, Any] = {"layout": layout, "cache_scale": (of_keys.double(), of_values)}
    on(backend, write_kv, None, k, v, SPEC, cache=outs, **options)
    wide = on(backend, rotate, k.float(), SPEC, layout=layout)
    own = of_keys.view((1, 3, 1, 1) if layout == "bhsd" else (1, 3, 1))
    assert torch.equal(stored(outs[0]), codes(wide, own, E4M3))
    assert torch.equal(stored(outs[1]), codes(v, of_values, E4M3))
    for scale, text in ((of_keys[:2], "3, one for each head of the keys"), (of_keys, "1, one for")):
        with pytest.raises(ValueError, match=rf"cache_scale must have one element or {text}"):
            write_kv(None, k, v, SPEC, cache=outs, layout=layout, cache_scale=scale)


# --- destinations ---------------------------------------------------------------------------------

SLOTS = torch.tensor([[7, 2, -1, 0, 11], [5, 4, 3, 9, -1]])


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
    # In the memory of k, of which each element has two bytes; the second half begins where k of 8 bits would end.
    k = torch.zeros(1, 1, 2, 2 * DIM).bfloat16()
    for inside in (
        k.view(E4M3)[..., : 2 * DIM],
        k.view(E4M3).flatten()[2 * k.numel() - 64 :].view_as(k),
    ):
        with pytest.raises(ValueError, match="must not overlap"):
            write_kv(None, k, None, RopeSpec(2 * DIM), cache=(inside, None), cache_scale=1.0)
    # Values between the bytes of k, where numbers of elements look like a gap.
    memory = torch.zeros(256, dtype=torch.uint8)
    k = memory.view(torch.bfloat16).as_strided((1, 1, 2, 32), (128, 128, 64, 1))
    inside = memory.view(E4M3).as_strided((1, 1, 2, 16), (256, 256, 128, 1), 40)
    caches = torch.zeros(k.shape).to(E4M3), inside
    with pytest.raises(ValueError, match="must not overlap"):
        write_kv(None, k, k[..., :16].clone(), RopeSpec(32), cache=caches, cache_scale=1.0)
