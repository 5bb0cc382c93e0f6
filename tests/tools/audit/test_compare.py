"""`compare` of the audit: planted differences of each kind are found and named; equal functions agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import planted_faults as planted
from tests.support.planted_faults import named
from tests.support.records import conversion, write_record
from tests.support.rows import read_rows
from tightrope import Axes, RopeSpec, functional
from tightrope.frequencies import Linear, Llama3, YaRN
from tightrope_tools.audit import compare

DIM = 64
Rope = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rope(
    *,
    base: float = 10000.0,
    width: int = DIM,
    slowed: int | None = None,
    angle: str = "float32",
    frequency: str = "float32",
    detach: bool = False,
    **row: Any,
) -> Rope:
    """Return a rotation in plain PyTorch, whose frequencies and tables have the dtypes of transformers.

    Args:
        slowed: a pair whose frequency is halved.
        angle, frequency: the dtypes in which angles are computed, and to which frequencies are rounded before.
        detach: whether the gradient is that of another rounding.
        row: as for planted faults.
    """
    exponent = torch.arange(0, width, 2, dtype=getattr(torch, angle)) / width
    rates = (1.0 / base**exponent).to(getattr(torch, frequency)).to(exponent)
    if slowed is not None:
        rates[slowed] *= 0.5
    usual = {"table_type": "x", "rounding": "each"}
    rotate = planted.rope(rates=rates, rotary_dim=width, **usual | planted.known(row))
    if not detach:
        return rotate

    def detached(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = rotate(x, positions)
        return y + (y.detach() - y)

    return detached


ROWS = read_rows(Path(__file__).with_name("compare.jsonl"))
BITS = dict.fromkeys(("float32", "bfloat16", "float16"), (0.0, 0.0))


@pytest.mark.parametrize("name", ROWS)
def test_planted_differences_are_named_first(name: str) -> None:
    """The first difference is the planted one, in both orders of the functions; and beside an offset."""
    row = ROWS[name]
    first, second, code = row.get("first", {}), row.get("second", {}), row["code"]
    for a, b in ((first, second), (second, first)):
        found = compare(rope(**a), rope(**b), head_dim=DIM)
        assert [
            each["code"] for each in json.loads(json.dumps(found.to_dict()))["differences"]
        ] == [*found.codes]
        if code is None:
            assert named(found).shares == BITS
            continue
        assert found.codes[0] == code, found
        assert a is not first or row["evidence"] in found.differences[0].evidence
        assert any(part for share in found.shares.values() for part in share)
        if row.get("alone"):
            named(found, code)
        if row.get("beside") and a is first:
            both = compare(rope(**a, shift=1.0), rope(**b), head_dim=DIM)
            named(both, "positions", *found.codes)


def at(moved: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Rope:
    """Return a rotation by positions that `moved` makes of x and those passed."""
    return lambda x, positions: rope()(x, moved(x, positions))


def ahead(positions: torch.Tensor, part: slice) -> torch.Tensor:
    more = torch.zeros_like(positions)
    more[part] = 1
    return positions + more


def heads_from_2_ahead(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.cat((rope()(x[:, :2], positions), rope()(x[:, 2:], positions + 1)), 1)


# Faults that show in some calls alone -> the function, the first code, and a part of the sentence.
ELSEWHERE: dict[str, tuple[Rope, str, str]] = {
    "the second row": (at(lambda _, p: ahead(p, slice(1, 2))), "batch", "rows in its batch"),
    "rows": (at(lambda _, p: p[:1].expand_as(p)), "row-positions", "positions of row 0"),
    "heads": (heads_from_2_ahead, "heads", "head 2 differs"),
    "a token alone": (at(lambda x, p: p + (x.shape[2] == 1)), "shape-dependent", "one token"),
    "a clamp": (at(lambda _, p: p.clamp(max=4095)), "table-clamp", "4,096"),
    "a modulus": (at(lambda _, p: p % 4096), "table-wrap", "4,096"),
    "a jump": (at(lambda _, p: p + (p > 8192)), "position-jump", "off by +1"),
    "no gradient": (lambda x, p: rope()(x.detach(), p), "gradient-missing", "missing"),
    "x in 16 bits": (lambda x, p: rope()(x.bfloat16().to(x.dtype), p), "not-linear", "16 bits"),
    "one position": (at(lambda _, p: p + (p == 1000)), "calls", "5,000 tokens"),
    "long calls": (at(lambda x, p: p + (x.shape[2] >= 3000)), "calls", "5,000 tokens"),
    "without gradients": (
        at(lambda _, p: p + (not torch.is_grad_enabled())),
        *("calls", "a token at position 0, without gradients"),
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_shows_in_some_calls_alone_is_found(name: str) -> None:
    wrong, code, words = ELSEWHERE[name]
    for a, b in ((rope(), wrong), (wrong, rope())):
        found = compare(a, b, head_dim=DIM)
        assert found.codes[0] == code, found
        assert words in found.differences[0].sentence
        assert not {*found.codes} & {"angle-dtype", "gradient-rounding"} or code == "not-linear"
    named(compare(wrong, wrong, head_dim=DIM))


def test_functions_that_overwrite_x() -> None:
    """The other one must not see it."""
    spec, many = RopeSpec(DIM), 39

    def plain(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.rotate(x, spec, positions)

    def in_place(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.rotate_(x, spec, positions)

    def ahead_of_many_heads(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.rotate_(x, spec, positions + (x.shape[1] > many))

    for one, other in ((plain, in_place), (in_place, plain), (in_place, in_place)):
        named(compare(one, other, head_dim=DIM))
    named(compare(in_place, ahead_of_many_heads, head_dim=DIM), "calls")
    keys = planted.on_both(planted.PLAIN, planted.PLAIN), planted.on_both(planted.PLAIN, None)
    named(compare(*keys, head_dim=DIM), "k-not-rotated")


def test_rows_that_are_off_by_different_numbers() -> None:
    """Both depend on the other rows of a batch, so that finding does not tell them apart."""
    one, other = (at(lambda _, p, n=n: p + n * torch.arange(len(p))[:, None]) for n in (1, 5))
    named(compare(one, other, head_dim=DIM), "calls")
    named(compare(one, one, head_dim=DIM))


EXACT = {"angle": "float64", "frequency": "float64"}
BESIDE = ({}, {"sign": -1.0}, {"base": 5e5, "interleaved": True}, EXACT, {"table_type": "bfloat16"})


@pytest.mark.parametrize("shift", [1.0, -1.0, 5.0, 100.0])
@pytest.mark.parametrize("options", BESIDE, ids=str)
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


@pytest.mark.parametrize("shift", [0.5, -0.25])
def test_an_offset_by_a_fraction(shift: float) -> None:
    """No call removes it, so angles and the last bits of frequencies are not compared."""
    found = named(compare(rope(shift=shift), rope(), head_dim=DIM), "positions")
    assert f"{shift:+.4g} positions" in found.differences[0].evidence
    assert found.facts["angles"] == ("not compared", "not compared")
    found = compare(rope(shift=shift, base=5e5), rope(), head_dim=DIM)
    named(found, "positions", "frequencies")


SCALED: dict[str, tuple[RopeSpec, RopeSpec, str]] = {
    "lost": (
        *(RopeSpec(DIM, scaling=Llama3(8.0, 1.0, 4.0, 8192)), RopeSpec(DIM)),
        "The second does not apply the scaling of the first.",
    ),
    "added": (
        *(RopeSpec(DIM), RopeSpec(DIM, scaling=Linear(4.0))),
        "The first does not apply the scaling of the second.",
    ),
    "another": (
        *(RopeSpec(DIM, scaling=Linear(8.0)), RopeSpec(DIM, scaling=Linear(4.0))),
        "Frequencies are scaled by different rules.",
    ),
    "base": (RopeSpec(DIM), RopeSpec(DIM, base=5e5), "The bases of the frequencies differ."),
}


@pytest.mark.parametrize("name", SCALED)
def test_the_rule_behind_different_frequencies_is_named(name: str) -> None:
    one, other, sentence = SCALED[name]
    functions = [lambda x, positions, s=s: functional.rotate(x, s, positions) for s in (one, other)]
    (difference,) = named(compare(*functions, head_dim=DIM), "frequencies").differences
    assert difference.sentence == sentence
    assert repr(one.scaling or other.scaling or other.base)[:6] in difference.evidence


def flat(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Rotate q and k ``(tokens, heads * channels)``, as vLLM lays them out."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, -1, x.shape[-1] // DIM, DIM).transpose(1, 2)
        return rope()(heads, positions[None]).transpose(1, 2).reshape(x.shape)

    return turned(query), turned(key)


def test_layouts_are_aligned_before_results_are_counted() -> None:
    for a, b in ((rope(), flat), (flat, rope())):
        found = named(compare(a, b, head_dim=DIM))
        assert found.shares == BITS


def apply(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float = 1.0
) -> tuple[torch.Tensor, ...]:
    cos, sin = cos[:, None], sign * sin[:, None]
    halves = [torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) for x in (q, k)]
    return tuple(x * cos + half * sin for x, half in zip((q, k), halves))


TAKERS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "the same": (apply, {}, ()),
    "an offset and a factor": (apply, {"shift": 3.0, "amplitude": 1.2, "base": 5e5}, ()),
    "rounded positions": (apply, {"types": {"p_type": "bfloat16"}}, ()),
    "another direction": (partial(apply, sign=-1.0), {}, ("sign",)),
    "both backwards": (partial(apply, sign=-1.0), {"sign": -1.0}, ()),
    "roundings": (apply, {"rounding": "wide"}, ("rounding", "gradient-rounding")),
}


@pytest.mark.parametrize("name", TAKERS)
def test_a_function_that_takes_tables_gets_those_of_the_other(name: str) -> None:
    taker, options, codes = TAKERS[name]
    for a, b in ((rope(**options), taker), (taker, rope(**options))):
        found = compare(a, b, form=None, head_dim=DIM)
        named(found, *codes)
        assert found.facts["angles"] == ("not compared", "not compared")
        assert any(share[0] for share in found.shares.values()) == bool(codes)


def test_tables_of_another_dtype_are_not_counted() -> None:
    found = compare(rope(table_type="float32", rounding="wide"), apply, head_dim=DIM)
    assert found.shares.keys() == {"float32"}
    assert found.facts["results, bfloat16"] == ("not compared", "not compared")


def test_functions_that_know_the_dtype_of_x() -> None:
    def strange(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        far = x.dtype != torch.float32
        return rope()(x, positions + far * (positions * positions) % 7)

    named(compare(strange, strange, head_dim=DIM))
    assert compare(strange, rope(), head_dim=DIM).codes[0] == "angles"


@pytest.mark.parametrize(
    "stack, options",
    [("transformers", {}), ("diffusers", {"table_type": "float32", "rounding": "wide"})],
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
    for pairing, codes in (("half", ()), ("interleaved", ("record",))):
        write_record(tmp_path, conversion(pairing))
        named(compare(str(tmp_path), "stack:transformers"), *codes)
        named(compare("stack:transformers", str(tmp_path)), *codes)


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


def test_equal_numbers_of_another_dtype_differ() -> None:
    found = compare(rope(), lambda x, positions: rope()(x, positions).float(), head_dim=DIM)
    assert {name: share[0] for name, share in found.shares.items()} == {
        "float32": 0.0,
        "bfloat16": 1.0,
        "float16": 1.0,
    }
    assert not found.ok
