"""Rewrite query and key projections for the other pairing of channels.

Only channels move: names and shapes of tensors stay. All other tensors keep
their bytes, and converting back gives the same weight files.

The checkpoint is only read, and OUT, which must not exist, appears only once
it is complete.

Exit codes: 0 done, 1 a system error, 2 invalid arguments; on an error nothing
is written.

Examples:

  tightrope convert llama-3-8b llama-3-8b-interleaved --to interleaved --verify
  tightrope convert --rules
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter
from typing import TYPE_CHECKING

from . import _checkpoint
from ._output import progress, show_json, show_table

if TYPE_CHECKING:
    from ..convert import Conversion

_MOST_LEFT = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=_checkpoint.CHECKPOINT)
    add("out", metavar="OUT", help="path of the result")
    add("--to", required=True, metavar="half|interleaved", help="the pairing of the result")
    add("--from", dest="source", metavar="half|interleaved", help="the pairing of the checkpoint")
    add("--dry-run", action="store_true", help="list the changes; write nothing")
    add(
        "--verify",
        action="store_true",
        help="check on random activations that scores are unchanged",
    )
    add(
        "--rules", action=_Rules, nargs=0, help="print what is made of each tensor and key, and end"
    )
    _checkpoint.add_arguments(parser)


class _Rules(argparse.Action):
    """Print the table of rules in place of a conversion."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..convert.rules import RULES

        header = ("result", "where", "names (regular expressions)", "what it is, and why")
        show_table([rule.cells() for rule in RULES], header)
        parser.exit()


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..convert import convert

    names = ("out", "to", "dry_run", "verify")
    given = {name: getattr(options, name) for name in names}
    shown = None if options.json else progress("convert")
    done = _checkpoint.call(convert, options, report=shown, **given)
    if options.json:
        show_json(dataclasses.asdict(done))
    else:
        _show(done)
    return 0


def _show(done: Conversion) -> None:
    from ..convert.model import basis

    whence = basis(done.source_from, done.assumed)
    rows = [
        ("checkpoint", done.checkpoint),
        ("model", done.model),
        ("pairing", f"{done.source} ({whence}) to {done.to}"),
    ]
    rows.append(("changed", _lines(done.changed, len(done.changed))))
    if done.left:
        rows.append(("left", _lines(done.left, _MOST_LEFT)))
    if done.marked is not None:
        rows.append(("config.json", f"{done.marked} states the pairing"))
    rows += [("not copied", f"{name}: {why}") for name, why in done.ignored.items()]
    if done.verified is not None:
        proof = done.verified
        text = (
            f"scores of {proof.layers} layers differ by {proof.difference:.1e} of the largest "
            f"score (with the old pairing by {proof.unswitched:.2g}), provided that the checkpoint was "
            f"{done.source}, as {whence}"
        )
        rows.append(("verified", text))
    rows += [("warning", warning) for warning in done.warnings]
    rows += [("note", note) for note in done.notes]
    count = f", {len(done.files)} files" if len(done.files) > 1 else ""
    end = f"{done.out}, {done.disk / 1e6:,.2f} MB{count}"
    rows.append(("written", end) if done.written else ("dry run", f"{end} would be written"))
    show_table(rows)


def _lines(names: tuple[str, ...], most: int) -> str:
    """List names in lines; names that differ only in their first number share one."""
    groups = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1) for name in names)
    lines = [f"{name}  ({count})" if "*" in name else name for name, count in groups.items()]
    if len(lines) > most:
        lines[most:] = [f"and {len(lines) - most} more lines; --json names all {len(names)}"]
    return "\n".join(lines)
