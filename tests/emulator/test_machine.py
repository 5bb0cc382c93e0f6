"""The emulator's threads, warps and memory, and the faults that it must find."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.emulator.assembled import kernel, run
from tests.emulator.machine import Grid
from tests.emulator.memory import runs_of
from tests.emulator.parse import Fault, parse
from tests.support.helpers import refused
from tests.support.rows import read_rows

# %rd10 is the address of the thread's element of the first pointer, %rd11 of the second; %r5 is its index.
PLACES = """
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r5, %r1, %r3, %r0;
    mad.wide.u32 %rd10, %r5, 4, %rd0;
    mad.wide.u32 %rd11, %r5, 4, %rd1;
"""


def words(n: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n, dtype=torch.int32)


def result_of(body: str, threads: int = 32, programs: int = 1, **rest: Any) -> list[int]:
    """Return what threads leave in %r9, given the numbers from 100 on in %r8."""
    made = torch.zeros(threads * programs, dtype=torch.int32)
    body = f"{PLACES} ld.global.b32 %r8, [%rd10]; {body} st.global.b32 [%rd11], %r9;"
    given = words(threads * programs, 100)
    run(kernel(body, 2, threads), [given, made], (programs, 1, 1), **rest)
    return made.tolist()


# --- programs -------------------------------------------------------------------------------------

ROWS = read_rows(Path(__file__).with_name("programs.jsonl"))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_program(row: dict[str, Any]) -> None:
    """It leaves a number in each thread t, or has a fault; in any order of warps where there are several seeds."""
    sizes = row.get("threads", 32), row.get("programs", 1)
    for seed in row.get("seeds", [None]):
        call = partial(result_of, row["body"], *sizes, shared=row.get("shared", 0), seed=seed)
        if "fault" in row:
            with pytest.raises(Fault, match=f"^{row['fault']}"):
                call()
        else:
            assert call() == [eval(row["leaves"], {"t": t}) for t in range(math.prod(sizes))]


def test_every_thread_knows_its_place() -> None:
    made = torch.zeros(2 * 3 * 4 * 64, dtype=torch.int32)
    body = """
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %ctaid.z;
    mov.u32 %r4, %nctaid.x;
    mov.u32 %r5, %nctaid.y;
    mad.lo.s32 %r6, %r3, %r5, %r2;
    mad.lo.s32 %r6, %r6, %r4, %r1;
    mov.u32 %r7, %ntid.x;
    mad.lo.s32 %r6, %r6, %r7, %r0;
    mov.u32 %r8, %nctaid.z;
    mul.lo.s32 %r9, %r8, 1000;
    mov.u32 %r10, %laneid;
    add.s32 %r9, %r9, %r10;
    mad.wide.u32 %rd10, %r6, 4, %rd0;
    st.global.b32 [%rd10], %r9;
    """
    run(kernel(body, 1, 64), [made], (2, 3, 4))
    assert made.tolist() == [4000 + t % 32 for t in range(len(made))]


def test_a_kernel_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.emulator.machine._MOST_STEPS", 1000)
    with refused(Fault, "the kernel does not end"):
        result_of("AGAIN: bra.uni AGAIN;")


# --- warps ----------------------------------------------------------------------------------------


def shuffled(mode: str, b: int, c: int) -> tuple[list[int], list[int]]:
    """Return lane and predicate that each lane gets, by the description in the manual."""
    sources, valid = [], []
    for lane in range(32):
        segment, clamp = c >> 8 & 31, c & 31
        first = lane & segment
        j = lane ^ b if mode == "bfly" else first | (b & ~segment & 31)
        valid.append(int(j <= (first | (clamp & ~segment & 31))))
        sources.append(j if valid[-1] else lane)
    return sources, valid


@pytest.mark.parametrize("mode", ["bfly", "idx"])
@pytest.mark.parametrize("b, c", [(1, 31), (16, 31), (3, 0x1807), (5, 0x101F), (2, 0), (31, 31)])
def test_lanes_exchange_values(mode: str, b: int, c: int) -> None:
    body = f"shfl.sync.{mode}.b32 %r9|%p1, %r8, {b}, {c}, -1; @!%p1 add.s32 %r9, %r9, 5000;"
    sources, valid = shuffled(mode, b, c)
    warp = [100 + j + (0 if ok else 5000) for j, ok in zip(sources, valid)]
    assert result_of(body, 64) == warp + [x + 32 for x in warp]


@pytest.mark.parametrize("count, shared", [(1, "shared"), (2, "shared::cta"), (4, "shared")])
def test_matrices_go_through_shared_memory(count: int, shared: str) -> None:
    """A lane has elements 2 (l % 4) and the next of row l / 4 of each matrix."""
    registers = ", ".join(f"%r{20 + i}" for i in range(count))
    suffix = f"x{count}.{shared}.b16"
    rows = "and.b32 %r10, %r0, 31; mul.lo.s32 %r11, %r10, 16;"
    # Element e of row r of matrix m is 64 m + 8 r + e.
    fill = " ".join(
        f"mad.lo.s32 %r12, %r10, 8, {e}; cvt.u16.u32 %rs1, %r12; st.shared.b16 [%r11+{2 * e}], %rs1;"
        for e in range(8)
    )
    stored = "\n".join(f"st.global.b32 [%rd20+{4 * i}], %r{20 + i};" for i in range(count))
    body = f"""{rows} {fill} bar.sync 0;
    ldmatrix.sync.aligned.m8n8.{suffix} {{{registers}}}, [%r11];
    mad.wide.u32 %rd20, %r0, {4 * count}, %rd0; {stored}"""
    made = torch.zeros(32, count, 2, dtype=torch.int16)
    run(kernel(body, 1), [made], shared=512)
    for lane in range(32):
        for m in range(count):
            for j in range(2):
                row, column = lane // 4, 2 * (lane % 4) + j
                assert made[lane, m, j] == 64 * m + 8 * row + column
    # And back: what stmatrix stores, ldmatrix of the same kind loads.
    body += f"""bar.sync 0;
    stmatrix.sync.aligned.m8n8.{suffix} [%r11], {{{registers}}}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.{suffix} {{{registers}}}, [%r11]; {stored}"""
    again = torch.zeros_like(made)
    run(kernel(body, 1), [again], shared=512)
    assert torch.equal(again, made)


# --- memory ---------------------------------------------------------------------------------------


def test_vectors_are_loaded_and_stored() -> None:
    given, made = words(256), torch.zeros(256, dtype=torch.int32)
    body = """
    mad.wide.u32 %rd10, %r0, 32, %rd0;
    mad.wide.u32 %rd11, %r0, 32, %rd1;
    ld.global.L1::evict_last.v4.b32 {%r10, %r11, %r12, %r13}, [%rd10];
    ld.global.nc.v2.b64 {%rd12, %rd13}, [%rd10+16];
    st.global.v4.b32 [%rd11+16], {%r13, %r12, %r11, %r10};
    st.global.v2.b64 [%rd11+0], {%rd12, %rd13};
    """
    run(kernel(body, 2), [given, made])
    want = given.reshape(32, 2, 4)
    assert torch.equal(made.reshape(32, 2, 4), torch.stack((want[:, 1], want[:, 0].flip(-1)), 1))


def test_small_numbers_are_extended() -> None:
    given = torch.arange(-16, 16, dtype=torch.int8)
    for kind, want in (("s8", given.int()), ("u8", given.int() % 256), ("b8", given.int() % 256)):
        made = torch.zeros(32, dtype=torch.int32)
        body = f"""
        cvt.u64.u32 %rd9, %r0; add.s64 %rd10, %rd0, %rd9; mad.wide.u32 %rd11, %r0, 4, %rd1;
        ld.global.{kind} %r9, [%rd10]; st.global.b32 [%rd11], %r9;"""
        run(kernel(body, 2), [given, made])
        assert torch.equal(made, want)


def test_constants_are_read_and_not_written() -> None:
    head = ".global .align 4 .b8 table[8] = {1, 2, 0, 0, 3, 0, 0, 0};"
    made = torch.zeros(32, dtype=torch.int32)
    body = """and.b32 %r5, %r0, 1; mov.b64 %rd3, table; mad.wide.u32 %rd4, %r5, 4, %rd3;
    ld.global.b32 %r9, [%rd4]; mad.wide.u32 %rd5, %r0, 4, %rd0; st.global.b32 [%rd5], %r9;"""
    run(kernel(body, 1, head=head), [made])
    assert made.tolist() == [513, 3] * 16
    with pytest.raises(Fault, match=r"^a store to a constant"):
        run(kernel(f"{body} st.global.b32 [%rd4], %r9;", 1, head=head), [made])


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).T,
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(5, 4)[1:4, 1:3],
        torch.zeros(4, 1).expand(4, 5),
        torch.zeros(2, 3, 4).transpose(0, 1),
        torch.zeros(3, 0),
        torch.zeros(()),
    ],
    ids=str,
)
def test_the_bytes_of_a_tensor(x: torch.Tensor) -> None:
    base = x.untyped_storage().data_ptr()
    elements = torch.arange(x.untyped_storage().nbytes() // 4).as_strided(
        x.size(), x.stride(), x.storage_offset()
    )
    want = {4 * int(e) + i for e in elements.flatten() for i in range(4)}
    starts, ends = runs_of(x.data_ptr() - base, x.shape, x.stride(), 4)
    found = [byte for start, end in zip(starts, ends) for byte in range(start, end)]
    assert set(found) == want


# --- faults ---------------------------------------------------------------------------------------


def copy(body: str, elements: int = 100, given: torch.Tensor | None = None) -> torch.Tensor:
    """Run a kernel that copies 100 numbers, by 128 threads."""
    made = torch.zeros(elements, dtype=torch.int32)
    run(kernel(body, 2, 128), [words(100) if given is None else given, made])
    return made


COPY = f"""{PLACES} setp.lt.u32 %p1, %r5, 100;
    @%p1 ld.global.b32 %r8, [%rd10];
    @%p1 st.global.b32 [%rd11], %r8;"""


def test_a_copy_has_no_fault() -> None:
    assert torch.equal(copy(COPY), words(100))


def test_what_no_thread_loads_may_be_read() -> None:
    """A value that is unknown in every thread is no fault: compilers combine it and store other threads' results."""
    unknown = "setp.lt.u32 %p2, %r5, 0; @%p2 ld.global.b32 %r9, [%rd10]; mov.b32 %r12, %r9;"
    assert torch.equal(copy(f"{COPY} {unknown}"), words(100))


