"""Run the threads of a grid: registers, branches, barriers, and what the threads of a warp exchange.

All threads that are at the same instruction execute it together. Without a seed all warps run
together; with one, random sets of warps run in random order from barrier to barrier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.emulator.instructions import Meaning, meaning_of
from tests.emulator.memory import Global, Own, Runs, Warps
from tests.emulator.parse import Fault, Instruction, Kernel
from tests.emulator.values import BITS, Array, read, write

At = Any  # of an array of registers: an array of threads, or a slice of all
Read = Callable[["Grid", At], Array]
Step = Callable[["Grid", At], None]

_ACCESS = re.compile(
    r"(ld|st)\.(global|shared|local|param)(?:::cta)?(?:\.(?:nc|L[12]::\w+(?:::\w+)*))*"
    r"(?:\.v([24]))?\.([sub](?:8|16|32|64)|f32|f64)"
)
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_MATRIX = re.compile(r"(ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.x[124]\.shared(?:::cta)?\.b16")
_MOST_STEPS = 20_000_000


class Control(NamedTuple):
    """An instruction that changes what a thread executes next: "branch", "exit", "barrier" or "warp"."""

    kind: str
    target: int = 0


class Program:
    """A kernel whose instructions are functions."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.steps: list[tuple[str, bool, Control | None, Step, bool]] = []
        for one in kernel.code:
            try:
                control, step, whole = _decoded(one, kernel)
            except Fault as fault:
                raise Fault(f"{fault} ({one.text})") from None
            self.steps.append((one.guard, one.negated, control, step, whole))


