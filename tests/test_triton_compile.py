"""What the Triton kernels compile to, and how often: for NVIDIA sm_90 and AMD gfx942, without either."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tolerances

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@cache
def found() -> dict[str, Any]:
    """One process for all tests: it compiles each kernel once."""
    script = Path(__file__).with_name("triton_without_gpu.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# Kernels whose every access to a large tensor is of 16 bytes: name -> the loads that are not, which are
# of phase words, positions and partial sums.
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


@pytest.mark.parametrize("name", WHOLE)
def test_accesses_are_of_16_bytes(name: str) -> None:
    facts = found()["compiled"][name]
    assert facts["sm_90"]["wide stores"] == facts["sm_90"]["stores"]
    words = 0 if name == "tables" else 1
    assert facts["sm_90"]["loads"] - facts["sm_90"]["wide loads"] == words
    # Where a wavefront has 64 lanes too.
    assert facts["gfx942"]["wide"] >= facts["sm_90"]["wide stores"]


def test_registers_suffice_and_nothing_is_double() -> None:
    for name, by_target in found()["compiled"].items():
        for target, facts in by_target.items():
            assert facts["spills"] == 0, (name, target)
            assert not facts["float64"], (name, target)
    plain = found()["compiled"]["bfloat16"]["sm_90"]
    assert (
        plain["registers"] <= 128
    )  # four programs of 128 threads on a multiprocessor at the least


def test_no_fast_approximations_and_no_atomics() -> None:
    for name, by_target in found()["compiled"].items():
        assert by_target["sm_90"]["approximations"] == [], name
        assert by_target["sm_90"]["atomics"] == 0, name


def test_what_compiles_anew() -> None:
    """Lengths, offsets, rows and heads do not: only a type, a kind of call or an alignment does."""
    counts = found()["counted"]
    assert counts["lengths of one layout"] == 1
    assert counts["lengths, contiguous"] == 1
    assert counts["offsets"] == 1
    assert counts["rows and heads"] == 1
    assert counts["ids"] == 2
    assert counts["unaligned"] == 3
    assert counts["one head"] == 4
    assert counts["another dtype"] == 5


@cache
def evaluated() -> dict[str, Any]:
    """Pieces of the kernels, as the PTX for sm_90 computes them: see triton_pieces."""
    script = Path(__file__).with_name("triton_pieces.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_compiled_angles_are_exact() -> None:
    """Over all phases, by the instructions that a GPU is given."""
    found = evaluated()["angles"]
    assert found["phases"] > 1 << 17
    assert found["cosine"] <= tolerances.value("float32 angle")
    assert found["sine"] <= tolerances.value("float32 angle")


def test_the_compiled_exponential_is_exact() -> None:
    found = evaluated()["elementary"]
    assert found["exp"] <= tolerances.value("compiled exp")
    assert found["sigmoid"] <= tolerances.value("compiled sigmoid")
    # Units of the smallest number there is.
    assert found["exp, subnormal"] <= 1
    assert found["special"] == ["inf", "0.0", "nan", "1.0"]
