"""The checks of `make wheels` accept a good wheel and reject each planted fault."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from ci.wheels import __main__ as release, checks
from tightrope.backends import cpu

NAMES = [
    "tightrope_tools/command.py",
    "tightrope_tools/py.typed",
    "tightrope/__init__.py",
    "tightrope/_native.so",
    "tightrope/backends/cpu.py",
    "tightrope/config/diffusers.json",
    "tightrope/config/families.json",
    "tightrope/config/formats.json",
    "tightrope/config/gguf.json",
    "tightrope/config/keys.json",
    "tightrope/config/timm.json",
    "tightrope/py.typed",
    "tightrope-0.3.0.dist-info/METADATA",
    "tightrope-0.3.0.dist-info/RECORD",
    "tightrope-0.3.0.dist-info/WHEEL",
    "tightrope-0.3.0.dist-info/entry_points.txt",
    "tightrope-0.3.0.dist-info/licenses/LICENSE",
    "tightrope-0.3.0.dist-info/top_level.txt",
]


def test_a_good_wheel_has_no_fault() -> None:
    assert checks.of_names(NAMES) == []


@pytest.mark.parametrize(
    "name, shown",
    [
        ("tightrope/py.typed", "tightrope/py.typed"),
        ("tightrope/config/gguf.json", "tightrope/config/gguf.json"),
        ("tightrope/_native.so", "tightrope/_native.so"),
        ("tightrope-0.3.0.dist-info/licenses/LICENSE", "the license"),
    ],
)
def test_a_missing_file_is_found(name: str, shown: str) -> None:
    assert checks.of_names([n for n in NAMES if n != name]) == [f"{shown} is missing"]


@pytest.mark.parametrize(
    "name",
    [
        "tests/support/oracle.py",
        "tightrope/test_nn.py",
        "tightrope/tests/nn.py",
        "tightrope/rotate.cpp",
        "tightrope/config/other.json",
        "tightrope/__pycache__/nn.cpython-311.pyc",
        "benchmarks/pages.py",
    ],
)
def test_a_foreign_file_is_found(name: str) -> None:
    assert checks.of_names([*NAMES, name]) == [f"{name} does not belong into a wheel"]


def test_old_symbols_pass() -> None:
    old = {"GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4", "GLIBCXX_3.4.24", "CXXABI_1.3.11", "GCC_3.0"}
    assert checks.of_versions(old) == []


@pytest.mark.parametrize(
    "version",
    [
        "GLIBC_2.29",
        "GLIBC_2.100",
        "GLIBC_3.0",
        "GLIBCXX_3.4.25",
        "GLIBCXX_4.0",
        "CXXABI_1.3.12",
        "GCC_12.0.0",
        "GLIBC_PRIVATE",
        "GLIBC_ABI_DT_RELR",
        "OPENSSL_1.0",
    ],
)
def test_a_new_or_unknown_symbol_is_found(version: str) -> None:
    faults = checks.of_versions({"GLIBC_2.17", version})
    assert faults == [f"it needs {version}, which manylinux_2_28 lacks"]


def test_a_path_of_the_builder_is_found() -> None:
    folders = [Path("/srv/checkout"), Path("/srv/torch")]
    assert checks.of_bytes(b"\0./csrc/stages.h\0/srv/checkouts/x\0", folders) == []
    assert checks.of_bytes(b"\0/srv/torch/include/x.h\0", folders) == [
        "it contains the path /srv/torch"
    ]


def test_the_report_of_auditwheel() -> None:
    good = {"sym_tag": "manylinux_2_28_aarch64", "external_libs": {"libtorch_cpu.so": None}}
    assert checks.of_report(good) == []
    newer = {**good, "sym_tag": "manylinux_2_34_aarch64"}
    assert checks.of_report(newer) == ["its symbols are those of manylinux_2_34_aarch64"]
    assert checks.of_report({**good, "sym_tag": "linux_aarch64"}) != []
    for libraries in ({}, {"libtorch_cpu.so": None, "libz.so.1": None}):
        assert len(checks.of_report({**good, "external_libs": libraries})) == 1


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.shutil, "which", lambda _: None)
    monkeypatch.setattr(release, "HERE", "aarch64")
    with pytest.raises(
        LookupError, match=r"^needs x86_64-linux-gnu-g.*install g..-x86-64-linux-gnu$"
    ):
        release.environment("x86_64")


COMPILER = shutil.which("g++")
SOURCE = 'extern "C" double pow(double, double);\ndouble f(double x) { return pow(x, x); }\n'
FAULTS = {
    "torch": ((), "it does not name libtorch_cpu.so"),
    "rpath": (("-Wl,-rpath,/srv",), "it has a path to other libraries"),
    "library": (("-Wl,--no-as-needed", "-lresolv"), "it needs libresolv.so.2"),
}


@pytest.mark.skipif(
    COMPILER is None or shutil.which("readelf") is None, reason="needs g++ and readelf"
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_library_is_found(fault: str, tmp_path: Path) -> None:
    flags, message = FAULTS[fault]
    source, library = tmp_path / "f.cpp", tmp_path / "f.so"
    source.write_text(SOURCE)
    command = [str(COMPILER), "-shared", "-fPIC", str(source), "-o", str(library), "-lm"]
    subprocess.run([*command, *flags], check=True)
    assert message in checks.of_library(library, "x86_64")
    # The same library, of the other machine.
    other = [f"it is not for {machine}" for machine in checks.LOADERS]
    found = [checks.of_library(library, machine) for machine in checks.LOADERS]
    assert sum(text in faults for text, faults in zip(other, found)) == 1


def test_the_library_of_this_checkout() -> None:
    """A release ships this library, so it too runs on systems of manylinux_2_28."""
    path, machine = cpu.library_path(), platform.machine()
    if path is None or path.suffix != ".so" or machine not in checks.LOADERS:
        pytest.skip("needs the library on Linux, on a machine that has wheels")
    if tuple(map(int, platform.libc_ver()[1].split("."))) > (2, 36) or not shutil.which("readelf"):
        pytest.skip("needs readelf and a system that releases can be built on: docs/release.md")
    assert checks.of_library(path, machine) == []