@pytest.mark.parametrize(
    "right, wrong, text",
    [
        ("@%p1 ld", "ld", r"out of bounds: ld\.global\.b32"),
        ("@%p1 st", "st", r"out of bounds: st\.global\.b32"),
        ("%r5, 100", "%r5, 101", "out of bounds"),
        ("%rd10, %r5, 4", "%rd10, %r5, 8", "out of bounds"),
        ("[%rd10]", "[%rd10+-1099511627776]", "out of bounds"),
    ],
    ids=["no mask, load", "no mask, store", "one too many", "a wrong stride", "before all tensors"],
)
def test_an_access_out_of_bounds(right: str, wrong: str, text: str) -> None:
    with pytest.raises(Fault, match=f"^{text}"):
        copy(COPY.replace(right, wrong))


def test_a_load_between_the_elements() -> None:
    wider = words(200)[::2]
    with pytest.raises(Fault, match=r"^out of bounds"):
        copy(COPY, given=wider)
    assert torch.equal(copy(COPY.replace("%rd10, %r5, 4", "%rd10, %r5, 8"), given=wider), wider)


@pytest.mark.parametrize("by", [4, 8, 12])
def test_a_misaligned_vector(by: int) -> None:
    body = f"""{PLACES} setp.lt.u32 %p1, %r5, 20; mad.wide.u32 %rd10, %r5, 16, %rd0;
    @%p1 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd10+{{}}];"""
    at = words(1).new_zeros(104)
    start = -(at.data_ptr() // 4) % 4
    aligned = at[start : start + 100]
    copy(body.replace("{}", "0"), given=aligned)
    with pytest.raises(Fault, match=r"^misaligned: @%p1 ld\.global\.v4\.b32"):
        copy(body.replace("{}", str(by)), given=aligned)


def test_programs_have_no_order() -> None:
    """Two programs store different values to one place, also if one of them passes a barrier before; the same are no race."""
    body = "ld.param.b64 %rd5, [made_param_0]; {} mov.b32 %r5, {}; st.global.b32 [%rd5], %r5;"
    barrier = "setp.eq.s32 %p1, %r1, 0; @%p1 bra STORE; bar.sync 0; STORE:"
    for seed, first in itertools.product((None, 1), ("", barrier)):
        run(kernel(body.format(first, "7"), 1), [words(1)], (2, 1, 1), seed=seed)
        with pytest.raises(Fault, match=r"^race: "):
            run(kernel(body.format(first, "%r1"), 1), [words(1)], (2, 1, 1), seed=seed)


def test_what_cannot_be_read_is_an_error() -> None:
    with pytest.raises(Fault, match=r"^cannot read '\?"):
        parse(kernel("?", 1))
    with pytest.raises(Fault, match=r"^cannot read the operands of"):
        parse(kernel("add.s32 %r1, {%r2;", 1))
    with pytest.raises(Fault, match=r"^there must be one kernel"):
        parse(kernel("", 1) + kernel("", 1))


def test_instructions_are_counted() -> None:
    made = words(64)
    grid: Grid = run(kernel("mov.b32 %r9, 0;", 1, 64), [made])
    assert grid.executed == 5
