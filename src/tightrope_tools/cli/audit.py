"""Test a rotary function as a black box: identify its rotation and find its faults.

The audit calls it with impulses and random vectors and does not read its
source. Findings say what to call or to change.

Exit codes: 0 no finding as severe as --fail-on, 1 such findings (with
--against: any difference), 2 invalid arguments.

Examples:

  tightrope audit mymodel:apply_rope --base 500000 --half
  tightrope audit ./Llama-3.1-8B/config.json
  tightrope audit mymodel:make_rope --make --head-dim 64 --json
  tightrope audit mymodel:apply_rope --with mymodel:make_tables
  tightrope audit ./Llama-3.1-8B --against stack:vllm
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._output import FINDING, Mistake, add_pairing, as_mistakes, show, show_json, show_table

if TYPE_CHECKING:
    from tightrope import RopeSpec

    from ..audit import Comparison, ModelReport, Report

# The options that a comparison has too.
_SHARED = ("form", "layout", "tables", "head_dim", "make", "layer_type", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("target", metavar="TARGET", help=_TARGET)
    add("--against", metavar="TARGET", help=_AGAINST)
    add("--with", dest="partner", metavar="TARGET", help=_WITH)
    add("--form", help="the arguments of the function, such as 'x, positions' or 'q, k, cos, sin'")
    add("--layout", help="bhsd, bshd, sbhd, thd, bsd or sd; by default found by trying")
    add("--tables", help="format of the cosines: cat, repeat or half; by default found by trying")
    add("--head-dim", type=int, help="channels of one head")
    add("--meant", help="the intended rotation: a config.json, or the JSON of a RopeSpec")
    add("--base", type=float, help="the intended base")
    add("--rotary-dim", type=int, help="the intended number of rotated channels")
    add_pairing(parser, "the intended pairing")
    add(
        "--make",
        action="store_true",
        help="FUNCTION takes no arguments and returns the function to audit",
    )
    add("--layer-type", help="the layer type to audit, where layers differ")
    add(
        "--longest", type=int, default=2**20, help="the largest position to test (default: 1048576)"
    )
    add("--float16", action="store_true", help="test float16 as well")
    add("--only-float32", action="store_true", help="test no 16-bit type")
    add("--device", default="cpu", help="the device of the test tensors (default: cpu)")
    add("--timeout", type=float, default=600.0, help=_TIMEOUT)
    add("--fail-on", choices=("error", "warning", "note"), default="warning", help=_FAIL_ON)
    add("--isolate", action=argparse.BooleanOptionalAction, default=True, help=_ISOLATE)
    add("--json", action="store_true", help="print one JSON object and nothing else")


_TARGET = (
    "MODULE:FUNCTION, importable from this folder; or a config.json of transformers, its folder, or a model type such "
    "as llama"
)
_AGAINST = (
    "a second target: report whether both agree to the bit, and where they part. For both targets, stack:NAME is a "
    "library of tightrope.stacks and stack:exact exact angles"
)
_WITH = "the other of two functions, one of which makes the cosines and sines that the other takes: audit the two as one"
_TIMEOUT = "seconds after which the child process is ended, as hanging (default: 600)"
_FAIL_ON = "the mildest finding that makes the exit code 1: error, warning (default) or note"
_ISOLATE = "run the audit in a child process, where a crash becomes a finding (default)"


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    import torch

    from ..audit import SEVERITIES, Comparison, ModelReport

    if not 0 < options.timeout < 1e6:
        raise Mistake(
            f"--timeout must be positive and below 1e6 seconds but got {options.timeout:g}."
        )
    given = {name: getattr(options, name) for name in _SHARED}
    if options.against is None:
        given |= {"longest": options.longest, "partner": options.partner}
        given["dtypes"] = [torch.float32, *[torch.bfloat16] * (not options.only_float32)]
        given["dtypes"] += [torch.float16] * options.float16
    elif options.partner is None:
        given["against"] = options.against
    else:
        raise Mistake(
            "--against compares two targets, so it takes no --with; audit each pair alone."
        )
    with as_mistakes():
        given["spec"] = _declared(options)
        if options.isolate:
            report = _apart(options.target, given, options.timeout)
        else:
            report = _here(options.target, given)
    if options.json:
        show_json(report.to_dict())
    else:
        _show(report)
    if isinstance(report, Comparison):
        return 0 if report.ok else FINDING
    severe = SEVERITIES[: SEVERITIES.index(options.fail_on) + 1]
    parts = report.parts.values() if isinstance(report, ModelReport) else [report]
    found = any(finding.severity in severe for part in parts for finding in part.findings)
    return FINDING if found else 0


def _declared(options: argparse.Namespace) -> RopeSpec | None:
    """Return the declared spec, or None if no option declares one."""
    from tightrope import RopeSpec
    from tightrope.config.files import load

    names = ("base", "rotary_dim", "interleaved")
    stated = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in stated.items() if value is not None}
    if options.meant is None:
        if given and options.head_dim is None:
            raise Mistake("--base, --rotary-dim, --half and --interleaved need --head-dim as well.")
        return RopeSpec(head_dim=options.head_dim, **given) if given else None
    if given:
        raise Mistake(
            "--meant gives the whole spec; leave out --base, --rotary-dim, --half and --interleaved."
        )
    values = load(Path(options.meant))
    if values.keys() >= {"version", "head_dim"}:
        return RopeSpec.from_dict(values)
    spec = RopeSpec.from_config(values)
    if not isinstance(spec, RopeSpec):
        raise ValueError(
            f"{options.meant} has layers that differ; save the spec of one layer as JSON and pass that file."
        )
    return spec


def _here(target: str, options: dict[str, Any]) -> Report | Comparison | ModelReport:
    """Run the audit, or the comparison if the options name a second target, in this process.

    A model of several parts is audited whole, unless an option is about one rotation.

    Raises:
        ValueError, TypeError: the target or an option cannot be used.
    """
    from ..audit import audit as run_audit, audit_model, compare

    # The function's module may print on import; keep that out of the JSON.
    with redirect_stdout(sys.stderr):
        if "against" in options:
            return compare(target, options.pop("against"), **options)
        whole = {name: options[name] for name in ("dtypes", "longest", "device")}
        if ":" not in target and not any(options[name] for name in options.keys() - whole.keys()):
            found = audit_model(target, **whole)
            if len(found.parts) > 1:
                return found
            ((_, report),) = found.parts.items()
            if report.checks:
                return report
        return run_audit(target, **options)


def _apart(
    target: str, options: dict[str, Any], seconds: float
) -> Report | Comparison | ModelReport:
    """Run the audit in a child process, which may crash or hang."""
    from ..audit import Comparison, Difference, Finding, Report

    pool = futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
    try:
        return pool.submit(_here, target, options).result(seconds)
    except futures.TimeoutError:
        code, sentence = "hangs", f"The audit did not end within {seconds:g} s."
    except BrokenProcessPool:
        code, sentence = "crashes", "The audit process ended without a report."
    finally:
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown()
    evidence = "run with --no-isolate under a debugger to see where"
    if "against" in options:
        different = (Difference(code, sentence, evidence),)
        return Comparison(target, options["against"], differences=different)
    return Report(target, {}, (Finding(code, "error", sentence, evidence),))


def _begin() -> None:
    """Prepare the child process."""
    # On Ctrl-C it ends without a traceback: the parent reports the interruption.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(2, 1)  # what C code prints does not mix with the output


def _show(report: Report | Comparison | ModelReport) -> None:
    """Print a report as text; for a model, after a table of the verdicts on its parts."""
    from ..audit import SEVERITIES, ModelReport

    if isinstance(report, ModelReport):
        show(f"audit of {report.target}")
        show_table(report.rows(), ("verdict", "part", "not seen", "declared"))
        for part in report.parts.values():
            show()
            _show(part)
        return
    for line in str(report).split("\n"):
        severity = line.partition(" ")[0]
        show(line, severity if severity in SEVERITIES else "")
