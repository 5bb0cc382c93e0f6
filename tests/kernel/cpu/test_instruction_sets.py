"""Test the choice of an instruction set; run laws with each set of this machine, which gives the same bits."""

import re

import pytest
import torch

import tightrope
from tests.support import calls, tolerances
from tests.support.calls import CASES, Call
from tests.support.command import python
from tests.support.helpers import ROOT, on
from tests.support.matrix import OTHER_SETS
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.functional import rotate

MISSING = tightrope.backends.why_not()["cpu"]
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no native library: {MISSING}")

SETS = cpu.instruction_sets()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("isa", ["", *SETS])
def test_the_environment_forces_a_set(isa: str) -> None:
    program = "from tightrope.backends import cpu; print(cpu.instruction_set())"
    done = python("-c", program, TIGHTROPE_CPU_ISA=isa)
    assert (done.returncode, done.stdout.strip()) == (0, isa or SETS[0]), done.stderr


@pytest.mark.parametrize("name", ["AVX2", "avx2 "])
def test_an_unknown_set_is_an_import_error(name: str) -> None:
    """In a process of its own, because torch 2.10 registers no operator twice."""
    program = """
try:
    import tightrope
except ImportError as error:
    print(error)
"""
    start = f"[tightrope] TIGHTROPE_CPU_ISA must be one of {', '.join(SETS)} on this processor"
    done = python("-c", program, TIGHTROPE_CPU_ISA=name)
    assert done.stdout.splitlines() == [f"{start} but got {name!r}."], done.stderr


# Laws whose code the sets do not share, beside those of laws/test_numerics.py, which run for each set.
OWN_LAWS = (
    "laws/test_invariance.py",
    "laws/test_calls.py::test_layouts_and_strides_agree",
    "unit/functional/test_tables.py",
    "unit/test_activations.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_SETS)
def test_the_operator_under_each_set(name: str) -> None:
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-k", "not reference", "-m", "not slow"]
    files = [ROOT / "tests" / file for file in OWN_LAWS]
    done = python("-m", "pytest", *options, *files, cwd=ROOT, TIGHTROPE_CPU_ISA=name)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert int(counted[1]) > 10
    assert "no such backend" not in done.stdout


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


# Widths of heads: pairs that fill registers, that leave remainders, and that take several iterations.
WIDTHS = (8, 16, 26, 48, 66, 92, 130, 224, 322)
# Phase words by length are words like others. Gates by the positions of so many heads exceed all 16-bit numbers.
LARGE = [
    number
    for number, case in enumerate(CASES)
    if case["frequencies"] != "by length"
    and (case["positions"] != "per head" or case["gate"] not in ("slope", "xpos"))
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", LARGE)
def test_sets_and_threads_change_no_bit(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are those of the same operations in the same order.

    Threads divide the tokens, or heads where there are few tokens: here in five parts, which the heads do not fill.
    """
    width, tokens, case = WIDTHS[number % len(WIDTHS)], (64, 4)[number % 2], CASES[number]
    if {case["act"], case["gate"]} != {"none"}:  # the definition of these is torch's
        dtype = torch.float32 if case["dtype"] == torch.float64 else case["dtype"]
        case = {**case, "backend": None, "dtype": dtype}
    heads = max(2, 350_000 // (2 * tokens * width))
    sizes = {"ROWS": 2, "HEADS": heads, "TOKENS": tokens, "WIDTH": width}
    sizes["CHANNELS"] = {"whole": (width - 2, 0), "slice": (width - 4, 1)}
    for name, size in sizes.items():
        monkeypatch.setattr(calls, name, size)
    call, found = Call(case), []
    for name, threads in ((SETS[0], 1), (SETS[0], 2), *((each, 3) for each in SETS)):
        cpu.use_instruction_set(name)
        torch.set_num_threads(threads)
        made = call.derivatives()
        found.append([*made.results, *made.first.values()])
    for one in found[1:]:
        tolerances.assert_same_bits(one, found[0])
