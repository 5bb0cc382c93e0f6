"""The command-line arguments of `tightrope convert` and `tightrope detect`.

Most of them state facts that the checkpoint's configuration may lack.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from ._output import as_mistakes, progress

_Result = TypeVar("_Result")

CHECKPOINT = "a safetensors file, an index of shards, or a folder with one of these"
_NAMING_HELP = (
    "naming scheme of the projections, such as llama or gpt_neox (the error about an unknown one lists all); or "
    "names of your own, such as layers.*.attn.q_k_v_proj=qkv"
)

# Advice in the library's errors -> the same with the options of these commands.
_SPELLED = {
    r"^\[(convert|detect)\] ": "",
    r"strict=False ignores them with a warning|pass a config without it only if it has no effect, or make a .*(?=\.$)": (
        "pass --config, a file without them, if they do not change which channels rotate"
    ),
    r"RopeSpec\.from_config\(config, section='(.*)'\)": r"--section \1",
    r"make a RopeSpec by hand": "pass --no-config and state the slice",
    r"interleaved=(False|True) if the key": "--from if the key",
    r"layer_type with the rotary_dim of its layers": "--config, a file with partial_rotary_factor",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `convert` and `detect` share."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add(
        "--config", metavar="PATH", help="the configuration; by default the one next to the weights"
    )
    add("--no-config", action="store_true", help="set the configuration next to the weights aside")
    add("--section", help="part of a nested configuration, such as text_config")
    add("--naming", help=_NAMING_HELP)
    add("--prefix", help="name prefix of the layers, if they have several")
    add("--packing", help="order of the heads in a fused qkv: blocks, grouped or quarters")
    add("--heads", type=int, help="number of query heads")
    add("--kv-heads", type=int, help="number of key heads")
    add("--head-dim", type=int, help="channels of one head")
    add("--rotary-dim", type=int, help="channels of a head that rotate")
    add("--start", type=int, help="first channel that rotates")


def call(
    name: str, function: Callable[..., _Result], options: argparse.Namespace, **more: Any
) -> _Result:
    """Call `convert` or `detect` for a command, with what its options state about the checkpoint."""
    from ..convert import Stated

    names = [each.name for each in dataclasses.fields(Stated)]
    values = {name: vars(options)[name] for name in names if name in options}
    if options.no_config:
        values["config"] = False
    if options.naming is not None and "=" in options.naming:
        values["naming"] = dict(part.partition("=")[::2] for part in options.naming.split(","))
    with as_mistakes(_SPELLED):
        shown = None if options.json else progress(name)
        return function(options.checkpoint, stated=Stated(**values), report=shown, **more)
