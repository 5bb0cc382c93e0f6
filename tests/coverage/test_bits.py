"""The table of unequal bits of trainer and server: a row is measured again, and the page has every row."""

from __future__ import annotations

import re

import pytest
import torch

from tests.coverage import bits
from tests.support.matrix import every_pair
from tests.support.models.of_transformers import DEFAULT, YARN

# Warnings of the libraries' models are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")


#: Models of other rules, and one whose heads rotate in part.
MORE = {
    "linear": bits.Case("llama", 16, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, ""),
    "yarn": bits.Case("llama", 16, YARN, ""),
    "some channels": bits.Case("gpt_neox", 32, {**DEFAULT, "partial_rotary_factor": 0.5}, ""),
}
MODELS = {**bits.CASES, **MORE}


@every_pair(
    stack=("vllm", "vllm-native", "sglang"),
    name=tuple(MODELS),
    dtype=(torch.bfloat16, torch.float32, torch.float16),
)
def test_a_patched_trainer_has_the_bits_of_the_server(
    stack: str, name: str, dtype: torch.dtype
) -> None:
    """Forward and backward. In bfloat16, a fifth to a half of all numbers differ before the patch."""
    forward, patched, backward, also_patched = bits.shares(MODELS[name], stack, 64, dtype)
    assert patched == also_patched == 0
    if dtype == torch.bfloat16 and name in bits.CASES and stack in bits.SERVERS:
        assert 0.1 < forward < 0.6
        assert 0.1 < backward < 0.6


def test_the_page_has_a_row_for_each_model_and_server() -> None:
    text = bits.PAGE.read_text("utf-8").partition("<!-- bits -->")[2]
    found = re.findall(r"^\| (.+?) \| `(\w+)` \| \d+ % \| 0 \| \d+ % \| 0 \|", text, re.M)
    wanted = [(name, s) for name, case in bits.CASES.items() for s in bits.servers_of(case)]
    assert found == wanted
