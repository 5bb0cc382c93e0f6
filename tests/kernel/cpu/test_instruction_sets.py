"""Test the choice of an instruction set; run the operator's tests with each set of this machine."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tightrope
from tests.support import tolerances
from tests.support.helpers import ROOT, on
from tightrope import RopeSpec
from tightrope.activations import ACTS, RMSNorm
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_
from tightrope.gates import Slope

TESTS = ROOT / "tests"
MISSING = tightrope.backends.why_not()["cpu"]
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no native library: {MISSING}")

SETS = cpu.instruction_sets()
# The ordinary run of the tests covers the instruction set in use.
OTHERS = [
    name if name == "avx2" else pytest.param(name, marks=pytest.mark.slow)
    for name in SETS
    if name != cpu.instruction_set()
]


def python(*arguments: str, isa: str) -> subprocess.CompletedProcess[str]:
    """Run a new Python process with an instruction set forced by the environment."""
    paths = [str(Path(tightrope.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    # This process may be a worker of a parallel test run, which the new process must not join.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"TIGHTROPE_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("isa", ["", *SETS])
def test_the_environment_forces_a_set(isa: str) -> None:
    program = "from tightrope.backends import cpu; print(cpu.instruction_set())"
    done = python("-c", program, isa=isa)
    assert (done.returncode, done.stdout.strip()) == (0, isa or SETS[0]), done.stderr


@pytest.mark.parametrize("name", ["avx1024", "AVX2", "avx2 ", "best"])
def test_an_unknown_set_is_an_import_error(name: str) -> None:
    """In a process of its own, because torch 2.10 registers no operator twice."""
    program = """
try:
    import tightrope
except ImportError as error:
    print(error)
"""
    start = f"[tightrope] TIGHTROPE_CPU_ISA must be one of {', '.join(SETS)} on this processor"
    done = python("-c", program, isa=name)
    assert done.stdout.splitlines() == [f"{start} but got {name!r}."], done.stderr


# Laws whose code the sets do not share; one process runs all that are slow.
OWN_LAWS = (
    "laws/test_invariance.py",
    "laws/test_calls.py::test_destinations_agree",
    "laws/test_calls.py::test_layouts_and_strides_agree",
    "laws/test_calls.py::test_the_kernel_is_near_the_definition",
    "laws/test_slots.py",
    "unit/functional/test_tables.py",
    "unit/test_activations.py",
)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "files", [("laws/test_numerics.py",), pytest.param(OWN_LAWS, marks=pytest.mark.slow)]
)
def test_the_operator_under_each_set(files: tuple[str, ...], name: str) -> None:
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-k", "not reference"]
    done = python("-m", "pytest", *options, *(str(TESTS / file) for file in files), isa=name)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert int(counted[1]) > 10
    assert "no such backend" not in done.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SETS)
def test_opposite_angles_have_the_same_size(name: str, dtype: torch.dtype) -> None:
    """So an inverse has the bits of negated positions."""
    cpu.use_instruction_set(name)
    spec, ids = RopeSpec(64, base=100.0), torch.arange(1, 2000)
    x = torch.randn(1, 1, 1999, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    inverse = on("cpu", rotate, x, spec, ids, inverse=True)
    assert torch.equal(inverse, on("cpu", rotate, x, spec, -ids))


@pytest.mark.parametrize("act", ["sin", "cos"])
@pytest.mark.parametrize("name", SETS)
def test_sines_of_every_size_lose_no_digits(name: str, act: str) -> None:
    """Sine and cosine are accurate near multiples of π/2, where one of them is nearly 0.

    Large multiples are hardest. Beyond |x| = 8192 another algorithm is used.
    """
    multiples = torch.arange(-5350, 5351, dtype=torch.float64) * (torch.pi / 2)
    near = multiples.float()
    beside = [near, *(near.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf))]
    generator = torch.Generator().manual_seed(0)
    anywhere = (torch.rand(200_000, generator=generator) - 0.5) * 16800
    edge = torch.linspace(8180, 8200, 20_000)
    x = torch.cat((*beside, anywhere, edge, -edge))
    x = x[: x.numel() // 8 * 8].reshape(1, 1, -1, 8).requires_grad_()
    exact = x.detach().double()
    cpu.use_instruction_set(name)
    # At position 0 the rotation is the identity.
    spec, where = RopeSpec(8, rotary_dim=2), torch.zeros(x.shape[2], dtype=torch.int64)
    y = on("cpu", rotate, x, spec, where, act=act)
    (slope,) = torch.autograd.grad(y.sum(), x)
    wanted = (exact.sin(), exact.cos()) if act == "sin" else (exact.cos(), -exact.sin())
    for got, want in zip((y.detach(), slope), wanted, strict=True):
        # Both sides may be 0, because x = 0 is among the multiples.
        error = (got.double() - want).abs()
        assert bool((error <= tolerances.value("compiled sine") * want.abs()).all())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "dtype, act",
    [
        (torch.float64, None),  # with an act or a gate, the definition
        *itertools.product((torch.float32, torch.bfloat16, torch.float16), (None, *ACTS)),
    ],
)
def test_sets_give_the_same_bits(dtype: torch.dtype, act: str | None) -> None:
    """They do the same operations in the same order."""
    if len(SETS) < 2:
        pytest.skip(f"this processor has only {', '.join(SETS)}")
    generator = torch.Generator().manual_seed(0)
    # Widths that fill registers, that leave remainders, and that take several iterations.
    for width, interleaved in itertools.product(
        (2, 6, 14, 24, 46, 64, 80, 90, 128, 222, 320), (False, True)
    ):
        x = 4 * torch.randn(2, 9, 5, width, generator=generator, dtype=torch.float64).to(dtype)
        spec = RopeSpec(width, rotary_dim=max(2, width - 4), interleaved=interleaved)
        gate = None if act is None else Slope(torch.randn(9, width, generator=generator) / 8)
        results = []
        for name in SETS:
            cpu.use_instruction_set(name)
            for one in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
                weight = torch.linspace(0.5, 2, width).requires_grad_()
                f = RMSNorm(weight) if act == "rms_norm" else act
                options: dict[str, Any] = {"act": f, "gate": gate}
                leaves = [one.clone().requires_grad_(), *([weight] if act == "rms_norm" else [])]
                y = on("cpu", rotate, leaves[0], spec, 3 if gate else 8191, **options)
                results.append([y.detach(), *torch.autograd.grad(y.sum(), leaves)])
                with torch.no_grad():
                    inside = on("cpu", rotate_, one.clone(), spec, 3 if gate else 8191, **options)
                tolerances.assert_same_bits(inside, y.detach())
        for result in results[1:]:
            tolerances.assert_same_bits(result, results[0])
