"""Time rotations beside copies of the same memory and beside other code: `python -m benchmarks`.

A case is a call as a model makes it; a contender is an implementation of that call: this library, the
usual expression in eager torch, the same compiled, another library, or a plain copy of the memory
(`neg_` for calls in place, otherwise `clone`). `--list` names both, and the suites.

The table has the time of this library in microseconds. All other numbers are ratios: the time of this
library divided by the contender's, so 0.1 beside a contender is a tenth of its time, and 1 beside `neg_`
or `clone` is the speed of memory traffic alone. The ratios of a row are from the same rounds, and have
their range over the runs. Some cases have bounds, the largest ratio that is allowed: a bound is "held" or
"MISSED" if all runs agree, else "open".

A contender with wrong results is not timed. Ctrl-C stops and keeps the results of the cases so far.
`benchmarks/measure.py` explains the method.

exit codes: 0 success, 1 a result of this library is wrong or a bound is missed, 2 invalid arguments or
no GPU, 130 interrupted
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import report
from .calls import EVERY, result_of
from .cases import SUITES, Case, Suite, fitted, tiny
from .contenders import FLOORS
from .measure import DRY, OURS, QUICK, How
from .pages import between_marks

FINE, WRONG, UNABLE, INTERRUPTED = 0, 1, 2, 130

#: Number of copies of q and k that must fit in GPU memory: eager contenders need several.
COPIES = 40


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and write the results; return the exit code."""
    parser, options = _parsed(arguments)
    chosen = _regex(parser, options.only)
    if options.report:
        return _report(parser, options, chosen)
    name = options.suite or ("gpu" if options.device == "cuda" else "short")
    suite = SUITES[name]
    wanted = _regex(parser, options.against if options.against is not None else suite.against)
    if re.search(suite.against, FLOORS[0]):
        wanted = re.compile(f"{wanted.pattern}|^({'|'.join(FLOORS)})$")
    if options.dry_run and options.against is None:
        wanted = re.compile(f"^(?!.*compiled)(?=.*({wanted.pattern}))")
    device = options.device or suite.device
    if device != suite.device and any(case.kind != "rotation" for case in suite.cases):
        parser.error(f"--device must be {suite.device} for the suite {name} but got {device}")
    if device == "cuda" and not torch.cuda.is_available() and not (options.dry_run or options.list):
        print("torch finds no GPU: run on a machine with one, or pass --dry-run", file=sys.stderr)
        return UNABLE
    cases = [case for case in _sized(suite, device, options) if chosen.search(case.name)]
    if not cases:
        parser.error(f"--only {options.only!r} matches no case; --list shows them")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"{options.json.parent}: there is no such folder")
    if options.list:
        print(_listed(cases, wanted))
        return FINE
    how = DRY if options.dry_run else QUICK if options.quick else How(options.runs)
    command = shlex.join(["python", "-m", "benchmarks", *_public(arguments)])
    document, code = report.new(name, command, how.runs), FINE
    results: list[dict[str, Any]] = document["results"]
    whole = {case.name: case.moved for case in suite.cases}
    try:
        for index, case in enumerate(cases):
            print(f"measuring {index / len(cases):4.0%}  {case.name}", file=sys.stderr, flush=True)
            smaller = case.moved < whole[case.name] and not options.dry_run
            cut = {"cut": True} if smaller else {}
            try:
                found = result_of(case, wanted, how) | cut
            except RuntimeError as error:
                print(f"Error: {error}", file=sys.stderr)
                found, code = {"case": case.name, "absent": {OURS: str(error)}}, WRONG
            results.append({"suite": name, **found})
            if options.json is not None:
                report.save(options.json, document)
    except KeyboardInterrupt:
        print("Interrupted; these are the results so far.")
        code = INTERRUPTED
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return UNABLE
    judged = not (options.dry_run or options.quick)
    if not judged:
        print(
            "A dry run: times mean nothing." if options.dry_run else "A first look: quote no time."
        )
    print(report.ratios(document, name))
    every = list(report.verdicts(name, results)) if judged else []
    if text := report.summary(results, every):
        print(text)
    return code or (WRONG if any(verdict == "MISSED" for verdict, _ in every) else FINE)


