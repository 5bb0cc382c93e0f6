"""Machine code of the Triton kernels for NVIDIA sm_90 and AMD gfx942; no GPU is needed.

For sm_90, the accuracy of compiled functions and the number of compilations are tested too.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.support import tolerances
from tests.support.helpers import Output, version_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# ptxas before that of Triton 3.7 keeps up to four registers on the stack across 64-bit divisions that come before
# the loop over tokens, and allocates more registers to that loop.
OLD = version_of("triton") < (3, 7)
# ptxas before that of Triton 3.9 also keeps part of what the backward pass of a norm loads on the stack, 280 to 328
# bytes of each thread, and loads one member of a pair at a time.
SPILLS_NORMS = version_of("triton") < (3, 9)


@pytest.fixture
def some(output_of: Output) -> dict[str, Any]:
    """Facts about most kernels for sm_90 and some for gfx942, and the number of compilations."""
    return output_of("tests.support.triton.compiled", "some")


@pytest.fixture
def every(output_of: Output) -> dict[str, Any]:
    """Facts about all kernels for both targets."""
    return output_of("tests.support.triton.compiled")


@pytest.fixture(params=["some", pytest.param("every", marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Facts about the kernels by name and target: in the fast run some, in the slow run every one."""
    facts: dict[str, Any] = request.getfixturevalue(request.param)["compiled"]
    return facts


