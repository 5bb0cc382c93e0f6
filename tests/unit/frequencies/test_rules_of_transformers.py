"""Frequency rules, compared with those of transformers.

transformers computes in float32, so the tolerance is 1e-6 relative; test_rules.py checks more
digits. Where transformers differs from the papers or contradicts itself, the test explains this and
compares with the formula.
"""

import logging
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support import oracle_frequencies as truth
from tests.support.tolerances import value
from tightrope import RopeSpec
from tightrope.frequencies import RULES, DynamicNTK, Rule, YaRN

# transformers logs warnings about factors that do not fit lengths, for every configuration.
logging.getLogger("transformers").setLevel(logging.ERROR)

LONGEST = 131072


def config_of(
    head_dim: int, base: float, parameters: dict[str, Any], longest: int = LONGEST
) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": base, **parameters},
    )


def theirs(
    config: transformers.PreTrainedConfig, seq_len: int | None = None, layer: str | None = None
) -> tuple[torch.Tensor, float]:
    section = config.rope_parameters if layer is None else config.rope_parameters[layer]
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[section["rope_type"]](
        config, device=torch.device("cpu"), seq_len=seq_len, layer_type=layer
    )
    return inv_freq, float(scaling)


def assert_same(
    rule: Rule, rotary_dim: int, base: float, got: tuple[Any, float], seq_len: int | None = None
) -> None:
    spec = RopeSpec(rotary_dim, base=base, scaling=rule)
    mine = spec.frequencies(seq_len)
    inv_freq, scaling = got
    assert inv_freq.dtype == torch.float32
    assert inv_freq.shape == mine.inv_freq.shape
    relative = value("frequency of transformers")
    bound = relative * inv_freq.double().abs()
    if isinstance(rule, YaRN):
        bound += (
            value("ramp of transformers") * RopeSpec(rotary_dim, base=base).frequencies().inv_freq
        )
    error = (mine.inv_freq - inv_freq.double()).abs()
    # Written so that NaN fails.
    assert bool((error <= bound).all()), (error / inv_freq).max()
    assert mine.attention_scaling == pytest.approx(scaling, rel=relative)
    assert spec.attention_scaling(seq_len) == mine.attention_scaling


def test_every_type_has_a_rule() -> None:
    """tests/unit/stacks/test_stacks.py compares their numbers."""
    assert set(ROPE_INIT_FUNCTIONS) <= RULES.keys()


# --- where transformers is wrong ------------------------------------------------------------------


def test_dynamic_ntk_without_history() -> None:
    """Frequencies of dynamic NTK always follow the formula; those of transformers do not.

    transformers keeps the frequencies of the longest sequence until a sequence is shorter than the
    original length: 3,000 tokens after 6,000 get the frequencies of 6,000.
    """
    section = {"rope_type": "dynamic", "factor": 2.0}
    module = LlamaRotaryEmbedding(config_of(64, 1e4, section, longest=2048))
    spec = RopeSpec(64, base=1e4, scaling=DynamicNTK(2.0, 2048))

    def after(length: int) -> torch.Tensor:
        module(torch.zeros(1, 1, 64), torch.arange(length)[None])
        return module.inv_freq.double()

    bound = value("frequency of transformers")
    seen = {}
    for length in (3000, 6000, 3000):
        seen[length] = after(length)
        formula = torch.tensor(
            [float(omega) for omega in truth.dynamic_ntk(64, 1e4, 2.0, 2048, length)]
        )
        torch.testing.assert_close(
            spec.frequencies(length).inv_freq, formula.double(), rtol=bound, atol=0
        )
    # The third call returns the result of the second, 60 % below the formula at the slowest pair.
    assert torch.equal(seen[3000], seen[6000])
    assert (seen[3000][-1] / spec.frequencies(3000).inv_freq[-1]).item() < 0.6


def test_truncate_in_nested_configurations() -> None:
    """`truncate=False` follows the formula; transformers ignores it inside a layer type.

    transformers reads `truncate` next to the layer types, so it truncates the ramp.
    """
    section = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    config = config_of(64, 150000.0, dict(section))
    config.layer_types = ["full_attention"]
    config.rope_parameters = {"full_attention": dict(section)}
    nested = theirs(config, layer="full_attention")
    assert_same(YaRN(32.0, 4096, truncate=True), 64, 150000.0, nested)
    flat = theirs(config_of(64, 150000.0, dict(section)))
    rule = YaRN(32.0, 4096, truncate=False)
    assert_same(rule, 64, 150000.0, flat)
    formula = truth.yarn(64, 150000.0, 32.0, 4096, truncate=False)
    made = rule.frequencies(64, 150000.0).inv_freq.tolist()
    assert made == pytest.approx([float(omega) for omega in formula], rel=1e-14)
    assert not torch.allclose(nested[0], flat[0], rtol=0.1, atol=0)


@pytest.mark.parametrize(
    "given", [{"mscale": 0.5}, {"mscale_all_dim": 1.0}, {"mscale": 0.0, "mscale_all_dim": 1.0}]
)
def test_one_mscale_alone(given: dict[str, float]) -> None:
    """A missing mscale counts as 1 and a missing mscale_all_dim as 0, as in DeepSeek's own code.

    That code defines these keys. transformers uses them only if both are given and neither is 0.
    """
    section = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    inv_freq, scaling = theirs(config_of(64, 1e4, section | given))
    rule = YaRN(40.0, 4096, **given)  # type: ignore[arg-type]
    made = rule.frequencies(64, 1e4)
    assert made.attention_scaling == float(truth.yarn_attention(40.0, **given))
    assert scaling == pytest.approx(float(truth.yarn_attention(40.0)), rel=1e-14)
    assert made.attention_scaling != pytest.approx(scaling, rel=0.05)
    assert_same(rule, 64, 1e4, (inv_freq, made.attention_scaling))
