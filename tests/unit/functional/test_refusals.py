"""What the public functions refuse: the kind of error, and the phrase that says the rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD

from tests.support.helpers import noise, on, refused
from tests.support.matrix import every_backend
from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, phases, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, LongRoPE
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    lrpe_rotate_1d_,
    polar_scan,
    rerotate,
    rerotate_,
    rotary_embedding,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
    write_kv,
)
from tightrope.functional.scan import PolarState

Call = Callable[[], object]

SPEC = RopeSpec(12, rotary_dim=8, start=2)
X, Y, OUT = (torch.zeros(2, 3, 5, 12) for _ in range(3))


def calls_of(function: Callable[..., object], **valid: Any) -> Callable[..., Call]:
    """Return a function that returns a call with some arguments changed, and valid ones otherwise."""
    return lambda **changes: partial(function, **(valid | changes))


def on_each_backend(*calls: Call) -> list[Call]:
    return [partial(on, backend, call) for call in calls for backend in (None, "reference")]


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def learns(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


# --- out ------------------------------------------------------------------------------------------

one = calls_of(rotate, x=X, rope=SPEC)
both = calls_of(rotate_qk, q=X, k=Y, rope=SPEC)
both_ = calls_of(rotate_qk_, q=X, k=Y, rope=SPEC)
negated = torch.complex(OUT, OUT).conj().imag
twice = torch.zeros(1, 1, 1, 12).expand(2, 3, 5, 12)


@every_backend
def test_nothing_is_written_where_memory_overlaps(backend: str | None) -> None:
    buffer = noise(2, 3, 9, 12)
    before = buffer.clone()
    with pytest.raises(ValueError, match=r"^\[rotate\] out must not overlap"):
        on(backend, rotate, buffer[:, :, :5], SPEC, out=buffer[:, :, 3:8])
    q, out = torch.ones_like(X), torch.complex(X, X).conj().imag
    with pytest.raises(ValueError, match="negated view"):
        on(backend, rotate_qk, q, q.clone(), SPEC, out=(OUT, out))
    assert torch.equal(buffer, before)
    assert not OUT.any()


# --- keywords of earlier versions -----------------------------------------------------------------

MOVE = {"k": X, "old": SPEC, "new": SPEC, "positions": 5, "new_positions": 0}
HEADS = {"q": torch.zeros(2, 4, 7, 8), "k": torch.zeros(2, 2, 7, 8), "v": torch.zeros(2, 2, 7, 5)}
move, move_ = calls_of(rerotate, **MOVE), calls_of(rerotate_, **MOVE)
scan = calls_of(polar_scan, rope=RopeSpec(8, interleaved=True), **HEADS)
cached = calls_of(write_kv, q=X, k=X, v=X, rope=SPEC, cache=(OUT, Y))
ROTATING = one, both, both_, calls_of(rotate_, x=X, rope=SPEC), cached, scan


# --- what the rotation of a layer replaces, and backends ------------------------------------------

HALF = torch.ones(4)
TURNS = phases.given(torch.zeros(1, 1, 5, 1))
ON_META = X.to("meta")


# --- caches ---------------------------------------------------------------------------------------

K, V, SLOTS = torch.zeros(5, 3, 12), torch.zeros(5, 3, 7), torch.arange(5)
CACHE, OF_VALUES = torch.zeros(4, 3, 3, 12), torch.zeros(4, 3, 3, 7)
FLAT, shared = CACHE.view(12, 3, 12)[:5], CACHE[:1].expand(4, 3, 3, 12)
THD = {"rope": SPEC, "layout": "thd"}
PAGED = {"cache": (CACHE, OF_VALUES), "slots": SLOTS}
slot = calls_of(write_kv, q=None, k=K, v=V, **PAGED, **THD)
slots = calls_of(write_kv, q=K.clone(), k=K, v=V, **PAGED, **THD)
own = {"q": None, "k": K, "v": V, "cache": (OUT[0].transpose(0, 1), Y[0].transpose(0, 1)[..., :7])}
part = calls_of(write_kv, **own, **THD)
entry = calls_of(rerotate_, k=CACHE.clone(), old=None, new=SPEC, slots=SLOTS, layout="thd")
rows = calls_of(write_kv, q=None, k=X[:1], v=None, rope=SPEC, slots=SLOTS)
rows_ = calls_of(rerotate_, k=X[:1], old=None, new=SPEC)


IN_8_BITS = torch.empty(5, 3, 12, dtype=torch.float8_e4m3fn)


def with_tangent(
    which: str, cache: torch.Tensor = CACHE, at: torch.Tensor | None = SLOTS, **more: Any
) -> Call:
    def run() -> None:
        with fwAD.dual_level():
            given = {"k": K, "cache": cache}
            given[which] = fwAD.make_dual(given[which], torch.ones_like(given[which]))
            slot(k=given["k"], v=None, cache=(given["cache"], None), slots=at, **more)()

    return run


@every_backend
@pytest.mark.parametrize("last", [12, -2])
def test_no_slot_is_written_before_an_error(last: int, backend: str | None) -> None:
    q, k, v, base = noise(5, 3, 12), noise(5, 3, 12), noise(5, 3, 7), noise(4, 3, 3, 20).fill_(1)
    before, to = q.clone(), torch.tensor([0, 1, 2, 3, last])
    place = {"cache": (base[..., :12], base[..., 12:19]), "slots": to, "out": q}
    for act in (None, ("silu", "relu")):
        with pytest.raises(IndexError):
            on(backend, write_kv, q, k, v, SPEC, layout="thd", act=act, **place)
        assert torch.equal(q, before)
        assert (base == 1).all()


@every_backend
def test_no_part_of_a_cache_is_written_before_an_error(backend: str | None) -> None:
    """The values would go to the memory of the keys that are read."""
    q, k, keys = noise(2, 3, 5, 12), noise(2, 3, 5, 12), torch.ones(2, 3, 5, 12).double()
    before = q.clone(), k.clone()
    for wrong in (k, keys, k.float()):
        with pytest.raises(ValueError, match=r"^\[write_kv\] "):
            on(backend, write_kv, q, k, k, SPEC, cache=(keys, wrong), out=q)
        assert_same_bits([q, k], before)
        assert bool((keys == 1).all())


# --- rounding -------------------------------------------------------------------------------------

full = calls_of(apply_rotary_pos_emb, q=X, k=None, cos=X[0, 0], sin=X[0, 0], tables="full")


# --- rerotate -------------------------------------------------------------------------------------


def spec_of(scaling: Any = None, rotary_dim: int = 8, start: int = 2, **more: Any) -> RopeSpec:
    return RopeSpec(12, rotary_dim=rotary_dim, start=start, scaling=scaling, **more)


DYNAMIC, LONG = DynamicNTK(2.0, 4096), LongRoPE((1.0,) * 4, (2.0,) * 4, 4096, factor=32.0)
TWO_HEADS, AXES = spec_of(Given(((1.0,) * 4,) * 2)), spec_of(axes=Axes.blocks((2, 2)))
THREE = positions.per_row(SLOTS[:3])
ends = calls_of(rerotate, k=X, old=SPEC.at(5), new=SPEC.at(0))
BY_LENGTH = spec_of(DYNAMIC)
SPECIAL: list[dict[str, Any]] = [
    *({"stack": "transformers"}, {"rounding": "each"}, {"inv_freq": HALF}, {"phases": TURNS}),
]


# --- tables, the scan and LRPE --------------------------------------------------------------------

Q, C, TABLE = torch.zeros(2, 3, 5, 8), torch.zeros(5, 8), torch.zeros(9, 4)
LRPE = {"x": torch.zeros(2, 5, 4, 16), "theta": torch.zeros(8)}
embedding = partial(rotary_embedding, x=Q, cos=TABLE, sin=TABLE, position_ids=ints(2, 5))
MEMORY, PACK = torch.zeros(2, 2, 8, 5), positions.packed(torch.tensor([0, 2, 7]))


def remembered(memory: Any, tokens: Any = 1, **more: Any) -> Call:
    return scan(state=PolarState(memory, tokens), **more)


lrpe, lrpe_ = (calls_of(f, **LRPE) for f in (lrpe_rotate_1d, lrpe_rotate_1d_))
TWO_AXES, OVER_TOKENS = positions.multi_axis(ints(2, 5)), {"act": "softmax", "dim": 1}


test_calls = refused_calls(
    Path(__file__).with_name("refused_calls.jsonl"),
    {
        "apply_rotary_pos_emb": partial(apply_rotary_pos_emb, q=Q, k=None, cos=C, sin=C),
        "rotary_embedding": embedding,
        "rotary_pos_embedding": partial(rotary_pos_embedding, input_=X),
        "polar_scan": partial(polar_scan, rope=RopeSpec(8, interleaved=True), **HEADS),
        "lrpe_rotate_1d": partial(lrpe_rotate_1d, **LRPE),
        "lrpe_rotate_1d_": partial(lrpe_rotate_1d_, **LRPE),
    },
    globals(),
)


def test_a_softmax_over_the_tokens_is_refused_in_place() -> None:
    x = noise(2, 5, 4, 16)
    before = x.clone()
    text = "a softmax over the tokens cannot be computed in place; call lrpe_rotate_1d (x: float64[2, 5, 4, 16])."
    with refused(ValueError, f"[lrpe_rotate_1d_] {text}"):
        lrpe_rotate_1d_(x, torch.zeros(8), act="softmax", dim=1)
    assert_same_bits(x, before)
