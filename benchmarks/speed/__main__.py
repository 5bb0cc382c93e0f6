"""Time rotations on this machine's CPU, relative to copying q and k and to other code: `python -m benchmarks.speed`.

A case is a call as a model makes it. Tensors are (rows, heads, tokens, channels). Unless the name of
a case states otherwise, there is 1 row, and q has 32 heads and k 8, of 128 channels. "2048" in a name
is the number of tokens; "decode" has one token per row.

A contender is an implementation of that call: the usual expression in eager torch, the same compiled, another library,
or a plain copy of the memory: `neg_` for calls in place, otherwise `clone`.

The table has the time of this library in microseconds. All other numbers are ratios: the time of this library divided
by the contender's, so 0.1 beside a contender is a tenth of its time, and 1 beside `neg_` or `clone` is the speed of
memory traffic alone. The ratios of a row are from the same rounds.

Each round calls every contender, in a new random order, and medians are compared. Caches are flushed
before each call, except in decode and warm cases. A contender with wrong results is not timed.

Takes a few minutes. Ctrl-C stops and keeps the results of the cases so far. A picture, and a comparison with older
results, are made by `python -m benchmarks.speed.report`.

exit codes: 0 success, 1 a result of this library is wrong, 2 invalid arguments, 130 interrupted
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tightrope.environment import read_environment

from ..pages import written
from . import CONTENDERS, FLOORS, SUITES, Case, measure, report

WRONG, INTERRUPTED = 1, 130

# The default contenders: the eager expression, also compiled, and other libraries.
_AGAINST = "^(eager|compiled eager|transformers|rotary-embedding-torch|onnxruntime|jax jit)$"
_FLOORS = f"^({'|'.join(FLOORS)})$"

# Above this average number of running processes for each core, a warning is printed.
BUSY = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and write the results; return the exit code."""
    parser, options = _parsed(arguments)
    chosen, wanted = _regex(parser, options.only), _regex(parser, options.against)
    cases = [_sized(case, options.threads, options.tokens) for case in SUITES[options.suite]]
    cases = [case for case in cases if chosen.search(case.name)]
    if not cases:
        parser.error(f"--only {options.only!r} matches no case; --list shows them")
    if not any(wanted.search(one.name) for one in CONTENDERS):
        parser.error(f"--against {options.against!r} matches no contender; --list shows them")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        parser.error(f"{options.out.parent}: there is no such folder")
    if options.list:
        print(_listed(cases, wanted))
        return 0
    here = read_environment()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY * here.cores:
        print(
            f"This machine is busy, so that ratios may be wrong: {load:.1f} processes run on its {here.cores} cores."
        )
    results, absent, code = [], dict[str, str](), 0
    included = re.compile(f"{_FLOORS}|{wanted.pattern}")
    often = {"runs": options.runs, "rounds": options.rounds}
    try:
        for index, case in enumerate(cases):
            print(f"measuring {index / len(cases):4.0%}  {case.name}", file=sys.stderr, flush=True)
            result = measure(case, CONTENDERS, **often, wanted=included)
            results.append(report.row(result))
            _note(result, absent)
    except KeyboardInterrupt:
        print("Interrupted; these are the results so far.")
        code = INTERRUPTED
    except RuntimeError as error:
        print(f"Error: {error}", file=sys.stderr)
        return WRONG
    document = {"machine": dataclasses.asdict(here), **often, "results": results}
    if options.out is not None:
        options.out.write_text(written(document), encoding="utf-8")
    ran = {name: None for each in results for name in each["ratios"]}
    if results:
        print(report.ratios(document, dict.fromkeys(report.COLUMNS) | ran))
    for name in absent.keys() - ran.keys():
        print(f"not measured: {name}: {absent[name]}")
    return code


def _parsed(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--suite", default="short", choices=SUITES, help="cases; full takes half an hour per run")
    add("--only", default="", metavar="REGEX", help="cases whose names match: 'decode|fp32'")
    add(
        "--against",
        default=_AGAINST,
        metavar="REGEX",
        help="contenders whose names match; by default eager, compiled eager and installed libraries",
    )
    add("--threads", type=_number(1, 1024), help="threads of each contender; by default torch's")
    add("--tokens", type=_number(1, 2**20), help="tokens of all cases but decoding")
    add("--runs", type=_number(1, 100), default=1, help="how often everything is measured")
    add("--rounds", type=_number(1, 1000), default=9, help="calls of each contender in a run")
    add("--list", action="store_true", help="list the cases and contenders; measure nothing")
    add("--out", type=Path, metavar="FILE", help="write the numbers as JSON")
    return parser, parser.parse_args(arguments)


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high} but got {value}")
        return value

    return number


def _regex(parser: argparse.ArgumentParser, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        parser.error(f"{text!r} is not a valid regular expression: {error}")


def _sized(case: Case, threads: int | None, tokens: int | None) -> Case:
    case = replace(case, threads=threads or case.threads or torch.get_num_threads())
    if tokens is None or case.tokens == 1:
        return case
    name = case.name.replace(str(case.tokens), str(tokens))
    return replace(case, tokens=tokens, name=name)


def _listed(cases: list[Case], wanted: re.Pattern[str]) -> str:
    """The cases, and in how many each contender takes part, or why it takes part in none."""
    lines = ["Cases", *(f"  {case.name}" for case in cases), "Contenders"]
    for contender in CONTENDERS:
        reasons = [contender.why_not(case) for case in cases]
        state = f"in {reasons.count(None)} of {len(cases)} cases"
        if None not in reasons:
            state = str(reasons[0])
        elif not wanted.search(contender.name) and contender.name not in ("tightrope", *FLOORS):
            state = "only with --against"
        lines.append(f"  {contender.name}: {state}")
    return "\n".join(lines)


def _note(result: dict[str, Any], absent: dict[str, str]) -> None:
    """Note why selected contenders did not take part.

    A failure or a wrong result matters more than a case that does not apply.
    """
    for name, reason in result["absent"].items():
        fault = reason.startswith(("its result", "it failed"))
        if reason != "not selected" and name not in FLOORS and (fault or name not in absent):
            absent[name] = reason


if __name__ == "__main__":
    sys.exit(main())
