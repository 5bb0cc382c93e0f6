"""Detect the pairing of a checkpoint from its weights, with a confidence.

Exit codes: 0 detected, 1 not detectable or not the pairing that the files
state, 2 invalid arguments.

Example:

  tightrope detect llama-3-8b
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from . import _checkpoint
from ._output import FINDING, show_json, show_table

if TYPE_CHECKING:
    from ..convert import Detection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=_checkpoint.CHECKPOINT)
    _checkpoint.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..convert import detect

    found = _checkpoint.call(detect, options)
    if options.json:
        show_json({**dataclasses.asdict(found), "contradicts": found.contradicts})
    else:
        show_table(_rows(found))
    return FINDING if found.pairing is None or found.contradicts else 0


def _rows(found: Detection) -> list[tuple[str, str]]:
    from ..convert._detect import NEEDED
    from ..convert.model import basis

    files = f"no pairing ({found.who})"
    if found.stated is not None:
        files = f"{found.stated} ({basis(found.who, found.assumed)})"
    weights = "no difference beyond chance: they do not show the pairing"
    if found.pairing is not None:
        weights = f"{found.pairing}, confidence above {1 - NEEDED}"
    rows = [("weights", weights), ("files", files)]
    if found.contradicts:
        rows.insert(0, ("warning", "the weights contradict the files"))
    if found.evidence:
        lines = (
            f"{each.kind}: {each.samples} samples favour {each.favours}, chance {each.chance:.1e}"
            for each in found.evidence
        )
        rows.append(("evidence", "\n".join(lines)))
    rows.append(("model", found.model))
    if found.pairing is None:
        advice = "compare the loss on a text under both pairings: docs/convert.md, 'Which pairing is it?'"
        rows.append(("next", advice))
    return rows
