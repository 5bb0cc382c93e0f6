"""`tightrope info`: versions, backends, hardware."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from ._console import make_console
from ._mistakes import FINDING, stop
from ._tables import facts


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
    import tightrope
    from tightrope.environment import read_environment

    console = make_console()
    found = read_environment()
    if require is not None and require not in found.backends:
        stop(f"--require must be one of {', '.join(found.backends)} but got {require!r}.")
    if as_json:
        everything = {
            **dataclasses.asdict(found),
            "installed_at": str(Path(tightrope.__file__).parent),
        }
        text = json.dumps(everything, indent=2, allow_nan=False)
        console.print(text, markup=False, soft_wrap=True)
    else:
        console.print(facts(found.rows()))
    if require is not None and found.backends[require] is not None:
        raise typer.Exit(FINDING)
