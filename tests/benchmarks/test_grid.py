"""The grid of shapes: every kind of case measures right results, and results become a table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import grid

#: Cases that differ in what they rotate.
KINDS = (
    "prefill 2048",
    "4096 rows x 1 token",
    "decode 64 x 32+8 heads",
    "ids per row",
    "interleaved 8 x 512",
    "bshd",
    "sliced qkv",
    "partial 32 of 128",
    "strided",
    "tables only",
    "in place 128",
    "training 512",
)


@pytest.mark.parametrize("name", KINDS)
def test_all_contenders_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in grid.CASES if case.name == name)
    rows, heads, tokens, width = case.shape
    case = replace(
        case,
        shape=(min(rows, 3), min(heads, 4), min(tokens, 9), width),
        k_heads=min(case.k_heads, 4),
    )
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(grid, "medians", lambda runs, _: (dict.fromkeys(runs, 1.0), False))
    kept = torch.get_num_threads()
    try:
        assert grid.measure(case, "fp32x2") == (1.0, 1.0, False, False)
    finally:
        torch.set_num_threads(kept)


def test_a_wrong_result_is_an_error() -> None:
    x = torch.ones(1, 2, 3, 4)
    runs = {"eager": lambda: (x,), "compiled": lambda: (x * torch.nan,)}
    assert grid.wrong_ones(runs, (x.double(),), lambda: None) == {"compiled"}
    with pytest.raises(RuntimeError, match="the results of ours, bad are off"):
        grid.wrong_ones({"ours, bad": lambda: (x + 1e-3,)}, (x.double(),), lambda: None)


def test_medians_are_of_the_calls_that_they_name() -> None:
    x = torch.ones(1 << 18)
    found, _ = grid.medians({"short": lambda: None, "long": lambda: x.cos()}, lambda: None)
    assert found["short"] < found["long"]


def test_the_page_shows_what_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    cases = [
        {"case": "a, fp32", "goal": 1.0, "eager": [2.0, 3.0, 1.5], "compiled": [1.2, 0.9, 1.1]},
        {
            "case": "b, fp32",
            "goal": 0.9,
            "eager": [0.8, 0.8, 2.0],
            "compiled": [1.2, 0.9, 0.7],
            "wrong": True,
        },
    ]
    here = {"instruction_set": "avx2", "processor": "Intel(R) P Processor", "cores": 2}
    file.write_text(json.dumps({"environment": here, "cases": cases}))
    text = grid.page([file])
    assert "| a, fp32 | 1.10 (0.90 to 1.20) |" in text
    assert "| b, fp32 | **0.80 (0.70 to 0.80)** |" in text
    assert "| time of the better of eager and compiled code / ours | Intel P, avx2 |" in text
    assert "goal (1, or 0.9 below 64 Ki elements): 1 of 2 on Intel P, avx2. 2 cores." in text
    assert text.endswith("Torch's results were wrong on Intel P, avx2 in: b, fp32.")
