"""Build a kernel for the Hugging Face kernels hub: python hub/build.py OUT.

The kernel is Python only: the parts of this library that its Triton kernels and their gradients need.
OUT/build/ then has one folder for each backend; hub/README.md says how to publish them. Commit first:
the kernel is named after the commit.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tightrope"
NAME, VERSION, LICENSE = "tightrope", 0, "Apache-2.0"

# Backend -> the architectures that metadata must name. Triton compiles on the machine where the kernel
# runs; on the CPU plain torch runs.
BACKENDS: dict[str, list[str] | None] = {
    "cuda": ["8.0+PTX"],
    "rocm": ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1200", "gfx1201"],
    "cpu": None,
}
# The package's own modules of these names are replaced by those of the kernel.
REPLACED = {"__init__.py", "_namespace.py", "backends/__init__.py"}
# RopeSpec.from_config imports this module, which a kernel does not need.
ABSENT = {"config"}

NAMESPACE = '''"""The namespace of the operators in ``torch.ops``, which is unique to this build."""

import torch

NAMESPACE = "{id}"
operators = getattr(torch.ops, NAMESPACE)
'''

# Versions of `kernels` that do not know flat folders import the kernel from here.
FOLDER = '''"""The kernel, for older versions of the ``kernels`` package."""

import importlib.util
import sys
from pathlib import Path

if "{id}" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "{id}", Path(__file__).parent.parent / "__init__.py"
    )
    sys.modules["{id}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{id}"])
__all__ = sys.modules["{id}"].__all__
globals().update({{name: getattr(sys.modules["{id}"], name) for name in __all__}})
'''


def imported(path: Path, text: str) -> set[str]:
    """Return the files of the package that a file imports, with the packages that contain them."""
    found = set()
    package = path.parent
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.ImportFrom) and node.level):
            continue
        base = package.parents[node.level - 2] if node.level > 1 else package
        base = base / Path(*(node.module or "").split("."))
        for name in (base, *(base / alias.name for alias in node.names)):
            found |= {f"{name}.py", f"{name}/__init__.py"}
            found |= {f"{each}/__init__.py" for each in name.parents}
    return {name.removeprefix("./") for name in found}


def sources(commit: str, backend: str) -> dict[str, str]:
    """Return the files of a kernel: path -> text. Beyond the first two, the files they import."""
    identity = {"id": identify(commit, backend)}
    files = {
        "__init__.py": (ROOT / "hub" / "entry.py").read_text(encoding="utf-8"),
        "layers.py": (ROOT / "hub" / "layers.py").read_text(encoding="utf-8"),
        "_namespace.py": NAMESPACE.format(**identity),
        "backends/__init__.py": '"""The backends."""\n',
    }
    waiting = set(files)
    while waiting:
        path = waiting.pop()
        for name in sorted(imported(Path(path), files[path]) - set(files)):
            if name.split("/")[0] not in ABSENT and (SOURCE / name).is_file():
                files[name] = (SOURCE / name).read_text(encoding="utf-8")
                waiting.add(name)
    files[f"{NAME}/__init__.py"] = FOLDER.format(**identity)
    return files


def identify(commit: str, backend: str) -> str:
    """Return the name under which a build is imported and its operators are registered."""
    return f"_{NAME}_{backend}_{commit}"


def metadata(commit: str, backend: str, files: dict[str, str]) -> str:
    """Return the text of metadata.json."""
    archs = BACKENDS[backend]
    digests = {
        path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for path, text in sorted(files.items())
    }
    found = {
        "name": NAME,
        "id": identify(commit, backend),
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],  # optional by the documentation; kernels 0.17 requires it
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return json.dumps(found, indent=2) + "\n"


def build(out: Path, commit: str) -> None:
    """Write the kernel for each backend.

    Args:
        out: the folder that gets a folder ``build``; an older one is replaced.
        commit: the end of the kernel's identifier: letters, digits and underscores.
    """
    shutil.rmtree(out / "build", ignore_errors=True)
    for backend in BACKENDS:
        files = sources(commit, backend)
        files["metadata.json"] = metadata(commit, backend, files)
        for path, text in files.items():
            target = out / "build" / f"torch-{backend}" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
    shutil.copy2(ROOT / "LICENSE", out)


def current_commit() -> str:
    """Return the commit, shortened; if tracked files were changed since, it ends with ``_dirty``."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    dirty = "_dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "--short=12", "HEAD") + dirty


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python hub/build.py OUT")
    build(Path(sys.argv[1]), current_commit())
    print(f"{sys.argv[1]}/build: {', '.join(f'torch-{name}' for name in BACKENDS)}")
