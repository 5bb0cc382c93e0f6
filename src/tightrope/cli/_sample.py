"""Text from the trained model, decoded one token at a time at integer offsets."""

from dataclasses import dataclass

import torch

from ..nn import KVCache
from ._interrupt import Interrupt
from ._model import ByteTransformer


@dataclass(frozen=True)
class Sample:
    """What the model wrote, and how decoding compares with one pass over the whole text."""

    prompt: str
    text: str
    temperature: float
    logit_difference: float
    """Largest |decoded logit - logit of one full pass| over all tokens of the sample."""


@torch.no_grad()
def write_sample(
    model: ByteTransformer,
    *,
    prompt: str,
    count: int,
    temperature: float,
    seed: int,
    interrupt: Interrupt,
) -> Sample:
    """Continue `prompt` by up to `count` bytes, with keys cached as they were rotated."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    caches = [KVCache() for _ in model.blocks]
    logits = [model(torch.tensor([tokens]), 0, caches)[0]]
    for _ in range(count):
        if interrupt.requested:
            break
        shares = torch.softmax(logits[-1][-1] / temperature, dim=-1)
        token = int(torch.multinomial(shares, 1, generator=generator))
        logits.append(model(torch.tensor([[token]]), len(tokens), caches)[0])
        tokens.append(token)
    in_one_pass = model(torch.tensor([tokens]))[0]
    return Sample(
        prompt=prompt,
        text=bytes(tokens).decode(errors="replace"),
        temperature=temperature,
        logit_difference=float((torch.cat(logits) - in_one_pass).abs().max()),
    )
