"""Imports among the folders of the repository; ranks within the library are in test_architecture.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from tests.support.helpers import ROOT
from tests.support.imports import imports_of

EXAMPLES = ("demo", "state_tracking", "train_bytes", "examples")
OURS = (
    "tightrope",
    "tightrope_tools",
    "benchmarks",
    "tests",
    "ci",
    "conformance",
    "hub",
    *EXAMPLES,
)

# Folder -> the packages of this repository that its files may import. The longest folder counts.
ALLOWED = {
    "src/tightrope": "tightrope",
    "src/tightrope_tools": "tightrope tightrope_tools",
    "examples": f"tightrope {' '.join(EXAMPLES)}",
    "hub": "tightrope hub",  # its files are copied into the package
    "comfyui": "tightrope",
    "docs": "tightrope",
    "conformance": "tightrope conformance tests.support",
    "benchmarks": "tightrope benchmarks tests.support examples tightrope_tools.figures",
    "tests": "tightrope tests.support tests.torch_modes.processes",
    "tests/tools": "tightrope tightrope_tools tests.support",
    "tests/benchmarks": "tightrope benchmarks tests.support",
    "tests/coverage": "tightrope tests.coverage tests.support benchmarks.pages",
    "tests/repository": " ".join(OURS),
    "ci": "tightrope tightrope_tools ci benchmarks.pages tests.support",
}
IN_FAMILIES = {"unit/config/test_classes": ("COUNTS", "PATH", "classes", "quiet", "refreshed_rows")}
# (file, import) -> why.
EXCEPTIONS = {
    **dict.fromkeys(
        [
            (f"tests/{file}.py", f"ci.families.{name}")
            for file, names in IN_FAMILIES.items()
            for name in names
        ],
        "it compares the table of families with what its program finds",
    ),
    (
        "tests/support/models/forms.py",
        "tightrope_tools.forms",
    ): "a test of the tools adds its forms",
}


def problems(path: PurePath, text: str) -> Iterator[tuple[str, str]]:
    """Yield (file, import) for each import that the file's folder may not have."""
    folder = max((f for f in ALLOWED if path.is_relative_to(f)), key=len, default=None)
    if folder is None:
        return
    allowed = ALLOWED[folder].split()
    package = ".".join(path.parent.parts).removeprefix("src.")
    for name in (each.whole for each in imports_of(text, package)):
        if name.split(".")[0] not in OURS:
            continue
        is_test = any(part.startswith("test_") for part in name.split(".")[:-1])
        if is_test or not any(f"{name}.".startswith(f"{one}.") for one in allowed):
            yield path.as_posix(), name


def files() -> list[PurePath]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [PurePath(line) for line in listed.splitlines() if (ROOT / line).is_file()]


def test_folders_import_what_they_may() -> None:
    found = [each for path in files() for each in problems(path, (ROOT / path).read_text("utf-8"))]
    listed = set()
    for path, name in found:
        known = [key for key in EXCEPTIONS if key[0] == path and name.startswith(key[1])]
        assert known, f"{path} may not import {name}"
        listed.update(known)
    assert listed == set(EXCEPTIONS)


def test_every_folder_with_python_has_a_rule() -> None:
    without = {path.parts[0] for path in files() if not any(map(path.is_relative_to, ALLOWED))}
    assert without <= {"setup.py", "noxfile.py", ".ci"}
    assert all((ROOT / folder).is_dir() for folder in ALLOWED)


@pytest.mark.parametrize(
    "path, text",
    [
        ("src/tightrope/spec/a.py", "def f():\n    import tightrope_tools.audit"),
        ("src/tightrope/a.py", "from benchmarks import cases"),
        ("src/tightrope_tools/audit/a.py", "from examples import demo"),
        ("examples/a.py", "from tightrope_tools.figures import save"),
        ("benchmarks/a.py", "from tightrope_tools.place import write_whole"),
        ("tests/unit/ops/test_a.py", "from tightrope_tools.audit import audit"),
        ("tests/laws/test_a.py", "from benchmarks.measure import measure"),
        ("tests/unit/test_a.py", "from tests.unit.test_b import helper"),
        ("tests/repository/test_a.py", "from tests.unit.test_b import helper"),
        ("tests/tools/cli/test_a.py", "from benchmarks import pages"),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str) -> None:
    assert list(problems(PurePath(path), text))


def test_right_imports_pass() -> None:
    relative = "from . import b\nfrom .. import angles\nfrom ..config import keys\nimport torch"
    assert list(problems(PurePath("src/tightrope/spec/a.py"), relative)) == []
    helpers = "from tests.support.helpers import noise\nfrom tests.support import oracle"
    assert list(problems(PurePath("tests/laws/test_a.py"), helpers)) == []
