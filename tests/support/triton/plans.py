"""What launches promise to the compiler, and what they are kept under: run by tests/kernel/triton/test_launch.py.

Nothing is compiled and no GPU is needed: a record takes the place of a compiled kernel. The script has a process of its own,
because Triton chooses compiler or interpreter at import. It prints JSON: facts about drawn calls, and how many
compilations groups of calls need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.support import raw_calls
from tests.support.raw_calls import FEW, Call, tensors_of
from tightrope.angles import words_from
from tightrope.backends.triton import launch, operators, phases, registration, rotation, slots
from tightrope.ops.schema import Options

CALLS = 200  # of each maker
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
EIGHT = dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "*u8")


class Kernel:
    """A record in the place of a compiled kernel.

    Attributes:
        asked: what it was compiled for: its name, types, constants and options.
        divisors: what the compiler may assume to divide each parameter, by its path.
    """

    made = 0
    launches: list[tuple[Kernel, Any, tuple[Any, ...]]] = []  # noqa: RUF012

    def __init__(self, source: Any, target: Any = None, options: Any = None) -> None:  # noqa: ARG002
        Kernel.made += 1
        types, constants = tuple(source.signature.values()), source.constants
        self.asked = source.fn.__name__, types, sorted(constants.items(), key=str), options
        self.divisors = {path: by for path, ((_, by),) in source.attrs.items()}
        self.leaves = list(leaves(types))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given: Kernel.launches.append((self, grid, given))


def leaves(types: tuple[Any, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[Any, str]]:
    """Yield path and type of each parameter, and of each member of a group."""
    for i, kind in enumerate(types):
        if isinstance(kind, tuple):
            yield from leaves(kind, (*path, i))
        else:
            yield (*path, i), kind


def forget() -> None:
    """Forget plans and kernels of earlier calls, as in a new process."""
    for kept in (rotation._plans, phases._plans, slots._plans, launch.compiled):
        kept.clear()


# --- drawn calls ----------------------------------------------------------------------------------


class Draw(raw_calls.Draw):
    """Draws calls without what makes the operators refuse them."""

    eights = 0.4

    def sometimes(self, share: float) -> bool:
        return share > 0.1 and super().sometimes(share)


def elsewhere(x: torch.Tensor, shift: int, strides: list[int]) -> torch.Tensor:
    """Copy a tensor to memory of its own, so many elements behind a multiple of 64 bytes."""
    count = sum((n - 1) * step for n, step in zip(x.shape, strides) if x.numel())
    return x.new_zeros(count + 1 + shift).as_strided(x.shape, strides, shift).copy_(x)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return elsewhere(x, 1, [step if n > 1 else 0 for n, step in zip(x.shape, x.stride())])


def restrided(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    """Change the order of the dimensions in memory, and leave gaps."""
    steps, step = [0] * x.dim(), 1
    for d in draw.sample(range(x.dim()), x.dim()):
        steps[d] = step * draw.choice((1, 1, 2))
        step = steps[d] * max(x.shape[d], 1) + draw.choice((0, 0, 1))
    return elsewhere(x, 0, steps)


def retyped(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    kinds = [kind for kind in POINTERS if kind.is_floating_point == x.is_floating_point()]
    return x.to(draw.choice(kinds), copy=True)


def changes_of(draw: Draw, arguments: list[Any]) -> Iterator[list[Any]]:
    """Yield the arguments with one property of one of them changed, and each tensor moved by one element."""
    for i, one in enumerate(arguments):
        for j in range(len(one)) if isinstance(one, list) else (None,):
            old = one if j is None else one[j]
            if isinstance(old, torch.Tensor):
                change = draw.choice((restrided, retyped))
                values: list[Any] = [shifted(old), change(draw, old)]
            elif old is None or isinstance(old, bool):
                continue
            else:
                values = [
                    1.37 * old + 1e-5 if isinstance(old, float) else old ^ 1 << draw.randrange(40)
                ]
            for value in values:
                new = value if j is None else [*one[:j], value, *one[j + 1 :]]
                yield [*arguments[:i], new, *arguments[i + 1 :]]


def launches_of(call: Call, wrong: list[str]) -> list[Any]:
    """Make a call; return its launches, and note the promises to the compiler that are not true."""
    operator, arguments, _ = call
    name = registration.OPERATORS[operator.name().partition("::")[2]]
    tensors = tensors_of(arguments)
    kinds = {x.data_ptr(): (POINTERS | EIGHT).get(x.dtype) for x in tensors if x.numel()}
    Kernel.launches.clear()
    try:
        getattr(operators, name)(*arguments)
    except RuntimeError as error:
        return [str(error)]
    found = []
    for kernel, grid, given in Kernel.launches:
        values = []
        for (path, kind), value in zip(kernel.leaves, given, strict=True):
            pointer = kind.startswith("*") and value is not None
            if pointer and kinds.get(value, kind) != kind:
                wrong.append(f"{name}: a tensor of {kinds[value]} is taken for {kind}")
            by = kernel.divisors.get(path, 0)
            if value is not None and by and value % by:
                wrong.append(f"{name}: {value} is not divisible by {by}: parameter {path}")
            values.append("made" if pointer and value not in kinds else value)
        found.append([kernel.asked, sorted(kernel.divisors.items()), grid, values])
    return found


def pairs() -> dict[str, Any]:
    """Make pairs of calls that differ in one property, each alone and one after the other."""
    facts: dict[str, Any] = {"launches": 0, "promises": 0, "differ": 0, "wrong": []}
    wrong = facts["wrong"]

    def alone(call: Call) -> list[Any]:
        forget()
        return launches_of(call, wrong)

    for maker in raw_calls.MAKERS:
        for seed in range(CALLS):
            draw = Draw(f"{maker.__name__} {seed}")
            try:
                operator, arguments, written = maker(draw)
            except RuntimeError:  # torch cannot make such a tensor
                continue
            first = operator, arguments, written
            if any(max(x.shape, default=0) > FEW for x in tensors_of(arguments)):
                continue
            want = alone(first)
            if not want or isinstance(want[0], str):
                continue
            for changed in changes_of(draw, arguments):
                second = operator, changed, written
                other = alone(second)
                for call, launches in ((first, want), (second, other)):
                    if launches_of(call, wrong) != launches:
                        wrong.append(f"{maker.__name__} {seed}: it launches something else")
                facts["launches"] += len(want)
                facts["promises"] += sum(len(one[1]) for one in want)
                facts["differ"] += want != other
    facts["wrong"] = wrong[:5]
    return facts


# --- compilations ---------------------------------------------------------------------------------


def counted() -> dict[str, int]:
    """Return the total number of compilations that a GPU would need, after each group of calls."""
    words = words_from(torch.rand(1, 1, 1, 64, dtype=torch.float64))[0]
    buffer = torch.empty(10_000, 4, 128, dtype=torch.bfloat16)
    wider = torch.empty(1, 4, 64, 136, dtype=torch.bfloat16)
    state = torch.zeros(2, 4, 16, dtype=torch.int64)
    lengths = [*range(1, 300), *range(300, 10_001, 97), 10_000, 4096, 8192]

    def rotate(x: torch.Tensor, offset: int = 0, positions: torch.Tensor | None = None) -> None:
        options = Options(add_index=positions is None or positions.shape[2] == 1).pack()
        operators.rotate_(x, None, words, None, positions, offset, options, 1.0)

    def add_up(rows: int, length: int, pairs: int, step: int = 1) -> None:
        given = torch.empty(rows, length, 4, pairs * step).transpose(1, 2)[..., ::step]
        phases.phase_words(given, state[:rows, :, :pairs], None, True, False)

    def part(length: int) -> torch.Tensor:
        return buffer[:length].transpose(0, 1)[None]

    def heads(rows: int, count: int, length: int = 5) -> torch.Tensor:
        return torch.empty(rows, count, length, 128, dtype=torch.bfloat16)

    offsets = (0, 1, 2, 16, 17, 4096, 2**31 - 1, 2**31, 2**40, -1, -(2**33))
    sizes = [(rows, 4) for rows in (1, 2, 16, 33)] + [(2, count) for count in (3, 5, 8, 32)]
    few = ((1, 1, 16), (2, 5, 16), (2, 16, 15), (1, 128, 9))
    groups: dict[str, Iterator[Any]] = {
        "lengths": (rotate(part(length)) for length in lengths),
        "lengths, contiguous": (rotate(heads(1, 4, length)) for length in lengths),
        "offsets": (rotate(part(7), offset) for offset in offsets),
        "rows and heads": (rotate(heads(*size), 3) for size in sizes),
        "ids": (
            rotate(part(length), 0, torch.zeros(1, 1, length, dtype=torch.int64))
            for length in (1, 16, 17, 5000)
        ),
        "unaligned": (rotate(wider[..., start : start + 128]) for start in range(1, 8)),
        "one head": (rotate(heads(1, 1)) for _ in "1"),
        "another dtype": (rotate(heads(1, 4).float()) for _ in "1"),
        "running, one chunk": (add_up(*sizes) for sizes in few),
        "running, chunks": (
            add_up(*own) for own in ((1, 129, 16), (2, 5000, 16), (2, 4096, 16, 2))
        ),
    }
    forget()
    Kernel.made = 0
    counts = {}
    for name, calls in groups.items():
        list(calls)
        counts[name] = Kernel.made
    return counts


def main() -> int:
    target = GPUTarget("cuda", 90, 32)
    active = SimpleNamespace(get_current_target=lambda: target)
    triton.compile, triton.runtime.driver = Kernel, SimpleNamespace(active=active)
    print(json.dumps({"pairs": pairs(), "counted": counted()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
