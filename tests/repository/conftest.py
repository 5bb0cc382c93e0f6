"""A fixture for the tests of the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built from docs/ without a warning."""
    pytest.importorskip("mkdocstrings_handlers.python")
    made: Path = tmp_path_factory.mktemp("www") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(made)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return made
