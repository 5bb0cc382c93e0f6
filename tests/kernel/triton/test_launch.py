"""The launches of the compiled kernels, recorded by a stub of NVIDIA's driver; no GPU is needed.

Triton's own launcher passes the arguments; see tests/support/triton/launches.py. They are compared with the tensors and
groups that the same calls pass to the interpreter, whose results other tests check.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.helpers import Output
from tests.support.triton.cases import needs_stub, needs_triton

pytestmark = [needs_triton, *needs_stub]

Facts = dict[str, Any]
WAYS = ("first", "again", "observed")


@pytest.fixture(params=["some", pytest.param("every", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, output_of: Output) -> Facts:
    """Launches of calls of every kernel: in the fast run of some calls, in the slow run of all."""
    return output_of(
        "tests.support.triton.launches", *([request.param] if request.param == "some" else [])
    )


def every_launch(found: Facts) -> Iterator[tuple[str, Facts, Facts]]:
    """Yield a name, the launch that is meant and the one that was made."""
    for name, call in [*found["calls"].items(), *found["errors"].items()]:
        for way in WAYS:
            meant, made = call[way]["meant"], call[way]["made"]
            assert len(meant) == len(made), (name, way)
            for each in zip(meant, made):
                yield f"{name}, {way}", *each


def test_every_parameter_arrives(found: Facts) -> None:
    """Addresses, integers and fractions are those that are meant, in the order of the machine code.

    A call is made three times: it compiles; it reuses its plan; a hook observes its launches. Some have large
    and negative offsets, and amplitudes that float32 rounds.
    """
    kernels = set()
    for name, meant, made in every_launch(found):
        kernels.add(made["kernel"])
        count = len(meant["values"])
        pairs = dict(zip(meant["names"], zip(meant["values"], made["values"])))
        assert {k: v for k, v in pairs.items() if v[0] != v[1]} == {}, name
        assert made["types"][:count] == list(meant["types"]), name
        # Memory that Triton would allocate for a kernel; none of these needs any.
        assert made["types"][count:] in (["*"], ["*", "*"]), name
        assert set(made["values"][count:]) == {0}, name
    assert kernels == {"rotate", "add_angles", "add_gates", "add_tokens", "copy_values"}


def test_every_program_runs_where_it_is_meant_to(found: Facts) -> None:
    """Kernel, grid, threads, shared memory, device and stream are those that are meant."""
    devices = set()
    for name, meant, made in every_launch(found):
        for key in ("kernel", "grid", "block", "device"):
            assert made[key] == meant[key], (name, key)
        # The machine code requires as many threads.
        assert made["block"] == [made["threads"], 1, 1], name
        assert made["shared"][0] == made["shared"][1], name
        assert made["attributes"] == 0, name
        assert made["stream"] == {0: 0, 1: 0x7F12_3456_7890, 2: 2}[made["device"]], name
        devices.add(made["device"])
    assert devices == {0, 1, 2}


def test_kernels_rely_only_on_the_alignment_that_tensors_have(found: Facts) -> None:
    seen = set()
    for name, meant, made in every_launch(found):
        assert made["divisors"] == meant["divisors"], name
        assert made["divisible"], name
        seen.add((made["kernel"], meant["divisors"][0]))
    assert {("rotate", 1), ("rotate", 16)} <= seen


def test_a_second_call_compiles_and_looks_up_nothing(found: Facts) -> None:
    """It compiles and loads no kernel, and only Triton's own runner looks up the device."""
    for name, call in found["calls"].items():
        launches = len(call["first"]["made"])
        assert launches > 0 or name == "in place, empty"
        compiled, loaded, _ = call["first"]["counts"]
        assert compiled == loaded
        assert call["again"]["counts"] == [0, 0, 0], name
        assert call["observed"]["counts"] == [0, 0, launches], name
        assert call["hooked"] == [made["kernel"] for made in call["observed"]["made"]], name


def test_other_values_compile_nothing(found: Facts) -> None:
    names = [f"in place, {how}" for how in ("far", "before", "shorter", "empty")]
    for name in (*names, "frequencies, parts", "gates, parts"):
        assert found["calls"][name]["first"]["counts"] == [0, 0, 0], name
    for name in ("in place", "in place, short", "frequencies", "gates"):
        assert found["calls"][name]["first"]["counts"][:2] == [1, 1], name


def test_after_an_error_of_the_driver_the_next_call_works(found: Facts) -> None:
    """The error is raised, the device of the caller stays current, and no compilation is lost.

    `every_launch` also compares the launches of these next calls.
    """
    for name, code in (("load", 2), ("launch", 700), ("observed launch", 700)):
        error = found["errors"][name]
        assert error["message"] == f"Triton Error [CUDA]: error {code}"
        assert error["left"] == 0
        assert error["current"] == 0
        assert len(error["next"]) == 1
        assert error["next"] == error["first"]["made"]
        assert error["first"]["counts"][:2] == [0, 0]


def test_a_function_as_launch_hook_is_called(found: Facts) -> None:
    """A function in place of a chain of hooks, before or after a launch, is called once."""
    assert found["hooked"] == {"launch_enter_hook": 1, "launch_exit_hook": 1}
