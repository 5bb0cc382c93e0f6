"""The audit of rotations whose frequencies depend on the length of a call, and of those that should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.support import planted_faults as planted
from tests.support.planted_faults import named
from tightrope import RopeSpec, functional
from tightrope.frequencies import DynamicNTK, LongRoPE
from tightrope_tools.audit import audit

ONLY_FLOAT32: dict[str, Any] = {"dtypes": [torch.float32]}
LONG = LongRoPE((1.0,) * 32, tuple(1.0 + i for i in range(32)), 512, attention_factor=1.0)


@pytest.mark.parametrize("original", [300, 2048, 65_536, 300_000])
def test_a_plain_function_where_dynamic_scaling_was_declared(original: int) -> None:
    spec = RopeSpec(64, scaling=DynamicNTK(2.0, original))
    report = named(audit(planted.PLAIN, spec=spec, **ONLY_FLOAT32), "scaling-ignored")
    assert report.findings[0].sentence.endswith("frequencies are those of RopeSpec(head_dim=64).")


@pytest.mark.parametrize("original", [65_536, 300_000])
def test_dynamic_scaling_that_begins_far_away_has_its_name(original: int) -> None:
    """The checks of small lengths do not reach it; that of angles does."""
    fn = planted.dynamic_ntk(original=original, by_batch=False)
    named(audit(fn, **ONLY_FLOAT32), "length")


@pytest.mark.parametrize(
    "own, meant", [(DynamicNTK(2.0, 2048), DynamicNTK(4.0, 2048)), (DynamicNTK(2.0, 2048), LONG)]
)
def test_frequencies_of_long_calls_that_are_not_the_declared_ones(own: Any, meant: Any) -> None:
    spec = RopeSpec(64, scaling=own)
    report = audit(
        lambda x, positions: functional.rotate(x, spec, positions),
        spec=RopeSpec(64, scaling=meant),
        **ONLY_FLOAT32,
    )
    sentence = named(report, "scaling").findings[0].sentence
    assert sentence == "The frequencies of long calls are not those of the declared scaling."


def test_long_factors_that_are_never_used() -> None:
    short = tuple(1.0 + i / 64 for i in range(32))
    spec = RopeSpec(64, scaling=LongRoPE(short, (8.0,) * 32, 512, attention_factor=1.0))
    fn = planted.by_rates(spec.frequencies(1).inv_freq.float())
    report = named(audit(fn, spec=spec, **ONLY_FLOAT32), "scaling")
    assert "do not depend on the length" in report.findings[0].sentence


def test_another_fault_of_a_function_with_a_declared_length_keeps_its_name() -> None:
    spec = RopeSpec(64, scaling=DynamicNTK(2.0, 2048))

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.rotate(x, spec, positions + (positions == 1000))

    named(audit(fn, spec=spec, **ONLY_FLOAT32), "far-angles")


# --- models of transformers -------------------------------------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


def llama(**fields: Any) -> Any:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    return transformers.LlamaModel(
        transformers.LlamaConfig(
            **sizes, intermediate_size=8, max_position_embeddings=512, **fields
        )
    )


def test_a_config_that_asks_for_dynamic_scaling_after_the_model_was_built() -> None:
    model = llama()
    model.config.rope_parameters = DYNAMIC
    named(audit(model, **ONLY_FLOAT32), "scaling-ignored")


def test_a_model_with_dynamic_scaling_that_was_used_has_no_other_fault_than_a_new_one() -> None:
    model = llama(rope_parameters=DYNAMIC)
    with torch.no_grad():
        model(torch.zeros(1, 700, dtype=torch.long))
    named(audit(model, **ONLY_FLOAT32), "history", "batch")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_scaling_that_was_written_after_building_is_a_finding() -> None:
    model = llama()
    model.config.rope_parameters = YARN  # as writing config.rope_scaling leaves it, without a base
    named(audit(model, **ONLY_FLOAT32), "amplitude", "scaling-ignored")


def test_a_configuration_that_cannot_be_read_is_a_finding() -> None:
    model = llama()
    model.config.rope_theta = 5e5  # beside that of the section
    report = named(audit(model, **ONLY_FLOAT32), "config-unread")
    assert "from_config" in report.findings[0].evidence
    assert report.facts["declared"] == "nothing: the configuration cannot be read"
    # With a declaration, the configuration is not needed.
    named(audit(model, spec=RopeSpec(32), **ONLY_FLOAT32))
