"""Build the fused CPU kernel. The rest of the package is configured in pyproject.toml.

The kernel is a plain shared library, `tightrope/_native.so`, which Python loads with
`torch.ops.load_library`. It uses no symbol of Python and only torch's stable ABI, so one binary
works with every Python and every torch >= 2.10, and its wheel is tagged py3-none-<platform>.

The build needs torch and a C++17 compiler. If one is missing or fails, the build prints the reason
and continues without the library; the package then runs on the plain torch definition.

Environment:
    TIGHTROPE_NATIVE   0: do not build the library.  1: fail if it cannot be built.
    CXX                the compiler; by default the first found of c++, g++, clang++.
    TIGHTROPE_CXXFLAGS more flags to compile and to link with, for example of a sanitizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from unittest.mock import patch

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
MORE_FLAGS = shlex.split(os.environ.get("TIGHTROPE_CXXFLAGS", ""))
# Object files are named by a hash of all their inputs, so builds for one platform and with the same flags can
# share this folder.
_NAMES = ["native", *(flag.split("=")[-1] for flag in MORE_FLAGS[:1])]
OBJECTS = ROOT / "build" / "-".join(_NAMES) / sysconfig.get_platform()
LIBRARY = "_native.dylib" if sys.platform == "darwin" else "_native.so"
JOBS = max(2, os.cpu_count() or 1)

COMMON_FLAGS = [
    "-std=c++17",
    "-ffp-contract=off",  # only explicit fused multiply-adds
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    f"-ffile-prefix-map={ROOT}=.",  # keep paths of this machine out of the binary
    "-Wall",
    "-Wextra",
]

AVX512_FLAGS = [
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    *("-mavx2", "-mfma", "-mf16c"),
    "-mprefer-vector-width=512",
]

# One translation unit per instruction set, each with its own flags. Every aarch64 processor has NEON.
ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "aarch64": {"rotate_neon.cpp": []},
    "arm64": {"rotate_neon.cpp": []},
    "x86_64": {
        "rotate_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
        "rotate_avx512.cpp": AVX512_FLAGS,
        "rotate_avx512bf16.cpp": [*AVX512_FLAGS, "-mavx512bf16"],
    },
}
# Units that older compilers cannot compile -> the macro that tells dispatch.cpp of them.
OPTIONAL = {"rotate_avx512bf16.cpp": "-DTIGHTROPE_AVX512BF16"}


class NotBuilt(Exception):
    """The native library cannot be built; the message is the reason, which the user sees."""


def find_compiler() -> tuple[list[str], str]:
    """Return the command of a C++ compiler and its `--version` output."""
    named = os.environ.get("CXX", "").strip()
    try:
        candidates = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    except ValueError as error:
        raise NotBuilt(f"CXX is not a command: {named!r} ({error})") from error
    for command in candidates:
        if shutil.which(command[0]):
            return command, run_compiler([*command, "--version"])
    names = ", ".join(command[0] for command in candidates)
    raise NotBuilt(f"no C++ compiler was found (looked for: {names})")


def find_torch() -> tuple[list[str], list[str], str]:
    """Return the folders of torch's headers, the folders of its libraries, and its version."""
    try:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths
    except (ImportError, OSError) as error:
        raise NotBuilt(f"torch cannot be imported by this build ({error})") from error
    return include_paths(), library_paths(), str(torch.__version__)


def schemas() -> str:
    """Return the schemas of the operators as strings of C++, separated by commas."""
    package = ROOT / "src" / "tightrope"
    # Empty packages, because the file imports another one by a relative name, but not the library.
    empty = {name: ModuleType(name) for name in ("tightrope", "tightrope.ops")}
    empty["tightrope"].__path__ = [str(package)]
    with patch.dict(sys.modules, empty):
        sys.modules.pop("tightrope._namespace", None)
        path = str(package / "ops" / "schema.py")
        defined = runpy.run_path(path, run_name="tightrope.ops.schema")
    return ", ".join(map(json.dumps, defined["SCHEMAS"]))