class Grid:
    """One launch of a kernel.

    Attributes:
        registers: the bits of each register in all threads.
        executed: number of instructions that were executed, each once for all threads that did so together.
    """

    def __init__(
        self,
        program: Program,
        size: Sequence[int],
        values: Sequence[bytes],
        shared: int,
        runs: Iterable[Runs],
        seed: int | None = None,
    ) -> None:
        """Prepare a launch.

        Args:
            size: number of programs in three dimensions.
            values: the bytes of each parameter.
            shared: bytes of the shared memory of a program.
            runs: see :class:`Global`.
            seed: of the order of warps.
        """
        kernel = program.kernel
        self.program, self.kernel, self.threads = program, kernel, kernel.threads
        count = size[0] * size[1] * size[2]
        if kernel.threads % 32:
            raise Fault("a program must have whole warps")
        self.size = count * kernel.threads
        thread = np.arange(self.size, dtype="u4")
        self.of_program = thread // kernel.threads
        self.warps = Warps(count, kernel.threads)
        x, y = size[0], size[1]
        self.special: dict[str, Array] = {
            "%tid.x": thread % kernel.threads,
            "%laneid": thread % 32,
            "%ctaid.x": self.of_program % x,
            "%ctaid.y": self.of_program // x % y,
            "%ctaid.z": self.of_program // (x * y),
        }
        sizes = {
            "%ntid.x": kernel.threads,
            **dict(zip(("%nctaid.x", "%nctaid.y", "%nctaid.z"), size)),
        }
        self.special |= {name: np.full(self.size, n, "u4") for name, n in sizes.items()}
        self.registers: dict[str, Array] = {}
        self.carry = np.zeros(self.size, bool)
        self.parameters = dict(zip((name for name, _ in kernel.parameters), values, strict=True))
        self.shared = Own("shared", shared, self.of_program, self.warps)
        self.local = Own("local", sum(kernel.local.values()), thread, self.warps)
        self.memory = Global(runs, kernel.constants.values(), self.warps)
        self.random = None if seed is None else np.random.default_rng(seed)
        self.every = np.arange(self.size)
        self.executed = 0

    # --- threads ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all threads to their ends."""
        self.next = np.zeros(self.size, "i8")
        self.waiting = np.zeros(self.size, bool)
        ready = np.ones(self.size, bool)
        with np.errstate(all="ignore"):
            while ready.any():
                chosen = self._chosen(ready)
                ready &= ~chosen
                self._run_to_barriers(np.nonzero(chosen)[0])
                for one in np.unique(self.of_program[self.waiting]):
                    threads = slice(int(one) * self.threads, (int(one) + 1) * self.threads)
                    if self.waiting[threads].all():
                        if np.ptp(self.next[threads]):
                            raise Fault("the warps of a program wait at different barriers")
                        self.waiting[threads], ready[threads] = False, True
                        self.warps.passed[one] += 1
        if self.waiting.any():
            raise Fault("some warps of a program never come to a barrier")

    def _chosen(self, ready: Array) -> Array:
        """Return the threads that run next: all that are ready, or those of random warps."""
        if self.random is None:
            return ready.copy()
        warps = np.unique(self.warps.of[ready])
        some = warps[self.random.random(len(warps)) < self.random.choice([0.1, 0.5, 0.9])]
        if not len(some):
            some = self.random.choice(warps, 1)
        return ready & np.isin(self.warps.of, some)

    def _run_to_barriers(self, threads: Array) -> None:
        """Run threads until each has ended or waits; those that are behind run first."""
        ready: dict[int, Array] = {}
        held: dict[int, Array] = {}  # parts of warps, at instructions that need the others

        def put(place: int, group: Array) -> None:
            if place in ready:
                group = np.concatenate((group, ready[place]))
            ready[place] = np.sort(group)

        for place in np.unique(self.next[threads]):
            put(int(place), threads[self.next[threads] == place])
        while ready:
            place = min(ready)
            group = ready.pop(place)
            self._run_together(place, group, min(ready, default=1 << 60), put, held)
        if held:
            raise Fault(f"a diverged warp at {self.kernel.code[min(held)].text!r}")

    def _run_together(
        self, place: int, group: Array, stop: int, put: Callable[..., None], held: dict[int, Array]
    ) -> None:
        """Run threads from a place until they part, or reach `stop`, where others are."""
        steps = self.program.steps
        every: At = slice(None) if len(group) == self.size else group
        while place < min(stop, len(steps)):
            self.executed += 1
            if self.executed > _MOST_STEPS:
                raise Fault("the kernel does not end")
            guard, negated, control, step, whole = steps[place]
            here, at = group, every
            if guard:
                on = self._of(guard)[every] != negated
                if not on.all():
                    here = at = group[on]
            if whole and not self._are_whole(here):
                if place in held:
                    put(place, np.concatenate((group, held.pop(place))))
                else:
                    held[place] = group
                return
            if control is None:
                step(self, at)  # for no thread too: its result is then a register of unknown values
            elif control.kind == "branch" and len(here) == len(group):
                place = control.target
                continue
            elif control.kind == "branch" and len(here):
                put(control.target, here)
                put(place + 1, group[~on])
                return
            elif control.kind in ("exit", "barrier"):
                self.next[here] = place + 1
                self.waiting[here] = control.kind == "barrier"
                if len(here) == len(group):
                    return
                group = every = group[~on]
            place += 1
        if place >= len(steps):
            raise Fault("a kernel must end with ret")
        put(place, group)

    def _are_whole(self, threads: Array) -> bool:
        return len(threads) % 32 == 0 and bool(
            (threads.reshape(-1, 32) == threads[::32, None] + np.arange(32)).all()
        )

    # --- registers --------------------------------------------------------------------------------

    def _of(self, name: str) -> Array:
        try:
            return self.registers[name]
        except KeyError:
            raise Fault(f"the register {name} has no value") from None

    def put(self, name: str, bits: Array, at: At) -> None:
        """Write bits to a register; a wider register gets zeros above."""
        found = self.registers.get(name)
        if found is None:
            kind = self.kernel.types.get(name if name[0] != "%" else name.rstrip("0123456789"))
            dtype = bits.dtype if kind is None else np.dtype(BITS[kind])
            found = self.registers[name] = np.zeros(self.size, dtype)
        found[at] = bits


# --- decoding -------------------------------------------------------------------------------------


def _decoded(one: Instruction, kernel: Kernel) -> tuple[Control | None, Step, bool]:
    """Return the control, the function, and whether whole warps are needed, of an instruction."""
    name = one.opcode.split(".")[0]

    def nothing(grid: Grid, at: At) -> None:
        pass

    if one.opcode in ("bra", "bra.uni"):
        return Control("branch", kernel.labels[str(one.operands[0])]), nothing, False
    if one.opcode in ("ret", "exit"):
        return Control("exit"), nothing, False
    if one.opcode in (
        "bar.sync",
        "barrier.sync",
        "barrier.sync.aligned",
        "barrier.cta.sync.aligned.all",
    ):
        if one.operands != ("0",):
            raise Fault("a barrier of some warps is unknown")
        return Control("barrier"), nothing, True
    if one.opcode == "bar.warp.sync":
        return Control("warp"), nothing, True
    if found := _MATRIX.fullmatch(one.opcode):
        return None, _matrix(one, kernel, found[1] == "stmatrix"), True
    if name in ("ld", "st"):
        return None, _access(one, kernel), False
    if name == "mov" and any(isinstance(x, tuple) for x in one.operands):
        return None, _packed(one, kernel), False
    step, whole = _arithmetic(one, kernel)
    return None, step, whole


