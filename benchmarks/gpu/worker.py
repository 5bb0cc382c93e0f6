"""One process of a run: a share of one stage. What it is to do is in the file that it is given."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from .cases import CASES, FLOOR, OURS, TUNED
from .voice import Voice


def main(arguments: list[str]) -> int:
    """Do what the options in a file say."""
    options: dict[str, Any] = json.loads(Path(arguments[0]).read_text())
    voice = Voice(
        Path(options["lines"]),
        options["skip"],
        options["lost"],
        time.monotonic() + options["seconds"],
        faults=options.get("faults"),
    )
    _STAGES[options["stage"]](voice, options)
    voice.finish()
    # Not by way of atexit, where a device that hangs or a pool of compilers would be waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _device(voice: Voice, options: dict[str, Any]) -> Any:
    """The device, to whose state the voice looks after each failure."""
    from .device import device

    found = device(options["dry"])
    voice.broken = found.broken
    return found


def _share(options: dict[str, Any], every: list[Any]) -> list[Any]:
    return every[options.get("part", 0) :: options.get("parts", 1)]


def _machine(voice: Voice, options: dict[str, Any]) -> None:
    from . import machine

    voice.plan(("versions", "device", "copy bandwidth"))
    voice.unit("versions", 60, machine.versions)
    if voice.unit("device", 60, lambda: machine.device_facts(options["dry"])) is not None:
        device = _device(voice, options)
        voice.unit("copy bandwidth", 60, lambda: machine.copy_bandwidth(device))


def _budgets(voice: Voice, options: dict[str, Any]) -> None:
    from . import checks, counts, timing

    device = _device(voice, options)
    first, check = next(checks.checks(device))
    cases = [case for case in _cases(options) if case.budget]
    voice.plan([first, *(case.name for case in cases), "kernels"])
    voice.unit(first, checks.LIMIT, check)
    for seed, case in enumerate(cases):
        sized = timing.sized(case, device)
        names = [name for name in (OURS, FLOOR) if timing.compare(sized, device, name, voice)]
        if OURS in names:
            timing.time_case(sized, device, names, voice, seed)
        device.release()
    voice.unit("kernels", counts.LIMIT, counts.kernels)


def _checks(voice: Voice, options: dict[str, Any]) -> None:
    from . import checks, timing

    device = _device(voice, options)
    every = [pair for pair in checks.checks(device) if re.search(options["only"], pair[0])]
    mine = dict(_share(options, every))
    voice.plan(mine)
    for name, check in mine.items():
        voice.unit(name, checks.LIMIT, partial(timing.patiently, check, device))


def _tests(voice: Voice, options: dict[str, Any]) -> None:
    from . import suite

    if not options["dry"]:
        _device(voice, options)
    suite.run(voice, options["part"], options["parts"], options["tests"])


def _prepare(voice: Voice, options: dict[str, Any]) -> None:
    from . import timing

    device = _device(voice, options)
    cases = _share(options, _cases(options))
    # Who tunes itself takes long: after all others of all cases.
    order = [
        (case, name)
        for tuned in (False, True)
        for case in cases
        for name in options["names"]
        if (name in TUNED) is tuned
    ]
    voice.plan(f"{case.name} | {name}" for case, name in order)
    for case, name in order:
        timing.compare(timing.sized(case, device), device, name, voice)


def _counts(voice: Voice, options: dict[str, Any]) -> None:
    from . import counts

    device = _device(voice, options)
    every = {n: count for n, count in counts.counts(device) if re.search(options["only"], n)}
    voice.plan(every)
    for name, count in every.items():
        voice.unit(name, counts.LIMIT, count)


def _times(voice: Voice, options: dict[str, Any]) -> None:
    from . import timing

    device = _device(voice, options)
    right = options["right"]
    cases = [case for case in _cases(options) if OURS in right.get(case.name, ())]
    voice.plan(case.name for case in cases)
    for seed, case in enumerate(cases):
        timing.time_case(timing.sized(case, device), device, right[case.name], voice, seed)
        device.release()


def _blocks(voice: Voice, options: dict[str, Any]) -> None:
    device = _device(voice, options)
    from . import variants

    variants.time_shapes(device, [case.name for case in _cases(options)], voice)


def _cases(options: dict[str, Any]) -> list[Any]:
    return [case for case in CASES if re.search(options["only"], case.name)]


_STAGES = {
    "machine": _machine,
    "budgets": _budgets,
    "checks": _checks,
    "tests": _tests,
    "prepare": _prepare,
    "counts": _counts,
    "times": _times,
    "blocks": _blocks,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
