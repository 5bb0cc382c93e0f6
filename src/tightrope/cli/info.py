"""`tightrope info`: versions, backends, hardware."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..workbench.environment import read_environment
from ._console import make_console


def info(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show versions, the backends found, and why a faster one is missing.

    Example:

    `tightrope info --json`
    """
    console = make_console()
    found = read_environment()
    if as_json:
        text = json.dumps(dataclasses.asdict(found), indent=2)
        console.print(text, markup=False, soft_wrap=True)
        return
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = [
        ("tightrope", found.tightrope),
        ("torch", found.torch),
        ("python", f"{found.python} on {found.system}"),
        ("threads", str(found.threads)),
        ("instruction set", found.instruction_set or "the native library is not loaded"),
        ("gpu", ", ".join(found.gpus) or "none"),
    ]
    rows += [
        (f"backend {name}", "usable" if reason is None else f"not usable: {reason}")
        for name, reason in found.backends.items()
    ]
    rows.append(("runs on CPU tensors", found.runs))
    if found.why_not_faster is not None:
        rows.append(("why not faster", found.why_not_faster))
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)