def _source(operand: Any, kind: str, kernel: Kernel) -> Read:
    """Return a function that reads the values of an operand."""
    constant = _constant(operand, kind, kernel)
    if constant is not None:
        values = read(constant, kind)
        return lambda _grid, _at: values
    if operand in ("%tid.x", "%ntid.x", "%laneid") or operand.startswith(("%ctaid.", "%nctaid.")):
        return lambda grid, at: read(grid.special[operand][at].astype(BITS[kind]), kind)
    if operand[0] == "!":
        return lambda grid, at: ~grid._of(operand[1:])[at]
    dtype = np.dtype(BITS[kind])

    def register(grid: Grid, at: At) -> Array:
        bits = grid._of(operand)[at]
        return read(bits if bits.dtype == dtype else bits.astype(dtype), kind)

    return register


def _constant(operand: str, kind: str, kernel: Kernel) -> Array | None:
    """Return the bits of a constant operand, or None."""
    bits = BITS[kind]
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", operand):
        whole = int(found[1] or found[2], 16)
    elif re.fullmatch(r"-?(?:0x[0-9a-fA-F]+|\d+)U?", operand):
        whole = int(operand.rstrip("U"), 0)
    elif operand in kernel.constants:
        whole = kernel.constants[operand].ctypes.data
    elif operand in kernel.local or operand == "global_smem":
        whole = 0
    else:
        return None
    if kind == "pred":
        return np.array([whole != 0])
    return np.array([whole % (1 << 8 * np.dtype(bits).itemsize)], "u8").astype(bits)


def _listed(operand: str | tuple[str, ...]) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else tuple(operand.split("|"))


def _arithmetic(one: Instruction, kernel: Kernel) -> tuple[Step, bool]:
    into, *given = one.operands
    meaning: Meaning = meaning_of(one.opcode, len(given))
    names = [name.strip() for name in _listed(into)]
    sources = [_source(x, kind, kernel) for x, kind in zip(given, meaning.sources, strict=True)]
    if ".satfinite." in one.opcode:
        sources[0] = _or_nan(given[0], sources[0])
    function, results = meaning.function, meaning.results
    if len(names) > len(results):
        raise Fault(f"the instruction {one.opcode} with {len(names)} results is unknown")
    if meaning.takes_carry:
        sources.append(lambda grid, at: grid.carry[at])

    def step(grid: Grid, at: At) -> None:
        values = [source(grid, at) for source in sources]
        if meaning.whole:
            count = len(grid.every[at])
            values = [np.broadcast_to(value, count).reshape(-1, 32) for value in values]
        found = function(*values)
        found = found if isinstance(found, tuple) else (found,)
        if meaning.whole:
            found = tuple(value.ravel() for value in found)
        for name, value, kind in zip(names, found, results):
            if name != "_":
                grid.put(name, write(value, kind), at)
        if meaning.sets_carry:
            grid.carry[at] = found[1]

    return step, meaning.whole


def _or_nan(operand: str, source: Read) -> Read:
    """Read a register, or NaN if it has no value: the compiler packs two numbers also where it needs the lower one."""

    def register(grid: Grid, at: At) -> Array:
        if operand[0] == "%" and operand not in grid.registers:
            return np.full(1, np.nan, "f4")
        return source(grid, at)

    return register


def _packed(one: Instruction, kernel: Kernel) -> Step:
    """Return the move between a register and several registers, the first of which has the lowest bits.

    The compiler joins registers to pairs also where it needs one half of the result. The other register
    may have no value then; here all its bits are 1, which is NaN in every type.
    """
    kind = one.opcode.removeprefix("mov.")
    into, given = one.operands
    parts = _listed(given if isinstance(given, tuple) else into)
    bits = int(kind[1:]) // len(parts)
    narrow, wide = np.dtype(f"u{bits // 8}"), np.dtype(BITS[kind])
    ones = np.array([-1]).astype(narrow)
    if isinstance(given, tuple):
        sources = [_source(part, f"b{bits}", kernel) for part in parts]

        def join(grid: Grid, at: At) -> None:
            total = np.zeros(1, wide)
            for i, (name, source) in enumerate(zip(parts, sources)):
                unset = name[0] == "%" and name not in grid.registers
                value = ones if unset else source(grid, at)
                total = total | value.astype(wide) << wide.type(bits * i)
            grid.put(str(into), total, at)

        return join
    whole = _source(given, f"b{kind[1:]}", kernel)

    def part(grid: Grid, at: At) -> None:
        value = whole(grid, at)
        for i, name in enumerate(parts):
            if name != "_":
                grid.put(name, (value >> wide.type(bits * i)).astype(narrow), at)

    return part


