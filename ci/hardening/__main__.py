"""Searches the kernel and the readers of files for faults of memory, races and leaks.

    python -m ci.hardening --quick         about a minute
    python -m ci.hardening --minutes 60    everything, with fuzzers that run for so many minutes in all

The quick part builds the kernel with AddressSanitizer and runs a few tests of each instruction set, mutated
calls and files, and a short soak. The long part adds UndefinedBehaviorSanitizer, ThreadSanitizer, half of all
tests with memory filled with NaN, coverage-guided fuzzing and ten million calls. It needs gcc; for guided
fuzzing also clang and the package atheris, without which inputs are mutated at random. The last lines are a
table; the exit code is 1 if a stage has a finding. Inputs that fuzzing kept, and findings, are in
build/hardening/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "ci" / "hardening"
OUT = ROOT / "build" / "hardening"

# The tests of the kernel; the others are about Python code or take long.
KERNEL = """
    kernel/cpu/test_raw_operators unit/test_activations unit/ops/test_memory
    unit/ops/test_gradients unit/test_angles laws/test_derivatives unit/ops/test_gating
    torch_modes/test_autograd kernel/cpu/test_instruction_sets laws/test_invariance
    kernel/cpu/test_large_results unit/ops/test_learned unit/spec/test_lengths
    unit/spec/test_stated_lengths unit/spec/test_unread_lengths
    unit/functional/test_lrpe laws/test_numerics unit/functional/test_out unit/test_phase_words
    unit/ops/test_phased unit/phases/test_phases unit/nn/test_polar laws/test_properties
    unit/functional/test_rerotate unit/functional/test_rounding unit/functional/test_scan
    laws/test_random_stages unit/stacks/test_stacks unit/functional/test_tables
"""
# Those that compare results of different numbers of threads, or draw many kinds of calls.
THREADED = """
    kernel/cpu/test_raw_operators laws/test_random_stages unit/test_activations
    unit/ops/test_gradients torch_modes/test_autograd laws/test_invariance unit/ops/test_learned
    unit/ops/test_phased unit/phases/test_phases unit/test_phase_words
    unit/functional/test_rounding unit/functional/test_lrpe unit/functional/test_tables
    unit/ops/test_gating laws/test_numerics unit/functional/test_scan
    unit/functional/test_rerotate
