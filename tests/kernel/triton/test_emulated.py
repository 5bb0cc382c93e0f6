"""The compiled Triton kernels, executed on the CPU by the emulator of tests/support/triton/ptx; no GPU is needed.

Triton's own launcher passes the parameters, as to a GPU. The threads of a warp run together, and warps in
random order. Every access must be aligned and lie within the elements of the tensors that were passed,
and programs must have no races; see the faults that are planted.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.helpers import Output
from tests.support.triton.cases import needs_stub, needs_triton
from tests.support.triton.emulated import PLANTS
from tests.support.triton.ptx.definitions import is_tested
from tightrope.backends import cpu

pytestmark = [needs_triton, *needs_stub]

Facts = dict[str, Any]
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")
CORE = [(f"{target}:1", "core") for target in TARGETS]
EVERY = [(f"{target}:{seed}", "calls") for seed, target in enumerate(TARGETS)]
LONG = (pytest.mark.slow, pytest.mark.emulated)


@pytest.fixture(
    params=[
        *[one if "sm_90" in one[0] else pytest.param(one, marks=pytest.mark.slow) for one in CORE],
        *[pytest.param(one, marks=LONG) for one in EVERY],
    ],
    ids="-".join,
)
def executed(request: pytest.FixtureRequest, output_of: Output) -> Facts:
    """Calls that contain every pair of values of any two options: in the fast run some for sm_90."""
    return output_of("tests.support.triton.emulated", *request.param)


def test_results_are_those_of_the_definition(executed: Facts) -> None:
    """They are compared with the definition in float64, as under the interpreter."""
    calls = executed["found"]["calls"]
    wrong = {name: call["error"] for name, call in calls.items() if call["error"]}
    assert wrong == {}
    assert len(calls) > 30
    # In float64 with an activation the definition runs.
    for call in calls.values():
        runs = call["case"]["dtype"] != "torch.float64" or call["case"]["act"] == "none"
        assert (call["launches"] > 0) == runs, call["case"]


def test_plain_rotations_have_the_bits_of_the_cpu_kernel(executed: Facts) -> None:
    """Without activation and gate, in float32, bfloat16 and float16."""
    bits = executed["found"]["bits"]
    assert len(bits) >= 9
    if cpu.instruction_set() is not None:
        assert {name: differ for name, differ in bits.items() if differ} == {}


def test_every_instruction_is_tested(executed: Facts) -> None:
    """Each opcode that was executed has a test of its own, in tests/support/triton/ptx."""
    assert len(executed["opcodes"]) > 50
    assert [name for name in executed["opcodes"] if not is_tested(name)] == []


@pytest.mark.slow
@pytest.mark.emulated
def test_all_gpus_give_the_same_bits(output_of: Output) -> None:
    """But for sums over channels in float32, whose order the compiler chooses; see docs/gpu.md."""
    found = [output_of("tests.support.triton.emulated", *one)["found"]["calls"] for one in EVERY]
    for name, call in found[0].items():
        if call["case"]["act"] not in ("softmax", "rms_norm"):
            assert len({other[name]["digest"] for other in found}) == 1, call["case"]


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("seed, target", list(enumerate(TARGETS, 5)))
def test_the_tests_of_the_kernels_pass(seed: int, target: str, output_of: Output) -> None:
    """All other tests of the kernels pass, where the emulator takes the place of the interpreter."""
    run = output_of("tests.support.triton.emulated", f"{target}:{seed}", "tests")
    assert run["found"]["failed"] == []
    assert len(run["found"]["passed"]) > 250
    assert run["launches"] > 500
    assert [name for name in run["opcodes"] if not is_tested(name)] == []


# Of these, a thread computes the place of its token in 30 and the places of its channels in 40; angles take 120 more.
MOST_BEFORE = 90
MOST = 260


def test_a_decoded_token_is_loaded_early(output_of: Output) -> None:
    """Until the first load nothing is under way, and a token takes as long as the instructions of one thread.

    Loads come before the angles, a program has one token and two heads, of q or of k, and two pairs per thread.
    """
    found = output_of("tests.support.triton.emulated", "sm_90", "decode")["found"]
    assert len(found) == 4
    for name, (before, every) in found.items():
        assert 0 < before <= MOST_BEFORE, name
        assert before < every <= MOST, name


def test_sums_over_channels_have_one_order(output_of: Output) -> None:
    """In float32 the order shows in the last bits; strides and the number of tokens do not change it."""
    found = output_of("tests.support.triton.emulated", "sm_90", "sums")["found"]
    assert {name: len(set(hashes)) for name, hashes in found.items()} == dict.fromkeys(found, 1)
    assert len(found) == 2


@pytest.mark.parametrize("name", PLANTS)
def test_faults_in_the_machine_code_are_caught(name: str, output_of: Output) -> None:
    """A fault is planted into the PTX of a kernel, before it is executed."""
    planted, wanted = (
        output_of("tests.support.triton.emulated", "sm_90", "planted"),
        PLANTS[name].error,
    )
    error, count = (planted["found"][name][key] for key in ("error", "count"))
    assert (count > 0) == (not name.startswith("nothing"))
    assert bool(error) == bool(wanted)
    assert re.match(wanted, error), error
