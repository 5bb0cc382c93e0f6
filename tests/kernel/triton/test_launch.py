"""The launches of the compiled kernels, recorded by a stub of NVIDIA's driver; no GPU is needed.

Triton's own launcher passes the arguments; see tests/support/triton/launches.py. That these and the threads are the right
ones is seen where the emulator takes the place of the stub.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.helpers import Output
from tests.support.triton.cases import needs_stub, needs_triton

pytestmark = [needs_triton, *needs_stub]

Facts = dict[str, Any]
STREAMS = {0: 0, 1: 0x7F12_3456_7890, 2: 2}
KERNELS = {
    "in place": ["rotate"],
    "far": ["rotate"],
    "empty": [],
    "slots": ["rotate"],
    "rms_norm backward": ["rotate"],
    "frequencies": ["add_angles"],
    "gates": ["add_gates"],
    "running": ["add_tokens"] * 3,
    "running, a token": ["add_tokens"],
}


@pytest.fixture
def found(output_of: Output) -> Facts:
    return output_of("tests.support.triton.launches")


def every_call(found: Facts) -> Iterator[tuple[str, Facts, list[str], int]]:
    """Yield name, facts, kernels and device of each call."""
    for name, call in found["calls"].items():
        own = name.removesuffix(", elsewhere")
        yield name, call, KERNELS[own], int(own != name)
    for name, call in found["errors"].items():
        yield name, call, KERNELS["in place"], 2


def test_every_program_runs_where_it_is_meant_to(found: Facts) -> None:
    """Kernels, grids, shared memory, device and stream, the same three times.

    A call compiles; it reuses its plan; a hook observes its launches.
    """
    for name, call, kernels, device in every_call(found):
        assert call["first"] == call["again"] == call["observed"], name
        assert [one["kernel"] for one in call["first"]] == kernels, name
        for one in call["first"]:
            assert (one["device"], one["stream"]) == (device, STREAMS[device]), name
            assert one["shared"][0] == one["shared"][1], name
            assert one["attributes"] == 0, name


def test_a_second_call_compiles_and_looks_up_nothing(found: Facts) -> None:
    """It compiles and loads no kernel, and only Triton's own runner looks up the device; nor with other values."""
    for name, call, kernels, _ in every_call(found):
        compiled, loaded, _ = call["counts, first"]
        assert compiled == loaded or name in found["errors"]
        assert bool(compiled) == (name not in ("far", "empty", *found["errors"]))
        assert call["counts, again"] == [0, 0, 0], name
        assert call["counts, observed"] == [0, 0, len(kernels)], name
        assert call["hooked"] == kernels, name


def test_after_an_error_of_the_driver_the_next_call_works(found: Facts) -> None:
    """The error is raised, the device of the caller stays current, and no compilation is lost."""
    for name, code in (("load", 2), ("launch", 700), ("observed launch", 700)):
        error = found["errors"][name]
        assert error["message"] == f"Triton Error [CUDA]: error {code}"
        assert error["left"] == [0, 0]


def test_a_function_as_launch_hook_is_called(found: Facts) -> None:
    """A function in place of a chain of hooks, before or after a launch, is called once."""
    assert found["hooked"] == {"launch_enter_hook": 1, "launch_exit_hook": 1}


# --- plans and promises, without a driver ---------------------------------------------------------


def test_a_launch_is_that_of_its_call_alone(output_of: Output) -> None:
    """Of two drawn calls that differ in one property of one argument, each launches what it launches in a new process.

    What is promised to the compiler is true of every tensor: its dtype, and what divides its address and strides.
    """
    facts = output_of("tests.support.triton.plans")["pairs"]
    assert facts["wrong"] == []
    assert min(facts[name] for name in ("launches", "differ")) > 300
    assert facts["promises"] > 1000


def test_what_triggers_a_compilation(output_of: Output) -> None:
    """A new dtype, kind of call or alignment, a single head, and few tokens, trigger a compilation.

    Other lengths, offsets, rows and other numbers of heads do not.
    """
    assert output_of("tests.support.triton.plans")["counted"] == {
        "lengths": 2,  # few tokens, and more
        "lengths, contiguous": 2,
        "offsets": 2,
        "rows and heads": 2,
        "ids": 4,
        "unaligned": 5,
        "one head": 6,
        "another dtype": 7,
        "running, one chunk": 8,
        "running, chunks": 11,
    }
