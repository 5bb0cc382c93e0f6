"""Build the CPU kernel for aarch64 and run it under an emulator: `python tests/aarch64`.

First its results are compared with those of this machine's AVX2, bit for bit. Then tests run; other
arguments are pytest's, such as `tests/test_tables.py -k bfloat16`. All is kept in build/aarch64.
"""

import subprocess
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # started by the name of the folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

# Acts of doubles call the C library, whose erfc has other bits on other processors.
CLOSE = {"staged float64": 4e-16}
FILES = ("numerics", "conformance", "invariance", "tables", "gradients", "angle_gradients")
FILES += ("activations", "gates", "phased", "instruction_sets")


def main(arguments: list[str]) -> int:
    """Run the command; return 1 if bits differ or a test fails."""
    from aarch64 import bits, emulator

    reason = emulator.missing()
    if reason is not None:
        print(f"aarch64 {reason}")
        return 1
    begin = time.monotonic()
    emulator.prepare()
    print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    differ = False
    for family, (cases, equal, most) in bits.compare(*emulator.bits()).items():
        note = (
            "" if equal == cases else f"; others differ by up to {most:.1g} of the largest number"
        )
        print(f"{family}: {equal} of {cases} results have the bits of AVX2{note}")
        differ |= equal < cases and most > CLOSE.get(family, 0.0)
    print(f"compared in {time.monotonic() - begin:.0f} s", flush=True)
    tests = arguments or ["-m", "not slow", *(f"tests/test_{name}.py" for name in FILES)]
    done = subprocess.run(
        [emulator.PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=emulator.settings(),
        cwd=emulator.ROOT,
        check=False,
    )
    return 1 if differ or done.returncode else 0


if __name__ == "__main__":
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
