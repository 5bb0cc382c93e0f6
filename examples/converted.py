"""Convert a Llama to the other pairing, and run the result in transformers with the same logits.

    python examples/converted.py            a small model with random weights
    python examples/converted.py FOLDER     a checkpoint of Llama; the result is FOLDER-interleaved

docs/convert.md describes the conversion.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from tightrope.functional import apply_rotary_pos_emb
from tightrope_tools.convert import convert


def small(folder: Path) -> Path:
    """Save a Llama with random weights that attends to positions."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=2, intermediate_size=96, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    """Load a checkpoint with the present code of transformers; return its logits for some tokens."""
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder).eval()(torch.arange(20)[None]).logits


def main(*given: str) -> None:
    """Convert, run the result wrongly and rightly, and print how far the logits are from those before."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given[0]) if given else small(Path(temporary, "small"))
        out = folder.with_name(f"{folder.name}-interleaved")
        wanted = logits(folder)
        convert(str(folder), str(out), to="interleaved")
        print(
            f"code for halves: logits differ by {(logits(out) - wanted).abs().max():.1e}, no error"
        )

        # For all models of this file in the process: load no other one that was not converted.
        own = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb = partial(apply_rotary_pos_emb, interleaved=True)
        try:
            print(f"code for neighbours: they differ by {(logits(out) - wanted).abs().max():.1e}")
        finally:
            modeling_llama.apply_rotary_pos_emb = own


if __name__ == "__main__":
    main(*sys.argv[1:])
