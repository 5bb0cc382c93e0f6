"""Text from the trained model, decoded one byte at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...examples.train_bytes import ByteTransformer, write
from .race import Stop


@dataclass(frozen=True)
class Sample:
    """What the model wrote, and how decoding compares with one pass over the whole text.

    Attributes:
        logit_difference: the largest |logit when decoded − logit of one full pass| over the sample.
    """

    prompt: str
    text: str
    temperature: float
    logit_difference: float


@torch.no_grad()
def write_sample(
    model: ByteTransformer, *, prompt: str, count: int, temperature: float, seed: int, stop: Stop
) -> Sample:
    """Continue `prompt` by up to `count` bytes, with a cache of rotated keys."""
    generator = torch.Generator().manual_seed(seed)
    first = len(prompt.encode())
    tokens, logits = list(prompt.encode()), []
    for token, drawn_from in write(model, prompt, count, temperature, generator):
        tokens.append(token)
        logits.append(drawn_from)
        if stop():
            break
    in_one_pass = model(torch.tensor([tokens]))[0, first - 1 : -1]
    return Sample(
        prompt=prompt,
        text=bytes(tokens).decode(errors="replace"),
        temperature=temperature,
        logit_difference=float((torch.stack(logits) - in_one_pass).abs().max()),
    )
