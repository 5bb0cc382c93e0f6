"""Launch the Triton kernels with a stub of NVIDIA's driver: run by tests/kernel/triton/test_launch.py.

The script has a process of its own, because Triton chooses compiler or interpreter at import, and
because the stub, driver_stub.c, stands in for libcuda. Triton's own launcher passes the arguments.
The script prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode

from tests.emulator.driver import Driver
from tests.support.triton.compiled import calls, heads, words
from tightrope.backends.triton import launch, operators
from tightrope.ops.schema import Options

# Of the calls of compiled.py, one for each function that launches.
SOME = ("rms_norm backward", "frequencies", "gates", "running", "running, a token")
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


class Gpu(TorchFunctionMode):
    """Lets tensors of the CPU say that they are on a GPU of this index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.get_device:
            return self.index
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda", self.index)
        return function(*args, **{k: v for k, v in (kwargs or {}).items() if k != "device"})


class Stub(Driver):
    """The stub of the driver, which records launches.

    Attributes:
        launches: facts about each launch, in order.
        counts: how many kernels were compiled, how many modules loaded, and how often Triton looked up the current
            device; its own runner does in every launch.
        failing: errors that the next calls of functions of the driver return, by function.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.launches: list[dict[str, Any]] = []
        self.counts = [0, 0, 0]
        self.failing: dict[str, int] = {}

    def looked_up(self) -> int:
        self.counts[2] += 1
        return super().looked_up()

    def load(self) -> int:
        self.counts[1] += 1
        return self.failing.pop("cuModuleLoadData", 0)

    def launch(self, config: Any, function: int, parameters: Any, device: int) -> int:  # noqa: ARG002
        found = next(each for each in launch.compiled.values() if each.function == function)
        self.launches.append(
            {
                "kernel": found.name,
                "grid": list(config.grid),
                "block": list(config.block),
                "shared": [config.shared, found.metadata.shared],
                "stream": config.stream or 0,
                "device": device,
                "attributes": config.count,
            }
        )
        return self.failing.pop("cuLaunchKernelEx", 0)


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


def made_by(stub: Stub, call: Callable[[], Any], index: int) -> list[dict[str, Any]]:
    """Return the launches of a call."""
    stub.launches.clear()
    with Gpu(index):
        call()
    return list(stub.launches)


def launched(stub: Stub, call: Callable[[], Any], index: int) -> dict[str, Any]:
    """Return the launches of a call that is made thrice, and what was counted: the last time a hook observes it."""
    result: dict[str, Any] = {}
    hooked: list[Any] = []
    for way in ("first", "again", "observed"):
        stub.counts = [0, 0, 0]
        with observed(hooked.append) if way == "observed" else contextlib.nullcontext():
            result[way] = made_by(stub, call, index)
        result[f"counts, {way}"] = list(stub.counts)
    return result | {"hooked": [each.get()["name"] for each in hooked]}


def errors(stub: Stub, call: Callable[[], Any]) -> dict[str, Any]:
    """Return messages of calls that the driver fails, and the launches of the next ones; device 2 is new."""
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
                made_by(stub, call, 2)
            except RuntimeError as caught:
                message = str(caught)
        left = len(stub.failing), stub.current()
        result[name] = {"message": message, "left": left, **launched(stub, call, 2)}
    return result


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        stub = Stub(Path(folder))
        stub.pretend((9, 0))

        def compile_(*arguments: Any, **named: Any) -> Any:
            stub.counts[0] += 1
            return compile_as_usual(*arguments, **named)

        compile_as_usual, triton.compile = triton.compile, compile_
        q, k, of_words = heads(32, torch.bfloat16), heads(8, torch.bfloat16), words(64)
        keys, to = torch.zeros(7, 8, 16, 128, dtype=q.dtype), torch.arange(100).view(2, 50)

        def rotate_(*xs: torch.Tensor, offset: int = 3, amplitude: float = 1.0) -> Any:
            rest = None, None, offset, Options().pack(), amplitude, [], 0.0
            return lambda: operators.rotate_(*xs, of_words, *rest)

        plain = rotate_(q, k)
        every = {
            "in place": plain,
            "far": rotate_(q, k, offset=2**40 + 7, amplitude=0.1),
            "empty": rotate_(q[:, :, :0], k[:, :, :0]),
            "slots": lambda: operators.rotate_slots_(
                keys, to, of_words, None, None, 3, Options().pack(), 1.0, [], 0.0
            ),
            **{name: call for name, call in calls().items() if name in SOME},
        }
        found = {name: launched(stub, call, 0) for name, call in every.items()}
        found |= {f"{name}, elsewhere": launched(stub, every[name], 1) for name in SOME}
        facts = {"calls": found, "errors": errors(stub, plain), "hooked": {}}
        for name in ("launch_enter_hook", "launch_exit_hook"):
            seen: list[Any] = []
            with mock.patch.object(triton.knobs.runtime, name, seen.append):
                made_by(stub, plain, 0)
            facts["hooked"][name] = len(seen)
        print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
