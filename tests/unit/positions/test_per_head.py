"""Positions that differ between heads, compared with a loop that rotates head by head."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.helpers import noise, refusals
from tests.support.matrix import INDUCTOR, every_backend, every_way
from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tests.support.triton.cases import DEVICE, kernels_in_place, needs_triton
from tightrope import RopeSpec, phases, positions
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.frequencies import DynamicNTK
from tightrope.functional import rerotate, rerotate_, rotate, rotate_, rotate_qk
from tightrope.gates import Slope, XPos
from tightrope.ops import schema
from tightrope.ops.schema import Options
from tightrope.positions import Positions, concatenate, explicit, per_head, shard

ROWS, HEADS, TOKENS, DIM, PAIRS = 2, 3, 5, 16, 6
LAYOUTS = {
    "bhsd": (0, 1, 2, 3),
    "bshd": (0, 2, 1, 3),
    "sbhd": (2, 0, 1, 3),
}


def spec_of(interleaved: bool = False, **options: Any) -> RopeSpec:
    return RopeSpec(DIM, rotary_dim=2 * PAIRS, start=2, interleaved=interleaved, **options)


SPEC = spec_of()


def kept(rows: int = ROWS, dtype: torch.dtype = torch.int64, seed: int = 0) -> torch.Tensor:
    """Return the positions that each head kept, (rows, heads, tokens); fractional ones if floating."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, HEADS, 400, generator=generator).argsort(-1)
    ids = order[..., :TOKENS].sort(-1).values.to(dtype)
    return ids + 0.375 if dtype.is_floating_point else ids


def x_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return noise(ROWS, HEADS, TOKENS, DIM, dtype=dtype, seed=seed)


