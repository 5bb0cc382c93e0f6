"""Machine code of the Triton kernels for NVIDIA sm_90 and AMD gfx942; no GPU is needed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.command import python
from tests.support.helpers import Output, version_of
from tests.support.matrix import EMULATED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# ptxas before that of Triton 3.7 keeps up to four registers on the stack across 64-bit divisions that come before
# the loop over tokens, and allocates more registers to that loop.
OLD = version_of("triton") < (3, 7)
# ptxas before that of Triton 3.9 also keeps part of what the backward pass of a norm loads on the stack, 280 to 328
# bytes of each thread, and loads one member of a pair at a time.
SPILLS_NORMS = version_of("triton") < (3, 9)


@pytest.fixture(params=["some", pytest.param("every", marks=EMULATED)])
def compiled(request: pytest.FixtureRequest, output_of: Output) -> dict[str, Any]:
    """Facts about kernels by name and target: some for sm_90 and fewer for gfx942, with `make emulate` all."""
    return output_of("tests.support.triton.compiled", *[request.param] * (request.param == "some"))


class Bounds(NamedTuple):
    """Bounds of the code of a kernel for sm_90.

    Attributes:
        registers: the most of a thread. Of 65,536 of a multiprocessor, 80 leave room for six programs of 128 threads, and
            128 for four.
        in_flight: the least bytes that a thread loads before it uses the first of them: 64 are both members of the
            pairs of two heads.
        narrow: the number of loads that are not of 16 bytes, such as of phase words; None if some others are not.
    """

    registers: int
    in_flight: int
    narrow: int | None = 1


BOUNDS = {
    **dict.fromkeys(("bfloat16", "bfloat16 interleaved", "float32"), Bounds(80, 64)),
    **dict.fromkeys(("silu", "silu backward", "softmax", "rms_norm", "slopes"), Bounds(128, 32)),
    "float32 interleaved": Bounds(255, 64),
    "slice": Bounds(255, 0),
    "tables": Bounds(80, 64, 0),
    "M-RoPE": Bounds(80, 64, None),
    "phases": Bounds(255, 64, None),
    "log gate": Bounds(255, 32),
    "float8": Bounds(128, 64, None),
    "rms_norm backward": Bounds(128, 16 if SPILLS_NORMS else 64, None),
    "frequencies": Bounds(255, 64, None),
    "positions": Bounds(255, 64, None),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_registers_and_loads(name: str, compiled: dict[str, Any]) -> None:
    if name not in compiled:  # in the fast run
        return
    facts, bounds = compiled[name]["sm_90"], BOUNDS[name]
    assert facts["registers"] <= bounds.registers
    assert facts.get("in flight", 0) >= bounds.in_flight
    if bounds.narrow is not None:
        assert facts["wide stores"] == facts["stores"]
        assert facts["loads"] - facts["wide loads"] == bounds.narrow
        # Stores are as wide on AMD, where a wavefront has 64 lanes.
        if amd := compiled[name].get("gfx942"):
            assert amd["wide"] >= facts["wide stores"]


def test_nothing_spills_approximates_or_is_double(compiled: dict[str, Any]) -> None:
    """Only phases from data, and their gradients, are computed in float64."""
    assert len(compiled) > 14
    for name, by_target in compiled.items():
        of_data = name.startswith(("running", "given"))
        for target, facts in by_target.items():
            few = 16 if OLD and name == "running, totals" else 0
            few = 328 if SPILLS_NORMS and (name, target) == ("rms_norm backward", "sm_90") else few
            assert facts["spills"] <= few, (name, target)
            assert facts["float64"] == (of_data and name != "running, between"), (name, target)
        assert by_target["sm_90"]["approximations"] == [], name
        assert by_target["sm_90"]["atomics"] == 0, name
        # Sums over tokens have few programs, and hold what they load ahead.
        assert by_target["sm_90"]["registers"] <= (208 if OLD else 192) or not of_data, name


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.skipif(SPILLS_NORMS, reason="the table is that of Triton 3.9")
def test_the_table_of_the_documentation() -> None:
    """It is what its command writes, and nothing in it spills."""
    table = python("-m", "tests.support.triton.compiled", "table").stdout.strip()
    page = Path(__file__).parents[3] / "docs" / "gpu.md"
    assert table in page.read_text(encoding="utf-8")
    assert set(re.findall(r"\d+ / (\d+);", table)) == {"0"}


def test_loads_and_stores_are_counted_by_their_bytes() -> None:
    from tests.support.triton.machine_code import accesses_of

    more = (
        LOOP
        + "LDG.E.U16.CONSTANT R1, [R2]; LDG.E.64 R4, [R2]; STG.E.U8 desc[UR4][R2.64], R8; LDG.E R1"
    )
    assert accesses_of(more) == {"LDG": {16: 2, 2: 1, 8: 1, 4: 1}, "STG": {16: 1, 1: 1}}


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
