"""The table of unequal bits of trainer and server: a row is measured again, and the page has every row."""

from __future__ import annotations

import re

import pytest

from tests.coverage import bits

# Warnings of the libraries' models are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name, server",
    [
        ("Qwen3", "vllm"),
        ("gpt-oss", "sglang"),
        *[
            pytest.param(name, server, marks=pytest.mark.slow)
            for name, case in bits.CASES.items()
            for server in bits.servers_of(case)
        ],
    ],
)
def test_a_patched_trainer_has_the_bits_of_the_server(name: str, server: str) -> None:
    """Before the patch a fifth to a half of all numbers differ; after it none."""
    forward, patched, backward, also_patched = bits.shares(name, server, tokens=64)
    assert 0.1 < forward < 0.6
    assert 0.1 < backward < 0.6
    assert patched == also_patched == 0


def test_the_page_has_a_row_for_each_model_and_server() -> None:
    text = bits.PAGE.read_text("utf-8").partition("<!-- bits -->")[2]
    found = re.findall(r"^\| (.+?) \| `(\w+)` \| \d+ % \| 0 \| \d+ % \| 0 \|", text, re.M)
    wanted = [(name, s) for name, case in bits.CASES.items() for s in bits.servers_of(case)]
    assert found == wanted


def test_a_share_is_written_so_that_few_do_not_look_like_none() -> None:
    assert bits.row("Qwen3", "vllm", [0.25, 0, 0.0049, 2e-6])[2:6] == [
        "25 %",
        "0",
        "0.005",
        "2e-06",
    ]
