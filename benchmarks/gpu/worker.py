"""One process of a run: a share of one stage. What it is to do is in the file that it is given."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

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

    voice.unit("device", 60, lambda: machine.device_facts(options["dry"]))
    device = _device(voice, options)
    voice.unit("copy bandwidth", 60, lambda: machine.copy_bandwidth(device))


def _checks(voice: Voice, options: dict[str, Any]) -> None:
    from . import checks

    device = _device(voice, options)
    for name, check in _share(options, list(checks.checks(device))):
        if re.search(options["only"], name):
            voice.unit(name, checks.LIMIT, check)


def _tests(voice: Voice, options: dict[str, Any]) -> None:
    from . import suite

    if not options["dry"]:
        _device(voice, options)
    suite.run(voice, options["part"], options["parts"], options["tests"], options["files"])


def _prepare(voice: Voice, options: dict[str, Any]) -> None:
    from . import timing

    device = _device(voice, options)
    cases = _share(options, _cases(options))
    # Who tunes itself takes long: after all others of all cases.
    for tuned in (False, True):
        for case in cases:
            for name in options["names"]:
                if (name in timing.TUNED) is tuned:
                    timing.compare(timing.sized(case, device), device, name, voice)


def _counts(voice: Voice, options: dict[str, Any]) -> None:
    from . import counts

    device = _device(voice, options)
    for name, count in counts.counts(device):
        voice.unit(name, counts.LIMIT, count)


def _times(voice: Voice, options: dict[str, Any]) -> None:
    from . import timing

    device = _device(voice, options)
    for seed, case in enumerate(_cases(options)):
        names = options["right"].get(case.name, [])
        timing.time_case(timing.sized(case, device), device, names, voice, seed)
        device.release()


def _cases(options: dict[str, Any]) -> list[Any]:
    from .cases import CASES

    return [case for case in CASES if re.search(options["only"], case.name)]


_STAGES = {
    "machine": _machine,
    "checks": _checks,
    "tests": _tests,
    "prepare": _prepare,
    "counts": _counts,
    "times": _times,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