def _address(operand: Any, kind: str, kernel: Kernel) -> Read:
    found = _ADDRESS.fullmatch(operand)
    if found is None:
        raise Fault(f"the address {operand} is unknown")
    base, offset = _source(found[1], kind, kernel), int(found[2] or 0)

    def address(grid: Grid, at: At) -> Array:
        values = base(grid, at).astype("i8") + offset
        return np.broadcast_to(values, grid.every[at].shape)

    return address


def _access(one: Instruction, kernel: Kernel) -> Step:
    """Return a load or store."""
    found = _ACCESS.fullmatch(one.opcode)
    if found is None:
        raise Fault(f"the instruction {one.opcode} is unknown")
    name, space, _, kind = found.groups()
    text, size = one.text, int(kind[1:]) // 8
    where, registers = one.operands[:: 1 if name == "st" else -1]
    names = _listed(registers)
    if len(names) != int(found[3] or 1):
        raise Fault(f"the instruction {one.opcode} of {len(names)} registers is unknown")
    if space == "param":
        place = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", str(where))
        if place is None or place[1] not in dict(kernel.parameters) or name == "st":
            raise Fault(f"the parameter {where} is unknown")
        start = int(place[2] or 0)

        def parameter(grid: Grid, at: At) -> None:
            given = grid.parameters[place[1]][start : start + size * len(names)]
            for into, bits in zip(names, np.frombuffer(given, f"u{size}"), strict=True):
                grid.put(into, bits, at)

        return parameter
    address = _address(where, "u32" if space == "shared" else "u64", kernel)

    def memory_of(grid: Grid) -> Any:
        return {"global": grid.memory, "shared": grid.shared, "local": grid.local}[space]

    if name == "ld":

        def load(grid: Grid, at: At) -> None:
            places = address(grid, at)
            found = memory_of(grid).load(places, grid.every[at], size, len(names), text)
            for into, bits in zip(names, found):
                if into != "_":
                    wider = (
                        bits.view(f"i{size}").astype("i8").view("u8") if kind[0] == "s" else bits
                    )
                    grid.put(into, wider, at)

        return load
    sources = [_source(register, f"b{kind[1:]}", kernel) for register in names]

    def store_(grid: Grid, at: At) -> None:
        places = address(grid, at)
        values = [source(grid, at) for source in sources]
        memory_of(grid).store(places, grid.every[at], values, text)

    return store_


def _matrix(one: Instruction, kernel: Kernel, stores: bool) -> Step:
    """Return the load or store of matrices of 8 rows of 8 elements of 16 bits.

    Lane 8 i + r has the address of row r of matrix i. Lane l has the elements 2 (l % 4) and the next
    one of row l / 4.
    """
    where, registers = one.operands if stores else one.operands[::-1]
    names = _listed(registers)
    address = _address(where, "u32", kernel)
    lane = np.arange(32)
    sources = [_source(name, "b32", kernel) for name in names] if stores else []

    def step(grid: Grid, at: At) -> None:
        threads = grid.every[at]
        rows = address(grid, at).reshape(-1, 32)
        if (rows[:, : 8 * len(names)] % 16).any():
            raise Fault(f"misaligned: {one.text}")
        for i, name in enumerate(names):
            halves = []
            value = np.broadcast_to(sources[i](grid, at), len(threads)) if stores else None
            for j in range(2):
                row, column = lane // 4, 2 * (lane % 4) + j
                places = (rows[:, 8 * i + row] + 2 * column).ravel()
                if value is not None:
                    half = (value >> np.uint32(16 * j)).astype("u2")
                    grid.shared.store(places, threads, [half], one.text)
                else:
                    halves += grid.shared.load(places, threads, 2, 1, one.text)
            if not stores:
                low, high = (half.astype("u4") for half in halves)
                grid.put(name, low | high << np.uint32(16), at)

    return step
