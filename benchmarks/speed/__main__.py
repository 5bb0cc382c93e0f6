"""Time rotations on this machine's CPU, relative to copying q and k: `python -m benchmarks.speed`.

A case is a call as a model makes it. Tensors are (rows, heads, tokens, channels). Unless the name of
a case states otherwise, there is 1 row, and q has 32 heads and k 8, of 128 channels. "2048" in a name
is the number of tokens; "decode" has one token per row.

A contender is an implementation of that call: this library, the usual expression in eager torch, the
same compiled, another library, or a plain copy of the memory.

The table has the time of a copy, with its unit. All other numbers are ratios, without a unit: the
contender's time divided by the time of one copy of q and k. 1 is the speed of memory traffic alone, 2
takes twice as long. The ratios of a row are from the same rounds, so compare numbers in a row; 6.0
beside 1.5 means four times the time.

Each round calls every contender, in a new random order, and medians are compared. Caches are flushed
before each call, except in decode and warm cases. A contender with wrong results is not timed.

Takes a few minutes. Ctrl-C stops after the current case and keeps the results so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

from tightrope.environment import Environment, read_environment

from . import CONTENDERS, FLOORS, SUITES, Case, measure, table
from .interrupt import Interrupt

#: Exit codes. CLOSED is a shell's code for a process that wrote to a closed pipe (`| head -1`).
WRONG, MISTAKE, INTERRUPTED, CLOSED = 1, 2, 130, 141

_AFTER = """\
examples:
  python -m benchmarks.speed --plot speed.png
  python -m benchmarks.speed --list
  python -m benchmarks.speed --only 'prefill.*bf16' --against 'eager|transformers' --json
  python -m benchmarks.speed --only decode --threads 1 --runs 3 --out speed.json

