"""`tightrope audit`: test a rotary function as a black box."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ._console import make_console
from ._mistakes import as_mistakes, stop
from ._tables import StackedTable, facts

if TYPE_CHECKING:
    from tightrope import RopeSpec

    from ..audit import Comparison, Report

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
# On Ctrl-C the child process ends without a traceback: the parent reports the interruption.
_APART = """
import signal
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from tightrope_tools.cli._audit_apart import main
main()
"""


# The options that a comparison has too.
_SHARED = ("form", "layout", "tables", "head_dim", "make", "layer_type", "device")


class Severity(str, Enum):
    """The mildest severity that makes the exit code 1."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="MODULE:FUNCTION, importable from this folder; or a config.json of transformers, its folder, or "
            "a model type such as llama.",
            show_default=False,
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="A second target: report whether both agree to the bit, and where they part. "
            "For both targets, stack:NAME is a library of tightrope.stacks and stack:exact exact angles.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="The arguments of the function, such as 'x, positions' or 'q, k, cos, sin'."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="bhsd, bshd, sbhd, thd, bsd or sd; by default found by trying."),
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            help="Format of the cosines: cat, repeat or half; by default found by trying."
        ),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels of one head.")] = None,
    meant: Annotated[
        Path | None,
        typer.Option(help="The intended rotation: a config.json, or the JSON of a RopeSpec."),
    ] = None,
    base: Annotated[float | None, typer.Option(help="The intended base.")] = None,
    rotary_dim: Annotated[
        int | None, typer.Option(help="The intended number of rotated channels.")
    ] = None,
    interleaved: Annotated[
        bool | None, typer.Option("--interleaved/--half", help="The intended pairing.")
    ] = None,
    make: Annotated[
        bool,
        typer.Option(
            "--make", help="FUNCTION takes no arguments and returns the function to audit."
        ),
    ] = False,
    layer_type: Annotated[
        str | None, typer.Option(help="The layer type to audit, where layers differ.")
    ] = None,
    longest: Annotated[int, typer.Option(help="The largest position to test.")] = 2**20,
    float16: Annotated[bool, typer.Option("--float16", help="Test float16 as well.")] = False,
    only_float32: Annotated[
        bool, typer.Option("--only-float32", help="Test no 16-bit type.")
    ] = False,
    device: Annotated[str, typer.Option(help="The device of the test tensors.")] = "cpu",
    timeout: Annotated[
        float, typer.Option(help="Seconds after which the child process is ended, as hanging.")
    ] = 600.0,
    fail_on: Annotated[
        Severity, typer.Option(help="The mildest finding that makes the exit code 1.")
    ] = Severity.WARNING,
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate/--no-isolate",
            help="Run the audit in a child process, where a crash becomes a finding.",
        ),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Test a rotary function as a black box: identify its rotation and find its faults.

    The audit calls it with impulses and random vectors and does not read its source. Findings come
    with programs that reproduce them. Exit codes: 0 no finding as severe as --fail-on, 1 such
    findings (with --against: any difference), 2 invalid arguments.

    Examples:

    `tightrope audit mymodel:apply_rope --base 500000 --half`

    `tightrope audit ./Llama-3.1-8B/config.json`

    `tightrope audit mymodel:make_rope --make --head-dim 64 --json`

    `tightrope audit ./Llama-3.1-8B --against stack:vllm`
    """
    from ..audit import SEVERITIES, Comparison

    options: dict[str, Any] = {
        "form": form,
        "layout": layout,
        "tables": tables,
        "head_dim": head_dim,
        "make": make,
        "layer_type": layer_type,
        "longest": longest,
        "device": device,
        "dtypes": ["float32", *(["bfloat16"] if not only_float32 else [])]
        + (["float16"] if float16 else []),
        "spec": None,
    }
    if against is not None:
        options = {name: options[name] for name in _SHARED} | {"against": against}
    if not 0 < timeout < 1e6:
        stop(f"--timeout must be positive and below 1e6 seconds but got {timeout:g}.")
    with as_mistakes():
        options["spec"] = _declared(meant, head_dim, base, rotary_dim, interleaved)
        report = _apart(target, options, timeout) if isolate else here(target, options)
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    elif isinstance(report, Comparison):
        print_comparison(make_console(), report)
    else:
        print_report(make_console(), report)
    if isinstance(report, Comparison):
        raise typer.Exit(0 if report.ok else 1)
    worst = SEVERITIES.index(fail_on.value)
    if any(SEVERITIES.index(finding.severity) <= worst for finding in report.findings):
        raise typer.Exit(1)


def _declared(
    meant: Path | None,
    head_dim: int | None,
    base: float | None,
    rotary_dim: int | None,
    interleaved: bool | None,
) -> dict[str, Any] | None:
    """Return the declared spec as its dictionary, or None if no option declares one."""
    from tightrope import RopeSpec

    given = {"base": base, "rotary_dim": rotary_dim, "interleaved": interleaved}
    given = {name: value for name, value in given.items() if value is not None}
    if meant is not None:
        if given:
            stop(
                "--meant gives the whole spec; leave out --base, --rotary-dim, --half and --interleaved."
            )
        return _read(meant).to_dict()
    if not given:
        return None
    if head_dim is None:
        stop("--base, --rotary-dim, --half and --interleaved need --head-dim as well.")
    return RopeSpec(head_dim=head_dim, **given).to_dict()  # type: ignore[arg-type]


def _read(path: Path) -> RopeSpec:
    from tightrope import RopeSpec
    from tightrope.config.files import load

    values = load(path)
    if values.keys() >= {"version", "head_dim"}:
        return RopeSpec.from_dict(values)
    spec = RopeSpec.from_config(values)
    if not isinstance(spec, RopeSpec):
        raise ValueError(
            f"{path} has layers that differ; save the spec of one layer as JSON and pass that file."
        )
    return spec


def here(target: str, options: dict[str, Any]) -> Report | Comparison:
    """Run the audit, or the comparison if the options name a second target, in this process.

    Raises:
        ValueError, TypeError: the target or an option cannot be used.
    """
    import torch

    from tightrope import RopeSpec

    from ..audit import audit as run_audit, compare

    spec = options["spec"]
    chosen = options | {"spec": None if spec is None else RopeSpec.from_dict(spec)}
    # The function's module may print on import; keep that out of the JSON.
    with redirect_stdout(sys.stderr):
        if "against" in chosen:
            return compare(target, chosen.pop("against"), **chosen)
        chosen["dtypes"] = [getattr(torch, name) for name in options["dtypes"]]
        return run_audit(target, **chosen)


def _apart(target: str, options: dict[str, Any], seconds: float) -> Report | Comparison:
    """Run the audit in a child process, which may crash or hang."""
    from ..audit import Comparison, Report

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-c", _APART, str(out)]
        work = json.dumps([target, options])
        try:
            done = subprocess.run(
                command, input=work, text=True, timeout=seconds, stdout=2, check=False
            )
        except subprocess.TimeoutExpired:
            return _lost(target, options, "hangs", f"The audit did not end within {seconds:g} s.")
        if not out.is_file():
            end = (
                f"was ended by signal {-done.returncode}"
                if done.returncode < 0
                else f"ended with exit code {done.returncode}"
            )
            return _lost(target, options, "crashes", f"The audit process {end}.")
        saved = json.loads(out.read_text(encoding="utf-8"))
    if "invalid arguments" in saved:
        stop(saved["invalid arguments"])
    return (Comparison if "against" in options else Report).from_dict(saved)


def _lost(target: str, options: dict[str, Any], code: str, sentence: str) -> Report | Comparison:
    from ..audit import Comparison, Difference, Finding, Report

    evidence = "run with --no-isolate under a debugger to see where"
    if "against" in options:
        different = (Difference(code, sentence, evidence),)
        return Comparison(target, options["against"], differences=different)
    return Report(target, {}, (Finding(code, "error", sentence, evidence),))


def print_comparison(console: Console, found: Comparison) -> None:
    """Print the comparison as text."""
    console.print(Text(f"{found.first} against {found.second}", style="bold"))
    table = StackedTable(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("", "first", "second"):
        table.add_column(name)
    for fact, (one, other) in found.facts.items():
        table.add_row(Text(fact, style="dim"), one, other if other != one else "the same")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for each in found.differences:
        console.print()
        console.print(Text(each.code, style="bold red"))
        for line, style in ((each.sentence, ""), (each.evidence, "dim")):
            console.print(Padding(Text(line, style=style), (0, 0, 0, 2), expand=False))
    console.print()
    for dtype, (results, gradients) in found.shares.items():
        parts = [f"{100 * results:.3g} % of results"]
        if gradients is not None:
            parts.append(f"{100 * gradients:.3g} % of gradients")
        console.print(Text(f"  {dtype:<9} {' and '.join(parts)} differ", style="dim"))
    style = "green" if found.ok else "bold"
    parted = "" if found.ok else f"They part first at: {found.codes[0]}."
    console.print(Text(parted or "They agree to the bit.", style=style))


def print_report(console: Console, report: Report) -> None:
    """Print the report as text."""
    from ..audit import verdict

    console.print(Text(f"audit of {report.target}", style="bold"))
    if report.facts:
        rows = facts(((name, str(value)) for name, value in report.facts.items()), "dim")
        console.print(Padding(rows, (0, 0, 0, 2), expand=False))
    if report.angle_errors:
        console.print()
        console.print(Padding(_errors(report), (0, 0, 0, 2), expand=False))
    for finding in report.findings:
        console.print()
        head = Text(f"{finding.severity} ", style=_COLOURS[finding.severity])
        head.append(finding.code, style="bold")
        console.print(head)
        lines = ((finding.sentence, ""), (finding.evidence, "dim"), (finding.mend, "italic"))
        for line, style in lines:
            if line:
                console.print(Padding(Text(line, style=style), (0, 0, 0, 2), expand=False))
    console.print()
    skipped = [check for check in report.checks if check.outcome.startswith("skipped")]
    for check in skipped:
        why = check.outcome.removeprefix("skipped: ")
        console.print(
            Padding(
                Text(f"not checked: {check.name} ({why})", style="dim"), (0, 0, 0, 2), expand=False
            )
        )
    style = "green" if report.ok else "bold"
    console.print(Text(verdict(report), style=style))


def _errors(report: Report) -> Table:
    table = StackedTable(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("error of cos and sin below", justify="right")
    for name in ("float32 x", "bfloat16 x", "float32 bound"):
        table.add_column(name, justify="right")
    for each in report.angle_errors:
        row = (each.float32, each.bfloat16, each.float32_angle)
        shown = ["-" if value is None else f"{value:.1e}" for value in row]
        table.add_row(f"{each.position:,}", *shown)
    return table
