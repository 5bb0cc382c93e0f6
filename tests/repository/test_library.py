"""The library of this checkout is the one of a release: it loads on older systems, and names no folder of its builder."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.helpers import ROOT
from tightrope.backends import cpu

LIBRARY = cpu.library_path()
pytestmark = pytest.mark.skipif(
    LIBRARY is None or sys.platform != "linux", reason="needs the library, on Linux"
)
# The newest symbol versions of manylinux_2_28, see PEP 600.
NEWEST = {"GLIBC": [2, 28], "GLIBCXX": [3, 4, 24], "CXXABI": [1, 3, 11], "GCC": [7, 0, 0]}


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_its_symbols_are_those_of_manylinux_2_28() -> None:
    if tuple(map(int, platform.libc_ver()[1].split("."))) > (2, 36):
        pytest.skip("releases are not built here: docs/release.md")
    command = ["readelf", "--wide", "--version-info", str(LIBRARY)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Name: ([A-Z]+)_(\S+)  Flags", output)
    assert "GLIBC" in dict(found)
    for name, version in found:
        assert [int(part) for part in version.split(".")] <= NEWEST[name], f"{name}_{version}"


def test_it_names_no_folder_of_its_builder() -> None:
    content = Path(LIBRARY).read_bytes()
    for folder in (ROOT, Path(torch.__file__).parent, Path(sys.prefix)):
        assert f"{folder}/".encode() not in content
