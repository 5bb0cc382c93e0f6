"""The options by which a user says what a checkpoint's configuration does not."""

from pathlib import Path
from typing import Annotated

import typer

from ..workbench.convert import Said

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="A safetensors or torch file, an index, or the folder of either."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="PATH", help="The configuration; else that beside the weights."
    ),
]
Section = Annotated[
    str | None,
    typer.Option("--section", help="Which part of a nested configuration, such as text_config."),
]
Source = Annotated[
    str | None,
    typer.Option("--from", metavar="half|interleaved", help="How the checkpoint is paired."),
]
Naming = Annotated[
    str | None,
    typer.Option("--naming", help="Whose names the projections have: llama, meta, gpt_neox, …"),
]
Prefix = Annotated[
    str | None, typer.Option("--prefix", help="What stands before the layers that are meant.")
]
Packing = Annotated[
    str | None,
    typer.Option(
        "--packing", metavar="blocks|grouped|quarters", help="How a fused qkv orders its heads."
    ),
]
Heads = Annotated[int | None, typer.Option("--heads", help="Number of query heads.")]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", help="Number of key heads.")]
HeadDim = Annotated[int | None, typer.Option("--head-dim", help="Channels of a head.")]
RotaryDim = Annotated[int | None, typer.Option("--rotary-dim", help="How many of them rotate.")]
Start = Annotated[int | None, typer.Option("--start", help="The first that rotates.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def said(**options: object) -> Said:
    """What the options say together."""
    return Said(**options)  # type: ignore[arg-type]
