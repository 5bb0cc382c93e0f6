"""`tightrope detect`: detect the pairing of a checkpoint from its weights."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import typer

from . import _checkpoint as option
from ._console import Ticker, make_console
from ._mistakes import as_mistakes
from ._tables import facts

if TYPE_CHECKING:
    from ..convert import Detection


def detect(
    checkpoint: option.Checkpoint,
    as_json: option.AsJson = False,
    config: option.Config = None,
    no_config: option.NoConfig = False,
    section: option.Section = None,
    naming: option.Naming = None,
    prefix: option.Prefix = None,
    packing: option.Packing = None,
    heads: option.Heads = None,
    kv_heads: option.KvHeads = None,
    head_dim: option.HeadDim = None,
    rotary_dim: option.RotaryDim = None,
    start: option.Start = None,
) -> None:
    """Detect the pairing of a checkpoint from its weights, with a confidence.

    Exit codes: 0 detected, 1 not detectable or not the pairing that the files state, 2 invalid
    arguments.

    Example:

    `tightrope detect llama-3-8b`
    """
    from ..convert import detect as detect_pairing

    with as_mistakes(option.SPELLED), Ticker(make_console(stderr=True), "detect") as ticker:
        found = detect_pairing(
            checkpoint,
            stated=option.collect(
                config=False if no_config else config,
                section=section,
                naming=naming,
                prefix=prefix,
                packing=packing,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                start=start,
            ),
            report=None if as_json else ticker.update,
        )
    console = make_console()
    if as_json:
        document = {**dataclasses.asdict(found), "contradicts": found.contradicts}
        console.print(json.dumps(document, indent=2), markup=False, soft_wrap=True)
    else:
        console.print(facts(_rows(found)))
    if found.pairing is None or found.contradicts:
        raise typer.Exit(1)


def _rows(found: Detection) -> list[tuple[str, str]]:
    from ..convert.model import basis

    rows = [("model", found.model)]
    stated = f"no pairing ({found.who})"
    if found.stated is not None:
        stated = f"{found.stated} ({basis(found.who, found.assumed)})"
    rows.append(("files", stated))
    if found.pairing is None:
        rows.append(("weights", "no difference beyond chance: they do not show the pairing"))
    else:
        rows.append(("weights", f"{found.pairing}, confidence {_confidence(found.confidence)}"))
    rows += [
        (
            "" if n else "evidence",
            f"{each.kind}: {each.samples} samples favour {each.favours}, chance {each.chance:.1e}",
        )
        for n, each in enumerate(found.evidence)
    ]
    if found.pairing is None:
        rows.append(
            (
                "next",
                "compare the loss on a text under both pairings: docs/convert.md, 'Which pairing is it?'",
            )
        )
    if found.contradicts:
        rows.append(("warning", "the weights contradict the files"))
    return rows


def _confidence(value: float) -> str:
    return "above 0.99999" if value > 0.99999 else f"{value:.5f}"
