"""Build the CPU kernel for aarch64 and run it under an emulator: `python -m ci.aarch64`.

First its results are compared with those of this machine's AVX2, bit for bit. Then tests run; other
arguments are pytest's, such as `tests/unit/functional/test_tables.py -k bfloat16`. All is kept in build/aarch64.
"""

import subprocess
import sys
import time

from . import bits, emulator

FILES = """
    laws/test_numerics repository/test_conformance laws/test_invariance
    unit/functional/test_tables torch_modes/test_autograd unit/ops/test_gradients
    unit/test_activations unit/test_gates unit/ops/test_phased kernel/cpu/test_instruction_sets
"""
# Inductor compiles with the compiler of the machine that it runs on, and the emulator has none.
WITHOUT = "tests/unit/ops/test_phased.py::test_compiled"


def main(arguments: list[str]) -> int:
    """Run the command; return 1 if bits differ or a test fails."""
    reason = emulator.missing()
    if reason is not None:
        print(f"aarch64 {reason}")
        return 1
    begin = time.monotonic()
    emulator.prepare()
    print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    families = bits.compare(*emulator.bits())
    for name, family in families.items():
        print(f"{name}: {family}")
    print(f"compared in {time.monotonic() - begin:.0f} s", flush=True)
    files = [f"tests/{name}.py" for name in FILES.split()]
    tests = arguments or ["-m", "not slow", "--deselect", WITHOUT, *files]
    done = subprocess.run(
        [emulator.PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=emulator.settings(),
        cwd=emulator.ROOT,
        check=False,
    )
    agree = all(family.agrees() for family in families.values())
    return 0 if agree and done.returncode == 0 else 1


if __name__ == "__main__":
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
