"""Deployment: exported programs and packages in processes without tightrope."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.support import oracle
from tests.support.command import python
from tests.support.helpers import ROOT, noise, on
from tests.support.matrix import COMPILER, needs_compiler, needs_kernel
from tests.support.tolerances import assert_rotations, assert_same_bits
from tightrope import RopeSpec, nn, positions
from tightrope.activations import RMSNorm
from tightrope.backends import cpu
from tightrope.frequencies import Linear
from tightrope.functional import rotate, rotate_, rotate_qk
from tightrope.ops import schema

SPEC = RopeSpec(16, base=500_000.0, rotary_dim=12)
SCALED = RopeSpec(16, base=500_000.0, rotary_dim=12, scaling=Linear(3.0))

# Raised where Inductor copies an exported program.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")


class Model(torch.nn.Module):
    """Rotates by offsets of rows, by an offset, in place, after a norm and by another library's tables."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows = positions.per_row(first)
        new_q, new_k = rotate_qk(q, k, SPEC, rows, layout="bshd")
        normed, _ = rotate_qk(q, k, SPEC, rows, layout="bshd", act=RMSNorm(self.weight))
        start = first.max().item()
        last = rotate_(k * 2, SPEC.at(start, seq_len=start + k.shape[1]), layout="bshd")
        ids = first[:, None] + torch.arange(q.shape[1])
        serving = rotate(q, SCALED.at(ids, stack="vllm-native"), layout="bshd")
        complexes = rotate(q, SPEC.at(ids, stack="meta"), layout="bshd")
        return new_q, new_k, normed, last, serving, complexes


MODEL = Model().eval().requires_grad_(False)


def inputs(tokens: int, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the inputs that examples/run_package.cpp makes; all are exact."""
    q, k = (
        (torch.arange(2 * tokens * heads * 16) % 17 - 8.0).view(2, tokens, heads, 16)
        for heads in (4, 2)
    )
    return q, k, torch.tensor([first, first + 5])


CASES = [(5, 7), (1, 0), (31, 1_000_003), (2, 2**31 - 40)]


def export() -> torch.export.ExportedProgram:
    tokens = {1: torch.export.Dim("tokens", min=1, max=4096)}
    return torch.export.export(
        MODEL, inputs(9, 3), dynamic_shapes={"q": tokens, "k": tokens, "first": None}
    )


def run_alone(folder: Path, script: str) -> None:
    """Run a script in a process of its own, with the library's path in `LIBRARY`."""
    start = f"import sys, torch\nLIBRARY = {str(cpu.library_path())!r}\n"
    done = python("-c", start + script, cwd=folder)
    assert done.returncode == 0, done.stderr


# ---- torch.export --------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_module(strict: bool) -> None:
    model, tokens = nn.RotaryPositionalEmbedding(6), torch.export.Dim("tokens", min=2)
    shapes = {"x": {1: tokens}, "seq_dim": None}
    x = noise(2, 5, 3, 8)
    program = torch.export.export(model, (x, 1), dynamic_shapes=shapes, strict=strict)
    for length in (5, 9, 31):
        x = noise(2, length, 3, 8)
        assert torch.equal(program.module()(x, 1), model(x, 1))
    assert not program.state_dict


def test_export_with_a_dynamic_offset_and_dynamic_tokens() -> None:
    class Offset(torch.nn.Module):
        def forward(self, x: torch.Tensor, offset: int) -> torch.Tensor:
            return rotate_(x, SPEC, offset) * 2

    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        Offset(), (noise(1, 2, 9, 16), 3), dynamic_shapes={"x": {2: dynamic}, "offset": dynamic}
    ).module()
    for tokens, first in CASES:
        x = noise(1, 2, tokens, 16)
        wanted = rotate(x, SPEC, first)
        assert torch.equal(program(x, first), wanted * 2)
        assert torch.equal(x, wanted)