exit codes: 0 success, 1 a result of this library is wrong or the machine failed (a full disk),
2 invalid arguments, 130 interrupted
"""

# The default contenders: the eager expression, also compiled, and other libraries.
_AGAINST = "^(eager|compiled eager|transformers|rotary-embedding-torch|onnxruntime|jax jit)$"
_FLOORS = f"^({'|'.join(FLOORS)})$"

# Failures of the machine, not of the user's input.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EFBIG)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and write the results; return the exit code."""
    try:
        code = _run(_options(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return CLOSED
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return INTERRUPTED
    except OSError as error:  # for example a full disk behind `>`
        sys.stderr.write(f"Error: the output could not be written: {error.strerror or error}.\n")
        _drop_output()
        return WRONG
    return code


def stop(text: str, code: int = MISTAKE) -> NoReturn:
    """Print one line on the error stream and exit with `code`."""
    sys.stderr.write(f"Error: {' '.join(text.split())}\n")
    raise SystemExit(code)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage."""
        stop(f"{message}." if message[-1] != "." else message)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        epilog=_AFTER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--suite",
        default="short",
        metavar="NAME",
        help=f"cases to measure: {' or '.join(SUITES)} (half an hour per run); by default short",
    )
    add(
        "--only",
        default="",
        metavar="REGEX",
        help="cases whose names match, such as 'decode|fp32'",
    )
    add(
        "--against",
        metavar="REGEX",
        help="contenders whose names match; by default eager, compiled eager and installed libraries",
    )
    add(
        "--threads",
        type=_number(1, 1024),
        metavar="N",
        help="threads of each contender; by default torch's",
    )
    add("--tokens", type=_number(1, 2**20), metavar="N", help="tokens of all cases but decoding")
    add(
        "--runs",
        type=_number(1, 100),
        default=1,
        metavar="N",
        help="number of runs, each of which measures everything; the table has medians, the JSON "
        "every run; by default 1",
    )
    add(
        "--rounds",
        type=_number(1, 1000),
        default=9,
        metavar="N",
        help="rounds per run; each calls every contender; by default 9",
    )
    add("--list", action="store_true", help="list the cases and contenders; measure nothing")
    add("--out", type=Path, metavar="FILE", help="write the numbers as JSON, times in seconds")
    add("--plot", type=Path, metavar="FILE", help="draw a picture: .png, .pdf or .svg")
    add(
        "--json",
        action="store_true",
        help="print one JSON object in place of the table; progress is on the error stream",
    )
    return parser.parse_args(arguments)


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high} but got {value}")
        return value

    return number


def _run(options: argparse.Namespace) -> int:
    if options.suite not in SUITES:
        stop(f"--suite must be {' or '.join(SUITES)} but got {options.suite!r}.")
    against = options.against
    wanted = _regex("--against", _AGAINST if against is None else against)
    chosen = _regex("--only", options.only)
    cases = [_sized(case, options.threads, options.tokens) for case in SUITES[options.suite]]
    cases = [case for case in cases if chosen.search(case.name)]
    if not cases:
        stop(f"--only {options.only!r} matches no case; --list shows them.")
    if against is not None and not any(wanted.search(one.name) for one in CONTENDERS):
        stop(f"--against {against!r} matches no contender; --list shows them.")
    if options.list:
        print(table.listed(cases, wanted))
        return 0
    if options.plot is not None:
        _check_can_draw(options.plot)
    for place in (options.out, options.plot):
        if place is not None and not place.absolute().parent.is_dir():
            stop(f"{place.parent}: there is no such folder.")
        if place is not None and place.is_dir():
            stop(f"{place}: it is a folder.")
    here = read_environment()
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    results, stopped = _measure_all(cases, wanted, options.runs, options.rounds)
    for result in results:
        result["copies"] = table.copies_of(result)
    document = {
        "machine": dataclasses.asdict(here),
        "load": load,
        "runs": options.runs,
        "rounds": options.rounds,
        "interrupted": stopped,
        "results": results,
    }
    written = _write(document, here, options)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(table.summary(here, results, document, table.width_here()))
        for line in written:
            print(line)
    return INTERRUPTED if stopped else 0


def _regex(option: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        stop(f"{option} {text!r} is not a valid regular expression: {error}.")


def _check_can_draw(path: Path) -> None:
    """Stop before the long measurement if its picture could not be drawn."""
    if find_spec("matplotlib") is None:
        stop("--plot needs matplotlib. Install with `python -m pip install matplotlib`.")
    from matplotlib.backend_bases import FigureCanvasBase

    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        stop(f"--plot must be a .png, .pdf or .svg file but got {str(path)!r}.")


def _sized(case: Case, threads: int | None, tokens: int | None) -> Case:
    case = replace(case, threads=threads or case.threads or torch.get_num_threads())
    if tokens is None or case.tokens == 1:
        return case
    name = case.name.replace(str(case.tokens), str(tokens))
    return replace(case, tokens=tokens, name=name)


def _measure_all(
    cases: list[Case], wanted: re.Pattern[str], runs: int, rounds: int
) -> tuple[list[dict[str, Any]], bool]:
    """Measure the cases until Ctrl-C; return the results, and whether it was pressed."""
    results = []
    included = re.compile(f"{_FLOORS}|{wanted.pattern}")
    with Interrupt() as interrupt:
        for index, case in enumerate(cases):
            if interrupt.requested:
                break
            share = index / len(cases)
            print(f"measuring {share:4.0%}  {case.name}", file=sys.stderr, flush=True)
            try:
                results.append(measure(case, CONTENDERS, runs=runs, rounds=rounds, wanted=included))
            except RuntimeError as error:
                stop(str(error), WRONG)
        return results, interrupt.requested


def _write(document: dict[str, Any], here: Environment, options: argparse.Namespace) -> list[str]:
    """Write the files that the options name; return a line about each."""
    results, written = document["results"], []
    with _as_mistakes():
        if options.out is not None:
            _write_whole(options.out, json.dumps(document, indent=2, allow_nan=False) + "\n")
            written.append(f"numbers  {options.out}")
        if options.plot is not None and results:
            from .picture import draw

            draw(options.plot, results, table.where(here, results[0]["case"]["threads"]))
            written.append(f"picture  {options.plot}")
    return written


def _write_whole(path: Path, text: str) -> None:
    """Write a file whole, or leave the old one. Devices and pipes are written to directly."""
    try:
        if str(path).startswith("/dev/") or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        partial = target.with_name(f".{target.name}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def _as_mistakes() -> Iterator[None]:
    """Report an error while writing as one line, with exit code 1 if the machine failed, else 2."""
    try:
        yield
    except OSError as error:
        about = f"{error.filename}: " if error.filename is not None else ""
        stop(f"{about}{error.strerror or error}.", WRONG if error.errno in _MACHINE else MISTAKE)
    except MemoryError:
        stop("there is not enough memory.", WRONG)
    except ValueError as error:
        stop(str(error))


def _drop_output() -> None:
    """Discard buffered output, so that Python does not fail to flush it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a stream without a file descriptor
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
