"""Frequencies that depend on tensors of the weights, which no configuration contains."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._errors import describe
from ..frequencies import Given
from ..spec import RopeSpec
from .source import Source, fail

# `Family.learned` -> the frequencies, from the tensor of that name and from those of the configuration.
_FREQUENCIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "alpha": lambda alpha, inv_freq: inv_freq * alpha.exp(),
    "inv_freq": lambda stored, _: stored,
    # A table with sines in the first half of a row; row 1 has the angles of position 1.
    "embed_positions.weight": lambda table, _: torch.atan2(*table[1].chunk(2)),
}
# Tensors that hold what the configuration gives, unless other weights are loaded.
_COPIES = ("inv_freq", "embed_positions.weight")


def given_for(source: Source, spec: RopeSpec) -> tuple[Given, str] | None:
    """The frequencies that the caller or the weights give, and their source; None if they are those of the spec."""
    name = None if source.family is None else source.family.learned
    given, origin = source.stated.inv_freq, "the argument inv_freq"
    if given is not None and source.family is not None and name is None:
        fail(
            f"inv_freq must be None for {source.name}, whose code computes the frequencies from its configuration, "
            f"but got {describe(given)}"
        )
    if given is None and name is not None:
        stored = _of_model(source, spec, name)
        if stored is None and name not in _COPIES:
            fail(
                f"the frequencies of {source.name} depend on its tensor {name}, which only its weights hold; pass the "
                f"model in place of its configuration, or inv_freq, the frequencies that it rotates by"
            )
        if stored is not None and not spec.frequencies().are(stored):
            given, origin = Given.of(stored), f"{name} of the model"
    if given is None:
        return None
    if spec.by_length or spec.attention_scaling() != 1.0:
        fail(
            "frequencies from weights must come with one set of frequencies for all lengths, and no factor on the "
            f"channels, but got {spec.scaling}"
        )
    return given, origin


def _of_model(source: Source, spec: RopeSpec, name: str) -> torch.Tensor | None:
    """The frequencies by a tensor of the model; None without a model or values."""
    inv_freq, found = spec.frequencies().inv_freq, list[tuple[str, torch.Tensor]]()
    for key, tensor in () if source.model is None else source.model.state_dict().items():
        if f".{key}".endswith(f".{name}") and not tensor.is_meta:
            values = _FREQUENCIES[name](tensor.double().cpu(), inv_freq)
            found.append((key, values.to(tensor.dtype) if name in _COPIES else values))
    for key, values in found:
        if not torch.equal(values, found[0][1]):
            fail(f"{name} must be the same in all layers but {found[0][0]} and {key} differ")
    return found[0][1] if found else None
