"""Show a model's rotary embedding, with warnings about it.

Shows the spec, the keys that state its fields, wavelengths, the effect of
scaling, and the largest context with exact angles.

With several configurations, shows how they differ and by how much their angles
disagree.

Exit codes: 0 nothing to report, 1 a warning or a difference, 2 invalid
arguments or an invalid file.

Examples:

  tightrope inspect Llama-3.1-8B/config.json --plot llama.png
  tightrope inspect model.gguf config.json --context 131072
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from ._output import FINDING, Mistake, Spelling, add_pairing, as_mistakes, show_json, write_line

# Texts of the library's error sentences, such as keyword arguments -> command-line options.
_SPELLED: dict[str, Spelling] = {
    r"RopeSpec\.from_config\(config, section='(.*)'\)": r"--section=\1",
    "base=": "--base=",
    "interleaved=False": "--half",
    "interleaved=True": "--interleaved",
    "strict=False": "--lenient",
    "rope_layers=": "--rope-layers=",
    "pass rope_layers,": "pass --rope-layers,",
    "pass the model in place of its configuration, or inv_freq, the frequencies that it rotates by": (
        "load the model and call tightrope_tools.inspect.inspect(model)"
    ),
    "layer_type with the rotary_dim of": "--layer-type with the --rotary-dim of",
}


_CONFIG = (
    "config.json, params.json, a folder with one of them, a .gguf file, or the JSON of a RopeSpec; with several, each is "
    "compared with the first"
)
_LAYERS = "layers that rotate, where the configuration does not state it: all, or their types, separated by commas"
_CHANNELS = "number of channels that rotate, where the configuration does not state it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG", help=_CONFIG)
    add("--context", type=int, help="context length; by default that of the configuration")
    add(
        "--section",
        help="part of a nested configuration, such as text_config; '' is its outer level",
    )
    add("--layer-type", help="layer type, where layers differ, such as full_attention")
    add(
        "--base",
        type=float,
        help="base of the frequencies, where the configuration does not state it",
    )
    add_pairing(parser, "the pairing, where the configuration does not state it")
    add("--rotary-dim", type=int, help=_CHANNELS)
    add("--start", type=int, help="first channel that rotates; by default 0")
    add("--rope-layers", metavar="all|TYPES", help=_LAYERS)
    add("--lenient", action="store_true", help="warn about unknown RoPE keys instead of failing")
    add("--all", action="store_true", help="show every pair of channels")
    add("--plot", metavar="FILE", help="draw a picture: .png, .pdf or .svg")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..inspect import compare, inspect
    from ._inspection import show_comparison, show_inspection

    names = ("context", "section", "layer_type", "base", "interleaved", "rotary_dim", "start")
    stated = {name: getattr(options, name) for name in names}
    layers = options.rope_layers
    stated["rope_layers"] = layers if layers in (None, "all") else layers.split(",")
    with warnings.catch_warnings(record=True) as caught, as_mistakes(_SPELLED):
        warnings.simplefilter("always", UserWarning)
        found = [
            inspect(Path(path), strict=not options.lenient, **stated) for path in options.configs
        ]
        for each in found:
            if not each.parts:
                raise Mistake(f"{each.name} has no rotation here: {each.without[0].why_not}.")
        comparisons = [compare(found[0], other) for other in found[1:]]
    for warning in caught:
        write_line(f"Warning: {warning.message}", sys.stderr)
    if options.plot is not None:
        from ..inspect.plot import draw

        with as_mistakes():
            draw(Path(options.plot), found)
    if options.json:
        document = {"configs": [each.to_dict() for each in found]}
        if comparisons:
            document["comparisons"] = [each.to_dict() for each in comparisons]
        show_json(document)
    elif comparisons:
        for comparison in comparisons:
            show_comparison(comparison)
    else:
        show_inspection(found[0], every=options.all)
    if options.plot is not None and not options.json:
        write_line(f"picture  {options.plot}", sys.stdout)
    warned = any(each.warnings for each in found)
    return FINDING if warned or not all(each.alike for each in comparisons) else 0