"""


class Skipped(Exception):
    """A stage cannot run here; the message is the reason."""


def gcc_file(name: str) -> str:
    if shutil.which("g++") is None:
        raise Skipped("there is no g++")
    path = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        raise Skipped(f"g++ lacks {name}")
    return path


def run(*command: object, source: Path = ROOT / "src", **more: str) -> str:
    """Run Python; return its output, or raise RuntimeError with the end of it."""
    path = [source, ROOT, os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **more}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        cwd=ROOT,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{done.stdout[-6000:]}\nexit code {done.returncode}")
    return done.stdout


def build(name: str, flags: str, compiler: str = "g++") -> Path:
    """Build the library with more flags; return the folder to import it from."""
    more = {"CXX": compiler, "TIGHTROPE_NATIVE": "1", "TIGHTROPE_CXXFLAGS": flags}
    run("setup.py", "-q", "build", "--build-lib", OUT / name, source=OUT, **more)
    return OUT / name


def tested(files: str, one_in: int, *options: str, **more: str) -> int:
    """Run one in `one_in` of these tests; return how many ran."""
    names = [f"tests/{name}.py" for name in files.split()]
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "ci.hardening.one_in",
        "-m",
        "not slow",
        *options,
    )
    output = run("-m", "pytest", *options, *names, TIGHTROPE_ONE_IN=str(one_in), **more)
    return int(re.findall(r"(\d+) passed", output)[-1])


def must_fail(why: str, code: str, **more: str) -> None:
    """Check that a sanitizer reports a fault that is there."""
    try:
        run("-c", code, **more)
    except RuntimeError as error:
        if why in str(error):
            return
        raise
    raise RuntimeError(f"no report of a planted fault: {why}")


# --- stages: each returns the number of cases -----------------------------------------------------


def addresses(quick: bool) -> int:
    """AddressSanitizer, and UndefinedBehaviorSanitizer in the long part, on every instruction set."""
    libraries = [gcc_file(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    flags = "-fsanitize=address -O0 -g1"
    if not quick:
        flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g1"
    more = {
        "source": build("quick" if quick else "addresses", flags),
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # The kernel reads 64 numbers from the memory of 63. A load that begins inside has a name of its own.
    call = (
        "import torch, tightrope; x = torch.ones(1, 1, 1, 64); x.untyped_storage().resize_(252); "
    )
    call += "tightrope.functional.rotate(x, tightrope.RopeSpec(64))"
    must_fail("SUMMARY: AddressSanitizer", call, **more)
    if quick:
        return tested("kernel/cpu/test_raw_operators", 3, **more)  # runs on every instruction set
    there = run("-c", "from tightrope.backends import cpu; print(*cpu.instruction_sets())", **more)
    return sum(tested(KERNEL, 4, TIGHTROPE_CPU_ISA=name, **more) for name in there.split())


def races(quick: bool) -> int:
    """ThreadSanitizer: every call of the kernel is divided among three threads."""
    library = gcc_file("libtsan.so")
    if shutil.which("setarch") is None:
        raise Skipped("there is no setarch")
    from torch.utils.cpp_extension import include_paths

    OUT.mkdir(parents=True, exist_ok=True)
    threads = OUT / "threads.o"
    flags = [
        "-std=c++17",
        "-fPIC",
        "-O1",
        "-fsanitize=thread",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]
    flags += [part for folder in include_paths() for part in ("-isystem", folder)]
    subprocess.run(["g++", *flags, "-c", HERE / "threads.cpp", "-o", threads], check=True)
    own = f"-fsanitize=thread -DTIGHTROPE_ELEMENTS_PER_THREAD=1 -O1 -g1 -Wl,-Bsymbolic {threads}"
    more = {
        "source": build("races", own),
        "LD_PRELOAD": f"{library}:{gcc_file('libstdc++.so.6')}",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=66:allocator_may_return_null=1",
        "OMP_NUM_THREADS": "3",
    }
    # With TIGHTROPE_RACE, shares overlap.
    call = "import torch; from tightrope import RopeSpec, functional; "
    call += "functional.rotate(torch.randn(2, 4, 33, 64), RopeSpec(64))"
    must_fail("data race", call, TIGHTROPE_RACE="1", **more)
    return tested(THREADED, 4, **more)


def unwritten(quick: bool) -> int:
    """Memory that is read before it is written: NaN in it must change no result."""
    del quick
    must_fail(
        "AssertionError",
        "import ci.hardening.filled, torch; assert not torch.empty(9).isnan().any()",
    )
    tests = ROOT / "tests"
    names = {str(path.relative_to(tests).with_suffix("")) for path in tests.rglob("test_*.py")}
    documents = {"repository/test_docs", "repository/test_site"}
    if not documents < names:
        raise RuntimeError(
            "tests/**/test_*.py are not all tests: those of the documents are not there"
        )
    chosen = " ".join(sorted(names - documents))
    # Deterministic algorithms, which fill memory, warn where torch has none.
    return tested(chosen, 2, "-p", "ci.hardening.filled", "-W", "ignore::UserWarning")


def fuzzed(script: str, seconds: int, **more: str) -> int:
    """Run a fuzzer; return the number of executions."""
    guided = importlib.util.find_spec("atheris") is not None and seconds > 60
    executions = 0
    # A guided process grows by a gigabyte per minute, and then waits for memory until inputs time out.
    rounds = -(-seconds // 300)
    for _ in range(rounds):
        flags = ["--seconds", str(seconds // rounds), "--corpus", str(OUT / script)]
        output = run("-m", f"ci.hardening.fuzz_{script}", *flags, *["--guided"] * guided, **more)
        print("\n".join(re.findall(r"^#\d+\s+DONE.*|^\{.*", output, re.M)))
        counts = re.findall(r'number_of_executed_units: (\d+)|"executions": (\d+)', output)
        executions += int(counts[-1][guided ^ 1])
    return executions


def calls(quick: bool, seconds: int) -> int:
    """Raw operators with any sizes, strides, dtypes and options."""
    atheris = importlib.util.find_spec("atheris")
    clang = next(
        (name for name in ("clang++", "clang++-19", "clang++-16") if shutil.which(name)), None
    )
    if quick or atheris is None or clang is None or atheris.origin is None:
        return fuzzed("kernel", min(seconds, 60))
    # The runtime of the sanitizer comes with atheris, so the library must not bring its own.
    flags = (
        "-fsanitize=address,fuzzer-no-link -O1 -g1 -Wl,-z,undefs -Wno-unused-command-line-argument"
    )
    more = {
        "source": build("calls", flags, clang),
        "LD_PRELOAD": str(Path(atheris.origin).parents[1] / "asan_with_fuzzer.so"),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    return fuzzed("kernel", seconds, **more)


def files(quick: bool, seconds: int) -> int:
    """Files of weights and configurations."""
    del quick
    return fuzzed("files", seconds)


def soak(quick: bool) -> int:
    """Many calls, without growth of memory."""
    if not Path("/proc/self/statm").exists():
        raise Skipped("this system does not report resident memory")
    output = run(
        "-m", "ci.hardening.soak", "--calls", 200_000 if quick else 10_000_000, OMP_NUM_THREADS="2"
    )
    print(output.strip())
    return int(json.loads(output.splitlines()[-1])["executions"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only what takes about a minute")
    parser.add_argument("--minutes", type=float, default=10, help="of fuzzing, in the long part")
    parser.add_argument("--only", nargs="*", help="names of stages")
    chosen = parser.parse_args()
    quick = chosen.quick
    seconds = 8 if quick else int(30 * chosen.minutes)
    stages: dict[str, Callable[[], int]] = {
        "addresses": lambda: addresses(quick),
        "races": lambda: races(quick),
        "unwritten": lambda: unwritten(quick),
        "calls": lambda: calls(quick, seconds),
        "files": lambda: files(quick, seconds),
        "soak": lambda: soak(quick),
    }
    if quick:
        del stages["races"], stages["unwritten"]
    rows, failed = [], False
    for name, stage in stages.items():
        if chosen.only and name not in chosen.only:
            continue
        begin, cases, found = time.monotonic(), 0, "none"
        try:
            cases = stage()
        except Skipped as reason:
            found = f"skipped: {reason}"
        except RuntimeError as error:
            print(error)
            found, failed = "see above", True
        rows.append(f"{name:10} {cases:12,} {time.monotonic() - begin:8.0f}  {found}")
    print("\n".join([f"{'stage':10} {'cases':>12} {'seconds':>8}  findings", *rows]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
