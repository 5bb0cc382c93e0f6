"""`compare` of the audit: planted differences of each kind are found and named; equal functions agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import call
from tests.support.planted_faults import named
from tightrope import Axes, RopeSpec, functional
from tightrope.frequencies import Linear, YaRN
from tightrope_tools.audit import Comparison, compare
from tightrope_tools.command import main

DIM = 64
Rope = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rope(
    *,
    interleaved: bool = False,
    width: int = DIM,
    shift: float = 0.0,
    sign: float = 1.0,
    base: float = 10000.0,
    slowed: int | None = None,
    frequency: torch.dtype = torch.float32,
    factor: float = 1.0,
    position: torch.dtype | str = torch.float32,
    angle: torch.dtype = torch.float32,
    table: torch.dtype | str = "x",
    rounding: str = "each",
    detach: bool = False,
) -> Rope:
    """Return a rotation in plain PyTorch; each argument changes one step of it."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64 if angle == torch.float64 else None)
    inv_freq = (1.0 / base ** (exponent / width)).to(frequency).to(angle)
    if slowed is not None:
        inv_freq[slowed] *= 0.5

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        where = positions.to(x.dtype if position == "x" else position).to(angle) + shift
        angles = sign * where[:, None, :, None] * inv_freq
        cos, sin = angles.cos() * factor, angles.sin() * factor
        cos, sin = (t.to(x.dtype if table == "x" else table) for t in (cos, sin))
        turned, rest = x[..., :width], x[..., width:]
        if interleaved:
            u, v = turned[..., 0::2], turned[..., 1::2]
        else:
            u, v = turned.chunk(2, -1)
        if rounding == "wide":
            u, v, cos, sin = u.float(), v.float(), cos.float(), sin.float()
        first, second = u * cos - v * sin, v * cos + u * sin
        if interleaved:
            y = torch.stack((first, second), -1).flatten(-2)
        else:
            y = torch.cat((first, second), -1)
        y = torch.cat((y.to(x.dtype), rest), -1)
        return y + (y.detach() - y) if detach else y

    return rotate


BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EXACT: dict[str, Any] = {"angle": F64, "frequency": F64}
# What differs -> how the two functions rotate, the code, and a part of the evidence.
PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "pairing": ({"interleaved": True}, {}, "pairing", "interleaved"),
    "slice": ({"width": 32}, {}, "slice", "0 to 31"),
    "direction": ({"sign": -1.0}, {}, "sign", "opposite"),
    "first position": ({"shift": 1.0}, {}, "positions", "+1 positions"),
    "base": ({"base": 500000.0}, {}, "frequencies", "31 of 32 pairs differ"),
    "one pair": ({"slowed": 7}, {}, "frequencies", "pair 7 turns by"),
    "frequencies in bfloat16": ({"frequency": BF16}, {}, "frequency-dtype", "pair"),
    "frequencies in float16": ({}, {"frequency": F16}, "frequency-dtype", "pair"),
    "frequencies in float64": (EXACT, {}, "frequency-dtype", "pair"),
    "angles in float64": ({"angle": F64}, EXACT, "frequency-dtype", "pair"),
    "attention factor": ({"factor": 1.2}, {}, "attention-factor", "1.2"),
    "positions in bfloat16": ({"position": BF16}, {}, "position-dtype", "bfloat16"),
    "positions in float16": ({}, {"position": F16}, "position-dtype", "float16"),
    "positions in the dtype of x": ({"position": "x"}, {}, "position-dtype", "the first: at"),
    "tables in float32": (
        {"table": F32, "rounding": "wide"},
        {"rounding": "wide"},
        "table-dtype",
        "float32",
    ),
    "tables in bfloat16": ({"table": BF16}, {}, "table-dtype", "bfloat16"),
    "roundings": ({"rounding": "wide"}, {}, "rounding", "the first: wide"),
    "gradients": ({"detach": True}, {}, "gradient-rounding", "the first: unknown"),
}
# Differences that an offset of the first function hides if angles are compared at the same positions.
BESIDE_AN_OFFSET = {
    *("base", "one pair", "frequencies in bfloat16", "attention factor", "positions in bfloat16"),
    *("positions in the dtype of x", "tables in bfloat16", "roundings"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_differences_are_named_first(name: str) -> None:
    """The first difference is the planted one, in both orders of the functions; an offset hides none."""
    one, other, code, evidence = PLANTED[name]
    first, second = rope(**one), rope(**other)
    for a, b in ((second, first), (first, second)):
        found = compare(a, b, head_dim=DIM)
        assert found.codes[0] == code, found
        assert any(part for share in found.shares.values() for part in share)
        assert Comparison.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert evidence in found.differences[0].evidence
    if name in BESIDE_AN_OFFSET:
        ahead = compare(rope(shift=1.0, **one), second, head_dim=DIM)
        named(ahead, "positions", *found.codes)


@pytest.mark.parametrize("shift", [1.0, -5.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sign": -1.0},
        {"base": 5e5, "interleaved": True},
        EXACT,
        {"table": BF16},
    ],
    ids=str,
)
def test_an_offset_alone_is_the_only_difference(shift: float, options: dict[str, Any]) -> None:
    """Later steps are compared at the same angles: an offset does not make them differ."""
    for a, b, ahead in ((shift, 0.0, shift), (0.0, shift, -shift), (shift, 2.0, shift - 2.0)):
        found = compare(rope(shift=a, **options), rope(shift=b, **options), head_dim=DIM)
        named(found, "positions")
        assert f"{ahead:+.0f} positions" in found.differences[0].evidence
        assert all(one == other for one, other in found.facts.values())


def test_an_offset_of_exact_rotations() -> None:
    """Some pairs are so slow that their turn by one position cannot be measured at position 0."""
    spec = RopeSpec(32, base=500_000.0)

    def ahead(by: int) -> Rope:
        return lambda x, positions: functional.rotate(x, spec, positions + by)

    named(compare(ahead(0), ahead(1), head_dim=32), "positions")


def test_offsets_that_are_equal_are_no_difference() -> None:
    named(compare(rope(shift=1.0), rope(shift=1.0), head_dim=DIM))
    other = rope(shift=1.0, base=5e5)
    named(compare(rope(shift=1.0), other, head_dim=DIM), "frequencies")


@pytest.mark.parametrize("shift", [0.5, -0.25])
def test_an_offset_by_a_fraction(shift: float) -> None:
    """No call removes it, so angles and the last bits of frequencies are not compared."""
    found = named(compare(rope(shift=shift), rope(), head_dim=DIM), "positions")
    assert f"{shift:+.4g} positions" in found.differences[0].evidence
    assert found.facts["angles"] == ("not compared", "not compared")
    found = compare(rope(shift=shift, base=5e5), rope(), head_dim=DIM)
    named(found, "positions", "frequencies")


def test_equal_functions_agree() -> None:
    for options in ({}, {"interleaved": True, "rounding": "wide"}, {"width": 32, "factor": 1.1}):
        found = named(compare(rope(**options), rope(**options), head_dim=DIM))  # type: ignore[arg-type]
        assert found.shares == dict.fromkeys(("float32", "bfloat16", "float16"), (0.0, 0.0))


@pytest.mark.parametrize(
    "stack, options", [("transformers", {}), ("diffusers", {"table": F32, "rounding": "wide"})]
)
def test_functions_and_stacks(stack: str, options: dict[str, Any]) -> None:
    """The arithmetic of a stack, written out, agrees with it; in the backward pass too."""
    found = compare(rope(**options), f"stack:{stack}", spec=RopeSpec(DIM))
    assert found.codes in ((), ("gradient-rounding",))
    assert all(share[0] == 0.0 for share in found.shares.values())


def test_yarn_of_litgpt_differs_from_that_of_transformers() -> None:
    """LitGPT keeps the slow pairs and divides the fast ones; YaRN does the opposite."""
    spec = RopeSpec(DIM, scaling=YaRN(4.0, 1024))
    found = compare("stack:litgpt", "stack:transformers", spec=spec)
    assert found.codes[:2] == ("frequencies", "attention-factor")
    assert "ratio 4" in found.differences[0].evidence
    named(compare("stack:vllm-native", "stack:transformers", spec=spec))


def test_linear_scaling_of_positions_differs_in_last_bits() -> None:
    """vLLM divides positions, transformers frequencies: the same but for roundings."""
    spec = RopeSpec(DIM, scaling=Linear(3.0))
    found = compare("stack:vllm-native", "stack:transformers", spec=spec)
    assert found.codes[0] in ("frequencies", "frequency-dtype", "angle-dtype", "cosines")
    assert found.shares["float32"][0] > 0.1


def test_models_and_configurations(tmp_path: Path) -> None:
    named(compare("llama", "stack:transformers"))
    config = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    named(compare(str(tmp_path), "stack:transformers"))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config | {"rope_theta": 5e5}))
    named(compare(str(tmp_path), str(other)), "frequencies")


