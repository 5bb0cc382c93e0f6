"""The command-line arguments of `tightrope convert` and `tightrope detect`.

Most of them state facts that the checkpoint's configuration may lack.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..convert import Stated

#: The keys of ``convert.naming.NAMINGS``, here because help must not import torch.
NAMINGS = (
    "llama", "meta", "phi", "hunyuan", "stablelm", "phi3", "qwen3_next", "gpt_neox", "persimmon", "falcon",
    "internlm2", "megatron", "chatglm", "gptj", "codegen", "dbrx", "modernbert", "deepseek", "glm_moe_dsa",
    "longcat_flash", "bert", "moonshine",
)  # fmt: skip

# Advice in the library's errors -> the same with the options of these commands.
SPELLED = {
    r"^\[(convert|detect)\] ": "",
    r"strict=False ignores them with a warning": "pass --config, a file without them, if they do not change "
    "which channels rotate",
    r"RopeSpec\.from_config\(config, section='(.*)'\)": r"--section \1",
    r"interleaved=False and rope_layers='all'": "--from half",
    r"interleaved=True and rope_layers='all'": "--from interleaved",
    r"interleaved=(False|True) if the key": "--from if the key",
    r"layer_type with the rotary_dim of its layers": "--config, a file with partial_rotary_factor",
    r"\brotary_dim=": "--rotary-dim=",
    r"\bstart=": "--start=",
    r"with start if": "with --start if",
}

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A safetensors file, an index of shards, or a folder with one of these.",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="The configuration; by default the one next to the weights.",
    ),
]
NoConfig = Annotated[
    bool, typer.Option("--no-config", help="Set the configuration next to the weights aside.")
]
Section = Annotated[
    str | None,
    typer.Option("--section", help="Part of a nested configuration, such as text_config."),
]
Source = Annotated[
    str | None,
    typer.Option("--from", metavar="half|interleaved", help="The pairing of the checkpoint."),
]
Naming = Annotated[
    str | None,
    typer.Option(
        "--naming",
        help=f"Naming scheme of the projections: {', '.join(NAMINGS)}; or names of your own, such as "
        "layers.*.attn.q_k_v_proj=qkv.",
    ),
]
Prefix = Annotated[
    str | None, typer.Option("--prefix", help="Name prefix of the layers, if they have several.")
]
Packing = Annotated[
    str | None,
    typer.Option(
        "--packing", metavar="blocks|grouped|quarters", help="Order of the heads in a fused qkv."
    ),
]
Heads = Annotated[int | None, typer.Option("--heads", help="Number of query heads.")]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", help="Number of key heads.")]
HeadDim = Annotated[int | None, typer.Option("--head-dim", help="Channels of one head.")]
RotaryDim = Annotated[
    int | None, typer.Option("--rotary-dim", help="Channels of a head that rotate.")
]
Start = Annotated[int | None, typer.Option("--start", help="First channel that rotates.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def collect(**options: object) -> Stated:
    """Return the options as one object."""
    from ..convert import Stated

    naming = options["naming"]
    if isinstance(naming, str) and "=" in naming:
        options["naming"] = dict(part.partition("=")[::2] for part in naming.split(","))
    return Stated(**options)  # type: ignore[arg-type]
