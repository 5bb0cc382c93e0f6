"""`tightrope convert`: rewrite a checkpoint for the other pairing of channels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from . import _checkpoint as option
from ._console import Ticker, make_console
from ._mistakes import as_mistakes
from ._names import grouped, size
from ._tables import facts

if TYPE_CHECKING:
    from ..convert import Conversion

_MOST_LEFT = 12


def convert(
    checkpoint: option.Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Path of the result.")],
    to: Annotated[
        str, typer.Option("--to", metavar="half|interleaved", help="The pairing of the result.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the changes; write nothing.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check on random activations that scores are unchanged."),
    ] = False,
    as_json: option.AsJson = False,
    config: option.Config = None,
    no_config: option.NoConfig = False,
    section: option.Section = None,
    source: option.Source = None,
    naming: option.Naming = None,
    prefix: option.Prefix = None,
    packing: option.Packing = None,
    heads: option.Heads = None,
    kv_heads: option.KvHeads = None,
    head_dim: option.HeadDim = None,
    rotary_dim: option.RotaryDim = None,
    start: option.Start = None,
) -> None:
    """Rewrite query and key projections for the other pairing of channels.

    Only channels move: names and shapes of tensors stay. All other tensors keep their bytes, and converting back gives the same weight files.

    The checkpoint is only read, and OUT, which must not exist, appears only once it is complete.

    Exit codes: 0 done, 1 a system error, 2 invalid arguments; on an error nothing is written.

    Example:

    `tightrope convert llama-3-8b llama-3-8b-interleaved --to interleaved --verify`
    """
    from ..convert import convert as convert_checkpoint

    console = make_console()
    with as_mistakes(option.SPELLED), Ticker(make_console(stderr=True), "convert") as ticker:
        done = convert_checkpoint(
            checkpoint,
            out,
            to=to,
            stated=option.collect(
                config=False if no_config else config,
                section=section,
                source=source,
                naming=naming,
                prefix=prefix,
                packing=packing,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                start=start,
            ),
            dry_run=dry_run,
            verify=verify,
            report=None if as_json else ticker.update,
        )
    if as_json:
        text = json.dumps(dataclasses.asdict(done), indent=2)
        console.print(text, markup=False, soft_wrap=True)
    else:
        _show(console, done)


def _show(console: Console, done: Conversion) -> None:
    from ..convert.model import basis

    whence = basis(done.source_from, done.assumed)
    rows = [
        ("checkpoint", f"{done.checkpoint}, {size(done.nbytes)} of weights"),
        ("model", done.model),
        ("pairing", f"{done.source} ({whence}) to {done.to}"),
    ]
    rows += _named("changed", done.changed, None)
    rows += _named("left", done.left, _MOST_LEFT)
    if done.marked is not None:
        rows.append(("config.json", f"{done.marked} states the pairing"))
    rows += [("not copied", f"{name}: {why}") for name, why in done.ignored.items()]
    if done.verified is not None:
        proof = done.verified
        rows.append(
            (
                "verified",
                f"scores of {proof.layers} layers differ by {proof.difference:.1e} of the largest "
                f"score (with the old pairing by {proof.unswitched:.2g}), provided that the checkpoint was "
                f"{done.source}, as {whence}",
            )
        )
    rows += [("warning", warning) for warning in done.warnings]
    rows += [("note", note) for note in done.notes]
    rows.append(("written" if done.written else "dry run", _end(done)))
    console.print(facts(rows))


def _end(done: Conversion) -> str:
    count = f", {len(done.files)} files" if len(done.files) > 1 else ""
    return f"{done.out}, {size(done.disk)}{count}" + ("" if done.written else " would be written")


def _named(what: str, names: tuple[str, ...], most: int | None) -> list[tuple[str, str]]:
    lines = [name if count == 1 else f"{name}  ({count})" for name, count in grouped(names)]
    rows = [(what if n == 0 else "", line) for n, line in enumerate(lines[:most])]
    if most is not None and len(lines) > most:
        rows.append(("", f"and {len(lines) - most} more lines; --json names all {len(names)}"))
    return rows
