"""The source archive has every file, builds the library where torch is, and says so where it is not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import ROOT
from tests.support.matrix import needs_compiler


def pip_wheel(source: Path, *options: str, **environment: str) -> tuple[str, str]:
    """Build a wheel next to the source; return its name and what pip printed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TIGHTROPE_NATIVE")}
    folder = source.parent / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir"]
    command = [*pip, "--wheel-dir", str(folder), *options, str(source)]
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env={**clean, **environment}, check=False, **out)
    if "Could not find a version that satisfies the requirement setuptools" in done.stdout:
        pytest.skip("pip finds no setuptools for an isolated build")
    assert done.returncode == 0, done.stdout
    (wheel,) = folder.glob("*.whl")
    return wheel.name, " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the source archive, in a copy of this checkout, because setuptools writes into it."""
    folder = tmp_path_factory.mktemp("archive")
    made = ".git .nox .venv* .*_cache build dist site _native.*".split()
    shutil.copytree(ROOT, folder / "copy", symlinks=True, ignore=shutil.ignore_patterns(*made))
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(folder)]
    subprocess.run(command, cwd=folder / "copy", check=True, stderr=subprocess.DEVNULL)
    (path,) = folder.glob("tightrope-*.tar.gz")
    return path


@pytest.mark.slow
@needs_compiler
def test_the_archive_builds_the_library_where_torch_is(archive: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "xzf", str(archive), "-C", str(tmp_path)], check=True)
    (source,) = tmp_path.iterdir()
    assert (source / "examples" / "run_package.cpp").exists()
    # Spare what this checkout has compiled already.
    if (compiled := ROOT / "build" / "native").exists():
        (source / "build").mkdir()
        (source / "build" / "native").symlink_to(compiled)
    wheel, _ = pip_wheel(source, "--no-build-isolation", TIGHTROPE_NATIVE="1")
    assert "-py3-none-" in wheel
    assert not wheel.endswith("-any.whl")


@pytest.mark.slow
def test_the_archive_builds_without_torch_and_says_so(archive: Path) -> None:
    wheel, text = pip_wheel(archive)
    assert wheel.endswith("-py3-none-any.whl")
    assert "without its fused CPU kernel and runs on plain torch" in text
    assert "because torch cannot be imported by this build" in text
    assert "repeat `pip install` with these options: --no-build-isolation" in text
