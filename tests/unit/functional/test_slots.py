"""`slots=`: keys and values go to entries of a paged cache, in the call that rotates."""

import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch._inductor.utils import run_and_get_code

from tests.support import helpers
from tests.support.helpers import refusals
from tests.support.matrix import needs_kernel
from tightrope import RopeSpec, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import YaRN
from tightrope.functional import rerotate, rerotate_, rotate, rotate_, rotate_qk
from tightrope.ops import schema
from tightrope.phases import given

noise = partial(helpers.noise, dtype=torch.float32)

SPEC = RopeSpec(12, rotary_dim=8, start=2)
BACKENDS = [None, "reference"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS, HEADS, TOKENS = 2, 3, 5

#: Shapes of keys and of caches by layout; a letter is the size of a dimension: b rows or blocks, h heads, t tokens or
#: entries, d channels.
LAYOUTS = {
    "bhsd": ("bhtd", "bhtd"),
    "bshd": ("bthd", "bthd"),
    "sbhd": ("tbhd", "tbhd"),
    "thd": ("thd", "thd"),
    "thd, blocks": ("thd", "bthd"),
    "bsd": ("btd", "btd"),
    "sd": ("td", "td"),
    "sd, blocks": ("td", "btd"),
}


def sized(letters: str, **sizes: int) -> list[int]:
    return [sizes[letter] for letter in letters]


def entry(x: torch.Tensor, letters: str, row: int, token: int) -> torch.Tensor:
    """Return one token of a row of x, or one entry of a block; a letter names each dimension."""
    at = {"b": row, "t": token}
    return x[tuple(at.get(letter, slice(None)) for letter in letters)]


def each_slot(
    x: torch.Tensor, of_x: str, cache: torch.Tensor, of_cache: str, slots: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each token of x that has a slot, and this entry of the cache."""
    entries = cache.shape[of_cache.index("t")]
    for row, own in enumerate(slots.reshape(-1, x.shape[of_x.index("t")]).tolist()):
        for token, slot in enumerate(own):
            if slot >= 0:
                yield entry(x, of_x, row, token), entry(cache, of_cache, *divmod(slot, entries))


def write(
    x: torch.Tensor, of_x: str, cache: torch.Tensor, of_cache: str, slots: torch.Tensor
) -> None:
    """Write each token of x to its slot, one by one."""
    for token, there in each_slot(x, of_x, cache, of_cache, slots):
        there.copy_(token)


def caches(letters: str, sizes: dict[str, int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield caches filled with sevens: contiguous, with padded pages, with strided channels, and slices of a larger one."""
    shape = sized(letters, **sizes)
    yield torch.full(shape, 7.0, dtype=dtype)
    wide = [*shape[:-1], shape[-1] + 5]
    yield torch.full(wide, 7.0, dtype=dtype)[..., 3:-2]
    yield torch.full([*shape[:-1], 2 * shape[-1]], 7.0, dtype=dtype)[..., ::2]
    yield torch.full([*shape[::-1]], 7.0, dtype=dtype).permute(*range(len(shape))[::-1])
    if letters.index("t") > 0:
        padded = torch.full([shape[0], torch.Size(shape[1:]).numel() + 11], 7.0, dtype=dtype)
        yield padded[:, 4:-7].unflatten(1, shape[1:])


def base_of(x: torch.Tensor) -> torch.Tensor:
    return x if x._base is None else x._base


def same_view(x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the view of a copy of the base of x that x is of its base."""
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def some_slots(count: int, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Return distinct slots in random order, of which some are -1."""
    found = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: rows * tokens]
    found[::4] = -1
    return found.view(rows, tokens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_strides(layout: str, dtype: torch.dtype, backend: str | None) -> None:
    """Bits of `rotate`, written by a loop over slots; every byte beside them is what it was."""
    of_x, of_cache = LAYOUTS[layout]
    name = layout.partition(",")[0]
    rows = ROWS if "b" in of_x else 1
    x = noise(*sized(of_x, b=rows, h=HEADS, t=TOKENS, d=12), dtype=dtype)
    v = noise(*sized(of_x, b=rows, h=HEADS + 1, t=TOKENS, d=7), dtype=dtype, seed=1)
    want = rotate(x, SPEC, 9, layout=name, backend=backend)
    blocks = 4 if "b" in of_cache else 1
    for entries in (1, 3, 7) if blocks > 1 else (11,):
        index = some_slots(blocks * entries, rows, min(TOKENS, blocks * entries // rows), entries)
        index = torch.nn.functional.pad(index, (0, TOKENS - index.shape[1]), value=-1)
        ids = [index, index.int(), torch.stack((index, index + 1), -1)[..., 0]]
        keys = caches(of_cache, {"b": blocks, "h": HEADS, "t": entries, "d": 12}, dtype)
        for i, cache in enumerate(keys):
            v_cache = list(
                caches(of_cache, {"b": blocks, "h": HEADS + 1, "t": entries, "d": 7}, dtype)
            )[i]
            slots = ids[i % 3] if "b" in of_x else ids[i % 3][0]
            expected = [base_of(c).clone() for c in (cache, v_cache)]
            write(want, of_x, same_view(cache, expected[0]), of_cache, slots)
            write(v, of_x, same_view(v_cache, expected[1]), of_cache, slots)
            versions = cache._version, v_cache._version
            got = rotate(
                x,
                SPEC,
                9,
                layout=name,
                out=cache,
                slots=slots,
                values=(v, v_cache),
                backend=backend,
            )
            assert got is cache
            assert torch.equal(base_of(cache), expected[0])
            assert torch.equal(base_of(v_cache), expected[1])
            assert cache._version > versions[0]
            assert v_cache._version > versions[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["thd", "bhsd"])
def test_latent_attention(layout: str, backend: str | None) -> None:
    """The tail of q in place, the key that heads share into its part of the cache, the latent beside it, in one call."""
    rank, nope, rope, rows = 6, 4, 8, 1 if layout == "thd" else 2
    spec = RopeSpec(rope, interleaved=True)
    by = (
        (lambda x: x)
        if layout == "thd"
        else (lambda x: x.view(rows, -1, *x.shape[1:]).transpose(1, 2))
    )
    q, latent = noise(rows * TOKENS, 3, nope + rope), noise(rows * TOKENS, 1, rank + rope, seed=1)
    cache = torch.full((4, 5, rank + rope), 7.0)
    paged = cache[..., None, :] if layout == "thd" else cache[:, None]
    slots = some_slots(20, rows, TOKENS)
    expected, by_q = cache.clone(), q.clone()
    each = slots[:, :1].abs().expand(rows, TOKENS)
    by_q[..., nope:], k = rotate_qk(
        q[..., nope:], latent[..., rank:], spec, each.flatten(), layout="thd", backend=backend
    )
    for x, own in (
        (latent[..., :rank], expected[..., None, :rank]),
        (k, expected[..., None, rank:]),
    ):
        write(x, "thd", own, "bthd", slots)
    tail, key = by(q)[..., nope:], by(latent)
    rotate_qk(
        tail, key[..., rank:], spec, each if rows > 1 else each[0], layout=layout, out=(tail, paged[..., rank:]),
        slots=slots, values=(key[..., :rank], paged[..., :rank]), backend=backend,
    )  # fmt: skip
    assert torch.equal(q, by_q)
    assert torch.equal(cache, expected)


#: Calls that take other ways through the kernel.
CALLS: dict[str, dict[str, object]] = {
    "act": {"act": "silu"},
    "norm": {"act": RMSNorm(torch.linspace(0.5, 1.5, 12))},
    "rounding": {"rounding": "each"},
    "inverse": {"inverse": True},
    "phases": {"phases": given(noise(2, HEADS, TOKENS, 4))},
    "frequencies per head": {"inv_freq": noise(HEADS, 4).abs()},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call(name: str, dtype: torch.dtype, backend: str | None) -> None:
    x = noise(2, HEADS, TOKENS, 12, dtype=dtype)
    more = CALLS[name]
    want = rotate(x, SPEC, 3, backend=backend, **more)
    slots = some_slots(18, 2, TOKENS)
    for cache in caches("bhtd", {"b": 2, "h": HEADS, "t": 9, "d": 12}, dtype):
        expected = base_of(cache).clone()
        write(want, "bhtd", same_view(cache, expected), "bhtd", slots)
        rotate(x, SPEC, 3, out=cache, slots=slots, backend=backend, **more)
        assert torch.equal(base_of(cache), expected)


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "threads"),
    [(64, 1, 2, 1), (1, 512, 8, 2), (6, 300, 2, 2), (300, 2, 16, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_calls_and_threads(dtype, rows: int, tokens: int, heads: int, threads: int) -> None:
    """Tiles, heads divided among threads, rows that share angles, and rows of one token each."""
    spec, count = RopeSpec(64), rows * tokens + 64
    x, v = noise(rows, heads, tokens, 64, dtype=dtype), noise(rows, 2, tokens, 16, dtype=dtype)
    slots = torch.randperm(count)[: rows * tokens].view(rows, tokens)
    slots[0, 0] = slots[-1, -1] = -1
    torch.set_num_threads(threads)
    for where in (None, positions.per_row(torch.arange(rows))):
        want = rotate(x, spec, where)
        stores = [torch.zeros(count, *size, dtype=dtype) for size in ((heads, 64), (2, 16))]
        expected = [cache.clone() for cache in stores]
        there = slots.flatten() >= 0
        for to, new in zip(expected, (want, v)):
            to[slots.flatten()[there]] = new.transpose(1, 2).flatten(0, 1)[there]
        pages = [cache[None].transpose(1, 2) for cache in stores]
        rotate(x, spec, where, out=pages[0], slots=slots, values=(v, pages[1]))
        assert all(map(torch.equal, stores, expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_write(backend: str | None) -> None:
    for tokens, entries in ((TOKENS, 4), (TOKENS, 0), (0, 4), (0, 0)):
        q, k = noise(tokens, 4, 12), noise(tokens, HEADS, 12)
        cache, slots = torch.full((3, entries, HEADS, 12), 7.0), torch.full((tokens,), -1)
        want = rotate(q, SPEC, layout="thd", backend=backend)
        new, _ = rotate_qk(
            q, k, SPEC, layout="thd", out=(torch.empty_like(q), cache), slots=slots, backend=backend
        )
        assert torch.equal(new, want)
        assert (cache == 7.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_several_tokens_wins(backend: str | None) -> None:
    k, cache = noise(TOKENS, HEADS, 12), torch.zeros(4, HEADS, 12)
    rotate(k, SPEC, layout="thd", out=cache, slots=torch.full((TOKENS,), 2), backend=backend)
    want = rotate(k, SPEC, layout="thd", backend=backend)
    assert any(torch.equal(cache[2], one) for one in want)
    assert (cache[[0, 1, 3]] == 0).all()


def test_tables_of_another_library() -> None:
    k, cache, slots = (
        noise(2, HEADS, TOKENS, 12),
        torch.zeros(2, HEADS, 9, 12),
        some_slots(18, 2, TOKENS),
    )
    at = RopeSpec(12).at(torch.arange(TOKENS), stack="transformers")
    expected = cache.clone()
    write(rotate(k, at), "bhtd", expected, "bhtd", slots)
    rotate(k, at, out=cache, slots=slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def step(q, k, v, cache, v_cache, slots, ids):
        q, _ = rotate_qk(
            q,
            k,
            SPEC,
            ids,
            layout="thd",
            out=(torch.empty_like(q), cache),
            slots=slots,
            values=(v, v_cache),
        )
        return q + 1

    q, k, v = (
        noise(TOKENS, 4, 12),
        noise(TOKENS, HEADS, 12, seed=1),
        noise(TOKENS, HEADS, 7, seed=2),
    )
    slots, ids = some_slots(12, 1, TOKENS)[0], torch.arange(TOKENS) + 7
    base = torch.full((4, 3, HEADS, 20), 7.0)
    expected = base.clone()
    want = step(q, k, v, *expected.split((12, 8), -1)[:1], expected[..., 13:], slots, ids)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    got = compiled(q, k, v, base[..., :12], base[..., 13:], slots, ids)
    assert torch.equal(got, want)
    assert torch.equal(base, expected)


def test_compiled_code_makes_no_buffer_of_the_size_of_the_cache() -> None:
    def step(k, cache, slots):
        return rotate(k + 1, SPEC, 3, layout="thd", out=cache, slots=slots)[:2] * 2

    k, cache, slots = noise(TOKENS, HEADS, 12), torch.zeros(1001, HEADS, 12), torch.arange(TOKENS)
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), k, cache, slots)
    assert "rotate_slots" in code
    made = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\)", code)
    assert made
    assert all("1001" not in shape for shape in made)


def test_the_raw_operator() -> None:
    k, v = noise(TOKENS, HEADS, 12), noise(TOKENS, HEADS, 7)
    cache, v_cache, slots = (
        torch.zeros(4, 3, HEADS, 12),
        torch.zeros(4, 3, HEADS, 7),
        torch.arange(TOKENS) * 2,
    )
    options = schema.Options(schema.LAYOUTS.index("thd"), start=2)
    words = SPEC.at().angles.words
    arguments = (words, None, None, 0, options.pack(), 1.0, [], 0.0)
    torch.library.opcheck(
        schema.rotate_slots_extras,
        (k, None, v, cache, None, v_cache, slots, None, None, *arguments),
    )
    with pytest.raises(RuntimeError, match="the raw operator has no gradient"):
        schema.rotate_slots_extras(
            k.clone().requires_grad_(), None, None, cache, None, None, slots, None, None, *arguments
        )
    given = [k, None, None, cache, None, None, slots, None, None, *arguments]
    back = options._replace(direction=schema.TRANSPOSE).pack()
    # For each error, the numbers of the wrong arguments, and their values.
    for text, change in {
        "slots must be -1 or": {6: slots + 9},
        "slots must be int32 or": {6: slots[1:]},
        "memory overlaps": {3: k, 6: slots // 2},
        "values must come": {2: v},
        "values must have": {2: v, 5: v_cache[1:]},
        "scales are not": {7: torch.ones(())},
        "slots have no gradient": {13: back},
    }.items():
        with pytest.raises(RuntimeError, match=text):
            schema.rotate_slots_extras(*(change.get(i, one) for i, one in enumerate(given)))
    assert not cache.any()
    assert not v_cache.any()


K, V = torch.zeros(5, 3, 12), torch.zeros(5, 3, 7)
CACHE, OF_VALUES = torch.zeros(4, 3, 3, 12), torch.zeros(4, 3, 3, 7)
SLOTS = torch.arange(5)


def call(
    k: object = K,
    out: object = CACHE,
    slots: object = SLOTS,
    values: object = (V, OF_VALUES),
    **more: object,
) -> torch.Tensor:
    return rotate(k, SPEC, layout="thd", out=out, slots=slots, values=values, **more)


def both(q: torch.Tensor, k: torch.Tensor | None, out: object, **more: object) -> object:
    return rotate_qk(q, k, SPEC, layout="thd", out=out, slots=SLOTS, **more)


def each(function: Callable[..., object]) -> list[Callable[[], object]]:
    return [partial(function, backend=backend) for backend in BACKENDS]


OF = "(slots: int64[5], out: float32[4, 3, 3, 12])"
X = "x: float32[5, 3, 12]"
RANGE = "[rotate] slots must be -1 or lie in [0, 12) but got"
FITS = (
    "must be a cache (entries, heads, channels) or (blocks, entries, heads, channels) with the heads, channels, "
    "dtype and device of"
)
OVERLAP = "out, the cache of values and the inputs must not overlap in memory, nor a cache itself"
GRAD = "values and their cache must not require grad: what is written to slots has no gradient; use torch.no_grad()"
PAIR = "[rotate] values must be a pair of tensors, the values and their cache, but got"
INDEX = {
    f"{RANGE} 12 {OF}.": each(lambda backend: call(slots=SLOTS + 8, backend=backend)),
    f"{RANGE} -2 {OF}.": each(lambda backend: call(slots=SLOTS - 2, backend=backend)),
}
VALUES = {
    "[rotate] slots must come with out, the cache to write to.": lambda: call(out=None),
    "[rotate] values must come with slots, the entries of their cache to write to.": (
        lambda: call(slots=None)
    ),
    "[rotate_qk] slots must come with k, which goes to them; to write q alone, call rotate.": (
        lambda: both(K, None, (CACHE, None))
    ),
    f"[rotate] slots must have shape (1, 5) or (5,), one for each token ({X}, slots: int64[4]).": (
        lambda: call(slots=SLOTS[:4])
    ),
    "[rotate] slots must have shape (2, 5), one for each token (x: float32[2, 3, 5, 12], slots: int64[5]).": (
        lambda: rotate(torch.zeros(2, 3, 5, 12), SPEC, out=torch.zeros(2, 3, 9, 12), slots=SLOTS)
    ),
    f"[rotate] out {FITS} x (layout 'thd') ({X}, out: float32[4, 3, 4, 12]).": (
        lambda: call(out=torch.zeros(4, 3, 4, 12))
    ),
    f"[rotate] out {FITS} x (layout 'thd') ({X}, out: float32[12]).": lambda: call(
        out=CACHE[0, 0, 0]
    ),
    f"[rotate] out {FITS} x (layout 'thd') ({X}, out: float64[4, 3, 3, 12]).": (
        lambda: call(out=CACHE.double())
    ),
    f"[rotate] out {FITS} x (layout 'thd'); to write float8, pass scale= ({X}, out: float8_e5m2[4, 3, 3, 12]).": (
        lambda: call(out=CACHE.to(torch.float8_e5m2))
    ),
    f"[rotate] out {FITS} x (layout 'thd'); to write float8, pass a view such as out.view(torch.float8_e4m3fn), and "
    f"scale= ({X}, out: uint8[4, 3, 3, 12]).": lambda: call(out=CACHE.to(torch.uint8)),
    "[rotate] out must be a cache (blocks, heads, entries, channels) with the heads, channels, dtype and device of "
    "x (layout 'bhsd') (x: float32[1, 3, 5, 12], out: float32[3, 5, 12]).": (
        lambda: rotate(torch.zeros(1, 3, 5, 12), SPEC, out=torch.zeros(3, 5, 12), slots=SLOTS)
    ),
    f"[rotate] the cache of values {FITS} values (layout 'thd') (values: float32[5, 3, 7], "
    "values[1]: float32[4, 3, 3, 6]).": lambda: call(values=(V, OF_VALUES[..., 1:])),
    "[rotate] the cache of values must have the blocks and entries of out (out: float32[4, 3, 3, 12], "
    "values[1]: float32[3, 3, 3, 7]).": lambda: call(values=(V, OF_VALUES[1:])),
    f"[rotate] values must have the rows, tokens, dtype, device and layout of x ({X}, "
    "values: float32[4, 3, 7]).": lambda: call(values=(V[1:], OF_VALUES)),
    f"[rotate] values must have the rows, tokens, dtype, device and layout of x ({X}, "
    "values: float64[5, 3, 7]).": lambda: call(values=(V.double(), OF_VALUES.double())),
    f"[rotate] {OVERLAP} (out[0]: float32[5, 3, 12]).": each(
        lambda backend: call(out=K, values=None, backend=backend)
    ),
    f"[rotate] {OVERLAP} (out[0]: float32[4, 3, 3, 12]).": [
        *each(
            lambda backend: call(out=torch.zeros(1, 3, 3, 12).expand(4, 3, 3, 12), backend=backend)
        ),
        *each(
            lambda backend: call(
                values=(CACHE.view(12, 3, 12)[:5, :, :7], OF_VALUES), backend=backend
            )
        ),
        *each(lambda backend: call(values=(V, CACHE[..., :7]), backend=backend)),
    ],
    f"[rotate_qk] {OVERLAP} (out[0]: float32[5, 3, 12], out[1]: float32[4, 3, 3, 12]).": each(
        lambda backend: both(K.clone(), K, (CACHE.view(12, 3, 12)[:5], CACHE), backend=backend)
    ),
    "[rotate] a result written to out has no gradient, but x or out requires one; use torch.no_grad(), or omit "
    f"out ({X}, out: float32[4, 3, 3, 12]).": lambda: call(K.clone().requires_grad_()),
    f"[rotate] {GRAD}.": lambda: call(values=(V.clone().requires_grad_(), OF_VALUES)),
}
TYPES = {
    "[rotate] slots must be a tensor but got [0].": lambda: call(slots=[0]),
    f"{PAIR} 3.": lambda: call(values=3),
    "[rotate] slots must be int32 or int64 on the device of x but got float32 on cpu.": (
        lambda: call(slots=SLOTS.float())
    ),
}


def forward_mode(which: str) -> Callable[[], None]:
    def run() -> None:
        with fwAD.dual_level():
            given = {"k": K, "out": CACHE}
            given[which] = fwAD.make_dual(given[which], torch.ones_like(given[which]))
            call(**given)

    return run


TRANSFORM = "slots cannot be used in vmap, grad or another transform of torch.func."
UNSUPPORTED = {
    f"[rotate] {TRANSFORM}": [
        lambda: torch.vmap(lambda k: call(k, values=None))(K[None]),
        lambda: torch.func.grad(lambda k: call(k, values=None).sum())(K),
    ],
    "[rotate] slots have no forward-mode derivative; rotate without out.": [
        forward_mode("k"),
        forward_mode("out"),
    ],
}
test_sentence = refusals(
    IndexError=INDEX, ValueError=VALUES, TypeError=TYPES, NotImplementedError=UNSUPPORTED
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last", [12, -2])
def test_nothing_is_written_before_an_error(last: int, backend: str | None) -> None:
    q, k, v = noise(5, 3, 12), noise(5, 3, 12), noise(5, 3, 7)
    base, before = torch.full((4, 3, 3, 20), 7.0), q.clone()
    slots = torch.tensor([0, 1, 2, 3, last])
    for act in (None, ("silu", "relu")):
        with pytest.raises(IndexError):
            rotate_qk(
                q, k, SPEC, layout="thd", act=act, out=(q, base[..., :12]), slots=slots, values=(v, base[..., 12:19]),
                backend=backend,
            )  # fmt: skip
        assert torch.equal(q, before)
        assert (base == 7.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_rotate_in_place(layout: str, dtype: torch.dtype, backend: str | None) -> None:
    """Bits of gathering, rotating and scattering; every byte beside the entries is what it was."""
    of_x, of_cache = LAYOUTS[layout]
    name, rows, blocks = (
        layout.partition(",")[0],
        ROWS if "b" in of_x else 1,
        4 if "b" in of_cache else 1,
    )
    sizes = {"b": blocks, "h": HEADS, "t": 3 if blocks > 1 else 11, "d": 12}
    slots = some_slots(blocks * sizes["t"], rows, TOKENS)
    index, ids = (x if "b" in of_x else x[0] for x in (slots, 7 * slots.abs()))
    # The bits of torch's own silu depend on strides.
    for more in ({}, {"rounding": "each"}, *([] if backend else [{"act": "silu"}])):
        for cache in caches(of_cache, sizes, dtype):
            cache.copy_(noise(*cache.shape))
            x = torch.zeros(sized(of_x, b=rows, h=HEADS, t=TOKENS, d=12), dtype=dtype)
            for token, there in each_slot(x, of_x, cache, of_cache, index):
                token.copy_(there)
            expected, version = base_of(cache).clone(), cache._version
            want = rotate(x, SPEC, ids, layout=name, backend=backend, **more)
            write(want, of_x, same_view(cache, expected), of_cache, index)
            got = rotate_(cache, SPEC, ids, layout=name, slots=index.int(), backend=backend, **more)
            assert got is cache
            assert cache._version > version
            assert torch.equal(base_of(cache), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_move(backend: str | None) -> None:
    """A context shift of one row and a rescale in mid-conversation, in a paged cache whose blocks are shared."""
    spec, scaled = RopeSpec(16), RopeSpec(16, scaling=YaRN(4.0, original_max_position=32))
    keys = noise(40, 2, 16)
    cache = rotate(keys, spec, layout="thd").view(8, 5, 2, 16)
    before = cache.clone()
    slots = torch.tensor([31, 7, 12, -1, 38])
    rerotate_(
        cache,
        spec,
        spec,
        slots.clamp(0),
        slots.clamp(0) - 5,
        layout="thd",
        slots=slots,
        backend=backend,
    )
    there = slots[slots >= 0]
    want = rerotate(
        before.view(40, 2, 16)[there], spec, spec, there, there - 5, layout="thd", backend=backend
    )
    assert torch.equal(cache.view(40, 2, 16)[there], want)
    rest = torch.ones(40, dtype=torch.bool)
    rest[there] = False
    assert torch.equal(cache.view(40, 2, 16)[rest], before.view(40, 2, 16)[rest])
    every = torch.arange(40)
    cache = before.clone()
    rerotate_(cache, spec, scaled, every, layout="thd", slots=every, backend=backend)
    assert torch.equal(
        cache.view(40, 2, 16),
        rerotate(before.view(40, 2, 16), spec, scaled, layout="thd", backend=backend),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_rotate_in_compiled_code(backend: str | None) -> None:
    def step(cache: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rotate_(cache[..., :12], SPEC, ids, layout="thd", slots=slots, backend=backend)
        return cache.sum()

    slots, cache = some_slots(12, 1, TOKENS)[0], noise(4, 3, HEADS, 20)
    expected, ids = cache.clone(), torch.arange(TOKENS) + 7
    want = step(expected, slots, ids)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(cache, slots, ids)
    assert torch.equal(got, want)
    assert torch.equal(cache, expected)


ENTRIES = torch.zeros(4, 3, 3, 12)


def move(
    cache: object = ENTRIES, slots: object = SLOTS, layout: str = "thd", **more: object
) -> object:
    return rotate_(cache, SPEC, layout=layout, slots=slots, **more)


LIKE = "x must be a cache"
MOVES = {
    f"[rotate_] {LIKE} (entries, heads, channels) or (blocks, entries, heads, channels) for layout 'thd' "
    "(x: float32[3, 12]).": lambda: move(ENTRIES[0, 0]),
    "[rotate_] slots must have shape (tokens,) or (1, tokens) for layout 'thd' (slots: int64[2, 5]).": (
        lambda: move(slots=SLOTS.expand(2, 5))
    ),
    "[rotate_] slots must have shape (tokens,) or (rows, tokens) for layout 'bhsd' (slots: int64[1, 1, 5]).": (
        lambda: move(slots=SLOTS[None, None], layout="bhsd")
    ),
    "[rotate_] slots must differ, because an entry can rotate only once in a call (slots: int64[5]).": each(
        lambda backend: move(slots=SLOTS // 2, backend=backend)
    ),
    "[rotate_] x must not overlap itself in memory (an expanded tensor?); rotate a clone of it "
    "(x: float32[4, 3, 3, 12]).": each(
        lambda backend: move(torch.zeros(1, 3, 3, 12).expand(4, 3, 3, 12), backend=backend)
    ),
    "[rotate_] slots rotate without a gradient, but the cache or another tensor requires one; use torch.no_grad().": (
        lambda: move(ENTRIES.clone().requires_grad_())
    ),
}
test_sentence_of_moves = refusals(
    ValueError=MOVES,
    IndexError={
        "[rotate_] slots must be -1 or lie in [0, 12) but got 12 (slots: int64[5], x: float32[4, 3, 3, 12]).": each(
            lambda backend: move(slots=SLOTS + 8, backend=backend)
        )
    },
    TypeError={
        "[rotate_] slots must be a tensor but got [0].": lambda: move(slots=[0]),
        "[rotate_] slots must be a dense tensor but got one that is sparse_coo.": (
            lambda: move(slots=SLOTS.to_sparse())
        ),
    },
    NotImplementedError={
        f"[rotate_] {TRANSFORM}": lambda: torch.vmap(move)(ENTRIES[None]),
    },
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_of_slots_for_packed_entries(backend: str | None) -> None:
    cache = noise(4, 3, HEADS, 12)
    expected, slots = cache.clone(), some_slots(12, 1, TOKENS)
    rotate_(expected, SPEC, 3, layout="thd", slots=slots[0], backend=backend)
    assert torch.equal(
        rotate_(cache, SPEC, 3, layout="thd", slots=slots, backend=backend), expected
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_and_keys_of_different_kinds(backend: str | None) -> None:
    """Two calls run; the keys and values go to slots that were read before the first one wrote over them."""
    memory = torch.zeros(2 * TOKENS * 12, dtype=torch.int64)
    q = memory.view(torch.float64).view(TOKENS, 2, 12)
    slots = memory[:TOKENS]
    slots.copy_(torch.tensor([4, 2, 0, 7, 9]))
    k, kept = noise(TOKENS, HEADS, 12, dtype=torch.float64), slots.clone()
    v, wanted = k[:, :1] + 1, rotate(q.clone(), SPEC, layout="thd", act="silu", backend=backend)
    cache, v_cache = (torch.zeros(12, heads, 12, dtype=torch.float64) for heads in (HEADS, 1))
    options = {"act": ("silu", None), "values": (v, v_cache), "backend": backend}
    rotate_qk(q, k, SPEC, layout="thd", out=(q, cache), slots=slots, **options)
    assert torch.equal(q, wanted)
    assert torch.equal(cache[kept], rotate(k, SPEC, layout="thd", backend=backend))
    assert torch.equal(v_cache[kept], v)
    rest = [slot for slot in range(12) if slot not in kept]
    assert not cache[rest].any()
    assert not v_cache[rest].any()


@pytest.mark.parametrize("name", ["keys", "entries"])
def test_caches_sliced_outside_of_compiled_code(name: str) -> None:
    """Also where the number of blocks changes, for which Inductor loses slices made inside (docs/serve.md)."""

    def step(cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if name == "keys":
            return rotate(k, SPEC, 3, layout="thd", out=cache, slots=slots)[:1] * 1
        return rotate_(cache, SPEC, 3, layout="thd", slots=slots)[:1] * 1

    compiled = torch.compile(step, fullgraph=True)
    for blocks in (4, 5, 6):
        both = noise(2, blocks, 3, HEADS, 12)
        expected, k, slots = both.clone(), noise(TOKENS, HEADS, 12), some_slots(12, 1, TOKENS)[0]
        step(expected[1], k, slots)
        compiled(both[1], k, slots)
        assert torch.equal(both, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_rows_than_a_loop_can_visit(backend: str | None) -> None:
    """Rows without tokens, of which there may be any number, take no time."""
    cache, slots = noise(0, HEADS, 3, 12), torch.empty(2**50, 0, dtype=torch.int64)
    assert rotate_(cache, SPEC, 3, slots=slots, backend=backend) is cache


@needs_kernel
@pytest.mark.parametrize("act", [None, "silu"])
def test_more_heads_than_a_loop_can_visit(act: str | None) -> None:
    """A cache without entries takes none of them. The definition would make them, and has no memory for that."""
    cache, slots = torch.empty(1, 2**55, 0, 12), torch.tensor([-1, -1])
    assert rotate_(cache, SPEC, 3, slots=slots, act=act) is cache
