"""Direct calls of the Triton backend's operators: memory, slots, empty tensors, what they refuse or leave to the definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.support.eight import E4M3, EVERY, LARGEST, codes, stored
from tests.support.helpers import Watcher, noise
from tests.support.raw_calls import (
    ANGLES,
    Call,
    Draw,
    angle_gradients,
    assert_reads_before_it_writes,
    freed_storages,
    phases,
    rotation,
)
from tests.support.tolerances import assert_same_bits
from tests.support.triton.cases import (
    DEVICE,
    HAS_GPU,
    INTERPRETED,
    needs_triton,
    on_this_device,
    operators,
    words,
)
from tests.support.written_calls import options_of, rows_of, value_of
from tightrope import RopeSpec
from tightrope.activations import ACTS, RMS_NORM
from tightrope.backends.reference import compose
from tightrope.functional import rotate, write_kv
from tightrope.ops.schema import LOG, Options

__all__ = ["on_this_device"]

pytestmark = [needs_triton, pytest.mark.usefixtures("on_this_device")]

X = noise(2, 2, 3, 8, seed=1).float().to(DEVICE)
W = words(1, 1, 1, 4)


def tail(options: Options | None = None, *, offset: int = 3, primary: torch.Tensor = W) -> Any:
    """Return the arguments after q and k of a plain call."""
    return primary, None, None, offset, (options or Options()).pack(), 1.0


# --- memory ---------------------------------------------------------------------------------------


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """Return x [3, 1, 2, 8] as a view that spans more than 2^31 elements, but touches few pages."""
    memory = torch.empty(2, 2**30 + 64, dtype=x.dtype, device=DEVICE)
    view = torch.as_strided(memory, x.shape, (2**30 + 8, 8, 8, 1))
    return view.copy_(x)


def test_rows_further_apart_than_32_bits() -> None:
    """In and out, also those of a gate and of the input of an activation."""
    x = noise(3, 1, 2, 8, seed=1).bfloat16().to(DEVICE)
    (want,) = operators().rotate(x, None, *tail())
    assert_same_bits(operators().rotate(far_apart(x), None, *tail())[0], want)
    inside = far_apart(x)
    operators().rotate_(inside, None, *tail())
    assert_same_bits(inside, want)
    for options in (Options(gate=LOG), Options(act=1, direction=1)):
        (want,) = operators().rotate(x, None, *tail(options), [x])
        assert_same_bits(operators().rotate(x, None, *tail(options), [far_apart(x)])[0], want)
    _, want = operators().angle_gradients(x, None, x, None, *tail()[:5], False, True)
    _, got = operators().angle_gradients(x, None, far_apart(x), None, *tail()[:5], False, True)
    assert_same_bits(got, want)


@pytest.mark.parametrize("source", ANGLES)
def test_angles_in_the_memory_that_is_written(source: str) -> None:
    """Every program reads the old positions, tables or phases, also if an earlier one has rotated them."""
    assert_reads_before_it_writes(
        operators(), source, noise(2, 4, 40, 64, seed=1).float().to(DEVICE)
    )


@pytest.mark.parametrize("into", [False, True], ids=["in place", "out"])
def test_a_gate_in_the_memory_that_is_written(into: bool) -> None:
    """A gate that shares memory with the result is read before it is overwritten."""
    memory = noise(1, 2, 301, 8, seed=1).float().to(DEVICE) / 4
    given, x, gate = tail(Options(gate=LOG)), memory[:, :, 1:], memory[:, :, :-1]
    want = operators().rotate(x, None, *given, [gate.clone()])[0]
    if into:
        operators().rotate_into(x.clone(), None, x, None, *given, [gate])
    else:
        operators().rotate_(x, None, *given, [gate])
    assert_same_bits(x, want)


def test_overlapping_memory_is_refused() -> None:
    x = X.clone()
    # A plan that was found to be sound is for other distances between the same tensors.
    operators().rotate_into(x[:, :, :2], None, x.clone()[:, :, 1:], None, *tail())
    for _ in range(2):
        for xs in ((x[:1].expand(2, -1, -1, -1), None), (x, x)):
            with pytest.raises(RuntimeError, match="memory overlaps"):
                operators().rotate_(*xs, *tail())
        for given, out in ((x[:, :, :2], x[:, :, 1:]), (x, x.transpose(0, 1))):
            with pytest.raises(RuntimeError, match="memory overlaps"):
                operators().rotate_into(given, None, out, None, *tail())
    slots = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    own = (x, None, None, x, None, None, slots, None, None)
    with pytest.raises(RuntimeError, match="memory overlaps"):
        operators().rotate_slots_extras(*own, *tail(), [], 0.0)
    y, z = x.clone(), torch.empty_like(x)
    operators().rotate_into(y, None, y, None, *tail())  # each program reads before it writes
    operators().rotate_into(x, None, z, None, *tail())
    assert torch.equal(y, z)
    fused = noise(2, 3, 4, 8, seed=1).float().to(DEVICE).transpose(1, 2)
    operators().rotate_(fused[:, :2], fused[:, 2:], *tail())


def test_rows_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and indices equal Python's divmod, for rows of one token, of a tile and of more than 2^32 tokens."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    from tests.support.triton.rows import store_rows

    block = 64
    sizes = [1, 2, 3, 63, 64, 65, 127, 128, 1000, 2**31 - 1, 2**31, 2**31 + 7, 2**32 + 1, 2**40]
    cases = [
        (start // block * block, size)
        for size in sizes
        for start in (0, 64, size - 1, size, 5 * size + 70, 999 * size + 12_345)
    ]
    given = [torch.tensor(column, device=DEVICE) for column in zip(*cases)]
    rows, tokens = (torch.zeros(len(cases), block, dtype=torch.int64, device=DEVICE) for _ in "rt")
    # Without the option, Triton 3.9 warns that its default will change.
    store_rows[(len(cases),)](*given, rows, tokens, block, enable_fp_fusion=False)
    for (start, size), own, places in zip(cases, rows.tolist(), tokens.tolist(), strict=True):
        want = [divmod(start + i, size) for i in range(block)]
        assert list(zip(own, places, strict=True)) == want, (start, size)


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [0, LOG])
def test_several_tiles(gate: int) -> None:
    """Of keys, and of values wider than a program copies; tokens whose slots lie outside the cache go nowhere."""
    k, v = (noise(3, h, 19, d).float().to(DEVICE) for h, d in ((2, 64), (1, 1500)))
    cache, wide = (torch.zeros(7, h, 9, d, device=DEVICE) for h, d in ((2, 64), (1, 1500)))
    order = torch.randperm(63, generator=torch.Generator().manual_seed(0))
    order[:4] = torch.tensor([-2, 63, 99, -1])
    slots = order[:57].view(3, 19).to(DEVICE)
    inside, expected = (slots >= 0) & (slots < 63), (cache.clone(), wide.clone())
    extras = [noise(1, 2, 19, 1).float().to(DEVICE)] if gate else []
    arguments = *tail(Options(gate=gate), primary=words(1, 1, 1, 32)), extras, 0.0
    turned, at = operators().rotate(k, None, *arguments)[0], slots[inside]
    for x, to in zip((turned, v), expected, strict=True):
        to[at // 9, :, at % 9] = x.transpose(1, 2)[inside]
    operators().rotate_slots_extras(k, None, v, cache, None, wide, slots, None, None, *arguments)
    assert torch.equal(cache, expected[0])
    assert torch.equal(wide, expected[1])


@pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered"
)  # of numpy, in the interpreter
@pytest.mark.parametrize("placed", [False, True], ids=["contiguous", "slots"])
@pytest.mark.parametrize("to", LARGEST, ids=str)
def test_every_bfloat16_in_8_bits(to: torch.dtype, placed: bool) -> None:
    """As keys, in channels that do not rotate, and as values; each head has a scale of its own."""
    scales = torch.tensor([1.0, 0.37, 1e-6])
    x = torch.nn.functional.pad(EVERY.view(1, 1, 1024, 64), (0, 2)).expand(1, 3, -1, -1)
    want, x = codes(x, scales[:, None, None], to), x.contiguous().to(DEVICE)
    caches = [torch.zeros(x.shape, device=DEVICE).to(to) for _ in "kv"]
    slots, scale = torch.arange(1024).flip(0).to(DEVICE) if placed else None, scales.to(DEVICE)
    own = x, None, x, caches[0], None, caches[1], slots, scale, scale
    given = tail(Options(start=64), primary=W[..., :1])
    operators().rotate_slots_extras(*own, *given, [], 0.0)
    for found, width in zip(caches, (64, 66)):
        got = stored(found.cpu().flip(2) if placed else found.cpu())
        assert torch.equal(got[..., :width], want[..., :width])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rounding", ["once", "wide", "each"])
def test_where_8_bits_round(rounding: Any, interleaved: bool) -> None:
    """With "once" from float32, otherwise from the dtype of k, whose results the kernel also gives; q keeps its dtype."""
    q, k = (noise(2, 3, 7, 24, seed=seed).bfloat16().to(DEVICE) for seed in (1, 2))
    spec = RopeSpec(24, rotary_dim=16, start=4, interleaved=interleaved)
    rope, out = spec.at(3, device=DEVICE, rounding=rounding), torch.empty_like(q)
    cache = torch.zeros(k.shape, device=DEVICE).to(E4M3)
    write_kv(q, k, None, rope, cache=(cache, None), out=out, cache_scale=0.11)
    wide = k.float() if rounding == "once" else k
    assert torch.equal(stored(cache.cpu()), codes(rotate(wide, rope).cpu(), 0.11, E4M3))
    assert_same_bits(out, rotate(q, rope))


@pytest.mark.parametrize("qk", [False, True], ids=["k", "q and k"])
def test_a_cache_in_8_bits_is_written_by_the_kernel_alone(qk: bool) -> None:
    """Nothing is rotated to new memory, converted or copied by other operators."""
    k, (cache, values) = X.bfloat16(), torch.zeros(2, *X.shape, device=DEVICE).to(E4M3)
    q, scale = (k.clone() if qk else None), torch.ones(2, device=DEVICE)
    with Watcher() as watcher:
        where: Any = {"cache": (cache, values), "cache_scale": scale, "out": q}
        write_kv(q, k, k, RopeSpec(8).at(3, device=DEVICE), **where)
    made = [name for name in watcher.seen if "_to_copy" in name or "copy_" in name or "new" in name]
    assert [name for name in watcher.seen if "tightrope" in name] == [
        "tightrope.rotate_slots.extras"
    ]
    assert made == []


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_write(shape: tuple[int, int, int]) -> None:
    rows, heads, tokens = shape
    k, cache = torch.ones(*shape, 8, device=DEVICE), torch.zeros(2, heads, 3, 8, device=DEVICE)
    slots = torch.full((rows, tokens), -1, device=DEVICE)
    for values in ((None, None), (k, cache.clone())):
        own = (k, None, values[0], cache, None, values[1])
        operators().rotate_slots_extras(*own, slots, None, None, *tail(), [], 0.0)
    operators().rotate_slots_(cache[:0], slots, *tail(), [], 0.0)


# --- nothing to do, and what the definition does --------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (1, 1, 1, 8)])
def test_edge_shapes(shape: tuple[int, ...]) -> None:
    x, weight = noise(*shape, seed=1).float().to(DEVICE), torch.ones(1, 8, device=DEVICE)
    for options in (Options(), Options(gate=LOG)):
        extras = [torch.zeros(1, 1, 1, 1, device=DEVICE)] if options.gate else []
        (y,) = operators().rotate(x, None, *tail(options), extras)
        torch.testing.assert_close(y, compose(x, None, *tail(options), extras)[0])
    sums = operators().angle_gradients(x, None, x, None, *tail()[:5], True, True)
    assert [tuple(s.shape) for s in sums] == [(1, shape[0], shape[2]), (1, 1, 1, 4)]
    options = Options(act=RMS_NORM, direction=1)
    _, by_weight = operators().rotate(x, None, *tail(options), [weight, x], 1e-6)
    assert by_weight.shape == weight.shape
    assert by_weight.isfinite().all()


def test_calls_that_run_the_definition() -> None:
    """Without pairs, with too wide a head, with float64 and an act, and with more heads than a grid holds."""
    x = noise(1, 2, 3, 8, seed=1).to(DEVICE)
    assert torch.equal(operators().rotate(x, None, *tail(primary=W[..., :0]))[0], x)
    given = tail(Options(act=ACTS.index("silu")))
    want = compose(x, None, *given)[0]
    out, again = torch.empty_like(x), x.clone()
    operators().rotate_into(x, None, out, None, *given)
    operators().rotate_(again, None, *given)
    for found in (operators().rotate(x, None, *given)[0], out, again):
        assert torch.equal(found, want)
    broad = noise(1, 1, 2, 5000, seed=1).float().to(DEVICE)
    given = tail(primary=words(1, 1, 1, 2500))
    (found,) = operators().rotate(broad.requires_grad_(), None, *given)
    assert torch.equal(found, compose(broad, None, *given)[0])
    # A call may come without the dispatcher, and autograd is above it.
    assert not found.requires_grad
    many, gate = torch.ones(1, 65_536, 1, 2, device=DEVICE), torch.zeros(1, 65_536, 1, 1)
    plain = None, None, 0, Options(gate=LOG).pack()
    (found,) = operators().gate_gradients(many, None, many, None, gate.to(DEVICE), *plain)
    assert torch.equal(found.cpu(), gate + 2)


# --- refusals -------------------------------------------------------------------------------------

# A sound call of each operator, and rows that change some of its arguments: then they have a text.
ROWS = rows_of(Path(__file__).with_name("raw_refusals.jsonl"))
SOUND = {row["of"]: row for row in ROWS if "text" not in row}


@pytest.mark.parametrize("row", [row for row in ROWS if "text" in row], ids=lambda row: row["text"])
def test_a_wrong_direct_call_is_refused(row: dict[str, Any]) -> None:
    """Also a second time, when a plan could be kept."""
    of, *given = {**SOUND[row["of"]], **row, "text": None}.items()
    arguments = [
        options_of(one) if key == "options" else value_of(one, {})
        for key, one in given
        if key != "text"
    ]
    arguments = tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), arguments)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"tightrope: .*{row['text']}"):
            getattr(operators(), of[1])(*arguments)


@pytest.mark.skipif(HAS_GPU, reason="drawn calls are on the CPU")
@pytest.mark.parametrize("of", [rotation, angle_gradients, phases])
def test_freed_storage_is_refused(of: Callable[[Draw], Call]) -> None:
    """As FSDP frees that of parameters."""
    tried = 0
    for call in freed_storages(of, 40):
        with pytest.raises(RuntimeError, match="tensors must have their memory"):
            call()
        tried += 1
    assert tried > 5


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 5, 1), (2, 1, 5, 8), (1, 3, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_gates_have_the_strides_that_the_fake_kernel_promises(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Also if results and gradients are transposed."""
    from tightrope.ops import fake, gradients

    y, grad = (noise(2, 5, 3, 8, seed=i).to(DEVICE, dtype).transpose(1, 2) for i in (1, 2))
    gate = noise(*shape, seed=3).to(DEVICE, dtype)
    arguments = (y, None, grad, None, gate, None, None, 0, Options(gate=LOG).pack())
    promised = fake._gate_gradients(*arguments)[0]
    for kernel in (operators().gate_gradients, gradients.gate_gradients):
        (found,) = kernel(*arguments)
        assert (found.shape, found.stride(), found.dtype) == (
            promised.shape,
            promised.stride(),
            promised.dtype,
        )
