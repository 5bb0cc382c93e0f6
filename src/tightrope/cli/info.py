"""`tightrope info`: versions, backends, hardware."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from ..environment import Environment, read_environment
from ._console import make_console
from ._mistakes import FINDING, stop
from ._tables import facts

# Not in `Environment`: files of results store that, and need no path of a machine.
INSTALLED_AT = Path(__file__).parents[1]


def info(
    require: Annotated[
        str | None,
        typer.Option(metavar="BACKEND", help="Exit with code 1 if this backend cannot run here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show versions, usable backends, why a faster one is unavailable, and the hardware.

    Exit codes: 0 success, 1 the required backend is not usable, 2 invalid arguments.

    Examples:

    `tightrope info --json`

    `tightrope info --require cpu || echo 'plain torch runs'`
    """
    console = make_console()
    found = read_environment()
    if require is not None and require not in found.backends:
        stop(f"--require must be one of {', '.join(found.backends)} but got {require!r}.")
    if as_json:
        everything = {**dataclasses.asdict(found), "installed_at": str(INSTALLED_AT)}
        text = json.dumps(everything, indent=2, allow_nan=False)
        console.print(text, markup=False, soft_wrap=True)
    else:
        console.print(facts(_rows(found)))
    if require is not None and found.backends[require] is not None:
        raise typer.Exit(FINDING)


def _rows(found: Environment) -> list[tuple[str, str]]:
    sets = ", ".join(found.instruction_sets)
    rows = [
        ("tightrope", f"{found.tightrope} in {INSTALLED_AT}"),
        ("torch", found.torch),
        ("python", f"{found.python} on {found.system}"),
        ("processor", f"{found.processor}, {found.cores} cores"),
        ("threads", f"{found.threads} (torch's own pool)"),
    ]
    if found.instruction_set is None:
        rows.append(("instruction set", "the native library is not loaded"))
    else:
        rows.append(("instruction set", f"{found.instruction_set} (this processor: {sets})"))
    gpus = ", ".join(found.gpus) or f"none: {found.why_no_gpu}"
    rows.append(("gpu", gpus))
    rows += [
        (f"backend {name}", "usable" if reason is None else f"not usable: {reason}")
        for name, reason in found.backends.items()
    ]
    rows.append(("runs on CPU tensors", found.runs))
    if found.why_not_faster is not None:
        rows.append(("why not faster", found.why_not_faster))
    there = [f"{name} {version}" for name, version in found.packages.items() if version]
    missing = [name for name, version in found.packages.items() if not version]
    rows.append(("found", ", ".join(there) or "none"))
    if missing:
        rows.append(("not installed", ", ".join(missing)))
    return rows
