"""What the public functions refuse: the kind of error, and the phrase that says the rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD

from tests.support.helpers import noise, on, refusals, refused
from tests.support.matrix import every_backend
from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, phases, positions
from tightrope.axes import Axes
from tightrope.backends import use
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
from tightrope.gates import XPos
from tightrope.nn import RotaryPositionalEmbedding

Call = Callable[[], object]

SPEC = RopeSpec(12, rotary_dim=8, start=2)
X, Y, OUT = (torch.zeros(2, 3, 5, 12) for _ in range(3))
SPARSE = "must be a dense tensor but got one that is sparse_coo."


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
LIKE_X = "out must have the shape, dtype and device of x"
OVERLAP = "out must not overlap itself or the input in memory; to rotate in place call"
NO_GRADIENT = "a result written to out has no gradient, but x or its destination requires one"
PAIR = "out must be a pair of tensors for q and k, with None for a k that is None, but got"

test_out = refusals(
    "rotate",
    ValueError={
        LIKE_X: [one(out=OUT[:, :, :4]), one(out=OUT.double())],
        f"{LIKE_X}; to write float8, call write_kv with cache_scale=": one(
            out=OUT.to(torch.float8_e4m3fn)
        ),
        f"{LIKE_X} but is on meta, not cpu": one(out=X.to("meta")),
        NO_GRADIENT: [one(x=learns(X), out=OUT), one(out=learns(OUT))],
        f"{OVERLAP} rotate_": [one(out=X.view(3, 2, 5, 12).transpose(0, 1)), one(out=twice)],
        "call out.resolve_neg() first": on_each_backend(one(out=negated)),
    },
    TypeError={
        "out must be a tensor for x but got 3.": one(out=3),
        f"out {SPARSE}": one(out=X.to_sparse()),
    },
)
test_out_of_both = refusals(
    "rotate_qk",
    ValueError={
        "out must hold one tensor for each of q, k but got 1.": both(out=(OUT, None)),
        "out must hold one tensor for each of q, k but got 3.": both(out=(OUT, OUT, OUT)),
        f"{OVERLAP} rotate_qk_": [both(out=(OUT, OUT)), both(out=(Y, X))],
        "call out.resolve_neg() first": on_each_backend(both(out=(OUT, negated))),
    },
    TypeError={
        f"{PAIR} 3.": both(out=3),
        f"{PAIR} None for q; pass torch.empty_like(q).": both(k=None, out=(None, 3)),
        "q must be a tensor but got None; to rotate k alone, call rotate(k, …).": both(q=None),
    },
)
test_k_alone = refusals(TypeError={"[rotate_qk_] q …": both_(q=None), "rotate_(k": both_(q=None)})


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

prepared = calls_of(rotate, x=X, rope=SPEC.at(0))
MOVE = {"k": X, "old": SPEC, "new": SPEC, "positions": 5, "new_positions": 0}
HEADS = {"q": torch.zeros(2, 4, 7, 8), "k": torch.zeros(2, 2, 7, 8), "v": torch.zeros(2, 2, 7, 5)}
move, move_ = calls_of(rerotate, **MOVE), calls_of(rerotate_, **MOVE)
scan = calls_of(polar_scan, rope=RopeSpec(8, interleaved=True), **HEADS)
cached = calls_of(write_kv, q=X, k=X, v=X, rope=SPEC, cache=(OUT, Y))
ROTATING = one, both, both_, calls_of(rotate_, x=X, rope=SPEC), cached, scan
STATED = "stack", "seq_len", "inv_freq", "phases", "rounding"
USE = "but got backend; call it in a block of tightrope.backends.use(name)."
FROM_LENGTH = "but got from_seq_len; old may be spec.at(positions, seq_len=…)."
test_old_keywords = refusals(
    TypeError={
        **{
            f"…but got {name}; pass spec.at(positions, {name}=…) as rope.": [
                call(**{name: None}) for call in ROTATING
            ]
            for name in STATED
        },
        "…but got spec; rope may be meant.": [
            partial(function, SPEC, spec=SPEC) for function in (rotate, rotate_, polar_scan)
        ],
        f"…{USE}": [call(backend="cpu") for call in (*ROTATING, move, move_)],
        "…but got slots; write_kv writes to the slots of a cache, and rerotate_ rotates them.": [
            call(slots=ints(5)) for call in (one, both, both_, move)
        ],
        "…but got values; write_kv writes values beside keys.": [
            call(values=(X, Y)) for call in (one, both)
        ],
        "…but got values; v may be meant.": cached(values=(X, Y)),
        "…but got scale; write_kv writes float8, with cache_scale=.": [
            call(scale=0.5) for call in (one, both)
        ],
        "…but got scale; cache_scale may be meant.": cached(scale=0.5),
        f"…{FROM_LENGTH}": [call(from_seq_len=9) for call in (move, move_)],
        "…but got to_seq_len; new may be spec.at(positions, seq_len=…).": move(to_seq_len=9),
        "…but got from_spec; old may be meant.": partial(rerotate, X, from_spec=SPEC),
        "…but got to_spec; new may be meant.": partial(rerotate_, X, to_spec=SPEC),
        "[at] only positions may be given without a name but got 2 values": partial(
            SPEC.at, 0, "cpu"
        ),
    },
)


# --- what the rotation of a layer replaces, and backends ------------------------------------------

HALF = torch.ones(4)
TURNS = phases.given(torch.zeros(1, 1, 5, 1))
OF_STACK = "must be None with a rotation made for stack 'transformers'"
test_having = refusals(
    "having",
    TypeError={
        "inv_freq must be a tensor of float32, float64, bfloat16 or float16 but got 3.": (
            lambda: SPEC.at().having(inv_freq=3)  # type: ignore[arg-type]
        ),
        "inv_freq must be a tensor of": lambda: SPEC.at().having(inv_freq=HALF.long()),
        f"inv_freq {SPARSE}": lambda: SPEC.at().having(inv_freq=HALF.to_sparse()),
        "phases must be made by phases.given or phases.running but got float32[4].": (
            lambda: SPEC.at().having(phases=HALF)  # type: ignore[arg-type]
        ),
        "phases must be one value or a pair, for q and k, but got 3.": (
            lambda: SPEC.at().having(phases=(TURNS,) * 3)  # type: ignore[arg-type]
        ),
        "arguments must be of inv_freq, phases but got seq_len.": (
            lambda: SPEC.at().having(seq_len=5)  # type: ignore[call-arg]
        ),
        "no argument may be given without a name but got 1 values": (
            lambda: SPEC.at().having(HALF)  # type: ignore[misc]
        ),
    },
    ValueError={
        "inv_freq must have shape (pairs,) or (heads, pairs), here (4,) or (heads, 4),": [
            lambda: SPEC.at().having(inv_freq=HALF[1:]),
            lambda: SPEC.at().having(inv_freq=HALF[None, None]),
        ],
        "inv_freq is on meta but the rotation is on cpu": (
            lambda: SPEC.at().having(inv_freq=HALF.to("meta"))
        ),
        f"inv_freq {OF_STACK}": lambda: SPEC.at(0, stack="transformers").having(inv_freq=HALF),
        f"phases {OF_STACK}": lambda: SPEC.at(0, stack="transformers").having(phases=TURNS),
    },
)
NAMES = "name must be one of cpu, triton, reference but got"
ON_META = X.to("meta")
test_use = refusals(
    ValueError={
        f"[use] {NAMES} 'cuda'.": lambda: use("cuda"),
        f"[use] {NAMES} None.": lambda: use(None),  # type: ignore[arg-type]
        f"[use] {NAMES} ['cpu'].": lambda: use(["cpu"]),  # type: ignore[arg-type]
    },
    NotImplementedError={
        "[rotate] backend 'cpu' cannot run: …": partial(on, "cpu", one(x=ON_META)),
        "[rotate_qk] backend 'cpu' cannot run: …": partial(on, "cpu", both(q=ON_META, k=ON_META)),
        "[rerotate] backend 'cpu' cannot run: …": partial(on, "cpu", move(k=ON_META)),
        "[apply_rotary_pos_emb] backend 'cpu' cannot run: …": partial(
            on, "cpu", apply_rotary_pos_emb, ON_META, None, ON_META[0, 0], ON_META[0, 0]
        ),
    },
)


def test_a_backend_is_forced_inside_the_block_alone() -> None:
    """Also after an error, and in blocks within blocks."""
    wanted = rotate(ON_META, SPEC)
    with pytest.raises(NotImplementedError), use("cpu"):
        rotate(ON_META, SPEC)
    with use("cpu"), use("reference"):
        assert rotate(ON_META, SPEC).shape == wanted.shape
    assert rotate(ON_META, SPEC).shape == wanted.shape


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
FITS = "(entries, heads, channels) or (blocks, entries, heads, channels) with the heads"
BESIDE = "the caches, out, q, k and v must not overlap in memory, nor a cache itself"
RANGE = "slots must be -1 or lie in [0, 12) but got"
CACHED_NO_GRADIENT = "what is written to a cache has no gradient, but"
V_NO_GRADIENT = "v and its cache must not require grad: what is written to a cache has no gradient"
TRANSFORM = "a cache cannot be written in vmap, grad or another transform of torch.func."
TANGENT = "what is written to a cache has no forward-mode derivative; call rotate."
WITHOUT_SLOTS = "must have the shape, dtype and device of"


def with_tangent(which: str, cache: torch.Tensor = CACHE, at: torch.Tensor | None = SLOTS) -> Call:
    def run() -> None:
        with fwAD.dual_level():
            given = {"k": K, "cache": cache}
            given[which] = fwAD.make_dual(given[which], torch.ones_like(given[which]))
            slot(k=given["k"], v=None, cache=(given["cache"], None), slots=at)()

    return run


test_caches = refusals(
    "write_kv",
    IndexError={
        f"{RANGE} 12": on_each_backend(slot(slots=SLOTS + 8)),
        f"{RANGE} -2": on_each_backend(slot(slots=SLOTS - 2)),
    },
    ValueError={
        "v and cache[1] must both be given, or both be None, but v is None.": [
            slot(v=None),
            part(v=None),
        ],
        "v and cache[1] must both be given, or both be None, but cache[1] is None.": [
            slot(cache=(CACHE, None)),
            part(cache=(own["cache"][0], None)),
        ],
        "out must be None without q, which would go there.": [slot(out=K), part(out=K)],
        "out must have the shape, dtype and device of q": [slots(out=K[1:]), slots(out=K.double())],
        "slots must have shape (1, 5) or (5,), one for each token": slot(slots=SLOTS[:4]),
        "slots must have shape (2, 5), one for each token": rows(k=X, cache=(OUT, None)),
        f"cache[0] must be a cache {FITS}": [
            slot(cache=(c, OF_VALUES)) for c in (CACHE[:, :, 1:], CACHE[0, 0, 0], CACHE.double())
        ],
        "to write float8, call write_kv with cache_scale=": [
            slot(cache=(CACHE.to(torch.float8_e5m2), OF_VALUES)),
            part(cache=(own["cache"][0].to(torch.float8_e5m2), own["cache"][1])),
        ],
        "to write float8, pass a view such as cache.view(torch.float8_e4m3fn)": slot(
            cache=(CACHE.byte(), OF_VALUES)
        ),
        "cache[0] must be a cache (blocks, heads, entries, channels) with": rows(
            cache=(K.transpose(0, 1), None)
        ),
        f"cache[1] must be a cache {FITS}": slot(cache=(CACHE, OF_VALUES[..., 1:])),
        "cache[1] must have the blocks and entries of cache[0]": slot(cache=(CACHE, OF_VALUES[1:])),
        "v must have the rows, tokens, dtype, device and layout of k": [
            slot(v=V[1:]),
            slot(v=V.double(), cache=(CACHE, OF_VALUES.double())),
        ],
        f"cache[0] {WITHOUT_SLOTS} k without slots": [
            part(cache=(c, own["cache"][1])) for c in (CACHE, K[1:], K.double())
        ],
        f"cache[1] {WITHOUT_SLOTS} v without slots": [
            part(cache=(own["cache"][0], c)) for c in (OF_VALUES, V[1:], V.double())
        ],
        "v must have the dtype and device of k": part(
            v=V.double(), cache=(own["cache"][0], V.double())
        ),
        "call cache[0].resolve_neg() first": on_each_backend(
            part(k=X, v=None, cache=(negated, None), layout="bhsd")
        ),
        "call cache[1].resolve_neg() first": on_each_backend(
            part(k=X, v=X, cache=(OUT, negated), layout="bhsd")
        ),
        BESIDE: [
            *on_each_backend(slot(v=None, cache=(K, None)), slot(cache=(shared, OF_VALUES))),
            *on_each_backend(slot(v=FLAT[..., :7]), slot(cache=(CACHE, CACHE[..., :7]))),
            *on_each_backend(slots(out=FLAT), slots(out=K)),
            *on_each_backend(
                part(cache=(K, K[..., :7])),
                part(cache=(FLAT[:, :3], FLAT[..., :7])),
                part(v=FLAT[..., :7], cache=(FLAT, own["cache"][1])),
                part(q=K.clone(), v=FLAT[..., :7], out=FLAT),
            ),
        ],
        CACHED_NO_GRADIENT: [slot(k=learns(K)), part(k=learns(K)), slots(q=learns(K))],
        V_NO_GRADIENT: [slot(v=learns(V)), part(v=learns(V))],
        "a result in 8 bits has no gradient": slot(
            k=learns(K), v=None, cache=(CACHE.to(torch.float8_e5m2), None), cache_scale=1.0
        ),
    },
    TypeError={
        "k must be a tensor but got None.": slot(k=None),
        "q must be a tensor but got 3": slots(q=3),
        "cache must be a pair, the caches of keys and of values, but got float32[4, 3, 3, 12].": (
            slot(cache=CACHE)
        ),
        "cache must be a pair, the caches of keys and of values, but got": slot(cache=(CACHE,)),
        "cache[0] must be a tensor but got None.": slot(cache=(None, OF_VALUES)),
        "cache[1] must be a tensor or None but got 3.": slot(cache=(CACHE, 3)),
        "v must be a tensor or None but got 3.": slot(v=3),
        "slots must be a tensor but got [0].": slot(slots=[0]),
        "slots must be int32 or int64 on the device of k but got float32": slot(slots=SLOTS / 1),
        "out must be a tensor for q but got 3.": slots(out=3),
        f"cache[0] {SPARSE}": slot(cache=(CACHE.to_sparse(), OF_VALUES)),
        f"v {SPARSE}": slot(v=V.to_sparse()),
        "cache must be given.": partial(write_kv, X, X, X, SPEC),
    },
    NotImplementedError={
        TRANSFORM: [
            lambda: torch.vmap(lambda k: slot(k=k, v=None, cache=(CACHE, None))())(K[None]),
            lambda: torch.func.grad(lambda k: slot(k=k, v=None, cache=(CACHE, None))())(K),
            lambda: torch.vmap(lambda k: part(k=k, v=None, cache=(own["cache"][0], None))())(
                K[None]
            ),
        ],
        TANGENT: [
            with_tangent("k"),
            with_tangent("cache"),
            with_tangent("k", FLAT, None),
        ],
    },
)
test_entries = refusals(
    "rerotate_",
    IndexError={f"{RANGE} 12": on_each_backend(entry(slots=SLOTS + 8))},
    ValueError={
        "k must be a cache (entries, heads, channels) or": entry(k=CACHE[0, 0]),
        "slots must have shape (tokens,) or (1, tokens)": entry(slots=SLOTS.expand(2, 5)),
        "slots must have shape (tokens,) or (rows, tokens)": rows_(slots=SLOTS[None, None]),
        "slots must differ": on_each_backend(entry(slots=SLOTS // 2)),
        "k must not overlap itself in memory": on_each_backend(entry(k=shared)),
        "slots rotate without a gradient": entry(k=learns(CACHE)),
    },
    TypeError={
        "slots must be a tensor but got [0].": entry(slots=[0]),
        f"slots {SPARSE}": entry(slots=SLOTS.to_sparse()),
    },
    NotImplementedError={TRANSFORM: lambda: torch.vmap(lambda k: entry(k=k)())(CACHE[None])},
)


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
ROUNDINGS = "rounding must be 'once', 'wide' or 'each', or a pair of them for forward and backward"
test_rounding = refusals(
    ValueError={
        ROUNDINGS: [
            call(rounding=value)
            for value in ("twice", ("once",), ("once", "none"), 1, ["once", "each"])
            for call in (calls_of(SPEC.at), calls_of(RotaryPositionalEmbedding, dim=8), full)
        ],
        "act and gate must be None with a rotation whose rounding is not 'once' but ('each', 'each')": [
            one(rope=SPEC.at(rounding="each"), **more)
            for more in ({"act": "silu"}, {"gate": XPos(8)})
        ],
        "inverse must be False with tables='full'": full(inverse=True),
    },
)


# --- rerotate -------------------------------------------------------------------------------------


def spec_of(scaling: Any = None, rotary_dim: int = 8, start: int = 2, **more: Any) -> RopeSpec:
    return RopeSpec(12, rotary_dim=rotary_dim, start=start, scaling=scaling, **more)


DYNAMIC, LONG = DynamicNTK(2.0, 4096), LongRoPE((1.0,) * 4, (2.0,) * 4, 4096, factor=32.0)
TWO_HEADS, AXES = spec_of(Given(((1.0,) * 4,) * 2)), spec_of(axes=Axes.blocks((2, 2)))
THREE = positions.per_row(SLOTS[:3])
ends = calls_of(rerotate, k=X, old=SPEC.at(5), new=SPEC.at(0))
BY_LENGTH = spec_of(DYNAMIC)
INSTEAD = "rotate by old with inverse=True, then by new."
LENGTHS = "must be one length, or one for each of 2 rows, but got 3"
ROPE = "must be a RopeSpec, a prepared rotation (RopeSpec.at) or None but got"
LENGTH = "must be given as spec.at(positions, seq_len=…), as the frequencies of"
PREPARED = "must be None with a prepared rotation, which has its own."
EXACT = (
    "must be a rotation by the exact frequencies of its spec, without a stack, inv_freq, phases or"
)
SPECIAL: list[dict[str, Any]] = [
    *({"stack": "transformers"}, {"rounding": "each"}, {"inv_freq": HALF}, {"phases": TURNS}),
]
test_rerotate = refusals(
    "rerotate",
    TypeError={
        "k must be a tensor but got None.": move(k=None),
        f"old {ROPE} 3.": move(old=3),
        f"new {ROPE} 3.": move(new=3),
        "old or new must be a rotation but both are None.": partial(rerotate, X, None, None),
    },
    ValueError={
        "new_positions must be None if new is.": move(new=None),
        "positions and new_positions must not both be given without old.": move(old=None),
        f"positions {PREPARED}": [
            ends(positions=5),
            move(old=None, new=SPEC.at(0), new_positions=None),
        ],
        f"new_positions {PREPARED}": ends(new_positions=0),
        "old is on meta but k is on cpu; call spec.at(positions, device='cpu').": ends(
            old=SPEC.at(5, device="meta")
        ),
        "new is on cpu but k is on meta": ends(k=ON_META, old=SPEC.at(5, device="meta")),
        **{
            f"{name} {EXACT}": [ends(**{name: SPEC.at(0, **more)}) for more in SPECIAL]
            for name in ("old", "new")
        },
        "k must have head_dim 12 in its last dimension but got 8": move(k=X[..., :8]),
        f"…rotary_dim but have 8 and 6; {INSTEAD}": move(new=spec_of(rotary_dim=6)),
        f"…start but have 2 and 4; {INSTEAD}": move(new=spec_of(start=4)),
        f"…interleaved but have False and True; {INSTEAD}": move(new=spec_of(interleaved=True)),
        "positions must hold one position for each of 5 tokens but got 3": [
            *(move(positions=SLOTS[:3], new_positions=new) for new in (0, None)),
            ends(old=SPEC.at(SLOTS[:3])),
        ],
        "new_positions must have 1 or 2 rows but got 3": [
            move(new_positions=THREE),
            ends(new=SPEC.at(THREE)),
        ],
        "new must have 1 or 3 heads for k but got 2": move(new=TWO_HEADS),
        "old must have 1 or 3 heads for k but got 2": move(old=TWO_HEADS),
        "new_positions must have 2 axes for this spec but got 1": move(new=AXES),
        f"seq_len of old {LENGTHS}": ends(old=BY_LENGTH.at(0, seq_len=[8, 9, 7])),
        f"seq_len of new {LENGTHS}": ends(new=BY_LENGTH.at(0, seq_len=[8, 9, 7])),
        f"old {LENGTH} DynamicNTK depend": [
            move(old=BY_LENGTH),
            move(old=BY_LENGTH, new=BY_LENGTH.at(0, seq_len=9)),
        ],
        f"new {LENGTH} LongRoPE depend": move(new=spec_of(LONG)),
        f"new {LENGTH} DynamicNTK depend": ends(old=BY_LENGTH.at(0, seq_len=9), new=BY_LENGTH),
        "old must state its length: spec.at(positions, seq_len=…).": ends(old=BY_LENGTH.at(0)),
        "new must state its length: spec.at(positions, seq_len=…).": ends(new=BY_LENGTH.at(0)),
        "layout must be one of bhsd, bshd, sbhd, thd, bsd, sd but got 'bdsh'.": move(layout="bdsh"),
        "to rotate in place call rerotate_": move(out=X.view(3, 2, 5, 12).transpose(0, 1)),
    },
)
test_rerotate_ = refusals(
    "rerotate_",
    TypeError={
        f"new {ROPE} 5.": move_(new=5),
        "old or new must be a rotation but both are None.": partial(rerotate_, X, None, None),
    },
    ValueError={
        "k must have 4 dimensions for layout 'bhsd' but got 3": move_(k=X[0]),
        "new_positions must hold one position for each of 5": move_(new_positions=SLOTS[:3]),
        f"new {LENGTH} LongRoPE": move_(new=spec_of(LONG)),
    },
)


# --- tables, the scan and LRPE --------------------------------------------------------------------

Q, C, TABLE = torch.zeros(2, 3, 5, 8), torch.zeros(5, 8), torch.zeros(9, 4)
LRPE = {"x": torch.zeros(2, 5, 4, 16), "theta": torch.zeros(8)}
embedding = partial(rotary_embedding, x=Q, cos=TABLE, sin=TABLE, position_ids=ints(2, 5))
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
)

MEMORY, PACK = torch.zeros(2, 2, 8, 5), positions.packed(torch.tensor([0, 2, 7]))
NO_STATE = "state must be None or a state returned by polar_scan but got"
OF_STATE = "state must have a memory float32[2, 2, 8, 5] for this q, k and v"


def remembered(memory: Any, tokens: Any = 1, **more: Any) -> Call:
    return scan(state=PolarState(memory, tokens), **more)


test_scan = refusals(
    "polar_scan",
    TypeError={
        f"{NO_STATE} PolarState(memory=None, tokens=1).": remembered(None),
        f"{NO_STATE} a PolarState.": remembered(MEMORY, 1.5),
        f"the memory of state {SPARSE}": remembered(MEMORY.to_sparse()),
        f"v {SPARSE}": scan(v=HEADS["v"].to_sparse()),
        f"log_decay {SPARSE}": scan(log_decay=torch.zeros(2, 1).to_sparse()),
    },
    ValueError={
        "state is on meta but k is on cpu": remembered(MEMORY.to("meta")),
        "positions must be of one sequence in each row": scan(positions=PACK),
        "rope must be spec.at(positions, seq_len=…) with a state, of the same length in all calls": (
            remembered(MEMORY, rope=RopeSpec(8, scaling=DYNAMIC))
        ),
        "rope must be at the positions that follow the 1 tokens of state but begins at 0": (
            remembered(MEMORY, rope=RopeSpec(8, interleaved=True).at())
        ),
        "rope must have exact angles but was made for stack 'meta'.": scan(
            rope=RopeSpec(8, interleaved=True).at(stack="meta")
        ),
        OF_STATE: [remembered(MEMORY[..., 1:]), remembered(MEMORY.double())],
    },
)
lrpe, lrpe_ = (calls_of(f, **LRPE) for f in (lrpe_rotate_1d, lrpe_rotate_1d_))
TWO_AXES, OVER_TOKENS = positions.multi_axis(ints(2, 5)), {"act": "softmax", "dim": 1}
test_positions = refusals(
    ValueError={
        "offset must have 1 axis but got 2": [lrpe(offset=TWO_AXES), lrpe_(offset=TWO_AXES)],
        "offset must be 0 for a softmax over the tokens": [
            lrpe(offset=PACK, **OVER_TOKENS),
            lrpe_(offset=PACK, **OVER_TOKENS),
        ],
    },
    IndexError={
        "position_ids must lie in [0, 9)": partial(embedding, position_ids=ints(2, 5) + 9),
    },
)


def test_a_softmax_over_the_tokens_is_refused_in_place() -> None:
    x = noise(2, 5, 4, 16)
    before = x.clone()
    text = "a softmax over the tokens cannot be computed in place; call lrpe_rotate_1d (x: float64[2, 5, 4, 16])."
    with refused(ValueError, f"[lrpe_rotate_1d_] {text}"):
        lrpe_rotate_1d_(x, torch.zeros(8), act="softmax", dim=1)
    assert_same_bits(x, before)
