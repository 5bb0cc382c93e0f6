"""The kernel that hub/build.py builds: the rules of the kernels hub, and its results."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tightrope
from tests.support.command import python
from tests.support.helpers import ROOT
from tests.support.imports import imports_of
from tests.support.tolerances import assert_same_bits
from tightrope.functional import rotate_qk

COMMIT = "0123456789ab"


def load(name: str, path: Path) -> ModuleType:
    """Import a file as `kernels` does: under a name of its own, from anywhere."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
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


def python_files(folder: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(folder)), path, ast.parse(path.read_text(encoding="utf-8"))


# --- the rules ------------------------------------------------------------------------------------


def problems_of_imports(folder: Path) -> list[str]:
    """Return a line for each import of a package that is not allowed or of a missing file."""
    problems = []
    for name, path, _ in python_files(folder):
        package = ".".join(("hub", *Path(name).parent.parts))
        for each in imports_of(path.read_text(encoding="utf-8"), package):
            root, _, inner = each.module.partition(".")
            target = folder.joinpath(*inner.split("."))
            if root == "hub" and not (target.is_dir() or target.with_suffix(".py").is_file()):
                problems.append(f"{name}: {target.name} is missing")
            elif not root:
                problems.append(f"{name}: imports from outside")
            elif root not in {*sys.stdlib_module_names, "torch", "triton", "hub", "?"}:
                problems.append(f"{name}: imports {root}")
    return problems


def problems_of_layers(tree: ast.Module) -> list[str]:
    """Return a line for each part of a class beyond `forward` and the two variables that are allowed."""
    problems = []
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in cls.body:
            names = {getattr(node, "name", None), ast.unparse(getattr(node, "target", node))}
            allowed = {"forward", "has_backward", "can_torch_compile"}
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not docstring and not names & allowed:
                problems.append(f"{cls.name}: {ast.unparse(node)}")
    return problems


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", build.BACKENDS)
def test_a_build_follows_the_rules(out: Path, backend: str) -> None:
    folder = out / "build" / f"torch-{backend}"
    assert problems_of_imports(folder) == []
    layers = ast.parse((folder / "layers.py").read_text(encoding="utf-8"))
    assert problems_of_layers(layers) == []
    names = [cls.name for cls in layers.body if isinstance(cls, ast.ClassDef)]
    assert names == ["RotaryPosEmb"]
    files = {name for name, _, _ in python_files(folder)}
    assert {"__init__.py", "layers.py", "tightrope/__init__.py"} <= files
    assert not any(re.match("cli|workbench|config|integrations|backends/cpu", f) for f in files)


def test_what_breaks_the_rules_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import numpy\nfrom tightrope import x\nfrom .b import c\n")
    (tmp_path / "d.py").write_text("from .. import e\n")
    found = "\n".join(problems_of_imports(tmp_path))
    for problem in ("imports numpy", "imports tightrope", "b is missing", "from outside"):
        assert problem in found
    state = "class A:\n '''.'''\n has_backward = True\n x: int = 1\n def __init__(self): ...\n"
    assert len(problems_of_layers(ast.parse(state))) == 3


@pytest.mark.parametrize("backend", build.BACKENDS)
def test_metadata(out: Path, backend: str) -> None:
    folder = out / "build" / f"torch-{backend}"
    found = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    required = {"id", "name", "version", "license", "backend", "digest"}
    assert required <= set(found)
    assert found["id"].isidentifier()
    assert found["id"].endswith(COMMIT)
    assert (found["name"], found["version"], found["license"]) == ("tightrope", 0, "Apache-2.0")
    assert found["backend"]["type"] == backend
    assert ("archs" in found["backend"]) == (backend != "cpu")
    rust = pytest.importorskip("kernels._rust")
    given = rust.Metadata.read_from_file(folder / "metadata.json").digest
    copied = out / "clean" / backend  # without the bytecode of files that a test imported
    for name in found["digest"]["files"]:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes((folder / name).read_bytes())
    assert len(found["digest"]["files"]) == len(list(python_files(folder)))
    given.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, copied))


def test_the_id_is_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"status": "", "rev-parse": "abc\n"}

    def run(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 0, said[command[3]])

    monkeypatch.setattr(subprocess, "run", run)
    assert build.current_commit() == "abc"
    said["status"] = " M setup.py"
    assert build.current_commit() == "abc_dirty"


# --- the results ----------------------------------------------------------------------------------


def test_a_kernel_beside_the_package(kernel: Any) -> None:
    """The reference path of both has the same bits, and their operators have different names."""
    assert kernel.__name__ == f"_tightrope_cpu_{COMMIT}"
    assert {"layers", "rotate_qk", "apply_rotary_pos_emb"} <= set(kernel.__all__)
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    assert kernel.rotate_qk is not rotate_qk
    results = []
    for made, options in ((kernel.RopeSpec, {}), (tightrope.RopeSpec, {"backend": "reference"})):
        torch.manual_seed(0)
        call = kernel.rotate_qk if made is kernel.RopeSpec else rotate_qk
        q, k = (torch.randn(2, h, 9, 16).requires_grad_() for h in (4, 2))
        ys = call(q, k, made(16), 1_000_000, **options)
        results.append([*ys, *torch.autograd.grad(ys, (q, k), [torch.randn_like(y) for y in ys])])
    for one, other in zip(*results):
        assert_same_bits(one, other)
    spaces = {str(kernel.ops.schema.rotate), str(tightrope.ops.schema.rotate)}
    assert spaces == {f"{kernel.__name__}.rotate.default", "tightrope.rotate.default"}


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
        runs.append([*ys, *torch.autograd.grad(ys, xs, weights)])
    for one, other in zip(*runs, strict=True):
        assert_same_bits(one.detach(), other.detach())


def test_the_folder_for_older_versions(kernel: Any, out: Path) -> None:
    folder = out / "build" / "torch-cpu" / "tightrope" / "__init__.py"
    old = load("tightrope_hub_old", folder)
    assert old.__all__ == kernel.__all__
    assert all(getattr(old, name) is getattr(kernel, name) for name in kernel.__all__)


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
print("agree")
"""


@pytest.mark.slow
def test_the_triton_kernels_of_the_copy(out: Path) -> None:
    """Triton's interpreter runs the copy's kernels, forward and backward, without the package."""
    pytest.importorskip("triton")
    path = out / "build" / "torch-cuda" / "__init__.py"
    done = python("-I", "-c", INTERPRETED, f"_tightrope_cuda_{COMMIT}", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "agree"
