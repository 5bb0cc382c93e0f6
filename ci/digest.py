"""Check that a refactoring leaves every result the same, bit by bit.

    python -m ci.digest before.jsonl                on the old tree
    python -m ci.digest after.jsonl before.jsonl    on the new one

It runs the generated calls of tests/support/calls.py, with each instruction set of this machine, in the sizes of
the tests and in sizes that fill vectors and have a rest. A line per call has a digest of the results, of their
gradients and of second derivatives, and their strides, or the error. With a second file, it prints the calls that
both files have and whose digests differ, and exits with 1 if there are any, or if the files share no call.

Each tree draws its own calls, so after a change of the public functions both still say the same of the same case.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support import calls
from tightrope.backends import cpu

# Of tokens, of channels, and the slices.
SIZES: list[tuple[int, int, dict[str, tuple[int, int]]]] = [
    (calls.TOKENS, calls.WIDTH, calls.CHANNELS),
    (40, 136, {"whole": (136, 0), "slice": (70, 3)}),
]


def digest(tensors: list[torch.Tensor]) -> str:
    """Return a digest of the bits of tensors, and their strides."""
    found, strides = hashlib.sha256(), []
    for one in tensors:
        values = one.detach().contiguous()
        found.update(values.view(-1).view(torch.uint8).numpy().tobytes())
        strides.append([str(one.dtype), [*one.shape], [*one.stride()]])
    return f"{found.hexdigest()[:16]} {json.dumps(strides)}"


def outcome(call: calls.Call) -> dict[str, str]:
    """Return the digests of what a call gives, of its gradients, and of second derivatives."""
    try:
        once, twice = call.derivatives(), call.derivatives(twice=True)
    except Exception as error:  # noqa: BLE001  (which is the outcome)
        return {"error": f"{type(error).__name__}: {error}"}
    named = {"results": once.results, "gradients": once.first.values()}
    named |= {"in a graph": twice.first.values(), "second": twice.second.values()}
    return {name: digest(list(tensors)) for name, tensors in named.items()}


def rows() -> Iterator[dict[str, Any]]:
    """Run all calls; yield a row for each."""
    torch.set_num_threads(1)
    for name in cpu.instruction_sets():
        cpu.use_instruction_set(name)
        for calls.TOKENS, calls.WIDTH, calls.CHANNELS in SIZES:
            for case in calls.CASES:
                key = {"set": name, "tokens": calls.TOKENS, **case, "dtype": str(case["dtype"])}
                yield {"case": key, **outcome(calls.Call(case))}


def main(path: Path, *before: Path) -> int:
    """Write the rows, and compare them with those of other files; return the exit code."""
    with warnings.catch_warnings(), path.open("w", encoding="utf-8") as file:
        warnings.simplefilter("ignore")
        for row in rows():
            print(json.dumps(row), file=file)

    def read(path: Path) -> dict[str, Any]:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {json.dumps(row.pop("case")): row for row in found}

    new, differ = read(path), 0
    for old in map(read, before):
        both = [key for key in old if key in new]
        for key in both:
            for name in sorted({*old[key], *new[key]}):
                if old[key].get(name) != new[key].get(name):
                    differ += 1
                    print(f"{key}\n    {name}: {old[key].get(name)} -> {new[key].get(name)}")
        print(f"{len(both)} calls are in both files, of {len(old)} and {len(new)}")
        differ += not both  # nothing was compared
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
