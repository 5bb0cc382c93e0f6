"""The same row gives the same bits, whatever surrounds it and however it is computed.

tests/kernel/cpu/test_instruction_sets.py runs this file again with each instruction set that is not in use here.
"""

import itertools
import multiprocessing
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support import oracle
from tests.support.helpers import in_threads, noise, on
from tests.support.matrix import DTYPES, both_pairings, every_backend, every_dtype, every_way
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.backends import use
from tightrope.functional import rotate, rotate_
from tightrope.ops.schema import Options

# Every remainder modulo 4, 8 and 16 (the numbers of pairs in a SIMD vector), with and without full vectors.
PAIRS = [*range(1, 36), 48, 50, 63, 64, 125]


def cancelling(x: torch.Tensor, spec: RopeSpec, offset: int) -> torch.Tensor:
    """Return x [.., tokens, channels], changed so that rotation makes one channel of most pairs nearly 0.

    The small result of the cancellation reveals every intermediate rounding, also in 16-bit types,
    where the final rounding would hide nearly all of them.
    """
    first, second = oracle.channels(spec.rotary_dim, spec.start, spec.interleaved)
    ids = range(offset, offset + x.shape[-2])
    cos, sin = oracle.cos_sin(ids, oracle.frequencies(spec.base, spec.rotary_dim))
    ratio = (cos / sin)[0]
    ratio[1::2] = (-sin / cos)[0, 1::2]
    calm = ratio.abs() < 8
    u, v = x[..., first].double(), x[..., second].double()
    result = x.clone()
    result[..., second] = torch.where(calm, u * torch.where(calm, ratio, 0.0), v).to(x.dtype)
    return result


# --- threads and processes ------------------------------------------------------------------------


@every_backend
@both_pairings
def test_concurrent_callers(interleaved: bool, backend: str) -> None:
    """Threads that share a spec and rotate at the same time, each its own x, do not interfere."""
    spec = RopeSpec(66, interleaved=interleaved)
    rotation = spec.at(4000)

    def job(x: torch.Tensor, wanted: torch.Tensor) -> None:
        for _ in range(12):
            assert_same_bits(rotate(x, rotation), wanted)
            assert_same_bits(rotate_(x.clone(), spec, 4000), wanted)

    xs = [noise(1, 4, 300, 66, dtype=dtype, seed=n) for n, dtype in enumerate(DTYPES)]
    with use(backend):  # for all threads
        in_threads(*(partial(job, x, rotate(x, spec, 4000)) for x in xs))


class Rotated(Dataset[torch.Tensor]):
    """A dataset that rotates each item in the process that reads it."""

    spec = RopeSpec(64)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        x = noise(2, 3, 129, 64, dtype=torch.bfloat16, seed=index)
        return rotate(x, self.spec, 1000 * index)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_data_loader_workers(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this platform cannot {method} processes")
    data = Rotated()
    wanted = [data[index] for index in range(len(data))]  # starts torch's threads before the fork
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=method)
    assert_same_bits(list(loader), wanted)


# --- neighbours -----------------------------------------------------------------------------------


