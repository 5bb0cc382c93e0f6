"""Check an implementation of rotary position embedding against the conformance vectors.

    python check.py            rope.py in this folder, which needs NumPy alone
    python check.py MODULE     functions of MODULE, from the current folder or installed, with the names
                               and arguments of those in rope.py; those that it lacks are skipped

Exit code 0 if all results are within their bounds, else 1. docs/conformance.md describes the files.
"""

import importlib
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
from rope import channels

FOLDER = Path(__file__).resolve().parent
TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
}
BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


def load(name):
    """Read a safetensors file: the length of a JSON header, the header, the numbers."""
    data = (FOLDER / name).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for key, about in json.loads(data[8:start]).items():
        first, end = (start + at for at in about["data_offsets"])
        values = np.frombuffer(data[first:end], TYPES[about["dtype"]]).reshape(about["shape"])
        if about["dtype"] == "BF16":  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        found[key] = values
    return found


def compare(name, got, wanted, case, dtype, bound):
    """Print how many results differ, and by how many units in the last place of the longer of a pair."""
    size, (first, second) = np.abs(wanted), channels(case["spec"])
    size[:, first] = size[:, second] = np.maximum(size[:, first], size[:, second])
    unit = 2.0 ** (np.floor(np.log2(size + 1e-30)) + 1 - BITS[dtype])
    error = float((np.abs(got.astype(np.float64) - wanted) / unit).max())
    ok = bool(np.isfinite(got).all()) and error <= bound
    differ = f"{(got != wanted).sum()} of {got.size} results differ, by at most {error:.2f} units"
    print(f"{'ok  ' if ok else 'FAIL'} {case['name']}: {name}, {dtype}: {differ}")  # noqa: T201
    return ok


def main(code):
    """Check the functions of a module and print one line for each result; return the exit code."""
    described, fine = json.loads((FOLDER / "vectors.json").read_text()), []
    exact, stacks = load("exact.safetensors"), load("stacks.safetensors")
    for case in described["exact"]:
        own = {
            key.split("/", 1)[1]: v
            for key, v in exact.items()
            if key.startswith(case["name"] + "/")
        }
        if hasattr(code, "frequencies"):
            omega = code.frequencies(case["spec"], case["seq_len"])
            fine.append(bool(np.allclose(omega, own["inv_freq"], rtol=1e-12, atol=0)))
            print(f"{'ok  ' if fine[-1] else 'FAIL'} {case['name']}: frequencies")  # noqa: T201
        # The gradient rotates back and scales alike.
        scaling, back = case["attention_scaling"], {**case, "inverse": not case["inverse"]}
        ways = ("x", "y", case), ("grad_y", "grad_x", {**back, "attention_scaling": 1 / scaling})
        for dtype, (x, key, way) in product(BITS, ways if hasattr(code, "rotate") else ()):
            y = code.rotate(exact[x], own["positions"], own["phase_words"], way, dtype)
            wanted = own[f"{key}/{dtype}"].astype(np.float32)
            fine.append(compare(key, y, wanted, case, dtype, bound=2.5))
    for case, dtype in product(
        described["stacks"] if hasattr(code, "rotate_by_tables") else (), BITS
    ):
        cos, sin = (stacks[f"{case['name']}/{table}"] for table in ("cos", "sin"))
        ways = ("x", "y", sin), ("grad_y", "grad_x", -sin)
        for (x, key, sine), rounding in zip(ways, case["rounding"]):
            y = code.rotate_by_tables(stacks[x], cos, sine, case, dtype, rounding)
            wanted = stacks[f"{case['name']}/{key}/{dtype}"].astype(np.float32)
            fine.append(
                compare(key, y, wanted, case, dtype, bound=1.0 if rounding == "once" else 0.0)
            )
    print(f"{fine.count(True)} of {len(fine)} checks passed.")  # noqa: T201
    return 0 if fine and all(fine) else 1


if __name__ == "__main__":
    sys.path.insert(0, "")
    sys.exit(main(importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "rope")))
