"""Build the CPU kernel for aarch64 and run it under qemu: `python -m ci.aarch64`, with pytest's arguments.

Drawn calls must have the bits that AVX2 gives here; then tests run. All is kept in build/aarch64. This file goes when
the ARM job of .github/workflows/tests.yml has run.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from tests.support import raw_calls
from tightrope.backends import cpu

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "aarch64"
PYTHON, LIBRARY = FOLDER / "python", FOLDER / "lib"
NEEDED = {
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
# The last release whose aarch64 wheel on PyPI is for CPUs alone: 0.15 GB, later ones 0.45 GB.
TORCH = "torch==2.10.0"
PACKAGES = "hypothesis mpmath numpy pytest safetensors setuptools".split()
TESTS = """
    laws/test_numerics repository/test_conformance laws/test_invariance
    unit/functional/test_tables torch_modes/test_autograd unit/ops/test_gradients
    unit/test_activations unit/ops/test_phased kernel/cpu/test_instruction_sets
"""
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 6e-8, 3e38, 65519.0, -70.0)


def execute(*command: object, **more: str) -> None:
    """Run a command with more environment variables; an error ends the program."""
    subprocess.run([*map(str, command)], env={**os.environ, **more}, cwd=ROOT, check=True)


def system(to: Path) -> None:
    """Unpack Debian's Python for aarch64, without installing it and without being root."""
    state = to / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    options = ["APT::Architecture=arm64", "APT::Architectures::=arm64", f"Dir::State={state}"]
    options += [f"Dir::State::status={state}/status", f"Dir::Cache={state}", "APT::Sandbox::User="]
    apt = ["apt-get", "-qq", *(part for option in options for part in ("-o", option))]
    execute(*apt, "update")
    install = [*apt, "install", "--yes", "--download-only", "--no-install-recommends"]
    execute(*install, "python3", "libstdc++6", "libgomp1")
    for package in (state / "archives").glob("*.deb"):
        execute("dpkg-deb", "--extract", package, to)
    shutil.rmtree(state)


def packages(to: Path) -> None:
    """Install torch and what the tests import, for the Python of the emulator."""
    version = (FOLDER / "system" / "usr" / "bin" / "python3").readlink().name.removeprefix("python")
    constraints = FOLDER / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")))
    machine = f"--python-version={version}", "--python-platform=aarch64-manylinux_2_28"
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--only-binary=:all:"]
    execute(*uv, *machine, "--target", to, "-c", constraints, TORCH, *PACKAGES)


def prepare() -> None:
    """Make the emulated Python as far as it is not there yet, and build the library from the present source."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for make in (system, packages):
        target = FOLDER / make.__name__
        if not target.exists():
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(target)
    # Python takes its name from its first argument, so programs that it starts are emulated too.
    PYTHON.write_text(
        "#!/bin/sh\n"
        f"export PYTHONHOME='{FOLDER}/system/usr'\n"
        f"exec qemu-aarch64 -L '{FOLDER}/system' -cpu neoverse-n1 -0 \"$0\" "
        f"'{FOLDER}/system/usr/bin/python3' \"$@\"\n"
    )
    PYTHON.chmod(0o755)
    # A cross build: qemu often hangs where a process with threads starts another one.
    shutil.rmtree(LIBRARY, ignore_errors=True)
    torch = FOLDER / "packages" / "torch"
    compiler = ["aarch64-linux-gnu-g++", f"-isystem{torch}/include", f"-L{torch}/lib"]
    more = {"CXX": shlex.join(compiler), "TIGHTROPE_NATIVE": "1"}
    more |= {"_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    build = ["--quiet", "build", f"--build-base={FOLDER}", f"--build-lib={LIBRARY}"]
    execute(sys.executable, "setup.py", *build, **more)


def calls() -> Iterator[raw_calls.Call]:
    """Draw calls of raw operators; a fifth of the numbers of every second one are special."""
    for make in raw_calls.MAKERS:
        for seed in range(500):
            with contextlib.suppress(RuntimeError):  # torch cannot make such a tensor
                operator, arguments, written = make(raw_calls.Draw(seed))
                if raw_calls.on_ordinary_memory(arguments) is None:
                    continue
                for x in raw_calls.tensors_of(arguments) if seed % 2 else ():
                    if x.is_floating_point():
                        places = raw_calls.memory_of(x)[::5]
                        places.copy_(torch.tensor(SPECIAL * len(places))[: len(places)])
                yield operator, arguments, written


def results(operator: Any, arguments: list[Any], written: list[int]) -> list[torch.Tensor] | None:
    """Return what a call made and wrote, with one bit pattern for all NaNs; None if it was refused."""
    try:
        made = operator(*arguments)
    except RuntimeError:
        return None
    every = [*(made or ()), *(arguments[i] for i in written if arguments[i] is not None)]
    return [raw_calls.with_one_nan(x) for x in every]


def store(path: str) -> None:
    """Write the calls and their results with AVX2 to a file."""
    cpu.use_instruction_set("avx2")
    kept = []
    for operator, arguments, written in calls():
        name, before = str(operator).removeprefix("tightrope."), copy.deepcopy(arguments)
        kept.append((name, before, written, results(operator, arguments, written)))
    torch.save(kept, path)


def compare(path: str) -> None:
    """Make the calls of a file; exit with 1 if the bits of a result differ."""
    taken, differing = 0, []
    for number, (name, arguments, written, wanted) in enumerate(torch.load(path)):
        got = results(attrgetter(name)(torch.ops.tightrope), arguments, written)
        taken += wanted is not None
        if (got is None) != (wanted is None) or not all(map(alike, got or (), wanted or ())):
            differing.append(f"{number} {name}")
    print(f"{taken} calls with results, {len(differing)} differ: {', '.join(differing[:20])}")
    sys.exit(bool(differing) or taken < 500)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits."""
    return torch.equal(*(raw_calls.tame(x).flatten().view(torch.uint8) for x in (one, other)))


def main(arguments: list[str]) -> int:
    """Prepare, compare and run the tests; return 1 if one fails."""
    lacking = [package for command, package in NEEDED.items() if not shutil.which(command)]
    if lacking or "avx2" not in cpu.instruction_sets():
        print(f"aarch64 needs AVX2 here, Debian and: apt-get install {' '.join(lacking)}")
        return 1
    prepare()
    file = FOLDER / "avx2.pt"
    execute(sys.executable, "-m", "ci.aarch64", "--store", file)
    paths = os.pathsep.join(map(str, (LIBRARY, FOLDER / "packages", ROOT)))
    more = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    execute(PYTHON, "-m", "ci.aarch64", "--compare", file, **more)
    files = [f"tests/{name}.py" for name in TESTS.split()]
    tests = arguments or ["-m", "not slow", *files]
    execute(PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, **more)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["--store"], ["--compare"]):
        (store if sys.argv[1] == "--store" else compare)(sys.argv[2])
    elif "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        print(__doc__)
    else:
        sys.exit(main(sys.argv[1:]))
