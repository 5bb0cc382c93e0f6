"""How many numbers of q and k a trainer and a server rotate to other bits: `python -m tests.coverage.bits`.

For each model and server: the share of rotated q and k, and of their gradients, that differ between transformers, eager
and in bfloat16, and the stack of the server, before and after `patch(model, stack=…)`. Models are small and random, of the
classes of the published ones and with their rotation. The command writes the table of docs/parity.md.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModel

from benchmarks import pages
from tightrope import RopeSpec, patch, rotate_qk, unpatch
from tightrope.positions import multi_axis

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
SERVERS = ("vllm", "sglang")
TOKENS, STARTS = 1024, (0, 100_000)


class Case(NamedTuple):
    """A model.

    Attributes:
        kind: its model_type.
        width: the width of its heads, or of the part that rotates.
        rope: its published parameters.
        others: what differs between trainer and server beside the rotation.
        name: its class, if transformers has no automatic one.
    """

    kind: str
    width: int
    rope: dict[str, Any]
    others: str
    name: str = ""


GIVEN = json.loads(Path(__file__).with_name("bits.json").read_text("utf-8"))
CASES = {name: Case(**facts) for name, facts in GIVEN["models"].items()}


def made(case: Case, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A small random model."""
    rope = {"rope_type": "default", **case.rope}
    width = {"head_dim": case.width}
    if case.kind == "deepseek_v3":
        width |= {"qk_rope_head_dim": case.width, "qk_nope_head_dim": 128}
    settings = {**GIVEN["settings"], **width, "rope_parameters": rope}
    config = AutoConfig.for_model(case.kind, **settings, max_position_embeddings=131_072)
    home = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    maker = getattr(home, case.name)._from_config if case.name else AutoModel.from_config
    torch.manual_seed(0)
    # Not .bfloat16(), which would round the frequencies too: trainers do not.
    return maker(config, attn_implementation="eager", dtype=dtype)


def ids_of(spec: RopeSpec, tokens: int) -> torch.Tensor:
    """Positions of two rows, ``(rows, tokens)``; of an image in each for a spec of three axes, ``(3, rows, tokens)``."""
    ids = torch.tensor(STARTS)[:, None] + torch.arange(tokens)
    return ids if spec.axes is None else torch.stack((ids, ids // 32, ids % 32))


def runs(
    rotation: Callable[..., Any], width: int, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Rotated q and k, and their gradients, each in one tensor."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(len(STARTS), heads, tokens, width) for heads in (4, 2) * 2]
    draws = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    xs = [x.requires_grad_() for x in draws[:2]]
    ys = rotation(*xs)
    grads = torch.autograd.grad(ys, xs, draws[2:])
    return tuple(torch.cat([x.detach().flatten() for x in each]) for each in (ys, grads))


def shares(
    case: Case, server: str, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16
) -> list[float]:
    """The shares of unequal numbers: forward before and after the patch, then backward."""
    model = made(case, dtype)
    spec: Any = RopeSpec.from_config(model.config)
    ids = ids_of(spec, tokens)
    plain = torch.arange(case.width)
    # transformers returns adjacent pairs as two halves.
    order = plain.view(2, -1).T.flatten() if spec.interleaved else plain
    file = sys.modules[type(model).__module__]

    def trainers(q: torch.Tensor, k: torch.Tensor) -> Any:
        # Looked up now: a patch puts another function under the name.
        rotate = getattr(file, "apply_rotary_pos_emb_interleave", file.apply_rotary_pos_emb)
        return [y[..., order] for y in rotate(q, k, *model.rotary_emb(q, ids))]

    def servers(q: torch.Tensor, k: torch.Tensor) -> Any:
        rope = spec.at(ids if spec.axes is None else multi_axis(ids), stack=server)
        # A spec may begin after channels that do not turn.
        whole = (torch.nn.functional.pad(x, (spec.start, 0)) for x in (q, k))
        return [y[..., spec.start :] for y in rotate_qk(*whole, rope)]

    wanted = runs(servers, case.width, tokens, dtype)
    before = runs(trainers, case.width, tokens, dtype)
    report = patch(model, stack=server)
    if report.left or f"cosines and sines of {server}" not in str(report):
        raise RuntimeError(f"{case.kind}: {report}")
    try:
        after = runs(trainers, case.width, tokens, dtype)
    finally:
        unpatch(model)
    return [
        float((found != want).double().mean())
        for want, *both in zip(wanted, before, after, strict=True)
        for found in both
    ]


def servers_of(case: Case) -> Sequence[str]:
    """The stacks of a model; SGLang rotates M-RoPE in a kernel of Triton, whose bits no stack has."""
    return SERVERS[:1] if "mrope_section" in case.rope else SERVERS


HEADINGS = ("model", "stack", "q, k", "after", "gradients", "after", "not the rotation's business")


def row(name: str, server: str, found: Sequence[float]) -> list[str]:
    """A row of the table."""
    cells = [f"{100 * share:.0f} %" if share > 0.005 else f"{share:.1g}" for share in found]
    return [name, f"`{server}`", *cells, CASES[name].others]


def rows() -> Iterator[list[str]]:
    """Measure every row."""
    for name, case in CASES.items():
        for server in servers_of(case):
            yield row(name, server, shares(case, server))


if __name__ == "__main__":
    pages.between_marks(PAGE, "bits", "\n".join(pages.table(HEADINGS, rows())))