@every_way
def test_rows_and_heads_alone_or_in_a_batch(
    interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    """A row of NaN, at infinite positions, changes nothing in the other rows either."""
    spec = RopeSpec(74, interleaved=interleaved)
    turn = partial(on, backend, rotate, rope=spec)
    x = noise(5, 3, 21, 74, dtype=dtype)
    offsets = torch.tensor([0, 8191, -7, 2**31 - 30, 131072])
    ids = offsets[:, None] + torch.arange(21)
    wanted = turn(x, positions=positions.per_row(offsets))
    assert_same_bits(turn(x, positions=ids), wanted)
    for row, head in itertools.product(range(5), range(3)):
        for where in (int(offsets[row]), ids[row]):
            alone = turn(x[row : row + 1, head : head + 1], positions=where)
            assert_same_bits(alone[0, 0], wanted[row, head])
    order = torch.tensor([3, 0, 4])
    assert_same_bits(turn(x[order], positions=ids[order]), wanted[order])
    sick, lost, others = x.clone(), ids.double(), [0, 2, 3, 4]
    sick[1], lost[1] = torch.nan, torch.inf
    assert_same_bits(turn(sick, positions=lost)[others], wanted[others])


@every_way
@pytest.mark.parametrize("offset", [0, 8180, 2**20 - 9])
def test_token_by_token_or_all_at_once(
    offset: int, interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    """Decoding, prefill, and chunks of several sizes in between give the same bits."""
    spec, x = RopeSpec(42, interleaved=interleaved), noise(2, 3, 45, 42, dtype=dtype)
    prefill = on(backend, rotate, x, spec, offset)
    for size in (1, 2, 7, 16, 17, 44):
        chunks = [
            on(backend, rotate, x[:, :, t : t + size], spec, offset + t) for t in range(0, 45, size)
        ]
        assert_same_bits(torch.cat(chunks, 2), prefill)
    decoded = x.clone()
    for t in range(45):
        where = positions.per_row(torch.full((2,), offset + t))
        on(backend, rotate_, decoded[:, :, t : t + 1], spec, where)
    assert_same_bits(decoded, prefill)


# --- memory ---------------------------------------------------------------------------------------


@every_way
def test_any_strides(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """Any order of dimensions in memory, inner strides of 1 and 2, and rows with several alignments."""
    rows, heads, tokens, width = 2, 3, 18, 36
    spec = RopeSpec(width, rotary_dim=34, start=1, interleaved=interleaved)
    x = cancelling(noise(rows, heads, tokens, width, dtype=dtype), spec, 131072)
    wanted = on(backend, rotate, x, spec, 131072)
    views = []
    for order, step in itertools.product(itertools.permutations(range(4)), (1, 2)):
        sizes = *(x.shape[dim] for dim in order[:3]), x.shape[order[3]] * step
        memory = torch.zeros(sizes, dtype=dtype)
        views.append(memory[..., ::step].permute([order.index(dim) for dim in range(4)]))
    wide = noise(rows, heads, tokens, 3 * width, dtype=dtype)
    views += [wide[..., shift : shift + width] for shift in (0, 1, 3)]
    for view in views:
        view.copy_(x)
        assert_same_bits(on(backend, rotate, view, spec, 131072), wanted)
        assert_same_bits(on(backend, rotate_, view, spec, 131072), wanted)
    same = x[:1, :1].expand(rows, heads, tokens, width)  # read only, so it may overlap itself
    repeated = on(backend, rotate, same, spec, 131072)
    assert_same_bits(repeated, wanted[:1, :1].expand(rows, heads, tokens, width))


# --- vector body and tail -------------------------------------------------------------------------


@every_dtype
@both_pairings
def test_a_pair_alone_or_in_a_vector(interleaved: bool, dtype: torch.dtype) -> None:
    """Pair k of a head of any width equals the same pair computed alone, out of place and in place."""
    options = Options(layout=4, interleaved=interleaved).pack()
    for pairs in PAIRS:
        spec = RopeSpec(2 * pairs, interleaved=interleaved)
        words = spec.at().angles.words
        x = cancelling(noise(1, 18, 2 * pairs, dtype=dtype, seed=pairs), spec, 8185)
        y = rotate(x, spec, 8185, layout="bsd")
        assert_same_bits(rotate_(x.clone(), spec, 8185, layout="bsd"), y)
        for pair in range(pairs):
            at = [2 * pair, 2 * pair + 1] if interleaved else [pair, pair + pairs]
            call = words[..., pair : pair + 1].contiguous(), None, None, 8185, options, 1.0
            (single,) = torch.ops.tightrope.rotate(x[..., at].contiguous(), None, *call)
            assert_same_bits(y[..., at], single)


@every_dtype
@both_pairings
def test_any_start_of_the_slice(interleaved: bool, dtype: torch.dtype) -> None:
    """The start of the slice changes the alignment and nothing else."""
    for rotary_dim in (2, 16, 34, 62):
        plain = RopeSpec(rotary_dim, interleaved=interleaved)
        inner = cancelling(noise(2, 19, rotary_dim, dtype=dtype), plain, 5)
        wanted = rotate(inner, plain, 5, layout="bsd")
        for start in range(9):
            spec = RopeSpec(80, rotary_dim=rotary_dim, start=start, interleaved=interleaved)
            x, part = noise(2, 19, 80, dtype=dtype), slice(start, start + rotary_dim)
            x[..., part] = inner
            assert_same_bits(rotate(x, spec, 5, layout="bsd")[..., part], wanted)
