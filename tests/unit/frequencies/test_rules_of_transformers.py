"""Frequency rules, compared with those of transformers.

transformers computes in float32, so the tolerance is 1e-6 relative; test_rules.py checks more
digits. Where transformers differs from the papers or contradicts itself, the test explains this and
compares with the formula.
"""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support import oracle_frequencies as truth
from tests.support.tolerances import value
from tightrope import RopeSpec
from tightrope.frequencies import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rule, YaRN

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
    spec = RopeSpec(rotary_dim, base, scaling=rule)
    mine = spec.frequencies(seq_len)
    inv_freq, scaling = got
    assert inv_freq.dtype == torch.float32
    assert inv_freq.shape == mine.inv_freq.shape
    relative = value("frequency of transformers")
    bound = relative * inv_freq.double().abs()
    if isinstance(rule, YaRN):
        bound += value("ramp of transformers") * RopeSpec(rotary_dim, base).frequencies().inv_freq
    error = (mine.inv_freq - inv_freq.double()).abs()
    # Written so that NaN fails.
    assert bool((error <= bound).all()), (error / inv_freq).max()
    assert mine.attention_scaling == pytest.approx(scaling, rel=relative)
    assert spec.attention_scaling(seq_len) == mine.attention_scaling


# --- rules that both libraries define alike ------------------------------

RuleCase = tuple[Rule, int, float, dict[str, Any], "int | None", float]

# (head_dim, fraction that rotates, base)
HEADS = [
    (64, 1.0, 10000.0),
    (128, 1.0, 10000.0),
    (128, 1.0, 500000.0),
    (256, 1.0, 1000000.0),
    (80, 0.4, 10000.0),
    (96, 1.0, 10000.0),
    (128, 0.5, 150000.0),
]
TRAINED = 4096


def of_linear() -> Iterator[tuple[Rule, dict[str, Any], int | None]]:
    for factor in (1.0, 2.5, 8.0):
        yield Linear(factor), {"rope_type": "linear", "factor": factor}, None


def of_dynamic() -> Iterator[tuple[Rule, dict[str, Any], int | None]]:
    for factor, length in itertools.product(
        (1.0, 2.0, 8.0), (None, 1, TRAINED, TRAINED + 1, 3 * TRAINED, 40 * TRAINED)
    ):
        yield DynamicNTK(factor, TRAINED), {"rope_type": "dynamic", "factor": factor}, length


def of_yarn() -> Iterator[tuple[Rule, dict[str, Any], int | None]]:
    for factor, options in itertools.product(
        (1.0, 4.0, 40.0),
        (
            {},
            {"truncate": False},
            {"beta_fast": 16.0, "beta_slow": 2.0},
            {"attention_factor": 0.9},
            {"mscale": 0.707, "mscale_all_dim": 0.707},
            {"mscale": 1.0, "mscale_all_dim": 0.8},
            {"attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 0.8},
        ),
    ):
        section = {"rope_type": "yarn", "factor": factor, **options}
        section["original_max_position_embeddings"] = TRAINED
        yield YaRN(factor, TRAINED, **options), section, None  # type: ignore[arg-type]


def of_longrope(pairs: int) -> Iterator[tuple[Rule, dict[str, Any], int | None]]:
    short = [1.0 + 0.01 * k for k in range(pairs)]
    long = [1.0 + 0.5 * k for k in range(pairs)]
    for options, length in itertools.product(
        ({"factor": 32.0}, {"factor": 1.0}, {"attention_factor": 1.25}, {}),
        (None, TRAINED, TRAINED + 1, 10 * TRAINED),
    ):
        section = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **options}
        section["original_max_position_embeddings"] = TRAINED
        # A missing factor is max_position_embeddings / original_max_position_embeddings.
        given = options or {"factor": LONGEST / TRAINED}
        yield LongRoPE(short, long, TRAINED, **given), section, length  # type: ignore[arg-type]


def of_llama3() -> Iterator[tuple[Rule, dict[str, Any], int | None]]:
    for factor, (low, high) in itertools.product((8.0, 32.0), ((1.0, 4.0), (0.5, 16.0))):
        section = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": TRAINED,
        }
        yield Llama3(factor, low, high, TRAINED), section, None


def table() -> Iterator[Any]:
    for head_dim, share, base in HEADS:
        rotary_dim = int(head_dim * share)
        cases = itertools.chain(
            of_linear(), of_dynamic(), of_yarn(), of_longrope(rotary_dim // 2), of_llama3()
        )
        for number, (rule, section, length) in enumerate(cases):
            if share != 1.0:
                section = {**section, "partial_rotary_factor": share}
            name = f"{section['rope_type']}-{head_dim}-{rotary_dim}-{base:g}-{number}"
            yield pytest.param(rule, head_dim, rotary_dim, base, section, length, id=name)
        for share, factor in ((1.0, 1.0), (0.25, 1.0), (0.25, 8.0), (0.3, 1.0)):
            section = {"rope_type": "proportional", "partial_rotary_factor": share}
            if factor != 1.0:
                section["factor"] = factor
            name = f"proportional-{head_dim}-{base:g}-{share}-{factor}"
            rule = Proportional(share, factor)
            yield pytest.param(rule, head_dim, head_dim, base, section, None, id=name)


TABLE = list(table())


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 200
    assert {case.values[4]["rope_type"] for case in TABLE} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule, head_dim, rotary_dim, base, section, length", TABLE)
def test_rule(
    rule: Rule,
    head_dim: int,
    rotary_dim: int,
    base: float,
    section: dict[str, Any],
    length: int | None,
) -> None:
    # For dynamic NTK, max_position_embeddings is the original length; for other rules, the longest.
    longest = TRAINED if section["rope_type"] == "dynamic" else LONGEST
    config = config_of(head_dim, base, dict(section), longest)
    assert_same(rule, rotary_dim, base, theirs(config, length), length)


# --- where transformers is wrong ------------------------------------------------------------------


def test_dynamic_ntk_without_history() -> None:
    """Frequencies of dynamic NTK always follow the formula; those of transformers do not.

    transformers keeps the frequencies of the longest sequence until a sequence is shorter than the
    original length: 3,000 tokens after 6,000 get the frequencies of 6,000.
    """
    section = {"rope_type": "dynamic", "factor": 2.0}
    module = LlamaRotaryEmbedding(config_of(64, 1e4, section, longest=2048))
    spec = RopeSpec(64, 1e4, scaling=DynamicNTK(2.0, 2048))

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


def test_deepseeks_softmax_scale() -> None:
    """softmax_scaling is the square of transformers' yarn_get_mscale.

    DeepSeek-V3 attention in transformers multiplies its softmax scale by this square.
    """
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    for weight in (0.707, 1.0):
        rule = YaRN(40.0, 4096, mscale=weight, mscale_all_dim=weight)
        assert rule.softmax_scaling == pytest.approx(yarn_get_mscale(40.0, weight) ** 2, rel=1e-14)
        assert rule.frequencies(64, 1e4).attention_scaling == 1.0