# Kernels that access large tensors only in units of 16 bytes. Their only other load is that of the
# phase words, which "tables" does not have.
WHOLE = (
    "bfloat16",
    "bfloat16 interleaved",
    "float32",
    "float32 interleaved",
    "slice",
    "silu",
    "softmax",
    "silu backward",
    "rms_norm",
    "log gate",
    "slopes",
    "tables",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_accesses_are_of_16_bytes(name: str, every: dict[str, Any]) -> None:
    facts = every["compiled"][name]
    assert facts["sm_90"]["wide stores"] == facts["sm_90"]["stores"]
    words = 0 if name == "tables" else 1
    assert facts["sm_90"]["loads"] - facts["sm_90"]["wide loads"] == words
    # Stores are as wide on AMD, where a wavefront has 64 lanes.
    assert facts["gfx942"]["wide"] >= facts["sm_90"]["wide stores"]


# In each step of a loop, a thread loads 16 bytes twice.
LOOP = """
        /*0000*/                   MOV R5, RZ ;
.L_x_1:
        /*0010*/                   LDG.E.128 R12, desc[UR4][R2.64] ;
        /*0020*/               @P0 LDG.E.128 R8, desc[UR4][R2.64+-0x10] ;
        /*0030*/                   FADD R7, R13, R13 ;
        /*0040*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0050*/              @!P2 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_loads_are_counted_until_the_first_use() -> None:
    from tests.support.triton.machine_code import in_flight

    assert in_flight(LOOP) == 32
    assert in_flight(LOOP.replace("R13, R13", "R5, R5")) == 32
    assert in_flight(LOOP.replace("@P0 LDG", "FADD R7, R13, R13 ;\n /*0018*/ LDG")) == 16
    assert in_flight(LOOP.replace("`(.L_x_1)", "0x20")) == 16
    assert in_flight(LOOP.replace("BRA `(.L_x_1)", "BRA 0x60")) == 0


@pytest.mark.parametrize(
    "name", ["bfloat16", "float32", "float32 interleaved", "M-RoPE", "tables", "phases"]
)
def test_two_heads_are_under_way(name: str, some: dict[str, Any]) -> None:
    """The kernel loads both members of the pairs of two heads before it rotates the first head."""
    assert some["compiled"][name]["sm_90"]["in flight"] == 4 * 16


@pytest.mark.slow
def test_two_interleaved_heads_are_under_way(every: dict[str, Any]) -> None:
    assert every["compiled"]["bfloat16 interleaved"]["sm_90"]["in flight"] == 4 * 16


def test_heads_with_more_to_do_are_under_way(some: dict[str, Any]) -> None:
    for name in ("silu", "softmax", "rms_norm", "log gate", "slopes", "silu backward"):
        assert some["compiled"][name]["sm_90"]["in flight"] >= 2 * 16, name
    for name in ("frequencies", "positions", "rms_norm backward"):
        least = 16 if SPILLS_NORMS and name == "rms_norm backward" else 4 * 16
        assert some["compiled"][name]["sm_90"]["in flight"] >= least, name


def test_registers_suffice_and_nothing_is_double(compiled: dict[str, Any]) -> None:
    """Nothing spills; only phases from data, and their gradients, are computed in float64."""
    for name, by_target in compiled.items():
        for target, facts in by_target.items():
            few = 16 if OLD and name == "running, totals" else 0
            few = 328 if SPILLS_NORMS and (name, target) == ("rms_norm backward", "sm_90") else few
            assert facts["spills"] <= few, (name, target)
            double = name.startswith(("running", "given")) and name != "running, between"
            assert facts["float64"] == double, (name, target)
    # Of 65,536 registers of a multiprocessor, 80 per thread leave room for six programs of 128
    # threads, and 128 for four.
    usual = {"bfloat16", "bfloat16 interleaved", "float32", "M-RoPE", "tables"}
    for name in usual & compiled.keys():
        assert compiled[name]["sm_90"]["registers"] <= 80, name
    for name in ("silu", "silu backward", "softmax", "rms_norm", "rms_norm backward", "slopes"):
        assert compiled[name]["sm_90"]["registers"] <= 128, name
    # Sums over tokens have few programs, and hold what they load ahead.
    for name, by_target in compiled.items():
        if name.startswith(("running", "given")):
            assert by_target["sm_90"]["registers"] <= (208 if OLD else 192), name


def test_no_fast_approximations_and_no_atomics(compiled: dict[str, Any]) -> None:
    for name, by_target in compiled.items():
        assert by_target["sm_90"]["approximations"] == [], name
        assert by_target["sm_90"]["atomics"] == 0, name


def test_what_triggers_a_compilation(some: dict[str, Any]) -> None:
    """A new dtype, kind of call or alignment, a single head, and few tokens, trigger a compilation.

    Other lengths, offsets, rows and other numbers of heads do not.
    """
    counts = some["counted"]
    assert counts["lengths of one layout"] == 2  # few tokens, and more
    assert counts["lengths, contiguous"] == 2
    assert counts["offsets"] == 2
    assert counts["rows and heads"] == 2
    assert counts["ids"] == 4
    assert counts["unaligned"] == 5
    assert counts["one head"] == 6
    assert counts["another dtype"] == 7
    assert counts["running, one chunk"] == 8
    assert counts["running, several chunks"] == 11


@pytest.fixture
def evaluated(output_of: Output) -> dict[str, Any]:
    """Return errors of parts of the kernels, evaluated from their PTX for sm_90; see pieces.py in tests/support/triton."""
    return output_of("tests.support.triton.pieces")


def test_the_compiled_angles_are_exact(evaluated: dict[str, Any]) -> None:
    """Cosines and sines of random and critical phases, evaluated from PTX, are within the bound."""
    found = evaluated["angles"]
    assert found["phases"] > 1 << 17
    assert found["cosine"] <= tolerances.value("float32 angle")
    assert found["sine"] <= tolerances.value("float32 angle")


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_compiled_phase_words_have_the_bits_of_the_definition(
    dtype: str, evaluated: dict[str, Any]
) -> None:
    """Evaluated from PTX; the products of all fused multiply-adds are exact."""
    found = evaluated["words"][dtype]
    assert found["angles"] > 1 << 13
    assert found["wrong"] == 0


@pytest.mark.slow
def test_the_compiled_exponential_is_exact(evaluated: dict[str, Any]) -> None:
    found = evaluated["elementary"]
    assert found["exp"] <= tolerances.value("compiled exp")
    assert found["sigmoid"] <= tolerances.value("compiled sigmoid")
    # In units of the smallest positive float32.
    assert found["exp, subnormal"] <= 1
    assert found["special"] == ["inf", "0.0", "nan", "1.0"]
