"""One process of a run: checks, or cases, a line of JSON each.

A fault on the device ends the process that it happens in; the next begins with the next case.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch

from .cases import CASES, small


def prepare(dry: bool) -> torch.device:
    """The device; without one, the kernels under Triton's interpreter in place of the CPU's."""
    if not dry:
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["TRITON_INTERPRET"] = "1"
    from tightrope.backends.triton import blocks, operators
    from tightrope.backends.triton.registration import OPERATORS

    # The interpreter runs programs one after the other.
    blocks.PROGRAMS = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in OPERATORS:
            _dry.impl(name, getattr(operators, name), "CPU", allow_override=True)
    return torch.device("cpu")


_dry = torch.library.Library("tightrope", "IMPL")


def say(found: dict[str, Any]) -> None:
    """A line for whoever started this."""
    print(json.dumps(found), flush=True)


def main(arguments: list[str]) -> int:
    """`checks DRY`, or `cases DRY BUDGET ONLY NAME …`."""
    what, dry, *rest = arguments
    device = prepare(dry == "dry")
    if what == "checks":
        from . import checks

        say({"wrong": checks.results(device, quick=dry == "dry")})
        say({"compilations": checks.compilations(device)})
        calls = 1 if dry == "dry" else 2000
        say({"host microseconds": checks.host_microseconds(device, calls)})
        say({"CUDA graph": checks.graph(device)})
        return 0
    from .timing import time_case

    budget, only, *names = rest
    for case in CASES:
        if case.name not in names:
            continue
        say({"begin": case.name})
        sized = small(case) if dry == "dry" else case
        say({"end": case.name, **time_case(sized, device, float(budget), only)})
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
