"""The kernel that hub/build.py builds: the rules of the kernels hub, and its results."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tightrope
from tests.support.command import python
from tests.support.helpers import ROOT, on
from tests.support.imports import imports_of
from tests.support.tolerances import assert_each, assert_same_bits
from tightrope.functional import rotate_qk

COMMIT = "0123456789ab"


def load(name: str, path: Path) -> ModuleType:
    """Import a file as `kernels` does: under a name of its own, from anywhere."""
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


build = load("hub_build", ROOT / "hub" / "build.py")


# Once in a process, which registers operators only once: a worker may come back to this file.
@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    build.build(folder, COMMIT)
    return folder


@pytest.fixture(scope="session")
def kernel(out: Path) -> ModuleType:
    kernels = pytest.importorskip("kernels")
    return kernels.get_local_kernel(out, backend="cpu")


@pytest.mark.parametrize("backend", build.BACKENDS)
def test_a_build_follows_the_rules(out: Path, backend: str) -> None:
    """Its files import each other and torch alone, its layer has no state, and its metadata has their digests."""
    folder = out / "build" / f"torch-{backend}"
    found = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    assert found["id"] == f"_tightrope_{backend}_{COMMIT}"
    assert (found["name"], found["version"], found["license"]) == ("tightrope", 0, "Apache-2.0")
    assert found["backend"]["type"] == backend
    assert ("archs" in found["backend"]) == (backend != "cpu")
    files = found["digest"]["files"]
    assert {"__init__.py", "layers.py", "tightrope/__init__.py"} <= set(files)
    for name in files:
        package = ".".join(("hub", *Path(name).parent.parts))
        for each in imports_of((folder / name).read_text(encoding="utf-8"), package):
            root, _, inner = each.module.partition(".")
            assert root in {*sys.stdlib_module_names, "torch", "triton", "hub", "?"}, (name, each)
            target = folder.joinpath(*inner.split("."))
            own = target.is_dir() or target.with_suffix(".py").is_file()
            assert root != "hub" or own, (name, each)
    layers = ast.parse((folder / "layers.py").read_text(encoding="utf-8"))
    (layer,) = (node for node in layers.body if isinstance(node, ast.ClassDef))
    parts = {getattr(n, "name", ast.unparse(getattr(n, "target", n))) for n in layer.body[1:]}
    assert layer.name == "RotaryPosEmb"
    assert parts <= {"forward", "has_backward", "can_torch_compile"}


@pytest.mark.parametrize("backend", build.BACKENDS)
def test_the_hub_reads_the_metadata_and_finds_the_same_digests(out: Path, backend: str) -> None:
    rust = pytest.importorskip("kernels._rust")
    folder, copied = out / "build" / f"torch-{backend}", out / "clean" / backend
    digest = rust.Metadata.read_from_file(folder / "metadata.json").digest
    for path in folder.rglob("*.py"):  # without the bytecode of files that a test imported
        target = copied / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, copied))


def test_a_kernel_beside_the_package(kernel: Any, out: Path) -> None:
    """The reference path of both has the same bits, and their operators have different names."""
    assert kernel.__name__ == f"_tightrope_cpu_{COMMIT}"
    assert {"layers", "rotate_qk", "apply_rotary_pos_emb"} <= set(kernel.__all__)
    results = []
    for made, backend in ((kernel, None), (tightrope, "reference")):
        torch.manual_seed(0)
        q, k = (torch.randn(2, h, 9, 16).requires_grad_() for h in (4, 2))
        ys = on(backend, made.rotate_qk, q, k, made.RopeSpec(16), 1_000_000)
        results.append([*ys, *torch.autograd.grad(ys, (q, k), [torch.randn_like(y) for y in ys])])
    assert_each(assert_same_bits, *results)
    assert kernel.rotate_qk is not rotate_qk
    assert str(kernel.ops.schema.rotate) == f"{kernel.__name__}.rotate.default"
    # Older versions of `kernels` import this folder.
    old = load("old", out / "build" / "torch-cpu" / "tightrope" / "__init__.py")
    assert old.__all__ == kernel.__all__
    assert all(getattr(old, name) is getattr(kernel, name) for name in kernel.__all__)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "olmo2"])
def test_kernelize_takes_the_layer(
    kernel: Any, out: Path, family: str, dtype: torch.dtype, compiled: bool
) -> None:
    """Results and gradients have the bits of each function of transformers, with the tables that it takes."""
    kernels = pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")

    @kernels.use_kernel_forward_from_hub("rotary_pos_emb")
    class Rotary(torch.nn.Module):
        def forward(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
            raise NotImplementedError

    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    layer = kernels.LocalLayerRepository(repo_path=out, layer_name="RotaryPosEmb")
    with kernels.use_kernel_mapping({"rotary_pos_emb": {"cpu": {mode: layer}}}):
        module = kernels.kernelize(Rotary(), mode=mode, device="cpu", use_fallback=False)
    if compiled:
        torch._dynamo.reset()
        module = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    xs = [torch.randn(2, heads, 33, 64).to(dtype).requires_grad_() for heads in (4, 2)]
    angle = 9 * torch.rand(2, 33, 32)
    angle = angle if family == "gpt_oss" else torch.cat((angle, angle), -1)
    kept = torch.float32 if family == "olmo2" else dtype
    tables = angle.cos().to(kept), angle.sin().to(kept)
    weights = [torch.randn_like(x) for x in xs]
    runs = []
    for function in (module, theirs.apply_rotary_pos_emb):
        ys = function(*xs, *tables)
        grads = torch.autograd.grad(ys, xs, weights)
        runs.append([y.detach() for y in (*ys, *grads)])
    assert_each(assert_same_bits, *runs)


INTERPRETED = """
import importlib.util, os, sys, warnings
import torch, triton.language
os.environ["TRITON_INTERPRET"] = "1"
name, path = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, path)
sys.modules[name] = kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
from importlib import import_module
operators = import_module(name + ".backends.triton.operators")
blocks = import_module(name + ".backends.triton.blocks")
q, k = torch.randn(1, 2, 3, 16).requires_grad_(), torch.randn(1, 1, 3, 16).requires_grad_()
def run():
    ys = kernel.rotate_qk(q, k, kernel.RopeSpec(16), 5)
    return [*ys, *torch.autograd.grad(ys, (q, k), [y.detach() * 2 + 1 for y in ys])]
wanted = run()
library, ran = torch.library.Library(name, "IMPL"), []
def counted(function):
    return lambda *a, **n: (ran.append(1), function(*a, **n))[1]
warnings.simplefilter("ignore")
for overload in ("rotate", "rotate.extras"):
    library.impl(overload, counted(operators.rotate), "CPU", allow_override=True)
blocks.PROGRAMS = 1
for one, other in zip(run(), wanted):
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
assert len(ran) == 2, ran
assert "tightrope" not in sys.modules
"""


@pytest.mark.slow
def test_the_triton_kernels_of_the_copy(out: Path) -> None:
    """Triton's interpreter runs the copy's kernels, forward and backward, without the package."""
    pytest.importorskip("triton")
    path = out / "build" / "torch-cuda" / "__init__.py"
    done = python("-I", "-c", INTERPRETED, f"_tightrope_cuda_{COMMIT}", path)
    assert done.returncode == 0, done.stderr
