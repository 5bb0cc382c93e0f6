"""Train Qwen2.5-VL on samples of text and images that are packed in one row.

    python examples/pack_images.py --steps 5

The collator, :func:`pack`, joins samples without padding. Positions restart at each sample, on all three axes, and
:func:`tightrope.positions.check` says so. The model is tiny and its samples are random, so it learns little; what counts
is that a packed sample gets the logits that it gets alone, at the positions that transformers gives it. (Positions that
go on from the sample before give the same logits, as attention depends on distances: only the check sees them.)

The file needs transformers and tightrope; copy from it freely.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import tightrope
from tightrope import positions

VOCABULARY, IMAGE, START, END = 100, 97, 98, 99
MERGE = 2
PATCH_VALUES = 3 * 2 * 14 * 14  # colours × frames of a patch × height × width


@dataclass(frozen=True)
class Sample:
    """Text with at most one image.

    Attributes:
        tokens: int64 ``(tokens,)``; those of the image are ``IMAGE``, one for 2 × 2 patches.
        patches: float32 ``(patches, PATCH_VALUES)``; of no image, no patches.
        grid: time, height and width of the image in patches; None without an image.
    """

    tokens: Tensor
    patches: Tensor
    grid: tuple[int, int, int] | None


def samples(seed: int) -> list[Sample]:
    """Draw a text, and texts around images of three sizes."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for grid in (None, (1, 4, 4), (1, 2, 6), (1, 4, 8)):
        before, after = (torch.randint(0, IMAGE, (n,), generator=draw) for n in (5, 3))
        if grid is None:
            made.append(Sample(torch.cat((before, after)), torch.empty(0, PATCH_VALUES), None))
            continue
        patches = torch.randn(grid[1] * grid[2], PATCH_VALUES, generator=draw)
        image = torch.tensor([START, *[IMAGE] * (len(patches) // MERGE**2), END])
        made.append(Sample(torch.cat((before, image, after)), patches, grid))
    return made


def pack(batch: Sequence[Sample]) -> dict[str, Any]:
    """Join samples to one row, with the positions of each from 0 on."""
    lengths = torch.tensor([len(sample.tokens) for sample in batch])
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    tokens = torch.cat([sample.tokens for sample in batch])
    types = (tokens == IMAGE).long()
    grids = [sample.grid for sample in batch if sample.grid is not None]
    where, _ = positions.mrope_batch(
        types, model="qwen2_5_vl", images=grids, merge=MERGE, cu_seqlens=cu_seqlens
    )
    report = positions.check(where, cu_seqlens=cu_seqlens, token_types=types)
    assert report.ok, report
    # transformers takes a first row with the index of each token in its sample: its mask keeps samples apart.
    index = positions.packed(cu_seqlens).ids
    assert index is not None
    assert where.ids is not None
    # The first token of a sample is not the one that follows the sample before.
    labels = tokens.clone()
    labels[cu_seqlens[:-1]] = -100
    row: dict[str, Any] = {
        "input_ids": tokens[None],
        "labels": labels.masked_fill(types.bool(), -100)[None],
        "position_ids": torch.cat((index, where.ids)),
        "mm_token_type_ids": types[None],
        "use_cache": False,  # with a cache, transformers does not look for samples in the row
    }
    if grids:
        row["pixel_values"] = torch.cat([sample.patches for sample in batch])
        row["image_grid_thw"] = torch.tensor(grids)
    return row


def tiny_model() -> Qwen2_5_VLForConditionalGeneration:
    """Make a model with two layers and random weights."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "spatial_merge_size": MERGE,
        "fullatt_block_indexes": [1],
    }
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    text |= {"bos_token_id": None, "eos_token_id": None}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen2_5_VLForConditionalGeneration(config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare samples that are packed with the same samples alone, then train on them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="training steps (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model = tiny_model()
    report = tightrope.patch(model)
    batch = samples(options.seed)
    with torch.no_grad():
        together = model(**pack(batch)).logits[0].split([len(each.tokens) for each in batch])
        for sample, logits in zip(batch, together, strict=True):
            row = pack([sample])
            del row["position_ids"]  # transformers makes them
            alone = model(**row).logits[0]
            error = (logits - alone).abs().max().item()
            print(f"{len(sample.tokens):3} tokens: packed and alone differ by {error:.1e}")
            assert error < 1e-5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        loss = model(**pack(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    served = {
        place.rsplit(".", 1)[-1]: calls.operator
        for place, calls in report.calls().items()
        if calls.operator
    }
    print(f"calls that tightrope served: {served}")


if __name__ == "__main__":
    main()
