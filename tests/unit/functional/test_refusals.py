"""What the public functions refuse: the kind of error, and the phrase that says the rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD

from tests.support.helpers import noise, refusals, refused
from tests.support.matrix import every_backend
from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
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
    return [partial(call, backend=backend) for call in calls for backend in (None, "reference")]


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def learns(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


# --- out ------------------------------------------------------------------------------------------

one = calls_of(rotate, x=X, spec=SPEC)
both = calls_of(rotate_qk, q=X, k=Y, spec=SPEC)
both_ = calls_of(rotate_qk_, q=X, k=Y, spec=SPEC)
negated = torch.complex(OUT, OUT).conj().imag
twice = torch.zeros(1, 1, 1, 12).expand(2, 3, 5, 12)
LIKE_X = "out must have the shape, dtype and device of x"
OVERLAP = "out must not overlap itself or the input in memory; to rotate in place call"
NO_GRADIENT = "a result written to out has no gradient, but x or out requires one"
PAIR = "out must be a pair of tensors for q and k, with None for a k that is None, but got"

test_out = refusals(
    "rotate",
    ValueError={
        LIKE_X: [one(out=OUT[:, :, :4]), one(out=OUT.double())],
        f"{LIKE_X}; to write float8, pass scale=": one(out=OUT.to(torch.float8_e4m3fn)),
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
        rotate(buffer[:, :, :5], SPEC, out=buffer[:, :, 3:8], backend=backend)
    q, out = torch.ones_like(X), torch.complex(X, X).conj().imag
    with pytest.raises(ValueError, match="negated view"):
        rotate_qk(q, q.clone(), SPEC, out=(OUT, out), backend=backend)
    assert torch.equal(buffer, before)
    assert not OUT.any()


# --- slots ----------------------------------------------------------------------------------------

K, V, SLOTS = torch.zeros(5, 3, 12), torch.zeros(5, 3, 7), torch.arange(5)
CACHE, OF_VALUES = torch.zeros(4, 3, 3, 12), torch.zeros(4, 3, 3, 7)
FLAT, shared = CACHE.view(12, 3, 12)[:5], CACHE[:1].expand(4, 3, 3, 12)
THD = {"spec": SPEC, "layout": "thd", "slots": SLOTS}
slot = calls_of(rotate, x=K, out=CACHE, values=(V, OF_VALUES), **THD)
slots = calls_of(rotate_qk, q=K, k=K.clone(), out=(OUT[0, :, :, :12], CACHE), **THD)
entry = calls_of(rotate_, x=CACHE.clone(), **THD)
rows = calls_of(rotate, x=X[:1], spec=SPEC, slots=SLOTS)
rows_ = calls_of(rotate_, x=X[:1], spec=SPEC)
CACHES = "must be a cache (entries, heads, channels) or (blocks, entries, heads, channels) with the heads"
FLOAT8 = "to write float8, pass"
BESIDE = "out, the cache of values and the inputs must not overlap in memory, nor a cache itself"
RANGE = "slots must be -1 or lie in [0, 12) but got"
TRANSFORM = "slots cannot be used in vmap, grad or another transform of torch.func."


def with_tangent(which: str) -> Call:
    def run() -> None:
        with fwAD.dual_level():
            given = {"x": K, "out": CACHE}
            given[which] = fwAD.make_dual(given[which], torch.ones_like(given[which]))
            slot(**given)()

    return run


test_slots = refusals(
    "rotate",
    IndexError={
        f"{RANGE} 12": on_each_backend(slot(slots=SLOTS + 8)),
        f"{RANGE} -2": on_each_backend(slot(slots=SLOTS - 2)),
    },
    ValueError={
        "slots must come with out, the cache to write to.": slot(out=None),
        "values must come with slots, the entries of their cache to write to.": slot(slots=None),
        "slots must have shape (1, 5) or (5,), one for each token": slot(slots=SLOTS[:4]),
        "slots must have shape (2, 5), one for each token": rows(x=X, out=OUT),
        f"out {CACHES}": [slot(out=c) for c in (CACHE[:, :, 1:], CACHE[0, 0, 0], CACHE.double())],
        f"{FLOAT8} scale=": slot(out=CACHE.to(torch.float8_e5m2)),
        f"{FLOAT8} a view such as out.view(torch.float8_e4m3fn)": slot(out=CACHE.byte()),
        "out must be a cache (blocks, heads, entries, channels) with": rows(out=K.transpose(0, 1)),
        f"the cache of values {CACHES}": slot(values=(V, OF_VALUES[..., 1:])),
        "values must have the blocks and entries of out": slot(values=(V, OF_VALUES[1:])),
        "values must have the rows, tokens, dtype, device and layout of x": [
            slot(values=(V[1:], OF_VALUES)),
            slot(values=(V.double(), OF_VALUES.double())),
        ],
        BESIDE: [
            *on_each_backend(slot(out=K, values=None), slot(out=shared)),
            *on_each_backend(
                slot(values=(FLAT[..., :7], OF_VALUES)), slot(values=(V, CACHE[..., :7]))
            ),
        ],
        NO_GRADIENT: slot(x=learns(K)),
        "values and their cache must not require grad": slot(values=(learns(V), OF_VALUES)),
    },
    TypeError={
        "slots must be a tensor but got [0].": slot(slots=[0]),
        "values must be a pair of tensors, the values and their cache, but got 3.": slot(values=3),
        "slots must be int32 or int64 on the device of x but got float32": slot(slots=SLOTS / 1),
    },
    NotImplementedError={
        TRANSFORM: [
            lambda: torch.vmap(lambda k: slot(x=k, values=None)())(K[None]),
            lambda: torch.func.grad(lambda k: slot(x=k, values=None)())(K),
        ],
        "slots have no forward-mode derivative": [with_tangent("x"), with_tangent("out")],
    },
)
test_slots_of_both = refusals(
    "rotate_qk",
    ValueError={
        "slots must come with k, which goes to them; to write q alone, call rotate.": slots(k=None),
        BESIDE: on_each_backend(slots(out=(FLAT, CACHE))),
    },
)
test_entries = refusals(
    "rotate_",
    IndexError={f"{RANGE} 12": on_each_backend(entry(slots=SLOTS + 8))},
    ValueError={
        "x must be a cache (entries, heads, channels) or": entry(x=CACHE[0, 0]),
        "slots must have shape (tokens,) or (1, tokens)": entry(slots=SLOTS.expand(2, 5)),
        "slots must have shape (tokens,) or (rows, tokens)": rows_(slots=SLOTS[None, None]),
        "slots must differ": on_each_backend(entry(slots=SLOTS // 2)),
        "x must not overlap itself in memory": on_each_backend(entry(x=shared)),
        "slots rotate without a gradient": entry(x=learns(CACHE)),
    },
    TypeError={
        "slots must be a tensor but got [0].": entry(slots=[0]),
        f"slots {SPARSE}": entry(slots=SLOTS.to_sparse()),
    },
    NotImplementedError={TRANSFORM: lambda: torch.vmap(lambda x: entry(x=x)())(CACHE[None])},
)


@every_backend
@pytest.mark.parametrize("last", [12, -2])
def test_no_slot_is_written_before_an_error(last: int, backend: str | None) -> None:
    q, k, v, base = noise(5, 3, 12), noise(5, 3, 12), noise(5, 3, 7), noise(4, 3, 3, 20).fill_(1)
    before, to = q.clone(), torch.tensor([0, 1, 2, 3, last])
    place = {"out": (q, base[..., :12]), "slots": to, "values": (v, base[..., 12:19])}
    for act in (None, ("silu", "relu")):
        with pytest.raises(IndexError):
            rotate_qk(q, k, SPEC, layout="thd", act=act, backend=backend, **place)
        assert torch.equal(q, before)
        assert (base == 1).all()


# --- rounding -------------------------------------------------------------------------------------

prepared = calls_of(rotate, x=X, spec=SPEC.at(0))
full = calls_of(apply_rotary_pos_emb, q=X, k=None, cos=X[0, 0], sin=X[0, 0], tables="full")
ROUNDINGS = "rounding must be 'once', 'wide' or 'each', or a pair of them for forward and backward"
test_rounding = refusals(
    ValueError={
        ROUNDINGS: [
            call(rounding=value)
            for value in ("twice", ("once",), ("once", "none"), 1, ["once", "each"])
            for call in (one, prepared, calls_of(RotaryPositionalEmbedding, dim=8), full)
        ],
        "…rounding must be 'once' with an act or a gate but got 'each'.": [
            call(rounding="each", **more)
            for more in ({"act": "silu"}, {"gate": XPos(8)})
            for call in (one, prepared)
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
MOVE = {"k": X, "from_spec": SPEC, "to_spec": SPEC, "positions": 5, "new_positions": 0}
move, move_ = calls_of(rerotate, **MOVE), calls_of(rerotate_, **MOVE)
resized = calls_of(rerotate, k=X, from_spec=spec_of(DYNAMIC), to_spec=spec_of(DYNAMIC), positions=5)
PREPARED = "must be a RopeSpec but got PreparedRotation; pass the spec that it was made from, and its positions as"
INSTEAD = "rotate by from_spec with inverse=True, then by to_spec."
LENGTHS = "must be one length, or one for each of 2 rows, but got 3"
test_rerotate = refusals(
    "rerotate",
    TypeError={
        "k must be a tensor but got None.": move(k=None),
        f"from_spec {PREPARED} positions=.": move(from_spec=SPEC.at(5)),
        f"to_spec {PREPARED} new_positions=.": move(to_spec=SPEC.at(5)),
    },
    ValueError={
        "k must have head_dim 12 in its last dimension but got 8": move(k=X[..., :8]),
        f"…rotary_dim but have 8 and 6; {INSTEAD}": move(to_spec=spec_of(rotary_dim=6)),
        f"…start but have 2 and 4; {INSTEAD}": move(to_spec=spec_of(start=4)),
        f"…interleaved but have False and True; {INSTEAD}": move(to_spec=spec_of(interleaved=True)),
        "positions must hold one position for each of 5 tokens but got 3": [
            move(positions=SLOTS[:3], new_positions=new) for new in (0, None)
        ],
        "new_positions must have 1 or 2 rows but got 3": move(new_positions=THREE),
        "to_spec must have 1 or 3 heads for k but got 2": move(to_spec=TWO_HEADS),
        "new_positions must have 2 axes for this spec but got 1": move(to_spec=AXES),
        f"from_seq_len {LENGTHS}": resized(from_seq_len=[1, 2, 3], to_seq_len=9),
        f"to_seq_len {LENGTHS}": resized(from_seq_len=99, to_seq_len=[1, 2, 3]),
        "from_seq_len must be given, as the frequencies of DynamicNTK": resized(to_seq_len=9),
        "from_seq_len must be given": move(from_spec=spec_of(DYNAMIC)),
        "to_seq_len must be given, as the frequencies of LongRoPE": move(to_spec=spec_of(LONG)),
        "to_seq_len must be given": resized(from_seq_len=9),
        "layout must be one of bhsd, bshd, sbhd, thd, bsd, sd but got 'bdsh'.": move(layout="bdsh"),
        "to rotate in place call rerotate_": move(out=X.view(3, 2, 5, 12).transpose(0, 1)),
    },
)
test_rerotate_ = refusals(
    "rerotate_",
    TypeError={"to_spec must be a RopeSpec but got int.": move_(to_spec=5)},
    ValueError={
        "k must have 4 dimensions for layout 'bhsd' but got 3": move_(k=X[0]),
        "new_positions must hold one position for each of 5": move_(new_positions=SLOTS[:3]),
        "to_seq_len must be given": move_(to_spec=spec_of(LONG)),
    },
)


# --- tables, the scan and LRPE --------------------------------------------------------------------

Q, C, TABLE = torch.zeros(2, 3, 5, 8), torch.zeros(5, 8), torch.zeros(9, 4)
HEADS = {"q": torch.zeros(2, 4, 7, 8), "k": torch.zeros(2, 2, 7, 8), "v": torch.zeros(2, 2, 7, 5)}
LRPE = {"x": torch.zeros(2, 5, 4, 16), "theta": torch.zeros(8)}
embedding = partial(rotary_embedding, x=Q, cos=TABLE, sin=TABLE, position_ids=ints(2, 5))
test_calls = refused_calls(
    Path(__file__).with_name("refused_calls.jsonl"),
    {
        "apply_rotary_pos_emb": partial(apply_rotary_pos_emb, q=Q, k=None, cos=C, sin=C),
        "rotary_embedding": embedding,
        "rotary_pos_embedding": partial(rotary_pos_embedding, input_=X),
        "polar_scan": partial(polar_scan, spec=RopeSpec(8, interleaved=True), **HEADS),
        "lrpe_rotate_1d": partial(lrpe_rotate_1d, **LRPE),
        "lrpe_rotate_1d_": partial(lrpe_rotate_1d_, **LRPE),
    },
)

MEMORY, PACK = torch.zeros(2, 2, 8, 5), positions.packed(torch.tensor([0, 2, 7]))
scan = calls_of(polar_scan, spec=RopeSpec(8, interleaved=True), **HEADS)
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
        "seq_len must be given with a state": remembered(MEMORY, spec=spec_of(DYNAMIC)),
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
