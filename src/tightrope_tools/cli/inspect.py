"""`tightrope inspect`: show a model's rotary embedding, and how those of two models differ."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..text import printable
from ._console import make_console
from ._mistakes import FINDING, as_mistakes, stop

if TYPE_CHECKING:
    from ..inspect import Comparison, Inspection

# Keyword arguments in the library's error sentences -> command-line options.
_SPELLED = {
    "interleaved=False": "--half",
    "interleaved=True": "--interleaved",
    "strict=False": "--lenient",
    "rotary_dim=": "--rotary-dim=",
    "start=": "--start=",
    "rope_layers=": "--rope-layers=",
    "with start if": "with --start if",
    "pass rope_layers,": "pass --rope-layers,",
    "layer_type with the rotary_dim of": "--layer-type with the --rotary-dim of",
}


def inspect(
    configs: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG",
            show_default=False,
            help="config.json, params.json, a folder with one of them, a .gguf file, or the JSON of a "
            "RopeSpec. With several, each is compared with the first.",
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            metavar="POSITIONS", help="Context length; by default that of the configuration."
        ),
    ] = None,
    section: Annotated[
        str | None,
        typer.Option(
            help="Part of a nested configuration, such as text_config; '' is its outer level."
        ),
    ] = None,
    layer_type: Annotated[
        str | None, typer.Option(help="Layer type, where layers differ, such as full_attention.")
    ] = None,
    interleaved: Annotated[
        bool | None,
        typer.Option(
            "--interleaved/--half",
            show_default=False,
            help="The pairing, where the configuration does not state it.",
        ),
    ] = None,
    rotary_dim: Annotated[
        int | None,
        typer.Option(
            help="Number of channels that rotate, where the configuration does not state it."
        ),
    ] = None,
    start: Annotated[
        int | None, typer.Option(help="First channel that rotates; by default 0.")
    ] = None,
    rope_layers: Annotated[
        str | None,
        typer.Option(
            metavar="all|TYPES",
            help="Layers that rotate, where the configuration does not state it: all, or their types, "
            "separated by commas.",
        ),
    ] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Warn about unknown RoPE keys instead of failing.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Show every pair of channels.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            metavar="FILE",
            help="Draw a picture: .png, .pdf or .svg.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show a model's rotary embedding, with warnings about it.

    Shows the spec, the keys that state its fields, wavelengths, the effect of scaling, and the
    largest context with exact angles.

    With several configurations, shows how they differ and by how much their angles disagree.

    Exit codes: 0 nothing to report, 1 a warning or a difference, 2 invalid
    arguments or an invalid file.

    Examples:

    `tightrope inspect Llama-3.1-8B/config.json --plot llama.png`

    `tightrope inspect model.gguf config.json --context 131072`
    """
    from ..inspect import compare, inspect as look_at
    from . import _inspection as report

    console = make_console()
    with warnings.catch_warnings(record=True) as caught, as_mistakes(_SPELLED):
        warnings.simplefilter("always", UserWarning)
        options: dict[str, Any] = {
            "context": context, "section": section, "layer_type": layer_type,
            "strict": not lenient, "interleaved": interleaved, "rotary_dim": rotary_dim, "start": start,
            "rope_layers": rope_layers if rope_layers in (None, "all") else rope_layers.split(","),
        }  # fmt: skip
        found = [look_at(path, **options) for path in configs]
        for each in found:
            if not each.parts:
                stop(f"{each.name} has no rotation here: {each.without[0].why_not}.")
        comparisons = [compare(found[0], other) for other in found[1:]]
    for warning in caught:
        text = f"Warning: {printable(str(warning.message))}"
        make_console(stderr=True).print(text, markup=False, soft_wrap=True)
    if plot is not None:
        with as_mistakes():
            _draw(plot, found)
    if as_json:
        _print_json(console, found, comparisons)
    elif comparisons:
        for comparison in comparisons:
            report.print_comparison(console, comparison)
    else:
        report.print_inspection(console, found[0], every=every)
    if plot is not None and not as_json:
        console.print(f"picture  {plot}", markup=False, soft_wrap=True)
    if any(each.warnings for each in found) or not all(each.alike for each in comparisons):
        raise typer.Exit(FINDING)


def _draw(path: Path, found: list[Inspection]) -> None:
    from ..inspect.plot import draw

    draw(path, found)


def _print_json(console: Console, found: list[Inspection], comparisons: list[Comparison]) -> None:
    document: dict[str, Any] = {"configs": [each.to_dict() for each in found]}
    if comparisons:
        document["comparisons"] = [each.to_dict() for each in comparisons]
    console.print(json.dumps(document, indent=2, allow_nan=False), markup=False, soft_wrap=True)