def test_models_as_they_are() -> None:
    """A model that was cast is compared with its rounded frequencies."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 128, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=8)
    model = LlamaModel(config)
    named(compare(model, "stack:transformers"))
    found = compare(model, LlamaModel(config).bfloat16())
    assert found.codes[0] == "frequency-dtype"
    assert found.facts["frequencies"] == ("float32", "bfloat16")


def test_a_dtype_that_neither_function_accepts_is_left_out() -> None:
    def narrow(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float16:
            raise TypeError("no float16")
        return rope()(x, positions)

    found = named(compare(narrow, narrow, head_dim=DIM))
    assert found.shares.keys() == {"float32", "bfloat16"}
    found = named(compare(narrow, rope(), head_dim=DIM), "unexplained")
    assert found.shares["float16"] == (1.0, None)


def test_several_axes() -> None:
    spec = RopeSpec(DIM, axes=Axes.sections((8, 12, 12)))
    named(compare("stack:vllm-native", "stack:transformers", spec=spec))
    assert compare("stack:vllm", "stack:transformers", spec=spec).codes[0] == "rounding"


# --- the command ----------------------------------------------------------------------------


SPEC = "--head-dim 64 --base 10000".split()


@pytest.mark.parametrize(
    "other, code, words",
    [
        (
            "stack:transformers",
            1,
            ["table-dtype", "rounding", "of gradients differ", "the second: each"],
        ),
        ("stack:diffusers", 0, ["They agree to the bit"]),
    ],
)
def test_command(other: str, code: int, words: list[str]) -> None:
    found, output, _ = call(
        main, "audit", "stack:litgpt", "--against", other, *SPEC, "--no-isolate"
    )
    assert found == code
    assert [each for each in words if each not in " ".join(output.split())] == []


def test_command_in_json() -> None:
    stacks = "stack:transformers", "--against", "stack:vllm"
    code, output, _ = call(main, "audit", *stacks, *SPEC, "--json")
    assert code == 1
    assert Comparison.from_dict(json.loads(output)).codes[0] == "rounding"


STACKS = "stack:vllm", "stack:meta"


@pytest.mark.parametrize(
    "one, other, options, text",
    [
        ("stack:vllm", rope(), {}, r"\[compare\] stack:vllm must have a spec: give spec="),
        (
            "stack:vlm",
            rope(),
            {"spec": RopeSpec(8)},
            r"\[compare\] stack must be one of .* but got 'vlm'",
        ),
        (lambda: 3, rope(), {}, "must return a rotated x of the same shape but no call"),
        (
            lambda x, positions: x + 0 * positions.sum(),
            rope(),
            {"head_dim": DIM},
            "must rotate pairs of channels but does not",
        ),
        (
            *STACKS,
            {"layout": "hsbd"},
            r"\[compare\] layout must be one of bhsd, .* but got 'hsbd'",
        ),
        (*STACKS, {"tables": "whole"}, r"\[compare\] tables must be one of .* but got 'whole'"),
        (*STACKS, {"device": "cuda:99"}, r"\[compare\] device 'cuda:99' must be available"),
    ],
)
def test_errors(one: Any, other: Any, options: dict[str, Any], text: str) -> None:
    spec = {"spec": RopeSpec(DIM)} if one in STACKS and options else {}
    with pytest.raises(ValueError, match=text):
        compare(one, other, **spec | options)


def test_an_error_of_the_command() -> None:
    code, _, error = call(main, "audit", *STACKS[:1], "--against", STACKS[1], "--no-isolate")
    assert code == 2
    assert "must have a spec" in " ".join(error.split())
