"""Run the tests of the Triton kernels with other versions of Triton: `python -m ci.versions.triton [VERSION ...]`.

pip puts each version into a folder of its own, build/triton-VERSION, which comes before the environment on the path:
torch for CPUs imports whatever Triton it finds. Compiled kernels are executed by the emulator, as in every run. Left
out are the tests of machine code, which count what the pinned version makes of a kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
TESTS = ("tests/kernel/triton", "--ignore=tests/kernel/triton/test_machine_code.py")


def run(version: str, arguments: list[str]) -> bool:
    """Run the fast tests with one version, and return whether they passed."""
    folder = ROOT / "build" / f"triton-{version}"
    old = [int(part) for part in version.split(".")[:2]] < [3, 7]
    others = ["numpy<2.4"] if old else []  # which these interpreters need
    pip = ["pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", *pip, f"triton=={version}", *others], check=True)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    pytest = [*"pytest -n 2 --dist worksteal -p no:cacheprovider -m".split(), "not slow"]
    command = [sys.executable, "-m", *pytest, *TESTS, *arguments]
    changed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **changed}, check=False)
    print(f"Triton {version}: {'failed' if done.returncode else 'passed'}", flush=True)
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    """Run the named versions, or all, and return 1 if a test failed; options are passed to pytest."""
    named = [each for each in arguments if each[0].isdigit()]
    others = [each for each in arguments if each not in named]
    passed = [run(version, others) for version in named or VERSIONS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
