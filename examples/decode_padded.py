"""Generate for several prompts at once: left padding, a cache, a mask, and positions of text and images.

    python examples/decode_padded.py

Prompts of different lengths end together, so that the next token of each row is in the same slot of the cache. A row
goes on at its own position, which is not the number of its tokens: an image takes fewer positions than tokens. Each row
gets the tokens that it gets alone, without padding and without a cache. The model has random weights. The file needs torch
and tightrope; copy from it freely.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tightrope import RopeSpec, positions, write_kv
from tightrope.axes import Axes
from tightrope.spec import PreparedRotation

VOCABULARY, IMAGE, PADDING = 100, 99, 98
HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 2
SPEC = RopeSpec(HEAD_DIM, axes=Axes.sections((8, 12, 12)))
Cache = tuple[Tensor, Tensor]


class Prompt(NamedTuple):
    """Token ids, and the height and width of its image in patches, which is merged by 2; None without one."""

    tokens: list[int]
    image: tuple[int, int] | None = None


PROMPTS = (
    Prompt([1, 2, 3]),
    Prompt([4, 5, *[IMAGE] * 6, 6, 7], image=(4, 6)),
    Prompt([8, *[IMAGE] * 4], image=(4, 4)),
)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.project = nn.Linear(width, (HEADS + 2 * KEY_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        # Larger weights than usual, so that the next token depends on what is attended to, and where.
        nn.init.normal_(self.project.weight, std=0.15)

    def forward(
        self, x: Tensor, rope: PreparedRotation, cache: Cache, at: int, mask: Tensor
    ) -> Tensor:
        """Attend over x `(rows, tokens, width)`, whose first token goes to slot `at` of the cache."""
        rows, tokens, _ = x.shape
        heads = self.project(x).view(rows, tokens, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
        end = at + tokens
        keys, values = (each[:, :, at:end] for each in cache)
        q = write_kv(q, k, v, rope, cache=(keys, values))  # rotates q and k, and stores k and v
        k, v = (each[:, :, :end] for each in cache)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A causal transformer of attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * HEAD_DIM, PADDING, bias=False)  # for text alone

    def forward(
        self, tokens: Tensor, where: positions.Positions, caches: list[Cache], at: int, real: Tensor
    ) -> Tensor:
        """Return logits of text tokens `(rows, tokens, PADDING)`; `real` is false for padding, `(rows, slots)`."""
        end = at + tokens.shape[1]
        slots = torch.arange(end)
        causal = slots <= slots[at:, None]
        # A padding token attends to itself, as a row of the mask must not be empty.
        mask = (causal & real[:, None, :end]) | (slots == slots[at:, None])
        rope = SPEC.at(where)  # checked once, for all layers
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, rope, cache, at, mask[:, None])
        return self.head(x)


def new_caches(rows: int, slots: int) -> list[Cache]:
    """Make room for the keys and values of each layer."""
    empty = torch.zeros(rows, KEY_HEADS, slots, HEAD_DIM)
    return [(empty.clone(), empty.clone()) for _ in range(LAYERS)]


@torch.no_grad()
def generate(model: Model, prompts: Sequence[Prompt], steps: int) -> list[list[int]]:
    """Return the likeliest next tokens of each prompt."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    rows = [[PADDING] * (longest - len(prompt.tokens)) + prompt.tokens for prompt in prompts]
    tokens = torch.tensor(rows)
    real = F.pad(tokens != PADDING, (0, steps), value=True)
    where, after = positions.mrope_batch(
        (tokens == IMAGE).long(),
        model="qwen2_vl",
        images=[(1, *prompt.image) for prompt in prompts if prompt.image],
        attention_mask=real[:, :longest],
    )
    caches = new_caches(len(rows), longest + steps)
    at, found = 0, []
    for step in range(steps):
        logits = model(tokens, where, caches, at, real)
        at += tokens.shape[1]
        tokens = logits[:, -1:].argmax(-1)
        found.append(tokens)
        where = positions.text(positions.per_row(after + step), axes=3)
    made: list[list[int]] = torch.cat(found, 1).tolist()
    return made


@torch.no_grad()
def likeliest(model: Model, prompt: Prompt, continuation: list[int]) -> list[int]:
    """Return the likeliest token at each place of a continuation, from one pass over the prompt and all of it."""
    tokens = torch.tensor([prompt.tokens + continuation[:-1]])
    where, _ = positions.mrope_batch(
        (tokens == IMAGE).long(),
        model="qwen2_vl",
        images=[(1, *prompt.image)] if prompt.image else None,
    )
    slots = tokens.shape[1]
    real = torch.ones(1, slots, dtype=torch.bool)
    logits = model(tokens, where, new_caches(1, slots), 0, real)
    made: list[int] = logits[0, len(prompt.tokens) - 1 :].argmax(-1).tolist()
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate for all prompts together, and compare with each alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="tokens to generate (default: 12)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model()
    for prompt, together in zip(PROMPTS, generate(model, PROMPTS, options.steps), strict=True):
        assert together == likeliest(model, prompt, together)
        print(f"{prompt.tokens} -> {together}")


if __name__ == "__main__":
    main()
