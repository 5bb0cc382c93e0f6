"""The compiled Triton kernels, executed on the CPU by the emulator of tests/emulator; no GPU is needed.

Triton's own launcher passes the parameters, as to a GPU. The threads of a warp run together, and warps in
random order. Every access must be aligned and lie within the elements of the tensors that were passed,
and programs must have no races; tests/emulator shows that such faults are found.
"""

from __future__ import annotations

import pytest

from tests.emulator.definitions import is_tested
from tests.support.helpers import Output
from tests.support.matrix import EMULATED
from tests.support.triton.cases import needs_stub, needs_triton
from tightrope.backends import cpu

pytestmark = [needs_triton, *needs_stub]

SCRIPT = "tests.support.triton.emulated"
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")
RUNS = [
    ("sm_90:1", "core"),
    pytest.param("sm_80:1", "more", marks=pytest.mark.slow),
    *[
        pytest.param(f"{name}:{seed}", "tests", marks=EMULATED)
        for seed, name in enumerate(TARGETS, 5)
    ],
]


@pytest.mark.parametrize("target, what", RUNS)
def test_the_tests_of_the_kernels_pass(target: str, what: str, output_of: Output) -> None:
    """Where the emulator takes the place of the interpreter: in the fast run some, for sm_90.

    Each opcode that is executed has a test of its own, in tests/emulator.
    """
    run = output_of(SCRIPT, target, what)
    assert run["found"]["failed"] == []
    least, launches = {"core": (25, 50), "more": (10, 50), "tests": (400, 700)}[what]
    assert len(run["found"]["passed"]) > least
    bits = [name for name in run["found"]["passed"] if "bits_of_the_cpu_kernel" in name]
    assert bits or cpu.instruction_set() is None
    assert run["launches"] > launches
    assert len(run["opcodes"]) > 50
    assert [name for name in run["opcodes"] if not is_tested(name)] == []


# Of these, a thread computes the place of its token in 30 and the places of its channels in 40; angles take 120 more.
MOST_BEFORE = 90
MOST = 260


def test_a_decoded_token_is_loaded_early(output_of: Output) -> None:
    """Until the first load nothing is under way, and a token takes as long as the instructions of one thread.

    Loads come before the angles, a program has one token and two heads, of q or of k, and two pairs per thread.
    """
    found = output_of(SCRIPT, "sm_90", "decode")["found"]
    assert len(found) == 4
    for name, (before, every) in found.items():
        assert 0 < before <= MOST_BEFORE, name
        assert before < every <= MOST, name
