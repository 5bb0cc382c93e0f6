"""Lists and patterns that select tests and modules raise where they name something that is gone.

Each of them would otherwise be content with less: fewer tests run, and none fails.
"""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.command import python
from tests.support.helpers import ROOT


def collected(*arguments: str, cwd: Path = ROOT) -> CompletedProcess[str]:
    options = "-q", "-p", "no:cacheprovider", "--collect-only"
    return python("-m", "pytest", *options, *arguments, cwd=cwd)


def test_paths_to_leave_out_must_exist() -> None:
    options = "--ignore=tests/test_x.py", "--deselect=tests/test_x.py::test"
    for option in options:
        done = collected(option, "tests/repository/test_imports.py")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"{option}: there is no such file" in done.stderr
    sound = [each.replace("tests/test_x", "tests/repository/test_selectors") for each in options]
    assert collected(*sound, "tests/repository/test_imports.py").returncode == 0


CASES = """
import pytest

@pytest.mark.one_in(4)
@pytest.mark.parametrize("n", range(40))
def test_numbers(n): ...
"""


def write_project(folder: Path) -> None:
    """Write a folder in which pytest runs as it does here."""
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT}\nmarkers =\n    slow: .\n    one_in(n): .\n"
    )


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_run_ends_with_what_was_missing_and_its_counts(tmp_path: Path, processes: str) -> None:
    pytest.importorskip("triton")  # it prints its objects that are left when Python exits
    write_project(tmp_path)
    (tmp_path / "test_a.py").write_text("import triton\ndef test_passes(): ...")
    done = python("-m", "pytest", "-q", "-n", processes, "test_a.py", cwd=tmp_path)
    *_, missing, counts = done.stdout.splitlines()
    assert missing.startswith("Missing here, so tested with stand-ins or not at all: ")
    assert counts.startswith("1 passed")
    assert done.stderr == ""


def test_the_file_of_a_test_does_not_change_the_cases_that_are_drawn(tmp_path: Path) -> None:
    write_project(tmp_path)
    names = []
    for file in ("test_a.py", "folder/test_b.py"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(CASES)
        done = collected("-m", "not slow", file, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        names.append([line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line])
    assert names[0] == names[1]
    assert len(names[0]) == 10