def _parsed(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    about = "; ".join(f"{name}: {suite.about}" for name, suite in SUITES.items())
    add("--suite", choices=SUITES, help=f"{about} (default: short, or gpu)")
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="where the calls run; by default that of the suite",
    )
    add("--only", default="", metavar="REGEX", help="cases whose names match: 'decode|fp32'")
    add("--against", metavar="REGEX", help="contenders whose names match; by default the suite's")
    add("--runs", type=_number(1, 100), default=3, help="how often everything is measured (3)")
    add("--threads", type=_number(1, 1024), help="threads of each contender")
    add(
        "--quick",
        action="store_true",
        help="one short run, for a first look; bounds are not judged",
    )
    add("--dry-run", action="store_true", help="tiny sizes on the CPU, without compiled contenders")
    add("--list", action="store_true", help="list the cases and contenders; measure nothing")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write, or add to, a file of this machine's results",
    )
    of_file = parser.add_argument_group("tables of files that --json wrote; nothing is measured")
    more = of_file.add_argument
    more(
        "--report",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="print tables; of several, the grid's",
    )
    more("--before", type=Path, metavar="FILE", help="older results to compare with")
    more(
        "--page", type=Path, help="put the table between the marks <!-- NAME OF THE SUITE --> there"
    )
    more("--png", type=Path, metavar="PICTURE", help="draw times relative to a copy")
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


def _public(arguments: list[str] | None) -> Iterator[str]:
    """Yield the arguments without the name of the file of results, which is the reader's own."""
    given = iter(sys.argv[1:] if arguments is None else arguments)
    for text in given:
        if text == "--json":
            next(given, None)
        elif not text.startswith("--json="):
            yield text


def _sized(suite: Suite, device: str, options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases of a suite as they run here: tiny in a dry run, smaller where a GPU's memory is."""
    room = 0
    if device == "cuda" and torch.cuda.is_available():
        room = torch.cuda.mem_get_info()[1] // COPIES
    for case in suite.cases:
        case = replace(case, device=device, threads=options.threads or case.threads)
        if options.dry_run:
            case = tiny(case)
        elif room:
            case = fitted(case, room)
        yield case


def _listed(cases: list[Case], wanted: re.Pattern[str]) -> str:
    """The suites, the cases, and in how many each contender takes part."""
    lines = ["Suites", *(f"  {name}: {suite.about}" for name, suite in SUITES.items())]
    lines += ["Cases", *(f"  {case.name}" for case in cases)]
    rotations = [case for case in cases if case.kind == "rotation"]
    lines += ["Contenders"] if rotations else []
    for contender in EVERY if rotations else ():
        count = sum(map(contender.applies, rotations))
        left = contender.name != OURS and not wanted.search(contender.name)
        only = ", only with --against" * (left and count > 0)
        lines.append(f"  {contender.name}: in {count} of {len(rotations)} cases{only}")
    return "\n".join(lines)


def _report(
    parser: argparse.ArgumentParser, options: argparse.Namespace, chosen: re.Pattern[str]
) -> int:
    """Print or write the tables of files."""
    columns = _regex(parser, options.against or "")
    documents = [json.loads(path.read_text("utf-8")) for path in options.report]
    for one in documents:
        one["results"] = [
            {**r, "ratios": {n: x for n, x in r.get("ratios", {}).items() if columns.search(n)}}
            for r in one["results"]
            if chosen.search(r["case"])
        ]
    names = [options.suite] if options.suite else list(documents[0]["suites"])
    if options.before:
        print(report.changes(json.loads(options.before.read_text("utf-8")), documents[0]))
        return FINE
    for name in names:
        several = len(documents) > 1
        text = report.across(documents, name) if several else report.ratios(documents[0], name)
        if options.png:
            report.draw(options.png, documents[0], name)
        if options.page:
            try:
                between_marks(options.page, name, text)
            except ValueError as error:
                parser.error(str(error))
        else:
            print(text)
    return FINE


if __name__ == "__main__":
    sys.exit(main())