@needs_kernel
def test_an_exported_program_needs_only_the_library(tmp_path: Path) -> None:
    """A process with only the library runs a saved program, and may import tightrope later."""
    torch.export.save(export(), tmp_path / "model.pt2")
    torch.save([inputs(*case) for case in CASES], tmp_path / "inputs.pt")
    run_alone(
        tmp_path,
        """
torch.ops.load_library(LIBRARY)
program = torch.export.load("model.pt2").module()
results = [program(*one) for one in torch.load("inputs.pt")]
named = (one for one in torch._C._jit_get_all_schemas() if one.name.startswith("tightrope::"))
schemas = list(map(str, named))
assert "tightrope" not in sys.modules
torch.save((results, schemas), "results.pt")

import tightrope
from tightrope.functional import rotate
x, spec = torch.ones(1, 2, 5, 8, requires_grad=True), tightrope.RopeSpec(8)
y = rotate(x, spec, 3)
y.sum().backward()
assert tightrope.which(x) == ("cpu", None) and x.grad is not None
assert torch.equal(torch.compile(rotate, backend="eager", fullgraph=True)(x, spec, 3), y)
""",
    )
    results, schemas = torch.load(tmp_path / "results.pt")
    for got, case in zip(results, CASES, strict=True):
        assert_same_bits(got, MODEL(*inputs(*case)))
    named = (one for one in torch._C._jit_get_all_schemas() if one.name.startswith("tightrope::"))
    assert sorted(schemas) == sorted(map(str, named))
    assert len(schemas) == len(schema.SCHEMAS)


# ---- AOTInductor ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compile the model into a package, once."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    with pytest.MonkeyPatch.context() as patch:
        # torch 2.13 reads mutated tensors back wrongly from its cache.
        patch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
        torch.compiler.reset()
        torch._inductor.aoti_compile_and_package(export(), package_path=str(path))
    yield path
    torch.compiler.reset()


@pytest.mark.slow
@needs_compiler
@needs_kernel
def test_a_package_needs_only_the_library(package: Path, tmp_path: Path) -> None:
    torch.save([inputs(*case) for case in CASES], tmp_path / "inputs.pt")
    run_alone(
        tmp_path,
        f"""
torch.ops.load_library(LIBRARY)
model = torch._inductor.aoti_load_package({str(package)!r})
torch.save([model(*one) for one in torch.load("inputs.pt")], "results.pt")
assert "tightrope" not in sys.modules
""",
    )
    for got, case in zip(torch.load(tmp_path / "results.pt"), CASES, strict=True):
        assert_same_bits(got, MODEL(*inputs(*case)))


@pytest.mark.slow
@needs_compiler
def test_a_package_of_the_definition_needs_only_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Definition(torch.nn.Module):
        def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            rows = positions.per_row(first)
            return on("reference", rotate, x, SPEC, rows, layout="bshd")

    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    x, _, first = inputs(9, 3)
    shapes = {"x": {1: torch.export.Dim("tokens", min=1, max=4096)}, "first": None}
    program = torch.export.export(Definition(), (x, first), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    x, _, first = inputs(31, 1_000_003)
    torch.save((x, first), tmp_path / "inputs.pt")
    run_alone(
        tmp_path,
        """
y = torch._inductor.aoti_load_package("model.pt2")(*torch.load("inputs.pt"))
assert "tightrope" not in sys.modules and not hasattr(torch.ops.tightrope, "rotate")
torch.save(y, "result.pt")
""",
    )
    wanted = rotate(x, SPEC, positions.per_row(first), layout="bshd")
    got, lengths = torch.load(tmp_path / "result.pt"), oracle.pair_lengths(x, SPEC.rotary_dim)
    assert_rotations(got, wanted, lengths, 2, 1e6)


@pytest.mark.slow
@needs_compiler
@needs_kernel
def test_a_package_in_a_program_without_python(package: Path, tmp_path: Path) -> None:
    folders = cpp_extension.library_paths()
    command = [COMPILER, "-std=c++20", "-O0", str(ROOT / "examples" / "run_package.cpp")]
    command += [part for folder in cpp_extension.include_paths() for part in ("-isystem", folder)]
    command += [part for folder in folders for part in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    program = tmp_path / "run_package"
    subprocess.run([*command, "-ltorch_cpu", "-lc10", "-ldl", "-o", str(program)], check=True)

    def run(tokens: int, first: int, **environment: str) -> subprocess.CompletedProcess[str]:
        arguments = (cpu.library_path(), package, tokens, first, tmp_path / "results")
        return subprocess.run(
            [str(program), *map(str, arguments)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    for case in CASES:
        done = run(*case)
        assert done.returncode == 0, done.stderr
        wanted = b"".join(y.contiguous().numpy().tobytes() for y in MODEL(*inputs(*case)))
        assert (tmp_path / "results").read_bytes() == wanted
    done = run(5, 7, TIGHTROPE_CPU_ISA="none")
    assert done.returncode == 1
    assert "TIGHTROPE_CPU_ISA names an instruction set" in done.stderr
