"""Notes on lengths and factors that contradict each other name the number that was probably meant."""

from __future__ import annotations

import pytest

from tightrope_tools.inspect import inspect

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "original", "factor", "end"),
    [
        ("llama3", 4096, 4.0, "the length after it, probably 1,024."),
        ("llama3", 4096, 3.0, "the length after it."),
        ("yarn", 4096, 4.0, "before the extension, probably 1,024."),
        ("yarn", 4096, 3.0, "before the extension."),
        *(
            (kind, 8192, 2.0, "before the extension, probably 2,048.")
            for kind in ("yarn", "llama3")
        ),
        *((kind, 1024, 4.0, None) for kind in ("yarn", "llama3")),
    ],
)
def test_the_original_length(kind: str, original: int, factor: float, end: str | None) -> None:
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        **(LLAMA3 if kind == "llama3" else {}),
    }
    (part,) = inspect({**LLAMA, "rope_scaling": scaling}).parts
    codes = ("original-length", "unextended")
    found = [note.text for note in part.notes if note.code in codes]
    if found and kind == "yarn" and original == 4096:
        assert f"the extended one is {4096 * factor:,.0f}" in found[0]
    assert [text.endswith(end or "") for text in found] == [True] * (end is not None)


@pytest.mark.parametrize("factor, inverse", [(0.25, "4"), (0.125, "8"), (1 / 3, "3")])
def test_a_factor_below_one_is_probably_an_inverse(factor: float, inverse: str) -> None:
    scaling = {"rope_type": "dynamic", "factor": factor}  # for the other rules the file is refused
    (note,) = inspect({**LLAMA, "rope_scaling": scaling}).warnings
    assert note.code == "factor"
    assert note.text.endswith(f"probably the inverse, {inverse}.")
    with pytest.raises(ValueError, match=rf"; its inverse is {inverse}\."):
        inspect({**LLAMA, "rope_scaling": {**scaling, "rope_type": "linear"}})


def test_lengths_without_a_factor_are_probably_swapped() -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 8192, **factors}
    texts = {note.code: note.text for note in inspect({**LLAMA, "rope_scaling": scaling}).warnings}
    assert texts["original-length"].endswith("before the extension, or the two are swapped.")
    assert texts["factor"].endswith("probably the inverse, 2.")


@pytest.mark.parametrize(
    "scaling, call",
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32},
            r"rope_scaling.beta_fast must be at least rope_scaling.beta_slow but got 1 and 32; they are probably "
            r"swapped\.",
        ),
        (
            {
                **LLAMA3,
                "rope_type": "llama3",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
            | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
            r"rope_scaling.high_freq_factor must be at least rope_scaling.low_freq_factor but got 1.0 and 4.0; they are "
            r"probably swapped\.",
        ),
    ],
)
def test_swapped_limits_are_named(scaling: dict[str, object], call: str) -> None:
    with pytest.raises(ValueError, match=call):
        inspect({**LLAMA, "rope_scaling": scaling})
