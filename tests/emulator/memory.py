"""Memory of an emulated grid: which bytes exist, who accessed them last, and what accesses must not do."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.parse import Fault

Array = npt.NDArray[Any]
Runs = tuple[Array, Array]  # first addresses, and the addresses after the last


class Warps:
    """The warp of each thread, the program of each warp, and how many barriers each program passed."""

    def __init__(self, programs: int, threads: int) -> None:
        self.of = np.arange(programs * threads) // 32
        self.program = np.arange(len(self.of) // 32) * 32 // threads
        self.passed = np.zeros(programs, "i8")


class Accesses:
    """The last accesses to each byte; two of different warps must have a barrier between them.

    Accesses of different programs have no order, so one of them must not be a store. A store of what
    is there already changes nothing, and is no race.
    """

    def __init__(self, size: int, warps: Warps) -> None:
        self.warps = warps
        self.writer, self.reader = np.full((2, size), -1, "i4")
        self.written, self.read = np.zeros((2, size), "i4")
        self.shared = np.zeros(
            size, "i1"
        )  # 1: several warps of a program read it, 2: several programs

    def note(self, at: Array, size: int, threads: Array, changed: Array | None) -> None:
        """Note accesses to `size` bytes from `at`; `changed` tells for each byte of a store if it changes."""
        places = at[:, None] + np.arange(size)
        warp = self.warps.of[threads][:, None]
        program = self.warps.program[warp]
        now = self.warps.passed[program]

        def races(last: Array, when: Array) -> Array:
            other = (last >= 0) & (last != warp)
            apart = self.warps.program[last] != program
            return other & (apart | (when == now))

        after_store = races(self.writer[places], self.written[places])
        reader, when = self.reader[places], self.read[places]
        after_load = races(reader, when)
        if changed is None:
            if after_store.any():
                raise Fault("race: a load of what another warp stores, without a barrier")
            apart = (reader >= 0) & (self.warps.program[reader] != program)
            several = after_load | ((when == now) & (self.shared[places] != 0))
            self.shared[places] = np.where(apart | (self.shared[places] == 2), 2, several)
            self.reader[places], self.read[places] = warp, now
            # Several warps may read a byte by one instruction; the last of them was noted.
            last = self.reader[places]
            if (other := last != warp).any():
                both = np.where(self.warps.program[last] == program, 1, 2)
                self.shared[places[other]] = np.maximum(self.shared[places], both)[other]
            return
        among = self.shared[places]
        after_load |= (reader >= 0) & ((among == 2) | ((among == 1) & (when == now)))
        if (after_load & changed).any():
            raise Fault("race: a store to what another warp loads, without a barrier")
        if (after_store & changed).any():
            raise Fault("race: a store to what another warp stores, without a barrier")
        self.writer[places], self.written[places] = warp, now


class Own:
    """Memory that threads have for themselves, or that those of a program share.

    Args:
        kind: its name: "local" or "shared".
        size: bytes of each owner.
        owner: the number of the owner of each thread.
        warps: the warps of the grid.
    """

    def __init__(self, kind: str, size: int, owner: Array, warps: Warps) -> None:
        self.kind, self.size, self.owner = kind, size, owner
        self.stride = -(-size // 16) * 16 + 16
        self.bytes = np.full((int(owner[-1]) + 1) * self.stride, 0xA5, "u1")
        self.accesses = Accesses(len(self.bytes), warps)

    def place(self, address: Array, threads: Array, size: int, text: str) -> Array:
        if (address % size).any():
            raise Fault(f"misaligned: {text}")
        if ((address < 0) | (address + size > self.size)).any():
            raise Fault(f"outside of {self.kind} memory: {text}")
        return address + self.owner[threads].astype("i8") * self.stride

    def load(self, address: Array, threads: Array, unit: int, count: int, text: str) -> list[Array]:
        at = self.place(address, threads, unit * count, text)
        self.accesses.note(at, unit * count, threads, None)
        words = self.bytes.view(f"u{unit}")
        return [words[at // unit + i] for i in range(count)]

    def store(self, address: Array, threads: Array, values: list[Array], text: str) -> None:
        unit = values[0].itemsize
        at = self.place(address, threads, unit * len(values), text)
        store(self.bytes.view(f"u{unit}"), at // unit, values, self.accesses, at, threads, text)


def store(
    words: Array,
    index: Array,
    values: list[Array],
    to: Accesses,
    at: Array,
    threads: Array,
    text: str,
) -> None:
    """Store words from an index on; several threads must not store different values to one place."""
    unit, count = values[0].itemsize, len(values)
    places = index[:, None] + np.arange(count)
    given = np.stack([np.broadcast_to(value, at.shape) for value in values], -1)
    changed = (words[places].view("u1") != given.view("u1")).reshape(len(at), unit * count)
    to.note(at, unit * count, threads, changed)
    words[places] = given
    if (words[places] != given).any():
        raise Fault(f"race: threads store different values to one place: {text}")


@functools.cache
def words_from(address: int, unit: int) -> Array:
    """Return all memory of this process from an address on, as words."""
    kind = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[unit]
    return np.ctypeslib.as_array((kind * ((1 << 47) // unit)).from_address(address))


class Global:
    """The memory of tensors, at their own addresses.

    Of accesses without a barrier between them only two stores are an error. Lanes beyond the last
    token of a tile load that token again, also where another warp stores its result; what they compute
    is stored nowhere. A random order of warps shows where such a load matters.

    Args:
        runs: addresses of bytes that kernels may access: those of the elements, not gaps between them.
        constants: constant arrays of the kernel, which it may only load.
        warps: the warps of the grid.
    """

    _START = 1 << 12  # numpy allocates memory for an array at address 0

    def __init__(self, runs: Iterable[Runs], constants: Iterable[Array], warps: Warps) -> None:
        read_only = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in constants]
        found = [*runs, *((np.array([a], "i8"), np.array([b], "i8")) for a, b in read_only)]
        self.starts, self.ends = _merged(found)
        sizes = self.ends - self.starts
        self.first = np.cumsum(sizes) - sizes  # of each run, among the bytes of all
        self.accesses = Accesses(int(sizes.sum()), warps)
        self.read_only = read_only

    def _place(self, address: Array, size: int, text: str) -> tuple[Array, Array]:
        if (address % size).any():
            raise Fault(f"misaligned: {text} at {int(address[address % size != 0][0]):#x}")
        run = np.searchsorted(self.starts, address, "right") - 1
        bad = (run < 0) | (address + size > self.ends[run]) if len(self.ends) else address >= 0
        if bad.any():
            raise Fault(f"out of bounds: {text} at {int(address[bad][0]):#x}")
        return address - self.starts[run] + self.first[run], address - self._START

    def load(self, address: Array, threads: Array, unit: int, count: int, text: str) -> list[Array]:
        del threads  # see above
        _, at = self._place(address.astype("i8"), unit * count, text)
        return [words_from(self._START, unit)[at // unit + i] for i in range(count)]

    def store(self, address: Array, threads: Array, values: list[Array], text: str) -> None:
        unit = values[0].itemsize
        place, at = self._place(address.astype("i8"), unit * len(values), text)
        for start, end in self.read_only:
            if ((address >= start) & (address < end)).any():
                raise Fault(f"a store to a constant: {text}")
        store(
            words_from(self._START, unit), at // unit, values, self.accesses, place, threads, text
        )


def runs_of(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], element: int) -> Runs:
    """Return the runs of bytes of a tensor's elements."""
    dims = [(step * element, size) for step, size in zip(strides, sizes, strict=True) if size != 1]
    if 0 in sizes:
        return np.empty(0, "i8"), np.empty(0, "i8")
    length = element
    rest = []
    for step, size in sorted(dims):
        if step == length and not rest:
            length *= size
        elif step:
            rest.append((step, size))
    starts = np.array([address], "i8")
    for step, size in rest:
        starts = (starts[:, None] + step * np.arange(size)).ravel()
    return starts, starts + length


def _merged(runs: Iterable[Runs]) -> Runs:
    """Return runs in order, without overlaps and none next to another."""
    pairs = [*runs, (np.empty(0, "i8"), np.empty(0, "i8"))]
    starts, ends = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    new = np.ones(len(starts), bool)
    new[1:] = starts[1:] > ends[:-1]
    first = np.nonzero(new)[0]
    return starts[first], ends[np.append(first[1:], len(ends)) - 1]
