"""The command-line arguments of `tightrope convert` and `tightrope detect`.

Most of them state facts that the checkpoint's configuration may lack.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..convert import Stated

#: The keys of ``convert.naming.NAMINGS``, here because help must not import torch.
NAMINGS = (
    "llama, meta, phi, hunyuan, stablelm, phi3, qwen3_next, gpt_neox, persimmon, falcon, "
    "internlm2, megatron, chatglm, gptj, codegen, dbrx, modernbert, deepseek, glm_moe_dsa, "
    "longcat_flash, bert, moonshine"
)

CHECKPOINT = "a safetensors file, an index of shards, or a folder with one of these"
_NAMING_HELP = (
    f"naming scheme of the projections: {NAMINGS}; or names of your own, such as "
    "layers.*.attn.q_k_v_proj=qkv"
)

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


def stated(options: argparse.Namespace) -> Stated:
    """Return what the options state about the checkpoint."""
    from ..convert import Stated

    names = [each.name for each in dataclasses.fields(Stated)]
    values = {name: vars(options)[name] for name in names if name in options}
    if options.no_config:
        values["config"] = False
    if options.naming is not None and "=" in options.naming:
        values["naming"] = dict(part.partition("=")[::2] for part in options.naming.split(","))
    return Stated(**values)
