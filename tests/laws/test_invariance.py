"""The same row gives the same bits, whatever surrounds it and however it is computed.

tests/kernel/cpu/test_instruction_sets.py runs this file again with each instruction set that is not in use here.
"""

import itertools
import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support import oracle
from tests.support.helpers import noise
from tests.support.matrix import DTYPES, both_pairings, every_backend, every_dtype, every_way
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, positions
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
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


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@every_way
def test_any_number_of_threads(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """1 to 4 threads give the same bits. x is large enough for four threads."""
    spec = RopeSpec(98, rotary_dim=90, start=2, interleaved=interleaved)
    x = noise(2, 6, 667, 98, dtype=dtype)
    ids = torch.randint(-(2**31), 2**31, (2, 667), generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(1)
    wanted, wanted_by_ids = (rotate(x, spec, where, backend=backend) for where in (131072, ids))
    for threads in (2, 4, 3):
        torch.set_num_threads(threads)
        assert_same_bits(rotate(x, spec, 131072, backend=backend), wanted)
        assert_same_bits(rotate(x, spec, ids, backend=backend), wanted_by_ids)
        assert_same_bits(rotate_(x.clone(), spec, 131072, backend=backend), wanted)


@every_dtype
@every_backend
def test_gradients_with_any_number_of_threads(backend: str, dtype: torch.dtype) -> None:
    """Gradients of x and of fractional positions have the same bits for any number of threads.

    Those of positions are sums, whose order must not depend on the number of threads.
    """
    spec = RopeSpec(64)
    x = noise(1, 6, 667, 64, dtype=dtype).requires_grad_()
    cotangent = noise(1, 6, 667, 64, dtype=dtype, seed=1)
    for shape in ((667,), (1,)):
        ids = noise(*shape, dtype=torch.float64, seed=2).requires_grad_()
        where = ids * 1000 if shape == (667,) else positions.per_row(ids * 1000)
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            y = rotate(x, spec, where, backend=backend)
            results.append(torch.autograd.grad(y, (x, ids), cotangent, retain_graph=True))
        for found in results[1:]:
            assert_same_bits(found, results[0])


@every_backend
@both_pairings
def test_concurrent_callers(interleaved: bool, backend: str) -> None:
    """Threads that share a spec and rotate at the same time, each its own x, do not interfere."""
    spec = RopeSpec(66, interleaved=interleaved)
    rotation = spec.at(4000)
    xs = [noise(1, 4, 300, 66, dtype=dtype, seed=n) for n, dtype in enumerate(DTYPES)]
    wanted = [rotate(x, spec, 4000, backend=backend) for x in xs]
    start = threading.Barrier(len(xs))
    wrong: list[int] = []

    def work(n: int) -> None:
        start.wait()
        for _ in range(12):
            for y in (
                rotate(xs[n], rotation, backend=backend),
                rotate_(xs[n].clone(), spec, 4000, backend=backend),
            ):
                if not torch.equal(y, wanted[n]):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- neighbours -----------------------------------------------------------------------------------


@every_way
def test_a_row_alone_or_in_a_batch(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    spec = RopeSpec(74, interleaved=interleaved)
    x = noise(5, 3, 21, 74, dtype=dtype)
    offsets = torch.tensor([0, 8191, -7, 2**31 - 30, 131072])
    wanted = rotate(x, spec, positions.per_row(offsets), backend=backend)
    ids = offsets[:, None] + torch.arange(21)
    assert_same_bits(rotate(x, spec, ids, backend=backend), wanted)
    for row in range(5):
        alone = rotate(x[row : row + 1], spec, int(offsets[row]), backend=backend)
        assert_same_bits(alone[0], wanted[row])
        by_ids = rotate(x[row : row + 1], spec, ids[row], backend=backend)
        assert_same_bits(by_ids[0], wanted[row])
    order = torch.tensor([3, 0, 4])
    some = rotate(x[order], spec, ids[order], backend=backend)
    assert_same_bits(some, wanted[order])
    # A row of NaN, at infinite positions, changes nothing in the other rows.
    sick = x.clone()
    sick[1] = torch.nan
    where = ids.double()
    where[1] = torch.inf
    assert_same_bits(rotate(sick, spec, where, backend=backend)[[0, 2, 3, 4]], wanted[[0, 2, 3, 4]])


@every_way
@pytest.mark.parametrize("offset", [0, 8180, 2**20 - 9])
def test_token_by_token_or_all_at_once(
    offset: int, interleaved: bool, backend: str, dtype: torch.dtype
) -> None:
    """Decoding, prefill, and chunks of several sizes in between give the same bits."""
    spec = RopeSpec(42, interleaved=interleaved)
    x = noise(2, 3, 45, 42, dtype=dtype)
    prefill = rotate(x, spec, offset, backend=backend)
    for size in (1, 2, 7, 16, 17, 44):
        chunks = [
            rotate(x[:, :, t : t + size], spec, offset + t, backend=backend)
            for t in range(0, 45, size)
        ]
        assert_same_bits(torch.cat(chunks, 2), prefill)
    decoded = x.clone()
    for t in range(45):
        where = positions.per_row(torch.full((2,), offset + t))
        rotate_(decoded[:, :, t : t + 1], spec, where, backend=backend)
    assert_same_bits(decoded, prefill)


@every_way
def test_heads_alone_or_together(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    spec = RopeSpec(26, interleaved=interleaved)
    x = noise(2, 5, 19, 26, dtype=dtype)
    wanted = rotate(x, spec, 99, backend=backend)
    for head in range(5):
        one = rotate(x[:, head : head + 1], spec, 99, backend=backend)
        assert_same_bits(one, wanted[:, head : head + 1])


@every_way
def test_q_alone_or_with_k(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    spec = RopeSpec(58, interleaved=interleaved)
    fused = noise(2, 37, 4 + 2 + 2, 58, dtype=dtype)
    q, k = fused[:, :, :4], fused[:, :, 4:6]
    call = {"layout": "bshd", "backend": backend}
    wanted = [rotate(x, spec, 5, **call) for x in (q, k)]
    copy = q.clone()
    for alone in (rotate_qk(q, None, spec, 5, **call), rotate_qk_(copy, None, spec, 5, **call)):
        assert alone[1] is None
        assert_same_bits(alone[0], wanted[0])
    assert alone[0] is copy
    for pair in (
        rotate_qk(q, k, spec, 5, **call),
        rotate_qk(k, q, spec, 5, **call)[::-1],
        rotate_qk_(q.clone(), k.clone(), spec, 5, **call),
    ):
        assert_same_bits(pair, wanted)
    pair = rotate_qk_(q, k, spec, 5, **call)
    assert pair[0] is q
    assert pair[1] is k
    assert_same_bits(pair, wanted)


# --- memory ---------------------------------------------------------------------------------------


@every_way
def test_any_strides(interleaved: bool, backend: str, dtype: torch.dtype) -> None:
    """Any order of dimensions in memory, with an inner stride of 1 or 2, gives the same bits."""
    rows, heads, tokens, width = 2, 3, 18, 36
    spec = RopeSpec(width, rotary_dim=34, start=1, interleaved=interleaved)
    x = cancelling(noise(rows, heads, tokens, width, dtype=dtype), spec, 131072)
    wanted = rotate(x, spec, 131072, backend=backend)
    for order in itertools.permutations(range(4)):
        back = [order.index(dim) for dim in range(4)]
        for step in (1, 2):
            memory = torch.zeros(*(x.shape[dim] for dim in order[:3]), x.shape[order[3]] * step)
            view = memory.to(dtype)[..., ::step].permute(back)
            view.copy_(x)
            assert_same_bits(rotate(view, spec, 131072, backend=backend), wanted)
            assert_same_bits(rotate_(view, spec, 131072, backend=backend), wanted)
    wide = noise(rows, heads, tokens, 3 * width, dtype=dtype)
    for shift in (0, 1, 3):  # rows with several alignments
        view = wide[..., shift : shift + width]
        view.copy_(x)
        assert_same_bits(rotate(view, spec, 131072, backend=backend), wanted)
        assert_same_bits(rotate_(view, spec, 131072, backend=backend), wanted)
    same = x[:1, :1].expand(rows, heads, tokens, width)  # read only, so it may overlap itself
    repeated = rotate(same, spec, 131072, backend=backend)
    assert_same_bits(repeated, wanted[:1, :1].expand(rows, heads, tokens, width))


# --- vector body and tail -------------------------------------------------------------------------


def alone(
    x: torch.Tensor, words: torch.Tensor, pair: int, pairs: int, interleaved: bool, offset: int
) -> torch.Tensor:
    """Rotate one pair of x [rows, tokens, 2 · pairs] alone; return it as [rows, tokens, 2]."""
    at = [2 * pair, 2 * pair + 1] if interleaved else [pair, pair + pairs]
    word = words[..., pair : pair + 1].contiguous()
    options = Options(layout=4, interleaved=interleaved).pack()
    rest = (word, None, None, offset, options, 1.0)
    return torch.ops.tightrope.rotate(x[..., at].contiguous(), None, *rest)[0]


@every_dtype
@both_pairings
def test_a_pair_alone_or_in_a_vector(interleaved: bool, dtype: torch.dtype) -> None:
    """Pair k of a head of any width equals the same pair computed alone, on the default backend, out of
    place and in place."""
    for pairs in PAIRS:
        spec = RopeSpec(2 * pairs, interleaved=interleaved)
        words = spec.at().angles.words
        x = cancelling(noise(1, 18, 2 * pairs, dtype=dtype, seed=pairs), spec, 8185)
        y = rotate(x, spec, 8185, layout="bsd")
        z = rotate_(x.clone(), spec, 8185, layout="bsd")
        assert_same_bits(z, y)
        for pair in range(pairs):
            at = [2 * pair, 2 * pair + 1] if interleaved else [pair, pair + pairs]
            single = alone(x, words, pair, pairs, interleaved, 8185)
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
            x = noise(2, 19, 80, dtype=dtype)
            x[..., start : start + rotary_dim] = inner
            y = rotate(x, spec, 5, layout="bsd")
            assert_same_bits(y[..., start : start + rotary_dim], wanted)


# --- processes ------------------------------------------------------------------------------------


class Rotated(Dataset[torch.Tensor]):
    """A dataset that rotates each item in the process that reads it."""

    def __init__(self, spec: RopeSpec) -> None:
        self.spec = spec

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
    spec = RopeSpec(64)
    data = Rotated(spec)
    wanted = [data[index] for index in range(len(data))]  # starts torch's threads before the fork
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=method)
    got = list(loader)
    assert len(got) == len(wanted)
    assert_same_bits(got, wanted)
