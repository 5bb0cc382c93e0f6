"""Launch the Triton kernels with a stub of NVIDIA's driver: run by tests/kernel/triton/test_launch.py.

The script has a process of its own, because Triton chooses compiler or interpreter at import, and
because the stub, driver_stub.c, stands in for libcuda. Triton's own launcher passes the arguments.
The script prints JSON. With the argument "some" it leaves out calls whose launches are like others.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode

from tests.support.triton.compiled import calls, heads, words
from tests.support.triton.driver import Driver
from tightrope.backends.triton import launch, operators, phases, rotation, slots, sums
from tightrope.backends.triton.groups import Carries
from tightrope.ops.schema import LOG, Options

# With the argument "some" only these are called, besides those of `more`.
SOME = (
    *("bfloat16", "M-RoPE", "tables", "unaligned", "log gate", "rms_norm backward"),
    *("frequencies", "positions", "gates", "running", "given"),
)
# These, one for each function that launches, are also called on a second device.
ELSEWHERE = ("bfloat16", "rms_norm backward", "frequencies", "gates", "running")
FORMATS = {"*": "<Q", "i": "<q", "f": "<f"}  # of parameters: addresses, integers, fractions
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


class Gpu(TorchFunctionMode):
    """Lets tensors of the CPU say that they are on a GPU, and names those that functions make.

    Attributes:
        index: the index of the GPU.
        made: names of the tensors by address, in the order in which they were made.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.made: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.get_device:
            return self.index
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda", self.index)
        result = function(*args, **{k: v for k, v in (kwargs or {}).items() if k != "device"})
        if isinstance(result, torch.Tensor):
            self._kept.append(result)
            if result.numel():
                self.made.setdefault(result.data_ptr(), f"tensor {len(self._kept)}")
        return result


class Stub(Driver):
    """The stub of the driver, which records launches.

    Attributes:
        launches: facts about each launch, in order.
        loads, compilations: numbers of modules that were loaded and of kernels that were compiled.
        lookups: how often Triton looked up the current device; its own runner does in every launch.
        failing: errors that the next calls of functions of the driver return, by function.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.launches: list[dict[str, Any]] = []
        self.loads = self.compilations = self.lookups = 0
        self.failing: dict[str, int] = {}

    def looked_up(self) -> int:
        self.lookups += 1
        return super().looked_up()

    def load(self) -> int:
        self.loads += 1
        return self.failing.pop("cuModuleLoadData", 0)

    def launch(self, config: Any, function: int, parameters: Any, device: int) -> int:
        found = next(each for each in launch.compiled.values() if each.function == function)
        declared = declared_by(found.asm["ptx"])
        values = [
            struct.unpack(FORMATS[kind], ctypes.string_at(parameters[i], size))[0]
            for i, (kind, size) in enumerate(declared)
        ]
        divisors = divisors_of(found.asm["ttir"])
        threads = re.search(r"\.reqntid (\d+)", found.asm["ptx"])
        self.launches.append(
            {
                "kernel": found.name,
                "grid": list(config.grid),
                "block": list(config.block),
                "shared": [config.shared, found.metadata.shared],
                "stream": config.stream or 0,
                "device": device,
                "attributes": config.count,
                "types": [kind for kind, _ in declared],
                "values": values,
                "threads": None if threads is None else int(threads[1]),
                "divisors": divisors,
                "divisible": all(by == 1 or value % by == 0 for value, by in zip(values, divisors)),
            }
        )
        return self.failing.pop("cuLaunchKernelEx", 0)


def declared_by(ptx: str) -> list[tuple[str, int]]:
    """Return the type ("*", "i" or "f") and the number of bytes of each parameter of a kernel."""
    return [
        ("*" if pointer else "f" if kind == "f" else "i", int(bits) // 8)
        for kind, bits, pointer in re.findall(
            r"\.param \.([a-z])(\d+)( \.ptr)?.* \w+_param_\d+", ptx
        )
    ]


def divisors_of(ttir: str) -> list[int]:
    """Return the number by which the compiler assumes each parameter to be divisible."""
    signature = next(line for line in ttir.splitlines() if "tt.func public" in line)
    found = [
        re.search(r"tt\.divisibility = (\d+)", each) for each in re.split(r"[(,] ?(?=%)", signature)
    ]
    return [1 if divisor is None else int(divisor[1]) for divisor in found[1:]]


def leaves(name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield name, type and value of each parameter that an argument of a kernel becomes."""
    if isinstance(value, torch.Tensor):
        yield name, "*", value.data_ptr()
    elif isinstance(value, tuple):
        for field, each in zip(value._fields, value, strict=True):
            yield from leaves(f"{name}.{field}", each)
    elif isinstance(value, float):
        yield name, "f", struct.unpack("<f", struct.pack("<f", value))[0]
    elif value is not None:
        yield name, "i", value


