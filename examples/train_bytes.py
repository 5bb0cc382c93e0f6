"""Train a small language model with rotary position embedding, then generate text.

    python examples/train_bytes.py --steps 300

The model is a causal transformer over bytes. It trains on text that comes with Python: the
sources of the standard library. Positions enter only through the rotation in :class:`Attention`. The file
needs only torch and tightrope; copy from it freely. demo.py trains the model with this rotation
and with others, to compare them.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tightrope import RopeSpec, rotate_qk
from tightrope.nn import KVCache

VOCABULARY = 256
BASE = 10000.0
PEAK_RATE = 1e-3
TEMPERATURE = 0.6  # of the text that it writes
WARM_UP = 0.08  # the fraction of training in which the rate rises


@dataclass(frozen=True)
class Size:
    """Size of a model and of its training batches.

    Attributes:
        layers, heads, head_dim: size of the model; its width is heads × head_dim.
        context: bytes in a training window.
        batch: windows in a training step.
    """

    layers: int = 4
    heads: int = 4
    head_dim: int = 64
    context: int = 256
    batch: int = 8

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.heads * self.head_dim


# --- the model --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding."""

    def __init__(self, size: Size, base: float = BASE) -> None:
        super().__init__()
        self.heads, self.head_dim = size.heads, size.head_dim
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        # A spec is an immutable value, not a buffer: it is not in the state dict, and casts do not
        # change it.
        self.spec = RopeSpec(size.head_dim, base=base)

    def rotate(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Rotate q and k `(batch, heads, seq, head_dim)` at positions offset, offset + 1, …"""
        return rotate_qk(q, k, self.spec, offset, layout="bhsd")

    def forward(self, x: Tensor, offset: int, cache: KVCache | None) -> Tensor:
        """Attend over x `(batch, seq, width)`, whose first token has position `offset`."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        q, k = self.rotate(q, k, offset)
        if cache is not None:
            k, v = cache.append_(k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, size: Size, attention: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = attention
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, offset: int, cache: KVCache | None) -> Tensor:
        """See :class:`Attention`."""
        x = x + self.attention(self.norm_1(x), offset, cache)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return out


class ByteTransformer(nn.Module):
    """A causal transformer over bytes.

    Args:
        make_attention: makes the attention module of a block; blocks call the module with
            `(x, offset, cache)`.
    """

    def __init__(self, size: Size, make_attention: Callable[[Size], nn.Module] = Attention) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size, make_attention(size)) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and name.endswith("weight"):
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 1.0 / math.sqrt(2 * size.layers) if residual else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(
        self, tokens: Tensor, offset: int = 0, caches: list[KVCache] | None = None
    ) -> Tensor:
        """Logits `(batch, seq, 256)` for tokens `(batch, seq)` at positions offset, offset + 1, …"""
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, offset, None if caches is None else caches[index])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def losses(self, windows: Tensor) -> Tensor:
        """Cross-entropy in nats of each next byte in windows `(batch, seq + 1)`: `(batch, seq)`."""
        logits, wanted = self(windows[:, :-1]), windows[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.view(wanted.shape)


# --- the text ---------------------------------------------------------------------------------------

_MOST_BYTES, _LEAST_BYTES = 4_000_000, 20_000
# Skip installed packages, parts that not every machine has, and encodings, which are tables of numbers.
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
)


class Text(NamedTuple):
    """Bytes to train on and, from other files, bytes to validate on (both uint8)."""

    train: Tensor
    validation: Tensor


def load_text(folder: Path | None = None) -> Text:
    """Read at most about 4 MB of Python files in a fixed random order, every tenth for validation.

    Args:
        folder: the folder to read; by default the standard library.

    Raises:
        FileNotFoundError: the folder holds too few Python files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = sorted(
        path
        for path in folder.rglob("*.py")
        if _SKIPPED.isdisjoint(path.relative_to(folder).parts) and path.is_file()
    )
    random.Random(0).shuffle(paths)
    train, validation = bytearray(), bytearray()
    for number, path in enumerate(paths, start=1):
        (train if number % 10 else validation).extend(path.read_bytes())
        if len(train) + len(validation) >= _MOST_BYTES:
            break
    if min(len(train), len(validation)) < _LEAST_BYTES:
        raise FileNotFoundError(
            "The model trains on the sources of Python's standard library, and "
            f"{folder} holds too few .py files."
        )
    return Text(*(torch.frombuffer(part, dtype=torch.uint8) for part in (train, validation)))


def random_windows(
    text: Tensor, count: int, length: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return windows of `length` bytes at random places: `(count, length)`."""
    starts = torch.randint(0, text.numel() - length + 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """Return windows of `length` bytes at evenly spaced places: `(count, length)`."""
    starts = torch.linspace(0, text.numel() - length, count, dtype=torch.float64).long()
    return text[starts[:, None] + torch.arange(length)].long()


# --- training ---------------------------------------------------------------------------------------


class Trainer:
    """A model and its optimizer, with the loss of each step so far."""

    def __init__(self, model: ByteTransformer) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.losses: list[float] = []

    def step(self, windows: Tensor, rate: float) -> float:
        """Take one optimizer step and return the loss before it.

        Args:
            windows: bytes `(batch, context + 1)`.
            rate: the learning rate of this step.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model.losses(windows).mean()
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]


def schedule(done: float) -> float:
    """Return the learning rate as a fraction of its peak: linear warm-up, then cosine decay to 5%.

    Args:
        done: fraction of training that is done, from 0 to 1.
    """
    if done < WARM_UP:
        return 0.02 + 0.98 * done / WARM_UP
    return 0.05 + 0.475 * (1.0 + math.cos(math.pi * (done - WARM_UP) / (1.0 - WARM_UP)))


@torch.no_grad()
def validate(model: ByteTransformer, text: Tensor, batches: int = 6) -> float:
    """Return the mean loss in nats per byte on evenly spaced windows of a text."""
    size = model.size
    windows = even_windows(text, batches * size.batch, size.context + 1)
    return sum(model.losses(batch).mean().item() for batch in windows.chunk(batches)) / batches


@torch.no_grad()
def write(model: ByteTransformer, prompt: str, count: int) -> Iterator[tuple[int, Tensor]]:
    """Continue a prompt, one byte at a time, with a cache of rotated keys.

    Yields:
        Each new byte, and the logits from which it was sampled.
    """
    caches = [KVCache() for _ in model.blocks]
    tokens, offset = list(prompt.encode()), 0
    for _ in range(count):
        logits = model(torch.tensor([tokens]), offset, caches)[0, -1]
        offset += len(tokens)
        tokens = [int(torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), 1))]
        yield tokens[0], logits


def main(arguments: list[str] | None = None) -> None:
    """Train the model, validate it and generate text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    size, text = Size(), load_text()
    trainer = Trainer(ByteTransformer(size))
    for step in range(options.steps):
        windows = random_windows(text.train, size.batch, size.context + 1)
        loss = trainer.step(windows, PEAK_RATE * schedule(step / options.steps))
        if step % 20 == 0:
            print(f"step {step:4}  loss {loss:.3f} nats per byte")
    print(f"validation {validate(trainer.model, text.validation):.3f} nats per byte\n")
    written = bytes(byte for byte, _ in write(trainer.model, "def ", 200))
    print("def " + written.decode(errors="replace"))


if __name__ == "__main__":
    main()
