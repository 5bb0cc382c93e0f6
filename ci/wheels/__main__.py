"""Build and check the wheels of a release for Linux, and its source archive: `make wheels`.

For each machine (x86_64 and aarch64) the library is compiled, a wheel is made and tagged manylinux_2_28, and these are
checked: its files, the symbol versions and needed libraries of the library, that no path of this machine is in it, and
what auditwheel finds. Then the wheel rotates, forward and backward: the one of this machine in a new environment, which
takes torch from the present one; the other under the emulator of ci/aarch64, if that is installed. The source
archive must give the same wheel as the checkout. What passes all checks is put into dist/.

A machine that is not this one needs its GCC, on Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from . import checks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "wheels"
SMOKE = Path(__file__).parents[1] / "smoke.py"
HERE = platform.machine()
MACHINES = tuple(checks.LOADERS)
TORCH = Path(str(find_spec("torch").origin)).parents[1]


def execute(*command: object, cwd: Path = FOLDER, **more: str) -> str:
    """Run a command with more environment variables, and return its output; an error ends the program."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | more
    command = tuple(map(str, command))
    done = subprocess.run(command, env=environment, cwd=cwd, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}failed ({done.returncode})")
    return done.stdout


def hook(name: str, source: Path, to: Path, more: dict[str, str], *options: str) -> Path:
    """Call a build hook of setuptools, as pip does, and return the file that it makes."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    program = f"""import sys; from setuptools import build_meta
build_meta.{name}(sys.argv[1], {{"--build-option": sys.argv[2:]}})"""
    execute(sys.executable, "-c", program, to, *options, cwd=source, **more)
    return next(path for path in to.iterdir() if path.is_file())


def torch_stub(compiler: str, to: Path) -> None:
    """Make a libtorch_cpu to link with for another machine: it has the symbols that the library here needs from torch."""
    library = ROOT / "src" / checks.LIBRARY
    listed = execute("nm", "--dynamic", "--undefined-only", library)
    names = re.findall(r" U ((?:aoti_)?torch_\w+)\n", listed)
    to.mkdir(parents=True, exist_ok=True)
    source = to / "stub.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    flags = ("-xc", "-shared", "-fPIC", f"-Wl,-soname,{checks.TORCH}")
    execute(*compiler.split(), *flags, source, "-o", to / checks.TORCH)


def environment(machine: str) -> dict[str, str]:
    """Return the variables of a build for a machine; LookupError if there is no compiler for it."""
    # setuptools and setup.py take the machine of Python's platform from it.
    more = {
        "TIGHTROPE_NATIVE": "1",
        "TIGHTROPE_CXXFLAGS": "",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    if machine == HERE:
        return more
    compiler = f"{machine}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        package = f"g++-{machine.replace('_', '-')}-linux-gnu"
        raise LookupError(f"needs {compiler}, on Debian: apt-get install {package}")
    stub = FOLDER / machine / "torch"
    torch_stub(compiler, stub)
    return {**more, "CXX": f"{compiler} -L{stub}"}


def check(wheel: Path, machine: str) -> None:
    """Check a wheel's files and its library; a fault ends the program."""
    folders = [ROOT, TORCH, Path(sys.prefix), Path.home()]
    with zipfile.ZipFile(wheel) as archive:
        faults = [f"{wheel.name}: {fault}" for fault in checks.of_names(archive.namelist())]
        for name in archive.namelist():
            found = checks.of_bytes(archive.read(name), folders)
            faults += [f"{name}: {fault}" for fault in found]
        library = archive.extract(checks.LIBRARY, FOLDER / machine)
    faults += [f"{checks.LIBRARY}: {fault}" for fault in checks.of_library(Path(library), machine)]
    report = execute(sys.executable, "-m", "auditwheel", "show", "--json", wheel)
    faults += [f"auditwheel: {fault}" for fault in checks.of_report(json.loads(report))]
    if faults:
        sys.exit("\n".join(faults))


def run_here(wheel: Path) -> str:
    """Install the wheel into a new environment, with this one's torch, and run the smoke test."""
    venv = FOLDER / "venv"
    execute(sys.executable, "-m", "venv", "--clear", venv)
    python = venv / "bin" / "python"
    execute(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    packages = Path(
        execute(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))")[:-1]
    )
    (packages / "torch-of-the-builder.pth").write_text(f"{TORCH}\n")
    return execute(python, SMOKE, wheel.name)


def run_elsewhere(wheel: Path, machine: str) -> str:
    """Run the smoke test under the emulator; return the reason if there is none."""
    sys.path.insert(1, str(ROOT / "src"))
    from ci.aarch64 import emulator

    reason = emulator.missing() if machine == "aarch64" else "has no emulator"
    if reason is not None:
        return f"not run: {machine} {reason}"
    emulator.install()
    packages = FOLDER / machine / "site-packages"
    shutil.rmtree(packages, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    paths = f"{packages}{os.pathsep}{emulator.FOLDER / 'packages'}"
    return execute(emulator.PYTHON, SMOKE, wheel.name, PYTHONPATH=paths, OMP_NUM_THREADS="1")


def contents(wheel: Path) -> dict[str, int]:
    """Return the files of a wheel with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def source_archive(wheel: Path, more: dict[str, str], options: list[str]) -> Path:
    """Return the source archive, after a comparison of its wheel with the one of the checkout."""
    archive = hook("build_sdist", ROOT, FOLDER / "sdist", {})
    unpacked = FOLDER / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(archive, unpacked)
    source = unpacked / archive.name.removesuffix(".tar.gz")
    # Object files are found by the contents of their sources, so only changed ones are compiled.
    shutil.copytree(ROOT / "build" / "native", source / "build" / "native")
    again = contents(hook("build_wheel", source, FOLDER / "again", more, *options))
    direct = contents(wheel)
    if again != direct:
        different = [name for name in again.keys() | direct if again.get(name) != direct.get(name)]
        sys.exit(f"the source archive gives other files: {', '.join(sorted(different))}")
    return archive


def main(arguments: list[str]) -> int:
    """Build and check; return 1 if a machine has no compiler here."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.wheels",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--machine", default=",".join(MACHINES), help="separated by commas")
    machines = parser.parse_args(arguments).machine.split(",")
    unknown = set(machines).difference(MACHINES)
    if unknown or sys.platform != "linux":
        parser.error(f"unknown: {unknown}" if unknown else "these wheels need Linux")
    FOLDER.mkdir(parents=True, exist_ok=True)
    # The library for this machine, whose needs of torch a build for another machine reads.
    build = ("setup.py", "--quiet", "build_native", "--inplace")
    execute(sys.executable, *build, cwd=ROOT, TIGHTROPE_NATIVE="1")
    done, lacking = [], []
    for machine in machines:
        try:
            more = environment(machine)
        except LookupError as error:
            lacking.append(f"{machine}: not built: {error}")
            continue
        options = [f"--plat-name=manylinux_2_28_{machine}"]
        wheel = hook("build_wheel", ROOT, FOLDER / machine / "wheel", more, *options)
        check(wheel, machine)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
        ran = run_here(wheel) if machine == HERE else run_elsewhere(wheel, machine)
        print(f"  {ran.strip()}", flush=True)
        if not done:
            done.append(source_archive(wheel, more, options))
        done.append(wheel)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for path in done:
        (ROOT / "dist").mkdir(exist_ok=True)
        shutil.copy2(path, ROOT / "dist")
        print(f"dist/{path.name}")
    print("\n".join(lacking), end="\n" if lacking else "")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