def by_loop(x: torch.Tensor, ids: torch.Tensor, turn: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Rotate each head of x (rows, heads, tokens, channels) by itself, at ids (rows, heads, tokens)."""
    return torch.cat([turn(x[:, [h]], ids[:, h]) for h in range(x.shape[1])], 1)


@every_way
@pytest.mark.parametrize("rounding", ["once", "wide", "each"])
def test_each_head_is_rotated_as_if_alone(
    rounding: str, interleaved: bool, backend: str | None, dtype: torch.dtype
) -> None:
    spec, x = spec_of(interleaved), x_of(dtype)
    for of_ids in (torch.int64, torch.int32, torch.float32, torch.float64):
        ids = kept(dtype=of_ids)

        def turn(one: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return rotate(one, spec, at, rounding=rounding, backend=backend)

        want = by_loop(x, ids, turn)
        strided = ids.transpose(1, 2).contiguous().transpose(1, 2)
        for layout, order in LAYOUTS.items():
            own = x.permute(order)
            for where in (per_head(ids), spec.at(per_head(strided))):
                rope, at = (spec, where) if isinstance(where, Positions) else (where, None)
                got = rotate(own, rope, at, layout=layout, rounding=rounding, backend=backend)
                assert_same_bits(got, want.permute(order))
        flat = rotate(
            x[0].transpose(0, 1),
            spec,
            per_head(ids[0]),
            layout="thd",
            rounding=rounding,
            backend=backend,
        )
        assert_same_bits(flat.transpose(0, 1), want[0])
        shared = rotate(x, spec, per_head(ids[0]), rounding=rounding, backend=backend)
        assert_same_bits(shared, by_loop(x, ids[:1], turn))


ANGLES, OMEGAS = noise(ROWS, HEADS, TOKENS, PAIRS, seed=3), noise(HEADS, PAIRS, seed=4).abs()
#: Options of the heads of a range and the first tokens.
OPTIONS: dict[str, Callable[[slice, int], dict[str, Any]]] = {
    "nothing": lambda *_: {},
    "frequencies": lambda heads, _: {"inv_freq": OMEGAS[heads]},
    "phases": lambda heads, n: {"phases": phases.given(ANGLES[:, heads, :n])},
    "phases of all heads": lambda _, n: {"phases": phases.given(ANGLES[:, :1, :n])},
    "slopes": lambda *_: {"gate": Slope(torch.full((DIM,), 0.01))},
    "xPos and norm": lambda *_: {"gate": XPos(200), "act": RMSNorm()},
}


@every_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_with_other_options(name: str, dtype: torch.dtype, backend: str | None) -> None:
    """Each head is rotated as if alone, also for one token and by positions that all rows share or one head has."""
    spec, every = SPEC, kept(dtype=dtype)
    for ids, tokens in ((every, TOKENS), (every[:1], TOKENS), (every[:, :1], TOKENS), (every, 1)):
        x, ids = x_of(torch.float64)[:, :, :tokens], ids[:, :, :tokens]
        got = rotate(x, spec, per_head(ids), backend=backend, **OPTIONS[name](slice(None), tokens))
        alone = [
            rotate(
                x[:, [h]],
                spec,
                ids[:, h % ids.shape[1]],
                backend=backend,
                **OPTIONS[name](slice(h, h + 1), tokens),
            )
            for h in range(HEADS)
        ]
        assert_near(got, torch.cat(alone, 1), "float64 ways")
        prepared = spec.at(per_head(ids))
        assert_same_bits(
            rotate(x, prepared, backend=backend, **OPTIONS[name](slice(None), tokens)), got
        )


@every_backend
def test_lost_positions_and_the_longest_of_a_row(backend: str | None) -> None:
    """A position that is NaN loses the pairs of its own head and token, and no others."""
    ids = kept(dtype=torch.float64)
    ids[1, 2, 3] = torch.nan
    lost = rotate(x_of(), SPEC, per_head(ids), backend=backend).isnan()
    assert bool(lost[1, 2, 3, 2 : 2 + 2 * PAIRS].all())
    assert int(lost.sum()) == 2 * PAIRS
    spec, ids = spec_of(scaling=DynamicNTK(2.0, original_max_position=64)), kept()
    ids[1] %= 50
    ids[:, :, 0] = 0
    options: dict[str, Any] = {"seq_len": ids.amax((1, 2)) + 1, "backend": backend}
    want = by_loop(x_of(), ids, lambda one, at: rotate(one, spec, at, **options))
    for rope, at in ((spec, per_head(ids)), (spec.at(per_head(ids)), None)):
        assert_same_bits(rotate(x_of(), rope, at, backend=backend), want)


@every_backend
def test_slots(backend: str | None) -> None:
    """Results and entries of a cache go where those of shared positions go."""
    x, ids = x_of(), kept()
    slots = torch.tensor([[7, 2, -1, 0, 11], [5, 4, 3, 9, -1]])
    kept_there = slots >= 0
    want = by_loop(x, ids, lambda one, at: rotate(one, SPEC, at, backend=backend))
    cache = torch.full((3, 4, HEADS, DIM), 7.0)
    rotate(
        x.transpose(1, 2),
        SPEC,
        per_head(ids),
        layout="bshd",
        out=cache,
        slots=slots,
        backend=backend,
    )
    assert_same_bits(cache.flatten(0, 1)[slots[kept_there]], want.transpose(1, 2)[kept_there])
    again = cache.flatten(0, 1)[slots.clamp(min=0)].transpose(1, 2)
    moved = by_loop(again, ids, lambda one, at: rotate(one, SPEC, at, backend=backend))
    rotate_(cache, SPEC, per_head(ids), layout="bshd", slots=slots, backend=backend)
    assert_same_bits(cache.flatten(0, 1)[slots[kept_there]], moved.transpose(1, 2)[kept_there])


@every_backend
def test_several_coordinates(backend: str | None) -> None:
    spec = RopeSpec(8, axes=Axes.blocks((2, 2)))
    ids = torch.stack((kept(), kept(seed=1)))
    x = x_of()[..., :8]
    got = rotate(x, spec, Positions(ids.transpose(2, 3), add_index=False), backend=backend)
    heads = [
        rotate(x[:, [h]], spec, positions.multi_axis(ids[:, :, h]), backend=backend)
        for h in range(HEADS)
    ]
    assert_same_bits(got, torch.cat(heads, 1))


@every_backend
def test_rerotate(backend: str | None) -> None:
    """Each head closes its own gaps, from and to positions with heads or without."""
    to = spec_of(base=500.0)
    old, new = kept(), torch.arange(TOKENS)
    ids = {"old": (old, per_head(old)), "new": (new.expand_as(old), new)}
    k = rotate(x_of(torch.float64), SPEC, per_head(old), backend=backend)
    for rule in (SPEC, to):
        for one, other in (("old", "new"), ("new", "old"), ("old", "old")):
            (a, at), (b, to_at) = ids[one], ids[other]
            got = rerotate(k, SPEC, rule, at, to_at, backend=backend)
            heads = [
                rerotate(k[:, [h]], SPEC, rule, a[:, h], b[:, h], backend=backend)
                for h in range(HEADS)
            ]
            assert_same_bits(got, torch.cat(heads, 1))
            in_place = k.clone()
            rerotate_(in_place, SPEC, rule, at, to_at, backend=backend)
            assert_same_bits(in_place, got)


def test_rewriting() -> None:
    ids = kept()
    where = per_head(ids)
    assert explicit(where).ids.equal(where.ids)
    assert shard(where, 0, 5).ids.equal(per_head(ids[:, :, :1]).ids)
    parts = [per_head(ids[:, :, :2]), per_head(ids[:, :, 2:])]
    assert concatenate(parts).ids.equal(where.ids)
    assert concatenate([per_head(ids[0]), per_head(ids[1:])], along="rows").ids.equal(where.ids)
    rows = concatenate([per_head(ids[0]), where])
    assert rows.ids.shape == (1, ROWS, 2 * TOKENS, HEADS)


def test_tables_of_cosines() -> None:
    cos, sin = SPEC.cos_sin(per_head(kept()), dtype=torch.float64)
    want = [SPEC.cos_sin(kept()[:, h], dtype=torch.float64) for h in range(HEADS)]
    assert_same_bits(cos, torch.stack([c for c, _ in want], 1))
    assert_same_bits(sin, torch.stack([s for _, s in want], 1))


@pytest.mark.skipif(INDUCTOR is None, reason="no C++ compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """The graph has no break, and gives the values and gradients of eager code."""
    compiled = torch.compile(
        lambda q, k, ids: rotate_qk(q, k, SPEC, per_head(ids)), fullgraph=True, dynamic=dynamic
    )
    for tokens in (3, TOKENS):
        inputs = [x_of()[:, :, :tokens], x_of(seed=1)[:, :, :tokens]]
        ids = kept(dtype=torch.float64)[:, :, :tokens].requires_grad_()
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = []
        for turn in (compiled, lambda q, k, ids: rotate_qk(q, k, SPEC, per_head(ids))):
            ys = turn(*leaves, ids)
            loss = sum(y.square().cumsum(2).sum() for y in ys)
            results.append([*ys, *torch.autograd.grad(loss, [*leaves, ids])])
        assert_each(lambda a, b: assert_near(a, b, "float32 ways"), *results)


@needs_triton
@pytest.mark.one_in(2)
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("learned", [None, 1, HEADS])
def test_triton(learned: int | None, floating: bool) -> None:
    """The kernels give what the definition gives: results, and gradients of all that learns."""
    ids = kept(dtype=torch.float64 if floating else torch.int64).to(DEVICE)
    xs = [x_of(torch.float64, seed).to(DEVICE).requires_grad_() for seed in range(2)]
    inputs = [*xs, *([ids.requires_grad_()] if floating else [])]
    inv_freq = None
    if learned is not None:
        inv_freq = torch.rand(learned, PAIRS, dtype=torch.float64, device=DEVICE).requires_grad_()
        inputs.append(inv_freq)

    def found(backend: str | None) -> list[torch.Tensor]:
        ys = rotate_qk(*xs, SPEC, per_head(ids), inv_freq=inv_freq, backend=backend)
        loss = sum(y.square().cumsum(2).sum() for y in ys)
        return [*ys, *torch.autograd.grad(loss, inputs)]

    with kernels_in_place():
        by_kernel = found(None)
        cache = torch.full((3, 4, HEADS, DIM), 7.0, dtype=torch.float64, device=DEVICE)
        slots = torch.tensor([[7, 2, -1, 0, 11], [5, 4, 3, 9, -1]], device=DEVICE)
        k = xs[0].detach().transpose(1, 2)
        # The same frequencies, so that the bits are those of the plain call.
        given = None if inv_freq is None else inv_freq.detach()
        rotate(
            k, SPEC, per_head(ids.detach()), layout="bshd", inv_freq=given, out=cache, slots=slots
        )
        own = phases.given(torch.ones(1, 1, TOKENS, 1, device=DEVICE))
        with_phase = rotate(xs[0].detach(), SPEC, per_head(ids.detach()), phases=own)
    want = [*found("reference"), rotate(xs[0].detach(), SPEC, per_head(ids.detach()), phases=own)]
    kept_there = slots >= 0
    entries = cache.flatten(0, 1)[slots[kept_there]]
    assert_same_bits(entries, by_kernel[0].detach().transpose(1, 2)[kept_there])
    assert_each(lambda a, b: assert_near(a, b, "triton, float64"), [*by_kernel, with_phase], want)


def raw(positions: torch.Tensor, options: Options, *tables: torch.Tensor, gate: Any = None) -> Any:
    q = x_of()
    primary, secondary = tables or (torch.zeros(1, 1, 1, PAIRS, dtype=torch.int64), None)
    given = q, None, primary, secondary, positions, 0, options.pack(), 1.0
    if gate is None:
        return schema.rotate(*given)
    return schema.rotate_extras(*given, [gate], 0.0)


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
def test_raw_operators_check(triton: bool) -> None:
    """The kernels read no position outside the tensor, and take no combination that they do not know."""
    ids, plain = kept().transpose(1, 2)[None], Options(add_index=False)
    table = torch.zeros(1, 1, 400, PAIRS)
    with kernels_in_place() if triton else contextlib.nullcontext():
        raw(ids, plain)
        for wrong in (ids[..., :2], ids[:, :, :2], torch.cat((ids, ids[:, :1]), 1), ids[None]):
            with pytest.raises(RuntimeError, match="tightrope: positions must"):
                raw(wrong, plain)
        with pytest.raises(RuntimeError, match="tightrope: positions must"):
            raw(ids[:, :, :1], Options())
        with pytest.raises(RuntimeError, match=r"in a table,? must have no heads"):
            raw(ids, plain._replace(source=schema.HALF), table, table)
        with pytest.raises(RuntimeError, match=r"tightrope: .*slopes"):
            raw(ids, plain._replace(gate=schema.SLOPE), gate=torch.zeros(1, DIM))


X = "x: float32[2, 3, 5, 16]"

test_refusals = refusals(
    ValueError={
        "[per_head] ids must have shape (heads, tokens) or (rows, heads, tokens) (ids: int64[5]).": (
            lambda: per_head(torch.arange(5))
        ),
        f"[rotate] positions must have 1 or 3 heads for x but got 2 ({X}).": (
            lambda: rotate(x_of(), SPEC, per_head(kept()[:, :2]))
        ),
        "[rotate] positions must have 1 head for x but got 3 (x: float32[2, 5, 16]).": (
            lambda: rotate(x_of()[:, 0], SPEC, per_head(kept()), layout="bsd")
        ),
        "[rotate_qk] positions must have 1 or 6 heads for q but got 3; rotate q and k one by one, each with "
        "its own positions (q: float32[2, 6, 5, 16]).": (
            lambda: rotate_qk(torch.cat((x_of(), x_of()), 1), x_of(), SPEC, per_head(kept()))
        ),
        "[rotate] positions must hold one position for each of 5 tokens but got 4 (layout 'bhsd' has its tokens "
        f"in dimension 2) ({X}, positions: int64[2, 3, 4]).": (
            lambda: rotate(x_of(), SPEC, per_head(kept()[:, :, :4]))
        ),
        f"[rotate] positions must have 1 or 2 rows but got 4 ({X}, positions: int64[4, 3, 5]).": (
            lambda: rotate(x_of(), SPEC, per_head(torch.cat((kept(), kept()))))
        ),
        "[at] positions must be those of all heads with a stack, whose tables have no heads (positions: "
        "int64[2, 5, 3]).": lambda: SPEC.at(per_head(kept()), stack="transformers"),
        "[concatenate] parts must have the same numbers of axes and rows and heads (one: int64[1, 2, 5, 3], "
        "other: int64[1, 2, 5]).": lambda: concatenate([per_head(kept()), kept()[:, 0]]),
    },
    TypeError={
        "[per_head] ids must be int32, int64, float32 or float64 (ids: bool[3, 5]).": (
            lambda: per_head(torch.zeros(3, 5, dtype=torch.bool))
        ),
    },
)
