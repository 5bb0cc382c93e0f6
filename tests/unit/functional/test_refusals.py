"""What the public functions refuse: the kind of error, and the phrase that says the rule; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD

from tests.support.helpers import noise, on
from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, phases, positions
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK, Given, LongRoPE
from tightrope.functional import (
    apply_rotary_pos_emb,
    lrpe_rotate_1d,
    polar_scan,
    rerotate,
    rerotate_,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
    rotate_qk_,
    write_kv,
)
from tightrope.functional.scan import PolarState

Call = Callable[[], object]

# Numbers, because a rotation of zeros would not show that it was written.
full_of = partial(noise, dtype=torch.float32)
SPEC = RopeSpec(12, rotary_dim=8, start=2)
X, Y, OUT = (full_of(2, 3, 5, 12, seed=seed) for seed in range(3))


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
BUFFER = full_of(2, 3, 9, 12)
with torch.inference_mode():
    FROZEN = full_of(2, 3, 5, 12, seed=3)  # as in torch, it has no version counter


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

Q, K, V, SLOTS = full_of(5, 3, 12), full_of(5, 3, 12), full_of(5, 3, 7), torch.arange(5)
CACHE, OF_VALUES = torch.zeros(4, 3, 3, 12), torch.zeros(4, 3, 3, 7)
FLAT, shared = CACHE.view(12, 3, 12)[:5], CACHE[:1].expand(4, 3, 3, 12)
ENTRIES, AFTER = full_of(4, 3, 3, 12), torch.tensor([0, 1, 2, 3, 12])
THD = {"rope": SPEC, "layout": "thd"}
PAGED = {"cache": (CACHE, OF_VALUES), "slots": SLOTS}
slot = calls_of(write_kv, q=None, k=K, v=V, **PAGED, **THD)
slots = calls_of(write_kv, q=Q, k=K, v=V, **PAGED, **THD)
own = {"q": None, "k": K, "v": V, "cache": (OUT[0].transpose(0, 1), Y[0].transpose(0, 1)[..., :7])}
part = calls_of(write_kv, **own, **THD)
entry = calls_of(rerotate_, k=ENTRIES, old=None, new=SPEC, slots=SLOTS, layout="thd")
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

HEAD, C, TABLE = torch.zeros(2, 3, 5, 8), torch.zeros(5, 8), torch.zeros(9, 4)
OF_LRPE = full_of(2, 5, 4, 16)
LRPE = {"x": OF_LRPE, "theta": torch.zeros(8)}
MEMORY, PACK = torch.zeros(2, 2, 8, 5), positions.packed(torch.tensor([0, 2, 7]))


def remembered(memory: Any, tokens: Any = 1, **more: Any) -> Call:
    return scan(state=PolarState(memory, tokens), **more)


lrpe = calls_of(lrpe_rotate_1d, **LRPE)
TWO_AXES, OVER_TOKENS = positions.multi_axis(ints(2, 5)), {"act": "softmax", "dim": 1}

test_calls = refused_calls(
    Path(__file__).with_name("refused_calls.jsonl"),
    {
        "apply_rotary_pos_emb": partial(apply_rotary_pos_emb, q=HEAD, k=None, cos=C, sin=C),
        "rotary_pos_embedding": partial(rotary_pos_embedding, input_=X),
        "polar_scan": partial(polar_scan, rope=RopeSpec(8, interleaved=True), **HEADS),
        "lrpe_rotate_1d": partial(lrpe_rotate_1d, **LRPE),
    },
    globals(),
)