def run_compiler(command: list[str]) -> str:
    """Run the compiler, print its warnings and return its stdout."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotBuilt(f"the C++ compiler cannot be run ({error})") from error
    if done.stderr:
        print(done.stderr, file=sys.stderr, end="")
    if done.returncode != 0:
        source = next((Path(part).name for part in command if part.endswith(".cpp")), "")
        on = f" on {source}" if source else ""
        raise NotBuilt(f"{command[0]} failed{on} (exit status {done.returncode})")
    return done.stdout


def accepts(compiler: list[str], flags: list[str]) -> bool:
    """Return whether the compiler knows these flags."""
    command = [*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr, end="")
    return done.returncode == 0


def digest(*parts: str | bytes) -> str:
    """Return a short hash of everything that a built file depends on."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:16]


def target_of(stem: str, key: str, suffix: str) -> Path:
    """Return where a built file is kept."""
    return OBJECTS / f"{stem}-{key}{suffix}"


def produce(stem: str, key: str, suffix: str, command: list[str]) -> Path:
    """Run `command -o <stem>-<key><suffix>` unless that file exists; delete its older versions."""
    target = target_of(stem, key, suffix)
    if not target.exists():
        try:
            OBJECTS.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotBuilt(f"the folder for object files cannot be created ({error})") from error
        for old in OBJECTS.glob(f"{stem}-*{suffix}"):
            old.unlink(missing_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        run_compiler([*command, "-o", str(partial)])
        partial.replace(target)
    return target


def build_library() -> Path:
    """Compile csrc/ into one shared library and return its path, or raise NotBuilt."""
    if sys.platform == "win32":
        raise NotBuilt("there is no native build for Windows yet")
    compiler, version = find_compiler()
    includes, libraries, torch_version = find_torch()

    # The architecture of this Python, not of the system: a 32-bit Python can run on a 64-bit system.
    name = sysconfig.get_platform()
    machine = platform.machine() if name.endswith("universal2") else name.split("-")[-1]
    if machine not in ISA_FLAGS:
        raise NotBuilt(
            f"there is no kernel for this processor ({machine}), only for x86-64 and aarch64"
        )
    torch_flags = ["-O2", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    # -isystem: torch's headers cause warnings under our flags.
    torch_flags += [part for folder in includes for part in ("-isystem", folder)]
    torch_flags += [f"-ffile-prefix-map={folder}=." for folder in includes]
    # Without passes of GCC that gain nothing here, compiling takes an eighth less. -O2 would take two thirds of the
    # time, but makes the loops 5 percent slower (geometric mean over 26 calls with AVX-512).
    optimized = ["-O3"]
    if "clang" not in version:
        passes = "predictive-commoning tree-loop-distribution loop-interchange loop-unroll-and-jam"
        optimized += [f"-fno-{name}" for name in passes.split()]
    units = {
        "older_systems.cpp": ["-O2"],
        "large_results.cpp": ["-O2"],
        "dispatch.cpp": ["-O2"],
        "bind_compiled.cpp": [*torch_flags, f"-DTIGHTROPE_SCHEMAS={schemas()}"],
        "bind_phases.cpp": torch_flags,
        "bind_gradients.cpp": torch_flags,
        "bind_torch.cpp": torch_flags,
    }
    for source, flags in ISA_FLAGS[machine].items():
        if source in OPTIONAL:
            if not accepts(compiler, flags):
                continue
            units["dispatch.cpp"].append(OPTIONAL[source])
        units[source] = [*optimized, *flags]
    missing = [source for source in units if not (CSRC / source).is_file()]
    if missing:
        raise NotBuilt(f"csrc/ lacks {', '.join(missing)}")

    # The loops take longest: they start first.
    first = next(reversed(units))
    # Any file of csrc/ that is not .cpp may be included by a unit.
    headers = [p.read_bytes() for p in sorted(CSRC.glob("*")) if p.suffix != ".cpp"]

    def compile_unit(source: str) -> Path:
        command = [*compiler, *COMMON_FLAGS, *units[source], *MORE_FLAGS, "-c", str(CSRC / source)]
        text = (CSRC / source).read_bytes()
        # Objects do not depend on the folder of the source, see COMMON_FLAGS.
        where = shlex.join(command).replace(str(ROOT), ".")
        key = digest(version, torch_version, where, text, *headers)
        if source == first and not target_of(Path(source).stem, key, ".o").exists():
            say("Compiling the CPU kernel of tightrope: about a minute on two cores.")
        return produce(Path(source).stem, key, ".o", command)

    with ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(compile_unit, reversed(units)))

    # No rpath: `import torch` has loaded libtorch_cpu before tightrope loads this library.
    link = [*compiler, "-shared", *map(str, objects)]
    link += [f"-L{folder}" for folder in libraries] + ["-ltorch_cpu"]
    if sys.platform == "linux":
        link += ["-Wl,--no-undefined"]
    link += MORE_FLAGS
    return produce("_native", digest(version, shlex.join(link)), Path(LIBRARY).suffix, link)


def say(text: str) -> None:
    """Print one paragraph to stderr."""
    print("\n" + textwrap.fill(text, 96, break_on_hyphens=False) + "\n", file=sys.stderr)


class build_native(Command):
    """Build step that builds the library and puts it next to the Python files."""

    description = "build the fused CPU kernel (compile and link csrc/)"
    user_options: ClassVar = [("inplace", "i", "put the library into src/tightrope")]
    boolean_options: ClassVar = ["inplace"]

    def initialize_options(self) -> None:
        self.build_lib = ""
        self.inplace = False
        self.editable_mode = False  # set by setuptools for `pip install -e`
        self.built = False

    def finalize_options(self) -> None:
        self.build_lib = self.get_finalized_command("build").build_lib

    def library(self) -> Path:
        in_source = self.inplace or self.editable_mode
        return (ROOT / "src" if in_source else Path(self.build_lib)) / "tightrope" / LIBRARY

    def run(self) -> None:
        wish = os.environ.get("TIGHTROPE_NATIVE", "")
        if wish not in ("", "0", "1"):
            raise SystemExit(f"TIGHTROPE_NATIVE must be 0, 1 or unset but got {wish!r}.")
        target = self.library()
        try:
            if wish == "0":
                raise NotBuilt("TIGHTROPE_NATIVE=0 is set")
            source = build_library()
        except NotBuilt as reason:
            if wish == "1":
                raise SystemExit(f"TIGHTROPE_NATIVE=1, but {reason}.") from reason
            # Remove the library of an earlier build, which may not match the source.
            target.unlink(missing_ok=True)
            say(
                "tightrope is built without its fused CPU kernel and runs on plain torch, which is "
                f"slower, because {reason}. To build the kernel, install torch, setuptools and a "
                "C++17 compiler, and repeat `pip install` with these options: --no-build-isolation "
                "--no-cache-dir --force-reinstall --no-deps"
            )
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replace the file, not its contents: a running process keeps the old library loaded.
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copy2(source, partial)
        partial.replace(target)
        self.built = True

    # setuptools calls these methods of every build step.
    def get_source_files(self) -> list[str]:
        return [path.relative_to(ROOT).as_posix() for path in sorted(CSRC.glob("*.*"))]

    def get_outputs(self) -> list[str]:
        return [str(self.library())] if self.built else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class wheel_of_any_python(bdist_wheel):
    """Build a wheel, tagged py3-none-<platform> with the native library, py3-none-any without."""

    def run(self) -> None:
        # setuptools never empties its build folder, so the wheel would include files whose sources
        # were renamed or deleted since the last build.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        # Build the library first: the tag of the wheel depends on whether that succeeds.
        self.run_command("build_native")
        native = self.get_finalized_command("build_native").built
        self.root_is_pure = not native
        self.distribution.has_ext_modules = lambda: native
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class build_with_native(build):
    """`build`, with the native library as its last step."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


setup(
    cmdclass={
        "build": build_with_native,
        "build_native": build_native,
        "bdist_wheel": wheel_of_any_python,
    }
)
