"""Small random models of families of transformers, whose outputs depend on the rotation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.support.tolerances import value

TOKENS, DIM = 12, 16
_DATA = json.loads(Path(__file__).with_name("of_transformers.json").read_text(encoding="utf-8"))
DEFAULT, YARN, LLAMA3, DYNAMIC = (
    _DATA["rules"][name] for name in ("default", "yarn", "llama3", "dynamic")
)
#: Beyond 32 tokens the long factors count.
LONGROPE = _DATA["rules"]["longrope"]
#: Family -> its settings, with model_type.
FAMILIES: dict[str, dict[str, Any]] = {
    name: {**_DATA["every"], **own} for name, own in _DATA["families"].items()
}


def small_model(family: str, **settings: Any) -> Any:
    """Make a model in eval mode.

    Its weights keep the variance of activations, so that attention scores depend on angles.
    """
    config = AutoConfig.for_model(**{**FAMILIES[family], **settings})
    torch.manual_seed(0)
    maker: Any = AutoModel if family == "Qwen2.5-VL" else AutoModelForCausalLM
    model = maker.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    return model.eval()


def small_inputs(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Make two rows of tokens."""
    ids = torch.randint(5, 80, (2, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def outputs(model: Any, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the logits, or the hidden states of a model without a head."""
    found: torch.Tensor = model(**(inputs or small_inputs()))[0]
    return found


def gradients(
    model: Any, inputs: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the outputs, and the gradients of a loss that depends on all of them."""
    model.zero_grad()
    found = outputs(model, inputs)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weights).mean().backward()
    return found.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_outputs(got: torch.Tensor, want: torch.Tensor, name: str = "patched outputs") -> None:
    """Assert that outputs are close, relative to the largest magnitude in `want`; NaN fails."""
    assert got.shape == want.shape
    off = ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()
    assert off <= value(name), off


def assert_equal_runs(
    got: tuple[torch.Tensor, dict[str, torch.Tensor]],
    want: tuple[torch.Tensor, dict[str, torch.Tensor]],
) -> None:
    """Assert that outputs and gradients are equal, bit for bit except for the signs of zeros."""
    assert got[0].dtype == want[0].dtype
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name