def meant(kernel: Any, arguments: Any) -> list[tuple[str, str, Any]]:
    """Return name, type and value of each parameter of a kernel, given tensors and groups."""
    return [
        leaf
        for parameter, value in zip(kernel.params, arguments, strict=True)
        if not parameter.is_constexpr
        for leaf in leaves(parameter.name, value)
    ]


def divisors(kernel: Any, arguments: Any, aligned: Any) -> list[int]:
    """Return the number by which the compiler may assume each parameter to be divisible."""
    found = []
    for name, kind, _ in meant(kernel, arguments):
        group, _, leaf = name.rpartition(".")
        if kind == "*":
            found.append(16 if aligned.get(leaf) else 1)
        else:
            whole = leaf in ("row", "head", "token") and aligned.get(group.rpartition(".")[2])
            found.append(whole or 1)
    return found


def more() -> dict[str, Callable[[], Any]]:
    """Return calls in place, into given memory, of parts of tensors, and with other values, by name.

    Only those to slots, "in place", "in place, short" and "in place, float64" compile kernels.
    """
    q, k = heads(32, torch.bfloat16), heads(8, torch.bfloat16)
    out = torch.empty_like(q.contiguous())
    longer = torch.empty(3, 1000, 4, 128, dtype=torch.bfloat16).transpose(1, 2)
    other = torch.empty(3, 9, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    wide = heads(3, torch.float64)
    gate = torch.empty(1, 33, 1, 128)
    of_words, packed = words(64), Options().pack()
    keys, of_values = torch.zeros(2, 7, 8, 16, 128, dtype=torch.bfloat16)
    narrow, of_narrow = k[..., :7], of_values[..., :7]
    to = torch.arange(k.shape[0] * k.shape[2], dtype=torch.int32).view(k.shape[0], -1)
    arguments = of_words, None, None, 3, packed, 1.0, [], 0.0

    def rotate_(q: Any, k: Any, offset: int, amplitude: float) -> Any:
        return lambda: operators.rotate_(
            q, k, of_words, None, None, offset, packed, amplitude, [], 0.0
        )

    return {
        "in place": rotate_(q, k, 3, 1.0),
        "into": lambda: operators.rotate_into(
            q, k, out, k.contiguous(), of_words, None, None, 5, packed, 1.37, [], 0.0
        ),
        "in place, far": rotate_(q, k, 2**40 + 7, 1.37),
        "in place, before": rotate_(longer, other.new_empty(3, 2, 1000, 128), -(2**33) - 1, 0.1),
        "in place, short": rotate_(other[:, :, :1], other[:, :, 1:2], -1, 1e-40),
        "in place, shorter": rotate_(other[:1, :, 3:6], other[:1, :, 6:9], 9, 0.5),
        "in place, empty": rotate_(q[:, :, :0], k[:, :, :0], 1, 1.0),
        "frequencies, parts": lambda: operators.angle_gradients(
            q[:1], k[1:], q[1:], k[:1], of_words, None, None, -3, packed, False, True
        ),
        "gates, parts": lambda: operators.gate_gradients(
            q[1:], None, q[:1], None, gate[:, 1:], None, None, 0, Options(gate=LOG).pack()
        ),
        "in place, float64": rotate_(wide, None, 2**62, 1.37),
        "slots": lambda: operators.rotate_slots_extras(
            q, k, k.clone(), out, keys, of_values, to, None, None, *arguments
        ),
        "slots, narrow values": lambda: operators.rotate_slots_extras(
            k,
            None,
            narrow,
            keys,
            None,
            of_narrow,
            to.long().mT.contiguous().mT,
            None,
            None,
            *arguments,
        ),
        "slots, alone": lambda: operators.rotate_slots(k, None, keys, None, to, *arguments),
        "slots, in place": lambda: operators.rotate_slots_(keys, to, *arguments),
    }


@contextlib.contextmanager
def as_interpreted(noted: list[dict[str, Any]]) -> Iterator[None]:
    """Pass tensors and groups to a function that notes them, as they are passed to the interpreter.

    Other tests show that the interpreter's results are right, so these arguments are what is meant.
    """

    def launcher(
        kernel: Any, grid: Any, values: Any, aligned: Any, blocks: Any, device: Any
    ) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            names, types, passed = zip(*meant(kernel, arguments))
            noted.append(
                {
                    "kernel": kernel.__name__,
                    "grid": list(grid),
                    "block": [32 * blocks.warps, 1, 1],
                    "device": device.index,
                    "names": names,
                    "types": types,
                    "values": passed,
                    "divisors": divisors(kernel, arguments, aligned),
                }
            )

        return run

    with contextlib.ExitStack() as stack:
        for module in (rotation, sums, phases, slots):
            stack.enter_context(mock.patch.object(module, "launcher", launcher))
        for module in (launch, rotation, sums):
            stack.enter_context(mock.patch.object(module, "INTERPRETED", True))
        stack.enter_context(mock.patch.object(rotation, "_CARRIES_NOTHING", (Carries(),)))
        forget()
        yield
        forget()


def forget() -> None:
    """Forget the plans of earlier calls."""
    for module in (rotation, phases, slots):
        module._plans.clear()


@contextlib.contextmanager
def observed(hook: Callable[[Any], None]) -> Iterator[None]:
    """Call a function before each launch: then Triton's own runner makes the launches."""
    runtime = triton.knobs.runtime
    if runtime.launch_enter_hook is None:  # Triton 3.4
        with mock.patch.object(runtime, "launch_enter_hook", hook):
            yield
    else:
        runtime.launch_enter_hook.add(hook)
        yield
        runtime.launch_enter_hook.remove(hook)


def made_by(call: Callable[[], Any], index: int, launches: list[dict[str, Any]]) -> Any:
    """Return the launches of a call; tensors that it makes have names in place of addresses."""
    launches.clear()
    with Gpu(index) as gpu:
        call()
    return [
        {**one, "values": [gpu.made.get(value, value) for value in one["values"]]}
        for one in launches
    ]


def launched(stub: Stub, call: Callable[[], Any], index: int) -> dict[str, Any]:
    """Return the launches that a call means and those that it makes; each call is made thrice."""
    noted: list[dict[str, Any]] = []
    with as_interpreted(noted):
        means = [made_by(call, index, noted) for _ in range(2)]
    result: dict[str, Any] = {}
    hooked: list[Any] = []
    for way, meaning in zip(("first", "again", "observed"), (*means, means[1])):
        before = stub.compilations, stub.loads, stub.lookups
        with observed(hooked.append) if way == "observed" else contextlib.nullcontext():
            made = made_by(call, index, stub.launches)
        after = stub.compilations, stub.loads, stub.lookups
        counts = [now - then for now, then in zip(after, before)]
        result[way] = {"meant": meaning, "made": made, "counts": counts}
    result["hooked"] = [each.get()["name"] for each in hooked]
    return result


def errors(stub: Stub, call: Callable[[], Any]) -> dict[str, Any]:
    """Return messages and numbers of launches of calls that the driver fails, and of the next ones.

    The kernel is loaded for device 2 for the first time.
    """
    result = {}
    for name, function, error in (
        ("load", "cuModuleLoadData", OUT_OF_MEMORY),
        ("launch", "cuLaunchKernelEx", ILLEGAL_ADDRESS),
        ("observed launch", "cuLaunchKernelEx", ILLEGAL_ADDRESS),
    ):
        stub.failing[function] = error
        message = ""
        with observed(lambda _: None) if name[0] == "o" else contextlib.nullcontext():
            try:
                made_by(call, 2, stub.launches)
            except RuntimeError as caught:
                message = str(caught)
        result[name] = {
            "message": message,
            "left": len(stub.failing),
            "current": stub.current(),
            "next": made_by(call, 2, stub.launches),
            **launched(stub, call, 2),
        }
    return result


def hooked(stub: Stub, call: Callable[[], Any]) -> dict[str, int]:
    """Return how often a plain function in place of a chain of hooks is called, for each hook."""
    result = {}
    for name in ("launch_enter_hook", "launch_exit_hook"):
        seen: list[Any] = []
        with mock.patch.object(triton.knobs.runtime, name, seen.append):
            made_by(call, 0, stub.launches)
        result[name] = len(seen)
    return result


def main(some: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        stub = Stub(Path(folder))
        stub.pretend((9, 0))

        def compile_(*arguments: Any, **named: Any) -> Any:
            stub.compilations += 1
            return compile_as_usual(*arguments, **named)

        compile_as_usual, triton.compile = triton.compile, compile_
        every = calls()
        names = SOME if some else tuple(every)
        found = {name: launched(stub, every[name], 0) for name in names}
        found |= {name: launched(stub, call, 0) for name, call in more().items()}
        found |= {f"{name}, elsewhere": launched(stub, every[name], 1) for name in ELSEWHERE}
        failed = errors(stub, every["bfloat16"])
        plain = hooked(stub, every["bfloat16"])
        print(json.dumps({"calls": found, "errors": failed, "hooked": plain}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] == ["some"]))
